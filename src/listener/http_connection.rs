//! HTTP on one client connection: requests, timeouts, drain, and how the connection is closed.

use std::cell::RefCell;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use http::header::{CONNECTION, RETRY_AFTER};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::{HttpService, service_fn};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::boxed::boxed;
use crate::clock::{LogThrottle, monotonic};
use crate::http::body::{Body, complete_response};
use crate::http::body_limits::{BufferBudget, INSPECTED_SHARE};
use crate::http::flow::{ConnectionActivity, Continuation, InFlightRequest, StreamFlow, WriteWatchdog};
use crate::http::headers::has_padding;
use crate::http::memory_guard::NoMemory;
use crate::http::problem::Problem;
use crate::http::request_body::RequestBody;
use crate::http::slow_readers::SlowReaders;
use crate::http::upgrade;
use crate::listener::handshake::{LOG_INTERVAL, Protocol};
use crate::listener::stream::MonitoredStream;
use crate::proxy::Gateway;
use crate::proxy::request::Peer;
use crate::snapshot::listeners::ListenerProtocol;
use crate::snapshot::settings::ServerSettings;

/// The default of hyper's `max_headers`. With the default, hyper parses headers on the stack. With an explicit maximum,
/// hyper allocates memory for each request.
const HYPER_MAX_HEADERS: usize = 100;

/// Flow-control window of an HTTP/2 stream in bytes: the maximum number of request body bytes that a stream buffers
/// while the upstream does not read them.
const HTTP2_WINDOW: u32 = 256 << 10;

/// Maximum number of bytes of a response that a stream buffers while the client does not read them. A single chunk may
/// exceed this number.
const HTTP2_SEND_BUFFER: usize = 128 << 10;

/// Maximum number of bytes of responses and buffered requests that all streams of a connection together may hold. Above
/// this number, a stream reads the next chunk from the upstream only when all its buffered data has been written to the
/// client.
const HTTP2_CONNECTION_BUFFER: usize = 256 << 10;

/// Minimum time for which an HTTP/1.1 connection is idle before it is suspended, and interval at which the gateway
/// checks this. The connections of busy clients are rarely idle for so long, so they are not suspended and resumed again
/// and again.
const SUSPEND_AFTER: Duration = Duration::from_secs(5);

/// Response to HTTP/1.x on a listener of the rate limit service.
const HTTP1_REFUSED: &[u8] = b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\n\
    content-length: 64\r\nconnection: close\r\n\r\nthis listener serves gRPC: use HTTP/2 with prior knowledge, h2c\n";

/// An error that ends a connection: an error of the socket, of the TLS handshake or of HTTP.
pub(super) type BoxError = Box<dyn Error + Send + Sync>;

/// How a connection ended without an error.
pub(super) enum CloseReason {
    /// All responses were sent and all requests read.
    Complete,
    /// The client may still be sending a request that the gateway does not read.
    RequestUnread,
    /// A header or idle timeout expired.
    Timeout,
    /// The client has not read the response within `body_idle_timeout` or the route timeout.
    WriteStalled,
    /// A response was aborted, but would look complete to the client if the connection were closed normally.
    TruncatedResponse,
    /// The client reset too many requests before their responses.
    TooManyResets,
}

/// Event on a connection.
enum ConnectionEvent {
    /// The connection ended with this result. `None` if the watchdog stopped the connection because the client does not
    /// read the response.
    Closed(Option<hyper::Result<()>>),
    /// No other request may follow on the connection: the gateway will not read a request to its end, or it has rejected
    /// the client certificate of the connection.
    NoFurtherRequest,
    /// A part of the headers of a request has arrived, but not all of them. The event does not occur for the first
    /// request of the connection. The variant contains the headers counter.
    HeadersStarted(u64),
    /// Draining has started.
    Draining,
    /// The timer of the connection has fired.
    TimerFired,
    /// The connection is no longer suspended, or hyper was not idle when it should be suspended.
    Resumed,
}

/// One HTTP connection of a client.
pub(super) struct HttpConnection {
    pub(super) gateway: Arc<Gateway>,
    pub(super) peer: Arc<Peer>,
    /// The settings at the time when the connection was accepted.
    pub(super) settings: Arc<ServerSettings>,
    pub(super) activity: Arc<ConnectionActivity>,
    /// What the listener of the connection serves.
    pub(super) serves: ListenerProtocol,
    /// Memory budget of all connections.
    pub(super) buffer_budget: Arc<BufferBudget>,
    /// A token that is cancelled when draining starts.
    pub(super) drain: CancellationToken,
    /// Whether HTTP/2 clients may open WebSockets (RFC 8441).
    pub(super) has_websockets: bool,
}

/// The future of a request that the gateway handles.
type HandledRequest = dyn Future<Output = Result<Box<Response<Body>>, h2::Error>> + Send;

/// A request that hyper serves. hyper drops it before its end if the client goes away.
struct ServedRequest<K: Keeper> {
    /// `None` after the end of the request.
    request: Option<Pin<Box<HandledRequest>>>,
    keeper: K,
}

/// Gets a request that hyper has dropped before its end.
trait Keeper {
    /// Keep the request if it must not be dropped yet.
    fn keep(&self, request: Pin<Box<HandledRequest>>);
}

/// Keeps the request of an HTTP/1.x connection.
struct ConnectionKeeper<'a> {
    flow: &'a StreamFlow,
    drain: &'a CancellationToken,
}

/// Keeps the request of an HTTP/2 stream.
struct StreamKeeper {
    flow: Arc<StreamFlow>,
    streams: Arc<ConnectionStreams>,
    activity: Arc<ConnectionActivity>,
    started_at: std::time::Instant,
    /// Whether resets of the client count towards the maximum of the connection.
    counts_resets: bool,
}

/// Spawns a task for each stream of an HTTP/2 connection. Each task has a watchdog that observes whether the client
/// reads the response.
#[derive(Debug, Clone)]
struct StreamExecutor(Arc<ConnectionStreams>);

thread_local! {
    /// The flow of the stream that hyper passes to the executor next. hyper calls the service and then at once passes
    /// the future of the service to the executor. Futures that hyper passes without a call of the service, for example
    /// to send the bytes of a tunnel, get a new flow.
    static NEXT_FLOW: RefCell<Option<Arc<StreamFlow>>> = const { RefCell::new(None) };
}

/// The streams of an HTTP/2 connection.
#[derive(Debug)]
struct ConnectionStreams {
    body_idle_timeout: Duration,
    budget: Arc<BufferBudget>,
    /// Budget of inspected request bodies, which the gateway reads before it forwards the request. They have a separate
    /// budget, because the gateway holds a whole inspected body in memory, and the body may be larger than `budget`.
    inspected: Arc<BufferBudget>,
    slow_readers: Arc<SlowReaders>,
    /// Number of requests that the client has reset, and for which an upstream may still be working.
    abandoned: AtomicUsize,
    drain: CancellationToken,
}

impl HttpConnection {
    fn slow_readers(&self) -> Arc<SlowReaders> {
        self.gateway.memory_guard().slow_readers.clone()
    }

    /// Log that the client reset too many requests, at most once per [`LOG_INTERVAL`].
    fn log_too_many_resets(&self) {
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        if LOG_THROTTLE.should_log(LOG_INTERVAL) {
            let network = self.gateway.config().client_ip.format_network(self.peer.address);
            warn!(network, "a client reset too many requests before their responses, and its connection was closed");
        }
    }

    /// Serve requests until the connection is closed.
    pub(super) async fn run<S>(self, stream: S, protocol: Protocol) -> Result<CloseReason, BoxError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let settings = &self.settings;
        let stream = MonitoredStream::new(
            stream,
            protocol,
            self.activity.clone(),
            settings.half_close_timeout,
            settings.proxy_status,
        );
        let flow = StreamFlow::for_connection(self.buffer_budget.clone());
        match protocol {
            Protocol::Http1 if self.serves == ListenerProtocol::RateLimit => {
                self.gateway.record_unparsed(StatusCode::HTTP_VERSION_NOT_SUPPORTED);
                let mut stream = stream;
                stream.write_all(HTTP1_REFUSED).await?;
                Ok(CloseReason::RequestUnread)
            }
            Protocol::Http1 => {
                let keeper = ConnectionKeeper { flow: &flow, drain: &self.drain };
                let service = service_fn(|request: Request<Incoming>| {
                    // If a request has asked for an upgrade and got another response, hyper keeps the upgrade until its
                    // connection ends, and then gives the stream away.
                    if request.extensions().get::<OnUpgrade>().is_some() {
                        self.activity.forbid_suspension();
                    }
                    let in_flight = self.activity.start_request(flow.clone());
                    let is_refused = || false;
                    let serves = self.serves;
                    let request =
                        serve_request(self.gateway.clone(), self.peer.clone(), serves, in_flight, request, is_refused);
                    ServedRequest { request: Some(request), keeper: &keeper }
                });
                let shutdown =
                    |connection: Pin<&mut Http1Connection<'_, _, _>>| connection.get_mut().graceful_shutdown();
                let suspend = |connection: Pin<&mut Http1Connection<'_, _, _>>| connection.get_mut().suspend();
                let closed = {
                    // The end of this block drops the connection, and hyper drops a request in flight, which `keeper`
                    // then keeps.
                    let connection = pin!(Http1Connection::new(stream, service, settings, &self.activity));
                    self.drive(connection, &flow, settings.drain_grace(), shutdown, Some(suspend)).await
                };
                if let Some(request) = flow.take_abandoned() {
                    // Box the future, because only few connections need space for it.
                    Box::pin(flow.finish_abandoned(request)).await;
                }
                closed
            }
            Protocol::Http2 => {
                let executor =
                    StreamExecutor::new(settings, self.buffer_budget.clone(), self.slow_readers(), self.drain.clone());
                let service = service_fn(|request| self.serve_stream(&executor, request));
                let mut builder = http2_builder(settings, executor.clone());
                if self.has_websockets {
                    builder.enable_connect_protocol();
                }
                // Box the connection, because the future of HTTP/1 connections would otherwise have space for it.
                let mut connection = boxed(|| builder.serve_connection(TokioIo::new(stream), service));
                // Use no grace period when draining, because GOAWAY tells the client which of its requests the gateway
                // still serves (RFC 9113 §6.8).
                let graceful_shutdown = |connection: Pin<&mut _>| http2::Connection::graceful_shutdown(connection);
                let suspend = None::<fn(Pin<&mut _>)>;
                self.drive(connection.as_mut(), &flow, Duration::ZERO, graceful_shutdown, suspend).await
            }
        }
    }

    /// Serve the request of an HTTP/2 stream.
    fn serve_stream(&self, executor: &StreamExecutor, request: Request<Incoming>) -> ServedRequest<StreamKeeper> {
        let flow = executor.start_stream();
        let activity = self.activity.clone();
        let started_at = monotonic();
        activity.count_request();
        let in_flight = activity.start_request(flow.clone());
        // h2 enforces `http2_max_streams`, but does not count streams that the client has reset.
        let streams = executor.0.clone();
        let max = self.settings.http2_max_streams as usize;
        let is_refused = move || streams.abandoned.load(Ordering::Relaxed) >= max;
        let request = match self.serves {
            ListenerProtocol::Http | ListenerProtocol::Decisions | ListenerProtocol::RateLimitHttp => {
                serve_request(self.gateway.clone(), self.peer.clone(), self.serves, in_flight, request, is_refused)
            }
            ListenerProtocol::RateLimit => self.serve_call(in_flight, request, is_refused),
        };
        // The connection of a trusted proxy carries the requests of many clients.
        let counts_resets = !self.peer.forwarded.trusted;
        let keeper = StreamKeeper { flow, streams: executor.0.clone(), activity, started_at, counts_resets };
        ServedRequest { request: Some(request), keeper }
    }

    /// Serve a call of the rate limit service.
    fn serve_call(
        &self,
        in_flight: InFlightRequest,
        request: Request<Incoming>,
        is_refused: impl FnOnce() -> bool + Send + 'static,
    ) -> Pin<Box<HandledRequest>> {
        let (gateway, peer, drain) = (self.gateway.clone(), self.peer.clone(), self.drain.clone());
        Box::pin(async move {
            if is_refused() {
                return Err(h2::Reason::REFUSED_STREAM.into());
            }
            let mut response = gateway.answer_call(request, &peer, in_flight.flow(), drain.is_cancelled()).await;
            complete_response(in_flight, &mut response);
            Ok(Box::new(response))
        })
    }

    /// Drive the connection and its timeouts. When draining starts, HTTP/1 connections stay open for `drain_grace`. The
    /// gateway then still serves a request that the client has already sent, and the response announces that the
    /// connection will be closed. `suspend` frees the buffers of an idle connection.
    async fn drive<C>(
        &self,
        mut connection: Pin<&mut C>,
        flow: &Arc<StreamFlow>,
        drain_grace: Duration,
        graceful_shutdown: impl FnOnce(Pin<&mut C>),
        mut suspend: Option<impl FnMut(Pin<&mut C>)>,
    ) -> Result<CloseReason, BoxError>
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let settings = &self.settings;
        let mut watchdog = WriteWatchdog::new(settings.body_idle_timeout, flow.clone(), self.slow_readers());
        let mut drain_started = pin!(self.drain.cancelled());
        let mut graceful_shutdown = Some(graceful_shutdown);
        let mut is_draining = false;
        // Each connection has one timer. The timer is not reset for each request. Instead, the gateway computes the
        // remaining time when the timer fires.
        let time_left = || self.activity.time_left(settings.header_timeout, settings.idle_timeout);
        let longest_sleep = if suspend.is_some() { SUSPEND_AFTER } else { Duration::MAX };
        let mut deadline = pin!(sleep(time_left().unwrap_or_default().min(longest_sleep)));
        let mut was_suspended = false;
        let mut waker = SelectiveWaker::new();
        // Value of the headers counter in the last `HeadersStarted` event. 0 before the first of these events.
        let mut current_headers = 0;
        loop {
            let event = poll_fn(|cx| {
                if let Poll::Ready(result) = watchdog.poll(connection.as_mut(), cx) {
                    return Poll::Ready(ConnectionEvent::Closed(result));
                }
                if graceful_shutdown.is_some()
                    && (watchdog.flow().is_request_abandoned() || self.peer.has_rejected_certificate())
                {
                    return Poll::Ready(ConnectionEvent::NoFurtherRequest);
                }
                if was_suspended && !self.activity.is_suspended() {
                    return Poll::Ready(ConnectionEvent::Resumed);
                }
                if let Some(started) =
                    self.activity.partial_headers().filter(|started| *started != current_headers && !is_draining)
                {
                    return Poll::Ready(ConnectionEvent::HeadersStarted(started));
                }
                let Some(mut cx) = waker.take_context(cx) else { return Poll::Pending };
                if !is_draining && drain_started.as_mut().poll(&mut cx).is_ready() {
                    return Poll::Ready(ConnectionEvent::Draining);
                }
                deadline.as_mut().poll(&mut cx).map(|()| ConnectionEvent::TimerFired)
            });
            match event.await {
                ConnectionEvent::Closed(None) => return Ok(CloseReason::WriteStalled),
                ConnectionEvent::Closed(Some(Ok(()))) => break,
                // hyper has already responded to the invalid request, such as a request with too large headers, when it
                // returns the error.
                ConnectionEvent::Closed(Some(Err(error))) if error.is_parse() => {
                    let is_too_large = error.is_parse_too_large();
                    self.gateway.record_unparsed(if is_too_large {
                        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
                    } else {
                        StatusCode::BAD_REQUEST
                    });
                    return Ok(CloseReason::RequestUnread);
                }
                ConnectionEvent::Closed(Some(Err(_))) if watchdog.flow().is_close_delimited() => {
                    return Ok(CloseReason::TruncatedResponse);
                }
                ConnectionEvent::Closed(Some(Err(error)))
                    if error.is_user() && watchdog.flow().is_request_abandoned() =>
                {
                    return Ok(CloseReason::RequestUnread);
                }
                ConnectionEvent::Closed(Some(Err(_))) if self.activity.has_too_many_resets() => {
                    self.log_too_many_resets();
                    return Ok(CloseReason::TooManyResets);
                }
                ConnectionEvent::Closed(Some(Err(error))) => return Err(error.into()),
                ConnectionEvent::NoFurtherRequest => {
                    if let Some(graceful_shutdown) = graceful_shutdown.take() {
                        graceful_shutdown(connection.as_mut());
                    }
                }
                ConnectionEvent::HeadersStarted(started) => {
                    current_headers = started;
                    deadline.as_mut().reset(Instant::now() + settings.header_timeout);
                }
                ConnectionEvent::Draining => {
                    is_draining = true;
                    self.activity.announce_close(!drain_grace.is_zero());
                    deadline.as_mut().reset(Instant::now() + drain_grace);
                }
                ConnectionEvent::TimerFired
                    if !is_draining && self.activity.partial_headers() == Some(current_headers) =>
                {
                    return Ok(CloseReason::Timeout);
                }
                ConnectionEvent::TimerFired => {
                    if let Some(graceful_shutdown) = graceful_shutdown.take_if(|_| is_draining) {
                        graceful_shutdown(connection.as_mut());
                    }
                    let Some(time_left) = time_left() else { return Ok(CloseReason::Timeout) };
                    let is_idle = self.activity.may_suspend(SUSPEND_AFTER) && flow.unfinished_bodies().is_none();
                    if let Some(suspend) = suspend.as_mut().filter(|_| is_idle && !is_draining) {
                        suspend(connection.as_mut());
                        was_suspended = true;
                    }
                    let duration = if was_suspended { time_left } else { time_left.min(longest_sleep) };
                    deadline.as_mut().reset(Instant::now() + duration);
                }
                ConnectionEvent::Resumed => {
                    was_suspended = false;
                    if !is_draining {
                        deadline.as_mut().reset(Instant::now() + SUSPEND_AFTER);
                    }
                }
            }
            waker.mark_ready();
        }
        if let Some(tunnel) = flow.take_tunnel() {
            tunnel.await;
        }
        Ok(if watchdog.flow().is_request_abandoned() { CloseReason::RequestUnread } else { CloseReason::Complete })
    }
}

/// An HTTP/1.1 connection, which can be suspended while it is idle.
///
/// hyper keeps a read buffer of at least 8 KiB as long as its connection exists. A suspended connection has no
/// connection of hyper, only its stream. When the client sends data or closes the connection, the stream gets a new
/// connection of hyper.
struct Http1Connection<'a, S, V: HttpService<Incoming>> {
    /// The connection of hyper, unless the connection is suspended or closes.
    serving: Option<Box<http1::UpgradeableConnection<TokioIo<MonitoredStream<S>>, V>>>,
    /// The stream and the service of a connection that is suspended or closes.
    suspended: Option<(MonitoredStream<S>, V)>,
    is_closing: bool,
    settings: &'a ServerSettings,
    activity: &'a Arc<ConnectionActivity>,
}

impl<'a, S, V> Http1Connection<'a, S, V>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    V: HttpService<Incoming, ResBody = Body> + Unpin,
{
    fn new(
        stream: MonitoredStream<S>,
        service: V,
        settings: &'a ServerSettings,
        activity: &'a Arc<ConnectionActivity>,
    ) -> Self {
        let suspended = Some((stream, service));
        let mut connection = Http1Connection { serving: None, suspended, is_closing: false, settings, activity };
        connection.resume();
        connection
    }

    /// Let hyper serve the connection.
    fn resume(&mut self) {
        self.activity.set_suspended(false);
        if let Some((stream, service)) = self.suspended.take() {
            let connection = http1_builder(self.settings).serve_connection(TokioIo::new(stream), service);
            self.serving = Some(Box::new(connection.with_upgrades()));
        }
    }

    /// Suspend the idle connection in the next call of `poll`.
    fn suspend(&mut self) {
        if let Some(connection) = &mut self.serving {
            // An idle connection of hyper ends in the next poll, and leaves the stream open. If hyper is not idle, the
            // next poll does not suspend the connection, and hyper closes it after the request. Bytes of this request
            // are therefore never parsed as another request.
            self.activity.set_suspended(true);
            Pin::new(&mut **connection).graceful_shutdown();
        }
    }

    /// Close the connection after the request in progress. Without such a request, close the connection at once.
    fn graceful_shutdown(&mut self) {
        self.activity.set_suspended(false);
        if let Some(connection) = &mut self.serving {
            Pin::new(&mut **connection).graceful_shutdown();
            // A connection of hyper that has parsed no request would wait for the rest of incomplete headers.
            let has_only_partial_headers =
                self.activity.partial_headers().is_some() && !self.activity.has_unwritten_response();
            if !has_only_partial_headers {
                return;
            }
            self.release_hyper();
        }
        self.is_closing = true;
    }

    /// Drop the connection of hyper, and keep its stream.
    fn release_hyper(&mut self) {
        let parts = self.serving.take().and_then(|connection| connection.into_parts());
        self.suspended = parts.map(|parts| {
            let mut stream = parts.io.into_inner();
            stream.put_back(parts.read_buf);
            (stream, parts.service)
        });
    }
}

impl<S, V> Future for Http1Connection<'_, S, V>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    V: HttpService<Incoming, ResBody = Body> + Unpin,
{
    type Output = hyper::Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        let this = self.get_mut();
        loop {
            if let Some(connection) = &mut this.serving {
                let polled = Pin::new(&mut **connection).poll(cx);
                if !this.activity.is_suspended() || !matches!(polled, Poll::Ready(Ok(()))) {
                    this.activity.set_suspended(false);
                    return polled;
                }
                this.release_hyper();
                debug!("idle connection suspended: its buffers are free until the next request");
            }
            let Some((stream, _)) = &mut this.suspended else { return Poll::Ready(Ok(())) };
            // Ignore errors of the stream, as hyper does if the connection is idle.
            if this.is_closing {
                return Pin::new(stream).poll_shutdown(cx).map(|_| Ok(()));
            }
            if ready!(stream.poll_readable(cx)).is_err() {
                return Poll::Ready(Ok(()));
            }
            this.resume();
        }
    }
}

impl StreamExecutor {
    /// Create the executor of a connection. `budget` is the memory budget of all connections. The streams of this
    /// connection may use a part of this budget.
    fn new(
        settings: &ServerSettings,
        budget: Arc<BufferBudget>,
        slow_readers: Arc<SlowReaders>,
        drain: CancellationToken,
    ) -> Self {
        let max_inspected = (settings.max_buffered / INSPECTED_SHARE).max(settings.inspect_body);
        let inspected = Arc::new(BufferBudget::with_parent(budget.clone(), max_inspected));
        let budget = Arc::new(BufferBudget::with_parent(budget, HTTP2_CONNECTION_BUFFER));
        let abandoned = Default::default();
        let body_idle_timeout = settings.body_idle_timeout;
        let streams = ConnectionStreams { body_idle_timeout, budget, inspected, slow_readers, abandoned, drain };
        StreamExecutor(Arc::new(streams))
    }

    /// Create the flow of the stream that hyper passes to the executor next.
    fn start_stream(&self) -> Arc<StreamFlow> {
        let flow = self.new_flow();
        NEXT_FLOW.set(Some(flow.clone()));
        flow
    }

    fn new_flow(&self) -> Arc<StreamFlow> {
        StreamFlow::for_stream(self.0.budget.clone(), self.0.inspected.clone())
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let flow = NEXT_FLOW.take().unwrap_or_else(|| self.new_flow());
        let mut watchdog = WriteWatchdog::new(self.0.body_idle_timeout, flow.clone(), self.0.slow_readers.clone());
        let mut stream = Box::pin(stream);
        let streams = self.0.clone();
        tokio::spawn(async move {
            poll_fn(|cx| watchdog.poll(stream.as_mut(), cx)).await;
            // If the watchdog has stopped, this sends RST_STREAM.
            drop(stream);
            if let Some(tunnel) = flow.take_tunnel() {
                tunnel.await;
            }
            if let Some(request) = flow.take_abandoned() {
                streams.abandoned.fetch_add(1, Ordering::Relaxed);
                // Box the future, because only few streams need space for it.
                Box::pin(flow.finish_abandoned(request)).await;
                streams.abandoned.fetch_sub(1, Ordering::Relaxed);
            }
        });
    }
}

impl<K: Keeper + Unpin> Future for ServedRequest<K> {
    type Output = Result<Response<Body>, h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(request) = &mut self.request else { return Poll::Pending };
        let result = ready!(request.as_mut().poll(cx));
        self.request = None;
        Poll::Ready(result.map(|response| *response))
    }
}

impl<K: Keeper> Drop for ServedRequest<K> {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.keeper.keep(request);
        }
    }
}

impl Keeper for &ConnectionKeeper<'_> {
    fn keep(&self, request: Pin<Box<HandledRequest>>) {
        if !self.drain.is_cancelled() {
            self.flow.keep_abandoned(|| unanswered(request));
        }
    }
}

impl Keeper for StreamKeeper {
    fn keep(&self, request: Pin<Box<HandledRequest>>) {
        if self.counts_resets {
            self.activity.record_reset(self.started_at.elapsed());
        }
        if !self.streams.drain.is_cancelled() {
            self.flow.keep_abandoned(|| unanswered(request));
        }
    }
}

/// Return the rest of a request whose client has gone away.
fn unanswered(request: Pin<Box<HandledRequest>>) -> Continuation {
    Box::pin(async move { drop(request.await) })
}

/// Serve a request, unless `is_refused` returns true when the task of the request runs. If the result is an error, hyper
/// resets the HTTP/2 stream or closes the HTTP/1 connection. The future and the request are boxed, because an HTTP/1 connection would
/// otherwise reserve space for them between requests.
fn serve_request(
    gateway: Arc<Gateway>,
    peer: Arc<Peer>,
    serves: ListenerProtocol,
    mut in_flight: InFlightRequest,
    request: Request<Incoming>,
    is_refused: impl FnOnce() -> bool + Send + 'static,
) -> Pin<Box<HandledRequest>> {
    let http2 = request.version() == Version::HTTP_2;
    // Call `unfinished_bodies` before `RequestBody::new`, which may count the body of this request as started. The
    // result then covers only the bodies of earlier requests.
    let unfinished_bodies = if http2 { None } else { in_flight.flow().unfinished_bodies() };
    let is_malformed = http2 && has_padding(request.headers());
    let mut request = Box::new(request.map(|body| RequestBody::new(body, http2, &in_flight)));
    if http2 && *request.method() == Method::CONNECT {
        upgrade::convert_extended_connect(&mut request);
    }
    boxed(move || async move {
        // Reset the stream of a malformed HTTP/2 request (RFC 9113 §8.1.1). For HTTP/1, hyper itself rejects malformed
        // requests.
        if is_malformed {
            return Err(h2::Reason::PROTOCOL_ERROR.into());
        }
        if is_refused() {
            return Err(h2::Reason::REFUSED_STREAM.into());
        }
        if gateway.memory_guard().has_limit() {
            // Box the future, because requests without a memory limit need no space for it.
            match boxed(|| gateway.start_request(!http2)).await {
                Ok(room) => in_flight.hold(room),
                Err(NoMemory) => return refuse_for_memory(&gateway, http2),
            }
        }
        if let Some(bodies) = unfinished_bodies
            && !in_flight.flow().wait_for_bodies(bodies).await
        {
            return Err(h2::Reason::CANCEL.into());
        }
        let mut response = match serves {
            // Box the future, because requests on other listeners need no space for it.
            ListenerProtocol::Decisions => boxed(|| gateway.decide(request, &peer, in_flight.flow())).await,
            ListenerProtocol::RateLimitHttp => boxed(|| gateway.answer_json(request, &peer, in_flight.flow())).await,
            ListenerProtocol::Http | ListenerProtocol::RateLimit => {
                gateway.handle(request, &peer, in_flight.flow()).await
            }
        };
        complete_response(in_flight, &mut response);
        Ok(response)
    })
}

/// Refuse a request because the memory is nearly used up: 503 over HTTP/1, where the connection is then closed. A client
/// may send the request of a refused HTTP/2 stream again (RFC 9113 §8.7).
fn refuse_for_memory(gateway: &Gateway, http2: bool) -> Result<Box<Response<Body>>, h2::Error> {
    gateway.record_unparsed(StatusCode::SERVICE_UNAVAILABLE);
    if http2 {
        return Err(h2::Reason::REFUSED_STREAM.into());
    }
    let detail = "the memory of the gateway is nearly used up";
    let mut response = Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).into_response();
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Ok(response)
}

/// Return an HTTP/1 builder that limits the memory per connection.
fn http1_builder(settings: &ServerSettings) -> http1::Builder {
    let mut builder = http1::Builder::new();
    // Copy headers and body into one buffer, because a copy of a small response costs less than a vectored write.
    builder.writev(false);
    // `MonitoredStream` detects clients that end their side of the connection before the response.
    builder.half_close(true);
    // Set both limits, because hyper fills buffers to their capacity, which can exceed `max_buf_size`.
    builder.max_buf_size(settings.max_header_size).max_header_size(settings.max_header_size);
    if settings.max_headers != HYPER_MAX_HEADERS {
        builder.max_headers(settings.max_headers);
    }
    builder
}

/// Return an HTTP/2 builder that limits the memory per connection.
fn http2_builder(settings: &ServerSettings, executor: StreamExecutor) -> http2::Builder<StreamExecutor> {
    let mut builder = http2::Builder::new(executor);
    builder
        .max_concurrent_streams(settings.http2_max_streams)
        .initial_stream_window_size(HTTP2_WINDOW)
        .max_send_buf_size(HTTP2_SEND_BUFFER)
        .max_header_list_size(settings.max_header_size as u32);
    builder
}

// Lingering close of a connection, which lets the client read the last response.
//
// If a socket is closed while data arrives, the kernel sends a reset. The client then loses the part of the response
// that it has not read. To prevent the reset, the gateway sends FIN, and then reads and discards data until the client
// closes the connection as well.

/// Maximum total time to read and discard the data of a client that keeps sending, as with nginx's `lingering_time`.
const LINGERING_TIME: Duration = Duration::from_secs(30);

/// Maximum time to wait for more data from the client, as with nginx's `lingering_timeout`.
const LINGERING_TIMEOUT: Duration = Duration::from_secs(5);

/// Size of the buffer for discarded data in bytes.
const LINGERING_BUFFER_SIZE: usize = 16 << 10;

/// Send FIN, then read and discard data until the client closes the connection or a timeout expires.
pub(super) async fn lingering_close(mut stream: TcpStream) {
    // Ignore the error of `shutdown`, which fails if FIN was already sent.
    let _ = stream.shutdown().await;
    let mut buffer = vec![0; LINGERING_BUFFER_SIZE];
    let discard = async { while let Ok(Ok(1..)) = timeout(LINGERING_TIMEOUT, stream.read(&mut buffer)).await {} };
    let _ = timeout(LINGERING_TIME, discard).await;
}

/// Close the connection with a reset (RST), so that the client does not mistake a truncated response for a complete
/// response. With a reset, the kernel also discards data that the client has not read.
pub(super) fn reset_on_close(stream: &TcpStream) {
    // Ignore the error, because the call fails only if the connection is already closed.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

// === A waker for futures that are rarely ready: they are polled only after they have woken the task ===

/// Wakes a task on behalf of some of its futures, and tells the task whether one of these futures has woken it.
#[derive(Debug)]
pub(super) struct SelectiveWaker {
    state: Arc<WakeState>,
    waker: Waker,
    /// The waker of the task.
    task: Option<Waker>,
}

#[derive(Debug)]
struct WakeState {
    woken: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl SelectiveWaker {
    /// Create a waker that is ready, so that the futures are polled for the first time.
    pub(super) fn new() -> Self {
        let state = Arc::new(WakeState { woken: AtomicBool::new(true), task: Mutex::default() });
        SelectiveWaker { waker: state.clone().into(), state, task: None }
    }

    /// If one of the futures has woken the task since the last call, return the context for polling all these futures.
    /// Otherwise return `None`.
    pub(super) fn take_context(&mut self, cx: &Context<'_>) -> Option<Context<'_>> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            // Store the waker before reading the flag, so that every later wake reaches this task.
            self.state.lock_task().clone_from(&self.task);
        }
        // Load the flag before the swap. In most calls, no future has woken the task, and the load avoids a write to a
        // shared cache line.
        let woken = &self.state.woken;
        (woken.load(Ordering::Relaxed) && woken.swap(false, Ordering::AcqRel)).then(|| Context::from_waker(&self.waker))
    }

    /// Make the next call of [`Self::take_context`] return a context. Call this function after the futures were
    /// changed, so that they are polled once.
    pub(super) fn mark_ready(&self) {
        self.state.woken.store(true, Ordering::Release);
    }
}

impl WakeState {
    fn lock_task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for WakeState {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        if let Some(task) = &*self.lock_task() {
            task.wake_by_ref();
        }
    }
}
