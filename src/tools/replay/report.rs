//! The report of a replay: JSON and terminal output.

pub mod html;

use std::io;
use std::io::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table};
use jiff::Timestamp;
use serde::Serialize;

use crate::http::text::is_deceptive;
use crate::limiter::quota::{CalendarUnit, Quota};
use crate::tools::replay::resolve::{RejectReason, ReplayLimit};
use crate::tools::replay::simulator::Suggestion;
use crate::tools::replay::{REORDER_WINDOW_LINES, Replay, ReplayResult};

/// The report of a replay. `replay --json` prints its fields.
#[derive(Debug, Serialize)]
pub struct ReplayReport {
    /// The names of the logs.
    pub logs: Vec<String>,
    /// The name of the format of the logs.
    pub format: &'static str,
    /// Time of the first request, in the format of RFC 3339.
    pub from: Option<String>,
    /// Time of the last request, in the format of RFC 3339.
    pub to: Option<String>,
    /// Numbers of log lines.
    pub lines: LineCounts,
    /// Notes about the whole replay.
    pub notes: Vec<String>,
    /// The target share: a suggested quota denies less than this share of the requests, from 0 to 1. `None` if no
    /// quotas are suggested.
    pub target: Option<f64>,
    /// The results of the limits.
    pub limits: LimitSummaries,
}

/// Numbers of log lines, by the result of each line.
#[derive(Debug, Serialize)]
pub struct LineCounts {
    /// Number of lines with a request.
    pub requests: u64,
    /// Number of requests that limits apply to.
    pub limited: u64,
    /// Number of requests that no limit applies to.
    pub unlimited: u64,
    /// Number of requests that no route matches.
    pub no_route: u64,
    /// Number of requests whose route depends on the request body, which logs do not contain.
    pub route_by_body: u64,
    /// Number of requests that lack the identity of a limit, so that the gateway would reject them.
    pub no_identity: u64,
    /// Number of requests from clients that an access rule denies.
    pub forbidden: u64,
    /// Number of requests with an invalid path, host, method or cost.
    pub malformed: u64,
    /// Number of lines that are not valid HTTP requests.
    pub not_http: u64,
    /// Number of lines that cannot be parsed.
    pub unreadable: u64,
    /// Number of requests that were checked later than in the order of time, because their line is too far out of
    /// order.
    pub late: u64,
}

/// The results of limits in the order of their names. They are serialized as a map.
#[derive(Debug)]
pub struct LimitSummaries(pub Vec<LimitSummary>);

impl Serialize for LimitSummaries {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|limit| (&limit.name, limit)))
    }
}

/// The results of one limit.
#[derive(Debug, Serialize)]
pub struct LimitSummary {
    /// The name of the limit.
    #[serde(skip)]
    pub name: String,
    /// The quota that the replay applied.
    pub quota: String,
    /// The burst, if it differs from the number in the quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// The configured quota, if the replay uses a proposed quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configured_quota: Option<String>,
    /// Whether the limit runs in shadow mode.
    pub shadow: bool,
    /// The information that the log lacks, if the limit could not be replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Number of requests that this limit checked.
    pub requests: u64,
    /// Number of requests that this limit allowed.
    pub allowed: u64,
    /// Number of requests that this limit denied, or would have denied in shadow mode.
    pub denied: u64,
    /// Number of requests that other limits denied, but not this limit.
    pub denied_by_others: u64,
    /// Number of identities with requests.
    pub identities: usize,
    /// Number of identities with denials.
    pub identities_denied: usize,
    /// The identities with the most denials.
    pub top_denied: Vec<TopIdentity>,
    /// Length of a step of `series` in seconds.
    pub step_seconds: u64,
    /// Number of requests and denials over time.
    pub series: Vec<SeriesPoint>,
    /// The smallest quota that denies less than the target share. The JSON value is null if no quota denies less than
    /// this share, and absent if no quota was searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<Option<SuggestedQuota>>,
    /// Notes about this limit.
    pub notes: Vec<String>,
}

/// An identity with denials.
#[derive(Debug, Serialize)]
pub struct TopIdentity {
    /// The label of the identity.
    pub identity: String,
    /// Number of requests of the identity.
    pub requests: u32,
    /// Number of denied requests of the identity.
    pub denied: u32,
}

/// A step of a time series.
#[derive(Debug, Serialize)]
pub struct SeriesPoint {
    /// Start of the step, in the format of RFC 3339.
    pub time: String,
    /// Start of the step, in seconds since the Unix epoch.
    #[serde(skip)]
    pub second: u64,
    /// Number of requests in the step.
    pub requests: u64,
    /// Number of denied requests in the step.
    pub denied: u64,
}

/// A quota that the replay suggests.
#[derive(Debug, Serialize)]
pub struct SuggestedQuota {
    /// The quota in the syntax of the configuration.
    pub quota: String,
    /// The burst, if it differs from the number in the quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// Number of requests that the quota denies.
    pub denied: u64,
}

impl ReplayReport {
    /// Build the report of a replay of these logs.
    pub fn new(replay: &Replay, result: &ReplayResult, logs: Vec<String>, target: Option<f64>) -> ReplayReport {
        let statistics = &result.statistics;
        let to_rfc3339 =
            |us| Timestamp::from_microsecond(us as i64).map_or(String::new(), |timestamp| format!("{timestamp:.0}"));
        let lines = LineCounts {
            requests: statistics.requests,
            limited: statistics.limited_requests(),
            unlimited: statistics.unlimited,
            no_route: statistics.rejected_for(RejectReason::NoRoute),
            route_by_body: statistics.rejected_for(RejectReason::RouteByBody),
            no_identity: statistics.rejected_for(RejectReason::NoIdentity),
            forbidden: statistics.rejected_for(RejectReason::Forbidden),
            malformed: statistics.rejected_for(RejectReason::Malformed),
            not_http: statistics.rejected_for(RejectReason::NotHttp),
            unreadable: statistics.unreadable,
            late: statistics.out_of_order,
        };
        let limits = (0..replay.config.limits.len()).map(|limit_index| LimitSummary::new(replay, result, limit_index));
        ReplayReport {
            logs,
            format: replay.format_name,
            from: statistics.time_range.map(|(from, _)| to_rfc3339(from)),
            to: statistics.time_range.map(|(_, to)| to_rfc3339(to)),
            lines,
            notes: report_notes(replay, result),
            target,
            limits: LimitSummaries(limits.collect()),
        }
    }
}

impl LimitSummary {
    fn new(replay: &Replay, result: &ReplayResult, index: usize) -> LimitSummary {
        let limit = &replay.config.limits[index];
        let stats = &result.limit_stats[index];
        let burst = limit.variant.rule.burst().filter(|burst| *burst != limit.variant.quota.count);
        let top_denied = result.top_denied[index].iter().map(|(identity, requests, denied)| TopIdentity {
            identity: identity.clone(),
            requests: *requests,
            denied: *denied,
        });
        let to_point = |(second, requests, denied): (u64, u64, u64)| {
            let time = Timestamp::from_second(second as i64).map_or(String::new(), |timestamp| timestamp.to_string());
            SeriesPoint { time, second, requests, denied }
        };
        let suggestion = result.suggestions[index].as_ref().map(|suggestion| match suggestion {
            Suggestion::Smallest { quota, burst, denied } => {
                Some(SuggestedQuota { quota: quota.clone(), burst: *burst, denied: *denied })
            }
            Suggestion::None => None,
        });
        LimitSummary {
            name: limit.limit.name.to_string(),
            quota: limit.variant.quota.to_string(),
            burst,
            configured_quota: limit.configured_quota.map(|quota| quota.to_string()),
            shadow: limit.limit.shadow,
            skipped: limit.skip_reason.clone(),
            requests: stats.requests,
            allowed: stats.allowed,
            denied: stats.denied,
            denied_by_others: stats.denied_by_others,
            identities: stats.identities(),
            identities_denied: stats.denied_identities(),
            top_denied: top_denied.collect(),
            step_seconds: stats.series.step_seconds(),
            series: stats.series.points().into_iter().map(to_point).collect(),
            suggestion,
            notes: limit.notes.iter().cloned().chain(short_log_note(limit, result)).collect(),
        }
    }

    /// Return the share of denied requests in percent.
    pub fn denied_percent(&self) -> f64 {
        100.0 * self.denied as f64 / self.requests.max(1) as f64
    }

    /// Return the quota as text, followed by the burst if it differs from the number in the quota.
    pub fn quota_text(&self) -> String {
        format_quota(&self.quota, self.burst)
    }
}

fn format_quota(quota: &str, burst: Option<u64>) -> String {
    burst.map_or_else(|| quota.to_owned(), |burst| format!("{quota}, burst {burst}"))
}

/// Serialize a report as JSON.
///
/// # Errors
/// None: a report contains only strings and numbers.
pub fn to_json(report: &ReplayReport) -> serde_json::Result<String> {
    serde_json::to_string_pretty(report)
}

/// Format a count with commas as thousands separators.
pub fn group_digits(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Format a percentage without trailing zeros.
pub fn format_percent(share: f64) -> String {
    let digits = match share {
        0.0 => 0,
        small if small < 0.01 => return "< 0.01 %".to_owned(),
        small if small < 10.0 => 2,
        _ => 1,
    };
    let text = format!("{share:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} %")
}

/// Format a count with its noun, such as `1 request` or `2,000 requests`.
pub fn format_count(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", group_digits(count), if count == 1 { one } else { many })
}

/// Format a number of seconds, such as `5 min` or `2 h`.
pub fn format_span(seconds: u64) -> String {
    let units = [("week", "weeks", 604_800), ("day", "days", 86_400), ("h", "h", 3600), ("min", "min", 60)];
    let large = units.into_iter().find(|(.., unit)| seconds >= 2 * unit || seconds == *unit);
    match large {
        Some((one, many, unit)) => format_count((seconds + unit / 2) / unit, one, many),
        None => format!("{seconds} s"),
    }
}

/// Return a warning if the log is more than 1 % shorter than the window of a limit. A daily log is always a little
/// shorter than a day, from its first to its last request.
fn short_log_note(limit: &ReplayLimit, result: &ReplayResult) -> Option<String> {
    if limit.skip_reason.is_some() || limit.variant.rule.is_concurrency() {
        return None;
    }
    let (from_us, to_us) = result.statistics.time_range?;
    let (log, window) = short_log(to_us.saturating_sub(from_us), &limit.variant.quota)?;
    let name = &limit.limit.name;
    Some(format!(
        "the log covers {log} and is shorter than the window of `{name}` ({window}): in a longer log, more requests \
         may be denied, and the limit may need a larger quota"
    ))
}

/// If a log of `log_us` is more than 1 % shorter than the window of a quota, return both lengths as text.
fn short_log(log_us: u64, quota: &Quota) -> Option<(String, String)> {
    let window_us = quota.shortest_window_us();
    if log_us >= window_us / 100 * 99 {
        return None;
    }
    let is_whole = window_us.is_multiple_of(1_000_000);
    let format = |us: u64| match us {
        0..1000 if !is_whole => "less than 1 ms".to_owned(),
        us if !is_whole => format!("{} ms", us / 1000),
        0..1_000_000 => "less than 1 s".to_owned(),
        us => format_length(us / 1_000_000),
    };
    let window = match (quota.window_us, quota.calendar) {
        (Some(us), _) => format(us),
        (None, Some(CalendarUnit::Year)) => "1 year".to_owned(),
        (None, _) => "1 month".to_owned(),
    };
    Some((format(log_us), window))
}

/// Format a number of seconds in the three largest units, rounded down, such as `2 h 50 min`. Two lengths that differ
/// by 1 % have different texts.
fn format_length(seconds: u64) -> String {
    let days = if seconds >= 2 * 86_400 { "days" } else { "day" };
    let parts = [(days, seconds / 86_400), ("h", seconds / 3600 % 24), ("min", seconds / 60 % 60), ("s", seconds % 60)];
    let parts = parts.into_iter().skip_while(|(_, count)| *count == 0).take(3).filter(|(_, count)| *count > 0);
    parts.map(|(unit, count)| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

// Notes about properties of the logs that make the results less accurate.

/// If log times are whole seconds, the results of limits with a window below this value (60 s) are inaccurate, and the
/// report says so.
const COARSE_WINDOW_US: u64 = 60_000_000;

/// Return the notes about a replay.
pub(crate) fn report_notes(replay: &Replay, result: &ReplayResult) -> Vec<String> {
    let statistics = &result.statistics;
    let config = &replay.config;
    let mut notes = Vec::new();
    if let Some((log, line, error)) = &statistics.first_error {
        let lines = format_count(statistics.unreadable, "line", "lines");
        notes.push(format!("{lines} cannot be read; the first is {log}:{line}: {error}"));
    }
    for (log, error) in &statistics.read_errors {
        notes.push(format!("{log} cannot be read to its end: {error}"));
    }
    if statistics.sampled > 0 {
        let sampled = format_count(statistics.sampled, "request stands", "requests stand");
        let total = format_count(statistics.sampled_total.round() as u64, "request", "requests");
        notes.push(format!(
            "the log is a sample: {sampled} for about {total}. In this replay, limits deny fewer requests than in the \
             gateway. Replay a log that was written without `sample`"
        ));
    }
    if statistics.out_of_order > 0 {
        let out_of_order = format_count(statistics.out_of_order, "request", "requests");
        notes.push(format!(
            "{out_of_order} came more than {REORDER_WINDOW_LINES} lines after later requests, and were decided after \
             them"
        ));
    }
    let no_route = statistics.rejected_for(RejectReason::NoRoute);
    let capabilities = replay.capabilities();
    if no_route > 0 && !capabilities.host && !capabilities.route {
        notes.push("this log has no hosts: routes with `hosts` match no request".to_owned());
    }
    if result.missing_client_count > 0 {
        let requests = format_count(result.missing_client_count, "request", "requests");
        let header = &config.compiled.client_ip.header;
        notes.push(format!(
            "{requests} from trusted proxies have no `{header}` header: the address of the proxy is used instead"
        ));
    }
    let has_short_window = config.limits.iter().any(|limit| {
        limit.skip_reason.is_none() && limit.variant.quota.window_us.is_some_and(|window| window < COARSE_WINDOW_US)
    });
    if has_short_window && !statistics.has_subsecond && statistics.requests > 0 {
        notes.push(
            "times in this log are whole seconds: with short windows, the replay may deny requests that the gateway \
             would allow"
                .to_owned(),
        );
    }
    notes
}

// The terminal output, whose lines have at most 80 characters.

/// Maximum width of a line, in characters.
const TERMINAL_WIDTH: usize = 80;

/// Width of a chart, in characters.
const CHART_COLUMNS: usize = TERMINAL_WIDTH - 4;

/// Characters for the bars of a chart, in the order of their height.
const CHART_BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Maximum number of identities that are listed for a limit.
const MAX_NAMED_IDENTITIES: usize = 5;

/// Write a report to the terminal.
///
/// # Errors
/// Writing to `out` fails.
pub fn write_table(report: &ReplayReport, out: &mut impl Write) -> io::Result<()> {
    let logs = match &report.logs[..] {
        [one] => one.clone(),
        many => format!("{} logs", many.len()),
    };
    let LineCounts {
        requests,
        limited,
        unlimited,
        no_route,
        route_by_body,
        no_identity,
        forbidden,
        malformed,
        not_http,
        ..
    } = report.lines;
    write_wrapped(out, "", &format!("{logs} ({}): {}", report.format, format_count(requests, "request", "requests")))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        writeln!(out, "from {from} to {to}")?;
    }
    let skipped = [
        (unlimited, "counts against no limit", "count against no limit"),
        (no_route, "matches no route", "match no route"),
        (route_by_body, "has a route that depends on its body", "have a route that depends on their body"),
        (no_identity, "lacks the identity of a limit", "lack the identity of a limit"),
        (forbidden, "is denied by `allow` or `deny`", "are denied by `allow` or `deny`"),
        (malformed, "would be rejected", "would be rejected"),
        (not_http, "is not a valid HTTP request", "are not valid HTTP requests"),
    ];
    for (count, one, many) in skipped.into_iter().filter(|(count, ..)| *count > 0) {
        writeln!(out, "  {}", format_count(count, one, many))?;
    }
    for note in &report.notes {
        write_wrapped(out, "  ! ", note)?;
    }
    if limited == 0 && report.limits.0.iter().all(|limit| limit.skipped.is_none()) {
        writeln!(out, "none of the requests is subject to a limit")?;
    }
    let (known, unknown): (Vec<_>, Vec<_>) = report.limits.0.iter().partition(|limit| limit.skipped.is_none());
    if !known.is_empty() {
        writeln!(out, "\n{}", overview_table(&known))?;
    }
    for limit in &unknown {
        let skip_reason = limit.skipped.as_deref().unwrap_or_default();
        let name = &limit.name;
        writeln!(out)?;
        write_wrapped(out, "", &format!("{name}: not replayed, because this log lacks {skip_reason}."))?;
        write_wrapped(out, "  ", &format!("If another field identifies the clients, use --identity {name}=FIELD"))?;
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
        let order_note = if limit.identities_denied > MAX_NAMED_IDENTITIES { ", the top ones" } else { "" };
        let identities = format_count(limit.identities_denied as u64, "identity was", "identities were");
        writeln!(out, "  {identities} denied{order_note}:")?;
        for identity in limit.top_denied.iter().take(MAX_NAMED_IDENTITIES) {
            let share = format_percent(100.0 * f64::from(identity.denied) / f64::from(identity.requests.max(1)));
            let denied = group_digits(identity.denied.into());
            let requests = group_digits(identity.requests.into());
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
        None => {
            write_wrapped(out, "  ", &format!("No quota with this window denies fewer than {goal} of the requests."))
        }
    }
}

/// Write a chart of denials over time.
fn write_chart(limit: &LimitSummary, out: &mut impl Write) -> io::Result<()> {
    // If there are more steps than columns, combine several steps into one column.
    let steps_per_column = limit.series.len().div_ceil(CHART_COLUMNS).max(1);
    let columns: Vec<u64> =
        limit.series.chunks(steps_per_column).map(|steps| steps.iter().map(|step| step.denied).sum()).collect();
    let highest = columns.iter().copied().max().unwrap_or(1).max(1);
    // Round up, so that each count above 0 has a visible bar.
    let bar = |denied: &u64| CHART_BARS[(denied * 8).div_ceil(highest) as usize];
    let step = format_span(limit.step_seconds * steps_per_column as u64);
    writeln!(
        out,
        "  {} denied; each column covers {step}, the highest has {}",
        group_digits(limit.denied),
        group_digits(highest)
    )?;
    let chart: String = columns.iter().map(bar).collect();
    writeln!(out, "    {}", chart.trim_end())
}

fn shorten(text: &str, width: usize) -> String {
    let printable: String =
        text.chars().map(|c| if c.is_control() || is_deceptive(c) { '\u{fffd}' } else { c }).collect();
    if printable.chars().count() <= width {
        return printable;
    }
    printable.chars().take(width - 1).chain(['…']).collect()
}

/// Write a text wrapped at [`TERMINAL_WIDTH`]. The first line starts with `mark`. The other lines are indented by the
/// width of `mark`, or by 2 spaces if `mark` is shorter.
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

#[cfg(test)]
mod short_log_tests {
    use super::*;

    #[test]
    fn only_clearly_shorter_logs_are_short() {
        const MINUTE: u64 = 60_000_000;
        for (log_us, quota, expected) in [
            (24 * 60 * MINUTE - 5_000_000, "100/day", None),
            (170 * MINUTE, "9/3h", Some(("2 h 50 min", "3 h"))),
            (177 * MINUTE, "9/3h", Some(("2 h 57 min", "3 h"))),
            (179 * MINUTE, "9/3h", None),
            (0, "9/min", Some(("less than 1 s", "1 min"))),
            (1_900_000, "9/90s", Some(("1 s", "1 min 30 s"))),
            (0, "9/1500ms", Some(("less than 1 ms", "1500 ms"))),
            (1_400_000, "9/1500ms", Some(("1400 ms", "1500 ms"))),
            (47 * 60 * MINUTE + 59_000_000, "9/week", Some(("1 day 23 h", "7 days"))),
            (27 * 24 * 60 * MINUTE, "9/month", Some(("27 days", "1 month"))),
            (28 * 24 * 60 * MINUTE, "9/month", None),
            (300 * 24 * 60 * MINUTE, "9/year", Some(("300 days", "1 year"))),
        ] {
            let found = short_log(log_us, &quota.parse().unwrap());
            let found = found.as_ref().map(|(log, window)| (log.as_str(), window.as_str()));
            assert_eq!(found, expected, "{log_us} {quota}");
        }
    }
}
