//! The embedded store: the default, the fallback in an outage, and the model that the scripts are tested against.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::sync::{Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;

use super::algorithm::concurrency::Action;
use super::algorithm::{Ask, Change, State, Status, Step};
use super::clock::Clock;
use super::store::{Charge, Operation, Store, StoreError, Verdict};

/// Enough that two workers rarely meet in one; a power of two.
const SHARDS: usize = 64;

/// Entries looked at for each one added: more than one, so that sweeping outruns growth.
const SWEEP: usize = 2;

/// Entries compared when room must be made; as in Redis' volatile-ttl, five find a good victim.
const SAMPLE: usize = 5;

/// Counters in this process, bounded in number.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Vec<Mutex<Shard>>,
    capacity: usize,
    clock: Clock,
}

#[derive(Debug, Default)]
struct Shard {
    // std's hasher: with the published secret, identities choose the keys.
    entries: IndexMap<u128, Entry, RandomState>,
    cursor: usize,
}

#[derive(Debug)]
struct Entry {
    state: State,
    expires_us: u64,
}

impl MemoryStore {
    /// A store for about `identities` states; when it is full, the state that expires soonest gives way.
    pub fn new(identities: usize, clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        MemoryStore { shards, capacity: identities.div_ceil(SHARDS).max(1), clock }
    }

    /// States held, expired ones included.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).entries.len()).sum()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops a state; whether there was one.
    pub fn forget(&self, key: u128) -> bool {
        lock(&self.shards[shard_of(key)]).entries.swap_remove(&key).is_some()
    }

    /// Decides at once: nothing here waits.
    pub fn decide(&self, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        // All shards of the request, each once, in one order for everybody: all or none without deadlock.
        let mut wanted = 0u64;
        for charge in charges {
            wanted |= 1 << shard_of(charge.key.local());
        }
        let mut shards = Locked { indices: wanted, guards: Vec::with_capacity(charges.len()) };
        for index in (0..SHARDS).filter(|index| wanted >> index & 1 == 1) {
            shards.guards.push(lock(&self.shards[index]));
        }
        // Read under the locks, so that decisions on one state happen in the order of their instants.
        let now = self.clock.now_us();
        decide(&mut shards, self.capacity, now, operation, charges)
    }
}

impl Store for MemoryStore {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        Ok(self.decide(operation, charges))
    }
}

struct Locked<'a> {
    indices: u64,
    guards: Vec<MutexGuard<'a, Shard>>,
}

impl Locked<'_> {
    fn shard(&mut self, key: u128) -> &mut Shard {
        let below = self.indices & ((1 << shard_of(key)) - 1);
        &mut self.guards[below.count_ones() as usize]
    }
}

fn shard_of(key: u128) -> usize {
    key as usize % SHARDS
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // A state is replaced as a whole: a panic elsewhere leaves none half-written.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rules of `lua/check.lua`.
fn decide(shards: &mut Locked<'_>, capacity: usize, now: u64, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
    let mut operation = operation;
    let mut granted = 1;
    let mut units = None;
    if operation == Operation::Take {
        let (_, steps) = ask(shards, now, Ask::Fit, false, Some(0), charges);
        let wanted = charges.first().map_or(0, |charge| charge.cost);
        let binding = charges.iter().zip(&steps).filter(|(charge, _)| !charge.mode.is_shadow());
        granted = binding.map(|(_, step)| step.free).fold(wanted, u64::min);
        // With nothing left, one unit is asked for, to learn when it will fit.
        units = Some(granted.max(wanted.min(1)));
        if wanted == 0 {
            operation = Operation::Peek;
        }
    }
    let how = match operation {
        Operation::Check | Operation::Peek | Operation::Take => Ask::Fit,
        Operation::Charge => Ask::Charge,
        Operation::Renew => Ask::Renew,
        Operation::Refund { charged_at } => Ask::Refund { charged_at, debt_before_us: 0 },
    };
    let (admitted, steps) = ask(shards, now, how, operation == Operation::Check, units, charges);
    let mut outcomes = Vec::with_capacity(steps.len());
    for (charge, step) in charges.iter().zip(steps) {
        let mut outcome = step.outcome;
        if operation == Operation::Peek || !admitted {
            (outcome.remaining, outcome.reset_us) = (step.free, step.free_reset_us);
        }
        if operation != Operation::Peek && (admitted || outcome.status != Status::Ok) {
            let key = charge.key.local();
            shards.shard(key).apply(key, step.change, charge.lease, now, capacity);
        }
        outcomes.push(outcome);
    }
    Verdict::new(if admitted { granted } else { 0 }, now, outcomes)
}

fn ask(
    shards: &mut Locked<'_>,
    now: u64,
    how: Ask,
    may_pay_later: bool,
    units: Option<u64>,
    charges: &[Charge<'_>],
) -> (bool, Vec<Step>) {
    let mut admitted = true;
    let mut steps = Vec::with_capacity(charges.len());
    for charge in charges {
        let key = charge.key.local();
        let state = shards.shard(key).entries.get(&key).filter(|entry| entry.expires_us > now);
        let post_paid = charge.mode.is_post_paid() && may_pay_later;
        let cost = if post_paid { 1 } else { units.unwrap_or(charge.cost) };
        let how = match how {
            Ask::Refund { charged_at, .. } => Ask::Refund { charged_at, debt_before_us: charge.debt_before_us },
            Ask::Fit | Ask::Charge | Ask::Renew => how,
        };
        let mut step = charge.rule.step(state.map(|entry| &entry.state), now, how, cost);
        if post_paid && step.outcome.status == Status::Ok {
            (step.outcome.remaining, step.outcome.reset_us) = (step.free, step.free_reset_us);
            step.change = Change::None;
        }
        admitted &= step.outcome.status == Status::Ok || charge.mode.is_shadow();
        steps.push(step);
    }
    (admitted, steps)
}

impl Shard {
    fn apply(&mut self, key: u128, change: Change, lease: u64, now: u64, capacity: usize) {
        match change {
            Change::None => {}
            Change::Empty => {
                self.entries.swap_remove(&key);
            }
            Change::Put(state, lives_us) => {
                self.make_room(key, now, capacity);
                self.entries.insert(key, Entry { state, expires_us: now + lives_us });
            }
            Change::Log(edit) => {
                if edit.remove.is_none() {
                    self.make_room(key, now, capacity);
                }
                let fresh = || Entry { state: State::Log(VecDeque::new()), expires_us: 0 };
                let entry = match edit.remove {
                    Some(_) => self.entries.get_mut(&key),
                    None => Some(self.entries.entry(key).or_insert_with(fresh)),
                };
                let Some(Entry { state: State::Log(log), expires_us }) = entry else { return };
                if *expires_us <= now && edit.remove.is_none() {
                    // What expired was not seen by the step either.
                    log.clear();
                }
                edit.apply(log);
                if edit.remove.is_none() {
                    *expires_us = now + edit.window;
                } else if log.is_empty() {
                    self.entries.swap_remove(&key);
                }
            }
            Change::Leases(edit) => {
                if let Action::Acquire | Action::Renew = edit.action {
                    self.make_room(key, now, capacity);
                    let fresh = Entry { state: State::Leases(Vec::new()), expires_us: 0 };
                    self.entries.entry(key).or_insert(fresh);
                }
                let Some(Entry { state: State::Leases(leases), expires_us }) = self.entries.get_mut(&key) else {
                    return;
                };
                edit.apply(leases, lease);
                if edit.action != Action::Release {
                    *expires_us = now + edit.lease;
                }
                if leases.is_empty() {
                    self.entries.swap_remove(&key);
                }
            }
        }
    }

    /// Sweeps a little on every insertion, and evicts what expires soonest when the shard is full.
    fn make_room(&mut self, key: u128, now: u64, capacity: usize) {
        if self.entries.contains_key(&key) {
            return;
        }
        for _ in 0..SWEEP {
            if self.cursor >= self.entries.len() {
                self.cursor = 0;
            }
            match self.entries.get_index(self.cursor) {
                Some((_, entry)) if entry.expires_us <= now => {
                    self.entries.swap_remove_index(self.cursor);
                }
                _ => self.cursor += 1,
            }
        }
        while self.entries.len() >= capacity {
            let soonest = (0..SAMPLE.min(self.entries.len()))
                .map(|step| (self.cursor + step * 7919) % self.entries.len())
                .min_by_key(|&index| self.entries.get_index(index).map(|(_, entry)| entry.expires_us));
            self.entries.swap_remove_index(soonest.unwrap_or(0));
            self.cursor += 1;
        }
    }
}
