//! The keys of the limits: each must expire. The search is bounded and says how far it came.

use redis::Value;
use redis::aio::ConnectionLike;
use tokio::time::Duration;

use super::line::{Failure, Line};
use super::memory::keys_of;
use super::{Check, Server, Status};
use crate::limit::clock::monotonic;
use crate::words::pluralize;

/// Keys of the database that a call looks at.
const STEP: u64 = 1000;
/// Calls: 100,000 keys in all.
const STEPS: u64 = 100;
/// And no longer than this.
const BOUND: Duration = Duration::from_secs(3);
/// Keys whose size is asked for.
const SAMPLE: usize = 50;
/// Keys that are named in the report.
const NAMED: usize = 3;

#[derive(Default)]
struct Found {
    ours: u64,
    without_ttl: u64,
    named: Vec<String>,
    bytes: Vec<u64>,
}

pub(super) async fn keys(line: &mut Line, server: &Server, prefix: &str) -> Result<Check, Failure> {
    let pattern = format!("{}:*", literal(prefix));
    // Of a pipeline it would not be known which right is missing.
    line.ask::<Value>(redis::cmd("PTTL").arg(server.key(prefix))).await?;
    let started = monotonic();
    let (mut cursor, mut steps, mut found) = (0, 0, Found::default());
    let complete = loop {
        let mut scan = redis::cmd("SCAN");
        let (next, keys): (u64, Vec<Vec<u8>>) =
            line.ask(scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(STEP)).await?;
        (cursor, steps) = (next, steps + 1);
        look(line, &keys, &mut found).await?;
        if cursor == 0 || steps == STEPS || started.elapsed() > BOUND {
            break cursor == 0;
        }
    };
    let total = match line.info("keyspace").await {
        Ok(info) => format!(" ({})", pluralize(keys_of(&info, line.pipe.get_db()), "key")),
        Err(Failure::Refused(_)) => String::new(),
        Err(lost) => return Err(lost),
    };
    let extent = if complete {
        format!("the whole database{total} was looked at")
    } else {
        format!("about {} keys of the database{total} were looked at", steps * STEP)
    };
    found.bytes.sort_unstable();
    let size = found.bytes.get(found.bytes.len() / 2).map_or(String::new(), |bytes| format!(" of about {bytes} bytes"));
    let Found { ours, without_ttl, named, .. } = found;
    let summary = format!("{} under {prefix}:{size}, {without_ttl} without a TTL; {extent}", pluralize(ours, "key"));
    let check = Check::ok("keys", summary.clone());
    Ok(if without_ttl > 0 {
        let found = format!("{summary}; such as {}", named.join(", "));
        let advice = "the gateway never writes such keys, and they never go: find out who does, delete them, or choose another store.prefix";
        Check { message: found, ..check }.or(Status::Failed).advise(advice)
    } else {
        check
    })
}

async fn look(line: &mut Line, keys: &[Vec<u8>], found: &mut Found) -> Result<(), Failure> {
    if keys.is_empty() {
        return Ok(());
    }
    let mut pipeline = redis::pipe();
    for key in keys {
        pipeline.cmd("PTTL").arg(key);
    }
    let ttls: Vec<i64> = pipeline.query_async(&mut line.pipe).await.map_err(|error| line.failure(error))?;
    found.ours += keys.len() as u64;
    // -1 is a key without a TTL, -2 one that has gone meanwhile.
    for (key, _) in keys.iter().zip(ttls).filter(|(_, ttl)| *ttl == -1) {
        found.without_ttl += 1;
        if found.named.len() < NAMED {
            found.named.push(String::from_utf8_lossy(key).into_owned());
        }
    }
    for key in keys.iter().take(SAMPLE.saturating_sub(found.bytes.len())) {
        match line.ask::<Option<u64>>(redis::cmd("MEMORY").arg("USAGE").arg(key)).await {
            Ok(bytes) => found.bytes.extend(bytes),
            // A figure less.
            Err(Failure::Refused(_)) => break,
            Err(lost) => return Err(lost),
        }
    }
    Ok(())
}

/// A pattern that matches exactly this text.
fn literal(text: &str) -> String {
    let special = |character| matches!(character, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|character| special(character).then_some('\\').into_iter().chain([character])).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_prefix_is_no_pattern() {
        for (text, expected) in [("rl", "rl"), ("a*b?", "a\\*b\\?"), ("[x]\\", "\\[x\\]\\\\")] {
            assert_eq!(super::literal(text), expected);
        }
    }
}
