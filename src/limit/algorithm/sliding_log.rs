//! Sliding log: remembers every admitted unit, so no window of its length ever holds more than the limit.

use std::collections::VecDeque;

use super::{Ask, Change, LogEdit, Outcome, State, Status, Step};
use crate::limit::quota::{Quota, QuotaError};

/// At most `limit` units in any window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingLog {
    /// Units in any window.
    pub limit: u64,
    /// Length of the window, µs.
    pub window: u64,
}

/// A log keeps 8 to 12 bytes a unit for every identity: beyond this, sliding buckets are the better choice.
pub const MAX_LOG: u64 = 10_000;

impl SlidingLog {
    /// A log for a quota.
    ///
    /// # Errors
    /// The quota has no window, or more than [`MAX_LOG`] units.
    pub fn new(quota: Quota) -> Result<Self, QuotaError> {
        let window = quota.window_us.ok_or(QuotaError::NoWindow)?;
        if quota.count > MAX_LOG {
            return Err(QuotaError::LongLog { count: quota.count, most: MAX_LOG });
        }
        Ok(SlidingLog { limit: quota.count, window })
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, ask: Ask, cost: u64) -> Step {
        let empty = VecDeque::new();
        let log = match state {
            Some(State::Log(log)) => log,
            _ => &empty,
        };
        // An instant in the future (the clock was set back) counts as now.
        let at = |index: usize| log[index].min(now);
        let low = log.partition_point(|&instant| instant.min(now) + self.window <= now);
        let active = (log.len() - low) as u64;
        let behind = log.back().is_some_and(|&newest| newest > now);
        let free = self.limit.saturating_sub(active);
        let reset_us = if active > 0 { at(log.len() - 1) + self.window - now } else { 0 };
        let edit = LogEdit { now, mend: behind, drop: 0, push: 0, remove: None, window: self.window };
        let step = |status, remaining, reset_us, retry_us, change| Step {
            outcome: Outcome { status, remaining, reset_us, retry_us },
            free,
            free_reset_us: if active > 0 { at(log.len() - 1) + self.window - now } else { 0 },
            change,
        };

        if let Ask::Refund { charged_at, .. } = ask {
            let change = match cost {
                0 => Change::None,
                _ => Change::Log(LogEdit { mend: false, remove: Some((cost, charged_at)), ..edit }),
            };
            let mut rest = log.clone();
            if let Change::Log(edit) = &change {
                edit.apply(&mut rest);
            }
            let active = rest.iter().filter(|instant| (**instant).min(now) + self.window > now).count() as u64;
            let newest = rest.back().filter(|_| active > 0);
            let reset_us = newest.map_or(0, |newest| newest.min(&now) + self.window - now);
            return step(Status::Ok, self.limit.saturating_sub(active), reset_us, 0, change);
        }
        if ask == Ask::Fit && active.saturating_add(cost) > self.limit {
            let mended = if behind { Change::Log(edit) } else { Change::None };
            if cost > self.limit {
                return step(Status::Never, free, reset_us, 0, mended);
            }
            let blocking = low + (active + cost - self.limit - 1) as usize;
            return step(Status::Over, free, reset_us, at(blocking) + self.window - now, mended);
        }
        match cost {
            0 => step(Status::Ok, free, reset_us, 0, Change::None),
            _ => {
                let change = Change::Log(LogEdit { drop: low, push: cost, ..edit });
                step(Status::Ok, free.saturating_sub(cost), self.window, 0, change)
            }
        }
    }
}

impl LogEdit {
    /// Carries out the edit on a log.
    pub fn apply(&self, log: &mut VecDeque<u64>) {
        if let Some((mut units, instant)) = self.remove {
            // From the newest on, as LREM with a negative count.
            for index in (0..log.len()).rev() {
                if units > 0 && log[index] == instant {
                    log.remove(index);
                    units -= 1;
                }
            }
            return;
        }
        if self.mend {
            for instant in log.iter_mut() {
                *instant = (*instant).min(self.now);
            }
        }
        log.drain(..self.drop);
        log.extend(std::iter::repeat_n(self.now, self.push as usize));
    }
}
