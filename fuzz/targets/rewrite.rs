//! Where a request goes instead: whatever its path and query are, they stay in the place that the template gives them.

use http::header::LOCATION;
use http::uri::PathAndQuery;
use http::{StatusCode, Uri};
use sluicegate::http::target::canonical_path;
use sluicegate::routing::pattern::PathPattern;
use sluicegate::snapshot::routes::{Redirect, Rewrite};

const PATTERN: &str = "/v1/{id}/{*rest}";

/// Templates, with the segments that they have of their own, whether those of `rest` come to them, and the pairs of their query.
const TEMPLATES: [(&str, usize, bool, usize); 6] = [
    ("/fixed", 1, false, 0),
    ("/{rest}", 0, true, 0),
    ("/in/{rest}", 1, true, 0),
    ("/u-{id}.x/{rest}/end", 2, true, 0),
    ("/.{id}?a={id}&b={rest}", 1, false, 2),
    ("/{id}{id}/?q={rest}", 1, false, 1),
];

/// The first byte chooses a template, the rest is a target.
pub(crate) fn run(data: &[u8]) {
    let Some((choice, target)) = data.split_first() else { return };
    let (text, segments, with_rest, pairs) = TEMPLATES[usize::from(*choice) % TEMPLATES.len()];
    // As a request comes: hyper has read the target, and the route matches.
    let Ok(target) = std::str::from_utf8(target) else { return };
    let Ok(uri) = format!("/v1/{target}").parse::<Uri>() else { return };
    let Ok(path) = canonical_path(uri.path()) else { return };
    let pattern: PathPattern = PATTERN.parse().expect("a pattern");
    let parts: Vec<_> = path.splitn(4, '/').collect();
    let ["", "v1", id, rest] = parts[..] else { return };
    if id.is_empty() {
        return;
    }
    let rewritten = Rewrite::Template(text.parse().expect("a template")).apply(&pattern, &path, uri.query());
    let at = PathAndQuery::try_from(&*rewritten).expect("it is a target");
    assert_eq!(at.as_str(), rewritten);
    assert_eq!(canonical_path(at.path()).as_deref(), Ok(at.path()), "{text} of {path:?} is canonical");
    let count = |path: &str| path.split('/').filter(|segment| !segment.is_empty()).count();
    let of_rest = if with_rest { count(rest) } else { 0 };
    assert_eq!(count(at.path()), segments + of_rest, "{text} of {path:?}: {rewritten}");
    let theirs = uri.query().map_or(0, |query| query.split('&').count());
    let empty = uri.query() == Some("") && pairs > 0;
    assert_eq!(
        at.query().map_or(0, |query| query.split('&').count()),
        pairs + theirs - usize::from(empty),
        "{rewritten}"
    );
    if let Some(query) = uri.query() {
        assert!(at.query().is_some_and(|all| all.ends_with(query)), "{rewritten}: the query passes as it is");
    }

    for origin in ["", "https://www.example.com"] {
        let to = text.parse().expect("a template");
        let redirect = Redirect { origin: origin.into(), template: to, status: StatusCode::PERMANENT_REDIRECT };
        let response = redirect.response(&pattern, &path, uri.query());
        let location = response.headers()[LOCATION].to_str().expect("visible characters");
        let target = location.strip_prefix(origin).expect("it begins with its origin");
        assert!(target.starts_with('/') && !target.starts_with("//"), "{location}: the same site");
        assert!(target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\'), "{location}");
    }

    let stripped = Rewrite::StripPrefix("/v1".into()).apply(&pattern, &path, uri.query());
    assert_eq!(format!("/v1{stripped}"), uri.query().map_or(path.to_string(), |query| format!("{path}?{query}")));
    assert!(stripped.starts_with('/') && !stripped.starts_with("//"), "{stripped}");
}
