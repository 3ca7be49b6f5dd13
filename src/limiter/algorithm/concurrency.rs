//! Concurrency limit: each request in flight holds a permit. The permit is released when the request ends, and expires
//! if its gateway crashes.

use crate::limiter::algorithm::{Change, Outcome, PermitEdit, State, Status, Step, StepKind};

/// A concurrency limit: at most `limit` requests hold a permit at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Concurrency {
    /// Maximum number of permits at the same time.
    pub limit: u64,
    /// Permit TTL, µs.
    pub ttl: u64,
}

/// A permit of a request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    /// Time at which the permit expires if it is not renewed, µs.
    pub expires_at: u64,
    /// The permit id.
    pub id: u64,
}

impl Concurrency {
    pub(super) fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        let permits: &[Permit] = match state {
            Some(State::Permits(permits)) => permits,
            _ => &[],
        };
        let first_live = permits.partition_point(|permit| permit.expires_at <= now);
        let live = (permits.len() - first_live) as u64;
        // A charge takes one permit, even if its cost is higher.
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
                // If a permit expires later than a new permit would, the clock was set back after the permit was
                // created.
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

/// An action on a set of permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PermitAction {
    /// Add a permit.
    Acquire,
    /// Extend a permit. A missing permit is added even beyond the limit, because its request is in flight.
    Renew,
    /// Remove a permit.
    Release,
    /// For each permit that expires later than a new permit would, set the expiry to that of a new permit.
    RepairClockSkew,
}

impl PermitEdit {
    /// Apply the edit for the permit `id`. `permits` stay in the order of their expiry.
    pub fn apply(&self, permits: &mut Vec<Permit>, id: u64) {
        if self.action == PermitAction::Release {
            permits.retain(|permit| permit.id != id);
            return;
        }
        let expires_at = self.now + self.ttl;
        if self.action != PermitAction::RepairClockSkew {
            permits.retain(|permit| permit.expires_at > self.now);
        }
        for permit in permits.iter_mut().rev().take_while(|permit| permit.expires_at > expires_at) {
            permit.expires_at = expires_at;
        }
        if let PermitAction::Acquire | PermitAction::Renew = self.action {
            permits.retain(|permit| permit.id != id);
            permits.push(Permit { expires_at, id });
        }
    }
}
