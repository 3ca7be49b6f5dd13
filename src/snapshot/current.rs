//! The configuration in force, who wants it read again, and how that went.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::oneshot;

use crate::limiter::clock;
use crate::snapshot::CompiledConfig;
use crate::upstream::cluster::UpstreamCluster;

/// What the process serves.
#[derive(Debug)]
pub struct ActiveConfig {
    /// The configuration.
    pub config: Arc<CompiledConfig>,
    /// Its upstreams, in its order.
    pub clusters: Arc<[Arc<UpstreamCluster>]>,
    /// In force since, µs since the Unix epoch.
    pub active_since_us: u64,
}

/// Why the configuration is to be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReloadCause {
    /// Its file has changed.
    FileChanged,
    /// Somebody asks: all files that it names are to be read again, too.
    Requested,
}

/// Somebody wants it to be read again.
#[derive(Debug)]
pub struct ReloadRequest {
    /// Why.
    pub cause: ReloadCause,
    /// Who waits for what becomes of it.
    pub reply: oneshot::Sender<Result<(), String>>,
}

/// Why and when the last reload failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReloadFailure {
    /// In full.
    pub error: String,
    /// µs since the Unix epoch.
    pub failed_at_us: u64,
}

/// The configuration of a process.
#[derive(Debug)]
pub struct ConfigHandle {
    active: ArcSwap<ActiveConfig>,
    requests: Sender<ReloadRequest>,
    last_failure: Mutex<Option<ReloadFailure>>,
    /// The content of its file at the last attempt.
    last_attempt: Mutex<Vec<u8>>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

impl ConfigHandle {
    /// Of a process that begins, and what it is asked for.
    pub fn new(config: Arc<CompiledConfig>) -> (Self, Receiver<ReloadRequest>) {
        let clusters = config.upstreams.iter().cloned().map(UpstreamCluster::new).map(Arc::new).collect();
        let last_attempt = Mutex::new(config.file.content.clone());
        let (requests, receiver) = channel();
        let active = ArcSwap::from_pointee(ActiveConfig { config, clusters, active_since_us: clock::unix_us() });
        let (last_failure, reloads, failures) = Default::default();
        (ConfigHandle { active, requests, last_failure, last_attempt, reloads, failures }, receiver)
    }

    /// What is in force.
    pub fn active(&self) -> Arc<ActiveConfig> {
        self.active.load_full()
    }

    /// Asks for a reload; the answer comes when it is done.
    pub fn reload(&self, cause: ReloadCause) -> oneshot::Receiver<Result<(), String>> {
        let (reply, receiver) = oneshot::channel();
        // Without anybody to do it, the answer is that there will be none.
        let _ = self.requests.send(ReloadRequest { cause, reply });
        receiver
    }

    /// Notes what is about to be tried.
    pub fn record_attempt(&self, content: &[u8]) {
        *lock(&self.last_attempt) = content.to_vec();
    }

    /// Whether this was tried last.
    pub fn is_last_attempt(&self, content: &[u8]) -> bool {
        *lock(&self.last_attempt) == content
    }

    /// This is in force from now on.
    pub fn activate(&self, config: Arc<CompiledConfig>, clusters: Arc<[Arc<UpstreamCluster>]>) {
        self.active.store(Arc::new(ActiveConfig { config, clusters, active_since_us: clock::unix_us() }));
        self.reloads.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_failure) = None;
    }

    /// A reload has failed; what is in force stays.
    pub fn record_failure(&self, error: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_failure) = Some(ReloadFailure { error: error.to_owned(), failed_at_us: clock::unix_us() });
    }

    /// The last reload, if it failed.
    pub fn last_failure(&self) -> Option<ReloadFailure> {
        lock(&self.last_failure).clone()
    }

    /// Reloads that were done, and that failed.
    pub fn reload_counts(&self) -> [u64; 2] {
        [&self.reloads, &self.failures].map(|count| count.load(Ordering::Relaxed))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
