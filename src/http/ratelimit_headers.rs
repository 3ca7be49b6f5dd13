//! The RateLimit fields: draft-ietf-httpapi-ratelimit-headers-11 as structured fields (RFC 9651), and older dialects.

use std::fmt::Write;

use bytes::BytesMut;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue, RETRY_AFTER};

use crate::limiter::algorithm::Rule;
use crate::limiter::decision::LimitResult;

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

/// The largest Integer of a structured field (RFC 9651 §3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// What one limit tells the caller.
#[derive(Debug, Clone, Copy)]
pub struct LimitStatus<'a> {
    /// The limit's name; only characters that need no escape in a structured-field string.
    pub name: &'a str,
    /// Units per window.
    pub quota: u64,
    /// What it counts.
    pub unit: QuotaUnit,
    /// Whole units left.
    pub remaining: u64,
    /// µs until everything is back, or until the denied request would pass.
    pub reset_us: u64,
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaUnit {
    /// Units in a window.
    PerWindow {
        /// Its length in whole seconds, rounded up; none where the calendar decides.
        window_s: Option<u64>,
    },
    /// Requests at the same time, which no window frees.
    ConcurrentRequests,
}

/// The status of a limit in a response to an admitted request.
pub fn limit_status<'a>(result: &LimitResult<'a>) -> LimitStatus<'a> {
    let LimitResult { limit, quota, outcome, .. } = result;
    // Nobody knows when requests in flight end.
    let (unit, reset_us) = match limit.default_variant.rule {
        Rule::Concurrency(_) => (QuotaUnit::ConcurrentRequests, 0),
        _ => (QuotaUnit::PerWindow { window_s: quota.window_us.map(ceil_seconds) }, outcome.reset_us),
    };
    LimitStatus { name: &limit.name, quota: quota.count, unit, remaining: outcome.remaining, reset_us }
}

/// The policy of the given limits, to be set on every response that they had a say in.
pub fn ratelimit_policy<'a>(limits: impl Iterator<Item = LimitStatus<'a>>) -> Option<HeaderValue> {
    structured_list(limits, |out, limit| {
        write!(out, "\"{}\";q={}", limit.name, limit.quota.min(MAX_INTEGER))?;
        match limit.unit {
            QuotaUnit::PerWindow { window_s } => write_window(out, window_s),
            QuotaUnit::ConcurrentRequests => out.write_str(";qu=\"concurrent-requests\""),
        }
    })
}

/// How callers are told where they stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderStyle {
    /// draft-ietf-httpapi-ratelimit-headers-11: every limit, as structured fields.
    Draft11,
    /// Draft 07 of the same: one field, the binding limit.
    Draft07,
    /// Draft 03: three fields, the binding limit.
    Draft03,
    /// `x-ratelimit-*` as GitHub has them: the binding limit, reset in seconds since the Unix epoch.
    Github,
}

impl HeaderStyle {
    /// The fields that it sets.
    pub fn header_names(self) -> &'static str {
        match self {
            HeaderStyle::Draft11 | HeaderStyle::Draft07 => "RateLimit, RateLimit-Policy",
            HeaderStyle::Draft03 => "RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset",
            HeaderStyle::Github => "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset",
        }
    }
}

/// Appends ours to what the upstream says of its own limits: in the newest dialect all `limits`, in the older ones,
/// which have room for one, the `binding` limit.
pub fn append_ratelimit_headers<'a>(
    headers: &mut HeaderMap,
    styles: &[HeaderStyle],
    policy: Option<HeaderValue>,
    limits: impl Iterator<Item = LimitStatus<'a>>,
    effective: Option<LimitStatus<'a>>,
    now_us: u64,
) {
    if styles.contains(&HeaderStyle::Draft11) {
        // Of every answer, where the formatting of std is a good part of deciding.
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

/// Says after how many µs the request would pass; at least a second.
pub fn set_retry_after(headers: &mut HeaderMap, retry_us: u64) {
    headers.insert(RETRY_AFTER, HeaderValue::from(ceil_seconds(retry_us).max(1)));
}

/// Rounded up: who waits as long as he is told must not come too early.
pub fn ceil_seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

/// A structured-field list; none when it would be empty, since an empty list is not sent (RFC 9651 §3.1).
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
