//! What came of a replay, for people and for programs.

pub mod html;
mod notes;
pub mod table;

use jiff::Timestamp;
use serde::Serialize;

use super::resolve::Refused;
use super::suggest::Suggestion;
use super::{Outcome, Replay};
use crate::limit::algorithm::Rule;

/// A replay, as `--json` has it.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Report {
    pub logs: Vec<String>,
    pub format: &'static str,
    /// The first and the last instant of the logs.
    pub from: Option<String>,
    pub to: Option<String>,
    pub lines: Lines,
    /// What has to be said of all of it.
    pub notes: Vec<String>,
    /// The share of denials that suggestions stay below.
    pub target: Option<f64>,
    pub limits: Limits,
}

/// What the lines of the logs were.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Lines {
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
pub struct Limits(pub Vec<OfLimit>);

impl Serialize for Limits {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|limit| (&limit.name, limit)))
    }
}

/// One limit.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct OfLimit {
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
    pub top_denied: Vec<Worst>,
    /// Seconds of a step of the series.
    pub step_seconds: u64,
    pub series: Vec<Point>,
    /// A quota that denies fewer than the target; null if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<Option<Suggested>>,
    pub notes: Vec<String>,
}

/// An identity.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Worst {
    pub identity: String,
    pub requests: u32,
    pub denied: u32,
}

/// A step of a series.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Point {
    pub time: String,
    #[serde(skip)]
    pub second: u64,
    pub requests: u64,
    pub denied: u64,
}

/// A quota that would do.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Suggested {
    pub quota: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    pub denied: u64,
}

impl Report {
    /// Of the replay of these logs.
    pub fn new(replay: &Replay, outcome: &Outcome, logs: Vec<String>, target: Option<f64>) -> Report {
        let found = &outcome.found;
        let instant = |us| Timestamp::from_microsecond(us as i64).map_or(String::new(), |at| format!("{at:.0}"));
        let lines = Lines {
            requests: found.requests,
            limited: found.limited(),
            unlimited: found.unlimited,
            no_route: found.refused(Refused::NoRoute),
            no_identity: found.refused(Refused::NoIdentity),
            malformed: found.refused(Refused::Malformed),
            not_http: found.refused(Refused::NotHttp),
            unreadable: found.unreadable,
            late: found.late,
        };
        let limits = (0..replay.view.subjects.len()).map(|subject| OfLimit::new(replay, outcome, subject));
        Report {
            logs,
            format: replay.format,
            from: found.span.map(|(from, _)| instant(from)),
            to: found.span.map(|(_, to)| instant(to)),
            lines,
            notes: notes::notes(replay, outcome),
            target,
            limits: Limits(limits.collect()),
        }
    }
}

impl OfLimit {
    fn new(replay: &Replay, outcome: &Outcome, index: usize) -> OfLimit {
        let (subject, tally) = (&replay.view.subjects[index], &outcome.tallies[index]);
        let burst = match &subject.plan.rule {
            Rule::TokenBucket(bucket) => Some(bucket.burst).filter(|burst| *burst != subject.plan.quota.count),
            _ => None,
        };
        let worst = outcome.worst[index].iter().map(|(identity, requests, denied)| Worst {
            identity: identity.clone(),
            requests: *requests,
            denied: *denied,
        });
        let point = |(second, requests, denied): (u64, u64, u64)| {
            let time = Timestamp::from_second(second as i64).map_or(String::new(), |at| at.to_string());
            Point { time, second, requests, denied }
        };
        let suggestion = outcome.suggestions[index].as_ref().map(|suggestion| match suggestion {
            Suggestion::Smallest { quota, burst, denied } => {
                Some(Suggested { quota: quota.clone(), burst: *burst, denied: *denied })
            }
            Suggestion::None => None,
        });
        OfLimit {
            name: subject.limit.name.to_string(),
            quota: subject.plan.quota.to_string(),
            burst,
            configured_quota: subject.instead_of.map(|quota| quota.to_string()),
            shadow: subject.limit.shadow,
            skipped: subject.unknown.clone(),
            requests: tally.requests,
            allowed: tally.allowed,
            denied: tally.denied,
            denied_by_others: tally.others,
            identities: tally.identities(),
            identities_denied: tally.denied_identities(),
            top_denied: worst.collect(),
            step_seconds: tally.series.step_s(),
            series: tally.series.points().into_iter().map(point).collect(),
            suggestion,
            notes: subject.notes.clone(),
        }
    }

    /// The share of requests that it denied, percent.
    pub fn percent(&self) -> f64 {
        100.0 * self.denied as f64 / self.requests.max(1) as f64
    }

    /// Its quota, with the burst if that is another number.
    pub fn size(&self) -> String {
        size(&self.quota, self.burst)
    }
}

fn size(quota: &str, burst: Option<u64>) -> String {
    burst.map_or_else(|| quota.to_owned(), |burst| format!("{quota}, burst {burst}"))
}

/// As JSON.
///
/// # Errors
/// None: a report is plain data.
pub fn json(report: &Report) -> serde_json::Result<String> {
    serde_json::to_string_pretty(report)
}

/// A count with commas between thousands.
pub fn grouped(count: u64) -> String {
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
pub fn percent(share: f64) -> String {
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
pub fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", grouped(count), if count == 1 { one } else { many })
}

/// A number of seconds in words: `5 min`, `2 h`.
pub fn span(seconds: u64) -> String {
    let units = [("weeks", 604_800), ("days", 86_400), ("h", 3600), ("min", 60)];
    let large = units.into_iter().find(|(_, unit)| seconds >= 2 * unit || seconds == *unit);
    match large {
        Some((name, unit)) => format!("{} {name}", (seconds + unit / 2) / unit),
        None => format!("{seconds} s"),
    }
}
