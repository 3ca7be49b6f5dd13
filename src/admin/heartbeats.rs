//! Heartbeats of the workers. They show whether the workers still run their tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::clock::{elapsed_since, monotonic, note_time};

/// Interval of the heartbeats of a worker.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time without a heartbeat after which a worker is stalled. The work of no request, reload or handshake takes as long.
pub const STALLED_AFTER: Duration = Duration::from_secs(10);

/// Value of a worker that has ended.
const ENDED: u64 = u64::MAX;

/// The time of the last heartbeat of each worker.
#[derive(Debug)]
pub struct Heartbeats {
    created_at: Instant,
    /// Time of the last heartbeat in ms since `created_at`, or [`ENDED`].
    last: Box<[AtomicU64]>,
}

/// The heartbeat of one worker. If it is dropped, the worker has ended.
struct Heartbeat {
    heartbeats: Arc<Heartbeats>,
    worker: usize,
}

impl Heartbeats {
    /// Create the heartbeats of workers that start now.
    pub fn new(workers: usize) -> Self {
        Heartbeats { created_at: monotonic(), last: (0..workers).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Beat until the runtime of the worker ends and drops this future.
    pub async fn beat(self: Arc<Self>, worker: usize) {
        let heart = Heartbeat { heartbeats: self, worker };
        loop {
            heart.set(heart.heartbeats.now_ms());
            note_time();
            sleep(INTERVAL).await;
        }
    }

    /// Return the time since the last heartbeat of each worker. Zero for a worker that has ended.
    pub fn ages(&self) -> impl Iterator<Item = Duration> {
        let now = self.now_ms();
        let age = move |last: u64| Duration::from_millis(if last == ENDED { 0 } else { now.saturating_sub(last) });
        self.last.iter().map(move |last| age(last.load(Ordering::Relaxed)))
    }

    /// Return the index of a worker that is stalled, and the time since its last heartbeat.
    pub fn stalled(&self) -> Option<StalledWorker> {
        let mut ages = self.ages().enumerate().map(|(worker, age)| StalledWorker { worker, age });
        ages.find(|stalled| stalled.age > STALLED_AFTER)
    }

    fn now_ms(&self) -> u64 {
        elapsed_since(self.created_at).as_millis() as u64
    }
}

/// A worker that has had no heartbeat for [`STALLED_AFTER`].
#[derive(Debug, Clone, Copy)]
pub struct StalledWorker {
    /// Index of the worker.
    pub worker: usize,
    /// Time since its last heartbeat.
    pub age: Duration,
}

impl Heartbeat {
    fn set(&self, value: u64) {
        if let Some(last) = self.heartbeats.last.get(self.worker) {
            last.store(value, Ordering::Relaxed);
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.set(ENDED);
    }
}
