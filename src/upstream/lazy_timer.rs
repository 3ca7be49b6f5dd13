//! Response timer: one tokio timer for all requests of a connection.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::time::{Instant, Sleep, sleep_until};

/// A timer that is not reset for each request. It may fire too early and is then reset; requests with a fast
/// response never reset it.
#[derive(Debug, Default)]
pub(super) struct ResponseTimer(Option<Pin<Box<Sleep>>>);

impl ResponseTimer {
    /// Return ready at `deadline`. The task may be woken earlier, for the deadline of a previous request.
    pub(super) fn poll(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
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
mod tests {
    use std::future::poll_fn;

    use tokio::time::{Duration, timeout};

    use super::*;

    #[test]
    fn timer_fires_at_each_deadline_despite_previous_ones() {
        let reactor = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        reactor.block_on(async {
            let mut timer = ResponseTimer::default();
            let start = Instant::now();
            let after = |ms| start + Duration::from_millis(ms);
            // Pending: the timer stays set to one hour.
            let is_pending = poll_fn(|cx| Poll::Ready(timer.poll(after(3_600_000), cx).is_pending())).await;
            assert!(is_pending, "fired an hour early");
            let short = timeout(Duration::from_secs(60), poll_fn(|cx| timer.poll(after(5), cx)));
            short.await.expect("a shorter deadline after a longer one is not observed");
            // Set to a short deadline that a longer one follows.
            let soon = Instant::now() + Duration::from_millis(5);
            poll_fn(|cx| Poll::Ready(_ = timer.poll(soon, cx))).await;
            let until = Instant::now() + Duration::from_millis(40);
            poll_fn(|cx| timer.poll(until, cx)).await;
            assert!(Instant::now() >= until, "fired too early");
        });
    }
}
