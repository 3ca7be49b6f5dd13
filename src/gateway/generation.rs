//! What one worker serves requests with: a configuration and what belongs to it by index, swapped as a whole.

use std::sync::Arc;

use super::meters::{RequestMetrics, WorkerMetrics};
use crate::runtime::CompiledConfig;
use crate::upstream::Upstream;
use crate::upstream::fleet::UpstreamCluster;

/// A configuration, with the worker's own connections and counts.
#[derive(Debug)]
pub(super) struct ConfigSnapshot {
    pub(super) runtime: Arc<CompiledConfig>,
    pub(super) upstreams: Vec<Arc<Upstream>>,
    pub(super) metrics: WorkerMetrics,
}

impl ConfigSnapshot {
    /// The first one.
    pub(super) fn new(
        runtime: Arc<CompiledConfig>,
        clusters: &[Arc<UpstreamCluster>],
        request_metrics: &RequestMetrics,
        worker: usize,
    ) -> Self {
        let metrics = WorkerMetrics::new(request_metrics, &runtime, worker);
        let upstreams = clusters.iter().cloned().map(Upstream::new).map(Arc::new).collect();
        ConfigSnapshot { runtime, upstreams, metrics }
    }

    /// The one that takes the place of another, with its connections to upstreams that are still there.
    pub(super) fn carry_over(
        previous: &ConfigSnapshot,
        runtime: Arc<CompiledConfig>,
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
        let metrics = WorkerMetrics::new(request_metrics, &runtime, worker);
        ConfigSnapshot { upstreams: clusters.iter().map(upstream).collect(), runtime, metrics }
    }
}
