//! The Redis store: one call of a Lua script performs all checks of a request.

mod batch;
pub mod batcher;
pub mod circuit_breaker;
pub mod cluster;
pub mod commands;
pub mod connection;
pub mod error;
pub mod overrides;
mod probe;
pub mod script;
pub mod server;
pub mod url;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::timeout;
use uuid::Uuid;

use crate::clock::Clock;
use crate::limiter::key::Identity;
use crate::limiter::redis::cluster::topology::{SlotMap, identity_slot};
use crate::limiter::redis::connection::checkout;
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::server::{Address, ConnectError, Login, RedisEndpoint};
use crate::limiter::verdict::StoreError;

/// Settings of the clients of a Redis server.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// Prefix of every Redis key.
    pub prefix: String,
    /// Number of connections of one worker to one server.
    pub connections: u32,
    /// Maximum time from the start of a check to its verdict.
    pub timeout: Duration,
    /// Maximum time to connect, which takes several round trips. Requests wait at most `timeout` for a connection.
    pub connect_timeout: Duration,
    /// The algorithms whose scripts are loaded on each new connection.
    pub algorithms: AlgorithmSet,
    /// Clock of this process, for the boundaries of calendar windows.
    pub clock: Clock,
    /// Where new states are written.
    pub layout: Arc<StateLayout>,
}

/// Where the scripts write states with three fields (see `lua/states.lua`). They find a state in either place.
#[derive(Debug)]
pub struct StateLayout {
    has_separate_keys: AtomicBool,
}

impl StateLayout {
    /// Every state has a separate key, which earlier versions can read.
    pub fn separate_keys() -> Self {
        StateLayout { has_separate_keys: AtomicBool::new(true) }
    }

    /// Return whether every state has a separate key.
    pub fn has_separate_keys(&self) -> bool {
        self.has_separate_keys.load(Ordering::Relaxed)
    }

    /// From now on, write states to separate keys, or all states of an identity to one key.
    pub fn set_separate_keys(&self, separate: bool) {
        self.has_separate_keys.store(separate, Ordering::Relaxed);
    }
}

impl Default for StateLayout {
    /// All states of an identity are in the value of one key.
    fn default() -> Self {
        StateLayout { has_separate_keys: AtomicBool::new(false) }
    }
}

impl Default for RedisSettings {
    /// Return the defaults of `[store]` in the configuration. `algorithms` is empty, so no script is loaded on new
    /// connections.
    fn default() -> Self {
        RedisSettings {
            prefix: "rl".to_owned(),
            connections: 1,
            timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            algorithms: AlgorithmSet::default(),
            clock: Clock::Store,
            layout: Arc::default(),
        }
    }
}

/// A single Redis server or a Redis Cluster.
#[derive(Debug, Clone)]
pub enum RedisDeployment {
    /// One Redis server keeps the states of all limits.
    Single(RedisEndpoint),
    /// The masters of a cluster, each of which keeps the states of some identities.
    Cluster {
        /// The nodes from which a worker learns the other nodes of the cluster.
        seeds: Vec<Address>,
        /// The credentials for each node.
        login: Login,
    },
}

impl RedisDeployment {
    /// Return all masters, each with a random identity that no client has. In a cluster, the slot of this identity
    /// belongs to the master. The masters of a cluster are discovered from its seed nodes.
    ///
    /// # Errors
    /// No seed node can be queried.
    pub async fn masters(&self, connect_timeout: Duration) -> Result<Vec<(RedisEndpoint, Identity)>, ConnectError> {
        let mut unused_identities = std::iter::repeat_with(|| Identity(Uuid::new_v4().as_u128()));
        let (seeds, login) = match self {
            RedisDeployment::Single(server) => {
                return Ok(unused_identities.next().map(|identity| (server.clone(), identity)).into_iter().collect());
            }
            RedisDeployment::Cluster { seeds, login } => (seeds, login),
        };
        let mut failure = ConnectError::new("the cluster has no seed node");
        for seed in seeds {
            let slots = match fetch_slots(seed, login, connect_timeout).await {
                Ok(slots) => slots,
                Err(error) => {
                    failure = error;
                    continue;
                }
            };
            let mut endpoints = Vec::new();
            for master in slots.masters() {
                let probe_identity =
                    unused_identities.find(|identity| slots.owner(identity_slot(*identity)) == Some(master));
                endpoints.extend(probe_identity.map(|identity| Ok((login.node_endpoint(master)?, identity))));
            }
            return endpoints.into_iter().collect();
        }
        Err(failure)
    }
}

async fn fetch_slots(seed: &Address, login: &Login, connect_timeout: Duration) -> Result<SlotMap, ConnectError> {
    let connections = connection::new_pool(login.node_endpoint(seed)?, AlgorithmSet::default(), 1, connect_timeout);
    let connect_error = |error: StoreError| ConnectError::new(&error.to_string());
    let mut connection = checkout(&connections).await.map_err(connect_error)?;
    let reply_in_time = timeout(connect_timeout, connection.send(redis::cmd("CLUSTER").arg("SLOTS"))).await;
    let reply = reply_in_time.map_err(|_| connect_error(StoreError::Timeout))?;
    let reply = reply.map_err(|error| ConnectError::new(&error::diagnose_call(&error)))?;
    SlotMap::from_reply(&reply, seed).ok_or_else(|| connect_error(StoreError::MalformedReply))
}
