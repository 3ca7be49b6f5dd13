//! JSON request bodies: no bytes cause a panic, and each value that the gateway finds is the one that serde_json finds.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use serde_json::Value;
use sluicegate::payload::json::body::{Collector, JsonPointer, JsonPointers, JsonValue, read};
use sluicegate::payload::json::rpc::{MCP_METHOD, MCP_NAME, MCP_PROTOCOL_VERSION, check_mcp_headers};
use sluicegate::payload::llm::request;

const POINTERS: [&str; 4] = ["/model", "/a/b", "/0/a", "/params/name"];

/// The first line of the input contains the values of `Mcp-Method` and `Mcp-Name` and a JSON pointer, separated by
/// tabs. The other lines are the body.
pub(crate) fn run(data: &[u8]) {
    let split = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (line, rest) = data.split_at(split);
    let body = rest.get(1..).unwrap_or_default();
    let mut parts = line.split(|byte| *byte == b'\t');
    let mut headers = HeaderMap::new();
    headers.insert(MCP_PROTOCOL_VERSION, HeaderValue::from_static("2026-07-28"));
    for (name, value) in [MCP_METHOD, MCP_NAME].into_iter().zip(parts.by_ref().take(2)) {
        headers.extend(HeaderValue::from_bytes(value).ok().map(|value| (name, value)));
    }
    let more = parts.next().and_then(|text| std::str::from_utf8(text).ok()).and_then(JsonPointer::parse);
    let list: Vec<_> = POINTERS.into_iter().filter_map(JsonPointer::parse).chain(more).collect();
    let pointers = Arc::new(JsonPointers::new(list.clone()));
    let Ok(found) = read(body, &pointers, true) else { return };
    let value: Value = serde_json::from_slice(body).expect("JSON");
    for pointer in &list {
        let expected = value.pointer(pointer.as_str());
        match found.value(pointer) {
            // If a member occurs more than once, serde_json keeps the last one.
            Some(JsonValue::Ambiguous(_)) => {}
            Some(JsonValue::TooLong) => assert!(expected.and_then(Value::as_str).is_some_and(|text| text.len() > 1024)),
            Some(JsonValue::Text(text)) => assert_eq!(expected.and_then(Value::as_str), Some(&**text)),
            Some(JsonValue::Integer(number)) => assert_eq!(expected.map(Value::to_string), Some(number.to_string())),
            Some(JsonValue::Bool(bool)) => assert_eq!(expected.and_then(Value::as_bool), Some(*bool)),
            Some(JsonValue::Null) => assert_eq!(expected, Some(&Value::Null)),
            Some(JsonValue::Fraction) => assert!(expected.is_some_and(Value::is_f64)),
            Some(JsonValue::Compound) => assert!(expected.is_some_and(|value| value.is_object() || value.is_array())),
            None => assert_eq!(expected, None, "{pointer}"),
        }
    }
    // The parser of LLM requests finds the same values and messages.
    if let Ok((_, same)) = request::inspect_with(body, Collector::new(&pointers, true)) {
        assert!(list.iter().all(|pointer| same.value(pointer) == found.value(pointer)));
        assert_eq!(same.messages, found.messages);
    }
    let Some(Ok(messages)) = found.messages else { return };
    assert_eq!(messages.is_batch, value.is_array());
    let matches = check_mcp_headers(&headers, &messages).is_ok();
    if let (true, Some(tool)) = (matches && messages.list[0].has_id, messages.list[0].tool()) {
        assert!(headers.contains_key(MCP_NAME), "{tool}");
        assert_eq!(value["params"]["name"], tool);
    }
}
