//! Connections of one worker to one endpoint: idle HTTP/1.1 connections, or a shared HTTP/2 connection.

use std::collections::VecDeque;
use std::error::Error;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::Either;
use http::uri::Scheme;
use http::{Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::Mutex as AsyncMutex;

use crate::http::body::{Body, UpstreamLease, declares_forbidden_body};
use crate::http::body_limits::{BodyLimits, LazyTimer, ReadBound, ReadLimit, ReadLimitedStream};
use crate::http::request_body::RequestBody;
use crate::limiter::clock::monotonic;
use crate::upstream::connector::ProxiedConnection;
use crate::upstream::endpoint::{Endpoint, RequestPermit};
use crate::upstream::{Protocol, UpstreamSettings, connector};

/// Connection pool of one worker for one endpoint.
#[derive(Debug)]
pub(super) struct EndpointPool {
    endpoint: Arc<Endpoint>,
    pool: ProtocolPool,
    /// Whether connections start with a PROXY header.
    proxy_protocol: bool,
}

#[derive(Debug, Clone)]
enum ProtocolPool {
    Http1(Arc<Http1Pool>),
    Http2(Arc<SharedConnection>),
}

/// An upstream connection on which a request is sent.
#[derive(Debug)]
pub(super) enum Connection {
    /// The connection is used by only one request at a time.
    Http1(Http1Connection),
    /// Many requests share the connection.
    Http2(Http2Connection, LazyTimer),
}

/// The lease of an HTTP/1.1 connection. When the response has been read to its end, the lease returns the connection to
/// its pool and releases the request permit.
struct PooledConnection {
    connection: Http1Connection,
    pool: Arc<EndpointPool>,
    is_reusable: bool,
    _permit: RequestPermit,
}

impl EndpointPool {
    /// Create a pool without connections.
    pub(super) fn new(settings: &UpstreamSettings, endpoint: Arc<Endpoint>) -> Self {
        let connections = match settings.protocol {
            Protocol::Http1 => {
                let max_idle = if settings.proxy_protocol { MAX_IDLE_BY_CLIENT } else { usize::MAX };
                ProtocolPool::Http1(Arc::new(Http1Pool::new(settings.pool_idle_timeout, max_idle)))
            }
            Protocol::Http2 => ProtocolPool::Http2(Arc::new(SharedConnection::new(settings.pool_idle_timeout))),
        };
        EndpointPool { endpoint, pool: connections, proxy_protocol: settings.proxy_protocol }
    }

    /// Return whether this is the pool of `endpoint`.
    pub(super) fn is_for(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.endpoint.is_same_as(endpoint)
    }

    /// Return a pool with the connections of this pool for `endpoint`, which belongs to another configuration snapshot.
    /// Return `None` if `endpoint` is not the endpoint of this pool, or if the TLS server name differs.
    pub(super) fn reuse_for(&self, endpoint: &Arc<Endpoint>) -> Option<Self> {
        let name = |endpoint: &Endpoint| endpoint.server.tls.as_ref().map(|tls| tls.server_name.clone());
        let fits = self.endpoint.is_same_as(endpoint) && name(&self.endpoint) == name(endpoint);
        let (pool, proxy_protocol) = (self.pool.clone(), self.proxy_protocol);
        fits.then(|| EndpointPool { endpoint: endpoint.clone(), pool, proxy_protocol })
    }

    /// Return an idle HTTP/1.1 connection, or the shared HTTP/2 connection if it is usable. If connections start with a
    /// PROXY header, return only a connection of `client`.
    pub(super) fn take_idle(&self, client: Option<&ProxiedConnection>) -> Option<Connection> {
        match &self.pool {
            ProtocolPool::Http1(pool) if self.proxy_protocol => Some(Connection::Http1(pool.take_idle_of(client)?)),
            ProtocolPool::Http1(pool) => Some(Connection::Http1(pool.take_idle()?)),
            ProtocolPool::Http2(shared) => Some(Connection::Http2(shared.try_get()?, LazyTimer::default())),
        }
    }

    /// Connect to the endpoint. With HTTP/2, use the shared connection if a concurrent request has opened it in the
    /// meantime. The second value is then `true`. If the gateway sends a PROXY header to the upstream, the header
    /// describes `client`, or the gateway itself if `client` is `None`.
    ///
    /// # Errors
    /// The errors of [`Endpoint::connect`] and of the HTTP/2 or HTTP/1.1 setup.
    pub(super) async fn connect(&self, client: Option<&ProxiedConnection>) -> io::Result<(Connection, bool)> {
        match &self.pool {
            ProtocolPool::Http1(_) => {
                let header = self.proxy_protocol.then(|| connector::proxy_header(client));
                let mut connection = connect(&self.endpoint, header.as_deref()).await?;
                connection.client = client.copied().map(Box::new);
                Ok((Connection::Http1(connection), false))
            }
            // The configuration does not allow PROXY headers for HTTP/2 upstreams, because many clients share the
            // connection.
            ProtocolPool::Http2(shared) => {
                let (connection, reused) = shared.get_or_connect(&self.endpoint).await?;
                Ok((Connection::Http2(connection, LazyTimer::default()), reused))
            }
        }
    }
}

impl Connection {
    /// Send a request. The future does not borrow the connection. `reads` limits the bytes per read from an HTTP/1.1
    /// connection, and has no effect on HTTP/2.
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
        reads: ReadLimit,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> + Send + use<> {
        match self {
            Connection::Http1(connection) => Either::Left(connection.send(request, reads)),
            // Box the future, because otherwise each HTTP/1.1 request would reserve space for HTTP/2.
            Connection::Http2(connection, _) => Either::Right(Box::pin(connection.send(request))),
        }
    }

    /// Return the timer for the response timeout.
    pub(super) fn timer(&mut self) -> &mut LazyTimer {
        match self {
            Connection::Http1(connection) => &mut connection.timer,
            Connection::Http2(_, timer) => timer,
        }
    }

    /// Convert a response of hyper. The body of the result holds the connection and the request permit until the body
    /// ends.
    pub(super) fn into_response(
        self,
        response: Response<Incoming>,
        bounds: BodyLimits,
        pool: Arc<EndpointPool>,
        permit: RequestPermit,
    ) -> Response<Body> {
        // Do not return the connection to the pool after an upgrade, because the connection belongs to the `OnUpgrade`
        // in the extensions of the response.
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return response.map(|_| Body::from_upgrade(Box::new(permit)));
        }
        match self {
            Connection::Http1(connection) => {
                let reusable = !declares_forbidden_body(response.status(), response.headers());
                let reads = connection.reads.clone();
                let lease = Box::new(PooledConnection { connection, pool, is_reusable: reusable, _permit: permit });
                response.map(|body| Body::from_upstream(body, bounds, lease, Some(reads)))
            }
            Connection::Http2(..) => response.map(|body| Body::from_upstream(body, bounds, Box::new(permit), None)),
        }
    }

    /// Classify the error of a request. If the connection is broken, exclude it from reuse.
    pub(super) fn classify_error(&self, error: &hyper::Error) -> StreamOutcome {
        match self {
            // A parse error means that the server has responded, although not with valid HTTP.
            Connection::Http1(..) if error.is_parse() => StreamOutcome::PeerError,
            Connection::Http1(..) => StreamOutcome::Unknown,
            Connection::Http2(connection, _) => {
                let (outcome, is_alive) = classify_error(error);
                if !is_alive {
                    connection.start_draining();
                }
                outcome
            }
        }
    }

    /// Exclude a slow or broken connection from reuse.
    pub(super) fn start_draining(&self) {
        match self {
            // Nothing to do: the caller drops the HTTP/1.1 connection, which closes it.
            Connection::Http1(..) => {}
            Connection::Http2(connection, _) => connection.start_draining(),
        }
    }
}

impl UpstreamLease for PooledConnection {
    fn release(self: Box<Self>) {
        if let (true, ProtocolPool::Http1(pool)) = (self.is_reusable, &self.pool.pool) {
            pool.put(self.connection);
        }
    }
}

// === HTTP/1.1: idle connections, most recently used first ===

/// Maximum response buffer of a connection in bytes. Response headers must fit into this buffer, and bodies are read in
/// pieces of up to this size.
const MAX_BUFFER_SIZE: usize = 64 * 1024;

/// Maximum number of idle connections in a pool whose connections start with a PROXY header, so that each connection
/// serves only one client. The number is limited, because another request of the same client may never arrive.
const MAX_IDLE_BY_CLIENT: usize = 64;

/// Error of an exchange, with the request if no part of the request was written.
pub(super) type SendError = TrySendError<Request<RequestBody>>;

/// An HTTP/1.1 connection, which serves one request at a time.
#[derive(Debug)]
pub(super) struct Http1Connection {
    sender: http1::SendRequest<RequestBody>,
    pub(super) timer: LazyTimer,
    pub(super) reads: ReadBound,
    /// Client in the PROXY header of the connection.
    client: Option<Box<ProxiedConnection>>,
}

/// Pool of idle HTTP/1.1 connections.
#[derive(Debug)]
pub(super) struct Http1Pool {
    // A mutex of the standard library is sufficient, because it is not locked across an `await`, and only one worker
    // uses the pool.
    connections: Mutex<VecDeque<IdleConnection>>,
    idle_timeout: Duration,
    /// Above this number, the connections that have been idle for the longest time are closed.
    max_idle: usize,
}

#[derive(Debug)]
struct IdleConnection {
    connection: Http1Connection,
    idle_since: Instant,
}

/// Connect, and spawn the connection task on the current worker.
async fn connect(endpoint: &Endpoint, proxy_header: Option<&[u8]>) -> io::Result<Http1Connection> {
    let (stream, reads) = ReadLimitedStream::new(endpoint.connect(proxy_header).await?);
    let (sender, connection) = http1::Builder::new()
        .writev(false)
        .max_buf_size(MAX_BUFFER_SIZE)
        .max_header_size(MAX_BUFFER_SIZE)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // Ignore the error of the connection task, because the code that sends the request also receives an error.
    tokio::spawn(async move { connection.with_upgrades().await.ok() });
    Ok(Http1Connection { sender, timer: LazyTimer::default(), reads, client: None })
}

impl Http1Pool {
    pub(super) fn new(idle_timeout: Duration, max_idle: usize) -> Self {
        Http1Pool { connections: Mutex::default(), idle_timeout, max_idle }
    }

    /// Take the most recently used connection of `client` that is still usable.
    fn take_idle_of(&self, client: Option<&ProxiedConnection>) -> Option<Http1Connection> {
        let mut idle = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|idle| idle.idle_since.elapsed() < self.idle_timeout && !idle.connection.sender.is_closed());
        let is_usable =
            |connection: &Http1Connection| connection.client.as_deref() == client && connection.sender.is_ready();
        let index = idle.iter().rposition(|idle| is_usable(&idle.connection))?;
        idle.remove(index).map(|idle| idle.connection)
    }

    /// Take the most recently used connection that is still usable.
    pub(super) fn take_idle(&self) -> Option<Http1Connection> {
        let mut idle = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(IdleConnection { connection, idle_since: since }) = idle.pop_back() {
            if since.elapsed() >= self.idle_timeout {
                // Drop all other connections, because they have been idle at least as long.
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
        let is_full = |idle: &VecDeque<_>| idle.len() >= self.max_idle;
        while is_full(&idle) || idle.front().is_some_and(|oldest| now - oldest.idle_since >= self.idle_timeout) {
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

// === HTTP/2 (RFC 9113): one connection, which all requests of a worker share ===

/// Flow-control window for responses, and send buffer for request bodies, in bytes per stream.
const STREAM_BUFFER: u32 = 128 << 10;

/// Flow-control window of the connection in bytes. The window is so large that streams with slow clients do not use up
/// the window and block other streams.
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Maximum size of the response headers in bytes, as for HTTP/1.1.
const MAX_HEADER_LIST_SIZE: u32 = 64 << 10;

/// The shared connection of a pool.
#[derive(Debug)]
pub(super) struct SharedConnection {
    // The lock is held while a request opens the connection, so that concurrent requests wait for it.
    current: AsyncMutex<Option<Http2Connection>>,
    idle_timeout: Duration,
}

/// An HTTP/2 connection, which serves many requests concurrently.
#[derive(Debug, Clone)]
pub(super) struct Http2Connection {
    sender: http2::SendRequest<RequestBody>,
    /// Whether the connection must not be used for new requests.
    is_draining: Arc<AtomicBool>,
    last_used_at: Instant,
    /// Value of `:scheme` (RFC 9113 §8.3.1).
    scheme: Scheme,
}

impl SharedConnection {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        SharedConnection { current: AsyncMutex::default(), idle_timeout }
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
        let connection = connect_http2(endpoint).await?;
        *current = Some(connection.clone());
        Ok((connection, false))
    }
}

async fn connect_http2(endpoint: &Endpoint) -> io::Result<Http2Connection> {
    let stream = endpoint.connect(None).await?;
    let scheme = if stream.is_tls() { Scheme::HTTPS } else { Scheme::HTTP };
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_BUFFER)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_BUFFER as usize)
        .max_header_list_size(MAX_HEADER_LIST_SIZE)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    // Ignore the error of the connection task, because the code that sends a request also receives an error.
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

/// How a request ended if its stream or connection failed.
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
