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

use super::pace::ReconnectThrottle;
use super::script::{AlgorithmSet, ScriptVariant, script};
use super::server::{ConnectError, RedisEndpoint};
use super::{advice, dial, hello};
use crate::limit::clock::monotonic;
use crate::limit::store::StoreError;

/// Calls given up at their deadline, with no reply between them, after which a connection counts as hung.
pub const MAX_UNANSWERED_CALLS: u32 = 5;

/// Calls that may be queued on one connection before senders wait.
const PIPELINE_CAPACITY: usize = 1024;

/// Makes connections with all scripts of the configuration loaded.
#[derive(Debug, Clone)]
pub struct Manager {
    server: RedisEndpoint,
    algorithms: AlgorithmSet,
    connect_timeout: Duration,
    throttle: Arc<ReconnectThrottle>,
}

/// A connection that many calls use at once.
#[derive(Debug, Clone)]
pub struct Connection {
    multiplexed: MultiplexedConnection,
    health: Arc<ConnectionHealth>,
}

/// A connection of the pool. It can be replaced while requests use the earlier one.
#[derive(Debug, Clone)]
pub struct Pooled(Arc<Mutex<Connection>>);

/// What is known of a connection.
#[derive(Debug)]
struct ConnectionHealth {
    address: ConnectionAddr,
    unanswered_calls: AtomicU32,
    /// Whether it works, but no longer leads to where it should.
    is_retired: AtomicBool,
    throttle: Arc<ReconnectThrottle>,
}

/// The connections of one worker.
#[derive(Debug)]
pub struct Connections {
    pool: Pool<Manager>,
    size: u32,
    manager: Manager,
    last_error: LastConnectError,
    /// What to say when not even a failure came in time.
    timeout_error: ConnectError,
    /// Whether there was one yet.
    has_connected: AtomicBool,
}

/// Why the last attempt to connect failed. The pool itself lets those who wait for it wait on.
#[derive(Debug, Clone, Default)]
struct LastConnectError(Arc<(Mutex<Option<ConnectError>>, Notify)>);

impl LastConnectError {
    fn take(&self) -> Option<ConnectError> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl ErrorSink<ConnectError> for LastConnectError {
    fn sink(&self, error: ConnectError) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.0.1.notify_waiters();
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<ConnectError>> {
        Box::new(self.clone())
    }
}

/// A pool that connects when it is first used.
pub fn new_pool(server: RedisEndpoint, algorithms: AlgorithmSet, size: u32, connect_timeout: Duration) -> Connections {
    let (last_error, timeout_error) = (LastConnectError::default(), server.timeout_error());
    let manager = Manager { server, algorithms, connect_timeout, throttle: Arc::default() };
    let pool = Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .retry_connection(false)
        // Longer than an attempt, so that its reason is told.
        .connection_timeout(connect_timeout + connect_timeout / 8)
        .error_sink(last_error.boxed_clone())
        .idle_timeout(None)
        .max_lifetime(None)
        .build_unchecked(manager.clone());
    Connections { pool, size, manager, last_error, timeout_error, has_connected: AtomicBool::new(false) }
}

impl Connections {
    /// There is no connection in time, and no attempt has failed. A server that was there is still being connected to, which takes
    /// several round trips; that is no outage.
    pub fn checkout_timeout(&self) -> StoreError {
        if self.has_connected.load(Ordering::Relaxed) {
            StoreError::Overloaded
        } else {
            StoreError::Unreachable(self.timeout_error.to_string())
        }
    }

    /// Replaces idle connections that the server has closed, and those to a server that is not the master any more, and opens those that
    /// are missing. Requests use the earlier connections until the new ones are open.
    pub async fn maintain(&self) {
        let master = self.manager.server.current_master(self.manager.connect_timeout).await;
        let is_outdated = |connection: &Connection| {
            master.as_ref().is_some_and(|master| *master.get_connection_info().addr() != connection.health.address)
        };
        let open_connections = self.pool.state().connections;
        if open_connections == 0 && checkout(self).await.is_err() {
            return;
        }
        for _ in open_connections.max(1)..self.size {
            // A checkout gives its connection back at once: the pool itself would never open a second one.
            let Ok(added) = self.manager.connect().await else { return };
            if self.pool.add(added).is_err() {
                break;
            }
        }
        for _ in 0..open_connections {
            // The pool hands out the connection that was given back first.
            let Some(Ok(pooled)) = self.pool.get().now_or_never() else { return };
            let pooled = Pooled::clone(&pooled);
            let connection = pooled.current();
            if connection.is_closed() || is_outdated(&connection) {
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
        let connect_failed = connections.last_error.0.1.notified();
        let pooled = tokio::select! {
            biased;
            pooled = connections.pool.get() => pooled,
            () = connect_failed => Err(RunError::TimedOut),
        };
        let pooled = pooled.map_err(|error| {
            let connect_error = match error {
                RunError::User(error) => Some(error),
                RunError::TimedOut => connections.last_error.take(),
            };
            StoreError::Unreachable(connect_error.unwrap_or_else(|| connections.timeout_error.clone()).to_string())
        })?;
        // A broken one is thrown away by the pool when it comes back.
        let connection = pooled.current();
        if !connection.is_broken() {
            connections.has_connected.store(true, Ordering::Relaxed);
            return Ok(connection);
        }
    }
}

/// Connects once, outside of any pool, and asks for a sign of life.
///
/// # Errors
/// In words, why a pool would have no connections.
pub async fn try_connect(
    server: RedisEndpoint,
    algorithms: AlgorithmSet,
    connect_timeout: Duration,
) -> Result<(), ConnectError> {
    let manager = Manager { server, algorithms, connect_timeout, throttle: Arc::default() };
    manager.is_valid(&mut manager.connect().await?).await
}

impl Manager {
    async fn open(&self) -> Result<Connection, ConnectError> {
        let client = self.server.client(self.connect_timeout).await?;
        let address = client.get_connection_info().addr();
        self.open_at(&client).await.map_err(|error| ConnectError::new(&advice::diagnose_connect(&error, address)))
    }

    async fn open_at(&self, client: &Client) -> RedisResult<Connection> {
        // No response timeout: the deadline of the whole decision is kept outside, and a late reply finds its own call.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE_CAPACITY);
        let mut multiplexed = match self.server.dial() {
            None => client.get_multiplexed_async_connection_with_config(&config).await?,
            Some(dial) => dial::connect_dialed(dial, client, config).await?,
        };
        hello::verify_server(&mut multiplexed, self.server.mode(), client.get_connection_info().addr()).await?;
        let variants = ScriptVariant::ALL.iter().filter(|_| !self.algorithms.is_empty());
        // In the pipe: one round trip for all.
        try_join_all(variants.map(|frame| {
            let (mut pipe, mut load) = (multiplexed.clone(), redis::cmd("SCRIPT"));
            load.arg("LOAD").arg(&script(*frame, self.algorithms).source);
            async move { pipe.send_packed_command(&load).await?.extract_error() }
        }))
        .await?;
        let health = ConnectionHealth {
            address: client.get_connection_info().addr().clone(),
            unanswered_calls: AtomicU32::new(0),
            is_retired: AtomicBool::new(false),
            throttle: self.throttle.clone(),
        };
        Ok(Connection { multiplexed, health: Arc::new(health) })
    }
}

impl ManageConnection for Manager {
    type Connection = Pooled;
    type Error = ConnectError;

    async fn connect(&self) -> Result<Pooled, ConnectError> {
        // A server that hangs half-way must not keep the pool's place for good.
        let attempt = timeout(self.connect_timeout, self.open());
        let connection =
            self.throttle.throttle(async { attempt.await.map_err(|_| self.server.timeout_error())? }).await?;
        Ok(Pooled(Arc::new(Mutex::new(connection))))
    }

    async fn is_valid(&self, pooled: &mut Pooled) -> Result<(), ConnectError> {
        let reply = pooled.current().send(&redis::cmd("PING")).await;
        reply.map(drop).map_err(|error| ConnectError::new(&advice::diagnose_call(&error)))
    }

    fn has_broken(&self, pooled: &mut Pooled) -> bool {
        pooled.current().is_broken()
    }
}

/// Counts a call that is dropped before its reply came.
struct TimeoutCounter<'a>(&'a AtomicU32);

impl Drop for TimeoutCounter<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Connection {
    fn is_broken(&self) -> bool {
        self.health.unanswered_calls.load(Ordering::Relaxed) >= MAX_UNANSWERED_CALLS
            || self.health.is_retired.load(Ordering::Relaxed)
    }

    /// Lets the pool make another in its place, if it is not the second one within a moment.
    pub fn request_replacement(&self) {
        if self.health.throttle.may_retire(monotonic()) {
            self.health.is_retired.store(true, Ordering::Relaxed);
        }
    }

    /// Whether its task has ended: the server closed it. Nothing is sent.
    fn is_closed(&self) -> bool {
        let mut multiplexed = self.multiplexed.clone();
        let ping = redis::cmd("PING");
        // A running task skips commands whose reply is not awaited.
        let send_error = multiplexed.send_packed_command(&ping).now_or_never();
        let closed = send_error.is_some_and(|refused| refused.is_err_and(|error| error.is_unrecoverable_error()));
        if closed {
            self.health.unanswered_calls.store(MAX_UNANSWERED_CALLS, Ordering::Relaxed);
        }
        closed
    }

    /// Sends a command, with `ASKING` before it where another node said to ask this one.
    pub async fn call(mut self, asking: bool, command: Arc<Cmd>) -> RedisResult<Value> {
        if asking { self.send_asking(&command).await } else { self.send(&command).await }
    }

    /// Sends one command and waits for its reply; an error reply is an error, but not one inside of an array.
    pub async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        let multiplexed = &mut self.multiplexed;
        into_reply(track_reply(&self.health.unanswered_calls, multiplexed.send_packed_command(command)).await?)
    }

    /// The same with ASKING before it, which lets a node answer for a slot that it is just taking over.
    pub async fn send_asking(&mut self, command: &Cmd) -> RedisResult<Value> {
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline.cmd("ASKING").add_command(command.clone());
        let multiplexed = &mut self.multiplexed;
        let mut replies =
            track_reply(&self.health.unanswered_calls, multiplexed.send_packed_commands(&pipeline, 1, 1)).await?;
        into_reply(replies.pop().unwrap_or(Value::Nil))
    }
}

fn into_reply(reply: Value) -> RedisResult<Value> {
    if let Value::ServerError(error) = reply { Err(error.into()) } else { Ok(reply) }
}

/// Counts calls without a reply, and takes a connection that broke for one that hangs.
async fn track_reply<T>(unanswered_calls: &AtomicU32, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    let counter = TimeoutCounter(unanswered_calls);
    let result = call.await;
    std::mem::forget(counter);
    let is_broken = result.as_ref().is_err_and(RedisError::is_unrecoverable_error);
    unanswered_calls.store(if is_broken { MAX_UNANSWERED_CALLS } else { 0 }, Ordering::Relaxed);
    result
}
