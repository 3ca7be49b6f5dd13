//! How much is read of a response at a time. hyper reads ahead of what it hands out, in pieces that grow with the response: for
//! many streams of one client whose responses are not taken that is most of the memory.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

/// Just too little for hyper to take a larger buffer for the next read than its first one, of 8 KiB.
const SMALL: u64 = (8 << 10) - 1;

/// Bounds the reads of a connection.
#[derive(Debug, Clone)]
pub struct Reads(Arc<AtomicU64>);

/// A connection whose reads are bounded.
#[derive(Debug)]
pub struct Bounded<S> {
    stream: Take<S>,
    reads: Reads,
}

impl Reads {
    /// Lets reads be small from now on, or of any size.
    pub fn be_small(&self, small: bool) {
        self.0.store(if small { SMALL } else { u64::MAX }, Ordering::Relaxed);
    }
}

impl<S: AsyncRead> Bounded<S> {
    /// A connection with reads of any size, and what bounds them.
    pub fn new(stream: S) -> (Self, Reads) {
        let reads = Reads(Arc::new(AtomicU64::new(u64::MAX)));
        (Bounded { stream: stream.take(u64::MAX), reads: reads.clone() }, reads)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let most = self.reads.0.load(Ordering::Relaxed);
        // For this read: it never comes to an end of its own.
        self.stream.set_limit(most);
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
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
