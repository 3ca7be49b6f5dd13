//! The RateLimit headers in all supported styles: draft-ietf-httpapi-ratelimit-headers-11 with structured fields (RFC
//! 9651), older drafts, and the styles of the GitHub, OpenAI and Anthropic APIs.

use std::borrow::Cow;
use std::fmt::Write;

use bytes::BytesMut;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue, RETRY_AFTER};

use crate::limiter::algorithm::Status;
use crate::limiter::decision::{Decision, LimitResult};
use crate::limiter::spec::DEFAULT_UNIT;

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
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// Maximum value of an Integer in a structured field (RFC 9651 §3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// The status of one limit, which the headers report to the client.
#[derive(Debug, Clone, Copy)]
pub struct LimitStatus<'a> {
    /// Name of the limit. The name contains only characters that need no escaping in a structured-field string.
    pub name: &'a str,
    /// Quota in tokens per window.
    pub quota: u64,
    /// Quota unit: the name of what the quota counts, such as `requests`. The name has only lowercase letters, digits
    /// and `-`.
    pub unit: &'a str,
    /// How the quota becomes available again.
    pub period: QuotaPeriod,
    /// Number of whole tokens that remain available to the client.
    pub remaining: u64,
    /// Time in µs until the whole quota is available again. For a violated limit, time in µs until the denied request
    /// would be admitted.
    pub reset_us: u64,
}

/// How a quota becomes available again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaPeriod {
    /// The quota becomes available again as time passes.
    Window {
        /// Length of the window in whole seconds, rounded up, or `None` for calendar windows.
        seconds: Option<u64>,
    },
    /// The quota becomes available again when requests in flight end, at an unknown time.
    InFlight,
}

/// Return the status of a limit for the response to an admitted request.
pub fn limit_status<'a>(result: &LimitResult<'a>) -> LimitStatus<'a> {
    let LimitResult { limit, quota, outcome, .. } = result;
    let (period, reset_us) = match limit.default_variant.rule.is_concurrency() {
        true => (QuotaPeriod::InFlight, 0),
        false => (QuotaPeriod::Window { seconds: quota.window_us.map(ceil_seconds) }, outcome.reset_us),
    };
    let name = &*limit.name;
    let unit = &*limit.unit;
    LimitStatus { name, quota: quota.count, unit, period, remaining: outcome.remaining, reset_us }
}

/// Return the value of `RateLimit-Policy` for these limits. The gateway sends this header in the response to each
/// request that it checks against the limits.
pub fn ratelimit_policy<'a>(limits: impl Iterator<Item = LimitStatus<'a>>) -> Option<HeaderValue> {
    structured_list(limits, |out, limit| {
        write!(out, "\"{}\";q={}", limit.name, limit.quota.min(MAX_INTEGER))?;
        // Omit the default unit, which is `requests` (§3.1).
        if limit.unit != DEFAULT_UNIT {
            write!(out, ";qu=\"{}\"", limit.unit)?;
        }
        write_window(out, limit.period)
    })
}

/// Styles of the response headers that report the status of limits. If a style reports a single limit, it is the
/// effective limit: the violated limit with the longest wait, otherwise the limit with the smallest remaining share of
/// its quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderStyle {
    /// draft-ietf-httpapi-ratelimit-headers-11: all limits, as structured fields.
    Draft11,
    /// Draft 07 of the same specification: the effective limit in one header.
    Draft07,
    /// draft-ietf-httpapi-ratelimit-headers-03: the effective limit in three headers.
    Draft03,
    /// `x-ratelimit-*` as GitHub uses them: the effective limit, with the reset in seconds since the Unix epoch.
    Github,
    /// `x-ratelimit-*-requests` and `x-ratelimit-*-tokens` as the OpenAI API uses them: the effective limit of each
    /// unit, with the reset as a duration such as `6m0s`.
    OpenAi,
    /// `anthropic-ratelimit-requests-*` and `anthropic-ratelimit-tokens-*` as the Anthropic API uses them: the
    /// effective limit of each unit, with the reset as a time in RFC 3339.
    Anthropic,
}

impl HeaderStyle {
    /// Return the names of the headers that the style sets for limits with these quota units, separated by commas.
    pub fn header_names(self, units: &[&str]) -> Cow<'static, str> {
        match self {
            HeaderStyle::Draft11 | HeaderStyle::Draft07 => "RateLimit, RateLimit-Policy".into(),
            HeaderStyle::Draft03 => "RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset".into(),
            HeaderStyle::Github => "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset".into(),
            HeaderStyle::OpenAi | HeaderStyle::Anthropic => {
                let names = units.iter().flat_map(|unit| UNIT_HEADERS.map(|part| self.unit_header_name(part, unit)));
                names.chain(["retry-after-ms".to_owned()]).collect::<Vec<_>>().join(", ").into()
            }
        }
    }

    /// Return whether the style has separate headers for each quota unit, and the header `retry-after-ms`.
    fn is_by_unit(self) -> bool {
        matches!(self, HeaderStyle::OpenAi | HeaderStyle::Anthropic)
    }

    /// Return the name of a header for the limits with this quota unit. `part` is one of [`UNIT_HEADERS`].
    fn unit_header_name(self, part: &str, unit: &str) -> String {
        match self {
            HeaderStyle::Anthropic => format!("anthropic-ratelimit-{unit}-{part}"),
            _ => format!("x-ratelimit-{part}-{unit}"),
        }
    }
}

/// Append the RateLimit headers for those limits of a decision that are announced to clients. For a denial, the headers
/// describe the violated limits, with the time until the request would be admitted. `Retry-After` is set if the request
/// can be admitted later. `policy` is the value of `RateLimit-Policy`, or `None` to derive this value from the
/// decision.
pub fn append_decision_headers(
    headers: &mut HeaderMap,
    styles: &[HeaderStyle],
    policy: Option<&HeaderValue>,
    decision: &Decision<'_>,
) {
    let announced = || decision.results.iter().filter(|result| result.limit.announce);
    for style in styles {
        match style {
            HeaderStyle::Draft11 => {
                let policy = policy.cloned().or_else(|| ratelimit_policy(announced().map(limit_status)));
                append_header(headers, RATELIMIT_POLICY, policy);
                // For a denied request, report only the violated limits, because the remaining quota of the other
                // limits is unknown.
                if decision.admitted {
                    append_style_headers(headers, *style, announced().map(limit_status), decision.now_us);
                } else {
                    append_style_headers(headers, *style, violated_statuses(announced()), decision.now_us);
                }
            }
            HeaderStyle::Draft07 | HeaderStyle::Draft03 | HeaderStyle::Github => {
                let effective = effective_status(announced(), decision.admitted);
                append_style_headers(headers, *style, effective.into_iter(), decision.now_us);
            }
            HeaderStyle::OpenAi | HeaderStyle::Anthropic => {
                for (index, result) in announced().enumerate() {
                    let has_same_unit = |other: &&LimitResult<'_>| other.limit.unit == result.limit.unit;
                    if !announced().take(index).any(|other| has_same_unit(&other)) {
                        let effective = effective_status(announced().filter(has_same_unit), decision.admitted);
                        append_style_headers(headers, *style, effective.into_iter(), decision.now_us);
                    }
                }
            }
        }
    }
    if let Some(retry_us) = decision.retry_us().filter(|_| !decision.admitted) {
        set_retry_after(headers, retry_us);
        if styles.iter().any(|style| style.is_by_unit()) {
            // If only concurrency limits deny the request, `retry_us` is 0, because the time at which a permit becomes
            // available is unknown. Send 1000 ms instead.
            let retry_ms = if retry_us == 0 { 1000 } else { retry_us.div_ceil(1000) };
            headers.insert(RETRY_AFTER_MS, HeaderValue::from(retry_ms));
        }
    }
}

/// Return the limit that the access log shows: the violated limit with the longest wait, otherwise the limit with the
/// smallest remaining share of its quota. Header styles that report a single limit report this limit if it is announced
/// to clients.
pub fn effective_limit<'a>(decision: &Decision<'a>) -> Option<LimitStatus<'a>> {
    effective_status(decision.results.iter(), decision.admitted)
}

/// Return the effective limit of these results (see [`HeaderStyle`]). For a denial, only violated limits are
/// considered, because the remaining quota of the other limits is unknown.
fn effective_status<'a, 'b>(
    results: impl Iterator<Item = &'b LimitResult<'a>> + Clone,
    admitted: bool,
) -> Option<LimitStatus<'a>>
where
    'a: 'b,
{
    let violated = violated_statuses(results.clone()).max_by_key(|status| status.reset_us);
    let statuses = results.filter(|result| admitted || result.denies()).map(limit_status);
    // Compare the remaining shares of two limits without division: r1/q1 < r2/q2 is equivalent to r1*q2 < r2*q1.
    let product = |one: &LimitStatus<'_>, other: &LimitStatus<'_>| u128::from(one.remaining) * u128::from(other.quota);
    violated.or_else(|| statuses.min_by(|one, other| product(one, other).cmp(&product(other, one))))
}

/// Return the status of each violated limit. `reset_us` is the time until the request would be admitted, rounded up to
/// whole seconds, so that the largest value is equal to `Retry-After`.
fn violated_statuses<'a, 'b>(
    results: impl Iterator<Item = &'b LimitResult<'a>>,
) -> impl Iterator<Item = LimitStatus<'a>>
where
    'a: 'b,
{
    results.filter(|result| matches!(result.outcome.status, Status::Exceeded | Status::Saturated)).map(|result| {
        let wait_us = if result.outcome.status == Status::Saturated { 0 } else { result.outcome.retry_us };
        LimitStatus { reset_us: ceil_seconds(wait_us).max(1) * 1_000_000, ..limit_status(result) }
    })
}

/// Append the headers of one style. `Draft11` lists all `limits`, and the caller sets `RateLimit-Policy`. `OpenAi` and
/// `Anthropic` set headers for each of the `limits`, which must have different units. All other styles use only the
/// first of the `limits`. `OpenAi` and `Anthropic` replace headers with the same name from the upstream, because SDKs
/// read a single value. The other styles keep the headers that the upstream has sent for its own limits. `now_us` is
/// the current time in µs since the Unix epoch.
pub fn append_style_headers<'a>(
    headers: &mut HeaderMap,
    style: HeaderStyle,
    mut limits: impl Iterator<Item = LimitStatus<'a>>,
    now_us: u64,
) {
    match style {
        HeaderStyle::Draft11 => {
            // Format the numbers with itoa, because they are part of every response. The formatting functions of std
            // would take a considerable part of the CPU time of a rate limit check.
            let statuses = structured_list(limits, |out, limit| {
                let mut digits = itoa::Buffer::new();
                for part in ["\"", limit.name, "\";r=", digits.format(limit.remaining.min(MAX_INTEGER))] {
                    out.extend_from_slice(part.as_bytes());
                }
                if let QuotaPeriod::Window { .. } = limit.period {
                    out.extend_from_slice(b";t=");
                    out.extend_from_slice(digits.format(ceil_seconds(limit.reset_us)).as_bytes());
                }
                Ok(())
            });
            append_header(headers, RATELIMIT, statuses);
        }
        HeaderStyle::Draft07 => {
            let Some(limit) = limits.next() else { return };
            let LimitStatus { quota, remaining, reset_us, period, .. } = limit;
            let policy = structured_list(std::iter::once(limit), |out, _| {
                write!(out, "{quota}")?;
                write_window(out, period)
            });
            let reset = ceil_seconds(reset_us);
            let status = structured_list(std::iter::once(limit), |out, _| {
                write!(out, "limit={quota}, remaining={remaining}, reset={reset}")
            });
            append_header(headers, RATELIMIT_POLICY, policy);
            append_header(headers, RATELIMIT, status);
        }
        HeaderStyle::Draft03 => append_triple(headers, DRAFT_03_HEADERS, limits, ceil_seconds),
        HeaderStyle::Github => {
            append_triple(headers, GITHUB_HEADERS, limits, |reset_us| ceil_seconds(now_us + reset_us))
        }
        HeaderStyle::OpenAi | HeaderStyle::Anthropic => {
            for limit in limits {
                let reset = match (limit.period, style) {
                    (QuotaPeriod::InFlight, _) => None,
                    (_, HeaderStyle::Anthropic) => rfc3339(ceil_seconds(now_us + limit.reset_us)),
                    _ => Some(go_duration(ceil_seconds(limit.reset_us))),
                };
                let values = [
                    Some(HeaderValue::from(limit.quota)),
                    Some(HeaderValue::from(limit.remaining)),
                    reset.and_then(|reset| HeaderValue::try_from(reset).ok()),
                ];
                for (part, value) in UNIT_HEADERS.into_iter().zip(values) {
                    if let (Ok(name), Some(value)) = (style.unit_header_name(part, limit.unit).try_into(), value) {
                        let name: HeaderName = name;
                        headers.insert(name, value);
                    }
                }
            }
        }
    }
}

/// The parts of header names in the styles with separate headers for each quota unit. There is one header per part and
/// unit.
const UNIT_HEADERS: [&str; 3] = ["limit", "remaining", "reset"];

fn append_triple<'a>(
    headers: &mut HeaderMap,
    names: [HeaderName; 3],
    mut limits: impl Iterator<Item = LimitStatus<'a>>,
    reset: impl Fn(u64) -> u64,
) {
    let Some(limit) = limits.next() else { return };
    for (name, number) in names.into_iter().zip([limit.quota, limit.remaining, reset(limit.reset_us)]) {
        headers.append(name, HeaderValue::from(number));
    }
}

/// Format whole seconds in the form of Go's `time.Duration`, which the OpenAI API documents: `1s`, `6m0s`, `24h0m0s`.
fn go_duration(seconds: u64) -> String {
    let hours = seconds / 3600;
    let minutes = seconds / 60 % 60;
    let rest = seconds % 60;
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

/// Format seconds since the Unix epoch in RFC 3339. Return `None` for times after the year 9999.
fn rfc3339(epoch_seconds: u64) -> Option<String> {
    let seconds = i64::try_from(epoch_seconds).ok()?;
    jiff::Timestamp::from_second(seconds).ok().map(|time| time.to_string())
}

fn write_window(out: &mut BytesMut, period: QuotaPeriod) -> std::fmt::Result {
    match period {
        QuotaPeriod::Window { seconds: Some(seconds) } => write!(out, ";w={seconds}"),
        QuotaPeriod::Window { seconds: None } | QuotaPeriod::InFlight => Ok(()),
    }
}

fn append_header(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let Some(value) = value {
        headers.append(name, value);
    }
}

/// Set `Retry-After` to `retry_us`, the time in µs until the request would be admitted. The value is rounded up to
/// whole seconds, and is at least 1.
pub fn set_retry_after(headers: &mut HeaderMap, retry_us: u64) {
    headers.insert(RETRY_AFTER, HeaderValue::from(ceil_seconds(retry_us).max(1)));
}

/// Convert µs to seconds, rounded up, so that a client that waits for the returned time does not retry too early.
pub fn ceil_seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

/// Build a structured-field list. Return `None` if it would be empty, because an empty list is not sent (RFC 9651
/// §3.1).
fn structured_list<'a>(
    limits: impl Iterator<Item = LimitStatus<'a>>,
    write_item: impl Fn(&mut BytesMut, LimitStatus<'a>) -> std::fmt::Result,
) -> Option<HeaderValue> {
    let mut out = BytesMut::new();
    for limit in limits {
        if out.is_empty() {
            out.reserve(96);
        } else {
            out.extend_from_slice(b", ");
        }
        write_item(&mut out, limit).ok()?;
    }
    if out.is_empty() {
        return None;
    }
    HeaderValue::from_maybe_shared(out.freeze()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resets_have_the_formats_of_their_apis() {
        for (seconds, duration, time) in [
            (0, "0s", "1970-01-01T00:00:00Z"),
            (1, "1s", "1970-01-01T00:00:01Z"),
            (59, "59s", "1970-01-01T00:00:59Z"),
            (60, "1m0s", "1970-01-01T00:01:00Z"),
            (360, "6m0s", "1970-01-01T00:06:00Z"),
            (3600, "1h0m0s", "1970-01-01T01:00:00Z"),
            (86_399, "23h59m59s", "1970-01-01T23:59:59Z"),
            (86_400, "24h0m0s", "1970-01-02T00:00:00Z"),
            (1_767_225_600, "490896h0m0s", "2026-01-01T00:00:00Z"),
        ] {
            assert_eq!((go_duration(seconds).as_str(), rfc3339(seconds).as_deref()), (duration, Some(time)));
        }
        assert_eq!(rfc3339(u64::MAX), None, "out of range");
    }
}
