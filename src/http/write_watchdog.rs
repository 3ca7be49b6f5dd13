//! Whether a client takes the response that is there for it, and in time: no clock and no timer as long as nothing asks for it.

use std::cell::RefCell;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep};

use crate::http::buffer_budget::{BufferBudget, BufferReservation, ReadLimit};

/// Bytes of a response on a stream of which little is read at a time.
const READ_SMALL: u64 = 64 << 10;

thread_local! {
    /// The flow that the running task serves. Tokio's own locals of a task would count one reference more with each poll.
    static CURRENT: RefCell<Option<Arc<StreamFlow>>> = const { RefCell::new(None) };
}

/// What points in time are counted from.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What passes on a stream: one of HTTP/2, or an HTTP/1.x connection, which has one request at a time.
#[derive(Debug)]
pub struct StreamFlow {
    /// What may be buffered for it, with others.
    budget: Arc<BufferBudget>,
    /// Whether it is one of several on its connection, which buffer pieces of responses each for itself.
    is_multiplexed: bool,
    /// Bytes of the response that are buffered.
    buffered: AtomicUsize,
    /// Woken when some of them are written.
    written_waker: AtomicWaker,
    /// Twice the number of pieces handed to the protocol; one more while the last one keeps it from taking the next.
    chunk_counter: AtomicU64,
    /// A request was not read to its end.
    request_abandoned: AtomicBool,
    /// The response has no end but that of the connection.
    is_close_delimited: AtomicBool,
    /// Request bodies of unknown length that there were, and those of them that were read to their end or given up.
    bodies_started: AtomicU32,
    bodies_ended: AtomicU32,
    /// Wakes the next request when there is none left.
    body_ended: Notify,
    /// When the response is to be over, in µs after the epoch; 0 = when it is.
    deadline_us: AtomicU64,
}

impl StreamFlow {
    /// The flow that the running task serves.
    pub fn current() -> Option<Arc<StreamFlow>> {
        CURRENT.with_borrow(Option::clone)
    }

    fn new(budget: Arc<BufferBudget>, is_multiplexed: bool) -> Self {
        let (buffered, written_waker) = (AtomicUsize::new(0), AtomicWaker::new());
        let (
            chunk_counter,
            request_abandoned,
            is_close_delimited,
            bodies_started,
            bodies_ended,
            body_ended,
            deadline_us,
        ) = Default::default();
        StreamFlow {
            budget,
            is_multiplexed,
            buffered,
            written_waker,
            chunk_counter,
            request_abandoned,
            is_close_delimited,
            bodies_started,
            bodies_ended,
            body_ended,
            deadline_us,
        }
    }

    /// How much is read of the response to the request of the running task before its body is polled.
    pub fn first_reads() -> ReadLimit {
        CURRENT.with_borrow(|flow| flow.as_ref().map_or(ReadLimit::Any, |flow| flow.reads(0)))
    }

    /// How much is read at a time of a response of which so much was sent.
    pub(super) fn reads(&self, sent: u64) -> ReadLimit {
        match sent {
            _ if !self.is_multiplexed => ReadLimit::Any,
            _ if !self.has_capacity() => ReadLimit::Page,
            ..READ_SMALL => ReadLimit::Small,
            _ => ReadLimit::Any,
        }
    }

    /// Whether more of responses may be buffered.
    pub(super) fn has_capacity(&self) -> bool {
        self.budget.has_capacity()
    }

    /// Whether pieces of its response count.
    pub(super) fn is_multiplexed(&self) -> bool {
        self.is_multiplexed
    }

    /// Part of what may be buffered, for a request body; none if there is not so much.
    pub(super) fn try_reserve(&self, bytes: usize) -> Option<BufferReservation> {
        self.budget.try_reserve(bytes)
    }

    /// Ready when the response may go on: when all of it so far is written, or there is room for more. So each stream goes on
    /// whatever others hold.
    pub(super) fn poll_capacity(&self, cx: &Context<'_>) -> Poll<()> {
        let has_capacity = || self.buffered.load(Ordering::Acquire) == 0 || self.budget.has_capacity();
        if has_capacity() {
            return Poll::Ready(());
        }
        self.written_waker.register(cx.waker());
        // It may have been written in between.
        if has_capacity() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// A piece is buffered.
    pub(super) fn add_buffered(&self, bytes: usize) {
        self.buffered.fetch_add(bytes, Ordering::Relaxed);
        self.budget.add(bytes);
    }

    /// A piece is written, or dropped.
    pub(super) fn release_buffered(&self, bytes: usize) {
        self.budget.subtract(bytes);
        self.buffered.fetch_sub(bytes, Ordering::Release);
        self.written_waker.wake();
    }

    /// The protocol has something for the client.
    pub(super) fn mark_data_pending(&self) {
        let counter = self.chunk_counter.load(Ordering::Relaxed);
        self.chunk_counter.store((counter | 1) + 2, Ordering::Relaxed);
    }

    /// The protocol asks for more, or needs no more.
    pub(super) fn mark_drained(&self) {
        let counter = self.chunk_counter.load(Ordering::Relaxed);
        self.chunk_counter.store(counter & !1, Ordering::Relaxed);
    }

    /// Nothing but the end of the connection says where the response ends.
    pub(super) fn mark_close_delimited(&self) {
        self.is_close_delimited.store(true, Ordering::Relaxed);
    }

    /// Whether a response that breaks off would look whole.
    pub fn is_close_delimited(&self) -> bool {
        self.is_close_delimited.load(Ordering::Relaxed)
    }

    /// The response ends then at the latest. Whoever sets this has the task woken in time.
    pub(super) fn set_deadline(&self, deadline: Option<Instant>) {
        let deadline_us = deadline.map_or(0, |at| (at.saturating_duration_since(*EPOCH).as_micros() as u64).max(1));
        self.deadline_us.store(deadline_us, Ordering::Relaxed);
    }

    fn is_past_deadline(&self) -> bool {
        let deadline_us = self.deadline_us.load(Ordering::Relaxed);
        deadline_us > 0 && EPOCH.elapsed().as_micros() as u64 >= deadline_us
    }

    /// A request has a body whose end is not known.
    pub(super) fn start_body(&self) {
        self.bodies_started.fetch_add(1, Ordering::Relaxed);
    }

    /// It was read to its end, or is given up.
    pub(super) fn end_body(&self) {
        self.bodies_ended.fetch_add(1, Ordering::Release);
        self.body_ended.notify_one();
    }

    /// The flow and the number of its bodies, if a request that comes now may not be one: see [`Flow::is_request`].
    pub fn unfinished_bodies() -> Option<(Arc<StreamFlow>, u32)> {
        CURRENT.with_borrow(|current| {
            let flow = current.as_ref()?;
            let bodies = flow.bodies_started.load(Ordering::Relaxed);
            (flow.is_request_abandoned() || flow.bodies_ended.load(Ordering::Relaxed) != bodies)
                .then(|| (flow.clone(), bodies))
        })
    }

    /// Waits until so many bodies are over; whether what follows them is a request. hyper may read the end of a body and the
    /// next head before the task that sends the body on has seen its trailers.
    pub async fn wait_for_bodies(&self, bodies: u32) -> bool {
        while self.bodies_ended.load(Ordering::Acquire) != bodies {
            self.body_ended.notified().await;
        }
        !self.is_request_abandoned()
    }

    /// The rest of a request is not wanted.
    pub fn abandon_request(&self) {
        self.request_abandoned.store(true, Ordering::Relaxed);
    }

    /// Whether the client may still be sending what nobody reads.
    pub fn is_request_abandoned(&self) -> bool {
        self.request_abandoned.load(Ordering::Relaxed)
    }
}

/// Runs what serves a flow, until its client has not taken what is there for so long, or its time is over.
#[derive(Debug)]
pub struct WriteWatchdog {
    flow: Arc<StreamFlow>,
    /// What is current while it is polled.
    scoped_flow: Option<Arc<StreamFlow>>,
    timeout: Duration,
    /// Where the flow stood when the timer was set.
    seen_counter: u64,
    /// Set only while the client keeps us waiting.
    timer: Option<Pin<Box<Sleep>>>,
}

impl WriteWatchdog {
    /// Of an HTTP/1.x connection that begins.
    pub fn for_connection(timeout: Duration, budget: Arc<BufferBudget>) -> Self {
        WriteWatchdog::new(timeout, StreamFlow::new(budget, false))
    }

    /// Of a stream that begins.
    pub fn for_stream(timeout: Duration, budget: Arc<BufferBudget>) -> Self {
        WriteWatchdog::new(timeout, StreamFlow::new(budget, true))
    }

    fn new(timeout: Duration, flow: StreamFlow) -> Self {
        let flow = Arc::new(flow);
        WriteWatchdog { scoped_flow: Some(flow.clone()), flow, timeout, seen_counter: 0, timer: None }
    }

    /// The flow.
    pub fn flow(&self) -> &StreamFlow {
        &self.flow
    }

    /// Polls what serves the flow; none = the client does not take its response, or not in time.
    pub fn poll<F: Future>(&mut self, served: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<Option<F::Output>> {
        let scope = FlowScope::enter(&mut self.scoped_flow);
        if let Poll::Ready(output) = served.poll(cx) {
            return Poll::Ready(Some(output));
        }
        drop(scope);
        // The response breaks off by itself where the client takes what there is.
        if self.flow.is_past_deadline() {
            return Poll::Ready(None);
        }
        let counter = self.flow.chunk_counter.load(Ordering::Relaxed);
        if counter & 1 == 0 {
            self.timer = None;
            return Poll::Pending;
        }
        let timeout = self.timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
        if self.seen_counter != counter {
            self.seen_counter = counter;
            timer.as_mut().reset(Instant::now() + timeout);
        }
        timer.as_mut().poll(cx).map(|()| None)
    }
}

/// Makes a flow the current one until it is dropped.
struct FlowScope<'a>(&'a mut Option<Arc<StreamFlow>>);

impl<'a> FlowScope<'a> {
    fn enter(flow: &'a mut Option<Arc<StreamFlow>>) -> Self {
        CURRENT.with_borrow_mut(|current| mem::swap(current, flow));
        FlowScope(flow)
    }
}

impl Drop for FlowScope<'_> {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| mem::swap(current, self.0));
    }
}
