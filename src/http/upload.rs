//! Request bodies on their way to an upstream: how far they have come, how long they may be, who keeps whom waiting.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::activity::InFlight;
use super::body::Polled;
use super::bounds::{BodyError, Bounds};
use super::budget::Reserved;
use super::flow::Flow;
use super::headers::has_padding;
use super::pace::Pace;

/// A request body on its way to an upstream. On the heap: most requests have none, and are moved often.
pub struct RequestBody(Option<Box<Passing>>);

/// A body that is not empty.
struct Passing {
    source: Source,
    progress: Arc<Progress>,
    /// How slow the client may be; until the body is sent on nobody minds.
    pace: Option<Pace>,
    /// Bytes that may still come.
    left: u64,
    flow: Option<Arc<Flow>>,
    /// Whether trailers go on.
    trailers: bool,
    /// Whether frames say where it ends.
    http2: bool,
    /// Whether the next request of its flow waits for its end.
    counted: bool,
    /// Its request is in flight, also after the response.
    in_flight: Option<InFlight>,
}

/// Where a body comes from.
enum Source {
    Client(Incoming),
    /// All of it is here; none once it was taken.
    Buffer {
        bytes: Option<Bytes>,
        _reserved: Option<Reserved>,
    },
}

/// How far a request body has come, for whoever waits for the response to it.
#[derive(Debug, Default)]
pub struct Progress {
    frames: AtomicU64,
    stage: AtomicU8,
    answered: AtomicBool,
    /// Time for which the connection waited for the client, µs.
    waited_us: AtomicU64,
    /// Since when it waits, µs after `began`; 0 = it does not.
    since_us: AtomicU64,
    began: Began,
}

/// When an upload began.
#[derive(Debug)]
struct Began(Instant);

impl Default for Began {
    fn default() -> Self {
        Began(Instant::now())
    }
}

/// The connection has what there was, and may or may not have sent it.
const SENDING: u8 = 0;
/// The connection asked for more, and the client has sent nothing yet.
const WAITING: u8 = 1;
/// All of it is with the connection.
const DONE: u8 = 2;
/// It was longer than it may be.
const TOO_LARGE: u8 = 3;
/// The client sent nothing for too long.
const STALLED: u8 = 4;

impl Progress {
    /// Pieces handed to the connection so far.
    pub fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Whether it is the client that keeps everybody waiting.
    pub fn waits_for_client(&self) -> bool {
        self.stage() == WAITING
    }

    /// Whether the body has come to its end.
    pub fn is_done(&self) -> bool {
        self.stage() == DONE
    }

    /// Whether it was given up because of its length.
    pub fn is_too_large(&self) -> bool {
        self.stage() == TOO_LARGE
    }

    /// Whether it was given up because the client sent nothing.
    pub fn is_stalled(&self) -> bool {
        self.stage() == STALLED
    }

    /// The response has begun: from now on both sides may talk in turn.
    pub fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Whether a request that ran out of time did so because of its client: it waits for the body, or waited for it most of the
    /// time. Otherwise a client could withhold its last byte until just before the timeout.
    pub fn is_clients_delay(&self) -> bool {
        let elapsed = self.began.0.elapsed().as_micros() as u64;
        self.waits_for_client() || self.waited_us.load(Ordering::Relaxed) >= elapsed / 2
    }

    /// Notes that the connection waits for the client, or does no longer.
    fn wait(&self, waits: bool) {
        let since = self.since_us.load(Ordering::Relaxed);
        if waits == (since > 0) {
            return;
        }
        let now = (self.began.0.elapsed().as_micros() as u64).max(1);
        if !waits {
            self.waited_us.fetch_add(now.saturating_sub(since), Ordering::Relaxed);
        }
        self.since_us.store(if waits { now } else { 0 }, Ordering::Relaxed);
    }

    fn stage(&self) -> u8 {
        self.stage.load(Ordering::Relaxed)
    }
}

impl RequestBody {
    /// A body that has come, over HTTP/2 or an earlier version, without bounds yet.
    pub fn new(body: Incoming, http2: bool) -> Self {
        if body.is_end_stream() {
            return RequestBody(None);
        }
        let progress = Arc::default();
        // Only chunks have trailers.
        let flow = if http2 || body.size_hint().exact().is_some() { None } else { Flow::current() };
        let counted = flow.is_some();
        flow.iter().for_each(|flow| flow.begin_body());
        RequestBody(Some(Box::new(Passing {
            source: Source::Client(body),
            progress,
            pace: None,
            left: u64::MAX,
            flow,
            trailers: false,
            http2,
            counted,
            in_flight: None,
        })))
    }

    /// Keeps its request in flight as long as there is something to read.
    pub fn holding(mut self, in_flight: &InFlight) -> Self {
        self.0.iter_mut().for_each(|passing| passing.in_flight = Some(in_flight.another()));
        self
    }

    /// Bounds a body that goes to an upstream from now on; its progress, if it is not empty.
    pub fn send_within(&mut self, bounds: Bounds) -> Option<Arc<Progress>> {
        let passing = self.0.as_mut()?;
        passing.pace = Some(Pace::new(bounds.demand));
        passing.left = bounds.max_body.unwrap_or(u64::MAX);
        passing.flow = Flow::current();
        Some(passing.progress.clone())
    }

    /// How far it has come; none if it is empty.
    pub fn progress(&self) -> Option<Arc<Progress>> {
        Some(self.0.as_ref()?.progress.clone())
    }

    /// Reads all of it from the client, so that sending it on keeps nobody waiting; leaves it as it is where no more may be buffered. What comes in one piece is not copied.
    ///
    /// # Errors
    /// It breaks off, does not come in time, or is too long.
    pub async fn buffer(&mut self, bounds: Bounds) -> Result<(), BodyError> {
        self.send_within(bounds);
        let length = self.size_hint().lower() as usize;
        let reserved = match Flow::current().map(|flow| flow.reserve(length)) {
            // It is streamed.
            Some(None) => return Ok(()),
            reserved => reserved.flatten(),
        };
        let mut whole = Bytes::new();
        let mut pieces = BytesMut::new();
        while let Some(frame) = self.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            if whole.is_empty() && pieces.is_empty() {
                whole = data;
                continue;
            }
            // Small pieces would each keep the buffer that they were read into.
            pieces.extend_from_slice(&std::mem::take(&mut whole));
            pieces.extend_from_slice(&data);
        }
        if let Some(passing) = &mut self.0 {
            let whole = if pieces.is_empty() { whole } else { pieces.freeze() };
            passing.in_flight = None;
            passing.source = Source::Buffer { bytes: (!whole.is_empty()).then_some(whole), _reserved: reserved };
        }
        Ok(())
    }

    /// No body.
    pub fn empty() -> Self {
        RequestBody(None)
    }

    /// Ends the connection unless the body is read to its end.
    pub fn watch(&mut self, flow: &Arc<Flow>) {
        self.0.iter_mut().for_each(|passing| passing.flow = Some(flow.clone()));
    }

    /// Lets trailers through, where the connection can say them; without this they are dropped.
    pub fn allow_trailers(&mut self) {
        self.0.iter_mut().for_each(|passing| passing.trailers = true);
    }
}

impl Passing {
    /// Whether a client is silent for too long that owes something: once the response has begun, only one that has said how
    /// much is to come.
    fn is_overdue(&mut self, cx: &mut Context<'_>) -> bool {
        let due = !self.progress.answered.load(Ordering::Relaxed) || self.source.size_hint().exact().is_some();
        due && self.pace.as_mut().is_some_and(|pace| pace.poll(cx).is_ready())
    }

    /// Lets the next request of its flow go on.
    fn end(&mut self) {
        if let Some(flow) = self.flow.as_ref().filter(|_| self.counted) {
            flow.end_body();
        }
        self.counted = false;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> (u8, Polled) {
        let mut polled = match &mut self.source {
            Source::Client(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::Broken),
            Source::Buffer { bytes, .. } => {
                return (DONE, Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))));
            }
        };
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            // hyper reads trailers up to CR LF CR LF: where a line ends in LF alone, the next request is among them, and other
            // servers see two requests (RFC 9112 §7.1). A trailer section without a field can only be that.
            if has_padding(trailers) || !self.http2 && trailers.is_empty() {
                polled = Poll::Ready(Some(Err(BodyError::Trailers)));
            } else {
                // Behind any other one nothing is taken for a request.
                if let Some(flow) = self.flow.as_ref().filter(|_| !self.http2) {
                    flow.cut();
                }
                if !self.trailers {
                    polled = Poll::Ready(None);
                }
            }
        }
        match &polled {
            Poll::Pending if self.is_overdue(cx) => {
                return (STALLED, Poll::Ready(Some(Err(BodyError::ClientStalled))));
            }
            Poll::Pending => return (WAITING, polled),
            // A body of known length is not asked again after its last byte.
            Poll::Ready(None) => return (DONE, polled),
            Poll::Ready(Some(Ok(frame))) => {
                let length = frame.data_ref().map_or(0, Bytes::len);
                self.pace.iter_mut().for_each(|pace| pace.received(length));
                match self.left.checked_sub(length as u64) {
                    Some(left) => self.left = left,
                    None => return (TOO_LARGE, Poll::Ready(Some(Err(BodyError::TooLarge)))),
                }
            }
            // Not at its end, even if nothing more comes.
            Poll::Ready(Some(Err(_))) => return (SENDING, polled),
        }
        (if self.source.is_end_stream() { DONE } else { SENDING }, polled)
    }
}

impl Source {
    fn is_end_stream(&self) -> bool {
        match self {
            Source::Client(body) => body.is_end_stream(),
            Source::Buffer { bytes, .. } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Source::Client(body) => body.size_hint(),
            Source::Buffer { bytes, .. } => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled {
        let Some(passing) = &mut self.0 else { return Poll::Ready(None) };
        let (stage, polled) = passing.poll(cx);
        passing.progress.stage.store(stage, Ordering::Relaxed);
        passing.progress.wait(stage == WAITING);
        match (stage, &passing.flow) {
            (TOO_LARGE | STALLED, Some(flow)) => flow.cut(),
            (DONE, _) => passing.end(),
            _ => {}
        }
        passing.progress.frames.fetch_add(u64::from(polled.is_ready()), Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|passing| passing.source.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or(SizeHint::with_exact(0), |passing| passing.source.size_hint())
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        // Chunks have no end that could be seen before it was asked for.
        if let Some(flow) = self.flow.as_ref().filter(|_| !self.progress.is_done()) {
            flow.cut();
        }
        self.end();
    }
}
