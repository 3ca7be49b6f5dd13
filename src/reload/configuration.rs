//! The configuration in force, who wants it read again, and how that went.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::oneshot;

use crate::limit::clock;
use crate::runtime::Runtime;
use crate::upstream::fleet::Fleet;

/// What the process serves.
#[derive(Debug)]
pub struct Running {
    /// The configuration.
    pub runtime: Arc<Runtime>,
    /// Its upstreams, in its order.
    pub fleets: Arc<[Arc<Fleet>]>,
    /// In force since, µs since the Unix epoch.
    pub since_us: u64,
}

/// Why the configuration is to be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its file has changed.
    Change,
    /// Somebody asks: all files that it names are to be read again, too.
    Demand,
}

/// Somebody wants it to be read again.
#[derive(Debug)]
pub struct Request {
    /// Why.
    pub cause: Cause,
    /// Who waits for what becomes of it.
    pub reply: oneshot::Sender<Result<(), String>>,
}

/// Why and when the last reload failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// In full.
    pub error: String,
    /// µs since the Unix epoch.
    pub at_us: u64,
}

/// The configuration of a process.
#[derive(Debug)]
pub struct Configuration {
    running: ArcSwap<Running>,
    requests: Sender<Request>,
    failure: Mutex<Option<Failure>>,
    /// The content of its file at the last attempt.
    tried: Mutex<Vec<u8>>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

impl Configuration {
    /// Of a process that begins, and what it is asked for.
    pub fn new(runtime: Arc<Runtime>) -> (Self, Receiver<Request>) {
        let fleets = runtime.upstreams.iter().cloned().map(Fleet::new).map(Arc::new).collect();
        let tried = Mutex::new(runtime.file.content.clone());
        let (requests, asked) = channel();
        let running = ArcSwap::from_pointee(Running { runtime, fleets, since_us: clock::unix_us() });
        let (failure, reloads, failures) = Default::default();
        (Configuration { running, requests, failure, tried, reloads, failures }, asked)
    }

    /// What is in force.
    pub fn running(&self) -> Arc<Running> {
        self.running.load_full()
    }

    /// Asks for a reload; the answer comes when it is done.
    pub fn reload(&self, cause: Cause) -> oneshot::Receiver<Result<(), String>> {
        let (reply, answer) = oneshot::channel();
        // Without anybody to do it, the answer is that there will be none.
        let _ = self.requests.send(Request { cause, reply });
        answer
    }

    /// Notes what is about to be tried.
    pub fn attempt(&self, content: &[u8]) {
        *lock(&self.tried) = content.to_vec();
    }

    /// Whether this was tried last.
    pub fn was_tried(&self, content: &[u8]) -> bool {
        *lock(&self.tried) == content
    }

    /// This is in force from now on.
    pub fn replace(&self, runtime: Arc<Runtime>, fleets: Arc<[Arc<Fleet>]>) {
        self.running.store(Arc::new(Running { runtime, fleets, since_us: clock::unix_us() }));
        self.reloads.fetch_add(1, Ordering::Relaxed);
        *lock(&self.failure) = None;
    }

    /// A reload has failed; what is in force stays.
    pub fn refuse(&self, error: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *lock(&self.failure) = Some(Failure { error: error.to_owned(), at_us: clock::unix_us() });
    }

    /// The last reload, if it failed.
    pub fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    /// Reloads that were done, and that failed.
    pub fn counts(&self) -> [u64; 2] {
        [&self.reloads, &self.failures].map(|count| count.load(Ordering::Relaxed))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
