//! Conditions of routes and regular expressions of paths: for arbitrary texts and values, they match as documented.

use std::sync::Arc;

use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use regex_automata::nfa::thompson;
use regex_automata::nfa::thompson::pikevm::PikeVM;
use regex_automata::util::syntax;
use serde_json::json;
use sluicegate::http::target::{PathPolicy, canonical_path};
use sluicegate::payload::json::body;
use sluicegate::payload::json::body::{JsonPointer, JsonPointers};
use sluicegate::routing::condition::{
    Condition, ConditionSource, Expression, MAX_LENGTH, Met, RouteBody, ValueTest, query_values,
};
use sluicegate::routing::pattern::PathPattern;
use sluicegate::routing::{NoMatch, RouteMatch, RouteRequest, RouteTable};

const NAME: HeaderName = HeaderName::from_static("x-plan");

/// The first byte of the input selects the kinds of two conditions. The first two lines are the texts of the
/// conditions, and up to four further lines are values.
pub(crate) fn run(data: &[u8]) {
    let Some((choice, lines)) = data.split_first() else { return };
    let mut lines = lines.split(|byte| *byte == b'\n').take(6);
    let texts = [lines.next().unwrap_or_default(), lines.next().unwrap_or_default()];
    let values: Vec<_> = lines.collect();
    for text in texts {
        expression(text, &values);
    }
    let kinds = [choice % 5, choice / 5 % 5];
    let [Some(one), Some(other)] = [0, 1].map(|index| test(kinds[index], texts[index])) else { return };
    let parameter = ConditionSource::Query("x-plan".into());
    for source in [ConditionSource::Header(NAME), parameter, ConditionSource::Json(pointer())] {
        let conditions = [&one, &other].map(|test| Condition { source: source.clone(), test: test.clone() });
        requests(&conditions, &values);
    }
}

fn pointer() -> JsonPointer {
    JsonPointer::parse("/plan").expect("a pointer")
}

fn test(kind: u8, text: &[u8]) -> Option<ValueTest> {
    Some(match kind {
        0 => ValueTest::Exact(text.into()),
        1 => ValueTest::Prefix(text.into()),
        2 => ValueTest::Regex(Expression::new(std::str::from_utf8(text).ok()?).ok()?),
        3 => ValueTest::Present,
        _ => ValueTest::Absent,
    })
}

/// Return whether these values meet a test, according to the documentation.
fn is_met(test: &ValueTest, values: &[&[u8]]) -> bool {
    match (test, values) {
        (ValueTest::Present, values) => !values.is_empty(),
        (ValueTest::Absent, values) => values.is_empty(),
        (ValueTest::Exact(expected), [value]) => **expected == **value,
        (ValueTest::Prefix(prefix), [value]) => value.get(..prefix.len()) == Some(prefix),
        (ValueTest::Regex(expression), [value]) => expression.is_match(value),
        (ValueTest::Exact(_) | ValueTest::Prefix(_) | ValueTest::Regex(_), _) => false,
    }
}

/// Test two conditions on a request. The request has the values in the header, query parameter or member of the JSON
/// body that the conditions read.
fn requests(conditions: &[Condition; 2], values: &[&[u8]]) {
    let (mut headers, mut query, mut json) = (HeaderMap::new(), "a=1".to_owned(), json!({}));
    match &conditions[0].source {
        ConditionSource::Header(_) => {
            for value in values {
                let Ok(value) = HeaderValue::from_bytes(value) else { return };
                headers.append(NAME, value);
            }
        }
        ConditionSource::Query(_) => {
            for (index, value) in values.iter().enumerate() {
                let name = if index % 2 == 0 { "x-plan" } else { "x%2Dpla%6e" };
                query.push_str(&format!("&{name}={}", percent_encode(value, NON_ALPHANUMERIC)));
            }
        }
        // A JSON body contains the member at most once. Skip values that are too long for conditions.
        ConditionSource::Json(_) => match values {
            [] => {}
            [value] if value.len() <= body::MAX_VALUE => {
                let Ok(text) = std::str::from_utf8(value) else { return };
                json["plan"] = text.into();
            }
            _ => return,
        },
    }
    let read = body::read(json.to_string().as_bytes(), &Arc::new(JsonPointers::new(vec![pointer()])), false)
        .expect("a JSON document");
    let body = RouteBody::Read(&read);
    let met = conditions.each_ref().map(|condition| condition.matches(&headers, Some(&query), body) == Met::Yes);
    let [one, other] = conditions;
    for (condition, met) in conditions.iter().zip(met) {
        assert_eq!(met, is_met(&condition.test, values), "{condition} of {values:?}");
        assert_eq!(
            condition.matches(&headers, Some(&query), RouteBody::Unread) == Met::NeedsBody,
            condition.reads_body()
        );
    }
    assert_eq!(one.excludes(other), other.excludes(one), "{one}; {other}");
    assert!(!(one.excludes(other) && met == [true, true]), "{one}; {other}: {values:?}");
    assert!(!(one.is_implied_by(other) && met == [false, true]), "{one}; {other}: {values:?}");
    // If the two routes are not ambiguous, the table returns the route whose condition is met.
    let mut table = RouteTable::default();
    for (index, condition) in conditions.iter().enumerate() {
        let path = "/x".parse().expect("a path");
        let route = RouteMatch { conditions: vec![condition.clone()], ..RouteMatch::new(path) };
        if table.insert(&route, &index).is_err() {
            assert!(!one.excludes(other), "{one}; {other}");
            return;
        }
    }
    let uri = Uri::from(PathAndQuery::try_from(format!("/x?{query}")).expect("a target"));
    let expected = match met {
        [true, true] => panic!("{one} and {other} exclude each other, but both are met: {values:?}"),
        [true, false] => Ok(&0),
        [false, true] => Ok(&1),
        [false, false] => Err(NoMatch::NotFound),
    };
    let request =
        RouteRequest { host: "a", path: "/x", uri: &uri, method: &Method::GET, headers: &headers, listener: 0, body };
    assert_eq!(table.find(&request), expected, "{one}; {other}: {values:?}");
}

/// Test a regular expression on values and on paths: it must match whole texts. An escaped text must match only itself.
fn expression(text: &[u8], values: &[&[u8]]) {
    // A query has at most as many values as parameters.
    let lossy = String::from_utf8_lossy(text);
    assert!(query_values(&lossy, "").count() <= lossy.split('&').count());
    let Ok(text) = std::str::from_utf8(text) else { return };
    let literal = regex::escape(text);
    if !text.is_empty() && literal.len() <= MAX_LENGTH {
        let literal = Expression::new(&literal).expect("an escaped text");
        assert!(literal.is_match(text.as_bytes()), "{text:?}");
        assert!(!["x", "\n"].iter().any(|more| literal.is_match(format!("{text}{more}").as_bytes())), "{text:?}");
    }
    let Ok(expression) = Expression::new(text) else { return };
    // Compare with the PikeVM, which has no optimizations. The optimized engine has defects: without anchors and
    // Unicode, regex 1.13.1 wrongly finds `(?:a|ab)c.*cd` in `abcd`.
    let syntax = syntax::Config::new().unicode(false).utf8(false);
    let program = thompson::Config::new().utf8(false);
    let alone =
        PikeVM::builder().syntax(syntax).thompson(program).build(text).expect("the PikeVM accepts the expression");
    let mut cache = alone.create_cache();
    for value in values {
        let found = alone.find(&mut cache, *value).map(|found| found.range());
        let is_match = expression.is_match(value);
        assert!(!is_match || found.as_ref().is_some_and(|found| found.start == 0), "{text:?} of {value:?}");
        assert!(is_match || found != Some(0..value.len()), "{text:?} of {value:?}");
    }
    let pattern = PathPattern::from_regex(text).expect("the same expression");
    let mut table = RouteTable::default();
    for (path, target) in [("/fixed", "literal"), ("/{*rest}", "catch-all")] {
        let route = RouteMatch::new(path.parse().expect("a path"));
        assert!(table.insert(&route, &target).is_ok());
    }
    assert!(table.insert(&RouteMatch::new(pattern.clone()), &"expression").is_ok());
    let paths = values.iter().filter_map(|value| std::str::from_utf8(value).ok());
    for path in
        paths.filter(|path| path.starts_with('/')).filter_map(|path| canonical_path(path, PathPolicy::Canonical).ok())
    {
        let expected = match () {
            () if path == "/fixed" => "literal",
            () if expression.is_match(path.as_bytes()) => "expression",
            () => "catch-all",
        };
        let (uri, headers) = (Uri::from_static("/"), HeaderMap::new());
        let (method, body) = (&Method::GET, RouteBody::Unread);
        let request = RouteRequest { host: "a", path: &path, uri: &uri, method, headers: &headers, listener: 0, body };
        assert_eq!(table.find(&request), Ok(&expected), "{text:?} of {path}");
        for name in pattern.parameter_names() {
            let part = pattern.capture(&path, name);
            assert!(part.is_none_or(|part| expression.is_match(path.as_bytes()) && path.contains(part)), "{text:?}");
        }
    }
}
