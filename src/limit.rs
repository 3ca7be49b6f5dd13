//! The limiter: decides whether a request may pass. Knows no HTTP.

pub mod admission;
pub mod advance;
pub mod algorithm;
pub mod backend;
pub mod calendar;
pub mod clock;
pub mod cluster;
pub mod coalesce;
pub mod decision;
pub mod denials;
pub mod guard;
pub mod key;
pub mod line;
pub mod memory;
pub mod operator;
pub mod outage;
pub mod overrides;
pub mod plan;
pub mod quota;
pub mod redis;
pub mod store;
pub mod tallies;

use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use admission::{Debts, Later, Leases, Ledger, Owed, Pending};
use advance::Advances;
use algorithm::{Outcome, Status};
use backend::{Backend, DecidedBy};
use clock::{monotonic, since, unix_us};
use coalesce::{Coalescer, Set};
use decision::{Check, Decision};
use denials::{Denials, Known};
use line::Lines;
use outage::{Unavailable, overloaded, without_store};
use overrides::Overrides;
use plan::{Limit, OnStoreError, Wait};
use store::{Operation, StoreError, Verdict};
use tallies::Answered;
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;

/// Decides requests; one for each worker.
#[derive(Debug)]
pub struct Limiter {
    ledger: Arc<Ledger>,
    coalescer: Option<Arc<Coalescer>>,
    lines: Arc<Lines>,
    /// The sizes that operators gave single identities.
    pub overrides: Arc<Overrides>,
    /// Of the next lease; the first one is chosen at random, so that gateways do not meet.
    next_lease: AtomicU64,
}

impl Limiter {
    /// A limiter over a store. `denials`, `advances`, `lines` and `overrides` are those of the whole process; leases count from
    /// `first_lease` on, which no two limiters of one store may have in common.
    pub fn new(
        backend: Backend,
        denials: Option<Arc<Denials>>,
        advances: Arc<Advances>,
        lines: Arc<Lines>,
        overrides: Arc<Overrides>,
        first_lease: u64,
    ) -> Self {
        let coalescer = match &backend {
            Backend::Memory(_) => None,
            Backend::Redis { store, .. } => Some(Arc::new(Coalescer::new(store.timeout(), advances))),
        };
        let ledger = Arc::new(Ledger { backend, denials, tasks: TaskTracker::new() });
        Limiter { ledger, coalescer, lines, overrides, next_lease: AtomicU64::new(first_lease) }
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

    /// Gives back what was taken ahead, and waits until that, releases and late charges are made.
    pub async fn settle(&self) {
        if let Some(coalescer) = &self.coalescer {
            coalescer.end();
        }
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
        let key = first.key().local();
        if !self.lines.is_waited_for(key) {
            let decision = self.decide(checks).await?;
            if decision.pause(arrived).is_none() {
                return Ok(decision);
            }
        }
        // More than can be let in within the time would wait in vain.
        let most = first.plan.most_within(wait.most) / first.cost.max(1);
        let places = wait.places.min(usize::try_from(most).unwrap_or(usize::MAX).max(1));
        // Whoever finds no place, or has none any more, must not take what those before are waiting for.
        let Some(place) = self.lines.join(key, places) else { return Ok(turned_away(checks, first, wait)) };
        let turn = timeout(wait.most.saturating_sub(since(arrived)), pin!(place.turn())).await;
        let Ok(_turn) = turn else { return Ok(turned_away(checks, first, wait)) };
        loop {
            let decision = self.decide(checks).await?;
            match decision.pause(arrived) {
                Some(pause) => sleep(pause).await,
                None => return Ok(decision),
            }
        }
    }

    async fn decide<'a>(&self, checks: &[Check<'a, '_>]) -> Result<Decision<'a>, Unavailable> {
        if checks.is_empty() {
            return Ok(Decision::unlimited());
        }
        let together = self.coalescer.as_ref().and_then(|coalescer| Some((coalescer, set(checks)?)));
        let drawn = || self.drawn(checks, together?);
        // Before what is remembered: the store may have denied what this process has taken.
        if let Some(decision) = drawn().or_else(|| self.remembered(checks)) {
            return Ok(decision);
        }
        let (mut leases, mut first_lease) = (None, 0);
        if checks.iter().any(|check| check.takes_lease()) {
            first_lease = self.first_lease(checks);
            leases = Some(self.leases(checks, DecidedBy::Store, first_lease));
        }
        if let Some(asked) = leases.take_if(|_| self.ledger.backend.has_recovered_within(SETTLING)) {
            match self.take_share(checks, first_lease) {
                Some(denial) => {
                    asked.refused();
                    return Ok(denial);
                }
                None => leases = Some(asked.counted_here()),
            }
        }
        let charges: Vec<_> = checks.iter().map(|check| check.charge(DecidedBy::Store, first_lease)).collect();
        let asked = monotonic();
        let answer = match together {
            Some((coalescer, set)) if self.ledger.backend.is_one_call(&charges) => {
                let all = || checks.iter().map(|check| check.pending(check.cost)).collect();
                // On the heap: denied requests do not come here.
                Box::pin(coalescer.check(&self.ledger, set, &charges, asked, all)).await
            }
            _ => {
                self.ledger.backend.count(Answered::Alone);
                self.ledger.backend.call(DecidedBy::Store, asked, Operation::Check, &charges).await
            }
        };
        if let Some(full) = answer.as_ref().ok().map(|verdict| verdict.full).filter(|full| *full > 0) {
            if let Some(leases) = leases {
                leases.refused();
            }
            return self.without_room(checks, full, first_lease);
        }
        let granted = answer.as_ref().is_ok_and(|verdict| verdict.granted > 0);
        // Meanwhile another worker may have taken ahead what the store no longer has.
        if !granted && let Some(decision) = drawn() {
            return Ok(decision);
        }
        let mut instants = Vec::new();
        let mut decision = match answer {
            Ok(mut verdict) => {
                self.remember(checks, &verdict, asked);
                instants = mem::take(&mut verdict.instants);
                Decision::new(verdict, DecidedBy::Store, checks.iter())
            }
            Err(error) => {
                let Backend::Redis { fallback, .. } = &self.ledger.backend else { return Err(Unavailable(error)) };
                if let Some(leases) = leases.take().filter(|_| error.nothing_ran()) {
                    // After any other error it is not known what was granted: it is released.
                    leases.refused();
                }
                if error.is_overload() {
                    return overloaded(checks, error);
                }
                // Another one: the release of what the store may have granted must not release these permits, once they are registered.
                let first_lease = self.first_lease(checks);
                let decision = without_store(fallback, checks, error, first_lease)?;
                if checks.iter().any(Check::takes_lease) {
                    leases = Some(self.leases(checks, DecidedBy::Local, first_lease));
                }
                decision
            }
        };
        match (leases, decision.admitted) {
            (Some(leases), true) => {
                let denied = |limit: &Limit| decision.shadow_denied.iter().any(|denied| std::ptr::eq(*denied, limit));
                let granted = |place| checks.iter().any(|check| check.place == place && !denied(check.limit));
                decision.leases = Some(Box::new(leases.granted(granted)));
            }
            (Some(leases), false) => leases.refused(),
            (None, _) => {}
        }
        self.owe(checks, &mut decision, None, &instants);
        Ok(decision)
    }

    /// Decides by the limits that have room in the memory store; the others follow `on_store_error`, since they cannot count.
    fn without_room<'a>(
        &self,
        checks: &[Check<'a, '_>],
        full: u64,
        first_lease: u64,
    ) -> Result<Decision<'a>, Unavailable> {
        let Backend::Memory(memory) = &self.ledger.backend else { return Err(Unavailable(StoreError::Full)) };
        let (verdict, counted) = outage::without_room(memory, checks.iter(), full, DecidedBy::Store, first_lease)?;
        let mut decision = Decision::new(verdict, DecidedBy::Store, counted.into_iter());
        if decision.admitted && checks.iter().any(Check::takes_lease) {
            let leases = self.leases(checks, DecidedBy::Store, first_lease);
            decision.leases = Some(Box::new(leases.granted(|_| true)));
        }
        self.owe(checks, &mut decision, None, &[]);
        Ok(decision)
    }

    /// Takes the permits of a request out of this gateway's shares of its concurrency limits, or denies it.
    fn take_share<'a>(&self, checks: &[Check<'a, '_>], first_lease: u64) -> Option<Decision<'a>> {
        let Backend::Redis { fallback, .. } = &self.ledger.backend else { return None };
        let limits = || checks.iter().filter(|check| check.takes_lease());
        let charges: Vec<_> = limits().map(|check| check.charge(DecidedBy::Local, first_lease)).collect();
        let verdict = fallback.decide(Operation::Check, &charges);
        // Without room for the permits the store alone decides.
        (verdict.granted == 0 && verdict.full == 0).then(|| Decision::new(verdict, DecidedBy::Local, limits()))
    }

    /// The decision by units that were taken ahead.
    fn drawn<'a>(&self, checks: &[Check<'a, '_>], (coalescer, set): (&Arc<Coalescer>, Set)) -> Option<Decision<'a>> {
        let (verdict, charged_at) = coalescer.draw(set)?;
        self.ledger.backend.count(Answered::Ahead);
        let elapsed_us = verdict.now_us - charged_at;
        let mut decision = Decision::of_charged(verdict, DecidedBy::Store, checks.iter(), elapsed_us);
        self.owe(checks, &mut decision, Some(charged_at), &[]);
        Some(decision)
    }

    /// The denial of a request that an earlier denial covers.
    fn remembered<'a>(&self, checks: &[Check<'a, '_>]) -> Option<Decision<'a>> {
        let denials = self.ledger.denials.as_ref()?;
        let known = |check: &Check<'_, '_>| {
            let known = denials.find(check.key().local(), check.plan.id, check.needs());
            known.filter(|_| check.is_memorable())
        };
        let now_us = checks.iter().find_map(known)?.now_us;
        let outcomes = checks.iter().map(|check| known(check).map_or(UNTOUCHED, |known| known.outcome)).collect();
        let verdict = Verdict::new(0, now_us, outcomes);
        self.ledger.backend.count(Answered::Remembered);
        Some(Decision { remembered: true, ..Decision::new(verdict, DecidedBy::Store, checks.iter()) })
    }

    fn remember(&self, checks: &[Check<'_, '_>], verdict: &Verdict, asked: Instant) {
        let certain = verdict.granted == 0 && verdict.instants.is_empty();
        let Some(denials) = self.ledger.denials.as_ref().filter(|_| certain) else { return };
        for (check, outcome) in checks.iter().zip(&verdict.outcomes).filter(|(check, _)| check.is_memorable()) {
            let known = Known { now_us: verdict.now_us, outcome: *outcome };
            denials.note(check.key().local(), check.plan.id, check.needs(), known, asked);
        }
    }

    /// A number for each permit that a request may hold.
    fn first_lease(&self, checks: &[Check<'_, '_>]) -> u64 {
        let places = checks.last().map_or(0, |last| last.place as u64 + 1);
        self.next_lease.fetch_add(places, Ordering::Relaxed)
    }

    fn leases(&self, checks: &[Check<'_, '_>], source: DecidedBy, first_lease: u64) -> Leases {
        let asked = checks.iter().filter(|check| check.takes_lease());
        let asked = asked.map(|check| check.pending(check.lease(first_lease))).collect();
        Leases::asked(self.ledger.clone(), source, asked)
    }

    /// Notes what an admitted request owes; `charged_at` is when its units were charged, if that was before the decision, and
    /// `instants` where several servers did.
    fn owe(&self, checks: &[Check<'_, '_>], decision: &mut Decision<'_>, charged_at: Option<u64>, instants: &[u64]) {
        if decision.admitted && checks.iter().any(|check| check.later != Later::Nothing) {
            let charged_at = charged_at.unwrap_or(decision.now_us);
            decision.debts = Some(Box::new(self.debts(checks, decision, charged_at, instants)));
        }
    }

    fn debts(&self, checks: &[Check<'_, '_>], decision: &Decision<'_>, charged_at: u64, instants: &[u64]) -> Debts {
        let denied =
            |check: &Check<'_, '_>| decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit));
        let local = |check: &Check<'_, '_>| check.limit.on_store_error == OnStoreError::Local;
        let counted = |check: &Check<'_, '_>| {
            check.later != Later::Nothing && !denied(check) && (decision.source == DecidedBy::Store || local(check))
        };
        let debt_before_us = |check: &Check<'_, '_>| {
            let mut known = decision.debts_before_us.iter();
            known.find(|(place, _)| *place == check.place).map_or(0, |(_, us)| *us)
        };
        let owed = checks.iter().enumerate().filter(|(_, check)| counted(check)).map(|(index, check)| Owed {
            later: check.later,
            charged_at: instants.get(index).copied().unwrap_or(charged_at),
            pending: Pending { debt_before_us: debt_before_us(check), ..check.pending(check.cost) },
        });
        Debts::new(self.ledger.clone(), decision.source, owed.collect())
    }
}

/// So long after an outage the store may not know of all concurrency permits that other gateways hold: they register them when they find
/// that it answers again, a probe (1.1 s) and a timeout later at most. Until then this gateway's share counts as well.
const SETTLING: Duration = Duration::from_secs(2);

/// Of a limit that has no part in a denial.
const UNTOUCHED: Outcome = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };

/// The denial of a request that finds no place in the line for `first`: after `wait` those who stand there are gone.
fn turned_away<'a>(checks: &[Check<'a, '_>], first: &Check<'a, '_>, wait: Wait) -> Decision<'a> {
    let us = wait.most.as_micros() as u64;
    let full = Outcome { status: Status::Over, remaining: 0, reset_us: us, retry_us: us };
    let outcome = |check: &Check<'_, '_>| if check.place == first.place { full } else { UNTOUCHED };
    let verdict = Verdict::new(0, unix_us(), checks.iter().map(outcome).collect());
    // Not by a local share: the store is well.
    Decision::new(verdict, DecidedBy::Store, checks.iter())
}

/// The states of a request, if further ones for the same may be taken together with it; all of its limits, or none, are taken
/// ahead.
fn set(checks: &[Check<'_, '_>]) -> Option<Set> {
    let name = |check: &Check<'_, '_>| check.key().local() ^ u128::from(check.plan.id) << 64;
    let id = || checks.iter().fold(0, |set: u128, check| set.rotate_left(1) ^ name(check));
    let advance = || checks.iter().map(|check| check.limit.advance).min().unwrap_or(0);
    checks.iter().all(Check::is_plain).then(|| Set { id: id(), advance: advance() })
}
