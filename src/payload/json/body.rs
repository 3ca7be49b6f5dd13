//! Reads a JSON request body in one pass, and collects the values at JSON pointers and the JSON-RPC messages.
//!
//! All other values are discarded. A value is ambiguous if servers may read different values for its path. This is the
//! case if a member of the path occurs twice, or if two member names differ only in case, such as `model` and `Model`.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::payload::json::rpc::{MessageReader, Messages, RPC_POINTERS, RpcError};

/// Maximum length of a collected string in bytes.
pub const MAX_VALUE: usize = 1024;

/// Maximum number of JSON pointers in a configuration.
pub const MAX_POINTERS: usize = 64;

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

/// The values that were read from a body.
#[derive(Debug, Clone, Default)]
pub struct JsonBody {
    pointers: Arc<[JsonPointer]>,
    values: Vec<Option<JsonValue>>,
    /// The JSON-RPC messages, if the reader was created to read them.
    pub messages: Option<Result<Messages, RpcError>>,
}

impl JsonBody {
    /// Create a body with these values, for sample requests.
    pub fn from_values(values: Vec<(JsonPointer, JsonValue)>) -> Self {
        let (pointers, values): (Vec<_>, Vec<_>) = values.into_iter().map(|(at, value)| (at, Some(value))).unzip();
        JsonBody { pointers: pointers.into(), values, messages: None }
    }

    /// Return the value at a pointer. `pointer` must be one of the pointers with which the body was read.
    pub fn value(&self, pointer: &JsonPointer) -> Option<&JsonValue> {
        let index = self.pointers.iter().position(|other| other == pointer)?;
        self.values.get(index)?.as_ref()
    }
}

/// Read a body that is a JSON document.
///
/// # Errors
/// The body is not JSON, or is nested too deeply.
pub fn read(body: &[u8], pointers: &Arc<[JsonPointer]>, reads_messages: bool) -> Result<JsonBody, serde_json::Error> {
    let mut collector = Collector::new(pointers, reads_messages);
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let position = collector.root();
    ValueSeed { collector: &mut collector, position }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(collector.finish())
}

/// Collects values while a body is read.
#[derive(Debug, Default)]
pub struct Collector {
    pointers: Arc<[JsonPointer]>,
    values: Vec<Option<JsonValue>>,
    messages: Option<MessageReader>,
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

/// Bit sets of the pointers that the members of an object have matched so far. If a later member matches the same
/// pointer, the value at the pointer is ambiguous.
#[derive(Debug, Default)]
pub struct SeenMembers {
    matching: u64,
    rpc: u64,
}

/// Return the indices of the bits that are set.
fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(index)
    })
}

/// Return the bits of the first `count` pointers.
fn all_bits(count: usize) -> u64 {
    if count >= MAX_POINTERS { u64::MAX } else { (1 << count) - 1 }
}

impl Collector {
    /// Create a collector for the values at these pointers, at most [`MAX_POINTERS`].
    pub fn new(pointers: &Arc<[JsonPointer]>, reads_messages: bool) -> Self {
        Collector {
            values: vec![None; pointers.len()],
            pointers: pointers.clone(),
            messages: reads_messages.then(MessageReader::default),
        }
    }

    /// Return the position of the whole document.
    pub fn root(&self) -> Position {
        Position { matching: all_bits(self.pointers.len()), rpc: self.rpc_bits(), ..Position::default() }
    }

    fn rpc_bits(&self) -> u64 {
        if self.messages.is_some() { all_bits(RPC_POINTERS.len()) } else { 0 }
    }

    /// Return the position of the member `key` of an object. `seen` contains the members of this object that have been
    /// read.
    pub fn member(&mut self, object: Position, seen: &mut SeenMembers, key: &str) -> Position {
        let mut member = Position { depth: object.depth + 1, rpc_base: object.rpc_base, ..Position::default() };
        for index in bits(object.matching) {
            match self.pointers[index].segment(object.depth).map(|segment| compare(segment, key)) {
                Some(Spelling::Equal) if seen.matching >> index & 1 == 0 => member.matching |= 1 << index,
                Some(Spelling::Equal | Spelling::OtherCase) => {
                    self.values[index] = Some(JsonValue::Ambiguous(shortened(key)));
                }
                Some(Spelling::Different) | None => {}
            }
        }
        seen.matching |= member.matching;
        if let Some(messages) = &mut self.messages {
            for index in bits(object.rpc) {
                let segment = RPC_POINTERS[index].segment(object.depth - object.rpc_base);
                match segment.map(|segment| compare(segment, key)) {
                    Some(Spelling::Equal) if seen.rpc >> index & 1 == 0 => member.rpc |= 1 << index,
                    Some(Spelling::Equal | Spelling::OtherCase) => {
                        messages.found(index, JsonValue::Ambiguous(shortened(key)));
                    }
                    Some(Spelling::Different) | None => {}
                }
            }
            seen.rpc |= member.rpc;
        }
        member
    }

    /// Return the position of an element of an array.
    pub fn element(&self, array: Position, index: usize) -> Position {
        let mut element = Position { depth: array.depth + 1, rpc_base: array.rpc_base, ..Position::default() };
        if array.depth == 0 {
            (element.rpc, element.rpc_base) = (self.rpc_bits(), 1);
        }
        for bit in bits(array.matching) {
            // An array index has no leading zeros (RFC 6901 §4) and no sign.
            let is_index = |segment: &str| {
                segment.parse() == Ok(index)
                    && !(segment.len() > 1 && segment.starts_with('0'))
                    && !segment.starts_with('+')
            };
            if self.pointers[bit].segment(array.depth).is_some_and(is_index) {
                element.matching |= 1 << bit;
            }
        }
        element
    }

    /// Record the value at a position. The closure `value` is called only if a pointer may lead to this position.
    pub fn value(&mut self, position: Position, value: impl FnOnce() -> JsonValue) {
        if position.matching | position.rpc == 0 {
            return;
        }
        let value = value();
        for index in bits(position.matching).filter(|index| self.pointers[*index].depth() == position.depth) {
            // Keep the existing value if it is ambiguous.
            self.values[index].get_or_insert_with(|| value.clone());
        }
        if let Some(messages) = &mut self.messages {
            let depth = position.depth - position.rpc_base;
            for index in bits(position.rpc).filter(|index| RPC_POINTERS[*index].depth() == depth) {
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
        JsonBody { pointers: self.pointers, values: self.values, messages }
    }
}

/// Return the value of a string.
pub fn text_value(text: &str) -> JsonValue {
    if text.len() > MAX_VALUE { JsonValue::TooLong } else { JsonValue::Text(text.into()) }
}

/// The result of comparing the name of a member with a segment of a pointer.
enum Spelling {
    Equal,
    /// The name differs from the segment only in case, so servers that ignore case treat both as equal.
    OtherCase,
    Different,
}

/// Return the text with its case folded, for comparisons that ignore case. As in Unicode, `ſ` becomes `s`, and the
/// Kelvin sign becomes `k`, because some servers fold case in this way.
pub fn folded(text: &str) -> impl Iterator<Item = char> + '_ {
    text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase)
}

fn compare(segment: &str, key: &str) -> Spelling {
    match segment == key {
        true => Spelling::Equal,
        false if folded(segment).eq(folded(key)) => Spelling::OtherCase,
        false => Spelling::Different,
    }
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
        collector.value(position, || JsonValue::Compound);
        for index in 0.. {
            let position = collector.element(position, index);
            if seq.next_element_seed(ValueSeed { collector, position })?.is_none() {
                break;
            }
        }
        collector.array_end(position);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let ValueSeed { collector, position } = self;
        collector.value(position, || JsonValue::Compound);
        let mut seen = SeenMembers::default();
        while let Some(key) = map.next_key_seed(KeySeed)? {
            let position = collector.member(position, &mut seen, &key);
            map.next_value_seed(ValueSeed { collector, position })?;
        }
        collector.object_end(position);
        Ok(())
    }
}

/// Reads a key with its escape sequences decoded.
pub struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(key))
    }
    fn visit_str<E>(self, key: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(key.to_owned()))
    }
}

// === JSON pointers (RFC 6901) ===

/// Maximum number of segments of a pointer.
pub const MAX_SEGMENTS: usize = 16;

/// A JSON pointer (RFC 6901) with at least one segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonPointer {
    text: Box<str>,
    /// The segments of the pointer, with escape sequences decoded.
    segments: Box<[Box<str>]>,
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
            segments.push(segment.replace("~1", "/").replace("~0", "~").into());
        }
        (segments.len() <= MAX_SEGMENTS).then(|| JsonPointer { text: text.into(), segments: segments.into() })
    }

    /// Return the pointer as it is written in the configuration.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Return the number of segments.
    pub(super) fn depth(&self) -> usize {
        self.segments.len()
    }

    /// Return the segment at this depth. The first segment has depth 0.
    pub(super) fn segment(&self, depth: usize) -> Option<&str> {
        self.segments.get(depth).map(|segment| &**segment)
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

    fn pointers(written: &[&str]) -> Arc<[JsonPointer]> {
        written.iter().map(|text| JsonPointer::parse(text).unwrap()).collect()
    }

    fn value(pointer: &str, body: &str) -> Option<JsonValue> {
        let all = pointers(&["/other/deep", pointer]);
        read(body.as_bytes(), &all, false).unwrap().value(&all[1]).cloned()
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
        for (index, pointer) in all.iter().enumerate() {
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
            let found = pointer.as_ref().map(|pointer| pointer.segments.iter().map(|one| &**one).collect::<Vec<_>>());
            assert_eq!(found, expected.map(<[_]>::to_vec), "{text}");
        }
        assert!(JsonPointer::parse(&"/a".repeat(MAX_SEGMENTS)).is_some());
        assert!(JsonPointer::parse(&"/a".repeat(MAX_SEGMENTS + 1)).is_none());
    }
}
