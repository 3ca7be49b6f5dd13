//! Coalescing: while a check of a set of states is in flight, further checks of the very same set wait, and the next call
//! takes units for all of them. They leave when the call in flight is answered, or a sixteenth of the timeout after it left: a hot
//! key costs Redis one call for each round trip or, if Redis is far, at most sixteen within the timeout, whatever its traffic. Where
//! its limits allow, such a call prefetches units as well, and the checks after it cost none.

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
use tracing::debug;

use crate::limiter::algorithm::Status;
use crate::limiter::clock::{elapsed_since, monotonic};
use crate::limiter::metrics::AnsweredBy;
use crate::limiter::prefetch::{PrefetchPool, PrefetchReservation};
use crate::limiter::redis::batcher::{LATENCY_TARGET_DIVISOR, MAX_WORKER_DELAY};
use crate::limiter::settlement::{OwnedCharge, StoreHandle};
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// Those who wait for a hot key let the worker go round so often before their call leaves with all who have come. With nothing else
/// to do it is through at once; a busy one makes fewer calls, each of which takes Redis and the gateway as much as a request.
const YIELDS_BEFORE_SEND: usize = 4;

/// A worker that takes longer than this for a round is busy: all that were ready have come.
const BUSY_WORKER_DELAY: Duration = Duration::from_millis(2);

/// A check that so many calls in a row granted to others only is denied, although more calls would find a unit that has come back
/// meanwhile: it would not wait for one if it were alone.
const MAX_MISSED_CALLS: u32 = 2;

/// Checks of one worker that may wait for a call of their set. Further ones are rejected at once.
const MAX_WAITERS: usize = 16_384;

type CheckResult = Result<Verdict, StoreError>;

/// The states of a request, if further ones for the same may be taken together with it.
#[derive(Debug, Clone, Copy)]
pub struct CheckGroup {
    /// Names them.
    pub id: u128,
    /// So many units may be taken ahead when the set is hot.
    pub prefetch: u64,
}

/// A check that waits for the next call.
#[derive(Debug)]
struct Waiter {
    reply: oneshot::Sender<CheckResult>,
    queued_at: Instant,
    /// Calls that had no unit left for it after others got theirs.
    missed_calls: u32,
}

/// A set of which a check is in flight.
#[derive(Debug, Default)]
struct Flight {
    /// Those that leave with the next call, oldest first.
    waiters: Vec<Waiter>,
    /// Told when the check that found the set idle is answered; none as long as no task makes calls for those that wait.
    leader_done: Option<Arc<Notify>>,
}

/// The checks of one worker that are in flight.
#[derive(Debug)]
pub struct Singleflight {
    /// By the id of their set.
    flights: Mutex<HashMap<u128, Flight, RandomState>>,
    /// Checks that wait, of all sets.
    waiter_count: AtomicUsize,
    /// Maximum time from when a check is asked to its verdict.
    timeout: Duration,
    /// What is taken ahead, by all workers of the process.
    prefetch_pool: Arc<PrefetchPool>,
    /// Nothing more is needed.
    stop: CancellationToken,
}

impl Singleflight {
    /// Without checks in flight.
    pub fn new(timeout: Duration, prefetch_pool: Arc<PrefetchPool>) -> Self {
        let (flights, waiter_count, stop) = Default::default();
        Singleflight { flights, waiter_count, timeout, prefetch_pool, stop }
    }

    /// Checks one unit of each of `charges`, alone or together with others of the same `set`; the verdict is the one that
    /// it would have got alone, but for the reset, which is that of all. It is `asked` now. `pending` makes the charges that outlive
    /// this call.
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
            // One is in flight; or its prefetched units are used up: more are due, and this check goes with them.
            flight => {
                if self.waiter_count.fetch_add(1, Ordering::Relaxed) >= MAX_WAITERS {
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
            // Dropped at the end, and also when the client leaves while its call is in flight.
            let _guard = FlightGuard { singleflight: self, group: group.id };
            return store_handle.store.call(DecidedBy::Store, asked_at, Operation::Check, charges).await;
        };
        store_handle.store.count_check(AnsweredBy::Coalesced);
        turn.await.unwrap_or(Err(StoreError::Overloaded))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Flight, RandomState>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a task make the calls for those that wait, if none does yet: at once if the set is `idle`, else when its call is answered.
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
        let (singleflight, pending) = (self.clone(), owned_charges());
        let task = FlightTask { singleflight, store_handle: store_handle.clone(), group, charges: pending };
        // A separate task: a request that is cancelled does not cancel the others.
        store_handle.spawn(async move {
            if !is_idle {
                let _ = timeout(task.singleflight.timeout / LATENCY_TARGET_DIVISOR, leader_done.notified()).await;
            }
            Arc::new(task).run().await;
        });
    }

    /// Take the checks that wait for the next call of a set; without any, the set is idle. Checks whose time is all but over are
    /// rejected: all that share a call wait no longer than the oldest of them.
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

/// The end of the check that found its set idle.
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

/// What the calls for a set are made of.
#[derive(Debug)]
struct FlightTask {
    singleflight: Arc<Singleflight>,
    store_handle: Arc<StoreHandle>,
    group: CheckGroup,
    charges: Vec<OwnedCharge>,
}

impl FlightTask {
    /// Makes calls for all that wait, as long as any do.
    async fn run(self: Arc<Self>) {
        loop {
            let started_at = monotonic();
            for _ in 0..YIELDS_BEFORE_SEND {
                yield_now().await;
                if elapsed_since(started_at) > BUSY_WORKER_DELAY {
                    break;
                }
            }
            // What the worker did meanwhile is no delay of the store.
            let worker_delay = elapsed_since(started_at).min(MAX_WORKER_DELAY);
            let waiters = self.singleflight.take_waiters(self.group.id, monotonic() - worker_delay);
            let Some(oldest_queued_at) = waiters.iter().map(|one| one.queued_at + worker_delay).min() else { return };
            let task = self.clone();
            let sent = self.store_handle.tasks.spawn(async move { task.send(waiters, oldest_queued_at).await });
            // The next ones leave with the answer, or beside a call that takes longer.
            let _ = timeout(self.singleflight.timeout / LATENCY_TARGET_DIVISOR, sent).await;
        }
    }

    /// Asks for those that wait, the oldest since then.
    async fn send(self: Arc<Self>, waiters: Vec<Waiter>, oldest_queued_at: Instant) {
        let result = self.request(waiters.len() as u64, oldest_queued_at).await;
        let (unanswered, abandoned) = distribute(&result, waiters);
        if let (Ok(verdict), 1..) = (&result, abandoned) {
            let refund = Operation::Refund { charged_at: verdict.now_us };
            let mut refunds = with_cost(&self.charges, abandoned);
            for (pending, outcome) in refunds.iter_mut().zip(&verdict.outcomes) {
                pending.debt_before_us = pending.variant.rule.debt_before_us(outcome, 0, verdict.granted);
            }
            let ledger = self.store_handle.clone();
            // A separate task: the checks without an answer do not wait for the reply.
            self.store_handle.spawn(async move {
                if let Err(error) = ledger.call(DecidedBy::Store, refund, &refunds).await {
                    debug!(%error, "units of requests that were abandoned may not have been given back");
                }
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

    /// Asks for so many units, and prefetches some if that is due.
    async fn request(&self, waiters: u64, started_at: Instant) -> CheckResult {
        match self.singleflight.reserve(self.group, &self.charges) {
            Some(reservation) => self.prefetch(reservation, waiters, started_at).await,
            None => {
                let operation = if waiters == 1 { Operation::Check } else { Operation::TakeUpTo };
                self.store_handle
                    .call_since(DecidedBy::Store, started_at, operation, &with_cost(&self.charges, waiters))
                    .await
            }
        }
    }
}

/// Gives the units of a call to the checks that came first. Return the checks without an answer, which ask again, and the number of
/// units of requests that were cancelled.
fn distribute(result: &CheckResult, waiters: Vec<Waiter>) -> (Vec<Waiter>, u64) {
    let granted = result.as_ref().map_or(0, |verdict| verdict.granted) as usize;
    let (mut waiting, mut abandoned) = (waiters.into_iter(), 0);
    for (index, waiter) in waiting.by_ref().take(granted).enumerate() {
        let answer = result.clone().map(|mut verdict| {
            verdict.granted = 1;
            verdict.charged_later += (granted - 1 - index) as u64;
            for outcome in &mut verdict.outcomes {
                // As it was before the units behind were taken.
                outcome.remaining += (granted - 1 - index) as u64;
            }
            verdict
        });
        abandoned += u64::from(waiter.reply.send(answer).is_err());
    }
    if granted == 0 {
        // Nothing was left, and the answer says when something will be; or there is none.
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

/// The denial by limits that have nothing left.
fn exhausted_denial(verdict: &Verdict) -> Verdict {
    let mut denied = Verdict { granted: 0, ..verdict.clone() };
    for outcome in denied.outcomes.iter_mut().filter(|outcome| outcome.remaining == 0) {
        // When a unit comes back is not known.
        outcome.status = Status::Saturated;
    }
    denied
}

// Prefetching: the calls that take units of a hot set in advance, and those that give back unused units.

impl Singleflight {
    /// A unit of each state of the set that was taken ahead: the verdict, and when the unit was charged, µs.
    pub fn take_prefetched(&self, group: CheckGroup) -> Option<(Verdict, u64)> {
        // Most limits have no advance: their requests meet neither lock nor clock.
        if group.prefetch == 0 { None } else { self.prefetch_pool.take(group.id, monotonic()) }
    }

    /// Gives back what this worker has taken ahead, in tasks of the ledger.
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
    /// Asks for the units of those that wait and for those of a reservation, and keeps what is not theirs.
    pub(crate) async fn prefetch(
        &self,
        reservation: PrefetchReservation,
        waiters: u64,
        started_at: Instant,
    ) -> CheckResult {
        let asked_at = monotonic();
        let charges = with_cost(&self.charges, waiters + reservation.tokens());
        let verdict = self.store_handle.call_since(DecidedBy::Store, started_at, Operation::TakeUpTo, &charges).await?;
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
    /// Gives back prefetched units that are not used within their time.
    fn refund_when_expired(&self, store_handle: &Arc<StoreHandle>, group: u128, charges: Vec<OwnedCharge>) {
        let (store, pool, stop) = (store_handle.clone(), self.prefetch_pool.clone(), self.stop.clone());
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
            let mut refunded = with_cost(&charges, unused.tokens);
            for (pending, outcome) in refunded.iter_mut().zip(&unused.outcomes) {
                pending.debt_before_us = pending.variant.rule.debt_before_us(outcome, 0, unused.tokens);
            }
            if let Err(error) = store.deliver(DecidedBy::Store, refund, refunded).await {
                debug!(%error, "units that were taken ahead may not have been given back");
            }
        });
    }
}

/// The same charges, of so many units.
pub(crate) fn with_cost(charges: &[OwnedCharge], cost: u64) -> Vec<OwnedCharge> {
    charges.iter().map(|pending| OwnedCharge { cost_or_permit_id: cost, ..pending.clone() }).collect()
}
