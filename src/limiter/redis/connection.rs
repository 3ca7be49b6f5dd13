//! The connection pool: bb8 opens and replaces connections, and concurrent calls share them.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bb8_redis::bb8::{ErrorSink, ManageConnection, Pool, RunError};
use futures_util::FutureExt;
use futures_util::future::try_join_all;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ErrorKind, Pipeline, RedisError, RedisResult, Value};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::clock::monotonic;
use crate::limiter::redis::error;
use crate::limiter::redis::script::{AlgorithmSet, all_scripts};
use crate::limiter::redis::server::{ConnectError, RedisEndpoint};
use crate::limiter::verdict::StoreError;

/// Number of consecutive calls without a reply after which a connection counts as hung and is replaced.
const MAX_UNANSWERED_CALLS: u32 = 5;

/// Maximum number of calls that are queued on one connection. Further senders wait.
const PIPELINE_CAPACITY: usize = 1024;

/// Opens connections and loads all scripts of the configuration on them.
#[derive(Debug, Clone)]
pub struct Manager {
    server: RedisEndpoint,
    algorithms: AlgorithmSet,
    connect_timeout: Duration,
    throttle: Arc<ReconnectThrottle>,
}

/// A multiplexed connection. Clones share it.
#[derive(Debug, Clone)]
pub struct Connection {
    multiplexed: MultiplexedConnection,
    health: Arc<ConnectionHealth>,
}

/// A connection of the pool. The pool can replace the connection while requests use the previous one.
#[derive(Debug, Clone)]
pub struct Pooled(Arc<Mutex<Connection>>);

/// The health of a connection, shared by its clones.
#[derive(Debug)]
struct ConnectionHealth {
    address: ConnectionAddr,
    unanswered_calls: AtomicU32,
    /// Whether the connection must be replaced although it works, for example because its server has become a replica.
    is_retired: AtomicBool,
    throttle: Arc<ReconnectThrottle>,
}

/// The connections of one worker to one server.
///
/// bb8 opens connections, counts them and replaces connections that [`Manager::has_broken`] reports. bb8 cannot do the
/// following:
/// - fail a checkout when the attempt to connect has failed: bb8 waits for its timeout ([`ConnectFailures`]);
/// - limit the rate of attempts: each checkout without a connection starts an attempt ([`ReconnectThrottle`]);
/// - open a second connection, because each checkout returns the first connection at once. The bb8 setting `min_idle`
///   would open more connections, but it connects when the pool is built, and again at each checkout after a failure
///   ([`Connections::maintain`]);
/// - detect that an idle connection was closed, without a PING at each checkout ([`Connections::maintain`]).
#[derive(Debug)]
pub struct Connections {
    pool: Pool<Manager>,
    size: u32,
    manager: Manager,
    /// The failure of the last attempt to connect.
    failures: watch::Receiver<Option<ConnectError>>,
    /// The error for a checkout that gets no connection in time although no attempt to connect has failed.
    timeout_error: ConnectError,
    /// Whether there has ever been a connection.
    has_connected: AtomicBool,
}

/// Receives the errors of attempts to connect from bb8.
#[derive(Debug, Clone)]
struct ConnectFailures(watch::Sender<Option<ConnectError>>);

impl ErrorSink<ConnectError> for ConnectFailures {
    fn sink(&self, error: ConnectError) {
        self.0.send_replace(Some(error));
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<ConnectError>> {
        Box::new(self.clone())
    }
}

/// Create a pool that connects when it is first used.
pub fn new_pool(server: RedisEndpoint, algorithms: AlgorithmSet, size: u32, connect_timeout: Duration) -> Connections {
    let (failure_sender, failures) = watch::channel(None);
    let timeout_error = server.timeout_error();
    let manager = Manager { server, algorithms, connect_timeout, throttle: Arc::default() };
    let pool = Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .retry_connection(false)
        // Let bb8 wait longer than an attempt to connect takes, so that the error of the attempt is reported instead of
        // a timeout.
        .connection_timeout(connect_timeout + connect_timeout / 8)
        .error_sink(Box::new(ConnectFailures(failure_sender)))
        .idle_timeout(None)
        .max_lifetime(None)
        .build_unchecked(manager.clone());
    Connections { pool, size, manager, failures, timeout_error, has_connected: AtomicBool::new(false) }
}

impl Connections {
    /// Return the error for a checkout that timed out without a failed attempt. If the gateway has connected to the
    /// server before, a new connection is probably still being opened. This takes several round trips, and may take
    /// longer than the timeout of the checkout even if the server is healthy. The error is therefore an overload, not an
    /// outage.
    pub fn checkout_timeout(&self) -> StoreError {
        if self.has_connected.load(Ordering::Relaxed) {
            StoreError::Overloaded
        } else {
            StoreError::NotConnected(self.timeout_error.to_string())
        }
    }

    /// Open missing connections. Replace idle connections that the server has closed, and connections to a server that
    /// is not the master. Requests use the previous connections until the new ones are open.
    pub async fn maintain(&self) {
        let open_connections = self.pool.state().connections;
        if open_connections == 0 && checkout(self).await.is_err() {
            return;
        }
        for _ in open_connections.max(1)..self.size {
            // bb8 would never open a second connection, because each checkout returns the first one at once.
            let Ok(added) = self.manager.connect().await else { return };
            if self.pool.add(added).is_err() {
                break;
            }
        }
        for _ in 0..open_connections {
            // Check each connection once: bb8 hands out the connection that was returned first, so the loop gets all of
            // them.
            let Some(Ok(pooled)) = self.pool.get().now_or_never() else { return };
            let pooled = Pooled::clone(&pooled);
            let connection = pooled.current();
            if !self.is_usable(&connection).await {
                let Ok(replacement) = self.manager.connect().await else { return };
                pooled.replace(&replacement);
            }
        }
    }

    /// Return whether a connection is open and leads to the master that the Sentinels report.
    pub async fn is_usable(&self, connection: &Connection) -> bool {
        let master = self.manager.server.current_master(self.manager.connect_timeout).await;
        !connection.is_closed()
            && master.is_none_or(|master| *master.get_connection_info().addr() == connection.health.address)
    }

    /// Open a connection that is not in the pool, for probes. It has loaded no scripts.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the server did not reply within the connect timeout. [`StoreError::NotConnected`] if
    /// the attempt to connect failed, or if an attempt has failed just before.
    pub async fn open_probe(&self) -> Result<Connection, StoreError> {
        let manager = Manager { algorithms: AlgorithmSet::default(), ..self.manager.clone() };
        let opened = timeout(self.manager.connect_timeout, manager.connect()).await.map_err(|_| StoreError::Timeout)?;
        opened.map(|pooled| pooled.current()).map_err(|error| StoreError::NotConnected(error.to_string()))
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

/// Borrow a connection from the pool, clone it and return it at once, so that concurrent calls share the connection.
///
/// # Errors
/// There is no connection, and the attempt to connect failed or timed out.
pub async fn checkout(connections: &Connections) -> Result<Connection, StoreError> {
    let mut failures = connections.failures.clone();
    failures.mark_unchanged();
    loop {
        let failure = tokio::select! {
            biased;
            pooled = connections.pool.get() => match pooled {
                Ok(pooled) => {
                    // Return the connection to the pool, which drops it if it is broken.
                    let connection = pooled.current();
                    if !connection.is_broken() {
                        connections.has_connected.store(true, Ordering::Relaxed);
                        return Ok(connection);
                    }
                    continue;
                }
                Err(RunError::User(error)) => Some(error),
                Err(RunError::TimedOut) => None,
            },
            _ = failures.changed() => failures.borrow().clone(),
        };
        let failure = failure.unwrap_or_else(|| connections.timeout_error.clone());
        return Err(StoreError::NotConnected(failure.to_string()));
    }
}

/// Connect once without a pool, and send a PING.
///
/// # Errors
/// The connection cannot be opened, or the server does not reply to PING. A pool would fail for the same reasons.
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
        self.open_at(&client).await.map_err(|error| ConnectError::new(&error::diagnose_connect(&error, address)))
    }

    async fn open_at(&self, client: &Client) -> RedisResult<Connection> {
        // The client has no response timeout: the batcher checks the deadline, and a late reply must still be matched
        // with its call.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE_CAPACITY);
        let mut multiplexed = match self.server.dial() {
            None => client.get_multiplexed_async_connection_with_config(&config).await?,
            Some(dial) => connect_dialed(dial, client, config).await?,
        };
        verify_server(&mut multiplexed, self.server.mode(), client.get_connection_info().addr()).await?;
        // The commands are pipelined, so that all scripts need only one round trip.
        let scripts = all_scripts(self.algorithms).filter(|_| !self.algorithms.is_empty());
        try_join_all(scripts.map(|script| {
            let mut pipe = multiplexed.clone();
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(&script.source);
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
        // Limit the time of an attempt, because bb8 counts an attempt that hangs as one of the pool's connections.
        let attempt = timeout(self.connect_timeout, self.open());
        let connection =
            self.throttle.throttle(async { attempt.await.map_err(|_| self.server.timeout_error())? }).await?;
        Ok(Pooled(Arc::new(Mutex::new(connection))))
    }

    async fn is_valid(&self, pooled: &mut Pooled) -> Result<(), ConnectError> {
        let reply = pooled.current().send(&redis::cmd("PING")).await;
        reply.map(drop).map_err(|error| ConnectError::new(&error::diagnose_call(&error)))
    }

    fn has_broken(&self, pooled: &mut Pooled) -> bool {
        pooled.current().is_broken()
    }
}

/// Counts a call as unanswered if it is dropped before its reply has arrived.
struct UnansweredCall<'a>(Option<&'a AtomicU32>);

impl Drop for UnansweredCall<'_> {
    fn drop(&mut self) {
        if let Some(unanswered_calls) = self.0 {
            unanswered_calls.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Connection {
    fn is_broken(&self) -> bool {
        self.health.unanswered_calls.load(Ordering::Relaxed) >= MAX_UNANSWERED_CALLS
            || self.health.is_retired.load(Ordering::Relaxed)
    }

    /// Ask the pool to replace the connection, at most once per [`RECONNECT_INTERVAL`].
    pub fn request_replacement(&self) {
        if self.health.throttle.may_retire(monotonic()) {
            self.health.is_retired.store(true, Ordering::Relaxed);
        }
    }

    /// Count a call whose reply is late, but may still arrive, as unanswered. If the reply arrives, the count starts
    /// again at 0.
    pub fn count_late_reply(&self) {
        self.health.unanswered_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Return whether the server closed the connection. No command is sent.
    fn is_closed(&self) -> bool {
        let mut multiplexed = self.multiplexed.clone();
        let ping = redis::cmd("PING");
        // If the connection is open, its driver task skips this command, because nothing waits for the reply.
        let send_error = multiplexed.send_packed_command(&ping).now_or_never();
        let closed = send_error.is_some_and(|refused| refused.is_err_and(|error| error.is_unrecoverable_error()));
        if closed {
            self.health.unanswered_calls.store(MAX_UNANSWERED_CALLS, Ordering::Relaxed);
        }
        closed
    }

    /// Send a command. If another node redirected the command to this node with `ASK`, `asking` must be true: `ASKING`
    /// is then sent first.
    pub async fn call(mut self, asking: bool, command: Arc<Cmd>) -> RedisResult<Value> {
        if asking { self.send_asking(&command).await } else { self.send(&command).await }
    }

    /// Send a command and return its reply. An error reply is returned as an error. An error inside an array is part of
    /// the returned value.
    pub async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        let multiplexed = &mut self.multiplexed;
        into_reply(track_reply(&self.health.unanswered_calls, multiplexed.send_packed_command(command)).await?)
    }

    /// Send a command preceded by `ASKING`, so that a node executes the command for a slot that it is importing.
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

/// Await `call` and count consecutive calls without a reply. If the connection is lost, set the count to
/// [`MAX_UNANSWERED_CALLS`], so that the connection is replaced.
async fn track_reply<T>(unanswered_calls: &AtomicU32, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    let mut pending = UnansweredCall(Some(unanswered_calls));
    let result = call.await;
    pending.0 = None;
    let is_broken = result.as_ref().is_err_and(RedisError::is_unrecoverable_error);
    unanswered_calls.store(if is_broken { MAX_UNANSWERED_CALLS } else { 0 }, Ordering::Relaxed);
    result
}

// Byte streams that are not opened by the redis crate. The redis crate opens TCP, TLS and Unix sockets itself. With a
// [`Dial`], tests run the whole limiter over streams in memory. Login, pool, pipeline and scripts are the same as in
// production.

/// An open byte stream.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// The future of [`Dial::dial`].
pub type DialFuture = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// Opens byte streams to servers.
pub trait Dial: Debug + Send + Sync {
    /// Open a stream to the server at `address`. The caller applies a timeout.
    fn dial(&self, address: &ConnectionAddr) -> DialFuture;
}

/// Connect and log in as the redis crate does for `client`, over a stream that `dial` opens.
///
/// # Errors
/// The stream cannot be opened, or the server rejects the login.
pub(super) async fn connect_dialed(
    dial: &Arc<dyn Dial>,
    client: &Client,
    config: AsyncConnectionConfig,
) -> RedisResult<MultiplexedConnection> {
    let info = client.get_connection_info();
    let stream = dial.dial(info.addr()).await?;
    let (connection, driver) = MultiplexedConnection::new_with_config(info.redis_settings(), stream, config).await?;
    // Spawn the driver of the connection, which ends when the last clone of the connection is dropped.
    tokio::spawn(driver);
    Ok(connection)
}

// The rate of attempts to connect.

/// Minimum interval between attempts to connect after two failed attempts.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(500);

/// Limits how often one worker connects to one server after a failure.
#[derive(Debug, Default)]
pub struct ReconnectThrottle {
    /// `None` if the last completed attempt succeeded.
    last_failure: Mutex<Option<FailedAttempt>>,
    /// Time at which a working connection was last replaced.
    last_retired_at: Mutex<Option<Instant>>,
}

/// The last attempt that failed.
#[derive(Debug)]
struct FailedAttempt {
    error: ConnectError,
    failed_at: Instant,
    /// Start of the last attempt, which may be in progress.
    last_started_at: Instant,
    /// Whether an attempt that began after a failure has failed, too.
    is_repeated: bool,
}

impl ReconnectThrottle {
    /// Run `attempt`, unless the server cannot be reached and the last attempt began less than [`RECONNECT_INTERVAL`]
    /// ago. After the first failure, the next attempt is made at once: a server that closes all of its connections, for
    /// example because of `CLIENT KILL`, also closes those that are being opened, and accepts the next one.
    ///
    /// # Errors
    /// The error of this attempt. If no attempt is made, the error of the previous one.
    pub async fn throttle<T>(&self, attempt: impl Future<Output = Result<T, ConnectError>>) -> Result<T, ConnectError> {
        let started_at = monotonic();
        self.try_begin(started_at)?;
        let result = attempt.await;
        let mut last_failure = lock(&self.last_failure);
        *last_failure = result.as_ref().err().map(|error| FailedAttempt {
            error: error.clone(),
            failed_at: monotonic(),
            last_started_at: started_at,
            is_repeated: last_failure.as_ref().is_some_and(|last| last.is_repeated || last.failed_at <= started_at),
        });
        result
    }

    /// Return whether a working connection may be replaced now.
    pub fn may_retire(&self, now: Instant) -> bool {
        let mut last_retired_at = lock(&self.last_retired_at);
        let is_due = last_retired_at.is_none_or(|last| now.saturating_duration_since(last) >= RECONNECT_INTERVAL);
        if is_due {
            *last_retired_at = Some(now);
        }
        is_due
    }

    fn try_begin(&self, now: Instant) -> Result<(), ConnectError> {
        match &mut *lock(&self.last_failure) {
            Some(last)
                if last.is_repeated && now.saturating_duration_since(last.last_started_at) < RECONNECT_INTERVAL =>
            {
                Err(last.error.clone())
            }
            Some(last) => {
                last.last_started_at = now;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// The kind of a server, and whether it matches the URL of the store.

/// The mode of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerMode {
    /// A single server, with or without replicas.
    Standalone,
    /// A node of a cluster.
    Cluster,
    /// A Sentinel. A Sentinel keeps no data.
    Sentinel,
}

/// The replication role of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerRole {
    /// Accepts writes.
    Master,
    /// Follows a master and rejects writes.
    Replica,
}

/// The reply to `HELLO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloReply {
    /// Name of the server: `redis`, `valkey`, …
    pub server: String,
    /// Version, such as `7.0.15`.
    pub version: String,
    /// Mode of the server.
    pub mode: ServerMode,
    /// Replication role of the server. A Sentinel has no role.
    pub role: Option<ServerRole>,
}

impl HelloReply {
    /// Parse the flat array of RESP2 or the map of RESP3. Return `None` if a required field is missing.
    pub fn read(reply: &Value) -> Option<HelloReply> {
        let field = |name: &str| match reply {
            Value::Array(fields) => {
                let found = fields.chunks_exact(2).find(|pair| text(&pair[0]) == Some(name));
                found.and_then(|pair| text(&pair[1]))
            }
            Value::Map(fields) => {
                fields.iter().find(|(key, _)| text(key) == Some(name)).and_then(|(_, value)| text(value))
            }
            _ => None,
        };
        let mode = match field("mode")? {
            "standalone" => ServerMode::Standalone,
            "cluster" => ServerMode::Cluster,
            "sentinel" => ServerMode::Sentinel,
            _ => return None,
        };
        let role = match field("role") {
            Some("master") => Some(ServerRole::Master),
            Some("replica" | "slave") => Some(ServerRole::Replica),
            _ => None,
        };
        Some(HelloReply { server: field("server")?.to_owned(), version: field("version")?.to_owned(), mode, role })
    }

    /// Return why a server cannot be used as `expected`, and what to do. Return `None` if the server can be used.
    pub fn mismatch(&self, expected: ServerMode, address: &ConnectionAddr) -> Option<String> {
        Some(match (self.mode, expected) {
            (ServerMode::Standalone, ServerMode::Standalone) if self.role == Some(ServerRole::Replica) => format!(
                "{address} is a replica; give the address of its master, or redis+sentinel://HOST:PORT/MASTER to follow it"
            ),
            (ServerMode::Standalone, ServerMode::Standalone)
            | (ServerMode::Cluster, ServerMode::Cluster)
            | (ServerMode::Sentinel, ServerMode::Sentinel) => return None,
            (ServerMode::Sentinel, _) => {
                format!("{address} is a Sentinel; use redis+sentinel://{address}/MASTER, with the name of the master")
            }
            (ServerMode::Cluster, _) => format!("{address} is a node of a cluster; use redis+cluster://{address}"),
            (ServerMode::Standalone, ServerMode::Cluster) => {
                format!("{address} is not a node of a cluster; use redis://{address}")
            }
            (ServerMode::Standalone, ServerMode::Sentinel) => {
                format!("{address} is not a Sentinel; use redis://{address}")
            }
        })
    }
}

/// Check that the server has the expected mode, if its reply contains the mode.
///
/// # Errors
/// The server has another mode, requires a login, or the connection was lost. A server that rejects HELLO is accepted.
pub async fn verify_server(
    pipe: &mut MultiplexedConnection,
    expected: ServerMode,
    address: &ConnectionAddr,
) -> RedisResult<()> {
    let reply = pipe.send_packed_command(&redis::cmd("HELLO")).await?;
    // Report NOAUTH here: Redis closes unauthenticated connections that send long arguments, such as scripts, so the
    // same error reply to a script may be lost.
    if let Value::ServerError(error) = &reply
        && error.code() == "NOAUTH"
    {
        return Err(error.clone().into());
    }
    match HelloReply::read(&reply).and_then(|hello| hello.mismatch(expected, address)) {
        Some(mismatch) => Err(RedisError::from((ErrorKind::InvalidClientConfig, "another kind of server", mismatch))),
        None => Ok(()),
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod throttle_tests {
    use super::*;

    fn connect_error() -> ConnectError {
        ConnectError::new("nothing listens there")
    }

    #[tokio::test]
    async fn two_reconnects_per_second_after_a_failure() {
        let throttle = ReconnectThrottle::default();
        let now = monotonic();
        assert!(throttle.try_begin(now).is_ok() && throttle.try_begin(now).is_ok(), "no attempt has failed yet");
        for _ in 0..2 {
            assert!(throttle.throttle(async { Err::<(), _>(connect_error()) }).await.is_err());
        }
        let failed = monotonic();
        let mut attempts = Vec::new();
        for ms in 0..5000 {
            match throttle.try_begin(failed + Duration::from_millis(ms)) {
                Ok(()) => attempts.push(ms),
                Err(error) => assert_eq!(error.to_string(), "nothing listens there", "the reason is reported"),
            }
        }
        assert!((9..=10).contains(&attempts.len()), "{attempts:?}");
        assert!(attempts.windows(2).all(|pair| pair[1] - pair[0] >= 500), "{attempts:?}");
    }

    #[tokio::test]
    async fn failures_of_concurrent_attempts_delay_no_further_attempt() {
        let throttle = ReconnectThrottle::default();
        let (fail, failure) = watch::channel(());
        let attempt = || {
            let mut failure = failure.clone();
            throttle.throttle(async move {
                failure.changed().await.ok();
                Err::<(), _>(connect_error())
            })
        };
        let end = async { fail.send_replace(()) };
        let (first, second, ()) = tokio::join!(attempt(), attempt(), end);
        assert!(first.is_err() && second.is_err());
        assert!(throttle.throttle(async { Ok(()) }).await.is_ok(), "the server accepts connections again");
    }

    #[tokio::test]
    async fn success_ends_the_throttling() {
        let throttle = ReconnectThrottle::default();
        let earlier = monotonic().checked_sub(RECONNECT_INTERVAL).unwrap();
        *lock(&throttle.last_failure) = Some(FailedAttempt {
            error: connect_error(),
            failed_at: earlier,
            last_started_at: earlier,
            is_repeated: true,
        });
        assert!(throttle.throttle(async { Ok(()) }).await.is_ok());
        assert!(throttle.try_begin(monotonic()).is_ok() && throttle.try_begin(monotonic()).is_ok());
    }

    #[test]
    fn two_retired_connections_per_second() {
        let throttle = ReconnectThrottle::default();
        let now = monotonic();
        let retired: Vec<_> = (0..1000).filter(|ms| throttle.may_retire(now + Duration::from_millis(*ms))).collect();
        assert_eq!(retired, [0, 500]);
    }
}

#[cfg(test)]
mod hello_tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn hello(mode: &str, role: Option<&str>) -> HelloReply {
        let mut pairs = vec![("server", "redis"), ("version", "7.0.15"), ("mode", mode)];
        pairs.extend(role.map(|role| ("role", role)));
        let flat = pairs.iter().flat_map(|(key, value)| [bulk(key), bulk(value)]).collect();
        let map = pairs.iter().map(|(key, value)| (Value::SimpleString((*key).to_owned()), bulk(value))).collect();
        let read = HelloReply::read(&Value::Array(flat)).unwrap();
        assert_eq!(Some(&read), HelloReply::read(&Value::Map(map)).as_ref(), "RESP2 and RESP3");
        read
    }

    #[test]
    fn wrong_server_kind_names_the_right_url() {
        let address = ConnectionAddr::Tcp("h".to_owned(), 1);
        let single = hello("standalone", Some("master"));
        let replica = hello("standalone", Some("replica"));
        let node = hello("cluster", Some("replica"));
        let sentinel = hello("sentinel", None);
        for (hello, wanted, expected) in [
            (&single, ServerMode::Standalone, None),
            (&single, ServerMode::Cluster, Some("h:1 is not a node of a cluster; use redis://h:1")),
            (&single, ServerMode::Sentinel, Some("h:1 is not a Sentinel; use redis://h:1")),
            (&replica, ServerMode::Standalone, Some("h:1 is a replica; give the address of its master")),
            (&node, ServerMode::Cluster, None),
            (&node, ServerMode::Standalone, Some("h:1 is a node of a cluster; use redis+cluster://h:1")),
            (&sentinel, ServerMode::Sentinel, None),
            (&sentinel, ServerMode::Cluster, Some("h:1 is a Sentinel; use redis+sentinel://h:1/MASTER")),
        ] {
            let mismatch = hello.mismatch(wanted, &address);
            match expected {
                None => assert_eq!(mismatch, None, "{hello:?}"),
                Some(expected) => {
                    assert!(mismatch.as_ref().is_some_and(|text| text.starts_with(expected)), "{mismatch:?}")
                }
            }
        }
    }

    #[test]
    fn incomplete_hello_is_accepted() {
        for reply in [Value::Okay, Value::Nil, Value::Array(Vec::new()), Value::Array(vec![bulk("mode"), bulk("new")])]
        {
            assert_eq!(HelloReply::read(&reply), None, "{reply:?}");
        }
    }
}
