//! `sluicegate top`, `inspect`, `reset` and `override`: commands that call the admin API of a running gateway.

pub mod client;

use std::io;
use std::io::Write;
use std::net::IpAddr;

use anstyle::{AnsiColor, Style};
use anyhow::bail;
use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, ContentArrangement, Row, Table, presets};
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

use crate::cli::admin::client::AdminClient;
use crate::http::text::is_deceptive;
use crate::limiter::key::Identity;
use crate::limiter::spec::{CONCURRENT_REQUESTS, DEFAULT_UNIT};

/// A command for a running gateway.
#[derive(Debug, Subcommand)]
pub(super) enum AdminCommand {
    /// Show the most frequently denied clients of the running gateway
    ///
    /// The command counts only denials by this gateway in the last 5 minutes.
    #[command(after_help = examples![
        "sluicegate top",
        "sluicegate top --limit per-ip --count 3",
        "sluicegate top --admin http://127.0.0.1:9180 --json",
    ])]
    Top {
        #[command(flatten)]
        target: AdminTarget,
        /// Show only this limit
        #[arg(long, value_name = "NAME")]
        limit: Option<String>,
        /// Show at most this many clients per limit
        #[arg(long, value_name = "N", default_value_t = 10)]
        count: u64,
    },
    /// Show the usage of an identity, without charging it
    #[command(after_help = examples![
        "sluicegate inspect ip=192.0.2.7",
        "sluicegate inspect --limit rate api-key=acme --cost 5",
    ])]
    Inspect {
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
    },
    /// Clear the usage of an identity for one limit, on all gateways that share the store
    #[command(after_help = examples![
        "sluicegate reset --limit per-ip ip=192.0.2.7",
        "sluicegate reset --limit rate api-key=acme",
    ])]
    Reset {
        #[command(flatten)]
        target: AdminTarget,
        #[command(flatten)]
        limit_identity: LimitIdentity,
    },
    /// List the certificates of the running gateway: issuer, expiry, source and next renewal
    #[command(after_help = examples![
        "sluicegate certificates",
        "sluicegate certificates --json > certificates.json",
    ])]
    Certificates {
        #[command(flatten)]
        target: AdminTarget,
    },
    /// Renew a certificate by ACME now
    ///
    /// The running gateway, or another gateway with the same Redis store, orders the certificate.
    /// `sluicegate certificates` shows the result. Each order counts towards the rate limits of the CA.
    #[command(after_help = examples![
        "sluicegate renew --name api.example.com",
        "sluicegate renew --name api.example.com --admin http://127.0.0.1:9180",
    ])]
    Renew {
        #[command(flatten)]
        target: AdminTarget,
        /// Renew the certificate for this DNS name
        #[arg(long, value_name = "NAME")]
        name: String,
    },
    /// Set, list and remove temporary quotas on all gateways that share the store
    #[command(after_help = examples![
        "sluicegate override set --limit per-ip ip=192.0.2.7 --quota 600/min --ttl 12h",
        "sluicegate override list",
        "sluicegate override remove --limit per-ip ip=192.0.2.7",
    ])]
    Override {
        #[command(subcommand)]
        action: OverrideCommand,
    },
}

/// A command for overrides.
#[derive(Debug, Subcommand)]
pub(super) enum OverrideCommand {
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

/// The gateway that a command calls, and the format of the command's output.
#[derive(Debug, Args)]
pub(super) struct AdminTarget {
    /// Call the gateway at this admin listener (a URL) or admin socket (a path) [default: `[admin]` of the
    /// configuration]
    ///
    /// The command takes the admin token from the environment variable SLUICEGATE_ADMIN_TOKEN. If the variable is unset
    /// and --admin is not given, the token is `admin.token` of the configuration.
    #[arg(long, value_name = "URL")]
    admin: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// A limit, and an identity that the limit counts.
#[derive(Debug, Args)]
pub(super) struct LimitIdentity {
    /// Name of the limit
    #[arg(long, value_name = "NAME")]
    limit: String,
    #[command(flatten)]
    identity: IdentityArgs,
}

/// An identity.
#[derive(Debug, Args)]
pub(super) struct IdentityArgs {
    /// Value of each part of the limit's `by`, such as ip=192.0.2.7 or api-key=CONSUMER; or the hash that `top` shows
    #[arg(required = true, value_name = "PART=VALUE")]
    identity: Vec<String>,
}

impl AdminCommand {
    /// The value of `--admin`: a URL or the path of a socket.
    pub(super) fn admin_url(&self) -> Option<&str> {
        self.target().admin.as_deref()
    }

    fn target(&self) -> &AdminTarget {
        match self {
            AdminCommand::Top { target, .. }
            | AdminCommand::Inspect { target, .. }
            | AdminCommand::Reset { target, .. }
            | AdminCommand::Certificates { target }
            | AdminCommand::Renew { target, .. } => target,
            AdminCommand::Override {
                action:
                    OverrideCommand::Set { target: reach, .. }
                    | OverrideCommand::List { target: reach }
                    | OverrideCommand::Remove { target: reach, .. },
            } => reach,
        }
    }
}

impl AdminCommand {
    /// Send the request and print the response.
    pub(super) fn run(&self, client: &AdminClient) -> anyhow::Result<()> {
        let response = send_request(self, client)?;
        if self.target().json {
            writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&response)?)?;
            return Ok(());
        }
        // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
        let out = &mut anstream::stdout().lock();
        match self {
            AdminCommand::Top { .. } => write_top(&response, out),
            AdminCommand::Inspect { .. } => write_identities(&response, out),
            AdminCommand::Reset { .. } => write_reset(&response, out),
            AdminCommand::Certificates { .. } => write_certificates(&response, out),
            AdminCommand::Renew { name, .. } => {
                writeln!(out, "requested the renewal of `{name}`; `sluicegate certificates` shows the result")
            }
            AdminCommand::Override { action: OverrideCommand::Set { .. } } => {
                write_overrides(&response["override"], out)
            }
            AdminCommand::Override { action: OverrideCommand::List { .. } } => write_override_list(&response, out),
            AdminCommand::Override { action: OverrideCommand::Remove { .. } } => write_removed(&response, out),
        }?;
        Ok(())
    }
}

fn send_request(command: &AdminCommand, client: &AdminClient) -> anyhow::Result<Value> {
    let get = |path: &str, query: &[(&str, &str)]| client.request(Method::GET, &request_target(path, query), None);
    match command {
        AdminCommand::Top { limit, count, .. } => {
            let count = count.to_string();
            let mut query = vec![("count", &*count)];
            query.extend(limit.iter().map(|limit| ("limit", &**limit)));
            get("/api/top", &query)
        }
        AdminCommand::Inspect { limit, cost, identity, .. } => {
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
            get("/api/identities", &query)
        }
        AdminCommand::Reset { limit_identity, .. } => {
            let body = json!({ "limit": limit_identity.limit, "identity": limit_identity.identity.to_json()? });
            client.request(Method::POST, "/api/reset", Some(&body))
        }
        AdminCommand::Certificates { .. } => get("/api/certificates", &[]),
        AdminCommand::Renew { name, .. } => {
            client.request(Method::POST, "/api/certificates/renew", Some(&json!({ "name": name })))
        }
        AdminCommand::Override { action: OverrideCommand::Set { limit_identity, quota, burst, ttl, note, .. } } => {
            let identity = limit_identity.identity.to_json()?;
            let body = json!({
                "limit": limit_identity.limit, "identity": identity, "quota": quota, "burst": burst, "ttl": ttl, "note": note
            });
            client.request(Method::POST, "/api/overrides", Some(&body))
        }
        AdminCommand::Override { action: OverrideCommand::List { .. } } => get("/api/overrides", &[]),
        AdminCommand::Override { action: OverrideCommand::Remove { limit_identity, .. } } => {
            let mut query = limit_identity.identity.query_pairs()?;
            query.push(("limit", &limit_identity.limit));
            client.request(Method::DELETE, &request_target("/api/overrides", &query), None)
        }
    }
}

/// Build a request target with percent-encoded query parameters.
pub(super) fn request_target(path: &str, query: &[(&str, &str)]) -> String {
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    let pairs: Vec<_> = query.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value))).collect();
    if pairs.is_empty() { path.to_owned() } else { format!("{path}?{}", pairs.join("&")) }
}

impl IdentityArgs {
    /// Return the hash, if the identity is given by its hash.
    fn hash(&self) -> Option<&str> {
        match &self.identity[..] {
            [only] if Identity::from_hex(only).is_some() => Some(only),
            _ => None,
        }
    }

    /// Return the query parameters of the admin API that select the identity.
    ///
    /// # Errors
    /// An argument is neither PART=VALUE nor the hash of the identity.
    fn query_pairs(&self) -> anyhow::Result<Vec<(&str, &str)>> {
        if let Some(hash) = self.hash() {
            return Ok(vec![("identity", hash)]);
        }
        let pairs = self.identity.iter().map(|argument| match argument.split_once('=') {
            Some((option @ ("limit" | "cost" | "quota" | "burst" | "ttl" | "note"), _)) => {
                bail!("`{option}` is not a part of an identity: use the option --{option}")
            }
            Some(("identity", _)) => {
                bail!("name the identity by its hash alone, or by PART=VALUE for each of its parts")
            }
            Some(pair) => Ok(pair),
            None => bail!(
                "name the identity by PART=VALUE for each of its parts, for example {}, or by its hash",
                example_part(argument)
            ),
        });
        pairs.collect()
    }

    fn to_json(&self) -> anyhow::Result<Value> {
        let query = self.query_pairs()?;
        Ok(match &query[..] {
            [("identity", hash)] => Value::from(*hash),
            parts => {
                Map::from_iter(parts.iter().map(|(label, value)| ((*label).to_owned(), Value::from(*value)))).into()
            }
        })
    }
}

/// Return the PART=VALUE that an argument without `=` probably means. Repeat only IP addresses, because any other
/// argument may be an API key.
fn example_part(argument: &str) -> String {
    let address = argument.parse::<IpAddr>().ok();
    address.map_or_else(|| "api-key=CONSUMER".to_owned(), |address| format!("ip={address}"))
}

// Format responses of the admin API as text.

/// Write a response of `/api/top`.
pub(crate) fn write_top(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let minutes = as_number(&response["window_seconds"]) / 60.0;
    let (mut without_denials, mut has_denials) = (Vec::new(), false);
    for limit in as_list(&response["limits"]) {
        if as_list(&limit["identities"]).is_empty() {
            without_denials.push(printable(&limit["limit"]));
            continue;
        }
        has_denials = true;
        let verb = if limit["shadow"] == true { "would have denied" } else { "denied" };
        writeln!(out, "{}: {verb} {} in the last {minutes} minutes", printable(&limit["limit"]), limit["denied"])?;
        let rows = as_list(&limit["identities"]).iter().map(|entry| {
            let (lower_bound, upper_bound) = (&entry["denied_at_least"], &entry["denied_at_most"]);
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

/// Return the suffix that names the unit of a quota, such as ` tokens`. The suffix is empty if the unit is requests.
pub(crate) fn unit_suffix(unit: &str) -> String {
    match unit {
        "" | DEFAULT_UNIT | CONCURRENT_REQUESTS => String::new(),
        unit => format!(" {unit}"),
    }
}

/// Write a response of `/api/identities`.
pub(crate) fn write_identities(response: &Value, out: &mut impl Write) -> io::Result<()> {
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

/// Write a response of `/api/reset`.
pub(crate) fn write_reset(response: &Value, out: &mut impl Write) -> io::Result<()> {
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

/// Write the list of `GET /api/certificates`.
pub(crate) fn write_certificates(response: &Value, out: &mut impl Write) -> io::Result<()> {
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

/// Write the list of `GET /api/overrides`.
pub(crate) fn write_override_list(response: &Value, out: &mut impl Write) -> io::Result<()> {
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
pub(crate) fn write_overrides(response: &Value, out: &mut impl Write) -> io::Result<()> {
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
pub(crate) fn write_removed(response: &Value, out: &mut impl Write) -> io::Result<()> {
    let effect = if response["removed"] == true { "has its standard quota again" } else { "had no override" };
    writeln!(
        out,
        "identity {} {effect} for the limit `{}`",
        printable(&response["identity"]),
        printable(&response["limit"])
    )
}

/// Write a table with a header row. `right_aligned` names the columns that contain numbers.
pub(super) fn write_table<const N: usize>(
    header: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    right_aligned: &[&str],
    style: impl Fn(usize) -> Option<Style>,
    out: &mut impl Write,
) -> io::Result<()> {
    write_table_within(None, header, rows, right_aligned, style, out)
}

/// Write a table whose lines have at most `width` characters. A cell that does not fit is cut and ends with `...`.
pub(super) fn write_table_within<const N: usize>(
    width: Option<u16>,
    header: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    right_aligned: &[&str],
    style: impl Fn(usize) -> Option<Style>,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width).set_truncation_indicator("...");
    }
    let one_line = |cells: [String; N]| {
        let mut row = Row::from(cells);
        row.max_height(1);
        row
    };
    table.set_header(one_line(header.map(str::to_uppercase)));
    table.add_rows(rows.map(one_line));
    for (column, title) in table.column_iter_mut().zip(header) {
        if right_aligned.contains(&title) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for (line, text) in table.lines().enumerate() {
        let style = line.checked_sub(1).map_or(Some(Style::new().bold()), &style).unwrap_or_default();
        writeln!(out, "{style}{}{style:#}", text.trim_end())?;
    }
    Ok(())
}

/// Format the parts of an identity. The admin API returns null for values that may be secrets.
pub(super) fn format_parts(parts: &Value) -> String {
    let part = |(label, value): (&String, &Value)| match value {
        Value::Null => format!("{label}=(hidden)"),
        value => format!("{label}={}", printable(value)),
    };
    parts.as_object().into_iter().flatten().map(part).collect::<Vec<_>>().join(" ")
}

/// Format a JSON value and escape its control characters. Clients choose parts of these values, and could send terminal
/// escape sequences.
pub(super) fn printable(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => printable_text(text),
        other => printable_text(&other.to_string()),
    }
}

/// Escape the control characters and invisible characters of a text.
pub(super) fn printable_text(text: &str) -> String {
    text.chars().flat_map(escape_char).collect()
}

fn escape_char(c: char) -> Vec<char> {
    if c.is_control() || is_deceptive(c) { c.escape_unicode().collect() } else { vec![c] }
}

pub(super) fn as_number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

pub(super) fn as_list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Format a number of seconds with one or two units. The result is empty if the value is not a number.
fn format_seconds(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, format_duration)
}

/// Format a number of seconds with one or two units.
pub(crate) fn format_duration(seconds: f64) -> String {
    let rounded = seconds.ceil() as u64;
    match rounded {
        0 => "0 s".to_owned(),
        // Round up to hundredths of a second. Subtract a small value first, so that floating-point errors do not add
        // 0.01 s.
        1..10 => format!("{} s", (seconds * 100.0 - 1e-6).ceil() / 100.0),
        10..120 => format!("{rounded} s"),
        120..7200 => format!("{} min {} s", rounded / 60, rounded % 60),
        7200..172_800 => format!("{} h {} min", rounded / 3600, rounded % 3600 / 60),
        _ => format!("{} d {} h", rounded / 86_400, rounded % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tables_tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn printable_escapes_control_characters() {
        assert_eq!(printable(&json!("a\u{1b}[31mb\nc\u{202e}")), "a\\u{1b}[31mb\\u{a}c\\u{202e}");
        assert_eq!(format_parts(&json!({"api-key": "acme", "cookie:sid": null})), "api-key=acme cookie:sid=(hidden)");
    }

    #[test]
    fn format_duration_uses_one_or_two_units() {
        for (seconds, expected) in [
            (0.0, "0 s"),
            (0.25, "0.25 s"),
            (1.1, "1.1 s"),
            (0.983_123, "0.99 s"),
            (9.0, "9 s"),
            (9.9999, "10 s"),
            (59.2, "60 s"),
            (150.0, "2 min 30 s"),
        ] {
            assert_eq!(format_seconds(&json!(seconds)), expected);
        }
        assert_eq!(
            (format_seconds(&json!(7260)), format_seconds(&json!(180_000))),
            ("2 h 1 min".to_owned(), "2 d 2 h".to_owned())
        );
        assert_eq!(format_seconds(&Value::Null), "");
    }
}
