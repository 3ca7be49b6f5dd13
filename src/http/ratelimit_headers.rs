//! The RateLimit headers: draft-ietf-httpapi-ratelimit-headers-11 as structured fields (RFC 9651), and older styles.

use std::fmt::Write;

use bytes::BytesMut;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue, RETRY_AFTER};

use crate::limiter::algorithm::{Rule, Status};
use crate::limiter::decision::{Decision, LimitResult};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const DRAFT_03_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
const GITHUB_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

/// Maximum Integer of a structured field (RFC 9651 §3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// The status of one limit as sent to the client.
#[derive(Debug, Clone, Copy)]
pub struct LimitStatus<'a> {
    /// Name of the limit. Contains only characters that need no escaping in a structured-field string.
    pub name: &'a str,
    /// Quota in tokens per window.
    pub quota: u64,
    /// What the limit counts.
    pub unit: QuotaUnit,
    /// Remaining whole tokens.
    pub remaining: u64,
    /// Time in µs until the whole quota is available again, or until the denied request would be admitted.
    pub reset_us: u64,
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaUnit {
    /// Tokens in a window.
    PerWindow {
        /// Length of the window in whole seconds, rounded up; `None` for calendar windows.
        window_s: Option<u64>,
    },
    /// Concurrent requests, which are not released by a window.
    ConcurrentRequests,
}

/// Return the status of a limit for the response to an admitted request.
pub fn limit_status<'a>(result: &LimitResult<'a>) -> LimitStatus<'a> {
    let LimitResult { limit, quota, outcome, .. } = result;
    // The end of requests in flight is unknown.
    let (unit, reset_us) = match limit.default_variant.rule {
        Rule::Concurrency(_) => (QuotaUnit::ConcurrentRequests, 0),
        _ => (QuotaUnit::PerWindow { window_s: quota.window_us.map(ceil_seconds) }, outcome.reset_us),
    };
    LimitStatus { name: &limit.name, quota: quota.count, unit, remaining: outcome.remaining, reset_us }
}

/// Return the value of `RateLimit-Policy` for these limits, sent with every response that they applied to.
pub fn ratelimit_policy<'a>(limits: impl Iterator<Item = LimitStatus<'a>>) -> Option<HeaderValue> {
    structured_list(limits, |out, limit| {
        write!(out, "\"{}\";q={}", limit.name, limit.quota.min(MAX_INTEGER))?;
        match limit.unit {
            QuotaUnit::PerWindow { window_s } => write_window(out, window_s),
            QuotaUnit::ConcurrentRequests => out.write_str(";qu=\"concurrent-requests\""),
        }
    })
}

/// The header styles in which clients are told the status of limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderStyle {
    /// draft-ietf-httpapi-ratelimit-headers-11: all limits, as structured fields.
    Draft11,
    /// Draft 07 of the same specification: the effective limit in one header.
    Draft07,
    /// Draft 03: the effective limit in three headers.
    Draft03,
    /// `x-ratelimit-*` as used by GitHub: the effective limit, with the reset in seconds since the Unix epoch.
    Github,
}

impl HeaderStyle {
    /// Return the names of the headers that the style sets.
    pub fn header_names(self) -> &'static str {
        match self {
            HeaderStyle::Draft11 | HeaderStyle::Draft07 => "RateLimit, RateLimit-Policy",
            HeaderStyle::Draft03 => "RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset",
            HeaderStyle::Github => "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset",
        }
    }
}

/// Append the RateLimit headers of a decision. A denial lists the violated limits with their waits, and sets
/// `Retry-After` if the same request can pass later. `policy` is the value of `RateLimit-Policy` if it is known;
/// `None` derives it from the decision.
pub fn append_decision_headers(
    headers: &mut HeaderMap,
    styles: &[HeaderStyle],
    policy: Option<&HeaderValue>,
    decision: &Decision<'_>,
) {
    let statuses = || decision.results.iter().map(limit_status);
    let policy = policy.cloned().or_else(|| ratelimit_policy(statuses()));
    let (effective, now_us) = (effective_limit(decision), decision.now_us);
    if decision.admitted {
        append_ratelimit_headers(headers, styles, policy, statuses(), effective, now_us);
        return;
    }
    append_ratelimit_headers(headers, styles, policy, violated_statuses(decision), effective, now_us);
    if let Some(retry_us) = decision.retry_us() {
        set_retry_after(headers, retry_us);
    }
}

/// Return the limit shown by older header styles: the violated limit with the longest wait, otherwise the limit with
/// the smallest remaining share of its quota.
pub fn effective_limit<'a>(decision: &Decision<'a>) -> Option<LimitStatus<'a>> {
    let violated = violated_statuses(decision).max_by_key(|status| status.reset_us);
    let statuses = decision.results.iter().map(limit_status);
    // Compare r1/q1 < r2/q2 without division.
    let product = |one: &LimitStatus<'_>, other: &LimitStatus<'_>| u128::from(one.remaining) * u128::from(other.quota);
    violated.or_else(|| statuses.min_by(|one, other| product(one, other).cmp(&product(other, one))))
}

/// Return the violated limits with their waits. Waits are rounded up to whole seconds, so that the largest equals
/// `Retry-After`.
fn violated_statuses<'a, 'b>(decision: &'b Decision<'a>) -> impl Iterator<Item = LimitStatus<'a>> + use<'a, 'b> {
    decision.violated().filter(|result| result.outcome.status != Status::CostTooLarge).map(|result| {
        let wait_us = if result.outcome.status == Status::Saturated { 0 } else { result.outcome.retry_us };
        LimitStatus { reset_us: ceil_seconds(wait_us).max(1) * 1_000_000, ..limit_status(result) }
    })
}

/// Append the headers to those that the upstream sent about its own limits. Draft 11 lists all `limits`. The older
/// styles have space for one, the `effective` limit.
pub fn append_ratelimit_headers<'a>(
    headers: &mut HeaderMap,
    styles: &[HeaderStyle],
    policy: Option<HeaderValue>,
    limits: impl Iterator<Item = LimitStatus<'a>>,
    effective: Option<LimitStatus<'a>>,
    now_us: u64,
) {
    if styles.contains(&HeaderStyle::Draft11) {
        // Formatted with itoa: it is part of every response, and std formatting is a considerable share of the cost of
        // a decision.
        let statuses = structured_list(limits, |out, limit| {
            let mut digits = itoa::Buffer::new();
            for part in ["\"", limit.name, "\";r=", digits.format(limit.remaining.min(MAX_INTEGER))] {
                out.extend_from_slice(part.as_bytes());
            }
            if let QuotaUnit::PerWindow { .. } = limit.unit {
                out.extend_from_slice(b";t=");
                out.extend_from_slice(digits.format(ceil_seconds(limit.reset_us)).as_bytes());
            }
            Ok(())
        });
        append_header(headers, RATELIMIT_POLICY, policy);
        append_header(headers, RATELIMIT, statuses);
    }
    let Some(effective) = effective else { return };
    let (quota, remaining, reset) = (effective.quota, effective.remaining, ceil_seconds(effective.reset_us));
    let append_triple = |headers: &mut HeaderMap, names: [HeaderName; 3], reset: u64| {
        for (name, number) in names.into_iter().zip([quota, remaining, reset]) {
            headers.append(name, HeaderValue::from(number));
        }
    };
    for style in styles {
        match style {
            HeaderStyle::Draft11 => {}
            HeaderStyle::Draft07 => {
                let effective_only = || std::iter::once(effective);
                let policy = structured_list(effective_only(), |out, limit| {
                    write!(out, "{}", limit.quota)?;
                    match limit.unit {
                        QuotaUnit::PerWindow { window_s } => write_window(out, window_s),
                        QuotaUnit::ConcurrentRequests => Ok(()),
                    }
                });
                let status = structured_list(effective_only(), |out, _| {
                    write!(out, "limit={quota}, remaining={remaining}, reset={reset}")
                });
                append_header(headers, RATELIMIT_POLICY, policy);
                append_header(headers, RATELIMIT, status);
            }
            HeaderStyle::Draft03 => append_triple(headers, DRAFT_03_HEADERS, reset),
            HeaderStyle::Github => append_triple(headers, GITHUB_HEADERS, ceil_seconds(now_us + effective.reset_us)),
        }
    }
}

fn write_window(out: &mut BytesMut, window_s: Option<u64>) -> std::fmt::Result {
    window_s.map_or(Ok(()), |seconds| write!(out, ";w={seconds}"))
}

fn append_header(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let Some(value) = value {
        headers.append(name, value);
    }
}

/// Set `Retry-After` to the time, in µs, after which the request would be admitted; at least one second.
pub fn set_retry_after(headers: &mut HeaderMap, retry_us: u64) {
    headers.insert(RETRY_AFTER, HeaderValue::from(ceil_seconds(retry_us).max(1)));
}

/// Convert µs to seconds, rounded up: a client that waits as told must not retry too early.
pub fn ceil_seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

/// Build a structured-field list, or return `None` if it would be empty: an empty list is not sent (RFC 9651 §3.1).
fn structured_list<'a>(
    limits: impl Iterator<Item = LimitStatus<'a>>,
    write_item: impl Fn(&mut BytesMut, LimitStatus<'a>) -> std::fmt::Result,
) -> Option<HeaderValue> {
    let mut out = BytesMut::with_capacity(96);
    for limit in limits {
        if !out.is_empty() {
            out.extend_from_slice(b", ");
        }
        write_item(&mut out, limit).ok()?;
    }
    if out.is_empty() {
        return None;
    }
    HeaderValue::from_maybe_shared(out.freeze()).ok()
}
