//! HTTP/2 connections to an endpoint (RFC 9113), which all requests of a worker share.

use std::error::Error;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::uri::Scheme;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::Mutex;

use crate::http::request_body::RequestBody;
use crate::limiter::clock::monotonic;
use crate::upstream::connection_pool::SendError;
use crate::upstream::endpoint::Endpoint;

/// Stream window for responses and send buffer for request bodies, in bytes per stream.
const STREAM_BUFFER: u32 = 128 << 10;

/// Connection window in bytes. Streams with slow readers cannot use up this window, so they do not block other streams.
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Maximum size of the response headers in bytes, as for HTTP/1.1.
const MAX_HEADER_LIST_SIZE: u32 = 64 << 10;

/// The shared connection of a pool.
#[derive(Debug)]
pub(super) struct SharedConnection {
    // The lock is held while connecting, so that concurrent requests wait for the new connection.
    current: Mutex<Option<Http2Connection>>,
    idle_timeout: Duration,
}

/// An HTTP/2 connection. The connection serves many requests concurrently.
#[derive(Debug, Clone)]
pub(super) struct Http2Connection {
    sender: SendRequest<RequestBody>,
    /// Set when the connection accepts no new requests.
    is_draining: Arc<AtomicBool>,
    last_used_at: Instant,
    /// Value of `:scheme` (RFC 9113 §8.3.1).
    scheme: Scheme,
}

impl SharedConnection {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        SharedConnection { current: Mutex::default(), idle_timeout }
    }

    /// Return the connection if it is usable and no other request is connecting.
    pub(super) fn try_get(&self) -> Option<Http2Connection> {
        self.usable(&mut *self.current.try_lock().ok()?)
    }

    fn usable(&self, current: &mut Option<Http2Connection>) -> Option<Http2Connection> {
        let now = monotonic();
        let connection = current.as_mut().filter(|connection| connection.is_usable(now, self.idle_timeout))?;
        connection.last_used_at = now;
        Some(connection.clone())
    }

    /// If the connection is usable, return it; otherwise connect. The second value is true if the connection was
    /// reused.
    pub(super) async fn get_or_connect(&self, endpoint: &Endpoint) -> io::Result<(Http2Connection, bool)> {
        let mut current = self.current.lock().await;
        if let Some(connection) = self.usable(&mut current) {
            return Ok((connection, true));
        }
        // Replace the connection. Requests in flight on the old connection continue.
        *current = None;
        let connection = connect(endpoint).await?;
        *current = Some(connection.clone());
        Ok((connection, false))
    }
}

async fn connect(endpoint: &Endpoint) -> io::Result<Http2Connection> {
    let stream = endpoint.connect(None).await?;
    let scheme = if stream.is_tls() { Scheme::HTTPS } else { Scheme::HTTP };
    let (sender, connection) = Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_BUFFER)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_BUFFER as usize)
        .max_header_list_size(MAX_HEADER_LIST_SIZE)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // Ignore the error of the connection task, because the senders of the requests receive it.
    tokio::spawn(async move { connection.await.ok() });
    Ok(Http2Connection { sender, is_draining: Arc::default(), last_used_at: monotonic(), scheme })
}

impl Http2Connection {
    fn is_usable(&self, now: Instant, idle_timeout: Duration) -> bool {
        !self.sender.is_closed() && !self.is_draining.load(Ordering::Relaxed) && now - self.last_used_at < idle_timeout
    }

    pub(super) fn send(
        &mut self,
        mut request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> + Send + use<> {
        if request.uri().scheme() != Some(&self.scheme) {
            let mut uri = std::mem::take(request.uri_mut()).into_parts();
            uri.scheme = Some(self.scheme.clone());
            // The conversion cannot fail, because a URI with authority and path is valid with any scheme.
            *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
        }
        self.sender.try_send_request(request)
    }

    /// Exclude the connection from new requests.
    pub(super) fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }
}

/// The possible states of a request whose stream ended with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamOutcome {
    /// The server has not processed the request (RFC 9113 §8.7): REFUSED_STREAM or GOAWAY.
    NotProcessed,
    /// The server reset the stream, or sent invalid frames.
    PeerError,
    /// The gateway reset the stream, because the client aborted the request.
    LocalReset,
    /// The state of the request is unknown, because the connection is lost.
    Unknown,
}

/// Classify an error. The second value is true if the connection is still usable.
pub(super) fn classify_error(error: &hyper::Error) -> (StreamOutcome, bool) {
    let Some(cause) = error.source().and_then(|source| source.downcast_ref::<h2::Error>()) else {
        return (StreamOutcome::Unknown, false);
    };
    let refused = cause.is_go_away() || cause.reason() == Some(h2::Reason::REFUSED_STREAM);
    let outcome = match (cause.is_remote(), cause.is_library()) {
        (true, _) if refused => StreamOutcome::NotProcessed,
        (true, _) | (_, true) => StreamOutcome::PeerError,
        _ => StreamOutcome::LocalReset,
    };
    (outcome, cause.is_reset())
}
