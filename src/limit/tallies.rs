//! How one worker's checks were answered, and what the store took to answer.

use crate::tally::{Histogram, Counter};

/// Who answered a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// The store, with a call of its own.
    Alone,
    /// The store, with a call for several.
    Together,
    /// Units that were taken ahead.
    Ahead,
    /// The denial cache.
    Remembered,
}

/// What was counted.
#[derive(Debug, Default)]
pub struct Tallies {
    /// Checks, by [`Answered`].
    pub checks: Counter<4>,
    /// Calls that the store answered.
    pub round_trips: Histogram,
    /// Script calls, each for the checks of one round of a worker.
    pub calls: Counter<1>,
    /// Calls that it did not answer, and those that were not made since it fails.
    pub failures: Counter<2>,
}

impl Answered {
    /// All, in the order of their tally.
    pub const ALL: [Answered; 4] = [Answered::Alone, Answered::Together, Answered::Ahead, Answered::Remembered];

    /// One word for labels.
    pub fn word(self) -> &'static str {
        match self {
            Answered::Alone => "store",
            Answered::Together => "coalesced",
            Answered::Ahead => "prefetch",
            Answered::Remembered => "denial-cache",
        }
    }
}
