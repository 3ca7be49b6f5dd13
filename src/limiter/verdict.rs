//! The interface of a counter store: operations, charges, verdicts and errors. One call performs all checks of a
//! request.

use std::fmt;
use std::sync::Arc;

use crate::limiter::algorithm::{MAX_STATE, Outcome, Rule, Status};
use crate::limiter::key::Key;
use crate::limiter::metrics::{LimiterMetrics, LostCost};
use crate::limiter::usage::{UsageDay, UsageDays};

/// The operation that a call applies to all of its charges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Check whether all charges fit, then make all of them or none.
    Check,
    /// Return the outcomes without changing the states.
    Peek,
    /// Charge the cost even if it exceeds the remaining tokens.
    Charge,
    /// Refund a charge that was made at `charged_at`.
    Refund {
        /// Time of the admitting verdict, in µs since the Unix epoch.
        charged_at: u64,
    },
    /// Charge as many tokens as remain in every limit, but at most the cost. Not available for concurrency limits.
    TakeUpTo,
    /// Renew concurrency permits, and add permits that the store has lost. All charges must belong to concurrency
    /// limits.
    Renew,
}

impl Operation {
    /// Return whether the operation settles a request that the store has already admitted or charged. Settlements come
    /// before checks: until then, the store counts too much, or lacks a cost.
    pub fn is_settlement(self) -> bool {
        match self {
            Operation::Charge | Operation::Refund { .. } | Operation::Renew => true,
            Operation::Check | Operation::Peek | Operation::TakeUpTo => false,
        }
    }

    /// Return the kind of cost that is lost if a call with this operation never gets a reply. Return `None` if the
    /// operation charges nothing.
    pub fn lost_cost(self) -> Option<LostCost> {
        match self {
            Operation::Check | Operation::TakeUpTo | Operation::Refund { .. } => Some(LostCost::Refund),
            Operation::Charge => Some(LostCost::Charge),
            Operation::Peek | Operation::Renew => None,
        }
    }

    /// Return the operation's letter in the arguments of the Lua scripts. For a refund, also return the time of the
    /// refunded charge in µs since the Unix epoch. For other operations, the time is 0.
    pub fn script_arguments(self) -> (&'static str, u64) {
        match self {
            Operation::Check => ("C", 0),
            Operation::Peek => ("P", 0),
            Operation::Charge => ("A", 0),
            Operation::Refund { charged_at } => ("R", charged_at),
            Operation::TakeUpTo => ("T", 0),
            Operation::Renew => ("N", 0),
        }
    }
}

/// A charge of one request to one limit.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    /// The key of the state: identity and limit.
    pub key: Key<'a>,
    /// The algorithm and its parameters.
    pub rule: &'a Rule,
    /// Cost, in tokens.
    pub cost: u64,
    /// Whether the limit can deny the request, and when the cost is charged.
    pub mode: ChargeMode,
    /// The permit id, if the algorithm is concurrency; otherwise 0.
    pub permit_id: u64,
    /// For a refund to a token bucket, the result of [`Rule::debt_before_us`]. Otherwise 0.
    pub debt_before_us: u64,
    /// The calendar days for usage totals. `None` if the limit has no usage totals.
    pub usage: Option<&'a Arc<UsageDays>>,
}

impl Charge<'_> {
    /// Return the day whose usage total an operation at about `now_us` changes. A refund changes the total of the day
    /// on which the charge was made. Return `None` if the operation changes no total.
    pub fn usage_day(&self, operation: Operation, now_us: u64) -> Option<UsageDay> {
        let days = self.usage?;
        match operation {
            // No total changes now, because a deferred cost is charged later.
            Operation::Check if self.mode.is_deferred() => None,
            Operation::Check | Operation::TakeUpTo | Operation::Charge => Some(days.day_at(now_us)),
            Operation::Refund { charged_at } => Some(days.day_at(charged_at).at_any_time()),
            Operation::Peek | Operation::Renew => None,
        }
    }

    /// Return the amount that the operation adds to the usage total. This is the amount that the operation charges to
    /// the state. The amount is negative for a refund. `granted` and `status` come from the verdict.
    pub fn usage_amount(&self, operation: Operation, granted: u64, status: Status) -> i64 {
        let amount = |cost: u64| cost.min(MAX_STATE) as i64;
        match operation {
            _ if status != Status::Ok => 0,
            Operation::Check if self.mode.is_deferred() || granted == 0 => 0,
            Operation::Check | Operation::Charge => amount(self.cost),
            Operation::TakeUpTo => amount(granted),
            Operation::Refund { .. } => -amount(self.cost),
            Operation::Peek | Operation::Renew => 0,
        }
    }
}

/// Whether a limit can deny the request, and when the cost is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChargeMode {
    /// The request is admitted only if the cost fits. The cost is charged at once.
    Enforced,
    /// The cost is charged if it fits, but the limit never denies.
    Shadow,
    /// The request is admitted if at least one token remains. The cost is charged after the response.
    Deferred,
    /// Shadow mode with a deferred cost: the limit never denies, and the cost is charged after the response.
    ShadowDeferred,
}

impl ChargeMode {
    /// Return whether the charge never denies a request.
    pub fn is_shadow(self) -> bool {
        matches!(self, ChargeMode::Shadow | ChargeMode::ShadowDeferred)
    }

    /// Return whether the cost is charged after the response.
    pub fn is_deferred(self) -> bool {
        matches!(self, ChargeMode::Deferred | ChargeMode::ShadowDeferred)
    }

    /// Return the mode's flag in the arguments of the Lua scripts.
    pub fn flag(self) -> &'static str {
        match self {
            ChargeMode::Enforced => "-",
            ChargeMode::Shadow => "s",
            ChargeMode::Deferred => "p",
            ChargeMode::ShadowDeferred => "b",
        }
    }
}

/// The reply of the store for all charges of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// 0 means denied, and 1 means admitted. For [`Operation::TakeUpTo`], the number of tokens taken.
    pub granted: u64,
    /// Time of the decision by the store's clock, µs since the Unix epoch.
    pub now_us: u64,
    /// The outcome of each charge, in the order of the charges. For a denied request or a peek, `remaining` is the
    /// value without the charge.
    pub outcomes: Vec<Outcome>,
    /// If several servers decided, the time of each charge by the clock of its server. Otherwise the list is empty. A
    /// denial by several servers may become wrong at any time: if one server grants tokens to another request and a
    /// second server denies that request, the granted tokens are refunded.
    pub decided_at_us: Vec<u64>,
    /// Number of tokens that the same call charged for checks after this one. The outcomes already count these tokens
    /// as charged.
    pub charged_later: u64,
    /// Bit mask, by charge index, of the limits for which the memory store has no room for another identity. If the
    /// mask is not 0, nothing was charged. With Redis, the mask is always 0.
    pub full_limits: u64,
}

impl Verdict {
    /// Create the verdict of a single server.
    pub fn new(granted: u64, now_us: u64, outcomes: Vec<Outcome>) -> Self {
        Verdict { granted, now_us, outcomes, decided_at_us: Vec::new(), charged_later: 0, full_limits: 0 }
    }
}

/// Count the cost of a settlement that failed for good. A call without a reply is not counted here: the client of the
/// server still waits for the reply, and counts the cost itself (see [`StoreError::is_unanswered`]).
pub fn count_lost(metrics: &LimiterMetrics, operation: Operation, charges: &[Charge<'_>], error: &StoreError) {
    let Some(kind) = operation.lost_cost().filter(|_| !error.is_unanswered()) else { return };
    let lasting = charges.iter().filter(|charge| !charge.rule.is_concurrency());
    metrics.lost_cost.add(kind as usize, lasting.map(|charge| charge.cost).sum());
}

/// An error reply of Redis: a code, a space and a detail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorReply(Arc<str>);

impl ErrorReply {
    /// Create an error reply.
    pub fn new(code: &str, detail: &str) -> Self {
        ErrorReply(if detail.is_empty() { code.into() } else { format!("{code} {detail}").into() })
    }

    /// Return the code, such as `MOVED`.
    pub fn code(&self) -> &str {
        self.split().0
    }

    /// Return the detail. The result is empty if the reply has no detail.
    pub fn detail(&self) -> &str {
        self.split().1
    }

    fn split(&self) -> (&str, &str) {
        self.0.split_once(' ').unwrap_or((&self.0, ""))
    }
}

impl fmt::Display for ErrorReply {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// The reason why a call has no verdict.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// There is no connection, so nothing was sent.
    #[error("the store cannot be reached: {0}")]
    NotConnected(String),
    /// The connection was lost. The store may or may not have executed the call.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
    /// Redis did not reply within `store.timeout`, and it does not reply to PING either. The store may still execute the
    /// call.
    #[error("the store did not answer in time")]
    Timeout,
    /// Redis did not reply within `store.timeout`, but the circuit breaker is closed: Redis is busy. The store may still
    /// execute the call, and its charges are then refunded.
    #[error("the store did not answer this check in time, although it answers others")]
    LateReply,
    /// The circuit breaker is open, so the call was not sent.
    #[error("the circuit breaker of the store is open")]
    BreakerOpen,
    /// The queue of checks is full, or the check could not be sent within `store.timeout`. Nothing was sent to the
    /// store.
    #[error("too many checks are queued: the store could not decide this one in time")]
    Overloaded,
    /// An error reply that does not depend on this call: other calls get it as well.
    #[error("the store rejects calls: {0}")]
    Rejected(ErrorReply),
    /// Another server of the cluster keeps the state, or will keep it after a migration. The store did not execute the
    /// call.
    #[error("another cluster node owns the state: {0}")]
    Redirected(ErrorReply),
    /// The server rejects writes, because it is out of memory, has a disk error or has too few replicas. The call was
    /// not executed. Calls that do not write still succeed.
    #[error("the store rejects writes: {0}")]
    WritesRejected(ErrorReply),
    /// The Lua script failed because of the stored state. Calls for other states do not fail.
    #[error("a state in the store is corrupt: {0}")]
    CorruptState(ErrorReply),
    /// The memory store is full: a limit has no room for another identity. Nothing was charged.
    #[error("the memory store is full: a limit cannot count another identity (`store.max_memory_states`)")]
    CapacityExceeded,
    /// The reply of the store is not a verdict.
    #[error("the reply of the store is malformed")]
    MalformedReply,
}

impl StoreError {
    /// Return whether it is certain that the call was not executed and will not be executed.
    pub fn is_not_executed(&self) -> bool {
        match self {
            StoreError::NotConnected(_)
            | StoreError::BreakerOpen
            | StoreError::Overloaded
            | StoreError::Redirected(_)
            | StoreError::WritesRejected(_)
            | StoreError::CapacityExceeded => true,
            StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::LateReply
            | StoreError::Rejected(_)
            | StoreError::CorruptState(_)
            | StoreError::MalformedReply => false,
        }
    }
}

impl StoreError {
    /// Return the error reply of the store, if there is one.
    pub fn error_reply(&self) -> Option<&ErrorReply> {
        match self {
            StoreError::Rejected(reply)
            | StoreError::Redirected(reply)
            | StoreError::WritesRejected(reply)
            | StoreError::CorruptState(reply) => Some(reply),
            StoreError::NotConnected(_)
            | StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::LateReply
            | StoreError::BreakerOpen
            | StoreError::Overloaded
            | StoreError::CapacityExceeded
            | StoreError::MalformedReply => None,
        }
    }

    /// Return whether the store is unavailable for all calls.
    pub fn is_outage(&self) -> bool {
        matches!(
            self,
            StoreError::NotConnected(_)
                | StoreError::Unreachable(_)
                | StoreError::Timeout
                | StoreError::BreakerOpen
                | StoreError::Rejected(_)
        )
    }

    /// Return whether the call was sent and has no reply. The client of the server waits for the reply of such a call,
    /// and counts its cost as lost if the reply never arrives.
    pub fn is_unanswered(&self) -> bool {
        matches!(self, StoreError::Unreachable(_) | StoreError::Timeout | StoreError::LateReply)
    }

    /// Return whether the check was too late although the store works. A late check is not an outage, so
    /// `on_store_error` does not apply.
    pub fn is_overload(&self) -> bool {
        matches!(self, StoreError::Overloaded | StoreError::LateReply)
    }
}
