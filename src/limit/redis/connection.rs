//! Pooled connections to Redis: bb8 makes, keeps and replaces them; calls share them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bb8_redis::bb8::{ErrorSink, ManageConnection, Pool, RunError};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, RedisError, RedisResult, Value};
use tokio::time::Duration;

use super::hello::Mode;
use super::script::{Parts, script};
use super::{advice, hello};
use crate::limit::store::StoreError;

/// Calls given up at their deadline, with no reply between them, after which a connection counts as hung.
pub const UNANSWERED: u32 = 5;

/// Calls that may be queued on one connection before senders wait.
const PIPELINE: usize = 1024;

/// Makes connections with all scripts of the configuration loaded.
#[derive(Debug)]
pub struct Manager {
    client: Client,
    scripts: Vec<Parts>,
    connect_timeout: Duration,
}

/// A connection that many calls use at once.
#[derive(Debug, Clone)]
pub struct Connection {
    pipe: MultiplexedConnection,
    unanswered: Arc<AtomicU32>,
}

/// The connections of one worker.
#[derive(Debug)]
pub struct Connections {
    pool: Pool<Manager>,
    /// Why the last attempt to connect failed: the pool itself only says that nothing came in time.
    failure: LastFailure,
}

#[derive(Debug, Clone)]
struct LastFailure {
    address: ConnectionAddr,
    last: Arc<Mutex<Option<String>>>,
}

impl ErrorSink<RedisError> for LastFailure {
    fn sink(&self, error: RedisError) {
        let failure = advice::of_connecting(&error, &self.address);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<RedisError>> {
        Box::new(self.clone())
    }
}

/// A pool that connects when it is first used.
pub fn pool(client: Client, scripts: Vec<Parts>, size: u32, connect_timeout: Duration) -> Connections {
    let failure = LastFailure { address: client.get_connection_info().addr().clone(), last: Arc::default() };
    let pool = Pool::builder()
        .max_size(size)
        .test_on_check_out(false)
        .retry_connection(false)
        // Shorter than the deadline of the decision, so that the reason is told and not the deadline.
        .connection_timeout(connect_timeout.mul_f64(0.9))
        .error_sink(failure.boxed_clone())
        .idle_timeout(None)
        .max_lifetime(None)
        .build_unchecked(Manager { client, scripts, connect_timeout });
    Connections { pool, failure }
}

/// A connection of the pool, cloned and given back at once, so that nobody waits for a round trip of somebody else.
pub async fn checkout(connections: &Connections) -> Result<Connection, StoreError> {
    loop {
        let LastFailure { address, last } = &connections.failure;
        let pooled = connections.pool.get().await.map_err(|error| match error {
            RunError::User(error) => StoreError::Unreachable(advice::of_connecting(&error, address)),
            RunError::TimedOut => {
                let failure = last.lock().unwrap_or_else(PoisonError::into_inner).take();
                StoreError::Unreachable(failure.unwrap_or_else(|| advice::of_silence(address)))
            }
        })?;
        // A broken one is thrown away by the pool when it comes back.
        if !pooled.is_broken() {
            return Ok(pooled.clone());
        }
    }
}

/// Connects once, outside of any pool, and asks for a sign of life.
///
/// # Errors
/// In words, why a pool would have no connections.
pub async fn attempt(client: Client, scripts: Vec<Parts>, connect_timeout: Duration) -> Result<(), String> {
    let address = client.get_connection_info().addr().clone();
    let manager = Manager { client, scripts, connect_timeout };
    let answer = match manager.connect().await {
        Ok(mut connection) => manager.is_valid(&mut connection).await,
        Err(error) => Err(error),
    };
    answer.map_err(|error| advice::of_connecting(&error, &address))
}

impl ManageConnection for Manager {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> Result<Connection, RedisError> {
        // No response timeout: the deadline of the whole decision is kept outside, and a late reply finds its own call.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE);
        let mut pipe = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        hello::expect(&mut pipe, Mode::Standalone, self.client.get_connection_info().addr()).await?;
        for parts in &self.scripts {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(&script(*parts).text);
            pipe.send_packed_command(&load).await?.extract_error()?;
        }
        Ok(Connection { pipe, unanswered: Arc::default() })
    }

    async fn is_valid(&self, connection: &mut Connection) -> Result<(), RedisError> {
        connection.send(&redis::cmd("PING")).await.map(drop)
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.is_broken()
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
        self.unanswered.load(Ordering::Relaxed) >= UNANSWERED
    }

    /// Sends one command and waits for its reply; an error reply is an error.
    pub async fn send(&mut self, command: &redis::Cmd) -> RedisResult<Value> {
        let unanswered = Unanswered(&self.unanswered);
        let result = self.pipe.send_packed_command(command).await;
        std::mem::forget(unanswered);
        let broken = result.as_ref().is_err_and(RedisError::is_unrecoverable_error);
        self.unanswered.store(if broken { UNANSWERED } else { 0 }, Ordering::Relaxed);
        result?.extract_error()
    }
}
