//! A report in the terminal, at most 80 columns wide.

use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::{Lines, OfLimit, Report, counted, grouped, percent, size, span};

/// Columns of a terminal.
const WIDTH: usize = 80;

/// Columns of a chart.
const CHART: usize = WIDTH - 4;

/// Heights of a column of a chart.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Identities that are named.
const NAMED: usize = 5;

/// Writes a report.
///
/// # Errors
/// It cannot be written.
pub fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let logs = match &report.logs[..] {
        [one] => one.clone(),
        many => format!("{} logs", many.len()),
    };
    let Lines { requests, limited, unlimited, no_route, no_identity, malformed, not_http, .. } = report.lines;
    wrapped(out, "", &format!("{logs} ({}): {}", report.format, counted(requests, "request", "requests")))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        writeln!(out, "from {from} to {to}")?;
    }
    let others = [
        (unlimited, "meets no limit", "meet no limit"),
        (no_route, "matches no route", "match no route"),
        (no_identity, "lacks the identity that a limit asks for", "lack the identity that a limit asks for"),
        (malformed, "would be refused", "would be refused"),
        (not_http, "is no valid request of HTTP", "are no valid requests of HTTP"),
    ];
    for (count, one, many) in others.into_iter().filter(|(count, ..)| *count > 0) {
        writeln!(out, "  {}", counted(count, one, many))?;
    }
    for note in &report.notes {
        wrapped(out, "  ! ", note)?;
    }
    if limited == 0 && report.limits.0.iter().all(|limit| limit.skipped.is_none()) {
        writeln!(out, "no request meets a limit")?;
    }
    let (known, unknown): (Vec<_>, Vec<_>) = report.limits.0.iter().partition(|limit| limit.skipped.is_none());
    if !known.is_empty() {
        writeln!(out, "\n{}", overview(&known))?;
    }
    for limit in &unknown {
        let lacks = limit.skipped.as_deref().unwrap_or_default();
        let name = &limit.name;
        writeln!(out)?;
        wrapped(out, "", &format!("{name}: not replayed: {lacks} is not in this log."))?;
        wrapped(out, "  ", &format!("If another field tells them apart: --identity {name}=FIELD"))?;
    }
    for limit in known.into_iter().filter(|limit| limit.requests > 0) {
        details(limit, report.target, out)?;
    }
    Ok(())
}

fn overview(limits: &[&OfLimit]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(WIDTH as u16);
    table.set_header(["limit", "quota", "requests", "allowed", "denied", "share", "identities"]);
    for limit in limits {
        let on_trial = if limit.shadow { " (shadow)" } else { "" };
        table.add_row([
            format!("{}{on_trial}", limit.name),
            limit.size(),
            grouped(limit.requests),
            grouped(limit.allowed),
            grouped(limit.denied),
            percent(limit.percent()),
            grouped(limit.identities as u64),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let text = table.to_string();
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn details(limit: &OfLimit, target: Option<f64>, out: &mut impl Write) -> io::Result<()> {
    let instead = limit.configured_quota.as_ref().map_or(String::new(), |quota| format!(" instead of {quota}"));
    writeln!(out, "\n{}: {}{instead}", limit.name, limit.size())?;
    for note in &limit.notes {
        wrapped(out, "  ! ", note)?;
    }
    if limit.denied_by_others > 0 {
        let denied = counted(limit.denied_by_others, "request was", "requests were");
        writeln!(out, "  {denied} denied by other limits")?;
    }
    if limit.denied > 0 {
        chart(limit, out)?;
        let most = if limit.identities_denied > NAMED { ", most of all" } else { "" };
        let identities = counted(limit.identities_denied as u64, "identity was", "identities were");
        writeln!(out, "  {identities} denied{most}:")?;
        for worst in limit.top_denied.iter().take(NAMED) {
            let share = percent(100.0 * f64::from(worst.denied) / f64::from(worst.requests.max(1)));
            let (denied, requests) = (grouped(worst.denied.into()), grouped(worst.requests.into()));
            writeln!(out, "    {:<38} {denied:>10} of {requests:>11} {share:>8}", shortened(&worst.identity, 38))?;
        }
    }
    let (Some(target), Some(suggestion)) = (target, &limit.suggestion) else { return Ok(()) };
    let goal = percent(100.0 * target);
    match suggestion {
        Some(found) => {
            let share = percent(100.0 * found.denied as f64 / limit.requests.max(1) as f64);
            let denies = if found.denied == 0 { "denies none".to_owned() } else { format!("denies {share}") };
            let found = size(&found.quota, found.burst);
            wrapped(out, "  ", &format!("The smallest quota that denies fewer than {goal}: {found} ({denies})."))
        }
        None => wrapped(out, "  ", &format!("No quota of this kind denies fewer than {goal}.")),
    }
}

/// Denials over time, one column for each step.
fn chart(limit: &OfLimit, out: &mut impl Write) -> io::Result<()> {
    // Two steps or more are one column where there are too many.
    let together = limit.series.len().div_ceil(CHART).max(1);
    let columns: Vec<u64> =
        limit.series.chunks(together).map(|steps| steps.iter().map(|step| step.denied).sum()).collect();
    let highest = columns.iter().copied().max().unwrap_or(1).max(1);
    // What is more than nothing can be seen.
    let bar = |denied: &u64| BARS[(denied * 8).div_ceil(highest) as usize];
    let step = span(limit.step_seconds * together as u64);
    writeln!(out, "  {} denied; a column is {step}, the highest is {}", grouped(limit.denied), grouped(highest))?;
    let chart: String = columns.iter().map(bar).collect();
    writeln!(out, "    {}", chart.trim_end())
}

fn shortened(text: &str, width: usize) -> String {
    let printable: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if printable.chars().count() <= width {
        return printable;
    }
    printable.chars().take(width - 1).chain(['…']).collect()
}

/// Writes a text in lines of at most [`WIDTH`] columns; those after the first are indented as far as its mark.
fn wrapped(out: &mut impl Write, mark: &str, text: &str) -> io::Result<()> {
    let mut line = mark.to_owned();
    let mut empty = true;
    for word in text.split(' ') {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{line}")?;
            line = " ".repeat(mark.len().max(2));
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    writeln!(out, "{line}")
}
