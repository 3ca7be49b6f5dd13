//! `sluicegate probe`: whether the running gateway is ready, for health checks in containers without a shell.

use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use http::StatusCode;
use serde_json::{Value, json};

use crate::cli::admin::client::{AdminClient, AdminLocation};
use crate::limiter::quota::parse_duration_us;

/// Ask the running gateway whether it is ready, for health checks
///
/// The command prints the status on one line. The exit code is 0 if the gateway is ready, and 1 if it is not ready
/// or does not respond. The command reads only the table `[admin]` of the configuration. Other tables may be
/// invalid, and environment variables in them may be unset.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate probe",
    "sluicegate probe --live --timeout 1s",
    "sluicegate probe --admin http://127.0.0.1:9180 --json",
])]
pub(super) struct Arguments {
    /// Check whether the gateway is alive (`/healthz`), not whether it is ready (`/readyz`)
    #[arg(long)]
    live: bool,
    /// Call the gateway at this admin listener (a URL) or admin socket (a path) [default: the admin socket, or the
    /// `[admin]` address if no gateway listens on the socket]
    #[arg(long, value_name = "SOCKET|URL", alias = "url")]
    admin: Option<String>,
    /// Print a JSON object with the result and the report of the gateway
    #[arg(long)]
    json: bool,
    /// Fail if the gateway does not respond within this time
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = parse_timeout)]
    timeout: Duration,
}

/// Request the readiness or liveness of the gateway, and print the result.
///
/// # Errors
/// The gateway is not ready, not alive, or unreachable.
pub(super) fn run(options: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client = match &options.admin {
        Some(location) => AdminClient::from_option("--admin", location)?,
        None => {
            let location = AdminLocation::read(config_path);
            let advice = || format!("{}; name the gateway with --admin", location.missing(config_path));
            location.client()?.with_context(advice)?
        }
    };
    let path = if options.live { "/healthz" } else { "/readyz" };
    let (status, body) = client.get(options.timeout, path)?;
    let report = serde_json::from_slice::<Value>(&body);
    let word = match &report {
        _ if options.live && &body[..] == b"ok\n" => Some("ok".to_owned()),
        Ok(report) if !options.live => report["status"].as_str().map(str::to_owned),
        Ok(_) | Err(_) => None,
    };
    if let (true, Some(word)) = (options.json, &word) {
        let is_ready = status == StatusCode::OK;
        let report = report.unwrap_or_default();
        let result = json!({ "gateway": client.to_string(), "ok": is_ready, "status": word, "report": report });
        writeln!(stdout(), "{result}")?;
        return Ok(if is_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    match (status, word) {
        (StatusCode::OK, Some(word)) => {
            writeln!(stdout(), "{client}: {word}")?;
            Ok(ExitCode::SUCCESS)
        }
        (StatusCode::SERVICE_UNAVAILABLE, Some(word)) => bail!("the gateway at {client} is not ready: {word}"),
        (status, _) => bail!("the server at {client} is not a Sluicegate admin listener ({status})"),
    }
}

fn parse_timeout(text: &str) -> anyhow::Result<Duration> {
    let us = parse_duration_us(text).context("write a duration with ms, s, m, h or d, such as 500ms")?;
    Ok(Duration::from_micros(us))
}
