//! Response bodies: local replies, upstream bodies and tunnels, with their deadlines and completion callbacks.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Response, StatusCode, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;

use crate::http::body_limits::{BodyError, BodyLimits, Deadline, IdleTimer};
use crate::http::buffer_budget::{DataChunk, ReadBound, ReadLimit};
use crate::http::headers::has_padding;
use crate::http::idle::InFlightRequest;
use crate::http::upgrade::Tunnel;
use crate::http::write_watchdog::StreamFlow;

/// Callback for the end of a response body.
pub trait OnComplete: Send {
    /// Called once the body reached its end (`complete`) or was dropped before. `bytes_sent` bytes of data were sent.
    fn on_complete(self: Box<Self>, bytes_sent: u64, complete: bool);
}

/// Result of polling a body for its next frame.
pub(super) type PollFrame = Poll<Option<Result<Frame<Bytes>, BodyError>>>;

/// A response body.
pub struct Body {
    kind: BodyKind,
    bytes_sent: u64,
    complete: bool,
    /// When the body is aborted with an error.
    deadline: Option<Deadline>,
    /// Called at the end of the data, while the upstream connection can still be reused.
    on_data_end: Option<Box<dyn OnComplete>>,
    /// Called when the body is dropped.
    on_drop: Option<Box<dyn OnComplete>>,
    /// Keeps the request in flight on its connection.
    in_flight: Option<InFlightRequest>,
    /// Records the data that is pending for the client.
    flow: Option<Arc<StreamFlow>>,
    /// Limits how much the upstream connection reads ahead of the body.
    bound: Option<ReadBound>,
    /// Dropped with the body.
    drop_guard: Option<Box<dyn Any + Send>>,
}

enum BodyKind {
    Full(Option<Bytes>),
    /// An upstream body. The idle timer is set only if its length is known: other bodies, such as server-sent events,
    /// may pause.
    Upstream(Incoming, Option<IdleTimer>),
    /// No HTTP body: bytes in both directions after a protocol upgrade.
    Tunnel(Option<Box<Tunnel>>),
}

impl Body {
    /// Create the body of a local reply.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let complete = bytes.is_empty();
        Body::new(BodyKind::Full((!complete).then_some(bytes)), complete)
    }

    fn new(kind: BodyKind, complete: bool) -> Self {
        Body {
            kind,
            bytes_sent: 0,
            complete,
            deadline: None,
            on_data_end: None,
            on_drop: None,
            in_flight: None,
            flow: None,
            bound: None,
            drop_guard: None,
        }
    }

    /// Create a body from an upstream response. `on_data_end` is called at its end.
    pub fn from_upstream(body: Incoming, limits: BodyLimits, on_data_end: Box<dyn OnComplete>) -> Self {
        let mut body = Body::new(BodyKind::from_upstream(body, limits), false).on_data_end(on_data_end);
        body.check_end();
        body.deadline = limits.deadline.filter(|_| !body.complete).map(Deadline::new);
        body
    }

    /// Set the read limit of the upstream connection: its reads depend on how much may be buffered.
    pub fn with_read_limit(mut self, bound: ReadBound) -> Self {
        self.bound = Some(bound);
        self
    }

    /// Set the callback for the end of the data.
    pub fn on_data_end(mut self, on_data_end: Box<dyn OnComplete>) -> Self {
        self.on_data_end = Some(on_data_end);
        self
    }

    /// Replace this body by the tunnel that follows a protocol upgrade. The callbacks then report the end of the
    /// tunnel.
    pub fn with_tunnel(mut self, tunnel: Tunnel) -> Self {
        (self.kind, self.complete) = (BodyKind::Tunnel(Some(Box::new(tunnel))), false);
        self
    }

    /// Copy bytes in both directions until the tunnel ends, then drop the body.
    pub async fn run_tunnel(mut self: Box<Self>) {
        if let BodyKind::Tunnel(tunnel) = &mut self.kind
            && let Some(tunnel) = tunnel.take()
        {
            self.complete = tunnel.run(&mut self.bytes_sent).await;
        }
    }

    /// Set the callback for the drop of the body.
    pub fn on_drop(mut self, on_drop: Box<dyn OnComplete>) -> Self {
        self.on_drop = Some(on_drop);
        self
    }

    /// Keep the request in flight until the body is dropped.
    pub fn track_in_flight(&mut self, in_flight: InFlightRequest) {
        self.in_flight = Some(in_flight);
        self.flow = StreamFlow::current();
        if let Some(flow) = &self.flow {
            flow.mark_data_pending();
            flow.set_deadline(self.deadline.as_ref().map(|deadline| deadline.instant));
        }
    }

    /// Keep `guard` until the body is dropped.
    pub fn hold_until_drop(&mut self, guard: Box<dyn Any + Send>) {
        self.drop_guard = Some(guard);
    }

    /// Discard the content of a local reply and return its length in bytes. hyper does so for HEAD in HTTP/1.1; in
    /// HTTP/2 it would send the content (RFC 9110 §9.3.2).
    pub fn discard_content(&mut self) -> Option<u64> {
        let BodyKind::Full(bytes) = &mut self.kind else { return None };
        self.complete = true;
        Some(bytes.take()?.len() as u64)
    }

    /// Convert a frame for hyper. Chunks of multiplexed upstream bodies count against the buffer budget until hyper has
    /// written them.
    fn to_chunk(&self, frame: Frame<Bytes>) -> Frame<DataChunk> {
        let flow =
            self.flow.as_ref().filter(|flow| flow.is_multiplexed() && matches!(self.kind, BodyKind::Upstream(..)));
        frame.map_data(|bytes| match flow {
            Some(flow) => DataChunk::tracked(bytes, flow),
            None => DataChunk::untracked(bytes),
        })
    }

    /// Stop reading ahead of this chunk. The connection of a complete response keeps reading: another request may use
    /// it.
    fn pause(&self) {
        if let (Some(flow), Some(bound), false) = (&self.flow, &self.bound, self.complete)
            && flow.is_multiplexed()
        {
            bound.set(ReadLimit::Paused);
        }
    }

    fn check_end(&mut self) {
        if self.is_end_stream() {
            self.complete = true;
            if let Some(on_data_end) = self.on_data_end.take() {
                on_data_end.on_complete(self.bytes_sent, true);
            }
        }
    }
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
        // Checked even while data is available: a client that reads slowly also uses up the route timeout.
        if self.deadline.as_mut().is_some_and(|deadline| deadline.poll(cx).is_ready()) {
            return Poll::Ready(Some(Err(BodyError::RouteTimeout)));
        }
        if let Some(flow) = self.flow.as_ref().filter(|flow| flow.is_multiplexed()) {
            let room = flow.poll_capacity(cx);
            if let Some(bound) = &self.bound {
                bound.set(if room.is_ready() { flow.reads(self.bytes_sent) } else { ReadLimit::Paused });
            }
            // Waiting for the client: return before the body is polled, so that the upstream's idle timer does not run.
            ready!(room);
        }
        let polled = self.kind.poll(cx);
        if let Some(flow) = &self.flow {
            match &polled {
                Poll::Ready(Some(_)) => flow.mark_data_pending(),
                Poll::Ready(None) | Poll::Pending => flow.mark_drained(),
            }
        }
        let frame = ready!(polled);
        match &frame {
            Some(Ok(frame)) => self.bytes_sent += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) => {}
            None => self.complete = true,
        }
        if let Some(Err(error)) = frame {
            return Poll::Ready(Some(Err(error)));
        }
        if frame.is_none() {
            if let Some(on_data_end) = self.on_data_end.take() {
                on_data_end.on_complete(self.bytes_sent, true);
            }
        } else {
            self.check_end();
        }
        let frame = frame.map(|frame| frame.map(|frame| self.to_chunk(frame)));
        self.pause();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyKind::Full(bytes) => bytes.is_none(),
            BodyKind::Upstream(body, _) => body.is_end_stream(),
            BodyKind::Tunnel(_) => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyKind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodyKind::Upstream(body, _) => body.size_hint(),
            BodyKind::Tunnel(_) => SizeHint::with_exact(0),
        }
    }
}

impl BodyKind {
    fn from_upstream(body: Incoming, limits: BodyLimits) -> Self {
        let idle_timer = body.size_hint().exact().map(|_| IdleTimer::new(limits.idle_timeout));
        BodyKind::Upstream(body, idle_timer)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> PollFrame {
        match self {
            BodyKind::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            BodyKind::Upstream(body, idle_timer) => match (Pin::new(body).poll_frame(cx), idle_timer) {
                (Poll::Pending, Some(idle_timer)) => {
                    idle_timer.poll(cx).map(|()| Some(Err(BodyError::UpstreamIdleTimeout)))
                }
                (polled, idle_timer) => {
                    if let Some(idle_timer) = idle_timer {
                        idle_timer.record_progress();
                    }
                    polled.map_err(BodyError::Aborted)
                }
            },
            BodyKind::Tunnel(_) => Poll::Ready(None),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some(flow) = &self.flow {
            flow.mark_drained();
            flow.set_deadline(None);
        }
        // hyper notices that the body was dropped only when it reads on, and then closes the connection.
        if let Some(bound) = self.bound.as_ref().filter(|_| !self.complete) {
            bound.set(ReadLimit::Small);
        }
        for callback in [self.on_data_end.take(), self.on_drop.take()].into_iter().flatten() {
            callback.on_complete(self.bytes_sent, self.complete);
        }
    }
}

// === Framing of upstream responses: reject what other servers would interpret differently from hyper ===

/// Return what is wrong with the framing of a response, with or without a body (RFC 9112 §6, RFC 9113 §8.2.1). Return
/// `None` if it is valid.
pub fn framing_error<B>(response: &Response<B>) -> Option<&'static str> {
    let headers = response.headers();
    if response.version() == Version::HTTP_2 && has_padding(headers) {
        return Some("a header value begins or ends with a space");
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let (length, coding) = (lengths.next(), codings.next());
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

/// Return whether a response that must not have a body declares one. The server may send the body later, and it would
/// be read as the response to the next request.
pub fn declares_forbidden_body(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        && (headers.contains_key(TRANSFER_ENCODING)
            || headers.get(CONTENT_LENGTH).is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')))
}
