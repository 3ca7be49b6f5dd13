//! Coalescing: while a check of a set of states is in flight, further checks of the very same set wait, and the next call
//! takes units for all of them. They leave when the call in flight is answered, or a sixteenth of the timeout after it left: a hot
//! key costs Redis one call for each round trip or, if Redis is far, at most sixteen within the timeout, whatever its traffic. Where
//! its limits allow, such a call prefetches units as well, and the checks after it cost none.

mod ahead;

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot};
use tokio::task::yield_now;
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::admission::{Ledger, Pending};
use super::advance::Advances;
use super::algorithm::Status;
use super::backend::DecidedBy;
use super::clock::{monotonic, since};
use super::redis::{LATEST, SOON};
use super::store::{Charge, Operation, StoreError, Verdict};
use super::tallies::Answered;
use ahead::units;

/// Those who wait for a hot key let the worker go round so often before their call leaves with all who have come. With nothing else
/// to do it is through at once; a busy one makes fewer calls, each of which takes Redis and the gateway as much as a request.
const ROUNDS: usize = 4;

/// A worker that takes longer than this for a round is busy: all that were ready have come.
const BUSY: Duration = Duration::from_millis(2);

/// A check that so many calls in a row granted to others only is denied, although more calls would find a unit that has come back
/// meanwhile: it would not wait for one if it were alone.
const MOST_MISSED: u32 = 2;

/// Checks of one worker that may wait for a call of their set. Further ones are rejected at once.
const MOST_WAITING: usize = 16_384;

type Answer = Result<Verdict, StoreError>;

/// The states of a request, if further ones for the same may be taken together with it.
#[derive(Debug, Clone, Copy)]
pub struct Set {
    /// Names them.
    pub id: u128,
    /// So many units may be taken ahead when the set is hot.
    pub advance: u64,
}

/// A check that waits for the next call.
#[derive(Debug)]
struct Waiting {
    answer: oneshot::Sender<Answer>,
    since: Instant,
    /// Calls that had no unit left for it after others got theirs.
    missed: u32,
}

/// A set of which a check is in flight.
#[derive(Debug, Default)]
struct Flight {
    /// Those that leave with the next call, oldest first.
    waiting: Vec<Waiting>,
    /// Told when the check that found the set idle is answered; none as long as no task makes calls for those that wait.
    landed: Option<Arc<Notify>>,
}

/// The checks of one worker that are in flight.
#[derive(Debug)]
pub struct Coalescer {
    /// By the id of their set.
    flights: Mutex<HashMap<u128, Flight, RandomState>>,
    /// Checks that wait, of all sets.
    waiting: AtomicUsize,
    /// Maximum time from when a check is asked to its verdict.
    timeout: Duration,
    /// What is taken ahead, by all workers of the process.
    advances: Arc<Advances>,
    /// Nothing more is needed.
    ending: CancellationToken,
}

impl Coalescer {
    /// Without checks in flight.
    pub fn new(timeout: Duration, advances: Arc<Advances>) -> Self {
        let (flights, waiting, ending) = Default::default();
        Coalescer { flights, waiting, timeout, advances, ending }
    }

    /// Checks one unit of each of `charges`, alone or together with others of the same `set`; the verdict is the one that
    /// it would have got alone, but for the reset, which is that of all. It is `asked` now. `pending` makes the charges that outlive
    /// this call.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn check(
        self: &Arc<Self>,
        ledger: &Arc<Ledger>,
        set: Set,
        charges: &[Charge<'_>],
        asked: Instant,
        pending: impl Fn() -> Vec<Pending>,
    ) -> Answer {
        let turn = match self.lock().entry(set.id) {
            Entry::Vacant(vacant) if set.advance == 0 || !self.advances.is_spent(set.id, asked) => {
                vacant.insert(Flight::default());
                None
            }
            // One is in flight; or its prefetched units are used up: more are due, and this check goes with them.
            flight => {
                if self.waiting.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
                    self.waiting.fetch_sub(1, Ordering::Relaxed);
                    return Err(StoreError::Overloaded);
                }
                let (answer, turn) = oneshot::channel();
                let idle = matches!(flight, Entry::Vacant(_));
                let flight = flight.or_default();
                flight.waiting.push(Waiting { answer, since: asked, missed: 0 });
                self.serve(flight, idle, ledger, set, &pending);
                Some(turn)
            }
        };
        let Some(turn) = turn else {
            ledger.backend.count(Answered::Alone);
            // Dropped at the end, and also when the client leaves while its call is in flight.
            let _landing = Landing { coalescer: self, set: set.id };
            return ledger.backend.call(DecidedBy::Store, asked, Operation::Check, charges).await;
        };
        ledger.backend.count(Answered::Together);
        turn.await.unwrap_or(Err(StoreError::Overloaded))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Flight, RandomState>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a task make the calls for those that wait, if none does yet: at once if the set is `idle`, else when its call is answered.
    fn serve(
        self: &Arc<Self>,
        flight: &mut Flight,
        idle: bool,
        ledger: &Arc<Ledger>,
        set: Set,
        pending: &impl Fn() -> Vec<Pending>,
    ) {
        if flight.landed.is_some() {
            return;
        }
        let landed = flight.landed.insert(Arc::default()).clone();
        let (coalescer, pending) = (self.clone(), pending());
        let calls = Calls { coalescer, ledger: ledger.clone(), set, pending };
        // A separate task: a request that is cancelled does not cancel the others.
        ledger.spawn(async move {
            if !idle {
                let _ = timeout(calls.coalescer.timeout / SOON, landed.notified()).await;
            }
            Arc::new(calls).make().await;
        });
    }

    /// Take the checks that wait for the next call of a set; without any, the set is idle. Checks whose time is all but over are
    /// rejected: all that share a call wait no longer than the oldest of them.
    fn take(&self, set: u128, now: Instant) -> Vec<Waiting> {
        let mut flights = self.lock();
        let Entry::Occupied(mut flight) = flights.entry(set) else { return Vec::new() };
        let mut waiting = mem::take(&mut flight.get_mut().waiting);
        self.waiting.fetch_sub(waiting.len(), Ordering::Relaxed);
        waiting.retain(|one| !one.answer.is_closed());
        let most = self.timeout - self.timeout / 8;
        for late in waiting.extract_if(.., |one| now.saturating_duration_since(one.since) >= most) {
            let _ = late.answer.send(Err(StoreError::Overloaded));
        }
        if waiting.is_empty() {
            flight.remove();
        }
        waiting
    }
}

/// The end of the check that found its set idle.
struct Landing<'a> {
    coalescer: &'a Coalescer,
    set: u128,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(flight) = self.coalescer.lock().entry(self.set) {
            match &flight.get().landed {
                Some(landed) => landed.notify_one(),
                None => drop(flight.remove()),
            }
        }
    }
}

/// What the calls for a set are made of.
#[derive(Debug)]
struct Calls {
    coalescer: Arc<Coalescer>,
    ledger: Arc<Ledger>,
    set: Set,
    pending: Vec<Pending>,
}

impl Calls {
    /// Makes calls for all that wait, as long as any do.
    async fn make(self: Arc<Self>) {
        loop {
            let began = monotonic();
            for _ in 0..ROUNDS {
                yield_now().await;
                if since(began) > BUSY {
                    break;
                }
            }
            // What the worker did meanwhile is no delay of the store.
            let late = since(began).min(LATEST);
            let waiting = self.coalescer.take(self.set.id, monotonic() - late);
            let Some(oldest) = waiting.iter().map(|one| one.since + late).min() else { return };
            let calls = self.clone();
            let call = self.ledger.tasks.spawn(async move { calls.call(waiting, oldest).await });
            // The next ones leave with the answer, or beside a call that takes longer.
            let _ = timeout(self.coalescer.timeout / SOON, call).await;
        }
    }

    /// Asks for those that wait, the oldest since then.
    async fn call(self: Arc<Self>, waiting: Vec<Waiting>, oldest: Instant) {
        let answer = self.ask(waiting.len() as u64, oldest).await;
        let (left, unclaimed) = share_out(&answer, waiting);
        if let (Ok(verdict), 1..) = (&answer, unclaimed) {
            let refund = Operation::Refund { charged_at: verdict.now_us };
            let mut refunded = units(&self.pending, unclaimed);
            for (pending, outcome) in refunded.iter_mut().zip(&verdict.outcomes) {
                pending.debt_before_us = pending.plan.rule.debt_before_us(outcome, 0, verdict.granted);
            }
            let ledger = self.ledger.clone();
            // A separate task: the checks without an answer do not wait for the reply.
            self.ledger.spawn(async move {
                if let Err(error) = ledger.call(DecidedBy::Store, refund, &refunded).await {
                    debug!(%error, "units of requests that were abandoned may not have been given back");
                }
            });
        }
        if left.is_empty() {
            return;
        }
        let mut flights = self.coalescer.lock();
        let flight = flights.entry(self.set.id);
        let idle = matches!(flight, Entry::Vacant(_));
        let flight = flight.or_default();
        self.coalescer.waiting.fetch_add(left.len(), Ordering::Relaxed);
        flight.waiting.splice(..0, left);
        self.coalescer.serve(flight, idle, &self.ledger, self.set, &|| self.pending.clone());
    }

    /// Asks for so many units, and prefetches some if that is due.
    async fn ask(&self, waiting: u64, since: Instant) -> Answer {
        match self.coalescer.reserve(self.set, &self.pending) {
            Some(reservation) => self.prefetch(reservation, waiting, since).await,
            None => {
                let operation = if waiting == 1 { Operation::Check } else { Operation::Take };
                self.ledger.call_since(DecidedBy::Store, since, operation, &units(&self.pending, waiting)).await
            }
        }
    }
}

/// Gives the units of a call to the checks that came first. Return the checks without an answer, which ask again, and the number of
/// units of requests that were cancelled.
fn share_out(answer: &Answer, waiting: Vec<Waiting>) -> (Vec<Waiting>, u64) {
    let granted = answer.as_ref().map_or(0, |verdict| verdict.granted) as usize;
    let (mut waiting, mut unclaimed) = (waiting.into_iter(), 0);
    for (index, one) in waiting.by_ref().take(granted).enumerate() {
        let answer = answer.clone().map(|mut verdict| {
            verdict.granted = 1;
            verdict.charged_after += (granted - 1 - index) as u64;
            for outcome in &mut verdict.outcomes {
                // As it was before the units behind were taken.
                outcome.remaining += (granted - 1 - index) as u64;
            }
            verdict
        });
        unclaimed += u64::from(one.answer.send(answer).is_err());
    }
    if granted == 0 {
        // Nothing was left, and the answer says when something will be; or there is none.
        for one in waiting.by_ref() {
            let _ = one.answer.send(answer.clone());
        }
    }
    let mut left: Vec<_> = waiting.map(|one| Waiting { missed: one.missed + 1, ..one }).collect();
    if let Ok(verdict) = answer {
        for one in left.extract_if(.., |one| one.missed >= MOST_MISSED) {
            let _ = one.answer.send(Ok(used_up(verdict)));
        }
    }
    (left, unclaimed)
}

/// The denial by limits that have nothing left.
fn used_up(verdict: &Verdict) -> Verdict {
    let mut denial = Verdict { granted: 0, ..verdict.clone() };
    for outcome in denial.outcomes.iter_mut().filter(|outcome| outcome.remaining == 0) {
        // When a unit comes back is not known.
        outcome.status = Status::Busy;
    }
    denial
}
