//! State of a client connection. [`ConnectionActivity`] is the state for header and idle timeouts. [`StreamFlow`] is
//! the state for write timeouts.

use std::fmt;
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use tokio::sync::Notify;
use tokio::time;

use crate::clock::monotonic;
use crate::http::body_limits::{BufferBudget, BufferReservation, LazyTimer, ReadLimit};
use crate::http::memory_guard::RoomPermit;
use crate::http::slow_readers::{SLOW_AFTER, SlowReader, SlowReaders};

// === Activity: whether requests are in flight, and since when the connection is idle ===

/// Number of premature resets above which an HTTP/2 connection is closed, if they are more than half of its requests.
/// The number is half of Envoy's default of `overload.premature_reset_total_stream_count`.
const MAX_PREMATURE_RESETS: u32 = 250;

/// Age at which the reset of a request is no longer premature, as in Envoy
/// (`overload.premature_reset_min_stream_lifetime_seconds`).
const PREMATURE_AGE: Duration = Duration::from_secs(1);

/// Whether requests are in flight on a connection, and since when it has been idle.
#[derive(Debug)]
pub struct ConnectionActivity {
    opened_at: Instant,
    /// Number of handles of requests in flight.
    in_flight: AtomicUsize,
    /// End of the last response in ms after `opened_at`, or 0 before the first response.
    last_response_end_ms: AtomicU64,
    /// Incremented when incomplete request headers arrive, and again when they are complete. The value is odd while
    /// request headers are incomplete.
    headers_counter: AtomicU64,
    /// Whether responses announce with `Connection: close` that the connection will be closed.
    announces_close: AtomicBool,
    /// Whether a request is in flight, or a part of its response is not written yet.
    has_unwritten_response: AtomicBool,
    /// Whether the connection is suspended: it is idle, and its buffers are freed or about to be freed.
    is_suspended: AtomicBool,
    /// Whether the connection must not be suspended.
    is_suspension_forbidden: AtomicBool,
    /// Whether the connection becomes a tunnel.
    is_tunnel: AtomicBool,
    /// Number of HTTP/2 requests.
    requests: AtomicU32,
    /// Number of HTTP/2 requests that were reset before their response, within `PREMATURE_AGE`.
    premature_resets: AtomicU32,
}

/// What a connection still has to do after hyper has handed its request over: a tunnel, or a request whose client has
/// gone away.
pub type Continuation = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A place for a [`Continuation`] until the connection runs it.
#[derive(Default)]
struct ContinuationSlot(Mutex<Option<Continuation>>);

impl ContinuationSlot {
    fn put(&self, continuation: Continuation) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(continuation);
    }

    fn take(&self) -> Option<Continuation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl fmt::Debug for ContinuationSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContinuationSlot").finish_non_exhaustive()
    }
}

/// A request in flight: from the arrival of its headers until its response body is dropped.
#[derive(Debug)]
pub struct InFlightRequest {
    activity: Arc<ConnectionActivity>,
    flow: Arc<StreamFlow>,
    /// `None` without a memory limit.
    room: Option<Box<RoomPermit>>,
}

impl ConnectionActivity {
    /// Create the activity of a new connection.
    pub fn new() -> Arc<Self> {
        let (last_response_end_ms, headers_counter) = Default::default();
        let (announces_close, has_unwritten_response, is_suspended, is_suspension_forbidden) = Default::default();
        let is_tunnel = Default::default();
        let (requests, premature_resets) = Default::default();
        Arc::new(ConnectionActivity {
            opened_at: monotonic(),
            last_response_end_ms,
            headers_counter,
            announces_close,
            has_unwritten_response,
            is_suspended,
            is_suspension_forbidden,
            is_tunnel,
            requests,
            premature_resets,
            in_flight: AtomicUsize::new(0),
        })
    }

    /// Count an HTTP/2 request.
    pub fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Record that the client has reset an HTTP/2 request of this age before its response.
    pub fn record_reset(&self, age: Duration) {
        if age < PREMATURE_AGE {
            self.premature_resets.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Return whether the connection must be closed, because the client has reset too many requests.
    pub fn has_too_many_resets(&self) -> bool {
        let resets = self.premature_resets.load(Ordering::Relaxed);
        resets > MAX_PREMATURE_RESETS && resets > self.requests.load(Ordering::Relaxed) / 2
    }

    /// Record that a request starts on `flow`.
    pub fn start_request(self: &Arc<Self>, flow: Arc<StreamFlow>) -> InFlightRequest {
        self.record_headers(false);
        self.has_unwritten_response.store(true, Ordering::Relaxed);
        InFlightRequest::new(self.clone(), flow)
    }

    fn has_requests(&self) -> bool {
        // Pairs with the release in the drop of the last request, so that this thread sees the end time which the drop
        // has stored.
        self.in_flight.load(Ordering::Acquire) > 0
    }

    /// Record that bytes have arrived from the client. `is_partial` is true if these bytes may end within request
    /// headers. Bytes that arrive while a request is in flight are considered a part of that request.
    pub fn record_headers(&self, is_partial: bool) {
        let counter = self.headers_counter.load(Ordering::Relaxed);
        if is_partial != (counter & 1 == 1) {
            self.headers_counter.store(counter + 1, Ordering::Relaxed);
        }
    }

    /// Return the headers counter if the connection has served a request, no request is in flight, and the headers of
    /// the next request are incomplete. Otherwise return `None`.
    pub fn partial_headers(&self) -> Option<u64> {
        let counter = self.headers_counter.load(Ordering::Relaxed);
        let is_kept_alive = || self.last_response_end_ms.load(Ordering::Relaxed) > 0;
        (counter & 1 == 1 && !self.has_requests() && is_kept_alive()).then_some(counter)
    }

    /// Record that hyper has written all pending bytes to the client.
    pub fn record_flushed(&self) {
        if !self.has_requests() {
            self.has_unwritten_response.store(false, Ordering::Relaxed);
        }
    }

    /// Return whether a request is in flight, or a part of its response is not written yet.
    pub fn has_unwritten_response(&self) -> bool {
        self.has_unwritten_response.load(Ordering::Relaxed)
    }

    /// Return whether the client of an HTTP/1.x connection waits for a response, or for the rest of a response. Both
    /// sides of a tunnel end independently, so a tunnel does not count.
    pub fn awaits_response(&self) -> bool {
        self.has_unwritten_response() && !self.is_tunnel.load(Ordering::Relaxed)
    }

    /// Set whether later responses announce with `Connection: close` that the connection will be closed (RFC 9112
    /// §9.6).
    pub fn announce_close(&self, announce: bool) {
        self.announces_close.store(announce, Ordering::Relaxed);
    }

    /// Return the time until the connection times out. Before the end of the first response, `header_timeout` applies,
    /// and afterwards `idle_timeout`. Return `None` if the timeout has expired. While a request is in flight, return
    /// the whole `idle_timeout`.
    pub fn time_left(&self, header_timeout: Duration, idle_timeout: Duration) -> Option<Duration> {
        if self.has_requests() {
            return Some(idle_timeout);
        }
        let time_left = match self.idle_time() {
            None => header_timeout.checked_sub(self.opened_at.elapsed()),
            Some(idle_time) => idle_timeout.checked_sub(idle_time),
        };
        time_left.filter(|time_left| !time_left.is_zero())
    }

    /// Return whether the connection may be suspended: it is not forbidden, all responses are written, and since `time`
    /// or longer, no bytes have arrived.
    pub fn may_suspend(&self, time: Duration) -> bool {
        !self.has_requests()
            && self.idle_time().is_some_and(|idle_time| idle_time >= time)
            && self.headers_counter.load(Ordering::Relaxed) & 1 == 0
            && !self.has_unwritten_response()
            && !self.is_suspension_forbidden.load(Ordering::Relaxed)
    }

    /// Forbid to suspend the connection.
    pub fn forbid_suspension(&self) {
        self.is_suspension_forbidden.store(true, Ordering::Relaxed);
    }

    /// Return the time since the end of the last response, or `None` before the end of the first response.
    fn idle_time(&self) -> Option<Duration> {
        match self.last_response_end_ms.load(Ordering::Relaxed) {
            0 => None,
            end_ms => Some(self.opened_at.elapsed().saturating_sub(Duration::from_millis(end_ms))),
        }
    }

    /// Return whether the connection is suspended.
    pub fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::Relaxed)
    }

    /// Set whether the connection is suspended.
    pub fn set_suspended(&self, is_suspended: bool) {
        self.is_suspended.store(is_suspended, Ordering::Relaxed);
    }
}

impl InFlightRequest {
    fn new(activity: Arc<ConnectionActivity>, flow: Arc<StreamFlow>) -> Self {
        activity.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightRequest { activity, flow, room: None }
    }

    /// Hold the room of the request until this handle is dropped.
    pub fn hold(&mut self, room: RoomPermit) {
        self.room = Some(Box::new(room));
    }

    /// Return an additional handle of this request. The request stays in flight until all its handles are dropped.
    pub(super) fn share(&self) -> Self {
        InFlightRequest::new(self.activity.clone(), self.flow.clone())
    }

    /// Return the flow of the HTTP/1.x connection or HTTP/2 stream of the request.
    pub fn flow(&self) -> &Arc<StreamFlow> {
        &self.flow
    }

    /// Return whether the response must announce with `Connection: close` that the connection will be closed.
    pub(super) fn announces_close(&self) -> bool {
        self.activity.announces_close.load(Ordering::Relaxed)
    }

    /// Set the tunnel that the HTTP/1.x connection or the HTTP/2 stream becomes after the response. On an HTTP/2
    /// connection, the request stays in flight until the tunnel ends.
    pub(super) fn set_tunnel(self, tunnel: impl Future<Output = ()> + Send + 'static) {
        let flow = self.flow.clone();
        if flow.is_multiplexed {
            flow.tunnel.put(Box::pin(async move {
                tunnel.await;
                drop(self);
            }));
        } else {
            self.activity.is_tunnel.store(true, Ordering::Relaxed);
            flow.tunnel.put(Box::pin(tunnel));
        }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let ended_at_ms = self.activity.opened_at.elapsed().as_millis() as u64;
        self.activity.last_response_end_ms.store(ended_at_ms.max(1), Ordering::Relaxed);
        // Bytes that arrived during the request may have been a part of its body, so they do not count as incomplete
        // headers.
        self.activity.record_headers(false);
        self.activity.in_flight.fetch_sub(1, Ordering::Release);
    }
}

// === Flow: whether a client reads the response data that is pending for it ===

/// Number of bytes that each chunk counts against a buffer budget in addition to its data. This number is an estimate
/// of the memory for the frame of the chunk, and for the part of a read buffer that the chunk keeps in memory.
const CHUNK_OVERHEAD: usize = 256;

/// Number of bytes at the start of a response for which [`ReadLimit::Small`] applies.
const READ_SMALL: u64 = 64 << 10;

/// The reference time of `StreamFlow::deadline_us`.
static EPOCH: LazyLock<time::Instant> = LazyLock::new(time::Instant::now);

/// The state of a stream: an HTTP/2 stream, or an HTTP/1.x connection, which has one request at a time.
#[derive(Debug)]
pub struct StreamFlow {
    /// Buffer budget. The streams of an HTTP/2 connection share one budget, and all HTTP/1.x connections share one
    /// budget.
    budget: Arc<BufferBudget>,
    /// Budget of inspected request bodies, which the gateway reads before it forwards the request. All streams of the
    /// connection share this budget.
    inspected: Arc<BufferBudget>,
    /// Whether this is an HTTP/2 stream. Response chunks count against `budget` only on HTTP/2 streams.
    is_multiplexed: bool,
    /// Number of response bytes that are buffered.
    buffered: AtomicUsize,
    /// Waker of the task that waits until buffered bytes are written.
    written_waker: AtomicWaker,
    /// Bit 0 is set while hyper holds data for the client and does not poll for the next chunk. The other bits count
    /// the chunks that were passed to hyper.
    chunk_counter: AtomicU64,
    /// Whether the gateway has stopped reading a request before its end.
    request_abandoned: AtomicBool,
    /// Whether only the end of the connection delimits the response.
    is_close_delimited: AtomicBool,
    /// Number of request bodies of unknown length that have started.
    bodies_started: AtomicU32,
    /// Number of request bodies of unknown length that were read to their end or abandoned.
    bodies_ended: AtomicU32,
    /// Wakes the task of the next request when the body of an earlier request has ended.
    body_ended: Notify,
    /// Time at which the response must end, in µs after `EPOCH`, or 0 if there is no deadline.
    deadline_us: AtomicU64,
    /// Whether the request waits for the response of an upstream or of an authentication server.
    is_in_exchange: AtomicBool,
    /// Whether the client has gone away while the request was in an exchange.
    is_abandoned: AtomicBool,
    /// The request that hyper has dropped, because its client has gone away.
    abandoned: ContinuationSlot,
    /// The tunnel that follows a protocol upgrade.
    tunnel: ContinuationSlot,
}

impl StreamFlow {
    /// Create the flow of a new HTTP/1.x connection.
    pub fn for_connection(budget: Arc<BufferBudget>) -> Arc<Self> {
        StreamFlow::new(budget.clone(), budget, false)
    }

    /// Create the flow of a new HTTP/2 stream. `inspected` is the budget of request bodies that the gateway reads
    /// before it forwards the request.
    pub fn for_stream(budget: Arc<BufferBudget>, inspected: Arc<BufferBudget>) -> Arc<Self> {
        StreamFlow::new(budget, inspected, true)
    }

    fn new(budget: Arc<BufferBudget>, inspected: Arc<BufferBudget>, is_multiplexed: bool) -> Arc<Self> {
        Arc::new(StreamFlow {
            budget,
            inspected,
            is_multiplexed,
            buffered: AtomicUsize::new(0),
            written_waker: AtomicWaker::new(),
            chunk_counter: AtomicU64::new(0),
            request_abandoned: AtomicBool::new(false),
            is_close_delimited: AtomicBool::new(false),
            bodies_started: AtomicU32::new(0),
            bodies_ended: AtomicU32::new(0),
            body_ended: Notify::new(),
            deadline_us: AtomicU64::new(0),
            is_in_exchange: AtomicBool::new(false),
            is_abandoned: AtomicBool::new(false),
            abandoned: ContinuationSlot::default(),
            tunnel: ContinuationSlot::default(),
        })
    }

    /// Take the tunnel that follows a protocol upgrade.
    pub fn take_tunnel(&self) -> Option<Continuation> {
        self.tunnel.take()
    }

    /// Return the read limit of the upstream connection after `sent` bytes of the response were sent.
    pub fn reads(&self, sent: u64) -> ReadLimit {
        match sent {
            _ if !self.is_multiplexed => ReadLimit::Any,
            _ if !self.has_capacity() => ReadLimit::Page,
            ..READ_SMALL => ReadLimit::Small,
            _ => ReadLimit::Any,
        }
    }

    /// Return whether more response data may be buffered.
    pub(super) fn has_capacity(&self) -> bool {
        self.budget.has_capacity()
    }

    /// Return whether chunks of the response count against the budget.
    pub(super) fn is_multiplexed(&self) -> bool {
        self.is_multiplexed
    }

    /// Reserve `bytes` for a request body, or return `None` if the budget does not allow it.
    pub(super) fn try_reserve(&self, bytes: usize) -> Option<BufferReservation> {
        self.budget.try_reserve(bytes)
    }

    /// Create an empty reservation for a body that the gateway reads before it forwards the request.
    pub(super) fn reserve_inspected(&self) -> Option<BufferReservation> {
        self.inspected.try_reserve(0)
    }

    /// Return `Poll::Ready` when the next chunk may be buffered: all buffered chunks of this stream are written, or the
    /// budget has capacity. Each stream can therefore make progress even if other streams have used up the budget.
    pub(super) fn poll_capacity(&self, cx: &Context<'_>) -> Poll<()> {
        let has_capacity = || self.buffered.load(Ordering::Acquire) == 0 || self.budget.has_capacity();
        if has_capacity() {
            return Poll::Ready(());
        }
        self.written_waker.register(cx.waker());
        // Check the capacity again, because the bytes may have been written before the waker was registered.
        if has_capacity() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Count a chunk as buffered.
    pub(super) fn add_buffered(&self, bytes: usize) {
        self.buffered.fetch_add(bytes, Ordering::Relaxed);
        self.budget.add(bytes);
    }

    /// Release a chunk that was written or dropped.
    pub(super) fn release_buffered(&self, bytes: usize) {
        self.budget.subtract(bytes);
        self.buffered.fetch_sub(bytes, Ordering::Release);
        self.written_waker.wake();
    }

    /// Record that hyper holds data for the client.
    pub(super) fn mark_data_pending(&self) {
        let counter = self.chunk_counter.load(Ordering::Relaxed);
        self.chunk_counter.store((counter | 1) + 2, Ordering::Relaxed);
    }

    /// Record that hyper holds no more data for the client: it polls for the next chunk, or the body has ended.
    pub(super) fn mark_drained(&self) {
        let counter = self.chunk_counter.load(Ordering::Relaxed);
        self.chunk_counter.store(counter & !1, Ordering::Relaxed);
    }

    /// Record that only the end of the connection delimits the response.
    pub(super) fn mark_close_delimited(&self) {
        self.is_close_delimited.store(true, Ordering::Relaxed);
    }

    /// Return whether an aborted response would look complete to the client, because only the end of the connection
    /// delimits it.
    pub fn is_close_delimited(&self) -> bool {
        self.is_close_delimited.load(Ordering::Relaxed)
    }

    /// Set the time at which the response must end. The caller must ensure that the task that polls the
    /// [`WriteWatchdog`] is woken at this time.
    pub(super) fn set_deadline(&self, deadline: Option<time::Instant>) {
        let deadline_us = deadline.map_or(0, |at| (at.saturating_duration_since(*EPOCH).as_micros() as u64).max(1));
        self.deadline_us.store(deadline_us, Ordering::Relaxed);
    }

    fn is_past_deadline(&self) -> bool {
        let deadline_us = self.deadline_us.load(Ordering::Relaxed);
        deadline_us > 0 && EPOCH.elapsed().as_micros() as u64 >= deadline_us
    }

    /// Record that a request has a body of unknown length.
    pub(super) fn start_body(&self) {
        self.bodies_started.fetch_add(1, Ordering::Relaxed);
    }

    /// Record that a body of unknown length was read to its end or abandoned.
    pub(super) fn end_body(&self) {
        self.bodies_ended.fetch_add(1, Ordering::Release);
        self.body_ended.notify_one();
    }

    /// Return `None` if all started bodies have ended and no request was abandoned. Otherwise, return the number of
    /// started bodies: the next bytes may be a part of an earlier request's body instead of a new request; see
    /// [`StreamFlow::wait_for_bodies`].
    pub fn unfinished_bodies(&self) -> Option<u32> {
        let bodies = self.bodies_started.load(Ordering::Relaxed);
        (self.is_request_abandoned() || self.bodies_ended.load(Ordering::Relaxed) != bodies).then_some(bodies)
    }

    /// Wait until `bodies` bodies have ended. Return false if a request was abandoned, because the following bytes may
    /// then be a part of its body. The wait is necessary because hyper may read the end of a body and the next
    /// request's headers before the task that forwards the body has processed the trailers.
    pub async fn wait_for_bodies(&self, bodies: u32) -> bool {
        while self.bodies_ended.load(Ordering::Acquire) != bodies {
            self.body_ended.notified().await;
        }
        !self.is_request_abandoned()
    }

    /// Record that the rest of a request will not be read.
    pub fn abandon_request(&self) {
        self.request_abandoned.store(true, Ordering::Relaxed);
    }

    /// Return whether the gateway has stopped reading a request that the client may still be sending.
    pub fn is_request_abandoned(&self) -> bool {
        self.request_abandoned.load(Ordering::Relaxed)
    }
}

/// A chunk of a response body. The bytes of the chunk count against the buffer budget of the client connection until
/// hyper has written them.
#[derive(Debug)]
pub struct DataChunk {
    bytes: Bytes,
    reservation: Option<ChunkReservation>,
}

/// Number of bytes that a chunk counts against the buffer budget of its client connection.
#[derive(Debug)]
struct ChunkReservation {
    flow: Arc<StreamFlow>,
    size: usize,
}

impl DataChunk {
    /// Create a chunk that counts against no budget.
    pub(super) fn untracked(bytes: Bytes) -> Self {
        DataChunk { bytes, reservation: None }
    }

    /// Create a chunk that counts against the budget of a stream.
    pub(super) fn tracked(bytes: Bytes, flow: &Arc<StreamFlow>) -> Self {
        let reservation = ChunkReservation { flow: flow.clone(), size: bytes.len() + CHUNK_OVERHEAD };
        flow.add_buffered(reservation.size);
        DataChunk { bytes, reservation: Some(reservation) }
    }
}

impl Buf for DataChunk {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        if self.bytes.is_empty() {
            self.bytes = Bytes::new();
            self.reservation = None;
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        self.bytes.copy_to_bytes(count)
    }
}

impl Drop for ChunkReservation {
    fn drop(&mut self) {
        self.flow.release_buffered(self.size);
    }
}

// === Abandoned requests: the client has gone away while an upstream was working on its request ===
//
// If the gateway cancelled such an exchange at once, the client could start the next one at once, and the upstream would
// work on more requests than the limits allow. The request therefore stays in flight until the upstream responds, at
// most for `ABANDONED_TIMEOUT`, with all its permits.

/// Maximum time for which a request stays in flight after its client has gone away. Then the exchange is cancelled.
pub(super) const ABANDONED_TIMEOUT: Duration = Duration::from_millis(500);

/// An exchange with an upstream or an authentication server, in which a request waits for the response. The exchange
/// ends when the value is dropped.
#[derive(Debug)]
pub struct Exchange<'a>(&'a StreamFlow);

impl StreamFlow {
    /// Start an exchange.
    pub fn start_exchange(&self) -> Exchange<'_> {
        self.is_in_exchange.store(true, Ordering::Relaxed);
        Exchange(self)
    }

    /// If the request was abandoned, wait forever, so that it makes no progress until it is dropped.
    pub async fn stop_if_abandoned(&self) {
        if self.is_abandoned.load(Ordering::Relaxed) {
            pending::<()>().await;
        }
    }

    /// Keep a request whose client has gone away if the request is in an exchange. Otherwise drop the request.
    pub fn keep_abandoned(&self, request: impl FnOnce() -> Continuation) {
        if self.is_in_exchange.load(Ordering::Relaxed) {
            self.is_abandoned.store(true, Ordering::Relaxed);
            self.abandoned.put(request());
        }
    }

    /// Take the request that was kept.
    pub fn take_abandoned(&self) -> Option<Continuation> {
        if !self.is_abandoned.load(Ordering::Relaxed) {
            return None;
        }
        self.abandoned.take()
    }

    /// Continue an abandoned request until its exchange ends, at most for `ABANDONED_TIMEOUT`.
    pub async fn finish_abandoned(&self, mut request: Continuation) {
        let exchange = poll_fn(|cx| match request.as_mut().poll(cx) {
            Poll::Pending if self.is_in_exchange.load(Ordering::Relaxed) => Poll::Pending,
            Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
        });
        // Ignore the result: in both cases, dropping the request cancels what is left of the exchange.
        let _ = time::timeout(ABANDONED_TIMEOUT, exchange).await;
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        self.0.is_in_exchange.store(false, Ordering::Relaxed);
    }
}

/// Polls the future that serves a flow. The watchdog stops polling if the client has not read pending data for
/// `timeout`, if data is still pending after the deadline of the flow, or if the memory is nearly used up and the client
/// is one of those that have not read for the longest time.
#[derive(Debug)]
pub struct WriteWatchdog {
    flow: Arc<StreamFlow>,
    timeout: Duration,
    slow_readers: Arc<SlowReaders>,
    /// Value of `StreamFlow::chunk_counter` when the field `pending_since` was last set.
    seen_counter: u64,
    /// Time since which the client has not read the pending data.
    pending_since: time::Instant,
    /// The entry of the client in `slow_readers`.
    slow: Option<Box<SlowReader>>,
    timer: LazyTimer,
}

impl WriteWatchdog {
    /// Create the watchdog of a flow.
    pub fn new(timeout: Duration, flow: Arc<StreamFlow>, slow_readers: Arc<SlowReaders>) -> Self {
        let timer = LazyTimer::default();
        WriteWatchdog { flow, timeout, slow_readers, seen_counter: 0, pending_since: *EPOCH, slow: None, timer }
    }

    /// Return the flow that the watchdog observes.
    pub fn flow(&self) -> &StreamFlow {
        &self.flow
    }

    /// Poll the future that serves the flow. Return `None` if the client does not read the response in time.
    pub fn poll<F: Future>(&mut self, served: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<Option<F::Output>> {
        if let Poll::Ready(output) = served.poll(cx) {
            return Poll::Ready(Some(output));
        }
        if self.slow.as_ref().is_some_and(|slow| slow.is_ended()) {
            return Poll::Ready(None);
        }
        let counter = self.flow.chunk_counter.load(Ordering::Relaxed);
        if counter & 1 == 0 {
            // No data is pending, so the client reads the response. The response body enforces its deadline itself.
            self.slow = None;
            return Poll::Pending;
        }
        if self.flow.is_past_deadline() {
            return Poll::Ready(None);
        }
        if self.seen_counter != counter {
            self.seen_counter = counter;
            self.pending_since = time::Instant::now();
            self.slow = None;
        }
        if self.slow.is_none() && self.slow_readers.has_limit() {
            ready!(self.timer.poll(self.pending_since + SLOW_AFTER.min(self.timeout), cx));
            self.slow = Some(Box::new(self.slow_readers.add(self.pending_since)));
        }
        if self.slow.as_ref().is_some_and(|slow| slow.poll_ended(cx).is_ready()) {
            return Poll::Ready(None);
        }
        self.timer.poll(self.pending_since + self.timeout, cx).map(|()| None)
    }
}
