//! Request bodies that are sent to an upstream: progress, maximum length, minimum rate and buffering.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::task::AtomicWaker;
use http::header::{CONNECTION, EXPECT, HeaderValue};
use http::{Request, Response, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::http::body::{Body, PollFrame};
use crate::http::body_limits::{BodyError, BodyLimits, BufferReservation, MinRateTimer, NetworkShare};
use crate::http::flow::{ABANDONED_TIMEOUT, InFlightRequest, StreamFlow};
use crate::http::headers::{TrailerFilter, has_padding};

/// A request body that is sent to an upstream. The value is boxed, because most requests have no body, and bodies are
/// moved often.
pub struct RequestBody(Option<Box<RequestBodyInner>>);

/// The state of a request body that is not empty.
struct RequestBodyInner {
    source: BodySource,
    progress: Arc<UploadProgress>,
    /// Timer for the upload timeouts and the minimum rate of the client. `None` until [`RequestBody::apply_limits`] is
    /// called.
    rate_timer: Option<MinRateTimer>,
    /// Number of further bytes that the maximum length of the body allows.
    remaining: u64,
    flow: Option<Arc<StreamFlow>>,
    /// Filter for the trailers to forward. `None` drops all trailers.
    trailer_filter: Option<Arc<TrailerFilter>>,
    /// Whether the request came over HTTP/2, whose frames delimit the body.
    is_http2: bool,
    /// Whether the next request on the connection waits for the end of this body.
    is_counted: bool,
    /// Keeps the request in flight until the body ends, even if the response ends earlier.
    in_flight: Option<InFlightRequest>,
    /// Receives a copy of the data that the client sends.
    tee: Option<Box<BodyTee>>,
    /// The part of the body that [`RequestBody::read`] has read before it returned `TooLong` or `NoCapacity`, with its
    /// reservation. The part is sent to the upstream before the rest of the body.
    prefix: Option<(Bytes, BufferReservation)>,
    reader: BodyReader,
    failure: Option<BodyFailure>,
}

/// The reader of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyReader {
    /// The gateway reads the body itself, and receives all errors.
    Gateway,
    /// An upstream connection for one request, which is closed after an error.
    Connection,
    /// An upstream connection that many requests share. It would reset the stream after an error, so it receives no
    /// error before the response has begun: [`UploadProgress::poll_error`] returns the error instead.
    SharedConnection,
}

/// The failure of a body that an upstream connection reads.
enum BodyFailure {
    /// The client has gone away. The error is passed on after a delay, because the upstream may still be working on the
    /// request; see [`ABANDONED_TIMEOUT`].
    Delayed(Box<DelayedError>),
    /// The error was stored in [`UploadProgress::error`].
    Reported,
}

struct DelayedError {
    error: BodyError,
    stage: u8,
    timer: Pin<Box<Sleep>>,
}

/// Result of reading a body before it is sent to an upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadBody {
    /// The body was read to its end.
    Whole(Bytes),
    /// The body is longer than the maximum length that the caller allows.
    TooLong,
    /// The buffer budget or the share of the client network is exhausted.
    NoCapacity,
}

/// The whole content of a request body, which can be sent several times. `None` for an empty body.
pub struct ReplayBody(Option<Box<(Bytes, Option<BufferReservation>)>>);

impl ReplayBody {
    /// Return a body with the same content.
    pub fn body(&self) -> RequestBody {
        match &self.0 {
            Some(content) => RequestBody::from_bytes(content.0.clone(), None),
            None => RequestBody::empty(),
        }
    }
}

/// The source of a body's data.
enum BodySource {
    Client(Incoming),
    /// The whole body in memory. `bytes` is `None` after it was taken.
    Buffered {
        bytes: Option<Bytes>,
        /// Reservation of the memory, unless a [`ReplayBody`] has taken it over.
        reservation: Option<BufferReservation>,
    },
}

/// Progress of a request body. The code that waits for the response shares this value.
#[derive(Debug, Default)]
pub struct UploadProgress {
    frame_count: AtomicU64,
    /// Number of bytes that were received from the client.
    received: AtomicU64,
    stage: AtomicU8,
    response_started: AtomicBool,
    /// Total time for which the upstream connection has waited for data from the client, in µs.
    client_wait_us: AtomicU64,
    /// Start of the current wait for the client, in µs after `started_at`. 0 if the upstream connection does not wait.
    waiting_since_us: AtomicU64,
    started_at: StartTime,
    /// The error of a body that a [`BodyReader::SharedConnection`] reads.
    error: Mutex<Option<BodyError>>,
    error_waker: AtomicWaker,
    /// Waker of the upstream connection while it waits for a withheld error.
    reader_waker: AtomicWaker,
    /// Counts the upload against the share of its client network, until the body has ended or the response has begun.
    share: Mutex<Option<NetworkShare>>,
}

/// Time at which the upload began.
#[derive(Debug)]
struct StartTime(Instant);

impl Default for StartTime {
    fn default() -> Self {
        StartTime(Instant::now())
    }
}

/// The upstream connection has taken all available data, but may not have sent it yet.
const SENDING: u8 = 0;
/// The upstream connection has polled for more data, and the client has not sent it yet.
const WAITING: u8 = 1;
/// The upstream connection has taken the whole body.
const DONE: u8 = 2;
/// The body has exceeded the maximum length.
const TOO_LARGE: u8 = 3;
/// The client sent no data for too long, or sent it too slowly.
const STALLED: u8 = 4;

impl UploadProgress {
    /// Return the number of frames that were passed to the upstream connection so far.
    pub fn frame_count(&self) -> u64 {
        self.frame_count.load(Ordering::Relaxed)
    }

    /// Return the number of bytes that were received from the client so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Return whether the gateway waits for the client to send more of the body.
    pub fn is_waiting_for_client(&self) -> bool {
        self.stage() == WAITING
    }

    /// Return whether the body reached its end.
    pub fn is_done(&self) -> bool {
        self.stage() == DONE
    }

    /// Return whether the body was aborted because of its length.
    pub fn is_too_large(&self) -> bool {
        self.stage() == TOO_LARGE
    }

    /// Return whether the body was aborted because the client sent too little data for too long.
    pub fn is_stalled(&self) -> bool {
        self.stage() == STALLED
    }

    /// Record that the response has begun, or that the gateway no longer waits for it. Client and upstream may then send
    /// alternately, so a request body of unknown length may pause without a timeout.
    pub fn mark_response_started(&self) {
        self.response_started.store(true, Ordering::Release);
        self.reader_waker.wake();
        self.set_share(None);
    }

    /// Count the upload against the share of a client network.
    pub fn set_share(&self, share: Option<NetworkShare>) {
        *self.share.lock().unwrap_or_else(PoisonError::into_inner) = share;
    }

    /// Return the error of a body that a [`BodyReader::SharedConnection`] reads, when the body has an error.
    pub fn poll_error(&self, cx: &mut Context<'_>) -> Poll<BodyError> {
        self.error_waker.register(cx.waker());
        self.take_error().map_or(Poll::Pending, Poll::Ready)
    }

    fn take_error(&self) -> Option<BodyError> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set_error(&self, error: BodyError) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.error_waker.wake();
    }

    /// Return whether the client caused a timeout of the request: the gateway still waits for the body, or has waited
    /// for it for at least half of the time since the upload began. Without the second condition, a client could send
    /// its last byte just before the timeout, and the timeout would count as a failure of the upstream.
    pub fn is_delayed_by_client(&self) -> bool {
        let elapsed = self.started_at.0.elapsed().as_micros() as u64;
        self.is_waiting_for_client() || self.client_wait_us.load(Ordering::Relaxed) >= elapsed / 2
    }

    /// Record whether the upstream connection waits for the client to send more of the body.
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
    /// Create the body of a received request. The body has no limits until [`Self::apply_limits`] is called. The
    /// request stays in flight until the body is read to its end. `is_http2` is true if the request came over HTTP/2.
    pub fn new(body: Incoming, is_http2: bool, in_flight: &InFlightRequest) -> Self {
        if body.is_end_stream() {
            return RequestBody(None);
        }
        // Count only HTTP/1.x bodies of unknown length. In HTTP/1.x, only these bodies can have trailers, which must be
        // checked before the next request.
        let is_counted = !is_http2 && body.size_hint().exact().is_none();
        let flow = is_counted.then(|| in_flight.flow().clone());
        flow.iter().for_each(|flow| flow.start_body());
        RequestBody(Some(Box::new(RequestBodyInner {
            source: BodySource::Client(body),
            progress: Arc::default(),
            rate_timer: None,
            remaining: u64::MAX,
            flow,
            trailer_filter: None,
            is_http2,
            is_counted,
            in_flight: Some(in_flight.share()),
            tee: None,
            prefix: None,
            reader: BodyReader::Gateway,
            failure: None,
        })))
    }

    /// Create a body from bytes in memory. `bytes` must not be empty.
    fn from_bytes(bytes: Bytes, reservation: Option<BufferReservation>) -> Self {
        RequestBody(Some(Box::new(RequestBodyInner {
            source: BodySource::Buffered { bytes: Some(bytes), reservation },
            progress: Arc::default(),
            rate_timer: None,
            remaining: u64::MAX,
            flow: None,
            trailer_filter: None,
            is_http2: false,
            is_counted: false,
            in_flight: None,
            tee: None,
            prefix: None,
            reader: BodyReader::Gateway,
            failure: None,
        })))
    }

    /// Copy to `tee` the data that arrives from the client after this call. An empty body is not copied.
    pub fn tee(&mut self, tee: BodyTee) {
        if let Some(inner) = &mut self.0 {
            inner.tee = Some(Box::new(tee));
        }
    }

    /// Apply timeouts and bounds to the body before it is read or sent to an upstream. Return the progress of the body,
    /// or `None` if the body is empty.
    pub fn apply_limits(&mut self, limits: BodyLimits) -> Option<Arc<UploadProgress>> {
        let inner = self.0.as_mut()?;
        inner.rate_timer = Some(MinRateTimer::new(limits.upload));
        inner.remaining = limits.max_body.unwrap_or(u64::MAX);
        inner.attach_flow();
        Some(inner.progress.clone())
    }

    /// Return the progress of the body, or `None` if it is empty.
    pub fn progress(&self) -> Option<Arc<UploadProgress>> {
        Some(self.0.as_ref()?.progress.clone())
    }

    /// Read the whole body from the client into memory, so that the upstream does not wait for the client. If the
    /// buffer budget is exhausted, leave the body unread, so that it is streamed to the upstream. A body of one chunk
    /// is not copied.
    ///
    /// # Errors
    /// The client aborted the body or sent it too slowly, or the body is longer than the route allows.
    pub async fn buffer(&mut self, limits: BodyLimits) -> Result<(), BodyError> {
        self.apply_limits(limits);
        if self.is_buffered() {
            return Ok(());
        }
        let length = self.size_hint().lower() as usize;
        let Some(flow) = self.0.as_ref().and_then(|inner| inner.flow.as_ref()) else { return Ok(()) };
        // Stream the body, because the buffer budget is exhausted.
        let Some(reservation) = flow.try_reserve(length) else { return Ok(()) };
        let mut content = Bytes::new();
        let mut buffer = BytesMut::new();
        while let Some(frame) = self.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            if content.is_empty() && buffer.is_empty() {
                content = data;
                continue;
            }
            // Copy the chunks, because each small chunk would keep a whole read buffer in memory.
            buffer.extend_from_slice(&std::mem::take(&mut content));
            buffer.extend_from_slice(&data);
        }
        if let Some(inner) = &mut self.0 {
            let content = if buffer.is_empty() { content } else { buffer.freeze() };
            inner.in_flight = None;
            let bytes = (!content.is_empty()).then_some(content);
            inner.source = BodySource::Buffered { bytes, reservation: Some(reservation) };
        }
        Ok(())
    }

    /// Read the whole body from the client if it is not longer than `max` bytes. The upstream still receives the whole
    /// body. The received bytes count against the buffer budget and against `share`, the share of the client network.
    ///
    /// # Errors
    /// The client aborted the body or sent it too slowly, or the body is longer than the route allows.
    pub async fn read(
        &mut self,
        limits: BodyLimits,
        max: usize,
        share: Option<NetworkShare>,
    ) -> Result<ReadBody, BodyError> {
        let exact = self.size_hint().exact();
        if exact.is_some_and(|length| length > max as u64) {
            return Ok(ReadBody::TooLong);
        }
        self.apply_limits(limits);
        let Some(flow) = self.0.as_ref().and_then(|inner| inner.flow.clone()) else {
            return Ok(ReadBody::Whole(Bytes::new()));
        };
        let Some(reservation) = flow.reserve_inspected() else { return Ok(ReadBody::NoCapacity) };
        let mut reservation = reservation.within(share);
        let mut content = BytesMut::new();
        while let Some(frame) = self.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            // Reserve memory for received bytes, not for the announced length, so that a client can occupy only as much
            // memory as it sends bytes.
            let has_capacity = reservation.try_grow(data.len());
            content.extend_from_slice(&data);
            if content.len() > max || !has_capacity {
                if let Some(inner) = &mut self.0 {
                    inner.prefix = Some((content.freeze(), reservation));
                }
                return Ok(if has_capacity { ReadBody::TooLong } else { ReadBody::NoCapacity });
            }
        }
        let content = content.freeze();
        if let Some(inner) = &mut self.0 {
            inner.in_flight = None;
            let bytes = (!content.is_empty()).then(|| content.clone());
            inner.source = BodySource::Buffered { bytes, reservation: Some(reservation) };
        }
        Ok(ReadBody::Whole(content))
    }

    /// Return the content of a body that was read as a whole and is not empty, to change it.
    pub fn buffered_mut(&mut self) -> Option<&mut Bytes> {
        match self.0.as_mut().map(|inner| &mut inner.source) {
            Some(BodySource::Buffered { bytes, .. }) => bytes.as_mut(),
            Some(BodySource::Client(_)) | None => None,
        }
    }

    /// Return the content of a body that is empty or buffered, so that it can be sent again. The returned value takes
    /// over the reservation of the memory.
    pub fn replayable(&mut self) -> Option<ReplayBody> {
        let Some(inner) = &mut self.0 else { return Some(ReplayBody(None)) };
        match &mut inner.source {
            BodySource::Client(_) => None,
            BodySource::Buffered { bytes, reservation } => {
                Some(ReplayBody(bytes.clone().map(|bytes| Box::new((bytes, reservation.take())))))
            }
        }
    }

    /// Return the content of a body that is empty or in memory.
    pub fn content(&self) -> Option<&[u8]> {
        match self.0.as_ref().map(|inner| &inner.source) {
            None => Some(&[]),
            Some(BodySource::Buffered { bytes, .. }) => Some(bytes.as_deref().unwrap_or_default()),
            Some(BodySource::Client(_)) => None,
        }
    }

    /// Return whether the whole body is in memory.
    pub fn is_buffered(&self) -> bool {
        self.0.as_ref().is_some_and(|inner| matches!(inner.source, BodySource::Buffered { .. }))
    }

    /// Create an empty body.
    pub fn empty() -> Self {
        RequestBody(None)
    }

    /// Close the client connection after the response unless the body is read to its end.
    pub fn require_end(&mut self) {
        self.0.iter_mut().for_each(|inner| inner.attach_flow());
    }

    /// Let an upstream connection read the body from now on.
    pub fn start_upload(&mut self, reader: BodyReader) {
        self.0.iter_mut().for_each(|inner| inner.reader = reader);
    }

    /// Forward the trailers that the filter permits. Without this call, all trailers are dropped. Call this method only
    /// if the upstream connection can send trailers.
    pub fn forward_trailers(&mut self, filter: &Arc<TrailerFilter>) {
        self.0.iter_mut().for_each(|inner| inner.trailer_filter = Some(filter.clone()));
    }
}

impl RequestBodyInner {
    /// Set the flow, to which the end of the body is reported.
    fn attach_flow(&mut self) {
        // Set the flow unless the body is already buffered: a buffered body keeps the flow that it had while it was
        // read.
        if let Some(in_flight) = &self.in_flight {
            self.flow = Some(in_flight.flow().clone());
        }
    }

    /// Return whether an upload timeout of the client has expired. After the response has begun, upload timeouts apply
    /// only to bodies of known length.
    fn is_client_timed_out(&mut self, cx: &mut Context<'_>) -> bool {
        let is_timed =
            !self.progress.response_started.load(Ordering::Relaxed) || self.source.size_hint().exact().is_some();
        is_timed && self.rate_timer.as_mut().is_some_and(|timer| timer.poll(cx).is_ready())
    }

    /// Let the next request on the connection continue if it waits for the end of this body.
    fn release_next_request(&mut self) {
        if let Some(flow) = self.flow.as_ref().filter(|_| self.is_counted) {
            flow.end_body();
        }
        self.is_counted = false;
    }

    /// Poll the body for its next frame. Pass errors to the reader as [`BodyReader`] describes.
    fn poll(&mut self, cx: &mut Context<'_>) -> (u8, PollFrame) {
        let (stage, error) = match self.failure.take() {
            None => match self.poll_source(cx) {
                (stage, Poll::Ready(Some(Err(error)))) if self.withholds_errors() && error.is_disconnect() => {
                    let timer = Box::pin(sleep(ABANDONED_TIMEOUT));
                    return self.poll_delayed(Box::new(DelayedError { error, stage, timer }), cx);
                }
                (stage, Poll::Ready(Some(Err(error)))) => (stage, error),
                polled => return polled,
            },
            Some(BodyFailure::Delayed(delayed)) => return self.poll_delayed(delayed, cx),
            Some(BodyFailure::Reported) => {
                self.progress.reader_waker.register(cx.waker());
                self.failure = Some(BodyFailure::Reported);
                let stage = self.progress.stage();
                return match self.withholds_errors() {
                    true => (stage, Poll::Pending),
                    false => {
                        (stage, self.progress.take_error().map_or(Poll::Pending, |error| Poll::Ready(Some(Err(error)))))
                    }
                };
            }
        };
        self.report(stage, error, cx)
    }

    fn poll_delayed(&mut self, mut delayed: Box<DelayedError>, cx: &mut Context<'_>) -> (u8, PollFrame) {
        self.progress.reader_waker.register(cx.waker());
        if self.withholds_errors() && delayed.timer.as_mut().poll(cx).is_pending() {
            self.failure = Some(BodyFailure::Delayed(delayed));
            return (SENDING, Poll::Pending);
        }
        self.report(delayed.stage, delayed.error, cx)
    }

    /// Pass an error to the reader.
    fn report(&mut self, stage: u8, error: BodyError, cx: &mut Context<'_>) -> (u8, PollFrame) {
        if self.reader != BodyReader::SharedConnection || !self.withholds_errors() {
            return (stage, Poll::Ready(Some(Err(error))));
        }
        self.progress.reader_waker.register(cx.waker());
        self.progress.set_error(error);
        self.failure = Some(BodyFailure::Reported);
        (stage, Poll::Pending)
    }

    /// Return whether errors are not passed to the reader at once. After the response has begun, the server has accepted
    /// the stream and must be told that the request was aborted.
    fn withholds_errors(&self) -> bool {
        self.reader != BodyReader::Gateway && !self.progress.response_started.load(Ordering::Acquire)
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> (u8, PollFrame) {
        if let Some((bytes, _reservation)) = self.prefix.take() {
            return match self.remaining.checked_sub(bytes.len() as u64) {
                Some(remaining) => {
                    self.remaining = remaining;
                    (SENDING, Poll::Ready(Some(Ok(Frame::data(bytes)))))
                }
                None => (TOO_LARGE, Poll::Ready(Some(Err(BodyError::TooLarge)))),
            };
        }
        let mut polled = match &mut self.source {
            BodySource::Client(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::Aborted),
            BodySource::Buffered { bytes, .. } => {
                return (DONE, Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))));
            }
        };
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            // hyper reads trailers up to CR LF CR LF. If a line ends with LF alone, hyper may read the next request as
            // trailers, where other servers see two requests (RFC 9112 §7.1). hyper reports an empty trailer section
            // only in this case.
            if has_padding(trailers) || !self.is_http2 && trailers.is_empty() {
                polled = Poll::Ready(Some(Err(BodyError::MalformedTrailers)));
            } else {
                // Close the connection after any other trailer section too, so that no later bytes are read as a
                // request.
                if let Some(flow) = self.flow.as_ref().filter(|_| !self.is_http2) {
                    flow.abandon_request();
                }
                let mut trailers = trailers.clone();
                let filtered = self.trailer_filter.as_ref().map(|filter| filter.apply(&mut trailers));
                let is_forwarded = filtered.is_some() && !trailers.is_empty();
                polled = Poll::Ready(is_forwarded.then(|| Ok(Frame::trailers(trailers))));
            }
        }
        match &polled {
            Poll::Pending if self.is_client_timed_out(cx) => {
                return (STALLED, Poll::Ready(Some(Err(BodyError::ClientTimeout))));
            }
            Poll::Pending => return (WAITING, polled),
            // A body of unknown length has ended. hyper does not poll a body of known length after its last byte, so
            // the end of such a body is detected below.
            Poll::Ready(None) => return (DONE, polled),
            Poll::Ready(Some(Ok(frame))) => {
                let length = frame.data_ref().map_or(0, Bytes::len);
                self.rate_timer.iter_mut().for_each(|timer| timer.received(length));
                // Only the task that reads the body changes the number.
                self.progress.received.store(self.progress.received() + length as u64, Ordering::Relaxed);
                match self.remaining.checked_sub(length as u64) {
                    Some(remaining) => self.remaining = remaining,
                    None => return (TOO_LARGE, Poll::Ready(Some(Err(BodyError::TooLarge)))),
                }
            }
            // The body ended with an error, so its stage is not `DONE`, although no data follows.
            Poll::Ready(Some(Err(_))) => return (SENDING, polled),
        }
        (if self.source.is_end_stream() { DONE } else { SENDING }, polled)
    }
}

// === A copy of a body, made while the body is sent to an upstream ===

/// The reason why a body was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TeeError {
    /// The body exceeds the maximum size of a copy.
    TooLarge,
    /// The body did not reach its end.
    Incomplete,
}

/// Callback for the end of a body that is copied.
type OnTeeEnd = Box<dyn FnOnce(Result<RequestBody, TeeError>) + Send + Sync>;

/// Copies a body while it is read. The bytes are copied, because a reference to a chunk would keep the chunk's whole
/// read buffer in memory.
pub struct BodyTee {
    content: Vec<u8>,
    /// Maximum length of the copy in bytes. The gateway reserves memory for this length.
    max: usize,
    reservation: Option<BufferReservation>,
    /// `None` after the callback was called.
    on_end: Option<OnTeeEnd>,
}

impl BodyTee {
    /// Create the receiver of a copy of at most `max` bytes. `reservation` has reserved memory for these bytes.
    /// `on_end` is called once, with the copy or with the reason why the body was not copied.
    pub fn new(
        max: usize,
        reservation: BufferReservation,
        on_end: impl FnOnce(Result<RequestBody, TeeError>) + Send + Sync + 'static,
    ) -> Self {
        BodyTee { content: Vec::new(), max, reservation: Some(reservation), on_end: Some(Box::new(on_end)) }
    }

    fn push(&mut self, data: Option<&Bytes>) {
        let Some(data) = data.filter(|_| self.on_end.is_some()) else { return };
        let length = self.content.len() + data.len();
        if length > self.max {
            return self.end(Err(TeeError::TooLarge));
        }
        if length > self.content.capacity() {
            // Double the capacity, but never exceed the size for which memory is reserved.
            let capacity = (2 * self.content.capacity()).clamp(length, self.max);
            self.content.reserve_exact(capacity - self.content.len());
        }
        self.content.extend_from_slice(data);
    }

    fn complete(&mut self) {
        let content = Bytes::from(std::mem::take(&mut self.content));
        let body = match self.reservation.take() {
            Some(reservation) if !content.is_empty() => RequestBody::from_bytes(content, Some(reservation)),
            _ => RequestBody::empty(),
        };
        self.end(Ok(body));
    }

    /// Call the callback, unless it was already called.
    fn end(&mut self, result: Result<RequestBody, TeeError>) {
        (self.content, self.reservation) = (Vec::new(), None);
        if let Some(on_end) = self.on_end.take() {
            on_end(result);
        }
    }
}

impl Drop for BodyTee {
    fn drop(&mut self) {
        self.end(Err(TeeError::Incomplete));
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
        if let Some(tee) = &mut inner.tee {
            match &polled {
                Poll::Ready(Some(Ok(frame))) => tee.push(frame.data_ref()),
                Poll::Ready(Some(Err(_))) => tee.end(Err(TeeError::Incomplete)),
                Poll::Ready(None) | Poll::Pending => {}
            }
            if stage == DONE {
                tee.complete();
            }
        }
        match (stage, &inner.flow) {
            (TOO_LARGE | STALLED, Some(flow)) => flow.abandon_request(),
            (DONE, _) => {
                inner.release_next_request();
                inner.progress.set_share(None);
            }
            _ => {}
        }
        inner.progress.frame_count.fetch_add(u64::from(polled.is_ready()), Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(|inner| inner.prefix.is_none() && inner.source.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or(SizeHint::with_exact(0), |inner| inner.source.size_hint())
    }
}

impl Drop for RequestBodyInner {
    fn drop(&mut self) {
        // Abandon the request if the body was not polled to its end. The end of a chunked body is known only after a
        // poll has returned it.
        if let Some(flow) = self.flow.as_ref().filter(|_| !self.progress.is_done()) {
            flow.abandon_request();
        }
        self.release_next_request();
    }
}

// === Responses sent before the request is read to its end: they must reach a client that is still sending ===

/// Maximum length in bytes of a request body that the gateway reads and discards so that the connection can be reused.
const MAX_DRAINED_BODY: u64 = 64 << 10;

/// Maximum time to read and discard the rest of a request body after an early response.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Return whether a part of the request may still be unread when the response is sent. If the part stays unread, the
/// gateway must close the connection. For HTTP/2, hyper resets the stream instead (RFC 9113 §8.1).
pub fn has_unread_body(request: &Request<RequestBody>) -> bool {
    request.version() != Version::HTTP_2 && !request.body().is_end_stream() && !request.body().is_buffered()
}

/// Discard the body of a request that will not be forwarded. If the length of the body is known and at most
/// `MAX_DRAINED_BODY` bytes, and the request has no `Expect`, read the body to its end in the background. Abandon any
/// other body.
pub fn discard_body(request: Box<Request<RequestBody>>, flow: &Arc<StreamFlow>) {
    if !has_unread_body(&request) {
        return;
    }
    let is_small = request.body().size_hint().exact().is_some_and(|length| length <= MAX_DRAINED_BODY);
    // A client that sent `Expect: 100-continue` may send no body after a final response. The gateway would then read
    // the next request as the body.
    if is_small && !request.headers().contains_key(EXPECT) {
        tokio::spawn(drain_body(request.into_body(), flow.clone()));
    } else {
        flow.abandon_request();
    }
}

/// Set `Connection: close` if the request will not be read to its end (RFC 9112 §9.6).
pub fn set_connection_close(response: &mut Response<Body>, flow: &StreamFlow) {
    if flow.is_request_abandoned() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

async fn drain_body(mut body: RequestBody, flow: Arc<StreamFlow>) {
    body.require_end();
    let drained = timeout(DRAIN_TIMEOUT, async { while let Some(Ok(_)) = body.frame().await {} }).await;
    if drained.is_err() {
        flow.abandon_request();
    }
}
