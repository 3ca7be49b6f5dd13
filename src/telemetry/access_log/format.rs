//! Formats of access log records: the selected JSON fields, templates, and the lines for a terminal.

use std::io;
use std::io::Write;
use std::sync::Arc;

use anstyle::{AnsiColor, Style};
use jiff::Timestamp;

use crate::http::text::{Escape, escape_deceptive};
use crate::telemetry::access_log::{AccessRecord, EffectiveLimit, UpstreamInfo, to_milliseconds};

/// The combined format of nginx and Apache. The third value is the consumer.
pub const COMBINED: &str = r#"$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent""#;

/// Format of the access log.
#[derive(Debug, Clone)]
pub enum AccessFormat {
    /// A JSON object with these fields.
    Json(FieldSet),
    /// All fields as text.
    Text,
    /// The text of a template.
    Template(Arc<Template>),
    /// A short line for people.
    Terminal(Colors),
}

/// Whether lines for a terminal have colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colors {
    /// The color of the line depends on the status.
    On,
    /// Plain text, because the variable `NO_COLOR` is set.
    Off,
}

impl AccessFormat {
    /// Return the fields of which the format needs the values.
    pub(super) fn fields(&self) -> FieldSet {
        match self {
            AccessFormat::Json(fields) => *fields,
            AccessFormat::Text => FieldSet::DEFAULT,
            AccessFormat::Template(template) => template.fields,
            AccessFormat::Terminal(_) => FieldSet::DEFAULT,
        }
    }
}

/// A field of a record, in the order of the JSON object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Time at which the request arrived.
    Time,
    /// IP address of the client.
    Client,
    /// Request method.
    Method,
    /// `http` or `https`.
    Scheme,
    /// Host of the request.
    Host,
    /// Request path.
    Path,
    /// HTTP version of the request.
    Protocol,
    /// Response status.
    Status,
    /// Length of the response body.
    Bytes,
    /// Length of the request body.
    BytesReceived,
    /// Whether the whole response was sent.
    Complete,
    /// Duration of the request.
    DurationMs,
    /// Name of the route.
    Route,
    /// How the request ended.
    Outcome,
    /// Reason of a response with the status 502, 503 or 504.
    Reason,
    /// Name of the consumer.
    Consumer,
    /// Combined decision of the limits.
    Decision,
    /// The component that decided.
    DecidedBy,
    /// Name of the effective limit.
    Limit,
    /// Remaining quota of the effective limit.
    Remaining,
    /// Identity hash for the effective limit.
    Identity,
    /// Duration of the rate limit check.
    DecisionMs,
    /// Time of the decision.
    DecidedAt,
    /// Shadow limits that would have denied the request.
    ShadowDenied,
    /// All checked limits.
    Limits,
    /// Model of an LLM request.
    Model,
    /// Tokens of the response of an LLM API.
    Tokens,
    /// Name of the upstream.
    Upstream,
    /// Server of the last attempt.
    Server,
    /// Status of the upstream response.
    UpstreamStatus,
    /// Duration of the upstream request.
    UpstreamMs,
    /// Number of retries.
    Retries,
    /// `Referer` of the request.
    Referer,
    /// `User-Agent` of the request.
    UserAgent,
    /// Id of the request.
    RequestId,
    /// Id of the trace.
    TraceId,
    /// Share of the requests that are logged.
    SampleRate,
}

/// The names of all fields, in the order of the JSON object.
pub const FIELDS: [(&str, Field); 37] = [
    ("time", Field::Time),
    ("client", Field::Client),
    ("method", Field::Method),
    ("scheme", Field::Scheme),
    ("host", Field::Host),
    ("path", Field::Path),
    ("protocol", Field::Protocol),
    ("status", Field::Status),
    ("bytes", Field::Bytes),
    ("bytes_received", Field::BytesReceived),
    ("complete", Field::Complete),
    ("duration_ms", Field::DurationMs),
    ("route", Field::Route),
    ("outcome", Field::Outcome),
    ("reason", Field::Reason),
    ("consumer", Field::Consumer),
    ("decision", Field::Decision),
    ("decided_by", Field::DecidedBy),
    ("limit", Field::Limit),
    ("remaining", Field::Remaining),
    ("identity", Field::Identity),
    ("decision_ms", Field::DecisionMs),
    ("decided_at", Field::DecidedAt),
    ("shadow_denied", Field::ShadowDenied),
    ("limits", Field::Limits),
    ("model", Field::Model),
    ("tokens", Field::Tokens),
    ("upstream", Field::Upstream),
    ("server", Field::Server),
    ("upstream_status", Field::UpstreamStatus),
    ("upstream_ms", Field::UpstreamMs),
    ("retries", Field::Retries),
    ("referer", Field::Referer),
    ("user_agent", Field::UserAgent),
    ("request_id", Field::RequestId),
    ("trace_id", Field::TraceId),
    ("sample_rate", Field::SampleRate),
];

/// A set of fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldSet(u64);

impl FieldSet {
    /// No field.
    pub const EMPTY: FieldSet = FieldSet(0);
    /// All fields.
    pub const ALL: FieldSet = FieldSet(!0);
    /// Fields that the gateway must copy from a request before it is forwarded.
    pub(super) const COPIED: FieldSet = FieldSet::EMPTY
        .with(Field::Host)
        .with(Field::Referer)
        .with(Field::UserAgent)
        .with(Field::Consumer)
        .with(Field::BytesReceived);
    /// The fields of a record if the configuration selects none.
    pub const DEFAULT: FieldSet = FieldSet(!FieldSet::COPIED.with(Field::Scheme).with(Field::Protocol).0);

    /// Return the set with one more field.
    #[must_use]
    pub const fn with(self, field: Field) -> FieldSet {
        FieldSet(self.0 | 1 << field as u64)
    }

    /// Return the fields that are in at least one of two sets.
    #[must_use]
    pub const fn union(self, other: FieldSet) -> FieldSet {
        FieldSet(self.0 | other.0)
    }

    /// Return whether the set contains a field.
    pub(super) const fn contains(self, field: Field) -> bool {
        self.0 & 1 << field as u64 != 0
    }

    /// Return whether two sets have a field in common.
    pub(super) const fn intersects(self, other: FieldSet) -> bool {
        self.0 & other.0 != 0
    }
}

// === Templates: text with variables, in the syntax and with the names of nginx's `log_format`, so that `replay` and
// other programs that know such a format can read the log ===

/// A template of a line.
#[derive(Debug)]
pub struct Template {
    prefix: Box<str>,
    parts: Vec<TemplatePart>,
    fields: FieldSet,
}

#[derive(Debug)]
struct TemplatePart {
    variable: Variable,
    /// Whether the variable stands between quotes, so that its value may contain spaces.
    is_quoted: bool,
    /// The text after the variable.
    text: Box<str>,
}

/// A variable of a template.
#[derive(Debug, Clone, Copy)]
enum Variable {
    /// The value of a field of the JSON object.
    Field(Field),
    /// Time at which the request ended, such as `24/Nov/2025:16:00:00 +0000`.
    TimeLocal,
    /// Time at which the request ended, such as `2025-11-24T16:00:00+00:00`.
    TimeIso8601,
    /// Time at which the request ended, in seconds.
    Msec,
    /// Method, path and HTTP version.
    Request,
    /// Duration in seconds.
    RequestTime,
    /// Time to the response headers of the upstream, in seconds.
    UpstreamTime,
}

/// The variables with a name of nginx. All fields that have one value are variables with their own name too.
const NGINX_VARIABLES: [(&str, Variable); 19] = [
    ("remote_addr", Variable::Field(Field::Client)),
    ("remote_user", Variable::Field(Field::Consumer)),
    ("time_local", Variable::TimeLocal),
    ("time_iso8601", Variable::TimeIso8601),
    ("msec", Variable::Msec),
    ("request", Variable::Request),
    ("request_method", Variable::Field(Field::Method)),
    ("request_uri", Variable::Field(Field::Path)),
    ("uri", Variable::Field(Field::Path)),
    ("http_host", Variable::Field(Field::Host)),
    ("server_protocol", Variable::Field(Field::Protocol)),
    ("body_bytes_sent", Variable::Field(Field::Bytes)),
    ("request_time", Variable::RequestTime),
    ("http_referer", Variable::Field(Field::Referer)),
    ("http_user_agent", Variable::Field(Field::UserAgent)),
    ("proxy_host", Variable::Field(Field::Upstream)),
    ("upstream_addr", Variable::Field(Field::Server)),
    ("upstream_response_time", Variable::UpstreamTime),
    ("upstream_header_time", Variable::UpstreamTime),
];

/// Fields that are no variables: they are lists, or their unit differs from the variables of nginx.
const NO_VARIABLES: FieldSet = FieldSet::EMPTY
    .with(Field::Time)
    .with(Field::Limits)
    .with(Field::ShadowDenied)
    .with(Field::DecidedAt)
    .with(Field::Tokens);

/// The reason why a text is not a valid template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// A variable does not exist.
    #[error("unknown variable `${0}`")]
    Unknown(String),
    /// The text contains a character that would end the line.
    #[error("a template must not contain control characters")]
    Control,
}

impl Template {
    /// Parse a template.
    ///
    /// # Errors
    /// A variable is unknown, or the text contains control characters.
    pub fn new(text: &str) -> Result<Self, TemplateError> {
        if text.contains(char::is_control) {
            return Err(TemplateError::Control);
        }
        let mut pieces = text.split('$');
        let prefix = pieces.next().unwrap_or_default();
        let mut template = Template { prefix: prefix.into(), parts: Vec::new(), fields: FieldSet::EMPTY };
        let mut quotes = prefix.matches('"').count();
        for piece in pieces {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let (name, text) = match piece.strip_prefix('{').and_then(|piece| piece.split_once('}')) {
                Some(split) => split,
                None => piece.split_at(piece.find(|c| !is_word(c)).unwrap_or(piece.len())),
            };
            let variable = Variable::named(name).ok_or_else(|| TemplateError::Unknown(name.to_owned()))?;
            template.fields = template.fields.union(variable.fields());
            template.parts.push(TemplatePart { variable, is_quoted: quotes % 2 == 1, text: text.into() });
            quotes += text.matches('"').count();
        }
        Ok(template)
    }

    /// Return the names of all variables.
    pub fn variable_names() -> impl Iterator<Item = &'static str> + Clone {
        let own = FIELDS.iter().filter(|(_, field)| !NO_VARIABLES.contains(*field)).map(|(name, _)| *name);
        NGINX_VARIABLES.iter().map(|(name, _)| *name).chain(own)
    }

    pub(super) fn write(&self, record: &AccessRecord<'_>, out: &mut Vec<u8>) -> io::Result<()> {
        out.extend_from_slice(self.prefix.as_bytes());
        for TemplatePart { variable, is_quoted, text } in &self.parts {
            let start = out.len();
            variable.write(record, out)?;
            if out.len() == start {
                out.push(b'-');
            } else if variable.is_text() {
                escape_value(out, start, *is_quoted);
            }
            out.extend_from_slice(text.as_bytes());
        }
        Ok(())
    }
}

impl Variable {
    fn named(name: &str) -> Option<Self> {
        let field = FIELDS.iter().find(|(known, field)| *known == name && !NO_VARIABLES.contains(*field));
        let nginx = || NGINX_VARIABLES.iter().find(|(known, _)| *known == name).map(|(_, variable)| *variable);
        field.map(|(_, field)| Variable::Field(*field)).or_else(nginx)
    }

    fn fields(self) -> FieldSet {
        match self {
            Variable::Field(field) => FieldSet::EMPTY.with(field),
            Variable::TimeLocal
            | Variable::TimeIso8601
            | Variable::Msec
            | Variable::Request
            | Variable::RequestTime
            | Variable::UpstreamTime => FieldSet::EMPTY,
        }
    }

    /// Return whether the value must be escaped. Only the times contain no text of clients, but spaces.
    fn is_text(self) -> bool {
        match self {
            Variable::TimeLocal | Variable::TimeIso8601 => false,
            Variable::Field(_)
            | Variable::Msec
            | Variable::Request
            | Variable::RequestTime
            | Variable::UpstreamTime => true,
        }
    }

    /// Write the value. Write nothing if the record has no value.
    fn write(self, record: &AccessRecord<'_>, out: &mut Vec<u8>) -> io::Result<()> {
        let ended_at = record.time.saturating_add(record.duration_ms.as_micros() as u64);
        // Use the epoch if jiff cannot represent the time.
        let timestamp = || Timestamp::from_microsecond(ended_at as i64).unwrap_or_default();
        match self {
            Variable::Field(field) => write_value(record, field, out),
            Variable::TimeLocal => write!(out, "{}", timestamp().strftime("%d/%b/%Y:%H:%M:%S +0000")),
            Variable::TimeIso8601 => write!(out, "{}", timestamp().strftime("%Y-%m-%dT%H:%M:%S+00:00")),
            Variable::Msec => write!(out, "{}.{:03}", ended_at / 1_000_000, ended_at / 1000 % 1000),
            Variable::Request => write!(out, "{} {} {}", record.method, record.path, record.protocol),
            Variable::RequestTime => write!(out, "{:.6}", record.duration_ms.as_secs_f64()),
            Variable::UpstreamTime => match record.upstream {
                Some(upstream) => write!(out, "{:.6}", upstream.duration.as_secs_f64()),
                None => Ok(()),
            },
        }
    }
}

/// Write the value of a field as text. Write nothing if the record has no value.
fn write_value(record: &AccessRecord<'_>, field: Field, out: &mut Vec<u8>) -> io::Result<()> {
    let decision = record.decision;
    let effective = decision.and_then(|decision| decision.effective_limit.as_ref());
    let upstream = record.upstream;
    let text = match field {
        Field::Client => return write!(out, "{}", record.client),
        Field::Status => return write!(out, "{}", record.status),
        Field::Bytes => return write!(out, "{}", record.bytes),
        Field::BytesReceived => return write_some(out, record.bytes_received),
        Field::Complete => return write!(out, "{}", record.complete),
        Field::DurationMs => return write!(out, "{}", to_milliseconds(record.duration_ms)),
        Field::Remaining => return write_some(out, effective.map(|limit| limit.remaining)),
        Field::Identity => return write_some(out, effective.map(|limit| format!("{:032x}", limit.identity))),
        Field::DecisionMs => return write_some(out, decision.map(|decision| to_milliseconds(decision.duration))),
        Field::UpstreamStatus => return write_some(out, upstream.and_then(|upstream| upstream.upstream_status)),
        Field::UpstreamMs => return write_some(out, upstream.map(|upstream| to_milliseconds(upstream.duration))),
        Field::Retries => return write_some(out, upstream.map(|upstream| upstream.retries)),
        Field::TraceId => return write_some(out, record.trace_id.map(|id| format!("{id:032x}"))),
        Field::SampleRate => return write_some(out, record.sample_rate),
        Field::Method => Some(record.method),
        Field::Scheme => Some(record.scheme),
        Field::Host => record.host,
        Field::Path => Some(record.path),
        Field::Protocol => Some(record.protocol),
        Field::Route => record.route,
        Field::Outcome => Some(record.outcome),
        Field::Reason => record.reason,
        Field::Consumer => record.consumer,
        Field::Decision => decision.map(|decision| decision.decision),
        Field::DecidedBy => decision.and_then(|decision| decision.decided_by),
        Field::Limit => effective.map(|limit| &*limit.limit),
        Field::Model => record.model,
        Field::Upstream => upstream.map(|upstream| &*upstream.upstream),
        Field::Server => upstream.and_then(|upstream| upstream.server.as_deref()),
        Field::Referer => record.referer,
        Field::UserAgent => record.user_agent,
        Field::RequestId => Some(record.request_id),
        // These fields are in `NO_VARIABLES`.
        Field::Time | Field::DecidedAt | Field::ShadowDenied | Field::Limits | Field::Tokens => None,
    };
    write_some(out, text)
}

fn write_some(out: &mut Vec<u8>, value: Option<impl std::fmt::Display>) -> io::Result<()> {
    value.map_or(Ok(()), |value| write!(out, "{value}"))
}

/// Escape the bytes from `start` on as nginx does: quotes, backslashes, control characters and bytes that are not ASCII
/// become `\xHH`. Outside of quotes, also escape spaces, so that a client cannot add values to a line.
fn escape_value(out: &mut Vec<u8>, start: usize, is_quoted: bool) {
    let is_special =
        |byte: &u8| !(b' '..0x7f).contains(byte) || matches!(byte, b'"' | b'\\') || (*byte == b' ' && !is_quoted);
    if !out[start..].iter().any(is_special) {
        return;
    }
    for byte in out.split_off(start) {
        if is_special(&byte) {
            out.extend_from_slice(format!("\\x{byte:02X}").as_bytes());
        } else {
            out.push(byte);
        }
    }
}

// === Lines for a terminal ===

/// Write a short line: time, status, duration, request, and what is unusual about the request.
pub(super) fn write_terminal(record: &AccessRecord<'_>, colors: Colors, out: &mut Vec<u8>) -> io::Result<()> {
    let start = out.len();
    let AccessRecord { method, path, client, status, bytes, outcome, .. } = record;
    // Use the epoch if jiff cannot represent the time.
    let time = Timestamp::from_microsecond(record.time as i64).unwrap_or_default();
    let color = match status {
        ..300 => AnsiColor::Green,
        300..400 => AnsiColor::Cyan,
        400..500 => AnsiColor::Yellow,
        500.. => AnsiColor::Red,
    };
    let style = match colors {
        Colors::On => Style::new().fg_color(Some(color.into())),
        Colors::Off => Style::new(),
    };
    let milliseconds = to_milliseconds(record.duration_ms);
    write!(out, "{} {style}{status}{style:#} {milliseconds:>8.1}ms {method} ", time.strftime("%H:%M:%S%.3fZ"))?;
    let text_start = out.len();
    write!(out, "{path}")?;
    escape_value(out, text_start, false);
    write!(out, " {bytes}B {client}")?;
    if let Some(route) = record.route {
        write!(out, " {route}")?;
    }
    if let Some(UpstreamInfo { upstream, .. }) = record.upstream {
        write!(out, " -> {upstream}")?;
    }
    if *outcome != "ok" {
        write!(out, " {style}{outcome}{style:#}")?;
    }
    if let Some(EffectiveLimit { limit, remaining, .. }) =
        record.decision.and_then(|decision| decision.effective_limit.as_ref())
    {
        write!(out, " {limit}={remaining}")?;
    }
    if !record.complete {
        write!(out, " incomplete")?;
    }
    if let Some(reason) = record.reason {
        let reason_start = out.len();
        write!(out, " {reason}")?;
        escape_value(out, reason_start, true);
    }
    escape_deceptive(out, start, Escape::Percent);
    Ok(())
}
