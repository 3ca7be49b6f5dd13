//! Response bodies: what we answer with, and what we watch while it passes through.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;

use super::activity::InFlight;
use super::bounds::{BodyError, Bounds, Deadline, Silence};
use super::budget::Piece;
use super::flow::Flow;
use super::reads::{ReadBound, Reads};
use super::tunnel::Tunnel;

/// Told when a response body is over.
pub trait Ending: Send {
    /// The body reached its end (`complete`) or was dropped before; `sent` bytes of data went out.
    fn ended(self: Box<Self>, sent: u64, complete: bool);
}

/// What a body has when it is asked for more.
pub(super) type Polled = Poll<Option<Result<Frame<Bytes>, BodyError>>>;

/// A response body.
pub struct Body {
    source: Source,
    sent: u64,
    complete: bool,
    /// When it is broken off.
    deadline: Option<Deadline>,
    /// Told at the end of the data, while the connection behind it is still good.
    lease: Option<Box<dyn Ending>>,
    /// Told once the body is gone.
    record: Option<Box<dyn Ending>>,
    /// Holds the request's place on its connection.
    in_flight: Option<InFlight>,
    /// Told what the client has to take.
    flow: Option<Arc<Flow>>,
    /// What is read ahead of it.
    bound: Option<ReadBound>,
    /// Freed when the body is gone.
    kept: Option<Box<dyn Any + Send>>,
}

enum Source {
    Own(Option<Bytes>),
    /// With the silence of an upstream that has said how much is to come: others may take their time, as events do.
    Upstream(Incoming, Option<Silence>),
    /// No body in the sense of HTTP: bytes in both directions.
    Tunnel(Option<Box<Tunnel>>),
}

impl Body {
    /// A body of our own.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let complete = bytes.is_empty();
        Body::of(Source::Own((!complete).then_some(bytes)), complete)
    }

    fn of(source: Source, complete: bool) -> Self {
        Body {
            source,
            sent: 0,
            complete,
            deadline: None,
            lease: None,
            record: None,
            in_flight: None,
            flow: None,
            bound: None,
            kept: None,
        }
    }

    /// An upstream's body; `lease` hears of its end.
    pub fn upstream(body: Incoming, bounds: Bounds, lease: Box<dyn Ending>) -> Self {
        let mut body = Body::of(Source::upstream(body, bounds), false).leased(lease);
        body.notice_end();
        body.deadline = bounds.deadline.filter(|_| !body.complete).map(Deadline::new);
        body
    }

    /// It is read from a connection whose reads are bounded by what of it may be buffered.
    pub fn reading(mut self, bound: ReadBound) -> Self {
        self.bound = Some(bound);
        self
    }

    /// `lease` hears of its end.
    pub fn leased(mut self, lease: Box<dyn Ending>) -> Self {
        self.lease = Some(lease);
        self
    }

    /// What follows a switch of protocols, instead of this body; whoever hears of its end hears of that of the tunnel.
    pub fn tunnel(mut self, tunnel: Tunnel) -> Self {
        (self.source, self.complete) = (Source::Tunnel(Some(Box::new(tunnel))), false);
        self
    }

    /// Passes bytes both ways to the end of the tunnel, and then is gone.
    pub async fn pass(mut self: Box<Self>) {
        if let Source::Tunnel(tunnel) = &mut self.source
            && let Some(tunnel) = tunnel.take()
        {
            self.complete = tunnel.run(&mut self.sent).await;
        }
    }

    /// `record` hears when the body is gone.
    pub fn recorded(mut self, record: Box<dyn Ending>) -> Self {
        self.record = Some(record);
        self
    }

    /// Keeps the request in flight until the body is gone.
    pub fn hold(&mut self, in_flight: InFlight) {
        self.in_flight = Some(in_flight);
        self.flow = Flow::current();
        if let Some(flow) = &self.flow {
            flow.offer();
            flow.end_at(self.deadline.as_ref().map(|deadline| deadline.at));
        }
    }

    /// Keeps something until the body is gone.
    pub fn keep(&mut self, kept: Box<dyn Any + Send>) {
        self.kept = Some(kept);
    }

    /// Drops the content of a body of our own and returns its length. hyper does so for HEAD in HTTP/1.1; in HTTP/2 it would
    /// send the content (RFC 9110 §9.3.2).
    pub fn withhold(&mut self) -> Option<u64> {
        let Source::Own(bytes) = &mut self.source else { return None };
        self.complete = true;
        Some(bytes.take()?.len() as u64)
    }

    /// What the protocol buffers until it is written.
    fn piece(&self, frame: Frame<Bytes>) -> Frame<Piece> {
        let flow = self.flow.as_ref().filter(|flow| flow.is_stream() && matches!(self.source, Source::Upstream(..)));
        frame.map_data(|bytes| match flow {
            Some(flow) => Piece::held(bytes, flow),
            None => Piece::free(bytes),
        })
    }

    /// Read nothing ahead of this piece. The connection of a complete response reads on: another request may use it.
    fn pause(&self) {
        if let (Some(flow), Some(bound), false) = (&self.flow, &self.bound, self.complete)
            && flow.is_stream()
        {
            bound.set(Reads::Paused);
        }
    }

    fn notice_end(&mut self) {
        if self.is_end_stream() {
            self.complete = true;
            if let Some(lease) = self.lease.take() {
                lease.ended(self.sent, true);
            }
        }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").field("sent", &self.sent).field("complete", &self.complete).finish_non_exhaustive()
    }
}

impl HttpBody for Body {
    type Data = Piece;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Piece>, BodyError>>> {
        // Also while there always is something: those who read little by little take their time, too.
        if self.deadline.as_mut().is_some_and(|deadline| deadline.poll(cx).is_ready()) {
            return Poll::Ready(Some(Err(BodyError::Overdue)));
        }
        if let Some(flow) = self.flow.as_ref().filter(|flow| flow.is_stream()) {
            let room = flow.poll_room(cx);
            if let Some(bound) = &self.bound {
                bound.set(if room.is_ready() { flow.reads(self.sent) } else { Reads::Paused });
            }
            // For its client, and not for its upstream.
            ready!(room);
        }
        let polled = self.source.poll(cx);
        if let Some(flow) = &self.flow {
            match &polled {
                Poll::Ready(Some(_)) => flow.offer(),
                Poll::Ready(None) | Poll::Pending => flow.rest(),
            }
        }
        let frame = ready!(polled);
        match &frame {
            Some(Ok(frame)) => self.sent += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) => {}
            None => self.complete = true,
        }
        if let Some(Err(error)) = frame {
            return Poll::Ready(Some(Err(error)));
        }
        if frame.is_none() {
            if let Some(lease) = self.lease.take() {
                lease.ended(self.sent, true);
            }
        } else {
            self.notice_end();
        }
        let frame = frame.map(|frame| frame.map(|frame| self.piece(frame)));
        self.pause();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Own(bytes) => bytes.is_none(),
            Source::Upstream(body, _) => body.is_end_stream(),
            Source::Tunnel(_) => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Source::Upstream(body, _) => body.size_hint(),
            Source::Tunnel(_) => SizeHint::with_exact(0),
        }
    }
}

impl Source {
    fn upstream(body: Incoming, bounds: Bounds) -> Self {
        let silence = body.size_hint().exact().map(|_| Silence::new(bounds.idle));
        Source::Upstream(body, silence)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Polled {
        match self {
            Source::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Source::Upstream(body, silence) => match (Pin::new(body).poll_frame(cx), silence) {
                (Poll::Pending, Some(silence)) => silence.poll(cx).map(|()| Some(Err(BodyError::UpstreamStalled))),
                (polled, silence) => {
                    if let Some(silence) = silence {
                        silence.end();
                    }
                    polled.map_err(BodyError::Broken)
                }
            },
            Source::Tunnel(_) => Poll::Ready(None),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some(flow) = &self.flow {
            flow.rest();
            flow.end_at(None);
        }
        // hyper finds out that the body was dropped when it reads on, and closes the connection.
        if let Some(bound) = self.bound.as_ref().filter(|_| !self.complete) {
            bound.set(Reads::Small);
        }
        for ending in [self.lease.take(), self.record.take()].into_iter().flatten() {
            ending.ended(self.sent, self.complete);
        }
    }
}
