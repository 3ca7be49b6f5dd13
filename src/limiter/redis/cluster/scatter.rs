//! Decisions by several calls: one for each identity, or one for each key while a slot migrates.
//!
//! First, all groups are read (peeked), and they are charged only if none denies. A denied request therefore rarely
//! holds tokens of other limits. If two requests race for the last token, the loser refunds what other groups granted
//! and reads the states again, so that its denial does not include its own charges. The loser may still be denied
//! because of tokens that another request refunds one round trip later. For this reason, denials by several calls are
//! never cached (see [`Verdict::decided_at_us`]).

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout_at};
use tracing::{debug, warn};

use crate::limiter::algorithm::{Outcome, Rule, Status};
use crate::limiter::clock::monotonic;
use crate::limiter::key::{Identity, Key, StateName};
use crate::limiter::redis::cluster::topology::identity_slot;
use crate::limiter::redis::cluster::{ClusterStore, REDIRECTION_DELAY, is_try_again};
use crate::limiter::redis::usage;
use crate::limiter::usage::{UsageAmount, UsageDays, UsageFields, UsageKey, UsagePost};
use crate::limiter::verdict::{Charge, ChargeMode, Operation, StoreError, Verdict};

/// Maximum number of attempts of a request that loses races, and of a refund that was not executed.
const MAX_ATTEMPTS: usize = 3;

/// A charge that outlives the request.
#[derive(Debug)]
struct ShardCharge {
    identity: Identity,
    state_name: StateName,
    rule: Rule,
    cost: u64,
    mode: ChargeMode,
    permit_id: u64,
    debt_before_us: u64,
    usage: Option<Arc<UsageDays>>,
}

impl ShardCharge {
    fn from_charge(charge: &Charge<'_>) -> Self {
        let Charge { key: Key { identity, state_name }, rule, cost, mode, permit_id, debt_before_us, usage } = *charge;
        ShardCharge {
            identity,
            state_name: state_name.clone(),
            rule: rule.clone(),
            cost,
            mode,
            permit_id,
            debt_before_us,
            usage: usage.cloned(),
        }
    }

    fn to_charge(&self, cost: u64) -> Charge<'_> {
        let key = Key { identity: self.identity, state_name: &self.state_name };
        let ShardCharge { mode, permit_id, debt_before_us, .. } = *self;
        Charge { key, rule: &self.rule, cost, mode, permit_id, debt_before_us, usage: self.usage.as_ref() }
    }
}

/// The charges of one call, each with its index in the request.
type ShardCall = Vec<(usize, ShardCharge)>;

/// Receives the result for the request.
type ResultSender = oneshot::Sender<Result<Verdict, StoreError>>;

/// A group and its result.
type ShardResult<'a> = (&'a [(usize, ShardCharge)], Result<Verdict, StoreError>);

impl ClusterStore {
    /// Decide a request with one call for each group of charges.
    pub(super) async fn scatter(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
        is_same_group: impl Fn(&Charge<'_>, &Charge<'_>) -> bool,
    ) -> Result<Verdict, StoreError> {
        let mut groups: Vec<ShardCall> = Vec::new();
        for (charge_index, charge) in charges.iter().enumerate() {
            let indexed_charge = (charge_index, ShardCharge::from_charge(charge));
            match groups.iter_mut().find(|group| is_same_group(&charges[group[0].0], charge)) {
                Some(group) => group.push(indexed_charge),
                None => groups.push(vec![indexed_charge]),
            }
        }
        // Run the calls in a separate task, so that a client that disconnects does not cancel refunds.
        let cluster = self.clone();
        let charge_count = charges.len();
        let (result_sender, verdict) = oneshot::channel();
        tokio::spawn(async move {
            cluster.scatter_gather(deadline, operation, &groups, charge_count, result_sender).await;
        });
        verdict.await.unwrap_or(Err(StoreError::Timeout))
    }

    /// Check that the owners of all groups can be called. If one of the owners has failed, calls to the others would
    /// have no effect.
    async fn check_available(&self, groups: &[ShardCall]) -> Result<(), StoreError> {
        for group in groups {
            if self.guarded_node(&self.owner(identity_slot(group[0].1.identity)).await?)?.is_open() {
                self.refresh_topology();
                return Err(StoreError::BreakerOpen);
            }
        }
        Ok(())
    }

    /// Send the verdict. Then refund unneeded charges: of other groups if one group failed, or of a request that no
    /// longer waits.
    async fn scatter_gather(
        &self,
        deadline: Instant,
        operation: Operation,
        groups: &[ShardCall],
        charge_count: usize,
        result_sender: ResultSender,
    ) {
        if let Err(error) = self.check_available(groups).await {
            return drop(result_sender.send(Err(error)));
        }
        if !matches!(operation, Operation::Check | Operation::TakeUpTo) {
            let results = self.call_all(deadline, operation, groups).await;
            let granted = min_granted(&results);
            return drop(result_sender.send(merge(results, granted, charge_count)));
        }
        for _ in 0..MAX_ATTEMPTS {
            let mut peeked = self.call_all(deadline, Operation::Peek, groups).await;
            if min_granted(&peeked) == 0 {
                if peeked.iter().any(is_denial) {
                    // One denial is sufficient: the request is denied even if other groups failed.
                    peeked.retain(|(_, answer)| answer.is_ok());
                }
                return drop(result_sender.send(merge(peeked, 0, charge_count)));
            }
            let charged = self.call_all(deadline, operation, groups).await;
            let granted = min_granted(&charged);
            let mut refunds = pin!(self.refund_excess(operation, &charged, granted));
            if granted > 0 || !charged.iter().any(is_denial) {
                let is_unclaimed = result_sender.send(merge(charged.clone(), granted, charge_count)).is_err();
                refunds.await;
                if is_unclaimed && granted > 0 {
                    self.refund(operation, &charged, 0..granted).await;
                }
                return;
            }
            // Wait for the refunds, so that the charges of this attempt cannot cause the denial of the next one.
            if timeout_at(deadline.into(), refunds.as_mut()).await.is_err() {
                let _ = result_sender.send(Err(StoreError::LateReply));
                return refunds.await;
            }
        }
        // Deny the request, because other requests have taken the last token in each attempt.
        let mut asked = self.call_all(deadline, Operation::Peek, groups).await;
        asked.retain(|(_, answer)| answer.is_ok());
        let saturated = |verdict| self.saturated(verdict);
        let _ = result_sender.send(merge(asked, 0, charge_count).map(saturated));
    }

    /// Return the denial of a request that lost all races.
    fn saturated(&self, mut verdict: Verdict) -> Verdict {
        if verdict.outcomes.iter().all(|outcome| outcome.status == Status::Ok)
            && let Some(outcome) = verdict.outcomes.first_mut()
        {
            (outcome.status, outcome.retry_us) = (Status::Saturated, self.timeout().as_micros() as u64);
        }
        verdict
    }

    /// Call each group. If the keys of a group are on two nodes, call each charge of the group separately.
    async fn call_all<'a>(
        &self,
        deadline: Instant,
        operation: Operation,
        groups: &'a [ShardCall],
    ) -> Vec<ShardResult<'a>> {
        let mut results = self.call_each(deadline, operation, groups.iter().map(Vec::as_slice)).await;
        let split_groups = results.extract_if(.., |(_, answer)| answer.as_ref().is_err_and(is_try_again));
        let in_pieces: Vec<_> = split_groups.map(|(group, _)| group).collect();
        results.extend(self.call_each(deadline, operation, in_pieces.iter().flat_map(|group| group.chunks(1))).await);
        results
    }

    async fn call_each<'a>(
        &self,
        deadline: Instant,
        operation: Operation,
        groups: impl Iterator<Item = &'a [(usize, ShardCharge)]>,
    ) -> Vec<ShardResult<'a>> {
        let cost = |owned: &ShardCharge| match operation {
            // In these two cases the amount differs from the cost: a deferred cost charges nothing yet, and `TakeUpTo`
            // can take fewer tokens.
            Operation::Peek if owned.mode.is_deferred() => 1,
            _ => owned.cost,
        };
        join_all(groups.map(async |group| {
            let charges: Vec<_> = group.iter().map(|(_, owned)| owned.to_charge(cost(owned))).collect();
            (group, self.call_group(deadline, operation, &charges).await)
        }))
        .await
    }

    /// Call the owner of a group. While a slot migrates, the state and the total of a charge may be on two nodes. While
    /// a slot migrates, charge the state, and change the total in a second call.
    async fn call_group(
        &self,
        deadline: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Verdict, StoreError> {
        let result = self.call_owner(deadline, operation, charges).await;
        let [charge] = charges else { return result };
        if charge.usage.is_none() || !result.as_ref().is_err_and(is_try_again) {
            return result;
        }
        let verdict = self.call_owner(deadline, operation, &[Charge { usage: None, ..*charge }]).await?;
        self.add_usage(operation, charge, &verdict).await;
        Ok(verdict)
    }

    /// Add the amount that an operation charged to the total of its charge.
    async fn add_usage(&self, operation: Operation, charge: &Charge<'_>, verdict: &Verdict) {
        let Some(outcome) = verdict.outcomes.first() else { return };
        let amount = charge.usage_amount(operation, verdict.granted, outcome.status);
        let Some(day) = charge.usage_day(operation, verdict.now_us).filter(|_| amount != 0) else { return };
        let Key { identity, state_name } = charge.key;
        let (limit, fields) = (state_name.limit_name().into(), UsageFields::Days);
        let key = UsageKey { limit, identity: identity.0, month: day.month(), fields };
        let amounts = vec![UsageAmount { day: day.date.day(), model: None, cost: amount }];
        let post = UsagePost { key, amounts, poster: 0, sequence: 0 };
        let command = usage::post_command(self.prefix(), &post);
        for _ in 0..MAX_ATTEMPTS {
            match self.admin_command(identity_slot(identity), &command).await {
                Ok(_) => return,
                Err(error) if error.is_not_executed() => sleep(REDIRECTION_DELAY).await,
                Err(error) => return warn!(%error, amount, "usage totals of a cluster slot that migrates may be lost"),
            }
        }
        warn!(amount, "usage totals of a cluster slot that migrates are lost");
    }

    /// Refund what each group granted in addition to what all groups granted.
    async fn refund_excess(&self, operation: Operation, results: &[ShardResult<'_>], granted: u64) {
        self.refund(operation, results, granted..u64::MAX).await;
    }

    /// Refund the tokens with these numbers from each group, counted from the first token that the group granted.
    async fn refund(&self, operation: Operation, results: &[ShardResult<'_>], tokens: Range<u64>) {
        join_all(results.iter().map(|result| self.refund_group(operation, result, &tokens))).await;
    }

    async fn refund_group(&self, operation: Operation, (group, result): &ShardResult<'_>, tokens: &Range<u64>) {
        let Some(verdict) = result.as_ref().ok().filter(|verdict| verdict.granted > tokens.start) else { return };
        let refund = Operation::Refund { charged_at: verdict.now_us };
        let charged = group.iter().zip(&verdict.outcomes).filter(|((_, owned), outcome)| {
            // A shadow limit that denied has charged nothing, and a deferred cost is not charged yet.
            outcome.status == Status::Ok && !owned.mode.is_deferred()
        });
        join_all(charged.map(async |((_, owned), outcome)| {
            let (cost, with_later) = match operation {
                Operation::TakeUpTo => (verdict.granted.min(tokens.end) - tokens.start, verdict.granted - tokens.start),
                _ => (owned.cost, owned.cost),
            };
            let debt_before_us = owned.rule.debt_before_us(outcome, 0, with_later);
            let charge = Charge { debt_before_us, ..owned.to_charge(cost) };
            for _ in 0..MAX_ATTEMPTS {
                match self.call_group(monotonic() + self.timeout(), refund, &[charge]).await {
                    Ok(_) => return,
                    Err(error) if error.is_not_executed() => sleep(REDIRECTION_DELAY).await,
                    Err(error) => {
                        return debug!(%error, "a refund of a denied request failed, and its tokens may remain charged");
                    }
                }
            }
            debug!("a refund of a denied request failed, and its tokens remain charged");
        }))
        .await;
    }
}

/// Return what all groups granted.
fn min_granted(results: &[ShardResult<'_>]) -> u64 {
    let granted = results.iter().map(|(_, answer)| answer.as_ref().map_or(0, |verdict| verdict.granted));
    granted.min().unwrap_or(0)
}

fn is_denial((_, result): &ShardResult<'_>) -> bool {
    result.as_ref().is_ok_and(|verdict| verdict.granted == 0)
}

/// Merge the verdicts of all groups.
fn merge(results: Vec<ShardResult<'_>>, granted: u64, charge_count: usize) -> Result<Verdict, StoreError> {
    let untouched = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    let verdict = Verdict::new(granted, 0, vec![untouched; charge_count]);
    let mut merged = Verdict { decided_at_us: vec![0; charge_count], ..verdict };
    for (group, answer) in results {
        let verdict = answer.map_err(|error| match error {
            // The merged error must not say that nothing was executed: this group was not executed, but other groups
            // may have been.
            error if error.is_overload() => StoreError::LateReply,
            error if error.is_not_executed() => StoreError::Unreachable(error.to_string()),
            error => error,
        })?;
        merged.now_us = merged.now_us.max(verdict.now_us);
        // Add the surplus tokens that will be refunded, because the outcomes include their charge.
        merged.charged_later = merged.charged_later.max(verdict.granted.saturating_sub(granted));
        for ((charge_index, _), outcome) in group.iter().zip(verdict.outcomes) {
            merged.outcomes[*charge_index] = outcome;
            merged.decided_at_us[*charge_index] = verdict.now_us;
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::verdict::ErrorReply;

    #[test]
    fn merged_error_never_reports_not_executed() {
        let refused = ErrorReply::new("OOM", "");
        // Each case has an error and the expected values of `is_overload` and `is_outage`.
        let cases = [
            (StoreError::Overloaded, true, false),
            (StoreError::LateReply, true, false),
            (StoreError::BreakerOpen, false, true),
            (StoreError::Timeout, false, true),
            (StoreError::WritesRejected(refused.clone()), false, true),
            (StoreError::Redirected(refused.clone()), false, true),
            (StoreError::Rejected(refused), false, true),
        ];
        for (error, is_overload, is_outage) in cases {
            for first in [true, false] {
                let ran = || (&[][..], Ok(Verdict::new(1, 1, Vec::new())));
                let failed = || (&[][..], Err(error.clone()));
                let answers = if first { vec![failed(), ran()] } else { vec![ran(), failed()] };
                assert_eq!(min_granted(&answers), 0, "{error}: nothing is granted, so that what ran is refunded");
                let merged = merge(answers, 0, 2).unwrap_err();
                assert_eq!((merged.is_overload(), merged.is_outage()), (is_overload, is_outage), "{error}: {merged}");
                assert!(!merged.is_not_executed(), "{error}: {merged}");
            }
        }
    }
}
