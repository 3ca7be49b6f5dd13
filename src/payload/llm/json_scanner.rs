//! Incremental scanner of JSON text. The scanner finds the values at a few paths and measures the length of generated
//! text. Its memory is bounded.
//!
//! A response may be one long document, a sequence of documents (NDJSON), or an array of documents as Gemini streams
//! it. The text arrives in chunks that may end anywhere, and the gateway forwards each chunk immediately. The scanner
//! stores only the values at the paths.

use std::sync::Arc;

use memchr::memchr2;

/// Maximum number of segments of a path.
pub const MAX_SEGMENTS: usize = 8;

/// Maximum number of paths.
pub const MAX_PATHS: usize = 32;

/// Maximum number of nested objects and arrays. The scanner treats a document with more as malformed.
const MAX_DEPTH: usize = 128;

/// Maximum length in bytes of a value that the scanner stores. Usage objects have about 500 bytes.
const MAX_VALUE: usize = 16 << 10;

/// Maximum length in bytes of a key that the scanner compares.
const MAX_KEY: usize = 64;

/// Up to this length in bytes, a loop over words finds the end of a string faster than `memchr`. Most keys are shorter.
const SHORT_STRING: usize = 24;

/// Return whether a string with this key is generated text, in the documents of any provider.
fn is_text_key(key: &[u8]) -> bool {
    matches!(
        key,
        b"content"
            | b"text"
            | b"delta"
            | b"arguments"
            | b"partial_json"
            | b"thinking"
            | b"reasoning"
            | b"reasoning_content"
            | b"refusal"
            | b"response"
            | b"completion"
    )
}

/// Return one of 64 bits for a key, as in a Bloom filter. Different keys usually have different bits.
fn key_bit(key: &[u8]) -> u64 {
    let first = usize::from(key.first().copied().unwrap_or_default());
    1 << ((first * 7 + key.len()) % 64)
}

/// Return the offset of the first quotation mark or backslash. The first bytes are compared in words of 8 bytes, because
/// most strings are shorter than [`SHORT_STRING`].
fn find_string_end(text: &[u8]) -> Option<usize> {
    let (words, _) = text.as_chunks::<8>();
    for (index, word) in words.iter().take(SHORT_STRING / 8).enumerate() {
        let word = u64::from_le_bytes(*word);
        let ends = mark_zero_bytes(word ^ repeat(b'"')) | mark_zero_bytes(word ^ repeat(b'\\'));
        if ends > 0 {
            return Some(index * 8 + ends.trailing_zeros() as usize / 8);
        }
    }
    let scanned = (words.len() * 8).min(SHORT_STRING);
    memchr2(b'"', b'\\', &text[scanned..]).map(|offset| scanned + offset)
}

/// Return a word whose 8 bytes are `byte`.
const fn repeat(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Return a word in which the lowest set bit is in the lowest byte of `word` that is 0 (Mycroft). The result is 0 if no
/// byte of `word` is 0.
const fn mark_zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(repeat(1)) & !word & repeat(0x80)
}

/// Path of a value in a document. Each segment is the key of an object member, or the index of an array element in
/// decimal digits.
pub type JsonPath = Box<[Box<str>]>;

/// Receives the values that the scanner finds.
pub trait JsonSink {
    /// Called with the index of a path and the JSON text of the value at this path.
    fn value(&mut self, path: usize, json: &[u8]);
    /// Called with the length in bytes of a string of generated text.
    fn text(&mut self, bytes: u64);
    /// Called at the end of a document.
    fn document_end(&mut self);
}

/// The state of the scanner between two chunks.
#[derive(Debug)]
pub struct JsonScanner {
    paths: Arc<[JsonPath]>,
    /// The [bits](key_bit) of all segments of the paths.
    key_bits: u64,
    token: Token,
    depth: usize,
    /// Bit `depth - 1` is set if the container at this depth is an object.
    objects: u128,
    /// Whether the innermost open container is an object.
    is_in_object: bool,
    /// Whether the documents are the elements of an array.
    is_array: bool,
    expects_key: bool,
    key: Key,
    is_text: bool,
    /// Number of bytes of the current text. It may be negative directly after `\u`.
    text_length: i64,
    /// For each open container, the bit set of the paths that lead into it.
    entered: [u32; MAX_SEGMENTS + 1],
    /// For each open array, the index of the next element.
    indices: [u32; MAX_SEGMENTS + 1],
    /// The bit set of the paths that match the position of the next value so far.
    matching: u32,
    captured: Option<Captured>,
    value: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// The scanner is between two JSON tokens.
    Between,
    Key,
    KeyEscape,
    Text,
    TextEscape,
    /// The scanner is within a number, `true`, `false` or `null`.
    Scalar,
    /// The text is not JSON, or is nested too deeply.
    Malformed,
}

/// A value at a path that is being stored.
#[derive(Debug, Clone, Copy)]
struct Captured {
    paths: u32,
    depth: usize,
    is_too_long: bool,
}

#[derive(Debug, Clone, Copy)]
struct Key {
    bytes: [u8; MAX_KEY],
    /// Number of bytes of the key so far. `None` if the key is too long or has escape sequences. Such a key is equal to
    /// no segment of the paths.
    length: Option<usize>,
}

impl Key {
    fn push(&mut self, bytes: &[u8]) {
        self.length = self.length.and_then(|length| {
            let end = length + bytes.len();
            self.bytes.get_mut(length..end)?.copy_from_slice(bytes);
            Some(end)
        });
    }

    fn get(&self) -> Option<&[u8]> {
        self.bytes.get(..self.length?)
    }
}

impl JsonScanner {
    /// Create a scanner for the values at these paths. There may be at most [`MAX_PATHS`] paths with at most
    /// [`MAX_SEGMENTS`] segments.
    pub fn new(paths: Arc<[JsonPath]>) -> Self {
        let keys = paths.iter().flat_map(|path| path.iter());
        JsonScanner {
            key_bits: keys.map(|key| key_bit(key.as_bytes())).fold(0, |all, bit| all | bit),
            paths,
            token: Token::Between,
            depth: 0,
            objects: 0,
            is_in_object: false,
            is_array: false,
            expects_key: false,
            key: Key { bytes: [0; MAX_KEY], length: Some(0) },
            is_text: false,
            text_length: 0,
            entered: [0; MAX_SEGMENTS + 1],
            indices: [0; MAX_SEGMENTS + 1],
            matching: 0,
            captured: None,
            value: Vec::new(),
        }
    }

    /// Discard an unfinished document.
    pub fn reset(&mut self) {
        self.token = Token::Between;
        self.depth = 0;
        self.is_in_object = false;
        self.is_array = false;
        self.captured = None;
    }

    /// Scan the text up to the end of a document, or to the end of the text. Return the number of scanned bytes.
    pub fn scan(&mut self, text: &[u8], sink: &mut impl JsonSink) -> usize {
        let mut at = 0;
        // Start of the part of the current value that has not been copied to `value` yet.
        let mut unkept = 0;
        while let Some(&byte) = text.get(at) {
            match self.token {
                Token::Malformed => return text.len(),
                Token::Key | Token::Text => {
                    let start = at;
                    let end = find_string_end(&text[at..]).map_or(text.len(), |offset| at + offset);
                    let is_whole_key = self.token == Token::Key && self.key.length == Some(0);
                    if self.token == Token::Text {
                        self.text_length += (end - at) as i64;
                    } else if !is_whole_key || text.get(end) != Some(&b'"') {
                        self.key.push(&text[at..end]);
                    }
                    at = end + 1;
                    match (text.get(end), self.token) {
                        (None, _) => at = end,
                        (Some(b'"'), Token::Key) if is_whole_key => {
                            // Compare the key without copying it, because the whole key is in this chunk.
                            self.end_key(Some(&text[start..end]).filter(|key| key.len() <= MAX_KEY));
                            // Skip the separator here, because this is faster than one step of the outer loop per byte.
                            while let Some(b':' | b' ') = text.get(at) {
                                at += 1;
                            }
                        }
                        (Some(b'"'), Token::Key) => {
                            let key = self.key;
                            self.end_key(key.get());
                        }
                        (Some(b'"'), _) => {
                            self.token = Token::Between;
                            if self.is_text && self.text_length > 0 {
                                sink.text(self.text_length as u64);
                            }
                            self.end_value(&text[..at], &mut unkept, sink);
                        }
                        (Some(_), Token::Key) => {
                            self.key.length = None;
                            self.token = Token::KeyEscape;
                        }
                        (Some(_), _) => self.token = Token::TextEscape,
                    }
                    continue;
                }
                Token::KeyEscape => self.token = Token::Key,
                Token::TextEscape => {
                    // Subtract one for `\u`, because its four hexadecimal digits are counted as text, but encode a
                    // character of about 3 bytes.
                    self.text_length += if byte == b'u' { -1 } else { 1 };
                    self.token = Token::Text;
                }
                Token::Scalar => match byte {
                    b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n' => {
                        self.token = Token::Between;
                        self.end_value(&text[..at], &mut unkept, sink);
                        continue;
                    }
                    _ => {}
                },
                Token::Between => match byte {
                    b' ' | b'\t' | b'\r' | b'\n' | b':' => {}
                    b',' => {
                        self.expects_key = self.is_in_object;
                        if !self.expects_key
                            && let Some(index) = self.indices.get_mut(self.depth)
                        {
                            *index = index.saturating_add(1);
                        }
                        while let Some(b' ') = text.get(at + 1) {
                            at += 1;
                        }
                    }
                    b'"' if self.expects_key => {
                        self.token = Token::Key;
                        self.key.length = Some(0);
                    }
                    b'"' => {
                        self.begin_value(at, &mut unkept);
                        self.token = Token::Text;
                        self.text_length = 0;
                    }
                    b'[' if self.depth == 0 && !self.is_array => self.is_array = true,
                    b']' if self.depth == 0 && self.is_array => self.is_array = false,
                    b'{' | b'[' => {
                        self.begin_value(at, &mut unkept);
                        self.open(byte == b'{');
                    }
                    b'}' | b']' => {
                        if self.depth == 0 || self.is_in_object != (byte == b'}') {
                            self.token = Token::Malformed;
                            continue;
                        }
                        self.depth -= 1;
                        self.is_in_object = self.depth > 0 && self.objects >> (self.depth - 1) & 1 == 1;
                        self.expects_key = false;
                        self.end_value(&text[..=at], &mut unkept, sink);
                        if self.depth == 0 {
                            sink.document_end();
                            return at + 1;
                        }
                    }
                    _ => {
                        self.begin_value(at, &mut unkept);
                        self.token = Token::Scalar;
                    }
                },
            }
            at += 1;
        }
        self.keep(&text[unkept.min(text.len())..]);
        text.len()
    }

    fn open(&mut self, is_object: bool) {
        if self.depth == MAX_DEPTH {
            self.token = Token::Malformed;
            return;
        }
        let bit = 1 << self.depth;
        self.objects = if is_object { self.objects | bit } else { self.objects & !bit };
        self.depth += 1;
        self.expects_key = is_object;
        self.is_in_object = is_object;
        if self.depth <= MAX_SEGMENTS {
            self.entered[self.depth] = self.matching;
            self.indices[self.depth] = 0;
        }
    }

    /// Record the end of a key. `key` is `None` if the key is equal to no segment of the paths.
    fn end_key(&mut self, key: Option<&[u8]>) {
        self.token = Token::Between;
        self.expects_key = false;
        self.is_text = key.is_some_and(is_text_key);
        let in_path = key.filter(|key| self.key_bits & key_bit(key) > 0);
        self.matching = in_path.map_or(0, |key| self.matching_paths(|segment| segment.as_bytes() == key));
    }

    /// Return the bit set of the paths that lead into the current container and whose next segment matches.
    fn matching_paths(&self, fits: impl Fn(&str) -> bool) -> u32 {
        let Some(mut candidates) = self.entered.get(self.depth).copied() else { return 0 };
        let mut matching = 0;
        while candidates > 0 {
            let index = candidates.trailing_zeros() as usize;
            candidates &= candidates - 1;
            let segment = self.paths.get(index).and_then(|path| path.get(self.depth - 1));
            if segment.is_some_and(|segment| fits(segment)) {
                matching |= 1 << index;
            }
        }
        matching
    }

    fn begin_value(&mut self, at: usize, unkept: &mut usize) {
        if self.depth == 0 {
            self.matching = u32::MAX;
        } else if !self.is_in_object {
            let index = self.indices.get(self.depth).copied().unwrap_or(u32::MAX);
            self.matching = self.matching_paths(|segment| segment.parse() == Ok(index));
        }
        if self.captured.is_some() || self.matching == 0 {
            return;
        }
        let complete = |(index, path): (usize, &JsonPath)| u32::from(path.len() == self.depth) << index;
        let paths = self.matching & self.paths.iter().enumerate().map(complete).fold(0, |all, bit| all | bit);
        if paths > 0 {
            self.captured = Some(Captured { paths, depth: self.depth, is_too_long: false });
            self.value.clear();
            *unkept = at;
        }
    }

    /// If a value is being stored and ends at the end of `text`, report it to `sink`.
    fn end_value(&mut self, text: &[u8], unkept: &mut usize, sink: &mut impl JsonSink) {
        if self.captured.is_none_or(|captured| captured.depth != self.depth) {
            return;
        }
        self.keep(&text[*unkept..]);
        *unkept = text.len();
        let Some(captured) = self.captured.take().filter(|captured| !captured.is_too_long) else { return };
        for index in (0..self.paths.len()).filter(|index| captured.paths >> index & 1 == 1) {
            sink.value(index, &self.value);
        }
    }

    fn keep(&mut self, part: &[u8]) {
        let Some(captured) = self.captured.as_mut().filter(|captured| !captured.is_too_long) else { return };
        if self.value.len() + part.len() > MAX_VALUE {
            captured.is_too_long = true;
            self.value = Vec::new();
        } else {
            self.value.extend_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    #[derive(Debug, Default, PartialEq)]
    struct Found {
        values: Vec<(usize, String)>,
        text: u64,
        documents: usize,
    }

    impl JsonSink for Found {
        fn value(&mut self, path: usize, json: &[u8]) {
            self.values.push((path, String::from_utf8_lossy(json).into_owned()));
        }
        fn text(&mut self, bytes: u64) {
            self.text += bytes;
        }
        fn document_end(&mut self) {
            self.documents += 1;
        }
    }

    fn paths(written: &[&str]) -> Arc<[JsonPath]> {
        written.iter().map(|path| path.split('/').skip(1).map(Into::into).collect()).collect()
    }

    fn scan_parts<'t>(written: &[&str], parts: impl IntoIterator<Item = &'t [u8]>) -> Found {
        let mut scanner = JsonScanner::new(paths(written));
        let mut found = Found::default();
        for mut part in parts {
            while !part.is_empty() {
                let scanned = scanner.scan(part, &mut found);
                part = &part[scanned..];
            }
        }
        assert!(scanner.value.capacity() <= 2 * MAX_VALUE);
        found
    }

    fn scan(written: &[&str], text: &str) -> Found {
        scan_parts(written, [text.as_bytes()])
    }

    fn values(written: &[&str], text: &str) -> Vec<String> {
        scan(written, text).values.into_iter().map(|(_, value)| value).collect()
    }

    #[test]
    fn end_of_a_string_is_found_at_every_offset() {
        // The bytes differ from `"` and `\\` in one bit, or are next to them.
        for filler in [b'x', b'!', b'#', b'[', b']', 0x22 ^ 0x80, 0x5C ^ 0x80, 0, 0xFF] {
            for length in 0..64 {
                let text = vec![filler; length];
                assert_eq!(find_string_end(&text), None, "{length} bytes {filler:#x}");
                for (offset, end) in (0..length).flat_map(|offset| [(offset, b'"'), (offset, b'\\')]) {
                    let mut text = text.clone();
                    text[offset] = end;
                    *text.last_mut().unwrap() = end;
                    assert_eq!(find_string_end(&text), Some(offset), "{length} bytes {filler:#x}");
                }
            }
        }
    }

    #[test]
    fn value_at_a_path_is_found() {
        for (path, text, expected) in [
            ("/usage", r#"{"usage":{"a":1}}"#, &[r#"{"a":1}"#][..]),
            ("/usage", r#"{"a":{"usage":1},"usage" : 7 }"#, &["7"]),
            ("/usage", r#"{"usage":null,"b":[{"usage":2}]}"#, &["null"]),
            ("/a/b", r#"{"a":{"b":"}\"{","c":2},"b":3}"#, &[r#""}\"{""#]),
            ("/a/1/b", r#"{"a":[{"b":1},{"b":2},{"b":3}]}"#, &["2"]),
            ("/a/1", r#"{"a":[1,[2,3],4]}"#, &["[2,3]"]),
            ("/a", r#"{"\u0061":1}"#, &[]),
            ("/a", r#"[{"a":1},{"a":2}]"#, &["1", "2"]),
            ("/a", "{\"a\":1}\n{\"a\":2}\n", &["1", "2"]),
            ("/a", r#"{"a":1"#, &[]),
            ("/a", r#"{"a":1]"#, &["1"]),
            ("/a", r#"{"b":1]{"a":2}"#, &[]),
            ("/a", "[DONE]", &[]),
            ("/a", r#"{"a":{}}"#, &["{}"]),
            ("/a", r#"{"b":{"c":{}},"a":[]}"#, &["[]"]),
        ] {
            assert_eq!(values(&[path], text), expected, "{path} {text}");
        }
        let found = scan(&["/a", "/a/b", "/c"], r#"{"c":1,"a":{"b":2}}"#);
        assert_eq!(
            found.values,
            [(2, "1".to_owned()), (0, r#"{"b":2}"#.to_owned())],
            "a value within a captured value is not reported separately"
        );
    }

    #[test]
    fn bytes_of_generated_text_are_counted() {
        for (text, expected) in [
            (r#"{"choices":[{"delta":{"content":"hello"}}]}"#, 5),
            (r#"{"content":"a\n\"bé"}"#, 6),
            (r#"{"content":"\u00e9\u4e2d"}"#, 6),
            (r#"{"role":"assistant","id":"x","content":""}"#, 0),
            (r#"{"content":[{"type":"text","text":"abc"}]}"#, 3),
            (r#"{"content":["abc","d"]}"#, 4),
        ] {
            assert_eq!(scan(&[], text).text, expected, "{text}");
        }
    }

    #[test]
    fn long_and_deep_values_use_bounded_memory() {
        let long = format!(r#"{{"a":"{}","b":1}}"#, "x".repeat(MAX_VALUE));
        assert_eq!(values(&["/a", "/b"], &long), ["1"], "a value that is too long is skipped");
        let fits = format!(r#"{{"a":"{}"}}"#, "x".repeat(MAX_VALUE - 2));
        assert_eq!(values(&["/a"], &fits)[0].len(), MAX_VALUE);
        let deep = |depth: usize| format!(r#"{{"b":{}{},"a":1}}"#, "[".repeat(depth), "]".repeat(depth));
        assert_eq!(values(&["/a"], &deep(MAX_DEPTH - 1)), ["1"]);
        assert_eq!(
            scan(&["/a"], &deep(MAX_DEPTH)),
            Found::default(),
            "a document that is nested too deeply has no values"
        );
        assert_eq!(scan(&["/a"], &"[".repeat(1 << 20)).documents, 0);
        let long_key = format!(r#"{{"{}":1,"a":2}}"#, "a".repeat(1 << 16));
        assert_eq!(values(&["/a"], &long_key), ["2"]);
    }

    fn json() -> impl Strategy<Value = Value> {
        let key = prop_oneof![Just("a"), Just("b"), Just("usage"), Just("content"), Just("é\n")];
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<i16>().prop_map(|quarters| Value::from(f64::from(quarters) / 4.0)),
            "\\PC{0,12}".prop_map(Value::from),
            Just(Value::from("\u{1}\\\"é{[,:")),
        ];
        scalar.prop_recursive(5, 40, 5, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                proptest::collection::vec((key.clone(), inner), 0..5).prop_map(|entries| {
                    Value::Object(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn scanner_agrees_with_serde_json(
            documents in proptest::collection::vec(json(), 1..4),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
            pretty in any::<bool>(),
        ) {
            const PATHS: [&str; 4] = ["/a", "/usage/b", "/b/1", "/content/0/a"];
            let documents: Vec<_> = documents.into_iter().filter(Value::is_object).collect();
            let write = |value: &Value| {
                if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) }.unwrap()
            };
            let text = documents.iter().map(write).collect::<Vec<_>>().join("\n");
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let parts = cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]);
            let found = scan_parts(&PATHS, parts);
            prop_assert_eq!(&found, &scan(&PATHS, &text), "the result does not depend on the chunks");
            prop_assert_eq!(found.documents, documents.len());
            for (index, path) in PATHS.iter().enumerate() {
                let expected: Vec<_> = documents.iter().filter_map(|value| value.pointer(path)).collect();
                let values = found.values.iter().filter(|(found, _)| *found == index);
                let values: Vec<Value> = values.map(|(_, json)| serde_json::from_str(json).unwrap()).collect();
                prop_assert_eq!(values.iter().collect::<Vec<_>>(), expected, "{}", path);
            }
        }

        #[test]
        fn any_bytes_are_scanned(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            scan_parts(&["/a"], [&bytes[..]]);
        }
    }
}
