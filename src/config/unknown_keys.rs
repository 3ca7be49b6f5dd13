//! Unknown keys: suggestions for each key, and the errors that the keys cause.

use std::collections::HashSet;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::error::Issue;
use crate::config::file_schema::{FileKind, has_entries};
use crate::config::sources::Sources;
use crate::config::value_path::{contains, extent, value_at};

/// The unknown keys of a file. An unknown key may cause further errors. For example, if it is a misspelling, the key
/// that the operator meant is missing.
#[derive(Debug, Default)]
pub struct UnknownKeys {
    /// Spans of the values of misspelled keys, and of all nested values. A misspelled key is an unknown key that is
    /// similar to a known key. Its value is validated as the value of the known key. Errors in this value are not
    /// reported until the operator corrects the key, because the report recognizes secrets by the names of their keys.
    misspelled: Vec<Range<usize>>,
    /// Ranges of the entries (such as routes) that contain an unknown key without a similar known key.
    entries: Vec<Range<usize>>,
    /// Whether the file contains an unknown key without a similar known key.
    has_unknown: bool,
    /// The names that unknown tables define, such as `api` in `[backend.api]`.
    names: HashSet<String>,
}

impl UnknownKeys {
    /// Return whether all unknown keys are misspellings of known keys.
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_unknown
    }

    /// Return whether the table at this span is in an entry with an unknown key that is not a misspelling.
    pub(crate) fn are_in(&self, table: &Range<usize>) -> bool {
        self.entries.iter().any(|entry| contains(entry, table))
    }

    /// Return whether an issue may have been caused by an unknown key in the same entry.
    pub(crate) fn may_be_missing_in(&self, issue: &Issue) -> bool {
        issue.span.as_ref().is_some_and(|span| self.are_in(span))
    }

    /// Return whether an issue is about the value of a misspelled key.
    pub(crate) fn hide(&self, issue: &Issue) -> bool {
        issue.span.as_ref().is_some_and(|span| self.misspelled.iter().any(|outer| contains(outer, span)))
    }

    /// Return whether an unknown table defines this name.
    pub(crate) fn define(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    pub(super) fn record_misspelled(&mut self, value: &Spanned<DeValue<'_>>) {
        self.misspelled.push(value.span());
        match value.get_ref() {
            DeValue::Table(table) => table.iter().for_each(|(_, value)| self.record_misspelled(value)),
            DeValue::Array(items) => items.iter().for_each(|item| self.record_misspelled(item)),
            _ => {}
        }
    }

    /// Record a value that was removed because of its type. Its key may then be missing.
    pub(super) fn record_removed(&mut self, all: &DeTable<'_>, path: &[String]) {
        match path {
            [_] | [_, _] => self.record_unknown(all, path),
            _ => {
                let entry = path.get(..entry_length(path)).unwrap_or(path);
                self.entries.extend(value_at(all, entry).map(extent));
            }
        }
    }

    /// Record an unknown key without a similar known key.
    pub(super) fn record_unknown(&mut self, all: &DeTable<'_>, path: &[String]) {
        self.has_unknown = true;
        let Some((_, parents)) = path.split_last() else { return };
        let entry = parents.get(..entry_length(parents)).unwrap_or(parents);
        self.entries.extend(value_at(all, entry).map(extent));
        if parents.is_empty() {
            let table = value_at(all, path).and_then(|value| value.get_ref().as_table());
            self.names.extend(table.into_iter().flatten().map(|(name, _)| name.get_ref().to_string()));
        }
    }
}

/// Return the number of segments of a path that lead to its entry.
fn entry_length(path: &[String]) -> usize {
    if path.first().is_some_and(|table| has_entries(table)) { 2 } else { 1 }
}

/// Keys that are planned but not implemented, by table. The gateway rejects them as "not supported yet" instead of
/// "unknown".
const UNSUPPORTED_KEYS: &[(&str, &[&str])] = &[("listener", &["http3"]), ("auth", &["query"])];

/// Return the message and the hint for a top-level table that must be an `[auth.NAME]` table instead. The hint shows
/// the values of the file in the correct form.
pub(super) fn replaced_table(table: &str, file: &DeTable<'_>, sources: &Sources) -> Option<(String, Option<String>)> {
    let (provider, kind) = match table {
        "api_key" => ("keys", "api-key"),
        "jwt" => ("tokens", "jwt"),
        _ => return None,
    };
    let mut hint = format!("write\n[auth.{provider}]\nkind = \"{kind}\"");
    let (_, values) = file.iter().find(|(key, _)| key.get_ref() == table)?;
    let known = FileKind::Gateway.keys(&["auth", provider]);
    for (key, value) in values.get_ref().as_table().into_iter().flatten() {
        if known.contains(&&**key.get_ref()) {
            hint += &format!("\n{} = {}", key.get_ref(), sources.text_at(&value.span()).unwrap_or("…"));
        }
    }
    hint += &format!(
        "\nand identify = [\"{provider}\"] on each route with a limit by {kind}, or require = [\"{provider}\"]"
    );
    Some((format!("the table `[{table}]` must be written as a provider, `[auth.NAME]`"), Some(hint)))
}

/// Return the message and the hint for a route key that has another name and form in Sluicegate. The hint shows the
/// file's value in the correct form.
pub(super) fn replaced_route_key(
    path: &[String],
    table: &DeTable<'_>,
    sources: &Sources,
) -> Option<(String, Option<String>)> {
    let [first, index, key] = path else { return None };
    let route = table.get(first.as_str()).filter(|_| first == "route")?.get_ref().as_array()?;
    let value = route.get(index.parse::<usize>().ok()?)?.get_ref().as_table()?.get(key.as_str())?;
    let written = |value: &Spanned<DeValue<'_>>| sources.text_at(&value.span()).unwrap_or("\"…\"").trim().to_owned();
    let hint = match (key.as_str(), value.get_ref()) {
        ("host", DeValue::String(policy)) if matches!(&**policy, "server" | "client") => {
            format!("write upstream_host = {}", written(value))
        }
        ("host", DeValue::Array(_)) => format!("write hosts = {}", written(value)),
        ("host", _) => format!("write hosts = [{}]", written(value)),
        ("headers", DeValue::Table(headers)) => {
            let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let rule = |(name, value): (&Spanned<std::borrow::Cow<'_, str>>, &Spanned<DeValue<'_>>)| {
                let name = name.get_ref();
                let name = if name.chars().all(is_bare) { name.to_string() } else { format!("\"{name}\"") };
                format!("{name} = {{ exact = {} }}", written(value))
            };
            let rules: Vec<_> = headers.iter().map(rule).collect();
            format!("write match = {{ headers = {{ {} }} }}", rules.join(", "))
        }
        ("headers", _) => "write match = { headers = { x-version = { exact = \"2\" } } }".to_owned(),
        _ => return None,
    };
    Some((format!("unknown key `{key}`"), Some(hint)))
}

pub(super) fn is_unsupported(path: &[String]) -> bool {
    let [table, _, key] = path else { return false };
    UNSUPPORTED_KEYS.iter().any(|(name, keys)| name == table && keys.contains(&key.as_str()))
}

/// Return the known key that the unknown key at this path probably misspells.
pub(super) fn meant_key(path: &[String], kind: FileKind) -> Option<&'static str> {
    let (key, parents) = path.split_last()?;
    closest_name(key, kind.keys(parents)).filter(|_| !is_unsupported(path))
}

/// Return the hint for an unknown key of a table with these known keys.
pub(super) fn unknown_key_hint(key: &str, known: &[&str]) -> String {
    match closest_name(key, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known keys: {}", known.join(", ")),
    }
}

/// Return the message and the hint for an unknown key.
pub(super) fn unknown_key(path: &[String], kind: FileKind) -> (String, Option<String>) {
    let Some((key, parents)) = path.split_last() else { return ("unknown key".to_owned(), None) };
    if is_unsupported(path) {
        return (
            format!("`{key}` is not supported yet"),
            Some("remove the key: this version of the gateway would ignore it".to_owned()),
        );
    }
    let known = kind.keys(parents);
    let hint = (!known.is_empty()).then(|| unknown_key_hint(key, &known));
    (format!("unknown key `{key}`"), hint)
}

/// Return the known name that is most similar to `name`, if the edit distance is small.
pub fn closest_name<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}
