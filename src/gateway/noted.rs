//! What the access log and traces say of a decision, and of what became of a request after it.

use std::time::{Duration, Instant};

use http::Response;

use super::meters::LimitDecision;
use crate::account::RequestRecord;
use crate::http::body::Body;
use crate::limit::decision::{Decision, LimitCheck};
use crate::limit::outage::StoreUnavailable;
use crate::observe::access::{DecisionInfo, EffectiveLimit, LimitInfo, UpstreamInfo};
use crate::reply;
use crate::runtime::Route;
use crate::upstream::{AttemptLog, Upstream, UpstreamError};

/// What says most about a request comes first.
const DECISION_PRIORITY: [LimitDecision; 6] = [
    LimitDecision::Denied,
    LimitDecision::LocalDenied,
    LimitDecision::ShadowDenied,
    LimitDecision::LocalAllowed,
    LimitDecision::StoreError,
    LimitDecision::Allowed,
];

/// The limits of a request decided.
pub(super) fn record_decision(
    record: &mut RequestRecord,
    checks: &[LimitCheck<'_, '_>],
    decision: &Result<Decision<'_>, StoreUnavailable>,
    (started_at, elapsed): (Instant, Duration),
) {
    let decision = decision.as_ref().ok();
    let to_limit_decision = |check: &LimitCheck<'_, '_>| match decision {
        Some(decision) => LimitDecision::from_decision(check, decision),
        None => Some(LimitDecision::StoreError),
    };
    let limit_decisions: Vec<_> = checks.iter().map(to_limit_decision).collect();
    let remaining = |check: &LimitCheck<'_, '_>| {
        let result = decision?.results.iter().find(|result| result.limit_index == check.limit_index)?;
        Some(result.outcome.remaining)
    };
    let limits = checks.iter().zip(&limit_decisions).map(|(check, limit_decision)| LimitInfo {
        limit: check.limit.name.clone(),
        identity: check.identity.0,
        cost: check.required(),
        decision: limit_decision.map(LimitDecision::label),
        remaining: remaining(check),
        limit_index: check.limit_index,
    });
    let limits: Vec<_> = limits.collect();
    let effective_limit = decision.and_then(reply::effective_limit).and_then(|status| {
        let info = limits.iter().find(|info| &*info.limit == status.name)?;
        Some(EffectiveLimit { limit: info.limit.clone(), remaining: status.remaining, identity: info.identity })
    });
    let most_relevant =
        DECISION_PRIORITY.iter().find(|limit_decision| limit_decisions.contains(&Some(**limit_decision)));
    let shadows = decision.map_or(&[][..], |decision| &decision.shadow_denied);
    record.decision = Some(DecisionInfo {
        decision: most_relevant.map_or("denied", |limit_decision| limit_decision.label()),
        decided_by: decision.map(Decision::decider_label),
        effective_limit,
        duration: elapsed,
        decided_at: decision.map(|decision| decision.now_us),
        shadow_denied: shadows.iter().map(|limit| limit.name.clone()).collect(),
        limits,
        start_offset: record.offset_of(started_at),
    });
}

/// What a request costs may be known with its response only.
pub(super) fn record_cost(record: &mut RequestRecord, route: &Route, result: &Result<Response<Body>, UpstreamError>) {
    let Some(decision) = &mut record.decision else { return };
    let no_headers = http::HeaderMap::new();
    let headers = result.as_ref().map_or(&no_headers, Response::headers);
    for limit in &mut decision.limits {
        let cost = &route.rate_limits.limits[limit.limit_index].cost;
        if cost.is_deferred() {
            limit.cost = cost.response_cost(headers).unwrap_or(0);
        }
    }
}

/// A request was sent on.
pub(super) fn record_upstream(
    record: &mut RequestRecord,
    upstream: &Upstream,
    attempts: &AttemptLog,
    result: &Result<Response<Body>, UpstreamError>,
    started_at: Instant,
) {
    record.upstream = Some(UpstreamInfo {
        upstream: upstream.name().into(),
        server: attempts.endpoint_name().map(Into::into),
        upstream_status: result.as_ref().ok().map(|response| response.status().as_u16()),
        duration: started_at.elapsed(),
        retries: attempts.retries().iter().sum(),
        start_offset: record.offset_of(started_at),
    });
}
