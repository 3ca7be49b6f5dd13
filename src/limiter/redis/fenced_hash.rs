//! A Redis hash that only the holder of its lock can change, protected by fencing tokens: the commands and their
//! replies.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::{Cmd, Value, from_redis_value};

use crate::limiter::verdict::StoreError;

const SCRIPT: &str = include_str!("../../../lua/fenced_hash.lua");

/// The fields of a Redis hash and their values.
pub type Fields = BTreeMap<String, Vec<u8>>;

/// Return the command that reads all fields if the version is not `known_version`. 0: no version is known.
pub fn read_command(key: &str, known_version: u64) -> Cmd {
    command(key, "read", known_version)
}

/// Return the command that acquires or renews the lock. The reply is a fencing token, or 0 if another owner holds the
/// lock.
pub fn lock_command(key: &str, owner: &str, ttl: Duration) -> Cmd {
    let mut command = command(key, "lock", owner);
    command.arg(ttl.as_micros() as u64);
    command
}

/// Return the command that releases the lock. The reply is 1, or 0 if the lock has another token.
pub fn unlock_command(key: &str, token: u64) -> Cmd {
    command(key, "unlock", token)
}

/// Return the command that writes a field, or removes the field if the value is empty. The reply is the same as for
/// [`unlock_command`].
pub fn write_command(key: &str, token: u64, field: &str, value: &[u8]) -> Cmd {
    let mut command = command(key, "write", token);
    command.arg(field).arg(value);
    command
}

fn command(key: &str, operation: &str, argument: impl redis::ToRedisArgs) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(SCRIPT).arg(1).arg(key).arg(operation).arg(argument);
    command
}

/// Parse the reply to [`read_command`]: the version, and the fields if the version differs from the known one.
///
/// # Errors
/// The reply is malformed.
pub fn parse_read_reply(reply: Value, known_version: u64) -> Result<(u64, Option<Fields>), StoreError> {
    let Value::Array(items) = reply else { return Err(StoreError::MalformedReply) };
    let mut items = items.into_iter();
    let mut next = || items.next().map(from_redis_value::<Vec<u8>>).transpose().map_err(|_| StoreError::MalformedReply);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| StoreError::MalformedReply);
    let version = text(next()?.ok_or(StoreError::MalformedReply)?)?.parse().map_err(|_| StoreError::MalformedReply)?;
    let mut fields = Fields::new();
    while let Some(field) = next()? {
        fields.insert(text(field)?, next()?.ok_or(StoreError::MalformedReply)?);
    }
    Ok((version, (version != known_version || version == 0).then_some(fields)))
}

/// Parse the reply to the other commands.
///
/// # Errors
/// The reply is malformed.
pub fn parse_number(reply: Value) -> Result<u64, StoreError> {
    from_redis_value(reply).map_err(|_| StoreError::MalformedReply)
}
