//! Asks the limits of a route, settles what the response decides, and tells the caller.

use http::header::ACCESS_CONTROL_EXPOSE_HEADERS;
use http::{HeaderMap, Response};
use tracing::warn;

use super::ask::{Question, checks, checks_without_credential};
use super::meters::Meters;
use super::{Peer, noted};
use crate::account::Record;
use crate::http::body::Body;
use crate::http::fields;
use crate::http::upload::RequestBody;
use crate::limit::Limiter;
use crate::limit::admission::{Debts, Due, Later, Settling};
use crate::limit::algorithm::Outcome;
use crate::limit::clock::monotonic;
use crate::limit::decision::Decision;
use crate::limit::store::StoreError;
use crate::reply::{Rejection, binding, standing, upstream_status};
use crate::runtime::{Route, Runtime};
use crate::upstream::UpstreamError;

/// Asks all limits of a route at once.
pub(super) async fn decide<'a>(
    runtime: &'a Runtime,
    limiter: &Limiter,
    meters: &Meters,
    route: &'a Route,
    asked: &Question<'_, RequestBody>,
    peer: &Peer,
    mut record: Option<&mut Record>,
) -> Result<Decision<'a>, Rejection<'a>> {
    let metering = &route.metering;
    let client = peer.client(asked.request.headers());
    if let Some(record) = &mut record {
        record.client = client;
        record.route = Some(route.name.clone());
        record.template = record.trace.map(|_| route.path.clone());
    }
    // Counted: what is only borrowed while the store is asked would keep others from borrowing cheaply.
    let consumers = metering.by_key.then(|| runtime.consumers.load_full());
    let asker = asked.asker(runtime, route, client, consumers.as_deref());
    let overrides = limiter.overrides.current();
    let mut rejection = None;
    let mut checks = match checks(runtime, &metering.identities, &metering.limits, &asker) {
        Err(Rejection::Identity(error)) if error.is_about_credentials() => {
            rejection = Some(Rejection::Identity(error));
            checks_without_credential(runtime, &metering.identities, &metering.limits, &asker)
        }
        checks => checks?,
    };
    if let Some(table) = &overrides {
        table.apply(&mut checks);
    }
    if checks.is_empty() {
        return rejection.map_or_else(|| Ok(Decision::unlimited()), Err);
    }
    let began = monotonic();
    let decision = limiter.check(&checks).await;
    let took = began.elapsed();
    meters.decided(route.index, &checks, &decision, took, |check| {
        let by = &metering.identities[metering.limits[check.place].identity];
        by.name(&asker, &runtime.api_keys, &runtime.client_ip)
    });
    if let Some(record) = record {
        noted::decided(record, &checks, &decision, (began, took));
    }
    let decision = decision.map_err(Rejection::Unavailable)?;
    // A client that is over a limit learns nothing of its credential.
    match rejection.filter(|_| decision.admitted) {
        Some(rejection) => Err(rejection),
        None => Ok(decision),
    }
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
        // A client does not make its own refund.
        let refunds = !answer.as_ref().is_err_and(UpstreamError::is_clients_fault) && metered.refund_on.covers(status);
        match (refunds, later) {
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
pub fn advertise(headers: &mut HeaderMap, route: &Route, decision: &Decision<'_>) {
    if decision.limits.is_empty() {
        return;
    }
    let standings = || decision.limits.iter().map(standing);
    let usual = decision.limits.len() == route.metering.told
        && decision.limits.iter().all(|judged| judged.quota == judged.limit.standard.quota);
    let policy = if usual { route.metering.policy.clone() } else { fields::policy(standings()) };
    fields::advertise(headers, &route.metering.dialects, policy, standings(), binding(decision), decision.now_us);
    if let Some(expose) = &route.metering.expose {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, expose.clone());
    }
}
