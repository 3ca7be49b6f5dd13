//! The operator's side: health, metrics and the API, on a listener and a thread of its own.

pub(crate) mod api;
mod configuration;
mod connections;
mod dashboard;
mod events;
mod health;
mod metrics;
pub mod state;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener as StdListener};
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use bytes::Bytes;
use http::header::{ACCEPT, ALLOW, AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HOST, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
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

/// At the end, for those who are in.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// After a failed accept nothing is gained by trying again at once.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// An operator waits at least so long for the store: his first call connects.
const MIN_STORE_TIMEOUT: Duration = Duration::from_secs(1);

type AdminResponse = Response<Either<Full<Bytes>, EventBody>>;

/// What of a process the operator's side works on.
#[derive(Debug)]
pub struct AdminDeps {
    /// What can be looked at.
    pub state: Arc<AdminState>,
    /// The states that this process keeps.
    pub memory: Arc<MemoryStore>,
    /// What was decided about single identities.
    pub overrides: Arc<Overrides>,
}

/// What the operator can ask.
#[derive(Debug)]
struct AdminServer {
    state: Arc<AdminState>,
    limiter_admin: LimiterAdmin,
    event_stream: EventStream,
}

/// Serves the operator until `end` is cancelled.
///
/// # Errors
/// The thread cannot be started.
pub fn start(socket: StdListener, deps: AdminDeps, admin_stop: CancellationToken) -> io::Result<JoinHandle<()>> {
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let AdminDeps { state, memory, overrides } = deps;
    let (admin, listener) = {
        let _context = tokio_runtime.enter();
        let redis = redis_store(&state.config_handle.active().config, &state);
        let event_stream = EventStream::new(&state);
        let admin = AdminServer { state, limiter_admin: LimiterAdmin { memory, redis, overrides }, event_stream };
        (Arc::new(admin), TcpListener::from_std(socket)?)
    };
    let serve = move || {
        tokio_runtime.block_on(async {
            let tasks = TaskTracker::new();
            let sampler = admin.clone();
            let service =
                async { tokio::join!(admin.accept(listener, &tasks), sampler.event_stream.run(&sampler.state)) };
            admin_stop.run_until_cancelled(service).await;
            // Who has been let in has an answer.
            tasks.close();
            let _ = timeout(SHUTDOWN_TIMEOUT, tasks.wait()).await;
        });
    };
    std::thread::Builder::new().name("admin".to_owned()).spawn(serve)
}

/// The store, for an operator, by whom nobody is kept waiting.
fn redis_store(config: &CompiledConfig, state: &AdminState) -> Option<(RedisStore, String)> {
    let (servers, settings) = config.store.redis.as_ref()?;
    let timeout = config.store.timeout.max(MIN_STORE_TIMEOUT);
    let settings = RedisSettings { timeout, connections: 1, ..settings.clone() };
    let prefix = settings.prefix.clone();
    let (breaker, topology) = (state.circuit_breaker.clone(), state.cluster_map.clone());
    Some((RedisStore::new(&(servers.clone(), settings), breaker, topology, Arc::default()), prefix))
}

impl AdminServer {
    async fn accept(self: Arc<Self>, listener: TcpListener, tasks: &TaskTracker) -> Infallible {
        let connections = Arc::<AdminConnections>::default();
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let (admin, connection) = (self.clone(), connections.admit(peer.ip()));
                    tasks.spawn(async move { admin.serve_connection(stream, Arc::new(connection)).await });
                }
                Err(error) => {
                    warn!(%error, "a connection to the admin listener could not be accepted");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    async fn serve_connection(&self, stream: TcpStream, connection: Arc<AdminConnection>) {
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
                // Its errors are the operator's connection's.
                _ = &mut connection_future => return,
                () = sleep(connection.time_left()) => if connection.time_left().is_zero() { return },
            }
        }
    }

    async fn handle(&self, request: Request<Incoming>, connection: &Arc<AdminConnection>) -> AdminResponse {
        let (method, path, headers) = (request.method(), request.uri().path(), request.headers());
        if connection.is_reserved && !matches!(path, "/healthz" | "/readyz") {
            let mut response = text_response(
                StatusCode::SERVICE_UNAVAILABLE,
                "all connections of the admin listener are busy: only /healthz and /readyz are answered\n",
            );
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            return response;
        }
        if self.token().is_none() && path != "/healthz" && !is_for_loopback(&request) {
            // Names that others make lead to this machine, too, and browsers ask what they are told to.
            return text_response(
                StatusCode::FORBIDDEN,
                "without a token only requests to localhost, 127.0.0.1 or [::1] are answered\n",
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
            _ => return text_response(StatusCode::NOT_FOUND, "there are /, /healthz, /readyz, /metrics and /api/…\n"),
        };
        if is_read_method(method) { response } else { method_not_allowed("GET, HEAD") }
    }

    /// What a caller must know; none if nothing.
    fn token(&self) -> Option<AdminToken> {
        self.state.config_handle.active().config.admin.as_ref()?.token.clone()
    }

    /// Whether the caller may change something: with the token only, also where everybody may look, since any page that a
    /// browser shows could ask on a loopback address as well.
    ///
    /// # Errors
    /// He may not.
    fn authorize_write(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let detail = match self.token() {
            Some(_) if self.is_authenticated(headers) => return Ok(()),
            Some(_) => "changes need the admin token: Authorization: Bearer …",
            None => "changes need a token, and none is configured: set admin.token in the configuration",
        };
        Err(ApiError::new(StatusCode::FORBIDDEN, detail))
    }

    /// Whether the caller may ask at all.
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
        let status = if health.is_stopping() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
        // Strings always serialise.
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

/// Whether a request means this machine by a name that nobody else can make.
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

/// The answer to a caller who does not know the token.
fn unauthorized() -> AdminResponse {
    let mut response = text_response(StatusCode::UNAUTHORIZED, "the admin token is needed: Authorization: Bearer …\n");
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

fn method_not_allowed(methods: &'static str) -> AdminResponse {
    let mut response = text_response(StatusCode::METHOD_NOT_ALLOWED, &format!("{methods} only\n"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

fn text_response(status: StatusCode, body: &str) -> AdminResponse {
    typed_response(status, "text/plain; charset=utf-8", body.to_owned())
}

fn typed_response(status: StatusCode, content_type: &'static str, body: String) -> AdminResponse {
    let mut response = Response::new(Either::Left(Full::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
