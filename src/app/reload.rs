//! Configuration reload: compile the complete new configuration, then replace the active configuration with it. If the
//! new configuration is invalid, the active configuration does not change.

pub(crate) mod file_watcher;

use std::hash::RandomState;
use std::io;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admin::current::{ActiveConfig, ConfigChange, ConfigHandle, ReloadCause, ReloadRequest};
use crate::admin::state::ProcessState;
use crate::app::maintenance::MaintenanceThread;
use crate::app::reload::file_watcher::{FileWatcher, watch_files};
use crate::app::{Lint, hot_restart, log_warnings};
use crate::clock;
use crate::config::diff;
use crate::config::diff::Difference;
use crate::config::error::{ConfigError, FileIssues};
use crate::config::file::UnsetVariables;
use crate::config::include::ConfigFiles;
use crate::config::secrets::without_hashes;
use crate::identity::auth::ProviderKind;
use crate::identity::forward::ForwardProvider;
use crate::proxy::Gateway;
use crate::snapshot::listeners::Listener;
use crate::snapshot::remote_auth::internal_name;
use crate::snapshot::{CompiledConfig, notify};
use crate::tls::Certificate;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::settings::UpstreamSettings;

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

/// The gateways of all workers. A reload passes the new configuration to each of them.
#[derive(Debug, Default)]
pub(super) struct WorkerGateways(Mutex<Vec<Arc<Gateway>>>);

/// The reload thread. It handles one reload request at a time.
#[derive(Debug)]
pub(super) struct Reloader {
    pub(super) state: Arc<ProcessState>,
    pub(super) requests: Receiver<ReloadRequest>,
    pub(super) gateways: Arc<WorkerGateways>,
    pub(super) maintenance: MaintenanceThread,
    /// Watches the files of the active configuration.
    pub(super) watcher: Option<FileWatcher>,
    /// Returns the warnings about a configuration, which the log shows after each reload.
    pub(super) lint: Lint,
    pub(super) stop: CancellationToken,
}

/// The result of a successful reload.
struct Applied {
    change: ConfigChange,
    /// The differences from the previous configuration.
    differences: Vec<Difference>,
    /// The warnings about the new configuration, by file.
    warnings: Vec<FileIssues>,
}

impl WorkerGateways {
    /// Create and add a worker's gateway. The lock ensures that a concurrent reload also updates the new gateway.
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
            // One reload is sufficient for all requests that are already queued.
            let requests: Vec<_> = std::iter::once(first).chain(self.requests.try_iter()).collect();
            hot_restart::notify_reloading();
            let result = self.apply().map_err(|error| error.to_string());
            hot_restart::notify_reloaded();
            let path = self.state.config_handle.active().config.files.main.path.display().to_string();
            match &result {
                Ok(applied) => self.log_success(&path, applied),
                Err(error) => {
                    self.state.config_handle.record_failure(error);
                    warn!(file = %path, %error, "cannot reload the configuration: the active configuration stays in force");
                    // Also watch the files that the rejected configuration includes. The gateway then notices when the
                    // operator corrects them.
                    let directories = self.state.config_handle.last_attempt().directories;
                    if let Some(watcher) = &mut self.watcher {
                        watcher.add_directories(directories);
                        // If the reload was requested, also reload the files that the active configuration refers
                        // to, such as certificate files, although the new configuration is invalid.
                        if is_requested(&requests) {
                            watcher.report_all();
                        }
                    }
                }
            }
            for ReloadRequest { reply, .. } in requests {
                // Ignore a send error, which means that the receiver was dropped.
                let _ = reply.send(result.as_ref().map(|applied| applied.change.clone()).map_err(String::clone));
            }
        }
    }

    fn log_success(&self, path: &str, applied: &Applied) {
        let config = &self.state.config_handle.active().config;
        let routes = config.routes.len();
        let limits = config.limits.len();
        let upstreams = config.upstreams.len();
        // Omit the field if no key has changed.
        let changed = Some(diff::summary(&applied.differences)).filter(|changed| !changed.is_empty());
        info!(file = %path, routes, limits, upstreams, changed, "configuration reloaded");
        self.state.config_handle.set_warnings(log_warnings(&applied.warnings));
    }

    /// Load and activate the configuration.
    fn apply(&mut self) -> Result<Applied, ReloadError> {
        if self.stop.is_cancelled() {
            return Err(ReloadError::Stopping);
        }
        let previous = self.state.config_handle.active();
        let path = &previous.config.files.main.path;
        if let Ok(files) = ConfigFiles::read(path, &|name| std::env::var_os(name)) {
            self.state.config_handle.record_attempt(files);
        }
        let environment = |name: &str| std::env::var_os(name);
        let (mut config, file) = CompiledConfig::load_with_source(path, &environment, UnsetVariables::Error)?;
        if let Some(files) = self.state.config_handle.received.files() {
            config.add_received(&files)?;
        }
        let now = Duration::from_micros(clock::unix_us());
        config.carry_over(&previous.config, now)?;
        let warnings = (self.lint)(&file, &config, now);
        let hasher = RandomState::new();
        let [old, new] = [&*previous.config, &config].map(|config| config.hashed_secrets(&hasher));
        let differences: Vec<_> =
            diff::differences(&old, &new).into_iter().map(|difference| difference.map_texts(without_hashes)).collect();
        let config = Arc::new(config);
        let clusters: Arc<[_]> =
            config.upstreams.iter().map(|settings| carry_over_cluster(settings, &previous)).collect();
        // Resolve host names and fetch JWK Sets before the new configuration handles the first request.
        self.maintenance.set_config(&config, &clusters)?;
        self.state.connection_limits.resize(&config.server);
        let change = {
            let gateways = self.gateways.lock();
            gateways.iter().for_each(|gateway| gateway.apply_config(config.clone(), &clusters));
            // The workers share the metrics.
            if let Some(gateway) = gateways.first() {
                gateway.drop_unused_metrics();
            }
            let texts = differences.iter().map(ToString::to_string).collect();
            self.state.config_handle.activate(config, clusters, texts)
        };
        self.state.overrides.recompile();
        self.watcher = watch_files(&self.state.config_handle);
        Ok(Applied { change, differences, warnings })
    }
}

/// Return the cluster of an upstream. If its settings have not changed, keep the previous cluster. Otherwise, carry
/// over the state of its endpoints.
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

// === Carry-over: reject changes that require a restart, and keep the state of equal parts ===

/// The reason why a valid configuration cannot replace the active one.
#[derive(Debug, thiserror::Error)]
pub enum CarryOverError {
    /// The values of these keys differ, but the gateway can apply the new values only after a restart.
    #[error("{} cannot change while the gateway runs: restart it, or keep {} unchanged", .0.join(", "), pronoun(.0))]
    RestartRequired(Vec<String>),
    /// New certificates have expired or are not valid yet. Each text contains the file and the reason.
    #[error("{}", .0.join("\n"))]
    InvalidCertificates(Vec<String>),
}

fn pronoun(keys: &[String]) -> &'static str {
    if keys.len() == 1 { "it" } else { "them" }
}

impl CompiledConfig {
    /// Carry over the state of parts that are equal in the previous configuration, such as upstream connections and TLS
    /// sessions.
    ///
    /// # Errors
    /// A changed key requires a restart, or a new certificate has expired or is not valid yet.
    pub fn carry_over(&mut self, previous: &CompiledConfig, now: Duration) -> Result<(), CarryOverError> {
        let changes = previous.restart_only_keys.changed_keys(&self.restart_only_keys);
        if !changes.is_empty() {
            return Err(CarryOverError::RestartRequired(changes));
        }
        let expired = self.expired_certificates(previous, now);
        if !expired.is_empty() {
            return Err(CarryOverError::InvalidCertificates(expired));
        }
        if self.client_ip == previous.client_ip {
            self.client_ip = previous.client_ip.clone();
        }
        if let (Some(acme), Some(before)) = (&mut self.acme, &previous.acme) {
            acme.certificates = before.certificates.clone();
            self.listeners
                .iter()
                .filter_map(|listener| listener.tls.as_ref())
                .for_each(|tls| tls.tls.use_managed(&acme.certificates));
        }
        for (listener, previous) in self.listeners.iter().zip(&previous.listeners) {
            if let (Some(tls), Some(before)) = (&listener.tls, &previous.tls) {
                tls.use_sessions_of(before);
            }
        }
        self.store.gateways.set_counted(previous.store.gateways.counted());
        self.reuse_upstreams(previous);
        self.reuse_verified(previous);
        Ok(())
    }

    /// Return errors for certificates that have expired or are not valid yet. Certificates that the previous
    /// configuration already uses are exempt.
    fn expired_certificates(&self, previous: &CompiledConfig, now: Duration) -> Vec<String> {
        let shown: Vec<_> = previous.certificates().collect();
        let own = self.listeners.iter().filter_map(|listener| listener.tls.as_ref());
        let own = own.flat_map(|tls| tls.tls.certificates().zip(&tls.certificates));
        let own = own.filter(|(certificate, _)| {
            !shown.iter().any(|shown| shown.certified_key.cert == certificate.certified_key.cert)
        });
        own.filter_map(|(certificate, [file, _])| {
            let error = certificate.check_validity(now.as_secs() as i64).err()?;
            Some(format!("{}: {error}", file.path.display()))
        })
        .collect()
    }

    fn certificates(&self) -> impl Iterator<Item = Arc<Certificate>> {
        let tls = self.listeners.iter().filter_map(|Listener { tls, .. }| tls.as_ref());
        tls.flat_map(|tls| tls.tls.certificates())
    }

    /// Carry over the state of providers with the same name. The keys of a JWK Set are kept if its URL and `ca` are the
    /// same. Verified users are kept if the users file is the same. For forward authentication, the cached admissions
    /// of the authentication server are kept if all settings are the same, including those of its internal upstream.
    /// The index of this upstream is no setting, because it changes with the number of other upstreams.
    fn reuse_verified(&mut self, previous: &CompiledConfig) {
        for source in &self.auth.key_urls {
            if let Some(known) = previous.auth.key_urls.iter().find(|known| known.name == source.name) {
                source.keys.carry_over(&known.keys, known.url == source.url && known.ca == source.ca);
            }
        }
        let upstreams = (&self.upstreams, &previous.upstreams);
        let has_same_server = |forward: &ForwardProvider, known: &ForwardProvider| {
            upstreams.0.get(forward.upstream) == upstreams.1.get(known.upstream)
        };
        for provider in &mut self.auth.providers {
            let Some(known) = previous.auth.providers.iter().find(|known| known.name == provider.name) else {
                continue;
            };
            match &mut provider.kind {
                ProviderKind::Basic(basic) => {
                    if let ProviderKind::Basic(known) = &known.kind
                        && basic.verifier.has_same_users(&known.verifier)
                    {
                        basic.verifier = known.verifier.clone();
                    }
                }
                ProviderKind::Forward(forward) => {
                    if let ProviderKind::Forward(known) = &known.kind
                        && forward.settings == known.settings
                        && has_same_server(forward, known)
                    {
                        forward.cache.clone_from(&known.cache);
                    }
                }
                ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::ClientCert => {}
            }
        }
    }

    fn reuse_upstreams(&mut self, previous: &CompiledConfig) {
        for tls in &mut self.upstream_tls {
            let Some(known) = previous.upstream_tls.iter().find(|known| tls.is_same_as(known)) else { continue };
            *tls = known.clone();
            let settings = self.upstreams.iter_mut().find(|settings| settings.name == tls.name);
            // The new settings are not shared yet, so `get_mut` cannot fail.
            if let Some(settings) = settings.and_then(Arc::get_mut) {
                tls.attach_tls(settings);
            }
            for source in &mut self.auth.key_urls {
                if *tls.name == *internal_name(&source.name)
                    && let Some(endpoint) = &mut source.tls
                {
                    tls.attach_to(endpoint);
                }
            }
            for (name, destination) in &mut self.event_destinations {
                if *tls.name == *notify::internal_name(name)
                    && let Some(endpoint) = destination.tls_mut()
                {
                    tls.attach_to(endpoint);
                }
            }
        }
        for settings in &mut self.upstreams {
            let same = |known: &&Arc<UpstreamSettings>| known == &settings;
            if let Some(known) = previous.upstreams.iter().find(same) {
                *settings = known.clone();
                continue;
            }
            let Some(access) = &settings.google else { continue };
            let mut accounts = previous.upstreams.iter().filter_map(|known| known.google.as_ref());
            if let Some(known) = accounts.find(|known| known.account == access.account) {
                access.account.carry_over(&known.account);
            }
        }
    }
}
