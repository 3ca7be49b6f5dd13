//! Route lookup: finds the most specific route for a request, independent of the order in the configuration.
//!
//! Each host has a tree of path segments. The cost of a lookup depends on the depth of the path, not on the number of
//! routes. Regular expressions are an exception: the expressions of a host are tried one by one, in the order of the
//! configuration. They are tried only if the tree has no match, or only a catch-all match. This module does not depend
//! on limits or upstreams.

pub mod condition;
pub mod explain;
pub mod pattern;

use std::collections::HashMap;

use http::{HeaderMap, HeaderName, Method, Uri};

use crate::payload::json::body::JsonPointer;
use crate::routing::condition::{Condition, ConditionSource, Expression, Met, RouteBody};
use crate::routing::pattern::{PathForm, PathPattern, Segment};

/// The requirements of a route that a request must meet.
#[derive(Debug, Clone)]
pub struct RouteMatch {
    /// Host names in lower case without port. `*.example.com` matches all subdomains. An empty list means any host.
    pub hosts: Vec<String>,
    /// Pattern that the path of the request must match.
    pub path: PathPattern,
    /// HTTP methods of the route. An empty list means all methods.
    pub methods: Vec<Method>,
    /// Indices of the route's listeners. An empty list means all listeners.
    pub listeners: Vec<usize>,
    /// Conditions on headers, query parameters and the body. The request must meet all of them.
    pub conditions: Vec<Condition>,
}

impl RouteMatch {
    /// Create a match for all requests whose path matches the pattern.
    pub fn new(path: PathPattern) -> Self {
        RouteMatch { hosts: Vec::new(), path, methods: Vec::new(), listeners: Vec::new(), conditions: Vec::new() }
    }
}

/// The parts of a request that are used to find its route.
#[derive(Debug, Clone, Copy)]
pub struct RouteRequest<'a> {
    /// Host of the request, in lower case and without port.
    pub host: &'a str,
    /// Path of the request in canonical form.
    pub path: &'a str,
    /// Request target as received. Only its query is used.
    pub uri: &'a Uri,
    /// The method of the request.
    pub method: &'a Method,
    /// The headers of the request.
    pub headers: &'a HeaderMap,
    /// Index of the listener that accepted the connection.
    pub listener: usize,
    /// The body of the request, for conditions on it.
    pub body: RouteBody<'a>,
}

/// The error for a new route that is ambiguous with an existing route. Contains the target of the existing route.
#[derive(Debug)]
pub struct AmbiguousRoutes<T>(pub T);

/// The reason why no route was found.
#[derive(Debug, PartialEq, Eq)]
pub enum NoMatch {
    /// No route matches the host, path, listener and conditions of the request.
    NotFound,
    /// Routes match the request except for its method. Contains the methods that these routes allow.
    MethodNotAllowed(Vec<Method>),
    /// The result depends on the body, which has not been read yet.
    NeedsBody,
    /// The result depends on a value in the body that is ambiguous or too long.
    Ambiguous(JsonPointer),
}

/// The routes of a configuration, indexed by host and path.
#[derive(Debug)]
pub struct RouteTable<T> {
    exact_hosts: HashMap<Box<str>, HostRoutes<T>>,
    /// Routes of wildcard hosts. The key is the part after `*`, such as `.example.com`.
    wildcard_hosts: HashMap<Box<str>, HostRoutes<T>>,
    any_host: HostRoutes<T>,
    /// Headers that conditions of routes test, without duplicates.
    matched_headers: Vec<HeaderName>,
    /// JSON pointers that conditions of routes test, without duplicates.
    matched_pointers: Vec<JsonPointer>,
}

/// The routes of a host.
#[derive(Debug)]
struct HostRoutes<T> {
    tree: Node<T>,
    /// Regular expressions and their routes. Each expression is at the position of its first route in the
    /// configuration.
    expressions: Vec<(Expression, Vec<RouteEntry<T>>)>,
}

#[derive(Debug)]
struct Node<T> {
    literals: HashMap<Box<str>, Node<T>>,
    parameter: Option<Box<Node<T>>>,
    /// Routes whose path ends at this node.
    terminal: Vec<RouteEntry<T>>,
    /// Routes whose path ends with a catch-all parameter at this node.
    catch_all: Vec<RouteEntry<T>>,
}

#[derive(Debug)]
struct RouteEntry<T> {
    methods: Vec<Method>,
    /// `None` if the route has no listeners and no conditions. A lookup then compares only the method.
    requirements: Option<Box<Requirements>>,
    is_catch_all: bool,
    target: T,
}

/// The requirements of a route apart from host, path and method.
#[derive(Debug)]
struct Requirements {
    /// Indices of the listeners. An empty list means all listeners.
    listeners: Vec<usize>,
    conditions: Vec<Condition>,
}

impl<T> Default for RouteTable<T> {
    fn default() -> Self {
        RouteTable {
            exact_hosts: HashMap::new(),
            wildcard_hosts: HashMap::new(),
            any_host: HostRoutes::default(),
            matched_headers: Vec::new(),
            matched_pointers: Vec::new(),
        }
    }
}

impl<T> Default for HostRoutes<T> {
    fn default() -> Self {
        HostRoutes { tree: Node::default(), expressions: Vec::new() }
    }
}

impl<T> Default for Node<T> {
    fn default() -> Self {
        Node { literals: HashMap::new(), parameter: None, terminal: Vec::new(), catch_all: Vec::new() }
    }
}

impl<T: Clone> RouteTable<T> {
    /// Add a route.
    ///
    /// # Errors
    /// The new route is ambiguous with an earlier route: a request could match both, and no rule prefers one of them.
    /// The error contains the target of the earlier route.
    pub fn insert(&mut self, pattern: &RouteMatch, target: &T) -> Result<(), AmbiguousRoutes<T>> {
        for Condition { source, .. } in &pattern.conditions {
            match source {
                ConditionSource::Header(name) if !self.matched_headers.contains(name) => {
                    self.matched_headers.push(name.clone());
                }
                ConditionSource::Json(pointer) if !self.matched_pointers.contains(pointer) => {
                    self.matched_pointers.push(pointer.clone());
                }
                ConditionSource::Header(_) | ConditionSource::Query(_) | ConditionSource::Json(_) => {}
            }
        }
        if pattern.hosts.is_empty() {
            return self.any_host.insert(pattern, target);
        }
        for host in &pattern.hosts {
            let routes = match host.strip_prefix('*') {
                Some(suffix) => self.wildcard_hosts.entry(suffix.into()).or_default(),
                None => self.exact_hosts.entry(host.as_str().into()).or_default(),
            };
            routes.insert(pattern, target)?;
        }
        Ok(())
    }
}

impl<T: Clone> HostRoutes<T> {
    fn insert(&mut self, pattern: &RouteMatch, target: &T) -> Result<(), AmbiguousRoutes<T>> {
        let mut is_catch_all = false;
        let entries = match &pattern.path.0 {
            PathForm::Segments(segments) => {
                let mut node = &mut self.tree;
                for segment in segments {
                    match segment {
                        Segment::Literal(text) => node = node.literals.entry(text.clone()).or_default(),
                        Segment::Parameter(_) => node = node.parameter.get_or_insert_default(),
                        Segment::Rest(_) => is_catch_all = true,
                    }
                }
                if is_catch_all { &mut node.catch_all } else { &mut node.terminal }
            }
            PathForm::Regex(expression) => {
                let known = self.expressions.iter().position(|(known, _)| known == expression);
                let index = known.unwrap_or_else(|| {
                    self.expressions.push((expression.clone(), Vec::new()));
                    self.expressions.len() - 1
                });
                &mut self.expressions[index].1
            }
        };
        let RouteMatch { methods, listeners, mut conditions, .. } = pattern.clone();
        // Put conditions on the body last. The body is then read only if all other conditions are met.
        conditions.sort_by_key(Condition::reads_body);
        let requirements =
            (!listeners.is_empty() || !conditions.is_empty()).then(|| Box::new(Requirements { listeners, conditions }));
        let entry = RouteEntry { methods, requirements, is_catch_all, target: target.clone() };
        if let Some(ambiguous) = entries.iter().find(|other| other.is_ambiguous_with(&entry)) {
            return Err(AmbiguousRoutes(ambiguous.target.clone()));
        }
        entries.push(entry);
        // Put the most specific route first: routes with listeners, then routes with methods, then routes with more
        // conditions.
        entries.sort_by_key(|entry| {
            (entry.listeners().is_empty(), entry.methods.is_empty(), usize::MAX - entry.conditions().len())
        });
        Ok(())
    }
}

impl<T> RouteTable<T> {
    /// Return the headers that conditions of routes test.
    pub fn matched_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.matched_headers.iter()
    }

    /// Return the JSON pointers that conditions of routes test.
    pub fn matched_pointers(&self) -> &[JsonPointer] {
        &self.matched_pointers
    }

    /// Return whether at least one route names a host.
    pub fn has_hosts(&self) -> bool {
        !self.exact_hosts.is_empty() || !self.wildcard_hosts.is_empty()
    }

    /// Return whether a route names this host, either exactly or by a wildcard. `host` is in lower case and without
    /// port.
    pub fn names_host(&self, host: &str) -> bool {
        self.exact_hosts.contains_key(host)
            || host.match_indices('.').any(|(dot, _)| self.wildcard_hosts.contains_key(&host[dot..]))
    }

    /// Return the target of the route that matches best.
    ///
    /// # Errors
    /// No route matches, or the result depends on the body.
    pub fn find(&self, request: &RouteRequest<'_>) -> Result<&T, NoMatch> {
        let segments = request.path.strip_prefix('/');
        let mut search = Search { request, segments, allowed_methods: Vec::new(), undecided: None };
        let host = request.host;
        if let Some(found) = self.exact_hosts.get(host).and_then(|routes| search.best_of_host(routes)) {
            return search.undecided.map_or(Ok(found), Err);
        }
        if !self.wildcard_hosts.is_empty() {
            // Try the longest suffix first: it is the most specific wildcard.
            for (dot, _) in host.match_indices('.') {
                if let Some(found) =
                    self.wildcard_hosts.get(&host[dot..]).and_then(|routes| search.best_of_host(routes))
                {
                    return search.undecided.map_or(Ok(found), Err);
                }
            }
        }
        let found = search.best_of_host(&self.any_host);
        if let Some(undecided) = search.undecided {
            return Err(undecided);
        }
        found.ok_or(match search.allowed_methods.is_empty() {
            true => NoMatch::NotFound,
            false => NoMatch::MethodNotAllowed(search.allowed_methods),
        })
    }

    fn hosts(&self) -> impl Iterator<Item = &HostRoutes<T>> {
        self.exact_hosts.values().chain(self.wildcard_hosts.values()).chain([&self.any_host])
    }
}

struct Search<'a> {
    request: &'a RouteRequest<'a>,
    /// The path without its leading slash.
    segments: Option<&'a str>,
    allowed_methods: Vec<Method>,
    /// Set if a route was found whose match depends on the body. If this route matches, it precedes all routes that the
    /// search would find later.
    undecided: Option<NoMatch>,
}

impl Search<'_> {
    #[inline]
    fn best_of_host<'t, T>(&mut self, routes: &'t HostRoutes<T>) -> Option<&'t T> {
        let found = self.descend(&routes.tree, self.segments);
        let found = if routes.expressions.is_empty() { found } else { self.match_expressions(routes, found) };
        found.map(|entry| &entry.target)
    }

    /// Return the best match, including regular expressions. Regular expressions rank below path patterns without a
    /// catch-all parameter, and above path patterns with one. `found` is the best match in the tree.
    #[cold]
    fn match_expressions<'t, T>(
        &mut self,
        routes: &'t HostRoutes<T>,
        found: Option<&'t RouteEntry<T>>,
    ) -> Option<&'t RouteEntry<T>> {
        if found.is_some_and(|entry| !entry.is_catch_all) {
            return found;
        }
        let path = self.request.path.as_bytes();
        let mut matching = routes.expressions.iter().filter(|(expression, _)| expression.is_match(path));
        let undecided = self.undecided.take();
        let matched = matching.find_map(|(_, entries)| self.pick_entry(entries));
        if matched.is_none() {
            self.undecided = undecided;
        }
        matched.or(found)
    }

    /// Return the best match below a node. Literal segments precede parameters, and parameters precede catch-all
    /// parameters. The search visits each node at most once, whatever the path is.
    fn descend<'t, T>(&mut self, node: &'t Node<T>, remaining: Option<&str>) -> Option<&'t RouteEntry<T>> {
        let Some(remaining) = remaining else { return self.pick_entry(&node.terminal) };
        let (segment, next) = match remaining.split_once('/') {
            Some((segment, next)) => (segment, Some(next)),
            None => (remaining, None),
        };
        if let Some(found) = node.literals.get(segment).and_then(|child| self.descend(child, next)) {
            return Some(found);
        }
        let parameter = node.parameter.as_deref().filter(|_| !segment.is_empty());
        if let Some(found) = parameter.and_then(|child| self.descend(child, next)) {
            return Some(found);
        }
        self.pick_entry(&node.catch_all)
    }

    #[inline(always)]
    fn pick_entry<'t, T>(&mut self, entries: &'t [RouteEntry<T>]) -> Option<&'t RouteEntry<T>> {
        for entry in entries {
            let unmet = entry.requirements.as_ref().and_then(|requirements| requirements.unmet(self.request));
            if matches!(unmet, Some(Unmet::Listener | Unmet::Condition(_))) {
                continue;
            }
            if entry.allows_method(self.request.method) {
                if let Some(Unmet::Undecided(reason)) = unmet {
                    self.undecided.get_or_insert(reason);
                }
                return Some(entry);
            }
            self.add_allowed_methods(&entry.methods);
        }
        None
    }

    #[cold]
    fn add_allowed_methods(&mut self, methods: &[Method]) {
        for method in methods {
            if !self.allowed_methods.contains(method) {
                self.allowed_methods.push(method.clone());
            }
        }
    }
}

impl Requirements {
    fn includes_listener(&self, listener: usize) -> bool {
        self.listeners.is_empty() || self.listeners.contains(&listener)
    }

    /// Return the first requirement that the request does not meet, or that cannot be decided.
    #[inline(never)]
    fn unmet(&self, request: &RouteRequest<'_>) -> Option<Unmet<'_>> {
        if !self.includes_listener(request.listener) {
            return Some(Unmet::Listener);
        }
        self.conditions.iter().find_map(|condition| {
            match condition.matches(request.headers, request.uri.query(), request.body) {
                Met::Yes => None,
                Met::No => Some(Unmet::Condition(condition)),
                Met::NeedsBody => Some(Unmet::Undecided(NoMatch::NeedsBody)),
                Met::Ambiguous => match &condition.source {
                    ConditionSource::Json(pointer) => Some(Unmet::Undecided(NoMatch::Ambiguous(pointer.clone()))),
                    ConditionSource::Header(_) | ConditionSource::Query(_) => None,
                },
            }
        })
    }
}

/// A requirement that a request does not meet, or that cannot be decided.
#[derive(Debug)]
enum Unmet<'r> {
    Listener,
    Condition(&'r Condition),
    /// The result is unknown, because the body has not been read yet or is ambiguous.
    Undecided(NoMatch),
}

impl<T> RouteEntry<T> {
    fn allows_method(&self, method: &Method) -> bool {
        self.methods.is_empty() || self.methods.contains(method)
    }

    /// Return the indices of the listeners. An empty list means all listeners.
    fn listeners(&self) -> &[usize] {
        self.requirements.as_ref().map_or(&[], |requirements| &requirements.listeners)
    }

    fn conditions(&self) -> &[Condition] {
        self.requirements.as_ref().map_or(&[], |requirements| &requirements.conditions)
    }

    /// Return whether a request could match both routes, while no rule prefers one of them.
    fn is_ambiguous_with(&self, other: &RouteEntry<T>) -> bool {
        // If only one of the routes has listeners, or only one has methods, that route is preferred.
        let overlap = |is_empty: (bool, bool), shares: bool| match is_empty {
            (false, false) => shares,
            (one, other) => one == other,
        };
        let listeners = self.listeners();
        let others = other.listeners();
        let share_a_listener = overlap(
            (listeners.is_empty(), others.is_empty()),
            listeners.iter().any(|listener| others.contains(listener)),
        );
        let share_a_method = overlap(
            (self.methods.is_empty(), other.methods.is_empty()),
            self.methods.iter().any(|method| other.methods.contains(method)),
        );
        let conditions = self.conditions();
        let others = other.conditions();
        let exclude = |condition: &Condition| others.iter().any(|other| condition.excludes(other));
        share_a_listener && share_a_method && conditions.len() == others.len() && !conditions.iter().any(exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::payload::json::body::{JsonBody, JsonValue};
    use crate::routing::condition::ValueTest;

    /// Create the match of a test route. A `path` that does not start with a slash is a regular expression.
    fn pattern(host: &str, path: &str, methods: &[&str], headers: &[(&str, &str)]) -> RouteMatch {
        let exact = |(name, value): &(&str, &str)| Condition {
            source: ConditionSource::Header(name.parse().unwrap()),
            test: ValueTest::Exact(value.as_bytes().into()),
        };
        RouteMatch {
            hosts: (!host.is_empty()).then(|| host.to_owned()).into_iter().collect(),
            path: if path.starts_with('/') { path.parse().unwrap() } else { PathPattern::from_regex(path).unwrap() },
            methods: methods.iter().map(|method| method.parse().unwrap()).collect(),
            listeners: Vec::new(),
            conditions: headers.iter().map(exact).collect(),
        }
    }

    fn on(listeners: &[usize], pattern: RouteMatch) -> RouteMatch {
        RouteMatch { listeners: listeners.to_vec(), ..pattern }
    }

    fn table(patterns: Vec<RouteMatch>) -> RouteTable<usize> {
        let mut table = RouteTable::default();
        for (index, pattern) in patterns.into_iter().enumerate() {
            table.insert(&pattern, &index).unwrap();
        }
        table
    }

    fn request<'a>(host: &'a str, path: &'a str, method: &'a Method, headers: &'a HeaderMap) -> RouteRequest<'a> {
        static URI: std::sync::LazyLock<Uri> = std::sync::LazyLock::new(|| Uri::from_static("/?a=1"));
        RouteRequest { host, path, uri: &URI, method, headers, listener: 0, body: RouteBody::Unread }
    }

    fn find(table: &RouteTable<usize>, host: &str, path: &str) -> Option<usize> {
        table.find(&request(host, path, &Method::GET, &HeaderMap::new())).ok().copied()
    }

    #[test]
    fn routes_that_depend_on_the_body_are_undecided_without_it() {
        let pointer = JsonPointer::parse("/model").unwrap();
        let json = |prefix: &str| Condition {
            source: ConditionSource::Json(pointer.clone()),
            test: ValueTest::Prefix(prefix.as_bytes().into()),
        };
        let mut table = RouteTable::default();
        let plain = |path: &str, methods: &[&str]| pattern("", path, methods, &[]);
        for (target, route, conditions) in [
            (0, plain("/x", &[]), vec![]),
            (1, plain("/x", &[]), vec![json("gpt-")]),
            (2, plain("/post", &["POST"]), vec![json("gpt-")]),
            (3, plain("/files/{*rest}", &[]), vec![json("gpt-")]),
            (4, plain("/files/[0-9]+", &[]), vec![]),
            (5, pattern("", "/header", &[], &[("x-a", "1")]), vec![json("gpt-")]),
            (6, plain("/header", &[]), vec![]),
        ] {
            let route = match target {
                4 => RouteMatch { path: PathPattern::from_regex("/files/[0-9]+").unwrap(), ..route },
                _ => route,
            };
            let conditions = route.conditions.iter().cloned().chain(conditions).collect();
            table.insert(&RouteMatch { conditions, ..route }, &target).unwrap();
        }
        let body = |value: Option<JsonValue>| {
            JsonBody::from_values(value.into_iter().map(|value| (pointer.clone(), value)).collect())
        };
        let gpt = body(Some(JsonValue::Text("gpt-5".into())));
        let other = body(Some(JsonValue::Null));
        let empty = body(None);
        let ambiguous = body(Some(JsonValue::Ambiguous("Model".into())));
        let headers = HeaderMap::new();
        let find = |path: &str, method: &Method, body: RouteBody<'_>| {
            table.find(&RouteRequest { body, ..request("h", path, method, &headers) }).copied()
        };
        let get = &Method::GET;
        let post = &Method::POST;
        let undecided = || Err(NoMatch::Ambiguous(pointer.clone()));
        for (path, method, expected) in [
            ("/x", post, [Err(NoMatch::NeedsBody), Ok(1), Ok(0), Ok(0), undecided()]),
            (
                "/post",
                post,
                [Err(NoMatch::NeedsBody), Ok(2), Err(NoMatch::NotFound), Err(NoMatch::NotFound), undecided()],
            ),
            // The body is not needed if a more specific route matches, or if the header or method does not match.
            ("/files/7", post, [Ok(4), Ok(4), Ok(4), Ok(4), Ok(4)]),
            ("/header", post, [Ok(6), Ok(6), Ok(6), Ok(6), Ok(6)]),
            (
                "/files/a",
                get,
                [Err(NoMatch::NeedsBody), Ok(3), Err(NoMatch::NotFound), Err(NoMatch::NotFound), undecided()],
            ),
        ] {
            let read = [&gpt, &other, &empty, &ambiguous].map(RouteBody::Read);
            for (body, expected) in [RouteBody::Unread].into_iter().chain(read).zip(expected) {
                assert_eq!(find(path, method, body), expected, "{path} {body:?}");
            }
        }
        let allowed = Err(NoMatch::MethodNotAllowed(vec![Method::POST]));
        assert_eq!(find("/post", get, RouteBody::Unread), allowed);
        assert_eq!(find("/x", get, RouteBody::Unknown), Ok(1));
        assert_eq!(table.matched_pointers(), [pointer]);
    }

    #[test]
    fn most_specific_path_matches_in_any_order() {
        let paths =
            ["/{*rest}", "/v1/{*rest}", "/v1/users/{id}", "/v1/users/me", "/s/{*rest}", "/s/{id}/items/{item}", "/v1"];
        for rotation in 0..paths.len() {
            let mut rotated = paths;
            rotated.rotate_left(rotation);
            let table = table(rotated.iter().map(|path| pattern("", path, &[], &[])).collect());
            for (path, expected) in [
                ("/", "/{*rest}"),
                ("/v1", "/v1"),
                ("/v1/", "/v1/{*rest}"),
                ("/v1/users/me", "/v1/users/me"),
                ("/v1/users/7", "/v1/users/{id}"),
                ("/v1/users/", "/v1/{*rest}"),
                ("/v1/users/7/x", "/v1/{*rest}"),
                ("/s/1/items/2", "/s/{id}/items/{item}"),
                ("/s/1/items/2/3", "/s/{*rest}"),
                ("/other", "/{*rest}"),
            ] {
                assert_eq!(find(&table, "h", path).map(|index| rotated[index]), Some(expected), "{path}");
            }
        }
    }

    #[test]
    fn most_specific_host_matches_and_falls_back() {
        let hosts = ["", "*.example.com", "*.b.example.com", "a.example.com"];
        let mut patterns: Vec<_> = hosts.iter().map(|host| pattern(host, "/x", &[], &[])).collect();
        patterns.push(pattern("", "/only-any", &[], &[]));
        let table = table(patterns);
        for (host, path, expected) in [
            ("a.example.com", "/x", Some(3)),
            ("c.example.com", "/x", Some(1)),
            ("a.b.example.com", "/x", Some(2)),
            ("example.com", "/x", Some(0)),
            ("a.example.com", "/only-any", Some(4)),
            ("a.example.com", "/none", None),
        ] {
            assert_eq!(find(&table, host, path), expected, "{host}{path}");
        }
    }

    #[test]
    fn methods_and_headers_select_a_route_of_a_path() {
        let table = table(vec![
            pattern("", "/x", &["GET"], &[]),
            pattern("", "/x", &["GET"], &[("x-version", "1")]),
            pattern("", "/x", &["GET"], &[("x-version", "2")]),
            pattern("", "/x", &["POST"], &[]),
        ]);
        let with = |value: &str| HeaderMap::from_iter([(HeaderName::from_static("x-version"), value.parse().unwrap())]);
        assert_eq!(table.find(&request("h", "/x", &Method::GET, &with("2"))), Ok(&2));
        assert_eq!(table.find(&request("h", "/x", &Method::GET, &with("3"))), Ok(&0));
        assert_eq!(table.find(&request("h", "/x", &Method::POST, &with("1"))), Ok(&3));
        let allowed = NoMatch::MethodNotAllowed(vec![Method::GET, Method::POST]);
        assert_eq!(table.find(&request("h", "/x", &Method::DELETE, &HeaderMap::new())), Err(allowed));
    }

    #[test]
    fn route_matches_each_of_its_hosts() {
        let hosts =
            RouteMatch { hosts: ["a.test", "*.b.test"].map(str::to_owned).to_vec(), ..pattern("", "/x", &[], &[]) };
        let table = table(vec![hosts, pattern("", "/x", &[], &[])]);
        for (host, expected) in [("a.test", 0), ("x.b.test", 0), ("b.test", 1), ("c.test", 1)] {
            assert_eq!(find(&table, host, "/x"), Some(expected), "{host}");
        }
    }

    #[test]
    fn route_with_listeners_precedes_route_without() {
        let routes = [
            pattern("", "/x", &["GET"], &[("a", "1")]),
            on(&[0], pattern("", "/x", &[], &[])),
            on(&[1, 2], pattern("", "/x", &["GET"], &[])),
            on(&[1], pattern("", "/x", &[], &[])),
        ];
        for rotation in 0..routes.len() {
            let mut order: Vec<_> = routes.iter().cloned().enumerate().collect();
            order.rotate_left(rotation);
            let mut table = RouteTable::default();
            for (index, pattern) in order {
                table.insert(&pattern, &index).unwrap();
            }
            let headers = HeaderMap::from_iter([(HeaderName::from_static("a"), "1".parse().unwrap())]);
            for (listener, method, expected) in [
                (0, Method::GET, Some(1)),
                (1, Method::GET, Some(2)),
                (1, Method::PUT, Some(3)),
                (2, Method::GET, Some(2)),
                (2, Method::PUT, None),
                (3, Method::GET, Some(0)),
            ] {
                let request = RouteRequest { listener, ..request("h", "/x", &method, &headers) };
                assert_eq!(table.find(&request).ok().copied(), expected, "{method} on {listener}");
            }
        }
    }

    #[test]
    fn expressions_rank_between_parameters_and_catch_all_paths() {
        let table = table(vec![
            pattern("", "/{*rest}", &[], &[]),
            pattern("", "/v1/{*rest}", &[], &[]),
            pattern("", "/v1/{id}", &[], &[]),
            pattern("", r"(?i)/v1/\d+.*", &[], &[]),
            pattern("", "/v1/{id}/items", &["PUT"], &[]),
            pattern("", r"(?i)/v1/7.*", &["GET"], &[]),
            pattern("", r"(?i)/v1/\d+.*", &["GET"], &[]),
            pattern("a.test", "/v1/{*rest}", &[], &[]),
            pattern("", r"(/posts?)", &["POST"], &[]),
        ]);
        for (host, path, expected) in [
            ("h", "/v1/7", 2),
            // The first expression in the configuration wins. Its route with methods precedes its route without
            // methods.
            ("h", "/v1/7/x", 6),
            ("h", "/V1/7", 6),
            ("h", "/v1/7/items", 6),
            ("h", "/v1/x/y", 1),
            ("h", "/x", 0),
            // A more specific host wins, regardless of the path.
            ("a.test", "/v1/7/x", 7),
            ("a.test", "/V1/7", 6),
        ] {
            assert_eq!(find(&table, host, path), Some(expected), "{host}{path}");
        }
        // A regular expression whose route does not match has no effect on the other routes.
        assert_eq!(find(&table, "h", "/posts"), Some(0), "the regular expression has another method");
        let allowed = table.find(&request("a.test", "/posts", &Method::POST, &HeaderMap::new()));
        assert_eq!(allowed, Ok(&8));
        let alone = self::table(vec![pattern("", "(/posts?)", &["POST"], &[])]);
        let refused = alone.find(&request("h", "/post", &Method::GET, &HeaderMap::new()));
        assert_eq!(refused, Err(NoMatch::MethodNotAllowed(vec![Method::POST])));
        assert_eq!(alone.find(&request("h", "/postss", &Method::POST, &HeaderMap::new())), Err(NoMatch::NotFound));
    }

    #[test]
    fn parameters_are_captured() {
        for (pattern, path, name, expected) in [
            ("/v1/users/{id}", "/v1/users/7", "id", Some("7")),
            ("/{a}/x/{b}", "/1/x/2", "b", Some("2")),
            ("/{a}/x/{b}", "/1/x/2", "a", Some("1")),
            ("/v1/{*rest}", "/v1/a/b/", "rest", Some("a/b/")),
            ("/{*rest}", "/", "rest", Some("")),
            ("/v1/{id}", "/v1/7", "other", None),
        ] {
            let pattern: PathPattern = pattern.parse().unwrap();
            assert_eq!(pattern.capture(path, name), expected, "{pattern:?} of {path}");
            assert_eq!(pattern.has_parameter(name), expected.is_some(), "{pattern:?} has {name}");
        }
    }

    #[test]
    fn prefixes_match_whole_segments() {
        for (pattern, prefix, expected) in [
            ("/v1/{*rest}", "/v1", true),
            ("/v1", "/v1", true),
            ("/v1/users/{id}", "/v1/users", true),
            ("/v1/users/{id}", "/v1/use", false),
            ("/v1", "/v1/users", false),
            ("/{version}/users", "/v1", false),
            ("/{*rest}", "/v1", false),
        ] {
            assert_eq!(pattern.parse::<PathPattern>().unwrap().has_prefix(prefix), expected, "{prefix} of {pattern}");
        }
    }

    #[test]
    fn ambiguous_routes_are_rejected() {
        for (one, other, ambiguous) in [
            (pattern("", "/{a}", &[], &[]), pattern("", "/{b}", &[], &[]), true),
            (pattern("", "/x", &["GET", "PUT"], &[]), pattern("", "/x", &["PUT"], &[]), true),
            (pattern("", "/x", &["GET"], &[]), pattern("", "/x", &[], &[]), false),
            (pattern("", "/x", &[], &[]), pattern("", "/x", &["GET"], &[("a", "1")]), false),
            (pattern("", "/x", &[], &[]), pattern("", "/x", &[], &[]), true),
            (pattern("", "/x", &[], &[("a", "1")]), pattern("", "/x", &[], &[("b", "1")]), true),
            (pattern("", "/x", &[], &[("a", "1")]), pattern("", "/x", &[], &[("a", "2")]), false),
            (pattern("", "/x", &["GET"], &[]), pattern("", "/x", &["PUT"], &[]), false),
            (pattern("a.b", "/x", &[], &[]), pattern("*.b", "/x", &[], &[]), false),
            (on(&[0], pattern("", "/x", &[], &[])), pattern("", "/x", &[], &[]), false),
            (on(&[0, 1], pattern("", "/x", &[], &[])), on(&[1], pattern("", "/x", &[], &[])), true),
            (on(&[0], pattern("", "/x", &[], &[])), on(&[1], pattern("", "/x", &[], &[])), false),
            (on(&[0], pattern("", "/x", &["GET"], &[])), on(&[0], pattern("", "/x", &[], &[])), false),
            (pattern("", "x.*", &[], &[]), pattern("", "x.*", &[], &[]), true),
            (pattern("", "x.*", &[], &[]), pattern("", "x.*", &["GET"], &[]), false),
            (pattern("", "x.*", &[], &[]), pattern("", ".*", &[], &[]), false),
        ] {
            let mut table = RouteTable::default();
            table.insert(&one, &1).unwrap();
            assert_eq!(table.insert(&other, &2).is_err(), ambiguous, "{one:?} {other:?}");
        }
    }
}
