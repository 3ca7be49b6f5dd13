//! JSON Schemas of the configuration files, generated from their types. Editors use the schemas, and the tables in the
//! documentation are generated from them.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use crate::config::gateway::{Config, Consumers};

/// The kinds of configuration files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    /// `gateway.toml` and the files that it includes.
    Gateway,
    /// A consumers file.
    Consumers,
}

impl FileKind {
    /// Return the kind of the file that contains a value at this path.
    pub(super) fn of(path: &[&str]) -> Self {
        if matches!(path.first(), Some(&("consumer" | "group"))) { FileKind::Consumers } else { FileKind::Gateway }
    }

    /// Return the schema of the file, with the attributes `secret`.
    pub(super) fn schema(self) -> &'static Value {
        static GATEWAY: LazyLock<Value> = LazyLock::new(|| root_schema::<Config>("").to_value());
        static CONSUMERS: LazyLock<Value> = LazyLock::new(|| root_schema::<Consumers>("").to_value());
        match self {
            FileKind::Gateway => &GATEWAY,
            FileKind::Consumers => &CONSUMERS,
        }
    }

    /// Return the schema of the value at a path, or `None` if there is no such key. Each segment of the path is a key,
    /// or the index of a list item. Indices may be omitted.
    pub(super) fn value_schema<S: AsRef<str>>(self, path: &[S]) -> Option<&'static Value> {
        path.iter().try_fold(self.schema(), |schema, segment| Some(child(schema, segment.as_ref())?.schema))
    }

    /// Return the keys of the table at a path, in the order of the manual.
    pub(super) fn keys<S: AsRef<str>>(self, path: &[S]) -> Vec<&'static str> {
        let properties = self.value_schema(path).and_then(properties);
        properties.into_iter().flat_map(Map::keys).map(String::as_str).collect()
    }
}

/// Return whether the entries of a top-level table of `gateway.toml` have names: `[limit.NAME]`.
pub(super) fn is_named_table(table: &str) -> bool {
    FileKind::Gateway.schema()["properties"][table]["additionalProperties"].is_object()
}

/// Return whether a top-level table has several entries, each with a name (`[limit.NAME]`) or a position (`[[route]]`).
pub(super) fn has_entries(table: &str) -> bool {
    let schema = &FileKind::of(&[table]).schema()["properties"][table];
    is_named_table(table) || schema["items"]["properties"].is_object()
}

/// A value below a table or list.
#[derive(Clone, Copy)]
pub(super) struct Child {
    pub(super) schema: &'static Value,
    /// Whether the administrator chooses the name of the value, such as that of a limit.
    pub(super) is_name: bool,
}

/// Return the schema of a key or of a list item.
pub(super) fn child(schema: &'static Value, segment: &str) -> Option<Child> {
    let forms = || schema["anyOf"].as_array().into_iter().flatten();
    let child_of = |schema, is_name| Some(Child { schema, is_name });
    match (&schema["properties"][segment], &schema["items"], &schema["additionalProperties"]) {
        (key @ Value::Object(_), ..) => child_of(key, false),
        (_, items @ Value::Object(_), _) if segment.parse::<usize>().is_ok() => child_of(items, false),
        (_, items @ Value::Object(_), _) => child(items, segment),
        (.., entry @ Value::Object(_)) => child_of(entry, true),
        _ => forms().find_map(|form| child(form, segment)),
    }
}

/// Return the keys of a table and their schemas. If the table has a short form, or is the item of a list, return the
/// keys of the table itself.
fn properties(schema: &'static Value) -> Option<&'static Map<String, Value>> {
    let forms = || schema["anyOf"].as_array().into_iter().flatten();
    schema["properties"].as_object().or_else(|| {
        schema["items"].as_object().map(|_| &schema["items"]).into_iter().chain(forms()).find_map(properties)
    })
}

/// Return the schema of `gateway.toml`.
pub fn gateway() -> Schema {
    published(root_schema::<Config>("gateway.toml of Sluicegate"))
}

/// Return the schema of `consumers.toml`.
pub fn consumers() -> Schema {
    published(root_schema::<Consumers>("consumers.toml of Sluicegate"))
}

/// Generate a JSON Schema without references. It uses draft 07. All editors support this draft, but not all editors
/// support references.
fn root_schema<T: JsonSchema>(title: &str) -> Schema {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.with_transform(TomlSchema).into_generator().into_root_schema_for::<T>();
    schema.insert("title".to_owned(), title.into());
    schema
}

/// Remove the attributes `secret`, which only `secrets.rs` reads.
fn published(mut schema: Schema) -> Schema {
    fn remove_marks(schema: &mut Schema) {
        schema.remove("secret");
        transform_subschemas(&mut remove_marks, schema);
    }
    remove_marks(&mut schema);
    schema
}

/// The end of the pattern of a string: the value may contain environment variables.
pub(super) const VARIABLE_PATTERN: &str = r"|\$\{";

/// Adapts a schema to TOML configuration files: TOML has no null, unknown keys are errors, and any string may contain
/// `${NAME}`.
#[derive(Debug, Clone)]
struct TomlSchema;

impl Transform for TomlSchema {
    fn transform(&mut self, schema: &mut Schema) {
        if let Some(object) = schema.as_object_mut() {
            remove_null(object);
            if let Some(Value::String(text)) = object.get_mut("description") {
                // Join the lines of the doc comment.
                *text = text.replace('\n', " ");
            }
            // Omit the default of a table, because it only repeats the defaults of its keys. Omit the default `[]`,
            // because an absent list is always empty.
            let is_redundant_default =
                |key: &str, value: &Value| key == "default" && (value.is_object() || *value == json!([]));
            object.retain(|key, value| key != "format" && !value.is_null() && !is_redundant_default(key, value));
            if object.contains_key("properties") {
                object.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
            let is_text = object.get("type").is_some_and(|kind| kind == "string");
            if let Some(Value::String(pattern)) = object.get_mut("pattern").filter(|_| is_text) {
                pattern.push_str(VARIABLE_PATTERN);
            }
            let is_enumerated = object.contains_key("enum");
            if is_text && let Some(variants) = object.remove("enum") {
                object.insert("anyOf".to_owned(), json!([{ "enum": variants }, { "pattern": r"\$\{" }]));
            }
            // A value of another type may come from an environment variable, in quotes.
            let is_list_of_values = || {
                let items = object.get("items").and_then(|items| items["type"].as_str());
                matches!(items, Some("string" | "integer"))
            };
            if let Some(Value::String(kind)) = object.get("type")
                && (matches!(&**kind, "integer" | "number" | "boolean") || kind == "array" && is_list_of_values())
                && !is_enumerated
            {
                let kinds = json!([kind, "string"]);
                object.insert("type".to_owned(), kinds);
                object.insert("pattern".to_owned(), r"\$\{".into());
            }
        }
        transform_subschemas(self, schema);
    }
}

/// Remove `null` from the allowed types. An optional key may be absent, but not null.
fn remove_null(object: &mut Map<String, Value>) {
    if let Some(Value::Array(kinds)) = object.get_mut("type") {
        kinds.retain(|kind| kind != "null");
        if let [only] = &kinds[..] {
            let only = only.clone();
            object.insert("type".to_owned(), only);
        }
    }
    let Some(Value::Array(forms)) = object.get_mut("anyOf") else { return };
    forms.retain(|form| form.get("type").is_none_or(|kind| kind != "null"));
    if let [only] = &mut forms[..] {
        let only = only.take();
        object.remove("anyOf");
        for (key, value) in only.as_object().into_iter().flatten() {
            // Do not replace attributes of the key, because they take precedence over those of its type.
            object.entry(key).or_insert_with(|| value.clone());
        }
    }
}
