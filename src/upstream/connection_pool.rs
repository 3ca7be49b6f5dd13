//! Connections of one worker to one endpoint: idle HTTP/1.1 connections, or shared HTTP/2 connections.

use std::collections::VecDeque;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use std::{fmt, io, mem};

use futures_util::future::Either;
use http::uri::Scheme;
use http::{Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::{sleep, timeout};

use crate::boxed::boxed;
use crate::clock::monotonic;
use crate::http::body::{Body, UpstreamLease, declares_forbidden_body};
use crate::http::body_limits::{BodyLimits, LazyTimer, ReadBound, ReadLimit, ReadLimitedStream};
use crate::http::request_body::{RequestBody, UploadProgress};
use crate::upstream::connector;
use crate::upstream::connector::{Protocol, ProxiedConnection};
use crate::upstream::endpoint::{Endpoint, RequestPermit};
use crate::upstream::settings::UpstreamSettings;

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
    Http2(Arc<Http2Pool>),
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
            Protocol::Http2 => ProtocolPool::Http2(Arc::new(Http2Pool::new(settings.pool_idle_timeout))),
        };
        EndpointPool { endpoint, pool: connections, proxy_protocol: settings.proxy_protocol }
    }

    /// Return whether this is the pool of `endpoint`.
    pub(super) fn is_for(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.endpoint.is_same_as(endpoint)
    }

    /// Return a pool with the connections of this pool for `endpoint`, which belongs to another configuration snapshot.
    /// Return `None` if `endpoint` is not the endpoint of this pool, or if its TLS settings differ: the new settings may
    /// not trust the server of an open connection, or may have another client certificate.
    pub(super) fn reuse_for(&self, endpoint: &Arc<Endpoint>) -> Option<Self> {
        let fits = self.endpoint.is_same_as(endpoint) && self.endpoint.server.tls == endpoint.server.tls;
        let pool = self.pool.clone();
        let proxy_protocol = self.proxy_protocol;
        fits.then(|| EndpointPool { endpoint: endpoint.clone(), pool, proxy_protocol })
    }

    /// Return an idle HTTP/1.1 connection, or a shared HTTP/2 connection that can take another request. If connections
    /// start with a PROXY header, return only a connection of `client`.
    pub(super) fn take_idle(&self, client: Option<&ProxiedConnection>) -> Option<Connection> {
        match &self.pool {
            ProtocolPool::Http1(pool) if self.proxy_protocol => Some(Connection::Http1(pool.take_idle_of(client)?)),
            ProtocolPool::Http1(pool) => Some(Connection::Http1(pool.take_idle()?)),
            ProtocolPool::Http2(pool) => Some(Connection::Http2(pool.take()?, LazyTimer::default())),
        }
    }

    /// Connect to the endpoint. With HTTP/2, use a shared connection if a concurrent request has opened it in the
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
            ProtocolPool::Http2(pool) => {
                let (connection, reused) = pool.take_or_connect(&self.endpoint).await?;
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
            Connection::Http2(connection, _) => Either::Right(connection.send(request)),
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
    ) -> Box<Response<Body>> {
        // Do not return the connection to the pool after an upgrade, because the connection belongs to the `OnUpgrade`
        // in the extensions of the response.
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Box::new(response.map(|_| Body::from_upgrade(Box::new(permit))));
        }
        match self {
            Connection::Http1(connection) => {
                let reusable = !declares_forbidden_body(response.status(), response.headers());
                let reads = connection.reads.clone();
                let lease = Box::new(PooledConnection { connection, pool, is_reusable: reusable, _permit: permit });
                Box::new(response.map(|body| Body::from_upstream(body, bounds, lease, Some(reads))))
            }
            Connection::Http2(connection, _) => {
                let lease = Box::new(StreamLease { stream: connection.stream, _permit: permit });
                Box::new(response.map(|body| Body::from_upstream(body, bounds, lease, None)))
            }
        }
    }

    /// Classify the error of a request. If the connection is broken, exclude it from reuse.
    pub(super) fn classify_error(&mut self, error: &hyper::Error) -> StreamOutcome {
        match self {
            // A parse error means that the server has responded, although not with valid HTTP.
            Connection::Http1(..) if error.is_parse() => StreamOutcome::PeerError,
            Connection::Http1(..) => StreamOutcome::Unknown,
            Connection::Http2(connection, _) => {
                let (outcome, is_alive) = classify_error(error);
                if !is_alive {
                    connection.start_draining();
                }
                connection.stream.is_open &= outcome == StreamOutcome::LocalReset;
                outcome
            }
        }
    }

    /// Return whether the connection has carried other requests.
    pub(super) fn is_shared(&self) -> bool {
        match self {
            Connection::Http1(..) => false,
            Connection::Http2(connection, _) => connection.stream.state.lock().started > 1,
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

// === HTTP/2 (RFC 9113): a few connections, which the requests of a worker share ===

/// Maximum number of connections of a worker to an endpoint that take new requests.
const MAX_CONNECTIONS: usize = 4;

/// Maximum time to open a connection while other connections exist, but have no free stream.
const ADDITIONAL_CONNECT_TIMEOUT: Duration = Duration::from_millis(250);

/// Time after a failed attempt to open such a connection in which the gateway makes no further attempt.
const ADDITIONAL_CONNECT_BACKOFF: Duration = Duration::from_secs(1);

/// Flow-control window for responses, and send buffer for request bodies, in bytes per stream.
const STREAM_BUFFER: u32 = 128 << 10;

/// Flow-control window of the connection in bytes. The window is so large that streams with slow clients do not use up
/// the window and block other streams.
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Maximum size of the response headers in bytes, as for HTTP/1.1.
const MAX_HEADER_LIST_SIZE: u32 = 64 << 10;

/// The connections of a worker to an endpoint that take new requests.
#[derive(Debug)]
pub(super) struct Http2Pool {
    // A mutex of the standard library is sufficient, as in `Http1Pool`.
    connections: Mutex<Vec<SharedConnection>>,
    /// Locked while a request opens a connection, so that concurrent requests wait for it. Contains the time of the
    /// last failed attempt to open an additional connection.
    connecting: AsyncMutex<Option<Instant>>,
    idle_timeout: Duration,
}

/// A connection, which serves many requests concurrently.
#[derive(Debug)]
struct SharedConnection {
    sender: http2::SendRequest<RequestBody>,
    state: Arc<Http2State>,
    last_used_at: Instant,
    /// Value of `:scheme` (RFC 9113 §8.3.1).
    scheme: Scheme,
}

/// A connection, as one request uses it.
#[derive(Debug)]
pub(super) struct Http2Connection {
    sender: http2::SendRequest<RequestBody>,
    stream: OpenStream,
    scheme: Scheme,
}

impl Http2Pool {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Http2Pool { connections: Mutex::default(), connecting: AsyncMutex::default(), idle_timeout }
    }

    /// Return a connection with a free stream. If no stream is free and no further connection may be opened, return the
    /// connection with the fewest requests, which wait for a free stream.
    pub(super) fn take(&self) -> Option<Http2Connection> {
        let connections = &mut *self.lock();
        let now = monotonic();
        connections.retain(|connection| connection.is_usable(now, self.idle_timeout));
        let free = connections.iter_mut().find(|connection| connection.state.has_free_stream());
        free.map(|connection| connection.open_stream(now))
            .or_else(|| (connections.len() >= MAX_CONNECTIONS).then(|| least_loaded(connections, now)).flatten())
    }

    /// Return a connection with a free stream, or open a connection. The second value is true if the connection was
    /// reused.
    pub(super) async fn take_or_connect(&self, endpoint: &Endpoint) -> io::Result<(Http2Connection, bool)> {
        let mut failed_at = self.connecting.lock().await;
        if let Some(connection) = self.take() {
            return Ok((connection, true));
        }
        let Some(full) = least_loaded(&mut self.lock(), monotonic()) else {
            return Ok((self.add(connect_http2(endpoint).await?), false));
        };
        // A request can also wait for a stream, so do not let it fail or wait if no further connection can be opened.
        if failed_at.is_some_and(|at| at.elapsed() < ADDITIONAL_CONNECT_BACKOFF) {
            return Ok((full, true));
        }
        match timeout(ADDITIONAL_CONNECT_TIMEOUT, connect_http2(endpoint)).await {
            Ok(Ok(connection)) => Ok((self.add(connection), false)),
            Ok(Err(_)) | Err(_) => {
                *failed_at = Some(monotonic());
                Ok((full, true))
            }
        }
    }

    fn add(&self, mut connection: SharedConnection) -> Http2Connection {
        let opened = connection.open_stream(monotonic());
        self.lock().push(connection);
        opened
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SharedConnection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn least_loaded(connections: &mut [SharedConnection], now: Instant) -> Option<Http2Connection> {
    let in_flight = |connection: &&mut SharedConnection| connection.state.lock().in_flight;
    connections.iter_mut().min_by_key(in_flight).map(|connection| connection.open_stream(now))
}

async fn connect_http2(endpoint: &Endpoint) -> io::Result<SharedConnection> {
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
    let state = Arc::new(Http2State::new(connection.current_max_send_streams()));
    let shared = SharedConnection { sender, state: state.clone(), last_used_at: monotonic(), scheme };
    tokio::spawn(async move {
        let (mut connection, mut resets) = (pin!(connection), pin!(state.pace_resets()));
        // Ignore the error of the connection, because the code that sends a request also receives an error.
        let _ = poll_fn(|cx| {
            // This future never ends.
            let _ = resets.as_mut().poll(cx);
            let polled = connection.as_mut().poll(cx);
            state.max_streams.store(connection.current_max_send_streams(), Ordering::Relaxed);
            polled
        })
        .await;
        state.is_draining.store(true, Ordering::Relaxed);
    });
    Ok(shared)
}

impl SharedConnection {
    fn is_usable(&self, now: Instant, idle_timeout: Duration) -> bool {
        let is_draining = self.state.is_draining.load(Ordering::Relaxed);
        !self.sender.is_closed() && !is_draining && now - self.last_used_at < idle_timeout
    }

    fn open_stream(&mut self, now: Instant) -> Http2Connection {
        self.last_used_at = now;
        self.state.lock().in_flight += 1;
        let stream = OpenStream { state: self.state.clone(), is_open: false };
        Http2Connection { sender: self.sender.clone(), stream, scheme: self.scheme.clone() }
    }
}

impl Http2Connection {
    pub(super) fn send(&mut self, mut request: Request<RequestBody>) -> ResponseStart {
        if request.uri().scheme() != Some(&self.scheme) {
            let mut uri = std::mem::take(request.uri_mut()).into_parts();
            uri.scheme = Some(self.scheme.clone());
            // The conversion cannot fail, because a URI with authority and path is valid with any scheme.
            *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
        }
        self.stream.is_open = true;
        let state = self.stream.state.clone();
        let number = {
            let mut streams = state.lock();
            streams.started += 1;
            streams.started
        };
        let upload = request.body().progress();
        let future = boxed(|| self.sender.try_send_request(request));
        ResponseStart { response: Some(PendingResponse { future, upload }), state, number }
    }

    /// Exclude the connection from new requests.
    pub(super) fn start_draining(&self) {
        self.stream.state.is_draining.store(true, Ordering::Relaxed);
    }
}

// === Resets of HTTP/2 streams ===
//
// A server may close a connection on which too many streams are reset, and all requests on the connection then fail.
// Clients must not be able to cause this. Servers count resets in two ways:
//
// - The crate h2 counts streams that are reset before the server accepts them, and allows 20 at a time. Servers accept
//   streams in order, so a response shows that all earlier streams are accepted. The gateway sends only a few resets
//   for streams for which there is no such response, and sends the others later.
// - Other servers limit all resets. Therefore, a connection takes no new requests after a number of resets.

/// Maximum number of resets of streams that the server may not have accepted. This is half of the number that h2 allows.
const MAX_UNACCEPTED_RESETS: usize = 10;

/// Interval after which the gateway sends this number of resets again if the server has sent no response.
const RESET_INTERVAL: Duration = Duration::from_secs(1);

/// Number of resets after which a connection takes no new requests. nghttp2 allows 1000 resets at once.
const MAX_RESETS: usize = 100;

/// The response to a request on a shared connection. Dropping it resets the stream.
struct PendingResponse {
    future: Pin<Box<dyn Future<Output = Result<Response<Incoming>, SendError>> + Send>>,
    /// The progress of the request body. The connection learns of a failed upload when this value is dropped: without
    /// the failure, the connection would wait for the body, and the stream would stay open.
    upload: Option<Arc<UploadProgress>>,
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        if let Some(upload) = &self.upload {
            upload.mark_response_started();
        }
    }
}

/// The state of a shared connection.
struct Http2State {
    /// Whether the connection must not be used for new requests.
    is_draining: AtomicBool,
    /// Maximum number of concurrent streams that the server allows.
    max_streams: AtomicUsize,
    streams: Mutex<Streams>,
    /// Notified when `Streams::delayed` is no longer empty.
    is_delayed: Notify,
}

/// The streams of a shared connection.
#[derive(Default)]
struct Streams {
    in_flight: usize,
    /// Number of requests that were sent on the connection.
    started: u64,
    /// The last request, in the order of their streams, to which the server has begun to respond.
    last_accepted: u64,
    /// Number of streams that were reset.
    resets: usize,
    /// The requests after `last_accepted` whose streams were reset.
    unaccepted_resets: Vec<u64>,
    /// Streams whose reset is delayed, with the number of their request.
    delayed: Vec<(u64, PendingResponse)>,
}

/// A stream that counts as in flight on its connection until it is dropped.
#[derive(Debug)]
struct OpenStream {
    state: Arc<Http2State>,
    /// Whether the request was sent, and the stream has neither ended nor was reset by the server. Dropping the value
    /// then resets the stream.
    is_open: bool,
}

/// The lease of a stream, which is held until the end of the response body.
struct StreamLease {
    stream: OpenStream,
    _permit: RequestPermit,
}

/// Waits for the response to a request on a shared connection. If the value is dropped before the response, the stream
/// is reset, possibly with a delay.
pub(super) struct ResponseStart {
    /// `None` after the response.
    response: Option<PendingResponse>,
    state: Arc<Http2State>,
    /// Number of the request.
    number: u64,
}

impl Http2State {
    fn new(max_streams: usize) -> Self {
        Http2State {
            is_draining: AtomicBool::new(false),
            max_streams: max_streams.into(),
            streams: Mutex::default(),
            is_delayed: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_free_stream(&self) -> bool {
        self.lock().in_flight < self.max_streams.load(Ordering::Relaxed)
    }

    /// Record that the server has begun to respond to request `number`, so that it has accepted all earlier streams.
    fn record_response(&self, number: u64) {
        let accepted: Vec<_> = {
            let mut streams = self.lock();
            if number <= streams.last_accepted {
                return;
            }
            streams.last_accepted = number;
            streams.unaccepted_resets.retain(|reset| *reset > number);
            streams.delayed.extract_if(.., |(delayed, _)| *delayed < number).collect()
        };
        // Reset the streams after the lock is released, because this calls hyper.
        drop(accepted);
    }

    /// Reset the stream of request `number` now or later.
    fn reset(&self, number: u64, response: PendingResponse) {
        let mut streams = self.lock();
        if number > streams.last_accepted {
            if streams.unaccepted_resets.len() >= MAX_UNACCEPTED_RESETS {
                streams.delayed.push((number, response));
                self.is_draining.store(true, Ordering::Relaxed);
                self.is_delayed.notify_one();
                return;
            }
            streams.unaccepted_resets.push(number);
        }
        drop(streams);
        drop(response);
    }

    /// Send the delayed resets, a few per interval.
    async fn pace_resets(&self) {
        loop {
            self.is_delayed.notified().await;
            loop {
                sleep(RESET_INTERVAL).await;
                let due: Vec<_> = {
                    let delayed = &mut self.lock().delayed;
                    let count = delayed.len().min(MAX_UNACCEPTED_RESETS);
                    delayed.drain(..count).collect()
                };
                if due.is_empty() {
                    break;
                }
            }
        }
    }
}

impl fmt::Debug for Http2State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http2State").field("in_flight", &self.lock().in_flight).finish_non_exhaustive()
    }
}

impl Future for ResponseStart {
    type Output = Result<Response<Incoming>, SendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(response) = &mut self.response else { return Poll::Pending };
        let result = ready!(response.future.as_mut().poll(cx));
        match &result {
            Ok(_) => self.state.record_response(self.number),
            // The body may be sent again.
            Err(_) => response.upload = None,
        }
        self.response = None;
        Poll::Ready(result)
    }
}

impl Drop for ResponseStart {
    fn drop(&mut self) {
        if let Some(response) = self.response.take() {
            self.state.reset(self.number, response);
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let rest = {
            let mut streams = self.state.lock();
            streams.in_flight -= 1;
            streams.resets += usize::from(self.is_open);
            if streams.resets >= MAX_RESETS {
                self.state.is_draining.store(true, Ordering::Relaxed);
            }
            // Without other requests on the connection, the resets harm none, and the server may close the connection.
            if streams.in_flight == 0 { mem::take(&mut streams.delayed) } else { Vec::new() }
        };
        drop(rest);
    }
}

impl UpstreamLease for StreamLease {
    fn release(mut self: Box<Self>) {
        self.stream.is_open = false;
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
