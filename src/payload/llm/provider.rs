//! LLM APIs: which API and operation a path belongs to, and the error bodies and final events that their SDKs understand.

use http::{HeaderMap, StatusCode};
use percent_encoding::percent_decode_str;
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
    /// The tokens of a list of requests in the body, whose responses the client fetches later.
    Batch,
    /// The tokens of the requests in an uploaded file or a job, which the gateway cannot count.
    File,
}

/// An operation of an LLM API. The end of the path identifies it.
#[derive(Debug)]
pub struct Operation {
    /// The API, which determines how a request is read.
    pub provider: Provider,
    /// How the provider bills the operation.
    pub billing: Billing,
    /// Text that the path contains before `end`, or an empty text.
    within: &'static str,
    end: &'static str,
}

const fn operation_of(provider: Provider, billing: Billing, within: &'static str, end: &'static str) -> Operation {
    Operation { provider, billing, within, end }
}

/// The operations that the gateway knows. If several match, the first one applies. `docs/reference/limits.md` contains
/// this table.
const OPERATIONS: [Operation; 42] = {
    use Billing::{Batch, Embedding, File, Free, Generation};
    use Provider::{Anthropic, Bedrock, Gemini, Ollama, OpenAi};
    [
        operation_of(OpenAi, Generation, "", "/chat/completions"),
        operation_of(OpenAi, Generation, "", "/completions"),
        operation_of(OpenAi, Generation, "", "/responses"),
        operation_of(OpenAi, Free, "", "/responses/input_tokens"),
        operation_of(Ollama, Embedding, "", "/api/embeddings"),
        operation_of(OpenAi, Embedding, "", "/embeddings"),
        operation_of(OpenAi, Free, "", "/moderations"),
        operation_of(OpenAi, Free, "", "/audio/speech"),
        operation_of(OpenAi, Free, "", "/tokenize"),
        operation_of(OpenAi, Free, "", "/detokenize"),
        operation_of(Anthropic, Generation, "", "/messages"),
        operation_of(Anthropic, Free, "", "/messages/count_tokens"),
        operation_of(Anthropic, Batch, "", "/messages/batches"),
        operation_of(Anthropic, Generation, "", "/v1/complete"),
        operation_of(Anthropic, Generation, "/publishers/anthropic/", ":rawPredict"),
        operation_of(Anthropic, Generation, "/publishers/anthropic/", ":streamRawPredict"),
        operation_of(OpenAi, Generation, "", ":rawPredict"),
        operation_of(OpenAi, Generation, "", ":streamRawPredict"),
        operation_of(OpenAi, File, "", "/batches"),
        operation_of(OpenAi, File, "", "/batch/jobs"),
        operation_of(OpenAi, File, "", "/embed-jobs"),
        operation_of(Gemini, Generation, "", ":generateContent"),
        operation_of(Gemini, Generation, "", ":streamGenerateContent"),
        operation_of(Gemini, Embedding, "", ":embedContent"),
        operation_of(Gemini, Embedding, "", ":batchEmbedContents"),
        operation_of(Gemini, Free, "", ":countTokens"),
        operation_of(Gemini, File, "", ":batchGenerateContent"),
        operation_of(Gemini, File, "", ":asyncBatchEmbedContent"),
        operation_of(Gemini, File, "", "/batchPredictionJobs"),
        operation_of(Ollama, Generation, "", "/api/chat"),
        operation_of(Ollama, Generation, "", "/api/generate"),
        operation_of(Ollama, Embedding, "", "/api/embed"),
        operation_of(Bedrock, Generation, "/model/", "/converse"),
        operation_of(Bedrock, Generation, "/model/", "/converse-stream"),
        operation_of(Bedrock, Free, "/model/", "/count-tokens"),
        // The bodies of these operations have the format of the model, so they are read like an unknown API.
        operation_of(OpenAi, Generation, "/model/", "/invoke"),
        operation_of(OpenAi, Generation, "/model/", "/invoke-with-response-stream"),
        operation_of(OpenAi, Generation, "", "/v2/chat"),
        operation_of(OpenAi, Generation, "", "/v1/chat"),
        operation_of(OpenAi, Embedding, "", "/v2/embed"),
        operation_of(OpenAi, Embedding, "", "/v1/embed"),
        operation_of(OpenAi, Embedding, "", "/rerank"),
    ]
};

impl Operation {
    /// Return the name of the operation in the OpenTelemetry semantic conventions for generative AI. Return `None` if
    /// they have none.
    pub fn semantic_name(&self) -> Option<&'static str> {
        match (self.billing, self.provider, self.end) {
            (Billing::Free | Billing::Batch | Billing::File, ..) => None,
            (Billing::Embedding, _, "/rerank") => None,
            (Billing::Embedding, ..) => Some("embeddings"),
            (Billing::Generation, Provider::Gemini, _) => Some("generate_content"),
            (Billing::Generation, _, "/completions" | "/v1/complete" | "/api/generate") => Some("text_completion"),
            // The model determines the operation.
            (
                Billing::Generation,
                _,
                ":rawPredict" | ":streamRawPredict" | "/invoke" | "/invoke-with-response-stream",
            ) => None,
            (Billing::Generation, ..) => Some("chat"),
        }
    }

    /// Return the keys at the root of a body in which the operation reads its maximum number of output tokens.
    pub fn root_maximum(&self) -> RootMaximum {
        match self.end {
            "/responses" => RootMaximum::MaxOutputTokens,
            "/v1/complete" => RootMaximum::MaxTokensToSample,
            "/invoke" | "/invoke-with-response-stream" | ":rawPredict" | ":streamRawPredict"
                if self.provider == Provider::OpenAi =>
            {
                RootMaximum::OfModel
            }
            _ => RootMaximum::MaxTokens,
        }
    }

    /// Return the operation with this canonical path. Only the path decides: a header such as `anthropic-version` would
    /// let a client choose how its maximum of output tokens is read. A server may ignore a trailing slash and path
    /// parameters, so such a path is also recognized, unless the operation is free: it may be another operation for
    /// other servers, also if it is decoded twice.
    pub fn of(path: &str) -> Option<&'static Operation> {
        let trimmed = path.trim_end_matches('/');
        let last = trimmed.rfind('/').map_or(0, |slash| slash + 1);
        let trimmed = trimmed[last..].find(';').map_or(trimmed, |parameters| &trimmed[..last + parameters]);
        OPERATIONS.iter().find(|operation| {
            let is_free = operation.billing == Billing::Free;
            let written = if is_free { path } else { trimmed };
            written.strip_suffix(operation.end).is_some_and(|before| {
                // Bedrock's paths are `/model/NAME/OPERATION`.
                let is_within = operation.within.is_empty() || before.contains(operation.within);
                is_within && !(is_free && has_encoded_delimiter(before))
            })
        })
    }
}

impl Provider {
    /// Return the name of the format in the OpenTelemetry semantic conventions for generative AI.
    pub fn semantic_name(self) -> &'static str {
        match self {
            Provider::OpenAi => "openai",
            Provider::Anthropic => "anthropic",
            Provider::Gemini => "gcp.gen_ai",
            Provider::Ollama => "ollama",
            Provider::Bedrock => "aws.bedrock",
        }
    }

    /// Return whether the provider reads the model in the body of a request. The others read it in the path.
    pub fn reads_model(self) -> bool {
        match self {
            Provider::OpenAi | Provider::Anthropic | Provider::Ollama => true,
            Provider::Gemini | Provider::Bedrock => false,
        }
    }

    /// Return the query parameter or header by which a client asks for a response without its usage (system parameters
    /// of Google's APIs).
    pub fn hides_usage(self, query: Option<&str>, headers: &HeaderMap) -> Option<&'static str> {
        const HIDING: [&str; 4] = ["fields", "$fields", "callback", "$callback"];
        const FIELD_MASK: &str = "x-goog-fieldmask";
        match self {
            Provider::OpenAi | Provider::Anthropic | Provider::Ollama | Provider::Bedrock => return None,
            Provider::Gemini => {}
        }
        let parameters = query.unwrap_or_default().split('&').map(|parameter| {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            (percent_decode_str(name).decode_utf8_lossy().to_ascii_lowercase(), value)
        });
        let hiding = parameters.filter_map(|(name, value)| match &*name {
            "alt" | "$alt" => (!matches!(value, "json" | "sse")).then_some("alt"),
            name => HIDING.into_iter().find(|hiding| *hiding == name),
        });
        hiding.chain(headers.contains_key(FIELD_MASK).then_some(FIELD_MASK)).next()
    }
}

/// Return whether a path has parameters, or would end earlier if it were decoded again.
fn has_encoded_delimiter(path: &str) -> bool {
    percent_decode_str(path).any(|byte| matches!(byte, b'?' | b'#' | b';' | b'%'))
}

/// The keys at the root of a body that contain the maximum number of output tokens of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootMaximum {
    /// `max_tokens` and `max_completion_tokens`.
    MaxTokens,
    /// `max_output_tokens`.
    MaxOutputTokens,
    /// `max_tokens_to_sample`.
    MaxTokensToSample,
    /// The model determines the key.
    OfModel,
    /// The operation is unknown, and may use none of them.
    Unknown,
}

/// An error response of the gateway.
#[derive(Debug, Clone, Copy)]
pub struct ApiError<'a> {
    /// The status of the response.
    pub status: StatusCode,
    /// The description of the error.
    pub message: &'a str,
    /// The quota unit of the exceeded limit, or `None` if the error has another reason.
    pub limit_unit: Option<&'a str>,
    /// Whether a retry can succeed within the time that clients may wait.
    pub retry: Retry,
}

impl<'a> ApiError<'a> {
    /// Describe an error that no limit causes.
    pub fn new(status: StatusCode, message: &'a str) -> Self {
        ApiError { status, message, limit_unit: None, retry: Retry::Useful }
    }
}

/// Whether an SDK should repeat a denied request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The SDK may wait and retry.
    Useful,
    /// The wait would be too long, so the SDK must report the error.
    Useless,
}

impl Provider {
    /// Return the API to which a request with this canonical path belongs. An unknown path is read like OpenAI's API.
    pub fn of(path: &str) -> Self {
        Operation::of(path).map_or(Provider::OpenAi, |operation| operation.provider)
    }

    /// Return the events with which the gateway ends a stream that has reached the maximum of output tokens. `choices`
    /// is the number of choices, and `output` is the number of output tokens so far.
    pub fn final_events(self, path: &str, choices: u64, output: u64) -> String {
        let event = |name: &str, data: Value| format!("event: {name}\ndata: {data}\n\n");
        match self {
            Provider::OpenAi if last_segment(path) == "responses" => event(
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
                let is_text = last_segment(path) == "completions" && !path.contains("/chat/completions");
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

    /// Return the body of an error response in the format of this provider.
    pub fn error_body(self, error: ApiError<'_>) -> Vec<u8> {
        let ApiError { message, limit_unit, retry, .. } = error;
        let status = error.status.as_u16();
        let body = match self {
            Provider::OpenAi => {
                let (kind, code) = match (limit_unit, status) {
                    (Some(_), _) if retry == Retry::Useless => ("insufficient_quota", Some("insufficient_quota")),
                    (Some(unit), _) => (unit, Some("rate_limit_exceeded")),
                    (None, 401) => ("invalid_request_error", Some("invalid_api_key")),
                    (None, ..500) => ("invalid_request_error", None),
                    (None, 500..) => ("server_error", None),
                };
                json!({ "error": { "message": message, "type": kind, "param": null, "code": code } })
            }
            Provider::Anthropic => {
                let kind = match (limit_unit, status) {
                    (Some(_), _) => "rate_limit_error",
                    (None, 401) => "authentication_error",
                    (None, 403) => "permission_error",
                    (None, 404) => "not_found_error",
                    (None, 413) => "request_too_large",
                    (None, 503) => "overloaded_error",
                    (None, 504) => "timeout_error",
                    (None, ..500) => "invalid_request_error",
                    (None, 500..) => "api_error",
                };
                json!({ "type": "error", "error": { "type": kind, "message": message } })
            }
            Provider::Gemini => {
                let name = match (limit_unit, status) {
                    (Some(_), _) => "RESOURCE_EXHAUSTED",
                    (None, 401) => "UNAUTHENTICATED",
                    (None, 403) => "PERMISSION_DENIED",
                    (None, 404) => "NOT_FOUND",
                    (None, 504) => "DEADLINE_EXCEEDED",
                    (None, ..500) => "INVALID_ARGUMENT",
                    (None, 500..) => "UNAVAILABLE",
                };
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

    /// Return the value of `x-amzn-errortype`, which names the exception for the SDKs of AWS. The SDKs retry
    /// `ThrottlingException`, but not `ServiceQuotaExceededException`.
    pub fn error_type(self, error: ApiError<'_>) -> Option<&'static str> {
        if self != Provider::Bedrock {
            return None;
        }
        Some(match (error.limit_unit, error.status.as_u16()) {
            (Some(_), _) if error.retry == Retry::Useless => "ServiceQuotaExceededException",
            (Some(_), _) => "ThrottlingException",
            (None, 401 | 403) => "AccessDeniedException",
            (None, 404) => "ResourceNotFoundException",
            (None, 504) => "ModelTimeoutException",
            (None, ..500) => "ValidationException",
            (None, 500..) => "ServiceUnavailableException",
        })
    }
}

/// Return the last non-empty segment of a path, without parameters after `;`. Many servers ignore trailing slashes and
/// parameters in paths.
pub fn last_segment(path: &str) -> &str {
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
            ("/v1/messages/count_tokens;x", Provider::OpenAi, Billing::Generation),
            ("/v1/chat/completions;/tokenize", Provider::OpenAi, Billing::Generation),
            ("/v1/chat/completions%3F/tokenize", Provider::OpenAi, Billing::Generation),
            ("/v1/chat/completions%23/tokenize", Provider::OpenAi, Billing::Generation),
            ("/v1/chat/completions%253F/tokenize", Provider::OpenAi, Billing::Generation),
            ("/model/anthropic.claude-v1%3A0/count-tokens", Provider::Bedrock, Billing::Free),
            ("/v1/messages/;x", Provider::OpenAi, Billing::Generation),
            ("/v1/messages;x/", Provider::Anthropic, Billing::Generation),
            ("/v1/messages/batches", Provider::Anthropic, Billing::Batch),
            ("/v1/batches/", Provider::OpenAi, Billing::File),
            ("/v1/batch/jobs", Provider::OpenAi, Billing::File),
            ("/v1beta/models/m:batchGenerateContent", Provider::Gemini, Billing::File),
            ("/v2/rerank", Provider::OpenAi, Billing::Embedding),
            ("/v1/complete", Provider::Anthropic, Billing::Generation),
            (
                "/v1/projects/p/locations/l/publishers/anthropic/models/c:rawPredict",
                Provider::Anthropic,
                Billing::Generation,
            ),
            (
                "/v1/projects/p/locations/l/publishers/mistralai/models/m:streamRawPredict",
                Provider::OpenAi,
                Billing::Generation,
            ),
            ("/v1beta/models/m:generateContent", Provider::Gemini, Billing::Generation),
            ("/v1beta/models/m:streamGenerateContent", Provider::Gemini, Billing::Generation),
            ("/v1beta/models/m:countTokens", Provider::Gemini, Billing::Free),
            ("/v1beta/models/m:batchEmbedContents", Provider::Gemini, Billing::Embedding),
            ("/model/m/converse", Provider::Bedrock, Billing::Generation),
            ("/model/m/invoke", Provider::OpenAi, Billing::Generation),
            ("/model/m/count-tokens", Provider::Bedrock, Billing::Free),
            ("/api/chat", Provider::Ollama, Billing::Generation),
            ("/ollama/api/generate", Provider::Ollama, Billing::Generation),
            ("/api/embed", Provider::Ollama, Billing::Embedding),
            ("/chat", Provider::OpenAi, Billing::Generation),
        ] {
            let found = Operation::of(path).map_or(Billing::Generation, |operation| operation.billing);
            assert_eq!((Provider::of(path), found), (provider, billing), "{path}");
        }
    }

    #[test]
    fn manual_contains_the_table_of_operations() {
        let manual = include_str!("../../../docs/reference/limits.md");
        let section = manual.split("### Operations\n").nth(1).unwrap().split("\n### ").next().unwrap();
        let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| `")).collect();
        let expected: Vec<_> = OPERATIONS
            .iter()
            .map(|Operation { provider, billing, within, end }| {
                let path = if within.is_empty() { format!("…{end}") } else { format!("{within}…{end}") };
                let (billed, reserved) = match billing {
                    Billing::Generation => ("input, output", "estimated input, maximum output"),
                    Billing::Embedding => ("input", "estimated input"),
                    Billing::Free => ("free", "nothing"),
                    Billing::Batch => ("input, output", "estimated input, sum of the maximum outputs"),
                    Billing::File => ("input, output of a file", "rejected, unless `unknown` is `\"free\"`"),
                };
                format!("| `{path}` | {provider:?} | {billed} | {reserved} |")
            })
            .collect();
        assert_eq!(rows, expected, "write this table:\n{}", expected.join("\n"));
    }
}
