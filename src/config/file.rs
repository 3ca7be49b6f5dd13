//! Read a configuration file: parse the TOML text, substitute environment variables, deserialize the values, and
//! collect unknown keys.

use std::io;
use std::ops::Range;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_ignored::Path as KeyPath;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::environment::{EnvLookup, Environment, UnresolvedValue};
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file_schema::FileKind;
use crate::config::foreign;
use crate::config::gateway::{Config, Consumers};
use crate::config::include;
use crate::config::ratelimit_env;
use crate::config::ratelimit_env::{ENVIRONMENT, Generated};
use crate::config::route_defaults;
use crate::config::sources::{Sources, read_main, utf8_text};
use crate::config::syntax;
use crate::config::unknown_keys::{
    UnknownKeys, is_unsupported, meant_key, replaced_route_key, replaced_table, unknown_key,
};
use crate::config::value_path::{contains, key_span, path_at, remove, rename_key, value_at, value_mut};
use crate::config::value_types::{RequiredType, TypeError, from_variable, has_text_items};

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

/// Read `gateway.toml` and the files that it includes.
///
/// # Errors
/// A file cannot be read or is not valid TOML.
pub fn read_gateway(path: &Path, environment: EnvLookup<'_>) -> Result<ParsedFile<Config>, ConfigError> {
    if path == Path::new(ENVIRONMENT) {
        let Generated { text, warnings } =
            ratelimit_env::generate(environment).map_err(|file| ConfigError { files: vec![file] })?;
        let mut file = parse_gateway(path, text, environment)?;
        file.warnings.extend(warnings);
        return Ok(file);
    }
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
    let Environment { unresolved, mut warnings, expanded, .. } = environment;
    if kind == FileKind::Gateway {
        route_defaults::apply(&mut all, &mut issues, &mut warnings);
    }
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
        let mut reported = Vec::<Vec<String>>::new();
        let mut corrected_paths = Vec::<Vec<String>>::new();
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
