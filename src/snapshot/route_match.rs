//! Compiles the matching rules of a route: hosts, listeners, path, methods, and conditions on headers, query parameters
//! and the body.

use std::ops::Range;

use crate::config;
use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::spanned::{Spanned, Text};
use crate::config::tables::ValueRule;
use crate::http::target::{PathPolicy, canonical_path};
use crate::routing::RouteMatch;
use crate::routing::condition::{Condition, ConditionSource, Expression, ExpressionError, ValueTest};
use crate::routing::pattern;
use crate::routing::pattern::PathPattern;
use crate::snapshot::identities::json_pointer;
use crate::snapshot::validator::Validator;

/// How to handle requests whose path differs from the path of the route only in the trailing slash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrailingSlash {
    /// The route does not match such requests.
    Strict,
    /// The route also matches such requests.
    Same,
    /// The gateway redirects such requests to the path of the route.
    Redirect,
}

/// Compile the matching rules of a route, and its `trailing_slash`.
pub(super) fn route_match(
    route: &config::tables::Route,
    span: &Range<usize>,
    listeners: &[Spanned<gateway::Listener>],
    reader: &mut Validator<'_>,
) -> Option<(RouteMatch, TrailingSlash)> {
    let hosts = route.hosts.as_deref().map_or_else(Vec::new, |hosts| reader.hosts(hosts, span));
    let listeners =
        route.listeners.as_deref().map_or_else(Vec::new, |names| listener_indices(names, span, listeners, reader));
    let path = path(route, span, reader);
    let methods = reader.methods(route.methods.as_deref(), span);
    let conditions = conditions(route, reader);
    let trailing_slash = trailing_slash(route, path.as_ref(), reader);
    Some((RouteMatch { hosts, path: path?, methods, listeners, conditions }, trailing_slash))
}

/// Return the indices of the listeners with these names. In a valid configuration, the compiled listeners have the same
/// indices.
fn listener_indices(
    names: &[Text],
    span: &Range<usize>,
    listeners: &[Spanned<gateway::Listener>],
    reader: &mut Validator<'_>,
) -> Vec<usize> {
    if names.is_empty() {
        let issue = Issue::new(span.clone(), "`listeners` is empty: no request would match");
        reader.push_issue(issue.with_hint("remove `listeners` to serve all listeners"));
    }
    fn name_of(listener: &Spanned<gateway::Listener>) -> Option<&str> {
        listener.get_ref().name.as_ref().map(|name| name.get_ref().as_str())
    }
    let mut indices = Vec::new();
    for text in names {
        match listeners.iter().position(|listener| name_of(listener) == Some(text.get_ref().as_str())) {
            Some(index) if indices.contains(&index) => {
                let issue = Issue::new(text.span(), format!("the route has the listener `{}` twice", text.get_ref()));
                reader.push_issue(issue.with_hint("remove one of them"));
            }
            Some(index) => indices.push(index),
            None if listeners.iter().all(|listener| name_of(listener).is_none()) => {
                let issue = Issue::new(text.span(), format!("unknown listener `{}`", text.get_ref()));
                reader.push_issue(
                    issue.with_hint(format!("no [[listener]] has a name; add name = \"{}\"", text.get_ref())),
                );
            }
            None => {
                reader.unknown_name(text.span(), "listener", text.get_ref(), listeners.iter().filter_map(name_of));
            }
        }
    }
    indices
}

/// Compile `path` or `path_regex`.
fn path(route: &config::tables::Route, span: &Range<usize>, reader: &mut Validator<'_>) -> Option<PathPattern> {
    let Some(expression) = &route.path_regex else {
        let text = reader.required(route.path.as_ref(), span, "path", "\"/v1/{*rest}\"")?;
        return segments(text, reader);
    };
    if route.path.is_some() {
        let issue = Issue::new(expression.span(), "`path` and `path_regex` cannot be combined");
        reader.push_issue(issue.with_hint("keep one of them"));
    }
    match PathPattern::from_regex(expression.get_ref()) {
        Ok(pattern) => {
            let text = expression.get_ref();
            // Every path starts with a slash. Report an expression that cannot match a slash at the start: its first
            // character is a letter or digit that no quantifier makes optional.
            let is_plain = |character: char| character.is_ascii_alphanumeric() || matches!(character, '/' | '-' | '_');
            let is_relative = text.starts_with(|first: char| first.is_ascii_alphanumeric())
                && text.chars().nth(1).is_none_or(is_plain);
            if is_relative && !text.contains('|') {
                let issue = Issue::new(expression.span(), "this expression matches no path: a path starts with `/`");
                reader.push_issue(issue.with_hint(format!("path_regex = '/{text}'")));
            }
            Some(pattern)
        }
        Err(error) => {
            reader.push_issue(expression_issue(expression, &error, "path_regex = '/v[0-9]+/(?<name>[^/]+)'"));
            None
        }
    }
}

fn expression_issue(text: &Text, error: &ExpressionError, example: &str) -> Issue {
    let hint = match error {
        ExpressionError::TooLong | ExpressionError::TooLarge => "use smaller repetitions, or several routes".to_owned(),
        ExpressionError::Empty | ExpressionError::Syntax(_) => {
            format!("write an expression such as {example}, without look-around and backreferences")
        }
    };
    Issue::new(text.span(), error.to_string()).with_hint(hint)
}

/// Compile `path` as a pattern.
fn segments(text: &Text, reader: &mut Validator<'_>) -> Option<PathPattern> {
    match text.get_ref().parse::<PathPattern>() {
        Ok(pattern) => {
            // Remove the braces of the pattern. Compare the rest with its canonical form, because the paths of requests
            // are canonical.
            let plain = text.get_ref().replace(['{', '}'], "");
            match canonical_path(&plain, PathPolicy::Canonical) {
                Ok(same) if same == plain => {}
                Ok(other) => {
                    let issue =
                        Issue::new(text.span(), "requests are matched in canonical form: this path never matches");
                    let hint = foreign_path_hint(text.get_ref());
                    reader.push_issue(issue.with_hint(hint.unwrap_or(format!("its canonical form is \"{other}\""))));
                }
                Err(error) => {
                    let hint = foreign_path_hint(text.get_ref());
                    reader.push_issue(Issue { span: Some(text.span()), message: error.to_string(), hint });
                }
            }
            Some(pattern)
        }
        Err(error) => {
            let hint = foreign_path_hint(text.get_ref());
            let example = || "\"/v1/search\", \"/v1/users/{id}\" or \"/v1/{*rest}\"".to_owned();
            reader.push_issue(Issue::new(text.span(), error.to_string()).with_hint(hint.unwrap_or_else(example)));
            None
        }
    }
}

/// Return the hint for a path that has the syntax of another program. `None` if the meaning of the path is unclear.
pub(crate) fn foreign_path_hint(text: &str) -> Option<String> {
    let path = pattern::suggestion(text);
    if let Some(expression) = nginx_expression(text) {
        let quote = if expression.contains('\\') { '\'' } else { '"' };
        let regex = format!("write path_regex = {quote}{expression}{quote}, which must match the whole path");
        return Some(path.map_or(regex.clone(), |path| format!("{regex}, or path = \"{path}\"")));
    }
    let path = path?;
    Some(format!(
        "write path = \"{path}\": {{id}} is one segment, {{*rest}} the rest of the path; use `path_regex` for a \
         regular expression"
    ))
}

/// Return the regular expression of an nginx location (`~ ^/api`, `~* \.php$`) as an expression that matches the whole
/// path.
fn nginx_expression(text: &str) -> Option<String> {
    let (flags, expression) = match text.strip_prefix("~*") {
        Some(expression) => ("(?i)", expression.trim()),
        None => ("", text.strip_prefix('~')?.trim()),
    };
    let start = if expression.starts_with('^') { "" } else { ".*" };
    let (expression, end) = match expression.strip_suffix('$') {
        Some(expression) => (expression, ""),
        None => (expression, ".*"),
    };
    Some(format!("{flags}{start}{expression}{end}"))
}

/// Compile `trailing_slash`.
fn trailing_slash(
    route: &config::tables::Route,
    path: Option<&PathPattern>,
    reader: &mut Validator<'_>,
) -> TrailingSlash {
    let variants =
        [("strict", TrailingSlash::Strict), ("same", TrailingSlash::Same), ("redirect", TrailingSlash::Redirect)];
    let mode = reader.one_of(route.trailing_slash.as_ref(), TrailingSlash::Strict, &variants);
    if let (Some(text), Some(path)) = (&route.trailing_slash, path)
        && mode != TrailingSlash::Strict
        && path.with_other_slash().is_none()
    {
        let (message, hint) = match path.is_regex() {
            true => ("`trailing_slash` requires `path`", "end the expression with `/?` to match both forms"),
            false => (
                "`trailing_slash` has no effect on this path",
                "remove `trailing_slash`, because every path starts with a slash",
            ),
        };
        reader.push_issue(Issue::new(text.span(), message).with_hint(hint));
    }
    mode
}

/// Compile `match`.
fn conditions(route: &config::tables::Route, reader: &mut Validator<'_>) -> Vec<Condition> {
    let Some(rules) = route.conditions.as_ref().map(|rules| rules.get_ref()) else { return Vec::new() };
    let mut conditions: Vec<Condition> = Vec::new();
    let mut add =
        |name: &str, rule: &Spanned<ValueRule>, source: Option<ConditionSource>, reader: &mut Validator<'_>| {
            let (Some(test), Some(source)) = (value_test(name, rule, source.as_ref(), reader), source) else { return };
            if conditions.iter().any(|other| other.source == source) {
                // Header names that differ only in case are the same header.
                let issue = Issue::new(rule.span(), format!("duplicate condition on `{name}`"));
                reader.push_issue(issue.with_hint("a header can have only one condition"));
            }
            conditions.push(Condition { source, test });
        };
    for (name, rule) in &rules.headers {
        let source = reader.routed_header_name(rule.span(), name, "hosts = [\"…\"]").map(ConditionSource::Header);
        add(name, rule, source, reader);
    }
    for (name, rule) in &rules.query {
        if name.is_empty() {
            reader.push_issue(Issue::new(rule.span(), "the name of a query parameter is empty"));
        }
        add(name, rule, Some(ConditionSource::Query(name.as_str().into())), reader);
    }
    for (pointer, rule) in &rules.json {
        let source = json_pointer(pointer, rule.span(), reader).map(ConditionSource::Json);
        add(pointer, rule, source, reader);
    }
    conditions
}

/// Compile a condition. It must have exactly one key.
fn value_test(
    name: &str,
    rule: &Spanned<ValueRule>,
    source: Option<&ConditionSource>,
    reader: &mut Validator<'_>,
) -> Option<ValueTest> {
    let ValueRule { exact, prefix, regex, present, absent } = rule.get_ref();
    let keys = [exact.is_some(), prefix.is_some(), regex.is_some(), present.is_some(), absent.is_some()];
    if keys.into_iter().filter(|is_set| *is_set).count() != 1 {
        let message = format!("the condition on `{name}` must have exactly one key");
        let hint = "write one of exact = \"…\", prefix = \"…\", regex = '…', present = true or absent = true";
        reader.push_missing(Issue::new(rule.span(), message).with_hint(hint));
        return None;
    }
    for (flag, key, other) in [(present, "present", "absent"), (absent, "absent", "present")] {
        if let Some(flag) = flag.as_ref().filter(|flag| !*flag.get_ref()) {
            let issue = Issue::new(flag.span(), format!("`{key}` is always true"));
            reader.push_issue(issue.with_hint(format!("write {other} = true")));
        }
    }
    if let Some(text) = regex {
        let example = "regex = 'v[0-9]+'";
        let expression = Expression::new(text.get_ref());
        return expression
            .map_err(|error| reader.push_issue(expression_issue(text, &error, example)))
            .map(ValueTest::Regex)
            .ok();
    }
    if let Some(text) = prefix.as_ref().filter(|text| text.get_ref().is_empty()) {
        let issue = Issue::new(text.span(), "every value begins with the empty prefix");
        reader.push_issue(issue.with_hint("write present = true"));
    }
    let text = exact.as_ref().or(prefix.as_ref());
    if let (Some(text), Some(ConditionSource::Header(_))) = (text, source) {
        reader.header_value(text)?;
    }
    let bytes = |text: &Text| text.get_ref().as_bytes().into();
    let text_test = exact.as_ref().map(|text| ValueTest::Exact(bytes(text)));
    let text_test = text_test.or_else(|| prefix.as_ref().map(|text| ValueTest::Prefix(bytes(text))));
    Some(text_test.unwrap_or(if present.is_some() { ValueTest::Present } else { ValueTest::Absent }))
}
