//! Overrides and resets of operators, as Redis stores them for all gateways: fields of one hash, each with an expiry and a
//! revision.

use std::time::Duration;

use redis::{Cmd, Value, from_redis_value};

use crate::limit::store::StoreError;

const WRITE: &str = include_str!("../../../lua/overrides.lua");

/// Arguments of the script for each record.
type Arguments<'a> = (&'a str, u64, u64, u64, &'a str);

/// One field of the hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Limit, identity and what the record is about.
    pub field: String,
    /// The override as JSON. Empty for a reset and for a removed override.
    pub text: String,
    /// Revision: the time of the write, and greater than the revision that it replaced. 0 if the value has none.
    pub revision: u64,
    /// Instant until which it is in force, µs since the Unix epoch by Redis' clock. A removed override has 0.
    pub expiry_us: u64,
    /// Instant until which the record is kept, so that no gateway restores a record that it replaced.
    pub kept_us: u64,
}

/// Records and the time of Redis at which they were read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Time of Redis, µs since the Unix epoch.
    pub now_us: u64,
    /// Records that are still kept.
    pub records: Vec<Record>,
}

/// What a gateway knows of a field that it writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Known {
    /// Revision of the record; 0 if it knows none.
    pub revision: u64,
    /// See [`Record::kept_us`].
    pub kept_us: u64,
    /// Whether it is in force.
    pub in_force: bool,
}

/// The key of the hash.
pub fn key(prefix: &str) -> String {
    format!("{prefix}:overrides")
}

/// Set a field; [`written`] reads the reply.
pub fn set(key: &str, field: &str, text: &str, lasts: Duration, known: Known, most: usize) -> Cmd {
    command(key, "set", most, [(field, lasts.as_micros() as u64, known.kept_us, known.revision, text)])
}

/// Remove a field; [`written`] reads the reply.
pub fn remove(key: &str, field: &str, known: Known, most: usize) -> Cmd {
    command(key, "remove", most, [(field, u64::from(known.in_force), known.kept_us, known.revision, "")])
}

/// Write records back that Redis lost; [`restored`] reads the reply. Redis keeps what it has if it is not older.
pub fn restore(key: &str, records: &[Record], most: usize) -> Cmd {
    let arguments = records.iter().map(|record| {
        let Record { field, text, revision, expiry_us, kept_us } = record;
        (&**field, *expiry_us, *kept_us, *revision, &**text)
    });
    command(key, "restore", most, arguments)
}

fn command<'a>(key: &str, operation: &str, most: usize, records: impl IntoIterator<Item = Arguments<'a>>) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(WRITE).arg(1).arg(key).arg(operation).arg(most);
    for (field, lasts, kept_us, revision, text) in records {
        command.arg(field).arg(lasts).arg(kept_us).arg(revision).arg(text);
    }
    command
}

/// Result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// The record is written.
    Done,
    /// There is nothing to remove, or nothing to restore.
    Nothing,
    /// The maximum number of records is reached.
    TooMany,
}

impl Written {
    fn of(status: i64) -> Result<Self, StoreError> {
        match status {
            1 => Ok(Written::Done),
            0 => Ok(Written::Nothing),
            -1 => Ok(Written::TooMany),
            _ => Err(StoreError::Malformed),
        }
    }
}

/// Read the reply to [`set`] and [`remove`]: the result, and the record that Redis has now if it was written.
///
/// # Errors
/// The reply is malformed.
pub fn written(reply: Value, field: &str, text: &str) -> Result<(Written, Option<Snapshot>), StoreError> {
    let (status, now_us, expiry_us, revision, kept_us) =
        from_redis_value::<(i64, u64, u64, u64, u64)>(reply).map_err(|_| StoreError::Malformed)?;
    let written = Written::of(status)?;
    let record = Record { field: field.to_owned(), text: text.to_owned(), revision, expiry_us, kept_us };
    let snapshot = (written == Written::Done).then(|| Snapshot { now_us, records: vec![record] });
    Ok((written, snapshot))
}

/// Read the reply to [`restore`]: a result for each record.
///
/// # Errors
/// The reply is malformed.
pub fn restored(reply: Value) -> Result<Vec<Written>, StoreError> {
    let statuses: Vec<i64> = from_redis_value(reply).map_err(|_| StoreError::Malformed)?;
    statuses.into_iter().map(Written::of).collect()
}

/// Read the time, which [`read`] needs.
pub fn time() -> Cmd {
    redis::cmd("TIME")
}

/// Read all fields.
pub fn all(key: &str) -> Cmd {
    let mut command = redis::cmd("HGETALL");
    command.arg(key);
    command
}

/// Read the replies to [`time`] and [`all`]. Fields and values that no gateway writes are skipped.
///
/// # Errors
/// The replies are malformed.
pub fn read(time: Value, all: Value) -> Result<Snapshot, StoreError> {
    let (seconds, us): (u64, u64) = from_redis_value(time).map_err(|_| StoreError::Malformed)?;
    let now_us = seconds * 1_000_000 + us;
    let fields: Vec<(Vec<u8>, Vec<u8>)> = from_redis_value(all).map_err(|_| StoreError::Malformed)?;
    let record = |(field, value): (Vec<u8>, Vec<u8>)| {
        let record = Record::parse(String::from_utf8(field).ok()?, std::str::from_utf8(&value).ok()?)?;
        (now_us < record.kept_us).then_some(record)
    };
    Ok(Snapshot { now_us, records: fields.into_iter().filter_map(record).collect() })
}

impl Record {
    /// Parse `EXPIRY REVISION KEPT TEXT`, or `EXPIRY TEXT`, which has no revision.
    fn parse(field: String, value: &str) -> Option<Self> {
        let (expiry, rest) = value.split_once(' ')?;
        let expiry_us = expiry.parse().ok()?;
        let numbers = || {
            let (revision, rest) = rest.split_once(' ')?;
            let (kept, text) = rest.split_once(' ')?;
            Some((revision.parse().ok()?, kept.parse().ok()?, text))
        };
        let (revision, kept_us, text) = numbers().unwrap_or((0, expiry_us, rest));
        Some(Record { field, text: text.to_owned(), revision, expiry_us, kept_us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_with_and_without_a_revision_are_read() {
        let parse = |value| Record::parse("f".to_owned(), value).map(|r| (r.expiry_us, r.revision, r.kept_us, r.text));
        assert_eq!(parse("9 5 12 {\"quota\":\"1/s\"}"), Some((9, 5, 12, "{\"quota\":\"1/s\"}".to_owned())));
        assert_eq!(parse("9 {\"quota\":\"1/s\", \"note\": \"3 4 x\"}").unwrap().1, 0);
        assert_eq!(parse("9 {}"), Some((9, 0, 9, "{}".to_owned())));
        assert_eq!(parse("9 "), Some((9, 0, 9, String::new())), "a reset without a revision");
        assert_eq!(parse("0 5 12 "), Some((0, 5, 12, String::new())), "a removed override");
        for wrong in ["", "9", "x 1 2 3", "{}"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
