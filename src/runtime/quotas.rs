//! Quotas and what counts them: from the words of the file to a rule that decides.

use std::ops::Range;

use super::reader::Validator;
use crate::config;
use crate::config::error::Issue;
use crate::limit::algorithm::Rule;
use crate::limit::algorithm::concurrency::Concurrency;
use crate::limit::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limit::algorithm::sliding_buckets::SlidingBuckets;
use crate::limit::algorithm::sliding_log::SlidingLog;
use crate::limit::algorithm::sliding_window::SlidingWindow;
use crate::limit::algorithm::token_bucket::TokenBucket;
use crate::limit::quota::{EXACT_INTEGER_LIMIT, Quota, QuotaError};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    TokenBucket,
    FixedWindow,
    SlidingWindow,
    SlidingBuckets,
    SlidingLog,
    Concurrency,
}

const ALGORITHMS: [(&str, Algorithm); 8] = [
    ("token-bucket", Algorithm::TokenBucket),
    ("gcra", Algorithm::TokenBucket),
    ("leaky-bucket", Algorithm::TokenBucket),
    ("fixed-window", Algorithm::FixedWindow),
    ("sliding-log", Algorithm::SlidingLog),
    ("sliding-window", Algorithm::SlidingWindow),
    ("sliding-buckets", Algorithm::SlidingBuckets),
    ("concurrency", Algorithm::Concurrency),
];

/// The rule of a limit in its standard size; `lease` is for how long a request in flight holds its place unrenewed.
pub(super) fn rule(
    limit: &config::Limit,
    span: &Range<usize>,
    permit_ttl: u64,
    reader: &mut Validator<'_>,
) -> Option<(Quota, Rule)> {
    let algorithm = reader.one_of(limit.algorithm.as_ref(), Algorithm::TokenBucket, &ALGORITHMS);
    for (key, span, owner) in [
        ("burst", limit.burst.as_ref().map(|burst| burst.span()), Algorithm::TokenBucket),
        ("start", limit.start.as_ref().map(|start| start.span()), Algorithm::FixedWindow),
        ("time_zone", limit.time_zone.as_ref().map(|zone| zone.span()), Algorithm::FixedWindow),
        ("buckets", limit.buckets.as_ref().map(|buckets| buckets.span()), Algorithm::SlidingBuckets),
    ] {
        if let Some(span) = span.filter(|_| algorithm != owner) {
            let owner = ALGORITHMS.iter().find(|(_, algorithm)| *algorithm == owner).map_or("", |(name, _)| name);
            reader.push_issue(Issue::new(span, format!("`{key}` goes with {owner} only")));
        }
    }
    let example = if algorithm == Algorithm::Concurrency { "\"20\"" } else { "\"600/min\"" };
    let text = reader.required(limit.quota.as_ref(), span, "quota", example)?;
    if algorithm == Algorithm::Concurrency {
        let quota = Quota::parse_concurrency(text.get_ref());
        return match quota {
            Ok(quota) => Some((quota, Rule::Concurrency(Concurrency { limit: quota.count, ttl: permit_ttl }))),
            Err(error) => {
                let hint = "so many requests at the same time: quota = \"20\"";
                reader.push_issue(Issue::new(text.span(), error.to_string()).with_hint(hint));
                None
            }
        };
    }
    let rule =
        text.get_ref().parse::<Quota>().and_then(|quota| Ok((quota, timed_rule(algorithm, quota, limit, reader)?)));
    rule.map_err(|error| reader.push_issue(Issue::new(text.span(), error.to_string()).with_hint(quota_hint(&error))))
        .ok()
}

fn timed_rule(
    algorithm: Algorithm,
    quota: Quota,
    limit: &config::Limit,
    reader: &mut Validator<'_>,
) -> Result<Rule, QuotaError> {
    Ok(match algorithm {
        Algorithm::TokenBucket => {
            let burst = reader.number(limit.burst.as_ref(), 1..EXACT_INTEGER_LIMIT as i64, quota.count as i64) as u64;
            Rule::TokenBucket(TokenBucket::new(quota, burst)?)
        }
        Algorithm::FixedWindow => {
            let first_request =
                reader.one_of(limit.start.as_ref(), false, &[("aligned", false), ("first-request", true)]);
            let start = match quota.calendar {
                _ if first_request => WindowStart::FirstRequest,
                Some(unit) => {
                    WindowStart::calendar(unit, limit.time_zone.as_ref().map_or("UTC", |zone| zone.get_ref()))?
                }
                None => WindowStart::Aligned { phase: 0 },
            };
            if let (Some(zone), WindowStart::Aligned { .. } | WindowStart::FirstRequest) = (&limit.time_zone, &start) {
                let issue = Issue::new(zone.span(), "`time_zone` goes with calendar windows only");
                reader.push_issue(issue.with_hint("a quota per day, week, month or year, aligned"));
            }
            Rule::FixedWindow(FixedWindow::new(quota, start)?)
        }
        Algorithm::SlidingWindow => Rule::SlidingWindow(SlidingWindow::new(quota)?),
        Algorithm::SlidingBuckets => {
            let buckets = reader.number(limit.buckets.as_ref(), 1..1001, 10) as u64;
            Rule::SlidingBuckets(SlidingBuckets::new(quota, buckets)?)
        }
        Algorithm::SlidingLog | Algorithm::Concurrency => Rule::SlidingLog(SlidingLog::new(quota)?),
    })
}

/// Another size of a limit: its quota and, for a token bucket, its burst. With neither it is the standard size; a quota
/// without a burst has its own count as the burst.
pub(super) fn limit_variant(
    written: &config::LimitVariant,
    rule: &Rule,
    standard: Quota,
) -> Result<(Quota, Option<u64>), Issue> {
    let quota = match &written.quota {
        Some(text) => rule
            .parse_quota(text.get_ref())
            .map_err(|error| Issue::new(text.span(), error.to_string()).with_hint(quota_hint(&error)))?,
        None => standard,
    };
    let Some(burst) = &written.burst else {
        let inherited = match rule {
            Rule::TokenBucket(bucket) if written.quota.is_none() => Some(bucket.burst),
            _ => None,
        };
        return Ok((quota, inherited));
    };
    if !matches!(rule, Rule::TokenBucket(_)) {
        return Err(Issue::new(burst.span(), "`burst` goes with token-bucket only"));
    }
    match u64::try_from(*burst.get_ref()).ok().filter(|burst| (1..EXACT_INTEGER_LIMIT).contains(burst)) {
        Some(burst) => Ok((quota, Some(burst))),
        None => Err(Issue::new(burst.span(), format!("{} is out of range", burst.get_ref())).with_hint("1 or more")),
    }
}

/// What to do about a quota that cannot be.
pub(super) fn quota_hint(error: &QuotaError) -> &'static str {
    match error {
        QuotaError::Inexact { .. } => "a smaller quota or a shorter window; round counts reduce better than odd ones",
        QuotaError::LongLog { .. } => "algorithm = \"token-bucket\" keeps a few bytes whatever the quota",
        QuotaError::TimeZone(_) => "a name of the IANA database, such as \"Europe/Berlin\"",
        QuotaError::Buckets { .. } => "another number of `buckets`: 10 divides most windows",
        QuotaError::NoFixedWindow => "algorithm = \"fixed-window\", or a quota per \"30d\"",
        QuotaError::Prefetch { .. } => "a smaller `prefetch`: a tenth of the quota or of the burst is plenty",
        QuotaError::LocalShare { .. } => "a smaller `gateway_count`, a smaller cost, or a shorter window",
        _ => "COUNT/UNIT with s, min, hour, day, week, month, year or a duration: \"600/min\", \"5/15m\"",
    }
}
