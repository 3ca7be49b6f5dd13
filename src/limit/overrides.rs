//! Sizes that operators give single identities for a time: in force in this process, and followed as all gateways share them.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, sleep};
use tracing::{debug, info, warn};

use super::backend::Shared;
use super::clock::{Seldom, monotonic};
use super::decision::Check;
use super::denials::Denials;
use super::key::{Identity, IdentityHasher, Key};
use super::plan::{Limit, Plan};
use super::quota::QuotaError;
use super::redis::records::{self, Record, Snapshot, Written, restored};
use super::redis::slots::slot_of;
use super::store::StoreError;

/// So many there may be at a time: each gateway reads all of them each second.
pub const MOST: usize = 1000;

/// How often it is looked what other gateways were told.
const POLL: Duration = Duration::from_secs(1);

/// Pause after a read that failed. Shorter than [`POLL`], so that a store that lost its data gets the overrides back soon.
const RETRY: Duration = Duration::from_millis(250);

/// Records of one restore call: each call reads the whole hash and blocks Redis for it.
const RESTORED_AT_ONCE: usize = 250;

/// What is decided on one gateway is in force on all within this time: a poll, and what may come between.
pub const EVERYWHERE: Duration = Duration::from_secs(2);

/// That they cannot be read is logged once in this time.
const SAID: Duration = Duration::from_secs(60);

/// What an override says, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// In the form of the configuration.
    pub quota: String,
    /// Of a token bucket; none = as much as the quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// Whatever the operator wants to remember of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A size that an identity has for a time.
#[derive(Debug)]
pub struct Override {
    /// Of which limit.
    pub limit: Arc<Limit>,
    /// Whose.
    pub identity: Identity,
    /// As it was given.
    pub size: Size,
    /// The same, ready to decide.
    pub plan: Arc<Plan>,
    until: Instant,
}

impl Override {
    /// How long it is still in force.
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(monotonic())
    }
}

/// Those in force, by limit and identity.
#[derive(Debug, Default)]
pub struct Table(HashMap<u128, Arc<Override>, RandomState>);

impl Table {
    /// The override that an identity has of a limit.
    pub fn find(&self, limit: &Limit, identity: Identity) -> Option<&Override> {
        let found = self.0.get(&place(limit, identity))?;
        (monotonic() < found.until).then_some(found)
    }

    /// Gives the checks of identities that have one its size.
    pub fn apply<'p>(&'p self, checks: &mut [Check<'_, 'p>]) {
        for check in checks {
            if let Some(other) = self.find(check.limit, check.identity) {
                check.plan = &other.plan;
            }
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Override>> {
        let now = monotonic();
        self.0.values().filter(|each| now < each.until).cloned().collect()
    }
}

/// Finds a limit of the configuration by its name.
type Find = Box<dyn Fn(&str) -> Option<Arc<Limit>> + Send + Sync>;

/// The overrides of a process.
pub struct Overrides {
    table: ArcSwap<Table>,
    hasher: IdentityHasher,
    limits: Find,
    denials: Option<Arc<Denials>>,
    /// The newest record of each field that this process has seen, until it is no longer kept. Held while the table changes.
    known: Mutex<HashMap<String, Known>>,
}

/// A record that this process has seen.
#[derive(Debug, Clone)]
struct Known {
    record: Record,
    /// When it expires.
    until: Instant,
    /// When it is forgotten.
    kept: Instant,
}

impl fmt::Debug for Overrides {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Overrides").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Overrides {
    /// None as yet. `denials` are those of the process.
    pub fn new(
        hasher: IdentityHasher,
        limits: impl Fn(&str) -> Option<Arc<Limit>> + Send + Sync + 'static,
        denials: Option<Arc<Denials>>,
    ) -> Self {
        let (table, known) = Default::default();
        Overrides { table, hasher, limits: Box::new(limits), denials, known }
    }

    /// Those in force now; none if there are none, as mostly.
    pub fn current(&self) -> Option<Arc<Table>> {
        let table = self.table.load();
        if table.0.is_empty() { None } else { Some(Arc::clone(&table)) }
    }

    /// A size in force from now on, for this time; it is not told to anybody else.
    ///
    /// # Errors
    /// The limit cannot have this size.
    pub fn compile(
        &self,
        limit: &Arc<Limit>,
        identity: Identity,
        size: Size,
        lasts: Duration,
    ) -> Result<Override, QuotaError> {
        let quota = limit.standard.rule.read_quota(&size.quota)?;
        let plan = Arc::new(limit.overridden(&self.hasher, quota, size.burst)?);
        Ok(Override { limit: limit.clone(), identity, size, plan, until: monotonic() + lasts })
    }

    /// Puts an override in force in this process; none if there are too many.
    pub fn put(&self, new: Override) -> Option<Arc<Override>> {
        let (place, new, mut room) = (place(&new.limit, new.identity), Arc::new(new), true);
        self.table.rcu(|table| {
            let now = monotonic();
            let kept = table.0.iter().filter(|(of, each)| **of != place && now < each.until);
            let mut kept: HashMap<_, _, RandomState> = kept.map(|(place, each)| (*place, each.clone())).collect();
            room = kept.len() < MOST;
            if room {
                kept.insert(place, new.clone());
            } else if let Some(old) = table.0.get(&place) {
                kept.insert(place, old.clone());
            }
            Table(kept)
        });
        room.then_some(new)
    }

    /// Ends an override in this process; whether there was one.
    pub fn remove(&self, limit: &Limit, identity: Identity) -> bool {
        let (place, mut found) = (place(limit, identity), false);
        self.table.rcu(|table| {
            let kept = table.0.iter().filter(|(of, _)| **of != place);
            let kept: HashMap<_, _, RandomState> = kept.map(|(place, each)| (*place, each.clone())).collect();
            found = kept.len() < table.0.len();
            Table(kept)
        });
        found
    }

    /// Poll the records that all gateways share, until the future is dropped.
    pub async fn follow(&self, store: &Shared, key: &str) {
        static FAILED: Seldom = Seldom::new();
        loop {
            let read = self.refresh(store, key).await;
            if let Err(error) = &read {
                // Rate limit checks report every other error.
                if is_of_the_hash(error) && FAILED.unsaid_for(SAID) {
                    warn!(%error, "overrides are not followed; docs/redis.md has the rights that the gateway needs");
                } else {
                    debug!(%error, "overrides are not followed just now");
                }
            }
            sleep(if read.is_ok() { POLL } else { RETRY }).await;
        }
    }

    /// Read the records that all gateways share, and write back those that Redis lost.
    ///
    /// # Errors
    /// See [`StoreError`]. Records that cannot be written back stay in force in this process and are no error.
    pub async fn refresh(&self, store: &Shared, key: &str) -> Result<(), StoreError> {
        let asked = monotonic();
        let slot = slot_of(key.as_bytes());
        let time = store.aside(slot, &records::time()).await?;
        let all = store.aside(slot, &records::all(key)).await?;
        let snapshot = records::read(time, all)?;
        self.take_over(&snapshot, asked, true);
        let lost = self.lost(&snapshot);
        if !lost.is_empty()
            && let Err(error) = self.restore(store, key, &lost).await
        {
            static FAILED: Seldom = Seldom::new();
            if FAILED.unsaid_for(SAID) {
                warn!(%error, overrides = lost.len(), "overrides that the store lost cannot be written back");
            }
        }
        Ok(())
    }

    /// Write records back that Redis lost.
    async fn restore(&self, store: &Shared, key: &str, lost: &[Record]) -> Result<(), StoreError> {
        let (mut done, mut dropped) = (0, 0);
        for lost in lost.chunks(RESTORED_AT_ONCE) {
            let reply = store.aside(slot_of(key.as_bytes()), &records::restore(key, lost, MOST)).await?;
            let mut known = self.known();
            for (record, written) in lost.iter().zip(restored(reply)?) {
                match written {
                    Written::Done => done += 1,
                    Written::Nothing => {}
                    Written::TooMany => {
                        dropped += 1;
                        if known.get(&record.field).is_some_and(|known| known.record.revision == record.revision) {
                            known.remove(&record.field);
                        }
                    }
                }
            }
        }
        if done > 0 {
            info!(records = done, "overrides that the store lost are written back");
        }
        if dropped > 0 {
            warn!(overrides = dropped, max = MOST, "too many overrides: some that the store lost are dropped");
        }
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this process knows of a field.
    pub fn knows(&self, field: &str) -> records::Known {
        let now = monotonic();
        let known = self.known();
        let found = known.get(field).filter(|known| now < known.kept);
        found.map_or_else(records::Known::default, |Known { record, until, .. }| records::Known {
            revision: record.revision,
            kept_us: record.kept_us,
            in_force: now < *until,
        })
    }

    /// Records that this process knows and that a snapshot lacks or has in an older revision, as they are written back:
    /// they expire no later than before, even if the clock of the store was set back.
    fn lost(&self, snapshot: &Snapshot) -> Vec<Record> {
        let now = monotonic();
        let stored: HashMap<_, _> = snapshot.records.iter().map(|record| (&*record.field, record.revision)).collect();
        let is_lost = |record: &Record| stored.get(&*record.field).is_none_or(|stored| *stored < record.revision);
        let earliest =
            |us: u64, end: Instant| us.min(snapshot.now_us + end.saturating_duration_since(now).as_micros() as u64);
        // Without a revision, a removal deletes the field: it is not lost.
        let known = self.known();
        let lost = known.values().filter(|known| known.record.revision > 0 && is_lost(&known.record));
        let lost = lost.map(|Known { record, until, kept }| Record {
            expiry_us: earliest(record.expiry_us, *until),
            kept_us: earliest(record.kept_us, *kept),
            ..record.clone()
        });
        lost.collect()
    }

    /// Put the records of a snapshot in force, except those of which this process knows a newer revision. The time left of
    /// each counts from `asked`. `complete`: the snapshot has all fields of the hash.
    pub(super) fn take_over(&self, snapshot: &Snapshot, asked: Instant, complete: bool) {
        let now = monotonic();
        let mut known = self.known();
        // Without a revision, a field that is missing was removed.
        let stored: HashSet<_> = snapshot.records.iter().map(|record| &*record.field).collect();
        let is_there = |field: &str| !complete || stored.contains(field);
        known.retain(|field, known| now < known.kept && (known.record.revision > 0 || is_there(field)));
        let mut reset = false;
        for record in &snapshot.records {
            match read_field(&record.field) {
                Some((SIZE, ..)) => {}
                Some((about, ..)) => {
                    reset |= about == RESET;
                    continue;
                }
                None => continue,
            }
            if known.get(&record.field).is_none_or(|known| known.record.revision <= record.revision) {
                let at = |us: u64| asked + Duration::from_micros(us.saturating_sub(snapshot.now_us));
                let (until, kept) = (at(record.expiry_us), at(record.kept_us));
                known.insert(record.field.clone(), Known { record: record.clone(), until, kept });
            }
        }
        forget_oldest_removals(&mut known, now);
        self.replace(&known, now, reset);
    }

    /// Build the table from the known records. `reset`: denials that are remembered may no longer hold.
    fn replace(&self, known: &HashMap<String, Known>, now: Instant, reset: bool) {
        let (old, mut new) = (self.table.load_full(), HashMap::default());
        for (field, Known { record, until, .. }) in known.iter().filter(|(_, known)| now < known.until) {
            let Some((_, limit, identity)) = read_field(field) else { continue };
            // Another gateway may have other limits.
            let (Some(limit), Ok(size)) = ((self.limits)(limit), serde_json::from_str::<Size>(&record.text)) else {
                continue;
            };
            let (place, until) = (place(&limit, identity), *until);
            // The same as before keeps its plan, which is what denials and calls under way go by.
            let same = old.0.get(&place).filter(|old| old.size == size && Arc::ptr_eq(&old.limit, &limit));
            let compiled = match same {
                Some(old) => Ok(Override { limit, identity, size, plan: old.plan.clone(), until }),
                None => self.compile(&limit, identity, size, until - now).map(|new| Override { until, ..new }),
            };
            match compiled {
                Ok(compiled) => drop(new.insert(place, Arc::new(compiled))),
                Err(error) => {
                    static SAID_OF_SIZE: Seldom = Seldom::new();
                    if SAID_OF_SIZE.unsaid_for(SAID) {
                        warn!(%error, "an override does not fit its limit in this configuration");
                    }
                }
            }
        }
        let plans = |table: &HashMap<u128, Arc<Override>, RandomState>| {
            table.iter().map(|(place, each)| (*place, each.plan.id)).collect::<HashMap<_, _>>()
        };
        let changed = plans(&old.0) != plans(&new);
        if changed || !new.is_empty() {
            self.table.store(Arc::new(Table(new)));
        }
        // After the table: what is denied from now on is denied by the new sizes.
        if (changed || reset)
            && let Some(denials) = &self.denials
        {
            denials.forget();
        }
    }
}

/// Keep the newest [`MOST`] records of removed and expired overrides, as the script does.
fn forget_oldest_removals(known: &mut HashMap<String, Known>, now: Instant) {
    let removed = known.values().filter(|known| known.until <= now);
    let mut revisions: Vec<_> = removed.map(|known| known.record.revision).collect();
    if revisions.len() > MOST {
        revisions.sort_unstable_by(|one, other| other.cmp(one));
        let oldest = revisions[MOST - 1];
        known.retain(|_, known| now < known.until || known.record.revision >= oldest);
    }
}

/// Whether the hash cannot be read, while decisions can be made.
fn is_of_the_hash(error: &StoreError) -> bool {
    error.reply().and_then(|reply| reply.code()).is_some_and(|code| ["NOPERM", "WRONGTYPE"].contains(&code))
}

const SIZE: &str = "size";
const RESET: &str = "reset";

/// The field of an override.
pub fn size_field(limit: &Limit, identity: Identity) -> String {
    format!("{SIZE}/{}/{identity}", limit.name)
}

/// The field that tells the others of a reset.
pub fn reset_field(limit: &Limit, identity: Identity) -> String {
    format!("{RESET}/{}/{identity}", limit.name)
}

fn read_field(field: &str) -> Option<(&str, &str, Identity)> {
    let (about, rest) = field.split_once('/')?;
    let (limit, identity) = rest.rsplit_once('/')?;
    Some((about, limit, Identity::from_hex(identity)?))
}

/// Where the override of an identity stands in the table, whatever its window.
fn place(limit: &Limit, identity: Identity) -> u128 {
    Key { identity, bucket: &limit.standard.bucket }.local()
}
