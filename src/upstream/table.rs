//! Who can be asked at the moment, and who is asked next. It is made anew when that changes, not for each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::balance::{LoadBalancingPolicy, RendezvousTable, Rng, WeightedSlots};
use super::condition::Health;
use super::member::Endpoint;
use super::queue::RequestPermit;
use super::settings::UpstreamSettings;

/// So many members are drawn before all are looked at in turn.
const MAX_DRAWS: u32 = 8;

/// Weights are multiplied by this, so that addresses can share one.
const WEIGHT_UNIT: u64 = 55_440;

/// The members of a fleet as they are at the moment.
#[derive(Debug)]
pub(super) struct LoadBalancer {
    pub(super) endpoints: Arc<Vec<Arc<Endpoint>>>,
    /// Those that can be asked.
    pub(super) usable: Box<[usize]>,
    /// Those that took no connection just now: for requests that have tried all others.
    backup: Box<[usize]>,
    weighted_slots: WeightedSlots,
    pub(super) rendezvous: Option<Arc<RendezvousTable>>,
    /// Whether so many are out that ejections do not count.
    pub(super) is_in_panic_mode: bool,
}

/// What one choice depends on.
pub(super) struct PickContext<'a> {
    pub(super) policy: &'a LoadBalancingPolicy,
    /// The hash of the header that decides, if that is so.
    pub(super) hash_key: Option<u64>,
    pub(super) rng: &'a Rng,
    /// Turns that were taken so far.
    pub(super) round_robin_counter: &'a AtomicU64,
    /// Members that will not do.
    pub(super) excluded: &'a [Arc<Endpoint>],
}

impl LoadBalancer {
    /// As things are now; with the instant at which they will be different, if nothing happens before.
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
        // What a check says is believed to the last server; an ejection is a guess.
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

    /// A place at one of them; none if there is no member or no room.
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
                // Who stands in for an owner that is out is drawn by the key as well: when it is back, so are its keys.
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

    /// The power of two choices (Mitzenmacher 2001): both are drawn by weight, and with equal load the first is taken.
    fn less_loaded_of_two(&self, rng: &Rng) -> Option<usize> {
        let one = self.weighted_slots.endpoint_at(rng.next_u64())?;
        let mut others = (0..4).filter_map(|_| self.weighted_slots.endpoint_at(rng.next_u64()));
        let other = others.find(|other| *other != one).unwrap_or_else(|| self.any_other(one, rng));
        let load = |index: usize| self.endpoints[index].in_flight() as u64;
        let (of_one, of_other) =
            (load(one) * self.weighted_slots.share(other), load(other) * self.weighted_slots.share(one));
        Some(if of_one <= of_other { one } else { other })
    }

    /// Another one that can be asked; there are two at least.
    fn any_other(&self, one: usize, rng: &Rng) -> usize {
        let position = rng.next_u64() as usize % self.usable.len();
        if self.usable[position] == one {
            self.usable[(position + 1) % self.usable.len()]
        } else {
            self.usable[position]
        }
    }
}

/// The weight of a server is that of all its addresses together.
pub(super) fn endpoint_weights(endpoints: &[Arc<Endpoint>]) -> Vec<u64> {
    let servers = endpoints.iter().map(|endpoint| endpoint.server_index + 1).max().unwrap_or_default();
    let mut addresses = vec![0; servers];
    endpoints.iter().for_each(|endpoint| addresses[endpoint.server_index] += 1);
    endpoints
        .iter()
        .map(|endpoint| u64::from(endpoint.server.weight) * WEIGHT_UNIT / addresses[endpoint.server_index])
        .collect()
}
