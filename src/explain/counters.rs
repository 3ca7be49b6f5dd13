//! Where identities stand: looked up in Redis, without a charge.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime as Reactor};
use tokio::time::Duration;

use crate::limit::backend::{DecidedBy, RedisStore};
use crate::limit::decision::LimitCheck;
use crate::limit::overrides::{OverrideTable, Overrides};
use crate::limit::redis::{RedisSettings, records};
use crate::limit::store::{Charge, Operation, Verdict};
use crate::runtime::CompiledConfig;

/// It is asked once, and by a person: the bound of a decision would be too narrow.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

/// Whoever can look.
pub trait Counters {
    /// The sizes that operators gave single identities.
    fn overrides(&self) -> Option<Arc<OverrideTable>>;

    /// Where the identities of these checks stand.
    ///
    /// # Errors
    /// Why that cannot be seen.
    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable>;
}

/// Why it is not known where identities stand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CountersUnavailable(pub String);

/// Nobody is asked.
impl Counters for CountersUnavailable {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        None
    }

    fn peek(&self, _: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        Err(self.clone())
    }
}

/// Overrides of the limits of a configuration; none as yet.
pub fn empty_overrides(config: &CompiledConfig) -> Overrides {
    let limits = config.limits.iter().map(|(name, compiled)| (name.clone(), compiled.limit.clone()));
    let limits: BTreeMap<_, _> = limits.collect();
    Overrides::new(config.hasher.clone(), move |name| limits.get(name).cloned(), None)
}

/// The Redis of a configuration.
#[derive(Debug)]
pub struct RedisCounters {
    tokio_runtime: Reactor,
    store: RedisStore,
    overrides: Overrides,
}

impl RedisCounters {
    /// That of this configuration, which has one; what operators decided is read at once.
    ///
    /// # Errors
    /// No reactor.
    pub fn open(config: &CompiledConfig) -> io::Result<Option<Self>> {
        let Some((servers, settings)) = &config.store.redis else { return Ok(None) };
        let key = records::hash_key(&settings.prefix);
        let redis = (servers.clone(), RedisSettings { timeout: LOOKUP_TIMEOUT, ..settings.clone() });
        let tokio_runtime = Builder::new_current_thread().enable_all().build()?;
        let (store, overrides) = tokio_runtime.block_on(async {
            let store = RedisStore::new(&redis, Arc::default(), Arc::default(), Arc::default());
            let overrides = empty_overrides(config);
            // A store that does not answer is spoken of where it is asked for counters.
            let _ = overrides.refresh(&store, &key).await;
            (store, overrides)
        });
        Ok(Some(RedisCounters { tokio_runtime, store, overrides }))
    }
}

impl Counters for RedisCounters {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.overrides.current()
    }

    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        // Of what is paid afterwards a unit must be there.
        let charge = |check| Charge { cost: LimitCheck::required(check), ..check.charge(DecidedBy::Store, 0) };
        let charges: Vec<_> = checks.iter().map(charge).collect();
        let result = self.tokio_runtime.block_on(self.store.call(Operation::Peek, &charges));
        result.map_err(|error| CountersUnavailable(error.to_string()))
    }
}
