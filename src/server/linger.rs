//! Closing a connection so that the client can read the last answer.
//!
//! A socket that is closed while bytes arrive is reset, and the reset throws away what the other side has not read
//! yet. So the end is sent, and what still comes is read and thrown away until the client closes, too.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot::{self, Receiver, Sender};
use tokio::time::{Duration, timeout};

/// A client that goes on sending is read for so long, as in nginx's `lingering_time`.
const LONGEST: Duration = Duration::from_secs(30);

/// A client that sends nothing more is waited for so long, as in nginx's `lingering_timeout`.
const SILENCE: Duration = Duration::from_secs(5);

/// Bytes that are thrown away at a time.
const BUFFER: usize = 16 << 10;

/// A stream that is given back when those who use it are done with it.
#[derive(Debug)]
pub(super) struct Lent {
    /// There until it is dropped.
    stream: Option<TcpStream>,
    owner: Option<Sender<TcpStream>>,
}

impl Lent {
    pub(super) fn new(stream: TcpStream) -> (Self, Receiver<TcpStream>) {
        let (owner, back) = oneshot::channel();
        (Lent { stream: Some(stream), owner: Some(owner) }, back)
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
        self.stream()?.poll_read(cx, buffer)
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

/// Sends the end and waits for the client's.
pub(super) async fn linger(mut stream: TcpStream) {
    // It may have been sent before.
    let _ = stream.shutdown().await;
    let mut buffer = vec![0; BUFFER];
    let discard = async { while let Ok(Ok(1..)) = timeout(SILENCE, stream.read(&mut buffer)).await {} };
    let _ = timeout(LONGEST, discard).await;
}

/// Closes so that nothing that was sent before looks complete, and the kernel keeps nothing for a client that does
/// not read.
pub(super) fn reset(stream: &TcpStream) {
    // Where it fails the connection is gone already.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
