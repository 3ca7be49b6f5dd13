//! The admin listener serves health checks, metrics, the API and the dashboard, with its own socket and thread.

pub(crate) mod api;
mod configuration;
mod connections;
mod dashboard;
mod events;
mod health;
mod metrics;
mod process;
pub mod state;
pub mod usage;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, TcpListener as StdListener};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use bytes::Bytes;
use futures_util::future::OptionFuture;
use http::header::{ACCEPT, ALLOW, AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HOST, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::admin::api::ApiError;
use crate::admin::connections::{AdminConnection, AdminConnections};
use crate::admin::events::{EventBody, EventStream};
use crate::admin::state::AdminState;
use crate::limiter::admin::LimiterAdmin;
use crate::limiter::memory::MemoryStore;
use crate::limiter::overrides::Overrides;
use crate::limiter::redis::RedisSettings;
use crate::limiter::store::RedisStore;
use crate::snapshot::CompiledConfig;
use crate::snapshot::settings::AdminToken;
use crate::telemetry::prometheus as text_form;
use crate::telemetry::prometheus::ExpositionFormat;

/// Maximum time to complete the requests in progress at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Delay after a connection could not be accepted. An immediate retry would fail again, for example with EMFILE.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Minimum store timeout for API requests, because the first call includes connecting.
const MIN_STORE_TIMEOUT: Duration = Duration::from_secs(1);

type AdminResponse = Response<Either<Full<Bytes>, EventBody>>;

/// References to the parts of the process that the admin listener reads and changes.
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
    /// Whether this is the admin socket, whose file permissions admit only the user of the gateway and root.
    is_unix_socket: bool,
}

/// The sockets of the admin listener.
#[derive(Debug, Default)]
pub struct AdminSockets {
    /// The TCP socket that listens on `admin.address`.
    pub tcp: Option<StdListener>,
    /// The unix socket at the path `admin.socket`.
    pub unix: Option<StdUnixListener>,
}

/// Peer address that stands for all connections of the admin socket. The maximum number of connections per peer address
/// therefore applies to the whole socket.
const UNIX_PEER: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Start the thread that serves the admin listener until `admin_stop` is cancelled.
///
/// # Errors
/// The runtime or the thread cannot be started.
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
            // Requests in progress at that time still get their response.
            tasks.close();
            let _ = timeout(SHUTDOWN_TIMEOUT, tasks.wait()).await;
        });
    };
    std::thread::Builder::new().name("admin".to_owned()).spawn(serve)
}

/// Return the Redis store of the admin listener and its key prefix. The store has its own connection, so that API calls
/// do not delay rate limit checks.
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
                dashboard::add_security_headers(&mut response);
                Ok::<_, Infallible>(response)
            }
        });
        let mut connection_future = pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        loop {
            tokio::select! {
                biased;
                () = connection.close_token.cancelled() => return,
                // Ignore the error of a connection, because it affects only this client of the admin listener.
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
                "all connections of the admin listener are in use: only /healthz and /readyz are served\n",
            );
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            return response;
        }
        if !self.is_unix_socket && self.token().is_none() && path != "/healthz" && !is_for_loopback(&request) {
            // DNS rebinding: the name in the URL of a foreign web page can resolve to this machine. The browser then
            // allows the page to send requests to this listener.
            return text_response(
                StatusCode::FORBIDDEN,
                "without admin.token only requests to localhost, 127.0.0.1 or [::1] are served\n",
            );
        }
        if let Some(file) = dashboard::find_file(path, self.token().is_some()) {
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

    /// Return the configured admin token. `None` if `admin.token` is not set, and for the admin socket.
    fn token(&self) -> Option<AdminToken> {
        if self.is_unix_socket {
            return None;
        }
        self.state.config_handle.active().config.admin.as_ref()?.token.clone()
    }

    /// Authorize a request that changes the state of the gateway. Changes always need the token. Without a token, any
    /// web page in a browser on this machine could send changes to a loopback address.
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
            Some(_) => "changes need the admin token: Authorization: Bearer …",
            None => "changes need an admin token, but none is configured: set admin.token",
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
        // Serializing a string cannot fail.
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

/// Return whether the `Host` headers and the request target name this machine, as `localhost` or by a loopback address.
/// DNS rebinding cannot forge these names.
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
    let mut response = text_response(StatusCode::UNAUTHORIZED, "admin token required: Authorization: Bearer …\n");
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
