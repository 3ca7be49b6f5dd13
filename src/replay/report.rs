//! What came of a replay, for people and for programs.

pub mod html;
mod notes;
pub mod table;

use jiff::Timestamp;
use serde::Serialize;

use super::resolve::RejectReason;
use super::suggest::Suggestion;
use super::{Replay, ReplayResult};
use crate::limit::algorithm::Rule;

/// A replay, as `--json` has it.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct ReplayReport {
    pub logs: Vec<String>,
    pub format: &'static str,
    /// The first and the last instant of the logs.
    pub from: Option<String>,
    pub to: Option<String>,
    pub lines: LineCounts,
    /// What has to be said of all of it.
    pub notes: Vec<String>,
    /// The share of denials that suggestions stay below.
    pub target: Option<f64>,
    pub limits: LimitSummaries,
}

/// What the lines of the logs were.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct LineCounts {
    pub requests: u64,
    /// Requests that limits had a say in.
    pub limited: u64,
    pub unlimited: u64,
    pub no_route: u64,
    pub no_identity: u64,
    pub malformed: u64,
    pub not_http: u64,
    pub unreadable: u64,
    pub late: u64,
}

/// Limits by name, in the order of their names.
#[derive(Debug)]
pub struct LimitSummaries(pub Vec<LimitSummary>);

impl Serialize for LimitSummaries {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|limit| (&limit.name, limit)))
    }
}

/// One limit.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct LimitSummary {
    #[serde(skip)]
    pub name: String,
    pub quota: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// The quota of the configuration, where another one is proposed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configured_quota: Option<String>,
    pub shadow: bool,
    /// What the log does not say; the limit was not replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    pub requests: u64,
    pub allowed: u64,
    pub denied: u64,
    pub denied_by_others: u64,
    pub identities: usize,
    pub identities_denied: usize,
    pub top_denied: Vec<TopIdentity>,
    /// Seconds of a step of the series.
    pub step_seconds: u64,
    pub series: Vec<SeriesPoint>,
    /// A quota that denies fewer than the target; null if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<Option<SuggestedQuota>>,
    pub notes: Vec<String>,
}

/// An identity.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct TopIdentity {
    pub identity: String,
    pub requests: u32,
    pub denied: u32,
}

/// A step of a series.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct SeriesPoint {
    pub time: String,
    #[serde(skip)]
    pub second: u64,
    pub requests: u64,
    pub denied: u64,
}

/// A quota that would do.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct SuggestedQuota {
    pub quota: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    pub denied: u64,
}

impl ReplayReport {
    /// Of the replay of these logs.
    pub fn new(replay: &Replay, result: &ReplayResult, logs: Vec<String>, target: Option<f64>) -> ReplayReport {
        let statistics = &result.statistics;
        let to_rfc3339 =
            |us| Timestamp::from_microsecond(us as i64).map_or(String::new(), |timestamp| format!("{timestamp:.0}"));
        let lines = LineCounts {
            requests: statistics.requests,
            limited: statistics.limited_requests(),
            unlimited: statistics.unlimited,
            no_route: statistics.rejected_for(RejectReason::NoRoute),
            no_identity: statistics.rejected_for(RejectReason::NoIdentity),
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
            notes: notes::report_notes(replay, result),
            target,
            limits: LimitSummaries(limits.collect()),
        }
    }
}

impl LimitSummary {
    fn new(replay: &Replay, result: &ReplayResult, index: usize) -> LimitSummary {
        let (limit, stats) = (&replay.config.limits[index], &result.limit_stats[index]);
        let burst = match &limit.variant.rule {
            Rule::TokenBucket(bucket) => Some(bucket.burst).filter(|burst| *burst != limit.variant.quota.count),
            _ => None,
        };
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
            notes: limit.notes.clone(),
        }
    }

    /// The share of requests that it denied, percent.
    pub fn denied_percent(&self) -> f64 {
        100.0 * self.denied as f64 / self.requests.max(1) as f64
    }

    /// Its quota, with the burst if that is another number.
    pub fn quota_text(&self) -> String {
        format_quota(&self.quota, self.burst)
    }
}

fn format_quota(quota: &str, burst: Option<u64>) -> String {
    burst.map_or_else(|| quota.to_owned(), |burst| format!("{quota}, burst {burst}"))
}

/// As JSON.
///
/// # Errors
/// None: a report is plain data.
pub fn to_json(report: &ReplayReport) -> serde_json::Result<String> {
    serde_json::to_string_pretty(report)
}

/// A count with commas between thousands.
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

/// A share in percent, with as many digits as say something.
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

/// `1 request`, `2,000 requests`.
pub fn format_count(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", group_digits(count), if count == 1 { one } else { many })
}

/// A number of seconds in words: `5 min`, `2 h`.
pub fn format_span(seconds: u64) -> String {
    let units = [("weeks", 604_800), ("days", 86_400), ("h", 3600), ("min", 60)];
    let large = units.into_iter().find(|(_, unit)| seconds >= 2 * unit || seconds == *unit);
    match large {
        Some((name, unit)) => format!("{} {name}", (seconds + unit / 2) / unit),
        None => format!("{seconds} s"),
    }
}
