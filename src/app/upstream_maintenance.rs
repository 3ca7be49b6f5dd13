//! What is done once for all workers, on a thread of its own: a worker that is busy says nothing about servers.

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
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::dns::{DnsCache, DnsResolver};
use crate::upstream::health;

/// For so long the addresses of upstreams are waited for. Those that have none by then are 503 until they have.
const FIRST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

type Clusters = Arc<[Arc<UpstreamCluster>]>;

/// Looks up the names of upstreams and checks their health.
#[derive(Debug)]
pub(super) struct MaintenanceThread(UnboundedSender<(Clusters, mpsc::Sender<Infallible>)>);

/// What is being done.
#[derive(Default)]
struct MaintenanceTasks {
    /// The fleets whose names are looked up, and the look-ups.
    lookups: (Vec<Arc<UpstreamCluster>>, Option<AbortHandle>),
    health_checks: Vec<(Arc<UpstreamCluster>, AbortHandle)>,
}

impl MaintenanceThread {
    /// Begins with nothing to do.
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

    /// Attends to these fleets from now on, and to no others. Comes back when their names have been looked up once.
    pub(super) fn set_clusters(&self, clusters: &Clusters) -> io::Result<()> {
        let (first, looked_up) = mpsc::channel();
        self.0.send((clusters.clone(), first)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        // Nothing is ever sent: it is over when all who could are gone, or when it takes too long.
        let _ = looked_up.recv_timeout(FIRST_LOOKUP_TIMEOUT);
        Ok(())
    }
}

async fn run(mut next: UnboundedReceiver<(Clusters, mpsc::Sender<Infallible>)>) {
    let mut tasks = MaintenanceTasks::default();
    while let Some((fleets, first)) = next.recv().await {
        tasks.update(&fleets, first);
    }
}

impl MaintenanceTasks {
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
