//! The report as one self-contained HTML page, without scripts and external resources. The page supports dark and light
//! mode.

use std::fmt;
use std::fmt::Write;

use crate::http::text::is_deceptive;
use crate::tools::replay::report::{
    LimitSummary, LineCounts, ReplayReport, format_count, format_percent, format_quota, format_span, group_digits,
};

const STYLESHEET: &str = include_str!("report.css");

/// Width of a chart in units of its SVG view box. The view box is scaled to the width of the page.
const CHART_WIDTH: f64 = 720.0;
/// Height of a chart in units of its SVG view box.
const CHART_HEIGHT: f64 = 160.0;

/// A text whose `Display` escapes HTML metacharacters and replaces control characters.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                c if c.is_control() || is_deceptive(c) => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Render a report as an HTML page.
pub fn render_page(report: &ReplayReport) -> String {
    let mut out = String::new();
    // Ignore the result, because writing to a `String` cannot fail.
    let _ = write_page(report, &mut out);
    out
}

fn write_page(report: &ReplayReport, out: &mut String) -> fmt::Result {
    let LineCounts { requests, limited, .. } = report.lines;
    let logs = report.logs.join(", ");
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>Replay of {}</title>\n<style>\n{STYLESHEET}</style>\n<h1>Replay of {}</h1>\n",
        Escaped(&logs),
        Escaped(&logs)
    )?;
    let requests = format_count(requests, "request", "requests");
    write!(out, "<p>{requests}; limits apply to {}", group_digits(limited))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        write!(out, ", from <time>{from}</time> to <time>{to}</time>")?;
    }
    writeln!(out, ".</p>")?;
    write_notes(&report.notes, out)?;
    write_overview(report, out)?;
    for limit in report.limits.0.iter().filter(|limit| limit.requests > 0) {
        write_details(limit, report.target, out)?;
    }
    Ok(())
}

fn write_notes(notes: &[String], out: &mut String) -> fmt::Result {
    for note in notes {
        writeln!(out, "<p class=\"note\">{}</p>", Escaped(note))?;
    }
    Ok(())
}

fn write_overview(report: &ReplayReport, out: &mut String) -> fmt::Result {
    writeln!(
        out,
        "<div class=\"scroll\"><table>\n<tr><th>limit<th>quota<th class=\"n\">requests<th class=\"n\">allowed\
         <th class=\"n\">denied<th class=\"n\">identities"
    )?;
    for limit in &report.limits.0 {
        write!(out, "<tr><td>{}{}", Escaped(&limit.name), if limit.shadow { " (shadow)" } else { "" })?;
        write!(out, "<td>{}", Escaped(&limit.quota_text()))?;
        match &limit.skipped {
            Some(skip_reason) => {
                writeln!(out, "<td colspan=\"4\">not replayed, because this log lacks {}", Escaped(skip_reason))?
            }
            None => {
                let denied = format!("{} ({})", group_digits(limit.denied), format_percent(limit.denied_percent()));
                for cell in [
                    group_digits(limit.requests),
                    group_digits(limit.allowed),
                    denied,
                    group_digits(limit.identities as u64),
                ] {
                    write!(out, "<td class=\"n\">{cell}")?;
                }
                out.push('\n');
            }
        }
    }
    writeln!(out, "</table></div>")
}

fn write_details(limit: &LimitSummary, target: Option<f64>, out: &mut String) -> fmt::Result {
    let instead_of =
        limit.configured_quota.as_ref().map_or(String::new(), |quota| format!(" <small>instead of {quota}</small>"));
    writeln!(out, "<h2>{}: {}{instead_of}</h2>", Escaped(&limit.name), Escaped(&limit.quota_text()))?;
    write_notes(&limit.notes, out)?;
    if let (Some(target), Some(suggestion)) = (target, &limit.suggestion) {
        let goal = format_percent(100.0 * target);
        match suggestion {
            Some(quota) => writeln!(
                out,
                "<p>The smallest quota that denies fewer than {goal} of the requests: <strong>{}</strong>. It denies {} of {}.</p>",
                format_quota(&quota.quota, quota.burst),
                group_digits(quota.denied),
                group_digits(limit.requests)
            )?,
            None => writeln!(out, "<p>No quota with this window denies fewer than {goal} of the requests.</p>")?,
        }
    }
    write_chart(limit, out)?;
    if limit.top_denied.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<p>{} denied; the top ones:</p>\n<div class=\"scroll\"><table>\n\
         <tr><th>identity<th class=\"n\">requests<th class=\"n\">denied<th class=\"share\">share",
        format_count(limit.identities_denied as u64, "identity was", "identities were")
    )?;
    for identity in &limit.top_denied {
        let share = 100.0 * f64::from(identity.denied) / f64::from(identity.requests.max(1));
        writeln!(
            out,
            "<tr><td class=\"id\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"share\">\
             <svg viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\">\
             <rect class=\"all\" width=\"100\" height=\"10\"/><rect class=\"denied\" width=\"{share:.1}\" height=\"10\"/>\
             </svg> {}",
            Escaped(&identity.identity),
            group_digits(identity.requests.into()),
            group_digits(identity.denied.into()),
            format_percent(share)
        )?;
    }
    writeln!(out, "</table></div>")
}

/// Write a chart of requests over time, with one bar per step. The upper part of a bar shows the denied requests.
fn write_chart(limit: &LimitSummary, out: &mut String) -> fmt::Result {
    let highest = limit.series.iter().map(|step| step.requests).max().unwrap_or(0).max(1);
    let width = CHART_WIDTH / limit.series.len().max(1) as f64;
    let step = format_span(limit.step_seconds);
    writeln!(
        out,
        "<figure><svg viewBox=\"0 0 {CHART_WIDTH} {CHART_HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"requests and \
         denials over time, {} denied of {}\">",
        limit.denied, limit.requests
    )?;
    for (index, point) in limit.series.iter().enumerate() {
        if point.requests == 0 {
            continue;
        }
        let height = |count: u64| CHART_HEIGHT * count as f64 / highest as f64;
        let all = height(point.requests);
        let denied = height(point.denied);
        // Omit the gap between bars that are too narrow for it.
        let left = index as f64 * width;
        let bar_width = if width > 4.0 { width - 1.0 } else { width };
        writeln!(
            out,
            "<g><title>{}: {} requests, {} denied</title>\
             <rect class=\"all\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{bar_width:.1}\" height=\"{all:.1}\"/>\
             <rect class=\"denied\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{bar_width:.1}\" height=\"{denied:.1}\"/></g>",
            point.time,
            group_digits(point.requests),
            group_digits(point.denied),
            CHART_HEIGHT - all,
            CHART_HEIGHT - denied
        )?;
    }
    let ends = limit.series.first().zip(limit.series.last());
    let (first, last) = ends.map_or(("", ""), |(first, last)| (first.time.as_str(), last.time.as_str()));
    writeln!(
        out,
        "</svg>\n<div class=\"axis\"><time>{first}</time><time>{last}</time></div>\n<figcaption><span class=\"key all\">\
         </span> requests <span class=\"key denied\"></span> denied; each bar covers {step}, the highest has {} requests\
         </figcaption></figure>",
        group_digits(highest)
    )
}
