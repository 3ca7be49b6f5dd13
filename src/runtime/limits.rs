//! `[limit.*]`: who and how much, checked and put into the form that decides.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::identities;
use super::reader::Reader;
use crate::config::error::Issue;
use crate::config::{self, Config};
use crate::identity::api_key::{ApiKeys, OnUnknown};
use crate::identity::{By, OnMissing, Source};
use crate::limit::algorithm::Rule;
use crate::limit::algorithm::fixed_window::{FixedWindow, Start};
use crate::limit::algorithm::sliding_buckets::SlidingBuckets;
use crate::limit::algorithm::sliding_log::SlidingLog;
use crate::limit::algorithm::sliding_window::SlidingWindow;
use crate::limit::algorithm::token_bucket::TokenBucket;
use crate::limit::calendar::Windows;
use crate::limit::key::{Bucket, IdentityHasher};
use crate::limit::quota::{Quota, QuotaError};
use crate::limit::{Limit, OnStoreError};

/// Limits by name, with what tells their identities apart.
pub(super) type Limits = BTreeMap<String, (Arc<Limit>, By)>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    TokenBucket,
    FixedWindow,
    SlidingWindow,
    SlidingBuckets,
    SlidingLog,
    Later,
}

const ALGORITHMS: [(&str, Algorithm); 8] = [
    ("token-bucket", Algorithm::TokenBucket),
    ("gcra", Algorithm::TokenBucket),
    ("leaky-bucket", Algorithm::TokenBucket),
    ("fixed-window", Algorithm::FixedWindow),
    ("sliding-log", Algorithm::SlidingLog),
    ("sliding-window", Algorithm::SlidingWindow),
    ("sliding-buckets", Algorithm::SlidingBuckets),
    ("concurrency", Algorithm::Later),
];

pub(super) fn limits(
    config: &Config,
    hasher: &IdentityHasher,
    instances: u64,
    trusted_proxies: usize,
    keys: &ApiKeys,
    reader: &mut Reader<'_>,
) -> Limits {
    let mut limits = Limits::new();
    for (name, limit) in &config.limit {
        let place = limit.span();
        reader.name(place.clone(), name);
        let limit = limit.get_ref();
        let by = identities::by(limit, &place, reader);
        if by.sources.contains(&Source::ApiKey) && keys.consumers.is_empty() && keys.on_unknown == OnUnknown::Reject {
            let issue =
                Issue::at(place.clone(), "this limit is by api-key, but no key is known: every one would be refused");
            reader.issue(issue.hint("[api_key] with consumers = \"consumers.toml\", or on_unknown = \"accept\""));
        }
        if by.on_missing == OnMissing::Reject
            && trusted_proxies == 0
            && by.sources.iter().any(|source| matches!(source, Source::User(_)))
        {
            let message = "this limit is by a header that only trusted proxies may set, but none is trusted: every request would be refused";
            let hint =
                "[client_ip] with trusted_proxies = [\"10.0.0.0/8\"], or by = \"header:NAME\" if clients may choose it";
            reader.issue(Issue::at(place.clone(), message).hint(hint));
        }
        let Some((quota, rule)) = rule(limit, &place, reader) else { continue };
        let errors = [("local", OnStoreError::Local), ("allow", OnStoreError::Allow), ("deny", OnStoreError::Deny)];
        let on_store_error = reader.choice(limit.on_store_error.as_ref(), OnStoreError::Local, &errors);
        let Some(share) = rule.share(instances, dearest(config, name)) else {
            let issue = Issue::at(place, format!("the share of one of {instances} gateways cannot be counted exactly"));
            reader.issue(issue.hint("fewer `instances`, a smaller cost, or a shorter window"));
            continue;
        };
        let bucket = Bucket::new(hasher, name, &rule.shape());
        let limit =
            Limit { name: name.as_str().into(), quota, rule, share, bucket, on_store_error, shadow: limit.shadow };
        limits.insert(name.clone(), (Arc::new(limit), by));
    }
    limits
}

/// The largest cost at which a route uses a limit.
fn dearest(config: &Config, name: &str) -> u64 {
    let uses = |route: &&config::Route| route.limits.iter().any(|limit| limit.get_ref() == name);
    let routes = config.route.iter().map(|route| route.get_ref()).filter(uses);
    routes.filter_map(|route| route.cost.as_ref()).map(|cost| (*cost.get_ref()).max(1) as u64).max().unwrap_or(1)
}

fn rule(limit: &config::Limit, place: &Range<usize>, reader: &mut Reader<'_>) -> Option<(Quota, Rule)> {
    let algorithm = reader.choice(limit.algorithm.as_ref(), Algorithm::TokenBucket, &ALGORITHMS);
    if let (Algorithm::Later, Some(text)) = (algorithm, &limit.algorithm) {
        reader.not_yet(text.span(), &format!("algorithm = \"{}\"", text.get_ref()));
        return None;
    }
    for (key, span, owner) in [
        ("burst", limit.burst.as_ref().map(|burst| burst.span()), Algorithm::TokenBucket),
        ("start", limit.start.as_ref().map(|start| start.span()), Algorithm::FixedWindow),
        ("time_zone", limit.time_zone.as_ref().map(|zone| zone.span()), Algorithm::FixedWindow),
        ("buckets", limit.buckets.as_ref().map(|buckets| buckets.span()), Algorithm::SlidingBuckets),
    ] {
        if let Some(span) = span.filter(|_| algorithm != owner) {
            let owner = ALGORITHMS.iter().find(|(_, algorithm)| *algorithm == owner).map_or("", |(name, _)| name);
            reader.issue(Issue::at(span, format!("`{key}` goes with {owner} only")));
        }
    }
    let text = reader.required(limit.quota.as_ref(), place, "quota", "\"600/min\"")?;
    let result = text.get_ref().parse::<Quota>().and_then(|quota| {
        let rule = match algorithm {
            Algorithm::TokenBucket => {
                let burst = reader.number(limit.burst.as_ref(), 1..1 << 53, quota.count as i64) as u64;
                TokenBucket::new(quota, burst).map(Rule::TokenBucket)
            }
            Algorithm::FixedWindow => {
                let first_request =
                    reader.choice(limit.start.as_ref(), false, &[("aligned", false), ("first-request", true)]);
                let zone = limit.time_zone.as_ref().map_or("UTC", |zone| zone.get_ref());
                let start = match quota.calendar {
                    _ if first_request => Start::FirstRequest,
                    Some(unit) => {
                        let windows = Windows::new(unit, zone).map_err(|_| QuotaError::Zone(zone.to_owned()))?;
                        Start::Calendar(Arc::new(windows))
                    }
                    None => Start::Aligned { phase: 0 },
                };
                if let (Some(zone), Start::Aligned { .. } | Start::FirstRequest) = (&limit.time_zone, &start) {
                    let issue = Issue::at(zone.span(), "`time_zone` goes with calendar windows only");
                    reader.issue(issue.hint("a quota per day, week, month or year, aligned"));
                }
                FixedWindow::new(quota, start).map(Rule::FixedWindow)
            }
            Algorithm::SlidingWindow => SlidingWindow::new(quota).map(Rule::SlidingWindow),
            Algorithm::SlidingBuckets => {
                let buckets = reader.number(limit.buckets.as_ref(), 1..1001, 10) as u64;
                SlidingBuckets::new(quota, buckets).map(Rule::SlidingBuckets)
            }
            Algorithm::SlidingLog | Algorithm::Later => SlidingLog::new(quota).map(Rule::SlidingLog),
        };
        rule.map(|rule| Some((quota, rule)))
    });
    result.unwrap_or_else(|error| {
        let hint = match &error {
            QuotaError::Inexact { .. } => {
                "a smaller quota or a shorter window; round counts reduce better than odd ones"
            }
            QuotaError::LongLog { .. } => "algorithm = \"token-bucket\" keeps a few bytes whatever the quota",
            QuotaError::Zone(_) => "a name of the IANA database, such as \"Europe/Berlin\"",
            QuotaError::Parts { .. } => "another number of `buckets`: 10 divides most windows",
            QuotaError::NoWindow => "algorithm = \"fixed-window\", or a quota per \"30d\"",
            _ => "COUNT/UNIT with s, min, hour, day, week, month, year or a duration: \"600/min\", \"5/15m\"",
        };
        reader.issue(Issue::at(text.span(), error.to_string()).hint(hint));
        None
    })
}
