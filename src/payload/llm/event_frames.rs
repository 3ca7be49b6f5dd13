//! Event streams of AWS (`application/vnd.amazon.eventstream`), in which Bedrock sends streamed responses.
//!
//! A message consists of a prelude (total length, length of the headers, CRC-32 of both), headers, a payload, and a
//! CRC-32 of all of that. All numbers are big-endian.

use flate2::Crc;

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
        EventFrames { section: Section::Prelude, fixed: [0; PRELUDE], read: 0, payload: 0, crc: Crc::new() }
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
                on_part(FramePart::Payload(part));
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
