//! A decision by several calls: one for each identity, or for each key while a slot is being migrated.
//!
//! All are asked first and charged only when none of them denies, so that a denied request rarely holds units of other limits. When two
//! requests race for the last unit, the loser gives back what the other groups granted it and asks again: what it is told is true
//! without its own charges. It may still be denied by units that another request gives back a round trip later; such a denial is
//! never cached (see [`Verdict::instants`]).

use std::time::Instant;

use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::sleep;
use tracing::debug;

use super::{Cluster, PAUSE, is_of_multiple_keys};
use crate::limit::algorithm::{Outcome, Rule, Status};
use crate::limit::clock::monotonic;
use crate::limit::key::{Bucket, Identity, Key};
use crate::limit::redis::slots::slot;
use crate::limit::store::{Charge, Mode, Operation, StoreError, Verdict};

/// How often a request that lost a race asks again, and a refund that was not made is repeated.
const ROUNDS: usize = 3;

/// A charge that outlives whoever asks for it.
#[derive(Debug)]
struct Owned {
    identity: Identity,
    bucket: Bucket,
    rule: Rule,
    cost: u64,
    mode: Mode,
    lease: u64,
    debt_before_us: u64,
}

impl Owned {
    fn of(charge: &Charge<'_>) -> Self {
        let Charge { key: Key { identity, bucket }, rule, cost, mode, lease, debt_before_us } = *charge;
        Owned { identity, bucket: bucket.clone(), rule: rule.clone(), cost, mode, lease, debt_before_us }
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        let key = Key { identity: self.identity, bucket: &self.bucket };
        let Owned { mode, lease, debt_before_us, .. } = *self;
        Charge { key, rule: &self.rule, cost, mode, lease, debt_before_us }
    }
}

/// The charges of one call, with their places among all.
type Group = Vec<(usize, Owned)>;

/// A group and what became of it.
type Answer<'a> = (&'a [(usize, Owned)], Result<Verdict, StoreError>);

impl Cluster {
    /// Decides with a call for each group of charges of which each is the `same` as the first.
    pub(super) async fn apart(
        &self,
        due: Instant,
        operation: Operation,
        charges: &[Charge<'_>],
        same: impl Fn(&Charge<'_>, &Charge<'_>) -> bool,
    ) -> Result<Verdict, StoreError> {
        let mut groups: Vec<Group> = Vec::new();
        for (place, charge) in charges.iter().enumerate() {
            let owned = (place, Owned::of(charge));
            match groups.iter_mut().find(|group| same(&charges[group[0].0], charge)) {
                Some(group) => group.push(owned),
                None => groups.push(vec![owned]),
            }
        }
        // A task of its own: a client that leaves now must not keep what is to be given back.
        let (cluster, places) = (self.clone(), charges.len());
        let (told, verdict) = oneshot::channel();
        tokio::spawn(async move {
            let (result, in_vain) = cluster.decide(due, operation, &groups, places).await;
            let _ = told.send(result);
            // After the error: its time is over.
            join_all(in_vain.iter().map(|answer| cluster.give_back(operation, answer, 0))).await;
        });
        verdict.await.unwrap_or(Err(StoreError::Timeout))
    }

    /// Whether all groups can be asked: without one of them the others would be asked in vain.
    async fn all_work(&self, groups: &[Group]) -> Result<(), StoreError> {
        for group in groups {
            if self.guard(&self.owner(slot(group[0].1.identity)).await?)?.is_open() {
                self.look_again();
                return Err(StoreError::Open);
            }
        }
        Ok(())
    }

    /// The verdict, and what is to be given back because another group failed.
    async fn decide<'a>(
        &self,
        due: Instant,
        operation: Operation,
        groups: &'a [Group],
        places: usize,
    ) -> (Result<Verdict, StoreError>, Vec<Answer<'a>>) {
        if let Err(error) = self.all_work(groups).await {
            return (Err(error), Vec::new());
        }
        if !matches!(operation, Operation::Check | Operation::Take) {
            let answers = self.ask_all(due, operation, groups).await;
            let granted = least(&answers);
            return (merge(answers, granted, places), Vec::new());
        }
        for _ in 0..ROUNDS {
            let mut asked = self.ask_all(due, Operation::Peek, groups).await;
            if least(&asked) == 0 {
                if asked.iter().any(is_denial) {
                    // Denied, whatever those would have said that could not answer.
                    asked.retain(|(_, answer)| answer.is_ok());
                }
                return (merge(asked, 0, places), Vec::new());
            }
            let charged = self.ask_all(due, operation, groups).await;
            let granted = least(&charged);
            if granted == 0 && !charged.iter().any(is_denial) {
                return (merge(charged.clone(), 0, places), charged);
            }
            join_all(charged.iter().map(|answer| self.give_back(operation, answer, granted))).await;
            if granted > 0 {
                return (merge(charged, granted, places), Vec::new());
            }
        }
        // Others were quicker each time. What is left changes from one round trip to the next.
        let mut asked = self.ask_all(due, Operation::Peek, groups).await;
        asked.retain(|(_, answer)| answer.is_ok());
        let busy = |verdict| self.busy(verdict);
        (merge(asked, 0, places).map(busy), Vec::new())
    }

    /// The denial of a request that lost every race.
    fn busy(&self, mut verdict: Verdict) -> Verdict {
        if verdict.outcomes.iter().all(|outcome| outcome.status == Status::Ok)
            && let Some(outcome) = verdict.outcomes.first_mut()
        {
            (outcome.status, outcome.retry_us) = (Status::Busy, self.timeout().as_micros() as u64);
        }
        verdict
    }

    /// Asks each group, and where its keys are on two nodes each of its charges.
    async fn ask_all<'a>(&self, due: Instant, operation: Operation, groups: &'a [Group]) -> Vec<Answer<'a>> {
        let mut answers = self.ask_each(due, operation, groups.iter().map(Vec::as_slice)).await;
        let in_pieces = answers.extract_if(.., |(_, answer)| answer.as_ref().is_err_and(is_of_multiple_keys));
        let in_pieces: Vec<_> = in_pieces.map(|(group, _)| group).collect();
        answers.extend(self.ask_each(due, operation, in_pieces.iter().flat_map(|group| group.chunks(1))).await);
        answers
    }

    async fn ask_each<'a>(
        &self,
        due: Instant,
        operation: Operation,
        groups: impl Iterator<Item = &'a [(usize, Owned)]>,
    ) -> Vec<Answer<'a>> {
        let cost = |owned: &Owned| match operation {
            // What is charged after the response needs one unit now; of many units any number is taken.
            Operation::Peek if owned.mode.is_post_paid() => 1,
            _ => owned.cost,
        };
        join_all(groups.map(async |group| {
            let charges: Vec<_> = group.iter().map(|(_, owned)| owned.charge(cost(owned))).collect();
            (group, self.follow(due, operation, &charges).await)
        }))
        .await
    }

    /// Gives back what a group was granted beyond what all were.
    async fn give_back(&self, operation: Operation, (group, answer): &Answer<'_>, granted: u64) {
        let Some(verdict) = answer.as_ref().ok().filter(|verdict| verdict.granted > granted) else { return };
        let refund = Operation::Refund { charged_at: verdict.now_us };
        let charged = group.iter().zip(&verdict.outcomes).filter(|((_, owned), outcome)| {
            // A shadow limit may have had no room; what is paid after the response is not charged yet.
            outcome.status == Status::Ok && !owned.mode.is_post_paid()
        });
        join_all(charged.map(async |((_, owned), outcome)| {
            let cost = if operation == Operation::Take { verdict.granted - granted } else { owned.cost };
            let debt_before_us = owned.rule.debt_before_us(outcome, 0, cost);
            let charge = Charge { debt_before_us, ..owned.charge(cost) };
            for _ in 0..ROUNDS {
                match self.follow(monotonic() + self.timeout(), refund, &[charge]).await {
                    Ok(_) => return,
                    Err(error) if error.nothing_ran() => sleep(PAUSE).await,
                    Err(error) => return debug!(%error, "a denied request may keep what it was granted elsewhere"),
                }
            }
            debug!("a denied request keeps what it was granted elsewhere");
        }))
        .await;
    }
}

/// What all groups grant.
fn least(answers: &[Answer<'_>]) -> u64 {
    let granted = answers.iter().map(|(_, answer)| answer.as_ref().map_or(0, |verdict| verdict.granted));
    granted.min().unwrap_or(0)
}

fn is_denial((_, answer): &Answer<'_>) -> bool {
    answer.as_ref().is_ok_and(|verdict| verdict.granted == 0)
}

/// One verdict of several.
fn merge(answers: Vec<Answer<'_>>, granted: u64, places: usize) -> Result<Verdict, StoreError> {
    let untouched = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    let verdict = Verdict::new(granted, 0, vec![untouched; places]);
    let mut merged = Verdict { instants: vec![0; places], ..verdict };
    for (group, answer) in answers {
        let verdict = answer.map_err(|error| match error {
            // Here it did not run, but the others were asked.
            error if error.is_overload() => StoreError::Late,
            error if error.nothing_ran() => StoreError::Unreachable(error.to_string()),
            error => error,
        })?;
        merged.now_us = merged.now_us.max(verdict.now_us);
        // The outcomes include what was given back.
        merged.charged_after = merged.charged_after.max(verdict.granted.saturating_sub(granted));
        for ((place, _), outcome) in group.iter().zip(verdict.outcomes) {
            merged.outcomes[*place] = outcome;
            merged.instants[*place] = verdict.now_us;
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use redis::{ErrorKind, ServerErrorKind};

    use super::*;

    #[test]
    fn error_of_one_group_is_that_of_all_and_never_says_that_nothing_ran() {
        let refused = redis::RedisError::from((ErrorKind::Server(ServerErrorKind::ResponseError), "OOM"));
        // Whether it is overload, and whether it is an outage.
        let cases = [
            (StoreError::Overloaded, true, false),
            (StoreError::Late, true, false),
            (StoreError::Open, false, true),
            (StoreError::Timeout, false, true),
            (StoreError::Unwritable(refused.clone()), false, true),
            (StoreError::Elsewhere(refused.clone()), false, true),
            (StoreError::Refused(refused), false, true),
        ];
        for (error, is_overload, is_outage) in cases {
            for first in [true, false] {
                let ran = || (&[][..], Ok(Verdict::new(1, 1, Vec::new())));
                let failed = || (&[][..], Err(error.clone()));
                let answers = if first { vec![failed(), ran()] } else { vec![ran(), failed()] };
                assert_eq!(least(&answers), 0, "{error}: nothing is granted, so that what ran is given back");
                let merged = merge(answers, 0, 2).unwrap_err();
                assert_eq!((merged.is_overload(), merged.is_outage()), (is_overload, is_outage), "{error}: {merged}");
                assert!(!merged.nothing_ran(), "{error}: {merged}");
            }
        }
    }
}
