//! What the client would be answered.

use futures_util::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;

use super::facts::{HeaderReport, ResponseReport};
use crate::gateway::decide::append_ratelimit_headers;
use crate::http::body::Body;
use crate::limit::decision::Decision;
use crate::reply::Rejection;
use crate::runtime::{Route, RouteAction};

/// To a request that is turned down.
pub(super) fn rejection_response(rejection: Rejection<'_>) -> ResponseReport {
    let (response, outcome) = rejection.into_response(None);
    gateway_response(response, outcome, |_| false)
}

/// To a request that passes.
pub(super) fn admitted_response(
    route: &Route,
    request: &Request<()>,
    path: &str,
    decision: Option<&Decision<'_>>,
) -> ResponseReport {
    let mutations = &route.response_headers;
    let is_configured = |name: &str| mutations.set.iter().any(|(set, _)| *set == *name);
    let apply_headers = |headers: &mut HeaderMap| {
        mutations.apply(headers);
        if let Some(decision) = decision {
            append_ratelimit_headers(headers, route, decision);
        }
    };
    let mut response = match &route.action {
        RouteAction::Forward(_) => {
            let mut headers = HeaderMap::new();
            apply_headers(&mut headers);
            let removed = mutations.remove.iter().map(ToString::to_string).collect();
            return ResponseReport {
                source: "upstream",
                outcome: "ok",
                headers: header_reports(&headers, is_configured),
                removed_headers: removed,
                ..ResponseReport::default()
            };
        }
        RouteAction::DirectResponse(direct_response) => direct_response.response(),
        RouteAction::Redirect(redirect) => redirect.response(&route.path_pattern, path, request.uri().query()),
    };
    apply_headers(response.headers_mut());
    gateway_response(response, "ok", is_configured)
}

fn gateway_response(
    response: Response<Body>,
    outcome: &'static str,
    is_configured: impl Fn(&str) -> bool,
) -> ResponseReport {
    let (parts, body) = response.into_parts();
    // A body of our own is there at once.
    let body = body.collect().now_or_never().and_then(Result::ok).map(|body| body.to_bytes());
    ResponseReport {
        source: "gateway",
        status: Some(parts.status.as_u16()),
        outcome,
        headers: header_reports(&parts.headers, is_configured),
        removed_headers: Vec::new(),
        body: body.map(|body| String::from_utf8_lossy(&body).into_owned()),
    }
}

/// The fields of a section, those that the configuration sets without their values.
pub(super) fn header_reports(headers: &HeaderMap, is_configured: impl Fn(&str) -> bool) -> Vec<HeaderReport> {
    let to_report = |(name, value): (&http::HeaderName, &http::HeaderValue)| HeaderReport {
        name: name.to_string(),
        value: (!is_configured(name.as_str())).then(|| String::from_utf8_lossy(value.as_bytes()).into_owned()),
    };
    headers.iter().map(to_report).collect()
}
