//! Composes the scripts of `lua/`: a frame and only the algorithms that a call uses.

use std::sync::OnceLock;

use aws_lc_rs::digest;

use crate::limit::algorithm::{Kind, Rule};

/// For every call, and for the commonest ones: checks with one limit each.
const FRAMES: [&str; 2] = [include_str!("../../../lua/check.lua"), include_str!("../../../lua/check_one.lua")];
const MARK: &str = "--@kinds\n";

/// One file of `lua/` for each, in the order of their bits in a [`Parts`].
const FILES: [&str; 6] = [
    include_str!("../../../lua/token_bucket.lua"),
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/sliding_window.lua"),
    include_str!("../../../lua/sliding_buckets.lua"),
    include_str!("../../../lua/concurrency.lua"),
];

/// The bit of a [`Parts`] that stands for the second frame.
const ONE: usize = 1 << FILES.len();

/// The frame and the set of algorithm files that a script needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parts(usize);

impl Parts {
    /// What any call for these rules needs.
    pub fn of<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        Parts(rules.into_iter().fold(0, |parts, rule| {
            parts
                | match rule.kind() {
                    Kind::TokenBucket => 1,
                    Kind::FixedWindow | Kind::FirstRequest | Kind::Calendar => 2,
                    Kind::SlidingLog => 4,
                    Kind::SlidingWindow => 8,
                    Kind::SlidingBuckets => 16,
                    Kind::Concurrency => 32,
                }
        }))
    }

    /// The same, and what these need.
    pub fn and(self, others: Parts) -> Self {
        Parts(self.0 | others.0)
    }

    /// The same in the frame for checks with one limit each, of kinds that [`counts`](Parts::counts).
    pub fn for_one(self) -> Self {
        Parts(self.0 | ONE)
    }

    /// Whether the state of a kind is three numbers, which is all that the frame for one limit knows. Calendar windows may have an
    /// error of their own, which it does not.
    pub fn counts(kind: Kind) -> bool {
        matches!(kind, Kind::TokenBucket | Kind::FixedWindow | Kind::FirstRequest | Kind::SlidingWindow)
    }

    /// Whether nothing is needed.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A composed script.
#[derive(Debug)]
pub struct Script {
    /// What `EVAL` and `SCRIPT LOAD` take.
    pub text: String,
    /// What `EVALSHA` takes: SHA-1 in lower-case hex.
    pub sha: String,
}

/// The script for a set of algorithms, composed once per process.
pub fn script(parts: Parts) -> &'static Script {
    static SCRIPTS: [OnceLock<Script>; 2 * ONE] = [const { OnceLock::new() }; 2 * ONE];
    SCRIPTS[parts.0].get_or_init(|| {
        let kinds: String =
            FILES.iter().enumerate().filter(|(bit, _)| parts.0 >> bit & 1 == 1).map(|(_, file)| *file).collect();
        let text = FRAMES[parts.0 / ONE].replacen(MARK, &kinds, 1);
        // Redis names scripts by SHA-1; nothing is secured by it.
        let digest = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
        let sha = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Script { text, sha }
    })
}
