//! W3C Trace Context (<https://www.w3.org/TR/trace-context/>): which trace a request belongs to, and what the next one is told.

use http::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

/// §3.2
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// §3.3
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Bytes of a version 00: version, trace, parent and flags in hexadecimal digits, with hyphens between them.
const TRACEPARENT_LENGTH: usize = 55;

/// Where a request came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace that it belongs to.
    pub trace_id: u128,
    /// The span that caused it.
    pub span_id: u64,
    /// Whether that is recorded.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Reads the one `traceparent` of a request; none if there is none, or it is not valid (§3.2.2).
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(&TRACEPARENT).iter();
        let (only, extra) = (values.next()?, values.next());
        TraceParent::parse(only.as_bytes()).filter(|_| extra.is_none())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (fixed, extra) = text.split_at_checked(TRACEPARENT_LENGTH)?;
        // Later versions may say more, after another hyphen; ff is no version (§3.2.2.1).
        let version = parse_hex(&fixed[..2])?;
        if version == 0xff || (version == 0 && !extra.is_empty()) || extra.first().is_some_and(|byte| *byte != b'-') {
            return None;
        }
        if [2, 35, 52].iter().any(|index| fixed[*index] != b'-') {
            return None;
        }
        let (trace_id, span_id, flags) =
            (parse_hex(&fixed[3..35])?, parse_hex(&fixed[36..52])? as u64, parse_hex(&fixed[53..])?);
        (trace_id != 0 && span_id != 0).then_some(TraceParent { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }
}

/// Lower-case hexadecimal digits only (§3.2.2.3).
fn parse_hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// The part of a trace that a gateway records: a span for the request, below it one for the decision and one for the upstream.
#[derive(Debug, Clone, Copy)]
pub struct TraceContext {
    /// Its id.
    pub trace_id: u128,
    /// Of the caller, if it told.
    pub parent_span_id: Option<u64>,
    /// The request's.
    pub request_span_id: u64,
    /// The decision's.
    pub decision_span_id: u64,
    /// The upstream's, and the parent of whatever it records.
    pub upstream_span_id: u64,
}

impl TraceContext {
    /// Goes on with the caller's trace, or begins one; none if the caller's is not recorded.
    pub fn from_parent(parent: Option<TraceParent>) -> Option<Self> {
        if parent.is_some_and(|parent| !parent.is_sampled) {
            return None;
        }
        // Never 0: some bits of a UUID are always set.
        let ((request_span_id, decision_span_id), (upstream_span_id, _)) =
            (Uuid::new_v4().as_u64_pair(), Uuid::new_v4().as_u64_pair());
        let trace_id = parent.map_or_else(|| Uuid::new_v4().as_u128(), |parent| parent.trace_id);
        Some(TraceContext {
            trace_id,
            parent_span_id: parent.map(|parent| parent.span_id),
            request_span_id,
            decision_span_id,
            upstream_span_id,
        })
    }

    /// Tells the upstream.
    pub fn inject(&self, headers: &mut HeaderMap) {
        let text = format!("00-{:032x}-{:016x}-01", self.trace_id, self.upstream_span_id);
        // Digits and hyphens are a valid value.
        if let Ok(value) = HeaderValue::from_str(&text) {
            headers.insert(TRACEPARENT, value);
        }
        if self.parent_span_id.is_none() {
            // It belongs to a traceparent that was not valid, if to any (§3.3).
            headers.remove(TRACESTATE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceparent_parsing() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let expected = TraceParent {
            trace_id: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
            span_id: 0x00f0_67aa_0ba9_02b7,
            is_sampled: true,
        };
        let unsampled = TraceParent { is_sampled: false, ..expected };
        for (text, parent) in [
            (good.to_owned(), Some(expected)),
            (good.replace("-01", "-00"), Some(unsampled)),
            (good.replace("-01", "-ff"), Some(expected)),
            (good.replace("-01", "-02"), Some(unsampled)),
            (good.replacen("00", "cc", 1), Some(expected)),
            (good.replacen("00", "cc", 1) + "-what-comes", Some(expected)),
            (good.replacen("00", "cc", 1) + ".what-comes", None),
            (good.replacen("00", "ff", 1), None),
            (good.to_owned() + "-00", None),
            (good.to_uppercase(), None),
            (good.replace('-', "_"), None),
            (good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)), None),
            (good.replace("00f067aa0ba902b7", &"0".repeat(16)), None),
            (good[..54].to_owned(), None),
            (good.replace("4b", "+1"), None),
            (String::new(), None),
        ] {
            assert_eq!(TraceParent::parse(text.as_bytes()), parent, "{text}");
        }
        let twice: HeaderMap = (0..2).fold(HeaderMap::new(), |mut headers, _| {
            headers.append(
                TRACEPARENT,
                HeaderValue::from_static("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            );
            headers
        });
        assert_eq!(TraceParent::from_headers(&twice), None, "nobody knows which of them counts");
    }
}
