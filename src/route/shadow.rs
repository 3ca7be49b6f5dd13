//! Routes of which another one takes what they were written for.

use http::Method;

use super::{Node, RouteEntry, RouteTable};

/// A route, the one that comes before it, and the methods that it loses to it.
type UnreachableRoute<'t, T> = (&'t T, &'t T, &'t [Method]);

impl<T> RouteTable<T> {
    /// Routes for certain headers that a route for all or fewer of these headers comes before, as it lists methods.
    ///
    /// No route is overtaken in any other way: what is more specific leaves requests to what is less.
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
    /// Whether all requests of a route without methods that have one of these methods come here.
    fn precedes(&self, late: &RouteEntry<T>) -> bool {
        !self.methods.is_empty() && self.headers.iter().all(|wanted| late.headers.contains(wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RouteMatch, RouteTable};

    #[test]
    fn a_list_of_methods_comes_before_headers() {
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
                // And that is what the table does.
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
