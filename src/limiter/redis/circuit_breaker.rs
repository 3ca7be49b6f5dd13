//! The circuit breaker of a store: while it is open, requests cost nothing and follow `on_store_error`.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::field::display;
use tracing::{info, warn};

use crate::limiter::clock::{elapsed_since, monotonic, unix_us};
use crate::limiter::redis::batcher::CallObserver;
use crate::limiter::redis::cluster::topology::SlotMap;
use crate::limiter::redis::connection::MAX_UNANSWERED_CALLS;
use crate::limiter::redis::diagnosis::diagnose_call;
use crate::limiter::redis::server::Address;
use crate::limiter::redis::{ProbeCall, ServerStore};
use crate::limiter::verdict::{Charge, ChargeMode, CounterStore, Operation, StoreError, Verdict};

/// The first probe comes after this, each later one after twice as long, up to [`SLOWEST_PROBE`].
const INITIAL_PROBE_DELAY: Duration = Duration::from_millis(100);
const MAX_PROBE_DELAY: Duration = Duration::from_secs(1);

/// A store that was silent is probed again after this, until it is known whether it works.
const SUSPECT_PROBE_INTERVAL: Duration = Duration::from_millis(10);

/// How often it is looked whether the server has closed an idle connection.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// A store that answers again after an outage: told to those that have something to put right.
#[derive(Debug)]
pub struct RecoverySignal {
    notify: Notify,
    created_at: Instant,
    /// When it was last, µs since this was made; 0 = never.
    last_us: AtomicU64,
}

impl Default for RecoverySignal {
    fn default() -> Self {
        RecoverySignal { notify: Notify::new(), created_at: monotonic(), last_us: AtomicU64::new(0) }
    }
}

impl RecoverySignal {
    /// Returns when the store answers again.
    pub async fn recovered(&self) {
        self.notify.notified().await;
    }

    /// Whether it was within this time.
    pub fn is_within(&self, time: Duration) -> bool {
        let last = self.last_us.load(Ordering::Relaxed);
        last != 0 && elapsed_since(self.created_at) < Duration::from_micros(last) + time
    }

    fn announce(&self) {
        self.last_us.store(elapsed_since(self.created_at).as_micros().max(1) as u64, Ordering::Relaxed);
        self.notify.notify_waiters();
    }
}

/// Whether the store is asked at all; one for all workers, so that one of them probes.
#[derive(Debug)]
pub struct CircuitBreaker {
    /// Odd while it is open. Calls of an earlier era say nothing about this one.
    epoch: AtomicU32,
    failures: FailureWindow,
    /// Whether a call found the store silent, and probes find out whether it is.
    is_probing: AtomicBool,
    write_health: WriteHealth,
    recovery: Arc<RecoverySignal>,
    created_at: Instant,
}

/// A store behind the breaker.
#[derive(Debug, Clone)]
pub struct GuardedStore {
    store: Arc<ServerStore>,
    monitor: Arc<StoreMonitor>,
}

/// What one worker knows of a store to judge it.
#[derive(Debug)]
struct StoreMonitor {
    /// A node that left its cluster is dropped, and never answers again.
    store: Weak<ServerStore>,
    breaker: Arc<CircuitBreaker>,
    timeout: Duration,
    /// Where it is, if it is one of several, to which it may refer.
    node: Option<Address>,
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        CircuitBreaker::new(Arc::default())
    }
}

impl CircuitBreaker {
    /// A closed breaker; `recovery` is told each time that it closes again.
    pub fn new(recovery: Arc<RecoverySignal>) -> Self {
        let (epoch, failures, is_probing, write_health) = Default::default();
        CircuitBreaker { epoch, failures, is_probing, write_health, recovery, created_at: monotonic() }
    }

    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.closed_epoch().is_none()
    }

    /// How often it has opened.
    pub fn open_count(&self) -> u64 {
        u64::from(self.epoch.load(Ordering::Relaxed).div_ceil(2))
    }

    /// Told each time that the breaker closes again.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        &self.recovery
    }

    fn closed_epoch(&self) -> Option<u32> {
        Some(self.epoch.load(Ordering::Acquire)).filter(|era| era % 2 == 0)
    }

    fn age(&self) -> Duration {
        elapsed_since(self.created_at)
    }
}

impl GuardedStore {
    /// Guards one worker's store.
    pub fn new(store: ServerStore, breaker: Arc<CircuitBreaker>) -> Self {
        GuardedStore::with_node(store, breaker, None)
    }

    /// The same for a node of a cluster, which does not fail when it refers to another one.
    pub fn for_node(store: ServerStore, breaker: Arc<CircuitBreaker>, address: Address) -> Self {
        GuardedStore::with_node(store, breaker, Some(address))
    }

    fn with_node(store: ServerStore, breaker: Arc<CircuitBreaker>, node: Option<Address>) -> Self {
        let store = Arc::new(store);
        let monitor = Arc::new(StoreMonitor { store: Arc::downgrade(&store), breaker, timeout: store.timeout(), node });
        store.set_observer(monitor.clone());
        GuardedStore { store, monitor }
    }

    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        self.monitor.timeout
    }

    /// Told each time that the store answers again after an outage.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        self.monitor.breaker.recovery()
    }

    /// Connects, so that the first request finds a connection, and keeps it so; a store that cannot be reached opens the breaker
    /// at once.
    pub async fn connect(&self) {
        let epoch = self.monitor.breaker.epoch.load(Ordering::Acquire);
        if let Err(error) = self.store.connect().await {
            self.monitor.open(epoch, &error, None);
        }
        let monitor = self.monitor.clone();
        tokio::spawn(async move {
            loop {
                sleep(IDLE_CHECK_INTERVAL).await;
                let Some(store) = monitor.store.upgrade() else { return };
                if !monitor.breaker.is_open() {
                    store.maintain_connections().await;
                }
            }
        });
    }

    /// Whether this is its breaker.
    pub fn uses_breaker(&self, breaker: &Arc<CircuitBreaker>) -> bool {
        Arc::ptr_eq(&self.monitor.breaker, breaker)
    }

    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.monitor.breaker.is_open()
    }

    /// Decides by `due`; see [`RedisStore::ask`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call_before(
        &self,
        deadline: Instant,
        asking: bool,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let Some(epoch) = self.monitor.breaker.closed_epoch() else { return Err(StoreError::BreakerOpen) };
        // On the heap: inside the request's future it would be moved with it, for every request.
        let result = Box::pin(self.store.call_before(deadline, asking, operation, charges)).await;
        self.monitor.breaker.write_health.record(operation, charges, &result, unix_us);
        result.map_err(|error| {
            if self.monitor.is_error_reply(&error) {
                self.monitor.call_failed(epoch, &error, charges.first().map(ProbeCall::from_charge));
            }
            match error {
                StoreError::LateReply if self.is_open() => StoreError::Timeout,
                StoreError::Overloaded if self.is_open() => StoreError::BreakerOpen,
                error => error,
            }
        })
    }

    /// Sends a command for an operator. What fails of these says nothing about requests, but while the breaker is open
    /// nothing is sent.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn admin_command(&self, time_limit: Duration, asking: bool, command: &Cmd) -> Result<Value, StoreError> {
        if self.is_open() {
            return Err(StoreError::BreakerOpen);
        }
        timeout(time_limit, self.store.command(asking, command)).await.unwrap_or(Err(StoreError::Timeout))
    }

    /// Which node of the cluster keeps which slot, as this one at `address` knows it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn slots(&self, address: &Address) -> Result<SlotMap, StoreError> {
        let Some(epoch) = self.monitor.breaker.closed_epoch() else { return Err(StoreError::BreakerOpen) };
        let slots = async {
            // Connecting takes longer than a call and has a limit of its own.
            self.store.connect().await?;
            timeout(self.monitor.timeout, self.store.slots(address)).await.unwrap_or(Err(StoreError::Timeout))
        };
        let slots = slots.await;
        match &slots {
            Err(error) if self.monitor.is_failure(error) => self.monitor.call_failed(epoch, error, None),
            Ok(_) | Err(_) => self.monitor.reply_received(epoch),
        }
        slots
    }
}

impl StoreMonitor {
    /// Whether an error says that the store cannot be used, rather than this call not be made.
    fn is_failure(&self, error: &StoreError) -> bool {
        self.is_error_reply(error) || matches!(error, StoreError::Unreachable(_) | StoreError::Timeout)
    }

    /// Whether the store replied, and its reply says that it cannot be used. Of calls without a reply the batcher tells.
    fn is_error_reply(&self, error: &StoreError) -> bool {
        match error {
            StoreError::Rejected(_) | StoreError::MalformedReply => true,
            StoreError::Redirected(_) => self.node.is_none(),
            StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::LateReply
            | StoreError::BreakerOpen
            | StoreError::Overloaded
            | StoreError::CapacityExceeded
            | StoreError::WritesRejected(_)
            | StoreError::CorruptState(_) => false,
        }
    }

    async fn probe(&self, store: &ServerStore, call: Option<&ProbeCall>) -> Result<(), StoreError> {
        // Connecting takes longer than a call and has a limit of its own.
        store.connect().await?;
        let result = timeout(self.timeout, store.probe(call)).await.unwrap_or(Err(StoreError::Timeout));
        result.or_else(|error| if self.is_failure(&error) { Err(error) } else { Ok(()) })
    }

    /// Probes a store that was silent until it answers or the breaker opens: where requests are rare, an outage must not cost each of
    /// the first ones its timeout.
    fn probe_until_known(&self, epoch: u32, call: Option<ProbeCall>) {
        if self.breaker.is_probing.swap(true, Ordering::Relaxed) {
            return;
        }
        let monitor = self.duplicate();
        tokio::spawn(async move {
            while monitor.breaker.closed_epoch() == Some(epoch)
                && let Some(store) = monitor.store.upgrade()
            {
                match monitor.probe(&store, call.as_ref()).await {
                    Ok(()) => {
                        monitor.reply_received(epoch);
                        break;
                    }
                    Err(error) if monitor.breaker.failures.record_failure(monitor.breaker.age()) => {
                        monitor.open(epoch, &error, call.clone());
                    }
                    Err(_) => sleep(SUSPECT_PROBE_INTERVAL).await,
                }
            }
            monitor.breaker.is_probing.store(false, Ordering::Relaxed);
        });
    }

    fn duplicate(&self) -> Self {
        let StoreMonitor { store, breaker, timeout, node } = self;
        StoreMonitor { store: store.clone(), breaker: breaker.clone(), timeout: *timeout, node: node.clone() }
    }

    /// Opens the breaker, if it has been closed since `era`, until a call `like` the one that failed is answered.
    fn open(&self, epoch: u32, error: &StoreError, call: Option<ProbeCall>) {
        let try_open = || self.breaker.epoch.compare_exchange(epoch, epoch + 1, Ordering::AcqRel, Ordering::Relaxed);
        if epoch % 2 == 1 || try_open().is_err() {
            return;
        }
        let mut outage_log = OutageLog::new(self.node.clone());
        outage_log.log_failure(error);
        let monitor = self.duplicate();
        tokio::spawn(async move {
            let mut delay = INITIAL_PROBE_DELAY;
            loop {
                // Up to a tenth more, so that gateways that lost the store together do not come back together.
                let jitter = (monitor.breaker.age().as_micros() % 1000) as f64 / 10_000.0;
                sleep(delay + delay.mul_f64(jitter)).await;
                let Some(store) = monitor.store.upgrade() else { return };
                match monitor.probe(&store, call.as_ref()).await {
                    Ok(()) => break,
                    Err(error) => outage_log.log_failure(&error),
                }
                delay = (delay * 2).min(MAX_PROBE_DELAY);
            }
            monitor.breaker.failures.reset();
            monitor.breaker.epoch.fetch_add(1, Ordering::Release);
            monitor.breaker.recovery.announce();
            outage_log.log_recovery();
        });
    }
}

impl CallObserver for StoreMonitor {
    fn epoch(&self) -> Option<u32> {
        self.breaker.closed_epoch()
    }

    fn reply_received(&self, epoch: u32) {
        if self.breaker.epoch.load(Ordering::Relaxed) == epoch {
            self.breaker.failures.record_success(|| self.breaker.age());
        }
    }

    fn reply_late(&self, epoch: u32) {
        if self.breaker.epoch.load(Ordering::Relaxed) == epoch
            && self.breaker.failures.record_late_reply(self.breaker.age())
        {
            self.open(epoch, &StoreError::Timeout, None);
        }
    }

    fn call_failed(&self, epoch: u32, error: &StoreError, call: Option<ProbeCall>) {
        if self.breaker.epoch.load(Ordering::Relaxed) != epoch {
            return;
        }
        if self.breaker.failures.record_failure(self.breaker.age()) {
            self.open(epoch, error, call);
        } else if let StoreError::Timeout = error {
            self.probe_until_known(epoch, call);
        }
    }
}

impl CounterStore for GuardedStore {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.call_before(monotonic() + self.timeout(), false, operation, charges).await
    }
}

// When a store fails too often: the failures in a row, and the part of all calls that fails.

/// Failures in a row that are too many: as many as end a connection, so that the probe starts on a fresh one.
const MAX_CONSECUTIVE_FAILURES: u32 = MAX_UNANSWERED_CALLS;

/// Parts of the calls of this time are too many, if they are as many as this.
const WINDOW: Duration = Duration::from_secs(1);
const MIN_CALLS: u64 = 20;

/// The failures of late. Calls that succeed cost three loads as long as none has failed.
#[derive(Debug)]
pub(crate) struct FailureWindow {
    consecutive: AtomicU32,
    /// Half of the calls failed.
    failed_ratio: FailureRatio,
    /// Nine in ten failed, or were answered, but not in time. A busy store, or one that shares a busy machine, answers some in time: it
    /// is overloaded. One that is in time for none is too slow.
    late_ratio: FailureRatio,
}

/// A part of the calls of a window of [`WINDOW`] that begins with one of this part.
#[derive(Debug)]
struct FailureRatio {
    /// So many of ten are too many.
    max_tenths: u64,
    /// ms of its start, how many calls, how many of this part, in 32, 16 and 16 bits. 0 is none: successes before the first failure
    /// could only make the part smaller.
    packed_window: AtomicU64,
}

impl Default for FailureWindow {
    fn default() -> Self {
        let ratio = |most| FailureRatio { max_tenths: most, packed_window: AtomicU64::new(0) };
        FailureWindow { consecutive: AtomicU32::new(0), failed_ratio: ratio(5), late_ratio: ratio(9) }
    }
}

impl FailureWindow {
    /// A call succeeded. `now` is asked for the time only if one failed lately.
    pub(crate) fn record_success(&self, now: impl Fn() -> Duration) {
        if self.consecutive.load(Ordering::Relaxed) != 0 {
            self.consecutive.store(0, Ordering::Relaxed);
        }
        self.failed_ratio.record_other(&now);
        self.late_ratio.record_other(&now);
    }

    /// A call failed; whether that makes too many.
    pub(crate) fn record_failure(&self, now: Duration) -> bool {
        let consecutive = self.consecutive.fetch_add(1, Ordering::Relaxed) + 1;
        let (is_failed_exceeded, late) = (self.failed_ratio.record_matching(now), self.late_ratio.record_matching(now));
        consecutive >= MAX_CONSECUTIVE_FAILURES || is_failed_exceeded || late
    }

    /// A call was not answered in time, while others were answered; whether that makes too many.
    pub(crate) fn record_late_reply(&self, now: Duration) -> bool {
        self.failed_ratio.record_other(&|| now);
        self.late_ratio.record_matching(now)
    }

    /// Begins anew.
    pub(crate) fn reset(&self) {
        self.consecutive.store(0, Ordering::Relaxed);
        self.failed_ratio.packed_window.store(0, Ordering::Relaxed);
        self.late_ratio.packed_window.store(0, Ordering::Relaxed);
    }
}

impl FailureRatio {
    fn record_other(&self, now: &impl Fn() -> Duration) {
        if self.packed_window.load(Ordering::Relaxed) != 0 {
            self.record(now(), 0);
        }
    }

    /// One more call of this part; whether that makes it too large.
    fn record_matching(&self, now: Duration) -> bool {
        let (calls, matching) = self.record(now, 1);
        calls >= MIN_CALLS && 10 * matching >= self.max_tenths * calls
    }

    /// Counts a call, 0 or 1 of this part: how many calls the window has, and how many of this part.
    fn record(&self, now: Duration, matching: u64) -> (u64, u64) {
        // 49 days in 32 bits; only the difference counts.
        let now_ms = now.as_millis() as u32;
        let next_window = |window: u64| {
            let (started_ms, calls, matching_before) = ((window >> 32) as u32, window >> 16 & 0xFFFF, window & 0xFFFF);
            let is_over = u128::from(now_ms.wrapping_sub(started_ms)) >= WINDOW.as_millis() || calls == 0xFFFF;
            match (is_over || window == 0, matching) {
                (true, 0) => 0,
                (true, _) => u64::from(now_ms) << 32 | 1 << 16 | 1,
                (false, _) => u64::from(started_ms) << 32 | (calls + 1) << 16 | (matching_before + matching),
            }
        };
        let before =
            self.packed_window.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |window| Some(next_window(window)));
        let window = next_window(before.unwrap_or_else(|window| window));
        (window >> 16 & 0xFFFF, window & 0xFFFF)
    }
}

// Why the store fails, in the log: each reason of an outage once.

/// Reasons of one outage that are logged. More than one: the first may be that of a slow moment, and not what is to be mended.
const MAX_REASONS: usize = 8;

/// What was said of one outage.
#[derive(Debug)]
pub(crate) struct OutageLog {
    /// Where the store is, if it is one of several.
    node: Option<Address>,
    logged: Vec<String>,
}

impl OutageLog {
    /// Nothing, as yet.
    pub(crate) fn new(node: Option<Address>) -> Self {
        OutageLog { node, logged: Vec::new() }
    }

    /// Says why a call failed, if that is new.
    pub(crate) fn log_failure(&mut self, error: &StoreError) {
        let reason = error.to_string();
        if self.logged.len() == MAX_REASONS || self.logged.contains(&reason) {
            return;
        }
        let (node, advice) = (self.node.as_ref().map(display), error.error_reply().map(diagnose_call));
        if self.logged.is_empty() {
            warn!(%error, advice, node, "the store fails: limits follow on_store_error until it answers again");
        } else {
            warn!(%error, advice, node, "the store still fails, for another reason");
        }
        self.logged.push(reason);
    }

    /// Says that it is over.
    pub(crate) fn log_recovery(self) {
        info!(node = self.node.as_ref().map(display), "the store answers again");
    }
}

// Whether the store takes writes: said when it stops to, and when it does again.

/// Without a refusal for this long: a store at the edge of its memory takes one write and refuses the next.
const WRITE_RECOVERY_TIME: Duration = Duration::from_secs(1);

/// When a write was refused last, µs since the Unix epoch; 0 while writes are taken.
#[derive(Debug, Default)]
pub(crate) struct WriteHealth(AtomicU64);

impl WriteHealth {
    /// Learns from a call. `now_us` is asked for the time only when it matters.
    pub(crate) fn record(
        &self,
        operation: Operation,
        charges: &[Charge<'_>],
        result: &Result<Verdict, StoreError>,
        now_us: impl FnOnce() -> u64,
    ) {
        match result {
            Ok(verdict) => {
                let rejected_at_us = self.0.load(Ordering::Relaxed);
                if rejected_at_us != 0 && has_written(operation, charges, verdict) {
                    let is_settled = u128::from(now_us().abs_diff(rejected_at_us)) >= WRITE_RECOVERY_TIME.as_micros();
                    let reset = || self.0.compare_exchange(rejected_at_us, 0, Ordering::Relaxed, Ordering::Relaxed);
                    if is_settled && reset().is_ok() {
                        info!("the store takes writes again");
                    }
                }
            }
            Err(error @ StoreError::WritesRejected(_)) => {
                if self.0.swap(now_us(), Ordering::Relaxed) == 0 {
                    warn!(%error, "the store takes no writes: what it would charge follows on_store_error until it does");
                }
            }
            Err(_) => {}
        }
    }
}

/// Whether a call wrote for certain: it charged something at once.
fn has_written(operation: Operation, charges: &[Charge<'_>], verdict: &Verdict) -> bool {
    matches!(operation, Operation::Check | Operation::TakeUpTo | Operation::Charge)
        && verdict.granted > 0
        && charges.iter().any(|charge| charge.mode == ChargeMode::Enforced && charge.cost > 0)
}

#[cfg(test)]
mod failures_tests {
    use super::*;

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Makes calls, one each `gap` ms from `start` on, `F` for those that fail, `L` for those that are late: the first one that is too many.
    fn calls_until_open(outcomes: &str, start_ms: u64, gap_ms: u64) -> Option<usize> {
        let failures = FailureWindow::default();
        outcomes.bytes().enumerate().find_map(|(index, call)| {
            let now = millis(start_ms + index as u64 * gap_ms);
            let too_many = match call {
                b'F' => failures.record_failure(now),
                b'L' => failures.record_late_reply(now),
                _ => {
                    failures.record_success(|| now);
                    false
                }
            };
            too_many.then_some(index + 1)
        })
    }

    #[test]
    fn five_consecutive_failures_open_the_breaker() {
        assert_eq!(calls_until_open("FFFFF", 0, 1), Some(5));
        assert_eq!(calls_until_open("FFFFF", 0, 100_000), Some(5));
        assert_eq!(calls_until_open("SSSFFFFSFFFFF", 0, 1), Some(13), "a success begins the row anew");
        assert_eq!(calls_until_open("FFFFSFFFFSFFFFS", 0, 1), None, "not twenty yet");
    }

    #[test]
    fn half_of_twenty_calls_within_a_second_open_the_breaker() {
        let half = "FS".repeat(100);
        assert_eq!(calls_until_open(&half, 0, 1), Some(21), "at the first failure from the twentieth call on");
        assert_eq!(calls_until_open(&half, 0, 47), Some(21), "in 940 ms");
        assert_eq!(calls_until_open(&half, 0, 60), None, "fewer than twenty in a second");
        assert_eq!(calls_until_open(&"FSS".repeat(100), 0, 1), None, "a third");
        assert_eq!(calls_until_open(&"FFS".repeat(100), 0, 1), Some(20), "two thirds");
        assert_eq!(
            calls_until_open(&format!("{}{half}", "S".repeat(1000)), 0, 1),
            Some(1021),
            "after any number that went well"
        );
    }

    #[test]
    fn nine_in_ten_late_replies_open_the_breaker() {
        assert_eq!(calls_until_open(&"L".repeat(100), 0, 1), Some(20));
        assert_eq!(calls_until_open(&"L".repeat(100), 0, 60), None, "fewer than twenty in a second");
        assert_eq!(calls_until_open(&"LLLLS".repeat(100), 0, 1), None, "one of five is in time");
        assert_eq!(calls_until_open(&format!("{}S", "L".repeat(18)).repeat(100), 0, 1), Some(20), "one of nineteen");
        assert_eq!(
            calls_until_open("LLLLFFFFLLLLF", 0, 1),
            Some(13),
            "a late reply to another call does not end a row of failures"
        );
    }

    #[test]
    fn window_starts_with_a_failure() {
        // Three single failures in three windows, and a half that fails in the fourth.
        let quiet = format!("F{}", "S".repeat(1099));
        assert_eq!(calls_until_open(&format!("{}{}", quiet.repeat(3), "FS".repeat(20)), 0, 1), Some(3321));
        let failures = FailureWindow::default();
        assert!(!failures.record_failure(millis(5)));
        failures.record_success(|| millis(1005));
        assert_eq!(failures.failed_ratio.packed_window.load(Ordering::Relaxed), 0, "successes cost nothing again");
    }

    #[test]
    fn window_survives_time_wrap_and_many_calls() {
        assert_eq!(calls_until_open(&"FS".repeat(100), u64::from(u32::MAX) - 10, 1), Some(21));
        let failures = FailureWindow::default();
        failures.record_failure(millis(1));
        for _ in 0..200_000 {
            failures.record_success(|| millis(2));
        }
        let trips = (0..MIN_CALLS).map(|_| {
            failures.record_success(|| millis(3));
            failures.record_failure(millis(3))
        });
        assert!(trips.collect::<Vec<_>>().contains(&true), "half of those that come now");
        failures.reset();
        assert!(!failures.record_failure(millis(4)));
    }
}
