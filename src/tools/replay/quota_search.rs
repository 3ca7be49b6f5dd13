//! The quota search replays recorded requests with different quotas, to find the smallest quota that denies less than a
//! given share.

use std::sync::Arc;

use crate::limiter::algorithm::Rule;
use crate::limiter::algorithm::concurrency::Concurrency;
use crate::limiter::quota::{Quota, QuotaError};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::snapshot::{CompiledConfig, CompiledLimit};
use crate::tools::replay::resolve::{LineResolver, ReplayCheck, ReplayConfig, ReplayLimit};
use crate::tools::replay::simulator::{LimitStats, ReplayDecision, RequestMeta, Simulation};

/// The requests of the logs that limits apply to, recorded for the search.
#[derive(Debug, Default)]
pub struct Recording {
    /// For each request, the end index of its checks in `checks`.
    pub requests: Vec<(RequestMeta, usize)>,
    /// The checks of all limits, for all requests of the logs.
    pub checks: Vec<ReplayCheck>,
}

/// The result of the search for a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suggestion {
    /// The smallest quota below the target, with all other limits unchanged.
    Smallest {
        /// The quota in the syntax of the configuration.
        quota: String,
        /// The burst, if it differs from the count of the quota.
        burst: Option<u64>,
        /// Number of requests that the quota denies.
        denied: u64,
    },
    /// Every quota in the same time unit denies at least the target share of the requests.
    None,
}

/// The search tries counts below this number exactly. Larger counts are tried with three significant digits.
const MAX_EXACT_COUNT: u64 = 1000;

/// The index of the largest count to try. Larger counts cannot be represented exactly.
const MAX_COUNT_INDEX: u64 = MAX_EXACT_COUNT + 900 * 13;

/// Return the count with this index: 1, 2, … 999, 1000, 1010, … 9990, 10000, 10100, …
fn count_at(number: u64) -> u64 {
    match number.checked_sub(MAX_EXACT_COUNT) {
        None => number,
        Some(beyond) => (100 + beyond % 900) * 10_u64.pow((beyond / 900) as u32 + 1),
    }
}

/// Return the index of the smallest count in the list of candidates that is at least `min_count`.
fn index_of_count(min_count: u64) -> u64 {
    let (mut below, mut above) = (0, MAX_COUNT_INDEX);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if count_at(middle) >= min_count { above = middle } else { below = middle }
    }
    above
}

impl Recording {
    /// Find the smallest quota of a limit that denies less than the share `target` of its requests, with three
    /// significant digits. The search is exponential from the configured quota, and then binary.
    pub(super) fn suggest(
        &self,
        config: &ReplayConfig,
        resolver: &LineResolver<'_>,
        limit_index: usize,
        stats: &LimitStats,
        target: f64,
    ) -> Suggestion {
        let max_denied = ((target * stats.requests as f64).ceil() as u64).saturating_sub(1);
        let try_index = |number| {
            let variant = Self::variant_with_count(config, limit_index, count_at(number))?;
            let denied = self.count_denied(config, resolver, limit_index, variant.clone(), max_denied)?;
            Some((variant, denied))
        };
        let configured_index = index_of_count(config.limits[limit_index].variant.quota.count);
        let (mut below, mut above) = (0, configured_index);
        let mut best = if stats.denied <= max_denied { try_index(configured_index) } else { None };
        let mut step = 1;
        while best.is_none() {
            if above >= MAX_COUNT_INDEX {
                return Suggestion::None;
            }
            below = above;
            above = (above + step).min(MAX_COUNT_INDEX);
            step *= 2;
            best = try_index(above);
        }
        while above - below > 1 {
            let middle = (below + above) / 2;
            match try_index(middle) {
                Some(smaller) => (best, above) = (Some(smaller), middle),
                None => below = middle,
            }
        }
        let Some((variant, denied)) = best else { return Suggestion::None };
        let burst = match &variant.rule {
            Rule::TokenBucket(bucket) => Some(bucket.burst).filter(|burst| *burst != variant.quota.count),
            _ => None,
        };
        Suggestion::Smallest { quota: variant.quota.to_string(), burst, denied }
    }

    /// Return a variant of the limit with another count, and with a burst in proportion to it. Return `None` if the
    /// variant is invalid.
    fn variant_with_count(config: &ReplayConfig, limit_index: usize, count: u64) -> Option<Arc<LimitVariant>> {
        let ReplayLimit { limit, variant: configured, .. } = &config.limits[limit_index];
        let burst = match &configured.rule {
            Rule::TokenBucket(bucket) => {
                let burst = u128::from(bucket.burst) * u128::from(count);
                u64::try_from(burst.div_ceil(u128::from(configured.quota.count))).ok()
            }
            _ => None,
        };
        resized_variant(&config.compiled, limit, configured.quota, count, burst)
    }

    /// Count the requests that a limit denies with this variant. Return `None` if more than `max_denied` requests are
    /// denied.
    fn count_denied(
        &self,
        config: &ReplayConfig,
        resolver: &LineResolver<'_>,
        limit_index: usize,
        variant: Arc<LimitVariant>,
        max_denied: u64,
    ) -> Option<u64> {
        let mut simulation = Simulation::new(config);
        simulation.add_variants(&resolver.variants);
        simulation.set_default_variant(limit_index, variant);
        let (mut denied, mut start) = (0, 0);
        for (meta, end) in &self.requests {
            let checks = &self.checks[start..*end];
            start = *end;
            let decisions = simulation.decide(*meta, checks, &resolver.seen);
            let of_limit =
                checks.iter().zip(decisions).filter(|(check, _)| usize::from(check.limit_index) == limit_index);
            denied += of_limit.filter(|(_, decision)| **decision == ReplayDecision::Denied).count() as u64;
            if denied > max_denied {
                return None;
            }
        }
        Some(denied)
    }
}

// Variants of limits, which come from proposed quotas and from the search.

/// Permit TTL in a replay: ten years. The gateway renews permits until a request ends, so permits must not expire.
const REPLAY_PERMIT_TTL_US: u64 = 3650 * 86_400 * 1_000_000;

/// A quota that the user proposes for a limit (`--limit`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaProposal {
    /// The name of the limit.
    pub limit: String,
    /// The quota in the syntax of the configuration.
    pub quota: String,
    /// The proposed burst. `None` means the configured burst, or the count of the quota if no burst is configured.
    pub burst: Option<u64>,
}

/// The reason why a proposed quota is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposalError {
    /// The quota is not valid syntax, or does not fit the algorithm.
    #[error("`{name}={quota}`: {error}")]
    Quota {
        /// The name of the limit.
        name: String,
        /// The proposed quota.
        quota: String,
        /// The cause of the error.
        error: QuotaError,
    },
    /// A burst was given for a limit that is not a token bucket.
    #[error("`{0}` has no burst: only token-bucket limits have one")]
    NoBurst(String),
}

/// Build the variant of a limit for a proposed quota.
pub(super) fn proposed_variant(
    config: &CompiledConfig,
    compiled: &CompiledLimit,
    proposal: &QuotaProposal,
) -> Result<Arc<LimitVariant>, ProposalError> {
    let QuotaProposal { limit: name, quota: text, burst } = proposal;
    let standard = &compiled.limit.default_variant;
    let burst = match (&standard.rule, burst) {
        // Keep a configured burst, unless it equals the count of the configured quota: it then follows the new quota.
        (Rule::TokenBucket(bucket), None) => Some(bucket.burst).filter(|burst| *burst != standard.quota.count),
        (Rule::TokenBucket(_), Some(burst)) => Some(*burst),
        (_, Some(_)) => return Err(ProposalError::NoBurst(name.clone())),
        (_, None) => None,
    };
    let quota = standard.rule.parse_quota(text);
    let variant = quota.and_then(|quota| compiled.limit.variant(&config.hasher, quota, burst));
    variant.map(Arc::new).map_err(|error| ProposalError::Quota { name: name.clone(), quota: text.clone(), error })
}

/// Return the variant with a permit TTL that no request exceeds. A variant that is not a concurrency limit stays
/// unchanged.
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

/// Build a variant with the window of `quota`, another count and another burst. Return `None` if the variant is
/// invalid.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_at_has_three_significant_digits() {
        for (index, expected) in [(1, 1), (999, 999), (1000, 1000), (1001, 1010), (1899, 9990), (1900, 10_000)] {
            assert_eq!(count_at(index), expected);
            assert_eq!(index_of_count(expected), index, "{expected}");
        }
        assert_eq!(count_at(index_of_count(1234)), 1240);
        assert!((1..MAX_COUNT_INDEX).all(|number| count_at(number) < count_at(number + 1)));
        assert!(count_at(MAX_COUNT_INDEX) < crate::limiter::quota::EXACT_INTEGER_LIMIT * 2);
    }
}
