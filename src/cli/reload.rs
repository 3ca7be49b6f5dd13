//! `sluicegate reload`: reloads the running gateway and waits for the result.

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use serde_json::Value;

use crate::cli::admin::client::AdminClient;
use crate::telemetry::pluralize;

/// Reload the configuration of the running gateway, and print what changed
///
/// The command waits for the result. If the gateway rejects the new configuration, it keeps the active one, and the
/// exit code is 1.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate reload",
    "sluicegate reload --admin /run/sluicegate/admin.sock",
])]
pub(super) struct Arguments {
    /// Call the gateway at this admin socket (a path) or admin listener (a URL) [default: the admin socket, or the
    /// `[admin]` address if no gateway listens on the socket]
    #[arg(long, value_name = "SOCKET|URL")]
    admin: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Reload the gateway, and print what changed.
///
/// # Errors
/// No gateway is found, or the gateway rejects the new configuration.
pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client = AdminClient::find(config_path, arguments.admin.as_deref())?;
    let response = client.reload()?;
    if arguments.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&response)?)?;
    }
    if response["result"] != "ok" {
        let error = response["error"].as_str().unwrap_or("the gateway gave no reason").trim_end();
        bail!("the gateway rejected the new configuration, and the active configuration stays in force:\n{error}");
    }
    if !arguments.json {
        stdout().write_all(describe(&response).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Return the changes of a reload as text.
fn describe(response: &Value) -> String {
    let file = response["file"].as_str().unwrap_or_default();
    /// Maximum age in seconds of changes that are printed. Changes of an earlier reload are also printed, because the
    /// file watcher may have reloaded the file a few seconds before this command.
    const RECENT: f64 = 60.0;
    /// Changes whose age in seconds is below this value are reported as changes of this reload, even if the file
    /// watcher has applied them. The file watcher reads the file once per second.
    const CURRENT: f64 = 5.0;
    let age = response["changed_seconds_ago"].as_f64().filter(|age| *age < RECENT);
    let changes: Vec<_> = response["changes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let (Some(age), false) = (age, changes.is_empty()) else {
        return format!(
            "{file}: reloaded; no key has changed. Environment variables and other files may have changed\n"
        );
    };
    let differences = pluralize(changes.len() as u64, "difference");
    let mut text = if age < CURRENT {
        format!("{file}: reloaded; {differences}\n")
    } else {
        format!("{file}: reloaded; no key has changed since the reload {age:.0} s ago, which had {differences}\n")
    };
    changes.iter().for_each(|change| text += &format!("  {change}\n"));
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn old_changes_are_not_reported_as_changes_of_this_reload() {
        let text = |age: Value| {
            describe(&json!({ "file": "g.toml", "changes": ["limit a: quota: 1 -> 2"], "changed_seconds_ago": age }))
        };
        assert_eq!(text(json!(0.2)), "g.toml: reloaded; 1 difference\n  limit a: quota: 1 -> 2\n");
        let old = "g.toml: reloaded; no key has changed since the reload 31 s ago, which had 1 difference\n";
        assert!(text(json!(31.2)).starts_with(old), "{}", text(json!(31.2)));
        for none in [json!(61), Value::Null] {
            assert!(text(none).starts_with("g.toml: reloaded; no key has changed. "));
        }
    }
}
