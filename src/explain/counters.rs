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
const PATIENCE: Duration = Duration::from_secs(2);

/// Whoever can look.
pub trait Counters {
    /// The sizes that operators gave single identities.
    fn overrides(&self) -> Option<Arc<OverrideTable>>;

    /// Where the identities of these checks stand.
    ///
    /// # Errors
    /// Why that cannot be seen.
    fn look(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, Unseen>;
}

/// Why it is not known where identities stand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unseen(pub String);

/// Nobody is asked.
impl Counters for Unseen {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        None
    }

    fn look(&self, _: &[LimitCheck<'_, '_>]) -> Result<Verdict, Unseen> {
        Err(self.clone())
    }
}

/// Overrides of the limits of a configuration; none as yet.
pub fn overrides_of(runtime: &CompiledConfig) -> Overrides {
    let limits = runtime.limits.iter().map(|(name, terms)| (name.clone(), terms.limit.clone()));
    let limits: BTreeMap<_, _> = limits.collect();
    Overrides::new(runtime.hasher.clone(), move |name| limits.get(name).cloned(), None)
}

/// The Redis of a configuration.
#[derive(Debug)]
pub struct Remote {
    reactor: Reactor,
    store: RedisStore,
    overrides: Overrides,
}

impl Remote {
    /// That of this configuration, which has one; what operators decided is read at once.
    ///
    /// # Errors
    /// No reactor.
    pub fn open(runtime: &CompiledConfig) -> io::Result<Option<Self>> {
        let Some((servers, settings)) = &runtime.store.redis else { return Ok(None) };
        let key = records::hash_key(&settings.prefix);
        let redis = (servers.clone(), RedisSettings { timeout: PATIENCE, ..settings.clone() });
        let reactor = Builder::new_current_thread().enable_all().build()?;
        let (store, overrides) = reactor.block_on(async {
            let store = RedisStore::new(&redis, Arc::default(), Arc::default(), Arc::default());
            let overrides = overrides_of(runtime);
            // A store that does not answer is spoken of where it is asked for counters.
            let _ = overrides.refresh(&store, &key).await;
            (store, overrides)
        });
        Ok(Some(Remote { reactor, store, overrides }))
    }
}

impl Counters for Remote {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.overrides.current()
    }

    fn look(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, Unseen> {
        // Of what is paid afterwards a unit must be there.
        let charge = |check| Charge { cost: LimitCheck::required(check), ..check.charge(DecidedBy::Store, 0) };
        let charges: Vec<_> = checks.iter().map(charge).collect();
        let answer = self.reactor.block_on(self.store.call(Operation::Peek, &charges));
        answer.map_err(|error| Unseen(error.to_string()))
    }
}
