//! Prefetching charges tokens before the requests that will use them arrive. A group consists of the states of all
//! limits that a request checks. Only groups with many requests prefetch tokens.
//!
//! The process has at most one prefetch for each group, regardless of the number of workers. Groups may share states:
//! for example, the groups of all clients contain the state of a global limit. For each state, the process holds at
//! most `prefetch` tokens of its limit, summed over all groups. The bounds in `docs/reference/limits.md` depend on this
//! maximum. The functions get the current time as a parameter.

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::subtract_drift;
use crate::limiter::algorithm::{Outcome, Rule};
use crate::limiter::verdict::Verdict;

/// Time after which unused tokens are refunded. Before the refund, other gateways cannot use these tokens.
pub const PREFETCH_TTL: Duration = Duration::from_secs(1);

/// Maximum number of groups with prefetched tokens. Each group may use about 500 bytes and a timer. Further groups are
/// checked without prefetching.
const MAX_GROUPS: usize = 10_000;

/// The prefetched tokens of a process.
#[derive(Debug, Default)]
pub struct PrefetchPool(Mutex<PoolState>);

#[derive(Debug, Default)]
struct PoolState {
    // The hasher of the standard library has a random seed. With the published default secret, clients could otherwise
    // choose colliding keys.
    prefetched: HashMap<u128, PrefetchedTokens, RandomState>,
    /// Groups for which a prefetch is in flight.
    pending: HashSet<u128, RandomState>,
    /// Tokens of each state that are held or being fetched, summed over all groups.
    outstanding: HashMap<u128, u64, RandomState>,
}

#[derive(Debug)]
struct PrefetchedTokens {
    remaining: u64,
    /// The states to which each token was charged.
    states: Arc<[u128]>,
    /// Time from which the tokens must not be used.
    expires_at: Instant,
    /// Time at which the verdict of the store arrived.
    decided_at: Instant,
    /// The verdict of the store after it charged all prefetched tokens.
    verdict: Verdict,
}

/// A reservation to prefetch for a group. While the reservation exists, the group cannot get another reservation.
#[derive(Debug)]
pub struct PrefetchReservation {
    pool: Arc<PrefetchPool>,
    group: u128,
    states: Arc<[u128]>,
    /// Number of reserved tokens that [`PrefetchReservation::fill`] has not stored.
    tokens: u64,
}

/// Unused tokens to refund, with the time of their charge.
#[derive(Debug, PartialEq, Eq)]
pub struct UnusedTokens {
    /// Number of prefetched tokens that were not used.
    pub tokens: u64,
    /// Time of the charge by the store's clock, in µs since the Unix epoch.
    pub charged_at: u64,
    /// Outcomes of the limits after the call that charged these tokens. The unused tokens count as the last tokens that
    /// the call charged.
    pub outcomes: Vec<Outcome>,
}

impl PrefetchPool {
    /// Take one token of a group. Return the verdict that a call would have returned, and the time of the token's
    /// charge (µs).
    pub fn take(&self, group: u128, now: Instant) -> Option<(Verdict, u64)> {
        let mut pool_state = self.lock();
        let PoolState { prefetched, outstanding, .. } = &mut *pool_state;
        let advance = prefetched.get_mut(&group).filter(|advance| advance.remaining > 0 && now < advance.expires_at)?;
        advance.remaining -= 1;
        release(outstanding, &advance.states, 1);
        let elapsed_us = now.saturating_duration_since(advance.decided_at).as_micros() as u64;
        let outcome_now = |outcome: &Outcome| Outcome {
            // Add the remaining prefetched tokens, because clients see them as available.
            remaining: outcome.remaining + advance.remaining,
            reset_us: outcome.reset_us.saturating_sub(elapsed_us),
            ..*outcome
        };
        let Verdict { now_us, outcomes, .. } = &advance.verdict;
        let outcomes = outcomes.iter().map(outcome_now).collect();
        let verdict = Verdict::new(1, now_us + elapsed_us, outcomes);
        Some((Verdict { charged_later: advance.verdict.charged_later + advance.remaining, ..verdict }, *now_us))
    }

    /// Return whether the prefetched tokens of the group were used up before they expired, which means that the group
    /// still has many requests.
    pub fn is_exhausted(&self, group: u128, now: Instant) -> bool {
        self.lock().prefetched.get(&group).is_some_and(|advance| advance.remaining == 0 && now < advance.expires_at)
    }

    /// Reserve a prefetch for a group. `states` contains each state with its maximum number of outstanding tokens. The
    /// reservation has the largest number of tokens that all states still allow. Return `None` if the group has tokens
    /// or a reservation, if no token is allowed, or if the number of groups is at its maximum.
    pub fn reserve(
        self: &Arc<Self>,
        group: u128,
        states: impl Iterator<Item = (u128, u64)>,
    ) -> Option<PrefetchReservation> {
        let mut pool_state = self.lock();
        let has_room = pool_state
            .prefetched
            .get(&group)
            .map_or(pool_state.prefetched.len() + pool_state.pending.len() < MAX_GROUPS, |advance| {
                advance.remaining == 0
            });
        if !has_room || pool_state.pending.contains(&group) {
            return None;
        }
        let mut tokens = u64::MAX;
        let states: Arc<[u128]> = states
            .map(|(state, max)| {
                tokens = tokens.min(max.saturating_sub(pool_state.outstanding.get(&state).copied().unwrap_or(0)));
                state
            })
            .collect();
        if tokens == 0 || states.is_empty() {
            return None;
        }
        for state in &*states {
            *pool_state.outstanding.entry(*state).or_default() += tokens;
        }
        pool_state.pending.insert(group);
        Some(PrefetchReservation { pool: self.clone(), group, states, tokens })
    }

    /// Remove the tokens of a group that have expired.
    ///
    /// # Errors
    /// The tokens have not expired. The error contains the remaining time.
    pub fn expire(&self, group: u128, now: Instant) -> Result<UnusedTokens, Duration> {
        let mut pool_state = self.lock();
        let ttl = pool_state
            .prefetched
            .get(&group)
            .map_or(Duration::ZERO, |advance| advance.expires_at.saturating_duration_since(now));
        if ttl.is_zero() { Ok(pool_state.remove(group)) } else { Err(ttl) }
    }

    /// Remove the tokens of a group before they expire.
    pub fn cancel(&self, group: u128) -> UnusedTokens {
        self.lock().remove(group)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    fn remove(&mut self, group: u128) -> UnusedTokens {
        let Some(advance) = self.prefetched.remove(&group) else {
            return UnusedTokens { tokens: 0, charged_at: 0, outcomes: Vec::new() };
        };
        release(&mut self.outstanding, &advance.states, advance.remaining);
        UnusedTokens {
            tokens: advance.remaining,
            charged_at: advance.verdict.now_us,
            outcomes: advance.verdict.outcomes,
        }
    }
}

/// Subtract tokens that were used or refunded, so that more tokens of the same states can be prefetched.
fn release(outstanding: &mut HashMap<u128, u64, RandomState>, states: &[u128], tokens: u64) {
    for state in states {
        if let Entry::Occupied(mut count) = outstanding.entry(*state) {
            *count.get_mut() -= tokens.min(*count.get());
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

impl PrefetchReservation {
    /// Return the number of tokens that may be prefetched.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Store `tokens` that a call has charged to limits with these rules. The call was sent at `asked_at`. Return
    /// whether the caller must schedule the expiry of the tokens, because no task does this yet.
    pub fn fill<'r>(
        mut self,
        tokens: u64,
        verdict: Verdict,
        rules: impl Iterator<Item = &'r Rule>,
        asked_at: Instant,
        decided_at: Instant,
    ) -> bool {
        let expires_at = asked_at
            + rules.zip(&verdict.outcomes).map(|(rule, outcome)| usable_for(rule, outcome)).min().unwrap_or_default();
        // Store at most the reserved number. Dropping the reservation releases the reserved tokens that were not
        // stored.
        let units = tokens.min(self.tokens);
        self.tokens -= units;
        let advance =
            PrefetchedTokens { remaining: units, states: self.states.clone(), expires_at, decided_at, verdict };
        match self.pool.lock().prefetched.entry(self.group) {
            Entry::Occupied(mut exhausted) => {
                exhausted.insert(advance);
                false
            }
            Entry::Vacant(vacant) => {
                vacant.insert(advance);
                true
            }
        }
    }
}

impl Drop for PrefetchReservation {
    fn drop(&mut self) {
        let mut pool_state = self.pool.lock();
        pool_state.pending.remove(&self.group);
        release(&mut pool_state.outstanding, &self.states, self.tokens);
    }
}

/// Return how long tokens of a limit may be used, counted from the time at which the call was sent.
fn usable_for(rule: &Rule, outcome: &Outcome) -> Duration {
    match rule {
        // Tokens that were charged in one window must not be used in the next window.
        Rule::FixedWindow(_) => subtract_drift(Duration::from_micros(outcome.reset_us)).min(PREFETCH_TTL),
        Rule::TokenBucket(_) | Rule::SlidingWindow(_) | Rule::SlidingBuckets(_) | Rule::SlidingLog(_) => PREFETCH_TTL,
        // Concurrency permits cannot be prefetched, because each belongs to a running request.
        Rule::Concurrency(_) => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::monotonic;
    use crate::limiter::algorithm::Status;
    use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
    use crate::limiter::algorithm::sliding_log::SlidingLog;

    const SECOND: u64 = 1_000_000;
    const GROUP: u128 = 7;

    fn log_rule() -> Rule {
        Rule::SlidingLog(SlidingLog { limit: 100, window: 60 * SECOND })
    }

    fn window_rule() -> Rule {
        Rule::FixedWindow(FixedWindow { limit: 100, window: 60 * SECOND, start: WindowStart::Aligned { phase: 0 } })
    }

    fn verdict(remaining: u64, reset_us: u64) -> Verdict {
        let outcome = Outcome { status: Status::Ok, remaining, reset_us, retry_us: 0 };
        Verdict::new(9, 1000, vec![outcome])
    }

    /// Return one state that allows this number of outstanding tokens.
    fn single_state(most: u64) -> impl Iterator<Item = (u128, u64)> {
        std::iter::once((1, most))
    }

    /// Prefetch tokens of one limit with a call that was sent and answered at `at`.
    fn fill(advances: &Arc<PrefetchPool>, rule: &Rule, units: u64, reset_us: u64, at: Instant) -> bool {
        advances.reserve(GROUP, single_state(100)).unwrap().fill(
            units,
            verdict(20, reset_us),
            std::iter::once(rule),
            at,
            at,
        )
    }

    #[test]
    fn prefetched_tokens_are_taken_once_and_counted_as_remaining() {
        let advances = Arc::<PrefetchPool>::default();
        let start = monotonic();
        assert!(fill(&advances, &log_rule(), 3, 40 * SECOND, start), "the caller must schedule the expiry");
        assert_eq!(advances.take(8, start), None, "another group has no tokens");
        let drawn = |after_ms: u64| advances.take(GROUP, start + Duration::from_millis(after_ms));
        for (after_ms, remaining, reset_us) in
            [(0, 22, 40 * SECOND), (100, 21, 39_900_000), (999, 20, 40 * SECOND - 999_000)]
        {
            let (verdict, charged_at) = drawn(after_ms).unwrap();
            assert_eq!((verdict.granted, charged_at, verdict.now_us), (1, 1000, 1000 + after_ms * 1000));
            assert_eq!((verdict.outcomes[0].remaining, verdict.outcomes[0].reset_us), (remaining, reset_us));
            assert_eq!(verdict.charged_later, remaining - 20, "tokens of the call that are still unused");
        }
        assert_eq!(drawn(999), None, "only three tokens were prefetched");
    }

    #[test]
    fn expired_tokens_are_returned_once() {
        let advances = Arc::<PrefetchPool>::default();
        let start = monotonic();
        fill(&advances, &log_rule(), 3, 40 * SECOND, start);
        advances.take(GROUP, start).unwrap();
        let outcomes = verdict(20, 40 * SECOND).outcomes;
        assert_eq!(advances.expire(GROUP, start + PREFETCH_TTL / 4), Err(PREFETCH_TTL * 3 / 4));
        assert_eq!(advances.take(GROUP, start + PREFETCH_TTL), None);
        assert_eq!(
            advances.expire(GROUP, start + PREFETCH_TTL),
            Ok(UnusedTokens { tokens: 2, charged_at: 1000, outcomes })
        );
        assert_eq!(
            advances.expire(GROUP, start + PREFETCH_TTL),
            Ok(UnusedTokens { tokens: 0, charged_at: 0, outcomes: vec![] }),
            "tokens are refunded only once"
        );
        assert_eq!(advances.take(GROUP, start), None, "refunded tokens cannot be taken");
    }

    #[test]
    fn fixed_window_tokens_expire_before_the_window() {
        let start = monotonic();
        for (rules, reset_us, usable_us) in [
            (&[window_rule()][..], 400_000, 399_800),
            (&[window_rule()], 40 * SECOND, SECOND),
            (&[log_rule()], 400_000, SECOND),
            (&[log_rule(), window_rule()], 400_000, 399_800),
        ] {
            let advances = Arc::<PrefetchPool>::default();
            let outcome = verdict(20, reset_us).outcomes[0];
            let verdict = Verdict { outcomes: vec![outcome; rules.len()], ..verdict(20, reset_us) };
            // The reply takes 100 ms. When it arrives, the window therefore ends 100 ms earlier than the reply says.
            let decided = start + Duration::from_millis(100);
            advances.reserve(GROUP, single_state(100)).unwrap().fill(5, verdict, rules.iter(), start, decided);
            let until = start + Duration::from_micros(usable_us);
            assert!(advances.take(GROUP, until - Duration::from_micros(1)).is_some(), "{rules:?}");
            assert_eq!(advances.take(GROUP, until), None, "{rules:?}");
        }
    }

    #[test]
    fn group_has_at_most_one_prefetch() {
        let advances = Arc::<PrefetchPool>::default();
        let start = monotonic();
        let reserve = |set| advances.reserve(set, std::iter::once((set, 100)));
        let first = reserve(GROUP).unwrap();
        assert!(reserve(GROUP).is_none(), "a prefetch is in flight");
        assert!(reserve(8).is_some(), "another group can prefetch");
        drop(first);
        fill(&advances, &log_rule(), 2, SECOND, start);
        assert!(reserve(GROUP).is_none(), "the group has unused tokens");
        advances.take(GROUP, start).unwrap();
        assert!(reserve(GROUP).is_none() && !advances.is_exhausted(GROUP, start), "one token is unused");
        advances.take(GROUP, start).unwrap();
        assert!(advances.is_exhausted(GROUP, start));
        assert!(!fill(&advances, &log_rule(), 2, SECOND, start + PREFETCH_TTL / 2), "the expiry is already scheduled");
        assert_eq!(
            advances.expire(GROUP, start + PREFETCH_TTL),
            Err(PREFETCH_TTL / 2),
            "the second prefetch expires later"
        );
        let outcomes = verdict(20, SECOND).outcomes;
        assert_eq!(advances.cancel(GROUP), UnusedTokens { tokens: 2, charged_at: 1000, outcomes });
        assert!(!advances.is_exhausted(GROUP, start) && reserve(GROUP).is_some());
    }

    /// The groups share a global limit that allows 50 outstanding tokens. Each client has a limit that allows 30.
    #[test]
    fn groups_sharing_a_state_share_its_prefetch() {
        let advances = Arc::<PrefetchPool>::default();
        let start = monotonic();
        let reserve = |client: u128| advances.reserve(client, [(0, 50), (client, 30)].into_iter());
        let keep = |reservation: PrefetchReservation, units| {
            reservation.fill(units, verdict(20, SECOND), [log_rule(), log_rule()].iter(), start, start)
        };
        let first = reserve(1).unwrap();
        assert_eq!(first.tokens(), 30, "the client's own limit allows 30 tokens");
        let second = reserve(2).unwrap();
        assert_eq!(second.tokens(), 20, "the global limit allows 20 more tokens");
        assert!(reserve(3).is_none(), "the global limit allows no more tokens");
        keep(first, 25);
        assert_eq!(reserve(3).unwrap().tokens(), 5, "the 5 tokens of the first reservation that were not granted");
        drop(second);
        assert_eq!(reserve(3).unwrap().tokens(), 25, "plus the 20 tokens of the dropped reservation");
        for _ in 0..10 {
            advances.take(1, start).unwrap();
        }
        assert_eq!(reserve(3).unwrap().tokens(), 30, "used tokens are not outstanding");
        assert_eq!(advances.cancel(1).tokens, 15);
        assert!(advances.lock().outstanding.is_empty());
    }

    proptest::proptest! {
        #[test]
        fn state_never_exceeds_its_prefetch(
            steps in proptest::collection::vec((0u128..6, 0u64..40, 0u8..5), 1..200)
        ) {
            // There are four states, each with a different prefetch. Each group has one to three of them.
            let prefetch = [10, 25, 40, 7];
            let states = |set: u128| (0..4).filter(move |state| (set + 2) >> state & 1 == 1).map(|state| state as usize);
            let advances = Arc::<PrefetchPool>::default();
            let start = monotonic();
            let mut asked = HashMap::<u128, PrefetchReservation>::new();
            let mut kept = HashMap::<u128, u64>::new();
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
                            let units = units.min(reservation.tokens());
                            let rules: Vec<_> = states(set).map(|_| log_rule()).collect();
                            reservation.fill(units, verdict(20, SECOND), rules.iter(), start, start);
                            kept.insert(set, units);
                        }
                    }
                    3 => {
                        if advances.take(set, start).is_some() {
                            *kept.get_mut(&set).unwrap() -= 1;
                        }
                    }
                    _ => {
                        let unused = advances.cancel(set).tokens;
                        proptest::prop_assert_eq!(unused, kept.remove(&set).unwrap_or(0));
                    }
                }
                for (state, most) in prefetch.into_iter().enumerate() {
                    let of = |set: &u128| states(*set).any(|other| other == state);
                    let asked: u64 = asked.iter().filter(|(set, _)| of(set)).map(|(_, asked)| asked.tokens()).sum();
                    let kept: u64 = kept.iter().filter(|(set, _)| of(set)).map(|(_, units)| units).sum();
                    let counted = advances.lock().outstanding.get(&(state as u128)).copied().unwrap_or(0);
                    proptest::prop_assert_eq!(counted, asked + kept);
                    proptest::prop_assert!(counted <= most, "{} outstanding tokens of state {}", counted, state);
                }
            }
        }
    }

    #[test]
    fn number_of_groups_is_bounded() {
        let advances = Arc::<PrefetchPool>::default();
        let start = monotonic();
        for set in 0..2 * MAX_GROUPS as u128 {
            if let Some(reservation) = advances.reserve(set, std::iter::once((set, 1))) {
                reservation.fill(1, verdict(1, SECOND), std::iter::once(&log_rule()), start, start);
            }
        }
        assert_eq!(advances.lock().prefetched.len(), MAX_GROUPS);
        advances.take(3, start).unwrap();
        assert!(advances.reserve(3, std::iter::once((3, 1))).is_some(), "an existing group can prefetch again");
    }
}
