//! Metrics of one worker's checks: the component that decided each check, and the duration of the store calls.

use crate::metrics::{Counter, Histogram};

/// The component that decided a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweredBy {
    /// The store, with a call for this check alone.
    Store,
    /// The store, with one call for several checks of the same states.
    Coalesced,
    /// Prefetched tokens.
    Prefetch,
    /// The denial cache.
    DenialCache,
}

/// Counters of a worker's checks and store calls.
#[derive(Debug, Default)]
pub struct LimiterMetrics {
    /// Checks, by [`AnsweredBy`].
    pub checks: Counter<4>,
    /// Duration of the calls with a reply from the store.
    pub round_trips: Histogram,
    /// Script calls, each with one batch of checks.
    pub calls: Counter<1>,
    /// Calls that failed, and calls that were not sent because the circuit breaker was open or the queue was full.
    pub failures: Counter<2>,
}

impl AnsweredBy {
    /// All variants, in the order of [`LimiterMetrics::checks`].
    pub const ALL: [AnsweredBy; 4] =
        [AnsweredBy::Store, AnsweredBy::Coalesced, AnsweredBy::Prefetch, AnsweredBy::DenialCache];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            AnsweredBy::Store => "store",
            AnsweredBy::Coalesced => "coalesced",
            AnsweredBy::Prefetch => "prefetch",
            AnsweredBy::DenialCache => "denial-cache",
        }
    }
}
