//! Advances: units of hot sets of states that are charged ahead of the requests that will use them.
//!
//! For each set the process keeps at most one advance at a time, whatever the number of its workers: this is what the bounds
//! of the manual rest on. Time comes in as a value.

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::algorithm::{Outcome, Rule};
use super::clock::certain;
use super::store::Verdict;

/// What is not used within this time is given back: so long others may miss it.
pub const LONGEST: Duration = Duration::from_secs(1);

/// Sets with an advance at the same time: each may take some 500 bytes and a timer. Further ones are asked as if there were none.
const SETS: usize = 10_000;

/// The advances of a process.
#[derive(Debug, Default)]
pub struct Advances(Mutex<Sets>);

#[derive(Debug, Default)]
struct Sets {
    // std's hasher: with the published secret, identities choose the keys.
    kept: HashMap<u128, Advance, RandomState>,
    /// Those for which an advance is being asked for.
    asked: HashSet<u128, RandomState>,
}

#[derive(Debug)]
struct Advance {
    left: u64,
    /// From here on they are not used any more.
    until: Instant,
    /// When the verdict was here.
    decided: Instant,
    /// As it was after all of them were charged.
    verdict: Verdict,
}

/// The right to ask for an advance of a set; no other is asked for while it lasts.
#[derive(Debug)]
pub struct Reservation {
    advances: Arc<Advances>,
    set: u128,
}

/// Units that nobody used, and when they were charged, µs.
#[derive(Debug, PartialEq, Eq)]
pub struct Unused {
    /// How many.
    pub units: u64,
    /// The instant of their charge, by the store's clock.
    pub charged_at: u64,
}

impl Advances {
    /// One unit of a set, and when it was charged: the verdict that a call for it would have got.
    pub fn draw(&self, set: u128, now: Instant) -> Option<(Verdict, u64)> {
        let mut sets = self.lock();
        let advance = sets.kept.get_mut(&set).filter(|advance| advance.left > 0 && now < advance.until)?;
        advance.left -= 1;
        let elapsed_us = now.saturating_duration_since(advance.decided).as_micros() as u64;
        let told = |outcome: &Outcome| Outcome {
            // The units that are kept are there for callers, too.
            remaining: outcome.remaining + advance.left,
            reset_us: outcome.reset_us.saturating_sub(elapsed_us),
            ..*outcome
        };
        let Verdict { now_us, outcomes, .. } = &advance.verdict;
        let outcomes = outcomes.iter().map(told).collect();
        Some((Verdict::new(1, now_us + elapsed_us, outcomes), *now_us))
    }

    /// Whether an advance of the set was used up within its time: the set is as hot as it was.
    pub fn is_spent(&self, set: u128, now: Instant) -> bool {
        self.lock().kept.get(&set).is_some_and(|advance| advance.left == 0 && now < advance.until)
    }

    /// The right to ask for an advance, if none is kept or asked for.
    pub fn reserve(self: &Arc<Self>, set: u128) -> Option<Reservation> {
        let mut sets = self.lock();
        let room = sets.kept.get(&set).map_or(sets.kept.len() + sets.asked.len() < SETS, |advance| advance.left == 0);
        (room && sets.asked.insert(set)).then(|| Reservation { advances: self.clone(), set })
    }

    /// Ends the advance of a set that has lapsed.
    ///
    /// # Errors
    /// It lasts for so long still.
    pub fn end(&self, set: u128, now: Instant) -> Result<Unused, Duration> {
        let mut sets = self.lock();
        let lasts = sets.kept.get(&set).map_or(Duration::ZERO, |advance| advance.until.saturating_duration_since(now));
        if lasts.is_zero() { Ok(sets.remove(set)) } else { Err(lasts) }
    }

    /// Ends the advance of a set before its time.
    pub fn break_off(&self, set: u128) -> Unused {
        self.lock().remove(set)
    }

    fn lock(&self) -> MutexGuard<'_, Sets> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sets {
    fn remove(&mut self, set: u128) -> Unused {
        let removed = self.kept.remove(&set);
        removed.map_or(Unused { units: 0, charged_at: 0 }, |advance| Unused {
            units: advance.left,
            charged_at: advance.verdict.now_us,
        })
    }
}

impl Reservation {
    /// Keeps `units` of a call that was made at `asked`, of limits with these rules; whether somebody has to see to their end,
    /// because nobody does yet.
    pub fn keep<'r>(
        self,
        units: u64,
        verdict: Verdict,
        rules: impl Iterator<Item = &'r Rule>,
        asked: Instant,
        decided: Instant,
    ) -> bool {
        let until = asked + rules.zip(&verdict.outcomes).map(usable).min().unwrap_or_default();
        let advance = Advance { left: units, until, decided, verdict };
        match self.advances.lock().kept.entry(self.set) {
            Entry::Occupied(mut spent) => {
                spent.insert(advance);
                false
            }
            Entry::Vacant(vacant) => {
                vacant.insert(advance);
                true
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.advances.lock().asked.remove(&self.set);
    }
}

/// For how long, counted from before the call, units of a limit may be used.
fn usable((rule, outcome): (&Rule, &Outcome)) -> Duration {
    match rule {
        // What was counted in one window must not be used in the next.
        Rule::FixedWindow(_) => certain(Duration::from_micros(outcome.reset_us)).min(LONGEST),
        Rule::TokenBucket(_) | Rule::SlidingWindow(_) | Rule::SlidingBuckets(_) | Rule::SlidingLog(_) => LONGEST,
        // A slot is held by a request, not kept for one.
        Rule::Concurrency(_) => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::algorithm::Status;
    use crate::limit::algorithm::fixed_window::{FixedWindow, Start};
    use crate::limit::algorithm::sliding_log::SlidingLog;
    use crate::limit::clock::monotonic;

    const SECOND: u64 = 1_000_000;
    const SET: u128 = 7;

    fn log() -> Rule {
        Rule::SlidingLog(SlidingLog { limit: 100, window: 60 * SECOND })
    }

    fn window() -> Rule {
        Rule::FixedWindow(FixedWindow { limit: 100, window: 60 * SECOND, start: Start::Aligned { phase: 0 } })
    }

    fn verdict(remaining: u64, reset_us: u64) -> Verdict {
        let outcome = Outcome { status: Status::Ok, remaining, reset_us, retry_us: 0 };
        Verdict::new(9, 1000, vec![outcome])
    }

    /// An advance of one limit that was asked for and given at `at`.
    fn keep(advances: &Arc<Advances>, rule: &Rule, units: u64, reset_us: u64, at: Instant) -> bool {
        advances.reserve(SET).unwrap().keep(units, verdict(20, reset_us), std::iter::once(rule), at, at)
    }

    #[test]
    fn each_unit_is_drawn_once_and_told_as_left_until_then() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        assert!(keep(&advances, &log(), 3, 40 * SECOND, start), "somebody has to see to its end");
        assert_eq!(advances.draw(8, start), None, "of another set");
        let drawn = |after_ms: u64| advances.draw(SET, start + Duration::from_millis(after_ms));
        for (after_ms, remaining, reset_us) in
            [(0, 22, 40 * SECOND), (100, 21, 39_900_000), (999, 20, 40 * SECOND - 999_000)]
        {
            let (verdict, charged_at) = drawn(after_ms).unwrap();
            assert_eq!((verdict.granted, charged_at, verdict.now_us), (1, 1000, 1000 + after_ms * 1000));
            assert_eq!((verdict.outcomes[0].remaining, verdict.outcomes[0].reset_us), (remaining, reset_us));
        }
        assert_eq!(drawn(999), None, "three were kept");
    }

    #[test]
    fn what_is_not_used_within_the_time_is_unused_for_good() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        keep(&advances, &log(), 3, 40 * SECOND, start);
        advances.draw(SET, start).unwrap();
        assert_eq!(advances.end(SET, start + LONGEST / 4), Err(LONGEST * 3 / 4));
        assert_eq!(advances.draw(SET, start + LONGEST), None);
        assert_eq!(advances.end(SET, start + LONGEST), Ok(Unused { units: 2, charged_at: 1000 }));
        assert_eq!(advances.end(SET, start + LONGEST), Ok(Unused { units: 0, charged_at: 0 }), "given back once");
        assert_eq!(advances.draw(SET, start), None, "what is given back is nobody's");
    }

    #[test]
    fn units_of_a_fixed_window_end_before_it() {
        let start = monotonic();
        for (rules, reset_us, usable_us) in [
            (&[window()][..], 400_000, 399_800),
            (&[window()], 40 * SECOND, SECOND),
            (&[log()], 400_000, SECOND),
            (&[log(), window()], 400_000, 399_800),
        ] {
            let advances = Arc::<Advances>::default();
            let outcome = verdict(20, reset_us).outcomes[0];
            let verdict = Verdict { outcomes: vec![outcome; rules.len()], ..verdict(20, reset_us) };
            // The answer took its time: the window was that much closer to its end.
            let decided = start + Duration::from_millis(100);
            advances.reserve(SET).unwrap().keep(5, verdict, rules.iter(), start, decided);
            let until = start + Duration::from_micros(usable_us);
            assert!(advances.draw(SET, until - Duration::from_micros(1)).is_some(), "{rules:?}");
            assert_eq!(advances.draw(SET, until), None, "{rules:?}");
        }
    }

    #[test]
    fn a_set_never_has_two_advances() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        let first = advances.reserve(SET).unwrap();
        assert!(advances.reserve(SET).is_none(), "one is asked for");
        assert!(advances.reserve(8).is_some(), "another set is another matter");
        drop(first);
        keep(&advances, &log(), 2, SECOND, start);
        assert!(advances.reserve(SET).is_none(), "one is kept");
        advances.draw(SET, start).unwrap();
        assert!(advances.reserve(SET).is_none() && !advances.is_spent(SET, start), "one unit is");
        advances.draw(SET, start).unwrap();
        assert!(advances.is_spent(SET, start));
        assert!(!keep(&advances, &log(), 2, SECOND, start + LONGEST / 2), "who sees to its end goes on doing so");
        assert_eq!(advances.end(SET, start + LONGEST), Err(LONGEST / 2), "the second lasts longer");
        assert_eq!(advances.break_off(SET), Unused { units: 2, charged_at: 1000 });
        assert!(!advances.is_spent(SET, start) && advances.reserve(SET).is_some());
    }

    #[test]
    fn the_number_of_sets_is_bounded() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        for set in 0..2 * SETS as u128 {
            if let Some(reservation) = advances.reserve(set) {
                reservation.keep(1, verdict(1, SECOND), std::iter::once(&log()), start, start);
            }
        }
        assert_eq!(advances.lock().kept.len(), SETS);
        advances.draw(3, start).unwrap();
        assert!(advances.reserve(3).is_some(), "one that has its place keeps it");
    }
}
