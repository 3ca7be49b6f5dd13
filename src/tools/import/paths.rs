//! Paths and regular expressions of other programs.

use crate::http::target::{PathPolicy, canonical_path};

/// Return a path in canonical form, in which routes are compared. A path without such a form is encoded, so that no
/// request matches it.
pub(super) fn literal(path: &str) -> String {
    // Braces would begin a parameter of the path.
    let path = path.replace('{', "%7B").replace('}', "%7D").replace('*', "%2A");
    match canonical_path(&path, PathPolicy::Canonical) {
        Ok(canonical) => canonical.replace('*', "%2A"),
        Err(_) => percent_encoding::utf8_percent_encode(&path, percent_encoding::NON_ALPHANUMERIC)
            .to_string()
            .replace("%2F", "/"),
    }
}

/// Return an expression that matches a whole path if `expression` matches a part of it. Its groups are named `g1`, …
pub(super) fn whole_expression(expression: &str) -> String {
    let named = named_groups(expression);
    if has_alternatives(&named) {
        return format!(".*(?:{named}).*");
    }
    let (start, rest) = named.strip_prefix('^').map_or((".*", &*named), |rest| ("", rest));
    let is_anchored = rest.ends_with('$') && !rest.ends_with("\\$");
    let (rest, end) = if is_anchored { (&rest[..rest.len() - 1], "") } else { (rest, ".*") };
    // `(.*)` at the end needs nothing after it.
    let end = if rest.ends_with(".*)") || rest.ends_with(".*") { "" } else { end };
    format!("{start}{rest}{end}")
}

/// Return whether an expression has `|` outside of groups.
fn has_alternatives(expression: &str) -> bool {
    let mut depth = 0_i32;
    let mut characters = expression.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' => drop(characters.next()),
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 0 => return true,
            _ => {}
        }
    }
    false
}

/// Return a text in which `$1` is `{g1}`, if the route has groups.
pub(super) fn with_groups(text: &str, has_groups: bool) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        result.push_str(before);
        match after.chars().next().filter(|c| c.is_ascii_digit() && has_groups) {
            Some(digit) => {
                result.push_str(&format!("{{g{digit}}}"));
                rest = &after[1..];
            }
            None => {
                result.push('$');
                rest = after;
            }
        }
    }
    result.push_str(rest);
    result
}

/// Name the groups of an expression: `(` becomes `(?<g1>`, …
fn named_groups(expression: &str) -> String {
    let mut named = String::new();
    let mut number = 0;
    let mut in_class = false;
    let mut characters = expression.chars().peekable();
    while let Some(c) = characters.next() {
        named.push(c);
        match c {
            '\\' => named.extend(characters.next()),
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class && characters.peek() != Some(&'?') => {
                number += 1;
                named.push_str(&format!("?<g{number}>"));
            }
            _ => {}
        }
    }
    named
}

/// Return an expression that matches the paths whose beginning `expression` matches.
pub(super) fn prefix_expression(expression: &str) -> String {
    whole_expression(&format!("^{}", expression.trim_start_matches('^')))
}
