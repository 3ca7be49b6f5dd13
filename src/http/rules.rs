//! What a route sets and removes in header sections, besides what the gateway does by itself.

use http::header::{CONTENT_LENGTH, EXPECT, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, VIA};

use super::headers::{Aliases, HOP_BY_HOP, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID, folded};

/// Where rules apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// On the way to the upstream.
    Request,
    /// On the way to the client.
    Response,
}

/// Fields that are removed, and fields that get one value whatever they had.
#[derive(Debug, Default)]
pub struct Rules {
    /// Set.
    pub set: Vec<(HeaderName, HeaderValue)>,
    /// Removed.
    pub remove: Vec<HeaderName>,
    /// In requests the same headers under other names are removed, too.
    pub aliases: Aliases,
}

impl Rules {
    /// Does what they say.
    pub fn apply(&self, headers: &mut HeaderMap) {
        for name in &self.remove {
            headers.remove(name);
        }
        if !self.aliases.is_empty() {
            let aliases: Vec<_> = headers.keys().filter(|name| self.aliases.have(name)).cloned().collect();
            for name in aliases {
                headers.remove(name);
            }
        }
        for (name, value) in &self.set {
            headers.insert(name.clone(), value.clone());
        }
    }
}

/// Why a field is the gateway's own matter; none if rules may have it.
pub fn reserved(name: &HeaderName, section: Section) -> Option<&'static str> {
    // Where servers fold names into variables, an alias is the field itself.
    let plain = folded(name.as_str());
    let is = |names: &[HeaderName]| names.iter().any(|other| other.as_str() == plain);
    if is(&HOP_BY_HOP) {
        return Some("it concerns one connection, which the gateway has its own of (RFC 9110 §7.6.1)");
    }
    if is(&[CONTENT_LENGTH]) {
        return Some("the gateway frames messages itself");
    }
    if section == Section::Response {
        return None;
    }
    if is(&[HOST]) {
        return Some("the upstream is told the host that was routed on");
    }
    if is(&[EXPECT]) {
        return Some("the gateway answers 100-continue itself");
    }
    let origin = [FORWARDED, VIA, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_REQUEST_ID];
    is(&origin).then_some("the gateway says itself where a request came from")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_frames_and_routes_is_reserved() {
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
            assert_eq!(reserved(&name, Section::Request).is_some(), in_requests, "{name} in requests");
            assert_eq!(reserved(&name, Section::Response).is_some(), in_responses, "{name} in responses");
        }
    }

    #[test]
    fn aliases_of_what_is_set_or_removed_go() {
        let name = HeaderName::from_static;
        let (set, remove) = (vec![(name("x-set"), HeaderValue::from_static("ours"))], vec![name("x_gone")]);
        let aliases = Aliases::of(set.iter().map(|(name, _)| name).chain(&remove));
        let mut headers = HeaderMap::new();
        for field in ["x-set", "x_set", "x.set", "x!set", "x~set", "x-gone", "x_gone", "x.gone", "xset", "x-set-"] {
            headers.append(name(field), HeaderValue::from_static("theirs"));
        }
        Rules { set, remove, aliases }.apply(&mut headers);
        let left: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        let mut expected = [("x-set", "ours"), ("xset", "theirs"), ("x-set-", "theirs")];
        expected.sort_unstable();
        let mut left = left;
        left.sort_unstable();
        assert_eq!(left, expected);
    }

    #[test]
    fn all_lines_of_a_field_are_replaced_or_removed() {
        let name = HeaderName::from_static;
        let mut headers = HeaderMap::new();
        for (field, value) in [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2"), ("c", "1")] {
            headers.append(name(field), HeaderValue::from_static(value));
        }
        let set = vec![(name("a"), HeaderValue::from_static("3")), (name("d"), HeaderValue::from_static("4"))];
        Rules { set, remove: vec![name("b"), name("x")], ..Rules::default() }.apply(&mut headers);
        let expected = [("a", "3"), ("c", "1"), ("d", "4")].map(|(field, value)| (name(field), value.parse().unwrap()));
        assert_eq!(headers, HeaderMap::from_iter(expected));
    }
}
