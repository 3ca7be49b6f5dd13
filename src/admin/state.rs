//! What all threads of the process share, and the readiness of the process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::admin::current::ConfigHandle;
use crate::admin::heartbeats::Heartbeats;
use crate::http::memory_guard::MemoryGuard;
use crate::limiter::denial_cache::DenialCache;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{Counter, LimiterMetrics, MetricFamily};
use crate::limiter::notify::{DeliveryStats, EventQueue};
use crate::limiter::overrides::Overrides;
use crate::limiter::prefetch::PrefetchPool;
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::circuit_breaker::CircuitBreaker;
use crate::limiter::redis::cluster::topology::ClusterMap;
use crate::limiter::store::RedisStore;
use crate::limiter::wait_queue::WaitQueues;
use crate::listener::ConnectionLimits;
use crate::listener::metrics::ListenerMetrics;
use crate::proxy::held_decisions::HeldDecisions;
use crate::proxy::metrics::RequestMetrics;
use crate::snapshot::listeners::ListenAddress;
use crate::telemetry::access_log::TelemetrySinks;
use crate::upstream::cluster::EndpointStatus;

/// What the workers, the admin listener and the background threads share. A reload changes the active configuration in
/// it; everything else lives as long as the process.
#[derive(Debug)]
pub struct ProcessState {
    /// Request metrics of all workers.
    pub request_metrics: Arc<RequestMetrics>,
    /// Decisions that programs settle later.
    pub held_decisions: Arc<HeldDecisions>,
    /// Limiter metrics of all workers.
    pub limiter_metrics: Arc<MetricFamily<LimiterMetrics>>,
    /// Listener metrics of all workers.
    pub listener_metrics: Arc<MetricFamily<ListenerMetrics>>,
    /// Heartbeats of all workers.
    pub heartbeats: Arc<Heartbeats>,
    /// Open client connections and their limits.
    pub connection_limits: Arc<ConnectionLimits>,
    /// Bound addresses of the listeners, in the order of the configuration.
    pub listener_addresses: Vec<ListenAddress>,
    /// Display name of the store, without credentials.
    pub store_name: String,
    /// Access to the active configuration, and to reloads.
    pub config_handle: Arc<ConfigHandle>,
    /// Whether the memory of the process is nearly used up.
    pub memory_guard: Arc<MemoryGuard>,
    /// The memory store.
    pub memory: Arc<MemoryStore>,
    /// Circuit breaker of the store, if the store is a single Redis server.
    pub circuit_breaker: Arc<CircuitBreaker>,
    /// Slot map of the store with a circuit breaker per node, if the store is a Redis Cluster.
    pub cluster_map: Arc<ClusterMap>,
    /// Quota overrides of single identities.
    pub overrides: Arc<Overrides>,
    /// Cached denials. `None` with the memory store, or if the cache is disabled.
    pub denial_cache: Option<Arc<DenialCache>>,
    /// Tokens that are charged in advance.
    pub prefetch_pool: Arc<PrefetchPool>,
    /// Queues of requests that wait for a limit.
    pub wait_queues: Arc<WaitQueues>,
    /// The queue of quota events.
    pub event_queue: Arc<EventQueue>,
    /// Results of the deliveries of quota events, by destination.
    pub delivery_stats: Arc<MetricFamily<DeliveryStats>>,
    /// Access log and trace exporter.
    pub telemetry_sinks: TelemetrySinks,
    /// A command that sends a request to the gateway. `None` if no listener serves routes.
    pub example: Option<String>,
    /// Hot restarts: 1 if a hot restart has started this process, and the number of failed ones.
    pub hot_restarts: Arc<Counter<2>>,
    /// Start time of the process, in seconds since the Unix epoch.
    pub started_at_s: u64,
    /// Cancelled by the first SIGTERM or SIGINT, when `accept_grace` begins. A hot restart does not cancel this token,
    /// because the new process continues to serve requests.
    pub stopping: CancellationToken,
    /// Cancelled when the admin listener stops: at the end of the process, or when a hot restart has succeeded.
    pub admin_stop: CancellationToken,
}

/// Minimum timeout of a [separate store client](ProcessState::separate_store). It is longer than the default of
/// `store.timeout` (50 ms), because the first call also connects to the store.
const MIN_STORE_TIMEOUT: Duration = Duration::from_secs(1);

impl ProcessState {
    /// Return a separate client of the store, so that its calls do not delay rate limit checks. It connects on first
    /// use. `None` with the memory store.
    pub fn separate_store(&self) -> Option<RedisStore> {
        let active = self.config_handle.active();
        let (deployment, redis) = active.config.store.redis.as_ref()?;
        let settings = RedisSettings { timeout: redis.timeout.max(MIN_STORE_TIMEOUT), connections: 1, ..redis.clone() };
        let breaker = self.circuit_breaker.clone();
        let topology = self.cluster_map.clone();
        Some(RedisStore::new(deployment, &settings, breaker, topology, Arc::default()))
    }

    /// Return how often a circuit breaker of the store has opened.
    pub fn breaker_open_count(&self) -> u64 {
        self.circuit_breaker.open_count() + self.cluster_map.open_count()
    }

    /// Return the name of the store if its circuit breaker is open, or the names of the cluster nodes whose circuit
    /// breakers are open.
    pub fn failing_stores(&self) -> Vec<String> {
        let mut failing_stores = self.cluster_map.open_nodes();
        if self.circuit_breaker.is_open() {
            failing_stores.push(self.store_name.clone());
        }
        failing_stores
    }
}

// === `/readyz`: readiness of the process, its store and its upstreams ===

/// Response body of `/readyz`.
#[derive(Debug, Serialize)]
pub(super) struct ReadinessReport<'a> {
    pub(super) status: ReadinessStatus,
    store: StoreReadiness<'a>,
    upstreams: BTreeMap<Box<str>, Vec<EndpointReadiness>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificates: Option<CertificateReadiness>,
}

/// State of the certificates that the gateway obtains by ACME.
#[derive(Debug, Serialize)]
struct CertificateReadiness {
    /// DNS names for which no certificate has been obtained yet.
    missing: Vec<Box<str>>,
}

/// The status of the process in the readiness report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ReadinessStatus {
    /// All circuit breakers of the store are closed, and no listener lacks a certificate.
    Ready,
    /// A circuit breaker of the store is open. The gateway serves requests, and each limit applies its
    /// `on_store_error`.
    Degraded,
    /// A listener has not obtained a certificate by ACME yet, and serves a self-signed certificate.
    Pending,
    /// A worker has not run its tasks for [`STALLED_AFTER`](crate::admin::heartbeats::STALLED_AFTER). Its connections get
    /// no responses.
    Stalled,
    /// The memory of the process is nearly used up. New connections wait, and new requests get 503.
    Full,
    /// The process has received SIGTERM or SIGINT. It waits for `accept_grace` or drains connections.
    Stopping,
}

#[derive(Debug, Serialize)]
struct StoreReadiness<'a> {
    name: &'a str,
    /// The store if its circuit breaker is open, or the cluster nodes whose circuit breakers are open.
    failing: Vec<String>,
}

/// One endpoint of an upstream.
#[derive(Debug, Serialize)]
struct EndpointReadiness {
    server: String,
    state: &'static str,
    in_flight: usize,
}

impl ReadinessReport<'_> {
    /// Return whether load balancers should send requests to this gateway.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.status, ReadinessStatus::Ready | ReadinessStatus::Degraded)
    }
}

impl ProcessState {
    /// Return the current readiness.
    pub(super) fn readiness(&self) -> ReadinessReport<'_> {
        let failing_stores = self.failing_stores();
        let active = self.config_handle.active();
        let status = if self.stopping.is_cancelled() {
            ReadinessStatus::Stopping
        } else if self.heartbeats.stalled().is_some() {
            ReadinessStatus::Stalled
        } else if self.memory_guard.is_full() {
            ReadinessStatus::Full
        } else if !active.config.is_complete() {
            ReadinessStatus::Pending
        } else if failing_stores.is_empty() {
            ReadinessStatus::Ready
        } else {
            ReadinessStatus::Degraded
        };
        let to_server = |EndpointStatus { server, state, in_flight }| {
            let state = state.label();
            EndpointReadiness { server, state, in_flight }
        };
        let certificates = active.config.acme.as_ref().map(|acme| {
            let missing = acme.names.iter().filter(|name| acme.certificates.get(name).certificate.is_none());
            CertificateReadiness { missing: missing.cloned().collect() }
        });
        let upstreams = active.clusters.iter().map(|cluster| {
            let servers = cluster.status().into_iter().map(to_server).collect();
            (cluster.settings.name.clone(), servers)
        });
        ReadinessReport {
            status,
            store: StoreReadiness { name: &self.store_name, failing: failing_stores },
            upstreams: upstreams.collect(),
            certificates,
        }
    }
}
