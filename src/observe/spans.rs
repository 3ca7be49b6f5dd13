//! Spans of requests, in the words of OpenTelemetry's semantic conventions for HTTP
//! (<https://opentelemetry.io/docs/specs/semconv/http/http-spans/>), handed to an exporter in batches.

use std::io;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::access::{AccessRecord, DecisionInfo, UpstreamInfo};
use super::outbox::{BatchConfig, BatchWriter};
use super::trace::TraceContext;

/// A batch in so long, and spans that may wait: some megabytes.
const BATCH_CONFIG: BatchConfig =
    BatchConfig { name: "trace exporter", delay: Duration::from_millis(500), capacity: 16_384 };

/// At the end, for the last spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Who says all this.
static INSTRUMENTATION_SCOPE: LazyLock<InstrumentationScope> =
    LazyLock::new(|| InstrumentationScope::builder("sluicegate").with_version(env!("CARGO_PKG_VERSION")).build());

/// Where spans go. Clones share it.
#[derive(Debug, Clone)]
pub struct TraceExporter(BatchWriter<SpanData>);

/// What a trace says of a request beyond its line in the access log.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RequestTrace<'a> {
    pub trace: &'a TraceContext,
    pub record: &'a AccessRecord<'a>,
    /// The path of its route, as configured.
    pub path_template: Option<&'a str>,
    pub scheme: &'static str,
    /// The other end of its connection.
    pub peer: IpAddr,
}

impl TraceExporter {
    /// Starts the exporting thread; `export` says how many spans were lost.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(mut export: impl FnMut(Vec<SpanData>) -> u64 + Send + 'static) -> io::Result<Self> {
        BatchWriter::start(BATCH_CONFIG, move |batch: &mut Vec<SpanData>| export(batch.split_off(0))).map(TraceExporter)
    }

    /// Adds those of a request.
    pub fn record(&self, request: &RequestTrace<'_>) {
        let spans = [
            Some(request.server_span()),
            request.record.decision.map(|decision| request.decision_span(decision)),
            request.record.upstream.map(|upstream| request.upstream_span(upstream)),
        ];
        for span in spans.into_iter().flatten() {
            self.0.push(|spans| spans.push(span));
        }
    }

    /// Spans that were not exported.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }

    /// Waits until all spans so far are exported.
    pub fn flush(&self) {
        self.0.flush(FLUSH_TIMEOUT);
    }
}

impl RequestTrace<'_> {
    /// From the request to the end of its response.
    fn server_span(&self) -> SpanData {
        let AccessRecord { method, path, status, client, outcome, request_id, .. } = *self.record;
        let mut attributes = vec![
            string_attribute("http.request.method", method),
            KeyValue::new("http.response.status_code", i64::from(status)),
            string_attribute("url.scheme", self.scheme),
            string_attribute("url.path", path),
            string_attribute("client.address", &client.to_string()),
            string_attribute("network.peer.address", &self.peer.to_string()),
            string_attribute("sluicegate.outcome", outcome),
            string_attribute("sluicegate.request_id", request_id),
        ];
        attributes.extend(self.path_template.map(|template| string_attribute("http.route", template)));
        attributes.extend(self.record.route.map(|route| string_attribute("sluicegate.route", route)));
        // To a server what its client does wrong is no error.
        let error = (status >= 500).then(|| if outcome == "ok" { status.to_string() } else { outcome.to_owned() });
        let name = self.path_template.map_or_else(|| method.to_owned(), |template| format!("{method} {template}"));
        let ids = (self.trace.request_span_id, self.trace.parent_span_id);
        self.build_span(
            ids,
            SpanKind::Server,
            name,
            (Duration::ZERO, self.record.duration_ms),
            attributes,
            error.as_deref(),
        )
    }

    /// What its limits took.
    fn decision_span(&self, decision: &DecisionInfo) -> SpanData {
        let mut attributes = vec![string_attribute("sluicegate.decision", decision.decision)];
        attributes.extend(decision.decided_by.map(|decided_by| string_attribute("sluicegate.decided_by", decided_by)));
        if let Some(effective_limit) = &decision.effective_limit {
            attributes.push(string_attribute("sluicegate.limit", &effective_limit.limit));
            attributes.push(KeyValue::new("sluicegate.remaining", effective_limit.remaining as i64));
        }
        let error = (decision.decision == "store_error").then_some("store_error");
        let ids = (self.trace.decision_span_id, Some(self.trace.request_span_id));
        self.build_span(
            ids,
            SpanKind::Internal,
            "rate_limit_check".to_owned(),
            (decision.start_offset, decision.duration),
            attributes,
            error,
        )
    }

    /// What the upstream took to the head of its response.
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
        let ids = (self.trace.upstream_span_id, Some(self.trace.request_span_id));
        let name = self.record.method.to_owned();
        self.build_span(
            ids,
            SpanKind::Client,
            name,
            (upstream.start_offset, upstream.duration),
            attributes,
            error.as_deref(),
        )
    }

    fn build_span(
        &self,
        (id, parent): (u64, Option<u64>),
        span_kind: SpanKind,
        name: String,
        (start_offset, duration): (Duration, Duration),
        mut attributes: Vec<KeyValue>,
        error: Option<&str>,
    ) -> SpanData {
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

fn string_attribute(key: &'static str, value: &str) -> KeyValue {
    KeyValue::new(key, Value::from(value.to_owned()))
}
