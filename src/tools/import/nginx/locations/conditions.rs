//! `if` of nginx: the conditions that a route can express, and the routes for what the `if` does.

use http::HeaderName;
use toml::Value;

use crate::routing::condition::Expression;
use crate::tools::import::model::{Relation, Table, quoted};
use crate::tools::import::nginx::Importer;
use crate::tools::import::nginx::locations::actions::Action;
use crate::tools::import::nginx::locations::{Path, Site, pass};
use crate::tools::import::nginx::scope::Scope;
use crate::tools::import::nginx::syntax::Directive;

/// What a request must meet, in the words of `[[route]]`.
#[derive(Debug, Clone, PartialEq)]
enum Condition {
    /// One of these methods.
    Methods(Vec<String>),
    /// One of these tests of a header or a query parameter. Each test has a route of its own.
    Value { source: &'static str, name: String, tests: Vec<Test> },
}

/// A test of a value: a key of `match.headers.NAME` and its value.
#[derive(Debug, Clone, PartialEq)]
enum Test {
    Exact(String),
    Regex(String),
    Absent,
}

/// An `if` and its level.
#[derive(Debug, Clone)]
pub(super) struct Conditional {
    condition: Condition,
    directive: Directive,
    scope: Scope,
}

/// The parts of `if (VARIABLE OPERATOR VALUE)`. The operator is empty if the `if` has only a variable.
struct Parts<'d> {
    variable: &'d str,
    operator: &'d str,
    value: &'d str,
}

impl<'d> Parts<'d> {
    fn of(directive: &'d Directive) -> Option<Self> {
        let mut parts: Vec<&str> = directive.args.iter().map(String::as_str).collect();
        let first = parts.first_mut()?;
        *first = first.strip_prefix('(')?;
        if first.is_empty() {
            parts.remove(0);
        }
        let last = parts.last_mut()?;
        *last = last.strip_suffix(')')?;
        // A quotation mark ends the value, so that the parenthesis is a part of its own.
        if last.is_empty() && parts.len() > 1 {
            parts.pop();
        }
        match parts[..] {
            [variable] => Some(Parts { variable: variable.strip_prefix('$')?, operator: "", value: "" }),
            [variable, operator, value] => Some(Parts { variable: variable.strip_prefix('$')?, operator, value }),
            _ => None,
        }
    }
}

/// Return the host of `if ($host = NAME)`.
pub(super) fn host(directive: &Directive) -> Option<&str> {
    let Parts { variable, operator, value } = Parts::of(directive)?;
    let is_host = matches!(variable, "host" | "http_host") && operator == "=";
    (is_host && !value.is_empty() && !value.contains('$')).then_some(value)
}

/// Return the condition of an `if`.
fn condition(directive: &Directive) -> Option<Condition> {
    let Parts { variable, operator, value } = Parts::of(directive)?;
    if value.contains('$') && !operator.starts_with('~') {
        return None;
    }
    if variable == "request_method" {
        return methods(operator, value).map(Condition::Methods);
    }
    let (source, name) = match variable.split_once('_')? {
        ("http", name) => ("headers", name.replace('_', "-")),
        ("arg", name) => ("query", name.to_owned()),
        _ => return None,
    };
    if source == "headers" && (HeaderName::from_bytes(name.as_bytes()).is_err() || name == "host") {
        return None;
    }
    let tests = match operator {
        "=" if value.is_empty() => vec![Test::Absent, Test::Exact(String::new())],
        "=" => vec![Test::Exact(value.to_owned())],
        // An empty value and `0` are false.
        "" => vec![Test::Regex("(?s)[^0]|..+".to_owned())],
        "!=" if value.is_empty() => vec![Test::Regex("(?s).+".to_owned())],
        "!=" => vec![Test::Absent, Test::Regex(other_than(value))],
        "~" => vec![Test::Regex(format!(".*(?:{value}).*"))],
        "~*" => vec![Test::Regex(format!("(?i).*(?:{value}).*"))],
        _ => return None,
    };
    let is_valid = |test: &Test| match test {
        Test::Regex(expression) => Expression::new(expression).is_ok(),
        Test::Exact(_) | Test::Absent => true,
    };
    // An expression that also finds the empty value applies to requests without the header.
    let finds_nothing = |test: &Test| match test {
        Test::Regex(expression) if operator.starts_with('~') => {
            Expression::new(expression).is_ok_and(|expression| expression.is_match(b""))
        }
        Test::Regex(_) | Test::Exact(_) | Test::Absent => false,
    };
    let is_expressible = tests.iter().all(is_valid) && !tests.iter().any(finds_nothing);
    is_expressible.then_some(Condition::Value { source, name, tests })
}

/// Return the methods of a condition on `$request_method`: one method, or an expression of alternatives.
fn methods(operator: &str, value: &str) -> Option<Vec<String>> {
    let list = match operator {
        "=" => value,
        "~" | "~*" => {
            let whole = value.strip_prefix('^')?.strip_suffix('$')?;
            whole.strip_prefix('(').and_then(|list| list.strip_suffix(')')).unwrap_or(whole)
        }
        _ => return None,
    };
    let methods: Vec<String> = list.split('|').map(str::to_owned).collect();
    let is_method = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase());
    methods.iter().all(is_method).then_some(methods)
}

/// Return an expression for all values but this one: those that end before, differ in, or continue after a character.
fn other_than(value: &str) -> String {
    let mut alternatives = Vec::new();
    for (at, c) in value.char_indices() {
        let before = regex::escape(&value[..at]);
        alternatives.push(before.clone());
        alternatives.push(format!("{before}[^{}].*", regex::escape(&c.to_string())));
    }
    alternatives.push(format!("{}.+", regex::escape(value)));
    format!("(?s){}", alternatives.join("|"))
}

impl Condition {
    /// Return whether no request meets both conditions.
    fn excludes(&self, other: &Condition) -> bool {
        match (self, other) {
            (Condition::Methods(one), Condition::Methods(other)) => one.iter().all(|method| !other.contains(method)),
            // Routes with methods precede routes with other conditions.
            (Condition::Methods(_), Condition::Value { .. }) | (Condition::Value { .. }, Condition::Methods(_)) => true,
            (
                Condition::Value { source, name, tests },
                Condition::Value { source: other_source, name: other_name, tests: other_tests },
            ) => {
                (source, name) == (other_source, other_name)
                    && tests.iter().all(|one| {
                        other_tests.iter().all(|other| match (one, other) {
                            (Test::Exact(one), Test::Exact(other)) => one != other,
                            (Test::Absent, other) | (other, Test::Absent) => *other != Test::Absent,
                            (Test::Regex(_), _) | (_, Test::Regex(_)) => false,
                        })
                    })
            }
        }
    }

    /// Add the tests of another condition on the same value. Return whether this is possible.
    fn add(&mut self, other: &Condition) -> bool {
        match (self, other) {
            (
                Condition::Value { source, name, tests },
                Condition::Value { source: other_source, name: other_name, tests: others },
            ) if (&*source, &*name) == (other_source, other_name) => {
                let [Test::Regex(one)] = &mut tests[..] else { return false };
                let [Test::Regex(other)] = &others[..] else { return false };
                *one = format!("(?:{one})|(?:{other})");
                true
            }
            (Condition::Methods(one), Condition::Methods(other)) => {
                one.extend(other.iter().cloned());
                one.sort_unstable();
                one.dedup();
                true
            }
            (Condition::Methods(_) | Condition::Value { .. }, _) => false,
        }
    }

    /// Write the condition into a route for each test.
    fn write(&self, route: &Table) -> Vec<Table> {
        let mut routes = Vec::new();
        match self {
            Condition::Methods(methods) => {
                let mut route = route.clone();
                route.set_list("methods", methods.iter().cloned());
                routes.push(route);
            }
            Condition::Value { source, name, tests } => {
                for test in tests {
                    let (key, value) = match test {
                        Test::Exact(value) => ("exact", Value::from(value.as_str())),
                        Test::Regex(value) => ("regex", Value::from(value.as_str())),
                        Test::Absent => ("absent", Value::from(true)),
                    };
                    let test = toml::Table::from_iter([(key.to_owned(), value)]);
                    let values = toml::Table::from_iter([(name.clone(), Value::Table(test))]);
                    let mut route = route.clone();
                    route.set_entry("match", source, values);
                    routes.push(route);
                }
            }
        }
        routes
    }
}

impl Importer<'_> {
    /// Return the `if` directives of a level that become routes, after those of the level above. Report the others.
    pub(super) fn conditionals(
        &mut self,
        above: &[Conditional],
        level: &[Directive],
        scope: &Scope,
    ) -> Vec<Conditional> {
        let mut all = above.to_vec();
        let rewrite = level.iter().position(|directive| directive.name == "rewrite" && directive.arg(2) == "break");
        let ifs = level.iter().enumerate().filter(|(_, directive)| directive.name == "if" && host(directive).is_none());
        for (index, directive) in ifs {
            let text = quoted(&directive.text());
            // `break` also ends the evaluation of `if`, and a rewrite changes the path for the upstream of the `if`.
            let is_rewritten = rewrite.is_some_and(|at| at < index || pass(directive.children()).is_some());
            let acts = |child: &Directive| matches!(&*child.name, "return" | "proxy_pass" | "grpc_pass");
            let actions = directive.children().iter().filter(|child| acts(child)).count();
            let has_others =
                directive.children().iter().any(|child| matches!(&*child.name, "rewrite" | "set" | "break" | "if"));
            let Some(condition) = condition(directive).filter(|_| actions == 1 && !has_others && !is_rewritten) else {
                let text = format!("`{text}`: the condition or its action is not imported; see `match` of routes");
                self.model.no_equal(&directive.origin, text);
                continue;
            };
            if !matches!(condition, Condition::Methods(_)) {
                self.model.note(
                    Relation::Differs,
                    None,
                    "a condition on a header or a query parameter is not met if there are several values; query \
                     parameters are decoded first",
                );
            }
            if let Condition::Value { name, .. } = &condition
                && name.starts_with("x-forwarded-")
            {
                let text = format!("`{text}`: the header counts only if it comes from `client_ip.trusted_proxies`");
                self.model.differs(&directive.origin, text);
            }
            let block = directive.block.as_deref().unwrap_or_default();
            let same = all.iter_mut().find(|other| {
                let other = other.directive.block.as_deref().unwrap_or_default();
                let texts = |block: &[Directive]| block.iter().map(Directive::text).collect::<Vec<_>>();
                texts(other) == texts(block)
            });
            if let Some(same) = same
                && same.condition.add(&condition)
            {
                continue;
            }
            if all.iter().any(|other| !other.condition.excludes(&condition)) {
                let text = format!("`{text}`: a request may also meet an earlier condition; write a route with both");
                self.model.no_equal(&directive.origin, text);
                continue;
            }
            let scope = scope.enter(block, &mut self.model);
            all.push(Conditional { condition, directive: directive.clone(), scope });
        }
        all
    }

    /// Add the routes of the conditions for a path.
    pub(super) fn conditional_routes(&mut self, site: &Site, path: &Path, base: &str, conditionals: &[Conditional]) {
        for Conditional { condition, directive, scope } in conditionals {
            let mut route = Table::from_origin(&directive.origin, &directive.text());
            site.write(&mut route);
            path.write(&mut route);
            let found = directive.children().iter().find(|child| child.name == "return");
            match (found, pass(directive.children())) {
                (Some(found), _) => {
                    let action = self.return_action(site, found);
                    self.reply(&mut route, path, action, scope, &directive.origin);
                }
                (None, Some(pass)) => self.proxy(&mut route, scope, path, &pass, None),
                (None, None) => self.reply(&mut route, path, Action::Unsupported, scope, &directive.origin),
            }
            for route in condition.write(&route) {
                self.model.add_route(&format!("{base} if"), route);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expression_of_other_values_finds_all_but_one() {
        let other = Expression::new(&other_than("ht.t]")).unwrap();
        for value in ["", "h", "ht.t", "ht.t]]", "ht.t]\n", "htxt]", "HT.T]", "xht.t]", "ht.tx", "é"] {
            assert!(other.is_match(value.as_bytes()), "{value:?}");
        }
        assert!(!other.is_match(b"ht.t]"));
    }
}
