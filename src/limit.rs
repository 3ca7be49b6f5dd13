//! The limiter: decides whether a request may pass. Knows no HTTP.

pub mod admission;
pub mod algorithm;
pub mod backend;
pub mod calendar;
pub mod clock;
pub mod coalesce;
pub mod denials;
pub mod guard;
pub mod key;
pub mod line;
pub mod memory;
pub mod plan;
pub mod quota;
pub mod redis;
pub mod store;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use admission::{Debts, Later, Leases, Ledger, Pending};
use algorithm::{Outcome, Rule, Status};
use backend::{Backend, Source};
use clock::monotonic;
use coalesce::Coalescer;
use denials::Denials;
use key::{Identity, Key};
use line::Lines;
use memory::MemoryStore;
use plan::{Limit, OnStoreError, Plan, Wait};
use quota::Quota;
use store::{Charge, Mode, Operation, StoreError, Verdict};
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use tracing::warn;

/// One limit asked about one identity.
#[derive(Debug)]
pub struct Check<'a, 'p> {
    /// Which of the route's limits.
    pub place: usize,
    /// The limit.
    pub limit: &'a Limit,
    /// The size that it has for this request.
    pub plan: &'p Arc<Plan>,
    /// Whose units.
    pub identity: Identity,
    /// How many.
    pub cost: u64,
    /// What remains to be done when the response is known.
    pub later: Later,
}

/// What one limit says to a request.
#[derive(Debug)]
pub struct Judged<'a> {
    /// Which of the route's limits.
    pub place: usize,
    /// The limit.
    pub limit: &'a Limit,
    /// The size that it had for the request.
    pub quota: Quota,
    /// Its answer.
    pub outcome: Outcome,
}

/// What becomes of a request.
#[derive(Debug)]
pub struct Decision<'a> {
    /// Whether it may pass.
    pub admitted: bool,
    /// Who decided.
    pub source: Source,
    /// Whether it is an earlier denial that still holds.
    pub remembered: bool,
    /// The instant of the decision, µs since the Unix epoch.
    pub now_us: u64,
    /// Each limit that had a say, with its answer.
    pub limits: Vec<Judged<'a>>,
    /// The shadow limits that would have denied the request.
    pub shadow_denied: Vec<&'a Limit>,
    /// What the request holds until it is over.
    pub leases: Option<Box<Leases>>,
    /// What it owes until its response is known.
    pub debts: Option<Box<Debts>>,
}

/// The store could not answer and a limit of the request says `deny`.
#[derive(Debug, thiserror::Error)]
#[error("the limits cannot be checked: {0}")]
pub struct Unavailable(#[source] pub StoreError);

/// Decides requests; one for each worker.
#[derive(Debug)]
pub struct Limiter {
    ledger: Arc<Ledger>,
    coalescer: Option<Arc<Coalescer>>,
    lines: Arc<Lines>,
    /// Of the next lease; the first one is chosen at random, so that gateways do not meet.
    next_lease: AtomicU64,
}

impl Limiter {
    /// A limiter over a store. `denials` and `lines` are those of the whole process; leases count from `first_lease` on, which no two
    /// limiters of one store may have in common.
    pub fn new(backend: Backend, denials: Option<Arc<Denials>>, lines: Arc<Lines>, first_lease: u64) -> Self {
        let coalescer = match &backend {
            Backend::Memory(_) => None,
            Backend::Redis { store, .. } => Some(Arc::new(Coalescer::new(store.deadline()))),
        };
        let ledger = Arc::new(Ledger { backend, denials, tasks: TaskTracker::new() });
        Limiter { ledger, coalescer, lines, next_lease: AtomicU64::new(first_lease) }
    }

    /// Decides all checks of a request at one instant: all are charged or none. Where the limits that deny it let it wait,
    /// it comes back when it has been its turn.
    ///
    /// # Errors
    /// The store cannot answer, and a limit of the request is to deny then.
    pub async fn check<'a>(&self, checks: &[Check<'a, '_>]) -> Result<Decision<'a>, Unavailable> {
        match checks.iter().find_map(|check| Some((check, check.limit.wait?))) {
            // On the heap: few requests need the room.
            Some((first, wait)) => Box::pin(self.check_in_line(checks, first, wait)).await,
            None => self.decide(checks).await,
        }
    }

    /// Waits until releases and late charges are made.
    pub async fn settle(&self) {
        self.ledger.tasks.close();
        self.ledger.tasks.wait().await;
    }

    async fn check_in_line<'a>(
        &self,
        checks: &[Check<'a, '_>],
        first: &Check<'a, '_>,
        wait: Wait,
    ) -> Result<Decision<'a>, Unavailable> {
        let arrived = monotonic();
        let key = key(first).local();
        if !self.lines.is_waited_for(key) {
            let decision = self.decide(checks).await?;
            if decision.pause(arrived).is_none() {
                return Ok(decision);
            }
        }
        // More than can be let in within the time would wait in vain.
        let places = wait.places.min(usize::try_from(first.plan.most_within(wait.most)).unwrap_or(usize::MAX));
        let Some(place) = self.lines.join(key, places) else { return self.decide(checks).await };
        let turn = timeout(wait.most.saturating_sub(arrived.elapsed()), pin!(place.turn())).await;
        loop {
            let decision = self.decide(checks).await?;
            match decision.pause(arrived).filter(|_| turn.is_ok()) {
                Some(pause) => sleep(pause).await,
                None => return Ok(decision),
            }
        }
    }

    async fn decide<'a>(&self, checks: &[Check<'a, '_>]) -> Result<Decision<'a>, Unavailable> {
        if checks.is_empty() {
            let verdict = Verdict { granted: 1, now_us: 0, outcomes: Vec::new() };
            return Ok(decision(verdict, Source::Store, checks.iter()));
        }
        if let Some(decision) = self.remembered(checks) {
            return Ok(decision);
        }
        let count = checks.iter().filter(|check| takes_lease(check)).count() as u64;
        let mut leases = None;
        let mut first_lease = 0;
        if count > 0 {
            first_lease = self.next_lease.fetch_add(count, Ordering::Relaxed);
            leases = Some(self.leases(checks, Source::Store, first_lease));
        }
        let charges = charges(checks.iter(), Source::Store, first_lease);
        let asked = monotonic();
        let answer = match (&self.coalescer, set(checks)) {
            (Some(coalescer), Some(set)) => {
                let all = || checks.iter().map(|check| pending(check, check.cost)).collect();
                coalescer.check(&self.ledger, set, &charges, all).await
            }
            _ => self.ledger.backend.call(Source::Store, Operation::Check, &charges).await,
        };
        let mut decision = match answer {
            Ok(verdict) => {
                self.remember(checks, &verdict, asked);
                decision(verdict, Source::Store, checks.iter())
            }
            Err(error) => {
                let Backend::Redis { fallback, .. } = &self.ledger.backend else { return Err(Unavailable(error)) };
                let decision = without_store(fallback, checks, error, first_lease)?;
                // Those that were asked of the store are released there: whether they were granted is not known.
                if count > 0 {
                    leases = Some(self.leases(checks, Source::Local, first_lease));
                }
                decision
            }
        };
        match (leases, decision.admitted) {
            (Some(leases), true) => decision.leases = Some(Box::new(leases.granted())),
            (Some(leases), false) => leases.refused(),
            (None, _) => {}
        }
        if decision.admitted && checks.iter().any(|check| check.later != Later::Nothing) {
            decision.debts = Some(Box::new(self.debts(checks, &decision)));
        }
        Ok(decision)
    }

    /// The denial of a request that an earlier denial covers.
    fn remembered<'a>(&self, checks: &[Check<'a, '_>]) -> Option<Decision<'a>> {
        let denials = self.ledger.denials.as_ref()?;
        let mut now_us = None;
        let untouched = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
        let outcomes = checks.iter().map(|check| {
            let known = denials.find(key(check).local(), check.plan.id, check.needs()).filter(|_| !check.limit.shadow);
            now_us = now_us.max(known.map(|known| known.now_us));
            known.map_or(untouched, |known| known.outcome)
        });
        let outcomes: Vec<_> = outcomes.collect();
        let verdict = Verdict { granted: 0, now_us: now_us?, outcomes };
        Some(Decision { remembered: true, ..decision(verdict, Source::Store, checks.iter()) })
    }

    fn remember(&self, checks: &[Check<'_, '_>], verdict: &Verdict, asked: Instant) {
        let Some(denials) = self.ledger.denials.as_ref().filter(|_| verdict.granted == 0) else { return };
        for (check, outcome) in checks.iter().zip(&verdict.outcomes).filter(|(check, _)| !check.limit.shadow) {
            denials.note(key(check).local(), check.plan.id, check.needs(), *outcome, verdict.now_us, asked);
        }
    }

    fn leases(&self, checks: &[Check<'_, '_>], source: Source, first_lease: u64) -> Leases {
        let leases = checks.iter().filter(|check| takes_lease(check)).zip(first_lease..);
        let asked = leases.map(|(check, id)| pending(check, id)).collect();
        Leases::asked(self.ledger.clone(), source, asked)
    }

    fn debts(&self, checks: &[Check<'_, '_>], decision: &Decision<'_>) -> Debts {
        let denied =
            |check: &Check<'_, '_>| decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit));
        let local = |check: &Check<'_, '_>| check.limit.on_store_error == OnStoreError::Local;
        let counted = |check: &&Check<'_, '_>| {
            check.later != Later::Nothing && !denied(check) && (decision.source == Source::Store || local(check))
        };
        let owed = checks.iter().filter(counted).map(|check| (check.later, pending(check, check.cost))).collect();
        Debts::new(self.ledger.clone(), decision.source, decision.now_us, owed)
    }
}

/// Names the states of a request, if further ones for the same may be taken together with it: single units that are
/// charged at once.
fn set(checks: &[Check<'_, '_>]) -> Option<u128> {
    let single = |check: &Check<'_, '_>| {
        check.cost == 1 && check.later != Later::Pay && !check.limit.shadow && !takes_lease(check)
    };
    let name = |check: &Check<'_, '_>| key(check).local() ^ u128::from(check.plan.id) << 64;
    checks.iter().all(single).then(|| checks.iter().fold(0, |set: u128, check| set.rotate_left(1) ^ name(check)))
}

fn key<'b>(check: &'b Check<'_, '_>) -> Key<'b> {
    Key { identity: check.identity, bucket: &check.plan.bucket }
}

fn takes_lease(check: &Check<'_, '_>) -> bool {
    matches!(check.plan.rule, Rule::Concurrency(_))
}

fn pending(check: &Check<'_, '_>, units: u64) -> Pending {
    Pending { place: check.place, plan: check.plan.clone(), identity: check.identity, units }
}

fn charges<'b, 'a: 'b, 'p: 'b>(
    checks: impl Iterator<Item = &'b Check<'a, 'p>>,
    source: Source,
    first_lease: u64,
) -> Vec<Charge<'b>> {
    let mut lease = first_lease;
    let charge = |check: &'b Check<'a, 'p>| {
        let rule = match source {
            Source::Store => &check.plan.rule,
            Source::Local => &check.plan.share,
        };
        let charge = charge(check, rule, lease);
        lease = lease.wrapping_add(u64::from(takes_lease(check)));
        charge
    };
    checks.map(charge).collect()
}

fn charge<'b>(check: &'b Check<'_, '_>, rule: &'b Rule, lease: u64) -> Charge<'b> {
    let mode = match (check.limit.shadow, check.later) {
        (true, Later::Pay) => Mode::ShadowPostPaid,
        (true, Later::Nothing | Later::Refund) => Mode::Shadow,
        (false, Later::Pay) => Mode::PostPaid,
        (false, Later::Nothing | Later::Refund) => Mode::Binding,
    };
    Charge { key: key(check), rule, cost: check.cost, mode, lease }
}

fn decision<'a: 'b, 'p: 'b, 'b>(
    verdict: Verdict,
    source: Source,
    checks: impl Iterator<Item = &'b Check<'a, 'p>>,
) -> Decision<'a> {
    let Verdict { granted, now_us, outcomes } = verdict;
    let (mut limits, mut shadow_denied) = (Vec::with_capacity(outcomes.len()), Vec::new());
    for (check, outcome) in checks.zip(outcomes) {
        let &Check { place, limit, plan, .. } = check;
        match (limit.shadow, outcome.status) {
            (false, _) => limits.push(Judged { place, limit, quota: plan.quota, outcome }),
            (true, Status::Ok) => {}
            (true, Status::Over | Status::Never | Status::Busy) => shadow_denied.push(limit),
        }
    }
    Decision {
        admitted: granted > 0,
        source,
        remembered: false,
        now_us,
        limits,
        shadow_denied,
        leases: None,
        debts: None,
    }
}

/// One limit that says deny decides for all; otherwise those that say local decide by their shares.
fn without_store<'a>(
    fallback: &MemoryStore,
    checks: &[Check<'a, '_>],
    error: StoreError,
    first_lease: u64,
) -> Result<Decision<'a>, Unavailable> {
    if let StoreError::Refused(_) | StoreError::Malformed = &error {
        // The breaker does not speak of these: they concern one key, or a right that is missing.
        let limits: Vec<_> = checks.iter().map(|check| &*check.limit.name).collect();
        warn!(%error, ?limits, "the store refused a check");
    }
    if checks.iter().any(|check| check.limit.on_store_error == OnStoreError::Deny && !check.limit.shadow) {
        return Err(Unavailable(error));
    }
    let local = |check: &&Check<'a, '_>| check.limit.on_store_error == OnStoreError::Local;
    let charges = charges(checks.iter().filter(local), Source::Local, first_lease);
    let verdict = fallback.decide(Operation::Check, &charges);
    Ok(decision(verdict, Source::Local, checks.iter().filter(local)))
}

impl Check<'_, '_> {
    /// Units that must be there for the request to pass.
    fn needs(&self) -> u64 {
        if self.later == Later::Pay { 1 } else { self.cost }
    }
}

impl<'a> Decision<'a> {
    /// Who decided, in a word for logs.
    pub fn decided_by(&self) -> &'static str {
        if self.remembered { "denial-cache" } else { self.source.word() }
    }

    /// The limits that deny the request.
    pub fn violated(&self) -> impl Iterator<Item = &Judged<'a>> {
        self.limits.iter().filter(|judged| judged.outcome.status != Status::Ok)
    }

    /// µs until the same request would pass; none if it never will. What is busy may come free at any time.
    pub fn retry_us(&self) -> Option<u64> {
        let wait = |judged: &Judged<'_>| match judged.outcome.status {
            Status::Ok | Status::Busy => Some(0),
            Status::Over => Some(judged.outcome.retry_us),
            Status::Never => None,
        };
        self.violated().map(wait).try_fold(0, |longest, retry| Some(longest.max(retry?)))
    }

    /// How long a denied request that came at `arrived` is to wait before it asks again, if its limits let it wait so long.
    fn pause(&self, arrived: Instant) -> Option<Duration> {
        let pause = Duration::from_micros(self.retry_us().filter(|_| !self.admitted)?);
        let patient =
            |judged: &Judged<'_>| judged.limit.wait.is_some_and(|wait| arrived.elapsed() + pause <= wait.most);
        self.violated().all(patient).then_some(pause)
    }
}
