//! HTTP on one connection, until it ends: requests, deadlines, the end of the gateway.

use std::error::Error;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http::{Request, Response, Version};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::http::body::Body;
use crate::http::buffer_budget::BufferBudget;
use crate::http::headers::has_padding;
use crate::http::idle::{ConnectionActivity, InFlightRequest};
use crate::http::request_body::RequestBody;
use crate::http::write_watchdog::{StreamFlow, WriteWatchdog};
use crate::listener::frame_limits::MonitoredStream;
use crate::listener::handshake::Protocol;
use crate::listener::stream::SelectiveWaker;
use crate::proxy::Gateway;
use crate::proxy::client::Peer;
use crate::snapshot::settings::ServerSettings;

/// hyper's own bound, which it keeps room for on the stack; setting any bound costs an allocation for each request.
const HYPER_MAX_HEADERS: usize = 100;

/// Bytes of a request that a stream holds for an upstream that does not take them.
const HTTP2_WINDOW: u32 = 256 << 10;

/// Bytes of a response that a stream holds for a client that does not take them, besides the piece that goes over it.
const HTTP2_SEND_BUFFER: usize = 128 << 10;

/// Bytes of responses and buffered requests that the streams of a connection hold together. Beyond it a stream goes on when all it
/// has is written.
const HTTP2_CONNECTION_BUFFER: usize = 256 << 10;

/// How a connection ends when it does not end well: the socket's, the handshake's or the protocol's error.
pub(super) type BoxError = Box<dyn Error + Send + Sync>;

/// How a connection ends otherwise.
pub(super) enum CloseReason {
    /// All is said.
    Complete,
    /// The client may still be sending what nobody reads.
    RequestUnread,
    /// A deadline is over.
    Timeout,
    /// The client does not take the response.
    WriteStalled,
    /// A response broke off, and what there is of it looks whole.
    TruncatedResponse,
}

/// What a connection comes to.
enum ConnectionEvent {
    /// Its end; none if its client does not take what there is.
    Closed(Option<hyper::Result<()>>),
    /// A request is not read to its end: what follows it is not a request.
    RequestUnread,
    /// A part of a request head came after an earlier request.
    HeadersStarted(u64),
    /// No new requests are wanted.
    Draining,
    /// A deadline is to be looked at.
    TimerFired,
}

/// One connection's HTTP.
pub(super) struct HttpConnection {
    pub(super) gateway: Arc<Gateway>,
    pub(super) peer: Arc<Peer>,
    /// As they were when it began.
    pub(super) settings: Arc<ServerSettings>,
    pub(super) activity: Arc<ConnectionActivity>,
    /// What all connections may buffer.
    pub(super) buffer_budget: Arc<BufferBudget>,
    /// Cancelled when no new requests are wanted.
    pub(super) drain: CancellationToken,
}

/// Runs the streams of an HTTP/2 connection, each for as long as its client takes what there is.
#[derive(Debug, Clone)]
struct StreamExecutor {
    body_idle_timeout: Duration,
    budget: Arc<BufferBudget>,
}

impl HttpConnection {
    /// Serves a connection to its end.
    pub(super) async fn run<S>(self, stream: S, protocol: Protocol) -> Result<CloseReason, BoxError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let settings = &self.settings;
        let io = TokioIo::new(MonitoredStream::new(stream, protocol, self.activity.clone()));
        match protocol {
            Protocol::Http1 => {
                // What a connection has outlives its requests, so they need not count who refers to it.
                let service = service_fn(|request| {
                    serve_request(&*self.gateway, &*self.peer, self.activity.start_request(), request)
                });
                let connection = http1_builder(settings).serve_connection(io, service).with_upgrades();
                let drain_grace = settings.drain_grace();
                self.drive(connection, drain_grace, |connection| connection.graceful_shutdown()).await
            }
            Protocol::Http2 => {
                // It runs requests as tasks of their own.
                let service = service_fn(|request| {
                    serve_request(self.gateway.clone(), self.peer.clone(), self.activity.start_request(), request)
                });
                let connection = http2_builder(settings, self.buffer_budget.clone()).serve_connection(io, service);
                // Its clients are told which of their requests are still answered (RFC 9113 §6.8).
                // On the heap: it is twice as large as the other.
                Box::pin(self.drive(connection, Duration::ZERO, |connection| connection.graceful_shutdown())).await
            }
        }
    }

    /// Sees to a connection's deadlines, and to its end when no new requests are wanted: within `farewell` one more may come
    /// that was under way already, and is told that it is the last.
    async fn drive<C>(
        &self,
        connection: C,
        drain_grace: Duration,
        graceful_shutdown: impl FnOnce(Pin<&mut C>),
    ) -> Result<CloseReason, BoxError>
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let settings = &self.settings;
        let mut connection = pin!(connection);
        let mut watchdog = WriteWatchdog::for_connection(settings.body_idle_timeout, self.buffer_budget.clone());
        let mut drain_started = pin!(self.drain.cancelled());
        let (mut graceful_shutdown, mut is_draining) = (Some(graceful_shutdown), false);
        // One timer for a connection, looked at when it fires; none is set for each request.
        let time_left = || self.activity.time_left(settings.header_timeout, settings.idle_timeout);
        let mut deadline = pin!(sleep(time_left().unwrap_or_default()));
        let mut waker = SelectiveWaker::new();
        // The head for which the deadline is set.
        let mut current_headers = 0;
        loop {
            let event = poll_fn(|cx| {
                if let Poll::Ready(result) = watchdog.poll(connection.as_mut(), cx) {
                    return Poll::Ready(ConnectionEvent::Closed(result));
                }
                if graceful_shutdown.is_some() && watchdog.flow().is_request_abandoned() {
                    return Poll::Ready(ConnectionEvent::RequestUnread);
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
                // The answer to a head that is too long, say, comes before its end.
                ConnectionEvent::Closed(Some(Err(error))) if error.is_parse() => return Ok(CloseReason::RequestUnread),
                ConnectionEvent::Closed(Some(Err(_))) if watchdog.flow().is_close_delimited() => {
                    return Ok(CloseReason::TruncatedResponse);
                }
                ConnectionEvent::Closed(Some(Err(error)))
                    if error.is_user() && watchdog.flow().is_request_abandoned() =>
                {
                    return Ok(CloseReason::RequestUnread);
                }
                ConnectionEvent::Closed(Some(Err(error))) => return Err(error.into()),
                ConnectionEvent::RequestUnread => {
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
                    match time_left() {
                        Some(grace) => deadline.as_mut().reset(Instant::now() + grace),
                        None => return Ok(CloseReason::Timeout),
                    }
                }
            }
            waker.mark_ready();
        }
        if let Some(tunnel) = self.activity.take_tunnel() {
            // On the heap: few connections need the room.
            Box::pin(tunnel.run_tunnel()).await;
        }
        Ok(if watchdog.flow().is_request_abandoned() { CloseReason::RequestUnread } else { CloseReason::Complete })
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let mut watchdog = WriteWatchdog::for_stream(self.body_idle_timeout, self.budget.clone());
        let mut stream = Box::pin(stream);
        // Dropping the stream resets it.
        tokio::spawn(poll_fn(move |cx| watchdog.poll(stream.as_mut(), cx).map(drop)));
    }
}

/// Answers a request; an error resets the stream. On the heap, as the request is: an HTTP/1.x connection keeps room for it from one request to the next.
fn serve_request(
    gateway: impl Deref<Target = Gateway>,
    peer: impl Deref<Target = Peer>,
    in_flight: InFlightRequest,
    request: Request<Incoming>,
) -> Pin<Box<impl Future<Output = Result<Response<Body>, h2::Error>>>> {
    let http2 = request.version() == Version::HTTP_2;
    // Before this request has a body of its own.
    let unfinished = if http2 { None } else { StreamFlow::unfinished_bodies() };
    let is_malformed = http2 && has_padding(request.headers());
    let request = Box::new(request.map(|body| RequestBody::new(body, http2).with_in_flight(&in_flight)));
    Box::pin(async move {
        // Before anything is made of it (RFC 9113 §8.1.1). hyper rejects what is malformed in HTTP/1.1.
        if is_malformed {
            return Err(h2::Reason::PROTOCOL_ERROR.into());
        }
        if let Some((flow, bodies)) = unfinished
            && !flow.wait_for_bodies(bodies).await
        {
            return Err(h2::Reason::CANCEL.into());
        }
        let response = gateway.handle(request, &peer).await;
        Ok(in_flight.attach_to(response))
    })
}

/// HTTP/1.x, with bounds on what a client can make us hold.
fn http1_builder(settings: &ServerSettings) -> http1::Builder {
    let mut builder = http1::Builder::new();
    // A head and a small body are one copy into one write: cheaper than a vectored one.
    builder.writev(false);
    // Buffers are filled to their capacity, so the one bound does not make the other.
    builder.max_buf_size(settings.max_header_size).max_header_size(settings.max_header_size);
    if settings.max_headers != HYPER_MAX_HEADERS {
        builder.max_headers(settings.max_headers);
    }
    builder
}

/// HTTP/2, likewise.
fn http2_builder(settings: &ServerSettings, budget: Arc<BufferBudget>) -> http2::Builder<StreamExecutor> {
    let budget = Arc::new(BufferBudget::with_parent(budget, HTTP2_CONNECTION_BUFFER));
    let mut builder = http2::Builder::new(StreamExecutor { body_idle_timeout: settings.body_idle_timeout, budget });
    builder
        .max_concurrent_streams(settings.http2_max_streams)
        .initial_stream_window_size(HTTP2_WINDOW)
        .max_send_buf_size(HTTP2_SEND_BUFFER)
        .max_header_list_size(settings.max_header_size as u32);
    builder
}

// Closing a connection so that the client can read the last answer.
//
// A socket that is closed while bytes arrive is reset, and the reset throws away what the other side has not read
// yet. So the end is sent, and what still comes is read and thrown away until the client closes, too.

/// A client that goes on sending is read for so long, as in nginx's `lingering_time`.
const LINGERING_TIME: Duration = Duration::from_secs(30);

/// A client that sends nothing more is waited for so long, as in nginx's `lingering_timeout`.
const LINGERING_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes that are thrown away at a time.
const LINGERING_BUFFER_SIZE: usize = 16 << 10;

/// Sends the end and waits for the client's.
pub(super) async fn lingering_close(mut stream: TcpStream) {
    // It may have been sent before.
    let _ = stream.shutdown().await;
    let mut buffer = vec![0; LINGERING_BUFFER_SIZE];
    let discard = async { while let Ok(Ok(1..)) = timeout(LINGERING_TIMEOUT, stream.read(&mut buffer)).await {} };
    let _ = timeout(LINGERING_TIME, discard).await;
}

/// Closes so that nothing that was sent before looks complete, and the kernel keeps nothing for a client that does
/// not read.
pub(super) fn reset_on_close(stream: &TcpStream) {
    // Where it fails the connection is gone already.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
