//! Composes the scripts of `lua/`: a frame and only the algorithms that a call uses.

use std::sync::OnceLock;

use aws_lc_rs::digest;

use crate::limit::algorithm::{AlgorithmKind, Rule};

const GENERIC: &str = include_str!("../../../lua/check.lua");
const SINGLE: &str = include_str!("../../../lua/check_one.lua");
const SMALL: &str = include_str!("../../../lua/check_few.lua");
/// Where the algorithms go.
const ALGORITHMS_MARK: &str = "--@kinds\n";
/// Most limits of a request that [`FEW`] is written out for: Lua 5.1 has 200 local variables.
const MAX_SMALL_LIMITS: usize = 4;

/// One file of `lua/` for each, in the order of their bits in a [`Parts`].
const ALGORITHMS: [&str; 6] = [
    include_str!("../../../lua/token_bucket.lua"),
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/sliding_window.lua"),
    include_str!("../../../lua/sliding_buckets.lua"),
    include_str!("../../../lua/concurrency.lua"),
];

/// What the algorithms stand in: the more is known of the requests of a call, the less it costs to decide them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScriptVariant {
    /// Any requests.
    Generic,
    /// Requests with one limit each, of kinds that [`count`](Frame::counts), which may take many units.
    Single,
    /// Checks of at most so many limits each, of kinds that [`count`](Frame::counts). With one limit it is the script of [`One`](Frame::One).
    Small(usize),
}

impl ScriptVariant {
    /// All that there are.
    pub const ALL: [ScriptVariant; 5] = [
        ScriptVariant::Generic,
        ScriptVariant::Single,
        ScriptVariant::Small(2),
        ScriptVariant::Small(3),
        ScriptVariant::Small(MAX_SMALL_LIMITS),
    ];

    /// Of checks with so many limits each, of kinds that [`count`](Frame::counts).
    pub fn for_checks(limits: usize) -> Self {
        if (1..=MAX_SMALL_LIMITS).contains(&limits) { ScriptVariant::Small(limits) } else { ScriptVariant::Generic }
    }

    /// Of requests some of which need this one and some the other.
    pub fn union(self, other: ScriptVariant) -> Self {
        match (self, other) {
            (ScriptVariant::Small(one), ScriptVariant::Small(limits)) => ScriptVariant::Small(one.max(limits)),
            (ScriptVariant::Single, ScriptVariant::Single | ScriptVariant::Small(1))
            | (ScriptVariant::Small(1), ScriptVariant::Single) => ScriptVariant::Single,
            _ => ScriptVariant::Generic,
        }
    }

    /// Whether the state of a kind is three numbers, which is all that the frames for one and for few know. Calendar windows may
    /// have an error of their own, which they do not.
    pub fn supports(kind: AlgorithmKind) -> bool {
        matches!(
            kind,
            AlgorithmKind::TokenBucket
                | AlgorithmKind::FixedWindow
                | AlgorithmKind::FirstRequest
                | AlgorithmKind::SlidingWindow
        )
    }

    fn index(self) -> usize {
        match self {
            ScriptVariant::Generic => 0,
            ScriptVariant::Single | ScriptVariant::Small(..2) => 1,
            ScriptVariant::Small(limits) => limits,
        }
    }

    fn source(self, algorithms: &str) -> String {
        match self {
            ScriptVariant::Generic => GENERIC.replacen(ALGORITHMS_MARK, algorithms, 1),
            ScriptVariant::Single | ScriptVariant::Small(..2) => SINGLE.replacen(ALGORITHMS_MARK, algorithms, 1),
            ScriptVariant::Small(limits) => {
                let text = SMALL.replacen(ALGORITHMS_MARK, algorithms, 1).replace("@n", &limits.to_string());
                let mut parts = text.split("@[");
                let before = parts.next().unwrap_or_default().to_owned();
                parts.fold(before, |source, part| {
                    let (block, rest) = part.split_once("]@").unwrap_or((part, ""));
                    let blocks: String = (1..=limits).map(|limit| block.replace('@', &limit.to_string())).collect();
                    source + &blocks + rest
                })
            }
        }
    }
}

/// The set of algorithm files that a script needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AlgorithmSet(usize);

impl AlgorithmSet {
    /// What any call for these rules needs.
    pub fn for_rules<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        AlgorithmSet(rules.into_iter().fold(0, |parts, rule| {
            parts
                | match rule.kind() {
                    AlgorithmKind::TokenBucket => 1,
                    AlgorithmKind::FixedWindow | AlgorithmKind::FirstRequest | AlgorithmKind::Calendar => 2,
                    AlgorithmKind::SlidingLog => 4,
                    AlgorithmKind::SlidingWindow => 8,
                    AlgorithmKind::SlidingBuckets => 16,
                    AlgorithmKind::Concurrency => 32,
                }
        }))
    }

    /// The same, and what these need.
    pub fn union(self, others: AlgorithmSet) -> Self {
        AlgorithmSet(self.0 | others.0)
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
    pub source: String,
    /// What `EVALSHA` takes: SHA-1 in lower-case hex.
    pub sha: String,
}

/// The script for a set of algorithms, composed once per process.
pub fn script(variant: ScriptVariant, parts: AlgorithmSet) -> &'static Script {
    const SETS: usize = 1 << ALGORITHMS.len();
    static SCRIPTS: [[OnceLock<Script>; SETS]; ScriptVariant::ALL.len()] =
        [const { [const { OnceLock::new() }; SETS] }; ScriptVariant::ALL.len()];
    SCRIPTS[variant.index()][parts.0].get_or_init(|| {
        let algorithms: String =
            ALGORITHMS.iter().enumerate().filter(|(bit, _)| parts.0 >> bit & 1 == 1).map(|(_, file)| *file).collect();
        let source = variant.source(&algorithms);
        // Redis names scripts by SHA-1; nothing is secured by it.
        let digest = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, source.as_bytes());
        let sha = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Script { source, sha }
    })
}

#[cfg(test)]
mod tests {
    use super::ScriptVariant::{Generic, Single, Small};
    use super::*;

    #[test]
    fn script_variant_union_supports_all_requests() {
        let of = |frames: &[ScriptVariant]| frames.iter().copied().reduce(ScriptVariant::union).unwrap();
        assert_eq!(of(&[Small(1), Single, Small(1)]), Single);
        assert_eq!(of(&[Small(2), Small(1), Small(4), Small(3)]), Small(4));
        assert_eq!(of(&[Small(2), Single]), Generic, "what takes many units has one limit");
        assert_eq!(of(&[Generic, Small(1)]), Generic);
        assert_eq!(
            (ScriptVariant::for_checks(0), ScriptVariant::for_checks(4), ScriptVariant::for_checks(5)),
            (Generic, Small(4), Generic)
        );
    }

    #[test]
    fn script_variants_have_no_template_marks() {
        let parts = AlgorithmSet(11);
        for frame in ScriptVariant::ALL {
            let text = &script(frame, parts).source;
            assert!(!text.contains('@'), "{frame:?}: {text}");
        }
        let texts: std::collections::HashSet<_> =
            ScriptVariant::ALL.iter().map(|frame| &script(*frame, parts).sha).collect();
        assert_eq!(texts.len(), ScriptVariant::ALL.len());
    }
}
