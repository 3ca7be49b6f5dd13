//! Redis commands that run the Lua scripts for usage totals, quota events and shared records, and parsers of the
//! replies.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::{Cmd, Value, from_redis_value};

use crate::limiter::key::{Identity, Key, StateName};
use crate::limiter::usage::{MAX_MODELS, RETENTION_DAYS, UsageAmount, UsageKey, UsagePost};
use crate::limiter::verdict::StoreError;

const USAGE_SCRIPT: &str = include_str!("../../../lua/usage.lua");

/// Number of keys that Redis examines in one call of SCAN.
const SCAN_COUNT: u64 = 1000;

/// Return the command that adds a [`UsagePost`] to the usage totals. The reply is 1, or 0 if Redis had already added
/// the post.
pub fn post_usage_command(prefix: &str, post: &UsagePost) -> Cmd {
    let UsagePost { key, amounts, poster, sequence } = post;
    let ttl_ms = i64::from(RETENTION_DAYS) * 86_400_000;
    let mut command = redis::cmd("EVAL");
    command
        .arg(USAGE_SCRIPT)
        .arg(1)
        .arg(key.to_redis_key(prefix))
        .arg(format!("{poster:016x}"))
        .arg(*sequence)
        .arg(ttl_ms);
    command.arg(MAX_MODELS);
    for UsageAmount { day, name, cost } in amounts {
        match name {
            Some(name) => command.arg(format!("{day} {name}")).arg(*cost),
            None => command.arg(*day).arg(*cost),
        };
    }
    command
}

/// Return the command that lists keys of usage totals, starting at a SCAN cursor. A scan starts with cursor 0, and ends
/// when the reply contains cursor 0.
pub fn scan_usage_command(prefix: &str, cursor: u64) -> Cmd {
    let is_special = |character| matches!(character, '*' | '?' | '[' | ']' | '\\');
    let escaped = prefix.chars().flat_map(|one| is_special(one).then_some('\\').into_iter().chain([one]));
    let pattern: String = escaped.chain(":{*}:*:usage:*".chars()).collect();
    let mut command = redis::cmd("SCAN");
    command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_COUNT);
    command
}

/// Parse the reply to [`scan_usage_command`]: the next cursor and keys.
///
/// # Errors
/// The reply is malformed.
pub fn parse_usage_scan_reply(prefix: &str, reply: Value) -> Result<(u64, Vec<UsageKey>), StoreError> {
    let reply: (u64, Vec<Vec<u8>>) = from_redis_value(reply).map_err(|_| StoreError::MalformedReply)?;
    let (cursor, keys) = reply;
    Ok((cursor, keys.iter().filter_map(|key| UsageKey::parse(prefix, key)).collect()))
}

/// Return the command that reads the usage totals of a month.
pub fn read_usage_command(prefix: &str, key: &UsageKey) -> Cmd {
    let mut command = redis::cmd("HGETALL");
    command.arg(key.to_redis_key(prefix));
    command
}

/// Parse the reply to [`read_usage_command`]: totals by day, or by day and model or kind of token.
///
/// # Errors
/// The reply is malformed.
pub fn parse_usage_reply(reply: Value) -> Result<Vec<UsageAmount>, StoreError> {
    let fields: Vec<(String, String)> = from_redis_value(reply).map_err(|_| StoreError::MalformedReply)?;
    let totals = fields.iter().filter(|(field, _)| !field.starts_with('.'));
    let parse = |(field, total): &(String, String)| {
        let (day, name) = match field.split_once(' ') {
            Some((day, name)) => (day, Some(name.into())),
            None => (&**field, None),
        };
        Some(UsageAmount { day: day.parse().ok()?, name, cost: total.parse().ok()? })
    };
    totals.map(parse).collect::<Option<_>>().ok_or(StoreError::MalformedReply)
}

// === States of an identity ===

const DELETE_STATES_SCRIPT: &str = include_str!("../../../lua/delete_states.lua");

/// Return the command that deletes states of an identity, wherever they are. The reply is 1 if a state existed, and
/// otherwise 0.
pub fn delete_states_command(prefix: &str, identity: Identity, states: &[&StateName]) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(DELETE_STATES_SCRIPT).arg(1 + states.len());
    let mut key = Vec::new();
    identity.write_key(prefix, &mut key);
    command.arg(&key);
    for state_name in states {
        key.clear();
        Key { identity, state_name }.write(prefix, &mut key);
        command.arg(&key);
    }
    command.arg(states.iter().flat_map(|state| (state.id() as f64).to_le_bytes()).collect::<Vec<_>>());
    command
}

// === Shared records: a hash that only the holder of its lock can change, protected by fencing tokens ===

const FENCED_HASH_SCRIPT: &str = include_str!("../../../lua/fenced_hash.lua");

/// The fields of a Redis hash and their values.
pub type Fields = BTreeMap<String, Vec<u8>>;

/// Return the command that reads the version of a fenced hash and, if the version is not `known_version`, all fields.
/// Pass 0 if no version is known.
pub fn read_hash_command(key: &str, known_version: u64) -> Cmd {
    command(key, "read", known_version)
}

/// Return the command that acquires or renews the lock. The reply is a fencing token, or 0 if another owner holds the
/// lock.
pub fn lock_hash_command(key: &str, owner: &str, ttl: Duration) -> Cmd {
    let mut command = command(key, "lock", owner);
    command.arg(ttl.as_micros() as u64);
    command
}

/// Return the command that releases the lock. The reply is 1, or 0 if `token` is not the token of the last lock.
pub fn unlock_hash_command(key: &str, token: u64) -> Cmd {
    command(key, "unlock", token)
}

/// Return the command that writes a field, or removes the field if the value is empty. The reply is 1, or 0 if `token`
/// is not the token of the last lock.
pub fn write_hash_command(key: &str, token: u64, field: &str, value: &[u8]) -> Cmd {
    let mut command = command(key, "write", token);
    command.arg(field).arg(value);
    command
}

fn command(key: &str, operation: &str, argument: impl redis::ToRedisArgs) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(FENCED_HASH_SCRIPT).arg(1).arg(key).arg(operation).arg(argument);
    command
}

/// Parse the reply to [`read_hash_command`]: the version, and the fields if the version differs from the known one.
///
/// # Errors
/// The reply is malformed.
pub fn parse_hash_reply(reply: Value, known_version: u64) -> Result<(u64, Option<Fields>), StoreError> {
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

/// Parse the reply to a command that replies with a number.
///
/// # Errors
/// The reply is malformed.
pub fn parse_number(reply: Value) -> Result<u64, StoreError> {
    from_redis_value(reply).map_err(|_| StoreError::MalformedReply)
}

// === The gateways that share the store ===

const GATEWAYS_SCRIPT: &str = include_str!("../../../lua/gateways.lua");

/// Return the command that counts a gateway until `ttl` has passed, or no longer if `ttl` is zero. The reply is the
/// number of gateways, and the number of those whose ids have no suffix.
pub fn count_gateways_command(key: &str, id: &str, ttl: Duration) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(GATEWAYS_SCRIPT).arg(1).arg(key).arg(id).arg(ttl.as_micros() as u64);
    command
}

// === Claims of quota events: one of several gateways sends an event ===

const EVENT_CLAIM_SCRIPT: &str = include_str!("../../../lua/event_claim.lua");

/// The claim with which one of several gateways gets the right to send an event.
#[derive(Debug)]
pub struct EventClaim<'a> {
    /// Key of the claim, without the prefix of the store.
    pub key: &'a str,
    /// Id of the event.
    pub id: &'a str,
    /// Time for which no other event can get the claim.
    pub ttl: Duration,
    /// The stream to which the event is added. `None` if the event is not added to a stream.
    pub entry: Option<StreamEntry<'a>>,
}

/// An entry of a stream.
#[derive(Debug)]
pub struct StreamEntry<'a> {
    /// Key of the stream. The hash tag of the claim is the name of the stream, so both keys are in one slot.
    pub stream: &'a str,
    /// Approximate number of entries to keep.
    pub max_length: u64,
    /// The event as JSON.
    pub body: &'a [u8],
}

/// Return the command that claims an event. The reply is 1, or 0 if another event has the claim.
pub fn claim_event_command(key: &str, claim: &EventClaim<'_>) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(EVENT_CLAIM_SCRIPT).arg(1 + usize::from(claim.entry.is_some())).arg(key);
    if let Some(entry) = &claim.entry {
        command.arg(entry.stream);
    }
    command.arg(claim.id).arg(claim.ttl.as_millis().max(1) as u64);
    if let Some(entry) = &claim.entry {
        command.arg(entry.max_length).arg(entry.body);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_of_posts_are_no_totals() {
        let reply = |text: &[u8]| parse_usage_reply(redis::parse_redis_value(text).unwrap());
        let totals = reply(b"*4\r\n$2\r\n23\r\n$2\r\n-5\r\n$3\r\n.ab\r\n$1\r\n7\r\n").unwrap();
        assert_eq!(totals, [UsageAmount { day: 23, name: None, cost: -5 }]);
        let totals = reply(b"*2\r\n$6\r\n23 a b\r\n$1\r\n5\r\n").unwrap();
        assert_eq!(totals, [UsageAmount { day: 23, name: Some("a b".into()), cost: 5 }]);
        assert!(reply(b"*2\r\n$1\r\nx\r\n$1\r\n7\r\n").is_err());
        assert!(reply(b"+OK\r\n").is_err());
    }
}
