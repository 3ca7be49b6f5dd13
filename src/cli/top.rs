//! `sluicegate top`: the most frequently denied clients of the running gateway.

use std::io;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Args;
use http::Method;
use serde_json::Value;

use crate::cli::admin::{AdminTarget, as_list, as_number, format_parts, printable, request_target, write_table};

/// Show the most frequently denied clients of the running gateway
///
/// The command counts only denials by this gateway in the last 5 minutes.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate top",
    "sluicegate top --limit per-ip --count 3",
    "sluicegate top --admin http://127.0.0.1:9180 --json",
])]
pub(super) struct Arguments {
    #[command(flatten)]
    target: AdminTarget,
    /// Show only this limit
    #[arg(long, value_name = "NAME")]
    limit: Option<String>,
    /// Show at most this many clients per limit
    #[arg(long, value_name = "N", default_value_t = 10)]
    count: u64,
    /// Print the table again every 2 seconds, until Ctrl-C
    #[arg(long, conflicts_with = "json")]
    watch: bool,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client = arguments.target.client(config_path)?;
    let count = arguments.count.to_string();
    let mut query = vec![("count", &*count)];
    query.extend(arguments.limit.iter().map(|limit| ("limit", &**limit)));
    let target = request_target("/api/top", &query);
    loop {
        let response = client.request(Method::GET, &target, None)?;
        if arguments.watch && io::stdout().is_terminal() {
            // Clear the terminal (ECMA-48: CUP and ED).
            write!(io::stdout(), "\x1b[H\x1b[2J")?;
        }
        let code = arguments.target.print(&response, |out| write_top(&response, out))?;
        if !arguments.watch {
            return Ok(code);
        }
        io::stdout().flush()?;
        thread::sleep(WATCH_INTERVAL);
    }
}

/// Time between two requests of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Write a response of `/api/top`.
fn write_top(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let minutes = as_number(&response["window_seconds"]) / 60.0;
    let mut without_denials = Vec::new();
    let mut has_denials = false;
    for limit in as_list(&response["limits"]) {
        if as_list(&limit["identities"]).is_empty() {
            without_denials.push(printable(&limit["limit"]));
            continue;
        }
        has_denials = true;
        let verb = if limit["shadow"] == true { "would have denied" } else { "denied" };
        writeln!(out, "{}: {verb} {} in the last {minutes} minutes", printable(&limit["limit"]), limit["denied"])?;
        let rows = as_list(&limit["identities"]).iter().map(|entry| {
            let lower_bound = &entry["denied_at_least"];
            let upper_bound = &entry["denied_at_most"];
            let count = if lower_bound == upper_bound {
                lower_bound.to_string()
            } else {
                format!("{lower_bound} to {upper_bound}")
            };
            [count, format_parts(&entry["parts"]), printable(&entry["identity"])]
        });
        write_table(["count", "client", "identity"], rows, &["count"], |_| None, out)?;
    }
    if !without_denials.is_empty() {
        let subject = if has_denials { "no other denials" } else { "no denials" };
        writeln!(out, "{subject} in the last {minutes} minutes: {}", without_denials.join(", "))?;
    }
    Ok(())
}
