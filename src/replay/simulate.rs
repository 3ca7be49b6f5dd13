//! Decides the requests of a log in virtual time, with the store and the algorithms of the gateway.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use std::sync::Arc;

use super::resolve::{ReplayCheck, SeenIdentities};
use super::view::ReplayConfig;
use crate::limit::admission::Deferred;
use crate::limit::algorithm::Rule;
use crate::limit::backend::DecidedBy;
use crate::limit::clock::Clock;
use crate::limit::decision::{Decision, LimitCheck};
use crate::limit::key::{Identity, Key};
use crate::limit::memory::MemoryStore;
use crate::limit::plan::LimitVariant;
use crate::limit::store::{Charge, ChargeMode, Operation};

/// A shared store does not evict: as many states as there are identities.
const MAX_STATES: usize = 1 << 40;

/// What a limit had to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayDecision {
    /// It let the request pass.
    Allowed,
    /// It denied the request; on trial, it would have.
    Denied,
    /// Another limit denied the request: nothing was charged.
    DeniedByOther,
}

/// A request, apart from what its limits are asked.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct RequestMeta {
    pub time_us: u64,
    pub duration_us: u64,
    pub status: u16,
}

/// What is done when a request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Scheduled {
    due_at_us: u64,
    /// In the order in which they were owed.
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

/// One run of a log through its limits.
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
    /// A run from nothing used.
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

    /// Takes over sizes that have been met since; the first one of each subject is its standard.
    pub fn add_variants(&mut self, variants: &[Vec<Arc<LimitVariant>>]) {
        for (own_variants, all_variants) in self.variants.iter_mut().zip(variants) {
            own_variants.extend_from_slice(&all_variants[own_variants.len().min(all_variants.len())..]);
        }
    }

    /// Puts another standard size in the place of a subject's.
    pub fn set_default_variant(&mut self, limit_index: usize, variant: Arc<LimitVariant>) {
        self.variants[limit_index][0] = variant;
    }

    /// Decides a request. What comes too late to be decided in its turn is decided now.
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
        // A lease's id is that of its first one and its place.
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
        let charges: Vec<_> = checks.iter().map(|check| check.charge(DecidedBy::Store, first_permit_id)).collect();
        let verdict = self.store.decide(Operation::Check, &charges);
        let decision = Decision::new(verdict, DecidedBy::Store, checks.iter());
        self.decisions.clear();
        for check in &checks {
            let is_denied = decision.violated().any(|result| result.limit_index == check.limit_index)
                || decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit));
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
                Deferred::Refund | Deferred::Nothing => {
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

    /// Does what is due up to an instant, each in its time.
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
