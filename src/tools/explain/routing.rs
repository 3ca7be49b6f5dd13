//! Explains which route matches and why the other routes do not, and shows the upstream request and the response.

use std::collections::{BTreeSet, HashMap, HashSet};

use futures_util::FutureExt;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::BodyExt;

use crate::http::body::Body;
use crate::http::cors::CorsDecision;
use crate::http::headers::{HeaderMutations, X_REQUEST_ID};
use crate::limiter::decision::Decision;
use crate::proxy::admission::{Admitted, Answer};
use crate::proxy::forward::{RequestVariables, UpstreamRequestInfo, prepare_upstream_headers};
use crate::proxy::local_reply::ReplyFormat;
use crate::proxy::mirror::MIRROR_HEADER;
use crate::proxy::rejection::Rejection;
use crate::proxy::request::Peer;
use crate::routing::RouteRequest;
use crate::routing::condition::ConditionSource;
use crate::routing::explain::{Candidate, MismatchReason};
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_action::WeightedUpstreams;
use crate::snapshot::route_action::{DirectResponse, RouteAction};
use crate::snapshot::routes::Route;
use crate::telemetry::access_log::RequestId;
use crate::tools::explain::limits::PeekedLimits;
use crate::tools::explain::report::{
    HeaderReport, MatchedRoute, MirrorReport, OtherRoute, ResponseReport, UpstreamReport,
};
use crate::upstream::settings::HostPolicy;

type RouteCandidate<'r> = Candidate<'r, std::sync::Arc<Route>>;

/// The comparison of all routes with a request.
pub(super) struct Comparison<'r> {
    config: &'r CompiledConfig,
    /// The route that the request uses, if any route matches.
    winner: Option<RouteCandidate<'r>>,
    /// The other routes. The route that comes closest to a match is first.
    others: Vec<RouteCandidate<'r>>,
    /// The hosts of each route, by the index of the route.
    hosts: HashMap<usize, BTreeSet<String>>,
}

impl<'r> Comparison<'r> {
    /// Compare all routes with a request. `chosen` is the index of the route that the request matches.
    pub(super) fn new(config: &'r CompiledConfig, request: &RouteRequest<'_>, chosen: Option<usize>) -> Self {
        let mut all = config.table.candidates(request);
        let mut hosts: HashMap<usize, BTreeSet<String>> = HashMap::new();
        for candidate in &all {
            hosts.entry(candidate.target.index).or_default().extend(candidate.host.clone());
        }
        all.sort_by_key(|candidate| (candidate.distance(), candidate.target.index));
        // A route has a candidate for each combination of host and trailing slash. Keep only the candidate that comes
        // closest to a match.
        let mut seen = HashSet::new();
        all.retain(|candidate| seen.insert(candidate.target.index));
        let (mut winner, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|candidate| Some(candidate.target.index) == chosen);
        Comparison { config, winner: winner.pop(), others, hosts }
    }

    /// Report the chosen route.
    pub(super) fn matched_route(&self, route: &Route) -> MatchedRoute {
        let winner = self.winner.as_ref();
        MatchedRoute {
            route: route.name.to_string(),
            path: route.path.to_string(),
            host: winner.and_then(|winner| winner.host.clone()),
            listeners: winner.map_or_else(Vec::new, |winner| self.listener_names(winner)),
            methods: winner.into_iter().flat_map(|winner| winner.methods).map(ToString::to_string).collect(),
            conditions: winner.into_iter().flat_map(|winner| winner.conditions).map(ToString::to_string).collect(),
        }
    }

    /// Report at most `max` of the other routes. The route that comes closest to a match is first. Also return the
    /// number of omitted routes.
    pub(super) fn other_routes(&self, max: usize) -> (Vec<OtherRoute>, usize) {
        let other = |other: &RouteCandidate<'_>| {
            let (mismatch, reason) = self.mismatch_reason(other);
            OtherRoute { route: other.target.name.to_string(), path: other.target.path.to_string(), mismatch, reason }
        };
        (self.others.iter().take(max).map(other).collect(), self.others.len().saturating_sub(max))
    }

    fn listener_names(&self, candidate: &RouteCandidate<'_>) -> Vec<String> {
        let listeners = candidate.listeners.iter().filter_map(|index| self.config.listeners.get(*index));
        listeners.filter_map(|listener| listener.name.as_deref()).map(str::to_owned).collect()
    }

    /// Return the condition that does not match, and an explanation.
    fn mismatch_reason(&self, other: &RouteCandidate<'_>) -> (&'static str, String) {
        match other.mismatch {
            Some(MismatchReason::Host) => {
                let hosts: Vec<_> =
                    self.hosts.get(&other.target.index).into_iter().flatten().map(|host| &**host).collect();
                ("host", format!("it is for the {} {}", noun("host", hosts.len()), hosts.join(", ")))
            }
            Some(MismatchReason::Path) if other.target.path_pattern.is_regex() => {
                ("path", format!("its path expression is {}", other.target.path))
            }
            Some(MismatchReason::Path) => ("path", format!("its path is {}", other.target.path)),
            Some(MismatchReason::Listener) => {
                let names = self.listener_names(other);
                ("listener", format!("it is for the {} {} only", noun("listener", names.len()), names.join(", ")))
            }
            Some(MismatchReason::Method) => {
                let methods: Vec<_> = other.methods.iter().map(http::Method::as_str).collect();
                ("method", format!("it is for {} only", methods.join(", ")))
            }
            Some(MismatchReason::Condition(condition)) => {
                let kind = match condition.source {
                    ConditionSource::Header(_) => "header",
                    ConditionSource::Query(_) => "query",
                    ConditionSource::Json(_) => "json",
                };
                (kind, format!("it requires {condition}"))
            }
            None => {
                ("specific", self.winner.as_ref().map_or_else(String::new, |winner| specificity_reason(other, winner)))
            }
        }
    }
}

fn noun(one: &str, count: usize) -> String {
    if count == 1 { one.to_owned() } else { format!("{one}s") }
}

/// Explain why `winner` is more specific than `other`, although both match. The reason is the host, path, listeners,
/// methods or conditions.
fn specificity_reason(other: &RouteCandidate<'_>, winner: &RouteCandidate<'_>) -> String {
    let better = &winner.target.name;
    let path = &other.target.path_pattern;
    let better_path = &winner.target.path_pattern;
    if other.host != winner.host {
        return format!("the route matches, but the host of {better} is more specific");
    }
    if !path.matches_same_paths(better_path) {
        return match path.is_regex() && better_path.is_regex() {
            true => format!("the route matches, but the expression of {better} comes first in the file"),
            false => format!("the route matches, but the path of {better} is more specific"),
        };
    }
    if other.listeners.is_empty() != winner.listeners.is_empty() {
        return format!("the route matches, but {better} names the listener of the request");
    }
    if other.methods.is_empty() != winner.methods.is_empty() {
        return format!("the route matches, but {better} names the method of the request");
    }
    format!("the route matches, but {better} has more conditions")
}

// The explanation of the forwarded request.

/// Placeholder for a request id that the gateway would generate.
const GENERATED_ID_PLACEHOLDER: HeaderValue = HeaderValue::from_static("(a new one for each request)");

/// Return the request id that the client sent, or a placeholder if the gateway would generate one.
pub(super) fn displayed_request_id(headers: &HeaderMap, peer: &Peer) -> HeaderValue {
    match RequestId::from_headers(headers, peer.forwarded.trusted) {
        RequestId::Text(request_id) => request_id,
        RequestId::Generated(_) => GENERATED_ID_PLACEHOLDER,
    }
}

/// Report the request that an upstream of the route would receive, given the request, the path and query for the
/// upstream, and the length of the body in bytes. The headers are compared with the headers that the client sent.
pub(super) fn upstream_report(
    config: &CompiledConfig,
    variables: &RequestVariables<'_>,
    weighted_upstreams: &WeightedUpstreams,
    mut forwarded_request: Request<()>,
    target: Option<&PathAndQuery>,
    length: Option<u64>,
    received_headers: &HeaderMap,
) -> UpstreamReport {
    let RequestVariables { route, peer, credentials, head, .. } = *variables;
    let request_id = variables.request_id.clone();
    let upstreams = || weighted_upstreams.upstreams().map(|index| &config.upstreams[index]);
    // For `host = "server"`, and for requests without a host, `Host` is the authority of the server. The report shows the
    // authority of the first server.
    let authority = upstreams().next().map_or("", |upstream| &*upstream.servers[0].authority);
    let of_upstream = upstreams().next().map_or(&HostPolicy::Client, |upstream| &upstream.host);
    let host = route.upstream_host.as_ref().unwrap_or(of_upstream);
    let header_values = &route.request_headers.render_without_literals(|variable| variables.content(variable));
    // The client certificate is unknown here, so the report lists the headers for the certificate only as removed.
    let client_cert = upstreams().any(|upstream| upstream.client_cert_header).then_some(None);
    let request_info = UpstreamRequestInfo {
        credentials,
        forwarded: &peer.forwarded,
        request_id,
        trace: None,
        host,
        authority,
        length,
        header_rules: &route.request_headers,
        header_values,
        client_cert,
    };
    let upgrade_request = prepare_upstream_headers(config, route, &mut forwarded_request, request_info);
    let is_upgrade = upgrade_request.is_some();
    if let Some(upgrade_request) = upgrade_request {
        upgrade_request.insert_into(forwarded_request.headers_mut());
    }
    let forwarded_headers = forwarded_request.headers();
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
            skipped: if head.headers.contains_key(&MIRROR_HEADER) {
                Some("the request is itself a mirrored copy")
            } else if is_upgrade {
                Some("the request offers to upgrade the connection")
            } else if length.is_some_and(|length| length > mirror.max_body as u64) {
                Some("the body of the request is larger than `max_body`")
            } else {
                None
            },
        }),
    }
}

// Functions that explain the response.

/// Return whether the header rules set a header to a value of the configuration. Such a value may be a secret.
fn is_configured(mutations: &HeaderMutations, name: &str) -> bool {
    mutations.set.iter().any(|(set, _)| *set == *name)
}

/// Report the response to a rejected request. `variables` are the variables of the matching route, if the request
/// matches a route.
pub(super) fn rejection_response(
    rejection: Rejection<'_>,
    variables: Option<&RequestVariables<'_>>,
    cors: Option<&CorsDecision<'_>>,
    format: ReplyFormat<'_>,
) -> ResponseReport {
    let (mut response, outcome) = rejection.into_response(format);
    let mut own = Vec::new();
    let mutations = variables.map(|variables| &variables.route.response_headers);
    if let (Some(variables), Some(mutations)) = (variables, mutations) {
        own.extend(response.headers().keys().cloned());
        let values = mutations.render_without_literals(|variable| variables.content(variable));
        mutations.apply_to_rejection(response.headers_mut(), &values);
    }
    if let Some(cors) = cors {
        cors.apply(response.headers_mut());
    }
    gateway_response(response, outcome.label(), |name| {
        mutations.is_some_and(|mutations| is_configured(mutations, name)) && !own.iter().any(|own| own.as_str() == name)
    })
}

/// Report a response that is neither an error nor the response of a route.
pub(super) fn answer_response(answer: Answer, cors: Option<&CorsDecision<'_>>) -> ResponseReport {
    let (mut response, outcome) = answer.into_response();
    if let Some(cors) = cors {
        cors.apply(response.headers_mut());
    }
    gateway_response(response, outcome.label(), |_| false)
}

/// Report the response to a request that the limits admit.
///
/// # Errors
/// The action of the route rejects the request.
pub(super) fn admitted_response(
    request: &Request<()>,
    variables: &RequestVariables<'_>,
    admitted: Admitted<'_>,
    limits: &PeekedLimits,
    cors: Option<&CorsDecision<'_>>,
) -> Result<ResponseReport, Rejection<'static>> {
    let Admitted { route, mut decision, forwarded_path, .. } = admitted;
    let mutations = &route.response_headers;
    let values = mutations.render_without_literals(|variable| variables.content(variable));
    let is_configured = |name: &str| is_configured(mutations, name);
    let apply_headers = |headers: &mut HeaderMap, decision: &Decision<'_>| {
        mutations.apply(headers, &values);
        route.rate_limits.append_headers(headers, decision, route.rate_limits.policy_header.as_ref());
        if let Some(cors) = cors {
            cors.apply(headers);
        }
    };
    let response = match &route.action {
        RouteAction::Forward(_) => {
            let mut headers = HeaderMap::new();
            limits.charge(&mut decision, route, None);
            apply_headers(&mut headers, &decision);
            let removed = mutations.remove.iter().map(ToString::to_string).collect();
            return Ok(ResponseReport {
                source: "upstream",
                outcome: "ok",
                headers: header_reports(&headers, is_configured),
                removed_headers: removed,
                ..ResponseReport::default()
            });
        }
        RouteAction::DirectResponse(direct_response) => direct_response.response(),
        RouteAction::Readiness => DirectResponse::readiness(true).response(),
        RouteAction::Redirect(redirect) => {
            let path = forwarded_path.as_deref().unwrap_or(request.uri().path());
            redirect.response(request, &route.path_pattern, path)?
        }
    };
    let result = Ok(Box::new(response));
    limits.charge(&mut decision, route, Some(&result));
    let mut response = result.map_err(Rejection::Upstream)?;
    apply_headers(response.headers_mut(), &decision);
    Ok(gateway_response(response, "ok", is_configured))
}

fn gateway_response(
    response: Box<Response<Body>>,
    outcome: &'static str,
    is_configured: impl Fn(&str) -> bool,
) -> ResponseReport {
    let (parts, body) = response.into_parts();
    // Poll the body only once, because a body that the gateway generates is available immediately.
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

/// Report headers, but omit the values that the configuration sets, because they may be secrets.
pub(super) fn header_reports(headers: &HeaderMap, is_configured: impl Fn(&str) -> bool) -> Vec<HeaderReport> {
    let to_report = |(name, value): (&http::HeaderName, &http::HeaderValue)| HeaderReport {
        name: name.to_string(),
        value: (!is_configured(name.as_str())).then(|| String::from_utf8_lossy(value.as_bytes()).into_owned()),
    };
    headers.iter().map(to_report).collect()
}
