//! The gateway process: opens the sockets, starts the threads, and owns the state that the threads share.

pub mod access_tokens;
pub mod acme;
mod collector;
mod gateways;
pub mod hot_restart;
pub(crate) mod listen;
pub mod maintenance;
mod memory_watch;
pub mod quota_events;
mod reload;
mod watchdog;
mod xds;

use std::net::TcpListener as StdListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;
use std::{io, thread};

use http::{HeaderMap, Method, Uri};
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admin;
use crate::admin::AdminSockets;
use crate::admin::current::{ConfigHandle, ReloadRequest};
use crate::admin::heartbeats::Heartbeats;
use crate::admin::state::ProcessState;
use crate::admin::statsd::StatsdThread;
use crate::app::acme::{AcmeClient, AcmeError};
use crate::app::hot_restart::HotRestart;
use crate::app::listen::{InheritedSockets, ListenerSockets, ListeningSocket, SocketFile};
use crate::app::maintenance::MaintenanceThread;
use crate::app::quota_events::EventThread;
use crate::app::reload::file_watcher::FileWatcher;
use crate::app::reload::{Reloader, WorkerGateways, file_watcher};
use crate::app::xds::XdsClient;
use crate::clock;
use crate::clock::Clock;
use crate::config::error::FileIssues;
use crate::config::file::ParsedFile;
use crate::config::gateway::Config;
use crate::config::sources::STANDARD_INPUT;
use crate::http::memory_guard::MemoryGuard;
use crate::limiter::denial_cache::DenialCache;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::Counter;
use crate::limiter::notify::EventQueue;
use crate::limiter::overrides::Overrides;
use crate::limiter::redis::overrides;
use crate::limiter::store::{RedisStore, Store};
use crate::limiter::{Limiter, random_permit_id};
use crate::listener::{ConnectionLimits, Server};
use crate::proxy::{Gateway, GatewayWorker};
use crate::routing::RouteRequest;
use crate::routing::condition::RouteBody;
use crate::snapshot::listeners::{ListenAddress, Listener, ListenerProtocol};
use crate::snapshot::route_action::RouteAction;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::{AccessLogTarget, AdminSettings, WorkerModel};
use crate::snapshot::xds::ReadyAfter;
use crate::snapshot::{CompiledConfig, settings};
use crate::telemetry::access_log::{AccessLog, LogDestination, TelemetrySinks};
use crate::telemetry::log::LogFile;
use crate::telemetry::pluralize;

/// The reason why the gateway could not start, or why it stopped.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// A listening socket cannot be opened.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The configured address.
        address: ListenAddress,
        /// Index of the listener in the configuration. `None` for the admin listener.
        listener_index: Option<usize>,
        /// The error of `bind` or `listen`.
        source: io::Error,
    },
    /// The admin socket cannot be opened.
    #[error("cannot open the admin socket {}: {source}", path.display())]
    AdminSocket {
        /// The configured path, or the default path.
        path: PathBuf,
        /// The I/O error of the operating system.
        source: io::Error,
    },
    /// The access log cannot be opened, or its thread cannot be started.
    #[error("cannot write the access log to {}: {source}", path.display())]
    AccessLog {
        /// The configured path, or `standard output` if there is none.
        path: PathBuf,
        /// The I/O error of the operating system.
        source: io::Error,
    },
    /// The trace exporter cannot be started.
    #[error("cannot start the trace exporter: {0}")]
    Traces(anyhow::Error),
    /// The ACME storage or the ACME client cannot be used.
    #[error(transparent)]
    Acme(#[from] AcmeError),
    /// A thread or its tokio runtime cannot be started.
    #[error("cannot start a worker: {0}")]
    Worker(#[source] io::Error),
    /// The old process of a hot restart may have descriptors, and this process has not received any.
    #[error(
        "the xDS server {server} has sent no valid descriptors within {} s: the old process continues to serve",
        DESCRIPTORS_TIMEOUT.as_secs()
    )]
    NoDescriptors {
        /// URL of the management server.
        server: String,
    },
    /// A thread of the gateway panicked.
    #[error("a worker thread panicked")]
    Panic,
}

impl AppError {
    /// Return the path of the configuration key that the error is about: names of tables and keys, and indices of
    /// listeners. Return `None` if the error is not about a key.
    pub fn config_key(&self) -> Option<Vec<String>> {
        let key = match self {
            AppError::Listen { listener_index: Some(index), .. } => {
                return Some(vec!["listener".to_owned(), index.to_string(), "address".to_owned()]);
            }
            AppError::Listen { listener_index: None, .. } => ["admin", "address"],
            AppError::AdminSocket { .. } => ["admin", "socket"],
            AppError::AccessLog { .. } => ["log", "access"],
            AppError::Traces(_)
            | AppError::Acme(_)
            | AppError::Worker(_)
            | AppError::NoDescriptors { .. }
            | AppError::Panic => return None,
        };
        Some(key.map(str::to_owned).to_vec())
    }

    /// Return what the operator can do about the error.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            AppError::Listen { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => {
                    Some("another process listens on this address: stop that process, or choose another port")
                }
                io::ErrorKind::PermissionDenied => Some("ports below 1024 need root or CAP_NET_BIND_SERVICE"),
                io::ErrorKind::AddrNotAvailable => Some("this machine does not have this address"),
                _ => None,
            },
            AppError::AdminSocket { .. } => Some("set `socket` in [admin] to another path, or to \"off\""),
            AppError::AccessLog { .. }
            | AppError::Traces(_)
            | AppError::Acme(_)
            | AppError::Worker(_)
            | AppError::NoDescriptors { .. }
            | AppError::Panic => None,
        }
    }
}

/// A gateway that has opened its sockets and is ready to serve requests.
#[derive(Debug)]
pub struct App {
    config: Arc<CompiledConfig>,
    /// Listening sockets by worker, each with the index of its listener.
    sockets: Vec<Vec<(usize, ListeningSocket)>>,
    /// Bound addresses, in the order of the listeners.
    addresses: Vec<ListenAddress>,
    admin: Option<StdListener>,
    admin_socket: Option<UnixListener>,
    /// Files of the Unix sockets, including the admin socket.
    socket_files: Vec<SocketFile>,
    /// Cancelled to stop the admin listener.
    admin_stop: CancellationToken,
    /// Cancelled when `/readyz` must return 503.
    stopping: CancellationToken,
    sinks: TelemetrySinks,
    config_handle: Arc<ConfigHandle>,
    reload_requests: Receiver<ReloadRequest>,
    /// Obtains certificates. `None` without `[acme]`.
    acme: Option<AcmeClient>,
    /// Hot restarts that started this process, and hot restarts of this process that failed.
    hot_restarts: Arc<Counter<2>>,
    /// Watches the configuration files and the files that they refer to.
    watcher: Option<FileWatcher>,
    lint: Lint,
}

/// Returns the warnings about a configuration, by file. The last argument is the time since the Unix epoch.
pub type Lint = fn(&ParsedFile<Config>, &CompiledConfig, Duration) -> Vec<FileIssues>;

/// Log the warnings about a configuration. Return them for the admin API.
fn log_warnings(files: &[FileIssues]) -> Arc<[String]> {
    let mut texts = Vec::new();
    for file in files {
        let path = file.display_path();
        for issue in file.redacted_issues() {
            let line = issue.position(&file.text).map(|(line, _)| line);
            warn!(file = %path, line, hint = issue.hint, "{}", issue.message);
            let line = line.map_or_else(String::new, |line| format!(":{line}"));
            texts.push(format!("{path}{line}: {}", issue.message));
        }
    }
    texts.into()
}

impl App {
    /// Open the sockets and the access log, start the trace exporter, and watch the configuration files. Log the
    /// warnings about the configuration that `lint` returns. `file` is the parsed form of the configuration.
    ///
    /// # Errors
    /// An address cannot be bound, the access log cannot be opened, or the trace exporter cannot be started.
    pub fn open(config: CompiledConfig, file: &ParsedFile<Config>, lint: Lint) -> Result<Self, AppError> {
        settings::raise_soft_limit();
        let warnings = log_warnings(&lint(file, &config, Duration::from_micros(clock::unix_us())));
        let max_connections = config.server.max_connections;
        let max_files = settings::hard_limit();
        if max_connections as u64 > max_files {
            warn!(max_connections, max_files, "too few file descriptors for max_connections: raise `ulimit -Hn`");
        }
        if let Some(memory) = &config.server.memory {
            let has_tls = config.listeners.iter().any(|listener| listener.tls.is_some());
            let fitting = memory.connections(has_tls);
            let limit = memory.bytes;
            if max_connections as u64 > fitting {
                warn!(
                    max_connections,
                    fitting, limit, "too little memory for max_connections: the kernel may end the process"
                );
            } else {
                info!(limit, max_connections, "the defaults fit into the memory limit");
            }
        }
        let accepting = match config.server.worker_model {
            WorkerModel::PerCore => config.server.workers,
            WorkerModel::Shared => 1,
        };
        let mut inherited = InheritedSockets::from_env();
        let mut addresses = Vec::new();
        let mut sockets: Vec<Vec<_>> = (0..accepting).map(|_| Vec::new()).collect();
        let mut socket_files = Vec::new();
        for (listener_index, Listener { address, .. }) in config.listeners.iter().enumerate() {
            let opened = match address {
                ListenAddress::Tcp(address) => inherited.open(*address, accepting),
                ListenAddress::Unix(path) => listen::open_unix(path, accepting).map(|(sockets, file)| {
                    socket_files.push(file);
                    sockets
                }),
            };
            let ListenerSockets { address, by_worker } = opened.map_err(|source| AppError::Listen {
                address: address.clone(),
                listener_index: Some(listener_index),
                source,
            })?;
            addresses.push(address);
            for (worker, opened) in sockets.iter_mut().zip(by_worker) {
                worker.extend(opened.into_iter().map(|socket| (listener_index, socket)));
            }
        }
        let admin = config.admin.as_ref().map(|&AdminSettings { address, .. }| {
            let opened = inherited.open_single(address);
            let address = ListenAddress::Tcp(address);
            opened.map_err(|source| AppError::Listen { address, listener_index: None, source })
        });
        let admin = admin.transpose()?;
        inherited.close_unclaimed();
        let admin_socket = listen::socket_path(&config.admin_socket)
            .map(|path| SocketFile::open_admin(&path).map_err(|source| AppError::AdminSocket { path, source }));
        let admin_socket = admin_socket.transpose()?.map(|(socket, file)| {
            socket_files.push(file);
            socket
        });
        let spans = config.log.traces.as_ref().map(collector::start).transpose().map_err(AppError::Traces)?;
        let sinks = TelemetrySinks { access_log: open_access_log(&config)?, trace_exporter: spans };
        let acme = config.acme.as_ref().map(AcmeClient::open).transpose()?;
        let config = Arc::new(config);
        let (config_handle, reload_requests) = ConfigHandle::new(config.clone());
        config_handle.set_warnings(warnings);
        let config_handle = Arc::new(config_handle);
        let watcher = file_watcher::watch_files(&config_handle);
        let admin_stop = CancellationToken::new();
        Ok(App {
            config,
            sockets,
            addresses,
            admin,
            admin_socket,
            socket_files,
            admin_stop,
            stopping: CancellationToken::new(),
            sinks,
            config_handle,
            reload_requests,
            acme,
            hot_restarts: hot_restart::counter(),
            watcher,
            lint,
        })
    }

    /// Return the handle of the active configuration. It can also trigger reloads.
    pub fn config_handle(&self) -> Arc<ConfigHandle> {
        self.config_handle.clone()
    }

    /// Return the token to cancel when the process receives a stop signal, before `accept_grace` starts. When the token
    /// is cancelled, `/readyz` returns 503.
    pub fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Duplicate the listening sockets for a hot restart. The duplicates keep the sockets open.
    ///
    /// # Errors
    /// A socket cannot be duplicated, for example because the limit on open files is reached.
    pub fn hot_restart(&self) -> io::Result<HotRestart> {
        let mut sockets: Vec<_> = self.sockets.iter().flatten().collect();
        sockets.sort_by_key(|(listener_index, _)| *listener_index);
        let sockets = sockets.into_iter().filter_map(|(_, socket)| socket.tcp()).chain(&self.admin);
        Ok(HotRestart {
            sockets: sockets.map(StdListener::try_clone).collect::<io::Result<_>>()?,
            admin_stop: self.admin_stop.clone(),
            results: self.hot_restarts.clone(),
            reads_input: self.config.files.main.path == Path::new(STANDARD_INPUT),
        })
    }

    /// Serve requests until `stop` is cancelled and all requests in flight are completed.
    ///
    /// # Errors
    /// A thread cannot be started, or panics.
    pub fn run(self, stop: &CancellationToken) -> Result<(), AppError> {
        let (maintenance, maintenance_thread) = MaintenanceThread::start(stop.clone())?;
        let active = self.config_handle.active();
        maintenance.set_config(&active.config, &active.clusters).map_err(AppError::Worker)?;
        let startup_message = self.startup_message();
        let example = self.example_command();
        let (event_queue, queued_events) = EventQueue::new();
        let entries = self.config.store.denial_cache;
        let denial_cache =
            (entries > 0 && self.config.store.redis.is_some()).then(|| Arc::new(DenialCache::new(entries)));
        let config_handle = self.config_handle.clone();
        let limits_by_name = move |name: &str| {
            let active = config_handle.active();
            active.config.find_limit(name).cloned()
        };
        let overrides = Overrides::new(self.config.hasher.clone(), limits_by_name, denial_cache.clone());
        let threads = match self.config.server.worker_model {
            WorkerModel::PerCore => 1,
            WorkerModel::Shared => self.config.server.workers,
        };
        let state = Arc::new(ProcessState {
            request_metrics: Arc::default(),
            held_decisions: Arc::default(),
            limiter_metrics: Arc::default(),
            listener_metrics: Arc::default(),
            heartbeats: Arc::new(Heartbeats::new(self.sockets.len())),
            connection_limits: Arc::new(ConnectionLimits::new(&self.config.server, self.config.listeners.len())),
            listener_addresses: self.addresses,
            config_handle: self.config_handle,
            store_name: self.config.store.name.clone(),
            memory_guard: Arc::new(MemoryGuard::new(self.sockets.len())),
            memory: Arc::new(MemoryStore::new(self.config.store.max_memory_states, Clock::Store)),
            circuit_breaker: Arc::default(),
            cluster_map: Arc::default(),
            overrides: Arc::new(overrides),
            denial_cache,
            prefetch_pool: Arc::default(),
            wait_queues: Arc::default(),
            event_queue: Arc::new(event_queue),
            delivery_stats: Arc::default(),
            telemetry_sinks: self.sinks,
            example,
            hot_restarts: self.hot_restarts,
            started_at_s: clock::unix_us() / 1_000_000,
            stopping: self.stopping,
            admin_stop: self.admin_stop.clone(),
        });
        // Stop the admin listener when this function returns, which is after the last request.
        let _end = self.admin_stop.drop_guard();
        let unix = self.admin_socket;
        let mut socket_files = self.socket_files;
        memory_watch::start(state.clone()).map_err(AppError::Worker)?;
        let gateways = Arc::<WorkerGateways>::default();
        let reloader = Reloader {
            state: state.clone(),
            requests: self.reload_requests,
            gateways: gateways.clone(),
            maintenance,
            watcher: self.watcher,
            lint: self.lint,
            stop: stop.clone(),
        };
        // Do not join the reload thread. It ends with the process.
        thread::Builder::new().name("reload".to_owned()).spawn(|| reloader.run()).map_err(AppError::Worker)?;
        let mut workers = vec![maintenance_thread];
        if let Some(settings) = self.config.xds.clone() {
            let config_handle = state.config_handle.clone();
            let (first, first_applied) = sync_channel(1);
            let client = XdsClient { settings: settings.clone(), config_handle, stop: stop.clone() };
            workers.push(client.start(first)?);
            // The old process of a hot restart has descriptors, so wait for them before accepting connections, also of
            // the admin listener.
            if hot_restart::is_hot_restart()
                && first_applied.recv_timeout(DESCRIPTORS_TIMEOUT) == Err(RecvTimeoutError::Timeout)
                && settings.ready_after != ReadyAfter::Start
            {
                return Err(AppError::NoDescriptors { server: settings.url.origin() });
            }
        }
        if self.admin.is_some() || unix.is_some() {
            admin::start(AdminSockets { tcp: self.admin, unix }, &state).map_err(AppError::Worker)?;
        }
        if let Some(acme) = self.acme {
            workers.push(acme.start(state.clone(), stop.clone())?);
        }
        let statsd = self.config.statsd.clone();
        let statsd = statsd.map(|settings| StatsdThread::start(settings, state.clone()).map_err(AppError::Worker));
        let statsd = statsd.transpose()?;
        let background_threads = workers.len();
        let event_thread = EventThread::start(state.clone(), queued_events)?;
        let (ready_sender, ready_receiver) = channel();
        for (index, sockets) in self.sockets.into_iter().enumerate() {
            let worker = Worker { state: state.clone(), gateways: gateways.clone(), index, stop: stop.clone() };
            let ready_sender = ready_sender.clone();
            let run = move || worker.run(threads, sockets, ready_sender);
            workers.push(thread::Builder::new().name(format!("worker-{index}")).spawn(run).map_err(AppError::Worker)?);
        }
        drop(ready_sender);
        // A worker that cannot start drops its sender without sending. Report readiness only if all workers serve
        // requests.
        if ready_receiver.iter().count() == workers.len() - background_threads {
            for file in &mut socket_files {
                if let Err(error) = file.publish() {
                    warn!(%error, "cannot rename a Unix socket to its final path");
                }
            }
            info!("{startup_message}");
            hot_restart::notify_ready();
            watchdog::start(state.heartbeats.clone()).map_err(AppError::Worker)?;
        }
        let mut result = Ok(());
        for worker in workers {
            result = result.and(worker.join().unwrap_or(Err(AppError::Panic)));
        }
        // The workers have ended, so no more quota events will be queued.
        result = result.and(event_thread.finish());
        if let Some(statsd) = statsd {
            statsd.finish();
        }
        state.telemetry_sinks.flush();
        result
    }

    /// Return the log message for the time when all workers serve requests: the addresses, and a command to try.
    fn startup_message(&self) -> String {
        let config = &self.config;
        let admin = self.admin.as_ref().and_then(|socket| socket.local_addr().ok());
        let admin = admin.map_or(String::new(), |address| format!("admin on http://{address}; "));
        let example = self.example_command().map_or(String::new(), |command| format!("; try: {command}"));
        format!(
            "sluicegate {} listens on {}; {admin}store: {}; {}, {}{example}",
            env!("CARGO_PKG_VERSION"),
            self.urls().join(", "),
            config.store.name,
            pluralize(config.routes.len() as u64, "route"),
            pluralize(config.limits.len() as u64, "limit"),
        )
    }

    /// Return the URLs of the listeners.
    fn urls(&self) -> Vec<String> {
        let listeners = self.addresses.iter().zip(&self.config.listeners);
        let url = |(address, listener): (&ListenAddress, &Listener)| match (address, listener.tls.is_some()) {
            (ListenAddress::Unix(_), _) => address.to_string(),
            (ListenAddress::Tcp(_), false) => format!("http://{address}"),
            (ListenAddress::Tcp(_), true) => format!("https://{address}"),
        };
        listeners.map(url).collect()
    }

    /// Return a command that sends a request. `None` if no listener serves routes.
    fn example_command(&self) -> Option<String> {
        let config = &self.config;
        let mut routes = config.routes.iter().filter(|route| !route.path_pattern.is_regex());
        let example = routes.clone().find(|route| matches!(route.action, RouteAction::DirectResponse(_)));
        let example = example.or(routes.next());
        let method = example.map_or(String::new(), |route| curl_method(config, route));
        let example = example.map_or("/", |route| &route.path);
        // For the example URL in the log, use the part of the path pattern before its first parameter.
        let example = example.split('{').next().unwrap_or("/");
        let serves_routes =
            |listener: &Listener| listener.protocol == ListenerProtocol::Http && listener.address.tcp().is_some();
        let first = config.listeners.iter().position(serves_routes)?;
        Some(format!("curl -i {method}{}{example}", self.urls()[first]))
    }
}

/// Return the option of curl for the first method of a route. curl sends GET by default.
fn curl_method(config: &CompiledConfig, route: &Route) -> String {
    let uri = Uri::default();
    let headers = HeaderMap::new();
    let body = RouteBody::Unknown;
    let request =
        RouteRequest { host: "", path: "/", uri: &uri, method: &Method::GET, headers: &headers, listener: 0, body };
    let candidates = config.table.candidates(&request);
    let candidate = candidates.iter().find(|candidate| candidate.target.index == route.index);
    match candidate.map_or(&[][..], |candidate| candidate.methods) {
        methods if methods.contains(&Method::GET) => String::new(),
        [Method::HEAD, ..] => "-I ".to_owned(),
        [first, ..] => format!("-X {first} "),
        [] => String::new(),
    }
}

fn open_access_log(config: &CompiledConfig) -> Result<Option<AccessLog>, AppError> {
    let log = &config.log;
    let (path, destination) = match &log.access_log {
        AccessLogTarget::Off => return Ok(None),
        AccessLogTarget::Stdout => (PathBuf::from("standard output"), LogDestination::Stream(Box::new(io::stdout()))),
        AccessLogTarget::File(path) => {
            let file = LogFile::open(path.clone());
            let file = file.map_err(|source| AppError::AccessLog { path: path.clone(), source })?;
            (path.clone(), LogDestination::Stream(Box::new(file)))
        }
        AccessLogTarget::Syslog(syslog) => (syslog.socket.clone(), LogDestination::Syslog(syslog.clone())),
        AccessLogTarget::Journald(journald) => (journald.socket.clone(), LogDestination::Journald(journald.clone())),
    };
    let access_log = AccessLog::start(log.access_format.clone(), log.access_sample, destination);
    access_log.map(Some).map_err(|source| AppError::AccessLog { path, source })
}

// === A worker thread: a tokio runtime with a gateway, a server and store connections ===

/// Maximum time for which the new process of a hot restart waits for descriptors.
const DESCRIPTORS_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum time that a worker waits at its start for the first store connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// A worker thread.
struct Worker {
    state: Arc<ProcessState>,
    gateways: Arc<WorkerGateways>,
    index: usize,
    stop: CancellationToken,
}

impl Worker {
    /// Serve the sockets until `stop` is cancelled and all connections are drained. `sockets` contains each socket with
    /// the index of its listener. `threads` is the number of runtime threads. When the worker serves requests, it sends
    /// to `ready_sender`.
    ///
    /// # Errors
    /// The runtime cannot be created, or a socket cannot be registered with it.
    fn run(
        self,
        threads: usize,
        sockets: Vec<(usize, ListeningSocket)>,
        ready_sender: Sender<()>,
    ) -> Result<(), AppError> {
        let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
        let runtime = builder.worker_threads(threads).enable_all().build().map_err(AppError::Worker)?;
        runtime.block_on(async {
            tokio::spawn(self.state.heartbeats.clone().beat(self.index));
            let listener = |(index, socket): (_, ListeningSocket)| Ok((index, socket.into_acceptor()?));
            let listeners = sockets.into_iter().map(listener).collect::<io::Result<_>>().map_err(AppError::Worker)?;
            let store = self.open_store().await;
            let counted_store = store.redis().filter(|_| self.index == 0).cloned();
            let limiter = self.build_limiter(store);
            let state = &self.state;
            let worker = GatewayWorker {
                request_metrics: state.request_metrics.clone(),
                held_decisions: state.held_decisions.clone(),
                worker: self.index,
                stopping: state.stopping.clone(),
                memory_guard: state.memory_guard.clone(),
            };
            let listener_metrics = state.listener_metrics.get_or_create("", self.index);
            let gateway = self.gateways.register(&state.config_handle, |active| {
                let sinks = state.telemetry_sinks.clone();
                Gateway::new(active.config.clone(), limiter, &active.clusters, sinks, worker)
            });
            // Each request asks whether the gateway drains, which takes the mutex of the token. Workers must not share it.
            let drain = self.stop.child_token();
            let server = Server::new(gateway, state.connection_limits.clone(), listener_metrics, drain);
            // Ignore a send error, which means that the receiver was dropped.
            let _ = ready_sender.send(());
            drop(ready_sender);
            match counted_store {
                Some(store) => gateways::count_while(&self.state, &store, server.run(listeners)).await,
                None => server.run(listeners).await,
            }
            Ok(())
        })
    }

    async fn open_store(&self) -> Store {
        let state = &self.state;
        match &state.config_handle.active().config.store.redis {
            None => Store::Memory(state.memory.clone()),
            Some((deployment, settings)) => {
                let metrics = state.limiter_metrics.get_or_create("", self.index);
                let breaker = state.circuit_breaker.clone();
                let topology = state.cluster_map.clone();
                let store = RedisStore::new(deployment, settings, breaker, topology, metrics.clone());
                // Connect before the first request. If the store does not respond within [`CONNECT_TIMEOUT`], start
                // without a connection.
                store.connect_within(CONNECT_TIMEOUT).await;
                if self.index == 0 {
                    let overrides = state.overrides.clone();
                    let store = store.clone();
                    let key = overrides::hash_key(&settings.prefix);
                    tokio::spawn(async move { overrides.poll(&store, &key).await });
                }
                Store::Redis { store, fallback: state.memory.clone(), metrics }
            }
        }
    }

    fn build_limiter(&self, store: Store) -> Limiter {
        let state = &self.state;
        let denial_cache = state.denial_cache.clone();
        let prefetch_pool = state.prefetch_pool.clone();
        let wait_queues = state.wait_queues.clone();
        let overrides = state.overrides.clone();
        let events = state.event_queue.clone();
        Limiter::new(store, denial_cache, prefetch_pool, wait_queues, overrides, events, random_permit_id())
    }
}
