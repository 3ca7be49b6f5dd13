//! Rate limit checks: the limit key, the quota and the cost of a request for each limit of its route.

use crate::identity::spec::{IdentitySpec, RequestAttributes};
use crate::limiter::decision::LimitCheck;
use crate::limiter::key::{Identity, IdentityEncoder};
use crate::limiter::settlement::Deferred;
use crate::proxy::rejection::Rejection;
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::{CostError, RefundOn};
use crate::snapshot::routes::RouteLimit;

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
    let mut encoder = IdentityEncoder::default();
    let resolved = identities.iter().map(|spec| spec.identify(attributes, &config.hasher, &mut encoder));
    let found: Vec<_> = resolved.collect::<Result<_, _>>().map_err(Rejection::Identity)?;
    let mut checks = Vec::with_capacity(limits.len());
    for (limit_index, route_limit) in limits.iter().enumerate() {
        if let Some(identity) = found[route_limit.identity_index] {
            checks.push(build_check(limit_index, route_limit, identity, attributes).map_err(Rejection::InvalidCost)?);
        }
    }
    Ok(checks)
}

/// The state of the credential of a request for which [`build_open_checks`] builds checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credential {
    /// A provider has to wait before it can verify the credential.
    Awaited,
    /// The credential is missing or invalid, so the request is rejected at once.
    Rejected,
}

/// Build checks only for the limits that may charge a request before its credential is verified (see
/// [`IdentitySpec::limits_unauthenticated`]). Skip a limit whose identity or cost is missing. Only a client with a valid
/// credential is told about it.
///
/// If the credential was rejected, the cost of these checks is charged at once and never refunded, because attempts to
/// guess a credential would otherwise cost nothing. Concurrency limits are then skipped, because the request is rejected
/// at once.
pub fn build_open_checks<'a, 'p>(
    config: &CompiledConfig,
    identities: &[IdentitySpec],
    limits: &'a [RouteLimit],
    attributes: &RequestAttributes<'p>,
    credential: Credential,
) -> Vec<LimitCheck<'a, 'p>>
where
    'a: 'p,
{
    let mut encoder = IdentityEncoder::default();
    let mut checks = Vec::new();
    // Whether a later check may reject the request, even if its credential is valid.
    let mut is_partial = false;
    for (limit_index, route_limit) in limits.iter().enumerate() {
        let spec = &identities[route_limit.identity_index];
        if !spec.limits_unauthenticated() {
            is_partial = true;
            continue;
        }
        match spec.identify(attributes, &config.hasher, &mut encoder) {
            Ok(Some(identity)) => match build_check(limit_index, route_limit, identity, attributes) {
                Ok(check) => checks.push(check),
                Err(_) => is_partial = true,
            },
            Ok(None) => {}
            Err(_) => is_partial = true,
        }
    }
    match credential {
        Credential::Awaited if is_partial => make_refundable(&mut checks),
        Credential::Awaited => {}
        Credential::Rejected => {
            checks.retain(|check| !check.is_concurrency());
            checks.iter_mut().for_each(|check| check.deferred = Deferred::Nothing);
        }
    }
    checks
}

/// Make the charges refundable, because a later check or the authentication may reject the request.
pub fn make_refundable(checks: &mut [LimitCheck<'_, '_>]) {
    for check in checks.iter_mut().filter(|check| check.deferred == Deferred::Nothing && !check.is_concurrency()) {
        check.deferred = Deferred::Refund;
    }
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
