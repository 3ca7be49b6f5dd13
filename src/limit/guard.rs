//! Keeps a failing store from costing requests more than a deadline: timeout and circuit breaker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::time::{Duration, sleep, timeout};
use tracing::{info, warn};

use super::clock::unix_us;
use super::redis::RedisStore;
use super::redis::connection::UNANSWERED;
use super::redis::server::Address;
use super::redis::slots::Slots;
use super::store::{Charge, Operation, Store, StoreError, Verdict};

/// Failures in a row that open the breaker: as many as end a connection, so that the probe starts on a fresh one.
const FAILURES: u32 = UNANSWERED;

/// The first probe comes after this, each later one after twice as long, up to [`SLOWEST_PROBE`].
const FIRST_PROBE: Duration = Duration::from_millis(100);
const SLOWEST_PROBE: Duration = Duration::from_secs(1);

/// Whether the store is asked at all; one for all workers, so that one of them probes.
#[derive(Debug, Default)]
pub struct Breaker {
    open: AtomicBool,
    failures: AtomicU32,
}

/// A store behind a deadline and the breaker.
#[derive(Debug, Clone)]
pub struct Guard {
    store: Arc<RedisStore>,
    breaker: Arc<Breaker>,
    deadline: Duration,
}

impl Guard {
    /// Guards one worker's store.
    pub fn new(store: RedisStore, breaker: Arc<Breaker>, deadline: Duration) -> Self {
        Guard { store: Arc::new(store), breaker, deadline }
    }

    /// Bound of a call.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Connects, so that the first request finds a connection; a store that cannot be reached opens the breaker at once.
    pub fn warm_up(&self) {
        let guard = self.clone();
        tokio::spawn(async move {
            if let Err(error) = ask_for_life(&guard.store, guard.deadline).await {
                guard.open(&error);
            }
        });
    }

    fn open(&self, error: &StoreError) {
        if self.breaker.open.swap(true, Ordering::AcqRel) {
            return;
        }
        warn!(%error, "the store fails: limits follow on_store_error until it answers again");
        let Guard { store, breaker, deadline } = self.clone();
        tokio::spawn(async move {
            let mut pause = FIRST_PROBE;
            loop {
                // Up to a tenth more, so that gateways that lost the store together do not come back together.
                sleep(pause + pause.mul_f64((unix_us() % 1000) as f64 / 10_000.0)).await;
                match ask_for_life(&store, deadline).await {
                    Ok(()) => break,
                    Err(_) => pause = (pause * 2).min(SLOWEST_PROBE),
                }
            }
            breaker.failures.store(0, Ordering::Relaxed);
            breaker.open.store(false, Ordering::Release);
            info!("the store answers again");
        });
    }
}

async fn ask_for_life(store: &RedisStore, deadline: Duration) -> Result<(), StoreError> {
    timeout(deadline, store.ping()).await.unwrap_or(Err(StoreError::Timeout))
}

impl Store for Guard {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        self.ask(self.deadline, false, operation, charges).await
    }
}

impl Guard {
    /// Whether calls fail at once.
    pub fn is_open(&self) -> bool {
        self.breaker.open.load(Ordering::Acquire)
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
        self.guarded(within, Box::pin(self.store.ask(asking, operation, charges))).await
    }

    /// Which node of the cluster keeps which slot, as this one at `address` knows it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn slots(&self, address: &Address) -> Result<Slots, StoreError> {
        self.guarded(self.deadline, self.store.slots(address)).await
    }

    async fn guarded<T>(
        &self,
        within: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        if self.is_open() {
            return Err(StoreError::Open);
        }
        let result = timeout(within, call).await.unwrap_or(Err(StoreError::Timeout));
        match &result {
            Err(error @ (StoreError::Unreachable(_) | StoreError::Timeout)) => {
                if self.breaker.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES {
                    self.open(error);
                }
            }
            // It answered: an error for one key says nothing about the others.
            Ok(_) | Err(_) => {
                if self.breaker.failures.load(Ordering::Relaxed) != 0 {
                    self.breaker.failures.store(0, Ordering::Relaxed);
                }
            }
        }
        result
    }
}
