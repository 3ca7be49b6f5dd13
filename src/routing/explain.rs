//! Explains why routes do not match a request, and finds unreachable routes.

use std::cmp::Reverse;

use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::routing::{Node, RouteEntry, RouteTable};

/// A route compared with a request.
#[derive(Debug)]
pub struct Candidate<'t, T> {
    /// Target of the route.
    pub target: &'t T,
    /// Host of the route, as configured. `None` matches any host.
    pub host: Option<String>,
    /// Methods of the route. Empty = all.
    pub methods: &'t [Method],
    /// Headers that the route requires.
    pub headers: &'t [(HeaderName, HeaderValue)],
    /// The first condition that the request does not meet. `None` if the route matches.
    pub mismatch: Option<MismatchReason<'t>>,
    /// Number of path segments that match.
    matched_segments: usize,
}

/// The condition that a request does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MismatchReason<'t> {
    /// The host.
    Host,
    /// The path.
    Path,
    /// The method.
    Method,
    /// This header is missing or has another value.
    Header(&'t HeaderName),
}

impl<T> Candidate<'_, T> {
    /// Sort key, nearest match first. The conditions are ordered host, path, method, headers.
    pub fn distance(&self) -> impl Ord + use<T> {
        let criterion = match self.mismatch {
            None => 0,
            Some(MismatchReason::Header(_)) => 1,
            Some(MismatchReason::Method) => 2,
            Some(MismatchReason::Path) => 3,
            Some(MismatchReason::Host) => 4,
        };
        (criterion, Reverse(self.matched_segments))
    }
}

/// The parts of a request that routes match on.
struct MatchInput<'a> {
    method: &'a Method,
    headers: &'a HeaderMap,
}

/// State of the walk from the root to a node.
#[derive(Clone, Copy)]
struct SearchPath<'a> {
    host_matches: bool,
    /// Rest of the path. `None` if it is used up.
    remaining: Option<&'a str>,
    path_matches: bool,
    matched_segments: usize,
}

impl<T> RouteTable<T> {
    /// Compare all routes with a request, in no particular order. `host` and `path` as for [`RouteTable::find`].
    pub fn candidates(&self, host: &str, path: &str, method: &Method, headers: &HeaderMap) -> Vec<Candidate<'_, T>> {
        let request = MatchInput { method, headers };
        let mut found = Vec::new();
        let mut walk = |node, pattern_host: Option<String>, is_host| {
            let search_path = SearchPath {
                host_matches: is_host,
                remaining: path.strip_prefix('/'),
                path_matches: true,
                matched_segments: 0,
            };
            Node::walk(node, &request, pattern_host.as_deref(), search_path, &mut found);
        };
        for (name, node) in &self.exact_hosts {
            walk(node, Some(name.to_string()), **name == *host);
        }
        for (suffix, node) in &self.wildcard_hosts {
            walk(node, Some(format!("*{suffix}")), host.match_indices('.').any(|(dot, _)| host[dot..] == **suffix));
        }
        walk(&self.any_host, None, true);
        found
    }
}

impl<T> Node<T> {
    fn walk<'t>(
        node: &'t Node<T>,
        request: &MatchInput<'_>,
        host: Option<&str>,
        search_path: SearchPath<'_>,
        found: &mut Vec<Candidate<'t, T>>,
    ) {
        let mut add = |entries: &'t [RouteEntry<T>], is_path| {
            let way = SearchPath { path_matches: search_path.path_matches && is_path, ..search_path };
            found.extend(entries.iter().map(|entry| Candidate {
                target: &entry.target,
                host: host.map(str::to_owned),
                methods: &entry.methods,
                headers: &entry.headers,
                mismatch: entry.mismatch(request, way),
                matched_segments: way.matched_segments,
            }));
        };
        add(&node.terminal, search_path.remaining.is_none());
        add(&node.catch_all, search_path.remaining.is_some());
        let (segment, next) = match search_path.remaining.map(|remaining| remaining.split_once('/').ok_or(remaining)) {
            Some(Ok((segment, next))) => (Some(segment), Some(next)),
            Some(Err(last)) => (Some(last), None),
            None => (None, None),
        };
        let step = |fits: bool| {
            let is_path = search_path.path_matches && fits;
            SearchPath {
                remaining: next,
                path_matches: is_path,
                matched_segments: search_path.matched_segments + usize::from(is_path),
                ..search_path
            }
        };
        for (literal, child) in &node.literals {
            Node::walk(child, request, host, step(segment == Some(&**literal)), found);
        }
        if let Some(child) = node.parameter.as_deref() {
            Node::walk(child, request, host, step(segment.is_some_and(|segment| !segment.is_empty())), found);
        }
    }
}

impl<T> RouteEntry<T> {
    fn mismatch(&self, request: &MatchInput<'_>, search_path: SearchPath<'_>) -> Option<MismatchReason<'_>> {
        if !search_path.host_matches {
            return Some(MismatchReason::Host);
        }
        if !search_path.path_matches {
            return Some(MismatchReason::Path);
        }
        if !self.allows_method(request.method) {
            return Some(MismatchReason::Method);
        }
        self.missing_header(request.headers).map(MismatchReason::Header)
    }
}

// Unreachable routes.

/// The target of an unreachable route, the target of the route that takes precedence, and the methods affected.
type UnreachableRoute<'t, T> = (&'t T, &'t T, &'t [Method]);

impl<T> RouteTable<T> {
    /// Return routes without methods but with required headers that a route with methods and the same or fewer headers
    /// takes precedence over.
    ///
    /// Routes cannot be unreachable in any other way: more specific routes leave the remaining requests to less
    /// specific ones.
    pub fn unreachable_routes(&self) -> impl Iterator<Item = UnreachableRoute<'_, T>> {
        let mut found = Vec::new();
        for node in self.exact_hosts.values().chain(self.wildcard_hosts.values()).chain([&self.any_host]) {
            node.collect_unreachable(&mut found);
        }
        found.into_iter()
    }
}

impl<T> Node<T> {
    fn collect_unreachable<'t>(&'t self, found: &mut Vec<UnreachableRoute<'t, T>>) {
        for entries in [&self.terminal, &self.catch_all] {
            for late in entries.iter().filter(|entry| entry.methods.is_empty() && !entry.headers.is_empty()) {
                let before = entries.iter().filter(|entry| entry.precedes(late));
                found.extend(before.map(|entry| (&late.target, &entry.target, &*entry.methods)));
            }
        }
        for child in self.literals.values().chain(self.parameter.as_deref()) {
            child.collect_unreachable(found);
        }
    }
}

impl<T> RouteEntry<T> {
    /// Return whether this route takes precedence over `late`, a route without methods, for all requests with one of
    /// the methods of this route.
    fn precedes(&self, late: &RouteEntry<T>) -> bool {
        !self.methods.is_empty() && self.headers.iter().all(|wanted| late.headers.contains(wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::RouteMatch;

    #[test]
    fn candidate_names_its_first_mismatch() {
        let version = HeaderName::from_static("x-version");
        let wants = [(version.clone(), HeaderValue::from_static("2"))];
        let mut table = RouteTable::default();
        for (index, (host, path, methods, headers)) in [
            (Some("a.test"), "/v1/users/{id}", &[][..], &[][..]),
            (Some("b.test"), "/v1/users/{id}", &[], &[]),
            (Some("*.test"), "/v1/users/{id}", &[Method::POST], &[]),
            (None, "/v1/users/{id}", &[Method::GET], &wants),
            (None, "/v1/users/me", &[], &[]),
            (None, "/v1/users", &[], &[]),
            (None, "/v1/users/{id}/x", &[], &[]),
            (None, "/v1/{*rest}", &[], &[]),
            (None, "/v1/users/{id}/{*rest}", &[], &[]),
        ]
        .into_iter()
        .enumerate()
        {
            let methods = methods.to_vec();
            let headers = headers.to_vec();
            let pattern = RouteMatch { host: host.map(str::to_owned), path: path.parse().unwrap(), methods, headers };
            table.insert(pattern, index).unwrap();
        }
        let mut found = table.candidates("a.test", "/v1/users/7", &Method::GET, &HeaderMap::new());
        found.sort_by_key(|candidate| *candidate.target);
        let missed: Vec<_> = found.iter().map(|candidate| candidate.mismatch).collect();
        let host = Some(MismatchReason::Host);
        let path = Some(MismatchReason::Path);
        let header = Some(MismatchReason::Header(&version));
        assert_eq!(missed, [None, host, Some(MismatchReason::Method), header, path, path, path, None, path]);
        found.sort_by_key(|candidate| (candidate.distance(), *candidate.target));
        let nearest: Vec<_> = found.iter().map(|candidate| *candidate.target).collect();
        assert_eq!(nearest, [0, 7, 3, 2, 6, 8, 4, 5, 1]);
    }
}

#[cfg(test)]
mod unreachable_tests {
    use crate::routing::{RouteMatch, RouteTable};

    #[test]
    fn route_with_methods_makes_route_with_headers_unreachable() {
        let pattern = |path: &str, methods: &[&str], headers: &[(&str, &str)]| RouteMatch {
            host: None,
            path: path.parse().unwrap(),
            methods: methods.iter().map(|method| method.parse().unwrap()).collect(),
            headers: headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect(),
        };
        type Case = (&'static [&'static str], &'static [(&'static str, &'static str)], usize);
        let cases: [Case; 5] = [
            (&["GET"], &[], 1),
            (&["GET", "POST"], &[("a", "1")], 1),
            (&["GET"], &[("a", "2")], 0),
            (&["GET"], &[("b", "1")], 0),
            (&[], &[], 0),
        ];
        for path in ["/x", "/x/{*rest}", "/{id}/x"] {
            for (methods, headers, expected) in cases {
                let mut table = RouteTable::default();
                table.insert(pattern(path, &[], &[("a", "1"), ("c", "1")]), "late").unwrap();
                table.insert(pattern(path, methods, headers), "early").unwrap();
                let found: Vec<_> = table.unreachable_routes().map(|(late, early, _)| (*late, *early)).collect();
                assert_eq!(found, vec![("late", "early"); expected], "{path} {methods:?} {headers:?}");
                // The lookup must agree.
                let request = http::HeaderMap::from_iter([
                    ("a".parse().unwrap(), "1".parse().unwrap()),
                    ("c".parse::<http::HeaderName>().unwrap(), "1".parse().unwrap()),
                ]);
                let path = path.replace("{*rest}", "y").replace("{id}", "y");
                let taken = table.find("h", &path, &http::Method::GET, &request);
                assert_eq!(taken, Ok(if expected == 1 { &"early" } else { &"late" }), "{path} {methods:?} {headers:?}");
            }
        }
    }
}
