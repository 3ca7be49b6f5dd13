//! One part of the memory store: the states of each limit apart, so that one limit cannot evict those of another.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;

use indexmap::IndexMap;

use crate::limit::algorithm::concurrency::Action;
use crate::limit::algorithm::{Change, State};
use crate::limit::key::Key;

/// Entries looked at for each one added: more than one, so that sweeping outruns growth.
const SWEEP: usize = 2;

/// Entries compared when room must be made; as in Redis' volatile-ttl, five find a good victim.
const SAMPLE: usize = 5;

/// Entries looked at for one that may be evicted, before a new identity is rejected.
const SEARCH: usize = 256;

/// Of 255: an identity that has used so much of its limit is evicted by others' guarantees only. Half: an identity that could reset
/// itself by evicting its own state gains less than that.
const NEAR: u8 = 128;

/// The states of all limits whose keys come to this part.
#[derive(Debug, Default)]
pub(super) struct Shard {
    limits: Vec<States>,
    len: usize,
    /// The limit that is swept next.
    next: usize,
}

/// The states of one limit.
#[derive(Debug)]
struct States {
    limit: u64,
    // std's hasher: with the published secret, identities choose the keys.
    entries: IndexMap<u128, Entry, RandomState>,
    cursor: usize,
}

#[derive(Debug)]
struct Entry {
    state: State,
    expires_us: u64,
    /// How much of the limit was used at the last change, of 255.
    used: u8,
}

/// What is written of a charge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writing {
    /// The id of the lease.
    pub(super) lease: u64,
    /// The instant, µs.
    pub(super) now: u64,
    /// How much of the limit is used then, of 255.
    pub(super) used: u8,
}

/// What making room came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// There is room, after evicting so many states that had not expired.
    Made(u64),
    /// All that could give way are at or near their limit.
    Full,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The state of a key, unless it has expired.
    pub(super) fn state(&self, key: &Key<'_>, now: u64) -> Option<&State> {
        let states = self.limits.iter().find(|states| states.limit == key.limit())?;
        states.entries.get(&key.local()).filter(|entry| entry.expires_us > now).map(|entry| &entry.state)
    }

    /// Drops a state; whether there was one.
    pub(super) fn forget(&mut self, key: u128) -> bool {
        let was = self.limits.iter_mut().any(|states| states.entries.swap_remove(&key).is_some());
        self.len -= usize::from(was);
        was
    }

    /// Sees that a change can be applied.
    pub(super) fn make_room(&mut self, key: &Key<'_>, change: &Change, now: u64, capacity: usize) -> Room {
        let adds = match change {
            Change::None | Change::Empty => false,
            Change::Put(..) => true,
            Change::Log(edit) => edit.remove.is_none(),
            Change::Leases(edit) => matches!(edit.action, Action::Acquire | Action::Renew),
        };
        let own = self.place(key.limit());
        if !adds || own.is_some_and(|own| self.limits[own].entries.contains_key(&key.local())) {
            return Room::Made(0);
        }
        if let Some(own) = own {
            self.sweep(own, now);
        }
        if !self.limits.is_empty() {
            // Limits that nobody uses any more hold no room.
            self.next = (self.next + 1) % self.limits.len();
            self.sweep(self.next, now);
        }
        if self.len < capacity {
            return Room::Made(0);
        }
        let limits = self.limits.len() + usize::from(own.is_none());
        let guaranteed = (capacity / limits).max(1);
        if own.is_none_or(|own| self.limits[own].entries.len() < guaranteed) {
            // Another limit has borrowed its room.
            let largest = (0..self.limits.len()).max_by_key(|&index| self.limits[index].entries.len());
            let evicted = largest.is_some_and(|largest| self.evict(largest, now, u8::MAX));
            return Room::Made(u64::from(evicted));
        }
        match own.is_some_and(|own| self.evict(own, now, NEAR)) {
            true => Room::Made(1),
            false => Room::Full,
        }
    }

    /// Applies a change for which there is room.
    pub(super) fn apply(&mut self, key: &Key<'_>, change: Change, writing: Writing) {
        if change == Change::None {
            return;
        }
        let place = self.place(key.limit()).unwrap_or_else(|| {
            self.limits.push(States { limit: key.limit(), entries: IndexMap::default(), cursor: 0 });
            self.limits.len() - 1
        });
        let states = &mut self.limits[place];
        let before = states.entries.len();
        states.apply(key.local(), change, writing);
        let after = states.entries.len();
        self.len = self.len + after - before;
        if after == 0 {
            self.limits.swap_remove(place);
        }
    }

    fn place(&self, limit: u64) -> Option<usize> {
        self.limits.iter().position(|states| states.limit == limit)
    }

    fn sweep(&mut self, index: usize, now: u64) {
        let states = &mut self.limits[index];
        let before = states.entries.len();
        for _ in 0..SWEEP {
            if states.cursor >= states.entries.len() {
                states.cursor = 0;
            }
            match states.entries.get_index(states.cursor) {
                Some((_, entry)) if entry.expires_us <= now => {
                    states.entries.swap_remove_index(states.cursor);
                }
                _ => states.cursor += 1,
            }
        }
        self.len -= before - states.entries.len();
    }

    /// Evicts the least used of some states of a limit, the one that expires first where they are alike; of those below `near`
    /// unless that is everything. Whether there was one.
    fn evict(&mut self, index: usize, now: u64, near: u8) -> bool {
        let States { entries, cursor, .. } = &mut self.limits[index];
        let len = entries.len();
        let rank = |index: usize| {
            let used = |entry: &Entry| if entry.expires_us <= now { 0 } else { entry.used };
            entries.get_index(index).map_or((u8::MAX, u64::MAX), |(_, entry)| (used(entry), entry.expires_us))
        };
        let may_go = |index: &usize| near == u8::MAX || rank(*index).0 < near;
        let sampled = (0..SAMPLE.min(len)).map(|step| (*cursor + step * 7919) % len).min_by_key(|&index| rank(index));
        let victim = sampled
            .filter(may_go)
            .or_else(|| (0..SEARCH.min(len)).map(|step| (*cursor + step) % len).find(|index| may_go(index)));
        let found = victim.is_some_and(|victim| entries.swap_remove_index(victim).is_some());
        *cursor += if found { 1 } else { SEARCH };
        self.len -= usize::from(found);
        found
    }
}

impl States {
    fn apply(&mut self, key: u128, change: Change, Writing { lease, now, used }: Writing) {
        match change {
            Change::None => {}
            Change::Empty => {
                self.entries.swap_remove(&key);
            }
            Change::Put(state, lives_us) => {
                self.entries.insert(key, Entry { state, expires_us: now + lives_us, used });
            }
            Change::Log(edit) => {
                let fresh = || Entry { state: State::Log(VecDeque::new()), expires_us: 0, used };
                let entry = match edit.remove {
                    Some(_) => self.entries.get_mut(&key),
                    None => Some(self.entries.entry(key).or_insert_with(fresh)),
                };
                let Some(Entry { state: State::Log(log), expires_us, used: before }) = entry else { return };
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
            Change::Leases(edit) => {
                if let Action::Acquire | Action::Renew = edit.action {
                    let fresh = Entry { state: State::Leases(Vec::new()), expires_us: 0, used };
                    self.entries.entry(key).or_insert(fresh);
                }
                let Some(entry) = self.entries.get_mut(&key) else { return };
                let Entry { state: State::Leases(leases), expires_us, used: before } = entry else { return };
                *before = used;
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
}
