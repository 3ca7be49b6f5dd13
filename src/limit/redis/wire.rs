//! What a script is asked and what it answers, in bytes that neither side reads as text: the contract is in `lua/check.lua`.

use redis::{ServerError, Value};

use super::script::Frame;
use crate::limit::algorithm::token_bucket::TokenBucket;
use crate::limit::algorithm::{Kind, Outcome, Rule, Status};
use crate::limit::store::{Charge, Mode, Operation, Verdict};

/// Bytes of a number: a double, which holds all integers up to 2^53.
const NUMBER: usize = 8;

/// Numbers that a reply has for each limit.
const OUTCOME: usize = 5;

/// What is asked of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    kind: Kind,
    mode: Mode,
    cost: u64,
    numbers: [u64; 3],
    last: [u8; NUMBER],
}

impl Terms {
    /// Of this charge; calendar windows are reckoned for about `near_us`.
    pub fn of(charge: &Charge<'_>, near_us: u64) -> Self {
        let (kind, [a, b, c, d]) = (charge.rule.kind(), charge.rule.arguments(near_us));
        let last = match kind {
            Kind::Concurrency => charge.lease.to_le_bytes(),
            Kind::TokenBucket => number(charge.debt_before_us),
            _ => number(d),
        };
        Terms { kind, mode: charge.mode, cost: charge.cost, numbers: [a, b, c], last }
    }

    /// For the refund of this cost, where the charge had this outcome.
    pub fn refunding(self, cost: u64, outcome: &Outcome) -> Self {
        let [burst, refill, parts] = self.numbers;
        let last = match self.kind {
            Kind::TokenBucket => {
                number(Rule::TokenBucket(TokenBucket { burst, refill, parts }).debt_before_us(outcome, 0, cost))
            }
            _ => self.last,
        };
        Terms { cost, last, ..self }
    }

    /// What is charged.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether the cost is charged after the response.
    pub fn is_post_paid(&self) -> bool {
        self.mode.is_post_paid()
    }
}

/// The frame that decides such requests at the least cost.
pub fn frame(operation: Operation, terms: &[Terms]) -> Frame {
    let plain = terms.iter().all(|terms| terms.mode == Mode::Binding && Frame::counts(terms.kind));
    match (operation, terms) {
        (Operation::Check, _) if plain => Frame::of_checks(terms.len()),
        (Operation::Take, [Terms { cost: 1.., .. }]) if plain => Frame::One,
        _ => Frame::Any,
    }
}

/// The argument of a call, with room for so many groups and limits; `now_us` 0 = the server's time.
pub fn argument(now_us: u64, groups: usize, limits: usize) -> Vec<u8> {
    let mut argument = Vec::with_capacity(NUMBER + 25 * groups + 42 * limits);
    argument.extend(number(now_us));
    argument
}

/// Adds so many requests that differ in their keys only.
pub fn add(argument: &mut Vec<u8>, requests: usize, operation: Operation, terms: &[Terms]) {
    let (letter, charged_at) = operation.arguments();
    argument.extend(number(requests as u64));
    argument.extend(letter.bytes());
    argument.extend(number(charged_at));
    argument.extend(number(terms.len() as u64));
    for Terms { kind, mode, cost, numbers, last } in terms {
        argument.extend(kind.letter().bytes().chain(mode.flag().bytes()));
        argument.extend(number(*cost));
        for term in numbers {
            argument.extend(number(*term));
        }
        argument.extend(last);
    }
}

fn number(number: u64) -> [u8; NUMBER] {
    (number as f64).to_le_bytes()
}

/// The reply to a call, request by request.
#[derive(Debug)]
pub struct Reply {
    bytes: Vec<u8>,
    /// Of the requests that failed: how many limits come before, and why.
    failures: Vec<(usize, ServerError)>,
    /// Limits read so far.
    read: usize,
}

impl Reply {
    /// Reads a reply for so many limits, if it is one.
    pub fn new(reply: Value, limits: usize) -> Option<Self> {
        let mut parts = match reply {
            Value::Array(parts) => parts.into_iter(),
            bytes => vec![bytes].into_iter(),
        };
        let Some(Value::BulkString(bytes)) = parts.next() else { return None };
        let mut failures = Vec::new();
        while let Some(before) = parts.next() {
            let (Value::Int(before), Some(Value::ServerError(error))) = (before, parts.next()) else { return None };
            failures.push((usize::try_from(before).ok()?, error));
        }
        (bytes.len() == NUMBER * (1 + OUTCOME * limits)).then_some(Reply { bytes, failures, read: 0 })
    }

    /// What it says to the next request, which has so many limits; none if that is no verdict.
    pub fn next(&mut self, limits: usize) -> Option<Result<Verdict, ServerError>> {
        let first = self.read;
        self.read += limits;
        if let Some(failed) = self.failures.iter().position(|(before, _)| *before == first) {
            return Some(Err(self.failures.swap_remove(failed).1));
        }
        let granted = natural(self.number(1 + OUTCOME * first))?;
        let outcomes = (first..self.read).map(|limit| self.outcome(limit)).collect::<Option<_>>()?;
        Some(Ok(Verdict::new(granted, natural(self.number(0))?, outcomes)))
    }

    fn outcome(&self, limit: usize) -> Option<Outcome> {
        let field = |field| self.number(1 + OUTCOME * limit + field);
        let status = match natural(field(1))? {
            0 => Status::Ok,
            1 => Status::Over,
            2 => Status::Never,
            3 => Status::Busy,
            _ => return None,
        };
        // -1 stands for "never".
        let (remaining, reset_us, retry_us) = (natural(field(2))?, natural(field(3))?, natural(field(4).max(0.0))?);
        Some(Outcome { status, remaining, reset_us, retry_us })
    }

    fn number(&self, index: usize) -> f64 {
        f64::from_le_bytes(self.bytes.as_chunks().0[index])
    }
}

/// A number that the arithmetic of the scripts may come to: what is no integer would have been rounded somewhere.
fn natural(number: f64) -> Option<u64> {
    let whole = number as u64;
    (whole as f64 == number && whole <= 1 << 53).then_some(whole)
}
