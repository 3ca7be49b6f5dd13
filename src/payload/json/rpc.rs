//! JSON-RPC 2.0 messages in request bodies: their methods, the id for error responses, and the check of MCP headers
//! against the messages.

use std::borrow::Cow;
use std::sync::LazyLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::{HeaderMap, HeaderName};
use serde_json::Value;

use crate::payload::json::body::{JsonPointer, JsonPointers, JsonValue};

/// Maximum number of messages of a batch.
pub const MAX_BATCH: usize = 1000;

/// The MCP method that calls a tool.
pub const TOOLS_CALL: &str = "tools/call";

const METHOD: usize = 0;
const ID: usize = 1;
const NAME: usize = 2;
const URI: usize = 3;
const TASK_ID: usize = 4;
const VERSION: usize = 5;

/// The members of a message that are read. The index of each member is one of the constants `METHOD` to `VERSION`.
pub(super) static RPC_POINTERS: LazyLock<JsonPointers> = LazyLock::new(|| {
    let written = [
        "/method",
        "/id",
        "/params/name",
        "/params/uri",
        "/params/taskId",
        "/params/_meta/io.modelcontextprotocol~1protocolVersion",
    ];
    JsonPointers::new(written.into_iter().filter_map(JsonPointer::parse).collect())
});

/// The reason why a request with a JSON-RPC body is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// The body is neither an object nor an array of objects.
    #[error("the request body is not a JSON-RPC message: it is neither an object nor an array of objects")]
    NoMessage,
    /// The batch has no messages.
    #[error("the JSON-RPC batch is empty")]
    EmptyBatch,
    /// The batch has more than [`MAX_BATCH`] messages.
    #[error("the JSON-RPC batch has more than {MAX_BATCH} messages")]
    LongBatch,
    /// A member of a message is invalid. The fields are the name of the member and the reason.
    #[error("`{0}` of the JSON-RPC message {1}")]
    Member(&'static str, String),
    /// An MCP header does not match the body.
    #[error("Header mismatch: {0}")]
    HeaderMismatch(String),
}

impl RpcError {
    /// Return the error code for the JSON-RPC error response.
    pub fn code(&self) -> i32 {
        match self {
            RpcError::NoMessage | RpcError::EmptyBatch | RpcError::LongBatch => -32600,
            RpcError::Member("params.name", _) => -32602,
            RpcError::Member(..) => -32600,
            RpcError::HeaderMismatch(_) => -32020,
        }
    }
}

/// A JSON-RPC message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The method. `None` if the message is the client's response to a request of the server.
    pub method: Option<Box<str>>,
    /// `params.name`, if it is a string.
    pub name: Option<Box<str>>,
    /// `params.uri`, if it is a string.
    pub uri: Option<Box<str>>,
    /// `params.taskId`, if it is a string.
    pub task_id: Option<Box<str>>,
    /// The MCP protocol version in `params._meta`.
    pub version: Option<Box<str>>,
    /// Whether the message has an id, so that it is not a notification.
    pub has_id: bool,
}

impl Message {
    /// Return the name of the tool that the message calls. Return `None` if the method is not `tools/call`.
    pub fn tool(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.method.as_deref() == Some(TOOLS_CALL))
    }
}

/// The messages of a body.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Messages {
    /// The messages. The list is not empty.
    pub list: Vec<Message>,
    /// Whether the body is a batch.
    pub is_batch: bool,
    /// The id for an error response to the whole body. It is null for a batch.
    pub id: Value,
}

/// Which messages of a request a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountedMessages {
    /// The limit counts calls of MCP tools.
    ToolCalls,
    /// The limit counts messages with a method.
    Methods,
    /// The limit counts all messages.
    All,
}

impl Messages {
    /// Return the messages that a limit counts.
    pub fn counted(&self, counted: CountedMessages) -> impl Iterator<Item = &Message> {
        self.list.iter().filter(move |message| match counted {
            CountedMessages::ToolCalls => message.tool().is_some(),
            CountedMessages::Methods => message.method.is_some(),
            CountedMessages::All => true,
        })
    }
}

/// Collects the JSON-RPC messages of a body while the body is read.
#[derive(Debug, Default)]
pub(super) struct MessageReader {
    /// The members of the message that is being read.
    members: [Option<JsonValue>; 6],
    messages: Messages,
    error: Option<RpcError>,
}

impl MessageReader {
    /// Return whether the body has an error, so that the other messages do not matter.
    pub(super) fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Return the bit set of the members that are ambiguous in the message that is being read.
    pub(super) fn ambiguous(&self) -> u64 {
        let bit = |(index, value): (usize, &Option<JsonValue>)| {
            u64::from(matches!(value, Some(JsonValue::Ambiguous(_)))) << index
        };
        self.members.iter().enumerate().map(bit).sum()
    }

    pub(super) fn found(&mut self, index: usize, value: JsonValue) {
        // Do not replace the value if it is already ambiguous.
        if !matches!(self.members[index], Some(JsonValue::Ambiguous(_))) {
            self.members[index] = Some(value);
        }
    }

    /// Record that the document or an element of a batch is not an object.
    pub(super) fn found_other(&mut self) {
        self.error.get_or_insert(RpcError::NoMessage);
    }

    pub(super) fn end_message(&mut self) {
        let members = std::mem::take(&mut self.members);
        match message(members) {
            _ if self.messages.list.len() == MAX_BATCH => drop(self.error.get_or_insert(RpcError::LongBatch)),
            Ok((message, id)) => {
                self.messages.id = id;
                self.messages.list.push(message);
            }
            Err(error) => drop(self.error.get_or_insert(error)),
        }
    }

    pub(super) fn end_batch(&mut self) {
        self.messages.is_batch = true;
        // The id of an error response is null for a batch, because the error belongs to no single message (JSON-RPC 2.0
        // §6).
        self.messages.id = Value::Null;
        if self.messages.list.is_empty() {
            self.error.get_or_insert(RpcError::EmptyBatch);
        }
    }

    pub(super) fn finish(self) -> Result<Messages, RpcError> {
        self.error.map_or(Ok(self.messages), Err)
    }
}

/// Return the message that has these members, and its id.
fn message(mut members: [Option<JsonValue>; 6]) -> Result<(Message, Value), RpcError> {
    const NAMES: [&str; 6] = ["method", "id", "params.name", "params.uri", "params.taskId", "params._meta"];
    for (name, value) in NAMES.into_iter().zip(&members) {
        if let Some(JsonValue::Ambiguous(key)) = value {
            return Err(RpcError::Member(
                name,
                format!(
                    "is ambiguous: the message has `{key}` twice, or in a different spelling (such as another case)"
                ),
            ));
        }
    }
    let is_call = matches!(&members[METHOD], Some(JsonValue::Text(method)) if &**method == TOOLS_CALL);
    for (index, is_required) in [(METHOD, false), (NAME, is_call)] {
        match &members[index] {
            Some(JsonValue::TooLong) if index == METHOD || is_call => {
                return Err(RpcError::Member(NAMES[index], "is too long".to_owned()));
            }
            Some(JsonValue::Text(_)) => {}
            None if !is_required => {}
            Some(_) if index == METHOD || is_call => {
                return Err(RpcError::Member(NAMES[index], "is not a string".to_owned()));
            }
            None => return Err(RpcError::Member(NAMES[index], "is missing".to_owned())),
            Some(_) => {}
        }
    }
    let id = match &members[ID] {
        Some(JsonValue::Text(text)) => Value::from(&**text),
        Some(JsonValue::Integer(number)) => serde_json::to_value(number).unwrap_or_default(),
        _ => Value::Null,
    };
    let has_id = members[ID].is_some();
    let mut text = |index: usize| match members[index].take() {
        Some(JsonValue::Text(text)) => Some(text),
        _ => None,
    };
    let message = Message {
        method: text(METHOD),
        name: text(NAME),
        uri: text(URI),
        task_id: text(TASK_ID),
        version: text(VERSION),
        has_id,
    };
    Ok((message, id))
}

/// Return the body of an error response.
pub fn error_body(id: &Value, code: i32, message: &str, data: &Value) -> Vec<u8> {
    let error = serde_json::json!({ "code": code, "message": message, "data": data });
    let mut body = serde_json::json!({ "jsonrpc": "2.0", "id": id, "error": error }).to_string().into_bytes();
    // End the body with a line break, so that it is readable in a terminal.
    body.push(b'\n');
    body
}

// === MCP: request headers that must match the body (revision 2026-07-28, Streamable HTTP, Server Validation) ===

/// The header with the method.
pub const MCP_METHOD: HeaderName = HeaderName::from_static("mcp-method");

/// The header with the name of a tool or prompt, or with the URI of a resource.
pub const MCP_NAME: HeaderName = HeaderName::from_static("mcp-name");

/// The header with the MCP protocol version. The version of MCP is the date of a revision.
pub const MCP_PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The first MCP revision that requires the MCP headers in requests. Revisions are dates, so they can be compared as
/// text.
const FIRST_WITH_HEADERS: &str = "2026-07-28";

/// Check the MCP headers against the messages in the body. A header that is present must always match. From revision
/// 2026-07-28 on, the headers are required.
///
/// # Errors
/// A header does not match the body, is missing although it is required, or is present more than once.
pub fn check_mcp_headers(headers: &HeaderMap, messages: &Messages) -> Result<(), RpcError> {
    let method = single(headers, &MCP_METHOD, "Mcp-Method")?;
    let name = single(headers, &MCP_NAME, "Mcp-Name")?;
    let version = single(headers, &MCP_PROTOCOL_VERSION, "MCP-Protocol-Version")?;
    let Some(message) = messages.list.first().filter(|_| !messages.is_batch) else {
        let is_new = |version: Option<&str>| version.is_some_and(|version| version >= FIRST_WITH_HEADERS);
        let is_new = is_new(version) || messages.list.iter().any(|message| is_new(message.version.as_deref()));
        return match method.is_some() || name.is_some() || is_new {
            true => mismatch("the body is a batch, which cannot have Mcp-Method, Mcp-Name or revision 2026-07-28"),
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

/// Return the value of the body that the header `Mcp-Name` must contain. Return `None` if the method has no such value.
fn mirrored_name(message: &Message) -> Option<&str> {
    match message.method.as_deref()? {
        TOOLS_CALL | "prompts/get" => message.name.as_deref(),
        "resources/read" => message.uri.as_deref(),
        // The task methods are defined by the MCP extension for tasks (SEP-2663).
        "tasks/get" | "tasks/update" | "tasks/cancel" => message.task_id.as_deref(),
        _ => None,
    }
}

/// Return the value of a header. Return an error if the header occurs more than once or has invalid characters.
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

/// Decode a header value of the form `=?base64?…?=`. Return other values unchanged. Return `None` if the encoded value
/// is malformed.
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

    use serde_json::json;

    use super::*;
    use crate::payload::json::body;

    fn read(text: &str) -> Result<Messages, RpcError> {
        body::read(text.as_bytes(), &Arc::default(), true).unwrap().messages.unwrap()
    }

    #[test]
    fn messages_are_read() {
        let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"search","arguments":{"name":"x","method":"y"}}}"#;
        let messages = read(call).unwrap();
        assert_eq!((messages.list[0].tool(), &messages.id, messages.is_batch), (Some("search"), &json!(7), false));
        let messages = read(&format!(r#"[{call},{{"method":"notifications/x"}},{{"id":"r","result":{{}}}}]"#)).unwrap();
        assert_eq!((messages.list.len(), &messages.id, messages.is_batch), (3, &Value::Null, true));
        let count = |counted| messages.counted(counted).count();
        assert_eq!((count(CountedMessages::ToolCalls), count(CountedMessages::Methods)), (1, 2));
        assert_eq!((count(CountedMessages::All), messages.list[1].has_id, messages.list[2].has_id), (3, false, true));
        for (id, expected) in [
            (r#""a""#, json!("a")),
            ("-1", json!(-1)),
            ("18446744073709551615", json!(u64::MAX)),
            ("null", Value::Null),
            ("1.5", Value::Null),
            ("{}", Value::Null),
        ] {
            assert_eq!(read(&format!(r#"{{"id":{id},"method":"m"}}"#)).unwrap().id, expected, "{id}");
        }
        let huge = format!(r#"{{"id":"{}","method":"m"}}"#, "9".repeat(body::MAX_VALUE + 1));
        assert_eq!(read(&huge).unwrap().id, Value::Null);
    }

    #[test]
    fn bodies_that_servers_may_read_differently_are_rejected() {
        for (text, expected) in [
            ("7", "neither an object"),
            ("[[{}]]", "neither an object"),
            ("[{},1]", "neither an object"),
            ("[null]", "neither an object"),
            ("[]", "is empty"),
            (r#"{"method":"a","method":"b"}"#, "`method` of the JSON-RPC message is ambiguous"),
            (r#"{"method":"a","Method":"b"}"#, "`method` of the JSON-RPC message is ambiguous"),
            (
                r#"{"params":{},"method":"a","params":{"name":"x"}}"#,
                "`params.name` of the JSON-RPC message is ambiguous",
            ),
            (r#"{"method":"tools/call","params":{"name":"a","Name":"b"}}"#, "`params.name` of the JSON-RPC message"),
            (r#"{"id":1,"id":2,"method":"a"}"#, "`id` of the JSON-RPC message is ambiguous"),
            (r#"{"method":7}"#, "`method` of the JSON-RPC message is not a string"),
            (r#"{"method":null}"#, "`method` of the JSON-RPC message is not a string"),
            (r#"{"method":"tools/call"}"#, "`params.name` of the JSON-RPC message is missing"),
            (r#"{"method":"tools/call","params":["search"]}"#, "`params.name` of the JSON-RPC message is missing"),
            (
                r#"{"method":"tools/call","params":{"name":["x"]}}"#,
                "`params.name` of the JSON-RPC message is not a string",
            ),
            (r#"[{"method":"a"},{"method":"a","method":"b"}]"#, "`method` of the JSON-RPC message is ambiguous"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(read(r#"{"method":"other","params":{"name":7}}"#).is_ok());
        let long = format!(r#"{{"method":"tools/call","params":{{"name":"{}"}}}}"#, "x".repeat(body::MAX_VALUE + 1));
        assert_eq!(read(&long).unwrap_err().code(), -32602);
        let batch = |count: usize| format!("[{}]", vec![r#"{"method":"m"}"#; count].join(","));
        assert_eq!(read(&batch(MAX_BATCH)).unwrap().list.len(), MAX_BATCH);
        assert_eq!(read(&batch(MAX_BATCH + 1)), Err(RpcError::LongBatch));
    }

    #[test]
    fn all_members_have_pointers() {
        assert_eq!(RPC_POINTERS.list.len(), 6);
    }

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
            // A header is checked even if the revision does not require it, because another server may rely on the
            // header.
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
            match check_mcp_headers(&headers, &messages) {
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
