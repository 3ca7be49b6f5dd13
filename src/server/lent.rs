//! The socket of a connection, while TLS and HTTP work on it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot::{self, Receiver, Sender};

/// Bytes that a connection reads before others on its worker have their turn: tokio counts reads, not what is in them,
/// and many thousand frames of HTTP/2 fit into a few reads.
const TURN: usize = 64 << 10;

/// A stream that is given back when those who use it are done with it.
#[derive(Debug)]
pub(super) struct Lent {
    /// There until it is dropped.
    stream: Option<TcpStream>,
    owner: Option<Sender<TcpStream>>,
    /// Bytes that have been looked at, and come again.
    ahead: Bytes,
    /// Bytes read since others had their turn.
    read: usize,
}

impl Lent {
    pub(super) fn new(stream: TcpStream) -> (Self, Receiver<TcpStream>) {
        let (owner, back) = oneshot::channel();
        (Lent { stream: Some(stream), owner: Some(owner), ahead: Bytes::new(), read: 0 }, back)
    }

    /// Puts bytes back that were read.
    pub(super) fn unread(&mut self, bytes: Bytes) {
        self.ahead = bytes;
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(stream), Some(owner)) = (self.stream.take(), self.owner.take()) {
            // An owner that is gone needs no stream.
            let _ = owner.send(stream);
        }
    }
}

impl AsyncRead for Lent {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.read >= TURN {
            self.read = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if !self.ahead.is_empty() {
            let count = self.ahead.len().min(buffer.remaining());
            buffer.put_slice(&self.ahead.split_to(count));
            // Together with what follows: hyper takes another, larger buffer for a head that comes in pieces. An error
            // or the end come to light with the next read.
            let _ = self.stream()?.poll_read(cx, buffer);
            self.read += buffer.filled().len() - before;
            return Poll::Ready(Ok(()));
        }
        let polled = self.stream()?.poll_read(cx, buffer);
        match polled {
            Poll::Pending => self.read = 0,
            Poll::Ready(_) => self.read += buffer.filled().len() - before,
        }
        polled
    }
}

impl AsyncWrite for Lent {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}
