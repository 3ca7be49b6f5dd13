//! Request metrics of a worker: requests by route, decisions by limit, responses by upstream, and the identities with
//! the most denials or the highest costs.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use datasketches::frequencies::{ErrorType, FrequentItemsSketch};
use http::{Response, StatusCode};
use tokio::sync::Semaphore;
use tracing::warn;

use crate::clock::{LogThrottle, monotonic};
use crate::http::body::Body;
use crate::http::body_limits::{BufferBudget, RestCounter, UsageByNetwork};
use crate::identity::auth::ProviderKind;
use crate::identity::display::IdentityDisplay;
use crate::limiter::algorithm::Outcome;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::key::Identity;
use crate::limiter::metrics::{Counter, Histogram, MetricFamily};
use crate::limiter::quota::Quota;
use crate::limiter::spec::OnStoreError;
use crate::limiter::store::DecidedBy;
use crate::payload::llm::learned_output::LearnedOutput;
use crate::payload::llm::usage::{COUNTED_KINDS, TokenUsage};
use crate::proxy::mirror_state::{MirrorBudget, MirrorStats};
use crate::snapshot::CompiledConfig;
use crate::snapshot::descriptor_files::LABEL_SEPARATOR;
use crate::snapshot::descriptors::{DescriptorRule, NearLimit};
use crate::snapshot::route_action::BUFFER_DIVISOR;
use crate::telemetry::outcome::RequestOutcome;
use crate::upstream::error::{FailureReason, UpstreamError};
use crate::upstream::retry::{AttemptLog, RetryReason};

/// Status classes, as metric labels.
pub const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// Error statuses that are counted, as metric labels. All 5xx statuses that are not in the list share the last counter.
/// 4xx statuses that are not in the list are not counted. 499 means that the client aborted the request before the
/// response.
pub const COUNTED_STATUSES: [&str; 14] =
    ["400", "401", "403", "404", "408", "413", "429", "431", "499", "500", "502", "503", "504", "5xx"];

/// Return the index of a status in [`COUNTED_STATUSES`], or `None` if the status is not counted.
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
        500 => Some(9),
        502..=504 => Some(usize::from(status.as_u16()) - 492),
        501.. => Some(13),
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
    /// The limit was not checked because the store failed. `on_store_error` determined whether to admit the request.
    StoreError,
}

impl LimitDecision {
    /// All values of this enum. The counters are stored in the order of this list.
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
    pub(super) fn is_denial(self) -> bool {
        match self {
            LimitDecision::Denied | LimitDecision::ShadowDenied | LimitDecision::LocalDenied => true,
            LimitDecision::Allowed | LimitDecision::LocalAllowed | LimitDecision::StoreError => false,
        }
    }

    /// Return the effect of the check's limit as [`from_decision`](Self::from_decision) does, also if there is no
    /// decision.
    pub fn from_result(check: &LimitCheck<'_, '_>, decision: &Result<Decision<'_>, StoreUnavailable>) -> Option<Self> {
        match decision {
            Ok(decision) => LimitDecision::from_decision(check, decision),
            Err(_) => Some(LimitDecision::StoreError),
        }
    }

    /// Return the effect of the check's limit on the request, or `None` if the limit has no effect because only other
    /// limits denied the request.
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

/// The result of a call of the rate limit service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallResult {
    /// The call was admitted.
    Allowed,
    /// The call was denied.
    Denied,
    /// The call was denied because the store failed or was late.
    StoreError,
    /// The call was denied because it exceeds a bound.
    Unchecked,
    /// The call got an error.
    Invalid,
}

impl CallResult {
    /// All values of this enum. The counters are stored in the order of this list.
    pub const ALL: [CallResult; 5] =
        [CallResult::Allowed, CallResult::Denied, CallResult::StoreError, CallResult::Unchecked, CallResult::Invalid];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            CallResult::Allowed => "allowed",
            CallResult::Denied => "denied",
            CallResult::StoreError => "store_error",
            CallResult::Unchecked => "unchecked",
            CallResult::Invalid => "invalid",
        }
    }
}

/// The costs of a descriptor on a call, in the kinds that envoyproxy/ratelimit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Hits([u64; HIT_KINDS.len()]);

/// The kinds of [`Hits`], as envoyproxy/ratelimit names them.
pub const HIT_KINDS: [&str; 5] = ["total_hits", "over_limit", "near_limit", "within_limit", "shadow_mode"];

/// Maximum number of series of [`Hits`]. Series without values of calls are not bounded by this number.
const MAX_HIT_SERIES: usize = 1_000;

impl Hits {
    /// Return the hits of a descriptor with this cost. A cost counts as near the limit if it is admitted beyond the share
    /// `near_limit` of the quota. `usage` is the quota and the outcome of the limit, if they are known.
    pub(super) fn new(
        cost: u64,
        decided: Option<LimitDecision>,
        usage: Option<(Quota, Outcome)>,
        near_limit: NearLimit,
    ) -> Self {
        let near = usage.map_or(0, |(quota, outcome)| {
            let used = quota.count.saturating_sub(outcome.remaining);
            used.saturating_sub(near_limit.of(quota.count)).min(cost)
        });
        match decided {
            Some(LimitDecision::Allowed | LimitDecision::LocalAllowed) => Hits([cost, 0, near, cost, 0]),
            Some(LimitDecision::Denied | LimitDecision::LocalDenied) => Hits([cost, cost, 0, 0, 0]),
            Some(LimitDecision::ShadowDenied) => Hits([cost, cost, 0, 0, cost]),
            Some(LimitDecision::StoreError) | None => Hits([cost, 0, 0, 0, 0]),
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
    /// All values of this enum. The counters are stored in the order of this list.
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
    /// Responses by route. Responses to requests without a route are counted under the empty name.
    pub routes: MetricFamily<ResponseStats>,
    /// Responses by route and [`COUNTED_STATUSES`].
    pub statuses: MetricFamily<StatusCounter>,
    /// Requests by route and [`RequestOutcome`], except for `ok`. A route has no counters before the first such request.
    pub outcomes: Arc<MetricFamily<OutcomeCounter>>,
    /// Decisions by limit and [`LimitDecision`].
    pub limits: MetricFamily<Counter<6>>,
    /// Costs of LLM requests by route and limit (see [`split_token_counter_name`]). The first counter contains reserved
    /// costs, the others contain settled costs by [`SETTLED_BY`].
    pub tokens: MetricFamily<Counter<4>>,
    /// Decisions by descriptor (see [`split_descriptor_name`]) and [`LimitDecision`].
    pub descriptors: MetricFamily<Counter<6>>,
    /// Calls of the rate limit service by [`CallResult`].
    pub calls: MetricFamily<Counter<{ CallResult::ALL.len() }>>,
    /// Descriptors of calls that no descriptor of the configuration matches, by domain. Empty for unknown domains.
    pub unmatched_descriptors: MetricFamily<Counter<1>>,
    /// Hits by the name of their descriptor (see [`split_hits_name`]) and [`HIT_KINDS`].
    pub hits: Arc<MetricFamily<Counter<{ HIT_KINDS.len() }>>>,
    /// Tokens of LLM requests by route and [`COUNTED_KINDS`].
    pub token_kinds: MetricFamily<Counter<{ COUNTED_KINDS.len() }>>,
    /// Requests that at least one limit denied, by route.
    pub denied_requests: MetricFamily<Counter<1>>,
    /// Most frequently denied identities by limit.
    pub top_denied: MetricFamily<TopIdentities>,
    /// Identities with the highest costs of LLM requests by limit.
    pub top_costs: MetricFamily<TopIdentities>,
    /// Responses by upstream.
    pub upstreams: MetricFamily<ResponseStats>,
    /// Retries by upstream and [`RetryReason`].
    pub retries: MetricFamily<Counter<{ RetryReason::ALL.len() }>>,
    /// Requests without a usable response, by upstream and [`FailureReason`].
    pub upstream_failures: MetricFamily<Counter<{ FailureReason::ALL.len() }>>,
    /// Requests by authentication server and [`AuthResult`].
    pub forward_auth: MetricFamily<Counter<4>>,
    /// Duration of rate limit checks, for all limits of a request together.
    pub check_durations: MetricFamily<Histogram>,
    /// Duration of the checks of calls of the rate limit service.
    pub call_durations: MetricFamily<Histogram>,
    /// Requests for WebSockets on routes that do not allow WebSockets.
    pub ignored_websockets: MetricFamily<Counter<1>>,
    /// Copies of mirrored requests, by route.
    pub mirrors: MetricFamily<MirrorStats>,
    /// Memory budget for the bodies of all mirrored copies.
    pub mirror_budget: MirrorBudget,
    /// Bytes of inspected request bodies by client network.
    pub inspected_by_network: Arc<UsageByNetwork>,
    /// Responses that are read after their clients have left.
    pub rests: Arc<RestCounter>,
    /// Permits to parse long request bodies outside of the workers.
    pub parser_permits: ParserPermits,
    /// The output tokens of responses of LLM APIs.
    pub learned_output: Arc<LearnedOutput>,
}

/// Maximum number of names of a metric, such as routes, that the configuration does not use any more.
const MAX_UNUSED_NAMES: usize = 1000;

impl RequestMetrics {
    /// Drop the metrics of names that the configuration does not use any more, if they are too many.
    pub fn drop_unused(&self) {
        let most = MAX_UNUSED_NAMES;
        self.routes.drop_unused(most);
        self.statuses.drop_unused(most);
        self.outcomes.drop_unused(most);
        self.limits.drop_unused(most);
        self.tokens.drop_unused(most);
        self.descriptors.drop_unused(most);
        self.unmatched_descriptors.drop_unused(most);
        self.hits.drop_unused(most);
        self.token_kinds.drop_unused(most);
        self.denied_requests.drop_unused(most);
        self.top_denied.drop_unused(most);
        self.top_costs.drop_unused(most);
        self.upstreams.drop_unused(most);
        self.retries.drop_unused(most);
        self.upstream_failures.drop_unused(most);
        self.forward_auth.drop_unused(most);
        self.mirrors.drop_unused(most);
    }
}

/// Permits to parse long request bodies on blocking threads: one for every two processors, so that the workers do not
/// wait for a processor.
#[derive(Debug)]
pub struct ParserPermits(Arc<Semaphore>);

impl Default for ParserPermits {
    fn default() -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        ParserPermits(Arc::new(Semaphore::new((processors / 2).max(1))))
    }
}

/// Index of reserved costs in the counters of [`RequestMetrics::tokens`].
const RESERVED_TOKENS: usize = 0;
/// Index of settled costs that the response reported.
pub(super) const SETTLED_REPORTED: usize = 1;
/// Index of settled costs that were estimated.
pub(super) const SETTLED_ESTIMATED: usize = 2;
/// Index of reservations that stay charged, because nothing is known about the usage.
pub(super) const SETTLED_RESERVED: usize = 3;

/// Sources of settled costs as metric labels, in the order of their counters. The counter of reserved costs precedes
/// these counters.
pub const SETTLED_BY: [&str; 3] = ["reported", "estimated", "reserved"];

/// Return the name of the token counters: the route name and the limit name, separated by a space. Neither a route name
/// nor a limit name contains a space.
fn token_counter_name(route: &str, limit: &str) -> String {
    format!("{route} {limit}")
}

/// Split a name in [`RequestMetrics::tokens`] into the route and the limit.
pub fn split_token_counter_name(name: &str) -> (&str, &str) {
    name.split_once(' ').unwrap_or((name, ""))
}

/// Return the name of the counters of a descriptor: its domain and its entries, separated by a line break.
pub fn descriptor_name(domain: &str, entries: &str) -> String {
    format!("{domain}\n{entries}")
}

/// Split a name in [`RequestMetrics::descriptors`] into the domain and the entries.
pub fn split_descriptor_name(name: &str) -> (&str, &str) {
    name.split_once('\n').unwrap_or((name, ""))
}

/// Split a name in [`RequestMetrics::hits`] into the domain and the labels of the entries.
pub fn split_hits_name(name: &str) -> (&str, Vec<&str>) {
    let mut parts = name.split(LABEL_SEPARATOR);
    (parts.next().unwrap_or_default(), parts.collect())
}

/// Number of responses, for each entry of [`COUNTED_STATUSES`].
pub type StatusCounter = Counter<{ COUNTED_STATUSES.len() }>;

/// Number of requests, for each entry of [`RequestOutcome::ALL`].
pub type OutcomeCounter = Counter<{ RequestOutcome::ALL.len() }>;

/// Responses by status class, and the time to the response headers.
#[derive(Debug, Default)]
pub struct ResponseStats {
    /// Counters by [`STATUS_CLASSES`], followed by a counter of requests without a response.
    pub status_classes: Counter<{ STATUS_CLASSES.len() + 1 }>,
    /// Time from the request to the response headers.
    pub latency: Histogram,
}

impl ResponseStats {
    /// Record the status of a response, or `None` if there was no response.
    pub fn record(&self, status: Option<StatusCode>, elapsed: Duration) {
        self.count(status);
        self.latency.observe(elapsed);
    }

    fn count(&self, status: Option<StatusCode>) {
        let class = |status: StatusCode| usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        self.status_classes.increment(status.map_or(STATUS_CLASSES.len(), class));
    }
}

/// Metrics of one worker. The metrics have the same indices as the routes, limits and upstreams of the worker's current
/// configuration.
#[derive(Debug)]
pub(super) struct WorkerMetrics {
    routes: Vec<RouteMetrics>,
    /// Responses to requests that match no route.
    unmatched: ResponseMetrics,
    outcomes: Arc<MetricFamily<OutcomeCounter>>,
    upstreams: Vec<UpstreamMetrics>,
    descriptors: Vec<DescriptorMetrics>,
    calls: Arc<Counter<{ CallResult::ALL.len() }>>,
    /// By domain. The empty name stands for unknown domains.
    unmatched_descriptors: HashMap<Box<[u8]>, Arc<Counter<1>>>,
    hits: Arc<MetricFamily<Counter<{ HIT_KINDS.len() }>>>,
    worker: usize,
    /// Counters of [`AuthResult`] by the index of the provider. `None` for providers of any kind except `forward`.
    forward_auth: Vec<Option<Arc<Counter<4>>>>,
    check_durations: Arc<Histogram>,
    call_durations: Arc<Histogram>,
    ignored_websockets: Arc<Counter<1>>,
    pub(super) mirror_budget: Arc<BufferBudget>,
    pub(super) inspected_by_network: Arc<UsageByNetwork>,
    pub(super) rests: Arc<RestCounter>,
    pub(super) parser_permits: Arc<Semaphore>,
    pub(super) learned_output: Arc<LearnedOutput>,
}

#[derive(Debug)]
struct DescriptorMetrics {
    decisions: Arc<Counter<6>>,
    /// The hits of a descriptor of a YAML file, without values of calls.
    hits: Option<Arc<Counter<{ HIT_KINDS.len() }>>>,
    limits: Vec<(Arc<Counter<6>>, Arc<TopIdentities>)>,
}

#[derive(Debug)]
struct UpstreamMetrics {
    responses: Arc<ResponseStats>,
    retries: Arc<Counter<{ RetryReason::ALL.len() }>>,
    failures: Arc<Counter<{ FailureReason::ALL.len() }>>,
}

/// Metrics of a limit that counts the tokens of an LLM API.
#[derive(Debug, Clone)]
pub(super) struct TokenMetrics {
    costs: Arc<Counter<4>>,
    kinds: Arc<Counter<{ COUNTED_KINDS.len() }>>,
    top: Arc<TopIdentities>,
    log: Arc<UsageLog>,
}

/// Limits the warnings of a worker about responses whose usage cannot be read.
#[derive(Debug)]
struct UsageLog {
    route: Arc<str>,
    limit: Box<str>,
    throttle: LogThrottle,
}

/// Minimum time between two warnings of a worker about the same route and limit.
const USAGE_LOG_INTERVAL: Duration = Duration::from_mins(1);

impl TokenMetrics {
    /// Record a settled reservation. `settled_by` is the index of the counter for the source of the cost, such as
    /// [`SETTLED_REPORTED`]. `client` is the identity that is charged, with its display name.
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

    /// Record the tokens of a request.
    pub(super) fn record_usage(&self, usage: TokenUsage) {
        for (kind, tokens) in usage.by_kind().into_iter().enumerate().filter(|(_, tokens)| *tokens > 0) {
            self.kinds.add(kind, tokens);
        }
    }

    /// Warn that a reservation stays charged because the usage in the response cannot be read.
    pub(super) fn warn_of_unknown_usage(&self, reason: &'static str) {
        let UsageLog { route, limit, throttle } = &*self.log;
        if throttle.should_log(USAGE_LOG_INTERVAL) {
            warn!(route = &**route, limit = &**limit, reason, "reservation stays charged: the token usage is unknown");
        }
    }
}

#[derive(Debug)]
struct RouteMetrics {
    responses: ResponseMetrics,
    denied_requests: Arc<Counter<1>>,
    limits: Vec<(Arc<Counter<6>>, Arc<TopIdentities>)>,
    /// Metrics of the limits that count tokens, indexed by limit. `None` for all other limits.
    tokens: Vec<Option<TokenMetrics>>,
    mirror: Option<Arc<MirrorStats>>,
}

/// Metrics of the responses of a route.
#[derive(Debug)]
struct ResponseMetrics {
    /// Name of the route. Empty if the requests match no route.
    route: Arc<str>,
    stats: Arc<ResponseStats>,
    statuses: Arc<StatusCounter>,
    /// Set by the first request with an outcome other than `ok`.
    outcomes: OnceLock<Arc<OutcomeCounter>>,
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
                kinds: request_metrics.token_kinds.get_or_create(&route.name, worker),
                top: request_metrics.top_costs.get_or_create(limit, worker),
                log: Arc::new(UsageLog {
                    route: route.name.clone(),
                    limit: limit.into(),
                    throttle: LogThrottle::new(),
                }),
            };
            limits.map(|limit| limit.cost.llm().map(|_| metrics(&limit.limit.name))).collect()
        };
        let upstream_metrics = |name: &str| UpstreamMetrics {
            responses: request_metrics.upstreams.get_or_create(name, worker),
            retries: request_metrics.retries.get_or_create(name, worker),
            failures: request_metrics.upstream_failures.get_or_create(name, worker),
        };
        let descriptor_metrics = |rule: &DescriptorRule| DescriptorMetrics {
            hits: rule
                .of_file
                .as_ref()
                .map(|of_file| request_metrics.hits.get_or_create(&of_file.metric.fixed(&rule.domain), worker)),
            decisions: request_metrics.descriptors.get_or_create(&descriptor_name(&rule.domain, &rule.name), worker),
            limits: rule
                .limits
                .iter()
                .map(|limit| {
                    let name = &limit.limit.name;
                    let decisions = request_metrics.limits.get_or_create(name, worker);
                    (decisions, request_metrics.top_denied.get_or_create(name, worker))
                })
                .collect(),
        };
        let unmatched = |domain: &str| {
            (domain.as_bytes().into(), request_metrics.unmatched_descriptors.get_or_create(domain, worker))
        };
        let mirror = |route: &crate::snapshot::routes::Route| {
            route.mirror.as_ref().map(|_| request_metrics.mirrors.get_or_create(&route.name, worker))
        };
        let MirrorBudget(mirror_budget) = &request_metrics.mirror_budget;
        mirror_budget.resize(config.server.max_buffered / BUFFER_DIVISOR);
        let responses = |route: &Arc<str>| ResponseMetrics {
            route: route.clone(),
            stats: request_metrics.routes.get_or_create(route, worker),
            statuses: request_metrics.statuses.get_or_create(route, worker),
            outcomes: OnceLock::new(),
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
            unmatched: responses(&"".into()),
            outcomes: request_metrics.outcomes.clone(),
            descriptors: config.descriptors.rules.iter().map(descriptor_metrics).collect(),
            calls: request_metrics.calls.get_or_create("", worker),
            unmatched_descriptors: config
                .descriptors
                .rules
                .iter()
                .map(|rule| &*rule.domain)
                .chain([""])
                .map(unmatched)
                .collect(),
            hits: request_metrics.hits.clone(),
            worker,
            upstreams: config.upstreams.iter().map(|upstream| upstream_metrics(&upstream.name)).collect(),
            forward_auth: config
                .auth
                .providers
                .iter()
                .map(|provider| match provider.kind {
                    ProviderKind::Forward(_) => {
                        Some(request_metrics.forward_auth.get_or_create(&provider.name, worker))
                    }
                    ProviderKind::ApiKey(_)
                    | ProviderKind::Jwt(_)
                    | ProviderKind::ClientCert
                    | ProviderKind::Basic(_) => None,
                })
                .collect(),
            check_durations: request_metrics.check_durations.get_or_create("", worker),
            call_durations: request_metrics.call_durations.get_or_create("", worker),
            ignored_websockets: request_metrics.ignored_websockets.get_or_create("", worker),
            mirror_budget: mirror_budget.clone(),
            inspected_by_network: request_metrics.inspected_by_network.clone(),
            rests: request_metrics.rests.clone(),
            parser_permits: request_metrics.parser_permits.0.clone(),
            learned_output: request_metrics.learned_output.clone(),
        }
    }

    /// Return the mirror metrics of a route, or `None` if the route has no `mirror`.
    pub(super) fn mirror(&self, route: usize) -> Option<&Arc<MirrorStats>> {
        self.routes[route].mirror.as_ref()
    }

    /// Return the token metrics of a limit of a route, or `None` if the limit does not count tokens.
    pub(super) fn tokens(&self, route: usize, limit_index: usize) -> Option<&TokenMetrics> {
        self.routes[route].tokens[limit_index].as_ref()
    }

    /// Return the response metrics of an upstream.
    pub(super) fn upstream_responses(&self, upstream: usize) -> Arc<ResponseStats> {
        self.upstreams[upstream].responses.clone()
    }

    /// Record a response to a client.
    pub(super) fn record_response(
        &self,
        route: Option<usize>,
        status: StatusCode,
        outcome: RequestOutcome,
        elapsed: Duration,
    ) {
        let responses = self.responses(route);
        responses.stats.record(Some(status), elapsed);
        if let Some(counted) = counted_status(status) {
            responses.statuses.increment(counted);
        }
        if outcome != RequestOutcome::Ok {
            self.record_outcome(responses, outcome);
        }
    }

    fn record_outcome(&self, responses: &ResponseMetrics, outcome: RequestOutcome) {
        let counter = responses.outcomes.get_or_init(|| self.outcomes.get_or_create(&responses.route, self.worker));
        counter.increment(outcome as usize);
    }

    /// Record a request that the client aborted before the response.
    pub(super) fn record_aborted(&self, route: Option<usize>) {
        let responses = self.responses(route);
        responses.statuses.increment(ABORTED);
        self.record_outcome(responses, RequestOutcome::ClientAborted);
    }

    /// Record a request for a WebSocket on a route that does not allow WebSockets.
    pub(super) fn record_ignored_websocket(&self) {
        self.ignored_websockets.increment(0);
    }

    /// Record the response to a request that the HTTP parser has rejected.
    pub(super) fn record_unparsed(&self, status: StatusCode) {
        let ResponseMetrics { stats, statuses, .. } = &self.unmatched;
        stats.count(Some(status));
        if let Some(counted) = counted_status(status) {
            statuses.increment(counted);
        }
    }

    fn responses(&self, route: Option<usize>) -> &ResponseMetrics {
        route.map_or(&self.unmatched, |route| &self.routes[route].responses)
    }

    /// Record a forwarded request, its result and its retries. Failures that the client causes are not counted as
    /// failures of the upstream.
    pub(super) fn record_upstream(
        &self,
        upstream: usize,
        result: &Result<Box<Response<Body>>, UpstreamError>,
        elapsed: Duration,
        attempts: &AttemptLog,
    ) {
        let UpstreamMetrics { responses, retries, failures } = &self.upstreams[upstream];
        if let Some(reason) = result.as_ref().err().and_then(FailureReason::from_error) {
            failures.increment(reason as usize);
        }
        if !result.as_ref().is_err_and(UpstreamError::is_client_error) {
            responses.record(result.as_ref().ok().map(|response| response.status()), elapsed);
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

    /// Record the duration of the checks of a call of the rate limit service.
    pub(super) fn record_call_duration(&self, elapsed: Duration) {
        self.call_durations.observe(elapsed);
    }

    /// Record a call of the rate limit service.
    pub(super) fn record_call(&self, result: CallResult) {
        self.calls.increment(result as usize);
    }

    /// Record descriptors of a call that no descriptor of the configuration matches.
    pub(super) fn record_unmatched(&self, domain: &[u8], count: u64) {
        if count > 0 {
            let counter = self.unmatched_descriptors.get(domain).or_else(|| self.unmatched_descriptors.get(&b""[..]));
            counter.into_iter().for_each(|counter| counter.add(0, count));
        }
    }

    /// Record the hits of a descriptor with this index. `name` is its name with the values of the call, which has a
    /// separate series unless there are too many series.
    pub(super) fn record_hits(&self, rule_index: usize, name: Option<String>, hits: Hits) {
        let DescriptorMetrics { hits: fixed, .. } = &self.descriptors[rule_index];
        let of_call = name.and_then(|name| self.hits.get_within(MAX_HIT_SERIES, &name, self.worker));
        if let Some(counter) = of_call.as_ref().or(fixed.as_ref()) {
            for (kind, cost) in hits.0.into_iter().enumerate().filter(|(_, cost)| *cost > 0) {
                counter.add(kind, cost);
            }
        }
    }

    /// Record the decision of a descriptor with this index on a call.
    pub(super) fn record_descriptor(&self, rule_index: usize, effect: LimitDecision) {
        self.descriptors[rule_index].decisions.increment(effect as usize);
    }

    /// Record the effect of a limit of a descriptor. `rule_index` is the index of the descriptor, and `limit_index` the
    /// index of the limit in the descriptor.
    pub(super) fn record_descriptor_limit(
        &self,
        rule_index: usize,
        limit_index: usize,
        effect: LimitDecision,
        identity: Identity,
        name: impl Fn() -> IdentityDisplay,
    ) {
        let (counter, top_denied) = &self.descriptors[rule_index].limits[limit_index];
        counter.increment(effect as usize);
        if effect.is_denial() {
            top_denied.record(identity, monotonic(), 1, name);
        }
    }

    /// Record a decision on the limits of a route. `name` returns the display name of an identity. This closure is
    /// called only for denied identities that the sketch does not contain.
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
            let limit_decision = LimitDecision::from_result(check, decision);
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

// === Top identities: the identities with the most denials or the highest cost of a limit in the last 5 minutes, in
// bounded memory ===

// Each minute has its own frequent-items sketch, a weighted Misra-Gries summary as in Apache DataSketches (Anderson,
// Bevin, Lang, Liberty, Rhodes and Thaler, "A High-Performance Algorithm for Identifying Frequent Items in Data
// Streams", 2017). A sketch keeps at most 96 identities. The error of an identity's sum is bounded: the sum is never
// too high. It is too low by at most 3.5 / 128 = 2.7 % of the sum of all identities in that minute. The sketches of all
// workers and minutes are merged when the list is read.

/// Capacity of a sketch. A sketch keeps at most three quarters of this number of identities.
const SKETCH_CAPACITY: usize = 128;

/// Number of minutes that are kept, including the current minute.
const WINDOW_MINUTES: usize = 5;
const MINUTE: Duration = Duration::from_secs(60);

/// Time that the list covers: the current minute and the minutes kept before it.
pub const WINDOW: Duration = Duration::from_secs(60 * WINDOW_MINUTES as u64);

/// An identity with its display name. Equality and hash use only the field `identity`.
#[derive(Debug, Clone)]
struct SketchKey {
    identity: Identity,
    name: IdentityDisplay,
}

impl PartialEq for SketchKey {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for SketchKey {}

impl Hash for SketchKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity.hash(state);
    }
}

type Sketch = FrequentItemsSketch<SketchKey>;

/// The denials or costs of one limit on one worker, by identity.
#[derive(Debug)]
pub struct TopIdentities {
    started_at: Instant,
    /// The sketches of the last minutes, each with the index of its minute. The worker locks the sketches to record a
    /// request, and the admin API locks them to read the list.
    sketches: Mutex<[Option<(u64, Sketch)>; WINDOW_MINUTES]>,
}

/// An identity with many denials or a high cost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeavyHitter {
    /// Hash of the identity.
    pub identity: Identity,
    /// Display name of the identity.
    pub name: IdentityDisplay,
    /// Lower bound of the identity's sum of denials or costs.
    pub lower_bound: u64,
    /// Upper bound of the identity's sum of denials or costs.
    pub upper_bound: u64,
}

impl Default for TopIdentities {
    fn default() -> Self {
        TopIdentities { started_at: monotonic(), sketches: Mutex::default() }
    }
}

impl TopIdentities {
    /// Add an amount to the sum of an identity: 1 for a denial, or a cost. `name` is called only if the sketch does not
    /// contain the identity.
    pub fn record(&self, identity: Identity, now: Instant, amount: u64, name: impl FnOnce() -> IdentityDisplay) {
        let minute = self.minute_index(now);
        let mut sketches = self.sketches.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut sketches[minute as usize % WINDOW_MINUTES];
        if slot.as_ref().is_none_or(|(sketch_minute, _)| *sketch_minute != minute) {
            *slot = new_sketch().map(|sketch| (minute, sketch));
        }
        let Some((_, sketch)) = slot else { return };
        let mut key = SketchKey { identity, name: IdentityDisplay::default() };
        if sketch.lower_bound(&key) == 0 {
            key.name = name();
        }
        sketch.update_with_count(key, amount);
    }

    /// Return the sum of all identities of a limit on all workers in the last 5 minutes, and the `count` identities
    /// with the largest sums.
    pub fn top(workers: &[Arc<TopIdentities>], now: Instant, count: usize) -> (u64, Vec<HeavyHitter>) {
        let Some(mut sum) = new_sketch() else { return (0, Vec::new()) };
        for worker in workers {
            let minute = worker.minute_index(now);
            let sketches = worker.sketches.lock().unwrap_or_else(PoisonError::into_inner);
            let recent =
                sketches.iter().flatten().filter(|(sketch_minute, _)| sketch_minute + (WINDOW_MINUTES as u64) > minute);
            recent.for_each(|(_, sketch)| sum.merge(sketch));
        }
        let rows = sum.frequent_items(ErrorType::NoFalseNegatives).into_iter().take(count);
        let hitters = rows.map(|row| {
            let SketchKey { identity, name } = row.item().clone();
            HeavyHitter { identity, name, lower_bound: row.lower_bound(), upper_bound: row.upper_bound() }
        });
        (sum.total_weight(), hitters.collect())
    }

    fn minute_index(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started_at).as_secs() / MINUTE.as_secs()
    }
}

fn new_sketch() -> Option<Sketch> {
    // Creating the sketch cannot fail, because the constant capacity is valid.
    FrequentItemsSketch::new(SKETCH_CAPACITY).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::display::DisplayPart;

    fn name(text: &str) -> IdentityDisplay {
        IdentityDisplay([DisplayPart { label: "ip".into(), value: Some(text.into()) }].into())
    }

    fn top(denied: &[Arc<TopIdentities>], now: Instant) -> Vec<(u128, u64, u64)> {
        let (_, often) = TopIdentities::top(denied, now, 3);
        often.iter().map(|often| (often.identity.0, often.lower_bound, often.upper_bound)).collect()
    }

    #[test]
    fn top_denied_merges_workers_and_sorts_by_count() {
        let workers = [Arc::<TopIdentities>::default(), Arc::default()];
        let now = monotonic();
        for (worker, identity, times) in [(0, 1, 3), (0, 2, 5), (1, 1, 4), (1, 3, 1)] {
            for _ in 0..times {
                workers[worker].record(Identity(identity), now, 1, || name(&identity.to_string()));
            }
        }
        assert_eq!(top(&workers, now), [(1, 7, 7), (2, 5, 5), (3, 1, 1)]);
        let (all, often) = TopIdentities::top(&workers, now, 1);
        assert_eq!((all, often[0].name.clone(), often.len()), (13, name("1"), 1));
    }

    #[test]
    fn amounts_are_added_up() {
        let workers = [Arc::<TopIdentities>::default()];
        let now = monotonic();
        for (identity, amount) in [(1, 900), (2, 5), (1, 100), (3, 0)] {
            workers[0].record(Identity(identity), now, amount, || name("a"));
        }
        assert_eq!(top(&workers, now), [(1, 1000, 1000), (2, 5, 5)]);
    }

    #[test]
    fn top_denied_covers_only_the_window() {
        let denied = [Arc::<TopIdentities>::default()];
        let at = |minutes: u32| denied[0].started_at + MINUTE * minutes;
        denied[0].record(Identity(1), at(0), 1, || name("1"));
        denied[0].record(Identity(2), at(4), 1, || name("2"));
        assert_eq!(top(&denied, at(4)).len(), 2);
        assert_eq!(top(&denied, at(5)), [(2, 1, 1)], "the first minute is outside the window");
        denied[0].record(Identity(3), at(5), 1, || name("3"));
        assert_eq!(top(&denied, at(8)).len(), 2, "the window contains the identities 2 and 3");
        assert_eq!(top(&denied, at(20)), []);
    }

    #[test]
    fn flood_of_identities_is_bounded_and_keeps_heavy_hitters() {
        let denied = [Arc::<TopIdentities>::default()];
        let (now, mut names) = (denied[0].started_at, 0);
        // One identity has 100,000 of 1.1 million denials, which is far more than the maximum error, so the list must
        // contain it.
        for stranger in 0..1_000_000_u128 {
            denied[0].record(Identity(1 << 64 | stranger), now, 1, || name("stranger"));
            if stranger % 10 == 0 {
                denied[0].record(Identity(7), now, 1, || {
                    names += 1;
                    name("the one")
                });
            }
        }
        let kept = denied[0]
            .sketches
            .lock()
            .unwrap()
            .iter()
            .flatten()
            .map(|(_, sketch)| sketch.num_active_items())
            .sum::<usize>();
        assert!(kept <= SKETCH_CAPACITY * 3 / 4, "{kept} identities are kept");
        let (all, often) = TopIdentities::top(&denied, now, 3);
        assert_eq!((all, often[0].identity, &often[0].name), (1_100_000, Identity(7), &name("the one")));
        let (at_least, at_most) = (often[0].lower_bound, often[0].upper_bound);
        assert!(at_least <= 100_000 && at_most >= 100_000 && at_most - at_least <= 1_100_000 * 35 / 1280, "{often:?}");
        assert!(names < 100, "the name of an identity in the sketch must not be computed again: {names} calls");
    }
}
