//! One worker: its runtime, its connections to the store, its gateway and server.

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
use crate::metrics::MetricFamily;
use crate::proxy::{Gateway, telemetry};
use crate::snapshot::CompiledConfig;
use crate::snapshot::current::ConfigHandle;
use crate::telemetry::access_log::TelemetrySinks;

/// A worker that is about to serve waits so long for its first connection to the store.
const FIRST_CONNECTION: Duration = Duration::from_millis(500);

/// What a worker takes along to its thread.
pub(super) struct Worker {
    pub(super) config: Arc<CompiledConfig>,
    pub(super) memory: Arc<MemoryStore>,
    pub(super) breaker: Arc<CircuitBreaker>,
    pub(super) topology: Arc<ClusterMap>,
    pub(super) wait_queues: Arc<WaitQueues>,
    pub(super) prefetch_pool: Arc<PrefetchPool>,
    pub(super) denial_cache: Option<Arc<DenialCache>>,
    pub(super) overrides: Arc<Overrides>,
    pub(super) connection_limits: Arc<ConnectionLimits>,
    pub(super) config_handle: Arc<ConfigHandle>,
    pub(super) gateways: Arc<WorkerGateways>,
    pub(super) metrics: Arc<telemetry::RequestMetrics>,
    pub(super) limit_metrics: Arc<MetricFamily<LimiterMetrics>>,
    pub(super) index: usize,
    pub(super) sinks: TelemetrySinks,
    pub(super) stop: CancellationToken,
}

impl Worker {
    /// Serves its sockets, each of the listener at its place, to the end, with so many threads; says when it does.
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
            let (limiter, counts) = (self.build_limiter().await, (self.metrics, self.index));
            let gateway = self.gateways.register(&self.config_handle, |running| {
                Gateway::new(running.config.clone(), limiter, &running.clusters, self.sinks, counts)
            });
            let server = Server::new(gateway, self.connection_limits, self.stop);
            // Nobody may want to know.
            let _ = ready_sender.send(());
            drop(ready_sender);
            server.run(listeners).await;
            Ok(())
        })
    }

    async fn build_limiter(&self) -> Limiter {
        let backend = match &self.config.store.redis {
            None => Store::Memory(self.memory.clone()),
            Some(redis) => {
                let (breaker, topology) = (self.breaker.clone(), self.topology.clone());
                let tallies = self.limit_metrics.get_or_create("", self.index);
                let store = RedisStore::new(redis, breaker, topology, tallies.clone());
                // The first request shall find a connection. A store that does not answer is not waited for.
                store.connect_within(FIRST_CONNECTION).await;
                if self.index == 0 {
                    let (overrides, store) = (self.overrides.clone(), store.clone());
                    let key = overrides::hash_key(&redis.1.prefix);
                    tokio::spawn(async move { overrides.poll(&store, &key).await });
                }
                Store::Redis { store, fallback: self.memory.clone(), metrics: tallies }
            }
        };
        let (denials, advances, lines) =
            (self.denial_cache.clone(), self.prefetch_pool.clone(), self.wait_queues.clone());
        Limiter::new(backend, denials, advances, lines, self.overrides.clone(), random_permit_id())
    }
}
