//! Prefetching: the calls that take units of a hot set in advance, and those that give back unused units.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout;
use tracing::debug;

use super::{Answer, Calls, Coalescer, Set};
use crate::limit::admission::{Ledger, Pending};
use crate::limit::advance::Reservation;
use crate::limit::backend::DecidedBy;
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

    pub(super) fn reserve(&self, set: Set, pending: &[Pending]) -> Option<Reservation> {
        if set.advance == 0 {
            return None;
        }
        self.advances.reserve(set.id, pending.iter().map(|pending| (pending.key().local(), pending.advance)))
    }
}

impl Calls {
    /// Asks for the units of those that wait and for those of a reservation, and keeps what is not theirs.
    pub(super) async fn prefetch(&self, reservation: Reservation, waiting: u64, since: Instant) -> Answer {
        let asked = monotonic();
        let all = units(&self.pending, waiting + reservation.units());
        let verdict = self.ledger.call_since(DecidedBy::Store, since, Operation::Take, &all).await?;
        if verdict.granted > waiting {
            let rules = self.pending.iter().map(|pending| &pending.plan.rule);
            if reservation.keep(verdict.granted - waiting, verdict.clone(), rules, asked, monotonic()) {
                self.coalescer.watch(&self.ledger, self.set.id, self.pending.clone());
            }
        }
        Ok(verdict)
    }
}

impl Coalescer {
    /// Gives back prefetched units that are not used within their time.
    fn watch(&self, ledger: &Arc<Ledger>, set: u128, pending: Vec<Pending>) {
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
            let mut refunded = units(&pending, unused.units);
            for (pending, outcome) in refunded.iter_mut().zip(&unused.outcomes) {
                pending.debt_before_us = pending.plan.rule.debt_before_us(outcome, 0, unused.units);
            }
            if let Err(error) = book.deliver(DecidedBy::Store, refund, refunded).await {
                debug!(%error, "units that were taken ahead may not have been given back");
            }
        });
    }
}

/// The same charges, of so many units.
pub(super) fn units(pending: &[Pending], units: u64) -> Vec<Pending> {
    pending.iter().map(|pending| Pending { units, ..pending.clone() }).collect()
}
