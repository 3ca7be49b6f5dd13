//! The invariants of every schedule. They are checked on what clients observe and on what the store decides.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use sluicegate::clock::Clock;
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::key::Identity;
use sluicegate::limiter::memory::MemoryStore;
use sluicegate::limiter::pacing::MAX_WORKER_DELAY;
use sluicegate::limiter::spec::OnStoreError;
use sluicegate::limiter::store::DecidedBy;
use sluicegate::limiter::verdict::Operation;

use crate::gateway::{ClientOutcome, HeldPermits, ObservedRequest, RequestLimit};
use crate::network::START_US;
use crate::schedule::{Class, CostMode, Schedule, ScheduledLimit};
use crate::store::{DecidedRequest, SimulatedRedis, StateId, charge, charges_by_state};

/// A check may take this much longer than the timeout, because timers have a resolution of 1 ms.
const TIMER_SLACK: Duration = Duration::from_millis(15);

/// The resolution of timers in µs.
const TIMER_US: u64 = 1000;

/// If the store runs a refund within this time after a charge, in µs, the refund may have been in flight at the time of
/// the charge.
const MAX_REFUND_DELAY_US: u64 = 300_000;

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub invariant: &'static str,
    pub message: String,
}

impl Violation {
    pub fn new(invariant: &'static str, message: String) -> Self {
        Violation { invariant, message }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.invariant, self.message)
    }
}

/// The events of a schedule, after its end.
pub struct History<'a> {
    pub schedule: &'a Schedule,
    /// A time after all requests have ended and all refunds have been made.
    pub now_us: u64,
    pub store: &'a SimulatedRedis,
    pub requests: &'a [ObservedRequest],
    pub held_permits: &'a BTreeMap<StateId, HeldPermits>,
    /// How often the breaker of each gateway has opened.
    pub open_counts: Vec<u64>,
}

/// The charges of a state with their times, in order.
type TimedUnits = Vec<(u64, u64)>;

impl History<'_> {
    pub fn check(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        let mut violated = |invariant, message| violations.push(Violation::new(invariant, message));
        self.every_check_ends(&mut violated);
        self.store_decides_while_it_is_up(&mut violated);
        self.denials_are_true(&mut violated);
        self.admitted_within_bounds(&mut violated);
        self.charged_once(&mut violated);
        self.prefetched_within_bounds(&mut violated);
        self.refunds_are_complete(&mut violated);
        self.running_within_bounds(&mut violated);
        self.full_store_takes_no_charges(&mut violated);
        self.usage_totals_are_exact(&mut violated);
        violations
    }

    fn spec(&self, state: &StateId) -> &ScheduledLimit {
        self.schedule.limits.iter().find(|spec| *spec.limit.name == *state.0).expect("a limit of the schedule")
    }

    /// Return whether the store decided every request in time, except for requests whose clients disconnected.
    fn is_certain(&self) -> bool {
        self.schedule.is_prompt()
            && self.requests.iter().all(|observed| match observed.outcome {
                ClientOutcome::Admitted(source) | ClientOutcome::Denied { decided_by: source, .. } => {
                    source == DecidedBy::Store
                }
                ClientOutcome::Unavailable => false,
                ClientOutcome::Cancelled => true,
            })
    }

    fn every_check_ends(&self, violated: &mut impl FnMut(&'static str, String)) {
        for observed in self.requests {
            // If the event loop of a worker stalls, the worker reads replies and timers late.
            let max_lateness = if self.schedule.class == Class::Stalled { MAX_WORKER_DELAY } else { Duration::ZERO };
            if observed.elapsed > self.schedule.timeout + TIMER_SLACK + max_lateness {
                let message =
                    format!("the request of {:?} was decided after {:?}", observed.started_at, observed.elapsed);
                violated("every check ends within the timeout", message);
            }
        }
    }

    fn store_decides_while_it_is_up(&self, violated: &mut impl FnMut(&'static str, String)) {
        let Schedule { class, limits, .. } = self.schedule;
        for observed in self.requests {
            let parts = || observed.limits.iter().map(|part| &limits[part.limit].limit);
            let when = format!("the request of {:?} at gateway {}", observed.started_at, observed.gateway);
            let admitted_without_store = observed.outcome == ClientOutcome::Admitted(DecidedBy::Local);
            let denies = parts().any(|limit| limit.on_store_error == OnStoreError::Deny && !limit.shadow);
            if admitted_without_store && denies {
                violated("a limit with on_store_error = deny admits nothing without the store", when.clone());
            }
            let shadow_only = parts().all(|limit| limit.shadow);
            // After an outage, a request may be denied because other requests still hold permits of the local share.
            let denied_without_store =
                matches!(observed.outcome, ClientOutcome::Denied { decided_by: DecidedBy::Local, .. });
            let without_store = admitted_without_store || denied_without_store && *class != Class::Slow;
            let closed = *class != Class::Slow || observed.breaker_closed;
            // After an outage, the local share also decides about permits until all gateways have registered their
            // permits in the store.
            let settling = matches!(observed.outcome, ClientOutcome::Denied { .. })
                && observed.limits.iter().any(|part| limits[part.limit].concurrency().is_some());
            if self.schedule.is_up() && without_store && !shadow_only && closed && !settling {
                let message = format!("{when}: {:?}", observed.outcome);
                violated("nothing is decided without the store while it is up", message);
            }
            // In a simulated cluster, a call takes 1 ms on its node, and requests do not share calls.
            let prompt = self.schedule.is_prompt() && *class != Class::Cluster;
            if prompt && observed.outcome == ClientOutcome::Unavailable {
                violated("a store that replies in time decides every request", when);
            }
        }
        self.other_masters_decide(violated);
        if *class == Class::Far {
            let by_store = |observed: &&ObservedRequest| {
                matches!(
                    observed.outcome,
                    ClientOutcome::Admitted(DecidedBy::Store)
                        | ClientOutcome::Denied { decided_by: DecidedBy::Store, .. }
                )
            };
            let (decided, all) = (self.requests.iter().filter(by_store).count(), self.requests.len());
            if 2 * decided < all {
                let message = format!(
                    "the store replies after {:?}, and decided {decided} of {all} requests",
                    self.schedule.round_trip
                );
                violated("a store that replies within the timeout is used", message);
            }
        }
        if !matches!(class, Class::Slow | Class::Faulty | Class::FaultyMaster) {
            for (gateway, openings) in self.open_counts.iter().enumerate().filter(|(_, openings)| **openings > 0) {
                let message = format!("gateway {gateway}, {openings} times");
                violated("the breaker stays closed while the store replies", message);
            }
        }
    }

    /// A fault of one master affects only requests with a limit on that master.
    fn other_masters_decide(&self, violated: &mut impl FnMut(&'static str, String)) {
        let Some(faulty) = self.schedule.incidents.iter().find_map(|incident| incident.node) else { return };
        for observed in self.requests {
            let is_there = |part: &RequestLimit| self.store.node_index_of(Identity(part.state.1)) == faulty;
            let without_store = matches!(
                observed.outcome,
                ClientOutcome::Admitted(DecidedBy::Local) | ClientOutcome::Denied { decided_by: DecidedBy::Local, .. }
            );
            let parts = &observed.limits;
            let limits = || parts.iter().map(|part| &self.schedule.limits[part.limit]);
            // Shadow limits reject nothing. After an outage, the local share decides about permits for some time.
            let exempt = limits().all(|spec| spec.limit.shadow) || limits().any(|spec| spec.concurrency().is_some());
            if without_store && !exempt && !parts.iter().any(is_there) {
                let message = format!("the request of {:?} at gateway {}", observed.started_at, observed.gateway);
                violated("masters that work decide while another one fails", message);
            }
        }
    }

    fn denials_are_true(&self, violated: &mut impl FnMut(&'static str, String)) {
        // The charge of a cancelled or late request is refunded. A denial caused by this charge may be cached for up to
        // 1 s after the refund.
        let was_refunded = |observed: &ObservedRequest| {
            let of = |done: &DecidedRequest| {
                done.charges.iter().any(|asked| observed.limits.iter().any(|part| part.state == asked.state))
            };
            let now_us = START_US + (observed.started_at + observed.elapsed).as_micros() as u64;
            self.store.history.iter().any(|done| {
                matches!(done.operation, Operation::Refund { .. })
                    && (now_us - 1_000_000..=now_us).contains(&done.at_us)
                    && of(done)
            })
        };
        // In a cluster, a request may be charged on one master and denied on another one. Until this charge is
        // refunded, it may cause the denial of another request.
        let may_be_refunded = |observed: &ObservedRequest| {
            // After a late reply, the charge of a request that was decided without the store is refunded, too.
            matches!(
                observed.outcome,
                ClientOutcome::Cancelled
                    | ClientOutcome::Unavailable
                    | ClientOutcome::Admitted(DecidedBy::Local)
                    | ClientOutcome::Denied { decided_by: DecidedBy::Local, .. }
            ) || self.schedule.nodes > 1 && observed.limits.len() == 1
        };
        let excused = self.requests.iter().any(may_be_refunded);
        for observed in self.requests.iter().filter(|observed| observed.stale_denial) {
            if self.schedule.state_losses() == 0 && !(excused && was_refunded(observed)) {
                let message =
                    format!("the request of {:?} is denied, and the store would admit it", observed.started_at);
                violated("a cached denial is correct", message);
            }
        }
    }

    /// Return the admitted cost minus refunds, by state and source: the store or the local share of a gateway.
    fn admitted_units(&self) -> BTreeMap<(&StateId, Option<usize>), TimedUnits> {
        let mut all: BTreeMap<_, TimedUnits> = BTreeMap::new();
        for observed in self.requests {
            let ClientOutcome::Admitted(source) = observed.outcome else { continue };
            for part in &observed.limits {
                let spec = &self.schedule.limits[part.limit];
                let shared = source == DecidedBy::Local && spec.limit.on_store_error == OnStoreError::Local;
                if part.is_refunded || part.shadow_denied || !(shared || source == DecidedBy::Store) {
                    continue;
                }
                let units = all.entry((&part.state, shared.then_some(observed.gateway))).or_default();
                units.push((observed.now_us, spec.cost));
            }
        }
        for units in all.values_mut() {
            units.sort_unstable();
        }
        all
    }

    fn admitted_within_bounds(&self, violated: &mut impl FnMut(&'static str, String)) {
        for ((state, gateway), units) in self.admitted_units() {
            let spec = self.spec(state);
            if spec.limit.shadow || spec.cost_mode == CostMode::Deferred || spec.concurrency().is_some() {
                continue;
            }
            let (rule, times) = match gateway {
                None => (spec.rule(), 1 + self.schedule.state_losses()),
                Some(_) => (spec.limit.default_variant.local_rule(), 1),
            };
            let fixed = matches!(rule, Rule::FixedWindow(_));
            let prefetched = if fixed { 0 } else { self.schedule.gateways as u64 * spec.limit.prefetch };
            // With several masters, a decision has the time at which the last of them decided. The charge on another
            // master may be earlier, by less than the timeout.
            let uncertain_us = if self.schedule.nodes > 1 { self.schedule.timeout.as_micros() as u64 } else { 0 };
            let refunds = self.overlapping_refunds(state);
            for (window_us, most) in worst_cases(rule, spec) {
                let most = most * times + prefetched;
                let in_windows = |start: &dyn Fn(u64) -> u64| {
                    max_in_an_aligned_window(&units, |at_us| {
                        Some(start(at_us)).filter(|start| at_us - start >= uncertain_us)
                    })
                };
                let (at_us, admitted) = match rule {
                    Rule::FixedWindow(FixedWindow { start: WindowStart::Aligned { .. }, .. }) => {
                        in_windows(&|at_us| at_us / window_us * window_us)
                    }
                    Rule::FixedWindow(FixedWindow { start: WindowStart::Calendar(windows), .. }) => {
                        in_windows(&|at_us| windows.boundaries_around(at_us)[0])
                    }
                    _ => max_in_any_window(&units, window_us.saturating_sub(uncertain_us).max(1), &refunds),
                };
                if admitted > most {
                    let message = format!(
                        "{state:x?}, {}: {admitted} tokens in {window_us} µs from {:?} on, at most {most}",
                        gateway
                            .map_or("by the store".to_owned(), |gateway| format!("by the share of gateway {gateway}")),
                        Duration::from_micros(at_us.saturating_sub(START_US)),
                    );
                    violated("no more is admitted than the limit's bound", message);
                    break;
                }
            }
        }
    }

    /// Return the refunds of a token bucket: for each, the time of the charge, the time of the refund, and the tokens.
    fn overlapping_refunds(&self, state: &StateId) -> Vec<(u64, u64, u64)> {
        if !matches!(self.spec(state).rule(), Rule::TokenBucket(_)) {
            return Vec::new();
        }
        let refunds = self.store.history.iter().filter_map(|done| match done.operation {
            Operation::Refund { charged_at } => Some((done, charged_at)),
            _ => None,
        });
        let of_state = |(done, charged_at): (&DecidedRequest, u64)| {
            let index = done.charges.iter().position(|charge| charge.state == *state)?;
            Some((charged_at, done.at_us, done.charged(index).unsigned_abs()))
        };
        refunds.filter_map(of_state).collect()
    }

    /// Compare the tokens that the store charged with the admitted tokens, by state and gateway.
    fn charged_once(&self, violated: &mut impl FnMut(&'static str, String)) {
        // Sum the charges with and without refunds: a request that loses a race for the last token on one master
        // refunds its charge on another master and is retried.
        let mut charged: BTreeMap<(&StateId, usize), (u64, i64)> = BTreeMap::new();
        for done in &self.store.history {
            for (index, requested) in done.charges.iter().enumerate() {
                let (all, kept) = charged.entry((&requested.state, done.gateway)).or_default();
                *all += u64::try_from(done.charged(index)).unwrap_or(0);
                *kept += done.charged(index);
            }
        }
        let mut asked: BTreeMap<(&StateId, usize), (u64, u64)> = BTreeMap::new();
        for observed in self.requests {
            for part in &observed.limits {
                let spec = &self.schedule.limits[part.limit];
                let (asked, admitted) = asked.entry((&part.state, observed.gateway)).or_default();
                let cost = if spec.cost_mode == CostMode::Deferred { part.charged_later } else { spec.cost };
                *asked += cost;
                let by_store = observed.outcome == ClientOutcome::Admitted(DecidedBy::Store) && !part.shadow_denied;
                *admitted += if by_store && spec.cost_mode != CostMode::Deferred { cost } else { 0 };
            }
        }
        for ((state, gateway), (asked, admitted)) in asked {
            let spec = self.spec(state);
            if spec.concurrency().is_some() {
                continue;
            }
            let (charged, kept) = charged.get(&(state, gateway)).copied().unwrap_or_default();
            let once = if self.schedule.nodes > 1 { u64::try_from(kept).unwrap_or(0) } else { charged };
            if once > asked && spec.limit.prefetch == 0 {
                let message = format!("{state:x?} at gateway {gateway}: {once} tokens charged, {asked} requested");
                violated("a request is charged at most once", message);
            }
            if admitted > charged {
                let message = format!("{state:x?} at gateway {gateway}: {admitted} tokens admitted, {charged} charged");
                violated("nothing is admitted without a charge", message);
            }
        }
    }

    /// Check that the usage totals equal the sum of what the store charged, minus refunds, and what the gateways
    /// posted. Each gateway must post what it admitted locally exactly once, even if replies are lost.
    fn usage_totals_are_exact(&self, violated: &mut impl FnMut(&'static str, String)) {
        let [totals, expected] = self.store.usage();
        for total in totals.keys().chain(expected.keys()) {
            let [total_cost, charged] = [&totals, &expected].map(|sums| sums.get(total).copied().unwrap_or(0));
            if total_cost != charged {
                let message = format!("{total:x?}: the total is {total_cost}, {charged} was charged and posted");
                violated("usage totals equal the charged cost", message);
            }
        }
        if self.schedule.state_losses() > 0 {
            return;
        }
        let mut posted: BTreeMap<&StateId, i64> = BTreeMap::new();
        for post in &self.store.posts {
            *posted.entry(&post.total.0).or_default() += post.amount;
        }
        let mut charged: BTreeMap<&StateId, i64> = BTreeMap::new();
        for observed in self.requests.iter().filter(|observed| !observed.is_overloaded) {
            for part in observed.limits.iter().filter(|part| !part.shadow_denied) {
                let spec = &self.schedule.limits[part.limit];
                if observed.is_decided_by(DecidedBy::Local) && spec.limit.usage.is_some() {
                    *charged.entry(&part.state).or_default() += charged_in_the_end(spec, observed, part) as i64;
                }
            }
        }
        for state in posted.keys().chain(charged.keys()) {
            let [posted, charged] = [&posted, &charged].map(|sums| sums.get(state).copied().unwrap_or(0));
            if posted != charged {
                let message = format!("{state:x?}: {posted} was posted, {charged} was charged without the store");
                violated("usage of an outage is posted once", message);
            }
        }
    }

    /// Check that a gateway holds, for each state, at most the number of tokens that the limit's `prefetch` allows,
    /// plus the costs of its waiting requests.
    fn prefetched_within_bounds(&self, violated: &mut impl FnMut(&'static str, String)) {
        if !self.is_certain() {
            return;
        }
        for (state, done) in charges_by_state(&self.store.history) {
            let spec = self.spec(state);
            if spec.limit.prefetch == 0 || spec.cost_mode != CostMode::Upfront {
                continue;
            }
            for gateway in 0..self.schedule.gateways {
                let own = |(done, index): &(usize, usize)| {
                    let done = &self.store.history[*done];
                    (done.gateway == gateway).then(|| (done.at_us, done.charged(*index)))
                };
                let changes: Vec<_> = done.iter().filter_map(own).collect();
                let mut outstanding = 0;
                for (number, (at_us, units)) in changes.iter().enumerate() {
                    outstanding += units;
                    let (mut used, mut waiting) = (0, 0);
                    for observed in self.requests.iter().filter(|observed| observed.gateway == gateway) {
                        if observed.limits.iter().all(|part| part.state != *state) {
                            continue;
                        }
                        let began_us = START_US + observed.started_at.as_micros() as u64;
                        let told_us = began_us + observed.elapsed.as_micros() as u64;
                        match observed.outcome {
                            ClientOutcome::Admitted(_) if told_us < *at_us => used += 1,
                            // Charges for clients that disconnected are not refunded.
                            ClientOutcome::Cancelled if began_us <= *at_us => waiting += 1,
                            _ if began_us <= *at_us && told_us >= *at_us => waiting += 1,
                            _ => {}
                        }
                    }
                    let returning = changes[number + 1..]
                        .iter()
                        .take_while(|(later_us, _)| *later_us <= at_us + MAX_REFUND_DELAY_US);
                    let returning: i64 = returning.filter(|(_, units)| *units < 0).map(|(_, units)| -units).sum();
                    let most = spec.limit.prefetch as i64 + waiting + returning;
                    if outstanding - used > most {
                        let message = format!(
                            "gateway {gateway} has {} tokens of {state:x?} at {:?}, at most {most}",
                            outstanding - used,
                            Duration::from_micros(at_us - START_US),
                        );
                        violated("a gateway prefetches no more than the limit allows", message);
                        break;
                    }
                }
            }
        }
    }

    /// Check that the final charges equal the admitted cost minus refunds.
    fn refunds_are_complete(&self, violated: &mut impl FnMut(&'static str, String)) {
        if !self.is_certain() {
            return;
        }
        let mut expected: BTreeMap<&StateId, i64> = BTreeMap::new();
        // Tokens that the store may have granted to clients at the moment at which they disconnected.
        let mut uncertain: BTreeMap<&StateId, i64> = BTreeMap::new();
        for observed in self.requests {
            for part in observed.limits.iter().filter(|part| !part.shadow_denied) {
                let spec = &self.schedule.limits[part.limit];
                if observed.outcome == ClientOutcome::Cancelled && self.may_be_granted(observed, &part.state) {
                    *uncertain.entry(&part.state).or_default() += spec.cost as i64;
                }
                if observed.is_decided_by(DecidedBy::Store) {
                    *expected.entry(&part.state).or_default() += charged_in_the_end(spec, observed, part) as i64;
                }
            }
        }
        let admitted = self.admitted_units();
        for (state, done) in charges_by_state(&self.store.history) {
            let spec = self.spec(state);
            if spec.concurrency().is_some() || state.0 == "heartbeat" {
                continue;
            }
            let charged: i64 = done.iter().map(|(done, index)| self.store.history[*done].charged(*index)).sum();
            let expected = expected.get(state).copied().unwrap_or(0);
            let uncertain = uncertain.get(state).copied().unwrap_or(0);
            if !(expected..=expected + uncertain).contains(&charged) {
                let message = format!(
                    "{state:x?}: {charged} tokens are charged in the end, {expected} were admitted and {uncertain} may have been"
                );
                violated("charges of rejected requests are refunded", message);
            }
            if spec.goes_into_debt() || spec.limit.shadow || spec.limit.prefetch > 0 {
                continue;
            }
            let charge = |cost| charge(state, &spec.limit.default_variant.state_name, spec.rule(), cost);
            let remaining = self.store.peek(self.now_us, charge(0)).remaining;
            // The result must be the same as without the refunded requests. Windows that begin with the first request
            // are skipped, because a refunded request also opens a window.
            let most = match spec.rule() {
                Rule::FixedWindow(FixedWindow { start: WindowStart::FirstRequest, .. }) => continue,
                _ => {
                    let clock = Clock::manual(START_US);
                    let ideal = MemoryStore::new(1 << 10, clock.clone());
                    for (at_us, cost) in admitted.get(&(state, None)).into_iter().flatten() {
                        clock.set(*at_us);
                        ideal.decide(Operation::Charge, &[charge(*cost)]);
                    }
                    clock.set(self.now_us);
                    ideal.decide(Operation::Peek, &[charge(0)]).outcomes[0].remaining
                }
            };
            let (least, most) = match spec.rule() {
                Rule::TokenBucket(_) => {
                    let (least, refunded) = self.bucket_remaining(spec, &done);
                    (least, if self.refunds_overlap(&done) { most.max(refunded) } else { most })
                }
                _ => (most, most),
            };
            let least = if uncertain > 0 { 0 } else { least };
            if remaining > most || remaining < least {
                let message = format!("{state:x?}: {remaining} tokens remain, expected {least} to {most}");
                violated("refunds equal the charges", message);
            }
        }
    }

    /// Return whether the reply to a charge of this state may have arrived at the moment at which the client
    /// disconnected. If the client disconnected earlier or later, the charge is refunded.
    fn may_be_granted(&self, observed: &ObservedRequest, state: &StateId) -> bool {
        let Schedule { round_trip, jitter, .. } = self.schedule;
        let ended_us = START_US + (observed.started_at + observed.elapsed).as_micros() as u64;
        let arrival = |at_us: u64| {
            let earliest = at_us + round_trip.as_micros() as u64 / 2;
            earliest.saturating_sub(TIMER_US)..=earliest + jitter.as_micros() as u64 / 2 + TIMER_US
        };
        self.store.history.iter().any(|done| {
            done.gateway == observed.gateway
                && done.charges.iter().any(|charge| charge.state == *state)
                && arrival(done.at_us).contains(&ended_us)
        })
    }

    /// Return whether two refunded requests ran concurrently. If so, their refunds may leave more tokens than if the
    /// requests had not been sent.
    fn refunds_overlap(&self, done: &[(usize, usize)]) -> bool {
        let done = || done.iter().map(|(done, _)| &self.store.history[*done]);
        let refunds = done().filter_map(|done| match done.operation {
            Operation::Refund { charged_at } => Some(charged_at..done.at_us),
            _ => None,
        });
        let refunds: Vec<_> = refunds.collect();
        refunds.iter().enumerate().any(|(number, one)| {
            refunds[number + 1..].iter().any(|other| one.start <= other.end && other.start <= one.end)
        })
    }

    /// Return the minimum and the maximum of the remaining tokens of a bucket. A refund credits only tokens that have
    /// not refilled since the charge. The refill first repays the debt from before the charge. Of several charges at
    /// the same time, the refunded one may be the first or the last.
    fn bucket_remaining(&self, spec: &ScheduledLimit, done: &[(usize, usize)]) -> (u64, u64) {
        let remaining = |of_first: bool| {
            let Rule::TokenBucket(rule) = spec.rule() else { return 0 };
            let (mut debt, mut last_us) = (0_u64, START_US);
            // The debt before the first or the last charge at each time.
            let mut before: BTreeMap<u64, u64> = BTreeMap::new();
            for (done, index) in done {
                let each: &DecidedRequest = &self.store.history[*done];
                debt = debt.saturating_sub((each.at_us - last_us) * rule.refill);
                last_us = each.at_us;
                let units = each.charged(*index);
                if let Operation::Refund { charged_at } = each.operation {
                    let flowed = (each.at_us - charged_at) * rule.refill;
                    let lacked = before.get(&charged_at).copied().unwrap_or(0);
                    let given = (units.unsigned_abs() * rule.parts).saturating_sub(flowed.saturating_sub(lacked));
                    debt = debt.saturating_sub(given);
                } else if units > 0 {
                    before
                        .entry(each.at_us)
                        .and_modify(|last| *last = if of_first { *last } else { debt })
                        .or_insert(debt);
                    debt += units.unsigned_abs() * rule.parts;
                }
            }
            debt = debt.saturating_sub((self.now_us - last_us) * rule.refill);
            (rule.burst * rule.parts).saturating_sub(debt) / rule.parts
        };
        (remaining(true), remaining(false))
    }

    /// Check that a store that is out of memory accepts no charges. Redis rejects the first command of a script that
    /// needs memory, unless the script has already executed another write command.
    fn full_store_takes_no_charges(&self, violated: &mut impl FnMut(&'static str, String)) {
        for done in self.store.history.iter().filter(|done| done.out_of_memory && done.needs_memory()) {
            let at = Duration::from_micros(done.at_us - START_US);
            let message = format!("{:?} at {at:?}: {:?}", done.operation, done.charges);
            violated("a store that is out of memory takes no charges", message);
        }
    }

    fn running_within_bounds(&self, violated: &mut impl FnMut(&'static str, String)) {
        let Schedule { class, gateways, incidents, .. } = self.schedule;
        for (state, held) in self.held_permits {
            let spec = self.spec(state);
            let Some(rule) = spec.concurrency() else { continue };
            if spec.limit.shadow || spec.limit.on_store_error == OnStoreError::Allow {
                continue;
            }
            let most = match class {
                Class::Faulty | Class::FaultyMaster => {
                    // A store that is unreachable for longer than half of the permit TTL may lose all permits.
                    let forgets = |lasts: Duration| lasts.as_micros() as u64 > rule.ttl / 2;
                    let lost =
                        incidents.iter().filter(|each| each.fault.loses_state() || forgets(each.duration)).count();
                    let shares = *gateways as u64 * rule.limit.div_ceil(*gateways as u64);
                    rule.limit * (1 + lost as u64) + shares
                }
                // If the store is too slow, each gateway also admits requests within its local share.
                Class::Slow => rule.limit + *gateways as u64 * rule.limit.div_ceil(*gateways as u64),
                _ => rule.limit,
            };
            if held.max > most {
                let message = format!("{state:x?}: {} requests run at {:?}, at most {most}", held.max, held.max_at);
                violated("no more requests run than there are permits", message);
            }
        }
    }
}

/// Return what a request charges in the end, with what it charged after its response or its denial.
fn charged_in_the_end(spec: &ScheduledLimit, observed: &ObservedRequest, part: &RequestLimit) -> u64 {
    match observed.outcome {
        ClientOutcome::Admitted(_) if spec.cost_mode != CostMode::Deferred => spec.cost * u64::from(!part.is_refunded),
        _ => part.charged_later,
    }
}

/// Return pairs of a window length in µs and the maximum that the rule admits in such a window.
fn worst_cases(rule: &Rule, spec: &ScheduledLimit) -> Vec<(u64, u64)> {
    // A refunded request may have opened the window that other requests fill.
    let refundable = if spec.cost_mode == CostMode::Refundable { spec.cost } else { 0 };
    match rule {
        Rule::TokenBucket(rule) => {
            let in_window = |us: u64| (us, rule.burst + (us - 1) * rule.refill / rule.parts);
            [spec.window_us() / 4, spec.window_us(), 4 * spec.window_us()].map(in_window).to_vec()
        }
        Rule::FixedWindow(FixedWindow { limit, window, start: WindowStart::FirstRequest }) => {
            vec![(*window, 2 * limit - 1 + refundable)]
        }
        Rule::FixedWindow(rule) => vec![(rule.window, rule.limit)],
        Rule::SlidingWindow(rule) => vec![(rule.window, 2 * rule.limit - 1 + refundable)],
        Rule::SlidingBuckets(rule) => vec![(rule.window, rule.limit)],
        Rule::SlidingLog(rule) => vec![(rule.window, rule.limit)],
        Rule::Concurrency(_) => Vec::new(),
    }
}

/// Return the start and the cost of the half-open window with the highest cost. The cost of a window is reduced by
/// tokens in `refunds` that were charged before the window and refunded in it.
fn max_in_any_window(units: &[(u64, u64)], window_us: u64, refunds: &[(u64, u64, u64)]) -> (u64, u64) {
    let (mut first, mut sum, mut max) = (0, 0, (0, 0));
    for (at_us, cost) in units {
        sum += cost;
        while units[first].0 + window_us <= *at_us {
            sum -= units[first].1;
            first += 1;
        }
        let start_us = units[first].0;
        let overlapping = refunds
            .iter()
            .filter(|(charged_at, refunded_at, _)| *charged_at < start_us && (start_us..=*at_us).contains(refunded_at));
        let counted = sum.saturating_sub(overlapping.map(|(_, _, units)| units).sum());
        if counted > max.1 {
            max = (start_us, counted);
        }
    }
    max
}

/// Return the start and the cost of the window with the highest cost. `start` returns the start of the window around a
/// time, or `None` if that window is uncertain.
fn max_in_an_aligned_window(units: &[(u64, u64)], start: impl Fn(u64) -> Option<u64>) -> (u64, u64) {
    let mut windows: BTreeMap<u64, u64> = BTreeMap::new();
    for (at_us, cost) in units {
        if let Some(start) = start(*at_us) {
            *windows.entry(start).or_default() += cost;
        }
    }
    windows.into_iter().max_by_key(|(_, units)| *units).unwrap_or_default()
}
