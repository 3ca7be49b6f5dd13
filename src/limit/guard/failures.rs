//! When a store fails too often: the failures in a row, and the part of all calls that fails.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::Duration;

use crate::limit::redis::connection::UNANSWERED;

/// Failures in a row that are too many: as many as end a connection, so that the probe starts on a fresh one.
const IN_A_ROW: u32 = UNANSWERED;

/// Parts of the calls of this time are too many, if they are as many as this.
const WINDOW: Duration = Duration::from_secs(1);
const ENOUGH: u64 = 20;

/// The failures of late. Calls that succeed cost three loads as long as none has failed.
#[derive(Debug)]
pub(super) struct Failures {
    in_a_row: AtomicU32,
    /// Half of the calls failed.
    failed: Part,
    /// Nine in ten failed, or were answered, but not in time. A busy store, or one that shares a busy machine, answers some in time: it
    /// is overloaded. One that is in time for none is too slow.
    late: Part,
}

/// A part of the calls of a window of [`WINDOW`] that begins with one of this part.
#[derive(Debug)]
struct Part {
    /// So many of ten are too many.
    most: u64,
    /// ms of its start, how many calls, how many of this part, in 32, 16 and 16 bits. 0 is none: successes before the first failure
    /// could only make the part smaller.
    window: AtomicU64,
}

impl Default for Failures {
    fn default() -> Self {
        let part = |most| Part { most, window: AtomicU64::new(0) };
        Failures { in_a_row: AtomicU32::new(0), failed: part(5), late: part(9) }
    }
}

impl Failures {
    /// A call succeeded. `now` is asked for the time only if one failed lately.
    pub(super) fn succeeded(&self, now: impl Fn() -> Duration) {
        if self.in_a_row.load(Ordering::Relaxed) != 0 {
            self.in_a_row.store(0, Ordering::Relaxed);
        }
        self.failed.succeeded(&now);
        self.late.succeeded(&now);
    }

    /// A call failed; whether that makes too many.
    pub(super) fn failed(&self, now: Duration) -> bool {
        let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        let (failed, late) = (self.failed.grows(now), self.late.grows(now));
        in_a_row >= IN_A_ROW || failed || late
    }

    /// A call was not answered in time, while others were answered; whether that makes too many.
    pub(super) fn late(&self, now: Duration) -> bool {
        self.failed.succeeded(&|| now);
        self.late.grows(now)
    }

    /// Begins anew.
    pub(super) fn forget(&self) {
        self.in_a_row.store(0, Ordering::Relaxed);
        self.failed.window.store(0, Ordering::Relaxed);
        self.late.window.store(0, Ordering::Relaxed);
    }
}

impl Part {
    fn succeeded(&self, now: &impl Fn() -> Duration) {
        if self.window.load(Ordering::Relaxed) != 0 {
            self.count(now(), 0);
        }
    }

    /// One more call of this part; whether that makes it too large.
    fn grows(&self, now: Duration) -> bool {
        let (calls, part) = self.count(now, 1);
        calls >= ENOUGH && 10 * part >= self.most * calls
    }

    /// Counts a call, 0 or 1 of this part: how many calls the window has, and how many of this part.
    fn count(&self, now: Duration, part: u64) -> (u64, u64) {
        // 49 days in 32 bits; only the difference counts.
        let now_ms = now.as_millis() as u32;
        let next = |window: u64| {
            let (began_ms, calls, before) = ((window >> 32) as u32, window >> 16 & 0xFFFF, window & 0xFFFF);
            let over = u128::from(now_ms.wrapping_sub(began_ms)) >= WINDOW.as_millis() || calls == 0xFFFF;
            match (over || window == 0, part) {
                (true, 0) => 0,
                (true, _) => u64::from(now_ms) << 32 | 1 << 16 | 1,
                (false, _) => u64::from(began_ms) << 32 | (calls + 1) << 16 | (before + part),
            }
        };
        let before = self.window.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |window| Some(next(window)));
        let window = next(before.unwrap_or_else(|window| window));
        (window >> 16 & 0xFFFF, window & 0xFFFF)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Makes calls, one each `gap` ms from `start` on, `F` for those that fail, `L` for those that are late: the first one that is too many.
    fn trip(calls: &str, start: u64, gap: u64) -> Option<usize> {
        let failures = Failures::default();
        calls.bytes().enumerate().find_map(|(index, call)| {
            let now = ms(start + index as u64 * gap);
            let too_many = match call {
                b'F' => failures.failed(now),
                b'L' => failures.late(now),
                _ => {
                    failures.succeeded(|| now);
                    false
                }
            };
            too_many.then_some(index + 1)
        })
    }

    #[test]
    fn five_in_a_row_are_too_many_however_slow() {
        assert_eq!(trip("FFFFF", 0, 1), Some(5));
        assert_eq!(trip("FFFFF", 0, 100_000), Some(5));
        assert_eq!(trip("SSSFFFFSFFFFF", 0, 1), Some(13), "a success begins the row anew");
        assert_eq!(trip("FFFFSFFFFSFFFFS", 0, 1), None, "not twenty yet");
    }

    #[test]
    fn half_of_twenty_within_a_second_are_too_many() {
        let half = "FS".repeat(100);
        assert_eq!(trip(&half, 0, 1), Some(21), "at the first failure from the twentieth call on");
        assert_eq!(trip(&half, 0, 47), Some(21), "in 940 ms");
        assert_eq!(trip(&half, 0, 60), None, "fewer than twenty in a second");
        assert_eq!(trip(&"FSS".repeat(100), 0, 1), None, "a third");
        assert_eq!(trip(&"FFS".repeat(100), 0, 1), Some(20), "two thirds");
        assert_eq!(trip(&format!("{}{half}", "S".repeat(1000)), 0, 1), Some(1021), "after any number that went well");
    }

    #[test]
    fn late_replies_are_too_many_when_hardly_any_is_in_time() {
        assert_eq!(trip(&"L".repeat(100), 0, 1), Some(20));
        assert_eq!(trip(&"L".repeat(100), 0, 60), None, "fewer than twenty in a second");
        assert_eq!(trip(&"LLLLS".repeat(100), 0, 1), None, "one of five is in time");
        assert_eq!(trip(&format!("{}S", "L".repeat(18)).repeat(100), 0, 1), Some(20), "one of nineteen");
        assert_eq!(
            trip("LLLLFFFFLLLLF", 0, 1),
            Some(13),
            "a late reply to another call does not end a row of failures"
        );
    }

    #[test]
    fn a_window_ends_and_the_next_one_begins_with_a_failure() {
        // Three single failures in three windows, and a half that fails in the fourth.
        let quiet = format!("F{}", "S".repeat(1099));
        assert_eq!(trip(&format!("{}{}", quiet.repeat(3), "FS".repeat(20)), 0, 1), Some(3321));
        let failures = Failures::default();
        assert!(!failures.failed(ms(5)));
        failures.succeeded(|| ms(1005));
        assert_eq!(failures.failed.window.load(Ordering::Relaxed), 0, "successes cost nothing again");
    }

    #[test]
    fn the_time_may_wrap_and_the_calls_be_many() {
        assert_eq!(trip(&"FS".repeat(100), u64::from(u32::MAX) - 10, 1), Some(21));
        let failures = Failures::default();
        failures.failed(ms(1));
        for _ in 0..200_000 {
            failures.succeeded(|| ms(2));
        }
        let trips = (0..ENOUGH).map(|_| {
            failures.succeeded(|| ms(3));
            failures.failed(ms(3))
        });
        assert!(trips.collect::<Vec<_>>().contains(&true), "half of those that come now");
        failures.forget();
        assert!(!failures.failed(ms(4)));
    }
}
