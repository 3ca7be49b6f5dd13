//! Canaries of ingress-nginx: a second Service for the host and path of another Ingress.

use toml::Value;

use crate::routing::condition::Expression;
use crate::tools::import::document::Document;
use crate::tools::import::kubernetes::annotations::{Annotations, Settings};
use crate::tools::import::kubernetes::{Importer, IngressPath, path_key};
use crate::tools::import::model::{Relation, Table, quoted};

/// Weights of ingress-nginx are parts of 100 by default. Smaller totals have no effect.
const DEFAULT_TOTAL: i64 = 100;

/// Which requests the canary gets. ingress-nginx tests the header first, then the cookie, then the weight.
#[derive(Debug, Default)]
pub(super) struct Canary {
    header: Option<String>,
    /// A test of the header: a key of `match.headers.NAME` and its value. Without it, `always` and `never` decide.
    header_test: Option<(&'static str, String)>,
    cookie: Option<String>,
    weight: i64,
    total: i64,
}

impl Canary {
    /// Read the annotations of a canary.
    pub(super) fn read(annotations: &mut Annotations<'_>) -> Canary {
        let header = annotations.take("canary-by-header").map(str::to_ascii_lowercase);
        let value = annotations.take("canary-by-header-value").filter(|value| !value.is_empty());
        let pattern = annotations.take("canary-by-header-pattern").filter(|pattern| !pattern.is_empty());
        let header_test = match (value, pattern) {
            (Some(value), _) => Some(("exact", value.to_owned())),
            (None, Some(pattern)) => Some(("regex", format!(".*(?:{pattern}).*"))),
            (None, None) => None,
        };
        let cookie = annotations.take("canary-by-cookie").map(str::to_owned);
        let weight = annotations.number("canary-weight").unwrap_or(0);
        let total = annotations.number("canary-weight-total").unwrap_or(DEFAULT_TOTAL).max(DEFAULT_TOTAL);
        Canary { header, header_test, cookie, weight: weight.min(total), total }
    }

    /// Return whether each of the tests can be written.
    fn is_expressible(&self) -> bool {
        let is_header = |name: &String| http::HeaderName::from_bytes(name.as_bytes()).is_ok();
        let is_test = |(key, value): &(&str, String)| *key == "exact" || Expression::new(value).is_ok();
        self.header.iter().all(is_header) && self.header_test.iter().all(is_test)
    }
}

impl Importer {
    /// Add the routes of a canary beside the route of the same host and path.
    pub(super) fn canary_routes(
        &mut self,
        document: &Document,
        path: &IngressPath<'_>,
        settings: &Settings,
        canary: &Canary,
    ) {
        let origin = document.at(path.backend);
        let text = format!("the canary of `{}{}`", quoted(path.host), quoted(path.path));
        let Some(main) = self.mains.get_mut(&path_key(path)) else {
            return self.model.no_equal(&origin, format!("{text}: no Ingress has this host and path"));
        };
        if std::mem::replace(&mut main.has_canary, true) {
            return self.model.no_equal(&origin, format!("{text}: the path has another canary"));
        }
        let (name, upstream) = (main.route.clone(), main.upstream.clone());
        let route = self.model.routes.get(&name).cloned().unwrap_or_default();
        let stable = route.text("upstream").map(str::to_owned);
        let (Some(stable), true) = (stable, canary.is_expressible()) else {
            return self.model.no_equal(&origin, format!("{text}: write a route with `match`"));
        };
        let settings = Settings { upstream, is_https: settings.is_https, ..Settings::default() };
        let Some(canary_upstream) = self.upstream(document, path.backend, &settings) else { return };
        let test = |key: &str, value: Value| Value::Table(toml::Table::from_iter([(key.to_owned(), value)]));
        let mut tests: Vec<(toml::Table, bool)> = Vec::new();
        let has_weight = canary.weight > 0;
        if let Some(header) = &canary.header {
            let mut push = |condition, is_canary| {
                tests.push((toml::Table::from_iter([(header.clone(), condition)]), is_canary));
            };
            match &canary.header_test {
                Some((key, value)) => push(test(key, value.as_str().into()), true),
                None => {
                    push(test("exact", "always".into()), true);
                    if has_weight || canary.cookie.is_some() {
                        push(test("exact", "never".into()), false);
                    }
                }
            }
        }
        if let Some(cookie) = &canary.cookie {
            let expression = format!(r"(?:.*;\s*)?(?i:{})=always(?:\s*;.*)?", regex::escape(cookie));
            let mut conditions = toml::Table::from_iter([("cookie".to_owned(), test("regex", expression.into()))]);
            if let Some(header) = &canary.header {
                conditions.insert(header.clone(), test("absent", true.into()));
                let text = "if a request has the header of a canary with another value, ingress-nginx looks at the cookie; \
                            the import looks at the cookie only without the header";
                self.model.note(Relation::Differs, None, text);
            }
            if has_weight {
                let text =
                    format!("{text}: a request with the cookie `{}=never` also follows the weight", quoted(cookie));
                self.model.differs(&origin, text);
            }
            tests.push((conditions, true));
        }
        for (conditions, is_canary) in tests {
            let mut table = Table::from_origin(&origin, &text);
            table.keys.clone_from(&route.keys);
            table.set_entry("match", "headers", conditions);
            table.set("upstream", if is_canary { canary_upstream.as_str() } else { &*stable });
            self.model.add_route(&format!("{name} canary"), table);
        }
        if let Some(main) = self.model.routes.get_mut(&name).filter(|_| has_weight) {
            main.keys.shift_remove("upstream");
            match canary.total - canary.weight {
                0 => main.set("upstream", canary_upstream.as_str()),
                rest => {
                    main.set_entry("upstream", &stable, rest);
                    main.set_entry("upstream", &canary_upstream, canary.weight);
                }
            }
        }
    }
}
