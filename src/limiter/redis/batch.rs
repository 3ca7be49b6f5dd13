//! A batch: the requests of one script call, and their results.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::sync::oneshot;
use tokio::sync::oneshot::{Receiver, Sender};

use crate::limiter::algorithm::{Rule, Status};
use crate::limiter::key::Identity;
use crate::limiter::metrics::LimiterMetrics;
use crate::limiter::redis::StateLayout;
use crate::limiter::redis::error::is_connection_error;
use crate::limiter::redis::script;
use crate::limiter::redis::script::{AlgorithmSet, LimitArgs, Script, ScriptReply, ScriptVariant, script};
use crate::limiter::usage;
use crate::limiter::usage::{UsageDay, UsageDays};
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// Maximum weight of a call with several requests ([`request_weight`]). Redis runs a script without interruption. The
/// maximum ensures that such a call takes less than 1 ms. Because each key has a weight of at least 1, it also bounds
/// the number of keys.
pub(super) const MAX_WEIGHT: usize = 128;

/// A part of the keys of a probe. It keeps the state that a probe charges out of the value of an identity.
const PROBE_PREFIX: &str = "~probe";

/// Return the weight of a request: the time that Redis needs for it, as a multiple of the time for a token bucket (see
/// [`AlgorithmKind::weight`](crate::limiter::algorithm::AlgorithmKind::weight)). The usage total of a limit has a
/// weight of 1.
pub(super) fn request_weight(operation: Operation, charges: &[Charge<'_>]) -> usize {
    let weight = |charge: &Charge<'_>| {
        let tokens = match operation {
            // A refund searches the whole log for the refunded tokens.
            Operation::Refund { .. } => charge.rule.capacity(),
            Operation::Check | Operation::Peek | Operation::Charge | Operation::TakeUpTo | Operation::Renew => {
                charge.cost
            }
        };
        charge.rule.weight(tokens) + usize::from(charge.usage.is_some())
    };
    charges.iter().map(weight).sum()
}

/// The reason why a request has no verdict.
#[derive(Debug, Clone)]
pub(super) enum BatchError {
    /// The call or this request got an error reply, or the connection was lost.
    ErrorReply(RedisError),
    /// The call was not sent, or its reply could not be used.
    Store(StoreError),
}

pub(super) type BatchResult = Result<Verdict, BatchError>;

/// The requests of one call.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// The groups of the call. Groups that may need memory precede groups that may delete keys (see
    /// [`BatchGroup::may_delete`]). Apart from this, groups are in the order of their first request.
    groups: Vec<BatchGroup>,
    key_count: usize,
    /// Sum of the weights of the requests ([`request_weight`]).
    weight: usize,
    algorithms: AlgorithmSet,
    /// Whether the call contains the source of the script, because Redis has not loaded the script.
    sends_source: bool,
    purpose: Purpose,
    /// Total size of the keys, in bytes.
    key_bytes: usize,
    /// Properties of the first request, for a probe that resembles this call.
    probe_call: Option<ProbeCall>,
}

/// The properties of a call that failed. A probe sends a call with these properties, so that the probe fails as long as
/// such calls fail.
#[derive(Debug, Clone)]
pub(super) struct ProbeCall {
    pub(super) identity: Identity,
    pub(super) rule: Rule,
    /// Days of the usage totals, if the call counts usage. Usage totals need an additional permission in Redis.
    pub(super) usage: Option<Arc<UsageDays>>,
}

impl ProbeCall {
    /// Describe the call by the first charge that counts usage or, if no charge counts usage, from the first charge.
    /// Return `None` if there are no charges.
    pub(super) fn from_charges(charges: &[Charge<'_>]) -> Option<Self> {
        let charge = charges.iter().find(|charge| charge.usage.is_some()).or(charges.first())?;
        let identity = charge.key.identity;
        let rule = charge.rule.clone();
        Some(ProbeCall { identity, rule, usage: charge.usage.cloned() })
    }
}

/// The reason for a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Checks. Requests wait for their results.
    #[default]
    Checks,
    /// Checks that another cluster node redirected to this node with `ASK`, because this node is importing their slot.
    /// `ASKING` precedes the call.
    Asking,
    /// A probe of a server whose circuit breaker is open, or that did not reply. The batcher does not record the result
    /// of a probe in the circuit breaker.
    Probe,
}

/// The outcome of a batch to which Redis has replied.
pub(super) struct BatchOutcome {
    /// Whether the reply has the expected format and contains no `READONLY` or `NOAUTH` error.
    pub(super) is_valid: bool,
    /// Whether at least one request has a verdict.
    pub(super) has_verdict: bool,
    /// Batches that refund the charges of requests that no longer wait for their results.
    pub(super) refunds: Vec<Refunds>,
}

/// A batch of refunds for which no request waits.
pub(super) struct Refunds {
    pub(super) batch: Batch,
    /// The refunds of the batch, each with its cost.
    pub(super) pending: Vec<PendingRefund>,
}

/// A refund and its cost.
pub(super) struct PendingRefund {
    pub(super) cost: u64,
    pub(super) result: Receiver<BatchResult>,
}

/// Requests that differ only in their keys.
#[derive(Debug)]
struct BatchGroup {
    operation: Operation,
    limits: Vec<LimitArgs>,
    /// The names of the limits' states.
    state_names: Vec<Arc<str>>,
    /// The weight of each request ([`request_weight`]).
    request_weight: usize,
    /// The keys of the states of all requests: one key for each limit that [has a key](LimitArgs::has_key).
    keys: KeyBuffer,
    /// The keys of the usage totals of all requests: one key for each limit whose usage is counted.
    usage_keys: KeyBuffer,
    waiters: Vec<Sender<BatchResult>>,
}

/// Keys in one buffer, with the end position of each key.
#[derive(Debug, Default)]
struct KeyBuffer {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl KeyBuffer {
    /// Append the key that `write` writes. Return the length of the key in bytes.
    fn push_with(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> usize {
        let start = self.bytes.len();
        write(&mut self.bytes);
        self.ends.push(self.bytes.len());
        self.bytes.len() - start
    }

    fn push(&mut self, key: &[u8]) {
        self.push_with(|bytes| bytes.extend_from_slice(key));
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..self.ends[index]]
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index))
    }
}

impl Batch {
    /// Return whether the batch has no keys.
    pub(super) fn is_empty(&self) -> bool {
        self.key_count == 0
    }

    /// Return whether the batch would become too heavy if a request of this weight was added.
    pub(super) fn would_overflow(&self, weight: usize) -> bool {
        !self.is_empty() && self.weight + weight > MAX_WEIGHT
    }

    /// Return the sum of the weights of the requests ([`request_weight`]).
    pub(super) fn weight(&self) -> usize {
        self.weight
    }

    /// Return the total size of the keys, in bytes.
    pub(super) fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// Return the call for a probe.
    pub(super) fn probe_call(&self) -> Option<ProbeCall> {
        self.probe_call.clone()
    }

    /// Create an empty batch.
    pub(super) fn for_purpose(purpose: Purpose) -> Self {
        Batch { purpose, ..Batch::default() }
    }

    /// Return the reason for the call.
    pub(super) fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Return the number of requests.
    pub(super) fn request_count(&self) -> usize {
        self.groups.iter().map(|group| group.waiters.len()).sum()
    }

    /// Make the call send the source of the script instead of its SHA-1. Return `false` if it already did.
    pub(super) fn send_source(&mut self) -> bool {
        !std::mem::replace(&mut self.sends_source, true)
    }

    /// Add a request of the weight `weight` ([`request_weight`]). Return the receiver of its result.
    pub(super) fn push(
        &mut self,
        prefix: &str,
        operation: Operation,
        charges: &[Charge<'_>],
        weight: usize,
        assumed_now_us: u64,
    ) -> Receiver<BatchResult> {
        let probe_prefix = (self.purpose == Purpose::Probe).then(|| format!("{prefix}:{PROBE_PREFIX}"));
        let prefix = probe_prefix.as_deref().unwrap_or(prefix);
        let has_usage = charges.iter().any(|charge| charge.usage.is_some());
        let usage_day = |charge: &Charge<'_>| charge.usage_day(operation, assumed_now_us);
        // Collect days only if usage is counted, so that the list is otherwise empty and needs no allocation.
        let days: Vec<Option<UsageDay>> = charges.iter().filter(|_| has_usage).map(usage_day).collect();
        let day = |index: usize| days.get(index).copied().flatten();
        let algorithms = AlgorithmSet::for_rules(charges.iter().map(|charge| charge.rule));
        let counts_usage = days.iter().any(Option::is_some);
        self.algorithms = self.algorithms.union(algorithms.with_usage(counts_usage));
        if self.probe_call.is_none() {
            self.probe_call = ProbeCall::from_charges(charges);
        }
        let limits =
            || (0..charges.len()).map(|index| LimitArgs::new(charges, index, assumed_now_us).with_usage(day(index)));
        let names = || charges.iter().map(|charge| charge.key.state_name.name().clone());
        let (group, reply) = self.join_group(operation, weight, limits, names);
        let mut written = 0;
        for (index, charge) in charges.iter().enumerate() {
            let limit = group.limits[index];
            if limit.has_key() {
                written += group.keys.push_with(|bytes| limit.write_key(&charge.key, prefix, bytes));
            }
            if let Some(day) = day(index) {
                let limit = charge.key.state_name.limit_name();
                let identity = charge.key.identity;
                let write = |bytes: &mut Vec<u8>| usage::write_key(prefix, limit, identity, day.month(), bytes);
                written += group.usage_keys.push_with(write);
            }
        }
        self.key_bytes += written;
        reply
    }

    /// Add a request with these limits to its group. The caller must append the keys of the request.
    fn join_group<T: Iterator<Item = LimitArgs>, N: Iterator<Item = Arc<str>>>(
        &mut self,
        operation: Operation,
        request_weight: usize,
        limits: impl Fn() -> T,
        state_names: impl Fn() -> N,
    ) -> (&mut BatchGroup, Receiver<BatchResult>) {
        let (sender, receiver) = oneshot::channel();
        let is_same_group =
            |group: &BatchGroup| group.operation == operation && limits().eq(group.limits.iter().copied());
        let group_index = self.groups.iter().position(is_same_group).unwrap_or_else(|| {
            let group = BatchGroup {
                operation,
                limits: limits().collect(),
                state_names: state_names().collect(),
                request_weight,
                keys: KeyBuffer::default(),
                usage_keys: KeyBuffer::default(),
                waiters: Vec::new(),
            };
            let index = match group.may_delete() {
                true => self.groups.len(),
                false => self.groups.partition_point(|group| !group.may_delete()),
            };
            self.groups.insert(index, group);
            index
        });
        let group = &mut self.groups[group_index];
        self.key_count += group.keys_per_request() + group.usages_per_request();
        self.weight += group.request_weight;
        group.waiters.push(sender);
        (group, receiver)
    }

    /// Remove cancelled requests. Return whether any requests are left.
    pub(super) fn drop_cancelled(&mut self) -> bool {
        for group in &mut self.groups {
            if group.waiters.iter().any(Sender::is_closed) {
                group.drop_cancelled();
            }
        }
        self.groups.retain(|group| !group.waiters.is_empty());
        self.key_count = self.groups.iter().map(|group| group.keys.len() + group.usage_keys.len()).sum();
        self.weight = self.groups.iter().map(|group| group.request_weight * group.waiters.len()).sum();
        !self.is_empty()
    }

    /// Return the script for these requests. The script contains at least `algorithms`. The script counts usage only if
    /// a request counts usage.
    fn script(&self, algorithms: AlgorithmSet, layout: &StateLayout) -> &'static Script {
        let variants = self.groups.iter().map(|group| script::script_variant(layout, group.operation, &group.limits));
        script(
            variants.reduce(ScriptVariant::union).unwrap_or(ScriptVariant::Generic),
            self.algorithms.union(algorithms.with_usage(false)),
        )
    }

    /// Return the command of the call. `lua/generic.lua` documents the arguments and replies of the scripts.
    pub(super) fn command(&self, algorithms: AlgorithmSet, layout: &StateLayout, now_us: u64) -> Cmd {
        let script = self.script(algorithms, layout);
        let limits: usize = self.groups.iter().map(|group| group.limits.len()).sum();
        let mut argument = script::start_argument(now_us, layout, self.groups.len(), limits);
        let mut command = Cmd::with_capacity(4 + self.key_count, 64 + 80 * self.key_count + argument.capacity());
        if self.sends_source {
            command.arg("EVAL").arg(&script.source);
        } else {
            command.arg("EVALSHA").arg(&script.sha);
        }
        command.arg(self.key_count);
        for group in &self.groups {
            for key in group.keys.iter() {
                command.arg(key);
            }
            script::append_group(&mut argument, group.waiters.len(), group.operation, &group.limits);
        }
        for key in self.groups.iter().flat_map(|group| group.usage_keys.iter()) {
            command.arg(key);
        }
        command.arg(argument);
        let state_names = self.groups.iter().flat_map(|group| &group.state_names);
        command.arg(script::state_names_argument(state_names.map(|name| &**name)));
        if self.algorithms.counts_usage() {
            command.arg(script::usage_argument(self.groups.iter().map(|group| &*group.limits)));
        }
        command
    }

    /// Send this error to all requests of the batch.
    pub(super) fn fail(self, error: &BatchError) {
        for waiter in self.groups.into_iter().flat_map(|group| group.waiters) {
            let _ = waiter.send(Err(error.clone()));
        }
    }

    /// Send this error to all waiting requests, because the reply has not arrived in time. If the reply arrives later,
    /// [`Batch::complete`] returns refunds for the tokens that it grants to these requests.
    pub(super) fn fail_waiters(&mut self, error: &BatchError) {
        for waiter in self.groups.iter_mut().flat_map(|group| &mut group.waiters) {
            let (closed, _) = oneshot::channel();
            let _ = std::mem::replace(waiter, closed).send(Err(error.clone()));
        }
    }

    /// Count the cost of all requests of a call that never got a reply. Redis may have executed the call or not. A probe
    /// charges a state that no request uses.
    pub(super) fn count_unanswered(&self, metrics: &LimiterMetrics) {
        for group in self.groups.iter().filter(|_| self.purpose != Purpose::Probe) {
            let Some(kind) = group.operation.lost_cost() else { continue };
            let charged = group.limits.iter().filter(|limit| !limit.is_post_paid());
            let cost: u64 = charged.map(LimitArgs::lasting_cost).sum();
            metrics.lost_cost.add(kind as usize, cost * group.waiters.len() as u64);
        }
    }

    /// Send each request its part of the reply.
    pub(super) fn complete(self, reply: Value) -> BatchOutcome {
        let Some(mut reply) = ScriptReply::new(reply) else {
            self.fail(&BatchError::Store(StoreError::MalformedReply));
            return BatchOutcome { is_valid: false, has_verdict: false, refunds: Vec::new() };
        };
        let mut is_valid = true;
        let mut has_verdict = false;
        let mut refunds: Vec<Refunds> = Vec::new();
        for mut group in self.groups {
            for (index, waiting) in std::mem::take(&mut group.waiters).into_iter().enumerate() {
                let result = match reply.next_verdict(group.operation, &group.limits) {
                    Some(Ok(verdict)) => Ok(verdict),
                    Some(Err(error)) => Err(BatchError::ErrorReply(error.into())),
                    None => Err(BatchError::Store(StoreError::MalformedReply)),
                };
                is_valid &= match &result {
                    Ok(_) => true,
                    Err(BatchError::ErrorReply(error)) => !is_connection_error(error),
                    Err(BatchError::Store(_)) => false,
                };
                has_verdict |= result.is_ok();
                if let Err(Ok(verdict)) = waiting.send(result) {
                    if refunds.last().is_none_or(|last| last.batch.weight >= MAX_WEIGHT) {
                        let batch = Batch { algorithms: self.algorithms, ..Batch::default() };
                        refunds.push(Refunds { batch, pending: Vec::new() });
                    }
                    if let Some(last) = refunds.last_mut() {
                        last.pending.extend(last.batch.push_refund(&group, index, &verdict));
                    }
                }
            }
        }
        refunds.retain(|refunds| !refunds.pending.is_empty());
        BatchOutcome { is_valid, has_verdict, refunds }
    }

    /// Add a refund of the charges that a request of `group` made according to `verdict`. Return `None` if there is
    /// nothing to refund.
    fn push_refund(&mut self, group: &BatchGroup, request: usize, verdict: &Verdict) -> Option<PendingRefund> {
        if !matches!(group.operation, Operation::Check | Operation::TakeUpTo) || verdict.granted == 0 {
            return None;
        }
        let first = request * group.keys_per_request();
        let key_index =
            |limit: usize| first + group.limits[..=limit].iter().filter(|limit| limit.has_key()).count() - 1;
        let mut usage_keys = (request * group.usages_per_request()..).map(|index| group.usage_keys.get(index));
        // Advance to the next usage key for each limit that counts usage, even if this limit is not refunded. Otherwise
        // the next limit would get the usage key of this limit.
        let mut usage_key = |terms: &LimitArgs| usage_keys.by_ref().take(usize::from(terms.counts_usage())).next();
        let refunded: Vec<_> = (group.limits.iter().zip(&verdict.outcomes).enumerate())
            .map(|(limit, (terms, outcome))| (limit, terms, outcome, usage_key(terms)))
            // Refund only what was charged: a shadow limit that would have denied the request has charged nothing, and
            // a deferred cost is charged only after the response.
            .filter(|(_, terms, outcome, _)| outcome.status == Status::Ok && !terms.is_post_paid())
            .map(|(limit, terms, outcome, usage_key)| {
                let cost = if group.operation == Operation::TakeUpTo { verdict.granted } else { terms.cost() };
                (limit, terms.for_refund(cost, outcome), usage_key)
            })
            .collect();
        if refunded.is_empty() {
            return None;
        }
        let refund = Operation::Refund { charged_at: verdict.now_us };
        let cost = refunded.iter().map(|(_, terms, _)| terms.lasting_cost()).sum();
        let weight = refunded.iter().map(|(_, terms, _)| terms.refund_weight()).sum();
        let identity_of = |index: usize| {
            let (limit, terms, _): &(usize, LimitArgs, _) = &refunded[index];
            terms.has_fields().then(|| group.keys.get(key_index(*limit)))
        };
        let limits = || refunded.iter().enumerate().map(|(index, (_, terms, _))| terms.at(index, identity_of));
        let names = || refunded.iter().map(|(limit, ..)| group.state_names[*limit].clone());
        let (refunds, result) = self.join_group(refund, weight, limits, names);
        for (index, (limit, _, usage_key)) in refunded.iter().enumerate() {
            if refunds.limits[index].has_key() {
                refunds.keys.push(group.keys.get(key_index(*limit)));
            }
            if let Some(usage_key) = usage_key {
                refunds.usage_keys.push(usage_key);
            }
        }
        Some(PendingRefund { cost, result })
    }
}

impl BatchGroup {
    /// Return the number of limits of a request that have a key.
    fn keys_per_request(&self) -> usize {
        self.limits.iter().filter(|limit| limit.has_key()).count()
    }

    /// Return the number of limits whose usage is counted.
    fn usages_per_request(&self) -> usize {
        self.limits.iter().filter(|limit| limit.counts_usage()).count()
    }

    /// Return whether the group may begin with a command that deletes keys. Groups that may delete keys come last:
    /// above `maxmemory`, Redis rejects commands that need memory, but only until the script has written. If a release
    /// of permits came first, Redis would therefore accept the charges of the same call even above `maxmemory`.
    fn may_delete(&self) -> bool {
        match self.operation {
            Operation::Refund { .. } | Operation::Renew => true,
            Operation::Check | Operation::Peek | Operation::Charge | Operation::TakeUpTo => false,
        }
    }

    fn drop_cancelled(&mut self) {
        let keys_per_request = self.keys_per_request();
        let usages = self.usages_per_request();
        let keys = std::mem::take(&mut self.keys);
        let usage_keys = std::mem::take(&mut self.usage_keys);
        let waiting = std::mem::take(&mut self.waiters);
        for (request, answer) in waiting.into_iter().enumerate().filter(|(_, answer)| !answer.is_closed()) {
            (request * keys_per_request..(request + 1) * keys_per_request)
                .for_each(|index| self.keys.push(keys.get(index)));
            (request * usages..(request + 1) * usages).for_each(|index| self.usage_keys.push(usage_keys.get(index)));
            self.waiters.push(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::key::{IdentityHasher, Key};
    use crate::limiter::spec::LimitSpec;
    use crate::limiter::verdict::ChargeMode;

    #[test]
    fn requests_that_may_need_memory_come_first() {
        let hasher = IdentityHasher::new("");
        let limit = LimitSpec::token_bucket(&hasher, "limit", "10/s".parse().unwrap()).unwrap();
        let variant = &limit.default_variant;
        let charge = Charge {
            key: Key { identity: hasher.hash(b"client"), state_name: &variant.state_name },
            rule: &variant.rule,
            cost: 1,
            mode: ChargeMode::Enforced,
            permit_id: 0,
            debt_before_us: 0,
            usage: None,
        };
        let refund = Operation::Refund { charged_at: 1 };
        let mut batch = Batch::default();
        let pushed = [refund, Operation::Check, Operation::Renew, Operation::Charge, Operation::TakeUpTo, refund];
        let _receivers = pushed.map(|operation| batch.push("rl", operation, &[charge], 1, 0));
        let order: Vec<_> = batch.groups.iter().map(|group| (group.operation, group.waiters.len())).collect();
        let first = [Operation::Check, Operation::Charge, Operation::TakeUpTo].map(|operation| (operation, 1));
        assert_eq!(order, [&first[..], &[(refund, 2), (Operation::Renew, 1)]].concat());
    }
}

// A congestion window limits the work that one worker has in flight to one server. As in TCP Vegas, the window
// grows additively and shrinks multiplicatively, depending on the delay that the calls of the worker add to the
// round trip.

/// Weight of a call without requests. The smallest script costs Redis as much CPU time as this number of token buckets.
const CALL_WEIGHT: usize = 8;

/// The minimum and initial size of the window, as a weight. One full batch fits into the window.
const MIN_WINDOW: usize = MAX_WEIGHT + CALL_WEIGHT;

/// The maximum size of the window, as a weight. 16 full batches fit into the window. With a round trip of 40 ms, this is
/// enough for 50,000 checks/s.
const MAX_WINDOW: usize = 16 * MIN_WINDOW;

/// Number of replies after which the minimum round trip is measured again, because a failover may have changed the
/// server.
const ROUND_TRIP_RESET_REPLIES: u32 = 10_000;

/// A congestion window. It bounds the weight of the calls in flight, so that cheap and expensive checks delay Redis
/// equally.
#[derive(Debug)]
pub(super) struct InFlightWindow {
    size: usize,
    /// Whether no reply has been slow so far. Until a reply is slow, the window grows by the weight of each reply (slow
    /// start).
    slow_start: bool,
    /// The minimum of the recent round trips.
    min_round_trip: Duration,
    /// The last two round trips, the last one first.
    last_round_trips: [Duration; 2],
    replies: u32,
}

impl Default for InFlightWindow {
    fn default() -> Self {
        let (min_round_trip, last_round_trips) = (Duration::MAX, Default::default());
        InFlightWindow { size: MIN_WINDOW, slow_start: true, min_round_trip, last_round_trips, replies: 0 }
    }
}

impl InFlightWindow {
    /// Return the weight of the call of a batch.
    pub(super) fn weight(batch: &Batch) -> usize {
        batch.weight() + CALL_WEIGHT
    }

    /// Return whether a call of this weight fits in addition to the weight in flight.
    pub(super) fn has_room(&self, in_flight: usize, weight: usize) -> bool {
        in_flight + weight <= self.size
    }

    /// Record the round trip of a call that got its reply in time. Calls without a reply do not count, because a server
    /// that does not reply is not busy.
    pub(super) fn record_round_trip(&mut self, round_trip: Duration) {
        self.last_round_trips = [round_trip, self.last_round_trips[0]];
    }

    /// Return the time within which no reply to another call is to be expected: the shorter one of the last two round
    /// trips, so that one slow reply does not count.
    pub(super) fn least_round_trip(&self) -> Duration {
        self.last_round_trips[0].min(self.last_round_trips[1])
    }

    /// Record a reply. The delay is the round trip minus the minimum round trip. If the delay is more than a quarter of
    /// the difference between the timeout and the minimum round trip, halve the window. Otherwise, enlarge the window
    /// if `is_limited`, which means that the window limited the number of requests in flight.
    pub(super) fn record_reply(&mut self, weight: usize, round_trip: Duration, timeout: Duration, is_limited: bool) {
        self.replies += 1;
        if self.replies == ROUND_TRIP_RESET_REPLIES {
            (self.replies, self.min_round_trip) = (0, Duration::MAX);
        }
        self.min_round_trip = self.min_round_trip.min(round_trip);
        if round_trip - self.min_round_trip > timeout.saturating_sub(self.min_round_trip) / 4 {
            (self.size, self.slow_start) = ((self.size / 2).max(MIN_WINDOW), false);
        } else if is_limited {
            self.size = (self.size + if self.slow_start { weight } else { CALL_WEIGHT }).min(MAX_WINDOW);
        }
    }
}

#[cfg(test)]
mod window_tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    fn size_after(window: &mut InFlightWindow, round_trips_ms: &[u64]) -> usize {
        round_trips_ms.iter().for_each(|ms| window.record_reply(MIN_WINDOW, Duration::from_millis(*ms), TIMEOUT, true));
        window.size
    }

    #[test]
    fn window_grows_on_prompt_replies_and_halves_on_slow_ones() {
        let mut window = InFlightWindow::default();
        assert!(window.has_room(0, MIN_WINDOW) && !window.has_room(1, MIN_WINDOW), "exactly one full batch fits");
        assert_eq!(size_after(&mut window, &[1; 3]), 4 * MIN_WINDOW, "slow start adds the weight of each reply");
        assert_eq!(size_after(&mut window, &[13]), 5 * MIN_WINDOW, "a delay of 12 ms is less than a quarter of 49 ms");
        assert_eq!(size_after(&mut window, &[14]), 5 * MIN_WINDOW / 2);
        assert_eq!(
            size_after(&mut window, &[1; 2]),
            5 * MIN_WINDOW / 2 + 2 * CALL_WEIGHT,
            "after a slow reply, growth is additive"
        );
        assert_eq!(size_after(&mut window, &[1; 1000]), MAX_WINDOW);
        assert_eq!(size_after(&mut window, &[20; 10]), MIN_WINDOW);
    }

    #[test]
    fn window_does_not_grow_while_it_has_room() {
        let mut window = InFlightWindow::default();
        for _ in 0..1000 {
            window.record_reply(CALL_WEIGHT, Duration::from_millis(1), TIMEOUT, false);
        }
        assert_eq!(window.size, MIN_WINDOW);
    }

    #[test]
    fn distant_server_is_not_slow() {
        let mut window = InFlightWindow::default();
        assert_eq!(size_after(&mut window, &[40; 1000]), MAX_WINDOW);
        assert_eq!(size_after(&mut window, &[43]), MAX_WINDOW / 2, "a delay of 3 ms is more than a quarter of 10 ms");
    }

    #[test]
    fn min_round_trip_is_forgotten() {
        let mut window = InFlightWindow::default();
        size_after(&mut window, &[1; 10]);
        let replies = vec![30; 2 * ROUND_TRIP_RESET_REPLIES as usize];
        assert_eq!(size_after(&mut window, &replies), MAX_WINDOW);
    }
}
