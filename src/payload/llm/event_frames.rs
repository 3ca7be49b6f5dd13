//! Event streams of AWS (`application/vnd.amazon.eventstream`), in which Bedrock sends streamed responses.
//!
//! The payload of an event of the operation `InvokeModelWithResponseStream` is `{"bytes":"…","p":"…"}`: an event of the
//! model in base64, and padding.
//!
//! A message consists of a prelude (total length, length of the headers, CRC-32 of both), headers, a payload, and a
//! CRC-32 of all of that. All numbers are big-endian.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Crc;
use memchr::memchr;

const PRELUDE: usize = 12;
const CHECKSUM: usize = 4;

/// Maximum length of a message in bytes: AWS allows 16 MiB of payload and 128 KiB of headers.
const MAX_MESSAGE: u32 = (16 << 20) + (128 << 10) + (PRELUDE + CHECKSUM) as u32;

/// A part of an event stream.
#[derive(Debug)]
pub(super) enum FramePart<'d> {
    /// A part of the payload of the current message.
    Payload(&'d [u8]),
    /// The message is complete, and its checksum is correct.
    End,
    /// A length or a checksum is wrong, so the rest of the stream cannot be read.
    Corrupt,
}

/// Finds the payloads of the messages of an event stream that arrives in chunks. A chunk may end anywhere.
#[derive(Debug)]
pub(super) struct EventFrames {
    section: Section,
    /// The bytes of the prelude or of the checksum so far.
    fixed: [u8; PRELUDE],
    /// Number of bytes of the current section that have been read.
    read: usize,
    /// Length of the payload of the current message.
    payload: usize,
    crc: Crc,
    content: Content,
}

/// The start of a payload that contains an event of the model in base64.
const BYTES: &[u8] = b"{\"bytes\":\"";

/// Number of characters of base64 that are decoded at once.
const BASE64_BLOCK: usize = 512;

/// Decodes a payload in base64. Other payloads pass unchanged.
#[derive(Debug)]
enum Content {
    /// The payload so far is equal to this number of bytes of [`BYTES`].
    Start(usize),
    Plain,
    /// The characters that do not yet form a group of four.
    Base64(Vec<u8>),
    /// After the base64 string.
    Rest,
}

impl Content {
    /// Report the decoded part of a payload.
    fn read(&mut self, mut data: &[u8], on_part: &mut impl FnMut(FramePart<'_>)) {
        if let Content::Start(start) = self {
            let same = data.iter().zip(&BYTES[*start..]).take_while(|(byte, expected)| byte == expected).count();
            let matched = *start + same;
            if matched == BYTES.len() {
                data = &data[same..];
                *self = Content::Base64(Vec::new());
            } else if same == data.len() {
                *start = matched;
                return;
            } else {
                on_part(FramePart::Payload(&BYTES[..*start]));
                *self = Content::Plain;
            }
        }
        match self {
            Content::Start(_) | Content::Rest => {}
            Content::Plain => on_part(FramePart::Payload(data)),
            Content::Base64(group) => {
                let end = memchr(b'"', data);
                let (mut decoded, mut is_valid) = ([0; BASE64_BLOCK], true);
                let mut decode = |text: &[u8]| match STANDARD.decode_slice(text, &mut decoded) {
                    Ok(length) => on_part(FramePart::Payload(&decoded[..length])),
                    Err(_) => is_valid = false,
                };
                let mut text = &data[..end.unwrap_or(data.len())];
                if !group.is_empty() {
                    let (first, rest) = text.split_at(text.len().min(4 - group.len()));
                    group.extend_from_slice(first);
                    text = rest;
                    if group.len() == 4 {
                        decode(group);
                        group.clear();
                    }
                }
                let (whole, rest) = text.split_at(text.len() / 4 * 4);
                whole.chunks(BASE64_BLOCK).for_each(&mut decode);
                group.extend_from_slice(rest);
                is_valid &= end.is_none() || group.is_empty();
                if !is_valid {
                    on_part(FramePart::Corrupt);
                }
                if end.is_some() || !is_valid {
                    *self = Content::Rest;
                }
            }
        }
    }

    /// Report the part of a complete payload that was held back.
    fn end(&mut self, on_part: &mut impl FnMut(FramePart<'_>)) {
        if let Content::Start(start @ 1..) = *self {
            on_part(FramePart::Payload(&BYTES[..start]));
        }
        *self = Content::Start(0);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Section {
    Prelude,
    /// The headers, with their length.
    Headers(usize),
    Payload,
    Checksum,
    Corrupt,
}

impl EventFrames {
    pub(super) fn new() -> Self {
        EventFrames {
            section: Section::Prelude,
            fixed: [0; PRELUDE],
            read: 0,
            payload: 0,
            crc: Crc::new(),
            content: Content::Start(0),
        }
    }

    /// Read up to the end of a message, or up to the end of `data`. Return the number of bytes that were read.
    pub(super) fn read(&mut self, data: &[u8], mut on_part: impl FnMut(FramePart<'_>)) -> usize {
        let mut at = 0;
        loop {
            let length = match self.section {
                Section::Prelude => PRELUDE,
                Section::Headers(length) => length,
                Section::Payload => self.payload,
                Section::Checksum => CHECKSUM,
                Section::Corrupt => return data.len(),
            };
            let part = &data[at..data.len().min(at + length - self.read)];
            at += part.len();
            if matches!(self.section, Section::Prelude | Section::Checksum) {
                self.fixed[self.read..self.read + part.len()].copy_from_slice(part);
            }
            if self.section != Section::Checksum {
                self.crc.update(part);
            }
            if self.section == Section::Payload && !part.is_empty() {
                self.content.read(part, &mut on_part);
            }
            self.read += part.len();
            if self.read < length {
                return at;
            }
            self.read = 0;
            self.section = match self.section {
                Section::Prelude => self.headers(),
                Section::Headers(_) => Section::Payload,
                Section::Payload => Section::Checksum,
                Section::Checksum if self.number(0) == self.crc.sum() => {
                    self.crc.reset();
                    self.section = Section::Prelude;
                    self.content.end(&mut on_part);
                    on_part(FramePart::End);
                    return at;
                }
                Section::Checksum | Section::Corrupt => Section::Corrupt,
            };
            if self.section == Section::Corrupt {
                on_part(FramePart::Corrupt);
            }
        }
    }

    /// Check the prelude and return the section that follows.
    fn headers(&mut self) -> Section {
        let total = self.number(0);
        let headers = self.number(4);
        let mut crc = Crc::new();
        crc.update(&self.fixed[..8]);
        let payload = total.checked_sub(headers).and_then(|rest| rest.checked_sub((PRELUDE + CHECKSUM) as u32));
        match payload.filter(|_| total <= MAX_MESSAGE && crc.sum() == self.number(8)) {
            Some(payload) => {
                self.payload = payload as usize;
                Section::Headers(headers as usize)
            }
            None => Section::Corrupt,
        }
    }

    fn number(&self, at: usize) -> u32 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|offset| self.fixed[at + offset]);
        u32::from_be_bytes([a, b, c, d])
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Return a message with one header and this payload.
    pub(in crate::payload::llm) fn message(payload: &str) -> Vec<u8> {
        let headers = b"\x0b:event-type\x07\x00\x08metadata";
        let total = (PRELUDE + headers.len() + payload.len() + CHECKSUM) as u32;
        let checksum = |bytes: &[u8]| {
            let mut crc = Crc::new();
            crc.update(bytes);
            crc.sum().to_be_bytes()
        };
        let mut bytes = [total.to_be_bytes(), (headers.len() as u32).to_be_bytes()].concat();
        bytes.extend(checksum(&bytes));
        bytes.extend(headers);
        bytes.extend(payload.as_bytes());
        bytes.extend(checksum(&bytes));
        bytes
    }

    /// Return the payloads of the complete messages, and whether the stream is corrupt.
    fn payloads(parts: impl Iterator<Item = Vec<u8>>) -> (Vec<String>, bool) {
        let (mut frames, mut complete, mut current, mut is_corrupt) = (EventFrames::new(), vec![], vec![], false);
        for part in parts {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let length = frames.read(rest, |part| match part {
                    FramePart::Payload(bytes) => current.extend_from_slice(bytes),
                    FramePart::End => complete.push(String::from_utf8(std::mem::take(&mut current)).unwrap()),
                    FramePart::Corrupt => is_corrupt = true,
                });
                rest = &rest[length..];
            }
        }
        (complete, is_corrupt)
    }

    #[test]
    fn messages_are_found_in_chunks_of_any_length() {
        let stream = [message("{\"a\":1}"), message(""), message("xyz")].concat();
        for length in 1..=stream.len() {
            let found = payloads(stream.chunks(length).map(<[u8]>::to_vec));
            assert_eq!(found, (vec!["{\"a\":1}".to_owned(), String::new(), "xyz".to_owned()], false), "{length}");
        }
    }

    #[test]
    fn payloads_in_base64_are_decoded() {
        let events = ["{\"a\":1}", "", "{\"text\":\"long\"}", &"x".repeat(2000)];
        let encoded = |event: &&str| message(&format!("{{\"bytes\":\"{}\",\"p\":\"abc\"}}", STANDARD.encode(event)));
        let stream = events.iter().map(encoded).collect::<Vec<_>>().concat();
        for length in [1, 2, 3, 5, 7, 11, 64, 1000, stream.len()] {
            let (found, is_corrupt) = payloads(stream.chunks(length).map(<[u8]>::to_vec));
            assert_eq!((found, is_corrupt), (events.map(str::to_owned).to_vec(), false), "{length}");
        }
        for plain in ["{\"byte", "{\"bytes\":7}", "{\"delta\":{\"bytes\":\"AAAA\"}}"] {
            assert_eq!(payloads(message(plain).chunks(3).map(<[u8]>::to_vec)), (vec![plain.to_owned()], false));
        }
        for broken in ["{\"bytes\":\"AAA\"}", "{\"bytes\":\"A!AA\"}"] {
            assert!(payloads(std::iter::once(message(broken))).1, "{broken}");
        }
    }

    #[test]
    fn changed_byte_ends_the_stream() {
        let stream = [message("first"), message("second")].concat();
        for index in 0..stream.len() {
            let mut changed = stream.clone();
            changed[index] ^= 1;
            let (complete, is_corrupt) = payloads(std::iter::once(changed));
            let is_first = index < message("first").len();
            assert_eq!(complete.len(), usize::from(!is_first), "{index}");
            assert!(is_corrupt || index < 4, "{index}: a longer message is incomplete");
        }
    }
}
