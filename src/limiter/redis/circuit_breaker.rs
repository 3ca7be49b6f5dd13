//! The circuit breaker of a Redis server. While a circuit breaker is open, no call is sent and limits follow
//! `on_store_error`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::field::display;
use tracing::{info, warn};

use crate::clock::{elapsed_since, monotonic, unix_us};
use crate::limiter::redis::error::diagnose_reply;
use crate::limiter::redis::server::Address;
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict};

/// Signal that the store is available again after an outage.
#[derive(Debug)]
pub struct RecoverySignal {
    notify: Notify,
    created_at: Instant,
    /// Time of the last recovery, in µs after `created_at`. 0: there was no recovery.
    last_us: AtomicU64,
}

impl Default for RecoverySignal {
    fn default() -> Self {
        RecoverySignal { notify: Notify::new(), created_at: monotonic(), last_us: AtomicU64::new(0) }
    }
}

impl RecoverySignal {
    /// Wait until the store is available again after an outage.
    pub async fn recovered(&self) {
        self.notify.notified().await;
    }

    /// Return whether there was a recovery within the last `time`.
    pub fn is_within(&self, time: Duration) -> bool {
        let last = self.last_us.load(Ordering::Relaxed);
        last != 0 && elapsed_since(self.created_at) < Duration::from_micros(last) + time
    }

    fn announce(&self) {
        self.last_us.store(elapsed_since(self.created_at).as_micros().max(1) as u64, Ordering::Relaxed);
        self.notify.notify_waiters();
    }
}

/// The state of a circuit breaker. All workers share the circuit breaker, so that only one worker sends probes.
#[derive(Debug)]
pub struct CircuitBreaker {
    /// Number of times that the circuit breaker has opened or closed. If the number is odd, the circuit breaker is
    /// open. Results of calls from an earlier epoch are ignored.
    epoch: AtomicU32,
    failures: FailureWindow,
    /// Notified when a call has waited for its reply for longer than the latency target.
    suspicion: Notify,
    /// Whether a task watches the server ([`Watch`]).
    is_watched: AtomicBool,
    write_health: WriteHealth,
    recovery: Arc<RecoverySignal>,
    created_at: Instant,
}

/// The right to watch a server: to probe it when a call gets no reply. One task of the process has this right until it
/// drops this value.
#[derive(Debug)]
pub(super) struct Watch(Arc<CircuitBreaker>);

impl Watch {
    /// Return the circuit breaker of the server.
    pub(super) fn breaker(&self) -> &CircuitBreaker {
        &self.0
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.is_watched.store(false, Ordering::Relaxed);
    }
}

/// The assessment of a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Assessment {
    /// The circuit breaker has opened or closed since the call was sent. The failed call therefore has no effect on the
    /// circuit breaker.
    Outdated,
    /// The failure is a sign that the store may be unavailable.
    Suspect,
    /// Too many calls failed, so the circuit breaker must open.
    Failing,
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        CircuitBreaker::new(Arc::default())
    }
}

impl CircuitBreaker {
    /// Create a closed breaker. `recovery` fires each time the circuit breaker closes again.
    pub fn new(recovery: Arc<RecoverySignal>) -> Self {
        CircuitBreaker {
            epoch: AtomicU32::new(0),
            failures: FailureWindow::default(),
            suspicion: Notify::new(),
            is_watched: AtomicBool::new(false),
            write_health: WriteHealth::default(),
            recovery,
            created_at: monotonic(),
        }
    }

    /// Return whether the breaker is open.
    pub fn is_open(&self) -> bool {
        self.closed_epoch().is_none()
    }

    /// Return how often the circuit breaker has opened.
    pub fn open_count(&self) -> u64 {
        u64::from(self.epoch.load(Ordering::Relaxed).div_ceil(2))
    }

    /// Return the signal that fires each time the breaker closes again.
    pub fn recovery(&self) -> &Arc<RecoverySignal> {
        &self.recovery
    }

    /// Return the epoch, which changes whenever the breaker opens or closes.
    pub(super) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Return the epoch if the breaker is closed.
    pub(super) fn closed_epoch(&self) -> Option<u32> {
        Some(self.epoch()).filter(|epoch| epoch % 2 == 0)
    }

    /// Record a reply to a call that was sent in this epoch.
    pub(super) fn record_reply(&self, epoch: u32) {
        if self.is_current(epoch) {
            self.failures.record_success(|| self.age());
        }
    }

    /// Record a failed call of this epoch.
    pub(super) fn record_failure(&self, epoch: u32) -> Assessment {
        match self.is_current(epoch) {
            false => Assessment::Outdated,
            true if self.failures.record_failure(self.age()) => Assessment::Failing,
            true => Assessment::Suspect,
        }
    }

    /// Record whether the store accepted the writes of a call.
    pub(super) fn record_write(
        &self,
        operation: Operation,
        charges: &[Charge<'_>],
        result: &Result<Verdict, StoreError>,
    ) {
        self.write_health.record(operation, charges, result, unix_us);
    }

    /// Open the circuit breaker if it is closed and `epoch` is still its current epoch. Return whether this call has
    /// opened the circuit breaker, in which case the caller must probe.
    pub(super) fn try_open(&self, epoch: u32) -> bool {
        let open = || self.epoch.compare_exchange(epoch, epoch + 1, Ordering::AcqRel, Ordering::Relaxed);
        epoch.is_multiple_of(2) && open().is_ok()
    }

    /// Close the open circuit breaker and signal the recovery.
    pub(super) fn close(&self) {
        self.failures.reset();
        self.epoch.fetch_add(1, Ordering::Release);
        self.recovery.announce();
    }

    /// Report that a call has waited for its reply for longer than the latency target.
    pub(super) fn suspect(&self) {
        self.suspicion.notify_one();
    }

    /// Wait until a call has waited for its reply for longer than the latency target.
    pub(super) async fn suspected(&self) {
        self.suspicion.notified().await;
    }

    /// Return the right to watch the server, or `None` if another task watches it.
    pub(super) fn try_watch(self: &Arc<Self>) -> Option<Watch> {
        let is_taken = self.is_watched.load(Ordering::Relaxed) || self.is_watched.swap(true, Ordering::Relaxed);
        (!is_taken).then(|| Watch(self.clone()))
    }

    /// Return a jitter of up to a tenth of a probe delay. Without jitter, gateways that lost the store at the same time
    /// would probe it at the same time.
    pub(super) fn probe_jitter(&self, delay: Duration) -> Duration {
        delay.mul_f64((self.age().as_micros() % 1000) as f64 / 10_000.0)
    }

    fn is_current(&self, epoch: u32) -> bool {
        self.epoch.load(Ordering::Relaxed) == epoch
    }

    fn age(&self) -> Duration {
        elapsed_since(self.created_at)
    }
}

// Conditions for opening the circuit breaker: consecutive failures, or a share of failed calls. A failure is a refused
// or lost connection, or an error reply that other calls get as well. A late reply is not a failure, because a busy
// server replies late.

/// Number of consecutive failures that open the circuit breaker.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;

/// Length of the window in which a [`FailureWindow`] counts calls. With fewer than [`MIN_CALLS`] calls in the window,
/// the share of failed calls does not open the circuit breaker.
const WINDOW: Duration = Duration::from_secs(1);
const MIN_CALLS: u64 = 20;

/// Statistics of recent failures. As long as no call has failed, recording a successful call takes two atomic loads.
#[derive(Debug, Default)]
pub(crate) struct FailureWindow {
    consecutive: AtomicU32,
    /// From the highest to the lowest bits: start of the window in ms after the creation of the circuit breaker (32
    /// bits), number of calls (16 bits) and number of failed calls (16 bits). 0: no window. The window begins with a
    /// failed call, because earlier successful calls could only reduce the share of failed calls.
    packed_window: AtomicU64,
}

impl FailureWindow {
    /// Record a successful call. `now` is called only after a recent failure.
    pub(crate) fn record_success(&self, now: impl Fn() -> Duration) {
        if self.consecutive.load(Ordering::Relaxed) != 0 {
            self.consecutive.store(0, Ordering::Relaxed);
        }
        if self.packed_window.load(Ordering::Relaxed) != 0 {
            self.record(now(), 0);
        }
    }

    /// Record a failed call. Return whether the breaker must open.
    pub(crate) fn record_failure(&self, now: Duration) -> bool {
        let consecutive = self.consecutive.fetch_add(1, Ordering::Relaxed) + 1;
        let (calls, failed) = self.record(now, 1);
        consecutive >= MAX_CONSECUTIVE_FAILURES || calls >= MIN_CALLS && 2 * failed >= calls
    }

    /// Forget all recorded failures.
    pub(crate) fn reset(&self) {
        self.consecutive.store(0, Ordering::Relaxed);
        self.packed_window.store(0, Ordering::Relaxed);
    }

    /// Record a call as failed (1) or successful (0). Return the number of calls and of failed calls in the window.
    fn record(&self, now: Duration, failed: u64) -> (u64, u64) {
        // A 32-bit number of ms wraps after 49 days, which does not matter because only differences are used.
        let now_ms = now.as_millis() as u32;
        let next_window = |window: u64| {
            let started_ms = (window >> 32) as u32;
            let calls = window >> 16 & 0xFFFF;
            let failed_before = window & 0xFFFF;
            let is_over = u128::from(now_ms.wrapping_sub(started_ms)) >= WINDOW.as_millis() || calls == 0xFFFF;
            match (is_over || window == 0, failed) {
                (true, 0) => 0,
                (true, _) => u64::from(now_ms) << 32 | 1 << 16 | 1,
                (false, _) => u64::from(started_ms) << 32 | (calls + 1) << 16 | (failed_before + failed),
            }
        };
        let before =
            self.packed_window.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |window| Some(next_window(window)));
        let window = next_window(before.unwrap_or_else(|window| window));
        (window >> 16 & 0xFFFF, window & 0xFFFF)
    }
}

// The log of an outage, which contains each reason once.

/// Maximum number of reasons that are logged for one outage. Later reasons are logged too, because the first reason may
/// not be the cause of the outage.
const MAX_REASONS: usize = 8;

/// The reasons of one outage that were logged.
#[derive(Debug)]
pub(crate) struct OutageLog {
    /// The address of the store if it is a node of a cluster.
    node: Option<Address>,
    logged: Vec<String>,
}

impl OutageLog {
    /// Create an empty log.
    pub(crate) fn new(node: Option<Address>) -> Self {
        OutageLog { node, logged: Vec::new() }
    }

    /// Log why a call failed, unless this reason was already logged.
    pub(crate) fn log_failure(&mut self, error: &StoreError) {
        let reason = error.to_string();
        if self.logged.len() == MAX_REASONS || self.logged.contains(&reason) {
            return;
        }
        let node = self.node.as_ref().map(display);
        let advice = error.error_reply().map(diagnose_reply);
        if self.logged.is_empty() {
            warn!(%error, advice, node, "the store is down: limits follow on_store_error until it answers again");
        } else {
            warn!(%error, advice, node, "the store is still down, with another error");
        }
        self.logged.push(reason);
    }

    /// Log the end of the outage.
    pub(crate) fn log_recovery(self) {
        info!(node = self.node.as_ref().map(display), "the store answers again");
    }
}

// Whether a store accepts writes. A record is logged when the store begins to reject writes, and when it accepts writes
// again.

/// Minimum time since the last rejected write after which a successful write shows that the store accepts writes again.
/// A store at its memory limit accepts some writes and rejects others.
const WRITE_RECOVERY_TIME: Duration = Duration::from_secs(1);

/// Time of the last rejected write, in µs since the Unix epoch. 0: writes are accepted.
#[derive(Debug, Default)]
pub(crate) struct WriteHealth(AtomicU64);

impl WriteHealth {
    /// Record the result of a call. `now_us` is called only if it is needed.
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
                        info!("the store accepts writes again");
                    }
                }
            }
            Err(error @ StoreError::WritesRejected(_)) => {
                if self.0.swap(now_us(), Ordering::Relaxed) == 0 {
                    warn!(%error, "the store rejects writes: checks that would write follow on_store_error until the store \
                                   accepts writes");
                }
            }
            Err(_) => {}
        }
    }
}

/// Return whether a call has certainly written to the store: its operation charges tokens, its charges were granted,
/// and at least one of them has a cost above 0 and is [`ChargeMode::Enforced`]. The store charges such a cost at once.
fn has_written(operation: Operation, charges: &[Charge<'_>], verdict: &Verdict) -> bool {
    matches!(operation, Operation::Check | Operation::TakeUpTo | Operation::Charge)
        && verdict.granted > 0
        && charges.iter().any(|charge| charge.mode == ChargeMode::Enforced && charge.cost > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_calls_from_before_the_recovery_do_not_open_the_breaker() {
        let breaker = CircuitBreaker::default();
        let before = breaker.epoch();
        for _ in 1..MAX_CONSECUTIVE_FAILURES {
            assert_eq!(breaker.record_failure(before), Assessment::Suspect);
        }
        assert_eq!(breaker.record_failure(before), Assessment::Failing);
        assert!(breaker.try_open(before) && !breaker.try_open(before), "only one caller opens the circuit breaker");
        assert_eq!(breaker.record_failure(before), Assessment::Outdated, "opening changes the epoch");
        breaker.close();
        for _ in 0..2 * MAX_CONSECUTIVE_FAILURES {
            assert_eq!(breaker.record_failure(before), Assessment::Outdated, "closing changes the epoch");
        }
        assert!(!breaker.try_open(before) && !breaker.is_open());
        assert_eq!(
            breaker.record_failure(breaker.epoch()),
            Assessment::Suspect,
            "the first failure since the circuit breaker closed"
        );
    }
}

#[cfg(test)]
mod failures_tests {
    use super::*;

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Record calls at intervals of `gap_ms` from `start_ms` on: `F` failed, others successful. Return the number of
    /// calls after which the circuit breaker opens.
    fn calls_until_open(outcomes: &str, start_ms: u64, gap_ms: u64) -> Option<usize> {
        let failures = FailureWindow::default();
        outcomes.bytes().enumerate().find_map(|(index, call)| {
            let now = millis(start_ms + index as u64 * gap_ms);
            let too_many = match call {
                b'F' => failures.record_failure(now),
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
        assert_eq!(calls_until_open("SSSFFFFSFFFFF", 0, 1), Some(13), "a success resets the consecutive failures");
        assert_eq!(calls_until_open("FFFFSFFFFSFFFFS", 0, 1), None, "fewer than twenty calls");
    }

    #[test]
    fn half_of_twenty_calls_within_a_second_open_the_breaker() {
        let half = "FS".repeat(100);
        assert_eq!(
            calls_until_open(&half, 0, 1),
            Some(21),
            "the twentieth call succeeds, so the next failure opens the circuit breaker"
        );
        assert_eq!(calls_until_open(&half, 0, 47), Some(21), "21 calls in 940 ms");
        assert_eq!(calls_until_open(&half, 0, 60), None, "fewer than twenty calls in a second");
        assert_eq!(calls_until_open(&"FSS".repeat(100), 0, 1), None, "a third of the calls failed");
        assert_eq!(calls_until_open(&"FFS".repeat(100), 0, 1), Some(20), "two thirds of the calls failed");
        assert_eq!(
            calls_until_open(&format!("{}{half}", "S".repeat(1000)), 0, 1),
            Some(1021),
            "successes before the first failure do not count"
        );
    }

    #[test]
    fn window_starts_with_a_failure() {
        // The calls are three windows with one failure each, and a window in which half of the calls fail.
        let quiet = format!("F{}", "S".repeat(1099));
        assert_eq!(calls_until_open(&format!("{}{}", quiet.repeat(3), "FS".repeat(20)), 0, 1), Some(3321));
        let failures = FailureWindow::default();
        assert!(!failures.record_failure(millis(5)));
        failures.record_success(|| millis(1005));
        assert_eq!(failures.packed_window.load(Ordering::Relaxed), 0, "the window has ended");
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
        assert!(trips.collect::<Vec<_>>().contains(&true), "half of the new calls fail");
        failures.reset();
        assert!(!failures.record_failure(millis(4)));
    }
}
