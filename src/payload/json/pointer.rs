//! JSON pointers (RFC 6901).

use std::fmt;

/// Maximum number of segments of a pointer.
pub const MAX_SEGMENTS: usize = 16;

/// A pointer to a member of a document, with at least one segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonPointer {
    text: Box<str>,
    /// The segments of the pointer, with escape sequences decoded.
    segments: Box<[Box<str>]>,
}

impl JsonPointer {
    /// Parse a pointer. Return `None` if the text is not a pointer, points to the whole document, or has too many
    /// segments.
    pub fn parse(text: &str) -> Option<Self> {
        let mut segments = Vec::new();
        for segment in text.strip_prefix('/')?.split('/') {
            // Reject `~` that is not followed by 0 or 1 (RFC 6901 §3).
            let mut parts = segment.split('~').skip(1);
            if !parts.all(|part| part.starts_with(['0', '1'])) {
                return None;
            }
            segments.push(segment.replace("~1", "/").replace("~0", "~").into());
        }
        (segments.len() <= MAX_SEGMENTS).then(|| JsonPointer { text: text.into(), segments: segments.into() })
    }

    /// Return the pointer as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Return the number of segments.
    pub(super) fn depth(&self) -> usize {
        self.segments.len()
    }

    /// Return the segment at this depth, from 0.
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
    use super::*;

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
