//! How much is read of a response at a time. hyper reads one piece ahead of the one that it hands out, and larger pieces while the
//! response goes on: for many streams of one client that does not read, these pieces are most of the memory.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

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
