//! Read a configuration file: parse the TOML text, substitute environment variables, deserialize the values, and
//! collect unknown keys.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use serde::de::value::Error;
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, de, forward_to_deserialize_any};
use serde_ignored::Path as KeyPath;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::include;
use crate::config::include::Sources;
use crate::config::secrets::{has_secret, is_secret, secret_ranges};
use crate::config::shorthand::{CostTable, KeyTable, ServerTable};
use crate::config::tables::{
    Cors, DirectResponse, Eject, HeaderRules, Health, Limit, LimitVariant, MatchRules, Mirror, Redirect,
    ResponseHeaderRules, Route, Upstream, UpstreamTls, ValueRule,
};
use crate::config::{
    Acme, Admin, Auth, AuthCache, Certificate, ClientIp, Config, Consumer, Consumers, ExternalAccount, Listener,
    ListenerTls, Log, Server, Store, StoreSentinel, StoreTls, Tiers,
};

/// A parsed file, with the issues that parsing found.
#[derive(Debug)]
pub struct ParsedFile<T> {
    /// The deserialized values of the file.
    pub value: T,
    /// Texts of the file and of the files that it includes.
    pub sources: Sources,
    /// Unknown keys, and errors of `include`.
    pub issues: Vec<Issue>,
    /// The unknown keys. They may cause further errors.
    pub unknown_keys: UnknownKeys,
    /// Values with an environment variable that is not set or has no closing brace.
    pub unresolved: Vec<UnresolvedValue>,
    /// Values that are valid, but may not have the intended meaning.
    pub warnings: Vec<Issue>,
}

/// A value whose environment variable is not set or has no closing brace. A placeholder replaces a variable that is not
/// set.
#[derive(Debug)]
pub struct UnresolvedValue {
    /// Path of the value: the keys that lead to it, joined by dots.
    key: String,
    /// Whether `${` has no closing `}`.
    is_malformed: bool,
    issue: Issue,
}

impl UnresolvedValue {
    /// Return whether this span contains the value.
    pub(crate) fn is_within(&self, span: &Range<usize>) -> bool {
        self.issue.span.as_ref().is_some_and(|value| contains(span, value))
    }
}

/// The unknown keys of a file. An unknown key may cause further errors. For example, if it is a misspelling, the key
/// that the operator meant is missing.
#[derive(Debug, Default)]
pub struct UnknownKeys {
    /// Spans of the values of misspelled keys, and of all nested values. A misspelled key is an unknown key that is
    /// similar to a known key. Its value is validated as the value of the known key. Errors in this value are not
    /// reported until the operator corrects the key, because the report recognizes secrets by the names of their keys.
    misspelled: Vec<Range<usize>>,
    /// Ranges of the entries (such as routes) that contain an unknown key without a similar known key.
    entries: Vec<Range<usize>>,
    /// Whether the file contains an unknown key without a similar known key.
    has_unknown: bool,
    /// The names that unknown tables define, such as `api` in `[backend.api]`.
    names: HashSet<String>,
}

impl UnknownKeys {
    /// Return whether all unknown keys are misspellings of known keys.
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_unknown
    }

    /// Return whether the table at this span is in an entry with an unknown key that is not a misspelling.
    pub(crate) fn are_in(&self, table: &Range<usize>) -> bool {
        self.entries.iter().any(|entry| contains(entry, table))
    }

    /// Return whether an issue may have been caused by an unknown key in the same entry.
    pub(crate) fn may_be_missing_in(&self, issue: &Issue) -> bool {
        issue.span.as_ref().is_some_and(|span| self.are_in(span))
    }

    /// Return whether an issue is about the value of a misspelled key.
    pub(crate) fn hide(&self, issue: &Issue) -> bool {
        issue.span.as_ref().is_some_and(|span| self.misspelled.iter().any(|outer| contains(outer, span)))
    }

    /// Return whether an unknown table defines this name.
    pub(crate) fn define(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    fn record_misspelled(&mut self, value: &Spanned<DeValue<'_>>) {
        self.misspelled.push(value.span());
        match value.get_ref() {
            DeValue::Table(table) => table.iter().for_each(|(_, value)| self.record_misspelled(value)),
            DeValue::Array(items) => items.iter().for_each(|item| self.record_misspelled(item)),
            _ => {}
        }
    }

    /// Record an unknown key without a similar known key.
    fn record_unknown(&mut self, all: &DeTable<'_>, path: &[String]) {
        self.has_unknown = true;
        let Some((_, parents)) = path.split_last() else { return };
        let has_name = parents.first().is_some_and(|table| ENTRY_TABLES.contains(&table.as_str()));
        let entry = parents.get(..if has_name { 2 } else { 1 }).unwrap_or(parents);
        self.entries.extend(value_at(all, entry).map(extent));
        if parents.is_empty() {
            let table = value_at(all, path).and_then(|value| value.get_ref().as_table());
            self.names.extend(table.into_iter().flatten().map(|(name, _)| name.get_ref().to_string()));
        }
    }
}

/// Tables that have several entries. Each entry has a name (`[limit.NAME]`) or a position (`[[route]]`).
const ENTRY_TABLES: [&str; 7] = ["listener", "route", "limit", "upstream", "auth", "notify", "consumer"];

/// Return the range of a value in the file, including all nested values.
fn extent(value: &Spanned<DeValue<'_>>) -> Range<usize> {
    let join = |one: Range<usize>, other: Range<usize>| one.start.min(other.start)..one.end.max(other.end);
    match value.get_ref() {
        DeValue::Table(table) => table.iter().map(|(_, value)| extent(value)).fold(value.span(), join),
        DeValue::Array(items) => items.iter().map(extent).fold(value.span(), join),
        _ => value.span(),
    }
}

/// How to report environment variables that are not set and have no default value.
#[derive(Debug, Clone, Copy)]
pub enum UnsetVariables<'a> {
    /// Report the variables as errors.
    Error,
    /// Report a variable as a warning if its placeholder is a valid value, such as for a password. Otherwise, report an
    /// error.
    WarnIfValid,
    /// Report a variable as an error if it is in the value of one of these keys, or of a key nested in them. Otherwise,
    /// report a warning.
    WarnExcept(&'a [&'a str]),
}

/// Divide issues into errors and warnings. Drop issues that an unset environment variable causes, because the variable
/// itself is already reported. `warnings` are the warnings of the parser.
pub fn resolve_issues(
    sources: &Sources,
    issues: Vec<Issue>,
    unresolved: Vec<UnresolvedValue>,
    mut warnings: Vec<Issue>,
    policy: UnsetVariables<'_>,
) -> (Vec<Issue>, Vec<Issue>) {
    let causes = |value: &UnresolvedValue, issue: &Issue| match (&value.issue.span, &issue.span) {
        (Some(value), Some(issue)) => {
            let line = sources.line_before(issue.start);
            // A value can cause an issue of the list or inline table that contains it, but not an issue of a `[table]`.
            // A `[table]` is recognized by its span, which starts at the start of a line.
            contains(value, issue) || (contains(issue, value) && !line.trim().is_empty())
        }
        _ => false,
    };
    let (dropped, mut errors): (Vec<_>, Vec<_>) =
        issues.into_iter().partition(|issue| unresolved.iter().any(|value| causes(value, issue)));
    for error in &mut errors {
        let same = |warning: &&Issue| matches!((&warning.span, &error.span), (Some(warning), Some(error)) if contains(warning, error));
        if let Some(warning) = warnings.iter().find(same) {
            error.hint.clone_from(&warning.hint);
        }
    }
    for value in unresolved {
        let is_below =
            |key: &&str| value.key.strip_prefix(*key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let is_warning = match policy {
            UnsetVariables::Error => false,
            UnsetVariables::WarnIfValid => !dropped.iter().any(|issue| causes(&value, issue)),
            UnsetVariables::WarnExcept(needed) => !needed.iter().any(is_below),
        };
        if is_warning && !value.is_malformed { warnings.push(value.issue) } else { errors.push(value.issue) }
    }
    (errors, warnings)
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Return the value of an environment variable, or `None` if it is not set.
pub type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Read `gateway.toml` and the files that it includes.
///
/// # Errors
/// A file cannot be read, is not valid TOML, or has a value of the wrong type.
pub fn read_gateway(path: &Path, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, ConfigError> {
    let content = fs::read(path).map_err(|error| unreadable_gateway_file(path, &error));
    let text = content.and_then(|content| utf8_text(path, content));
    parse_gateway(path, text.map_err(|file| ConfigError { files: vec![file] })?, environment)
}

/// Parse `text` as the content of `gateway.toml`, and the files that it includes.
///
/// # Errors
/// See [`read_gateway`].
pub fn parse_gateway(path: &Path, text: String, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, ConfigError> {
    let parsed =
        include::read(path, text, environment).and_then(|(sources, issues)| parse(sources, issues, environment, false));
    parsed.map_err(|files| ConfigError { files })
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
    let sources = Sources::new(path, utf8_text(path, content.to_vec())?);
    parse(sources, Vec::new(), environment, true).map_err(|files| {
        // Parsing ends at the first syntax or type error, so there is only one error to report.
        files.into_iter().next().unwrap_or_else(|| FileIssues::from_message(path, "cannot be parsed"))
    })
}

/// Return the content of a file as text.
///
/// # Errors
/// The content is not UTF-8. The span of the issue is the first invalid byte.
pub(crate) fn utf8_text(path: &Path, content: Vec<u8>) -> Result<String, FileIssues> {
    String::from_utf8(content).map_err(|error| {
        let start = error.utf8_error().valid_up_to();
        let content = error.as_bytes();
        let encoding =
            if content.starts_with(b"\xff\xfe") || content.starts_with(b"\xfe\xff") { "utf-16" } else { "latin1" };
        let byte = content.get(start).copied().unwrap_or_default();
        // The text before the invalid byte keeps its offsets. U+FFFD replaces the invalid byte.
        let text = String::from_utf8_lossy(content).into_owned();
        let span = start..start + char::REPLACEMENT_CHARACTER.len_utf8();
        let issue = Issue::new(span, format!("the byte 0x{byte:02x} is not UTF-8"))
            .with_hint(format!("convert the file to UTF-8: iconv -f {encoding} -t utf-8 FILE"));
        FileIssues { path: path.to_owned(), text, issues: vec![issue] }
    })
}

/// File name of the configuration that commands use without `--config`.
pub const DEFAULT_NAME: &str = "gateway.toml";

/// Return ` --config FILE` for the commands in messages. The result is empty if FILE is the default.
pub fn config_option(path: &Path) -> String {
    if path == Path::new(DEFAULT_NAME) { String::new() } else { format!(" {}", config_argument(path)) }
}

/// Return `--config FILE`, quoted for a shell if necessary.
pub fn config_argument(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | '+' | ',' | ':' | '@' | '=');
    match text.chars().all(is_plain) {
        true => format!("--config {text}"),
        false => format!("--config '{}'", text.replace('\'', "'\\''")),
    }
}

/// Create the issue for a main configuration file that cannot be read. If the path is a directory that contains a
/// configuration, the hint names this file.
fn unreadable_gateway_file(path: &Path, error: &io::Error) -> FileIssues {
    let create = format!("create one with `sluicegate init{}`", config_option(path));
    let mut issues = unreadable_file(path, error, &format!("name the file with --config FILE, or {create}"));
    let inside = path.join(DEFAULT_NAME);
    if error.kind() == io::ErrorKind::IsADirectory && inside.is_file() {
        let hint = format!("name the file: {}", config_argument(&inside));
        issues.issues.iter_mut().for_each(|issue| issue.hint = Some(hint.clone()));
    }
    issues
}

/// Return the hint for a consumers file that does not exist. `config_path` is the path of the main configuration file.
pub fn missing_consumers_hint(config_path: &Path) -> String {
    format!("`sluicegate key new --consumer NAME --create{}` creates it", config_option(config_path))
}

/// Create the issue for a file that cannot be read. If the file does not exist, the issue contains `missing_hint`.
pub fn unreadable_file(path: &Path, error: &std::io::Error, missing_hint: &str) -> FileIssues {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => Some(missing_hint.to_owned()),
        io::ErrorKind::IsADirectory => Some("name a file, not a directory".to_owned()),
        io::ErrorKind::PermissionDenied => Some("let the gateway's user read the file".to_owned()),
        _ => None,
    };
    let issue = Issue { span: None, message: format!("cannot be read: {error}"), hint };
    FileIssues { path: path.to_owned(), text: String::new(), issues: vec![issue] }
}

/// Parse the texts of all files, and deserialize their merged tables. `issues` contains the issues of `include`.
///
/// # Errors
/// A text is not valid TOML, or has a value of the wrong type.
fn parse<T: DeserializeOwned>(
    sources: Sources,
    mut issues: Vec<Issue>,
    environment: EnvLookup<'_>,
    consumers: bool,
) -> Result<ParsedFile<T>, Vec<FileIssues>> {
    let mut environment = Environment { variable: environment, unresolved: Vec::new(), warnings: Vec::new() };
    let mut all = DeTable::new();
    let mut faulty = Vec::new();
    for (index, file) in sources.files().iter().enumerate() {
        let table = match DeTable::parse(&file.text) {
            Ok(table) => table,
            Err(error) => {
                let issue = parser_issue(&error, |message, span| syntax_hint(&file.text, message, span));
                faulty.push(FileIssues { path: file.path.clone(), text: file.text.clone(), issues: vec![issue] });
                continue;
            }
        };
        let mut table = include::shift_spans(table.into_inner(), file.start);
        environment.substitute_table(&mut table, &mut Vec::new());
        if index == 0 { all = table } else { include::merge(&mut all, table, &sources, &mut issues) }
    }
    if !faulty.is_empty() {
        return Err(faulty);
    }
    let Environment { unresolved, warnings, .. } = environment;
    let (value, unknown_keys) = deserialize(all, &sources, consumers, &mut issues)?;
    Ok(ParsedFile { value, sources, issues, unknown_keys, unresolved, warnings })
}

/// Deserialize the merged tables of all files, and report unknown keys. Use the value of a misspelled key under the
/// similar known name, so that the known key is not reported as missing.
fn deserialize<T: DeserializeOwned>(
    mut all: DeTable<'_>,
    sources: &Sources,
    consumers: bool,
    issues: &mut Vec<Issue>,
) -> Result<(T, UnknownKeys), Vec<FileIssues>> {
    let (mut value, mut ignored) = deserialize_table(&all, sources)?;
    let mut unknown_keys = UnknownKeys::default();
    // The paths of all reported keys, and the paths of misspelled keys after renaming.
    let (mut reported, mut corrected_paths) = (Vec::<Vec<String>>::new(), Vec::<Vec<String>>::new());
    let is_new = |path: &&Vec<String>, reported: &[Vec<String>], corrected: &[Vec<String>]| {
        !reported.contains(path) && !corrected.iter().any(|parent| path.starts_with(parent))
    };
    while let Some(path) = ignored.iter().find(|path| is_new(path, &reported, &corrected_paths)) {
        let path = &path.clone();
        reported.push(path.clone());
        let replaced = match &path[..] {
            [table] if !consumers => replaced_table(table, &all, sources),
            _ => replaced_key(path, &all, sources),
        };
        let meant = meant_key(path, consumers).filter(|_| replaced.is_none());
        let (message, hint) = replaced.unwrap_or_else(|| unknown_key(path, consumers));
        issues.push(Issue { span: key_span(&all, path), message, hint });
        let mut corrected = all.clone();
        let renamed = meant.and_then(|meant| rename_key(&mut corrected, path, meant));
        // If the value does not have the type of the similar key, the key is not a misspelling.
        match renamed.and_then(|renamed| Some((renamed, deserialize_table(&corrected, sources).ok()?))) {
            Some((renamed, (corrected_value, corrected_ignored))) => {
                value_at(&corrected, &renamed).iter().for_each(|value| unknown_keys.record_misspelled(value));
                corrected_paths.push(renamed);
                (all, value, ignored) = (corrected, corrected_value, corrected_ignored);
            }
            None if is_unsupported(path) => {}
            None => unknown_keys.record_unknown(&all, path),
        }
    }
    Ok((value, unknown_keys))
}

/// Deserialize a table. Also return the paths of its unknown keys.
fn deserialize_table<T: DeserializeOwned>(
    all: &DeTable<'_>,
    sources: &Sources,
) -> Result<(T, Vec<Vec<String>>), Vec<FileIssues>> {
    let mut ignored = Vec::new();
    let table = toml::de::Deserializer::from(Spanned::new(0..sources.main().1.len(), all.clone()));
    let value = serde_ignored::deserialize(table, |path| ignored.push(key_segments(&path))).map_err(|error| {
        sources.by_file(vec![parser_issue(&error, |message, span| {
            type_hint(message, &key_path(all, span).unwrap_or_default())
        })])
    })?;
    Ok((value, ignored))
}

/// Return the value at a path. Each segment is a key, or the index of a list item.
fn value_at<'t, 'd>(table: &'t DeTable<'d>, path: &[String]) -> Option<&'t Spanned<DeValue<'d>>> {
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

/// Rename the last key of a path. Return the new path, or `None` if the table already has a key with the new name.
fn rename_key(all: &mut DeTable<'_>, path: &[String], name: &'static str) -> Option<Vec<String>> {
    let (key, parents) = path.split_last()?;
    let mut table = all;
    let mut parents = parents.iter();
    while let Some(parent) = parents.next() {
        let mut value = table.get_mut(parent.as_str())?.get_mut();
        while let DeValue::Array(items) = value {
            value = items.get_mut(parents.next()?.parse::<usize>().ok()?)?.get_mut();
        }
        let DeValue::Table(inner) = value else { return None };
        table = inner;
    }
    if table.contains_key(name) {
        return None;
    }
    let (old, value) = table.remove_entry(key.as_str())?;
    table.insert(Spanned::new(old.span(), name.into()), value);
    Some([&path[..path.len() - 1], &[name.to_owned()]].concat())
}

/// Return the issue for a syntax or type error.
fn parser_issue(error: &toml::de::Error, hint: impl Fn(&str, &Range<usize>) -> Option<String>) -> Issue {
    let message = error.message().replace('\n', ", ");
    let span = error.span().unwrap_or(0..0);
    let hint = hint(&message, &span);
    Issue { span: Some(span), message, hint }
}

/// Return `text` with its environment variables substituted, or `None` if a variable is not set.
pub(crate) fn substituted(text: &str, environment: EnvLookup<'_>) -> Option<String> {
    let mut environment = Environment { variable: environment, unresolved: Vec::new(), warnings: Vec::new() };
    let text = environment.expand(text, &[], &(0..0));
    environment.unresolved.is_empty().then_some(text)
}

/// Return a hint for two common TOML syntax errors: strings without quotes, and duplicate keys.
fn syntax_hint(text: &str, message: &str, span: &Range<usize>) -> Option<String> {
    let line_start = text.get(..span.start)?.rfind('\n').map_or(0, |at| at + 1);
    let line = text[line_start..].lines().next()?;
    if message.contains("duplicate key") {
        let first = first_definition(&text[..line_start], line)?;
        return Some(format!("the first one is in line {first}"));
    }
    // The value that contains the error begins after the last `=`. In a list, it begins after the last `[` or `,`.
    let offset = (span.start - line_start).min(line.len());
    // The parser may report the position of the `=`, the start of the value, or a position after the value.
    let before = line.get(..offset + usize::from(line[offset..].starts_with('=')))?;
    let equals = before.rfind('=')?;
    let key = before[..equals].rsplit(['{', ',', ' ', '\t']).find(|word| !word.is_empty())?;
    let is_list = line[equals + 1..].trim_start().starts_with('[');
    let start = if is_list { equals + 1 + before[equals + 1..].rfind(['[', ','])? + 1 } else { equals + 1 };
    let value = line[start..].split([',', '}', ']', '#']).next()?.trim();
    if value.is_empty() || value.starts_with(['"', '\'', '[', '{']) || value.ends_with(['"', '\'']) {
        return None;
    }
    let value = if has_secret(line) { "…" } else { value };
    Some(if is_list {
        format!("put strings in quotes: \"{value}\"")
    } else {
        format!("put strings in quotes: {key} = \"{value}\"")
    })
}

/// Return the number of the first line in `before` that defines the same table as `line`, or the same key of the same
/// table.
fn first_definition(before: &str, line: &str) -> Option<usize> {
    let definition = |line: &str| {
        let line = line.trim();
        let end = if line.starts_with('[') { line.rfind(']').map(|at| at + 1) } else { line.find('=') };
        end.map(|end| line[..end].replace([' ', '\t'], ""))
    };
    let name = definition(line)?;
    let mut first = None;
    for (index, line) in before.lines().enumerate() {
        let is_header = line.trim_start().starts_with('[');
        if definition(line).as_ref() == Some(&name) {
            first = first.or(Some(index + 1));
        } else if is_header && !name.starts_with('[') {
            // The following keys belong to another table, so discard the match.
            first = None;
        }
    }
    first
}

/// Keys whose values are durations. Keys that end with `timeout` are durations as well.
const DURATION_KEYS: [&str; 6] =
    ["interval", "base_ejection_time", "slow_start", "max_wait", "max_age", "accept_grace"];

/// Keys whose values are sizes.
const SIZE_KEYS: [&str; 7] =
    ["min_body_rate", "request_buffer", "max_buffered", "inspect_body", "max_header_size", "max_uri", "max_body"];

/// Return a hint for common type errors. `path` contains the keys that lead to the value with the wrong type.
fn type_hint(message: &str, path: &[&str]) -> Option<String> {
    let (found, expected) = message.strip_prefix("invalid type: ")?.split_once(", expected ")?;
    let kind = found.split(' ').next()?;
    let key = path.last().copied().unwrap_or_default();
    let hint = match (kind, expected) {
        ("map", "a sequence") => "an array of tables has two brackets: [[route]], [[listener]]",
        (_, "a sequence") => "write a list in brackets: [\"…\"]",
        ("integer" | "floating", "a string" | "string") => {
            let number = found.split('`').nth(1).unwrap_or_default();
            let value = match key {
                _ if key.is_empty() || is_secret(path, number) => return Some("put the value in quotes".to_owned()),
                "address" => format!("127.0.0.1:{number}"),
                "quota" => format!("{number}/min"),
                key if key.ends_with("timeout") || DURATION_KEYS.contains(&key) => format!("{number}s"),
                key if SIZE_KEYS.contains(&key) => format!("{number}B"),
                _ => number.to_owned(),
            };
            return Some(format!("put the value in quotes: {key} = \"{value}\""));
        }
        ("string", expected) if expected.starts_with("struct ") => {
            return Some(format!("write a table: {key} = {{ … }}"));
        }
        ("string", "i64" | "a boolean" | "bool") => "remove the quotes",
        _ => return None,
    };
    Some(hint.to_owned())
}

/// Return the keys that lead to the value with this span.
fn key_path<'t>(table: &'t DeTable<'_>, span: &Range<usize>) -> Option<Vec<&'t str>> {
    table.iter().find_map(|(key, value)| {
        let mut path = vec![key.get_ref().as_ref()];
        path.extend(inner_key_path(value, span)?);
        Some(path)
    })
}

fn inner_key_path<'t>(value: &'t Spanned<DeValue<'_>>, span: &Range<usize>) -> Option<Vec<&'t str>> {
    match value.get_ref() {
        _ if value.span() == *span => Some(Vec::new()),
        DeValue::Table(table) => key_path(table, span),
        DeValue::Array(items) => items.iter().find_map(|item| inner_key_path(item, span)),
        _ => None,
    }
}

/// Substitutes environment variables, and collects the variables that are not set.
struct Environment<'a> {
    variable: EnvLookup<'a>,
    unresolved: Vec<UnresolvedValue>,
    warnings: Vec<Issue>,
}

impl Environment<'_> {
    fn substitute_table(&mut self, table: &mut DeTable<'_>, path: &mut Vec<String>) {
        for (key, value) in table.iter_mut() {
            path.push(key.get_ref().to_string());
            self.substitute(value, path);
            path.pop();
        }
    }

    /// Replace `${NAME}` and `${NAME:-default}` in every string. `$${` stands for a literal `${`. Variables are
    /// substituted after parsing, so that a value cannot become TOML syntax.
    fn substitute(&mut self, value: &mut Spanned<DeValue<'_>>, path: &mut Vec<String>) {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) => {
                self.warnings.extend(variable_without_braces(text, path, &span));
                if text.contains("${") {
                    *text = self.expand(text, path, &span).into();
                }
            }
            DeValue::Array(items) => items.iter_mut().for_each(|item| self.substitute(item, path)),
            DeValue::Table(table) => self.substitute_table(table, path),
            _ => {}
        }
    }

    fn expand(&mut self, text: &str, path: &[String], span: &Range<usize>) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            if let Some(before) = before.strip_suffix('$') {
                out.push_str(before);
                out.push_str("${");
                rest = after;
                continue;
            }
            out.push_str(before);
            let Some((expression, behind)) = after.split_once('}') else {
                let issue = Issue::new(span.clone(), "`${` without `}`");
                self.unresolved.push(UnresolvedValue { key: path.join("."), is_malformed: true, issue });
                return text.to_owned();
            };
            let (name, default) = match expression.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (expression, None),
            };
            match (self.variable)(name).filter(|value| !value.is_empty() || default.is_none()) {
                // In a header rule, `{…}` is a variable of the request. Escape the braces, so that the value is used
                // literally.
                Some(found) if is_template(path) => out.push_str(&found.replace('{', "{{").replace('}', "}}")),
                Some(found) => out.push_str(&found),
                None => match default {
                    Some(default) => out.push_str(default),
                    None => {
                        // Number the placeholders, so that two of them are never reported as duplicates.
                        out.push_str(&format!("unset{}", self.unresolved.len()));
                        let issue = Issue::new(span.clone(), format!("environment variable `{name}` is not set"))
                            .with_hint(format!("set the variable, or give a default: ${{{name}:-value}}"));
                        self.unresolved.push(UnresolvedValue { key: path.join("."), is_malformed: false, issue });
                    }
                },
            }
            rest = behind;
        }
        out.push_str(rest);
        out
    }
}

/// Return whether `{…}` in the value at this path is a variable of the request.
fn is_template(path: &[String]) -> bool {
    matches!(path, [.., rules, set, _] if set == "set" && matches!(&**rules, "request_headers" | "response_headers"))
}

/// Return a warning if the text contains `$NAME`, which is not substituted. Regular expressions and response bodies may
/// contain `$NAME`.
fn variable_without_braces(text: &str, path: &[String], span: &Range<usize>) -> Option<Issue> {
    const REGEX_SIGNS: [&str; 6] = ["^", "\\", "(", "[^", ".*", ".+"];
    if path.last().is_some_and(|key| key == "body") || REGEX_SIGNS.iter().any(|signs| text.contains(signs)) {
        return None;
    }
    let name = text.match_indices('$').find_map(|(at, _)| {
        let after = &text[at + 1..];
        let end =
            after.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_').unwrap_or(after.len());
        let (name, rest) = after.split_at(end);
        let is_name = name.len() > 1 && !name.starts_with(|c: char| c.is_ascii_digit());
        let is_word = !rest.starts_with(|c: char| c.is_alphanumeric())
            && !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '$');
        (is_name && is_word).then_some(name)
    })?;
    let keys: Vec<_> = path.iter().map(String::as_str).collect();
    // Do not quote the name, because the text may be a password that contains `$`.
    let name = if is_secret(&keys, text) || !secret_ranges(text).is_empty() { "NAME" } else { name };
    let issue = Issue::new(
        span.clone(),
        "`$` without braces is literal text: only `${NAME}` is replaced with an environment variable",
    );
    Some(issue.with_hint(format!("write ${{{name}}} for the environment variable")))
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

/// Keys that are planned but not implemented, by table. The gateway rejects them as "not supported yet" instead of
/// "unknown".
const UNSUPPORTED_KEYS: &[(&str, &[&str])] = &[("listener", &["http3"]), ("auth", &["query"])];

/// Return the message and the hint for a top-level table that must be an `[auth.NAME]` table instead. The hint shows
/// the values of the file in the correct form.
fn replaced_table(table: &str, file: &DeTable<'_>, sources: &Sources) -> Option<(String, Option<String>)> {
    let (provider, kind) = match table {
        "api_key" => ("keys", "api-key"),
        "jwt" => ("tokens", "jwt"),
        _ => return None,
    };
    let mut hint = format!("write\n[auth.{provider}]\nkind = \"{kind}\"");
    let (_, values) = file.iter().find(|(key, _)| key.get_ref() == table)?;
    let known = field_names::<Auth>();
    for (key, value) in values.get_ref().as_table().into_iter().flatten() {
        if known.contains(&&**key.get_ref()) {
            hint += &format!("\n{} = {}", key.get_ref(), sources.text_at(&value.span()).unwrap_or("…"));
        }
    }
    hint += &format!(
        "\nand identify = [\"{provider}\"] on each route with a limit by {kind}, or require = [\"{provider}\"]"
    );
    Some((format!("the table `[{table}]` must be written as a provider, `[auth.NAME]`"), Some(hint)))
}

/// Names that other programs use for `health_check`. If a key has one of these names, the hint suggests `health_check`.
const HEALTH_CHECK_NAMES: [&str; 4] = ["health", "healthcheck", "health_path", "health_uri"];

/// Return the name of the table at this path, and its supported keys.
fn known_keys(path: &[String]) -> (&'static str, &'static [&'static str]) {
    let names: Vec<_> = path.iter().map(String::as_str).filter(|name| name.parse::<usize>().is_err()).collect();
    match names[..] {
        [] => ("", field_names::<Config>()),
        ["server"] => ("server", field_names::<Server>()),
        ["listener"] => ("listener", field_names::<Listener>()),
        ["listener", "tls"] => ("listener tls", field_names::<ListenerTls>()),
        ["listener", "tls", "certificates"] => ("certificate", field_names::<Certificate>()),
        ["acme"] => ("acme", field_names::<Acme>()),
        ["acme", "external_account"] => ("external_account", field_names::<ExternalAccount>()),
        ["admin"] => ("admin", field_names::<Admin>()),
        ["log"] => ("log", field_names::<Log>()),
        ["store"] => ("store", field_names::<Store>()),
        ["store", "sentinel"] => ("store sentinel", field_names::<StoreSentinel>()),
        ["store", "tls"] => ("store tls", field_names::<StoreTls>()),
        ["client_ip"] => ("client_ip", field_names::<ClientIp>()),
        ["auth", _] => ("auth", field_names::<Auth>()),
        ["auth", _, "cache"] => ("cache", field_names::<AuthCache>()),
        ["tiers"] => ("tiers", field_names::<Tiers>()),
        ["limit", _] => ("limit", field_names::<Limit>()),
        ["limit", _, "cost"] => ("cost", field_names::<CostTable>()),
        ["limit", _, "tiers", _] | ["consumer", "limit", _] => ("size", field_names::<LimitVariant>()),
        ["upstream", _] => ("upstream", field_names::<Upstream>()),
        ["upstream", _, "tls"] => ("upstream tls", field_names::<UpstreamTls>()),
        ["upstream", _, "health_check"] => ("health_check", field_names::<Health>()),
        ["upstream", _, "outlier_detection"] => ("outlier_detection", field_names::<Eject>()),
        ["upstream", _, "servers"] => ("servers", field_names::<ServerTable>()),
        ["route"] => ("route", field_names::<Route>()),
        ["route", "request_headers"] => ("request_headers", field_names::<HeaderRules>()),
        ["route", "response_headers"] => ("response_headers", field_names::<ResponseHeaderRules>()),
        ["route", "mirror"] => ("mirror", field_names::<Mirror>()),
        ["route", "match"] => ("match", field_names::<MatchRules>()),
        ["route", "match", "headers" | "query", _] => ("condition", field_names::<ValueRule>()),
        ["route", "respond"] => ("respond", field_names::<DirectResponse>()),
        ["route", "cors"] => ("cors", field_names::<Cors>()),
        ["route", "redirect"] => ("redirect", field_names::<Redirect>()),
        ["consumer"] => ("consumer", field_names::<Consumer>()),
        ["consumer", "keys"] => ("key", field_names::<KeyTable>()),
        _ => ("", &[]),
    }
}

/// Return the message and the hint for a route key that has another name and form in Sluicegate. The hint shows the
/// file's value in the correct form.
fn replaced_key(path: &[String], table: &DeTable<'_>, sources: &Sources) -> Option<(String, Option<String>)> {
    let [first, index, key] = path else { return None };
    let route = table.get(first.as_str()).filter(|_| first == "route")?.get_ref().as_array()?;
    let value = route.get(index.parse::<usize>().ok()?)?.get_ref().as_table()?.get(key.as_str())?;
    let written = |value: &Spanned<DeValue<'_>>| sources.text_at(&value.span()).unwrap_or("\"…\"").trim().to_owned();
    let hint = match (key.as_str(), value.get_ref()) {
        ("host", DeValue::Array(_)) => format!("write hosts = {}", written(value)),
        ("host", _) => format!("write hosts = [{}]", written(value)),
        ("headers", DeValue::Table(headers)) => {
            let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let rule = |(name, value): (&Spanned<std::borrow::Cow<'_, str>>, &Spanned<DeValue<'_>>)| {
                let name = name.get_ref();
                let name = if name.chars().all(is_bare) { name.to_string() } else { format!("\"{name}\"") };
                format!("{name} = {{ exact = {} }}", written(value))
            };
            let rules: Vec<_> = headers.iter().map(rule).collect();
            format!("write match = {{ headers = {{ {} }} }}", rules.join(", "))
        }
        ("headers", _) => "write match = { headers = { x-version = { exact = \"2\" } } }".to_owned(),
        _ => return None,
    };
    Some((format!("unknown key `{key}`"), Some(hint)))
}

/// Return the name of the table that contains a key, and the keys that this table supports.
fn table_of_key(parents: &[String], consumers: bool) -> (&'static str, &'static [&'static str]) {
    match parents {
        [] if consumers => ("", field_names::<Consumers>()),
        _ => known_keys(parents),
    }
}

fn is_unsupported(path: &[String]) -> bool {
    let Some((key, parents)) = path.split_last() else { return false };
    let (table, _) = known_keys(parents);
    UNSUPPORTED_KEYS.iter().any(|(name, keys)| *name == table && keys.contains(&key.as_str()))
}

/// Return the known key that the unknown key at this path probably misspells.
fn meant_key(path: &[String], consumers: bool) -> Option<&'static str> {
    let (key, parents) = path.split_last()?;
    let (_, known) = table_of_key(parents, consumers);
    closest_name(key, known.iter().copied()).filter(|_| !is_unsupported(path))
}

/// Return the message and the hint for an unknown key.
pub(super) fn unknown_key(path: &[String], consumers: bool) -> (String, Option<String>) {
    let Some((key, parents)) = path.split_last() else { return ("unknown key".to_owned(), None) };
    let (name, known) = table_of_key(parents, consumers);
    if is_unsupported(path) {
        return (
            format!("`{key}` is not supported yet"),
            Some("remove the key: this version of the gateway would ignore it".to_owned()),
        );
    }
    let hint = match closest_name(key, known.iter().copied()) {
        _ if name == "upstream" && HEALTH_CHECK_NAMES.contains(&key.as_str()) => {
            Some("write health_check = \"/healthz\"".to_owned())
        }
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
    // `FieldNames` always returns an error after it has recorded the names. Ignore the error.
    let _ = T::deserialize(FieldNames(&mut names));
    names
}

/// Path of a file, and its content at the time when it was read.
#[derive(Clone, PartialEq, Eq)]
pub struct FileSnapshot {
    /// Path of the file.
    pub path: PathBuf,
    /// Content of the file.
    pub content: Vec<u8>,
}

/// Omit the content, which may be secret.
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
