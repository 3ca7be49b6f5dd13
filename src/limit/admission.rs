//! What an admitted request holds and owes: leases until it ends, costs and refunds once its response is known.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::algorithm::{Outcome, Rule};
use super::backend::{Backend, Source};
use super::clock::monotonic;
use super::denials::Denials;
use super::key::{Identity, Key};
use super::plan::Plan;
use super::store::{Charge, Mode, Operation, StoreError, Verdict};

/// A release that may have come before what it releases, or did not reach the store, is repeated after this time.
const RELEASE_AGAIN: Duration = Duration::from_secs(1);

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
    pub async fn call(&self, source: Source, operation: Operation, pending: &[Pending]) -> Result<Verdict, StoreError> {
        let charge = |pending| Pending::charge(pending, source);
        self.backend.call(source, operation, &pending.iter().map(charge).collect::<Vec<_>>()).await
    }
}

impl Pending {
    fn rule(&self, source: Source) -> &Rule {
        match source {
            Source::Store => &self.plan.rule,
            Source::Local => &self.plan.share,
        }
    }

    fn charge(&self, source: Source) -> Charge<'_> {
        let key = Key { identity: self.identity, bucket: &self.plan.bucket };
        let rule = self.rule(source);
        let (cost, lease) = if let Rule::Concurrency(_) = rule { (1, self.units) } else { (self.units, 0) };
        Charge { key, rule, cost, mode: Mode::Binding, lease }
    }
}

/// The leases of a request. Dropping them releases them, also while it is not known whether they were granted.
#[derive(Debug)]
pub struct Leases {
    ledger: Arc<Ledger>,
    source: Source,
    held: Arc<[Pending]>,
    renewal: Option<AbortHandle>,
}

impl Leases {
    /// Leases that are about to be asked for.
    pub fn asked(ledger: Arc<Ledger>, source: Source, asked: Vec<Pending>) -> Self {
        Leases { ledger, source, held: asked.into(), renewal: None }
    }

    /// They were refused: there is nothing to release.
    pub fn refused(mut self) {
        self.held = Arc::new([]);
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

    /// They were granted: each is renewed when a third of it has passed.
    pub fn granted(mut self) -> Self {
        let Some(shortest) = self.lengths().min() else { return self };
        let (ledger, source, held) = (self.ledger.clone(), self.source, self.held.clone());
        self.renewal = self.ledger.spawn(async move {
            loop {
                sleep(shortest / 3).await;
                if let Err(error) = ledger.call(source, Operation::Renew, &held).await {
                    debug!(%error, "a lease was not renewed");
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
        let (ledger, source, held) = (self.ledger.clone(), self.source, self.held.clone());
        // A call that nobody waited for may run after its release, on another connection or in a store that hung.
        let (mut certain, longest) = (self.renewal.is_some(), self.longest());
        self.ledger.spawn(async move {
            let began = monotonic();
            while began.elapsed() < longest {
                match ledger.call(source, Operation::Refund { charged_at: 0 }, &held).await {
                    Ok(_) if certain => return,
                    Ok(_) => certain = true,
                    Err(error) => debug!(%error, "a lease is not released yet"),
                }
                sleep(RELEASE_AGAIN).await;
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
    source: Source,
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
    pub fn new(ledger: Arc<Ledger>, source: Source, owed: Vec<Owed>) -> Self {
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
                    Err(error) => failure = Some(error),
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
        let (ledger, source) = (self.ledger.clone(), self.source);
        self.ledger.spawn(async move {
            if let Err(error) = ledger.call(source, Operation::Charge, &owed).await {
                debug!(%error, "the cost of an abandoned request was not charged");
            }
        });
    }
}
