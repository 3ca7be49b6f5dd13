//! When a store fails too often: the failures in a row, and the part of all calls that fails.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::Duration;

use crate::limit::redis::connection::MAX_UNANSWERED_CALLS;

/// Failures in a row that are too many: as many as end a connection, so that the probe starts on a fresh one.
const MAX_CONSECUTIVE_FAILURES: u32 = MAX_UNANSWERED_CALLS;

/// Parts of the calls of this time are too many, if they are as many as this.
const WINDOW: Duration = Duration::from_secs(1);
const MIN_CALLS: u64 = 20;

/// The failures of late. Calls that succeed cost three loads as long as none has failed.
#[derive(Debug)]
pub(super) struct FailureWindow {
    consecutive: AtomicU32,
    /// Half of the calls failed.
    failed_ratio: FailureRatio,
    /// Nine in ten failed, or were answered, but not in time. A busy store, or one that shares a busy machine, answers some in time: it
    /// is overloaded. One that is in time for none is too slow.
    late_ratio: FailureRatio,
}

/// A part of the calls of a window of [`WINDOW`] that begins with one of this part.
#[derive(Debug)]
struct FailureRatio {
    /// So many of ten are too many.
    max_tenths: u64,
    /// ms of its start, how many calls, how many of this part, in 32, 16 and 16 bits. 0 is none: successes before the first failure
    /// could only make the part smaller.
    packed_window: AtomicU64,
}

impl Default for FailureWindow {
    fn default() -> Self {
        let ratio = |most| FailureRatio { max_tenths: most, packed_window: AtomicU64::new(0) };
        FailureWindow { consecutive: AtomicU32::new(0), failed_ratio: ratio(5), late_ratio: ratio(9) }
    }
}

impl FailureWindow {
    /// A call succeeded. `now` is asked for the time only if one failed lately.
    pub(super) fn record_success(&self, now: impl Fn() -> Duration) {
        if self.consecutive.load(Ordering::Relaxed) != 0 {
            self.consecutive.store(0, Ordering::Relaxed);
        }
        self.failed_ratio.record_other(&now);
        self.late_ratio.record_other(&now);
    }

    /// A call failed; whether that makes too many.
    pub(super) fn record_failure(&self, now: Duration) -> bool {
        let consecutive = self.consecutive.fetch_add(1, Ordering::Relaxed) + 1;
        let (is_failed_exceeded, late) = (self.failed_ratio.record_matching(now), self.late_ratio.record_matching(now));
        consecutive >= MAX_CONSECUTIVE_FAILURES || is_failed_exceeded || late
    }

    /// A call was not answered in time, while others were answered; whether that makes too many.
    pub(super) fn record_late_reply(&self, now: Duration) -> bool {
        self.failed_ratio.record_other(&|| now);
        self.late_ratio.record_matching(now)
    }

    /// Begins anew.
    pub(super) fn reset(&self) {
        self.consecutive.store(0, Ordering::Relaxed);
        self.failed_ratio.packed_window.store(0, Ordering::Relaxed);
        self.late_ratio.packed_window.store(0, Ordering::Relaxed);
    }
}

impl FailureRatio {
    fn record_other(&self, now: &impl Fn() -> Duration) {
        if self.packed_window.load(Ordering::Relaxed) != 0 {
            self.record(now(), 0);
        }
    }

    /// One more call of this part; whether that makes it too large.
    fn record_matching(&self, now: Duration) -> bool {
        let (calls, matching) = self.record(now, 1);
        calls >= MIN_CALLS && 10 * matching >= self.max_tenths * calls
    }

    /// Counts a call, 0 or 1 of this part: how many calls the window has, and how many of this part.
    fn record(&self, now: Duration, matching: u64) -> (u64, u64) {
        // 49 days in 32 bits; only the difference counts.
        let now_ms = now.as_millis() as u32;
        let next_window = |window: u64| {
            let (started_ms, calls, matching_before) = ((window >> 32) as u32, window >> 16 & 0xFFFF, window & 0xFFFF);
            let is_over = u128::from(now_ms.wrapping_sub(started_ms)) >= WINDOW.as_millis() || calls == 0xFFFF;
            match (is_over || window == 0, matching) {
                (true, 0) => 0,
                (true, _) => u64::from(now_ms) << 32 | 1 << 16 | 1,
                (false, _) => u64::from(started_ms) << 32 | (calls + 1) << 16 | (matching_before + matching),
            }
        };
        let before =
            self.packed_window.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |window| Some(next_window(window)));
        let window = next_window(before.unwrap_or_else(|window| window));
        (window >> 16 & 0xFFFF, window & 0xFFFF)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Makes calls, one each `gap` ms from `start` on, `F` for those that fail, `L` for those that are late: the first one that is too many.
    fn calls_until_open(outcomes: &str, start_ms: u64, gap_ms: u64) -> Option<usize> {
        let failures = FailureWindow::default();
        outcomes.bytes().enumerate().find_map(|(index, call)| {
            let now = millis(start_ms + index as u64 * gap_ms);
            let too_many = match call {
                b'F' => failures.record_failure(now),
                b'L' => failures.record_late_reply(now),
                _ => {
                    failures.record_success(|| now);
                    false
                }
            };
            too_many.then_some(index + 1)
        })
    }

    #[test]
    fn five_consecutive_failures_open_the_breaker() {
        assert_eq!(calls_until_open("FFFFF", 0, 1), Some(5));
        assert_eq!(calls_until_open("FFFFF", 0, 100_000), Some(5));
        assert_eq!(calls_until_open("SSSFFFFSFFFFF", 0, 1), Some(13), "a success begins the row anew");
        assert_eq!(calls_until_open("FFFFSFFFFSFFFFS", 0, 1), None, "not twenty yet");
    }

    #[test]
    fn half_of_twenty_calls_within_a_second_open_the_breaker() {
        let half = "FS".repeat(100);
        assert_eq!(calls_until_open(&half, 0, 1), Some(21), "at the first failure from the twentieth call on");
        assert_eq!(calls_until_open(&half, 0, 47), Some(21), "in 940 ms");
        assert_eq!(calls_until_open(&half, 0, 60), None, "fewer than twenty in a second");
        assert_eq!(calls_until_open(&"FSS".repeat(100), 0, 1), None, "a third");
        assert_eq!(calls_until_open(&"FFS".repeat(100), 0, 1), Some(20), "two thirds");
        assert_eq!(
            calls_until_open(&format!("{}{half}", "S".repeat(1000)), 0, 1),
            Some(1021),
            "after any number that went well"
        );
    }

    #[test]
    fn nine_in_ten_late_replies_open_the_breaker() {
        assert_eq!(calls_until_open(&"L".repeat(100), 0, 1), Some(20));
        assert_eq!(calls_until_open(&"L".repeat(100), 0, 60), None, "fewer than twenty in a second");
        assert_eq!(calls_until_open(&"LLLLS".repeat(100), 0, 1), None, "one of five is in time");
        assert_eq!(calls_until_open(&format!("{}S", "L".repeat(18)).repeat(100), 0, 1), Some(20), "one of nineteen");
        assert_eq!(
            calls_until_open("LLLLFFFFLLLLF", 0, 1),
            Some(13),
            "a late reply to another call does not end a row of failures"
        );
    }

    #[test]
    fn window_starts_with_a_failure() {
        // Three single failures in three windows, and a half that fails in the fourth.
        let quiet = format!("F{}", "S".repeat(1099));
        assert_eq!(calls_until_open(&format!("{}{}", quiet.repeat(3), "FS".repeat(20)), 0, 1), Some(3321));
        let failures = FailureWindow::default();
        assert!(!failures.record_failure(millis(5)));
        failures.record_success(|| millis(1005));
        assert_eq!(failures.failed_ratio.packed_window.load(Ordering::Relaxed), 0, "successes cost nothing again");
    }

    #[test]
    fn window_survives_time_wrap_and_many_calls() {
        assert_eq!(calls_until_open(&"FS".repeat(100), u64::from(u32::MAX) - 10, 1), Some(21));
        let failures = FailureWindow::default();
        failures.record_failure(millis(1));
        for _ in 0..200_000 {
            failures.record_success(|| millis(2));
        }
        let trips = (0..MIN_CALLS).map(|_| {
            failures.record_success(|| millis(3));
            failures.record_failure(millis(3))
        });
        assert!(trips.collect::<Vec<_>>().contains(&true), "half of those that come now");
        failures.reset();
        assert!(!failures.record_failure(millis(4)));
    }
}
