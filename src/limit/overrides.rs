//! Sizes that operators give single identities for a time: in force in this process, and followed as all gateways share them.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::{Duration, sleep};
use tracing::{debug, warn};

use super::backend::Shared;
use super::clock::{Seldom, monotonic};
use super::decision::Check;
use super::denials::Denials;
use super::key::{Identity, IdentityHasher, Key};
use super::plan::{Limit, Plan};
use super::quota::QuotaError;
use super::redis::records::{self, Record};
use super::redis::slots::slot_of;
use super::store::StoreError;

/// So many there may be at a time: each gateway reads all of them each second.
pub const MOST: usize = 1000;

/// How often it is looked what other gateways were told.
const POLL: Duration = Duration::from_secs(1);

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
    /// Who reads takes over what he read before the next one reads: nobody puts back what was there before.
    reading: Mutex<()>,
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
        let (table, reading) = Default::default();
        Overrides { table, hasher, limits: Box::new(limits), denials, reading }
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

    /// Follows what all gateways share, until it is dropped.
    pub async fn follow(&self, store: &Shared, key: &str) {
        static FAILED: Seldom = Seldom::new();
        loop {
            if let Err(error) = self.refresh(store, key).await {
                // Anything else is said by those who need the store.
                if is_of_the_hash(&error) && FAILED.unsaid_for(SAID) {
                    warn!(%error, "overrides are not followed; docs/redis.md has the rights that the gateway needs");
                } else {
                    debug!(%error, "overrides are not followed just now");
                }
            }
            sleep(POLL).await;
        }
    }

    /// Takes over what all gateways share now.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn refresh(&self, store: &Shared, key: &str) -> Result<(), StoreError> {
        let _reading = self.reading.lock().await;
        let asked = monotonic();
        let slot = slot_of(key.as_bytes());
        let time = store.aside(slot, &records::time()).await?;
        let all = store.aside(slot, &records::all(key)).await?;
        self.replace(records::read(time, all)?, asked);
        Ok(())
    }

    /// Puts these in force in the place of what was. The time left of each is counted from `asked`.
    fn replace(&self, records: Vec<Record>, asked: Instant) {
        let (old, mut new, mut reset) = (self.table.load_full(), HashMap::default(), false);
        for Record { field, says, left } in records {
            let Some((about, limit, identity)) = read_field(&field) else { continue };
            if about == RESET {
                reset = true;
                continue;
            }
            // Another gateway may have other limits.
            let (Some(limit), Ok(size)) = ((self.limits)(limit), serde_json::from_str::<Size>(&says)) else { continue };
            let place = place(&limit, identity);
            let until = asked + left;
            // The same as before keeps its plan, which is what denials and calls under way go by.
            let same = old.0.get(&place).filter(|old| old.size == size && Arc::ptr_eq(&old.limit, &limit));
            let compiled = match same {
                Some(old) => Ok(Override { limit, identity, size, plan: old.plan.clone(), until }),
                None => self.compile(&limit, identity, size, left).map(|new| Override { until, ..new }),
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
