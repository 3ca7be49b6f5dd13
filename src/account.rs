//! One record for each request, closed when its response body is over: its line in the access log, and its spans.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, Method, Response};

use crate::http::body::{Body, Ending};
use crate::limit::clock::unix_us;
use crate::observe::access::{AccessLog, Decided, Line, Sent};
use crate::observe::spans::{self, Spans};
use crate::observe::trace::{Parent, Trace};

/// Where records go.
#[derive(Debug, Clone, Default)]
pub struct Sinks {
    /// A line for each request.
    pub access: Option<AccessLog>,
    /// Spans of those that are traced.
    pub spans: Option<Spans>,
}

/// A request as it comes.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Arrival<'a> {
    pub at: Instant,
    /// The other end of its connection, and what was spoken on it.
    pub peer: IpAddr,
    pub scheme: &'static str,
    pub method: &'a Method,
    pub path: &'a str,
    pub headers: &'a HeaderMap,
}

/// What is known of a request so far.
#[derive(Debug)]
pub struct Record {
    sinks: Arc<Sinks>,
    started: Instant,
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
    pub template: Option<Box<str>>,
    /// What its limits said.
    pub decided: Option<Decided>,
    /// What came of sending it on.
    pub sent: Option<Sent>,
    /// What of its trace is recorded.
    pub trace: Option<Trace>,
    /// Given to the upstream as well.
    pub request_id: Box<str>,
}

impl Sinks {
    /// Waits until all so far is written.
    pub fn flush(&self) {
        if let Some(access) = &self.access {
            access.flush();
        }
        if let Some(spans) = &self.spans {
            spans.flush();
        }
    }
}

impl Record {
    /// Opens the record of a request; none if nobody wants it.
    pub fn open(sinks: &Arc<Sinks>, arrival: &Arrival<'_>) -> Option<Box<Self>> {
        if sinks.access.is_none() && sinks.spans.is_none() {
            return None;
        }
        let parent = Parent::of(arrival.headers);
        let trace = sinks.spans.as_ref().and_then(|_| Trace::begin(parent));
        if sinks.access.is_none() && trace.is_none() {
            return None;
        }
        Some(Box::new(Record {
            sinks: sinks.clone(),
            started: arrival.at,
            peer: arrival.peer,
            scheme: arrival.scheme,
            method: arrival.method.clone(),
            path: arrival.path.into(),
            status: 0,
            outcome: "ok",
            trace_id: trace.map(|trace| trace.id).or(parent.map(|parent| parent.trace)),
            client: arrival.peer,
            route: None,
            template: None,
            decided: None,
            sent: None,
            trace,
            request_id: "-".into(),
        }))
    }

    /// How long after the request something was.
    pub fn since(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.started)
    }

    /// Hands the record to the body of the response; it is written when the body is gone.
    pub fn attach(mut self: Box<Self>, response: Response<Body>, outcome: &'static str) -> Response<Body> {
        self.status = response.status().as_u16();
        self.outcome = outcome;
        response.map(|body| body.recorded(self))
    }
}

impl Ending for Record {
    fn ended(self: Box<Self>, sent: u64, complete: bool) {
        let took = self.started.elapsed();
        let line = Line {
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
            decided: self.decided.as_ref(),
            sent: self.sent.as_ref(),
            request_id: &self.request_id,
            trace_id: self.trace_id,
        };
        if let Some(access) = &self.sinks.access {
            access.write(&line);
        }
        if let (Some(spans), Some(trace)) = (&self.sinks.spans, &self.trace) {
            let (template, scheme, peer) = (self.template.as_deref(), self.scheme, self.peer);
            spans.record(&spans::Request { trace, line: &line, template, scheme, peer });
        }
    }
}
