//! Redis: one script call decides a whole request.

mod batch;
pub mod batcher;
pub mod circuit_breaker;
pub mod cluster;
pub mod connection;
pub mod diagnosis;
pub mod error;
pub mod overrides;
pub mod script;
pub mod server;
pub mod url;

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::{sleep, timeout, timeout_at};
use uuid::Uuid;

use crate::limiter::algorithm::{AlgorithmKind, Rule};
use crate::limiter::clock::{Clock, monotonic};
use crate::limiter::key::{Identity, IdentityHasher, Key, StateName};
use crate::limiter::metrics::LimiterMetrics;
use crate::limiter::redis::batch::{BatchError, Purpose};
use crate::limiter::redis::batcher::{BatchItem, Batcher, CallObserver};
use crate::limiter::redis::cluster::topology::SlotMap;
use crate::limiter::redis::connection::{ServerMode, checkout};
use crate::limiter::redis::error::{Backoff, RedisErrorKind};
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::server::{Address, ConnectError, Login, RedisEndpoint};
use crate::limiter::verdict::{Charge, ChargeMode, CounterStore, Operation, StoreError, Verdict};

/// How to use a server.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// First part of every key.
    pub prefix: String,
    /// Connections of one worker.
    pub connections: u32,
    /// Maximum time from when a request asks to its verdict.
    pub timeout: Duration,
    /// Maximum time to connect, several round trips. Requests do not wait longer for it than `timeout`.
    pub connect_timeout: Duration,
    /// What the scripts to load on every new connection must know.
    pub algorithms: AlgorithmSet,
    /// Clock of this process, for the boundaries of calendar windows.
    pub clock: Clock,
}

impl Default for RedisSettings {
    /// Return the defaults of `[store]` in the configuration. No script is loaded before it is used.
    fn default() -> Self {
        RedisSettings {
            prefix: "rl".to_owned(),
            connections: 1,
            timeout: Duration::from_millis(50),
            connect_timeout: Duration::from_secs(1),
            algorithms: AlgorithmSet::default(),
            clock: Clock::Store,
        }
    }
}

/// One Redis, or many.
#[derive(Debug, Clone)]
pub enum RedisDeployment {
    /// One server keeps all.
    Single(RedisEndpoint),
    /// The nodes of a cluster share the identities.
    Cluster {
        /// Those that are asked for the others at first.
        seeds: Vec<Address>,
        /// How to log on at each.
        login: Login,
    },
}

impl RedisDeployment {
    /// The servers that decide now, each with an identity that it keeps and nobody has: of a cluster all masters, as one of
    /// its nodes says.
    ///
    /// # Errors
    /// None of those that are known can be asked.
    pub async fn masters(&self, connect_timeout: Duration) -> Result<Vec<(RedisEndpoint, Identity)>, ConnectError> {
        let mut unused_identities = std::iter::repeat_with(|| Identity(Uuid::new_v4().as_u128()));
        let (seeds, login) = match self {
            RedisDeployment::Single(server) => {
                return Ok(unused_identities.next().map(|identity| (server.clone(), identity)).into_iter().collect());
            }
            RedisDeployment::Cluster { seeds, login } => (seeds, login),
        };
        let mut failure = ConnectError::new("a cluster needs a node to begin with");
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
                let probe_identity = unused_identities.find(|identity| {
                    slots.owner(crate::limiter::redis::cluster::topology::identity_slot(*identity)) == Some(master)
                });
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
    let reply = reply.map_err(|error| ConnectError::new(&diagnosis::diagnose_call(&error)))?;
    SlotMap::from_reply(&reply, seed).ok_or_else(|| connect_error(StoreError::MalformedReply))
}

/// The counters of one worker's requests, kept by one server.
#[derive(Debug)]
pub struct ServerStore {
    batcher: Arc<Batcher>,
    /// How long a call that Redis turns away is made again: not until its deadline, so that the reason is told.
    retry_timeout: Duration,
}

/// Of a call that failed: what another one needs to fail in the same way.
#[derive(Debug, Clone)]
pub struct ProbeCall {
    identity: Identity,
    rule: Rule,
}

impl ServerStore {
    /// A store that connects when it is first used. Make one for each runtime: connections live on the one that made them.
    pub fn new(settings: &RedisSettings, server: RedisEndpoint, metrics: Arc<LimiterMetrics>) -> Self {
        let RedisSettings { prefix, connections, timeout, connect_timeout, algorithms, clock } = settings.clone();
        // In a cluster each identity has a slot of its own.
        let shares_calls = server.mode() != ServerMode::Cluster;
        let connections = connection::new_pool(server, algorithms, connections, connect_timeout);
        let (observer, queue, reply_count) = Default::default();
        let batcher = Batcher {
            connections,
            prefix,
            clock,
            algorithms,
            timeout,
            shares_calls,
            metrics,
            observer,
            queue,
            reply_count,
        };
        ServerStore { batcher: Arc::new(batcher), retry_timeout: timeout.mul_f64(0.8) }
    }

    /// Tells `judge` how calls end, from now on. Only the first one is told.
    pub fn set_observer(&self, observer: Arc<dyn CallObserver>) {
        let _ = self.batcher.observer.set(observer);
    }

    /// Replaces connections that the server closed while they were idle.
    pub async fn maintain_connections(&self) {
        self.batcher.connections.maintain().await;
    }

    /// Makes a connection, if there is none.
    ///
    /// # Errors
    /// Redis cannot be reached, or wants no scripts of us.
    pub async fn connect(&self) -> Result<(), StoreError> {
        checkout(&self.batcher.connections).await.map(drop)
    }

    /// Asks for a sign of life, which needs the rights that calls need: with a call `like` one that failed, or with the
    /// smallest script. Like calls go to the same slot and write with the same commands, to a state that nobody else uses.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn probe(&self, call: Option<&ProbeCall>) -> Result<(), StoreError> {
        let Some(ProbeCall { identity, rule }) = call else {
            let mut connection = checkout(&self.batcher.connections).await?;
            return connection
                .send(redis::cmd("EVAL").arg("return 1").arg(0))
                .await
                .map(drop)
                .map_err(RedisErrorKind::to_store_error);
        };
        // No limit can have this name.
        let state_name = StateName::new(&IdentityHasher::new(""), "~probe", &rule.shape());
        let key = Key { identity: *identity, state_name: &state_name };
        let charge = Charge { key, rule, cost: 1, mode: ChargeMode::Enforced, permit_id: 0, debt_before_us: 0 };
        let deadline = monotonic() + self.timeout();
        self.call_for(deadline, Purpose::Probe, Operation::Check, &[charge]).await.map(drop)
    }

    /// Sends a command that is no decision; `asking` where another node said to ask this one.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn command(&self, asking: bool, command: &Cmd) -> Result<Value, StoreError> {
        let mut connection = checkout(&self.batcher.connections).await?;
        let reply = if asking { connection.send_asking(command).await } else { connection.send(command).await };
        reply.map_err(RedisErrorKind::to_store_error)
    }

    /// Asks this node at `address` which node of its cluster keeps which slot.
    ///
    /// # Errors
    /// It cannot be reached, or is no node of a cluster.
    pub async fn slots(&self, address: &Address) -> Result<SlotMap, StoreError> {
        let mut connection = checkout(&self.batcher.connections).await?;
        let reply =
            connection.send(redis::cmd("CLUSTER").arg("SLOTS")).await.map_err(RedisErrorKind::to_store_error)?;
        SlotMap::from_reply(&reply, address).ok_or(StoreError::MalformedReply)
    }
}

impl ProbeCall {
    /// A sample of this charge.
    pub fn from_charge(charge: &Charge<'_>) -> Self {
        ProbeCall { identity: charge.key.identity, rule: charge.rule.clone() }
    }
}

impl CounterStore for ServerStore {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.call_before(monotonic() + self.timeout(), false, operation, charges).await
    }
}

impl ServerStore {
    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        self.batcher.timeout
    }

    /// Decides by `due`; `asking` where another node said to ask this one, which is importing the slot.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call_before(
        &self,
        deadline: Instant,
        asking: bool,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let purpose = if asking { Purpose::Asking } else { Purpose::Checks };
        self.call_for(deadline, purpose, operation, charges).await
    }

    async fn call_for(
        &self,
        deadline: Instant,
        purpose: Purpose,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        // Only calendar windows ask for the time; Redis corrects us if ours is far from its own.
        let has_calendar = charges.iter().any(|charge| charge.rule.kind() == AlgorithmKind::Calendar);
        let assumed_now_us = if has_calendar { self.batcher.clock.now_us() } else { 0 };
        let item = BatchItem { operation, charges, assumed_now_us, sends_source: false, purpose, deadline };
        match self.batcher.enqueue(item).await {
            Ok(verdict) => Ok(verdict),
            Err(BatchError::Store(error)) => Err(error),
            Err(BatchError::ErrorReply(error)) => {
                let retried = timeout_at(deadline.into(), Box::pin(self.retry(item, error)));
                retried.await.unwrap_or(Err(StoreError::LateReply))
            }
        }
    }

    /// Asks again as long as what it is told proves that nothing ran; what has no reply is not sent again.
    async fn retry(&self, mut item: BatchItem<'_>, mut error: RedisError) -> Result<Verdict, StoreError> {
        let (mut has_corrected_time, mut backoff) = (false, None);
        loop {
            if !item.sends_source && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) {
                item.sends_source = true;
            } else if let Some(redis_us) = server_time(&error).filter(|_| !has_corrected_time) {
                (has_corrected_time, item.assumed_now_us) = (true, redis_us);
            } else if RedisErrorKind::from_error(&error) == Some(RedisErrorKind::Retryable) {
                match backoff.get_or_insert_with(|| Backoff::new(self.retry_timeout)).next() {
                    Some(pause) => sleep(pause).await,
                    None => return Err(RedisErrorKind::to_store_error(error)),
                }
            } else {
                return Err(RedisErrorKind::to_store_error(error));
            }
            error = match self.batcher.enqueue(item).await {
                Ok(verdict) => return Ok(verdict),
                Err(BatchError::Store(error)) => return Err(error),
                Err(BatchError::ErrorReply(error)) => error,
            };
        }
    }
}

/// The time of a server that found calendar boundaries too far from it.
fn server_time(error: &RedisError) -> Option<u64> {
    let detail = error.detail().filter(|_| error.code() == Some("RLSTALE"))?;
    detail.rsplit(' ').next()?.parse().ok()
}
