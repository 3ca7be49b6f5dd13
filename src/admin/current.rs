//! The active configuration, requests to reload it, and the result of the last reload.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::oneshot;

use crate::clock;
use crate::config::include::ConfigFiles;
use crate::config::sources::FileSnapshot;
use crate::snapshot::CompiledConfig;
use crate::upstream::cluster::UpstreamCluster;

/// The active configuration, and the state that belongs to it.
#[derive(Debug)]
pub struct ActiveConfig {
    /// The compiled configuration.
    pub config: Arc<CompiledConfig>,
    /// Upstream clusters, in the same order as the upstreams in `config`.
    pub clusters: Arc<[Arc<UpstreamCluster>]>,
    /// Activation time in µs since the Unix epoch.
    pub active_since_us: u64,
    /// The changes of the last reload that changed at least one configuration key.
    pub last_change: ConfigChange,
}

/// The changes that a reload made.
#[derive(Debug, Clone, Default)]
pub struct ConfigChange {
    /// The differences, each as a sentence. Empty until a reload changes a key.
    pub differences: Arc<[String]>,
    /// Time of activation in µs since the Unix epoch. 0 until a reload changes a key.
    pub at_us: u64,
}

/// Result of a reload: the last change of the active configuration, or the full error report.
pub type ReloadResult = Result<ConfigChange, String>;

/// Cause of a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReloadCause {
    /// The configuration file, a file that it includes, or descriptors have changed.
    FileChanged,
    /// An administrator requested the reload. The gateway also rereads all other files that the configuration refers
    /// to.
    Requested,
}

/// Request for a reload.
#[derive(Debug)]
pub struct ReloadRequest {
    /// Cause of the reload.
    pub cause: ReloadCause,
    /// Channel that receives the result of the reload.
    pub reply: oneshot::Sender<ReloadResult>,
}

/// A failed reload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReloadFailure {
    /// The full error report.
    pub error: String,
    /// Time of the failure in µs since the Unix epoch.
    pub failed_at_us: u64,
}

/// Kind of a file that the configuration refers to. The gateway reloads such a file when its content changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileKind {
    /// Consumers and their API keys.
    Consumers,
    /// Users and the hashes of their passwords.
    Users,
    /// JWK Set.
    Jwks,
    /// Networks of access rules.
    Networks,
    /// Certificate of a listener, and its private key.
    Certificate,
    /// CA certificates that verify client certificates.
    ClientCa,
    /// Certificates and keys for the connections to an upstream.
    UpstreamTls,
}

impl FileKind {
    /// All kinds.
    pub const ALL: [FileKind; 7] = [
        FileKind::Consumers,
        FileKind::Users,
        FileKind::Jwks,
        FileKind::Networks,
        FileKind::Certificate,
        FileKind::ClientCa,
        FileKind::UpstreamTls,
    ];

    /// Return the value of the metric label `kind`.
    pub fn label(self) -> &'static str {
        match self {
            FileKind::Consumers => "consumers",
            FileKind::Users => "users",
            FileKind::Jwks => "jwks",
            FileKind::Networks => "networks",
            FileKind::Certificate => "certificate",
            FileKind::ClientCa => "client_ca",
            FileKind::UpstreamTls => "upstream_tls",
        }
    }
}

/// The descriptors that the management server of `[ratelimit] xds` has sent.
#[derive(Debug, Default)]
pub struct ReceivedDescriptors {
    files: Mutex<Option<Arc<[FileSnapshot]>>>,
    /// Whether there is a stream.
    pub is_connected: AtomicBool,
    /// Number of responses that are or were in use.
    pub accepted: AtomicU64,
    /// Number of responses that were rejected.
    pub rejected: AtomicU64,
}

impl ReceivedDescriptors {
    /// Return the descriptors as YAML. `None` before the first response.
    pub fn files(&self) -> Option<Arc<[FileSnapshot]>> {
        lock(&self.files).clone()
    }

    /// Set the descriptors that the next reload uses.
    pub fn set_files(&self, files: Option<Arc<[FileSnapshot]>>) {
        *lock(&self.files) = files;
    }
}

/// Gives access to the active configuration, and triggers reloads.
#[derive(Debug)]
pub struct ConfigHandle {
    /// The descriptors of the management server.
    pub received: ReceivedDescriptors,
    active: ArcSwap<ActiveConfig>,
    requests: Sender<ReloadRequest>,
    last_failure: Mutex<Option<ReloadFailure>>,
    /// Files whose newest content is not in use, because it is invalid or cannot be read.
    rejected_files: Mutex<BTreeMap<(FileKind, PathBuf), ReloadFailure>>,
    /// The configuration files as they were at the last attempt to load them.
    last_attempt: Mutex<ConfigFiles>,
    /// The warnings about the active configuration.
    warnings: Mutex<Arc<[String]>>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

impl ConfigHandle {
    /// Create the handle for the initial configuration. Also return the receiver for reload requests.
    pub fn new(config: Arc<CompiledConfig>) -> (Self, Receiver<ReloadRequest>) {
        let clusters = config.upstreams.iter().cloned().map(UpstreamCluster::new).map(Arc::new).collect();
        let last_attempt = Mutex::new(config.files.clone());
        let (requests, receiver) = channel();
        let active = ArcSwap::from_pointee(ActiveConfig {
            config,
            clusters,
            active_since_us: clock::unix_us(),
            last_change: ConfigChange::default(),
        });
        let (received, last_failure, rejected_files, warnings, reloads, failures) = Default::default();
        let handle = ConfigHandle {
            received,
            active,
            requests,
            last_failure,
            rejected_files,
            last_attempt,
            warnings,
            reloads,
            failures,
        };
        (handle, receiver)
    }

    /// Return the active configuration.
    pub fn active(&self) -> Arc<ActiveConfig> {
        self.active.load_full()
    }

    /// Request a reload. The result is sent to the returned receiver.
    pub fn reload(&self, cause: ReloadCause) -> oneshot::Receiver<ReloadResult> {
        let (reply, receiver) = oneshot::channel();
        // Ignore a send error, which means that the reload thread has ended. The caller notices it, because the reply
        // channel is closed.
        let _ = self.requests.send(ReloadRequest { cause, reply });
        receiver
    }

    /// Record the configuration files before an attempt to load them.
    pub fn record_attempt(&self, files: ConfigFiles) {
        *lock(&self.last_attempt) = files;
    }

    /// Return the configuration files as they were at the last attempt to load them.
    pub fn last_attempt(&self) -> ConfigFiles {
        lock(&self.last_attempt).clone()
    }

    /// Make a configuration active, and count a successful reload. `differences` contains the differences from the
    /// previous configuration.
    pub fn activate(
        &self,
        config: Arc<CompiledConfig>,
        clusters: Arc<[Arc<UpstreamCluster>]>,
        differences: Vec<String>,
    ) -> ConfigChange {
        let active_since_us = clock::unix_us();
        let last_change = if differences.is_empty() {
            self.active().last_change.clone()
        } else {
            ConfigChange { differences: differences.into(), at_us: active_since_us }
        };
        let active = ActiveConfig { config, clusters, active_since_us, last_change: last_change.clone() };
        self.active.store(Arc::new(active));
        self.reloads.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_failure) = None;
        // The new configuration has read all of its files.
        lock(&self.rejected_files).clear();
        last_change
    }

    /// Record a failed reload. The active configuration does not change.
    pub fn record_failure(&self, error: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_failure) = Some(ReloadFailure { error: error.to_owned(), failed_at_us: clock::unix_us() });
    }

    /// Return the failure of the last reload, or `None` if it succeeded.
    pub fn last_failure(&self) -> Option<ReloadFailure> {
        lock(&self.last_failure).clone()
    }

    /// Set the warnings about the active configuration.
    pub fn set_warnings(&self, warnings: Arc<[String]>) {
        *lock(&self.warnings) = warnings;
    }

    /// Return the warnings about the active configuration.
    pub fn warnings(&self) -> Arc<[String]> {
        lock(&self.warnings).clone()
    }

    /// Record whether the newest content of a file is in use.
    pub fn record_file(&self, kind: FileKind, path: &Path, result: Result<(), String>) {
        let mut rejected = lock(&self.rejected_files);
        match result {
            Ok(()) => rejected.remove(&(kind, path.to_owned())),
            Err(error) => {
                let failure = ReloadFailure { error, failed_at_us: clock::unix_us() };
                rejected.insert((kind, path.to_owned()), failure)
            }
        };
    }

    /// Return the files whose newest content is not in use, each with the reason.
    pub fn rejected_files(&self) -> BTreeMap<(FileKind, PathBuf), ReloadFailure> {
        lock(&self.rejected_files).clone()
    }

    /// Return the number of successful reloads and the number of failed reloads.
    pub fn reload_counts(&self) -> [u64; 2] {
        [&self.reloads, &self.failures].map(|count| count.load(Ordering::Relaxed))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
