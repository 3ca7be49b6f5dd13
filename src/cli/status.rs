//! `sluicegate status`: the state of the running gateway on one page, from its admin API.

use std::io;
use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use clap::Args;
use http::Method;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::cli::admin::client::AdminClient;
use crate::cli::admin::{as_list, as_number, format_duration, format_parts, printable, write_table};
use crate::telemetry::pluralize;

/// Maximum number of limits on the page.
const MAX_LIMITS: usize = 5;

/// Certificates that expire within this number of days are highlighted. The Prometheus alert
/// `SluicegateCertificateExpiring` has the same threshold.
const EXPIRY_WARNING_DAYS: i64 = 14;

const SECONDS_PER_DAY: i64 = 86_400;

/// The states of an endpoint.
const ENDPOINT_STATES: [&str; 5] = ["healthy", "unhealthy", "ejected", "unreachable", "not checked"];

/// Show the state of the running gateway on one page
///
/// The page shows the version, configuration, requests of the last minute, listeners, store, upstreams,
/// certificates and the limits with the most denials. If the terminal is too narrow for a table, its rows are lists.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate status",
    "sluicegate status --admin http://127.0.0.1:9180",
    "sluicegate status --json > status.json",
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

/// Print the state of the running gateway.
///
/// # Errors
/// No gateway is found, or the gateway returns an unexpected response.
pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client = AdminClient::find(config_path, arguments.admin.as_deref())?;
    let report = collect(&client)?;
    if arguments.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&report)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
    Page { report: &report, out: anstream::stdout().lock() }.write()?;
    Ok(ExitCode::SUCCESS)
}

/// Request the data of the page from the gateway.
fn collect(client: &AdminClient) -> anyhow::Result<Value> {
    let get = |path: &str| client.request(Method::GET, path, None);
    let mut report = get("/api/status")?;
    let mut configuration = get("/api/config")?;
    // Remove the content of the configuration, because the page shows only which file was loaded, and when.
    for key in ["configuration", "addresses"] {
        configuration.as_object_mut().and_then(|fields| fields.remove(key));
    }
    let mut limits = get("/api/top?count=1")?["limits"].take();
    if let Some(limits) = limits.as_array_mut() {
        limits.retain(|limit| as_number(&limit["denied"]) > 0.0);
        limits.sort_by_key(|limit| std::cmp::Reverse(limit["denied"].as_u64()));
        limits.truncate(MAX_LIMITS);
    }
    report["configuration"] = configuration;
    report["health"] = client.readiness()?;
    report["certificates"] = get("/api/certificates")?["certificates"].take();
    report["top_limits"] = limits;
    Ok(report)
}

/// The writer of the page.
struct Page<'a, W> {
    report: &'a Value,
    out: W,
}

impl<W: Write> Page<'_, W> {
    fn write(mut self) -> io::Result<()> {
        self.write_process()?;
        self.write_configuration()?;
        self.write_requests()?;
        self.write_listeners()?;
        self.write_store()?;
        self.write_upstreams()?;
        self.write_certificates()?;
        self.write_limits()
    }

    fn write_process(&mut self) -> io::Result<()> {
        let report = self.report;
        let status = &report["health"]["status"];
        let style = match status.as_str() {
            Some("ready") => AnsiColor::Green,
            Some("degraded") => AnsiColor::Yellow,
            _ => AnsiColor::Red,
        };
        let style = style.on_default();
        writeln!(
            self.out,
            "sluicegate {} ({}): {style}{}{style:#}, up {}, process {}",
            printable(&report["version"]),
            printable(&report["commit"]),
            printable(status),
            format_duration(as_number(&report["uptime_seconds"])),
            report["pid"],
        )?;
        for name in as_list(&report["health"]["certificates"]["missing"]) {
            writeln!(self.out, "no certificate yet for {}", printable(name))?;
        }
        Ok(())
    }

    fn write_configuration(&mut self) -> io::Result<()> {
        let config = &self.report["configuration"];
        writeln!(self.out, "configuration: {}", printable(&config["file"]))?;
        for file in as_list(&config["included"]) {
            writeln!(self.out, "  includes {}", printable(file))?;
        }
        let revision = printable(&config["revision"]);
        let loaded = self.age(&config["loaded_at"]);
        let [reloads, rejected] = ["ok", "error"].map(|result| config["reloads"][result].as_u64().unwrap_or_default());
        let reloads = pluralize(reloads, "reload");
        writeln!(self.out, "  revision {revision}, loaded {loaded}; {reloads}, {rejected} rejected")?;
        let last_error = &config["last_error"];
        if last_error.is_object() {
            let failed = self.age(&last_error["time"]);
            let style = AnsiColor::Red.on_default();
            writeln!(
                self.out,
                "  {style}the last reload was rejected {failed}; the previous configuration is active:{style:#}"
            )?;
            // Escape each line of the error separately, because `printable` also escapes newlines.
            for line in last_error["error"].as_str().unwrap_or_default().lines() {
                writeln!(self.out, "    {}", printable(&json!(line)))?;
            }
        }
        let style = AnsiColor::Yellow.on_default();
        for warning in as_list(&config["warnings"]) {
            writeln!(self.out, "  {style}warning{style:#}: {}", printable(warning))?;
        }
        for file in as_list(&config["rejected_files"]) {
            let failed = self.age(&file["time"]);
            let style = AnsiColor::Red.on_default();
            let kind = printable(&file["kind"]);
            let path = printable(&file["file"]);
            writeln!(
                self.out,
                "  {style}{kind} file {path} was rejected {failed}; its previous content is in use:{style:#}"
            )?;
            for line in file["error"].as_str().unwrap_or_default().lines() {
                writeln!(self.out, "    {}", printable(&json!(line)))?;
            }
        }
        Ok(())
    }

    fn write_requests(&mut self) -> io::Result<()> {
        let recent = &self.report["last_minute"];
        let seconds = (as_number(&recent["ms"]) / 1000.0).round();
        let [allowed, denied, errors] = ["allowed", "denied", "errors"].map(|kind| recent[kind].to_string());
        write!(self.out, "requests: {allowed} allowed, {denied} denied, {errors} failed in {seconds} s")?;
        if recent["p50_ms"].is_number() {
            let [p50, p99] = ["p50_ms", "p99_ms"].map(|quantile| format_ms(&recent[quantile]));
            write!(self.out, "; p50 {p50}, p99 {p99}")?;
        }
        writeln!(self.out)
    }

    fn write_listeners(&mut self) -> io::Result<()> {
        let open = &self.report["connections"];
        let is_named = as_list(&self.report["listeners"]).iter().any(|listener| listener["name"].is_string());
        let rows = as_list(&self.report["listeners"]).iter().map(|listener| {
            let is = |key: &str| if listener[key] == true { "yes" } else { "no" }.to_owned();
            let name = if is_named { format!(" {}", printable(&listener["name"])) } else { String::new() };
            let address = printable(&listener["address"]) + name.trim_end();
            [address, is("tls"), is("proxy_protocol"), listener["connections"].to_string()]
        });
        let rows: Vec<_> = rows.collect();
        self.write_table(["listener", "tls", "proxy protocol", "connections"], rows, &["connections"], |_| None)?;
        writeln!(self.out, " {} of {} connections", open["open"], open["max"])
    }

    fn write_store(&mut self) -> io::Result<()> {
        let store = &self.report["store"];
        let failing = as_list(&store["failing"]);
        let names: Vec<_> = failing.iter().map(printable).collect();
        let openings = pluralize(store["circuit_breaker_openings"].as_u64().unwrap_or_default(), "time");
        let row = [
            printable(&store["name"]),
            printable(&store["circuit_breaker"]),
            if store["circuit_breaker"].is_string() { openings } else { String::new() },
            format_ms(&self.report["last_minute"]["store_p99_ms"]),
            names.join(" "),
        ];
        let style = (!failing.is_empty()).then(|| AnsiColor::Red.on_default());
        let header = ["store", "circuit breaker", "opened", "round trip p99", "failing"];
        self.write_table(header, vec![row], &["round trip p99"], |_| style)
    }

    fn write_upstreams(&mut self) -> io::Result<()> {
        let upstreams: Vec<_> = self.report["health"]["upstreams"].as_object().into_iter().flatten().collect();
        let counts = |servers: &Value| {
            ENDPOINT_STATES.map(|state| as_list(servers).iter().filter(|server| server["state"] == state).count())
        };
        let rows = upstreams.iter().map(|(name, servers)| {
            let [healthy, unhealthy, ejected, unreachable, unchecked] = counts(servers).map(|count| count.to_string());
            let in_flight: u64 = as_list(servers).iter().filter_map(|server| server["in_flight"].as_u64()).sum();
            let faulty = as_list(servers).iter().filter(|server| server["state"] != "healthy");
            let faulty: Vec<_> = faulty.map(|server| printable(&server["server"])).collect();
            let name = printable(&Value::from(name.as_str()));
            let in_flight = in_flight.to_string();
            [name, healthy, unhealthy, ejected, unreachable, unchecked, in_flight, faulty.join(" ")]
        });
        let rows: Vec<_> = rows.collect();
        let style = |row: usize| match counts(upstreams.get(row)?.1) {
            [_, 0, 0, 0, _] => None,
            [0, .., 0] => Some(AnsiColor::Red.on_default()),
            _ => Some(AnsiColor::Yellow.on_default()),
        };
        let [healthy, unhealthy, ejected, unreachable, unchecked] = ENDPOINT_STATES;
        let header = ["upstream", healthy, unhealthy, ejected, unreachable, unchecked, "in flight", "not healthy"];
        self.write_table(header, rows, &header[1..7], style)
    }

    fn write_certificates(&mut self) -> io::Result<()> {
        let certificates = as_list(&self.report["certificates"]);
        let days: Vec<_> = certificates.iter().map(|certificate| self.days_until(&certificate["not_after"])).collect();
        let rows = certificates.iter().zip(&days).map(|(certificate, days)| {
            let names = as_list(&certificate["names"]).iter().map(printable).collect::<Vec<_>>().join(" ");
            let days = days.map_or_else(|| "none yet".to_owned(), |days| days.to_string());
            let error = printable(&certificate["error"]);
            [names, printable(&certificate["source"]), days, printable(&certificate["next_renewal"]), error]
        });
        let rows: Vec<_> = rows.collect();
        let style = |row: usize| match days.get(row)? {
            Some(days) if *days >= EXPIRY_WARNING_DAYS => None,
            Some(0..) => Some(AnsiColor::Yellow.on_default()),
            Some(_) | None => Some(AnsiColor::Red.on_default()),
        };
        let header = ["certificate", "source", "days left", "next renewal", "last error"];
        self.write_table(header, rows, &["days left"], style)
    }

    fn write_limits(&mut self) -> io::Result<()> {
        let limits = as_list(&self.report["top_limits"]);
        if limits.is_empty() {
            return writeln!(self.out, "\nno denials in the last 5 minutes");
        }
        let rows = limits.iter().map(|limit| {
            let shadow = if limit["shadow"] == true { " (shadow)" } else { "" };
            let top = &limit["identities"][0];
            let count = printable(&top["denied_at_least"]);
            let client = format_parts(&top["parts"]);
            [
                printable(&limit["limit"]) + shadow,
                limit["denied"].to_string(),
                count,
                client,
                printable(&top["identity"]),
            ]
        });
        let rows: Vec<_> = rows.collect();
        let header = ["limit", "denied in 5 min", "most", "client", "identity"];
        self.write_table(header, rows, &["denied in 5 min", "most"], |_| None)
    }

    /// Write a table after an empty line, unless the table has no rows.
    fn write_table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: Vec<[String; N]>,
        right_aligned: &[&str],
        style: impl Fn(usize) -> Option<Style>,
    ) -> io::Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        writeln!(self.out)?;
        write_table(header, rows.into_iter(), right_aligned, style, &mut self.out)
    }

    /// Return the seconds from the time of the report until an RFC 3339 time. Both times come from the gateway's clock.
    fn seconds_until(&self, time: &Value) -> Option<i64> {
        let parse = |time: &Value| time.as_str()?.parse::<Timestamp>().ok();
        Some(parse(time)?.as_second() - parse(&self.report["time"])?.as_second())
    }

    fn days_until(&self, time: &Value) -> Option<i64> {
        Some(self.seconds_until(time)?.div_euclid(SECONDS_PER_DAY))
    }

    fn age(&self, time: &Value) -> String {
        let seconds = self.seconds_until(time).map_or(0, |seconds| seconds.min(0).unsigned_abs());
        format!("{} ago", format_duration(seconds as f64))
    }
}

/// Format milliseconds with one decimal place. The result is empty if the value is not a number.
fn format_ms(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, |ms| format!("{ms:.1} ms"))
}
