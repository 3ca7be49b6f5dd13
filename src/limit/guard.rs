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

use super::clock::{monotonic, since, unix_us};
use super::redis::server::Address;
use super::redis::slots::Slots;
use super::redis::{Judge, RedisStore, Sample};
use super::store::{Charge, Operation, Store, StoreError, Verdict};
use failures::Failures;
use reasons::Reasons;
use writes::Writes;

/// The first probe comes after this, each later one after twice as long, up to [`SLOWEST_PROBE`].
const FIRST_PROBE: Duration = Duration::from_millis(100);
const SLOWEST_PROBE: Duration = Duration::from_secs(1);

/// A store that was silent is probed again after this, until it is known whether it works.
const SUSPECTED_PROBE: Duration = Duration::from_millis(10);

/// How often it is looked whether the server has closed an idle connection.
const IDLE_LOOK: Duration = Duration::from_millis(250);

/// A store that answers again after an outage: told to those that have something to put right.
#[derive(Debug)]
pub struct Recovery {
    notify: Notify,
    made: Instant,
    /// When it was last, µs since this was made; 0 = never.
    last_us: AtomicU64,
}

impl Default for Recovery {
    fn default() -> Self {
        Recovery { notify: Notify::new(), made: monotonic(), last_us: AtomicU64::new(0) }
    }
}

impl Recovery {
    /// Returns when the store answers again.
    pub async fn next(&self) {
        self.notify.notified().await;
    }

    /// Whether it was within this time.
    pub fn is_within(&self, time: Duration) -> bool {
        let last = self.last_us.load(Ordering::Relaxed);
        last != 0 && since(self.made) < Duration::from_micros(last) + time
    }

    fn tell(&self) {
        self.last_us.store(since(self.made).as_micros().max(1) as u64, Ordering::Relaxed);
        self.notify.notify_waiters();
    }
}

/// Whether the store is asked at all; one for all workers, so that one of them probes.
#[derive(Debug)]
pub struct Breaker {
    /// Odd while it is open. Calls of an earlier era say nothing about this one.
    era: AtomicU32,
    failures: Failures,
    /// Whether a call found the store silent, and probes find out whether it is.
    suspected: AtomicBool,
    writes: Writes,
    recovery: Arc<Recovery>,
    made: Instant,
}

/// A store behind the breaker.
#[derive(Debug, Clone)]
pub struct Guard {
    store: Arc<RedisStore>,
    watch: Arc<Watch>,
}

/// What one worker knows of a store to judge it.
#[derive(Debug)]
struct Watch {
    /// A node that left its cluster is dropped, and never answers again.
    store: Weak<RedisStore>,
    breaker: Arc<Breaker>,
    timeout: Duration,
    /// Where it is, if it is one of several, to which it may refer.
    node: Option<Address>,
}

impl Default for Breaker {
    fn default() -> Self {
        Breaker::new(Arc::default())
    }
}

impl Breaker {
    /// A closed breaker; `recovery` is told each time that it closes again.
    pub fn new(recovery: Arc<Recovery>) -> Self {
        let (era, failures, suspected, writes) = Default::default();
        Breaker { era, failures, suspected, writes, recovery, made: monotonic() }
    }

    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.era().is_none()
    }

    /// How often it has opened.
    pub fn openings(&self) -> u64 {
        u64::from(self.era.load(Ordering::Relaxed).div_ceil(2))
    }

    /// Told each time that the breaker closes again.
    pub fn recovery(&self) -> &Arc<Recovery> {
        &self.recovery
    }

    fn era(&self) -> Option<u32> {
        Some(self.era.load(Ordering::Acquire)).filter(|era| era % 2 == 0)
    }

    fn age(&self) -> Duration {
        since(self.made)
    }
}

impl Guard {
    /// Guards one worker's store.
    pub fn new(store: RedisStore, breaker: Arc<Breaker>) -> Self {
        Guard::watched(store, breaker, None)
    }

    /// The same for a node of a cluster, which does not fail when it refers to another one.
    pub fn of_node(store: RedisStore, breaker: Arc<Breaker>, address: Address) -> Self {
        Guard::watched(store, breaker, Some(address))
    }

    fn watched(store: RedisStore, breaker: Arc<Breaker>, node: Option<Address>) -> Self {
        let store = Arc::new(store);
        let watch = Arc::new(Watch { store: Arc::downgrade(&store), breaker, timeout: store.timeout(), node });
        store.judged_by(watch.clone());
        Guard { store, watch }
    }

    /// Maximum time from when a request asks to its verdict.
    pub fn timeout(&self) -> Duration {
        self.watch.timeout
    }

    /// Told each time that the store answers again after an outage.
    pub fn recovery(&self) -> &Arc<Recovery> {
        self.watch.breaker.recovery()
    }

    /// Connects, so that the first request finds a connection, and keeps it so; a store that cannot be reached opens the breaker
    /// at once.
    pub async fn connect(&self) {
        let era = self.watch.breaker.era.load(Ordering::Acquire);
        if let Err(error) = self.store.connect().await {
            self.watch.open(era, &error, None);
        }
        let watch = self.watch.clone();
        tokio::spawn(async move {
            loop {
                sleep(IDLE_LOOK).await;
                let Some(store) = watch.store.upgrade() else { return };
                if !watch.breaker.is_open() {
                    store.renew_connections().await;
                }
            }
        });
    }

    /// Whether this is its breaker.
    pub fn is_behind(&self, breaker: &Arc<Breaker>) -> bool {
        Arc::ptr_eq(&self.watch.breaker, breaker)
    }

    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.watch.breaker.is_open()
    }

    /// Decides by `due`; see [`RedisStore::ask`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn ask(
        &self,
        due: Instant,
        asking: bool,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let Some(era) = self.watch.breaker.era() else { return Err(StoreError::Open) };
        // On the heap: inside the request's future it would be moved with it, for every request.
        let result = Box::pin(self.store.ask(due, asking, operation, charges)).await;
        self.watch.breaker.writes.learn(operation, charges, &result, unix_us);
        result.map_err(|error| {
            if self.watch.is_of_the_reply(&error) {
                self.watch.failed(era, &error, charges.first().map(Sample::of));
            }
            match error {
                StoreError::Late if self.is_open() => StoreError::Timeout,
                StoreError::Overloaded if self.is_open() => StoreError::Open,
                error => error,
            }
        })
    }

    /// Sends a command for an operator. What fails of these says nothing about requests, but while the breaker is open
    /// nothing is sent.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn aside(&self, within: Duration, asking: bool, command: &Cmd) -> Result<Value, StoreError> {
        if self.is_open() {
            return Err(StoreError::Open);
        }
        timeout(within, self.store.command(asking, command)).await.unwrap_or(Err(StoreError::Timeout))
    }

    /// Which node of the cluster keeps which slot, as this one at `address` knows it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn slots(&self, address: &Address) -> Result<Slots, StoreError> {
        let Some(era) = self.watch.breaker.era() else { return Err(StoreError::Open) };
        let slots = async {
            // Connecting takes longer than a call and has a limit of its own.
            self.store.connect().await?;
            timeout(self.watch.timeout, self.store.slots(address)).await.unwrap_or(Err(StoreError::Timeout))
        };
        let slots = slots.await;
        match &slots {
            Err(error) if self.watch.is_failure(error) => self.watch.failed(era, error, None),
            Ok(_) | Err(_) => self.watch.answered(era),
        }
        slots
    }
}

impl Watch {
    /// Whether an error says that the store cannot be used, rather than this call not be made.
    fn is_failure(&self, error: &StoreError) -> bool {
        self.is_of_the_reply(error) || matches!(error, StoreError::Unreachable(_) | StoreError::Timeout)
    }

    /// Whether the store replied, and its reply says that it cannot be used. Of calls without a reply the batcher tells.
    fn is_of_the_reply(&self, error: &StoreError) -> bool {
        match error {
            StoreError::Refused(_) | StoreError::Malformed => true,
            StoreError::Elsewhere(_) => self.node.is_none(),
            StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::Late
            | StoreError::Open
            | StoreError::Overloaded
            | StoreError::Full
            | StoreError::Unwritable(_)
            | StoreError::Broken(_) => false,
        }
    }

    async fn probe(&self, store: &RedisStore, like: Option<&Sample>) -> Result<(), StoreError> {
        // Connecting takes longer than a call and has a limit of its own.
        store.connect().await?;
        let answer = timeout(self.timeout, store.probe(like)).await.unwrap_or(Err(StoreError::Timeout));
        answer.or_else(|error| if self.is_failure(&error) { Err(error) } else { Ok(()) })
    }

    /// Probes a store that was silent until it answers or the breaker opens: where requests are rare, an outage must not cost each of
    /// the first ones its timeout.
    fn suspect(&self, era: u32, like: Option<Sample>) {
        if self.breaker.suspected.swap(true, Ordering::Relaxed) {
            return;
        }
        let watch = self.again();
        tokio::spawn(async move {
            while watch.breaker.era() == Some(era)
                && let Some(store) = watch.store.upgrade()
            {
                match watch.probe(&store, like.as_ref()).await {
                    Ok(()) => {
                        watch.answered(era);
                        break;
                    }
                    Err(error) if watch.breaker.failures.failed(watch.breaker.age()) => {
                        watch.open(era, &error, like.clone());
                    }
                    Err(_) => sleep(SUSPECTED_PROBE).await,
                }
            }
            watch.breaker.suspected.store(false, Ordering::Relaxed);
        });
    }

    fn again(&self) -> Self {
        let Watch { store, breaker, timeout, node } = self;
        Watch { store: store.clone(), breaker: breaker.clone(), timeout: *timeout, node: node.clone() }
    }

    /// Opens the breaker, if it has been closed since `era`, until a call `like` the one that failed is answered.
    fn open(&self, era: u32, error: &StoreError, like: Option<Sample>) {
        let opened = || self.breaker.era.compare_exchange(era, era + 1, Ordering::AcqRel, Ordering::Relaxed);
        if era % 2 == 1 || opened().is_err() {
            return;
        }
        let mut reasons = Reasons::new(self.node.clone());
        reasons.say(error);
        let watch = self.again();
        tokio::spawn(async move {
            let mut pause = FIRST_PROBE;
            loop {
                // Up to a tenth more, so that gateways that lost the store together do not come back together.
                let jitter = (watch.breaker.age().as_micros() % 1000) as f64 / 10_000.0;
                sleep(pause + pause.mul_f64(jitter)).await;
                let Some(store) = watch.store.upgrade() else { return };
                match watch.probe(&store, like.as_ref()).await {
                    Ok(()) => break,
                    Err(error) => reasons.say(&error),
                }
                pause = (pause * 2).min(SLOWEST_PROBE);
            }
            watch.breaker.failures.forget();
            watch.breaker.era.fetch_add(1, Ordering::Release);
            watch.breaker.recovery.tell();
            reasons.over();
        });
    }
}

impl Judge for Watch {
    fn era(&self) -> Option<u32> {
        self.breaker.era()
    }

    fn answered(&self, era: u32) {
        if self.breaker.era.load(Ordering::Relaxed) == era {
            self.breaker.failures.succeeded(|| self.breaker.age());
        }
    }

    fn late(&self, era: u32) {
        if self.breaker.era.load(Ordering::Relaxed) == era && self.breaker.failures.late(self.breaker.age()) {
            self.open(era, &StoreError::Timeout, None);
        }
    }

    fn failed(&self, era: u32, error: &StoreError, like: Option<Sample>) {
        if self.breaker.era.load(Ordering::Relaxed) != era {
            return;
        }
        if self.breaker.failures.failed(self.breaker.age()) {
            self.open(era, error, like);
        } else if let StoreError::Timeout = error {
            self.suspect(era, like);
        }
    }
}

impl Store for Guard {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.ask(monotonic() + self.timeout(), false, operation, charges).await
    }
}
