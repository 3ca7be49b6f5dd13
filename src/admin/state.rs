//! The shared state that the admin listener reads.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics;
use crate::limiter::metrics::MetricFamily;
use crate::limiter::notify::{DeliveryStats, EventQueue};
use crate::limiter::redis::circuit_breaker::CircuitBreaker;
use crate::limiter::redis::cluster::topology::ClusterMap;
use crate::listener::connection_limit::ConnectionLimits;
use crate::listener::metrics::ListenerMetrics;
use crate::proxy::metrics::RequestMetrics;
use crate::snapshot::current::ConfigHandle;
use crate::telemetry::access_log::TelemetrySinks;

/// References to the state of the process, for health checks, metrics, the API and the dashboard.
#[derive(Debug)]
pub struct AdminState {
    /// Request metrics of all workers.
    pub request_metrics: Arc<RequestMetrics>,
    /// Limiter metrics of all workers.
    pub limiter_metrics: Arc<MetricFamily<metrics::LimiterMetrics>>,
    /// Listener metrics of all workers.
    pub listener_metrics: Arc<MetricFamily<ListenerMetrics>>,
    /// Open client connections and their limits.
    pub connection_limits: Arc<ConnectionLimits>,
    /// Bound addresses of the listeners, in the order of the configuration.
    pub listener_addresses: Vec<SocketAddr>,
    /// Display name of the store, without credentials.
    pub store_name: String,
    /// The active configuration, and reload requests.
    pub config_handle: Arc<ConfigHandle>,
    /// The memory store.
    pub memory: Arc<MemoryStore>,
    /// Circuit breaker of the store, if the store is a single Redis server.
    pub circuit_breaker: Arc<CircuitBreaker>,
    /// Slot map of the store with a circuit breaker per node, if the store is a Redis Cluster.
    pub cluster_map: Arc<ClusterMap>,
    /// The queue of quota events.
    pub event_queue: Arc<EventQueue>,
    /// Deliveries of quota events by destination.
    pub delivery_stats: Arc<MetricFamily<DeliveryStats>>,
    /// Access log and trace exporter.
    pub telemetry_sinks: TelemetrySinks,
    /// Start time of the process, s since the Unix epoch.
    pub started_at_s: u64,
    /// Cancelled by the first signal to stop, before `accept_grace`. A hot restart does not cancel this token, because
    /// the service continues in the new process.
    pub stopping: CancellationToken,
    /// Cancelled when the admin listener stops: at the end of the process, or when a hot restart has succeeded.
    pub admin_stop: CancellationToken,
}

impl AdminState {
    /// Return how often a circuit breaker of the store has opened.
    pub fn breaker_open_count(&self) -> u64 {
        self.circuit_breaker.open_count() + self.cluster_map.open_count()
    }

    /// Return the names of the store, or of its nodes, whose circuit breaker is open.
    pub fn failing_stores(&self) -> Vec<String> {
        let mut failing_stores = self.cluster_map.open_nodes();
        if self.circuit_breaker.is_open() {
            failing_stores.push(self.store_name.clone());
        }
        failing_stores
    }
}
