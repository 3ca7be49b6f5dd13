//! HTTP/1.1 connections to an endpoint and the pool of idle ones, last in, first out.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;

use crate::http::buffer_budget::{ReadBound, ReadLimit, ReadLimitedStream};
use crate::http::lazy_timer::LazyTimer;
use crate::http::request_body::RequestBody;
use crate::limiter::clock::monotonic;
use crate::upstream::endpoint::Endpoint;

/// Maximum response buffer of a connection in bytes. Response headers must fit, and bodies are read in pieces of up
/// to this size.
const MAX_BUFFER_SIZE: usize = 64 * 1024;

/// Error of an exchange, with the request if nothing of it was written.
pub(super) type SendError = TrySendError<Request<RequestBody>>;

/// An HTTP/1.1 connection. It serves one request at a time.
#[derive(Debug)]
pub(super) struct Http1Connection {
    sender: SendRequest<RequestBody>,
    pub(super) timer: LazyTimer,
    pub(super) reads: ReadBound,
}

/// Pool of idle connections.
#[derive(Debug)]
pub(super) struct Http1Pool {
    // A std mutex: it is not held across an await, and only one worker uses the pool.
    connections: Mutex<VecDeque<IdleConnection>>,
    idle_timeout: Duration,
}

#[derive(Debug)]
struct IdleConnection {
    connection: Http1Connection,
    idle_since: Instant,
}

/// Connect, and spawn the connection task on the current worker.
pub(super) async fn connect(endpoint: &Endpoint) -> io::Result<Http1Connection> {
    let (stream, reads) = ReadLimitedStream::new(endpoint.connect().await?);
    let (sender, connection) = Builder::new()
        .writev(false)
        .max_buf_size(MAX_BUFFER_SIZE)
        .max_header_size(MAX_BUFFER_SIZE)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // The sender of the request receives the error.
    tokio::spawn(async move { connection.with_upgrades().await.ok() });
    Ok(Http1Connection { sender, timer: LazyTimer::default(), reads })
}

impl Http1Pool {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Http1Pool { connections: Mutex::default(), idle_timeout }
    }

    /// Take the most recently used connection that is still usable.
    pub(super) fn take_idle(&self) -> Option<Http1Connection> {
        let mut idle = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(IdleConnection { connection, idle_since: since }) = idle.pop_back() {
            if since.elapsed() >= self.idle_timeout {
                // All others have been idle for longer.
                idle.clear();
            } else if connection.sender.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    pub(super) fn put(&self, connection: Http1Connection) {
        if connection.sender.is_closed() {
            return;
        }
        let now = monotonic();
        let mut idle = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        while idle.front().is_some_and(|oldest| now - oldest.idle_since >= self.idle_timeout) {
            idle.pop_front();
        }
        idle.push_back(IdleConnection { connection, idle_since: now });
    }
}

impl Http1Connection {
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
        reads: ReadLimit,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> + Send + use<> {
        self.reads.set(reads);
        self.sender.try_send_request(request)
    }
}
