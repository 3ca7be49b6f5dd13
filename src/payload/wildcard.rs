//! Names and values in which `*` stands for any number of characters.

use memchr::memmem;

/// A text in which `*` matches any number of bytes: the name of a model or a tool, or the value of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wildcard(Box<[u8]>);

impl Wildcard {
    /// Create the wildcard that `text` describes.
    pub fn new(text: &str) -> Self {
        Wildcard(text.as_bytes().into())
    }

    /// Return the value of the matching wildcard with the most literal characters.
    pub fn best_match<'p, T>(patterns: &'p [(Wildcard, T)], name: &str) -> Option<&'p T> {
        let matching = patterns.iter().filter(|(pattern, _)| pattern.matches(name.as_bytes()));
        matching.max_by_key(|(pattern, _)| pattern.specificity()).map(|(_, value)| value)
    }

    /// Return the number of literal bytes, and whether the wildcard has no `*`. A greater value is more specific.
    pub fn specificity(&self) -> (usize, bool) {
        let literals = self.0.iter().filter(|byte| **byte != b'*').count();
        (literals, literals == self.0.len())
    }

    /// Return whether the wildcard matches the whole text.
    pub fn matches(&self, text: &[u8]) -> bool {
        let mut parts = self.0.split(|byte| *byte == b'*');
        let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            // Use the leftmost occurrence of the part, because it leaves the most bytes for the following parts.
            let Some(at) = memmem::find(rest, part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_matches_any_number_of_bytes_at_each_star() {
        for (pattern, text, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("", "", true),
            ("*", "", true),
            ("**", "x", true),
            ("*", "a", true),
            ("a*", "a", true),
            ("a*", "ba", false),
            ("*a", "ba", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "acb", false),
            ("a**c", "ac", true),
        ] {
            assert_eq!(Wildcard::new(pattern).matches(text.as_bytes()), expected, "{pattern} {text}");
        }
    }
}
