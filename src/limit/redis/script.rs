//! Composes the scripts of `lua/`: a frame and only the algorithms that a call uses.

use std::sync::OnceLock;

use aws_lc_rs::digest;

use crate::limit::algorithm::{Kind, Rule};

const ANY: &str = include_str!("../../../lua/check.lua");
const ONE: &str = include_str!("../../../lua/check_one.lua");
const FEW: &str = include_str!("../../../lua/check_few.lua");
/// Where the algorithms go.
const KINDS: &str = "--@kinds\n";
/// Most limits of a request that [`FEW`] is written out for: Lua 5.1 has 200 local variables.
const MOST_OF_FEW: usize = 4;

/// One file of `lua/` for each, in the order of their bits in a [`Parts`].
const FILES: [&str; 6] = [
    include_str!("../../../lua/token_bucket.lua"),
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/sliding_window.lua"),
    include_str!("../../../lua/sliding_buckets.lua"),
    include_str!("../../../lua/concurrency.lua"),
];

/// What the algorithms stand in: the more is known of the requests of a call, the less it costs to decide them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// Any requests.
    Any,
    /// Requests with one limit each, of kinds that [`count`](Frame::counts), which may take many units.
    One,
    /// Checks of at most so many limits each, of kinds that [`count`](Frame::counts). With one limit it is the script of [`One`](Frame::One).
    Few(usize),
}

impl Frame {
    /// All that there are.
    pub const ALL: [Frame; 5] = [Frame::Any, Frame::One, Frame::Few(2), Frame::Few(3), Frame::Few(MOST_OF_FEW)];

    /// Of checks with so many limits each, of kinds that [`count`](Frame::counts).
    pub fn of_checks(limits: usize) -> Self {
        if (1..=MOST_OF_FEW).contains(&limits) { Frame::Few(limits) } else { Frame::Any }
    }

    /// Of requests some of which need this one and some the other.
    pub fn and(self, other: Frame) -> Self {
        match (self, other) {
            (Frame::Few(most), Frame::Few(limits)) => Frame::Few(most.max(limits)),
            (Frame::One, Frame::One | Frame::Few(1)) | (Frame::Few(1), Frame::One) => Frame::One,
            _ => Frame::Any,
        }
    }

    /// Whether the state of a kind is three numbers, which is all that the frames for one and for few know. Calendar windows may
    /// have an error of their own, which they do not.
    pub fn counts(kind: Kind) -> bool {
        matches!(kind, Kind::TokenBucket | Kind::FixedWindow | Kind::FirstRequest | Kind::SlidingWindow)
    }

    fn place(self) -> usize {
        match self {
            Frame::Any => 0,
            Frame::One | Frame::Few(..2) => 1,
            Frame::Few(limits) => limits,
        }
    }

    fn text(self, kinds: &str) -> String {
        match self {
            Frame::Any => ANY.replacen(KINDS, kinds, 1),
            Frame::One | Frame::Few(..2) => ONE.replacen(KINDS, kinds, 1),
            Frame::Few(limits) => {
                let text = FEW.replacen(KINDS, kinds, 1).replace("@n", &limits.to_string());
                let mut parts = text.split("@[");
                let before = parts.next().unwrap_or_default().to_owned();
                parts.fold(before, |whole, part| {
                    let (block, rest) = part.split_once("]@").unwrap_or((part, ""));
                    let blocks: String = (1..=limits).map(|limit| block.replace('@', &limit.to_string())).collect();
                    whole + &blocks + rest
                })
            }
        }
    }
}

/// The set of algorithm files that a script needs.
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
pub fn script(frame: Frame, parts: Parts) -> &'static Script {
    const SETS: usize = 1 << FILES.len();
    static SCRIPTS: [[OnceLock<Script>; SETS]; Frame::ALL.len()] =
        [const { [const { OnceLock::new() }; SETS] }; Frame::ALL.len()];
    SCRIPTS[frame.place()][parts.0].get_or_init(|| {
        let kinds: String =
            FILES.iter().enumerate().filter(|(bit, _)| parts.0 >> bit & 1 == 1).map(|(_, file)| *file).collect();
        let text = frame.text(&kinds);
        // Redis names scripts by SHA-1; nothing is secured by it.
        let digest = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
        let sha = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Script { text, sha }
    })
}

#[cfg(test)]
mod tests {
    use super::Frame::{Any, Few, One};
    use super::*;

    #[test]
    fn a_frame_for_several_requests_knows_all_of_them() {
        let of = |frames: &[Frame]| frames.iter().copied().reduce(Frame::and).unwrap();
        assert_eq!(of(&[Few(1), One, Few(1)]), One);
        assert_eq!(of(&[Few(2), Few(1), Few(4), Few(3)]), Few(4));
        assert_eq!(of(&[Few(2), One]), Any, "what takes many units has one limit");
        assert_eq!(of(&[Any, Few(1)]), Any);
        assert_eq!((Frame::of_checks(0), Frame::of_checks(4), Frame::of_checks(5)), (Any, Few(4), Any));
    }

    #[test]
    fn every_frame_is_written_out() {
        let parts = Parts(11);
        for frame in Frame::ALL {
            let text = &script(frame, parts).text;
            assert!(!text.contains('@'), "{frame:?}: {text}");
        }
        let texts: std::collections::HashSet<_> = Frame::ALL.iter().map(|frame| &script(*frame, parts).sha).collect();
        assert_eq!(texts.len(), Frame::ALL.len());
    }
}
