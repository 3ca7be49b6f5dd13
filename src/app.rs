//! Puts the parts together: sockets, workers, stores; owns what they share.

use std::convert::Infallible;
use std::fs::OpenOptions;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use crate::admin::{self, vitals::Vitals};
use crate::gateway::Gateway;
use crate::gateway::meters::Tallies;
use crate::limit::advance::Advances;
use crate::limit::backend::{Backend, Shared};
use crate::limit::clock::{self, Clock};
use crate::limit::cluster::Cluster;
use crate::limit::cluster::topology::Topology;
use crate::limit::denials::Denials;
use crate::limit::guard::{Breaker, Guard};
use crate::limit::line::Lines;
use crate::limit::memory::MemoryStore;
use crate::limit::redis::{RedisSettings, RedisStore, Servers};
use crate::limit::{self, Limiter};
use crate::observe::access::AccessLog;
use crate::reload;
use crate::runtime::files;
use crate::runtime::{Access, AdminSettings, Layout, Listener, Runtime, Target};
use crate::server::Server;
use crate::server::connections::Connections;
use crate::tally::Family;
use crate::upstream::fleet::Fleet;
use crate::upstream::health;
use crate::upstream::resolve::Names;
use crate::upstream::resolve::directory::Directory;
use crate::watch::Watcher;

/// Connections that may wait to be accepted, for each socket.
const BACKLOG: i32 = 4096;

/// For so long the start waits for the addresses of upstreams. Those that have none by then are 503 until they have.
const FIRST_ADDRESSES: Duration = Duration::from_secs(1);

/// Why the gateway cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AppError {
    #[error("cannot listen on {address}: {source}{}", hint(source))]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot write the access log to {}: {source}", path.display())]
    AccessLog { path: PathBuf, source: io::Error },
    #[error("cannot watch the files that may change: {0}")]
    Watch(#[from] notify::Error),
    #[error("cannot start a worker: {0}")]
    Worker(#[source] io::Error),
    #[error("a worker ended with a panic")]
    Panic,
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; stop the other process, or choose another port",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need root or CAP_NET_BIND_SERVICE",
        io::ErrorKind::AddrNotAvailable => "; this machine does not have that address",
        _ => "",
    }
}

/// A gateway with its sockets open, ready to serve.
#[derive(Debug)]
pub struct App {
    runtime: Arc<Runtime>,
    /// For each worker its socket of each listener.
    sockets: Vec<Vec<StdListener>>,
    addresses: Vec<SocketAddr>,
    admin: Option<StdListener>,
    access: Option<AccessLog>,
    /// Keeps the runtime up to date.
    watcher: Option<Arc<Watcher>>,
}

impl App {
    /// Opens the sockets and the access log, and follows the files that may change.
    ///
    /// # Errors
    /// An address is taken or cannot be had; the access log cannot be written; a folder cannot be watched.
    pub fn open(runtime: Runtime) -> Result<Self, AppError> {
        files::raise();
        let (connections, files) = (runtime.server.max_connections, files::allowed());
        if connections as u64 > files {
            warn!("max_connections is {connections}, but there may be {files} files only: raise `ulimit -Hn`");
        }
        let accepting = match runtime.server.layout {
            Layout::PerCore => runtime.server.workers,
            Layout::Shared => 1,
        };
        let mut addresses = Vec::new();
        let mut sockets: Vec<Vec<StdListener>> = (0..accepting).map(|_| Vec::new()).collect();
        for &Listener { address, .. } in &runtime.listeners {
            let failed = |source| AppError::Listen { address, source };
            // With SO_REUSEPORT a second process would quietly take half of the traffic: first see that nobody listens.
            let probe = bind(address, false).map_err(failed)?;
            // Port 0 was asked for: the probe knows which one it became.
            let address = probe.local_addr().map_err(failed)?;
            drop(probe);
            for worker in &mut sockets {
                worker.push(bind(address, true).map_err(failed)?);
            }
            addresses.push(address);
        }
        let admin = match &runtime.admin {
            Some(AdminSettings { address, .. }) => {
                let socket = bind(*address, false);
                Some(socket.map_err(|source| AppError::Listen { address: *address, source })?)
            }
            None => None,
        };
        let access = access_log(&runtime)?;
        let runtime = Arc::new(runtime);
        let watcher = reload::follow(&runtime)?.map(Arc::new);
        Ok(App { runtime, sockets, addresses, admin, access, watcher })
    }

    /// What follows the files that may change; none if there are none.
    pub fn watcher(&self) -> Option<Arc<Watcher>> {
        self.watcher.clone()
    }

    /// Serves until `stop` is cancelled and the running requests are done.
    ///
    /// # Errors
    /// A worker cannot be started, or panics.
    pub fn run(self, stop: &CancellationToken) -> Result<(), AppError> {
        let fleets: Arc<[_]> = self.runtime.upstreams.iter().cloned().map(Fleet::new).map(Arc::new).collect();
        let names = look_up(&fleets, stop.clone())?;
        let health = check_health(&fleets, stop.clone())?;
        self.announce();
        let memory = Arc::new(MemoryStore::new(self.runtime.store.memory_identities, Clock::Store));
        let breaker = Arc::<Breaker>::default();
        let topology = Arc::<Topology>::default();
        let lines = Arc::<Lines>::default();
        let advances = Arc::<Advances>::default();
        let connections = Arc::new(Connections::new(&self.runtime.server));
        let tallies = Arc::<Tallies>::default();
        let limits = Arc::<Family<limit::tallies::Tallies>>::default();
        let entries = self.runtime.store.denial_cache;
        let denials = (entries > 0 && self.runtime.store.redis.is_some()).then(|| Arc::new(Denials::new(entries)));
        let threads = match self.runtime.server.layout {
            Layout::PerCore => 1,
            Layout::Shared => self.runtime.server.workers,
        };
        let vitals = Arc::new(Vitals {
            tallies: tallies.clone(),
            limits: limits.clone(),
            connections: connections.clone(),
            fleets: fleets.clone(),
            store: self.runtime.store.name.clone(),
            breaker: breaker.clone(),
            topology: topology.clone(),
            started: clock::unix_us() / 1_000_000,
            stop: stop.clone(),
        });
        // Until the last request is done.
        let end = CancellationToken::new();
        let _end = end.clone().drop_guard();
        if let (Some(socket), Some(settings)) = (self.admin, &self.runtime.admin) {
            admin::start(socket, settings.token.clone(), vitals, end).map_err(AppError::Worker)?;
        }
        let mut workers: Vec<_> = names.into_iter().chain(health).collect();
        for (index, sockets) in self.sockets.into_iter().enumerate() {
            let worker = Worker {
                runtime: self.runtime.clone(),
                memory: memory.clone(),
                breaker: breaker.clone(),
                topology: topology.clone(),
                lines: lines.clone(),
                advances: advances.clone(),
                denials: denials.clone(),
                connections: connections.clone(),
                fleets: fleets.clone(),
                tallies: tallies.clone(),
                limits: limits.clone(),
                index,
                access: self.access.clone(),
                stop: stop.clone(),
            };
            let run = move || worker.run(threads, sockets);
            workers.push(thread::Builder::new().name(format!("worker-{index}")).spawn(run).map_err(AppError::Worker)?);
        }
        let mut result = Ok(());
        for worker in workers {
            result = result.and(worker.join().unwrap_or(Err(AppError::Panic)));
        }
        if let Some(access) = self.access {
            access.flush();
        }
        result
    }

    fn announce(&self) {
        let runtime = &self.runtime;
        for warning in runtime.warnings(Duration::from_micros(clock::unix_us())) {
            warn!("{warning}");
        }
        let schemes = runtime.listeners.iter().map(|listener| if listener.tls.is_some() { "https" } else { "http" });
        let addresses: Vec<_> =
            self.addresses.iter().zip(schemes).map(|(address, scheme)| format!("{scheme}://{address}")).collect();
        let example = runtime.routes.iter().find(|route| matches!(route.target, Target::Respond(_)));
        let example = example.or(runtime.routes.first()).map_or("/", |route| &route.path);
        // A pattern up to its first parameter is a path to try.
        let example = example.split('{').next().unwrap_or("/");
        let admin = self.admin.as_ref().and_then(|socket| socket.local_addr().ok());
        let admin = admin.map_or(String::new(), |address| format!("admin on http://{address}; "));
        info!(
            "sluicegate {} listens on {}; {admin}store: {}; {} routes, {} limits; try: curl -i {}{example}",
            env!("CARGO_PKG_VERSION"),
            addresses.join(", "),
            runtime.store.name,
            runtime.routes.len(),
            runtime.limits.len(),
            addresses.first().map_or("", String::as_str),
        );
    }
}

/// What a worker takes along to its thread.
struct Worker {
    runtime: Arc<Runtime>,
    memory: Arc<MemoryStore>,
    breaker: Arc<Breaker>,
    topology: Arc<Topology>,
    lines: Arc<Lines>,
    advances: Arc<Advances>,
    denials: Option<Arc<Denials>>,
    connections: Arc<Connections>,
    fleets: Arc<[Arc<Fleet>]>,
    tallies: Arc<Tallies>,
    limits: Arc<Family<limit::tallies::Tallies>>,
    index: usize,
    access: Option<AccessLog>,
    stop: CancellationToken,
}

impl Worker {
    fn run(self, threads: usize, sockets: Vec<StdListener>) -> Result<(), AppError> {
        let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
        let runtime = builder.worker_threads(threads).enable_all().build().map_err(AppError::Worker)?;
        runtime.block_on(async {
            let listeners = sockets.into_iter().map(TcpListener::from_std).collect::<io::Result<_>>();
            let (limiter, counts) = (self.limiter(), (&*self.tallies, self.index));
            let gateway = Gateway::new(self.runtime.clone(), limiter, &self.fleets, self.access, counts);
            let server = Server::new(gateway, self.connections, self.stop);
            server.run(listeners.map_err(AppError::Worker)?).await;
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

/// Looks up the names of upstreams, on a thread of its own for all workers.
fn look_up(
    fleets: &[Arc<Fleet>],
    stop: CancellationToken,
) -> Result<Option<JoinHandle<Result<(), AppError>>>, AppError> {
    let names = Names::of(fleets);
    if names.is_empty() {
        return Ok(None);
    }
    let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
    let (first, looked_up) = mpsc::channel::<Infallible>();
    let run = move || {
        runtime.block_on(stop.run_until_cancelled(names.follow(Directory::System, first)));
        Ok(())
    };
    let thread = thread::Builder::new().name("names".to_owned()).spawn(run).map_err(AppError::Worker)?;
    // Nothing is ever sent: it is over when all who could are gone, or when it takes too long.
    let _ = looked_up.recv_timeout(FIRST_ADDRESSES);
    Ok(Some(thread))
}

/// On a thread of its own: a worker that is busy says nothing about servers.
fn check_health(
    fleets: &[Arc<Fleet>],
    stop: CancellationToken,
) -> Result<Option<JoinHandle<Result<(), AppError>>>, AppError> {
    let checked: Vec<_> = fleets.iter().filter(|fleet| fleet.settings.health.is_some()).cloned().collect();
    if checked.is_empty() {
        return Ok(None);
    }
    let run = move || {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
        runtime.block_on(async {
            checked.into_iter().for_each(|fleet| drop(tokio::spawn(health::watch(fleet))));
            stop.cancelled().await;
        });
        Ok(())
    };
    thread::Builder::new().name("health".to_owned()).spawn(run).map(Some).map_err(AppError::Worker)
}

fn bind(address: SocketAddr, share: bool) -> io::Result<StdListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restart must not wait for the connections of the process before.
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(share)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn access_log(runtime: &Runtime) -> Result<Option<AccessLog>, AppError> {
    let (path, out): (_, Box<dyn io::Write + Send>) = match &runtime.log.access {
        Access::Off => return Ok(None),
        Access::Stdout => (PathBuf::from("standard output"), Box::new(io::stdout())),
        Access::File(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path);
            (path.clone(), Box::new(file.map_err(|source| AppError::AccessLog { path: path.clone(), source })?))
        }
    };
    AccessLog::start(runtime.log.format, out).map(Some).map_err(|source| AppError::AccessLog { path, source })
}
