//! The memory of the server: how much is left, and what it does when there is none.

use super::line::{Failure, Info, Line};
use super::{Check, Status};
use crate::words::pluralize;

pub(super) async fn memory(line: &mut Line) -> Result<Check, Failure> {
    let info = line.info("memory").await?;
    let used = info.number("used_memory").unwrap_or(0);
    Ok(match info.number("maxmemory").unwrap_or(0) {
        0 => Check::ok("memory", format!("{} used; no maxmemory", mib(used)))
            .advise("set maxmemory, so that Redis refuses before the machine runs out"),
        most => {
            let percent = used.saturating_mul(100) / most;
            let check = Check::ok("memory", format!("{} of {} used ({percent} %)", mib(used), mib(most)));
            if percent >= 80 {
                check
                    .or(Status::Warning)
                    .advise("raise maxmemory: a full Redis admits nobody whose state it would have to write")
            } else {
                check
            }
        }
    })
}

/// What Redis does when its memory is full: every limit's state has a TTL, so each policy but `noeviction` may take it.
pub(super) async fn policy(line: &mut Line) -> Result<Check, Failure> {
    let info = match line.info("memory").await {
        Err(Failure::Refused(_)) => return by_config(line).await,
        info => info?,
    };
    match (info.text("maxmemory_policy"), info.number("maxmemory")) {
        (Some(policy), Some(most)) => Ok(judge(policy, most)),
        _ => by_config(line).await,
    }
}

async fn by_config(line: &mut Line) -> Result<Check, Failure> {
    let mut get = redis::cmd("CONFIG");
    let pairs: Vec<(String, String)> = line.ask(get.arg("GET").arg("maxmemory*")).await?;
    let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let most = value("maxmemory").and_then(|most| most.parse().ok()).unwrap_or(0);
    Ok(judge(value("maxmemory-policy").unwrap_or("unknown"), most))
}

fn judge(policy: &str, most: u64) -> Check {
    let check = Check::ok("policy", policy);
    if policy == "noeviction" {
        return check;
    }
    let advice = "limits want noeviction, on an instance of their own: CONFIG SET maxmemory-policy noeviction";
    if most == 0 {
        let found = format!("{policy}, which evicts nothing while there is no maxmemory");
        return Check { message: found, ..check }.or(Status::Warning).advise(advice);
    }
    let why = match policy {
        "volatile-ttl" => "takes what expires soonest first, which is short limits",
        "volatile-lru" | "volatile-lfu" | "volatile-random" => "takes keys with a TTL, which all limits have",
        _ => "takes any key",
    };
    let found = format!("{policy} with maxmemory {}: it {why}, and whose limit is evicted has a fresh one", mib(most));
    Check { message: found, ..check }.or(Status::Failed).advise(advice)
}

pub(super) async fn evictions(line: &mut Line) -> Result<Check, Failure> {
    let info = line.info("stats").await?;
    let evicted = info.number("evicted_keys").unwrap_or(0);
    let check = Check::ok(
        "evictions",
        format!("{} evicted since the start of the server or CONFIG RESETSTAT", pluralize(evicted, "key")),
    );
    Ok(if evicted > 0 {
        let advice = "limits may have been among them: raise maxmemory or set noeviction, then CONFIG RESETSTAT";
        check.or(Status::Warning).advise(advice)
    } else {
        check
    })
}

/// How many keys a database has.
pub(super) fn keys_of(info: &Info, database: i64) -> u64 {
    let counted = info.text(&format!("db{database}")).and_then(|figures| figures.strip_prefix("keys="));
    counted.and_then(|figures| figures.split(',').next()?.parse().ok()).unwrap_or(0)
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
