//! Explanation of a request: calls the functions of the request path, but sends nothing and charges nothing.

mod authentication;
pub mod limits;
pub mod report;
mod routing;

use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Request};

use crate::http::headers::is_grpc_call;
use crate::identity::auth::AuthError;
use crate::limiter::decision::LimitCheck;
use crate::limiter::verdict::Verdict;
use crate::proxy::authentication::AuthRejection;
use crate::proxy::context::Peer;
use crate::proxy::local_reply::Rejection;
use crate::proxy::rate_limit::{LimitContext, build_checks, build_unauthenticated_checks};
use crate::proxy::target::{RequestTarget, origin_form};
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::{RouteAction, RouteLimits};
use crate::tools::explain::limits::{Counters, CountersUnavailable};
use crate::tools::explain::report::{ClientReport, Explanation, ResponseReport};

/// A configuration and its counters.
#[derive(Debug)]
pub struct Explainer<'a, C: ?Sized> {
    /// The configuration.
    pub config: &'a CompiledConfig,
    /// Read access to the counters of the limits.
    pub counters: &'a C,
    /// Maximum number of other routes to explain, closest match first.
    pub max_other_routes: usize,
}

impl<C: Counters + ?Sized> Explainer<'_, C> {
    /// Explain what the gateway would do with a request from this peer.
    pub fn explain(&self, request: &Request<()>, peer: &Peer) -> Explanation {
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
            route: None,
            other_routes: Vec::new(),
            other_routes_omitted: 0,
            store: self.config.store.name.clone(),
            counters_unavailable: None,
            authentication: Vec::new(),
            limits: Vec::new(),
            decision: None,
            response: ResponseReport::default(),
            upstream: None,
        };
        explanation.response = match self.evaluate(request, peer, &mut explanation) {
            Ok(answer) => answer,
            Err(rejection) => routing::rejection_response(rejection),
        };
        explanation
    }

    /// Run the steps of the request path and record each result in `explanation`.
    fn evaluate(
        &self,
        request: &Request<()>,
        peer: &Peer,
        explanation: &mut Explanation,
    ) -> Result<ResponseReport, Rejection<'_>> {
        let config = self.config;
        let target = RequestTarget::from_request(request, &config.server)?;
        explanation.host = Some(target.host.to_string());
        explanation.path = Some(target.path.to_string());
        let route = target.find_route(config, request);
        let route_index = route.as_ref().ok().map(|route| route.index);
        (explanation.other_routes, explanation.other_routes_omitted) =
            routing::other_routes(config, request, &target, route_index, self.max_other_routes);
        let route = route?;
        explanation.route = Some(routing::matched_route(route));
        let length = body_length(request.headers());
        if route.max_body.zip(length).is_some_and(|(max, length)| length > max) {
            return Err(Rejection::BodyTooLarge);
        }
        let rewritten = target.rewrite(route, request.uri().query())?;
        let (host, path, subject) = (&*target.host, &*target.path, peer.certificate_subject.as_deref());
        let limit_context =
            LimitContext { request, host, path, trusted: peer.forwarded.trusted, certificate_subject: subject };
        let (credentials, authenticated) = authentication::verify(config, route, request.headers(), peer);
        explanation.authentication = authentication::steps(config, route, &credentials);
        let attributes = limit_context.request_attributes(config, route, explanation.client.address, &credentials);
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
        let verdict = self.peek(&checks);
        explanation.limits = limits::limit_reports(config, route, &attributes, &checks, verdict.as_ref().ok());
        if matches!(credential_error, Some(Rejection::Auth(_))) {
            limits::skip_without_credential(&mut explanation.limits);
        }
        let decision = match verdict {
            Ok(verdict) => Some(limits::simulated_decision(verdict, &checks)),
            Err(CountersUnavailable(reason)) => {
                explanation.counters_unavailable = Some(reason);
                None
            }
        };
        explanation.decision = decision.as_ref().map(|decision| if decision.admitted { "allowed" } else { "denied" });
        let decision = match decision {
            Some(decision) if !decision.admitted => {
                return Err(Rejection::RateLimited {
                    decision,
                    header_styles: &route.rate_limits.header_styles,
                    expose_headers: route.rate_limits.expose_header.as_ref(),
                    is_grpc: is_grpc_call(request),
                });
            }
            decision => decision,
        };
        match credential_error {
            Some(Rejection::Auth(AuthRejection { error: AuthError::Pending(_), .. })) => {
                let (source, outcome) = ("authentication-server", "undecided");
                return Ok(ResponseReport { source, outcome, ..ResponseReport::default() });
            }
            Some(rejection) => return Err(rejection),
            None => {}
        }
        if let RouteAction::Forward(weighted_upstreams) = &route.action {
            let forwarded_path = (target.forwarded_path() != request.uri().path()).then(|| target.forwarded_path());
            let target = rewritten.or_else(|| origin_form(request.uri(), forwarded_path));
            let target = target.as_ref().or(request.uri().path_and_query());
            let upstream = (weighted_upstreams, target, length);
            explanation.upstream =
                Some(routing::upstream_report(config, (route, &credentials), request, peer, upstream));
        }
        Ok(routing::admitted_response(route, request, target.forwarded_path(), decision.as_ref()))
    }

    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        if checks.is_empty() { Ok(Verdict::new(1, 0, Vec::new())) } else { self.counters.peek(checks) }
    }
}

/// The length of the body in bytes, by Content-Length. None if it is unknown (Transfer-Encoding) or invalid.
fn body_length(headers: &HeaderMap) -> Option<u64> {
    if headers.contains_key(http::header::TRANSFER_ENCODING) {
        return None;
    }
    headers.get(CONTENT_LENGTH).map_or(Some(0), |length| length.to_str().ok()?.parse().ok())
}
