//! Numbers that only grow. Each worker has its own, so that none waits for another's cache line; whoever reads adds them up.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Counts of `N` kinds of events.
#[derive(Debug)]
pub struct Tally<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Tally<N> {
    fn default() -> Self {
        Tally(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<const N: usize> Tally<N> {
    /// One more of this kind.
    pub fn count(&self, kind: usize) {
        self.add(kind, 1);
    }

    /// More of this kind.
    pub fn add(&self, kind: usize, times: u64) {
        self.0[kind].fetch_add(times, Ordering::Relaxed);
    }

    /// So many there were.
    pub fn read(&self) -> [u64; N] {
        std::array::from_fn(|kind| self.0[kind].load(Ordering::Relaxed))
    }
}

/// Upper bounds of the buckets of [`Durations`], µs; what takes longer is in one more.
pub const BOUNDS_US: [u64; 16] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000,
    30_000_000,
];

/// How long something took, each time.
#[derive(Debug, Default)]
pub struct Durations {
    buckets: Tally<{ BOUNDS_US.len() + 1 }>,
    sum_us: AtomicU64,
}

impl Durations {
    /// It took so long.
    pub fn note(&self, duration: Duration) {
        let us = duration.as_micros() as u64;
        self.buckets.count(BOUNDS_US.partition_point(|bound| *bound < us));
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// The times in each bucket, and their sum in µs.
    pub fn read(&self) -> ([u64; BOUNDS_US.len() + 1], u64) {
        (self.buckets.read(), self.sum_us.load(Ordering::Relaxed))
    }
}

/// The tallies of things that have names, one for each worker.
#[derive(Debug)]
pub struct Family<T>(Mutex<BTreeMap<Box<str>, ByWorker<T>>>);

type ByWorker<T> = BTreeMap<usize, Arc<T>>;

impl<T> Default for Family<T> {
    fn default() -> Self {
        Family(Mutex::default())
    }
}

impl<T: Default> Family<T> {
    /// That of a worker; the same for the same name, so that counts outlive a change of the configuration.
    pub fn of(&self, name: &str, worker: usize) -> Arc<T> {
        let mut tallies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tallies.entry(name.into()).or_default().entry(worker).or_default().clone()
    }

    /// All, by name.
    pub fn all(&self) -> Vec<(Box<str>, Vec<Arc<T>>)> {
        let tallies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tallies.iter().map(|(name, workers)| (name.clone(), workers.values().cloned().collect())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_falls_into_the_first_bucket_that_holds_it() {
        let durations = Durations::default();
        for us in [0, 50, 51, 100, 29_999_999, 30_000_000, 30_000_001] {
            durations.note(Duration::from_micros(us));
        }
        let (buckets, sum_us) = durations.read();
        assert_eq!((buckets[0], buckets[1], buckets[15], buckets[16]), (2, 2, 2, 1));
        assert_eq!((buckets.iter().sum::<u64>(), sum_us), (7, 90_000_201));
    }

    #[test]
    fn a_name_keeps_its_counts() {
        let family = Family::<Tally<2>>::default();
        family.of("a", 0).count(1);
        family.of("a", 1).count(1);
        family.of("a", 0).count(1);
        let all = family.all();
        assert_eq!((&*all[0].0, all[0].1[0].read(), all[0].1[1].read()), ("a", [0, 2], [0, 1]));
    }
}
