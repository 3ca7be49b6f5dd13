//! YAML documents of the files to import.

use std::sync::Arc;

use crate::config::yaml;
use crate::config::yaml::{Node, Pair};
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
        documents.extend(parse(&input.name, 0, &input.text)?);
    }
    Ok(documents)
}

/// Read the documents of a text.
pub(super) fn parse(file: &Arc<str>, offset: usize, text: &str) -> Result<Vec<Document>, ImportError> {
    let roots = yaml::parse(text)
        .map_err(|error| ImportError::Syntax(Origin::new(file, offset + error.line), quoted(&error.message)))?;
    Ok(roots.into_iter().map(|root| Document { file: file.clone(), offset, root }).collect())
}
