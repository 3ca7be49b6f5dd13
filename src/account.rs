//! One record for each request, closed when its response body is over.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use http::{Method, Response};

use crate::http::body::{Body, Ending};
use crate::limit::clock::unix_us;
use crate::observe::access::{AccessLog, Line};

/// What is known of a request so far.
#[derive(Debug)]
pub struct Record {
    log: AccessLog,
    started: Instant,
    method: Method,
    path: Box<str>,
    status: u16,
    outcome: &'static str,
    /// The client's address; the peer's until the route is known.
    pub client: IpAddr,
    /// The route that it took.
    pub route: Option<Arc<str>>,
    /// Who decided its limits.
    pub decided_by: Option<&'static str>,
    /// When its limits were asked, by the clock of whoever decided, µs since the Unix epoch.
    pub decided_at: Option<u64>,
    /// The shadow limits that would have denied it.
    pub shadow_denied: Vec<Box<str>>,
    /// Given to the upstream as well.
    pub request_id: Box<str>,
}

impl Record {
    /// Opens the record of a request that came at `started`.
    pub fn open(log: AccessLog, started: Instant, client: IpAddr, method: Method, path: &str) -> Self {
        Record {
            log,
            started,
            client,
            method,
            path: path.into(),
            status: 0,
            outcome: "ok",
            route: None,
            decided_by: None,
            decided_at: None,
            shadow_denied: Vec::new(),
            request_id: "-".into(),
        }
    }

    /// Hands the record to the body of the response; it is written when the body is gone.
    pub fn attach(mut self, response: Response<Body>, outcome: &'static str) -> Response<Body> {
        self.status = response.status().as_u16();
        self.outcome = outcome;
        response.map(|body| body.recorded(Box::new(self)))
    }
}

impl Ending for Record {
    fn ended(self: Box<Self>, sent: u64, complete: bool) {
        self.log.write(&Line {
            time: (unix_us() / 1000) as f64 / 1000.0,
            client: self.client,
            method: self.method.as_str(),
            path: &self.path,
            status: self.status,
            bytes: sent,
            complete: complete || self.method == Method::HEAD,
            duration_ms: self.started.elapsed().as_micros() as f64 / 1000.0,
            route: self.route.as_deref(),
            outcome: self.outcome,
            decided_by: self.decided_by,
            decided_at: self.decided_at.map(|us| us as f64 / 1e6),
            shadow_denied: &self.shadow_denied,
            request_id: &self.request_id,
        });
    }
}
