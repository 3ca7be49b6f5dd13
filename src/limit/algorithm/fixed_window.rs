//! Fixed window: a counter that starts again with every window.

use std::sync::Arc;

use super::{Ask, Change, MOST, Outcome, State, Status, Step};
use crate::limit::calendar::Windows;
use crate::limit::quota::{Calendar, EXACT, Quota, QuotaError};

/// At most `limit` units in each window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixedWindow {
    /// Units in a window.
    pub limit: u64,
    /// Length of the window, µs.
    pub window: u64,
    /// When windows open.
    pub start: Start,
}

/// When a window opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// At every multiple of the window since the Unix epoch, shifted by `phase` µs.
    Aligned {
        /// Shift, µs.
        phase: u64,
    },
    /// With the first request after the last window closed.
    FirstRequest,
    /// As the calendar has them; the length is that of no window in particular.
    Calendar(Arc<Windows>),
}

impl Start {
    /// How windows of another quota open: by the calendar where the quota is written so, in the same zone.
    pub(super) fn resized(&self, quota: Quota) -> Result<Self, QuotaError> {
        Ok(match (self, quota.calendar) {
            (Start::FirstRequest, _) => Start::FirstRequest,
            (Start::Calendar(windows), Some(unit)) => Start::Calendar(Arc::new(windows.by(unit))),
            (_, Some(unit)) => Start::calendar(unit, "UTC")?,
            (_, None) => Start::Aligned { phase: 0 },
        })
    }

    /// Windows of the calendar.
    ///
    /// # Errors
    /// There is no such zone.
    pub fn calendar(unit: Calendar, zone: &str) -> Result<Self, QuotaError> {
        let windows = Windows::new(unit, zone).map_err(|_| QuotaError::Zone(zone.to_owned()))?;
        Ok(Start::Calendar(Arc::new(windows)))
    }
}

impl FixedWindow {
    /// A window for a quota.
    ///
    /// # Errors
    /// The quota has no window, or twice its count leaves the exact integers of Redis' Lua.
    pub fn new(quota: Quota, start: Start) -> Result<Self, QuotaError> {
        let window = match start {
            Start::Calendar(_) => 0,
            Start::Aligned { .. } | Start::FirstRequest => quota.window_us.ok_or(QuotaError::NoWindow)?,
        };
        // Twice: a charge is added to the count before it is compared.
        if u128::from(quota.count) * 2 >= u128::from(EXACT) {
            return Err(QuotaError::Inexact { count: quota.count });
        }
        Ok(FixedWindow { limit: quota.count, window, start })
    }

    pub(super) fn step(&self, state: Option<&State>, now: u64, ask: Ask, cost: u64) -> Step {
        let (opened, mut count) = match state {
            Some(&State::Window { start, count }) => (Some(start), count),
            _ => (None, 0),
        };
        let (start, finish) = match &self.start {
            Start::Aligned { phase } => {
                // Before the phase the window number is negative: a remainder that is never negative, as in Lua.
                let start = now - (now as i64 - *phase as i64).rem_euclid(self.window as i64) as u64;
                (start, start + self.window)
            }
            Start::Calendar(windows) => {
                let [start, finish, _] = windows.around(now);
                (start, finish)
            }
            Start::FirstRequest => {
                let open = |opened: &u64| *opened <= now && now < opened + self.window;
                let start = opened.filter(open).unwrap_or(now);
                (start, start + self.window)
            }
        };
        let behind = opened.is_some_and(|opened| opened > start);
        if opened.is_some_and(|opened| opened < start) {
            count = 0;
        }
        let reset_us = finish - now;
        let idle_reset = match self.start {
            Start::Aligned { .. } | Start::Calendar(_) => reset_us,
            Start::FirstRequest => 0,
        };
        let free = self.limit.saturating_sub(count);
        let free_reset_us = if count == 0 { idle_reset } else { reset_us };
        let step = |outcome, change| Step { outcome, free, free_reset_us, change };
        let hold = |count: u64| {
            let (reset_us, change) = match count {
                0 => (idle_reset, Change::Empty),
                _ => (reset_us, Change::Put(State::Window { start, count }, reset_us)),
            };
            let remaining = self.limit.saturating_sub(count);
            step(Outcome { status: Status::Ok, remaining, reset_us, retry_us: 0 }, change)
        };

        if let Ask::Refund { charged_at, .. } = ask {
            let inside = charged_at >= start && charged_at < finish;
            return hold(if inside { count.saturating_sub(cost) } else { count });
        }
        let charged = count.saturating_add(cost);
        if ask == Ask::Fit && charged > self.limit {
            let (status, retry_us) = if cost > self.limit { (Status::Never, 0) } else { (Status::Over, reset_us) };
            let mended = match behind && count > 0 {
                true => Change::Put(State::Window { start, count }, reset_us),
                false => Change::None,
            };
            return step(Outcome { status, remaining: free, reset_us: free_reset_us, retry_us }, mended);
        }
        match charged.min(MOST) {
            // Nothing counted and nothing charged: nothing to write.
            0 => Step { change: Change::None, ..hold(0) },
            charged => hold(charged),
        }
    }
}
