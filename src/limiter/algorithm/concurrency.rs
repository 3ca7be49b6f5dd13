//! Concurrency: a lease for each request in flight, freed when the request ends, or by itself when its gateway dies.

use crate::limiter::algorithm::{Change, Outcome, PermitEdit, State, Status, Step, StepKind};

/// At most `limit` live leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Concurrency {
    /// Leases at the same time.
    pub limit: u64,
    /// Length of a lease, µs.
    pub ttl: u64,
}

/// A place that a request in flight holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    /// The instant at which it ends if it is not renewed, µs.
    pub expires_at: u64,
    /// Whose it is.
    pub id: u64,
}

impl Concurrency {
    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let permits: &[Permit] = match state {
            Some(State::Permits(leases)) => leases,
            _ => &[],
        };
        let first_live = permits.partition_point(|lease| lease.expires_at <= now);
        let live = (permits.len() - first_live) as u64;
        // Whatever its cost, a charge is one lease.
        let cost = cost.min(1);
        let free = self.limit.saturating_sub(live);
        let free_reset_us = if live > 0 { self.ttl } else { 0 };
        let step = |outcome, change| Step { outcome, free, free_reset_us, change };
        let unchanged = |change| {
            step(Outcome { status: Status::Ok, remaining: free, reset_us: free_reset_us, retry_us: 0 }, change)
        };
        let edit = |action| Change::Permits(PermitEdit { now, ttl: self.ttl, action });
        match kind {
            StepKind::Refund { .. } => unchanged(edit(PermitAction::Release)),
            StepKind::Renew => {
                let outcome = Outcome { status: Status::Ok, remaining: free, reset_us: self.ttl, retry_us: 0 };
                step(outcome, edit(PermitAction::Renew))
            }
            StepKind::Check if live + cost > self.limit => {
                let blocking = permits[first_live + (live + cost - self.limit) as usize - 1];
                let retry_us = (blocking.expires_at - now).min(self.ttl);
                // What would end later than a new lease was made before the clock was set back.
                let clock_went_back = permits.last().is_some_and(|last| last.expires_at > now + self.ttl);
                let repair = if clock_went_back { edit(PermitAction::RepairClockSkew) } else { Change::None };
                step(Outcome { status: Status::Saturated, remaining: free, reset_us: free_reset_us, retry_us }, repair)
            }
            StepKind::Check | StepKind::Charge if cost == 0 => unchanged(Change::None),
            StepKind::Check | StepKind::Charge => {
                let remaining = free.saturating_sub(1);
                let outcome = Outcome { status: Status::Ok, remaining, reset_us: self.ttl, retry_us: 0 };
                step(outcome, edit(PermitAction::Acquire))
            }
        }
    }
}

/// What happens to a set of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PermitAction {
    /// A lease is added.
    Acquire,
    /// A lease ends later; one that is gone is added, over the limit if need be: its request is running.
    Renew,
    /// A lease ends now.
    Release,
    /// No lease ends later than a new one would.
    RepairClockSkew,
}

impl PermitEdit {
    /// Carries out the edit for the lease `id`; `leases` stay in the order of their ends.
    pub fn apply(&self, permits: &mut Vec<Permit>, id: u64) {
        if self.action == PermitAction::Release {
            permits.retain(|lease| lease.id != id);
            return;
        }
        let expires_at = self.now + self.ttl;
        if self.action != PermitAction::RepairClockSkew {
            permits.retain(|lease| lease.expires_at > self.now);
        }
        for lease in permits.iter_mut().rev().take_while(|lease| lease.expires_at > expires_at) {
            lease.expires_at = expires_at;
        }
        if let PermitAction::Acquire | PermitAction::Renew = self.action {
            permits.retain(|lease| lease.id != id);
            permits.push(Permit { expires_at, id });
        }
    }
}
