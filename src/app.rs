//! Puts the parts together: sockets, workers, stores; owns what they share.

mod background;
mod collector;
pub mod handover;
mod renewal;
pub mod service;
mod sockets;
mod worker;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::account::TelemetrySinks;
use crate::admin::{self, Parts, vitals::Vitals};
use crate::gateway::meters::RequestMetrics;
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
use crate::reload::configuration::{Configuration, Request};
use crate::runtime::files;
use crate::runtime::{Access, AdminSettings, Layout, Listener, Runtime, Target};
use crate::server::connections::ConnectionLimits;
use crate::tally::MetricFamily;
use crate::watch::Watcher;
use crate::words::pluralize;
use background::Background;
use handover::Handover;
use renewal::{Renewal, Roster};
use sockets::{Inherited, Opened};
use worker::Worker;

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
    /// For each worker its sockets, with the places of their listeners.
    sockets: Vec<Vec<(usize, StdListener)>>,
    addresses: Vec<SocketAddr>,
    admin: Option<StdListener>,
    /// Cancelled when nobody has anything to ask here any more.
    end: CancellationToken,
    sinks: TelemetrySinks,
    configuration: Arc<Configuration>,
    requests: Receiver<Request>,
    /// Keeps the configuration up to date.
    watcher: Option<Watcher>,
}

impl App {
    /// Opens the sockets and the access log, and follows the files that may change.
    ///
    /// # Errors
    /// An address is taken or cannot be had; the access log cannot be written.
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
        let mut inherited = Inherited::take();
        let mut addresses = Vec::new();
        let mut sockets: Vec<Vec<_>> = (0..accepting).map(|_| Vec::new()).collect();
        for (place, &Listener { address, .. }) in runtime.listeners.iter().enumerate() {
            let opened = inherited.open(address, accepting);
            let Opened { address, by_worker } = opened.map_err(|source| AppError::Listen { address, source })?;
            addresses.push(address);
            for (worker, opened) in sockets.iter_mut().zip(by_worker) {
                worker.extend(opened.into_iter().map(|socket| (place, socket)));
            }
        }
        let admin = runtime.admin.as_ref().map(|&AdminSettings { address, .. }| {
            inherited.single(address).map_err(|source| AppError::Listen { address, source })
        });
        let admin = admin.transpose()?;
        inherited.finish();
        let spans = runtime.log.trace_endpoint.as_ref().map(collector::start).transpose().map_err(AppError::Traces)?;
        let sinks = TelemetrySinks { access_log: access_log(&runtime)?, trace_exporter: spans };
        let runtime = Arc::new(runtime);
        let (configuration, requests) = Configuration::new(runtime.clone());
        let configuration = Arc::new(configuration);
        let watcher = reload::follow(&configuration);
        let end = CancellationToken::new();
        Ok(App { runtime, sockets, addresses, admin, end, sinks, configuration, requests, watcher })
    }

    /// What is in force, and may be read again.
    pub fn configuration(&self) -> Arc<Configuration> {
        self.configuration.clone()
    }

    /// What another process needs to take the place of this one. It keeps the sockets open.
    ///
    /// # Errors
    /// There may be no more descriptors.
    pub fn handover(&self) -> io::Result<Handover> {
        let mut sockets: Vec<_> = self.sockets.iter().flatten().collect();
        sockets.sort_by_key(|(place, _)| *place);
        let sockets = sockets.into_iter().map(|(_, socket)| socket).chain(&self.admin);
        Ok(Handover {
            sockets: sockets.map(StdListener::try_clone).collect::<io::Result<_>>()?,
            admin: self.end.clone(),
        })
    }

    /// Serves until `stop` is cancelled and the running requests are done.
    ///
    /// # Errors
    /// A worker cannot be started, or panics.
    pub fn run(self, stop: &CancellationToken) -> Result<(), AppError> {
        let (background, attending) = Background::start(stop.clone())?;
        background.attend(&self.configuration.running().fleets).map_err(AppError::Worker)?;
        self.announce();
        let memory = Arc::new(MemoryStore::new(self.runtime.store.max_memory_states, Clock::Store));
        let breaker = Arc::<Breaker>::default();
        let topology = Arc::<Topology>::default();
        let lines = Arc::<Lines>::default();
        let advances = Arc::<Advances>::default();
        let connections = Arc::new(ConnectionLimits::new(&self.runtime.server));
        let tallies = Arc::<RequestMetrics>::default();
        let limits = Arc::<MetricFamily<limit::tallies::Tallies>>::default();
        let entries = self.runtime.store.denial_cache;
        let denials = (entries > 0 && self.runtime.store.redis.is_some()).then(|| Arc::new(Denials::new(entries)));
        let configuration = self.configuration.clone();
        let limits_by_name = move |name: &str| {
            let running = configuration.running();
            running.runtime.limits.get(name).map(|terms| terms.limit.clone())
        };
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
            configuration: self.configuration.clone(),
            store: self.runtime.store.name.clone(),
            memory: memory.clone(),
            breaker: breaker.clone(),
            topology: topology.clone(),
            sinks: self.sinks.clone(),
            started: clock::unix_us() / 1_000_000,
            stop: stop.clone(),
            end: self.end.clone(),
        });
        // Until the last request is done.
        let _end = self.end.clone().drop_guard();
        if let Some(socket) = self.admin {
            let parts = Parts { vitals, memory: memory.clone(), overrides: overrides.clone() };
            admin::start(socket, parts, self.end).map_err(AppError::Worker)?;
        }
        let roster = Arc::<Roster>::default();
        let renewal = Renewal {
            configuration: self.configuration.clone(),
            requests: self.requests,
            roster: roster.clone(),
            background,
            connections: connections.clone(),
            watcher: self.watcher,
            stop: stop.clone(),
        };
        // It ends with the process: nobody waits for it.
        thread::Builder::new().name("reload".to_owned()).spawn(|| renewal.run()).map_err(AppError::Worker)?;
        let mut workers = vec![attending];
        let (serving, serve) = channel();
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
                configuration: self.configuration.clone(),
                roster: roster.clone(),
                tallies: tallies.clone(),
                limits: limits.clone(),
                index,
                sinks: self.sinks.clone(),
                stop: stop.clone(),
            };
            let serving = serving.clone();
            let run = move || worker.run(threads, sockets, serving);
            workers.push(thread::Builder::new().name(format!("worker-{index}")).spawn(run).map_err(AppError::Worker)?);
        }
        drop(serving);
        // Whoever cannot does not say so, and the process ends.
        if serve.iter().count() == workers.len() - 1 {
            service::serves();
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
            "sluicegate {} listens on {}; {admin}store: {}; {}, {}; try: curl -i {}{example}",
            env!("CARGO_PKG_VERSION"),
            addresses.join(", "),
            runtime.store.name,
            pluralize(runtime.routes.len() as u64, "route"),
            pluralize(runtime.limits.len() as u64, "limit"),
            addresses.first().map_or("", String::as_str),
        );
    }
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
    AccessLog::start(runtime.log.access_format, out).map(Some).map_err(|source| AppError::AccessLog { path, source })
}
