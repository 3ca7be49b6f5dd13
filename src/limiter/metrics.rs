//! How one worker's checks were answered, and what the store took to answer.

use crate::metrics::{Counter, Histogram};

/// Who answered a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweredBy {
    /// The store, with a call of its own.
    Store,
    /// The store, with a call for several.
    Coalesced,
    /// Prefetched tokens.
    Prefetch,
    /// The denial cache.
    DenialCache,
}

/// What was counted.
#[derive(Debug, Default)]
pub struct LimiterMetrics {
    /// Checks, by [`Answered`].
    pub checks: Counter<4>,
    /// Calls that the store answered.
    pub round_trips: Histogram,
    /// Script calls, each for the checks of one round of a worker.
    pub calls: Counter<1>,
    /// Calls that it did not answer, and those that were not made since it fails.
    pub failures: Counter<2>,
}

impl AnsweredBy {
    /// All, in the order of their tally.
    pub const ALL: [AnsweredBy; 4] =
        [AnsweredBy::Store, AnsweredBy::Coalesced, AnsweredBy::Prefetch, AnsweredBy::DenialCache];

    /// One word for labels.
    pub fn label(self) -> &'static str {
        match self {
            AnsweredBy::Store => "store",
            AnsweredBy::Coalesced => "coalesced",
            AnsweredBy::Prefetch => "prefetch",
            AnsweredBy::DenialCache => "denial-cache",
        }
    }
}
