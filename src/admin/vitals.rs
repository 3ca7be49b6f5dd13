//! What the operator's side reads: the counts and the states of a process.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::account::TelemetrySinks;
use crate::gateway::meters::RequestMetrics;
use crate::limit::cluster::topology::ClusterMap;
use crate::limit::guard::CircuitBreaker;
use crate::limit::memory::MemoryStore;
use crate::limit::tallies;
use crate::reload::configuration::ConfigHandle;
use crate::server::connections::ConnectionLimits;
use crate::tally::MetricFamily;

/// The parts of a process that can be looked at.
#[derive(Debug)]
pub struct Vitals {
    /// What the gateways count.
    pub tallies: Arc<RequestMetrics>,
    /// What the limiters count.
    pub limits: Arc<MetricFamily<tallies::LimiterMetrics>>,
    /// The connections of clients.
    pub connections: Arc<ConnectionLimits>,
    /// How the store is called; no credentials.
    pub store: String,
    /// What is served.
    pub configuration: Arc<ConfigHandle>,
    /// The counters in this process.
    pub memory: Arc<MemoryStore>,
    /// Whether the one store fails.
    pub breaker: Arc<CircuitBreaker>,
    /// Whether nodes of a cluster do.
    pub topology: Arc<ClusterMap>,
    /// What is written of requests.
    pub sinks: TelemetrySinks,
    /// When the process started, s since the Unix epoch.
    pub started: u64,
    /// Cancelled when no new requests are wanted.
    pub stop: CancellationToken,
    /// Cancelled when another process answers instead.
    pub end: CancellationToken,
}

impl Vitals {
    /// How often a part of the store was given up.
    pub fn openings(&self) -> u64 {
        self.breaker.open_count() + self.topology.open_count()
    }

    /// The parts of the store that fail.
    pub fn failing(&self) -> Vec<String> {
        let mut failing = self.topology.open_nodes();
        if self.breaker.is_open() {
            failing.push(self.store.clone());
        }
        failing
    }
}
