//! Where the counters of one worker live, and who decided.

use std::sync::Arc;

use tokio::time::Duration;

use super::clock::monotonic;
use super::cluster::{self, Cluster};
use super::guard::Guard;
use super::memory::MemoryStore;
use super::store::{Charge, Operation, Store, StoreError, Verdict};
use super::tallies::{Answered, Tallies};

/// Where the counters of this worker live.
#[derive(Debug)]
pub enum Backend {
    /// In this process.
    Memory(Arc<MemoryStore>),
    /// In Redis, with this process' counters for the time when it fails.
    Redis {
        /// The store.
        store: Shared,
        /// The local shares.
        fallback: Arc<MemoryStore>,
        /// What was asked, and what came of it.
        tallies: Arc<Tallies>,
    },
}

/// One Redis, or many.
#[derive(Debug)]
pub enum Shared {
    /// One server keeps all.
    One(Guard),
    /// The masters of a cluster share the identities.
    Cluster(Cluster),
}

impl Shared {
    /// Bound of a call.
    pub fn deadline(&self) -> Duration {
        match self {
            Shared::One(guard) => guard.deadline(),
            Shared::Cluster(cluster) => cluster.deadline(),
        }
    }
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The store, for all gateways.
    Store,
    /// This gateway alone, because the store could not answer.
    Local,
}

impl Source {
    /// One word for logs.
    pub fn word(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::Local => "local",
        }
    }
}

impl Backend {
    /// Asks the store, or the counters that stand in for it.
    ///
    /// # Errors
    /// See [`StoreError`]; what is local does not fail.
    pub async fn call(
        &self,
        source: Source,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let (store, tallies) = match (self, source) {
            (Backend::Memory(memory) | Backend::Redis { fallback: memory, .. }, Source::Local)
            | (Backend::Memory(memory), Source::Store) => return Ok(memory.decide(operation, charges)),
            (Backend::Redis { store, tallies, .. }, Source::Store) => (store, tallies),
        };
        let asked = monotonic();
        let answer = match store {
            Shared::One(store) => store.call(operation, charges).await,
            // On the heap: the others should not have to carry its size.
            Shared::Cluster(store) => Box::pin(store.call(operation, charges)).await,
        };
        match &answer {
            Ok(_) => tallies.round_trips.note(asked.elapsed()),
            Err(StoreError::Open | StoreError::Full) => tallies.failures.count(1),
            Err(_) => tallies.failures.count(0),
        }
        answer
    }

    /// Notes who answered a check.
    pub fn count(&self, answered: Answered) {
        if let Backend::Redis { tallies, .. } = self {
            tallies.checks.count(answered as usize);
        }
    }

    /// Whether these charges are decided by one call.
    pub fn is_one_call(&self, charges: &[Charge<'_>]) -> bool {
        match self {
            Backend::Memory(_) | Backend::Redis { store: Shared::One(_), .. } => true,
            Backend::Redis { store: Shared::Cluster(_), .. } => cluster::is_one_call(charges),
        }
    }
}
