//! Explains what the gateway would do with a request, by what the gateway itself asks: nothing is sent, nothing is charged.

mod answer;
pub mod counters;
pub mod facts;
mod limits;
mod onward;
mod routes;

use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Request};

use crate::gateway::Peer;
use crate::gateway::addressed::{RequestTarget, origin_form};
use crate::gateway::ask::{LimitContext, build_checks, build_unauthenticated_checks};
use crate::http::headers::is_grpc_call;
use crate::limit::decision::LimitCheck;
use crate::limit::store::Verdict;
use crate::reply::Rejection;
use crate::runtime::{CompiledConfig, RouteAction};
use counters::{Counters, Unseen};
use facts::{Answer, Client, Explanation};

/// A configuration, and where its counters are looked at.
#[derive(Debug)]
pub struct Explainer<'a, C: ?Sized> {
    /// The configuration.
    pub runtime: &'a CompiledConfig,
    /// Where identities stand.
    pub counters: &'a C,
    /// So many of the routes that do not take the request are explained, the nearest first.
    pub routes: usize,
}

impl<C: Counters + ?Sized> Explainer<'_, C> {
    /// What the gateway would do with a request from this peer.
    pub fn explain(&self, request: &Request<()>, peer: &Peer) -> Explanation {
        let client = peer.client_address(request.headers());
        let mut facts = Explanation {
            method: request.method().to_string(),
            host: None,
            path: None,
            raw_path: request.uri().path().to_owned(),
            client: Client {
                address: client,
                peer: peer.address,
                trusted: peer.forwarded.trusted,
                header: (client != peer.address).then(|| self.runtime.client_ip.header.to_string()),
            },
            route: None,
            other_routes: Vec::new(),
            other_routes_omitted: 0,
            store: self.runtime.store.name.clone(),
            counters_unavailable: None,
            limits: Vec::new(),
            decision: None,
            response: Answer::default(),
            upstream: None,
        };
        facts.response = match self.walk(request, peer, &mut facts) {
            Ok(answer) => answer,
            Err(rejection) => answer::rejected(rejection),
        };
        facts
    }

    /// The way of a request through the gateway, with a note at each step.
    fn walk(&self, request: &Request<()>, peer: &Peer, facts: &mut Explanation) -> Result<Answer, Rejection<'_>> {
        let runtime = self.runtime;
        let target = RequestTarget::from_request(request, &runtime.server)?;
        facts.host = Some(target.host.to_string());
        facts.path = Some(target.path.to_string());
        let route = target.find_route(runtime, request);
        let taken = route.as_ref().ok().map(|route| route.index);
        (facts.other_routes, facts.other_routes_omitted) =
            routes::others(runtime, request, &target, taken, self.routes);
        let route = route?;
        facts.route = Some(routes::taken(route));
        let length = body_length(request.headers());
        if route.max_body.zip(length).is_some_and(|(most, length)| length > most) {
            return Err(Rejection::BodyTooLarge);
        }
        let rewritten = target.rewrite(route, request.uri().query())?;
        let (host, path, subject) = (&*target.host, &*target.path, peer.certificate_subject.as_deref());
        let asked = LimitContext { request, host, path, trusted: peer.forwarded.trusted, certificate_subject: subject };
        let consumers = route.rate_limits.uses_api_key.then(|| runtime.consumers.load());
        let consumers = consumers.as_deref().map(|consumers| &**consumers);
        let asker = asked.request_attributes(runtime, route, facts.client.address, consumers);
        let overrides = self.counters.overrides();
        let mut without_credential = None;
        let mut checks = match build_checks(runtime, &route.rate_limits.identities, &route.rate_limits.limits, &asker) {
            Ok(checks) => checks,
            Err(rejection) => {
                facts.limits = limits::limited(runtime, route, &asker, &[], None);
                if !matches!(&rejection, Rejection::Identity(error) if error.is_credential_error()) {
                    return Err(rejection);
                }
                without_credential = Some(rejection);
                build_unauthenticated_checks(runtime, &route.rate_limits.identities, &route.rate_limits.limits, &asker)
            }
        };
        if let Some(table) = &overrides {
            table.apply(&mut checks);
        }
        let verdict = self.look(&checks);
        facts.limits = limits::limited(runtime, route, &asker, &checks, verdict.as_ref().ok());
        let decision = match verdict {
            Ok(verdict) => Some(limits::decision(verdict, &checks)),
            Err(Unseen(why)) => {
                facts.counters_unavailable = Some(why);
                None
            }
        };
        facts.decision = decision.as_ref().map(|decision| if decision.admitted { "allowed" } else { "denied" });
        let decision = match decision {
            Some(decision) if !decision.admitted => {
                return Err(Rejection::RateLimited {
                    decision,
                    header_styles: &route.rate_limits.header_styles,
                    expose_headers: route.rate_limits.expose_header.as_ref(),
                    is_grpc: is_grpc_call(request),
                });
            }
            other => other,
        };
        if let Some(rejection) = without_credential {
            return Err(rejection);
        }
        if let RouteAction::Forward(split) = &route.action {
            let other = (target.forwarded_path() != request.uri().path()).then(|| target.forwarded_path());
            let target = rewritten.or_else(|| origin_form(request.uri(), other));
            let target = target.as_ref().or(request.uri().path_and_query());
            facts.upstream = Some(onward::onward(runtime, route, split, request, peer, (target, length)));
        }
        Ok(answer::admitted(route, request, target.forwarded_path(), decision.as_ref()))
    }

    fn look(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, Unseen> {
        if checks.is_empty() { Ok(Verdict::new(1, 0, Vec::new())) } else { self.counters.look(checks) }
    }
}

/// Bytes of a body, as the head says; none if it does not.
fn body_length(headers: &HeaderMap) -> Option<u64> {
    if headers.contains_key(http::header::TRANSFER_ENCODING) {
        return None;
    }
    headers.get(CONTENT_LENGTH).map_or(Some(0), |length| length.to_str().ok()?.parse().ok())
}
