//! What goes into one step of an algorithm and what comes out of it.

use std::collections::VecDeque;

use super::concurrency::{Permit, PermitAction};

/// What one limit keeps about one identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// At `last` (µs) the bucket lacked `debt` parts of `1/parts` token.
    Bucket {
        /// Instant of the last charge, µs.
        updated_at: u64,
        /// What the bucket lacks, in parts.
        debt: u64,
        /// Parts of a token.
        parts: u64,
        /// When the key of the state ends in Redis, µs: between 0.5 s and 1.001 s after the debt is repaid.
        key_expires_at: u64,
    },
    /// `count` units since the window opened at `start` (µs).
    Window {
        /// Instant at which the window opened, µs.
        start: u64,
        /// Units charged since.
        count: u64,
    },
    /// Units of the aligned window that opened at `start` (µs), and of the one before.
    Sliding {
        /// Instant at which the window opened, µs.
        start: u64,
        /// Units charged since.
        current: u64,
        /// Units charged in the window before.
        previous: u64,
    },
    /// Units in the part of the window with this number and in those before it, newest first.
    Buckets {
        /// The number of the newest part.
        index: u64,
        /// Units in each.
        counts: Box<[u64]>,
    },
    /// The instants (µs) of the admitted units, oldest first.
    Log(VecDeque<u64>),
    /// The leases of requests in flight, in the order of their ends.
    Permits(Vec<Permit>),
}

/// Which of the ways in which a charge can be asked for applies to one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// Admit the cost if it fits.
    Check,
    /// Charge the cost whatever is left.
    Charge,
    /// Give back a charge that was made at this instant, µs.
    Refund {
        /// The admitted reply's time, µs.
        charged_at: u64,
        /// See [`Rule::debt_before_us`](super::Rule::debt_before_us).
        debt_before_us: u64,
    },
    /// Let a lease end later.
    Renew,
}

/// How one limit sees a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It fits.
    Ok,
    /// Over: it fits after exactly `retry_us`.
    Exceeded,
    /// The cost is larger than the limit: it never fits.
    CostTooLarge,
    /// Everything is in use: it fits when something is released, after `retry_us` at the latest.
    Saturated,
}

/// What one limit answers to a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the charge fits.
    pub status: Status,
    /// Whole units left.
    pub remaining: u64,
    /// µs until everything is back.
    pub reset_us: u64,
    /// µs until the same charge fits; when busy, an upper bound; 0 when it does now or never will.
    pub retry_us: u64,
}

/// What remains to be done to the state once the whole request is decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Leave it.
    None,
    /// The state is empty: nothing to keep.
    Delete,
    /// Replace it; it means nothing any more after so many µs.
    Put(State, u64),
    /// Edit the log.
    Log(LogEdit),
    /// Edit the leases.
    Permits(PermitEdit),
}

/// An edit of a log, kept small because a log may be long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEdit {
    /// The instant of the edit, µs; later entries are moved to it when `mend` is set.
    pub now: u64,
    /// Whether entries lie in the future, because the clock was set back.
    pub repair_clock_skew: bool,
    /// How many old entries to drop.
    pub drop: usize,
    /// How many units to append at `now`.
    pub push: u64,
    /// Entries to take out again: so many units charged at this instant.
    pub remove: Option<(u64, u64)>,
    /// µs after which the log means nothing any more.
    pub window: u64,
}

/// An edit of a set of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PermitEdit {
    /// The instant of the edit, µs.
    pub now: u64,
    /// Length of a lease, µs.
    pub ttl: u64,
    /// What to do.
    pub action: PermitAction,
}

/// What a state holds at most. Charges that ask for no room stop adding there, so that every sum stays exact.
pub const MAX_STATE: u64 = 1 << 52;

/// The answer of one limit before anything is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// With the charge made if it fits.
    pub outcome: Outcome,
    /// Units left without the charge.
    pub free: u64,
    /// µs until everything is back, without the charge.
    pub free_reset_us: u64,
    /// On success the charge; otherwise the mending of a state that lies in the future, or of a bucket at another rate.
    pub change: Change,
}
