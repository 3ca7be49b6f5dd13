//! `sluicegate override`: sets, lists and removes temporary quotas.

use std::io;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};

use crate::cli::admin::{AdminTarget, LimitIdentity, as_list, format_seconds, printable, request_target, write_table};

/// Set, list and remove temporary quotas on all gateways that share the store
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate override set --limit per-ip ip=192.0.2.7 --quota 600/min --ttl 12h",
    "sluicegate override list",
    "sluicegate override remove --limit per-ip ip=192.0.2.7",
])]
pub(super) struct Arguments {
    #[command(subcommand)]
    action: OverrideCommand,
}

/// A command for overrides.
#[derive(Debug, Subcommand)]
enum OverrideCommand {
    /// Set a temporary quota for an identity
    #[command(after_help = examples![
        "sluicegate override set --limit per-ip ip=192.0.2.7 --quota 600/min --ttl 12h --note migration",
        "sluicegate override set --limit rate api-key=acme --quota 50/s --burst 100 --ttl 7d",
    ])]
    Set {
        #[command(flatten)]
        target: AdminTarget,
        #[command(flatten)]
        limit_identity: LimitIdentity,
        /// Set this quota, in the format of the configuration, such as 600/min
        #[arg(long, value_name = "QUOTA")]
        quota: String,
        /// Set this burst, for a token-bucket limit [default: the number in the quota]
        #[arg(long, value_name = "N")]
        burst: Option<u64>,
        /// Remove the override after this time, such as 15m, 12h or 7d
        #[arg(long = "ttl", value_name = "DURATION")]
        ttl: String,
        /// Show this text in the list of overrides
        #[arg(long, value_name = "TEXT")]
        note: Option<String>,
    },
    /// List the active overrides
    #[command(after_help = examples![
        "sluicegate override list",
        "sluicegate override list --json > overrides.json",
    ])]
    List {
        #[command(flatten)]
        target: AdminTarget,
    },
    /// Remove an override before its TTL expires
    #[command(after_help = examples![
        "sluicegate override remove --limit per-ip ip=192.0.2.7",
        "sluicegate override remove --limit rate api-key=acme",
    ])]
    Remove {
        #[command(flatten)]
        target: AdminTarget,
        #[command(flatten)]
        limit_identity: LimitIdentity,
    },
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    match &arguments.action {
        OverrideCommand::Set { target, limit_identity, quota, burst, ttl, note } => {
            let client = target.client(config_path)?;
            let identity = limit_identity.identity.to_json()?;
            let body = json!({
                "limit": limit_identity.limit, "identity": identity, "quota": quota, "burst": burst, "ttl": ttl, "note": note
            });
            let response = client.request(Method::POST, "/api/overrides", Some(&body))?;
            target.print(&response, |out| write_overrides(&response["override"], out))
        }
        OverrideCommand::List { target } => {
            let response = target.client(config_path)?.request(Method::GET, "/api/overrides", None)?;
            target.print(&response, |out| write_override_list(&response, out))
        }
        OverrideCommand::Remove { target, limit_identity } => {
            let client = target.client(config_path)?;
            let mut query = limit_identity.identity.query_pairs()?;
            query.push(("limit", &limit_identity.limit));
            let response = client.request(Method::DELETE, &request_target("/api/overrides", &query), None)?;
            target.print(&response, |out| write_removed(&response, out))
        }
    }
}

/// Write the list of `GET /api/overrides`.
fn write_override_list(response: &Value, out: &mut impl Write) -> io::Result<()> {
    write_overrides(&response["overrides"], out)?;
    if response["store_error"].is_string() {
        let error = printable(&response["store_error"]);
        writeln!(
            out,
            "the gateway cannot read the store; the list has the overrides that it applies from memory: {error}"
        )?;
    }
    Ok(())
}

/// Write one override or an array of overrides.
fn write_overrides(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let entries = if response.is_array() { as_list(response) } else { std::slice::from_ref(response) };
    if entries.is_empty() {
        return writeln!(out, "no override is in force");
    }
    let rows = entries.iter().map(|entry| {
        [
            printable(&entry["limit"]),
            printable(&entry["identity"]),
            printable(&entry["quota"]),
            printable(&entry["burst"]),
            format_seconds(&entry["expires_in_seconds"]),
            printable(&entry["note"]),
        ]
    });
    write_table(
        ["limit", "identity", "quota", "burst", "expires in", "note"],
        rows,
        &["burst", "expires in"],
        |_| None,
        out,
    )
}

/// Write a response of `DELETE /api/overrides`.
fn write_removed(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let effect = if response["removed"] == true { "has its standard quota again" } else { "had no override" };
    writeln!(
        out,
        "identity {} {effect} for the limit `{}`",
        printable(&response["identity"]),
        printable(&response["limit"])
    )
}
