//! Other sizes of limits: proposed ones, and those that are tried to suggest one.

use std::sync::Arc;

use crate::limit::algorithm::Rule;
use crate::limit::algorithm::concurrency::Concurrency;
use crate::limit::plan::{LimitSpec, LimitVariant};
use crate::limit::quota::{Quota, QuotaError};
use crate::runtime::{CompiledConfig, CompiledLimit};

/// Leases of requests in flight are renewed until they end: in a log, they last as long as that. Ten years.
const REPLAY_PERMIT_TTL_US: u64 = 3650 * 86_400 * 1_000_000;

/// Another size for a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaProposal {
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
pub enum ProposalError {
    #[error("`{name}={quota}`: {error}")]
    Quota { name: String, quota: String, error: QuotaError },
    #[error("`{0}` has no burst: it goes with token-bucket only")]
    NoBurst(String),
}

/// The size that is proposed.
pub(super) fn proposed_variant(
    config: &CompiledConfig,
    compiled: &CompiledLimit,
    proposal: &QuotaProposal,
) -> Result<Arc<LimitVariant>, ProposalError> {
    let QuotaProposal { limit: name, quota: text, burst } = proposal;
    let standard = &compiled.limit.default_variant;
    let burst = match (&standard.rule, burst) {
        // What was written stays; what followed the quota still does.
        (Rule::TokenBucket(bucket), None) => Some(bucket.burst).filter(|burst| *burst != standard.quota.count),
        (Rule::TokenBucket(_), Some(burst)) => Some(*burst),
        (_, Some(_)) => return Err(ProposalError::NoBurst(name.clone())),
        (_, None) => None,
    };
    let quota = standard.rule.parse_quota(text);
    let variant = quota.and_then(|quota| compiled.limit.variant(&config.hasher, quota, burst));
    variant.map(Arc::new).map_err(|error| ProposalError::Quota { name: name.clone(), quota: text.clone(), error })
}

/// The same with leases that do not end before their requests.
pub(super) fn with_unbounded_permit_ttl(
    config: &CompiledConfig,
    limit: &LimitSpec,
    variant: Arc<LimitVariant>,
) -> Arc<LimitVariant> {
    let Rule::Concurrency(rule) = &variant.rule else { return variant };
    let rule = Rule::Concurrency(Concurrency { ttl: REPLAY_PERMIT_TTL_US, ..*rule });
    let long_variant = LimitVariant::new(&config.hasher, &limit.name, variant.quota, rule, limit.local_share);
    long_variant.map_or(variant, Arc::new)
}

/// A limit whose size is `now` with another count and burst; none if it cannot have them.
pub(super) fn resized_variant(
    config: &CompiledConfig,
    limit: &LimitSpec,
    quota: Quota,
    count: u64,
    burst: Option<u64>,
) -> Option<Arc<LimitVariant>> {
    let variant = limit.variant(&config.hasher, Quota { count, ..quota }, burst).ok()?;
    Some(with_unbounded_permit_ttl(config, limit, Arc::new(variant)))
}
