//! Shares of the requests of a route among several upstreams.

use std::sync::atomic::{AtomicU64, Ordering};

/// The fraction of the golden ratio in 64 bits. Its multiples fill an interval evenly, whatever stretch or every which one of them is
/// looked at (Weyl, 1916): no client that comes in a rhythm meets one upstream only.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Who gets which share.
#[derive(Debug)]
pub struct WeightedUpstreams {
    /// Upstreams by index, each with the sum of the weights up to its own; none without weight.
    cumulative_weights: Vec<(u64, usize)>,
    /// Of all weights.
    total_weight: u64,
    /// By all workers together.
    counter: AtomicU64,
}

impl WeightedUpstreams {
    /// One that gives each upstream the share that its weight is of all; none if there is no weight.
    pub fn new(weights: impl IntoIterator<Item = (usize, u32)>) -> Option<Self> {
        let mut sum = 0;
        let weights = weights.into_iter().filter(|(_, weight)| *weight > 0);
        let shares: Vec<_> = weights
            .map(|(upstream, weight)| {
                sum += u64::from(weight);
                (sum, upstream)
            })
            .collect();
        (!shares.is_empty()).then(|| WeightedUpstreams {
            cumulative_weights: shares,
            total_weight: sum,
            counter: AtomicU64::new(0),
        })
    }

    /// The upstreams that have a share, by index.
    pub fn upstreams(&self) -> impl Iterator<Item = usize> {
        self.cumulative_weights.iter().map(|(_, upstream)| *upstream)
    }

    /// The upstream of the next request.
    pub fn pick(&self) -> usize {
        if let [(_, only)] = self.cumulative_weights[..] {
            return only;
        }
        let number = self.counter.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN_RATIO);
        // Scaled from 2^64 to the sum.
        let position = ((u128::from(number) * u128::from(self.total_weight)) >> 64) as u64;
        let index = self.cumulative_weights.partition_point(|(end, _)| *end <= position);
        self.cumulative_weights[index].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_those_of_the_weights() {
        for weights in [&[9, 1][..], &[1, 1], &[1, 0, 3], &[99, 1], &[1, 2, 3, 4], &[0, 5], &[1_000_000, 1], &[7, 7, 7]]
        {
            let split = WeightedUpstreams::new(weights.iter().copied().enumerate()).unwrap();
            let sum: u32 = weights.iter().sum();
            let mut counts = vec![0_u32; weights.len()];
            for drawn in 1..=10_000 {
                counts[split.pick()] += 1;
                for (index, weight) in weights.iter().enumerate() {
                    let due = f64::from(drawn) * f64::from(*weight) / f64::from(sum);
                    let off = (f64::from(counts[index]) - due).abs();
                    // From the beginning: not only in the long run.
                    assert!(off <= 4.0, "{weights:?}: {} of {drawn} to {index}, due {due:.1}", counts[index]);
                    assert!(*weight > 0 || counts[index] == 0, "{weights:?}: {index} has no weight");
                }
            }
        }
        assert!(WeightedUpstreams::new([(0, 0)]).is_none() && WeightedUpstreams::new([]).is_none());
    }

    #[test]
    fn periodic_clients_get_the_same_shares() {
        let split = WeightedUpstreams::new([(0, 9), (1, 1)]).unwrap();
        for rhythm in 2..=20 {
            let canary = (0..rhythm * 1000).filter(|index| split.pick() == 1 && index % rhythm == 0).count();
            assert!((80..=120).contains(&canary), "every {rhythm}th request: {canary} of 1000");
        }
    }
}
