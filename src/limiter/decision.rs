//! What is asked of the limiter, and what it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::clock::elapsed_since;
use crate::limiter::key::{Identity, Key};
use crate::limiter::quota::Quota;
use crate::limiter::settlement::{ConcurrencyPermits, Deferred, DeferredCharges, OwnedCharge};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Charge, ChargeMode, Verdict};

/// One limit asked about one identity.
#[derive(Debug)]
pub struct LimitCheck<'a, 'p> {
    /// Which of the route's limits.
    pub limit_index: usize,
    /// The limit.
    pub limit: &'a LimitSpec,
    /// The size that it has for this request.
    pub variant: &'p Arc<LimitVariant>,
    /// Whose units.
    pub identity: Identity,
    /// How many.
    pub cost: u64,
    /// What remains to be done when the response is known.
    pub deferred: Deferred,
}

/// What one limit says to a request.
#[derive(Debug)]
pub struct LimitResult<'a> {
    /// Which of the route's limits.
    pub limit_index: usize,
    /// The limit.
    pub limit: &'a LimitSpec,
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
    pub decided_by: DecidedBy,
    /// Whether it is an earlier denial that still holds.
    pub is_from_cache: bool,
    /// Whether it was not checked for overload: all of its limits are shadow limits.
    pub is_overloaded: bool,
    /// The instant of the decision, µs since the Unix epoch.
    pub now_us: u64,
    /// Each limit that had a say, with its answer.
    pub results: Vec<LimitResult<'a>>,
    /// The shadow limits that would have denied the request.
    pub shadow_denied: Vec<&'a LimitSpec>,
    /// What the request holds until it is over.
    pub permits: Option<Box<ConcurrencyPermits>>,
    /// What it owes until its response is known.
    pub deferred_charges: Option<Box<DeferredCharges>>,
    /// Where it is admitted and a limit may refund: for each check that was decided, its place and [`Charge::debt_before_us`].
    pub debts_before_us: Box<[(usize, u64)]>,
}

impl<'a> LimitCheck<'a, '_> {
    /// Names the state.
    pub fn key(&self) -> Key<'_> {
        Key { identity: self.identity, state_name: &self.variant.state_name }
    }

    /// Units that must be there for the request to pass.
    pub fn required(&self) -> u64 {
        if self.deferred == Deferred::Charge { 1 } else { self.cost }
    }

    /// Whether it is about requests in flight.
    pub fn is_concurrency(&self) -> bool {
        matches!(self.variant.rule, Rule::Concurrency(_))
    }

    /// Whether further units for the same state may be taken together with this one: a single unit, charged at once.
    pub fn is_batchable(&self) -> bool {
        self.cost == 1 && self.deferred != Deferred::Charge && !self.limit.shadow && !self.is_concurrency()
    }

    /// Whether a denial holds until its time is over: nothing is given back, and the limit denies at all.
    pub fn is_cacheable(&self) -> bool {
        self.deferred != Deferred::Refund && !self.limit.shadow
    }

    /// The rule that decides.
    fn rule(&self, decided_by: DecidedBy) -> &Rule {
        match decided_by {
            DecidedBy::Store => &self.variant.rule,
            DecidedBy::Local => &self.variant.local_rule,
        }
    }

    /// What it asks of whoever decides. The leases of a request count from `first_lease` on.
    pub fn charge(&self, decided_by: DecidedBy, first_permit_id: u64) -> Charge<'_> {
        let rule = self.rule(decided_by);
        let mode = match (self.limit.shadow, self.deferred) {
            (true, Deferred::Charge) => ChargeMode::ShadowDeferred,
            (true, Deferred::Nothing | Deferred::Refund) => ChargeMode::Shadow,
            (false, Deferred::Charge) => ChargeMode::Deferred,
            (false, Deferred::Nothing | Deferred::Refund) => ChargeMode::Enforced,
        };
        let permit_id = self.permit_id(first_permit_id);
        Charge { key: self.key(), rule, cost: self.cost, mode, permit_id, debt_before_us: 0 }
    }

    /// The id of its lease.
    pub fn permit_id(&self, first_permit_id: u64) -> u64 {
        first_permit_id.wrapping_add(self.limit_index as u64)
    }

    /// The part of it that outlives the decision.
    pub fn owned_charge(&self, cost_or_permit_id: u64) -> OwnedCharge {
        let (prefetch, debt_before_us) = (self.limit.prefetch, 0);
        OwnedCharge {
            limit_index: self.limit_index,
            variant: self.variant.clone(),
            identity: self.identity,
            cost_or_permit_id,
            prefetch,
            debt_before_us,
        }
    }

    fn to_result(&self, outcome: Outcome) -> LimitResult<'a> {
        LimitResult { limit_index: self.limit_index, limit: self.limit, quota: self.variant.quota, outcome }
    }
}

impl LimitResult<'_> {
    /// Whether it is a reason for a denial.
    pub fn denies(&self) -> bool {
        self.outcome.status != Status::Ok
    }
}

impl<'a> Decision<'a> {
    /// What a verdict means for the checks that it is about.
    pub fn new<'b, 'p: 'b>(
        verdict: Verdict,
        decided_by: DecidedBy,
        checks: impl Iterator<Item = &'b LimitCheck<'a, 'p>> + Clone,
    ) -> Decision<'a>
    where
        'a: 'b,
    {
        Decision::from_earlier_charge(verdict, decided_by, checks, 0)
    }

    /// The same, of what was charged `elapsed_us` before the verdict.
    pub fn from_earlier_charge<'b, 'p: 'b>(
        verdict: Verdict,
        decided_by: DecidedBy,
        checks: impl Iterator<Item = &'b LimitCheck<'a, 'p>> + Clone,
        elapsed_us: u64,
    ) -> Decision<'a>
    where
        'a: 'b,
    {
        let mut debts_before_us = Box::default();
        if verdict.granted > 0 && checks.clone().any(|check| check.deferred == Deferred::Refund) {
            let entries = checks.clone().zip(&verdict.outcomes).map(|(check, outcome)| {
                let cost = check.cost.saturating_add(verdict.charged_later);
                (check.limit_index, check.rule(decided_by).debt_before_us(outcome, elapsed_us, cost))
            });
            debts_before_us = entries.collect();
        }
        let Verdict { granted, now_us, outcomes, .. } = verdict;
        let (mut results, mut shadow_denied) = (Vec::with_capacity(outcomes.len()), Vec::new());
        for (check, outcome) in checks.zip(outcomes) {
            match (check.limit.shadow, outcome.status) {
                (false, _) => results.push(check.to_result(outcome)),
                (true, Status::Ok) => {}
                (true, Status::Exceeded | Status::CostTooLarge | Status::Saturated) => shadow_denied.push(check.limit),
            }
        }
        let admitted = granted > 0;
        let (is_from_cache, is_overloaded, permits, deferred_charges) = Default::default();
        Decision {
            admitted,
            decided_by,
            is_from_cache,
            is_overloaded,
            now_us,
            results,
            shadow_denied,
            permits,
            deferred_charges,
            debts_before_us,
        }
    }

    /// Of a request that no limit is asked about.
    pub fn unlimited() -> Self {
        Decision::new(Verdict::new(1, 0, Vec::new()), DecidedBy::Store, std::iter::empty())
    }

    /// Who decided, in a word for logs.
    pub fn decider_label(&self) -> &'static str {
        if self.is_from_cache { "denial-cache" } else { self.decided_by.label() }
    }

    /// The limits that deny the request.
    pub fn violated(&self) -> impl Iterator<Item = &LimitResult<'a>> {
        self.results.iter().filter(|result| result.denies())
    }

    /// µs until the same request would pass; none if it never will. What is busy may come free at any time.
    pub fn retry_us(&self) -> Option<u64> {
        let retry_after = |result: &LimitResult<'_>| match result.outcome.status {
            Status::Ok | Status::Saturated => Some(0),
            Status::Exceeded => Some(result.outcome.retry_us),
            Status::CostTooLarge => None,
        };
        self.violated().map(retry_after).try_fold(0, |max_retry, retry| Some(max_retry.max(retry?)))
    }

    /// How long a denied request that came at `arrived` is to wait before it asks again, if its limits let it wait so long.
    pub fn retry_delay(&self, arrived_at: Instant) -> Option<Duration> {
        let pause = Duration::from_micros(self.retry_us().filter(|_| !self.admitted)?);
        let may_wait = |result: &LimitResult<'_>| {
            result.limit.queue_policy.is_some_and(|wait| elapsed_since(arrived_at) + pause <= wait.max_wait)
        };
        self.violated().all(may_wait).then_some(pause)
    }
}
