//! `/api/live` streams server-sent events: first the metrics of the last hour, then one event per second.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::admin::connections::AdminConnection;
use crate::admin::metrics::sum_counts;
use crate::admin::response::{AdminResponse, ApiError, Result, format_rfc3339};
use crate::admin::state::{ProcessState, ReadinessReport};
use crate::clock::{monotonic, unix_us};
use crate::limiter::metrics::{BUCKET_BOUNDS_US, Counter, Histogram};
use crate::proxy::metrics::{
    COUNTED_STATUSES, LimitDecision, STATUS_CLASSES, descriptor_name, split_token_counter_name,
};
use crate::telemetry::outcome::RequestOutcome;

/// Maximum number of concurrent subscribers: a quarter of the maximum number of connections of the admin listener, so
/// that connections remain for health checks and metrics.
pub(super) const MAX_SUBSCRIBERS: usize = 16;

/// Capacity of the broadcast channel in events. The channel gets one event per second, so a subscriber that is more
/// than 16 s late misses events.
const EVENT_BUFFER: usize = 16;

/// The history of metrics, and the broadcast channel for the metrics of each new second.
#[derive(Debug)]
pub(super) struct EventStream {
    history: Mutex<History>,
    events: Sender<Bytes>,
    subscriber_permits: Arc<Semaphore>,
}

/// Data of the event `history`, which is the first event of a stream.
#[derive(Serialize)]
struct HistoryEvent<'a> {
    version: &'static str,
    window_seconds: usize,
    seconds: &'a VecDeque<PeriodStats>,
    interval_seconds: u64,
    interval_window_seconds: u64,
    intervals: &'a VecDeque<PeriodStats>,
    limit_intervals: Vec<LimitIntervals<'a>>,
    /// A command that sends a request to the gateway. `None` if no listener serves routes.
    example: Option<&'a str>,
}

/// Numbers of allowed and denied decisions of a limit, one pair for each element of `intervals`.
#[derive(Serialize)]
struct LimitIntervals<'a> {
    limit: &'a str,
    decisions: &'a VecDeque<[u32; 2]>,
}

/// Data of the event `second`, which follows once per second.
#[derive(Serialize)]
struct SecondEvent<'a> {
    second: PeriodStats,
    /// The interval that ended with this second, or `None` if no interval ended.
    interval: Option<PeriodStats>,
    connections: ConnectionCounts,
    /// Responses since the start of the process, for the statuses of `http_responses_total`.
    statuses: BTreeMap<&'static str, u64>,
    /// Responses to requests that match no route, since the start of the process.
    unmatched: u64,
    routes: Vec<RouteRequestCounts<'a>>,
    descriptors: Vec<DescriptorDecisionCounts<'a>>,
    upstreams: Vec<UpstreamRequestCounts<'a>>,
    limits: Vec<LimitDecisionCounts<'a>>,
    health: ReadinessReport<'a>,
    configuration: ConfigStatus,
}

/// The number of open client connections of the gateway, and the maximum.
#[derive(Serialize)]
pub(super) struct ConnectionCounts {
    pub(super) open: usize,
    pub(super) max: usize,
}

#[derive(Serialize)]
struct LimitDecisionCounts<'a> {
    limit: &'a str,
    quota: String,
    /// Quota unit, such as `requests`.
    unit: &'a str,
    shadow: bool,
    /// What the limit does while the store is unavailable: `local`, `allow` or `deny`.
    on_store_error: &'static str,
    /// Decisions since the start of the process, by kind.
    decisions: BTreeMap<&'static str, u64>,
    /// Settled cost of LLM requests since the start of the process, or `None` if the limit does not count LLM tokens.
    settled: Option<u64>,
    /// Numbers of allowed and denied decisions in the interval that ended with this second, or `None` if no interval
    /// ended.
    interval: Option<[u32; 2]>,
}

/// Requests of a route since the start of the process, by outcome.
#[derive(Serialize)]
struct RouteRequestCounts<'a> {
    route: &'a str,
    allowed: u64,
    denied: u64,
    errors: u64,
    /// The errors that have their cause in the gateway or its store, not in the upstream.
    gateway_errors: u64,
    /// 95th percentile of the time to the response headers in the last 10 to 20 s.
    p95_ms: Option<f32>,
}

/// Decisions of a descriptor on calls of the rate limit service since the start of the process.
#[derive(Serialize)]
struct DescriptorDecisionCounts<'a> {
    /// Domain and entries.
    descriptor: String,
    limits: Vec<&'a str>,
    allowed: u64,
    denied: u64,
    /// Decisions without an answer of the store.
    errors: u64,
}

/// Requests to an upstream since the start of the process. `errors` counts 5xx responses and requests without a
/// response.
#[derive(Serialize)]
struct UpstreamRequestCounts<'a> {
    upstream: &'a str,
    requests: u64,
    errors: u64,
}

/// Times in RFC 3339. When one of them changes, clients should request `/api/config` again.
#[derive(Serialize)]
struct ConfigStatus {
    loaded_at: String,
    last_error_at: Option<String>,
    /// Number of files whose newest content is not in use.
    rejected_files: usize,
}

/// A client that reads the event stream.
struct Subscriber {
    first: Option<Bytes>,
    events: Receiver<Bytes>,
    admin_stop: CancellationToken,
    connection: Arc<AdminConnection>,
    _permit: OwnedSemaphorePermit,
}

impl EventStream {
    pub(super) fn new(state: &ProcessState) -> Self {
        EventStream {
            history: Mutex::new(History::new(state)),
            events: Sender::new(EVENT_BUFFER),
            subscriber_permits: Arc::new(Semaphore::new(MAX_SUBSCRIBERS)),
        }
    }

    /// Sample the metrics once per second and send the result to all subscribers.
    pub(super) async fn run(&self, state: &ProcessState) -> Infallible {
        let mut ticks = interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let mut history = self.lock_history();
            let (second, interval) = history.tick(state);
            if self.events.receiver_count() > 0 {
                // Ignore the error of `send`, which means that the last subscriber has disconnected.
                let _ = self.events.send(second_event(second, interval, &history, state));
            }
        }
    }

    /// Return a response that streams the history and then an event for each new second.
    ///
    /// # Errors
    /// The maximum number of clients already read the stream. The status is 503.
    pub(super) fn subscribe(&self, state: &ProcessState, connection: &Arc<AdminConnection>) -> Result<AdminResponse> {
        let Ok(permit) = self.subscriber_permits.clone().try_acquire_owned() else {
            let detail =
                format!("{MAX_SUBSCRIBERS} clients already read /api/live, which is the maximum: close a dashboard");
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, detail));
        };
        let subscriber = {
            // Read the history and subscribe under one lock, so that `run` cannot add a second in between. Therefore,
            // the subscriber misses no second and receives no second twice.
            let history = self.lock_history();
            let limits = history.limit_intervals.iter();
            let history_event = HistoryEvent {
                version: env!("CARGO_PKG_VERSION"),
                window_seconds: HISTORY_SECONDS,
                seconds: &history.seconds,
                interval_seconds: INTERVAL.as_secs(),
                interval_window_seconds: INTERVAL.as_secs() * HISTORY_INTERVALS as u64,
                intervals: &history.intervals,
                limit_intervals: limits.map(|(limit, decisions)| LimitIntervals { limit, decisions }).collect(),
                example: state.example.as_deref(),
            };
            let first = Some(format_event("history", &history_event));
            let events = self.events.subscribe();
            let connection = connection.clone();
            let admin_stop = state.admin_stop.clone();
            Subscriber { first, events, admin_stop, connection, _permit: permit }
        };
        let events = StreamBody::new(stream::unfold(subscriber, Subscriber::next));
        let mut response = Response::new(events.boxed_unsync());
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        Ok(response)
    }

    /// Return the metrics of the last minute.
    pub(super) fn last_minute(&self, state: &ProcessState) -> PeriodStats {
        self.lock_history().recent(CounterSnapshot::take(state))
    }

    fn lock_history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber {
    async fn next(mut self) -> Option<(std::result::Result<Frame<Bytes>, Infallible>, Self)> {
        let event = match self.first.take() {
            Some(first) => first,
            None => self.admin_stop.run_until_cancelled(next_event(&mut self.events)).await??,
        };
        self.connection.set_streaming();
        Some((Ok(Frame::data(event)), self))
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.connection.set_idle();
    }
}

/// Receive the next event. If the subscriber is so slow that the channel has dropped events, continue with the oldest
/// event in the channel.
async fn next_event(events: &mut Receiver<Bytes>) -> Option<Bytes> {
    loop {
        match events.recv().await {
            Ok(event) => return Some(event),
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return None,
        }
    }
}

/// Format a `second` event: the metrics of a second, and the state of the process at the end of the second.
fn second_event(second: PeriodStats, interval: Option<PeriodStats>, history: &History, state: &ProcessState) -> Bytes {
    let active = state.config_handle.active();
    let decisions = LimitDecisions::take(state);
    let mut settled = BTreeMap::<String, u64>::new();
    for (name, workers) in state.request_metrics.tokens.all() {
        let (_, limit) = split_token_counter_name(&name);
        let [_reserved, by_source @ ..] = sum_counts(workers.iter().map(|counter| counter.values()));
        *settled.entry(limit.to_owned()).or_default() += by_source.iter().sum::<u64>();
    }
    let limits = active.config.listed_limits().into_iter().map(|(name, limit)| LimitDecisionCounts {
        limit: name,
        quota: limit.default_variant.quota.to_string(),
        unit: &limit.unit,
        shadow: limit.shadow,
        on_store_error: limit.on_store_error.label(),
        decisions: LimitDecision::ALL.iter().map(|kind| kind.label()).zip(decisions.of(name)).collect(),
        settled: settled.get(name).copied(),
        interval: interval.and_then(|_| history.limit_intervals.get(name)?.back().copied()),
    });
    let responses: BTreeMap<_, _> = state.request_metrics.routes.all().into_iter().collect();
    let outcomes: BTreeMap<_, _> = state.request_metrics.outcomes.all().into_iter().collect();
    let [older, _] = &history.route_starts;
    let denials: BTreeMap<_, _> = state.request_metrics.denied_requests.all().into_iter().collect();
    let routes = active.config.routes.iter().map(|route| {
        let workers = responses.get(&*route.name).into_iter().flatten();
        let classes = sum_counts(workers.map(|responses| responses.status_classes.values()));
        let workers = denials.get(&*route.name).into_iter().flatten();
        let [denied] = sum_counts(workers.map(|counter| counter.values()));
        let errors = classes[SERVER_ERROR];
        // Use `saturating_sub`, because the gateway counts a denial shortly before the response to the same request.
        // Until it counts the response, `denied + errors` may exceed the number of responses.
        let allowed = classes.iter().sum::<u64>().saturating_sub(denied + errors);
        let workers = outcomes.get(&*route.name).into_iter().flatten();
        let by_outcome = RequestOutcome::ALL.iter().zip(sum_counts(workers.map(|counter| counter.values())));
        let gateway_errors = by_outcome.filter(|(outcome, _)| outcome.is_gateway_error()).map(|(_, count)| count).sum();
        let workers = responses.get(&*route.name).into_iter().flatten();
        let latency = sum_buckets(workers.map(|responses| &responses.latency));
        let p95_ms = older.get(&route.name).and_then(|earlier| quantile(&difference(&latency, earlier), 0.95));
        RouteRequestCounts { route: &route.name, allowed, denied, errors, gateway_errors, p95_ms }
    });
    let decided: BTreeMap<_, _> = state.request_metrics.descriptors.all().into_iter().collect();
    let descriptors = active.config.descriptors.rules.iter().take(MAX_LISTED_DESCRIPTORS).map(|rule| {
        let workers = decided.get(&*descriptor_name(&rule.domain, &rule.name)).into_iter().flatten();
        let counts = sum_counts(workers.map(|counter| counter.values()));
        let sum = |kinds: &[LimitDecision]| kinds.iter().map(|kind| counts[*kind as usize]).sum();
        DescriptorDecisionCounts {
            descriptor: format!("{} {}", rule.domain, rule.name),
            limits: rule.limits.iter().map(|limit| &*limit.limit.name).collect(),
            allowed: sum(&[LimitDecision::Allowed, LimitDecision::LocalAllowed, LimitDecision::ShadowDenied]),
            denied: sum(&[LimitDecision::Denied, LimitDecision::LocalDenied]),
            errors: sum(&[LimitDecision::StoreError]),
        }
    });
    let responses: BTreeMap<_, _> = state.request_metrics.upstreams.all().into_iter().collect();
    let upstreams = active.config.upstreams.iter().map(|upstream| {
        let workers = responses.get(&*upstream.name).into_iter().flatten();
        let classes = sum_counts(workers.map(|responses| responses.status_classes.values()));
        let errors = classes[SERVER_ERROR] + classes[STATUS_CLASSES.len()];
        UpstreamRequestCounts { upstream: &upstream.name, requests: classes.iter().sum(), errors }
    });
    let counters = state.request_metrics.statuses.all();
    let counts = sum_counts(counters.iter().flat_map(|(_, workers)| workers).map(|counter| counter.values()));
    let statuses = COUNTED_STATUSES.into_iter().zip(counts).filter(|(_, count)| *count > 0).collect();
    let routes_metrics = state.request_metrics.routes.all();
    let unmatched = routes_metrics.iter().filter(|(name, _)| name.is_empty()).flat_map(|(_, workers)| workers);
    let unmatched = sum_counts(unmatched.map(|responses| responses.status_classes.values())).iter().sum();
    let (open, max) = state.connection_limits.open_and_max();
    let second_event = SecondEvent {
        second,
        interval,
        connections: ConnectionCounts { open, max },
        statuses,
        unmatched,
        routes: routes.collect(),
        descriptors: descriptors.collect(),
        upstreams: upstreams.collect(),
        limits: limits.collect(),
        health: state.readiness(),
        configuration: ConfigStatus {
            loaded_at: format_rfc3339(active.active_since_us),
            last_error_at: state.config_handle.last_failure().map(|failure| format_rfc3339(failure.failed_at_us)),
            rejected_files: state.config_handle.rejected_files().len(),
        },
    };
    format_event("second", &second_event)
}

/// Format a server-sent event (HTML standard, section 9.2). Serialized JSON contains no newline, so one `data` line is
/// sufficient.
fn format_event(name: &str, data: &impl Serialize) -> Bytes {
    // Serialization cannot fail, because the value has only strings and numbers.
    format!("event: {name}\ndata: {}\n\n", serde_json::to_string(data).unwrap_or_default()).into()
}

// === History: request rates and latencies of the last hour ===

/// Number of seconds in the history.
const HISTORY_SECONDS: usize = 15 * 60;

/// Length of an interval. For a history of one hour, intervals take less memory than seconds.
const INTERVAL: Duration = Duration::from_secs(10);

/// Number of intervals in the history: one hour.
const HISTORY_INTERVALS: usize = 360;

/// Maximum number of limits with a history. If there are more limits, only the first ones in alphabetical order have a
/// history. This maximum bounds the memory: each history takes 3 KiB.
const MAX_LIMIT_HISTORIES: usize = 64;

/// Maximum number of routes with a 95th percentile, which bounds the memory: each takes 300 bytes.
const MAX_ROUTE_LATENCIES: usize = 512;

/// Maximum number of descriptors in an event, which bounds its length.
const MAX_LISTED_DESCRIPTORS: usize = 512;

/// Number of intervals that `/api/status` adds up: one minute.
const RECENT_INTERVALS: usize = 6;

/// Index of the status class 5xx.
const SERVER_ERROR: usize = 4;

type Buckets = [u64; BUCKET_BOUNDS_US.len() + 1];

/// Metrics of a second or of an interval.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct PeriodStats {
    /// End of the period, ms since the Unix epoch.
    at_ms: u64,
    /// Actual length of the period in ms. The length varies, because the timer may fire late on a busy machine.
    ms: u64,
    allowed: u64,
    denied: u64,
    errors: u64,
    p50_ms: Option<f32>,
    p95_ms: Option<f32>,
    p99_ms: Option<f32>,
    decision_p99_ms: Option<f32>,
    store_p99_ms: Option<f32>,
}

/// The values of all counters at one instant.
#[derive(Debug, Clone)]
struct CounterSnapshot {
    taken_at: Instant,
    allowed: u64,
    denied: u64,
    errors: u64,
    request_latency: Buckets,
    check_latency: Buckets,
    round_trips: Buckets,
}

/// Decisions of each limit since the start of the process, by [`LimitDecision`].
#[derive(Debug, Default)]
struct LimitDecisions(BTreeMap<Box<str>, [u64; LimitDecision::ALL.len()]>);

impl LimitDecisions {
    fn take(state: &ProcessState) -> Self {
        let workers = state.request_metrics.limits.all().into_iter();
        let sum = |(name, workers): (Box<str>, Vec<Arc<Counter<6>>>)| {
            (name, sum_counts(workers.iter().map(|counter| counter.values())))
        };
        LimitDecisions(workers.map(sum).collect())
    }

    fn of(&self, limit: &str) -> [u64; LimitDecision::ALL.len()] {
        self.0.get(limit).copied().unwrap_or_default()
    }

    /// Return the allowed and the denied decisions of a limit.
    fn allowed_and_denied(&self, limit: &str) -> [u64; 2] {
        let decisions = self.of(limit);
        let sum = |kinds: [LimitDecision; 2]| kinds.iter().map(|kind| decisions[*kind as usize]).sum();
        [
            sum([LimitDecision::Allowed, LimitDecision::LocalAllowed]),
            sum([LimitDecision::Denied, LimitDecision::LocalDenied]),
        ]
    }
}

/// The history: completed seconds and intervals, oldest first.
#[derive(Debug)]
struct History {
    seconds: VecDeque<PeriodStats>,
    last_second: CounterSnapshot,
    intervals: VecDeque<PeriodStats>,
    last_interval: CounterSnapshot,
    /// Counter snapshots at the starts of the last [`RECENT_INTERVALS`] intervals and of the current interval.
    interval_starts: VecDeque<CounterSnapshot>,
    /// Allowed and denied decisions by limit. Each list is as long as `intervals`.
    limit_intervals: BTreeMap<Box<str>, VecDeque<[u32; 2]>>,
    last_decisions: LimitDecisions,
    /// Latencies by route at the starts of the last two intervals, older first.
    route_starts: [RouteLatencies; 2],
}

/// Latencies by route since the start of the process.
type RouteLatencies = BTreeMap<Arc<str>, Buckets>;

impl History {
    /// Create an empty history that starts now.
    fn new(state: &ProcessState) -> Self {
        History::starting_with(CounterSnapshot::take(state), LimitDecisions::take(state))
    }

    fn starting_with(snapshot: CounterSnapshot, decisions: LimitDecisions) -> Self {
        History {
            seconds: VecDeque::with_capacity(HISTORY_SECONDS),
            last_second: snapshot.clone(),
            intervals: VecDeque::with_capacity(HISTORY_INTERVALS),
            interval_starts: [snapshot.clone()].into(),
            last_interval: snapshot,
            limit_intervals: BTreeMap::new(),
            last_decisions: decisions,
            route_starts: [RouteLatencies::new(), RouteLatencies::new()],
        }
    }

    /// Complete a second: add the difference between the counters and the previous snapshot to the history. Return the
    /// metrics of the second, and of the interval if an interval has ended.
    fn tick(&mut self, state: &ProcessState) -> (PeriodStats, Option<PeriodStats>) {
        let (second, interval) = self.add(CounterSnapshot::take(state));
        if interval.is_some() {
            let active = state.config_handle.active();
            let names = active.config.listed_limits().into_keys();
            self.add_limit_interval(names, LimitDecisions::take(state));
            let routes = active.config.routes.iter().map(|route| route.name.clone()).take(MAX_ROUTE_LATENCIES);
            let responses: BTreeMap<_, _> = state.request_metrics.routes.all().into_iter().collect();
            let latencies = routes.map(|route| {
                let workers = responses.get(&*route).into_iter().flatten();
                let latency = sum_buckets(workers.map(|responses| &responses.latency));
                (route, latency)
            });
            self.route_starts.rotate_left(1);
            self.route_starts[1] = latencies.collect();
        }
        (second, interval)
    }

    fn add(&mut self, mut snapshot: CounterSnapshot) -> (PeriodStats, Option<PeriodStats>) {
        // Never let `allowed` decrease. `allowed` is the number of responses minus the number of denials, and the
        // gateway counts a denial shortly before the response to the same request.
        snapshot.allowed = snapshot.allowed.max(self.last_second.allowed);
        let second = snapshot.diff(&self.last_second);
        push_bounded(&mut self.seconds, second, HISTORY_SECONDS);
        // The timer fires some ms early or late. Therefore, an interval ends with the second whose end is nearest to
        // `INTERVAL` after the start of the interval.
        let elapsed = snapshot.taken_at.duration_since(self.last_interval.taken_at);
        let interval = (elapsed + Duration::from_millis(500) > INTERVAL).then(|| {
            let interval = snapshot.diff(&self.last_interval);
            push_bounded(&mut self.intervals, interval, HISTORY_INTERVALS);
            push_bounded(&mut self.interval_starts, snapshot.clone(), RECENT_INTERVALS + 1);
            self.last_interval = snapshot.clone();
            interval
        });
        self.last_second = snapshot;
        (second, interval)
    }

    /// Return the metrics of the last 60 to 70 s: from the oldest of `interval_starts` to `snapshot`. If the process
    /// has run for a shorter time, return the metrics since its start.
    fn recent(&self, mut snapshot: CounterSnapshot) -> PeriodStats {
        let start = self.interval_starts.front().unwrap_or(&self.last_interval);
        // As in `add`, `allowed` must not decrease.
        snapshot.allowed = snapshot.allowed.max(start.allowed);
        snapshot.diff(start)
    }

    /// Complete an interval for the limits `names`, which are all limits of the configuration. Drop the history of
    /// other limits, because a reload has removed these limits.
    fn add_limit_interval<'a>(&mut self, names: impl Iterator<Item = &'a str>, decisions: LimitDecisions) {
        let mut previous = std::mem::take(&mut self.limit_intervals);
        for name in names.take(MAX_LIMIT_HISTORIES) {
            let mut intervals = previous.remove(name).unwrap_or_default();
            let earlier = self.last_decisions.allowed_and_denied(name);
            let current = decisions.allowed_and_denied(name);
            let counts = std::array::from_fn(|kind| {
                u32::try_from(current[kind].saturating_sub(earlier[kind])).unwrap_or(u32::MAX)
            });
            // If a reload has added this limit, use zeros for the intervals before the reload.
            intervals.resize(self.intervals.len().saturating_sub(1).max(intervals.len()), [0; 2]);
            push_bounded(&mut intervals, counts, HISTORY_INTERVALS);
            self.limit_intervals.insert(name.into(), intervals);
        }
        self.last_decisions = decisions;
    }
}

/// Add an item. If there are `max` elements already, remove the oldest one.
fn push_bounded<T>(items: &mut VecDeque<T>, item: T, max: usize) {
    if items.len() == max {
        items.pop_front();
    }
    items.push_back(item);
}

impl CounterSnapshot {
    fn take(state: &ProcessState) -> Self {
        let taken_at = monotonic();
        let routes = state.request_metrics.routes.all();
        // Count only responses to requests that match a route, because other requests do not count as allowed.
        let routes = || routes.iter().filter(|(name, _)| !name.is_empty()).flat_map(|(_, responses)| responses);
        let classes = sum_counts(routes().map(|responses| responses.status_classes.values()));
        let denials = state.request_metrics.denied_requests.all();
        let [denied] = sum_counts(denials.iter().flat_map(|(_, counters)| counters).map(|counter| counter.values()));
        let errors = classes[SERVER_ERROR];
        // A call of the rate limit service that cannot be parsed is none of these.
        let [calls_allowed, calls_denied, calls_failed, calls_unchecked, _invalid] = state.call_counts();
        let check_durations = state.request_metrics.check_durations.all();
        let call_durations = state.request_metrics.call_durations.all();
        let calls = || call_durations.iter().flat_map(|(_, all)| all).map(AsRef::as_ref);
        let limits = state.limiter_metrics.all();
        CounterSnapshot {
            taken_at,
            allowed: classes.iter().sum::<u64>().saturating_sub(denied + errors) + calls_allowed,
            denied: denied + calls_denied,
            errors: errors + calls_failed + calls_unchecked,
            request_latency: sum_buckets(routes().map(|responses| &responses.latency).chain(calls())),
            check_latency: sum_buckets(
                check_durations.iter().flat_map(|(_, all)| all).map(AsRef::as_ref).chain(calls()),
            ),
            round_trips: sum_buckets(limits.iter().flat_map(|(_, all)| all).map(|metrics| &metrics.round_trips)),
        }
    }

    fn diff(&self, previous: &CounterSnapshot) -> PeriodStats {
        let requests = difference(&self.request_latency, &previous.request_latency);
        PeriodStats {
            at_ms: unix_us() / 1000,
            ms: (self.taken_at.duration_since(previous.taken_at).as_millis() as u64).max(1),
            allowed: self.allowed - previous.allowed,
            denied: self.denied.saturating_sub(previous.denied),
            errors: self.errors.saturating_sub(previous.errors),
            p50_ms: quantile(&requests, 0.5),
            p95_ms: quantile(&requests, 0.95),
            p99_ms: quantile(&requests, 0.99),
            decision_p99_ms: quantile(&difference(&self.check_latency, &previous.check_latency), 0.99),
            store_p99_ms: quantile(&difference(&self.round_trips, &previous.round_trips), 0.99),
        }
    }
}

fn difference(current: &Buckets, earlier: &Buckets) -> Buckets {
    std::array::from_fn(|index| current[index].saturating_sub(earlier[index]))
}

fn sum_buckets<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Buckets {
    sum_counts(histograms.map(|histogram| histogram.snapshot().0))
}

/// Return a quantile of a histogram in ms, or `None` if the histogram is empty. Interpolate linearly within a bucket,
/// as Prometheus' `histogram_quantile` does. If the quantile is above the last bound, return the last bound.
fn quantile(buckets: &Buckets, fraction: f64) -> Option<f32> {
    let rank = buckets.iter().sum::<u64>() as f64 * fraction;
    let mut cumulative = 0.0;
    for (index, count) in buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = *count as f64;
        if cumulative + count >= rank {
            let lower_bound = if index == 0 { 0 } else { BUCKET_BOUNDS_US[index - 1] } as f64;
            let upper_bound = BUCKET_BOUNDS_US.get(index).map_or(lower_bound, |bound| *bound as f64);
            return Some(((lower_bound + (upper_bound - lower_bound) * (rank - cumulative) / count) / 1000.0) as f32);
        }
        cumulative += count;
    }
    None
}

#[cfg(test)]
mod history_tests {
    use super::*;

    /// Return a snapshot `ms` after `start`.
    fn snapshot(start: Instant, ms: u64, allowed: u64) -> CounterSnapshot {
        let none = [0; BUCKET_BOUNDS_US.len() + 1];
        CounterSnapshot {
            taken_at: start + Duration::from_millis(ms),
            allowed,
            denied: 0,
            errors: 0,
            request_latency: none,
            check_latency: none,
            round_trips: none,
        }
    }

    fn history(start: Instant) -> History {
        History::starting_with(snapshot(start, 0, 10), LimitDecisions::default())
    }

    #[test]
    fn history_keeps_a_bounded_number_of_seconds() {
        let start = monotonic();
        let mut history = history(start);
        // The number of allowed requests is the number of responses minus the number of denials. The snapshot with 9
        // was taken after a denial was counted, but before its response was counted. Therefore, 9 is too small by one.
        assert_eq!([9, 12].map(|allowed| history.add(snapshot(start, 0, allowed)).0.allowed), [0, 2]);
        for second in 0..HISTORY_SECONDS as u64 {
            history.add(snapshot(start, 1000 * second, 13 + second));
        }
        assert_eq!(history.seconds.len(), HISTORY_SECONDS);
        assert!(history.seconds.iter().all(|second| second.allowed == 1), "the oldest seconds are removed");
        assert!(HISTORY_SECONDS + HISTORY_INTERVALS < 100 * 1024 / size_of::<PeriodStats>(), "at most 100 KiB");
    }

    #[test]
    fn interval_ends_after_ten_seconds_and_has_all_their_requests() {
        let start = monotonic();
        let mut history = history(start);
        let ticks = (HISTORY_INTERVALS as u64 + 5) * 10;
        // The timer fires up to 300 ms late.
        let ends: Vec<_> = (1..=ticks)
            .filter_map(|second| {
                let (_, interval) = history.add(snapshot(start, 1000 * second + second * 7 % 300, 10 + 2 * second));
                interval.map(|interval| (second, interval.allowed))
            })
            .collect();
        assert_eq!(ends.len(), HISTORY_INTERVALS + 5);
        assert!(ends.iter().zip(1..).all(|(end, count)| *end == (10 * count, 20)), "{ends:?}");
        assert_eq!(history.intervals.len(), HISTORY_INTERVALS);
    }

    #[test]
    fn recent_metrics_are_those_of_the_last_minute() {
        let start = monotonic();
        let mut history = history(start);
        let recent = |history: &History, ms| {
            let PeriodStats { ms, allowed, .. } = history.recent(snapshot(start, ms, 10 + ms / 1000));
            (ms, allowed)
        };
        assert_eq!(
            recent(&history, 5000),
            (5000, 5),
            "if no interval has ended, the metrics since the start are returned"
        );
        for second in 1..=95 {
            history.add(snapshot(start, 1000 * second, 10 + second));
        }
        assert_eq!(recent(&history, 96_000), (66_000, 66));
    }

    #[test]
    fn limit_history_is_aligned_with_the_intervals_and_bounded() {
        let start = monotonic();
        let mut history = history(start);
        let decisions = |count: u64| LimitDecisions([("a".into(), [4 * count, 2 * count, 7, count, count, 7])].into());
        let mut complete = |count: u64, names: &[&str]| {
            history.add(snapshot(start, 10_000 * count, 10));
            history.add_limit_interval(names.iter().copied(), decisions(count));
            let lengths: Vec<_> = history.limit_intervals.values().map(VecDeque::len).collect();
            let last = history.limit_intervals.values().filter_map(|intervals| intervals.back().copied()).collect();
            (history.intervals.len(), lengths, last)
        };
        assert_eq!(complete(1, &["a"]), (1, vec![1], vec![[5, 3]]));
        assert_eq!(
            complete(2, &["a", "b"]),
            (2, vec![2, 2], vec![[5, 3], [0, 0]]),
            "the earlier intervals of a new limit are filled with zeros"
        );
        assert_eq!(complete(3, &["b"]), (3, vec![3], vec![[0, 0]]), "the history of a removed limit is dropped");
        let names: Vec<_> = (0..MAX_LIMIT_HISTORIES + 1).map(|index| format!("limit-{index:03}")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        assert_eq!(complete(4, &names).1, vec![4; MAX_LIMIT_HISTORIES]);
        for count in 5..HISTORY_INTERVALS as u64 + 5 {
            assert_eq!(complete(count, &["a"]).2, [[5, 3]]);
        }
        assert_eq!(complete(1000, &["a"]).1, [HISTORY_INTERVALS]);
    }

    #[test]
    fn quantile_interpolates_within_the_bucket() {
        let mut buckets = [0; BUCKET_BOUNDS_US.len() + 1];
        assert_eq!(quantile(&buckets, 0.5), None, "an empty histogram has no quantile");
        buckets[4] = 100; // 0.5 to 1 ms
        assert_eq!(quantile(&buckets, 0.5), Some(0.75));
        buckets[0] = 100; // up to 0.05 ms
        assert_eq!(quantile(&buckets, 0.5), Some(0.05));
        assert_eq!(quantile(&buckets, 0.99), Some(0.99));
        buckets[18] = 1000;
        assert_eq!(quantile(&buckets, 0.5), Some(30_000.0), "a quantile above the last bound is the last bound");
    }
}
