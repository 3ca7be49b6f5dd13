//! How much a request costs a limit: fixed, as a trusted proxy says, or as the response says.

use std::ops::RangeInclusive;

use http::{HeaderMap, HeaderName, StatusCode};

/// What a request costs one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cost {
    /// The same each time.
    Fixed(u64),
    /// What a field of the request says, if a trusted proxy sent it.
    Request {
        /// The field.
        field: HeaderName,
        /// No more than this.
        most: u64,
        /// Where the field is missing, or not to be trusted.
        otherwise: u64,
    },
    /// What a field of the response says; charged when it is there.
    Response {
        /// The field.
        field: HeaderName,
        /// Where the field is missing.
        otherwise: u64,
    },
}

/// A field that a trusted proxy sent does not say a cost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the field `{0}` is not one whole number")]
pub struct CostError(pub HeaderName);

impl Cost {
    /// The cost as far as it is known before the response.
    ///
    /// # Errors
    /// A trusted proxy says something that is no cost.
    pub fn of_request(&self, headers: &HeaderMap, trusted: bool) -> Result<u64, CostError> {
        match self {
            Cost::Fixed(cost) => Ok(*cost),
            Cost::Response { otherwise, .. } => Ok(*otherwise),
            Cost::Request { otherwise, .. } if !trusted => Ok(*otherwise),
            Cost::Request { field, most, otherwise } => match only(headers, field) {
                None => Ok(*otherwise),
                Some(said) => said.map(|cost| cost.min(*most)).ok_or_else(|| CostError(field.clone())),
            },
        }
    }

    /// The cost that the response says; none where it has no say.
    pub fn of_response(&self, headers: &HeaderMap) -> Option<u64> {
        match self {
            Cost::Response { field, otherwise } => Some(only(headers, field).flatten().unwrap_or(*otherwise)),
            Cost::Fixed(_) | Cost::Request { .. } => None,
        }
    }

    /// The same, with what is charged where the field is missing.
    pub fn or_else(self, usual: u64) -> Self {
        match self {
            Cost::Fixed(cost) => Cost::Fixed(cost),
            Cost::Request { field, most, .. } => Cost::Request { field, most, otherwise: usual },
            Cost::Response { field, .. } => Cost::Response { field, otherwise: usual },
        }
    }

    /// Whether it is known only afterwards.
    pub fn is_post_paid(&self) -> bool {
        matches!(self, Cost::Response { .. })
    }
}

/// What a field says; `Some(None)` where it is not one whole number.
fn only(headers: &HeaderMap, field: &HeaderName) -> Option<Option<u64>> {
    let mut values = headers.get_all(field).iter();
    let first = values.next()?;
    let digits = first.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    Some(digits.filter(|_| values.next().is_none()).and_then(|text| text.parse().ok()))
}

/// Statuses that give a charge back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RefundOn(pub Vec<RangeInclusive<u16>>);

impl RefundOn {
    /// Whether no status is one.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a response with this status is one.
    pub fn covers(&self, status: StatusCode) -> bool {
        self.0.iter().any(|range| range.contains(&status.as_u16()))
    }

    /// Reads `503` or a class such as `5xx`.
    pub fn read(text: &str) -> Option<RangeInclusive<u16>> {
        if let Some(class) = text.strip_suffix("xx") {
            let class: u16 = class.parse().ok().filter(|class| (1..=5).contains(class))?;
            return Some(class * 100..=class * 100 + 99);
        }
        let status = text.parse().ok().filter(|status| (100..=599).contains(status))?;
        Some(status..=status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELD: HeaderName = HeaderName::from_static("x-cost");

    fn headers(values: &[&'static str]) -> HeaderMap {
        values.iter().map(|value| (FIELD, http::HeaderValue::from_static(value))).fold(
            HeaderMap::new(),
            |mut map, (name, value)| {
                map.append(name, value);
                map
            },
        )
    }

    #[test]
    fn only_trusted_proxies_say_what_a_request_costs() {
        let cost = Cost::Request { field: FIELD, most: 100, otherwise: 7 };
        let broken = Err(CostError(FIELD));
        for (values, trusted, expected) in [
            (&["5"][..], true, Ok(5)),
            (&["0"], true, Ok(0)),
            (&["1000"], true, Ok(100)),
            (&[], true, Ok(7)),
            (&["5"], false, Ok(7)),
            (&["-5"], true, broken.clone()),
            (&["+5"], true, broken.clone()),
            (&["5.0"], true, broken.clone()),
            (&[""], true, broken.clone()),
            (&["99999999999999999999"], true, broken.clone()),
            (&["5", "6"], true, broken),
        ] {
            assert_eq!(cost.of_request(&headers(values), trusted), expected, "{values:?} {trusted}");
        }
    }

    #[test]
    fn a_response_without_a_cost_has_the_usual_one() {
        let cost = Cost::Response { field: FIELD, otherwise: 3 };
        for (values, expected) in [(&["5"][..], 5), (&["0"], 0), (&[], 3), (&["many"], 3), (&["1", "2"], 3)] {
            assert_eq!(cost.of_response(&headers(values)), Some(expected), "{values:?}");
        }
        assert_eq!(Cost::Fixed(1).of_response(&headers(&["5"])), None);
    }

    #[test]
    fn statuses_are_numbers_or_classes() {
        for (text, expected) in [
            ("5xx", Some(500..=599)),
            ("404", Some(404..=404)),
            ("6xx", None),
            ("xx", None),
            ("99", None),
            ("5XX", None),
            ("", None),
        ] {
            assert_eq!(RefundOn::read(text), expected, "{text}");
        }
    }
}
