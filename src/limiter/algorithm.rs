//! Rate limiting algorithms: pure functions that compute an outcome and the next state from a state, a time and a cost.
//!
//! Each file has a counterpart with the same name in `lua/`. The Rust and the Lua implementation return the same values
//! in all fields of the result.

pub mod concurrency;
pub mod fixed_window;
pub mod sliding_buckets;
pub mod sliding_log;
pub mod sliding_window;
pub mod token_bucket;

use std::collections::VecDeque;
use std::time::Duration;

use crate::limiter::algorithm::concurrency::{Concurrency, Permit, PermitAction};
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use crate::limiter::algorithm::sliding_log::{MAX_LOG_ENTRIES, SlidingLog};
use crate::limiter::algorithm::sliding_window::SlidingWindow;
use crate::limiter::algorithm::token_bucket::TokenBucket;
use crate::limiter::quota::{Quota, QuotaError};

/// An algorithm with its parameters. A check applies the rule to the state of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// Token bucket (the same algorithm as GCRA and as the leaky bucket used as a meter).
    TokenBucket(TokenBucket),
    /// Fixed window: aligned, by the calendar, or opened by the first request.
    FixedWindow(FixedWindow),
    /// Sliding window: the weighted sum of two windows.
    SlidingWindow(SlidingWindow),
    /// Sliding buckets: a window divided into parts.
    SlidingBuckets(SlidingBuckets),
    /// Sliding log: the time of each admitted token in the last window.
    SlidingLog(SlidingLog),
    /// Concurrency: requests in flight.
    Concurrency(Concurrency),
}

impl Rule {
    /// Return the name of the algorithm, as in the configuration.
    pub fn algorithm_name(&self) -> &'static str {
        match self {
            Rule::TokenBucket(_) => "token-bucket",
            Rule::FixedWindow(_) => "fixed-window",
            Rule::SlidingWindow(_) => "sliding-window",
            Rule::SlidingBuckets(_) => "sliding-buckets",
            Rule::SlidingLog(_) => "sliding-log",
            Rule::Concurrency(_) => "concurrency",
        }
    }

    /// Compute one step of the algorithm, without writing the new state.
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

    /// Return the time in µs from a charge until a token bucket has repaid its earlier debt. The charge was made
    /// `elapsed_us` µs before the time of `outcome`. The debt of a bucket is the number of tokens that it lacks. The
    /// earlier debt is the debt right after the charge, minus `cost` tokens. Refill repays the earlier debt first, so
    /// only refill after the returned time reduces a refund of these `cost` tokens. The result is rounded down, to the
    /// client's disadvantage. For all other algorithms, the result is 0.
    pub fn debt_before_us(&self, outcome: &Outcome, elapsed_us: u64, cost: u64) -> u64 {
        match self {
            // A reset time of 0 means that the whole debt has been repaid since the charge.
            Rule::TokenBucket(rule) if outcome.reset_us > 0 => rule.debt_before_us(outcome.reset_us + elapsed_us, cost),
            Rule::TokenBucket(_)
            | Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_)
            | Rule::Concurrency(_) => 0,
        }
    }

    /// Return the time in µs in which a token bucket refills this number of tokens, rounded down. The result is 0 for
    /// the other algorithms.
    pub fn refill_time_us(&self, tokens: u64) -> u64 {
        match self {
            Rule::TokenBucket(rule) => rule.refill_time_us(tokens),
            Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_)
            | Rule::Concurrency(_) => 0,
        }
    }

    /// Return the kind of algorithm. The arguments of the Lua scripts contain the letter of this kind (see
    /// `lua/generic.lua`).
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

    /// Return the parameters `a` to `d` in the arguments of the Lua scripts (see `lua/generic.lua`). Calendar windows
    /// are those around `now_us`, in µs since the Unix epoch.
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

    /// Return the same algorithm with another quota. The default burst of a token bucket is the count of the quota.
    ///
    /// # Errors
    /// The quota needs integers that are not exact in Lua, or the algorithm does not support it.
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

    /// Return the same algorithm with this permit TTL, if the algorithm has permits.
    pub fn with_permit_ttl(self, ttl_us: u64) -> Rule {
        match self {
            Rule::Concurrency(rule) => Rule::Concurrency(Concurrency { ttl: ttl_us, ..rule }),
            rule @ (Rule::TokenBucket(_)
            | Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_)) => rule,
        }
    }

    /// Return the weight of a check in Redis ([`AlgorithmKind::weight`]) that writes or searches this number of tokens.
    pub fn weight(&self, tokens: u64) -> usize {
        let buckets = match self {
            Rule::SlidingBuckets(rule) => rule.buckets,
            Rule::TokenBucket(_)
            | Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingLog(_)
            | Rule::Concurrency(_) => 0,
        };
        self.kind().weight(tokens, buckets)
    }

    /// Parse a quota in the syntax of this algorithm.
    ///
    /// # Errors
    /// The text is not a valid quota.
    pub fn parse_quota(&self, text: &str) -> Result<Quota, QuotaError> {
        if self.is_concurrency() { Quota::parse_concurrency(text) } else { text.parse() }
    }

    /// Return whether the algorithm limits the requests in flight. The quota then has no window, and a request takes one
    /// permit regardless of its cost.
    pub fn is_concurrency(&self) -> bool {
        self.permit_ttl().is_some()
    }

    /// Return the time after which the permit of a request expires, if the algorithm has permits.
    pub fn permit_ttl(&self) -> Option<Duration> {
        match self {
            Rule::Concurrency(rule) => Some(Duration::from_micros(rule.ttl)),
            Rule::TokenBucket(_)
            | Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_) => None,
        }
    }

    /// Return the burst, if the algorithm has a burst besides the count of its quota.
    pub fn burst(&self) -> Option<u64> {
        match self {
            Rule::TokenBucket(rule) => Some(rule.burst),
            Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_)
            | Rule::Concurrency(_) => None,
        }
    }

    /// Return whether the state has an entry for each token, so that a request must not cost many tokens.
    pub fn stores_each_token(&self) -> bool {
        match self {
            Rule::SlidingLog(_) => true,
            Rule::TokenBucket(_)
            | Rule::FixedWindow(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::Concurrency(_) => false,
        }
    }

    /// Return whether all tokens are charged in a window that ends at a fixed time. Tokens that were charged in one
    /// window must not be used in the next window.
    pub fn has_fixed_windows(&self) -> bool {
        match self {
            Rule::FixedWindow(_) => true,
            Rule::TokenBucket(_)
            | Rule::SlidingWindow(_)
            | Rule::SlidingBuckets(_)
            | Rule::SlidingLog(_)
            | Rule::Concurrency(_) => false,
        }
    }

    /// Return the maximum cost that can be admitted in any window of the quota's length, whatever the timing of
    /// requests is. For a token bucket, the window is half-open: it does not include its end. For a concurrency limit,
    /// return the maximum number of requests in flight. `count` is the count of the quota.
    pub fn worst_case(&self, count: u64) -> u64 {
        match self {
            Rule::TokenBucket(bucket) => bucket.burst + count - 1,
            // Twice the count: a client may use up one window at its end, and the next window at its beginning.
            Rule::FixedWindow(FixedWindow {
                start: WindowStart::Aligned { .. } | WindowStart::Calendar(_), ..
            }) => 2 * count,
            // One less than for aligned windows. With `FirstRequest`, an earlier request must have opened the first
            // window and has used at least one of its tokens.
            Rule::FixedWindow(FixedWindow { start: WindowStart::FirstRequest, .. }) | Rule::SlidingWindow(_) => {
                2 * count - 1
            }
            Rule::SlidingBuckets(_) | Rule::SlidingLog(_) | Rule::Concurrency(_) => count,
        }
    }

    /// Return the largest cost that the limit can ever admit.
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

    /// Return the shape of the state. The shape identifies the algorithm and the window, but not the count of the
    /// quota. States of different shapes must not share a key.
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

    /// Return the rule of a gateway's local share, which the gateway applies while the store is down. `gateway_count`
    /// gateways share the quota. The local share can admit a charge of `cost`, even if `cost` is more than the
    /// gateway's part of the quota.
    pub fn local_share(&self, gateway_count: u64, cost: u64) -> Rule {
        let share_of = |size: u64| size.div_ceil(gateway_count).max(cost);
        match self {
            Rule::TokenBucket(rule) => Rule::TokenBucket(rule.share(gateway_count, share_of(rule.burst))),
            Rule::FixedWindow(rule) => Rule::FixedWindow(FixedWindow { limit: share_of(rule.limit), ..rule.clone() }),
            Rule::SlidingWindow(rule) => Rule::SlidingWindow(SlidingWindow { limit: share_of(rule.limit), ..*rule }),
            Rule::SlidingBuckets(rule) => Rule::SlidingBuckets(SlidingBuckets { limit: share_of(rule.limit), ..*rule }),
            Rule::SlidingLog(rule) => Rule::SlidingLog(SlidingLog { limit: share_of(rule.limit), ..*rule }),
            Rule::Concurrency(rule) => {
                Rule::Concurrency(Concurrency { limit: rule.limit.div_ceil(gateway_count), ..*rule })
            }
        }
    }
}

/// The kinds of algorithms that the arguments of the Lua scripts distinguish (see `lua/generic.lua`).
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
    /// Return the letter of the kind in the arguments of the Lua scripts.
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

    /// Return whether the single and the small driver of the scripts support this kind. These drivers support only states
    /// with three fields, and no calendar windows, because the algorithm of calendar windows can return an error.
    pub fn has_small_state(self) -> bool {
        match self {
            AlgorithmKind::TokenBucket
            | AlgorithmKind::FixedWindow
            | AlgorithmKind::FirstRequest
            | AlgorithmKind::SlidingWindow => true,
            AlgorithmKind::Calendar
            | AlgorithmKind::SlidingBuckets
            | AlgorithmKind::SlidingLog
            | AlgorithmKind::Concurrency => false,
        }
    }

    /// Return whether the state has three fields. In Redis, such states of an identity are in the value of one key.
    pub fn has_fields(self) -> bool {
        match self {
            AlgorithmKind::TokenBucket
            | AlgorithmKind::FixedWindow
            | AlgorithmKind::FirstRequest
            | AlgorithmKind::Calendar
            | AlgorithmKind::SlidingWindow => true,
            AlgorithmKind::SlidingBuckets | AlgorithmKind::SlidingLog | AlgorithmKind::Concurrency => false,
        }
    }

    /// Return the weight of a check: the time that Redis needs, as a multiple of the time for a token bucket, which is
    /// about 3 µs. A sliding log has an entry for each token. `tokens` is the number of entries that the check adds,
    /// removes or searches. `buckets` is the number of sliding buckets, all of which a check reads.
    pub fn weight(self, tokens: u64, buckets: u64) -> usize {
        let weight = match self {
            AlgorithmKind::TokenBucket
            | AlgorithmKind::FixedWindow
            | AlgorithmKind::FirstRequest
            | AlgorithmKind::Calendar
            | AlgorithmKind::SlidingWindow => 1,
            AlgorithmKind::SlidingBuckets => 2 + buckets / 8,
            // A log has at most `MAX_LOG_ENTRIES` entries. If the cost is higher, the check is denied.
            AlgorithmKind::SlidingLog => 6 + tokens.min(MAX_LOG_ENTRIES) / 32,
            AlgorithmKind::Concurrency => 4,
        };
        weight as usize
    }
}

/// Maximum [weight](AlgorithmKind::weight) of the checks of one request. Redis runs these checks in one script call,
/// without interruption. The configuration bounds the weight, so that a call takes at most 5 ms.
pub const MAX_REQUEST_WEIGHT: usize = 1024;

// === Input and output of one step ===

/// The state of one limit for one identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Token bucket: at `updated_at` (µs), the bucket lacked `debt` parts of `1/parts` token.
    Bucket {
        /// Time of the last charge, µs.
        updated_at: u64,
        /// Debt of the bucket, in units of 1/`parts` token.
        debt: u64,
        /// Number of parts into which the bucket divides a token.
        parts: u64,
        /// Time at which the key of the state expires in Redis, µs. The time is between 0.5 s and 1.001 s after the
        /// debt is repaid.
        key_expires_at: u64,
    },
    /// Fixed window: `count` tokens since the window opened at `start` (µs).
    Window {
        /// Start of the window, µs.
        start: u64,
        /// Tokens charged in this window.
        count: u64,
    },
    /// Sliding window: tokens of the aligned window that started at `start` (µs), and of the previous window.
    Sliding {
        /// Start of the window, µs.
        start: u64,
        /// Tokens charged in this window.
        current: u64,
        /// Tokens charged in the previous window.
        previous: u64,
    },
    /// Sliding buckets: the tokens in the newest bucket and in each bucket before it.
    Buckets {
        /// Number of the newest bucket, counted from the Unix epoch.
        index: u64,
        /// Tokens in each bucket, newest bucket first.
        counts: Box<[u64]>,
    },
    /// Sliding log: the times (µs) of the admitted tokens, oldest first.
    Log(VecDeque<u64>),
    /// Concurrency: the permits of requests in flight, in order of expiry.
    Permits(Vec<Permit>),
}

/// The kind of step for one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// Charge the cost if the remaining quota allows it.
    Check,
    /// Charge the cost even if it exceeds the remaining tokens.
    Charge,
    /// Refund a charge that was made at `charged_at`.
    Refund {
        /// Time of the admitting verdict, µs.
        charged_at: u64,
        /// Time in µs in which a token bucket repays the debt from before the charge ([`Rule::debt_before_us`]).
        debt_before_us: u64,
    },
    /// Renew a concurrency permit.
    Renew,
}

/// Whether a charge fits into the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The charge fits.
    Ok,
    /// The limit is exceeded. The charge fits after exactly `retry_us`.
    Exceeded,
    /// The cost is larger than the limit, so the charge can never fit.
    CostTooLarge,
    /// All permits are in use. The charge fits when a permit is released, after `retry_us` at the latest.
    Saturated,
}

/// The outcome of a charge for one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the charge fits, or why it does not.
    pub status: Status,
    /// Remaining tokens, rounded down.
    pub remaining: u64,
    /// µs until the limit is fully reset.
    pub reset_us: u64,
    /// Time in µs until the same charge fits. If the limit is saturated, the time is an upper bound. If the charge fits
    /// now or can never fit, the time is 0.
    pub retry_us: u64,
}

/// A change of the state. The change is made after all limits of the request have been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The state does not change.
    None,
    /// Delete the state, because it is empty.
    Delete,
    /// Replace the state. The second value is the time in µs after which the new state has the same meaning as no
    /// state.
    Put(State, u64),
    /// Change the entries of the sliding log.
    Log(LogEdit),
    /// Change the set of concurrency permits.
    Permits(PermitEdit),
}

/// An edit of a sliding log. The log itself is not copied, because it may be long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEdit {
    /// Time of the edit, µs. With `repair_clock_skew`, entries with a later time get this time.
    pub now: u64,
    /// Whether entries are in the future because the clock was set back.
    pub repair_clock_skew: bool,
    /// Number of oldest entries to drop.
    pub drop: usize,
    /// Number of tokens to append at `now`.
    pub push: u64,
    /// Refunded entries to remove, if any: a number of tokens and the time at which they were charged.
    pub remove: Option<(u64, u64)>,
    /// Time in µs after which the log has the same meaning as an empty log.
    pub window: u64,
}

/// A change of a set of concurrency permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PermitEdit {
    /// Time of the change, µs.
    pub now: u64,
    /// Permit TTL, µs.
    pub ttl: u64,
    /// The action on the set of permits.
    pub action: PermitAction,
}

/// Maximum number of tokens in a state or, for a token bucket, of parts of a token. Charges that exceed the limit raise
/// a value to at most this maximum, so that every sum stays exact.
pub const MAX_STATE: u64 = 1 << 52;

/// The result of a step, before anything is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The outcome, which includes the charge if it fits.
    pub outcome: Outcome,
    /// Tokens that remain without the charge.
    pub free: u64,
    /// µs until the limit is fully reset, without the charge.
    pub free_reset_us: u64,
    /// The change of the state if the charge fits. If the charge does not fit, the change repairs a state whose time is
    /// in the future, or a token bucket whose rate was lowered.
    pub change: Change,
}
