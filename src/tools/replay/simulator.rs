//! The simulation decides logged requests in virtual time, with the memory store and the algorithms of the gateway.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use crate::limiter::algorithm::Rule;
use crate::limiter::clock::Clock;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::{Identity, Key};
use crate::limiter::memory::MemoryStore;
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::LimitVariant;
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Charge, ChargeMode, Operation};
use crate::tools::replay::resolve::{ReplayCheck, ReplayConfig, SeenIdentities};

/// The capacity of the store is unlimited, so that the simulation evicts no state.
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

/// A store operation at the end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Scheduled {
    due_at_us: u64,
    /// Sequence number of the request. Operations that are due at the same time run in this order.
    sequence: u64,
    limit_index: u16,
    variant_index: u16,
    identity: u128,
    cost_or_permit_id: u64,
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

    /// Append the variants that the resolver has added. The first variant of each limit is its default.
    pub fn add_variants(&mut self, variants: &[Vec<Arc<LimitVariant>>]) {
        for (own_variants, all_variants) in self.variants.iter_mut().zip(variants) {
            own_variants.extend_from_slice(&all_variants[own_variants.len().min(all_variants.len())..]);
        }
    }

    /// Replace the default variant of a limit.
    pub fn set_default_variant(&mut self, limit_index: usize, variant: Arc<LimitVariant>) {
        self.variants[limit_index][0] = variant;
    }

    /// Decide a request. A request that is out of order is decided at the current virtual time.
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
        // Reserve the lowest 8 bits for the index of the limit, because a permit id is `first_permit_id` plus this
        // index.
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
        // Count no usage, because usage totals do not influence decisions.
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
            let cost_or_permit_id =
                if kind == ScheduledKind::Release { check.permit_id(first_permit_id) } else { check.cost };
            self.scheduled.push(Reverse(Scheduled {
                due_at_us: now_us + meta.duration_us,
                sequence: self.sequence,
                limit_index: replay_check.limit_index,
                variant_index: replay_check.variant_index,
                identity: check.identity.0,
                cost_or_permit_id,
                kind,
            }));
        }
        &self.decisions
    }

    /// Run the scheduled operations that are due until `until_us`, each at its scheduled time.
    fn run_scheduled(&mut self, until_us: u64) {
        while let Some(Reverse(entry)) =
            self.scheduled.peek().copied().filter(|Reverse(entry)| entry.due_at_us <= until_us)
        {
            self.scheduled.pop();
            self.advance_clock(self.now_us.max(entry.due_at_us));
            let variant = &self.variants[usize::from(entry.limit_index)][usize::from(entry.variant_index)];
            let in_flight = matches!(variant.rule, Rule::Concurrency(_));
            let charge = Charge {
                key: Key { identity: Identity(entry.identity), state_name: &variant.state_name },
                rule: &variant.rule,
                cost: if in_flight { 1 } else { entry.cost_or_permit_id },
                mode: ChargeMode::Enforced,
                permit_id: if in_flight { entry.cost_or_permit_id } else { 0 },
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

/// Maximum number of identities in the list of those with the most denials.
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
    /// Number of requests that only other limits denied.
    pub denied_by_others: u64,
    /// Requests and denials, indexed by identity.
    by_identity: Vec<(u32, u32)>,
    /// Requests and denials over time.
    pub series: TimeSeries,
}

/// Numbers of requests and denials in each step. Steps become longer when there are more than `MAX_STEPS`.
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

    /// Return the share of denied requests, from 0 to 1.
    pub fn denied_ratio(&self) -> f64 {
        self.denied as f64 / self.requests.max(1) as f64
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

    /// Return all steps from the first to the last. Each has its start in seconds since the Unix epoch, requests and
    /// denials.
    pub fn points(&self) -> Vec<(u64, u64, u64)> {
        let ends = self.steps.first_key_value().zip(self.steps.last_key_value());
        let Some(((first, _), (last, _))) = ends else { return Vec::new() };
        // Do not merge steps of the greatest length, even above `MAX_STEPS`, because log times may span centuries.
        let steps = (*first..=*last).take(2 * MAX_STEPS as usize);
        let point = |step: u64| {
            let (requests, denied) = self.steps.get(&step).copied().unwrap_or_default();
            (step * self.step_seconds(), requests, denied)
        };
        steps.map(point).collect()
    }
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
        assert!(points.windows(2).all(|pair| pair[1].0 - pair[0].0 == series.step_seconds()), "without gaps");
    }
}
