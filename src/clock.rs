//! The only module that reads a clock. All other code gets the time from this module or as an argument.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Upper bound of clock drift: during a wait, the clocks of two machines drift apart by less than the wait divided by
/// this number.
const MAX_DRIFT_DIVISOR: u32 = 2000;

/// The clock that determines the time of decisions.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    /// Decisions use the `TIME` of Redis or, in the memory store, the system clock.
    #[default]
    Store,
    /// For tests: decisions use the `TIME` of Redis, but the clock of this process is ahead by this number of µs, or
    /// behind if the number is negative.
    Skewed(i64),
    /// An instant that tests set, in µs since the Unix epoch.
    Manual(Arc<AtomicU64>),
    /// For tests: decisions use the `TIME` of Redis. At the given instant, the clock of this process showed the given
    /// number of µs since the Unix epoch. Since then, it advances with [`monotonic`].
    Running(Instant, u64),
}

impl Clock {
    /// Create a clock that shows `now_us` until [`Clock::set`] changes it.
    pub fn manual(now_us: u64) -> Self {
        Clock::Manual(Arc::new(AtomicU64::new(now_us)))
    }

    /// Create a clock that starts at `now_us` and advances with [`monotonic`], which a test may pause.
    pub fn running(now_us: u64) -> Self {
        Clock::Running(monotonic(), now_us)
    }

    /// Set a manual clock. Clocks of other kinds cannot be set.
    pub fn set(&self, now_us: u64) {
        if let Clock::Manual(now) = self {
            now.store(now_us, Ordering::SeqCst);
        }
    }

    /// Return the current time, in µs since the Unix epoch.
    pub fn now_us(&self) -> u64 {
        match self {
            Clock::Manual(now) => now.load(Ordering::SeqCst),
            Clock::Running(start, start_us) => start_us + elapsed_since(*start).as_micros() as u64,
            Clock::Store => unix_us(),
            Clock::Skewed(by_us) => unix_us().saturating_add_signed(*by_us),
        }
    }

    /// Return the time argument of the script: the time of a manual clock, or 0. With 0, the script uses the time of
    /// Redis.
    pub fn script_argument_us(&self) -> u64 {
        match self {
            Clock::Manual(_) => self.now_us(),
            Clock::Store | Clock::Skewed(_) | Clock::Running(..) => 0,
        }
    }
}

/// Return the time of the system clock, in µs since the Unix epoch.
pub fn unix_us() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// The latest time that [`note_time`] has read, in µs since the Unix epoch.
static LATEST_US: AtomicU64 = AtomicU64::new(0);

/// See [`is_behind`].
static IS_BEHIND: AtomicBool = AtomicBool::new(false);

/// Detect steps of the system clock. Call this function every second.
pub fn note_time() {
    let now_us = unix_us();
    let latest_us = LATEST_US.fetch_max(now_us, Ordering::Relaxed);
    IS_BEHIND.store(now_us < latest_us, Ordering::Relaxed);
}

/// Return whether the system clock shows an earlier time than before, because it was set back. hyper then repeats its
/// last `Date` until the clock has reached this time again.
pub fn is_behind() -> bool {
    IS_BEHIND.load(Ordering::Relaxed)
}

/// Return the minimum duration that a wait can have by the clock of this machine, if it lasts `wait` by the clock of
/// another machine.
pub fn subtract_drift(wait: Duration) -> Duration {
    wait - wait / MAX_DRIFT_DIVISOR
}

/// Return the time of a clock that never goes back, for deadlines and durations. The function reads tokio's clock,
/// which also drives tokio's timers. Tests can pause this clock.
pub fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Return the time since an instant of [`monotonic`]. [`Instant::elapsed`] would advance while a test has paused
/// tokio's clock.
pub fn elapsed_since(instant: Instant) -> Duration {
    monotonic().saturating_duration_since(instant)
}

/// Limits how often a message is logged.
#[derive(Debug, Default)]
pub struct LogThrottle(AtomicU64);

impl LogThrottle {
    /// Create the throttle of a message that has not been logged yet.
    pub const fn new() -> Self {
        LogThrottle(AtomicU64::new(0))
    }

    /// Return whether the message may be logged, because it was not logged within the last `interval`. If the result is
    /// true, the message counts as logged.
    pub fn should_log(&self, interval: Duration) -> bool {
        let now = unix_us();
        let logged_at = self.0.load(Ordering::Relaxed);
        u128::from(now.abs_diff(logged_at)) >= interval.as_micros()
            && self.0.compare_exchange(logged_at, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
