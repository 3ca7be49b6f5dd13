//! Decides without the store: by what each limit says of that.

use std::time::Duration;

use tracing::warn;

use crate::limiter::clock::{LogThrottle, unix_us};
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::memory::MemoryStore;
use crate::limiter::spec::OnStoreError;
use crate::limiter::store::DecidedBy;
use crate::limiter::verdict::{Operation, StoreError, Verdict};

/// The store could not answer and a limit of the request says `deny`.
#[derive(Debug, thiserror::Error)]
#[error("the limits cannot be checked: {0}")]
pub struct StoreUnavailable(#[source] pub StoreError);

/// A state that cannot be used is logged once in this time, however many requests meet it.
const CORRUPT_STATE_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// That checks are rejected for overload is logged once in this time.
const OVERLOAD_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A check that was not decided in time by a store that works is rejected, whatever its limits say of outages: otherwise a client
/// could exceed a limit by asking more. Shadow limits reject nothing.
pub(super) fn decide_overloaded<'a>(
    checks: &[LimitCheck<'a, '_>],
    error: StoreError,
) -> Result<Decision<'a>, StoreUnavailable> {
    static LOG_THROTTLE: LogThrottle = LogThrottle::new();
    if LOG_THROTTLE.should_log(OVERLOAD_LOG_INTERVAL) {
        warn!(%error, "checks are rejected for overload; docs/redis.md says what helps");
    }
    if checks.iter().any(|check| !check.limit.shadow) {
        return Err(StoreUnavailable(error));
    }
    let verdict = Verdict::new(1, unix_us(), Vec::new());
    Ok(Decision { is_overloaded: true, ..Decision::new(verdict, DecidedBy::Local, std::iter::empty()) })
}

/// One limit that says deny decides for all; otherwise those that say local decide by their shares.
pub(super) fn decide_without_store<'a>(
    fallback: &MemoryStore,
    checks: &[LimitCheck<'a, '_>],
    error: StoreError,
    first_permit_id: u64,
) -> Result<Decision<'a>, StoreUnavailable> {
    if let StoreError::CorruptState(_) = &error {
        // It concerns one identity, whom no outage excuses; the breaker does not speak of it.
        static LOG_THROTTLE: LogThrottle = LogThrottle::new();
        if LOG_THROTTLE.should_log(CORRUPT_STATE_LOG_INTERVAL) {
            let limits: Vec<_> = checks.iter().map(|check| &*check.limit.name).collect();
            warn!(%error, ?limits, "an identity is refused until its state is repaired or gone");
        }
        if checks.iter().any(|check| !check.limit.shadow) {
            return Err(StoreUnavailable(error));
        }
    }
    if checks.iter().any(|check| check.limit.on_store_error == OnStoreError::Deny && !check.limit.shadow) {
        return Err(StoreUnavailable(error));
    }
    let falls_back_locally = |check: &&LimitCheck<'a, '_>| check.limit.on_store_error == OnStoreError::Local;
    let charges: Vec<_> =
        checks.iter().filter(falls_back_locally).map(|check| check.charge(DecidedBy::Local, first_permit_id)).collect();
    let verdict = fallback.decide(Operation::Check, &charges);
    if verdict.full_limits == 0 {
        return Ok(Decision::new(verdict, DecidedBy::Local, checks.iter().filter(falls_back_locally)));
    }
    let (verdict, checks_with_room) = decide_with_room(
        fallback,
        checks.iter().filter(falls_back_locally),
        verdict.full_limits,
        DecidedBy::Local,
        first_permit_id,
    )?;
    Ok(Decision::new(verdict, DecidedBy::Local, checks_with_room.into_iter()))
}

/// Decides by the checks whose limits have room in the memory store. The others cannot count: shadow limits and those that say
/// allow pass.
pub(super) fn decide_with_room<'c, 'a: 'c, 'p: 'c>(
    memory: &MemoryStore,
    checks: impl Iterator<Item = &'c LimitCheck<'a, 'p>>,
    full_limits: u64,
    decided_by: DecidedBy,
    first_permit_id: u64,
) -> Result<(Verdict, Vec<&'c LimitCheck<'a, 'p>>), StoreUnavailable> {
    let mut checks_with_room = Vec::new();
    for (index, check) in checks.enumerate() {
        if full_limits >> index.min(63) & 1 == 0 {
            checks_with_room.push(check);
        } else if !check.limit.shadow && check.limit.on_store_error != OnStoreError::Allow {
            return Err(StoreUnavailable(StoreError::CapacityExceeded));
        }
    }
    let charges: Vec<_> = checks_with_room.iter().map(|check| check.charge(decided_by, first_permit_id)).collect();
    let verdict = memory.decide(Operation::Check, &charges);
    // Otherwise another request has taken the room in between.
    if verdict.full_limits == 0 {
        Ok((verdict, checks_with_room))
    } else {
        Err(StoreUnavailable(StoreError::CapacityExceeded))
    }
}
