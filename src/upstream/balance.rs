//! In which order servers take their turns: weights made into tables, so that a choice costs the same however many there are.

use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering};

use http::HeaderName;
use siphasher::sip::SipHasher13;
use uuid::Uuid;

/// `balance`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadBalancingPolicy {
    /// The one with fewer requests in flight for its weight, of two that are drawn.
    LeastRequests,
    /// One after the other.
    RoundRobin,
    /// Whichever is drawn.
    Random,
    /// The one that the value of this header belongs to.
    Hash(HeaderName),
}

/// Slots of an order: weights whose sum in lowest terms is not larger are kept exactly.
const MAX_SLOTS: u64 = 16_384;

/// Members by weight: each has as many slots as its share, evenly spread.
#[derive(Debug)]
pub(super) struct WeightedSlots {
    slots: Box<[u32]>,
    shares: Box<[u32]>,
}

impl WeightedSlots {
    /// Weight 0 has no share.
    pub(super) fn new(weights: &[u64]) -> Self {
        let divisor = weights.iter().copied().fold(0, gcd).max(1);
        let sum = weights.iter().sum::<u64>() / divisor;
        let share = |weight: &u64| match weight / divisor {
            0 => 0,
            share if sum <= MAX_SLOTS => share,
            share => (u128::from(share) * u128::from(MAX_SLOTS) / u128::from(sum)).max(1) as u64,
        };
        let shares: Box<[_]> = weights.iter().map(|weight| share(weight) as u32).collect();
        // The k-th turn of a member with n of them is best in the middle of the k-th n-th part.
        let turns = |(index, share): (usize, &u32)| {
            let share = u64::from(*share);
            (0..share).map(move |k| (((2 * k + 1) << 32) / (2 * share), index as u32))
        };
        let mut turns: Vec<_> = shares.iter().enumerate().flat_map(turns).collect();
        turns.sort_unstable();
        WeightedSlots { slots: turns.into_iter().map(|(_, index)| index).collect(), shares }
    }

    /// Whose turn it is; none if nobody has a share.
    pub(super) fn endpoint_at(&self, turn: u64) -> Option<usize> {
        match self.slots.len() {
            0 => None,
            1 => Some(self.slots[0] as usize),
            length => Some(self.slots[(turn % length as u64) as usize] as usize),
        }
    }

    pub(super) fn share(&self, index: usize) -> u64 {
        u64::from(self.shares[index])
    }
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// Slots that the values of a header fall into.
const HASH_SLOTS: usize = 16_384;

/// Who owns each slot: the highest random weight (rendezvous hashing, Thaler and Ravishankar 1998) decides, so that only
/// the slots of a member that goes find new owners, and one that comes takes no more than its share.
#[derive(Debug)]
pub(super) struct RendezvousTable(Box<[u32]>);

impl RendezvousTable {
    /// Of members with these names and weights, of which one at least is not 0.
    pub(super) fn new(endpoints: &[(u64, f64)]) -> Self {
        let score = |slot: u64, name: u64, weight: f64| {
            // In (0, 1], to 53 bits.
            let draw = ((mix(name ^ mix(slot)) >> 11) + 1) as f64 / (1_u64 << 53) as f64;
            -draw.ln() / weight
        };
        let owner = |slot: usize| {
            let scores = endpoints.iter().enumerate().filter(|(_, (_, weight))| *weight > 0.0);
            let scores = scores.map(|(index, (name, weight))| (score(slot as u64, *name, *weight), index as u32));
            scores.min_by(|one, other| one.0.total_cmp(&other.0)).map_or(0, |(_, index)| index)
        };
        RendezvousTable((0..HASH_SLOTS).map(owner).collect())
    }

    /// Whom a key belongs to; at further attempts, who stands in.
    pub(super) fn lookup(&self, key: u64, attempt: u32) -> usize {
        let key = (0..attempt).fold(key, |key, _| mix(key));
        self.0[(key % HASH_SLOTS as u64) as usize] as usize
    }
}

/// A hash that all gateways agree on.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new();
    hasher.write(bytes);
    hasher.finish()
}

/// The finisher of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Random numbers for choices, not for secrets.
#[derive(Debug)]
pub(super) struct Rng(AtomicU64);

impl Rng {
    pub(super) fn from_seed(seed: u64) -> Self {
        Rng(AtomicU64::new(seed))
    }

    /// Thrown otherwise in each process and worker.
    pub(super) fn from_random_seed() -> Self {
        Rng::from_seed(Uuid::new_v4().as_u64_pair().0)
    }

    pub(super) fn next_u64(&self) -> u64 {
        mix(self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(slots: &WeightedSlots, endpoints: usize, turns: impl Iterator<Item = u64>) -> Vec<u32> {
        let mut counts = vec![0; endpoints];
        turns.for_each(|turn| counts[slots.endpoint_at(turn).unwrap()] += 1);
        counts
    }

    #[test]
    fn turns_follow_weights_exactly_and_evenly() {
        let slots = WeightedSlots::new(&[1, 1, 1]);
        assert_eq!((0..6).map(|turn| slots.endpoint_at(turn).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        let slots = WeightedSlots::new(&[10, 0, 30, 20]);
        assert_eq!(counts(&slots, 4, 0..600), [100, 0, 300, 200]);
        // No stretch of turns gives anybody two more or less than its share of it.
        for (from, length) in (0..6).flat_map(|from| (1..30).map(move |length| (from, length))) {
            for (count, weight) in counts(&slots, 4, from..from + length).into_iter().zip([1.0, 0.0, 3.0, 2.0]) {
                let fair = weight / 6.0 * length as f64;
                assert!((f64::from(count) - fair).abs() < 2.0, "{count} of {length} from {from}, fair is {fair}");
            }
        }
        assert_eq!(WeightedSlots::new(&[0, 0]).endpoint_at(7), None);
    }

    #[test]
    fn weights_beyond_the_slots_are_kept_within_two_percent() {
        let weights: Vec<u64> = (0..40).map(|index| 7919 + 6151 * index).collect();
        let slots = WeightedSlots::new(&weights);
        let sum = weights.iter().sum::<u64>() as f64;
        let all = slots.slots.len() as f64;
        for (index, weight) in weights.iter().enumerate() {
            let (has, fair) = (slots.share(index) as f64 / all, *weight as f64 / sum);
            assert!((has / fair - 1.0).abs() < 0.02, "member {index}: {has} for {fair}");
        }
        assert!(WeightedSlots::new(&[1, 1_000_000]).share(0) > 0, "nobody is left out");
    }

    #[test]
    fn a_random_turn_is_by_weight() {
        let (slots, rng) = (WeightedSlots::new(&[1, 2, 5]), Rng::from_seed(7));
        let counts = counts(&slots, 3, (0..80_000).map(|_| rng.next_u64()));
        for (count, fair) in counts.into_iter().zip([10_000, 20_000, 50_000]) {
            // The seed is fixed: this holds or does not.
            assert!(
                f64::from(count).mul_add(1.0, -f64::from(fair)).abs() < 0.02 * f64::from(fair),
                "{count} of {fair}"
            );
        }
    }

    #[test]
    fn few_keys_move() {
        let names: Vec<u64> = (0..10_u64).map(|name| hash(&name.to_be_bytes())).collect();
        let endpoints = |weight: &dyn Fn(usize) -> f64| -> Vec<_> {
            names.iter().enumerate().map(|(index, name)| (*name, weight(index))).collect()
        };
        let all = RendezvousTable::new(&endpoints(&|_| 1.0));
        let without_3 = RendezvousTable::new(&endpoints(&|index| if index == 3 { 0.0 } else { 1.0 }));
        let heavy_3 = RendezvousTable::new(&endpoints(&|index| if index == 3 { 3.0 } else { 1.0 }));
        let mut kept_by = [0_u32; 10];
        for key in (0..100_000_u64).map(|key| hash(&key.to_be_bytes())) {
            let owner = all.lookup(key, 0);
            kept_by[owner] += 1;
            if owner != 3 {
                assert_eq!(without_3.lookup(key, 0), owner, "only keys of the one that went move");
                assert!([3, owner].contains(&heavy_3.lookup(key, 0)), "more weight takes keys, and moves no other");
            } else {
                assert_eq!(heavy_3.lookup(key, 0), 3);
            }
        }
        for (index, count) in kept_by.into_iter().enumerate() {
            assert!((8_500..11_500).contains(&count), "member {index} has {count} of 100,000 keys");
        }
    }
}
