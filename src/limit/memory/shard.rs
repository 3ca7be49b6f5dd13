//! One part of the memory store: the states of each limit apart, so that one limit cannot evict those of another.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;

use indexmap::IndexMap;

use crate::limit::algorithm::concurrency::PermitAction;
use crate::limit::algorithm::{Change, State};
use crate::limit::key::Key;

/// Entries looked at for each one added: more than one, so that sweeping outruns growth.
const SWEPT_PER_INSERT: usize = 2;

/// Entries compared when room must be made; as in Redis' volatile-ttl, five find a good victim.
const EVICTION_SAMPLE: usize = 5;

/// Entries looked at for one that may be evicted, before a new identity is rejected.
const MAX_EVICTION_SEARCH: usize = 256;

/// Of 255: an identity that has used so much of its limit is evicted by others' guarantees only. Half: an identity that could reset
/// itself by evicting its own state gains less than that.
const NEAR_LIMIT: u8 = 128;

/// The states of all limits whose keys come to this part.
#[derive(Debug, Default)]
pub(super) struct Shard {
    limits: Vec<LimitStates>,
    entry_count: usize,
    /// The limit that is swept next.
    next_sweep: usize,
}

/// The states of one limit.
#[derive(Debug)]
struct LimitStates {
    limit_hash: u64,
    // std's hasher: with the published secret, identities choose the keys.
    entries: IndexMap<u128, Entry, RandomState>,
    cursor: usize,
}

#[derive(Debug)]
struct Entry {
    state: State,
    expires_at_us: u64,
    /// How much of the limit was used at the last change, of 255.
    used_share: u8,
}

/// What is written of a charge.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateWrite {
    /// The id of the lease.
    pub(super) permit_id: u64,
    /// The instant, µs.
    pub(super) now_us: u64,
    /// How much of the limit is used then, of 255.
    pub(super) used_share: u8,
}

/// What making room came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// There is room, after evicting so many states that had not expired.
    Available(u64),
    /// All that could give way are at or near their limit.
    Full,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.entry_count
    }

    /// The state of a key, unless it has expired.
    pub(super) fn state(&self, key: &Key<'_>, now: u64) -> Option<&State> {
        let states = self.limits.iter().find(|states| states.limit_hash == key.limit_hash())?;
        states.entries.get(&key.local_hash()).filter(|entry| entry.expires_at_us > now).map(|entry| &entry.state)
    }

    /// Drops a state; whether there was one.
    pub(super) fn remove(&mut self, key: u128) -> bool {
        let existed = self.limits.iter_mut().any(|states| states.entries.swap_remove(&key).is_some());
        self.entry_count -= usize::from(existed);
        existed
    }

    /// Sees that a change can be applied.
    pub(super) fn ensure_room(&mut self, key: &Key<'_>, change: &Change, now: u64, capacity: usize) -> Room {
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
            // Limits that nobody uses any more hold no room.
            self.next_sweep = (self.next_sweep + 1) % self.limits.len();
            self.sweep(self.next_sweep, now);
        }
        if self.entry_count < capacity {
            return Room::Available(0);
        }
        let limits = self.limits.len() + usize::from(limit_index.is_none());
        let guaranteed = (capacity / limits).max(1);
        if limit_index.is_none_or(|own| self.limits[own].entries.len() < guaranteed) {
            // Another limit has borrowed its room.
            let largest_limit = (0..self.limits.len()).max_by_key(|&index| self.limits[index].entries.len());
            let evicted = largest_limit.is_some_and(|largest| self.evict(largest, now, u8::MAX));
            return Room::Available(u64::from(evicted));
        }
        match limit_index.is_some_and(|own| self.evict(own, now, NEAR_LIMIT)) {
            true => Room::Available(1),
            false => Room::Full,
        }
    }

    /// Applies a change for which there is room.
    pub(super) fn apply(&mut self, key: &Key<'_>, change: Change, write: StateWrite) {
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

    /// Evicts the least used of some states of a limit, the one that expires first where they are alike; of those below `near`
    /// unless that is everything. Whether there was one.
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
        StateWrite { permit_id: lease, now_us: now, used_share: used }: StateWrite,
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
            Change::Permits(edit) => {
                if let PermitAction::Acquire | PermitAction::Renew = edit.action {
                    let fresh = Entry { state: State::Permits(Vec::new()), expires_at_us: 0, used_share: used };
                    self.entries.entry(key).or_insert(fresh);
                }
                let Some(entry) = self.entries.get_mut(&key) else { return };
                let Entry { state: State::Permits(leases), expires_at_us: expires_us, used_share: before } = entry
                else {
                    return;
                };
                *before = used;
                edit.apply(leases, lease);
                if edit.action != PermitAction::Release {
                    *expires_us = now + edit.ttl;
                }
                if leases.is_empty() {
                    self.entries.swap_remove(&key);
                }
            }
        }
    }
}
