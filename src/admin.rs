//! The admin listener, which serves health checks, metrics, the admin API and the dashboard. It has its own sockets and
//! its own thread.

pub mod api;
mod configuration;
mod connections;
pub mod current;
mod events;
pub mod heartbeats;
mod metrics;
mod request;
mod response;
pub mod state;
pub mod statsd;
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
use futures_util::future::OptionFuture;
use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_SECURITY_POLICY, HOST, HeaderName, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::admin::api::{Access, Detail, Endpoint};
use crate::admin::connections::{AdminConnection, AdminConnections};
use crate::admin::events::EventStream;
use crate::admin::request::{ApiContext, require_json};
use crate::admin::response::{AdminResponse, ApiError, Result, text_response, typed_response};
use crate::admin::state::ProcessState;
use crate::limiter::address::HostPort;
use crate::limiter::admin::LimiterAdmin;
use crate::snapshot::settings::{AdminSettings, AdminToken};

/// Maximum time to complete requests in progress when the admin listener stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Delay before the next `accept` after a failed `accept`. An immediate retry would fail again, for example with
/// EMFILE.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The request handler of the admin listener.
#[derive(Debug)]
struct AdminServer {
    state: Arc<ProcessState>,
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

/// Start the thread that serves the admin listener until [`ProcessState::admin_stop`] is cancelled.
///
/// # Errors
/// The tokio runtime or the thread cannot be started.
pub fn start(sockets: AdminSockets, state: &Arc<ProcessState>) -> io::Result<JoinHandle<()>> {
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let admin_stop = state.admin_stop.clone();
    let (admin, unix_admin, tcp, unix) = {
        let _context = tokio_runtime.enter();
        let active = state.config_handle.active();
        let prefix = active.config.store.redis.iter().map(|(_, redis)| redis.prefix.clone());
        let redis = state.separate_store().into_iter().zip(prefix).next();
        let event_stream = Arc::new(EventStream::new(state));
        let limiter_admin =
            Arc::new(LimiterAdmin { memory: state.memory.clone(), redis, overrides: state.overrides.clone() });
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
        if self.is_limited_to_open() {
            let refused = "admin.token is not set: this address serves only the paths in admin.open\n";
            let response = self.respond_openly(&request);
            return response.unwrap_or_else(|| text_response(StatusCode::FORBIDDEN, refused));
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
            let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
            return if is_read { file } else { ApiError::method_not_allowed("GET, HEAD").into_response() };
        }
        if !self.is_authenticated(headers) {
            return self.respond_openly(&request).unwrap_or_else(unauthorized);
        }
        self.respond(request, connection).await.unwrap_or_else(ApiError::into_response)
    }

    /// Respond to a request without the token if `admin.open` contains its path. The response contains
    /// no state of a server; the labels of metrics contain names of the configuration.
    fn respond_openly(&self, request: &Request<Incoming>) -> Option<AdminResponse> {
        let active = self.state.config_handle.active();
        let open = &active.config.admin.as_ref()?.open;
        match request.uri().path() {
            path if !open.contains(&path) => None,
            "/healthz" => Some(api::health(&self.state)),
            "/metrics" => Some(api::metrics(&self.state, request).unwrap_or_else(ApiError::into_response)),
            _ => Some(api::readiness(&self.state, Detail::Status)),
        }
    }

    /// Respond to a request that is authorized to read data. Also authorize requests that change data.
    async fn respond(&self, request: Request<Incoming>, connection: &Arc<AdminConnection>) -> Result<AdminResponse> {
        let endpoint = Endpoint::find(request.method(), request.uri().path())?;
        match endpoint.access {
            Access::Read => {}
            Access::Change => {
                self.authorize_write(request.headers())?;
            }
            Access::ChangeWithBody => {
                self.authorize_write(request.headers())?;
                require_json(request.headers())?;
            }
        }
        let active = self.state.config_handle.active();
        let context = ApiContext {
            config: &active.config,
            state: &self.state,
            limiter_admin: &self.limiter_admin,
            event_stream: &self.event_stream,
            connection,
        };
        endpoint.respond(&context, request).await
    }

    /// Return the configured admin token. Return `None` if `admin.token` is not set, or if this server serves the admin
    /// socket.
    fn token(&self) -> Option<AdminToken> {
        if self.is_unix_socket {
            return None;
        }
        self.state.config_handle.active().config.admin.as_ref()?.token.clone()
    }

    /// Return whether this server serves only the paths in `admin.open`.
    fn is_limited_to_open(&self) -> bool {
        let active = self.state.config_handle.active();
        !self.is_unix_socket && active.config.admin.as_ref().is_some_and(AdminSettings::is_limited_to_open)
    }

    /// Authorize a request that changes the state of the gateway. Over TCP, changes always require the admin token.
    /// Without a token, any web page in a browser on this machine could send changes to a loopback address.
    ///
    /// # Errors
    /// 403 if the token is missing or wrong, or if no token is configured. Requests on the admin socket are always
    /// authorized.
    fn authorize_write(&self, headers: &HeaderMap) -> Result<()> {
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
}

/// Return whether the `Host` headers and the request target contain only `localhost` or loopback addresses. A web page
/// that uses DNS rebinding has another host name, so this function returns false for its requests.
fn is_for_loopback(request: &Request<Incoming>) -> bool {
    let is_loopback = |authority: &str| {
        let Ok(HostPort { host, .. }) = authority.parse() else { return false };
        let address = host.parse::<IpAddr>();
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

// === The dashboard at `/`: static files without data, and browser security headers ===

const INDEX_HTML: &str = include_str!("admin/dashboard/index.html");

/// HTML attribute of `<body>` that tells the scripts of the dashboard whether `admin.token` is configured.
const WITHOUT_TOKEN: &str = "data-token=\"none\"";
const WITH_TOKEN: &str = "data-token=\"required\"";

const JAVASCRIPT_TYPE: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 11] = [
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
    ("/usage.js", JAVASCRIPT_TYPE, include_str!("admin/dashboard/usage.js")),
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
