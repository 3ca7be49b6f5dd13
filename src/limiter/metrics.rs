//! Counters and histograms, and the metrics of the checks of one worker. Each worker has its own counters, so that
//! workers do not contend for cache lines. Readers add up the counters of all workers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The component that decided a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweredBy {
    /// The store, with a call for this check alone.
    Store,
    /// The store, with one call for several checks of the same states.
    Coalesced,
    /// Prefetched tokens.
    Prefetch,
    /// The denial cache.
    DenialCache,
}

/// Counters of a worker's checks and store calls.
#[derive(Debug, Default)]
pub struct LimiterMetrics {
    /// Checks, by [`AnsweredBy`].
    pub checks: Counter<4>,
    /// Duration of the calls to which the store replied.
    pub round_trips: Histogram,
    /// Script calls, each with one batch of checks.
    pub calls: Counter<1>,
    /// Kind 0: calls that failed. Kind 1: calls that were not sent, because the circuit breaker was open or the queue
    /// was full. Kind 2: calls that the store rejected because it accepts no writes.
    pub failures: Counter<3>,
    /// Cost that was or may have been lost, by [`LostCost`].
    pub lost_cost: Counter<2>,
}

/// Cost that a limit counts wrongly, because a settlement failed for good or because a call never got a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostCost {
    /// The cost may remain charged, although the request was rejected or its cost was to be refunded.
    Refund,
    /// The deferred cost may not have been charged.
    Charge,
}

impl LostCost {
    /// All variants, in the order of [`LimiterMetrics::lost_cost`].
    pub const ALL: [LostCost; 2] = [LostCost::Refund, LostCost::Charge];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            LostCost::Refund => "refund",
            LostCost::Charge => "charge",
        }
    }
}

impl AnsweredBy {
    /// All variants, in the order of [`LimiterMetrics::checks`].
    pub const ALL: [AnsweredBy; 4] =
        [AnsweredBy::Store, AnsweredBy::Coalesced, AnsweredBy::Prefetch, AnsweredBy::DenialCache];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            AnsweredBy::Store => "store",
            AnsweredBy::Coalesced => "coalesced",
            AnsweredBy::Prefetch => "prefetch",
            AnsweredBy::DenialCache => "denial-cache",
        }
    }
}

// === Counters and histograms ===

/// A counter for each of `N` kinds of events.
#[derive(Debug)]
pub struct Counter<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Counter<N> {
    fn default() -> Self {
        Counter(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<const N: usize> Counter<N> {
    /// Increment the counter of `kind`.
    pub fn increment(&self, kind: usize) {
        self.add(kind, 1);
    }

    /// Add `amount` to the counter of `kind`.
    pub fn add(&self, kind: usize, amount: u64) {
        self.0[kind].fetch_add(amount, Ordering::Relaxed);
    }

    /// Return the values of all `N` counters.
    pub fn values(&self) -> [u64; N] {
        std::array::from_fn(|kind| self.0[kind].load(Ordering::Relaxed))
    }
}

/// Upper bounds of the buckets of [`Histogram`] in µs. An additional bucket counts longer durations.
pub const BUCKET_BOUNDS_US: [u64; 18] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000, 30_000_000,
];

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: Counter<{ BUCKET_BOUNDS_US.len() + 1 }>,
    sum_us: AtomicU64,
}

impl Histogram {
    /// Record a duration.
    pub fn observe(&self, duration: Duration) {
        let duration_us = duration.as_micros() as u64;
        self.buckets.increment(BUCKET_BOUNDS_US.partition_point(|bound| *bound < duration_us));
        self.sum_us.fetch_add(duration_us, Ordering::Relaxed);
    }

    /// Return the count of each bucket (not cumulative), and the sum in µs.
    pub fn snapshot(&self) -> ([u64; BUCKET_BOUNDS_US.len() + 1], u64) {
        (self.buckets.values(), self.sum_us.load(Ordering::Relaxed))
    }
}

/// Metrics by name, with one value per worker.
#[derive(Debug)]
pub struct MetricFamily<T>(Mutex<BTreeMap<Box<str>, ByWorker<T>>>);

type ByWorker<T> = BTreeMap<usize, Arc<T>>;

impl<T> Default for MetricFamily<T> {
    fn default() -> Self {
        MetricFamily(Mutex::default())
    }
}

impl<T: Default> MetricFamily<T> {
    /// Return the metrics of a worker by name. A configuration reload keeps metrics: the same name returns the same
    /// metrics.
    pub fn get_or_create(&self, name: &str, worker: usize) -> Arc<T> {
        let mut metrics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        metrics.entry(name.into()).or_default().entry(worker).or_default().clone()
    }

    /// Return the metrics of a worker by a name that clients choose. Return `None` if the name is new, and there are
    /// `max` names.
    pub fn get_within(&self, max: usize, name: &str, worker: usize) -> Option<Arc<T>> {
        let mut metrics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if metrics.len() >= max && !metrics.contains_key(name) {
            return None;
        }
        Some(metrics.entry(name.into()).or_default().entry(worker).or_default().clone())
    }

    /// Drop the metrics of which only this family has a reference, if they have more than `max` names.
    pub fn drop_unused(&self, max: usize) {
        let is_unused = |workers: &ByWorker<T>| workers.values().all(|metrics| Arc::strong_count(metrics) == 1);
        let mut metrics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if metrics.values().filter(|workers| is_unused(workers)).count() > max {
            metrics.retain(|_, workers| !is_unused(workers));
        }
    }

    /// Return the metrics of all workers, sorted by name.
    pub fn all(&self) -> Vec<(Box<str>, Vec<Arc<T>>)> {
        let metrics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        metrics.iter().map(|(name, workers)| (name.clone(), workers.values().cloned().collect())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_counts_into_the_first_matching_bucket() {
        let durations = Histogram::default();
        for us in [0, 50, 51, 100, 29_999_999, 30_000_000, 30_000_001] {
            durations.observe(Duration::from_micros(us));
        }
        let (buckets, sum_us) = durations.snapshot();
        assert_eq!((buckets[0], buckets[1], buckets[17], buckets[18]), (2, 2, 2, 1));
        assert_eq!((buckets.iter().sum::<u64>(), sum_us), (7, 90_000_201));
    }

    #[test]
    fn metric_family_keeps_counts_per_name_and_worker() {
        let family = MetricFamily::<Counter<2>>::default();
        family.get_or_create("a", 0).increment(1);
        family.get_or_create("a", 1).increment(1);
        family.get_or_create("a", 0).increment(1);
        let all = family.all();
        assert_eq!((&*all[0].0, all[0].1[0].values(), all[0].1[1].values()), ("a", [0, 2], [0, 1]));
        assert!(family.get_within(2, "b", 0).is_some() && family.get_within(2, "a", 2).is_some());
        assert!(family.get_within(2, "c", 0).is_none());
    }

    #[test]
    fn unused_names_are_dropped_if_there_are_too_many() {
        let family = MetricFamily::<Counter<1>>::default();
        let used = family.get_or_create("used", 0);
        for name in ["a", "b"] {
            family.get_or_create(name, 0).increment(0);
        }
        let names = || family.all().into_iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>();
        family.drop_unused(2);
        assert_eq!(names(), ["a", "b", "used"], "two names are not more than two");
        family.drop_unused(1);
        assert_eq!(names(), ["used"]);
        drop(used);
    }
}
