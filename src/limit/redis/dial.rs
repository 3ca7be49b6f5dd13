//! How a byte stream to a server is opened, where it is not the redis crate that opens it.
//!
//! The redis crate opens TCP, TLS and Unix sockets itself. A [`Dial`] takes its place: the tests run the whole limiter over
//! streams in memory, with everything above the stream (login, pool, pipeline, scripts) as in production.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, RedisResult};
use tokio::io::{AsyncRead, AsyncWrite};

/// An open byte stream.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// The future of [`Dial::dial`].
pub type DialFuture = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// Opens byte streams to servers.
pub trait Dial: Debug + Send + Sync {
    /// Open a stream to the server at `address`. The caller bounds the time.
    fn dial(&self, address: &ConnectionAddr) -> DialFuture;
}

/// Connect and log in as the redis crate does for `client`, over a stream of `dial`.
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
    // Ends with the last clone of the connection.
    tokio::spawn(driver);
    Ok(connection)
}
