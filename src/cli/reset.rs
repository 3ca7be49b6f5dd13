//! `sluicegate reset`: clears the usage of an identity for one limit.

use std::io;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::cli::admin::{AdminTarget, LimitIdentity, as_number, printable};

/// Clear the usage of an identity for one limit, on all gateways that share the store
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate reset --limit per-ip ip=192.0.2.7",
    "sluicegate reset --limit rate api-key=acme",
])]
pub(super) struct Arguments {
    #[command(flatten)]
    target: AdminTarget,
    #[command(flatten)]
    limit_identity: LimitIdentity,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let Arguments { target, limit_identity } = arguments;
    let client = target.client(config_path)?;
    let body = json!({ "limit": limit_identity.limit, "identity": limit_identity.identity.to_json()? });
    let response = client.request(Method::POST, "/api/reset", Some(&body))?;
    target.print(&response, |out| write_reset(&response, out))
}

/// Write a response of `/api/reset`.
fn write_reset(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let effect = if response["removed"] == true { "was reset" } else { "had no usage" };
    let delay_seconds = &response["effective_within_seconds"];
    let delay_note = if as_number(delay_seconds) > 0.0 {
        format!("; all gateways apply the change within {delay_seconds} s")
    } else {
        String::new()
    };
    writeln!(
        out,
        "identity {} {effect} for the limit `{}`{delay_note}",
        printable(&response["identity"]),
        printable(&response["limit"])
    )
}
