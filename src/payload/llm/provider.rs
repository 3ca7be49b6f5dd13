//! LLM APIs: which API and operation a path belongs to, and the error bodies and final events that their SDKs understand.

use serde_json::{Value, json};

/// Maximum number of choices in the final event of a stream.
const MAX_FINAL_CHOICES: u64 = 128;

/// The LLM API that a client uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// The API of OpenAI, or an API that is compatible with it.
    OpenAi,
    /// The Messages API of Anthropic.
    Anthropic,
    /// The API of Google Gemini.
    Gemini,
    /// The API of Ollama.
    Ollama,
    /// The Converse API of Amazon Bedrock.
    Bedrock,
}

/// How a provider bills an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Billing {
    /// Input and output tokens. This is also assumed for unknown operations.
    Generation,
    /// Input tokens only.
    Embedding,
    /// No tokens, such as for counting tokens.
    Free,
}

/// Ends of the paths of operations that providers bill without tokens. The paths must match exactly: a server may ignore
/// a trailing slash, so a path with such a slash may be another operation.
const FREE: [&str; 8] = [
    "/messages/count_tokens",
    ":countTokens",
    "/count-tokens",
    "/responses/input_tokens",
    "/moderations",
    "/tokenize",
    "/detokenize",
    "/audio/speech",
];

impl Billing {
    /// Return how the operation with this canonical path is billed. Only the path decides, because a client chooses its
    /// headers.
    pub fn of(path: &str) -> Self {
        let last = operation(path);
        if FREE.iter().any(|end| path.ends_with(end)) {
            Billing::Free
        } else if matches!(last, "embeddings" | "embed")
            || last.ends_with(":embedContent")
            || last.ends_with(":batchEmbedContents")
        {
            Billing::Embedding
        } else {
            Billing::Generation
        }
    }
}

impl Provider {
    /// Return the API to which a request with this canonical path belongs. Only the path decides: a header such as
    /// `anthropic-version` would let a client choose how its maximum of output tokens is read.
    pub fn of(path: &str) -> Self {
        let last = operation(path);
        if last == "messages" || path.contains("/messages/count_tokens") {
            Provider::Anthropic
        } else if [":generate", ":streamGenerate", "mbedContent", ":countTokens"].iter().any(|name| last.contains(name))
        {
            Provider::Gemini
        } else if path.contains("/api/") && matches!(last, "chat" | "generate" | "embed" | "embeddings") {
            Provider::Ollama
        } else if path.contains("/model/") && matches!(last, "converse" | "converse-stream") {
            Provider::Bedrock
        } else {
            Provider::OpenAi
        }
    }

    /// Return the events with which the gateway ends a stream that has reached the maximum of output tokens. `choices`
    /// is the number of choices, and `output` is the number of output tokens so far.
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
            Provider::OpenAi | Provider::Ollama | Provider::Bedrock => {
                // `is_text` is true for the older Completions API, whose events differ from those of Chat Completions.
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
    /// exceeded limit, or `None` if the error has another reason.
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
            Provider::Bedrock => json!({ "message": message }),
        };
        let mut bytes = body.to_string().into_bytes();
        // End the body with a line break, so that it is readable in a terminal.
        bytes.push(b'\n');
        bytes
    }
}

/// Return the last non-empty segment of a path, without parameters after `;`. Many servers ignore trailing slashes and
/// parameters in paths.
pub fn operation(path: &str) -> &str {
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    last.split(';').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_determines_api_and_billing() {
        for (path, provider, billing) in [
            ("/v1/chat/completions", Provider::OpenAi, Billing::Generation),
            ("/v1/responses", Provider::OpenAi, Billing::Generation),
            ("/v1/responses/input_tokens", Provider::OpenAi, Billing::Free),
            ("/v1/responses/input_tokens/", Provider::OpenAi, Billing::Generation),
            ("/v1/embeddings", Provider::OpenAi, Billing::Embedding),
            ("/v1/moderations", Provider::OpenAi, Billing::Free),
            ("/tokenize", Provider::OpenAi, Billing::Free),
            ("/v1/chat/completions/tokenize;x", Provider::OpenAi, Billing::Generation),
            ("/v1/messages", Provider::Anthropic, Billing::Generation),
            ("/v1/messages/count_tokens", Provider::Anthropic, Billing::Free),
            ("/v1/messages/count_tokens;x", Provider::Anthropic, Billing::Generation),
            ("/v1/messages/;x", Provider::OpenAi, Billing::Generation),
            ("/v1/messages;x/", Provider::Anthropic, Billing::Generation),
            ("/v1beta/models/m:generateContent", Provider::Gemini, Billing::Generation),
            ("/v1beta/models/m:streamGenerateContent", Provider::Gemini, Billing::Generation),
            ("/v1beta/models/m:countTokens", Provider::Gemini, Billing::Free),
            ("/v1beta/models/m:batchEmbedContents", Provider::Gemini, Billing::Embedding),
            ("/model/m/converse", Provider::Bedrock, Billing::Generation),
            ("/model/m/invoke", Provider::OpenAi, Billing::Generation),
            ("/model/m/count-tokens", Provider::OpenAi, Billing::Free),
            ("/api/chat", Provider::Ollama, Billing::Generation),
            ("/ollama/api/generate", Provider::Ollama, Billing::Generation),
            ("/api/embed", Provider::Ollama, Billing::Embedding),
            ("/chat", Provider::OpenAi, Billing::Generation),
        ] {
            assert_eq!((Provider::of(path), Billing::of(path)), (provider, billing), "{path}");
        }
    }
}
