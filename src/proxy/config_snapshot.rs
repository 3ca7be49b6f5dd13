//! The compiled configuration of a worker, with its upstream connections and metrics.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::proxy::metrics::{RequestMetrics, WorkerMetrics};
use crate::proxy::mirror_state::MirrorTasks;
use crate::snapshot::CompiledConfig;
use crate::upstream::Upstream;
use crate::upstream::cluster::UpstreamCluster;

/// A configuration with the worker's upstream connections and metrics. The metrics have the same indices as the routes
/// and upstreams of the configuration. A reload replaces the whole snapshot.
#[derive(Debug)]
pub(super) struct ConfigSnapshot {
    pub(super) config: Arc<CompiledConfig>,
    pub(super) upstreams: Vec<Arc<Upstream>>,
    pub(super) metrics: WorkerMetrics,
    pub(super) mirror_tasks: MirrorTasks,
    /// Cancelled when load balancers must stop sending requests to this gateway.
    stopping: CancellationToken,
}

impl ConfigSnapshot {
    /// Create the snapshot of the configuration with which the worker starts.
    pub(super) fn new(
        config: Arc<CompiledConfig>,
        clusters: &[Arc<UpstreamCluster>],
        request_metrics: &RequestMetrics,
        worker: usize,
        stopping: CancellationToken,
    ) -> Self {
        let metrics = WorkerMetrics::new(request_metrics, &config, worker);
        let upstreams = clusters.iter().cloned().map(Upstream::new).map(Arc::new).collect();
        ConfigSnapshot { config, upstreams, metrics, mirror_tasks: MirrorTasks::default(), stopping }
    }

    /// Create the snapshot that replaces `previous`. Take over the connections of `previous` to upstreams that still
    /// exist.
    pub(super) fn carry_over(
        previous: &ConfigSnapshot,
        config: Arc<CompiledConfig>,
        clusters: &[Arc<UpstreamCluster>],
        request_metrics: &RequestMetrics,
        worker: usize,
    ) -> Self {
        let upstream = |cluster: &Arc<UpstreamCluster>| {
            let existing = previous.upstreams.iter().find(|upstream| upstream.name() == &*cluster.settings.name);
            match existing {
                Some(existing) if existing.is_for(cluster) => existing.clone(),
                Some(existing) => Arc::new(Upstream::from_previous(cluster.clone(), existing)),
                None => Arc::new(Upstream::new(cluster.clone())),
            }
        };
        let metrics = WorkerMetrics::new(request_metrics, &config, worker);
        let upstreams = clusters.iter().map(upstream).collect();
        let ConfigSnapshot { mirror_tasks, stopping, .. } = previous;
        ConfigSnapshot { upstreams, config, metrics, mirror_tasks: mirror_tasks.clone(), stopping: stopping.clone() }
    }

    /// Return whether load balancers should send requests to this gateway.
    pub(super) fn is_ready(&self) -> bool {
        !self.stopping.is_cancelled() && self.config.is_complete()
    }
}
