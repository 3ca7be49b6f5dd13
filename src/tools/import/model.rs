//! The gateway that an importer builds from the files of another program: the tables of a gateway.toml, each with the
//! position of its origin, and notes about what differs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use indexmap::IndexMap;
use toml::Value;

/// Maximum length in characters of a quotation from an imported file in a message or a comment.
const MAX_QUOTED: usize = 80;

/// A position in an imported file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// Name of the file.
    pub file: Arc<str>,
    /// Line number, counted from 1.
    pub line: usize,
}

impl Origin {
    /// Create a position.
    #[must_use]
    pub fn new(file: &Arc<str>, line: usize) -> Self {
        Origin { file: file.clone(), line }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// How a part of the original relates to the import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Relation {
    /// The part is not imported.
    NoEqual,
    /// The part is imported, but has a different effect.
    Differs,
    /// The part has no effect on requests, or the gateway does the same by default.
    NotNeeded,
}

impl Relation {
    /// Return the words that precede a message.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Relation::NoEqual => "no equal",
            Relation::Differs => "differs",
            Relation::NotNeeded => "not needed",
        }
    }
}

/// A message about a part of the original.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Note {
    /// Position of the part. `None`: the message is about the whole import.
    pub origin: Option<Origin>,
    /// How the part relates to the import.
    pub relation: Relation,
    /// What is missing or different, and what to do.
    pub text: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(origin) = &self.origin {
            write!(f, "{origin}: ")?;
        }
        write!(f, "{}: {}", self.relation.label(), self.text)
    }
}

/// A table of the configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Table {
    /// Comments before the table, without `#`.
    pub comments: Vec<String>,
    /// The keys in the order in which they are written. A key may be dotted.
    pub keys: IndexMap<String, Value>,
}

impl Table {
    /// Create a table that originates in a part of a file.
    #[must_use]
    pub fn from_origin(origin: &Origin, part: &str) -> Self {
        Table { comments: vec![format!("{origin}: {}", quoted(part))], keys: IndexMap::new() }
    }

    /// Set a key. `${` in text of the value stands for these characters, not for an environment variable.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.keys.insert(key.to_owned(), escaped(value.into()));
    }

    /// Set a key to the value of an environment variable, which is empty by default.
    pub fn set_variable(&mut self, key: &str, variable: &str) {
        self.keys.insert(key.to_owned(), format!("${{{variable}:-}}").into());
    }

    /// Set a key to a list, unless the list is empty.
    pub fn set_list(&mut self, key: &str, list: impl IntoIterator<Item = String>) {
        let list: Vec<Value> = list.into_iter().map(Value::String).collect();
        if !list.is_empty() {
            self.set(key, list);
        }
    }

    /// Add an entry to a table in a key, such as a header to `request_headers.set`.
    pub fn set_entry(&mut self, key: &str, name: &str, value: impl Into<Value>) {
        let table = self.keys.entry(key.to_owned()).or_insert_with(|| Value::Table(toml::Table::new()));
        if let Value::Table(table) = table {
            table.insert(name.to_owned(), escaped(value.into()));
        }
    }

    /// Add an item to the list in a key, unless the list contains it.
    pub fn push(&mut self, key: &str, item: impl Into<Value>) {
        let list = self.keys.entry(key.to_owned()).or_insert_with(|| Value::Array(Vec::new()));
        let item = escaped(item.into());
        if let Value::Array(list) = list
            && !list.contains(&item)
        {
            list.push(item);
        }
    }

    /// Return the text in a key.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        self.keys.get(key).and_then(Value::as_str)
    }
}

/// Escape `${` in all texts of a value, because the gateway replaces environment variables.
fn escaped(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace("${", "$${")),
        Value::Array(items) => Value::Array(items.into_iter().map(escaped).collect()),
        Value::Table(table) => Value::Table(table.into_iter().map(|(key, value)| (key, escaped(value))).collect()),
        other => other,
    }
}

/// The imported gateway.
#[derive(Debug, Default)]
pub struct Model {
    /// Messages, in the order in which they were found.
    pub notes: Vec<Note>,
    /// Tables without a name: `server`, `store`, `client_ip`, `log`, `route_defaults`.
    pub settings: BTreeMap<&'static str, Table>,
    /// `[[listener]]`
    pub listeners: Vec<Table>,
    /// `[auth.NAME]`
    pub auth: IndexMap<String, Table>,
    /// `[limit.NAME]`
    pub limits: IndexMap<String, Table>,
    /// `[upstream.NAME]`
    pub upstreams: IndexMap<String, Table>,
    /// `[[route]]` by name.
    pub routes: IndexMap<String, Table>,
    /// `[[descriptor]]`
    pub descriptors: Vec<Table>,
    /// `[[group]]` and `[[consumer]]` of the consumers file, by name.
    pub consumers: IndexMap<String, Table>,
    /// Lines of the users file: `NAME:HASH`.
    pub users: IndexMap<String, String>,
    /// How often each base of a name is in use, so that a free name is found at once.
    names: BTreeMap<String, usize>,
    /// All messages, so that none is repeated.
    seen: BTreeSet<Note>,
}

impl Model {
    /// Add a message, unless it is there already.
    pub fn note(&mut self, relation: Relation, origin: Option<&Origin>, text: impl Into<String>) {
        let text = text.into().replace(char::is_control, " ");
        let note = Note { origin: origin.cloned(), relation, text };
        if self.seen.insert(note.clone()) {
            self.notes.push(note);
        }
    }

    /// Add a message about a part that is not imported.
    pub fn no_equal(&mut self, origin: &Origin, text: impl Into<String>) {
        self.note(Relation::NoEqual, Some(origin), text);
    }

    /// Add a message about a part with another effect.
    pub fn differs(&mut self, origin: &Origin, text: impl Into<String>) {
        self.note(Relation::Differs, Some(origin), text);
    }

    /// Add a message about a part that needs no equal.
    pub fn not_needed(&mut self, origin: &Origin, text: impl Into<String>) {
        self.note(Relation::NotNeeded, Some(origin), text);
    }

    /// Return a table without a name.
    pub fn setting(&mut self, name: &'static str) -> &mut Table {
        self.settings.entry(name).or_default()
    }

    /// Add a route with a name that is derived from `base`. Return its name.
    pub fn add_route(&mut self, base: &str, route: Table) -> String {
        let name = free_name(&mut self.names, "route", base, &self.routes);
        self.routes.insert(name.clone(), route);
        name
    }

    /// Add a limit with a name that is derived from `base`, unless an equal limit exists. Return its name.
    pub fn add_limit(&mut self, base: &str, limit: Table) -> String {
        add_table(&mut self.names, "limit", &mut self.limits, base, limit)
    }

    /// Add a limit with a name that is derived from `base`. Return its name. An equal limit has other states.
    pub fn add_new_limit(&mut self, base: &str, limit: Table) -> String {
        let name = free_name(&mut self.names, "limit", base, &self.limits);
        self.limits.insert(name.clone(), limit);
        name
    }

    /// Add an upstream with a name that is derived from `base`, unless an equal one exists. Return its name.
    pub fn add_upstream(&mut self, base: &str, upstream: Table) -> String {
        add_table(&mut self.names, "upstream", &mut self.upstreams, base, upstream)
    }

    /// Add an authentication provider with a name that is derived from `base`, unless an equal one exists. Return its
    /// name.
    pub fn add_auth(&mut self, base: &str, auth: Table) -> String {
        add_table(&mut self.names, "auth", &mut self.auth, base, auth)
    }
}

fn add_table(
    names: &mut BTreeMap<String, usize>,
    kind: &str,
    tables: &mut IndexMap<String, Table>,
    base: &str,
    table: Table,
) -> String {
    let base = slug(base);
    let equal = tables.iter().find(|(name, other)| other.keys == table.keys && name.starts_with(&base));
    if let Some((name, _)) = equal {
        return name.clone();
    }
    let name = free_name(names, kind, &base, tables);
    tables.insert(name.clone(), table);
    name
}

/// Return a name that is derived from `base` and not in use: `api`, `api-2`, …
fn free_name(names: &mut BTreeMap<String, usize>, kind: &str, base: &str, tables: &IndexMap<String, Table>) -> String {
    let base = slug(base);
    let number = names.entry(format!("{kind} {base}")).or_default();
    loop {
        *number += 1;
        let name = if *number == 1 { base.clone() } else { format!("{base}-{number}") };
        if !tables.contains_key(&name) {
            return name;
        }
    }
}

/// Return the letters and digits of a text as a name: words in lower case, joined with `-`, of at most 48 characters.
#[must_use]
pub fn slug(text: &str) -> String {
    let mut name = String::new();
    for c in text.chars() {
        if c.is_ascii_alphanumeric() {
            name.push(c.to_ascii_lowercase());
        } else if !name.is_empty() && !name.ends_with('-') {
            name.push('-');
        }
        if name.len() >= 48 {
            break;
        }
    }
    let name = name.trim_end_matches('-');
    if name.is_empty() { "all".to_owned() } else { name.to_owned() }
}

/// Return a name in which `-` replaces the characters that names may not have.
#[must_use]
pub fn valid_name(text: &str) -> String {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.chars().take(64).map(|c| if is_valid(c) { c } else { '-' }).collect()
}

/// Return the beginning of a text without line breaks and other control characters, for messages and comments.
#[must_use]
pub fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(MAX_QUOTED).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MAX_QUOTED).is_some() {
        short.push('…');
    }
    short
}
