//! The canonical form of a path is the same for all spellings of the path. It contains nothing that upstreams may
//! interpret differently from the gateway.

use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Uri};
use sluicegate::http::target::{PathPolicy, canonical_path, forwarded_path};
use sluicegate::routing::condition::RouteBody;
use sluicegate::routing::pattern::PathPattern;
use sluicegate::routing::{RouteMatch, RouteRequest, RouteTable};

const PATTERNS: [&str; 6] = ["/", "/admin", "/v1/{id}", "/v1/{id}/{other}", "/v1/{*rest}", "/a/b/"];

pub(crate) fn run(data: &[u8]) {
    let Ok(path) = std::str::from_utf8(data) else { return };
    for policy in [PathPolicy::KeepEncodedSlashes, PathPolicy::KeepDoubleSlashes, PathPolicy::KeepSlashes] {
        keeps_slashes(path, policy);
    }
    let policy = PathPolicy::Canonical;
    let Ok(once) = canonical_path(path, policy) else { return };
    assert_eq!(
        canonical_path(&once, policy).as_deref(),
        Ok(&*once),
        "the canonical form of {path:?} is already canonical"
    );
    let segments: Vec<_> = once.strip_prefix('/').expect("a path starts with a slash").split('/').collect();
    let (_, inner) = segments.split_last().expect("`split` returns at least one segment");
    assert!(inner.iter().all(|segment| !segment.is_empty()), "{once:?} of {path:?} has `//`");
    assert!(segments.iter().all(|segment| !matches!(*segment, "." | "..")), "{once:?} of {path:?} has dot segments");
    assert!(once.bytes().all(|byte| byte.is_ascii_graphic() && !b"\\?#".contains(&byte)), "{once:?} of {path:?}");
    let upper = once.to_ascii_uppercase();
    for dangerous in ["%2F", "%5C", "%00", "%0A", "%0D", "%7F", "%2E", "%41"] {
        assert!(!upper.contains(dangerous), "{once:?} of {path:?} has {dangerous}");
    }
    for (at, _) in once.match_indices('%') {
        let digits = once.as_bytes().get(at + 1..at + 3).expect("two digits follow a percent sign");
        assert!(digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'A'..=b'F')), "{once:?} of {path:?}");
    }
    // The forwarded path equals the matched path, except that encoded delimiters stay encoded.
    let sent = forwarded_path(path, policy).expect("the path has a canonical form");
    assert_eq!(forwarded_path(&sent, policy).as_deref(), Ok(&*sent), "the forwarded form of {path:?} is stable");
    assert_eq!(canonical_path(&sent, policy).as_deref(), Ok(&*once), "{sent:?} of {path:?}");
    assert_eq!(sent.split('/').count(), segments.len() + 1, "{sent:?} of {path:?}");
    for form in [&once, &sent].into_iter().filter(|form| form.len() <= 65_534) {
        let target = PathAndQuery::try_from(&**form).expect("both forms are request targets");
        assert_eq!(target.path(), *form);
    }
    // The forwarded path matches the same route with the same parameters.
    let mut table = RouteTable::default();
    for (index, text) in PATTERNS.iter().enumerate() {
        let path: PathPattern = text.parse().expect("a pattern");
        table.insert(&RouteMatch::new(path), &index).expect("the patterns are not ambiguous");
    }
    let (uri, headers) = (Uri::default(), HeaderMap::new());
    let route = |path: &str| {
        let request = RouteRequest {
            host: "a.test",
            path,
            uri: &uri,
            method: &Method::GET,
            headers: &headers,
            listener: 0,
            body: RouteBody::Unread,
        };
        table.find(&request).ok().copied()
    };
    let received = canonical_path(&sent, policy).expect("a forwarded path is accepted");
    assert_eq!(route(&once), route(&received));
    if let Some(index) = route(&once) {
        let pattern: PathPattern = PATTERNS[index].parse().expect("a pattern");
        assert_eq!(pattern.capture(&once, "id"), pattern.capture(&received, "id"));
    }
}

/// A path with kept slashes is stable too, and servers that decode or merge these slashes find no dot segment in it.
fn keeps_slashes(path: &str, policy: PathPolicy) {
    let Ok(once) = canonical_path(path, policy) else { return };
    assert_eq!(canonical_path(&once, policy).as_deref(), Ok(&*once), "{path:?} with {policy:?} is stable");
    let sent = forwarded_path(path, policy).expect("the path has a canonical form");
    assert_eq!(canonical_path(&sent, policy).as_deref(), Ok(&*once), "{sent:?} of {path:?} with {policy:?}");
    assert!(once.starts_with('/') && !once.starts_with("//"), "{once:?} of {path:?}");
    let is_dot = |part: &str| matches!(part, "." | "..");
    assert!(!once.split('/').flat_map(|segment| segment.split("%2F")).any(is_dot), "{once:?} of {path:?}");
    let keeps_encoded = policy != PathPolicy::KeepDoubleSlashes;
    assert!(keeps_encoded || !once.contains("%2F"), "{once:?} of {path:?}");
    assert!(policy != PathPolicy::KeepEncodedSlashes || !once.contains("//"), "{once:?} of {path:?}");
}
