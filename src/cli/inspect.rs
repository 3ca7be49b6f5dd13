//! `sluicegate inspect`: the usage of an identity.

use std::io;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anstyle::AnsiColor;
use anyhow::bail;
use clap::Args;
use http::Method;
use serde_json::Value;

use crate::cli::admin::{
    AdminTarget, IdentityArgs, as_list, format_seconds, printable, request_target, unit_suffix, write_table,
};

/// Show the usage of an identity, without charging it
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate inspect 192.0.2.7",
    "sluicegate inspect --limit rate api-key=acme --cost 5",
])]
pub(super) struct Arguments {
    #[command(flatten)]
    target: AdminTarget,
    /// Show only this limit [default: all limits whose `by` has exactly the given parts]
    #[arg(long, value_name = "NAME")]
    limit: Option<String>,
    /// Show whether a request with this cost would be admitted
    #[arg(long, value_name = "N", default_value_t = 1)]
    cost: u64,
    #[command(flatten)]
    identity: IdentityArgs,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let Arguments { target, limit, cost, identity } = arguments;
    let client = target.client(config_path)?;
    if let (None, Some(hash)) = (limit, identity.hash()) {
        bail!(
            "the hash of an identity is valid only for one limit: add --limit, for example sluicegate inspect \
             --limit NAME {hash}"
        );
    }
    let cost = cost.to_string();
    let mut query = identity.query_pairs()?;
    query.push(("cost", &cost));
    query.extend(limit.iter().map(|limit| ("limit", &**limit)));
    let response = client.request(Method::GET, &request_target("/api/identities", &query), None)?;
    target.print(&response, |out| write_identities(&response, out))
}

/// Write a response of `/api/identities`.
fn write_identities(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let statuses = as_list(&response["limits"]);
    let rows = statuses.iter().map(|entry| {
        let shadow = if entry["shadow"] == true { " (shadow)" } else { "" };
        [
            printable(&entry["limit"]) + shadow,
            printable(&entry["decision"]),
            printable(&entry["quota"]) + &unit_suffix(&printable(&entry["unit"])),
            format!("{} of {}", entry["remaining"], entry["capacity"]),
            format_seconds(&entry["reset_seconds"]),
            format_seconds(&entry["retry_seconds"]),
            if entry["override"].is_object() {
                format!("for {} more", format_seconds(&entry["override"]["expires_in_seconds"]))
            } else {
                String::new()
            },
            printable(&entry["identity"]),
        ]
    });
    let header = ["limit", "decision", "quota", "remaining", "resets in", "retry in", "override", "identity"];
    let style = |row: usize| match statuses.get(row)?["decision"].as_str()? {
        "denied" | "cost_too_large" => Some(AnsiColor::Red.on_default()),
        _ => None,
    };
    write_table(header, rows, &["remaining", "resets in", "retry in"], style, out)
}
