//! Estimates the number of tokens of a JSON text from the classes of its bytes.
//!
//! Tokenizers merge frequent sequences: an English word is often one token, a random letter or digit much less than a
//! token, and a Chinese character about 0.7 tokens. The weights were fitted to the tokenizer o200k of OpenAI with least
//! squares of the relative error, on documentation, source code, manual pages and translations in 25 languages, and on
//! random digits, hexadecimal numbers, UUIDs, base64, numbers and dates.

use memchr::memchr;

/// The class of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Lower,
    /// A lowercase letter that is rare in most languages. It is frequent only in random text.
    RareLower,
    Upper,
    RareUpper,
    Digit,
    Space,
    /// A line break, a tab or another control character.
    Line,
    Punctuation,
    /// A byte of UTF-8 after the first byte of a character.
    Continuation,
    /// The first byte of a character of 2 bytes.
    Lead2,
    /// The first byte of a character of 3 bytes.
    Lead3,
    /// The first byte of a character of 3 bytes of Chinese, Japanese or Korean, or after them.
    LeadWide,
    /// The first byte of a character of 4 bytes, such as an emoji.
    Lead4,
}

const CLASSES: usize = 16;

const fn class_of(byte: u8) -> Class {
    let is_rare = matches!(byte | 0x20, b'j' | b'k' | b'q' | b'v' | b'w' | b'x' | b'z');
    match byte {
        b'a'..=b'z' if is_rare => Class::RareLower,
        b'a'..=b'z' => Class::Lower,
        b'A'..=b'Z' if is_rare => Class::RareUpper,
        b'A'..=b'Z' => Class::Upper,
        b'0'..=b'9' => Class::Digit,
        b' ' => Class::Space,
        0..0x20 | 0x7F => Class::Line,
        b'!'..=b'~' => Class::Punctuation,
        0x80..=0xC1 => Class::Continuation,
        0xC2..=0xDF => Class::Lead2,
        0xE0..=0xE2 => Class::Lead3,
        0xE3..=0xEF => Class::LeadWide,
        0xF0..=0xFF => Class::Lead4,
    }
}

const fn is_letter(class: Class) -> bool {
    matches!(class, Class::Lower | Class::RareLower | Class::Upper | Class::RareUpper)
}

/// Return the weight of a byte of the class `class` after a byte of the class `previous`, in hundredths of a token.
const fn pair_weight(previous: Class, class: Class) -> u8 {
    match class {
        Class::Lower | Class::RareLower | Class::Upper | Class::RareUpper => {
            let is_rare = matches!(class, Class::RareLower | Class::RareUpper);
            let is_upper = matches!(class, Class::Upper | Class::RareUpper);
            let is_after_lower = matches!(previous, Class::Lower | Class::RareLower);
            let starts_word = if is_letter(previous) { 0 } else { 22 };
            let follows_digit = if matches!(previous, Class::Digit) { 48 } else { 0 };
            let case = if !is_upper {
                0
            } else if is_after_lower {
                4 + 45
            } else {
                4
            };
            14 + starts_word + follows_digit + case + if is_rare { 109 } else { 0 }
        }
        // Up to three digits are a token. A space before a number is another one.
        Class::Digit => match previous {
            Class::Digit => 34,
            Class::Space => 34 + 76 + 117,
            _ => 34 + 76,
        },
        Class::Space => 0,
        Class::Line => match previous {
            Class::Line => 22,
            _ => 22 + 134,
        },
        Class::Punctuation => match previous {
            Class::Punctuation => 33,
            _ => 33 + 23,
        },
        Class::Continuation | Class::Lead3 => 13,
        Class::Lead2 => 13 + 5,
        Class::LeadWide => 13 + 33,
        Class::Lead4 => 13 + 180,
    }
}

/// The class of each byte.
static CLASS_OF: [Class; 256] = {
    let mut classes = [Class::Line; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = class_of(byte as u8);
        byte += 1;
    }
    classes
};

/// The weight of each pair of classes, at the index `previous * CLASSES + class`.
static PAIR_WEIGHTS: [u8; CLASSES * CLASSES] = {
    let all = [
        Class::Lower,
        Class::RareLower,
        Class::Upper,
        Class::RareUpper,
        Class::Digit,
        Class::Space,
        Class::Line,
        Class::Punctuation,
        Class::Continuation,
        Class::Lead2,
        Class::Lead3,
        Class::LeadWide,
        Class::Lead4,
    ];
    let mut weights = [0; CLASSES * CLASSES];
    let mut index = 0;
    while index < all.len() * all.len() {
        let (previous, class) = (all[index / all.len()], all[index % all.len()]);
        weights[previous as usize * CLASSES + class as usize] = pair_weight(previous, class);
        index += 1;
    }
    weights
};

/// Weight of a token.
const TOKEN: u64 = 100;

/// Number of bytes for which at least one token is assumed, such as of white space.
pub const MAX_BYTES_PER_TOKEN: u64 = 16;

/// The tokens of the parts of a text that were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextTokens {
    weight: u64,
    /// Number of bytes, without those of escape sequences.
    bytes: u64,
    previous: Class,
}

impl Default for TextTokens {
    fn default() -> Self {
        TextTokens { weight: 0, bytes: 0, previous: Class::Punctuation }
    }
}

impl TextTokens {
    /// Return the estimated number of tokens.
    pub fn tokens(self) -> u64 {
        self.weight.div_ceil(TOKEN).max(self.bytes.div_ceil(MAX_BYTES_PER_TOKEN))
    }

    /// Read a part of a JSON text. A character that is written as an escape sequence counts like the character itself.
    pub fn read(&mut self, mut json: &[u8]) {
        while let Some(at) = memchr(b'\\', json) {
            self.read_plain(&json[..at]);
            let escaped = &json[at + 1..];
            let length = match escaped.first() {
                Some(b'u') => {
                    let digits = escaped.get(1..5).and_then(|digits| str::from_utf8(digits).ok());
                    self.add_code_unit(digits.and_then(|digits| u16::from_str_radix(digits, 16).ok()).unwrap_or(0));
                    5
                }
                Some(b'n' | b't' | b'r' | b'b' | b'f') => {
                    self.add(Class::Line);
                    1
                }
                Some(_) | None => {
                    self.add(Class::Punctuation);
                    1
                }
            };
            json = escaped.get(length..).unwrap_or_default();
        }
        self.read_plain(json);
    }

    /// Return the tokens of a text.
    pub fn of(json: &[u8]) -> Self {
        let mut tokens = TextTokens::default();
        tokens.read(json);
        tokens
    }

    /// Return the tokens of both parts.
    #[must_use]
    pub fn plus(self, other: TextTokens) -> Self {
        TextTokens {
            weight: self.weight.saturating_add(other.weight),
            bytes: self.bytes.saturating_add(other.bytes),
            ..self
        }
    }

    /// Return the tokens without those of a part, such as an image.
    #[must_use]
    pub fn without(self, part: TextTokens) -> Self {
        TextTokens {
            weight: self.weight.saturating_sub(part.weight),
            bytes: self.bytes.saturating_sub(part.bytes),
            ..self
        }
    }

    fn read_plain(&mut self, text: &[u8]) {
        let TextTokens { mut weight, bytes, mut previous } = *self;
        for byte in text {
            let class = CLASS_OF[usize::from(*byte)];
            weight += u64::from(PAIR_WEIGHTS[previous as usize * CLASSES + class as usize]);
            previous = class;
        }
        *self = TextTokens { weight, bytes: bytes + text.len() as u64, previous };
    }

    fn add(&mut self, class: Class) {
        self.weight += u64::from(PAIR_WEIGHTS[self.previous as usize * CLASSES + class as usize]);
        self.bytes += 1;
        self.previous = class;
    }

    /// Add a UTF-16 code unit, which is a character or a half of one.
    fn add_code_unit(&mut self, unit: u16) {
        match unit {
            0..0x80 => self.add(class_of(unit as u8)),
            0x80..0x800 => self.add(Class::Lead2),
            0xD800..0xDC00 => self.add(Class::Lead4),
            0xDC00..0xE000 => {}
            0x800..0x3000 => self.add(Class::Lead3),
            _ => self.add(Class::LeadWide),
        }
        let continuations = match unit {
            0..0x80 => 0,
            0x80..0x800 | 0xD800..0xDC00 => 1,
            _ => 2,
        };
        for _ in 0..continuations {
            self.add(Class::Continuation);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// A text with the number of its tokens.
    #[derive(Deserialize)]
    struct Sample {
        class: String,
        tokens: u64,
        text: String,
    }

    fn estimate(json: &str) -> u64 {
        TextTokens::of(json.as_bytes()).tokens()
    }

    /// `tests/fixtures/o200k.json` contains texts with the counts of the tokenizer o200k (`tests/clients/o200k.mjs`).
    #[test]
    fn estimate_is_near_the_count_of_a_tokenizer() {
        let samples: Vec<Sample> =
            serde_json::from_str(include_str!("../../../tests/fixtures/o200k.json")).expect("the fixture is valid");
        assert!(samples.len() > 20);
        for Sample { class, tokens, text } in samples {
            let json = serde_json::to_string(&text).expect("a text is JSON");
            let escaped: String = json
                .encode_utf16()
                .map(|unit| if unit < 0x80 { char::from(unit as u8).to_string() } else { format!("\\u{unit:04x}") })
                .collect();
            for json in [json, escaped] {
                let ratio = estimate(&json) as f64 / tokens as f64;
                let range = if class == "random" { 0.8..=1.35 } else { 0.75..=1.25 };
                let start: String = text.chars().take(40).collect();
                assert!(range.contains(&ratio), "{class} {ratio:.2}: {start}");
            }
        }
    }

    #[test]
    fn estimate_does_not_depend_on_the_parts_and_ends_at_any_byte() {
        let text = r#"{"a":"\u4e2d\n\"x\ud83d\ude00 12","b":[1,2]} é"#;
        let whole = estimate(text);
        assert!(whole > 10);
        for length in 0..text.len() {
            assert!(TextTokens::of(&text.as_bytes()[..length]).tokens() <= whole, "{length}");
        }
        assert_eq!(estimate(&" ".repeat(1600)), 100);
    }

    #[test]
    fn removed_part_does_not_count() {
        let part = "QUJD".repeat(100);
        let (with, without) = (format!("[\"text {part} text\"]"), "[\"text  text\"]");
        let tokens = TextTokens::of(with.as_bytes()).without(TextTokens::of(part.as_bytes()));
        let (rest, expected) = (tokens.tokens(), estimate(without));
        assert!(rest.abs_diff(expected) <= 2, "{rest} {expected}");
    }
}
