//! Reads the configuration again while the gateway runs: the new one is compiled as a whole and takes effect at once, or
//! the old one stays in force.

use std::io;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::background::Background;
use super::service;
use crate::config::error::ConfigError;
use crate::gateway::Gateway;
use crate::limit::clock;
use crate::reload::configuration::{Cause, Configuration, Request, Running};
use crate::reload::follow;
use crate::runtime::{Runtime, Unfit};
use crate::server::connections::ConnectionLimits;
use crate::upstream::fleet::Fleet;
use crate::upstream::settings::UpstreamSettings;
use crate::watch::{Snapshot, Watcher};
use crate::words::pluralize;

/// Why a configuration does not take effect.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Unfit(#[from] Unfit),
    #[error("its upstreams cannot be attended to: {0}")]
    Background(#[from] io::Error),
    #[error("the gateway is stopping")]
    Stopping,
}

/// The gateways of all workers.
#[derive(Debug, Default)]
pub(super) struct Roster(Mutex<Vec<Arc<Gateway>>>);

/// What takes part in a reload.
#[derive(Debug)]
pub(super) struct Renewal {
    pub(super) configuration: Arc<Configuration>,
    pub(super) requests: Receiver<Request>,
    pub(super) roster: Arc<Roster>,
    pub(super) background: Background,
    pub(super) connections: Arc<ConnectionLimits>,
    /// Follows the files of what is in force.
    pub(super) watcher: Option<Watcher>,
    pub(super) stop: CancellationToken,
}

impl Roster {
    /// Adds the gateway of a worker, which serves what is in force.
    pub(super) fn enrol(
        &self,
        configuration: &Configuration,
        gateway: impl FnOnce(&Running) -> Gateway,
    ) -> Arc<Gateway> {
        let mut all = self.lock();
        let gateway = Arc::new(gateway(&configuration.running()));
        all.push(gateway.clone());
        gateway
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Gateway>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Renewal {
    /// Does what is asked for, as long as somebody may ask.
    pub(super) fn run(mut self) {
        while let Ok(first) = self.requests.recv() {
            // Whoever has asked by now wants what is there now.
            let asked: Vec<_> = std::iter::once(first).chain(self.requests.try_iter()).collect();
            service::reloads();
            let result = self.renew().map_err(|refusal| refusal.to_string());
            service::has_reloaded();
            let path = self.configuration.running().runtime.file.path.display().to_string();
            match &result {
                Ok(()) => self.tell(&path),
                Err(error) => {
                    self.configuration.refuse(error);
                    warn!("{path} is not used, the configuration before stays in force:\n{error}");
                    if let Some(watcher) = self.watcher.as_ref().filter(|_| demanded(&asked)) {
                        // What of the other files is good counts all the same.
                        watcher.look_again();
                    }
                }
            }
            for Request { reply, .. } in asked {
                // Who has gone does not want to know.
                let _ = reply.send(result.clone());
            }
        }
    }

    fn tell(&self, path: &str) {
        let runtime = &self.configuration.running().runtime;
        let routes = pluralize(runtime.routes.len() as u64, "route");
        let limits = pluralize(runtime.limits.len() as u64, "limit");
        let upstreams = pluralize(runtime.upstreams.len() as u64, "upstream");
        info!("reloaded {path}: {routes}, {limits}, {upstreams}");
        for (_, warning) in runtime.warnings(Duration::from_micros(clock::unix_us())) {
            warn!("{warning}");
        }
    }

    fn renew(&mut self) -> Result<(), Refusal> {
        if self.stop.is_cancelled() {
            return Err(Refusal::Stopping);
        }
        let before = self.configuration.running();
        let path = &before.runtime.file.path;
        if let Ok(Snapshot { content, .. }) = Snapshot::read(path) {
            self.configuration.attempt(&content);
        }
        let mut runtime = Runtime::load(path, &|name| std::env::var(name).ok())?;
        runtime.succeed(&before.runtime, Duration::from_micros(clock::unix_us()))?;
        let runtime = Arc::new(runtime);
        let fleets: Arc<[_]> = runtime.upstreams.iter().map(|settings| succeed(settings, &before)).collect();
        // Before the first request for them.
        self.background.attend(&fleets)?;
        self.connections.resize(&runtime.server);
        {
            let gateways = self.roster.lock();
            gateways.iter().for_each(|gateway| gateway.apply_config(runtime.clone(), &fleets));
            self.configuration.replace(runtime, fleets);
        }
        self.watcher = follow(&self.configuration);
        Ok(())
    }
}

/// The fleet of an upstream, with what is known of its servers.
fn succeed(settings: &Arc<UpstreamSettings>, before: &Running) -> Arc<Fleet> {
    match before.fleets.iter().find(|fleet| fleet.settings.name == settings.name) {
        Some(fleet) if Arc::ptr_eq(&fleet.settings, settings) => fleet.clone(),
        Some(fleet) => Arc::new(Fleet::succeeding(settings.clone(), fleet)),
        None => Arc::new(Fleet::new(settings.clone())),
    }
}

fn demanded(asked: &[Request]) -> bool {
    asked.iter().any(|request| request.cause == Cause::Demand)
}
