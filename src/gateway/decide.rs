//! Asks the limits of a route, settles what the response decides, and tells the caller.

use http::header::ACCESS_CONTROL_EXPOSE_HEADERS;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tracing::warn;

use super::Peer;
use super::meters::Meters;
use crate::account::Record;
use crate::cost::CostError;
use crate::http::body::Body;
use crate::http::fields;
use crate::identity::Asker;
use crate::identity::api_key::Caller;
use crate::identity::jwt::Bearer;
use crate::limit::Limiter;
use crate::limit::admission::{Debts, Due, Later, Settling};
use crate::limit::algorithm::Outcome;
use crate::limit::clock::monotonic;
use crate::limit::decision::{Check, Decision};
use crate::limit::key::{Encoder, Identity};
use crate::limit::store::StoreError;
use crate::reply::{Rejection, binding, standing, upstream_status};
use crate::runtime::{Metered, Route, Runtime};
use crate::upstream::UpstreamError;

/// What a decision is about.
pub(super) struct Question<'a> {
    pub(super) request: &'a Request<Incoming>,
    pub(super) host: &'a str,
    pub(super) path: &'a str,
    pub(super) peer: &'a Peer,
}

/// Asks all limits of a route at once.
pub(super) async fn decide<'a>(
    runtime: &'a Runtime,
    limiter: &Limiter,
    meters: &Meters,
    route: &'a Route,
    asked: &Question<'_>,
    mut record: Option<&mut Record>,
) -> Result<Decision<'a>, Rejection<'a>> {
    let (peer, headers, metering) = (asked.peer, asked.request.headers(), &route.metering);
    if metering.limits.is_empty() && record.is_none() {
        return limiter.check(&[]).await.map_err(Rejection::Unavailable);
    }
    // A trusted proxy may speak for somebody whose address it does not tell.
    let client = if peer.origin.trusted { runtime.client_ip.client(peer.address, headers) } else { peer.address };
    if let Some(record) = &mut record {
        record.client = client;
        record.route = Some(route.name.clone());
    }
    let consumers = metering.by_key.then(|| runtime.consumers.load());
    let caller = match &consumers {
        Some(consumers) => runtime.api_keys.caller(consumers, headers),
        None => Ok(Caller::Missing),
    };
    let asker = Asker {
        method: asked.request.method(),
        host: asked.host,
        path: asked.path,
        query: asked.request.uri().query(),
        headers,
        client,
        network: runtime.client_ip.network(client),
        trusted: peer.origin.trusted,
        subject: peer.subject.as_deref(),
        caller: caller.clone(),
        bearer: Bearer::new(&runtime.verifier, headers),
        route: &route.name,
        pattern: &route.pattern,
    };
    let mut encoder = Encoder::default();
    let identities =
        metering.identities.iter().map(|by| by.identify(&asker, &runtime.api_keys, &runtime.hasher, &mut encoder));
    let identities: Vec<_> = identities.collect::<Result<_, _>>().map_err(Rejection::Identity)?;
    let caller = caller.unwrap_or(Caller::Missing);
    let overrides = limiter.overrides.current();
    let mut checks = Vec::with_capacity(metering.limits.len());
    for (place, metered) in metering.limits.iter().enumerate() {
        if let Some(identity) = identities[metered.identity] {
            let mut check = check(place, metered, identity, caller, &asker).map_err(Rejection::Cost)?;
            if let Some(other) = overrides.as_ref().and_then(|table| table.find(&metered.limit, identity)) {
                check.plan = &other.plan;
            }
            checks.push(check);
        }
    }
    if checks.is_empty() {
        return limiter.check(&[]).await.map_err(Rejection::Unavailable);
    }
    let began = monotonic();
    let decision = limiter.check(&checks).await;
    meters.decided(route.index, &checks, &decision, began.elapsed(), |check| {
        let by = &metering.identities[metering.limits[check.place].identity];
        by.name(&asker, &runtime.api_keys, &runtime.client_ip)
    });
    let decision = decision.map_err(Rejection::Unavailable)?;
    if let Some(record) = record {
        record.decided_by = Some(decision.decided_by());
        record.shadow_denied = decision.shadow_denied.iter().map(|limit| limit.name.clone()).collect();
    }
    Ok(decision)
}

fn check<'a, 'p>(
    place: usize,
    metered: &'a Metered,
    identity: Identity,
    caller: Caller<'p>,
    asker: &Asker<'_>,
) -> Result<Check<'a, 'p>, CostError>
where
    'a: 'p,
{
    let limit = &*metered.limit;
    let later = match (metered.cost.is_post_paid(), metered.refund_on.is_empty()) {
        (true, _) => Later::Pay,
        (false, false) => Later::Refund,
        (false, true) => Later::Nothing,
    };
    let cost = metered.cost.of_request(asker.headers, asker.trusted)?;
    Ok(Check { place, limit, plan: caller.plan(limit), identity, cost, later })
}

/// Charges and gives back what the answer says; none if it says nothing.
pub(super) fn settle(debts: Debts, route: &Route, answer: &Result<Response<Body>, UpstreamError>) -> Option<Settling> {
    let none = HeaderMap::new();
    let (status, headers) = match answer {
        Ok(response) => (response.status(), response.headers()),
        Err(error) => (upstream_status(error), &none),
    };
    let due = |place: usize, later| {
        let metered = &route.metering.limits[place];
        match (metered.refund_on.covers(status), later) {
            (true, Later::Refund) => Due::Refund,
            (false, Later::Pay) => metered.cost.of_response(headers).map_or(Due::Nothing, Due::Pay),
            _ => Due::Nothing,
        }
    };
    debts.settle(due)
}

/// Corrects the standing that the caller is told.
pub(super) fn correct(decision: &mut Decision<'_>, settled: Result<Vec<(usize, Outcome)>, StoreError>) {
    match settled {
        Ok(standings) => {
            for (place, outcome) in standings {
                for judged in decision.limits.iter_mut().filter(|judged| judged.place == place) {
                    judged.outcome = outcome;
                }
            }
        }
        Err(error) => warn!(%error, "what the response made of a cost may not have been counted"),
    }
}

/// The RateLimit fields of an admitted request.
pub(super) fn advertise(headers: &mut HeaderMap, route: &Route, decision: &Decision<'_>) {
    let standings = || decision.limits.iter().map(standing);
    let usual = decision.limits.len() == route.metering.told
        && decision.limits.iter().all(|judged| judged.quota == judged.limit.standard.quota);
    let policy = if usual { route.metering.policy.clone() } else { fields::policy(standings()) };
    fields::advertise(headers, &route.metering.dialects, policy, standings(), binding(decision), decision.now_us);
    if let Some(expose) = route.metering.expose.as_ref().filter(|_| !decision.limits.is_empty()) {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, expose.clone());
    }
}
