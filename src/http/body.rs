//! Response bodies: what we answer with, and what we watch while it passes through.

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

/// Told when a response body is over.
pub trait OnComplete: Send {
    /// The body reached its end (`complete`) or was dropped before; `sent` bytes of data went out.
    fn on_complete(self: Box<Self>, bytes_sent: u64, complete: bool);
}

/// What a body has when it is asked for more.
pub(super) type PollFrame = Poll<Option<Result<Frame<Bytes>, BodyError>>>;

/// A response body.
pub struct Body {
    kind: BodyKind,
    bytes_sent: u64,
    complete: bool,
    /// When it is broken off.
    deadline: Option<Deadline>,
    /// Told at the end of the data, while the connection behind it is still good.
    on_data_end: Option<Box<dyn OnComplete>>,
    /// Told once the body is gone.
    on_drop: Option<Box<dyn OnComplete>>,
    /// Holds the request's place on its connection.
    in_flight: Option<InFlightRequest>,
    /// Told what the client has to take.
    flow: Option<Arc<StreamFlow>>,
    /// What is read ahead of it.
    bound: Option<ReadBound>,
    /// Freed when the body is gone.
    drop_guard: Option<Box<dyn Any + Send>>,
}

enum BodyKind {
    Full(Option<Bytes>),
    /// With the silence of an upstream that has said how much is to come: others may take their time, as events do.
    Upstream(Incoming, Option<IdleTimer>),
    /// No body in the sense of HTTP: bytes in both directions.
    Tunnel(Option<Box<Tunnel>>),
}

impl Body {
    /// A body of our own.
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

    /// An upstream's body; `lease` hears of its end.
    pub fn from_upstream(body: Incoming, limits: BodyLimits, on_data_end: Box<dyn OnComplete>) -> Self {
        let mut body = Body::new(BodyKind::from_upstream(body, limits), false).on_data_end(on_data_end);
        body.check_end();
        body.deadline = limits.deadline.filter(|_| !body.complete).map(Deadline::new);
        body
    }

    /// It is read from a connection whose reads are bounded by what of it may be buffered.
    pub fn with_read_limit(mut self, bound: ReadBound) -> Self {
        self.bound = Some(bound);
        self
    }

    /// `lease` hears of its end.
    pub fn on_data_end(mut self, on_data_end: Box<dyn OnComplete>) -> Self {
        self.on_data_end = Some(on_data_end);
        self
    }

    /// What follows a switch of protocols, instead of this body; whoever hears of its end hears of that of the tunnel.
    pub fn with_tunnel(mut self, tunnel: Tunnel) -> Self {
        (self.kind, self.complete) = (BodyKind::Tunnel(Some(Box::new(tunnel))), false);
        self
    }

    /// Passes bytes both ways to the end of the tunnel, and then is gone.
    pub async fn run_tunnel(mut self: Box<Self>) {
        if let BodyKind::Tunnel(tunnel) = &mut self.kind
            && let Some(tunnel) = tunnel.take()
        {
            self.complete = tunnel.run(&mut self.bytes_sent).await;
        }
    }

    /// `record` hears when the body is gone.
    pub fn on_drop(mut self, on_drop: Box<dyn OnComplete>) -> Self {
        self.on_drop = Some(on_drop);
        self
    }

    /// Keeps the request in flight until the body is gone.
    pub fn track_in_flight(&mut self, in_flight: InFlightRequest) {
        self.in_flight = Some(in_flight);
        self.flow = StreamFlow::current();
        if let Some(flow) = &self.flow {
            flow.mark_data_pending();
            flow.set_deadline(self.deadline.as_ref().map(|deadline| deadline.instant));
        }
    }

    /// Keeps something until the body is gone.
    pub fn hold_until_drop(&mut self, guard: Box<dyn Any + Send>) {
        self.drop_guard = Some(guard);
    }

    /// Drops the content of a body of our own and returns its length. hyper does so for HEAD in HTTP/1.1; in HTTP/2 it would
    /// send the content (RFC 9110 §9.3.2).
    pub fn discard_content(&mut self) -> Option<u64> {
        let BodyKind::Full(bytes) = &mut self.kind else { return None };
        self.complete = true;
        Some(bytes.take()?.len() as u64)
    }

    /// What the protocol buffers until it is written.
    fn to_chunk(&self, frame: Frame<Bytes>) -> Frame<DataChunk> {
        let flow =
            self.flow.as_ref().filter(|flow| flow.is_multiplexed() && matches!(self.kind, BodyKind::Upstream(..)));
        frame.map_data(|bytes| match flow {
            Some(flow) => DataChunk::tracked(bytes, flow),
            None => DataChunk::untracked(bytes),
        })
    }

    /// Read nothing ahead of this piece. The connection of a complete response reads on: another request may use it.
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
        // Also while there always is something: those who read little by little take their time, too.
        if self.deadline.as_mut().is_some_and(|deadline| deadline.poll(cx).is_ready()) {
            return Poll::Ready(Some(Err(BodyError::RouteTimeout)));
        }
        if let Some(flow) = self.flow.as_ref().filter(|flow| flow.is_multiplexed()) {
            let room = flow.poll_capacity(cx);
            if let Some(bound) = &self.bound {
                bound.set(if room.is_ready() { flow.reads(self.bytes_sent) } else { ReadLimit::Paused });
            }
            // For its client, and not for its upstream.
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
        // hyper finds out that the body was dropped when it reads on, and closes the connection.
        if let Some(bound) = self.bound.as_ref().filter(|_| !self.complete) {
            bound.set(ReadLimit::Small);
        }
        for callback in [self.on_data_end.take(), self.on_drop.take()].into_iter().flatten() {
            callback.on_complete(self.bytes_sent, self.complete);
        }
    }
}

// What a response of an upstream must not say of its length: other servers would read it in another way than hyper.

/// What is wrong with the framing of a response, whether or not it has a body (RFC 9112 §6, RFC 9113 §8.2.1); none if it is valid.
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

/// Whether a response that has no body says that it has one: the server may send it later, and it would be taken for the
/// response to the next request.
pub fn declares_forbidden_body(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        && (headers.contains_key(TRANSFER_ENCODING)
            || headers.get(CONTENT_LENGTH).is_some_and(|length| length.as_bytes().iter().any(|digit| *digit != b'0')))
}
