//! Pooled connections to Redis: bb8 makes, keeps and replaces them; calls share them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bb8_redis::bb8::{ErrorSink, ManageConnection, Pool, RunError};
use futures_util::FutureExt;
use futures_util::future::try_join_all;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::{Duration, timeout};

use super::pace::Pace;
use super::script::{Frame, Parts, script};
use super::server::{NoConnection, Server};
use super::{advice, dial, hello};
use crate::limit::clock::monotonic;
use crate::limit::store::StoreError;

/// Calls given up at their deadline, with no reply between them, after which a connection counts as hung.
pub const UNANSWERED: u32 = 5;

/// Calls that may be queued on one connection before senders wait.
const PIPELINE: usize = 1024;

/// Makes connections with all scripts of the configuration loaded.
#[derive(Debug, Clone)]
pub struct Manager {
    server: Server,
    algorithms: Parts,
    connect_timeout: Duration,
    pace: Arc<Pace>,
}

/// A connection that many calls use at once.
#[derive(Debug, Clone)]
pub struct Connection {
    pipe: MultiplexedConnection,
    health: Arc<Health>,
}

/// A connection of the pool. It can be replaced while requests use the earlier one.
#[derive(Debug, Clone)]
pub struct Pooled(Arc<Mutex<Connection>>);

/// What is known of a connection.
#[derive(Debug)]
struct Health {
    address: ConnectionAddr,
    unanswered: AtomicU32,
    /// Whether it works, but no longer leads to where it should.
    retired: AtomicBool,
    pace: Arc<Pace>,
}

/// The connections of one worker.
#[derive(Debug)]
pub struct Connections {
    pool: Pool<Manager>,
    size: u32,
    manager: Manager,
    failure: LastFailure,
    /// What to say when not even a failure came in time.
    silence: NoConnection,
    /// Whether there was one yet.
    connected: AtomicBool,
}

/// Why the last attempt to connect failed. The pool itself lets those who wait for it wait on.
#[derive(Debug, Clone, Default)]
struct LastFailure(Arc<(Mutex<Option<NoConnection>>, Notify)>);

impl LastFailure {
    fn take(&self) -> Option<NoConnection> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl ErrorSink<NoConnection> for LastFailure {
    fn sink(&self, error: NoConnection) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.0.1.notify_waiters();
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<NoConnection>> {
        Box::new(self.clone())
    }
}

/// A pool that connects when it is first used.
pub fn pool(server: Server, algorithms: Parts, size: u32, connect_timeout: Duration) -> Connections {
    let (failure, silence) = (LastFailure::default(), server.silence());
    let manager = Manager { server, algorithms, connect_timeout, pace: Arc::default() };
    let pool = Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .retry_connection(false)
        // Longer than an attempt, so that its reason is told.
        .connection_timeout(connect_timeout + connect_timeout / 8)
        .error_sink(failure.boxed_clone())
        .idle_timeout(None)
        .max_lifetime(None)
        .build_unchecked(manager.clone());
    Connections { pool, size, manager, failure, silence, connected: AtomicBool::new(false) }
}

impl Connections {
    /// There is no connection in time, and no attempt has failed. A server that was there is still being connected to, which takes
    /// several round trips; that is no outage.
    pub fn silence(&self) -> StoreError {
        if self.connected.load(Ordering::Relaxed) {
            StoreError::Overloaded
        } else {
            StoreError::Unreachable(self.silence.to_string())
        }
    }

    /// Replaces idle connections that the server has closed, and those to a server that is not the master any more, and opens those that
    /// are missing. Requests use the earlier connections until the new ones are open.
    pub async fn renew(&self) {
        let master = self.manager.server.named(self.manager.connect_timeout).await;
        let leads_elsewhere = |connection: &Connection| {
            master.as_ref().is_some_and(|master| *master.get_connection_info().addr() != connection.health.address)
        };
        let open = self.pool.state().connections;
        if open == 0 && checkout(self).await.is_err() {
            return;
        }
        for _ in open.max(1)..self.size {
            // A checkout gives its connection back at once: the pool itself would never open a second one.
            let Ok(further) = self.manager.connect().await else { return };
            if self.pool.add(further).is_err() {
                break;
            }
        }
        for _ in 0..open {
            // The pool hands out the connection that was given back first.
            let Some(Ok(pooled)) = self.pool.get().now_or_never() else { return };
            let pooled = Pooled::clone(&pooled);
            let connection = pooled.current();
            if connection.is_closed() || leads_elsewhere(&connection) {
                let Ok(replacement) = self.manager.connect().await else { return };
                pooled.replace(&replacement);
            }
        }
    }
}

impl Pooled {
    fn current(&self) -> Connection {
        self.lock().clone()
    }

    fn replace(&self, other: &Pooled) {
        *self.lock() = other.current();
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection of the pool, cloned and given back at once, so that nobody waits for a round trip of somebody else.
pub async fn checkout(connections: &Connections) -> Result<Connection, StoreError> {
    loop {
        let failed = connections.failure.0.1.notified();
        let pooled = tokio::select! {
            biased;
            pooled = connections.pool.get() => pooled,
            () = failed => Err(RunError::TimedOut),
        };
        let pooled = pooled.map_err(|error| {
            let failure = match error {
                RunError::User(error) => Some(error),
                RunError::TimedOut => connections.failure.take(),
            };
            StoreError::Unreachable(failure.unwrap_or_else(|| connections.silence.clone()).to_string())
        })?;
        // A broken one is thrown away by the pool when it comes back.
        let connection = pooled.current();
        if !connection.is_broken() {
            connections.connected.store(true, Ordering::Relaxed);
            return Ok(connection);
        }
    }
}

/// Connects once, outside of any pool, and asks for a sign of life.
///
/// # Errors
/// In words, why a pool would have no connections.
pub async fn attempt(server: Server, algorithms: Parts, connect_timeout: Duration) -> Result<(), NoConnection> {
    let manager = Manager { server, algorithms, connect_timeout, pace: Arc::default() };
    manager.is_valid(&mut manager.connect().await?).await
}

impl Manager {
    async fn open(&self) -> Result<Connection, NoConnection> {
        let client = self.server.client(self.connect_timeout).await?;
        let address = client.get_connection_info().addr();
        self.open_at(&client).await.map_err(|error| NoConnection::new(&advice::of_connecting(&error, address)))
    }

    async fn open_at(&self, client: &Client) -> RedisResult<Connection> {
        // No response timeout: the deadline of the whole decision is kept outside, and a late reply finds its own call.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE);
        let mut pipe = match self.server.dial() {
            None => client.get_multiplexed_async_connection_with_config(&config).await?,
            Some(dial) => dial::connect(dial, client, config).await?,
        };
        hello::expect(&mut pipe, self.server.mode(), client.get_connection_info().addr()).await?;
        let frames = Frame::ALL.iter().filter(|_| !self.algorithms.is_empty());
        // In the pipe: one round trip for all.
        try_join_all(frames.map(|frame| {
            let (mut pipe, mut load) = (pipe.clone(), redis::cmd("SCRIPT"));
            load.arg("LOAD").arg(&script(*frame, self.algorithms).text);
            async move { pipe.send_packed_command(&load).await?.extract_error() }
        }))
        .await?;
        let health = Health {
            address: client.get_connection_info().addr().clone(),
            unanswered: AtomicU32::new(0),
            retired: AtomicBool::new(false),
            pace: self.pace.clone(),
        };
        Ok(Connection { pipe, health: Arc::new(health) })
    }
}

impl ManageConnection for Manager {
    type Connection = Pooled;
    type Error = NoConnection;

    async fn connect(&self) -> Result<Pooled, NoConnection> {
        // A server that hangs half-way must not keep the pool's place for good.
        let attempt = timeout(self.connect_timeout, self.open());
        let connection = self.pace.connect(async { attempt.await.map_err(|_| self.server.silence())? }).await?;
        Ok(Pooled(Arc::new(Mutex::new(connection))))
    }

    async fn is_valid(&self, pooled: &mut Pooled) -> Result<(), NoConnection> {
        let answer = pooled.current().send(&redis::cmd("PING")).await;
        answer.map(drop).map_err(|error| NoConnection::new(&advice::of_call(&error)))
    }

    fn has_broken(&self, pooled: &mut Pooled) -> bool {
        pooled.current().is_broken()
    }
}

/// Counts a call that is dropped before its reply came.
struct Unanswered<'a>(&'a AtomicU32);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Connection {
    fn is_broken(&self) -> bool {
        self.health.unanswered.load(Ordering::Relaxed) >= UNANSWERED || self.health.retired.load(Ordering::Relaxed)
    }

    /// Lets the pool make another in its place, if it is not the second one within a moment.
    pub fn retire(&self) {
        if self.health.pace.may_retire(monotonic()) {
            self.health.retired.store(true, Ordering::Relaxed);
        }
    }

    /// Whether its task has ended: the server closed it. Nothing is sent.
    fn is_closed(&self) -> bool {
        let mut pipe = self.pipe.clone();
        let ping = redis::cmd("PING");
        // A running task skips commands whose reply is not awaited.
        let refused = pipe.send_packed_command(&ping).now_or_never();
        let closed = refused.is_some_and(|refused| refused.is_err_and(|error| error.is_unrecoverable_error()));
        if closed {
            self.health.unanswered.store(UNANSWERED, Ordering::Relaxed);
        }
        closed
    }

    /// Sends a command, with `ASKING` before it where another node said to ask this one.
    pub async fn call(mut self, asking: bool, command: Arc<Cmd>) -> RedisResult<Value> {
        if asking { self.send_asking(&command).await } else { self.send(&command).await }
    }

    /// Sends one command and waits for its reply; an error reply is an error, but not one inside of an array.
    pub async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        let pipe = &mut self.pipe;
        whole(answered(&self.health.unanswered, pipe.send_packed_command(command)).await?)
    }

    /// The same with ASKING before it, which lets a node answer for a slot that it is just taking over.
    pub async fn send_asking(&mut self, command: &Cmd) -> RedisResult<Value> {
        let mut both = Pipeline::with_capacity(2);
        both.cmd("ASKING").add_command(command.clone());
        let pipe = &mut self.pipe;
        let mut replies = answered(&self.health.unanswered, pipe.send_packed_commands(&both, 1, 1)).await?;
        whole(replies.pop().unwrap_or(Value::Nil))
    }
}

fn whole(reply: Value) -> RedisResult<Value> {
    if let Value::ServerError(error) = reply { Err(error.into()) } else { Ok(reply) }
}

/// Counts calls without a reply, and takes a connection that broke for one that hangs.
async fn answered<T>(unanswered: &AtomicU32, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    let waiting = Unanswered(unanswered);
    let result = call.await;
    std::mem::forget(waiting);
    let broken = result.as_ref().is_err_and(RedisError::is_unrecoverable_error);
    unanswered.store(if broken { UNANSWERED } else { 0 }, Ordering::Relaxed);
    result
}
