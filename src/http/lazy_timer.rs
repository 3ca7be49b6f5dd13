//! A timer whose deadline moves often and is rarely reached.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::time::{Instant, Sleep, sleep_until};

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
mod tests {
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
