//! What a worker counts: requests by route, decisions by limit, answers by upstream.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};

use super::denied::TopDenied;
use crate::http::body::Body;
use crate::identity::name::IdentityDisplay;
use crate::limit::backend::DecidedBy;
use crate::limit::clock::monotonic;
use crate::limit::decision::{Decision, LimitCheck};
use crate::limit::outage::StoreUnavailable;
use crate::limit::plan::OnStoreError;
use crate::runtime::CompiledConfig;
use crate::tally::{Counter, Histogram, MetricFamily};
use crate::upstream::{AttemptLog, UpstreamError};

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
        let limits = |route: &crate::runtime::Route| {
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
