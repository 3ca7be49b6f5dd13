//! The admin listener, which serves health checks, metrics, the admin API and the dashboard. It has its own sockets and
//! its own thread.

pub(crate) mod api;
mod configuration;
mod connections;
mod events;
mod metrics;
pub mod usage;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener as StdListener};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use bytes::Bytes;
use futures_util::future::OptionFuture;
use http::header::{
    ACCEPT, ALLOW, AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderName,
    REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::admin::api::ApiError;
use crate::admin::connections::{AdminConnection, AdminConnections};
use crate::admin::events::{EventBody, EventStream};
use crate::limiter::admin::LimiterAdmin;
use crate::limiter::memory::MemoryStore;
use crate::limiter::metrics::{LimiterMetrics, MetricFamily};
use crate::limiter::notify::{DeliveryStats, EventQueue};
use crate::limiter::overrides::Overrides;
use crate::limiter::redis::RedisSettings;
use crate::limiter::redis::circuit_breaker::CircuitBreaker;
use crate::limiter::redis::cluster::topology::ClusterMap;
use crate::limiter::store::RedisStore;
use crate::listener::ConnectionLimits;
use crate::listener::metrics::ListenerMetrics;
use crate::proxy::metrics::RequestMetrics;
use crate::snapshot::current::ConfigHandle;
use crate::snapshot::settings::AdminToken;
use crate::snapshot::{CompiledConfig, Listener};
use crate::telemetry::access_log::TelemetrySinks;
use crate::telemetry::prometheus as text_form;
use crate::telemetry::prometheus::ExpositionFormat;
use crate::upstream::cluster::EndpointStatus;

/// Maximum time to complete requests in progress when the admin listener stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Delay before the next `accept` after a failed `accept`. An immediate retry would fail again, for example with
/// EMFILE.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Minimum timeout of store calls for API requests. It is longer than the default of `store.timeout` (50 ms), because
/// the first call also connects to the store.
const MIN_STORE_TIMEOUT: Duration = Duration::from_secs(1);

type AdminResponse = Response<Either<Full<Bytes>, EventBody>>;

/// The parts of the process that the admin listener reads and changes.
#[derive(Debug)]
pub struct AdminDeps {
    /// State for health, metrics and the dashboard.
    pub state: Arc<AdminState>,
    /// The memory store.
    pub memory: Arc<MemoryStore>,
    /// The quota overrides of single identities.
    pub overrides: Arc<Overrides>,
}

/// The request handler of the admin listener.
#[derive(Debug)]
struct AdminServer {
    state: Arc<AdminState>,
    limiter_admin: Arc<LimiterAdmin>,
    event_stream: Arc<EventStream>,
    /// Whether this server serves the admin socket. The socket's file permissions admit only root and the user that
    /// runs the gateway.
    is_unix_socket: bool,
}

/// The sockets of the admin listener.
#[derive(Debug, Default)]
pub struct AdminSockets {
    /// The TCP socket that listens on `admin.address`.
    pub tcp: Option<StdListener>,
    /// The Unix socket at the path `admin.socket`.
    pub unix: Option<StdUnixListener>,
}

/// Peer address that is used for all connections of the admin socket. The maximum number of connections per peer
/// address therefore applies to the whole socket.
const UNIX_PEER: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Start the thread that serves the admin listener until `admin_stop` is cancelled.
///
/// # Errors
/// The tokio runtime or the thread cannot be started.
pub fn start(sockets: AdminSockets, deps: AdminDeps, admin_stop: CancellationToken) -> io::Result<JoinHandle<()>> {
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let AdminDeps { state, memory, overrides } = deps;
    let (admin, unix_admin, tcp, unix) = {
        let _context = tokio_runtime.enter();
        let redis = redis_store(&state.config_handle.active().config, &state);
        let event_stream = Arc::new(EventStream::new(&state));
        let limiter_admin = Arc::new(LimiterAdmin { memory, redis, overrides });
        let server = |is_unix_socket| AdminServer {
            state: state.clone(),
            limiter_admin: limiter_admin.clone(),
            event_stream: event_stream.clone(),
            is_unix_socket,
        };
        let tcp = sockets.tcp.map(TcpListener::from_std).transpose()?;
        let unix = sockets.unix.map(UnixListener::from_std).transpose()?;
        (Arc::new(server(false)), Arc::new(server(true)), tcp, unix)
    };
    let serve = move || {
        tokio_runtime.block_on(async {
            let tasks = TaskTracker::new();
            let sampler = admin.clone();
            let connections = Arc::<AdminConnections>::default();
            let service = async {
                tokio::join!(
                    OptionFuture::from(tcp.map(|tcp| admin.accept(tcp, &connections, &tasks))),
                    OptionFuture::from(unix.map(|unix| unix_admin.accept_unix(unix, &connections, &tasks))),
                    sampler.event_stream.run(&sampler.state)
                )
            };
            admin_stop.run_until_cancelled(service).await;
            // Wait until requests in progress have received their responses.
            tasks.close();
            let _ = timeout(SHUTDOWN_TIMEOUT, tasks.wait()).await;
        });
    };
    std::thread::Builder::new().name("admin".to_owned()).spawn(serve)
}

/// Return the Redis store of the admin listener, and the prefix of its keys. The store has a separate connection, so
/// that API calls do not delay rate limit checks.
fn redis_store(config: &CompiledConfig, state: &AdminState) -> Option<(RedisStore, String)> {
    let (servers, settings) = config.store.redis.as_ref()?;
    let timeout = config.store.timeout.max(MIN_STORE_TIMEOUT);
    let settings = RedisSettings { timeout, connections: 1, ..settings.clone() };
    let prefix = settings.prefix.clone();
    let breaker = state.circuit_breaker.clone();
    let topology = state.cluster_map.clone();
    Some((RedisStore::new(&(servers.clone(), settings), breaker, topology, Arc::default()), prefix))
}

impl AdminServer {
    async fn accept_unix(
        self: Arc<Self>,
        listener: UnixListener,
        connections: &Arc<AdminConnections>,
        tasks: &TaskTracker,
    ) -> Infallible {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let admin = self.clone();
                    let connection = connections.admit(UNIX_PEER);
                    tasks.spawn(async move { admin.serve_connection(stream, Arc::new(connection)).await });
                }
                Err(error) => {
                    warn!(%error, "cannot accept a connection on the admin socket");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    async fn accept(
        self: Arc<Self>,
        listener: TcpListener,
        connections: &Arc<AdminConnections>,
        tasks: &TaskTracker,
    ) -> Infallible {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let admin = self.clone();
                    let connection = connections.admit(peer.ip());
                    tasks.spawn(async move { admin.serve_connection(stream, Arc::new(connection)).await });
                }
                Err(error) => {
                    warn!(%error, "cannot accept a connection on the admin listener");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    async fn serve_connection<S>(&self, stream: S, connection: Arc<AdminConnection>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let service = service_fn(|request: Request<Incoming>| {
            let connection = connection.clone();
            async move {
                connection.set_busy();
                let mut response = self.handle(request, &connection).await;
                connection.set_idle();
                response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                add_security_headers(&mut response);
                Ok::<_, Infallible>(response)
            }
        });
        let mut connection_future = pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        loop {
            tokio::select! {
                biased;
                () = connection.close_token.cancelled() => return,
                // Ignore an error of the connection, because it affects only this client of the admin listener.
                _ = &mut connection_future => return,
                () = sleep(connection.time_left()) => if connection.time_left().is_zero() { return },
            }
        }
    }

    async fn handle(&self, request: Request<Incoming>, connection: &Arc<AdminConnection>) -> AdminResponse {
        let method = request.method();
        let path = request.uri().path();
        let headers = request.headers();
        if connection.is_reserved && !matches!(path, "/healthz" | "/readyz") {
            let mut response = text_response(
                StatusCode::SERVICE_UNAVAILABLE,
                "the admin listener has reached its maximum number of connections: only /healthz and /readyz are \
                 served\n",
            );
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            return response;
        }
        if !self.is_unix_socket && self.token().is_none() && path != "/healthz" && !is_for_loopback(&request) {
            // Prevent DNS rebinding: an attacker can make the DNS name of their web page resolve to this machine. The
            // browser then allows the page to send requests to this listener.
            return text_response(
                StatusCode::FORBIDDEN,
                "admin.token is not set: the host of a request must be localhost, 127.0.0.1 or [::1]\n",
            );
        }
        if let Some(file) = find_file(path, self.token().is_some()) {
            return if is_read_method(method) { file } else { method_not_allowed("GET, HEAD") };
        }
        if !self.is_authenticated(headers) {
            return unauthorized();
        }
        let response = match path {
            "/healthz" => text_response(StatusCode::OK, "ok\n"),
            "/readyz" => self.readiness(),
            "/metrics" => self.metrics(headers),
            "/api/config" => self.config_view(),
            "/api/live" if method == Method::GET => {
                return self.event_stream.subscribe(self.state.admin_stop.clone(), connection);
            }
            "/api/live" => return method_not_allowed("GET"),
            "/api/reload" if method == Method::POST => return self.reload(headers).await,
            "/api/reload" => return method_not_allowed("POST"),
            _ if path.starts_with("/api/") => return api::handle(self, request).await,
            _ => {
                return text_response(
                    StatusCode::NOT_FOUND,
                    "not found: the paths are /, /healthz, /readyz, /metrics and /api/…\n",
                );
            }
        };
        if is_read_method(method) { response } else { method_not_allowed("GET, HEAD") }
    }

    /// Return the configured admin token. Return `None` if `admin.token` is not set, or if this server serves the admin
    /// socket.
    fn token(&self) -> Option<AdminToken> {
        if self.is_unix_socket {
            return None;
        }
        self.state.config_handle.active().config.admin.as_ref()?.token.clone()
    }

    /// Authorize a request that changes the state of the gateway. Over TCP, changes always require the admin token.
    /// Without a token, any web page in a browser on this machine could send changes to a loopback address.
    ///
    /// # Errors
    /// 403 if the token is missing or wrong, or if no token is configured. Requests on the admin socket are always
    /// authorized.
    fn authorize_write(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_unix_socket {
            return Ok(());
        }
        let detail = match self.token() {
            Some(_) if self.is_authenticated(headers) => return Ok(()),
            Some(_) => "requests that change something need the admin token: send Authorization: Bearer TOKEN",
            None => "requests that change something need an admin token, but none is configured: set admin.token",
        };
        Err(ApiError::new(StatusCode::FORBIDDEN, detail))
    }

    /// Return whether the request has the admin token as `Bearer` credentials. If no token is configured, return true.
    fn is_authenticated(&self, headers: &HeaderMap) -> bool {
        let Some(token) = self.token() else { return true };
        let credentials = headers.get(AUTHORIZATION).and_then(|header| header.as_bytes().split_at_checked(7));
        credentials.is_some_and(|(scheme, presented_token)| {
            scheme.eq_ignore_ascii_case(b"bearer ")
                && verify_slices_are_equal(presented_token, token.as_bytes()).is_ok()
        })
    }

    fn readiness(&self) -> AdminResponse {
        let health = self.state.readiness();
        let status = if health.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        // Serialization cannot fail, because all map keys are strings.
        let body = serde_json::to_string(&health).unwrap_or_default() + "\n";
        typed_response(status, "application/json", body)
    }

    fn metrics(&self, headers: &HeaderMap) -> AdminResponse {
        let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
        let form = ExpositionFormat::from_accept(accept);
        match text_form::render(&self.state, form) {
            Ok(page) => typed_response(StatusCode::OK, form.content_type(), page),
            Err(error) => text_response(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}\n")),
        }
    }
}

fn is_read_method(method: &Method) -> bool {
    method == Method::GET || method == Method::HEAD
}

/// Return whether the `Host` headers and the request target contain only `localhost` or loopback addresses. A web page
/// that uses DNS rebinding has another host name, so this function returns false for its requests.
fn is_for_loopback(request: &Request<Incoming>) -> bool {
    let is_loopback = |authority: &str| {
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        let host = authority.host();
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        address.map_or_else(|_| host.eq_ignore_ascii_case("localhost"), |address| address.is_loopback())
    };
    let host_headers = request.headers().get_all(HOST).iter();
    host_headers
        .map(|host_header| host_header.to_str().unwrap_or_default())
        .chain(request.uri().authority().map(Authority::as_str))
        .all(is_loopback)
}

/// Return the 401 response for a request without the admin token.
fn unauthorized() -> AdminResponse {
    let mut response =
        text_response(StatusCode::UNAUTHORIZED, "admin token required: send Authorization: Bearer TOKEN\n");
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

fn method_not_allowed(methods: &'static str) -> AdminResponse {
    let mut response = text_response(StatusCode::METHOD_NOT_ALLOWED, &format!("method not allowed: use {methods}\n"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

fn text_response(status: StatusCode, body: &str) -> AdminResponse {
    typed_response(status, "text/plain; charset=utf-8", body.to_owned())
}

fn typed_response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> AdminResponse {
    let mut response = Response::new(Either::Left(Full::new(body.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

// === State of the process ===

/// The state of the process that health checks, metrics, the API and the dashboard show.
#[derive(Debug)]
pub struct AdminState {
    /// Request metrics of all workers.
    pub request_metrics: Arc<RequestMetrics>,
    /// Limiter metrics of all workers.
    pub limiter_metrics: Arc<MetricFamily<LimiterMetrics>>,
    /// Listener metrics of all workers.
    pub listener_metrics: Arc<MetricFamily<ListenerMetrics>>,
    /// Open client connections and their limits.
    pub connection_limits: Arc<ConnectionLimits>,
    /// Bound addresses of the listeners, in the order of the configuration.
    pub listener_addresses: Vec<SocketAddr>,
    /// Display name of the store, without credentials.
    pub store_name: String,
    /// Access to the active configuration, and to reloads.
    pub config_handle: Arc<ConfigHandle>,
    /// The memory store.
    pub memory: Arc<MemoryStore>,
    /// Circuit breaker of the store, if the store is a single Redis server.
    pub circuit_breaker: Arc<CircuitBreaker>,
    /// Slot map of the store with a circuit breaker per node, if the store is a Redis Cluster.
    pub cluster_map: Arc<ClusterMap>,
    /// The queue of quota events.
    pub event_queue: Arc<EventQueue>,
    /// Results of the deliveries of quota events, by destination.
    pub delivery_stats: Arc<MetricFamily<DeliveryStats>>,
    /// Access log and trace exporter.
    pub telemetry_sinks: TelemetrySinks,
    /// Start time of the process, in seconds since the Unix epoch.
    pub started_at_s: u64,
    /// Cancelled by the first SIGTERM or SIGINT, when `accept_grace` begins. A hot restart does not cancel this token,
    /// because the new process continues to serve requests.
    pub stopping: CancellationToken,
    /// Cancelled when the admin listener stops: at the end of the process, or when a hot restart has succeeded.
    pub admin_stop: CancellationToken,
}

impl AdminState {
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

// === The dashboard at `/`: static files without data, and browser security headers ===

const INDEX_HTML: &str = include_str!("admin/dashboard/index.html");

/// HTML attribute of `<body>` that tells the scripts of the dashboard whether `admin.token` is configured.
const WITHOUT_TOKEN: &str = "data-token=\"none\"";
const WITH_TOKEN: &str = "data-token=\"required\"";

const JAVASCRIPT_TYPE: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 10] = [
    ("/page.css", "text/css; charset=utf-8", include_str!("admin/dashboard/page.css")),
    ("/page.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/page.js")),
    ("/api.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/api.js")),
    ("/chart.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/chart.js")),
    ("/dialogs.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/dialogs.js")),
    ("/dom.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/dom.js")),
    ("/flow.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/flow.js")),
    ("/inspect.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/inspect.js")),
    ("/limits.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/limits.js")),
    ("/tokens.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/tokens.js")),
];

/// Content Security Policy. The browser loads scripts and styles only from the gateway: inline code, other origins and
/// framing are forbidden. Trusted Types prevent scripts from converting text into markup.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const SECURITY_HEADERS: [(HeaderName, &str); 4] = [
    (CONTENT_SECURITY_POLICY, CSP),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
];

/// Return the file of the dashboard at `path`, or `None` if the file does not exist. The files are served without
/// authentication, because they contain no data. The scripts request the data from the API with the admin token.
fn find_file(path: &str, has_token: bool) -> Option<AdminResponse> {
    if path == "/" {
        let index = if has_token { INDEX_HTML.replace(WITHOUT_TOKEN, WITH_TOKEN) } else { INDEX_HTML.to_owned() };
        return Some(typed_response(StatusCode::OK, "text/html; charset=utf-8", index));
    }
    let (_, content_type, text) = FILES.iter().find(|(name, ..)| *name == path)?;
    Some(typed_response(StatusCode::OK, content_type, (*text).to_owned()))
}

/// Add the browser security headers. Every response of the admin listener has them.
fn add_security_headers(response: &mut AdminResponse) {
    for (name, value) in SECURITY_HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
}

// === `/readyz`: readiness of the process, its store and its upstreams ===

/// Response body of `/readyz`.
#[derive(Debug, Serialize)]
struct ReadinessReport<'a> {
    status: ReadinessStatus,
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
enum ReadinessStatus {
    /// All circuit breakers of the store are closed, and no listener lacks a certificate.
    Ready,
    /// A circuit breaker of the store is open. The gateway serves requests, and each limit applies its
    /// `on_store_error`.
    Degraded,
    /// A listener has not obtained a certificate by ACME yet, and serves a self-signed certificate.
    Pending,
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
    fn is_ready(&self) -> bool {
        matches!(self.status, ReadinessStatus::Ready | ReadinessStatus::Degraded)
    }
}

impl AdminState {
    /// Return the current readiness.
    fn readiness(&self) -> ReadinessReport<'_> {
        let failing_stores = self.failing_stores();
        let active = self.config_handle.active();
        let lacks_certificates = active.config.listeners.iter().any(lacks_certificates);
        let status = match (self.stopping.is_cancelled(), lacks_certificates, failing_stores.is_empty()) {
            (true, ..) => ReadinessStatus::Stopping,
            (false, true, _) => ReadinessStatus::Pending,
            (false, false, true) => ReadinessStatus::Ready,
            (false, false, false) => ReadinessStatus::Degraded,
        };
        let to_server = |EndpointStatus { server, state, in_flight }| EndpointReadiness { server, state, in_flight };
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

/// Return whether a listener with ACME has no certificate from ACME yet.
fn lacks_certificates(listener: &Listener) -> bool {
    let managed = listener.tls.as_ref().and_then(|tls| tls.tls.managed());
    managed.is_some_and(|(names, certificates)| names.iter().all(|name| certificates.get(name).certificate.is_none()))
}
