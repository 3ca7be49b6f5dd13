//! YAML files of other programs: values with their position, read by the crate `saphyr-parser` within bounds.

use std::collections::HashMap;
use std::ops::Range;

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
    /// Range of the value in the text, in characters. The range of a list or mapping is empty: it is its start.
    pub span: Range<usize>,
    /// Whether the value is written without quotes and tag: a text may then be a number or a boolean.
    pub is_plain: bool,
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
    /// Range of the key in the text, in characters.
    pub span: Range<usize>,
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
    /// Range of the error in the text, in characters. It may be empty.
    pub span: Range<usize>,
    /// What is wrong.
    pub message: String,
}

impl Node {
    /// Create a value of a file in another format, of which only the line is known.
    #[must_use]
    pub fn of_line(line: usize, value: Value) -> Node {
        Node { line, span: 0..0, is_plain: false, value }
    }

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

    /// Return the boolean that this value is in YAML 1.1, in which `yes` and `off` are booleans.
    #[must_use]
    pub fn boolean(&self) -> Option<bool> {
        match self.text().filter(|_| self.is_plain)? {
            "true" | "True" | "TRUE" | "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some(true),
            "false" | "False" | "FALSE" | "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some(false),
            _ => None,
        }
    }

    /// Return the number that this value is. Digits may be separated by `_`.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        let text = self.text().filter(|_| self.is_plain)?;
        let is_number = |text: &str| {
            let digits = text.trim_start_matches(['+', '-']).trim_start_matches('.');
            digits.starts_with(|c: char| c.is_ascii_digit())
        };
        text.replace('_', "").parse().ok().filter(|_| is_number(text))
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
                let marker = error.marker();
                let position = Position { line: marker.line(), span: marker.index()..marker.index() };
                return Err(position.error(error.info()));
            }
        }
    }
    Ok(builder.documents)
}

/// Where a value begins and ends.
struct Position {
    /// Line, counted from 1.
    line: usize,
    /// Range in characters.
    span: Range<usize>,
}

impl Position {
    fn error(self, message: impl Into<String>) -> YamlError {
        YamlError { line: self.line, span: self.span, message: message.into() }
    }
}

/// A list or mapping whose end has not been read.
struct Open {
    line: usize,
    start: usize,
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
        let position = Position { line: span.start.line(), span: span.start.index()..span.end.index() };
        let Position { line, .. } = position;
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_plain = style == ScalarStyle::Plain && tag.is_none();
                let value = match &*text {
                    "" | "~" | "null" | "Null" | "NULL" if is_plain => Value::Null,
                    _ => Value::Text(text.into_owned()),
                };
                self.add(Node { line, span: position.span, is_plain, value }, anchor, 1)
            }
            Event::SequenceStart(anchor, _) => self.begin(position, anchor, false),
            Event::MappingStart(anchor, _) => self.begin(position, anchor, true),
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => match self.anchors.get(&anchor) {
                Some(node) => {
                    let node = node.clone();
                    let size = node.size();
                    self.add(Node { line, span: position.span, ..node }, 0, size)
                }
                None => Err(position.error("the alias refers to a value that contains it")),
            },
            Event::DocumentEnd => {
                self.anchors.clear();
                Ok(())
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => Ok(()),
        }
    }

    fn begin(&mut self, position: Position, anchor: usize, is_map: bool) -> Result<(), YamlError> {
        if self.open.len() == MAX_DEPTH {
            return Err(position.error(format!("values are nested deeper than {MAX_DEPTH} levels")));
        }
        let Position { line, span } = position;
        self.open.push(Open { line, start: span.start, anchor, items: Vec::new(), is_map });
        Ok(())
    }

    fn end(&mut self) -> Result<(), YamlError> {
        let Some(open) = self.open.pop() else { return Ok(()) };
        let value = if open.is_map { Value::Map(pairs(open.items)?) } else { Value::List(open.items) };
        let node = Node { line: open.line, span: open.start..open.start, is_plain: false, value };
        self.add(node, open.anchor, 1)
    }

    /// Add a complete value to the list or mapping that contains it. `count` is the number of values that it adds. The
    /// copy that an anchor keeps counts as well.
    fn add(&mut self, node: Node, anchor: usize, count: usize) -> Result<(), YamlError> {
        self.values += count + if anchor > 0 { node.size() } else { 0 };
        if self.values > MAX_VALUES {
            let position = Position { line: node.line, span: node.span };
            return Err(position.error(format!("the file has more than {MAX_VALUES} values")));
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
        let position = Position { line: key.line, span: key.span };
        let key = match key.value {
            Value::Text(text) => text,
            Value::Null => String::new(),
            Value::List(_) | Value::Map(_) => {
                return Err(position.error("a key must be a text"));
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
            return Err(position.error(format!("the key `{key}` occurs twice")));
        }
        let Position { line, span } = position;
        pairs.push(Pair { line, span, key, value });
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
    fn values_and_keys_have_their_spans_in_characters() {
        let text = "\"é\": x\nlist:\n  - key: 'a b'\n    flow: {u: day}\n";
        let document = &parse(text).unwrap()[0];
        let at = |span: &Range<usize>| text.chars().skip(span.start).take(span.len()).collect::<String>();
        let [first, list] = document.pairs() else { panic!("{document:?}") };
        assert_eq!(
            (at(&first.span), at(&first.value.span), at(&list.span)),
            ("\"é\"".into(), "x".into(), "list".into())
        );
        let item = &list.value.items()[0];
        assert_eq!(text.chars().skip(item.span.start).take(3).collect::<String>(), "key");
        assert_eq!(at(&item.get("key").unwrap().span), "'a b'");
        let flow = item.get("flow").unwrap();
        assert_eq!(text.chars().nth(flow.span.start), Some('{'));
        assert_eq!((at(&flow.pairs()[0].span), at(&flow.get("u").unwrap().span)), ("u".into(), "day".into()));
    }

    #[test]
    fn plain_texts_are_booleans_and_numbers_of_yaml_1_1() {
        let values = &parse("[yes, 'yes', Off, 1_000, \"5\", -1.5e3, .5, +3, inf, nan, 1.2.3, _, '', x]").unwrap()[0];
        let booleans: Vec<_> = values.items().iter().map(Node::boolean).collect();
        assert_eq!(booleans[..4], [Some(true), None, Some(false), None]);
        let numbers: Vec<_> = values.items().iter().map(Node::number).collect();
        assert_eq!(numbers[3..8], [Some(1000.0), None, Some(-1500.0), Some(0.5), Some(3.0)]);
        assert_eq!(numbers[8..], [None; 6]);
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
