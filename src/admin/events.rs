//! `/api/live`: what happens, as server-sent events, one a second.

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

/// Who follows at the same time: a quarter of the connections, so that there are always some for health and metrics.
pub(super) const MAX_SUBSCRIBERS: usize = 16;

/// Seconds that a follower may be behind; then he misses some.
const EVENT_BUFFER: usize = 16;

/// A body that goes on until nobody wants it.
pub(super) type EventBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// What happens, and who follows it.
#[derive(Debug)]
pub(super) struct EventStream {
    history: Mutex<History>,
    events: Sender<Bytes>,
    subscriber_permits: Arc<Semaphore>,
}

/// The first event.
#[derive(Serialize)]
struct HistoryEvent<'a> {
    version: &'static str,
    window_seconds: usize,
    seconds: Vec<&'a SecondStats>,
}

/// Each further one.
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
    /// All since the start of the process.
    decisions: BTreeMap<&'static str, u64>,
}

/// Both in RFC 3339: when either is another one, `/api/config` is.
#[derive(Serialize)]
struct ConfigStatus {
    loaded_at: String,
    last_error_at: Option<String>,
}

/// Somebody who follows.
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

    /// Takes a look once a second, and tells those who follow.
    pub(super) async fn run(&self, state: &AdminState) -> Infallible {
        let mut ticks = interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let mut history = self.lock_history();
            let second = history.tick(state);
            if self.events.receiver_count() > 0 {
                // The last of them may just have gone.
                let _ = self.events.send(second_event(second, state));
            }
        }
    }

    /// The events from now on, after those seconds that are over.
    pub(super) fn subscribe(&self, admin_stop: CancellationToken, connection: &Arc<AdminConnection>) -> AdminResponse {
        let Ok(permit) = self.subscriber_permits.clone().try_acquire_owned() else {
            let detail = format!("{MAX_SUBSCRIBERS} follow already: close one of the live pages");
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, detail).into_response();
        };
        let subscriber = {
            // No second is over in between: none is missed, none comes twice.
            let history = self.lock_history();
            let seconds = history.seconds().iter().collect();
            let history_event =
                HistoryEvent { version: env!("CARGO_PKG_VERSION"), window_seconds: HISTORY_SECONDS, seconds };
            let first = Some(format_event("history", &history_event));
            let (events, connection) = (self.events.subscribe(), connection.clone());
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

/// The next event that is still there.
async fn next_event(events: &mut Receiver<Bytes>) -> Option<Bytes> {
    loop {
        match events.recv().await {
            Ok(event) => return Some(event),
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return None,
        }
    }
}

/// What a second was like, and how all stands at its end.
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

/// In the form of the HTML standard, §9.2; JSON has no line of its own in it.
fn format_event(name: &str, data: &impl Serialize) -> Bytes {
    // Strings and numbers always serialise.
    format!("event: {name}\ndata: {}\n\n", serde_json::to_string(data).unwrap_or_default()).into()
}

// The last quarter of an hour, second by second: what was allowed, what was denied, what went wrong, and how long it took.

/// Seconds that are kept.
pub(super) const HISTORY_SECONDS: usize = 15 * 60;

type Buckets = [u64; BUCKET_BOUNDS_US.len() + 1];

/// What happened in a second.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct SecondStats {
    /// Its end, ms since the Unix epoch.
    at_ms: u64,
    /// How long it was: on a busy machine one ends late.
    ms: u64,
    allowed: u64,
    denied: u64,
    errors: u64,
    p50_ms: Option<f32>,
    p99_ms: Option<f32>,
    decision_p99_ms: Option<f32>,
    store_p99_ms: Option<f32>,
}

/// What was counted until an instant.
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

/// The seconds that are over.
#[derive(Debug)]
pub(super) struct History {
    seconds: VecDeque<SecondStats>,
    last_snapshot: CounterSnapshot,
}

impl History {
    /// Begins now.
    pub(super) fn new(state: &AdminState) -> Self {
        History { seconds: VecDeque::with_capacity(HISTORY_SECONDS), last_snapshot: CounterSnapshot::take(state) }
    }

    /// A second is over.
    pub(super) fn tick(&mut self, state: &AdminState) -> SecondStats {
        self.add(CounterSnapshot::take(state))
    }

    fn add(&mut self, mut snapshot: CounterSnapshot) -> SecondStats {
        // A denial is counted a little before its answer is.
        snapshot.allowed = snapshot.allowed.max(self.last_snapshot.allowed);
        let second = snapshot.diff(&self.last_snapshot);
        if self.seconds.len() == HISTORY_SECONDS {
            self.seconds.pop_front();
        }
        self.seconds.push_back(second);
        self.last_snapshot = snapshot;
        second
    }

    /// From the oldest on.
    pub(super) fn seconds(&self) -> &VecDeque<SecondStats> {
        &self.seconds
    }
}

impl CounterSnapshot {
    fn take(state: &AdminState) -> Self {
        let taken_at = monotonic();
        let routes = state.request_metrics.routes.all();
        // What matches no route nobody has allowed.
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

/// The time within which this part of them was over, in ms; none if there were none. Inside a bucket they count as spread
/// evenly, as Prometheus has it, and of those beyond the last bound nothing is known but that.
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
        // A denial that has no answer yet is taken off what was allowed.
        assert_eq!([9, 12].map(|allowed| history.add(snapshot(allowed)).allowed), [0, 2]);
        for second in 0..HISTORY_SECONDS as u64 {
            history.add(snapshot(13 + second));
        }
        assert_eq!(history.seconds.len(), HISTORY_SECONDS);
        assert!(history.seconds.iter().all(|second| second.allowed == 1), "the first ones are gone");
    }

    #[test]
    fn quantile_interpolates_within_the_bucket() {
        let mut buckets = [0; BUCKET_BOUNDS_US.len() + 1];
        assert_eq!(quantile(&buckets, 0.5), None, "nothing took any time");
        buckets[4] = 100; // 0.5 to 1 ms
        assert_eq!(quantile(&buckets, 0.5), Some(0.75));
        buckets[0] = 100; // up to 0.05 ms
        assert_eq!(quantile(&buckets, 0.5), Some(0.05));
        assert_eq!(quantile(&buckets, 0.99), Some(0.99));
        buckets[16] = 1000;
        assert_eq!(quantile(&buckets, 0.5), Some(30_000.0), "longer than the last bound");
    }
}
