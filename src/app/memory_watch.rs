//! Measures the memory of the process. Before the kernel would end the process, the gateway refuses work, and ends
//! responses that clients do not read.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use tracing::{info, warn};

use crate::admin::state::ProcessState;
use crate::clock::{LogThrottle, monotonic};
use crate::http::memory_guard::{MEASURE_INTERVAL, MemoryGuard, SETTLING_TIME};
use crate::snapshot::memory::MemoryLimit;

/// Time between two measurements while less than half of the memory is used, and without a limit.
const INTERVAL: Duration = Duration::from_millis(50);
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum time between two ends of slow responses: their memory is free after this time.
const END_INTERVAL: Duration = Duration::from_millis(50);

/// Minimum time between two calls of the allocator to return freed memory, and the size of a block in bytes for which
/// mimalloc uses a separate page.
const PURGE_INTERVAL: Duration = Duration::from_millis(100);
const PAGE: usize = 1 << 20;

/// Minimum interval between log messages about slow responses.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What the thread knows from its last measurements.
#[derive(Debug, Default)]
struct Watch {
    /// The room after the last measurement.
    room: i64,
    /// The bytes of room that the work of each interval has taken, and the end of the interval.
    taken: VecDeque<(Instant, i64)>,
    ended_at: Option<Instant>,
    purged_at: Option<Instant>,
}

/// Start the thread, which ends with the process.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn start(state: Arc<ProcessState>) -> io::Result<()> {
    let run = move || {
        let mut watch = Watch::default();
        while !state.admin_stop.is_cancelled() {
            let server = state.config_handle.active().config.server.clone();
            let interval = match &server.memory {
                Some(limit) => watch.measure(&state.memory_guard, limit),
                None => {
                    state.memory_guard.set_unlimited();
                    IDLE_INTERVAL
                }
            };
            thread::sleep(interval);
        }
    };
    thread::Builder::new().name("memory".to_owned()).spawn(run).map(drop)
}

impl Watch {
    /// Measure the memory, and free memory if much is used. Return the time until the next measurement.
    fn measure(&mut self, guard: &MemoryGuard, limit: &MemoryLimit) -> Duration {
        let Some(used) = limit.used() else {
            guard.set_unlimited();
            return IDLE_INTERVAL;
        };
        let (was_full, limit) = (guard.is_full(), limit.bytes);
        let unsettled = if guard.has_limit() { self.unsettled(guard.room()) } else { 0 };
        self.room = guard.set_used(used, limit, unsettled);
        match (was_full, guard.is_full()) {
            (false, true) => {
                warn!(used, limit, "the memory is nearly used up: new connections wait, and new requests get 503");
            }
            (true, false) => info!(used, limit, "memory is free again"),
            (false, false) | (true, true) => {}
        }
        if guard.is_full() && is_due(&mut self.ended_at, END_INTERVAL) {
            end_slow_responses(guard, limit);
        }
        if used <= limit / 2 {
            return INTERVAL;
        }
        if is_due(&mut self.purged_at, PURGE_INTERVAL) {
            return_freed_memory();
        }
        MEASURE_INTERVAL
    }

    /// Return the bytes that work of the last [`SETTLING_TIME`] has taken. `room` is what it has left.
    fn unsettled(&mut self, room: i64) -> i64 {
        let now = monotonic();
        self.taken.push_back((now, self.room - room));
        while self.taken.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > SETTLING_TIME) {
            self.taken.pop_front();
        }
        // Room may be taken in one interval and released in a later one.
        self.taken.iter().map(|(_, bytes)| bytes).sum::<i64>().max(0)
    }
}

/// Return whether `interval` has passed since the last call that has returned true.
fn is_due(last: &mut Option<Instant>, interval: Duration) -> bool {
    let now = monotonic();
    let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= interval);
    if is_due {
        *last = Some(now);
    }
    is_due
}

/// End responses that clients do not read.
fn end_slow_responses(guard: &MemoryGuard, limit: u64) {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    let ended = guard.end_slow_responses(limit);
    if ended > 0 && LOG_THROTTLE.should_log(LOG_INTERVAL) {
        warn!(ended, "the memory is nearly used up: ending responses that clients do not read");
    }
}

/// Let the allocator return freed memory to the kernel. mimalloc returns it 1 s after it was freed (`purge_delay`), but
/// only when a thread allocates or frees a page of blocks. While the gateway refuses work, the workers may do neither.
fn return_freed_memory() {
    drop(black_box(Vec::<u8>::with_capacity(PAGE)));
}
