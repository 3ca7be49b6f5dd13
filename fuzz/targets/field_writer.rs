//! For all quotas and times, the RateLimit headers are valid structured fields (RFC 9651) with these numbers. In the
//! older styles and in the styles with the unit in the header name, each header occurs once.

use http::HeaderMap;
use sfv::{BareItem, List, ListEntry, Parser};
use sluicegate::http::ratelimit_headers::{
    HeaderStyle, LimitStatus, QuotaPeriod, append_style_headers, ceil_seconds, ratelimit_policy, set_retry_after,
};

/// The characters that limit names may contain.
const NAMES: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
/// Examples of `unit`.
const UNITS: [&str; 4] = ["requests", "tokens", "concurrent-requests", "a-1"];
/// The largest Integer of structured fields (RFC 9651 §3.3.1).
const LARGEST: u64 = 999_999_999_999_999;
/// Upper bound of quotas, remaining quotas and times in µs. Doubles represent smaller integers exactly.
const EXACT: u64 = 1 << 53;

/// Each block of 41 bytes describes a limit: one byte for its unit and period, eight bytes for its name, and four
/// numbers of eight bytes.
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
            let period = match limit[0] % 3 {
                0 => QuotaPeriod::InFlight,
                1 => QuotaPeriod::Window { seconds: None },
                _ => QuotaPeriod::Window { seconds: Some(ceil_seconds(number(33) % EXACT)) },
            };
            let unit = UNITS[usize::from(limit[0] / 3) % UNITS.len()];
            let (quota, remaining, until_us) = (number(9) % EXACT, number(17) % EXACT, number(25) % EXACT);
            LimitStatus { name, quota, unit, period, remaining, reset_us: until_us }
        })
        .collect();
    let mut headers = HeaderMap::new();
    let policy = ratelimit_policy(standings.iter().copied());
    assert_eq!(policy.is_none(), standings.is_empty(), "an empty list is not sent");
    headers.extend(policy.map(|policy| (http::HeaderName::from_static("ratelimit-policy"), policy)));
    for style in
        [HeaderStyle::Draft11, HeaderStyle::Draft03, HeaderStyle::Github, HeaderStyle::OpenAi, HeaderStyle::Anthropic]
    {
        append_style_headers(&mut headers, style, standings.iter().copied(), EXACT);
    }
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
            // The header omits the unit `requests`, which is the default of the specification.
            let unit = item.params.get("qu").and_then(BareItem::as_string).map(|unit| unit.as_str());
            let expected = Some(standing.unit).filter(|unit| quantity == 0 && *unit != "requests");
            assert_eq!(unit, expected, "{value:?}");
        }
    }
    for (name, value) in headers.iter().filter(|(name, _)| name.as_str().contains("limit-")) {
        assert!(value.to_str().is_ok(), "{name}: {value:?}");
        assert_eq!(headers.get_all(name).iter().count(), 1, "{name}");
    }
    for standing in &standings {
        for name in
            [format!("x-ratelimit-reset-{}", standing.unit), format!("anthropic-ratelimit-{}-reset", standing.unit)]
        {
            let has_time =
                standings.iter().any(|other| other.unit == standing.unit && other.period != QuotaPeriod::InFlight);
            assert_eq!(headers.contains_key(&name), has_time, "{name}");
        }
    }
    if let Some(standing) = standings.first() {
        set_retry_after(&mut headers, standing.reset_us);
        let told: u64 = headers["retry-after"].to_str().expect("digits").parse().expect("digits");
        assert!(
            told >= 1 && told.saturating_mul(1_000_000) >= standing.reset_us,
            "the client must not retry too early"
        );
    }
}
