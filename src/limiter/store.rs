//! The store of one worker: memory, or Redis with a local fallback.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{Cmd, Value};
use tokio::time::{sleep, timeout};

use crate::clock::elapsed_since;
use crate::limiter::key::Identity;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{AnsweredBy, LimiterMetrics};
use crate::limiter::redis::batcher::ServerStore;
use crate::limiter::redis::circuit_breaker::{CircuitBreaker, RecoverySignal};
use crate::limiter::redis::cluster::ClusterStore;
use crate::limiter::redis::cluster::topology::{ClusterMap, identity_slot, key_slot};
use crate::limiter::redis::commands::{EventClaim, Fields};
use crate::limiter::redis::overrides::{OverrideEntry, OverrideWrite, Snapshot, WriteStatus};
use crate::limiter::redis::{RedisDeployment, RedisSettings, cluster, commands, overrides};
use crate::limiter::usage::{UsageAmount, UsageFields, UsageKey, UsageMonth, UsagePost, UsageQuery, UsageRow};
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
        (deployment, settings): &(RedisDeployment, RedisSettings),
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
            RedisStore::Cluster(cluster) => Box::pin(cluster.call(deadline, operation, charges)).await,
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
    /// Delete the state with this Redis key. Return whether the state existed. The call may be repeated without harm.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn delete_state(&self, identity: Identity, redis_key: Vec<u8>) -> Result<bool, StoreError> {
        let deleted = self.admin_command(identity_slot(identity), redis::cmd("DEL").arg(redis_key)).await?;
        Ok(deleted == Value::Int(1))
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

    /// Read a fenced hash (`lua/fenced_hash.lua`): its version, and its fields if the version is not `known_version`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn read_fenced(&self, key: &str, known_version: u64) -> Result<(u64, Option<Fields>), StoreError> {
        let command = commands::read_hash_command(key, known_version);
        let reply = self.admin_command(key_slot(key.as_bytes()), &command).await?;
        commands::parse_hash_reply(reply, known_version)
    }

    /// Lock a fenced hash for `ttl`, or renew the lock. Return the fencing token. `None` means that another owner has
    /// the lock.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn lock_fenced(&self, key: &str, owner: &str, ttl: Duration) -> Result<Option<u64>, StoreError> {
        let command = commands::lock_hash_command(key, owner, ttl);
        let reply = self.admin_command(key_slot(key.as_bytes()), &command).await?;
        Ok(Some(commands::parse_number(reply)?).filter(|token| *token != 0))
    }

    /// Release the lock of a fenced hash.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn unlock_fenced(&self, key: &str, token: u64) -> Result<(), StoreError> {
        self.admin_command(key_slot(key.as_bytes()), &commands::unlock_hash_command(key, token)).await.map(drop)
    }

    /// Write a field of a fenced hash. An empty value removes the field. Return whether the token is still the token of
    /// the last lock. If another lock has a newer token, nothing is written.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn write_fenced(&self, key: &str, token: u64, field: &str, value: &[u8]) -> Result<bool, StoreError> {
        let command = commands::write_hash_command(key, token, field, value);
        let reply = self.admin_command(key_slot(key.as_bytes()), &command).await?;
        Ok(commands::parse_number(reply)? == 1)
    }

    /// Claim a quota event, and add it to a stream if the claim names one. Return `false` if another event already has
    /// the claim. The call may be repeated without harm.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn claim_event(&self, claim: &EventClaim<'_>) -> Result<bool, StoreError> {
        let key = format!("{}:{}", self.prefix(), claim.key);
        let command = commands::claim_event_command(&key, claim);
        let reply = self.admin_command(key_slot(key.as_bytes()), &command).await?;
        Ok(commands::parse_number(reply)? == 1)
    }

    /// Add a post to the usage totals. Return `false` if Redis had already added this post. The call may be repeated
    /// without harm.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn post_usage(&self, post: &UsagePost) -> Result<bool, StoreError> {
        let command = commands::post_usage_command(self.prefix(), post);
        let reply = self.admin_command(identity_slot(Identity(post.key.identity)), &command).await?;
        Ok(reply == Value::Int(1))
    }

    /// Read usage totals, in no particular order. If the query has no identities, scan all keys of the store. While
    /// slots of a cluster migrate, totals may be missing.
    ///
    /// # Errors
    /// The store failed, or there are too many totals.
    pub async fn read_usage(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, UsageError> {
        let keys = match &query.identities {
            Some(identities) => usage_keys(query, identities),
            None => self.scan_usage(query).await?,
        };
        let mut rows = Vec::new();
        for keys in keys.chunks(MAX_CONCURRENT_READS) {
            let hashes = join_all(keys.iter().map(async |key| {
                let command = commands::read_usage_command(self.prefix(), key);
                let reply = self.admin_command(identity_slot(Identity(key.identity)), &command).await?;
                commands::parse_usage_reply(reply)
            }));
            for (key, amounts) in keys.iter().zip(hashes.await) {
                let row = |UsageAmount { day, model, cost }| {
                    let date = key.month.day(day)?;
                    Some(UsageRow { limit: key.limit.clone(), identity: key.identity, date, model, cost })
                };
                let rows_of_key = amounts?.into_iter().filter_map(row);
                rows.extend(rows_of_key.filter(|row| query.matches(&row.limit, row.identity, row.date)));
            }
            if rows.len() > query.max_rows {
                return Err(UsageError::TooMany(query.max_rows));
            }
        }
        Ok(rows)
    }

    /// Search Redis for the keys of the totals that a query selects. Return each key once.
    async fn scan_usage(&self, query: &UsageQuery) -> Result<Vec<UsageKey>, UsageError> {
        let (from, to) = (UsageMonth::from(query.from), UsageMonth::from(query.to));
        let mut keys = BTreeSet::new();
        for node in self.nodes().await? {
            let mut cursor = 0;
            loop {
                let command = commands::scan_usage_command(self.prefix(), cursor);
                let reply = node.admin_command(node.timeout(), false, &command).await?;
                let (next, found) = commands::parse_usage_scan_reply(self.prefix(), reply)?;
                let is_asked = |key: &UsageKey| {
                    (from..=to).contains(&key.month)
                        && query.limits.contains(&key.limit)
                        && (query.with_models || key.fields == UsageFields::Days)
                };
                keys.extend(found.into_iter().filter(is_asked));
                if keys.len() > query.max_rows {
                    return Err(UsageError::TooMany(query.max_rows));
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        Ok(keys.into_iter().collect())
    }

    /// Return all servers: the single server, or the masters of the cluster.
    async fn nodes(&self) -> Result<Vec<ServerStore>, StoreError> {
        match self {
            RedisStore::Single(server) => Ok(vec![server.clone()]),
            RedisStore::Cluster(cluster) => cluster.master_nodes().await,
        }
    }

    fn prefix(&self) -> &str {
        match self {
            RedisStore::Single(server) => server.prefix(),
            RedisStore::Cluster(cluster) => cluster.prefix(),
        }
    }

    /// Send an administrative command for keys in one cluster slot. See [`ServerStore::admin_command`].
    async fn admin_command(&self, slot: u16, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            RedisStore::Single(server) => server.admin_command(server.timeout(), false, command).await,
            RedisStore::Cluster(cluster) => Box::pin(cluster.admin_command(slot, command)).await,
        }
    }
}

/// Return the keys of the totals of these identities.
fn usage_keys(query: &UsageQuery, identities: &[Identity]) -> Vec<UsageKey> {
    let last = UsageMonth::from(query.to);
    let kinds = if query.with_models { &[UsageFields::Days, UsageFields::Models][..] } else { &[UsageFields::Days] };
    let mut keys = Vec::new();
    for (limit, identity) in query.limits.iter().zip(identities) {
        let mut month = UsageMonth::from(query.from);
        while month <= last {
            keys.extend(kinds.iter().map(|fields| UsageKey {
                limit: limit.clone(),
                identity: identity.0,
                month,
                fields: *fields,
            }));
            month = month.next();
        }
    }
    keys
}

/// Maximum number of hashes that are read at the same time.
const MAX_CONCURRENT_READS: usize = 64;

/// The reason why usage totals cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There are more totals than the query's maximum, which is this number.
    #[error("there are more than {0} totals")]
    TooMany(usize),
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
        let result = Box::pin(store.call(started_at + store.timeout(), operation, charges)).await;
        match &result {
            Ok(_) => metrics.round_trips.observe(elapsed_since(started_at)),
            Err(StoreError::BreakerOpen | StoreError::Overloaded) => metrics.failures.increment(1),
            Err(StoreError::WritesRejected(_)) => metrics.failures.increment(2),
            Err(_) => metrics.failures.increment(0),
        }
        result
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
