//! A route, ready to use: where its requests go, and which limits they meet.

use std::fmt::Write;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::{HeaderValue, Response, StatusCode};
use tokio::time::Duration;

use super::split::WeightedUpstreams;
use crate::cost::{Cost, RefundOn};
use crate::http::body::Body;
use crate::http::fields::HeaderStyle;
use crate::http::rules::HeaderMutations;
use crate::identity::IdentitySpec;
use crate::limit::plan::LimitSpec;
use crate::route::path::PathPattern;
use crate::route::template::RewriteTemplate;

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
    pub path_pattern: PathPattern,
    /// Where its requests go.
    pub action: RouteAction,
    /// What becomes of their path on the way to an upstream; none = it stays as it is.
    pub rewrite: Option<Rewrite>,
    /// Time for all of it, from the head of a request to the end of its answer.
    pub timeout: Option<Duration>,
    /// What they are limited by.
    pub rate_limits: RouteLimits,
    /// Bytes that their bodies may have.
    pub max_body: Option<u64>,
    /// Whether they may switch protocols.
    pub websocket: bool,
    /// What is changed in them for the upstream.
    pub request_headers: HeaderMutations,
    /// What is changed in the answers.
    pub response_headers: HeaderMutations,
}

/// A limit of a route.
#[derive(Debug, Clone)]
pub struct RouteLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Which of the route's identities it asks about.
    pub identity_index: usize,
    /// What a request costs it.
    pub cost: Cost,
    /// The statuses that give a charge back.
    pub refund_on: RefundOn,
}

/// What a route's requests are limited by, and how callers are told.
#[derive(Debug)]
pub struct RouteLimits {
    /// The identities that its limits ask for, each once.
    pub identities: Vec<IdentitySpec>,
    /// Whether one of them is by API key.
    pub uses_api_key: bool,
    /// Its limits.
    pub limits: Vec<RouteLimit>,
    /// How many of them callers are told of.
    pub advertised: usize,
    /// How callers are told where they stand.
    pub header_styles: Vec<HeaderStyle>,
    /// The Access-Control-Expose-Headers that lets scripts of other origins read it.
    pub expose_header: Option<HeaderValue>,
    /// The RateLimit-Policy of a response that all its limits had a say in, in their standard sizes.
    pub policy_header: Option<HeaderValue>,
}

/// Where requests go.
#[derive(Debug)]
pub enum RouteAction {
    /// To upstreams, by index.
    Forward(WeightedUpstreams),
    /// The gateway answers itself.
    DirectResponse(DirectResponse),
    /// The client is sent elsewhere.
    Redirect(Redirect),
}

/// What becomes of a path on the way to an upstream.
#[derive(Debug)]
pub enum Rewrite {
    /// It loses segments that it begins with.
    StripPrefix(Box<str>),
    /// It becomes another.
    Template(RewriteTemplate),
}

/// An answer that says where else to ask.
#[derive(Debug)]
pub struct Redirect {
    /// Scheme and host; empty = where the request came.
    pub origin: Box<str>,
    /// Path and query there.
    pub template: RewriteTemplate,
    /// Its status.
    pub status: StatusCode,
}

/// An answer of the gateway's own.
#[derive(Debug)]
pub struct DirectResponse {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
    /// The type of the body.
    pub content_type: HeaderValue,
}

impl DirectResponse {
    /// The answer.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(self.body.clone()));
        *response.status_mut() = self.status;
        // RFC 9110 §15.3.5, §15.3.6, §15.4.5: these have no content, and so no type of it.
        if !matches!(self.status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED) {
            response.headers_mut().insert(CONTENT_TYPE, self.content_type.clone());
        }
        response
    }
}

impl Redirect {
    /// The answer to a request for this path, as it is forwarded, and this query. It has no two slashes and no backslash, so
    /// none makes a browser read the name of a host.
    pub fn response(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> Response<Body> {
        let mut location = self.origin.to_string();
        for byte in self.template.expand(pattern, path, query).bytes() {
            // Queries may have what URIs do not (RFC 3986 §2).
            if byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) {
                location.push(char::from(byte));
            } else {
                // Writing to memory does not fail.
                let _ = write!(location, "%{byte:02X}");
            }
        }
        let mut response = Response::new(Body::full(""));
        *response.status_mut() = self.status;
        // Graphic ASCII is a valid value.
        response.headers_mut().extend(HeaderValue::try_from(location).ok().map(|location| (LOCATION, location)));
        response
    }
}

impl Rewrite {
    /// The target for a request for this path, as it is forwarded, which the pattern matches, and this query.
    pub fn apply(&self, pattern: &PathPattern, path: &str, query: Option<&str>) -> String {
        match self {
            Rewrite::Template(template) => template.expand(pattern, path, query),
            Rewrite::StripPrefix(prefix) => {
                // By segments: what is forwarded may encode delimiters that the prefix has as they are.
                let end = path.match_indices('/').nth(prefix.matches('/').count()).map_or(path.len(), |(at, _)| at);
                let rest = if end == path.len() { "/" } else { &path[end..] };
                query.map_or_else(|| rest.to_owned(), |query| format!("{rest}?{query}"))
            }
        }
    }
}

impl Route {
    /// Whether it has this limit.
    pub fn has_limit(&self, limit: &Arc<LimitSpec>) -> bool {
        self.rate_limits.limits.iter().any(|route_limit| Arc::ptr_eq(&route_limit.limit, limit))
    }
}
