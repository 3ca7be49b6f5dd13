//! One worker: its runtime, its connections to the store, its gateway and server.

use std::io;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::AppError;
use super::renewal::Roster;
use crate::gateway::Gateway;
use crate::gateway::meters::Tallies;
use crate::limit::advance::Advances;
use crate::limit::backend::{Backend, Shared};
use crate::limit::clock::Clock;
use crate::limit::cluster::Cluster;
use crate::limit::cluster::topology::Topology;
use crate::limit::denials::Denials;
use crate::limit::guard::{Breaker, Guard};
use crate::limit::line::Lines;
use crate::limit::memory::MemoryStore;
use crate::limit::redis::{RedisSettings, RedisStore, Servers};
use crate::limit::{self, Limiter};
use crate::observe::access::AccessLog;
use crate::reload::configuration::Configuration;
use crate::runtime::Runtime;
use crate::server::Server;
use crate::server::connections::Connections;
use crate::tally::Family;

/// What a worker takes along to its thread.
pub(super) struct Worker {
    pub(super) runtime: Arc<Runtime>,
    pub(super) memory: Arc<MemoryStore>,
    pub(super) breaker: Arc<Breaker>,
    pub(super) topology: Arc<Topology>,
    pub(super) lines: Arc<Lines>,
    pub(super) advances: Arc<Advances>,
    pub(super) denials: Option<Arc<Denials>>,
    pub(super) connections: Arc<Connections>,
    pub(super) configuration: Arc<Configuration>,
    pub(super) roster: Arc<Roster>,
    pub(super) tallies: Arc<Tallies>,
    pub(super) limits: Arc<Family<limit::tallies::Tallies>>,
    pub(super) index: usize,
    pub(super) access: Option<AccessLog>,
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
            let (limiter, counts) = (self.limiter(), (self.tallies, self.index));
            let gateway = self.roster.enrol(&self.configuration, |running| {
                Gateway::new(running.runtime.clone(), limiter, &running.fleets, self.access, counts)
            });
            let server = Server::new(gateway, self.connections, self.stop);
            // Nobody may want to know.
            let _ = serving.send(());
            drop(serving);
            server.run(listeners).await;
            Ok(())
        })
    }

    fn limiter(&self) -> Limiter {
        let backend = match &self.runtime.store.redis {
            None => Backend::Memory(self.memory.clone()),
            Some((servers, settings)) => {
                let (store, fallback) = (self.store(servers, settings), self.memory.clone());
                Backend::Redis { store, fallback, tallies: self.limits.of("", self.index) }
            }
        };
        let (first_lease, _) = Uuid::new_v4().as_u64_pair();
        let (denials, advances, lines) = (self.denials.clone(), self.advances.clone(), self.lines.clone());
        Limiter::new(backend, denials, advances, lines, first_lease)
    }

    fn store(&self, servers: &Servers, settings: &RedisSettings) -> Shared {
        let deadline = self.runtime.store.timeout;
        match servers.clone() {
            Servers::One(server) => {
                let store = RedisStore::new(settings, server, Clock::Store);
                let store = Guard::new(store, self.breaker.clone(), deadline);
                store.warm_up();
                Shared::One(store)
            }
            Servers::Cluster { seeds, login } => {
                let store = Cluster::new(settings.clone(), seeds, login, self.topology.clone(), deadline);
                store.warm_up();
                Shared::Cluster(store)
            }
        }
    }
}
