//! Compiles `[server]`, `[log]`, `[admin]`, `[metrics]` and `[store]`, and reads the process limit on open files.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::uri::PathAndQuery;
use redis::{ClientTlsConfig, TlsCertificates};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::Level;

use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::shorthand::{AccessLog, AccessLogTable, RouteNames};
use crate::config::spanned::{Spanned, Text};
use crate::http::error_pages::ErrorPages;
use crate::http::target::{PathPolicy, PathRules};
use crate::http::url::HttpUrl;
use crate::limiter::gateway_count::{GatewayCount, MAX_GATEWAYS};
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::url::{Credentials, StoreAccess, UrlError, parse_redis_url};
use crate::limiter::redis::{RedisDeployment, RedisSettings, StateLayout};
use crate::snapshot::cost::InspectBounds;
use crate::snapshot::descriptors::DescriptorTable;
use crate::snapshot::header_rules;
use crate::snapshot::listeners;
use crate::snapshot::listeners::Listener;
use crate::snapshot::listeners::addresses_conflict;
use crate::snapshot::memory::MemoryLimit;
use crate::snapshot::routes::Route;
use crate::snapshot::upstreams::{TlsFiles, certificate};
use crate::snapshot::validator::Validator;
use crate::telemetry::access_log::format::{AccessFormat, COMBINED, Colors, FIELDS, FieldSet, Template, TemplateError};
use crate::telemetry::log::{FACILITIES, Journald, LogFormat, Syslog, SyslogProtocol};

/// `[store]`
#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Redis deployment and settings. `None` selects the memory of this process.
    pub redis: Option<(RedisDeployment, RedisSettings)>,
    /// Name of the store for logs. It contains no credentials.
    pub name: String,
    /// Maximum time for a rate limit check.
    pub timeout: Duration,
    /// Maximum number of cached denials. 0 disables the cache.
    pub denial_cache: usize,
    /// Maximum number of rate limit states in the memory of this process.
    pub max_memory_states: usize,
    /// The number of gateways that share the store.
    pub gateways: Arc<GatewayCount>,
}

/// Minimum of `max_header_size` in bytes. hyper needs a buffer of at least this size.
const MIN_HEADER_SIZE: usize = 8 << 10;

/// Default of `inspect_body`, in bytes.
pub(super) const INSPECT_BODY: usize = 1 << 20;

/// Maximum length in bytes of the path of a Unix socket on Linux (unix(7)).
const MAX_SOCKET_PATH: usize = 107;

/// Default socket paths of the log daemons.
const SYSLOG_SOCKET: &str = "/dev/log";
const JOURNALD_SOCKET: &str = "/run/systemd/journal/socket";

/// Default syslog facility. `local0` is reserved for local use, so that a syslog rule can select the access log.
const DEFAULT_FACILITY: u8 = 16;

/// Default tag of syslog messages, and the maximum length of a tag in bytes (`APP-NAME`, RFC 5424 §6).
const DEFAULT_TAG: &str = "sluicegate";
const MAX_TAG: usize = 48;

/// `[server]`
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Number of worker threads.
    pub workers: usize,
    /// Memory that the process may use. `None`: no limit.
    pub memory: Option<MemoryLimit>,
    /// How connections are distributed to workers.
    pub worker_model: WorkerModel,
    /// Time after SIGTERM during which the gateway still accepts connections and serves requests.
    pub accept_grace: Duration,
    /// Maximum time for the requests in flight at shutdown, after `accept_grace`.
    pub drain_timeout: Duration,
    /// Maximum number of client connections of all workers together.
    pub max_connections: usize,
    /// Maximum number of connections per client network. 0 = no limit.
    pub max_connections_per_ip: usize,
    /// Whether `max_connections_per_ip` is not set. Loopback addresses are then exempt, because a proxy on the same
    /// machine connects on behalf of many clients.
    pub is_default_per_ip: bool,
    /// Maximum number of bytes that the process buffers in total for bodies.
    pub max_buffered: usize,
    /// Maximum time from accepting a connection to the end of the headers of the first request.
    pub header_timeout: Duration,
    /// Maximum idle time of a connection between two requests.
    pub idle_timeout: Duration,
    /// Maximum time without progress on the response to a client that has ended its side of the connection. Zero: the
    /// end of this side cancels the request.
    pub half_close_timeout: Duration,
    /// Maximum time without progress on a request or response body.
    pub body_idle_timeout: Duration,
    /// Minimum rate of a request body in bytes per second. 0 = no minimum.
    pub min_body_rate: u64,
    /// Maximum time to receive a request body.
    pub body_timeout: Option<Duration>,
    /// Maximum size in bytes of a request body that is buffered before the request is forwarded. 0 = no buffering.
    pub request_buffer: u64,
    /// Maximum number of bytes of a request body to read for routing, an identity or a cost.
    pub inspect_body: usize,
    /// Maximum total size of the request headers in bytes.
    pub max_header_size: usize,
    /// Maximum number of request headers. Each occurrence of a header counts.
    pub max_headers: usize,
    /// Maximum length of the request target in bytes.
    pub max_uri: usize,
    /// Maximum number of concurrent streams per HTTP/2 connection.
    pub http2_max_streams: u32,
    /// Whether to reject requests for hosts that no route names.
    pub block_unknown_hosts: bool,
    /// Whether error responses have a `Proxy-Status` header.
    pub proxy_status: bool,
    /// Content of the error responses of requests without a route.
    pub error_pages: Option<Arc<ErrorPages>>,
    /// How paths are converted into the form that routes and limits see.
    pub paths: PathRules,
}

/// Maximum time for which idle connections stay open while the gateway drains. A client may already be sending a
/// request on such a connection.
const MAX_DRAIN_GRACE: Duration = Duration::from_secs(1);

impl ServerSettings {
    /// Return the time for which idle connections stay open while the gateway drains.
    pub fn drain_grace(&self) -> Duration {
        MAX_DRAIN_GRACE.min(self.drain_timeout / 2)
    }

    /// Return whether connections from this address do not count towards `max_connections_per_ip`.
    pub fn is_exempt_from_per_ip(&self, address: IpAddr) -> bool {
        self.is_default_per_ip && address.to_canonical().is_loopback()
    }
}

/// How connections are distributed to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerModel {
    /// Each worker accepts and serves its own connections.
    PerCore,
    /// All workers share one work-stealing runtime.
    Shared,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct LogSettings {
    /// Format of the process log.
    pub format: LogFormat,
    /// Format of the access log.
    pub access_format: AccessFormat,
    /// Level of the process log.
    pub level: Level,
    /// Destination of the access log.
    pub access_log: AccessLogTarget,
    /// Fraction of successful requests to write to the access log, above 0. 1 = all.
    pub access_sample: f64,
    /// Where spans go. `None` disables traces.
    pub traces: Option<TraceSettings>,
}

/// The settings of traces.
#[derive(Debug, Clone)]
pub struct TraceSettings {
    /// OTLP endpoint for spans.
    pub endpoint: HttpUrl,
    /// Share of the traces to record that start at the gateway.
    pub sample: f64,
    /// Resource attributes.
    pub resource: BTreeMap<String, String>,
}

/// Destination of the access log records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessLogTarget {
    /// No access log.
    Off,
    /// Standard output.
    Stdout,
    /// A file that is opened for appending.
    File(PathBuf),
    /// A syslog daemon.
    Syslog(Syslog),
    /// The journal of systemd.
    Journald(Journald),
}

impl AccessLogTarget {
    /// Return the path of the socket, if the destination is a socket.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            AccessLogTarget::Off | AccessLogTarget::Stdout | AccessLogTarget::File(_) => None,
            AccessLogTarget::Syslog(syslog) => Some(&syslog.socket),
            AccessLogTarget::Journald(journald) => Some(&journald.socket),
        }
    }
}

/// The values of `path_policy`.
const PATH_POLICIES: [(&str, PathPolicy); 4] = [
    ("canonical", PathPolicy::Canonical),
    ("keep-encoded-slashes", PathPolicy::KeepEncodedSlashes),
    ("keep-double-slashes", PathPolicy::KeepDoubleSlashes),
    ("keep-slashes", PathPolicy::KeepSlashes),
];

/// Compile `[server]`.
pub(super) fn server(
    server: &gateway::Server,
    listeners: &[Spanned<gateway::Listener>],
    reader: &mut Validator<'_>,
) -> ServerSettings {
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
    let memory = match &server.memory {
        Some(text) => {
            Some(reader.memory_size(text)).filter(|size| *size > 0).map(|size| MemoryLimit::of_bytes(size as u64))
        }
        None => MemoryLimit::of_cgroup(),
    };
    let has_tls = listeners.iter().any(|listener| listener.get_ref().tls.is_some());
    let fitting = memory.as_ref().map_or(u64::MAX, |memory| memory.connections(has_tls));
    let default = default_max_connections(workers).min(i64::try_from(fitting).unwrap_or(i64::MAX));
    let max_connections = reader.number(server.max_connections.as_ref(), 1..1_000_001, default);
    let half = (max_connections + 1) / 2;
    let fitting = memory.as_ref().map_or(u64::MAX, MemoryLimit::buffered);
    let max_buffered = reader.size(server.max_buffered.as_ref(), fitting.min(64 << 20) as usize);
    let inspect_body = reader.size(server.inspect_body.as_ref(), INSPECT_BODY);
    InspectBounds { default: inspect_body, max: max_buffered }.check(
        server.inspect_body.as_ref(),
        inspect_body,
        reader,
    );
    ServerSettings {
        workers,
        memory,
        worker_model: reader.one_of(server.threading.as_ref(), WorkerModel::PerCore, &models),
        max_connections: max_connections as usize,
        max_connections_per_ip: reader.number(server.max_connections_per_ip.as_ref(), 0..1_000_001, half) as usize,
        is_default_per_ip: server.max_connections_per_ip.is_none(),
        max_buffered,
        accept_grace: reader.duration_or_zero(server.accept_grace.as_ref()),
        drain_timeout: reader.duration(server.drain_timeout.as_ref(), Duration::from_secs(30)),
        header_timeout: reader.duration(server.header_timeout.as_ref(), Duration::from_secs(10)),
        idle_timeout: reader.duration(server.idle_timeout.as_ref(), Duration::from_secs(75)),
        half_close_timeout: match &server.half_close_timeout {
            None => Duration::from_secs(5),
            text => reader.duration_or_zero(text.as_ref()),
        },
        body_idle_timeout: reader.duration(server.body_idle_timeout.as_ref(), Duration::from_secs(30)),
        min_body_rate: reader.size_or_off(server.min_body_rate.as_ref(), 240) as u64,
        body_timeout: server.body_timeout.as_ref().map(|text| reader.duration(Some(text), Duration::MAX)),
        request_buffer: reader.size_or_off(server.request_buffer.as_ref(), 64 << 10) as u64,
        inspect_body,
        max_header_size,
        max_headers: reader.number(server.max_headers.as_ref(), 1..10_001, 100) as usize,
        max_uri: reader.size(server.max_uri.as_ref(), 8 << 10),
        http2_max_streams: reader.number(server.http2_max_streams.as_ref(), 1..100_001, 100) as u32,
        block_unknown_hosts: server.block_unknown_hosts.as_ref().is_some_and(|value| *value.get_ref()),
        proxy_status: server.proxy_status.as_ref().is_none_or(|value| *value.get_ref()),
        error_pages: header_rules::error_pages(&[&server.error_pages]),
        paths: PathRules {
            policy: reader.one_of(server.path_policy.as_ref(), PathPolicy::Canonical, &PATH_POLICIES),
            ignores_case: server.case_insensitive_paths.as_ref().is_some_and(|value| *value.get_ref()),
        },
    }
}

/// Return the default of `max_connections`. Reserve some file descriptors for the workers (listeners, store, runtime),
/// and use half of the rest. Each connection may need a second descriptor, for the upstream.
fn default_max_connections(workers: usize) -> i64 {
    let reserved = 64 + 16 * workers as u64;
    let connections = hard_limit().saturating_sub(reserved) / 2;
    connections.clamp(16, 1_000_000) as i64
}

/// Compile `[log]`.
pub(super) fn log(log: &gateway::Log, reader: &mut Validator<'_>) -> LogSettings {
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let (access, access_sample) = access_log(log.access.as_ref(), reader);
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    // People read logs on a terminal. Programs read logs from a file or a pipe.
    let default = if std::io::stderr().is_terminal() { LogFormat::Text } else { LogFormat::Json };
    let format = reader.one_of(log.format.as_ref(), default, &formats);
    let access_format = match log.format {
        Some(_) if format == LogFormat::Text => AccessFormat::Text,
        None if access == AccessLogTarget::Stdout && std::io::stdout().is_terminal() => {
            let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
            AccessFormat::Terminal(if is_plain { Colors::Off } else { Colors::On })
        }
        Some(_) | None => AccessFormat::Json(FieldSet::DEFAULT),
    };
    let table = log.access.as_ref().and_then(|access| match access.get_ref() {
        AccessLog::To(_) => None,
        AccessLog::Table(table) => Some(&**table),
    });
    LogSettings {
        format,
        access_format: table.map_or(access_format.clone(), |table| written_format(table, access_format, reader)),
        level: reader.one_of(log.level.as_ref(), Level::INFO, &levels),
        access_log: access,
        access_sample,
        traces: traces(log, reader),
    }
}

/// Compile `access` of `[log]`. Return the destination, and the fraction of successful requests to log.
fn access_log(written: Option<&Spanned<AccessLog>>, reader: &mut Validator<'_>) -> (AccessLogTarget, f64) {
    let Some(written) = written else { return (AccessLogTarget::Stdout, 1.0) };
    let no_settings = AccessLogTable::default();
    let (to, table) = match written.get_ref() {
        AccessLog::To(to) => (Some((to, written.span())), &no_settings),
        AccessLog::Table(table) => {
            let to = reader.required(table.to.as_ref(), &written.span(), "to", "\"syslog\"");
            (to.map(|to| (to.get_ref(), to.span())), &**table)
        }
    };
    let sample = match &table.sample {
        Some(sample) if *sample.get_ref() > 0.0 && *sample.get_ref() <= 1.0 => *sample.get_ref(),
        Some(sample) => {
            let issue = Issue::new(sample.span(), format!("{} is out of range", sample.get_ref()));
            reader.push_issue(
                issue.with_hint("write a fraction above 0 and up to 1, such as 0.01 for 1 % of successful requests"),
            );
            1.0
        }
        None => 1.0,
    };
    let protocols = [("rfc5424", SyslogProtocol::Rfc5424), ("rfc3164", SyslogProtocol::Rfc3164)];
    let protocol = reader.one_of(table.protocol.as_ref(), SyslogProtocol::Rfc5424, &protocols);
    let facility = reader.one_of(table.facility.as_ref(), DEFAULT_FACILITY, &FACILITIES);
    let tag = syslog_tag(table.tag.as_ref(), reader);
    let Some((to, span)) = to else { return (AccessLogTarget::Stdout, sample) };
    let is_syslog = to == "syslog";
    let is_journald = to == "journald";
    let settings = [
        ("socket", &table.socket, is_syslog || is_journald, "\"syslog\" and \"journald\""),
        ("tag", &table.tag, is_syslog || is_journald, "\"syslog\" and \"journald\""),
        ("protocol", &table.protocol, is_syslog, "\"syslog\""),
        ("facility", &table.facility, is_syslog, "\"syslog\""),
        ("format", &table.format, !is_journald, "\"stdout\", \"syslog\" or a file"),
    ];
    for (key, value, is_valid, destinations) in settings {
        if let Some(value) = value.as_ref().filter(|_| !is_valid) {
            let issue = Issue::new(value.span(), format!("`{key}` is valid only with to = {destinations}"));
            reader.push_issue(issue.with_hint("remove this key, or write another destination in `to`"));
        }
    }
    if let format @ ("json" | "text" | "combined") = to.as_str() {
        let issue = Issue::new(span.clone(), format!("`{format}` is a format of the access log, not a destination"));
        reader.push_issue(issue.with_hint(format!("write access = {{ to = \"stdout\", format = \"{format}\" }}")));
    }
    let target = match to.as_str() {
        "stdout" => AccessLogTarget::Stdout,
        "off" => AccessLogTarget::Off,
        "syslog" => {
            let socket = log_socket(table.socket.as_ref(), SYSLOG_SOCKET, &span, reader);
            AccessLogTarget::Syslog(Syslog { socket, protocol, facility, tag })
        }
        "journald" => {
            let socket = log_socket(table.socket.as_ref(), JOURNALD_SOCKET, &span, reader);
            AccessLogTarget::Journald(Journald { socket, tag })
        }
        path => AccessLogTarget::File(reader.resolve_relative(path, span)),
    };
    (target, sample)
}

/// Compile `format` and `fields` of the access log.
fn written_format(table: &AccessLogTable, default: AccessFormat, reader: &mut Validator<'_>) -> AccessFormat {
    let json =
        AccessFormat::Json(table.fields.as_ref().map_or(FieldSet::DEFAULT, |list| fields(list.get_ref(), reader)));
    let format = match &table.format {
        None if table.fields.is_some() => json,
        None => default,
        Some(format) => match format.get_ref().as_str() {
            "json" => json,
            "text" => AccessFormat::Text,
            "combined" => template(COMBINED, format, reader),
            text if text.contains('$') => template(text, format, reader),
            other => {
                let issue = Issue::new(format.span(), format!("`{other}` is not a format of the access log"));
                reader.push_issue(issue.with_hint(
                    "write \"json\", \"text\", \"combined\", or a template such as '$remote_addr \"$request\" $status'",
                ));
                default
            }
        },
    };
    if let Some(list) = table.fields.as_ref().filter(|list| list.get_ref().is_empty()) {
        let issue = Issue::new(list.span(), "`fields` is empty, so every record would be empty");
        reader.push_issue(issue.with_hint("name at least one field, or remove the key for the default fields"));
    }
    if let Some(list) = table.fields.as_ref().filter(|_| !matches!(format, AccessFormat::Json(_))) {
        let issue = Issue::new(list.span(), "`fields` is valid only with the format \"json\"");
        reader.push_issue(issue.with_hint("write the fields as variables of a template in `format`"));
    }
    format
}

fn template(text: &str, written: &Text, reader: &mut Validator<'_>) -> AccessFormat {
    match Template::new(text) {
        Ok(template) => return AccessFormat::Template(Arc::new(template)),
        Err(TemplateError::Unknown(name)) => {
            reader.unknown_name(written.span(), "variable", &name, Template::variable_names());
        }
        Err(error @ TemplateError::Control) => reader.push_issue(
            Issue::new(written.span(), error.to_string())
                .with_hint("each record is one line: write it without line breaks"),
        ),
    }
    AccessFormat::Text
}

fn fields(list: &[Text], reader: &mut Validator<'_>) -> FieldSet {
    let mut fields = FieldSet::EMPTY;
    for name in list {
        let known = FIELDS.iter().find(|(known, _)| known == name.get_ref());
        fields = match (name.get_ref().as_str(), known) {
            ("default", _) => fields.union(FieldSet::DEFAULT),
            ("all", _) => FieldSet::ALL,
            (_, Some((_, field))) => fields.with(*field),
            (unknown, None) => {
                let names = FIELDS.iter().map(|(name, _)| *name).chain(["default", "all"]);
                reader.unknown_name(name.span(), "field", unknown, names);
                fields
            }
        };
    }
    fields
}

/// Return the path of a log socket. The socket need not exist yet, because the daemon may start later. `span` is the
/// span of the destination.
fn log_socket(text: Option<&Text>, default: &str, span: &Range<usize>, reader: &mut Validator<'_>) -> PathBuf {
    let path = text.map_or_else(|| PathBuf::from(default), |text| reader.resolve_path(text));
    let span = text.map_or_else(|| span.clone(), |text| text.span());
    if path.as_os_str().len() > MAX_SOCKET_PATH {
        let message = format!("the path of a unix socket must have at most {MAX_SOCKET_PATH} bytes");
        reader.push_issue(Issue::new(span, message).with_hint(format!("such as \"{default}\"")));
    } else if path.metadata().is_ok_and(|found| !found.file_type().is_socket()) {
        let issue = Issue::new(span, format!("{} is not a socket", path.display()));
        let hint = format!("set `socket` to the log daemon's socket, such as \"{default}\", or `to` to a file");
        reader.push_issue(issue.with_hint(hint));
    }
    path
}

/// Return the tag of log messages. Allow only characters of program names, because log daemons treat any other
/// character as the end of the tag.
fn syslog_tag(text: Option<&Text>, reader: &mut Validator<'_>) -> Box<str> {
    let Some(text) = text else { return DEFAULT_TAG.into() };
    let tag = text.get_ref().as_str();
    let is_valid = (1..=MAX_TAG).contains(&tag.len())
        && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte));
    if !is_valid {
        let issue = Issue::new(text.span(), format!("`{tag}` is not a valid tag"));
        reader.push_issue(issue.with_hint("use 1 to 48 letters, digits, `-`, `_`, `.` or `/`, such as \"gateway\""));
    }
    tag.into()
}

/// Compile the settings of traces.
fn traces(log: &gateway::Log, reader: &mut Validator<'_>) -> Option<TraceSettings> {
    let endpoint = log.trace_endpoint.as_ref().and_then(|url| trace_endpoint(url, reader));
    let sample = reader.fraction(log.trace_sample.as_ref(), 0..=1, 1.0);
    let resource = log.trace_resource.iter().map(|(key, value)| (key.clone(), value.get_ref().clone())).collect();
    let of_resource = log.trace_resource.values().next().map(|text| ("trace_resource", text.span()));
    let of_sample = log.trace_sample.as_ref().map(|sample| ("trace_sample", sample.span()));
    if log.trace_endpoint.is_none()
        && let Some((key, span)) = of_sample.or(of_resource)
    {
        let issue = Issue::new(span, format!("`{key}` requires `trace_endpoint`"));
        reader.push_missing(issue.with_hint("set trace_endpoint = \"http://127.0.0.1:4318\""));
    }
    Some(TraceSettings { endpoint: endpoint?, sample, resource })
}

/// Parse the URL of an OpenTelemetry collector. An empty URL disables traces. The OTLP specification defines the
/// default path (<https://opentelemetry.io/docs/specs/otlp/#otlphttp-request>).
fn trace_endpoint(text: &Text, reader: &mut Validator<'_>) -> Option<HttpUrl> {
    let url = text.get_ref();
    if url.is_empty() || reader.is_unresolved(text) && !url.contains("://") {
        return None;
    }
    let credentials = "credentials belong in OTEL_EXPORTER_OTLP_HEADERS";
    let url = reader.url(text, "\"http://127.0.0.1:4318\"", credentials)?;
    let has_path = url.target().path() != "/";
    Some(if has_path { url } else { url.with_target(PathAndQuery::from_static("/v1/traces")) })
}

/// `[admin]`
#[derive(Debug, Clone)]
pub struct AdminSettings {
    /// Address and port.
    pub address: SocketAddr,
    /// Token that clients must send. `None` if clients need no token.
    pub token: Option<AdminToken>,
    /// Paths that need no token.
    pub open: Vec<&'static str>,
}

/// Path of the admin socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminSocket {
    /// `admin.sock` in the service's runtime directory. Without such a directory, there is no admin socket.
    Default,
    /// The gateway has no admin socket.
    Off,
    /// A socket at this path.
    Path(PathBuf),
}

/// Compile `socket` of `[admin]`.
pub(super) fn admin_socket(admin: Option<&Spanned<gateway::Admin>>, reader: &mut Validator<'_>) -> AdminSocket {
    let Some(text) = admin.and_then(|admin| admin.get_ref().socket.as_ref()) else { return AdminSocket::Default };
    match text.get_ref().as_str() {
        "off" => AdminSocket::Off,
        "" => {
            let issue = Issue::new(text.span(), "`socket` is empty");
            reader.push_issue(issue.with_hint("write a path such as \"/run/sluicegate/admin.sock\", or \"off\""));
            AdminSocket::Off
        }
        _ => {
            let path = reader.resolve_path(text);
            if path.as_os_str().len() > listeners::MAX_SOCKET_PATH {
                let most = listeners::MAX_SOCKET_PATH;
                let message = format!("the path of the admin socket must have at most {most} bytes");
                reader.push_issue(Issue::new(text.span(), message).with_hint("such as \"/run/sluicegate/admin.sock\""));
            }
            AdminSocket::Path(path)
        }
    }
}

/// Token for the admin listener. The `Debug` implementation does not print it.
#[derive(Clone)]
pub struct AdminToken(Arc<str>);

impl AdminToken {
    /// Return the token as written in the configuration.
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
    admin: &Spanned<gateway::Admin>,
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
    let conflicts =
        |listener: &&Listener| listener.address.tcp().is_some_and(|other| addresses_conflict(other, address));
    if let Some(listener) = listeners.iter().find(conflicts) {
        let message = format!("{address} is already used by the [[listener]] on {}", listener.address);
        reader.push_issue(Issue::new(text.span(), message).with_hint("use another port for the admin listener"));
    }
    let token = admin.token.as_ref().map(|token| token.get_ref().as_str()).filter(|token| !token.is_empty());
    let paths = ["/healthz", "/readyz", "/metrics"].map(|path| (path, path));
    let open: Vec<_> = admin.open.iter().flatten().map(|path| reader.one_of(Some(path), "/readyz", &paths)).collect();
    if token.is_none() && open.is_empty() && !address.ip().is_loopback() {
        let issue = Issue::new(text.span(), format!("{address} is not a loopback address: a token is required"));
        reader.push_missing(issue.with_hint(
            "set token = \"${SLUICEGATE_ADMIN_TOKEN}\", use an address of 127.0.0.0/8 or [::1], or list the only paths \
             to serve in `open`",
        ));
    }
    Some(AdminSettings { address, open, token: token.map(|token| AdminToken(token.into())) })
}

impl AdminSettings {
    /// Return whether the listener serves only the paths in [`AdminSettings::open`].
    pub fn is_limited_to_open(&self) -> bool {
        self.token.is_none() && !self.address.ip().is_loopback()
    }
}

/// The routes that have metrics of their own.
#[derive(Debug)]
pub enum MetricRoutes {
    /// All routes.
    All,
    /// The routes with these names.
    Only(HashSet<Box<str>>),
}

impl MetricRoutes {
    /// Return the value of the label `route` for a route. The name is empty for requests without a route.
    pub fn label<'n>(&self, route: &'n str) -> &'n str {
        match self {
            MetricRoutes::Only(names) if !route.is_empty() && !names.contains(route) => "other",
            MetricRoutes::All | MetricRoutes::Only(_) => route,
        }
    }
}

/// Compile `[metrics] routes`.
pub(super) fn metric_routes(
    names: Option<&Spanned<RouteNames>>,
    routes: &[Arc<Route>],
    reader: &mut Validator<'_>,
) -> MetricRoutes {
    let Some(names) = names else { return MetricRoutes::All };
    match names.get_ref().0.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["all"] => MetricRoutes::All,
        ["none"] => MetricRoutes::Only(HashSet::new()),
        ref list => {
            let known = routes.iter().map(|route| &*route.name);
            for name in list.iter().filter(|name| !known.clone().any(|known| known == **name)) {
                reader.unknown_name(names.span(), "route", name, known.clone());
            }
            MetricRoutes::Only(list.iter().map(|name| Box::from(*name)).collect())
        }
    }
}

/// Assumed limit on open files if the system sets none.
const ASSUMED_LIMIT: u64 = 1 << 20;

/// Return the hard limit on open files. A process without privileges can raise its soft limit up to this value.
pub fn hard_limit() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(ASSUMED_LIMIT)
}

/// Raise the soft limit on open files to the hard limit. The soft limit is low by default for the sake of programs that
/// use select(2).
pub fn raise_soft_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If `setrlimit` fails, the soft limit does not change. The gateway then stops accepting connections when it has no
    // free file descriptors.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

// === `[store]`: the store URL, TLS, timeouts and capacities ===

/// Compile `gateway_count`.
pub(super) fn gateway_count(store: &gateway::Store, reader: &mut Validator<'_>) -> Arc<GatewayCount> {
    let range = 1..MAX_GATEWAYS as i64 + 1;
    Arc::new(GatewayCount::at_least(reader.number(store.gateway_count.as_ref(), range, 1) as u64))
}

/// Compile `[store]`. The limits of the routes and descriptors determine the algorithms that the Lua scripts must
/// support.
pub(super) fn store(
    store: &gateway::Store,
    gateways: Arc<GatewayCount>,
    routes: &[Arc<Route>],
    descriptors: &DescriptorTable,
    reader: &mut Validator<'_>,
) -> StoreSettings {
    let defaults = RedisSettings::default();
    let timeout = reader.duration(store.timeout.as_ref(), defaults.timeout);
    let connect_timeout = reader.duration(store.connect_timeout.as_ref(), defaults.connect_timeout).max(timeout);
    let connections = reader.number(store.connections.as_ref(), 1..9, defaults.connections.into()) as u32;
    let max_memory_states = reader.number(store.max_memory_states.as_ref(), 1..1 << 40, 1_000_000) as usize;
    let prefix = store.prefix.as_ref().map_or(&*defaults.prefix, |prefix| prefix.get_ref()).to_owned();
    if let Some(text) = store.prefix.as_ref().filter(|_| prefix.is_empty() || prefix.contains(['{', '}'])) {
        // Reject braces in the prefix. Redis would use the text in them as the hash tag, which must be the identity.
        reader.push_issue(Issue::new(text.span(), "`prefix` must not be empty and must not contain braces"));
    }
    let denial_cache = reader.number(store.denial_cache.as_ref(), 0..1 << 32, 100_000) as usize;
    let name = "memory".to_owned();
    let mut settings = StoreSettings { redis: None, name, timeout, denial_cache, max_memory_states, gateways };
    let url = store.url.as_ref().map_or("memory:", |url| url.get_ref());
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let tls = store.tls.as_ref().filter(|tls| {
        let is_unknown = scheme.is_empty() && store.url.as_ref().is_some_and(|url| reader.is_unresolved(url));
        let used = scheme.starts_with("rediss") || is_unknown;
        if !used {
            let issue = Issue::new(tls.span(), "`tls` is valid only for a store at `rediss://`");
            reader
                .push_missing(issue.with_hint("`tls` is also valid with `rediss+sentinel://` and `rediss+cluster://`"));
        }
        used
    });
    let Some(text) = store.url.as_ref().filter(|_| url != "memory:") else {
        report_unused_credentials(store, reader);
        return settings;
    };
    let access = StoreAccess {
        certificates: tls.map(|tls| tls_certificates(tls, reader)),
        ignores_name: tls.and_then(|tls| tls.get_ref().verify_name.as_ref()).is_some_and(|verify| !verify.get_ref()),
        credentials: credentials([&store.username, &store.password, &store.password_file], reader),
        sentinel_credentials: sentinel_credentials(store, scheme, reader),
    };
    if reader.is_unresolved(text) && !url.contains("://") {
        // Skip the URL, because its environment variable is not set. `Validator::finish` reports an error for each
        // command that uses the store.
        settings.name = "unknown, because the URL is not set".to_owned();
        return settings;
    }
    match parse_redis_url(url, &access) {
        Ok((name, servers)) => {
            settings.name = name;
            let limits =
                routes.iter().flat_map(|route| &route.rate_limits.limits).map(|route_limit| &route_limit.limit);
            let limits = limits.chain(descriptors.limits());
            let counts_usage = limits.clone().any(|limit| limit.usage.is_some());
            let algorithms = AlgorithmSet::for_rules(limits.map(|limit| &limit.default_variant.rule));
            let algorithms = algorithms.with_usage(counts_usage);
            // Until all gateways that share the store are counted, states are written where every version reads them.
            let layout = Arc::new(StateLayout::separate_keys());
            let redis = RedisSettings { prefix, connections, timeout, connect_timeout, algorithms, layout, ..defaults };
            settings.redis = Some((servers, redis));
        }
        Err(UrlError { message: what, hint }) => reader.push_issue(Issue::new(text.span(), what).with_hint(hint)),
    }
    settings
}

/// Compile `username`, `password` and `password_file`, in this order. Empty values are ignored, because they come from
/// variables that are not set.
fn credentials([username, password, password_file]: [&Option<Text>; 3], reader: &mut Validator<'_>) -> Credentials {
    let non_empty =
        |text: &Option<Text>| text.as_ref().map(|text| text.get_ref().clone()).filter(|text| !text.is_empty());
    let username_value = non_empty(username);
    let written = non_empty(password);
    let from_file = password_file.as_ref().and_then(|file| read_password(file, reader));
    if let (Some(file), true) = (password_file, written.is_some()) {
        let issue = Issue::new(file.span(), "`password` and `password_file` cannot be combined");
        reader.push_issue(issue.with_hint("remove one of the two keys"));
    }
    if let (Some(text), None, None, None) = (username, &written, &from_file, password_file)
        && username_value.is_some()
    {
        let issue = Issue::new(text.span(), "`username` requires `password` or `password_file`");
        reader.push_missing(issue.with_hint("set password = \"${REDIS_PASSWORD}\""));
    }
    Credentials { username: username_value, password: written.or(from_file) }
}

/// Read a file that contains a password.
fn read_password(text: &Text, reader: &mut Validator<'_>) -> Option<String> {
    let path = reader.resolve_path(text);
    let content = std::fs::read_to_string(&path).map_err(|error| format!("cannot be read: {error}"));
    let password = content.and_then(|content| {
        let password = content.strip_suffix('\n').map_or(&*content, |line| line.strip_suffix('\r').unwrap_or(line));
        if password.is_empty() { Err("is empty".to_owned()) } else { Ok(password.to_owned()) }
    });
    let report = |reason| {
        let issue = Issue::new(text.span(), format!("{} {reason}", path.display()));
        reader.push_issue(issue.with_hint("give the path of a text file that contains only the password"));
    };
    password.map_err(report).ok()
}

/// Compile `sentinel`, the credentials for the Sentinels.
fn sentinel_credentials(store: &gateway::Store, scheme: &str, reader: &mut Validator<'_>) -> Credentials {
    let Some(sentinel) = &store.sentinel else { return Credentials::default() };
    if !scheme.is_empty() && !scheme.ends_with("+sentinel") {
        let issue = Issue::new(sentinel.span(), "`sentinel` is valid only for a store at `redis+sentinel://`");
        reader.push_missing(issue.with_hint("remove `sentinel`; `username` and `password` are for Redis"));
    }
    let gateway::StoreSentinel { username, password, password_file } = sentinel.get_ref();
    credentials([username, password, password_file], reader)
}

/// Report credentials of the store `memory:`, which needs none.
fn report_unused_credentials(store: &gateway::Store, reader: &mut Validator<'_>) {
    let keys = [("username", &store.username), ("password", &store.password), ("password_file", &store.password_file)];
    let written = |(key, text): (_, &Option<Text>)| {
        let text = text.as_ref().filter(|text| !text.get_ref().is_empty())?;
        Some((key, text.span()))
    };
    let keys = keys.map(written);
    let sentinel = store.sentinel.as_ref().map(|sentinel| ("sentinel", sentinel.span()));
    for (key, span) in keys.into_iter().flatten().chain(sentinel) {
        let issue = Issue::new(span, format!("`{key}` is valid only for a store in Redis"));
        reader.push_missing(issue.with_hint("set url = \"redis://HOST:6379/0\""));
    }
}

/// Compile the trust roots and the client certificate for connections to the store.
fn tls_certificates(tls: &Spanned<gateway::StoreTls>, reader: &mut Validator<'_>) -> TlsCertificates {
    let gateway::StoreTls { ca, cert, key, verify_name: _ } = tls.get_ref();
    let TlsFiles { ca, gateway_certificate: own } =
        TlsFiles::read(ca.as_ref(), [cert.as_ref(), key.as_ref()], tls.span(), reader);
    if let (Some([cert, key]), Some(text)) = (&own, &tls.get_ref().cert)
        && let Err(issue) = certificate(cert, key, text.span())
    {
        reader.push_issue(issue);
    }
    let client_tls =
        own.map(|[cert, key]| ClientTlsConfig { client_cert: cert.content.to_vec(), client_key: key.content.to_vec() });
    TlsCertificates { client_tls, root_cert: ca.map(|ca| ca.content.to_vec()) }
}
