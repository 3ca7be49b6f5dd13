//! The keys of the limits: each must expire. The search is bounded and says how far it came.

use redis::Value;
use redis::aio::ConnectionLike;
use tokio::time::Duration;

use super::line::{CallError, DiagnosticConnection};
use super::memory::database_key_count;
use super::{Check, RedisServer, Status};
use crate::limit::clock::monotonic;
use crate::words::pluralize;

/// Keys of the database that a call looks at.
const SCAN_COUNT: u64 = 1000;
/// Calls: 100,000 keys in all.
const MAX_SCAN_CALLS: u64 = 100;
/// And no longer than this.
const SCAN_TIMEOUT: Duration = Duration::from_secs(3);
/// Keys whose size is asked for.
const SIZE_SAMPLE_KEYS: usize = 50;
/// Keys that are named in the report.
const MAX_NAMED_KEYS: usize = 3;

#[derive(Default)]
struct KeyStatistics {
    key_count: u64,
    without_ttl: u64,
    examples: Vec<String>,
    sizes_bytes: Vec<u64>,
}

pub(super) async fn check_keys(
    connection: &mut DiagnosticConnection,
    server: &RedisServer,
    prefix: &str,
) -> Result<Check, CallError> {
    let pattern = format!("{}:*", escape_glob(prefix));
    // Of a pipeline it would not be known which right is missing.
    connection.call::<Value>(redis::cmd("PTTL").arg(server.probe_key(prefix))).await?;
    let started_at = monotonic();
    let (mut cursor, mut steps, mut statistics) = (0, 0, KeyStatistics::default());
    let is_complete = loop {
        let mut scan = redis::cmd("SCAN");
        let (next, keys): (u64, Vec<Vec<u8>>) =
            connection.call(scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCAN_COUNT)).await?;
        (cursor, steps) = (next, steps + 1);
        inspect_keys(connection, &keys, &mut statistics).await?;
        if cursor == 0 || steps == MAX_SCAN_CALLS || started_at.elapsed() > SCAN_TIMEOUT {
            break cursor == 0;
        }
    };
    let total = match connection.info("keyspace").await {
        Ok(info) => format!(" ({})", pluralize(database_key_count(&info, connection.multiplexed.get_db()), "key")),
        Err(CallError::ErrorReply(_)) => String::new(),
        Err(error) => return Err(error),
    };
    let coverage = if is_complete {
        format!("the whole database{total} was looked at")
    } else {
        format!("about {} keys of the database{total} were looked at", steps * SCAN_COUNT)
    };
    statistics.sizes_bytes.sort_unstable();
    let size = statistics
        .sizes_bytes
        .get(statistics.sizes_bytes.len() / 2)
        .map_or(String::new(), |bytes| format!(" of about {bytes} bytes"));
    let KeyStatistics { key_count, without_ttl, examples, .. } = statistics;
    let summary =
        format!("{} under {prefix}:{size}, {without_ttl} without a TTL; {coverage}", pluralize(key_count, "key"));
    let check = Check::ok("keys", summary.clone());
    Ok(if without_ttl > 0 {
        let found = format!("{summary}; such as {}", examples.join(", "));
        let advice = "the gateway never writes such keys, and they never go: find out who does, delete them, or choose another store.prefix";
        Check { message: found, ..check }.with_status(Status::Failed).with_advice(advice)
    } else {
        check
    })
}

async fn inspect_keys(
    connection: &mut DiagnosticConnection,
    keys: &[Vec<u8>],
    statistics: &mut KeyStatistics,
) -> Result<(), CallError> {
    if keys.is_empty() {
        return Ok(());
    }
    let mut pipeline = redis::pipe();
    for key in keys {
        pipeline.cmd("PTTL").arg(key);
    }
    let ttls: Vec<i64> =
        pipeline.query_async(&mut connection.multiplexed).await.map_err(|error| connection.classify_error(error))?;
    statistics.key_count += keys.len() as u64;
    // -1 is a key without a TTL, -2 one that has gone meanwhile.
    for (key, _) in keys.iter().zip(ttls).filter(|(_, ttl)| *ttl == -1) {
        statistics.without_ttl += 1;
        if statistics.examples.len() < MAX_NAMED_KEYS {
            statistics.examples.push(String::from_utf8_lossy(key).into_owned());
        }
    }
    for key in keys.iter().take(SIZE_SAMPLE_KEYS.saturating_sub(statistics.sizes_bytes.len())) {
        match connection.call::<Option<u64>>(redis::cmd("MEMORY").arg("USAGE").arg(key)).await {
            Ok(bytes) => statistics.sizes_bytes.extend(bytes),
            // A figure less.
            Err(CallError::ErrorReply(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A pattern that matches exactly this text.
fn escape_glob(text: &str) -> String {
    let is_special = |character| matches!(character, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|character| is_special(character).then_some('\\').into_iter().chain([character])).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn escape_glob_escapes_metacharacters() {
        for (text, expected) in [("rl", "rl"), ("a*b?", "a\\*b\\?"), ("[x]\\", "\\[x\\]\\\\")] {
            assert_eq!(super::escape_glob(text), expected);
        }
    }
}
