//! The tables that stand for themselves: server, log.

use std::fmt;
use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::uri::{PathAndQuery, Uri};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::Level;

use crate::config;
use crate::config::Text;
use crate::config::error::{Issue, Spanned};
use crate::snapshot::Listener;
use crate::snapshot::listeners::addresses_conflict;
use crate::snapshot::validator::Validator;
use crate::telemetry::log::LogFormat;

/// hyper needs room for a head of this size at least.
const MIN_HEADER_SIZE: usize = 8 << 10;

/// `[server]`
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Threads that serve requests.
    pub workers: usize,
    /// How they share work.
    pub worker_model: WorkerModel,
    /// Time for running requests after SIGTERM.
    pub drain_timeout: Duration,
    /// Connections of clients at the same time, on all workers.
    pub max_connections: usize,
    /// The same for each client network; 0 = as many as there may be.
    pub max_connections_per_ip: usize,
    /// Whether that is the default, which is not for loopback addresses: proxies on the same machine bring many clients.
    pub is_default_per_ip: bool,
    /// Bytes of bodies that are buffered.
    pub max_buffered: usize,
    /// Time from accept to the first head.
    pub header_timeout: Duration,
    /// Time between two requests of a connection.
    pub idle_timeout: Duration,
    /// Time for which a body may stand still because of whoever is to send or to take it.
    pub body_idle_timeout: Duration,
    /// Minimum bytes per second of a request body; 0 = any.
    pub min_body_rate: u64,
    /// Maximum time for a request body.
    pub body_timeout: Option<Duration>,
    /// Bytes of a request body that is read before it is sent on; 0 = none is.
    pub request_buffer: u64,
    /// Bytes of a head.
    pub max_header_size: usize,
    /// Lines of a head.
    pub max_headers: usize,
    /// Bytes of a target.
    pub max_uri: usize,
    /// Concurrent streams of an HTTP/2 connection.
    pub http2_max_streams: u32,
}

/// When no new requests are wanted, a request that is on its way already has so long to come.
const MAX_DRAIN_GRACE: Duration = Duration::from_secs(1);

impl ServerSettings {
    /// For so long connections that wait for a request stay when the gateway stops.
    pub fn drain_grace(&self) -> Duration {
        MAX_DRAIN_GRACE.min(self.drain_timeout / 2)
    }

    /// Whether connections of an address are not counted by `max_connections_per_ip`.
    pub fn is_exempt_from_per_ip(&self, address: IpAddr) -> bool {
        self.is_default_per_ip && address.to_canonical().is_loopback()
    }
}

/// How workers share connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerModel {
    /// Each worker accepts and serves its own.
    PerCore,
    /// One pool of threads serves all.
    Shared,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogSettings {
    /// How lines look.
    pub format: LogFormat,
    /// How records of the access log look.
    pub access_format: LogFormat,
    /// From which level on.
    pub level: Level,
    /// The access log.
    pub access_log: AccessLogTarget,
    /// Where spans are sent by OTLP; none = nowhere.
    pub trace_endpoint: Option<Uri>,
}

/// Where the access log goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessLogTarget {
    /// Nowhere.
    Off,
    /// Standard output.
    Stdout,
    /// A file, appended to.
    File(PathBuf),
}

pub(super) fn server(server: &config::Server, reader: &mut Validator<'_>) -> ServerSettings {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = match reader.number(server.workers.as_ref(), 0..1025, 0) {
        0 => cores,
        workers => workers as usize,
    };
    let models = [("per-core", WorkerModel::PerCore), ("work-stealing", WorkerModel::Shared)];
    let max_header_size = reader.size(server.max_header_size.as_ref(), 32 << 10);
    if let Some(text) = server.max_header_size.as_ref().filter(|_| max_header_size < MIN_HEADER_SIZE) {
        reader.push_issue(Issue::new(text.span(), "`max_header_size` is too small").with_hint("8KiB or more"));
    }
    let max_connections =
        reader.number(server.max_connections.as_ref(), 1..1_000_001, default_max_connections(workers));
    let half = (max_connections + 1) / 2;
    ServerSettings {
        workers,
        worker_model: reader.one_of(server.threading.as_ref(), WorkerModel::PerCore, &models),
        max_connections: max_connections as usize,
        max_connections_per_ip: reader.number(server.max_connections_per_ip.as_ref(), 0..1_000_001, half) as usize,
        is_default_per_ip: server.max_connections_per_ip.is_none(),
        max_buffered: reader.size(server.max_buffered.as_ref(), 64 << 20),
        drain_timeout: reader.duration(server.drain_timeout.as_ref(), Duration::from_secs(30)),
        header_timeout: reader.duration(server.header_timeout.as_ref(), Duration::from_secs(10)),
        idle_timeout: reader.duration(server.idle_timeout.as_ref(), Duration::from_secs(75)),
        body_idle_timeout: reader.duration(server.body_idle_timeout.as_ref(), Duration::from_secs(30)),
        min_body_rate: reader.size_or_off(server.min_body_rate.as_ref(), 240) as u64,
        body_timeout: server.body_timeout.as_ref().map(|text| reader.duration(Some(text), Duration::MAX)),
        request_buffer: reader.size_or_off(server.request_buffer.as_ref(), 64 << 10) as u64,
        max_header_size,
        max_headers: reader.number(server.max_headers.as_ref(), 1..10_001, 100) as usize,
        max_uri: reader.size(server.max_uri.as_ref(), 8 << 10),
        http2_max_streams: reader.number(server.http2_max_streams.as_ref(), 1..100_001, 100) as u32,
    }
}

/// As many connections as there are file descriptors for: each may need one to its upstream, and the workers need some
/// for themselves (listeners, the store, their runtime).
fn default_max_connections(workers: usize) -> i64 {
    let reserved = 64 + 16 * workers as u64;
    let connections = hard_limit().saturating_sub(reserved) / 2;
    connections.clamp(16, 1_000_000) as i64
}

pub(super) fn log(log: &config::Log, reader: &mut Validator<'_>) -> LogSettings {
    let by_terminal = if std::io::stderr().is_terminal() { LogFormat::Text } else { LogFormat::Json };
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let access = match log.access.as_ref().map(|access| access.get_ref().as_str()) {
        None | Some("stdout") => AccessLogTarget::Stdout,
        Some("off") => AccessLogTarget::Off,
        Some(path) => AccessLogTarget::File(reader.resolve_path(path)),
    };
    let format =
        reader.one_of(log.format.as_ref(), by_terminal, &[("text", LogFormat::Text), ("json", LogFormat::Json)]);
    LogSettings {
        format,
        // A file is read by programs, wherever the gateway was started.
        access_format: match access {
            AccessLogTarget::File(_) if log.format.is_none() => LogFormat::Json,
            _ => format,
        },
        level: reader.one_of(log.level.as_ref(), Level::INFO, &levels),
        access_log: access,
        trace_endpoint: log.trace_endpoint.as_ref().and_then(|url| trace_endpoint(url, reader)),
    }
}

/// Where a collector takes spans; empty = nowhere. Without a path it is the one that collectors have
/// (<https://opentelemetry.io/docs/specs/otlp/#otlphttp-request>).
fn trace_endpoint(text: &Text, reader: &mut Validator<'_>) -> Option<Uri> {
    let url = text.get_ref();
    if url.is_empty() {
        return None;
    }
    let parsed = url.parse::<Uri>().ok().filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let parsed = parsed.filter(|uri| uri.authority().is_some_and(|authority| !authority.as_str().contains('@')));
    let Some(uri) = parsed else {
        let issue = Issue::new(text.span(), "`trace_endpoint` is not where a collector can be");
        reader.push_issue(
            issue.with_hint("such as \"http://127.0.0.1:4318\"; who we are goes into OTEL_EXPORTER_OTLP_HEADERS"),
        );
        return None;
    };
    if uri.path() != "/" {
        return Some(uri);
    }
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(PathAndQuery::from_static("/v1/traces"));
    // All parts are there.
    Uri::from_parts(parts).ok()
}

// `[admin]`: where the operator asks, and what he must know.

/// `[admin]`
#[derive(Debug, Clone)]
pub struct AdminSettings {
    /// Where.
    pub address: SocketAddr,
    /// What the operator must know; none if he need not.
    pub token: Option<AdminToken>,
}

/// A secret.
#[derive(Clone)]
pub struct AdminToken(Arc<str>);

impl AdminToken {
    /// As it is written.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

pub(super) fn admin(
    admin: &Spanned<config::Admin>,
    listeners: &[Listener],
    reader: &mut Validator<'_>,
) -> Option<AdminSettings> {
    let span = admin.span();
    let admin = admin.get_ref();
    let text = reader.required(admin.address.as_ref(), &span, "address", "\"127.0.0.1:9180\"")?;
    let address = reader.address(text)?;
    if let Some(listener) = listeners.iter().find(|listener| addresses_conflict(listener.address, address)) {
        let message = format!("{address} is taken by the [[listener]] on {}", listener.address);
        reader.push_issue(
            Issue::new(text.span(), message).with_hint("another port: the admin listener has one of its own"),
        );
    }
    let token = admin.token.as_ref().map(|token| token.get_ref().as_str()).filter(|token| !token.is_empty());
    if token.is_none() && !address.ip().is_loopback() {
        let issue = Issue::new(text.span(), format!("{address} can be reached from elsewhere: it needs a token"));
        reader.push_issue(
            issue.with_hint("token = \"${SLUICEGATE_ADMIN_TOKEN}\", or an address of 127.0.0.0/8 or [::1]"),
        );
    }
    Some(AdminSettings { address, token: token.map(|token| AdminToken(token.into())) })
}

// File descriptors: how many this process may have.

/// What a system without a limit is taken to have.
const ASSUMED_LIMIT: u64 = 1 << 20;

/// The most that can be had without privileges: the hard limit.
pub fn hard_limit() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(ASSUMED_LIMIT)
}

/// Raises the soft limit to the hard one: the low default of shells is there for programs that use select(2).
pub fn raise_soft_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where it is refused, the soft limit stays, and accept pauses when descriptors run out.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
