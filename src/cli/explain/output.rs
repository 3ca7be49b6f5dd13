//! Terminal output of `sluicegate explain`.

use std::io;
use std::io::Write;

use anstyle::{AnsiColor, Style};

use crate::cli::admin::{format_duration, unit_suffix};
use crate::tools::explain::report::{
    AccessReport, AuthReport, ClientReport, CorsReport, EffectiveQuota, Explanation, HeaderReport, IdentityPartReport,
    LimitReport, LimitUsage, MatchedRoute, MirrorReport, OtherRoute, ResponseReport, UpstreamReport,
};

/// Maximum width of a line that has more than one word.
const LINE_WIDTH: usize = 80;

/// Maximum width of the name column.
const MAX_NAME_WIDTH: usize = 18;

const HEADING_STYLE: Style = Style::new().bold();
const SUCCESS_STYLE: Style = AnsiColor::Green.on_default();
const ERROR_STYLE: Style = AnsiColor::Red.on_default();

/// Write an explanation.
pub(super) fn write(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    write_request(explanation, out)?;
    write_routes(explanation, out)?;
    write_access(explanation, out)?;
    write_cors(explanation, out)?;
    write_authentication(explanation, out)?;
    write_limits(explanation, out)?;
    write_response(explanation, out)?;
    explanation.upstream.as_ref().map_or(Ok(()), |upstream_report| write_upstream(explanation, upstream_report, out))
}

fn write_request(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    write_heading(
        out,
        &format!("{} {}{}", explanation.method, explanation.host.as_deref().unwrap_or(""), explanation.raw_path),
    )?;
    let width = if explanation.listener.is_some() { "listener".len() } else { "client".len() };
    if let Some(path) = explanation.path.as_ref().filter(|path| **path != explanation.raw_path) {
        write_item(out, width, "path", &[format!("{path} (canonical form)")])?;
    }
    let ClientReport { address, peer, trusted, header } = &explanation.client;
    let text = match (header, trusted) {
        (Some(header), _) => format!("{address}, from {header} of the trusted proxy {peer}"),
        (None, true) => format!("{address}, a trusted proxy that sent no client address"),
        (None, false) => format!("{address}, the peer, which is not a trusted proxy"),
    };
    write_item(out, width, "client", &[text])?;
    explanation.listener.iter().try_for_each(|name| write_item(out, width, "listener", std::slice::from_ref(name)))
}

fn write_routes(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    match &explanation.route {
        Some(route) => write_matched_route(route, out)?,
        None => write_heading(out, "\nNo route")?,
    }
    if !explanation.other_routes.is_empty() {
        write_heading(out, "\nOther routes")?;
    }
    let width = max_width(explanation.other_routes.iter().map(|other| &*other.route));
    for OtherRoute { route, reason, .. } in &explanation.other_routes {
        write_item(out, width, route, std::slice::from_ref(reason))?;
    }
    match explanation.other_routes_omitted {
        0 => Ok(()),
        more => writeln!(out, "  {more} more with --all"),
    }
}

fn write_matched_route(matched: &MatchedRoute, out: &mut impl Write) -> io::Result<()> {
    let MatchedRoute { route, path, host, listeners, methods, conditions } = matched;
    write_heading(out, &format!("\nRoute {route}: {path}"))?;
    let host: Vec<_> = host.iter().cloned().collect();
    for (name, values) in [("host", &host), ("listeners", listeners), ("methods", methods)] {
        if !values.is_empty() {
            write_item(out, 9, name, &[values.join(", ")])?;
        }
    }
    if conditions.is_empty() { Ok(()) } else { write_item(out, 9, "requires", conditions) }
}

fn write_access(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if explanation.access.is_empty() {
        return Ok(());
    }
    write_heading(out, "\nAccess")?;
    explanation.access.iter().try_for_each(|AccessReport { rule, allowed, reason }| {
        let decision = if *allowed { "allows" } else { "denies" };
        write_item(out, 8, rule, &[format!("{decision} the client: {reason}")])
    })
}

fn write_cors(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    let Some(CorsReport { origin, allowed, preflight }) = &explanation.cors else { return Ok(()) };
    write_heading(out, "\nCORS")?;
    let text = match (origin, allowed) {
        (None, false) => "the request has no origin".to_owned(),
        (None, true) => "all origins are allowed".to_owned(),
        (Some(origin), true) => format!("{origin} is allowed"),
        (Some(origin), false) => format!("the origin {origin} is not allowed: its scripts cannot read the response"),
    };
    write_item(out, 9, "origin", &[text])?;
    match preflight {
        true => write_item(out, 9, "preflight", &["answered by the gateway, without a charge".to_owned()]),
        false => Ok(()),
    }
}

fn write_authentication(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if explanation.authentication.is_empty() {
        return Ok(());
    }
    write_heading(out, "\nAuthentication")?;
    let width = max_width(explanation.authentication.iter().map(|report| &*report.provider));
    explanation.authentication.iter().try_for_each(|AuthReport { provider, kind, result, reason }| {
        let text = match *result {
            "not_checked" => format!("{kind}: {reason}"),
            result => format!("{kind}: {result}: {reason}"),
        };
        write_item(out, width, provider, &[text])
    })
}

fn write_limits(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if explanation.limits.is_empty() {
        return Ok(());
    }
    write_heading(out, &format!("\nLimits; store: {}", explanation.store))?;
    if let Some(reason) = explanation.counters_unavailable.as_ref() {
        write_paragraph(out, "  ", 2, &format!("usage is unknown: {reason}"))?;
    }
    let width = max_width(explanation.limits.iter().map(|limit| &*limit.limit));
    explanation.limits.iter().try_for_each(|limit| write_item(out, width, &limit.limit, &limit_lines(limit)))
}

/// The lines about a limit.
fn limit_lines(limit: &LimitReport) -> Vec<String> {
    let shadow = if limit.shadow { " (shadow: it never denies)" } else { "" };
    if let Some(reason) = &limit.skipped {
        return vec![format!("does not apply: {reason}{shadow}")];
    }
    if let Some(error) = &limit.error {
        return vec![format!("rejects the request: {error}")];
    }
    let mut lines = Vec::new();
    if let (Some(usage), Some(quota)) = (&limit.usage, &limit.effective_quota) {
        lines.push(usage_text(usage, quota) + shadow);
    }
    if let (Some(EffectiveQuota { source, quota, unit, capacity }), Some(cost)) = (&limit.effective_quota, limit.cost) {
        let unit_note = unit_suffix(unit);
        let source_note = if source == "standard" { String::new() } else { format!(" ({source})") };
        let cost_text = if limit.post_paid {
            "the cost is known only after the response".to_owned()
        } else {
            format!("costs {cost}")
        };
        let hidden_note = if limit.announce || limit.shadow { "" } else { "; not announced in response headers" };
        lines.push(format!("{quota}{unit_note}{source_note}, {capacity} at once; {cost_text}{hidden_note}"));
    }
    let part = |IdentityPartReport { part, value, source }: &IdentityPartReport| {
        format!("{part}={}, {source}", value.as_deref().unwrap_or("(hidden)"))
    };
    lines.extend(limit.parts.iter().map(part));
    lines.extend(limit.identity.as_ref().map(|identity| format!("identity {identity}")));
    lines
}

fn usage_text(usage: &LimitUsage, effective_quota: &EffectiveQuota) -> String {
    let LimitUsage { decision, remaining, remaining_after, reset_seconds, retry_seconds, max_wait_seconds } = usage;
    let label = match decision {
        Some(word) => word.replace('_', " "),
        None => "would allow".to_owned(),
    };
    let mut text = format!("{label}: {remaining} of {} remaining", effective_quota.capacity);
    if let Some(remaining_after) = remaining_after {
        text += &format!(", {remaining_after} after this request");
    }
    if *reset_seconds > 0.0 {
        text += &format!("; resets in {}", format_duration(*reset_seconds));
    }
    match (retry_seconds, decision) {
        (Some(retry), _) => text += &format!("; retry in {}", format_duration(*retry)),
        (None, Some("denied" | "shadow_denied")) => text += "; never allowed: the cost exceeds the capacity",
        (None, _) => {}
    }
    if let Some(max_wait) = max_wait_seconds {
        text += &format!("; may be queued for {}", format_duration(*max_wait));
    }
    text
}

fn write_response(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    let ResponseReport { source, status, outcome, headers, removed_headers, body } = &explanation.response;
    let style = if matches!(*outcome, "ok" | "preflight" | "undecided") { SUCCESS_STYLE } else { ERROR_STYLE };
    let status_text = match (status, *source) {
        (Some(status), _) => format!("{status} from the gateway ({outcome})"),
        (None, "authentication-server") => "sent by the authentication server, unless it admits the request".to_owned(),
        (None, _) => "the upstream's".to_owned(),
    };
    let condition = if explanation.counters_unavailable.is_some() && explanation.decision.is_none() {
        ", if the limits allow it"
    } else {
        ""
    };
    writeln!(out, "\n{HEADING_STYLE}Response:{HEADING_STYLE:#} {style}{status_text}{style:#}{condition}")?;
    write_headers(out, "+", headers)?;
    removed_headers.iter().try_for_each(|name| writeln!(out, "  - {name}"))?;
    body.iter().flat_map(|body| body.lines()).try_for_each(|line| write_paragraph(out, "  ", 2, line))
}

fn write_upstream(explanation: &Explanation, report: &UpstreamReport, out: &mut impl Write) -> io::Result<()> {
    let UpstreamReport { upstreams, target, set_headers, removed_headers, mirror } = report;
    write_heading(out, &format!("\nUpstream {}: {} {target}", upstreams.join(" or "), explanation.method))?;
    write_headers(out, "+", set_headers)?;
    removed_headers.iter().try_for_each(|name| writeln!(out, "  - {name}"))?;
    mirror.as_ref().map_or(Ok(()), |mirror| write_mirror(mirror, out))
}

fn write_mirror(mirror: &MirrorReport, out: &mut impl Write) -> io::Result<()> {
    let MirrorReport { upstream, percent, max_body, skipped } = mirror;
    let text = match skipped {
        Some(reason) => format!("not mirrored: {reason}"),
        None => format!("{percent} % of the requests are mirrored, if their bodies have at most {max_body} bytes"),
    };
    write_heading(out, &format!("\nMirror {upstream}"))?;
    write_paragraph(out, "  ", 2, &text)
}

fn write_headers(out: &mut impl Write, sign: &str, headers: &[HeaderReport]) -> io::Result<()> {
    headers.iter().try_for_each(|HeaderReport { name, value }| {
        let value = value.as_deref().unwrap_or("(as configured)");
        write_paragraph(out, &format!("  {sign} {name}: "), 6, value)
    })
}

fn write_heading(out: &mut impl Write, text: &str) -> io::Result<()> {
    let (space, text) = text.strip_prefix('\n').map_or(("", text), |text| ("\n", text));
    writeln!(out, "{space}{HEADING_STYLE}{text}{HEADING_STYLE:#}")
}

fn max_width<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| name.chars().count()).max().unwrap_or(0).min(MAX_NAME_WIDTH)
}

/// Write one item of the explanation: the name in the left column, and its lines in the right column.
fn write_item(out: &mut impl Write, width: usize, name: &str, lines: &[String]) -> io::Result<()> {
    let mut first = format!("  {name:width$}  ");
    for line in lines {
        write_paragraph(out, &first, width + 4, line)?;
        first = " ".repeat(width + 4);
    }
    Ok(())
}

/// Write a text wrapped at [`LINE_WIDTH`]. `first` precedes the first line. The other lines are indented by `indent`
/// spaces.
fn write_paragraph(out: &mut impl Write, first: &str, indent: usize, text: &str) -> io::Result<()> {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > LINE_WIDTH {
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
