//! Spans of requests, in the words of OpenTelemetry's semantic conventions for HTTP
//! (<https://opentelemetry.io/docs/specs/semconv/http/http-spans/>), handed to an exporter in batches.

use std::io;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::access::{Decided, Line, Sent};
use super::outbox::{Outbox, Terms};
use super::trace::Trace;

/// A batch in so long, and spans that may wait: some megabytes.
const TERMS: Terms = Terms { name: "trace exporter", pause: Duration::from_millis(500), most: 16_384 };

/// At the end, for the last spans.
const LAST: Duration = Duration::from_secs(2);

/// Who says all this.
static SCOPE: LazyLock<InstrumentationScope> =
    LazyLock::new(|| InstrumentationScope::builder("sluicegate").with_version(env!("CARGO_PKG_VERSION")).build());

/// Where spans go. Clones share it.
#[derive(Debug, Clone)]
pub struct Spans(Outbox<SpanData>);

/// What a trace says of a request beyond its line in the access log.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Request<'a> {
    pub trace: &'a Trace,
    pub line: &'a Line<'a>,
    /// The path of its route, as configured.
    pub template: Option<&'a str>,
    pub scheme: &'static str,
    /// The other end of its connection.
    pub peer: IpAddr,
}

impl Spans {
    /// Starts the exporting thread; `export` says how many spans were lost.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(mut export: impl FnMut(Vec<SpanData>) -> u64 + Send + 'static) -> io::Result<Self> {
        Outbox::start(TERMS, move |batch: &mut Vec<SpanData>| export(batch.split_off(0))).map(Spans)
    }

    /// Adds those of a request.
    pub fn record(&self, request: &Request<'_>) {
        let spans = [
            Some(request.span()),
            request.line.decided.map(|decided| request.decision(decided)),
            request.line.sent.map(|sent| request.upstream(sent)),
        ];
        for span in spans.into_iter().flatten() {
            self.0.put(|spans| spans.push(span));
        }
    }

    /// Spans that were not exported.
    pub fn lost(&self) -> u64 {
        self.0.lost()
    }

    /// Waits until all spans so far are exported.
    pub fn flush(&self) {
        self.0.flush(LAST);
    }
}

impl Request<'_> {
    /// From the request to the end of its response.
    fn span(&self) -> SpanData {
        let Line { method, path, status, client, outcome, request_id, .. } = *self.line;
        let mut attributes = vec![
            text("http.request.method", method),
            KeyValue::new("http.response.status_code", i64::from(status)),
            text("url.scheme", self.scheme),
            text("url.path", path),
            text("client.address", &client.to_string()),
            text("network.peer.address", &self.peer.to_string()),
            text("sluicegate.outcome", outcome),
            text("sluicegate.request_id", request_id),
        ];
        attributes.extend(self.template.map(|template| text("http.route", template)));
        attributes.extend(self.line.route.map(|route| text("sluicegate.route", route)));
        // To a server what its client does wrong is no error.
        let error = (status >= 500).then(|| if outcome == "ok" { status.to_string() } else { outcome.to_owned() });
        let name = self.template.map_or_else(|| method.to_owned(), |template| format!("{method} {template}"));
        let ids = (self.trace.request, self.trace.parent);
        self.data(ids, SpanKind::Server, name, (Duration::ZERO, self.line.duration_ms), attributes, error.as_deref())
    }

    /// What its limits took.
    fn decision(&self, decided: &Decided) -> SpanData {
        let mut attributes = vec![text("sluicegate.decision", decided.decision)];
        attributes.extend(decided.decided_by.map(|source| text("sluicegate.decided_by", source)));
        if let Some(binding) = &decided.binding {
            attributes.push(text("sluicegate.limit", &binding.limit));
            attributes.push(KeyValue::new("sluicegate.remaining", binding.remaining as i64));
        }
        let error = (decided.decision == "store_error").then_some("store_error");
        let ids = (self.trace.decision, Some(self.trace.request));
        self.data(
            ids,
            SpanKind::Internal,
            "rate_limit_check".to_owned(),
            (decided.began, decided.took),
            attributes,
            error,
        )
    }

    /// What the upstream took to the head of its response.
    fn upstream(&self, sent: &Sent) -> SpanData {
        let mut attributes =
            vec![text("http.request.method", self.line.method), text("sluicegate.upstream", &sent.upstream)];
        if let Some(server) = &sent.server {
            let authority = server.split(' ').next().unwrap_or_default();
            let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
            attributes.push(text("server.address", host.trim_matches(['[', ']'])));
            attributes.extend(port.parse().ok().map(|port: i64| KeyValue::new("server.port", port)));
        }
        if sent.retries > 0 {
            attributes.push(KeyValue::new("http.request.resend_count", sent.retries as i64));
        }
        attributes
            .extend(sent.upstream_status.map(|status| KeyValue::new("http.response.status_code", i64::from(status))));
        let error = match sent.upstream_status {
            Some(status) => (status >= 400).then(|| status.to_string()),
            None => Some(self.line.outcome.to_owned()),
        };
        let ids = (self.trace.upstream, Some(self.trace.request));
        let name = self.line.method.to_owned();
        self.data(ids, SpanKind::Client, name, (sent.began, sent.took), attributes, error.as_deref())
    }

    fn data(
        &self,
        (id, parent): (u64, Option<u64>),
        span_kind: SpanKind,
        name: String,
        (began, took): (Duration, Duration),
        mut attributes: Vec<KeyValue>,
        error: Option<&str>,
    ) -> SpanData {
        attributes.extend(error.map(|kind| text("error.type", kind)));
        let context = (TraceId::from(self.trace.id), SpanId::from(id), TraceFlags::SAMPLED);
        let start_time: SystemTime = UNIX_EPOCH + Duration::from_micros(self.line.time) + began;
        SpanData {
            span_context: SpanContext::new(context.0, context.1, context.2, false, TraceState::NONE),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanId::from),
            parent_span_is_remote: span_kind == SpanKind::Server && parent.is_some(),
            span_kind,
            name: name.into(),
            start_time,
            end_time: start_time + took,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: error.map_or(Status::Unset, |_| Status::error("")),
            instrumentation_scope: SCOPE.clone(),
        }
    }
}

fn text(key: &'static str, value: &str) -> KeyValue {
    KeyValue::new(key, Value::from(value.to_owned()))
}
