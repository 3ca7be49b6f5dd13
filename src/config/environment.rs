//! Substitution of environment variables in the values of a configuration, and issues of these values.

use std::ffi::OsString;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::config::error::Issue;
use crate::config::secrets::{is_secret, secret_ranges};
use crate::config::syntax::invisible_name;
use crate::config::value_path::contains;
use crate::config::value_types::list_items;

/// Return the value of an environment variable, or `None` if it is not set.
pub type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// A value whose environment variable is not set or has no closing brace. A placeholder replaces a variable that is not
/// set.
#[derive(Debug)]
pub struct UnresolvedValue {
    /// Path of the value: the keys that lead to it, joined by dots.
    pub(super) key: String,
    /// Whether `${` has no closing `}`.
    pub(super) is_malformed: bool,
    pub(super) issue: Issue,
}

impl UnresolvedValue {
    /// Return whether this span contains the value.
    pub(crate) fn is_within(&self, span: &Range<usize>) -> bool {
        self.issue.span.as_ref().is_some_and(|value| contains(span, value))
    }
}

/// Return `text` with its environment variables substituted, or `None` if a variable is not set.
pub(crate) fn substituted(text: &str, environment: EnvLookup<'_>) -> Option<String> {
    let mut environment = Environment::new(environment);
    let text = environment.expand(text, &[], &(0..0));
    environment.unresolved.is_empty().then_some(text)
}

/// Substitutes environment variables, and collects the variables that are not set.
pub(super) struct Environment<'a> {
    variable: EnvLookup<'a>,
    pub(super) unresolved: Vec<UnresolvedValue>,
    pub(super) warnings: Vec<Issue>,
    /// The spans of strings with variables, and their values after the substitution.
    pub(super) expanded: Vec<(Range<usize>, String)>,
}

impl<'a> Environment<'a> {
    pub(super) fn new(variable: EnvLookup<'a>) -> Self {
        Environment { variable, unresolved: Vec::new(), warnings: Vec::new(), expanded: Vec::new() }
    }

    pub(super) fn substitute_table(&mut self, table: &mut DeTable<'_>, path: &mut Vec<String>) {
        for (key, value) in table.iter_mut() {
            path.push(key.get_ref().to_string());
            self.substitute(value, path);
            path.pop();
        }
    }

    /// Replace `${NAME}` and `${NAME:-default}` in every string. `$${` stands for a literal `${`. Variables are
    /// substituted after parsing, so that a value cannot become TOML syntax.
    fn substitute(&mut self, value: &mut Spanned<DeValue<'_>>, path: &mut Vec<String>) {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) => {
                self.warnings.extend(variable_without_braces(text, path, &span));
                if path.last().is_none_or(|key| key != "body") {
                    self.warnings.extend(invisible_character(text, &span));
                }
                if text.contains("${") {
                    *text = self.expand(text, path, &span).into();
                    self.expanded.push((span, text.to_string()));
                }
            }
            DeValue::Array(items) => {
                let substituted = std::mem::replace(items, DeArray::new())
                    .into_iter()
                    .flat_map(|item| self.substitute_item(item, path));
                *items = substituted.collect();
            }
            DeValue::Table(table) => self.substitute_table(table, path),
            _ => {}
        }
    }

    /// Substitute variables in the item of a list. An item that consists of a variable may become several items.
    fn substitute_item<'t>(
        &mut self,
        mut item: Spanned<DeValue<'t>>,
        path: &mut Vec<String>,
    ) -> Vec<Spanned<DeValue<'t>>> {
        let written = item.get_ref().as_str().filter(|text| text.contains("${")).map(str::to_owned);
        self.substitute(&mut item, path);
        let (Some(written), Some(text)) = (written, item.get_ref().as_str()) else { return vec![item] };
        let span = item.span();
        let part = |part: &str| Spanned::new(span.clone(), DeValue::String(part.to_owned().into()));
        list_items(&written, text, path).into_iter().map(part).collect()
    }

    fn expand(&mut self, text: &str, path: &[String], span: &Range<usize>) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            if let Some(before) = before.strip_suffix('$') {
                out.push_str(before);
                out.push_str("${");
                rest = after;
                continue;
            }
            out.push_str(before);
            let Some((expression, behind)) = after.split_once('}') else {
                let issue = Issue::new(span.clone(), "`${` without `}`");
                self.unresolved.push(UnresolvedValue { key: path.join("."), is_malformed: true, issue });
                return text.to_owned();
            };
            let (name, default) = match expression.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (expression, None),
            };
            let found = (self.variable)(name).filter(|value| !value.is_empty() || default.is_none());
            match (found.map(OsString::into_string), default) {
                // In a header rule, `{…}` is a variable of the request. Escape the braces, so that the value is used
                // literally.
                (Some(Ok(found)), _) if is_template(path) => {
                    out.push_str(&found.replace('{', "{{").replace('}', "}}"));
                }
                (Some(Ok(found)), _) => out.push_str(&found),
                (None, Some(default)) => out.push_str(default),
                (found, _) => {
                    // Number the placeholders, so that two of them are never reported as duplicates.
                    out.push_str(&format!("unset{}", self.unresolved.len()));
                    let is_secret = is_secret_text(path, text);
                    let issue = match found {
                        Some(_) => {
                            Issue::new(span.clone(), format!("environment variable `{name}` is not valid UTF-8"))
                                .with_hint("set the variable to text in UTF-8")
                        }
                        None => unset_variable(name, is_secret, span),
                    };
                    let is_malformed = !is_variable_name(name);
                    self.unresolved.push(UnresolvedValue { key: path.join("."), is_malformed, issue });
                }
            }
            rest = behind;
        }
        out.push_str(rest);
        out
    }
}

/// Return the issue for a variable that is not set, or whose expression is not valid.
fn unset_variable(expression: &str, is_secret: bool, span: &Range<usize>) -> Issue {
    if is_variable_name(expression) {
        return Issue::new(span.clone(), format!("environment variable `{expression}` is not set"))
            .with_hint(format!("set the variable, or give a default: ${{{expression}:-value}}"));
    }
    let end = expression.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(expression.len());
    let (name, rest) = expression.split_at(end);
    if !is_variable_name(name) {
        return Issue::new(span.clone(), "`${…}` does not contain the name of an environment variable")
            .with_hint("write ${NAME}, or ${NAME:-default}; $${ is a literal ${");
    }
    let default = rest.trim_start_matches([':', '-', '=', '?', '+', '|', ' ']);
    let default = if is_secret || default.is_empty() { "value" } else { default };
    Issue::new(span.clone(), format!("a default of the environment variable `{name}` follows `:-`"))
        .with_hint(format!("write ${{{name}:-{default}}}"))
}

fn is_variable_name(text: &str) -> bool {
    let is_word = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_word && !text.is_empty() && !text.starts_with(|c: char| c.is_ascii_digit())
}

/// Return whether a value, or a part of it, is a secret.
fn is_secret_text(path: &[String], text: &str) -> bool {
    let keys: Vec<_> = path.iter().map(String::as_str).collect();
    is_secret(&keys, text) || !secret_ranges(text).is_empty()
}

/// Return a warning if the text contains an invisible character, such as a no-break space. Response bodies may contain
/// any character.
fn invisible_character(text: &str, span: &Range<usize>) -> Option<Issue> {
    let (character, name) = text.chars().find_map(|character| Some((character, invisible_name(character)?)))?;
    let message = format!("the value contains the invisible character U+{:04X} ({name})", u32::from(character));
    Some(Issue::new(span.clone(), message).with_hint("remove the character, or replace it with a space"))
}

/// Return whether `{…}` in the value at this path is a variable of the request.
fn is_template(path: &[String]) -> bool {
    matches!(path, [.., rules, set, _] if set == "set" && matches!(&**rules, "request_headers" | "response_headers"))
}

/// Return a warning if the text contains `$NAME`, which is not substituted. Regular expressions and response bodies may
/// contain `$NAME`.
fn variable_without_braces(text: &str, path: &[String], span: &Range<usize>) -> Option<Issue> {
    const REGEX_SIGNS: [&str; 6] = ["^", "\\", "(", "[^", ".*", ".+"];
    if path.last().is_some_and(|key| key == "body") || REGEX_SIGNS.iter().any(|signs| text.contains(signs)) {
        return None;
    }
    let name = text.match_indices('$').find_map(|(at, _)| {
        let after = &text[at + 1..];
        let end =
            after.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_').unwrap_or(after.len());
        let (name, rest) = after.split_at(end);
        let is_name = name.len() > 1 && !name.starts_with(|c: char| c.is_ascii_digit());
        let is_word = !rest.starts_with(|c: char| c.is_alphanumeric())
            && !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '$');
        (is_name && is_word).then_some(name)
    })?;
    // Do not quote the name, because the text may be a password that contains `$`.
    let name = if is_secret_text(path, text) { "NAME" } else { name };
    let issue = Issue::new(
        span.clone(),
        "`$` without braces is literal text: only `${NAME}` is replaced with an environment variable",
    );
    Some(issue.with_hint(format!("write ${{{name}}} for the environment variable")))
}
