//! The denial cache: what Redis has denied, and for how long, is denied here without asking again.
//!
//! After "over, retry in r" only a refund or a reset can admit the same cost earlier. Limits with `refund_on` are not cached, nor are
//! denials by several servers of a cluster, whose charges are given back when one of them denies. An abusive client costs Redis a
//! call each second.

use std::time::{Duration, Instant};

use quick_cache::sync::Cache;

use super::algorithm::{Outcome, Status};
use super::clock::{certain, monotonic};

/// Entries are not older: a client that keeps asking costs the store a call each second. Until then a denial may have become untrue, by a
/// reset, by prefetched units that another gateway gives back, and by those of a request that it could not answer in time.
pub const LONGEST: Duration = Duration::from_secs(1);

/// What was denied lately, bounded in number; shared by the workers of a process.
#[derive(Debug)]
pub struct Denials(Cache<u128, Denial>);

#[derive(Debug, Clone)]
struct Denial {
    plan: u64,
    cost: u64,
    /// Redis was asked after this instant, so its wait did not begin earlier: denied until then for certain.
    until: Instant,
    /// Redis had decided by this instant: what callers are told is counted from here, so that they do not come too early.
    decided: Instant,
    now_us: u64,
    outcome: Outcome,
}

/// A denial as it stands now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// The instant of the store's clock, µs since the Unix epoch.
    pub now_us: u64,
    /// What the limit would say.
    pub outcome: Outcome,
}

impl Denials {
    /// A cache for so many denials.
    pub fn new(entries: usize) -> Self {
        Denials(Cache::new(entries))
    }

    /// Whether a charge of `cost` against the state `key`, in the size `plan`, is denied for certain.
    pub fn find(&self, key: u128, plan: u64, cost: u64) -> Option<Known> {
        let denial = self.0.get(&key).filter(|denial| denial.plan == plan && denial.cost == cost)?;
        let now = monotonic();
        if now >= denial.until {
            self.0.remove(&key);
            return None;
        }
        let elapsed_us = now.saturating_duration_since(denial.decided).as_micros() as u64;
        let left = |us: u64| us.saturating_sub(elapsed_us);
        let Outcome { reset_us, retry_us, .. } = denial.outcome;
        let outcome = Outcome { reset_us: left(reset_us), retry_us: left(retry_us).max(1), ..denial.outcome };
        Some(Known { now_us: denial.now_us + elapsed_us, outcome })
    }

    /// Forgets all: somebody gave an identity more than it had.
    pub fn forget(&self) {
        self.0.clear();
    }

    /// Remembers a denial that was asked for at `asked` and is known now.
    pub fn note(&self, key: u128, plan: u64, cost: u64, known: Known, asked: Instant) {
        let Known { now_us, outcome } = known;
        // Busy may end at any time; what never fits is not asked for again and again.
        if outcome.status != Status::Over {
            return;
        }
        let until = asked + certain(Duration::from_micros(outcome.retry_us)).min(LONGEST);
        self.0.insert(key, Denial { plan, cost, until, decided: monotonic(), now_us, outcome });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over(retry_us: u64) -> Known {
        let outcome = Outcome { status: Status::Over, remaining: 3, reset_us: retry_us + 5, retry_us };
        Known { now_us: 1000, outcome }
    }

    #[test]
    fn what_was_denied_is_denied_for_the_same_size_and_cost() {
        let denials = Denials::new(100);
        denials.note(7, 1, 5, over(60_000_000), monotonic());
        let known = denials.find(7, 1, 5).unwrap();
        assert_eq!((known.outcome.status, known.outcome.remaining), (Status::Over, 3));
        assert!(known.outcome.retry_us <= 60_000_000 && known.outcome.retry_us > 50_000_000, "{known:?}");
        assert_eq!(denials.find(7, 1, 6), None, "more waits longer");
        assert_eq!(denials.find(7, 1, 4), None, "less may fit");
        assert_eq!(denials.find(7, 2, 5), None, "another size may have room");
        assert_eq!(denials.find(8, 1, 5), None, "another state");
    }

    #[test]
    fn the_wait_is_counted_from_when_it_was_asked_for() {
        let denials = Denials::new(100);
        let before = monotonic().checked_sub(Duration::from_millis(500)).unwrap();
        denials.note(7, 1, 1, over(490_000), before);
        assert_eq!(denials.find(7, 1, 1), None, "it may have passed");
        denials.note(7, 1, 1, over(900_000), before);
        assert!(denials.find(7, 1, 1).is_some());
    }

    #[test]
    fn only_what_ends_by_itself_is_remembered_and_not_for_ever() {
        let denials = Denials::new(100);
        for status in [Status::Busy, Status::Never, Status::Ok] {
            let known = Known { outcome: Outcome { status, ..over(60_000_000).outcome }, ..over(60_000_000) };
            denials.note(7, 1, 1, known, monotonic());
            assert_eq!(denials.find(7, 1, 1), None, "{status:?}");
        }
        let a_second_ago = monotonic().checked_sub(LONGEST).unwrap();
        denials.note(7, 1, 1, over(3_600_000_000), a_second_ago);
        assert_eq!(denials.find(7, 1, 1), None, "units may have come back");
    }

    #[test]
    fn the_cache_is_bounded() {
        let denials = Denials::new(1000);
        for key in 0..100_000 {
            denials.note(key, 1, 1, over(60_000_000), monotonic());
        }
        assert!(denials.0.len() <= 1000, "{}", denials.0.len());
    }
}
