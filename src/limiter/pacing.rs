//! Pacing of store calls: the bounds and delays that singleflight and the batcher share.

use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use crate::clock::{elapsed_since, monotonic};

/// Maximum number of checks that wait in one queue of a worker. A Redis server cannot perform this many checks within
/// the default timeout of 50 ms. Further checks are rejected at once.
pub const MAX_WAITING_CHECKS: usize = 16_384;

/// Maximum time that is added to the timeout of a check or call if the worker was busy with other tasks. The bound
/// ensures that the gateway detects a server that hangs.
pub const MAX_WORKER_DELAY: Duration = Duration::from_secs(1);

/// While a call is in flight, further checks wait for its reply for at most the store timeout divided by this number.
/// With the default timeout of 50 ms, they wait for about 3 ms. Clients would notice a longer delay.
const LATENCY_TARGET_DIVISOR: u32 = 16;

/// Maximum time for which a charge or refund is retried, and for which the reply to a late call is awaited. Then its
/// cost counts as lost.
pub const SETTLEMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval for retrying a charge, refund or release that was not sent because of overload, or that another node of a
/// cluster must execute.
pub const OVERLOAD_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Interval for retrying a charge, refund or release during an outage. The end of the outage ends the interval.
pub const OUTAGE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// tokio's timers have a resolution of 1 ms. If a timer fires more than this duration after its deadline, other tasks
/// of the worker have delayed it.
const TIMER_LATENESS: Duration = Duration::from_millis(2);

/// Return the maximum time for which further checks wait for the reply to a call in flight. After this time, the next
/// call is sent although the first has no reply.
pub fn latency_target(store_timeout: Duration) -> Duration {
    store_timeout / LATENCY_TARGET_DIVISOR
}

/// Return how long a task that was ready at `ready_at` has waited for the worker, but at most [`MAX_WORKER_DELAY`]. The
/// store does not cause this delay, so the delay does not count towards the timeout.
pub fn worker_delay(ready_at: Instant) -> Duration {
    elapsed_since(ready_at).min(MAX_WORKER_DELAY)
}

/// Wait for `future` until `deadline`. Return `None` if it is not ready by then. If other tasks of the worker delayed
/// the timer, extend the wait by this delay. A reply may have arrived during the delay without having been read.
pub async fn wait_until<T>(deadline: Instant, mut future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    let last_end = deadline + MAX_WORKER_DELAY;
    let mut end = deadline;
    loop {
        if let Ok(output) = timeout_at(end.into(), future.as_mut()).await {
            return Some(output);
        }
        let now = monotonic();
        let lateness = now.saturating_duration_since(end);
        if lateness < TIMER_LATENESS || end >= last_end {
            return None;
        }
        end = (now + lateness).min(last_end);
    }
}
