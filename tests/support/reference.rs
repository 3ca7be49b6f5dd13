//! The parts of the documentation that are generated from the code: the JSON Schemas and the tables in
//! docs/reference/configuration.md from the configuration types, and the table of endpoints in
//! docs/reference/admin-api.md.

use serde_json::Value;
use sluicegate::admin::api::ENDPOINTS;
use sluicegate::config::file_schema;

const BEGIN: &str = "<!-- keys of ";
const END: &str = "<!-- end of keys -->";

/// Return the JSON Schemas with their file names in docs/.
pub fn schemas() -> Vec<(&'static str, String)> {
    let text = |schema| serde_json::to_string_pretty(&schema).unwrap() + "\n";
    vec![
        ("gateway.schema.json", text(file_schema::gateway())),
        ("consumers.schema.json", text(file_schema::consumers())),
    ]
}

/// Return the page with regenerated tables. A table is between `<!-- keys of PATH -->` and the end mark.
pub fn filled(page: &str) -> String {
    let (gateway, consumers) = (file_schema::gateway().to_value(), file_schema::consumers().to_value());
    let mut pieces = page.split(BEGIN);
    let mut out = pieces.next().unwrap().to_owned();
    for piece in pieces {
        let (path, rest) = piece.split_once(" -->").expect("a path");
        let (_, after) = rest.split_once(END).unwrap_or_else(|| panic!("`{BEGIN}{path}` has no `{END}`"));
        let root = if matches!(path, "consumer" | "group") { &consumers } else { &gateway };
        let table = table(inner(&root["properties"][path]).1);
        out.push_str(&format!("{BEGIN}{path} -->\n{table}{END}{after}"));
    }
    out
}

/// Return the page of the admin API with a regenerated table of endpoints.
pub fn with_endpoints(page: &str) -> String {
    let (before, rest) = page.split_once("<!-- endpoints -->\n").expect("the page has a mark for the endpoints");
    let (_, after) = rest.split_once("<!-- end of endpoints -->").expect("the page has an end mark");
    let rows = ENDPOINTS.iter().map(|one| format!("| {} | `{}` | 200: {} |\n", one.methods(), one.path, one.success));
    let table = format!("| method | path | success |\n|---|---|---|\n{}", rows.collect::<String>());
    format!("{before}<!-- endpoints -->\n{table}<!-- end of endpoints -->{after}")
}

/// Return the paths of all generated tables of a page.
pub fn sections(page: &str) -> Vec<&str> {
    page.split(BEGIN).skip(1).map(|piece| piece.split(" -->").next().unwrap()).collect()
}

/// Unwrap lists, maps and alternatives. Return the schema of the table that they contain, and the text that joins the
/// path of the value to a key of this table, such as `[].`.
fn inner(schema: &Value) -> (&'static str, &Value) {
    let forms = schema["anyOf"].as_array().into_iter().flatten();
    if schema["properties"].is_object() {
        (".", schema)
    } else if schema["items"].is_object() {
        ("[].", inner(&schema["items"]).1)
    } else if schema["additionalProperties"].is_object() {
        (".NAME.", inner(&schema["additionalProperties"]).1)
    } else if let Some(found) = forms.map(inner).find(|(_, form)| form["properties"].is_object()) {
        found
    } else {
        ("", &Value::Null)
    }
}

/// Return the table of the keys. It is empty if another section describes the keys, as for the defaults of routes.
fn table(schema: &Value) -> String {
    if !schema["properties"].is_object() {
        return String::new();
    }
    let mut out = "| key | type | default | meaning |\n|---|---|---|---|\n".to_owned();
    rows("", schema, &mut out);
    out
}

fn rows(prefix: &str, schema: &Value, out: &mut String) {
    let required = |key: &str| schema["required"].as_array().is_some_and(|keys| keys.iter().any(|one| one == key));
    for (key, value) in schema["properties"].as_object().into_iter().flatten() {
        let default = match &value["default"] {
            Value::Null if required(key) => "required".to_owned(),
            Value::Null => "–".to_owned(),
            default => format!("`{default}`"),
        };
        let meaning = value["description"].as_str().unwrap_or_else(|| panic!("`{prefix}{key}` has no description"));
        let cells = [format!("`{prefix}{key}`"), kind(value), default, meaning.to_owned()];
        out.push_str(&format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | ")));
        let (joint, table) = inner(value);
        rows(&format!("{prefix}{key}{joint}"), table, out);
    }
}

/// Return a description of the type of a value.
fn kind(schema: &Value) -> String {
    let quoted = |words: &Value| words.as_array().unwrap().iter().map(|word| format!("`{word}`")).collect::<Vec<_>>();
    if let Some(forms) = schema["anyOf"].as_array() {
        let words = forms.iter().find(|form| form["enum"].is_array());
        let forms = || forms.iter().map(kind).collect::<Vec<_>>().join(" or ");
        return words.map_or_else(forms, |words| quoted(&words["enum"]).join(", "));
    }
    if schema["enum"].is_array() {
        return quoted(&schema["enum"]).join(", ");
    }
    let pattern = schema["pattern"].as_str().unwrap_or_default();
    // Each value may also be a string with an environment variable.
    match schema["type"].as_str().or(schema["type"][0].as_str()).unwrap_or_default() {
        "string" if pattern.contains("KiB") => "size",
        "string" if pattern.contains("month") => "quota",
        "string" if pattern.contains("ms|s|m") => "duration",
        "array" => return format!("list: {}", kind(&schema["items"])),
        "object" => return "table".to_owned(),
        "integer" => return whole(schema["minimum"].as_i64(), schema["maximum"].as_i64()),
        other => other,
    }
    .to_owned()
}

fn whole(least: Option<i64>, most: Option<i64>) -> String {
    match (least, most) {
        (Some(least), Some(most)) if most <= 1_000_000 => format!("integer, {least} to {most}"),
        (Some(least), _) => format!("integer, from {least}"),
        _ => "integer".to_owned(),
    }
}
