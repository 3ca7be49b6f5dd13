//! The RateLimit fields are structured fields (RFC 9651) that say what they were told, whatever the numbers are.

use http::HeaderMap;
use sfv::{BareItem, List, ListEntry, Parser};
use sluicegate::http::ratelimit_headers::{
    HeaderStyle, LimitStatus, QuotaUnit, append_ratelimit_headers, ceil_seconds, ratelimit_policy, set_retry_after,
};

/// The characters that names of limits may have.
const NAMES: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
/// The largest Integer (RFC 9651 §3.3.1).
const LARGEST: u64 = 999_999_999_999_999;
/// Quotas and what remains of them are exact up to here; times are in µs.
const EXACT: u64 = 1 << 53;

/// Limits of 41 bytes each: what they count, a name, four numbers.
pub(crate) fn run(data: &[u8]) {
    let names: Vec<String> = data
        .chunks_exact(41)
        .map(|limit| limit[1..9].iter().map(|byte| NAMES[usize::from(*byte) % NAMES.len()] as char).collect())
        .collect();
    let standings: Vec<_> = data
        .chunks_exact(41)
        .zip(&names)
        .map(|(limit, name)| {
            let number = |at: usize| u64::from_le_bytes(limit[at..at + 8].try_into().expect("eight bytes"));
            let counts = match limit[0] % 3 {
                0 => QuotaUnit::ConcurrentRequests,
                1 => QuotaUnit::PerWindow { window_s: None },
                _ => QuotaUnit::PerWindow { window_s: Some(ceil_seconds(number(33) % EXACT)) },
            };
            let (quota, remaining, until_us) = (number(9) % EXACT, number(17) % EXACT, number(25) % EXACT);
            LimitStatus { name, quota, unit: counts, remaining, reset_us: until_us }
        })
        .collect();
    let written = ratelimit_policy(standings.iter().copied());
    assert_eq!(written.is_none(), standings.is_empty(), "an empty list is not sent");
    let mut headers = HeaderMap::new();
    let binding = standings.first().copied();
    append_ratelimit_headers(
        &mut headers,
        &[HeaderStyle::Draft11, HeaderStyle::Draft03, HeaderStyle::Github],
        written,
        standings.iter().copied(),
        binding,
        EXACT,
    );
    for (field, first, quantity) in [("ratelimit-policy", "q", 0), ("ratelimit", "r", 1)] {
        let Some(value) = headers.get(field) else { continue };
        let list = Parser::new(value.as_bytes()).parse::<List>().unwrap_or_else(|error| panic!("{value:?}: {error}"));
        assert_eq!(list.len(), standings.len(), "{value:?}");
        for (entry, standing) in list.iter().zip(&standings) {
            let ListEntry::Item(item) = entry else { panic!("an inner list in {value:?}") };
            assert!(matches!(&item.bare_item, BareItem::String(name) if name.as_str() == standing.name), "{value:?}");
            let told = if quantity == 0 { standing.quota } else { standing.remaining };
            let number = item.params.get(first).and_then(BareItem::as_integer).map(i64::from);
            assert_eq!(number, i64::try_from(told.min(LARGEST)).ok(), "{value:?}");
        }
    }
    for value in headers.iter().filter(|(name, _)| name.as_str().contains("limit-")).map(|(_, value)| value) {
        assert!(value.to_str().is_ok(), "{value:?}");
    }
    if let Some(standing) = binding {
        set_retry_after(&mut headers, standing.reset_us);
        let told: u64 = headers["retry-after"].to_str().expect("digits").parse().expect("digits");
        assert!(
            told >= 1 && told.saturating_mul(1_000_000) >= standing.reset_us,
            "the client must not retry too early"
        );
    }
}
