//! The embedded store: the default, the fallback in an outage, and the model that the scripts are tested against.

mod shard;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::warn;

use super::algorithm::{Ask, Change, Status, Step};
use super::clock::{Clock, Seldom};
use super::store::{Charge, Operation, Store, StoreError, Verdict};
use shard::{Room, Shard, Writing};

/// Enough that two workers rarely meet in one; a power of two.
const SHARDS: usize = 64;

/// A limit whose states do not fit is logged once in this time.
const SAID: Duration = Duration::from_secs(10);

/// Counters in this process, bounded in number.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Vec<Mutex<Shard>>,
    capacity: usize,
    clock: Clock,
    evicted: AtomicU64,
    refused: AtomicU64,
}

impl MemoryStore {
    /// A store for about `identities` states of all limits together. When it is full, each limit that has states is guaranteed an
    /// equal part, and within a limit the state that has used least of it gives way.
    pub fn new(identities: usize, clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let capacity = identities.div_ceil(SHARDS).max(1);
        MemoryStore { shards, capacity, clock, evicted: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    /// States held, expired ones included.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops a state; whether there was one.
    pub fn forget(&self, key: u128) -> bool {
        lock(&self.shards[shard_of(key)]).forget(key)
    }

    /// States that were evicted before they expired, and identities that were not counted for want of room.
    pub fn shortages(&self) -> [u64; 2] {
        [&self.evicted, &self.refused].map(|count| count.load(Ordering::Relaxed))
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
        decide(self, &mut shards, now, operation, charges)
    }

    /// Sees that the states of these charges have room; the bits of those that have none.
    fn make_room(&self, shards: &mut Locked<'_>, now: u64, charges: &[Charge<'_>], steps: &[Step]) -> u64 {
        let mut full = 0;
        for (index, (charge, step)) in charges.iter().zip(steps).enumerate() {
            if step.outcome.status != Status::Ok {
                continue;
            }
            match shards.shard(charge.key.local()).make_room(&charge.key, &step.change, now, self.capacity) {
                Room::Made(0) => continue,
                Room::Made(evicted) => {
                    self.evicted.fetch_add(evicted, Ordering::Relaxed);
                }
                Room::Full => {
                    full |= 1 << index.min(63);
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            static SEEN: Seldom = Seldom::new();
            if SEEN.unsaid_for(SAID) {
                let (limit, [evicted, refused]) = (charge.key.bucket.limit(), self.shortages());
                warn!(
                    limit,
                    evicted,
                    rejected = refused,
                    "store.max_memory_states is too small for the identities of a limit"
                );
            }
        }
        full
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
fn decide(
    store: &MemoryStore,
    shards: &mut Locked<'_>,
    now: u64,
    operation: Operation,
    charges: &[Charge<'_>],
) -> Verdict {
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
    let writes = admitted && operation != Operation::Peek;
    let full = if writes { store.make_room(shards, now, charges, &steps) } else { 0 };
    // All or nothing: where a check has no room for one limit, none is charged. Others are about requests that were admitted.
    let is_check = matches!(operation, Operation::Check | Operation::Take);
    let admitted = admitted && !(is_check && full > 0);
    let mut outcomes = Vec::with_capacity(steps.len());
    for (index, (charge, step)) in charges.iter().zip(steps).enumerate() {
        let mut outcome = step.outcome;
        if operation == Operation::Peek || !admitted {
            (outcome.remaining, outcome.reset_us) = (step.free, step.free_reset_us);
        }
        let fits = full >> index.min(63) & 1 == 0;
        if operation != Operation::Peek && (admitted && fits || outcome.status != Status::Ok) {
            let used = used(charge, step.outcome.remaining);
            let writing = Writing { lease: charge.lease, now, used };
            shards.shard(charge.key.local()).apply(&charge.key, step.change, writing);
        }
        outcomes.push(outcome);
    }
    Verdict { full: if is_check { full } else { 0 }, ..Verdict::new(if admitted { granted } else { 0 }, now, outcomes) }
}

/// How much of a limit is used when so much remains, of 255.
fn used(charge: &Charge<'_>, remaining: u64) -> u8 {
    let capacity = u128::from(charge.rule.capacity().max(1));
    let left = u128::from(remaining) * 255 / capacity;
    255 - u8::try_from(left).unwrap_or(u8::MAX)
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
        let state = shards.shard(charge.key.local()).state(&charge.key, now);
        let post_paid = charge.mode.is_post_paid() && may_pay_later;
        let cost = if post_paid { 1 } else { units.unwrap_or(charge.cost) };
        let how = match how {
            Ask::Refund { charged_at, .. } => Ask::Refund { charged_at, debt_before_us: charge.debt_before_us },
            Ask::Fit | Ask::Charge | Ask::Renew => how,
        };
        let mut step = charge.rule.step(state, now, how, cost);
        if post_paid && step.outcome.status == Status::Ok {
            (step.outcome.remaining, step.outcome.reset_us) = (step.free, step.free_reset_us);
            step.change = Change::None;
        }
        admitted &= step.outcome.status == Status::Ok || charge.mode.is_shadow();
        steps.push(step);
    }
    (admitted, steps)
}
