//! What outlives a mirrored request: the counters, permits, tasks and memory of its copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

use crate::http::body_limits::BufferBudget;
use crate::limiter::metrics::Counter;

/// The result of a copy that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyResult {
    /// The upstream responded, with any status.
    Responded,
    /// The upstream did not respond.
    Failed,
}

impl CopyResult {
    /// All values of this enum. The counters are stored in the order of this list.
    pub const ALL: [CopyResult; 2] = [CopyResult::Responded, CopyResult::Failed];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            CopyResult::Responded => "responded",
            CopyResult::Failed => "failed",
        }
    }
}

/// The reason why a request was not copied, or why its copy was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropReason {
    /// `max_in_flight` copies were already in flight.
    MaxInFlight,
    /// The body exceeds `max_body`.
    MaxBody,
    /// The bodies of all copies have used up their memory budget, which is a quarter of `server.max_buffered`.
    MaxBuffered,
    /// The body did not reach its end.
    Incomplete,
    /// The request offers to upgrade the connection.
    Upgrade,
    /// The request is a copy itself.
    Copy,
}

impl DropReason {
    /// All values of this enum. The counters are stored in the order of this list.
    pub const ALL: [DropReason; 6] = [
        DropReason::MaxInFlight,
        DropReason::MaxBody,
        DropReason::MaxBuffered,
        DropReason::Incomplete,
        DropReason::Upgrade,
        DropReason::Copy,
    ];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            DropReason::MaxInFlight => "max_in_flight",
            DropReason::MaxBody => "max_body",
            DropReason::MaxBuffered => "max_buffered",
            DropReason::Incomplete => "incomplete",
            DropReason::Upgrade => "upgrade",
            DropReason::Copy => "copy",
        }
    }
}

/// Copies of the requests of one route, on one worker.
#[derive(Debug, Default)]
pub struct MirrorStats {
    /// Copies that were sent, by [`CopyResult`].
    pub sent: Counter<{ CopyResult::ALL.len() }>,
    /// Requests without a copy, by [`DropReason`].
    pub dropped: Counter<{ DropReason::ALL.len() }>,
    in_flight: AtomicUsize,
}

impl MirrorStats {
    /// Return the number of copies in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn drop_copy(&self, reason: DropReason) {
        self.dropped.increment(reason as usize);
    }
}

/// The permit of a copy in flight. Dropping the value releases the permit.
pub(super) struct InFlight(Arc<MirrorStats>);

impl InFlight {
    /// Acquire a permit to send a copy. Return `None` if `max` copies are in flight.
    pub(super) fn try_acquire(stats: &Arc<MirrorStats>, max: usize) -> Option<Self> {
        let one_more = |now: usize| (now < max).then_some(now + 1);
        stats.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(InFlight(stats.clone()))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The tasks that send the copies of a worker. A task may outlive its request and the configuration snapshot.
#[derive(Debug, Clone, Default)]
pub struct MirrorTasks(pub(super) TaskTracker);

impl MirrorTasks {
    /// Wait for the copies in flight until `deadline`. Return the number of remaining copies.
    pub async fn drain(&self, deadline: Instant) -> usize {
        self.0.close();
        match timeout_at(deadline, self.0.wait()).await {
            Ok(()) => 0,
            Err(_) => self.0.len(),
        }
    }
}

/// Budget for the bodies of all copies of the process. The size of the budget is a quarter of `server.max_buffered` in
/// the current configuration.
#[derive(Debug)]
pub struct MirrorBudget(pub(super) Arc<BufferBudget>);

impl Default for MirrorBudget {
    fn default() -> Self {
        MirrorBudget(Arc::new(BufferBudget::new(0)))
    }
}
