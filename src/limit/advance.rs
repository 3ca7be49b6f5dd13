//! Advances: units of hot sets of states that are charged ahead of the requests that will use them.
//!
//! For each set the process keeps at most one advance at a time, whatever the number of its workers. Sets may share states, as a global
//! limit and one of each client do: of each state the process holds at most the prefetch of its limit, in all its sets together.
//! This is what the bounds of the manual rest on. Time comes in as a value.

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
    /// Units of each state that are kept or being asked for, in all sets.
    outstanding: HashMap<u128, u64, RandomState>,
}

#[derive(Debug)]
struct Advance {
    left: u64,
    /// What each unit was charged to.
    states: Arc<[u128]>,
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
    states: Arc<[u128]>,
    /// Not kept yet.
    units: u64,
}

/// Units that nobody used, and when they were charged, µs.
#[derive(Debug, PartialEq, Eq)]
pub struct Unused {
    /// How many.
    pub units: u64,
    /// The instant of their charge, by the store's clock.
    pub charged_at: u64,
    /// What the limits said when they were charged, as the last units of their call.
    pub outcomes: Vec<Outcome>,
}

impl Advances {
    /// One unit of a set, and when it was charged: the verdict that a call for it would have got.
    pub fn draw(&self, set: u128, now: Instant) -> Option<(Verdict, u64)> {
        let mut sets = self.lock();
        let Sets { kept, outstanding, .. } = &mut *sets;
        let advance = kept.get_mut(&set).filter(|advance| advance.left > 0 && now < advance.until)?;
        advance.left -= 1;
        release(outstanding, &advance.states, 1);
        let elapsed_us = now.saturating_duration_since(advance.decided).as_micros() as u64;
        let told = |outcome: &Outcome| Outcome {
            // The units that are kept are there for callers, too.
            remaining: outcome.remaining + advance.left,
            reset_us: outcome.reset_us.saturating_sub(elapsed_us),
            ..*outcome
        };
        let Verdict { now_us, outcomes, .. } = &advance.verdict;
        let outcomes = outcomes.iter().map(told).collect();
        let verdict = Verdict::new(1, now_us + elapsed_us, outcomes);
        Some((Verdict { charged_after: advance.verdict.charged_after + advance.left, ..verdict }, *now_us))
    }

    /// Whether an advance of the set was used up within its time: the set is as hot as it was.
    pub fn is_spent(&self, set: u128, now: Instant) -> bool {
        self.lock().kept.get(&set).is_some_and(|advance| advance.left == 0 && now < advance.until)
    }

    /// The right to ask for an advance, if none of the set is kept or asked for; of as many units as each of its `states` still may
    /// have outstanding.
    pub fn reserve(self: &Arc<Self>, set: u128, states: impl Iterator<Item = (u128, u64)>) -> Option<Reservation> {
        let mut sets = self.lock();
        let room = sets.kept.get(&set).map_or(sets.kept.len() + sets.asked.len() < SETS, |advance| advance.left == 0);
        if !room || sets.asked.contains(&set) {
            return None;
        }
        let mut units = u64::MAX;
        let states: Arc<[u128]> = states
            .map(|(state, most)| {
                units = units.min(most.saturating_sub(sets.outstanding.get(&state).copied().unwrap_or(0)));
                state
            })
            .collect();
        if units == 0 || states.is_empty() {
            return None;
        }
        for state in &*states {
            *sets.outstanding.entry(*state).or_default() += units;
        }
        sets.asked.insert(set);
        Some(Reservation { advances: self.clone(), set, states, units })
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
        let Some(advance) = self.kept.remove(&set) else {
            return Unused { units: 0, charged_at: 0, outcomes: Vec::new() };
        };
        release(&mut self.outstanding, &advance.states, advance.left);
        Unused { units: advance.left, charged_at: advance.verdict.now_us, outcomes: advance.verdict.outcomes }
    }
}

/// Units are used or given back: others of their states may be asked for.
fn release(outstanding: &mut HashMap<u128, u64, RandomState>, states: &[u128], units: u64) {
    for state in states {
        if let Entry::Occupied(mut held) = outstanding.entry(*state) {
            *held.get_mut() -= units.min(*held.get());
            if *held.get() == 0 {
                held.remove();
            }
        }
    }
}

impl Reservation {
    /// How many units may be asked for.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Keeps `units` of a call that was made at `asked`, of limits with these rules; whether somebody has to see to their end,
    /// because nobody does yet.
    pub fn keep<'r>(
        mut self,
        units: u64,
        verdict: Verdict,
        rules: impl Iterator<Item = &'r Rule>,
        asked: Instant,
        decided: Instant,
    ) -> bool {
        let until = asked + rules.zip(&verdict.outcomes).map(usable).min().unwrap_or_default();
        // No more than was asked for; the rest of it is released with the reservation.
        let units = units.min(self.units);
        self.units -= units;
        let advance = Advance { left: units, states: self.states.clone(), until, decided, verdict };
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
        let mut sets = self.advances.lock();
        sets.asked.remove(&self.set);
        release(&mut sets.outstanding, &self.states, self.units);
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

    /// The states of a set of one limit, of which this many units may be outstanding.
    fn state(most: u64) -> impl Iterator<Item = (u128, u64)> {
        std::iter::once((1, most))
    }

    /// An advance of one limit that was asked for and given at `at`.
    fn keep(advances: &Arc<Advances>, rule: &Rule, units: u64, reset_us: u64, at: Instant) -> bool {
        advances.reserve(SET, state(100)).unwrap().keep(units, verdict(20, reset_us), std::iter::once(rule), at, at)
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
            assert_eq!(verdict.charged_after, remaining - 20, "units of the call that are drawn later");
        }
        assert_eq!(drawn(999), None, "three were kept");
    }

    #[test]
    fn what_is_not_used_within_the_time_is_unused_for_good() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        keep(&advances, &log(), 3, 40 * SECOND, start);
        advances.draw(SET, start).unwrap();
        let outcomes = verdict(20, 40 * SECOND).outcomes;
        assert_eq!(advances.end(SET, start + LONGEST / 4), Err(LONGEST * 3 / 4));
        assert_eq!(advances.draw(SET, start + LONGEST), None);
        assert_eq!(advances.end(SET, start + LONGEST), Ok(Unused { units: 2, charged_at: 1000, outcomes }));
        assert_eq!(
            advances.end(SET, start + LONGEST),
            Ok(Unused { units: 0, charged_at: 0, outcomes: vec![] }),
            "given back once"
        );
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
            advances.reserve(SET, state(100)).unwrap().keep(5, verdict, rules.iter(), start, decided);
            let until = start + Duration::from_micros(usable_us);
            assert!(advances.draw(SET, until - Duration::from_micros(1)).is_some(), "{rules:?}");
            assert_eq!(advances.draw(SET, until), None, "{rules:?}");
        }
    }

    #[test]
    fn a_set_never_has_two_advances() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        let reserve = |set| advances.reserve(set, std::iter::once((set, 100)));
        let first = reserve(SET).unwrap();
        assert!(reserve(SET).is_none(), "one is asked for");
        assert!(reserve(8).is_some(), "another set is another matter");
        drop(first);
        keep(&advances, &log(), 2, SECOND, start);
        assert!(reserve(SET).is_none(), "one is kept");
        advances.draw(SET, start).unwrap();
        assert!(reserve(SET).is_none() && !advances.is_spent(SET, start), "one unit is");
        advances.draw(SET, start).unwrap();
        assert!(advances.is_spent(SET, start));
        assert!(!keep(&advances, &log(), 2, SECOND, start + LONGEST / 2), "who sees to its end goes on doing so");
        assert_eq!(advances.end(SET, start + LONGEST), Err(LONGEST / 2), "the second lasts longer");
        let outcomes = verdict(20, SECOND).outcomes;
        assert_eq!(advances.break_off(SET), Unused { units: 2, charged_at: 1000, outcomes });
        assert!(!advances.is_spent(SET, start) && reserve(SET).is_some());
    }

    /// A global limit of which 50 units may be outstanding, and a limit of each client.
    #[test]
    fn sets_that_share_a_state_share_what_may_be_outstanding_of_it() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        let reserve = |client: u128| advances.reserve(client, [(0, 50), (client, 30)].into_iter());
        let keep = |reservation: Reservation, units| {
            reservation.keep(units, verdict(20, SECOND), [log(), log()].iter(), start, start)
        };
        let first = reserve(1).unwrap();
        assert_eq!(first.units(), 30, "as many as the client's own limit may have");
        let second = reserve(2).unwrap();
        assert_eq!(second.units(), 20, "the rest of the global one's");
        assert!(reserve(3).is_none(), "there is none left");
        keep(first, 25);
        assert_eq!(reserve(3).unwrap().units(), 5, "what was not granted");
        drop(second);
        assert_eq!(reserve(3).unwrap().units(), 25, "what was asked for in vain");
        for _ in 0..10 {
            advances.draw(1, start).unwrap();
        }
        assert_eq!(reserve(3).unwrap().units(), 30, "what is drawn is not outstanding any more");
        assert_eq!(advances.break_off(1).units, 15);
        assert!(advances.lock().outstanding.is_empty());
    }

    proptest::proptest! {
        #[test]
        fn no_state_ever_has_more_outstanding_than_its_prefetch(
            steps in proptest::collection::vec((0u128..6, 0u64..40, 0u8..5), 1..200)
        ) {
            // Sets of one to three of four states, each with a prefetch of its own.
            let prefetch = [10, 25, 40, 7];
            let states = |set: u128| (0..4).filter(move |state| (set + 2) >> state & 1 == 1).map(|state| state as usize);
            let (advances, start) = (Arc::<Advances>::default(), monotonic());
            let (mut asked, mut kept) = (HashMap::<u128, Reservation>::new(), HashMap::<u128, u64>::new());
            for (set, units, action) in steps {
                match action {
                    0 | 1 => {
                        let wanted = states(set).map(|state| (state as u128, prefetch[state]));
                        if let Some(reservation) = advances.reserve(set, wanted) {
                            asked.insert(set, reservation);
                        }
                    }
                    2 => {
                        if let Some(reservation) = asked.remove(&set) {
                            let units = units.min(reservation.units());
                            let rules: Vec<_> = states(set).map(|_| log()).collect();
                            reservation.keep(units, verdict(20, SECOND), rules.iter(), start, start);
                            kept.insert(set, units);
                        }
                    }
                    3 => {
                        if advances.draw(set, start).is_some() {
                            *kept.get_mut(&set).unwrap() -= 1;
                        }
                    }
                    _ => {
                        let unused = advances.break_off(set).units;
                        proptest::prop_assert_eq!(unused, kept.remove(&set).unwrap_or(0));
                    }
                }
                for (state, most) in prefetch.into_iter().enumerate() {
                    let of = |set: &u128| states(*set).any(|other| other == state);
                    let asked: u64 = asked.iter().filter(|(set, _)| of(set)).map(|(_, asked)| asked.units()).sum();
                    let kept: u64 = kept.iter().filter(|(set, _)| of(set)).map(|(_, units)| units).sum();
                    let counted = advances.lock().outstanding.get(&(state as u128)).copied().unwrap_or(0);
                    proptest::prop_assert_eq!(counted, asked + kept);
                    proptest::prop_assert!(counted <= most, "{} of state {}", counted, state);
                }
            }
        }
    }

    #[test]
    fn the_number_of_sets_is_bounded() {
        let (advances, start) = (Arc::<Advances>::default(), monotonic());
        for set in 0..2 * SETS as u128 {
            if let Some(reservation) = advances.reserve(set, std::iter::once((set, 1))) {
                reservation.keep(1, verdict(1, SECOND), std::iter::once(&log()), start, start);
            }
        }
        assert_eq!(advances.lock().kept.len(), SETS);
        advances.draw(3, start).unwrap();
        assert!(advances.reserve(3, std::iter::once((3, 1))).is_some(), "one that has its place keeps it");
    }
}
