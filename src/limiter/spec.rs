//! Limits: named rules, each in one or more sizes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::limiter::algorithm::Rule;
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::key::{IdentityHasher, StateName};
use crate::limiter::quota::{Quota, QuotaError};

/// A named rule: how much, and what happens when the store fails.
#[derive(Debug)]
pub struct LimitSpec {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// Its size for everybody who has no other.
    pub default_variant: Arc<LimitVariant>,
    /// Its size for the consumers of a tier.
    pub tiers: BTreeMap<Box<str>, Arc<LimitVariant>>,
    /// What happens to requests while the store cannot answer.
    pub on_store_error: OnStoreError,
    /// Decides and counts, but never denies, and tells callers nothing.
    pub shadow: bool,
    /// Requests that it would deny may wait for their turn.
    pub queue_policy: Option<QueuePolicy>,
    /// Units that a gateway may take ahead for an identity that is hot.
    pub prefetch: u64,
    /// How it is divided when the store is down.
    pub local_share: LocalShare,
}

/// One size of a limit.
#[derive(Debug, PartialEq, Eq)]
pub struct LimitVariant {
    /// Tells it from every other one, also of configurations before and after: what is the same has the same.
    pub id: u64,
    /// As written: what callers are told.
    pub quota: Quota,
    /// What decides.
    pub rule: Rule,
    /// What decides in this process alone while the store is down: this gateway's share.
    pub local_rule: Rule,
    /// Its part of the keys; sizes of one shape share it, so that a consumer's state moves with it to another tier.
    pub state_name: StateName,
}

/// What the share of one gateway depends on.
#[derive(Debug, Clone, Copy)]
pub struct LocalShare {
    /// Gateways that share the store.
    pub gateway_count: u64,
    /// The largest cost at which the limit is used: a share must have room for it.
    pub max_cost: u64,
}

/// Waiting instead of being denied.
#[derive(Debug, Clone, Copy)]
pub struct QueuePolicy {
    /// No longer than this.
    pub max_wait: Duration,
    /// So many at a time, for one identity on one gateway.
    pub max_queue: usize,
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

impl LimitSpec {
    /// Another size of the limit; without a burst of its own it is the quota's count.
    ///
    /// # Errors
    /// The size cannot be counted exactly, the algorithm cannot have it, or it is smaller than what is taken ahead.
    pub fn variant(
        &self,
        hasher: &IdentityHasher,
        quota: Quota,
        burst: Option<u64>,
    ) -> Result<LimitVariant, QuotaError> {
        let variant = self.override_variant(hasher, quota, burst)?;
        self.validate_prefetch(&variant).map(|()| variant)
    }

    /// The same for a time, by an operator's word: it may be smaller than what is taken ahead, of which then less is had.
    ///
    /// # Errors
    /// The size cannot be counted exactly, or the algorithm cannot have it.
    pub fn override_variant(
        &self,
        hasher: &IdentityHasher,
        quota: Quota,
        burst: Option<u64>,
    ) -> Result<LimitVariant, QuotaError> {
        LimitVariant::new(
            hasher,
            &self.name,
            quota,
            self.default_variant.rule.with_quota(quota, burst)?,
            self.local_share,
        )
    }

    /// Sees that a size of the limit has room for what is taken ahead.
    ///
    /// # Errors
    /// It is smaller.
    pub fn validate_prefetch(&self, variant: &LimitVariant) -> Result<(), QuotaError> {
        let (prefetch, capacity) = (self.prefetch, variant.rule.capacity());
        if prefetch > capacity { Err(QuotaError::Prefetch { prefetch, capacity }) } else { Ok(()) }
    }

    /// All of its sizes, with the tiers that they are for.
    pub fn variants(&self) -> impl Iterator<Item = (Option<&str>, &LimitVariant)> {
        let tiers = self.tiers.iter().map(|(tier, variant)| (Some(&**tier), &**variant));
        std::iter::once((None, &*self.default_variant)).chain(tiers)
    }
}

impl LimitVariant {
    /// The size of the limit `limit` that `rule` makes.
    ///
    /// # Errors
    /// A gateway's share of it cannot be counted exactly.
    pub fn new(
        hasher: &IdentityHasher,
        limit: &str,
        quota: Quota,
        rule: Rule,
        local_share: LocalShare,
    ) -> Result<Self, QuotaError> {
        let LocalShare { gateway_count, max_cost } = local_share;
        let local_rule = rule.local_share(gateway_count, max_cost).ok_or(QuotaError::LocalShare { gateway_count })?;
        let state_name = StateName::new(hasher, limit, &rule.shape());
        let id = hasher.hash(format!("{limit} {quota:?} {rule:?} {local_rule:?}").as_bytes()).0 as u64;
        Ok(LimitVariant { id, quota, rule, local_rule, state_name })
    }

    /// The most that it admits in any window of its quota, however the requests come; for a token bucket the window is
    /// half open. Of requests in flight: the most at the same time.
    pub fn worst_case(&self) -> u64 {
        let count = self.quota.count;
        match &self.rule {
            Rule::TokenBucket(bucket) => bucket.burst + count - 1,
            // All of one window at its end, all of the next at its beginning.
            Rule::FixedWindow(FixedWindow {
                start: WindowStart::Aligned { .. } | WindowStart::Calendar(_), ..
            }) => 2 * count,
            // The same, but one request is needed to open the first window.
            Rule::FixedWindow(FixedWindow { start: WindowStart::FirstRequest, .. }) | Rule::SlidingWindow(_) => {
                2 * count - 1
            }
            Rule::SlidingBuckets(_) | Rule::SlidingLog(_) | Rule::Concurrency(_) => count,
        }
    }

    /// The most that it can admit within `wait` from an instant at which it admits nothing.
    pub fn max_admitted_in(&self, wait: Duration) -> u64 {
        match (&self.rule, self.quota.window_us) {
            (Rule::TokenBucket(_), Some(window)) => {
                let refilled = u128::from(self.quota.count) * wait.as_micros() / u128::from(window);
                u64::try_from(refilled).unwrap_or(u64::MAX).saturating_add(1)
            }
            // All of a window may come back at once.
            _ => self.worst_case(),
        }
    }
}
