//! How many requests may be tried again: a part of all, so that a fleet in trouble does not get more of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A retry for so many requests.
const REQUESTS_PER_RETRY: u64 = 5;

/// Retries that a quiet fleet has at most in hand.
const MAX_SAVED_RETRIES: u64 = 100;

/// Retries each second whatever the number of requests: with few of them a part of all would be none.
const MIN_RETRIES_PER_SEC: f64 = 10.0;

/// What is left of it.
#[derive(Debug)]
pub(super) struct RetryBudget {
    /// Requests that have not paid for a retry yet.
    deposits: AtomicU64,
    /// Retries of the floor, and when that was.
    min_retries: Mutex<(f64, Instant)>,
}

impl RetryBudget {
    pub(super) fn new(now: Instant) -> Self {
        RetryBudget { deposits: AtomicU64::new(0), min_retries: Mutex::new((MIN_RETRIES_PER_SEC, now)) }
    }

    /// A request that is not a retry.
    pub(super) fn deposit(&self) {
        let most = MAX_SAVED_RETRIES * REQUESTS_PER_RETRY;
        let _ = self
            .deposits
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |saved| (saved < most).then_some(saved + 1));
    }

    /// Whether there may be a retry; then it is paid for.
    pub(super) fn withdraw(&self, now: Instant) -> bool {
        let pay = |saved: u64| saved.checked_sub(REQUESTS_PER_RETRY);
        if self.deposits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok() {
            return true;
        }
        let mut floor = self.min_retries.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, at) = *floor;
        let left =
            (left + MIN_RETRIES_PER_SEC * now.saturating_duration_since(at).as_secs_f64()).min(MIN_RETRIES_PER_SEC);
        *floor = (if left < 1.0 { left } else { left - 1.0 }, now);
        left >= 1.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::clock::monotonic;

    #[test]
    fn a_fifth_of_the_requests_and_a_floor() {
        let now = monotonic();
        let budget = RetryBudget::new(now);
        let spend = |at| (0..1000).filter(|_| budget.withdraw(at)).count();
        assert_eq!(spend(now), 10, "the floor of the first second");
        assert_eq!(spend(now + Duration::from_millis(500)), 5);
        (0..200).for_each(|_| budget.deposit());
        assert_eq!(spend(now + Duration::from_millis(500)), 40, "a fifth of 200");
        (0..100_000).for_each(|_| budget.deposit());
        assert_eq!(spend(now + Duration::from_secs(3600)), 110, "no more is saved than so many");
    }
}
