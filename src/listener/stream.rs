//! Downstream socket wrapper that hands the socket back when it is dropped, and a selective waker.

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

/// Maximum number of bytes that a connection reads before it yields to other tasks. tokio's coop budget counts
/// reads, and a few reads can contain thousands of HTTP/2 frames.
const READ_BUDGET: usize = 64 << 10;

/// A TCP stream that is returned to its owner when the wrapper is dropped.
#[derive(Debug)]
pub(super) struct ReclaimableStream {
    /// `Some` until the wrapper is dropped.
    stream: Option<TcpStream>,
    return_sender: Option<Sender<TcpStream>>,
    /// Bytes that are read again before those of the socket.
    prefix: Bytes,
    /// Bytes read since the last yield.
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

    /// Put bytes back that were read.
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
            // Fails if the receiver was dropped, which then does not need the stream.
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
            // Read on in the same call: hyper allocates a larger buffer if headers arrive in pieces. The next read
            // reports an error or the end.
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

// Waker for rarely-ready futures: they are polled only when they woke the task themselves.

/// Wakes a task, and records that it did.
#[derive(Debug)]
pub(super) struct SelectiveWaker {
    state: Arc<WakeState>,
    waker: Waker,
    /// Waker of the task.
    task: Option<Waker>,
}

#[derive(Debug)]
struct WakeState {
    woken: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl SelectiveWaker {
    /// Create a waker that is ready, so that the futures are polled a first time.
    pub(super) fn new() -> Self {
        let state = Arc::new(WakeState { woken: AtomicBool::new(true), task: Mutex::default() });
        SelectiveWaker { waker: state.clone().into(), state, task: None }
    }

    /// Return a context to poll the futures with if one of them has woken the task since the last call.
    pub(super) fn take_context(&mut self, cx: &Context<'_>) -> Option<Context<'_>> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            // Stored before the flag is read, so that every later wake reaches this task.
            self.state.lock_task().clone_from(&self.task);
        }
        // Usually not woken: a plain load avoids the write to a shared cache line.
        let woken = &self.state.woken;
        (woken.load(Ordering::Relaxed) && woken.swap(false, Ordering::AcqRel)).then(|| Context::from_waker(&self.waker))
    }

    /// Poll again at the next call, because other futures are awaited now.
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
