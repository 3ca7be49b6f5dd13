//! Measures the memory of the process. Before the kernel would end the process, the gateway refuses work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use tracing::{info, warn};

use crate::admin::state::ProcessState;
use crate::clock::monotonic;
use crate::snapshot::memory::{MEASURE_INTERVAL, MemoryGuard, MemoryLimit, SETTLING_TIME};

/// Time between two measurements while less than half of the memory is used, and without a limit.
const INTERVAL: Duration = Duration::from_millis(50);
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Start the thread, which ends with the process.
///
/// # Errors
/// The thread cannot be started.
pub(super) fn start(state: Arc<ProcessState>) -> io::Result<()> {
    let run = move || {
        let mut accepted = VecDeque::new();
        while !state.admin_stop.is_cancelled() {
            let server = state.config_handle.active().config.server.clone();
            thread::sleep(measure(&state.memory_guard, server.memory.as_ref(), &mut accepted));
        }
    };
    thread::Builder::new().name("memory".to_owned()).spawn(run).map(drop)
}

/// Measure the memory. Return the time until the next measurement. `accepted` has the number of accepted connections at
/// the last measurements.
fn measure(guard: &MemoryGuard, limit: Option<&MemoryLimit>, accepted: &mut VecDeque<(Instant, u64)>) -> Duration {
    let was_full = guard.is_full();
    let measured = limit.and_then(|limit| Some((limit.bytes, limit.used()?)));
    let Some((limit, used)) = measured else {
        guard.set_used(0, u64::MAX, 0);
        return IDLE_INTERVAL;
    };
    let now = monotonic();
    accepted.push_back((now, guard.accepted()));
    // Keep the last measurement before the settling time.
    while accepted.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= SETTLING_TIME) {
        accepted.pop_front();
    }
    let new = accepted.front().map_or(0, |(_, before)| guard.accepted().saturating_sub(*before));
    match (was_full, guard.set_used(used, limit, new)) {
        (false, true) => {
            warn!(used, limit, "the memory is nearly used up: new connections wait, and new requests get 503");
        }
        (true, false) => info!(used, limit, "memory is free again"),
        (false, false) | (true, true) => {}
    }
    if used > limit / 2 { MEASURE_INTERVAL } else { INTERVAL }
}
