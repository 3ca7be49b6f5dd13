//! Bodies: what we answer with, and what we watch while it passes through.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;

use super::activity::InFlight;
use super::tunnel::Tunnel;

/// Told when a response body is over.
pub trait Ending: Send {
    /// The body reached its end (`complete`) or was dropped before; `sent` bytes of data went out.
    fn ended(self: Box<Self>, sent: u64, complete: bool);
}

/// A response body.
pub struct Body {
    source: Source,
    sent: u64,
    complete: bool,
    /// Told at the end of the data, while the connection behind it is still good.
    lease: Option<Box<dyn Ending>>,
    /// Told once the body is gone.
    record: Option<Box<dyn Ending>>,
    /// Holds the request's place on its connection.
    in_flight: Option<InFlight>,
    /// Freed when the body is gone.
    kept: Option<Box<dyn Any + Send>>,
}

enum Source {
    Own(Option<Bytes>),
    Upstream(Incoming),
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
        Body { source, sent: 0, complete, lease: None, record: None, in_flight: None, kept: None }
    }

    /// An upstream's body; `lease` hears of its end.
    pub fn upstream(body: Incoming, lease: Box<dyn Ending>) -> Self {
        let mut body = Body::of(Source::Upstream(body), false);
        body.lease = Some(lease);
        body.notice_end();
        body
    }

    /// An upstream's body on a connection that serves others as well.
    pub fn shared(body: Incoming) -> Self {
        let complete = body.is_end_stream();
        Body::of(Source::Upstream(body), complete)
    }

    /// What follows a switch of protocols.
    pub fn tunnel(tunnel: Tunnel) -> Self {
        Body::of(Source::Tunnel(Some(Box::new(tunnel))), false)
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
    pub fn holding(mut self, in_flight: InFlight) -> Self {
        self.in_flight = Some(in_flight);
        self
    }

    /// Keeps something until the body is gone.
    pub fn keeping(mut self, kept: Box<dyn Any + Send>) -> Self {
        self.kept = Some(kept);
        self
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
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = match &mut self.source {
            Source::Own(bytes) => bytes.take().map(|bytes| Ok(Frame::data(bytes))),
            Source::Upstream(body) => ready!(Pin::new(body).poll_frame(cx)),
            Source::Tunnel(_) => None,
        };
        match &frame {
            Some(Ok(frame)) => self.sent += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) => return Poll::Ready(frame),
            None => self.complete = true,
        }
        if frame.is_none() {
            if let Some(lease) = self.lease.take() {
                lease.ended(self.sent, true);
            }
        } else {
            self.notice_end();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Own(bytes) => bytes.is_none(),
            Source::Upstream(body) => body.is_end_stream(),
            Source::Tunnel(_) => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Source::Upstream(body) => body.size_hint(),
            Source::Tunnel(_) => SizeHint::with_exact(0),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        for ending in [self.lease.take(), self.record.take()].into_iter().flatten() {
            ending.ended(self.sent, self.complete);
        }
    }
}

/// A request body on its way to an upstream.
pub struct RequestBody {
    body: Option<Incoming>,
    progress: Option<Arc<Progress>>,
    trailers: bool,
}

/// How far a request body has come, for whoever waits for the response to it.
#[derive(Debug, Default)]
pub struct Progress {
    frames: AtomicU64,
    stage: AtomicU8,
}

/// The connection has what there was, and may or may not have sent it.
const SENDING: u8 = 0;
/// The connection asked for more, and the client has sent nothing yet.
const WAITING: u8 = 1;
/// All of it is with the connection.
const DONE: u8 = 2;

impl Progress {
    /// Pieces handed to the connection so far.
    pub fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Whether it is the client that keeps everybody waiting.
    pub fn waits_for_client(&self) -> bool {
        self.stage.load(Ordering::Relaxed) == WAITING
    }

    /// Whether the body has come to its end.
    pub fn is_done(&self) -> bool {
        self.stage.load(Ordering::Relaxed) == DONE
    }
}

impl RequestBody {
    /// A body, with the progress of one that is not empty.
    pub fn new(body: Incoming) -> (Self, Option<Arc<Progress>>) {
        let progress = (!body.is_end_stream()).then(Arc::<Progress>::default);
        (RequestBody { body: Some(body), progress: progress.clone(), trailers: false }, progress)
    }

    /// No body.
    pub fn empty() -> Self {
        RequestBody { body: None, progress: None, trailers: false }
    }

    /// Lets trailers through, where the connection can say them; without this they are dropped.
    pub fn with_trailers(mut self) -> Self {
        self.trailers = true;
        self
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let RequestBody { body, progress, trailers } = &mut *self;
        let Some(body) = body else { return Poll::Ready(None) };
        let mut polled = Pin::new(&mut *body).poll_frame(cx);
        if !*trailers && matches!(&polled, Poll::Ready(Some(Ok(frame))) if frame.is_trailers()) {
            polled = Poll::Ready(None);
        }
        if let Some(progress) = progress {
            let stage = match &polled {
                Poll::Pending => WAITING,
                // A body of known length is not asked again after its last byte.
                Poll::Ready(None) => DONE,
                Poll::Ready(Some(Ok(_))) if body.is_end_stream() => DONE,
                Poll::Ready(Some(_)) => SENDING,
            };
            progress.stage.store(stage, Ordering::Relaxed);
            progress.frames.fetch_add(u64::from(polled.is_ready()), Ordering::Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}
