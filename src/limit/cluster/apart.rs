//! A decision by several calls: one for each identity, or for each key while a slot is on its way to another node.
//!
//! All are asked at the same time. If one denies, what the others granted is given back: never more is admitted than the
//! limits allow, and a denied request holds units of the other limits for about one round trip.

use futures_util::future::join_all;
use tracing::debug;

use super::{Cluster, is_of_multiple_keys};
use crate::limit::algorithm::{Outcome, Rule, Status};
use crate::limit::key::{Bucket, Identity, Key};
use crate::limit::redis::slots::slot;
use crate::limit::store::{Charge, Mode, Operation, StoreError, Verdict};

/// A charge that outlives whoever asks for it.
#[derive(Debug)]
struct Owned {
    identity: Identity,
    bucket: Bucket,
    rule: Rule,
    cost: u64,
    mode: Mode,
    lease: u64,
}

impl Owned {
    fn of(charge: &Charge<'_>) -> Self {
        let Charge { key: Key { identity, bucket }, rule, cost, mode, lease } = *charge;
        Owned { identity, bucket: bucket.clone(), rule: rule.clone(), cost, mode, lease }
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        let key = Key { identity: self.identity, bucket: &self.bucket };
        Charge { key, rule: &self.rule, cost, mode: self.mode, lease: self.lease }
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
        let decided = tokio::spawn(async move { cluster.decide(operation, &groups, places).await });
        decided.await.unwrap_or(Err(StoreError::Timeout))
    }

    async fn decide(&self, operation: Operation, groups: &[Group], places: usize) -> Result<Verdict, StoreError> {
        for group in groups {
            // Without this one the others would be asked in vain.
            if self.guard(&self.owner(slot(group[0].1.identity)).await?)?.is_open() {
                self.look_again();
                return Err(StoreError::Open);
            }
        }
        let mut answers = self.ask_all(operation, groups.iter().map(Vec::as_slice)).await;
        let in_pieces = answers.extract_if(.., |(_, answer)| answer.as_ref().is_err_and(is_of_multiple_keys));
        let in_pieces: Vec<_> = in_pieces.map(|(group, _)| group).collect();
        answers.extend(self.ask_all(operation, in_pieces.iter().flat_map(|group| group.chunks(1))).await);
        let granted = answers.iter().map(|(_, answer)| answer.as_ref().map_or(0, |verdict| verdict.granted)).min();
        let granted = granted.unwrap_or(0);
        if matches!(operation, Operation::Check | Operation::Take) {
            join_all(answers.iter().map(|answer| self.give_back(operation, answer, granted))).await;
            if answers.iter().any(|(_, answer)| answer.as_ref().is_ok_and(|verdict| verdict.granted == 0)) {
                // Denied, whatever those would have said that could not answer.
                answers.retain(|(_, answer)| answer.is_ok());
            }
        }
        merge(answers, granted, places)
    }

    async fn ask_all<'a>(
        &self,
        operation: Operation,
        groups: impl Iterator<Item = &'a [(usize, Owned)]>,
    ) -> Vec<Answer<'a>> {
        join_all(groups.map(async |group| {
            let charges: Vec<_> = group.iter().map(|(_, owned)| owned.charge(owned.cost)).collect();
            (group, self.follow(operation, &charges).await)
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
        join_all(charged.map(async |((_, owned), _)| {
            let cost = if operation == Operation::Take { verdict.granted - granted } else { owned.cost };
            if let Err(error) = self.follow(refund, &[owned.charge(cost)]).await {
                debug!(%error, "a denied request keeps what it was granted elsewhere");
            }
        }))
        .await;
    }
}

/// One verdict of several.
fn merge(answers: Vec<Answer<'_>>, granted: u64, places: usize) -> Result<Verdict, StoreError> {
    let untouched = Outcome { status: Status::Ok, remaining: 0, reset_us: 0, retry_us: 0 };
    let mut merged = Verdict { granted, now_us: 0, outcomes: vec![untouched; places], instants: vec![0; places] };
    for (group, answer) in answers {
        let verdict = answer.map_err(|error| match error {
            // Here it did not run, but the others were asked.
            error if error.nothing_ran() => StoreError::Unreachable(error.to_string()),
            error => error,
        })?;
        merged.now_us = merged.now_us.max(verdict.now_us);
        for ((place, _), outcome) in group.iter().zip(verdict.outcomes) {
            merged.outcomes[*place] = outcome;
            merged.instants[*place] = verdict.now_us;
        }
    }
    Ok(merged)
}
