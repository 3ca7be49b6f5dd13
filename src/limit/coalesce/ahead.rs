//! Taking ahead: the calls that get an advance for a hot set, and those that give back what nobody has used of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::time::timeout;
use tracing::debug;

use super::{Answer, Coalescer, Set};
use crate::limit::admission::{Ledger, Pending};
use crate::limit::advance::Reservation;
use crate::limit::backend::Source;
use crate::limit::clock::monotonic;
use crate::limit::store::{Operation, Verdict};

impl Coalescer {
    /// A unit of each state of the set that was taken ahead: the verdict, and when the unit was charged, µs.
    pub fn draw(&self, set: Set) -> Option<(Verdict, u64)> {
        // Most limits have no advance: their requests meet neither lock nor clock.
        if set.advance == 0 { None } else { self.advances.draw(set.id, monotonic()) }
    }

    /// Gives back what this worker has taken ahead, in tasks of the ledger.
    pub fn end(&self) {
        self.ending.cancel();
    }

    pub(super) fn reserve(&self, set: Set) -> Option<Reservation> {
        if set.advance == 0 { None } else { self.advances.reserve(set.id) }
    }

    /// Asks for the units of those who wait and an advance, and keeps what is not theirs.
    pub(super) async fn take_ahead(
        &self,
        ledger: &Arc<Ledger>,
        reservation: Reservation,
        pending: &mut [Pending],
        waiting: u64,
        set: Set,
    ) -> Answer {
        let asked = monotonic();
        let answer = ledger.call(Source::Store, Operation::Take, units(pending, waiting + set.advance)).await;
        let decided = monotonic();
        self.slow.store(decided - asked > self.deadline / 4, Ordering::Relaxed);
        let verdict = answer?;
        if verdict.granted > waiting {
            let rules = pending.iter().map(|pending| &pending.plan.rule);
            if reservation.keep(verdict.granted - waiting, verdict.clone(), rules, asked, decided) {
                self.watch(ledger, set.id, pending.to_vec());
            }
        }
        Ok(verdict)
    }

    /// Sees to the end of an advance: what nobody has used is given back.
    fn watch(&self, ledger: &Arc<Ledger>, set: u128, mut pending: Vec<Pending>) {
        let (book, advances, ending) = (ledger.clone(), self.advances.clone(), self.ending.clone());
        ledger.spawn(async move {
            let unused = loop {
                match advances.end(set, monotonic()) {
                    Ok(unused) => break unused,
                    Err(lasts) => {
                        if timeout(lasts, ending.cancelled()).await.is_ok() {
                            break advances.break_off(set);
                        }
                    }
                }
            };
            if unused.units == 0 {
                return;
            }
            let refund = Operation::Refund { charged_at: unused.charged_at };
            if let Err(error) = book.call(Source::Store, refund, units(&mut pending, unused.units)).await {
                debug!(%error, "units that were taken ahead may not have been given back");
            }
        });
    }
}

/// The same charges, of so many units.
pub(super) fn units(pending: &mut [Pending], units: u64) -> &[Pending] {
    for pending in &mut *pending {
        pending.units = units;
    }
    pending
}
