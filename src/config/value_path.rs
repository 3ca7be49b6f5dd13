//! Values and keys of a parsed TOML table, by path or by span.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

/// Return the value at a path. Each segment is a key, or the index of a list item.
pub(super) fn value_at<'t, 'd>(table: &'t DeTable<'d>, path: &[String]) -> Option<&'t Spanned<DeValue<'d>>> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(table.get(first.as_str())?, |value, segment| match value.get_ref() {
        DeValue::Table(table) => table.get(segment.as_str()),
        DeValue::Array(items) => items.get(segment.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Return the span of the value at a path in a TOML text. Each segment is a key, or the index of a list item. If the
/// value is missing, return the span of the table that should contain it.
pub fn value_span(text: &str, path: &[String]) -> Option<Range<usize>> {
    let table = DeTable::parse(text).ok()?;
    (1..=path.len()).rev().find_map(|length| value_at(table.get_ref(), &path[..length])).map(Spanned::span)
}

pub(super) fn value_mut<'t, 'd>(table: &'t mut DeTable<'d>, path: &[String]) -> Option<&'t mut Spanned<DeValue<'d>>> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(table.get_mut(first.as_str())?, |value, segment| match value.get_mut() {
        DeValue::Table(table) => table.get_mut(segment.as_str()),
        DeValue::Array(items) => items.get_mut(segment.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Return the table that contains the last key of a path.
fn table_mut<'t, 'd>(all: &'t mut DeTable<'d>, parents: &[String]) -> Option<&'t mut DeTable<'d>> {
    if parents.is_empty() {
        return Some(all);
    }
    match value_mut(all, parents)?.get_mut() {
        DeValue::Table(table) => Some(table),
        _ => None,
    }
}

/// Rename the last key of a path. Return the new path, or `None` if the table already has a key with the new name.
pub(super) fn rename_key(all: &mut DeTable<'_>, path: &[String], name: &'static str) -> Option<Vec<String>> {
    let (key, parents) = path.split_last()?;
    let table = table_mut(all, parents)?;
    if table.contains_key(name) {
        return None;
    }
    let (old, value) = table.remove_entry(key.as_str())?;
    table.insert(Spanned::new(old.span(), name.into()), value);
    Some([parents, &[name.to_owned()]].concat())
}

/// Remove the value at a path from its table or list.
pub(super) fn remove(all: &mut DeTable<'_>, path: &[String]) {
    let Some((last, parents)) = path.split_last() else { return };
    if let Some(table) = table_mut(all, parents) {
        table.remove(last.as_str());
    } else if let (Some(value), Ok(index)) = (value_mut(all, parents), last.parse::<usize>())
        && let DeValue::Array(items) = value.get_mut()
    {
        let items = std::mem::replace(items, DeArray::new()).into_iter().enumerate().filter(|(at, _)| *at != index);
        *value.get_mut() = DeValue::Array(items.map(|(_, item)| item).collect());
    }
}

/// Return the path of the value with a span. The items of a list from an environment variable have the same span as the
/// list: return the first item that is still a string.
pub(super) fn path_at(all: &DeTable<'_>, span: &Range<usize>) -> Option<Vec<String>> {
    fn collect(
        value: &Spanned<DeValue<'_>>,
        span: &Range<usize>,
        path: &mut Vec<String>,
        found: &mut Vec<Vec<String>>,
    ) {
        if value.span() == *span {
            found.push(path.clone());
        }
        match value.get_ref() {
            DeValue::Table(table) => collect_table(table, span, path, found),
            DeValue::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    path.push(index.to_string());
                    collect(item, span, path, found);
                    path.pop();
                }
            }
            _ => {}
        }
    }
    fn collect_table(table: &DeTable<'_>, span: &Range<usize>, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
        for (key, value) in table {
            path.push(key.get_ref().to_string());
            collect(value, span, path, found);
            path.pop();
        }
    }
    let mut found = Vec::new();
    collect_table(all, span, &mut Vec::new(), &mut found);
    let is_string = |path: &&Vec<String>| value_at(all, path).is_some_and(|value| value.get_ref().is_str());
    found.iter().find(is_string).or(found.first()).cloned()
}

/// Return the span of the last key of a path.
pub(super) fn key_span(table: &DeTable<'_>, path: &[String]) -> Option<Range<usize>> {
    let (first, rest) = path.split_first()?;
    let (key, mut value) = table.iter().find(|(key, _)| key.get_ref() == first)?;
    let mut rest = rest;
    if rest.is_empty() {
        return Some(key.span());
    }
    while let (DeValue::Array(items), Some(index)) = (value.get_ref(), rest.first()) {
        value = items.get(index.parse::<usize>().ok()?)?;
        rest = &rest[1..];
    }
    match value.get_ref() {
        DeValue::Table(inner) => key_span(inner, rest),
        _ => Some(key.span()),
    }
}

/// Return the range of a value in the file, including all nested values.
pub(super) fn extent(value: &Spanned<DeValue<'_>>) -> Range<usize> {
    let join = |one: Range<usize>, other: Range<usize>| one.start.min(other.start)..one.end.max(other.end);
    match value.get_ref() {
        DeValue::Table(table) => table.iter().map(|(_, value)| extent(value)).fold(value.span(), join),
        DeValue::Array(items) => items.iter().map(extent).fold(value.span(), join),
        _ => value.span(),
    }
}

/// Return whether a span contains another span.
pub(super) fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}
