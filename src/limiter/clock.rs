//! The one place that reads a clock. Time reaches everything else as a value.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Clocks of two machines drift apart by less than this part of a wait.
const MAX_DRIFT_DIVISOR: u32 = 2000;

/// Where a store takes the instant of a decision from.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    /// Redis' own `TIME`; for the memory store, the system's clock.
    #[default]
    Store,
    /// Redis' own `TIME` for decisions, while this process' clock is off by so many µs.
    Skewed(i64),
    /// An instant set by hand, in µs since the Unix epoch.
    Manual(Arc<AtomicU64>),
    /// Redis' own `TIME` for decisions, while this process' clock showed so many µs since the Unix epoch at an instant, and runs
    /// with [`monotonic`] since then.
    Running(Instant, u64),
}

impl Clock {
    /// A clock that stands still until it is set.
    pub fn manual(now_us: u64) -> Self {
        Clock::Manual(Arc::new(AtomicU64::new(now_us)))
    }

    /// A clock that shows `now_us` now and runs with [`monotonic`], also where a test pauses that.
    pub fn running(now_us: u64) -> Self {
        Clock::Running(monotonic(), now_us)
    }

    /// Moves a manual clock; the store's own cannot be moved.
    pub fn set(&self, now_us: u64) {
        if let Clock::Manual(now) = self {
            now.store(now_us, Ordering::SeqCst);
        }
    }

    /// Now, in µs since the Unix epoch.
    pub fn now_us(&self) -> u64 {
        match self {
            Clock::Manual(now) => now.load(Ordering::SeqCst),
            Clock::Running(start, start_us) => start_us + elapsed_since(*start).as_micros() as u64,
            Clock::Store => unix_us(),
            Clock::Skewed(by_us) => unix_us().saturating_add_signed(*by_us),
        }
    }

    /// Now as the script's argument: 0 leaves it to the server.
    pub fn script_argument_us(&self) -> u64 {
        match self {
            Clock::Manual(_) => self.now_us(),
            Clock::Store | Clock::Skewed(_) | Clock::Running(..) => 0,
        }
    }
}

/// The system's wall clock, µs since the Unix epoch.
pub fn unix_us() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// The part of a wait by another machine's clock that lasts at least as long by ours.
pub fn subtract_drift(wait: Duration) -> Duration {
    wait - wait / MAX_DRIFT_DIVISOR
}

/// A clock that never goes back, for deadlines and durations. It is tokio's, which the timers follow: the clock of the system,
/// but where a test pauses it.
pub fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The time since an instant of [`monotonic`]. [`Instant::elapsed`] does not stand still where that is paused.
pub fn elapsed_since(instant: Instant) -> Duration {
    monotonic().saturating_duration_since(instant)
}

/// Lets something that may happen often be said now and then.
#[derive(Debug, Default)]
pub struct LogThrottle(AtomicU64);

impl LogThrottle {
    /// Something that has not been said yet.
    pub const fn new() -> Self {
        LogThrottle(AtomicU64::new(0))
    }

    /// Whether it was not said within this time; then it counts as said now.
    pub fn should_log(&self, interval: Duration) -> bool {
        let (now, logged_at) = (unix_us(), self.0.load(Ordering::Relaxed));
        u128::from(now.abs_diff(logged_at)) >= interval.as_micros()
            && self.0.compare_exchange(logged_at, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
