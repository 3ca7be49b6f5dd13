//! What is known of a cluster, shared by all workers of a process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use tokio::time::{Duration, sleep};

use crate::limit::guard::{CircuitBreaker, RecoverySignal};
use crate::limit::redis::server::Address;
use crate::limit::redis::slots::SlotMap;
use crate::limit::store::StoreError;

/// The slots are asked for no more often than this.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(250);

/// Who keeps what, and who fails.
#[derive(Debug, Default)]
pub struct ClusterMap {
    slots: ArcSwapOption<SlotMap>,
    /// Held by the one who finds out the slots for the first time.
    discovery_lock: tokio::sync::Mutex<()>,
    /// Whether somebody is asking for them again, or did so just now.
    is_refreshing: AtomicBool,
    /// How often the slots were asked for.
    refreshes: AtomicUsize,
    breakers: Mutex<HashMap<Address, Arc<CircuitBreaker>>>,
    /// How often those of nodes that have left have opened.
    departed_open_count: AtomicU64,
    /// Told each time that a node answers again.
    recovery: Arc<RecoverySignal>,
}

/// The right to ask for the slots.
#[derive(Debug)]
pub struct RefreshPermit(Arc<ClusterMap>);

impl ClusterMap {
    /// Who keeps what, if that is known yet.
    pub fn slots(&self) -> Option<Arc<SlotMap>> {
        self.slots.load_full()
    }

    /// The same, found out first if it must be; whoever comes meanwhile waits.
    ///
    /// # Errors
    /// Those of `discover`.
    pub async fn slots_or_discover<F: Future<Output = Result<SlotMap, StoreError>>>(
        &self,
        discover: impl FnOnce() -> F,
    ) -> Result<Arc<SlotMap>, StoreError> {
        let _lock = self.discovery_lock.lock().await;
        if let Some(slots) = self.slots() {
            return Ok(slots);
        }
        let slots = Arc::new(discover().await?);
        self.slots.store(Some(slots.clone()));
        Ok(slots)
    }

    /// The nodes that are given up.
    pub fn open_nodes(&self) -> Vec<String> {
        let open =
            |(address, breaker): (&Address, &Arc<CircuitBreaker>)| breaker.is_open().then(|| address.to_string());
        self.breakers().iter().filter_map(open).collect()
    }

    /// How often a node was given up.
    pub fn open_count(&self) -> u64 {
        self.departed_open_count.load(Ordering::Relaxed)
            + self.breakers().values().map(|breaker| breaker.open_count()).sum::<u64>()
    }

    /// Takes over newer knowledge. Nodes that left the cluster are forgotten.
    pub fn replace(&self, slots: SlotMap) {
        self.breakers().retain(|address, breaker| {
            let stays = slots.nodes().contains(address);
            if !stays {
                self.departed_open_count.fetch_add(breaker.open_count(), Ordering::Relaxed);
            }
            stays
        });
        self.slots.store(Some(Arc::new(slots)));
    }

    /// The breaker of a node.
    pub fn breaker(&self, address: &Address) -> Arc<CircuitBreaker> {
        let new = || Arc::new(CircuitBreaker::new(self.recovery.clone()));
        self.breakers().entry(address.clone()).or_insert_with(new).clone()
    }

    /// Told each time that a node answers again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        &self.recovery
    }

    /// A number that each search for the slots has to itself: it begins at another master than the last one.
    pub fn next_refresh_number(&self) -> usize {
        self.refreshes.fetch_add(1, Ordering::Relaxed)
    }

    /// The right to ask for the slots again, unless somebody has it.
    pub fn try_refresh(self: &Arc<Self>) -> Option<RefreshPermit> {
        (!self.is_refreshing.swap(true, Ordering::AcqRel)).then(|| RefreshPermit(self.clone()))
    }

    fn breakers(&self) -> std::sync::MutexGuard<'_, HashMap<Address, Arc<CircuitBreaker>>> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RefreshPermit {
    /// Gives the right away, after a pause.
    pub async fn release(self) {
        sleep(MIN_REFRESH_INTERVAL).await;
    }
}

impl Drop for RefreshPermit {
    fn drop(&mut self) {
        self.0.is_refreshing.store(false, Ordering::Release);
    }
}
