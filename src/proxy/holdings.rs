//! What an admitted request holds at its limits: permits, reservations and deferred charges. Each of them is settled or
//! released exactly once, because each step consumes the value: [`Holdings`], [`Settled`], [`Held`].

use std::ops::ControlFlow;

use bytes::Bytes;
use http::{HeaderMap, Response};
use tracing::warn;

use crate::http::body::{Body, BodyEnd};
use crate::http::body_limits::{RestBounds, RestPermit};
use crate::limiter::decision::Decision;
use crate::limiter::settlement::{ConcurrencyPermits, Deferred, SettleAction};
use crate::payload::mcp_tools::ToolFilter;
use crate::proxy::llm::{LlmReport, LlmRequest, LlmSettlement, UpstreamResponses};
use crate::proxy::local_reply::upstream_status;
use crate::proxy::metrics::WorkerMetrics;
use crate::snapshot::routes::{Route, RouteLimit};
use crate::telemetry::access_log::LimitInfo;
use crate::upstream::error::UpstreamError;

/// The decision on an admitted request. If it is dropped, the permits are released, no deferred charge is made, and
/// reservations stay charged.
#[must_use]
pub(super) struct Holdings<'a> {
    decision: Decision<'a>,
    llm: Option<Box<LlmRequest>>,
}

/// The decision after the settlement.
#[must_use]
pub(super) struct Settled<'a> {
    /// The decision, with the outcomes that the RateLimit headers report.
    pub(super) decision: Decision<'a>,
    /// What is released at the end of the response body.
    pub(super) held: Held,
}

/// What a request holds until the end of its response body. If it is dropped, the permits are released.
#[derive(Default)]
pub(super) struct Held {
    /// Permits of concurrency limits.
    permits: Option<Box<ConcurrencyPermits>>,
    /// Token reservations whose cost the response body determines.
    reservations: Option<Box<LlmSettlement>>,
    /// Removes tools from the response that the client may not call.
    tools: Option<Box<ToolFilter>>,
}

impl<'a> Holdings<'a> {
    pub(super) fn new(decision: Decision<'a>, llm: Option<Box<LlmRequest>>) -> Self {
        Holdings { decision, llm }
    }

    /// Return the request to an LLM API whose tokens are counted.
    pub(super) fn llm(&self) -> Option<&LlmRequest> {
        self.llm.as_deref()
    }

    /// Return whether the gateway reads the token usage of an LLM API in the response.
    pub(super) fn counts_tokens(&self) -> bool {
        self.llm.as_ref().is_some_and(|llm| llm.is_counted())
    }

    /// Make the charges and refunds that the status and the headers of the response determine. Do this even if the
    /// upstream failed, because the status may cause a refund. Also charge the responses that the client
    /// does not get.
    pub(super) fn settle(
        self,
        route: &Route,
        metrics: &WorkerMetrics,
        result: &Result<Box<Response<Body>>, UpstreamError>,
        rest: Option<RestBounds>,
        responses: &UpstreamResponses,
    ) -> impl Future<Output = Settled<'a>> + use<'a> {
        let Holdings { mut decision, llm } = self;
        let limits = &route.rate_limits.limits;
        // Most requests have no floors.
        let floors: Vec<CostFloor> = match &llm {
            Some(llm) if !responses.replaced.is_empty() || llm.has_learned_reservations() => {
                (0..limits.len()).map(|index| CostFloor::new(llm, index, &limits[index], responses)).collect()
            }
            Some(_) | None => Vec::new(),
        };
        let reservations = match (llm, result) {
            (Some(llm), Ok(response)) => llm.settlement(&mut decision, route, metrics, response, rest, responses),
            (None, _) | (_, Err(_)) => None,
        };
        let charges = decision.deferred_charges.take();
        let costs = charges.iter().filter(|_| !floors.is_empty()).flat_map(|charges| charges.costs());
        let reserved: Vec<_> = costs.collect();
        let action = |index: usize, deferred| match (settle_action(&limits[index], deferred, result), floors.get(index))
        {
            (SettleAction::Refund, Some(floor)) if deferred == Deferred::Settle && floor.refunded > 0 => {
                SettleAction::Settle(floor.refunded)
            }
            // The reservation stays charged.
            (SettleAction::Nothing, Some(floor)) if deferred == Deferred::Settle && floor.kept > 0 => {
                let reserved = reserved.iter().find(|(limit, _)| *limit == index).map_or(0, |(_, cost)| *cost);
                SettleAction::Settle(floor.kept.max(reserved))
            }
            (action, _) => action,
        };
        let settlement = charges.and_then(|charges| charges.settle(action));
        async move {
            match settlement {
                None => {}
                Some(settlement) => match settlement.await {
                    Ok(outcomes) => {
                        for (limit_index, outcome) in outcomes {
                            let settled = decision.results.iter_mut().filter(|limit| limit.limit_index == limit_index);
                            settled.for_each(|limit| limit.outcome = outcome);
                        }
                    }
                    Err(error) => warn!(%error, "a charge after a response, or a refund, may be lost"),
                },
            }
            let permits = decision.permits.take();
            Settled { decision, held: Held { permits, reservations, tools: None } }
        }
    }
}

/// The least that a limit charges for a request to an LLM API whose reservation the response does not settle.
struct CostFloor {
    /// If the reservation is refunded: the replaced responses.
    refunded: u64,
    /// If the reservation stays charged: the requested maximum as well.
    kept: u64,
}

impl CostFloor {
    fn new(llm: &LlmRequest, index: usize, limit: &RouteLimit, responses: &UpstreamResponses) -> Self {
        let refunded = llm.replaced_cost(limit, responses);
        CostFloor { refunded, kept: llm.uncovered_maximum(index).unwrap_or(0).max(refunded) }
    }
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.permits.is_none() && self.reservations.is_none() && self.tools.is_none()
    }

    /// Remove tools from the response.
    pub(super) fn filter_tools(&mut self, filter: ToolFilter) {
        self.tools = Some(Box::new(filter));
    }

    /// Measure a part of the response, and change this part if necessary. Return `Break` if the gateway ends the
    /// response with this part.
    pub(super) fn feed(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        let flow = self.reservations.as_mut().map_or(ControlFlow::Continue(()), |reservations| reservations.feed(data));
        match &mut self.tools {
            Some(tools) if flow.is_continue() => tools.feed(data),
            Some(_) | None => flow,
        }
    }

    /// Return whether a part of the response is held back until its event is complete.
    pub(super) fn holds_data(&self) -> bool {
        self.reservations.as_ref().is_some_and(|reservations| reservations.holds_data())
            || self.tools.as_ref().is_some_and(|tools| tools.holds_data())
    }

    /// Return the part of the response that is held back at its end.
    pub(super) fn take_held_data(&mut self) -> Bytes {
        let mut data = self.reservations.as_mut().map_or_else(Bytes::new, |reservations| reservations.take_held_data());
        let Some(tools) = &mut self.tools else { return data };
        if tools.feed(&mut data).is_break() {
            return Bytes::new();
        }
        [data, tools.finish()].concat().into()
    }

    /// Return a permit to read the response after the client has left, if its end determines a cost.
    pub(super) fn start_rest(&self) -> Option<RestPermit> {
        self.reservations.as_ref()?.start_rest()
    }

    /// Settle the reservations in the background, and release the permits. `limits` are the entries of the access log
    /// record, in which the costs are set. Return what the response of an LLM API has reported.
    pub(super) fn release(self, limits: Option<&mut [LimitInfo]>, end: BodyEnd) -> Option<LlmReport> {
        let Held { permits, reservations, tools: _ } = self;
        let report = reservations.map(|reservations| reservations.settle(limits, end));
        drop(permits);
        report
    }
}

/// Return whether the status of the response refunds the charge of a limit.
pub(super) fn is_refunded(route_limit: &RouteLimit, result: &Result<Box<Response<Body>>, UpstreamError>) -> bool {
    let status = result.as_ref().map_or_else(upstream_status, |response| response.status());
    // Never refund a request that failed because of the client. A client could otherwise get a refund by aborting the
    // request.
    !result.as_ref().is_err_and(UpstreamError::is_client_error) && route_limit.refund_on.contains(status)
}

/// Return the charge or refund of a limit that the response determines.
pub fn settle_action(
    route_limit: &RouteLimit,
    deferred: Deferred,
    result: &Result<Box<Response<Body>>, UpstreamError>,
) -> SettleAction {
    let no_headers = HeaderMap::new();
    let headers = result.as_ref().map_or(&no_headers, |response| response.headers());
    match (is_refunded(route_limit, result), deferred) {
        (true, Deferred::Refund | Deferred::Settle) => SettleAction::Refund,
        (false, Deferred::Charge) => {
            route_limit.cost.response_cost(headers).map_or(SettleAction::Nothing, SettleAction::Charge)
        }
        _ => SettleAction::Nothing,
    }
}
