//! The RateLimit fields of draft-ietf-httpapi-ratelimit-headers-11, as structured fields (RFC 9651).

use std::fmt::Write;

use bytes::BytesMut;
use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// What one limit tells the caller.
#[derive(Debug, Clone, Copy)]
pub struct Standing<'a> {
    /// The limit's name; only characters that need no escape in a structured-field string.
    pub name: &'a str,
    /// Units per window.
    pub quota: u64,
    /// Length of the window in whole seconds, rounded up.
    pub window_s: u64,
    /// Whole units left.
    pub remaining: u64,
    /// µs until everything is back, or until the denied request would pass.
    pub until_us: u64,
}

/// The policy of the given limits, to be set on every response that they had a say in.
pub fn policy<'a>(limits: impl Iterator<Item = Standing<'a>>) -> Option<HeaderValue> {
    value(limits, |out, limit| write!(out, "\"{}\";q={};w={}", limit.name, limit.quota, limit.window_s))
}

/// Appends ours to what the upstream says of its own limits.
pub fn advertise<'a>(headers: &mut HeaderMap, policy: Option<HeaderValue>, limits: impl Iterator<Item = Standing<'a>>) {
    let standing = value(limits, |out, limit| {
        write!(out, "\"{}\";r={};t={}", limit.name, limit.remaining, seconds(limit.until_us))
    });
    if let Some(policy) = policy {
        headers.append(RATELIMIT_POLICY, policy);
    }
    if let Some(standing) = standing {
        headers.append(RATELIMIT, standing);
    }
}

/// Says after how many µs the request would pass; at least a second.
pub fn retry_after(headers: &mut HeaderMap, retry_us: u64) {
    headers.insert(RETRY_AFTER, HeaderValue::from(seconds(retry_us).max(1)));
}

/// Rounded up: who waits as long as he is told must not come too early.
pub fn seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

/// A structured-field list; none when it would be empty, since an empty list is not sent (RFC 9651 §3.1).
fn value<'a>(
    limits: impl Iterator<Item = Standing<'a>>,
    item: impl Fn(&mut BytesMut, Standing<'a>) -> std::fmt::Result,
) -> Option<HeaderValue> {
    let mut out = BytesMut::with_capacity(96);
    for limit in limits {
        if !out.is_empty() {
            out.extend_from_slice(b", ");
        }
        item(&mut out, limit).ok()?;
    }
    if out.is_empty() {
        return None;
    }
    HeaderValue::from_maybe_shared(out.freeze()).ok()
}
