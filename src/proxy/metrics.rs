//! Request metrics of a worker: requests by route, decisions by limit, responses by upstream.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};

use crate::http::body::Body;
use crate::http::body_limits::{BufferBudget, InspectedByNetwork};
use crate::identity::auth::ProviderKind;
use crate::identity::display::IdentityDisplay;
use crate::limiter::clock::monotonic;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::key::Identity;
use crate::limiter::metrics::{Counter, Histogram, MetricFamily};
use crate::limiter::spec::OnStoreError;
use crate::limiter::store::DecidedBy;
use crate::proxy::mirror::{MirrorBudget, MirrorStats};
use crate::proxy::top_identities::TopIdentities;
use crate::snapshot::CompiledConfig;
use crate::snapshot::mirror::BUFFER_DIVISOR;
use crate::upstream::UpstreamError;
use crate::upstream::retry::AttemptLog;

/// Status classes, as metric labels.
pub const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// Statuses that are counted separately, and the classes of all other errors, as metric labels. 499 means that the
/// client aborted the request before the response.
pub const COUNTED_STATUSES: [&str; 10] = ["400", "401", "403", "404", "408", "413", "429", "431", "499", "5xx"];

/// Return the index of a status in [`COUNTED_STATUSES`].
fn counted_status(status: StatusCode) -> Option<usize> {
    match status.as_u16() {
        ..400 => None,
        400 => Some(0),
        401 => Some(1),
        403 => Some(2),
        404 => Some(3),
        408 => Some(4),
        413 => Some(5),
        429 => Some(6),
        431 => Some(7),
        499 => Some(ABORTED),
        500.. => Some(9),
        _ => None,
    }
}

/// Index of 499 in [`COUNTED_STATUSES`].
const ABORTED: usize = 8;

/// The effect of a limit on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitDecision {
    /// The limit admitted the request.
    Allowed,
    /// The limit denied the request.
    Denied,
    /// A limit in shadow mode would have denied the request.
    ShadowDenied,
    /// The local share of the limit admitted the request.
    LocalAllowed,
    /// The local share of the limit denied the request.
    LocalDenied,
    /// The limit was not checked because the store failed: `on_store_error` decided.
    StoreError,
}

impl LimitDecision {
    /// All values of this enum. The counters of the values are stored in the same order.
    pub const ALL: [LimitDecision; 6] = [
        LimitDecision::Allowed,
        LimitDecision::Denied,
        LimitDecision::ShadowDenied,
        LimitDecision::LocalAllowed,
        LimitDecision::LocalDenied,
        LimitDecision::StoreError,
    ];

    /// Return the value of the metric label.
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

    /// Return whether the decision means that the identity is over the limit.
    fn is_denial(self) -> bool {
        match self {
            LimitDecision::Denied | LimitDecision::ShadowDenied | LimitDecision::LocalDenied => true,
            LimitDecision::Allowed | LimitDecision::LocalAllowed | LimitDecision::StoreError => false,
        }
    }

    /// Return the effect of the check's limit on the decision, or `None` if other limits denied the request.
    pub fn from_decision(check: &LimitCheck<'_, '_>, decision: &Decision<'_>) -> Option<Self> {
        let is_local = decision.decided_by == DecidedBy::Local;
        let find_result = |limit_index| decision.results.iter().find(move |result| result.limit_index == limit_index);
        if decision.is_shadow_denied(check.limit) {
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

/// The result of a call to an authentication server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthResult {
    /// The server admitted the request.
    Admitted,
    /// The server denied the request.
    Denied,
    /// The server did not respond.
    Error,
    /// The request was admitted without a call to the server.
    Cached,
}

impl AuthResult {
    /// All values of this enum. The counters of the values are stored in the same order.
    pub const ALL: [AuthResult; 4] = [AuthResult::Admitted, AuthResult::Denied, AuthResult::Error, AuthResult::Cached];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            AuthResult::Admitted => "admitted",
            AuthResult::Denied => "denied",
            AuthResult::Error => "error",
            AuthResult::Cached => "cached",
        }
    }
}

/// Request metrics of the process.
#[derive(Debug, Default)]
pub struct RequestMetrics {
    /// Responses by route. Responses to requests without a route are under the empty name.
    pub routes: MetricFamily<ResponseStats>,
    /// Responses by route and [`COUNTED_STATUSES`].
    pub statuses: MetricFamily<StatusCounter>,
    /// Decisions by limit and [`LimitDecision`].
    pub limits: MetricFamily<Counter<6>>,
    /// Costs of LLM requests by route and limit (see [`split_token_counter_name`]): reserved costs, and settled costs
    /// by [`SETTLED_BY`].
    pub tokens: MetricFamily<Counter<4>>,
    /// Requests that any of their limits denied, by route.
    pub denied_requests: MetricFamily<Counter<1>>,
    /// Most frequently denied identities by limit.
    pub top_denied: MetricFamily<TopIdentities>,
    /// Identities with the highest costs of LLM requests by limit.
    pub top_costs: MetricFamily<TopIdentities>,
    /// Responses by upstream.
    pub upstreams: MetricFamily<ResponseStats>,
    /// Retries by upstream and [`RetryReason`](crate::upstream::retry::RetryReason).
    pub retries: MetricFamily<Counter<3>>,
    /// Requests by authentication server and [`AuthResult`].
    pub forward_auth: MetricFamily<Counter<4>>,
    /// Duration of rate limit checks, for all limits of a request together.
    pub check_durations: MetricFamily<Histogram>,
    /// Copies of requests, by route with `mirror`.
    pub mirrors: MetricFamily<MirrorStats>,
    /// Maximum number of bytes of the bodies of all copies.
    pub mirror_budget: MirrorBudget,
    /// Bytes of inspected request bodies by client network.
    pub inspected_by_network: Arc<InspectedByNetwork>,
}

/// Index of reserved costs in the counters of tokens.
const RESERVED_TOKENS: usize = 0;
/// Index of settled costs that the response reported.
pub(super) const SETTLED_REPORTED: usize = 1;
/// Index of settled costs that were estimated.
pub(super) const SETTLED_ESTIMATED: usize = 2;
/// Index of reservations that stay charged, because nothing is known about the response.
pub(super) const SETTLED_RESERVED: usize = 3;

/// Sources of settled costs as metric labels, in the order of their counters, which follow the counter of reserved
/// costs.
pub const SETTLED_BY: [&str; 3] = ["reported", "estimated", "reserved"];

/// Return the name of the counters of a route and a limit. Neither name contains a space.
fn token_counter_name(route: &str, limit: &str) -> String {
    format!("{route} {limit}")
}

/// Return the route and the limit in the result of [`token_counter_name`].
pub fn split_token_counter_name(name: &str) -> (&str, &str) {
    name.split_once(' ').unwrap_or((name, ""))
}

/// Number of responses, for each entry of [`COUNTED_STATUSES`].
pub type StatusCounter = Counter<{ COUNTED_STATUSES.len() }>;

/// Responses by status class, and the time to the response headers.
#[derive(Debug, Default)]
pub struct ResponseStats {
    /// Counters by [`STATUS_CLASSES`], followed by a counter of requests without a response.
    pub status_classes: Counter<{ STATUS_CLASSES.len() + 1 }>,
    /// Time from the request to the response headers.
    pub latency: Histogram,
}

impl ResponseStats {
    /// Record a response, or `None` if there was no response.
    pub fn record(&self, status: Option<StatusCode>, elapsed: Duration) {
        self.count(status);
        self.latency.observe(elapsed);
    }

    fn count(&self, status: Option<StatusCode>) {
        let class = |status: StatusCode| usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        self.status_classes.increment(status.map_or(STATUS_CLASSES.len(), class));
    }
}

/// Metrics of one worker, by the indices of its current configuration.
#[derive(Debug)]
pub(super) struct WorkerMetrics {
    routes: Vec<RouteMetrics>,
    /// Responses to requests that match no route.
    unmatched: (Arc<ResponseStats>, Arc<StatusCounter>),
    upstreams: Vec<UpstreamMetrics>,
    /// Counters by the index of the provider. `None` for providers of any kind except `forward`.
    forward_auth: Vec<Option<Arc<Counter<4>>>>,
    check_durations: Arc<Histogram>,
    pub(super) mirror_budget: Arc<BufferBudget>,
    pub(super) inspected_by_network: Arc<InspectedByNetwork>,
}

#[derive(Debug)]
struct UpstreamMetrics {
    responses: Arc<ResponseStats>,
    retries: Arc<Counter<3>>,
}

/// Metrics of a limit that counts the tokens of an LLM API.
#[derive(Debug, Clone)]
pub(super) struct TokenMetrics {
    costs: Arc<Counter<4>>,
    top: Arc<TopIdentities>,
}

impl TokenMetrics {
    /// Record a settled reservation. `settled_by` is the index of the source of the cost. `client` is the identity that
    /// is charged.
    pub(super) fn record(
        &self,
        reserved: u64,
        settled_by: usize,
        cost: u64,
        client: Option<&(Identity, IdentityDisplay)>,
    ) {
        self.costs.add(RESERVED_TOKENS, reserved);
        self.costs.add(settled_by, cost);
        if let Some((identity, name)) = client {
            self.top.record(*identity, monotonic(), cost, || name.clone());
        }
    }
}

#[derive(Debug)]
struct RouteMetrics {
    responses: (Arc<ResponseStats>, Arc<StatusCounter>),
    denied_requests: Arc<Counter<1>>,
    limits: Vec<(Arc<Counter<6>>, Arc<TopIdentities>)>,
    /// Metrics of the limits that count tokens, indexed by limit. `None` for all other limits.
    tokens: Vec<Option<TokenMetrics>>,
    mirror: Option<Arc<MirrorStats>>,
}

impl WorkerMetrics {
    /// Create the metrics of `worker` for a configuration.
    pub(super) fn new(request_metrics: &RequestMetrics, config: &CompiledConfig, worker: usize) -> Self {
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
        let tokens = |route: &crate::snapshot::routes::Route| {
            let limits = route.rate_limits.limits.iter();
            let metrics = |limit: &str| TokenMetrics {
                costs: request_metrics.tokens.get_or_create(&token_counter_name(&route.name, limit), worker),
                top: request_metrics.top_costs.get_or_create(limit, worker),
            };
            limits.map(|limit| limit.cost.llm().map(|_| metrics(&limit.limit.name))).collect()
        };
        let upstream_metrics = |name: &str| UpstreamMetrics {
            responses: request_metrics.upstreams.get_or_create(name, worker),
            retries: request_metrics.retries.get_or_create(name, worker),
        };
        let mirror = |route: &crate::snapshot::routes::Route| {
            route.mirror.as_ref().map(|_| request_metrics.mirrors.get_or_create(&route.name, worker))
        };
        let MirrorBudget(mirror_budget) = &request_metrics.mirror_budget;
        mirror_budget.resize(config.server.max_buffered / BUFFER_DIVISOR);
        let responses = |route: &str| {
            let stats = request_metrics.routes.get_or_create(route, worker);
            (stats, request_metrics.statuses.get_or_create(route, worker))
        };
        let routes = config.routes.iter();
        WorkerMetrics {
            routes: routes
                .map(|route| RouteMetrics {
                    responses: responses(&route.name),
                    denied_requests: request_metrics.denied_requests.get_or_create(&route.name, worker),
                    limits: limits(route),
                    tokens: tokens(route),
                    mirror: mirror(route),
                })
                .collect(),
            unmatched: responses(""),
            upstreams: config.upstreams.iter().map(|upstream| upstream_metrics(&upstream.name)).collect(),
            forward_auth: config
                .auth
                .providers
                .iter()
                .map(|provider| match provider.kind {
                    ProviderKind::Forward(_) => {
                        Some(request_metrics.forward_auth.get_or_create(&provider.name, worker))
                    }
                    _ => None,
                })
                .collect(),
            check_durations: request_metrics.check_durations.get_or_create("", worker),
            mirror_budget: mirror_budget.clone(),
            inspected_by_network: request_metrics.inspected_by_network.clone(),
        }
    }

    /// Return the copies of a route with `mirror`.
    pub(super) fn mirror(&self, route: usize) -> Option<&Arc<MirrorStats>> {
        self.routes[route].mirror.as_ref()
    }

    /// Return the metrics of a limit of a route that counts tokens.
    pub(super) fn tokens(&self, route: usize, limit_index: usize) -> Option<&TokenMetrics> {
        self.routes[route].tokens[limit_index].as_ref()
    }

    /// Return the responses of an upstream.
    pub(super) fn upstream_responses(&self, upstream: usize) -> Arc<ResponseStats> {
        self.upstreams[upstream].responses.clone()
    }

    /// Record a response to a client.
    pub(super) fn record_response(&self, route: Option<usize>, status: StatusCode, elapsed: Duration) {
        let (stats, statuses) = self.responses(route);
        stats.record(Some(status), elapsed);
        if let Some(counted) = counted_status(status) {
            statuses.increment(counted);
        }
    }

    /// Record a request that the client aborted before the response.
    pub(super) fn record_aborted(&self, route: Option<usize>) {
        self.responses(route).1.increment(ABORTED);
    }

    /// Record the response to a request that the HTTP parser has rejected.
    pub(super) fn record_unparsed(&self, status: StatusCode) {
        let (stats, statuses) = &self.unmatched;
        stats.count(Some(status));
        if let Some(counted) = counted_status(status) {
            statuses.increment(counted);
        }
    }

    fn responses(&self, route: Option<usize>) -> &(Arc<ResponseStats>, Arc<StatusCounter>) {
        route.map_or(&self.unmatched, |route| &self.routes[route].responses)
    }

    /// Record a forwarded request, its result and its retries. Failures that the client causes do not count for the
    /// upstream.
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

    /// Record the result of a call to the authentication server of a provider.
    pub(super) fn record_forward_auth(&self, provider: usize, result: AuthResult) {
        if let Some(Some(counter)) = self.forward_auth.get(provider) {
            counter.increment(result as usize);
        }
    }

    /// Record a decision on the limits of a route. `name` is called only for denied identities that the sketch does not
    /// contain.
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
            self.routes[route].denied_requests.increment(0);
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
                    top_denied.record(check.identity, monotonic(), 1, || name(check));
                }
            }
        }
    }
}
