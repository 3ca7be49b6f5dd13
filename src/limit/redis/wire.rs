//! What a script is asked and what it answers, in bytes that neither side reads as text: the contract is in `lua/check.lua`.

use redis::{ServerError, Value};

use super::script::ScriptVariant;
use crate::limit::algorithm::token_bucket::TokenBucket;
use crate::limit::algorithm::{AlgorithmKind, Outcome, Rule, Status};
use crate::limit::store::{Charge, ChargeMode, Operation, Verdict};

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
