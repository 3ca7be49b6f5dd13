//! Decisions of the JSON API that a program settles or releases later: their permits, reservations and deferred charges.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Response;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use uuid::Uuid;

use crate::http::body::Body;
use crate::limiter::decision::Decision;
use crate::limiter::settlement::{ConcurrencyPermits, Deferred, DeferredCharges, SettleAction, SettleFuture};
use crate::limiter::spec::LimitSpec;
use crate::proxy::holdings::settle_action;
use crate::snapshot::routes::Route;
use crate::upstream::error::UpstreamError;

/// Maximum number of held decisions in this process.
const MAX_HELD: usize = 100_000;

/// The held decisions of all workers, by their ids.
#[derive(Debug, Default)]
pub struct HeldDecisions {
    entries: Mutex<HashMap<Uuid, Entry>>,
}

#[derive(Debug)]
struct Entry {
    decision: HeldDecision,
    /// Index of the worker whose limiter has made the decision.
    worker: usize,
    /// Removes the entry when its time is over.
    timer: AbortHandle,
}

/// What a decision holds until it is settled. If it is dropped, the permits are released, deferred costs are charged as
/// far as they are known, and reservations stay charged.
#[derive(Debug)]
pub(super) struct HeldDecision {
    limits: HeldLimits,
    permits: Option<Box<ConcurrencyPermits>>,
    charges: Option<Box<DeferredCharges>>,
}

/// The limits of a decision, by their indices.
#[derive(Debug)]
pub(super) enum HeldLimits {
    /// The limits of a route.
    Route(Arc<Route>),
    /// Limits that the program has named.
    Named(Vec<Arc<LimitSpec>>),
}

impl HeldLimits {
    fn name(&self, index: usize) -> &str {
        match self {
            HeldLimits::Route(route) => &route.rate_limits.limits[index].limit.name,
            HeldLimits::Named(limits) => &limits[index].name,
        }
    }
}

impl HeldDecision {
    /// Take what an admitted request holds out of its decision. Return `None` if it holds nothing.
    pub(super) fn take(decision: &mut Decision<'_>, limits: HeldLimits) -> Option<Self> {
        let permits = decision.permits.take();
        let charges = decision.deferred_charges.take();
        (permits.is_some() || charges.is_some()).then_some(HeldDecision { limits, permits, charges })
    }

    /// Make the charges and refunds that the response to the client determines, and release the permits. `costs` are the
    /// actual costs that the program knows, by the names of the limits.
    pub(super) fn settle(
        self,
        response: Response<Body>,
        costs: &BTreeMap<String, u64>,
    ) -> impl Future<Output = ()> + use<> {
        let HeldDecision { limits, permits, charges } = self;
        drop(permits);
        let response: Result<_, UpstreamError> = Ok(Box::new(response));
        let action = |index: usize, deferred| match (costs.get(limits.name(index)), deferred) {
            (Some(cost), Deferred::Charge) => SettleAction::Charge(*cost),
            (Some(cost), Deferred::Settle) => SettleAction::Settle(*cost),
            (Some(_) | None, _) => match &limits {
                HeldLimits::Route(route) => settle_action(&route.rate_limits.limits[index], deferred, &response),
                HeldLimits::Named(_) => SettleAction::Nothing,
            },
        };
        complete(charges.and_then(|charges| charges.settle(action)))
    }

    /// Undo the decision: refund the charges that can be refunded, make no deferred charges, and release the permits.
    pub(super) fn release(self) -> impl Future<Output = ()> + use<> {
        let HeldDecision { permits, charges, .. } = self;
        drop(permits);
        let action = |_, deferred: Deferred| match deferred.is_refundable() {
            true => SettleAction::Refund,
            false => SettleAction::Nothing,
        };
        complete(charges.and_then(|charges| charges.settle(action)))
    }
}

async fn complete(settlement: Option<SettleFuture>) {
    if let Some(settlement) = settlement {
        // The limiter retries what the store has not executed, and counts what is lost.
        let _ = settlement.await;
    }
}

impl HeldDecisions {
    /// Return whether this process may hold `count` more decisions.
    pub(super) fn has_room(&self, count: usize) -> bool {
        self.with(|entries| entries.len() + count <= MAX_HELD)
    }

    /// Return the number of held decisions.
    pub fn count(&self) -> usize {
        self.with(|entries| entries.len())
    }

    /// Hold a decision until it is taken, at most for this time. Return its id.
    pub(super) fn hold(self: &Arc<Self>, decision: HeldDecision, worker: usize, time: Duration) -> Uuid {
        let id = Uuid::new_v4();
        let held = self.clone();
        let timer = tokio::spawn(async move {
            sleep(time).await;
            drop(held.take(id));
        });
        let timer = timer.abort_handle();
        self.with(|entries| entries.insert(id, Entry { decision, worker, timer }));
        id
    }

    /// Return the first of these costs whose name is not that of exactly one limit whose cost can still be settled.
    pub(super) fn unknown_cost<'c>(&self, id: Uuid, costs: &'c BTreeMap<String, u64>) -> Option<&'c str> {
        self.with(|entries| {
            let HeldDecision { limits, charges, .. } = &entries.get(&id)?.decision;
            let settled = || charges.iter().flat_map(|charges| charges.settled_later());
            let count = |name: &str| settled().filter(|index| limits.name(*index) == name).count();
            costs.keys().map(String::as_str).find(|name| count(name) != 1)
        })
    }

    /// Take a decision, so that it is settled or released once.
    pub(super) fn take(&self, id: Uuid) -> Option<HeldDecision> {
        let Entry { decision, timer, .. } = self.with(|entries| entries.remove(&id))?;
        timer.abort();
        Some(decision)
    }

    /// Drop the decisions of a worker that ends.
    pub(super) fn drop_of(&self, worker: usize) {
        let ended: Vec<_> = self.with(|entries| entries.extract_if(|_, entry| entry.worker == worker).collect());
        ended.iter().for_each(|(_, entry)| entry.timer.abort());
    }

    fn with<T>(&self, access: impl FnOnce(&mut HashMap<Uuid, Entry>) -> T) -> T {
        access(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
