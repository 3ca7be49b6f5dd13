//! The memory store: the default store, the fallback in an outage, and the model with which tests compare the Lua
//! scripts.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indexmap::IndexMap;
use tracing::warn;

use crate::clock::{Clock, LogThrottle};
use crate::limiter::algorithm::concurrency::PermitAction;
use crate::limiter::algorithm::{Change, State, Status, Step, StepKind};
use crate::limiter::key::Key;
use crate::limiter::usage::UsageTable;
use crate::limiter::verdict::{Charge, Operation, Verdict};

/// Number of shards, a power of two that is large enough that two workers rarely lock the same shard.
const SHARDS: usize = 64;

/// Interval for logging that the states of a limit do not fit into memory.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A store of counters in this process, with a bounded number of states.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Vec<Mutex<Shard>>,
    capacity: usize,
    clock: Clock,
    evicted: AtomicU64,
    rejected: AtomicU64,
    /// Totals of the charged cost. With Redis, only the totals that wait to be sent to Redis.
    pub usage: UsageTable,
}

impl MemoryStore {
    /// Create a store for about `max_states` states of all limits together. When the store is full, each limit that has
    /// states is guaranteed an equal part of the capacity. Within a limit, the store evicts a state that has used a
    /// small share of its quota. In addition, the store has room for about `max_states` usage totals.
    pub fn new(max_states: usize, clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let capacity = max_states.div_ceil(SHARDS).max(1);
        let evicted = AtomicU64::new(0);
        let rejected = AtomicU64::new(0);
        MemoryStore { shards, capacity, clock, evicted, rejected, usage: UsageTable::new(max_states) }
    }

    /// Return the number of states, including expired ones.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Return whether the store has no states.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Remove a state. Return whether the state existed.
    pub fn remove(&self, key: u128) -> bool {
        lock(&self.shards[shard_of(key)]).remove(key)
    }

    /// Return the number of states that were evicted before they expired, and the number of charges that were not
    /// counted because their limit was full.
    pub fn evictions_and_rejections(&self) -> [u64; 2] {
        [&self.evicted, &self.rejected].map(|count| count.load(Ordering::Relaxed))
    }

    /// Decide all charges atomically, without waiting for I/O.
    pub fn decide(&self, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        // Lock each shard of the request once, and hold all locks, so that the request is atomic. The fixed order of
        // the locks prevents deadlocks.
        let mut shard_bits = 0u64;
        for charge in charges {
            shard_bits |= 1 << shard_of(charge.key.local_hash());
        }
        let mut locked = LockedShards { shard_bits, guards: Vec::with_capacity(charges.len()) };
        for index in (0..SHARDS).filter(|index| shard_bits >> index & 1 == 1) {
            locked.guards.push(lock(&self.shards[index]));
        }
        // Read the clock while the locks are held, so that later decisions about a state never have an earlier time.
        let now = self.clock.now_us();
        let verdict = decide_locked(self, &mut locked, now, operation, charges);
        drop(locked);
        for (charge, outcome) in charges.iter().zip(&verdict.outcomes).filter(|(charge, _)| charge.usage.is_some()) {
            self.add_usage(now, operation, charge, charge.usage_amount(operation, verdict.granted, outcome.status));
        }
        verdict
    }

    /// Add the cost of an admitted request to the usage total of a limit whose state was not charged.
    pub fn add_uncharged_usage(&self, charge: &Charge<'_>) {
        let granted = 1;
        let status = Status::Ok;
        let amount = charge.usage_amount(Operation::Check, granted, status);
        self.add_usage(self.clock.now_us(), Operation::Check, charge, amount);
    }

    fn add_usage(&self, now: u64, operation: Operation, charge: &Charge<'_>, amount: i64) {
        if let Some(day) = charge.usage_day(operation, now).filter(|_| amount != 0) {
            self.usage.add(charge.key.state_name.limit_name(), charge.key.identity, day.date, amount);
        }
    }

    /// Make room for the states of these charges. Return a bit mask of the charges without room.
    fn ensure_room(&self, locked: &mut LockedShards<'_>, now: u64, charges: &[Charge<'_>], steps: &[Step]) -> u64 {
        let mut full_limits = 0;
        for (index, (charge, step)) in charges.iter().zip(steps).enumerate() {
            if step.outcome.status != Status::Ok {
                continue;
            }
            match locked.shard_for(charge.key.local_hash()).ensure_room(&charge.key, &step.change, now, self.capacity) {
                Room::Available(0) => continue,
                Room::Available(evicted) => {
                    self.evicted.fetch_add(evicted, Ordering::Relaxed);
                }
                Room::Full => {
                    full_limits |= 1 << index.min(63);
                    self.rejected.fetch_add(1, Ordering::Relaxed);
                }
            }
            static LOG_THROTTLE: LogThrottle = LogThrottle::new();
            if LOG_THROTTLE.should_log(LOG_INTERVAL) {
                let (limit, [evicted, refused]) = (charge.key.state_name.limit_name(), self.evictions_and_rejections());
                warn!(
                    limit,
                    evicted,
                    rejected = refused,
                    "store.max_memory_states is too small for the identities of a limit"
                );
            }
        }
        full_limits
    }
}

struct LockedShards<'a> {
    shard_bits: u64,
    guards: Vec<MutexGuard<'a, Shard>>,
}

impl LockedShards<'_> {
    fn shard_for(&mut self, key: u128) -> &mut Shard {
        let lower_bits = self.shard_bits & ((1 << shard_of(key)) - 1);
        &mut self.guards[lower_bits.count_ones() as usize]
    }
}

fn shard_of(key: u128) -> usize {
    key as usize % SHARDS
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // A poisoned lock can be used: states are replaced as a whole, so a panic in another thread leaves no half-written
    // state.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Decide while the shards are locked, by the same rules as `lua/generic.lua`.
fn decide_locked(
    store: &MemoryStore,
    shards: &mut LockedShards<'_>,
    now: u64,
    operation: Operation,
    charges: &[Charge<'_>],
) -> Verdict {
    let mut operation = operation;
    let mut granted = 1;
    let mut requested = None;
    if operation == Operation::TakeUpTo {
        let (_, steps) = step_all(shards, now, StepKind::Check, false, Some(0), charges);
        let max_cost = charges.first().map_or(0, |charge| charge.cost);
        let enforced = charges.iter().zip(&steps).filter(|(charge, _)| !charge.mode.is_shadow());
        granted = enforced.map(|(_, step)| step.free).fold(max_cost, u64::min);
        // If no token remains, run the step again for one token, so that the outcome contains the retry time.
        requested = Some(granted.max(max_cost.min(1)));
        if max_cost == 0 {
            operation = Operation::Peek;
        }
    }
    let step_kind = match operation {
        Operation::Check | Operation::Peek | Operation::TakeUpTo => StepKind::Check,
        Operation::Charge => StepKind::Charge,
        Operation::Renew => StepKind::Renew,
        Operation::Refund { charged_at } => StepKind::Refund { charged_at, debt_before_us: 0 },
    };
    let (admitted, steps) = step_all(shards, now, step_kind, operation == Operation::Check, requested, charges);
    let will_write = admitted && operation != Operation::Peek;
    let full_limits = if will_write { store.ensure_room(shards, now, charges, &steps) } else { 0 };
    // If there is no room for one limit of a check, no limit is charged. Other operations are for admitted requests, so
    // they need not be all-or-nothing.
    let is_check = matches!(operation, Operation::Check | Operation::TakeUpTo);
    let admitted = admitted && !(is_check && full_limits > 0);
    let mut outcomes = Vec::with_capacity(steps.len());
    for (index, (charge, step)) in charges.iter().zip(steps).enumerate() {
        let mut outcome = step.outcome;
        if operation == Operation::Peek || !admitted {
            (outcome.remaining, outcome.reset_us) = (step.free, step.free_reset_us);
        }
        let has_room = full_limits >> index.min(63) & 1 == 0;
        if operation != Operation::Peek && (admitted && has_room || outcome.status != Status::Ok) {
            let used = used_share(charge, step.outcome.remaining);
            let write = StateWrite { permit_id: charge.permit_id, now_us: now, used_share: used };
            shards.shard_for(charge.key.local_hash()).apply(&charge.key, step.change, write);
        }
        outcomes.push(outcome);
    }
    Verdict {
        full_limits: if is_check { full_limits } else { 0 },
        ..Verdict::new(if admitted { granted } else { 0 }, now, outcomes)
    }
}

/// Return the share of the quota that is used if `remaining` tokens remain, from 0 (nothing) to 255 (the whole quota).
fn used_share(charge: &Charge<'_>, remaining: u64) -> u8 {
    let capacity = u128::from(charge.rule.capacity().max(1));
    let remaining_share = u128::from(remaining) * 255 / capacity;
    255 - u8::try_from(remaining_share).unwrap_or(u8::MAX)
}

fn step_all(
    locked: &mut LockedShards<'_>,
    now: u64,
    step_kind: StepKind,
    may_defer: bool,
    requested: Option<u64>,
    charges: &[Charge<'_>],
) -> (bool, Vec<Step>) {
    let mut admitted = true;
    let mut steps = Vec::with_capacity(charges.len());
    for charge in charges {
        let state = locked.shard_for(charge.key.local_hash()).state(&charge.key, now);
        let is_deferred = charge.mode.is_deferred() && may_defer;
        let cost = if is_deferred { 1 } else { requested.unwrap_or(charge.cost) };
        let charge_step = match step_kind {
            StepKind::Refund { charged_at, .. } => {
                StepKind::Refund { charged_at, debt_before_us: charge.debt_before_us }
            }
            StepKind::Check | StepKind::Charge | StepKind::Renew => step_kind,
        };
        let mut step = charge.rule.step(state, now, charge_step, cost);
        if is_deferred && step.outcome.status == Status::Ok {
            (step.outcome.remaining, step.outcome.reset_us) = (step.free, step.free_reset_us);
            step.change = Change::None;
        }
        admitted &= step.outcome.status == Status::Ok || charge.mode.is_shadow();
        steps.push(step);
    }
    (admitted, steps)
}

// === Shards: the states of each limit are separate, so that one limit cannot evict the states of another limit ===

/// Number of entries that the sweep examines for each insertion. The number is greater than one, so that expired states
/// are removed faster than new states are added.
const SWEPT_PER_INSERT: usize = 2;

/// Number of entries that are compared to find the entry whose eviction costs least. A sample of 16 contains one of the
/// best 10 % of all entries in four of five cases.
const EVICTION_SAMPLE: usize = 16;

/// Maximum number of entries that are searched for an evictable entry before the charge of a new identity is rejected.
const MAX_EVICTION_SEARCH: usize = 256;

/// Used share of the quota, in 1/255, from which a state is protected. A protected state is evicted only to make room
/// for the guaranteed part of another limit. The value is half of the quota. A client that causes the eviction of its
/// own unprotected state therefore gains less than half of the quota, each time. Without eviction of such states, the
/// first requests of many identities would fill the store, and new identities would be rejected until these states
/// expire.
const NEAR_LIMIT: u8 = 128;

/// The states of all limits whose keys belong to this shard.
#[derive(Debug, Default)]
pub(crate) struct Shard {
    limits: Vec<LimitStates>,
    entry_count: usize,
    /// Index of the limit that is swept next.
    next_sweep: usize,
}

/// The states of one limit.
#[derive(Debug)]
struct LimitStates {
    limit_hash: u64,
    // The hasher of the standard library has a random seed. With the published default secret, clients could otherwise
    // choose colliding keys.
    entries: IndexMap<u128, Entry, RandomState>,
    cursor: usize,
}

#[derive(Debug)]
struct Entry {
    state: State,
    expires_at_us: u64,
    /// Share of the quota that was used at the last change, from 0 (nothing) to 255 (the whole quota).
    used_share: u8,
}

/// The data of a charge that is written to a state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateWrite {
    /// The id of the concurrency permit.
    pub(crate) permit_id: u64,
    /// Time of the charge, µs.
    pub(crate) now_us: u64,
    /// Share of the quota that is used after the charge, from 0 (nothing) to 255 (the whole quota).
    pub(crate) used_share: u8,
}

/// The result of making room for a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// The state has room. The value is the number of states that were evicted for it.
    Available(u64),
    /// No state can be evicted, because all candidates have used at least half of their quota.
    Full,
}

impl Shard {
    pub(crate) fn len(&self) -> usize {
        self.entry_count
    }

    /// Return the state of a key, unless it has expired.
    pub(crate) fn state(&self, key: &Key<'_>, now: u64) -> Option<&State> {
        let states = self.limits.iter().find(|states| states.limit_hash == key.limit_hash())?;
        states.entries.get(&key.local_hash()).filter(|entry| entry.expires_at_us > now).map(|entry| &entry.state)
    }

    /// Remove a state. Return whether the state existed.
    pub(crate) fn remove(&mut self, key: u128) -> bool {
        let existed = self.limits.iter_mut().any(|states| states.entries.swap_remove(&key).is_some());
        self.entry_count -= usize::from(existed);
        existed
    }

    /// Make room for a change.
    pub(crate) fn ensure_room(&mut self, key: &Key<'_>, change: &Change, now: u64, capacity: usize) -> Room {
        let adds_entry = match change {
            Change::None | Change::Delete => false,
            Change::Put(..) => true,
            Change::Log(edit) => edit.remove.is_none(),
            Change::Permits(edit) => matches!(edit.action, PermitAction::Acquire | PermitAction::Renew),
        };
        let limit_index = self.limit_index(key.limit_hash());
        if !adds_entry || limit_index.is_some_and(|own| self.limits[own].entries.contains_key(&key.local_hash())) {
            return Room::Available(0);
        }
        if let Some(own) = limit_index {
            self.sweep(own, now);
        }
        if !self.limits.is_empty() {
            // Also sweep a second limit, so that expired states of unused limits are removed.
            self.next_sweep = (self.next_sweep + 1) % self.limits.len();
            self.sweep(self.next_sweep, now);
        }
        if self.entry_count < capacity {
            return Room::Available(0);
        }
        // A limit whose states have all expired has no guaranteed part.
        let others = self
            .limits
            .iter()
            .enumerate()
            .filter(|(index, states)| Some(*index) != limit_index && !states.entries.is_empty());
        let guaranteed = (capacity / (others.count() + 1)).max(1);
        if limit_index.is_none_or(|own| self.limits[own].entries.len() < guaranteed) {
            // This limit has fewer states than its guaranteed part, so another limit has more than its own part. Evict
            // a state of the limit with the most states.
            let largest_limit = (0..self.limits.len()).max_by_key(|&index| self.limits[index].entries.len());
            let evicted = largest_limit.is_some_and(|largest| self.evict(largest, now, u8::MAX));
            return Room::Available(u64::from(evicted));
        }
        match limit_index.is_some_and(|own| self.evict(own, now, NEAR_LIMIT)) {
            true => Room::Available(1),
            false => Room::Full,
        }
    }

    /// Apply a change for which there is already room.
    pub(crate) fn apply(&mut self, key: &Key<'_>, change: Change, write: StateWrite) {
        if change == Change::None {
            return;
        }
        let limit_index = self.limit_index(key.limit_hash()).unwrap_or_else(|| {
            self.limits.push(LimitStates { limit_hash: key.limit_hash(), entries: IndexMap::default(), cursor: 0 });
            self.limits.len() - 1
        });
        let states = &mut self.limits[limit_index];
        let before = states.entries.len();
        states.apply(key.local_hash(), change, write);
        let after = states.entries.len();
        self.entry_count = self.entry_count + after - before;
        if after == 0 {
            self.limits.swap_remove(limit_index);
        }
    }

    fn limit_index(&self, limit_hash: u64) -> Option<usize> {
        self.limits.iter().position(|states| states.limit_hash == limit_hash)
    }

    fn sweep(&mut self, index: usize, now: u64) {
        let states = &mut self.limits[index];
        let before = states.entries.len();
        for _ in 0..SWEPT_PER_INSERT {
            if states.cursor >= states.entries.len() {
                states.cursor = 0;
            }
            match states.entries.get_index(states.cursor) {
                Some((_, entry)) if entry.expires_at_us <= now => {
                    states.entries.swap_remove_index(states.cursor);
                }
                _ => states.cursor += 1,
            }
        }
        self.entry_count -= before - states.entries.len();
    }

    /// Evict the state with the smallest used share from a sample of a limit's states. Among states with the same used
    /// share, evict the one that expires first. If `max_used_share` is less than `u8::MAX`, evict only a state whose
    /// used share is below `max_used_share`. Return whether a state was evicted.
    fn evict(&mut self, index: usize, now: u64, max_used_share: u8) -> bool {
        let LimitStates { entries, cursor, .. } = &mut self.limits[index];
        let len = entries.len();
        let eviction_rank = |index: usize| {
            let used = |entry: &Entry| if entry.expires_at_us <= now { 0 } else { entry.used_share };
            entries.get_index(index).map_or((u8::MAX, u64::MAX), |(_, entry)| (used(entry), entry.expires_at_us))
        };
        let is_evictable = |index: &usize| max_used_share == u8::MAX || eviction_rank(*index).0 < max_used_share;
        let sampled = (0..EVICTION_SAMPLE.min(len))
            .map(|step| (*cursor + step * 7919) % len)
            .min_by_key(|&index| eviction_rank(index));
        let victim = sampled.filter(is_evictable).or_else(|| {
            (0..MAX_EVICTION_SEARCH.min(len)).map(|step| (*cursor + step) % len).find(|index| is_evictable(index))
        });
        let evicted = victim.is_some_and(|victim| entries.swap_remove_index(victim).is_some());
        *cursor += if evicted { 1 } else { MAX_EVICTION_SEARCH };
        self.entry_count -= usize::from(evicted);
        evicted
    }
}

impl LimitStates {
    fn apply(
        &mut self,
        key: u128,
        change: Change,
        StateWrite { permit_id, now_us: now, used_share: used }: StateWrite,
    ) {
        match change {
            Change::None => {}
            Change::Delete => {
                self.entries.swap_remove(&key);
            }
            Change::Put(state, lives_us) => {
                self.entries.insert(key, Entry { state, expires_at_us: now + lives_us, used_share: used });
            }
            Change::Log(edit) => {
                let fresh = || Entry { state: State::Log(VecDeque::new()), expires_at_us: 0, used_share: used };
                let entry = match edit.remove {
                    Some(_) => self.entries.get_mut(&key),
                    None => Some(self.entries.entry(key).or_insert_with(fresh)),
                };
                let Some(Entry { state: State::Log(log), expires_at_us: expires_us, used_share: before }) = entry
                else {
                    return;
                };
                *before = used;
                if *expires_us <= now && edit.remove.is_none() {
                    // The whole log has expired, and the step has ignored its entries, so drop them.
                    log.clear();
                }
                edit.apply(log);
                if edit.remove.is_none() {
                    *expires_us = now + edit.window;
                } else if log.is_empty() {
                    self.entries.swap_remove(&key);
                }
            }
            Change::Permits(edit) => {
                if let PermitAction::Acquire | PermitAction::Renew = edit.action {
                    let fresh = Entry { state: State::Permits(Vec::new()), expires_at_us: 0, used_share: used };
                    self.entries.entry(key).or_insert(fresh);
                }
                let Some(entry) = self.entries.get_mut(&key) else { return };
                let Entry { state: State::Permits(permits), expires_at_us: expires_us, used_share: before } = entry
                else {
                    return;
                };
                *before = used;
                edit.apply(permits, permit_id);
                if edit.action != PermitAction::Release {
                    *expires_us = now + edit.ttl;
                }
                if permits.is_empty() {
                    self.entries.swap_remove(&key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::algorithm::Rule;
    use crate::limiter::algorithm::concurrency::Concurrency;
    use crate::limiter::algorithm::sliding_log::SlidingLog;
    use crate::limiter::key::{Identity, IdentityHasher};
    use crate::limiter::spec::LimitSpec;
    use crate::limiter::verdict::ChargeMode;

    const START_US: u64 = 1_000_000_000;

    fn store(states_per_shard: usize) -> (MemoryStore, Clock) {
        let clock = Clock::manual(START_US);
        (MemoryStore::new(SHARDS * states_per_shard, clock.clone()), clock)
    }

    fn limit(name: &str, quota: &str) -> LimitSpec {
        LimitSpec::token_bucket(&IdentityHasher::new(""), name, quota.parse().unwrap()).unwrap()
    }

    /// Return a charge of the identity with this number. The states of all these identities belong to the first shard.
    fn charge(limit: &LimitSpec, number: u128, cost: u64) -> Charge<'_> {
        let variant = &limit.default_variant;
        let state_hash = Key { identity: Identity(0), state_name: &variant.state_name }.local_hash();
        let identity = Identity((number * SHARDS as u128) ^ state_hash);
        let key = Key { identity, state_name: &variant.state_name };
        let mode = ChargeMode::Enforced;
        Charge { key, rule: &variant.rule, cost, mode, permit_id: 0, debt_before_us: 0, usage: None }
    }

    fn check(store: &MemoryStore, charge: Charge<'_>) -> bool {
        store.decide(Operation::Check, &[charge]).granted > 0
    }

    fn remaining(store: &MemoryStore, limit: &LimitSpec, number: u128) -> u64 {
        store.decide(Operation::Peek, &[charge(limit, number, 0)]).outcomes[0].remaining
    }

    #[test]
    fn renewed_permit_counts_until_its_new_expiry() {
        let (store, clock) = store(2);
        let second: u64 = 1_000_000;
        let rule = Rule::Concurrency(Concurrency { limit: 1, ttl: 10 * second });
        let limit = limit("limit", "10/day");
        let permit = |permit_id| Charge { rule: &rule, permit_id, ..charge(&limit, 0, 1) };
        let is_granted = |permit_id| check(&store, permit(permit_id));
        assert!(is_granted(1));
        clock.set(START_US + 6 * second);
        store.decide(Operation::Renew, &[permit(1)]);
        clock.set(START_US + 12 * second);
        assert!(!is_granted(2), "the renewal extended the permit");
        clock.set(START_US + 17 * second);
        assert!(is_granted(3), "the renewed permit has expired");
    }

    #[test]
    fn expired_log_is_cleared_by_the_next_charge() {
        let (store, clock) = store(2);
        let rule = Rule::SlidingLog(SlidingLog::new("5/s".parse().unwrap()).unwrap());
        let limit = limit("limit", "10/day");
        let charge = |cost| Charge { rule: &rule, ..charge(&limit, 0, cost) };
        assert!(check(&store, charge(5)));
        clock.set(START_US + 2_000_000);
        assert!(check(&store, charge(1)));
        let key = charge(1).key.local_hash();
        let shard = lock(&store.shards[shard_of(key)]);
        let entry = &shard.limits.iter().find_map(|limit| limit.entries.get(&key)).unwrap().state;
        assert!(matches!(entry, State::Log(log) if log.len() == 1), "{entry:?}");
    }

    #[test]
    fn removed_state_makes_room() {
        let (store, _) = store(2);
        let limit = limit("limit", "10/day");
        (0..2).for_each(|number| assert!(check(&store, charge(&limit, number, 1))));
        let removed = charge(&limit, 0, 1).key.local_hash();
        assert!(store.remove(removed) && !store.remove(removed));
        assert!(check(&store, charge(&limit, 2, 1)));
        assert_eq!((store.len(), store.evictions_and_rejections()), (2, [0, 0]));
    }

    #[test]
    fn expired_state_makes_room_among_states_that_are_not_evicted() {
        const STATES: u128 = 20;
        let limit = limit("limit", "10/s");
        for expired in 0..STATES {
            let (store, clock) = store(STATES as usize);
            for number in 0..STATES {
                let cost = if number == expired { 5 } else { 10 };
                assert!(check(&store, charge(&limit, number, cost)));
            }
            assert!(!check(&store, charge(&limit, STATES, 1)), "all states have used half of their quota");
            assert_eq!(store.evictions_and_rejections(), [0, 1]);
            clock.set(START_US + 600_000);
            assert!(check(&store, charge(&limit, STATES, 1)), "state {expired} has expired");
        }
    }

    #[test]
    fn expired_states_of_an_unused_limit_are_removed() {
        let (store, clock) = store(1000);
        let unused = limit("unused", "10/s");
        let used = limit("used", "10/day");
        (0..5).for_each(|number| assert!(check(&store, charge(&unused, number, 10))));
        clock.set(START_US + 2_000_000);
        (0..20).for_each(|number| assert!(check(&store, charge(&used, number, 1))));
        assert_eq!(store.len(), 20);
    }

    #[test]
    fn limit_gets_its_share_from_the_largest_limit() {
        let (store, clock) = store(8);
        let large = limit("large", "10/day");
        let small = limit("small", "10/day");
        let expired = limit("expired", "10/s");
        (0..2).for_each(|number| assert!(check(&store, charge(&expired, number, 10))));
        clock.set(START_US + 2_000_000);
        (0..8).for_each(|number| assert!(check(&store, charge(&large, number, 10))));
        (0..4).for_each(|number| assert!(check(&store, charge(&small, number, 10))));
        let kept = |limit: &LimitSpec| (0..8).filter(|number| remaining(&store, limit, *number) == 0).count();
        assert_eq!((kept(&large), kept(&small)), (4, 4));
        assert!(!check(&store, charge(&small, 4, 10)), "the limit has used its share");
    }

    #[test]
    fn limit_without_room_leaves_the_other_limits_of_the_request_uncharged() {
        let (store, _) = store(4);
        let full = limit("full", "10/day");
        let other = limit("other", "10/day");
        assert!(check(&store, charge(&other, 0, 1)));
        (0..3).for_each(|number| assert!(check(&store, charge(&full, number, 10))));
        let new = charge(&full, 3, 1);
        for (charges, full_limits) in [([new, charge(&other, 0, 1)], 0b01), ([charge(&other, 0, 1), new], 0b10)] {
            let verdict = store.decide(Operation::Check, &charges);
            assert_eq!((verdict.granted, verdict.full_limits), (0, full_limits));
            assert_eq!(remaining(&store, &other, 0), 9);
        }
    }
}
