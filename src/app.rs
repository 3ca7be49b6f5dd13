//! Puts the parts together: sockets, workers, stores; owns what they share.

mod background;
mod collector;
mod worker;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::account::Sinks;
use crate::admin::{self, Parts, vitals::Vitals};
use crate::gateway::meters::Tallies;
use crate::limit;
use crate::limit::advance::Advances;
use crate::limit::clock::{self, Clock};
use crate::limit::cluster::topology::Topology;
use crate::limit::denials::Denials;
use crate::limit::guard::Breaker;
use crate::limit::line::Lines;
use crate::limit::memory::MemoryStore;
use crate::limit::overrides::Overrides;
use crate::observe::access::AccessLog;
use crate::observe::log_file::LogFile;
use crate::reload;
use crate::runtime::files;
use crate::runtime::{Access, AdminSettings, Layout, Listener, Runtime, Target};
use crate::server::connections::Connections;
use crate::tally::Family;
use crate::upstream::fleet::Fleet;
use crate::watch::Watcher;
use background::{check_health, look_up};
use worker::Worker;

/// Connections that may wait to be accepted, for each socket.
const BACKLOG: i32 = 4096;

/// Why the gateway cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AppError {
    #[error("cannot listen on {address}: {source}{}", hint(source))]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot write the access log to {}: {source}", path.display())]
    AccessLog { path: PathBuf, source: io::Error },
    #[error("spans cannot be exported: {0}")]
    Traces(anyhow::Error),
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
    sinks: Sinks,
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
        let spans = runtime.log.trace_endpoint.as_ref().map(collector::start).transpose().map_err(AppError::Traces)?;
        let sinks = Sinks { access: access_log(&runtime)?, spans };
        let runtime = Arc::new(runtime);
        let watcher = reload::follow(&runtime)?.map(Arc::new);
        Ok(App { runtime, sockets, addresses, admin, sinks, watcher })
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
        let runtime = self.runtime.clone();
        let limits_by_name = move |name: &str| runtime.limits.get(name).map(|terms| terms.limit.clone());
        let overrides = Overrides::new(self.runtime.hasher.clone(), limits_by_name, denials.clone());
        let overrides = Arc::new(overrides);
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
            sinks: self.sinks.clone(),
            started: clock::unix_us() / 1_000_000,
            stop: stop.clone(),
        });
        // Until the last request is done.
        let end = CancellationToken::new();
        let _end = end.clone().drop_guard();
        if let (Some(socket), Some(settings)) = (self.admin, &self.runtime.admin) {
            let parts =
                Parts { runtime: self.runtime.clone(), vitals, memory: memory.clone(), overrides: overrides.clone() };
            admin::start(socket, settings.token.clone(), parts, end).map_err(AppError::Worker)?;
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
                overrides: overrides.clone(),
                connections: connections.clone(),
                fleets: fleets.clone(),
                tallies: tallies.clone(),
                limits: limits.clone(),
                index,
                sinks: self.sinks.clone(),
                stop: stop.clone(),
            };
            let run = move || worker.run(threads, sockets);
            workers.push(thread::Builder::new().name(format!("worker-{index}")).spawn(run).map_err(AppError::Worker)?);
        }
        let mut result = Ok(());
        for worker in workers {
            result = result.and(worker.join().unwrap_or(Err(AppError::Panic)));
        }
        self.sinks.flush();
        result
    }

    fn announce(&self) {
        let runtime = &self.runtime;
        for (_, warning) in runtime.warnings(Duration::from_micros(clock::unix_us())) {
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
            let file = LogFile::open(path.clone());
            (path.clone(), Box::new(file.map_err(|source| AppError::AccessLog { path: path.clone(), source })?))
        }
    };
    AccessLog::start(runtime.log.format, out).map(Some).map_err(|source| AppError::AccessLog { path, source })
}
