//! The text of a file of consumers, changed in place: comments, order and spaces stay.

use std::fmt;

use anyhow::{anyhow, bail};
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, TableLike, Value, value};

use crate::config::file::closest_name;

/// The consumers as they are written.
pub(super) struct ConsumersDoc(DocumentMut);

/// A consumer as it is shown.
pub(super) struct ConsumerRow {
    pub(super) name: String,
    pub(super) tier: String,
    /// As written.
    pub(super) keys: Vec<String>,
}

impl ConsumersDoc {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        Ok(ConsumersDoc(text.parse()?))
    }

    pub(super) fn rows(&self) -> Vec<ConsumerRow> {
        let text = |table: &dyn TableLike, key: &str| table.get(key).and_then(Item::as_str).unwrap_or("").to_owned();
        let keys = |table: &dyn TableLike| {
            let keys = table.get("keys").and_then(Item::as_array).into_iter().flatten();
            keys.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let row = |table: &dyn TableLike| ConsumerRow {
            name: text(table, "name"),
            tier: text(table, "tier"),
            keys: keys(table),
        };
        match self.0.get("consumer") {
            Some(Item::ArrayOfTables(tables)) => tables.iter().map(|table| row(table)).collect(),
            Some(Item::Value(Value::Array(tables))) => {
                tables.iter().filter_map(Value::as_inline_table).map(|table| row(table)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Adds a consumer without keys.
    pub(super) fn add_consumer(&mut self, name: &str, tier: Option<&str>) -> anyhow::Result<()> {
        if self.rows().iter().any(|row| row.name == name) {
            bail!("there is a consumer `{name}` already: leave --create out to give it one more key");
        }
        let mut table = Table::new();
        table.insert("name", value(name));
        if let Some(tier) = tier {
            table.insert("tier", value(tier));
        }
        table.insert("keys", value(Array::new()));
        // What stands behind all tables stays before the new one.
        let trailing = decor_text(Some(self.0.trailing()));
        self.0.set_trailing("");
        table.decor_mut().set_prefix(format!("{trailing}\n"));
        let consumers = self.0.entry("consumer").or_insert(Item::ArrayOfTables(ArrayOfTables::new()));
        match consumers {
            Item::ArrayOfTables(tables) => tables.push(table),
            Item::Value(Value::Array(tables)) => tables.push(table.into_inline_table()),
            _ => bail!("`consumer` is no list"),
        }
        Ok(())
    }

    /// Gives a consumer one more key.
    pub(super) fn add_key(&mut self, name: &str, hash: &str) -> anyhow::Result<()> {
        let table = self.consumer_tables().into_iter().find(|table| consumer_name(&**table) == Some(name));
        let Some(table) = table else { return Err(self.unknown_consumer(name)) };
        let keys = table.entry("keys").or_insert(value(Array::new()));
        let keys = keys.as_array_mut().ok_or_else(|| anyhow!("`keys` of `{name}` is no list"))?;
        push_key(keys, hash);
        Ok(())
    }

    /// Takes the one key out whose hash begins with these digits; gives its consumer and its hash.
    pub(super) fn revoke_key(&mut self, digits: &str) -> anyhow::Result<(String, String)> {
        let mut matches = Vec::new();
        for row in self.rows() {
            let hashes =
                row.keys.iter().enumerate().filter_map(|(index, key)| Some((index, key.strip_prefix("sha256:")?)));
            let matching = hashes.filter(|(_, hash)| hash.starts_with(digits));
            matches.extend(matching.map(|(index, hash)| (row.name.clone(), index, hash.to_owned())));
        }
        let (name, index, hash) = match &matches[..] {
            [(name, index, hash)] => (name.clone(), *index, hash.clone()),
            [] => bail!("no key has a hash that begins with {}", digits.get(..12).unwrap_or(digits)),
            several => {
                let hashes: Vec<_> =
                    several.iter().map(|(name, _, hash)| format!("{} of `{name}`", &hash[..16])).collect();
                bail!("several keys begin with {digits}: {}", hashes.join(", "));
            }
        };
        let table = self.consumer_tables().into_iter().find(|table| consumer_name(&**table) == Some(&name));
        if let Some(keys) = table.and_then(|table| table.get_mut("keys")?.as_array_mut()) {
            remove_key(keys, index);
        }
        Ok((name, hash))
    }

    fn consumer_tables(&mut self) -> Vec<&mut dyn TableLike> {
        match self.0.get_mut("consumer") {
            Some(Item::ArrayOfTables(tables)) => tables.iter_mut().map(|table| table as &mut dyn TableLike).collect(),
            Some(Item::Value(Value::Array(tables))) => tables
                .iter_mut()
                .filter_map(Value::as_inline_table_mut)
                .map(|table| table as &mut dyn TableLike)
                .collect(),
            _ => Vec::new(),
        }
    }

    fn unknown_consumer(&self, name: &str) -> anyhow::Error {
        let names: Vec<_> = self.rows().into_iter().map(|row| row.name).collect();
        let suggestion = closest_name(name, names.iter().map(String::as_str));
        let suggestion = suggestion.map_or(String::new(), |suggestion| format!("did you mean `{suggestion}`? "));
        anyhow!("there is no consumer `{name}`\n  {suggestion}--create adds one")
    }
}

impl fmt::Display for ConsumersDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn consumer_name(table: &dyn TableLike) -> Option<&str> {
    table.get("name")?.as_str()
}

/// Adds a key as the last one of its list is written: on the same line, or on one of its own.
fn push_key(keys: &mut Array, hash: &str) {
    let mut key = Value::from(hash);
    let has_trailing_comma = keys.trailing_comma();
    if let Some(last) = keys.len().checked_sub(1).and_then(|last| keys.get_mut(last)) {
        let prefix = decor_text(last.decor().prefix());
        let suffix = decor_text(last.decor().suffix());
        last.decor_mut().set_suffix("");
        // Behind the last comma stands the comment on the last key.
        let tail = suffix + &decor_text(Some(keys.trailing()));
        if let Some((comment, _)) = tail.rsplit_once('\n') {
            let indentation = prefix.rsplit('\n').next().unwrap_or_default();
            key.decor_mut().set_prefix(format!("{comment}\n{indentation}"));
            keys.set_trailing("\n");
            keys.set_trailing_comma(true);
        } else {
            key.decor_mut().set_prefix(" ");
            keys.set_trailing(tail);
            keys.set_trailing_comma(has_trailing_comma);
        }
    }
    keys.push_formatted(key);
}

/// Takes a key out, and the comment behind it; the comment on the key before stays.
fn remove_key(keys: &mut Array, index: usize) {
    let prefix = keys.get(index).map_or_else(String::new, |key| decor_text(key.decor().prefix()));
    let suffix = keys.get(index).map_or_else(String::new, |key| decor_text(key.decor().suffix()));
    keys.remove(index);
    let join_comment = |after: &str| match (prefix.split_once('\n'), after.split_once('\n')) {
        (Some((comment, _)), Some((_, rest))) => format!("{comment}\n{rest}"),
        (None, Some(_)) => after.to_owned(),
        (_, None) => prefix.clone(),
    };
    match keys.get_mut(index) {
        Some(next) => {
            let after = join_comment(&decor_text(next.decor().prefix()));
            next.decor_mut().set_prefix(after);
        }
        None => {
            let tail = suffix + &decor_text(Some(keys.trailing()));
            let after = if tail.contains('\n') { join_comment(&tail) } else { String::new() };
            keys.set_trailing(if keys.is_empty() { String::new() } else { after });
        }
    }
}

fn decor_text(text: Option<&toml_edit::RawString>) -> String {
    text.and_then(toml_edit::RawString::as_str).unwrap_or_default().to_owned()
}
