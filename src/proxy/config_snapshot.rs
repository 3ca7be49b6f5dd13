//! The compiled configuration of a worker, with its upstream connections and metrics.

use std::sync::Arc;

use http::HeaderValue;
use tokio_util::sync::CancellationToken;

use crate::proxy::metrics::{RequestMetrics, WorkerMetrics};
use crate::proxy::mirror_state::MirrorTasks;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::upstream::Upstream;
use crate::upstream::cluster::UpstreamCluster;

/// A configuration with the worker's upstream connections and metrics. The metrics have the same indices as the routes
/// and upstreams of the configuration. A reload replaces the whole snapshot.
#[derive(Debug)]
pub(super) struct ConfigSnapshot {
    pub(super) config: Arc<CompiledConfig>,
    pub(super) upstreams: Vec<Arc<Upstream>>,
    pub(super) metrics: WorkerMetrics,
    /// A copy of [`RouteLimits::policy_header`](crate::snapshot::routes::RouteLimits::policy_header) of each route. Each
    /// response changes its reference count, and workers must not contend for it.
    policy_headers: Vec<Option<HeaderValue>>,
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
        let policy_headers = copy_policy_headers(&config);
        ConfigSnapshot { config, upstreams, metrics, policy_headers, mirror_tasks: MirrorTasks::default(), stopping }
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
        let policy_headers = copy_policy_headers(&config);
        let (mirror_tasks, stopping) = (previous.mirror_tasks.clone(), previous.stopping.clone());
        ConfigSnapshot { config, upstreams, metrics, policy_headers, mirror_tasks, stopping }
    }

    /// Return `RateLimit-Policy` of a route.
    pub(super) fn policy_header(&self, route: &Route) -> Option<&HeaderValue> {
        self.policy_headers.get(route.index)?.as_ref()
    }

    /// Return whether load balancers should send requests to this gateway.
    pub(super) fn is_ready(&self) -> bool {
        !self.stopping.is_cancelled() && self.config.is_complete()
    }
}

fn copy_policy_headers(config: &CompiledConfig) -> Vec<Option<HeaderValue>> {
    let copy = |value: &HeaderValue| HeaderValue::from_bytes(value.as_bytes()).ok();
    config.routes.iter().map(|route| route.rate_limits.policy_header.as_ref().and_then(copy)).collect()
}
