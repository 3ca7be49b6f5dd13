//! The socket of a connection, while TLS and HTTP work on it.

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::sync::oneshot::{Receiver, Sender};

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

// A waker of one's own: what rarely happens is polled when it has happened, not whenever something else does.

/// Wakes a task, and tells it that it was this one.
#[derive(Debug)]
pub(super) struct SelectiveWaker {
    state: Arc<WakeState>,
    waker: Waker,
    /// The task that it wakes.
    task: Option<Waker>,
}

#[derive(Debug)]
struct WakeState {
    woken: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl SelectiveWaker {
    /// One that rings: nobody has been asked yet.
    pub(super) fn new() -> Self {
        let state = Arc::new(WakeState { woken: AtomicBool::new(true), task: Mutex::default() });
        SelectiveWaker { waker: state.clone().into(), state, task: None }
    }

    /// What to poll with, if it rang since the last time.
    pub(super) fn take_context(&mut self, cx: &Context<'_>) -> Option<Context<'_>> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            // Before it is seen whether it rang: whoever rings from now on wakes this task.
            self.state.lock_task().clone_from(&self.task);
        }
        // Mostly it did not: one look, and nothing that other cores would have to see.
        let woken = &self.state.woken;
        (woken.load(Ordering::Relaxed) && woken.swap(false, Ordering::AcqRel)).then(|| Context::from_waker(&self.waker))
    }

    /// What it rings for is another thing now, which is to be asked.
    pub(super) fn mark_ready(&self) {
        self.state.woken.store(true, Ordering::Release);
    }
}

impl WakeState {
    fn lock_task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for WakeState {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        if let Some(task) = &*self.lock_task() {
            task.wake_by_ref();
        }
    }
}
