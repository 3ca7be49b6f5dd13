//! One worker: its runtime, its connections to the store, its gateway and server.

use std::io;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::AppError;
use super::renewal::Roster;
use crate::account::TelemetrySinks;
use crate::gateway::Gateway;
use crate::gateway::meters;
use crate::limit::Limiter;
use crate::limit::advance::Advances;
use crate::limit::backend::{Backend, Shared};
use crate::limit::cluster::topology::Topology;
use crate::limit::denials::Denials;
use crate::limit::guard::Breaker;
use crate::limit::line::Lines;
use crate::limit::memory::MemoryStore;
use crate::limit::overrides::Overrides;
use crate::limit::redis::records;
use crate::limit::tallies::Tallies;
use crate::reload::configuration::Configuration;
use crate::runtime::Runtime;
use crate::server::Server;
use crate::server::connections::ConnectionLimits;
use crate::tally::MetricFamily;

/// A worker that is about to serve waits so long for its first connection to the store.
const FIRST_CONNECTION: Duration = Duration::from_millis(500);

/// What a worker takes along to its thread.
pub(super) struct Worker {
    pub(super) runtime: Arc<Runtime>,
    pub(super) memory: Arc<MemoryStore>,
    pub(super) breaker: Arc<Breaker>,
    pub(super) topology: Arc<Topology>,
    pub(super) lines: Arc<Lines>,
    pub(super) advances: Arc<Advances>,
    pub(super) denials: Option<Arc<Denials>>,
    pub(super) overrides: Arc<Overrides>,
    pub(super) connections: Arc<ConnectionLimits>,
    pub(super) configuration: Arc<Configuration>,
    pub(super) roster: Arc<Roster>,
    pub(super) tallies: Arc<meters::RequestMetrics>,
    pub(super) limits: Arc<MetricFamily<Tallies>>,
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
        serving: Sender<()>,
    ) -> Result<(), AppError> {
        let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
        let runtime = builder.worker_threads(threads).enable_all().build().map_err(AppError::Worker)?;
        runtime.block_on(async {
            let listener = |(place, socket)| Ok((place, TcpListener::from_std(socket)?));
            let listeners = sockets.into_iter().map(listener).collect::<io::Result<_>>().map_err(AppError::Worker)?;
            let (limiter, counts) = (self.limiter().await, (self.tallies, self.index));
            let gateway = self.roster.enrol(&self.configuration, |running| {
                Gateway::new(running.runtime.clone(), limiter, &running.fleets, self.sinks, counts)
            });
            let server = Server::new(gateway, self.connections, self.stop);
            // Nobody may want to know.
            let _ = serving.send(());
            drop(serving);
            server.run(listeners).await;
            Ok(())
        })
    }

    async fn limiter(&self) -> Limiter {
        let backend = match &self.runtime.store.redis {
            None => Backend::Memory(self.memory.clone()),
            Some(redis) => {
                let (breaker, topology) = (self.breaker.clone(), self.topology.clone());
                let tallies = self.limits.get_or_create("", self.index);
                let store = Shared::new(redis, breaker, topology, tallies.clone());
                let connecting = tokio::spawn({
                    let store = store.clone();
                    async move { store.connect().await }
                });
                // The first request shall find a connection. A store that does not answer is not waited for.
                let _ = timeout(FIRST_CONNECTION, connecting).await;
                if self.index == 0 {
                    let (overrides, store) = (self.overrides.clone(), store.clone());
                    let key = records::key(&redis.1.prefix);
                    tokio::spawn(async move { overrides.follow(&store, &key).await });
                }
                Backend::Redis { store, fallback: self.memory.clone(), tallies }
            }
        };
        let (first_lease, _) = Uuid::new_v4().as_u64_pair();
        let (denials, advances, lines) = (self.denials.clone(), self.advances.clone(), self.lines.clone());
        Limiter::new(backend, denials, advances, lines, self.overrides.clone(), first_lease)
    }
}
