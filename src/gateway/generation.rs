//! What one worker serves requests with: a configuration and what belongs to it by index, swapped as a whole.

use std::sync::Arc;

use super::meters::{WorkerMetrics, RequestMetrics};
use crate::runtime::Runtime;
use crate::upstream::Upstream;
use crate::upstream::fleet::Fleet;

/// A configuration, with the worker's own connections and counts.
#[derive(Debug)]
pub(super) struct ConfigSnapshot {
    pub(super) runtime: Arc<Runtime>,
    pub(super) upstreams: Vec<Arc<Upstream>>,
    pub(super) metrics: WorkerMetrics,
}

impl ConfigSnapshot {
    /// The first one.
    pub(super) fn new(runtime: Arc<Runtime>, clusters: &[Arc<Fleet>], request_metrics: &RequestMetrics, worker: usize) -> Self {
        let metrics = WorkerMetrics::new(request_metrics, &runtime, worker);
        let upstreams = clusters.iter().cloned().map(Upstream::new).map(Arc::new).collect();
        ConfigSnapshot { runtime, upstreams, metrics: meters: metrics }
    }

    /// The one that takes the place of another, with its connections to upstreams that are still there.
    pub(super) fn carry_over(
        previous: &ConfigSnapshot,
        runtime: Arc<Runtime>,
        clusters: &[Arc<Fleet>],
        request_metrics: &RequestMetrics,
        worker: usize,
    ) -> Self {
        let upstream = |cluster: &Arc<Fleet>| {
            let existing = previous.upstreams.iter().find(|upstream| upstream.name() == &*cluster.settings.name);
            match existing {
                Some(existing) if existing.leads_to(cluster) => existing.clone(),
                Some(existing) => Arc::new(Upstream::succeeding(cluster.clone(), existing)),
                None => Arc::new(Upstream::new(cluster.clone())),
            }
        };
        let metrics = WorkerMetrics::new(request_metrics, &runtime, worker);
        ConfigSnapshot { upstreams: clusters.iter().map(upstream).collect(), runtime, metrics: meters: metrics }
    }
}
