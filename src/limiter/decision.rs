//! Input and output of the limiter: limit checks and decisions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::elapsed_since;
use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::key::{Identity, Key};
use crate::limiter::notify::{DecisionContext, EventQueue, LimitUsage};
use crate::limiter::quota::Quota;
use crate::limiter::settlement::{ConcurrencyPermits, Deferred, DeferredCharges, OwnedCharge, SettleAction};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Charge, ChargeMode, StoreError, Verdict};

/// A check of one limit for one identity.
#[derive(Debug, Clone)]
pub struct LimitCheck<'a, 'p> {
    /// Index of the limit on the route.
    pub limit_index: usize,
    /// The limit that is checked.
    pub limit: &'a LimitSpec,
    /// The variant of the limit that applies to this request.
    pub variant: &'p Arc<LimitVariant>,
    /// The identity that is charged.
    pub identity: Identity,
    /// Cost of the request, in tokens.
    pub cost: u64,
    /// The operation that is deferred until the response is known.
    pub deferred: Deferred,
}

/// The result of one limit for a request.
#[derive(Debug)]
pub struct LimitResult<'a> {
    /// Index of the limit on the route.
    pub limit_index: usize,
    /// The limit that is checked.
    pub limit: &'a LimitSpec,
    /// The quota that applied to the request.
    pub quota: Quota,
    /// The outcome of the check of this limit.
    pub outcome: Outcome,
}

/// The decision about a request.
#[derive(Debug)]
pub struct Decision<'a> {
    /// Whether the request is admitted.
    pub admitted: bool,
    /// Whether the store or this gateway's local share decided.
    pub decided_by: DecidedBy,
    /// Whether the decision is a denial from the denial cache.
    pub is_from_cache: bool,
    /// Whether the request is admitted unchecked because of overload. This happens only if all limits of the request
    /// are shadow limits.
    pub is_overloaded: bool,
    /// Time of the decision, µs since the Unix epoch.
    pub now_us: u64,
    /// The result of each limit that took part in the decision, except shadow limits.
    pub results: Vec<LimitResult<'a>>,
    /// The shadow limits that would have denied the request.
    pub shadow_denied: Vec<&'a LimitSpec>,
    /// The concurrency permits that the request holds until it ends.
    pub permits: Option<Box<ConcurrencyPermits>>,
    /// The charges and refunds that are deferred until the response is known.
    pub deferred_charges: Option<Box<DeferredCharges>>,
    /// Limit index and [`Charge::debt_before_us`] of each check that the store or the local share performed. The list
    /// is empty unless the request is admitted and at least one charge may be refunded.
    pub debts_before_us: Box<[(usize, u64)]>,
}

impl<'a> LimitCheck<'a, 'a> {
    /// Create a check of the limit's default variant with a cost of 1. If a request has several checks, give each check
    /// its own `limit_index`, in ascending order from 0:
    /// `LimitCheck { limit_index: 1, ..LimitCheck::new(limit, identity) }`.
    pub fn new(limit: &'a LimitSpec, identity: Identity) -> Self {
        let variant = &limit.default_variant;
        let deferred = Deferred::Nothing;
        LimitCheck { limit_index: 0, limit, variant, identity, cost: 1, deferred }
    }
}

impl<'a> LimitCheck<'a, '_> {
    /// Return the key of the state that the check reads and changes.
    pub fn key(&self) -> Key<'_> {
        Key { identity: self.identity, state_name: &self.variant.state_name }
    }

    /// Return the number of remaining tokens that the request needs to be admitted: its cost, or 1 if the cost is
    /// charged after the response.
    pub fn required(&self) -> u64 {
        if self.deferred == Deferred::Charge { 1 } else { self.cost }
    }

    /// Return whether the limit is a concurrency limit.
    pub fn is_concurrency(&self) -> bool {
        self.variant.rule.is_concurrency()
    }

    /// Return whether this check can be coalesced with other checks of the same state. The check must have a cost of 1
    /// that is charged before the response. Its limit must be neither a shadow limit nor a concurrency limit.
    pub fn is_batchable(&self) -> bool {
        self.cost == 1 && self.deferred != Deferred::Charge && !self.limit.shadow && !self.is_concurrency()
    }

    /// Return whether a denial by this check can be cached. If charges of the limit can be refunded, a refund may admit
    /// a request before the retry time, so denials cannot be cached. Shadow limits never deny.
    pub fn is_cacheable(&self) -> bool {
        !self.deferred.is_refundable() && !self.limit.shadow
    }

    /// Return the rule that the store or the local share applies.
    fn rule(&self, decided_by: DecidedBy) -> &Rule {
        match decided_by {
            DecidedBy::Store => &self.variant.rule,
            DecidedBy::Local => self.variant.local_rule(),
        }
    }

    /// Return the charge for the store or for the local share. The permit ids of the request start at
    /// `first_permit_id`.
    pub fn charge(&self, decided_by: DecidedBy, first_permit_id: u64) -> Charge<'_> {
        let rule = self.rule(decided_by);
        let mode = match (self.limit.shadow, self.deferred) {
            (true, Deferred::Charge) => ChargeMode::ShadowDeferred,
            (true, Deferred::Nothing | Deferred::Refund | Deferred::Settle) => ChargeMode::Shadow,
            (false, Deferred::Charge) => ChargeMode::Deferred,
            (false, Deferred::Nothing | Deferred::Refund | Deferred::Settle) => ChargeMode::Enforced,
        };
        let permit_id = self.permit_id(first_permit_id);
        let usage = self.limit.usage.as_ref();
        Charge { key: self.key(), rule, cost: self.cost, mode, permit_id, debt_before_us: 0, usage }
    }

    /// Return the permit id of this check.
    pub fn permit_id(&self, first_permit_id: u64) -> u64 {
        first_permit_id.wrapping_add(self.limit_index as u64)
    }

    /// Return an owned copy of the check's data, for operations that outlive the request.
    pub fn owned_charge(&self) -> OwnedCharge {
        OwnedCharge {
            limit_index: self.limit_index,
            variant: self.variant.clone(),
            identity: self.identity,
            cost: self.cost,
            permit_id: 0,
            prefetch: self.limit.prefetch,
            debt_before_us: 0,
            usage: self.limit.usage.clone(),
            notify: self.limit.notify.clone(),
        }
    }

    fn to_result(&self, outcome: Outcome) -> LimitResult<'a> {
        LimitResult { limit_index: self.limit_index, limit: self.limit, quota: self.variant.quota, outcome }
    }
}

/// Queue quota events for the limits that have reached a threshold after this verdict. A reservation counts towards a
/// threshold only after it is settled.
pub fn offer_events<'b, 'a: 'b, 'p: 'b>(
    events: &EventQueue,
    verdict: &Verdict,
    decided_by: DecidedBy,
    checks: impl Iterator<Item = &'b LimitCheck<'a, 'p>>,
) {
    for (index, (check, outcome)) in checks.zip(&verdict.outcomes).enumerate() {
        let Some(notify) = &check.limit.notify else { continue };
        let is_reserved = check.deferred == Deferred::Settle && verdict.granted > 0;
        let reserved = if is_reserved { check.cost } else { 0 };
        let now_us = verdict.decided_at_us.get(index).copied().unwrap_or(verdict.now_us);
        let quota = check.variant.quota;
        let rule = check.rule(decided_by);
        let is_local = decided_by == DecidedBy::Local;
        let context = DecisionContext { quota, rule, is_local, now_us, reserved };
        if let Some(usage) = LimitUsage::new(notify, check.identity, context, outcome) {
            events.offer(&usage);
        }
    }
}

impl LimitResult<'_> {
    /// Return whether this limit denies the request.
    pub fn denies(&self) -> bool {
        self.outcome.status != Status::Ok
    }
}

impl<'a> Decision<'a> {
    /// Create a decision from a verdict about these checks.
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

    /// Create a decision for a charge that was made `elapsed_us` µs before the verdict.
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
        if verdict.granted > 0 && checks.clone().any(|check| check.deferred.is_refundable()) {
            let entries = checks.clone().zip(&verdict.outcomes).map(|(check, outcome)| {
                let cost = check.cost.saturating_add(verdict.charged_later);
                (check.limit_index, check.rule(decided_by).debt_before_us(outcome, elapsed_us, cost))
            });
            debts_before_us = entries.collect();
        }
        let Verdict { granted, now_us, outcomes, .. } = verdict;
        let mut results = Vec::with_capacity(outcomes.len());
        let mut shadow_denied = Vec::new();
        for (check, outcome) in checks.zip(outcomes) {
            match (check.limit.shadow, outcome.status) {
                (false, _) => results.push(check.to_result(outcome)),
                (true, Status::Ok) => {}
                (true, Status::Exceeded | Status::CostTooLarge | Status::Saturated) => shadow_denied.push(check.limit),
            }
        }
        let admitted = granted > 0;
        Decision {
            admitted,
            decided_by,
            is_from_cache: false,
            is_overloaded: false,
            now_us,
            results,
            shadow_denied,
            permits: None,
            deferred_charges: None,
            debts_before_us,
        }
    }

    /// Combine two decisions about different limits of one request. The combined decision admits the request only if
    /// both decisions admit it.
    #[must_use]
    pub fn merge(mut self, other: Decision<'a>) -> Decision<'a> {
        if other.decided_by == DecidedBy::Local {
            self.decided_by = DecidedBy::Local;
        }
        self.admitted &= other.admitted;
        self.is_from_cache |= other.is_from_cache;
        self.is_overloaded |= other.is_overloaded;
        self.now_us = self.now_us.max(other.now_us);
        self.results.extend(other.results);
        // Sort the results, because headers list the limits in the order of the route.
        self.results.sort_by_key(|result| result.limit_index);
        self.shadow_denied.extend(other.shadow_denied);
        self.permits = match (self.permits, other.permits) {
            (Some(mut permits), Some(others)) => {
                permits.append(*others);
                Some(permits)
            }
            (permits, others) => permits.or(others),
        };
        self.deferred_charges = match (self.deferred_charges, other.deferred_charges) {
            (Some(mut charges), Some(others)) => {
                charges.append(*others);
                Some(charges)
            }
            (charges, others) => charges.or(others),
        };
        self.debts_before_us = Box::default();
        self
    }

    /// Undo the charges of an admitted request that a later check rejects. Refund the charges with [`Deferred::Refund`]
    /// or [`Deferred::Settle`], make no deferred charges, and release the permits. `results` then contains the outcomes
    /// after the refund. The refund is made even if the client disconnects.
    ///
    /// # Errors
    /// The store failed or did not reply. The refund may be lost.
    pub async fn refund(&mut self) -> Result<(), StoreError> {
        if let Some(permits) = self.permits.take() {
            let released = self.results.iter_mut().filter(|result| permits.contains(result.limit_index));
            released.for_each(|result| result.outcome.remaining += 1);
        }
        let Some(charges) = self.deferred_charges.take() else { return Ok(()) };
        let refund = |_, deferred| match deferred {
            Deferred::Refund | Deferred::Settle => SettleAction::Refund,
            Deferred::Nothing | Deferred::Charge => SettleAction::Nothing,
        };
        let Some(settlement) = charges.settle(refund) else { return Ok(()) };
        for (limit_index, outcome) in settlement.await? {
            for result in self.results.iter_mut().filter(|result| result.limit_index == limit_index) {
                result.outcome = outcome;
            }
        }
        Ok(())
    }

    /// Return the decision for a request without limits, which is admitted.
    pub fn unlimited() -> Self {
        Decision::new(Verdict::new(1, 0, Vec::new()), DecidedBy::Store, std::iter::empty())
    }

    /// Return the name of the decider for logs: `denial-cache`, `store` or `local`.
    pub fn decider_label(&self) -> &'static str {
        if self.is_from_cache { "denial-cache" } else { self.decided_by.label() }
    }

    /// Return whether `limit` is a shadow limit that would have denied the request.
    pub fn is_shadow_denied(&self, limit: &LimitSpec) -> bool {
        self.shadow_denied.iter().any(|denied| std::ptr::eq(*denied, limit))
    }

    /// Return the results of the limits that deny the request.
    pub fn violated(&self) -> impl Iterator<Item = &LimitResult<'a>> {
        self.results.iter().filter(|result| result.denies())
    }

    /// Return the time in µs until the same request would be admitted. Return `None` if the request can never be
    /// admitted. For a concurrency limit, the time is 0 µs, because a permit may be released at any time.
    pub fn retry_us(&self) -> Option<u64> {
        let retry_after = |result: &LimitResult<'_>| match result.outcome.status {
            Status::Ok | Status::Saturated => Some(0),
            Status::Exceeded => Some(result.outcome.retry_us),
            Status::CostTooLarge => None,
        };
        self.violated().map(retry_after).try_fold(0, |max_retry, retry| Some(max_retry.max(retry?)))
    }

    /// Return how long a denied request that arrived at `arrived_at` must wait before the next check. Return `None` if
    /// the request is admitted or can never be admitted. Also return `None` if a limit that denies it has no queue
    /// policy, or if the retry time is after the end of its `max_wait`.
    pub fn retry_delay(&self, arrived_at: Instant) -> Option<Duration> {
        let pause = Duration::from_micros(self.retry_us().filter(|_| !self.admitted)?);
        let may_wait = |result: &LimitResult<'_>| {
            result.limit.queue_policy.is_some_and(|wait| elapsed_since(arrived_at) + pause <= wait.max_wait)
        };
        self.violated().all(may_wait).then_some(pause)
    }
}
