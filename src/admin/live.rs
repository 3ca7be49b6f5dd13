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

use super::Answer;
use super::configuration::instant;
use super::connections::Connection;
use super::health::Health;
use super::history::{History, KEPT, Second};
use super::metrics::sum;
use super::problem::ApiError;
use super::vitals::Vitals;
use crate::gateway::meters::LimitDecision;

/// Who follows at the same time: a quarter of the connections, so that there are always some for health and metrics.
pub(super) const FOLLOWERS: usize = 16;

/// Seconds that a follower may be behind; then he misses some.
const BEHIND: usize = 16;

/// A body that goes on until nobody wants it.
pub(super) type Events = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// What happens, and who follows it.
#[derive(Debug)]
pub(super) struct Live {
    history: Mutex<History>,
    events: Sender<Bytes>,
    places: Arc<Semaphore>,
}

/// The first event.
#[derive(Serialize)]
struct Before<'a> {
    version: &'static str,
    window_seconds: usize,
    seconds: Vec<&'a Second>,
}

/// Each further one.
#[derive(Serialize)]
struct Now<'a> {
    second: Second,
    connections: Connections,
    limits: Vec<OfLimit<'a>>,
    health: Health<'a>,
    configuration: Configuration,
}

#[derive(Serialize)]
struct Connections {
    open: usize,
    max: usize,
}

#[derive(Serialize)]
struct OfLimit<'a> {
    limit: &'a str,
    quota: String,
    shadow: bool,
    /// All since the start of the process.
    decisions: BTreeMap<&'static str, u64>,
}

/// Both in RFC 3339: when either is another one, `/api/config` is.
#[derive(Serialize)]
struct Configuration {
    loaded_at: String,
    last_error_at: Option<String>,
}

/// Somebody who follows.
struct Follower {
    first: Option<Bytes>,
    events: Receiver<Bytes>,
    end: CancellationToken,
    connection: Arc<Connection>,
    _place: OwnedSemaphorePermit,
}

impl Live {
    pub(super) fn new(vitals: &Vitals) -> Self {
        Live {
            history: Mutex::new(History::new(vitals)),
            events: Sender::new(BEHIND),
            places: Arc::new(Semaphore::new(FOLLOWERS)),
        }
    }

    /// Takes a look once a second, and tells those who follow.
    pub(super) async fn run(&self, vitals: &Vitals) -> Infallible {
        let mut ticks = interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let mut history = self.history();
            let second = history.tick(vitals);
            if self.events.receiver_count() > 0 {
                // The last of them may just have gone.
                let _ = self.events.send(now(second, vitals));
            }
        }
    }

    /// The events from now on, after those seconds that are over.
    pub(super) fn follow(&self, end: CancellationToken, connection: &Arc<Connection>) -> Answer {
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            let full = format!("{FOLLOWERS} follow already: close one of the live pages");
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, full).into_answer();
        };
        let follower = {
            // No second is over in between: none is missed, none comes twice.
            let history = self.history();
            let seconds = history.seconds().iter().collect();
            let before = Before { version: env!("CARGO_PKG_VERSION"), window_seconds: KEPT, seconds };
            let first = Some(event("history", &before));
            let (events, connection) = (self.events.subscribe(), connection.clone());
            Follower { first, events, end, connection, _place: place }
        };
        let events: BoxStream<'static, _> = Box::pin(stream::unfold(follower, Follower::next));
        let mut answer = Response::new(Either::Right(StreamBody::new(events)));
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        answer
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Follower {
    async fn next(mut self) -> Option<(Result<Frame<Bytes>, Infallible>, Self)> {
        let event = match self.first.take() {
            Some(first) => first,
            None => self.end.run_until_cancelled(later(&mut self.events)).await??,
        };
        self.connection.streaming();
        Some((Ok(Frame::data(event)), self))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.connection.idle();
    }
}

/// The next event that is still there.
async fn later(events: &mut Receiver<Bytes>) -> Option<Bytes> {
    loop {
        match events.recv().await {
            Ok(event) => return Some(event),
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return None,
        }
    }
}

/// What a second was like, and how all stands at its end.
fn now(second: Second, vitals: &Vitals) -> Bytes {
    let running = vitals.configuration.active();
    let counts: BTreeMap<_, _> = vitals.tallies.limits.all().into_iter().collect();
    let limits = running.config.limits.iter().map(|(name, terms)| {
        let counts = sum(counts.get(&**name).into_iter().flatten().map(|tally| tally.values()));
        OfLimit {
            limit: name,
            quota: terms.limit.default_variant.quota.to_string(),
            shadow: terms.limit.shadow,
            decisions: LimitDecision::ALL.iter().map(|judgement| judgement.label()).zip(counts).collect(),
        }
    });
    let (open, most) = vitals.connections.open_and_max();
    let now = Now {
        second,
        connections: Connections { open, max: most },
        limits: limits.collect(),
        health: vitals.health(),
        configuration: Configuration {
            loaded_at: instant(running.active_since_us),
            last_error_at: vitals.configuration.last_failure().map(|failure| instant(failure.failed_at_us)),
        },
    };
    event("second", &now)
}

/// In the form of the HTML standard, §9.2; JSON has no line of its own in it.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    // Strings and numbers always serialise.
    format!("event: {name}\ndata: {}\n\n", serde_json::to_string(data).unwrap_or_default()).into()
}
