//! Keeps a failing store from costing requests more than a deadline: timeout, circuit breaker, bound of the calls in flight.

mod failures;
mod reasons;
mod writes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use redis::{Cmd, Value};
use tokio::time::{Duration, sleep, timeout};
use tracing::warn;

use super::clock::{Seldom, monotonic, unix_us};
use super::redis::server::Address;
use super::redis::slots::Slots;
use super::redis::{RedisStore, Sample};
use super::store::{Charge, Operation, Store, StoreError, Verdict};
use failures::Failures;
use reasons::Reasons;
use writes::Writes;

/// The first probe comes after this, each later one after twice as long, up to [`SLOWEST_PROBE`].
const FIRST_PROBE: Duration = Duration::from_millis(100);
const SLOWEST_PROBE: Duration = Duration::from_secs(1);

/// Calls of one worker that may be under way: ten times what a pipe with a round trip of 1 ms carries at 100,000 a second.
const MOST_IN_FLIGHT: usize = 1024;

/// That there are more is logged once in this time.
const FULL_SAID: Duration = Duration::from_secs(10);

/// Whether the store is asked at all; one for all workers, so that one of them probes.
#[derive(Debug)]
pub struct Breaker {
    /// Odd while it is open. Calls of an earlier era say nothing about this one.
    era: AtomicU32,
    failures: Failures,
    writes: Writes,
    full: Seldom,
    made: Instant,
}

/// A store behind a deadline and the breaker.
#[derive(Debug, Clone)]
pub struct Guard {
    store: Arc<RedisStore>,
    breaker: Arc<Breaker>,
    deadline: Duration,
    in_flight: Arc<AtomicUsize>,
    /// Where it is, if it is one of several, to which it may refer.
    node: Option<Address>,
}

/// One of the calls in flight.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(in_flight: &'a AtomicUsize) -> Option<Self> {
        let before = in_flight.fetch_add(1, Ordering::Relaxed);
        let place = Place(in_flight);
        (before < MOST_IN_FLIGHT).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Breaker {
    fn default() -> Self {
        let (era, failures, writes, full) = Default::default();
        Breaker { era, failures, writes, full, made: monotonic() }
    }
}

impl Breaker {
    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.era.load(Ordering::Acquire) % 2 == 1
    }

    /// How often it has opened.
    pub fn openings(&self) -> u64 {
        u64::from(self.era.load(Ordering::Relaxed).div_ceil(2))
    }

    fn age(&self) -> Duration {
        self.made.elapsed()
    }
}

impl Guard {
    /// Guards one worker's store.
    pub fn new(store: RedisStore, breaker: Arc<Breaker>) -> Self {
        let deadline = store.deadline();
        Guard { store: Arc::new(store), breaker, deadline, in_flight: Arc::default(), node: None }
    }

    /// The same for a node of a cluster, which does not fail when it refers to another one.
    pub fn of_node(store: RedisStore, breaker: Arc<Breaker>, address: Address) -> Self {
        Guard { node: Some(address), ..Guard::new(store, breaker) }
    }

    /// Bound of a call.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Connects, so that the first request finds a connection; a store that cannot be reached opens the breaker at once.
    pub fn warm_up(&self) {
        let guard = self.clone();
        let era = guard.breaker.era.load(Ordering::Acquire);
        tokio::spawn(async move {
            let connected = timeout(guard.deadline, guard.store.connect()).await;
            if let Err(error) = connected.unwrap_or(Err(StoreError::Timeout)) {
                guard.open(era, &error, None);
            }
        });
    }

    /// Whether this is its breaker.
    pub fn is_behind(&self, breaker: &Arc<Breaker>) -> bool {
        Arc::ptr_eq(&self.breaker, breaker)
    }

    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.breaker.era.load(Ordering::Acquire) % 2 == 1
    }

    /// Decides `within` this time; see [`RedisStore::ask`].
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn ask(
        &self,
        within: Duration,
        asking: bool,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        // On the heap: inside the request's future it would be moved with it, for every request.
        let call = Box::pin(self.store.ask(within, asking, operation, charges));
        let result = self.guarded(charges, call).await;
        self.breaker.writes.learn(operation, charges, &result, unix_us);
        result
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
        let slots = timeout(self.deadline, self.store.slots(address));
        self.guarded(&[], async { slots.await.unwrap_or(Err(StoreError::Timeout)) }).await
    }

    /// Makes a call that ends in time, unless calls fail at once.
    async fn guarded<T>(
        &self,
        charges: &[Charge<'_>],
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let era = self.breaker.era.load(Ordering::Acquire);
        if era % 2 == 1 {
            return Err(StoreError::Open);
        }
        let Some(_place) = Place::take(&self.in_flight) else {
            if self.breaker.full.unsaid_for(FULL_SAID) {
                warn!(most = MOST_IN_FLIGHT, "too many calls to the store are under way: more follow on_store_error");
            }
            return Err(StoreError::Full);
        };
        let result = call.await;
        if self.breaker.era.load(Ordering::Relaxed) == era {
            match &result {
                Err(error) if self.is_failure(error) => {
                    if self.breaker.failures.failed(self.breaker.age()) {
                        self.open(era, error, charges.first().map(Sample::of));
                    }
                }
                Ok(_) | Err(_) => self.breaker.failures.succeeded(|| self.breaker.age()),
            }
        }
        result
    }

    /// Whether an error says that the store cannot be used, rather than this call not be made.
    fn is_failure(&self, error: &StoreError) -> bool {
        match error {
            StoreError::Unreachable(_) | StoreError::Timeout | StoreError::Refused(_) | StoreError::Malformed => true,
            StoreError::Elsewhere(_) => self.node.is_none(),
            StoreError::Open | StoreError::Full | StoreError::Unwritable(_) | StoreError::Broken(_) => false,
        }
    }

    async fn probe(&self, like: Option<&Sample>) -> Result<(), StoreError> {
        let answer = timeout(self.deadline, self.store.probe(like)).await.unwrap_or(Err(StoreError::Timeout));
        answer.or_else(|error| if self.is_failure(&error) { Err(error) } else { Ok(()) })
    }

    /// Opens the breaker, if it has been closed since `era`, until a call `like` the one that failed is answered.
    fn open(&self, era: u32, error: &StoreError, like: Option<Sample>) {
        let opened = || self.breaker.era.compare_exchange(era, era + 1, Ordering::AcqRel, Ordering::Relaxed);
        if era % 2 == 1 || opened().is_err() {
            return;
        }
        let mut reasons = Reasons::new(self.node.clone());
        reasons.say(error);
        let Guard { store, breaker, deadline, in_flight, node } = self.clone();
        // A node that left its cluster is dropped, and never answers again.
        let store = Arc::downgrade(&store);
        tokio::spawn(async move {
            let mut pause = FIRST_PROBE;
            loop {
                // Up to a tenth more, so that gateways that lost the store together do not come back together.
                sleep(pause + pause.mul_f64((unix_us() % 1000) as f64 / 10_000.0)).await;
                let Some(store) = store.upgrade() else { return };
                let (breaker, in_flight, node) = (breaker.clone(), in_flight.clone(), node.clone());
                match (Guard { store, breaker, deadline, in_flight, node }).probe(like.as_ref()).await {
                    Ok(()) => break,
                    Err(error) => reasons.say(&error),
                }
                pause = (pause * 2).min(SLOWEST_PROBE);
            }
            breaker.failures.forget();
            breaker.era.fetch_add(1, Ordering::Release);
            reasons.over();
        });
    }
}

impl Store for Guard {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.ask(self.deadline, false, operation, charges).await
    }
}
