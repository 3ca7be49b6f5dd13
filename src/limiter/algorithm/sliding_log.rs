//! Sliding log: stores the time of each admitted token, so that no window has more tokens than the limit.

use std::collections::VecDeque;

use crate::limiter::algorithm::{Change, LogEdit, Outcome, State, Status, Step, StepKind};
use crate::limiter::quota::{Quota, QuotaError};

/// A sliding log that admits at most `limit` tokens in any window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingLog {
    /// Tokens in any window.
    pub limit: u64,
    /// Length of the window, µs.
    pub window: u64,
}

/// Maximum `limit` of a sliding log. The log needs 8 to 12 bytes per token and identity, so sliding buckets are better
/// for larger limits.
pub const MAX_LOG_ENTRIES: u64 = 10_000;

impl SlidingLog {
    /// Create a log for a quota.
    ///
    /// # Errors
    /// The quota has no window of fixed length, or has more than [`MAX_LOG_ENTRIES`] tokens.
    pub fn new(quota: Quota) -> Result<Self, QuotaError> {
        let window = quota.window_us.ok_or(QuotaError::NoFixedWindow)?;
        if quota.count > MAX_LOG_ENTRIES {
            return Err(QuotaError::LongLog { count: quota.count, max: MAX_LOG_ENTRIES });
        }
        Ok(SlidingLog { limit: quota.count, window })
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let empty = VecDeque::new();
        let log = match state {
            Some(State::Log(log)) => log,
            _ => &empty,
        };
        // A stored time in the future counts as `now`: the clock was set back after the time was stored.
        let instant_at = |index: usize| log[index].min(now);
        let first_active = log.partition_point(|&instant| instant.min(now) + self.window <= now);
        let active = (log.len() - first_active) as u64;
        let clock_went_back = log.back().is_some_and(|&newest| newest > now);
        let free = self.limit.saturating_sub(active);
        let reset_us = if active > 0 { instant_at(log.len() - 1) + self.window - now } else { 0 };
        let edit =
            LogEdit { now, repair_clock_skew: clock_went_back, drop: 0, push: 0, remove: None, window: self.window };
        let step = |status, remaining, reset_us, retry_us, change| Step {
            outcome: Outcome { status, remaining, reset_us, retry_us },
            free,
            free_reset_us: if active > 0 { instant_at(log.len() - 1) + self.window - now } else { 0 },
            change,
        };

        if let StepKind::Refund { charged_at, .. } = kind {
            let change = match cost {
                0 => Change::None,
                _ => Change::Log(LogEdit { repair_clock_skew: false, remove: Some((cost, charged_at)), ..edit }),
            };
            let mut after_refund = log.clone();
            if let Change::Log(edit) = &change {
                edit.apply(&mut after_refund);
            }
            let active = after_refund.iter().filter(|instant| (**instant).min(now) + self.window > now).count() as u64;
            let newest = after_refund.back().filter(|_| active > 0);
            let reset_us = newest.map_or(0, |newest| newest.min(&now) + self.window - now);
            return step(Status::Ok, self.limit.saturating_sub(active), reset_us, 0, change);
        }
        if kind == StepKind::Check && active.saturating_add(cost) > self.limit {
            let repair = if clock_went_back { Change::Log(edit) } else { Change::None };
            if cost > self.limit {
                return step(Status::CostTooLarge, free, reset_us, 0, repair);
            }
            let blocking = first_active + (active + cost - self.limit - 1) as usize;
            return step(Status::Exceeded, free, reset_us, instant_at(blocking) + self.window - now, repair);
        }
        match cost {
            0 => step(Status::Ok, free, reset_us, 0, Change::None),
            _ => {
                let change = Change::Log(LogEdit { drop: first_active, push: cost, ..edit });
                step(Status::Ok, free.saturating_sub(cost), self.window, 0, change)
            }
        }
    }
}

impl LogEdit {
    /// Apply the change to a sliding log.
    pub fn apply(&self, log: &mut VecDeque<u64>) {
        if let Some((mut units, instant)) = self.remove {
            // Remove the newest matching entries first, as LREM does with a negative count.
            for index in (0..log.len()).rev() {
                if units > 0 && log[index] == instant {
                    log.remove(index);
                    units -= 1;
                }
            }
            return;
        }
        if self.repair_clock_skew {
            for instant in log.iter_mut() {
                *instant = (*instant).min(self.now);
            }
        }
        log.drain(..self.drop);
        log.extend(std::iter::repeat_n(self.now, self.push as usize));
    }
}
