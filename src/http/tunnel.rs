//! Two connections that have switched protocols: bytes pass both ways until both directions have ended.

use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_util::future::join;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::timeout;

use crate::limit::clock::monotonic;

/// What is agreed with both sides, and begins when both have heard of it.
#[derive(Debug)]
pub struct Tunnel {
    /// The client's side.
    pub downstream: OnUpgrade,
    /// The upstream's side.
    pub upstream: OnUpgrade,
    /// It is over when neither side has said anything for so long.
    pub idle_timeout: Duration,
}

impl Tunnel {
    /// Passes bytes on, and counts those `sent` to the client. The end of one direction is passed on and leaves the other
    /// open. Whether both came to their end.
    pub async fn run(self, bytes_sent: &mut u64) -> bool {
        let (Ok(downstream), Ok(upstream)) = join(self.downstream, self.upstream).await else { return false };
        let activity = TunnelActivity { started_at: monotonic(), last_activity_ms: AtomicU64::new(0) };
        let mut bytes_received = 0;
        let mut downstream =
            CountingIo { io: TokioIo::new(downstream), bytes_written: bytes_sent, activity: &activity };
        let mut upstream =
            CountingIo { io: TokioIo::new(upstream), bytes_written: &mut bytes_received, activity: &activity };
        let mut copied = pin!(copy_bidirectional(&mut downstream, &mut upstream));
        while let Some(remaining) =
            self.idle_timeout.checked_sub(activity.idle_time()).filter(|remaining| !remaining.is_zero())
        {
            if let Ok(ended) = timeout(remaining, &mut copied).await {
                return ended.is_ok();
            }
        }
        false
    }
}

/// When something has passed last.
struct TunnelActivity {
    started_at: Instant,
    /// ms after `started`.
    last_activity_ms: AtomicU64,
}

impl TunnelActivity {
    fn record(&self) {
        self.last_activity_ms.store(self.started_at.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn idle_time(&self) -> Duration {
        self.started_at.elapsed().saturating_sub(Duration::from_millis(self.last_activity_ms.load(Ordering::Relaxed)))
    }
}

/// A connection that is watched.
struct CountingIo<'a> {
    io: TokioIo<Upgraded>,
    bytes_written: &'a mut u64,
    activity: &'a TunnelActivity,
}

impl AsyncRead for CountingIo<'_> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.io).poll_read(cx, buf));
        self.activity.record();
        Poll::Ready(read)
    }
}

impl AsyncWrite for CountingIo<'_> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        *self.bytes_written += written as u64;
        self.activity.record();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
