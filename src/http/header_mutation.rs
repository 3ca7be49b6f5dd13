//! Header mutations of a route: headers to set and to remove, in addition to what the gateway does by itself.

use http::HeaderMap;
use http::header::{CONTENT_LENGTH, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, VIA};

use crate::http::headers::{
    HOP_BY_HOP, HeaderAliases, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID, fold_name,
};

/// The messages to which mutations apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Requests sent to the upstream.
    Request,
    /// Responses sent to the client.
    Response,
}

/// Headers to remove, and headers to set to a single value, replacing existing values.
#[derive(Debug, Default)]
pub struct HeaderMutations {
    /// Names and values to set.
    pub set: Vec<(HeaderName, HeaderValue)>,
    /// Names to remove.
    pub remove: Vec<HeaderName>,
    /// Aliases of the headers above, which are also removed from requests.
    pub aliases: HeaderAliases,
}

impl HeaderMutations {
    /// Remove and set the headers.
    pub fn apply(&self, headers: &mut HeaderMap) {
        for name in &self.remove {
            headers.remove(name);
        }
        if !self.aliases.is_empty() {
            let aliases: Vec<_> = headers.keys().filter(|name| self.aliases.contains(name)).cloned().collect();
            for name in aliases {
                headers.remove(name);
            }
        }
        for (name, value) in &self.set {
            headers.insert(name.clone(), value.clone());
        }
    }
}

/// Return why only the gateway may change a header, or `None` if mutations may change it.
pub fn reserved_reason(name: &HeaderName, direction: Direction) -> Option<&'static str> {
    // On servers that fold header names into variables, an alias is the header itself.
    let folded = fold_name(name.as_str());
    let is_one_of = |names: &[HeaderName]| names.iter().any(|other| other.as_str() == folded);
    if is_one_of(&HOP_BY_HOP) {
        return Some("it concerns one connection, which the gateway has its own of (RFC 9110 §7.6.1)");
    }
    if is_one_of(&[CONTENT_LENGTH]) {
        return Some("the gateway frames messages itself");
    }
    if direction == Direction::Response {
        return None;
    }
    if is_one_of(&[HOST]) {
        return Some("the upstream is told the host that was routed on");
    }
    if is_one_of(&[EXPECT]) {
        return Some("the gateway answers 100-continue itself");
    }
    let forwarding_headers = [FORWARDED, VIA, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID];
    is_one_of(&forwarding_headers).then_some("the gateway says itself where a request came from")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framing_and_routing_headers_are_reserved() {
        for (name, in_requests, in_responses) in [
            ("connection", true, true),
            ("transfer-encoding", true, true),
            ("Content_Length", true, true),
            ("te", true, true),
            ("upgrade", true, true),
            ("host", true, false),
            ("expect", true, false),
            ("x-forwarded-for", true, false),
            ("X_Forwarded.For", true, false),
            ("via", true, false),
            ("x-request-id", true, false),
            ("x-forwarded-prefix", false, false),
            ("server", false, false),
            ("authorization", false, false),
        ] {
            let name: HeaderName = name.parse().unwrap();
            assert_eq!(reserved_reason(&name, Direction::Request).is_some(), in_requests, "{name} in requests");
            assert_eq!(reserved_reason(&name, Direction::Response).is_some(), in_responses, "{name} in responses");
        }
    }

    #[test]
    fn mutations_remove_aliases_of_set_and_removed_headers() {
        let name = HeaderName::from_static;
        let (set, remove) = (vec![(name("x-set"), HeaderValue::from_static("ours"))], vec![name("x_gone")]);
        let aliases = HeaderAliases::from_names(set.iter().map(|(name, _)| name).chain(&remove));
        let mut headers = HeaderMap::new();
        for field in ["x-set", "x_set", "x.set", "x!set", "x~set", "x-gone", "x_gone", "x.gone", "xset", "x-set-"] {
            headers.append(name(field), HeaderValue::from_static("theirs"));
        }
        HeaderMutations { set, remove, aliases }.apply(&mut headers);
        let left: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        let mut expected = [("x-set", "ours"), ("xset", "theirs"), ("x-set-", "theirs")];
        expected.sort_unstable();
        let mut left = left;
        left.sort_unstable();
        assert_eq!(left, expected);
    }

    #[test]
    fn mutations_replace_or_remove_every_value_of_a_header() {
        let name = HeaderName::from_static;
        let mut headers = HeaderMap::new();
        for (field, value) in [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2"), ("c", "1")] {
            headers.append(name(field), HeaderValue::from_static(value));
        }
        let set = vec![(name("a"), HeaderValue::from_static("3")), (name("d"), HeaderValue::from_static("4"))];
        HeaderMutations { set, remove: vec![name("b"), name("x")], ..HeaderMutations::default() }.apply(&mut headers);
        let expected = [("a", "3"), ("c", "1"), ("d", "4")].map(|(field, value)| (name(field), value.parse().unwrap()));
        assert_eq!(headers, HeaderMap::from_iter(expected));
    }
}
