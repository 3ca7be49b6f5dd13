//! Redis: one script call decides a whole request.

pub mod advice;
mod batch;
mod caller;
pub mod connection;
pub mod dial;
pub mod fault;
pub mod hello;
pub mod pace;
pub mod records;
pub mod script;
pub mod server;
pub mod slots;
mod window;
pub mod wire;

use std::sync::Arc;
use std::time::Instant;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::{Duration, sleep, timeout, timeout_at};
use uuid::Uuid;

use super::algorithm::{Kind, Rule};
use super::clock::{Clock, monotonic};
use super::key::{Bucket, Identity, IdentityHasher, Key};
use super::store::{Charge, Mode, Operation, Store, StoreError, Verdict};
use super::tallies::Tallies;
use batch::{Purpose, Refusal};
use caller::{Caller, Question};
pub use caller::{Judge, LATEST, SOON};
use connection::checkout;
use fault::{Fault, Pauses};
use hello::Mode as ServerMode;
use script::Parts;
use server::{Address, Login, NoConnection, Server};
use slots::Slots;

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
    pub algorithms: Parts,
    /// Clock of this process, for the boundaries of calendar windows.
    pub clock: Clock,
}

/// One Redis, or many.
#[derive(Debug, Clone)]
pub enum Servers {
    /// One server keeps all.
    One(Server),
    /// The nodes of a cluster share the identities.
    Cluster {
        /// Those that are asked for the others at first.
        seeds: Vec<Address>,
        /// How to log on at each.
        login: Login,
    },
}

impl Servers {
    /// The servers that decide now, each with an identity that it keeps and nobody has: of a cluster all masters, as one of
    /// its nodes says.
    ///
    /// # Errors
    /// None of those that are known can be asked.
    pub async fn all(&self, within: Duration) -> Result<Vec<(Server, Identity)>, NoConnection> {
        let mut strangers = std::iter::repeat_with(|| Identity(Uuid::new_v4().as_u128()));
        let (seeds, login) = match self {
            Servers::One(server) => {
                return Ok(strangers.next().map(|identity| (server.clone(), identity)).into_iter().collect());
            }
            Servers::Cluster { seeds, login } => (seeds, login),
        };
        let mut failure = NoConnection::new("a cluster needs a node to begin with");
        for seed in seeds {
            let slots = match slots_of(seed, login, within).await {
                Ok(slots) => slots,
                Err(error) => {
                    failure = error;
                    continue;
                }
            };
            let mut found = Vec::new();
            for master in slots.masters() {
                let kept = strangers.find(|identity| slots.owner(slots::slot(*identity)) == Some(master));
                found.extend(kept.map(|identity| Ok((login.node(master)?, identity))));
            }
            return found.into_iter().collect();
        }
        Err(failure)
    }
}

async fn slots_of(seed: &Address, login: &Login, within: Duration) -> Result<Slots, NoConnection> {
    let connections = connection::pool(login.node(seed)?, Parts::default(), 1, within);
    let failed = |error: StoreError| NoConnection::new(&error.to_string());
    let mut connection = checkout(&connections).await.map_err(failed)?;
    let asked = timeout(within, connection.send(redis::cmd("CLUSTER").arg("SLOTS"))).await;
    let reply = asked.map_err(|_| failed(StoreError::Timeout))?;
    let reply = reply.map_err(|error| NoConnection::new(&advice::of_call(&error)))?;
    Slots::read(&reply, seed).ok_or_else(|| failed(StoreError::Malformed))
}

/// The counters of one worker's requests, kept by one server.
#[derive(Debug)]
pub struct RedisStore {
    caller: Arc<Caller>,
    /// How long a call that Redis turns away is made again: not until its deadline, so that the reason is told.
    patience: Duration,
}

/// Of a call that failed: what another one needs to fail in the same way.
#[derive(Debug, Clone)]
pub struct Sample {
    identity: Identity,
    rule: Rule,
}

impl RedisStore {
    /// A store that connects when it is first used. Make one for each runtime: connections live on the one that made them.
    pub fn new(settings: &RedisSettings, server: Server, tallies: Arc<Tallies>) -> Self {
        let RedisSettings { prefix, connections, timeout, connect_timeout, algorithms, clock } = settings.clone();
        // In a cluster each identity has a slot of its own.
        let together = server.mode() != ServerMode::Cluster;
        let connections = connection::pool(server, algorithms, connections, connect_timeout);
        let (judge, queue, replies) = Default::default();
        let caller =
            Caller { connections, prefix, clock, algorithms, timeout, together, tallies, judge, queue, replies };
        RedisStore { caller: Arc::new(caller), patience: timeout.mul_f64(0.8) }
    }

    /// Tells `judge` how calls end, from now on. Only the first one is told.
    pub fn judged_by(&self, judge: Arc<dyn Judge>) {
        let _ = self.caller.judge.set(judge);
    }

    /// Replaces connections that the server closed while they were idle.
    pub async fn renew_connections(&self) {
        self.caller.connections.renew().await;
    }

    /// Makes a connection, if there is none.
    ///
    /// # Errors
    /// Redis cannot be reached, or wants no scripts of us.
    pub async fn connect(&self) -> Result<(), StoreError> {
        checkout(&self.caller.connections).await.map(drop)
    }

    /// Asks for a sign of life, which needs the rights that calls need: with a call `like` one that failed, or with the
    /// smallest script. Like calls go to the same slot and write with the same commands, to a state that nobody else uses.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn probe(&self, like: Option<&Sample>) -> Result<(), StoreError> {
        let Some(Sample { identity, rule }) = like else {
            let mut connection = checkout(&self.caller.connections).await?;
            return connection
                .send(redis::cmd("EVAL").arg("return 1").arg(0))
                .await
                .map(drop)
                .map_err(Fault::store_error);
        };
        // No limit can have this name.
        let bucket = Bucket::new(&IdentityHasher::new(""), "~probe", &rule.shape());
        let key = Key { identity: *identity, bucket: &bucket };
        let charge = Charge { key, rule, cost: 1, mode: Mode::Binding, lease: 0, debt_before_us: 0 };
        let due = monotonic() + self.timeout();
        self.decide(due, Purpose::Probe, Operation::Check, &[charge]).await.map(drop)
    }

    /// Sends a command that is no decision; `asking` where another node said to ask this one.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn command(&self, asking: bool, command: &Cmd) -> Result<Value, StoreError> {
        let mut connection = checkout(&self.caller.connections).await?;
        let reply = if asking { connection.send_asking(command).await } else { connection.send(command).await };
        reply.map_err(Fault::store_error)
    }

    /// Asks this node at `address` which node of its cluster keeps which slot.
    ///
    /// # Errors
    /// It cannot be reached, or is no node of a cluster.
    pub async fn slots(&self, address: &Address) -> Result<Slots, StoreError> {
        let mut connection = checkout(&self.caller.connections).await?;
        let reply = connection.send(redis::cmd("CLUSTER").arg("SLOTS")).await.map_err(Fault::store_error)?;
        Slots::read(&reply, address).ok_or(StoreError::Malformed)
    }
}

impl Sample {
    /// A sample of this charge.
    pub fn of(charge: &Charge<'_>) -> Self {
        Sample { identity: charge.key.identity, rule: charge.rule.clone() }
    }
}

impl Store for RedisStore {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.ask(monotonic() + self.timeout(), false, operation, charges).await
    }
}

impl RedisStore {
    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        self.caller.timeout
    }

    /// Decides by `due`; `asking` where another node said to ask this one, which is importing the slot.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn ask(
        &self,
        due: Instant,
        asking: bool,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let purpose = if asking { Purpose::Asking } else { Purpose::Requests };
        self.decide(due, purpose, operation, charges).await
    }

    async fn decide(
        &self,
        due: Instant,
        purpose: Purpose,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        // Only calendar windows ask for the time; Redis corrects us if ours is far from its own.
        let calendar = charges.iter().any(|charge| charge.rule.kind() == Kind::Calendar);
        let near_us = if calendar { self.caller.clock.now_us() } else { 0 };
        let question = Question { operation, charges, near_us, text: false, purpose, due };
        match self.caller.ask(question).await {
            Ok(verdict) => Ok(verdict),
            Err(Refusal::Store(error)) => Err(error),
            Err(Refusal::Reply(error)) => {
                let again = timeout_at(due.into(), Box::pin(self.again(question, error)));
                again.await.unwrap_or(Err(StoreError::Late))
            }
        }
    }

    /// Asks again as long as what it is told proves that nothing ran; what has no reply is not sent again.
    async fn again(&self, mut question: Question<'_>, mut error: RedisError) -> Result<Verdict, StoreError> {
        let (mut asked_time, mut pauses) = (false, None);
        loop {
            if !question.text && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) {
                question.text = true;
            } else if let Some(redis_us) = stale(&error).filter(|_| !asked_time) {
                (asked_time, question.near_us) = (true, redis_us);
            } else if Fault::of(&error) == Some(Fault::Passing) {
                match pauses.get_or_insert_with(|| Pauses::within(self.patience)).next() {
                    Some(pause) => sleep(pause).await,
                    None => return Err(Fault::store_error(error)),
                }
            } else {
                return Err(Fault::store_error(error));
            }
            error = match self.caller.ask(question).await {
                Ok(verdict) => return Ok(verdict),
                Err(Refusal::Store(error)) => return Err(error),
                Err(Refusal::Reply(error)) => error,
            };
        }
    }
}

/// The time of a server that found calendar boundaries too far from it.
fn stale(error: &RedisError) -> Option<u64> {
    let detail = error.detail().filter(|_| error.code() == Some("RLSTALE"))?;
    detail.rsplit(' ').next()?.parse().ok()
}
