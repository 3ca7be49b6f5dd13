//! What is found out about a request, as people read it in a terminal.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};

use crate::cli::operate::spelled;
use crate::explain::facts::{Answer, Client, Explanation, Field, Limited, Onward, Other, Part, Size, Standing};

/// Columns of a line, if words allow.
const WIDTH: usize = 80;

/// Columns of the names at the left, at the most.
const WIDEST: usize = 18;

const HEADING: Style = Style::new().bold();
const GOOD: Style = AnsiColor::Green.on_default();
const BAD: Style = AnsiColor::Red.on_default();

/// Writes all of it.
pub(super) fn write(facts: &Explanation, out: &mut impl Write) -> io::Result<()> {
    request(facts, out)?;
    routes(facts, out)?;
    limits(facts, out)?;
    answer(facts, out)?;
    facts.upstream.as_ref().map_or(Ok(()), |onward| upstream(facts, onward, out))
}

fn request(facts: &Explanation, out: &mut impl Write) -> io::Result<()> {
    heading(out, &format!("{} {}{}", facts.method, facts.host.as_deref().unwrap_or(""), facts.raw_path))?;
    if let Some(path) = facts.path.as_ref().filter(|path| **path != facts.raw_path) {
        item(out, 6, "path", &[format!("{path}, its canonical form")])?;
    }
    let Client { address, peer, trusted, header: field } = &facts.client;
    let said = match (field, trusted) {
        (Some(field), _) => format!("{address}, as the trusted proxy {peer} says in {field}"),
        (None, true) => format!("{address}, a trusted proxy that names nobody else"),
        (None, false) => format!("{address}, which connects; it is no trusted proxy"),
    };
    item(out, 6, "client", &[said])
}

fn routes(facts: &Explanation, out: &mut impl Write) -> io::Result<()> {
    match &facts.route {
        Some(taken) => heading(out, &format!("\nRoute {}: {}", taken.route, taken.path))?,
        None => heading(out, "\nNo route")?,
    }
    let width = widest(facts.other_routes.iter().map(|other| &*other.route));
    for Other { route, reason: why, .. } in &facts.other_routes {
        item(out, width, route, std::slice::from_ref(why))?;
    }
    match facts.other_routes_omitted {
        0 => Ok(()),
        more => writeln!(out, "  {more} more: --all"),
    }
}

fn limits(facts: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if facts.limits.is_empty() {
        return Ok(());
    }
    heading(out, &format!("\nLimits; store: {}", facts.store))?;
    if let Some(why) = facts.counters_unavailable.as_ref() {
        paragraph(out, "  ", 2, &format!("where identities stand is not known: {why}"))?;
    }
    let width = widest(facts.limits.iter().map(|limited| &*limited.limit));
    facts.limits.iter().try_for_each(|limited| item(out, width, &limited.limit, &lines(limited)))
}

/// What is said of a limit.
fn lines(limited: &Limited) -> Vec<String> {
    let shadow = if limited.shadow { " (shadow: it never denies)" } else { "" };
    if let Some(why) = &limited.skipped {
        return vec![format!("has no say: {why}{shadow}")];
    }
    if let Some(why) = &limited.error {
        return vec![format!("refuses it: {why}")];
    }
    let mut lines = Vec::new();
    if let (Some(standing), Some(size)) = (&limited.usage, &limited.effective_quota) {
        lines.push(stands(standing, size) + shadow);
    }
    if let (Some(Size { source: of, quota, capacity: at_once }), Some(cost)) = (&limited.effective_quota, limited.cost)
    {
        let of = if of == "standard" { String::new() } else { format!(" ({of})") };
        let paid = if limited.post_paid { "its cost is in the response".to_owned() } else { format!("costs {cost}") };
        lines.push(format!("{quota}{of}, {at_once} at once; {paid}"));
    }
    let part = |Part { part, value, source: from }: &Part| {
        format!("{part}={}, {from}", value.as_deref().unwrap_or("(hidden)"))
    };
    lines.extend(limited.parts.iter().map(part));
    lines.extend(limited.identity.as_ref().map(|identity| format!("identity {identity}")));
    lines
}

fn stands(standing: &Standing, size: &Size) -> String {
    let Standing {
        decision,
        remaining: left,
        remaining_after: left_after,
        reset_seconds,
        retry_seconds,
        max_wait_seconds: waits_seconds,
    } = standing;
    let word = match decision {
        Some(word) => word.replace('_', " "),
        None => "would allow it".to_owned(),
    };
    let mut said = format!("{word}: {left} of {} left", size.capacity);
    if let Some(after) = left_after {
        said += &format!(", {after} after it");
    }
    if *reset_seconds > 0.0 {
        said += &format!("; resets in {}", spelled(*reset_seconds));
    }
    match (retry_seconds, decision) {
        (Some(retry), _) => said += &format!("; would pass in {}", spelled(*retry)),
        (None, Some("denied" | "shadow_denied")) => said += "; never passes: it costs more than there can be",
        (None, _) => {}
    }
    if let Some(waits) = waits_seconds {
        said += &format!("; may wait {} for its turn", spelled(*waits));
    }
    said
}

fn answer(facts: &Explanation, out: &mut impl Write) -> io::Result<()> {
    let Answer { source: by, status, outcome, headers: fields, removed_headers: removed, body } = &facts.response;
    let style = if matches!(*outcome, "ok") { GOOD } else { BAD };
    let said = match (status, *by) {
        (Some(status), _) => format!("{status} from the gateway ({outcome})"),
        (None, _) => "the upstream's".to_owned(),
    };
    let unless = if facts.counters_unavailable.is_some() && facts.decision.is_none() {
        ", if its limits let it pass"
    } else {
        ""
    };
    writeln!(out, "\n{HEADING}Answer:{HEADING:#} {style}{said}{style:#}{unless}")?;
    written(out, "+", fields)?;
    removed.iter().try_for_each(|name| writeln!(out, "  - {name}"))?;
    body.iter().flat_map(|body| body.lines()).try_for_each(|line| paragraph(out, "  ", 2, line))
}

fn upstream(facts: &Explanation, onward: &Onward, out: &mut impl Write) -> io::Result<()> {
    let Onward { upstreams, target, set_headers: set, removed_headers: removed } = onward;
    heading(out, &format!("\nUpstream {}: {} {target}", upstreams.join(" or "), facts.method))?;
    written(out, "+", set)?;
    removed.iter().try_for_each(|name| writeln!(out, "  - {name}"))
}

fn written(out: &mut impl Write, sign: &str, fields: &[Field]) -> io::Result<()> {
    fields.iter().try_for_each(|Field { name, value }| {
        let value = value.as_deref().unwrap_or("(as configured)");
        paragraph(out, &format!("  {sign} {name}: "), 6, value)
    })
}

fn heading(out: &mut impl Write, text: &str) -> io::Result<()> {
    let (space, text) = text.strip_prefix('\n').map_or(("", text), |text| ("\n", text));
    writeln!(out, "{space}{HEADING}{text}{HEADING:#}")
}

fn widest<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| name.chars().count()).max().unwrap_or(0).min(WIDEST)
}

/// A name at the left, what is said of it at the right.
fn item(out: &mut impl Write, width: usize, name: &str, lines: &[String]) -> io::Result<()> {
    let mut first = format!("  {name:width$}  ");
    for line in lines {
        paragraph(out, &first, width + 4, line)?;
        first = " ".repeat(width + 4);
    }
    Ok(())
}

/// A text in lines that fit, with `first` before the first one and as many spaces as `indent` says before others.
fn paragraph(out: &mut impl Write, first: &str, indent: usize, text: &str) -> io::Result<()> {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{}", line.trim_end())?;
            line = " ".repeat(indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.extend(word.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }));
        is_empty = false;
    }
    writeln!(out, "{}", line.trim_end())
}
