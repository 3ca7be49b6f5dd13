//! Configuration reload: the new configuration is compiled completely, and then replaces the active one. If the new
//! configuration is invalid, the active configuration does not change.

pub(crate) mod carry_over;
pub(crate) mod file_watcher;
pub(crate) mod files;

use std::io;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::app::reload::carry_over::CarryOverError;
use crate::app::reload::file_watcher::FileWatcher;
use crate::app::reload::files::watch_files;
use crate::app::sd_notify;
use crate::app::upstream_maintenance::MaintenanceThread;
use crate::config::diff;
use crate::config::error::ConfigError;
use crate::config::include::ConfigFiles;
use crate::limiter::clock;
use crate::listener::connection_limit::ConnectionLimits;
use crate::proxy::Gateway;
use crate::snapshot::CompiledConfig;
use crate::snapshot::current::{ActiveConfig, ConfigChange, ConfigHandle, ReloadCause, ReloadRequest};
use crate::upstream::UpstreamSettings;
use crate::upstream::cluster::UpstreamCluster;

/// The reason why a reload failed.
#[derive(Debug, thiserror::Error)]
enum ReloadError {
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    CarryOver(#[from] CarryOverError),
    #[error("cannot start the DNS lookups and health checks of the upstreams: {0}")]
    Maintenance(#[from] io::Error),
    #[error("the gateway is stopping")]
    Stopping,
}

/// The gateways of all workers, which receive each new configuration.
#[derive(Debug, Default)]
pub(super) struct WorkerGateways(Mutex<Vec<Arc<Gateway>>>);

/// The reload thread: handles reload requests one at a time.
#[derive(Debug)]
pub(super) struct Reloader {
    pub(super) config_handle: Arc<ConfigHandle>,
    pub(super) requests: Receiver<ReloadRequest>,
    pub(super) gateways: Arc<WorkerGateways>,
    pub(super) maintenance: MaintenanceThread,
    pub(super) connection_limits: Arc<ConnectionLimits>,
    /// Watches the files of the active configuration.
    pub(super) watcher: Option<FileWatcher>,
    pub(super) stop: CancellationToken,
}

impl WorkerGateways {
    /// Create and add the gateway of a worker. The lock ensures that a concurrent reload also updates the new gateway.
    pub(super) fn register(
        &self,
        configuration: &ConfigHandle,
        gateway: impl FnOnce(&ActiveConfig) -> Gateway,
    ) -> Arc<Gateway> {
        let mut all = self.lock();
        let gateway = Arc::new(gateway(&configuration.active()));
        all.push(gateway.clone());
        gateway
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Gateway>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reloader {
    /// Handle reload requests until all senders are dropped.
    pub(super) fn run(mut self) {
        while let Ok(first) = self.requests.recv() {
            // Reload once for all requests that are already queued.
            let requests: Vec<_> = std::iter::once(first).chain(self.requests.try_iter()).collect();
            sd_notify::notify_reloading();
            let result = self.apply().map_err(|error| error.to_string());
            sd_notify::notify_reloaded();
            let path = self.config_handle.active().config.files.main.path.display().to_string();
            match &result {
                Ok(_) => self.log_success(&path),
                Err(error) => {
                    self.config_handle.record_failure(error);
                    warn!(file = %path, %error, "cannot reload the configuration: the active configuration stays in force");
                    // Watch the files that the rejected configuration includes, so that the gateway detects a
                    // correction of the error.
                    let directories = self.config_handle.last_attempt().directories;
                    if self.watcher.as_ref().is_some_and(|watcher| !watcher.watches(&directories)) {
                        self.watcher = watch_files(&self.config_handle);
                    }
                    if let Some(watcher) = self.watcher.as_ref().filter(|_| is_requested(&requests)) {
                        // A requested reload also reads the other files, even if the configuration is invalid.
                        watcher.report_all();
                    }
                }
            }
            for ReloadRequest { reply, .. } in requests {
                // Ignore the error of `send`, which means that the receiver was dropped.
                let _ = reply.send(result.clone());
            }
        }
    }

    fn log_success(&self, path: &str) {
        let config = &self.config_handle.active().config;
        let routes = config.routes.len();
        let limits = config.limits.len();
        let upstreams = config.upstreams.len();
        info!(file = %path, routes, limits, upstreams, "configuration reloaded");
        for (_, warning) in config.warnings(Duration::from_micros(clock::unix_us())) {
            warn!("{warning}");
        }
    }

    fn apply(&mut self) -> Result<ConfigChange, ReloadError> {
        if self.stop.is_cancelled() {
            return Err(ReloadError::Stopping);
        }
        let previous = self.config_handle.active();
        let path = &previous.config.files.main.path;
        if let Ok(files) = ConfigFiles::read(path, &|name| std::env::var(name).ok()) {
            self.config_handle.record_attempt(files);
        }
        let mut config = CompiledConfig::load(path, &|name| std::env::var(name).ok())?;
        config.carry_over(&previous.config, Duration::from_micros(clock::unix_us()))?;
        let differences = diff::differences(&previous.config.redacted(), &config.redacted());
        let differences = differences.iter().map(ToString::to_string).collect();
        let config = Arc::new(config);
        let clusters: Arc<[_]> =
            config.upstreams.iter().map(|settings| carry_over_cluster(settings, &previous)).collect();
        // Resolve DNS names and fetch key sets before the first request uses them.
        self.maintenance.set_config(&config, &clusters)?;
        self.connection_limits.resize(&config.server);
        let change = {
            let gateways = self.gateways.lock();
            gateways.iter().for_each(|gateway| gateway.apply_config(config.clone(), &clusters));
            self.config_handle.activate(config, clusters, differences)
        };
        self.watcher = watch_files(&self.config_handle);
        Ok(change)
    }
}

/// Return the cluster of an upstream. Keep the previous cluster if its settings are the same. Otherwise carry over the
/// state of its endpoints.
fn carry_over_cluster(settings: &Arc<UpstreamSettings>, previous: &ActiveConfig) -> Arc<UpstreamCluster> {
    match previous.clusters.iter().find(|cluster| cluster.settings.name == settings.name) {
        Some(cluster) if Arc::ptr_eq(&cluster.settings, settings) => cluster.clone(),
        Some(cluster) => Arc::new(UpstreamCluster::from_previous(settings.clone(), cluster)),
        None => Arc::new(UpstreamCluster::new(settings.clone())),
    }
}

fn is_requested(requests: &[ReloadRequest]) -> bool {
    requests.iter().any(|request| request.cause == ReloadCause::Requested)
}
