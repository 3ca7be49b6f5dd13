//! What is known of a cluster, shared by all workers of a process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use tokio::time::{Duration, sleep};

use crate::limit::guard::{Breaker, Recovery};
use crate::limit::redis::server::Address;
use crate::limit::redis::slots::Slots;
use crate::limit::store::StoreError;

/// The slots are asked for no more often than this.
const PAUSE: Duration = Duration::from_millis(250);

/// Who keeps what, and who fails.
#[derive(Debug, Default)]
pub struct Topology {
    slots: ArcSwapOption<Slots>,
    /// Held by the one who finds out the slots for the first time.
    discovery: tokio::sync::Mutex<()>,
    /// Whether somebody is asking for them again, or did so just now.
    looking: AtomicBool,
    /// How often the slots were asked for.
    turns: AtomicUsize,
    breakers: Mutex<HashMap<Address, Arc<Breaker>>>,
    /// How often those of nodes that have left have opened.
    gone: AtomicU64,
    /// Told each time that a node answers again.
    recovery: Arc<Recovery>,
}

/// The right to ask for the slots.
#[derive(Debug)]
pub struct Turn(Arc<Topology>);

impl Topology {
    /// Who keeps what, if that is known yet.
    pub fn slots(&self) -> Option<Arc<Slots>> {
        self.slots.load_full()
    }

    /// The same, found out first if it must be; whoever comes meanwhile waits.
    ///
    /// # Errors
    /// Those of `discover`.
    pub async fn discovered_by<F: Future<Output = Result<Slots, StoreError>>>(
        &self,
        discover: impl FnOnce() -> F,
    ) -> Result<Arc<Slots>, StoreError> {
        let _one = self.discovery.lock().await;
        if let Some(slots) = self.slots() {
            return Ok(slots);
        }
        let slots = Arc::new(discover().await?);
        self.slots.store(Some(slots.clone()));
        Ok(slots)
    }

    /// The nodes that are given up.
    pub fn failing(&self) -> Vec<String> {
        let open = |(address, breaker): (&Address, &Arc<Breaker>)| breaker.is_open().then(|| address.to_string());
        self.breakers().iter().filter_map(open).collect()
    }

    /// How often a node was given up.
    pub fn openings(&self) -> u64 {
        self.gone.load(Ordering::Relaxed) + self.breakers().values().map(|breaker| breaker.openings()).sum::<u64>()
    }

    /// Takes over newer knowledge. Nodes that left the cluster are forgotten.
    pub fn replace(&self, slots: Slots) {
        self.breakers().retain(|address, breaker| {
            let stays = slots.nodes().contains(address);
            if !stays {
                self.gone.fetch_add(breaker.openings(), Ordering::Relaxed);
            }
            stays
        });
        self.slots.store(Some(Arc::new(slots)));
    }

    /// The breaker of a node.
    pub fn breaker(&self, address: &Address) -> Arc<Breaker> {
        let new = || Arc::new(Breaker::new(self.recovery.clone()));
        self.breakers().entry(address.clone()).or_insert_with(new).clone()
    }

    /// Told each time that a node answers again after an outage.
    pub fn recovery(&self) -> &Arc<Recovery> {
        &self.recovery
    }

    /// A number that each search for the slots has to itself: it begins at another master than the last one.
    pub fn next_turn(&self) -> usize {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    /// The right to ask for the slots again, unless somebody has it.
    pub fn turn(self: &Arc<Self>) -> Option<Turn> {
        (!self.looking.swap(true, Ordering::AcqRel)).then(|| Turn(self.clone()))
    }

    fn breakers(&self) -> std::sync::MutexGuard<'_, HashMap<Address, Arc<Breaker>>> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Gives the right away, after a pause.
    pub async fn over(self) {
        sleep(PAUSE).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.looking.store(false, Ordering::Release);
    }
}
