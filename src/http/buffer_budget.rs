//! Budgets for buffered body bytes, per connection and per process. Beyond a budget, each stream buffers only what it
//! needs to make progress.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

use crate::http::flow::StreamFlow;

/// Bytes counted for each chunk besides its data: its frame, and the part of a read buffer that the chunk keeps alive.
const CHUNK_OVERHEAD: usize = 256;

/// A maximum number of buffered bytes, optionally within a parent budget.
#[derive(Debug)]
pub struct BufferBudget {
    used: AtomicUsize,
    max: AtomicUsize,
    /// Budget that this one is a part of.
    parent: Option<Arc<BufferBudget>>,
}

/// Bytes reserved from a budget until it is dropped.
#[derive(Debug)]
pub struct BufferReservation {
    budget: Arc<BufferBudget>,
    size: usize,
}

/// A chunk of a response body. Its bytes count against the budget until hyper has written them.
#[derive(Debug)]
pub struct DataChunk {
    bytes: Bytes,
    reservation: Option<ChunkReservation>,
}

/// Bytes that a chunk takes from the budget of its stream.
#[derive(Debug)]
struct ChunkReservation {
    flow: Arc<StreamFlow>,
    size: usize,
}

impl BufferBudget {
    /// Create a budget of `max` bytes without a parent.
    pub fn new(max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: None }
    }

    /// Create a budget of `max` bytes within another budget.
    pub fn with_parent(parent: Arc<BufferBudget>, max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: Some(parent) }
    }

    /// Change the maximum. Existing reservations remain.
    pub fn resize(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Return whether more bytes may be buffered.
    pub(super) fn has_capacity(&self) -> bool {
        self.used.load(Ordering::Relaxed) < self.max.load(Ordering::Relaxed)
            && self.parent.as_ref().is_none_or(|parent| parent.has_capacity())
    }

    /// Reserve `size` bytes, or return `None` if the budget or its parent would be exceeded.
    pub(super) fn try_reserve(self: &Arc<Self>, size: usize) -> Option<BufferReservation> {
        self.add(size);
        let reservation = BufferReservation { budget: self.clone(), size };
        let fits = |budget: &BufferBudget| budget.used.load(Ordering::Relaxed) <= budget.max.load(Ordering::Relaxed);
        (fits(self) && self.parent.as_ref().is_none_or(|parent| fits(parent))).then_some(reservation)
    }

    pub(super) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.add(bytes));
    }

    pub(super) fn subtract(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.subtract(bytes));
    }
}

impl Drop for BufferReservation {
    fn drop(&mut self) {
        self.budget.subtract(self.size);
    }
}

impl DataChunk {
    /// Create a chunk that does not count.
    pub(super) fn untracked(bytes: Bytes) -> Self {
        DataChunk { bytes, reservation: None }
    }

    /// Create a chunk that counts for a stream.
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

// === Read limits ===
// hyper reads one chunk ahead of the one that it returns, and larger chunks as the response continues. With many
// streams of a client that does not read, these chunks are most of the memory.

/// Maximum bytes per read of a connection.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum ReadLimit {
    /// Do not read.
    Paused = 0,
    /// One page: hyper allocates a buffer of 8 KiB for each read, and the kernel backs only the pages that are written
    /// to.
    Page = 4 << 10,
    /// One byte less than hyper's first buffer of 8 KiB: a read that fills it would make hyper allocate a larger one
    /// for the next.
    Small = (8 << 10) - 1,
    /// As much as hyper's buffer takes.
    Any = u64::MAX,
}

/// A shared handle that limits the reads of a connection.
#[derive(Debug, Clone, Default)]
pub struct ReadBound(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: AtomicU64,
    /// Task of the connection, while its reads are paused.
    paused: AtomicWaker,
}

/// A connection whose reads are limited.
#[derive(Debug)]
pub struct ReadLimitedStream<S> {
    stream: Take<S>,
    bound: ReadBound,
}

impl ReadBound {
    /// Limit all reads from now on.
    pub fn set(&self, reads: ReadLimit) {
        let Shared { most, paused } = &*self.0;
        let reads = reads as u64;
        // The limit is usually unchanged.
        let before = most.load(Ordering::Relaxed);
        if reads != before {
            most.store(reads, Ordering::Release);
            if before == ReadLimit::Paused as u64 {
                paused.wake();
            }
        }
    }
}

impl Default for Shared {
    fn default() -> Self {
        Shared { most: AtomicU64::new(ReadLimit::Any as u64), paused: AtomicWaker::new() }
    }
}

impl<S: AsyncRead> ReadLimitedStream<S> {
    /// Return a connection without a limit, and the handle that limits its reads.
    pub fn new(stream: S) -> (Self, ReadBound) {
        let bound = ReadBound::default();
        (ReadLimitedStream { stream: stream.take(u64::MAX), bound: bound.clone() }, bound)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadLimitedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Shared { most: max, paused } = &*self.bound.0;
        let mut limit = max.load(Ordering::Relaxed);
        if limit == ReadLimit::Paused as u64 {
            paused.register(cx.waker());
            // The pause may have ended before the waker was registered.
            limit = max.load(Ordering::Acquire);
            if limit == ReadLimit::Paused as u64 {
                return Poll::Pending;
            }
        }
        // Reset for each read, so that `Take` never reports an end of its own.
        self.stream.set_limit(limit);
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ReadLimitedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.stream.get_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_shutdown(cx)
    }
}
