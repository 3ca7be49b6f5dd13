//! Where the counters of one worker live, and who decided.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::time::{sleep, timeout};

use crate::limiter::clock;
use crate::limiter::clock::monotonic;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{AnsweredBy, LimiterMetrics};
use crate::limiter::redis::circuit_breaker::{CircuitBreaker, GuardedStore, RecoverySignal};
use crate::limiter::redis::cluster::ClusterStore;
use crate::limiter::redis::cluster::topology::ClusterMap;
use crate::limiter::redis::{RedisDeployment, RedisSettings, ServerStore, cluster};
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// Where the counters of this worker live.
#[derive(Debug)]
pub enum Store {
    /// In this process.
    Memory(Arc<MemoryStore>),
    /// In Redis, with this process' counters for the time when it fails.
    Redis {
        /// The store.
        store: RedisStore,
        /// The local shares.
        fallback: Arc<MemoryStore>,
        /// What was asked, and what came of it.
        metrics: Arc<LimiterMetrics>,
    },
}

/// One Redis, or many.
#[derive(Debug, Clone)]
pub enum RedisStore {
    /// One server keeps all.
    Single(GuardedStore),
    /// The masters of a cluster share the identities.
    Cluster(ClusterStore),
}

impl RedisStore {
    /// What these servers keep. Make one for each runtime, within it: connections live on the one that made them. All of a
    /// process share what is known of who fails.
    pub fn new(
        (deployment, settings): &(RedisDeployment, RedisSettings),
        breaker: Arc<CircuitBreaker>,
        topology: Arc<ClusterMap>,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        match deployment.clone() {
            RedisDeployment::Single(server) => {
                RedisStore::Single(GuardedStore::new(ServerStore::new(settings, server, metrics), breaker))
            }
            RedisDeployment::Cluster { seeds, login } => {
                RedisStore::Cluster(ClusterStore::new(settings.clone(), seeds, login, topology, metrics))
            }
        }
    }

    /// Connects, so that the first request finds connections.
    pub async fn connect(&self) {
        match self {
            RedisStore::Single(guard) => guard.connect().await,
            RedisStore::Cluster(cluster) => cluster.connect().await,
        }
    }

    /// Told each time that a server answers again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        match self {
            RedisStore::Single(guard) => guard.recovery(),
            RedisStore::Cluster(cluster) => cluster.recovery(),
        }
    }

    /// Decides by `due`; see [`Store::call`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call_before(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        match self {
            RedisStore::Single(store) => store.call_before(deadline, false, operation, charges).await,
            // On the heap: the others should not have to carry its size.
            RedisStore::Cluster(store) => Box::pin(store.call_before(deadline, operation, charges)).await,
        }
    }

    /// The same within the timeout.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.call_before(monotonic() + self.timeout(), operation, charges).await
    }

    /// Sends an operator's command about keys of one slot; see [`Guard::aside`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn admin_command(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            RedisStore::Single(guard) => guard.admin_command(guard.timeout(), false, command).await,
            RedisStore::Cluster(cluster) => Box::pin(cluster.admin_command(slot, command)).await,
        }
    }

    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        match self {
            RedisStore::Single(guard) => guard.timeout(),
            RedisStore::Cluster(cluster) => cluster.timeout(),
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
    pub fn label(self) -> &'static str {
        match self {
            DecidedBy::Store => "store",
            DecidedBy::Local => "local",
        }
    }
}

impl Store {
    /// Asks the store, or the counters that stand in for it. The time of the store counts from `since`.
    ///
    /// # Errors
    /// See [`StoreError`]; what is local does not fail.
    pub async fn call(
        &self,
        decided_by: DecidedBy,
        started_at: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let (store, metrics) = match (self, decided_by) {
            (Store::Memory(memory) | Store::Redis { fallback: memory, .. }, DecidedBy::Local)
            | (Store::Memory(memory), DecidedBy::Store) => return Ok(memory.decide(operation, charges)),
            (Store::Redis { store, metrics: tallies, .. }, DecidedBy::Store) => (store, tallies),
        };
        // On the heap: checks that stay in this process should not have to carry its size.
        let result = Box::pin(store.call_before(started_at + store.timeout(), operation, charges)).await;
        match &result {
            Ok(_) => metrics.round_trips.observe(clock::elapsed_since(started_at)),
            Err(StoreError::BreakerOpen | StoreError::Overloaded) => metrics.failures.increment(1),
            Err(_) => metrics.failures.increment(0),
        }
        result
    }

    /// Returns after this time, or before that when the store answers again after an outage.
    pub async fn recovery_within(&self, time: Duration) {
        match self {
            Store::Memory(_) => sleep(time).await,
            Store::Redis { store, .. } => drop(timeout(time, store.recovery().recovered()).await),
        }
    }

    /// Whether the store answered again within this time after an outage.
    pub fn has_recovered_within(&self, time: Duration) -> bool {
        match self {
            Store::Memory(_) => false,
            Store::Redis { store, .. } => store.recovery().is_within(time),
        }
    }

    /// Notes who answered a check.
    pub fn count_check(&self, answered_by: AnsweredBy) {
        if let Store::Redis { metrics, .. } = self {
            metrics.checks.increment(answered_by as usize);
        }
    }

    /// Whether these charges are decided by one call.
    pub fn is_one_call(&self, charges: &[Charge<'_>]) -> bool {
        match self {
            Store::Memory(_) | Store::Redis { store: RedisStore::Single(_), .. } => true,
            Store::Redis { store: RedisStore::Cluster(_), .. } => cluster::is_single_slot(charges),
        }
    }
}
