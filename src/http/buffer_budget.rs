//! How many bytes of bodies are buffered, for a connection and for the process: beyond that nothing more is taken than what
//! keeps each stream going.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

use crate::http::write_watchdog::StreamFlow;

/// Counted for each piece besides its bytes: its frame, and the part of a read buffer that it keeps.
const CHUNK_OVERHEAD: usize = 256;

/// A number of bytes that may be buffered.
#[derive(Debug)]
pub struct BufferBudget {
    used: AtomicUsize,
    max: AtomicUsize,
    /// What it is a part of.
    parent: Option<Arc<BufferBudget>>,
}

/// A part of a budget, until it is dropped.
#[derive(Debug)]
pub struct BufferReservation {
    budget: Arc<BufferBudget>,
    size: usize,
}

/// A piece of a response body. It counts until the protocol has written it.
#[derive(Debug)]
pub struct DataChunk {
    bytes: Bytes,
    reservation: Option<ChunkReservation>,
}

/// What a piece takes of the budget of its stream.
#[derive(Debug)]
struct ChunkReservation {
    flow: Arc<StreamFlow>,
    size: usize,
}

impl BufferBudget {
    /// A budget of its own.
    pub fn new(max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: None }
    }

    /// A part of another budget.
    pub fn with_parent(parent: Arc<BufferBudget>, max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: Some(parent) }
    }

    /// Changes its size; what is held stays.
    pub fn resize(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Whether more may be buffered.
    pub(super) fn has_capacity(&self) -> bool {
        self.used.load(Ordering::Relaxed) < self.max.load(Ordering::Relaxed)
            && self.parent.as_ref().is_none_or(|parent| parent.has_capacity())
    }

    /// Takes so many bytes, if they are there.
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
    /// A piece that is not counted.
    pub(super) fn untracked(bytes: Bytes) -> Self {
        DataChunk { bytes, reservation: None }
    }

    /// A piece that counts for a stream.
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

// How much is read of a response at a time. hyper reads one piece ahead of the one that it hands out, and larger pieces while the
// response goes on: for many streams of one client that does not read, these pieces are most of the memory.

/// Bytes that a connection reads at a time.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum ReadLimit {
    /// Do not read.
    Paused = 0,
    /// One page: hyper takes a buffer of 8 KiB for each read, of which the system provides what is written to.
    Page = 4 << 10,
    /// Just too little for hyper to take a larger buffer for the next read than its first one, of 8 KiB.
    Small = (8 << 10) - 1,
    /// As much as hyper's buffer takes.
    Any = u64::MAX,
}

/// Bounds the reads of a connection.
#[derive(Debug, Clone, Default)]
pub struct ReadBound(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: AtomicU64,
    /// The task of the connection, while its reads are paused.
    paused: AtomicWaker,
}

/// A connection whose reads are bounded.
#[derive(Debug)]
pub struct ReadLimitedStream<S> {
    stream: Take<S>,
    bound: ReadBound,
}

impl ReadBound {
    /// Bound all reads from now on.
    pub fn set(&self, reads: ReadLimit) {
        let Shared { most, paused } = &*self.0;
        let reads = reads as u64;
        // Mostly it is what it was.
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
    /// A connection with reads of any size, and what bounds them.
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
            // The pause may have ended in between.
            limit = max.load(Ordering::Acquire);
            if limit == ReadLimit::Paused as u64 {
                return Poll::Pending;
            }
        }
        // For this read: it never comes to an end of its own.
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
