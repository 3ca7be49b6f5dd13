//! Asks the limits of a route, settles what the response decides, and tells the caller.

use http::header::ACCESS_CONTROL_EXPOSE_HEADERS;
use http::{HeaderMap, Response};
use tracing::warn;

use super::ask::{LimitContext, build_checks, build_unauthenticated_checks};
use super::meters::WorkerMetrics;
use super::{Peer, noted};
use crate::account::RequestRecord;
use crate::http::body::Body;
use crate::http::fields;
use crate::http::upload::RequestBody;
use crate::limit::Limiter;
use crate::limit::admission::{Deferred, DeferredCharges, SettleAction, SettleFuture};
use crate::limit::algorithm::Outcome;
use crate::limit::clock::monotonic;
use crate::limit::decision::Decision;
use crate::limit::store::StoreError;
use crate::reply::{Rejection, effective_limit, limit_status, upstream_status};
use crate::runtime::{CompiledConfig, Route};
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
        noted::record_decision(record, &checks, &decision, (started_at, elapsed));
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
    let policy =
        if is_standard { route.rate_limits.policy_header.clone() } else { fields::ratelimit_policy(statuses()) };
    fields::append_ratelimit_headers(
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
