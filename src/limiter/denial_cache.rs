//! The denial cache repeats a denial by Redis until the cached denial expires, without another call to Redis.
//!
//! With the cache, a client far above its limit costs Redis only one call per second. After a denial, the same cost can
//! be admitted before the retry time only if tokens are refunded, the state is reset or the quota changes. Denials of
//! limits with refunds are not cached. Denials by several servers of a cluster are not cached either, because the
//! charges of the other servers are refunded if one server denies.

use std::time::{Duration, Instant};

use quick_cache::sync::Cache;

use crate::clock::{monotonic, subtract_drift};
use crate::limiter::algorithm::{Outcome, Status};

/// Maximum age of an entry. A client that keeps sending requests therefore costs the store one call per second. During
/// this time, a cached denial may be wrong: an administrator may reset the identity, or another gateway may refund
/// prefetched tokens or the tokens of a check that timed out.
pub const MAX_DENIAL_AGE: Duration = Duration::from_secs(1);

/// A cache with a bounded number of denials, shared by all workers of a process.
#[derive(Debug)]
pub struct DenialCache(Cache<u128, CachedDenial>);

#[derive(Debug, Clone)]
struct CachedDenial {
    variant_id: u64,
    cost: u64,
    /// Time until which the denial is used. The retry time counts from the start of the call, so that the cached denial
    /// ends no later than the denial in Redis.
    expires_at: Instant,
    /// Time at which the verdict arrived. Retry and reset times for clients count from this time, so that clients do
    /// not retry too early.
    decided_at: Instant,
    now_us: u64,
    outcome: Outcome,
}

/// A cached denial, adjusted to the current time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenialHit {
    /// Time by the store's clock, µs since the Unix epoch.
    pub now_us: u64,
    /// The outcome that the limit would have now.
    pub outcome: Outcome,
}

impl DenialCache {
    /// Create a cache for this many denials.
    pub fn new(capacity: usize) -> Self {
        DenialCache(Cache::new(capacity))
    }

    /// Return the cached denial of a charge of `cost` to the state `key` in this variant, if the denial has not
    /// expired.
    pub fn get(&self, key: u128, variant_id: u64, cost: u64) -> Option<DenialHit> {
        let denial = self.0.get(&key).filter(|denial| denial.variant_id == variant_id && denial.cost == cost)?;
        let now = monotonic();
        if now >= denial.expires_at {
            self.0.remove(&key);
            return None;
        }
        let elapsed_us = now.saturating_duration_since(denial.decided_at).as_micros() as u64;
        let remaining_us = |us: u64| us.saturating_sub(elapsed_us);
        let Outcome { reset_us, retry_us, .. } = denial.outcome;
        let outcome =
            Outcome { reset_us: remaining_us(reset_us), retry_us: remaining_us(retry_us).max(1), ..denial.outcome };
        Some(DenialHit { now_us: denial.now_us + elapsed_us, outcome })
    }

    /// Remove all entries. Call this function after the tokens or the quota of an identity were increased.
    pub fn clear(&self) {
        self.0.clear();
    }

    /// Remove the cached denial of a state, because a refund may have made it wrong.
    pub fn remove(&self, key: u128) {
        self.0.remove(&key);
    }

    /// Insert a denial that has just arrived from the store. Its check began at `asked_at`.
    pub fn insert(&self, key: u128, variant_id: u64, cost: u64, hit: DenialHit, asked_at: Instant) {
        let DenialHit { now_us, outcome } = hit;
        // Cache only outcomes with the status `Exceeded`. Do not cache `Saturated`, because a concurrency limit may
        // admit a request at any time. Do not cache `CostTooLarge`, because clients rarely retry a cost that exceeds
        // the limit.
        if outcome.status != Status::Exceeded {
            return;
        }
        let expires_at = asked_at + subtract_drift(Duration::from_micros(outcome.retry_us)).min(MAX_DENIAL_AGE);
        self.0.insert(key, CachedDenial { variant_id, cost, expires_at, decided_at: monotonic(), now_us, outcome });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exceeded(retry_us: u64) -> DenialHit {
        let outcome = Outcome { status: Status::Exceeded, remaining: 3, reset_us: retry_us + 5, retry_us };
        DenialHit { now_us: 1000, outcome }
    }

    #[test]
    fn denial_is_cached_for_the_same_variant_and_cost() {
        let denials = DenialCache::new(100);
        denials.insert(7, 1, 5, exceeded(60_000_000), monotonic());
        let known = denials.get(7, 1, 5).unwrap();
        assert_eq!((known.outcome.status, known.outcome.remaining), (Status::Exceeded, 3));
        assert!(known.outcome.retry_us <= 60_000_000 && known.outcome.retry_us > 50_000_000, "{known:?}");
        assert_eq!(denials.get(7, 1, 6), None, "a larger cost may have to wait longer");
        assert_eq!(denials.get(7, 1, 4), None, "a smaller cost may be admitted");
        assert_eq!(denials.get(7, 2, 5), None, "another variant may have a larger quota");
        assert_eq!(denials.get(8, 1, 5), None, "another state has no denial");
    }

    #[test]
    fn cached_denial_expires_from_the_time_of_the_call() {
        let denials = DenialCache::new(100);
        let before = monotonic().checked_sub(Duration::from_millis(500)).unwrap();
        denials.insert(7, 1, 1, exceeded(490_000), before);
        assert_eq!(denials.get(7, 1, 1), None, "the retry time may have passed in Redis");
        denials.insert(7, 1, 1, exceeded(900_000), before);
        assert!(denials.get(7, 1, 1).is_some());
    }

    #[test]
    fn only_exceeded_denials_are_cached_and_expire() {
        let denials = DenialCache::new(100);
        for status in [Status::Saturated, Status::CostTooLarge, Status::Ok] {
            let known =
                DenialHit { outcome: Outcome { status, ..exceeded(60_000_000).outcome }, ..exceeded(60_000_000) };
            denials.insert(7, 1, 1, known, monotonic());
            assert_eq!(denials.get(7, 1, 1), None, "{status:?}");
        }
        let a_second_ago = monotonic().checked_sub(MAX_DENIAL_AGE).unwrap();
        denials.insert(7, 1, 1, exceeded(3_600_000_000), a_second_ago);
        assert_eq!(denials.get(7, 1, 1), None, "a refund may have freed quota");
    }

    #[test]
    fn denial_cache_is_bounded() {
        let denials = DenialCache::new(1000);
        for key in 0..100_000 {
            denials.insert(key, 1, 1, exceeded(60_000_000), monotonic());
        }
        assert!(denials.0.len() <= 1000, "{}", denials.0.len());
    }
}
