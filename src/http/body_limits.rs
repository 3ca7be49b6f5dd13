//! How large a body may be, how long it may take, and for how long it may stand still.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// The bounds of an exchange with an upstream.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// When all of it is to be over.
    pub deadline: Option<Instant>,
    /// What is demanded of the client while it sends the request body.
    pub upload: UploadLimits,
    /// Maximum silence of an upstream within a response of known length.
    pub idle_timeout: Duration,
    /// Bytes of a request body.
    pub max_body: Option<u64>,
}

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BodyError {
    #[error(transparent)]
    Aborted(#[from] hyper::Error),
    #[error("the trailer section of the request is malformed")]
    MalformedTrailers,
    #[error("the request body is longer than the route allows")]
    TooLarge,
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    #[error("the upstream stopped sending a response body of known length")]
    UpstreamIdleTimeout,
    #[error("the timeout of the route is over")]
    RouteTimeout,
}

/// When a body is to be over.
#[derive(Debug)]
pub(super) struct Deadline {
    pub(super) instant: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Deadline {
    pub(super) fn new(instant: Instant) -> Self {
        Deadline { instant, timer: Box::pin(sleep_until(instant)) }
    }

    /// Ready when the time is over.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.as_mut().poll(cx)
    }
}

/// Times a silence. Nothing is set for a body that never keeps anybody waiting.
#[derive(Debug)]
pub(super) struct IdleTimer {
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Something came since the timer was set.
    has_progressed: bool,
}

impl IdleTimer {
    pub(super) fn new(timeout: Duration) -> Self {
        IdleTimer { timeout, timer: None, has_progressed: false }
    }

    /// Something came.
    pub(super) fn record_progress(&mut self) {
        self.has_progressed = true;
    }

    /// Nothing is there: ready when that has been so for too long.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let timeout = self.timeout;
        let has_progressed = std::mem::take(&mut self.has_progressed);
        let timer = match &mut self.timer {
            Some(timer) => {
                if has_progressed {
                    timer.as_mut().reset(Instant::now() + timeout);
                }
                timer
            }
            none => none.insert(Box::pin(sleep(timeout))),
        };
        timer.as_mut().poll(cx)
    }
}

// How fast a client must send a request body: only the time for which the gateway waits for the client counts.

/// Time that a client may keep the gateway waiting before its rate counts, as in Kestrel's `MinRequestBodyDataRate`.
pub const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// What is demanded of a client that sends a body.
#[derive(Debug, Clone, Copy)]
pub struct UploadLimits {
    /// Maximum time without a byte.
    pub idle_timeout: Duration,
    /// Minimum bytes per second; 0 = any.
    pub min_rate: u64,
    /// Maximum time from the first wait to the end of the body.
    pub total_timeout: Option<Duration>,
}

/// A client's time. Each second of waiting takes a second of it, `rate` bytes give one back. No timer is set for a body that is
/// there when it is asked for.
#[derive(Debug)]
pub(super) struct MinRateTimer {
    limits: UploadLimits,
    credit: Duration,
    waiting_since: Option<Instant>,
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl MinRateTimer {
    pub(super) fn new(limits: UploadLimits) -> Self {
        let credit = if limits.min_rate == 0 { Duration::MAX } else { GRACE_PERIOD };
        MinRateTimer { limits, credit, waiting_since: None, deadline: None, timer: None }
    }

    /// Bytes came.
    pub(super) fn received(&mut self, bytes: usize) {
        let waited = self.waiting_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        if let Some(credit_us) = (bytes as u64 * 1_000_000).checked_div(self.limits.min_rate) {
            // A client that was fast may pause as long as any client may.
            let max = self.limits.idle_timeout.max(GRACE_PERIOD);
            self.credit = (self.credit.saturating_sub(waited) + Duration::from_micros(credit_us)).min(max);
        }
    }

    /// Nothing is there: ready when the client has taken all of its time.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let UploadLimits { idle_timeout, total_timeout, .. } = self.limits;
        let is_new = self.waiting_since.is_none();
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let deadline =
            *self.deadline.get_or_insert_with(|| since + total_timeout.unwrap_or(Duration::from_secs(u32::MAX.into())));
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if is_new {
            timer.as_mut().reset(deadline.min(since + idle_timeout.min(self.credit)));
        }
        timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod pace_tests {
    use std::future::poll_fn;

    use tokio::time::{advance, sleep, timeout};

    use super::*;

    /// Seconds until a client is given up that sends so many bytes each time after so many ms; none if it never is, for an hour.
    async fn seconds_until_timeout(demand: UploadLimits, bytes: usize, every: u64) -> Option<u64> {
        let (mut pace, begun) = (MinRateTimer::new(demand), Instant::now());
        while begun.elapsed() < Duration::from_secs(3600) {
            let wait = timeout(Duration::from_millis(every), poll_fn(|cx| pace.poll(cx)));
            if wait.await.is_ok() {
                return Some(begun.elapsed().as_secs());
            }
            pace.received(bytes);
        }
        None
    }

    #[test]
    fn upload_times_out_below_minimum_rate() {
        let seconds = Duration::from_secs;
        let demand = |rate, total: Option<u64>| UploadLimits {
            idle_timeout: seconds(30),
            min_rate: rate,
            total_timeout: total.map(seconds),
        };
        let reactor = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        for (what, demand, bytes, every, expected) in [
            ("a byte per second", demand(240, None), 1, 1000, Some(5)),
            ("nothing", demand(240, None), 0, 10_000, Some(5)),
            ("half the rate", demand(240, None), 120, 1000, Some(9)),
            ("the rate", demand(240, None), 240, 1000, None),
            ("the rate in large pieces with pauses", demand(240, None), 1200, 4900, None),
            ("slow with any rate", demand(0, None), 1, 29_000, None),
            ("silent with any rate", demand(0, None), 1, 31_000, Some(30)),
            ("fast, but too long", demand(240, Some(60)), 100_000, 1000, Some(60)),
        ] {
            assert_eq!(reactor.block_on(seconds_until_timeout(demand, bytes, every)), expected, "{what}");
        }
    }

    #[test]
    fn fast_upload_may_pause_and_upstream_backpressure_is_not_charged() {
        let reactor = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        reactor.block_on(async {
            let mut pace = MinRateTimer::new(UploadLimits {
                idle_timeout: Duration::from_secs(30),
                min_rate: 240,
                total_timeout: None,
            });
            pace.received(100_000);
            let paused = timeout(Duration::from_secs(29), poll_fn(|cx| pace.poll(cx)));
            assert!(paused.await.is_err(), "earned by what it has sent");
            pace.received(1);
            // Nobody asks the client for more.
            advance(Duration::from_secs(600)).await;
            sleep(Duration::ZERO).await;
            pace.received(100_000);
            let paused = timeout(Duration::from_secs(29), poll_fn(|cx| pace.poll(cx)));
            assert!(paused.await.is_err(), "the time of others");
            // What it has not earned again is gone.
            pace.received(240);
            let begun = Instant::now();
            poll_fn(|cx| pace.poll(cx)).await;
            assert_eq!(begun.elapsed().as_secs(), 2);
        });
    }
}
