//! Prefetching: the calls that take units of a hot set in advance, and those that give back unused units.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout;
use tracing::debug;

use super::{CheckGroup, CheckResult, FlightTask, Singleflight};
use crate::limit::admission::{OwnedCharge, StoreHandle};
use crate::limit::advance::PrefetchReservation;
use crate::limit::backend::DecidedBy;
use crate::limit::clock::monotonic;
use crate::limit::store::{Operation, Verdict};

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

    pub(super) fn reserve(&self, group: CheckGroup, charges: &[OwnedCharge]) -> Option<PrefetchReservation> {
        if group.prefetch == 0 {
            return None;
        }
        self.prefetch_pool
            .reserve(group.id, charges.iter().map(|pending| (pending.key().local_hash(), pending.prefetch)))
    }
}

impl FlightTask {
    /// Asks for the units of those that wait and for those of a reservation, and keeps what is not theirs.
    pub(super) async fn prefetch(
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
pub(super) fn with_cost(charges: &[OwnedCharge], cost: u64) -> Vec<OwnedCharge> {
    charges.iter().map(|pending| OwnedCharge { cost_or_permit_id: cost, ..pending.clone() }).collect()
}
