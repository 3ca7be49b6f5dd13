//! The rate limiter decides whether a request is admitted, independently of HTTP.

pub mod address;
pub mod admin;
pub mod algorithm;
pub mod decision;
pub mod denial_cache;
pub mod fallback;
pub mod gateway_count;
pub mod key;
pub mod memory;
pub mod metrics;
pub mod notify;
pub mod overrides;
pub mod pacing;
pub mod prefetch;
pub mod quota;
pub mod redis;
pub mod settlement;
pub mod shared_data;
pub mod singleflight;
pub mod spec;
pub mod store;
pub mod usage;
pub mod verdict;
pub mod wait_queue;

use std::cmp::Ordering;
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicU64};
use std::time::{Duration, Instant};

use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::boxed::boxed;
use crate::clock::{Clock, elapsed_since, monotonic, unix_us};
use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::decision::{Decision, LimitCheck, offer_events};
use crate::limiter::denial_cache::{DenialCache, DenialHit};
use crate::limiter::fallback::{StoreUnavailable, decide_overloaded, decide_without_store};
use crate::limiter::key::IdentityHasher;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{AnsweredBy, LimiterMetrics};
use crate::limiter::notify::EventQueue;
use crate::limiter::overrides::Overrides;
use crate::limiter::prefetch::PrefetchPool;
use crate::limiter::redis::{RedisDeployment, RedisSettings};
use crate::limiter::settlement::{
    ConcurrencyPermits, Deferred, DeferredCharge, DeferredCharges, OwnedCharge, StoreHandle,
};
use crate::limiter::singleflight::{CheckGroup, Singleflight};
use crate::limiter::spec::{OnStoreError, QueuePolicy};
use crate::limiter::store::{DecidedBy, RedisStore, Store};
use crate::limiter::verdict::{Operation, StoreError, Verdict};
use crate::limiter::wait_queue::WaitQueues;

/// A rate limiter. In the gateway, each worker has its own limiter. A service that embeds the library creates one
/// limiter for the process.
#[derive(Debug)]
pub struct Limiter {
    store_handle: Arc<StoreHandle>,
    singleflight: Option<Arc<Singleflight>>,
    wait_queues: Arc<WaitQueues>,
    /// The quota overrides that administrators set for single identities.
    pub overrides: Arc<Overrides>,
    /// The id of the next concurrency permit. The first id is random, so that ids of different gateways do not collide.
    next_permit_id: AtomicU64,
}

impl Limiter {
    /// Create a limiter that counts requests in the memory of this process. The limiter keeps at most about
    /// `max_states` states, one for each pair of a limit and an identity. Create one limiter per process and share it
    /// in an [`Arc`].
    pub fn in_memory(max_states: usize) -> Self {
        Limiter::standalone(Store::Memory(Arc::new(MemoryStore::new(max_states, Clock::Store))), None)
    }

    /// Create a limiter that counts requests in Redis. Limiters with the same server, key prefix, limit names and
    /// secret for hashing identities share their counts. Call this function on the tokio runtime that later calls
    /// [`Limiter::check`], because the Redis connections belong to this runtime. Create one limiter per process and
    /// share it in an [`Arc`].
    ///
    /// The function waits for the first connection for at most `settings.connect_timeout`. An unreachable Redis is not
    /// an error: each limit then follows its [`OnStoreError`] until Redis is available. In this process, the limiter
    /// keeps at most about `max_states` cached denials, and at most about `max_states` states of local shares.
    pub async fn redis(deployment: RedisDeployment, settings: RedisSettings, max_states: usize) -> Self {
        let metrics = Arc::<LimiterMetrics>::default();
        let connect_timeout = settings.connect_timeout;
        let store = RedisStore::new(&deployment, &settings, Arc::default(), Arc::default(), metrics.clone());
        store.connect_within(connect_timeout).await;
        let fallback = Arc::new(MemoryStore::new(max_states, Clock::Store));
        Limiter::standalone(Store::Redis { store, fallback, metrics }, Some(Arc::new(DenialCache::new(max_states))))
    }

    /// Create a limiter that shares nothing with another limiter of this process.
    fn standalone(store: Store, denials: Option<Arc<DenialCache>>) -> Self {
        // Only overrides use this secret. This limiter has no overrides, because the lookup of a limit by name always
        // returns `None`, so the secret can be empty.
        let overrides = Arc::new(Overrides::new(IdentityHasher::new(""), |_| None, denials.clone()));
        let prefetch_pool = Arc::default();
        let wait_queues = Arc::default();
        Limiter::new(store, denials, prefetch_pool, wait_queues, overrides, Arc::default(), random_permit_id())
    }

    /// Create a limiter that uses `store`. All limiters of the process share `denials`, `prefetch_pool`, `wait_queues`,
    /// `overrides` and `events`. Permit ids start at `first_permit_id`. Two limiters that use the same store must not
    /// use the same permit ids.
    pub fn new(
        store: Store,
        denials: Option<Arc<DenialCache>>,
        prefetch_pool: Arc<PrefetchPool>,
        wait_queues: Arc<WaitQueues>,
        overrides: Arc<Overrides>,
        events: Arc<EventQueue>,
        first_permit_id: u64,
    ) -> Self {
        let singleflight = match &store {
            Store::Memory(_) => None,
            Store::Redis { store, .. } => Some(Arc::new(Singleflight::new(store.timeout(), prefetch_pool))),
        };
        let store_handle = Arc::new(StoreHandle { store, denials, events, tasks: TaskTracker::new() });
        let next_permit_id = AtomicU64::new(first_permit_id);
        Limiter { store_handle, singleflight, wait_queues, overrides, next_permit_id }
    }

    /// Perform all checks of a request together: charge all limits of the request or none. `checks` must be in
    /// ascending order of `limit_index`. A denied request is queued and checked again if every limit that denies it has
    /// a queue policy and a retry time within its `max_wait`. The request waits in the queue of its first limit with a
    /// queue policy.
    ///
    /// # Errors
    /// Shadow limits cause no errors. An enforced limit causes an error in these cases:
    /// - The store is in an outage, and the limit fails closed (`on_store_error = "deny"`).
    /// - The check could not be performed in time because of overload, or the stored state is corrupt. Neither case is
    ///   an outage, so `on_store_error` does not apply.
    /// - The memory store has no room for the identity, and the limit's `on_store_error` is not `"allow"`.
    pub async fn check<'a>(&self, checks: &[LimitCheck<'a, '_>]) -> Result<Decision<'a>, StoreUnavailable> {
        match checks.iter().find_map(|check| Some((check, check.limit.queue_policy?))) {
            // Box this future, because requests without a queue policy do not need its memory.
            Some((queued_check, queue_policy)) => Box::pin(self.check_queued(checks, queued_check, queue_policy)).await,
            None => match self.check_now(checks, monotonic).await {
                // Box the future, because only requests without a permit need its memory.
                Ok(denied) if has_no_permit(&denied) => Ok(Box::pin(after_others(denied)).await),
                decided => decided,
            },
        }
    }

    /// Perform all checks of a request as [`check`](Self::check) does, without a wait queue. The decision is made before
    /// `deadline`, even if the timeout of the store is longer.
    ///
    /// # Errors
    /// See [`check`](Self::check).
    pub async fn check_before<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        deadline: Instant,
    ) -> Result<Decision<'a>, StoreUnavailable> {
        self.check_now(checks, || self.started_for(deadline)).await
    }

    /// Refund the costs of these checks, of which the limiter does not know when they were charged. Return the outcome
    /// of each check. If the store does not answer before `deadline`, return an empty list: the refund is then made
    /// later.
    pub async fn refund_before(&self, checks: &[LimitCheck<'_, '_>], deadline: Instant) -> Vec<Outcome> {
        let operation = Operation::Refund { charged_at: unix_us() };
        let charges: Vec<_> = checks.iter().map(|check| check.owned_charge()).collect();
        self.forget_denials(checks);
        match self.store_handle.call(DecidedBy::Store, self.started_for(deadline), operation, &charges).await {
            Ok(verdict) => verdict.outcomes,
            Err(error) => {
                self.store_handle.deliver_after(&error, operation, charges);
                Vec::new()
            }
        }
    }

    /// Undo the charges of a decision about these checks, as [`Decision::refund`] does. Return at `deadline` at the
    /// latest: the refund is made even if the store answers later.
    pub async fn undo_before(&self, checks: &[LimitCheck<'_, '_>], decision: &mut Decision<'_>, deadline: Instant) {
        self.forget_denials(checks);
        // After an error, the refund is repeated, or its cost counts as lost.
        let _ = timeout(deadline.saturating_duration_since(monotonic()), decision.refund()).await;
    }

    /// Remove the cached denials of these checks, which a refund may admit.
    fn forget_denials(&self, checks: &[LimitCheck<'_, '_>]) {
        if let Some(denials) = &self.store_handle.denials {
            checks.iter().for_each(|check| denials.remove(check.key().local_hash()));
        }
    }

    /// Charge the costs of checks that the store has denied: their limits go into debt. If the store does not answer
    /// before `deadline`, the charge is made later.
    pub async fn charge_before(&self, checks: &[&LimitCheck<'_, '_>], decided_by: DecidedBy, deadline: Instant) {
        let charges: Vec<_> = checks.iter().map(|check| check.owned_charge()).collect();
        let started_at = self.started_for(deadline);
        if let Err(error) = self.store_handle.call(decided_by, started_at, Operation::Charge, &charges).await {
            self.store_handle.deliver_after(&error, Operation::Charge, charges);
        }
    }

    /// Charge the costs of checks whose call failed with this error, as soon as the store answers. Count the costs as
    /// lost if the store may have charged them.
    pub fn charge_later(&self, checks: &[&LimitCheck<'_, '_>], error: &StoreError) {
        let charges = checks.iter().map(|check| check.owned_charge()).collect();
        // What a late check charges is refunded, as the charge of a request that was rejected.
        let error = if error.is_overload() { &StoreError::Overloaded } else { error };
        self.store_handle.deliver_after(error, Operation::Charge, charges);
    }

    /// Return the start of a call to the store that times out at `deadline`, but not after the usual timeout.
    fn started_for(&self, deadline: Instant) -> Instant {
        let now = monotonic();
        let Store::Redis { store, .. } = &self.store_handle.store else { return now };
        deadline.checked_sub(store.timeout()).map_or(now, |started_at| started_at.min(now))
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

    /// Check a request that may wait in the queue of `queued_check`.
    async fn check_queued<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        queued_check: &LimitCheck<'a, '_>,
        queue_policy: QueuePolicy,
    ) -> Result<Decision<'a>, StoreUnavailable> {
        let arrived_at = monotonic();
        let key = queued_check.key().local_hash();
        // Check without queuing only if no requests are queued, because queued requests come first.
        if !self.wait_queues.has_waiters(key) {
            let decision = self.check_now(checks, monotonic).await?;
            if decision.retry_delay(arrived_at).is_none() {
                return Ok(decision);
            }
        }
        // If the queue is full or the wait timed out, reject the request without another check. Available tokens are
        // for requests that arrived earlier.
        let denial = || Ok(queue_denial(checks, queued_check, queue_policy));
        let Some(ticket) = self.wait_queues.enqueue(key, max_queue_length(queued_check, queue_policy)) else {
            return denial();
        };
        let max_wait = queue_policy.max_wait.saturating_sub(elapsed_since(arrived_at));
        // Hold `_head` until the decision: this request stays first in the queue, so that later requests wait.
        let Ok(_head) = timeout(max_wait, pin!(ticket.ready())).await else { return denial() };
        loop {
            let decision = self.check_now(checks, monotonic).await?;
            match decision.retry_delay(arrived_at) {
                Some(pause) => sleep(pause).await,
                None => return Ok(decision),
            }
        }
    }

    /// Perform all checks without waiting in a queue: use prefetched tokens, a cached denial, or a call to the store.
    /// If the store does not reply, each limit follows its `on_store_error`. The timeout of the store begins at the time
    /// that `started_at` returns.
    async fn check_now<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        started_at: impl FnOnce() -> Instant,
    ) -> Result<Decision<'a>, StoreUnavailable> {
        if checks.is_empty() {
            return Ok(Decision::unlimited());
        }
        let singleflight_group =
            self.singleflight.as_ref().and_then(|singleflight| Some((singleflight, check_group(checks)?)));
        let prefetched = || singleflight_group.and_then(|(one, group)| self.try_prefetched(checks, one, group));
        // Try prefetched tokens before cached denials: the store may have denied an earlier request only because this
        // process had prefetched the tokens.
        if let Some(decision) = prefetched().or_else(|| self.try_cached_denial(checks)) {
            return Ok(decision);
        }
        let mut permits = None;
        let mut first_permit_id = 0;
        if checks.iter().any(LimitCheck::is_concurrency) {
            first_permit_id = self.allocate_permit_ids(checks);
            // Within `PERMIT_RECOVERY_TIME` after an outage, the store may not know all permits of other gateways. The
            // local share and the store must then both grant the permits.
            let is_recovering = self.store_handle.store.has_recovered_within(PERMIT_RECOVERY_TIME);
            let denial = match is_recovering {
                true => self.local_permit_denial(checks, first_permit_id),
                false => self.held_permits_denial(checks),
            };
            if let Some(denial) = denial {
                return Ok(denial);
            }
            let requested = self.requested_permits(checks, DecidedBy::Store, first_permit_id);
            permits = Some(if is_recovering { requested.with_local_count() } else { requested });
        }
        let charges: Vec<_> = checks.iter().map(|check| check.charge(DecidedBy::Store, first_permit_id)).collect();
        let asked_at = started_at();
        let result = match singleflight_group {
            Some((singleflight, group)) if self.store_handle.store.is_one_call(&charges) => {
                let owned_charges = || checks.iter().map(|check| check.owned_charge()).collect();
                // Box this future, because requests that the denial cache rejects do not need its memory.
                boxed(|| singleflight.check(&self.store_handle, group, &charges, asked_at, owned_charges)).await
            }
            _ => {
                self.store_handle.store.count_check(AnsweredBy::Store);
                self.store_handle.store.call(DecidedBy::Store, asked_at, Operation::Check, &charges).await
            }
        };
        if let Some(full_limits) = result.as_ref().ok().map(|verdict| verdict.full_limits).filter(|full| *full > 0) {
            if let Some(permits) = permits {
                permits.discard();
            }
            return self.check_with_room(checks, full_limits, first_permit_id);
        }
        let granted = result.as_ref().is_ok_and(|verdict| verdict.granted > 0);
        // After a denial or an error, try prefetched tokens again: another worker may have prefetched some during the
        // call.
        if !granted && let Some(decision) = prefetched() {
            return Ok(decision);
        }
        let mut decided_at_us = Vec::new();
        let mut decision = match result {
            Ok(mut verdict) => {
                self.cache_denials(checks, &verdict, asked_at);
                offer_events(&self.store_handle.events, &verdict, DecidedBy::Store, checks.iter());
                decided_at_us = mem::take(&mut verdict.decided_at_us);
                Decision::new(verdict, DecidedBy::Store, checks.iter())
            }
            Err(error) => {
                let Store::Redis { fallback, .. } = &self.store_handle.store else {
                    return Err(StoreUnavailable(error));
                };
                // Discard the permits if the store certainly did not execute the call. After any other error, the store
                // may have granted the permits. Dropping `permits` then releases them in the store.
                if let Some(permits) = permits.take()
                    && error.is_not_executed()
                {
                    permits.discard();
                }
                if error.is_overload() {
                    return decide_overloaded(checks, error);
                }
                // Use new permit ids for the local share, so that releasing the permits of the failed call does not
                // release the local permits.
                let first_local_id = self.allocate_permit_ids(checks);
                let events = &self.store_handle.events;
                let decision = decide_without_store(fallback, events, checks, error, first_local_id)?;
                self.store_handle.post_usage();
                if checks.iter().any(LimitCheck::is_concurrency) {
                    permits = Some(self.requested_permits(checks, DecidedBy::Local, first_local_id));
                }
                decision
            }
        };
        match permits {
            Some(permits) if decision.admitted => hold_permits(permits, &checks.iter(), &mut decision),
            Some(permits) => permits.discard(),
            None => {}
        }
        self.attach_deferred_charges(checks, &mut decision, None, &decided_at_us);
        Ok(decision)
    }

    /// Check the limits for which the memory store has room. The other limits cannot be counted and follow their
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
        offer_events(&self.store_handle.events, &verdict, DecidedBy::Store, counted.iter().copied());
        let mut decision = Decision::new(verdict, DecidedBy::Store, counted.iter().copied());
        if decision.admitted && checks.iter().any(LimitCheck::is_concurrency) {
            let permits = self.requested_permits(checks, DecidedBy::Store, first_permit_id);
            hold_permits(permits, &counted.into_iter(), &mut decision);
        }
        self.attach_deferred_charges(checks, &mut decision, None, &[]);
        Ok(decision)
    }

    /// Return the denial of a request if the requests in flight on this gateway already hold all permits of one of its
    /// concurrency limits. The store counts these permits, too, so it would deny the request. Without this denial, the
    /// requests beyond the limit would keep the store busy, and each permit would be free for the time of a call longer.
    fn held_permits_denial<'a>(&self, checks: &[LimitCheck<'a, '_>]) -> Option<Decision<'a>> {
        let Store::Redis { fallback, .. } = &self.store_handle.store else { return None };
        // `store.denial_cache = 0` disables all denials without a call to the store.
        self.store_handle.denials.as_ref()?;
        let concurrency_checks = || checks.iter().filter(|check| check.is_concurrency());
        let charges: Vec<_> = concurrency_checks().map(|check| check.charge(DecidedBy::Store, 0)).collect();
        let verdict = fallback.decide(Operation::Peek, &charges);
        if verdict.granted > 0 {
            return None;
        }
        self.store_handle.store.count_check(AnsweredBy::DenialCache);
        Some(Decision { is_from_cache: true, ..Decision::new(verdict, DecidedBy::Store, concurrency_checks()) })
    }

    /// Acquire the permits of a request from this gateway's local shares of the concurrency limits. Return a decision
    /// only if a local share denies the request.
    fn local_permit_denial<'a>(&self, checks: &[LimitCheck<'a, '_>], first_permit_id: u64) -> Option<Decision<'a>> {
        let Store::Redis { fallback, .. } = &self.store_handle.store else { return None };
        let concurrency_checks = || checks.iter().filter(|check| check.is_concurrency());
        let charges: Vec<_> =
            concurrency_checks().map(|check| check.charge(DecidedBy::Local, first_permit_id)).collect();
        let verdict = fallback.decide(Operation::Check, &charges);
        // Ignore the local share if the memory store has no room for the permits: Redis then decides alone.
        (verdict.granted == 0 && verdict.full_limits == 0)
            .then(|| Decision::new(verdict, DecidedBy::Local, concurrency_checks()))
    }

    /// Decide with prefetched tokens, if there are any.
    fn try_prefetched<'a>(
        &self,
        checks: &[LimitCheck<'a, '_>],
        singleflight: &Singleflight,
        group: CheckGroup,
    ) -> Option<Decision<'a>> {
        let (verdict, charged_at) = singleflight.take_prefetched(group)?;
        self.store_handle.store.count_check(AnsweredBy::Prefetch);
        let elapsed_us = verdict.now_us - charged_at;
        offer_events(&self.store_handle.events, &verdict, DecidedBy::Store, checks.iter());
        let mut decision = Decision::from_earlier_charge(verdict, DecidedBy::Store, checks.iter(), elapsed_us);
        self.attach_deferred_charges(checks, &mut decision, Some(charged_at), &[]);
        Some(decision)
    }

    /// Return the denial of a request if the denial cache contains a denial of one of its checks.
    fn try_cached_denial<'a>(&self, checks: &[LimitCheck<'a, '_>]) -> Option<Decision<'a>> {
        let denials = self.store_handle.denials.as_ref()?;
        let cached = |check: &LimitCheck<'_, '_>| {
            let hit = denials.get(check.key().local_hash(), check.variant.id, check.required());
            hit.filter(|_| check.is_cacheable())
        };
        // Read each cache entry only once, because an entry may expire between two reads. The decision must contain at
        // least one denial.
        let (first_index, first_hit) =
            checks.iter().enumerate().find_map(|(index, check)| Some((index, cached(check)?)))?;
        let outcomes = checks.iter().enumerate().map(|(index, check)| {
            let hit = match index.cmp(&first_index) {
                Ordering::Less => None,
                Ordering::Equal => Some(first_hit),
                Ordering::Greater => cached(check),
            };
            hit.map_or(NOT_INVOLVED, |hit| hit.outcome)
        });
        let verdict = Verdict::new(0, first_hit.now_us, outcomes.collect());
        self.store_handle.store.count_check(AnsweredBy::DenialCache);
        // Queue no quota events for a cached denial: its events were queued when the store denied the first request.
        Some(Decision { is_from_cache: true, ..Decision::new(verdict, DecidedBy::Store, checks.iter()) })
    }

    fn cache_denials(&self, checks: &[LimitCheck<'_, '_>], verdict: &Verdict, asked_at: Instant) {
        let is_denied_by_one_server = verdict.granted == 0 && verdict.decided_at_us.is_empty();
        let Some(denials) = self.store_handle.denials.as_ref().filter(|_| is_denied_by_one_server) else { return };
        for (check, outcome) in checks.iter().zip(&verdict.outcomes).filter(|(check, _)| check.is_cacheable()) {
            let hit = DenialHit { now_us: verdict.now_us, outcome: *outcome };
            denials.insert(check.key().local_hash(), check.variant.id, check.required(), hit, asked_at);
        }
    }

    /// Reserve a permit id for each limit index of the request. Return the first of these ids.
    fn allocate_permit_ids(&self, checks: &[LimitCheck<'_, '_>]) -> u64 {
        // The last check has the largest `limit_index`, because the checks are in ascending order.
        let permits = checks.last().map_or(0, |last| last.limit_index as u64 + 1);
        self.next_permit_id.fetch_add(permits, atomic::Ordering::Relaxed)
    }

    /// Return the permits that a request needs from its concurrency limits, before it is known whether they are
    /// granted.
    fn requested_permits(
        &self,
        checks: &[LimitCheck<'_, '_>],
        decided_by: DecidedBy,
        first_permit_id: u64,
    ) -> ConcurrencyPermits {
        let concurrency_checks = checks.iter().filter(|check| check.is_concurrency());
        let permits = concurrency_checks.map(|check| OwnedCharge {
            cost: 1,
            permit_id: check.permit_id(first_permit_id),
            ..check.owned_charge()
        });
        ConcurrencyPermits::requested(self.store_handle.clone(), decided_by, permits.collect())
    }

    /// Attach the deferred charges of an admitted request to its decision. `charged_at` is set only for prefetched
    /// tokens: the time of their charge, in µs since the Unix epoch. If several Redis servers decided, `decided_at_us`
    /// contains the time of each check. Otherwise `decided_at_us` is empty.
    fn attach_deferred_charges(
        &self,
        checks: &[LimitCheck<'_, '_>],
        decision: &mut Decision<'_>,
        charged_at: Option<u64>,
        decided_at_us: &[u64],
    ) {
        if decision.admitted && checks.iter().any(|check| check.deferred != Deferred::Nothing) {
            let charged_at = charged_at.unwrap_or(decision.now_us);
            decision.deferred_charges =
                Some(Box::new(self.build_deferred_charges(checks, decision, charged_at, decided_at_us)));
        }
    }

    fn build_deferred_charges(
        &self,
        checks: &[LimitCheck<'_, '_>],
        decision: &Decision<'_>,
        charged_at: u64,
        decided_at_us: &[u64],
    ) -> DeferredCharges {
        let falls_back_locally = |check: &LimitCheck<'_, '_>| check.limit.on_store_error == OnStoreError::Local;
        let is_counted = |check: &LimitCheck<'_, '_>| {
            check.deferred != Deferred::Nothing
                && !decision.is_shadow_denied(check.limit)
                // In an outage, include only limits that fall back to a local share or have usage totals.
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
                charge: OwnedCharge { debt_before_us: debt_before_us(check), ..check.owned_charge() },
            });
        DeferredCharges::new(self.store_handle.clone(), charges.collect())
    }
}

/// Return a random id for the first concurrency permit of a limiter.
pub fn random_permit_id() -> u64 {
    Uuid::new_v4().as_u64_pair().0
}

/// How often a request that a concurrency limit denies lets the other tasks of its thread run, before it gets its
/// response. The requests with permits then proceed: each of them needs about two turns, to write to the upstream and to
/// read from it. Otherwise, thousands of denied clients that send again at once would take up each turn.
const YIELDS_WITHOUT_PERMIT: usize = 2;

/// Time after an outage during which the store may not know all concurrency permits of other gateways. The other
/// gateways register their permits when a probe shows that the store is available: after at most one probe delay (1.1
/// s) and one store timeout. During this time, the local share of this gateway must also grant each permit.
const PERMIT_RECOVERY_TIME: Duration = Duration::from_secs(2);

/// The outcome of a limit that does not deny the request.
const NOT_INVOLVED: Outcome = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };

/// Keep the permits of the `counted` checks of an admitted request. Discard the permits of its other checks, and the
/// permit of a shadow limit that would have denied the request. The limit did not grant this permit, and a renewal
/// would add it beyond the limit.
fn hold_permits<'c>(
    permits: ConcurrencyPermits,
    counted: &(impl Iterator<Item = &'c LimitCheck<'c, 'c>> + Clone),
    decision: &mut Decision<'_>,
) {
    let is_granted = |limit_index| {
        counted.clone().any(|check| check.limit_index == limit_index && !decision.is_shadow_denied(check.limit))
    };
    decision.permits = Some(Box::new(permits.hold(is_granted)));
}

/// Return the maximum number of queued requests: `max_queue`, or the number of requests that can be admitted within
/// `max_wait` if this number is smaller. More requests would time out. The result is at least 1: a request joins an
/// empty queue only if its retry time is within `max_wait`.
fn max_queue_length(queued_check: &LimitCheck<'_, '_>, queue_policy: QueuePolicy) -> usize {
    let max_admitted = queued_check.variant.max_admitted_in(queue_policy.max_wait) / queued_check.cost.max(1);
    queue_policy.max_queue.min(usize::try_from(max_admitted).unwrap_or(usize::MAX).max(1))
}

/// Return the denial of a request that found the wait queue of `queued_check` full, or timed out in it. The retry time
/// is `max_wait`: within this time, every request that is in the queue is admitted or times out.
fn queue_denial<'a>(
    checks: &[LimitCheck<'a, '_>],
    queued_check: &LimitCheck<'a, '_>,
    queue_policy: QueuePolicy,
) -> Decision<'a> {
    let max_wait_us = queue_policy.max_wait.as_micros() as u64;
    let exceeded = Outcome { status: Status::Exceeded, remaining: 0, reset_us: max_wait_us, retry_us: max_wait_us };
    let outcome = |check: &LimitCheck<'_, '_>| {
        if check.limit_index == queued_check.limit_index { exceeded } else { NOT_INVOLVED }
    };
    let verdict = Verdict::new(0, unix_us(), checks.iter().map(outcome).collect());
    // The denial counts as a decision of the store, not of the local share, because there is no outage.
    Decision::new(verdict, DecidedBy::Store, checks.iter())
}

/// Return whether a concurrency limit denies the request.
fn has_no_permit(decision: &Decision<'_>) -> bool {
    decision.violated().any(|result| result.limit.default_variant.rule.is_concurrency())
}

/// Return the decision after the other tasks of the thread have run (see [`YIELDS_WITHOUT_PERMIT`]).
async fn after_others(decision: Decision<'_>) -> Decision<'_> {
    for _ in 0..YIELDS_WITHOUT_PERMIT {
        yield_now().await;
    }
    decision
}

/// Return the group for coalescing, if all checks of the request can be coalesced. Requests with the same limits,
/// variants and identities belong to the same group. A request prefetches from all of its limits or none, and the
/// smallest `prefetch` applies.
fn check_group(checks: &[LimitCheck<'_, '_>]) -> Option<CheckGroup> {
    let state_hash = |check: &LimitCheck<'_, '_>| check.key().local_hash() ^ u128::from(check.variant.id) << 64;
    let id = || checks.iter().fold(0, |hash: u128, check| hash.rotate_left(1) ^ state_hash(check));
    let min_prefetch = || checks.iter().map(|check| check.limit.prefetch).min().unwrap_or(0);
    checks.iter().all(LimitCheck::is_batchable).then(|| CheckGroup { id: id(), prefetch: min_prefetch() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::algorithm::Rule;
    use crate::limiter::algorithm::concurrency::Concurrency;
    use crate::limiter::quota::Quota;
    use crate::limiter::spec::{LimitSpec, LocalShare};
    use crate::limiter::verdict::Charge;

    #[tokio::test(start_paused = true)]
    async fn renewal_in_a_full_memory_store_adds_only_granted_permits() {
        let hasher = IdentityHasher::new("");
        let identity = |number: u32| hasher.hash(&number.to_le_bytes());
        let quota = "1/day".parse().unwrap();
        let full_limit = LimitSpec {
            on_store_error: OnStoreError::Allow,
            ..LimitSpec::token_bucket(&hasher, "full", quota).unwrap()
        };
        let ttl = Duration::from_secs(60);
        let rule = |limit| Rule::Concurrency(Concurrency { limit, ttl: ttl.as_micros() as u64 });
        let quota = Quota::parse_concurrency("1").unwrap();
        let shadow_limit =
            LimitSpec { shadow: true, ..LimitSpec::new(&hasher, "shadow", quota, rule(1), LocalShare::default()) };
        let limiter = Limiter::in_memory(640);
        for number in 1..3000 {
            limiter.check(&[LimitCheck::new(&full_limit, identity(number))]).await.unwrap();
        }
        let shadow_check = |limit_index| LimitCheck { limit_index, ..LimitCheck::new(&shadow_limit, identity(0)) };
        let granted = limiter.check(&[shadow_check(0)]).await.unwrap();
        assert!(granted.shadow_denied.is_empty());
        let denied = limiter.check(&[LimitCheck::new(&full_limit, identity(3000)), shadow_check(1)]).await.unwrap();
        assert!(denied.admitted && denied.results.is_empty(), "the full limit does not count the identity: {denied:?}");
        assert_eq!(denied.shadow_denied.len(), 1);
        // The test pauses tokio's clock. This `sleep` advances the clock from timer to timer, past the first renewal of
        // the permits.
        sleep(ttl / 2).await;
        let Store::Memory(memory) = &limiter.store_handle.store else { panic!("{limiter:?}") };
        let check = shadow_check(0);
        let larger = rule(10);
        let peek = Charge { rule: &larger, ..check.charge(DecidedBy::Store, 0) };
        assert_eq!(memory.decide(Operation::Peek, &[peek]).outcomes[0].remaining, 9, "one permit was granted");
    }

    #[tokio::test]
    async fn request_without_a_permit_lets_others_run_before_it_is_denied() {
        let hasher = IdentityHasher::new("");
        let rule = Rule::Concurrency(Concurrency { limit: 1, ttl: 60_000_000 });
        let quota = Quota::parse_concurrency("1").unwrap();
        let limit = LimitSpec::new(&hasher, "flight", quota, rule, LocalShare::default());
        let check = [LimitCheck::new(&limit, hasher.hash(b"client"))];
        let limiter = Limiter::in_memory(10);
        let admitted = limiter.check(&check).await.unwrap();
        let turns_of_other = async || {
            let turns = Arc::new(AtomicU64::new(0));
            let counted = turns.clone();
            let other = tokio::spawn(async move {
                loop {
                    counted.fetch_add(1, atomic::Ordering::Relaxed);
                    yield_now().await;
                }
            });
            let decision = limiter.check(&check).await.unwrap();
            other.abort();
            (decision.admitted, turns.load(atomic::Ordering::Relaxed))
        };
        let (is_admitted, turns) = turns_of_other().await;
        assert!(!is_admitted && turns >= YIELDS_WITHOUT_PERMIT as u64, "{turns} turns");
        drop(admitted);
        assert_eq!(turns_of_other().await, (true, 0), "an admitted request does not wait");
    }

    #[test]
    fn checks_are_coalesced_only_with_checks_of_the_same_quotas_and_identities() {
        let hasher = IdentityHasher::new("");
        let [limit, other_limit] = ["one", "other"].map(|name| LimitSpec {
            prefetch: 5,
            ..LimitSpec::token_bucket(&hasher, name, "9/day".parse().unwrap()).unwrap()
        });
        let identity = hasher.hash(b"client");
        let other_identity = hasher.hash(b"another");
        // This variant shares the state of the limit, as variants for tiers and overrides do.
        let other_quota = Arc::new(limit.override_variant(&hasher, "8/day".parse().unwrap(), None).unwrap());
        assert_eq!(other_quota.state_name, limit.default_variant.state_name);
        let check = || LimitCheck::new(&limit, identity);
        let group = |checks: &[LimitCheck<'_, '_>]| check_group(checks).unwrap();
        let cases = [
            ("the limit alone", vec![check()]),
            ("another quota", vec![LimitCheck { variant: &other_quota, ..check() }]),
            ("another identity", vec![LimitCheck::new(&limit, other_identity)]),
            ("another limit", vec![LimitCheck::new(&other_limit, identity)]),
            ("two limits", vec![check(), LimitCheck { limit_index: 1, ..LimitCheck::new(&other_limit, identity) }]),
            (
                "two limits of another identity",
                vec![
                    LimitCheck::new(&limit, other_identity),
                    LimitCheck { limit_index: 1, ..LimitCheck::new(&other_limit, other_identity) },
                ],
            ),
        ];
        for (index, (name, checks)) in cases.iter().enumerate() {
            for (other_index, (other_name, other_checks)) in cases.iter().enumerate() {
                let is_same = group(checks).id == group(other_checks).id;
                assert_eq!(is_same, index == other_index, "{name}, {other_name}");
            }
        }
        assert!(check_group(&[LimitCheck { cost: 2, ..check() }]).is_none(), "a cost of 2 is not coalesced");
    }

    #[test]
    fn cached_denial_has_a_violated_limit_when_its_entry_expires() {
        let hasher = IdentityHasher::new("");
        let limit = LimitSpec::token_bucket(&hasher, "limit", "1/day".parse().unwrap()).unwrap();
        let denials = Arc::new(DenialCache::new(10));
        let memory = Store::Memory(Arc::new(MemoryStore::new(10, Clock::Store)));
        let limiter = Limiter::standalone(memory, Some(denials.clone()));
        let checks = [LimitCheck::new(&limit, hasher.hash(b"client"))];
        let outcome = Outcome { status: Status::Exceeded, remaining: 0, reset_us: 20, retry_us: 20 };
        for _ in 0..20_000 {
            let hit = DenialHit { now_us: 1, outcome };
            denials.insert(checks[0].key().local_hash(), checks[0].variant.id, 1, hit, monotonic());
            while let Some(denial) = limiter.try_cached_denial(&checks) {
                assert!(denial.violated().next().is_some(), "{denial:?}");
            }
        }
    }
}
