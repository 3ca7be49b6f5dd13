//! What is asked of the limiter, and what it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::admission::{Debts, Later, Leases, Pending};
use super::algorithm::{Outcome, Rule, Status};
use super::backend::DecidedBy;
use super::clock::since;
use super::key::{Identity, Key};
use super::plan::{Limit, Plan};
use super::quota::Quota;
use super::store::{Charge, Mode, Verdict};

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
    pub source: DecidedBy,
    /// Whether it is an earlier denial that still holds.
    pub remembered: bool,
    /// Whether it was not checked for overload: all of its limits are shadow limits.
    pub overloaded: bool,
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
    /// Where it is admitted and a limit may refund: for each check that was decided, its place and [`Charge::debt_before_us`].
    pub debts_before_us: Box<[(usize, u64)]>,
}

impl<'a> Check<'a, '_> {
    /// Names the state.
    pub fn key(&self) -> Key<'_> {
        Key { identity: self.identity, bucket: &self.plan.bucket }
    }

    /// Units that must be there for the request to pass.
    pub fn needs(&self) -> u64 {
        if self.later == Later::Pay { 1 } else { self.cost }
    }

    /// Whether it is about requests in flight.
    pub fn takes_lease(&self) -> bool {
        matches!(self.plan.rule, Rule::Concurrency(_))
    }

    /// Whether further units for the same state may be taken together with this one: a single unit, charged at once.
    pub fn is_plain(&self) -> bool {
        self.cost == 1 && self.later != Later::Pay && !self.limit.shadow && !self.takes_lease()
    }

    /// Whether a denial holds until its time is over: nothing is given back, and the limit denies at all.
    pub fn is_memorable(&self) -> bool {
        self.later != Later::Refund && !self.limit.shadow
    }

    /// The rule that decides.
    fn rule(&self, source: DecidedBy) -> &Rule {
        match source {
            DecidedBy::Store => &self.plan.rule,
            DecidedBy::Local => &self.plan.share,
        }
    }

    /// What it asks of whoever decides. The leases of a request count from `first_lease` on.
    pub fn charge(&self, source: DecidedBy, first_lease: u64) -> Charge<'_> {
        let rule = self.rule(source);
        let mode = match (self.limit.shadow, self.later) {
            (true, Later::Pay) => Mode::ShadowPostPaid,
            (true, Later::Nothing | Later::Refund) => Mode::Shadow,
            (false, Later::Pay) => Mode::PostPaid,
            (false, Later::Nothing | Later::Refund) => Mode::Binding,
        };
        let lease = self.lease(first_lease);
        Charge { key: self.key(), rule, cost: self.cost, mode, lease, debt_before_us: 0 }
    }

    /// The id of its lease.
    pub fn lease(&self, first_lease: u64) -> u64 {
        first_lease.wrapping_add(self.place as u64)
    }

    /// The part of it that outlives the decision.
    pub fn pending(&self, units: u64) -> Pending {
        let (advance, debt_before_us) = (self.limit.advance, 0);
        Pending { place: self.place, plan: self.plan.clone(), identity: self.identity, units, advance, debt_before_us }
    }

    fn judged(&self, outcome: Outcome) -> Judged<'a> {
        Judged { place: self.place, limit: self.limit, quota: self.plan.quota, outcome }
    }
}

impl Judged<'_> {
    /// Whether it is a reason for a denial.
    pub fn denies(&self) -> bool {
        self.outcome.status != Status::Ok
    }
}

impl<'a> Decision<'a> {
    /// What a verdict means for the checks that it is about.
    pub fn new<'b, 'p: 'b>(
        verdict: Verdict,
        source: DecidedBy,
        checks: impl Iterator<Item = &'b Check<'a, 'p>> + Clone,
    ) -> Decision<'a>
    where
        'a: 'b,
    {
        Decision::of_charged(verdict, source, checks, 0)
    }

    /// The same, of what was charged `elapsed_us` before the verdict.
    pub fn of_charged<'b, 'p: 'b>(
        verdict: Verdict,
        source: DecidedBy,
        checks: impl Iterator<Item = &'b Check<'a, 'p>> + Clone,
        elapsed_us: u64,
    ) -> Decision<'a>
    where
        'a: 'b,
    {
        let mut debts_before_us = Box::default();
        if verdict.granted > 0 && checks.clone().any(|check| check.later == Later::Refund) {
            let before = checks.clone().zip(&verdict.outcomes).map(|(check, outcome)| {
                let units = check.cost.saturating_add(verdict.charged_after);
                (check.place, check.rule(source).debt_before_us(outcome, elapsed_us, units))
            });
            debts_before_us = before.collect();
        }
        let Verdict { granted, now_us, outcomes, .. } = verdict;
        let (mut limits, mut shadow_denied) = (Vec::with_capacity(outcomes.len()), Vec::new());
        for (check, outcome) in checks.zip(outcomes) {
            match (check.limit.shadow, outcome.status) {
                (false, _) => limits.push(check.judged(outcome)),
                (true, Status::Ok) => {}
                (true, Status::Over | Status::Never | Status::Busy) => shadow_denied.push(check.limit),
            }
        }
        let admitted = granted > 0;
        let (remembered, overloaded, leases, debts) = Default::default();
        Decision {
            admitted,
            source,
            remembered,
            overloaded,
            now_us,
            limits,
            shadow_denied,
            leases,
            debts,
            debts_before_us,
        }
    }

    /// Of a request that no limit is asked about.
    pub fn unlimited() -> Self {
        Decision::new(Verdict::new(1, 0, Vec::new()), DecidedBy::Store, std::iter::empty())
    }

    /// Who decided, in a word for logs.
    pub fn decided_by(&self) -> &'static str {
        if self.remembered { "denial-cache" } else { self.source.word() }
    }

    /// The limits that deny the request.
    pub fn violated(&self) -> impl Iterator<Item = &Judged<'a>> {
        self.limits.iter().filter(|judged| judged.denies())
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
    pub fn pause(&self, arrived: Instant) -> Option<Duration> {
        let pause = Duration::from_micros(self.retry_us().filter(|_| !self.admitted)?);
        let patient = |judged: &Judged<'_>| judged.limit.wait.is_some_and(|wait| since(arrived) + pause <= wait.most);
        self.violated().all(patient).then_some(pause)
    }
}
