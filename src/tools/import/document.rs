//! YAML documents of the files to import.

use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::yaml;
use crate::config::yaml::{Node, Pair, Value};
use crate::tools::import::model::{Model, Origin, quoted};
use crate::tools::import::{ImportError, Input};

/// A document with the name of its file.
#[derive(Debug, Clone)]
pub(super) struct Document {
    /// Name of the file.
    pub(super) file: Arc<str>,
    /// Number of lines before the document, if it is a text inside another document.
    pub(super) offset: usize,
    /// The value.
    pub(super) root: Node,
}

impl Document {
    /// Return the position of a line.
    pub(super) fn origin(&self, line: usize) -> Origin {
        Origin::new(&self.file, self.offset + line)
    }

    /// Return the position of a value.
    pub(super) fn at(&self, node: &Node) -> Origin {
        self.origin(node.line)
    }

    /// Report the keys of a mapping that are not in `known`.
    pub(super) fn report_others(&self, node: &Node, known: &[&str], place: &str, model: &mut Model) {
        for Pair { line, key, .. } in node.pairs() {
            if !known.contains(&&**key) {
                model.no_equal(&self.origin(*line), format!("`{}` of {}", quoted(key), quoted(place)));
            }
        }
    }
}

/// Read the documents of all files.
pub(super) fn read(inputs: &[Input]) -> Result<Vec<Document>, ImportError> {
    let mut documents = Vec::new();
    for input in inputs {
        if is_toml(input) {
            documents.push(parse_toml(input)?);
        } else {
            documents.extend(parse(&input.name, 0, &input.text)?);
        }
    }
    let other = documents.iter().find(|document| !matches!(document.root.value, Value::Map(_) | Value::Null));
    if let Some(other) = other {
        let message = "the document has no keys: is it a file of another program?";
        return Err(ImportError::Syntax(other.at(&other.root), message.to_owned()));
    }
    Ok(documents)
}

/// Read the documents of a text.
pub(super) fn parse(file: &Arc<str>, offset: usize, text: &str) -> Result<Vec<Document>, ImportError> {
    let roots = yaml::parse(text)
        .map_err(|error| ImportError::Syntax(Origin::new(file, offset + error.line), quoted(&error.message)))?;
    Ok(roots.into_iter().map(|root| Document { file: file.clone(), offset, root }).collect())
}

/// Return whether a file is TOML: by its name, or because its first line of content is a table.
fn is_toml(input: &Input) -> bool {
    let first = input.text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    let is_table = |line: &str| line.starts_with('[') && line.ends_with(']') && !line.contains([',', '"']);
    input.name.ends_with(".toml") || first.is_some_and(is_table)
}

fn parse_toml(input: &Input) -> Result<Document, ImportError> {
    let lines: Vec<usize> = input.text.match_indices('\n').map(|(index, _)| index).collect();
    let line_of = |offset: usize| lines.partition_point(|end| *end < offset) + 1;
    let table = DeTable::parse(&input.text).map_err(|error| {
        let line = line_of(error.span().map_or(0, |span| span.start));
        ImportError::Syntax(Origin::new(&input.name, line), quoted(error.message()))
    })?;
    let root = Node::of_line(1, table_value(table.get_ref(), &line_of));
    Ok(Document { file: input.name.clone(), offset: 0, root })
}

fn table_value(table: &DeTable<'_>, line_of: &dyn Fn(usize) -> usize) -> Value {
    let pair = |(key, value): (&Spanned<std::borrow::Cow<'_, str>>, &Spanned<DeValue<'_>>)| Pair {
        line: line_of(key.span().start),
        span: 0..0,
        key: key.get_ref().to_string(),
        value: toml_node(value, line_of),
    };
    Value::Map(table.iter().map(pair).collect())
}

fn toml_node(value: &Spanned<DeValue<'_>>, line_of: &dyn Fn(usize) -> usize) -> Node {
    let converted = match value.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => Value::Text(number.to_string()),
        DeValue::Float(number) => Value::Text(number.to_string()),
        DeValue::Boolean(value) => Value::Text(value.to_string()),
        DeValue::Datetime(time) => Value::Text(time.to_string()),
        DeValue::Array(items) => Value::List(items.iter().map(|item| toml_node(item, line_of)).collect()),
        DeValue::Table(table) => table_value(table, line_of),
    };
    Node::of_line(line_of(value.span().start), converted)
}
