//! Limits: named rules, each in one or more sizes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::algorithm::Rule;
use super::algorithm::fixed_window::{FixedWindow, Start};
use super::key::{Bucket, IdentityHasher};
use super::quota::{Quota, QuotaError};

/// A named rule: how much, and what happens when the store fails.
#[derive(Debug)]
pub struct Limit {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// Its size for everybody who has no other.
    pub standard: Arc<Plan>,
    /// Its size for the consumers of a tier.
    pub tiers: BTreeMap<Box<str>, Arc<Plan>>,
    /// What happens to requests while the store cannot answer.
    pub on_store_error: OnStoreError,
    /// Decides and counts, but never denies, and tells callers nothing.
    pub shadow: bool,
    /// Requests that it would deny may wait for their turn.
    pub wait: Option<Wait>,
    /// Units that a gateway may take ahead for an identity that is hot.
    pub advance: u64,
    /// How it is divided when the store is down.
    pub division: Division,
}

/// One size of a limit.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// Tells it from every other one, also of configurations before and after: what is the same has the same.
    pub id: u64,
    /// As written: what callers are told.
    pub quota: Quota,
    /// What decides.
    pub rule: Rule,
    /// What decides in this process alone while the store is down: this gateway's share.
    pub share: Rule,
    /// Its part of the keys; sizes of one shape share it, so that a consumer's state moves with it to another tier.
    pub bucket: Bucket,
}

/// What the share of one gateway depends on.
#[derive(Debug, Clone, Copy)]
pub struct Division {
    /// Gateways that share the store.
    pub gateways: u64,
    /// The largest cost at which the limit is used: a share must have room for it.
    pub dearest: u64,
}

/// Waiting instead of being denied.
#[derive(Debug, Clone, Copy)]
pub struct Wait {
    /// No longer than this.
    pub most: Duration,
    /// So many at a time, for one identity on one gateway.
    pub places: usize,
}

/// What a limit does while the store cannot answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStoreError {
    /// This gateway alone enforces its share of the limit.
    Local,
    /// The limit is not enforced.
    Allow,
    /// Requests are refused with 503.
    Deny,
}

impl Limit {
    /// Another size of the limit; without a burst of its own it is the quota's count.
    ///
    /// # Errors
    /// The size cannot be counted exactly, the algorithm cannot have it, or it is smaller than what is taken ahead.
    pub fn resized(&self, hasher: &IdentityHasher, quota: Quota, burst: Option<u64>) -> Result<Plan, QuotaError> {
        let plan = self.overridden(hasher, quota, burst)?;
        self.has_room(&plan).map(|()| plan)
    }

    /// The same for a time, by an operator's word: it may be smaller than what is taken ahead, of which then less is had.
    ///
    /// # Errors
    /// The size cannot be counted exactly, or the algorithm cannot have it.
    pub fn overridden(&self, hasher: &IdentityHasher, quota: Quota, burst: Option<u64>) -> Result<Plan, QuotaError> {
        Plan::new(hasher, &self.name, quota, self.standard.rule.resized(quota, burst)?, self.division)
    }

    /// Sees that a size of the limit has room for what is taken ahead.
    ///
    /// # Errors
    /// It is smaller.
    pub fn has_room(&self, plan: &Plan) -> Result<(), QuotaError> {
        let (lease, capacity) = (self.advance, plan.rule.capacity());
        if lease > capacity { Err(QuotaError::Lease { lease, capacity }) } else { Ok(()) }
    }

    /// All of its sizes, with the tiers that they are for.
    pub fn plans(&self) -> impl Iterator<Item = (Option<&str>, &Plan)> {
        let tiers = self.tiers.iter().map(|(tier, plan)| (Some(&**tier), &**plan));
        std::iter::once((None, &*self.standard)).chain(tiers)
    }
}

impl Plan {
    /// The size of the limit `limit` that `rule` makes.
    ///
    /// # Errors
    /// A gateway's share of it cannot be counted exactly.
    pub fn new(
        hasher: &IdentityHasher,
        limit: &str,
        quota: Quota,
        rule: Rule,
        division: Division,
    ) -> Result<Self, QuotaError> {
        let Division { gateways, dearest } = division;
        let share = rule.share(gateways, dearest).ok_or(QuotaError::Share { gateways })?;
        let bucket = Bucket::new(hasher, limit, &rule.shape());
        let id = hasher.hash(format!("{limit} {quota:?} {rule:?} {share:?}").as_bytes()).0 as u64;
        Ok(Plan { id, quota, rule, share, bucket })
    }

    /// The most that it admits in any window of its quota, however the requests come; for a token bucket the window is
    /// half open. Of requests in flight: the most at the same time.
    pub fn most_in_any_window(&self) -> u64 {
        let count = self.quota.count;
        match &self.rule {
            Rule::TokenBucket(bucket) => bucket.burst + count - 1,
            // All of one window at its end, all of the next at its beginning.
            Rule::FixedWindow(FixedWindow { start: Start::Aligned { .. } | Start::Calendar(_), .. }) => 2 * count,
            // The same, but one request is needed to open the first window.
            Rule::FixedWindow(FixedWindow { start: Start::FirstRequest, .. }) | Rule::SlidingWindow(_) => 2 * count - 1,
            Rule::SlidingBuckets(_) | Rule::SlidingLog(_) | Rule::Concurrency(_) => count,
        }
    }

    /// The most that it can admit within `wait` from an instant at which it admits nothing.
    pub fn most_within(&self, wait: Duration) -> u64 {
        match (&self.rule, self.quota.window_us) {
            (Rule::TokenBucket(_), Some(window)) => {
                let refilled = u128::from(self.quota.count) * wait.as_micros() / u128::from(window);
                u64::try_from(refilled).unwrap_or(u64::MAX).saturating_add(1)
            }
            // All of a window may come back at once.
            _ => self.most_in_any_window(),
        }
    }
}
