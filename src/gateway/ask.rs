//! What the limits of a route are asked about a request: whose units, in which size, and how many.

use std::net::IpAddr;

use http::Request;

use crate::cost::{CostError, RefundOn};
use crate::identity::api_key::{Caller, Consumers};
use crate::identity::jwt::BearerToken;
use crate::identity::{IdentitySpec, RequestAttributes};
use crate::limit::admission::Deferred;
use crate::limit::decision::LimitCheck;
use crate::limit::key::{Identity, IdentityEncoder};
use crate::reply::Rejection;
use crate::runtime::{CompiledConfig, Route, RouteLimit};

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
