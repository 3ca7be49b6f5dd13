//! What operators decided about single identities, as Redis keeps it for all gateways: fields of one hash, each with the
//! instant until which it holds.

use std::time::Duration;

use redis::{Cmd, Value, from_redis_value};

use crate::limit::store::StoreError;

const WRITE: &str = include_str!("../../../lua/overrides.lua");

/// One field that holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// What it is about.
    pub field: String,
    /// What it says.
    pub says: String,
    /// How long it still holds.
    pub left: Duration,
}

/// The key of the hash.
pub fn key(prefix: &str) -> String {
    format!("{prefix}:overrides")
}

/// Writes a field; the answer is that of [`written`].
pub fn write(key: &str, field: &str, says: &str, lasts: Duration, most: usize) -> Cmd {
    command(key, field, says, lasts, most)
}

/// Takes a field away; the answer is that of [`written`].
pub fn remove(key: &str, field: &str) -> Cmd {
    command(key, field, "", Duration::ZERO, 0)
}

fn command(key: &str, field: &str, says: &str, lasts: Duration, most: usize) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(WRITE).arg(1).arg(key).arg(field).arg(lasts.as_micros() as u64).arg(says).arg(most);
    command
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is done.
    Done,
    /// There was nothing to take away.
    Nothing,
    /// There are as many as may be.
    TooMany,
}

/// Reads the answer to a write.
///
/// # Errors
/// It is none.
pub fn written(reply: &Value) -> Result<Written, StoreError> {
    match reply {
        Value::Int(1) => Ok(Written::Done),
        Value::Int(0) => Ok(Written::Nothing),
        Value::Int(-1) => Ok(Written::TooMany),
        _ => Err(StoreError::Malformed),
    }
}

/// Asks for the time, by which [`read`] says what still holds.
pub fn time() -> Cmd {
    redis::cmd("TIME")
}

/// Asks for all fields.
pub fn all(key: &str) -> Cmd {
    let mut command = redis::cmd("HGETALL");
    command.arg(key);
    command
}

/// Those that hold, by the answers to [`time`] and [`all`]. What no gateway has written is passed over.
///
/// # Errors
/// They are none.
pub fn read(time: Value, all: Value) -> Result<Vec<Record>, StoreError> {
    let (seconds, us): (u64, u64) = from_redis_value(time).map_err(|_| StoreError::Malformed)?;
    let now_us = seconds * 1_000_000 + us;
    let fields: Vec<(Vec<u8>, Vec<u8>)> = from_redis_value(all).map_err(|_| StoreError::Malformed)?;
    let record = |(field, value): (Vec<u8>, Vec<u8>)| {
        let (until_us, says) = std::str::from_utf8(&value).ok()?.split_once(' ')?;
        let left_us = until_us.parse::<u64>().ok()?.checked_sub(now_us).filter(|left_us| *left_us > 0)?;
        let field = String::from_utf8(field).ok()?;
        Some(Record { field, says: says.to_owned(), left: Duration::from_micros(left_us) })
    };
    Ok(fields.into_iter().filter_map(record).collect())
}
