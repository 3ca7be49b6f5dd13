//! Where the counters of one worker live, and who decided.

use std::sync::Arc;
use std::time::Instant;

use redis::{Cmd, Value};
use tokio::time::{Duration, sleep, timeout};

use super::clock::{self, monotonic};
use super::cluster::topology::Topology;
use super::cluster::{self, Cluster};
use super::guard::{Breaker, Guard, Recovery};
use super::memory::MemoryStore;
use super::redis::{RedisSettings, RedisStore, Servers};
use super::store::{Charge, Operation, StoreError, Verdict};
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
            Servers::One(server) => Shared::One(Guard::new(RedisStore::new(settings, server, tallies), breaker)),
            Servers::Cluster { seeds, login } => {
                Shared::Cluster(Cluster::new(settings.clone(), seeds, login, topology, tallies))
            }
        }
    }

    /// Connects, so that the first request finds connections.
    pub async fn connect(&self) {
        match self {
            Shared::One(guard) => guard.connect().await,
            Shared::Cluster(cluster) => cluster.connect().await,
        }
    }

    /// Told each time that a server answers again after an outage.
    pub fn recovery(&self) -> &Arc<Recovery> {
        match self {
            Shared::One(guard) => guard.recovery(),
            Shared::Cluster(cluster) => cluster.recovery(),
        }
    }

    /// Decides by `due`; see [`Store::call`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn ask(&self, due: Instant, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        match self {
            Shared::One(store) => store.ask(due, false, operation, charges).await,
            // On the heap: the others should not have to carry its size.
            Shared::Cluster(store) => Box::pin(store.ask(due, operation, charges)).await,
        }
    }

    /// The same within the timeout.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.ask(monotonic() + self.timeout(), operation, charges).await
    }

    /// Sends an operator's command about keys of one slot; see [`Guard::aside`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn aside(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            Shared::One(guard) => guard.aside(guard.timeout(), false, command).await,
            Shared::Cluster(cluster) => Box::pin(cluster.aside(slot, command)).await,
        }
    }

    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        match self {
            Shared::One(guard) => guard.timeout(),
            Shared::Cluster(cluster) => cluster.timeout(),
        }
    }
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecidedBy {
    /// The store, for all gateways.
    Store,
    /// This gateway alone, because the store could not answer.
    Local,
}

impl DecidedBy {
    /// One word for logs.
    pub fn word(self) -> &'static str {
        match self {
            DecidedBy::Store => "store",
            DecidedBy::Local => "local",
        }
    }
}

impl Backend {
    /// Asks the store, or the counters that stand in for it. The time of the store counts from `since`.
    ///
    /// # Errors
    /// See [`StoreError`]; what is local does not fail.
    pub async fn call(
        &self,
        source: DecidedBy,
        since: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let (store, tallies) = match (self, source) {
            (Backend::Memory(memory) | Backend::Redis { fallback: memory, .. }, DecidedBy::Local)
            | (Backend::Memory(memory), DecidedBy::Store) => return Ok(memory.decide(operation, charges)),
            (Backend::Redis { store, tallies, .. }, DecidedBy::Store) => (store, tallies),
        };
        // On the heap: checks that stay in this process should not have to carry its size.
        let answer = Box::pin(store.ask(since + store.timeout(), operation, charges)).await;
        match &answer {
            Ok(_) => tallies.round_trips.observe(clock::since(since)),
            Err(StoreError::Open | StoreError::Overloaded) => tallies.failures.increment(1),
            Err(_) => tallies.failures.increment(0),
        }
        answer
    }

    /// Returns after this time, or before that when the store answers again after an outage.
    pub async fn recovery_within(&self, time: Duration) {
        match self {
            Backend::Memory(_) => sleep(time).await,
            Backend::Redis { store, .. } => drop(timeout(time, store.recovery().next()).await),
        }
    }

    /// Whether the store answered again within this time after an outage.
    pub fn has_recovered_within(&self, time: Duration) -> bool {
        match self {
            Backend::Memory(_) => false,
            Backend::Redis { store, .. } => store.recovery().is_within(time),
        }
    }

    /// Notes who answered a check.
    pub fn count(&self, answered: Answered) {
        if let Backend::Redis { tallies, .. } = self {
            tallies.checks.increment(answered as usize);
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
