//! Rate limiter: decide whether a request may pass, independently of HTTP.

pub mod admin;
pub mod algorithm;
pub mod clock;
pub mod decision;
pub mod denial_cache;
pub mod fallback;
pub mod key;
pub mod memory;
pub mod metrics;
pub mod overrides;
pub mod pacing;
pub mod prefetch;
pub mod quota;
pub mod redis;
pub mod settlement;
pub mod singleflight;
pub mod spec;
pub mod store;
pub mod usage;
pub mod verdict;
pub mod wait_queue;

use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::clock::{Clock, elapsed_since, monotonic, unix_us};
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::denial_cache::{DenialCache, DenialHit};
use crate::limiter::fallback::{StoreUnavailable, decide_overloaded, decide_without_store};
use crate::limiter::key::IdentityHasher;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{AnsweredBy, LimiterMetrics};
use crate::limiter::overrides::Overrides;
use crate::limiter::prefetch::PrefetchPool;
use crate::limiter::redis::{RedisDeployment, RedisSettings};
use crate::limiter::settlement::{
    ConcurrencyPermits, Deferred, DeferredCharge, DeferredCharges, OwnedCharge, SettlementQueue, StoreHandle,
};
use crate::limiter::singleflight::{CheckGroup, Singleflight};
use crate::limiter::spec::{LimitSpec, OnStoreError, QueuePolicy};
use crate::limiter::store::{DecidedBy, RedisStore, Store};
use crate::limiter::verdict::{Operation, StoreError, Verdict};
use crate::limiter::wait_queue::WaitQueues;

/// A rate limiter. Each worker has its own.
#[derive(Debug)]
pub struct Limiter {
    store_handle: Arc<StoreHandle>,
    settlements: Arc<SettlementQueue>,
    singleflight: Option<Arc<Singleflight>>,
    wait_queues: Arc<WaitQueues>,
    /// The quota overrides that administrators set for single identities.
    pub overrides: Arc<Overrides>,
    /// The id of the next concurrency permit. The first id is random, so that ids of different gateways do not collide.
    next_permit_id: AtomicU64,
}

impl Limiter {
    /// Create a limiter that counts in the memory of this process, for at most about `max_states` states: one for each
    /// limit and identity in use. Create one per process and share it in an [`Arc`].
    pub fn in_memory(max_states: usize) -> Self {
        Limiter::standalone(Store::Memory(Arc::new(MemoryStore::new(max_states, Clock::Store))), None)
    }

    /// Create a limiter that counts in Redis, together with all limiters that use the same server, key prefix, limit
    /// names and identity secret. Call it on the tokio runtime that checks requests: connections belong to this
    /// runtime. Create one per process and share it in an [`Arc`].
    ///
    /// Wait for the first connection for at most `settings.connect_timeout`. An unreachable Redis is no error: each
    /// limit then follows its [`OnStoreError`] until Redis answers. In this process the limiter keeps at most about
    /// `max_states` denials and states of local shares.
    pub async fn redis(deployment: RedisDeployment, settings: RedisSettings, max_states: usize) -> Self {
        let (metrics, connect_timeout) = (Arc::<LimiterMetrics>::default(), settings.connect_timeout);
        let store = RedisStore::new(&(deployment, settings), Arc::default(), Arc::default(), metrics.clone());
        store.connect_within(connect_timeout).await;
        let fallback = Arc::new(MemoryStore::new(max_states, Clock::Store));
        Limiter::standalone(Store::Redis { store, fallback, metrics }, Some(Arc::new(DenialCache::new(max_states))))
    }

    /// Create a limiter that shares nothing with another limiter of this process.
    fn standalone(store: Store, denials: Option<Arc<DenialCache>>) -> Self {
        // Without a limit to look up, no override can exist, so the secret is not used.
        let overrides = Arc::new(Overrides::new(IdentityHasher::new(""), |_| None, denials.clone()));
        Limiter::new(store, denials, Arc::default(), Arc::default(), overrides, random_permit_id())
    }

    /// Create a limiter over a store. `denials`, `prefetch_pool`, `wait_queues` and `overrides` are shared by the whole
    /// process. Permit ids count from `first_permit_id`; no two limiters of one store may use the same ids.
    pub fn new(
        store: Store,
        denials: Option<Arc<DenialCache>>,
        prefetch_pool: Arc<PrefetchPool>,
        wait_queues: Arc<WaitQueues>,
        overrides: Arc<Overrides>,
        first_permit_id: u64,
    ) -> Self {
        let singleflight = match &store {
            Store::Memory(_) => None,
            Store::Redis { store, .. } => Some(Arc::new(Singleflight::new(store.timeout(), prefetch_pool))),
        };
        let store_handle = Arc::new(StoreHandle { store, denials, tasks: TaskTracker::new() });
        let settlements = Arc::new(SettlementQueue::new(store_handle.clone()));
        let next_permit_id = AtomicU64::new(first_permit_id);
        Limiter { store_handle, settlements, singleflight, wait_queues, overrides, next_permit_id }
    }

    /// Decide all checks of a request at one instant: charge all of them or none. If all limits that deny the request
    /// have a queue policy, the request waits in the queue and is checked again.
    ///
    /// # Errors
    /// The store cannot answer, and a limit of the request fails closed (`on_store_error = "deny"`).
    pub async fn check<'a>(&self, checks: &[LimitCheck<'a, '_>]) -> Result<Decision<'a>, StoreUnavailable> {
        match checks.iter().find_map(|check| Some((check, check.limit.queue_policy?))) {
            // On the heap: few requests need the memory of this future.
            Some((first, wait)) => Box::pin(self.check_queued(checks, first, wait)).await,
            None => self.check_now(checks).await,
        }
    }

    /// Refund unused prefetched tokens. Return when these refunds, the permit releases and the deferred charges are
    /// done.
    pub async fn flush_pending(&self) {
        if let Some(singleflight) = &self.singleflight {
            singleflight.stop();
        }
        self.store_handle.tasks.close();
        self.store_handle.tasks.wait().await;
    }

    async fn check_queued<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        first: &LimitCheck<'a, '_>,
        queue_policy: QueuePolicy,
    ) -> Result<Decision<'a>, StoreUnavailable> {
        let arrived_at = monotonic();
        let key = first.key().local_hash();
        if !self.wait_queues.has_waiters(key) {
            let decision = self.check_now(checks).await?;
            if decision.retry_delay(arrived_at).is_none() {
                return Ok(decision);
            }
        }
        // Requests beyond the number that can be admitted within the maximum wait would wait in vain.
        let max_admitted = first.variant.max_admitted_in(queue_policy.max_wait) / first.cost.max(1);
        let max_queue = queue_policy.max_queue.min(usize::try_from(max_admitted).unwrap_or(usize::MAX).max(1));
        // Queue full or timed out: reject without another check. The tokens belong to earlier requests.
        let Some(ticket) = self.wait_queues.enqueue(key, max_queue) else {
            return Ok(queue_full(checks, first, queue_policy));
        };
        let ready =
            timeout(queue_policy.max_wait.saturating_sub(elapsed_since(arrived_at)), pin!(ticket.ready())).await;
        let Ok(_ready) = ready else { return Ok(queue_full(checks, first, queue_policy)) };
        loop {
            let decision = self.check_now(checks).await?;
            match decision.retry_delay(arrived_at) {
                Some(pause) => sleep(pause).await,
                None => return Ok(decision),
            }
        }
    }

    async fn check_now<'a>(&self, checks: &[LimitCheck<'a, '_>]) -> Result<Decision<'a>, StoreUnavailable> {
        if checks.is_empty() {
            return Ok(Decision::unlimited());
        }
        let singleflight_group =
            self.singleflight.as_ref().and_then(|coalescer| Some((coalescer, check_group(checks)?)));
        let prefetched = || self.try_prefetched(checks, singleflight_group?);
        // Prefetched tokens come before cached denials: the store may have denied because this process prefetched the
        // tokens.
        if let Some(decision) = prefetched().or_else(|| self.try_cached_denial(checks)) {
            return Ok(decision);
        }
        let mut leases = None;
        let mut first_permit_id = 0;
        if checks.iter().any(|check| check.is_concurrency()) {
            first_permit_id = self.allocate_permit_ids(checks);
            leases = Some(self.pending_permits(checks, DecidedBy::Store, first_permit_id));
        }
        if let Some(requested) = leases.take_if(|_| self.store_handle.store.has_recovered_within(PERMIT_RECOVERY_TIME))
        {
            match self.try_local_permits(checks, first_permit_id) {
                Some(denial) => {
                    requested.discard();
                    return Ok(denial);
                }
                None => leases = Some(requested.with_local_count()),
            }
        }
        let charges: Vec<_> = checks.iter().map(|check| check.charge(DecidedBy::Store, first_permit_id)).collect();
        let asked_at = monotonic();
        let result = match singleflight_group {
            Some((coalescer, set)) if self.store_handle.store.is_one_call(&charges) => {
                let pending_charges = || checks.iter().map(|check| check.owned_charge(check.cost)).collect();
                // On the heap: requests that the denial cache rejects never create this future.
                Box::pin(coalescer.check(&self.store_handle, set, &charges, asked_at, pending_charges)).await
            }
            _ => {
                self.store_handle.store.count_check(AnsweredBy::Store);
                self.store_handle.store.call(DecidedBy::Store, asked_at, Operation::Check, &charges).await
            }
        };
        if let Some(full_limits) = result.as_ref().ok().map(|verdict| verdict.full_limits).filter(|full| *full > 0) {
            if let Some(leases) = leases {
                leases.discard();
            }
            return self.check_with_room(checks, full_limits, first_permit_id);
        }
        let granted = result.as_ref().is_ok_and(|verdict| verdict.granted > 0);
        // Meanwhile another worker may have prefetched the tokens that the store lacks.
        if !granted && let Some(decision) = prefetched() {
            return Ok(decision);
        }
        let mut decided_at_us = Vec::new();
        let mut decision = match result {
            Ok(mut verdict) => {
                self.cache_denials(checks, &verdict, asked_at);
                decided_at_us = mem::take(&mut verdict.decided_at_us);
                Decision::new(verdict, DecidedBy::Store, checks.iter())
            }
            Err(error) => {
                let Store::Redis { fallback, .. } = &self.store_handle.store else {
                    return Err(StoreUnavailable(error));
                };
                if let Some(leases) = leases.take().filter(|_| error.is_not_executed()) {
                    // After any other error it is unknown which permits were granted, so dropping the value releases
                    // them.
                    leases.discard();
                }
                if error.is_overload() {
                    return decide_overloaded(checks, error);
                }
                // Use new permit ids. Releasing the permits that the store may have granted must not release these
                // permits once they are registered.
                let first_lease = self.allocate_permit_ids(checks);
                let decision = decide_without_store(fallback, checks, error, first_lease)?;
                self.store_handle.post_usage();
                if checks.iter().any(LimitCheck::is_concurrency) {
                    leases = Some(self.pending_permits(checks, DecidedBy::Local, first_lease));
                }
                decision
            }
        };
        match (leases, decision.admitted) {
            (Some(leases), true) => {
                let denied =
                    |limit: &LimitSpec| decision.shadow_denied.iter().any(|denied| std::ptr::eq(*denied, limit));
                let granted =
                    |limit_index| checks.iter().any(|check| check.limit_index == limit_index && !denied(check.limit));
                decision.permits = Some(Box::new(leases.hold(granted)));
            }
            (Some(leases), false) => leases.discard(),
            (None, _) => {}
        }
        self.defer_charges(checks, &mut decision, None, &decided_at_us);
        Ok(decision)
    }

    /// Decide by the limits that have room in the memory store. The other limits cannot count and follow
    /// `on_store_error`.
    fn check_with_room<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        full_limits: u64,
        first_permit_id: u64,
    ) -> Result<Decision<'a>, StoreUnavailable> {
        let Store::Memory(memory) = &self.store_handle.store else {
            return Err(StoreUnavailable(StoreError::CapacityExceeded));
        };
        let (verdict, counted) =
            fallback::decide_with_room(memory, checks.iter(), full_limits, DecidedBy::Store, first_permit_id)?;
        let mut decision = Decision::new(verdict, DecidedBy::Store, counted.into_iter());
        if decision.admitted && checks.iter().any(LimitCheck::is_concurrency) {
            let permits = self.pending_permits(checks, DecidedBy::Store, first_permit_id);
            decision.permits = Some(Box::new(permits.hold(|_| true)));
        }
        self.defer_charges(checks, &mut decision, None, &[]);
        Ok(decision)
    }

    /// Acquire the permits of a request from this gateway's shares of its concurrency limits. Return a decision only if
    /// they deny.
    fn try_local_permits<'a>(&self, checks: &[LimitCheck<'a, '_>], first_permit_id: u64) -> Option<Decision<'a>> {
        let Store::Redis { fallback, .. } = &self.store_handle.store else { return None };
        let concurrency_checks = || checks.iter().filter(|check| check.is_concurrency());
        let charges: Vec<_> =
            concurrency_checks().map(|check| check.charge(DecidedBy::Local, first_permit_id)).collect();
        let verdict = fallback.decide(Operation::Check, &charges);
        // If the memory store has no room for the permits, the store alone decides.
        (verdict.granted == 0 && verdict.full_limits == 0)
            .then(|| Decision::new(verdict, DecidedBy::Local, concurrency_checks()))
    }

    /// Decide with prefetched tokens, if there are any.
    fn try_prefetched<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        (singleflight, group): (&Arc<Singleflight>, CheckGroup),
    ) -> Option<Decision<'a>> {
        let (verdict, charged_at) = singleflight.take_prefetched(group)?;
        self.store_handle.store.count_check(AnsweredBy::Prefetch);
        let elapsed_us = verdict.now_us - charged_at;
        let mut decision = Decision::from_earlier_charge(verdict, DecidedBy::Store, checks.iter(), elapsed_us);
        self.defer_charges(checks, &mut decision, Some(charged_at), &[]);
        Some(decision)
    }

    /// Return the denial of a request that the denial cache covers.
    fn try_cached_denial<'a>(&self, checks: &[LimitCheck<'a, '_>]) -> Option<Decision<'a>> {
        let denials = self.store_handle.denials.as_ref()?;
        let cached = |check: &LimitCheck<'_, '_>| {
            let hit = denials.get(check.key().local_hash(), check.variant.id, check.required());
            hit.filter(|_| check.is_cacheable())
        };
        let now_us = checks.iter().find_map(cached)?.now_us;
        let outcomes = checks.iter().map(|check| cached(check).map_or(NOT_INVOLVED, |hit| hit.outcome)).collect();
        let verdict = Verdict::new(0, now_us, outcomes);
        self.store_handle.store.count_check(AnsweredBy::DenialCache);
        Some(Decision { is_from_cache: true, ..Decision::new(verdict, DecidedBy::Store, checks.iter()) })
    }

    fn cache_denials(&self, checks: &[LimitCheck<'_, '_>], verdict: &Verdict, asked_at: Instant) {
        let is_certain = verdict.granted == 0 && verdict.decided_at_us.is_empty();
        let Some(denials) = self.store_handle.denials.as_ref().filter(|_| is_certain) else { return };
        for (check, outcome) in checks.iter().zip(&verdict.outcomes).filter(|(check, _)| check.is_cacheable()) {
            let hit = DenialHit { now_us: verdict.now_us, outcome: *outcome };
            denials.insert(check.key().local_hash(), check.variant.id, check.required(), hit, asked_at);
        }
    }

    /// Reserve a permit id for each limit of the request. Return the first one.
    fn allocate_permit_ids(&self, checks: &[LimitCheck<'_, '_>]) -> u64 {
        let permits = checks.last().map_or(0, |last| last.limit_index as u64 + 1);
        self.next_permit_id.fetch_add(permits, Ordering::Relaxed)
    }

    fn pending_permits(
        &self,
        checks: &[LimitCheck<'_, '_>],
        source: DecidedBy,
        first_permit_id: u64,
    ) -> ConcurrencyPermits {
        let charges = checks.iter().filter(|check| check.is_concurrency());
        let asked = charges.map(|check| check.owned_charge(check.permit_id(first_permit_id))).collect();
        ConcurrencyPermits::requested(self.settlements.clone(), source, asked)
    }

    /// Record the deferred charges of an admitted request. `charged_at` is the time of the charge (µs) if it was made
    /// before the decision. `decided_at_us` has one time for each check if several servers decided; otherwise it is
    /// empty.
    fn defer_charges(
        &self,
        checks: &[LimitCheck<'_, '_>],
        decision: &mut Decision<'_>,
        charged_at: Option<u64>,
        decided_at_us: &[u64],
    ) {
        if decision.admitted && checks.iter().any(|check| check.deferred != Deferred::Nothing) {
            let charged_at = charged_at.unwrap_or(decision.now_us);
            decision.deferred_charges =
                Some(Box::new(self.deferred_charges(checks, decision, charged_at, decided_at_us)));
        }
    }

    fn deferred_charges(
        &self,
        checks: &[LimitCheck<'_, '_>],
        decision: &Decision<'_>,
        charged_at: u64,
        decided_at_us: &[u64],
    ) -> DeferredCharges {
        let is_shadow_denied =
            |check: &LimitCheck<'_, '_>| decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit));
        let falls_back_locally = |check: &LimitCheck<'_, '_>| check.limit.on_store_error == OnStoreError::Local;
        let is_counted = |check: &LimitCheck<'_, '_>| {
            check.deferred != Deferred::Nothing
                && !is_shadow_denied(check)
                // Without the store, the usage of other limits is counted as well.
                && (decision.decided_by == DecidedBy::Store || falls_back_locally(check) || check.limit.usage.is_some())
        };
        let debt_before_us = |check: &LimitCheck<'_, '_>| {
            let mut debts = decision.debts_before_us.iter();
            debts.find(|(limit_index, _)| *limit_index == check.limit_index).map_or(0, |(_, us)| *us)
        };
        let charges =
            checks.iter().enumerate().filter(|(_, check)| is_counted(check)).map(|(index, check)| DeferredCharge {
                deferred: check.deferred,
                decided_by: decision.decided_by,
                charged_at: decided_at_us.get(index).copied().unwrap_or(charged_at),
                charge: OwnedCharge { debt_before_us: debt_before_us(check), ..check.owned_charge(check.cost) },
            });
        DeferredCharges::new(self.settlements.clone(), charges.collect())
    }
}

/// Return a random id for the first concurrency permit of a limiter.
pub fn random_permit_id() -> u64 {
    Uuid::new_v4().as_u64_pair().0
}

/// Time after an outage in which the store may not know all concurrency permits of other gateways. They register their
/// permits when they detect that the store answers again: at most one probe (1.1 s) and one timeout later. Until then
/// this gateway's local share applies as well.
const PERMIT_RECOVERY_TIME: Duration = Duration::from_secs(2);

/// The outcome of a limit that is not involved in a denial.
const NOT_INVOLVED: Outcome = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };

/// Return the denial of a request for which the wait queue of `first` is full or that timed out in it. After `max_wait`
/// all requests that are queued now have left the queue.
fn queue_full<'a>(
    checks: &[LimitCheck<'a, '_>],
    first: &LimitCheck<'a, '_>,
    queue_policy: QueuePolicy,
) -> Decision<'a> {
    let max_wait_us = queue_policy.max_wait.as_micros() as u64;
    let exceeded = Outcome { status: Status::Exceeded, remaining: 0, reset_us: max_wait_us, retry_us: max_wait_us };
    let outcome =
        |check: &LimitCheck<'_, '_>| if check.limit_index == first.limit_index { exceeded } else { NOT_INVOLVED };
    let verdict = Verdict::new(0, unix_us(), checks.iter().map(outcome).collect());
    // The decision is not local: the store is healthy.
    Decision::new(verdict, DecidedBy::Store, checks.iter())
}

/// Return the group for coalescing, if all checks of the request can be coalesced with other requests of the same
/// limits and identities. A request prefetches from all of its limits or none: the smallest `prefetch` applies.
fn check_group(checks: &[LimitCheck<'_, '_>]) -> Option<CheckGroup> {
    let state_hash = |check: &LimitCheck<'_, '_>| check.key().local_hash() ^ u128::from(check.variant.id) << 64;
    let id = || checks.iter().fold(0, |set: u128, check| set.rotate_left(1) ^ state_hash(check));
    let advance = || checks.iter().map(|check| check.limit.prefetch).min().unwrap_or(0);
    checks.iter().all(LimitCheck::is_batchable).then(|| CheckGroup { id: id(), prefetch: advance() })
}
