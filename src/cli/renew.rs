//! `sluicegate renew`: renews a certificate by ACME.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use serde_json::json;

use crate::cli::admin::AdminTarget;

/// Renew a certificate by ACME now
///
/// The running gateway, or another gateway with the same Redis store, orders the certificate.
/// `sluicegate certificates` shows the result. Each order counts towards the rate limits of the CA.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate renew --name api.example.com",
    "sluicegate renew --name api.example.com --admin http://127.0.0.1:9180",
])]
pub(super) struct Arguments {
    #[command(flatten)]
    target: AdminTarget,
    /// Renew the certificate for this DNS name
    #[arg(long, value_name = "NAME")]
    name: String,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let Arguments { target, name } = arguments;
    let client = target.client(config_path)?;
    let response = client.request(Method::POST, "/api/certificates/renew", Some(&json!({ "name": name })))?;
    target.print(&response, |out| {
        writeln!(out, "requested the renewal of `{name}`; `sluicegate certificates` shows the result")
    })
}
