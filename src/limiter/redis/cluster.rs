//! The Redis Cluster client. Each master keeps the states of the identities in its slots, and has its own circuit
//! breaker.

pub mod topology;

use std::collections::HashMap;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout, timeout_at};
use tracing::{debug, warn};

use crate::clock::{elapsed_since, monotonic};
use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::key::{Identity, Key, StateName};
use crate::limiter::metrics::LimiterMetrics;
use crate::limiter::pacing::{OVERLOAD_RETRY_INTERVAL, SETTLEMENT_TIMEOUT};
use crate::limiter::redis::batcher::ServerStore;
use crate::limiter::redis::circuit_breaker::RecoverySignal;
use crate::limiter::redis::cluster::topology::{ClusterMap, SlotMap, identity_slot};
use crate::limiter::redis::commands;
use crate::limiter::redis::server::{Address, Login};
use crate::limiter::redis::{RedisSettings, StateLayout};
use crate::limiter::usage::{UsageAmount, UsageDays, UsageFields, UsageKey, UsagePost};
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict, count_lost};

/// Number of redirections that a call follows at once. Further redirections are followed after [`REDIRECTION_DELAY`],
/// because the nodes do not agree on the owner of the slot yet.
const MAX_REDIRECTIONS: u32 = 3;
const REDIRECTION_DELAY: Duration = Duration::from_millis(2);

/// The client of one worker for a Redis Cluster. Clones share their connections. Connections belong to the runtime that
/// opened them, so create one client for each runtime.
#[derive(Debug, Clone)]
pub struct ClusterStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: RedisSettings,
    seeds: Vec<Address>,
    login: Login,
    cluster_map: Arc<ClusterMap>,
    metrics: Arc<LimiterMetrics>,
    nodes: Mutex<KnownNodes>,
}

/// The nodes for which this worker has a client.
#[derive(Debug, Default)]
struct KnownNodes {
    /// The slot map at the last cleanup of `guards`. The cleanup removed the clients of nodes that are not in this map.
    slots: Option<Arc<SlotMap>>,
    guards: HashMap<Address, ServerStore>,
}

/// A redirection to another node.
enum Redirection {
    /// The redirection applies to this and all later calls.
    Moved(Address),
    /// The redirection applies only to this call: the node is importing the slot.
    Ask(Address),
}

impl ClusterStore {
    /// Create the client of the cluster to which `seeds` belong. All workers share `cluster_map`.
    pub fn new(
        settings: RedisSettings,
        seeds: Vec<Address>,
        login: Login,
        cluster_map: Arc<ClusterMap>,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        ClusterStore(Arc::new(Inner { settings, seeds, login, cluster_map, metrics, nodes: Mutex::default() }))
    }

    /// Return the maximum time from the start of a check to its verdict.
    pub fn timeout(&self) -> Duration {
        self.0.settings.timeout
    }

    /// Return where new states are written.
    pub fn layout(&self) -> &StateLayout {
        &self.0.settings.layout
    }

    /// Return the first part of every key.
    pub fn prefix(&self) -> &str {
        &self.0.settings.prefix
    }

    /// Return the clients of all masters.
    ///
    /// # Errors
    /// The slots of the cluster are not known.
    pub async fn master_nodes(&self) -> Result<Vec<ServerStore>, StoreError> {
        self.slots().await?.masters().iter().map(|address| self.guarded_node(address)).collect()
    }

    /// Return the signal that fires each time a node is available again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        self.0.cluster_map.recovery()
    }

    /// Connect to all masters, so that the first request finds connections.
    pub async fn connect(&self) {
        // Use the connect timeout, because discovering the cluster includes connecting, which takes several round
        // trips.
        let discovered =
            timeout(self.0.settings.connect_timeout, self.0.cluster_map.slots_or_discover(|| self.discover())).await;
        let nodes = match &discovered {
            Ok(Ok(slots)) => slots.masters(),
            // Connect to all seed nodes, so that unreachable nodes are detected before the first request.
            Ok(Err(_)) | Err(_) => &self.0.seeds,
        };
        self.connect_to(nodes).await;
    }

    async fn connect_to(&self, nodes: &[Address]) {
        let guards: Vec<_> = nodes.iter().filter_map(|node| self.guarded_node(node).ok()).collect();
        join_all(guards.iter().map(ServerStore::connect)).await;
    }

    /// Call the master that owns the slot of the identity. All charges have the same identity.
    async fn call_owner(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let Some(charge) = charges.first() else { return Err(StoreError::MalformedReply) };
        let call = |node: ServerStore, asking| async move { node.call(deadline, asking, operation, charges).await };
        self.with_owner(identity_slot(charge.key.identity), deadline, call).await
    }

    /// Send an administrative command for keys in one slot. See [`ServerStore::admin_command`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn admin_command(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        let deadline = monotonic() + self.timeout();
        let call = |node: ServerStore, asking| async move {
            node.admin_command(deadline.saturating_duration_since(monotonic()), asking, command).await
        };
        self.with_owner(slot, deadline, call).await
    }

    /// Run `call` with the master of a slot, and follow redirections.
    async fn with_owner<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        slot: u16,
        deadline: Instant,
        call: impl Fn(ServerStore, bool) -> F,
    ) -> Result<T, StoreError> {
        let mut address = self.owner(slot).await?;
        let mut asking = false;
        for redirections in 0_u32.. {
            if redirections > MAX_REDIRECTIONS {
                sleep(REDIRECTION_DELAY).await;
            }
            if monotonic() >= deadline {
                if redirections == 0 {
                    return Err(StoreError::Overloaded);
                }
                break;
            }
            let error = match call(self.guarded_node(&address)?, asking).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // After an error that is not a redirection, look up the owner of the slot again, because another node may
            // have become the master.
            match parse_redirection(&error, &address) {
                Some(Redirection::Moved(to)) => (address, asking) = (to, false),
                Some(Redirection::Ask(to)) => {
                    (address, asking) = (to, true);
                    continue;
                }
                None if is_try_again(&error) => return Err(error),
                None => {
                    self.refresh_topology();
                    return Err(error);
                }
            }
            self.refresh_topology();
        }
        Err(StoreError::NotConnected("the cluster nodes did not agree on the owner of the slot in time".to_owned()))
    }

    async fn owner(&self, slot: u16) -> Result<Address, StoreError> {
        self.slots().await?.owner(slot).cloned().ok_or_else(|| {
            self.refresh_topology();
            StoreError::NotConnected(format!("no cluster node owns slot {slot}"))
        })
    }

    /// Return the slots of all nodes. The first caller discovers the slots.
    async fn slots(&self) -> Result<Arc<SlotMap>, StoreError> {
        let cluster_map = &self.0.cluster_map;
        if let Some(slots) = cluster_map.slots() {
            return Ok(slots);
        }
        let discovered = timeout(self.timeout(), cluster_map.slots_or_discover(|| self.discover())).await;
        discovered.unwrap_or(Err(StoreError::Timeout))
    }

    /// Query the slots from one node after another until a node replies.
    async fn discover(&self) -> Result<SlotMap, StoreError> {
        let slots = self.0.cluster_map.slots();
        let (masters, all_nodes) = slots.as_ref().map_or((&[][..], &[][..]), |slots| (slots.masters(), slots.nodes()));
        // Begin with a different master each time, because a single master may have outdated slots. Query the replicas
        // last.
        let first = self.0.cluster_map.next_refresh_number() % masters.len().max(1);
        let nodes = masters[first..].iter().chain(&masters[..first]).chain(&self.0.seeds);
        let replicas = all_nodes.iter().filter(|node| !masters.contains(node));
        let mut failure = StoreError::BreakerOpen;
        for address in nodes.chain(replicas) {
            match self.guarded_node(address)?.slots(address).await {
                Ok(slots) => return Ok(slots),
                Err(StoreError::BreakerOpen) => {}
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Refresh the slots in the background, because a call has shown that they may be outdated.
    fn refresh_topology(&self) {
        let Some(permit) = self.0.cluster_map.try_refresh() else { return };
        let cluster = self.clone();
        tokio::spawn(async move {
            if let Ok(slots) = cluster.discover().await {
                let masters = slots.masters().to_vec();
                cluster.0.cluster_map.replace(slots);
                // Connect to new masters before the first request needs them: a promoted replica has no connection yet.
                let is_known = |master: &Address| cluster.lock_nodes().guards.contains_key(master);
                let new: Vec<_> = masters.into_iter().filter(|master| !is_known(master)).collect();
                cluster.connect_to(&new).await;
            }
            permit.release().await;
        });
    }

    fn lock_nodes(&self) -> MutexGuard<'_, KnownNodes> {
        self.0.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the client of a node. Remove the clients of nodes that left the cluster.
    fn guarded_node(&self, address: &Address) -> Result<ServerStore, StoreError> {
        let Inner { settings, login, cluster_map, .. } = &*self.0;
        let slots = cluster_map.slots();
        let mut known_nodes = self.lock_nodes();
        if known_nodes.slots.as_ref().map(Arc::as_ptr) != slots.as_ref().map(Arc::as_ptr) {
            let is_member = |address: &Address| slots.as_ref().is_none_or(|slots| slots.nodes().contains(address));
            // Keep a client only if it uses the current circuit breaker of its node. A node that left the cluster and
            // returned has a new circuit breaker.
            known_nodes
                .guards
                .retain(|address, guard| is_member(address) && guard.uses_breaker(&cluster_map.breaker(address)));
            known_nodes.slots = slots;
        }
        if let Some(guard) = known_nodes.guards.get(address) {
            return Ok(guard.clone());
        }
        let server = login.node_endpoint(address).map_err(|error| StoreError::NotConnected(error.to_string()))?;
        let breaker = cluster_map.breaker(address);
        let guard = ServerStore::for_node(settings, server, breaker, address.clone(), self.0.metrics.clone());
        known_nodes.guards.insert(address.clone(), guard.clone());
        Ok(guard)
    }
}

impl ClusterStore {
    /// Decide all of `charges` before `deadline`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        if !is_single_slot(charges) {
            let is_same_identity = |one: &Charge<'_>, other: &Charge<'_>| one.key.identity == other.key.identity;
            return self.scatter(deadline, operation, charges, is_same_identity).await;
        }
        match self.call_owner(deadline, operation, charges).await {
            // Call the node for each key separately, because the slot is being migrated and its keys are on two nodes.
            Err(error) if is_try_again(&error) => self.scatter(deadline, operation, charges, |_, _| false).await,
            result => result,
        }
    }
}

/// Return whether all charges have the same identity. One server then keeps all their states, because an identity has
/// only one slot.
pub fn is_single_slot(charges: &[Charge<'_>]) -> bool {
    charges.windows(2).all(|pair| pair[0].key.identity == pair[1].key.identity)
}

/// Return whether the keys of the call are on two nodes, because their slot migrates. Calls with a single key still
/// succeed.
fn is_try_again(error: &StoreError) -> bool {
    matches!(error, StoreError::Redirected(reply) if reply.code() == "TRYAGAIN")
}

/// Parse `MOVED SLOT ADDRESS` or `ASK SLOT ADDRESS`.
fn parse_redirection(error: &StoreError, asked_node: &Address) -> Option<Redirection> {
    let StoreError::Redirected(reply) = error else { return None };
    let mut node = Address::parse(reply.detail().split_ascii_whitespace().nth(1)?)?;
    if node.host.is_empty() {
        // If a node does not know its own host, the address refers to the host of the node that replied.
        node.host = asked_node.host.clone();
    }
    match reply.code() {
        "ASK" => Some(Redirection::Ask(node)),
        "MOVED" => Some(Redirection::Moved(node)),
        _ => None,
    }
}

// === Decisions by several calls: one for each identity, or one for each key while a slot migrates ===

// First, peek at the states of all groups. Charge the groups only if none of them denies, so that a denied request is
// rarely charged in other groups. If two requests race for the last token, one of them is denied. If a group denies the
// charge, the gateway refunds the charges of the other groups, waits for these refunds and starts again with the peek.
// The charges of one attempt then neither cause the denial of the next attempt nor reduce the reported remaining
// tokens. A request may still be denied because of tokens that another request refunds one round trip later. For this
// reason, denials by several calls are never cached (see `Verdict::decided_at_us`).

/// Maximum number of attempts to charge a request that races with other requests.
const MAX_ATTEMPTS: usize = 3;

/// An owned copy of a [`Charge`], for the task that makes the calls. The task may continue after the request has
/// ended.
#[derive(Debug)]
struct ShardCharge {
    identity: Identity,
    state_name: StateName,
    rule: Rule,
    cost: u64,
    mode: ChargeMode,
    permit_id: u64,
    debt_before_us: u64,
    usage: Option<Arc<UsageDays>>,
}

impl ShardCharge {
    fn from_charge(charge: &Charge<'_>) -> Self {
        let Charge { key: Key { identity, state_name }, rule, cost, mode, permit_id, debt_before_us, usage } = *charge;
        ShardCharge {
            identity,
            state_name: state_name.clone(),
            rule: rule.clone(),
            cost,
            mode,
            permit_id,
            debt_before_us,
            usage: usage.cloned(),
        }
    }

    fn to_charge(&self, cost: u64) -> Charge<'_> {
        let key = Key { identity: self.identity, state_name: &self.state_name };
        let ShardCharge { mode, permit_id, debt_before_us, .. } = *self;
        Charge { key, rule: &self.rule, cost, mode, permit_id, debt_before_us, usage: self.usage.as_ref() }
    }
}

/// The charges of one call, each with its index in the request.
type ShardCall = Vec<(usize, ShardCharge)>;

/// Sends the result to the waiting request.
type ResultSender = oneshot::Sender<Result<Verdict, StoreError>>;

/// A group and its result.
#[derive(Debug, Clone)]
struct ShardResult<'a> {
    group: &'a [(usize, ShardCharge)],
    answer: Result<Verdict, StoreError>,
}

impl ShardResult<'_> {
    fn is_denial(&self) -> bool {
        self.answer.as_ref().is_ok_and(|verdict| verdict.granted == 0)
    }
}

impl ClusterStore {
    /// Decide a request with one call for each group of charges.
    async fn scatter(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
        is_same_group: impl Fn(&Charge<'_>, &Charge<'_>) -> bool,
    ) -> Result<Verdict, StoreError> {
        let mut groups: Vec<ShardCall> = Vec::new();
        for (charge_index, charge) in charges.iter().enumerate() {
            let indexed_charge = (charge_index, ShardCharge::from_charge(charge));
            match groups.iter_mut().find(|group| is_same_group(&charges[group[0].0], charge)) {
                Some(group) => group.push(indexed_charge),
                None => groups.push(vec![indexed_charge]),
            }
        }
        // Run the calls in a separate task, so that a client that disconnects does not cancel refunds.
        let cluster = self.clone();
        let charge_count = charges.len();
        let (result_sender, verdict) = oneshot::channel();
        tokio::spawn(async move {
            cluster.scatter_gather(deadline, operation, &groups, charge_count, result_sender).await;
        });
        verdict.await.unwrap_or(Err(StoreError::Timeout))
    }

    /// Return an error if the circuit breaker of a node that owns the slot of a group is open. The error says that
    /// nothing was executed, so the caller can retry the whole operation. Without this check, other nodes would execute
    /// their groups of a charge, refund or renewal.
    async fn check_available(&self, groups: &[ShardCall]) -> Result<(), StoreError> {
        for group in groups {
            if self.guarded_node(&self.owner(identity_slot(group[0].1.identity)).await?)?.is_open() {
                self.refresh_topology();
                return Err(StoreError::BreakerOpen);
            }
        }
        Ok(())
    }

    /// Call all groups and send the verdict. Then refund charges that the request does not need. If one group denied or
    /// failed, refund the charges of the other groups. If the request has stopped waiting for the verdict, refund all
    /// charges.
    async fn scatter_gather(
        &self,
        deadline: Instant,
        operation: Operation,
        groups: &[ShardCall],
        charge_count: usize,
        result_sender: ResultSender,
    ) {
        if let Err(error) = self.check_available(groups).await {
            return drop(result_sender.send(Err(error)));
        }
        if !matches!(operation, Operation::Check | Operation::TakeUpTo) {
            let results = self.call_all(deadline, operation, groups).await;
            // The caller does not retry the groups that were not executed, because other groups may have been.
            for ShardResult { group, answer } in &results {
                if let Err(error) = answer
                    && error.is_not_executed()
                {
                    let charges: Vec<_> = group.iter().map(|(_, owned)| owned.to_charge(owned.cost)).collect();
                    count_lost(&self.0.metrics, operation, &charges, error);
                }
            }
            let granted = min_granted(&results);
            return drop(result_sender.send(merge(results, granted, charge_count)));
        }
        for _ in 0..MAX_ATTEMPTS {
            let mut peeked = self.call_all(deadline, Operation::Peek, groups).await;
            if min_granted(&peeked) == 0 {
                if peeked.iter().any(ShardResult::is_denial) {
                    // One denial is sufficient: the request is denied even if other groups failed.
                    peeked.retain(|result| result.answer.is_ok());
                }
                return drop(result_sender.send(merge(peeked, 0, charge_count)));
            }
            let charged = self.call_all(deadline, operation, groups).await;
            let granted = min_granted(&charged);
            let mut refunds = pin!(self.refund_excess(operation, &charged, granted));
            if granted > 0 || !charged.iter().any(ShardResult::is_denial) {
                let is_unclaimed = result_sender.send(merge(charged.clone(), granted, charge_count)).is_err();
                refunds.await;
                if is_unclaimed && granted > 0 {
                    self.refund(operation, &charged, 0..granted).await;
                }
                return;
            }
            // Wait for the refunds, so that the charges of this attempt cannot cause the denial of the next one.
            if timeout_at(deadline.into(), refunds.as_mut()).await.is_err() {
                let _ = result_sender.send(Err(StoreError::LateReply));
                return refunds.await;
            }
        }
        // Deny the request, because other requests have taken the last token in each attempt.
        let mut asked = self.call_all(deadline, Operation::Peek, groups).await;
        asked.retain(|result| result.answer.is_ok());
        let saturated = |verdict| self.saturated(verdict);
        let _ = result_sender.send(merge(asked, 0, charge_count).map(saturated));
    }

    /// Return the denial of a request that was denied in all attempts because other requests took the last token.
    fn saturated(&self, mut verdict: Verdict) -> Verdict {
        if verdict.outcomes.iter().all(|outcome| outcome.status == Status::Ok)
            && let Some(outcome) = verdict.outcomes.first_mut()
        {
            (outcome.status, outcome.retry_us) = (Status::Saturated, self.timeout().as_micros() as u64);
        }
        verdict
    }

    /// Call each group. If the keys of a group are on two nodes, call each charge of the group separately.
    async fn call_all<'a>(
        &self,
        deadline: Instant,
        operation: Operation,
        groups: &'a [ShardCall],
    ) -> Vec<ShardResult<'a>> {
        let mut results = self.call_each(deadline, operation, groups.iter().map(Vec::as_slice)).await;
        let split_groups = results.extract_if(.., |result| result.answer.as_ref().is_err_and(is_try_again));
        let in_pieces: Vec<_> = split_groups.map(|result| result.group).collect();
        results.extend(self.call_each(deadline, operation, in_pieces.iter().flat_map(|group| group.chunks(1))).await);
        results
    }

    async fn call_each<'a>(
        &self,
        deadline: Instant,
        operation: Operation,
        groups: impl Iterator<Item = &'a [(usize, ShardCharge)]>,
    ) -> Vec<ShardResult<'a>> {
        let cost = |owned: &ShardCharge| match operation {
            // A check of a deferred charge needs only one token, so the peek before the check asks for one token.
            Operation::Peek if owned.mode.is_deferred() => 1,
            _ => owned.cost,
        };
        join_all(groups.map(async |group| {
            let charges: Vec<_> = group.iter().map(|(_, owned)| owned.to_charge(cost(owned))).collect();
            ShardResult { group, answer: self.call_group(deadline, operation, &charges).await }
        }))
        .await
    }

    /// Call the owner of a group. While a slot migrates, the state and the usage total of a charge may be on two nodes.
    /// In this case, charge the state, and change the total in a second call.
    async fn call_group(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let result = self.call_owner(deadline, operation, charges).await;
        let [charge] = charges else { return result };
        if charge.usage.is_none() || !result.as_ref().is_err_and(is_try_again) {
            return result;
        }
        let verdict = self.call_owner(deadline, operation, &[Charge { usage: None, ..*charge }]).await?;
        self.add_usage(operation, charge, &verdict).await;
        Ok(verdict)
    }

    /// Charge, refund or renew the charges of a group. Retry until the call may have been executed, for at most
    /// [`SETTLEMENT_TIMEOUT`].
    async fn settle_group(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        let started_at = monotonic();
        loop {
            let result = self.call_group(monotonic() + self.timeout(), operation, charges).await;
            let Err(error) = &result else { return result };
            if !error.is_not_executed() || elapsed_since(started_at) >= SETTLEMENT_TIMEOUT {
                count_lost(&self.0.metrics, operation, charges, error);
                return result;
            }
            debug!(%error, ?operation, "a charge or refund was not made yet; retrying");
            sleep(OVERLOAD_RETRY_INTERVAL).await;
        }
    }

    /// Add the amount that an operation charged to the usage total.
    async fn add_usage(&self, operation: Operation, charge: &Charge<'_>, verdict: &Verdict) {
        let Some(outcome) = verdict.outcomes.first() else { return };
        let amount = charge.usage_amount(operation, verdict.granted, outcome.status);
        let Some(day) = charge.usage_day(operation, verdict.now_us).filter(|_| amount != 0) else { return };
        let Key { identity, state_name } = charge.key;
        let limit = state_name.limit_name().into();
        let fields = UsageFields::Days;
        let key = UsageKey { limit, identity: identity.0, month: day.month(), fields };
        let amounts = vec![UsageAmount { day: day.date.day(), name: None, cost: amount }];
        let post = UsagePost { key, amounts, poster: 0, sequence: 0 };
        let command = commands::post_usage_command(self.prefix(), &post);
        for _ in 0..MAX_ATTEMPTS {
            match self.admin_command(identity_slot(identity), &command).await {
                Ok(_) => return,
                Err(error) if error.is_not_executed() => sleep(REDIRECTION_DELAY).await,
                Err(error) => {
                    return warn!(%error, amount, "usage totals may be lost, because their cluster slot migrates to \
                                                  another node");
                }
            }
        }
        warn!(amount, "usage totals are lost, because their cluster slot migrates to another node");
    }

    /// Refund the tokens that a group granted in addition to the `granted` tokens that all groups granted.
    async fn refund_excess(&self, operation: Operation, results: &[ShardResult<'_>], granted: u64) {
        self.refund(operation, results, granted..u64::MAX).await;
    }

    /// Refund a range of the tokens of each group. Token 0 is the first token that the group granted.
    async fn refund(&self, operation: Operation, results: &[ShardResult<'_>], tokens: Range<u64>) {
        join_all(results.iter().map(|result| self.refund_group(operation, result, &tokens))).await;
    }

    async fn refund_group(&self, operation: Operation, result: &ShardResult<'_>, tokens: &Range<u64>) {
        let Some(verdict) = result.answer.as_ref().ok().filter(|verdict| verdict.granted > tokens.start) else {
            return;
        };
        let refund = Operation::Refund { charged_at: verdict.now_us };
        let charged = result.group.iter().zip(&verdict.outcomes).filter(|((_, owned), outcome)| {
            // A shadow limit that would have denied the request has charged nothing, and a deferred cost is not charged
            // yet.
            outcome.status == Status::Ok && !owned.mode.is_deferred()
        });
        join_all(charged.map(async |((_, owned), outcome)| {
            let (cost, with_later) = match operation {
                Operation::TakeUpTo => (verdict.granted.min(tokens.end) - tokens.start, verdict.granted - tokens.start),
                _ => (owned.cost, owned.cost),
            };
            let debt_before_us = owned.rule.debt_before_us(outcome, 0, with_later);
            let charge = Charge { debt_before_us, ..owned.to_charge(cost) };
            let _ = self.settle_group(refund, &[charge]).await;
        }))
        .await;
    }
}

/// Return the number of tokens that all groups granted. A failed group granted 0.
fn min_granted(results: &[ShardResult<'_>]) -> u64 {
    let granted = results.iter().map(|result| result.answer.as_ref().map_or(0, |verdict| verdict.granted));
    granted.min().unwrap_or(0)
}

/// Merge the verdicts of all groups.
fn merge(results: Vec<ShardResult<'_>>, granted: u64, charge_count: usize) -> Result<Verdict, StoreError> {
    let untouched = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    let verdict = Verdict::new(granted, 0, vec![untouched; charge_count]);
    let mut merged = Verdict { decided_at_us: vec![0; charge_count], ..verdict };
    for ShardResult { group, answer } in results {
        let verdict = answer.map_err(|error| match error {
            // The merged error must not say that nothing was executed: the call of this group was not executed, but the
            // calls of other groups may have been.
            error if error.is_overload() => StoreError::LateReply,
            StoreError::NotConnected(reason) => StoreError::Unreachable(reason),
            error if error.is_not_executed() => StoreError::Unreachable(error.to_string()),
            error => error,
        })?;
        merged.now_us = merged.now_us.max(verdict.now_us);
        // Use the largest excess of a group over `granted`. After a charge, the excess tokens are refunded later, but
        // the outcomes still count them as charged.
        merged.charged_later = merged.charged_later.max(verdict.granted.saturating_sub(granted));
        for ((charge_index, _), outcome) in group.iter().zip(verdict.outcomes) {
            merged.outcomes[*charge_index] = outcome;
            merged.decided_at_us[*charge_index] = verdict.now_us;
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::verdict::ErrorReply;

    #[test]
    fn merged_error_never_reports_not_executed() {
        let refused = ErrorReply::new("OOM", "");
        // Each case has an error and the expected values of `is_overload` and `is_outage`.
        let cases = [
            (StoreError::Overloaded, true, false),
            (StoreError::NotConnected(String::new()), false, true),
            (StoreError::LateReply, true, false),
            (StoreError::BreakerOpen, false, true),
            (StoreError::Timeout, false, true),
            (StoreError::WritesRejected(refused.clone()), false, true),
            (StoreError::Redirected(refused.clone()), false, true),
            (StoreError::Rejected(refused), false, true),
        ];
        for (error, is_overload, is_outage) in cases {
            for first in [true, false] {
                let ran = || ShardResult { group: &[], answer: Ok(Verdict::new(1, 1, Vec::new())) };
                let failed = || ShardResult { group: &[], answer: Err(error.clone()) };
                let answers = if first { vec![failed(), ran()] } else { vec![ran(), failed()] };
                assert_eq!(min_granted(&answers), 0, "{error}: the successful group must be refunded");
                let merged = merge(answers, 0, 2).unwrap_err();
                assert_eq!((merged.is_overload(), merged.is_outage()), (is_overload, is_outage), "{error}: {merged}");
                assert!(!merged.is_not_executed(), "{error}: {merged}");
            }
        }
    }
}
