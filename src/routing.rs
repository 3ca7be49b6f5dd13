//! Route lookup: the best match for a request, independent of the order in the file.
//!
//! Each host has a tree of path segments. The cost of a lookup depends on the depth of the path, not on the number of
//! routes. This module knows nothing about limits or upstreams.

pub mod explain;
pub mod pattern;

use std::collections::HashMap;

use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::routing::pattern::{PathPattern, Segment};

/// Conditions that a request must meet.
#[derive(Debug, Clone)]
pub struct RouteMatch {
    /// Host in lower case without port; `*.example.com` for all subdomains. `None` matches any host.
    pub host: Option<String>,
    /// Path pattern.
    pub path: PathPattern,
    /// Methods. Empty = all.
    pub methods: Vec<Method>,
    /// Headers that must be present with exactly these values.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// A new route is ambiguous with the route that has this target.
#[derive(Debug)]
pub struct AmbiguousRoutes<T>(pub T);

/// Reason why no route matches.
#[derive(Debug, PartialEq, Eq)]
pub enum NoMatch {
    /// No route matches the host, path and headers.
    NotFound,
    /// Only the method does not match. Contains the allowed methods.
    MethodNotAllowed(Vec<Method>),
}

/// All routes.
#[derive(Debug)]
pub struct RouteTable<T> {
    exact_hosts: HashMap<Box<str>, Node<T>>,
    /// Keyed by the suffix after `*`, including the dot.
    wildcard_hosts: HashMap<Box<str>, Node<T>>,
    any_host: Node<T>,
    /// Headers that routes match on, without duplicates.
    matched_headers: Vec<HeaderName>,
}

#[derive(Debug)]
struct Node<T> {
    literals: HashMap<Box<str>, Node<T>>,
    parameter: Option<Box<Node<T>>>,
    /// Routes whose path ends at this node.
    terminal: Vec<RouteEntry<T>>,
    /// Routes that match any rest of the path.
    catch_all: Vec<RouteEntry<T>>,
}

#[derive(Debug)]
struct RouteEntry<T> {
    methods: Vec<Method>,
    headers: Vec<(HeaderName, HeaderValue)>,
    target: T,
}

impl<T> Default for RouteTable<T> {
    fn default() -> Self {
        RouteTable {
            exact_hosts: HashMap::new(),
            wildcard_hosts: HashMap::new(),
            any_host: Node::default(),
            matched_headers: Vec::new(),
        }
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
    /// A request could match this route and an earlier one equally well. The error has the target of the earlier one.
    pub fn insert(&mut self, pattern: RouteMatch, target: T) -> Result<(), AmbiguousRoutes<T>> {
        let mut node = match &pattern.host {
            None => &mut self.any_host,
            Some(host) => match host.strip_prefix('*') {
                Some(suffix) => self.wildcard_hosts.entry(suffix.into()).or_default(),
                None => self.exact_hosts.entry(host.as_str().into()).or_default(),
            },
        };
        for (name, _) in &pattern.headers {
            if !self.matched_headers.contains(name) {
                self.matched_headers.push(name.clone());
            }
        }
        let mut takes_rest = false;
        for segment in pattern.path.0 {
            match segment {
                Segment::Literal(text) => node = node.literals.entry(text).or_default(),
                Segment::Parameter(_) => node = node.parameter.get_or_insert_default(),
                Segment::Rest(_) => takes_rest = true,
            }
        }
        let entries = if takes_rest { &mut node.catch_all } else { &mut node.terminal };
        let entry = RouteEntry { methods: pattern.methods, headers: pattern.headers, target };
        if let Some(ambiguous) = entries.iter().find(|other| other.is_ambiguous_with(&entry)) {
            return Err(AmbiguousRoutes(ambiguous.target.clone()));
        }
        entries.push(entry);
        // Best match first: routes with methods, then routes with more headers.
        entries.sort_by_key(|entry| (entry.methods.is_empty(), usize::MAX - entry.headers.len()));
        Ok(())
    }
}

impl<T> RouteTable<T> {
    /// Return the headers that routes match on.
    pub fn matched_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.matched_headers.iter()
    }

    /// Return whether a route names a host.
    pub fn has_hosts(&self) -> bool {
        !self.exact_hosts.is_empty() || !self.wildcard_hosts.is_empty()
    }

    /// Return whether a route names this host, itself or by a wildcard. `host` is as for [`find`](Self::find).
    pub fn names_host(&self, host: &str) -> bool {
        self.exact_hosts.contains_key(host)
            || host.match_indices('.').any(|(dot, _)| self.wildcard_hosts.contains_key(&host[dot..]))
    }

    /// Return the target of the best match. `host` must be in lower case without port, `path` in canonical form.
    ///
    /// # Errors
    /// No route matches.
    pub fn find(&self, host: &str, path: &str, method: &Method, headers: &HeaderMap) -> Result<&T, NoMatch> {
        let mut search = Search { method, headers, allowed_methods: Vec::new() };
        let segments = path.strip_prefix('/');
        if let Some(found) = self.exact_hosts.get(host).and_then(|node| search.descend(node, segments)) {
            return Ok(found);
        }
        if !self.wildcard_hosts.is_empty() {
            // Longest suffix first.
            for (dot, _) in host.match_indices('.') {
                if let Some(found) =
                    self.wildcard_hosts.get(&host[dot..]).and_then(|node| search.descend(node, segments))
                {
                    return Ok(found);
                }
            }
        }
        search.descend(&self.any_host, segments).ok_or(match search.allowed_methods.is_empty() {
            true => NoMatch::NotFound,
            false => NoMatch::MethodNotAllowed(search.allowed_methods),
        })
    }
}

struct Search<'a> {
    method: &'a Method,
    headers: &'a HeaderMap,
    allowed_methods: Vec<Method>,
}

impl Search<'_> {
    /// Return the best match below a node: literal segments before parameters before catch-all patterns. This visits
    /// each node at most once, whatever the path is.
    fn descend<'t, T>(&mut self, node: &'t Node<T>, remaining: Option<&str>) -> Option<&'t T> {
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

    fn pick_entry<'t, T>(&mut self, entries: &'t [RouteEntry<T>]) -> Option<&'t T> {
        for entry in entries {
            if entry.missing_header(self.headers).is_some() {
                continue;
            }
            if entry.allows_method(self.method) {
                return Some(&entry.target);
            }
            for method in &entry.methods {
                if !self.allowed_methods.contains(method) {
                    self.allowed_methods.push(method.clone());
                }
            }
        }
        None
    }
}

impl<T> RouteEntry<T> {
    fn allows_method(&self, method: &Method) -> bool {
        self.methods.is_empty() || self.methods.contains(method)
    }

    /// Return the first required header that is missing or has another value.
    fn missing_header(&self, headers: &HeaderMap) -> Option<&HeaderName> {
        // If a header has several lines, servers use the first, the last or all of them. Such a header matches no
        // route.
        let is_missing = |(name, value): &&(HeaderName, HeaderValue)| !headers.get_all(name).iter().eq([value]);
        self.headers.iter().find(is_missing).map(|(name, _)| name)
    }

    /// Return whether a request could match both routes without a rule to prefer one.
    fn is_ambiguous_with(&self, other: &RouteEntry<T>) -> bool {
        // Routes with methods take precedence over routes without.
        let share_a_method = match (self.methods.is_empty(), other.methods.is_empty()) {
            (false, false) => self.methods.iter().any(|method| other.methods.contains(method)),
            (one, other) => one == other,
        };
        // A request cannot have both values of one header.
        let exclude = |(name, value): &(HeaderName, HeaderValue)| {
            other.headers.iter().any(|(other_name, other_value)| name == other_name && value != other_value)
        };
        share_a_method && self.headers.len() == other.headers.len() && !self.headers.iter().any(exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(host: &str, path: &str, methods: &[&str], headers: &[(&str, &str)]) -> RouteMatch {
        RouteMatch {
            host: (!host.is_empty()).then(|| host.to_owned()),
            path: path.parse().unwrap(),
            methods: methods.iter().map(|method| method.parse().unwrap()).collect(),
            headers: headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect(),
        }
    }

    fn table(patterns: Vec<RouteMatch>) -> RouteTable<usize> {
        let mut table = RouteTable::default();
        for (index, pattern) in patterns.into_iter().enumerate() {
            table.insert(pattern, index).unwrap();
        }
        table
    }

    fn find(table: &RouteTable<usize>, host: &str, path: &str) -> Option<usize> {
        table.find(host, path, &Method::GET, &HeaderMap::new()).ok().copied()
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
        assert_eq!(table.find("h", "/x", &Method::GET, &with("2")), Ok(&2));
        assert_eq!(table.find("h", "/x", &Method::GET, &with("3")), Ok(&0));
        assert_eq!(table.find("h", "/x", &Method::POST, &with("1")), Ok(&3));
        let allowed = NoMatch::MethodNotAllowed(vec![Method::GET, Method::POST]);
        assert_eq!(table.find("h", "/x", &Method::DELETE, &HeaderMap::new()), Err(allowed));
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
        ] {
            let mut table = RouteTable::default();
            table.insert(one.clone(), 1).unwrap();
            assert_eq!(table.insert(other.clone(), 2).is_err(), ambiguous, "{one:?} {other:?}");
        }
    }
}
