//! The last quarter of an hour, second by second: what was allowed, what was denied, what went wrong, and how long it took.

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

use super::metrics::sum_counts;
use super::vitals::AdminState;
use crate::limit::clock::{monotonic, unix_us};
use crate::tally::{BUCKET_BOUNDS_US, Histogram};

/// Seconds that are kept.
pub(super) const HISTORY_SECONDS: usize = 15 * 60;

type Buckets = [u64; BUCKET_BOUNDS_US.len() + 1];

/// What happened in a second.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct SecondStats {
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
struct CounterSnapshot {
    taken_at: Instant,
    allowed: u64,
    denied: u64,
    errors: u64,
    request_latency: Buckets,
    check_latency: Buckets,
    round_trips: Buckets,
}

/// The seconds that are over.
#[derive(Debug)]
pub(super) struct History {
    seconds: VecDeque<SecondStats>,
    last_snapshot: CounterSnapshot,
}

impl History {
    /// Begins now.
    pub(super) fn new(state: &AdminState) -> Self {
        History { seconds: VecDeque::with_capacity(HISTORY_SECONDS), last_snapshot: CounterSnapshot::take(state) }
    }

    /// A second is over.
    pub(super) fn tick(&mut self, state: &AdminState) -> SecondStats {
        self.add(CounterSnapshot::take(state))
    }

    fn add(&mut self, mut snapshot: CounterSnapshot) -> SecondStats {
        // A denial is counted a little before its answer is.
        snapshot.allowed = snapshot.allowed.max(self.last_snapshot.allowed);
        let second = snapshot.diff(&self.last_snapshot);
        if self.seconds.len() == HISTORY_SECONDS {
            self.seconds.pop_front();
        }
        self.seconds.push_back(second);
        self.last_snapshot = snapshot;
        second
    }

    /// From the oldest on.
    pub(super) fn seconds(&self) -> &VecDeque<SecondStats> {
        &self.seconds
    }
}

impl CounterSnapshot {
    fn take(state: &AdminState) -> Self {
        let taken_at = monotonic();
        let routes = state.request_metrics.routes.all();
        // What matches no route nobody has allowed.
        let routes = || routes.iter().filter(|(name, _)| !name.is_empty()).flat_map(|(_, responses)| responses);
        let classes = sum_counts(routes().map(|responses| responses.status_classes.values()));
        let denials = state.request_metrics.denied_requests.all();
        let [denied] = sum_counts(denials.iter().flat_map(|(_, counters)| counters).map(|counter| counter.values()));
        let errors = classes[4];
        let check_durations = state.request_metrics.check_durations.all();
        let limits = state.limiter_metrics.all();
        CounterSnapshot {
            taken_at,
            allowed: classes.iter().sum::<u64>().saturating_sub(denied + errors),
            denied,
            errors,
            request_latency: sum_buckets(routes().map(|responses| &responses.latency)),
            check_latency: sum_buckets(check_durations.iter().flat_map(|(_, all)| all).map(AsRef::as_ref)),
            round_trips: sum_buckets(limits.iter().flat_map(|(_, all)| all).map(|metrics| &metrics.round_trips)),
        }
    }

    fn diff(&self, previous: &CounterSnapshot) -> SecondStats {
        let difference = |current: &Buckets, earlier: &Buckets| {
            std::array::from_fn(|index| current[index].saturating_sub(earlier[index]))
        };
        let requests = difference(&self.request_latency, &previous.request_latency);
        SecondStats {
            at_ms: unix_us() / 1000,
            ms: (self.taken_at.duration_since(previous.taken_at).as_millis() as u64).max(1),
            allowed: self.allowed - previous.allowed,
            denied: self.denied.saturating_sub(previous.denied),
            errors: self.errors.saturating_sub(previous.errors),
            p50_ms: quantile(&requests, 0.5),
            p99_ms: quantile(&requests, 0.99),
            decision_p99_ms: quantile(&difference(&self.check_latency, &previous.check_latency), 0.99),
            store_p99_ms: quantile(&difference(&self.round_trips, &previous.round_trips), 0.99),
        }
    }
}

fn sum_buckets<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Buckets {
    sum_counts(histograms.map(|histogram| histogram.snapshot().0))
}

/// The time within which this part of them was over, in ms; none if there were none. Inside a bucket they count as spread
/// evenly, as Prometheus has it, and of those beyond the last bound nothing is known but that.
fn quantile(buckets: &Buckets, fraction: f64) -> Option<f32> {
    let rank = buckets.iter().sum::<u64>() as f64 * fraction;
    let mut cumulative = 0.0;
    for (index, count) in buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = *count as f64;
        if cumulative + count >= rank {
            let lower_bound = if index == 0 { 0 } else { BUCKET_BOUNDS_US[index - 1] } as f64;
            let upper_bound = BUCKET_BOUNDS_US.get(index).map_or(lower_bound, |bound| *bound as f64);
            return Some(((lower_bound + (upper_bound - lower_bound) * (rank - cumulative) / count) / 1000.0) as f32);
        }
        cumulative += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(allowed: u64) -> CounterSnapshot {
        let none = [0; BUCKET_BOUNDS_US.len() + 1];
        CounterSnapshot {
            taken_at: monotonic(),
            allowed,
            denied: 0,
            errors: 0,
            request_latency: none,
            check_latency: none,
            round_trips: none,
        }
    }

    #[test]
    fn history_keeps_a_bounded_number_of_seconds() {
        let mut history = History { seconds: VecDeque::new(), last_snapshot: snapshot(10) };
        // A denial that has no answer yet is taken off what was allowed.
        assert_eq!([9, 12].map(|allowed| history.add(snapshot(allowed)).allowed), [0, 2]);
        for second in 0..HISTORY_SECONDS as u64 {
            history.add(snapshot(13 + second));
        }
        assert_eq!(history.seconds.len(), HISTORY_SECONDS);
        assert!(history.seconds.iter().all(|second| second.allowed == 1), "the first ones are gone");
    }

    #[test]
    fn quantile_interpolates_within_the_bucket() {
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
