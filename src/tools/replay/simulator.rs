//! The simulation checks the limits of logged requests in virtual time (the times in the log), with the gateway's
//! memory store and algorithms. The quota search repeats the simulation with other quotas.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use crate::clock::Clock;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::{Identity, Key};
use crate::limiter::memory::MemoryStore;
use crate::limiter::quota::{Quota, QuotaError};
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Charge, ChargeMode, Operation};
use crate::snapshot::CompiledConfig;
use crate::snapshot::limits::CompiledLimit;
use crate::snapshot::limits::invalid_quota_hint;
use crate::tools::replay::resolve::{LineResolver, ReplayCheck, ReplayConfig, ReplayLimit, SeenIdentities};

/// Capacity of the memory store, so large that the store evicts no state.
const MAX_STATES: usize = 1 << 40;

/// The decision of one limit for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayDecision {
    /// The limit allowed the request.
    Allowed,
    /// The limit denied the request, or would have denied it in shadow mode.
    Denied,
    /// Another limit denied the request, so this limit was not charged.
    DeniedByOther,
}

/// The time, duration and status of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestMeta {
    /// Start of the request, µs since the Unix epoch.
    pub time_us: u64,
    /// Duration of the request in µs, or 0 if it is unknown.
    pub duration_us: u64,
    /// The status in the log, or 0 if it is unknown.
    pub status: u16,
}

/// A store operation that the gateway would run at the end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Scheduled {
    due_at_us: u64,
    /// Sequence number of the request. Operations that are due at the same time run in the order of their sequence
    /// numbers.
    sequence: u64,
    limit_index: u16,
    variant_index: u16,
    identity: u128,
    cost: u64,
    /// The permit id, if the algorithm is concurrency; otherwise 0.
    permit_id: u64,
    kind: ScheduledKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ScheduledKind {
    Release,
    Charge,
    Refund { charged_at: u64, debt_before_us: u64 },
}

/// One pass over the requests of a log.
#[derive(Debug)]
pub struct Simulation<'a> {
    config: &'a ReplayConfig,
    variants: Vec<Vec<Arc<LimitVariant>>>,
    clock: Clock,
    store: MemoryStore,
    now_us: u64,
    sequence: u64,
    scheduled: BinaryHeap<Reverse<Scheduled>>,
    decisions: Vec<ReplayDecision>,
}

impl<'a> Simulation<'a> {
    /// Create a simulation with empty counters.
    pub fn new(config: &'a ReplayConfig) -> Self {
        let clock = Clock::manual(0);
        let store = MemoryStore::new(MAX_STATES, clock.clone());
        let variants = config.limits.iter().map(|_| Vec::new()).collect();
        Simulation {
            config,
            variants,
            clock,
            store,
            now_us: 0,
            sequence: 0,
            scheduled: BinaryHeap::new(),
            decisions: Vec::new(),
        }
    }

    /// Append the variants that the resolver has found since the last call. The first variant of each limit is its
    /// default.
    pub fn add_variants(&mut self, variants: &[Vec<Arc<LimitVariant>>]) {
        for (own_variants, all_variants) in self.variants.iter_mut().zip(variants) {
            own_variants.extend_from_slice(&all_variants[own_variants.len().min(all_variants.len())..]);
        }
    }

    /// Replace the default variant of a limit.
    pub fn set_default_variant(&mut self, limit_index: usize, variant: Arc<LimitVariant>) {
        self.variants[limit_index][0] = variant;
    }

    /// Check the limits of a request. If the request is earlier than the current virtual time, use the current virtual
    /// time.
    pub fn decide(
        &mut self,
        meta: RequestMeta,
        replay_checks: &[ReplayCheck],
        seen: &[SeenIdentities],
    ) -> &[ReplayDecision] {
        let now_us = self.now_us.max(meta.time_us);
        self.run_scheduled(now_us);
        self.advance_clock(now_us);
        self.sequence += 1;
        // A permit id is `first_permit_id` plus the index of the check. Reserve the lowest 8 bits for this index.
        let first_permit_id = self.sequence << 8;
        let checks: Vec<_> = replay_checks
            .iter()
            .enumerate()
            .map(|(limit_index, replay_check)| {
                let subject = usize::from(replay_check.limit_index);
                LimitCheck {
                    limit_index,
                    limit: &self.config.limits[subject].limit,
                    variant: &self.variants[subject][usize::from(replay_check.variant_index)],
                    identity: seen[subject].identities[replay_check.identity_index as usize],
                    cost: replay_check.cost,
                    deferred: self.config.limits[subject].deferred,
                }
            })
            .collect();
        let charges = checks.iter().map(|check| check.charge(DecidedBy::Store, first_permit_id));
        // Do not count usage totals, because they do not influence decisions.
        let charges: Vec<_> = charges.map(|charge| Charge { usage: None, ..charge }).collect();
        let verdict = self.store.decide(Operation::Check, &charges);
        let decision = Decision::new(verdict, DecidedBy::Store, checks.iter());
        self.decisions.clear();
        for check in &checks {
            let is_denied = decision.violated().any(|result| result.limit_index == check.limit_index)
                || decision.is_shadow_denied(check.limit);
            let replay_decision = match (is_denied, decision.admitted) {
                (true, _) => ReplayDecision::Denied,
                (false, true) => ReplayDecision::Allowed,
                (false, false) => ReplayDecision::DeniedByOther,
            };
            self.decisions.push(replay_decision);
            if replay_decision != ReplayDecision::Allowed
                || (check.deferred == Deferred::Nothing && !check.is_concurrency())
            {
                continue;
            }
            let kind = match check.deferred {
                _ if check.is_concurrency() => ScheduledKind::Release,
                Deferred::Charge => ScheduledKind::Charge,
                Deferred::Refund | Deferred::Settle | Deferred::Nothing => {
                    let mut deferred_charges = decision.debts_before_us.iter();
                    let deferred_charge = deferred_charges.find(|(place, _)| *place == check.limit_index);
                    ScheduledKind::Refund {
                        charged_at: now_us,
                        debt_before_us: deferred_charge.map_or(0, |(_, us)| *us),
                    }
                }
            };
            let replay_check = &replay_checks[check.limit_index];
            let is_refunded = self.config.limits[usize::from(replay_check.limit_index)].is_refunded(meta.status);
            if matches!(kind, ScheduledKind::Refund { .. }) && !is_refunded {
                continue;
            }
            let is_release = kind == ScheduledKind::Release;
            self.scheduled.push(Reverse(Scheduled {
                due_at_us: now_us + meta.duration_us,
                sequence: self.sequence,
                limit_index: replay_check.limit_index,
                variant_index: replay_check.variant_index,
                identity: check.identity.0,
                cost: if is_release { 1 } else { check.cost },
                permit_id: if is_release { check.permit_id(first_permit_id) } else { 0 },
                kind,
            }));
        }
        &self.decisions
    }

    /// Run the operations that are due at `until_us` or earlier, each at its scheduled time.
    fn run_scheduled(&mut self, until_us: u64) {
        while let Some(Reverse(entry)) =
            self.scheduled.peek().copied().filter(|Reverse(entry)| entry.due_at_us <= until_us)
        {
            self.scheduled.pop();
            self.advance_clock(self.now_us.max(entry.due_at_us));
            let variant = &self.variants[usize::from(entry.limit_index)][usize::from(entry.variant_index)];
            let charge = Charge {
                key: Key { identity: Identity(entry.identity), state_name: &variant.state_name },
                rule: &variant.rule,
                cost: entry.cost,
                mode: ChargeMode::Enforced,
                permit_id: entry.permit_id,
                debt_before_us: if let ScheduledKind::Refund { debt_before_us, .. } = entry.kind {
                    debt_before_us
                } else {
                    0
                },
                usage: None,
            };
            let operation = match entry.kind {
                ScheduledKind::Release => Operation::Refund { charged_at: 0 },
                ScheduledKind::Charge => Operation::Charge,
                ScheduledKind::Refund { charged_at, .. } => Operation::Refund { charged_at },
            };
            self.store.decide(operation, &[charge]);
        }
    }

    fn advance_clock(&mut self, now_us: u64) {
        self.now_us = now_us;
        self.clock.set(now_us);
    }
}

// Statistics about the decisions of a limit.

/// The possible lengths of a step of a time series, in seconds. Each length is a multiple of the previous length.
const STEP_SECONDS: [u64; 13] = [1, 5, 15, 60, 300, 900, 3600, 10_800, 21_600, 43_200, 86_400, 604_800, 31_449_600];

/// Maximum number of steps in a time series.
const MAX_STEPS: u64 = 120;

/// Maximum number of identities in the list of identities with the most denials.
pub const MAX_TOP_DENIED: usize = 10;

/// Decisions of a limit, counted in total, by identity and over time.
#[derive(Debug, Clone, Default)]
pub struct LimitStats {
    /// Number of requests that this limit checked.
    pub requests: u64,
    /// Number of requests that this limit allowed.
    pub allowed: u64,
    /// Number of requests that this limit denied.
    pub denied: u64,
    /// Number of requests that other limits denied, but not this limit.
    pub denied_by_others: u64,
    /// Numbers of requests and denials, indexed by identity.
    by_identity: Vec<(u32, u32)>,
    /// Numbers of requests and denials over time.
    pub series: TimeSeries,
}

/// Numbers of requests and denials in each step of time. If there are more than `MAX_STEPS` steps, they are merged into
/// longer steps.
#[derive(Debug, Clone, Default)]
pub struct TimeSeries {
    step_index: usize,
    steps: BTreeMap<u64, (u64, u64)>,
}

impl LimitStats {
    /// Count a decision.
    pub fn record(&mut self, time_us: u64, check: ReplayCheck, decision: ReplayDecision) {
        self.requests += 1;
        let counter = match decision {
            ReplayDecision::Allowed => &mut self.allowed,
            ReplayDecision::Denied => &mut self.denied,
            ReplayDecision::DeniedByOther => &mut self.denied_by_others,
        };
        *counter += 1;
        let identity_index = check.identity_index as usize;
        if identity_index >= self.by_identity.len() {
            self.by_identity.resize(identity_index + 1, (0, 0));
        }
        let denied = decision == ReplayDecision::Denied;
        self.by_identity[identity_index].0 = self.by_identity[identity_index].0.saturating_add(1);
        self.by_identity[identity_index].1 = self.by_identity[identity_index].1.saturating_add(u32::from(denied));
        self.series.record(time_us / 1_000_000, denied);
    }

    /// Return the number of identities with requests.
    pub fn identities(&self) -> usize {
        self.by_identity.iter().filter(|(requests, _)| *requests > 0).count()
    }

    /// Return the number of identities with denials.
    pub fn denied_identities(&self) -> usize {
        self.by_identity.iter().filter(|(_, denied)| *denied > 0).count()
    }

    /// Return the identities with the most denials: label, requests, denials.
    pub fn top_denied(&self, seen: &SeenIdentities) -> Vec<(String, u32, u32)> {
        let mut indices: Vec<_> = (0..self.by_identity.len()).filter(|index| self.by_identity[*index].1 > 0).collect();
        indices.sort_by(|left, right| {
            let order = self.by_identity[*right].1.cmp(&self.by_identity[*left].1);
            order.then_with(|| seen.labels[*left].cmp(&seen.labels[*right]))
        });
        indices.truncate(MAX_TOP_DENIED);
        let to_row =
            |index: usize| (seen.labels[index].to_string(), self.by_identity[index].0, self.by_identity[index].1);
        indices.into_iter().map(to_row).collect()
    }
}

impl TimeSeries {
    fn record(&mut self, second: u64, is_denied: bool) {
        let step = self.steps.entry(second / STEP_SECONDS[self.step_index]).or_default();
        *step = (step.0 + 1, step.1 + u64::from(is_denied));
        while self.is_too_long() {
            self.step_index += 1;
            let factor = STEP_SECONDS[self.step_index] / STEP_SECONDS[self.step_index - 1];
            let mut wider: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
            for (step, (requests, denied)) in std::mem::take(&mut self.steps) {
                let sum = wider.entry(step / factor).or_default();
                *sum = (sum.0 + requests, sum.1 + denied);
            }
            self.steps = wider;
        }
    }

    fn is_too_long(&self) -> bool {
        let ends = self.steps.first_key_value().zip(self.steps.last_key_value());
        self.step_index + 1 < STEP_SECONDS.len()
            && ends.is_some_and(|((first, _), (last, _))| last - first >= MAX_STEPS)
    }

    /// Return the length of a step in seconds.
    pub fn step_seconds(&self) -> u64 {
        STEP_SECONDS[self.step_index]
    }

    /// Return all steps from the first to the last. Each element has the start of the step in seconds since the Unix
    /// epoch, the number of requests and the number of denials.
    pub fn points(&self) -> Vec<(u64, u64, u64)> {
        let ends = self.steps.first_key_value().zip(self.steps.last_key_value());
        let Some(((first, _), (last, _))) = ends else { return Vec::new() };
        // Steps of the greatest length cannot be merged. Limit their number, because a log with wrong times may span
        // centuries.
        let steps = (*first..=*last).take(2 * MAX_STEPS as usize);
        let point = |step: u64| {
            let (requests, denied) = self.steps.get(&step).copied().unwrap_or_default();
            (step * self.step_seconds(), requests, denied)
        };
        steps.map(point).collect()
    }
}

// === Quota search: the smallest quota that denies less than a given share ===

/// The requests to which limits apply, recorded for the search.
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
    /// The smallest quota that denies less than the target share, with all other limits unchanged.
    Smallest {
        /// The quota in the syntax of the configuration.
        quota: String,
        /// The burst, if it differs from the number in the quota.
        burst: Option<u64>,
        /// Number of requests that the quota denies.
        denied: u64,
    },
    /// No quota was found: with the configured window, every quota denies the target share of the requests or more.
    None,
}

/// The search tries every count (the number in a quota) below this value. Above it, the search tries only counts with
/// three significant digits.
const MAX_EXACT_COUNT: u64 = 1000;

/// The largest index that the search passes to [`count_at`]. The counts after it cannot be represented exactly.
const MAX_COUNT_INDEX: u64 = MAX_EXACT_COUNT + 900 * 13;

/// Return the count with this index: 1, 2, … 999, 1000, 1010, … 9990, 10000, 10100, …
fn count_at(number: u64) -> u64 {
    match number.checked_sub(MAX_EXACT_COUNT) {
        None => number,
        Some(beyond) => (100 + beyond % 900) * 10_u64.pow((beyond / 900) as u32 + 1),
    }
}

/// Return the index of the smallest count that is at least `min_count`. `count_at` defines the order of counts.
fn index_of_count(min_count: u64) -> u64 {
    let mut below = 0;
    let mut above = MAX_COUNT_INDEX;
    while above - below > 1 {
        let middle = (below + above) / 2;
        if count_at(middle) >= min_count { above = middle } else { below = middle }
    }
    above
}

impl Recording {
    /// Find the smallest quota of a limit that denies less than the share `target` of its requests, among the counts of
    /// [`count_at`]. If the configured quota denies this share or more, increase the index of its count by 1, 2, 4 and
    /// so on, until a quota denies less. Then find the smallest such quota by binary search.
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
        let mut below = 0;
        let mut above = configured_index;
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
        let burst = variant.rule.burst().filter(|burst| *burst != variant.quota.count);
        Suggestion::Smallest { quota: variant.quota.to_string(), burst, denied }
    }

    /// Return a variant of the limit with another count, and with a burst that has the configured ratio to the count.
    /// Return `None` if the variant is invalid.
    fn variant_with_count(config: &ReplayConfig, limit_index: usize, count: u64) -> Option<Arc<LimitVariant>> {
        let ReplayLimit { limit, variant: configured, .. } = &config.limits[limit_index];
        let burst = configured.rule.burst().and_then(|burst| {
            let scaled = u128::from(burst) * u128::from(count);
            u64::try_from(scaled.div_ceil(u128::from(configured.quota.count))).ok()
        });
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
        let mut denied = 0;
        let mut start = 0;
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

/// Permit TTL in a replay: ten years. The gateway renews a permit until the request ends. The replay does not renew
/// permits, so they must not expire.
const REPLAY_PERMIT_TTL_US: u64 = 3650 * 86_400 * 1_000_000;

/// A quota that the user proposes for a limit (`--limit`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaProposal {
    /// The name of the limit.
    pub limit: String,
    /// The quota in the syntax of the configuration.
    pub quota: String,
    /// The proposed burst. `None` means the configured burst, or the number in the quota if no burst is configured.
    pub burst: Option<u64>,
}

/// The reason why a proposed quota is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposalError {
    /// The quota is not valid syntax, or does not fit the algorithm.
    #[error("`{name}={quota}`: {error}: {hint}")]
    Quota {
        /// The name of the limit.
        name: String,
        /// The proposed quota.
        quota: String,
        /// The cause of the error.
        error: QuotaError,
        /// What to write instead.
        hint: String,
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
    let configured_burst = standard.rule.burst();
    let burst = match burst {
        Some(_) if configured_burst.is_none() => return Err(ProposalError::NoBurst(name.clone())),
        Some(burst) => Some(*burst),
        // Keep the configured burst. If the configured burst equals the count of the configured quota, use the count of
        // the new quota as the burst.
        None => configured_burst.filter(|burst| *burst != standard.quota.count),
    };
    let quota = standard.rule.parse_quota(text);
    let variant = quota.and_then(|quota| compiled.limit.variant(&config.hasher, quota, burst));
    variant.map(Arc::new).map_err(|error| {
        let hint = invalid_quota_hint(&standard.rule, text, &error);
        ProposalError::Quota { name: name.clone(), quota: text.clone(), error, hint }
    })
}

/// Return the variant with a permit TTL that no request exceeds. If the limit is not a concurrency limit, return the
/// variant unchanged.
pub(super) fn with_unbounded_permit_ttl(
    config: &CompiledConfig,
    limit: &LimitSpec,
    variant: Arc<LimitVariant>,
) -> Arc<LimitVariant> {
    if !variant.rule.is_concurrency() {
        return variant;
    }
    let rule = variant.rule.clone().with_permit_ttl(REPLAY_PERMIT_TTL_US);
    let share = limit.local_share.clone();
    Arc::new(LimitVariant::new(&config.hasher, &limit.name, variant.quota, rule, share))
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
mod tally_tests {
    use super::*;

    #[test]
    fn time_series_is_bounded_and_keeps_all_counts() {
        let mut series = TimeSeries::default();
        for second in (0..200_000).chain([50]) {
            series.record(1_000_000 + second, second % 10 == 0);
        }
        let points = series.points();
        assert!(points.len() <= MAX_STEPS as usize, "{} points", points.len());
        assert_eq!(points.iter().map(|(_, requests, _)| requests).sum::<u64>(), 200_001);
        assert_eq!(points.iter().map(|(_, _, denied)| denied).sum::<u64>(), 20_001);
        assert!(
            points.windows(2).all(|pair| pair[1].0 - pair[0].0 == series.step_seconds()),
            "the time series has no gaps"
        );
    }
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
