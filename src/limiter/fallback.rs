//! The fallback decides requests without the store, according to `on_store_error` of each limit.

use std::time::Duration;

use tracing::warn;

use crate::clock::{LogThrottle, unix_us};
use crate::limiter::decision::{Decision, LimitCheck, offer_events};
use crate::limiter::memory::MemoryStore;
use crate::limiter::notify::EventQueue;
use crate::limiter::spec::OnStoreError;
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Operation, StoreError, Verdict};

/// The limits of a request cannot be checked, and the request must be rejected.
#[derive(Debug, thiserror::Error)]
#[error("the limits cannot be checked: {0}")]
pub struct StoreUnavailable(#[source] pub StoreError);

/// Minimum interval between log records about corrupt states.
const CORRUPT_STATE_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Minimum interval between log records about checks that are rejected because of overload.
const OVERLOAD_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Reject checks that a working store did not perform in time, regardless of `on_store_error`. Otherwise a client could
/// exceed a limit by overloading the store. Shadow limits never reject.
pub(super) fn decide_overloaded<'a>(
    checks: &[LimitCheck<'a, '_>],
    error: StoreError,
) -> Result<Decision<'a>, StoreUnavailable> {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    if LOG_THROTTLE.should_log(OVERLOAD_LOG_INTERVAL) {
        warn!(%error, "rejecting checks: too many checks are queued for the store; docs/how-to/redis.md lists remedies");
    }
    if checks.iter().any(|check| !check.limit.shadow) {
        return Err(StoreUnavailable(error));
    }
    let verdict = Verdict::new(1, unix_us(), Vec::new());
    Ok(Decision { is_overloaded: true, ..Decision::new(verdict, DecidedBy::Local, std::iter::empty()) })
}

/// Decide during an outage. Fail closed if an enforced limit has `on_store_error = "deny"`. Otherwise, the limits with
/// `"local"` decide by their local shares. The other limits are not charged: only their usage totals are counted.
pub(super) fn decide_without_store<'a>(
    fallback: &MemoryStore,
    events: &EventQueue,
    checks: &[LimitCheck<'a, '_>],
    error: StoreError,
    first_permit_id: u64,
) -> Result<Decision<'a>, StoreUnavailable> {
    if let StoreError::CorruptState(_) = &error {
        // A corrupt state affects a single identity and is not an outage, so `on_store_error` does not apply. Log the
        // error here, because the circuit breaker does not log it.
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        if LOG_THROTTLE.should_log(CORRUPT_STATE_LOG_INTERVAL) {
            let limits: Vec<_> = checks.iter().map(|check| &*check.limit.name).collect();
            warn!(%error, ?limits, "rejecting requests of an identity: its stored state is corrupt; delete the \
                                    state or wait until it expires");
        }
        if checks.iter().any(|check| !check.limit.shadow) {
            return Err(StoreUnavailable(error));
        }
    }
    if checks.iter().any(|check| check.limit.on_store_error == OnStoreError::Deny && !check.limit.shadow) {
        return Err(StoreUnavailable(error));
    }
    let decision = decide_locally(fallback, events, checks, first_permit_id)?;
    if decision.admitted {
        for check in checks.iter().filter(|check| !falls_back_locally(check) && check.limit.usage.is_some()) {
            fallback.add_uncharged_usage(&check.charge(DecidedBy::Local, first_permit_id));
        }
    }
    Ok(decision)
}

fn falls_back_locally(check: &&LimitCheck<'_, '_>) -> bool {
    check.limit.on_store_error == OnStoreError::Local
}

/// Decide by the local shares of the limits that fall back to them.
fn decide_locally<'a>(
    fallback: &MemoryStore,
    events: &EventQueue,
    checks: &[LimitCheck<'a, '_>],
    first_permit_id: u64,
) -> Result<Decision<'a>, StoreUnavailable> {
    let charges: Vec<_> =
        checks.iter().filter(falls_back_locally).map(|check| check.charge(DecidedBy::Local, first_permit_id)).collect();
    let verdict = fallback.decide(Operation::Check, &charges);
    if verdict.full_limits == 0 {
        offer_events(events, &verdict, DecidedBy::Local, checks.iter().filter(falls_back_locally));
        return Ok(Decision::new(verdict, DecidedBy::Local, checks.iter().filter(falls_back_locally)));
    }
    let (verdict, checks_with_room) = decide_with_room(
        fallback,
        checks.iter().filter(falls_back_locally),
        verdict.full_limits,
        DecidedBy::Local,
        first_permit_id,
    )?;
    offer_events(events, &verdict, DecidedBy::Local, checks_with_room.iter().copied());
    Ok(Decision::new(verdict, DecidedBy::Local, checks_with_room.into_iter()))
}

/// Perform the checks for which the memory store has room. The other checks cannot be counted: shadow limits and limits
/// with `"allow"` then admit the request.
///
/// # Errors
/// The memory store has no room for a new state of an enforced limit without `"allow"`.
pub(super) fn decide_with_room<'c, 'a: 'c, 'p: 'c>(
    memory: &MemoryStore,
    checks: impl Iterator<Item = &'c LimitCheck<'a, 'p>>,
    full_limits: u64,
    decided_by: DecidedBy,
    first_permit_id: u64,
) -> Result<(Verdict, Vec<&'c LimitCheck<'a, 'p>>), StoreUnavailable> {
    let mut checks_with_room = Vec::new();
    let mut uncharged = Vec::new();
    for (index, check) in checks.enumerate() {
        if full_limits >> index.min(63) & 1 == 0 {
            checks_with_room.push(check);
        } else if !check.limit.shadow && check.limit.on_store_error != OnStoreError::Allow {
            return Err(StoreUnavailable(StoreError::CapacityExceeded));
        } else {
            uncharged.push(check);
        }
    }
    let charges: Vec<_> = checks_with_room.iter().map(|check| check.charge(decided_by, first_permit_id)).collect();
    let verdict = memory.decide(Operation::Check, &charges);
    // If the memory store now has no room for one of these checks, other requests have used the room since
    // `full_limits` was determined. Reject the request in this case.
    if verdict.full_limits != 0 {
        return Err(StoreUnavailable(StoreError::CapacityExceeded));
    }
    if verdict.granted > 0 {
        for check in uncharged {
            memory.add_uncharged_usage(&check.charge(decided_by, first_permit_id));
        }
    }
    Ok((verdict, checks_with_room))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::limiter::key::IdentityHasher;
    use crate::limiter::spec::LimitSpec;

    #[test]
    fn one_limit_that_denies_decides_for_all_limits_of_the_request() {
        use OnStoreError::{Allow, Deny, Local};
        let hasher = IdentityHasher::new("");
        let memory = MemoryStore::new(100, Clock::Store);
        let limit = |on_store_error, shadow| {
            let limit = LimitSpec::token_bucket(&hasher, "limit", "10/s".parse().unwrap()).unwrap();
            LimitSpec { on_store_error, shadow, ..limit }
        };
        for one in [Allow, Deny, Local] {
            for other in [Allow, Deny, Local] {
                for shadow in [false, true] {
                    let limits = [limit(one, false), limit(other, shadow)];
                    let checks = limits.each_ref().map(|limit| LimitCheck::new(limit, hasher.hash(b"client")));
                    let events = EventQueue::default();
                    let result = decide_without_store(&memory, &events, &checks, StoreError::Timeout, 0);
                    let is_denied = one == Deny || (other == Deny && !shadow);
                    assert_eq!(result.is_err(), is_denied, "{one:?} {other:?} {shadow}");
                }
            }
        }
    }
}
