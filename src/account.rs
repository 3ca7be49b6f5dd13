//! One record for each request, closed when its response body is over: its line in the access log, and its spans.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, Method, Response};

use crate::http::body::{Body, OnComplete};
use crate::limit::clock::unix_us;
use crate::observe::access::{AccessLog, AccessRecord, DecisionInfo, UpstreamInfo};
use crate::observe::spans::{self, TraceExporter};
use crate::observe::trace::{TraceContext, TraceParent};

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
    status: u16,
    outcome: &'static str,
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

    /// Hands the record to the body of the response; it is written when the body is gone.
    pub fn attach(mut self: Box<Self>, response: Response<Body>, outcome: &'static str) -> Response<Body> {
        self.status = response.status().as_u16();
        self.outcome = outcome;
        response.map(|body| body.on_drop(self))
    }
}

impl OnComplete for RequestRecord {
    fn on_complete(self: Box<Self>, sent: u64, complete: bool) {
        let took = self.started_at.elapsed();
        let line = AccessRecord {
            time: unix_us().saturating_sub(took.as_micros() as u64),
            client: self.client,
            method: self.method.as_str(),
            path: &self.path,
            status: self.status,
            bytes: sent,
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
            spans.record(&spans::RequestTrace { trace, record: &line, path_template: template, scheme, peer });
        }
    }
}
