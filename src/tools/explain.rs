//! Explains how the gateway would handle a request. This module calls the same functions as the gateway, but forwards
//! nothing and charges no limit.

pub mod limits;
pub mod report;
mod routing;

use std::net::IpAddr;

use http::header::{CONTENT_LENGTH, ORIGIN};
use http::{HeaderMap, Request, Response};
use serde_json::Value;
use tokio::runtime::Builder;

use crate::http::body::Body;
use crate::http::cors;
use crate::http::cors::CorsDecision;
use crate::http::headers;
use crate::http::headers::is_grpc_call;
use crate::identity::access::{AccessDecision, AccessRules, ListSource};
use crate::identity::api_key::Caller;
use crate::identity::auth::{AuthError, AuthProvider, Credentials, Proof, ProviderKind, Verification};
use crate::identity::basic::BasicProvider;
use crate::limiter::decision::LimitCheck;
use crate::limiter::verdict::Verdict;
use crate::payload::json::body::JsonBody;
use crate::proxy::authentication::{AuthRejection, auth_request, authenticate};
use crate::proxy::body as inspection;
use crate::proxy::body::{BodyContent, UnreadBody};
use crate::proxy::context::Peer;
use crate::proxy::forward::RequestVariables;
use crate::proxy::llm;
use crate::proxy::local_reply::Rejection;
use crate::proxy::rate_limit::{LimitContext, build_checks, build_unauthenticated_checks};
use crate::proxy::{RequestTarget, access_rules, check_host, origin_form, routing_rejection};
use crate::routing::NoMatch;
use crate::routing::condition::RouteBody;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::{Route, RouteAction, RouteLimits};
use crate::tools::explain::limits::{Counters, CountersUnavailable};
use crate::tools::explain::report::{AccessReport, AuthReport, ClientReport, CorsReport, Explanation, ResponseReport};
use crate::upstream::UpstreamError;

/// A configuration and the counters of its limits.
#[derive(Debug)]
pub struct Explainer<'a, C: ?Sized> {
    /// The configuration that handles the request.
    pub config: &'a CompiledConfig,
    /// Read access to the counters of the limits.
    pub counters: &'a C,
    /// The body of the request. An empty body means that the request has none.
    pub body: &'a [u8],
    /// Maximum number of routes to explain, apart from the matching route. The closest match is first.
    pub max_other_routes: usize,
}

/// Results that the steps of an explanation pass to later steps.
#[derive(Default)]
struct Found<'c> {
    route: Option<&'c Route>,
    cors: Option<CorsDecision<'c>>,
    credentials: Credentials<'c>,
    /// The id of the JSON-RPC message in the body of the request.
    rpc_id: Option<Value>,
}

/// Return the values of the variables in header rules.
fn variables<'v>(
    route: &'v Route,
    request: &'v Request<()>,
    peer: &'v Peer,
    credentials: &'v Credentials<'v>,
) -> RequestVariables<'v, ()> {
    let request_id = routing::displayed_request_id(request.headers(), peer);
    RequestVariables { route, peer, credentials, request, request_id }
}

impl<C: Counters + ?Sized> Explainer<'_, C> {
    /// Explain how the gateway would handle a request from this peer address.
    pub fn explain(&self, received: &Request<()>, peer: &Peer) -> Explanation {
        let mut request = received.clone();
        headers::normalize_received(request.headers_mut(), &self.config.protected_headers, peer.forwarded.trusted);
        let request = &request;
        let client = peer.client_address(request.headers());
        let mut explanation = Explanation {
            method: request.method().to_string(),
            host: None,
            path: None,
            raw_path: request.uri().path().to_owned(),
            client: ClientReport {
                address: client,
                peer: peer.address,
                trusted: peer.forwarded.trusted,
                header: (client != peer.address).then(|| self.config.client_ip.header.to_string()),
            },
            listener: self.listener_name(peer.listener),
            route: None,
            other_routes: Vec::new(),
            other_routes_omitted: 0,
            access: Vec::new(),
            cors: None,
            store: self.config.store.name.clone(),
            counters_unavailable: None,
            authentication: Vec::new(),
            limits: Vec::new(),
            decision: None,
            response: ResponseReport::default(),
            upstream: None,
        };
        let mut found = Found::default();
        let requests = (request, received.headers());
        explanation.response = match self.evaluate(requests, peer, &mut explanation, &mut found) {
            Ok(answer) => answer,
            Err(rejection) => {
                let Found { route, credentials, cors, rpc_id } = &found;
                let variables = route.map(|route| variables(route, request, peer, credentials));
                let proxy_status = self.config.server.proxy_status;
                let format = (proxy_status, rpc_id.as_ref());
                routing::rejection_response(rejection, variables.as_ref(), cors.as_ref(), format)
            }
        };
        explanation
    }

    /// Run the same steps as the gateway for a request, and record each result in `explanation` and `found`.
    fn evaluate<'c>(
        &'c self,
        (request, received): (&Request<()>, &HeaderMap),
        peer: &Peer,
        explanation: &mut Explanation,
        found: &mut Found<'c>,
    ) -> Result<ResponseReport, Rejection<'c>> {
        let config = self.config;
        let target = RequestTarget::from_request(request, &config.server)?;
        explanation.host = Some(target.host.to_string());
        explanation.path = Some(target.path.to_string());
        let preflight_route = target.find_preflight_route(config, request, peer.listener);
        let has_tokens = config.body_inspection.reads_tokens;
        let mut content = match self.unreadable_body(request) {
            Some(error) => BodyContent::Unread(error),
            None => BodyContent::from_bytes(self.body, &config.body_inspection, has_tokens),
        };
        let no_values = JsonBody::default();
        let find_route = |body: RouteBody<'_>| target.find_route(config, request, peer.listener, body);
        let route = match preflight_route.map_or_else(|| find_route(RouteBody::Unread), Ok) {
            Ok(route) => Ok(route),
            Err(NoMatch::NeedsBody) => {
                content.require(config.server.inspect_body).map_err(Rejection::Inspect)?;
                find_route(RouteBody::Read(content.json().unwrap_or(&no_values))).map_err(routing_rejection)
            }
            Err(error) => Err(routing_rejection(error)),
        };
        found.route = route.as_ref().ok().copied();
        let is_preflight = preflight_route.is_some();
        // Look up the route of a preflight by the method in `Access-Control-Request-Method`.
        let requested_method =
            preflight_route.and_then(|_| cors::requested_method(request.method(), request.headers()));
        let mut route_request = target.route_request(request, peer.listener);
        route_request.method = requested_method.as_ref().unwrap_or(request.method());
        route_request.body = match is_preflight {
            true => RouteBody::Unknown,
            false => RouteBody::Read(content.json().unwrap_or(&no_values)),
        };
        let comparison = routing::Comparison::new(config, &route_request, found.route.map(|route| route.index));
        (explanation.other_routes, explanation.other_routes_omitted) = comparison.other_routes(self.max_other_routes);
        explanation.route = found.route.map(|route| comparison.matched_route(route));
        let policy = found.route.and_then(|route| route.cors.as_deref());
        found.cors = policy.map(|policy| policy.decide(request.headers(), is_preflight));
        explanation.cors = found.cors.as_ref().map(|cors| cors_report(cors, request, is_preflight));
        check_host(config, &target)?;
        let rules = access_rules(config, peer.listener, found.route);
        explanation.access = access_reports(rules, explanation.client.address);
        if explanation.access.iter().any(|report| !report.allowed) {
            return Err(Rejection::Forbidden);
        }
        let route = route?;
        if let Some(cors) = found.cors.as_ref().filter(|_| is_preflight) {
            return Err(Rejection::Preflight(Box::new(cors.preflight_headers(request.headers()))));
        }
        let length = if self.body.is_empty() { body_length(request.headers()) } else { Some(self.body.len() as u64) };
        if route.max_body.zip(length).is_some_and(|(max, length)| length > max) {
            return Err(Rejection::BodyTooLarge);
        }
        let rewritten = target.rewrite(route, request.uri().query())?;
        let limit_context = LimitContext::new(request, &target, peer);
        let (credentials, authenticated) = verify_credentials(config, route, request.headers(), peer);
        found.credentials = credentials;
        let credentials = &found.credentials;
        explanation.authentication = auth_reports(config, route, credentials);
        let is_pending =
            matches!(authenticated, Err(Rejection::Auth(AuthRejection { error: AuthError::Pending(_), .. })));
        let mut llm = None;
        if authenticated.is_ok() || is_pending {
            let body_use = route.rate_limits.body_use(request.method());
            found.rpc_id = content.rpc_id(body_use);
            content.check(body_use, request.headers(), config.server.inspect_body).map_err(Rejection::Inspect)?;
            if let Some(inspection) = route.rate_limits.llm_inspection(request.method()) {
                let path = target.upstream_path(route)?;
                llm = Some(llm::request(&mut content, inspection, &path, request.headers())?);
            }
        }
        let json = content.json();
        let attributes = limit_context.request_attributes(config, route, explanation.client.address, credentials, json);
        let overrides = self.counters.overrides();
        let mut credential_error = None;
        let checks = authenticated
            .and_then(|()| build_checks(config, &route.rate_limits.identities, &route.rate_limits.limits, &attributes));
        let mut checks = match checks {
            Ok(checks) => checks,
            Err(rejection) => {
                explanation.limits = limits::limit_reports(config, route, &attributes, &[], None);
                if !rejection.is_charged() {
                    return Err(rejection);
                }
                credential_error = Some(rejection);
                let RouteLimits { identities, limits, .. } = &route.rate_limits;
                build_unauthenticated_checks(config, identities, limits, &attributes)
            }
        };
        if let Some(table) = &overrides {
            table.apply(&mut checks);
        }
        if let Some(llm) = llm.as_ref().filter(|_| credential_error.is_none()) {
            llm.reserve(&route.rate_limits.limits, &mut checks)?;
        }
        let verdict = self.peek(&checks);
        explanation.limits = limits::limit_reports(config, route, &attributes, &checks, verdict.as_ref().ok());
        if matches!(credential_error, Some(Rejection::Auth(_))) {
            limits::skip_without_credential(&mut explanation.limits);
        }
        let verdict = match verdict {
            Ok(verdict) => Some(verdict),
            Err(CountersUnavailable(reason)) => {
                explanation.counters_unavailable = Some(reason);
                None
            }
        };
        let decide = |response: Option<&Result<Response<Body>, UpstreamError>>| {
            verdict.as_ref().map(|verdict| limits::simulated_decision(verdict, &checks, route, response))
        };
        let decision = decide(None);
        explanation.decision = decision.as_ref().map(|decision| if decision.admitted { "allowed" } else { "denied" });
        if let Some(decision) = decision.filter(|decision| !decision.admitted) {
            return Err(Rejection::RateLimited {
                decision,
                rate_limits: &route.rate_limits,
                is_grpc: is_grpc_call(request),
                provider: llm.as_ref().map(|llm| llm.provider),
            });
        }
        match credential_error {
            Some(Rejection::Auth(AuthRejection { error: AuthError::Pending(_), .. })) => {
                let (source, outcome) = ("authentication-server", "undecided");
                return Ok(ResponseReport { source, outcome, ..ResponseReport::default() });
            }
            Some(rejection) => return Err(rejection),
            None => {}
        }
        let variables = variables(route, request, peer, credentials);
        if let RouteAction::Forward(weighted_upstreams) = &route.action {
            let forwarded_path = (target.forwarded_path() != request.uri().path()).then(|| target.forwarded_path());
            let target = rewritten.or_else(|| origin_form(request.uri(), forwarded_path));
            let target = target.as_ref().or(request.uri().path_and_query());
            explanation.upstream =
                Some(routing::upstream_report(config, &variables, weighted_upstreams, (target, length), received));
        }
        let cors = found.cors.as_ref();
        routing::admitted_response(&variables, target.forwarded_path(), decide, cors)
    }

    /// Return the reason why the body cannot be read.
    fn unreadable_body(&self, request: &Request<()>) -> Option<UnreadBody> {
        inspection::unreadable(request.headers()).filter(|_| !self.body.is_empty())
    }

    /// Return the name of a listener, or its address if the listener has no name. `None` if no listener has a name.
    fn listener_name(&self, index: usize) -> Option<String> {
        let listeners = &self.config.listeners;
        let listener = listeners.get(index).filter(|_| listeners.iter().any(|listener| listener.name.is_some()))?;
        Some(listener.name.as_ref().map_or_else(|| listener.address.to_string(), ToString::to_string))
    }

    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        if checks.is_empty() { Ok(Verdict::new(1, 0, Vec::new())) } else { self.counters.peek(checks) }
    }
}

/// Return the value of Content-Length, in bytes, or 0 if the request has no body. Return `None` if the length is
/// unknown because of Transfer-Encoding, or if it is invalid.
fn body_length(headers: &HeaderMap) -> Option<u64> {
    if headers.contains_key(http::header::TRANSFER_ENCODING) {
        return None;
    }
    headers.get(CONTENT_LENGTH).map_or(Some(0), |length| length.to_str().ok()?.parse().ok())
}

// === Access rules and CORS ===

/// Report whether the access rules of the listener and of the route allow a client.
fn access_reports(rules: [Option<&AccessRules>; 2], client: IpAddr) -> Vec<AccessReport> {
    let reports = ["listener", "route"].into_iter().zip(rules).filter_map(|(rule, rules)| {
        let decision = rules?.decide(client);
        Some(AccessReport { rule, allowed: decision.is_allowed(), reason: access_reason(decision, client) })
    });
    reports.collect()
}

fn access_reason(decision: AccessDecision<'_>, client: IpAddr) -> String {
    let from = |source| match source {
        ListSource::Inline => String::new(),
        ListSource::File(name) => format!(", from the file {name}"),
    };
    match decision {
        AccessDecision::NotDenied => format!("{client} is not in `deny`"),
        AccessDecision::Allowed(source) => format!("{client} is in `allow`{}", from(source)),
        AccessDecision::Denied(source) => format!("{client} is in `deny`{}", from(source)),
        AccessDecision::NotAllowed => format!("{client} is not in `allow`"),
    }
}

/// Report whether the CORS policy allows the origin of a request.
fn cors_report(cors: &CorsDecision<'_>, request: &Request<()>, is_preflight: bool) -> CorsReport {
    let origin = request.headers().get(ORIGIN);
    CorsReport {
        origin: origin.map(|origin| String::from_utf8_lossy(origin.as_bytes()).into_owned()),
        allowed: cors.is_allowed(),
        preflight: is_preflight,
    }
}

// === Authentication ===

/// Verify the credentials of a request as a gateway does, including the comparison of passwords with their hashes. This
/// function does not fetch key sets of issuers and does not call authentication servers. If verification would need one
/// of them, this function returns the error [`AuthError::Pending`].
fn verify_credentials<'a>(
    config: &'a CompiledConfig,
    route: &'a Route,
    headers: &HeaderMap,
    peer: &Peer,
) -> (Credentials<'a>, Result<(), Rejection<'a>>) {
    let (mut credentials, mut result) = authenticate(config, route, headers, peer);
    let request = auth_request(route, headers, peer);
    while let Err(Rejection::Auth(AuthRejection { error: AuthError::Pending(index), challenges })) = &result {
        let (index, challenges) = (*index, *challenges);
        let verification = match &config.auth.providers[index].kind {
            ProviderKind::Basic(basic) => hash_password(basic, headers, peer.address),
            ProviderKind::Jwt(verifier) => verifier.verify_with_current_keys(&request),
            _ => break,
        };
        let resumed = credentials.resume(index, verification, &request);
        result = resumed.map_err(|error| Rejection::Auth(AuthRejection { error, challenges }));
    }
    (credentials, result)
}

fn hash_password(basic: &BasicProvider, headers: &HeaderMap, client: IpAddr) -> Verification {
    match Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime.block_on(basic.verify_with_hash(headers, client)),
        Err(_) => Verification::Unavailable(AuthError::Unavailable("the password cannot be hashed")),
    }
}

/// Report the authentication providers of a route: first the checked providers, in the order in which they were
/// checked, then the providers that were not checked.
fn auth_reports(config: &CompiledConfig, route: &Route, credentials: &Credentials<'_>) -> Vec<AuthReport> {
    let Some(auth) = &route.auth else { return Vec::new() };
    let mut reports: Vec<AuthReport> =
        credentials.checked().map(|(provider, verification)| verification_report(provider, verification)).collect();
    for index in &auth.providers {
        let provider = &config.auth.providers[*index];
        if !reports.iter().any(|report| *report.provider == *provider.name) {
            let reason = "not checked, because an earlier check was decisive".to_owned();
            reports.push(auth_report(provider, "not_checked", reason));
        }
    }
    reports
}

fn verification_report(provider: &AuthProvider, verification: &Verification) -> AuthReport {
    let (result, reason) = match verification {
        Verification::Absent => ("absent", format!("the request has no {}", credential(provider))),
        Verification::Foreign(error) => ("foreign", format!("the credential is not for this provider: {error}")),
        Verification::Valid(proof) => ("valid", proof_text(provider, proof)),
        Verification::Invalid(error) => ("invalid", error.to_string()),
        Verification::Forbidden(error) => ("forbidden", error.to_string()),
        Verification::Unavailable(error) => ("unavailable", error.to_string()),
        Verification::Pending => ("pending", pending_text(provider)),
    };
    auth_report(provider, result, reason)
}

fn auth_report(provider: &AuthProvider, result: &'static str, reason: String) -> AuthReport {
    AuthReport { provider: provider.name.to_string(), kind: provider.kind.label(), result, reason }
}

fn credential(provider: &AuthProvider) -> &'static str {
    match provider.kind {
        ProviderKind::ApiKey(_) => "API key",
        ProviderKind::Jwt(_) => "bearer token",
        ProviderKind::ClientCert => "client certificate",
        ProviderKind::Basic(_) => "Basic credentials",
        ProviderKind::Forward(_) => "admission",
    }
}

fn pending_text(provider: &AuthProvider) -> String {
    match provider.kind {
        ProviderKind::Forward(_) => "the provider's server decides; explain does not call it",
        _ => "not verified",
    }
    .to_owned()
}

fn proof_text(provider: &AuthProvider, proof: &Proof) -> String {
    match proof {
        Proof::ApiKey(Caller::Consumer(consumer), _) => format!("API key of the consumer {}", consumer.name),
        Proof::ApiKey(Caller::Accepted(_), _) => "unknown API key, accepted because of `on_unknown`".to_owned(),
        Proof::ApiKey(Caller::Anonymous | Caller::Missing, _) => "anonymous, without a known API key".to_owned(),
        Proof::Jwt(claims) => match claims.text("sub") {
            Some(subject) => format!("token of {subject}"),
            None => "token without a subject".to_owned(),
        },
        Proof::ClientCert => format!("the {} of the connection", credential(provider)),
        Proof::Basic(user) => format!("the user {user}"),
        Proof::Forward(_) => "admitted by the authentication server".to_owned(),
    }
}
