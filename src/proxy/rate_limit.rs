//! Rate limit checks of a route, settlement of costs after the response, and the RateLimit headers.

use std::net::IpAddr;

use http::header::ACCESS_CONTROL_EXPOSE_HEADERS;
use http::{HeaderMap, Request, Response};
use tracing::warn;

use crate::http::body::Body;
use crate::http::ratelimit_headers::append_decision_headers;
use crate::http::request_body::RequestBody;
use crate::identity::auth::Credentials;
use crate::identity::{IdentitySpec, RequestAttributes};
use crate::limiter::Limiter;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::{Identity, IdentityEncoder};
use crate::limiter::settlement::{Deferred, SettleAction};
use crate::payload::json::body::JsonBody;
use crate::proxy::authentication;
use crate::proxy::authentication::DeniedRequest;
use crate::proxy::body as inspection;
use crate::proxy::context::{Peer, RequestContext};
use crate::proxy::local_reply::{Rejection, upstream_status};
use crate::proxy::{ConfigSnapshot, RequestTarget};
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::{CostError, RefundOn};
use crate::snapshot::routes::{Route, RouteLimit, RouteLimits};
use crate::upstream::UpstreamError;

/// Check all limits of a route in one store call. A request that is not authenticated is charged only to the limits
/// that need no credential.
///
/// # Errors
/// The request is not authenticated, the request lacks an identity or a cost that a limit requires, or the store
/// failed.
pub(super) async fn check_limits<'a>(
    limiter: &Limiter,
    context: &mut RequestContext<'a>,
    route: &'a Route,
    (credentials, authenticated): (&Credentials<'_>, Result<(), Rejection<'a>>),
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Result<Decision<'a>, Rejection<'a>> {
    let ConfigSnapshot { config, metrics, .. } = context.snapshot;
    let peer = context.peer;
    let client = peer.client_address(request.headers());
    context.record_client(client, Some(route));
    let RouteLimits { identities, limits, .. } = &route.rate_limits;
    let limit_context = LimitContext::new(request, target, peer);
    let body = context.body.take();
    let json = body.as_ref().and_then(|body| body.json());
    let attributes = limit_context.request_attributes(config, route, client, credentials, json);
    let overrides = limiter.overrides.current();
    let mut rejection = None;
    let checks = authenticated.and_then(|()| build_checks(config, identities, limits, &attributes));
    let mut checks = match checks {
        Err(error) if error.is_charged() => {
            rejection = Some(error);
            build_unauthenticated_checks(config, identities, limits, &attributes)
        }
        checks => checks?,
    };
    if let Some(table) = &overrides {
        table.apply(&mut checks);
    }
    if let Some(llm) = &context.llm
        && rejection.is_none()
    {
        llm.reserve(limits, &mut checks)?;
    }
    if checks.is_empty() {
        return rejection.map_or_else(|| Ok(Decision::unlimited()), Err);
    }
    let started_at = monotonic();
    let decision = limiter.check(&checks).await;
    let elapsed = started_at.elapsed();
    let name = |check: &LimitCheck<'_, '_>| {
        let spec = &identities[limits[check.limit_index].identity_index];
        spec.display(&attributes, &config.client_ip)
    };
    metrics.record_decision(route.index, &checks, &decision, elapsed, name);
    if let Some(llm) = &mut context.llm {
        llm.record_clients(limits, &checks, name);
    }
    context.record_decision(&checks, &decision, (started_at, elapsed));
    let decision = decision.map_err(Rejection::StoreUnavailable)?;
    // If a limit denies the request, return this denial instead of `rejection`, so that a client over its limit does
    // not learn whether its credential is valid.
    match rejection.filter(|_| decision.admitted) {
        Some(rejection) => Err(rejection),
        None => Ok(decision),
    }
}

/// Check the limits of a route in two calls, and wait for the provider `pending` between them. The first call checks
/// the limits that need no credential, so that attempts to guess a credential are limited. The second call checks all
/// other limits. If only limits of the second call depend on the body, the body is read after the authentication. If the
/// second call denies the request, the charges of the first call are refunded. If the request is not authenticated,
/// these charges are kept. All verified credentials are in `context.credentials`, even if the
/// request is rejected.
///
/// # Errors
/// The errors of [`check_limits`].
pub(super) async fn check_limits_around_authentication<'a>(
    limiter: &Limiter,
    context: &mut RequestContext<'a>,
    route: &'a Route,
    (credentials, pending): (Credentials<'a>, usize),
    target: &RequestTarget<'_>,
    (request, unread): (&Request<RequestBody>, &mut RequestBody),
) -> Result<Decision<'a>, Rejection<'a>> {
    let ConfigSnapshot { config, metrics, .. } = context.snapshot;
    context.credentials = credentials.clone();
    let peer = context.peer;
    let client = peer.client_address(request.headers());
    context.record_client(client, Some(route));
    let RouteLimits { identities, limits, .. } = &route.rate_limits;
    let limit_context = LimitContext::new(request, target, peer);
    let overrides = limiter.overrides.current();
    let body = context.body.take();
    let json = body.as_ref().and_then(|body| body.json());
    let attributes = limit_context.request_attributes(config, route, client, &credentials, json);
    let needs_credential = |spec: &IdentitySpec| !spec.limits_unauthenticated();
    let mut checks = build_checks_of(config, identities, limits, &attributes, |spec| !needs_credential(spec))?;
    if identities.iter().any(needs_credential) {
        make_refundable(&mut checks);
    }
    if let Some(table) = &overrides {
        table.apply(&mut checks);
    }
    if let Some(llm) = &context.llm {
        llm.reserve(limits, &mut checks)?;
    }
    let started_at = monotonic();
    let first = limiter.check(&checks).await;
    let mut elapsed = started_at.elapsed();
    let record = |context: &mut RequestContext<'a>, checks: &[LimitCheck<'a, '_>], decision, attributes, elapsed| {
        let attributes: &RequestAttributes<'_> = attributes;
        if checks.is_empty() {
            return;
        }
        let name = |check: &LimitCheck<'_, '_>| {
            let spec = &identities[limits[check.limit_index].identity_index];
            spec.display(attributes, &config.client_ip)
        };
        metrics.record_decision(route.index, checks, decision, elapsed, name);
        if let Some(llm) = &mut context.llm {
            llm.record_clients(limits, checks, name);
        }
        context.record_decision(checks, decision, (started_at, elapsed));
    };
    if first.as_ref().map_or(true, |first| !first.admitted) {
        record(context, &checks, &first, &attributes, elapsed);
        return first.map_err(Rejection::StoreUnavailable);
    }
    let finished = authentication::finish(context, route, credentials.clone(), pending, target, request);
    let (verified, authenticated) = Box::pin(finished).await;
    context.credentials = verified.clone();
    if let Err(rejection) = authenticated {
        record(context, &checks, &first, &attributes, elapsed);
        return Err(rejection);
    }
    let mut first = first.map_err(Rejection::StoreUnavailable)?;
    let inspected = match route.rate_limits.reads_body() && !route.rate_limits.reads_body_unauthenticated() {
        true => Box::pin(inspection::inspect(context, route, target, request, unread)).await,
        false => Ok(()),
    };
    let late_body = context.body.take();
    let json = late_body.as_ref().and_then(|body| body.json()).or(json);
    let attributes = limit_context.request_attributes(config, route, client, &verified, json);
    let others = inspected.and_then(|()| build_checks_of(config, identities, limits, &attributes, needs_credential));
    let mut others = match others {
        Ok(others) => others,
        Err(rejection) => {
            if !rejection.is_charged() {
                refund(&mut first).await;
            }
            record(context, &checks, &Ok(first), &attributes, elapsed);
            return Err(rejection);
        }
    };
    if let Some(table) = &overrides {
        table.apply(&mut others);
    }
    if let Some(llm) = &context.llm
        && let Err(rejection) = llm.reserve(limits, &mut others)
    {
        refund(&mut first).await;
        record(context, &checks, &Ok(first), &attributes, elapsed);
        return Err(rejection);
    }
    let second_started_at = monotonic();
    let second = limiter.check(&others).await;
    elapsed += second_started_at.elapsed();
    if second.as_ref().map_or(true, |second| !second.admitted) {
        refund(&mut first).await;
    }
    if second.as_ref().is_ok_and(|second| !second.admitted) {
        authentication::remember_denied(context, route, &verified, target, request);
    }
    checks.append(&mut others);
    checks.sort_by_key(|check| check.limit_index);
    let decision = second.map(|second| first.merge(second));
    record(context, &checks, &decision, &attributes, elapsed);
    decision.map_err(Rejection::StoreUnavailable)
}

/// Check the limits of a request that has to wait for an authentication server, but whose last equal request a limit has
/// denied. Return the decision if the limits deny the request again, so that the server need not be called. If they admit
/// the request, refund the charges and return `None`, because the server must verify the credential.
pub(super) async fn deny_again<'a>(
    limiter: &Limiter,
    context: &mut RequestContext<'a>,
    route: &'a Route,
    denied: DeniedRequest<'a>,
    target: &RequestTarget<'_>,
    request: &Request<RequestBody>,
) -> Option<Decision<'a>> {
    let ConfigSnapshot { config, metrics, .. } = context.snapshot;
    let client = context.peer.client_address(request.headers());
    let RouteLimits { identities, limits, .. } = &route.rate_limits;
    let limit_context = LimitContext::new(request, target, context.peer);
    let attributes = limit_context.request_attributes(config, route, client, &denied.credentials, None);
    let overrides = limiter.overrides.current();
    let mut checks = build_checks(config, identities, limits, &attributes).ok()?;
    make_refundable(&mut checks);
    if let Some(table) = &overrides {
        table.apply(&mut checks);
    }
    let started_at = monotonic();
    let mut decision = limiter.check(&checks).await.ok()?;
    let elapsed = started_at.elapsed();
    if decision.admitted {
        refund(&mut decision).await;
        denied.forget();
        return None;
    }
    context.record_client(client, Some(route));
    let name = |check: &LimitCheck<'_, '_>| {
        let spec = &identities[limits[check.limit_index].identity_index];
        spec.display(&attributes, &config.client_ip)
    };
    let decision = Ok(decision);
    metrics.record_decision(route.index, &checks, &decision, elapsed, name);
    context.record_decision(&checks, &decision, (started_at, elapsed));
    context.credentials = denied.credentials;
    decision.ok()
}

/// Make the charges refundable, because a later check or the authentication may reject the request.
fn make_refundable(checks: &mut [LimitCheck<'_, '_>]) {
    for check in checks.iter_mut().filter(|check| check.deferred == Deferred::Nothing && !check.is_concurrency()) {
        check.deferred = Deferred::Refund;
    }
}

async fn refund(decision: &mut Decision<'_>) {
    if let Err(error) = decision.refund().await {
        warn!(%error, "refund of a request that was denied after its authentication may be lost");
    }
}

/// Make the charges and refunds that depend on the response. The decision then contains the outcomes after the
/// settlement, so that the RateLimit headers report the settled values.
pub(super) fn settle<'d, 'a>(
    decision: &'d mut Decision<'a>,
    route: &Route,
    result: &Result<Response<Body>, UpstreamError>,
) -> impl Future<Output = ()> + use<'d, 'a> {
    let limits = &route.rate_limits.limits;
    let charges = decision.deferred_charges.take();
    let settlement =
        charges.and_then(|charges| charges.settle(|index, deferred| settle_action(&limits[index], deferred, result)));
    async move {
        let Some(settlement) = settlement else { return };
        match settlement.await {
            Ok(outcomes) => {
                for (limit_index, outcome) in outcomes {
                    for limit in decision.results.iter_mut().filter(|limit| limit.limit_index == limit_index) {
                        limit.outcome = outcome;
                    }
                }
            }
            Err(error) => warn!(%error, "a charge after a response, or a refund, may be lost"),
        }
    }
}

/// Return whether the status of the response refunds the charge of a limit.
pub(super) fn is_refunded(route_limit: &RouteLimit, result: &Result<Response<Body>, UpstreamError>) -> bool {
    let status = result.as_ref().map_or_else(upstream_status, Response::status);
    // Never refund a request that failed because of the client. A client could otherwise get a refund by aborting the
    // request.
    !result.as_ref().is_err_and(UpstreamError::is_client_error) && route_limit.refund_on.contains(status)
}

/// Return the charge or refund of a limit that the response determines.
pub fn settle_action(
    route_limit: &RouteLimit,
    deferred: Deferred,
    result: &Result<Response<Body>, UpstreamError>,
) -> SettleAction {
    let no_headers = HeaderMap::new();
    let headers = result.as_ref().map_or(&no_headers, Response::headers);
    match (is_refunded(route_limit, result), deferred) {
        (true, Deferred::Refund | Deferred::Settle) => SettleAction::Refund,
        (false, Deferred::Charge) => {
            route_limit.cost.response_cost(headers).map_or(SettleAction::Nothing, SettleAction::Charge)
        }
        _ => SettleAction::Nothing,
    }
}

/// Append the RateLimit headers of a decision. Also append `Access-Control-Expose-Headers`, so that scripts of other
/// origins can read the RateLimit headers.
pub fn append_ratelimit_headers(headers: &mut HeaderMap, limits: &RouteLimits, decision: &Decision<'_>) {
    if decision.results.is_empty() {
        return;
    }
    let is_standard = decision.results.len() == limits.enforced
        && decision.results.iter().all(|result| result.quota == result.limit.default_variant.quota);
    let policy = limits.policy_header.as_ref().filter(|_| is_standard);
    append_decision_headers(headers, &limits.header_styles, policy, decision);
    if let Some(expose) = &limits.expose_header {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, expose.clone());
    }
}

// === Limit checks: the limit key, quota and cost of a request for each limit ===

/// The parts of a routed request from which identities and costs are computed.
#[derive(Debug)]
pub struct LimitContext<'a, B> {
    /// Method, target and headers of the request.
    pub request: &'a Request<B>,
    /// Host that was used for routing.
    pub host: &'a str,
    /// Path of the request in canonical form.
    pub path: &'a str,
    /// Whether the peer is a trusted proxy.
    pub trusted: bool,
    /// Subject of the client certificate, if there is one.
    pub certificate_subject: Option<&'a str>,
}

impl<'a, B> LimitContext<'a, B> {
    /// Create the context of a request from this peer.
    pub fn new(request: &'a Request<B>, target: &'a RequestTarget<'_>, peer: &'a Peer) -> Self {
        LimitContext {
            request,
            host: &target.host,
            path: &target.path,
            trusted: peer.forwarded.trusted,
            certificate_subject: peer.certificate_subject.as_deref(),
        }
    }

    /// Return the attributes from which identities are computed. `body` contains the values that were read from the
    /// body.
    pub fn request_attributes(
        &self,
        config: &'a CompiledConfig,
        route: &'a Route,
        client: IpAddr,
        credentials: &'a Credentials<'a>,
        body: Option<&'a JsonBody>,
    ) -> RequestAttributes<'a> {
        RequestAttributes {
            method: self.request.method(),
            host: self.host,
            path: self.path,
            query: self.request.uri().query(),
            headers: self.request.headers(),
            client_address: client,
            client_network: config.client_ip.network(client),
            is_from_trusted_proxy: self.trusted,
            client_cert_subject: self.certificate_subject,
            credentials,
            tier_source: &config.auth.tier_source,
            route_name: &route.name,
            path_pattern: &route.path_pattern,
            body,
        }
    }
}

/// Build a check for each limit that applies. `identities` contains the identity specs to which
/// [`RouteLimit::identity_index`] refers.
///
/// # Errors
/// The request lacks an identity, or a cost that a trusted proxy has to send.
pub fn build_checks<'a, 'p>(
    config: &CompiledConfig,
    identities: &[IdentitySpec],
    limits: &'a [RouteLimit],
    attributes: &RequestAttributes<'p>,
) -> Result<Vec<LimitCheck<'a, 'p>>, Rejection<'static>>
where
    'a: 'p,
{
    build_checks_of(config, identities, limits, attributes, |_| true)
}

/// Build checks as [`build_checks`] does, but only for limits for whose identity spec `applies` returns true.
fn build_checks_of<'a, 'p>(
    config: &CompiledConfig,
    identities: &[IdentitySpec],
    limits: &'a [RouteLimit],
    attributes: &RequestAttributes<'p>,
    applies: impl Fn(&IdentitySpec) -> bool,
) -> Result<Vec<LimitCheck<'a, 'p>>, Rejection<'static>>
where
    'a: 'p,
{
    let mut encoder = IdentityEncoder::default();
    let resolved = identities.iter().map(|spec| match applies(spec) {
        true => spec.identify(attributes, &config.hasher, &mut encoder),
        false => Ok(None),
    });
    let found: Vec<_> = resolved.collect::<Result<_, _>>().map_err(Rejection::Identity)?;
    let mut checks = Vec::with_capacity(limits.len());
    for (limit_index, route_limit) in limits.iter().enumerate() {
        if let Some(identity) = found[route_limit.identity_index] {
            checks.push(build_check(limit_index, route_limit, identity, attributes).map_err(Rejection::InvalidCost)?);
        }
    }
    Ok(checks)
}

/// Build the checks of a request that is not authenticated, only for the limits that may charge such a request (see
/// [`IdentitySpec::limits_unauthenticated`]). The cost of these checks is charged at once and never refunded, because
/// attempts to guess a credential would otherwise cost nothing. Concurrency limits are skipped, because the request is
/// rejected at once.
pub fn build_unauthenticated_checks<'a, 'p>(
    config: &CompiledConfig,
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
        // Skip a limit whose identity or cost is missing, because the gateway rejects the request for its credential in
        // any case.
        if let Ok(Some(identity)) = spec.identify(attributes, &config.hasher, &mut encoder)
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
    let variant = attributes.credentials.variant(limit, attributes.tier_source);
    let mut cost = route_limit.cost.request_cost(attributes.headers, attributes.is_from_trusted_proxy)?;
    if let Some(counted) = route_limit.counted {
        cost = route_limit.cost.of_messages(cost, attributes.body, counted);
    }
    Ok(LimitCheck { limit_index, limit, variant, identity, cost, deferred })
}

/// Return the action of a limit after the response: charge the cost, refund the cost if the status is in `refund_on`,
/// or nothing. `is_post_paid` is true if the response determines the cost.
pub fn deferred_action(is_post_paid: bool, refund_on: &RefundOn) -> Deferred {
    match (is_post_paid, refund_on.is_empty()) {
        (true, _) => Deferred::Charge,
        (false, false) => Deferred::Refund,
        (false, true) => Deferred::Nothing,
    }
}
