//! Describe the differences between two configurations. The comparison uses the texts of the files, with secrets
//! redacted. It ignores default values and the contents of other files, such as certificates.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::config::file_schema::is_named_table;

/// A difference between two configurations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The table that differs, such as `route`, `limit` or `listener`. For a key of `[server]`, it is `server`.
    pub table: String,
    /// Name of the entry: the name of a route, limit or upstream, or the address of a listener. `None` for tables
    /// without entries.
    pub name: Option<String>,
    /// The changed table or key, such as `limit.per-ip` or `server.workers`.
    pub changed: String,
    /// The description: `added`, `removed`, or each changed key with its old and new value.
    pub text: String,
    /// Whether the entry exists in both configurations, but with different values.
    pub is_change: bool,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{} `{name}`: {}", self.table, self.text),
            None => write!(f, "{}", self.text),
        }
    }
}

impl Difference {
    /// Replace all texts of the difference.
    pub(crate) fn map_texts(self, map: impl Fn(&str) -> String) -> Self {
        let Difference { table, name, changed, text, is_change } = self;
        Difference { name: name.map(|name| map(&name)), changed: map(&changed), text: map(&text), table, is_change }
    }
}

/// Maximum number of names in a summary.
const MAX_SUMMARY: usize = 20;

/// Return the changed tables and keys on one line, without their values.
pub fn summary(differences: &[Difference]) -> String {
    let names: Vec<_> = differences.iter().take(MAX_SUMMARY).map(|difference| &*difference.changed).collect();
    match differences.len().saturating_sub(MAX_SUMMARY) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// Return the differences between two redacted configurations, sorted by table and name.
pub fn differences(old: &Value, new: &Value) -> Vec<Difference> {
    let old_entries = entries(old);
    let new_entries = entries(new);
    let keys: BTreeSet<_> = old_entries.keys().chain(new_entries.keys()).collect();
    let mut found = Vec::new();
    for key in keys {
        let (table, name) = key;
        let is_change = old_entries.contains_key(key) && new_entries.contains_key(key);
        let mut push = |changed: String, text: String| {
            found.push(Difference { table: table.clone(), name: name.clone(), changed, text, is_change });
        };
        let entry = name.as_ref().map_or_else(|| table.clone(), |name| format!("{table}.{name}"));
        match (old_entries.get(key), new_entries.get(key)) {
            (None, Some(_)) if name.is_some() => push(entry, "added".to_owned()),
            (Some(_), None) if name.is_some() => push(entry, "removed".to_owned()),
            (old, new) if old != new => {
                // Omit the table name from the keys of an entry, because `Difference::table` contains it. Other keys
                // start with the table name, as in `server.workers`.
                let prefix = if name.is_some() { "" } else { &**table };
                let changes = changed_keys(prefix, old.copied(), new.copied());
                if name.is_some() {
                    push(entry, changes.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("; "));
                } else {
                    changes.into_iter().for_each(|(key, text)| push(key, text));
                }
            }
            _ => {}
        }
    }
    found
}

/// Return the parts of a configuration by table and entry name: the entries of named tables (`[limit.NAME]`) and of
/// arrays of tables (`[[route]]`). All other top-level keys have no entry name.
fn entries(config: &Value) -> BTreeMap<(String, Option<String>), &Value> {
    let mut found = BTreeMap::new();
    let Some(tables) = config.as_object() else { return found };
    for (table, value) in tables {
        match value {
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_object) => {
                for item in items {
                    let name = ["name", "address", "path"].iter().find_map(|key| item[*key].as_str());
                    let mut name = name.unwrap_or_default().to_owned();
                    // Make the name unique: two routes without a name may have the same path.
                    while found.contains_key(&(table.clone(), Some(name.clone()))) {
                        name.push('\'');
                    }
                    found.insert((table.clone(), Some(name)), item);
                }
            }
            // A table with named entries, such as `[limit.NAME]`.
            Value::Object(items) if is_named_table(table) => {
                found.extend(items.iter().map(|(name, item)| ((table.clone(), Some(name.clone())), item)));
            }
            value => {
                found.insert((table.clone(), None), value);
            }
        }
    }
    found
}

/// Return a sorted list of the keys that differ, each with a description in the form `key old → new`.
fn changed_keys(prefix: &str, old: Option<&Value>, new: Option<&Value>) -> Vec<(String, String)> {
    let mut old_leaves = BTreeMap::new();
    let mut new_leaves = BTreeMap::new();
    old.into_iter().for_each(|value| collect_leaves(prefix, value, &mut old_leaves));
    new.into_iter().for_each(|value| collect_leaves(prefix, value, &mut new_leaves));
    let keys: BTreeSet<_> = old_leaves.keys().chain(new_leaves.keys()).collect();
    let changes = keys.into_iter().filter_map(|key| {
        let text = match (old_leaves.get(key), new_leaves.get(key)) {
            (Some(old), Some(new)) if old == new => return None,
            (Some(old), Some(new)) => format!("{key} {old} → {new}"),
            (None, Some(new)) => format!("{key} = {new} added"),
            (Some(old), None) => format!("{key} = {old} removed"),
            (None, None) => return None,
        };
        Some((key.clone(), text))
    });
    changes.collect()
}

fn collect_leaves<'v>(path: &str, value: &'v Value, leaves: &mut BTreeMap<String, &'v Value>) {
    match value {
        Value::Object(table) if !table.is_empty() => {
            for (key, value) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                collect_leaves(&path, value, leaves);
            }
        }
        value => {
            leaves.insert(path.to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn differences_are_named_in_words() {
        let old = json!({
            "server": {"workers": 2},
            "listener": [{"address": "0.0.0.0:80"}],
            "limit": {"a": {"by": "ip", "quota": "1/s"}, "gone": {"by": "ip"}},
            "route": [{"name": "r", "path": "/a", "limits": ["a"], "cors": {"origins": ["x"]}}, {"path": "/b"}],
        });
        let new = json!({
            "server": {"workers": 2, "drain_timeout": "9s"},
            "listener": [{"address": "0.0.0.0:80", "proxy_protocol": true}],
            "limit": {"a": {"by": "ip", "quota": "2/s", "burst": 4}, "b": {"by": "ip"}},
            "route": [{"path": "/b"}, {"name": "r", "path": "/a", "limits": []}],
        });
        let found: Vec<_> = differences(&old, &new).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "limit `a`: burst = 4 added; quota \"1/s\" → \"2/s\"",
                "limit `b`: added",
                "limit `gone`: removed",
                "listener `0.0.0.0:80`: proxy_protocol = true added",
                "route `r`: cors.origins = [\"x\"] removed; limits [\"a\"] → []",
                "server.drain_timeout = \"9s\" added",
            ]
        );
        assert_eq!(
            summary(&differences(&old, &new)),
            "limit.a, limit.b, limit.gone, listener.0.0.0.0:80, route.r, server.drain_timeout"
        );
        assert_eq!(differences(&new, &new), []);
        assert_eq!(summary(&[]), "");
        let many: serde_json::Map<_, _> = (0..30).map(|number| (format!("l{number:02}"), json!({}))).collect();
        let many = summary(&differences(&json!({}), &json!({ "limit": many })));
        assert!(many.ends_with("limit.l18, limit.l19 and 10 more"), "{many}");
    }
}
