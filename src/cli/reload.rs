//! `sluicegate reload`: reloads the running gateway and waits for the result.

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::bail;
use serde_json::Value;

use crate::cli::admin::client::AdminClient;
use crate::telemetry::pluralize;

/// Reload the gateway, and print what changed.
///
/// # Errors
/// No gateway is found, or the gateway rejects the new configuration.
pub(super) fn run(config_path: &Path, admin: Option<&str>, json: bool) -> anyhow::Result<()> {
    let client = AdminClient::find(config_path, admin)?;
    let response = client.reload()?;
    if json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&response)?)?;
    }
    if response["result"] != "ok" {
        let error = response["error"].as_str().unwrap_or("the gateway gave no reason").trim_end();
        bail!("the gateway rejected the new configuration, and the active configuration stays in force:\n{error}");
    }
    if !json {
        stdout().write_all(describe(&response).as_bytes())?;
    }
    Ok(())
}

/// Return the changes of a reload as text.
fn describe(response: &Value) -> String {
    let file = response["file"].as_str().unwrap_or_default();
    /// Maximum age of a reload by the file watcher, in seconds. Such a reload has probably applied the operator's
    /// change already.
    const RECENT: f64 = 60.0;
    let age = response["changed_seconds_ago"].as_f64().filter(|age| *age < RECENT);
    let changes: Vec<_> = response["changes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let (Some(_), false) = (age, changes.is_empty()) else {
        return format!(
            "{file}: reloaded; no key has changed. Environment variables, secrets and other files may have changed\n"
        );
    };
    let mut text = format!("{file}: reloaded; {}\n", pluralize(changes.len() as u64, "difference"));
    changes.iter().for_each(|change| text += &format!("  {change}\n"));
    text
}
