//! W3C Trace Context (<https://www.w3.org/TR/trace-context/>) and the spans of a request.

use std::io;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use uuid::Uuid;

use crate::http::text::{Escape, escape_deceptive};
use crate::payload::llm::provider::Operation;
use crate::payload::llm::usage::TokenUsage;
use crate::telemetry::access_log::{AccessRecord, BatchConfig, BatchWriter, DecisionInfo, UpstreamInfo};

/// The header `traceparent` (W3C Trace Context, section 3.2).
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The header `tracestate` (W3C Trace Context, section 3.3).
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Length in bytes of a `traceparent` header of version 00: version, trace id, parent id and flags in hexadecimal,
/// separated by hyphens.
const TRACEPARENT_LENGTH: usize = 55;

/// The `traceparent` header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// Id of the trace.
    pub trace_id: u128,
    /// Id of the caller's span.
    pub span_id: u64,
    /// Whether the caller records the trace (the flag `sampled`).
    pub is_sampled: bool,
}

impl TraceParent {
    /// Parse the `traceparent` header. Return `None` if the header is absent, invalid (section 3.2.2) or present more
    /// than once.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(&TRACEPARENT).iter();
        let only = values.next()?;
        let extra = values.next();
        TraceParent::parse(only.as_bytes()).filter(|_| extra.is_none())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (fixed, extra) = text.split_at_checked(TRACEPARENT_LENGTH)?;
        // In later versions of the format, additional data may follow after a hyphen. Version ff is invalid (section
        // 3.2.2.1).
        let version = parse_hex(&fixed[..2])?;
        if version == 0xff || (version == 0 && !extra.is_empty()) || extra.first().is_some_and(|byte| *byte != b'-') {
            return None;
        }
        if [2, 35, 52].iter().any(|index| fixed[*index] != b'-') {
            return None;
        }
        let trace_id = parse_hex(&fixed[3..35])?;
        let span_id = parse_hex(&fixed[36..52])? as u64;
        let flags = parse_hex(&fixed[53..])?;
        (trace_id != 0 && span_id != 0).then_some(TraceParent { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }
}

/// Parse lowercase hexadecimal digits. Uppercase digits are invalid (section 3.2.2.3).
fn parse_hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// Ids of the spans that the gateway records for a request: a server span, and two child spans for the rate limit check
/// and for the upstream request.
#[derive(Debug, Clone, Copy)]
pub struct TraceContext {
    /// Id of the trace.
    pub trace_id: u128,
    /// Id of the caller's span, if the request had a valid `traceparent`.
    pub parent_span_id: Option<u64>,
    /// Id of the server span, which covers the whole request.
    pub request_span_id: u64,
    /// Id of the rate limit check span.
    pub decision_span_id: u64,
    /// Id of the client span, which covers the upstream request. It is the parent of the spans that the upstream
    /// records.
    pub upstream_span_id: u64,
}

impl TraceContext {
    /// Continue the caller's trace, or start a new one.
    fn from_parent(parent: Option<TraceParent>) -> Self {
        // An id must not be 0. Neither half of a version 4 UUID is 0, because each half has bits that are always set.
        let (request_span_id, decision_span_id) = Uuid::new_v4().as_u64_pair();
        let (upstream_span_id, _) = Uuid::new_v4().as_u64_pair();
        let trace_id = parent.map_or_else(|| Uuid::new_v4().as_u128(), |parent| parent.trace_id);
        TraceContext {
            trace_id,
            parent_span_id: parent.map(|parent| parent.span_id),
            request_span_id,
            decision_span_id,
            upstream_span_id,
        }
    }

    /// Set the header `traceparent` for the upstream.
    pub fn inject(&self, headers: &mut HeaderMap) {
        let text = format!("00-{:032x}-{:016x}-01", self.trace_id, self.upstream_span_id);
        // The conversion cannot fail, because the value consists of hexadecimal digits and hyphens.
        if let Ok(value) = HeaderValue::from_str(&text) {
            headers.insert(TRACEPARENT, value);
        }
        if self.parent_span_id.is_none() {
            // If `traceparent` is missing or invalid, `tracestate` must not be forwarded (section 3.3).
            headers.remove(TRACESTATE);
        }
    }
}

// === Spans, with the attributes of the OpenTelemetry semantic conventions for HTTP ===
// The span attributes follow <https://opentelemetry.io/docs/specs/semconv/http/http-spans/>.

/// Settings of the exporter thread: the delay of a batch, and the maximum number of queued spans. A full queue takes
/// several megabytes of memory.
const BATCH_CONFIG: BatchConfig =
    BatchConfig { name: "trace exporter", delay: Duration::from_millis(500), capacity: 16_384 };

/// Maximum time to export the last spans at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The OpenTelemetry instrumentation scope of all spans.
static INSTRUMENTATION_SCOPE: LazyLock<InstrumentationScope> =
    LazyLock::new(|| InstrumentationScope::builder("sluicegate").with_version(env!("CARGO_PKG_VERSION")).build());

/// Queue of spans for the thread that exports them. Clones share the queue.
#[derive(Debug, Clone)]
pub struct TraceExporter {
    writer: BatchWriter<SpanData>,
    /// Share of the traces to record that start at the gateway.
    sample: f64,
}

/// The data of a request's spans: its access log record, and values that the record does not contain.
#[derive(Debug)]
pub struct RequestTrace<'a> {
    /// Ids of the trace and of its spans.
    pub trace: &'a TraceContext,
    /// The access log record.
    pub record: &'a AccessRecord<'a>,
    /// Path pattern of the route, as configured.
    pub path_template: Option<&'a str>,
    /// Service and method of a gRPC call that the gateway answers itself, such as `package.Service/Method`.
    pub rpc_method: Option<&'static str>,
    /// Operation of an LLM request, if a limit counts its tokens.
    pub operation: Option<&'static Operation>,
    /// Model that has generated the response of an LLM API.
    pub response_model: Option<&'a str>,
    /// `http` or `https`.
    pub scheme: &'static str,
    /// IP address of the peer of the connection.
    pub peer: IpAddr,
}

impl TraceExporter {
    /// Start the exporter thread. `sample` is the share of the traces to record that start at the gateway. `export` returns
    /// the number of spans that it lost.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(sample: f64, mut export: impl FnMut(Vec<SpanData>) -> u64 + Send + 'static) -> io::Result<Self> {
        let export = move |batch: &mut Vec<SpanData>| export(batch.split_off(0));
        Ok(TraceExporter { writer: BatchWriter::start(BATCH_CONFIG, export)?, sample })
    }

    /// Return the ids of a request's spans. Return `None` if the caller's trace is not sampled, or if no caller has started
    /// a trace and the sample does not contain it.
    pub fn context(&self, parent: Option<TraceParent>) -> Option<TraceContext> {
        match parent {
            Some(parent) => parent.is_sampled.then(|| TraceContext::from_parent(Some(parent))),
            None => {
                let context = TraceContext::from_parent(None);
                // The last 62 bits of a version 4 UUID are random.
                let position = (context.trace_id as u64 & ((1 << 62) - 1)) as f64 / (1_u64 << 62) as f64;
                (position < self.sample).then_some(context)
            }
        }
    }

    /// Queue the spans of a request.
    pub fn record(&self, request: &RequestTrace<'_>) {
        let spans = [
            Some(request.server_span()),
            request.record.decision.map(|decision| request.decision_span(decision)),
            request.record.upstream.map(|upstream| request.upstream_span(upstream)),
        ];
        for span in spans.into_iter().flatten() {
            self.writer.push(|spans| spans.push(span));
        }
    }

    /// Return the number of lost spans.
    pub fn dropped(&self) -> u64 {
        self.writer.dropped()
    }

    /// Wait until the queued spans are exported, at most 2 s.
    pub fn flush(&self) {
        self.writer.flush(FLUSH_TIMEOUT);
    }
}

/// What differs between the spans of a request.
struct SpanParts {
    id: u64,
    parent: Option<u64>,
    kind: SpanKind,
    name: String,
    /// Start of the span, after the start of the request.
    start_offset: Duration,
    duration: Duration,
}

impl RequestTrace<'_> {
    /// Return the server span, which lasts from the start of the request to the end of its response.
    fn server_span(&self) -> SpanData {
        let AccessRecord { method, path, status, client, outcome, request_id, .. } = *self.record;
        let mut attributes = match self.rpc_method.and_then(|name| name.split_once('/')) {
            // The status is that of the response to the client of the proxy that calls, not that of the call.
            Some((service, method)) => vec![
                KeyValue::new("rpc.system", "grpc"),
                KeyValue::new("rpc.service", service),
                KeyValue::new("rpc.method", method),
                KeyValue::new("rpc.grpc.status_code", 0),
                string_attribute("sluicegate.domain", self.record.host.unwrap_or_default()),
            ],
            None => vec![
                string_attribute("http.request.method", method),
                KeyValue::new("http.response.status_code", i64::from(status)),
                string_attribute("url.scheme", self.scheme),
                string_attribute("url.path", path),
                string_attribute("sluicegate.request_id", request_id),
            ],
        };
        attributes.extend([
            string_attribute("client.address", &client.to_string()),
            string_attribute("network.peer.address", &self.peer.to_string()),
            string_attribute("sluicegate.outcome", outcome),
        ]);
        attributes.extend(self.path_template.map(|template| string_attribute("http.route", template)));
        attributes.extend(self.record.route.map(|route| string_attribute("sluicegate.route", route)));
        if let Some(operation) = self.operation {
            attributes.extend(operation.semantic_name().map(|name| string_attribute("gen_ai.operation.name", name)));
            attributes.push(string_attribute("gen_ai.provider.name", operation.provider.semantic_name()));
        }
        attributes.extend(self.record.model.map(|model| string_attribute("gen_ai.request.model", model)));
        attributes.extend(self.response_model.map(|model| string_attribute("gen_ai.response.model", model)));
        attributes.extend(self.record.tokens.into_iter().flat_map(token_attributes));
        // For a server span, a 4xx status does not count as an error (OpenTelemetry semantic conventions).
        let error = (status >= 500).then(|| if outcome == "ok" { status.to_string() } else { outcome.to_owned() });
        let name = match (self.rpc_method, self.path_template) {
            (Some(name), _) => name.to_owned(),
            (None, Some(template)) => format!("{method} {template}"),
            (None, None) => method.to_owned(),
        };
        let span = SpanParts {
            id: self.trace.request_span_id,
            parent: self.trace.parent_span_id,
            kind: SpanKind::Server,
            name,
            start_offset: Duration::ZERO,
            duration: self.record.duration_ms,
        };
        self.build_span(span, attributes, error.as_deref())
    }

    /// Return the internal span that covers the rate limit check.
    fn decision_span(&self, decision: &DecisionInfo) -> SpanData {
        let mut attributes = vec![string_attribute("sluicegate.decision", decision.decision)];
        attributes.extend(decision.decided_by.map(|decided_by| string_attribute("sluicegate.decided_by", decided_by)));
        if let Some(effective_limit) = &decision.effective_limit {
            attributes.push(string_attribute("sluicegate.limit", &effective_limit.limit));
            attributes.push(KeyValue::new("sluicegate.remaining", effective_limit.remaining as i64));
        }
        let error = (decision.decision == "store_error").then_some("store_error");
        let span = SpanParts {
            id: self.trace.decision_span_id,
            parent: Some(self.trace.request_span_id),
            kind: SpanKind::Internal,
            name: "rate_limit_check".to_owned(),
            start_offset: decision.start_offset,
            duration: decision.duration,
        };
        self.build_span(span, attributes, error)
    }

    /// Return the client span, which lasts from the upstream request to its response headers.
    fn upstream_span(&self, upstream: &UpstreamInfo) -> SpanData {
        let mut attributes = vec![
            string_attribute("http.request.method", self.record.method),
            string_attribute("sluicegate.upstream", &upstream.upstream),
        ];
        if let Some(server) = &upstream.server {
            let authority = server.split(' ').next().unwrap_or_default();
            let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
            attributes.push(string_attribute("server.address", host.trim_matches(['[', ']'])));
            attributes.extend(port.parse().ok().map(|port: i64| KeyValue::new("server.port", port)));
        }
        if upstream.retries > 0 {
            attributes.push(KeyValue::new("http.request.resend_count", upstream.retries as i64));
        }
        attributes.extend(
            upstream.upstream_status.map(|status| KeyValue::new("http.response.status_code", i64::from(status))),
        );
        let error = match upstream.upstream_status {
            Some(status) => (status >= 400).then(|| status.to_string()),
            None => Some(self.record.outcome.to_owned()),
        };
        let span = SpanParts {
            id: self.trace.upstream_span_id,
            parent: Some(self.trace.request_span_id),
            kind: SpanKind::Client,
            name: self.record.method.to_owned(),
            start_offset: upstream.start_offset,
            duration: upstream.duration,
        };
        self.build_span(span, attributes, error.as_deref())
    }

    fn build_span(&self, span: SpanParts, mut attributes: Vec<KeyValue>, error: Option<&str>) -> SpanData {
        let SpanParts { id, parent, kind: span_kind, name, start_offset, duration } = span;
        attributes.extend(error.map(|kind| string_attribute("error.type", kind)));
        let context = (TraceId::from(self.trace.trace_id), SpanId::from(id), TraceFlags::SAMPLED);
        let start_time: SystemTime = UNIX_EPOCH + Duration::from_micros(self.record.time) + start_offset;
        SpanData {
            span_context: SpanContext::new(context.0, context.1, context.2, false, TraceState::NONE),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanId::from),
            parent_span_is_remote: span_kind == SpanKind::Server && parent.is_some(),
            span_kind,
            name: name.into(),
            start_time,
            end_time: start_time + duration,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: error.map_or(Status::Unset, |_| Status::error("")),
            instrumentation_scope: INSTRUMENTATION_SCOPE.clone(),
        }
    }
}

/// Return the attributes of the tokens of an LLM response (OpenTelemetry semantic conventions for generative AI).
fn token_attributes(usage: &TokenUsage) -> impl Iterator<Item = KeyValue> {
    let cache_write = usage.cache_write_5m.saturating_add(usage.cache_write_1h);
    [
        ("gen_ai.usage.input_tokens", Some(usage.input)),
        ("gen_ai.usage.cache_read.input_tokens", Some(usage.cached_input).filter(|tokens| *tokens > 0)),
        ("gen_ai.usage.cache_creation.input_tokens", Some(cache_write).filter(|tokens| *tokens > 0)),
        ("gen_ai.usage.output_tokens", Some(usage.output)),
        ("gen_ai.usage.reasoning.output_tokens", Some(usage.reasoning).filter(|tokens| *tokens > 0)),
    ]
    .into_iter()
    .filter_map(|(name, tokens)| Some(KeyValue::new(name, tokens? as i64)))
}

/// Return an attribute. Deceptive characters of a client are escaped as in the access log.
fn string_attribute(key: &'static str, value: &str) -> KeyValue {
    let mut bytes = value.as_bytes().to_vec();
    escape_deceptive(&mut bytes, 0, Escape::Percent);
    // The escaped text is valid UTF-8, because `value` is.
    KeyValue::new(key, Value::from(String::from_utf8(bytes).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_traceparents_are_parsed() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let expected = TraceParent {
            trace_id: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
            span_id: 0x00f0_67aa_0ba9_02b7,
            is_sampled: true,
        };
        let unsampled = TraceParent { is_sampled: false, ..expected };
        for (text, parent) in [
            (good.to_owned(), Some(expected)),
            (good.replace("-01", "-00"), Some(unsampled)),
            (good.replace("-01", "-ff"), Some(expected)),
            (good.replace("-01", "-02"), Some(unsampled)),
            (good.replacen("00", "cc", 1), Some(expected)),
            (good.replacen("00", "cc", 1) + "-what-comes", Some(expected)),
            (good.replacen("00", "cc", 1) + ".what-comes", None),
            (good.replacen("00", "ff", 1), None),
            (good.to_owned() + "-00", None),
            (good.to_uppercase(), None),
            (good.replace('-', "_"), None),
            (good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)), None),
            (good.replace("00f067aa0ba902b7", &"0".repeat(16)), None),
            (good[..54].to_owned(), None),
            (good.replace("4b", "+1"), None),
            (String::new(), None),
        ] {
            assert_eq!(TraceParent::parse(text.as_bytes()), parent, "{text}");
        }
        let twice: HeaderMap = (0..2).fold(HeaderMap::new(), |mut headers, _| {
            headers.append(
                TRACEPARENT,
                HeaderValue::from_static("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            );
            headers
        });
        assert_eq!(TraceParent::from_headers(&twice), None, "a repeated header is ignored");
    }

    #[test]
    fn sample_decides_about_traces_that_start_here() {
        let exporter = |sample| TraceExporter::start(sample, |_| 0).unwrap();
        let parent = |is_sampled| Some(TraceParent { trace_id: 1, span_id: 2, is_sampled });
        for (sample, range) in [(0.0, 0..=0), (0.25, 2_200..=2_800), (1.0, 10_000..=10_000)] {
            let exporter = exporter(sample);
            let recorded = (0..10_000).filter(|_| exporter.context(None).is_some()).count();
            assert!(range.contains(&recorded), "{sample}: {recorded}");
            assert_eq!(exporter.context(parent(true)).unwrap().trace_id, 1, "{sample}");
            assert!(exporter.context(parent(false)).is_none(), "{sample}");
        }
    }
}
