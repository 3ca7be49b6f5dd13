//! What a worker counts: requests by route, decisions by limit, answers by upstream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Response, StatusCode};

use crate::http::body::Body;
use crate::identity::display::IdentityDisplay;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::spec::OnStoreError;
use crate::limiter::store::DecidedBy;
use crate::metrics::{Counter, Histogram, MetricFamily};
use crate::proxy::local_reply;
use crate::proxy::top_denied::TopDenied;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;
use crate::telemetry::access_log::{DecisionInfo, EffectiveLimit, LimitInfo, RequestRecord, UpstreamInfo};
use crate::upstream::retry::AttemptLog;
use crate::upstream::{Upstream, UpstreamError};

/// The classes of statuses, as labels.
pub const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// What a limit had to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitDecision {
    /// It let the request pass.
    Allowed,
    /// It denied the request.
    Denied,
    /// It would have, were it no shadow.
    ShadowDenied,
    /// Its local share let the request pass.
    LocalAllowed,
    /// Its local share denied the request.
    LocalDenied,
    /// It was not asked, since the store failed: `on_store_error` decided.
    StoreError,
}

impl LimitDecision {
    /// All, in the order of their tally.
    pub const ALL: [LimitDecision; 6] = [
        LimitDecision::Allowed,
        LimitDecision::Denied,
        LimitDecision::ShadowDenied,
        LimitDecision::LocalAllowed,
        LimitDecision::LocalDenied,
        LimitDecision::StoreError,
    ];

    /// One word for labels.
    pub fn label(self) -> &'static str {
        match self {
            LimitDecision::Allowed => "allowed",
            LimitDecision::Denied => "denied",
            LimitDecision::ShadowDenied => "shadow_denied",
            LimitDecision::LocalAllowed => "local_allowed",
            LimitDecision::LocalDenied => "local_denied",
            LimitDecision::StoreError => "store_error",
        }
    }

    /// Whether it is about an identity that is over the limit.
    fn is_denial(self) -> bool {
        match self {
            LimitDecision::Denied | LimitDecision::ShadowDenied | LimitDecision::LocalDenied => true,
            LimitDecision::Allowed | LimitDecision::LocalAllowed | LimitDecision::StoreError => false,
        }
    }

    /// What the limit of a check had to do with the decision; none if others denied.
    pub fn from_decision(check: &LimitCheck<'_, '_>, decision: &Decision<'_>) -> Option<Self> {
        let is_local = decision.decided_by == DecidedBy::Local;
        let find_result = |limit_index| decision.results.iter().find(move |result| result.limit_index == limit_index);
        if decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit)) {
            return Some(LimitDecision::ShadowDenied);
        }
        if decision.is_overloaded || is_local && check.limit.on_store_error != OnStoreError::Local {
            return Some(LimitDecision::StoreError);
        }
        match (decision.admitted, is_local) {
            (true, false) => Some(LimitDecision::Allowed),
            (true, true) => Some(LimitDecision::LocalAllowed),
            (false, local) => find_result(check.limit_index)
                .filter(|result| result.denies())
                .map(|_| if local { LimitDecision::LocalDenied } else { LimitDecision::Denied }),
        }
    }
}

/// The counts of a process.
#[derive(Debug, Default)]
pub struct RequestMetrics {
    /// Requests by route; those that match none have no name.
    pub routes: MetricFamily<ResponseStats>,
    /// Decisions by limit, by [`Judgement`].
    pub limits: MetricFamily<Counter<6>>,
    /// Requests that were denied, whichever of their limits it was.
    pub denied_requests: MetricFamily<Counter<1>>,
    /// Who was denied by each limit.
    pub top_denied: MetricFamily<TopDenied>,
    /// Answers by upstream.
    pub upstreams: MetricFamily<ResponseStats>,
    /// Requests that were sent again by upstream, by [`Again`].
    pub retries: MetricFamily<Counter<3>>,
    /// What deciding took, all limits of a request together.
    pub check_durations: MetricFamily<Histogram>,
}

/// Answers by class of status, and the time to their heads.
#[derive(Debug, Default)]
pub struct ResponseStats {
    /// By [`CLASSES`]; in one more those that never came.
    pub status_classes: Counter<{ STATUS_CLASSES.len() + 1 }>,
    /// From the request to the head of the response.
    pub latency: Histogram,
}

impl ResponseStats {
    /// One more; none if it never came.
    pub fn record(&self, status: Option<StatusCode>, elapsed: Duration) {
        let class = |status: StatusCode| usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        self.status_classes.increment(status.map_or(STATUS_CLASSES.len(), class));
        self.latency.observe(elapsed);
    }
}

/// Those of one worker, by the indices of the configuration that it serves.
#[derive(Debug)]
pub(super) struct WorkerMetrics {
    routes: Vec<RouteMetrics>,
    /// Requests that match no route.
    unmatched: Arc<ResponseStats>,
    upstreams: Vec<UpstreamMetrics>,
    denied_requests: Arc<Counter<1>>,
    check_durations: Arc<Histogram>,
}

#[derive(Debug)]
struct UpstreamMetrics {
    responses: Arc<ResponseStats>,
    retries: Arc<Counter<3>>,
}

#[derive(Debug)]
struct RouteMetrics {
    responses: Arc<ResponseStats>,
    limits: Vec<(Arc<Counter<6>>, Arc<TopDenied>)>,
}

impl WorkerMetrics {
    /// The counts that a worker adds to.
    pub(super) fn new(request_metrics: &RequestMetrics, runtime: &CompiledConfig, worker: usize) -> Self {
        let limits = |route: &crate::snapshot::routes::Route| {
            let names = route.rate_limits.limits.iter().map(|route_limit| &*route_limit.limit.name);
            names
                .map(|name| {
                    (
                        request_metrics.limits.get_or_create(name, worker),
                        request_metrics.top_denied.get_or_create(name, worker),
                    )
                })
                .collect()
        };
        let upstream_metrics = |name: &str| UpstreamMetrics {
            responses: request_metrics.upstreams.get_or_create(name, worker),
            retries: request_metrics.retries.get_or_create(name, worker),
        };
        let routes = runtime.routes.iter();
        WorkerMetrics {
            routes: routes
                .map(|route| RouteMetrics {
                    responses: request_metrics.routes.get_or_create(&route.name, worker),
                    limits: limits(route),
                })
                .collect(),
            unmatched: request_metrics.routes.get_or_create("", worker),
            upstreams: runtime.upstreams.iter().map(|upstream| upstream_metrics(&upstream.name)).collect(),
            denied_requests: request_metrics.denied_requests.get_or_create("", worker),
            check_durations: request_metrics.check_durations.get_or_create("", worker),
        }
    }

    /// A request was answered.
    pub(super) fn record_response(&self, route: Option<usize>, status: StatusCode, elapsed: Duration) {
        route.map_or(&self.unmatched, |route| &self.routes[route].responses).record(Some(status), elapsed);
    }

    /// A request was sent on, and what came of it.
    pub(super) fn record_upstream(
        &self,
        upstream: usize,
        result: &Result<Response<Body>, UpstreamError>,
        elapsed: Duration,
        attempts: &AttemptLog,
    ) {
        let UpstreamMetrics { responses, retries } = &self.upstreams[upstream];
        if !result.as_ref().is_err_and(UpstreamError::is_client_error) {
            responses.record(result.as_ref().ok().map(Response::status), elapsed);
        }
        for (reason, times) in attempts.retries().into_iter().enumerate().filter(|(_, times)| *times > 0) {
            retries.add(reason, times);
        }
    }

    /// The limits of a route decided. Names of identities are asked for where somebody is denied.
    pub(super) fn record_decision(
        &self,
        route: usize,
        checks: &[LimitCheck<'_, '_>],
        decision: &Result<Decision<'_>, StoreUnavailable>,
        elapsed: Duration,
        name: impl Fn(&LimitCheck<'_, '_>) -> IdentityDisplay,
    ) {
        self.check_durations.observe(elapsed);
        if decision.as_ref().is_ok_and(|decision| !decision.admitted) {
            self.denied_requests.increment(0);
        }
        for check in checks {
            let limit_decision = match decision {
                Ok(decision) => LimitDecision::from_decision(check, decision),
                Err(_) => Some(LimitDecision::StoreError),
            };
            let (counter, top_denied) = &self.routes[route].limits[check.limit_index];
            if let Some(limit_decision) = limit_decision {
                counter.increment(limit_decision as usize);
                if limit_decision.is_denial() {
                    top_denied.record(check.identity, monotonic(), || name(check));
                }
            }
        }
    }
}

// What the access log and traces say of a decision, and of what became of a request after it.

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
    let effective_limit = decision.and_then(local_reply::effective_limit).and_then(|status| {
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
