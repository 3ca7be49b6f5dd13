//! What is wrong with a configuration: where, and what to do about it.

use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::config::redact::RedactedText;
use crate::config::secrets::redact;

/// One fault in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issue {
    /// Bytes of the file; none where the fault is the file itself.
    pub span: Option<Range<usize>>,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub hint: Option<String>,
}

impl Issue {
    /// A fault at a place.
    pub fn new(span: Range<usize>, message: impl Into<String>) -> Self {
        Issue { span: Some(span), message: message.into(), hint: None }
    }

    /// Says what to do.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Line and column of its place, from 1; a column is a character.
    pub fn position(&self, text: &str) -> Option<(usize, usize)> {
        let before = text.get(..self.span.as_ref()?.start)?;
        let line = before.rsplit('\n').next().unwrap_or_default();
        Some((before.matches('\n').count() + 1, line.chars().count() + 1))
    }
}

/// All faults of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileIssues {
    /// The file.
    pub path: PathBuf,
    /// Its text; empty when it could not be read.
    pub text: String,
    /// Its faults.
    pub issues: Vec<Issue>,
}

impl FileIssues {
    /// A fault of the file as a whole.
    pub fn from_message(path: &Path, message: &str) -> Self {
        let issue = Issue { span: None, message: message.to_owned(), hint: None };
        FileIssues { path: path.to_owned(), text: String::new(), issues: vec![issue] }
    }

    /// The path, as it may be shown: it may come from the configuration.
    pub fn display_path(&self) -> String {
        redact(&self.path.display().to_string())
    }

    /// The faults in the order of the file, for output without the lines of the file.
    pub fn redacted_issues(&self) -> Vec<Issue> {
        let redacted = RedactedText::new(&self.text);
        self.sorted_issues().into_iter().map(|issue| redact_issue(&redacted, issue)).collect()
    }

    /// What is wrong, in the order of the file, whatever the order in which it was checked.
    pub fn sorted_issues(&self) -> Vec<&Issue> {
        let mut issues: Vec<_> = self.issues.iter().collect();
        issues.sort_by_key(|issue| issue.span.as_ref().map_or(0, |span| span.start));
        issues
    }

    /// The report on this file, with colours if the renderer has them.
    pub fn report(&self, level: &Level<'_>, renderer: &Renderer) -> String {
        let path = self.display_path();
        let redacted_text = RedactedText::new(&self.text);
        let redact = |issue: &Issue| redact_issue(&redacted_text, issue);
        let parts = self
            .sorted_issues()
            .into_iter()
            .map(|issue| render(renderer, level, &path, &redacted_text.text, &redact(issue)));
        parts.collect::<Vec<_>>().join("\n\n")
    }
}

/// Why there is no usable configuration. Displays as a report with file, line, column, the line itself and a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The files with faults.
    pub files: Vec<FileIssues>,
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.report(&Renderer::plain()))
    }
}

impl ConfigError {
    /// The report, with colours if the renderer has them.
    pub fn report(&self, renderer: &Renderer) -> String {
        let parts: Vec<_> = self.files.iter().map(|file| file.report(&Level::ERROR, renderer)).collect();
        parts.join("\n\n")
    }
}

fn redact_issue(redacted: &RedactedText, issue: &Issue) -> Issue {
    let hint = issue.hint.as_ref().map(|hint| redacted.redact_hint(hint));
    Issue { span: issue.span.clone(), message: redacted.redact_message(&issue.message), hint }
}

fn render(renderer: &Renderer, level: &Level<'_>, path: &str, text: &str, issue: &Issue) -> String {
    let Some(span) = &issue.span else {
        let mut group = level
            .clone()
            .primary_title(format!("{path}: {}", issue.message))
            .elements([] as [Snippet<'_, annotate_snippets::Annotation<'_>>; 0]);
        if let Some(hint) = &issue.hint {
            group = group.element(Level::HELP.message(hint.as_str()));
        }
        return renderer.render(&[group]);
    };
    // A table's place may cover many lines; its head says where it is.
    let line_end = text[span.start..].find('\n').map_or(text.len(), |end| span.start + end);
    let span = span.start..span.end.min(line_end).max(span.start);
    let snippet = Snippet::source(text).path(path).annotation(AnnotationKind::Primary.span(span));
    let mut group = level.clone().primary_title(issue.message.as_str()).element(snippet);
    if let Some(hint) = &issue.hint {
        group = group.element(Level::HELP.message(hint.as_str()));
    }
    renderer.render(&[group])
}

// A value with its place in the file.

/// A value with its place in the file: `toml`'s own, and with the schema of the value.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(transparent)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
pub struct Spanned<T>(toml::Spanned<T>);

impl<T> Deref for Spanned<T> {
    type Target = toml::Spanned<T>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T: JsonSchema> JsonSchema for Spanned<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}
