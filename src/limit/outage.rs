//! Decides without the store: by what each limit says of that.

use tokio::time::Duration;
use tracing::warn;

use super::backend::DecidedBy;
use super::clock::{Seldom, unix_us};
use super::decision::{Check, Decision};
use super::memory::MemoryStore;
use super::plan::OnStoreError;
use super::store::{Operation, StoreError, Verdict};

/// The store could not answer and a limit of the request says `deny`.
#[derive(Debug, thiserror::Error)]
#[error("the limits cannot be checked: {0}")]
pub struct Unavailable(#[source] pub StoreError);

/// A state that cannot be used is logged once in this time, however many requests meet it.
const BROKEN_SAID: Duration = Duration::from_secs(10);

/// That checks are rejected for overload is logged once in this time.
const OVERLOAD_SAID: Duration = Duration::from_secs(10);

/// A check that was not decided in time by a store that works is rejected, whatever its limits say of outages: otherwise a client
/// could exceed a limit by asking more. Shadow limits reject nothing.
pub(super) fn overloaded<'a>(checks: &[Check<'a, '_>], error: StoreError) -> Result<Decision<'a>, Unavailable> {
    static SAID: Seldom = Seldom::new();
    if SAID.unsaid_for(OVERLOAD_SAID) {
        warn!(%error, "checks are rejected for overload; docs/redis.md says what helps");
    }
    if checks.iter().any(|check| !check.limit.shadow) {
        return Err(Unavailable(error));
    }
    let verdict = Verdict::new(1, unix_us(), Vec::new());
    Ok(Decision { overloaded: true, ..Decision::new(verdict, DecidedBy::Local, std::iter::empty()) })
}

/// One limit that says deny decides for all; otherwise those that say local decide by their shares.
pub(super) fn without_store<'a>(
    fallback: &MemoryStore,
    checks: &[Check<'a, '_>],
    error: StoreError,
    first_lease: u64,
) -> Result<Decision<'a>, Unavailable> {
    if let StoreError::Broken(_) = &error {
        // It concerns one identity, whom no outage excuses; the breaker does not speak of it.
        static SAID: Seldom = Seldom::new();
        if SAID.unsaid_for(BROKEN_SAID) {
            let limits: Vec<_> = checks.iter().map(|check| &*check.limit.name).collect();
            warn!(%error, ?limits, "an identity is refused until its state is repaired or gone");
        }
        if checks.iter().any(|check| !check.limit.shadow) {
            return Err(Unavailable(error));
        }
    }
    if checks.iter().any(|check| check.limit.on_store_error == OnStoreError::Deny && !check.limit.shadow) {
        return Err(Unavailable(error));
    }
    let local = |check: &&Check<'a, '_>| check.limit.on_store_error == OnStoreError::Local;
    let charges: Vec<_> = checks.iter().filter(local).map(|check| check.charge(DecidedBy::Local, first_lease)).collect();
    let verdict = fallback.decide(Operation::Check, &charges);
    if verdict.full == 0 {
        return Ok(Decision::new(verdict, DecidedBy::Local, checks.iter().filter(local)));
    }
    let (verdict, counted) =
        without_room(fallback, checks.iter().filter(local), verdict.full, DecidedBy::Local, first_lease)?;
    Ok(Decision::new(verdict, DecidedBy::Local, counted.into_iter()))
}

/// Decides by the checks whose limits have room in the memory store. The others cannot count: shadow limits and those that say
/// allow pass.
pub(super) fn without_room<'c, 'a: 'c, 'p: 'c>(
    memory: &MemoryStore,
    checks: impl Iterator<Item = &'c Check<'a, 'p>>,
    full: u64,
    source: DecidedBy,
    first_lease: u64,
) -> Result<(Verdict, Vec<&'c Check<'a, 'p>>), Unavailable> {
    let mut counted = Vec::new();
    for (index, check) in checks.enumerate() {
        if full >> index.min(63) & 1 == 0 {
            counted.push(check);
        } else if !check.limit.shadow && check.limit.on_store_error != OnStoreError::Allow {
            return Err(Unavailable(StoreError::Full));
        }
    }
    let charges: Vec<_> = counted.iter().map(|check| check.charge(source, first_lease)).collect();
    let verdict = memory.decide(Operation::Check, &charges);
    // Otherwise another request has taken the room in between.
    if verdict.full == 0 { Ok((verdict, counted)) } else { Err(Unavailable(StoreError::Full)) }
}
