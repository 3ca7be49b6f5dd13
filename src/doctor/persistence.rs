//! What a restart or the loss of a master costs: overrides without persistence, and slots without a master.

use redis::Value;

use super::line::{CallError, DiagnosticConnection};
use super::{Check, Status};
use crate::limit::redis::records;
use crate::words::pluralize;

const PERSISTENCE_ADVICE: &str = "after a restart the gateways write back the overrides that they know; overrides are lost if no gateway \
    is running then, or all gateways restart as well: CONFIG SET appendonly yes";

/// Whether Redis keeps overrides over a restart. `wanted`: operators can set overrides.
pub(super) async fn check_persistence(
    connection: &mut DiagnosticConnection,
    prefix: &str,
    can_set_overrides: bool,
) -> Result<Check, CallError> {
    let append_only = match connection.info("persistence").await {
        Ok(info) => info.text("aof_enabled") == Some("1"),
        Err(CallError::ErrorReply(_)) => config_value(connection, "appendonly").await? == "yes",
        Err(error) => return Err(error),
    };
    if append_only {
        return Ok(Check::ok("persistence", "append-only file"));
    }
    let snapshots = config_value(connection, "save").await?;
    if !snapshots.is_empty() {
        return Ok(Check::ok("persistence", format!("snapshots (save {snapshots}), no append-only file")));
    }
    let Some(overrides) = override_count(connection, prefix).await? else {
        return Ok(Check::ok("persistence", "none; the overrides are on another node"));
    };
    let check = Check::ok("persistence", format!("none; {} stored", pluralize(overrides, "override")));
    Ok(if can_set_overrides || overrides > 0 {
        check.with_status(Status::Warning).with_advice(PERSISTENCE_ADVICE)
    } else {
        check
    })
}

/// The number of overrides in force; none if another node keeps the hash or the user cannot read it.
async fn override_count(connection: &mut DiagnosticConnection, prefix: &str) -> Result<Option<u64>, CallError> {
    let time: Value = connection.call(&records::time_command()).await?;
    let entries: Value = match connection.call(&records::read_command(&records::hash_key(prefix))).await {
        Err(CallError::ErrorReply(error)) if error.code() == Some("MOVED") => return Ok(None),
        all => all?,
    };
    let Ok(snapshot) = records::parse_snapshot(time, entries) else { return Ok(Some(0)) };
    let in_force =
        |record: &&records::OverrideEntry| record.expires_at_us > snapshot.now_us && !record.value.is_empty();
    Ok(Some(snapshot.entries.iter().filter(in_force).count() as u64))
}

/// Whether a cluster serves the slots of the other masters while one master is down.
pub(super) async fn check_full_coverage(connection: &mut DiagnosticConnection) -> Result<Check, CallError> {
    let required = config_value(connection, "cluster-require-full-coverage").await?;
    let check = Check::ok("full coverage", format!("cluster-require-full-coverage {required}"));
    Ok(if required == "yes" {
        let found = "cluster-require-full-coverage yes: while a master is down, the cluster rejects all identities, not only \
            those of this master";
        let advice = "on every node: CONFIG SET cluster-require-full-coverage no, and CONFIG REWRITE";
        Check { message: found.to_owned(), ..check }.with_status(Status::Warning).with_advice(advice)
    } else {
        check
    })
}

async fn config_value(connection: &mut DiagnosticConnection, name: &str) -> Result<String, CallError> {
    let pairs: Vec<(String, String)> = connection.call(redis::cmd("CONFIG").arg("GET").arg(name)).await?;
    Ok(pairs.into_iter().find(|(key, _)| key == name).map(|(_, value)| value).unwrap_or_default())
}
