//! Sliding buckets: the window is divided into buckets. The oldest bucket is only partly in the window. All tokens of
//! the oldest bucket count nevertheless, so that no window has more tokens than the limit.

use crate::limiter::algorithm::{Change, MAX_STATE, Outcome, State, Status, Step, StepKind};
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, Quota, QuotaError};

/// Sliding buckets that admit at most `limit` tokens in any window. Tokens become available again one bucket at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingBuckets {
    /// Tokens in any window.
    pub limit: u64,
    /// Length of the window, µs.
    pub window: u64,
    /// Number of buckets. The length of the window in µs is a multiple of this number.
    pub buckets: u64,
}

impl SlidingBuckets {
    /// Create a window with this number of buckets for a quota.
    ///
    /// # Errors
    /// The quota has no window of fixed length, the length is not a multiple of the number of buckets, or twice the
    /// count is not an exact integer in Lua 5.1.
    pub fn new(quota: Quota, buckets: u64) -> Result<Self, QuotaError> {
        let window = quota.window_us.ok_or(QuotaError::NoFixedWindow)?;
        if !window.is_multiple_of(buckets) {
            return Err(QuotaError::Buckets { buckets });
        }
        if u128::from(quota.count) * 2 >= u128::from(EXACT_INTEGER_LIMIT) {
            return Err(QuotaError::Inexact { count: quota.count });
        }
        Ok(SlidingBuckets { limit: quota.count, window, buckets })
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let width = self.window / self.buckets;
        let index = now / width;
        let mut counts = vec![0; self.buckets as usize + 1];
        let mut clock_went_back = false;
        if let Some(State::Buckets { index: stored_index, counts: stored_counts }) = state {
            clock_went_back = *stored_index > index;
            let shift = index.saturating_sub(*stored_index) as usize;
            for (count, kept) in counts.iter_mut().skip(shift).zip(stored_counts) {
                *count = *kept;
            }
        }
        let total: u64 = counts.iter().sum();
        // Time in µs until the bucket of this age has left the window. The newest bucket has age 0.
        let dropped_after_us = |age: usize| (index + self.buckets + 1 - age as u64) * width - now;
        let until_empty = |counts: &[u64]| counts.iter().position(|count| *count > 0).map_or(0, dropped_after_us);
        let free = self.limit.saturating_sub(total);
        let free_reset_us = until_empty(&counts);
        let step = |outcome, change| Step { outcome, free, free_reset_us, change };

        if kind == StepKind::Check && total.saturating_add(cost) > self.limit {
            let (status, retry_us) = if cost > self.limit {
                (Status::CostTooLarge, 0)
            } else {
                let mut excess = total + cost - self.limit;
                let enough = |count: &u64| {
                    let done = excess <= *count;
                    excess = excess.saturating_sub(*count);
                    done
                };
                // Buckets are visited from the oldest to the newest. Dropping all buckets frees enough tokens, because
                // the cost alone is at most the limit.
                let age = counts.iter().rev().position(enough).map_or(0, |from_oldest| counts.len() - 1 - from_oldest);
                (Status::Exceeded, dropped_after_us(age))
            };
            let repair = if clock_went_back && total > 0 { put(index, counts, free_reset_us) } else { Change::None };
            return step(Outcome { status, remaining: free, reset_us: free_reset_us, retry_us }, repair);
        }
        match kind {
            StepKind::Refund { charged_at, .. } => {
                let age = index.checked_sub(charged_at / width).and_then(|age| counts.get_mut(age as usize));
                if let Some(count) = age {
                    *count = count.saturating_sub(cost);
                }
            }
            StepKind::Check | StepKind::Charge | StepKind::Renew => counts[0] += cost.min(MAX_STATE - total),
        }
        let total: u64 = counts.iter().sum();
        let reset_us = until_empty(&counts);
        let remaining = self.limit.saturating_sub(total);
        let change = match (total, kind) {
            (0, StepKind::Refund { .. }) => Change::Delete,
            (0, _) => Change::None,
            _ => put(index, counts, reset_us),
        };
        step(Outcome { status: Status::Ok, remaining, reset_us, retry_us: 0 }, change)
    }
}

fn put(index: u64, counts: Vec<u64>, ttl_us: u64) -> Change {
    Change::Put(State::Buckets { index, counts: counts.into() }, ttl_us)
}
