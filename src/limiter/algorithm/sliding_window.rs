//! Sliding window: the weighted sum of the current and the previous aligned window.

use crate::limiter::algorithm::{Change, MAX_STATE, Outcome, State, Status, Step, StepKind};
use crate::limiter::quota::{EXACT_INTEGER_LIMIT, Quota, QuotaError};

/// A sliding window that admits about `limit` tokens in any window. A client that sends bursts around the boundary of
/// two aligned windows gets at most twice as many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens per window.
    pub limit: u64,
    /// Length of the window, µs.
    pub window: u64,
    /// Unit for measuring the elapsed part of the window, µs. The length of the window is a multiple of the unit.
    pub unit: u64,
}

impl SlidingWindow {
    /// Create a window for a quota, with the smallest unit for which the arithmetic is exact.
    ///
    /// # Errors
    /// The quota has no window of fixed length, or the arithmetic is not exact with any unit.
    pub fn new(quota: Quota) -> Result<Self, QuotaError> {
        let window = quota.window_us.ok_or(QuotaError::NoFixedWindow)?;
        // Four times the product of the count and the number of units must be an exact integer: the counts of two
        // windows are added before the comparison, and deferred costs may double each of the two counts.
        let is_exact =
            |unit: u64| u128::from(quota.count) * u128::from(window / unit) * 4 < u128::from(EXACT_INTEGER_LIMIT);
        let units = (0..12).map(|power| 10u64.pow(power));
        let unit = units.filter(|unit| window.is_multiple_of(*unit)).find(|unit| is_exact(*unit));
        let unit = unit.ok_or(QuotaError::Inexact { count: quota.count })?;
        Ok(SlidingWindow { limit: quota.count, window, unit })
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let start = now - now % self.window;
        let mut current = 0;
        let mut previous = 0;
        let mut clock_went_back = false;
        if let Some(&State::Sliding { start: stored_start, current: stored_current, previous: stored_previous }) = state
        {
            (current, previous) = match stored_start {
                opened if opened >= start => (stored_current, stored_previous),
                opened if opened + self.window == start => (0, stored_current),
                _ => (0, 0),
            };
            clock_went_back = stored_start > start;
        }
        let elapsed = (now - start) / self.unit;
        let units = self.window / self.unit;
        // The weighted number of tokens of the previous window, rounded up.
        let weighted = |previous: u64| (previous * (units - elapsed)).div_ceil(units);
        let remaining =
            |current: u64, previous: u64| self.limit.saturating_sub(current).saturating_sub(weighted(previous));
        let reset = |current: u64, previous: u64| match (current, previous) {
            (0, 0) => 0,
            (0, _) => start + self.window - now,
            _ => start + 2 * self.window - now,
        };
        let free = remaining(current, previous);
        let free_reset_us = reset(current, previous);
        let step = |outcome, change| Step { outcome, free, free_reset_us, change };
        let put =
            |current, previous| Change::Put(State::Sliding { start, current, previous }, reset(current, previous));

        let charged = current.saturating_add(cost);
        let excess = (i128::from(charged) - i128::from(self.limit)) * i128::from(units)
            + i128::from(previous) * i128::from(units - elapsed);
        if kind == StepKind::Check && excess > 0 {
            let (status, retry_us) = if cost > self.limit {
                (Status::CostTooLarge, 0)
            } else if charged <= self.limit {
                (Status::Exceeded, start + (elapsed + (excess as u64).div_ceil(previous)) * self.unit - now)
            } else {
                let wait = (units * (charged - self.limit)).div_ceil(current);
                (Status::Exceeded, start + self.window + wait * self.unit - now)
            };
            let repair = if clock_went_back && free_reset_us > 0 { put(current, previous) } else { Change::None };
            return step(Outcome { status, remaining: free, reset_us: free_reset_us, retry_us }, repair);
        }
        match kind {
            StepKind::Refund { charged_at, .. } if charged_at >= start => current = current.saturating_sub(cost),
            StepKind::Refund { charged_at, .. } if charged_at + self.window >= start => {
                previous = previous.saturating_sub(cost)
            }
            StepKind::Refund { .. } => {}
            StepKind::Check | StepKind::Charge | StepKind::Renew => current = charged.min(MAX_STATE / 2 / units),
        }
        let reset_us = reset(current, previous);
        let change = match (reset_us, kind) {
            (0, StepKind::Refund { .. }) => Change::Delete,
            (0, _) => Change::None,
            _ => put(current, previous),
        };
        step(Outcome { status: Status::Ok, remaining: remaining(current, previous), reset_us, retry_us: 0 }, change)
    }
}
