//! Where the counters live. One call decides a whole request.

use std::future::Future;

use crate::limiter::algorithm::{Outcome, Rule};
use crate::limiter::key::Key;

/// What is asked of all charges of a call together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Check all, then commit all or none.
    Check,
    /// Look, write nothing.
    Peek,
    /// Charge whatever is left.
    Charge,
    /// Give back what was charged at this instant, µs.
    Refund {
        /// The admitted reply's time.
        charged_at: u64,
    },
    /// As many single units, up to the cost, as all limits still have; not for leases.
    TakeUpTo,
    /// Let leases end later, and add those that are gone; all charges are leases.
    Renew,
}

impl Operation {
    /// As the script contract says it: a letter, and when a refunded charge was made.
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

/// What one request asks of one limit.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    /// Whose state of which limit.
    pub key: Key<'a>,
    /// The algorithm and its parameters.
    pub rule: &'a Rule,
    /// Units.
    pub cost: u64,
    /// How the charge counts.
    pub mode: ChargeMode,
    /// The id of the lease, where the algorithm is concurrency.
    pub permit_id: u64,
    /// Of a refund to a token bucket: see [`Rule::debt_before_us`]; else 0.
    pub debt_before_us: u64,
}

/// How a charge counts towards the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChargeMode {
    /// It must fit, and is charged when the request is admitted.
    Enforced,
    /// It is charged if it fits, but never denies.
    Shadow,
    /// One unit must be left; the cost is charged after the response.
    Deferred,
    /// Both: never denies, and is charged after the response.
    ShadowDeferred,
}

impl ChargeMode {
    /// Whether it never denies a request.
    pub fn is_shadow(self) -> bool {
        matches!(self, ChargeMode::Shadow | ChargeMode::ShadowDeferred)
    }

    /// Whether the cost is charged after the response.
    pub fn is_deferred(self) -> bool {
        matches!(self, ChargeMode::Deferred | ChargeMode::ShadowDeferred)
    }

    /// The flag of the script contract.
    pub fn flag(self) -> &'static str {
        match self {
            ChargeMode::Enforced => "-",
            ChargeMode::Shadow => "s",
            ChargeMode::Deferred => "p",
            ChargeMode::ShadowDeferred => "b",
        }
    }
}

/// The store's reply for all charges of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// 0 denied, 1 admitted; for [`Operation::Take`] the number of units taken.
    pub granted: u64,
    /// The instant of the decision, µs since the Unix epoch by the store's clock.
    pub now_us: u64,
    /// One for each charge, in their order. Of a denied request or a peek: what is there uncharged.
    pub outcomes: Vec<Outcome>,
    /// Where several servers decided: the instant of each charge, by the clock of its own server. Else empty. A denial by several
    /// may end at any time: units that another request was granted by one of them and denied by another are given back.
    pub decided_at_us: Vec<u64>,
    /// Units that the same call charged after those of this verdict: the outcomes include them.
    pub charged_later: u64,
    /// Of the memory store: the charges, as bits, whose limits have no room for another identity. Nothing was charged then.
    pub full_limits: u64,
}

impl Verdict {
    /// Of one server.
    pub fn new(granted: u64, now_us: u64, outcomes: Vec<Outcome>) -> Self {
        Verdict { granted, now_us, outcomes, decided_at_us: Vec::new(), charged_later: 0, full_limits: 0 }
    }
}

/// Why there is no verdict.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// No connection, or it broke. The call may or may not have run.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
    /// No reply within `store.timeout` from a store that fails otherwise, too. The call may still run.
    #[error("the store did not answer in time")]
    Timeout,
    /// No reply within `store.timeout` while the store answers others. The call may still run; what it charges is given back.
    #[error("the store did not answer in time, as it did for others")]
    LateReply,
    /// The breaker is open: the store was not asked.
    #[error("the store is failing and is not asked")]
    BreakerOpen,
    /// The queue is full, or the check was not sent within `store.timeout`: the store was not asked.
    #[error("more checks are queued than the store can decide in time")]
    Overloaded,
    /// An error that is not about this call: others get the same.
    #[error("the store refuses calls: {}", reply(_0))]
    Rejected(#[source] redis::RedisError),
    /// Another server of a cluster keeps the state, or will. Nothing ran.
    #[error("the store is a node of a cluster and keeps only a part: {}", reply(_0))]
    Redirected(#[source] redis::RedisError),
    /// No room, no disk or no replicas: what would write is refused, and nothing ran. What writes nothing is answered.
    #[error("the store refuses writes: {}", reply(_0))]
    WritesRejected(#[source] redis::RedisError),
    /// The script failed on what it found; calls about other states do not.
    #[error("a state in the store cannot be used: {}", reply(_0))]
    CorruptState(#[source] redis::RedisError),
    /// A limit has no room for another identity in the memory store. Nothing was charged.
    #[error("`store.max_memory_states` has no room for another identity of a limit")]
    CapacityExceeded,
    /// The store answered something that is no verdict.
    #[error("the store's reply is not a verdict")]
    MalformedReply,
}

impl StoreError {
    /// Whether it is certain that the call did not run and will not.
    pub fn is_not_executed(&self) -> bool {
        match self {
            StoreError::BreakerOpen
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
    /// The error reply, if there is one.
    pub fn error_reply(&self) -> Option<&redis::RedisError> {
        match self {
            StoreError::Rejected(error)
            | StoreError::Redirected(error)
            | StoreError::WritesRejected(error)
            | StoreError::CorruptState(error) => Some(error),
            StoreError::Unreachable(_)
            | StoreError::Timeout
            | StoreError::LateReply
            | StoreError::BreakerOpen
            | StoreError::Overloaded
            | StoreError::CapacityExceeded
            | StoreError::MalformedReply => None,
        }
    }

    /// Whether the store as a whole cannot be used.
    pub fn is_outage(&self) -> bool {
        matches!(
            self,
            StoreError::Unreachable(_) | StoreError::Timeout | StoreError::BreakerOpen | StoreError::Rejected(_)
        )
    }

    /// Whether the check came too late while the store works. That is no outage: it does not follow `on_store_error`.
    pub fn is_overload(&self) -> bool {
        matches!(self, StoreError::Overloaded | StoreError::LateReply)
    }
}

/// An error reply as the server wrote it.
fn reply(error: &redis::RedisError) -> String {
    [error.code(), error.detail()].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Where the counters live.
pub trait CounterStore: Send + Sync {
    /// Decides all of `charges` at one instant.
    ///
    /// # Errors
    /// See [`StoreError`]. A call that ended with an error is never sent again: it may have run.
    fn call(
        &self,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> impl Future<Output = Result<Verdict, StoreError>> + Send;
}
