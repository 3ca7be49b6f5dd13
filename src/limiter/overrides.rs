//! Quota overrides: temporary quotas that administrators set for single identities. All gateways share them through
//! Redis.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::clock::{LogThrottle, monotonic};
use crate::limiter::decision::LimitCheck;
use crate::limiter::denial_cache::DenialCache;
use crate::limiter::key::{Identity, IdentityHasher, Key};
use crate::limiter::quota::QuotaError;
use crate::limiter::redis::overrides::{KnownRevision, OverrideEntry, Snapshot, WriteStatus};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::limiter::store::RedisStore;
use crate::limiter::verdict::StoreError;

/// Maximum number of overrides. Each gateway reads all overrides every second.
pub const MAX_OVERRIDES: usize = 1000;

/// Interval for polling the overrides that other gateways have written.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Delay after a failed poll. The delay is shorter than [`POLL_INTERVAL`], so that the overrides are soon restored in a
/// store that has lost its data.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Maximum number of records in one restore call. Each call reads the whole hash, and blocks Redis during this time.
const MAX_RESTORE_BATCH: usize = 250;

/// Time within which a change on one gateway applies on all gateways: a polling interval and a margin for delays.
pub const MAX_PROPAGATION: Duration = Duration::from_secs(2);

/// Interval for logging that overrides cannot be read, restored or applied.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The stored value of an override.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverrideQuota {
    /// The quota in the syntax of the configuration.
    pub quota: String,
    /// Burst of a token bucket. Default: the count of the quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// Free text that the administrator has written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A temporary quota of one identity.
#[derive(Debug)]
pub struct Override {
    /// The limit to which the override applies.
    pub limit: Arc<LimitSpec>,
    /// The identity to which the override applies.
    pub identity: Identity,
    /// The quota as the administrator has written it.
    pub quota: OverrideQuota,
    /// The variant of the limit with this quota.
    pub variant: Arc<LimitVariant>,
    expires_at: Instant,
}

impl Override {
    /// Return the time until the override expires.
    pub fn ttl(&self) -> Duration {
        self.expires_at.saturating_duration_since(monotonic())
    }
}

/// The overrides in force, by limit and identity.
#[derive(Debug, Default)]
pub struct OverrideTable(HashMap<u128, Arc<Override>, RandomState>);

impl OverrideTable {
    /// Return the override of an identity for a limit.
    pub fn find(&self, limit: &LimitSpec, identity: Identity) -> Option<&Override> {
        let found = self.0.get(&table_key(limit, identity))?;
        (monotonic() < found.expires_at).then_some(found)
    }

    /// Replace the variants of checks whose identities have overrides.
    pub fn apply<'p>(&'p self, checks: &mut [LimitCheck<'_, 'p>]) {
        for check in checks {
            if let Some(entry) = self.find(check.limit, check.identity) {
                check.variant = &entry.variant;
            }
        }
    }

    /// Return all overrides in force.
    pub fn all(&self) -> Vec<Arc<Override>> {
        let now = monotonic();
        self.0.values().filter(|entry| now < entry.expires_at).cloned().collect()
    }
}

/// Looks up a limit of the configuration by name.
type LimitLookup = Box<dyn Fn(&str) -> Option<Arc<LimitSpec>> + Send + Sync>;

/// The overrides of a process.
pub struct Overrides {
    table: ArcSwap<OverrideTable>,
    hasher: IdentityHasher,
    find_limit: LimitLookup,
    denials: Option<Arc<DenialCache>>,
    /// For each field, the newest record that this process has read. Records are deleted at their `forget_at`. The
    /// mutex is also locked while a snapshot changes the table.
    known_entries: Mutex<HashMap<String, KnownEntry>>,
}

/// A record that this process has read.
#[derive(Debug, Clone)]
struct KnownEntry {
    entry: OverrideEntry,
    /// Time at which the override expires.
    expires_at: Instant,
    /// Time at which the record is deleted from this process.
    forget_at: Instant,
}

impl fmt::Debug for Overrides {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Overrides").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Overrides {
    /// Create an empty set of overrides. `denials` is the denial cache of the process.
    pub fn new(
        hasher: IdentityHasher,
        find_limit: impl Fn(&str) -> Option<Arc<LimitSpec>> + Send + Sync + 'static,
        denials: Option<Arc<DenialCache>>,
    ) -> Self {
        Overrides {
            table: ArcSwap::default(),
            hasher,
            find_limit: Box::new(find_limit),
            denials,
            known_entries: Mutex::default(),
        }
    }

    /// Return the overrides in force. The value is `None` if there are no overrides, which is the usual case.
    pub fn current(&self) -> Option<Arc<OverrideTable>> {
        let table = self.table.load();
        if table.0.is_empty() { None } else { Some(Arc::clone(&table)) }
    }

    /// Create an override that expires after `ttl`. This function neither applies the override nor sends it to other
    /// gateways.
    ///
    /// # Errors
    /// The quota is invalid, or the limit does not support it.
    pub fn compile(
        &self,
        limit: &Arc<LimitSpec>,
        identity: Identity,
        quota: OverrideQuota,
        ttl: Duration,
    ) -> Result<Override, QuotaError> {
        let parsed_quota = limit.default_variant.rule.parse_quota(&quota.quota)?;
        let variant = Arc::new(limit.override_variant(&self.hasher, parsed_quota, quota.burst)?);
        Ok(Override { limit: limit.clone(), identity, quota, variant, expires_at: monotonic() + ttl })
    }

    /// Apply an override in this process. Return `None` if the maximum of [`MAX_OVERRIDES`] other overrides is reached.
    pub fn put(&self, new: Override) -> Option<Arc<Override>> {
        let key = table_key(&new.limit, new.identity);
        let new = Arc::new(new);
        let mut has_room = true;
        self.table.rcu(|table| {
            let now = monotonic();
            let entries = table.0.iter().filter(|(of, entry)| **of != key && now < entry.expires_at);
            let mut kept: HashMap<_, _, RandomState> = entries.map(|(place, each)| (*place, each.clone())).collect();
            has_room = kept.len() < MAX_OVERRIDES;
            if has_room {
                kept.insert(key, new.clone());
            } else if let Some(old) = table.0.get(&key) {
                kept.insert(key, old.clone());
            }
            OverrideTable(kept)
        });
        has_room.then_some(new)
    }

    /// Remove an override in this process. Return whether the override existed.
    pub fn remove(&self, limit: &LimitSpec, identity: Identity) -> bool {
        let key = table_key(limit, identity);
        let mut removed = false;
        self.table.rcu(|table| {
            let kept = table.0.iter().filter(|(of, _)| **of != key);
            let kept: HashMap<_, _, RandomState> = kept.map(|(place, entry)| (*place, entry.clone())).collect();
            removed = kept.len() < table.0.len();
            OverrideTable(kept)
        });
        removed
    }

    /// Compile all overrides for the limits of a new configuration. An override that is not valid for its limit, or
    /// whose limit does not exist, ends in this process.
    pub fn recompile(&self) {
        self.table.rcu(|table| {
            let recompiled = table.0.values().filter_map(|entry| {
                let limit = (self.find_limit)(&entry.limit.name)?;
                let new = self.compile(&limit, entry.identity, entry.quota.clone(), entry.ttl());
                let new = new.inspect_err(log_invalid_override).ok()?;
                Some((table_key(&limit, entry.identity), Arc::new(Override { expires_at: entry.expires_at, ..new })))
            });
            OverrideTable(recompiled.collect())
        });
    }

    /// Once per second, read the override records that all gateways share. Continue until the future is dropped.
    pub async fn poll(&self, store: &RedisStore, key: &str) {
        static POLL_LOG_THROTTLE: LogThrottle = LogThrottle::new();
        loop {
            let result = self.refresh(store, key).await;
            if let Err(error) = &result {
                // Warn only about errors of the overrides hash, because rate limit checks already report all other
                // errors.
                let code = error.error_reply().map(|reply| reply.code()).filter(|code| HASH_ERRORS.contains(code));
                match code.filter(|_| POLL_LOG_THROTTLE.should_log(LOG_INTERVAL)) {
                    Some("NOPERM") => warn!(
                        %error,
                        "cannot read overrides: the Redis user lacks a permission; docs/how-to/redis.md lists the \
                         permissions"
                    ),
                    Some(_) => warn!(%error, key, "cannot read overrides: another program uses the key"),
                    None => debug!(%error, "cannot read overrides at the moment; retrying"),
                }
            }
            sleep(if result.is_ok() { POLL_INTERVAL } else { RETRY_INTERVAL }).await;
        }
    }

    /// Read the override records that all gateways share, and write back records that Redis has lost.
    ///
    /// # Errors
    /// See [`StoreError`]. Records that cannot be written back stay active in this process. This is not an error.
    pub async fn refresh(&self, store: &RedisStore, key: &str) -> Result<(), StoreError> {
        let asked_at = monotonic();
        let snapshot = store.read_overrides(key).await?;
        self.apply_snapshot(&snapshot, asked_at, true);
        let lost = self.lost_entries(&snapshot);
        if !lost.is_empty()
            && let Err(error) = self.write_back(store, key, &lost).await
        {
            static RESTORE_LOG_THROTTLE: LogThrottle = LogThrottle::new();
            if RESTORE_LOG_THROTTLE.should_log(LOG_INTERVAL) {
                warn!(%error, overrides = lost.len(), "cannot restore overrides that the store lost");
            }
        }
        Ok(())
    }

    /// Write back records that Redis has lost.
    async fn write_back(&self, store: &RedisStore, key: &str, lost: &[OverrideEntry]) -> Result<(), StoreError> {
        let mut written_count = 0;
        let mut dropped = 0;
        for lost in lost.chunks(MAX_RESTORE_BATCH) {
            let statuses = store.restore_overrides(key, lost, MAX_OVERRIDES).await?;
            let mut known = self.lock_entries();
            for (record, written) in lost.iter().zip(statuses) {
                match written {
                    WriteStatus::Written => written_count += 1,
                    WriteStatus::Unchanged => {}
                    WriteStatus::TooMany => {
                        dropped += 1;
                        if known.get(&record.key).is_some_and(|known| known.entry.revision == record.revision) {
                            known.remove(&record.key);
                        }
                    }
                }
            }
        }
        if written_count > 0 {
            info!(records = written_count, "restored overrides that the store lost");
        }
        if dropped > 0 {
            warn!(
                overrides = dropped,
                max = MAX_OVERRIDES,
                "too many overrides: some overrides that the store lost are not restored"
            );
        }
        Ok(())
    }

    fn lock_entries(&self) -> MutexGuard<'_, HashMap<String, KnownEntry>> {
        self.known_entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the newest revision of a field that this process knows.
    pub fn known_revision(&self, field: &str) -> KnownRevision {
        let now = monotonic();
        let entries = self.lock_entries();
        let entry = entries.get(field).filter(|known| now < known.forget_at);
        entry.map_or_else(KnownRevision::default, |KnownEntry { entry: record, expires_at: until, .. }| KnownRevision {
            revision: record.revision,
            keep_until_us: record.keep_until_us,
            is_in_force: now < *until,
        })
    }

    /// Return the records to write back: known records that the snapshot does not contain, or contains only with an
    /// older revision. The returned records expire no later than the known records, even if the clock of the store was
    /// set back.
    fn lost_entries(&self, snapshot: &Snapshot) -> Vec<OverrideEntry> {
        let now = monotonic();
        let stored: HashMap<_, _> = snapshot.entries.iter().map(|record| (&*record.key, record.revision)).collect();
        let is_lost = |record: &OverrideEntry| stored.get(&*record.key).is_none_or(|stored| *stored < record.revision);
        let earliest =
            |us: u64, end: Instant| us.min(snapshot.now_us + end.saturating_duration_since(now).as_micros() as u64);
        // Consider only records with a revision. If the field of a record without a revision is missing, Redis has not
        // lost the record: the field is deleted to remove the record.
        let known = self.lock_entries();
        let lost = known.values().filter(|known| known.entry.revision > 0 && is_lost(&known.entry));
        let lost = lost.map(|KnownEntry { entry: record, expires_at, forget_at }| OverrideEntry {
            expires_at_us: earliest(record.expires_at_us, *expires_at),
            keep_until_us: earliest(record.keep_until_us, *forget_at),
            ..record.clone()
        });
        lost.collect()
    }

    /// Apply the records of a snapshot, except records of which this process knows a newer revision. Times until expiry
    /// are counted from `asked_at`, the time at which the snapshot was requested. `is_complete` is true if the snapshot
    /// contains all fields of the hash.
    pub(super) fn apply_snapshot(&self, snapshot: &Snapshot, asked_at: Instant, is_complete: bool) {
        let now = monotonic();
        let mut known = self.lock_entries();
        // Forget records without a revision whose field is missing, because the field was removed.
        let stored: HashSet<_> = snapshot.entries.iter().map(|record| &*record.key).collect();
        let is_there = |field: &str| !is_complete || stored.contains(field);
        known.retain(|field, known| now < known.forget_at && (known.entry.revision > 0 || is_there(field)));
        let mut has_reset = false;
        for record in &snapshot.entries {
            match parse_field(&record.key) {
                Some((OVERRIDE_FIELD, ..)) => {}
                Some((subject, ..)) => {
                    has_reset |= subject == RESET_FIELD;
                    continue;
                }
                None => continue,
            }
            if known.get(&record.key).is_none_or(|known| known.entry.revision <= record.revision) {
                let at = |us: u64| asked_at + Duration::from_micros(us.saturating_sub(snapshot.now_us));
                let expires_at = at(record.expires_at_us);
                let forget_at = at(record.keep_until_us);
                known.insert(record.key.clone(), KnownEntry { entry: record.clone(), expires_at, forget_at });
            }
        }
        drop_oldest_removals(&mut known, now);
        self.rebuild_table(&known, now, has_reset);
    }

    /// Build the table from the known records. `has_reset` is true if an identity was reset, so that cached denials may
    /// be wrong.
    fn rebuild_table(&self, entries: &HashMap<String, KnownEntry>, now: Instant, has_reset: bool) {
        let old = self.table.load_full();
        let mut new = HashMap::default();
        for (field, KnownEntry { entry: record, expires_at, .. }) in
            entries.iter().filter(|(_, known)| now < known.expires_at)
        {
            let Some((_, limit, identity)) = parse_field(field) else { continue };
            // Ignore records of unknown limits, because another gateway may have different limits.
            let (Some(limit), Ok(quota)) =
                ((self.find_limit)(limit), serde_json::from_str::<OverrideQuota>(&record.value))
            else {
                continue;
            };
            let key = table_key(&limit, identity);
            let until = *expires_at;
            // An unchanged override keeps its variant, because cached denials and calls in flight refer to the id of
            // the variant.
            let same = old.0.get(&key).filter(|old| old.quota == quota && Arc::ptr_eq(&old.limit, &limit));
            let compiled = match same {
                Some(old) => Ok(Override { limit, identity, quota, variant: old.variant.clone(), expires_at: until }),
                None => {
                    self.compile(&limit, identity, quota, until - now).map(|new| Override { expires_at: until, ..new })
                }
            };
            match compiled {
                Ok(compiled) => drop(new.insert(key, Arc::new(compiled))),
                Err(error) => log_invalid_override(&error),
            }
        }
        let variant_ids = |table: &HashMap<u128, Arc<Override>, RandomState>| {
            table.iter().map(|(place, entry)| (*place, entry.variant.id)).collect::<HashMap<_, _>>()
        };
        let changed = variant_ids(&old.0) != variant_ids(&new);
        if changed || !new.is_empty() {
            self.table.store(Arc::new(OverrideTable(new)));
        }
        // Clear the denial cache after replacing the table: checks that start after the replacement use the new quotas.
        if (changed || has_reset)
            && let Some(denials) = &self.denials
        {
            denials.clear();
        }
    }
}

fn log_invalid_override(error: &QuotaError) {
    static OVERRIDE_LOG_THROTTLE: LogThrottle = LogThrottle::new();
    if OVERRIDE_LOG_THROTTLE.should_log(LOG_INTERVAL) {
        warn!(%error, "an override is not valid for its limit in this configuration");
    }
}

/// Keep only the newest [`MAX_OVERRIDES`] records of removed and expired overrides. `lua/overrides.lua` does the same
/// in Redis.
fn drop_oldest_removals(entries: &mut HashMap<String, KnownEntry>, now: Instant) {
    let removals = entries.values().filter(|known| known.expires_at <= now);
    let mut revisions: Vec<_> = removals.map(|known| known.entry.revision).collect();
    if revisions.len() > MAX_OVERRIDES {
        revisions.sort_unstable_by(|one, other| other.cmp(one));
        let oldest = revisions[MAX_OVERRIDES - 1];
        entries.retain(|_, known| now < known.expires_at || known.entry.revision >= oldest);
    }
}

/// Codes of the errors that occur only for the hash of overrides: the Redis user may not read it, or it is not a hash.
const HASH_ERRORS: [&str; 2] = ["NOPERM", "WRONGTYPE"];

const OVERRIDE_FIELD: &str = "size";
const RESET_FIELD: &str = "reset";

/// Return the hash field of an override.
pub fn override_field(limit: &LimitSpec, identity: Identity) -> String {
    format!("{OVERRIDE_FIELD}/{}/{identity}", limit.name)
}

/// Return the hash field that announces a reset to other gateways.
pub fn reset_field(limit: &LimitSpec, identity: Identity) -> String {
    format!("{RESET_FIELD}/{}/{identity}", limit.name)
}

fn parse_field(field: &str) -> Option<(&str, &str, Identity)> {
    let (subject, rest) = field.split_once('/')?;
    let (limit, identity) = rest.rsplit_once('/')?;
    Some((subject, limit, Identity::from_hex(identity)?))
}

/// Return the key of an identity's override in the table. The key does not depend on the override's quota.
fn table_key(limit: &LimitSpec, identity: Identity) -> u128 {
    Key { identity, state_name: &limit.default_variant.state_name }.local_hash()
}
