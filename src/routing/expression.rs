//! Regular expressions that must match a whole text: paths, header values and query parameters.

use regex::bytes::{Regex, RegexBuilder};

/// Maximum length of an expression, in bytes.
pub const MAX_LENGTH: usize = 1024;

/// Maximum size of a compiled expression, in bytes. The maximum bounds the time of a match, which in the worst case is
/// proportional to the product of this size and the length of the text.
const MAX_COMPILED_SIZE: usize = 128 << 10;

/// Maximum memory in bytes for the automaton of an expression, which is built on demand, for each thread that matches
/// at the same time.
const MAX_CACHE_SIZE: usize = 256 << 10;

/// Maximum nesting of groups and repetitions.
const MAX_NESTING: u32 = 32;

/// A regular expression that is anchored at both ends. Classes such as `\d`, and the flag `(?i)`, apply only to ASCII
/// characters.
#[derive(Debug, Clone)]
pub struct Expression {
    text: Box<str>,
    anchored: Regex,
}

/// The reason why an expression is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// The expression is empty.
    #[error("the regular expression is empty")]
    Empty,
    /// The expression is longer than [`MAX_LENGTH`].
    #[error("the regular expression is longer than {MAX_LENGTH} bytes")]
    TooLong,
    /// The compiled expression is too large.
    #[error("the compiled regular expression is larger than {} KiB", MAX_COMPILED_SIZE >> 10)]
    TooLarge,
    /// The syntax is not valid.
    #[error("the regular expression is not valid: {0}")]
    Syntax(String),
}

impl Expression {
    /// Compile an expression.
    ///
    /// # Errors
    /// The expression is not valid, or too large.
    pub fn new(text: &str) -> Result<Self, ExpressionError> {
        if text.is_empty() {
            return Err(ExpressionError::Empty);
        }
        if text.len() > MAX_LENGTH {
            return Err(ExpressionError::TooLong);
        }
        // The expression is first compiled alone, so that its parentheses must be balanced: an unbalanced parenthesis
        // could close the group that is added around the expression.
        compile(text)?;
        let anchored = compile(&format!(r"\A(?:{text})\z"))?;
        Ok(Expression { text: text.into(), anchored })
    }

    /// Return the expression as it is written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Return whether the expression matches the whole text.
    pub fn is_match(&self, text: &[u8]) -> bool {
        self.anchored.is_match(text)
    }

    /// Return the part of a text that a named group matches. Return `None` if the expression does not match the text,
    /// or if the group does not take part in the match.
    pub fn capture<'t>(&self, text: &'t str, name: &str) -> Option<&'t str> {
        let captures = self.anchored.captures(text.as_bytes())?;
        text.get(captures.name(name)?.range())
    }

    /// Return the names of all named groups.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.anchored.capture_names().flatten()
    }
}

/// Compare the texts: two expressions are equal if their texts are equal.
impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Expression {}

fn compile(text: &str) -> Result<Regex, ExpressionError> {
    let mut builder = RegexBuilder::new(text);
    builder.unicode(false).size_limit(MAX_COMPILED_SIZE).dfa_size_limit(MAX_CACHE_SIZE).nest_limit(MAX_NESTING);
    builder.build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => ExpressionError::TooLarge,
        error => {
            // The message of a syntax error shows the expression first. The reason is in the last line of the message.
            let message = error.to_string();
            let reason = message.lines().last().unwrap_or_default();
            ExpressionError::Syntax(reason.strip_prefix("error: ").unwrap_or(reason).to_owned())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expression_matches_whole_texts_only() {
        for (text, matched, others) in [
            ("/a", &["/a"][..], &["/ab", "x/a", "/a\n", "/a/"][..]),
            ("/a|/b", &["/a", "/b"], &["/ab", "/a/b", "x/b"]),
            ("^/a$", &["/a"], &["/a\n", "/ab"]),
            ("(?m)^/a$", &["/a"], &["/a\n/b", "/b\n/a"]),
            (r"/\d+", &["/17"], &["/", "/1x", "/\u{661}"]),
            ("(?i)/a", &["/a", "/A"], &["/b"]),
            (".", &["x"], &["\n", "\u{e9}"]),
            (r"/(?P<id>\d+)(?:/(?P<rest>.*))?", &["/1", "/1/", "/1/a/b"], &["/a", "/1a"]),
        ] {
            let expression = Expression::new(text).unwrap();
            assert!(matched.iter().all(|path| expression.is_match(path.as_bytes())), "{text}");
            for path in others {
                assert!(!expression.is_match(path.as_bytes()), "{text} must not match {path:?}");
            }
        }
    }

    #[test]
    fn named_groups_are_captured() {
        let expression = Expression::new(r"/(?P<id>\d+)(?:/(?<rest>.*))?").unwrap();
        assert_eq!(expression.names().collect::<Vec<_>>(), ["id", "rest"]);
        assert_eq!(expression.capture("/17/a/b", "id"), Some("17"));
        assert_eq!(expression.capture("/17/a/b", "rest"), Some("a/b"));
        assert_eq!(expression.capture("/17", "rest"), None);
        assert_eq!(expression.capture("/17", "other"), None);
        assert_eq!(expression.capture("/x", "id"), None);
    }

    #[test]
    fn invalid_and_large_expressions_are_rejected() {
        let error = |text: &str| Expression::new(text).unwrap_err();
        assert_eq!(error(""), ExpressionError::Empty);
        assert_eq!(error(&"a".repeat(MAX_LENGTH + 1)), ExpressionError::TooLong);
        for text in ["(?:a{1000}){1000}", r"(?:\w{100}){100}", "((a{100}){100}){100}"] {
            assert_eq!(error(text), ExpressionError::TooLarge, "{text}");
        }
        for text in ["(", "a)", "a)|(?:b", "[", "*", r"\", "(?<a>.)(?<a>.)", r"(?=a)", r"\1", &"(".repeat(100)] {
            assert!(matches!(error(text), ExpressionError::Syntax(reason) if !reason.is_empty()), "{text}");
        }
        assert_eq!(error("("), ExpressionError::Syntax("unclosed group".to_owned()));
    }

    /// The test checks that the time is linear in the length of the text.
    #[test]
    fn nested_repetitions_are_not_exponential() {
        let expression = Expression::new("(?:a|a|aa)+(?:a*)*b").unwrap();
        assert!(!expression.is_match("a".repeat(64 << 10).as_bytes()));
    }
}
