//! The matched route, the mismatches of the other routes, and the requests and responses that the route produces.

use futures_util::FutureExt;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::BodyExt;

use crate::http::body::Body;
use crate::http::cors;
use crate::http::cors::CorsDecision;
use crate::http::headers::{HeaderMutations, X_REQUEST_ID};
use crate::limiter::decision::Decision;
use crate::proxy::context::{Peer, RequestId};
use crate::proxy::forward::{ForwardedCertificate, UpstreamRequestInfo, prepare_upstream_headers};
use crate::proxy::header_values::RequestVariables;
use crate::proxy::local_reply::Rejection;
use crate::proxy::mirror::MIRROR_HEADER;
use crate::proxy::rate_limit::append_ratelimit_headers;
use crate::proxy::target::RequestTarget;
use crate::routing::explain::{Candidate, MismatchReason};
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_action::WeightedUpstreams;
use crate::snapshot::routes::{Route, RouteAction};
use crate::tools::explain::report::{
    HeaderReport, MatchedRoute, MirrorReport, OtherRoute, ResponseReport, UpstreamReport,
};

type RouteCandidate<'r> = Candidate<'r, std::sync::Arc<Route>>;

/// Report the matched route.
pub(super) fn matched_route(route: &Route) -> MatchedRoute {
    MatchedRoute { route: route.name.to_string(), path: route.path.to_string() }
}

/// Return at most `max` routes that were not chosen, closest match first, and the number of further ones.
pub(super) fn other_routes(
    config: &CompiledConfig,
    request: &Request<()>,
    target: &RequestTarget<'_>,
    route_index: Option<usize>,
    max: usize,
) -> (Vec<OtherRoute>, usize) {
    let headers = request.headers();
    // A preflight is for the route of the method that it asks for.
    let requested_method =
        target.find_preflight_route(config, request).and_then(|_| cors::requested_method(request.method(), headers));
    let method = requested_method.as_ref().unwrap_or(request.method());
    let mut all = config.table.candidates(&target.host, &target.path, method, headers);
    all.sort_by_key(|candidate| (candidate.distance(), candidate.target.index));
    let (winner, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|to_report| Some(to_report.target.index) == route_index);
    let others_left_out = others.len().saturating_sub(max);
    let other = |other: &RouteCandidate<'_>| {
        let (mismatch, reason) = mismatch_reason(other, winner.first());
        OtherRoute { route: other.target.name.to_string(), path: other.target.path.to_string(), mismatch, reason }
    };
    (others.iter().take(max).map(other).collect(), others_left_out)
}

/// The condition that does not match, and the explanation.
fn mismatch_reason(other: &RouteCandidate<'_>, winner: Option<&RouteCandidate<'_>>) -> (&'static str, String) {
    match other.mismatch {
        Some(MismatchReason::Host) => ("host", format!("it is for the host {}", other.host.as_deref().unwrap_or("*"))),
        Some(MismatchReason::Path) => ("path", format!("its path is {}", other.target.path)),
        Some(MismatchReason::Method) => ("method", format!("it is for {} only", method_list(other))),
        Some(MismatchReason::Header(name)) => {
            ("header", format!("it requires `{}`", required_header(other.headers, name)))
        }
        None => ("specific", winner.map_or_else(String::new, |winner| specificity_reason(other, winner))),
    }
}

/// Why `winner` is more specific than `other`, which matches as well: by host, then path, then methods and headers.
fn specificity_reason(other: &RouteCandidate<'_>, winner: &RouteCandidate<'_>) -> String {
    let better = &winner.target.name;
    if other.host != winner.host {
        return format!("it matches, but the host of {better} is more specific");
    }
    if !other.target.path_pattern.matches_same_paths(&winner.target.path_pattern) {
        return format!("it matches, but the path of {better} is more specific");
    }
    if other.methods.is_empty() != winner.methods.is_empty() {
        return format!("it matches, but {better} lists the method");
    }
    format!("it matches, but {better} requires more headers")
}

fn method_list(other: &RouteCandidate<'_>) -> String {
    other.methods.iter().map(http::Method::as_str).collect::<Vec<_>>().join(", ")
}

fn required_header(headers: &[(HeaderName, HeaderValue)], name: &HeaderName) -> String {
    let value = headers.iter().find(|(wanted, _)| wanted == name).map(|(_, value)| value.as_bytes());
    format!("{name}: {}", String::from_utf8_lossy(value.unwrap_or_default()))
}

// The forwarded request.

/// Placeholder for a request id that the gateway would generate.
const GENERATED_ID_PLACEHOLDER: HeaderValue = HeaderValue::from_static("(a new one for each request)");

/// Return the request id: a placeholder if the gateway would generate it.
pub(super) fn displayed_request_id(headers: &HeaderMap, peer: &Peer) -> HeaderValue {
    match RequestId::from_headers(headers, peer.forwarded.trusted) {
        RequestId::Received(request_id) => request_id,
        RequestId::Generated(_) => GENERATED_ID_PLACEHOLDER,
    }
}

/// Report the request that an upstream of the route would receive, for this target and body length in bytes.
pub(super) fn upstream_report(
    config: &CompiledConfig,
    variables: &RequestVariables<'_, ()>,
    weighted_upstreams: &WeightedUpstreams,
    (target, length): (Option<&PathAndQuery>, Option<u64>),
) -> UpstreamReport {
    let RequestVariables { route, peer, credentials, request, .. } = *variables;
    let request_id = variables.request_id.clone();
    let upstreams = || weighted_upstreams.upstreams().map(|index| &config.upstreams[index]);
    // A request without a host gets the authority of its server as `Host`. The report shows that of the first server.
    let authority = upstreams().next().map_or("", |upstream| &*upstream.servers[0].authority);
    let mut forwarded_request = request.clone();
    let header_values = &route.request_headers.render_without_literals(|variable| variables.content(variable));
    // No certificate is known here: the report shows that those of clients are removed.
    let client_cert = upstreams().any(|upstream| upstream.client_cert_header).then_some(ForwardedCertificate(None));
    let request_info = UpstreamRequestInfo {
        credentials,
        forwarded: &peer.forwarded,
        request_id,
        trace: None,
        authority,
        length,
        header_values,
        client_cert,
    };
    let upgrade_request = prepare_upstream_headers(config, route, &mut forwarded_request, request_info);
    let is_upgrade = upgrade_request.is_some();
    if let Some(upgrade_request) = upgrade_request {
        upgrade_request.insert_into(forwarded_request.headers_mut());
    }
    let (received_headers, forwarded_headers) = (request.headers(), forwarded_request.headers());
    let is_unchanged =
        |headers: &HeaderMap, name| received_headers.get_all(name).iter().eq(headers.get_all(name).iter());
    let changed: HeaderMap = forwarded_headers.iter().filter(|(name, _)| !is_unchanged(forwarded_headers, *name)).fold(
        HeaderMap::new(),
        |mut changed_headers, (name, value)| {
            changed_headers.append(name, value.clone());
            changed_headers
        },
    );
    let is_configured = |name: &str| is_configured(&route.request_headers, name) && *name != X_REQUEST_ID;
    UpstreamReport {
        upstreams: upstreams().map(|upstream| upstream.name.to_string()).collect(),
        target: target.map_or("/", |target| target.as_str()).to_owned(),
        set_headers: header_reports(&changed, is_configured),
        removed_headers: received_headers
            .keys()
            .filter(|name| !forwarded_headers.contains_key(*name))
            .map(ToString::to_string)
            .collect(),
        mirror: route.mirror.as_ref().map(|mirror| MirrorReport {
            upstream: config.upstreams[mirror.upstream].name.to_string(),
            percent: mirror.percent,
            max_body: mirror.max_body,
            skipped: if request.headers().contains_key(&MIRROR_HEADER) {
                Some("it is a copy itself")
            } else if is_upgrade {
                Some("it offers to upgrade the connection")
            } else if length.is_some_and(|length| length > mirror.max_body as u64) {
                Some("its body is larger than `max_body`")
            } else {
                None
            },
        }),
    }
}

// The response.

/// Return whether the changes set a header to a value of the configuration, which may be secret.
fn is_configured(mutations: &HeaderMutations, name: &str) -> bool {
    mutations.set.iter().any(|(set, _)| *set == *name)
}

/// Report the response to a rejected request. `variables` are those of its route, if one matched.
pub(super) fn rejection_response(
    rejection: Rejection<'_>,
    variables: Option<&RequestVariables<'_, ()>>,
    cors: Option<&CorsDecision<'_>>,
    proxy_status: bool,
) -> ResponseReport {
    let (mut response, outcome) = rejection.into_response(None, proxy_status);
    let mut own = Vec::new();
    let mutations = variables.map(|variables| &variables.route.response_headers).filter(|rules| rules.on_errors);
    if let (Some(variables), Some(mutations)) = (variables, mutations) {
        own.extend(response.headers().keys().cloned());
        let values = mutations.render_without_literals(|variable| variables.content(variable));
        mutations.apply_to_rejection(response.headers_mut(), &values);
    }
    if let Some(cors) = cors {
        cors.apply(response.headers_mut());
    }
    gateway_response(response, outcome, |name| {
        mutations.is_some_and(|mutations| is_configured(mutations, name)) && !own.iter().any(|own| own.as_str() == name)
    })
}

/// Report the response to an admitted request.
pub(super) fn admitted_response(
    variables: &RequestVariables<'_, ()>,
    path: &str,
    decision: Option<&Decision<'_>>,
    cors: Option<&CorsDecision<'_>>,
) -> ResponseReport {
    let RequestVariables { route, request, .. } = *variables;
    let mutations = &route.response_headers;
    let values = mutations.render_without_literals(|variable| variables.content(variable));
    let is_configured = |name: &str| is_configured(mutations, name);
    let apply_headers = |headers: &mut HeaderMap| {
        mutations.apply(headers, &values);
        if let Some(decision) = decision {
            append_ratelimit_headers(headers, route, decision);
        }
        if let Some(cors) = cors {
            cors.apply(headers);
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
    // Bodies that the gateway generates are complete at once: one poll suffices.
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

/// Report headers; without the values of those that the configuration sets.
pub(super) fn header_reports(headers: &HeaderMap, is_configured: impl Fn(&str) -> bool) -> Vec<HeaderReport> {
    let to_report = |(name, value): (&http::HeaderName, &http::HeaderValue)| HeaderReport {
        name: name.to_string(),
        value: (!is_configured(name.as_str())).then(|| String::from_utf8_lossy(value.as_bytes()).into_owned()),
    };
    headers.iter().map(to_report).collect()
}
