//! Compiles `[server]`, `[log]` and `[admin]`, and reads the limit on open files.

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

/// Minimum of `max_header_size`: hyper needs a buffer of at least this size.
const MIN_HEADER_SIZE: usize = 8 << 10;

/// `[server]`
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Number of worker threads.
    pub workers: usize,
    /// How workers share connections.
    pub worker_model: WorkerModel,
    /// Time after SIGTERM in which connections are accepted and served as before.
    pub accept_grace: Duration,
    /// Maximum time for requests in flight after SIGTERM and `accept_grace`.
    pub drain_timeout: Duration,
    /// Maximum number of client connections, for all workers together.
    pub max_connections: usize,
    /// Maximum number of connections per client network. 0 = no limit.
    pub max_connections_per_ip: usize,
    /// Whether `max_connections_per_ip` is the default. The default exempts loopback addresses, because a proxy on the
    /// same machine connects for many clients.
    pub is_default_per_ip: bool,
    /// Maximum bytes of bodies that the process buffers.
    pub max_buffered: usize,
    /// Maximum time from accept to the end of the first request headers.
    pub header_timeout: Duration,
    /// Maximum time between two requests on a connection.
    pub idle_timeout: Duration,
    /// Maximum time without progress on a body.
    pub body_idle_timeout: Duration,
    /// Minimum bytes per second of a request body. 0 = no minimum.
    pub min_body_rate: u64,
    /// Maximum time for a request body.
    pub body_timeout: Option<Duration>,
    /// Maximum size of a request body that is buffered before forwarding. 0 = no buffering.
    pub request_buffer: u64,
    /// Maximum bytes of the request headers.
    pub max_header_size: usize,
    /// Maximum number of request header lines.
    pub max_headers: usize,
    /// Maximum bytes of the request target.
    pub max_uri: usize,
    /// Maximum number of concurrent streams per HTTP/2 connection.
    pub http2_max_streams: u32,
    /// Whether requests for hosts that no route names are rejected.
    pub block_unknown_hosts: bool,
    /// Whether errors have `Proxy-Status`.
    pub proxy_status: bool,
}

/// Maximum time that idle connections stay open during a drain, for requests that are already on their way.
const MAX_DRAIN_GRACE: Duration = Duration::from_secs(1);

impl ServerSettings {
    /// Time that idle connections stay open when the gateway stops.
    pub fn drain_grace(&self) -> Duration {
        MAX_DRAIN_GRACE.min(self.drain_timeout / 2)
    }

    /// Return whether `max_connections_per_ip` does not count connections of this address.
    pub fn is_exempt_from_per_ip(&self, address: IpAddr) -> bool {
        self.is_default_per_ip && address.to_canonical().is_loopback()
    }
}

/// How workers share connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerModel {
    /// Each worker accepts and serves its own connections.
    PerCore,
    /// All worker threads share one work-stealing runtime.
    Shared,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogSettings {
    /// Format of the process log.
    pub format: LogFormat,
    /// Format of the access log.
    pub access_format: LogFormat,
    /// Level of the process log.
    pub level: Level,
    /// Destination of the access log.
    pub access_log: AccessLogTarget,
    /// OTLP endpoint for spans. `None` = no traces.
    pub trace_endpoint: Option<Uri>,
}

/// Destination of the access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessLogTarget {
    /// No access log.
    Off,
    /// Standard output.
    Stdout,
    /// A file, opened for appending.
    File(PathBuf),
}

/// Compile `[server]`.
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
        accept_grace: reader.duration_or_zero(server.accept_grace.as_ref()),
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
        block_unknown_hosts: server.block_unknown_hosts.as_ref().is_some_and(|value| *value.get_ref()),
        proxy_status: server.proxy_status.as_ref().is_none_or(|value| *value.get_ref()),
    }
}

/// Return the default of `max_connections`: half of the file descriptors that remain after a reserve for the workers
/// (listeners, the store, their runtime). Each connection may need a second descriptor, to its upstream.
fn default_max_connections(workers: usize) -> i64 {
    let reserved = 64 + 16 * workers as u64;
    let connections = hard_limit().saturating_sub(reserved) / 2;
    connections.clamp(16, 1_000_000) as i64
}

/// Compile `[log]`.
pub(super) fn log(log: &config::Log, reader: &mut Validator<'_>) -> LogSettings {
    let by_terminal = if std::io::stderr().is_terminal() { LogFormat::Text } else { LogFormat::Json };
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let access = match log.access.as_ref().map(|access| (access, access.get_ref().as_str())) {
        None | Some((_, "stdout")) => AccessLogTarget::Stdout,
        Some((_, "off")) => AccessLogTarget::Off,
        Some((path, _)) => AccessLogTarget::File(reader.resolve_path(path)),
    };
    let format =
        reader.one_of(log.format.as_ref(), by_terminal, &[("text", LogFormat::Text), ("json", LogFormat::Json)]);
    LogSettings {
        format,
        // Programs read a log file, even if the gateway was started from a terminal.
        access_format: match access {
            AccessLogTarget::File(_) if log.format.is_none() => LogFormat::Json,
            _ => format,
        },
        level: reader.one_of(log.level.as_ref(), Level::INFO, &levels),
        access_log: access,
        trace_endpoint: log.trace_endpoint.as_ref().and_then(|url| trace_endpoint(url, reader)),
    }
}

/// Parse the URL of an OTLP collector. An empty URL disables traces. The default path is that of the specification
/// (<https://opentelemetry.io/docs/specs/otlp/#otlphttp-request>).
fn trace_endpoint(text: &Text, reader: &mut Validator<'_>) -> Option<Uri> {
    let url = text.get_ref();
    if url.is_empty() || reader.is_unresolved(text) && !url.contains("://") {
        return None;
    }
    let parsed = url.parse::<Uri>().ok().filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let parsed = parsed.filter(|uri| uri.authority().is_some_and(|authority| !authority.as_str().contains('@')));
    let Some(uri) = parsed else {
        let issue = Issue::new(text.span(), "`trace_endpoint` is not a valid collector URL");
        reader.push_issue(
            issue.with_hint("such as \"http://127.0.0.1:4318\"; credentials belong in OTEL_EXPORTER_OTLP_HEADERS"),
        );
        return None;
    };
    if uri.path() != "/" {
        return Some(uri);
    }
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(PathAndQuery::from_static("/v1/traces"));
    // A URI with scheme, authority and path is always valid.
    Uri::from_parts(parts).ok()
}

/// `[admin]`
#[derive(Debug, Clone)]
pub struct AdminSettings {
    /// Address and port.
    pub address: SocketAddr,
    /// Token that clients must send. `None` if the listener needs none.
    pub token: Option<AdminToken>,
}

/// Path of the admin socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminSocket {
    /// `admin.sock` in the runtime directory of the service, if it has one.
    Default,
    /// No admin socket.
    Off,
    /// This path.
    Path(PathBuf),
}

/// Maximum length of the path of a unix socket on Linux, bytes (unix(7)). The temporary name of the socket is longer
/// than its path by the extension with the process id.
const MAX_SOCKET_PATH: usize = 107 - ".4194304.new".len();

/// Compile `socket` of `[admin]`.
pub(super) fn admin_socket(admin: Option<&Spanned<config::Admin>>, reader: &mut Validator<'_>) -> AdminSocket {
    let Some(text) = admin.and_then(|admin| admin.get_ref().socket.as_ref()) else { return AdminSocket::Default };
    match text.get_ref().as_str() {
        "off" => AdminSocket::Off,
        "" => {
            let issue = Issue::new(text.span(), "`socket` is empty");
            reader.push_issue(issue.with_hint("a path such as \"/run/sluicegate/admin.sock\", or \"off\""));
            AdminSocket::Off
        }
        _ => {
            let path = reader.resolve_path(text);
            if path.as_os_str().len() > MAX_SOCKET_PATH {
                let message = format!("the path of a unix socket has at most {MAX_SOCKET_PATH} bytes");
                reader.push_issue(Issue::new(text.span(), message).with_hint("such as \"/run/sluicegate/admin.sock\""));
            }
            AdminSocket::Path(path)
        }
    }
}

/// Token of the admin listener. `Debug` does not print it.
#[derive(Clone)]
pub struct AdminToken(Arc<str>);

impl AdminToken {
    /// Return the token as written.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Compile `[admin]`.
pub(super) fn admin(
    admin: &Spanned<config::Admin>,
    listeners: &[Listener],
    reader: &mut Validator<'_>,
) -> Option<AdminSettings> {
    let span = admin.span();
    let admin = admin.get_ref();
    if admin.address.is_none() && admin.socket.is_some() {
        return None;
    }
    let text = reader.required(admin.address.as_ref(), &span, "address", "\"127.0.0.1:9180\"")?;
    let address = reader.address(text)?;
    if let Some(listener) = listeners.iter().find(|listener| addresses_conflict(listener.address, address)) {
        let message = format!("{address} is taken by the [[listener]] on {}", listener.address);
        reader.push_issue(Issue::new(text.span(), message).with_hint("use another port for the admin listener"));
    }
    let token = admin.token.as_ref().map(|token| token.get_ref().as_str()).filter(|token| !token.is_empty());
    if token.is_none() && !address.ip().is_loopback() {
        let issue = Issue::new(text.span(), format!("{address} is not a loopback address: a token is required"));
        reader.push_issue(
            issue.with_hint("token = \"${SLUICEGATE_ADMIN_TOKEN}\", or an address of 127.0.0.0/8 or [::1]"),
        );
    }
    Some(AdminSettings { address, token: token.map(|token| AdminToken(token.into())) })
}

/// Assumed limit on open files for systems without one.
const ASSUMED_LIMIT: u64 = 1 << 20;

/// Return the hard limit on open files: the maximum without privileges.
pub fn hard_limit() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(ASSUMED_LIMIT)
}

/// Raise the soft limit on open files to the hard limit. The low default of shells exists for programs that use
/// select(2).
pub fn raise_soft_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, the soft limit stays, and accept pauses when file descriptors run out.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
