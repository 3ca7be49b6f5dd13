//! What an admitted request holds and owes: leases until it ends, costs and refunds once its response is known.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::algorithm::{Outcome, Rule};
use super::backend::{Backend, DecidedBy};
use super::clock::{monotonic, since};
use super::denials::Denials;
use super::key::{Identity, Key};
use super::plan::Plan;
use super::store::{Charge, Mode, Operation, StoreError, Verdict};

/// How often a release or a refund that did not reach the store is repeated while the store is asked; also when a release that may have
/// come before what it releases is made again.
const REPEAT: Duration = Duration::from_secs(1);

const RELEASE: Operation = Operation::Refund { charged_at: 0 };

/// The same for what was not sent because too many checks were queued.
const REPEAT_OVERLOADED: Duration = Duration::from_millis(50);

/// A charge or refund that cannot be sent because of overload is given up after this time.
const LONGEST_DELIVERY: Duration = Duration::from_secs(30);

/// What remains to be done for a limit when the response is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Later {
    /// Nothing.
    Nothing,
    /// The cost is charged.
    Pay,
    /// The cost may be given back.
    Refund,
}

/// What the response makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// It stays as it is.
    Nothing,
    /// So many units are charged, whatever is left.
    Pay(u64),
    /// The charge is given back.
    Refund,
}

/// A charge that outlives the decision.
#[derive(Debug, Clone)]
pub struct Pending {
    /// Which limit of the route.
    pub place: usize,
    /// Its size.
    pub plan: Arc<Plan>,
    /// Whose units.
    pub identity: Identity,
    /// How many; for a lease its id.
    pub units: u64,
    /// Units of this state that the gateway may have prefetched at a time.
    pub advance: u64,
    /// Where they may be refunded: see [`Charge::debt_before_us`].
    pub debt_before_us: u64,
}

/// What the requests of one worker leave behind: calls that nobody waits for.
#[derive(Debug)]
pub struct Ledger {
    /// Where the counters live.
    pub backend: Backend,
    /// What was denied lately; none where asking costs nothing.
    pub denials: Option<Arc<Denials>>,
    /// Releases and late charges that are under way.
    pub tasks: TaskTracker,
}

impl Ledger {
    /// Starts something that nobody waits for.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        // Outside of a runtime the process is ending: leases end by themselves.
        let handle = Handle::try_current().ok()?;
        Some(self.tasks.spawn_on(task, &handle).abort_handle())
    }

    /// Asks for charges that outlive their request.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call(&self, source: DecidedBy, operation: Operation, pending: &[Pending]) -> Result<Verdict, StoreError> {
        self.call_since(source, monotonic(), operation, pending).await
    }

    /// The same for requests that have waited since then.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn call_since(
        &self,
        source: DecidedBy,
        since: Instant,
        operation: Operation,
        pending: &[Pending],
    ) -> Result<Verdict, StoreError> {
        let charge = |pending| Pending::charge(pending, source);
        self.backend.call(source, since, operation, &pending.iter().map(charge).collect::<Vec<_>>()).await
    }

    /// The same for charges that no request waits for: repeated while too many checks are queued.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn deliver(
        &self,
        source: DecidedBy,
        operation: Operation,
        pending: Vec<Pending>,
    ) -> Result<Verdict, StoreError> {
        let began = monotonic();
        loop {
            match self.call(source, operation, &pending).await {
                Err(StoreError::Overloaded) if since(began) < LONGEST_DELIVERY => sleep(REPEAT_OVERLOADED).await,
                result => return result,
            }
        }
    }

    /// Counts permits in this process' share as well, where there is a store that may fail: in an outage the share is to count all
    /// requests that run here.
    fn count_here(&self, operation: Operation, permits: &[Pending]) {
        if let Backend::Redis { fallback, .. } = &self.backend {
            let charge = |permit| Pending::charge(permit, DecidedBy::Local);
            fallback.decide(operation, &permits.iter().map(charge).collect::<Vec<_>>());
        }
    }
}

impl Pending {
    /// Names the state.
    pub fn key(&self) -> Key<'_> {
        Key { identity: self.identity, bucket: &self.plan.bucket }
    }

    fn rule(&self, source: DecidedBy) -> &Rule {
        match source {
            DecidedBy::Store => &self.plan.rule,
            DecidedBy::Local => &self.plan.share,
        }
    }

    fn charge(&self, source: DecidedBy) -> Charge<'_> {
        let (key, rule) = (self.key(), self.rule(source));
        let (cost, lease) = if let Rule::Concurrency(_) = rule { (1, self.units) } else { (self.units, 0) };
        Charge { key, rule, cost, mode: Mode::Binding, lease, debt_before_us: self.debt_before_us }
    }
}

/// The permits of a request. Dropping them releases them, also while it is not known whether they were granted.
///
/// The store counts them for all gateways. A renewal registers a permit again that the store has lost, or that was granted by the
/// share of an outage. This process counts them as well: its share in an outage has to know of all requests that run here.
#[derive(Debug)]
pub struct Leases {
    ledger: Arc<Ledger>,
    source: DecidedBy,
    held: Arc<[Pending]>,
    renewal: Option<AbortHandle>,
    known: Arc<Known>,
    /// Whether this process counts them.
    here: bool,
}

/// What the store may know of the permits of a request.
#[derive(Debug, Default)]
struct Known {
    /// Whether it may count them.
    counted: AtomicBool,
    /// Whether a call that counts them may still run: its release has to be made again, later.
    unsettled: AtomicBool,
}

impl Leases {
    /// Permits that are about to be asked for.
    pub fn asked(ledger: Arc<Ledger>, source: DecidedBy, asked: Vec<Pending>) -> Self {
        let asks = source == DecidedBy::Store;
        let known = Known { counted: AtomicBool::new(asks), unsettled: AtomicBool::new(asks) };
        Leases {
            ledger,
            source,
            held: asked.into(),
            renewal: None,
            known: Arc::new(known),
            here: source == DecidedBy::Local,
        }
    }

    /// This process counts them already.
    pub fn counted_here(mut self) -> Self {
        self.here = true;
        self
    }

    /// They were refused: the store has nothing to release.
    pub fn refused(mut self) {
        self.release_here();
        self.held = Arc::new([]);
    }

    fn release_here(&mut self) {
        if mem::take(&mut self.here) {
            self.ledger.count_here(RELEASE, &self.held);
        }
    }

    /// How long each of them lasts.
    fn lengths(&self) -> impl Iterator<Item = Duration> {
        self.held.iter().filter_map(|held| match held.rule(self.source) {
            Rule::Concurrency(rule) => Some(Duration::from_micros(rule.lease)),
            _ => None,
        })
    }

    fn longest(&self) -> Duration {
        self.lengths().max().unwrap_or_default()
    }

    /// Those of the limits at these places were granted; a shadow limit may have had none left. Each is renewed when a third of it
    /// has passed, and when the store answers again after an outage.
    pub fn granted(mut self, places: impl Fn(usize) -> bool) -> Self {
        if !self.held.iter().all(|held| places(held.place)) {
            self.held = self.held.iter().filter(|held| places(held.place)).cloned().collect();
        }
        let Some(shortest) = self.lengths().min() else { return self };
        if self.source == DecidedBy::Store {
            self.known.unsettled.store(false, Ordering::Relaxed);
            if !mem::replace(&mut self.here, true) {
                self.ledger.count_here(Operation::Charge, &self.held);
            }
        }
        let (ledger, held, known) = (self.ledger.clone(), self.held.clone(), self.known.clone());
        self.renewal = self.ledger.spawn(async move {
            let mut pause = shortest / 3;
            loop {
                ledger.backend.recovery_within(pause).await;
                ledger.count_here(Operation::Renew, &held);
                known.unsettled.store(true, Ordering::Relaxed);
                let renewed = ledger.call(DecidedBy::Store, Operation::Renew, &held).await;
                pause = shortest / 3;
                match renewed {
                    Ok(_) => {
                        known.counted.store(true, Ordering::Relaxed);
                        known.unsettled.store(false, Ordering::Relaxed);
                    }
                    Err(error) => {
                        if error.nothing_ran() {
                            known.unsettled.store(false, Ordering::Relaxed);
                        } else {
                            known.counted.store(true, Ordering::Relaxed);
                        }
                        if error.is_overload() {
                            pause = pause.min(REPEAT);
                        }
                        debug!(%error, "a concurrency permit was not renewed");
                    }
                }
            }
        });
        self
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
        if self.held.is_empty() {
            return;
        }
        self.release_here();
        let unsettled = self.known.unsettled.load(Ordering::Relaxed);
        if !unsettled && !self.known.counted.load(Ordering::Relaxed) {
            return;
        }
        let (ledger, held) = (self.ledger.clone(), self.held.clone());
        // A call that nobody waited for may run after its release, on another connection or in a store that hung.
        let (mut certain, longest) = (!unsettled, self.longest());
        self.ledger.spawn(async move {
            // One life after the store answers again the permits have ended by themselves.
            let mut answering = monotonic();
            while since(answering) < longest {
                match ledger.call(DecidedBy::Store, RELEASE, &held).await {
                    Ok(_) if certain => return,
                    Ok(_) => certain = true,
                    Err(error) => {
                        debug!(%error, "a concurrency permit is not released yet");
                        if error.is_outage() && !ledger.tasks.is_closed() {
                            answering = monotonic();
                        }
                    }
                }
                ledger.backend.recovery_within(REPEAT).await;
            }
        });
    }
}

/// Settles debts: the standing of the limits that were charged or refunded, by their places on the route.
pub type Settling = Pin<Box<dyn Future<Output = Result<Vec<(usize, Outcome)>, StoreError>> + Send>>;

/// What a request owes until its response is known.
#[derive(Debug)]
pub struct Debts {
    ledger: Arc<Ledger>,
    source: DecidedBy,
    owed: Vec<Owed>,
}

/// What it owes to one limit.
#[derive(Debug)]
pub struct Owed {
    /// What remains to be done.
    pub later: Later,
    /// When the limit was asked, µs by the clock of whoever keeps it.
    pub charged_at: u64,
    /// The charge.
    pub pending: Pending,
}

impl Debts {
    /// Of a request that was admitted.
    pub fn new(ledger: Arc<Ledger>, source: DecidedBy, owed: Vec<Owed>) -> Self {
        Debts { ledger, source, owed }
    }

    /// Charges and gives back what the response says for each limit, by its place on the route; none if there is nothing
    /// to do. When the store does not answer, a charge may be lost; it is never made twice.
    pub fn settle(mut self, due: impl Fn(usize, Later) -> Due) -> Option<Settling> {
        // One call for all that is paid, one for all that was charged at the same instant: mostly one.
        let mut calls: Vec<(Operation, Vec<Pending>)> = Vec::new();
        for Owed { later, charged_at, pending } in mem::take(&mut self.owed) {
            let (operation, pending) = match due(pending.place, later) {
                Due::Nothing => continue,
                Due::Pay(units) => (Operation::Charge, Pending { units, ..pending }),
                Due::Refund => (Operation::Refund { charged_at }, pending),
            };
            match calls.iter_mut().find(|(of_call, _)| *of_call == operation) {
                Some((_, all)) => all.push(pending),
                None => calls.push((operation, vec![pending])),
            }
        }
        if calls.is_empty() {
            return None;
        }
        let (ledger, source) = (self.ledger.clone(), self.source);
        // A task of its own: a client that leaves now does not escape the charge.
        let task = self.ledger.tasks.spawn(async move {
            let (mut standings, mut failure) = (Vec::new(), None);
            for (operation, pending) in calls {
                match ledger.call(source, operation, &pending).await {
                    Ok(verdict) => {
                        standings.extend(pending.iter().map(|pending| pending.place).zip(verdict.outcomes));
                    }
                    Err(error) => {
                        if let StoreError::Overloaded = error {
                            // The response does not wait for it.
                            ledger.spawn(deliver(ledger.clone(), source, operation, pending));
                        }
                        failure = Some(error);
                    }
                }
            }
            failure.map_or(Ok(standings), Err)
        });
        Some(Box::pin(async { task.await.unwrap_or_else(|_| Ok(Vec::new())) }))
    }
}

impl Drop for Debts {
    fn drop(&mut self) {
        // The client left before the response was known; what was asked for may have been done.
        let owed = mem::take(&mut self.owed).into_iter();
        let owed: Vec<_> = owed.filter(|owed| owed.later == Later::Pay).map(|owed| owed.pending).collect();
        if owed.is_empty() {
            return;
        }
        self.ledger.spawn(deliver(self.ledger.clone(), self.source, Operation::Charge, owed));
    }
}

async fn deliver(ledger: Arc<Ledger>, source: DecidedBy, operation: Operation, pending: Vec<Pending>) {
    if let Err(error) = ledger.deliver(source, operation, pending).await {
        debug!(%error, ?operation, "what a response made of a cost was not counted");
    }
}
