//! Where the counters of one worker live, and who decided.

use std::sync::Arc;

use redis::{Cmd, Value};
use tokio::time::Duration;

use super::clock::{Clock, monotonic};
use super::cluster::topology::Topology;
use super::cluster::{self, Cluster};
use super::guard::{Breaker, Guard};
use super::memory::MemoryStore;
use super::redis::{RedisSettings, RedisStore, Servers};
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
#[derive(Debug, Clone)]
pub enum Shared {
    /// One server keeps all.
    One(Guard),
    /// The masters of a cluster share the identities.
    Cluster(Cluster),
}

impl Shared {
    /// What these servers keep. Make one for each runtime, within it: connections live on the one that made them. All of a
    /// process share what is known of who fails.
    pub fn new(
        (servers, settings): &(Servers, RedisSettings),
        breaker: Arc<Breaker>,
        topology: Arc<Topology>,
        tallies: Arc<Tallies>,
    ) -> Self {
        match servers.clone() {
            Servers::One(server) => {
                Shared::One(Guard::new(RedisStore::new(settings, server, Clock::Store, tallies), breaker))
            }
            Servers::Cluster { seeds, login } => {
                Shared::Cluster(Cluster::new(settings.clone(), seeds, login, topology, tallies))
            }
        }
    }

    /// Connects, so that the first request finds connections.
    pub fn warm_up(&self) {
        match self {
            Shared::One(guard) => guard.warm_up(),
            Shared::Cluster(cluster) => cluster.warm_up(),
        }
    }

    /// Decides; see [`Store::call`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        match self {
            Shared::One(store) => store.call(operation, charges).await,
            // On the heap: the others should not have to carry its size.
            Shared::Cluster(store) => Box::pin(store.call(operation, charges)).await,
        }
    }

    /// Sends an operator's command about keys of one slot; see [`Guard::aside`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn aside(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            Shared::One(guard) => guard.aside(guard.deadline(), false, command).await,
            Shared::Cluster(cluster) => Box::pin(cluster.aside(slot, command)).await,
        }
    }

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
        // On the heap: checks that stay in this process should not have to carry its size.
        let answer = Box::pin(store.call(operation, charges)).await;
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
