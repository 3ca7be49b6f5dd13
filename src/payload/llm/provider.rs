//! The formats in which the gateway writes error bodies, so that the SDKs of each provider understand them.

use serde_json::{Value, json};

/// Maximum number of choices for which a separate final event is written.
const MAX_FINAL_CHOICES: u64 = 128;

/// The API that a client uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// OpenAI, and the many APIs that are compatible with it.
    OpenAi,
    /// The Messages API of Anthropic.
    Anthropic,
    /// The API of Google Gemini.
    Gemini,
    /// The API of Ollama.
    Ollama,
}

impl Provider {
    /// Return the API that the canonical path of a request belongs to. `is_anthropic` is true if the request has the
    /// header `anthropic-version`.
    pub fn from_request(path: &str, is_anthropic: bool) -> Self {
        let last = operation(path);
        if is_anthropic || last == "messages" || path.contains("/messages/count_tokens") {
            Provider::Anthropic
        } else if last.contains(":generate") || last.contains(":streamGenerate") || last.contains("mbedContent") {
            Provider::Gemini
        } else if path.contains("/api/") && matches!(last, "chat" | "generate" | "embed" | "embeddings") {
            Provider::Ollama
        } else {
            Provider::OpenAi
        }
    }

    /// Return the events that end a stream when it has reached its maximum of output tokens. `choices` is the number of
    /// choices, and `output` is the number of output tokens so far.
    pub fn final_events(self, path: &str, choices: u64, output: u64) -> String {
        let event = |name: &str, data: Value| format!("event: {name}\ndata: {data}\n\n");
        match self {
            Provider::OpenAi if operation(path) == "responses" => event(
                "response.incomplete",
                json!({
                    "type": "response.incomplete",
                    "response": {
                        "object": "response", "status": "incomplete", "output": [],
                        "incomplete_details": { "reason": "max_output_tokens" },
                    },
                }),
            ),
            Provider::OpenAi | Provider::Ollama => {
                // The older Completions API, whose events differ from Chat Completions.
                let is_text = operation(path) == "completions" && !path.contains("/chat/completions");
                let choice = |index| match is_text {
                    true => json!({ "index": index, "text": "", "finish_reason": "length" }),
                    false => json!({ "index": index, "delta": {}, "finish_reason": "length" }),
                };
                let choices: Vec<_> = (0..choices.min(MAX_FINAL_CHOICES)).map(choice).collect();
                let object = if is_text { "text_completion" } else { "chat.completion.chunk" };
                let chunk = json!({ "id": "", "object": object, "created": 0, "model": "", "choices": choices });
                format!("data: {chunk}\n\ndata: [DONE]\n\n")
            }
            Provider::Anthropic => {
                let delta = json!({ "stop_reason": "max_tokens", "stop_sequence": null });
                let end = json!({ "type": "message_delta", "delta": delta, "usage": { "output_tokens": output } });
                event("message_delta", end) + &event("message_stop", json!({ "type": "message_stop" }))
            }
            Provider::Gemini => {
                let candidate =
                    json!({ "content": { "parts": [], "role": "model" }, "finishReason": "MAX_TOKENS", "index": 0 });
                format!("data: {}\r\n\r\n", json!({ "candidates": [candidate] }))
            }
        }
    }

    /// Return the body of an error response in the format of this provider. `limit_unit` is the quota unit of the
    /// exceeded limit, if a limit is exceeded.
    pub fn error_body(self, status: u16, limit_unit: Option<&str>, message: &str) -> Vec<u8> {
        let body = match self {
            Provider::OpenAi => {
                let kind = limit_unit.unwrap_or("invalid_request_error");
                let code = limit_unit.map(|_| "rate_limit_exceeded");
                json!({ "error": { "message": message, "type": kind, "param": null, "code": code } })
            }
            Provider::Anthropic => {
                let kind = match (limit_unit, status) {
                    (Some(_), _) => "rate_limit_error",
                    (None, 413) => "request_too_large",
                    (None, _) => "invalid_request_error",
                };
                json!({ "type": "error", "error": { "type": kind, "message": message } })
            }
            Provider::Gemini => {
                let name = limit_unit.map_or("INVALID_ARGUMENT", |_| "RESOURCE_EXHAUSTED");
                json!({ "error": { "code": status, "message": message, "status": name } })
            }
            Provider::Ollama => json!({ "error": message }),
        };
        let mut bytes = body.to_string().into_bytes();
        // End the body with a line break for users who read it in a terminal.
        bytes.push(b'\n');
        bytes
    }
}

/// Return the last segment of a path that is not empty, without parameters after `;`: many servers ignore both.
pub fn operation(path: &str) -> &str {
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    last.split(';').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_is_known_by_path_and_header() {
        for (path, is_anthropic, expected) in [
            ("/v1/chat/completions", false, Provider::OpenAi),
            ("/v1/responses", false, Provider::OpenAi),
            ("/v1/messages", false, Provider::Anthropic),
            ("/v1/messages/;x", false, Provider::OpenAi),
            ("/v1/messages;x/", false, Provider::Anthropic),
            ("/anything", true, Provider::Anthropic),
            ("/v1beta/models/m:generateContent", false, Provider::Gemini),
            ("/v1beta/models/m:streamGenerateContent", false, Provider::Gemini),
            ("/api/chat", false, Provider::Ollama),
            ("/ollama/api/generate", false, Provider::Ollama),
            ("/chat", false, Provider::OpenAi),
        ] {
            assert_eq!(Provider::from_request(path, is_anthropic), expected, "{path}");
        }
    }
}
