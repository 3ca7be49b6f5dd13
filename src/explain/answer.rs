//! What the client would be answered.

use futures_util::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;

use super::facts::{Answer, Field};
use crate::gateway::decide::append_ratelimit_headers;
use crate::http::body::Body;
use crate::limit::decision::Decision;
use crate::reply::Rejection;
use crate::runtime::{Route, RouteAction};

/// To a request that is turned down.
pub(super) fn rejected(rejection: Rejection<'_>) -> Answer {
    let (response, outcome) = rejection.into_response(None);
    own(response, outcome, |_| false)
}

/// To a request that passes.
pub(super) fn admitted(route: &Route, request: &Request<()>, path: &str, decision: Option<&Decision<'_>>) -> Answer {
    let rules = &route.response_headers;
    let configured = |name: &str| rules.set.iter().any(|(set, _)| *set == *name);
    let tell = |headers: &mut HeaderMap| {
        rules.apply(headers);
        if let Some(decision) = decision {
            append_ratelimit_headers(headers, route, decision);
        }
    };
    let mut response = match &route.action {
        RouteAction::Forward(_) => {
            let mut headers = HeaderMap::new();
            tell(&mut headers);
            let removed = rules.remove.iter().map(ToString::to_string).collect();
            return Answer {
                source: "upstream",
                outcome: "ok",
                headers: fields(&headers, configured),
                removed_headers: removed,
                ..Answer::default()
            };
        }
        RouteAction::DirectResponse(respond) => respond.response(),
        RouteAction::Redirect(redirect) => redirect.response(&route.path_pattern, path, request.uri().query()),
    };
    tell(response.headers_mut());
    own(response, "ok", configured)
}

fn own(response: Response<Body>, outcome: &'static str, configured: impl Fn(&str) -> bool) -> Answer {
    let (parts, body) = response.into_parts();
    // A body of our own is there at once.
    let body = body.collect().now_or_never().and_then(Result::ok).map(|body| body.to_bytes());
    Answer {
        source: "gateway",
        status: Some(parts.status.as_u16()),
        outcome,
        headers: fields(&parts.headers, configured),
        removed_headers: Vec::new(),
        body: body.map(|body| String::from_utf8_lossy(&body).into_owned()),
    }
}

/// The fields of a section, those that the configuration sets without their values.
pub(super) fn fields(headers: &HeaderMap, configured: impl Fn(&str) -> bool) -> Vec<Field> {
    let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| Field {
        name: name.to_string(),
        value: (!configured(name.as_str())).then(|| String::from_utf8_lossy(value.as_bytes()).into_owned()),
    };
    headers.iter().map(field).collect()
}
