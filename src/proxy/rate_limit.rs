//! Asks the limits of a route, settles what the response decides, and tells the caller.

use std::net::IpAddr;

use http::header::ACCESS_CONTROL_EXPOSE_HEADERS;
use http::{HeaderMap, Request, Response};
use tracing::warn;

use crate::http::body::Body;
use crate::http::ratelimit_headers;
use crate::http::ratelimit_headers::limit_status;
use crate::http::request_body::RequestBody;
use crate::identity::api_key::{Caller, Consumers};
use crate::identity::jwt::BearerToken;
use crate::identity::{IdentitySpec, RequestAttributes};
use crate::limiter::Limiter;
use crate::limiter::algorithm::Outcome;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::{Identity, IdentityEncoder};
use crate::limiter::settlement::{Deferred, DeferredCharges, SettleAction, SettleFuture};
use crate::limiter::verdict::StoreError;
use crate::proxy::client::Peer;
use crate::proxy::local_reply::{Rejection, effective_limit, upstream_status};
use crate::proxy::telemetry;
use crate::proxy::telemetry::WorkerMetrics;
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::{CostError, RefundOn};
use crate::snapshot::routes::{Route, RouteLimit};
use crate::telemetry::access_log::RequestRecord;
use crate::upstream::UpstreamError;

/// Asks all limits of a route at once.
pub(super) async fn check_limits<'a>(
    runtime: &'a CompiledConfig,
    limiter: &Limiter,
    metrics: &WorkerMetrics,
    route: &'a Route,
    limit_context: &LimitContext<'_, RequestBody>,
    peer: &Peer,
    mut record: Option<&mut RequestRecord>,
) -> Result<Decision<'a>, Rejection<'a>> {
    let route_limits = &route.rate_limits;
    let client = peer.client_address(limit_context.request.headers());
    if let Some(record) = &mut record {
        record.client = client;
        record.route = Some(route.name.clone());
        record.path_template = record.trace.map(|_| route.path.clone());
    }
    // Counted: what is only borrowed while the store is asked would keep others from borrowing cheaply.
    let consumers = route_limits.uses_api_key.then(|| runtime.consumers.load_full());
    let attributes = limit_context.request_attributes(runtime, route, client, consumers.as_deref());
    let overrides = limiter.overrides.current();
    let mut rejection = None;
    let mut checks = match build_checks(runtime, &route_limits.identities, &route_limits.limits, &attributes) {
        Err(Rejection::Identity(error)) if error.is_credential_error() => {
            rejection = Some(Rejection::Identity(error));
            build_unauthenticated_checks(runtime, &route_limits.identities, &route_limits.limits, &attributes)
        }
        checks => checks?,
    };
    if let Some(table) = &overrides {
        table.apply(&mut checks);
    }
    if checks.is_empty() {
        return rejection.map_or_else(|| Ok(Decision::unlimited()), Err);
    }
    let started_at = monotonic();
    let decision = limiter.check(&checks).await;
    let elapsed = started_at.elapsed();
    metrics.record_decision(route.index, &checks, &decision, elapsed, |check| {
        let spec = &route_limits.identities[route_limits.limits[check.limit_index].identity_index];
        spec.display(&attributes, &runtime.api_key_settings, &runtime.client_ip)
    });
    if let Some(record) = record {
        telemetry::record_decision(record, &checks, &decision, (started_at, elapsed));
    }
    let decision = decision.map_err(Rejection::StoreUnavailable)?;
    // A client that is over a limit learns nothing of its credential.
    match rejection.filter(|_| decision.admitted) {
        Some(rejection) => Err(rejection),
        None => Ok(decision),
    }
}

/// Charges and gives back what the answer says; none if it says nothing.
pub(super) fn settle(
    charges: DeferredCharges,
    route: &Route,
    result: &Result<Response<Body>, UpstreamError>,
) -> Option<SettleFuture> {
    let no_headers = HeaderMap::new();
    let (status, headers) = match result {
        Ok(response) => (response.status(), response.headers()),
        Err(error) => (upstream_status(error), &no_headers),
    };
    let settle_action = |limit_index: usize, later| {
        let route_limit = &route.rate_limits.limits[limit_index];
        // A client does not make its own refund.
        let is_refunded =
            !result.as_ref().is_err_and(UpstreamError::is_client_error) && route_limit.refund_on.contains(status);
        match (is_refunded, later) {
            (true, Deferred::Refund) => SettleAction::Refund,
            (false, Deferred::Charge) => {
                route_limit.cost.response_cost(headers).map_or(SettleAction::Nothing, SettleAction::Charge)
            }
            _ => SettleAction::Nothing,
        }
    };
    charges.settle(settle_action)
}

/// Corrects the standing that the caller is told.
pub(super) fn apply_settlement(decision: &mut Decision<'_>, result: Result<Vec<(usize, Outcome)>, StoreError>) {
    match result {
        Ok(outcomes) => {
            for (limit_index, outcome) in outcomes {
                for limit in decision.results.iter_mut().filter(|judged| judged.limit_index == limit_index) {
                    limit.outcome = outcome;
                }
            }
        }
        Err(error) => warn!(%error, "what the response made of a cost may not have been counted"),
    }
}

/// The RateLimit fields of an admitted request.
pub fn append_ratelimit_headers(headers: &mut HeaderMap, route: &Route, decision: &Decision<'_>) {
    if decision.results.is_empty() {
        return;
    }
    let statuses = || decision.results.iter().map(limit_status);
    let is_standard = decision.results.len() == route.rate_limits.advertised
        && decision.results.iter().all(|judged| judged.quota == judged.limit.default_variant.quota);
    let policy = if is_standard {
        route.rate_limits.policy_header.clone()
    } else {
        ratelimit_headers::ratelimit_policy(statuses())
    };
    ratelimit_headers::append_ratelimit_headers(
        headers,
        &route.rate_limits.header_styles,
        policy,
        statuses(),
        effective_limit(decision),
        decision.now_us,
    );
    if let Some(expose) = &route.rate_limits.expose_header {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, expose.clone());
    }
}

// What the limits of a route are asked about a request: whose units, in which size, and how many.

/// A request that has found its route.
#[derive(Debug)]
pub struct LimitContext<'a, B> {
    /// Its head.
    pub request: &'a Request<B>,
    /// The host that it was routed on.
    pub host: &'a str,
    /// Its path in canonical form.
    pub path: &'a str,
    /// Whether the peer is a trusted proxy.
    pub trusted: bool,
    /// The subject of the client's certificate.
    pub certificate_subject: Option<&'a str>,
}

impl<'a, B> LimitContext<'a, B> {
    /// The same, as far as identities are concerned; `consumers` where a limit of the route is by API key.
    pub fn request_attributes(
        &self,
        runtime: &'a CompiledConfig,
        route: &'a Route,
        client: IpAddr,
        consumers: Option<&'a Consumers>,
    ) -> RequestAttributes<'a> {
        let headers = self.request.headers();
        RequestAttributes {
            method: self.request.method(),
            host: self.host,
            path: self.path,
            query: self.request.uri().query(),
            headers,
            client_address: client,
            client_network: runtime.client_ip.network(client),
            is_from_trusted_proxy: self.trusted,
            client_cert_subject: self.certificate_subject,
            caller: match consumers {
                Some(consumers) => runtime.api_key_settings.caller(consumers, headers),
                None => Ok(Caller::Missing),
            },
            bearer_token: BearerToken::new(&runtime.verifier, headers),
            route_name: &route.name,
            path_pattern: &route.path_pattern,
        }
    }
}

/// What each of these limits is asked, if it applies. `identities` are those that the limits name, by index.
///
/// # Errors
/// The request lacks an identity, or a cost that a trusted proxy has to say.
pub fn build_checks<'a, 'p>(
    runtime: &CompiledConfig,
    identities: &[IdentitySpec],
    limits: &'a [RouteLimit],
    attributes: &RequestAttributes<'p>,
) -> Result<Vec<LimitCheck<'a, 'p>>, Rejection<'static>>
where
    'a: 'p,
{
    let mut encoder = IdentityEncoder::default();
    let resolved = identities
        .iter()
        .map(|spec| spec.identify(attributes, &runtime.api_key_settings, &runtime.hasher, &mut encoder));
    let found: Vec<_> = resolved.collect::<Result<_, _>>().map_err(Rejection::Identity)?;
    let mut checks = Vec::with_capacity(limits.len());
    for (limit_index, route_limit) in limits.iter().enumerate() {
        if let Some(identity) = found[route_limit.identity_index] {
            checks.push(build_check(limit_index, route_limit, identity, attributes).map_err(Rejection::InvalidCost)?);
        }
    }
    Ok(checks)
}

/// The same for a request whose credential does not count: the limits by address. It is charged what it costs at once, and
/// nothing is given back: otherwise guessing credentials would be free. It needs no permit, since it is rejected at once.
pub fn build_unauthenticated_checks<'a, 'p>(
    runtime: &CompiledConfig,
    identities: &[IdentitySpec],
    limits: &'a [RouteLimit],
    attributes: &RequestAttributes<'p>,
) -> Vec<LimitCheck<'a, 'p>>
where
    'a: 'p,
{
    let mut encoder = IdentityEncoder::default();
    let mut checks = Vec::new();
    for (limit_index, route_limit) in limits.iter().enumerate() {
        let spec = &identities[route_limit.identity_index];
        if !spec.limits_unauthenticated() {
            continue;
        }
        // What lacks another part of an identity or its cost is rejected all the same.
        if let Ok(Some(identity)) = spec.identify(attributes, &runtime.api_key_settings, &runtime.hasher, &mut encoder)
            && let Ok(check) = build_check(limit_index, route_limit, identity, attributes)
            && !check.is_concurrency()
        {
            checks.push(LimitCheck { deferred: Deferred::Nothing, ..check });
        }
    }
    checks
}

fn build_check<'a, 'p>(
    limit_index: usize,
    route_limit: &'a RouteLimit,
    identity: Identity,
    attributes: &RequestAttributes<'p>,
) -> Result<LimitCheck<'a, 'p>, CostError>
where
    'a: 'p,
{
    let limit = &*route_limit.limit;
    let deferred = deferred_action(route_limit.cost.is_deferred(), &route_limit.refund_on);
    let caller = attributes.caller.as_ref().map_or(Caller::Missing, |caller| *caller);
    let cost = route_limit.cost.request_cost(attributes.headers, attributes.is_from_trusted_proxy)?;
    Ok(LimitCheck { limit_index, limit, variant: caller.variant(limit), identity, cost, deferred })
}

/// What remains to be done for a limit when the response is known.
pub fn deferred_action(is_post_paid: bool, refund_on: &RefundOn) -> Deferred {
    match (is_post_paid, refund_on.is_empty()) {
        (true, _) => Deferred::Charge,
        (false, false) => Deferred::Refund,
        (false, true) => Deferred::Nothing,
    }
}
