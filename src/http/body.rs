//! Response bodies: local replies (responses that the gateway itself generates), bodies from upstreams, and tunnels
//! after protocol upgrades.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{HeaderMap, Response, StatusCode, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};

use crate::http::body_limits::{BodyError, BodyLimits, Deadline, IdleTimer, ReadBound, ReadLimit, RestPermit};
use crate::http::flow::{DataChunk, InFlightRequest, StreamFlow};
use crate::http::headers::has_padding;
use crate::http::upgrade::Tunnel;

/// Callbacks for a response body.
pub trait OnComplete: Send {
    /// Called with each chunk before the chunk is sent to the client. The callback may change the chunk only if the
    /// response declares no body length. `Break` ends the body after this chunk, and aborts the upstream response.
    fn on_data(&mut self, _data: &mut Bytes) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// Return whether the callback holds back data, which [`on_end`](Self::on_end) returns.
    fn holds_data(&self) -> bool {
        false
    }

    /// Called at the end of the body, before `on_complete`. Return the data that the callback has held back.
    fn on_end(&mut self) -> Bytes {
        Bytes::new()
    }

    /// Return a permit if the gateway continues to read an upstream response after the client has left, so that
    /// `on_data` sees its end.
    fn start_rest(&self) -> Option<RestPermit> {
        None
    }

    /// Called after the last use of the body. `bytes_sent` is the number of body bytes that were sent.
    fn on_complete(self: Box<Self>, bytes_sent: u64, end: BodyEnd);
}

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyEnd {
    /// The whole body was sent to the client.
    Sent,
    /// The client left, but the gateway has read the upstream response to its end.
    Read,
    /// The client or the upstream aborted the response.
    Aborted,
}

/// Maximum time for which the gateway reads a response after the client has left.
const REST_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of bytes of a response that the gateway reads after the client has left.
const MAX_REST: usize = 1 << 20;

/// The resources that an upstream response occupies until its body has been read: a connection and a request permit.
pub trait UpstreamLease: Send {
    /// Called when the response body has been read to its end, so that the connection can be reused. If a lease is
    /// dropped without a call of `release`, its HTTP/1.1 connection is closed.
    fn release(self: Box<Self>);
}

/// Result of polling a body for its next frame.
pub(super) type PollFrame = Poll<Option<Result<Frame<Bytes>, BodyError>>>;

/// A response body.
pub struct Body {
    kind: BodyKind,
    bytes_sent: u64,
    complete: bool,
    on_complete: Option<Box<dyn OnComplete>>,
    /// Counts the request as in flight on its client connection, and records whether response data is pending for the
    /// client.
    in_flight: Option<InFlightRequest>,
}

enum BodyKind {
    Full(Option<Bytes>),
    /// The answer to a gRPC call: a message and its trailers.
    Message(Option<Bytes>, Option<HeaderMap>),
    Upstream(UpstreamBody),
    /// A tunnel after a protocol upgrade, through which bytes flow in both directions. The guard holds the request
    /// permit of the upstream endpoint.
    Tunnel {
        tunnel: Option<Box<Tunnel>>,
        _guard: Option<Box<dyn Any + Send>>,
    },
}

/// The body of an upstream response.
struct UpstreamBody {
    incoming: Incoming,
    /// `None` after the whole body was read.
    lease: Option<Box<dyn UpstreamLease>>,
    /// Time at which the body is aborted with an error.
    deadline: Option<Deadline>,
    /// Whether a timeout ends the body with the trailers of a gRPC call, instead of an error.
    is_grpc: bool,
    /// `None` if the length of the body is unknown. A body of unknown length, such as a stream of server-sent events,
    /// may pause for any time.
    idle_timer: Option<IdleTimer>,
    /// Whether the callbacks change the length of the body.
    has_new_length: bool,
    /// Limits how much data hyper reads from the upstream connection in advance. `None` for HTTP/2 connections, which
    /// carry several responses.
    read_bound: Option<ReadBound>,
    /// Whether reading the body has failed, so that its rest cannot be read.
    is_failed: bool,
}

impl Body {
    /// Create the body of a local reply.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let complete = bytes.is_empty();
        Body::new(BodyKind::Full((!complete).then_some(bytes)), complete)
    }

    /// Create the body of an answer to a gRPC call.
    pub fn with_trailers(bytes: Bytes, trailers: HeaderMap) -> Self {
        Body::new(BodyKind::Message(Some(bytes), Some(trailers)), false)
    }

    /// Create a body from an upstream response. `read_bound` limits the reads from an upstream connection that carries
    /// only this response. It is `None` for HTTP/2 connections. The body adapts the read limit to the buffer budget of
    /// the client connection.
    pub fn from_upstream(
        incoming: Incoming,
        limits: BodyLimits,
        lease: Box<dyn UpstreamLease>,
        read_bound: Option<ReadBound>,
    ) -> Self {
        let idle_timer = incoming.size_hint().exact().map(|_| IdleTimer::new(limits.idle_timeout));
        let mut upstream = UpstreamBody {
            incoming,
            lease: Some(lease),
            deadline: None,
            is_grpc: false,
            idle_timer,
            has_new_length: false,
            read_bound,
            is_failed: false,
        };
        let complete = upstream.release_at_end();
        upstream.deadline = limits.deadline.filter(|_| !complete).map(Deadline::new);
        Body::new(BodyKind::Upstream(upstream), complete)
    }

    /// Create the body of a response that switches protocols. The body holds `guard`, the request permit of the
    /// upstream endpoint, until the tunnel ends.
    pub fn from_upgrade(guard: Box<dyn Any + Send>) -> Self {
        Body::new(BodyKind::Tunnel { tunnel: None, _guard: Some(guard) }, false)
    }

    fn new(kind: BodyKind, complete: bool) -> Self {
        Body { kind, bytes_sent: 0, complete, on_complete: None, in_flight: None }
    }

    /// Set the tunnel that follows a protocol upgrade. The `on_complete` callback is then called at the end of the
    /// tunnel.
    pub fn with_tunnel(mut self, new: Tunnel) -> Self {
        if let BodyKind::Tunnel { tunnel, .. } = &mut self.kind {
            *tunnel = Some(Box::new(new));
        }
        self
    }

    /// Copy bytes in both directions until the tunnel ends, and then drop the body.
    async fn run_tunnel(mut self) {
        if let BodyKind::Tunnel { tunnel, .. } = &mut self.kind
            && let Some(tunnel) = tunnel.take()
        {
            self.complete = tunnel.run(&mut self.bytes_sent).await;
        }
    }

    /// End the response to a gRPC call with the status DEADLINE_EXCEEDED if the route timeout or the deadline of the
    /// client expires.
    pub fn end_with_grpc_status(&mut self) {
        if let BodyKind::Upstream(upstream) = &mut self.kind {
            upstream.is_grpc = true;
        }
    }

    /// Set the callbacks for the data and the end of the body.
    pub fn on_complete(&mut self, hook: Box<dyn OnComplete>) {
        self.on_complete = Some(hook);
    }

    /// Return whether this is the body of an upstream response.
    pub(super) fn is_from_upstream(&self) -> bool {
        matches!(self.kind, BodyKind::Upstream(_))
    }

    /// Declare no length for the body of an upstream response.
    pub fn forget_length(&mut self) {
        if let BodyKind::Upstream(upstream) = &mut self.kind {
            upstream.has_new_length = true;
        }
    }

    /// Replace the callbacks of the body of an upstream response by callbacks that change its content.
    pub(super) fn change_content(&mut self, wrap: impl FnOnce(Option<Box<dyn OnComplete>>) -> Box<dyn OnComplete>) {
        self.forget_length();
        self.on_complete = Some(wrap(self.on_complete.take()));
    }

    /// Count the request as in flight until the body is dropped.
    fn track_in_flight(&mut self, in_flight: InFlightRequest) {
        let flow = in_flight.flow();
        flow.mark_data_pending();
        flow.set_deadline(self.kind.deadline());
        self.in_flight = Some(in_flight);
    }

    /// Remove the content of a local reply and return it, so that the caller can replace it. Return `None` for other
    /// bodies.
    pub fn take_content(&mut self) -> Option<Bytes> {
        let BodyKind::Full(bytes) = &mut self.kind else { return None };
        bytes.take()
    }

    /// Discard the content of a local reply and return its length in bytes. The response to a HEAD request must not
    /// have content (RFC 9110 §9.3.2). hyper discards the content for HTTP/1.1, but sends it for HTTP/2.
    pub fn discard_content(&mut self) -> Option<u64> {
        let BodyKind::Full(bytes) = &mut self.kind else { return None };
        self.complete = true;
        Some(bytes.take()?.len() as u64)
    }
}

/// Keep the request in flight until the body of its response is dropped. After a protocol upgrade, move the body to the
/// connection or the HTTP/2 stream, where it serves as the tunnel.
pub fn complete_response(in_flight: InFlightRequest, response: &mut Response<Body>) {
    if response.version() == Version::HTTP_10 {
        in_flight.flow().mark_close_delimited();
    }
    if matches!(response.body().kind, BodyKind::Tunnel { .. }) {
        let body = mem::replace(response.body_mut(), Body::full(""));
        return in_flight.set_tunnel(body.run_tunnel());
    }
    if in_flight.announces_close() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response.body_mut().track_in_flight(in_flight);
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").field("sent", &self.bytes_sent).field("complete", &self.complete).finish_non_exhaustive()
    }
}

impl HttpBody for Body {
    type Data = DataChunk;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<DataChunk>, BodyError>>> {
        let Body { kind, bytes_sent, complete, on_complete, in_flight } = &mut *self;
        let flow = in_flight.as_ref().map(InFlightRequest::flow);
        let multiplexed = flow.filter(|flow| flow.is_multiplexed());
        let polled = match kind {
            BodyKind::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            BodyKind::Message(bytes, trailers) => {
                let frame = bytes.take().map(Frame::data).or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(frame.map(Ok))
            }
            BodyKind::Upstream(upstream) => {
                let ready = ready!(upstream.poll_ready(multiplexed.map(|flow| &**flow), *bytes_sent, cx));
                let polled = match ready {
                    Ok(()) => upstream.poll_data(cx),
                    Err(BodyError::RouteTimeout) if upstream.is_grpc => {
                        upstream.limit_reads(ReadLimit::Small);
                        *kind = BodyKind::Full(None);
                        return Poll::Ready(Some(Ok(Frame::trailers(deadline_exceeded()))));
                    }
                    Err(error) => Poll::Ready(Some(Err(error))),
                };
                upstream.is_failed |= matches!(polled, Poll::Ready(Some(Err(_))));
                polled
            }
            BodyKind::Tunnel { .. } => Poll::Ready(None),
        };
        if let Some(flow) = flow {
            match &polled {
                Poll::Ready(Some(_)) => flow.mark_data_pending(),
                Poll::Ready(None) | Poll::Pending => flow.mark_drained(),
            }
        }
        let Some(frame) = ready!(polled).transpose()? else {
            *complete = true;
            let held = on_complete.as_mut().map_or_else(Bytes::new, |hook| hook.on_end());
            *bytes_sent += held.len() as u64;
            let frame = (!held.is_empty()).then(|| Ok(Frame::data(DataChunk::untracked(held))));
            if frame.is_some() {
                *kind = BodyKind::Full(None);
            }
            return Poll::Ready(frame);
        };
        let mut is_ended = false;
        let frame = match (frame.into_data(), on_complete) {
            (Ok(mut data), Some(hook)) => {
                is_ended = hook.on_data(&mut data).is_break();
                if data.is_empty() && !is_ended {
                    // The frame has no data for the client. Wake the task at once: the upstream body has not returned
                    // `Pending` yet, so it will not wake the task.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Frame::data(data)
            }
            (Ok(data), None) => Frame::data(data),
            (Err(trailers), Some(hook)) if hook.holds_data() => {
                let held = hook.on_end();
                if let BodyKind::Upstream(upstream) = kind {
                    upstream.release_at_end();
                }
                *kind = BodyKind::Message(None, trailers.into_trailers().ok());
                Frame::data(held)
            }
            (Err(trailers), _) => trailers,
        };
        *bytes_sent += frame.data_ref().map_or(0, |data| data.len() as u64);
        if is_ended {
            if let BodyKind::Upstream(upstream) = kind {
                // The callback has ended the body. Resume the reads of the upstream connection: hyper detects that the
                // upstream body was dropped only when it reads, and then closes the connection.
                upstream.limit_reads(ReadLimit::Small);
            }
            *kind = BodyKind::Full(None);
        }
        let BodyKind::Upstream(upstream) = kind else {
            *complete = true;
            return Poll::Ready(Some(Ok(frame.map_data(DataChunk::untracked))));
        };
        *complete = upstream.release_at_end();
        Poll::Ready(Some(Ok(match multiplexed {
            Some(flow) => {
                let chunk = frame.map_data(|bytes| DataChunk::tracked(bytes, flow));
                // Pause the reads of the upstream connection. After a complete response, do not pause them, because
                // another request may already use the connection.
                if !*complete {
                    upstream.limit_reads(ReadLimit::Paused);
                }
                chunk
            }
            None => frame.map_data(DataChunk::untracked),
        })))
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyKind::Full(bytes) => bytes.is_none(),
            BodyKind::Message(_, trailers) => trailers.is_none(),
            BodyKind::Upstream(upstream) => {
                upstream.incoming.is_end_stream() && !self.on_complete.as_ref().is_some_and(|hook| hook.holds_data())
            }
            BodyKind::Tunnel { .. } => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyKind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodyKind::Message(bytes, _) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodyKind::Upstream(upstream) if upstream.has_new_length => SizeHint::default(),
            BodyKind::Upstream(upstream) => upstream.incoming.size_hint(),
            BodyKind::Tunnel { .. } => SizeHint::with_exact(0),
        }
    }
}

/// Return the trailers of a gRPC call whose deadline has passed.
fn deadline_exceeded() -> HeaderMap {
    let status = (HeaderName::from_static("grpc-status"), HeaderValue::from_static("4"));
    let message = HeaderValue::from_static("the call exceeded its deadline");
    HeaderMap::from_iter([status, (HeaderName::from_static("grpc-message"), message)])
}

impl BodyKind {
    /// Return the time at which the gateway must abort the body.
    fn deadline(&self) -> Option<Instant> {
        match self {
            BodyKind::Upstream(upstream) => upstream.deadline.as_ref().map(|deadline| deadline.instant),
            BodyKind::Full(_) | BodyKind::Message(..) | BodyKind::Tunnel { .. } => None,
        }
    }
}

impl UpstreamBody {
    /// Return `Poll::Ready` when the next chunk may be read from the upstream. `multiplexed` is the flow of the
    /// client's HTTP/2 stream, or `None` for HTTP/1.x clients. The buffer budget of the flow limits how much of the
    /// response is buffered.
    fn poll_ready(
        &mut self,
        multiplexed: Option<&StreamFlow>,
        bytes_sent: u64,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), BodyError>> {
        // Check the route timeout even while data is available, because the timeout also applies to a client that reads
        // the response slowly.
        if self.deadline.as_mut().is_some_and(|deadline| deadline.poll(cx).is_ready()) {
            return Poll::Ready(Err(BodyError::RouteTimeout));
        }
        let Some(flow) = multiplexed else { return Poll::Ready(Ok(())) };
        // While the gateway waits for the client to read, `incoming` is not polled, so the idle timer of the upstream
        // does not run.
        let capacity = flow.poll_capacity(cx);
        self.limit_reads(if capacity.is_ready() { flow.reads(bytes_sent) } else { ReadLimit::Paused });
        capacity.map(Ok)
    }

    fn poll_data(&mut self, cx: &mut Context<'_>) -> PollFrame {
        match (Pin::new(&mut self.incoming).poll_frame(cx), &mut self.idle_timer) {
            (Poll::Pending, Some(idle_timer)) => {
                idle_timer.poll(cx).map(|()| Some(Err(BodyError::UpstreamIdleTimeout)))
            }
            (polled, idle_timer) => {
                if let Some(idle_timer) = idle_timer {
                    idle_timer.record_progress();
                }
                if let Poll::Ready(None) = polled {
                    self.release();
                }
                polled.map_err(BodyError::Aborted)
            }
        }
    }

    /// Release the lease if the body has been read to its end. Return whether the end was reached.
    fn release_at_end(&mut self) -> bool {
        let is_end = self.incoming.is_end_stream();
        if is_end {
            self.release();
        }
        is_end
    }

    fn release(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.release();
        }
    }

    fn limit_reads(&self, limit: ReadLimit) {
        if let Some(read_bound) = &self.read_bound {
            read_bound.set(limit);
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some(in_flight) = &self.in_flight {
            in_flight.flow().mark_drained();
            in_flight.flow().set_deadline(None);
        }
        if let BodyKind::Upstream(upstream) = &self.kind
            && !self.complete
        {
            // Resume the reads of the upstream connection: hyper detects that the upstream body was dropped only when
            // it reads, and then closes the connection.
            upstream.limit_reads(ReadLimit::Small);
        }
        let Some(hook) = self.on_complete.take() else { return };
        if self.complete {
            return hook.on_complete(self.bytes_sent, BodyEnd::Sent);
        }
        match mem::replace(&mut self.kind, BodyKind::Full(None)) {
            BodyKind::Upstream(upstream) if !upstream.is_failed => {
                let Some(permit) = hook.start_rest() else {
                    return hook.on_complete(self.bytes_sent, BodyEnd::Aborted);
                };
                let hook = Some(hook);
                let bytes_sent = self.bytes_sent;
                let rest = Rest { upstream, hook, bytes_sent, end: BodyEnd::Aborted, _permit: permit };
                // Without a runtime, the process is about to exit. `rest` is then dropped, which calls the hook.
                if let Ok(runtime) = Handle::try_current() {
                    runtime.spawn(rest.read());
                }
            }
            BodyKind::Upstream(_) | BodyKind::Full(_) | BodyKind::Message(..) | BodyKind::Tunnel { .. } => {
                hook.on_complete(self.bytes_sent, BodyEnd::Aborted);
            }
        }
    }
}

/// The rest of an upstream response whose client has left. Calls the hook when it is dropped.
struct Rest {
    upstream: UpstreamBody,
    hook: Option<Box<dyn OnComplete>>,
    bytes_sent: u64,
    end: BodyEnd,
    _permit: RestPermit,
}

impl Rest {
    async fn read(mut self) {
        // The route timeout ends the response, so it also ends its rest.
        let latest = Instant::now() + REST_TIMEOUT;
        let end = self.upstream.deadline.as_ref().map_or(latest, |deadline| deadline.instant.min(latest));
        // If the time is over, `end` stays `Aborted`.
        let _ = timeout_at(end, self.read_to_end()).await;
    }

    async fn read_to_end(&mut self) {
        let mut left = MAX_REST;
        while let Some(frame) = poll_fn(|cx| self.upstream.poll_data(cx)).await {
            let Ok(frame) = frame else { return };
            let (Ok(mut data), Some(hook)) = (frame.into_data(), &mut self.hook) else { continue };
            let Some(rest) = left.checked_sub(data.len()) else { return };
            left = rest;
            if hook.on_data(&mut data).is_break() {
                return;
            }
        }
        self.end = BodyEnd::Read;
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        if let Some(hook) = self.hook.take() {
            hook.on_complete(self.bytes_sent, self.end);
        }
    }
}

// === Framing of upstream responses: reject responses that other servers would interpret differently from hyper ===

/// Return the framing error of a response (RFC 9112 §6, RFC 9113 §8.2.1), or `None` if the framing is valid.
pub fn framing_error<B>(response: &Response<B>) -> Option<&'static str> {
    let headers = response.headers();
    if response.version() == Version::HTTP_2 && has_padding(headers) {
        return Some("a header value begins or ends with a space");
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let length = lengths.next();
    let coding = codings.next();
    if lengths.next().is_some() {
        return Some("more than one Content-Length");
    }
    if length.is_some_and(|length| length.is_empty() || !length.as_bytes().iter().all(u8::is_ascii_digit)) {
        return Some("Content-Length is not a number");
    }
    let coding = coding?;
    if !coding.as_bytes().eq_ignore_ascii_case(b"chunked") || codings.next().is_some() {
        return Some("a Transfer-Encoding other than chunked");
    }
    if length.is_some() {
        return Some("both Content-Length and Transfer-Encoding");
    }
    (response.version() == Version::HTTP_10).then_some("a Transfer-Encoding in HTTP/1.0")
}

/// Return whether a response declares a body although its status (204 or 304) does not allow one. The server may send
/// the body later, and the gateway would read it as the response to the next request.
pub fn declares_forbidden_body(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        && (headers.contains_key(TRANSFER_ENCODING)
            || headers.get(CONTENT_LENGTH).is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')))
}
