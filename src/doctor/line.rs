//! A connection to examine a server by: every call is bounded, and an error says whether to go on.

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, FromRedisValue, RedisError, Value};
use tokio::time::Duration;

use crate::limit::redis::advice::{diagnose_call, diagnose_connect, diagnose_timeout};

/// Bound of connecting, and of each reply: far more than a gateway would wait, so that a slow server is told from a dead one.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// The connection.
pub(super) struct DiagnosticConnection {
    pub(super) multiplexed: MultiplexedConnection,
    pub(super) address: ConnectionAddr,
}

/// Why there is no answer.
pub(super) enum CallError {
    /// The server answered with an error; other calls may do.
    ErrorReply(RedisError),
    /// There will be no more answers; in words for people.
    ConnectionLost(String),
}

impl DiagnosticConnection {
    pub(super) async fn open(client: &Client) -> Result<DiagnosticConnection, String> {
        let address = client.get_connection_info().addr().clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CALL_TIMEOUT))
            .set_response_timeout(Some(CALL_TIMEOUT));
        match client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(multiplexed) => Ok(DiagnosticConnection { multiplexed, address }),
            Err(error) => Err(diagnose_connect(&error, &address)),
        }
    }

    /// Calls one command.
    pub(super) async fn call<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, CallError> {
        let reply = self.multiplexed.send_packed_command(command).await;
        let reply = reply.and_then(Value::extract_error).map_err(|error| self.classify_error(error))?;
        redis::from_redis_value(reply).map_err(|error| CallError::ErrorReply(error.into()))
    }

    /// Whether to go on after an error.
    pub(super) fn classify_error(&self, error: RedisError) -> CallError {
        if error.is_timeout() {
            CallError::ConnectionLost(diagnose_timeout(&self.address))
        } else if error.is_io_error() || error.is_unrecoverable_error() {
            CallError::ConnectionLost(diagnose_call(&error))
        } else {
            CallError::ErrorReply(error)
        }
    }

    /// A section of `INFO`.
    pub(super) async fn info(&mut self, section: &str) -> Result<InfoSection, CallError> {
        self.call(redis::cmd("INFO").arg(section)).await.map(InfoSection)
    }
}

/// What `INFO` says.
pub(super) struct InfoSection(String);

impl InfoSection {
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}
