//! What the commands that call the admin API of a running gateway have in common: options, requests and tables.

pub(super) mod client;

use std::io::{Write, stdout};
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::{env, io};

use anstyle::Style;
use anyhow::bail;
use clap::Args;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::termios::tcgetwinsize;
use serde_json::{Map, Value};

use crate::cli::admin::client::{AdminClient, token_from_env};
use crate::cli::shared::load_for;
use crate::http::text::is_deceptive;
use crate::limiter::key::Identity;
use crate::limiter::spec::{CONCURRENT_REQUESTS, DEFAULT_UNIT};

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
    pub(super) limit: String,
    #[command(flatten)]
    pub(super) identity: IdentityArgs,
}

/// An identity.
#[derive(Debug, Args)]
pub(super) struct IdentityArgs {
    /// Value of each part of the limit's `by`, such as api-key=CONSUMER; or an IP address; or the hash that `top` shows
    #[arg(required = true, value_name = "PART=VALUE")]
    identity: Vec<String>,
}

/// Standard output. The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
pub(super) type Output = anstream::AutoStream<io::StdoutLock<'static>>;

impl AdminTarget {
    /// Connect to the gateway.
    ///
    /// # Errors
    /// The configuration is invalid, or has no `[admin]`.
    pub(super) fn client(&self, config_path: &Path) -> anyhow::Result<AdminClient> {
        if let Some(url) = &self.admin {
            return AdminClient::from_url(url);
        }
        // If SLUICEGATE_ADMIN_TOKEN is set, the command does not use `admin.token`. An unset variable in `admin.token` is
        // then only a warning.
        let needed = match token_from_env() {
            Some(_) => &["admin.address"][..],
            None => &["admin"],
        };
        AdminClient::from_config(config_path, &load_for(config_path, needed)?)
    }

    /// Print a response: as JSON with `--json`, otherwise as text.
    pub(super) fn print(
        &self,
        response: &Value,
        write: impl FnOnce(&mut Output) -> io::Result<()>,
    ) -> anyhow::Result<ExitCode> {
        if self.json {
            writeln!(io::stdout(), "{}", serde_json::to_string_pretty(response)?)?;
        } else {
            write(&mut anstream::stdout().lock())?;
        }
        Ok(ExitCode::SUCCESS)
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
    pub(super) fn hash(&self) -> Option<&str> {
        match &self.identity[..] {
            [only] if Identity::from_hex(only).is_some() => Some(only),
            _ => None,
        }
    }

    /// Return the query parameters of the admin API that select the identity.
    ///
    /// # Errors
    /// An argument is neither PART=VALUE nor the hash of the identity.
    pub(super) fn query_pairs(&self) -> anyhow::Result<Vec<(&str, &str)>> {
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
            None if argument.parse::<IpAddr>().is_ok() => Ok(("ip", &**argument)),
            None => bail!(
                "name the identity by PART=VALUE for each of its parts, for example api-key=CONSUMER, or by \
                 its hash"
            ),
        });
        pairs.collect()
    }

    pub(super) fn to_json(&self) -> anyhow::Result<Value> {
        let query = self.query_pairs()?;
        Ok(match &query[..] {
            [("identity", hash)] => Value::from(*hash),
            parts => {
                Map::from_iter(parts.iter().map(|(label, value)| ((*label).to_owned(), Value::from(*value)))).into()
            }
        })
    }
}

/// Return the suffix that names the unit of a quota, such as ` tokens`. The suffix is empty if the unit is requests.
pub(crate) fn unit_suffix(unit: &str) -> String {
    match unit {
        "" | DEFAULT_UNIT | CONCURRENT_REQUESTS => String::new(),
        unit => format!(" {unit}"),
    }
}

/// Write a table with a header row. `right_aligned` names the columns that contain numbers. If the lines of the table are
/// longer than those of the terminal, write each row as a list.
pub(super) fn write_table<const N: usize>(
    header: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    right_aligned: &[&str],
    style: impl Fn(usize) -> Option<Style>,
    out: &mut impl Write,
) -> io::Result<()> {
    let rows: Vec<_> = rows.collect();
    let header_line = header.map(str::to_uppercase);
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(&header_line).add_rows(&rows);
    for (column, title) in table.column_iter_mut().zip(header) {
        if right_aligned.contains(&title) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<_> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    if let Some(width) = terminal_width()
        && lines.iter().any(|line| line.chars().count() > width.into())
    {
        return write_lists(width, &header_line, &rows, style, out);
    }
    for (line, text) in lines.iter().enumerate() {
        let style = line.checked_sub(1).map_or(Some(Style::new().bold()), &style).unwrap_or_default();
        writeln!(out, "{style}{text}{style:#}")?;
    }
    Ok(())
}

/// Write each row as a list of the cells that are not empty, with the titles of their columns. A cell that does not fit
/// has several lines.
fn write_lists<const N: usize>(
    width: u16,
    titles: &[String; N],
    rows: &[[String; N]],
    style: impl Fn(usize) -> Option<Style>,
    out: &mut impl Write,
) -> io::Result<()> {
    for (number, row) in rows.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        let mut list = Table::new();
        list.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        // Columns of equal width, because the lists of all rows have the same titles.
        let widest = titles.iter().map(|title| title.chars().count()).max().unwrap_or_default();
        let cells = titles.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
        list.add_rows(cells.map(|(title, cell)| [format!("{title:widest$}"), cell.clone()]));
        if let Some(column) = list.column_mut(0) {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
        let style = style(number).unwrap_or_default();
        for line in list.lines() {
            writeln!(out, "{style}{}{style:#}", line.trim_end())?;
        }
    }
    Ok(())
}

/// Return the width of a line in characters: `COLUMNS`, or the width of the terminal if the variable is unset. Return
/// `None` if the variable is unset and the output is not a terminal.
fn terminal_width() -> Option<u16> {
    let columns = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    columns.or_else(|| tcgetwinsize(stdout()).ok().map(|size| size.ws_col)).filter(|columns| *columns > 0)
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
pub(super) fn format_seconds(value: &Value) -> String {
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
