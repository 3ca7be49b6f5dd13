//! The circuit breaker of a store: while it is open, requests cost nothing and follow `on_store_error`.

mod failures;
mod reasons;
mod writes;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use redis::{Cmd, Value};
use tokio::sync::Notify;
use tokio::time::{Duration, sleep, timeout};

use super::clock::{elapsed_since, monotonic, unix_us};
use super::redis::server::Address;
use super::redis::slots::SlotMap;
use super::redis::{CallObserver, ProbeCall, ServerStore};
use super::store::{Charge, CounterStore, Operation, StoreError, Verdict};
use failures::FailureWindow;
use reasons::OutageLog;
use writes::WriteHealth;

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
