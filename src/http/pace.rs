//! How fast a client must send a request body: only the time for which the gateway waits for the client counts.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Duration, Instant, Sleep, sleep_until};

/// Time that a client may keep the gateway waiting before its rate counts, as in Kestrel's `MinRequestBodyDataRate`.
pub const GRACE: Duration = Duration::from_secs(5);

/// What is demanded of a client that sends a body.
#[derive(Debug, Clone, Copy)]
pub struct Demand {
    /// Maximum time without a byte.
    pub idle: Duration,
    /// Minimum bytes per second; 0 = any.
    pub rate: u64,
    /// Maximum time from the first wait to the end of the body.
    pub total: Option<Duration>,
}

/// A client's time. Each second of waiting takes a second of it, `rate` bytes give one back. No timer is set for a body that is
/// there when it is asked for.
#[derive(Debug)]
pub(super) struct Pace {
    demand: Demand,
    left: Duration,
    waits_since: Option<Instant>,
    due: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Pace {
    pub(super) fn new(demand: Demand) -> Self {
        let left = if demand.rate == 0 { Duration::MAX } else { GRACE };
        Pace { demand, left, waits_since: None, due: None, timer: None }
    }

    /// Bytes came.
    pub(super) fn received(&mut self, bytes: usize) {
        let waited = self.waits_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        if let Some(earned_us) = (bytes as u64 * 1_000_000).checked_div(self.demand.rate) {
            // A client that was fast may pause as long as any client may.
            let most = self.demand.idle.max(GRACE);
            self.left = (self.left.saturating_sub(waited) + Duration::from_micros(earned_us)).min(most);
        }
    }

    /// Nothing is there: ready when the client has taken all of its time.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Demand { idle, total, .. } = self.demand;
        let is_new = self.waits_since.is_none();
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        let due = *self.due.get_or_insert_with(|| since + total.unwrap_or(Duration::from_secs(u32::MAX.into())));
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if is_new {
            timer.as_mut().reset(due.min(since + idle.min(self.left)));
        }
        timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{advance, sleep, timeout};

    use super::*;

    /// Seconds until a client is given up that sends so many bytes each time after so many ms; none if it never is, for an hour.
    async fn given_up(demand: Demand, bytes: usize, every: u64) -> Option<u64> {
        let (mut pace, begun) = (Pace::new(demand), Instant::now());
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
    fn a_client_is_given_up_when_it_is_slower_than_demanded() {
        let seconds = Duration::from_secs;
        let demand = |rate, total: Option<u64>| Demand { idle: seconds(30), rate, total: total.map(seconds) };
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
            assert_eq!(reactor.block_on(given_up(demand, bytes, every)), expected, "{what}");
        }
    }

    #[test]
    fn a_fast_client_may_pause_and_an_upstream_that_does_not_read_costs_it_nothing() {
        let reactor = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        reactor.block_on(async {
            let mut pace = Pace::new(Demand { idle: Duration::from_secs(30), rate: 240, total: None });
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
