//! `/api/live`: what happens, as server-sent events, one a second.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use http_body_util::{Either, StreamBody};
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::AdminResponse;
use super::configuration::format_rfc3339;
use super::connections::AdminConnection;
use super::health::ReadinessReport;
use super::history::{HISTORY_SECONDS, History, SecondStats};
use super::metrics::sum_counts;
use super::problem::ApiError;
use super::vitals::AdminState;
use crate::gateway::meters::LimitDecision;

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
