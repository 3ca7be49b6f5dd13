//! Learns how many output tokens the responses of LLM APIs have, and bounds the tokens that reservations below the
//! requested maximum do not cover.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::sync::Cache;

/// Maximum number of pairs of an identity and a model, about 3 MiB. A pair that is evicted is learned again.
const MAX_HISTOGRAMS: usize = 16_384;

/// Minimum number of responses. Before, the requested maximum is reserved.
const MIN_RESPONSES: u16 = 20;

/// Number of responses after which all counts are halved, so that the newest responses count most.
const MAX_RESPONSES: u16 = 400;

/// Number of buckets: four for each power of two, up to 4 Mi tokens.
const BUCKETS: usize = 80;

/// The output tokens of responses, and the costs that reservations of requests in flight do not cover.
#[derive(Debug)]
pub struct LearnedOutput {
    /// The clients choose the names of models, so keys are hashes with a random key.
    hasher: RandomState,
    histograms: Cache<u64, Arc<Mutex<Histogram>>>,
    /// The uncovered cost of the requests in flight of an identity. Only identities with such requests have an entry.
    uncovered: Mutex<HashMap<u64, u64>>,
}

/// The number of responses by their output tokens.
#[derive(Debug)]
struct Histogram {
    total: u16,
    counts: [u16; BUCKETS],
}

/// A cost that the reservation of a request in flight does not cover. It counts until this value is dropped.
#[derive(Debug)]
pub struct Uncovered {
    learned: Arc<LearnedOutput>,
    key: u64,
    cost: u64,
}

impl Default for LearnedOutput {
    fn default() -> Self {
        LearnedOutput {
            hasher: RandomState::new(),
            histograms: Cache::new(MAX_HISTOGRAMS),
            uncovered: Mutex::default(),
        }
    }
}

impl LearnedOutput {
    /// Return the key of an identity or of a pair of an identity and a model.
    pub fn key(&self, value: impl Hash) -> u64 {
        self.hasher.hash_one(value)
    }

    /// Record the output tokens of a response.
    pub fn record(&self, key: u64, output: u64) {
        let create = || Ok::<_, std::convert::Infallible>(Arc::new(Mutex::new(Histogram::new())));
        let Ok(histogram) = self.histograms.get_or_insert_with(&key, create);
        lock(&histogram).record(output);
    }

    /// Return a number of output tokens that 95 % of the responses do not exceed. Return `None` if it is not known.
    pub fn p95(&self, key: u64) -> Option<u64> {
        let histogram = self.histograms.get(&key)?;
        lock(&histogram).p95()
    }

    /// Leave a cost of a request uncovered, unless the uncovered cost of all requests in flight with this key would
    /// exceed `max`.
    pub fn leave_uncovered(self: &Arc<Self>, key: u64, cost: u64, max: u64) -> Option<Uncovered> {
        let mut uncovered = lock(&self.uncovered);
        let sum = uncovered.get(&key).copied().unwrap_or(0).saturating_add(cost);
        if sum > max {
            return None;
        }
        uncovered.insert(key, sum);
        Some(Uncovered { learned: self.clone(), key, cost })
    }
}

impl Drop for Uncovered {
    fn drop(&mut self) {
        let mut uncovered = lock(&self.learned.uncovered);
        if let Some(sum) = uncovered.get_mut(&self.key) {
            *sum -= self.cost;
            if *sum == 0 {
                uncovered.remove(&self.key);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Histogram {
    fn new() -> Self {
        Histogram { total: 0, counts: [0; BUCKETS] }
    }

    fn record(&mut self, output: u64) {
        self.counts[bucket(output)] += 1;
        self.total += 1;
        if self.total >= MAX_RESPONSES {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().sum();
        }
    }

    fn p95(&self) -> Option<u64> {
        if self.total < MIN_RESPONSES {
            return None;
        }
        let mut above = 0;
        let exceeds = |(_, count): &(usize, &u16)| {
            above += **count;
            above > self.total / 20
        };
        let (index, _) = self.counts.iter().enumerate().rev().find(exceeds)?;
        // The last bucket has no upper end.
        (index + 1 < BUCKETS).then(|| bucket_end(index))
    }
}

/// Return the bucket of a number of tokens. Fewer than 4 tokens belong to the first bucket.
fn bucket(output: u64) -> usize {
    let output = output.max(4);
    let shift = output.ilog2() - 2;
    ((shift * 4) as usize + (output >> shift) as usize - 4).min(BUCKETS - 1)
}

/// Return the largest number of tokens in a bucket.
fn bucket_end(index: usize) -> u64 {
    ((5 + index as u64 % 4) << (index / 4)) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_known_of_few_responses_and_of_very_long_ones() {
        let learned = LearnedOutput::default();
        for _ in 1..MIN_RESPONSES {
            learned.record(1, 100);
        }
        assert_eq!(learned.p95(1), None);
        learned.record(1, 100);
        assert_eq!((learned.p95(1), learned.p95(2)), (Some(111), None));
        (0..MIN_RESPONSES).for_each(|_| learned.record(2, u64::MAX));
        assert_eq!(learned.p95(2), None);
    }

    #[test]
    fn new_responses_replace_old_ones() {
        let learned = LearnedOutput::default();
        (0..1000).for_each(|_| learned.record(1, 10_000));
        (0..1000).for_each(|_| learned.record(1, 10));
        assert_eq!(learned.p95(1), Some(11));
    }

    #[test]
    fn uncovered_cost_of_an_identity_is_bounded_until_it_is_dropped() {
        let learned = Arc::new(LearnedOutput::default());
        let first = learned.leave_uncovered(1, 60, 100).unwrap();
        assert!(learned.leave_uncovered(1, 41, 100).is_none());
        let second = learned.leave_uncovered(1, 40, 100).unwrap();
        assert!(learned.leave_uncovered(2, 100, 100).is_some(), "another identity");
        drop(first);
        assert!(learned.leave_uncovered(1, 60, 100).is_some());
        drop(second);
        assert!(lock(&learned.uncovered).is_empty());
    }

    proptest! {
        #[test]
        fn at_most_5_percent_of_the_responses_exceed_the_learned_number(
            outputs in prop::collection::vec(0..100_000_u64, 20..300),
        ) {
            let learned = LearnedOutput::default();
            outputs.iter().for_each(|output| learned.record(1, *output));
            let p95 = learned.p95(1).unwrap();
            let above = outputs.iter().filter(|output| **output > p95).count();
            prop_assert!(above <= outputs.len() / 20);
            // The end of a bucket exceeds each of its values by less than a quarter, or by 4 tokens.
            let reached = outputs.iter().filter(|output| **output * 5 / 4 + 4 >= p95).count();
            prop_assert!(reached > outputs.len() / 20);
        }
    }
}
