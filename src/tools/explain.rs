//! Explains how the gateway would handle a request. The gateway's sequence of admission decides, but nothing is
//! forwarded, and no limit is charged.

pub mod descriptors;
pub mod limits;
pub mod report;
mod routing;

use std::future::ready;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::header::{CONTENT_LENGTH, ORIGIN};
use http::{HeaderMap, Request};
use tokio::runtime::Builder;
use tokio::time::Instant;

use crate::http::cors;
use crate::http::cors::CorsDecision;
use crate::http::headers;
use crate::identity::access::{AccessDecision, AccessRules, ListSource};
use crate::identity::auth::{AuthProvider, Credentials, ProviderKind};
use crate::identity::basic::BasicProvider;
use crate::identity::consumer::Caller;
use crate::identity::spec::RequestAttributes;
use crate::identity::verification::{AuthError, Proof, Verification};
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::overrides::OverrideTable;
use crate::payload::json::body::JsonBody;
use crate::proxy::admission;
use crate::proxy::admission::{Admission, AdmissionIo, Admitted, RequestFacts, Step};
use crate::proxy::body;
use crate::proxy::body::{BodyContent, BodyRead};
use crate::proxy::forward::RequestVariables;
use crate::proxy::local_reply::ReplyFormat;
use crate::proxy::rejection::{Rejection, UnreadBody};
use crate::proxy::request::{Peer, RequestHead, RequestTarget, TargetedRequest, origin_form};
use crate::routing::condition::RouteBody;
use crate::snapshot::CompiledConfig;
use crate::snapshot::route_action::RouteAction;
use crate::snapshot::routes::Route;
use crate::tls::ClientAuth;
use crate::tools::explain::limits::{Counters, PeekedLimits};
use crate::tools::explain::report::{
    AccessReport, AuthReport, ClientReport, CorsReport, Explanation, ResponseReport, UpstreamReport,
};

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

impl<C: Counters + ?Sized> Explainer<'_, C> {
    /// Explain how the gateway would handle a request from this peer address.
    pub fn explain(&self, received: &Request<()>, peer: &Peer) -> Explanation {
        let config = self.config;
        let mut request = received.clone();
        headers::normalize_received(request.headers_mut(), &config.protected_headers, peer.forwarded.trusted);
        let head = RequestHead::from(&request);
        let origin = peer.origin(head.headers);
        let mut facts = RequestFacts::new(config);
        let mut io = ExplainIo { explainer: self, limits: PeekedLimits::default() };
        let admission = run(admission::admit(&mut io, &mut facts, head, origin));
        let target = RequestTarget::from_head(head, &config.server).ok();
        let mut explanation = Explanation {
            method: request.method().to_string(),
            host: target.as_ref().map(|target| target.host.to_string()),
            path: target.as_ref().map(|target| target.path.to_string()),
            raw_path: request.uri().path().to_owned(),
            client: ClientReport {
                address: origin.client,
                peer: peer.address,
                trusted: peer.forwarded.trusted,
                header: (origin.client != peer.address).then(|| config.client_ip.header.to_string()),
            },
            listener: self.listener_name(peer.listener),
            client_certificate: target.as_ref().and_then(|target| self.client_certificate(peer, &target.host)),
            route: None,
            other_routes: Vec::new(),
            other_routes_omitted: 0,
            access: Vec::new(),
            cors: None,
            store: config.store.name.clone(),
            counters_unavailable: None,
            authentication: Vec::new(),
            limits: Vec::new(),
            decision: None,
            response: ResponseReport::default(),
            upstream: None,
        };
        if let Some(target) = &target {
            let request = TargetedRequest { head, target, origin };
            self.explain_facts(&request, &facts, &admission, &mut io.limits, &mut explanation);
        }
        let limits = io.limits;
        let cors = facts.cors.as_deref();
        let request_id = routing::displayed_request_id(head.headers, peer);
        let variables = facts.route.map(|route| RequestVariables {
            route,
            peer,
            credentials: &facts.credentials,
            head,
            request_id,
        });
        let response = match admission {
            Admission::Admitted(admitted) => {
                let variables = variables.as_ref().ok_or(Rejection::NoRoute);
                variables.and_then(|variables| {
                    explanation.upstream = self.upstream(&request, variables, &admitted, received.headers());
                    routing::admitted_response(&request, variables, admitted, &limits, cors)
                })
            }
            Admission::Answered(answer) => Ok(routing::answer_response(answer, cors)),
            Admission::Rejected(rejection) => Err(rejection),
            Admission::Undecided(ServerDecides) => {
                let source = "authentication-server";
                let outcome = "undecided";
                Ok(ResponseReport { source, outcome, ..ResponseReport::default() })
            }
        };
        explanation.response = response.unwrap_or_else(|rejection| {
            let pages = facts.route.map_or(&config.server.error_pages, |route| &route.error_pages);
            let format = ReplyFormat {
                request_id: None,
                proxy_status: config.server.proxy_status,
                rpc_id: facts.rpc_id.as_ref(),
                api: facts.api,
                is_grpc: headers::is_grpc_call(head.method, head.version, head.headers),
                error_page: pages.as_ref().and_then(|pages| pages.select(head.headers)),
                policy_header: facts.route.and_then(|route| route.rate_limits.policy_header.as_ref()),
            };
            routing::rejection_response(rejection, variables.as_ref(), cors, format)
        });
        explanation
    }

    /// Report what the sequence found out about a request.
    fn explain_facts(
        &self,
        request: &TargetedRequest<'_>,
        facts: &RequestFacts<'_>,
        admission: &Admission<'_, ServerDecides>,
        peeked: &mut PeekedLimits,
        explanation: &mut Explanation,
    ) {
        let config = self.config;
        let headers = request.head.headers;
        let reads_tokens = config.body_inspection.reads_tokens;
        let content = self.content(headers, config.server.inspect_body, reads_tokens);
        let is_preflight = request.find_preflight_route(config).is_some();
        // Look up the route of a preflight by the method in `Access-Control-Request-Method`.
        let requested_method = cors::requested_method(request.head.method, headers).filter(|_| is_preflight);
        let no_values = JsonBody::default();
        let mut route_request = request.route_request(match is_preflight {
            true => RouteBody::Unknown,
            false => RouteBody::Read(content.json().unwrap_or(&no_values)),
        });
        route_request.method = requested_method.as_ref().unwrap_or(request.head.method);
        let comparison = routing::Comparison::new(config, &route_request, facts.route.map(|route| route.index));
        (explanation.other_routes, explanation.other_routes_omitted) = comparison.other_routes(self.max_other_routes);
        explanation.route = facts.route.map(|route| comparison.matched_route(route));
        explanation.cors = facts.cors.as_ref().map(|cors| cors_report(cors, headers, is_preflight));
        if !matches!(admission, Admission::Rejected(Rejection::UnknownHost)) {
            let rules = admission::access_rules(config.listeners.get(request.origin.listener), facts.route);
            explanation.access = access_reports(rules, request.origin.client);
        }
        let Some(route) = facts.route else { return };
        if facts.step >= Step::Authentication {
            explanation.authentication = auth_reports(config, route, &facts.credentials);
        }
        // The body may be rejected before any limit is checked, or after the limits that need no credential.
        let is_unchecked = matches!(admission, Admission::Rejected(Rejection::Inspect(_))) && peeked.decision.is_none();
        if facts.step >= Step::Limits && !is_unchecked {
            let attributes = request.attributes(config, route, &facts.credentials, content.json());
            explanation.limits = limits::limit_reports(config, route, &attributes, peeked);
            if !facts.is_authenticated {
                limits::skip_without_credential(&mut explanation.limits);
            }
        }
        explanation.counters_unavailable = peeked.unavailable.take();
        explanation.decision = peeked.decision;
    }

    /// Report the request that an upstream would receive. Return `None` if the gateway would forward nothing.
    fn upstream(
        &self,
        request: &Request<()>,
        variables: &RequestVariables<'_>,
        admitted: &Admitted<'_>,
        received: &HeaderMap,
    ) -> Option<UpstreamReport> {
        let RouteAction::Forward(weighted_upstreams) = &admitted.route.action else { return None };
        let target = admitted.rewritten_target.clone();
        let target = target.or_else(|| origin_form(request.uri(), admitted.forwarded_path.as_deref()));
        let target = target.as_ref().or(request.uri().path_and_query());
        let length = self.body_length(request.headers());
        let forwarded = request.clone();
        Some(routing::upstream_report(self.config, variables, weighted_upstreams, forwarded, target, length, received))
    }

    /// Return the content of the body of a request with these headers.
    fn content(&self, headers: &HeaderMap, max_read: usize, reads_tokens: bool) -> BodyContent {
        let inspection = &self.config.body_inspection;
        match body::format(headers, inspection) {
            _ if self.body.is_empty() => BodyContent::Empty,
            Err(reason) => BodyContent::Unread(reason),
            Ok(_) if self.body.len() > max_read => BodyContent::Unread(UnreadBody::TooLong(max_read)),
            Ok(format) => BodyContent::from_bytes(self.body, &format, inspection, reads_tokens),
        }
    }

    /// Return the length of the body in bytes, or the value of Content-Length if the body is not given. Return `None` if
    /// the length is unknown because of Transfer-Encoding, or if it is invalid.
    fn body_length(&self, headers: &HeaderMap) -> Option<u64> {
        if !self.body.is_empty() {
            return Some(self.body.len() as u64);
        }
        if headers.contains_key(http::header::TRANSFER_ENCODING) {
            return None;
        }
        headers.get(CONTENT_LENGTH).map_or(Some(0), |length| length.to_str().ok()?.parse().ok())
    }

    /// Return the name of a listener, or its address if the listener has no name. `None` if no listener has a name.
    fn client_certificate(&self, peer: &Peer, host: &str) -> Option<String> {
        let tls =
            self.config.listeners.get(peer.listener)?.tls.as_ref().filter(|_| peer.forwarded.scheme == "https")?;
        let (file, auth) = tls.clients[tls.tls.policy_index(host)].ca.as_ref()?;
        (*auth == ClientAuth::Required).then(|| format!("required, issued by a CA in {}", file.path.display()))
    }

    fn listener_name(&self, index: usize) -> Option<String> {
        let listeners = &self.config.listeners;
        let listener = listeners.get(index).filter(|_| listeners.iter().any(|listener| listener.name.is_some()))?;
        Some(listener.name.as_ref().map_or_else(|| listener.address.to_string(), ToString::to_string))
    }
}

// === The input and output of the sequence ===

/// The input and output of the sequence for an explanation. It charges nothing and calls no server.
struct ExplainIo<'e, C: ?Sized> {
    explainer: &'e Explainer<'e, C>,
    limits: PeekedLimits,
}

/// An authentication server decides about the request. `explain` does not call this server.
struct ServerDecides;

/// Run the sequence to its end. It never waits, because [`ExplainIo`] returns only futures that are ready.
fn run<F: Future>(sequence: F) -> F::Output {
    let mut sequence = pin!(sequence);
    loop {
        if let Poll::Ready(output) = sequence.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}

impl<C: Counters + ?Sized> AdmissionIo for ExplainIo<'_, C> {
    type Undecided = ServerDecides;

    fn body_length(&self, head: RequestHead<'_>) -> u64 {
        self.explainer.body_length(head.headers).unwrap_or(0)
    }

    fn read_body(
        &mut self,
        head: RequestHead<'_>,
        read: BodyRead,
    ) -> impl Future<Output = Result<BodyContent, Rejection<'static>>> + Send {
        ready(Ok(self.explainer.content(head.headers, read.max_read, read.reads_tokens)))
    }

    /// Verify a credential as a gateway does, including the comparison of passwords with their hashes. Do not fetch key
    /// sets of issuers.
    fn verify(
        &mut self,
        request: &TargetedRequest<'_>,
        route: &Route,
        _: Option<Instant>,
        provider: usize,
    ) -> impl Future<Output = Result<Verification, ServerDecides>> + Send {
        ready(match &self.explainer.config.auth.providers[provider].kind {
            ProviderKind::Basic(basic) => Ok(hash_password(basic, request.head.headers, request.origin.client)),
            ProviderKind::Jwt(verifier) => Ok(verifier.verify_with_current_keys(&request.auth_request(route))),
            ProviderKind::Forward(_) | ProviderKind::ApiKey(_) | ProviderKind::ClientCert => Err(ServerDecides),
        })
    }

    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.explainer.counters.overrides()
    }

    fn check<'a>(
        &mut self,
        checks: &[LimitCheck<'a, '_>],
    ) -> impl Future<Output = Result<Decision<'a>, StoreUnavailable>> + Send {
        ready(Ok(self.limits.peek(self.explainer.counters, checks)))
    }

    fn refund(&mut self, _: &mut Decision<'_>) -> impl Future<Output = ()> + Send {
        self.limits.is_refunded = true;
        ready(())
    }

    fn decided(
        &mut self,
        route: &Route,
        checks: &[LimitCheck<'_, '_>],
        decision: &Result<Decision<'_>, StoreUnavailable>,
        attributes: &RequestAttributes<'_>,
    ) {
        if let Ok(decision) = decision {
            self.limits.decided(self.explainer.config, route, checks, decision, attributes);
        }
    }
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
fn cors_report(cors: &CorsDecision<'_>, headers: &HeaderMap, is_preflight: bool) -> CorsReport {
    let origin = headers.get(ORIGIN);
    CorsReport {
        origin: origin.map(|origin| String::from_utf8_lossy(origin.as_bytes()).into_owned()),
        allowed: cors.is_allowed(),
        preflight: is_preflight,
    }
}

// === Authentication ===

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
        ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::ClientCert | ProviderKind::Basic(_) => {
            "not verified"
        }
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
