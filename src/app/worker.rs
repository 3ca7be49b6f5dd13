//! A worker thread: a tokio runtime with its own store connections, gateway and server.

use std::io;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;

use crate::app::AppError;
use crate::app::reload::WorkerGateways;
use crate::limiter::denial_cache::DenialCache;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::LimiterMetrics;
use crate::limiter::metrics::MetricFamily;
use crate::limiter::notify::EventQueue;
use crate::limiter::overrides::Overrides;
use crate::limiter::prefetch::PrefetchPool;
use crate::limiter::redis::circuit_breaker::CircuitBreaker;
use crate::limiter::redis::cluster::topology::ClusterMap;
use crate::limiter::redis::overrides;
use crate::limiter::store::{RedisStore, Store};
use crate::limiter::wait_queue::WaitQueues;
use crate::limiter::{Limiter, random_permit_id};
use crate::listener::Server;
use crate::listener::connection_limit::ConnectionLimits;
use crate::listener::metrics::ListenerMetrics;
use crate::proxy::Gateway;
use crate::proxy::metrics::RequestMetrics;
use crate::snapshot::CompiledConfig;
use crate::snapshot::current::ConfigHandle;
use crate::telemetry::access_log::TelemetrySinks;

/// Maximum time that a worker waits for its first store connection when it starts.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// Everything that a worker thread needs.
pub(super) struct Worker {
    pub(super) config: Arc<CompiledConfig>,
    pub(super) memory: Arc<MemoryStore>,
    pub(super) breaker: Arc<CircuitBreaker>,
    pub(super) topology: Arc<ClusterMap>,
    pub(super) wait_queues: Arc<WaitQueues>,
    pub(super) prefetch_pool: Arc<PrefetchPool>,
    pub(super) denial_cache: Option<Arc<DenialCache>>,
    pub(super) overrides: Arc<Overrides>,
    pub(super) events: Arc<EventQueue>,
    pub(super) connection_limits: Arc<ConnectionLimits>,
    pub(super) config_handle: Arc<ConfigHandle>,
    pub(super) gateways: Arc<WorkerGateways>,
    pub(super) metrics: Arc<RequestMetrics>,
    pub(super) listener_metrics: Arc<MetricFamily<ListenerMetrics>>,
    pub(super) limit_metrics: Arc<MetricFamily<LimiterMetrics>>,
    pub(super) index: usize,
    pub(super) sinks: TelemetrySinks,
    pub(super) stop: CancellationToken,
}

impl Worker {
    /// Serve the sockets, each with the index of its listener, until `stop` is cancelled and the worker has drained its
    /// connections. `threads` is the number of runtime threads. Send to `ready_sender` when the worker serves requests.
    ///
    /// # Errors
    /// The runtime cannot be created, or a socket cannot be registered with it.
    pub(super) fn run(
        self,
        threads: usize,
        sockets: Vec<(usize, StdListener)>,
        ready_sender: Sender<()>,
    ) -> Result<(), AppError> {
        let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
        let runtime = builder.worker_threads(threads).enable_all().build().map_err(AppError::Worker)?;
        runtime.block_on(async {
            let listener = |(index, socket)| Ok((index, TcpListener::from_std(socket)?));
            let listeners = sockets.into_iter().map(listener).collect::<io::Result<_>>().map_err(AppError::Worker)?;
            let limiter = self.build_limiter().await;
            let metrics = (self.metrics, self.index);
            let listener_metrics = self.listener_metrics.get_or_create("", self.index);
            let gateway = self.gateways.register(&self.config_handle, |active| {
                Gateway::new(active.config.clone(), limiter, &active.clusters, self.sinks, metrics)
            });
            let server = Server::new(gateway, self.connection_limits, listener_metrics, self.stop);
            // Ignore the error of `send`, which means that the receiver was dropped.
            let _ = ready_sender.send(());
            drop(ready_sender);
            server.run(listeners).await;
            Ok(())
        })
    }

    async fn build_limiter(&self) -> Limiter {
        let store = match &self.config.store.redis {
            None => Store::Memory(self.memory.clone()),
            Some(redis) => {
                let breaker = self.breaker.clone();
                let topology = self.topology.clone();
                let metrics = self.limit_metrics.get_or_create("", self.index);
                let store = RedisStore::new(redis, breaker, topology, metrics.clone());
                // Connect before the first request. If the store does not respond in time, start without a connection.
                store.connect_within(CONNECT_TIMEOUT).await;
                if self.index == 0 {
                    let overrides = self.overrides.clone();
                    let store = store.clone();
                    let key = overrides::hash_key(&redis.1.prefix);
                    tokio::spawn(async move { overrides.poll(&store, &key).await });
                }
                Store::Redis { store, fallback: self.memory.clone(), metrics }
            }
        };
        let denial_cache = self.denial_cache.clone();
        let prefetch_pool = self.prefetch_pool.clone();
        let wait_queues = self.wait_queues.clone();
        let shared = (prefetch_pool, wait_queues);
        let (overrides, events) = (self.overrides.clone(), self.events.clone());
        Limiter::new(store, denial_cache, shared, overrides, events, random_permit_id())
    }
}
