//! Shares of the requests of a route among several upstreams.

use std::sync::atomic::{AtomicU64, Ordering};

/// The fraction of the golden ratio in 64 bits. Its multiples fill an interval evenly, whatever stretch or every which one of them is
/// looked at (Weyl, 1916): no client that comes in a rhythm meets one upstream only.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Who gets which share.
#[derive(Debug)]
pub struct Split {
    /// Upstreams by index, each with the sum of the weights up to its own; none without weight.
    shares: Vec<(u64, usize)>,
    /// Of all weights.
    sum: u64,
    /// By all workers together.
    drawn: AtomicU64,
}

impl Split {
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
        (!shares.is_empty()).then(|| Split { shares, sum, drawn: AtomicU64::new(0) })
    }

    /// The upstreams that have a share, by index.
    pub fn upstreams(&self) -> impl Iterator<Item = usize> {
        self.shares.iter().map(|(_, upstream)| *upstream)
    }

    /// The upstream of the next request.
    pub fn draw(&self) -> usize {
        if let [(_, only)] = self.shares[..] {
            return only;
        }
        let number = self.drawn.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN);
        // Scaled from 2^64 to the sum.
        let place = ((u128::from(number) * u128::from(self.sum)) >> 64) as u64;
        let share = self.shares.partition_point(|(end, _)| *end <= place);
        self.shares[share].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_those_of_the_weights() {
        for weights in [&[9, 1][..], &[1, 1], &[1, 0, 3], &[99, 1], &[1, 2, 3, 4], &[0, 5], &[1_000_000, 1], &[7, 7, 7]]
        {
            let split = Split::new(weights.iter().copied().enumerate()).unwrap();
            let sum: u32 = weights.iter().sum();
            let mut counts = vec![0_u32; weights.len()];
            for drawn in 1..=10_000 {
                counts[split.draw()] += 1;
                for (index, weight) in weights.iter().enumerate() {
                    let due = f64::from(drawn) * f64::from(*weight) / f64::from(sum);
                    let off = (f64::from(counts[index]) - due).abs();
                    // From the beginning: not only in the long run.
                    assert!(off <= 4.0, "{weights:?}: {} of {drawn} to {index}, due {due:.1}", counts[index]);
                    assert!(*weight > 0 || counts[index] == 0, "{weights:?}: {index} has no weight");
                }
            }
        }
        assert!(Split::new([(0, 0)]).is_none() && Split::new([]).is_none());
    }

    #[test]
    fn who_comes_in_a_rhythm_gets_the_same_shares() {
        let split = Split::new([(0, 9), (1, 1)]).unwrap();
        for rhythm in 2..=20 {
            let canary = (0..rhythm * 1000).filter(|index| split.draw() == 1 && index % rhythm == 0).count();
            assert!((80..=120).contains(&canary), "every {rhythm}th request: {canary} of 1000");
        }
    }
}
