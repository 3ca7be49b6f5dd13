//! Reads a configuration file: parses the TOML, substitutes environment variables, deserializes, and collects unknown
//! keys.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use serde::de::value::Error;
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, de, forward_to_deserialize_any};
use serde_ignored::Path as KeyPath;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::error::{FileIssues, Issue};
use crate::config::shorthand::{CostTable, ServerTable};
use crate::config::tables::{
    DirectResponse, Eject, HeaderRules, Health, Limit, LimitVariant, Redirect, Route, Upstream, UpstreamTls,
};
use crate::config::{
    Admin, ApiKey, Certificate, ClientIp, Config, Consumer, Consumers, Jwt, Listener, ListenerTls, Log, Server, Store,
    StoreTls,
};

/// A parsed file, with the issues found so far.
#[derive(Debug)]
pub struct ParsedFile<T> {
    /// The deserialized values.
    pub value: T,
    /// Text of the file.
    pub text: String,
    /// Unknown keys, and invalid or unset environment variables.
    pub issues: Vec<Issue>,
}

/// Returns the value of an environment variable.
pub type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Read `gateway.toml`.
///
/// # Errors
/// The file cannot be read, is not valid TOML, or has a value of the wrong type.
pub fn read_gateway(path: &Path, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, FileIssues> {
    let text = std::fs::read_to_string(path).map_err(|error| unreadable_file(path, &error, MISSING_GATEWAY_HINT))?;
    parse(path, text, environment, false)
}

/// Parse `text` as the content of `gateway.toml`.
///
/// # Errors
/// The text is not valid TOML, or has a value of the wrong type.
pub fn parse_gateway(path: &Path, text: String, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, FileIssues> {
    parse(path, text, environment, false)
}

/// Parse `content` as the content of `consumers.toml`.
///
/// # Errors
/// The content is not UTF-8 or not valid TOML, or has a value of the wrong type.
pub fn parse_consumers(
    path: &Path,
    content: &[u8],
    environment: EnvLookup<'_>,
) -> Result<ParsedFile<Consumers>, FileIssues> {
    let text = String::from_utf8(content.to_vec());
    let invalid = |error| {
        unreadable_file(path, &std::io::Error::new(std::io::ErrorKind::InvalidData, error), MISSING_CONSUMERS_HINT)
    };
    let text = text.map_err(invalid)?;
    parse(path, text, environment, true)
}

/// Hint if `gateway.toml` does not exist.
const MISSING_GATEWAY_HINT: &str = "name the file with --config FILE, or create one with `sluicegate init`";

/// Hint if `consumers.toml` does not exist.
pub const MISSING_CONSUMERS_HINT: &str = "`sluicegate key new --consumer NAME --create` creates it";

/// Create the issue for a file that cannot be read. `missing_hint` is the hint if the file does not exist.
pub fn unreadable_file(path: &Path, error: &std::io::Error, missing_hint: &str) -> FileIssues {
    let hint = match error.kind() {
        std::io::ErrorKind::NotFound => missing_hint,
        std::io::ErrorKind::InvalidData => "the file must be UTF-8 text",
        _ => "the gateway needs permission to read it",
    };
    let issue = Issue { span: None, message: format!("cannot be read: {error}"), hint: Some(hint.to_owned()) };
    FileIssues { path: path.to_owned(), text: String::new(), issues: vec![issue] }
}

fn parse<T: DeserializeOwned>(
    path: &Path,
    text: String,
    environment: EnvLookup<'_>,
    consumers: bool,
) -> Result<ParsedFile<T>, FileIssues> {
    let file_issues = |text: &str, issues| FileIssues { path: path.to_owned(), text: text.to_owned(), issues };
    let typed = |error: &toml::de::Error| {
        let message = error.message().replace('\n', ", ");
        let hint = type_hint(&message).map(str::to_owned);
        file_issues(&text, vec![Issue { span: Some(error.span().unwrap_or(0..0)), message, hint }])
    };
    let mut table = DeTable::parse(&text).map_err(|error| typed(&error))?;
    let mut issues = Vec::new();
    for (_, value) in table.get_mut().iter_mut() {
        substitute_env(value, environment, &mut issues);
    }
    let spans = table.clone();
    let mut ignored = Vec::new();
    let value =
        serde_ignored::deserialize(toml::de::Deserializer::from(table), |path| ignored.push(key_segments(&path)))
            .map_err(|error| typed(&error))?;
    for path in ignored {
        let (message, hint) = unknown_key(&path, consumers);
        issues.push(Issue { span: key_span(spans.get_ref(), &path), message, hint });
    }
    Ok(ParsedFile { value, text, issues })
}

/// Return a hint for common type errors.
fn type_hint(message: &str) -> Option<&'static str> {
    let (found, expected) = message.strip_prefix("invalid type: ")?.split_once(", expected ")?;
    match (found.split(' ').next()?, expected) {
        ("map", "a sequence") => Some("an array of tables has two brackets: [[route]], [[listener]]"),
        (_, "a sequence") => Some("write a list in brackets: [\"…\"]"),
        ("integer" | "floating", "a string" | "string") => Some("put it in quotes, with its unit: \"100/min\", \"5s\""),
        ("string", _) => Some("remove the quotes"),
        _ => None,
    }
}

/// Replace `${NAME}` and `${NAME:-default}` in every string. This happens after parsing, so that a value cannot become
/// TOML syntax.
fn substitute_env(value: &mut Spanned<DeValue<'_>>, environment: EnvLookup<'_>, issues: &mut Vec<Issue>) {
    let span = value.span();
    match value.get_mut() {
        DeValue::String(text) if text.contains("${") => {
            let mut out = String::new();
            let mut rest = &**text;
            while let Some((before, after)) = rest.split_once("${") {
                out.push_str(before);
                let Some((expression, behind)) = after.split_once('}') else {
                    issues.push(Issue::new(span, "`${` without `}`"));
                    return;
                };
                let (name, default) = match expression.split_once(":-") {
                    Some((name, default)) => (name, Some(default)),
                    None => (expression, None),
                };
                match environment(name).filter(|value| !value.is_empty() || default.is_none()) {
                    Some(found) => out.push_str(&found),
                    None => match default {
                        Some(default) => out.push_str(default),
                        None => issues.push(
                            Issue::new(span.clone(), format!("environment variable `{name}` is not set"))
                                .with_hint(format!("set it, or give a default: ${{{name}:-value}}")),
                        ),
                    },
                }
                rest = behind;
            }
            out.push_str(rest);
            *text = out.into();
        }
        DeValue::Array(items) => items.iter_mut().for_each(|item| substitute_env(item, environment, issues)),
        DeValue::Table(table) => table.iter_mut().for_each(|(_, value)| substitute_env(value, environment, issues)),
        _ => {}
    }
}

fn key_segments(path: &KeyPath<'_>) -> Vec<String> {
    match path {
        KeyPath::Root => Vec::new(),
        KeyPath::Seq { parent, index } => join(parent, index.to_string()),
        // `toml::Spanned` wraps its value in a struct with a reserved field name.
        KeyPath::Map { parent, key } if key.starts_with("$__serde_spanned") => key_segments(parent),
        KeyPath::Map { parent, key } => join(parent, key.clone()),
        KeyPath::Some { parent } | KeyPath::NewtypeStruct { parent } | KeyPath::NewtypeVariant { parent } => {
            key_segments(parent)
        }
    }
}

fn join(parent: &KeyPath<'_>, last: String) -> Vec<String> {
    let mut all = key_segments(parent);
    all.push(last);
    all
}

/// Return the span of the last key of a path.
fn key_span(table: &DeTable<'_>, path: &[String]) -> Option<std::ops::Range<usize>> {
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

/// Planned keys that have no effect yet, by table. They are rejected as not supported instead of unknown.
const UNSUPPORTED_KEYS: &[(&str, &[&str])] =
    &[("listener", &["http3"]), ("api_key", &["query", "bearer"]), ("jwt", &["jwks_url"])];

/// Return the name of the table at a path and its supported keys.
fn known_keys(path: &[String]) -> (&'static str, &'static [&'static str]) {
    let names: Vec<_> = path.iter().map(String::as_str).filter(|name| name.parse::<usize>().is_err()).collect();
    match names[..] {
        [] => ("", field_names::<Config>()),
        ["server"] => ("server", field_names::<Server>()),
        ["listener"] => ("listener", field_names::<Listener>()),
        ["listener", "tls"] => ("listener tls", field_names::<ListenerTls>()),
        ["listener", "tls", "certificates"] => ("certificate", field_names::<Certificate>()),
        ["admin"] => ("admin", field_names::<Admin>()),
        ["log"] => ("log", field_names::<Log>()),
        ["store"] => ("store", field_names::<Store>()),
        ["store", "tls"] => ("store tls", field_names::<StoreTls>()),
        ["client_ip"] => ("client_ip", field_names::<ClientIp>()),
        ["api_key"] => ("api_key", field_names::<ApiKey>()),
        ["jwt"] => ("jwt", field_names::<Jwt>()),
        ["limit", _] => ("limit", field_names::<Limit>()),
        ["limit", _, "cost"] => ("cost", field_names::<CostTable>()),
        ["limit", _, "tiers", _] | ["consumer", "limit", _] => ("size", field_names::<LimitVariant>()),
        ["upstream", _] => ("upstream", field_names::<Upstream>()),
        ["upstream", _, "tls"] => ("upstream tls", field_names::<UpstreamTls>()),
        ["upstream", _, "health_check"] => ("health_check", field_names::<Health>()),
        ["upstream", _, "outlier_detection"] => ("outlier_detection", field_names::<Eject>()),
        ["upstream", _, "servers"] => ("servers", field_names::<ServerTable>()),
        ["route"] => ("route", field_names::<Route>()),
        ["route", "request_headers" | "response_headers"] => ("header rules", field_names::<HeaderRules>()),
        ["route", "respond"] => ("respond", field_names::<DirectResponse>()),
        ["route", "redirect"] => ("redirect", field_names::<Redirect>()),
        ["consumer"] => ("consumer", field_names::<Consumer>()),
        _ => ("", &[]),
    }
}

/// Return the message and the hint for an unknown key.
pub(super) fn unknown_key(path: &[String], consumers: bool) -> (String, Option<String>) {
    let Some((key, parents)) = path.split_last() else { return ("unknown key".to_owned(), None) };
    let (name, known) = match (consumers, parents) {
        (true, []) => ("", field_names::<Consumers>()),
        _ => known_keys(parents),
    };
    if UNSUPPORTED_KEYS.iter().any(|(table, keys)| *table == name && keys.contains(&key.as_str())) {
        return (format!("`{key}` is not supported yet"), Some("remove it: this version would ignore it".to_owned()));
    }
    let hint = match closest_name(key, known.iter().copied()) {
        Some(near) => Some(format!("did you mean `{near}`?")),
        None if known.is_empty() => None,
        None => Some(format!("known keys: {}", known.join(", "))),
    };
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

/// Return the field names of a struct, as its `Deserialize` implementation passes them to the deserializer.
fn field_names<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    struct FieldNames<'a>(&'a mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for FieldNames<'_> {
        type Error = Error;
        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(de::Error::custom("field names only"))
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Error> {
            *self.0 = fields;
            Err(de::Error::custom("field names only"))
        }
        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut names: &'static [&'static str] = &[];
    // `FieldNames` always returns an error after it has recorded the names.
    let _ = T::deserialize(FieldNames(&mut names));
    names
}

/// Path and content of a file at the time when it was read.
#[derive(Clone)]
pub struct FileSnapshot {
    /// Path of the file.
    pub path: PathBuf,
    /// Content of the file.
    pub content: Vec<u8>,
}

/// Omits the content, which may be secret.
impl fmt::Debug for FileSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("path", &self.path).finish_non_exhaustive()
    }
}

impl FileSnapshot {
    /// Read a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(FileSnapshot { path: path.to_owned(), content: fs::read(path)? })
    }
}
