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

use crate::http::body::PollFrame;
use crate::http::body_limits::{BodyError, BodyLimits, MinRateTimer};
use crate::http::buffer_budget::BufferReservation;
use crate::http::headers::has_padding;
use crate::http::idle::InFlightRequest;
use crate::http::write_watchdog::StreamFlow;

/// A request body on its way to an upstream. On the heap: most requests have none, and are moved often.
pub struct RequestBody(Option<Box<RequestBodyInner>>);

/// A body that is not empty.
struct RequestBodyInner {
    source: BodySource,
    progress: Arc<UploadProgress>,
    /// How slow the client may be; until the body is sent on nobody minds.
    rate_timer: Option<MinRateTimer>,
    /// Bytes that may still come.
    remaining: u64,
    flow: Option<Arc<StreamFlow>>,
    /// Whether trailers go on.
    forwards_trailers: bool,
    /// Whether frames say where it ends.
    is_http2: bool,
    /// Whether the next request of its flow waits for its end.
    is_counted: bool,
    /// Its request is in flight, also after the response.
    in_flight: Option<InFlightRequest>,
}

/// Where a body comes from.
enum BodySource {
    Client(Incoming),
    /// All of it is here; none once it was taken.
    Buffered {
        bytes: Option<Bytes>,
        _reservation: Option<BufferReservation>,
    },
}

/// How far a request body has come, for whoever waits for the response to it.
#[derive(Debug, Default)]
pub struct UploadProgress {
    frame_count: AtomicU64,
    stage: AtomicU8,
    response_started: AtomicBool,
    /// Time for which the connection waited for the client, µs.
    client_wait_us: AtomicU64,
    /// Since when it waits, µs after `began`; 0 = it does not.
    waiting_since_us: AtomicU64,
    started_at: StartTime,
}

/// When an upload began.
#[derive(Debug)]
struct StartTime(Instant);

impl Default for StartTime {
    fn default() -> Self {
        StartTime(Instant::now())
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

impl UploadProgress {
    /// Pieces handed to the connection so far.
    pub fn frame_count(&self) -> u64 {
        self.frame_count.load(Ordering::Relaxed)
    }

    /// Whether it is the client that keeps everybody waiting.
    pub fn is_waiting_for_client(&self) -> bool {
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
    pub fn mark_response_started(&self) {
        self.response_started.store(true, Ordering::Relaxed);
    }

    /// Whether a request that ran out of time did so because of its client: it waits for the body, or waited for it most of the
    /// time. Otherwise a client could withhold its last byte until just before the timeout.
    pub fn is_delayed_by_client(&self) -> bool {
        let elapsed = self.started_at.0.elapsed().as_micros() as u64;
        self.is_waiting_for_client() || self.client_wait_us.load(Ordering::Relaxed) >= elapsed / 2
    }

    /// Notes that the connection waits for the client, or does no longer.
    fn set_waiting(&self, is_waiting: bool) {
        let since = self.waiting_since_us.load(Ordering::Relaxed);
        if is_waiting == (since > 0) {
            return;
        }
        let now = (self.started_at.0.elapsed().as_micros() as u64).max(1);
        if !is_waiting {
            self.client_wait_us.fetch_add(now.saturating_sub(since), Ordering::Relaxed);
        }
        self.waiting_since_us.store(if is_waiting { now } else { 0 }, Ordering::Relaxed);
    }

    fn stage(&self) -> u8 {
        self.stage.load(Ordering::Relaxed)
    }
}

impl RequestBody {
    /// A body that has come, over HTTP/2 or an earlier version, without bounds yet.
    pub fn new(body: Incoming, is_http2: bool) -> Self {
        if body.is_end_stream() {
            return RequestBody(None);
        }
        let progress = Arc::default();
        // Only chunks have trailers.
        let flow = if is_http2 || body.size_hint().exact().is_some() { None } else { StreamFlow::current() };
        let is_counted = flow.is_some();
        flow.iter().for_each(|flow| flow.start_body());
        RequestBody(Some(Box::new(RequestBodyInner {
            source: BodySource::Client(body),
            progress,
            rate_timer: None,
            remaining: u64::MAX,
            flow,
            forwards_trailers: false,
            is_http2,
            is_counted,
            in_flight: None,
        })))
    }

    /// Keeps its request in flight as long as there is something to read.
    pub fn with_in_flight(mut self, in_flight: &InFlightRequest) -> Self {
        self.0.iter_mut().for_each(|inner| inner.in_flight = Some(in_flight.share()));
        self
    }

    /// Bounds a body that goes to an upstream from now on; its progress, if it is not empty.
    pub fn apply_limits(&mut self, limits: BodyLimits) -> Option<Arc<UploadProgress>> {
        let inner = self.0.as_mut()?;
        inner.rate_timer = Some(MinRateTimer::new(limits.upload));
        inner.remaining = limits.max_body.unwrap_or(u64::MAX);
        inner.flow = StreamFlow::current();
        Some(inner.progress.clone())
    }

    /// How far it has come; none if it is empty.
    pub fn progress(&self) -> Option<Arc<UploadProgress>> {
        Some(self.0.as_ref()?.progress.clone())
    }

    /// Reads all of it from the client, so that sending it on keeps nobody waiting; leaves it as it is where no more may be buffered. What comes in one piece is not copied.
    ///
    /// # Errors
    /// It breaks off, does not come in time, or is too long.
    pub async fn buffer(&mut self, limits: BodyLimits) -> Result<(), BodyError> {
        self.apply_limits(limits);
        let length = self.size_hint().lower() as usize;
        let reservation = match StreamFlow::current().map(|flow| flow.try_reserve(length)) {
            // It is streamed.
            Some(None) => return Ok(()),
            reservation => reservation.flatten(),
        };
        let mut content = Bytes::new();
        let mut buffer = BytesMut::new();
        while let Some(frame) = self.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            if content.is_empty() && buffer.is_empty() {
                content = data;
                continue;
            }
            // Small pieces would each keep the buffer that they were read into.
            buffer.extend_from_slice(&std::mem::take(&mut content));
            buffer.extend_from_slice(&data);
        }
        if let Some(inner) = &mut self.0 {
            let content = if buffer.is_empty() { content } else { buffer.freeze() };
            inner.in_flight = None;
            inner.source =
                BodySource::Buffered { bytes: (!content.is_empty()).then_some(content), _reservation: reservation };
        }
        Ok(())
    }

    /// No body.
    pub fn empty() -> Self {
        RequestBody(None)
    }

    /// Ends the connection unless the body is read to its end.
    pub fn attach_flow(&mut self, flow: &Arc<StreamFlow>) {
        self.0.iter_mut().for_each(|inner| inner.flow = Some(flow.clone()));
    }

    /// Lets trailers through, where the connection can say them; without this they are dropped.
    pub fn allow_trailers(&mut self) {
        self.0.iter_mut().for_each(|inner| inner.forwards_trailers = true);
    }
}

impl RequestBodyInner {
    /// Whether a client is silent for too long that owes something: once the response has begun, only one that has said how
    /// much is to come.
    fn is_client_timed_out(&mut self, cx: &mut Context<'_>) -> bool {
        let is_timed =
            !self.progress.response_started.load(Ordering::Relaxed) || self.source.size_hint().exact().is_some();
        is_timed && self.rate_timer.as_mut().is_some_and(|timer| timer.poll(cx).is_ready())
    }

    /// Lets the next request of its flow go on.
    fn release_next_request(&mut self) {
        if let Some(flow) = self.flow.as_ref().filter(|_| self.is_counted) {
            flow.end_body();
        }
        self.is_counted = false;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> (u8, PollFrame) {
        let mut polled = match &mut self.source {
            BodySource::Client(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::Aborted),
            BodySource::Buffered { bytes, .. } => {
                return (DONE, Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))));
            }
        };
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            // hyper reads trailers up to CR LF CR LF: where a line ends in LF alone, the next request is among them, and other
            // servers see two requests (RFC 9112 §7.1). A trailer section without a field can only be that.
            if has_padding(trailers) || !self.is_http2 && trailers.is_empty() {
                polled = Poll::Ready(Some(Err(BodyError::MalformedTrailers)));
            } else {
                // Behind any other one nothing is taken for a request.
                if let Some(flow) = self.flow.as_ref().filter(|_| !self.is_http2) {
                    flow.abandon_request();
                }
                if !self.forwards_trailers {
                    polled = Poll::Ready(None);
                }
            }
        }
        match &polled {
            Poll::Pending if self.is_client_timed_out(cx) => {
                return (STALLED, Poll::Ready(Some(Err(BodyError::ClientTimeout))));
            }
            Poll::Pending => return (WAITING, polled),
            // A body of known length is not asked again after its last byte.
            Poll::Ready(None) => return (DONE, polled),
            Poll::Ready(Some(Ok(frame))) => {
                let length = frame.data_ref().map_or(0, Bytes::len);
                self.rate_timer.iter_mut().for_each(|timer| timer.received(length));
                match self.remaining.checked_sub(length as u64) {
                    Some(remaining) => self.remaining = remaining,
                    None => return (TOO_LARGE, Poll::Ready(Some(Err(BodyError::TooLarge)))),
                }
            }
            // Not at its end, even if nothing more comes.
            Poll::Ready(Some(Err(_))) => return (SENDING, polled),
        }
        (if self.source.is_end_stream() { DONE } else { SENDING }, polled)
    }
}

impl BodySource {
    fn is_end_stream(&self) -> bool {
        match self {
            BodySource::Client(body) => body.is_end_stream(),
            BodySource::Buffered { bytes, .. } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            BodySource::Client(body) => body.size_hint(),
            BodySource::Buffered { bytes, .. } => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PollFrame {
        let Some(inner) = &mut self.0 else { return Poll::Ready(None) };
        let (stage, polled) = inner.poll(cx);
        inner.progress.stage.store(stage, Ordering::Relaxed);
        inner.progress.set_waiting(stage == WAITING);
        match (stage, &inner.flow) {
            (TOO_LARGE | STALLED, Some(flow)) => flow.abandon_request(),
            (DONE, _) => inner.release_next_request(),
            _ => {}
        }
        inner.progress.frame_count.fetch_add(u64::from(polled.is_ready()), Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|inner| inner.source.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or(SizeHint::with_exact(0), |inner| inner.source.size_hint())
    }
}

impl Drop for RequestBodyInner {
    fn drop(&mut self) {
        // Chunks have no end that could be seen before it was asked for.
        if let Some(flow) = self.flow.as_ref().filter(|_| !self.progress.is_done()) {
            flow.abandon_request();
        }
        self.release_next_request();
    }
}
