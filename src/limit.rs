//! The limiter: decides whether a request may pass. Knows no HTTP.

pub mod algorithm;
pub mod clock;
pub mod guard;
pub mod key;
pub mod memory;
pub mod quota;
pub mod redis;
pub mod store;

use std::sync::Arc;

use algorithm::{Outcome, Rule, Status};
use guard::Guard;
use key::{Bucket, Identity, Key};
use memory::MemoryStore;
use quota::Quota;
use store::{Charge, Mode, Operation, Store, StoreError, Verdict};
use tracing::warn;

/// A named rule: how much, and what happens when the store fails.
#[derive(Debug)]
pub struct Limit {
    /// The name that the configuration gives it.
    pub name: Box<str>,
    /// As written: what callers are told.
    pub quota: Quota,
    /// What decides.
    pub rule: Rule,
    /// What decides in this process alone while the store is down: this gateway's share.
    pub share: Rule,
    /// Its part of the keys.
    pub bucket: Bucket,
    /// What happens to requests while the store cannot answer.
    pub on_store_error: OnStoreError,
}

/// What a limit does while the store cannot answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStoreError {
    /// This gateway alone enforces its share of the limit.
    Local,
    /// The limit is not enforced.
    Allow,
    /// Requests are refused with 503.
    Deny,
}

/// One limit asked about one identity.
#[derive(Debug)]
pub struct Check<'a> {
    /// The limit.
    pub limit: &'a Limit,
    /// Whose units.
    pub identity: Identity,
    /// How many.
    pub cost: u64,
}

/// What becomes of a request.
#[derive(Debug)]
pub struct Decision<'a> {
    /// Whether it may pass.
    pub admitted: bool,
    /// Who decided.
    pub source: Source,
    /// Each limit that had a say, with its answer.
    pub limits: Vec<(&'a Limit, Outcome)>,
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The store, for all gateways.
    Store,
    /// This gateway alone, because the store could not answer.
    Local,
}

impl Source {
    /// One word for logs.
    pub fn word(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::Local => "local",
        }
    }
}

/// The store could not answer and a limit of the request says `deny`.
#[derive(Debug, thiserror::Error)]
#[error("the limits cannot be checked: {0}")]
pub struct Unavailable(#[source] pub StoreError);

/// Where the counters of this worker live.
#[derive(Debug)]
pub enum Backend {
    /// In this process.
    Memory(Arc<MemoryStore>),
    /// In Redis, with this process' counters for the time when it fails.
    Redis {
        /// The store.
        store: Guard,
        /// The local shares.
        fallback: Arc<MemoryStore>,
    },
}

/// Decides requests; one for each worker.
#[derive(Debug)]
pub struct Limiter {
    backend: Backend,
}

impl Limiter {
    /// A limiter over a store.
    pub fn new(backend: Backend) -> Self {
        Limiter { backend }
    }

    /// Decides all checks of a request at one instant: all are charged or none.
    ///
    /// # Errors
    /// The store cannot answer, and a limit of the request is to deny then.
    pub async fn check<'a>(&self, checks: &[Check<'a>]) -> Result<Decision<'a>, Unavailable> {
        if checks.is_empty() {
            return Ok(Decision { admitted: true, source: Source::Store, limits: Vec::new() });
        }
        let charges: Vec<_> = checks.iter().map(|check| charge(check, &check.limit.rule)).collect();
        match &self.backend {
            Backend::Memory(store) => Ok(decision(store.decide(Operation::Check, &charges), Source::Store, checks)),
            Backend::Redis { store, fallback } => match store.call(Operation::Check, &charges).await {
                Ok(verdict) => Ok(decision(verdict, Source::Store, checks)),
                Err(error) => without_store(fallback, checks, error),
            },
        }
    }
}

fn charge<'a>(check: &Check<'a>, rule: &'a Rule) -> Charge<'a> {
    let key = Key { identity: check.identity, bucket: &check.limit.bucket };
    Charge { key, rule, cost: check.cost, mode: Mode::Binding }
}

fn decision<'a>(verdict: Verdict, source: Source, checks: &[Check<'a>]) -> Decision<'a> {
    let limits = checks.iter().map(|check| check.limit).zip(verdict.outcomes).collect();
    Decision { admitted: verdict.granted > 0, source, limits }
}

/// One limit that says deny decides for all; otherwise those that say local decide by their shares.
fn without_store<'a>(
    fallback: &MemoryStore,
    checks: &[Check<'a>],
    error: StoreError,
) -> Result<Decision<'a>, Unavailable> {
    if let StoreError::Refused(_) | StoreError::Malformed = &error {
        // The breaker does not speak of these: they concern one key, or a right that is missing.
        let limits: Vec<_> = checks.iter().map(|check| &*check.limit.name).collect();
        warn!(%error, ?limits, "the store refused a check");
    }
    if checks.iter().any(|check| check.limit.on_store_error == OnStoreError::Deny) {
        return Err(Unavailable(error));
    }
    let local = |check: &&Check<'a>| check.limit.on_store_error == OnStoreError::Local;
    let charges: Vec<_> = checks.iter().filter(local).map(|check| charge(check, &check.limit.share)).collect();
    let verdict = fallback.decide(Operation::Check, &charges);
    let limits = checks.iter().filter(local).map(|check| check.limit).zip(verdict.outcomes).collect();
    Ok(Decision { admitted: verdict.granted > 0, source: Source::Local, limits })
}

impl<'a> Decision<'a> {
    /// The limits that deny the request.
    pub fn violated(&self) -> impl Iterator<Item = &(&'a Limit, Outcome)> {
        self.limits.iter().filter(|(_, outcome)| outcome.status != Status::Ok)
    }

    /// µs until the same request would pass; none if it never will.
    pub fn retry_us(&self) -> Option<u64> {
        let over = |outcome: &Outcome| (outcome.status == Status::Over).then_some(outcome.retry_us);
        self.violated().map(|(_, outcome)| over(outcome)).try_fold(0, |longest, retry| Some(longest.max(retry?)))
    }
}
