//! A report in the terminal, at most 80 columns wide.

use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::{
    LimitSummary, LineCounts, ReplayReport, format_count, format_percent, format_quota, format_span, group_digits,
};

/// Columns of a terminal.
const TERMINAL_WIDTH: usize = 80;

/// Columns of a chart.
const CHART_COLUMNS: usize = TERMINAL_WIDTH - 4;

/// Heights of a column of a chart.
const CHART_BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Identities that are named.
const MAX_NAMED_IDENTITIES: usize = 5;

/// Writes a report.
///
/// # Errors
/// It cannot be written.
pub fn write_table(report: &ReplayReport, out: &mut impl Write) -> io::Result<()> {
    let logs = match &report.logs[..] {
        [one] => one.clone(),
        many => format!("{} logs", many.len()),
    };
    let LineCounts { requests, limited, unlimited, no_route, no_identity, malformed, not_http, .. } = report.lines;
    write_wrapped(out, "", &format!("{logs} ({}): {}", report.format, format_count(requests, "request", "requests")))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        writeln!(out, "from {from} to {to}")?;
    }
    let skipped = [
        (unlimited, "meets no limit", "meet no limit"),
        (no_route, "matches no route", "match no route"),
        (no_identity, "lacks the identity that a limit asks for", "lack the identity that a limit asks for"),
        (malformed, "would be refused", "would be refused"),
        (not_http, "is no valid request of HTTP", "are no valid requests of HTTP"),
    ];
    for (count, one, many) in skipped.into_iter().filter(|(count, ..)| *count > 0) {
        writeln!(out, "  {}", format_count(count, one, many))?;
    }
    for note in &report.notes {
        write_wrapped(out, "  ! ", note)?;
    }
    if limited == 0 && report.limits.0.iter().all(|limit| limit.skipped.is_none()) {
        writeln!(out, "no request meets a limit")?;
    }
    let (known, unknown): (Vec<_>, Vec<_>) = report.limits.0.iter().partition(|limit| limit.skipped.is_none());
    if !known.is_empty() {
        writeln!(out, "\n{}", overview_table(&known))?;
    }
    for limit in &unknown {
        let skip_reason = limit.skipped.as_deref().unwrap_or_default();
        let name = &limit.name;
        writeln!(out)?;
        write_wrapped(out, "", &format!("{name}: not replayed: {skip_reason} is not in this log."))?;
        write_wrapped(out, "  ", &format!("If another field tells them apart: --identity {name}=FIELD"))?;
    }
    for limit in known.into_iter().filter(|limit| limit.requests > 0) {
        write_details(limit, report.target, out)?;
    }
    Ok(())
}

fn overview_table(limits: &[&LimitSummary]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(TERMINAL_WIDTH as u16);
    table.set_header(["limit", "quota", "requests", "allowed", "denied", "share", "identities"]);
    for limit in limits {
        let shadow_note = if limit.shadow { " (shadow)" } else { "" };
        table.add_row([
            format!("{}{shadow_note}", limit.name),
            limit.quota_text(),
            group_digits(limit.requests),
            group_digits(limit.allowed),
            group_digits(limit.denied),
            format_percent(limit.denied_percent()),
            group_digits(limit.identities as u64),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let text = table.to_string();
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn write_details(limit: &LimitSummary, target: Option<f64>, out: &mut impl Write) -> io::Result<()> {
    let instead_of = limit.configured_quota.as_ref().map_or(String::new(), |quota| format!(" instead of {quota}"));
    writeln!(out, "\n{}: {}{instead_of}", limit.name, limit.quota_text())?;
    for note in &limit.notes {
        write_wrapped(out, "  ! ", note)?;
    }
    if limit.denied_by_others > 0 {
        let denied = format_count(limit.denied_by_others, "request was", "requests were");
        writeln!(out, "  {denied} denied by other limits")?;
    }
    if limit.denied > 0 {
        write_chart(limit, out)?;
        let order_note = if limit.identities_denied > MAX_NAMED_IDENTITIES { ", most of all" } else { "" };
        let identities = format_count(limit.identities_denied as u64, "identity was", "identities were");
        writeln!(out, "  {identities} denied{order_note}:")?;
        for identity in limit.top_denied.iter().take(MAX_NAMED_IDENTITIES) {
            let share = format_percent(100.0 * f64::from(identity.denied) / f64::from(identity.requests.max(1)));
            let (denied, requests) = (group_digits(identity.denied.into()), group_digits(identity.requests.into()));
            writeln!(out, "    {:<38} {denied:>10} of {requests:>11} {share:>8}", shorten(&identity.identity, 38))?;
        }
    }
    let (Some(target), Some(suggestion)) = (target, &limit.suggestion) else { return Ok(()) };
    let goal = format_percent(100.0 * target);
    match suggestion {
        Some(suggested) => {
            let share = format_percent(100.0 * suggested.denied as f64 / limit.requests.max(1) as f64);
            let denies = if suggested.denied == 0 { "denies none".to_owned() } else { format!("denies {share}") };
            let quota_text = format_quota(&suggested.quota, suggested.burst);
            write_wrapped(
                out,
                "  ",
                &format!("The smallest quota that denies fewer than {goal}: {quota_text} ({denies})."),
            )
        }
        None => write_wrapped(out, "  ", &format!("No quota of this kind denies fewer than {goal}.")),
    }
}

/// Denials over time, one column for each step.
fn write_chart(limit: &LimitSummary, out: &mut impl Write) -> io::Result<()> {
    // Two steps or more are one column where there are too many.
    let steps_per_column = limit.series.len().div_ceil(CHART_COLUMNS).max(1);
    let columns: Vec<u64> =
        limit.series.chunks(steps_per_column).map(|steps| steps.iter().map(|step| step.denied).sum()).collect();
    let highest = columns.iter().copied().max().unwrap_or(1).max(1);
    // What is more than nothing can be seen.
    let bar = |denied: &u64| CHART_BARS[(denied * 8).div_ceil(highest) as usize];
    let step = format_span(limit.step_seconds * steps_per_column as u64);
    writeln!(
        out,
        "  {} denied; a column is {step}, the highest is {}",
        group_digits(limit.denied),
        group_digits(highest)
    )?;
    let chart: String = columns.iter().map(bar).collect();
    writeln!(out, "    {}", chart.trim_end())
}

fn shorten(text: &str, width: usize) -> String {
    let printable: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if printable.chars().count() <= width {
        return printable;
    }
    printable.chars().take(width - 1).chain(['…']).collect()
}

/// Writes a text in lines of at most [`WIDTH`] columns; those after the first are indented as far as its mark.
fn write_wrapped(out: &mut impl Write, mark: &str, text: &str) -> io::Result<()> {
    let mut line = mark.to_owned();
    let mut is_empty = true;
    for word in text.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > TERMINAL_WIDTH {
            writeln!(out, "{line}")?;
            line = " ".repeat(mark.len().max(2));
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    writeln!(out, "{line}")
}
