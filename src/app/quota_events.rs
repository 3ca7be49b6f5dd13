//! The thread that delivers quota events to webhooks and Redis streams. It claims each event in Redis, so that only one
//! of several gateways sends the event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::thread::JoinHandle;
use std::time::Duration;

use aws_lc_rs::hmac::{Key, sign};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{HeaderName, HeaderValue, Method, Request};
use jiff::Timestamp;
use serde::Serialize;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::admin::state::ProcessState;
use crate::admin::usage::consumer_name;
use crate::app::AppError;
use crate::app::maintenance::with_jitter;
use crate::clock::{LogThrottle, elapsed_since, unix_us};
use crate::http::text::{Escape, escape_deceptive};
use crate::limiter::notify::{DeliveryResult, DeliveryStats, EventPeriod, QuotaEvent};
use crate::limiter::redis::commands::{EventClaim, StreamEntry};
use crate::limiter::shared_data::SharedData;
use crate::limiter::store::RedisStore;
use crate::limiter::verdict::StoreError;
use crate::snapshot::CompiledConfig;
use crate::snapshot::notify::{EventDestination, EventStream, Webhook};
use crate::upstream::fetch;
use crate::upstream::fetch::FetchError;

/// Value of `type` in all events.
const EVENT_TYPE: &str = "quota.threshold_reached";

/// Maximum number of undelivered events of a destination. A single limit may have at most half of them. Otherwise,
/// clients that choose their own identities could suppress the events of other limits.
const MAX_PENDING: u64 = 1000;

/// Maximum number of deliveries in flight to one destination.
const MAX_CONCURRENT_DELIVERIES: usize = 16;

/// Delay after the first failed attempt. It doubles with each further failure.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Maximum delay between two attempts.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(300);

/// Maximum age of an undelivered event. Older events are dropped.
const MAX_AGE: Duration = Duration::from_secs(3600);

/// Maximum time to deliver the remaining events when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which the event queue forgets the events whose period has ended.
const FORGET_INTERVAL: Duration = Duration::from_secs(10);

/// Time for which Redis keeps a claim after the end of the event's window. Until then, a gateway that tries to claim
/// the same event late does not send it again.
const CLAIM_GRACE: Duration = Duration::from_secs(60);

/// For a rolling period, a claim in Redis must expire before the gateway forgets the event. Otherwise, the old claim
/// could suppress the gateway's next event. The claim therefore expires before the end of the period. The difference is
/// the period divided by `CLAIM_MARGIN_DIVISOR`, but at most `MAX_CLAIM_MARGIN`.
const CLAIM_MARGIN_DIVISOR: u32 = 10;
const MAX_CLAIM_MARGIN: Duration = Duration::from_secs(1);

/// Maximum size of a webhook's response in bytes. The body is not used.
const MAX_RESPONSE: usize = 64 << 10;

/// Minimum interval between two log messages of the same kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The running thread.
#[derive(Debug)]
pub(super) struct EventThread {
    stop: CancellationToken,
    thread: JoinHandle<Result<(), AppError>>,
}

/// The reason why an attempt to deliver an event failed.
#[derive(Debug, thiserror::Error)]
pub enum DeliveryError {
    /// The webhook sent no response.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The request and its response took longer than the timeout.
    #[error("the server sent no complete response within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The status of the response is not 2xx.
    #[error("the server responded with status {0}")]
    Status(u16),
    /// The event cannot be added to the Redis stream.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl EventThread {
    /// Start the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(state: Arc<ProcessState>, events: Receiver<QuotaEvent>) -> Result<Self, AppError> {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(AppError::Worker)?;
            runtime.block_on(async {
                let store = state.separate_store();
                run(Arc::new(Courier { state, store, lanes: Mutex::default() }), events, stopped).await;
            });
            // Do not wait for DNS lookups that still block a thread of the runtime.
            runtime.shutdown_background();
            Ok(())
        };
        let thread = thread::Builder::new().name("quota-events".to_owned()).spawn(run).map_err(AppError::Worker)?;
        Ok(EventThread { stop, thread })
    }

    /// Deliver the queued events for at most [`FLUSH_TIMEOUT`], then end the thread.
    ///
    /// # Errors
    /// The thread could not create its runtime, or panicked.
    pub(super) fn finish(self) -> Result<(), AppError> {
        self.stop.cancel();
        self.thread.join().unwrap_or(Err(AppError::Panic))
    }
}

async fn run(courier: Arc<Courier>, mut events: Receiver<QuotaEvent>, stop: CancellationToken) {
    let mut deliveries = JoinSet::new();
    let mut forget = interval(FORGET_INTERVAL);
    forget.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(event) = events.recv() => courier.accept(event, &mut deliveries),
            _ = forget.tick() => courier.state.event_queue.forget_ended(),
            Some(_) = deliveries.join_next() => {}
            () = stop.cancelled() => break,
        }
    }
    events.close();
    while let Ok(event) = events.try_recv() {
        courier.accept(event, &mut deliveries);
    }
    let all = async { while deliveries.join_next().await.is_some() {} };
    if timeout(FLUSH_TIMEOUT, all).await.is_err() {
        warn!(events = deliveries.len(), "quota events are lost: they could not be delivered before the process ended");
    }
}

/// Delivers quota events to their destinations.
#[derive(Debug)]
struct Courier {
    state: Arc<ProcessState>,
    /// The store in which events are claimed. `None` for a memory store: each gateway then sends its own events.
    store: Option<RedisStore>,
    /// The state of the deliveries, by destination name.
    lanes: Mutex<HashMap<Box<str>, Arc<Lane>>>,
}

/// The state of the deliveries to one destination.
#[derive(Debug)]
struct Lane {
    /// Limits the number of deliveries in flight.
    in_flight: Semaphore,
    /// Number of undelivered events, by limit.
    pending: Mutex<HashMap<Box<str>, u64>>,
}

impl Default for Lane {
    fn default() -> Self {
        Lane { in_flight: Semaphore::new(MAX_CONCURRENT_DELIVERIES), pending: Mutex::default() }
    }
}

impl Lane {
    /// Count a new event of a limit. Return `false` if the limit has too many undelivered events.
    fn try_begin(&self, limit: &str) -> bool {
        let mut pending = lock(&self.pending);
        let count = pending.entry(limit.into()).or_default();
        let has_room = *count < MAX_PENDING / 2;
        *count += u64::from(has_room);
        has_room
    }

    fn end(&self, limit: &str) {
        if let Some(count) = lock(&self.pending).get_mut(limit) {
            *count -= 1;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event that is being delivered.
#[derive(Debug)]
struct Delivery {
    event: QuotaEvent,
    id: String,
    /// The event as JSON. All attempts send the same text.
    body: Bytes,
    /// Whether to send the event without claiming it again. Set if this gateway has claimed the event, or could not
    /// claim it because Redis was unavailable.
    is_claimed: bool,
}

impl Courier {
    /// Start to deliver an event. Drop it if the destination or the limit has too many undelivered events.
    fn accept(self: &Arc<Self>, event: QuotaEvent, deliveries: &mut JoinSet<()>) {
        let destination = &event.usage.notify.to;
        let stats = self.state.delivery_stats.get_or_create(destination, 0);
        let lane = lock(&self.lanes).entry(destination.clone()).or_default().clone();
        let limit = event.usage.notify.limit.clone();
        if stats.pending() >= MAX_PENDING || !lane.try_begin(&limit) {
            static LOG_THROTTLE: LogThrottle = LogThrottle::new();
            if LOG_THROTTLE.should_log(LOG_INTERVAL) {
                warn!(destination = %destination, "too many undelivered quota events: new events are dropped");
            }
            stats.count(DeliveryResult::Dropped);
            self.state.event_queue.forget(&event);
            return;
        }
        let courier = self.clone();
        let pending = stats.begin();
        deliveries.spawn(async move {
            let result = courier.deliver(event, &lane, &stats).await;
            stats.count(result);
            lane.end(&limit);
            drop(pending);
        });
    }

    /// Try to deliver an event, until it is delivered, claimed by another gateway, or too old.
    async fn deliver(&self, event: QuotaEvent, lane: &Lane, stats: &DeliveryStats) -> DeliveryResult {
        let id = format!("evt_{}", Uuid::new_v4().simple());
        let destination = event.usage.notify.to.clone();
        let body = body(&event, &self.state.config_handle.active().config);
        let mut delivery = Delivery { event, id, body, is_claimed: false };
        let mut failures = 0;
        loop {
            // A reload may have corrected the destination, so look it up again for each attempt.
            let active = self.state.config_handle.active();
            let Some(found) = active.config.event_destinations.get(&*destination) else {
                debug!(%destination, "a reload removed the destination of a quota event");
                return DeliveryResult::Failed;
            };
            let error = match self.attempt(&mut delivery, found, lane).await {
                Ok(true) => return DeliveryResult::Delivered,
                Ok(false) => return DeliveryResult::Claimed,
                Err(error) => error,
            };
            stats.count_failed_attempt();
            let delay = (FIRST_RETRY_DELAY * 2_u32.pow(failures)).min(MAX_RETRY_DELAY);
            failures = (failures + 1).min(10);
            let is_lost = elapsed_since(delivery.event.queued_at) + delay > MAX_AGE;
            static LOG_THROTTLE: LogThrottle = LogThrottle::new();
            if is_lost {
                warn!(%destination, id = delivery.id, %error, "a quota event is lost: it could not be delivered");
                return DeliveryResult::Failed;
            }
            if LOG_THROTTLE.should_log(LOG_INTERVAL) {
                warn!(%destination, %error, retry_in_s = delay.as_secs(), "cannot deliver a quota event");
            }
            sleep(with_jitter(delay)).await;
        }
    }

    /// Try to deliver the event once. Return whether it was delivered. `false` means that another gateway has claimed
    /// it.
    async fn attempt(
        &self,
        delivery: &mut Delivery,
        destination: &EventDestination,
        lane: &Lane,
    ) -> Result<bool, DeliveryError> {
        // The semaphore is never closed, so acquiring a permit cannot fail.
        let _permit = lane.in_flight.acquire().await;
        match destination {
            EventDestination::Stream(EventStream { key, max_length }) => {
                // With a memory store, this code is never reached: a stream without Redis is a configuration error.
                let Some(store) = &self.store else { return Ok(false) };
                let entry = StreamEntry { stream: key, max_length: *max_length, body: &delivery.body };
                Ok(SharedData(store).claim_event(&delivery.claim(&delivery.claim_key(key), Some(entry))).await?)
            }
            EventDestination::Webhook(webhook) => {
                if let Some(store) = self.store.as_ref().filter(|_| !delivery.is_claimed) {
                    let key = delivery.claim_key(&delivery.event.usage.notify.to);
                    match SharedData(store).claim_event(&delivery.claim(&key, None)).await {
                        Ok(true) => {}
                        Ok(false) => return Ok(false),
                        // If Redis is unavailable, send the event without a claim. Several gateways may then send it,
                        // but it is not lost.
                        Err(error) => {
                            debug!(%error, "cannot claim a quota event in Redis: other gateways may send it as well")
                        }
                    }
                }
                delivery.is_claimed = true;
                post(webhook, &delivery.id, &delivery.body).await.map(|()| true)
            }
        }
    }
}

impl Delivery {
    /// Return the Redis key of the claim. `tag` is the hash tag of the key, which selects the slot in a Redis Cluster.
    fn claim_key(&self, tag: &str) -> String {
        let QuotaEvent { usage, threshold, .. } = &self.event;
        let limit = &usage.notify.limit;
        let identity = usage.identity;
        match usage.period {
            EventPeriod::Window(end_us) => format!("event:{{{tag}}}:{limit}:{identity}:{threshold}:{end_us}"),
            EventPeriod::Rolling(_) => format!("event:{{{tag}}}:{limit}:{identity}:{threshold}"),
        }
    }

    fn claim<'a>(&'a self, key: &'a str, entry: Option<StreamEntry<'a>>) -> EventClaim<'a> {
        let usage = &self.event.usage;
        let ttl = match usage.period {
            EventPeriod::Window(_) => Duration::from_micros(usage.reset_us) + CLAIM_GRACE,
            EventPeriod::Rolling(period) => {
                let margin = (period / CLAIM_MARGIN_DIVISOR).min(MAX_CLAIM_MARGIN);
                period.saturating_sub(margin + elapsed_since(self.event.queued_at))
            }
        };
        EventClaim { key, id: &self.id, ttl, entry }
    }
}

/// Post an event to a webhook, signed according to the Standard Webhooks specification 1.0.0.
async fn post(webhook: &Webhook, id: &str, body: &Bytes) -> Result<(), DeliveryError> {
    let timestamp = (unix_us() / 1_000_000).to_string();
    let signature = signature(&webhook.key, id, &timestamp, body);
    let mut request = Request::new(body.clone());
    *request.method_mut() = Method::POST;
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("sluicegate/", env!("CARGO_PKG_VERSION"))));
    for (name, value) in [("webhook-id", id), ("webhook-timestamp", &timestamp), ("webhook-signature", &signature)] {
        // The values contain only letters, digits and punctuation, so the conversion cannot fail.
        headers.extend(HeaderValue::from_str(value).ok().map(|value| (HeaderName::from_static(name), value)));
    }
    let exchange = fetch::send(&webhook.url, request, webhook.tls.as_ref(), MAX_RESPONSE);
    let response = timeout(webhook.timeout, exchange).await.map_err(|_| DeliveryError::Timeout(webhook.timeout))?;
    let status = match response {
        Err(FetchError::TooLarge { status, .. }) => status,
        response => response?.status(),
    };
    match status {
        status if status.is_success() => Ok(()),
        status => Err(DeliveryError::Status(status.as_u16())),
    }
}

/// Return the value of the header `webhook-signature`.
fn signature(key: &Key, id: &str, timestamp: &str, body: &[u8]) -> String {
    let signed = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat();
    format!("v1,{}", STANDARD.encode(sign(key, &signed)))
}

/// Connect to a webhook as for a delivery, but send nothing.
///
/// # Errors
/// The server cannot be reached, or its certificate is invalid.
pub async fn connect(webhook: &Webhook) -> Result<(), DeliveryError> {
    let connecting = fetch::connect(&webhook.url, webhook.tls.as_ref());
    let connected = timeout(webhook.timeout, connecting).await.map_err(|_| DeliveryError::Timeout(webhook.timeout))?;
    Ok(connected?)
}

impl DeliveryError {
    /// Return a hint on how the administrator can correct the error.
    pub fn hint(&self) -> &'static str {
        match self {
            DeliveryError::Fetch(FetchError::Tls(_)) => {
                "check the certificate of the server, or set `ca` to the certificate of its CA: ca = \"ca.pem\""
            }
            DeliveryError::Fetch(_) | DeliveryError::Timeout(_) => {
                "check the URL in `webhook`, and whether the gateway can connect to the server"
            }
            DeliveryError::Status(_) => "check the log of the server",
            DeliveryError::Store(_) => "run `sluicegate doctor` to check the store",
        }
    }
}

/// The body of an event.
#[derive(Debug, Serialize)]
struct EventBody<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    timestamp: String,
    data: EventData<'a>,
}

#[derive(Debug, Serialize)]
struct EventData<'a> {
    limit: &'a str,
    threshold: u8,
    consumer: Option<String>,
    identity: String,
    quota: String,
    unit: &'a str,
    capacity: u64,
    used: u64,
    remaining: u64,
    denied: bool,
    shadow: bool,
    decided_by: &'static str,
    resets_at: String,
}

/// Return an event as JSON. As in usage reports, consumers appear by name, and all other identities as hashes.
fn body(event: &QuotaEvent, config: &CompiledConfig) -> Bytes {
    let QuotaEvent { usage, threshold, .. } = event;
    let limit = &*usage.notify.limit;
    let compiled = config.limits.get(limit);
    let time = |us: u64| Timestamp::from_microsecond(us as i64).unwrap_or(Timestamp::UNIX_EPOCH).to_string();
    let data = EventData {
        limit,
        threshold: *threshold,
        consumer: consumer_name(config, limit, usage.identity),
        identity: usage.identity.to_string(),
        quota: usage.quota.to_string(),
        unit: compiled.map_or("", |compiled| &compiled.limit.unit),
        capacity: usage.capacity,
        used: usage.capacity.saturating_sub(usage.remaining),
        remaining: usage.remaining,
        denied: usage.is_denied,
        shadow: compiled.is_some_and(|compiled| compiled.limit.shadow),
        decided_by: if usage.is_local { "local" } else { "store" },
        resets_at: time(usage.now_us.saturating_add(usage.reset_us)),
    };
    let body = EventBody { kind: EVENT_TYPE, timestamp: time(usage.now_us), data };
    // The value contains only strings and numbers, so serialization cannot fail.
    let mut json = serde_json::to_vec(&body).unwrap_or_default();
    escape_deceptive(&mut json, 0, Escape::Json);
    json.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_lc_rs::hmac::HMAC_SHA256;

    /// The test vector is the example in the Standard Webhooks libraries.
    #[test]
    fn signature_equals_the_published_example() {
        let key = Key::new(HMAC_SHA256, &STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap());
        let signed = signature(&key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b"{\"test\": 2432232314}");
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }
}
