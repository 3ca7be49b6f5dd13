//! Other sizes of limits: proposed ones, and those that are tried to suggest one.

use std::sync::Arc;

use crate::limit::algorithm::Rule;
use crate::limit::algorithm::concurrency::Concurrency;
use crate::limit::plan::{LimitSpec, LimitVariant};
use crate::limit::quota::{Quota, QuotaError};
use crate::runtime::{CompiledConfig, CompiledLimit};

/// Leases of requests in flight are renewed until they end: in a log, they last as long as that. Ten years.
const LONG_LEASE: u64 = 3650 * 86_400 * 1_000_000;

/// Another size for a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// The limit.
    pub limit: String,
    /// Its quota, as it would stand in the configuration.
    pub quota: String,
    /// Its burst, if it is another one.
    pub burst: Option<u64>,
}

/// Why a limit cannot have a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SizeError {
    #[error("`{name}={quota}`: {error}")]
    Quota { name: String, quota: String, error: QuotaError },
    #[error("`{0}` has no burst: it goes with token-bucket only")]
    NoBurst(String),
}

/// The size that is proposed.
pub(super) fn proposed(
    runtime: &CompiledConfig,
    terms: &CompiledLimit,
    proposal: &Proposal,
) -> Result<Arc<LimitVariant>, SizeError> {
    let Proposal { limit: name, quota: text, burst } = proposal;
    let standard = &terms.limit.default_variant;
    let burst = match (&standard.rule, burst) {
        // What was written stays; what followed the quota still does.
        (Rule::TokenBucket(bucket), None) => Some(bucket.burst).filter(|burst| *burst != standard.quota.count),
        (Rule::TokenBucket(_), Some(burst)) => Some(*burst),
        (_, Some(_)) => return Err(SizeError::NoBurst(name.clone())),
        (_, None) => None,
    };
    let quota = standard.rule.parse_quota(text);
    let plan = quota.and_then(|quota| terms.limit.variant(&runtime.hasher, quota, burst));
    plan.map(Arc::new).map_err(|error| SizeError::Quota { name: name.clone(), quota: text.clone(), error })
}

/// The same with leases that do not end before their requests.
pub(super) fn unhurried(runtime: &CompiledConfig, limit: &LimitSpec, plan: Arc<LimitVariant>) -> Arc<LimitVariant> {
    let Rule::Concurrency(rule) = &plan.rule else { return plan };
    let rule = Rule::Concurrency(Concurrency { ttl: LONG_LEASE, ..*rule });
    let long = LimitVariant::new(&runtime.hasher, &limit.name, plan.quota, rule, limit.local_share);
    long.map_or(plan, Arc::new)
}

/// A limit whose size is `now` with another count and burst; none if it cannot have them.
pub(super) fn sized(
    runtime: &CompiledConfig,
    limit: &LimitSpec,
    now: Quota,
    count: u64,
    burst: Option<u64>,
) -> Option<Arc<LimitVariant>> {
    let resized = limit.variant(&runtime.hasher, Quota { count, ..now }, burst).ok()?;
    Some(unhurried(runtime, limit, Arc::new(resized)))
}
