//! Idle connections to one server, the freshest first.

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

use super::member::Member;
use super::patience::Patience;
use crate::http::flow::StreamFlow;
use crate::http::reads::{ReadLimitedStream, ReadBound};
use crate::http::upload::RequestBody;
use crate::limit::clock::monotonic;

/// Bytes that a connection buffers of a response: a head must fit, and a body is read in pieces of this size.
const BUFFER: usize = 64 * 1024;

/// Why an exchange failed, with the request if nothing of it was written.
pub(super) type Failure = TrySendError<Request<RequestBody>>;

/// A connection that carries one request at a time.
#[derive(Debug)]
pub(super) struct Connection {
    sender: SendRequest<RequestBody>,
    pub(super) patience: Patience,
    pub(super) reads: ReadBound,
}

/// Idle connections.
#[derive(Debug)]
pub(super) struct Pool {
    // std's mutex: it is never held across a wait, and one worker owns the pool.
    idle: Mutex<VecDeque<Idle>>,
    idle_timeout: Duration,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

/// Connects and leaves the connection's work to a task of the running worker.
pub(super) async fn connect(member: &Member) -> io::Result<Connection> {
    let (stream, reads) = ReadLimitedStream::new(member.connect().await?);
    let (sender, connection) = Builder::new()
        .writev(false)
        .max_buf_size(BUFFER)
        .max_header_size(BUFFER)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // Its error reaches whoever waits for the response.
    tokio::spawn(async move { connection.with_upgrades().await.ok() });
    Ok(Connection { sender, patience: Patience::default(), reads })
}

impl Pool {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Pool { idle: Mutex::default(), idle_timeout }
    }

    /// The connection that was used last, if one is fit for use.
    pub(super) fn take(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(Idle { connection, since }) = idle.pop_back() {
            if since.elapsed() >= self.idle_timeout {
                // All others are older.
                idle.clear();
            } else if connection.sender.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    pub(super) fn put(&self, connection: Connection) {
        if connection.sender.is_closed() {
            return;
        }
        let now = monotonic();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while idle.front().is_some_and(|oldest| now - oldest.since >= self.idle_timeout) {
            idle.pop_front();
        }
        idle.push_back(Idle { connection, since: now });
    }
}

impl Connection {
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, Failure>> + Send + use<> {
        self.reads.set(StreamFlow::first_reads());
        self.sender.try_send_request(request)
    }
}
