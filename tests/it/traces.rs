//! Traces: propagation to upstreams, exported spans, and failing collectors.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::admin_listener::{metric, with_admin};
use crate::support::certificates::{Authority, NOW};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::tls_upstream::{TlsUpstream, server};
use crate::support::upstream::{Seen, Upstream, read_request};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use rustls::version::TLS13;

pub(crate) const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
pub(crate) const PARENT: &str = "00f067aa0ba902b7";

/// A collector that accepts exports until the test sets `refuses`.
pub(crate) struct Collector {
    pub(crate) server: Upstream,
    refuses: Arc<AtomicBool>,
}

impl Collector {
    pub(crate) fn start() -> Collector {
        let refuses = Arc::<AtomicBool>::default();
        let told = refuses.clone();
        let server = Upstream::responding(move |_| {
            let status = if told.load(Ordering::SeqCst) { "503 Full" } else { "200 OK" };
            format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").into_bytes()
        });
        Collector { server, refuses }
    }

    fn log(&self) -> String {
        format!("[log]\naccess = \"off\"\ntrace_endpoint = \"{}\"\n", self.server.url())
    }

    /// Return all spans received so far.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.server.seen.lock().unwrap().iter().flat_map(|seen| spans(seen).1).collect()
    }

    /// Wait until `count` spans of a trace have arrived. Return them.
    pub(crate) fn trace(&self, id: &str, count: usize) -> Vec<Span> {
        let of = || self.spans().into_iter().filter(|span| hex(&span.trace_id) == id).collect::<Vec<_>>();
        eventually("the spans arrive", || of().len() >= count);
        of()
    }
}

/// Return the resource attributes and the spans of an export request.
pub(crate) fn spans(seen: &Seen) -> (BTreeMap<String, String>, Vec<Span>) {
    assert_eq!(seen.target(), "/v1/traces");
    assert_eq!(seen.headers("content-type"), ["application/x-protobuf"]);
    let request = ExportTraceServiceRequest::decode(&*seen.body).unwrap();
    let [resource] = &request.resource_spans[..] else { panic!("{request:?}") };
    let spans = resource.scope_spans.iter().flat_map(|scope| scope.spans.clone());
    (attributes(&resource.resource.as_ref().unwrap().attributes), spans.collect())
}

fn attributes(all: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &KeyValue| match value.value.as_ref().unwrap().value.as_ref().unwrap() {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    all.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_kind(spans: &[Span], kind: SpanKind) -> &Span {
    spans.iter().find(|span| span.kind() == kind).unwrap_or_else(|| panic!("no {kind:?} in {spans:#?}"))
}

/// Assert that a span has these attributes.
pub(crate) fn assert_attributes(span: &Span, expected: &[(&str, &str)]) {
    let said = attributes(&span.attributes);
    for (key, value) in expected {
        assert_eq!(said.get(*key).map(String::as_str), Some(*value), "{key} in {said:#?}");
    }
}

pub(crate) fn traceparent(flags: &str) -> String {
    format!("00-{TRACE}-{PARENT}-{flags}")
}

/// A configuration with a route to `upstream`, a limited route to it, a route to an unreachable upstream, and further
/// settings.
fn config(upstream: &Upstream, rest: &str) -> String {
    with_admin(&format!(
        "{rest}[limit.hour]\nby = \"ip\"\nquota = \"1/hour\"\nalgorithm = \"fixed-window\"\n\
         [upstream.api]\nservers = [\"{}\"]\n[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"up\"\npath = \"/up/{{id}}\"\nupstream = \"api\"\n\
         [[route]]\nname = \"limited\"\npath = \"/limited\"\nupstream = \"api\"\nlimits = [\"hour\"]\n\
         [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n",
        upstream.url()
    ))
}

/// The names are those of the OpenTelemetry semantic conventions for generative AI.
#[test]
fn span_of_an_llm_request_has_its_model_and_tokens() {
    let collector = Collector::start();
    let upstream = Upstream::responding(|_| {
        let body = r#"{"model":"gpt-5-2026-08-07","usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json";
        format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "{}[limit.tokens]\nby = \"ip\"\nquota = \"100000/hour\"\nunit = \"tokens\"\ncost = {{ llm = \"auto\" }}\n\
         [upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"llm\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\nlimits = [\"tokens\"]\n",
        collector.log(),
        upstream.url()
    )));
    let given = traceparent("01");
    let body = br#"{"model":"gpt-5","max_tokens":10}"#;
    let reply = gateway.client().request("POST", "/v1/chat/completions", &[("traceparent", &given)], body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let spans = collector.trace(TRACE, 3);
    assert_attributes(
        of_kind(&spans, SpanKind::Server),
        &[
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", "openai"),
            ("gen_ai.request.model", "gpt-5"),
            ("gen_ai.response.model", "gpt-5-2026-08-07"),
            ("gen_ai.usage.input_tokens", "9"),
            ("gen_ai.usage.cache_read.input_tokens", "4"),
            ("gen_ai.usage.output_tokens", "5"),
        ],
    );
}

#[test]
fn collector_receives_spans_of_request_decision_and_upstream() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    let gateway = Gateway::start(&config(&upstream, &collector.log()));
    let server = upstream.url().trim_start_matches("http://").to_owned();
    let (host, port) = server.split_once(':').unwrap();
    let given = traceparent("01");
    let mut client = gateway.client();
    let headers = [("traceparent", &*given), ("tracestate", "vendor=1")];
    assert_eq!([0, 1].map(|_| client.get_with("/limited?token=planted", &headers).status), [200, 429]);
    let spans = collector.trace(TRACE, 5);
    assert_eq!(spans.len(), 5, "three spans of the first request, two of the denied one: {spans:#?}");
    // `sent` is the client span of the first request. Its parent is the server span, which also has the span of the
    // check as a child.
    let sent = of_kind(&spans, SpanKind::Client);
    let request = spans.iter().find(|span| span.span_id == sent.parent_span_id).unwrap();
    let decision =
        spans.iter().find(|span| span.kind() == SpanKind::Internal && span.parent_span_id == request.span_id);
    let decision = decision.unwrap();
    assert_eq!((request.kind(), &*hex(&request.parent_span_id)), (SpanKind::Server, PARENT));
    assert_eq!((&*request.name, &*decision.name, &*sent.name), ("GET /limited", "rate_limit_check", "GET"));
    assert_attributes(
        request,
        &[
            ("http.request.method", "GET"),
            ("http.response.status_code", "200"),
            ("http.route", "/limited"),
            ("url.path", "/limited"),
            ("url.scheme", "http"),
            ("client.address", "127.0.0.1"),
            ("network.peer.address", "127.0.0.1"),
            ("sluicegate.route", "limited"),
        ],
    );
    assert_attributes(
        decision,
        &[("sluicegate.decision", "allowed"), ("sluicegate.limit", "hour"), ("sluicegate.remaining", "0")],
    );
    let upstream_says = [("server.address", host), ("server.port", port), ("http.response.status_code", "200")];
    assert_attributes(
        sent,
        &[&upstream_says[..], &[("http.request.method", "GET"), ("sluicegate.upstream", "api")]].concat(),
    );
    for inner in [decision, sent] {
        let (from, to) = (inner.start_time_unix_nano, inner.end_time_unix_nano);
        assert!(request.start_time_unix_nano <= from && from < to && to <= request.end_time_unix_nano, "{spans:#?}");
    }
    assert!(decision.end_time_unix_nano <= sent.start_time_unix_nano, "{spans:#?}");
    // The parent of the upstream's spans is the client span.
    let seen = upstream.last();
    assert_eq!(seen.headers("traceparent"), [format!("00-{TRACE}-{}-01", hex(&sent.span_id))]);
    assert_eq!(seen.headers("tracestate"), ["vendor=1"]);
    // Find the span of the denied request. On a server span, a 429 is not an error.
    let denied = spans.iter().find(|span| span.kind() == SpanKind::Server && span.span_id != request.span_id).unwrap();
    assert_attributes(denied, &[("http.response.status_code", "429"), ("sluicegate.outcome", "rate-limited")]);
    assert_eq!(denied.status.as_ref().unwrap().code, 0, "{denied:#?}");
    let (whose, _) = self::spans(&collector.server.last());
    assert_eq!((whose["service.name"].as_str(), whose.contains_key("service.version")), ("sluicegate", true));
    assert!(!format!("{spans:?}").contains("planted"), "spans contain no query");
}

#[test]
fn request_without_a_trace_starts_one() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    let gateway = Gateway::start(&config(&upstream, &collector.log()));
    let mut client = gateway.client();
    let twice = [("traceparent", traceparent("01")), ("traceparent", traceparent("01"))];
    for headers in [
        vec![],
        vec![("tracestate", "lost=1".to_owned())],
        vec![("traceparent", "00-not-a-trace".to_owned()), ("tracestate", "lost=1".to_owned())],
        twice.to_vec(),
    ] {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, &**value)).collect();
        assert_eq!(client.get_with("/up/7", &headers).status, 200);
        let seen = upstream.last();
        let [told] = seen.headers("traceparent")[..] else { panic!("{seen:?}") };
        let parts: Vec<_> = told.split('-').collect();
        assert!(parts[0] == "00" && parts[1] != TRACE && parts[3] == "01", "{told}");
        assert!(seen.headers("tracestate").is_empty(), "a new trace has no tracestate: {seen:?}");
        let spans = collector.trace(parts[1], 2);
        let (request, sent) = (of_kind(&spans, SpanKind::Server), of_kind(&spans, SpanKind::Client));
        assert!(request.parent_span_id.is_empty() && hex(&sent.span_id) == parts[2], "{spans:#?}");
        assert_attributes(request, &[("http.route", "/up/{id}"), ("url.path", "/up/7")]);
    }
}

#[test]
fn deceptive_characters_of_clients_are_escaped_in_spans() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    let gateway = Gateway::start(&config(&upstream, &collector.log()));
    let hidden = "\u{85}\u{9b}31m\u{202e}\u{2066}\u{feff}\u{2028}";
    let mut client = gateway.client();
    let given = traceparent("01");
    client.send(format!("GET /é{hidden} HTTP/1.1\r\nHost: a.test\r\ntraceparent: {given}\r\n\r\n").as_bytes());
    assert!(matches!(client.reply().unwrap().status, 400 | 404));
    let spans = collector.trace(TRACE, 1);
    let texts = format!("{spans:?}");
    let found = attributes(&spans[0].attributes)["url.path"].clone();
    assert!(found.ends_with("%C2%85%C2%9B31m%E2%80%AE%E2%81%A6%EF%BB%BF%E2%80%A8"), "{found}");
    assert!(!hidden.chars().any(|c| !c.is_ascii() && texts.contains(c)), "{texts}");
}

#[test]
fn unsampled_trace_context_is_forwarded_unchanged() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    let mut gateway = Gateway::start(&config(&upstream, &collector.log()));
    let given = traceparent("00");
    let headers = [("traceparent", &*given), ("tracestate", "vendor=1")];
    assert_eq!(gateway.client().get_with("/up/1", &headers).status, 200);
    let seen = upstream.last();
    assert_eq!((seen.headers("traceparent"), seen.headers("tracestate")), (vec![&*given], vec!["vendor=1"]));
    gateway.terminate();
    gateway.wait();
    assert!(collector.spans().is_empty(), "{:#?}", collector.spans());
}

#[test]
fn trace_context_is_forwarded_unchanged_without_a_collector() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&config(&upstream, ""));
    let mut client = gateway.client();
    for given in [traceparent("01"), traceparent("00"), "anything".to_owned()] {
        assert_eq!(client.get_with("/up/1", &[("traceparent", &given), ("tracestate", "vendor=1")]).status, 200);
        let seen = upstream.last();
        assert_eq!((seen.headers("traceparent"), seen.headers("tracestate")), (vec![&*given], vec!["vendor=1"]));
    }
    assert_eq!(client.get("/up/1").status, 200);
    assert!(upstream.last().headers("traceparent").is_empty(), "the gateway adds no traceparent");
}

#[test]
fn span_of_a_failed_upstream_request_is_an_error() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    let gateway = Gateway::start(&config(&upstream, &collector.log()));
    assert_eq!(gateway.client().get_with("/gone", &[("traceparent", &traceparent("01"))]).status, 502);
    let spans = collector.trace(TRACE, 2);
    let (request, sent) = (of_kind(&spans, SpanKind::Server), of_kind(&spans, SpanKind::Client));
    assert_attributes(request, &[("error.type", "upstream-connect-failure"), ("http.response.status_code", "502")]);
    assert_attributes(
        sent,
        &[("error.type", "upstream-connect-failure"), ("server.address", "127.0.0.1"), ("server.port", "1")],
    );
    assert!([request, sent].iter().all(|span| span.status.as_ref().unwrap().code == 2), "{spans:#?}");
}

#[test]
fn last_spans_are_exported_before_the_process_ends() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    let mut gateway = Gateway::start(&config(&upstream, &collector.log()));
    let mut client = gateway.client();
    (0..100).for_each(|_| assert_eq!(client.get("/up/1").status, 200));
    drop(client);
    gateway.terminate();
    assert!(gateway.wait().success());
    assert_eq!(collector.spans().len(), 200);
}

#[test]
fn spans_that_no_collector_accepts_are_counted_and_fail_no_request() {
    let (collector, upstream) = (Collector::start(), Upstream::start());
    collector.refuses.store(true, Ordering::SeqCst);
    let gateway = Gateway::start(&config(&upstream, &collector.log()));
    let mut client = gateway.client();
    (0..100).for_each(|_| assert_eq!(client.get("/up/1").status, 200));
    let dropped = || metric(&gateway, "sluicegate_trace_spans_dropped_total");
    eventually("all spans are dropped", || dropped() == 200.0);
    assert!(gateway.log().contains("cannot export spans"), "{}", gateway.log());
    // When the collector accepts exports again, it gets new spans.
    collector.refuses.store(false, Ordering::SeqCst);
    assert_eq!(client.get_with("/up/1", &[("traceparent", &traceparent("01"))]).status, 200);
    assert_eq!(collector.trace(TRACE, 2).len(), 2);
    assert_eq!(dropped(), 200.0);
}

#[test]
fn unreachable_collector_is_named_in_the_log() {
    let upstream = Upstream::start();
    let rest = "[log]\naccess = \"off\"\ntrace_endpoint = \"http://127.0.0.1:1?token=planted\"\n";
    let gateway = Gateway::start(&config(&upstream, rest));
    assert_eq!(gateway.get("/up/1").status, 200);
    eventually("the spans are dropped", || metric(&gateway, "sluicegate_trace_spans_dropped_total") == 2.0);
    let log = gateway.log();
    assert!(log.contains("\"127.0.0.1:1\"") && log.contains("refused") && !log.contains("planted"), "{log}");
}

#[test]
fn collector_over_tls_with_a_key_is_supported() {
    let ca = Authority::new("ca");
    let (upstream, taken) = (Upstream::start(), Arc::<std::sync::Mutex<Vec<Seen>>>::default());
    let sink = taken.clone();
    let config_of = server(&ca.server(&["localhost"], NOW), None, &["http/1.1"], &[&TLS13]);
    let collector = TlsUpstream::serve(config_of, move |mut stream| {
        if let Some(seen) = read_request(&mut stream) {
            sink.lock().unwrap().push(seen);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let roots = directory.path().join("ca.pem");
    std::fs::write(&roots, ca.pem()).unwrap();
    let rest = format!(
        "[log]\naccess = \"off\"\ntrace_endpoint = \"https://localhost:{}/v1/traces\"\n",
        collector.address.port()
    );
    let gateway = Gateway::start_by(&config(&upstream, &rest), |path| {
        let mut command = binary();
        command.env("SSL_CERT_FILE", &roots).env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=planted");
        command.env("OTEL_RESOURCE_ATTRIBUTES", "service.name=edge,deployment.environment.name=test");
        command.arg("--config").arg(path);
        command
    });
    assert_eq!(gateway.get("/up/1").status, 200);
    eventually("the spans arrive", || !taken.lock().unwrap().is_empty());
    let seen = taken.lock().unwrap()[0].clone();
    assert_eq!(seen.headers("x-key"), ["planted"]);
    let (whose, spans) = spans(&seen);
    assert_eq!((&*whose["service.name"], &*whose["deployment.environment.name"], spans.len()), ("edge", "test", 2));
    assert!(!gateway.log().contains("planted"), "{}", gateway.log());
}
