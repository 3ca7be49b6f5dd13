//! The RateLimit fields: draft-ietf-httpapi-ratelimit-headers-11 as structured fields (RFC 9651), and older dialects.

use std::fmt::Write;

use bytes::BytesMut;
use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const DRAFT_03: [HeaderName; 3] = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
const GITHUB: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

/// The largest Integer of a structured field (RFC 9651 §3.3.1).
const LARGEST: u64 = 999_999_999_999_999;

/// What one limit tells the caller.
#[derive(Debug, Clone, Copy)]
pub struct Standing<'a> {
    /// The limit's name; only characters that need no escape in a structured-field string.
    pub name: &'a str,
    /// Units per window.
    pub quota: u64,
    /// What it counts.
    pub counts: Counts,
    /// Whole units left.
    pub remaining: u64,
    /// µs until everything is back, or until the denied request would pass.
    pub until_us: u64,
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// Units in a window.
    Units {
        /// Its length in whole seconds, rounded up; none where the calendar decides.
        window_s: Option<u64>,
    },
    /// Requests at the same time, which no window frees.
    InFlight,
}

/// The policy of the given limits, to be set on every response that they had a say in.
pub fn policy<'a>(limits: impl Iterator<Item = Standing<'a>>) -> Option<HeaderValue> {
    value(limits, |out, limit| {
        write!(out, "\"{}\";q={}", limit.name, limit.quota.min(LARGEST))?;
        match limit.counts {
            Counts::Units { window_s } => write_window(out, window_s),
            Counts::InFlight => out.write_str(";qu=\"concurrent-requests\""),
        }
    })
}

/// How callers are told where they stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// draft-ietf-httpapi-ratelimit-headers-11: every limit, as structured fields.
    Ietf,
    /// Draft 07 of the same: one field, the binding limit.
    Draft07,
    /// Draft 03: three fields, the binding limit.
    Draft03,
    /// `x-ratelimit-*` as GitHub has them: the binding limit, reset in seconds since the Unix epoch.
    Github,
}

impl Dialect {
    /// The fields that it sets.
    pub fn fields(self) -> &'static str {
        match self {
            Dialect::Ietf | Dialect::Draft07 => "RateLimit, RateLimit-Policy",
            Dialect::Draft03 => "RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset",
            Dialect::Github => "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset",
        }
    }
}

/// Appends ours to what the upstream says of its own limits: in the newest dialect all `limits`, in the older ones,
/// which have room for one, the `binding` limit.
pub fn advertise<'a>(
    headers: &mut HeaderMap,
    dialects: &[Dialect],
    policy: Option<HeaderValue>,
    limits: impl Iterator<Item = Standing<'a>>,
    binding: Option<Standing<'a>>,
    now_us: u64,
) {
    if dialects.contains(&Dialect::Ietf) {
        // Of every answer, where the formatting of std is a good part of deciding.
        let standing = value(limits, |out, limit| {
            let mut digits = itoa::Buffer::new();
            for part in ["\"", limit.name, "\";r=", digits.format(limit.remaining.min(LARGEST))] {
                out.extend_from_slice(part.as_bytes());
            }
            if let Counts::Units { .. } = limit.counts {
                out.extend_from_slice(b";t=");
                out.extend_from_slice(digits.format(seconds(limit.until_us)).as_bytes());
            }
            Ok(())
        });
        append(headers, RATELIMIT_POLICY, policy);
        append(headers, RATELIMIT, standing);
    }
    let Some(binding) = binding else { return };
    let (quota, remaining, reset) = (binding.quota, binding.remaining, seconds(binding.until_us));
    let three = |headers: &mut HeaderMap, names: [HeaderName; 3], reset: u64| {
        for (name, number) in names.into_iter().zip([quota, remaining, reset]) {
            headers.append(name, HeaderValue::from(number));
        }
    };
    for dialect in dialects {
        match dialect {
            Dialect::Ietf => {}
            Dialect::Draft07 => {
                let one = || std::iter::once(binding);
                let policy = value(one(), |out, limit| {
                    write!(out, "{}", limit.quota)?;
                    match limit.counts {
                        Counts::Units { window_s } => write_window(out, window_s),
                        Counts::InFlight => Ok(()),
                    }
                });
                let standing =
                    value(one(), |out, _| write!(out, "limit={quota}, remaining={remaining}, reset={reset}"));
                append(headers, RATELIMIT_POLICY, policy);
                append(headers, RATELIMIT, standing);
            }
            Dialect::Draft03 => three(headers, DRAFT_03, reset),
            Dialect::Github => three(headers, GITHUB, seconds(now_us + binding.until_us)),
        }
    }
}

fn write_window(out: &mut BytesMut, window_s: Option<u64>) -> std::fmt::Result {
    window_s.map_or(Ok(()), |seconds| write!(out, ";w={seconds}"))
}

fn append(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let Some(value) = value {
        headers.append(name, value);
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
