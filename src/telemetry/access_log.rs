//! The access log: one record per request, written in batches by a separate thread.

pub mod format;

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::Write;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use http::header::{HeaderName, REFERER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Version};
use jiff::Timestamp;
use tracing::warn;
use uuid::fmt::Hyphenated;
use uuid::{NoContext, Uuid};

use crate::clock::{LogThrottle, unix_us};
use crate::http::headers::X_REQUEST_ID;
use crate::http::problem::{append_plain, append_text, is_plain};
use crate::http::request_body::{RequestBody, UploadProgress};
use crate::http::target::request_host;
use crate::http::text::{Escape, escape_deceptive};
use crate::payload::llm::provider::Operation;
use crate::payload::llm::usage::TokenUsage;
use crate::telemetry::access_log::format::{AccessFormat, Field, FieldSet, write_terminal};
use crate::telemetry::log::{Journald, LogSocket, Syslog, SyslogHeader, push_framed};
use crate::telemetry::outcome::RequestOutcome;
use crate::telemetry::trace;
use crate::telemetry::trace::{TraceContext, TraceExporter, TraceParent};

/// Settings of the writer thread: the delay of a batch, and the maximum number of queued bytes.
const BATCH_CONFIG: BatchConfig =
    BatchConfig { name: "access log", delay: Duration::from_millis(5), capacity: 8 << 20 };

/// Status in the record of a request whose client closed the connection before the response. nginx logs the same
/// status.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Maximum time to write the last records at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The fractional part of the golden ratio, multiplied by 2^64. Modulo 2^64, the multiples of this number are evenly
/// distributed (Weyl, 1916). Every second, third or n-th multiple is evenly distributed as well. Therefore, periodic
/// traffic does not distort a sample.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// The beginning of a member of a JSON object. The name must not need escaping.
macro_rules! key {
    ($name:literal) => {
        concat!(",\"", $name, "\":")
    };
}

/// The beginning of a member whose value is a string, up to the quote before the text.
#[derive(Clone, Copy)]
struct TextKey(&'static str);

/// See [`TextKey`]. The name must not need escaping.
macro_rules! text_key {
    ($name:literal) => {
        TextKey(concat!(",\"", $name, "\":\""))
    };
}

/// The record of a request in the access log. A record never contains an API key, a token or a query string.
/// `docs/reference/access-log.md` documents the fields, because programs parse them.
#[derive(Debug, Clone, Copy)]
pub struct AccessRecord<'a> {
    /// Time at which the request arrived, in µs since the Unix epoch. The log contains this time in seconds.
    pub time: u64,
    /// IP address of the client.
    pub client: IpAddr,
    /// Request method.
    pub method: &'a str,
    /// `http` or `https`.
    pub scheme: &'static str,
    /// Canonical host of the request.
    pub host: Option<&'a str>,
    /// Request path, without the query.
    pub path: &'a str,
    /// HTTP version of the request, such as `HTTP/1.1`.
    pub protocol: &'static str,
    /// Response status.
    pub status: u16,
    /// Number of bytes of the response body that were sent.
    pub bytes: u64,
    /// Number of bytes of the request body that were received.
    pub bytes_received: Option<u64>,
    /// Whether the whole response body was sent.
    pub complete: bool,
    /// Time from the start of the request to the end of its response. The log contains this time in ms.
    pub duration_ms: Duration,
    /// Name of the route.
    pub route: Option<&'a str>,
    /// Outcome of the request, such as `ok` or `rate-limited`.
    pub outcome: &'a str,
    /// The reason of a response with the status 502, 503 or 504 that the gateway generated.
    pub reason: Option<&'a str>,
    /// Name of the consumer.
    pub consumer: Option<&'a str>,
    /// The rate limit check, if the route has limits.
    pub decision: Option<&'a DecisionInfo>,
    /// Model of an LLM request, if a limit counts LLM tokens.
    pub model: Option<&'a str>,
    /// Tokens of the response of an LLM API, if a limit counts them.
    pub tokens: Option<&'a TokenUsage>,
    /// The request to the upstream, if the request was forwarded.
    pub upstream: Option<&'a UpstreamInfo>,
    /// `Referer` of the request, without its query.
    pub referer: Option<&'a str>,
    /// `User-Agent` of the request.
    pub user_agent: Option<&'a str>,
    /// Id of the request, or `-`.
    pub request_id: &'a str,
    /// Id of the trace. The log contains this id as 32 hexadecimal digits.
    pub trace_id: Option<u128>,
    /// Share of successful requests whose records are written (`log.sample`). `None` if this request was not
    /// successful, or if the share is 1.
    pub sample_rate: Option<f64>,
}

/// Result of the rate limit check of a request.
#[derive(Debug)]
pub struct DecisionInfo {
    /// The overall decision of the check: the most relevant decision of a limit.
    pub decision: &'static str,
    /// The component that made the decision: `store`, `denial-cache` or `local`. `None` if the check failed.
    pub decided_by: Option<&'static str>,
    /// The limit that denied the request; if several did, the limit with the longest wait. If the request was admitted,
    /// the limit with the smallest remaining share of its quota.
    pub effective_limit: Option<EffectiveLimit>,
    /// Duration of the check, including the time in the wait queue. The log contains this time in ms.
    pub duration: Duration,
    /// Time of the decision by the clock of the store that made it, in µs since the Unix epoch. The log contains this
    /// time in seconds. `sluicegate replay` uses this time as the time of the request.
    pub decided_at: Option<u64>,
    /// Limits in shadow mode that would have denied the request.
    pub shadow_denied: Vec<Box<str>>,
    /// All checked limits, in the order of the route.
    pub limits: Vec<LimitInfo>,
    /// Time from the start of the request to the start of the check. Only traces contain this time.
    pub start_offset: Duration,
}

/// Usage of the limit that denied the request, or that is nearest to a denial.
#[derive(Debug)]
pub struct EffectiveLimit {
    /// Name of the limit.
    pub limit: Box<str>,
    /// Remaining quota after the decision.
    pub remaining: u64,
    /// Keyed hash of the identity. The log contains this hash as 32 hexadecimal digits.
    pub identity: u128,
}

/// The check of one limit.
#[derive(Debug)]
pub struct LimitInfo {
    /// Name of the limit.
    pub limit: Box<str>,
    /// Keyed hash of the identity. The log contains this hash as 32 hexadecimal digits.
    pub identity: u128,
    /// Cost of the request. If the cost depends on the response, this is the cost after the response.
    pub cost: u64,
    /// Decision of this limit, as in the metric `limit_decisions_total`. `None` if another limit denied the request.
    pub decision: Option<&'static str>,
    /// Remaining quota after the decision, if the store returned it.
    pub remaining: Option<u64>,
    /// Cost that was reserved before the request, if the limit counts LLM tokens.
    pub reserved: Option<u64>,
    /// The settled cost: the cost after the response of an LLM request. `cost` has the same value.
    pub settled: Option<u64>,
    /// Whether the settled cost is estimated, because the response did not report its usage.
    pub estimated: bool,
    /// Index of the limit in the list of limits of the route.
    pub limit_index: usize,
}

/// Result of the upstream request.
#[derive(Debug)]
pub struct UpstreamInfo {
    /// Name of the upstream.
    pub upstream: Arc<str>,
    /// The server to which the last attempt was sent.
    pub server: Option<Arc<str>>,
    /// Status of the upstream response. `None` without a response.
    pub upstream_status: Option<u16>,
    /// Time from the start of the first attempt to the response headers. The log contains this time in ms.
    pub duration: Duration,
    /// Number of retries of the upstream request.
    pub retries: u64,
    /// Time from the start of the request to the first attempt. Only traces contain this time.
    pub start_offset: Duration,
}

/// Destination of the access log.
pub enum LogDestination {
    /// A file or a stream. Each record is a line.
    Stream(Box<dyn Write + Send>),
    /// A syslog daemon. Each record is a message.
    Syslog(Syslog),
    /// The systemd journal. Each record is an entry.
    Journald(Journald),
}

/// Queue of access log records for the thread that writes them. Clones share the queue.
#[derive(Debug, Clone)]
pub struct AccessLog {
    writer: BatchWriter<u8>,
    encoding: Encoding,
    /// The fields of which the records contain the values.
    fields: FieldSet,
    /// Selects the requests whose records are written. `None` if the records of all requests are written.
    sampler: Option<Arc<Sampler>>,
}

/// Encoding of the records in the queue.
#[derive(Debug, Clone)]
enum Encoding {
    /// Each record is a line.
    Line(AccessFormat),
    /// Each record is a syslog message, preceded by its length.
    Syslog(AccessFormat, Arc<SyslogHeader>),
    /// Each record is JSON, preceded by its length. The writer thread converts the JSON to journal entries.
    Journald(FieldSet),
}

/// Selects the successful requests whose records are written.
#[derive(Debug)]
struct Sampler {
    /// Share of the successful requests whose records are written, greater than 0 and less than 1.
    rate: f64,
    counter: AtomicU64,
}

impl Sampler {
    /// Return whether the next record is written. The written records are evenly distributed among all records.
    fn picks_next(&self) -> bool {
        // The product is exact, because multiplying a floating-point number by a power of two changes only its
        // exponent.
        let share = (self.rate * 2.0_f64.powi(64)) as u64;
        self.counter.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN_RATIO) < share
    }
}

impl AccessLog {
    /// Start the writer thread. `sample` is the share of successful requests whose records are written: greater than 0,
    /// and at most 1. Only the fields of `format` apply to journald.
    ///
    /// # Errors
    /// The destination cannot be used, or the thread cannot be started.
    pub fn start(format: AccessFormat, sample: f64, destination: LogDestination) -> io::Result<Self> {
        let fields = format.fields();
        let (encoding, writer) = match destination {
            LogDestination::Stream(mut out) => {
                let writer = BatchWriter::start(BATCH_CONFIG, move |batch: &mut Vec<u8>| {
                    let Err(error) = out.write_all(batch).and_then(|()| out.flush()) else { return 0 };
                    warn!(%error, "cannot write the access log");
                    batch.iter().filter(|byte| **byte == b'\n').count() as u64
                });
                (Encoding::Line(format), writer?)
            }
            LogDestination::Syslog(syslog) => {
                let header = Arc::new(SyslogHeader::new(&syslog));
                (Encoding::Syslog(format, header), socket_writer(LogSocket::syslog(&syslog)?)?)
            }
            LogDestination::Journald(journald) => {
                (Encoding::Journald(fields), socket_writer(LogSocket::journald(&journald)?)?)
            }
        };
        let sampler = (sample < 1.0).then(|| Arc::new(Sampler { rate: sample, counter: AtomicU64::new(0) }));
        Ok(AccessLog { writer, encoding, fields, sampler })
    }

    /// Queue a record, unless the request was successful and the sampler does not select it.
    pub fn write(&self, record: &AccessRecord<'_>) {
        thread_local! {
            // Each worker formats its records in a separate buffer, so that the worker holds the lock of the shared
            // queue only briefly.
            static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let mut record = Cow::Borrowed(record);
        if let Some(sampler) = self.sampler.as_ref().filter(|_| record.is_success()) {
            if !sampler.picks_next() {
                return;
            }
            record.to_mut().sample_rate = Some(sampler.rate);
        }
        TEXT.with_borrow_mut(|text| {
            text.clear();
            match &self.encoding {
                Encoding::Line(format) => {
                    record.write(format, text);
                    text.push(b'\n');
                }
                Encoding::Syslog(format, header) => push_framed(text, |text| {
                    let written_at_us = record.time.saturating_add(record.duration_ms.as_micros() as u64);
                    // Ignore the result, because writing to a `Vec` cannot fail.
                    let _ = header.write(text, record.status, written_at_us);
                    record.write(format, text);
                }),
                Encoding::Journald(fields) => push_framed(text, |text| record.write_escaped_json(*fields, text)),
            }
            self.writer.push(|pending| pending.extend_from_slice(text));
        });
    }

    /// Return the number of lost records.
    pub fn dropped(&self) -> u64 {
        self.writer.dropped()
    }

    /// Wait until the queued records are written, at most 1 s.
    pub fn flush(&self) {
        self.writer.flush(FLUSH_TIMEOUT);
    }
}

fn socket_writer(mut socket: LogSocket) -> io::Result<BatchWriter<u8>> {
    BatchWriter::start(BATCH_CONFIG, move |batch: &mut Vec<u8>| socket.deliver(batch))
}

impl AccessRecord<'_> {
    /// Return whether the request was successful, so that the sample may omit its record. A request is successful if
    /// the whole response was sent, the outcome is not an error, and no limit denied the request, not even in shadow
    /// mode.
    fn is_success(&self) -> bool {
        let is_ok = self.status < 400 && self.complete && matches!(self.outcome, "ok" | "preflight");
        is_ok && self.decision.is_none_or(|decision| decision.shadow_denied.is_empty())
    }

    fn write(&self, format: &AccessFormat, out: &mut Vec<u8>) {
        let start = out.len();
        // Ignore the results, because writing to a `Vec` cannot fail.
        match format {
            AccessFormat::Json(fields) => self.write_escaped_json(*fields, out),
            AccessFormat::Text => {
                let _ = self.write_text(out);
                escape_deceptive(out, start, Escape::Percent);
            }
            AccessFormat::Template(template) => {
                let _ = template.write(self, out);
            }
            AccessFormat::Terminal(colors) => {
                let _ = write_terminal(self, *colors, out);
            }
        }
    }

    fn write_escaped_json(&self, fields: FieldSet, out: &mut Vec<u8>) {
        let start = out.len();
        // Writing to a `Vec` cannot fail. Only texts that are not ASCII have deceptive characters.
        if !self.write_json(fields, out).unwrap_or(false) {
            escape_deceptive(out, start, Escape::Json);
        }
    }

    /// Return whether the record is ASCII.
    fn write_json(&self, fields: FieldSet, out: &mut Vec<u8>) -> io::Result<bool> {
        let mut json = JsonObject::start(out);
        self.write_request(fields, &mut json);
        if let Some(decision) = self.decision {
            decision.write_json(fields, &mut json);
        }
        json.optional(fields, Field::Model, text_key!("model"), self.model);
        if let Some(usage) = self.tokens.filter(|_| fields.contains(Field::Tokens)) {
            json.key(key!("tokens"));
            let mut tokens = JsonObject::start(json.out);
            for (key, _, count) in logged_tokens(usage) {
                tokens.number(key, count);
            }
            tokens.end();
        }
        if let Some(upstream) = self.upstream {
            upstream.write_json(fields, &mut json);
        }
        json.optional(fields, Field::Referer, text_key!("referer"), self.referer);
        json.optional(fields, Field::UserAgent, text_key!("user_agent"), self.user_agent);
        json.optional(fields, Field::RequestId, text_key!("request_id"), Some(self.request_id));
        if let Some(id) = self.trace_id.filter(|_| fields.contains(Field::TraceId)) {
            json.id(key!("trace_id"), id);
        }
        if let Some(rate) = self.sample_rate.filter(|_| fields.contains(Field::SampleRate)) {
            json.key(key!("sample_rate"));
            write!(json.out, "{rate}")?;
        }
        let is_ascii = json.is_ascii;
        json.end();
        Ok(is_ascii)
    }

    /// Write the fields that describe the request and its response.
    fn write_request(&self, fields: FieldSet, json: &mut JsonObject<'_>) {
        if fields.contains(Field::Time) {
            json.decimal::<6>(key!("time"), self.time);
        }
        if fields.contains(Field::Client) {
            json.address(key!("client"), self.client);
        }
        // A method is a token, which has no characters to escape.
        json.plain(fields, Field::Method, text_key!("method"), Some(self.method));
        json.plain(fields, Field::Scheme, text_key!("scheme"), Some(self.scheme));
        json.optional(fields, Field::Host, text_key!("host"), self.host);
        json.optional(fields, Field::Path, text_key!("path"), Some(self.path));
        json.plain(fields, Field::Protocol, text_key!("protocol"), Some(self.protocol));
        if fields.contains(Field::Status) {
            json.number(key!("status"), self.status.into());
        }
        if fields.contains(Field::Bytes) {
            json.number(key!("bytes"), self.bytes);
        }
        if let Some(received) = self.bytes_received.filter(|_| fields.contains(Field::BytesReceived)) {
            json.number(key!("bytes_received"), received);
        }
        if fields.contains(Field::Complete) {
            json.boolean(key!("complete"), self.complete);
        }
        if fields.contains(Field::DurationMs) {
            json.milliseconds(key!("duration_ms"), self.duration_ms);
        }
        json.plain(fields, Field::Route, text_key!("route"), self.route);
        json.plain(fields, Field::Outcome, text_key!("outcome"), Some(self.outcome));
        json.optional(fields, Field::Reason, text_key!("reason"), self.reason);
        json.optional(fields, Field::Consumer, text_key!("consumer"), self.consumer);
    }

    fn write_text(&self, out: &mut Vec<u8>) -> io::Result<()> {
        let AccessRecord { client, method, path, status, bytes, outcome, request_id, .. } = self;
        // Use the epoch if jiff cannot represent the time.
        let time = Timestamp::from_microsecond(self.time as i64).unwrap_or_default();
        let route = self.route.unwrap_or("-");
        write!(
            out,
            "{time:.6} {client} {method} {path} {status} {bytes} {}ms route={route} {outcome}",
            to_milliseconds(self.duration_ms)
        )?;
        if let Some(reason) = self.reason {
            write!(out, " reason={}", one_word(reason))?;
        }
        if let Some(DecisionInfo { decision, decided_by, effective_limit, duration, shadow_denied, limits, .. }) =
            self.decision
        {
            write!(out, " decision={decision}")?;
            if let Some(EffectiveLimit { limit, remaining, identity }) = effective_limit {
                write!(out, " limit={limit} remaining={remaining} identity={identity:032x}")?;
            }
            if let Some(source) = decided_by {
                write!(out, " decided_by={source}")?;
            }
            if !shadow_denied.is_empty() {
                write!(out, " shadow_denied={}", shadow_denied.join(","))?;
            }
            write!(out, " decision_ms={}", to_milliseconds(*duration))?;
            for limit in limits {
                let LimitInfo { limit, reserved, settled, estimated, .. } = limit;
                if let Some(reserved) = reserved {
                    write!(out, " {limit}.reserved={reserved}")?;
                }
                if let Some(settled) = settled {
                    write!(out, " {limit}.settled={settled}")?;
                }
                if *estimated {
                    write!(out, " {limit}.estimated")?;
                }
            }
        }
        if let Some(model) = self.model {
            write!(out, " model={}", one_word(model))?;
        }
        for (_, name, count) in self.tokens.into_iter().flat_map(logged_tokens) {
            write!(out, " tokens.{name}={count}")?;
        }
        if let Some(UpstreamInfo { upstream, server, upstream_status, duration, retries, .. }) = self.upstream {
            write!(out, " upstream={upstream} upstream_ms={}", to_milliseconds(*duration))?;
            if let Some(server) = server {
                write!(out, " server={}", server.replace(' ', ""))?;
            }
            if let Some(status) = upstream_status {
                write!(out, " upstream_status={status}")?;
            }
            if *retries > 0 {
                write!(out, " retries={retries}")?;
            }
        }
        write!(out, " request_id={request_id}")?;
        if let Some(trace) = self.trace_id {
            write!(out, " trace_id={trace:032x}")?;
        }
        if let Some(rate) = self.sample_rate {
            write!(out, " sample_rate={rate}")?;
        }
        if !self.complete {
            write!(out, " incomplete")?;
        }
        Ok(())
    }
}

impl UpstreamInfo {
    fn write_json(&self, fields: FieldSet, json: &mut JsonObject<'_>) {
        json.plain(fields, Field::Upstream, text_key!("upstream"), Some(&self.upstream));
        json.optional(fields, Field::Server, text_key!("server"), self.server.as_deref());
        if let Some(status) = self.upstream_status.filter(|_| fields.contains(Field::UpstreamStatus)) {
            json.number(key!("upstream_status"), u64::from(status));
        }
        if fields.contains(Field::UpstreamMs) {
            json.milliseconds(key!("upstream_ms"), self.duration);
        }
        if self.retries > 0 && fields.contains(Field::Retries) {
            json.number(key!("retries"), self.retries);
        }
    }
}

impl DecisionInfo {
    fn write_json(&self, fields: FieldSet, json: &mut JsonObject<'_>) {
        json.plain(fields, Field::Decision, text_key!("decision"), Some(self.decision));
        json.plain(fields, Field::DecidedBy, text_key!("decided_by"), self.decided_by);
        if let Some(EffectiveLimit { limit, remaining, identity }) = &self.effective_limit {
            json.plain(fields, Field::Limit, text_key!("limit"), Some(limit));
            if fields.contains(Field::Remaining) {
                json.number(key!("remaining"), *remaining);
            }
            if fields.contains(Field::Identity) {
                json.id(key!("identity"), *identity);
            }
        }
        if fields.contains(Field::DecisionMs) {
            json.milliseconds(key!("decision_ms"), self.duration);
        }
        if let Some(us) = self.decided_at.filter(|_| fields.contains(Field::DecidedAt)) {
            json.decimal::<6>(key!("decided_at"), us);
        }
        if !self.shadow_denied.is_empty() && fields.contains(Field::ShadowDenied) {
            json.array(key!("shadow_denied"), &self.shadow_denied, |out, limit| append_plain(out, limit));
        }
        if fields.contains(Field::Limits) {
            json.array(key!("limits"), &self.limits, LimitInfo::write_json);
        }
    }
}

impl LimitInfo {
    fn write_json(out: &mut Vec<u8>, info: &LimitInfo) {
        let LimitInfo { limit, identity, cost, decision, remaining, reserved, settled, estimated, limit_index: _ } =
            info;
        let mut json = JsonObject::start(out);
        json.text(text_key!("limit"), limit);
        json.id(key!("identity"), *identity);
        json.number(key!("cost"), *cost);
        decision.iter().for_each(|decision| json.text(text_key!("decision"), decision));
        remaining.iter().for_each(|remaining| json.number(key!("remaining"), *remaining));
        reserved.iter().for_each(|reserved| json.number(key!("reserved"), *reserved));
        settled.iter().for_each(|settled| json.number(key!("settled"), *settled));
        if *estimated {
            json.boolean(key!("estimated"), true);
        }
        json.end();
    }
}

/// Replace spaces and line breaks, because a record in text format must remain one line with fields separated by spaces.
fn one_word(text: &str) -> String {
    text.replace(|c: char| c.is_whitespace() || c.is_control(), "_")
}

/// Return a duration in ms, with a resolution of 1 µs.
fn to_milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

/// Return the logged numbers of tokens, with their JSON key and their name: the input and the output, and the parts of
/// them that are not 0.
fn logged_tokens(usage: &TokenUsage) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
    let cache_write = usage.cache_write_5m.saturating_add(usage.cache_write_1h);
    let is_logged = |(_, name, count): &(_, &str, u64)| *count > 0 || matches!(*name, "input" | "output");
    [
        (key!("input"), "input", usage.input),
        (key!("cached_input"), "cached_input", usage.cached_input),
        (key!("cache_write"), "cache_write", cache_write),
        (key!("output"), "output", usage.output),
        (key!("reasoning"), "reasoning", usage.reasoning),
    ]
    .into_iter()
    .filter(is_logged)
}

// === JSON ===

/// See [`JsonObject::decimal`].
fn append_decimal<const DIGITS: usize>(out: &mut Vec<u8>, number: u64) {
    let unit = const { 10_u64.pow(DIGITS as u32) };
    let is_less_than_one = number < unit;
    let mut buffer = itoa::Buffer::new();
    // The leading 1 of the sum keeps the zeros after the point.
    let digits = buffer.format(if is_less_than_one { number + unit } else { number }).as_bytes();
    let (whole, rest) = digits.split_at(digits.len() - DIGITS);
    let length = rest.iter().rposition(|digit| *digit != b'0').map_or(1, |last| last + 1);
    out.extend_from_slice(if is_less_than_one { b"0" } else { whole });
    out.push(b'.');
    out.extend_from_slice(&rest[..length]);
}

/// Writes the members of a JSON object. The log does not use serde_json, which looks up each byte of keys and values in
/// an escape table: a record would need twice as many instructions.
struct JsonObject<'a> {
    out: &'a mut Vec<u8>,
    /// Position of the object in `out`.
    start: usize,
    /// Whether all texts so far are ASCII. Names of limits always are.
    is_ascii: bool,
}

impl<'a> JsonObject<'a> {
    /// Start an object.
    fn start(out: &'a mut Vec<u8>) -> Self {
        JsonObject { start: out.len(), out, is_ascii: true }
    }

    fn end(self) {
        // The key of the first member also begins with a comma.
        if self.out.len() == self.start {
            self.out.push(b'{');
        }
        self.out[self.start] = b'{';
        self.out.push(b'}');
    }

    /// Write a key. The caller writes the value. This and the following functions are inlined, so that the length of the
    /// key is a constant.
    #[inline]
    fn key(&mut self, key: &str) {
        self.out.extend_from_slice(key.as_bytes());
    }

    #[inline]
    fn text(&mut self, key: TextKey, text: &str) {
        self.key(key.0);
        if is_plain(text) {
            self.rest_of_text(text);
        } else {
            // `append_text` writes the quote again.
            self.out.pop();
            self.is_ascii &= append_text(self.out, text);
        }
    }

    /// Write the text and its closing quote.
    fn rest_of_text(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
        self.out.push(b'"');
    }

    /// Write a text if it is present and its field is selected.
    #[inline]
    fn optional(&mut self, fields: FieldSet, field: Field, key: TextKey, text: Option<&str>) {
        if let Some(text) = text.filter(|_| fields.contains(field)) {
            self.text(key, text);
        }
    }

    /// Write a text without characters to escape, such as a name in the configuration, if it is present and its field is
    /// selected.
    #[inline]
    fn plain(&mut self, fields: FieldSet, field: Field, key: TextKey, text: Option<&str>) {
        if let Some(text) = text.filter(|_| fields.contains(field)) {
            self.key(key.0);
            self.rest_of_text(text);
        }
    }

    #[inline]
    fn number(&mut self, key: &str, number: u64) {
        self.key(key);
        self.out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }

    #[inline]
    fn boolean(&mut self, key: &str, value: bool) {
        self.key(key);
        self.out.extend_from_slice(if value { b"true" } else { b"false" });
    }

    /// Write `number` divided by 10 to the power of `DIGITS`, with at least one decimal place and without further
    /// trailing zeros. `DIGITS` must be at least 1.
    #[inline]
    fn decimal<const DIGITS: usize>(&mut self, key: &str, number: u64) {
        self.key(key);
        append_decimal::<DIGITS>(self.out, number);
    }

    #[inline]
    fn milliseconds(&mut self, key: &str, time: Duration) {
        self.decimal::<3>(key, time.as_micros() as u64);
    }

    /// Write an IP address. The usual IPv4 address is written without the machinery of `fmt`.
    fn address(&mut self, key: &str, address: IpAddr) {
        self.key(key);
        self.out.push(b'"');
        match address {
            IpAddr::V4(address) => {
                for (index, octet) in address.octets().into_iter().enumerate() {
                    if index > 0 {
                        self.out.push(b'.');
                    }
                    self.out.extend_from_slice(itoa::Buffer::new().format(octet).as_bytes());
                }
            }
            IpAddr::V6(_) => {
                // Ignore the result, because writing to a `Vec` cannot fail.
                let _ = write!(self.out, "{address}");
            }
        }
        self.out.push(b'"');
    }

    /// Write an id as a string of 32 hexadecimal digits.
    fn id(&mut self, key: &str, id: u128) {
        self.key(key);
        self.out.push(b'"');
        let digits = (0..32).rev().map(|digit| b"0123456789abcdef"[(id >> (4 * digit)) as usize & 15]);
        self.out.extend(digits);
        self.out.push(b'"');
    }

    /// Write an array. `write` writes one item.
    fn array<T>(&mut self, key: &str, items: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
        self.key(key);
        self.out.push(b'[');
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push(b',');
            }
            write(self.out, item);
        }
        self.out.push(b']');
    }
}

// === Request record: collected during a request, and written to the access log and the trace exporter at the end of
// the request ===

/// The access log and the trace exporter, which receive a record of each request.
#[derive(Debug, Clone, Default)]
pub struct TelemetrySinks {
    /// The access log, unless it is off.
    pub access_log: Option<AccessLog>,
    /// The trace exporter, if an endpoint is configured.
    pub trace_exporter: Option<TraceExporter>,
}

/// The data of a request that are known when the request arrives.
pub struct RequestStart<'a> {
    /// Time when the request arrived.
    pub instant: Instant,
    /// IP address of the peer of the connection.
    pub peer: IpAddr,
    /// `http` or `https`.
    pub scheme: &'static str,
    /// The request.
    pub request: &'a Request<RequestBody>,
}

/// Values of fields that are collected only if the access log contains them.
#[derive(Debug, Default)]
struct SelectedValues {
    host: Option<Box<str>>,
    referer: Option<Box<str>>,
    user_agent: Option<Box<str>>,
    consumer: Option<Box<str>>,
    /// The progress of the request body. `None` if the body is empty.
    upload: Option<Arc<UploadProgress>>,
}

impl SelectedValues {
    fn new(fields: FieldSet, request: &Request<RequestBody>) -> Self {
        let headers = request.headers();
        let text = |name: &HeaderName| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
        let host = || request_host(request.uri(), headers, request.version()).ok().filter(|host| !host.is_empty());
        let referer = || text(&REFERER).map(|referer| without_query(&referer).into());
        SelectedValues {
            host: fields.contains(Field::Host).then(host).flatten().map(Into::into),
            referer: fields.contains(Field::Referer).then(referer).flatten(),
            user_agent: fields.contains(Field::UserAgent).then(|| text(&USER_AGENT)).flatten().map(Into::into),
            consumer: None,
            upload: fields.contains(Field::BytesReceived).then(|| request.body().progress()).flatten(),
        }
    }
}

/// Return a URL without its query and fragment, which may contain secrets.
fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

/// Return the name of an HTTP version, as in a request line.
pub fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_09 => "HTTP/0.9",
        Version::HTTP_10 => "HTTP/1.0",
        Version::HTTP_2 => "HTTP/2.0",
        Version::HTTP_3 => "HTTP/3.0",
        _ => "HTTP/1.1",
    }
}

/// The record of a request in progress.
#[derive(Debug)]
pub struct RequestRecord {
    sinks: Arc<TelemetrySinks>,
    started_at: Instant,
    peer: IpAddr,
    scheme: &'static str,
    method: Method,
    path: Box<str>,
    version: Version,
    /// Values that only some access logs contain. `None` if the access log contains none of them.
    selected: Option<Box<SelectedValues>>,
    /// The reason of a response with the status 502, 503 or 504 that the gateway generated.
    pub reason: Option<Box<str>>,
    /// Status of the response to the request.
    pub status: u16,
    /// Outcome of the request, such as `ok` or `rate-limited`.
    pub outcome: &'static str,
    /// Id of the trace, even if this gateway records no spans of the trace.
    trace_id: Option<u128>,
    /// IP address of the client. Until the route is known, this is the address of the peer.
    pub client: IpAddr,
    /// Name of the route.
    pub route: Option<Arc<str>>,
    /// Path pattern of the route, as configured. Only traces contain it.
    pub path_template: Option<Box<str>>,
    /// Result of the rate limit check.
    pub decision: Option<DecisionInfo>,
    /// Model of an LLM request, if a limit counts LLM tokens.
    pub model: Option<Box<str>>,
    /// Operation of an LLM request. Only traces contain it.
    pub operation: Option<&'static Operation>,
    /// Model that has generated the response of an LLM API. Only traces contain it.
    pub response_model: Option<Box<str>>,
    /// Tokens of the response of an LLM API, if a limit counts them.
    pub tokens: Option<Box<TokenUsage>>,
    /// Result of the upstream request.
    pub upstream: Option<UpstreamInfo>,
    /// Ids of the spans, if the gateway traces the request.
    pub trace: Option<TraceContext>,
    /// Id of the request, once it is determined. The upstream receives the same id.
    pub request_id: Option<RequestId>,
}

impl TelemetrySinks {
    /// Return the ids of the spans of a request with this parent. Return `None` if it is not traced.
    pub fn trace_context(&self, parent: Option<TraceParent>) -> Option<TraceContext> {
        self.trace_exporter.as_ref().and_then(|exporter| exporter.context(parent))
    }

    /// Wait until all queued records and spans are written, at most 3 s.
    pub fn flush(&self) {
        if let Some(access_log) = &self.access_log {
            access_log.flush();
        }
        if let Some(trace_exporter) = &self.trace_exporter {
            trace_exporter.flush();
        }
    }
}

impl RequestRecord {
    /// Start the record of a request. Return `None` if the access log is off and the request is not traced.
    pub fn start(sinks: &Arc<TelemetrySinks>, start: &RequestStart<'_>) -> Option<Box<Self>> {
        if sinks.access_log.is_none() && sinks.trace_exporter.is_none() {
            return None;
        }
        let RequestStart { request, .. } = start;
        let parent = TraceParent::from_headers(request.headers());
        let trace = sinks.trace_context(parent);
        if sinks.access_log.is_none() && trace.is_none() {
            return None;
        }
        let fields = sinks.access_log.as_ref().map_or(FieldSet::EMPTY, |log| log.fields);
        let selects = fields.intersects(FieldSet::COPIED);
        // The box exists first, so that the compiler constructs the record in it instead of copying it.
        let place = Box::new_uninit();
        Some(Box::write(
            place,
            RequestRecord {
                sinks: sinks.clone(),
                started_at: start.instant,
                peer: start.peer,
                scheme: start.scheme,
                method: request.method().clone(),
                path: request.uri().path().into(),
                version: request.version(),
                selected: selects.then(|| Box::new(SelectedValues::new(fields, request))),
                reason: None,
                status: 0,
                outcome: RequestOutcome::Ok.label(),
                trace_id: trace.map(|trace| trace.trace_id).or(parent.map(|parent| parent.trace_id)),
                client: start.peer,
                route: None,
                path_template: None,
                decision: None,
                model: None,
                operation: None,
                response_model: None,
                tokens: None,
                upstream: None,
                trace,
                request_id: None,
            },
        ))
    }

    /// Record the name of the consumer.
    pub fn set_consumer(&mut self, consumer: Option<&str>) {
        if let Some(selected) = &mut self.selected {
            selected.consumer = consumer.map(Into::into);
        }
    }

    /// Return whether the access log contains the name of the consumer.
    pub fn has_consumer(&self) -> bool {
        self.sinks.access_log.as_ref().is_some_and(|log| log.fields.contains(Field::Consumer))
    }

    /// Return the time from the arrival of the request to `instant`.
    pub fn offset_of(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.started_at)
    }

    /// Write the record of a request whose client closed the connection or stream before the response.
    pub fn write_aborted(mut self: Box<Self>) {
        self.status = CLIENT_CLOSED_REQUEST;
        self.outcome = RequestOutcome::ClientAborted.label();
        self.write(0, false);
    }

    /// Write the record to the access log, and export the spans of the request. `bytes_sent` is the number of bytes of
    /// the response body that were sent. `complete` is true if the whole body was sent.
    pub fn write(self: Box<Self>, bytes_sent: u64, complete: bool) {
        let duration = self.started_at.elapsed();
        let selected = self.selected.as_deref();
        let mut id_text = [0; RequestId::TEXT_LENGTH];
        let record = AccessRecord {
            time: unix_us().saturating_sub(duration.as_micros() as u64),
            client: self.client,
            method: self.method.as_str(),
            scheme: self.scheme,
            host: selected.and_then(|selected| selected.host.as_deref()),
            path: &self.path,
            protocol: protocol(self.version),
            status: self.status,
            bytes: bytes_sent,
            bytes_received: selected.map(|selected| selected.upload.as_ref().map_or(0, |upload| upload.received())),
            complete: complete || self.method == Method::HEAD,
            duration_ms: duration,
            route: self.route.as_deref(),
            outcome: self.outcome,
            reason: self.reason.as_deref(),
            consumer: selected.and_then(|selected| selected.consumer.as_deref()),
            decision: self.decision.as_ref(),
            model: self.model.as_deref(),
            tokens: self.tokens.as_deref(),
            upstream: self.upstream.as_ref(),
            referer: selected.and_then(|selected| selected.referer.as_deref()),
            user_agent: selected.and_then(|selected| selected.user_agent.as_deref()),
            request_id: self.request_id.as_ref().map_or("-", |id| id.text(&mut id_text)),
            trace_id: self.trace_id,
            sample_rate: None,
        };
        if let Some(access) = &self.sinks.access_log {
            access.write(&record);
        }
        if let (Some(spans), Some(trace)) = (&self.sinks.trace_exporter, &self.trace) {
            let path_template = self.path_template.as_deref();
            let scheme = self.scheme;
            let peer = self.peer;
            spans.record(&trace::RequestTrace {
                trace,
                record: &record,
                path_template,
                rpc_method: None,
                operation: self.operation,
                response_model: self.response_model.as_deref(),
                scheme,
                peer,
            });
        }
    }
}

// === Request id: sent by a trusted proxy, or generated by this gateway. The upstream request, the logs and the problem
// documents contain the same id ===

/// The id of a request.
#[derive(Debug, Clone)]
pub enum RequestId {
    /// A UUIDv7 that this gateway generated. It is converted to text where the text is used: this costs less than to
    /// allocate a text that the upstream request and the access log share.
    Generated(Uuid),
    /// Value of `X-Request-Id` that a trusted proxy sent.
    Text(HeaderValue),
}

impl RequestId {
    /// Length of the text of a generated id.
    pub const TEXT_LENGTH: usize = Hyphenated::LENGTH;

    /// Return the id of a request: the received `X-Request-Id` if the peer is `trusted`, otherwise a new id.
    pub fn from_headers(headers: &HeaderMap, trusted: bool) -> Self {
        match trusted.then(|| headers.get(X_REQUEST_ID)).flatten() {
            Some(received) => RequestId::Text(received.clone()),
            // UUIDv7 ids of different milliseconds are ordered by time. Do not use `Uuid::now_v7`, which orders ids
            // more finely, but takes a lock that all workers share.
            None => RequestId::Generated(Uuid::new_v7(uuid::Timestamp::now(NoContext))),
        }
    }

    /// Return the text of the id, or `-` if a trusted proxy sent a text that is not ASCII. `buffer` gets the text of a
    /// generated id.
    fn text<'a>(&'a self, buffer: &'a mut [u8; RequestId::TEXT_LENGTH]) -> &'a str {
        match self {
            RequestId::Text(value) => value.to_str().unwrap_or("-"),
            RequestId::Generated(id) => id.hyphenated().encode_lower(buffer),
        }
    }

    /// Return the id as a header value.
    pub fn to_header_value(&self) -> HeaderValue {
        match self {
            RequestId::Text(value) => value.clone(),
            RequestId::Generated(_) => {
                let mut buffer = [0; RequestId::TEXT_LENGTH];
                // The conversion cannot fail, because hexadecimal digits and hyphens are a valid header value.
                HeaderValue::from_str(self.text(&mut buffer)).unwrap_or(HeaderValue::from_static("-"))
            }
        }
    }
}

// === Background writer: workers queue items without waiting, and a separate thread delivers the items in batches ===

/// Minimum interval between two warnings about lost records.
const WRITER_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// If the buffer of a delivered batch has a larger capacity (in items), it is shrunk to this capacity before it is
/// reused.
const RETAINED_CAPACITY: usize = 64 << 10;

/// Settings of a [`BatchWriter`].
#[derive(Debug, Clone, Copy)]
pub struct BatchConfig {
    /// Name of the writer in the log. The name of the thread is the same, with hyphens instead of spaces.
    pub name: &'static str,
    /// Time from the first item of a batch to the delivery of the batch. The delay exists because waking the thread for
    /// each item would cost more than writing the item.
    pub delay: Duration,
    /// Maximum number of queued items. Further records are dropped and counted.
    pub capacity: usize,
}

/// A queue of items for the thread that delivers them. Clones share the queue.
#[derive(Debug)]
pub struct BatchWriter<T> {
    inner: Arc<Inner<T>>,
    commands: Sender<Command>,
}

#[derive(Debug)]
struct Inner<T> {
    config: BatchConfig,
    pending: Mutex<PendingItems<T>>,
    throttle: LogThrottle,
}

#[derive(Debug)]
struct PendingItems<T> {
    items: Vec<T>,
    /// Total number of records that were dropped or could not be delivered.
    dropped: u64,
}

enum Command {
    Deliver,
    Flush(Sender<()>),
}

impl<T> Clone for BatchWriter<T> {
    fn clone(&self) -> Self {
        BatchWriter { inner: self.inner.clone(), commands: self.commands.clone() }
    }
}

impl<T: Send + 'static> BatchWriter<T> {
    /// Start the thread, which calls `deliver` with each batch. `deliver` returns the number of records that were lost.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        config: BatchConfig,
        mut deliver: impl FnMut(&mut Vec<T>) -> u64 + Send + 'static,
    ) -> io::Result<Self> {
        let pending = Mutex::new(PendingItems { items: Vec::new(), dropped: 0 });
        let inner = Arc::new(Inner { config, pending, throttle: LogThrottle::new() });
        let (commands, command_receiver) = channel();
        let thread_inner = inner.clone();
        thread::Builder::new().name(config.name.replace(' ', "-")).spawn(move || {
            let mut batch = Vec::new();
            for command in command_receiver {
                if let Command::Deliver = command {
                    thread::sleep(config.delay);
                }
                mem::swap(&mut batch, &mut thread_inner.lock_pending().items);
                if !batch.is_empty() {
                    let dropped = deliver(&mut batch);
                    thread_inner.lock_pending().dropped += dropped;
                }
                batch.clear();
                batch.shrink_to(RETAINED_CAPACITY);
                if let Command::Flush(done) = command {
                    // Ignore the error of `send`, because the caller of `flush` may have stopped waiting.
                    let _ = done.send(());
                }
            }
        })?;
        Ok(BatchWriter { inner, commands })
    }

    /// Queue the items of one record, which `add` appends. If the queue is full, drop the record and count it in
    /// `dropped`.
    pub fn push(&self, add: impl FnOnce(&mut Vec<T>)) {
        let Inner { config, throttle, .. } = &*self.inner;
        let mut pending = self.inner.lock_pending();
        if pending.items.len() >= config.capacity {
            pending.dropped += 1;
            let lost = pending.dropped;
            drop(pending);
            if throttle.should_log(WRITER_LOG_INTERVAL) {
                warn!(dropped = lost, writer = config.name, "the queue is full: records are lost");
            }
            return;
        }
        let was_empty = pending.items.is_empty();
        add(&mut pending.items);
        drop(pending);
        if was_empty {
            // Sending cannot fail, because the thread runs as long as a `Sender` exists.
            let _ = self.commands.send(Command::Deliver);
        }
    }

    /// Return the number of lost records.
    pub fn dropped(&self) -> u64 {
        self.inner.lock_pending().dropped
    }

    /// Wait until all queued items are delivered, but at most for `timeout`.
    pub fn flush(&self, timeout: Duration) {
        let (done, delivered) = channel();
        if self.commands.send(Command::Flush(done)).is_ok() {
            let _ = delivered.recv_timeout(timeout);
        }
    }
}

impl<T> Inner<T> {
    fn lock_pending(&self) -> MutexGuard<'_, PendingItems<T>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc;

    use super::*;

    /// The record of a successful request without a route.
    const SUCCESS: AccessRecord<'_> = AccessRecord {
        time: 0,
        client: IpAddr::V4(Ipv4Addr::LOCALHOST),
        method: "GET",
        scheme: "http",
        host: None,
        path: "/",
        protocol: "HTTP/1.1",
        status: 200,
        bytes: 0,
        bytes_received: None,
        complete: true,
        duration_ms: Duration::ZERO,
        route: None,
        outcome: "ok",
        reason: None,
        consumer: None,
        decision: None,
        upstream: None,
        referer: None,
        user_agent: None,
        request_id: "-",
        trace_id: None,
        model: None,
        tokens: None,
        sample_rate: None,
    };

    /// The formats must not change, because programs parse them.
    #[test]
    fn access_record_has_documented_json_and_text_formats() {
        let limit_info = |limit: &str, decision, remaining, settled: Option<u64>| LimitInfo {
            limit: limit.into(),
            identity: 0xabc,
            cost: 2,
            decision,
            remaining,
            reserved: settled.map(|settled| settled + 1),
            settled,
            estimated: settled.is_some(),
            limit_index: 0,
        };
        let decision = DecisionInfo {
            decision: "denied",
            decided_by: Some("store"),
            effective_limit: Some(EffectiveLimit { limit: "hour".into(), remaining: 0, identity: 0xabc }),
            duration: Duration::from_micros(1_250),
            decided_at: Some(1_764_000_000_123_500),
            shadow_denied: vec!["trial".into()],
            limits: vec![limit_info("hour", Some("denied"), Some(0), None), limit_info("day", None, None, Some(2))],
            start_offset: Duration::ZERO,
        };
        let upstream = UpstreamInfo {
            upstream: "api".into(),
            server: Some("api.test:80 (127.0.0.1:80)".into()),
            upstream_status: Some(200),
            duration: Duration::from_millis(7),
            retries: 1,
            start_offset: Duration::ZERO,
        };
        let record = AccessRecord {
            time: 1_764_000_000_123_456,
            client: [127, 0, 0, 1].into(),
            method: "GET",
            path: "/a",
            status: 429,
            bytes: 3,
            complete: false,
            duration_ms: Duration::from_micros(12_345),
            route: Some("a"),
            outcome: "rate-limited",
            decision: Some(&decision),
            model: Some("m 1"),
            tokens: Some(&TokenUsage { input: 9, cached_input: 4, output: 5, reasoning: 2, ..TokenUsage::default() }),
            upstream: Some(&upstream),
            request_id: "id",
            trace_id: Some(1),
            sample_rate: Some(0.25),
            ..SUCCESS
        };
        let hash = "00000000000000000000000000000abc";
        let mut json = Vec::new();
        record.write_json(FieldSet::DEFAULT, &mut json).unwrap();
        assert_eq!(
            String::from_utf8(json).unwrap(),
            format!(
                "{{\"time\":1764000000.123456,\"client\":\"127.0.0.1\",\"method\":\"GET\",\"path\":\"/a\",\"status\":429,\"bytes\":3,\
                 \"complete\":false,\"duration_ms\":12.345,\"route\":\"a\",\"outcome\":\"rate-limited\",\"decision\":\"denied\",\
                 \"decided_by\":\"store\",\"limit\":\"hour\",\"remaining\":0,\"identity\":\"{hash}\",\"decision_ms\":1.25,\
                 \"decided_at\":1764000000.1235,\"shadow_denied\":[\"trial\"],\"limits\":[{{\"limit\":\"hour\",\"identity\":\"{hash}\",\"cost\":2,\
                 \"decision\":\"denied\",\"remaining\":0}},{{\"limit\":\"day\",\"identity\":\"{hash}\",\"cost\":2,\
                 \"reserved\":3,\"settled\":2,\"estimated\":true}}],\"model\":\"m 1\",\
                 \"tokens\":{{\"input\":9,\"cached_input\":4,\"output\":5,\"reasoning\":2}},\
                 \"upstream\":\"api\",\"server\":\"api.test:80 (127.0.0.1:80)\",\"upstream_status\":200,\"upstream_ms\":7.0,\
                 \"retries\":1,\"request_id\":\"id\",\"trace_id\":\"00000000000000000000000000000001\",\
                 \"sample_rate\":0.25}}"
            )
        );
        let mut text = Vec::new();
        record.write_text(&mut text).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            format!(
                "2025-11-24T16:00:00.123456Z 127.0.0.1 GET /a 429 3 12.345ms route=a rate-limited decision=denied limit=hour remaining=0 \
                 identity={hash} decided_by=store shadow_denied=trial decision_ms=1.25 day.reserved=3 day.settled=2 day.estimated model=m_1 tokens.input=9 tokens.cached_input=4 \
                 tokens.output=5 tokens.reasoning=2 upstream=api upstream_ms=7 \
                 server=api.test:80(127.0.0.1:80) upstream_status=200 retries=1 request_id=id \
                 trace_id=00000000000000000000000000000001 sample_rate=0.25 incomplete"
            )
        );
    }

    #[test]
    fn texts_of_clients_cannot_change_how_a_record_is_shown() {
        let record = AccessRecord { path: "/a\u{202e}", model: Some("m\u{9b}"), request_id: "\u{2066}id", ..SUCCESS };
        let written = |format: &AccessFormat| {
            let mut out = b"\xe2\x80\xae".to_vec();
            record.write(format, &mut out);
            String::from_utf8(out).unwrap()
        };
        let json = written(&AccessFormat::Json(FieldSet::DEFAULT));
        let text = written(&AccessFormat::Text);
        let value: serde_json::Value = serde_json::from_str(json.strip_prefix('\u{202e}').unwrap()).unwrap();
        for (key, expected) in [("path", record.path), ("model", "m\u{9b}"), ("request_id", record.request_id)] {
            assert_eq!(value[key], expected);
        }
        assert!(json[3..].is_ascii() && text[3..].is_ascii(), "{json}\n{text}");
        assert!(
            text.contains(" /a%E2%80%AE ") && text.contains(" model=m_ ") && text.contains("=%E2%81%A6id"),
            "{text}"
        );
    }

    #[test]
    fn json_values_are_exact_and_escaped() {
        let mut text = Vec::new();
        let mut json = JsonObject::start(&mut text);
        json.decimal::<3>(key!("zero"), 0);
        json.decimal::<3>(key!("one"), 1);
        json.decimal::<3>(key!("whole"), 7_000);
        json.decimal::<6>(key!("trailing"), 10_250_500);
        json.id(key!("id"), u128::MAX - 0xf0);
        json.text(text_key!("text"), "a \"quote\", a \\, a\nline and \u{e9}");
        json.array(key!("none"), &[], |_, _: &u8| unreachable!());
        json.end();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "{\"zero\":0.0,\"one\":0.001,\"whole\":7.0,\"trailing\":10.2505,\"id\":\"ffffffffffffffffffffffffffffff0f\",\
             \"text\":\"a \\\"quote\\\", a \\\\, a\\nline and \u{e9}\",\"none\":[]}"
        );
    }

    #[test]
    fn only_whole_responses_without_error_and_denial_may_be_left_out() {
        let ok = SUCCESS;
        let decision = |shadow_denied: &[&str]| DecisionInfo {
            decision: "allowed",
            decided_by: None,
            effective_limit: None,
            duration: Duration::ZERO,
            decided_at: None,
            shadow_denied: shadow_denied.iter().map(|limit| (*limit).into()).collect(),
            limits: Vec::new(),
            start_offset: Duration::ZERO,
        };
        let allowed = decision(&[]);
        let shadow_denied = decision(&["trial"]);
        for (record, expected) in [
            (ok, true),
            (AccessRecord { status: 399, decision: Some(&allowed), ..ok }, true),
            (AccessRecord { status: 204, outcome: "preflight", ..ok }, true),
            (AccessRecord { status: 400, ..ok }, false),
            (AccessRecord { complete: false, ..ok }, false),
            (AccessRecord { decision: Some(&shadow_denied), ..ok }, false),
            // gRPC responses have the HTTP status 200 even if the request was denied.
            (AccessRecord { outcome: "rate-limited", ..ok }, false),
        ] {
            assert_eq!(record.is_success(), expected, "{record:?}");
        }
    }

    #[test]
    fn sampled_records_are_the_share_at_any_time() {
        for rate in [0.000_1, 0.001, 0.01, 0.1, 1.0 / 3.0, 0.5, 0.999] {
            let sampler = Sampler { rate, counter: AtomicU64::new(0) };
            let mut written = 0_u32;
            for requests in 1..=20_000 {
                written += u32::from(sampler.picks_next());
                let due = f64::from(requests) * rate;
                assert!((f64::from(written) - due).abs() <= 4.0, "{rate}: {written} of {requests}, due {due:.1}");
            }
        }
    }

    #[test]
    fn dropped_items_are_counted_and_the_rest_is_delivered_in_order() {
        let (release, held) = mpsc::channel::<()>();
        let (sink, delivered) = mpsc::channel();
        let config = BatchConfig { name: "test", delay: Duration::ZERO, capacity: 3 };
        let writer = BatchWriter::start(config, move |batch: &mut Vec<u32>| {
            sink.send(batch.clone()).unwrap();
            held.recv().unwrap();
            u64::from(batch.contains(&0))
        });
        let writer = writer.unwrap();
        writer.push(|items| items.push(0));
        assert_eq!(delivered.recv().unwrap(), [0], "the first batch is being delivered, so the next items are queued");
        (1..=5).for_each(|item| writer.push(|items| items.push(item)));
        assert_eq!(writer.dropped(), 2, "of five items, two exceed the capacity of three");
        release.send(()).unwrap();
        assert_eq!(delivered.recv().unwrap(), [1, 2, 3]);
        release.send(()).unwrap();
        writer.flush(Duration::from_secs(20));
        assert_eq!(writer.dropped(), 3, "the count includes the item that `deliver` could not deliver");
    }
}
