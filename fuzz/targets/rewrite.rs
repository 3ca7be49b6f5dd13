//! Rewrites and redirects: every path and query of a request appears in the result exactly where the template puts it.

use http::header::{HOST, HeaderValue, LOCATION};
use http::uri::PathAndQuery;
use http::{StatusCode, Uri};
use sluicegate::http::target::{PathPolicy, canonical_path};
use sluicegate::routing::pattern::PathPattern;
use sluicegate::snapshot::route_action::{Redirect, RedirectTarget, Rewrite};

const PATTERN: &str = "/v1/{id}/{*rest}";

/// Each template, with the number of its fixed segments, whether it contains the segments of `rest`, and the number of
/// its query parameters.
const TEMPLATES: [(&str, usize, bool, usize); 6] = [
    ("/fixed", 1, false, 0),
    ("/{rest}", 0, true, 0),
    ("/in/{rest}", 1, true, 0),
    ("/u-{id}.x/{rest}/end", 2, true, 0),
    ("/.{id}?a={id}&b={rest}", 1, false, 2),
    ("/{id}{id}/?q={rest}", 1, false, 1),
];

/// Regular expressions with the groups that the templates use.
const EXPRESSIONS: [&str; 3] = ["/v1(?<id>.)(?<rest>.*)", "/(?<id>[^.]*)(?<rest>.*)", "(?<rest>.*?)(?<id>[^/]?)"];

/// The first byte of the input selects a template. The other bytes are the request target after `/v1/`.
pub(crate) fn run(data: &[u8]) {
    let Some((choice, target)) = data.split_first() else { return };
    let (text, segments, with_rest, pairs) = TEMPLATES[usize::from(*choice) % TEMPLATES.len()];
    // Treat the target like that of a real request: hyper parses it, and the pattern of the route matches.
    let Ok(target) = std::str::from_utf8(target) else { return };
    let Ok(uri) = format!("/v1/{target}").parse::<Uri>() else { return };
    let Ok(path) = canonical_path(uri.path(), PathPolicy::Canonical) else { return };
    let pattern: PathPattern = PATTERN.parse().expect("a pattern");
    let parts: Vec<_> = path.splitn(4, '/').collect();
    let ["", "v1", id, rest] = parts[..] else { return };
    if id.is_empty() {
        return;
    }
    let rewrite = Rewrite::Template(text.parse().expect("a template"));
    let rewritten = rewrite.apply(&pattern, &path, uri.query()).expect("whole segments give a canonical path");
    let at = PathAndQuery::try_from(&*rewritten).expect("it is a target");
    assert_eq!(at.as_str(), rewritten);
    assert_eq!(
        canonical_path(at.path(), PathPolicy::Canonical).as_deref(),
        Ok(at.path()),
        "{text} of {path:?} is canonical"
    );
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
        assert!(
            at.query().is_some_and(|all| all.ends_with(query)),
            "{rewritten}: the query of the request must not change"
        );
    }

    // Named groups may match parts of segments. The rewritten path is canonical, or the request is rejected.
    for expression in EXPRESSIONS {
        let pattern = PathPattern::from_regex(expression).expect("an expression");
        if let Ok(rewritten) = rewrite.apply(&pattern, &path, uri.query()) {
            let at = PathAndQuery::try_from(&*rewritten).expect("it is a target");
            assert_eq!(
                canonical_path(at.path(), PathPolicy::Canonical).as_deref(),
                Ok(at.path()),
                "{text} of {path:?}: {rewritten}"
            );
        }
    }

    let mut request = http::Request::new(());
    request.headers_mut().insert(HOST, HeaderValue::from_static("A.test:8080"));
    *request.uri_mut() = uri.path_and_query().cloned().map(Uri::from).expect("the target has a path");
    let origins = ["", "https://www.example.com", "https://a.test:8443", "https://a.test"];
    for (origin, to) in origins.into_iter().zip([0, 1, 2, 3]) {
        let to = match to {
            2 => RedirectTarget::Scheme { scheme: "https", port: Some(8443) },
            3 => RedirectTarget::Scheme { scheme: "https", port: None },
            _ => RedirectTarget::Template { origin: origin.into(), template: text.parse().expect("a template") },
        };
        let redirect = Redirect { to, status: StatusCode::PERMANENT_REDIRECT };
        let response = redirect.response(&request, &pattern, &path).expect("the request has a host");
        let location = response.headers()[LOCATION].to_str().expect("visible characters");
        let target = location.strip_prefix(origin).expect("the location starts with the origin");
        assert!(
            target.starts_with('/') && !target.starts_with("//"),
            "{location}: the redirect must stay on the same host"
        );
        assert!(target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\'), "{location}");
    }

    let stripped = Rewrite::StripPrefix("/v1".into())
        .apply(&pattern, &path, uri.query())
        .expect("whole segments give a canonical path");
    assert_eq!(format!("/v1{stripped}"), uri.query().map_or(path.to_string(), |query| format!("{path}?{query}")));
    assert!(stripped.starts_with('/') && !stripped.starts_with("//"), "{stripped}");
}
