//! What a restart or the loss of a master costs: overrides without persistence, and slots without a master.

use redis::Value;

use super::line::{Failure, Line};
use super::{Check, Status};
use crate::limit::redis::records;
use crate::words::pluralize;

const ADVICE: &str = "after a restart the gateways write back the overrides that they know; overrides are lost if no gateway \
    is running then, or all gateways restart as well: CONFIG SET appendonly yes";

/// Whether Redis keeps overrides over a restart. `wanted`: operators can set overrides.
pub(super) async fn persistence(line: &mut Line, prefix: &str, wanted: bool) -> Result<Check, Failure> {
    let append_only = match line.info("persistence").await {
        Ok(info) => info.text("aof_enabled") == Some("1"),
        Err(Failure::Refused(_)) => setting(line, "appendonly").await? == "yes",
        Err(lost) => return Err(lost),
    };
    if append_only {
        return Ok(Check::ok("persistence", "append-only file"));
    }
    let snapshots = setting(line, "save").await?;
    if !snapshots.is_empty() {
        return Ok(Check::ok("persistence", format!("snapshots (save {snapshots}), no append-only file")));
    }
    let Some(overrides) = overrides(line, prefix).await? else {
        return Ok(Check::ok("persistence", "none; the overrides are on another node"));
    };
    let check = Check::ok("persistence", format!("none; {} stored", pluralize(overrides, "override")));
    Ok(if wanted || overrides > 0 { check.or(Status::Warning).advise(ADVICE) } else { check })
}

/// The number of overrides in force; none if another node keeps the hash or the user cannot read it.
async fn overrides(line: &mut Line, prefix: &str) -> Result<Option<u64>, Failure> {
    let time: Value = line.ask(&records::time_command()).await?;
    let all: Value = match line.ask(&records::read_command(&records::hash_key(prefix))).await {
        Err(Failure::Refused(error)) if error.code() == Some("MOVED") => return Ok(None),
        all => all?,
    };
    let Ok(snapshot) = records::parse_snapshot(time, all) else { return Ok(Some(0)) };
    let in_force =
        |record: &&records::OverrideEntry| record.expires_at_us > snapshot.now_us && !record.value.is_empty();
    Ok(Some(snapshot.entries.iter().filter(in_force).count() as u64))
}

/// Whether a cluster serves the slots of the other masters while one master is down.
pub(super) async fn full_coverage(line: &mut Line) -> Result<Check, Failure> {
    let required = setting(line, "cluster-require-full-coverage").await?;
    let check = Check::ok("full coverage", format!("cluster-require-full-coverage {required}"));
    Ok(if required == "yes" {
        let found = "cluster-require-full-coverage yes: while a master is down, the cluster rejects all identities, not only \
            those of this master";
        let advice = "on every node: CONFIG SET cluster-require-full-coverage no, and CONFIG REWRITE";
        Check { message: found.to_owned(), ..check }.or(Status::Warning).advise(advice)
    } else {
        check
    })
}

async fn setting(line: &mut Line, name: &str) -> Result<String, Failure> {
    let pairs: Vec<(String, String)> = line.ask(redis::cmd("CONFIG").arg("GET").arg(name)).await?;
    Ok(pairs.into_iter().find(|(key, _)| key == name).map(|(_, value)| value).unwrap_or_default())
}
