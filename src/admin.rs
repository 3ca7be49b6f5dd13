//! The operator's side: health, metrics and the API, on a listener and a thread of its own.

mod api;
mod configuration;
mod connections;
mod health;
mod history;
mod live;
mod metrics;
mod page;
mod problem;
pub mod vitals;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener as StdListener};
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;

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
use tokio::time::{Duration, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::limit::backend::RedisStore;
use crate::limit::memory::MemoryStore;
use crate::limit::operator::LimiterAdmin;
use crate::limit::overrides::Overrides;
use crate::limit::redis::RedisSettings;
use crate::observe::metrics::{self as text_form, ExpositionFormat};
use crate::runtime::{AdminToken, CompiledConfig};
use connections::{Connection, Connections};
use live::{Events, Live};
use problem::ApiError;
use vitals::Vitals;

/// At the end, for those who are in.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// After a failed accept nothing is gained by trying again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// An operator waits at least so long for the store: his first call connects.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

type Answer = Response<Either<Full<Bytes>, Events>>;

/// What of a process the operator's side works on.
#[derive(Debug)]
pub struct Parts {
    /// What can be looked at.
    pub vitals: Arc<Vitals>,
    /// The states that this process keeps.
    pub memory: Arc<MemoryStore>,
    /// What was decided about single identities.
    pub overrides: Arc<Overrides>,
}

/// What the operator can ask.
#[derive(Debug)]
struct Admin {
    vitals: Arc<Vitals>,
    operator: LimiterAdmin,
    live: Live,
}

/// Serves the operator until `end` is cancelled.
///
/// # Errors
/// The thread cannot be started.
pub fn start(socket: StdListener, parts: Parts, end: CancellationToken) -> io::Result<JoinHandle<()>> {
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Parts { vitals, memory, overrides } = parts;
    let (admin, listener) = {
        let _context = reactor.enter();
        let shared = shared(&vitals.configuration.active().config, &vitals);
        let live = Live::new(&vitals);
        let admin = Admin { vitals, operator: LimiterAdmin { memory, redis: shared, overrides }, live };
        (Arc::new(admin), TcpListener::from_std(socket)?)
    };
    let serve = move || {
        reactor.block_on(async {
            let tasks = TaskTracker::new();
            let looking = admin.clone();
            let serving = async { tokio::join!(admin.accept(listener, &tasks), looking.live.run(&looking.vitals)) };
            end.run_until_cancelled(serving).await;
            // Who has been let in has an answer.
            tasks.close();
            let _ = timeout(LAST_ANSWERS, tasks.wait()).await;
        });
    };
    std::thread::Builder::new().name("admin".to_owned()).spawn(serve)
}

/// The store, for an operator, by whom nobody is kept waiting.
fn shared(runtime: &CompiledConfig, vitals: &Vitals) -> Option<(RedisStore, String)> {
    let (servers, settings) = runtime.store.redis.as_ref()?;
    let timeout = runtime.store.timeout.max(STORE_TIMEOUT);
    let settings = RedisSettings { timeout, connections: 1, ..settings.clone() };
    let prefix = settings.prefix.clone();
    let (breaker, topology) = (vitals.breaker.clone(), vitals.topology.clone());
    Some((RedisStore::new(&(servers.clone(), settings), breaker, topology, Arc::default()), prefix))
}

impl Admin {
    async fn accept(self: Arc<Self>, listener: TcpListener, tasks: &TaskTracker) -> Infallible {
        let connections = Arc::<Connections>::default();
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let (admin, connection) = (self.clone(), connections.open(peer.ip()));
                    tasks.spawn(async move { admin.converse(stream, Arc::new(connection)).await });
                }
                Err(error) => {
                    warn!(%error, "a connection to the admin listener could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn converse(&self, stream: TcpStream, connection: Arc<Connection>) {
        let service = service_fn(|request: Request<Incoming>| {
            let connection = connection.clone();
            async move {
                connection.busy();
                let mut answer = self.answer(request, &connection).await;
                connection.idle();
                answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                page::guard(&mut answer);
                Ok::<_, Infallible>(answer)
            }
        });
        let mut served = pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        loop {
            tokio::select! {
                biased;
                () = connection.closed.cancelled() => return,
                // Its errors are the operator's connection's.
                _ = &mut served => return,
                () = sleep(connection.left()) => if connection.left().is_zero() { return },
            }
        }
    }

    async fn answer(&self, request: Request<Incoming>, connection: &Arc<Connection>) -> Answer {
        let (method, path, headers) = (request.method(), request.uri().path(), request.headers());
        if connection.reserved && !matches!(path, "/healthz" | "/readyz") {
            let mut answer = text(
                StatusCode::SERVICE_UNAVAILABLE,
                "all connections of the admin listener are busy: only /healthz and /readyz are answered\n",
            );
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            return answer;
        }
        if self.token().is_none() && path != "/healthz" && !is_for_loopback(&request) {
            // Names that others make lead to this machine, too, and browsers ask what they are told to.
            return text(
                StatusCode::FORBIDDEN,
                "without a token only requests to localhost, 127.0.0.1 or [::1] are answered\n",
            );
        }
        if let Some(file) = page::file(path, self.token().is_some()) {
            return if is_read(method) { file } else { not_allowed("GET, HEAD") };
        }
        if !self.knows(headers) {
            return nobody();
        }
        let answer = match path {
            "/healthz" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/metrics" => self.metrics(headers),
            "/api/config" => self.configuration(),
            "/api/live" if method == Method::GET => return self.live.follow(self.vitals.end.clone(), connection),
            "/api/live" => return not_allowed("GET"),
            "/api/reload" if method == Method::POST => return self.reload(headers).await,
            "/api/reload" => return not_allowed("POST"),
            _ if path.starts_with("/api/") => return api::answer(self, request).await,
            _ => return text(StatusCode::NOT_FOUND, "there are /, /healthz, /readyz, /metrics and /api/…\n"),
        };
        if is_read(method) { answer } else { not_allowed("GET, HEAD") }
    }

    /// What a caller must know; none if nothing.
    fn token(&self) -> Option<AdminToken> {
        self.vitals.configuration.active().config.admin.as_ref()?.token.clone()
    }

    /// Whether the caller may change something: with the token only, also where everybody may look, since any page that a
    /// browser shows could ask on a loopback address as well.
    ///
    /// # Errors
    /// He may not.
    fn may_write(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let why = match self.token() {
            Some(_) if self.knows(headers) => return Ok(()),
            Some(_) => "changes need the admin token: Authorization: Bearer …",
            None => "changes need a token, and none is configured: set admin.token in the configuration",
        };
        Err(ApiError::new(StatusCode::FORBIDDEN, why))
    }

    /// Whether the caller may ask at all.
    fn knows(&self, headers: &HeaderMap) -> bool {
        let Some(token) = self.token() else { return true };
        let said = headers.get(AUTHORIZATION).and_then(|said| said.as_bytes().split_at_checked(7));
        said.is_some_and(|(scheme, said)| {
            scheme.eq_ignore_ascii_case(b"bearer ") && verify_slices_are_equal(said, token.as_bytes()).is_ok()
        })
    }

    fn ready(&self) -> Answer {
        let health = self.vitals.health();
        let status = if health.is_stopping() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
        // Strings always serialise.
        let body = serde_json::to_string(&health).unwrap_or_default() + "\n";
        of_type(status, "application/json", body)
    }

    fn metrics(&self, headers: &HeaderMap) -> Answer {
        let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
        let form = ExpositionFormat::from_accept(accept);
        match text_form::render(&self.vitals, form) {
            Ok(page) => of_type(StatusCode::OK, form.content_type(), page),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}\n")),
        }
    }
}

fn is_read(method: &Method) -> bool {
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
    let lines = request.headers().get_all(HOST).iter();
    lines
        .map(|line| line.to_str().unwrap_or_default())
        .chain(request.uri().authority().map(Authority::as_str))
        .all(is_loopback)
}

/// The answer to a caller who does not know the token.
fn nobody() -> Answer {
    let mut answer = text(StatusCode::UNAUTHORIZED, "the admin token is needed: Authorization: Bearer …\n");
    answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    answer
}

fn not_allowed(methods: &'static str) -> Answer {
    let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, &format!("{methods} only\n"));
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

fn text(status: StatusCode, body: &str) -> Answer {
    of_type(status, "text/plain; charset=utf-8", body.to_owned())
}

fn of_type(status: StatusCode, content_type: &'static str, body: String) -> Answer {
    let mut answer = Response::new(Either::Left(Full::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}
