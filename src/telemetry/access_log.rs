//! The access log: a line for each request, written in batches by a thread of its own.

use std::cell::RefCell;
use std::io;
use std::io::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, Method};
use jiff::Timestamp;
use serde::{Serialize, Serializer};
use tracing::warn;

use crate::limiter::clock::unix_us;
use crate::telemetry::batch_writer::{BatchConfig, BatchWriter};
use crate::telemetry::log::LogFormat;
use crate::telemetry::trace;
use crate::telemetry::trace::{TraceContext, TraceExporter, TraceParent};

/// A batch in so long, and bytes that may wait.
const BATCH_CONFIG: BatchConfig =
    BatchConfig { name: "access log", delay: Duration::from_millis(5), capacity: 8 << 20 };

/// Status of a request that the client closed before the response, as nginx logs it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// At the end, for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// One request. Never holds a key, a token or a query. docs/operating.md says what each field is: it is read by programs.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct AccessRecord<'a> {
    /// When it came, µs since the Unix epoch.
    #[serde(serialize_with = "seconds")]
    pub time: u64,
    pub client: IpAddr,
    pub method: &'a str,
    pub path: &'a str,
    pub status: u16,
    /// Bytes of the response body.
    pub bytes: u64,
    /// Whether the whole body went out.
    pub complete: bool,
    /// From the request to the end of its response.
    #[serde(serialize_with = "milliseconds")]
    pub duration_ms: Duration,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<&'a str>,
    /// How it ended: `ok`, `rate-limited`, …
    pub outcome: &'a str,
    #[serde(flatten)]
    pub decision: Option<&'a DecisionInfo>,
    #[serde(flatten)]
    pub upstream: Option<&'a UpstreamInfo>,
    pub request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "trace_id")]
    pub trace_id: Option<u128>,
}

/// What the limits of a request said.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct DecisionInfo {
    /// Of the limit that had most to do with it.
    pub decision: &'static str,
    /// Who decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<&'static str>,
    /// The binding limit: one that denies the request, or the one that is nearest to it.
    #[serde(flatten)]
    pub effective_limit: Option<EffectiveLimit>,
    #[serde(rename = "decision_ms", serialize_with = "milliseconds")]
    pub duration: Duration,
    /// When the limits were asked, by the clock of whoever decided, µs since the Unix epoch. `replay` decides at the same instants.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "seconds_if_any")]
    pub decided_at: Option<u64>,
    /// Limits on trial that would have denied it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shadow_denied: Vec<Box<str>>,
    pub limits: Vec<LimitInfo>,
    /// From the request on.
    #[serde(skip)]
    pub start_offset: Duration,
}

/// The standing of the binding limit.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct EffectiveLimit {
    pub limit: Box<str>,
    pub remaining: u64,
    #[serde(serialize_with = "hex")]
    pub identity: u128,
}

/// One limit and one request.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct LimitInfo {
    pub limit: Box<str>,
    /// The keyed hash of who asked.
    #[serde(serialize_with = "hex")]
    pub identity: u128,
    pub cost: u64,
    /// None if another limit denied the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<u64>,
    /// Which of the route's limits.
    #[serde(skip)]
    pub limit_index: usize,
}

/// What came of sending a request on.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct UpstreamInfo {
    pub upstream: Box<str>,
    /// The last one that it was tried at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<Box<str>>,
    /// Of its response; none if none came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_status: Option<u16>,
    /// To the head of the response.
    #[serde(rename = "upstream_ms", serialize_with = "milliseconds")]
    pub duration: Duration,
    /// How often it was sent again.
    #[serde(skip_serializing_if = "is_zero")]
    pub retries: u64,
    /// From the request on.
    #[serde(skip)]
    pub start_offset: Duration,
}

/// Where lines go. Clones share it.
#[derive(Debug, Clone)]
pub struct AccessLog {
    writer: BatchWriter<u8>,
    format: LogFormat,
}

impl AccessLog {
    /// Starts the writing thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(format: LogFormat, mut out: Box<dyn Write + Send>) -> io::Result<Self> {
        let writer = BatchWriter::start(BATCH_CONFIG, move |batch: &mut Vec<u8>| {
            let Err(error) = out.write_all(batch).and_then(|()| out.flush()) else { return 0 };
            warn!(%error, "the access log cannot be written");
            batch.iter().filter(|byte| **byte == b'\n').count() as u64
        })?;
        Ok(AccessLog { writer, format })
    }

    /// Adds a line.
    pub fn write(&self, record: &AccessRecord<'_>) {
        thread_local! {
            // Made before the lock that workers share is taken.
            static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        TEXT.with_borrow_mut(|text| {
            text.clear();
            // Writing to memory does not fail.
            let _ = match self.format {
                LogFormat::Json => serde_json::to_writer(&mut *text, record).map_err(io::Error::from),
                LogFormat::Text => record.write_text(text),
            };
            text.push(b'\n');
            self.writer.push(|pending| pending.extend_from_slice(text));
        });
    }

    /// Lines that were not written.
    pub fn dropped(&self) -> u64 {
        self.writer.dropped()
    }

    /// Waits until all lines so far are written.
    pub fn flush(&self) {
        self.writer.flush(FLUSH_TIMEOUT);
    }
}

impl AccessRecord<'_> {
    fn write_text(&self, out: &mut Vec<u8>) -> io::Result<()> {
        let AccessRecord { client, method, path, status, bytes, outcome, request_id, .. } = self;
        // Times of the next 290,000 years are valid.
        let time = Timestamp::from_microsecond(self.time as i64).unwrap_or_default();
        let route = self.route.unwrap_or("-");
        write!(
            out,
            "{time:.6} {client} {method} {path} {status} {bytes} {}ms route={route} {outcome}",
            to_milliseconds(self.duration_ms)
        )?;
        if let Some(DecisionInfo { decision, decided_by, effective_limit, duration, shadow_denied, .. }) = self.decision
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
        if !self.complete {
            write!(out, " incomplete")?;
        }
        Ok(())
    }
}

/// To the µs.
fn to_milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

fn milliseconds<S: Serializer>(time: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(to_milliseconds(*time))
}

/// A double holds µs until the year 2255.
fn seconds<S: Serializer>(us: &u64, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(*us as f64 / 1e6)
}

fn seconds_if_any<S: Serializer>(us: &Option<u64>, out: S) -> Result<S::Ok, S::Error> {
    us.map(|us| us as f64 / 1e6).serialize(out)
}

fn hex<S: Serializer>(id: &u128, out: S) -> Result<S::Ok, S::Error> {
    out.collect_str(&format_args!("{id:032x}"))
}

fn trace_id<S: Serializer>(id: &Option<u128>, out: S) -> Result<S::Ok, S::Error> {
    // The field is left out where there is none.
    hex(&id.unwrap_or_default(), out)
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

// One record for each request, closed when its response body is over: its line in the access log, and its spans.

/// Where records go.
#[derive(Debug, Clone, Default)]
pub struct TelemetrySinks {
    /// A line for each request.
    pub access_log: Option<AccessLog>,
    /// Spans of those that are traced.
    pub trace_exporter: Option<TraceExporter>,
}

/// A request as it comes.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RequestStart<'a> {
    pub instant: Instant,
    /// The other end of its connection, and what was spoken on it.
    pub peer: IpAddr,
    pub scheme: &'static str,
    pub method: &'a Method,
    pub path: &'a str,
    pub headers: &'a HeaderMap,
}

/// What is known of a request so far.
#[derive(Debug)]
pub struct RequestRecord {
    sinks: Arc<TelemetrySinks>,
    started_at: Instant,
    peer: IpAddr,
    scheme: &'static str,
    method: Method,
    path: Box<str>,
    /// Status of the response.
    pub status: u16,
    /// How the request ended: `ok`, `rate-limited`, …
    pub outcome: &'static str,
    /// The trace that it is a part of, whether or not it is recorded here.
    trace_id: Option<u128>,
    /// The client's address; the peer's until the route is known.
    pub client: IpAddr,
    /// The route that it took.
    pub route: Option<Arc<str>>,
    /// The path of that, as configured; only in traces.
    pub path_template: Option<Box<str>>,
    /// What its limits said.
    pub decision: Option<DecisionInfo>,
    /// What came of sending it on.
    pub upstream: Option<UpstreamInfo>,
    /// What of its trace is recorded.
    pub trace: Option<TraceContext>,
    /// Given to the upstream as well.
    pub request_id: Box<str>,
}

impl TelemetrySinks {
    /// Waits until all so far is written.
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
    /// Opens the record of a request; none if nobody wants it.
    pub fn start(sinks: &Arc<TelemetrySinks>, start: &RequestStart<'_>) -> Option<Box<Self>> {
        if sinks.access_log.is_none() && sinks.trace_exporter.is_none() {
            return None;
        }
        let parent = TraceParent::from_headers(start.headers);
        let trace = sinks.trace_exporter.as_ref().and_then(|_| TraceContext::from_parent(parent));
        if sinks.access_log.is_none() && trace.is_none() {
            return None;
        }
        Some(Box::new(RequestRecord {
            sinks: sinks.clone(),
            started_at: start.instant,
            peer: start.peer,
            scheme: start.scheme,
            method: start.method.clone(),
            path: start.path.into(),
            status: 0,
            outcome: "ok",
            trace_id: trace.map(|trace| trace.trace_id).or(parent.map(|parent| parent.trace_id)),
            client: start.peer,
            route: None,
            path_template: None,
            decision: None,
            upstream: None,
            trace,
            request_id: "-".into(),
        }))
    }

    /// How long after the request something was.
    pub fn offset_of(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.started_at)
    }

    /// Write the record of a request whose client closed the connection or stream before the response.
    pub fn write_aborted(mut self: Box<Self>) {
        self.status = CLIENT_CLOSED_REQUEST;
        self.outcome = "client-aborted";
        self.write(0, false);
    }

    /// Write the record to the access log, and its spans. `bytes_sent` bytes of the response body were sent; `complete`
    /// says whether that is the whole body.
    pub fn write(self: Box<Self>, bytes_sent: u64, complete: bool) {
        let took = self.started_at.elapsed();
        let line = AccessRecord {
            time: unix_us().saturating_sub(took.as_micros() as u64),
            client: self.client,
            method: self.method.as_str(),
            path: &self.path,
            status: self.status,
            bytes: bytes_sent,
            complete: complete || self.method == Method::HEAD,
            duration_ms: took,
            route: self.route.as_deref(),
            outcome: self.outcome,
            decision: self.decision.as_ref(),
            upstream: self.upstream.as_ref(),
            request_id: &self.request_id,
            trace_id: self.trace_id,
        };
        if let Some(access) = &self.sinks.access_log {
            access.write(&line);
        }
        if let (Some(spans), Some(trace)) = (&self.sinks.trace_exporter, &self.trace) {
            let (template, scheme, peer) = (self.path_template.as_deref(), self.scheme, self.peer);
            spans.record(&trace::RequestTrace { trace, record: &line, path_template: template, scheme, peer });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What programs read must not change by accident.
    #[test]
    fn access_record_formats() {
        let judged = |limit: &str, decision, remaining| LimitInfo {
            limit: limit.into(),
            identity: 0xabc,
            cost: 2,
            decision,
            remaining,
            limit_index: 0,
        };
        let decided = DecisionInfo {
            decision: "denied",
            decided_by: Some("store"),
            effective_limit: Some(EffectiveLimit { limit: "hour".into(), remaining: 0, identity: 0xabc }),
            duration: Duration::from_micros(1_250),
            decided_at: Some(1_764_000_000_123_500),
            shadow_denied: vec!["trial".into()],
            limits: vec![judged("hour", Some("denied"), Some(0)), judged("day", None, None)],
            start_offset: Duration::ZERO,
        };
        let sent = UpstreamInfo {
            upstream: "api".into(),
            server: Some("api.test:80 (127.0.0.1:80)".into()),
            upstream_status: Some(200),
            duration: Duration::from_millis(7),
            retries: 1,
            start_offset: Duration::ZERO,
        };
        let line = AccessRecord {
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
            decision: Some(&decided),
            upstream: Some(&sent),
            request_id: "id",
            trace_id: Some(1),
        };
        let hash = "00000000000000000000000000000abc";
        assert_eq!(
            serde_json::to_string(&line).unwrap(),
            format!(
                "{{\"time\":1764000000.123456,\"client\":\"127.0.0.1\",\"method\":\"GET\",\"path\":\"/a\",\"status\":429,\"bytes\":3,\
                 \"complete\":false,\"duration_ms\":12.345,\"route\":\"a\",\"outcome\":\"rate-limited\",\"decision\":\"denied\",\
                 \"decided_by\":\"store\",\"limit\":\"hour\",\"remaining\":0,\"identity\":\"{hash}\",\"decision_ms\":1.25,\
                 \"decided_at\":1764000000.1235,\"shadow_denied\":[\"trial\"],\"limits\":[{{\"limit\":\"hour\",\"identity\":\"{hash}\",\"cost\":2,\
                 \"decision\":\"denied\",\"remaining\":0}},{{\"limit\":\"day\",\"identity\":\"{hash}\",\"cost\":2}}],\
                 \"upstream\":\"api\",\"server\":\"api.test:80 (127.0.0.1:80)\",\"upstream_status\":200,\"upstream_ms\":7.0,\
                 \"retries\":1,\"request_id\":\"id\",\"trace_id\":\"00000000000000000000000000000001\"}}"
            )
        );
        let mut text = Vec::new();
        line.write_text(&mut text).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            format!(
                "2025-11-24T16:00:00.123456Z 127.0.0.1 GET /a 429 3 12.345ms route=a rate-limited decision=denied limit=hour remaining=0 \
                 identity={hash} decided_by=store shadow_denied=trial decision_ms=1.25 upstream=api upstream_ms=7 \
                 server=api.test:80(127.0.0.1:80) upstream_status=200 retries=1 request_id=id \
                 trace_id=00000000000000000000000000000001 incomplete"
            )
        );
    }
}
