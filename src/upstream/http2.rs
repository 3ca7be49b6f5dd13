//! One connection to a server that speaks HTTP/2 (RFC 9113; prior knowledge, or ALPN), shared by all requests of a worker.

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
use crate::upstream::endpoint::Endpoint;
use crate::upstream::http1::SendError;

/// Bytes of an answer, and of an upload, that are held for one stream while its reader is slow.
const STREAM_BUFFER: u32 = 128 << 10;

/// Streams whose readers are slow fill the window of the connection; so many there never are, so that nobody else waits.
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Bytes of a response head, as for HTTP/1.1.
const MAX_HEADER_LIST_SIZE: u32 = 64 << 10;

/// The connection that new requests take.
#[derive(Debug)]
pub(super) struct SharedConnection {
    // Held while connecting: those who come meanwhile take what comes of it.
    current: Mutex<Option<Http2Connection>>,
    idle_timeout: Duration,
}

/// A connection that carries many requests at a time.
#[derive(Debug, Clone)]
pub(super) struct Http2Connection {
    sender: SendRequest<RequestBody>,
    /// Set when no new request should take it.
    is_draining: Arc<AtomicBool>,
    last_used_at: Instant,
    /// What requests say of their own scheme (RFC 9113 §8.3.1).
    scheme: Scheme,
}

impl SharedConnection {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        SharedConnection { current: Mutex::default(), idle_timeout }
    }

    /// The connection that is there, if it is fit for use and nobody is just making another.
    pub(super) fn try_get(&self) -> Option<Http2Connection> {
        self.usable(&mut *self.current.try_lock().ok()?)
    }

    fn usable(&self, current: &mut Option<Http2Connection>) -> Option<Http2Connection> {
        let now = monotonic();
        let connection = current.as_mut().filter(|connection| connection.is_usable(now, self.idle_timeout))?;
        connection.last_used_at = now;
        Some(connection.clone())
    }

    /// The connection that is there, if it is fit for use, else a new one; whether it was there before.
    pub(super) async fn get_or_connect(&self, endpoint: &Endpoint) -> io::Result<(Http2Connection, bool)> {
        let mut current = self.current.lock().await;
        if let Some(connection) = self.usable(&mut current) {
            return Ok((connection, true));
        }
        // What runs on the old one goes on to its end.
        *current = None;
        let connection = connect(endpoint).await?;
        *current = Some(connection.clone());
        Ok((connection, false))
    }
}

async fn connect(endpoint: &Endpoint) -> io::Result<Http2Connection> {
    let stream = endpoint.connect().await?;
    let scheme = if stream.is_tls() { Scheme::HTTPS } else { Scheme::HTTP };
    let (sender, connection) = Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_BUFFER)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_BUFFER as usize)
        .max_header_list_size(MAX_HEADER_LIST_SIZE)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // Its error reaches whoever waits for a response.
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
            // With an authority and a path, any scheme is a valid one.
            *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
        }
        self.sender.try_send_request(request)
    }

    /// No new request takes it.
    pub(super) fn start_draining(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }
}

/// What the end of a stream says of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamOutcome {
    /// The server has not looked at it (RFC 9113 §8.7): refused by itself, or by the end of the connection.
    NotProcessed,
    /// The server has ended it, or what it says cannot be read.
    PeerError,
    /// We have ended it, because the client did.
    LocalReset,
    /// Not known: the connection is gone.
    Unknown,
}

/// What an error says, and whether the connection is good for others.
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
