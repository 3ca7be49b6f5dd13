//! Conditions of routes on request headers, query parameters and JSON bodies, and their regular expressions.

use std::borrow::Cow;
use std::fmt;

use http::{HeaderMap, HeaderName};
use percent_encoding::percent_decode_str;
use regex::bytes::{Regex, RegexBuilder};

use crate::payload::json::body::{JsonBody, JsonPointer, JsonValue};

/// A condition on the values of a header or query parameter, or on a value in the JSON body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The part of the request whose values are tested.
    pub source: ConditionSource,
    /// The requirement that the values must meet.
    pub test: ValueTest,
}

/// The part of a request whose values a condition tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConditionSource {
    /// A request header. Each occurrence of the header is one value, even if it contains a comma-separated list.
    Header(HeaderName),
    /// The query parameters with this name, after decoding.
    Query(Box<str>),
    /// The value at a JSON pointer into the body. Strings, integers, `true` and `false` are compared as text. All other
    /// values meet only [`Present`](ValueTest::Present).
    Json(JsonPointer),
}

/// The body of a request, or the reason why conditions cannot test it.
#[derive(Debug, Clone, Copy)]
pub enum RouteBody<'a> {
    /// The body has not been read yet.
    Unread,
    /// The body is not available and will not be read. Conditions on the body count as met.
    Unknown,
    /// The values that were read from the body. Without a body, there are no values.
    Read(&'a JsonBody),
}

/// Whether a request meets a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// The request meets the condition.
    Yes,
    /// The request does not meet the condition.
    No,
    /// The condition depends on the body, which has not been read yet.
    NeedsBody,
    /// The value in the body is too long, or servers may read different values.
    Ambiguous,
}

/// The requirement that the values must meet.
///
/// If a header or parameter occurs more than once, only [`Present`](Self::Present) is met. Servers use the first value,
/// the last value or all values. If other requirements could be met, clients could send one value for routing and
/// another value for the upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueTest {
    /// There is exactly one value, and it is equal to this text.
    Exact(Box<[u8]>),
    /// There is exactly one value, and it starts with this text.
    Prefix(Box<[u8]>),
    /// There is exactly one value, and the whole value matches this expression.
    Regex(Expression),
    /// There is at least one value.
    Present,
    /// There is no value.
    Absent,
}

impl Condition {
    /// Return whether a request with these headers, query and body meets the condition.
    pub fn matches(&self, headers: &HeaderMap, query: Option<&str>, body: RouteBody<'_>) -> Met {
        let is_met = match &self.source {
            ConditionSource::Header(name) => {
                self.test.matches(headers.get_all(name).iter().map(|value| Cow::Borrowed(value.as_bytes())))
            }
            ConditionSource::Query(name) => self.test.matches(query_values(query.unwrap_or_default(), name)),
            ConditionSource::Json(pointer) => match body {
                RouteBody::Unread => return Met::NeedsBody,
                RouteBody::Unknown => true,
                RouteBody::Read(body) => match body.value(pointer) {
                    Some(JsonValue::Ambiguous(_) | JsonValue::TooLong) => return Met::Ambiguous,
                    value => self.test.matches_json(value),
                },
            },
        };
        if is_met { Met::Yes } else { Met::No }
    }

    /// Return whether the condition depends on the body.
    pub fn reads_body(&self) -> bool {
        matches!(self.source, ConditionSource::Json(_))
    }

    /// Return whether no request can meet both conditions. If this is unknown, return `false`, for example for two
    /// regular expressions.
    pub fn excludes(&self, other: &Condition) -> bool {
        use ValueTest::{Absent, Exact, Prefix, Present, Regex};
        self.source == other.source
            && match (&self.test, &other.test) {
                (Absent, test) | (test, Absent) => *test != Absent,
                (Exact(one), Exact(other)) => one != other,
                (Exact(value), Prefix(prefix)) | (Prefix(prefix), Exact(value)) => !value.starts_with(prefix),
                (Exact(value), Regex(expression)) | (Regex(expression), Exact(value)) => !expression.is_match(value),
                (Prefix(one), Prefix(other)) => !one.starts_with(other) && !other.starts_with(one),
                (Present | Prefix(_) | Regex(_), Present | Prefix(_) | Regex(_))
                | (Exact(_), Present)
                | (Present, Exact(_)) => false,
            }
    }

    /// Return whether every request that meets `other` also meets this condition. If this is unknown, return `false`.
    pub fn is_implied_by(&self, other: &Condition) -> bool {
        use ValueTest::{Exact, Prefix, Present, Regex};
        self.source == other.source
            && match (&self.test, &other.test) {
                (one, other) if one == other => true,
                (Present, Exact(_) | Prefix(_) | Regex(_)) => true,
                (Prefix(prefix), Exact(value) | Prefix(value)) => value.starts_with(prefix),
                (Regex(expression), Exact(value)) => expression.is_match(value),
                _ => false,
            }
    }
}

/// Formats the condition as text that completes "the route requires …".
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, name, separator) = match &self.source {
            ConditionSource::Header(name) => ("header", name.as_str(), ": "),
            ConditionSource::Query(name) => ("query parameter", &**name, "="),
            ConditionSource::Json(pointer) => ("JSON value", pointer.as_str(), " = "),
        };
        match &self.test {
            ValueTest::Exact(value) => write!(f, "the {kind} `{name}{separator}{}`", String::from_utf8_lossy(value)),
            ValueTest::Prefix(prefix) => {
                write!(f, "the {kind} `{name}` to begin with `{}`", String::from_utf8_lossy(prefix))
            }
            ValueTest::Regex(expression) => write!(f, "the {kind} `{name}` to match `{}`", expression.as_str()),
            ValueTest::Present => write!(f, "the {kind} `{name}`"),
            ValueTest::Absent => write!(f, "no {kind} `{name}`"),
        }
    }
}

impl ValueTest {
    /// Return whether a value in a JSON body meets the requirement. `None` means that the body has no such value.
    fn matches_json(&self, value: Option<&JsonValue>) -> bool {
        let text = value.and_then(JsonValue::text);
        match self {
            ValueTest::Present => value.is_some(),
            ValueTest::Absent => value.is_none(),
            ValueTest::Exact(expected) => text.is_some_and(|text| *text.as_bytes() == **expected),
            ValueTest::Prefix(prefix) => text.is_some_and(|text| text.as_bytes().starts_with(prefix)),
            ValueTest::Regex(expression) => text.is_some_and(|text| expression.is_match(text.as_bytes())),
        }
    }

    fn matches<'v>(&self, mut values: impl Iterator<Item = Cow<'v, [u8]>>) -> bool {
        let first = values.next();
        match self {
            ValueTest::Present => return first.is_some(),
            ValueTest::Absent => return first.is_none(),
            ValueTest::Exact(_) | ValueTest::Prefix(_) | ValueTest::Regex(_) => {}
        }
        let Some(value) = first.filter(|_| values.next().is_none()) else { return false };
        match self {
            ValueTest::Exact(expected) => *value == **expected,
            ValueTest::Prefix(prefix) => value.starts_with(prefix),
            ValueTest::Regex(expression) => expression.is_match(&value),
            ValueTest::Present | ValueTest::Absent => false,
        }
    }
}

/// Return the values of all query parameters with this name. They are decoded by [`form_decoded`]. A parameter without
/// `=` has an empty value.
pub fn query_values<'q>(query: &'q str, name: &str) -> impl Iterator<Item = Cow<'q, [u8]>> {
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    // Compare the length first, because decoding a name takes more time: a character of the decoded name has one to
    // three characters in the query.
    let is_name =
        |key: &str| (name.len()..=name.len() * 3).contains(&key.len()) && *form_decoded(key) == *name.as_bytes();
    pairs.filter(move |(key, _)| is_name(key)).map(|(_, value)| form_decoded(value))
}

/// Decode a name or value in the form encoding of a query (WHATWG URL §5.1). Keep bytes that are not UTF-8: replacing
/// them with U+FFFD would make different values equal.
fn form_decoded(text: &str) -> Cow<'_, [u8]> {
    if text.contains(['%', '+']) {
        Cow::Owned(percent_decode_str(&text.replace('+', " ")).collect())
    } else {
        Cow::Borrowed(text.as_bytes())
    }
}

// === Regular expressions that must match a whole text ===

/// Maximum length of an expression in bytes.
pub const MAX_LENGTH: usize = 1024;

/// Maximum size of a compiled expression in bytes. In the worst case, the time to match is proportional to the product
/// of this size and the length of the text. The limit bounds this time.
const MAX_COMPILED_SIZE: usize = 128 << 10;

/// Maximum memory in bytes for the lazily built automaton of an expression. Each thread that matches the expression at
/// the same time may use up to this memory.
const MAX_CACHE_SIZE: usize = 256 << 10;

/// Maximum nesting depth of groups and repetitions.
const MAX_NESTING: u32 = 32;

/// A regular expression that must match a whole text. Classes such as `\d`, and the flag `(?i)`, apply only to ASCII
/// characters.
#[derive(Debug, Clone)]
pub struct Expression {
    text: Box<str>,
    anchored: Regex,
}

/// The reason why an expression is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// The expression is empty.
    #[error("the regular expression is empty")]
    Empty,
    /// The expression is longer than [`MAX_LENGTH`].
    #[error("the regular expression is longer than {MAX_LENGTH} bytes")]
    TooLong,
    /// The compiled expression is larger than 128 KiB.
    #[error("the compiled regular expression is larger than {} KiB", MAX_COMPILED_SIZE >> 10)]
    TooLarge,
    /// The expression has a syntax error.
    #[error("the regular expression is not valid: {0}")]
    Syntax(String),
}

impl Expression {
    /// Return an expression that matches the same texts in any case. An expression at the maximum length stays as it is.
    #[must_use]
    pub fn ignoring_case(self) -> Self {
        Expression::new(&format!("(?i:{})", self.text)).unwrap_or(self)
    }

    /// Compile an expression.
    ///
    /// # Errors
    /// The expression is invalid or too large.
    pub fn new(text: &str) -> Result<Self, ExpressionError> {
        if text.is_empty() {
            return Err(ExpressionError::Empty);
        }
        if text.len() > MAX_LENGTH {
            return Err(ExpressionError::TooLong);
        }
        // First compile the expression alone, so that unbalanced parentheses are errors. Otherwise, they could close
        // the group that is added below.
        compile(text)?;
        let anchored = compile(&format!(r"\A(?:{text})\z"))?;
        Ok(Expression { text: text.into(), anchored })
    }

    /// Return the text of the expression.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Return whether the expression matches the whole text.
    pub fn is_match(&self, text: &[u8]) -> bool {
        self.anchored.is_match(text)
    }

    /// Return the part of a text that a named group captures. Return `None` if the expression does not match, or if the
    /// group is not part of the match.
    pub fn capture<'t>(&self, text: &'t str, name: &str) -> Option<&'t str> {
        let captures = self.anchored.captures(text.as_bytes())?;
        text.get(captures.name(name)?.range())
    }

    /// Return the names of all named groups.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.anchored.capture_names().flatten()
    }
}

/// Two expressions are equal if their texts are equal.
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
            // The message shows the expression first. Its last line contains the reason.
            let message = error.to_string();
            let reason = message.lines().last().unwrap_or_default();
            ExpressionError::Syntax(reason.strip_prefix("error: ").unwrap_or(reason).to_owned())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tests() -> [ValueTest; 6] {
        [
            ValueTest::Exact(b"gold"[..].into()),
            ValueTest::Exact(b"free"[..].into()),
            ValueTest::Prefix(b"go"[..].into()),
            ValueTest::Regex(Expression::new("g.*").unwrap()),
            ValueTest::Present,
            ValueTest::Absent,
        ]
    }

    fn header(test: ValueTest) -> Condition {
        Condition { source: ConditionSource::Header(HeaderName::from_static("x-plan")), test }
    }

    #[test]
    fn only_present_accepts_several_values() {
        for (values, query, expected) in [
            (&[][..], "other=gold", [false, false, false, false, false, true]),
            (&["gold"], "x-plan=gold", [true, false, true, true, true, false]),
            (&["free"], "a=b&x-plan=free", [false, true, false, false, true, false]),
            (&["golden"], "x-plan=%67old%65n", [false, false, true, true, true, false]),
            (&["GOLD"], "x-plan=GOLD", [false, false, false, false, true, false]),
            (&["gold", "free"], "x-plan=gold&x-plan=free", [false, false, false, false, true, false]),
            (&["gold", "gold"], "x-plan=gold&x%2dplan=gold", [false, false, false, false, true, false]),
            (&[""], "x-plan", [false, false, false, false, true, false]),
            (&["gold, free"], "x-plan=gold,+free", [false, false, true, true, true, false]),
        ] {
            let headers: HeaderMap =
                values.iter().map(|value| (HeaderName::from_static("x-plan"), value.parse().unwrap())).collect();
            for (test, expected) in tests().into_iter().zip(expected) {
                let parameter = Condition { source: ConditionSource::Query("x-plan".into()), test: test.clone() };
                let expected = if expected { Met::Yes } else { Met::No };
                let body = RouteBody::Unread;
                assert_eq!(header(test.clone()).matches(&headers, None, body), expected, "{test:?} of {values:?}");
                assert_eq!(parameter.matches(&HeaderMap::new(), Some(query), body), expected, "{test:?} of {query}");
            }
        }
    }

    #[test]
    fn json_values_are_compared_as_text() {
        let pointer = JsonPointer::parse("/plan").unwrap();
        for (value, expected) in [
            (None, [false, false, false, false, false, true]),
            (Some(JsonValue::Text("gold".into())), [true, false, true, true, true, false]),
            (Some(JsonValue::Text("GOLD".into())), [false, false, false, false, true, false]),
            (Some(JsonValue::Integer(7)), [false, false, false, false, true, false]),
            (Some(JsonValue::Null), [false, false, false, false, true, false]),
            (Some(JsonValue::Compound), [false, false, false, false, true, false]),
            (Some(JsonValue::Fraction), [false, false, false, false, true, false]),
        ] {
            let values = value.iter().map(|value| (pointer.clone(), value.clone())).collect();
            let body = JsonBody::from_values(values);
            for (test, expected) in tests().into_iter().zip(expected) {
                let condition = Condition { source: ConditionSource::Json(pointer.clone()), test };
                let met = condition.matches(&HeaderMap::new(), None, RouteBody::Read(&body));
                assert_eq!(met, if expected { Met::Yes } else { Met::No }, "{condition} of {value:?}");
                let unread = condition.matches(&HeaderMap::new(), None, RouteBody::Unread);
                assert_eq!(unread, Met::NeedsBody, "{condition}");
            }
        }
        for value in [JsonValue::Ambiguous("plan".into()), JsonValue::TooLong] {
            let body = JsonBody::from_values(vec![(pointer.clone(), value)]);
            let condition = Condition { source: ConditionSource::Json(pointer.clone()), test: ValueTest::Absent };
            assert_eq!(condition.matches(&HeaderMap::new(), None, RouteBody::Read(&body)), Met::Ambiguous);
        }
        for (value, expected) in [(JsonValue::Integer(-7), "-7"), (JsonValue::Bool(true), "true")] {
            let body = JsonBody::from_values(vec![(pointer.clone(), value)]);
            let test = ValueTest::Exact(expected.as_bytes().into());
            let condition = Condition { source: ConditionSource::Json(pointer.clone()), test };
            assert_eq!(condition.matches(&HeaderMap::new(), None, RouteBody::Read(&body)), Met::Yes);
        }
    }

    /// `excludes` and `is_implied_by` must agree with the values that the conditions accept.
    #[test]
    fn comparisons_agree_with_matches() {
        let values = ["gold", "free", "go", "golden", "x", ""];
        for one in tests() {
            for other in tests() {
                let one = header(one.clone());
                let other = header(other);
                let accepts = |condition: &Condition, value: Option<&&str>| {
                    let headers =
                        value.map(|value| (HeaderName::from_static("x-plan"), value.parse().unwrap())).into_iter();
                    condition.matches(&headers.collect(), None, RouteBody::Unread) == Met::Yes
                };
                let samples: Vec<_> = values.iter().map(Some).chain([None]).collect();
                if one.excludes(&other) {
                    assert!(!samples.iter().any(|v| accepts(&one, *v) && accepts(&other, *v)), "{one} {other}");
                }
                if one.is_implied_by(&other) {
                    assert!(samples.iter().all(|v| accepts(&one, *v) || !accepts(&other, *v)), "{one} {other}");
                }
                assert_eq!(one.excludes(&other), other.excludes(&one), "{one} {other}");
            }
        }
        let [gold, free, prefix, expression, present, absent] = tests().map(header);
        assert!(gold.excludes(&free) && free.excludes(&prefix) && free.excludes(&expression) && absent.excludes(&gold));
        assert!(!prefix.excludes(&expression) && !present.excludes(&gold));
        assert!(present.is_implied_by(&gold) && prefix.is_implied_by(&gold) && expression.is_implied_by(&gold));
        assert!(!gold.is_implied_by(&prefix) && !absent.is_implied_by(&gold));
    }

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

    /// Matching must take linear time in the length of the text.
    #[test]
    fn nested_repetitions_are_not_exponential() {
        let expression = Expression::new("(?:a|a|aa)+(?:a*)*b").unwrap();
        assert!(!expression.is_match("a".repeat(64 << 10).as_bytes()));
    }
}
