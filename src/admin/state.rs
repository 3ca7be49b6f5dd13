//! What the operator's side reads: the counts and the states of a process.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics;
use crate::limiter::redis::circuit_breaker::CircuitBreaker;
use crate::limiter::redis::cluster::topology::ClusterMap;
use crate::listener::connection_limit::ConnectionLimits;
use crate::metrics::MetricFamily;
use crate::proxy::metrics::RequestMetrics;
use crate::snapshot::current::ConfigHandle;
use crate::telemetry::access_log::TelemetrySinks;

/// The parts of a process that can be looked at.
#[derive(Debug)]
pub struct AdminState {
    /// What the gateways count.
    pub request_metrics: Arc<RequestMetrics>,
    /// What the limiters count.
    pub limiter_metrics: Arc<MetricFamily<metrics::LimiterMetrics>>,
    /// The connections of clients.
    pub connection_limits: Arc<ConnectionLimits>,
    /// How the store is called; no credentials.
    pub store_name: String,
    /// What is served.
    pub config_handle: Arc<ConfigHandle>,
    /// The counters in this process.
    pub memory: Arc<MemoryStore>,
    /// Whether the one store fails.
    pub circuit_breaker: Arc<CircuitBreaker>,
    /// Whether nodes of a cluster do.
    pub cluster_map: Arc<ClusterMap>,
    /// What is written of requests.
    pub telemetry_sinks: TelemetrySinks,
    /// When the process started, s since the Unix epoch.
    pub started_at_s: u64,
    /// Cancelled when no new requests are wanted.
    pub drain: CancellationToken,
    /// Cancelled when another process answers instead.
    pub admin_stop: CancellationToken,
}

impl AdminState {
    /// How often a part of the store was given up.
    pub fn breaker_open_count(&self) -> u64 {
        self.circuit_breaker.open_count() + self.cluster_map.open_count()
    }

    /// The parts of the store that fail.
    pub fn failing_stores(&self) -> Vec<String> {
        let mut failing_stores = self.cluster_map.open_nodes();
        if self.circuit_breaker.is_open() {
            failing_stores.push(self.store_name.clone());
        }
        failing_stores
    }
}
