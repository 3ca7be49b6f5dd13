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
const READ_BUDGET: usize = 64 << 10;

/// A stream that is given back when those who use it are done with it.
#[derive(Debug)]
pub(super) struct ReclaimableStream {
    /// There until it is dropped.
    stream: Option<TcpStream>,
    return_sender: Option<Sender<TcpStream>>,
    /// Bytes that have been looked at, and come again.
    prefix: Bytes,
    /// Bytes read since others had their turn.
    bytes_read: usize,
}

impl ReclaimableStream {
    pub(super) fn new(stream: TcpStream) -> (Self, Receiver<TcpStream>) {
        let (return_sender, returned) = oneshot::channel();
        (
            ReclaimableStream {
                stream: Some(stream),
                return_sender: Some(return_sender),
                prefix: Bytes::new(),
                bytes_read: 0,
            },
            returned,
        )
    }

    /// Puts bytes back that were read.
    pub(super) fn rewind(&mut self, bytes: Bytes) {
        self.prefix = bytes;
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for ReclaimableStream {
    fn drop(&mut self) {
        if let (Some(stream), Some(return_sender)) = (self.stream.take(), self.return_sender.take()) {
            // An owner that is gone needs no stream.
            let _ = return_sender.send(stream);
        }
    }
}

impl AsyncRead for ReclaimableStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.bytes_read >= READ_BUDGET {
            self.bytes_read = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if !self.prefix.is_empty() {
            let count = self.prefix.len().min(buffer.remaining());
            buffer.put_slice(&self.prefix.split_to(count));
            // Together with what follows: hyper takes another, larger buffer for a head that comes in pieces. An error
            // or the end come to light with the next read.
            let _ = self.stream()?.poll_read(cx, buffer);
            self.bytes_read += buffer.filled().len() - before;
            return Poll::Ready(Ok(()));
        }
        let polled = self.stream()?.poll_read(cx, buffer);
        match polled {
            Poll::Pending => self.bytes_read = 0,
            Poll::Ready(_) => self.bytes_read += buffer.filled().len() - before,
        }
        polled
    }
}

impl AsyncWrite for ReclaimableStream {
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
