//! Values whose type is not the type of their key: conversion of environment variables, and errors.

use std::ops::Range;

use serde_json::Value;
use toml::Spanned;
use toml::de::DeValue;

use crate::config::error::Issue;
use crate::config::file_schema::{FileKind, VARIABLE_PATTERN, is_named_table};
use crate::config::schema;
use crate::config::secrets::{is_secret, redact};

/// The key of a table that a single value most likely stands for, such as `url` for `store = "redis://…"`.
const MAIN_KEYS: [(&str, &str); 8] = [
    ("store", "url"),
    ("admin", "address"),
    ("log", "level"),
    ("listener", "address"),
    ("upstream", "servers"),
    ("limit", "quota"),
    ("auth", "kind"),
    ("notify", "webhook"),
];

/// Keys of named tables whose list items may contain a comma.
const KEYS_WITH_COMMAS: [&str; 2] = ["exempt", "claims"];

/// Longest value that a hint repeats, in bytes.
const MAX_QUOTED: usize = 80;

/// The type that a key requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequiredType {
    Integer,
    Number,
    Boolean,
    Text,
    List,
    Table,
    /// One of several types.
    Other,
}

impl RequiredType {
    /// Return the required type in the message of serde for a value of another type. `expected` is the text after
    /// `expected `.
    fn from_message(expected: &str) -> Self {
        match expected {
            "i64" => RequiredType::Integer,
            "f64" => RequiredType::Number,
            "a boolean" | "bool" => RequiredType::Boolean,
            "a string" | "string" => RequiredType::Text,
            "a sequence" => RequiredType::List,
            "a map" => RequiredType::Table,
            other if other.starts_with("struct ") => RequiredType::Table,
            _ => RequiredType::Other,
        }
    }

    /// Return the type of the values that a schema describes.
    pub(super) fn from_schema(schema: &Value) -> Self {
        match schema["type"].as_str().or(schema["type"][0].as_str()) {
            Some("integer") => RequiredType::Integer,
            Some("number") => RequiredType::Number,
            Some("boolean") => RequiredType::Boolean,
            Some("string") => RequiredType::Text,
            Some("array") => RequiredType::List,
            Some("object") => RequiredType::Table,
            _ => RequiredType::Other,
        }
    }

    fn name(self) -> &'static str {
        match self {
            RequiredType::Integer => "an integer",
            RequiredType::Number => "a number",
            RequiredType::Boolean => "`true` or `false`",
            RequiredType::Text => "a string",
            RequiredType::List => "a list",
            RequiredType::Table => "a table",
            RequiredType::Other => "another type",
        }
    }
}

/// A value with the wrong type.
pub(super) struct TypeError<'e, 'd> {
    /// Path of the value. Each segment is a key, or the index of a list item.
    pub(super) path: &'e [String],
    pub(super) value: &'e DeValue<'d>,
    pub(super) span: Range<usize>,
    /// The value as written in the file.
    pub(super) written: &'e str,
    /// Message of the deserializer.
    pub(super) message: &'e str,
    pub(super) file: FileKind,
}

impl TypeError<'_, '_> {
    /// Return the type that the key requires. `None` if the error is not about the type.
    pub(super) fn required_type(&self) -> Option<RequiredType> {
        let required = self.expected().map(RequiredType::from_message)?;
        // serde accepts a list in place of a table, and reports the type of the table's first key.
        let is_table = || self.file.value_schema(self.path).is_some_and(|schema| schema["type"] == "object");
        Some(if self.value.is_array() && is_table() { RequiredType::Table } else { required })
    }

    fn expected(&self) -> Option<&str> {
        self.message.strip_prefix("invalid type: ")?.split_once(", expected ").map(|(_, expected)| expected)
    }

    /// Return the keys of the path, without indices.
    fn keys(&self) -> Vec<&str> {
        self.path.iter().map(String::as_str).filter(|segment| segment.parse::<usize>().is_err()).collect()
    }

    /// Return whether the value is an entry of a table that lacks its name: `quota` of `[limit]`.
    pub(super) fn lacks_table_name(&self) -> bool {
        let [table, key] = self.path else { return false };
        self.file == FileKind::Gateway
            && is_named_table(table)
            && self.file.keys(&[table, "NAME"]).contains(&key.as_str())
    }

    /// Return the issue that reports the error.
    pub(super) fn issue(&self) -> Issue {
        let Some((expected, required)) = self.expected().zip(self.required_type()) else {
            let hint = self.example().map(|example| format!("such as {example}"));
            return Issue { span: Some(self.span.clone()), message: self.message.to_owned(), hint };
        };
        let keys = self.keys();
        let key = keys.last().copied().unwrap_or_default();
        if let (true, [table, ..]) = (self.lacks_table_name(), &keys[..]) {
            return Issue::new(self.span.clone(), format!("the table `[{table}]` has no name"))
                .with_hint(format!("name the {table}: [{table}.NAME]"));
        }
        let name = if required == RequiredType::Other { expected } else { required.name() };
        let message = format!("`{key}` must be {name}, not {}", found_name(self.value));
        let hint = if self.written.contains("${") {
            Some(format!("set the environment variable in {} to {name}", quoted(self.written, &keys)))
        } else {
            self.hint(required, key, &keys)
        };
        Issue { span: Some(self.span.clone()), message, hint }
    }

    fn hint(&self, required: RequiredType, key: &str, keys: &[&str]) -> Option<String> {
        let written = quoted(self.written, keys);
        let text = self.value.as_str().filter(|text| !is_secret(keys, text));
        // A table in place of the name of an upstream.
        if let ["route", "upstream", "servers" | "server" | "url" | "urls" | "host" | "address"] = keys {
            let hint = "define [upstream.NAME] with servers = [\"http://HOST:PORT\"], and write upstream = \"NAME\"";
            return Some(hint.to_owned());
        }
        Some(match (required, self.value) {
            (RequiredType::Boolean, _) => {
                boolean_hint(key, text.unwrap_or(self.written)).unwrap_or("write `true` or `false`".to_owned())
            }
            (RequiredType::Integer | RequiredType::Number, _) => self.number_hint(key, text),
            (RequiredType::Text, DeValue::Integer(_) | DeValue::Float(_)) => self.string_hint(key, keys),
            (RequiredType::Text, DeValue::Array(items)) if items.len() == 1 => {
                format!("remove the brackets: {key} = {}", written.trim_matches(['[', ']', ' ']))
            }
            (RequiredType::Text, DeValue::Table(_)) if key == "limits" => {
                "define [limit.NAME] with this table, and write limits = [\"NAME\"]".to_owned()
            }
            (RequiredType::Text, _) => match self.words() {
                Some(words) => format!("write one of {words}"),
                None => format!("write a string: {key} = {}", self.example().unwrap_or("\"…\"".to_owned())),
            },
            (RequiredType::List, DeValue::Table(table)) if keys.len() == 1 => {
                let known = self.file.keys(&[key]);
                match table.keys().next().filter(|name| !known.contains(&&**name.get_ref())) {
                    Some(name) if known.contains(&"name") => {
                        format!("write [[{key}]] with name = \"{}\"", name.get_ref())
                    }
                    Some(_) => format!("write [[{key}]], without a name"),
                    None => "an array of tables has two brackets: [[route]], [[listener]]".to_owned(),
                }
            }
            (RequiredType::List, _) if keys.len() == 1 && key != "include" => {
                format!("write a table:\n[[{key}]]\n{}", main_key(key, &written))
            }
            // An item of a list of tables: `listener = ["127.0.0.1:8080"]`.
            (RequiredType::Table, _) if keys.len() == 1 && self.path.len() == 2 => {
                format!("write a table:\n[[{key}]]\n{}", main_key(key, &written))
            }
            (RequiredType::Table, DeValue::String(_)) if keys.len() == 2 && is_named_table(keys[0]) => {
                format!("write a table:\n[{}.{key}]\n{}", keys[0], main_key(keys[0], &written))
            }
            (RequiredType::List, DeValue::String(_) | DeValue::Table(_)) => {
                format!("write a list in brackets: {key} = [{written}]")
            }
            (RequiredType::List, _) => {
                format!("write a list: {key} = {}", self.example().unwrap_or("[\"…\"]".to_owned()))
            }
            (RequiredType::Table, DeValue::Array(_)) if keys.len() == 1 && !is_named_table(key) => {
                format!("the table occurs once and has single brackets: [{key}]")
            }
            (RequiredType::Table, DeValue::Array(_)) if keys.len() == 1 && is_named_table(key) => {
                format!("each {key} has a name instead of two brackets: [{key}.NAME]")
            }
            (RequiredType::Table, _) if keys.len() == 1 => {
                let name = if is_named_table(key) { ".NAME" } else { "" };
                format!("write a table:\n[{key}{name}]\n{}", main_key(key, &written))
            }
            (RequiredType::Table, _) => {
                format!("write a table: {key} = {}", self.example().unwrap_or("{ … }".to_owned()))
            }
            (RequiredType::Other, _) => format!("such as {key} = {}", self.example()?),
        })
    }

    fn number_hint(&self, key: &str, text: Option<&str>) -> String {
        if let Some(text) = text.map(str::trim).filter(|text| is_number(text)) {
            return format!("remove the quotes: {key} = {text}");
        }
        let schema = self.file.value_schema(self.path).unwrap_or(&Value::Null);
        let bounds = (&schema["minimum"], schema["maximum"].as_i64().filter(|most| *most <= 1_000_000));
        match bounds {
            (Value::Number(least), Some(most)) => format!("write a number from {least} to {most}"),
            (Value::Number(least), None) => format!("write a number, {least} or more"),
            _ => format!("write a number: {key} = 10"),
        }
    }

    /// Return a hint for a number in place of a string. The hint adds the unit that the key requires.
    fn string_hint(&self, key: &str, keys: &[&str]) -> String {
        let number = self.written;
        if key.is_empty() || is_secret(keys, number) {
            return "put the value in quotes".to_owned();
        }
        let pattern = self.file.value_schema(self.path).and_then(|schema| schema["pattern"].as_str()).unwrap_or("");
        let value = match pattern.strip_suffix(VARIABLE_PATTERN) {
            Some(schema::QUOTA) => format!("{number}/min"),
            Some(schema::DURATION) => format!("{number}s"),
            Some(schema::SIZE) => format!("{number}B"),
            _ if key == "address" => format!("127.0.0.1:{number}"),
            _ => number.to_owned(),
        };
        format!("put the value in quotes: {key} = \"{value}\"")
    }

    /// Return the permitted words of the key.
    fn words(&self) -> Option<String> {
        let words = self.file.value_schema(self.path)?["anyOf"][0]["enum"].as_array()?;
        Some(words.iter().map(Value::to_string).collect::<Vec<_>>().join(", "))
    }

    /// Return the example in the documentation of the key.
    fn example(&self) -> Option<String> {
        example(self.file.value_schema(self.path)?)
    }
}

/// Return the first value in the documentation of a key, otherwise its default.
pub(super) fn example(schema: &Value) -> Option<String> {
    let quoted = schema["description"].as_str().unwrap_or_default().split('`').skip(1).step_by(2);
    // `[auth.NAME]` is a table, not a value.
    let is_value = |text: &&str| text.starts_with(['{', '"']) || text.starts_with("[\"");
    quoted.into_iter().find(is_value).map(str::to_owned).or_else(|| Some(schema.get("default")?.to_string()))
}

/// Return a hint for the text of a boolean that TOML does not know, such as `True`, `yes` or `1`.
pub(super) fn boolean_hint(key: &str, text: &str) -> Option<String> {
    match text.to_ascii_lowercase().as_str() {
        word @ ("true" | "false") => Some(format!("write `{word}`, in lower case and without quotes: {key} = {word}")),
        "yes" | "no" | "on" | "off" | "y" | "n" | "1" | "0" | "enabled" | "disabled" | "enable" | "disable" => {
            Some(format!("write `true` or `false`: {key} = true"))
        }
        _ => None,
    }
}

/// Return the line that sets the main key of a table to a value, or a placeholder.
fn main_key(table: &str, written: &str) -> String {
    match MAIN_KEYS.iter().find(|(name, _)| *name == table) {
        Some((_, "servers")) => format!("servers = [{written}]"),
        Some((_, key)) => format!("{key} = {written}"),
        None => "…".to_owned(),
    }
}

/// Return a value as hints may show it: without secrets, and not too long.
pub(super) fn quoted(written: &str, keys: &[&str]) -> String {
    let text = written.trim_matches(['"', '\'']);
    if is_secret(keys, text) || written.len() > MAX_QUOTED || written.contains('\n') {
        return "\"…\"".to_owned();
    }
    redact(written)
}

fn found_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn is_number(text: &str) -> bool {
    scalar(text).is_some_and(|value| value.is_integer() || value.is_float())
}

/// Parse a number, a boolean or a date.
fn scalar(text: &str) -> Option<DeValue<'_>> {
    let value = DeValue::parse(text.trim()).ok()?.into_inner();
    match value {
        DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) | DeValue::Datetime(_) => Some(value),
        DeValue::String(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

// === Environment variables: their values are strings, which are converted to the type of the key ===

/// Convert the value of an environment variable to the type that its key requires. The items of a list are separated by
/// commas. They are strings, because the types of their keys are not known here.
pub(super) fn from_variable<'t>(
    text: &'t str,
    required: RequiredType,
    span: &Range<usize>,
    path: &[String],
) -> Option<DeValue<'t>> {
    match required {
        RequiredType::Integer | RequiredType::Number | RequiredType::Boolean | RequiredType::Other => scalar(text),
        RequiredType::List => {
            let item = |text: &'t str| Spanned::new(span.clone(), DeValue::String(text.into()));
            Some(DeValue::Array(split_list(text, path).into_iter().map(item).collect()))
        }
        RequiredType::Text | RequiredType::Table => None,
    }
}

/// Split a list item that consists of one environment variable: `["${NETWORKS}"]`. The value of the variable may have
/// several items, separated by commas. `written` is the item before the substitution, and `text` is the value.
pub(super) fn list_items<'t>(written: &str, text: &'t str, keys: &[String]) -> Vec<&'t str> {
    let is_variable = written.starts_with("${") && written.find('}') == Some(written.len() - 1);
    if is_variable { split_list(text, keys) } else { vec![text] }
}

fn split_list<'t>(text: &'t str, keys: &[String]) -> Vec<&'t str> {
    if keys.iter().any(|key| KEYS_WITH_COMMAS.contains(&key.as_str())) {
        return vec![text];
    }
    text.split(',').map(str::trim).collect()
}

/// Return whether the items of a list may be strings.
pub(super) fn has_text_items(list: &Value) -> bool {
    let items = &list["items"];
    let mut forms = items["anyOf"].as_array().into_iter().flatten();
    [RequiredType::Text, RequiredType::Other].contains(&RequiredType::from_schema(items))
        && (items["anyOf"].is_null() || forms.any(|form| form["type"] == "string" || form["enum"].is_array()))
}
