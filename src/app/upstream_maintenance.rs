//! The maintenance thread performs DNS lookups and health checks of all upstreams, and fetches key sets of token
//! issuers, once for all workers. On a busy worker, health checks would run late and mark healthy endpoints as
//! unhealthy.

use std::convert::Infallible;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, thread};

use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use crate::app::AppError;
use crate::app::jwks_refresh;
use crate::snapshot::CompiledConfig;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::dns::{DnsCache, DnsResolver};
use crate::upstream::health;

/// Maximum time to wait for the first DNS lookup of new upstreams and for new key sets. After this time, requests to an
/// upstream without addresses get 503, and so do requests with tokens that cannot be verified yet.
const FIRST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

type Clusters = Arc<[Arc<UpstreamCluster>]>;

/// The clusters that the thread maintains from now on. The sender is dropped when every host has been looked up once.
type Maintained = (Arc<CompiledConfig>, Clusters, mpsc::Sender<Infallible>);

/// Handle of the maintenance thread.
#[derive(Debug)]
pub(super) struct MaintenanceThread(UnboundedSender<Maintained>);

/// The running tasks: DNS lookups, health checks and refreshes of key sets.
#[derive(Default)]
struct MaintenanceTasks {
    /// Clusters with DNS names, and the task that resolves the names.
    lookups: (Vec<Arc<UpstreamCluster>>, Option<AbortHandle>),
    health_checks: Vec<(Arc<UpstreamCluster>, AbortHandle)>,
    key_refreshes: Vec<AbortHandle>,
}

impl MaintenanceThread {
    /// Start the thread without clusters. The thread runs until `stop` is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(stop: CancellationToken) -> Result<(Self, JoinHandle<Result<(), AppError>>), AppError> {
        let (sender, clusters) = unbounded_channel();
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
            runtime.block_on(stop.run_until_cancelled(run(clusters)));
            Ok(())
        };
        let thread = thread::Builder::new().name("upstreams".to_owned()).spawn(run).map_err(AppError::Worker)?;
        Ok((MaintenanceThread(sender), thread))
    }

    /// Replace the maintained clusters and key sets. Return when all names have been resolved and unknown key sets have
    /// been fetched once, or after [`FIRST_LOOKUP_TIMEOUT`].
    ///
    /// # Errors
    /// The thread has ended.
    pub(super) fn set_config(&self, config: &Arc<CompiledConfig>, clusters: &Clusters) -> io::Result<()> {
        let (first, looked_up) = mpsc::channel();
        self.0.send((config.clone(), clusters.clone(), first)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        // Wait until all senders are dropped: each lookup drops its clone of the sender when it is done. No value is
        // ever sent.
        let _ = looked_up.recv_timeout(FIRST_LOOKUP_TIMEOUT);
        Ok(())
    }
}

async fn run(mut next: UnboundedReceiver<Maintained>) {
    let mut tasks = MaintenanceTasks::default();
    while let Some((config, clusters, first)) = next.recv().await {
        tasks.refresh_keys(&config, &first);
        tasks.update(&clusters, first);
    }
}

impl MaintenanceTasks {
    fn refresh_keys(&mut self, config: &Arc<CompiledConfig>, first: &mpsc::Sender<Infallible>) {
        self.key_refreshes.drain(..).for_each(|task| task.abort());
        for index in 0..config.auth.key_urls.len() {
            let refresh = jwks_refresh::refresh(config.clone(), index, first.clone());
            self.key_refreshes.push(tokio::spawn(refresh).abort_handle());
        }
    }

    fn update(&mut self, clusters: &Clusters, first: mpsc::Sender<Infallible>) {
        self.health_checks.retain(|(cluster, checks)| {
            let stays = contains(cluster, clusters);
            if !stays {
                checks.abort();
            }
            stays
        });
        for cluster in clusters.iter().filter(|cluster| cluster.settings.health.is_some()) {
            if !self.health_checks.iter().any(|(known, _)| Arc::ptr_eq(known, cluster)) {
                self.health_checks
                    .push((cluster.clone(), tokio::spawn(health::run_checks(cluster.clone())).abort_handle()));
            }
        }
        let named: Vec<_> = clusters.iter().filter(|cluster| cluster.settings.needs_dns()).cloned().collect();
        let (known, task) = &mut self.lookups;
        if named.len() == known.len() && named.iter().all(|cluster| contains(cluster, known)) {
            return;
        }
        if let Some(before) = task.take() {
            before.abort();
        }
        let names = DnsCache::new(&named);
        *task = Some(tokio::spawn(names.run(DnsResolver::System, first)).abort_handle());
        *known = named;
    }
}

fn contains(cluster: &Arc<UpstreamCluster>, clusters: &[Arc<UpstreamCluster>]) -> bool {
    clusters.iter().any(|other| Arc::ptr_eq(cluster, other))
}
