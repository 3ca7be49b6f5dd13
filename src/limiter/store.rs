//! The store of one worker: memory, or Redis with a local fallback.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::time::{sleep, timeout};

use crate::boxed::boxed;
use crate::clock::elapsed_since;
use crate::limiter::key::{Identity, StateName};
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{AnsweredBy, LimiterMetrics};
use crate::limiter::redis::batcher::ServerStore;
use crate::limiter::redis::circuit_breaker::{CircuitBreaker, RecoverySignal};
use crate::limiter::redis::cluster::ClusterStore;
use crate::limiter::redis::cluster::topology::{ClusterMap, identity_slot, key_slot};
use crate::limiter::redis::overrides::{OverrideEntry, OverrideWrite, Snapshot, WriteStatus};
use crate::limiter::redis::{RedisDeployment, RedisSettings, StateLayout, cluster, commands, overrides};
use crate::limiter::verdict::{Charge, Operation, StoreError, Verdict};

/// The store for the counters of one worker.
#[derive(Debug)]
pub enum Store {
    /// Counters in the memory of this process.
    Memory(Arc<MemoryStore>),
    /// Counters in Redis, with counters in this process for outages.
    Redis {
        /// The Redis store.
        store: RedisStore,
        /// The counters of the local shares.
        fallback: Arc<MemoryStore>,
        /// Metrics of checks and store calls.
        metrics: Arc<LimiterMetrics>,
    },
}

/// A single Redis server or a Redis Cluster.
#[derive(Debug, Clone)]
pub enum RedisStore {
    /// One server keeps all states.
    Single(ServerStore),
    /// The masters of a cluster, each of which keeps the states of some identities.
    Cluster(ClusterStore),
}

impl RedisStore {
    /// Create the store client for a deployment. Create one client for each runtime, within this runtime, because
    /// connections belong to the runtime that opened them. `breaker` and `topology` are shared by the whole process.
    pub fn new(
        deployment: &RedisDeployment,
        settings: &RedisSettings,
        breaker: Arc<CircuitBreaker>,
        topology: Arc<ClusterMap>,
        metrics: Arc<LimiterMetrics>,
    ) -> Self {
        match deployment.clone() {
            RedisDeployment::Single(server) => RedisStore::Single(ServerStore::new(settings, server, breaker, metrics)),
            RedisDeployment::Cluster { seeds, login } => {
                RedisStore::Cluster(ClusterStore::new(settings.clone(), seeds, login, topology, metrics))
            }
        }
    }

    /// Open the connections, so that the first request does not wait for them.
    pub async fn connect(&self) {
        match self {
            RedisStore::Single(server) => server.connect().await,
            RedisStore::Cluster(cluster) => cluster.connect().await,
        }
    }

    /// Open the connections in the background. Return when the connections are open, or after `max_wait`.
    pub async fn connect_within(&self, max_wait: Duration) {
        let store = self.clone();
        let connecting = tokio::spawn(async move { store.connect().await });
        let _ = timeout(max_wait, connecting).await;
    }

    /// Return the signal that fires each time a server is available again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        match self {
            RedisStore::Single(server) => server.recovery(),
            RedisStore::Cluster(cluster) => cluster.recovery(),
        }
    }

    /// Decide all of `charges` together, before `deadline`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        match self {
            RedisStore::Single(server) => server.call(deadline, false, operation, charges).await,
            // Box the future of the cluster, because it is large and would otherwise determine the size of all store
            // futures.
            RedisStore::Cluster(cluster) => boxed(|| cluster.call(deadline, operation, charges)).await,
        }
    }

    /// Return the maximum time from the start of a check to its verdict.
    pub fn timeout(&self) -> Duration {
        match self {
            RedisStore::Single(server) => server.timeout(),
            RedisStore::Cluster(cluster) => cluster.timeout(),
        }
    }
}

// === Administration: single states, and the records of overrides ===

impl RedisStore {
    /// Delete the states of an identity. Return whether one of them existed. The call may be repeated without harm.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn delete_states(&self, identity: Identity, states: &[&StateName]) -> Result<bool, StoreError> {
        let command = commands::delete_states_command(self.prefix(), identity, states);
        Ok(self.admin_command(identity_slot(identity), &command).await? == Value::Int(1))
    }

    /// Read all override records from the hash at `hash_key`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn read_overrides(&self, hash_key: &str) -> Result<Snapshot, StoreError> {
        let slot = key_slot(hash_key.as_bytes());
        let time = self.admin_command(slot, &overrides::time_command()).await?;
        let fields = self.admin_command(slot, &overrides::read_command(hash_key)).await?;
        overrides::parse_snapshot(time, fields)
    }

    /// Write one override record. Return the status and, if the record was written, the record that Redis now has.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn write_override(
        &self,
        hash_key: &str,
        write: &OverrideWrite<'_>,
        max_records: usize,
    ) -> Result<(WriteStatus, Option<Snapshot>), StoreError> {
        let reply = self.admin_command(key_slot(hash_key.as_bytes()), &write.command(hash_key, max_records)).await?;
        write.parse_reply(reply)
    }

    /// Write back records that Redis has lost. Return a status for each record.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn restore_overrides(
        &self,
        hash_key: &str,
        records: &[OverrideEntry],
        max_records: usize,
    ) -> Result<Vec<WriteStatus>, StoreError> {
        let command = overrides::restore_command(hash_key, records, max_records);
        overrides::parse_restore_reply(self.admin_command(key_slot(hash_key.as_bytes()), &command).await?)
    }

    /// Return all servers: the single server, or the masters of the cluster.
    pub(super) async fn nodes(&self) -> Result<Vec<ServerStore>, StoreError> {
        match self {
            RedisStore::Single(server) => Ok(vec![server.clone()]),
            RedisStore::Cluster(cluster) => cluster.master_nodes().await,
        }
    }

    /// Return where new states are written.
    pub fn layout(&self) -> &StateLayout {
        match self {
            RedisStore::Single(server) => server.layout(),
            RedisStore::Cluster(cluster) => cluster.layout(),
        }
    }

    pub(super) fn prefix(&self) -> &str {
        match self {
            RedisStore::Single(server) => server.prefix(),
            RedisStore::Cluster(cluster) => cluster.prefix(),
        }
    }

    /// Send an administrative command for keys in one cluster slot. See [`ServerStore::admin_command`].
    pub(super) async fn admin_command(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            RedisStore::Single(server) => server.admin_command(server.timeout(), false, command).await,
            RedisStore::Cluster(cluster) => Box::pin(cluster.admin_command(slot, command)).await,
        }
    }
}

/// The component that made a decision: the store or this gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecidedBy {
    /// The store decided, based on the requests to all gateways.
    Store,
    /// The gateway decided with its local share, because the store was unavailable.
    Local,
}

impl DecidedBy {
    /// Return the name for logs.
    pub fn label(self) -> &'static str {
        match self {
            DecidedBy::Store => "store",
            DecidedBy::Local => "local",
        }
    }
}

impl Store {
    /// Send the charges to the store or to the local counters. The store's timeout starts at `started_at`.
    ///
    /// # Errors
    /// See [`StoreError`]. Local counters do not fail.
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
            (Store::Redis { store, metrics, .. }, DecidedBy::Store) => (store, metrics),
        };
        // Box the future of store calls, because it is large and checks in local memory do not need it.
        let result = boxed(|| store.call(started_at + store.timeout(), operation, charges)).await;
        match &result {
            Ok(_) => metrics.round_trips.observe(elapsed_since(started_at)),
            Err(StoreError::BreakerOpen | StoreError::Overloaded) => metrics.failures.increment(1),
            Err(StoreError::WritesRejected(_)) => metrics.failures.increment(2),
            Err(_) => metrics.failures.increment(0),
        }
        result
    }

    /// Return the Redis store.
    pub fn redis(&self) -> Option<&RedisStore> {
        match self {
            Store::Memory(_) => None,
            Store::Redis { store, .. } => Some(store),
        }
    }

    /// Return after `time`, or earlier when the store is available again after an outage.
    pub async fn recovery_within(&self, time: Duration) {
        match self {
            Store::Memory(_) => sleep(time).await,
            Store::Redis { store, .. } => drop(timeout(time, store.recovery().recovered()).await),
        }
    }

    /// Return whether the store became available again after an outage within the last `time`.
    pub fn has_recovered_within(&self, time: Duration) -> bool {
        match self {
            Store::Memory(_) => false,
            Store::Redis { store, .. } => store.recovery().is_within(time),
        }
    }

    /// Count a check by the component that decided it.
    pub fn count_check(&self, answered_by: AnsweredBy) {
        if let Store::Redis { metrics, .. } = self {
            metrics.checks.increment(answered_by as usize);
        }
    }

    /// Return whether one call to the store can decide these charges.
    pub fn is_one_call(&self, charges: &[Charge<'_>]) -> bool {
        match self {
            Store::Memory(_) | Store::Redis { store: RedisStore::Single(_), .. } => true,
            Store::Redis { store: RedisStore::Cluster(_), .. } => cluster::is_single_slot(charges),
        }
    }
}
