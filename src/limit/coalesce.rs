//! Coalescing: while a check of a set of states is under way, further checks of the very same set wait, and the next call
//! takes units for all of them. A hot key costs one call for each round trip, whatever its traffic. Where its limits allow, that
//! call takes an advance as well, and the checks after it cost none.

mod ahead;

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::mem;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Duration, timeout_at};
use tokio_util::sync::CancellationToken;

use super::admission::{Ledger, Pending};
use super::advance::Advances;
use super::backend::Source;
use super::store::{Charge, Operation, StoreError, Verdict};
use super::tallies::Answered;
use ahead::units;

/// Those who wait for a hot key let the worker go round so often before their call leaves with all who have come. With nothing else
/// to do it is through at once; a busy one makes fewer calls, each of which takes Redis and the gateway as much as a request.
const ROUNDS: usize = 4;

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
}

/// The checks of one worker that are under way.
#[derive(Debug)]
pub struct Coalescer {
    /// For each set of states the checks that wait for the one under way.
    flights: Mutex<HashMap<u128, Vec<Waiting>, RandomState>>,
    /// Nobody waits longer for a verdict.
    deadline: Duration,
    /// Whether the last call took so long that waiting for it and for one more may exceed the deadline.
    slow: AtomicBool,
    /// What is taken ahead, by all workers of the process.
    advances: Arc<Advances>,
    /// Nothing more is needed.
    ending: CancellationToken,
}

impl Coalescer {
    /// Without checks under way.
    pub fn new(deadline: Duration, advances: Arc<Advances>) -> Self {
        let (flights, slow, ending) = Default::default();
        Coalescer { flights, deadline, slow, advances, ending }
    }

    /// Checks one unit of each of `charges`, alone or together with others of the same `set`; the verdict is the one that
    /// it would have got alone, but for the reset, which is that of all. It is `asked` now. `pending` makes the charges that outlive this call.
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
            Entry::Vacant(vacant) if set.advance > 0 && self.advances.is_spent(set.id, asked) => {
                // Still hot: the next advance is due, and this check goes with it.
                let (answer, turn) = oneshot::channel();
                vacant.insert(vec![Waiting { answer, since: asked }]);
                let (coalescer, book, pending) = (self.clone(), ledger.clone(), pending());
                ledger.spawn(async move { coalescer.serve(&book, set, pending).await });
                Turn::Behind(turn)
            }
            Entry::Vacant(vacant) => {
                vacant.insert(Vec::new());
                Turn::First
            }
            Entry::Occupied(_) if self.slow.load(Ordering::Relaxed) => Turn::Alone,
            Entry::Occupied(mut waiting) => {
                let (answer, turn) = oneshot::channel();
                waiting.get_mut().push(Waiting { answer, since: asked });
                Turn::Behind(turn)
            }
        };
        ledger.backend.count(match turn {
            Turn::First | Turn::Alone => Answered::Alone,
            Turn::Behind(_) => Answered::Together,
        });
        match turn {
            Turn::First => {}
            // In the pipe, beside the one under way.
            Turn::Alone => {
                if let Some(reservation) = self.reserve(set) {
                    let (coalescer, book, mut pending) = (self.clone(), ledger.clone(), pending());
                    ledger.spawn(
                        async move { drop(coalescer.take_ahead(&book, reservation, &mut pending, 0, set).await) },
                    );
                }
                return ledger.backend.call(Source::Store, Operation::Check, charges).await;
            }
            Turn::Behind(turn) => return turn.await.unwrap_or(Err(StoreError::Timeout)),
        }
        // Dropped at the end, and also when the client leaves while its call is under way.
        let _landing = Landing { coalescer: self, ledger, set, pending };
        let answer = ledger.backend.call(Source::Store, Operation::Check, charges).await;
        self.slow.store(asked.elapsed() > self.deadline / 4, Ordering::Relaxed);
        answer
    }

    /// Those who wait for the set; when nobody does, it is no longer under way.
    fn take(&self, set: u128) -> Vec<Waiting> {
        let mut flights = self.lock();
        let Entry::Occupied(mut waiting) = flights.entry(set) else { return Vec::new() };
        waiting.get_mut().retain(|waiting| !waiting.answer.is_closed());
        if waiting.get().is_empty() { waiting.remove() } else { mem::take(waiting.get_mut()) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Vec<Waiting>, RandomState>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for all who wait, as long as somebody does.
    async fn serve(&self, ledger: &Arc<Ledger>, set: Set, mut pending: Vec<Pending>) {
        // In the order of their arrival; those whom a call left without an answer come first in the next.
        let mut waiting = Vec::new();
        loop {
            waiting.retain(|waiting: &Waiting| !waiting.answer.is_closed());
            if waiting.is_empty() {
                for _ in 0..ROUNDS {
                    yield_now().await;
                }
                waiting = self.take(set.id);
            }
            let Some(first) = waiting.first() else { return };
            let due = first.since + self.deadline;
            let mut call = pin!(self.ask(ledger, set, &mut pending, waiting.len() as u64));
            if let Ok(answer) = timeout_at(due.into(), call.as_mut()).await {
                waiting = share_out(&answer, waiting);
            } else {
                share_out(&Err(StoreError::Timeout), mem::take(&mut waiting));
                // Not dropped: that it fails is to be counted.
                let _ = call.await;
            }
        }
    }

    /// Asks for so many units, and an advance if one is due.
    async fn ask(&self, ledger: &Arc<Ledger>, set: Set, pending: &mut [Pending], waiting: u64) -> Answer {
        match self.reserve(set) {
            Some(reservation) => self.take_ahead(ledger, reservation, pending, waiting, set).await,
            None => {
                let operation = if waiting == 1 { Operation::Check } else { Operation::Take };
                ledger.call(Source::Store, operation, units(pending, waiting)).await
            }
        }
    }
}

/// Gives the units of a call to those who came first; whoever is left without an answer asks again.
fn share_out(answer: &Answer, waiting: Vec<Waiting>) -> Vec<Waiting> {
    let granted = answer.as_ref().map_or(0, |verdict| verdict.granted) as usize;
    let mut waiting = waiting.into_iter();
    for (index, one) in waiting.by_ref().take(granted).enumerate() {
        let answer = answer.clone().map(|mut verdict| {
            verdict.granted = 1;
            for outcome in &mut verdict.outcomes {
                // As it was before the units behind were taken.
                outcome.remaining += (granted - 1 - index) as u64;
            }
            verdict
        });
        // Who has gone by now was charged and not forwarded, as with a call of its own.
        let _ = one.answer.send(answer);
    }
    if granted == 0 {
        // Nothing was left, and the answer says when something will be; or there is none.
        for one in waiting.by_ref() {
            let _ = one.answer.send(answer.clone());
        }
    }
    waiting.collect()
}

/// How a check is made.
enum Turn {
    /// None of its set is under way.
    First,
    /// One is, but waiting for it would take too long.
    Alone,
    /// With the others that wait for the one under way.
    Behind(oneshot::Receiver<Answer>),
}

/// The end of a check that others may be waiting for.
struct Landing<'a, P: Fn() -> Vec<Pending>> {
    coalescer: &'a Arc<Coalescer>,
    ledger: &'a Arc<Ledger>,
    set: Set,
    pending: P,
}

impl<P: Fn() -> Vec<Pending>> Drop for Landing<'_, P> {
    fn drop(&mut self) {
        let nobody = match self.coalescer.lock().entry(self.set.id) {
            Entry::Occupied(waiting) if waiting.get().is_empty() => {
                waiting.remove();
                true
            }
            Entry::Occupied(_) | Entry::Vacant(_) => false,
        };
        if nobody {
            return;
        }
        let (coalescer, ledger, set, pending) =
            (self.coalescer.clone(), self.ledger.clone(), self.set, (self.pending)());
        // A task of its own: no client that leaves takes the others with it.
        self.ledger.spawn(async move { coalescer.serve(&ledger, set, pending).await });
    }
}
