//! MCP tools: which tools a client may use, and the removal of all other tools from the lists that a server sends.

use std::mem;
use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use memchr::memmem;
use serde_json::Value;

use crate::payload::llm::response::EventSplitter;
use crate::payload::wildcard::Wildcard;

/// Maximum length in bytes of a JSON document or an event that is filtered. A list of tools is much shorter.
const MAX_HELD: usize = 4 << 20;

/// The tools that a route or a consumer permits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolRules {
    /// Names of tools that are permitted. `None` permits all tools.
    pub allow: Option<Vec<Wildcard>>,
    /// Names of tools that are not permitted, although they are in `allow`.
    pub deny: Vec<Wildcard>,
}

impl ToolRules {
    /// Return whether the tool with this name is permitted.
    pub fn permits(&self, tool: &str) -> bool {
        let matches = |patterns: &[Wildcard]| patterns.iter().any(|pattern| pattern.matches(tool.as_bytes()));
        !matches(&self.deny) && self.allow.as_deref().is_none_or(matches)
    }
}

/// Removes tools from a response that arrives in chunks. A JSON document is held until its end, and an event until it is
/// complete.
#[derive(Debug)]
pub struct ToolFilter {
    rules: Vec<Arc<ToolRules>>,
    framing: Framing,
    held: Vec<u8>,
    /// Whether the last event ended with CR, so that an LF completes its line end.
    is_after_cr: bool,
}

#[derive(Debug)]
enum Framing {
    Document,
    Events(EventSplitter),
}

impl Framing {
    fn of(media_type: &str) -> Option<Self> {
        let essence = media_type.split(';').next().unwrap_or_default().trim();
        match () {
            () if essence.eq_ignore_ascii_case("text/event-stream") => Some(Framing::Events(EventSplitter::default())),
            () if is_json(essence) => Some(Framing::Document),
            () => None,
        }
    }
}

/// Return whether clients read a body of this media type as JSON.
fn is_json(essence: &str) -> bool {
    let essence = essence.to_ascii_lowercase();
    matches!(&*essence, "application/json" | "application/json-rpc") || essence.ends_with("+json")
}

impl ToolFilter {
    /// Return whether a response with this media type has JSON-RPC messages.
    pub fn reads(media_type: &str) -> bool {
        Framing::of(media_type).is_some()
    }

    /// Create the filter of a response with this media type. Return `None` if the response has no JSON-RPC messages.
    /// All of `rules` must permit a tool.
    pub fn new(media_type: &str, rules: Vec<Arc<ToolRules>>) -> Option<Self> {
        let framing = Framing::of(media_type)?;
        Some(ToolFilter { rules, framing, held: Vec::new(), is_after_cr: false })
    }

    /// Replace a chunk by the data that can be sent. Return `Break` if a document or event is too long, so that the
    /// response ends.
    pub fn feed(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        let received = mem::take(data);
        let mut rest = &received[..];
        let mut sent = Vec::new();
        while !rest.is_empty() {
            let length = match &mut self.framing {
                Framing::Document => rest.len(),
                Framing::Events(events) => {
                    let is_line_end = mem::take(&mut self.is_after_cr) && rest[0] == b'\n';
                    let part = if is_line_end { &rest[..1] } else { rest };
                    let length = events.read(part);
                    if is_line_end {
                        sent.push(b'\n');
                        rest = &rest[length..];
                        continue;
                    }
                    length
                }
            };
            self.held.extend_from_slice(&rest[..length]);
            rest = &rest[length..];
            if matches!(&self.framing, Framing::Events(events) if events.is_between_events()) {
                self.is_after_cr = self.held.ends_with(b"\r");
                sent.extend_from_slice(&self.filtered_event());
            }
            if self.held.len() > MAX_HELD {
                self.held = Vec::new();
                return ControlFlow::Break(());
            }
        }
        *data = sent.into();
        ControlFlow::Continue(())
    }

    /// Return whether a part of the response is held.
    pub fn holds_data(&self) -> bool {
        !self.held.is_empty()
    }

    /// Return the rest of the response at its end.
    pub fn finish(&mut self) -> Bytes {
        match self.framing {
            Framing::Document => {
                let held = mem::take(&mut self.held);
                self.without_tools(&held).unwrap_or(held).into()
            }
            Framing::Events(_) => self.filtered_event().into(),
        }
    }

    /// Return the event that is held, without the tools that are not permitted.
    fn filtered_event(&mut self) -> Vec<u8> {
        const DATA: &[u8] = b"data:";
        let event = mem::take(&mut self.held);
        let lines = || event.split(|byte| matches!(byte, b'\n' | b'\r')).filter(|line| !line.is_empty());
        let data: Vec<_> = lines().filter_map(|line| line.strip_prefix(DATA)).collect();
        let Some(filtered) = self.without_tools(&data.join(&b'\n')) else { return event };
        let mut changed = Vec::new();
        for line in lines().filter(|line| !line.starts_with(DATA)) {
            changed.extend_from_slice(line);
            changed.push(b'\n');
        }
        changed.extend_from_slice(&[&b"data: "[..], &filtered, b"\n\n"].concat());
        changed
    }

    /// Return a document without the tools that are not permitted, or `None` if it lists none of them.
    fn without_tools(&self, json: &[u8]) -> Option<Vec<u8>> {
        const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
        memmem::find(json, b"\"tools\"")?;
        let json = json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json);
        let mut document: Value = serde_json::from_slice(json).ok()?;
        let removed = match &mut document {
            Value::Array(messages) => messages.iter_mut().map(|message| self.remove_tools(message)).sum(),
            message => self.remove_tools(message),
        };
        (removed > 0).then(|| document.to_string().into_bytes())
    }

    /// Remove the tools from the result of a message. Return their number.
    fn remove_tools(&self, message: &mut Value) -> usize {
        let Some(Value::Array(tools)) = message.pointer_mut("/result/tools") else { return 0 };
        let before = tools.len();
        tools.retain(|tool| {
            let name = tool.get("name").and_then(Value::as_str);
            name.is_none_or(|name| self.rules.iter().all(|rules| rules.permits(name)))
        });
        before - tools.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(allow: Option<&[&str]>, deny: &[&str]) -> Arc<ToolRules> {
        let patterns = |names: &[&str]| names.iter().map(|name| Wildcard::new(name)).collect();
        Arc::new(ToolRules { allow: allow.map(patterns), deny: patterns(deny) })
    }

    fn filter(media_type: &str, body: &str, length: usize) -> String {
        let rules = vec![rules(Some(&["get_*", "search"]), &["get_secret"]), rules(None, &["search"])];
        let mut filter = ToolFilter::new(media_type, rules).unwrap();
        let mut sent = Vec::new();
        for part in body.as_bytes().chunks(length) {
            let mut data = Bytes::copy_from_slice(part);
            assert!(filter.feed(&mut data).is_continue());
            sent.extend_from_slice(&data);
        }
        sent.extend_from_slice(&filter.finish());
        String::from_utf8(sent).unwrap()
    }

    #[test]
    fn deny_precedes_allow_and_all_rules_must_permit_a_tool() {
        let both = rules(Some(&["get_*"]), &["get_secret*"]);
        for (tool, expected) in [("get_user", true), ("get_secret", false), ("set_user", false)] {
            assert_eq!(both.permits(tool), expected, "{tool}");
        }
        assert!(rules(None, &[]).permits("any") && !rules(Some(&[]), &[]).permits("any"));
    }

    #[test]
    fn tools_are_removed_from_documents_and_events_in_chunks_of_any_length() {
        let list = |names: &[&str]| {
            let tools: Vec<_> = names.iter().map(|name| serde_json::json!({ "name": name })).collect();
            serde_json::json!({ "id": 1, "jsonrpc": "2.0", "result": { "tools": tools } }).to_string()
        };
        let (all, permitted) = (list(&["get_user", "get_secret", "search", "other"]), list(&["get_user"]));
        let batch = |message: &str| format!("[{message},{{\"id\":2,\"result\":{{}}}}]");
        let events = |message: &str, end: &str| {
            format!(
                ": ping{end}{end}event: message{end}id: 7{end}data: {message}{end}{end}data: {{\"id\":2}}{end}{end}"
            )
        };
        for length in [1, 2, 3, 7, 1000] {
            assert_eq!(filter("application/json", &all, length), permitted);
            assert_eq!(filter("application/vnd.mcp+JSON", &format!("\u{feff}{all}"), length), permitted);
            assert_eq!(filter("application/json; charset=utf-8", &permitted, length), permitted);
            assert_eq!(filter("application/json", &batch(&all), length), batch(&permitted));
            for other in ["not json \"tools\"", "", "{\"result\":{\"tools\":7}}"] {
                assert_eq!(filter("application/json", other, length), other);
            }
            for end in ["\n", "\r\n", "\r"] {
                let same = events(&permitted, end);
                assert_eq!(filter("text/event-stream", &same, length), same, "{end:?}");
                let filtered = filter("text/event-stream", &events(&all, end), length);
                let lines: Vec<_> = filtered.split(['\r', '\n']).filter(|line| !line.is_empty()).collect();
                let expected = format!("data: {permitted}");
                assert_eq!(lines, [": ping", "event: message", "id: 7", &expected, "data: {\"id\":2}"], "{end:?}");
            }
        }
        assert!(ToolFilter::new("text/plain", Vec::new()).is_none());
    }

    #[test]
    fn long_document_ends_the_response() {
        let mut filter = ToolFilter::new("application/json", Vec::new()).unwrap();
        let mut data = Bytes::from(vec![b' '; MAX_HELD + 1]);
        assert!(filter.feed(&mut data).is_break() && data.is_empty() && !filter.holds_data());
    }
}
