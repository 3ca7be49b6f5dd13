//! Limits of bodies: maximum length, total time, idle time and minimum rate, and the timer for them.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// The limits of an exchange with an upstream.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// When the route timeout expires for the exchange, including its bodies.
    pub deadline: Option<Instant>,
    /// Limits on the client while it sends the request body.
    pub upload: UploadLimits,
    /// Maximum time without data from the upstream within a response of known length.
    pub idle_timeout: Duration,
    /// Maximum length of the request body in bytes.
    pub max_body: Option<u64>,
}

/// The reasons why a body ended early.
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

/// The time at which a body is aborted.
#[derive(Debug)]
pub(super) struct Deadline {
    pub(super) instant: Instant,
    timer: LazyTimer,
}

impl Deadline {
    pub(super) fn new(instant: Instant) -> Self {
        Deadline { instant, timer: LazyTimer::default() }
    }

    /// Return ready once the deadline has passed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.poll(self.instant, cx)
    }
}

/// A timeout for periods without progress. No timer is set for a body that always has data available.
#[derive(Debug)]
pub(super) struct IdleTimer {
    timeout: Duration,
    timer: LazyTimer,
    /// `None` while there is progress.
    deadline: Option<Instant>,
}

impl IdleTimer {
    pub(super) fn new(timeout: Duration) -> Self {
        IdleTimer { timeout, timer: LazyTimer::default(), deadline: None }
    }

    /// Record that data arrived.
    pub(super) fn record_progress(&mut self) {
        self.deadline = None;
    }

    /// Poll the timer while no data is available. Return ready once that lasted for the timeout.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + self.timeout);
        self.timer.poll(deadline, cx)
    }
}

// === Minimum upload rate: only the time in which the gateway waits for the client counts ===

/// Time that a client may keep the gateway waiting before the minimum rate applies, as in Kestrel's
/// `MinRequestBodyDataRate`.
pub const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// Stands for no total timeout: longer than any upload.
const NO_TIMEOUT: Duration = Duration::from_secs(u32::MAX as u64);

/// Limits on a client that sends a body.
#[derive(Debug, Clone, Copy)]
pub struct UploadLimits {
    /// Maximum time without a byte.
    pub idle_timeout: Duration,
    /// Minimum rate in bytes per second. 0 disables the check.
    pub min_rate: u64,
    /// Maximum time from the first wait to the end of the body.
    pub total_timeout: Option<Duration>,
}

/// Time credit of a client. Each second of waiting costs a second of credit, and `min_rate` bytes earn one back. No
/// timer is set for a body that is available when it is polled.
#[derive(Debug)]
pub(super) struct MinRateTimer {
    limits: UploadLimits,
    credit: Duration,
    waiting_since: Option<Instant>,
    /// When the total time ends.
    end: Option<Instant>,
    timer: LazyTimer,
}

impl MinRateTimer {
    pub(super) fn new(limits: UploadLimits) -> Self {
        let credit = if limits.min_rate == 0 { Duration::MAX } else { GRACE_PERIOD };
        MinRateTimer { limits, credit, waiting_since: None, end: None, timer: LazyTimer::default() }
    }

    /// Record received bytes.
    pub(super) fn received(&mut self, bytes: usize) {
        let waited = self.waiting_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        if let Some(credit_us) = (bytes as u64 * 1_000_000).checked_div(self.limits.min_rate) {
            // A client that sent fast may pause for at most the idle timeout, as any client may.
            let max = self.limits.idle_timeout.max(GRACE_PERIOD);
            self.credit = (self.credit.saturating_sub(waited) + Duration::from_micros(credit_us)).min(max);
        }
    }

    /// Poll the timer while no data is available. Return ready once the client has used up its time.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let UploadLimits { idle_timeout, total_timeout, .. } = self.limits;
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let end = *self.end.get_or_insert_with(|| since + total_timeout.unwrap_or(NO_TIMEOUT));
        self.timer.poll(end.min(since + idle_timeout.min(self.credit)), cx)
    }
}

// === A timer whose deadline moves often and is rarely reached ===

/// A timer that takes its deadline when it is polled. It is set again only when it fires too early, not each time the
/// deadline moves: requests and chunks that arrive in time never reset it.
#[derive(Debug, Default)]
pub struct LazyTimer(Option<Pin<Box<Sleep>>>);

impl LazyTimer {
    /// Return ready once `deadline` has passed. The task may also be woken earlier, by a deadline of an earlier poll.
    pub fn poll(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() > deadline {
            timer.as_mut().reset(deadline);
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

#[cfg(test)]
mod min_rate_tests {
    use std::future::poll_fn;

    use tokio::time::{advance, sleep, timeout};

    use super::*;

    /// Return the seconds until a client times out that sends `bytes` bytes every `every` ms; `None` if it does not
    /// within an hour.
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
            // The gateway does not wait for the client.
            advance(Duration::from_secs(600)).await;
            sleep(Duration::ZERO).await;
            pace.received(100_000);
            let paused = timeout(Duration::from_secs(29), poll_fn(|cx| pace.poll(cx)));
            assert!(paused.await.is_err(), "the time of others");
            // Credit that was spent and not earned again is gone.
            pace.received(240);
            let begun = Instant::now();
            poll_fn(|cx| pace.poll(cx)).await;
            assert_eq!(begun.elapsed().as_secs(), 2);
        });
    }
}

#[cfg(test)]
mod timer_tests {
    use std::future::poll_fn;

    use tokio::time::{Duration, timeout};

    use super::*;

    #[test]
    fn timer_fires_at_its_latest_deadline() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut timer = LazyTimer::default();
            let start = Instant::now();
            let after = |ms| start + Duration::from_millis(ms);
            // The wait ends at once: the timer stays set for an hour.
            let is_pending = poll_fn(|cx| Poll::Ready(timer.poll(after(3_600_000), cx).is_pending())).await;
            assert!(is_pending, "an hour has not passed");
            let short = timeout(Duration::from_secs(60), poll_fn(|cx| timer.poll(after(5), cx)));
            short.await.expect("an earlier deadline resets the timer");
            // The wait ends at once again. When the timer fires, the task waits for a later deadline.
            let soon = Instant::now() + Duration::from_millis(5);
            poll_fn(|cx| Poll::Ready(_ = timer.poll(soon, cx))).await;
            let later = Instant::now() + Duration::from_millis(40);
            poll_fn(|cx| timer.poll(later, cx)).await;
            assert!(Instant::now() >= later, "the timer fired too early");
        });
    }
}
