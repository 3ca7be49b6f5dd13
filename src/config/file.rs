//! Read a configuration file: parse the TOML text, substitute environment variables, deserialize the values, and
//! collect unknown keys.

use std::collections::HashSet;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{fmt, fs, io};

use serde::de::DeserializeOwned;
use serde_ignored::Path as KeyPath;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::include;
use crate::config::include::Sources;
use crate::config::schema::FileKind;
use crate::config::secrets::{is_secret, secret_ranges};
use crate::config::syntax::invisible_name;
use crate::config::value_types::{RequiredType, TypeError, from_variable, has_text_items, list_items};
use crate::config::{Config, Consumers, foreign, syntax};

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

    /// Record a value that was removed because of its type. Its key may then be missing.
    fn record_removed(&mut self, all: &DeTable<'_>, path: &[String]) {
        match path {
            [_] | [_, _] => self.record_unknown(all, path),
            _ => {
                let entry = path.get(..entry_length(path)).unwrap_or(path);
                self.entries.extend(value_at(all, entry).map(extent));
            }
        }
    }

    /// Record an unknown key without a similar known key.
    fn record_unknown(&mut self, all: &DeTable<'_>, path: &[String]) {
        self.has_unknown = true;
        let Some((_, parents)) = path.split_last() else { return };
        let entry = parents.get(..entry_length(parents)).unwrap_or(parents);
        self.entries.extend(value_at(all, entry).map(extent));
        if parents.is_empty() {
            let table = value_at(all, path).and_then(|value| value.get_ref().as_table());
            self.names.extend(table.into_iter().flatten().map(|(name, _)| name.get_ref().to_string()));
        }
    }
}

/// Tables that have several entries. Each entry has a name (`[limit.NAME]`) or a position (`[[route]]`).
const ENTRY_TABLES: [&str; 7] = ["listener", "route", "limit", "upstream", "auth", "notify", "consumer"];

/// Return the number of segments of a path that lead to its entry.
fn entry_length(path: &[String]) -> usize {
    if path.first().is_some_and(|table| ENTRY_TABLES.contains(&table.as_str())) { 2 } else { 1 }
}

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
pub type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Read `gateway.toml` and the files that it includes.
///
/// # Errors
/// A file cannot be read or is not valid TOML.
pub fn read_gateway(path: &Path, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, ConfigError> {
    let content = read_main(path).map_err(|error| unreadable_gateway_file(path, &error));
    let text = content.and_then(|content| utf8_text(path, content));
    parse_gateway(path, text.map_err(|file| ConfigError { files: vec![file] })?, environment)
}

/// Parse `text` as the content of `gateway.toml`, and the files that it includes.
///
/// # Errors
/// See [`read_gateway`].
pub fn parse_gateway(path: &Path, text: String, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, ConfigError> {
    let parsed = include::read(path, text, environment)
        .and_then(|(sources, issues)| parse(sources, issues, environment, FileKind::Gateway));
    parsed.map_err(|files| ConfigError { files })
}

/// Parse `content` as the content of `consumers.toml`.
///
/// # Errors
/// The content is not UTF-8 or not valid TOML.
pub fn parse_consumers(
    path: &Path,
    content: &[u8],
    environment: EnvLookup<'_>,
) -> Result<ParsedFile<Consumers>, FileIssues> {
    let sources = Sources::new(path, utf8_text(path, content.to_vec())?);
    parse(sources, Vec::new(), environment, FileKind::Consumers).map_err(|files| {
        // There is only one file.
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

/// Path that stands for the standard input, as for other programs.
pub const STANDARD_INPUT: &str = "-";

/// Read the main configuration file. The path `-` stands for the standard input, which is read only once: a reload uses
/// the same text again.
///
/// # Errors
/// The file cannot be read.
pub(super) fn read_main(path: &Path) -> io::Result<Vec<u8>> {
    static INPUT: OnceLock<Vec<u8>> = OnceLock::new();
    if path != Path::new(STANDARD_INPUT) {
        return read_text(path);
    }
    if let Some(text) = INPUT.get() {
        return Ok(text.clone());
    }
    let mut text = Vec::new();
    io::Read::read_to_end(&mut io::stdin().lock(), &mut text)?;
    Ok(INPUT.get_or_init(|| without_byte_order_mark(text)).clone())
}

/// Read a file without its byte order mark. Editors on Windows add this mark to the start of text files.
fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path).map(without_byte_order_mark)
}

fn without_byte_order_mark(mut content: Vec<u8>) -> Vec<u8> {
    if content.starts_with(BYTE_ORDER_MARK) {
        content.drain(..BYTE_ORDER_MARK.len());
    }
    content
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
/// A text is not valid TOML.
fn parse<T: DeserializeOwned>(
    sources: Sources,
    mut issues: Vec<Issue>,
    environment: EnvLookup<'_>,
    kind: FileKind,
) -> Result<ParsedFile<T>, Vec<FileIssues>> {
    let mut environment = Environment::new(environment);
    let mut all = DeTable::new();
    let mut faulty = Vec::new();
    for (index, file) in sources.files().iter().enumerate() {
        let table = match syntax::parse(&file.text, kind) {
            Ok(table) => table,
            Err(issues) => {
                faulty.push(FileIssues { path: file.path.clone(), text: file.text.clone(), issues });
                continue;
            }
        };
        let mut table = include::shift_spans(table, file.start);
        environment.substitute_table(&mut table, &mut Vec::new());
        if index == 0 { all = table } else { include::merge(&mut all, table, &sources, &mut issues) }
    }
    if !faulty.is_empty() {
        return Err(faulty);
    }
    let Environment { unresolved, warnings, expanded, .. } = environment;
    let document = Document { sources: &sources, expanded: &expanded, kind };
    let (value, unknown_keys) = document.deserialize(all, &mut issues)?;
    Ok(ParsedFile { value, sources, issues, unknown_keys, unresolved, warnings })
}

/// What the deserialization of the merged tables needs to know about their files.
#[derive(Clone, Copy)]
struct Document<'s> {
    sources: &'s Sources,
    /// The spans of strings with environment variables, and their values after the substitution.
    expanded: &'s [(Range<usize>, String)],
    kind: FileKind,
}

/// A deserialized table, with the paths of its unknown keys.
struct Deserialized<T> {
    value: T,
    ignored: Vec<Vec<String>>,
}

impl<'s> Document<'s> {
    /// Deserialize the merged tables of all files, and report unknown keys and values of the wrong type. Use the value
    /// of a misspelled key under the similar known name, so that the known key is not reported as missing.
    fn deserialize<'d, T: DeserializeOwned>(
        self,
        mut all: DeTable<'d>,
        issues: &mut Vec<Issue>,
    ) -> Result<(T, UnknownKeys), Vec<FileIssues>>
    where
        's: 'd,
    {
        let mut unknown_keys = UnknownKeys::default();
        let Deserialized { mut value, mut ignored } = self.deserialize_table(&mut all, issues, &mut unknown_keys)?;
        // The paths of all reported keys, and the paths of misspelled keys after renaming.
        let (mut reported, mut corrected_paths) = (Vec::<Vec<String>>::new(), Vec::<Vec<String>>::new());
        let is_new = |path: &&Vec<String>, reported: &[Vec<String>], corrected: &[Vec<String>]| {
            !reported.contains(path) && !corrected.iter().any(|parent| path.starts_with(parent))
        };
        while let Some(path) = ignored.iter().find(|path| is_new(path, &reported, &corrected_paths)) {
            let path = &path.clone();
            reported.push(path.clone());
            let replaced = self.replaced_key(path, &all);
            let meant = meant_key(path, self.kind).filter(|_| replaced.is_none());
            let mut corrected = all.clone();
            let renamed = meant.and_then(|meant| rename_key(&mut corrected, path, meant));
            // If the value does not have the type of the similar key, the key is not a misspelling.
            let renamed = renamed.and_then(|renamed| Some((renamed, self.deserialize_exact(&mut corrected).ok()?)));
            let foreign = || self.foreign_key(path, &all).filter(|_| renamed.is_none());
            let (message, hint) = replaced.or_else(foreign).unwrap_or_else(|| unknown_key(path, self.kind));
            issues.push(Issue { span: key_span(&all, path), message, hint });
            match renamed {
                Some((renamed, deserialized)) => {
                    value_at(&corrected, &renamed).iter().for_each(|value| unknown_keys.record_misspelled(value));
                    corrected_paths.push(renamed);
                    (all, value, ignored) = (corrected, deserialized.value, deserialized.ignored);
                }
                None if is_unsupported(path) => {}
                None => unknown_keys.record_unknown(&all, path),
            }
        }
        Ok((value, unknown_keys))
    }

    /// Deserialize a table. Report each value of the wrong type, and continue without the value, so that one run
    /// reports all of them.
    fn deserialize_table<'d, T: DeserializeOwned>(
        self,
        all: &mut DeTable<'d>,
        issues: &mut Vec<Issue>,
        unknown_keys: &mut UnknownKeys,
    ) -> Result<Deserialized<T>, Vec<FileIssues>>
    where
        's: 'd,
    {
        loop {
            let error = match self.deserialize_exact(all) {
                Ok(deserialized) => return Ok(deserialized),
                Err(error) => error,
            };
            let span = error.span().unwrap_or(0..0);
            let message = error.message().replace('\n', ", ");
            let Some(path) = path_at(all, &span) else {
                return Err(self.sources.by_file(vec![Issue::new(span, message)]));
            };
            let Some(value) = value_at(all, &path).map(Spanned::get_ref) else { continue };
            let written = self.sources.text_at(&span).unwrap_or_default();
            let faulty =
                TypeError { path: &path, value, span: span.clone(), written, message: &message, file: self.kind };
            issues.push(faulty.issue());
            let repaired = repaired(&faulty);
            unknown_keys.record_removed(all, &path);
            match repaired {
                Some(repaired) => drop(value_mut(all, &path).map(|value| *value.get_mut() = repaired)),
                None if faulty.lacks_table_name() => drop(all.remove(path[0].as_str())),
                None => remove(all, &path),
            }
        }
    }

    /// Deserialize a table, and convert the values of environment variables to the types of their keys.
    ///
    /// # Errors
    /// A value has the wrong type.
    fn deserialize_exact<'d, T: DeserializeOwned>(
        self,
        all: &mut DeTable<'d>,
    ) -> Result<Deserialized<T>, toml::de::Error>
    where
        's: 'd,
    {
        loop {
            let mut ignored = Vec::new();
            let length = self.sources.main().1.len();
            let table = toml::de::Deserializer::from(Spanned::new(0..length, all.clone()));
            let error = match serde_ignored::deserialize(table, |path| ignored.push(key_segments(&path))) {
                Ok(value) => return Ok(Deserialized { value, ignored }),
                Err(error) => error,
            };
            let converted = error.span().and_then(|span| {
                let path = path_at(all, &span)?;
                let value = value_at(all, &path)?.get_ref();
                let (_, text) = self.expanded.iter().find(|(expanded, _)| *expanded == span)?;
                // An item of a list has only a part of the text of its variable.
                let text = text.split(',').map(str::trim).chain([&**text]).find(|text| value.as_str() == Some(text))?;
                let written = self.sources.text_at(&span).unwrap_or_default();
                let message = error.message();
                let faulty = TypeError { path: &path, value, span: span.clone(), written, message, file: self.kind };
                let converted = from_variable(text, faulty.required_type()?, &span, &path)?;
                Some((path, converted))
            });
            match converted {
                Some((path, converted)) => drop(value_mut(all, &path).map(|value| *value.get_mut() = converted)),
                None => return Err(error),
            }
        }
    }

    /// Return the message and the hint for a key that must be written in another form. The hint shows the value of the
    /// file in this form.
    fn replaced_key(self, path: &[String], all: &DeTable<'_>) -> Option<(String, Option<String>)> {
        match path {
            _ if self.kind == FileKind::Consumers => None,
            [table] => replaced_table(table, all, self.sources),
            path => replaced_route_key(path, all, self.sources),
        }
    }

    /// Return the message and the hint for a key of another program.
    fn foreign_key(self, path: &[String], all: &DeTable<'_>) -> Option<(String, Option<String>)> {
        let advice = foreign::advice(path, all, self.sources, self.kind)?;
        Some((format!("unknown key `{}`", path.last()?), Some(advice)))
    }
}

/// Return whether the value is a valid item of the list that its key requires.
fn is_list_item(faulty: &TypeError<'_, '_>) -> bool {
    match faulty.value {
        DeValue::Table(table) => {
            let known = faulty.file.keys(faulty.path);
            table.keys().any(|key| known.contains(&&**key.get_ref()))
        }
        DeValue::String(_) => faulty.file.value_schema(faulty.path).is_some_and(has_text_items),
        _ => false,
    }
}

/// Return the value that the operator most likely meant: a list with one item, or an entry of a list.
fn repaired<'d>(faulty: &TypeError<'_, 'd>) -> Option<DeValue<'d>> {
    match (faulty.required_type()?, faulty.value, faulty.path) {
        // `[route]` instead of `[[route]]`, or `servers = "…"` instead of a list.
        (RequiredType::List, value, _) if is_list_item(faulty) => {
            let item = Spanned::new(faulty.span.clone(), value.clone());
            Some(DeValue::Array(std::iter::once(item).collect()))
        }
        // `[[limit]]` with `name` instead of `[limit.NAME]`.
        (RequiredType::Table, DeValue::Array(items), [_]) => {
            let entry = |item: &Spanned<DeValue<'d>>| {
                let mut table = item.get_ref().as_table()?.clone();
                let (_, name) = table.remove_entry("name")?;
                let name = Spanned::new(name.span(), name.get_ref().as_str()?.to_owned().into());
                Some((name, Spanned::new(item.span(), DeValue::Table(table))))
            };
            Some(DeValue::Table(items.iter().map(entry).collect::<Option<_>>()?))
        }
        _ => None,
    }
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

fn value_mut<'t, 'd>(table: &'t mut DeTable<'d>, path: &[String]) -> Option<&'t mut Spanned<DeValue<'d>>> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(table.get_mut(first.as_str())?, |value, segment| match value.get_mut() {
        DeValue::Table(table) => table.get_mut(segment.as_str()),
        DeValue::Array(items) => items.get_mut(segment.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Return the table that contains the last key of a path.
fn table_mut<'t, 'd>(all: &'t mut DeTable<'d>, parents: &[String]) -> Option<&'t mut DeTable<'d>> {
    if parents.is_empty() {
        return Some(all);
    }
    match value_mut(all, parents)?.get_mut() {
        DeValue::Table(table) => Some(table),
        _ => None,
    }
}

/// Rename the last key of a path. Return the new path, or `None` if the table already has a key with the new name.
fn rename_key(all: &mut DeTable<'_>, path: &[String], name: &'static str) -> Option<Vec<String>> {
    let (key, parents) = path.split_last()?;
    let table = table_mut(all, parents)?;
    if table.contains_key(name) {
        return None;
    }
    let (old, value) = table.remove_entry(key.as_str())?;
    table.insert(Spanned::new(old.span(), name.into()), value);
    Some([parents, &[name.to_owned()]].concat())
}

/// Remove the value at a path from its table or list.
fn remove(all: &mut DeTable<'_>, path: &[String]) {
    let Some((last, parents)) = path.split_last() else { return };
    if let Some(table) = table_mut(all, parents) {
        table.remove(last.as_str());
    } else if let (Some(value), Ok(index)) = (value_mut(all, parents), last.parse::<usize>())
        && let DeValue::Array(items) = value.get_mut()
    {
        let items = std::mem::replace(items, DeArray::new()).into_iter().enumerate().filter(|(at, _)| *at != index);
        *value.get_mut() = DeValue::Array(items.map(|(_, item)| item).collect());
    }
}

/// Return the path of the value with a span. The items of a list from an environment variable have the same span as the
/// list: return the first item that is still a string.
fn path_at(all: &DeTable<'_>, span: &Range<usize>) -> Option<Vec<String>> {
    fn collect(
        value: &Spanned<DeValue<'_>>,
        span: &Range<usize>,
        path: &mut Vec<String>,
        found: &mut Vec<Vec<String>>,
    ) {
        if value.span() == *span {
            found.push(path.clone());
        }
        match value.get_ref() {
            DeValue::Table(table) => collect_table(table, span, path, found),
            DeValue::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    path.push(index.to_string());
                    collect(item, span, path, found);
                    path.pop();
                }
            }
            _ => {}
        }
    }
    fn collect_table(table: &DeTable<'_>, span: &Range<usize>, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
        for (key, value) in table {
            path.push(key.get_ref().to_string());
            collect(value, span, path, found);
            path.pop();
        }
    }
    let mut found = Vec::new();
    collect_table(all, span, &mut Vec::new(), &mut found);
    let is_string = |path: &&Vec<String>| value_at(all, path).is_some_and(|value| value.get_ref().is_str());
    found.iter().find(is_string).or(found.first()).cloned()
}

/// Return `text` with its environment variables substituted, or `None` if a variable is not set.
pub(crate) fn substituted(text: &str, environment: EnvLookup<'_>) -> Option<String> {
    let mut environment = Environment::new(environment);
    let text = environment.expand(text, &[], &(0..0));
    environment.unresolved.is_empty().then_some(text)
}

/// Substitutes environment variables, and collects the variables that are not set.
struct Environment<'a> {
    variable: EnvLookup<'a>,
    unresolved: Vec<UnresolvedValue>,
    warnings: Vec<Issue>,
    /// The spans of strings with variables, and their values after the substitution.
    expanded: Vec<(Range<usize>, String)>,
}

impl<'a> Environment<'a> {
    fn new(variable: EnvLookup<'a>) -> Self {
        Environment { variable, unresolved: Vec::new(), warnings: Vec::new(), expanded: Vec::new() }
    }

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
                if path.last().is_none_or(|key| key != "body") {
                    self.warnings.extend(invisible_character(text, &span));
                }
                if text.contains("${") {
                    *text = self.expand(text, path, &span).into();
                    self.expanded.push((span, text.to_string()));
                }
            }
            DeValue::Array(items) => {
                let substituted = std::mem::replace(items, DeArray::new())
                    .into_iter()
                    .flat_map(|item| self.substitute_item(item, path));
                *items = substituted.collect();
            }
            DeValue::Table(table) => self.substitute_table(table, path),
            _ => {}
        }
    }

    /// Substitute variables in the item of a list. An item that consists of a variable may become several items.
    fn substitute_item<'t>(
        &mut self,
        mut item: Spanned<DeValue<'t>>,
        path: &mut Vec<String>,
    ) -> Vec<Spanned<DeValue<'t>>> {
        let written = item.get_ref().as_str().filter(|text| text.contains("${")).map(str::to_owned);
        self.substitute(&mut item, path);
        let (Some(written), Some(text)) = (written, item.get_ref().as_str()) else { return vec![item] };
        let span = item.span();
        let part = |part: &str| Spanned::new(span.clone(), DeValue::String(part.to_owned().into()));
        list_items(&written, text, path).into_iter().map(part).collect()
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
            let found = (self.variable)(name).filter(|value| !value.is_empty() || default.is_none());
            match (found.map(OsString::into_string), default) {
                // In a header rule, `{…}` is a variable of the request. Escape the braces, so that the value is used
                // literally.
                (Some(Ok(found)), _) if is_template(path) => {
                    out.push_str(&found.replace('{', "{{").replace('}', "}}"));
                }
                (Some(Ok(found)), _) => out.push_str(&found),
                (None, Some(default)) => out.push_str(default),
                (found, _) => {
                    // Number the placeholders, so that two of them are never reported as duplicates.
                    out.push_str(&format!("unset{}", self.unresolved.len()));
                    let is_secret = is_secret_text(path, text);
                    let issue = match found {
                        Some(_) => {
                            Issue::new(span.clone(), format!("environment variable `{name}` is not valid UTF-8"))
                                .with_hint("set the variable to text in UTF-8")
                        }
                        None => unset_variable(name, is_secret, span),
                    };
                    let is_malformed = !is_variable_name(name);
                    self.unresolved.push(UnresolvedValue { key: path.join("."), is_malformed, issue });
                }
            }
            rest = behind;
        }
        out.push_str(rest);
        out
    }
}

/// Return the issue for a variable that is not set, or whose expression is not valid.
fn unset_variable(expression: &str, is_secret: bool, span: &Range<usize>) -> Issue {
    if is_variable_name(expression) {
        return Issue::new(span.clone(), format!("environment variable `{expression}` is not set"))
            .with_hint(format!("set the variable, or give a default: ${{{expression}:-value}}"));
    }
    let end = expression.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(expression.len());
    let (name, rest) = expression.split_at(end);
    if !is_variable_name(name) {
        return Issue::new(span.clone(), "`${…}` does not contain the name of an environment variable")
            .with_hint("write ${NAME}, or ${NAME:-default}; $${ is a literal ${");
    }
    let default = rest.trim_start_matches([':', '-', '=', '?', '+', '|', ' ']);
    let default = if is_secret || default.is_empty() { "value" } else { default };
    Issue::new(span.clone(), format!("a default of the environment variable `{name}` follows `:-`"))
        .with_hint(format!("write ${{{name}:-{default}}}"))
}

fn is_variable_name(text: &str) -> bool {
    let is_word = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_word && !text.is_empty() && !text.starts_with(|c: char| c.is_ascii_digit())
}

/// Return whether a value, or a part of it, is a secret.
fn is_secret_text(path: &[String], text: &str) -> bool {
    let keys: Vec<_> = path.iter().map(String::as_str).collect();
    is_secret(&keys, text) || !secret_ranges(text).is_empty()
}

/// Return a warning if the text contains an invisible character, such as a no-break space. Response bodies may contain
/// any character.
fn invisible_character(text: &str, span: &Range<usize>) -> Option<Issue> {
    let (character, name) = text.chars().find_map(|character| Some((character, invisible_name(character)?)))?;
    let message = format!("the value contains the invisible character U+{:04X} ({name})", u32::from(character));
    Some(Issue::new(span.clone(), message).with_hint("remove the character, or replace it with a space"))
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
    // Do not quote the name, because the text may be a password that contains `$`.
    let name = if is_secret_text(path, text) { "NAME" } else { name };
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
    let known = FileKind::Gateway.keys(&["auth", provider]);
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

/// Return the message and the hint for a route key that has another name and form in Sluicegate. The hint shows the
/// file's value in the correct form.
fn replaced_route_key(path: &[String], table: &DeTable<'_>, sources: &Sources) -> Option<(String, Option<String>)> {
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

fn is_unsupported(path: &[String]) -> bool {
    let [table, _, key] = path else { return false };
    UNSUPPORTED_KEYS.iter().any(|(name, keys)| name == table && keys.contains(&key.as_str()))
}

/// Return the known key that the unknown key at this path probably misspells.
fn meant_key(path: &[String], kind: FileKind) -> Option<&'static str> {
    let (key, parents) = path.split_last()?;
    closest_name(key, kind.keys(parents)).filter(|_| !is_unsupported(path))
}

/// Return the message and the hint for an unknown key.
fn unknown_key(path: &[String], kind: FileKind) -> (String, Option<String>) {
    let Some((key, parents)) = path.split_last() else { return ("unknown key".to_owned(), None) };
    if is_unsupported(path) {
        return (
            format!("`{key}` is not supported yet"),
            Some("remove the key: this version of the gateway would ignore it".to_owned()),
        );
    }
    let known = kind.keys(parents);
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

/// The byte order mark U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

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
    /// Read a file, without a byte order mark at its start.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(FileSnapshot { path: path.to_owned(), content: read_text(path)? })
    }
}
