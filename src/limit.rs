//! The limiter: decides whether a request may pass. Knows no HTTP.

pub mod algorithm;
pub mod calendar;
pub mod clock;
pub mod guard;
pub mod key;
pub mod memory;
pub mod quota;
pub mod redis;
pub mod store;

use std::sync::Arc;

use algorithm::fixed_window::{FixedWindow, Start};
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
    /// Decides and counts, but never denies, and tells callers nothing.
    pub shadow: bool,
}

impl Limit {
    /// The most that it admits in any window of its quota, however the requests come; for a token bucket the window is
    /// half open.
    pub fn most_in_any_window(&self) -> u64 {
        let count = self.quota.count;
        match &self.rule {
            Rule::TokenBucket(bucket) => bucket.burst + count - 1,
            // All of one window at its end, all of the next at its beginning.
            Rule::FixedWindow(FixedWindow { start: Start::Aligned { .. } | Start::Calendar(_), .. }) => 2 * count,
            // The same, but one request is needed to open the first window.
            Rule::FixedWindow(FixedWindow { start: Start::FirstRequest, .. }) | Rule::SlidingWindow(_) => 2 * count - 1,
            Rule::SlidingBuckets(_) | Rule::SlidingLog(_) => count,
        }
    }
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
    /// The instant of the decision, µs since the Unix epoch.
    pub now_us: u64,
    /// Each limit that had a say, with its answer.
    pub limits: Vec<(&'a Limit, Outcome)>,
    /// The shadow limits that would have denied the request.
    pub shadow_denied: Vec<&'a Limit>,
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
            let verdict = Verdict { granted: 1, now_us: 0, outcomes: Vec::new() };
            return Ok(decision(verdict, Source::Store, checks.iter()));
        }
        let charges: Vec<_> = checks.iter().map(|check| charge(check, &check.limit.rule)).collect();
        match &self.backend {
            Backend::Memory(store) => {
                Ok(decision(store.decide(Operation::Check, &charges), Source::Store, checks.iter()))
            }
            Backend::Redis { store, fallback } => match store.call(Operation::Check, &charges).await {
                Ok(verdict) => Ok(decision(verdict, Source::Store, checks.iter())),
                Err(error) => without_store(fallback, checks, error),
            },
        }
    }
}

fn charge<'a>(check: &Check<'a>, rule: &'a Rule) -> Charge<'a> {
    let key = Key { identity: check.identity, bucket: &check.limit.bucket };
    Charge { key, rule, cost: check.cost, mode: if check.limit.shadow { Mode::Shadow } else { Mode::Binding } }
}

fn decision<'a: 'b, 'b>(verdict: Verdict, source: Source, checks: impl Iterator<Item = &'b Check<'a>>) -> Decision<'a> {
    let Verdict { granted, now_us, outcomes } = verdict;
    let (mut limits, mut shadow_denied) = (Vec::with_capacity(outcomes.len()), Vec::new());
    for (check, outcome) in checks.zip(outcomes) {
        match (check.limit.shadow, outcome.status) {
            (false, _) => limits.push((check.limit, outcome)),
            (true, Status::Ok) => {}
            (true, Status::Over | Status::Never) => shadow_denied.push(check.limit),
        }
    }
    Decision { admitted: granted > 0, source, now_us, limits, shadow_denied }
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
    if checks.iter().any(|check| check.limit.on_store_error == OnStoreError::Deny && !check.limit.shadow) {
        return Err(Unavailable(error));
    }
    let local = |check: &&Check<'a>| check.limit.on_store_error == OnStoreError::Local;
    let charges: Vec<_> = checks.iter().filter(local).map(|check| charge(check, &check.limit.share)).collect();
    let verdict = fallback.decide(Operation::Check, &charges);
    Ok(decision(verdict, Source::Local, checks.iter().filter(local)))
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
