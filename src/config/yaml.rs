//! YAML files of other programs: values with their position, read by the crate `saphyr-parser` within bounds.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

/// Maximum depth of nested values.
const MAX_DEPTH: usize = 64;

/// Maximum number of values of all documents together, counted after aliases are replaced.
const MAX_VALUES: usize = 200_000;

/// A value with its position.
#[derive(Debug, Clone)]
pub struct Node {
    /// Line of the value, counted from 1.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// A value.
#[derive(Debug, Clone)]
pub enum Value {
    /// `null`, `~` or nothing.
    Null,
    /// A string, a number or a boolean, as it is written. Strings in quotes are unescaped.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// A mapping, in the order of the file. No key occurs twice.
    Map(Vec<Pair>),
}

/// A key of a mapping with its value.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Line of the key, counted from 1.
    pub line: usize,
    /// The key.
    pub key: String,
    /// The value.
    pub value: Node,
}

/// A file that is not valid YAML, or exceeds a bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct YamlError {
    /// Line of the error, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

impl Node {
    /// Return the value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.pairs().iter().find(|pair| pair.key == key).map(|pair| &pair.value)
    }

    /// Return the value at nested keys.
    #[must_use]
    pub fn at(&self, keys: &[&str]) -> Option<&Node> {
        keys.iter().try_fold(self, |node, key| node.get(key))
    }

    /// Return the text of a string, number or boolean.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Return the text of the value of a key. An empty text stands for a missing value.
    #[must_use]
    pub fn text_of(&self, key: &str) -> &str {
        self.get(key).and_then(Node::text).unwrap_or_default()
    }

    /// Return the integer that is the value of a key.
    #[must_use]
    pub fn integer_of(&self, key: &str) -> Option<i64> {
        self.text_of(key).parse().ok()
    }

    /// Return whether the value of a key is `true`.
    #[must_use]
    pub fn is_true(&self, key: &str) -> bool {
        matches!(self.text_of(key), "true" | "True" | "TRUE" | "yes" | "on")
    }

    /// Return the items of a list.
    #[must_use]
    pub fn items(&self) -> &[Node] {
        match &self.value {
            Value::List(items) => items,
            _ => &[],
        }
    }

    /// Return the items of the list in a key.
    #[must_use]
    pub fn items_of(&self, key: &str) -> &[Node] {
        self.get(key).map_or(&[], Node::items)
    }

    /// Return the texts of the list in a key.
    #[must_use]
    pub fn texts_of(&self, key: &str) -> Vec<String> {
        self.items_of(key).iter().filter_map(Node::text).map(str::to_owned).collect()
    }

    /// Return the keys of a mapping with their values.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        match &self.value {
            Value::Map(pairs) => pairs,
            _ => &[],
        }
    }

    /// Return the number of values, including this one.
    fn size(&self) -> usize {
        1 + match &self.value {
            Value::Null | Value::Text(_) => 0,
            Value::List(items) => items.iter().map(Node::size).sum(),
            Value::Map(pairs) => pairs.iter().map(|pair| 1 + pair.value.size()).sum(),
        }
    }
}

/// Read the documents of a text.
///
/// # Errors
/// The text is not valid YAML, has a key twice, or exceeds a bound.
pub fn parse(text: &str) -> Result<Vec<Node>, YamlError> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        match event {
            Ok((event, span)) => builder.event(event, span)?,
            Err(error) => {
                return Err(YamlError { line: error.marker().line(), message: error.info().to_owned() });
            }
        }
    }
    Ok(builder.documents)
}

/// A list or mapping whose end has not been read.
struct Open {
    line: usize,
    anchor: usize,
    items: Vec<Node>,
    is_map: bool,
}

/// Builds documents from the events of the parser.
#[derive(Default)]
struct Builder {
    documents: Vec<Node>,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    values: usize,
}

impl Builder {
    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), YamlError> {
        let line = span.start.line();
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_plain = style == ScalarStyle::Plain && tag.is_none();
                let value = match &*text {
                    "" | "~" | "null" | "Null" | "NULL" if is_plain => Value::Null,
                    _ => Value::Text(text.into_owned()),
                };
                self.add(Node { line, value }, anchor, 1)
            }
            Event::SequenceStart(anchor, _) => self.begin(line, anchor, false),
            Event::MappingStart(anchor, _) => self.begin(line, anchor, true),
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => match self.anchors.get(&anchor) {
                Some(node) => {
                    let node = node.clone();
                    let size = node.size();
                    self.add(Node { line, ..node }, 0, size)
                }
                None => Err(YamlError { line, message: "the alias refers to a value that contains it".to_owned() }),
            },
            Event::DocumentEnd => {
                self.anchors.clear();
                Ok(())
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => Ok(()),
        }
    }

    fn begin(&mut self, line: usize, anchor: usize, is_map: bool) -> Result<(), YamlError> {
        if self.open.len() == MAX_DEPTH {
            return Err(YamlError { line, message: format!("values are nested deeper than {MAX_DEPTH} levels") });
        }
        self.open.push(Open { line, anchor, items: Vec::new(), is_map });
        Ok(())
    }

    fn end(&mut self) -> Result<(), YamlError> {
        let Some(open) = self.open.pop() else { return Ok(()) };
        let value = if open.is_map { Value::Map(pairs(open.items)?) } else { Value::List(open.items) };
        self.add(Node { line: open.line, value }, open.anchor, 1)
    }

    /// Add a complete value to the list or mapping that contains it. `count` is the number of values that it adds. The
    /// copy that an anchor keeps counts as well.
    fn add(&mut self, node: Node, anchor: usize, count: usize) -> Result<(), YamlError> {
        self.values += count + if anchor > 0 { node.size() } else { 0 };
        if self.values > MAX_VALUES {
            let message = format!("the file has more than {MAX_VALUES} values");
            return Err(YamlError { line: node.line, message });
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut() {
            Some(open) => open.items.push(node),
            None => self.documents.push(node),
        }
        Ok(())
    }
}

/// Return the pairs of a mapping from its keys and values in turn. The key `<<` adds the pairs of other mappings.
fn pairs(items: Vec<Node>) -> Result<Vec<Pair>, YamlError> {
    let mut pairs: Vec<Pair> = Vec::new();
    let mut merged: Vec<Pair> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let mut items = items.into_iter();
    while let (Some(key), Some(value)) = (items.next(), items.next()) {
        let line = key.line;
        let key = match key.value {
            Value::Text(text) => text,
            Value::Null => String::new(),
            Value::List(_) | Value::Map(_) => {
                return Err(YamlError { line, message: "a key must be a text".to_owned() });
            }
        };
        if key == "<<" {
            match value.value {
                Value::Map(more) => merged.extend(more),
                Value::List(list) => merged.extend(list.iter().flat_map(|node| node.pairs().to_vec())),
                Value::Null | Value::Text(_) => {}
            }
            continue;
        }
        if !seen.insert(key.clone()) {
            return Err(YamlError { line, message: format!("the key `{key}` occurs twice") });
        }
        pairs.push(Pair { line, key, value });
    }
    for pair in merged {
        if seen.insert(pair.key.clone()) {
            pairs.push(pair);
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_lines_and_aliases_are_replaced() {
        let text = "base: &base\n  a: 1\n  b: [x, 'y']\nmore:\n  <<: *base\n  a: 2\n---\n- null\n- \"null\"\n";
        let documents = parse(text).unwrap();
        let more = documents[0].get("more").unwrap();
        assert_eq!((more.integer_of("a"), more.texts_of("b")), (Some(2), vec!["x".to_owned(), "y".to_owned()]));
        assert_eq!(documents[0].at(&["base", "b"]).unwrap().line, 3);
        assert_eq!(documents[0].pairs()[1].line, 4);
        assert!(matches!(documents[1].items()[0].value, Value::Null));
        assert_eq!(documents[1].items()[1].text(), Some("null"));
    }

    #[test]
    fn hostile_files_are_errors() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let inner = format!("*a{}, ", level - 1).repeat(9);
            bomb.push_str(&format!("a{level}: &a{level} [{inner}]\n"));
        }
        for (text, line, message) in [
            ("[".repeat(100), 1, "values are nested deeper than 64 levels"),
            (bomb, 6, "the file has more than 200000 values"),
            ("x: 1\ny: 2\nx: 3\n".to_owned(), 3, "the key `x` occurs twice"),
            ("a: &a [*a]\n".to_owned(), 1, "the alias refers to a value that contains it"),
            ("? [a]\n: b\n".to_owned(), 1, "a key must be a text"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.message.contains(message), "{error:?}");
            assert!(error.line >= line.min(error.line) && error.line > 0, "{error:?}");
        }
        assert!(parse("a: [1\n").is_err());
    }
}
