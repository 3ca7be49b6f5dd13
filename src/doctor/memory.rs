//! The memory of the server: how much is left, and what it does when there is none.

use super::line::{CallError, DiagnosticConnection, InfoSection};
use super::{Check, Status};
use crate::words::pluralize;

pub(super) async fn check_memory(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let info = connection.info("memory").await?;
    let used = info.number("used_memory").unwrap_or(0);
    Ok(match info.number("maxmemory").unwrap_or(0) {
        0 => Check::ok("memory", format!("{} used; no maxmemory", format_mib(used)))
            .with_advice("set maxmemory, so that Redis refuses before the machine runs out"),
        max_bytes => {
            let percent = used.saturating_mul(100) / max_bytes;
            let check =
                Check::ok("memory", format!("{} of {} used ({percent} %)", format_mib(used), format_mib(max_bytes)));
            if percent >= 80 {
                check
                    .with_status(Status::Warning)
                    .with_advice("raise maxmemory: a full Redis admits nobody whose state it would have to write")
            } else {
                check
            }
        }
    })
}

/// What Redis does when its memory is full: every limit's state has a TTL, so each policy but `noeviction` may take it.
pub(super) async fn check_policy(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let info = match connection.info("memory").await {
        Err(CallError::ErrorReply(_)) => return policy_from_config(connection).await,
        info => info?,
    };
    match (info.text("maxmemory_policy"), info.number("maxmemory")) {
        (Some(policy), Some(max_bytes)) => Ok(assess_policy(policy, max_bytes)),
        _ => policy_from_config(connection).await,
    }
}

async fn policy_from_config(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let mut get = redis::cmd("CONFIG");
    let pairs: Vec<(String, String)> = connection.call(get.arg("GET").arg("maxmemory*")).await?;
    let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let max_bytes = value("maxmemory").and_then(|max_bytes| max_bytes.parse().ok()).unwrap_or(0);
    Ok(assess_policy(value("maxmemory-policy").unwrap_or("unknown"), max_bytes))
}

fn assess_policy(policy: &str, max_bytes: u64) -> Check {
    let check = Check::ok("policy", policy);
    if policy == "noeviction" {
        return check;
    }
    let advice = "limits want noeviction, on an instance of their own: CONFIG SET maxmemory-policy noeviction";
    if max_bytes == 0 {
        let found = format!("{policy}, which evicts nothing while there is no maxmemory");
        return Check { message: found, ..check }.with_status(Status::Warning).with_advice(advice);
    }
    let effect = match policy {
        "volatile-ttl" => "takes what expires soonest first, which is short limits",
        "volatile-lru" | "volatile-lfu" | "volatile-random" => "takes keys with a TTL, which all limits have",
        _ => "takes any key",
    };
    let found = format!(
        "{policy} with maxmemory {}: it {effect}, and whose limit is evicted has a fresh one",
        format_mib(max_bytes)
    );
    Check { message: found, ..check }.with_status(Status::Failed).with_advice(advice)
}

pub(super) async fn check_evictions(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let info = connection.info("stats").await?;
    let evicted = info.number("evicted_keys").unwrap_or(0);
    let check = Check::ok(
        "evictions",
        format!("{} evicted since the start of the server or CONFIG RESETSTAT", pluralize(evicted, "key")),
    );
    Ok(if evicted > 0 {
        let advice = "limits may have been among them: raise maxmemory or set noeviction, then CONFIG RESETSTAT";
        check.with_status(Status::Warning).with_advice(advice)
    } else {
        check
    })
}

/// How many keys a database has.
pub(super) fn database_key_count(info: &InfoSection, database: i64) -> u64 {
    let counted = info.text(&format!("db{database}")).and_then(|figures| figures.strip_prefix("keys="));
    counted.and_then(|figures| figures.split(',').next()?.parse().ok()).unwrap_or(0)
}

fn format_mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
