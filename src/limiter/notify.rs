//! Quota events report that an identity has used a certain percentage of a limit. A bounded queue passes the events to
//! the thread that sends them.

use std::collections::HashMap;
use std::hash::RandomState;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::clock::monotonic;
use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::key::Identity;
use crate::limiter::metrics::Counter;
use crate::limiter::quota::Quota;

/// Maximum number of events that wait for the sending thread.
const QUEUE_LENGTH: usize = 4096;

/// Maximum number of events that are recorded until their period ends, so that each period has only one event per
/// threshold. One limit may use at most half of the records, so that clients that choose their identities cannot
/// suppress the events of other limits.
const MAX_REMEMBERED: usize = 100_000;

/// The percentage at which a limit is used up.
const USED_UP: u8 = 100;

/// The thresholds of a limit, and the destination of its events.
#[derive(Debug, PartialEq, Eq)]
pub struct Notify {
    /// Name of the limit.
    pub limit: Box<str>,
    /// Name of the destination.
    pub to: Box<str>,
    /// Percentages of the capacity, from 1 to 100, in ascending order.
    pub at: Box<[u8]>,
}

/// The period in which an identity causes at most one event for each threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventPeriod {
    /// A fixed window, until this instant by the clock of the store, in µs since the Unix epoch.
    Window(u64),
    /// A duration that begins with the event: the length of a sliding window, or the time in which an empty bucket
    /// refills.
    Rolling(Duration),
}

/// The usage of a limit by an identity that has reached at least one threshold.
#[derive(Debug, Clone)]
pub struct LimitUsage {
    /// The thresholds of the limit.
    pub notify: Arc<Notify>,
    /// The identity whose usage is reported.
    pub identity: Identity,
    /// The quota that applied to the identity.
    pub quota: Quota,
    /// Capacity of the rule that made the decision.
    pub capacity: u64,
    /// Tokens that remain after the charge.
    pub remaining: u64,
    /// Whether the limit denied the request, or would have denied it without shadow mode.
    pub is_denied: bool,
    /// Whether the local share of the gateway decided.
    pub is_local: bool,
    /// Time of the decision by the clock of the store, µs since the Unix epoch.
    pub now_us: u64,
    /// µs until the limit is fully reset.
    pub reset_us: u64,
    /// The period of the events.
    pub period: EventPeriod,
}

/// An event, which means that the usage has reached a threshold.
#[derive(Debug, Clone)]
pub struct QuotaEvent {
    /// The usage that reached the threshold.
    pub usage: LimitUsage,
    /// The threshold, in percent.
    pub threshold: u8,
    /// Time at which the event was queued.
    pub queued_at: Instant,
}

/// The decision that an outcome belongs to.
#[derive(Debug, Clone, Copy)]
pub struct DecisionContext<'r> {
    /// The quota of the limit.
    pub quota: Quota,
    /// The rule that decided.
    pub rule: &'r Rule,
    /// Whether the local share of the gateway decided.
    pub is_local: bool,
    /// Time of the decision by the clock of the store, µs since the Unix epoch.
    pub now_us: u64,
    /// Tokens that are only reserved. They do not count, because they may be refunded.
    pub reserved: u64,
}

impl LimitUsage {
    /// Return the usage after an outcome, if it has reached a threshold.
    pub fn new(
        notify: &Arc<Notify>,
        identity: Identity,
        context: DecisionContext<'_>,
        outcome: &Outcome,
    ) -> Option<Self> {
        let DecisionContext { quota, rule, is_local, now_us, reserved } = context;
        let period = match rule {
            Rule::FixedWindow(_) => EventPeriod::Window(now_us + outcome.reset_us),
            Rule::TokenBucket(_) => EventPeriod::Rolling(Duration::from_micros(rule.refill_time_us(rule.capacity()))),
            Rule::SlidingWindow(rule) => EventPeriod::Rolling(Duration::from_micros(rule.window)),
            Rule::SlidingBuckets(rule) => EventPeriod::Rolling(Duration::from_micros(rule.window)),
            Rule::SlidingLog(rule) => EventPeriod::Rolling(Duration::from_micros(rule.window)),
            Rule::Concurrency(_) => return None,
        };
        let Outcome { status, remaining, reset_us, .. } = *outcome;
        let is_denied = match status {
            Status::Ok => false,
            Status::Exceeded => true,
            // A cost that exceeds the capacity is always denied, so this denial gives no information about the usage.
            Status::CostTooLarge | Status::Saturated => return None,
        };
        let capacity = rule.capacity();
        let remaining = if is_denied { remaining } else { remaining.saturating_add(reserved).min(capacity) };
        let usage = LimitUsage {
            notify: notify.clone(),
            identity,
            quota,
            capacity,
            remaining,
            is_denied,
            is_local,
            now_us,
            reset_us,
            period,
        };
        // A reset time of 0 means that no tokens are used, or that the limit did not take part in the decision.
        (reset_us > 0 && usage.thresholds().next().is_some()).then_some(usage)
    }

    /// Return the thresholds that the usage has reached.
    fn thresholds(&self) -> impl Iterator<Item = u8> {
        self.notify.at.iter().copied().filter(|at| self.has_reached(*at))
    }

    fn has_reached(&self, threshold: u8) -> bool {
        let used = self.capacity.saturating_sub(self.remaining);
        // A denial counts as 100 %, even if some tokens remain that are not sufficient for the cost.
        threshold == USED_UP && self.is_denied
            || u128::from(used) * 100 >= u128::from(threshold) * u128::from(self.capacity)
    }
}

/// The events of a limit, by identity and threshold.
type RememberedEvents = HashMap<(Identity, u8), Remembered, RandomState>;

/// The period of a recorded event, and the time at which the period ends.
#[derive(Debug, Clone, Copy)]
struct Remembered {
    period: EventPeriod,
    until: Instant,
}

/// The events of this process. Each identity causes at most one event for each threshold and period. The queue is
/// bounded, and adding an event never waits.
#[derive(Debug)]
pub struct EventQueue {
    sender: Sender<QuotaEvent>,
    /// Records of queued events, by limit. A record prevents a second event for the same identity, threshold and
    /// period.
    remembered: Mutex<HashMap<Box<str>, RememberedEvents, RandomState>>,
    dropped: AtomicU64,
}

impl Default for EventQueue {
    /// Create a queue from which no task takes events.
    fn default() -> Self {
        EventQueue::new().0
    }
}

impl EventQueue {
    /// Create an empty queue, and the receiver of its events.
    pub fn new() -> (Self, Receiver<QuotaEvent>) {
        let (sender, receiver) = channel(QUEUE_LENGTH);
        (EventQueue { sender, remembered: Mutex::default(), dropped: AtomicU64::new(0) }, receiver)
    }

    /// Queue an event for each threshold that is reached for the first time in its period. If the queue is full, the
    /// event is dropped and counted as dropped. The next request tries to queue it again.
    pub fn offer(&self, usage: &LimitUsage) {
        let now = monotonic();
        let mut by_limit = self.lock();
        let mut total: usize = by_limit.values().map(HashMap::len).sum();
        let remembered = by_limit.entry(usage.notify.limit.clone()).or_default();
        for threshold in usage.thresholds() {
            let key = (usage.identity, threshold);
            if remembered.get(&key).is_some_and(|earlier| earlier.covers(usage.period, now)) {
                continue;
            }
            let event = QuotaEvent { usage: usage.clone(), threshold, queued_at: now };
            let is_new = !remembered.contains_key(&key);
            let has_room = !is_new || total < MAX_REMEMBERED && remembered.len() < MAX_REMEMBERED / 2;
            if !has_room || self.sender.try_send(event).is_err() {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let length = match usage.period {
                EventPeriod::Window(_) => Duration::from_micros(usage.reset_us),
                EventPeriod::Rolling(length) => length,
            };
            // If the end of the period is beyond the range of the clock, the period never ends.
            let until = now.checked_add(length).unwrap_or(now + FOREVER);
            remembered.insert(key, Remembered { period: usage.period, until });
            total += usize::from(is_new);
        }
    }

    /// Remove the record of an event that was dropped, so that the next request queues the event again.
    pub fn forget(&self, event: &QuotaEvent) {
        if let Some(remembered) = self.lock().get_mut(&event.usage.notify.limit) {
            remembered.remove(&(event.usage.identity, event.threshold));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, RememberedEvents, RandomState>> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remove the records of events whose period has ended.
    pub fn forget_ended(&self) {
        let now = monotonic();
        self.lock().values_mut().for_each(|remembered| remembered.retain(|_, earlier| now < earlier.until));
    }

    /// Return the number of events that were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// A duration of 100 years, which is longer than any process runs.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

impl Remembered {
    /// Return whether the recorded event belongs to this period, so that no further event is queued.
    fn covers(&self, period: EventPeriod, now: Instant) -> bool {
        match (self.period, period) {
            (EventPeriod::Window(earlier), EventPeriod::Window(end)) => earlier == end,
            _ => now < self.until,
        }
    }
}

// === Deliveries ===

/// The result of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryResult {
    /// The destination has accepted the event.
    Delivered,
    /// Another gateway sends the event.
    Claimed,
    /// The event could not be delivered.
    Failed,
    /// The event was dropped, because too many events for the destination were waiting.
    Dropped,
}

impl DeliveryResult {
    /// All values of this enum, in the order of [`DeliveryStats::results`].
    pub const ALL: [DeliveryResult; 4] =
        [DeliveryResult::Delivered, DeliveryResult::Claimed, DeliveryResult::Failed, DeliveryResult::Dropped];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            DeliveryResult::Delivered => "delivered",
            DeliveryResult::Claimed => "claimed",
            DeliveryResult::Failed => "failed",
            DeliveryResult::Dropped => "dropped",
        }
    }
}

/// Statistics about the deliveries to a destination.
#[derive(Debug, Default)]
pub struct DeliveryStats {
    /// Events by [`DeliveryResult`].
    pub results: Counter<4>,
    /// Number of failed attempts to deliver an event.
    failed_attempts: AtomicU64,
    pending: Arc<AtomicU64>,
}

/// Counts an event as undelivered until this value is dropped.
#[derive(Debug)]
pub struct PendingDelivery(Arc<AtomicU64>);

impl Drop for PendingDelivery {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DeliveryStats {
    /// Count an event as undelivered until the returned value is dropped.
    pub fn begin(&self) -> PendingDelivery {
        self.pending.fetch_add(1, Ordering::Relaxed);
        PendingDelivery(self.pending.clone())
    }

    /// Count the result of a delivery.
    pub fn count(&self, result: DeliveryResult) {
        self.results.increment(result as usize);
    }

    /// Count a failed attempt.
    pub fn count_failed_attempt(&self) {
        self.failed_attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// Return the number of undelivered events.
    pub fn pending(&self) -> u64 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Return the number of failed attempts.
    pub fn failed_attempts(&self) -> u64 {
        self.failed_attempts.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
    use crate::limiter::algorithm::token_bucket::TokenBucket;

    const MINUTE_US: u64 = 60_000_000;

    fn notify(at: &[u8]) -> Arc<Notify> {
        Arc::new(Notify { limit: "l".into(), to: "hook".into(), at: at.into() })
    }

    fn window(quota: Quota) -> Rule {
        Rule::FixedWindow(FixedWindow::new(quota, WindowStart::FirstRequest).unwrap())
    }

    fn usage(notify: &Arc<Notify>, rule: &Rule, outcome: Outcome, now_us: u64, reserved: u64) -> Option<LimitUsage> {
        let quota = "10/min".parse().unwrap();
        let context = DecisionContext { quota, rule, is_local: false, now_us, reserved };
        LimitUsage::new(notify, Identity(1), context, &outcome)
    }

    fn outcome(remaining: u64, status: Status) -> Outcome {
        Outcome { status, remaining, reset_us: MINUTE_US, retry_us: 0 }
    }

    #[test]
    fn thresholds_are_percentages_of_the_capacity() {
        let notify = notify(&[80, 100]);
        let rule = window("10/min".parse().unwrap());
        for (remaining, status, reserved, expected) in [
            (10, Status::Ok, 0, &[][..]),
            (3, Status::Ok, 0, &[]),
            (2, Status::Ok, 0, &[80]),
            (1, Status::Ok, 0, &[80]),
            (0, Status::Ok, 0, &[80, 100]),
            // A request with a cost of 5 is denied although 3 tokens remain.
            (3, Status::Exceeded, 0, &[100]),
            (0, Status::Exceeded, 0, &[80, 100]),
            (0, Status::CostTooLarge, 0, &[]),
            // The request has reserved 8 tokens.
            (0, Status::Ok, 8, &[]),
            (0, Status::Ok, 2, &[80]),
        ] {
            let found = usage(&notify, &rule, outcome(remaining, status), 1, reserved);
            let reached: Vec<_> = found.iter().flat_map(LimitUsage::thresholds).collect();
            assert_eq!(reached, expected, "{remaining} {status:?} {reserved}");
        }
    }

    #[test]
    fn limit_that_is_not_involved_in_a_denial_has_no_event() {
        let rule = window("10/min".parse().unwrap());
        let idle = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
        assert!(usage(&notify(&[80]), &rule, idle, 1, 0).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn period_has_one_event_for_each_threshold() {
        let quota: Quota = "10/min".parse().unwrap();
        let notify = notify(&[80, 100]);
        let bucket = Rule::TokenBucket(TokenBucket::new(quota, 5).unwrap());
        let (queue, mut events) = EventQueue::new();
        let mut queued = |rule: &Rule, remaining, now_us| {
            queue.offer(&usage(&notify, rule, outcome(remaining, Status::Ok), now_us, 0).unwrap());
            std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.threshold).collect::<Vec<_>>()
        };
        let window = window(quota);
        assert_eq!(queued(&window, 2, 1000), [80]);
        assert_eq!(queued(&window, 1, 1000), [0_u8; 0]);
        assert_eq!(queued(&window, 0, 1000), [100]);
        assert_eq!(queued(&window, 0, 1000 + MINUTE_US), [80, 100], "the next window has its own events");
        queue.forget_ended();
        tokio::time::advance(Duration::from_secs(61)).await;
        queue.forget_ended();
        assert_eq!(queued(&bucket, 1, 0), [80], "4 of 5 tokens are used");
        tokio::time::advance(Duration::from_secs(29)).await;
        assert_eq!(queued(&bucket, 1, 0), [0_u8; 0], "the period is 30 s, in which 5 tokens refill");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(queued(&bucket, 1, 0), [80]);
    }

    #[test]
    fn full_queue_drops_events_and_counts_them() {
        let (queue, _events) = EventQueue::new();
        let notify = notify(&[80]);
        let rule = window("10/min".parse().unwrap());
        for number in 0..QUEUE_LENGTH as u128 + 10 {
            let found = usage(&notify, &rule, outcome(2, Status::Ok), 1, 0).unwrap();
            queue.offer(&LimitUsage { identity: Identity(number), ..found });
        }
        assert_eq!(queue.dropped(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_remembered_events_is_bounded_until_their_periods_end() {
        let (queue, mut events) = EventQueue::new();
        let rule = window("10/min".parse().unwrap());
        let limits =
            ["a", "b", "c"].map(|limit| Arc::new(Notify { limit: limit.into(), to: "t".into(), at: [80].into() }));
        let mut offer = |limit: usize, identities: std::ops::Range<usize>| {
            for number in identities {
                let found = usage(&limits[limit], &rule, outcome(2, Status::Ok), 1, 0).unwrap();
                queue.offer(&LimitUsage { identity: Identity(number as u128), ..found });
                let _ = events.try_recv();
            }
            queue.dropped()
        };
        const HALF: usize = MAX_REMEMBERED / 2;
        assert_eq!(offer(0, 0..HALF), 0);
        assert_eq!(offer(0, HALF..HALF + 10), 10, "one limit may use at most half of the records");
        assert_eq!(offer(1, 0..HALF), 10, "the other half is for other limits");
        assert_eq!(offer(2, 0..10), 20);
        tokio::time::advance(Duration::from_micros(MINUTE_US)).await;
        queue.forget_ended();
        assert_eq!(offer(2, 0..10), 20, "the periods have ended");
    }
}
