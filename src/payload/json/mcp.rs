//! The MCP request headers that must match the body (revision 2026-07-28, Streamable HTTP, Server Validation).

use std::borrow::Cow;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::{HeaderMap, HeaderName};

use crate::payload::json::rpc::{Message, Messages, RpcError, TOOLS_CALL};

/// The header with the method.
pub const MCP_METHOD: HeaderName = HeaderName::from_static("mcp-method");

/// The header with the name of a tool or prompt, or with the URI of a resource.
pub const MCP_NAME: HeaderName = HeaderName::from_static("mcp-name");

/// The header with the MCP revision.
pub const MCP_PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The first MCP revision whose requests must have these headers. Revisions are dates, so they can be compared as text.
const FIRST_WITH_HEADERS: &str = "2026-07-28";

/// Check the MCP headers against the messages in the body. A header that is present must match in any revision. Since
/// 2026-07-28, requests must have the headers.
///
/// # Errors
/// A header does not match, is missing, or is present twice.
pub fn check_headers(headers: &HeaderMap, messages: &Messages) -> Result<(), RpcError> {
    let method = single(headers, &MCP_METHOD, "Mcp-Method")?;
    let name = single(headers, &MCP_NAME, "Mcp-Name")?;
    let version = single(headers, &MCP_PROTOCOL_VERSION, "MCP-Protocol-Version")?;
    let Some(message) = messages.list.first().filter(|_| !messages.is_batch) else {
        let is_new = |version: Option<&str>| version.is_some_and(|version| version >= FIRST_WITH_HEADERS);
        let is_new = is_new(version) || messages.list.iter().any(|message| is_new(message.version.as_deref()));
        return match method.is_some() || name.is_some() || is_new {
            true => mismatch("the body is a batch, which has no Mcp-Method"),
            false => Ok(()),
        };
    };
    if let Some(stated) = &message.version {
        match version {
            Some(version) if version == &**stated => {}
            Some(_) => return mismatch("the MCP-Protocol-Version header does not match the body"),
            None if **stated >= *FIRST_WITH_HEADERS => return mismatch("the MCP-Protocol-Version header is missing"),
            None => {}
        }
    }
    let is_required = version.is_some_and(|version| version >= FIRST_WITH_HEADERS) && message.has_id;
    match (method, message.method.as_deref()) {
        (Some(header), method) if Some(header) != method => {
            return mismatch("the Mcp-Method header does not match the body");
        }
        (None, Some(_)) if is_required => return mismatch("the Mcp-Method header is missing"),
        _ => {}
    }
    let Some(expected) = mirrored_name(message) else { return Ok(()) };
    match name.map(decoded) {
        Some(Some(header)) if *header == *expected => Ok(()),
        Some(_) => mismatch("the Mcp-Name header does not match the body"),
        None if is_required => mismatch("the Mcp-Name header is missing"),
        None => Ok(()),
    }
}

/// Return the value of the body that `Mcp-Name` repeats. Return `None` if the method has no such value.
fn mirrored_name(message: &Message) -> Option<&str> {
    match message.method.as_deref()? {
        TOOLS_CALL | "prompts/get" => message.name.as_deref(),
        "resources/read" => message.uri.as_deref(),
        // The task methods are defined by the MCP extension for tasks (SEP-2663).
        "tasks/get" | "tasks/update" | "tasks/cancel" => message.task_id.as_deref(),
        _ => None,
    }
}

/// Return the value of a header that may occur only once.
fn single<'h>(headers: &'h HeaderMap, name: &HeaderName, shown: &str) -> Result<Option<&'h str>, RpcError> {
    let mut lines = headers.get_all(name).iter();
    let Some(first) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return mismatch(&format!("the {shown} header is present more than once"));
    }
    match first.to_str() {
        Ok(value) => Ok(Some(value)),
        Err(_) => mismatch(&format!("the {shown} header has invalid characters")),
    }
}

/// Decode the Base64 form `=?base64?…?=` of a header value. Return `None` if the value is malformed.
fn decoded(value: &str) -> Option<Cow<'_, str>> {
    match value.strip_prefix("=?base64?").and_then(|rest| rest.strip_suffix("?=")) {
        None => Some(Cow::Borrowed(value)),
        Some(encoded) => String::from_utf8(BASE64_STANDARD.decode(encoded).ok()?).ok().map(Cow::Owned),
    }
}

fn mismatch<T>(reason: &str) -> Result<T, RpcError> {
    Err(RpcError::HeaderMismatch(reason.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::payload::json::body;

    #[test]
    fn headers_must_match_the_body() {
        let new = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;
        let call = |name: &str| format!(r#"{{"id":1,"method":"tools/call","params":{{"name":"{name}",{new}}}}}"#);
        let old = r#"{"id":1,"method":"tools/call","params":{"name":"a"}}"#;
        let list = format!(r#"{{"id":1,"method":"tools/list","params":{{{new}}}}}"#);
        let read = format!(r#"{{"id":1,"method":"resources/read","params":{{"name":"n","uri":"file:///a",{new}}}}}"#);
        const V: (&str, &str) = ("mcp-protocol-version", "2026-07-28");
        const CALL: (&str, &str) = ("mcp-method", "tools/call");
        let (call_a, call_utf8) = (call("a"), call("Hello, 世界"));
        type Case<'c> = (&'c str, &'c [(&'c str, &'c str)], &'c str);
        let cases: &[Case<'_>] = &[
            (&call_a, &[V, CALL, ("mcp-name", "a")], ""),
            (&call_a, &[V, CALL, ("mcp-name", "=?base64?YQ==?=")], ""),
            (&call_utf8, &[V, CALL, ("mcp-name", "=?base64?SGVsbG8sIOS4lueVjA==?=")], ""),
            (&call_utf8, &[V, CALL, ("mcp-name", "Hello, 世界")], "invalid characters"),
            (&call_a, &[V, CALL, ("mcp-name", "b")], "Mcp-Name header does not match"),
            (&call_a, &[V, CALL, ("mcp-name", "A")], "Mcp-Name header does not match"),
            (&call_a, &[V, CALL, ("mcp-name", "=?base64?%?=")], "Mcp-Name header does not match"),
            (&call_a, &[V, CALL, ("mcp-name", "=?base64?/w==?=")], "Mcp-Name header does not match"),
            (&call_a, &[V, CALL, ("mcp-name", "=?BASE64?YQ==?=")], "Mcp-Name header does not match"),
            (&call_a, &[V, CALL], "Mcp-Name header is missing"),
            (&call_a, &[V, ("mcp-name", "a")], "Mcp-Method header is missing"),
            (&call_a, &[V, ("mcp-method", "tools/list"), ("mcp-name", "a")], "Mcp-Method header does not match"),
            (&call_a, &[V, CALL, CALL, ("mcp-name", "a")], "Mcp-Method header is present more than once"),
            (&call_a, &[V, V, CALL, ("mcp-name", "a")], "MCP-Protocol-Version header is present more than once"),
            (&call_a, &[CALL, ("mcp-name", "a")], "MCP-Protocol-Version header is missing"),
            (&call_a, &[("mcp-protocol-version", "2025-06-18")], "MCP-Protocol-Version header does not match"),
            (&list, &[V, ("mcp-method", "tools/list")], ""),
            (&list, &[V, ("mcp-method", "tools/list"), ("mcp-name", "ignored")], ""),
            (&read, &[V, ("mcp-method", "resources/read"), ("mcp-name", "file:///a")], ""),
            (&read, &[V, ("mcp-method", "resources/read"), ("mcp-name", "n")], "Mcp-Name header does not match"),
            (old, &[], ""),
            (old, &[("mcp-protocol-version", "2025-11-25")], ""),
            (old, &[V], "Mcp-Method header is missing"),
            // Check a header even if it is not required, because another server may trust it.
            (old, &[("mcp-name", "b")], "Mcp-Name header does not match"),
            (old, &[("mcp-method", "tools/list")], "Mcp-Method header does not match"),
            (r#"{"method":"notifications/x"}"#, &[V], ""),
            (r#"{"id":1,"result":{}}"#, &[CALL], "Mcp-Method header does not match"),
            (r#"[{"id":1,"method":"tools/list"}]"#, &[("mcp-protocol-version", "2025-03-26")], ""),
            (r#"[{"id":1,"method":"tools/list"}]"#, &[("mcp-method", "tools/list")], "the body is a batch"),
            (r#"[{"id":1,"method":"tools/list"}]"#, &[V], "the body is a batch"),
        ];
        for (text, lines, expected) in cases {
            let mut headers = HeaderMap::new();
            for (name, value) in *lines {
                let name: HeaderName = name.parse().unwrap();
                headers.append(name, http::HeaderValue::from_bytes(value.as_bytes()).unwrap());
            }
            let messages = body::read(text.as_bytes(), &Arc::default(), true).unwrap().messages.unwrap().unwrap();
            match check_headers(&headers, &messages) {
                Ok(()) => assert_eq!(*expected, "", "{text} {lines:?}"),
                Err(error) => {
                    let found = error.to_string();
                    assert!(!expected.is_empty() && found.contains(expected), "{text} {lines:?}: {found}");
                    assert_eq!(error.code(), -32020);
                }
            }
        }
    }
}
