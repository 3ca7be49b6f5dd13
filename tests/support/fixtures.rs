//! Fixtures of a release: its scripts, calls that it made with their replies, and the resulting states in Redis.
//!
//! `tests/fixtures/VERSION/` contains the scripts, `calls.json` and `overrides.json`. Binary strings are encoded as
//! Base64.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use sluicegate::limiter::algorithm::concurrency::Concurrency;
use sluicegate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use sluicegate::limiter::algorithm::sliding_buckets::SlidingBuckets;
use sluicegate::limiter::algorithm::sliding_log::SlidingLog;
use sluicegate::limiter::algorithm::sliding_window::SlidingWindow;
use sluicegate::limiter::algorithm::token_bucket::TokenBucket;
use sluicegate::limiter::algorithm::{Outcome, Rule, Status};
use sluicegate::limiter::quota::{CalendarUnit, CalendarWindows};
use sluicegate::limiter::usage::UsageDays;
use sluicegate::limiter::verdict::{Charge, ChargeMode, Operation, Verdict};

use super::stores::Limit;

/// A sequence of calls to some limits on one Redis server.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordedCase {
    pub limits: Vec<RecordedLimit>,
    /// The calls that led to `states`.
    pub before: Vec<RecordedCall>,
    pub states: Vec<RecordedState>,
    /// The calls that follow `states`.
    pub after: Vec<RecordedCall>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RecordedLimit {
    pub name: String,
    /// The time zone of the days for which usage is totalled, or `None` if usage is not counted.
    pub usage: Option<String>,
}

/// A call: the limiter's request, what the release sent, and the result.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordedCall {
    pub now: u64,
    pub operation: String,
    pub charged_at: u64,
    pub identity: u128,
    pub charges: Vec<RecordedCharge>,
    /// The file name of the script.
    pub script: String,
    pub keys: Vec<String>,
    pub arguments: Vec<String>,
    pub reply: String,
    pub granted: u64,
    pub outcomes: Vec<RecordedOutcome>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RecordedCharge {
    pub rule: RecordedRule,
    pub cost: u64,
    pub mode: String,
    pub permit_id: u64,
    pub debt_before_us: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordedRule {
    TokenBucket { burst: u64, refill: u64, parts: u64 },
    FixedWindow { limit: u64, window: u64, phase: u64 },
    FirstRequest { limit: u64, window: u64 },
    Calendar { limit: u64, unit: String, zone: String },
    SlidingWindow { limit: u64, window: u64, unit: u64 },
    SlidingBuckets { limit: u64, window: u64, buckets: u64 },
    SlidingLog { limit: u64, window: u64 },
    Concurrency { limit: u64, ttl: u64 },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedOutcome {
    pub status: String,
    pub remaining: u64,
    pub reset_us: u64,
    pub retry_us: u64,
}

/// A key in Redis, and the command that restores its value.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedState {
    pub key: String,
    pub command: String,
    pub arguments: Vec<String>,
}

/// The call of `overrides.lua` that a release made to set an override.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordedOverride {
    pub identity: u128,
    pub quota: String,
    /// The arguments of the call.
    pub arguments: Vec<String>,
}

/// The fixtures of a release.
#[derive(Debug)]
pub struct Fixtures {
    pub version: String,
    pub folder: PathBuf,
}

impl Fixtures {
    /// Return the folder of all fixtures.
    pub fn parent() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
    }

    /// Find the fixtures of the last release. `tests/fixtures` has no other fixtures.
    pub fn find() -> Fixtures {
        let entries = fs::read_dir(Self::parent()).unwrap().map(|entry| entry.unwrap().path());
        let folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
        let [folder] = &folders[..] else { panic!("tests/fixtures must have exactly one release: {folders:?}") };
        Fixtures { version: folder.file_name().unwrap().to_str().unwrap().to_owned(), folder: folder.clone() }
    }

    pub fn script(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn cases(&self) -> Vec<RecordedCase> {
        serde_json::from_str(&self.script("calls.json")).unwrap()
    }

    pub fn overrides(&self) -> Vec<RecordedOverride> {
        serde_json::from_str(&self.script("overrides.json")).unwrap()
    }
}

pub fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

pub fn decode(text: &str) -> Vec<u8> {
    STANDARD.decode(text).unwrap()
}

/// Return all keys with the command that restores each value. `arguments` are the arguments of this command.
pub fn read_states(connection: &mut redis::Connection) -> Vec<RecordedState> {
    let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(connection).unwrap();
    keys.sort();
    let state = |key: String| {
        let kind: String = redis::cmd("TYPE").arg(&key).query(connection).unwrap();
        let (read, write): (&[&str], &str) = match &*kind {
            "string" => (&["GET"], "SET"),
            "hash" => (&["HGETALL"], "HSET"),
            "list" => (&["LRANGE", "0", "-1"], "RPUSH"),
            "zset" => (&["ZRANGE", "0", "-1", "WITHSCORES"], "ZADD"),
            other => panic!("{key} has the type {other}"),
        };
        let value: redis::Value = redis::cmd(read[0]).arg(&key).arg(&read[1..]).query(connection).unwrap();
        let mut parts: Vec<Vec<u8>> = match &*kind {
            "string" => vec![redis::from_redis_value(value).unwrap()],
            _ => redis::from_redis_value(value).unwrap(),
        };
        if kind == "hash" {
            let mut fields: Vec<_> = parts.chunks(2).map(<[_]>::to_vec).collect();
            fields.sort();
            parts = fields.concat();
        }
        if kind == "zset" {
            // ZADD takes the score first.
            parts.chunks_mut(2).for_each(<[_]>::reverse);
        }
        RecordedState { key, command: write.to_owned(), arguments: parts.iter().map(|part| encode(part)).collect() }
    };
    keys.into_iter().map(state).collect()
}

pub fn write_states(connection: &mut redis::Connection, states: &[RecordedState]) {
    for state in states {
        let arguments: Vec<_> = state.arguments.iter().map(|argument| decode(argument)).collect();
        redis::cmd(&state.command).arg(&state.key).arg(arguments).exec(connection).unwrap();
    }
}

// === Conversion between the fixtures and the types of the limiter ===

impl From<&Rule> for RecordedRule {
    fn from(rule: &Rule) -> Self {
        match rule {
            Rule::TokenBucket(TokenBucket { burst, refill, parts }) => {
                RecordedRule::TokenBucket { burst: *burst, refill: *refill, parts: *parts }
            }
            Rule::FixedWindow(FixedWindow { limit, window, start }) => match start {
                WindowStart::Aligned { phase } => {
                    RecordedRule::FixedWindow { limit: *limit, window: *window, phase: *phase }
                }
                WindowStart::FirstRequest => RecordedRule::FirstRequest { limit: *limit, window: *window },
                WindowStart::Calendar(windows) => {
                    let windows = windows.to_string();
                    let (unit, zone) = windows.split_once('@').unwrap();
                    RecordedRule::Calendar { limit: *limit, unit: unit.to_owned(), zone: zone.to_owned() }
                }
            },
            Rule::SlidingWindow(SlidingWindow { limit, window, unit }) => {
                RecordedRule::SlidingWindow { limit: *limit, window: *window, unit: *unit }
            }
            Rule::SlidingBuckets(SlidingBuckets { limit, window, buckets }) => {
                RecordedRule::SlidingBuckets { limit: *limit, window: *window, buckets: *buckets }
            }
            Rule::SlidingLog(SlidingLog { limit, window }) => {
                RecordedRule::SlidingLog { limit: *limit, window: *window }
            }
            Rule::Concurrency(Concurrency { limit, ttl }) => RecordedRule::Concurrency { limit: *limit, ttl: *ttl },
        }
    }
}

impl From<&RecordedRule> for Rule {
    fn from(rule: &RecordedRule) -> Self {
        match rule {
            RecordedRule::TokenBucket { burst, refill, parts } => {
                Rule::TokenBucket(TokenBucket { burst: *burst, refill: *refill, parts: *parts })
            }
            RecordedRule::FixedWindow { limit, window, phase } => Rule::FixedWindow(FixedWindow {
                limit: *limit,
                window: *window,
                start: WindowStart::Aligned { phase: *phase },
            }),
            RecordedRule::FirstRequest { limit, window } => {
                Rule::FixedWindow(FixedWindow { limit: *limit, window: *window, start: WindowStart::FirstRequest })
            }
            RecordedRule::Calendar { limit, unit, zone } => {
                let unit = match &**unit {
                    "day" => CalendarUnit::Day,
                    "week" => CalendarUnit::Week,
                    "month" => CalendarUnit::Month,
                    "year" => CalendarUnit::Year,
                    other => panic!("unknown unit {other}"),
                };
                let windows = Arc::new(CalendarWindows::new(unit, zone).unwrap());
                Rule::FixedWindow(FixedWindow { limit: *limit, window: 0, start: WindowStart::Calendar(windows) })
            }
            RecordedRule::SlidingWindow { limit, window, unit } => {
                Rule::SlidingWindow(SlidingWindow { limit: *limit, window: *window, unit: *unit })
            }
            RecordedRule::SlidingBuckets { limit, window, buckets } => {
                Rule::SlidingBuckets(SlidingBuckets { limit: *limit, window: *window, buckets: *buckets })
            }
            RecordedRule::SlidingLog { limit, window } => {
                Rule::SlidingLog(SlidingLog { limit: *limit, window: *window })
            }
            RecordedRule::Concurrency { limit, ttl } => Rule::Concurrency(Concurrency { limit: *limit, ttl: *ttl }),
        }
    }
}

const MODES: [(&str, ChargeMode); 4] = [
    ("enforced", ChargeMode::Enforced),
    ("shadow", ChargeMode::Shadow),
    ("deferred", ChargeMode::Deferred),
    ("shadow-deferred", ChargeMode::ShadowDeferred),
];

impl From<&Charge<'_>> for RecordedCharge {
    fn from(charge: &Charge<'_>) -> Self {
        let (mode, _) = MODES.into_iter().find(|(_, mode)| *mode == charge.mode).unwrap();
        RecordedCharge {
            rule: charge.rule.into(),
            cost: charge.cost,
            mode: mode.to_owned(),
            permit_id: charge.permit_id,
            debt_before_us: charge.debt_before_us,
        }
    }
}

impl RecordedCharge {
    /// Return a charge of an identity to a limit. The limit must have the recorded rule.
    pub fn to_charge<'a>(&self, limit: &'a Limit, identity: u128) -> Charge<'a> {
        let (_, mode) = MODES.into_iter().find(|(name, _)| *name == self.mode).unwrap();
        let RecordedCharge { cost, permit_id, debt_before_us, .. } = *self;
        Charge { mode, permit_id, debt_before_us, ..limit.charge(identity, cost) }
    }
}

/// Return the name of an operation and, for a refund, the time of the charge.
pub fn operation_name(operation: Operation) -> (&'static str, u64) {
    match operation {
        Operation::Check => ("check", 0),
        Operation::Peek => ("peek", 0),
        Operation::Charge => ("charge", 0),
        Operation::Refund { charged_at } => ("refund", charged_at),
        Operation::TakeUpTo => ("take-up-to", 0),
        Operation::Renew => ("renew", 0),
    }
}

impl RecordedCall {
    pub fn operation(&self) -> Operation {
        match &*self.operation {
            "check" => Operation::Check,
            "peek" => Operation::Peek,
            "charge" => Operation::Charge,
            "refund" => Operation::Refund { charged_at: self.charged_at },
            "take-up-to" => Operation::TakeUpTo,
            "renew" => Operation::Renew,
            other => panic!("unknown operation {other}"),
        }
    }

    /// Return whether a verdict equals the recorded one.
    pub fn has_verdict(&self, verdict: &Verdict) -> bool {
        verdict.granted == self.granted && verdict.outcomes.iter().map(RecordedOutcome::from).eq(self.outcomes.iter())
    }
}

impl PartialEq<&RecordedOutcome> for RecordedOutcome {
    fn eq(&self, other: &&RecordedOutcome) -> bool {
        self == *other
    }
}

impl From<&Outcome> for RecordedOutcome {
    fn from(outcome: &Outcome) -> Self {
        let status = match outcome.status {
            Status::Ok => "ok",
            Status::Exceeded => "exceeded",
            Status::CostTooLarge => "cost-too-large",
            Status::Saturated => "saturated",
        };
        RecordedOutcome {
            status: status.to_owned(),
            remaining: outcome.remaining,
            reset_us: outcome.reset_us,
            retry_us: outcome.retry_us,
        }
    }
}

impl RecordedLimit {
    /// Return a limit with this name and usage setting, and with the given rule.
    pub fn to_limit(&self, rule: &RecordedRule) -> Limit {
        let usage = self.usage.as_ref().map(|zone| Arc::new(UsageDays::new(zone).unwrap()));
        Limit { usage, ..Limit::new(&self.name, rule.into()) }
    }
}
