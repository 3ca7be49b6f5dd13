//! Reads a JSON request body in one pass, and collects the values at JSON pointers and the JSON-RPC messages.
//!
//! All other values are discarded. A value is ambiguous if servers may read different values for its path. This is the
//! case if a member of the path occurs twice, or if two member names differ only in case, such as `model` and `Model`.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::payload::form::FormFields;
use crate::payload::json::names::{NameIndex, bits};
use crate::payload::json::rpc::{MessageReader, Messages, RPC_POINTERS, RpcError};

/// Maximum length of a collected string in bytes.
pub const MAX_VALUE: usize = 1024;

/// Maximum number of JSON pointers in a configuration.
pub const MAX_POINTERS: usize = 64;

/// Maximum number of object members in a body. Together with [`MAX_ELEMENTS`], it bounds the time to read a body that
/// consists of many short members to about 10 ms.
pub const MAX_MEMBERS: usize = 100_000;

/// Maximum number of array elements in a body. An element takes less time than a member, and an LLM API may receive a
/// prompt as an array of numbers.
pub const MAX_ELEMENTS: usize = 1_000_000;

/// Maximum number of objects and arrays in a body. An empty one takes more time than other values of its length.
pub const MAX_CONTAINERS: usize = 200_000;

/// The reason why a body cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// The body is not JSON, or is nested too deeply. The field is the reason.
    #[error("the request body is not JSON: {0}")]
    Syntax(String),
    /// The body has more than [`MAX_MEMBERS`] members, [`MAX_ELEMENTS`] elements or [`MAX_CONTAINERS`] containers.
    #[error(
        "the request body has more than {MAX_MEMBERS} object members, {MAX_ELEMENTS} array elements or {MAX_CONTAINERS} \
         objects and arrays, which is the maximum that the gateway reads"
    )]
    TooManyValues,
}

/// The value at a JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JsonValue {
    /// A string.
    Text(Box<str>),
    /// An integer that fits in 64 bits, signed or unsigned.
    Integer(i128),
    /// `true` or `false`.
    Bool(bool),
    /// Any other number.
    Fraction,
    /// `null`.
    Null,
    /// An object or an array.
    Compound,
    /// A string longer than [`MAX_VALUE`] bytes.
    TooLong,
    /// Servers may read different values, because a member occurs more than once, or because its name differs from the
    /// pointer only in case. The field is the beginning of the member's name.
    Ambiguous(Box<str>),
}

impl JsonValue {
    /// Return the value as text if it is a string, an integer or a Boolean. Otherwise, return `None`.
    pub fn text(&self) -> Option<Cow<'_, str>> {
        match self {
            JsonValue::Text(text) => Some(Cow::Borrowed(text)),
            JsonValue::Integer(number) => Some(Cow::Owned(number.to_string())),
            JsonValue::Bool(value) => Some(Cow::Borrowed(if *value { "true" } else { "false" })),
            JsonValue::Fraction
            | JsonValue::Null
            | JsonValue::Compound
            | JsonValue::TooLong
            | JsonValue::Ambiguous(_) => None,
        }
    }
}

/// The values that were read from a body: a JSON document or a form.
#[derive(Debug, Clone, Default)]
pub struct JsonBody {
    pointers: Arc<JsonPointers>,
    values: Vec<Option<JsonValue>>,
    /// The JSON-RPC messages, if the reader was created to read them.
    pub messages: Option<Result<Messages, RpcError>>,
    /// The fields of the form. `None` if the body is a JSON document.
    pub form: Option<FormFields>,
}

impl JsonBody {
    /// Create a body with these values, for sample requests.
    pub fn from_values(values: Vec<(JsonPointer, JsonValue)>) -> Self {
        let (pointers, values): (Vec<_>, Vec<_>) = values.into_iter().map(|(at, value)| (at, Some(value))).unzip();
        JsonBody { pointers: Arc::new(JsonPointers::new(pointers)), values, messages: None, form: None }
    }

    /// Create a body that is a form.
    pub fn from_form(form: FormFields) -> Self {
        JsonBody { form: Some(form), ..JsonBody::default() }
    }

    /// Return the value at a pointer. `pointer` must be one of the pointers with which the body was read.
    pub fn value(&self, pointer: &JsonPointer) -> Option<&JsonValue> {
        let index = self.pointers.list.iter().position(|other| other == pointer)?;
        self.values.get(index)?.as_ref()
    }
}

/// Read a body that is a JSON document.
///
/// # Errors
/// The body is not JSON, is nested too deeply, or has too many values.
pub fn read(body: &[u8], pointers: &Arc<JsonPointers>, reads_messages: bool) -> Result<JsonBody, JsonError> {
    let mut collector = Collector::new(pointers, reads_messages);
    let position = collector.root();
    let result = deserialize(body, ValueSeed { collector: &mut collector, position });
    collector.check(result)?;
    Ok(collector.finish())
}

/// Deserialize a whole body. The body is checked for valid UTF-8 once, because checking each string takes more time.
pub fn deserialize<'de, S: DeserializeSeed<'de>>(body: &'de [u8], seed: S) -> Result<S::Value, JsonError> {
    let syntax = |error: &dyn fmt::Display| JsonError::Syntax(error.to_string());
    let text = str::from_utf8(body).map_err(|error| syntax(&error))?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut deserializer).map_err(|error| syntax(&error))?;
    deserializer.end().map_err(|error| syntax(&error))?;
    Ok(value)
}

/// Collects values while a body is read.
#[derive(Debug, Default)]
pub struct Collector {
    pointers: Arc<JsonPointers>,
    values: Vec<Option<JsonValue>>,
    /// Bit set of the pointers whose value is ambiguous. Their members need no further comparison.
    ambiguous: u64,
    messages: Option<MessageReader>,
    members: usize,
    elements: usize,
    containers: usize,
    /// Buffer for the comparison of names.
    folded: Vec<u8>,
}

/// The position of a value in the document.
#[derive(Debug, Clone, Copy, Default)]
pub struct Position {
    /// Number of containers around the value.
    depth: usize,
    /// Bit set of the pointers whose first `depth` segments match the path of the value.
    matching: u64,
    /// Bit set of the [`RPC_POINTERS`] whose segments so far match the path of the value.
    rpc: u64,
    /// Number of containers around the JSON-RPC message: 1 in a batch, otherwise 0.
    rpc_base: usize,
}

impl Position {
    /// Return whether no pointer leads to this position or to a position within the value.
    pub fn is_irrelevant(self) -> bool {
        self.matching | self.rpc == 0
    }
}

/// Bit sets of the pointers that the members of an object have matched so far. If a later member matches the same
/// pointer, the value at the pointer is ambiguous.
#[derive(Debug, Default)]
pub struct SeenMembers {
    matching: u64,
    rpc: u64,
}

/// The position of the next element of an array.
#[derive(Debug)]
pub struct Elements {
    array: Position,
    next: usize,
    /// The last element to which a pointer leads.
    last: Option<usize>,
}

/// Return the bits of the first `count` pointers.
fn all_bits(count: usize) -> u64 {
    if count >= MAX_POINTERS { u64::MAX } else { (1 << count) - 1 }
}

impl Collector {
    /// Create a collector for the values at these pointers, at most [`MAX_POINTERS`].
    pub fn new(pointers: &Arc<JsonPointers>, reads_messages: bool) -> Self {
        Collector {
            values: vec![None; pointers.list.len()],
            pointers: pointers.clone(),
            messages: reads_messages.then(MessageReader::default),
            ..Collector::default()
        }
    }

    /// Return the position of the whole document.
    pub fn root(&self) -> Position {
        Position { matching: all_bits(self.pointers.list.len()), rpc: self.rpc_bits(), ..Position::default() }
    }

    fn rpc_bits(&self) -> u64 {
        // After an error, the other messages do not matter.
        let is_read = self.messages.as_ref().is_some_and(|messages| !messages.has_failed());
        if is_read { all_bits(RPC_POINTERS.list.len()) } else { 0 }
    }

    /// Count a member of an object.
    ///
    /// # Errors
    /// The body has more than [`MAX_MEMBERS`] members.
    pub fn count_member<E: Error>(&mut self) -> Result<(), E> {
        self.members += 1;
        if self.members > MAX_MEMBERS { Err(E::custom(JsonError::TooManyValues)) } else { Ok(()) }
    }

    /// Count an element of an array.
    ///
    /// # Errors
    /// The body has more than [`MAX_ELEMENTS`] elements.
    pub fn count_element<E: Error>(&mut self) -> Result<(), E> {
        self.elements += 1;
        if self.elements > MAX_ELEMENTS { Err(E::custom(JsonError::TooManyValues)) } else { Ok(()) }
    }

    /// Count an object or an array.
    ///
    /// # Errors
    /// The body has more than [`MAX_CONTAINERS`] objects and arrays.
    pub fn count_container<E: Error>(&mut self) -> Result<(), E> {
        self.containers += 1;
        if self.containers > MAX_CONTAINERS { Err(E::custom(JsonError::TooManyValues)) } else { Ok(()) }
    }

    /// Return the result of reading a body, with [`JsonError::TooManyValues`] if a count has exceeded its maximum.
    ///
    /// # Errors
    /// The error of `result`.
    pub fn check<T>(&self, result: Result<T, JsonError>) -> Result<T, JsonError> {
        match self.members > MAX_MEMBERS || self.elements > MAX_ELEMENTS || self.containers > MAX_CONTAINERS {
            true => Err(JsonError::TooManyValues),
            false => result,
        }
    }

    /// Return the position of the member `key` of an object. `seen` contains the members of this object that have been
    /// read.
    pub fn member(&mut self, object: Position, seen: &mut SeenMembers, key: &str) -> Position {
        let mut member = Position { depth: object.depth + 1, rpc_base: object.rpc_base, ..Position::default() };
        let Collector { pointers, values, ambiguous, messages, folded, .. } = self;
        for index in bits(pointers.similar(object.depth, object.matching & !*ambiguous, key, folded)) {
            if pointers.list[index].segment(object.depth) == Some(key) && seen.matching >> index & 1 == 0 {
                member.matching |= 1 << index;
            } else {
                // The name differs from the segment only in case, or is repeated.
                *ambiguous |= 1 << index;
                values[index] = Some(JsonValue::Ambiguous(shortened(key)));
            }
        }
        seen.matching |= member.matching;
        if let Some(messages) = messages
            && object.rpc > 0
        {
            let depth = object.depth - object.rpc_base;
            for index in bits(RPC_POINTERS.similar(depth, object.rpc & !messages.ambiguous(), key, folded)) {
                if RPC_POINTERS.list[index].segment(depth) == Some(key) && seen.rpc >> index & 1 == 0 {
                    member.rpc |= 1 << index;
                } else {
                    messages.found(index, JsonValue::Ambiguous(shortened(key)));
                }
            }
            seen.rpc |= member.rpc;
        }
        member
    }

    /// Return the positions of the elements of an array.
    pub fn elements(&self, array: Position) -> Elements {
        let indices = bits(array.matching).filter_map(|bit| self.pointers.list[bit].index(array.depth));
        Elements { array, next: 0, last: indices.max() }
    }

    /// Return the position of the next element of an array. Return `None` if all further elements are irrelevant.
    pub fn element(&self, elements: &mut Elements) -> Option<Position> {
        let Elements { array, next: index, last } = *elements;
        elements.next += 1;
        let rpc = if array.depth == 0 { self.rpc_bits() } else { 0 };
        if rpc == 0 && last.is_none_or(|last| index > last) {
            return None;
        }
        let is_here = |bit: &usize| self.pointers.list[*bit].index(array.depth) == Some(index);
        let matching = bits(array.matching).filter(is_here).fold(0, |found, bit| found | 1 << bit);
        let rpc_base = if array.depth == 0 { 1 } else { array.rpc_base };
        Some(Position { depth: array.depth + 1, matching, rpc, rpc_base })
    }

    /// Return the position of an element of an array that [`element`](Self::element) finds irrelevant.
    pub fn irrelevant_element(array: Position) -> Position {
        Position { depth: array.depth + 1, rpc_base: array.rpc_base, ..Position::default() }
    }

    /// Record the value at a position. The closure `value` is called only if a pointer may lead to this position.
    pub fn value(&mut self, position: Position, value: impl FnOnce() -> JsonValue) {
        if position.is_irrelevant() {
            return;
        }
        let value = value();
        for index in bits(position.matching).filter(|index| self.pointers.list[*index].depth() == position.depth) {
            // Keep the existing value if it is ambiguous.
            self.values[index].get_or_insert_with(|| value.clone());
        }
        if let Some(messages) = &mut self.messages {
            let depth = position.depth - position.rpc_base;
            for index in bits(position.rpc).filter(|index| RPC_POINTERS.list[*index].depth() == depth) {
                messages.found(index, value.clone());
            }
            if depth == 0 && value != JsonValue::Compound {
                messages.found_other();
            }
        }
    }

    /// Record the end of an object.
    pub fn object_end(&mut self, position: Position) {
        let is_message = position.depth == position.rpc_base;
        if let Some(messages) = self.messages.as_mut().filter(|_| is_message) {
            messages.end_message();
        }
    }

    /// Record the end of an array.
    pub fn array_end(&mut self, position: Position) {
        if let Some(messages) = &mut self.messages {
            match position.depth {
                0 => messages.end_batch(),
                1 if position.rpc_base == 1 => messages.found_other(),
                _ => {}
            }
        }
    }

    /// Return the values that were collected.
    pub fn finish(self) -> JsonBody {
        let messages = self.messages.map(MessageReader::finish);
        JsonBody { pointers: self.pointers, values: self.values, messages, form: None }
    }
}

/// Return the value of a string.
pub fn text_value(text: &str) -> JsonValue {
    if text.len() > MAX_VALUE { JsonValue::TooLong } else { JsonValue::Text(text.into()) }
}

/// Return the beginning of a member's name, for an error message.
pub fn shortened(key: &str) -> Box<str> {
    key.chars().take(MAX_NAMED_KEY).collect::<String>().into()
}

/// Maximum number of characters of a member name in an error message.
const MAX_NAMED_KEY: usize = 64;

/// Reads a value of any type.
struct ValueSeed<'c> {
    collector: &'c mut Collector,
    position: Position,
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.collector.value(self.position, || JsonValue::Null);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.collector.value(self.position, || JsonValue::Bool(value));
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.collector.value(self.position, || JsonValue::Integer(value.into()));
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.collector.value(self.position, || JsonValue::Integer(value.into()));
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        self.collector.value(self.position, || JsonValue::Fraction);
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.collector.value(self.position, || text_value(text));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let ValueSeed { collector, position } = self;
        if position.is_irrelevant() {
            return Skip(collector).visit_seq(seq).map(drop);
        }
        collector.count_container()?;
        collector.value(position, || JsonValue::Compound);
        let mut elements = collector.elements(position);
        while let Some(position) = collector.element(&mut elements) {
            if seq.next_element_seed(ValueSeed { collector, position })?.is_none() {
                break;
            }
            collector.count_element()?;
        }
        while seq.next_element_seed(Skip(collector))?.is_some() {
            collector.count_element()?;
        }
        collector.array_end(position);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let ValueSeed { collector, position: object } = self;
        if object.is_irrelevant() {
            return Skip(collector).visit_map(map).map(drop);
        }
        collector.count_container()?;
        collector.value(object, || JsonValue::Compound);
        let mut seen = SeenMembers::default();
        while let Some(position) = map.next_key_seed(KeySeed { collector, object, seen: &mut seen })? {
            map.next_value_seed(ValueSeed { collector, position })?;
        }
        collector.object_end(object);
        Ok(())
    }
}

/// Reads the name of a member, and returns the position of its value.
struct KeySeed<'c> {
    collector: &'c mut Collector,
    object: Position,
    seen: &'c mut SeenMembers,
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Position;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Position, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Position;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Position, E> {
        self.collector.count_member()?;
        Ok(self.collector.member(self.object, self.seen, key))
    }
}

/// Reads and discards a value to which no pointer leads.
pub struct Skip<'c>(pub &'c mut Collector);

/// The type of a value that was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skipped {
    /// A string or an array.
    TextOrArray,
    /// Any other value.
    Other,
}

impl<'de> DeserializeSeed<'de> for Skip<'_> {
    type Value = Skipped;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Skipped, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Skip<'_> {
    type Value = Skipped;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Skipped, E> {
        Ok(Skipped::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Skipped, E> {
        Ok(Skipped::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Skipped, E> {
        Ok(Skipped::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Skipped, E> {
        Ok(Skipped::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Skipped, E> {
        Ok(Skipped::Other)
    }

    fn visit_str<E>(self, _: &str) -> Result<Skipped, E> {
        Ok(Skipped::TextOrArray)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Skipped, A::Error> {
        self.0.count_container()?;
        while seq.next_element_seed(Skip(self.0))?.is_some() {
            self.0.count_element()?;
        }
        Ok(Skipped::TextOrArray)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Skipped, A::Error> {
        self.0.count_container()?;
        while map.next_key_seed(Skip(self.0))?.is_some() {
            self.0.count_member()?;
            map.next_value_seed(Skip(self.0))?;
        }
        Ok(Skipped::Other)
    }
}

// === JSON pointers (RFC 6901) ===

/// Maximum number of segments of a pointer.
pub const MAX_SEGMENTS: usize = 16;

/// A JSON pointer (RFC 6901) with at least one segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonPointer {
    text: Box<str>,
    segments: Box<[Segment]>,
}

/// A segment of a pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    /// The name of a member, with escape sequences decoded.
    name: Box<str>,
    /// The index of an array element. `None` if the name is not an index.
    index: Option<usize>,
}

impl JsonPointer {
    /// Parse a JSON pointer. Return `None` if the text is not a JSON pointer, points to the whole document, or has more
    /// than [`MAX_SEGMENTS`] segments.
    pub fn parse(text: &str) -> Option<Self> {
        let mut segments = Vec::new();
        for segment in text.strip_prefix('/')?.split('/') {
            // Reject a `~` that is not followed by 0 or 1 (RFC 6901 §3).
            let mut parts = segment.split('~').skip(1);
            if !parts.all(|part| part.starts_with(['0', '1'])) {
                return None;
            }
            // An array index has no leading zeros (RFC 6901 §4) and no sign.
            let is_index = segment == "0" || segment.starts_with(|first: char| matches!(first, '1'..='9'));
            let index = segment.parse().ok().filter(|_| is_index);
            segments.push(Segment { name: segment.replace("~1", "/").replace("~0", "~").into(), index });
        }
        (segments.len() <= MAX_SEGMENTS).then(|| JsonPointer { text: text.into(), segments: segments.into() })
    }

    /// Return the pointer as it is written in the configuration.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Return the number of segments.
    fn depth(&self) -> usize {
        self.segments.len()
    }

    /// Return the segment at this depth as the name of a member. The first segment has depth 0.
    fn segment(&self, depth: usize) -> Option<&str> {
        self.segments.get(depth).map(|segment| &*segment.name)
    }

    /// Return the segment at this depth as the index of an array element.
    fn index(&self, depth: usize) -> Option<usize> {
        self.segments.get(depth)?.index
    }
}

/// A list of JSON pointers, with an index of the names in their segments.
#[derive(Debug, Default)]
pub struct JsonPointers {
    pub(super) list: Box<[JsonPointer]>,
    /// For each depth, the names of the segments at this depth. The number of a name is the index of its pointer.
    names: Vec<NameIndex>,
}

impl JsonPointers {
    /// Create the list of these pointers, at most [`MAX_POINTERS`].
    pub fn new(list: Vec<JsonPointer>) -> Self {
        let depth = list.iter().map(JsonPointer::depth).max().unwrap_or(0);
        let names = |depth| list.iter().map(move |pointer| pointer.segment(depth));
        let names = (0..depth).map(|depth| NameIndex::new(names(depth), None)).collect();
        JsonPointers { list: list.into(), names }
    }

    /// Return whether the list has no pointers.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Return the pointers in the bit set `among` whose segment at this depth differs from `key` at most in case.
    fn similar(&self, depth: usize, among: u64, key: &str, folded: &mut Vec<u8>) -> u64 {
        if among == 0 {
            return 0;
        }
        self.names.get(depth).map_or(0, |names| names.similar(among, key, folded))
    }
}

impl fmt::Display for JsonPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pointers(written: &[&str]) -> Arc<JsonPointers> {
        Arc::new(JsonPointers::new(written.iter().map(|text| JsonPointer::parse(text).unwrap()).collect()))
    }

    fn value(pointer: &str, body: &str) -> Option<JsonValue> {
        let all = pointers(&["/other/deep", pointer]);
        read(body.as_bytes(), &all, false).unwrap().value(&all.list[1]).cloned()
    }

    #[test]
    fn value_at_a_pointer_is_found() {
        let text = |text: &str| Some(JsonValue::Text(text.into()));
        let ambiguous = |key: &str| Some(JsonValue::Ambiguous(key.into()));
        for (pointer, body, expected) in [
            ("/model", r#"{"model":"a","x":{"model":"b"}}"#, text("a")),
            ("/model", r#"{"mod\u0065l":"\u00e9\n"}"#, text("é\n")),
            ("/a/1/b", r#"{"a":[{"b":1},{"b":"2"},{"b":3}]}"#, text("2")),
            ("/a/01", r#"{"a":[1,2]}"#, None),
            ("/a/+1", r#"{"a":[1,2]}"#, None),
            ("/a/-", r#"{"a":[1,2]}"#, None),
            ("/a/1", r#"{"a":{"1":"x"}}"#, text("x")),
            ("/0", r#"["x"]"#, text("x")),
            ("/a~1b", r#"{"a/b":"x"}"#, text("x")),
            ("/n", r#"{"n":-7}"#, Some(JsonValue::Integer(-7))),
            ("/n", r#"{"n":18446744073709551615}"#, Some(JsonValue::Integer(u64::MAX.into()))),
            ("/n", r#"{"n":18446744073709551616}"#, Some(JsonValue::Fraction)),
            ("/n", r#"{"n":1.0}"#, Some(JsonValue::Fraction)),
            ("/n", r#"{"n":true}"#, Some(JsonValue::Bool(true))),
            ("/n", r#"{"n":null}"#, Some(JsonValue::Null)),
            ("/n", r#"{"n":{"a":1}}"#, Some(JsonValue::Compound)),
            ("/n", r#"{"n":[]}"#, Some(JsonValue::Compound)),
            ("/n/a", r#"{"n":"text"}"#, None),
            ("/n", r#"{}"#, None),
            ("/n", r#""n""#, None),
            ("/n", r#"{"n":"a","n":"a"}"#, ambiguous("n")),
            ("/n", r#"{"n":"a","\u006e":"b"}"#, ambiguous("n")),
            ("/n", r#"{"N":"a"}"#, ambiguous("N")),
            ("/n", r#"{"N":"a","n":"b"}"#, ambiguous("N")),
            ("/task", r#"{"taſK":"a"}"#, ambiguous("taſK")),
            ("/a/b", r#"{"a":{"b":1},"a":{}}"#, ambiguous("a")),
            ("/a/b", r#"{"a":{"b":1,"B":2}}"#, ambiguous("B")),
            ("/a/b", r#"{"a":{"b":1},"c":{"b":1,"b":2}}"#, Some(JsonValue::Integer(1))),
        ] {
            assert_eq!(value(pointer, body), expected, "{pointer} {body}");
        }
        let long = |length: usize| format!(r#"{{"n":"{}"}}"#, "x".repeat(length));
        assert_eq!(value("/n", &long(MAX_VALUE + 1)), Some(JsonValue::TooLong));
        assert_eq!(value("/n", &long(MAX_VALUE)), text(&"x".repeat(MAX_VALUE)));
    }

    #[test]
    fn bodies_that_are_not_json_are_rejected() {
        let deep = format!(r#"{{"n":{}{}}}"#, "[".repeat(200), "]".repeat(200));
        for body in ["", "{", "{}{}", "n=1", "\u{feff}{}", r#"{"n":NaN}"#, r#"{"n":"\ud800"}"#, r#"{"n":1e999}"#, &deep]
        {
            assert!(read(body.as_bytes(), &pointers(&["/n"]), true).is_err(), "{body}");
        }
        assert!(read(b"{\"n\":\"\xff\"}", &pointers(&["/n"]), true).is_err(), "not UTF-8");
    }

    #[test]
    fn all_pointers_of_the_maximum_are_read() {
        let written: Vec<_> = (0..MAX_POINTERS).map(|index| format!("/p{index}")).collect();
        let all = pointers(&written.iter().map(String::as_str).collect::<Vec<_>>());
        let members: Vec<_> = (0..MAX_POINTERS).map(|index| format!("\"p{index}\":{index}")).collect();
        let body = read(format!("{{{}}}", members.join(",")).as_bytes(), &all, false).unwrap();
        for (index, pointer) in all.list.iter().enumerate() {
            assert_eq!(body.value(pointer), Some(&JsonValue::Integer(index as i128)));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes, &pointers(&["/a", "/0/b"]), true);
        }

        /// The collected value is the value that serde_json finds at the pointer, regardless of the value's position in
        /// the document.
        #[test]
        fn value_agrees_with_serde_json(before in "[b-z]{1,4}", text in "\\PC{0,20}", index in 0..4usize) {
            let mut elements = vec![serde_json::json!({ "b": 1 }); 4];
            elements[index] = serde_json::json!({ "b": text });
            let document = serde_json::json!({ before: { "a": elements.clone() }, "a": elements });
            let pointer = format!("/a/{index}/b");
            prop_assert_eq!(value(&pointer, &document.to_string()), Some(JsonValue::Text(text.into())));
        }
    }

    #[test]
    fn escapes_are_decoded_and_invalid_pointers_rejected() {
        for (text, expected) in [
            ("/model", Some(&["model"][..])),
            ("/a/0/b", Some(&["a", "0", "b"])),
            ("/", Some(&[""])),
            ("/a~1b/m~0n", Some(&["a/b", "m~n"])),
            ("/~01", Some(&["~1"])),
            ("/c%d/e^f", Some(&["c%d", "e^f"])),
            ("", None),
            ("model", None),
            ("/~2", None),
            ("/a~", None),
        ] {
            let pointer = JsonPointer::parse(text);
            let found =
                pointer.as_ref().map(|pointer| pointer.segments.iter().map(|one| &*one.name).collect::<Vec<_>>());
            assert_eq!(found, expected.map(<[_]>::to_vec), "{text}");
        }
        assert!(JsonPointer::parse(&"/a".repeat(MAX_SEGMENTS)).is_some());
        assert!(JsonPointer::parse(&"/a".repeat(MAX_SEGMENTS + 1)).is_none());
    }
}
