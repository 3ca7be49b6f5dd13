//! Defaults of routes: adds the keys of `[route_defaults]` and of the route's `[route_group.NAME]` to each route.
//!
//! The tables are merged before they are deserialized. A route with defaults is therefore validated, explained and
//! compared in the same way as a route that has the same keys itself.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::config::error::Issue;
use crate::config::file_schema::FileKind;
use crate::config::unknown_keys::{closest_name, unknown_key_hint};

/// Keys that only one route can have, because they select its requests.
const OWN_KEYS: [&str; 5] = ["name", "path", "path_regex", "match", "group"];

/// Keys that apply only to routes with an upstream.
const UPSTREAM_KEYS: [&str; 14] = [
    "upstream",
    "upstream_host",
    "timeout",
    "max_body",
    "compress",
    "request_headers",
    "websocket",
    "mirror",
    "strip_prefix",
    "rewrite",
    "retries",
    "retry_on",
    "retry_methods",
    "fallback",
];

/// Add the defaults to all routes. Report invalid defaults, and warn of groups without a route.
pub(super) fn apply(all: &mut DeTable<'_>, issues: &mut Vec<Issue>, warnings: &mut Vec<Issue>) {
    let defaults = table_of(all, "route_defaults").cloned();
    let groups = table_of(all, "route_group").cloned();
    let tables = groups.iter().flat_map(|groups| groups.values()).filter_map(|group| group.get_ref().as_table());
    tables.chain(&defaults).for_each(|table| check_keys(table, issues));
    let mut unused: Vec<_> = groups.iter().flat_map(|groups| groups.keys()).collect();
    let Some(DeValue::Array(routes)) = all.get_mut("route").map(Spanned::get_mut) else { return };
    for route in routes.iter_mut() {
        let DeValue::Table(route) = route.get_mut() else { continue };
        if let Some(group) = group_of(route, groups.as_ref(), issues) {
            unused.retain(|name| !is_named(route, name.get_ref()));
            add(route, group, issues);
        }
        if let Some(defaults) = &defaults {
            add(route, defaults, issues);
        }
    }
    warnings.extend(unused.into_iter().map(|name| {
        let message = format!("no route is in the group `{}`", name.get_ref());
        Issue::new(name.span(), message).with_hint(format!("write group = \"{}\" in its routes", name.get_ref()))
    }));
}

fn is_named(route: &DeTable<'_>, group: &str) -> bool {
    route.get("group").and_then(|name| name.get_ref().as_str()) == Some(group)
}

/// Return the keys that may have defaults.
fn known_keys() -> impl Iterator<Item = &'static str> {
    let keys = FileKind::Gateway.keys(&["route"]).into_iter().filter(|key| !OWN_KEYS.contains(key));
    keys.chain(["prefix"])
}

/// Return the known key that a key names or misspells.
fn meant_key(key: &str) -> Option<&'static str> {
    known_keys().find(|known| *known == key).or_else(|| closest_name(key, known_keys()))
}

fn table_of<'t, 'd>(all: &'t DeTable<'d>, key: &str) -> Option<&'t DeTable<'d>> {
    all.get(key)?.get_ref().as_table()
}

fn check_keys(table: &DeTable<'_>, issues: &mut Vec<Issue>) {
    for (key, _) in table.iter().filter(|(key, _)| OWN_KEYS.contains(&&**key.get_ref())) {
        let issue = Issue::new(key.span(), format!("`{}` cannot have a default", key.get_ref()));
        issues.push(issue.with_hint("write this key in each [[route]]"));
    }
    let is_unknown = |key: &str| !OWN_KEYS.contains(&key) && known_keys().all(|known| known != key);
    for (key, _) in table.iter().filter(|(key, _)| is_unknown(key.get_ref())) {
        let issue = Issue::new(key.span(), format!("unknown key `{}`", key.get_ref()));
        issues.push(issue.with_hint(unknown_key_hint(key.get_ref(), &known_keys().collect::<Vec<_>>())));
    }
    if let Some(prefix) = table.get("prefix")
        && !prefix.get_ref().as_str().is_some_and(|text| text.starts_with('/') && !text.ends_with('/'))
    {
        let issue = Issue::new(prefix.span(), "`prefix` is not the beginning of a path");
        issues.push(issue.with_hint("write whole path segments, such as prefix = \"/v1\""));
    }
}

/// Return the group of a route.
fn group_of<'g, 'd>(
    route: &DeTable<'_>,
    groups: Option<&'g DeTable<'d>>,
    issues: &mut Vec<Issue>,
) -> Option<&'g DeTable<'d>> {
    let group = route.get("group")?;
    let name = group.get_ref().as_str()?;
    let found = groups.and_then(|groups| table_of(groups, name));
    if found.is_none() {
        let issue = Issue::new(group.span(), format!("unknown group `{name}`"));
        issues.push(issue.with_hint(format!("add a table [route_group.{name}]")));
    }
    found
}

/// Add the keys that a route does not have. The limits of the defaults precede those of the route, and the prefix
/// precedes its path.
fn add<'d>(route: &mut DeTable<'d>, defaults: &DeTable<'d>, issues: &mut Vec<Issue>) {
    let has_upstream = !route.contains_key("respond") && !route.contains_key("redirect");
    for (key, value) in defaults {
        // The value of a misspelled key is used under the name that is meant, so that the key is not missing.
        let Some(name) = meant_key(key.get_ref()) else { continue };
        match (name, value.get_ref(), route.get_mut(name)) {
            ("prefix", DeValue::String(prefix), _) if prefix.starts_with('/') => add_prefix(route, prefix, issues),
            ("prefix", ..) => {}
            ("limits", DeValue::Array(limits), Some(own)) => {
                if let DeValue::Array(own) = own.get_mut() {
                    let names: Vec<_> = own.iter().map(|limit| limit.get_ref().as_str()).collect();
                    let added = limits.iter().filter(|limit| !names.contains(&limit.get_ref().as_str()));
                    let mut merged = DeArray::new();
                    added.chain(own.iter()).for_each(|limit| merged.push(limit.clone()));
                    *own = merged;
                }
            }
            (name, ..) if UPSTREAM_KEYS.contains(&name) && !has_upstream => {}
            (_, _, Some(_)) => {}
            (_, _, None) => drop(route.insert(Spanned::new(key.span(), Cow::Borrowed(name)), value.clone())),
        }
    }
}

fn add_prefix(route: &mut DeTable<'_>, prefix: &str, issues: &mut Vec<Issue>) {
    if let Some(regex) = route.get("path_regex") {
        let issue = Issue::new(regex.span(), "the default `prefix` does not apply to `path_regex`");
        issues.push(issue.with_hint("write `path`, or remove this route from the group"));
    }
    let Some(path) = route.get_mut("path") else { return };
    // Another path is reported as the route wrote it.
    let DeValue::String(own) = path.get_ref() else { return };
    if !own.starts_with('/') {
        return;
    }
    let whole = DeValue::String(Cow::Owned(format!("{prefix}{own}")));
    *path = Spanned::new(path.span(), whole);
}
