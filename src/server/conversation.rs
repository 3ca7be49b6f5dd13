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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::bell::Bell;
use super::protocol::Protocol;
use super::watched::Watched;
use crate::gateway::{Gateway, Peer};
use crate::http::activity::{Activity, InFlight};
use crate::http::body::Body;
use crate::http::budget::Budget;
use crate::http::flow::{Flow, Watch};
use crate::http::headers::has_padding;
use crate::http::upload::RequestBody;
use crate::runtime::ServerSettings;

/// hyper's own bound, which it keeps room for on the stack; setting any bound costs an allocation for each request.
const HYPER_MAX_HEADERS: usize = 100;

/// Bytes of a request that a stream holds for an upstream that does not take them.
const HTTP2_WINDOW: u32 = 256 << 10;

/// Bytes of a response that a stream holds for a client that does not take them, besides the piece that goes over it.
const HTTP2_SEND_BUFFER: usize = 128 << 10;

/// Bytes of responses and buffered requests that the streams of a connection hold together. Beyond it a stream goes on when all it
/// has is written.
const HTTP2_BUDGET: usize = 256 << 10;

/// How a connection ends when it does not end well: the socket's, the handshake's or the protocol's error.
pub(super) type BoxError = Box<dyn Error + Send + Sync>;

/// How a connection ends otherwise.
pub(super) enum End {
    /// All is said.
    Done,
    /// The client may still be sending what nobody reads.
    Cut,
    /// A deadline is over.
    Overdue,
    /// The client does not take the response.
    Stalled,
    /// A response broke off, and what there is of it looks whole.
    Torn,
}

/// What a connection comes to.
enum Event {
    /// Its end; none if its client does not take what there is.
    Ended(Option<hyper::Result<()>>),
    /// A request is not read to its end: what follows it is not a request.
    Cut,
    /// A part of a request head came after an earlier request.
    Head(u64),
    /// No new requests are wanted.
    Stopped,
    /// A deadline is to be looked at.
    Due,
}

/// One connection's HTTP.
pub(super) struct Conversation {
    pub(super) gateway: Arc<Gateway>,
    pub(super) peer: Arc<Peer>,
    /// As they were when it began.
    pub(super) settings: Arc<ServerSettings>,
    pub(super) activity: Arc<Activity>,
    /// What all connections may buffer.
    pub(super) budget: Arc<Budget>,
    /// Cancelled when no new requests are wanted.
    pub(super) stop: CancellationToken,
}

/// Runs the streams of an HTTP/2 connection, each for as long as its client takes what there is.
#[derive(Debug, Clone)]
struct Streams {
    body_idle_timeout: Duration,
    budget: Arc<Budget>,
}

impl Conversation {
    /// Serves a connection to its end.
    pub(super) async fn run<S>(self, stream: S, protocol: Protocol) -> Result<End, BoxError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let settings = &self.settings;
        let io = TokioIo::new(Watched::new(stream, protocol, self.activity.clone()));
        match protocol {
            Protocol::Http1 => {
                // What a connection has outlives its requests, so they need not count who refers to it.
                let service = service_fn(|request| answer(&*self.gateway, &*self.peer, self.activity.enter(), request));
                let connection = http1(settings).serve_connection(io, service).with_upgrades();
                let farewell = settings.farewell();
                self.attend(connection, farewell, |connection| connection.graceful_shutdown()).await
            }
            Protocol::Http2 => {
                // It runs requests as tasks of their own.
                let service = service_fn(|request| {
                    answer(self.gateway.clone(), self.peer.clone(), self.activity.enter(), request)
                });
                let connection = http2(settings, self.budget.clone()).serve_connection(io, service);
                // Its clients are told which of their requests are still answered (RFC 9113 §6.8).
                // On the heap: it is twice as large as the other.
                Box::pin(self.attend(connection, Duration::ZERO, |connection| connection.graceful_shutdown())).await
            }
        }
    }

    /// Sees to a connection's deadlines, and to its end when no new requests are wanted: within `farewell` one more may come
    /// that was under way already, and is told that it is the last.
    async fn attend<C>(
        &self,
        connection: C,
        farewell: Duration,
        wind_down: impl FnOnce(Pin<&mut C>),
    ) -> Result<End, BoxError>
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let settings = &self.settings;
        let mut connection = pin!(connection);
        let mut watch = Watch::connection(settings.body_idle_timeout, self.budget.clone());
        let mut stopped = pin!(self.stop.cancelled());
        let (mut wind_down, mut is_stopped) = (Some(wind_down), false);
        // One timer for a connection, looked at when it fires; none is set for each request.
        let grace = || self.activity.grace(settings.header_timeout, settings.idle_timeout);
        let mut deadline = pin!(sleep(grace().unwrap_or_default()));
        let mut bell = Bell::new();
        // The head for which the deadline is set.
        let mut head = 0;
        loop {
            let event = poll_fn(|cx| {
                if let Poll::Ready(ended) = watch.poll(connection.as_mut(), cx) {
                    return Poll::Ready(Event::Ended(ended));
                }
                if wind_down.is_some() && watch.flow().is_cut() {
                    return Poll::Ready(Event::Cut);
                }
                if let Some(begun) = self.activity.partial_head().filter(|begun| *begun != head && !is_stopped) {
                    return Poll::Ready(Event::Head(begun));
                }
                let Some(mut cx) = bell.answer(cx) else { return Poll::Pending };
                if !is_stopped && stopped.as_mut().poll(&mut cx).is_ready() {
                    return Poll::Ready(Event::Stopped);
                }
                deadline.as_mut().poll(&mut cx).map(|()| Event::Due)
            });
            match event.await {
                Event::Ended(None) => return Ok(End::Stalled),
                Event::Ended(Some(Ok(()))) => break,
                // The answer to a head that is too long, say, comes before its end.
                Event::Ended(Some(Err(error))) if error.is_parse() => return Ok(End::Cut),
                Event::Ended(Some(Err(_))) if watch.flow().is_unframed() => return Ok(End::Torn),
                Event::Ended(Some(Err(error))) if error.is_user() && watch.flow().is_cut() => return Ok(End::Cut),
                Event::Ended(Some(Err(error))) => return Err(error.into()),
                Event::Cut => {
                    if let Some(wind_down) = wind_down.take() {
                        wind_down(connection.as_mut());
                    }
                }
                Event::Head(begun) => {
                    head = begun;
                    deadline.as_mut().reset(Instant::now() + settings.header_timeout);
                }
                Event::Stopped => {
                    is_stopped = true;
                    self.activity.say_farewell(!farewell.is_zero());
                    deadline.as_mut().reset(Instant::now() + farewell);
                }
                Event::Due if !is_stopped && self.activity.partial_head() == Some(head) => return Ok(End::Overdue),
                Event::Due => {
                    if let Some(wind_down) = wind_down.take_if(|_| is_stopped) {
                        wind_down(connection.as_mut());
                    }
                    match grace() {
                        Some(grace) => deadline.as_mut().reset(Instant::now() + grace),
                        None => return Ok(End::Overdue),
                    }
                }
            }
            bell.ring();
        }
        if let Some(tunnel) = self.activity.switched() {
            // On the heap: few connections need the room.
            Box::pin(tunnel.pass()).await;
        }
        Ok(if watch.flow().is_cut() { End::Cut } else { End::Done })
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let mut watch = Watch::stream(self.body_idle_timeout, self.budget.clone());
        let mut stream = Box::pin(stream);
        // Dropping the stream resets it.
        tokio::spawn(poll_fn(move |cx| watch.poll(stream.as_mut(), cx).map(drop)));
    }
}

/// Answers a request; an error resets the stream. On the heap, as the request is: an HTTP/1.x connection keeps room for it from one request to the next.
fn answer(
    gateway: impl Deref<Target = Gateway>,
    peer: impl Deref<Target = Peer>,
    in_flight: InFlight,
    request: Request<Incoming>,
) -> Pin<Box<impl Future<Output = Result<Response<Body>, h2::Error>>>> {
    let http2 = request.version() == Version::HTTP_2;
    // Before this request has a body of its own.
    let previous = if http2 { None } else { Flow::behind_body() };
    let is_malformed = http2 && has_padding(request.headers());
    let request = Box::new(request.map(|body| RequestBody::new(body, http2).holding(&in_flight)));
    Box::pin(async move {
        // Before anything is made of it (RFC 9113 §8.1.1). hyper rejects what is malformed in HTTP/1.1.
        if is_malformed {
            return Err(h2::Reason::PROTOCOL_ERROR.into());
        }
        if let Some((flow, bodies)) = previous
            && !flow.is_request(bodies).await
        {
            return Err(h2::Reason::CANCEL.into());
        }
        let response = gateway.handle(request, &peer).await;
        Ok(in_flight.answer(response))
    })
}

/// HTTP/1.x, with bounds on what a client can make us hold.
fn http1(settings: &ServerSettings) -> http1::Builder {
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
fn http2(settings: &ServerSettings, budget: Arc<Budget>) -> http2::Builder<Streams> {
    let budget = Arc::new(Budget::within(budget, HTTP2_BUDGET));
    let mut builder = http2::Builder::new(Streams { body_idle_timeout: settings.body_idle_timeout, budget });
    builder
        .max_concurrent_streams(settings.http2_max_streams)
        .initial_stream_window_size(HTTP2_WINDOW)
        .max_send_buf_size(HTTP2_SEND_BUFFER)
        .max_header_list_size(settings.max_header_size as u32);
    builder
}
