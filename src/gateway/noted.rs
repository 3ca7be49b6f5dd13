//! What the access log and traces say of a decision, and of what became of a request after it.

use std::time::{Duration, Instant};

use http::Response;

use super::meters::Judgement;
use crate::account::Record;
use crate::http::body::Body;
use crate::limit::decision::{Check, Decision};
use crate::limit::outage::Unavailable;
use crate::observe::access::{Binding, Decided, Judged, Sent};
use crate::reply;
use crate::runtime::Route;
use crate::upstream::{Trail, Upstream, UpstreamError};

/// What says most about a request comes first.
const TELLING: [Judgement; 6] = [
    Judgement::Denied,
    Judgement::LocalDenied,
    Judgement::ShadowDenied,
    Judgement::LocalAllowed,
    Judgement::StoreError,
    Judgement::Allowed,
];

/// The limits of a request decided.
pub(super) fn decided(
    record: &mut Record,
    checks: &[Check<'_, '_>],
    decision: &Result<Decision<'_>, Unavailable>,
    (began, took): (Instant, Duration),
) {
    let decision = decision.as_ref().ok();
    let judgement = |check: &Check<'_, '_>| match decision {
        Some(decision) => Judgement::of(check, decision),
        None => Some(Judgement::StoreError),
    };
    let judgements: Vec<_> = checks.iter().map(judgement).collect();
    let remaining = |check: &Check<'_, '_>| {
        let judged = decision?.limits.iter().find(|judged| judged.place == check.place)?;
        Some(judged.outcome.remaining)
    };
    let limits = checks.iter().zip(&judgements).map(|(check, judgement)| Judged {
        limit: check.limit.name.clone(),
        identity: check.identity.0,
        cost: check.needs(),
        decision: judgement.map(Judgement::word),
        remaining: remaining(check),
        place: check.place,
    });
    let limits: Vec<_> = limits.collect();
    let binding = decision.and_then(reply::binding).and_then(|standing| {
        let judged = limits.iter().find(|judged| &*judged.limit == standing.name)?;
        Some(Binding { limit: judged.limit.clone(), remaining: standing.remaining, identity: judged.identity })
    });
    let telling = TELLING.iter().find(|judgement| judgements.contains(&Some(**judgement)));
    let shadows = decision.map_or(&[][..], |decision| &decision.shadow_denied);
    record.decided = Some(Decided {
        decision: telling.map_or("denied", |judgement| judgement.word()),
        decided_by: decision.map(Decision::decided_by),
        binding,
        took,
        decided_at: decision.map(|decision| decision.now_us),
        shadow_denied: shadows.iter().map(|limit| limit.name.clone()).collect(),
        limits,
        began: record.since(began),
    });
}

/// What a request costs may be known with its response only.
pub(super) fn paid(record: &mut Record, route: &Route, answer: &Result<Response<Body>, UpstreamError>) {
    let Some(decided) = &mut record.decided else { return };
    let none = http::HeaderMap::new();
    let headers = answer.as_ref().map_or(&none, Response::headers);
    for judged in &mut decided.limits {
        let cost = &route.metering.limits[judged.place].cost;
        if cost.is_post_paid() {
            judged.cost = cost.of_response(headers).unwrap_or(0);
        }
    }
}

/// A request was sent on.
pub(super) fn sent(
    record: &mut Record,
    upstream: &Upstream,
    trail: &Trail,
    answer: &Result<Response<Body>, UpstreamError>,
    asked: Instant,
) {
    record.sent = Some(Sent {
        upstream: upstream.name().into(),
        server: trail.server().map(Into::into),
        upstream_status: answer.as_ref().ok().map(|response| response.status().as_u16()),
        took: asked.elapsed(),
        retries: trail.again().iter().sum(),
        began: record.since(asked),
    });
}
