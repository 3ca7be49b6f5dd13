//! The smallest quota that denies fewer than a share of the requests of a log, found by replaying it.

use std::sync::Arc;

use crate::limiter::algorithm::Rule;
use crate::limiter::algorithm::concurrency::Concurrency;
use crate::limiter::quota::{Quota, QuotaError};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::snapshot::{CompiledConfig, CompiledLimit};
use crate::tools::replay::resolve::{LineResolver, ReplayCheck, ReplayConfig, ReplayLimit};
use crate::tools::replay::simulator::{LimitStats, ReplayDecision, RequestMeta, Simulation};

/// The requests of a log that limits had a say in.
#[derive(Debug, Default)]
pub struct Recording {
    /// Each with the place behind its last [`Asked`].
    pub requests: Vec<(RequestMeta, usize)>,
    /// What limits were asked.
    pub checks: Vec<ReplayCheck>,
}

/// A size that would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suggestion {
    /// No smaller one does. Other limits stay as they are.
    Smallest {
        /// Its quota.
        quota: String,
        /// Its burst, where that is another number.
        burst: Option<u64>,
        /// What it denies.
        denied: u64,
    },
    /// However large it is, it denies too many.
    None,
}

/// Counts up to this are tried one by one; larger ones have three digits.
const MAX_EXACT_COUNT: u64 = 1000;

/// The number of the largest count: beyond that none can be counted exactly.
const MAX_COUNT_INDEX: u64 = MAX_EXACT_COUNT + 900 * 13;

/// The count with this number: 1, 2, … 999, 1000, 1010, … 9990, 10000, 10100, …
fn count_at(number: u64) -> u64 {
    match number.checked_sub(MAX_EXACT_COUNT) {
        None => number,
        Some(beyond) => (100 + beyond % 900) * 10_u64.pow((beyond / 900) as u32 + 1),
    }
}

/// The number of the smallest such count that is at least this one.
fn index_of_count(min_count: u64) -> u64 {
    let (mut below, mut above) = (0, MAX_COUNT_INDEX);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if count_at(middle) >= min_count { above = middle } else { below = middle }
    }
    above
}

impl Recording {
    /// The smallest quota of a subject that denies fewer than `target` of those who asked, to three digits.
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

    /// The subject in another size, its burst in proportion; none if it cannot have it.
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

    /// What a subject denies in this size; none if that is more than `most`.
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

// Other sizes of limits: proposed ones, and those that are tried to suggest one.

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
