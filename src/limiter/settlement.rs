//! Settlement of admitted requests: hold concurrency permits until the requests end, and make deferred charges and
//! refunds when the response is known.

use std::cmp::Ordering as CmpOrdering;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::{debug, warn};

use crate::boxed::boxed;
use crate::clock::{elapsed_since, monotonic};
use crate::limiter::algorithm::{MAX_STATE, Outcome, Rule};
use crate::limiter::denial_cache::DenialCache;
use crate::limiter::key::{Identity, Key};
use crate::limiter::notify::{DecisionContext, EventQueue, LimitUsage, Notify};
use crate::limiter::pacing::{OUTAGE_RETRY_INTERVAL, OVERLOAD_RETRY_INTERVAL, SETTLEMENT_TIMEOUT};
use crate::limiter::shared_data::SharedData;
use crate::limiter::spec::LimitVariant;
use crate::limiter::store::{DecidedBy, Store};
use crate::limiter::usage::{UsageDays, UsageTable};
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict, count_lost};

const RELEASE_PERMIT: Operation = Operation::Refund { charged_at: 0 };

/// Maximum number of usage posts that are in flight to Redis at the same time.
const MAX_CONCURRENT_POSTS: usize = 64;

/// Interval for retrying usage posts. The interval is short, because there is little time to send posts while the
/// process shuts down.
const POST_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum number of attempts to post usage totals while the process shuts down.
const MAX_LAST_POSTS: u32 = 4;

/// The value of [`SETTLEMENT_TIMEOUT`] while the process shuts down.
const LAST_SETTLEMENT_TIMEOUT: Duration = Duration::from_secs(1);

/// The operation that a limit defers until the response is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deferred {
    /// The response causes no charge and no refund.
    Nothing,
    /// Charge the cost after the response.
    Charge,
    /// Refund the cost if the response requires it.
    Refund,
    /// The charged cost is a reservation. Correct it when the actual cost is known. If the actual cost never becomes
    /// known, the reservation stays charged.
    Settle,
}

impl Deferred {
    /// Return whether the cost is charged at once and may be refunded later.
    pub fn is_refundable(self) -> bool {
        matches!(self, Deferred::Refund | Deferred::Settle)
    }
}

/// What the gateway charges or refunds on a limit after the response has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettleAction {
    /// Neither charge nor refund anything.
    Nothing,
    /// Charge this cost, even if it exceeds the remaining tokens.
    Charge(u64),
    /// Refund the charge.
    Refund,
    /// Correct the reservation to this actual cost: refund the unused tokens, or charge the missing tokens even if they
    /// exceed the remaining tokens.
    Settle(u64),
}

/// A charge that outlives the decision.
#[derive(Debug, Clone)]
pub struct OwnedCharge {
    /// Index of the limit on the route.
    pub limit_index: usize,
    /// The variant of the limit.
    pub variant: Arc<LimitVariant>,
    /// The identity that is charged.
    pub identity: Identity,
    /// Cost in tokens. 1 for a concurrency limit.
    pub cost: u64,
    /// The permit id, if the algorithm is concurrency; otherwise 0.
    pub permit_id: u64,
    /// Maximum number of prefetched tokens of this state that the gateway may hold at the same time.
    pub prefetch: u64,
    /// See [`Charge::debt_before_us`]. 0 for charges that cannot be refunded.
    pub debt_before_us: u64,
    /// The calendar days for usage totals. `None` if the limit has no usage totals.
    pub usage: Option<Arc<UsageDays>>,
    /// The thresholds for events. `None` if the limit has no events.
    pub notify: Option<Arc<Notify>>,
}

/// Access to the store for one worker, including background calls that outlive their requests.
#[derive(Debug)]
pub struct StoreHandle {
    /// The store of the worker.
    pub store: Store,
    /// The denial cache. `None` with the memory store, or if the cache is disabled.
    pub denials: Option<Arc<DenialCache>>,
    /// Receives the events of limits whose thresholds are reached.
    pub events: Arc<EventQueue>,
    /// Background work in progress, such as permit releases and deferred charges.
    pub tasks: TaskTracker,
}

/// A call that no request waits for.
#[derive(Debug)]
enum Settlement {
    /// Release concurrency permits.
    Release {
        permits: Arc<[OwnedCharge]>,
        /// Whether the release is final, because no call that registers the permits can be executed after it.
        is_certain: bool,
        max_ttl: Duration,
    },
    /// Charge the cost of a response, or refund a charge.
    Deliver { decided_by: DecidedBy, operation: Operation, charges: Vec<OwnedCharge> },
}

impl Settlement {
    /// Make the call. [`TaskTracker::wait`] waits until `_tracked` is dropped.
    async fn make(self, store_handle: Arc<StoreHandle>, _tracked: TaskTrackerToken) {
        match self {
            Settlement::Release { permits, is_certain, max_ttl } => {
                store_handle.release(&permits, is_certain, max_ttl).await;
            }
            Settlement::Deliver { decided_by, operation, charges } => {
                store_handle.deliver(decided_by, operation, charges).await;
                store_handle.post_usage();
            }
        }
    }
}

impl StoreHandle {
    /// Begin a call that no request waits for. Outside of a tokio runtime, drop the call, because the process is ending.
    /// Permits then expire by their TTL. The number of calls has no bound, because each of them replaces the permits or
    /// charges of a request that has ended.
    fn settle(self: &Arc<Self>, settlement: Settlement) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut call = boxed(|| settlement.make(self.clone(), self.tasks.token()));
        // The first poll makes the call in the memory store, or adds it to the queue of the store's client. A task would
        // do so only after the tasks that are ready now, which may be thousands of checks of the same identity: they
        // would be denied, although the permit is free.
        if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            runtime.spawn(call);
        }
    }

    /// Make a call again that failed with this error, if the store has certainly not executed it. Otherwise count its
    /// cost as lost.
    pub fn deliver_after(self: &Arc<Self>, error: &StoreError, operation: Operation, charges: Vec<OwnedCharge>) {
        if error.is_not_executed() {
            self.settle(Settlement::Deliver { decided_by: DecidedBy::Store, operation, charges });
        } else {
            self.give_up(DecidedBy::Store, operation, &charges, error);
        }
    }

    /// Spawn a background task. Return `None` outside of a tokio runtime.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        // Do nothing outside of a runtime, because the process is ending. Permits then expire by their TTL.
        let handle = Handle::try_current().ok()?;
        Some(self.tasks.spawn_on(task, &handle).abort_handle())
    }

    /// Call the store for charges that outlive their request. The timeout starts at `started_at`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(
        &self,
        decided_by: DecidedBy,
        started_at: Instant,
        operation: Operation,
        charges: &[OwnedCharge],
    ) -> Result<Verdict, StoreError> {
        let store_charges: Vec<_> = charges.iter().map(|owned| owned.charge(decided_by)).collect();
        let verdict = self.store.call(decided_by, started_at, operation, &store_charges).await?;
        if let Operation::Charge | Operation::Refund { .. } = operation {
            self.offer_events(decided_by, charges, &verdict);
        }
        Ok(verdict)
    }

    /// Queue the events of charges whose limits have reached a threshold.
    fn offer_events(&self, decided_by: DecidedBy, charges: &[OwnedCharge], verdict: &Verdict) {
        for (index, (owned, outcome)) in charges.iter().zip(&verdict.outcomes).enumerate() {
            let Some(notify) = &owned.notify else { continue };
            let now_us = verdict.decided_at_us.get(index).copied().unwrap_or(verdict.now_us);
            let quota = owned.variant.quota;
            let rule = owned.rule(decided_by);
            let is_local = decided_by == DecidedBy::Local;
            let context = DecisionContext { quota, rule, is_local, now_us, reserved: 0 };
            if let Some(usage) = LimitUsage::new(notify, owned.identity, context, outcome) {
                self.events.offer(&usage);
            }
        }
    }

    /// Call the store for charges that no request waits for. Retry only if the store has certainly not executed the
    /// call, for example because the circuit breaker is open. Stop after [`SETTLEMENT_TIMEOUT`], or after 1 s while the
    /// process shuts down.
    pub async fn deliver(&self, decided_by: DecidedBy, operation: Operation, charges: Vec<OwnedCharge>) {
        let started_at = monotonic();
        while let Err(error) = self.call(decided_by, monotonic(), operation, &charges).await {
            let timeout = if self.tasks.is_closed() { LAST_SETTLEMENT_TIMEOUT } else { SETTLEMENT_TIMEOUT };
            if !error.is_not_executed() || elapsed_since(started_at) >= timeout {
                return self.give_up(decided_by, operation, &charges, &error);
            }
            self.pause_after(&error).await;
        }
    }

    /// Wait before a call that failed with this error is made again.
    async fn pause_after(&self, error: &StoreError) {
        match error {
            StoreError::Overloaded | StoreError::Redirected(_) => sleep(OVERLOAD_RETRY_INTERVAL).await,
            StoreError::NotConnected(_)
            | StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::LateReply
            | StoreError::BreakerOpen
            | StoreError::Rejected(_)
            | StoreError::WritesRejected(_)
            | StoreError::CorruptState(_)
            | StoreError::CapacityExceeded
            | StoreError::MalformedReply => self.store.recovery_within(OUTAGE_RETRY_INTERVAL).await,
        }
    }

    /// Count the cost of a charge or refund that failed for good.
    fn give_up(&self, decided_by: DecidedBy, operation: Operation, charges: &[OwnedCharge], error: &StoreError) {
        debug!(%error, ?operation, "a deferred charge or refund failed");
        if let Store::Redis { metrics, .. } = &self.store {
            let charges: Vec<_> = charges.iter().map(|owned| owned.charge(decided_by)).collect();
            count_lost(metrics, operation, &charges, error);
        }
    }

    /// Release concurrency permits. Retry until the store has released the permits or they have expired. If a request
    /// was cancelled, the store may execute the call that registers its permits after the release, for example on
    /// another connection. Unless `is_certain` is true, make the release a second time.
    async fn release(&self, permits: &[OwnedCharge], mut is_certain: bool, max_ttl: Duration) {
        // Stop `max_ttl` after the last outage, because the permits have then expired in the store.
        let mut last_outage_at = monotonic();
        while elapsed_since(last_outage_at) < max_ttl {
            match self.call(DecidedBy::Store, monotonic(), RELEASE_PERMIT, permits).await {
                Ok(_) if is_certain => return,
                Ok(_) => {
                    is_certain = true;
                    self.store.recovery_within(OUTAGE_RETRY_INTERVAL).await;
                }
                Err(error) => {
                    debug!(%error, "a concurrency permit was not released yet; retrying");
                    if error.is_outage() && !self.tasks.is_closed() {
                        last_outage_at = monotonic();
                    }
                    self.pause_after(&error).await;
                }
            }
        }
    }

    /// Send the usage totals of local shares and of models to Redis, if there are any and no other task sends them.
    /// Retry until Redis has confirmed all posts. While the process shuts down, make at most [`MAX_LAST_POSTS`]
    /// attempts.
    pub fn post_usage(self: &Arc<Self>) {
        let Store::Redis { fallback, .. } = &self.store else { return };
        if !fallback.usage.claim_posting() {
            return;
        }
        let store_handle = self.clone();
        let spawned = self.spawn(async move {
            if store_handle.post_all_usage().await {
                // Check again for usage that a request added while this task was ending. The request started no task,
                // because this task held the claim.
                store_handle.post_usage();
            }
        });
        if spawned.is_none() {
            fallback.usage.end_posting();
        }
    }

    /// Send all usage totals to Redis. Return `false` if the last attempts during shutdown failed.
    async fn post_all_usage(&self) -> bool {
        let Store::Redis { store, fallback, .. } = &self.store else { return true };
        let usage = &fallback.usage;
        let _claim = PostingClaim(usage);
        let mut last_posts = 0;
        while !usage.is_empty() {
            let mut posts = usage.take_posts(MAX_CONCURRENT_POSTS).into_iter();
            let mut interrupted_by = None;
            while interrupted_by.is_none() && !posts.as_slice().is_empty() {
                let posts: Vec<_> = posts.by_ref().take(MAX_CONCURRENT_POSTS).collect();
                let results = join_all(posts.iter().map(|post| SharedData(store).post_usage(post))).await;
                for (post, result) in posts.into_iter().zip(results) {
                    match result {
                        Ok(_) => usage.confirm(&post),
                        Err(error @ StoreError::CorruptState(_)) => {
                            usage.lose(&post);
                            warn!(%error, limit = %post.key.limit, "usage totals are lost");
                        }
                        Err(error) => {
                            usage.put_back(post);
                            interrupted_by = Some(error);
                        }
                    }
                }
            }
            posts.for_each(|post| usage.put_back(post));
            let Some(error) = interrupted_by else { continue };
            debug!(%error, "cannot send usage totals to Redis yet; retrying");
            if self.tasks.is_closed() {
                last_posts += 1;
                if last_posts >= MAX_LAST_POSTS {
                    warn!(totals = usage.len(), %error, "usage totals are lost");
                    return false;
                }
            }
            self.store.recovery_within(POST_INTERVAL).await;
        }
        true
    }

    /// Apply an operation on permits also to this gateway's local share, if the store is Redis. In an outage, the local
    /// share must count all requests in flight on this gateway.
    fn count_in_local_share(&self, operation: Operation, permits: &[OwnedCharge]) {
        if let Store::Redis { fallback, .. } = &self.store {
            let to_charge = |permit| OwnedCharge::charge(permit, DecidedBy::Local);
            fallback.decide(operation, &permits.iter().map(to_charge).collect::<Vec<_>>());
        }
    }
}

/// The claim of the task that sends usage totals. The claim ends with the task.
struct PostingClaim<'a>(&'a UsageTable);

impl Drop for PostingClaim<'_> {
    fn drop(&mut self) {
        self.0.end_posting();
    }
}

impl OwnedCharge {
    /// Return the key of the state that the charge changes.
    pub fn key(&self) -> Key<'_> {
        Key { identity: self.identity, state_name: &self.variant.state_name }
    }

    fn rule(&self, decided_by: DecidedBy) -> &Rule {
        match decided_by {
            DecidedBy::Store => &self.variant.rule,
            DecidedBy::Local => self.variant.local_rule(),
        }
    }

    /// Return the refund of all tokens of this charge except `kept` tokens.
    fn partial_refund(self, kept: u64, decided_by: DecidedBy) -> OwnedCharge {
        // Add the kept tokens to the earlier debt, because refill repays the kept tokens before the refunded tokens.
        let debt_before_us = self.debt_before_us.saturating_add(self.rule(decided_by).refill_time_us(kept));
        OwnedCharge { cost: self.cost - kept, debt_before_us, ..self }
    }

    fn charge(&self, decided_by: DecidedBy) -> Charge<'_> {
        let OwnedCharge { cost, permit_id, debt_before_us, .. } = *self;
        let key = self.key();
        let rule = self.rule(decided_by);
        let usage = self.usage.as_ref();
        Charge { key, rule, cost, mode: ChargeMode::Enforced, permit_id, debt_before_us, usage }
    }
}

/// The concurrency permits of a request. Dropping the value releases the permits, even if the reply that grants or
/// denies them has not arrived.
///
/// The store counts permits for all gateways. A renewal registers a permit again if the store has lost it, or if the
/// local share granted it during an outage. This process counts the permits as well: in an outage, the local share of
/// this gateway must count all of its requests in flight.
#[derive(Debug)]
pub struct ConcurrencyPermits {
    store_handle: Arc<StoreHandle>,
    decided_by: DecidedBy,
    permits: Arc<[OwnedCharge]>,
    renewal: Option<AbortHandle>,
    store_state: Arc<PermitStoreState>,
    /// Whether this process' local share counts the permits.
    is_counted_here: bool,
    /// Permits of other checks of the same request, which are held for the same time.
    others: Vec<ConcurrencyPermits>,
}

/// What the store may know about the permits of a request.
#[derive(Debug, Default)]
struct PermitStoreState {
    /// Whether the permits may be registered in the store.
    may_be_counted: AtomicBool,
    /// Whether a call that registers the permits may still be executed. If so, the release of the permits must be
    /// repeated later.
    call_in_flight: AtomicBool,
}

impl ConcurrencyPermits {
    /// Create the permits of a check that is about to be sent.
    pub fn requested(store_handle: Arc<StoreHandle>, decided_by: DecidedBy, permits: Vec<OwnedCharge>) -> Self {
        let is_store_asked = decided_by == DecidedBy::Store;
        let store_state = PermitStoreState {
            may_be_counted: AtomicBool::new(is_store_asked),
            call_in_flight: AtomicBool::new(is_store_asked),
        };
        ConcurrencyPermits {
            store_handle,
            decided_by,
            permits: permits.into(),
            renewal: None,
            store_state: Arc::new(store_state),
            is_counted_here: decided_by == DecidedBy::Local,
            others: Vec::new(),
        }
    }

    /// Return whether a limit has granted one of these permits. `limit_index` is the index of the limit on the route.
    pub fn contains(&self, limit_index: usize) -> bool {
        self.permits.iter().any(|permit| permit.limit_index == limit_index)
            || self.others.iter().any(|others| others.contains(limit_index))
    }

    /// Hold the permits of another check of the same request as long as these permits.
    pub fn append(&mut self, other: ConcurrencyPermits) {
        self.others.push(other);
    }

    /// Mark the permits as counted by this process' local share.
    pub fn with_local_count(mut self) -> Self {
        self.is_counted_here = true;
        self
    }

    /// Drop the permits without a call that releases them, because the store did not grant them.
    pub fn discard(mut self) {
        self.release_local_share();
        self.permits = Arc::new([]);
    }

    fn release_local_share(&mut self) {
        if mem::take(&mut self.is_counted_here) {
            self.store_handle.count_in_local_share(RELEASE_PERMIT, &self.permits);
        }
    }

    /// Return the TTL of each permit.
    fn ttls(&self) -> impl Iterator<Item = Duration> {
        self.permits.iter().filter_map(|permit| permit.rule(self.decided_by).permit_ttl())
    }

    fn max_ttl(&self) -> Duration {
        self.ttls().max().unwrap_or_default()
    }

    /// Keep only the permits of the limits for which `is_granted` returns true, because a shadow limit may have granted
    /// no permit. Renew the permits at intervals of a third of the shortest TTL, and when the store is available again
    /// after an outage.
    pub fn hold(mut self, is_granted: impl Fn(usize) -> bool) -> Self {
        if !self.permits.iter().all(|permit| is_granted(permit.limit_index)) {
            self.permits = self.permits.iter().filter(|permit| is_granted(permit.limit_index)).cloned().collect();
        }
        let Some(min_ttl) = self.ttls().min() else { return self };
        if self.decided_by == DecidedBy::Store {
            self.store_state.call_in_flight.store(false, Ordering::Relaxed);
            if !mem::replace(&mut self.is_counted_here, true) {
                self.store_handle.count_in_local_share(Operation::Charge, &self.permits);
            }
        }
        let store_handle = self.store_handle.clone();
        let permits = self.permits.clone();
        let store_state = self.store_state.clone();
        self.renewal = self.store_handle.spawn(async move {
            let mut renew_delay = min_ttl / 3;
            loop {
                store_handle.store.recovery_within(renew_delay).await;
                store_handle.count_in_local_share(Operation::Renew, &permits);
                store_state.call_in_flight.store(true, Ordering::Relaxed);
                let result = store_handle.call(DecidedBy::Store, monotonic(), Operation::Renew, &permits).await;
                renew_delay = min_ttl / 3;
                match result {
                    Ok(_) => {
                        store_state.may_be_counted.store(true, Ordering::Relaxed);
                        store_state.call_in_flight.store(false, Ordering::Relaxed);
                    }
                    Err(error) => {
                        if error.is_not_executed() {
                            store_state.call_in_flight.store(false, Ordering::Relaxed);
                        } else {
                            store_state.may_be_counted.store(true, Ordering::Relaxed);
                        }
                        // Until the store knows the permit, other gateways may grant it a second time.
                        renew_delay = renew_delay.min(OUTAGE_RETRY_INTERVAL);
                        debug!(%error, "a concurrency permit was not renewed");
                    }
                }
            }
        });
        self
    }
}

impl Drop for ConcurrencyPermits {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
        if self.permits.is_empty() {
            return;
        }
        self.release_local_share();
        let call_in_flight = self.store_state.call_in_flight.load(Ordering::Relaxed);
        if !call_in_flight && !self.store_state.may_be_counted.load(Ordering::Relaxed) {
            return;
        }
        self.store_handle.settle(Settlement::Release {
            permits: self.permits.clone(),
            is_certain: !call_in_flight,
            max_ttl: self.max_ttl(),
        });
    }
}

/// A future that settles deferred charges. The output contains the limit index and the new outcome of each limit that
/// was charged or refunded.
pub type SettleFuture = Pin<Box<dyn Future<Output = Result<Vec<(usize, Outcome)>, StoreError>> + Send>>;

/// A call that settles charges of a request.
#[derive(Debug)]
struct SettlementCall {
    decided_by: DecidedBy,
    operation: Operation,
    charges: Vec<OwnedCharge>,
}

/// The charges and refunds of a request that are deferred until its response is known.
#[derive(Debug)]
pub struct DeferredCharges {
    store_handle: Arc<StoreHandle>,
    charges: Vec<DeferredCharge>,
}

/// A deferred charge or refund of one limit.
#[derive(Debug)]
pub struct DeferredCharge {
    /// The deferred operation.
    pub deferred: Deferred,
    /// Whether the store or the local share has made the charge.
    pub decided_by: DecidedBy,
    /// Time of the check in µs since the Unix epoch, by the clock of the store or of the local share that decided.
    pub charged_at: u64,
    /// The charge to which the operation applies.
    pub charge: OwnedCharge,
}

impl DeferredCharges {
    /// Create the deferred charges of an admitted request.
    pub fn new(store_handle: Arc<StoreHandle>, charges: Vec<DeferredCharge>) -> Self {
        DeferredCharges { store_handle, charges }
    }

    /// Add the deferred charges of another check of the same request.
    pub fn append(&mut self, mut other: DeferredCharges) {
        self.charges.append(&mut other.charges);
    }

    /// Split off the reservations that `is_selected` selects by limit index, so that they can be settled later. Return
    /// `None` if there are none.
    pub fn split_reservations(&mut self, is_selected: impl Fn(usize) -> bool) -> Option<DeferredCharges> {
        let is_reservation =
            |charge: &DeferredCharge| charge.deferred == Deferred::Settle && is_selected(charge.charge.limit_index);
        let (reservations, others): (Vec<_>, Vec<_>) =
            mem::take(&mut self.charges).into_iter().partition(is_reservation);
        self.charges = others;
        (!reservations.is_empty()).then(|| DeferredCharges::new(self.store_handle.clone(), reservations))
    }

    /// Return the limit index of each charge whose cost is not final.
    pub fn settled_later(&self) -> impl Iterator<Item = usize> {
        let is_open = |charge: &&DeferredCharge| matches!(charge.deferred, Deferred::Charge | Deferred::Settle);
        self.charges.iter().filter(is_open).map(|charge| charge.charge.limit_index)
    }

    /// Return the limit index and the cost of each charge.
    pub fn costs(&self) -> impl Iterator<Item = (usize, u64)> {
        self.charges.iter().map(|charge| (charge.charge.limit_index, charge.charge.cost))
    }

    /// Return whether the costs of a charge are added to usage totals.
    pub fn have_totals(&self) -> bool {
        self.charges.iter().any(|owed| owed.charge.usage.is_some())
    }

    /// Add the cost that `cost_of` returns for each limit index to the usage totals of a model, on the day of the
    /// charge.
    pub fn count_model(&self, model: &str, cost_of: impl Fn(usize) -> Option<u64>) {
        let store_handle = &self.store_handle;
        let (Store::Memory(memory) | Store::Redis { fallback: memory, .. }) = &store_handle.store;
        for DeferredCharge { charged_at, charge, .. } in &self.charges {
            if let (Some(days), Some(cost)) = (&charge.usage, cost_of(charge.limit_index).filter(|cost| *cost > 0)) {
                let limit = charge.variant.state_name.limit_name();
                let date = days.day_at(*charged_at).date;
                memory.usage.add_model(limit, charge.identity, date, model, cost as i64);
            }
        }
        store_handle.post_usage();
    }

    /// Add numbers of tokens, by kind, to the usage totals of the limits that `is_counted` selects by limit index, on
    /// the day of the charge.
    pub fn count_kinds(&self, tokens: &[(&str, u64)], is_counted: impl Fn(usize) -> bool) {
        let store_handle = &self.store_handle;
        let (Store::Memory(memory) | Store::Redis { fallback: memory, .. }) = &store_handle.store;
        let counted = self.charges.iter().filter(|owed| is_counted(owed.charge.limit_index));
        for DeferredCharge { charged_at, charge, .. } in counted {
            let Some(days) = &charge.usage else { continue };
            let limit = charge.variant.state_name.limit_name();
            let date = days.day_at(*charged_at).date;
            for (kind, tokens) in tokens {
                memory.usage.add_kind(limit, charge.identity, date, kind, (*tokens).min(MAX_STATE) as i64);
            }
        }
        store_handle.post_usage();
    }

    /// Perform the action that `action_for` returns for each limit index, in the background.
    pub fn settle_in_background(mut self, action_for: impl Fn(usize, Deferred) -> SettleAction) {
        for SettlementCall { decided_by, operation, charges } in self.calls(action_for) {
            self.store_handle.settle(Settlement::Deliver { decided_by, operation, charges });
        }
    }

    /// Return one call for all charges, and one call for each set of refunds with the same charge time. Usually there
    /// is a single call.
    fn calls(&mut self, action_for: impl Fn(usize, Deferred) -> SettleAction) -> Vec<SettlementCall> {
        let mut calls: Vec<SettlementCall> = Vec::new();
        for DeferredCharge { deferred, decided_by, charged_at, charge: pending } in mem::take(&mut self.charges) {
            let charged = pending.cost;
            let refund = Operation::Refund { charged_at };
            let (operation, pending) = match action_for(pending.limit_index, deferred) {
                SettleAction::Nothing => continue,
                SettleAction::Charge(cost) => (Operation::Charge, OwnedCharge { cost, ..pending }),
                SettleAction::Refund => (refund, pending),
                SettleAction::Settle(cost) => match cost.cmp(&charged) {
                    CmpOrdering::Equal => continue,
                    CmpOrdering::Less => (refund, pending.partial_refund(cost, decided_by)),
                    CmpOrdering::Greater => (Operation::Charge, OwnedCharge { cost: cost - charged, ..pending }),
                },
            };
            match calls.iter_mut().find(|call| (call.decided_by, call.operation) == (decided_by, operation)) {
                Some(call) => call.charges.push(pending),
                None => calls.push(SettlementCall { decided_by, operation, charges: vec![pending] }),
            }
        }
        calls
    }

    /// Perform the action that `action_for` returns for each limit index. Return `None` if there is nothing to do. If
    /// the store does not reply, a charge may be lost. A charge is never made twice.
    pub fn settle(mut self, action_for: impl Fn(usize, Deferred) -> SettleAction) -> Option<SettleFuture> {
        let calls = self.calls(action_for);
        if calls.is_empty() {
            return None;
        }
        let store_handle = self.store_handle.clone();
        // Settle in a separate task, so that the charge is made even if the client disconnects now.
        let task = self.store_handle.tasks.spawn(async move {
            let mut outcomes = Vec::new();
            let mut failure = None;
            for SettlementCall { decided_by, operation, charges: pending } in calls {
                match store_handle.call(decided_by, monotonic(), operation, &pending).await {
                    Ok(verdict) => {
                        outcomes.extend(pending.iter().map(|pending| pending.limit_index).zip(verdict.outcomes));
                    }
                    Err(error) => {
                        if error.is_not_executed() {
                            // Retry in the background, so that the response does not wait.
                            store_handle.settle(Settlement::Deliver { decided_by, operation, charges: pending });
                        } else {
                            store_handle.give_up(decided_by, operation, &pending, &error);
                        }
                        failure = Some(error);
                    }
                }
            }
            store_handle.post_usage();
            failure.map_or(Ok(outcomes), Err)
        });
        Some(Box::pin(async { task.await.unwrap_or_else(|_| Ok(Vec::new())) }))
    }
}

impl Drop for DeferredCharges {
    fn drop(&mut self) {
        // The value is dropped without a response if the client disconnects early, or if a later step rejects the
        // request. Deferred costs are charged nevertheless: the upstream may have done the work, and aborted requests
        // must not be free. Reservations stay charged for the same reason.
        let mut by_store = Vec::new();
        let mut locally = Vec::new();
        for owed in mem::take(&mut self.charges).into_iter().filter(|owed| owed.deferred == Deferred::Charge) {
            match owed.decided_by {
                DecidedBy::Store => by_store.push(owed.charge),
                DecidedBy::Local => locally.push(owed.charge),
            }
        }
        for (decided_by, charges) in [(DecidedBy::Store, by_store), (DecidedBy::Local, locally)] {
            if !charges.is_empty() {
                self.store_handle.settle(Settlement::Deliver { decided_by, operation: Operation::Charge, charges });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::limiter::algorithm::concurrency::Concurrency;
    use crate::limiter::algorithm::token_bucket::TokenBucket;
    use crate::limiter::algorithm::{Change, State, StepKind};
    use crate::limiter::key::{IdentityHasher, StateName};
    use crate::limiter::memory::MemoryStore;
    use crate::limiter::quota::Quota;
    use crate::limiter::spec::{LocalRules, LocalShare};
    use crate::limiter::usage::{UsageFields, UsageQuery};
    use jiff::civil::Date;
    use proptest::prelude::*;

    const LIMIT: u64 = 3;

    /// Return the memory store, and a permit of a concurrency limit.
    fn limited() -> (Arc<StoreHandle>, OwnedCharge) {
        let rule = Rule::Concurrency(Concurrency { limit: LIMIT, ttl: 60_000_000 });
        let variant = LimitVariant {
            id: 1,
            quota: Quota { count: LIMIT, window_us: None, calendar: None },
            state_name: StateName::new(&IdentityHasher::new(""), "l", &rule.shape()),
            local_rules: LocalRules::new(LocalShare::default()),
            rule,
        };
        let permit = OwnedCharge {
            limit_index: 0,
            variant: Arc::new(variant),
            identity: Identity(1),
            cost: 1,
            permit_id: 0,
            prefetch: 0,
            debt_before_us: 0,
            usage: None,
            notify: None,
        };
        let store = Store::Memory(Arc::new(MemoryStore::new(100, Clock::Store)));
        let store_handle = StoreHandle { store, denials: None, events: Arc::default(), tasks: TaskTracker::new() };
        (Arc::new(store_handle), permit)
    }

    async fn acquire(store_handle: &Arc<StoreHandle>, permit: &OwnedCharge, permit_id: u64) -> ConcurrencyPermits {
        let permits = vec![OwnedCharge { permit_id, ..permit.clone() }];
        let call = store_handle.call(DecidedBy::Store, monotonic(), Operation::Check, &permits);
        assert_eq!(call.await.unwrap().granted, 1);
        ConcurrencyPermits::requested(store_handle.clone(), DecidedBy::Store, permits).hold(|_| true)
    }

    async fn remaining(store_handle: &StoreHandle, permit: &OwnedCharge) -> u64 {
        let permits = [OwnedCharge { permit_id: u64::MAX, ..permit.clone() }];
        let call = store_handle.call(DecidedBy::Store, monotonic(), Operation::Peek, &permits);
        call.await.unwrap().outcomes[0].remaining
    }

    #[tokio::test]
    async fn dropped_permits_are_free_at_once() {
        let (store_handle, permit) = limited();
        let mut held = Vec::new();
        for permit_id in 0..LIMIT {
            held.push(acquire(&store_handle, &permit, permit_id).await);
        }
        assert_eq!(remaining(&store_handle, &permit).await, 0);
        drop(held);
        assert_eq!(remaining(&store_handle, &permit).await, LIMIT, "before other tasks run");
    }

    #[tokio::test(start_paused = true)]
    async fn closed_tracker_waits_for_repeated_releases() {
        let (store_handle, permit) = limited();
        // The call that requests the permit may still be executed, so the release is made twice.
        drop(ConcurrencyPermits::requested(store_handle.clone(), DecidedBy::Store, vec![permit.clone()]));
        store_handle.tasks.close();
        let permits = [OwnedCharge { permit_id: permit.permit_id, ..permit.clone() }];
        let late = store_handle.call(DecidedBy::Store, monotonic(), Operation::Check, &permits).await.unwrap();
        assert_eq!((late.granted, remaining(&store_handle, &permit).await), (1, LIMIT - 1));
        store_handle.tasks.wait().await;
        assert_eq!(remaining(&store_handle, &permit).await, LIMIT);
    }

    fn charge_of(rule: &Rule, quota: Quota, cost: u64) -> OwnedCharge {
        let variant = LimitVariant {
            id: 1,
            quota,
            state_name: StateName::new(&IdentityHasher::new(""), "l", &rule.shape()),
            local_rules: LocalRules::new(LocalShare::default()),
            rule: rule.clone(),
        };
        OwnedCharge {
            usage: None,
            notify: None,
            limit_index: 0,
            variant: Arc::new(variant),
            identity: Identity(1),
            cost,
            permit_id: 0,
            prefetch: 0,
            debt_before_us: 0,
        }
    }

    /// Return the deferred charges of a request: limit 0 has a reservation of the store, limit 1 one of the local share,
    /// and limit 2 a deferred cost.
    fn deferred(store_handle: &Arc<StoreHandle>) -> DeferredCharges {
        let rule = Rule::TokenBucket(TokenBucket::new("10/day".parse().unwrap(), 10).unwrap());
        let charge = |limit_index, deferred, decided_by| DeferredCharge {
            deferred,
            decided_by,
            charged_at: 1_000_000,
            charge: OwnedCharge { limit_index, ..charge_of(&rule, "10/day".parse().unwrap(), 5) },
        };
        let charges = vec![
            charge(0, Deferred::Settle, DecidedBy::Store),
            charge(1, Deferred::Settle, DecidedBy::Local),
            charge(2, Deferred::Charge, DecidedBy::Local),
        ];
        DeferredCharges::new(store_handle.clone(), charges)
    }

    #[tokio::test]
    async fn charges_of_the_store_and_of_the_local_share_are_settled_in_separate_calls() {
        let (store_handle, _) = limited();
        let calls = deferred(&store_handle).calls(|_, _| SettleAction::Refund);
        let found: Vec<_> = calls
            .iter()
            .map(|call| (call.decided_by, call.charges.iter().map(|charge| charge.limit_index).collect::<Vec<_>>()))
            .collect();
        assert_eq!(found, [(DecidedBy::Store, vec![0]), (DecidedBy::Local, vec![1, 2])]);
    }

    #[tokio::test]
    async fn dropped_deferred_cost_of_a_local_share_is_charged() {
        let (store_handle, _) = limited();
        let charges = deferred(&store_handle);
        let owed = [charges.charges[2].charge.clone()];
        let free = async || {
            let call = store_handle.call(DecidedBy::Local, monotonic(), Operation::Peek, &owed);
            call.await.unwrap().outcomes[0].remaining
        };
        let before = free().await;
        drop(charges);
        assert_eq!(before - free().await, 5, "reservations stay charged, and the cost is charged");
    }

    #[tokio::test]
    async fn only_the_selected_reservations_are_split_off() {
        let (store_handle, _) = limited();
        for (selected, split, left) in [(0, vec![0], vec![1, 2]), (1, vec![1], vec![0, 2]), (2, vec![], vec![0, 1, 2])]
        {
            let mut charges = deferred(&store_handle);
            let reservations = charges.split_reservations(|limit_index| limit_index == selected);
            let indices = |charges: &DeferredCharges| charges.costs().map(|(index, _)| index).collect::<Vec<_>>();
            assert_eq!((reservations.as_ref().map_or(Vec::new(), indices), indices(&charges)), (split, left));
        }
    }

    /// Return the state after a change.
    fn next_state(change: Change, state: Option<State>) -> Option<State> {
        match change {
            Change::Put(state, _) => Some(state),
            Change::Delete => None,
            _ => state,
        }
    }

    proptest! {
        /// After a reservation is settled, a token bucket has the same number of tokens as if the actual cost had been
        /// charged at once. Rounding may leave one token less.
        #[test]
        fn settled_reservation_equals_the_actual_charge(
            count in 1..10_000u64,
            earlier in 0..5000u64,
            reserved in 1..5000u64,
            kept in any::<prop::sample::Index>(),
            wait_us in 0..120_000_000u64,
        ) {
            let quota: Quota = format!("{count}/min").parse().unwrap();
            let rule = Rule::TokenBucket(TokenBucket::new(quota, 10_000).unwrap());
            let kept = kept.index(reserved as usize + 1) as u64;
            let started_at = 1_000_000_000;
            let first = rule.step(None, started_at, StepKind::Charge, earlier);
            let state = next_state(first.change, None);
            let charged_at = started_at + 1_000_000;
            let settled_at = started_at + 1_000_000 + wait_us;
            let check = rule.step(state.as_ref(), charged_at, StepKind::Check, reserved);
            let debt_before_us = rule.debt_before_us(&check.outcome, 0, reserved);
            let refund = OwnedCharge { debt_before_us, ..charge_of(&rule, quota, reserved) };
            let refund = refund.partial_refund(kept, DecidedBy::Store);
            let kind = StepKind::Refund { charged_at, debt_before_us: refund.debt_before_us };
            let charged = next_state(check.change, state.clone());
            let settled = rule.step(charged.as_ref(), settled_at, kind, refund.cost).outcome.remaining;
            let actual = next_state(rule.step(state.as_ref(), charged_at, StepKind::Charge, kept).change, state);
            let expected = rule.step(actual.as_ref(), settled_at, StepKind::Check, 0).free;
            prop_assert!(settled <= expected && settled + 1 >= expected, "{settled} instead of {expected}");
        }
    }

    #[tokio::test]
    async fn model_totals_belong_to_the_day_of_the_charge() {
        let (store_handle, permit) = limited();
        let Store::Memory(memory) = &store_handle.store else { panic!("the store is in memory") };
        let days = ["UTC", "Pacific/Kiritimati"].map(|zone| Arc::new(UsageDays::new(zone).unwrap()));
        // One second before midnight in UTC, and midnight. In Kiritimati, it is then 14:00 of one and the same day.
        let midnight_us: u64 = 1_795_996_800_000_000;
        for (charged_at, costs) in [(midnight_us - 1_000_000, [3, 5]), (midnight_us, [7, 11])] {
            let charges = days.iter().zip(costs).enumerate().map(|(limit_index, (days, cost))| DeferredCharge {
                deferred: Deferred::Settle,
                decided_by: DecidedBy::Store,
                charged_at,
                charge: OwnedCharge {
                    limit_index,
                    identity: Identity(limit_index as u128 + 1),
                    cost,
                    usage: Some(days.clone()),
                    ..permit.clone()
                },
            });
            let charges = DeferredCharges::new(store_handle.clone(), charges.collect());
            charges.count_model("m", |limit_index| Some(costs[limit_index]));
        }
        let query = UsageQuery {
            limits: vec!["l".into()],
            identities: None,
            from: Date::MIN,
            to: Date::MAX,
            parts: UsageFields::Models,
            max_rows: 100,
        };
        let mut rows: Vec<_> = memory.usage.read(&query).unwrap();
        rows.sort();
        let rows: Vec<_> = rows.iter().map(|row| (row.identity, row.date.to_string(), row.cost)).collect();
        let expected = [(1, "2026-11-29", 3), (1, "2026-11-30", 7), (2, "2026-11-30", 5 + 11)];
        assert_eq!(rows, expected.map(|(identity, date, cost)| (identity, date.to_owned(), cost)));
    }

    #[test]
    fn drop_outside_of_a_runtime_makes_no_call() {
        let (store_handle, permit) = limited();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        drop(ConcurrencyPermits::requested(store_handle.clone(), DecidedBy::Store, vec![permit]));
        store_handle.tasks.close();
        runtime.block_on(store_handle.tasks.wait());
    }
}
