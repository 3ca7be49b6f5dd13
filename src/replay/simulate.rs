//! Decides the requests of a log in virtual time, with the store and the algorithms of the gateway.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use std::sync::Arc;

use super::resolve::{Asked, Seen};
use super::view::View;
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
const UNBOUNDED: usize = 1 << 40;

/// What a limit had to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It let the request pass.
    Allowed,
    /// It denied the request; on trial, it would have.
    Denied,
    /// Another limit denied the request: nothing was charged.
    Others,
}

/// A request, apart from what its limits are asked.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Moment {
    pub at_us: u64,
    pub took_us: u64,
    pub status: u16,
}

/// What is done when a request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at_us: u64,
    /// In the order in which they were owed.
    number: u64,
    subject: u16,
    size: u16,
    identity: u128,
    units: u64,
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Release,
    Pay,
    Refund { charged_at: u64, debt_before_us: u64 },
}

/// One run of a log through its limits.
#[derive(Debug)]
pub struct Simulation<'a> {
    view: &'a View,
    sizes: Vec<Vec<Arc<LimitVariant>>>,
    clock: Clock,
    store: MemoryStore,
    now_us: u64,
    number: u64,
    due: BinaryHeap<Reverse<Due>>,
    said: Vec<Said>,
}

impl<'a> Simulation<'a> {
    /// A run from nothing used.
    pub fn new(view: &'a View) -> Self {
        let clock = Clock::manual(0);
        let store = MemoryStore::new(UNBOUNDED, clock.clone());
        let sizes = view.subjects.iter().map(|_| Vec::new()).collect();
        Simulation { view, sizes, clock, store, now_us: 0, number: 0, due: BinaryHeap::new(), said: Vec::new() }
    }

    /// Takes over sizes that have been met since; the first one of each subject is its standard.
    pub fn learn(&mut self, sizes: &[Vec<Arc<LimitVariant>>]) {
        for (own, all) in self.sizes.iter_mut().zip(sizes) {
            own.extend_from_slice(&all[own.len().min(all.len())..]);
        }
    }

    /// Puts another standard size in the place of a subject's.
    pub fn resize(&mut self, subject: usize, plan: Arc<LimitVariant>) {
        self.sizes[subject][0] = plan;
    }

    /// Decides a request. What comes too late to be decided in its turn is decided now.
    pub fn decide(&mut self, moment: Moment, asked: &[Asked], seen: &[Seen]) -> &[Said] {
        let now = self.now_us.max(moment.at_us);
        self.settle(now);
        self.go_to(now);
        self.number += 1;
        // A lease's id is that of its first one and its place.
        let first_lease = self.number << 8;
        let checks: Vec<_> = asked
            .iter()
            .enumerate()
            .map(|(place, asked)| {
                let subject = usize::from(asked.subject);
                LimitCheck {
                    limit_index: place,
                    limit: &self.view.subjects[subject].limit,
                    variant: &self.sizes[subject][usize::from(asked.size)],
                    identity: seen[subject].identities[asked.who as usize],
                    cost: asked.cost,
                    deferred: self.view.subjects[subject].later,
                }
            })
            .collect();
        let charges: Vec<_> = checks.iter().map(|check| check.charge(DecidedBy::Store, first_lease)).collect();
        let verdict = self.store.decide(Operation::Check, &charges);
        let decision = Decision::new(verdict, DecidedBy::Store, checks.iter());
        self.said.clear();
        for check in &checks {
            let denies = decision.violated().any(|judged| judged.limit_index == check.limit_index)
                || decision.shadow_denied.iter().any(|limit| std::ptr::eq(*limit, check.limit));
            let said = match (denies, decision.admitted) {
                (true, _) => Said::Denied,
                (false, true) => Said::Allowed,
                (false, false) => Said::Others,
            };
            self.said.push(said);
            if said != Said::Allowed || (check.deferred == Deferred::Nothing && !check.is_concurrency()) {
                continue;
            }
            let what = match check.deferred {
                _ if check.is_concurrency() => What::Release,
                Deferred::Charge => What::Pay,
                Deferred::Refund | Deferred::Nothing => {
                    let mut known = decision.debts_before_us.iter();
                    let known = known.find(|(place, _)| *place == check.limit_index);
                    What::Refund { charged_at: now, debt_before_us: known.map_or(0, |(_, us)| *us) }
                }
            };
            let asked = &asked[check.limit_index];
            let refunds = self.view.subjects[usize::from(asked.subject)].refunds(moment.status);
            if matches!(what, What::Refund { .. }) && !refunds {
                continue;
            }
            let units = if what == What::Release { check.permit_id(first_lease) } else { check.cost };
            self.due.push(Reverse(Due {
                at_us: now + moment.took_us,
                number: self.number,
                subject: asked.subject,
                size: asked.size,
                identity: check.identity.0,
                units,
                what,
            }));
        }
        &self.said
    }

    /// Does what is due up to an instant, each in its time.
    fn settle(&mut self, until: u64) {
        while let Some(Reverse(due)) = self.due.peek().copied().filter(|Reverse(due)| due.at_us <= until) {
            self.due.pop();
            self.go_to(self.now_us.max(due.at_us));
            let plan = &self.sizes[usize::from(due.subject)][usize::from(due.size)];
            let in_flight = matches!(plan.rule, Rule::Concurrency(_));
            let charge = Charge {
                key: Key { identity: Identity(due.identity), state_name: &plan.state_name },
                rule: &plan.rule,
                cost: if in_flight { 1 } else { due.units },
                mode: ChargeMode::Enforced,
                permit_id: if in_flight { due.units } else { 0 },
                debt_before_us: if let What::Refund { debt_before_us, .. } = due.what { debt_before_us } else { 0 },
            };
            let operation = match due.what {
                What::Release => Operation::Refund { charged_at: 0 },
                What::Pay => Operation::Charge,
                What::Refund { charged_at, .. } => Operation::Refund { charged_at },
            };
            self.store.decide(operation, &[charge]);
        }
    }

    fn go_to(&mut self, now: u64) {
        self.now_us = now;
        self.clock.set(now);
    }
}
