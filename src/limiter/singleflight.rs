//! Singleflight coalesces concurrent checks of the same group of states. A group consists of the states of all limits
//! that a request checks.
//!
//! While a check of a group is in flight, further checks of the same group wait, and the next call takes tokens for all
//! of them. The next call is sent when the call in flight has a reply, or after a sixteenth of the store timeout. An
//! identity with many requests therefore costs Redis one call per round trip or, if Redis is slow, at most sixteen
//! calls per store timeout, regardless of its request rate. If all limits of the group enable prefetching, the call
//! also prefetches tokens, so that the next checks need no call.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::task::yield_now;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::clock::{elapsed_since, monotonic};
use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::metrics::AnsweredBy;
use crate::limiter::pacing::{MAX_WAITING_CHECKS, latency_target, worker_delay};
use crate::limiter::prefetch::{PrefetchPool, PrefetchReservation};
use crate::limiter::settlement::{OwnedCharge, StoreHandle};
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// Yield to the event loop this many times before sending a call, so that more waiters join the call. On an idle
/// worker, this takes no noticeable time. On a busy worker, it saves calls, each of which costs Redis and the gateway
/// as much CPU time as a request.
const YIELDS_BEFORE_SEND: usize = 4;

/// If yielding takes longer than this, the worker is busy. All checks that are ready have then joined the call.
const BUSY_WORKER_DELAY: Duration = Duration::from_millis(2);

/// Deny a check after this number of consecutive calls that granted tokens only to other checks. A further call might
/// get a token that has refilled, but a check without coalescing would not wait for a refill either.
const MAX_MISSED_CALLS: u32 = 2;

type CheckResult = Result<Verdict, StoreError>;

/// A group of states whose checks can be coalesced.
#[derive(Debug, Clone, Copy)]
pub struct CheckGroup {
    /// Id of the group. Checks with the same id share store calls.
    pub id: u128,
    /// Maximum number of tokens to prefetch while the group has many requests. 0 disables prefetching.
    pub prefetch: u64,
}

/// A check that waits for the next call.
#[derive(Debug)]
struct Waiter {
    reply: oneshot::Sender<CheckResult>,
    queued_at: Instant,
    /// Number of calls that granted tokens to other checks but not to this check.
    missed_calls: u32,
}

/// A group with a check in flight.
#[derive(Debug, Default)]
struct Flight {
    /// The checks that join the next call, oldest first.
    waiters: Vec<Waiter>,
    /// Notified when the leader has its result. The leader is the check that found the group idle. `None` while no task
    /// makes calls for the waiters.
    leader_done: Option<Arc<Notify>>,
}

/// The coalesced checks of one worker.
#[derive(Debug)]
pub struct Singleflight {
    /// The flights by group id.
    flights: Mutex<HashMap<u128, Flight, RandomState>>,
    /// Number of waiting checks in all groups.
    waiter_count: AtomicUsize,
    /// Maximum time from the start of a check to its verdict.
    timeout: Duration,
    /// The prefetched tokens, shared by all workers of the process.
    prefetch_pool: Arc<PrefetchPool>,
    /// Cancelled at shutdown, so that unused tokens are refunded.
    stop: CancellationToken,
}

impl Singleflight {
    /// Create an instance without checks in flight.
    pub fn new(timeout: Duration, prefetch_pool: Arc<PrefetchPool>) -> Self {
        Singleflight {
            flights: Mutex::default(),
            waiter_count: AtomicUsize::new(0),
            timeout,
            prefetch_pool,
            stop: CancellationToken::new(),
        }
    }

    /// Check and charge one token for each of `charges`, alone or coalesced with other checks of the same `group`. The
    /// verdict is the same as for a separate call, except that the reset time is that of the shared call. `asked_at` is
    /// the current time. `owned_charges` creates copies of the charges that outlive this function call.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn check(
        self: &Arc<Self>,
        store_handle: &Arc<StoreHandle>,
        group: CheckGroup,
        charges: &[Charge<'_>],
        asked_at: Instant,
        owned_charges: impl Fn() -> Vec<OwnedCharge>,
    ) -> CheckResult {
        let queued = match self.lock().entry(group.id) {
            Entry::Vacant(vacant) if group.prefetch == 0 || !self.prefetch_pool.is_exhausted(group.id, asked_at) => {
                vacant.insert(Flight::default());
                None
            }
            // Join the next call of the group: either a check is in flight, or the prefetched tokens are used up and
            // the group prefetches again.
            flight => {
                if self.waiter_count.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING_CHECKS {
                    self.waiter_count.fetch_sub(1, Ordering::Relaxed);
                    return Err(StoreError::Overloaded);
                }
                let (reply, receiver) = oneshot::channel();
                let is_idle = matches!(flight, Entry::Vacant(_));
                let flight = flight.or_default();
                flight.waiters.push(Waiter { reply, queued_at: asked_at, missed_calls: 0 });
                self.ensure_task(flight, is_idle, store_handle, group, &owned_charges);
                Some(receiver)
            }
        };
        let Some(turn) = queued else {
            store_handle.store.count_check(AnsweredBy::Store);
            // The guard is dropped at the end of the check, or when the client disconnects while the call is in flight.
            let _guard = FlightGuard { singleflight: self, group: group.id };
            return store_handle.store.call(DecidedBy::Store, asked_at, Operation::Check, charges).await;
        };
        store_handle.store.count_check(AnsweredBy::Coalesced);
        turn.await.unwrap_or(Err(StoreError::Overloaded))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Flight, RandomState>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ensure that a task makes the calls for the waiters. The first call is sent at once if the group is idle.
    /// Otherwise it is sent when the call in flight has a reply.
    fn ensure_task(
        self: &Arc<Self>,
        flight: &mut Flight,
        is_idle: bool,
        store_handle: &Arc<StoreHandle>,
        group: CheckGroup,
        owned_charges: &impl Fn() -> Vec<OwnedCharge>,
    ) {
        if flight.leader_done.is_some() {
            return;
        }
        let leader_done = flight.leader_done.insert(Arc::default()).clone();
        let task = FlightTask {
            singleflight: self.clone(),
            store_handle: store_handle.clone(),
            group,
            charges: owned_charges(),
        };
        // Make the calls in a separate task, so that the cancellation of one request does not cancel the others.
        store_handle.spawn(async move {
            if !is_idle {
                let _ = timeout(latency_target(task.singleflight.timeout), leader_done.notified()).await;
            }
            Arc::new(task).run().await;
        });
    }

    /// Take the checks that wait for the next call of a group. If there are none, the group becomes idle. Reject checks
    /// that have used 7/8 of their timeout. The timeout of a call starts with its oldest check, so such a check would
    /// leave too little time for the call.
    fn take_waiters(&self, group_id: u128, now: Instant) -> Vec<Waiter> {
        let mut flights = self.lock();
        let Entry::Occupied(mut flight) = flights.entry(group_id) else { return Vec::new() };
        let mut waiters = mem::take(&mut flight.get_mut().waiters);
        self.waiter_count.fetch_sub(waiters.len(), Ordering::Relaxed);
        waiters.retain(|waiter| !waiter.reply.is_closed());
        let max_wait = self.timeout - self.timeout / 8;
        for expired in waiters.extract_if(.., |one| now.saturating_duration_since(one.queued_at) >= max_wait) {
            let _ = expired.reply.send(Err(StoreError::Overloaded));
        }
        if waiters.is_empty() {
            flight.remove();
        }
        waiters
    }
}

/// Dropping the guard signals that the leader's check has ended: it has its verdict, or its client has disconnected.
/// The task of the group then makes the calls for the waiters.
struct FlightGuard<'a> {
    singleflight: &'a Singleflight,
    group: u128,
}

impl Drop for FlightGuard<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(flight) = self.singleflight.lock().entry(self.group) {
            match &flight.get().leader_done {
                Some(leader_done) => leader_done.notify_one(),
                None => drop(flight.remove()),
            }
        }
    }
}

/// The task that makes the coalesced calls of a group.
#[derive(Debug)]
struct FlightTask {
    singleflight: Arc<Singleflight>,
    store_handle: Arc<StoreHandle>,
    group: CheckGroup,
    charges: Vec<OwnedCharge>,
}

impl FlightTask {
    /// Send calls until no check waits.
    async fn run(self: Arc<Self>) {
        loop {
            let started_at = monotonic();
            for _ in 0..YIELDS_BEFORE_SEND {
                yield_now().await;
                if elapsed_since(started_at) > BUSY_WORKER_DELAY {
                    break;
                }
            }
            let delay = worker_delay(started_at);
            let waiters = self.singleflight.take_waiters(self.group.id, monotonic() - delay);
            let Some(oldest_queued_at) = waiters.iter().map(|one| one.queued_at + delay).min() else { return };
            let task = self.clone();
            let sent = self.store_handle.tasks.spawn(async move { task.send(waiters, oldest_queued_at).await });
            // Send the next call after the reply. If the reply takes longer than the latency target, send the next call
            // in parallel.
            let _ = timeout(latency_target(self.singleflight.timeout), sent).await;
        }
    }

    /// Send one call for these waiters. The timeout starts at `oldest_queued_at`.
    async fn send(self: Arc<Self>, waiters: Vec<Waiter>, oldest_queued_at: Instant) {
        let waiter_count = waiters.len() as u64;
        let result = self.request(waiter_count, oldest_queued_at).await;
        let (unanswered, abandoned) = distribute(&result, waiters);
        if let (Ok(verdict), 1..) = (&result, abandoned) {
            let refund = Operation::Refund { charged_at: verdict.now_us };
            let kept = verdict.granted.min(waiter_count) - abandoned;
            let refunds = refunds(&self.charges, &verdict.outcomes, abandoned, verdict.granted - kept);
            let store_handle = self.store_handle.clone();
            // Refund in a separate task, so that the checks without a token do not wait for the refund.
            self.store_handle.spawn(async move {
                store_handle.deliver(DecidedBy::Store, refund, refunds).await;
            });
        }
        if unanswered.is_empty() {
            return;
        }
        let mut flights = self.singleflight.lock();
        let flight = flights.entry(self.group.id);
        let is_idle = matches!(flight, Entry::Vacant(_));
        let flight = flight.or_default();
        self.singleflight.waiter_count.fetch_add(unanswered.len(), Ordering::Relaxed);
        flight.waiters.splice(..0, unanswered);
        self.singleflight.ensure_task(flight, is_idle, &self.store_handle, self.group, &|| self.charges.clone());
    }

    /// Request one token for each waiter, and prefetch more tokens if the group may prefetch.
    async fn request(&self, waiters: u64, started_at: Instant) -> CheckResult {
        match self.singleflight.reserve(self.group, &self.charges) {
            Some(reservation) => self.prefetch(reservation, waiters, started_at).await,
            None => {
                let operation = if waiters == 1 { Operation::Check } else { Operation::TakeUpTo };
                self.store_handle
                    .call(DecidedBy::Store, started_at, operation, &with_cost(&self.charges, waiters))
                    .await
            }
        }
    }
}

/// Distribute the tokens of a call to the oldest checks. Return the checks without a token, which join the next call,
/// and the number of tokens that were granted to cancelled requests.
fn distribute(result: &CheckResult, waiters: Vec<Waiter>) -> (Vec<Waiter>, u64) {
    let granted = result.as_ref().map_or(0, |verdict| verdict.granted) as usize;
    let mut waiting = waiters.into_iter();
    let mut abandoned = 0;
    for (index, waiter) in waiting.by_ref().take(granted).enumerate() {
        let answer = result.clone().map(|mut verdict| {
            verdict.granted = 1;
            verdict.charged_later += (granted - 1 - index) as u64;
            for outcome in &mut verdict.outcomes {
                // `remaining` is the number after all charges of the call. Show this waiter the number after its own
                // charge.
                outcome.remaining += (granted - 1 - index) as u64;
            }
            verdict
        });
        abandoned += u64::from(waiter.reply.send(answer).is_err());
    }
    if granted == 0 {
        // Send the same result to all waiters: either a denial with its retry time, or an error.
        for one in waiting.by_ref() {
            let _ = one.reply.send(result.clone());
        }
    }
    let mut unanswered: Vec<_> = waiting.map(|one| Waiter { missed_calls: one.missed_calls + 1, ..one }).collect();
    if let Ok(verdict) = result {
        for one in unanswered.extract_if(.., |one| one.missed_calls >= MAX_MISSED_CALLS) {
            let _ = one.reply.send(Ok(exhausted_denial(verdict)));
        }
    }
    (unanswered, abandoned)
}

/// Return the denial by the limits that have no tokens remaining.
fn exhausted_denial(verdict: &Verdict) -> Verdict {
    let mut denied = Verdict { granted: 0, ..verdict.clone() };
    for outcome in denied.outcomes.iter_mut().filter(|outcome| outcome.remaining == 0) {
        // `Saturated` means that the time of the next token is unknown.
        outcome.status = Status::Saturated;
    }
    denied
}

// === Prefetching: calls that take tokens in advance and refund unused ones ===

impl Singleflight {
    /// Take one prefetched token of each state of the group. Return the verdict and the time at which the store charged
    /// the token, in µs since the Unix epoch.
    pub fn take_prefetched(&self, group: CheckGroup) -> Option<(Verdict, u64)> {
        // Return early if the group does not prefetch, to avoid locking the pool and reading the clock.
        if group.prefetch == 0 { None } else { self.prefetch_pool.take(group.id, monotonic()) }
    }

    /// Refund the unused prefetched tokens of this worker in background tasks of its [`StoreHandle`].
    pub fn stop(&self) {
        self.stop.cancel();
    }

    pub(crate) fn reserve(&self, group: CheckGroup, charges: &[OwnedCharge]) -> Option<PrefetchReservation> {
        if group.prefetch == 0 {
            return None;
        }
        self.prefetch_pool
            .reserve(group.id, charges.iter().map(|pending| (pending.key().local_hash(), pending.prefetch)))
    }
}

impl FlightTask {
    /// Request tokens for the waiters and for a reservation in one call. Store the tokens that the waiters do not need.
    pub(crate) async fn prefetch(
        &self,
        reservation: PrefetchReservation,
        waiters: u64,
        started_at: Instant,
    ) -> CheckResult {
        let asked_at = monotonic();
        let charges = with_cost(&self.charges, waiters + reservation.tokens());
        let verdict = self.store_handle.call(DecidedBy::Store, started_at, Operation::TakeUpTo, &charges).await?;
        if verdict.granted > waiters {
            let rules = self.charges.iter().map(|pending| &pending.variant.rule);
            if reservation.fill(verdict.granted - waiters, verdict.clone(), rules, asked_at, monotonic()) {
                self.singleflight.refund_when_expired(&self.store_handle, self.group.id, self.charges.clone());
            }
        }
        Ok(verdict)
    }
}

impl Singleflight {
    /// Refund prefetched tokens that are unused when they expire.
    fn refund_when_expired(&self, store_handle: &Arc<StoreHandle>, group: u128, charges: Vec<OwnedCharge>) {
        let store = store_handle.clone();
        let pool = self.prefetch_pool.clone();
        let stop = self.stop.clone();
        store_handle.spawn(async move {
            let unused = loop {
                match pool.expire(group, monotonic()) {
                    Ok(unused) => break unused,
                    Err(ttl) => {
                        if timeout(ttl, stop.cancelled()).await.is_ok() {
                            break pool.cancel(group);
                        }
                    }
                }
            };
            if unused.tokens == 0 {
                return;
            }
            let refund = Operation::Refund { charged_at: unused.charged_at };
            let refunds = refunds(&charges, &unused.outcomes, unused.tokens, unused.tokens);
            store.deliver(DecidedBy::Store, refund, refunds).await;
        });
    }
}

/// Return the same charges with this cost.
pub(crate) fn with_cost(charges: &[OwnedCharge], cost: u64) -> Vec<OwnedCharge> {
    charges.iter().map(|pending| OwnedCharge { cost, ..pending.clone() }).collect()
}

/// Return the refunds of `tokens` tokens that a call has charged to each limit. `with_later` is `tokens` plus the
/// number of tokens of the call that are used or refunded later. The refill repays all other tokens of the call first.
fn refunds(charges: &[OwnedCharge], outcomes: &[Outcome], tokens: u64, with_later: u64) -> Vec<OwnedCharge> {
    let mut refunds = with_cost(charges, tokens);
    for (pending, outcome) in refunds.iter_mut().zip(outcomes) {
        pending.debt_before_us = pending.variant.rule.debt_before_us(outcome, 0, with_later);
    }
    refunds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::limiter::key::IdentityHasher;
    use crate::limiter::memory::MemoryStore;
    use crate::limiter::spec::LimitSpec;
    use crate::limiter::store::Store;
    use tokio_util::task::TaskTracker;

    #[tokio::test]
    async fn refill_that_paid_for_other_checks_of_the_call_is_not_subtracted_from_a_refund() {
        let hasher = IdentityHasher::new("");
        let limit = LimitSpec::token_bucket(&hasher, "limit", "10/s".parse().unwrap()).unwrap();
        let charge = OwnedCharge {
            limit_index: 0,
            variant: limit.default_variant.clone(),
            identity: hasher.hash(b"client"),
            cost: 1,
            permit_id: 0,
            prefetch: 0,
            debt_before_us: 0,
            usage: None,
            notify: None,
        };
        // Each case has the numbers of tokens for earlier requests, for checks that wait for the call, and for checks
        // whose clients disconnect.
        for (earlier, waiting, cancelled) in [(0, 1, 1), (0, 4, 4), (3, 2, 3), (0, 1, 6), (0, 6, 1)] {
            for refill_ms in [0, 50, 100, 250, 400, 2000] {
                let remaining = async |cancelled: usize| {
                    let clock = Clock::manual(1_000_000);
                    let store = Store::Memory(Arc::new(MemoryStore::new(100, clock.clone())));
                    let events = Arc::default();
                    let tasks = TaskTracker::new();
                    let store_handle = Arc::new(StoreHandle { store, denials: None, events, tasks });
                    let charges = vec![charge.clone()];
                    let call = async |operation, cost| {
                        let charges = with_cost(&charges, cost);
                        store_handle.call(DecidedBy::Store, monotonic(), operation, &charges).await.unwrap()
                    };
                    call(Operation::Charge, earlier).await;
                    let task = FlightTask {
                        singleflight: Arc::new(Singleflight::new(Duration::from_secs(1), Arc::default())),
                        store_handle: store_handle.clone(),
                        group: CheckGroup { id: 1, prefetch: 0 },
                        charges: charges.clone(),
                    };
                    let (replies, mut receivers): (Vec<_>, Vec<_>) =
                        (0..waiting + cancelled).map(|_| oneshot::channel()).unzip();
                    receivers.truncate(waiting);
                    let waiter = |reply| Waiter { reply, queued_at: monotonic(), missed_calls: 0 };
                    Arc::new(task).send(replies.into_iter().map(waiter).collect(), monotonic()).await;
                    // The refund task reads the clock only when this task waits for it, so set the clock now.
                    clock.set(1_000_000 + refill_ms * 1000);
                    store_handle.tasks.close();
                    store_handle.tasks.wait().await;
                    call(Operation::Peek, 0).await.outcomes[0].remaining
                };
                assert_eq!(
                    remaining(cancelled).await,
                    remaining(0).await,
                    "{earlier} earlier, {waiting} waiting, {cancelled} cancelled, {refill_ms} ms"
                );
            }
        }
    }
}
