//! The embedded store: the default, the fallback in an outage, and the model that the scripts are tested against.

mod shard;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::warn;

use super::algorithm::{Change, Status, Step, StepKind};
use super::clock::{Clock, LogThrottle};
use super::store::{Charge, CounterStore, Operation, StoreError, Verdict};
use shard::{Room, Shard, StateWrite};

/// Enough that two workers rarely meet in one; a power of two.
const SHARDS: usize = 64;

/// A limit whose states do not fit is logged once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Counters in this process, bounded in number.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Vec<Mutex<Shard>>,
    capacity: usize,
    clock: Clock,
    evicted: AtomicU64,
    rejected: AtomicU64,
}

impl MemoryStore {
    /// A store for about `identities` states of all limits together. When it is full, each limit that has states is guaranteed an
    /// equal part, and within a limit the state that has used least of it gives way.
    pub fn new(max_states: usize, clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let capacity = max_states.div_ceil(SHARDS).max(1);
        MemoryStore { shards, capacity, clock, evicted: AtomicU64::new(0), rejected: AtomicU64::new(0) }
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
    pub fn remove(&self, key: u128) -> bool {
        lock(&self.shards[shard_of(key)]).remove(key)
    }

    /// States that were evicted before they expired, and identities that were not counted for want of room.
    pub fn evictions_and_rejections(&self) -> [u64; 2] {
        [&self.evicted, &self.rejected].map(|count| count.load(Ordering::Relaxed))
    }

    /// Decides at once: nothing here waits.
    pub fn decide(&self, operation: Operation, charges: &[Charge<'_>]) -> Verdict {
        // All shards of the request, each once, in one order for everybody: all or none without deadlock.
        let mut shard_bits = 0u64;
        for charge in charges {
            shard_bits |= 1 << shard_of(charge.key.local_hash());
        }
        let mut locked = LockedShards { shard_bits, guards: Vec::with_capacity(charges.len()) };
        for index in (0..SHARDS).filter(|index| shard_bits >> index & 1 == 1) {
            locked.guards.push(lock(&self.shards[index]));
        }
        // Read under the locks, so that decisions on one state happen in the order of their instants.
        let now = self.clock.now_us();
        decide_locked(self, &mut locked, now, operation, charges)
    }

    /// Sees that the states of these charges have room; the bits of those that have none.
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

impl CounterStore for MemoryStore {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        Ok(self.decide(operation, charges))
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
    // A state is replaced as a whole: a panic elsewhere leaves none half-written.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rules of `lua/check.lua`.
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
        // With nothing left, one unit is asked for, to learn when it will fit.
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
    // All or nothing: where a check has no room for one limit, none is charged. Others are about requests that were admitted.
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

/// How much of a limit is used when so much remains, of 255.
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
