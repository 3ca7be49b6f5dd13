//! The last quarter of an hour, second by second: what was allowed, what was denied, what went wrong, and how long it took.

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

use super::metrics::sum;
use super::vitals::Vitals;
use crate::limit::clock::{monotonic, unix_us};
use crate::tally::{BUCKET_BOUNDS_US, Histogram};

/// Seconds that are kept.
pub(super) const KEPT: usize = 15 * 60;

type Buckets = [u64; BUCKET_BOUNDS_US.len() + 1];

/// What happened in a second.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Second {
    /// Its end, ms since the Unix epoch.
    at_ms: u64,
    /// How long it was: on a busy machine one ends late.
    ms: u64,
    allowed: u64,
    denied: u64,
    errors: u64,
    p50_ms: Option<f32>,
    p99_ms: Option<f32>,
    decision_p99_ms: Option<f32>,
    store_p99_ms: Option<f32>,
}

/// What was counted until an instant.
#[derive(Debug)]
struct Totals {
    at: Instant,
    allowed: u64,
    denied: u64,
    errors: u64,
    requests: Buckets,
    decisions: Buckets,
    round_trips: Buckets,
}

/// The seconds that are over.
#[derive(Debug)]
pub(super) struct History {
    seconds: VecDeque<Second>,
    last: Totals,
}

impl History {
    /// Begins now.
    pub(super) fn new(vitals: &Vitals) -> Self {
        History { seconds: VecDeque::with_capacity(KEPT), last: Totals::of(vitals) }
    }

    /// A second is over.
    pub(super) fn tick(&mut self, vitals: &Vitals) -> Second {
        self.add(Totals::of(vitals))
    }

    fn add(&mut self, mut now: Totals) -> Second {
        // A denial is counted a little before its answer is.
        now.allowed = now.allowed.max(self.last.allowed);
        let second = now.since(&self.last);
        if self.seconds.len() == KEPT {
            self.seconds.pop_front();
        }
        self.seconds.push_back(second);
        self.last = now;
        second
    }

    /// From the oldest on.
    pub(super) fn seconds(&self) -> &VecDeque<Second> {
        &self.seconds
    }
}

impl Totals {
    fn of(vitals: &Vitals) -> Self {
        let at = monotonic();
        let routes = vitals.tallies.routes.all();
        // What matches no route nobody has allowed.
        let routes = || routes.iter().filter(|(name, _)| !name.is_empty()).flat_map(|(_, answers)| answers);
        let classes = sum(routes().map(|answers| answers.status_classes.values()));
        let denials = vitals.tallies.denied_requests.all();
        let [denied] = sum(denials.iter().flat_map(|(_, tallies)| tallies).map(|tally| tally.values()));
        let errors = classes[4];
        let decisions = vitals.tallies.check_durations.all();
        let limits = vitals.limits.all();
        Totals {
            at,
            allowed: classes.iter().sum::<u64>().saturating_sub(denied + errors),
            denied,
            errors,
            requests: buckets(routes().map(|answers| &answers.latency)),
            decisions: buckets(decisions.iter().flat_map(|(_, all)| all).map(AsRef::as_ref)),
            round_trips: buckets(limits.iter().flat_map(|(_, all)| all).map(|tallies| &tallies.round_trips)),
        }
    }

    fn since(&self, before: &Totals) -> Second {
        let between =
            |now: &Buckets, before: &Buckets| std::array::from_fn(|place| now[place].saturating_sub(before[place]));
        let requests = between(&self.requests, &before.requests);
        Second {
            at_ms: unix_us() / 1000,
            ms: (self.at.duration_since(before.at).as_millis() as u64).max(1),
            allowed: self.allowed - before.allowed,
            denied: self.denied.saturating_sub(before.denied),
            errors: self.errors.saturating_sub(before.errors),
            p50_ms: quantile(&requests, 0.5),
            p99_ms: quantile(&requests, 0.99),
            decision_p99_ms: quantile(&between(&self.decisions, &before.decisions), 0.99),
            store_p99_ms: quantile(&between(&self.round_trips, &before.round_trips), 0.99),
        }
    }
}

fn buckets<'a>(all: impl Iterator<Item = &'a Histogram>) -> Buckets {
    sum(all.map(|durations| durations.snapshot().0))
}

/// The time within which this part of them was over, in ms; none if there were none. Inside a bucket they count as spread
/// evenly, as Prometheus has it, and of those beyond the last bound nothing is known but that.
fn quantile(buckets: &Buckets, part: f64) -> Option<f32> {
    let wanted = buckets.iter().sum::<u64>() as f64 * part;
    let mut below = 0.0;
    for (place, count) in buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = *count as f64;
        if below + count >= wanted {
            let from = if place == 0 { 0 } else { BUCKET_BOUNDS_US[place - 1] } as f64;
            let to = BUCKET_BOUNDS_US.get(place).map_or(from, |bound| *bound as f64);
            return Some(((from + (to - from) * (wanted - below) / count) / 1000.0) as f32);
        }
        below += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(allowed: u64) -> Totals {
        let none = [0; BUCKET_BOUNDS_US.len() + 1];
        Totals { at: monotonic(), allowed, denied: 0, errors: 0, requests: none, decisions: none, round_trips: none }
    }

    #[test]
    fn so_many_seconds_are_kept_and_they_add_up() {
        let mut history = History { seconds: VecDeque::new(), last: totals(10) };
        // A denial that has no answer yet is taken off what was allowed.
        assert_eq!([9, 12].map(|allowed| history.add(totals(allowed)).allowed), [0, 2]);
        for second in 0..KEPT as u64 {
            history.add(totals(13 + second));
        }
        assert_eq!(history.seconds.len(), KEPT);
        assert!(history.seconds.iter().all(|second| second.allowed == 1), "the first ones are gone");
    }

    #[test]
    fn a_quantile_lies_where_so_many_are_below() {
        let mut buckets = [0; BUCKET_BOUNDS_US.len() + 1];
        assert_eq!(quantile(&buckets, 0.5), None, "nothing took any time");
        buckets[4] = 100; // 0.5 to 1 ms
        assert_eq!(quantile(&buckets, 0.5), Some(0.75));
        buckets[0] = 100; // up to 0.05 ms
        assert_eq!(quantile(&buckets, 0.5), Some(0.05));
        assert_eq!(quantile(&buckets, 0.99), Some(0.99));
        buckets[16] = 1000;
        assert_eq!(quantile(&buckets, 0.5), Some(30_000.0), "longer than the last bound");
    }
}
