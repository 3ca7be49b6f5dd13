//! Limits: named rules, each with one or more variants.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::limiter::algorithm::token_bucket::TokenBucket;
use crate::limiter::algorithm::{MAX_REQUEST_WEIGHT, Rule};
use crate::limiter::gateway_count::GatewayCount;
use crate::limiter::key::{IdentityHasher, StateName};
use crate::limiter::notify::Notify;
use crate::limiter::quota::{Quota, QuotaError};
use crate::limiter::usage::UsageDays;

/// The quota unit of limits that count requests (draft-ietf-httpapi-ratelimit-headers-11 §3.1.2).
pub const DEFAULT_UNIT: &str = "requests";

/// The quota unit of concurrency limits (draft-ietf-httpapi-ratelimit-headers-11 §3.1.2).
pub const CONCURRENT_REQUESTS: &str = "concurrent-requests";

/// A named limit with its variants, and its behavior when the store fails.
#[derive(Debug)]
pub struct LimitSpec {
    /// Name of the limit in the configuration.
    pub name: Box<str>,
    /// The variant for clients without a tier, and for clients whose tier has no variant of this limit.
    pub default_variant: Arc<LimitVariant>,
    /// The variants for consumers of a tier, by tier name.
    pub tiers: BTreeMap<Box<str>, Arc<LimitVariant>>,
    /// The behavior of the limit while the store is unavailable.
    pub on_store_error: OnStoreError,
    /// Whether this is a shadow limit. A shadow limit is checked and charged, but never denies a request and adds no
    /// response headers.
    pub shadow: bool,
    /// Whether response headers and bodies describe the limit. Denials of a limit that is not announced still have
    /// `Retry-After`.
    pub announce: bool,
    /// Quota unit in response headers: the name of what the quota counts, such as `requests`. The name consists of
    /// lowercase letters, digits and `-`.
    pub unit: Box<str>,
    /// Wait queue for requests that the limit would deny. If the policy is `None`, such requests are rejected at once.
    pub queue_policy: Option<QueuePolicy>,
    /// Maximum number of tokens that a gateway may prefetch for an identity with many requests. 0 disables prefetching.
    pub prefetch: u64,
    /// The calendar days for usage totals: the cost that is charged to each identity is summed up per day. `None`
    /// disables usage totals. Not available for concurrency limits.
    pub usage: Option<Arc<UsageDays>>,
    /// The thresholds at which an identity causes a quota event. The gateway sends the events; the library alone does
    /// not. `None` disables events. Not available for concurrency limits.
    pub notify: Option<Arc<Notify>>,
    /// Parameters of this gateway's local share while the store is down.
    pub local_share: LocalShare,
    /// Maximum [weight](Rule::weight) of a check of this limit with an override. See [`LimitSpec::bound_overrides`].
    pub max_override_weight: AtomicUsize,
}

/// One variant of a limit: a quota with the rules that enforce it.
#[derive(Debug)]
pub struct LimitVariant {
    /// Identifies the variant, also across configuration reloads: equal variants have equal ids.
    pub id: u64,
    /// The quota as configured. Clients see this quota in response headers.
    pub quota: Quota,
    /// The rule that the store applies.
    pub rule: Rule,
    /// The rules of this gateway's local share, which this process applies while the store is down.
    pub local_rules: LocalRules,
    /// The limit's part of the keys. Variants with the same algorithm and window share this key part, so that a
    /// consumer keeps its state when its tier changes.
    pub state_name: StateName,
}

/// Parameters of the local share of one gateway.
#[derive(Debug, Clone)]
pub struct LocalShare {
    /// Number of gateways that share the store.
    pub gateways: Arc<GatewayCount>,
    /// The largest cost that any route charges to the limit. A local share must have room for this cost.
    pub max_cost: u64,
}

impl Default for LocalShare {
    /// The default is one gateway, and requests with a cost of 1.
    fn default() -> Self {
        LocalShare { gateways: Arc::default(), max_cost: 1 }
    }
}

/// The rules of the local share of a variant, by number of gateways. Rules are never removed, so that charges can refer
/// to them. There are at most as many rules as there have been numbers of gateways.
#[derive(Debug)]
pub struct LocalRules {
    share: LocalShare,
    first: OnceLock<Box<LocalRule>>,
}

#[derive(Debug)]
struct LocalRule {
    gateway_count: u64,
    rule: Rule,
    next: OnceLock<Box<LocalRule>>,
}

impl LocalRules {
    /// Create the list, which is empty until the local share is used.
    pub fn new(share: LocalShare) -> Self {
        LocalRules { share, first: OnceLock::new() }
    }

    /// Return the rule of the local share of `rule` for the current number of gateways.
    fn current(&self, rule: &Rule) -> &Rule {
        let gateway_count = self.share.gateways.get();
        let add = || {
            let rule = rule.local_share(gateway_count, self.share.max_cost);
            Box::new(LocalRule { gateway_count, rule, next: OnceLock::new() })
        };
        let mut known = self.first.get_or_init(add);
        while known.gateway_count != gateway_count {
            known = known.next.get_or_init(add);
        }
        &known.rule
    }
}

/// Parameters of a wait queue for requests that would be denied.
#[derive(Debug, Clone, Copy)]
pub struct QueuePolicy {
    /// Queue timeout.
    pub max_wait: Duration,
    /// Maximum number of queued requests for one identity on one gateway.
    pub max_queue: usize,
}

/// Behavior of a limit while the store is unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStoreError {
    /// This gateway enforces its local share of the limit.
    Local,
    /// Fail open: the limit is not enforced.
    Allow,
    /// Fail closed: requests are rejected with 503.
    Deny,
}

impl OnStoreError {
    /// Return the word in the configuration.
    pub fn label(self) -> &'static str {
        match self {
            OnStoreError::Local => "local",
            OnStoreError::Allow => "allow",
            OnStoreError::Deny => "deny",
        }
    }
}

impl LimitSpec {
    /// Create a limit without tiers, wait queue and prefetching. The limit counts requests, denies requests over the
    /// quota, is announced in responses, and falls back to its local share if the store fails. To change these
    /// properties, set the other fields.
    ///
    /// `name` is part of keys and response headers. The name must have 1 to 64 ASCII letters, digits, `-`, `_` or `.`.
    /// `rule` must implement `quota`.
    pub fn new(hasher: &IdentityHasher, name: &str, quota: Quota, rule: Rule, local_share: LocalShare) -> Self {
        let unit = if rule.is_concurrency() { CONCURRENT_REQUESTS } else { DEFAULT_UNIT }.into();
        let default_variant = Arc::new(LimitVariant::new(hasher, name, quota, rule, local_share.clone()));
        LimitSpec {
            name: name.into(),
            default_variant,
            tiers: BTreeMap::new(),
            on_store_error: OnStoreError::Local,
            shadow: false,
            announce: true,
            unit,
            queue_policy: None,
            prefetch: 0,
            usage: None,
            notify: None,
            local_share,
            max_override_weight: AtomicUsize::new(MAX_REQUEST_WEIGHT),
        }
    }

    /// Create a limit with the default algorithm: a token bucket whose burst is the count of the quota. See
    /// [`LimitSpec::new`].
    ///
    /// # Errors
    /// The quota has no window of fixed length, or needs integers that are not exact in Lua.
    pub fn token_bucket(hasher: &IdentityHasher, name: &str, quota: Quota) -> Result<Self, QuotaError> {
        let rule = Rule::TokenBucket(TokenBucket::new(quota, quota.count)?);
        Ok(LimitSpec::new(hasher, name, quota, rule, LocalShare::default()))
    }

    /// Create another variant of the limit. Without `burst`, the burst is the count of the quota.
    ///
    /// # Errors
    /// The quota needs integers that are not exact in Lua, the algorithm does not support it, or its capacity is
    /// smaller than `prefetch`.
    pub fn variant(
        &self,
        hasher: &IdentityHasher,
        quota: Quota,
        burst: Option<u64>,
    ) -> Result<LimitVariant, QuotaError> {
        let variant = self.override_variant(hasher, quota, burst)?;
        self.validate_prefetch(&variant).map(|()| variant)
    }

    /// Create a variant for a temporary override by an administrator. The quota may be smaller than `prefetch`, in
    /// which case fewer tokens are prefetched.
    ///
    /// # Errors
    /// The quota needs integers that are not exact in Lua, the algorithm does not support it, or a check with this quota
    /// would occupy the store for too long.
    pub fn override_variant(
        &self,
        hasher: &IdentityHasher,
        quota: Quota,
        burst: Option<u64>,
    ) -> Result<LimitVariant, QuotaError> {
        let rule = self.default_variant.rule.with_quota(quota, burst)?;
        let variant = LimitVariant::new(hasher, &self.name, quota, rule, self.local_share.clone());
        match self.weight_of(&variant) <= self.max_override_weight.load(Ordering::Relaxed) {
            true => Ok(variant),
            false => Err(QuotaError::Weight { count: quota.count }),
        }
    }

    /// Bound the weight of overrides, because a request that is checked against this limit has room for at most this
    /// additional weight. An override is always allowed the weight of the heaviest variant.
    pub fn bound_overrides(&self, additional_weight: usize) {
        self.max_override_weight.fetch_min(self.max_weight() + additional_weight, Ordering::Relaxed);
    }

    /// Check that the capacity of a variant is at least `prefetch`.
    ///
    /// # Errors
    /// The capacity is smaller than `prefetch`.
    pub fn validate_prefetch(&self, variant: &LimitVariant) -> Result<(), QuotaError> {
        let prefetch = self.prefetch;
        let capacity = variant.rule.capacity();
        if prefetch > capacity { Err(QuotaError::Prefetch { prefetch, capacity }) } else { Ok(()) }
    }

    /// Return the maximum [weight](Rule::weight) of a check or refund of this limit, including its usage total.
    pub fn max_weight(&self) -> usize {
        self.variants().map(|(_, variant)| self.weight_of(variant)).max().unwrap_or(0)
    }

    fn weight_of(&self, variant: &LimitVariant) -> usize {
        variant.rule.weight(variant.rule.capacity()) + usize::from(self.usage.is_some())
    }

    /// Return whether the weight of a check depends on the quota, so that an override may change it.
    pub fn has_variable_weight(&self) -> bool {
        self.default_variant.rule.stores_each_token()
    }

    /// Return all variants with their tiers. The default variant comes first and has no tier.
    pub fn variants(&self) -> impl Iterator<Item = (Option<&str>, &LimitVariant)> {
        let tiers = self.tiers.iter().map(|(tier, variant)| (Some(&**tier), &**variant));
        std::iter::once((None, &*self.default_variant)).chain(tiers)
    }
}

/// Equal variants have equal ids.
impl PartialEq for LimitVariant {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for LimitVariant {}

impl LimitVariant {
    /// Create the variant of the limit `limit` with this rule.
    pub fn new(hasher: &IdentityHasher, limit: &str, quota: Quota, rule: Rule, local_share: LocalShare) -> Self {
        let state_name = StateName::new(hasher, limit, &rule.shape());
        let id = hasher.hash(format!("{limit} {quota:?} {rule:?}").as_bytes()).0 as u64;
        LimitVariant { id, quota, rule, local_rules: LocalRules::new(local_share), state_name }
    }

    /// Return the rule of this gateway's local share.
    pub fn local_rule(&self) -> &Rule {
        self.local_rules.current(&self.rule)
    }

    /// Return the maximum cost that can be admitted in any window of the quota's length ([`Rule::worst_case`]).
    pub fn worst_case(&self) -> u64 {
        self.rule.worst_case(self.quota.count)
    }

    /// Return the maximum cost that is admitted within `wait` after an instant at which nothing is admitted.
    pub fn max_admitted_in(&self, wait: Duration) -> u64 {
        match self.quota.window_us.filter(|_| self.rule.burst().is_some()) {
            Some(window) => {
                let refilled = u128::from(self.quota.count) * wait.as_micros() / u128::from(window);
                u64::try_from(refilled).unwrap_or(u64::MAX).saturating_add(1)
            }
            // Algorithms without a bucket may free all their tokens at once, for example when a window ends.
            None => self.worst_case(),
        }
    }
}
