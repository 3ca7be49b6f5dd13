//! Concurrency: a lease for each request in flight, freed when the request ends, or by itself when its gateway dies.

use super::{Ask, Change, LeaseEdit, Outcome, State, Status, Step};

/// At most `limit` live leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Concurrency {
    /// Leases at the same time.
    pub limit: u64,
    /// Length of a lease, µs.
    pub lease: u64,
}

/// A place that a request in flight holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The instant at which it ends if it is not renewed, µs.
    pub ends: u64,
    /// Whose it is.
    pub id: u64,
}

impl Concurrency {
    pub(super) fn step(&self, state: Option<&State>, now: u64, ask: Ask, cost: u64) -> Step {
        let leases: &[Lease] = match state {
            Some(State::Leases(leases)) => leases,
            _ => &[],
        };
        let first = leases.partition_point(|lease| lease.ends <= now);
        let live = (leases.len() - first) as u64;
        // Whatever its cost, a charge is one lease.
        let cost = cost.min(1);
        let free = self.limit.saturating_sub(live);
        let free_reset_us = if live > 0 { self.lease } else { 0 };
        let step = |outcome, change| Step { outcome, free, free_reset_us, change };
        let held = |change| {
            step(Outcome { status: Status::Ok, remaining: free, reset_us: free_reset_us, retry_us: 0 }, change)
        };
        let edit = |action| Change::Leases(LeaseEdit { now, lease: self.lease, action });
        match ask {
            Ask::Refund { .. } => held(edit(Action::Release)),
            Ask::Renew => {
                let outcome = Outcome { status: Status::Ok, remaining: free, reset_us: self.lease, retry_us: 0 };
                step(outcome, edit(Action::Renew))
            }
            Ask::Fit if live + cost > self.limit => {
                let blocking = leases[first + (live + cost - self.limit) as usize - 1];
                let retry_us = (blocking.ends - now).min(self.lease);
                // What would end later than a new lease was made before the clock was set back.
                let behind = leases.last().is_some_and(|last| last.ends > now + self.lease);
                let mended = if behind { edit(Action::Mend) } else { Change::None };
                step(Outcome { status: Status::Busy, remaining: free, reset_us: free_reset_us, retry_us }, mended)
            }
            Ask::Fit | Ask::Charge if cost == 0 => held(Change::None),
            Ask::Fit | Ask::Charge => {
                let remaining = free.saturating_sub(1);
                let outcome = Outcome { status: Status::Ok, remaining, reset_us: self.lease, retry_us: 0 };
                step(outcome, edit(Action::Acquire))
            }
        }
    }
}

/// What happens to a set of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A lease is added.
    Acquire,
    /// A lease ends later; one that is gone is added, over the limit if need be: its request is running.
    Renew,
    /// A lease ends now.
    Release,
    /// No lease ends later than a new one would.
    Mend,
}

impl LeaseEdit {
    /// Carries out the edit for the lease `id`; `leases` stay in the order of their ends.
    pub fn apply(&self, leases: &mut Vec<Lease>, id: u64) {
        if self.action == Action::Release {
            leases.retain(|lease| lease.id != id);
            return;
        }
        let ends = self.now + self.lease;
        if self.action != Action::Mend {
            leases.retain(|lease| lease.ends > self.now);
        }
        for lease in leases.iter_mut().rev().take_while(|lease| lease.ends > ends) {
            lease.ends = ends;
        }
        if let Action::Acquire | Action::Renew = self.action {
            leases.retain(|lease| lease.id != id);
            leases.push(Lease { ends, id });
        }
    }
}
