//! `/api/live`: metrics of the last 15 minutes, then one server-sent event per second.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use futures_util::stream::BoxStream;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::{Either, StreamBody};
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::admin::AdminResponse;
use crate::admin::api::ApiError;
use crate::admin::configuration::format_rfc3339;
use crate::admin::connections::AdminConnection;
use crate::admin::health::ReadinessReport;
use crate::admin::metrics::sum_counts;
use crate::admin::state::AdminState;
use crate::limiter::clock::{monotonic, unix_us};
use crate::metrics::{BUCKET_BOUNDS_US, Histogram};
use crate::proxy::metrics::LimitDecision;

/// Maximum number of concurrent subscribers. A quarter of the connections, which leaves room for health and metrics.
pub(super) const MAX_SUBSCRIBERS: usize = 16;

/// Capacity of the broadcast channel, in events of one second each. A subscriber that is further behind misses events.
const EVENT_BUFFER: usize = 16;

/// A response body that ends when the client disconnects or the admin listener stops.
pub(super) type EventBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// History of the last seconds, and the broadcast of new ones.
#[derive(Debug)]
pub(super) struct EventStream {
    history: Mutex<History>,
    events: Sender<Bytes>,
    subscriber_permits: Arc<Semaphore>,
}

/// Data of the first event, `history`.
#[derive(Serialize)]
struct HistoryEvent<'a> {
    version: &'static str,
    window_seconds: usize,
    seconds: Vec<&'a SecondStats>,
}

/// Data of each further event, `second`.
#[derive(Serialize)]
struct SecondEvent<'a> {
    second: SecondStats,
    connections: ConnectionCounts,
    limits: Vec<LimitDecisionCounts<'a>>,
    health: ReadinessReport<'a>,
    configuration: ConfigStatus,
}

#[derive(Serialize)]
struct ConnectionCounts {
    open: usize,
    max: usize,
}

#[derive(Serialize)]
struct LimitDecisionCounts<'a> {
    limit: &'a str,
    quota: String,
    shadow: bool,
    /// Decisions since the start of the process, by kind.
    decisions: BTreeMap<&'static str, u64>,
}

/// Times in RFC 3339. If either changes, the response of `/api/config` has changed.
#[derive(Serialize)]
struct ConfigStatus {
    loaded_at: String,
    last_error_at: Option<String>,
}

/// One client of the event stream.
struct Subscriber {
    first: Option<Bytes>,
    events: Receiver<Bytes>,
    admin_stop: CancellationToken,
    connection: Arc<AdminConnection>,
    _permit: OwnedSemaphorePermit,
}

impl EventStream {
    pub(super) fn new(state: &AdminState) -> Self {
        EventStream {
            history: Mutex::new(History::new(state)),
            events: Sender::new(EVENT_BUFFER),
            subscriber_permits: Arc::new(Semaphore::new(MAX_SUBSCRIBERS)),
        }
    }

    /// Sample the metrics once per second and send the result to all subscribers.
    pub(super) async fn run(&self, state: &AdminState) -> Infallible {
        let mut ticks = interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let mut history = self.lock_history();
            let second = history.tick(state);
            if self.events.receiver_count() > 0 {
                // The last subscriber may have disconnected in the meantime.
                let _ = self.events.send(second_event(second, state));
            }
        }
    }

    /// Return a response that streams the history and then each new second.
    pub(super) fn subscribe(&self, admin_stop: CancellationToken, connection: &Arc<AdminConnection>) -> AdminResponse {
        let Ok(permit) = self.subscriber_permits.clone().try_acquire_owned() else {
            let detail = format!("{MAX_SUBSCRIBERS} clients read /api/live already: close a dashboard");
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, detail).into_response();
        };
        let subscriber = {
            // The lock keeps `run` from adding a second in between, so none is missed or sent twice.
            let history = self.lock_history();
            let seconds = history.seconds().iter().collect();
            let history_event =
                HistoryEvent { version: env!("CARGO_PKG_VERSION"), window_seconds: HISTORY_SECONDS, seconds };
            let first = Some(format_event("history", &history_event));
            let events = self.events.subscribe();
            let connection = connection.clone();
            Subscriber { first, events, admin_stop, connection, _permit: permit }
        };
        let events: BoxStream<'static, _> = Box::pin(stream::unfold(subscriber, Subscriber::next));
        let mut response = Response::new(Either::Right(StreamBody::new(events)));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        response
    }

    fn lock_history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber {
    async fn next(mut self) -> Option<(Result<Frame<Bytes>, Infallible>, Self)> {
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

/// Receive the next event, without those that the channel has dropped.
async fn next_event(events: &mut Receiver<Bytes>) -> Option<Bytes> {
    loop {
        match events.recv().await {
            Ok(event) => return Some(event),
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return None,
        }
    }
}

/// Format a `second` event: metrics of the second, and the state at its end.
fn second_event(second: SecondStats, state: &AdminState) -> Bytes {
    let active = state.config_handle.active();
    let counts: BTreeMap<_, _> = state.request_metrics.limits.all().into_iter().collect();
    let limits = active.config.limits.iter().map(|(name, compiled)| {
        let counts = sum_counts(counts.get(&**name).into_iter().flatten().map(|counter| counter.values()));
        LimitDecisionCounts {
            limit: name,
            quota: compiled.limit.default_variant.quota.to_string(),
            shadow: compiled.limit.shadow,
            decisions: LimitDecision::ALL.iter().map(|limit_decision| limit_decision.label()).zip(counts).collect(),
        }
    });
    let (open, max) = state.connection_limits.open_and_max();
    let second_event = SecondEvent {
        second,
        connections: ConnectionCounts { open, max },
        limits: limits.collect(),
        health: state.readiness(),
        configuration: ConfigStatus {
            loaded_at: format_rfc3339(active.active_since_us),
            last_error_at: state.config_handle.last_failure().map(|failure| format_rfc3339(failure.failed_at_us)),
        },
    };
    format_event("second", &second_event)
}

/// Format a server-sent event (HTML standard, section 9.2). Serialized JSON contains no newline, so one `data` line is
/// enough.
fn format_event(name: &str, data: &impl Serialize) -> Bytes {
    // Strings and numbers always serialize.
    format!("event: {name}\ndata: {}\n\n", serde_json::to_string(data).unwrap_or_default()).into()
}

// === History: request rates and latencies of the last 15 minutes ===

/// Number of seconds in the history.
pub(super) const HISTORY_SECONDS: usize = 15 * 60;

type Buckets = [u64; BUCKET_BOUNDS_US.len() + 1];

/// Metrics of one second.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct SecondStats {
    /// End of the second, ms since the Unix epoch.
    at_ms: u64,
    /// Actual length in ms. On a busy machine the timer fires late.
    ms: u64,
    allowed: u64,
    denied: u64,
    errors: u64,
    p50_ms: Option<f32>,
    p99_ms: Option<f32>,
    decision_p99_ms: Option<f32>,
    store_p99_ms: Option<f32>,
}

/// Counter values at one instant.
#[derive(Debug)]
struct CounterSnapshot {
    taken_at: Instant,
    allowed: u64,
    denied: u64,
    errors: u64,
    request_latency: Buckets,
    check_latency: Buckets,
    round_trips: Buckets,
}

/// Completed seconds, oldest first.
#[derive(Debug)]
pub(super) struct History {
    seconds: VecDeque<SecondStats>,
    last_snapshot: CounterSnapshot,
}

impl History {
    /// Create an empty history that starts now.
    pub(super) fn new(state: &AdminState) -> Self {
        History { seconds: VecDeque::with_capacity(HISTORY_SECONDS), last_snapshot: CounterSnapshot::take(state) }
    }

    /// Complete a second: add the difference to the last snapshot.
    pub(super) fn tick(&mut self, state: &AdminState) -> SecondStats {
        self.add(CounterSnapshot::take(state))
    }

    fn add(&mut self, mut snapshot: CounterSnapshot) -> SecondStats {
        // A denial is counted shortly before its response, so `allowed`, a difference, could decrease.
        snapshot.allowed = snapshot.allowed.max(self.last_snapshot.allowed);
        let second = snapshot.diff(&self.last_snapshot);
        if self.seconds.len() == HISTORY_SECONDS {
            self.seconds.pop_front();
        }
        self.seconds.push_back(second);
        self.last_snapshot = snapshot;
        second
    }

    /// Return the completed seconds, oldest first.
    pub(super) fn seconds(&self) -> &VecDeque<SecondStats> {
        &self.seconds
    }
}

impl CounterSnapshot {
    fn take(state: &AdminState) -> Self {
        let taken_at = monotonic();
        let routes = state.request_metrics.routes.all();
        // Requests that match no route do not count as allowed.
        let routes = || routes.iter().filter(|(name, _)| !name.is_empty()).flat_map(|(_, responses)| responses);
        let classes = sum_counts(routes().map(|responses| responses.status_classes.values()));
        let denials = state.request_metrics.denied_requests.all();
        let [denied] = sum_counts(denials.iter().flat_map(|(_, counters)| counters).map(|counter| counter.values()));
        let errors = classes[4];
        let check_durations = state.request_metrics.check_durations.all();
        let limits = state.limiter_metrics.all();
        CounterSnapshot {
            taken_at,
            allowed: classes.iter().sum::<u64>().saturating_sub(denied + errors),
            denied,
            errors,
            request_latency: sum_buckets(routes().map(|responses| &responses.latency)),
            check_latency: sum_buckets(check_durations.iter().flat_map(|(_, all)| all).map(AsRef::as_ref)),
            round_trips: sum_buckets(limits.iter().flat_map(|(_, all)| all).map(|metrics| &metrics.round_trips)),
        }
    }

    fn diff(&self, previous: &CounterSnapshot) -> SecondStats {
        let difference = |current: &Buckets, earlier: &Buckets| {
            std::array::from_fn(|index| current[index].saturating_sub(earlier[index]))
        };
        let requests = difference(&self.request_latency, &previous.request_latency);
        SecondStats {
            at_ms: unix_us() / 1000,
            ms: (self.taken_at.duration_since(previous.taken_at).as_millis() as u64).max(1),
            allowed: self.allowed - previous.allowed,
            denied: self.denied.saturating_sub(previous.denied),
            errors: self.errors.saturating_sub(previous.errors),
            p50_ms: quantile(&requests, 0.5),
            p99_ms: quantile(&requests, 0.99),
            decision_p99_ms: quantile(&difference(&self.check_latency, &previous.check_latency), 0.99),
            store_p99_ms: quantile(&difference(&self.round_trips, &previous.round_trips), 0.99),
        }
    }
}

fn sum_buckets<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Buckets {
    sum_counts(histograms.map(|histogram| histogram.snapshot().0))
}

/// Return a quantile of a histogram in ms, or `None` if the histogram is empty. Interpolate linearly within a bucket,
/// as `histogram_quantile` of Prometheus does. Above the last bound, return that bound.
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

    fn snapshot(allowed: u64) -> CounterSnapshot {
        let none = [0; BUCKET_BOUNDS_US.len() + 1];
        CounterSnapshot {
            taken_at: monotonic(),
            allowed,
            denied: 0,
            errors: 0,
            request_latency: none,
            check_latency: none,
            round_trips: none,
        }
    }

    #[test]
    fn history_keeps_a_bounded_number_of_seconds() {
        let mut history = History { seconds: VecDeque::new(), last_snapshot: snapshot(10) };
        // The second snapshot has a denial without its response, so its `allowed` is one less.
        assert_eq!([9, 12].map(|allowed| history.add(snapshot(allowed)).allowed), [0, 2]);
        for second in 0..HISTORY_SECONDS as u64 {
            history.add(snapshot(13 + second));
        }
        assert_eq!(history.seconds.len(), HISTORY_SECONDS);
        assert!(history.seconds.iter().all(|second| second.allowed == 1), "the oldest seconds are removed");
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
        buckets[16] = 1000;
        assert_eq!(quantile(&buckets, 0.5), Some(30_000.0), "beyond the last bound");
    }
}
