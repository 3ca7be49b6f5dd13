//! `sluicegate certificates`: the certificates of the running gateway.

use std::io;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anstyle::AnsiColor;
use clap::Args;
use http::Method;
use serde_json::Value;

use crate::cli::admin::{AdminTarget, as_list, printable, write_table};

/// List the certificates of the running gateway: issuer, expiry, source and next renewal
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate certificates",
    "sluicegate certificates --json > certificates.json",
])]
pub(super) struct Arguments {
    #[command(flatten)]
    target: AdminTarget,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client = arguments.target.client(config_path)?;
    let response = client.request(Method::GET, "/api/certificates", None)?;
    arguments.target.print(&response, |out| write_certificates(&response, out))
}

/// Write the list of `GET /api/certificates`.
fn write_certificates(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let certificates = as_list(&response["certificates"]);
    if certificates.is_empty() {
        return writeln!(out, "no listener has a certificate");
    }
    let rows = certificates.iter().map(|entry| {
        let names = as_list(&entry["names"]).iter().map(printable).collect::<Vec<_>>().join(" ");
        let error = match &entry["error"] {
            Value::Null => String::new(),
            error => format!("{} failed: {}", entry["failures"], printable(error)),
        };
        let [issuer, not_after, source, next] =
            ["issuer", "not_after", "source", "next_renewal"].map(|key| printable(&entry[key]));
        [names, issuer, not_after, source, next, error]
    });
    let style = |row: usize| match &certificates.get(row)?["error"] {
        Value::Null => None,
        _ => Some(AnsiColor::Red.on_default()),
    };
    write_table(["names", "issuer", "not after", "source", "next renewal", "last attempt"], rows, &[], style, out)
}
