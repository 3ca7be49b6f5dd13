//! Fixed window: a counter that starts at zero in each window.

use std::sync::Arc;

use crate::limiter::algorithm::{Change, MAX_STATE, Outcome, State, Status, Step, StepKind};
use crate::limiter::quota::{CalendarUnit, CalendarWindows, EXACT_INTEGER_LIMIT, Quota, QuotaError};

/// A fixed window that admits at most `limit` tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedWindow {
    /// Tokens per window.
    pub limit: u64,
    /// Length of the window in µs, or 0 for calendar windows, whose lengths differ.
    pub window: u64,
    /// The rule that determines when windows start.
    pub start: WindowStart,
}

/// The rule that determines when a window starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WindowStart {
    /// Windows start at every multiple of the window length since the Unix epoch, shifted by `phase` µs.
    Aligned {
        /// Offset of the window start from multiples of the window length, µs.
        phase: u64,
    },
    /// A window starts with the first request after the last window has ended.
    FirstRequest,
    /// Windows follow the calendar: days, weeks, months or years in a time zone.
    Calendar(Arc<CalendarWindows>),
}

impl WindowStart {
    /// Return the rule that determines when windows start if `quota` replaces the quota of the limit. Calendar windows
    /// keep their time zone.
    pub(super) fn with_quota(&self, quota: Quota) -> Result<Self, QuotaError> {
        Ok(match (self, quota.calendar) {
            (WindowStart::FirstRequest, _) => WindowStart::FirstRequest,
            (WindowStart::Calendar(windows), Some(unit)) => WindowStart::Calendar(Arc::new(windows.with_unit(unit))),
            (_, Some(unit)) => WindowStart::calendar(unit, "UTC")?,
            (_, None) => WindowStart::Aligned { phase: 0 },
        })
    }

    /// Return calendar windows in a time zone.
    ///
    /// # Errors
    /// The time zone is unknown.
    pub fn calendar(unit: CalendarUnit, zone: &str) -> Result<Self, QuotaError> {
        let windows = CalendarWindows::new(unit, zone).map_err(|_| QuotaError::TimeZone(zone.to_owned()))?;
        Ok(WindowStart::Calendar(Arc::new(windows)))
    }
}

impl FixedWindow {
    /// Create a window for a quota.
    ///
    /// # Errors
    /// The quota has no window of fixed length, or twice its count is not an exact integer in Lua 5.1.
    pub fn new(quota: Quota, start: WindowStart) -> Result<Self, QuotaError> {
        let window = match start {
            WindowStart::Calendar(_) => 0,
            WindowStart::Aligned { .. } | WindowStart::FirstRequest => {
                quota.window_us.ok_or(QuotaError::NoFixedWindow)?
            }
        };
        // Twice the count must be an exact integer, because a charge is added to the count before the sum is compared
        // with the limit.
        if u128::from(quota.count) * 2 >= u128::from(EXACT_INTEGER_LIMIT) {
            return Err(QuotaError::Inexact { count: quota.count });
        }
        Ok(FixedWindow { limit: quota.count, window, start })
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let (stored_start, mut count) = match state {
            Some(&State::Window { start, count }) => (Some(start), count),
            _ => (None, 0),
        };
        let (start, end) = match &self.start {
            WindowStart::Aligned { phase } => {
                // If `now` is before `phase`, the difference is negative. Like `%` in Lua, `rem_euclid` returns a
                // remainder that is never negative.
                let start = now - (now as i64 - *phase as i64).rem_euclid(self.window as i64) as u64;
                (start, start + self.window)
            }
            WindowStart::Calendar(windows) => {
                let [start, finish, _] = windows.boundaries_around(now);
                (start, finish)
            }
            WindowStart::FirstRequest => {
                let is_open = |opened: &u64| *opened <= now && now < opened + self.window;
                let start = stored_start.filter(is_open).unwrap_or(now);
                (start, start + self.window)
            }
        };
        let clock_went_back = stored_start.is_some_and(|opened| opened > start);
        if stored_start.is_some_and(|opened| opened < start) {
            count = 0;
        }
        let reset_us = end - now;
        let idle_reset = match self.start {
            WindowStart::Aligned { .. } | WindowStart::Calendar(_) => reset_us,
            WindowStart::FirstRequest => 0,
        };
        let free = self.limit.saturating_sub(count);
        let free_reset_us = if count == 0 { idle_reset } else { reset_us };
        let step = |outcome, change| Step { outcome, free, free_reset_us, change };
        let with_count = |count: u64| {
            let (reset_us, change) = match count {
                0 => (idle_reset, Change::Delete),
                _ => (reset_us, Change::Put(State::Window { start, count }, reset_us)),
            };
            let remaining = self.limit.saturating_sub(count);
            step(Outcome { status: Status::Ok, remaining, reset_us, retry_us: 0 }, change)
        };

        if let StepKind::Refund { charged_at, .. } = kind {
            let is_same_window = charged_at >= start && charged_at < end;
            return with_count(if is_same_window { count.saturating_sub(cost) } else { count });
        }
        let charged = count.saturating_add(cost);
        if kind == StepKind::Check && charged > self.limit {
            let (status, retry_us) =
                if cost > self.limit { (Status::CostTooLarge, 0) } else { (Status::Exceeded, reset_us) };
            let repair = match clock_went_back && count > 0 {
                true => Change::Put(State::Window { start, count }, reset_us),
                false => Change::None,
            };
            return step(Outcome { status, remaining: free, reset_us: free_reset_us, retry_us }, repair);
        }
        match charged.min(MAX_STATE) {
            // A count of 0 means that nothing was charged, so the state does not change.
            0 => Step { change: Change::None, ..with_count(0) },
            charged => with_count(charged),
        }
    }
}
