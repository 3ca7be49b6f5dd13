//! A connection to examine a server by: every call is bounded, and an error says whether to go on.

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, FromRedisValue, RedisError, Value};
use tokio::time::Duration;

use crate::limit::redis::advice::{diagnose_call, diagnose_connect, diagnose_timeout};

/// Bound of connecting, and of each reply: far more than a gateway would wait, so that a slow server is told from a dead one.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The connection.
pub(super) struct Line {
    pub(super) pipe: MultiplexedConnection,
    pub(super) address: ConnectionAddr,
}

/// Why there is no answer.
pub(super) enum Failure {
    /// The server answered with an error; other calls may do.
    Refused(RedisError),
    /// There will be no more answers; in words for people.
    Lost(String),
}

impl Line {
    pub(super) async fn open(client: &Client) -> Result<Line, String> {
        let address = client.get_connection_info().addr().clone();
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(PATIENCE)).set_response_timeout(Some(PATIENCE));
        match client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(pipe) => Ok(Line { pipe, address }),
            Err(error) => Err(diagnose_connect(&error, &address)),
        }
    }

    /// Calls one command.
    pub(super) async fn ask<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, Failure> {
        let reply = self.pipe.send_packed_command(command).await;
        let reply = reply.and_then(Value::extract_error).map_err(|error| self.failure(error))?;
        redis::from_redis_value(reply).map_err(|error| Failure::Refused(error.into()))
    }

    /// Whether to go on after an error.
    pub(super) fn failure(&self, error: RedisError) -> Failure {
        if error.is_timeout() {
            Failure::Lost(diagnose_timeout(&self.address))
        } else if error.is_io_error() || error.is_unrecoverable_error() {
            Failure::Lost(diagnose_call(&error))
        } else {
            Failure::Refused(error)
        }
    }

    /// A section of `INFO`.
    pub(super) async fn info(&mut self, section: &str) -> Result<Info, Failure> {
        self.ask(redis::cmd("INFO").arg(section)).await.map(Info)
    }
}

/// What `INFO` says.
pub(super) struct Info(String);

impl Info {
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}
