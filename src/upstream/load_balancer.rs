//! Load balancing: endpoint selection, with tables of usable endpoints that are built when the health or the addresses
//! of a cluster change.

use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use http::HeaderName;
use siphasher::sip::SipHasher13;
use uuid::Uuid;

use crate::upstream::UpstreamSettings;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::endpoint::RequestPermit;
use crate::upstream::health::Health;

/// Maximum number of endpoints that the policy draws for one request. After this number of draws, all usable endpoints
/// are tried in order.
const MAX_DRAWS: u32 = 8;

/// Factor of all weights, so that the weight of a server can be divided among its addresses. The factor is divisible by
/// 1 to 12.
const WEIGHT_UNIT: u64 = 55_440;

/// Endpoints of a cluster, with their health at the time of construction.
#[derive(Debug)]
pub(super) struct LoadBalancer {
    pub(super) endpoints: Arc<Vec<Arc<Endpoint>>>,
    /// Indices of the endpoints that get requests.
    pub(super) usable: Box<[usize]>,
    /// Indices of the endpoints in connect backoff. These endpoints serve retries if no usable endpoint is left.
    backup: Box<[usize]>,
    weighted_slots: WeightedSlots,
    pub(super) rendezvous: Option<Arc<RendezvousTable>>,
    /// Whether ejections are ignored because more than half of the endpoints are not healthy.
    pub(super) is_in_panic_mode: bool,
}

/// Input of one endpoint selection.
pub(super) struct PickContext<'a> {
    pub(super) policy: &'a LoadBalancingPolicy,
    /// Hash of the header that selects the endpoint, for [`LoadBalancingPolicy::Hash`].
    pub(super) hash_key: Option<u64>,
    pub(super) rng: &'a Rng,
    /// Round-robin position, shared by all workers.
    pub(super) round_robin_counter: &'a AtomicU64,
    /// Endpoints that must not be picked.
    pub(super) excluded: &'a [Arc<Endpoint>],
}

impl LoadBalancer {
    /// Build the tables from the current health of the endpoints. Also return the time when the tables become outdated
    /// if no event happens before.
    pub(super) fn new(
        settings: &UpstreamSettings,
        endpoints: Arc<Vec<Arc<Endpoint>>>,
        rendezvous: Option<Arc<RendezvousTable>>,
        now: Instant,
    ) -> (Self, Option<Instant>) {
        let mut next = None;
        let shared = endpoint_weights(&endpoints);
        let mut weights = Vec::with_capacity(endpoints.len());
        let mut healths = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints.iter() {
            let health_state = endpoint.health_state();
            let steps = u64::from(health_state.weight_steps(now, settings.slow_start));
            weights.push(shared[weights.len()] * steps);
            healths.push((health_state.health(now), health_state.is_in_connect_backoff(now)));
            next = [next, health_state.next_change(now, settings.slow_start)].into_iter().flatten().min();
        }
        let counts = |wanted: &dyn Fn(Health) -> bool| {
            healths.iter().zip(&weights).filter(|((health, _), weight)| **weight > 0 && wanted(*health)).count()
        };
        let ejected = counts(&|health| health == Health::Ejected);
        let is_in_panic_mode = ejected > 0 && counts(&|health| health != Health::Healthy) * 2 > counts(&|_| true);
        // Ignore only ejections, which are inferred from requests. Failed health checks are respected even for the last
        // endpoint.
        let is_eligible = |health| health == Health::Healthy || (is_in_panic_mode && health == Health::Ejected);
        let any_reachable = healths
            .iter()
            .zip(&weights)
            .any(|((standing, passed), weight)| *weight > 0 && is_eligible(*standing) && !passed);
        let mut backup = Vec::new();
        for (index, ((standing, passed), weight)) in healths.iter().zip(&mut weights).enumerate() {
            let passed = *passed && any_reachable;
            if passed && is_eligible(*standing) && *weight > 0 {
                backup.push(index);
            }
            if passed || !is_eligible(*standing) {
                *weight = 0;
            }
        }
        let usable = (0..endpoints.len()).filter(|index| weights[*index] > 0).collect();
        (
            LoadBalancer {
                endpoints,
                usable,
                backup: backup.into(),
                weighted_slots: WeightedSlots::new(&weights),
                rendezvous,
                is_in_panic_mode,
            },
            next,
        )
    }

    /// Pick an endpoint and acquire a request permit. Return `None` if no endpoint is usable or all have `max_requests`
    /// in flight.
    pub(super) fn pick(&self, context: &PickContext<'_>) -> Option<(usize, RequestPermit)> {
        let try_acquire = |index: usize| {
            let endpoint = &self.endpoints[index];
            let tried = context.excluded.iter().any(|tried| Arc::ptr_eq(tried, endpoint));
            let permit = if tried { None } else { Endpoint::try_acquire(endpoint) };
            permit.map(|permit| (index, permit))
        };
        let try_backup =
            || self.backup.iter().filter(|_| !context.excluded.is_empty()).find_map(|index| try_acquire(*index));
        if let [only] = self.usable[..] {
            return try_acquire(only).or_else(try_backup);
        }
        for attempt in 0..MAX_DRAWS {
            if let Some(found) = try_acquire(self.pick_index(context, attempt)?) {
                return Some(found);
            }
        }
        let first = context.hash_key.unwrap_or_else(|| context.rng.next_u64()) as usize % self.usable.len();
        let (before, after) = self.usable.split_at(first);
        after.iter().chain(before).find_map(|index| try_acquire(*index)).or_else(try_backup)
    }

    fn pick_index(&self, context: &PickContext<'_>, attempt: u32) -> Option<usize> {
        match (context.policy, &self.rendezvous, context.hash_key) {
            (LoadBalancingPolicy::RoundRobin, ..) => {
                self.weighted_slots.endpoint_at(context.round_robin_counter.fetch_add(1, Ordering::Relaxed))
            }
            (LoadBalancingPolicy::Random, ..) => self.weighted_slots.endpoint_at(context.rng.next_u64()),
            (LoadBalancingPolicy::Hash(_), Some(rendezvous), Some(key)) => {
                // The key also selects the replacement of an unhealthy owner, so that keys return to the owner when it
                // recovers.
                let mut usable = (0..2 * MAX_DRAWS)
                    .map(|draw| rendezvous.lookup(key, draw))
                    .filter(|owner| self.weighted_slots.share(*owner) > 0);
                usable.nth(attempt as usize).or_else(|| self.weighted_slots.endpoint_at(key))
            }
            (LoadBalancingPolicy::LeastRequests | LoadBalancingPolicy::Hash(_), ..) => {
                self.less_loaded_of_two(context.rng)
            }
        }
    }

    /// Power of two choices (Mitzenmacher 2001): draw two endpoints by weight, and take the one with the lower load for
    /// its weight, or the first if they are equal.
    fn less_loaded_of_two(&self, rng: &Rng) -> Option<usize> {
        let one = self.weighted_slots.endpoint_at(rng.next_u64())?;
        let mut others = (0..4).filter_map(|_| self.weighted_slots.endpoint_at(rng.next_u64()));
        let other = others.find(|other| *other != one).unwrap_or_else(|| self.any_other(one, rng));
        let load = |index: usize| self.endpoints[index].in_flight() as u64;
        let (of_one, of_other) =
            (load(one) * self.weighted_slots.share(other), load(other) * self.weighted_slots.share(one));
        Some(if of_one <= of_other { one } else { other })
    }

    /// Return a random usable endpoint other than `one`. At least two endpoints are usable.
    fn any_other(&self, one: usize, rng: &Rng) -> usize {
        let position = rng.next_u64() as usize % self.usable.len();
        if self.usable[position] == one {
            self.usable[(position + 1) % self.usable.len()]
        } else {
            self.usable[position]
        }
    }
}

/// Return the weight of each endpoint. The addresses of a server share its weight.
pub(super) fn endpoint_weights(endpoints: &[Arc<Endpoint>]) -> Vec<u64> {
    let servers = endpoints.iter().map(|endpoint| endpoint.server_index + 1).max().unwrap_or_default();
    let mut addresses = vec![0; servers];
    endpoints.iter().for_each(|endpoint| addresses[endpoint.server_index] += 1);
    endpoints
        .iter()
        .map(|endpoint| u64::from(endpoint.server.weight) * WEIGHT_UNIT / addresses[endpoint.server_index])
        .collect()
}

// Policies and their tables. The cost of a selection does not depend on the number of endpoints.

/// Load balancing policy (`balance`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadBalancingPolicy {
    /// Draw two endpoints and take the one with fewer requests in flight relative to its weight.
    LeastRequests,
    /// Take the endpoints in turn, by weight.
    RoundRobin,
    /// Draw an endpoint by weight.
    Random,
    /// Take the endpoint that owns the value of this header (rendezvous hashing).
    Hash(HeaderName),
}

/// Maximum number of slots. Weights are exact if their sum, after division by their greatest common divisor, is at most
/// this number.
const MAX_SLOTS: u64 = 16_384;

/// Weighted schedule: each endpoint has slots in proportion to its weight, evenly distributed.
#[derive(Debug)]
pub(super) struct WeightedSlots {
    slots: Box<[u32]>,
    shares: Box<[u32]>,
}

impl WeightedSlots {
    /// Build the schedule. Endpoints with weight 0 get no slot.
    pub(super) fn new(weights: &[u64]) -> Self {
        let divisor = weights.iter().copied().fold(0, gcd).max(1);
        let sum = weights.iter().sum::<u64>() / divisor;
        let share = |weight: &u64| match weight / divisor {
            0 => 0,
            share if sum <= MAX_SLOTS => share,
            share => (u128::from(share) * u128::from(MAX_SLOTS) / u128::from(sum)).max(1) as u64,
        };
        let shares: Box<[_]> = weights.iter().map(|weight| share(weight) as u32).collect();
        // Slot k of an endpoint with n slots is in the middle of the k-th of n equal parts of the schedule.
        let turns = |(index, share): (usize, &u32)| {
            let share = u64::from(*share);
            (0..share).map(move |k| (((2 * k + 1) << 32) / (2 * share), index as u32))
        };
        let mut turns: Vec<_> = shares.iter().enumerate().flat_map(turns).collect();
        turns.sort_unstable();
        WeightedSlots { slots: turns.into_iter().map(|(_, index)| index).collect(), shares }
    }

    /// Return the endpoint of slot `turn`, modulo the number of slots. Return `None` if all weights are 0.
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

/// Number of slots to which hash keys are mapped.
const HASH_SLOTS: usize = 16_384;

/// Owner of each slot by weighted rendezvous hashing (highest random weight, Thaler and Ravishankar 1998). If an
/// endpoint is removed, only its slots get new owners. A new endpoint takes only its share of the slots.
#[derive(Debug)]
pub(super) struct RendezvousTable(Box<[u32]>);

impl RendezvousTable {
    /// Build the table from the name hash and the weight of each endpoint. At least one weight must not be 0.
    pub(super) fn new(endpoints: &[(u64, f64)]) -> Self {
        let score = |slot: u64, name: u64, weight: f64| {
            // The value is uniformly distributed in (0, 1] with 53 bits.
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

    /// Return the owner of `key`. With `attempt` > 0, return a replacement of the owner.
    pub(super) fn lookup(&self, key: u64, attempt: u32) -> usize {
        let key = (0..attempt).fold(key, |key, _| mix(key));
        self.0[(key % HASH_SLOTS as u64) as usize] as usize
    }
}

/// Return a hash that is equal on all gateways.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// SplitMix64 random number generator. The generator is not suitable for cryptography.
#[derive(Debug)]
pub(super) struct Rng(AtomicU64);

impl Rng {
    pub(super) fn from_seed(seed: u64) -> Self {
        Rng(AtomicU64::new(seed))
    }

    /// Use a random seed, which differs between processes and workers.
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
    fn slots_follow_weights_exactly_and_evenly() {
        let slots = WeightedSlots::new(&[1, 1, 1]);
        assert_eq!((0..6).map(|turn| slots.endpoint_at(turn).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        let slots = WeightedSlots::new(&[10, 0, 30, 20]);
        assert_eq!(counts(&slots, 4, 0..600), [100, 0, 300, 200]);
        // In every interval, each endpoint has its fair share, with a deviation of less than two requests.
        for (from, length) in (0..6).flat_map(|from| (1..30).map(move |length| (from, length))) {
            for (count, weight) in counts(&slots, 4, from..from + length).into_iter().zip([1.0, 0.0, 3.0, 2.0]) {
                let fair = weight / 6.0 * length as f64;
                assert!((f64::from(count) - fair).abs() < 2.0, "{count} of {length} from {from}, fair is {fair}");
            }
        }
        assert_eq!(WeightedSlots::new(&[0, 0]).endpoint_at(7), None);
    }

    #[test]
    fn large_weights_are_approximated_within_two_percent() {
        let weights: Vec<u64> = (0..40).map(|index| 7919 + 6151 * index).collect();
        let slots = WeightedSlots::new(&weights);
        let sum = weights.iter().sum::<u64>() as f64;
        let all = slots.slots.len() as f64;
        for (index, weight) in weights.iter().enumerate() {
            let (has, fair) = (slots.share(index) as f64 / all, *weight as f64 / sum);
            assert!((has / fair - 1.0).abs() < 0.02, "endpoint {index}: share {has}, fair is {fair}");
        }
        assert!(WeightedSlots::new(&[1, 1_000_000]).share(0) > 0, "every positive weight has a slot");
    }

    #[test]
    fn random_slots_follow_weights() {
        let slots = WeightedSlots::new(&[1, 2, 5]);
        let rng = Rng::from_seed(7);
        let counts = counts(&slots, 3, (0..80_000).map(|_| rng.next_u64()));
        for (count, fair) in counts.into_iter().zip([10_000, 20_000, 50_000]) {
            // The test uses a fixed seed, so the result is deterministic.
            assert!(
                f64::from(count).mul_add(1.0, -f64::from(fair)).abs() < 0.02 * f64::from(fair),
                "{count} of {fair}"
            );
        }
    }

    #[test]
    fn only_keys_of_changed_endpoint_move() {
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
                assert_eq!(without_3.lookup(key, 0), owner, "only keys of the removed endpoint move");
                assert!([3, owner].contains(&heavy_3.lookup(key, 0)), "a larger weight gains keys and moves no others");
            } else {
                assert_eq!(heavy_3.lookup(key, 0), 3);
            }
        }
        for (index, count) in kept_by.into_iter().enumerate() {
            assert!((8_500..11_500).contains(&count), "endpoint {index} has {count} of 100,000 keys");
        }
    }
}
