//! Errors of configuration files. Each error has a span, a message and a hint.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

use crate::config::secrets::{RedactedText, redact};

/// An error or warning in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issue {
    /// Byte range in the file. `None` if the issue concerns the whole file.
    pub span: Option<Range<usize>>,
    /// Description of the error or warning.
    pub message: String,
    /// Suggestion for the operator on how to correct the error.
    pub hint: Option<String>,
}

impl Issue {
    /// Create an issue with a span and without a hint.
    pub fn new(span: Range<usize>, message: impl Into<String>) -> Self {
        Issue { span: Some(span), message: message.into(), hint: None }
    }

    /// Add a hint.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Return the line and column of the span's start. Both count from 1, and columns count characters.
    pub fn position(&self, text: &str) -> Option<(usize, usize)> {
        let before = text.get(..self.span.as_ref()?.start)?;
        let line = before.rsplit('\n').next().unwrap_or_default();
        Some((before.matches('\n').count() + 1, line.chars().count() + 1))
    }
}

/// The issues of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileIssues {
    /// Path of the file.
    pub path: PathBuf,
    /// Text of the file. Empty if the file could not be read.
    pub text: String,
    /// The issues, in the order in which validation found them.
    pub issues: Vec<Issue>,
}

impl FileIssues {
    /// Create a single issue that concerns the whole file.
    pub fn from_message(path: &Path, message: &str) -> Self {
        let issue = Issue { span: None, message: message.to_owned(), hint: None };
        FileIssues { path: path.to_owned(), text: String::new(), issues: vec![issue] }
    }

    /// Return the path for display. Secrets are redacted, because the path may come from the configuration.
    pub fn display_path(&self) -> String {
        redact(&self.path.display().to_string())
    }

    /// Return the issues in file order, with secrets redacted. Use them for output without source lines.
    pub fn redacted_issues(&self) -> Vec<Issue> {
        let redacted = RedactedText::new(&self.text);
        self.sorted_issues().into_iter().map(|issue| redact_issue(&redacted, issue)).collect()
    }

    /// Return the issues in file order. Validation finds them in a different order, and finds those of a default once
    /// for each route.
    pub fn sorted_issues(&self) -> Vec<&Issue> {
        let mut issues: Vec<_> = self.issues.iter().collect();
        issues.sort_by_key(|issue| issue.span.as_ref().map_or(0, |span| span.start));
        let mut reported = HashSet::new();
        issues.retain(|issue| reported.insert((&issue.span, &issue.message)));
        issues
    }

    /// Render the report on this file. The renderer determines whether the report has colors.
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

/// The error for an invalid configuration. Its `Display` implementation prints, for each issue, the file, line, column,
/// source line and hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The files with errors.
    pub files: Vec<FileIssues>,
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.report(&Renderer::plain()))
    }
}

impl ConfigError {
    /// Render the report. The renderer determines whether the report has colors.
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
    // The span of a table may cover several lines. Mark only its first line.
    let line_end = text[span.start..].find('\n').map_or(text.len(), |end| span.start + end);
    let span = span.start..span.end.min(line_end).max(span.start);
    let snippet = Snippet::source(text).path(path).annotation(AnnotationKind::Primary.span(span));
    let mut group = level.clone().primary_title(issue.message.as_str()).element(snippet);
    if let Some(hint) = &issue.hint {
        group = group.element(Level::HELP.message(hint.as_str()));
    }
    renderer.render(&[group])
}
