//! Composes the Lua scripts from the files in `lua/`, encodes their arguments and decodes their replies.
//!
//! A driver reads the arguments, performs the checks and writes the states. The algorithms are branches of an `if` in
//! the driver. The composer knows the following markers, each alone on a line:
//!
//! - `--@body` in an algorithm file: the lines after the marker are the branch. The declarations before the marker name
//!   the variables of the driver that the branch uses. They are not part of the composed script.
//! - `--@algorithms` in a driver: the composer inserts a branch for each algorithm. In `small.lua`, the variables of a
//!   branch that belong to a limit get the suffix `_1`.
//! - `--@states` in a driver: the composer inserts the lines of `states.lua` after its marker `--@body`.
//! - `--@each limit` and `--@end` in `small.lua`: the composer repeats the lines between the markers for each limit,
//!   and replaces the suffix `_1` with the number of the limit.
//! - `--@NAME` and `--@end NAME`: the lines between the markers are only in some scripts (see [`Block`]).
//!
//! `lua/generated/` contains the composed scripts with all algorithms, for review.

use std::sync::OnceLock;

use aws_lc_rs::digest;
use data_encoding::HEXLOWER;
use redis::{ServerError, Value};

use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::algorithm::sliding_window::SlidingWindow;
use crate::limiter::algorithm::token_bucket::TokenBucket;
use crate::limiter::algorithm::{AlgorithmKind, Outcome, Rule, State, Status, Step, StepKind};
use crate::limiter::key::Key;
use crate::limiter::redis::StateLayout;
use crate::limiter::usage::UsageDay;
use crate::limiter::verdict::{Charge, ChargeMode, Operation, Verdict};

const GENERIC: &str = include_str!("../../../lua/generic.lua");
const SINGLE: &str = include_str!("../../../lua/single.lua");
const SMALL: &str = include_str!("../../../lua/small.lua");
const STATES: &str = include_str!("../../../lua/states.lua");

const ALGORITHMS_MARKER: &str = "--@algorithms";
const STATES_MARKER: &str = "--@states";
const BODY_MARKER: &str = "--@body\n";
const REPEAT_MARKER: &str = "--@each limit";
const REPEAT_END_MARKER: &str = "--@end";

/// Maximum number of limits of a request in the small driver, which has a reply format for each number of limits. The
/// script has a copy of the algorithms for each limit. With eight limits, the script would exceed the maximum of 200
/// local variables in Lua 5.1.
const MAX_SMALL_LIMITS: usize = 4;

/// An algorithm file, and the kinds of algorithms that it implements.
struct Algorithm {
    kinds: &'static [AlgorithmKind],
    source: &'static str,
}

/// The algorithm files, in the order of their bits in an [`AlgorithmSet`].
const ALGORITHMS: [Algorithm; 6] = [
    Algorithm { kinds: &[AlgorithmKind::TokenBucket], source: include_str!("../../../lua/token_bucket.lua") },
    Algorithm {
        kinds: &[AlgorithmKind::FixedWindow, AlgorithmKind::FirstRequest, AlgorithmKind::Calendar],
        source: include_str!("../../../lua/fixed_window.lua"),
    },
    Algorithm { kinds: &[AlgorithmKind::SlidingLog], source: include_str!("../../../lua/sliding_log.lua") },
    Algorithm { kinds: &[AlgorithmKind::SlidingWindow], source: include_str!("../../../lua/sliding_window.lua") },
    Algorithm { kinds: &[AlgorithmKind::SlidingBuckets], source: include_str!("../../../lua/sliding_buckets.lua") },
    Algorithm { kinds: &[AlgorithmKind::Concurrency], source: include_str!("../../../lua/concurrency.lua") },
];

/// The driver of a script. The fewer features a driver supports, the less CPU time a check needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScriptVariant {
    /// The driver supports all requests.
    Generic,
    /// The driver supports requests with one limit each, of [supported](AlgorithmKind::has_small_state) kinds. The requests
    /// may take several tokens ([`Operation::TakeUpTo`]).
    Single,
    /// The driver supports checks with at most this number of limits each, of [supported](AlgorithmKind::has_small_state)
    /// kinds. With one limit, the script is the same as for [`Single`](ScriptVariant::Single).
    Small(usize),
}

impl ScriptVariant {
    /// All variants of the script.
    pub const ALL: [ScriptVariant; 5] = [
        ScriptVariant::Generic,
        ScriptVariant::Single,
        ScriptVariant::Small(2),
        ScriptVariant::Small(3),
        ScriptVariant::Small(MAX_SMALL_LIMITS),
    ];

    /// Return the variant for checks with this number of limits each, of [supported](AlgorithmKind::has_small_state) kinds.
    pub fn for_checks(limits: usize) -> Self {
        if (1..=MAX_SMALL_LIMITS).contains(&limits) { ScriptVariant::Small(limits) } else { ScriptVariant::Generic }
    }

    /// Return the variant that supports the requests of both variants.
    pub fn union(self, other: ScriptVariant) -> Self {
        match (self, other) {
            (ScriptVariant::Small(one), ScriptVariant::Small(limits)) => ScriptVariant::Small(one.max(limits)),
            (ScriptVariant::Single, ScriptVariant::Single | ScriptVariant::Small(1))
            | (ScriptVariant::Small(1), ScriptVariant::Single) => ScriptVariant::Single,
            _ => ScriptVariant::Generic,
        }
    }

    fn index(self) -> usize {
        match self {
            ScriptVariant::Generic => 0,
            ScriptVariant::Single | ScriptVariant::Small(..2) => 1,
            ScriptVariant::Small(limits) => limits,
        }
    }

    /// Compose the script of this variant.
    fn compose(self, algorithms: AlgorithmSet) -> String {
        let keeps = |block| match block {
            Block::Usage => algorithms.counts_usage(),
            Block::Generic => self == ScriptVariant::Generic,
            Block::Free => matches!(self, ScriptVariant::Single | ScriptVariant::Small(..2)),
        };
        let (driver, repeats) = match self {
            ScriptVariant::Generic => (GENERIC, None),
            ScriptVariant::Single | ScriptVariant::Small(..2) => (SINGLE, None),
            ScriptVariant::Small(limits) => (SMALL, Some(limits)),
        };
        let mut script = String::with_capacity(4 * driver.len());
        for line in driver.lines() {
            match line.strip_suffix(ALGORITHMS_MARKER) {
                Some(indent) => self.push_branches(&mut script, algorithms, indent),
                None if line == STATES_MARKER => script.push_str(body_of(STATES)),
                None => script.extend([line, "\n"]),
            }
        }
        let script = select_blocks(&script, keeps);
        match repeats {
            Some(limits) => repeat_blocks(&script, limits),
            None => script,
        }
    }

    /// Append a branch for each algorithm that is in the set and supported by the driver.
    fn push_branches(self, script: &mut String, algorithms: AlgorithmSet, indent: &str) {
        let is_small = matches!(self, ScriptVariant::Small(2..));
        for algorithm in algorithms.iter() {
            let kinds = algorithm.kinds.iter().filter(|kind| self == ScriptVariant::Generic || kind.has_small_state());
            let conditions: Vec<_> = kinds.map(|kind| format!("kind == '{}'", kind.letter())).collect();
            if conditions.is_empty() {
                continue;
            }
            let condition = format!("elseif {} then", conditions.join(" or "));
            let body = body_of(algorithm.source).lines().map(|line| (line, "  "));
            for (line, own_indent) in [(&*condition, "")].into_iter().chain(body) {
                if !line.is_empty() {
                    script.extend([indent, own_indent]);
                }
                match is_small && !line.trim_start().starts_with("--") {
                    true => push_with_suffixes(script, line),
                    false => script.push_str(line),
                }
                script.push('\n');
            }
        }
    }
}

/// Return the lines of a file after its marker `--@body`.
fn body_of(source: &str) -> &str {
    source.split_once(BODY_MARKER).unwrap_or_default().1
}

/// The blocks that only some scripts have. A block consists of the lines between the markers `--@NAME` and
/// `--@end NAME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    /// Usage totals: only in scripts that count usage.
    Usage,
    /// Outcomes and refunds: only with the generic driver. The other drivers check, and reply with states.
    Generic,
    /// The remaining tokens, which decide how many tokens [`Operation::TakeUpTo`] takes: only with the single driver.
    Free,
}

impl Block {
    const ALL: [(Block, &'static str); 3] =
        [(Block::Usage, "usage"), (Block::Generic, "generic"), (Block::Free, "free")];

    /// Return the block of a marker, and whether the marker begins the block.
    fn of_marker(line: &str) -> Option<(Block, bool)> {
        let marker = line.trim().strip_prefix("--@")?;
        let (name, begins) = marker.strip_prefix("end ").map_or((marker, true), |name| (name, false));
        Block::ALL.iter().find(|(_, known)| *known == name).map(|(block, _)| (*block, begins))
    }
}

/// Keep the blocks for which `keeps` returns true, remove the other blocks, and remove all markers of blocks.
fn select_blocks(source: &str, keeps: impl Fn(Block) -> bool) -> String {
    let mut script = String::with_capacity(source.len());
    let mut is_kept = true;
    for line in source.split_inclusive('\n') {
        match Block::of_marker(line) {
            Some((block, begins)) => is_kept = !begins || keeps(block),
            None if is_kept => script.push_str(line),
            None => {}
        }
    }
    script
}

/// The variables of a branch that belong to a limit.
const LIMIT_VARIABLES: [&str; 15] = [
    "kind",
    "cost",
    "a",
    "b",
    "c",
    "d",
    "status",
    "ttl_us",
    "new_field1",
    "new_field2",
    "new_field3",
    "key_expires_at",
    "field1",
    "field2",
    "field3",
];

/// Append a line of code, with the suffix `_1` for each variable that belongs to a limit.
fn push_with_suffixes(script: &mut String, line: &str) {
    let is_word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|character| is_word(character) != is_word(first)).unwrap_or(rest.len());
        let (part, after) = rest.split_at(length);
        script.push_str(part);
        if LIMIT_VARIABLES.contains(&part) {
            script.push_str("_1");
        }
        rest = after;
    }
}

/// Repeat each block between `--@each limit` and `--@end` for each limit.
fn repeat_blocks(driver: &str, limits: usize) -> String {
    let mut script = String::with_capacity(limits * driver.len());
    let mut block: Option<String> = None;
    for line in driver.split_inclusive('\n') {
        match (line.trim(), &mut block) {
            (REPEAT_MARKER, None) => block = Some(String::new()),
            (REPEAT_END_MARKER, Some(block_text)) => {
                for limit in 1..=limits {
                    script.push_str(&block_text.replace("_1", &format!("_{limit}")));
                }
                block = None;
            }
            (_, Some(block_text)) => block_text.push_str(line),
            (_, None) => script.push_str(line),
        }
    }
    script
}

/// A set of algorithm files, and whether the scripts count usage totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AlgorithmSet(usize);

/// The bit of [`AlgorithmSet::counts_usage`], after the bits of the algorithms.
const USAGE_BIT: usize = 1 << ALGORITHMS.len();

impl AlgorithmSet {
    /// All algorithms, for scripts that do not count usage totals.
    pub const ALL: AlgorithmSet = AlgorithmSet(USAGE_BIT - 1);

    /// Return the algorithms that these rules use.
    pub fn for_rules<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        let bit = |rule: &Rule| ALGORITHMS.iter().position(|algorithm| algorithm.kinds.contains(&rule.kind()));
        AlgorithmSet(rules.into_iter().filter_map(bit).fold(0, |bits, bit| bits | 1 << bit))
    }

    /// Return the algorithms of both sets.
    pub fn union(self, others: AlgorithmSet) -> Self {
        AlgorithmSet(self.0 | others.0)
    }

    /// Return the same algorithms, for scripts that count or do not count usage totals.
    #[must_use]
    pub fn with_usage(self, counts_usage: bool) -> Self {
        AlgorithmSet(if counts_usage { self.0 | USAGE_BIT } else { self.0 & !USAGE_BIT })
    }

    /// Return whether the scripts count usage totals.
    pub fn counts_usage(self) -> bool {
        self.0 & USAGE_BIT != 0
    }

    /// Return whether the set has no algorithms.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn iter(self) -> impl Iterator<Item = &'static Algorithm> {
        ALGORITHMS.iter().enumerate().filter(move |(bit, _)| self.0 >> bit & 1 == 1).map(|(_, algorithm)| algorithm)
    }
}

/// A composed script.
#[derive(Debug)]
pub struct Script {
    /// The source, for `EVAL` and `SCRIPT LOAD`.
    pub source: String,
    /// The name for `EVALSHA`: the SHA-1 of the source in lower-case hexadecimal digits.
    pub sha: String,
}

/// Return the script for a set of algorithms. Each script is composed once per process.
pub fn script(variant: ScriptVariant, algorithms: AlgorithmSet) -> &'static Script {
    const SETS: usize = 2 * USAGE_BIT;
    static SCRIPTS: [[OnceLock<Script>; SETS]; ScriptVariant::ALL.len()] =
        [const { [const { OnceLock::new() }; SETS] }; ScriptVariant::ALL.len()];
    SCRIPTS[variant.index()][algorithms.0].get_or_init(|| {
        let source = variant.compose(algorithms);
        // Redis identifies a script by its SHA-1 hash. Security does not depend on this hash.
        let digest = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, source.as_bytes());
        let sha = HEXLOWER.encode(digest.as_ref());
        Script { source, sha }
    })
}

/// Return the scripts of all variants for a set of algorithms: the scripts without usage and, if the set counts usage,
/// also the scripts with usage.
pub fn all_scripts(algorithms: AlgorithmSet) -> impl Iterator<Item = &'static Script> {
    let with_usage = algorithms.counts_usage().then_some(algorithms);
    let sets = std::iter::once(algorithms.with_usage(false)).chain(with_usage);
    sets.flat_map(|set| ScriptVariant::ALL.map(|variant| script(variant, set)))
}

// === Arguments and replies: packed numbers, see the header of `lua/generic.lua` ===

/// Size of a packed number in bytes. A number is a double, which is exact for integers up to 2^53.
const NUMBER_BYTES: usize = 8;

/// Number of bytes of a group in the argument, without its limits: three numbers and the operation.
const GROUP_BYTES: usize = 3 * NUMBER_BYTES + 1;

/// Number of bytes of a limit in the argument: six numbers, the kind, the flag and the place of the state.
const LIMIT_BYTES: usize = 6 * NUMBER_BYTES + 3;

/// Number of bytes that the argument for usage has for each limit: three packed numbers.
const USAGE_BYTES: usize = 3 * NUMBER_BYTES;

/// Number of values in a reply for each limit, if the reply contains outcomes.
const NUMBERS_PER_LIMIT: usize = 5;

/// The time until which a state with three fields is kept, and its fields.
type StateNumbers = [[u8; NUMBER_BYTES]; 4];

/// Where the state of a limit is. The key of the limit, if it has one, is in `KEYS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StatePlace {
    /// In a separate key, because the state does not have three fields.
    Own,
    /// In the value of an identity that no limit before it has.
    First,
    /// In the value of the identity of the limit before it. The limit has no key.
    Same,
    /// In the value of an identity that an earlier limit has, but not the limit before it.
    Again,
}

impl StatePlace {
    /// Return the place of the state of the charge with this index.
    fn of(charges: &[Charge<'_>], index: usize) -> Self {
        let identity_of = |charge: &Charge<'_>| charge.rule.kind().has_fields().then_some(charge.key.identity);
        StatePlace::after(index, |index| identity_of(&charges[index]))
    }

    /// Return the place of the state with this index. `identity_of` returns the identity of a state with three fields.
    fn after<I: PartialEq>(index: usize, identity_of: impl Fn(usize) -> Option<I>) -> Self {
        let identity = identity_of(index);
        match identity {
            None => StatePlace::Own,
            Some(_) if index > 0 && identity_of(index - 1) == identity => StatePlace::Same,
            Some(_) if (0..index).any(|earlier| identity_of(earlier) == identity) => StatePlace::Again,
            Some(_) => StatePlace::First,
        }
    }

    fn letter(self) -> u8 {
        match self {
            StatePlace::Own => b'o',
            StatePlace::First => b'f',
            StatePlace::Same => b's',
            StatePlace::Again => b'a',
        }
    }
}

/// The arguments of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitArgs {
    kind: AlgorithmKind,
    mode: ChargeMode,
    place: StatePlace,
    /// Id of the state ([`StateName::id`](crate::limiter::key::StateName::id)).
    state_id: u64,
    cost: u64,
    parameters: [u64; 3],
    last_parameter: [u8; NUMBER_BYTES],
    /// The day whose usage total the request changes, if usage is counted.
    usage: Option<UsageDay>,
}

impl LimitArgs {
    /// Return the arguments of a charge of a request. Calendar windows are computed for `assumed_now_us`.
    pub fn new(charges: &[Charge<'_>], index: usize, assumed_now_us: u64) -> Self {
        let charge = &charges[index];
        let place = StatePlace::of(charges, index);
        let (kind, [a, b, c, d]) = (charge.rule.kind(), charge.rule.script_arguments(assumed_now_us));
        let last_parameter = match kind {
            AlgorithmKind::Concurrency => charge.permit_id.to_le_bytes(),
            AlgorithmKind::TokenBucket => encode_number(charge.debt_before_us),
            AlgorithmKind::FixedWindow
            | AlgorithmKind::FirstRequest
            | AlgorithmKind::Calendar
            | AlgorithmKind::SlidingWindow
            | AlgorithmKind::SlidingBuckets
            | AlgorithmKind::SlidingLog => encode_number(d),
        };
        LimitArgs {
            kind,
            mode: charge.mode,
            place,
            state_id: charge.key.state_name.id(),
            cost: charge.cost,
            parameters: [a, b, c],
            last_parameter,
            usage: None,
        }
    }

    /// Return the same arguments as those of the limit with this index of another request. `identity_of` returns the
    /// identity of a limit whose state has three fields.
    #[must_use]
    pub(super) fn at<I: PartialEq>(self, index: usize, identity_of: impl Fn(usize) -> Option<I>) -> Self {
        LimitArgs { place: StatePlace::after(index, identity_of), ..self }
    }

    /// Return whether the limit has a key in `KEYS`.
    pub fn has_key(&self) -> bool {
        self.place != StatePlace::Same
    }

    /// Return whether the state is in the value of its identity.
    pub fn has_fields(&self) -> bool {
        self.place != StatePlace::Own
    }

    /// Append the key of a limit that [has a key](LimitArgs::has_key).
    pub fn write_key(&self, key: &Key<'_>, prefix: &str, out: &mut Vec<u8>) {
        match self.place {
            StatePlace::Own => key.write(prefix, out),
            StatePlace::First | StatePlace::Same | StatePlace::Again => key.identity.write_key(prefix, out),
        }
    }

    /// Return the same arguments with the day whose usage total the request changes. `None` if the request changes no
    /// usage total.
    #[must_use]
    pub fn with_usage(self, usage: Option<UsageDay>) -> Self {
        LimitArgs { usage, ..self }
    }

    /// Return whether the request changes a usage total.
    pub fn counts_usage(&self) -> bool {
        self.usage.is_some()
    }

    /// Return the arguments for a refund of this cost. `outcome` is the outcome of the charge.
    pub fn for_refund(self, cost: u64, outcome: &Outcome) -> Self {
        let [burst, refill, parts] = self.parameters;
        let last_parameter = match self.kind {
            AlgorithmKind::TokenBucket => {
                encode_number(Rule::TokenBucket(TokenBucket { burst, refill, parts }).debt_before_us(outcome, 0, cost))
            }
            _ => self.last_parameter,
        };
        LimitArgs { cost, last_parameter, usage: self.usage.map(UsageDay::at_any_time), ..self }
    }

    /// Return the rule, if its [state has three fields](AlgorithmKind::has_small_state).
    fn rule(&self) -> Option<Rule> {
        let [a, b, c] = self.parameters;
        let window = |start| Rule::FixedWindow(FixedWindow { limit: a, window: b, start });
        match self.kind {
            AlgorithmKind::TokenBucket => Some(Rule::TokenBucket(TokenBucket { burst: a, refill: b, parts: c })),
            AlgorithmKind::FixedWindow => Some(window(WindowStart::Aligned { phase: c })),
            AlgorithmKind::FirstRequest => Some(window(WindowStart::FirstRequest)),
            AlgorithmKind::SlidingWindow => Some(Rule::SlidingWindow(SlidingWindow { limit: a, window: b, unit: c })),
            AlgorithmKind::Calendar
            | AlgorithmKind::SlidingBuckets
            | AlgorithmKind::SlidingLog
            | AlgorithmKind::Concurrency => None,
        }
    }

    /// Return the cost that the request charges to the limit.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Return the cost that stays charged until it is refunded. A permit has none, because it expires.
    pub fn lasting_cost(&self) -> u64 {
        if self.kind == AlgorithmKind::Concurrency { 0 } else { self.cost }
    }

    /// Return the weight of a refund with these arguments ([`AlgorithmKind::weight`]).
    pub fn refund_weight(&self) -> usize {
        let [limit, _, buckets] = self.parameters;
        self.kind.weight(limit, buckets) + usize::from(self.counts_usage())
    }

    /// Return whether the cost is charged after the response.
    pub fn is_post_paid(&self) -> bool {
        self.mode.is_deferred()
    }
}

/// Return the variant that supports these requests and needs the least CPU time. Only the generic driver supports the
/// layout with separate keys.
pub fn script_variant(layout: &StateLayout, operation: Operation, limits: &[LimitArgs]) -> ScriptVariant {
    let is_plain = !layout.has_separate_keys()
        && limits.iter().all(|limit| {
            limit.mode == ChargeMode::Enforced && limit.kind.has_small_state() && limit.place != StatePlace::Again
        });
    match (operation, limits) {
        (Operation::Check, _) if is_plain => ScriptVariant::for_checks(limits.len()),
        (Operation::TakeUpTo, [LimitArgs { cost: 1.., .. }]) if is_plain => ScriptVariant::Single,
        _ => ScriptVariant::Generic,
    }
}

/// Start the argument of a call, with capacity for this number of groups and limits. If `now_us` is 0, the script uses
/// the time of the server.
pub fn start_argument(now_us: u64, layout: &StateLayout, groups: usize, limits: usize) -> Vec<u8> {
    let mut argument = Vec::with_capacity(NUMBER_BYTES + 1 + GROUP_BYTES * groups + LIMIT_BYTES * limits);
    argument.extend(encode_number(now_us));
    argument.push(if layout.has_separate_keys() { b'o' } else { b'i' });
    argument
}

/// Append a group of requests that differ only in their keys.
pub fn append_group(argument: &mut Vec<u8>, requests: usize, operation: Operation, limits: &[LimitArgs]) {
    let (letter, charged_at) = operation.script_arguments();
    argument.extend(encode_number(requests as u64));
    argument.extend(letter.bytes());
    argument.extend(encode_number(charged_at));
    argument.extend(encode_number(limits.len() as u64));
    for LimitArgs { kind, mode, place, state_id, cost, parameters, last_parameter, usage: _ } in limits {
        argument.extend(kind.letter().bytes().chain(mode.flag().bytes()).chain([place.letter()]));
        argument.extend(encode_number(*state_id));
        argument.extend(encode_number(*cost));
        for parameter in parameters {
            argument.extend(encode_number(*parameter));
        }
        argument.extend(last_parameter);
    }
}

/// Return the argument with the names of the states (`ARGV[2]`), in the order of the limits of all groups.
pub fn state_names_argument<'a>(names: impl Iterator<Item = &'a str>) -> Vec<u8> {
    let mut argument = Vec::new();
    for name in names {
        argument.extend_from_slice(name.as_bytes());
        argument.push(b'\n');
    }
    argument
}

/// Return the argument for usage (`ARGV[3]`). Each item of `groups` contains the limits of one group.
pub fn usage_argument<'a>(groups: impl Iterator<Item = &'a [LimitArgs]>) -> Vec<u8> {
    let mut argument = Vec::new();
    for limit in groups.flatten() {
        argument.reserve(USAGE_BYTES);
        let day = limit.usage.map_or((0, 0, 0), |day| (day.date.day() as u64, day.start_us, day.end_us));
        argument.extend([day.0, day.1, day.2].into_iter().flat_map(encode_number));
    }
    argument
}

fn encode_number(number: u64) -> [u8; NUMBER_BYTES] {
    (number as f64).to_le_bytes()
}

/// The reply to a call. [`next_verdict`](ScriptReply::next_verdict) reads the reply request by request.
#[derive(Debug)]
pub struct ScriptReply {
    now_us: u64,
    /// Whether the reply contains states instead of outcomes.
    has_states: bool,
    /// The part of the reply that has not been read.
    elements: std::vec::IntoIter<Value>,
}

impl ScriptReply {
    /// Parse the start of a reply. Return `None` if it is malformed.
    pub fn new(reply: Value) -> Option<Self> {
        let Value::Array(elements) = reply else { return None };
        let mut elements = elements.into_iter();
        let Some(Value::BulkString(start)) = elements.next() else { return None };
        let (now_us, letter) = start.split_first_chunk()?;
        let has_states = match letter {
            b"s" => true,
            b"o" => false,
            _ => return None,
        };
        Some(ScriptReply { now_us: decode_integer(f64::from_le_bytes(*now_us))?, has_states, elements })
    }

    /// Return the verdict or the error of the next request, which has this operation and these limits. Return `None` if
    /// the reply is malformed.
    pub fn next_verdict(&mut self, operation: Operation, limits: &[LimitArgs]) -> Option<Result<Verdict, ServerError>> {
        let first = self.elements.next()?;
        let is_admitted = !matches!(first, Value::Int(0));
        let element = if is_admitted { first } else { self.elements.next()? };
        match element {
            Value::ServerError(error) => Some(Err(error)),
            Value::BulkString(bytes) if self.has_states => {
                verdict_of_states(self.now_us, operation, is_admitted, limits, &bytes).map(Ok)
            }
            Value::BulkString(bytes) => verdict_of_outcomes(self.now_us, limits, &bytes).map(Ok),
            _ => None,
        }
    }
}

/// Decode the outcomes of a request.
fn verdict_of_outcomes(now_us: u64, limits: &[LimitArgs], bytes: &[u8]) -> Option<Verdict> {
    let (numbers, []) = bytes.as_chunks::<NUMBER_BYTES>() else { return None };
    let (outcomes, []) = numbers.as_chunks::<NUMBERS_PER_LIMIT>() else { return None };
    if outcomes.len() != limits.len() {
        return None;
    }
    let [granted, ..] = outcomes.first()?;
    let granted = decode_integer(f64::from_le_bytes(*granted))?;
    Some(Verdict::new(granted, now_us, outcomes.iter().map(decode_outcome).collect::<Option<_>>()?))
}

fn decode_outcome(numbers: &[[u8; NUMBER_BYTES]; NUMBERS_PER_LIMIT]) -> Option<Outcome> {
    let [_, status, remaining, reset_us, retry_us] = numbers.map(f64::from_le_bytes);
    let status = match decode_integer(status)? {
        0 => Status::Ok,
        1 => Status::Exceeded,
        2 => Status::CostTooLarge,
        3 => Status::Saturated,
        _ => return None,
    };
    Some(Outcome {
        status,
        remaining: decode_integer(remaining)?,
        reset_us: decode_integer(reset_us)?,
        // A `retry_us` of -1 means that the charge can never fit.
        retry_us: decode_integer(retry_us.max(0.0))?,
    })
}

/// Compute the verdict on a request from the states that the script has read. The script has decided whether the request
/// is admitted. Return `None` if the reply is malformed.
fn verdict_of_states(
    now_us: u64,
    operation: Operation,
    is_admitted: bool,
    limits: &[LimitArgs],
    bytes: &[u8],
) -> Option<Verdict> {
    let (numbers, []) = bytes.as_chunks::<NUMBER_BYTES>() else { return None };
    let state_of: fn(&[[u8; NUMBER_BYTES]], usize, usize) -> Option<StateNumbers> = match numbers.len() {
        length if length == 4 * limits.len() => state_in_list,
        length if length == 1 + 5 * limits.len() => state_in_value,
        _ => return None,
    };
    let mut granted = 1;
    let mut outcomes = Vec::with_capacity(limits.len());
    for (index, limit) in limits.iter().enumerate() {
        let state = decode_state(limit.kind, &state_of(numbers, limits.len(), index)?)?;
        let rule = limit.rule()?;
        let mut cost = limit.cost;
        if operation == Operation::TakeUpTo {
            let free = rule.step(state.as_ref(), now_us, StepKind::Check, 0).free;
            granted = free.min(cost);
            cost = granted.max(1);
        }
        let Step { mut outcome, free, free_reset_us, .. } = rule.step(state.as_ref(), now_us, StepKind::Check, cost);
        if !is_admitted {
            (outcome.remaining, outcome.reset_us) = (free, free_reset_us);
        }
        outcomes.push(outcome);
    }
    Some(Verdict::new(if is_admitted { granted } else { 0 }, now_us, outcomes))
}

/// Return the state with this index of a list with four numbers for each state.
fn state_in_list(numbers: &[[u8; NUMBER_BYTES]], _states: usize, index: usize) -> Option<StateNumbers> {
    numbers.get(4 * index..)?.first_chunk().copied()
}

/// Return the state with this index of the value of an identity (see `lua/states.lua`): the expiry of the key precedes
/// the heads of the states, and the heads precede the bodies.
fn state_in_value(numbers: &[[u8; NUMBER_BYTES]], states: usize, index: usize) -> Option<StateNumbers> {
    let [_id, third] = *numbers.get(1 + 2 * index..)?.first_chunk()?;
    let [kept_until, first, second] = *numbers.get(1 + 2 * states + 3 * index..)?.first_chunk()?;
    Some([kept_until, first, second, third])
}

/// Decode a state with three fields. The inner option is `None` if there is no state. Return `None` if the state is
/// malformed.
fn decode_state(kind: AlgorithmKind, numbers: &StateNumbers) -> Option<Option<State>> {
    let number = |index: usize| decode_integer(f64::from_le_bytes(numbers[index]));
    let (key_expires_at, first, second, third) = (number(0)?, number(1)?, number(2)?, number(3)?);
    let state = match kind {
        AlgorithmKind::TokenBucket => State::Bucket { updated_at: first, debt: second, parts: third, key_expires_at },
        AlgorithmKind::FixedWindow | AlgorithmKind::FirstRequest => State::Window { start: first, count: second },
        AlgorithmKind::SlidingWindow => State::Sliding { start: first, current: second, previous: third },
        AlgorithmKind::Calendar
        | AlgorithmKind::SlidingBuckets
        | AlgorithmKind::SlidingLog
        | AlgorithmKind::Concurrency => return None,
    };
    Some((key_expires_at > 0).then_some(state))
}

/// Convert a number of a reply to an integer. Return `None` if the number is negative, has a fraction or exceeds 2^53,
/// because the exact arithmetic of the scripts cannot produce such a number.
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
        let union = |variants: &[ScriptVariant]| variants.iter().copied().reduce(ScriptVariant::union).unwrap();
        assert_eq!(union(&[Small(1), Single, Small(1)]), Single);
        assert_eq!(union(&[Small(2), Small(1), Small(4), Small(3)]), Small(4));
        assert_eq!(union(&[Small(2), Single]), Generic, "the single driver supports one limit per request");
        assert_eq!(union(&[Generic, Small(1)]), Generic);
        assert_eq!(ScriptVariant::for_checks(0), Generic);
        assert_eq!(ScriptVariant::for_checks(4), Small(4));
        assert_eq!(ScriptVariant::for_checks(5), Generic);
    }

    #[test]
    fn algorithms_are_branches_of_the_drivers_that_support_them() {
        let variants = ScriptVariant::ALL.into_iter().flat_map(|variant| [(variant, false), (variant, true)]);
        for (variant, counts_usage) in variants {
            for (bit, algorithm) in ALGORITHMS.iter().enumerate() {
                let source = &script(variant, AlgorithmSet(1 << bit).with_usage(counts_usage)).source;
                assert_eq!(source.contains("'HINCRBY'"), counts_usage, "{variant:?}");
                let condition = format!(" == '{}'", algorithm.kinds[0].letter());
                let is_branch = |line: &&str| line.trim().starts_with("elseif kind") && line.contains(&condition);
                let branches = source.lines().filter(is_branch).count();
                let is_supported = variant == Generic || algorithm.kinds.iter().any(|kind| kind.has_small_state());
                // In the small driver, each limit has its own branches, so the text of an algorithm occurs several
                // times.
                let limits = if let Small(limits) = variant { limits } else { 1 };
                assert_eq!(branches, if is_supported { limits } else { 0 }, "{variant:?}, {:?}", algorithm.kinds);
                assert!(!source.contains("--@"), "{variant:?}: a marker is left in {source}");
            }
        }
    }

    #[test]
    fn variables_of_a_limit_get_its_number() {
        let mut script = String::new();
        push_with_suffixes(&mut script, "if kind == 'B' and cost > a.b then ttl_us, new_field1 = scost, field10 end");
        assert_eq!(script, "if kind_1 == 'B' and cost_1 > a_1.b_1 then ttl_us_1, new_field1_1 = scost, field10 end");
    }

    #[test]
    fn malformed_states_have_no_verdict() {
        let limit = |kind| LimitArgs {
            kind,
            mode: ChargeMode::Enforced,
            place: StatePlace::First,
            state_id: 1,
            cost: 1,
            parameters: [10, 1, 1],
            last_parameter: encode_number(0),
            usage: None,
        };
        let verdict = |kind, letter: u8, is_denied: bool, numbers: &[f64]| {
            let start = [&encode_number(1000)[..], &[letter]].concat();
            let states = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let mut elements = vec![Value::BulkString(start), Value::BulkString(states)];
            if is_denied {
                elements.insert(1, Value::Int(0));
            }
            let mut reply = ScriptReply::new(Value::Array(elements))?;
            reply.next_verdict(Operation::Check, &[limit(kind)]).map(Result::unwrap)
        };
        let remaining = |is_denied, numbers: &[f64]| {
            verdict(AlgorithmKind::TokenBucket, b's', is_denied, numbers).unwrap().outcomes[0].remaining
        };
        assert_eq!(remaining(false, &[0.0; 4]), 9, "no state");
        assert_eq!(remaining(false, &[2e6, 1000.0, 4.0, 1.0]), 5);
        assert_eq!(remaining(false, &[3e6, 1.0, 1.0, 2e6, 1000.0, 4.0]), 5, "the value of an identity");
        assert_eq!(remaining(true, &[2e6, 1000.0, 10.0, 1.0]), 0, "denied");
        for (letter, numbers) in [
            (b's', &[2e6, 1000.0, -4.0, 1.0][..]),
            (b's', &[2e6, 1000.0, 0.5, 1.0]),
            (b's', &[2e6, 1000.0, f64::NAN, 1.0]),
            (b's', &[0.0; 3]),
            (b's', &[0.0; 5]),
            (b's', &[0.0; 8]),
            (b's', &[]),
            (b'x', &[0.0; 4]),
            (b'o', &[0.0; 4]),
            (b'o', &[0.0; 10]),
            (b'o', &[]),
        ] {
            assert!(verdict(AlgorithmKind::TokenBucket, letter, false, numbers).is_none(), "{letter} {numbers:?}");
        }
        let elements = |elements: Vec<Value>| {
            ScriptReply::new(Value::Array(elements))?
                .next_verdict(Operation::Check, &[limit(AlgorithmKind::TokenBucket)])
        };
        let start = Value::BulkString([&encode_number(1000)[..], b"s"].concat());
        assert!(elements(Vec::new()).is_none());
        assert!(elements(vec![start.clone()]).is_none(), "no element for the request");
        assert!(elements(vec![start.clone(), Value::Int(0)]).is_none(), "no states of the denied request");
        assert!(elements(vec![start, Value::Int(1)]).is_none());
        assert!(
            verdict(AlgorithmKind::Calendar, b's', false, &[0.0; 4]).is_none(),
            "no driver replies with such states"
        );
    }

    #[test]
    fn script_variants_have_different_scripts() {
        let sets = [AlgorithmSet::ALL, AlgorithmSet::ALL.with_usage(true)];
        let scripts = sets.map(|set| ScriptVariant::ALL.map(|variant| &*script(variant, set).sha));
        let shas: std::collections::HashSet<_> = scripts.into_iter().flatten().collect();
        assert_eq!(shas.len(), 2 * ScriptVariant::ALL.len());
    }
}
