//! Whether a client takes the response that is there for it, and in time: no clock and no timer as long as nothing asks for it.

use std::cell::RefCell;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::sync::Notify;
use tokio::time::{Duration, Instant, Sleep, sleep};

use super::budget::{Budget, Reserved};
use super::reads::Reads;

/// Bytes of a response on a stream of which little is read at a time.
const READ_SMALL: u64 = 64 << 10;

thread_local! {
    /// The flow that the running task serves. Tokio's own locals of a task would count one reference more with each poll.
    static CURRENT: RefCell<Option<Arc<Flow>>> = const { RefCell::new(None) };
}

/// What points in time are counted from.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What passes on a stream: one of HTTP/2, or an HTTP/1.x connection, which has one request at a time.
#[derive(Debug)]
pub struct Flow {
    /// What may be buffered for it, with others.
    budget: Arc<Budget>,
    /// Whether it is one of several on its connection, which buffer pieces of responses each for itself.
    is_stream: bool,
    /// Bytes of the response that are buffered.
    held: AtomicUsize,
    /// Woken when some of them are written.
    written: AtomicWaker,
    /// Twice the number of pieces handed to the protocol; one more while the last one keeps it from taking the next.
    pieces: AtomicU64,
    /// A request was not read to its end.
    cut: AtomicBool,
    /// The response has no end but that of the connection.
    unframed: AtomicBool,
    /// Request bodies of unknown length that there were, and those of them that were read to their end or given up.
    bodies: AtomicU32,
    over: AtomicU32,
    /// Wakes the next request when there is none left.
    read: Notify,
    /// When the response is to be over, in µs after the epoch; 0 = when it is.
    end_us: AtomicU64,
}

impl Flow {
    /// The flow that the running task serves.
    pub fn current() -> Option<Arc<Flow>> {
        CURRENT.with_borrow(Option::clone)
    }

    fn new(budget: Arc<Budget>, is_stream: bool) -> Self {
        let (held, written) = (AtomicUsize::new(0), AtomicWaker::new());
        let (pieces, cut, unframed, bodies, over, read, end_us) = Default::default();
        Flow { budget, is_stream, held, written, pieces, cut, unframed, bodies, over, read, end_us }
    }

    /// How much is read of the response to the request of the running task before its body is polled.
    pub fn first_reads() -> Reads {
        CURRENT.with_borrow(|flow| flow.as_ref().map_or(Reads::Any, |flow| flow.reads(0)))
    }

    /// How much is read at a time of a response of which so much was sent.
    pub(super) fn reads(&self, sent: u64) -> Reads {
        match sent {
            _ if !self.is_stream => Reads::Any,
            _ if !self.has_room() => Reads::Page,
            ..READ_SMALL => Reads::Small,
            _ => Reads::Any,
        }
    }

    /// Whether more of responses may be buffered.
    pub(super) fn has_room(&self) -> bool {
        self.budget.has_room()
    }

    /// Whether pieces of its response count.
    pub(super) fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Part of what may be buffered, for a request body; none if there is not so much.
    pub(super) fn reserve(&self, bytes: usize) -> Option<Reserved> {
        self.budget.reserve(bytes)
    }

    /// Ready when the response may go on: when all of it so far is written, or there is room for more. So each stream goes on
    /// whatever others hold.
    pub(super) fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        let has_room = || self.held.load(Ordering::Acquire) == 0 || self.budget.has_room();
        if has_room() {
            return Poll::Ready(());
        }
        self.written.register(cx.waker());
        // It may have been written in between.
        if has_room() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// A piece is buffered.
    pub(super) fn take(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.budget.add(bytes);
    }

    /// A piece is written, or dropped.
    pub(super) fn give_back(&self, bytes: usize) {
        self.budget.subtract(bytes);
        self.held.fetch_sub(bytes, Ordering::Release);
        self.written.wake();
    }

    /// The protocol has something for the client.
    pub(super) fn offer(&self) {
        let pieces = self.pieces.load(Ordering::Relaxed);
        self.pieces.store((pieces | 1) + 2, Ordering::Relaxed);
    }

    /// The protocol asks for more, or needs no more.
    pub(super) fn rest(&self) {
        let pieces = self.pieces.load(Ordering::Relaxed);
        self.pieces.store(pieces & !1, Ordering::Relaxed);
    }

    /// Nothing but the end of the connection says where the response ends.
    pub(super) fn ends_with_connection(&self) {
        self.unframed.store(true, Ordering::Relaxed);
    }

    /// Whether a response that breaks off would look whole.
    pub fn is_unframed(&self) -> bool {
        self.unframed.load(Ordering::Relaxed)
    }

    /// The response ends then at the latest. Whoever sets this has the task woken in time.
    pub(super) fn end_at(&self, at: Option<Instant>) {
        let end = at.map_or(0, |at| (at.saturating_duration_since(*EPOCH).as_micros() as u64).max(1));
        self.end_us.store(end, Ordering::Relaxed);
    }

    fn is_overdue(&self) -> bool {
        let end = self.end_us.load(Ordering::Relaxed);
        end > 0 && EPOCH.elapsed().as_micros() as u64 >= end
    }

    /// A request has a body whose end is not known.
    pub(super) fn begin_body(&self) {
        self.bodies.fetch_add(1, Ordering::Relaxed);
    }

    /// It was read to its end, or is given up.
    pub(super) fn end_body(&self) {
        self.over.fetch_add(1, Ordering::Release);
        self.read.notify_one();
    }

    /// The flow and the number of its bodies, if a request that comes now may not be one: see [`Flow::is_request`].
    pub fn behind_body() -> Option<(Arc<Flow>, u32)> {
        CURRENT.with_borrow(|current| {
            let flow = current.as_ref()?;
            let bodies = flow.bodies.load(Ordering::Relaxed);
            (flow.is_cut() || flow.over.load(Ordering::Relaxed) != bodies).then(|| (flow.clone(), bodies))
        })
    }

    /// Waits until so many bodies are over; whether what follows them is a request. hyper may read the end of a body and the
    /// next head before the task that sends the body on has seen its trailers.
    pub async fn is_request(&self, bodies: u32) -> bool {
        while self.over.load(Ordering::Acquire) != bodies {
            self.read.notified().await;
        }
        !self.is_cut()
    }

    /// The rest of a request is not wanted.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Whether the client may still be sending what nobody reads.
    pub fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }
}

/// Runs what serves a flow, until its client has not taken what is there for so long, or its time is over.
#[derive(Debug)]
pub struct Watch {
    flow: Arc<Flow>,
    /// What is current while it is polled.
    turn: Option<Arc<Flow>>,
    limit: Duration,
    /// Where the flow stood when the timer was set.
    seen: u64,
    /// Set only while the client keeps us waiting.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Watch {
    /// Of an HTTP/1.x connection that begins.
    pub fn connection(limit: Duration, budget: Arc<Budget>) -> Self {
        Watch::new(limit, Flow::new(budget, false))
    }

    /// Of a stream that begins.
    pub fn stream(limit: Duration, budget: Arc<Budget>) -> Self {
        Watch::new(limit, Flow::new(budget, true))
    }

    fn new(limit: Duration, flow: Flow) -> Self {
        let flow = Arc::new(flow);
        Watch { turn: Some(flow.clone()), flow, limit, seen: 0, timer: None }
    }

    /// The flow.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// Polls what serves the flow; none = the client does not take its response, or not in time.
    pub fn poll<F: Future>(&mut self, served: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<Option<F::Output>> {
        let turn = Turn::begin(&mut self.turn);
        if let Poll::Ready(output) = served.poll(cx) {
            return Poll::Ready(Some(output));
        }
        drop(turn);
        // The response breaks off by itself where the client takes what there is.
        if self.flow.is_overdue() {
            return Poll::Ready(None);
        }
        let pieces = self.flow.pieces.load(Ordering::Relaxed);
        if pieces & 1 == 0 {
            self.timer = None;
            return Poll::Pending;
        }
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        if self.seen != pieces {
            self.seen = pieces;
            timer.as_mut().reset(Instant::now() + limit);
        }
        timer.as_mut().poll(cx).map(|()| None)
    }
}

/// Makes a flow the current one until it is dropped.
struct Turn<'a>(&'a mut Option<Arc<Flow>>);

impl<'a> Turn<'a> {
    fn begin(flow: &'a mut Option<Arc<Flow>>) -> Self {
        CURRENT.with_borrow_mut(|current| mem::swap(current, flow));
        Turn(flow)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| mem::swap(current, self.0));
    }
}
