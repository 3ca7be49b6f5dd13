//! Composes the scripts of `lua/`: a frame and only the algorithms that a call uses.

use std::sync::OnceLock;

use aws_lc_rs::digest;
use redis::{ServerError, Value};

use crate::limiter::algorithm::token_bucket::TokenBucket;
use crate::limiter::algorithm::{AlgorithmKind, Outcome, Rule, Status};
use crate::limiter::verdict::{Charge, ChargeMode, Operation, Verdict};

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

// What a script is asked and what it answers, in bytes that neither side reads as text: the contract is in `lua/check.lua`.

/// Bytes of a number: a double, which holds all integers up to 2^53.
const NUMBER_BYTES: usize = 8;

/// Numbers that a reply has for each limit.
const NUMBERS_PER_LIMIT: usize = 5;

/// What is asked of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitArgs {
    kind: AlgorithmKind,
    mode: ChargeMode,
    cost: u64,
    parameters: [u64; 3],
    last_parameter: [u8; NUMBER_BYTES],
}

impl LimitArgs {
    /// Of this charge; calendar windows are reckoned for about `near_us`.
    pub fn from_charge(charge: &Charge<'_>, assumed_now_us: u64) -> Self {
        let (kind, [a, b, c, d]) = (charge.rule.kind(), charge.rule.script_arguments(assumed_now_us));
        let last_parameter = match kind {
            AlgorithmKind::Concurrency => charge.permit_id.to_le_bytes(),
            AlgorithmKind::TokenBucket => encode_number(charge.debt_before_us),
            _ => encode_number(d),
        };
        LimitArgs { kind, mode: charge.mode, cost: charge.cost, parameters: [a, b, c], last_parameter }
    }

    /// For the refund of this cost, where the charge had this outcome.
    pub fn for_refund(self, cost: u64, outcome: &Outcome) -> Self {
        let [burst, refill, parts] = self.parameters;
        let last_parameter = match self.kind {
            AlgorithmKind::TokenBucket => {
                encode_number(Rule::TokenBucket(TokenBucket { burst, refill, parts }).debt_before_us(outcome, 0, cost))
            }
            _ => self.last_parameter,
        };
        LimitArgs { cost, last_parameter, ..self }
    }

    /// What is charged.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether the cost is charged after the response.
    pub fn is_post_paid(&self) -> bool {
        self.mode.is_deferred()
    }
}

/// The frame that decides such requests at the least cost.
pub fn script_variant(operation: Operation, limits: &[LimitArgs]) -> ScriptVariant {
    let is_plain = limits.iter().all(|terms| terms.mode == ChargeMode::Enforced && ScriptVariant::supports(terms.kind));
    match (operation, limits) {
        (Operation::Check, _) if is_plain => ScriptVariant::for_checks(limits.len()),
        (Operation::TakeUpTo, [LimitArgs { cost: 1.., .. }]) if is_plain => ScriptVariant::Single,
        _ => ScriptVariant::Generic,
    }
}

/// The argument of a call, with room for so many groups and limits; `now_us` 0 = the server's time.
pub fn start_argument(now_us: u64, groups: usize, limits: usize) -> Vec<u8> {
    let mut argument = Vec::with_capacity(NUMBER_BYTES + 25 * groups + 42 * limits);
    argument.extend(encode_number(now_us));
    argument
}

/// Adds so many requests that differ in their keys only.
pub fn append_group(argument: &mut Vec<u8>, requests: usize, operation: Operation, limits: &[LimitArgs]) {
    let (letter, charged_at) = operation.script_arguments();
    argument.extend(encode_number(requests as u64));
    argument.extend(letter.bytes());
    argument.extend(encode_number(charged_at));
    argument.extend(encode_number(limits.len() as u64));
    for LimitArgs { kind, mode, cost, parameters, last_parameter } in limits {
        argument.extend(kind.letter().bytes().chain(mode.flag().bytes()));
        argument.extend(encode_number(*cost));
        for parameter in parameters {
            argument.extend(encode_number(*parameter));
        }
        argument.extend(last_parameter);
    }
}

fn encode_number(number: u64) -> [u8; NUMBER_BYTES] {
    (number as f64).to_le_bytes()
}

/// The reply to a call, request by request.
#[derive(Debug)]
pub struct ScriptReply {
    bytes: Vec<u8>,
    /// Of the requests that failed: how many limits come before, and why.
    failures: Vec<(usize, ServerError)>,
    /// Limits read so far.
    limits_read: usize,
}

impl ScriptReply {
    /// Reads a reply for so many limits, if it is one.
    pub fn new(reply: Value, limits: usize) -> Option<Self> {
        let mut parts = match reply {
            Value::Array(parts) => parts.into_iter(),
            bytes => vec![bytes].into_iter(),
        };
        let Some(Value::BulkString(bytes)) = parts.next() else { return None };
        let mut failures = Vec::new();
        while let Some(first_limit) = parts.next() {
            let (Value::Int(before), Some(Value::ServerError(error))) = (first_limit, parts.next()) else {
                return None;
            };
            failures.push((usize::try_from(before).ok()?, error));
        }
        (bytes.len() == NUMBER_BYTES * (1 + NUMBERS_PER_LIMIT * limits)).then_some(ScriptReply {
            bytes,
            failures,
            limits_read: 0,
        })
    }

    /// What it says to the next request, which has so many limits; none if that is no verdict.
    pub fn next_verdict(&mut self, limits: usize) -> Option<Result<Verdict, ServerError>> {
        let first = self.limits_read;
        self.limits_read += limits;
        if let Some(failed) = self.failures.iter().position(|(before, _)| *before == first) {
            return Some(Err(self.failures.swap_remove(failed).1));
        }
        let granted = decode_integer(self.number(1 + NUMBERS_PER_LIMIT * first))?;
        let outcomes = (first..self.limits_read).map(|limit| self.outcome(limit)).collect::<Option<_>>()?;
        Some(Ok(Verdict::new(granted, decode_integer(self.number(0))?, outcomes)))
    }

    fn outcome(&self, limit: usize) -> Option<Outcome> {
        let field = |field| self.number(1 + NUMBERS_PER_LIMIT * limit + field);
        let status = match decode_integer(field(1))? {
            0 => Status::Ok,
            1 => Status::Exceeded,
            2 => Status::CostTooLarge,
            3 => Status::Saturated,
            _ => return None,
        };
        // -1 stands for "never".
        let (remaining, reset_us, retry_us) =
            (decode_integer(field(2))?, decode_integer(field(3))?, decode_integer(field(4).max(0.0))?);
        Some(Outcome { status, remaining, reset_us, retry_us })
    }

    fn number(&self, index: usize) -> f64 {
        f64::from_le_bytes(self.bytes.as_chunks().0[index])
    }
}

/// A number that the arithmetic of the scripts may come to: what is no integer would have been rounded somewhere.
fn decode_integer(number: f64) -> Option<u64> {
    let whole = number as u64;
    (whole as f64 == number && whole <= 1 << 53).then_some(whole)
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
