//! Why routes do not take a request: what of it they want otherwise.

use std::cmp::Reverse;

use http::{HeaderMap, HeaderName, HeaderValue, Method};

use super::{Entry, Node, RouteTable};

/// A route beside a request.
#[derive(Debug)]
pub struct Candidate<'t, T> {
    /// The route.
    pub target: &'t T,
    /// The host that it wants, as configured; none for any.
    pub host: Option<String>,
    /// The methods that it wants; none listed = all.
    pub methods: &'t [Method],
    /// The fields that it wants.
    pub headers: &'t [(HeaderName, HeaderValue)],
    /// What of the request is first to be otherwise than it wants; none = it matches.
    pub missed: Option<Missed<'t>>,
    /// So many segments of the path are as it wants them.
    depth: usize,
}

/// What of a request is otherwise than a route wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missed<'t> {
    /// The host.
    Host,
    /// The path.
    Path,
    /// The method.
    Method,
    /// This field, or its value.
    Header(&'t HeaderName),
}

impl<T> Candidate<'_, T> {
    /// Sorts those first that lack least: after host and path come the method and the fields.
    pub fn distance(&self) -> impl Ord + use<T> {
        let criterion = match self.missed {
            None => 0,
            Some(Missed::Header(_)) => 1,
            Some(Missed::Method) => 2,
            Some(Missed::Path) => 3,
            Some(Missed::Host) => 4,
        };
        (criterion, Reverse(self.depth))
    }
}

/// A request, as far as routes are concerned.
struct Request<'a> {
    method: &'a Method,
    headers: &'a HeaderMap,
}

/// How far a request has come on the way to a node.
#[derive(Clone, Copy)]
struct Way<'a> {
    is_host: bool,
    /// What is left of its path; none if it is used up.
    remaining: Option<&'a str>,
    is_path: bool,
    depth: usize,
}

impl<T> RouteTable<T> {
    /// All routes beside a request, in no order; host and path as in [`RouteTable::find`].
    pub fn candidates(&self, host: &str, path: &str, method: &Method, headers: &HeaderMap) -> Vec<Candidate<'_, T>> {
        let request = Request { method, headers };
        let mut found = Vec::new();
        let mut walk = |node, of: Option<String>, is_host| {
            let way = Way { is_host, remaining: path.strip_prefix('/'), is_path: true, depth: 0 };
            Node::walk(node, &request, of.as_deref(), way, &mut found);
        };
        for (name, node) in &self.exact {
            walk(node, Some(name.to_string()), **name == *host);
        }
        for (suffix, node) in &self.wildcard {
            walk(node, Some(format!("*{suffix}")), host.match_indices('.').any(|(dot, _)| host[dot..] == **suffix));
        }
        walk(&self.any, None, true);
        found
    }
}

impl<T> Node<T> {
    fn walk<'t>(
        node: &'t Node<T>,
        request: &Request<'_>,
        host: Option<&str>,
        way: Way<'_>,
        found: &mut Vec<Candidate<'t, T>>,
    ) {
        let mut add = |entries: &'t [Entry<T>], is_path| {
            let way = Way { is_path: way.is_path && is_path, ..way };
            found.extend(entries.iter().map(|entry| Candidate {
                target: &entry.target,
                host: host.map(str::to_owned),
                methods: &entry.methods,
                headers: &entry.headers,
                missed: entry.missed(request, way),
                depth: way.depth,
            }));
        };
        add(&node.here, way.remaining.is_none());
        add(&node.rest, way.remaining.is_some());
        let (segment, next) = match way.remaining.map(|remaining| remaining.split_once('/').ok_or(remaining)) {
            Some(Ok((segment, next))) => (Some(segment), Some(next)),
            Some(Err(last)) => (Some(last), None),
            None => (None, None),
        };
        let step = |fits: bool| {
            let is_path = way.is_path && fits;
            Way { remaining: next, is_path, depth: way.depth + usize::from(is_path), ..way }
        };
        for (literal, child) in &node.literals {
            Node::walk(child, request, host, step(segment == Some(&**literal)), found);
        }
        if let Some(child) = node.parameter.as_deref() {
            Node::walk(child, request, host, step(segment.is_some_and(|segment| !segment.is_empty())), found);
        }
    }
}

impl<T> Entry<T> {
    fn missed(&self, request: &Request<'_>, way: Way<'_>) -> Option<Missed<'_>> {
        if !way.is_host {
            return Some(Missed::Host);
        }
        if !way.is_path {
            return Some(Missed::Path);
        }
        if !self.serves(request.method) {
            return Some(Missed::Method);
        }
        self.lacking(request.headers).map(Missed::Header)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Pattern;
    use super::*;

    #[test]
    fn the_first_criterion_that_fails_is_named() {
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
            let (methods, headers) = (methods.to_vec(), headers.to_vec());
            let pattern = Pattern { host: host.map(str::to_owned), path: path.parse().unwrap(), methods, headers };
            table.insert(pattern, index).unwrap();
        }
        let mut found = table.candidates("a.test", "/v1/users/7", &Method::GET, &HeaderMap::new());
        found.sort_by_key(|candidate| *candidate.target);
        let missed: Vec<_> = found.iter().map(|candidate| candidate.missed).collect();
        let (host, path) = (Some(Missed::Host), Some(Missed::Path));
        let header = Some(Missed::Header(&version));
        assert_eq!(missed, [None, host, Some(Missed::Method), header, path, path, path, None, path]);
        found.sort_by_key(|candidate| (candidate.distance(), *candidate.target));
        let nearest: Vec<_> = found.iter().map(|candidate| *candidate.target).collect();
        assert_eq!(nearest, [0, 7, 3, 2, 6, 8, 4, 5, 1]);
    }
}
