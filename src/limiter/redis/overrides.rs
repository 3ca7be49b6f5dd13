//! Overrides and resets in the form in which Redis stores them for all gateways: fields of one hash, each with an
//! expiry and a revision.

use std::time::Duration;

use redis::{Cmd, Value, from_redis_value};

use crate::limiter::verdict::StoreError;

const OVERRIDES_SCRIPT: &str = include_str!("../../../lua/overrides.lua");

/// Arguments of the script for one record: `FIELD`, `NUMBER`, `KEEP_UNTIL`, `REVISION` and `TEXT` (see
/// `lua/overrides.lua`).
type EntryArguments<'a> = (&'a str, u64, u64, u64, &'a str);

/// One field of the Redis hash of overrides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverrideEntry {
    /// Name of the field, which contains the kind, the limit and the identity of the record.
    pub key: String,
    /// The override as JSON. Empty for a reset and for a removed override.
    pub value: String,
    /// Revision of the record: the time of the write in µs, but always greater than the revision of the record that it
    /// replaced. 0 if the stored value has no revision.
    pub revision: u64,
    /// Instant until which the record is active, in µs since the Unix epoch by Redis' clock. For a removed override,
    /// the value is 0.
    pub expires_at_us: u64,
    /// Instant until which Redis keeps the record, in µs since the Unix epoch. Until then, no gateway can restore an
    /// older record that this record has replaced.
    pub keep_until_us: u64,
}

/// Records, and the time of Redis at which they were read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Time of Redis, µs since the Unix epoch.
    pub now_us: u64,
    /// Records whose `keep_until_us` has not passed.
    pub entries: Vec<OverrideEntry>,
}

/// The newest record of a field that the writing gateway knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KnownRevision {
    /// Revision of the record. 0: the revision is unknown.
    pub revision: u64,
    /// Time until which Redis keeps the record, as in [`OverrideEntry::keep_until_us`].
    pub keep_until_us: u64,
    /// Whether the record is active.
    pub is_in_force: bool,
}

/// Return the key of the hash that contains the overrides.
pub fn hash_key(prefix: &str) -> String {
    format!("{prefix}:overrides")
}

/// A write of one field of the overrides hash. Redis gives the record a revision that is greater than both the revision
/// that this gateway knows and the revision that Redis has.
#[derive(Debug, Clone, Copy)]
pub struct OverrideWrite<'a> {
    /// Name of the field, which contains the kind, the limit and the identity of the record.
    pub field: &'a str,
    /// The state of the field as this gateway knows it.
    pub known: KnownRevision,
    /// Text and TTL of the new record, or `None` to remove the record.
    pub record: Option<(&'a str, Duration)>,
}

impl OverrideWrite<'_> {
    /// Return the command that writes the field of the hash at `key`.
    pub fn command(&self, key: &str, max_records: usize) -> Cmd {
        let KnownRevision { revision, keep_until_us, is_in_force } = self.known;
        let (operation, number, value) = match self.record {
            Some((value, ttl)) => ("set", ttl.as_micros() as u64, value),
            None => ("remove", u64::from(is_in_force), ""),
        };
        overrides_command(key, operation, max_records, [(self.field, number, keep_until_us, revision, value)])
    }

    /// Parse the reply: the status and, if the record was written, the record that Redis now has.
    ///
    /// # Errors
    /// The reply is malformed.
    pub fn parse_reply(&self, reply: Value) -> Result<(WriteStatus, Option<Snapshot>), StoreError> {
        let (status, now_us, expires_at_us, revision, keep_until_us) =
            from_redis_value::<(i64, u64, u64, u64, u64)>(reply).map_err(|_| StoreError::MalformedReply)?;
        let status = WriteStatus::from_status(status)?;
        let value = self.record.map_or("", |(value, _)| value).to_owned();
        let record = OverrideEntry { key: self.field.to_owned(), value, revision, expires_at_us, keep_until_us };
        Ok((status, (status == WriteStatus::Written).then(|| Snapshot { now_us, entries: vec![record] })))
    }
}

/// Return the command that restores records that Redis has lost. Redis replaces a stored record only if the stored
/// record is older than the record to restore. [`parse_restore_reply`] parses the reply.
pub fn restore_command(key: &str, records: &[OverrideEntry], max_entries: usize) -> Cmd {
    let arguments = records.iter().map(|record| {
        let OverrideEntry { key: field, value: text, revision, expires_at_us: expiry_us, keep_until_us: kept_us } =
            record;
        (&**field, *expiry_us, *kept_us, *revision, &**text)
    });
    overrides_command(key, "restore", max_entries, arguments)
}

fn overrides_command<'a>(
    key: &str,
    operation: &str,
    max_entries: usize,
    records: impl IntoIterator<Item = EntryArguments<'a>>,
) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(OVERRIDES_SCRIPT).arg(1).arg(key).arg(operation).arg(max_entries);
    for (field, expiry_us, kept_us, revision, text) in records {
        command.arg(field).arg(expiry_us).arg(kept_us).arg(revision).arg(text);
    }
    command
}

/// Result of writing an override.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteStatus {
    /// The record is written.
    Written,
    /// Redis had no record to remove, or had the same or a newer record.
    Unchanged,
    /// The maximum number of records is reached.
    TooMany,
}

impl WriteStatus {
    fn from_status(status: i64) -> Result<Self, StoreError> {
        match status {
            1 => Ok(WriteStatus::Written),
            0 => Ok(WriteStatus::Unchanged),
            -1 => Ok(WriteStatus::TooMany),
            _ => Err(StoreError::MalformedReply),
        }
    }
}

/// Parse the reply to [`restore_command`]: a status for each record.
///
/// # Errors
/// The reply is malformed.
pub fn parse_restore_reply(reply: Value) -> Result<Vec<WriteStatus>, StoreError> {
    let statuses: Vec<i64> = from_redis_value(reply).map_err(|_| StoreError::MalformedReply)?;
    statuses.into_iter().map(WriteStatus::from_status).collect()
}

/// Return the command that reads the time for [`parse_snapshot`].
pub fn time_command() -> Cmd {
    redis::cmd("TIME")
}

/// Return the command that reads all fields.
pub fn read_command(key: &str) -> Cmd {
    let mut command = redis::cmd("HGETALL");
    command.arg(key);
    command
}

/// Parse the replies to [`time_command`] and [`read_command`]. Fields and values with an unknown format are skipped,
/// and so are records whose `keep_until_us` has passed.
///
/// # Errors
/// The replies are malformed.
pub fn parse_snapshot(time: Value, hash_reply: Value) -> Result<Snapshot, StoreError> {
    let (seconds, micros): (u64, u64) = from_redis_value(time).map_err(|_| StoreError::MalformedReply)?;
    let now_us = seconds * 1_000_000 + micros;
    let fields: Vec<(Vec<u8>, Vec<u8>)> = from_redis_value(hash_reply).map_err(|_| StoreError::MalformedReply)?;
    let record = |(field, value): (Vec<u8>, Vec<u8>)| {
        let record = OverrideEntry::parse(String::from_utf8(field).ok()?, std::str::from_utf8(&value).ok()?)?;
        (now_us < record.keep_until_us).then_some(record)
    };
    Ok(Snapshot { now_us, entries: fields.into_iter().filter_map(record).collect() })
}

impl OverrideEntry {
    /// Parse `EXPIRES_AT REVISION KEEP_UNTIL TEXT`, or `EXPIRES_AT TEXT`, which has no revision.
    fn parse(field: String, value: &str) -> Option<Self> {
        let (expiry, rest) = value.split_once(' ')?;
        let expiry_us = expiry.parse().ok()?;
        let numbers = || {
            let (revision, rest) = rest.split_once(' ')?;
            let (keep_until, text) = rest.split_once(' ')?;
            Some((revision.parse().ok()?, keep_until.parse().ok()?, text))
        };
        let (revision, kept_us, text) = numbers().unwrap_or((0, expiry_us, rest));
        Some(OverrideEntry {
            key: field,
            value: text.to_owned(),
            revision,
            expires_at_us: expiry_us,
            keep_until_us: kept_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_parse_with_and_without_a_revision() {
        let parse = |value| {
            OverrideEntry::parse("f".to_owned(), value).map(|r| (r.expires_at_us, r.revision, r.keep_until_us, r.value))
        };
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
