//! Redis: one script call decides a whole request.

pub mod advice;
pub mod connection;
pub mod hello;
pub mod script;

use redis::{Cmd, Value};
use tokio::time::Duration;

use super::algorithm::{Kind, Outcome, Status};
use super::clock::Clock;
use super::store::{Charge, Operation, Store, StoreError, Verdict};
use connection::{Connections, checkout};
use script::{Parts, script};

/// How to reach Redis and what to call the keys.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// Address, database and credentials.
    pub client: redis::Client,
    /// First part of every key.
    pub prefix: String,
    /// Connections of one worker.
    pub connections: u32,
    /// Bound of connecting.
    pub connect_timeout: Duration,
    /// The scripts to load on every new connection.
    pub scripts: Vec<Parts>,
}

/// The counters of one worker's requests, kept in Redis.
#[derive(Debug)]
pub struct RedisStore {
    connections: Connections,
    prefix: String,
    clock: Clock,
}

impl RedisStore {
    /// A store that connects when it is first used. Make one for each runtime: connections live on the one that made them.
    pub fn new(settings: &RedisSettings, clock: Clock) -> Self {
        let RedisSettings { client, prefix, connections, connect_timeout, scripts } = settings.clone();
        let connections = connection::pool(client, scripts, connections, connect_timeout);
        RedisStore { connections, prefix, clock }
    }

    /// Asks for a sign of life.
    ///
    /// # Errors
    /// Redis cannot be reached, or refuses.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let mut connection = checkout(&self.connections).await?;
        connection.send(&redis::cmd("PING")).await.map(drop).map_err(refused_or_unreachable)
    }

    /// A call for decisions at about `near_us`, which is when calendar windows are reckoned for.
    fn command(&self, verb: &str, script: &str, operation: Operation, charges: &[Charge<'_>], near_us: u64) -> Cmd {
        let (letter, charged_at) = operation.arguments();
        // About 60 bytes of frame and 100 for each limit, in one allocation.
        let mut command = Cmd::with_capacity(6 + 8 * charges.len(), 120 + 160 * charges.len());
        command.arg(verb).arg(script).arg(charges.len());
        let mut key = Vec::with_capacity(96);
        for charge in charges {
            key.clear();
            charge.key.write(&self.prefix, &mut key);
            command.arg(&key[..]);
        }
        command.arg(letter).arg(self.clock.argument_us()).arg(charged_at);
        for charge in charges {
            let kind = charge.rule.kind();
            let [a, b, c, d] = charge.rule.arguments(near_us);
            command
                .arg(kind.letter())
                .arg(charge.mode.flag())
                .arg(charge.cost)
                .arg(a)
                .arg(b)
                .arg(c)
                .arg(if kind == Kind::Concurrency { charge.lease } else { d });
        }
        command
    }
}

impl Store for RedisStore {
    async fn call(&self, operation: Operation, charges: &[Charge<'_>]) -> Result<Verdict, StoreError> {
        let script = script(Parts::of_call(operation, charges));
        let mut connection = checkout(&self.connections).await?;
        // Only calendar windows ask for the time; Redis corrects us if ours is far from its own.
        let calendar = charges.iter().any(|charge| charge.rule.kind() == Kind::Calendar);
        let mut near_us = if calendar { self.clock.now_us() } else { 0 };
        let (mut verb, mut text) = ("EVALSHA", &script.sha);
        // Each of the two errors is answered once, and proves that nothing ran.
        let (mut sent_text, mut asked_time) = (false, false);
        let reply = loop {
            let error = match connection.send(&self.command(verb, text, operation, charges, near_us)).await {
                Ok(reply) => break Ok(reply),
                Err(error) => error,
            };
            if !sent_text && error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::NoScript) {
                (sent_text, verb, text) = (true, "EVAL", &script.text);
            } else if let Some(redis_us) = stale(&error).filter(|_| !asked_time) {
                (asked_time, near_us) = (true, redis_us);
            } else {
                break Err(error);
            }
        };
        verdict(&reply.map_err(refused_or_unreachable)?, charges.len()).ok_or(StoreError::Malformed)
    }
}

/// The time of a server that found calendar boundaries too far from it.
fn stale(error: &redis::RedisError) -> Option<u64> {
    let detail = error.detail().filter(|_| error.code() == Some("RLSTALE"))?;
    detail.rsplit(' ').next()?.parse().ok()
}

fn refused_or_unreachable(error: redis::RedisError) -> StoreError {
    if error.is_unrecoverable_error() || error.is_io_error() {
        StoreError::Unreachable(advice::of_call(&error))
    } else {
        StoreError::Refused(error)
    }
}

/// Reads `[granted, now_us, (status, remaining, reset_us, retry_us) × limits]`.
fn verdict(reply: &Value, limits: usize) -> Option<Verdict> {
    let Value::Array(fields) = reply else { return None };
    let number = |index: usize| match fields.get(index) {
        Some(Value::Int(number)) => Some(*number),
        _ => None,
    };
    let natural = |index| number(index).and_then(|number| u64::try_from(number).ok());
    if fields.len() != 2 + 4 * limits {
        return None;
    }
    let mut outcomes = Vec::with_capacity(limits);
    for first in (2..fields.len()).step_by(4) {
        let status = match number(first)? {
            0 => Status::Ok,
            1 => Status::Over,
            2 => Status::Never,
            3 => Status::Busy,
            _ => return None,
        };
        // -1 stands for "never".
        let retry_us = number(first + 3)?.max(0) as u64;
        outcomes.push(Outcome { status, remaining: natural(first + 1)?, reset_us: natural(first + 2)?, retry_us });
    }
    Some(Verdict { granted: natural(0)?, now_us: natural(1)?, outcomes })
}
