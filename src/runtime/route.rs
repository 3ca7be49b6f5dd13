//! A route, ready to use: where its requests go, and which limits they meet.

use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};

use crate::cost::{Cost, RefundOn};
use crate::http::body::Body;
use crate::http::fields::Dialect;
use crate::http::rules::Rules;
use crate::identity::By;
use crate::limit::plan::Limit;
use crate::route::PathPattern;

/// A route, ready to use.
#[derive(Debug)]
pub struct Route {
    /// Its place among all of them.
    pub index: usize,
    /// Its name.
    pub name: Arc<str>,
    /// The path as written.
    pub path: Box<str>,
    /// The same, ready to look parameters up.
    pub pattern: PathPattern,
    /// Where its requests go.
    pub target: Target,
    /// What they are limited by.
    pub metering: Metering,
    /// Bytes that their bodies may have.
    pub max_body: Option<u64>,
    /// Whether they may switch protocols.
    pub websocket: bool,
    /// What is changed in them for the upstream.
    pub request_headers: Rules,
    /// What is changed in the answers.
    pub response_headers: Rules,
}

/// A limit of a route.
#[derive(Debug)]
pub struct Metered {
    /// The limit.
    pub limit: Arc<Limit>,
    /// Which of the route's identities it asks about.
    pub identity: usize,
    /// What a request costs it.
    pub cost: Cost,
    /// The statuses that give a charge back.
    pub refund_on: RefundOn,
}

/// What a route's requests are limited by, and how callers are told.
#[derive(Debug)]
pub struct Metering {
    /// The identities that its limits ask for, each once.
    pub identities: Vec<By>,
    /// Whether one of them is by API key.
    pub by_key: bool,
    /// Its limits.
    pub limits: Vec<Metered>,
    /// How many of them callers are told of.
    pub told: usize,
    /// How callers are told where they stand.
    pub dialects: Vec<Dialect>,
    /// The Access-Control-Expose-Headers that lets scripts of other origins read it.
    pub expose: Option<HeaderValue>,
    /// The RateLimit-Policy of a response that all its limits had a say in, in their standard sizes.
    pub policy: Option<HeaderValue>,
}

/// Where requests go.
#[derive(Debug)]
pub enum Target {
    /// To the upstream with this index.
    Upstream(usize),
    /// The gateway answers itself.
    Respond(Respond),
}

/// An answer of the gateway's own.
#[derive(Debug)]
pub struct Respond {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
    /// The type of the body.
    pub content_type: HeaderValue,
}

impl Respond {
    /// The answer.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(self.body.clone()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(CONTENT_TYPE, self.content_type.clone());
        response
    }
}

impl Route {
    /// Whether it has this limit.
    pub fn uses(&self, limit: &Arc<Limit>) -> bool {
        self.metering.limits.iter().any(|metered| Arc::ptr_eq(&metered.limit, limit))
    }
}
