//! What the gateway records about a request: its id, metrics, access log record and spans.
//!
//! No other file writes the access log record of a request.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version};

use crate::clock::{monotonic, unix_us};
use crate::http::body::{Body, BodyEnd, OnComplete};
use crate::http::body_limits::RestPermit;
use crate::http::ratelimit_headers;
use crate::http::request_body::RequestBody;
use crate::identity::auth::Credentials;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::settlement::Deferred;
use crate::payload::llm::provider::Operation;
use crate::proxy::config_snapshot::ConfigSnapshot;
use crate::proxy::holdings::{Held, is_refunded};
use crate::proxy::llm::LlmReport;
use crate::proxy::metrics::LimitDecision;
use crate::proxy::request::{Origin, Peer};
use crate::snapshot::routes::Route;
use crate::telemetry::access_log::{
    AccessRecord, DecisionInfo, EffectiveLimit, LimitInfo, RequestId, RequestRecord, RequestStart, TelemetrySinks,
    UpstreamInfo, protocol,
};
use crate::telemetry::outcome::RequestOutcome;
use crate::telemetry::trace::{RequestTrace, TraceContext, TraceParent};
use crate::upstream::Upstream;
use crate::upstream::error::UpstreamError;
use crate::upstream::retry::AttemptLog;

/// The record of a request in progress. If it is dropped before [`finish`](Self::finish), the connection or stream has
/// ended: the client closed it, or `drain_timeout` expired. The access log record then has the status 499.
pub(super) struct Record<'a> {
    snapshot: &'a ConfigSnapshot,
    started_at: Instant,
    /// Whether the peer is a trusted proxy, whose request ids are kept.
    is_trusted_proxy: bool,
    request_id: Option<RequestId>,
    /// Index of the route. `None` until a route is found.
    route_index: Option<usize>,
    /// The access log record. `None` if the request is neither logged nor traced.
    log: Option<Box<RequestRecord>>,
    is_finished: bool,
}

impl<'a> Record<'a> {
    /// Start the record of a request that has just arrived.
    pub(super) fn new(
        snapshot: &'a ConfigSnapshot,
        sinks: &Arc<TelemetrySinks>,
        peer: &Peer,
        request: &Request<RequestBody>,
    ) -> Self {
        let started_at = monotonic();
        let start = RequestStart {
            instant: started_at,
            peer: peer.address,
            scheme: if peer.forwarded.scheme == "https" { "https" } else { "http" },
            request,
        };
        let mut record = Record {
            snapshot,
            started_at,
            is_trusted_proxy: peer.forwarded.trusted,
            request_id: None,
            route_index: None,
            log: RequestRecord::start(sinks, &start),
            is_finished: false,
        };
        if record.is_logged() {
            record.request_id(request.headers());
        }
        record
    }

    /// Return the request id. The first call of this function determines the id.
    pub(super) fn request_id(&mut self, headers: &HeaderMap) -> &RequestId {
        let Record { log, request_id, is_trusted_proxy, .. } = self;
        request_id.get_or_insert_with(|| {
            let id = RequestId::from_headers(headers, *is_trusted_proxy);
            if let Some(log) = log {
                log.request_id = Some(id.clone());
            }
            id
        })
    }

    /// Return the request id, if it was determined.
    pub(super) fn known_request_id(&self) -> Option<HeaderValue> {
        self.request_id.as_ref().map(RequestId::to_header_value)
    }

    /// Return whether the request is logged or traced.
    pub(super) fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Return the trace context that the upstream uses as the parent of its spans, or `None` if the request is not
    /// traced.
    pub(super) fn trace(&self) -> Option<TraceContext> {
        self.log.as_ref().and_then(|log| log.trace)
    }

    /// Record the address of the client and the route.
    pub(super) fn located(&mut self, origin: &Origin<'_>, route: Option<&Route>) {
        self.route_index = route.map(|route| route.index);
        let Some(log) = &mut self.log else { return };
        log.client = origin.client;
        let Some(route) = route else { return };
        log.route = Some(route.name.clone());
        log.path_template = log.trace.map(|_| route.path.clone());
    }

    /// Record the name of the verified client.
    pub(super) fn consumer(&mut self, credentials: &Credentials<'_>) {
        if let Some(log) = self.log.as_mut().filter(|log| log.has_consumer()) {
            log.set_consumer(credentials.client_name().as_deref());
        }
    }

    /// Record the reason why the gateway responds with an error of a server.
    pub(super) fn reason(&mut self, reason: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.reason = Some(reason().into());
        }
    }

    /// Record the model and the operation of a request whose tokens are counted.
    pub(super) fn model(&mut self, model: Option<&str>, operation: Option<&'static Operation>) {
        if let Some(log) = &mut self.log {
            log.operation = operation;
            log.model = model.map(Into::into);
        }
    }

    /// Record the decision on the limits of the route. `decision` is `None` if the store was unavailable. The
    /// checks began at `started_at` and took `elapsed`.
    pub(super) fn decision(
        &mut self,
        checks: &[LimitCheck<'_, '_>],
        decision: Option<&Decision<'_>>,
        started_at: Instant,
        elapsed: Duration,
    ) {
        let Some(log) = &mut self.log else { return };
        log.decision = Some(DecisionInfo {
            start_offset: log.offset_of(started_at),
            duration: elapsed,
            ..decision_info(checks, decision)
        });
    }

    /// Record the upstream, the result of the exchange, and the costs that only the response determines. The exchange began
    /// at `started_at` and took `elapsed`.
    pub(super) fn upstream(
        &mut self,
        route: &Route,
        upstream: &Upstream,
        attempts: &AttemptLog,
        result: &Result<Box<Response<Body>>, UpstreamError>,
        started_at: Instant,
        elapsed: Duration,
    ) {
        let Some(log) = &mut self.log else { return };
        log.upstream = Some(UpstreamInfo {
            upstream: upstream.shared_name(),
            server: attempts.endpoint_name().cloned(),
            upstream_status: result.as_ref().ok().map(|response| response.status().as_u16()),
            duration: elapsed,
            retries: attempts.retries().iter().sum(),
            start_offset: log.offset_of(started_at),
        });
        let Some(decision) = &mut log.decision else { return };
        let no_headers = HeaderMap::new();
        let headers = result.as_ref().map_or(&no_headers, |response| response.headers());
        for limit in &mut decision.limits {
            let route_limit = &route.rate_limits.limits[limit.limit_index];
            if route_limit.cost.is_deferred() {
                limit.cost = route_limit.cost.response_cost(headers).unwrap_or(0);
            }
            if limit.reserved.is_some() && is_refunded(route_limit, result) {
                limit.cost = 0;
                limit.settled = Some(0);
            }
        }
    }

    /// Update the metrics, and return what has to be done at the end of the response body: settle reservations, write
    /// the access log record and release permits. Return `None` if there is nothing to do.
    pub(super) fn finish(
        &mut self,
        status: StatusCode,
        outcome: RequestOutcome,
        held: Held,
    ) -> Option<Box<Completion>> {
        self.is_finished = true;
        self.snapshot.metrics.record_response(self.route_index, status, outcome, self.started_at.elapsed());
        let mut log = self.log.take();
        if let Some(log) = &mut log {
            log.status = status.as_u16();
            log.outcome = outcome.label();
        }
        (log.is_some() || !held.is_empty()).then(|| Box::new(Completion { log, held }))
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.snapshot.metrics.record_aborted(self.route_index);
        }
        if let Some(log) = self.log.take() {
            log.write_aborted();
        }
    }
}

/// The actions at the end of the response body.
pub(super) struct Completion {
    log: Option<Box<RequestRecord>>,
    held: Held,
}

impl OnComplete for Completion {
    fn on_data(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        self.held.feed(data)
    }

    fn holds_data(&self) -> bool {
        self.held.holds_data()
    }

    fn on_end(&mut self) -> Bytes {
        self.held.take_held_data()
    }

    fn start_rest(&self) -> Option<RestPermit> {
        self.held.start_rest()
    }

    fn on_complete(self: Box<Self>, bytes_sent: u64, end: BodyEnd) {
        let Completion { mut log, held } = *self;
        let decision = log.as_mut().and_then(|log| log.decision.as_mut());
        let report = held.release(decision.map(|decision| &mut decision.limits[..]), end);
        if let Some(mut log) = log {
            if let Some(LlmReport { usage, model }) = report {
                log.tokens = usage.map(Box::new);
                log.response_model = model;
            }
            log.write(bytes_sent, end == BodyEnd::Sent);
        }
    }
}

/// The precedence of decisions in the access log. If the limits of a request have made different decisions, the record
/// contains the decision that comes first in this list.
const DECISION_PRIORITY: [LimitDecision; 6] = [
    LimitDecision::Denied,
    LimitDecision::LocalDenied,
    LimitDecision::ShadowDenied,
    LimitDecision::LocalAllowed,
    LimitDecision::StoreError,
    LimitDecision::Allowed,
];

/// Return the fields of the access log record that describe a decision. `decision` is `None` if the store was
/// unavailable.
pub(super) fn decision_info(checks: &[LimitCheck<'_, '_>], decision: Option<&Decision<'_>>) -> DecisionInfo {
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
        reserved: (check.deferred == Deferred::Settle).then_some(check.cost),
        settled: None,
        estimated: false,
        limit_index: check.limit_index,
    });
    let limits: Vec<_> = limits.collect();
    let effective_limit = decision.and_then(ratelimit_headers::effective_limit).and_then(|status| {
        let info = limits.iter().find(|info| &*info.limit == status.name)?;
        Some(EffectiveLimit { limit: info.limit.clone(), remaining: status.remaining, identity: info.identity })
    });
    let most_relevant =
        DECISION_PRIORITY.iter().find(|limit_decision| limit_decisions.contains(&Some(**limit_decision)));
    let shadows = decision.map_or(&[][..], |decision| &decision.shadow_denied);
    DecisionInfo {
        decision: most_relevant.map_or("denied", |limit_decision| limit_decision.label()),
        decided_by: decision.map(Decision::decider_label),
        effective_limit,
        duration: Duration::ZERO,
        decided_at: decision.map(|decision| decision.now_us),
        shadow_denied: shadows.iter().map(|limit| limit.name.clone()).collect(),
        limits,
        start_offset: Duration::ZERO,
    }
}

/// Combine the descriptions of two decisions about one request.
pub(super) fn merge_decision_infos(mut one: DecisionInfo, other: DecisionInfo) -> DecisionInfo {
    let rank = |info: &DecisionInfo| DECISION_PRIORITY.iter().position(|decision| decision.label() == info.decision);
    if rank(&other) < rank(&one) {
        one.decision = other.decision;
        one.decided_by = other.decided_by;
        one.effective_limit = other.effective_limit;
    }
    one.decided_at = one.decided_at.max(other.decided_at);
    one.shadow_denied.extend(other.shadow_denied);
    one.limits.extend(other.limits);
    one
}

/// What the access log has about a decision that belongs to no route: about descriptors, or about limits that a program
/// names. The call of the decision takes the place of the request.
pub(super) struct DecisionRecord<'a> {
    pub(super) peer: &'a Peer,
    /// The span of the caller.
    pub(super) parent: Option<TraceParent>,
    /// The spans of the decision, if it is traced.
    pub(super) trace: Option<TraceContext>,
    pub(super) host: Option<&'a str>,
    pub(super) path: &'static str,
    /// Service and method of a gRPC call.
    pub(super) rpc_method: Option<&'static str>,
    pub(super) version: Version,
    pub(super) received_at: Instant,
    /// Status of the response that the decision determines.
    pub(super) status: StatusCode,
    pub(super) outcome: &'static str,
    pub(super) decision: Option<&'a DecisionInfo>,
}

impl DecisionRecord<'_> {
    /// Write the record to the access log, and export the spans of the call.
    pub(super) fn write(self, sinks: &TelemetrySinks) {
        let duration = monotonic().saturating_duration_since(self.received_at);
        let scheme = if self.peer.forwarded.scheme == "https" { "https" } else { "http" };
        let record = AccessRecord {
            time: unix_us().saturating_sub(duration.as_micros() as u64),
            client: self.peer.address,
            method: "POST",
            scheme,
            host: self.host,
            path: self.path,
            protocol: protocol(self.version),
            status: self.status.as_u16(),
            bytes: 0,
            bytes_received: None,
            complete: true,
            duration_ms: duration,
            route: None,
            outcome: self.outcome,
            reason: None,
            consumer: None,
            decision: self.decision,
            model: None,
            tokens: None,
            upstream: None,
            referer: None,
            user_agent: None,
            request_id: "-",
            trace_id: self.trace.map(|trace| trace.trace_id).or(self.parent.map(|parent| parent.trace_id)),
            sample_rate: None,
        };
        if let Some(log) = &sinks.access_log {
            log.write(&record);
        }
        if let (Some(exporter), Some(trace)) = (&sinks.trace_exporter, &self.trace) {
            exporter.record(&RequestTrace {
                trace,
                record: &record,
                path_template: None,
                rpc_method: self.rpc_method,
                operation: None,
                response_model: None,
                scheme,
                peer: self.peer.address,
            });
        }
    }
}
