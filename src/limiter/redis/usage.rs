//! Usage totals in Redis: the commands that add to them and read them, and their replies.

use redis::{Cmd, Value, from_redis_value};

use crate::limiter::usage::{MAX_MODELS, RETENTION_DAYS, UsageAmount, UsageKey, UsagePost};
use crate::limiter::verdict::StoreError;

const SCRIPT: &str = include_str!("../../../lua/usage.lua");

/// Number of keys that Redis examines in one call of SCAN.
const SCAN_COUNT: u64 = 1000;

/// Return the command that adds a post to the totals. The reply is 1, or 0 if the post was added before.
pub fn post_command(prefix: &str, post: &UsagePost) -> Cmd {
    let UsagePost { key, amounts, poster, sequence } = post;
    let ttl_ms = i64::from(RETENTION_DAYS) * 86_400_000;
    let mut command = redis::cmd("EVAL");
    command.arg(SCRIPT).arg(1).arg(key.to_redis_key(prefix)).arg(format!("{poster:016x}")).arg(*sequence).arg(ttl_ms);
    command.arg(MAX_MODELS);
    for UsageAmount { day, model, cost } in amounts {
        match model {
            Some(model) => command.arg(format!("{day} {model}")).arg(*cost),
            None => command.arg(*day).arg(*cost),
        };
    }
    command
}

/// Return the command that lists keys of totals, starting at a cursor. The first and the last cursor is 0.
pub fn scan_command(prefix: &str, cursor: u64) -> Cmd {
    let is_special = |character| matches!(character, '*' | '?' | '[' | ']' | '\\');
    let escaped = prefix.chars().flat_map(|one| is_special(one).then_some('\\').into_iter().chain([one]));
    let pattern: String = escaped.chain(":{*}:*:usage:*".chars()).collect();
    let mut command = redis::cmd("SCAN");
    command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_COUNT);
    command
}

/// Parse the reply to [`scan_command`]: the next cursor and keys.
///
/// # Errors
/// The reply is malformed.
pub fn parse_scan_reply(prefix: &str, reply: Value) -> Result<(u64, Vec<UsageKey>), StoreError> {
    let reply: (u64, Vec<Vec<u8>>) = from_redis_value(reply).map_err(|_| StoreError::MalformedReply)?;
    let (cursor, keys) = reply;
    Ok((cursor, keys.iter().filter_map(|key| UsageKey::parse(prefix, key)).collect()))
}

/// Return the command that reads the totals of a month.
pub fn read_command(prefix: &str, key: &UsageKey) -> Cmd {
    let mut command = redis::cmd("HGETALL");
    command.arg(key.to_redis_key(prefix));
    command
}

/// Parse the reply to [`read_command`]: totals by day, or by day and model.
///
/// # Errors
/// The reply is malformed.
pub fn parse_read_reply(reply: Value) -> Result<Vec<UsageAmount>, StoreError> {
    let fields: Vec<(String, String)> = from_redis_value(reply).map_err(|_| StoreError::MalformedReply)?;
    let totals = fields.iter().filter(|(field, _)| !field.starts_with('.'));
    let parse = |(field, total): &(String, String)| {
        let (day, model) = match field.split_once(' ') {
            Some((day, model)) => (day, Some(model.into())),
            None => (&**field, None),
        };
        Some(UsageAmount { day: day.parse().ok()?, model, cost: total.parse().ok()? })
    };
    totals.map(parse).collect::<Option<_>>().ok_or(StoreError::MalformedReply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_of_posts_are_no_totals() {
        let reply = |text: &[u8]| parse_read_reply(redis::parse_redis_value(text).unwrap());
        let totals = reply(b"*4\r\n$2\r\n23\r\n$2\r\n-5\r\n$3\r\n.ab\r\n$1\r\n7\r\n").unwrap();
        assert_eq!(totals, [UsageAmount { day: 23, model: None, cost: -5 }]);
        let totals = reply(b"*2\r\n$6\r\n23 a b\r\n$1\r\n5\r\n").unwrap();
        assert_eq!(totals, [UsageAmount { day: 23, model: Some("a b".into()), cost: 5 }]);
        assert!(reply(b"*2\r\n$1\r\nx\r\n$1\r\n7\r\n").is_err());
        assert!(reply(b"+OK\r\n").is_err());
    }
}
