//! Explains why routes do not match a request, and finds unreachable routes.

use std::cmp::Reverse;

use http::Method;

use crate::routing::condition::Condition;
use crate::routing::{HostRoutes, Node, RouteEntry, RouteRequest, RouteTable, Unmet};

/// The result of comparing a route with a request. A route with several hosts has one candidate per host. A route that
/// accepts a path with and without trailing slash has one candidate for each form.
#[derive(Debug)]
pub struct Candidate<'t, T> {
    /// Target of the route.
    pub target: &'t T,
    /// Host of the route, as configured. `None` if the route matches any host.
    pub host: Option<String>,
    /// Methods of the route. An empty list means all methods.
    pub methods: &'t [Method],
    /// Indices of the listeners of the route. An empty list means all listeners.
    pub listeners: &'t [usize],
    /// Conditions of the route on headers, query parameters and the body.
    pub conditions: &'t [Condition],
    /// The first requirement that the request does not meet. `None` if the route matches.
    pub mismatch: Option<MismatchReason<'t>>,
    /// Number of path segments of the request that match.
    matched_segments: usize,
}

/// The requirement that a request does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MismatchReason<'t> {
    /// The host of the request does not match.
    Host,
    /// The path of the request does not match.
    Path,
    /// The route does not serve the listener of the request.
    Listener,
    /// The method of the request does not match.
    Method,
    /// The request does not meet this condition on a header, a query parameter or the body.
    Condition(&'t Condition),
}

impl<T> Candidate<'_, T> {
    /// Return a sort key that puts the closest match first. The requirements of a route are checked in this order:
    /// host, path, listener, method, conditions. A route that meets more of them is closer.
    pub fn distance(&self) -> impl Ord + use<T> {
        let criterion = match self.mismatch {
            None => 0,
            Some(MismatchReason::Condition(_)) => 1,
            Some(MismatchReason::Method) => 2,
            Some(MismatchReason::Listener) => 3,
            Some(MismatchReason::Path) => 4,
            Some(MismatchReason::Host) => 5,
        };
        (criterion, Reverse(self.matched_segments))
    }
}

/// The state at one node during a walk through the route tree.
#[derive(Clone, Copy)]
struct SearchPath<'a> {
    host_matches: bool,
    /// The part of the path that has not been compared yet. `None` if no segment is left.
    remaining: Option<&'a str>,
    path_matches: bool,
    matched_segments: usize,
}

impl<T> RouteTable<T> {
    /// Compare all routes with a request. The candidates are in no particular order.
    pub fn candidates(&self, request: &RouteRequest<'_>) -> Vec<Candidate<'_, T>> {
        let host = request.host;
        let mut found = Vec::new();
        for (name, routes) in &self.exact_hosts {
            routes.compare(request, Some(name), **name == *host, &mut found);
        }
        for (suffix, routes) in &self.wildcard_hosts {
            let is_host = host.match_indices('.').any(|(dot, _)| host[dot..] == **suffix);
            routes.compare(request, Some(&format!("*{suffix}")), is_host, &mut found);
        }
        self.any_host.compare(request, None, true, &mut found);
        found
    }
}

impl<T> HostRoutes<T> {
    fn compare<'t>(
        &'t self,
        request: &RouteRequest<'_>,
        host: Option<&str>,
        host_matches: bool,
        found: &mut Vec<Candidate<'t, T>>,
    ) {
        let search_path = SearchPath {
            host_matches,
            remaining: request.path.strip_prefix('/'),
            path_matches: true,
            matched_segments: 0,
        };
        Node::walk(&self.tree, request, host, search_path, found);
        for (expression, entries) in &self.expressions {
            let path_matches = expression.is_match(request.path.as_bytes());
            let matched_segments = if path_matches { request.path.matches('/').count() } else { 0 };
            let search_path = SearchPath { path_matches, matched_segments, ..search_path };
            found.extend(entries.iter().map(|entry| entry.candidate(request, host, search_path)));
        }
    }
}

impl<T> Node<T> {
    fn walk<'t>(
        node: &'t Node<T>,
        request: &RouteRequest<'_>,
        host: Option<&str>,
        search_path: SearchPath<'_>,
        found: &mut Vec<Candidate<'t, T>>,
    ) {
        let mut add = |entries: &'t [RouteEntry<T>], is_path| {
            let way = SearchPath { path_matches: search_path.path_matches && is_path, ..search_path };
            found.extend(entries.iter().map(|entry| entry.candidate(request, host, way)));
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
    fn candidate(
        &self,
        request: &RouteRequest<'_>,
        host: Option<&str>,
        search_path: SearchPath<'_>,
    ) -> Candidate<'_, T> {
        Candidate {
            target: &self.target,
            host: host.map(str::to_owned),
            methods: &self.methods,
            listeners: self.listeners(),
            conditions: self.conditions(),
            mismatch: self.mismatch(request, search_path),
            matched_segments: search_path.matched_segments,
        }
    }

    fn mismatch(&self, request: &RouteRequest<'_>, search_path: SearchPath<'_>) -> Option<MismatchReason<'_>> {
        let requirements = self.requirements.as_deref();
        if !search_path.host_matches {
            return Some(MismatchReason::Host);
        }
        if !search_path.path_matches {
            return Some(MismatchReason::Path);
        }
        let unmet = requirements.and_then(|requirements| requirements.unmet(request));
        if matches!(unmet, Some(Unmet::Listener)) {
            return Some(MismatchReason::Listener);
        }
        if !self.allows_method(request.method) {
            return Some(MismatchReason::Method);
        }
        match unmet {
            Some(Unmet::Condition(condition)) => Some(MismatchReason::Condition(condition)),
            Some(Unmet::Listener | Unmet::Undecided(_)) | None => None,
        }
    }
}

// Detection of unreachable routes, which match no request with certain methods.

/// The target of an unreachable route, the target of the route that precedes it, and the methods for which it is
/// unreachable.
type UnreachableRoute<'t, T> = (&'t T, &'t T, &'t [Method]);

impl<T> RouteTable<T> {
    /// Return routes that are unreachable for some methods. Such a route has conditions, but no methods. A route with
    /// methods precedes it, and has the same or fewer conditions. A route with several hosts is returned once per host.
    ///
    /// Different path patterns need no comparison, because each pattern matches paths that no more specific pattern
    /// matches. Routes that are unreachable for another reason are not found, such as a regular expression after
    /// another expression that matches the same paths.
    pub fn unreachable_routes(&self) -> impl Iterator<Item = UnreachableRoute<'_, T>> {
        let mut found = Vec::new();
        for routes in self.hosts() {
            routes.tree.collect_unreachable(&mut found);
            routes.expressions.iter().for_each(|(_, entries)| collect_unreachable(entries, &mut found));
        }
        found.into_iter()
    }
}

impl<T> Node<T> {
    fn collect_unreachable<'t>(&'t self, found: &mut Vec<UnreachableRoute<'t, T>>) {
        for entries in [&self.terminal, &self.catch_all] {
            collect_unreachable(entries, found);
        }
        for child in self.literals.values().chain(self.parameter.as_deref()) {
            child.collect_unreachable(found);
        }
    }
}

fn collect_unreachable<'t, T>(entries: &'t [RouteEntry<T>], found: &mut Vec<UnreachableRoute<'t, T>>) {
    for late in entries.iter().filter(|entry| entry.methods.is_empty() && !entry.conditions().is_empty()) {
        let before = entries.iter().filter(|entry| entry.precedes(late));
        found.extend(before.map(|entry| (&late.target, &entry.target, &*entry.methods)));
    }
}

impl<T> RouteEntry<T> {
    /// Return whether this route precedes `late` for all requests with one of this route's methods. `late` is a route
    /// without methods.
    fn precedes(&self, late: &RouteEntry<T>) -> bool {
        let listeners = self.listeners();
        let late_listeners = late.listeners();
        let is_implied = |condition: &Condition| late.conditions().iter().any(|late| condition.is_implied_by(late));
        !self.methods.is_empty()
            && listeners.is_empty() == late_listeners.is_empty()
            && late_listeners.iter().all(|listener| listeners.contains(listener))
            && self.conditions().iter().all(is_implied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::RouteMatch;
    use crate::routing::condition::{ConditionSource, RouteBody, ValueTest};
    use http::{HeaderMap, HeaderName, Uri};

    #[test]
    fn candidate_names_its_first_mismatch() {
        let source = ConditionSource::Header(HeaderName::from_static("x-version"));
        let version = Condition { source, test: ValueTest::Exact(b"2"[..].into()) };
        let wants = [version.clone()];
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
            let pattern = RouteMatch {
                hosts: host.map(str::to_owned).into_iter().collect(),
                methods: methods.to_vec(),
                conditions: headers.to_vec(),
                ..RouteMatch::new(path.parse().unwrap())
            };
            table.insert(&pattern, &index).unwrap();
        }
        let elsewhere = RouteMatch { listeners: vec![1], ..RouteMatch::new("/v1/users/{id}".parse().unwrap()) };
        table.insert(&elsewhere, &9).unwrap();
        let uri = Uri::from_static("/v1/users/7");
        let headers = HeaderMap::new();
        let host = "a.test";
        let path = "/v1/users/7";
        let method = &Method::GET;
        let request =
            RouteRequest { host, path, uri: &uri, method, headers: &headers, listener: 0, body: RouteBody::Unread };
        let mut found = table.candidates(&request);
        found.sort_by_key(|candidate| *candidate.target);
        let missed: Vec<_> = found.iter().map(|candidate| candidate.mismatch).collect();
        let host = Some(MismatchReason::Host);
        let path = Some(MismatchReason::Path);
        let header = Some(MismatchReason::Condition(&version));
        let listener = Some(MismatchReason::Listener);
        assert_eq!(missed, [None, host, Some(MismatchReason::Method), header, path, path, path, None, path, listener]);
        found.sort_by_key(|candidate| (candidate.distance(), *candidate.target));
        let nearest: Vec<_> = found.iter().map(|candidate| *candidate.target).collect();
        assert_eq!(nearest, [0, 7, 3, 2, 9, 6, 8, 4, 5, 1]);
    }
}

#[cfg(test)]
mod unreachable_tests {
    use crate::routing::condition::{Condition, ConditionSource, RouteBody, ValueTest};
    use crate::routing::{RouteMatch, RouteRequest, RouteTable};

    #[test]
    fn route_with_methods_makes_route_with_headers_unreachable() {
        let exact = |(name, value): &(&str, &str)| Condition {
            source: ConditionSource::Header(name.parse().unwrap()),
            test: ValueTest::Exact(value.as_bytes().into()),
        };
        let pattern = |path: &str, methods: &[&str], headers: &[(&str, &str)]| RouteMatch {
            methods: methods.iter().map(|method| method.parse().unwrap()).collect(),
            conditions: headers.iter().map(exact).collect(),
            ..RouteMatch::new(path.parse().unwrap())
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
                table.insert(&pattern(path, &[], &[("a", "1"), ("c", "1")]), &"late").unwrap();
                table.insert(&pattern(path, methods, headers), &"early").unwrap();
                let found: Vec<_> = table.unreachable_routes().map(|(late, early, _)| (*late, *early)).collect();
                assert_eq!(found, vec![("late", "early"); expected], "{path} {methods:?} {headers:?}");
                // The lookup must agree with `unreachable_routes`.
                let headers = http::HeaderMap::from_iter([
                    ("a".parse().unwrap(), "1".parse().unwrap()),
                    ("c".parse::<http::HeaderName>().unwrap(), "1".parse().unwrap()),
                ]);
                let path = path.replace("{*rest}", "y").replace("{id}", "y");
                let (host, path, method, uri) = ("h", &*path, &http::Method::GET, &path.parse().unwrap());
                let body = RouteBody::Unread;
                let request = RouteRequest { host, path, uri, method, headers: &headers, listener: 0, body };
                let taken = table.find(&request);
                assert_eq!(taken, Ok(if expected == 1 { &"early" } else { &"late" }), "{path} {methods:?}");
            }
        }
    }
}
