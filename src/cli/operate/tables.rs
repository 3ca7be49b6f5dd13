//! Answers of the admin API as tables that people read.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::Value;

/// `/api/top`
pub(super) fn top(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    let minutes = number(&answer["window_seconds"]) / 60.0;
    let (mut quiet, mut any) = (Vec::new(), false);
    for limit in list(&answer["limits"]) {
        if list(&limit["identities"]).is_empty() {
            quiet.push(text(&limit["limit"]));
            continue;
        }
        any = true;
        let would = if limit["shadow"] == true { "would have denied" } else { "denied" };
        writeln!(out, "{}: {would} {} in the last {minutes} minutes", text(&limit["limit"]), limit["denied"])?;
        let rows = list(&limit["identities"]).iter().map(|one| {
            let (least, most) = (&one["denied_at_least"], &one["denied_at_most"]);
            let times = if least == most { least.to_string() } else { format!("{least} to {most}") };
            [times, parts(&one["parts"]), text(&one["identity"])]
        });
        show(["count", "client", "identity"], rows, &["count"], |_| None, out)?;
    }
    if !quiet.is_empty() {
        let but = if any { "nobody else was denied" } else { "nobody was denied" };
        writeln!(out, "{but} in the last {minutes} minutes: {}", quiet.join(", "))?;
    }
    Ok(())
}

/// `/api/identities`
pub(super) fn standings(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    let standings = list(&answer["limits"]);
    let rows = standings.iter().map(|one| {
        let shadow = if one["shadow"] == true { " (shadow)" } else { "" };
        [
            text(&one["limit"]) + shadow,
            text(&one["decision"]),
            text(&one["quota"]),
            format!("{} of {}", one["remaining"], one["capacity"]),
            duration(&one["reset_seconds"]),
            duration(&one["retry_seconds"]),
            if one["override"].is_object() {
                format!("for {} more", duration(&one["override"]["expires_in_seconds"]))
            } else {
                String::new()
            },
            text(&one["identity"]),
        ]
    });
    let header = ["limit", "decision", "quota", "remaining", "resets in", "retry in", "override", "identity"];
    let style = |row: usize| match standings.get(row)?["decision"].as_str()? {
        "denied" | "cost_too_large" => Some(AnsiColor::Red.on_default()),
        _ => None,
    };
    show(header, rows, &["remaining", "resets in", "retry in"], style, out)
}

/// `/api/reset`
pub(super) fn reset(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    let was = if answer["removed"] == true { "starts afresh" } else { "had nothing counted" };
    let within = &answer["effective_within_seconds"];
    let soon = if number(within) > 0.0 { format!("; all gateways know within {within} s") } else { String::new() };
    writeln!(out, "{} of `{}` {was}{soon}", text(&answer["identity"]), text(&answer["limit"]))
}

/// All of `/api/overrides`
pub(super) fn all_overrides(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    overrides(&answer["overrides"], out)?;
    if answer["store_error"].is_string() {
        let error = text(&answer["store_error"]);
        writeln!(out, "the gateway cannot read the store and lists the overrides that it applies: {error}")?;
    }
    Ok(())
}

/// One or many of `/api/overrides`
pub(super) fn overrides(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    let all = if answer.is_array() { list(answer) } else { std::slice::from_ref(answer) };
    if all.is_empty() {
        return writeln!(out, "no identity has a quota of its own for a time");
    }
    let rows = all.iter().map(|one| {
        [
            text(&one["limit"]),
            text(&one["identity"]),
            text(&one["quota"]),
            text(&one["burst"]),
            duration(&one["expires_in_seconds"]),
            text(&one["note"]),
        ]
    });
    show(["limit", "identity", "quota", "burst", "expires in", "note"], rows, &["burst", "expires in"], |_| None, out)
}

/// An answer to the end of an override.
pub(super) fn removed(answer: &Value, out: &mut impl Write) -> io::Result<()> {
    let done = if answer["removed"] == true { "has the quota of everybody again" } else { "had no override" };
    writeln!(out, "{} of `{}` {done}", text(&answer["identity"]), text(&answer["limit"]))
}

fn show<const N: usize>(
    header: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    figures: &[&str],
    style: impl Fn(usize) -> Option<Style>,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.iter().map(|word| word.to_uppercase()));
    table.add_rows(rows);
    for (column, word) in table.column_iter_mut().zip(header) {
        if figures.contains(&word) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for (line, text) in table.lines().enumerate() {
        let style = line.checked_sub(1).map_or(Some(Style::new().bold()), &style).unwrap_or_default();
        writeln!(out, "{style}{}{style:#}", text.trim_end())?;
    }
    Ok(())
}

/// What is shown of an identity; what may be a secret is not known here.
fn parts(parts: &Value) -> String {
    let part = |(word, value): (&String, &Value)| match value {
        Value::Null => format!("{word}=(hidden)"),
        value => format!("{word}={}", text(value)),
    };
    parts.as_object().into_iter().flatten().map(part).collect::<Vec<_>>().join(" ")
}

/// Text that somebody else may have chosen: it must not tell the terminal what to do.
fn text(value: &Value) -> String {
    let plain = |text: &str| text.chars().flat_map(escaped).collect();
    match value {
        Value::Null => String::new(),
        Value::String(text) => plain(text),
        other => plain(&other.to_string()),
    }
}

fn escaped(c: char) -> Vec<char> {
    // Marks that turn the direction of text, and those that take no room.
    let turns = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    if c.is_control() || turns { c.escape_unicode().collect() } else { vec![c] }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Seconds in one or two units.
fn duration(value: &Value) -> String {
    value.as_f64().map_or_else(String::new, spelled)
}

/// The same.
pub(crate) fn spelled(seconds: f64) -> String {
    let whole = seconds.ceil() as u64;
    match whole {
        0..10 => format!("{seconds} s"),
        10..120 => format!("{whole} s"),
        120..7200 => format!("{} min {} s", whole / 60, whole % 60),
        7200..172_800 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_of_strangers_does_not_reach_the_terminal_as_it_is() {
        assert_eq!(text(&json!("a\u{1b}[31mb\nc\u{202e}")), "a\\u{1b}[31mb\\u{a}c\\u{202e}");
        assert_eq!(parts(&json!({"api-key": "acme", "cookie:sid": null})), "api-key=acme cookie:sid=(hidden)");
    }

    #[test]
    fn durations_are_short() {
        for (seconds, expected) in [(0.25, "0.25 s"), (9.0, "9 s"), (59.2, "60 s"), (150.0, "2 min 30 s")] {
            assert_eq!(duration(&json!(seconds)), expected);
        }
        assert_eq!((duration(&json!(7260)), duration(&json!(180_000))), ("2 h 1 min".to_owned(), "2 d 2 h".to_owned()));
        assert_eq!(duration(&Value::Null), "");
    }
}
