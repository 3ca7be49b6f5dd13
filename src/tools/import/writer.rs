//! Writes the imported gateway as TOML with comments.

use std::fmt::Write;

use crate::tools::import::model::{Model, Note, Relation, Table, quoted};

/// The tables without a name, in the order in which they are written.
const SETTINGS_BEFORE: [&str; 4] = ["server", "store", "client_ip", "log"];

impl Model {
    /// Return the text of gateway.toml.
    #[must_use]
    pub fn to_toml(&self, command: &str) -> String {
        let mut text = format!("# Written by `{}`.\n", quoted(command));
        let general: Vec<&Note> =
            self.notes.iter().filter(|note| note.origin.is_none() && note.relation != Relation::NotNeeded).collect();
        if !general.is_empty() {
            text.push_str("# Differs from the original:\n");
        }
        for note in general {
            for line in wrapped(&note.text) {
                text.push_str(&line);
            }
        }
        for name in SETTINGS_BEFORE {
            if let Some(table) = self.settings.get(name) {
                write_table(&mut text, &format!("[{name}]"), None, table);
            }
        }
        for listener in &self.listeners {
            write_table(&mut text, "[[listener]]", None, listener);
        }
        for (kind, tables) in [("auth", &self.auth), ("limit", &self.limits), ("upstream", &self.upstreams)] {
            for (name, table) in tables {
                write_table(&mut text, &format!("[{kind}.{name}]"), None, table);
            }
        }
        if let Some(table) = self.settings.get("route_defaults") {
            write_table(&mut text, "[route_defaults]", None, table);
        }
        for (name, route) in &self.routes {
            write_table(&mut text, "[[route]]", Some(name), route);
        }
        for descriptor in &self.descriptors {
            write_table(&mut text, "[[descriptor]]", None, descriptor);
        }
        text
    }

    /// Return the text of the consumers file.
    #[must_use]
    pub fn to_consumers(&self) -> String {
        let mut text = String::new();
        for (name, consumer) in &self.consumers {
            write_table(&mut text, "[[consumer]]", Some(name), consumer);
        }
        text.trim_start().to_owned()
    }

    /// Return the text of the users file.
    #[must_use]
    pub fn to_users(&self) -> String {
        self.users.iter().map(|(name, hash)| format!("{name}:{hash}\n")).collect()
    }
}

fn write_table(text: &mut String, header: &str, name: Option<&str>, table: &Table) {
    text.push('\n');
    for comment in &table.comments {
        let _ = writeln!(text, "# {comment}");
    }
    let _ = writeln!(text, "{header}");
    if let Some(name) = name {
        let _ = writeln!(text, "name = {}", toml::Value::from(name));
    }
    for (key, value) in &table.keys {
        let _ = writeln!(text, "{key} = {value}");
    }
}

/// Return a text as comment lines of at most 100 columns.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = "# -".to_owned();
    for word in text.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > 100 {
            lines.push(format!("{line}\n"));
            line = "#  ".to_owned();
        }
        line.push(' ');
        line.push_str(word);
    }
    lines.push(format!("{line}\n"));
    lines
}
