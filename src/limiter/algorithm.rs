//! The algorithms: pure functions from a state, an instant and a cost to an outcome and the next state.
//!
//! Each file has a twin of the same name in `lua/`; both give the same answers, field by field.

pub mod concurrency;
pub mod fixed_window;
pub mod sliding_buckets;
pub mod sliding_log;
pub mod sliding_window;
pub mod token_bucket;

use std::collections::VecDeque;

use crate::limiter::algorithm::concurrency::{Concurrency, Permit, PermitAction};
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use crate::limiter::algorithm::sliding_log::SlidingLog;
use crate::limiter::algorithm::sliding_window::SlidingWindow;
use crate::limiter::algorithm::token_bucket::TokenBucket;
use crate::limiter::quota::{Quota, QuotaError};

/// An algorithm with its parameters: everything that decides about one limit, but not whose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// Token bucket, GCRA, leaky bucket as a meter.
    TokenBucket(TokenBucket),
    /// A counter in a window, aligned or opened by the first request.
    FixedWindow(FixedWindow),
    /// Two windows, weighted.
    SlidingWindow(SlidingWindow),
    /// A window in parts.
    SlidingBuckets(SlidingBuckets),
    /// Every admitted unit of the last window.
    SlidingLog(SlidingLog),
    /// Requests in flight.
    Concurrency(Concurrency),
}

impl Rule {
    /// Asks the algorithm; nothing is written.
    pub fn step(&self, state: Option<&State>, now: u64, kind: StepKind, cost: u64) -> Step {
        match self {
            Rule::TokenBucket(rule) => rule.step(state, now, kind, cost),
            Rule::FixedWindow(rule) => rule.step(state, now, kind, cost),
            Rule::SlidingWindow(rule) => rule.step(state, now, kind, cost),
            Rule::SlidingBuckets(rule) => rule.step(state, now, kind, cost),
            Rule::SlidingLog(rule) => rule.step(state, now, kind, cost),
            Rule::Concurrency(rule) => rule.step(state, now, kind, cost),
        }
    }

    /// For how many µs a token bucket refilled to pay the debt before the last `cost` units of a charge, which was made `elapsed_us`
    /// before this outcome. Only what refills later counts against a refund of these units. Rounded down, against the client. 0 for
    /// the other algorithms, which do not need it.
    pub fn debt_before_us(&self, outcome: &Outcome, elapsed_us: u64, cost: u64) -> u64 {
        match self {
            // Otherwise all of it has been repaid since the charge.
            Rule::TokenBucket(rule) if outcome.reset_us > 0 => rule.debt_before_us(outcome.reset_us + elapsed_us, cost),
            Rule::TokenBucket(_)
            | Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_)
            | Rule::Concurrency(_) => 0,
        }
    }

    /// The kind of the script contract.
    pub fn kind(&self) -> AlgorithmKind {
        match self {
            Rule::TokenBucket(_) => AlgorithmKind::TokenBucket,
            Rule::FixedWindow(rule) => match rule.start {
                WindowStart::Aligned { .. } => AlgorithmKind::FixedWindow,
                WindowStart::FirstRequest => AlgorithmKind::FirstRequest,
                WindowStart::Calendar(_) => AlgorithmKind::Calendar,
            },
            Rule::SlidingWindow(_) => AlgorithmKind::SlidingWindow,
            Rule::SlidingBuckets(_) => AlgorithmKind::SlidingBuckets,
            Rule::SlidingLog(_) => AlgorithmKind::SlidingLog,
            Rule::Concurrency(_) => AlgorithmKind::Concurrency,
        }
    }

    /// The arguments a to d of the script contract, for a call at about this instant.
    pub fn script_arguments(&self, now_us: u64) -> [u64; 4] {
        match self {
            Rule::TokenBucket(rule) => [rule.burst, rule.refill, rule.parts, 0],
            Rule::FixedWindow(rule) => match &rule.start {
                WindowStart::Aligned { phase } => [rule.limit, rule.window, *phase, 0],
                WindowStart::FirstRequest => [rule.limit, rule.window, 0, 0],
                WindowStart::Calendar(windows) => {
                    let [first, second, third] = windows.boundaries_around(now_us);
                    [rule.limit, first, second, third]
                }
            },
            Rule::SlidingWindow(rule) => [rule.limit, rule.window, rule.unit, 0],
            Rule::SlidingBuckets(rule) => [rule.limit, rule.window, rule.buckets, 0],
            Rule::SlidingLog(rule) => [rule.limit, rule.window, 0, 0],
            Rule::Concurrency(rule) => [rule.limit, rule.ttl, 0, 0],
        }
    }

    /// The same algorithm in another size; without a burst of its own a bucket holds the quota's count.
    ///
    /// # Errors
    /// The size cannot be counted exactly, or the algorithm cannot have it.
    pub fn with_quota(&self, quota: Quota, burst: Option<u64>) -> Result<Rule, QuotaError> {
        Ok(match self {
            Rule::TokenBucket(_) => Rule::TokenBucket(TokenBucket::new(quota, burst.unwrap_or(quota.count))?),
            Rule::FixedWindow(rule) => Rule::FixedWindow(FixedWindow::new(quota, rule.start.with_quota(quota)?)?),
            Rule::SlidingWindow(_) => Rule::SlidingWindow(SlidingWindow::new(quota)?),
            Rule::SlidingBuckets(rule) => Rule::SlidingBuckets(SlidingBuckets::new(quota, rule.buckets)?),
            Rule::SlidingLog(_) => Rule::SlidingLog(SlidingLog::new(quota)?),
            Rule::Concurrency(rule) => Rule::Concurrency(Concurrency { limit: quota.count, ..*rule }),
        })
    }

    /// Reads a quota in the form that the algorithm has it.
    ///
    /// # Errors
    /// It is no such quota.
    pub fn parse_quota(&self, text: &str) -> Result<Quota, QuotaError> {
        if let Rule::Concurrency(_) = self { Quota::parse_concurrency(text) } else { text.parse() }
    }

    /// The largest cost that can ever fit.
    pub fn capacity(&self) -> u64 {
        match self {
            Rule::TokenBucket(rule) => rule.burst,
            Rule::FixedWindow(rule) => rule.limit,
            Rule::SlidingWindow(rule) => rule.limit,
            Rule::SlidingBuckets(rule) => rule.limit,
            Rule::SlidingLog(rule) => rule.limit,
            Rule::Concurrency(rule) => rule.limit,
        }
    }

    /// Names what must not be shared between states: the algorithm and the window, not the size.
    pub fn shape(&self) -> String {
        let letter = self.kind().letter().to_lowercase();
        match self {
            Rule::TokenBucket(_) | Rule::Concurrency(_) => letter,
            Rule::FixedWindow(rule) => match &rule.start {
                WindowStart::Calendar(windows) => format!("{letter}{windows}"),
                WindowStart::Aligned { phase: 1.. } => format!("{letter}{}p", rule.window),
                WindowStart::Aligned { .. } | WindowStart::FirstRequest => format!("{letter}{}", rule.window),
            },
            Rule::SlidingWindow(rule) => format!("{letter}{}", rule.window),
            Rule::SlidingBuckets(rule) => format!("{letter}{}k{}", rule.window, rule.buckets),
            Rule::SlidingLog(rule) => format!("{letter}{}", rule.window),
        }
    }

    /// The share of one of `n` gateways that decide without a common store, large enough for a charge of `cost`; none if it
    /// cannot be counted exactly.
    pub fn local_share(&self, gateway_count: u64, cost: u64) -> Option<Rule> {
        let share_of = |size: u64| size.div_ceil(gateway_count).max(cost);
        Some(match self {
            Rule::TokenBucket(rule) => Rule::TokenBucket(rule.share(gateway_count, share_of(rule.burst))?),
            Rule::FixedWindow(rule) => Rule::FixedWindow(FixedWindow { limit: share_of(rule.limit), ..rule.clone() }),
            Rule::SlidingWindow(rule) => Rule::SlidingWindow(SlidingWindow { limit: share_of(rule.limit), ..*rule }),
            Rule::SlidingBuckets(rule) => Rule::SlidingBuckets(SlidingBuckets { limit: share_of(rule.limit), ..*rule }),
            Rule::SlidingLog(rule) => Rule::SlidingLog(SlidingLog { limit: share_of(rule.limit), ..*rule }),
            Rule::Concurrency(rule) => {
                Rule::Concurrency(Concurrency { limit: rule.limit.div_ceil(gateway_count), ..*rule })
            }
        })
    }
}

/// The kinds of the script contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlgorithmKind {
    /// `token_bucket.lua`
    TokenBucket,
    /// `fixed_window.lua`, aligned
    FixedWindow,
    /// `fixed_window.lua`, opened by the first request
    FirstRequest,
    /// `fixed_window.lua`, by the calendar
    Calendar,
    /// `sliding_window.lua`
    SlidingWindow,
    /// `sliding_buckets.lua`
    SlidingBuckets,
    /// `sliding_log.lua`
    SlidingLog,
    /// `concurrency.lua`
    Concurrency,
}

impl AlgorithmKind {
    /// The letter that the script knows the kind by.
    pub fn letter(self) -> &'static str {
        match self {
            AlgorithmKind::TokenBucket => "B",
            AlgorithmKind::FixedWindow => "F",
            AlgorithmKind::FirstRequest => "X",
            AlgorithmKind::Calendar => "K",
            AlgorithmKind::SlidingWindow => "W",
            AlgorithmKind::SlidingBuckets => "S",
            AlgorithmKind::SlidingLog => "L",
            AlgorithmKind::Concurrency => "C",
        }
    }
}

// What goes into one step of an algorithm and what comes out of it.

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
        /// See [`Rule::debt_before_us`](Rule::debt_before_us).
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
