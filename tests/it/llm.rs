//! Token budgets of LLM APIs, tested over the wire: a provider with all APIs, streams cut into chunks of any length,
//! aborted requests and malicious bodies.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::read::GzDecoder;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use sluicegate::http::aws_signature::{AwsSigner, content_hash};

use crate::support::admin_listener::{metric, with_admin};
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::{Redis, free_port};
use crate::support::upstream::{Seen, Upstream, read_request, serve};

// === The provider: each response uses as many tokens as `mock` in the request body sets ===

/// How the provider responds. The client sets these values under `mock` in the request body.
#[derive(Clone)]
struct Order {
    input: u64,
    output: u64,
    /// Whether the response reports the usage.
    reports: bool,
    /// Number of deltas after which the provider waits until the test calls [`Provider::release`].
    pause_after: Option<u64>,
    is_stream: bool,
    /// Seed for the lengths of the chunks. With 0, each chunk has one byte.
    seed: u64,
}

/// A provider that speaks the APIs of OpenAI, Anthropic, Gemini, Ollama, Mistral and Cohere, by path.
struct Provider {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    gate: Arc<(Mutex<bool>, Condvar)>,
}

impl Provider {
    fn start() -> Provider {
        let seen = Arc::<Mutex<Vec<Seen>>>::default();
        let gate = Arc::<(Mutex<bool>, Condvar)>::default();
        let (record, opening) = (seen.clone(), gate.clone());
        let address = serve(move |mut stream| {
            while let Some(request) = read_request(&mut stream) {
                record.lock().unwrap().push(request.clone());
                if respond(&mut stream, &request, &opening).is_err() {
                    return;
                }
            }
        });
        Provider { address, seen, gate }
    }

    fn release(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }

    fn last(&self) -> Seen {
        self.seen.lock().unwrap().last().unwrap().clone()
    }

    fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

fn respond(stream: &mut TcpStream, request: &Seen, gate: &(Mutex<bool>, Condvar)) -> std::io::Result<()> {
    let body: Value = serde_json::from_slice(&request.body).unwrap_or(Value::Null);
    let mock = &body["mock"];
    if let Some(status) = mock["status"].as_u64() {
        let text = r#"{"error":{"message":"overloaded"}}"#;
        let head = format!(
            "HTTP/1.1 {status} Error\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            text.len()
        );
        return stream.write_all((head + text).as_bytes());
    }
    // Like Mistral, reject unknown members.
    if mock["strict"] == true && !body["stream_options"].is_null() {
        let text =
            r#"{"object":"error","message":{"detail":[{"type":"extra_forbidden","loc":["body","stream_options"]}]}}"#;
        let length = text.len();
        return write!(stream, "HTTP/1.1 422 Error\r\nContent-Length: {length}\r\n\r\n{text}");
    }
    // Like some servers, accept an encoded colon, a path parameter and a trailing slash.
    let target = request.target().replace("%3A", ":");
    let path = target.split(';').next().unwrap().trim_end_matches('/');
    let order = Order {
        input: mock["input"].as_u64().unwrap_or(10),
        output: mock["output"].as_u64().unwrap_or(3),
        reports: mock["reports"].as_bool().unwrap_or(true),
        pause_after: mock["pause_after"].as_u64(),
        is_stream: body["stream"] == true || path.contains(":stream"),
        seed: mock["seed"].as_u64().unwrap_or(0),
    };
    if request.body.is_empty() {
        return stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}");
    }
    if let Some(raw) = mock["raw"].as_str() {
        if order.pause_after.is_some() {
            let (open, changed) = gate;
            drop(changed.wait_while(open.lock().unwrap(), |open| !*open).unwrap());
        }
        let kind = mock["type"].as_str().unwrap_or("application/json");
        let coding = mock["coding"].as_str().map_or(String::new(), |coding| format!("Content-Encoding: {coding}\r\n"));
        if let Some(chunk) = mock["chunk"].as_u64() {
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n")?;
            for part in raw.as_bytes().chunks(chunk as usize) {
                write!(stream, "{:x}\r\n", part.len())?;
                stream.write_all(part)?;
                stream.write_all(b"\r\n")?;
            }
            return stream.write_all(b"0\r\n\r\n");
        }
        let length = raw.len();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{coding}Content-Length: {length}\r\n\r\n");
        return stream.write_all((head + raw).as_bytes());
    }
    if mock["endless"] == true {
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")?;
        let event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"on\"}}]}\n\n";
        loop {
            write!(stream, "{:x}\r\n{event}\r\n", event.len())?;
        }
    }
    let (media_type, parts) = response_parts(path, &order);
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: {media_type}\r\nTransfer-Encoding: chunked\r\n\r\n")?;
    let mut random = order.seed;
    for (index, part) in parts.iter().enumerate() {
        if order.pause_after == Some(index as u64) {
            let (open, changed) = gate;
            drop(changed.wait_while(open.lock().unwrap(), |open| !*open).unwrap());
        }
        let mut rest = part.as_bytes();
        while !rest.is_empty() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let length = if order.seed == 0 { 1 } else { (random >> 33) as usize % 40 + 1 }.min(rest.len());
            write!(stream, "{length:x}\r\n")?;
            stream.write_all(&rest[..length])?;
            stream.write_all(b"\r\n")?;
            rest = &rest[length..];
        }
    }
    stream.write_all(b"0\r\n\r\n")
}

/// Return the media type and the parts of a response. The first `output` parts of a stream are its deltas.
fn response_parts(path: &str, order: &Order) -> (&'static str, Vec<String>) {
    let Order { input, output, reports, is_stream, .. } = *order;
    let deltas = |delta: &dyn Fn() -> String| -> Vec<String> { (0..output).map(|_| delta()).collect() };
    let event = |name: &str, data: Value| {
        if name.is_empty() { format!("data: {data}\n\n") } else { format!("event: {name}\r\ndata: {data}\r\n\r\n") }
    };
    let usage = |usage: Value| if reports { usage } else { Value::Null };
    const SSE: &str = "text/event-stream; charset=utf-8";
    const JSON: &str = "application/json";
    let last = path.rsplit('/').next().unwrap();
    match (last, is_stream) {
        // Mistral sends the usage with the last choice.
        ("completions", true) if path.starts_with("/mistral/") => {
            let chunk = || event("", json!({"choices": [{"index": 0, "delta": {"content": "tök"}, "finish_reason": null}]}));
            let mut parts = deltas(&chunk);
            let counts = usage(json!({"prompt_tokens": input, "total_tokens": input + output, "completion_tokens": output}));
            parts.push(event("", json!({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}], "usage": counts})));
            parts.push("data: [DONE]\n\n".to_owned());
            (SSE, parts)
        }
        ("chat", true) if path == "/v2/chat" => {
            let delta = || event("content-delta", json!({"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": "tok"}}}}));
            let mut parts = deltas(&delta);
            let units = json!({"input_tokens": input, "output_tokens": output});
            let counts = usage(json!({"billed_units": units, "tokens": {"input_tokens": input + 60, "output_tokens": output}}));
            parts.push(event("message-end", json!({"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": counts}})));
            (SSE, parts)
        }
        ("chat", false) if path == "/v2/chat" => {
            let units = json!({"input_tokens": input as f64, "output_tokens": output as f64});
            let content = json!({"content": [{"type": "text", "text": "tok"}]});
            (JSON, vec![json!({"message": content, "usage": usage(json!({"billed_units": units}))}).to_string()])
        }
        ("m:streamGenerateContent?alt=sse", _) => {
            let chunk = |counts: Value| event("", json!({"candidates": [{"content": {"parts": [{"text": "tok"}]}}], "usageMetadata": counts}));
            let mut parts = deltas(&|| chunk(json!({"promptTokenCount": input})));
            parts.push(chunk(usage(json!({"promptTokenCount": input, "candidatesTokenCount": output}))));
            (SSE, parts)
        }
        ("completions", true) => {
            let chunk = || event("", json!({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "tök"}}]}));
            let mut parts = deltas(&chunk);
            if reports {
                parts.push(event("", json!({"choices": [], "usage": {"prompt_tokens": input, "completion_tokens": output}})));
            }
            parts.push("data: [DONE]\n\n".to_owned());
            (SSE, parts)
        }
        ("completions", false) => {
            let counts = usage(json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output}));
            (JSON, vec![json!({"choices": [{"message": {"content": "tök ".repeat(output as usize)}}], "usage": counts}).to_string()])
        }
        ("responses", true) => {
            let mut parts = deltas(&|| event("response.output_text.delta", json!({"type": "response.output_text.delta", "delta": "tok"})));
            let counts = usage(json!({"input_tokens": input, "output_tokens": output}));
            parts.push(event("response.completed", json!({"type": "response.completed", "response": {"output": [{"text": "tok"}], "usage": counts}})));
            (SSE, parts)
        }
        ("responses", false) => {
            (JSON, vec![json!({"output": [], "usage": usage(json!({"input_tokens": input, "output_tokens": output}))}).to_string()])
        }
        ("messages", true) => {
            let mut parts = deltas(&|| {
                event("content_block_delta", json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "tok"}}))
            });
            let counts = usage(json!({"input_tokens": input, "output_tokens": 1}));
            parts.insert(0, event("message_start", json!({"type": "message_start", "message": {"content": [], "usage": counts}})));
            parts.push(event("message_delta", json!({"type": "message_delta", "delta": {}, "usage": usage(json!({"output_tokens": output}))})));
            (SSE, parts)
        }
        ("messages", false) => {
            (JSON, vec![json!({"content": [{"text": "tok"}], "usage": usage(json!({"input_tokens": input, "output_tokens": output}))}).to_string()])
        }
        ("m:generateContent", _) => {
            let counts = usage(json!({"promptTokenCount": input, "candidatesTokenCount": output}));
            (JSON, vec![json!({"candidates": [{"content": {"parts": [{"text": "tok"}]}}], "usageMetadata": counts}).to_string()])
        }
        ("m:streamGenerateContent", _) => {
            let element = |counts: Value| json!({"candidates": [{"content": {"parts": [{"text": "tok"}]}}], "usageMetadata": counts}).to_string();
            let mut parts = deltas(&|| element(json!({"promptTokenCount": input})) + ",\r\n");
            parts[0].insert(0, '[');
            parts.push(element(usage(json!({"promptTokenCount": input, "candidatesTokenCount": output}))) + "]");
            (JSON, parts)
        }
        ("chat", true) => {
            let mut parts = deltas(&|| json!({"message": {"content": "tok"}, "done": false}).to_string() + "\n");
            let counts = if reports { json!({"done": true, "prompt_eval_count": input, "eval_count": output}) } else { json!({"done": true}) };
            parts.push(counts.to_string() + "\n");
            ("application/x-ndjson", parts)
        }
        ("chat", false) => {
            (JSON, vec![json!({"message": {"content": "tok"}, "done": true, "prompt_eval_count": input, "eval_count": output}).to_string()])
        }
        _ => panic!("{path}"),
    }
}

// === The gateway ===

const QUOTA: u64 = 100_000;

/// Return a configuration with a limit of `quota` tokens per hour on all paths.
fn config(store: &str, provider: SocketAddr, quota: u64, cost: &str, limit: &str) -> String {
    // The tests compute the estimate from the length of the body.
    let estimate = if cost.contains("bytes_per_token") { "" } else { "bytes_per_token = 4, " };
    format!(
        "{store}[log]\nformat = \"json\"\naccess = \"access.log\"\n\
         [limit.tokens]\nby = \"header:x-id\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\n\
         quota = \"{quota}/hour\"\nunit = \"tokens\"\ncost = {{ llm = \"auto\", {estimate}{cost} }}\n{limit}\n\
         [upstream.u]\nservers = [\"http://{provider}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nlimits = [\"tokens\"]\nupstream = \"u\"\n"
    )
}

fn start(provider: &Provider, quota: u64, cost: &str) -> Gateway {
    Gateway::start(&config("", provider.address, quota, cost, ""))
}

const ID: (&str, &str) = ("x-id", "a");

fn post(gateway: &Gateway, path: &str, body: &Value) -> Reply {
    gateway.client().request("POST", path, &[ID, ("content-type", "application/json")], body.to_string().as_bytes())
}

/// Return the remaining tokens. The request that reads them has no body and costs nothing.
fn remaining(gateway: &Gateway) -> u64 {
    gateway.client().get_with("/v1/models", &[ID]).remaining("tokens")
}

/// Assert that `expected` tokens remain. Retry, because the gateway settles the cost only after the end of the
/// response.
fn assert_remaining(gateway: &Gateway, expected: u64, what: &str) {
    let mut last = 0;
    eventually(&format!("{what}: {expected} tokens remain"), || {
        last = remaining(gateway);
        last == expected
    });
}

/// Return the access log records of requests that reserved tokens.
fn records(gateway: &Gateway) -> Vec<Value> {
    let text = fs::read_to_string(gateway.directory().join("access.log")).unwrap_or_default();
    let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
    let records = complete.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter(|record| record["limits"][0]["reserved"].as_u64().is_some_and(|reserved| reserved > 0)).collect()
}

const CHAT: &str = "/v1/chat/completions";

#[test]
fn reported_usage_replaces_the_reservation_for_every_provider() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let mut expected = QUOTA;
    for (path, is_stream) in [
        (CHAT, true),
        (CHAT, false),
        ("/v1/responses", true),
        ("/v1/responses", false),
        ("/v1/messages", true),
        ("/v1/messages", false),
        ("/v1beta/models/m:streamGenerateContent", true),
        ("/v1beta/models/m:generateContent", false),
        ("/v1beta/models/m:streamGenerateContent?alt=sse", true),
        ("/api/chat", true),
        ("/api/chat", false),
        ("/mistral/v1/chat/completions", true),
        ("/mistral/v1/chat/completions", false),
        ("/v2/chat", true),
        ("/v2/chat", false),
        ("/v1/completions", true),
    ] {
        for seed in [0, 1, 2] {
            let mut body = json!({"max_tokens": 500, "mock": {"input": 21, "output": 7, "seed": seed}});
            if is_stream && !path.contains(":stream") {
                body["stream"] = true.into();
            }
            let reply = post(&gateway, path, &body);
            assert_eq!(reply.status, 200, "{path} {}", String::from_utf8_lossy(&reply.body));
            assert!(
                reply.remaining("tokens") < expected - 500,
                "{path}: the header shows the quota after the reservation"
            );
            expected -= 28;
            assert_remaining(&gateway, expected, path);
        }
        let seen = provider.seen.lock().unwrap().iter().rev().find(|seen| !seen.body.is_empty()).unwrap().clone();
        assert_eq!(seen.headers("accept-encoding"), ["identity"], "{path}");
    }
    let policy = gateway.client().get_with("/", &[ID]);
    assert_eq!(policy.header("ratelimit-policy"), Some("\"tokens\";q=100000;qu=\"tokens\";w=3600"));
}

/// Usage objects from public bug reports and from the documentation of providers, with the tokens that are right to
/// charge. `None`: nothing is known about the usage, so the reservation stays charged.
#[test]
fn usage_objects_of_the_field_are_charged_as_providers_bill_them() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let chat = |usage: Value| json!({"choices": [{"message": {"content": "tok"}}], "usage": usage});
    let details = |reasoning: u64| json!({"reasoning_tokens": reasoning});
    let mut expected = QUOTA;
    for (name, path, response, right) in [
        (
            "xAI, reasoning tokens outside completion_tokens",
            CHAT,
            chat(
                json!({"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 399, "completion_tokens_details": details(386)}),
            ),
            Some(399),
        ),
        (
            "Gemini behind an OpenAI-compatible server",
            CHAT,
            chat(
                json!({"prompt_tokens": 21, "completion_tokens": 0, "total_tokens": 81, "completion_tokens_details": details(60)}),
            ),
            Some(81),
        ),
        (
            "OpenAI, reasoning tokens inside completion_tokens",
            CHAT,
            chat(
                json!({"prompt_tokens": 75, "completion_tokens": 1186, "total_tokens": 1261, "completion_tokens_details": details(1024)}),
            ),
            Some(1261),
        ),
        (
            "Responses API, only the total is complete",
            "/v1/responses",
            json!({"output": [], "usage": {"input_tokens": 10, "output_tokens": 20, "total_tokens": 1000}}),
            Some(1000),
        ),
        (
            "Anthropic, cache writes and reads",
            "/v1/messages",
            json!({"content": [], "usage": {"input_tokens": 21, "cache_creation_input_tokens": 1880, "cache_read_input_tokens": 1000, "output_tokens": 393}}),
            Some(3294),
        ),
        (
            "Gemini, thoughts",
            "/v1beta/models/m:generateContent",
            json!({"usageMetadata": {"promptTokenCount": 20, "candidatesTokenCount": 30, "thoughtsTokenCount": 50, "totalTokenCount": 100}}),
            Some(100),
        ),
        (
            "Bedrock Converse",
            "/model/anthropic.claude-x/converse",
            json!({"output": {"message": {"content": [{"text": "tok"}]}}, "usage": {"inputTokens": 185, "outputTokens": 1000, "totalTokens": 1185}}),
            Some(1185),
        ),
        (
            "embeddings",
            "/v1/embeddings",
            json!({"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}),
            Some(8),
        ),
        (
            "reported zero is zero",
            CHAT,
            json!({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}),
            Some(0),
        ),
        ("a usage object without known counts", CHAT, chat(json!({"units": 7})), None),
        ("an array as usage", CHAT, chat(json!([1])), None),
        ("reranking of Jina", "/v1/rerank", json!({"results": [], "usage": {"total_tokens": 15}}), Some(15)),
        ("count_tokens of Anthropic", "/v1/messages/count_tokens", json!({"input_tokens": 14}), Some(0)),
        ("countTokens of Gemini", "/v1beta/models/m:countTokens", json!({"totalTokens": 31}), Some(0)),
        (
            "input_tokens of OpenAI",
            "/v1/responses/input_tokens",
            json!({"object": "response.input_tokens", "input_tokens": 11}),
            Some(0),
        ),
        ("moderation", "/v1/moderations", json!({"id": "modr-1", "results": []}), Some(0)),
        ("tokenize of vLLM", "/tokenize", json!({"count": 3, "tokens": [1, 2, 3]}), Some(0)),
    ] {
        let body = json!({"max_tokens": 2000, "generationConfig": {"maxOutputTokens": 2000}, "input": "text", "mock": {"raw": response.to_string()}});
        let reply = post(&gateway, path, &body);
        assert_eq!(reply.status, 200, "{name}");
        let reserved = expected - reply.remaining("tokens");
        let input = (body.to_string().len() as u64).div_ceil(4);
        assert_eq!(
            reserved,
            match (right, path) {
                (_, "/v1/embeddings" | "/v1/rerank") => input,
                // The body has no maximum at the position of Bedrock.
                (_, path) if path.ends_with("/converse") => input + 1024,
                (Some(0), path) if path != CHAT => 0,
                _ => input + 2000,
            },
            "{name}: the reservation"
        );
        expected -= right.unwrap_or(reserved);
        assert_remaining(&gateway, expected, name);
    }
}

/// Only the path decides how a request is read: no header, and no maximum at the position of another API, lowers the
/// reservation.
#[test]
fn headers_and_other_positions_do_not_lower_the_reservation() {
    let provider = Provider::start();
    let gateway = start(&provider, 1_000_000, "");
    let mut expected = 1_000_000;
    for (path, body) in [
        (
            "/v1beta/models/m:generateContent",
            json!({"generationConfig": {"maxOutputTokens": 9000}, "max_tokens": 1, "options": {"num_predict": 1}}),
        ),
        (
            "/api/chat",
            json!({"options": {"num_predict": 9000}, "max_tokens": 1, "generationConfig": {"maxOutputTokens": 1}}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9000, "options": {"num_predict": 1}, "generationConfig": {"maxOutputTokens": 1}}),
        ),
        (
            "/model/m/converse",
            json!({"inferenceConfig": {"maxTokens": 9000}, "max_tokens": 1, "mock": {"raw": "{\"usage\":{\"inputTokens\":1,\"outputTokens\":1}}"}}),
        ),
        (CHAT, json!({"max_tokens": 1, "options": {"num_predict": 9000}})),
        ("/unknown/operation/completions", json!({"max_tokens": 1, "generationConfig": {"maxOutputTokens": 9000}})),
    ] {
        for header in [
            ("accept", "*/*"),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "output-128k"),
            ("x-goog-api-key", "k"),
            ("openai-beta", "assistants=v2"),
            ("user-agent", "ollama-python"),
        ] {
            let text = body.to_string();
            let reply = gateway.client().request("POST", path, &[ID, header], text.as_bytes());
            let reserved = 9000 + (text.len() as u64).div_ceil(4);
            assert_eq!((reply.status, expected - reply.remaining("tokens")), (200, reserved), "{path} {header:?}");
            eventually("the reservation is settled", || {
                let left = remaining(&gateway);
                let is_settled = left > expected - reserved;
                if is_settled {
                    expected = left;
                }
                is_settled
            });
        }
    }
}

/// A maximum that the operation does not use is one that the server may ignore, and no spelling of a path makes an
/// operation free.
#[test]
fn maximum_of_another_operation_and_free_endings_do_not_lower_the_reservation() {
    let provider = Provider::start();
    let gateway = start(&provider, 1_000_000, "default_output = 700");
    let raw = json!({"raw": "{\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}"});
    for (path, mut body, output) in [
        (CHAT, json!({"max_tokens": 5}), 5),
        (CHAT, json!({"max_output_tokens": 5}), 700),
        (CHAT, json!({"max_new_tokens": 5, "n_predict": 5, "max_tokens_to_sample": 5}), 700),
        (CHAT, json!({"max_tokens": 5, "parameters": {"max_tokens": 900}}), 900),
        ("/v1/responses", json!({"max_output_tokens": 5}), 5),
        ("/v1/responses", json!({"max_tokens": 5, "max_completion_tokens": 5}), 700),
        ("/v1/messages", json!({"max_output_tokens": 5}), 700),
        ("/generate", json!({"max_tokens": 5}), 700),
        ("/generate", json!({"max_tokens": 5, "parameters": {"max_new_tokens": 900}}), 900),
        ("/v1/conversations", json!({"completion_args": {"max_tokens": 900}}), 900),
        ("/v1/chat/completions;/tokenize", json!({"max_tokens": 900}), 900),
        ("/v1/chat/completions%3F/tokenize", json!({"max_tokens": 900}), 900),
        ("/v1/chat/completions%23/v1/moderations", json!({"max_tokens": 900}), 900),
        ("/v1/chat/completions%253F/tokenize", json!({"max_tokens": 900}), 900),
    ] {
        body["mock"] = raw.clone();
        let id = format!("{path}{body}");
        let reply = gateway.client().request("POST", path, &[("x-id", &id)], body.to_string().as_bytes());
        let reserved = output + (body.to_string().len() as u64).div_ceil(4);
        assert_eq!((reply.status, 1_000_000 - reply.remaining("tokens")), (200, reserved), "{path} {body}");
    }
    let free = gateway.client().request("POST", "/model/a%3A0/count-tokens", &[ID], b"{\"mock\":{\"raw\":\"{}\"}}");
    assert_eq!((free.status, free.remaining("tokens")), (200, 1_000_000));
}

#[test]
fn reservations_in_flight_hold_the_limit() {
    let provider = Provider::start();
    let gateway = start(&provider, 1000, "");
    let body = json!({"stream": true, "max_tokens": 500, "mock": {"input": 20, "output": 4, "pause_after": 2}});
    let reserved = 500 + (body.to_string().len() as u64).div_ceil(4);
    let mut client = gateway.client();
    let bytes = body.to_string();
    client.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {}\r\n\r\n{bytes}", bytes.len())
            .as_bytes(),
    );
    // The client receives the beginning of the stream while the provider waits.
    let head = client.head().unwrap();
    assert_eq!((head.status, head.remaining("tokens")), (200, 1000 - reserved));
    assert!(client.chunks_until("\n\n").contains("tök"));
    let seen = provider.count();
    let denied = post(&gateway, CHAT, &body);
    assert_eq!(denied.status, 429);
    let error = &denied.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("insufficient_quota"), &json!("insufficient_quota")));
    assert!(error["message"].as_str().unwrap().contains("`tokens`"), "{error}");
    assert!(denied.header("retry-after").unwrap().parse::<u64>().unwrap() > 3500);
    assert_eq!(
        (provider.count(), remaining(&gateway)),
        (seen, 1000 - reserved),
        "the denied request is not forwarded and not charged"
    );
    provider.release();
    assert!(client.reply_rest().ends_with("data: [DONE]\n\n"));
    assert_remaining(&gateway, 1000 - 24, "settled");
    assert_eq!(post(&gateway, CHAT, &body).status, 200);
}

#[test]
fn denial_has_the_unit_of_the_violated_limit_as_its_type() {
    let provider = Provider::start();
    let requests = "[limit.requests]\nby = \"header:x-id\"\nquota = \"1/hour\"";
    let config = config("", provider.address, 1000, "max_retry_wait = \"2h\"", requests);
    let gateway = Gateway::start(&config.replace(r#"["tokens"]"#, r#"["tokens", "requests"]"#));
    let body = json!({"max_tokens": 5});
    assert_eq!(post(&gateway, CHAT, &body).status, 200);
    let denied = post(&gateway, CHAT, &body);
    let error = &denied.json()["error"];
    assert_eq!((denied.status, &error["type"]), (429, &json!("requests")), "{error}");
}

#[test]
fn reservation_above_the_burst_is_rejected_with_400() {
    let provider = Provider::start();
    let gateway = start(&provider, 1000, "");
    for (path, header, expected) in [
        (CHAT, None, json!("invalid_request_error")),
        ("/v1/messages", Some(("anthropic-version", "2023-06-01")), json!("invalid_request_error")),
    ] {
        let headers: Vec<_> = [ID].into_iter().chain(header).collect();
        let reply = gateway.client().request("POST", path, &headers, br#"{"max_tokens":1000,"n":2}"#);
        assert_eq!(reply.status, 400, "{path}");
        assert_eq!(reply.json()["error"]["type"], expected);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(
            message.starts_with("the request reserves 2007 tokens, but the limit `tokens` never has more than 1000"),
            "{message}"
        );
    }
    let gemini = gateway.client().request(
        "POST",
        "/v1beta/models/m:generateContent",
        &[ID],
        br#"{"generationConfig":{"maxOutputTokens":9000}}"#,
    );
    assert_eq!((gemini.status, &gemini.json()["error"]["status"]), (400, &json!("INVALID_ARGUMENT")));
    let ollama = gateway.client().request("POST", "/api/chat", &[ID], br#"{"options":{"num_predict":9000}}"#);
    assert!(ollama.json()["error"].as_str().unwrap().contains("reserves"));
    assert_eq!((provider.count(), remaining(&gateway)), (0, 1000));
}

#[test]
fn hostile_bodies_reserve_nothing_and_reach_no_provider() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "inspect_body = \"1KiB\"");
    let padded = |length: usize| format!("{{\"a\":\"{}\"}}", "x".repeat(length - 8));
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(300), "]".repeat(300));
    for (body, status) in [
        (r#"{"max_tokens":1,"max_tokens":9000}"#, 400),
        (r#"{"max_tokens":1,"max_token\u0073":9000}"#, 400),
        (r#"{"max_tokens":-1}"#, 400),
        (r#"{"max_tokens":"1"}"#, 400),
        (r#"{"max_tokens":99999999999999999999999}"#, 400),
        (r#"{"n":1e300}"#, 400),
        ("{", 400),
        ("[]", 400),
        ("max_tokens=1", 400),
        (&deep, 400),
        (&padded(1025), 413),
    ] {
        let reply = gateway.client().request("POST", CHAT, &[ID], body.as_bytes());
        assert_eq!(reply.status, status, "{body}");
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error", "{body}");
        let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
        let mut client = gateway.client();
        client.send(
            format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunked}")
                .as_bytes(),
        );
        assert_eq!(client.reply().unwrap().status, status, "chunked: {body}");
    }
    let gzip = gateway.client().request("POST", CHAT, &[ID, ("content-encoding", "gzip")], b"{}");
    assert_eq!(gzip.status, 400);
    assert_eq!((provider.count(), remaining(&gateway)), (0, QUOTA));
    let fits = gateway.client().request("POST", CHAT, &[ID], padded(1024).as_bytes());
    assert_eq!((fits.status, provider.last().body), (200, padded(1024).into_bytes()));
}

#[test]
fn unread_bodies_cost_what_is_configured_and_pass_unchanged() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "inspect_body = \"1KiB\", reserve = 700");
    let long = format!("{{\"mock\":{{\"input\":5,\"output\":5}},\"a\":\"{}\"}}", "x".repeat(300_000));
    let mut expected = QUOTA;
    for (body, is_chunked) in [(&*long, false), (&*long, true), ("max_tokens=1", false)] {
        let mut client = gateway.client();
        let (header, content) = match is_chunked {
            true => {
                let chunks = body
                    .as_bytes()
                    .chunks(900)
                    .map(|chunk| format!("{:x}\r\n{}\r\n", chunk.len(), std::str::from_utf8(chunk).unwrap()));
                ("Transfer-Encoding: chunked".to_owned(), chunks.collect::<String>() + "0\r\n\r\n")
            }
            false => (format!("Content-Length: {}", body.len()), body.to_owned()),
        };
        client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\n{header}\r\n\r\n{content}").as_bytes());
        let reply = client.reply().unwrap();
        assert_eq!((reply.status, reply.remaining("tokens")), (200, expected - 700), "{is_chunked}");
        assert!(provider.last().body == body.as_bytes(), "{is_chunked}");
        expected -= if body.starts_with('{') { 10 } else { 13 };
        assert_remaining(&gateway, expected, body.get(..20).unwrap_or(body));
    }
}

#[test]
fn client_that_leaves_pays_for_what_was_streamed() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "on_abort = \"estimate\"");
    let body =
        json!({"model": "m", "stream": true, "max_tokens": 500, "mock": {"output": 9, "pause_after": 4}}).to_string();
    let input = (body.len() as u64).div_ceil(4);
    let mut client = gateway.client();
    client.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .as_bytes(),
    );
    assert_eq!(client.head().unwrap().status, 200);
    // The provider waits after the fourth delta.
    let mut text = String::new();
    while text.matches("\n\n").count() < 4 {
        text += &client.chunks_until("\n\n");
    }
    assert!(remaining(&gateway) <= QUOTA - 500);
    drop(client);
    eventually("the abort is settled", || remaining(&gateway) > QUOTA - 500);
    let left = remaining(&gateway);
    assert_eq!(left, QUOTA - input - 4);
    eventually("the request is logged", || records(&gateway).len() == 1);
    let record = &records(&gateway)[0];
    let limit = &record["limits"][0];
    assert_eq!((&record["model"], &record["complete"]), (&json!("m"), &json!(false)));
    assert_eq!(limit["reserved"], 500 + input);
    assert_eq!(
        (&limit["settled"], &limit["cost"], &limit["estimated"]),
        (&json!(QUOTA - left), &json!(QUOTA - left), &json!(true))
    );
}

#[test]
fn stream_without_usage_is_estimated_and_response_without_either_keeps_its_reservation() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let body = json!({"stream": true, "max_tokens": 500, "mock": {"output": 6, "reports": false}});
    let input = (body.to_string().len() as u64).div_ceil(4);
    assert_eq!(post(&gateway, CHAT, &body).status, 200);
    let mut expected = QUOTA - input - 6;
    assert_remaining(&gateway, expected, "estimated");
    for (raw, kind) in [
        ("{}", "application/json"),
        ("{\"usage\":", "application/json"),
        ("ok", "text/plain"),
        ("data: {}\n\n", "text/event-stream"),
    ] {
        let body = json!({"max_tokens": 100, "mock": {"raw": raw, "type": kind}});
        expected -= 100 + (body.to_string().len() as u64).div_ceil(4);
        assert_eq!(post(&gateway, CHAT, &body).status, 200);
        assert_remaining(&gateway, expected, raw);
    }
    let deep = "[".repeat(5000) + &"]".repeat(5000);
    for usage in ["-5", "99999999999999999999", "\"7\"", "[7]", &deep] {
        let raw = format!("{{\"usage\":{{\"prompt_tokens\":5,\"completion_tokens\":{usage}}}}}");
        let body = json!({"max_tokens": 100, "mock": {"raw": raw}});
        expected -= 100 + (body.to_string().len() as u64).div_ceil(4);
        assert_eq!(post(&gateway, CHAT, &body).status, 200);
        assert_remaining(&gateway, expected, usage);
    }
    // The response is compressed although the gateway sent `Accept-Encoding: identity`. The gateway does not decode it
    // and charges the reservation.
    let body = json!({"max_tokens": 100, "mock": {"raw": "\u{1f}gzip", "coding": "gzip"}});
    expected -= 100 + (body.to_string().len() as u64).div_ceil(4);
    assert_eq!(post(&gateway, CHAT, &body).status, 200);
    assert_remaining(&gateway, expected, "compressed");
    // If the provider repeats a usage report, the cost does not increase.
    let report = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":6}}\n\n";
    let body = json!({"max_tokens": 100, "mock": {"raw": report.repeat(20), "type": "text/event-stream"}});
    expected -= 11;
    assert_eq!(post(&gateway, CHAT, &body).status, 200);
    assert_remaining(&gateway, expected, "twenty reports");
}

#[test]
fn provider_that_ignores_the_bound_is_charged_in_full() {
    let provider = Provider::start();
    let gateway = start(&provider, 1000, "");
    let body = json!({"max_tokens": 1, "stream": true, "mock": {"input": 10, "output": 1500, "seed": 1}});
    assert_eq!(post(&gateway, CHAT, &body).status, 200);
    assert_remaining(&gateway, 0, "overdrawn");
    assert_eq!(post(&gateway, CHAT, &body).status, 429);
}

#[test]
fn provider_that_never_ends_is_cut_or_charged_until_the_client_leaves() {
    let provider = Provider::start();
    let body = json!({"stream": true, "max_tokens": 50, "mock": {"endless": true}});
    let cutting = start(&provider, QUOTA, "on_exhausted = \"cut\"");
    let text = String::from_utf8(post(&cutting, CHAT, &body).body).unwrap();
    assert_eq!((text.matches("\"on\"").count(), text.ends_with("data: [DONE]\n\n")), (51, true));
    let input = (body.to_string().len() as u64).div_ceil(4);
    assert_remaining(&cutting, QUOTA - input - 51, "cut");
    // A compressed stream that is cut has a complete end, too.
    let route = config("", provider.address, QUOTA, "on_exhausted = \"cut\"", "");
    let compressing = Gateway::start(&format!("{route}compress = {{ types = [\"text/event-stream\"] }}\n"));
    let headers = [ID, ("content-type", "application/json"), ("accept-encoding", "gzip")];
    let reply = compressing.client().request("POST", CHAT, &headers, body.to_string().as_bytes());
    let mut decoded = String::new();
    GzDecoder::new(&*reply.body).read_to_string(&mut decoded).unwrap();
    assert_eq!((decoded.matches("\"on\"").count(), decoded.ends_with("data: [DONE]\n\n")), (51, true));
    let finishing = start(&provider, QUOTA, "");
    let bytes = body.to_string();
    let mut client = finishing.client();
    let length = bytes.len();
    client.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {length}\r\n\r\n{bytes}").as_bytes(),
    );
    assert_eq!(client.head().unwrap().status, 200);
    let mut events = 0;
    while events < 2000 {
        events += client.chunks_until("\n\n").matches("\n\n").count() as u64;
    }
    drop(client);
    eventually("the excess is charged", || remaining(&finishing) <= QUOTA - input - events);
    eventually("the request is logged", || records(&finishing).len() == 1);
    let record = &records(&finishing)[0];
    assert_eq!((&record["complete"], &record["limits"][0]["estimated"]), (&json!(false), &json!(true)));
}

/// A settlement that cannot be sent during an outage of Redis is sent when Redis responds again.
#[test]
fn settlement_is_made_after_an_outage_of_redis() {
    let provider = Provider::start();
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let persistent = || {
        let (folder, text) = (folder.path().to_str().unwrap(), &port.to_string());
        let arguments = ["--port", text, "--dir", folder, "--appendonly", "yes", "--appendfsync", "always"];
        Redis::start_with(port, &arguments).expect("the port is still free")
    };
    let redis = persistent();
    let store = format!("[store]\nurl = \"{}\"\ntimeout = \"100ms\"\n", redis.url());
    let gateway = Gateway::start(&with_admin(&config(&store, provider.address, QUOTA, "", "")));
    let body =
        json!({"stream": true, "max_tokens": 500, "mock": {"input": 20, "output": 4, "pause_after": 2}}).to_string();
    let mut client = gateway.client();
    let length = body.len();
    client.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {length}\r\n\r\n{body}").as_bytes(),
    );
    assert_eq!(client.head().unwrap().status, 200);
    drop(redis);
    eventually("the circuit breaker is open", || {
        gateway.client().get_with("/v1/models", &[ID]);
        metric(&gateway, "sluicegate_store_up") == 0.0
    });
    provider.release();
    assert!(client.reply_rest().ends_with("data: [DONE]\n\n"));
    eventually("the request is logged", || records(&gateway).len() == 1);
    let _redis = persistent();
    eventually("the store decides", || metric(&gateway, "sluicegate_store_up") == 1.0);
    assert_remaining(&gateway, QUOTA - 24, "settled after the outage");
}

#[test]
fn upstream_error_is_refunded_by_refund_on() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    for status in [500, 503, 429, 400, 307] {
        let reply = post(&gateway, CHAT, &json!({"max_tokens": 500, "mock": {"status": status}}));
        assert_eq!(
            (reply.status, reply.remaining("tokens")),
            (status, QUOTA),
            "the header shows the quota after the refund"
        );
    }
    eventually("the requests are logged", || records(&gateway).len() == 5);
    assert!(records(&gateway).iter().all(|record| record["limits"][0]["settled"] == 0));
    let keeping = Gateway::start(&config("", provider.address, QUOTA, "", "refund_on = []"));
    let body = json!({"max_tokens": 500, "mock": {"status": 500}});
    let reserved = 500 + (body.to_string().len() as u64).div_ceil(4);
    assert_eq!(post(&keeping, CHAT, &body).remaining("tokens"), QUOTA - reserved);
    assert_remaining(&keeping, QUOTA - reserved, "the reservation stays");
    let unreachable = Gateway::start(&config("", "127.0.0.1:1".parse().unwrap(), QUOTA, "", ""));
    assert_eq!(post(&unreachable, CHAT, &json!({"max_tokens": 500})).status, 502);
    eventually("the request is logged", || records(&unreachable).len() == 1);
    assert_eq!(records(&unreachable)[0]["limits"][0]["settled"], 0);
}

#[test]
fn weights_of_the_model_apply_to_the_reservation_and_the_settlement() {
    let provider = Provider::start();
    let cost = "weights = { input = 1, cached_input = 0.1, output = 4 }, models.\"big-*\" = { output = 10.5 }";
    let gateway = start(&provider, QUOTA, cost);
    let mut expected = QUOTA;
    for (model, output_weight) in [("small", 4000), ("big-1", 10_500)] {
        let body = json!({"model": model, "max_tokens": 100, "mock": {"input": 21, "output": 7}});
        let input = (body.to_string().len() as u64).div_ceil(4);
        let reply = post(&gateway, CHAT, &body);
        let reserved: u64 = (input * 1000 + 100 * output_weight).div_ceil(1000);
        assert_eq!((reply.status, reply.remaining("tokens")), (200, expected - reserved), "{model}");
        expected -= (21_000 + 7 * output_weight).div_ceil(1000);
        assert_remaining(&gateway, expected, model);
    }
    let raw = r#"{"usage":{"prompt_tokens":15,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":14}}}"#;
    assert_eq!(post(&gateway, CHAT, &json!({"max_tokens": 1, "mock": {"raw": raw}})).status, 200);
    assert_remaining(&gateway, expected - 3, "1 + 1.4, rounded up once");
}

/// Each level of a hierarchy has its own budget, and all budgets are checked and charged in one step.
#[test]
fn budgets_of_organisation_team_and_user_hold_together() {
    let provider = Provider::start();
    let limit = |name: &str, by: &str, quota: u64| {
        format!(
            "[limit.{name}]\nby = \"{by}\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\n\
             quota = \"{quota}/hour\"\nunit = \"tokens\"\ncost = {{ llm = \"auto\" }}\n"
        )
    };
    let config = "[auth.keys]\nkind = \"api-key\"\nconsumers = \"c.toml\"\n".to_owned()
        + &limit("organisation", "group:organisation", 2000)
        + &limit("team", "group:team", 1500)
        + &limit("user", "api-key", 1000)
        + &format!(
            "[upstream.u]\nservers = [\"http://{}\"]\n[[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
             require = [\"keys\"]\nlimits = [\"organisation\", \"team\", \"user\"]\n",
            provider.address
        );
    let consumer = |name: &str, group: &str| {
        let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, name.as_bytes());
        let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[consumer]]\nname = \"{name}\"\n{group}\nkeys = [\"sha256:{hash}\"]\n")
    };
    let groups = "[[group]]\nname = \"search\"\nlevel = \"team\"\nparent = \"acme\"\n\
         [[group]]\nname = \"ads\"\nlevel = \"team\"\nparent = \"acme\"\n\
         [[group]]\nname = \"acme\"\nlevel = \"organisation\"\n";
    let consumers = groups.to_owned()
        + &consumer("ann", "group = \"search\"")
        + &consumer("ben", "group = \"search\"")
        + &consumer("cho", "group = \"ads\"")
        + &consumer("dan", "");
    let gateway = Gateway::start_with(&config, &[("c.toml", &consumers)]);
    let ask = |name: &str, output: u64| {
        let body = json!({"max_tokens": output, "mock": {"input": 1, "output": output - 1}}).to_string();
        gateway.client().request("POST", CHAT, &[("x-api-key", name)], body.as_bytes())
    };
    let left = |name: &str| {
        let reply = gateway.client().get_with("/v1/models", &[("x-api-key", name)]);
        ["organisation", "team", "user"].map(|limit| reply.remaining(limit))
    };
    for (name, output, status, expected) in [
        ("ann", 900, 200, [1100, 600, 100]),
        ("ann", 200, 429, [1100, 600, 100]),
        // The budget of the team is shared by its users.
        ("ben", 700, 429, [1100, 600, 1000]),
        ("ben", 500, 200, [600, 100, 500]),
        // The budget of the organisation is shared by its teams.
        ("cho", 700, 429, [600, 1500, 1000]),
        ("cho", 400, 200, [200, 1100, 600]),
    ] {
        let reply = ask(name, output);
        assert_eq!(reply.status, status, "{name} {output}: {}", reply.text());
        eventually(&format!("{name}: {expected:?} remain"), || left(name) == expected);
    }
    let without = ask("dan", 5);
    assert_eq!(without.status, 403, "a consumer without a group: {}", without.text());
    assert_eq!(ask("unknown", 5).status, 401);
}

/// The costs are the prices of the provider to the micro-dollar.
#[test]
fn price_list_charges_each_kind_of_token() {
    let provider = Provider::start();
    let list = "[prices.public]\n\
         \"claude-*\" = { input = 5, cached_input = 0.5, output = 25, batch = 0.5 }\n\
         nano = { input = 0.0375, cached_input = 0.00375, output = 0.3, request = 0.01 }\n\
         long = { input = 1.25, output = 10, long_context = { above = 1000, input = 2.5, output = 15 } }\n\
         voice = { input = 1, audio_input = 40, output = 2, audio_output = 80, reasoning = 3 }\n";
    let quota = 100_000_000;
    let config = config("", provider.address, quota, "prices = \"public\"", "")
        .replace("unit = \"tokens\"", "unit = \"usd-micros\"");
    let gateway = Gateway::start(&(config + list));
    let mut expected = quota;
    for (model, usage, cost) in [
        (
            "claude-opus",
            json!({"input_tokens": 21, "cache_creation_input_tokens": 188_086, "cache_read_input_tokens": 1000, "output_tokens": 393,
                "cache_creation": {"ephemeral_5m_input_tokens": 188_086, "ephemeral_1h_input_tokens": 0}}),
            1_185_968,
        ),
        (
            "claude-opus",
            json!({"input_tokens": 0, "cache_creation_input_tokens": 100, "output_tokens": 1, "cache_creation": {"ephemeral_1h_input_tokens": 100}}),
            1025,
        ),
        ("claude-opus", json!({"input_tokens": 100, "output_tokens": 100, "service_tier": "batch"}), 1500),
        (
            "nano",
            json!({"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 200}}),
            10_061,
        ),
        ("long", json!({"prompt_tokens": 1000, "completion_tokens": 100}), 2250),
        ("long", json!({"prompt_tokens": 1001, "completion_tokens": 100}), 4003),
        (
            "voice",
            json!({"prompt_tokens": 100, "completion_tokens": 100, "prompt_tokens_details": {"audio_tokens": 10},
                "completion_tokens_details": {"audio_tokens": 20, "reasoning_tokens": 30}}),
            90 + 400 + 100 + 1600 + 90,
        ),
        // An unknown model has the highest price of each kind, and the highest fee.
        ("other", json!({"prompt_tokens": 100, "completion_tokens": 100}), 500 + 2500 + 10_000),
    ] {
        let raw = json!({"usage": usage}).to_string();
        assert_eq!(post(&gateway, CHAT, &json!({"model": model, "max_tokens": 500, "mock": {"raw": raw}})).status, 200);
        expected -= cost;
        assert_remaining(&gateway, expected, &format!("{model} {usage}"));
    }
}

/// Whatever a client names in the body, the request reserves the price of the most expensive reading, and the response
/// decides what it costs.
#[test]
fn client_cannot_choose_a_cheaper_price() {
    let provider = Provider::start();
    let list = "[prices.public]\n\
         cheap = { input = 0, output = 1, priority = 2, fast = 6 }\n\
         \"dear*\" = { input = 0, output = 100 }\n\
         usual = { input = 0, output = 50 }\n";
    let quota = 100_000_000;
    let config = config("", provider.address, quota, "prices = \"public\"", "")
        .replace("unit = \"tokens\"", "unit = \"usd-micros\"");
    let gateway = Gateway::start(&(config + list));
    let mut expected = quota;
    let answer = |model: &str, tier: Value| {
        let usage = json!({"prompt_tokens": 10, "completion_tokens": 10, "service_tier": tier});
        json!({"model": model, "service_tier": tier, "usage": usage})
    };
    const MESSAGES: &str = "/v1/messages";
    for (path, fields, response, reserved, cost) in [
        (CHAT, json!({"model": "cheap"}), answer("cheap", Value::Null), 1000, 10),
        (CHAT, json!({"model": "cheap", "models": ["cheap", "dear"]}), answer("cheap", Value::Null), 100_000, 10),
        (CHAT, json!({"model": "cheap", "models": ["cheap", "dear"]}), answer("dear", Value::Null), 100_000, 1000),
        (CHAT, json!({"model": "cheap", "fallbacks": ["dear"]}), answer("alias", Value::Null), 100_000, 1000),
        (
            CHAT,
            json!({"model": "cheap", "fallbacks": [{"model": "usual", "messages": [{"content": "dear"}]}]}),
            answer("cheap", Value::Null),
            50_000,
            10,
        ),
        (
            CHAT,
            json!({"model": "cheap", "context_window_fallbacks": [{"cheap": ["dear"]}]}),
            answer("cheap", Value::Null),
            100_000,
            10,
        ),
        // A model without a price has the highest price.
        (CHAT, json!({"model": "cheap", "models": ["unlisted"]}), answer("cheap", Value::Null), 100_000, 10),
        // LiteLLM calls each model of the list.
        (CHAT, json!({"model": "cheap,dear"}), answer("dear", Value::Null), 200_000, 1000),
        // A server reads only the end of the path.
        ("/models/cheap:x/v1/chat/completions", json!({"model": "dear"}), answer("dear", Value::Null), 100_000, 1000),
        // The response names a more expensive model than the request, or a version without a price.
        (CHAT, json!({"model": "cheap"}), answer("dear-2026-11", Value::Null), 1000, 1000),
        (CHAT, json!({"model": "cheap"}), answer("cheap-2026-11", Value::Null), 1000, 10),
        (CHAT, json!({"model": "dear"}), answer("cheap", Value::Null), 100_000, 1000),
        (CHAT, json!({"model": "cheap", "service_tier": "priority"}), answer("cheap", "priority".into()), 2000, 20),
        (CHAT, json!({"model": "cheap", "service_tier": "priority"}), answer("cheap", Value::Null), 2000, 20),
        (CHAT, json!({"model": "cheap", "service_tier": "priority"}), answer("cheap", "default".into()), 2000, 10),
        (CHAT, json!({"model": "cheap", "service_tier": "auto"}), answer("cheap", "priority".into()), 1000, 20),
        (
            MESSAGES,
            json!({"model": "cheap", "speed": "fast"}),
            json!({"model": "cheap", "usage": {"input_tokens": 10, "output_tokens": 10, "speed": "fast"}}),
            6000,
            60,
        ),
        (
            "/v1/projects/p/locations/l/publishers/anthropic/models/cheap:rawPredict",
            json!({"anthropic_version": "vertex-2023-10-16", "speed": "fast"}),
            json!({"usage": {"input_tokens": 10, "output_tokens": 10, "speed": "standard"}}),
            6000,
            10,
        ),
    ] {
        let mut body = json!({"max_tokens": 1000, "mock": {"raw": response.to_string()}});
        body.as_object_mut().unwrap().append(&mut fields.as_object().unwrap().clone());
        let reply = post(&gateway, path, &body);
        assert_eq!(
            (reply.status, expected - reply.remaining("tokens")),
            (200, reserved),
            "{path} {fields}: {}",
            reply.text()
        );
        expected -= cost;
        assert_remaining(&gateway, expected, &format!("{path} {fields} {response}"));
    }
    let many: Vec<_> = (0..40).map(|number| format!("m{number}")).collect();
    for fields in [json!({"models": many}), json!({"models": ["x".repeat(200)]}), json!({"Models": ["cheap"]})] {
        assert_eq!(post(&gateway, CHAT, &fields).status, 400, "{fields}");
    }
}

/// Links and uploaded files reserve as much as an image or a document.
#[test]
fn links_to_files_reserve_their_tokens() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "default_output = 0");
    const GEMINI: &str = "/v1beta/models/m:generateContent";
    let anthropic = |part: Value| ("/v1/messages", json!({"messages": [{"role": "user", "content": [part]}]}));
    let gemini = |part: Value| (GEMINI, json!({"contents": [{"parts": [part]}]}));
    let source = |kind: &str| json!({"type": kind, "source": {"type": "url", "url": "https://a.test/b"}});
    let mut clients = 0;
    for ((path, mut body), expected) in [
        (anthropic(source("document")), 3000),
        (anthropic(json!({"source": {"type": "url", "url": "https://a.test/b"}, "type": "document"})), 3000),
        (anthropic(source("image")), 1000),
        (anthropic(json!({"type": "document", "source": {"type": "file", "file_id": "f"}})), 3000),
        (gemini(json!({"fileData": {"fileUri": "https://a.test/b"}})), 3000),
        (gemini(json!({"fileData": {"fileUri": "https://a.test/b", "mimeType": "image/png"}})), 1000),
        (gemini(json!({"fileData": {"fileUri": "https://a.test/b", "mimeType": "text/plain"}})), 3000),
        (
            (
                "/v1/responses",
                json!({"input": [{"content": [{"type": "input_file", "file_url": "https://a.test/b.pdf"}]}]}),
            ),
            3000,
        ),
        ((CHAT, json!({"messages": [{"content": [{"type": "file", "file": {"file_id": "f"}}]}]})), 3000),
        (
            (
                CHAT,
                json!({"model": "gpt-4o-mini", "messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://a.test/b"}}]}]}),
            ),
            25_501,
        ),
    ] {
        body["mock"] = json!({"output": 1});
        let body = body.to_string();
        clients += 1;
        let id = clients.to_string();
        let reply = gateway.client().request("POST", path, &[("x-id", &id)], body.as_bytes());
        let text = (body.len() as u64).div_ceil(4);
        assert_eq!((reply.status, QUOTA - reply.remaining("tokens")), (200, text + expected), "{path} {body}");
    }
}

/// Batches of Anthropic reserve each of their requests. The requests of OpenAI's batches are in a file.
#[test]
fn batches_reserve_all_their_requests_or_are_rejected() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "default_output = 500");
    let raw = json!({"id": "msgbatch_1", "processing_status": "in_progress"}).to_string();
    let request = |bound: Value| json!({"custom_id": "a", "params": {"model": "m", "max_tokens": bound, "messages": [{"role": "user", "content": "hi"}]}});
    let requests = [request(1000.into()), request(2000.into()), request(Value::Null)];
    let body = json!({"requests": requests, "mock": {"raw": raw}});
    let reply = post(&gateway, "/v1/messages/batches", &body);
    let reserved = (body.to_string().len() as u64).div_ceil(4) + 3500;
    assert_eq!((reply.status, QUOTA - reply.remaining("tokens")), (200, reserved), "{}", reply.text());
    eventually("the request is logged", || records(&gateway).len() == 1);
    assert_eq!(records(&gateway)[0]["limits"][0]["settled"], reserved, "the results are fetched later");
    let file = json!({"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "mock": {"raw": raw}});
    let seen = provider.count();
    for path in [
        "/v1/batches",
        "/v1/batch/jobs",
        "/v1/embed-jobs",
        "/v1beta/models/m:batchGenerateContent",
        "/v1beta/models/m:asyncBatchEmbedContent",
        "/v1/projects/p/locations/l/batchPredictionJobs",
    ] {
        let rejected = post(&gateway, path, &file);
        let is_described = rejected.text().contains("batch file or job");
        assert_eq!((rejected.status, is_described), (400, true), "{path} {}", rejected.text());
    }
    assert_eq!(provider.count(), seen, "no job reaches the provider");
    let free = start(&provider, QUOTA, "unknown = \"free\"");
    assert_eq!((post(&free, "/v1/batches", &file).status, remaining(&free)), (200, QUOTA));
}

/// Without `bytes_per_token`, the reservation of each kind of text is near the number of its tokens, and images are not
/// text even if their base64 has escape sequences.
#[test]
fn reservation_of_text_follows_its_characters() {
    let provider = Provider::start();
    let base = config("", provider.address, QUOTA, "default_output = 0", "").replace("bytes_per_token = 4, ", "");
    let gateway = Gateway::start(&base);
    let samples: Vec<Value> = serde_json::from_str(include_str!("../fixtures/o200k.json")).unwrap();
    let image = format!("iVBORw0KGgo{}", format!("{}\\/", "b9cd".repeat(16)).repeat(300));
    let reserved = |content: &Value, escaped: &str| {
        let body = json!({"messages": [{"role": "user", "content": content}], "mock": {"input": 0, "output": 0}});
        let body = body.to_string().replace("IMAGE", escaped);
        let reply = gateway.client().request("POST", CHAT, &[ID], body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        let reserved = QUOTA - reply.remaining("tokens");
        assert_remaining(&gateway, QUOTA, "a usage of 0 costs nothing");
        reserved
    };
    let structure = reserved(&"".into(), "");
    assert!(structure < 50, "{structure}");
    for sample in samples.iter().take(14) {
        let text = reserved(&sample["text"], "") - structure;
        let tokens = sample["tokens"].as_u64().unwrap();
        assert!((tokens * 3..=tokens * 5).contains(&(text * 4)), "{text} {sample}");
    }
    let with_image =
        reserved(&json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,IMAGE"}}]), &image);
    assert!((1000..1200).contains(&with_image), "{with_image}");
}

/// The upstream, the limits and the log get the model that replaces an alias, and the rest of the body is unchanged.
#[test]
fn alias_of_a_model_is_replaced_in_the_body_and_in_the_price() {
    let provider = Provider::start();
    let cost = "weights = { input = 0, output = 1 }, models.\"gpt-5*\" = { output = 10 }";
    let base = config("", provider.address, QUOTA, cost, "");
    let gateway = Gateway::start(&(base + "model_aliases = { fast = \"gpt-5-mini\", \"a\\\"b\" = \"gpt-5\" }\n"));
    let mut expected = QUOTA;
    for (model, forwarded, price) in
        [("fast", "gpt-5-mini", 10), ("a\"b", "gpt-5", 10), ("Fast", "Fast", 1), ("gpt-5", "gpt-5", 10)]
    {
        for is_stream in [false, true] {
            let mut body = json!({"max_tokens": 100, "model": model, "stream": is_stream, "z": [{"model": "fast"}], "mock": {"output": 7}});
            let reply = post(&gateway, CHAT, &body);
            assert_eq!((reply.status, expected - reply.remaining("tokens")), (200, 100 * price), "{model}");
            expected -= 7 * price;
            assert_remaining(&gateway, expected, model);
            let seen = provider.seen.lock().unwrap().iter().rev().find(|seen| !seen.body.is_empty()).unwrap().clone();
            body["model"] = forwarded.into();
            let mut sent: Value = serde_json::from_slice(&seen.body).unwrap();
            sent.as_object_mut().unwrap().remove("stream_options");
            assert_eq!(sent, body);
            assert_eq!(seen.headers("content-length"), [seen.body.len().to_string()]);
        }
    }
    let models = || records(&gateway).iter().map(|record| record["model"].clone()).collect::<Vec<_>>();
    eventually("the requests are logged", || models().len() == 8);
    assert_eq!(models()[..4], ["gpt-5-mini", "gpt-5-mini", "gpt-5", "gpt-5"]);
}

/// Each place in which a request names models that the server may use, and what the upstream gets.
#[test]
fn aliases_of_models_are_replaced_in_lists_and_fallbacks() {
    let provider = Provider::start();
    let cost = "weights = { input = 0, output = 1 }, models.\"gpt-5*\" = { output = 10 }";
    let base = config("", provider.address, QUOTA, cost, "");
    let gateway = Gateway::start(&(base + "model_aliases = { fast = \"gpt-5-mini\", smart = \"gpt-5\" }\n"));
    let mut expected = QUOTA;
    for (named, forwarded) in [
        (json!({"model": "m", "models": ["fast", "n"]}), json!({"model": "m", "models": ["gpt-5-mini", "n"]})),
        (json!({"model": "fast, m"}), json!({"model": "gpt-5-mini,m"})),
        (
            json!({"model": "m", "fallbacks": ["fast", {"model": "smart", "messages": [{"content": "fast"}]}]}),
            json!({"model": "m", "fallbacks": ["gpt-5-mini", {"model": "gpt-5", "messages": [{"content": "fast"}]}]}),
        ),
        (
            json!({"model": "m", "context_window_fallbacks": [{"m": ["smart"]}]}),
            json!({"model": "m", "context_window_fallbacks": [{"m": ["gpt-5"]}]}),
        ),
        (
            json!({"model": "m", "content_policy_fallbacks": [{"m": ["smart"]}], "user": "fast"}),
            json!({"model": "m", "content_policy_fallbacks": [{"m": ["gpt-5"]}], "user": "fast"}),
        ),
    ] {
        let calls = if named["model"] == "fast, m" { 2 } else { 1 };
        let mut body = json!({"max_tokens": 100, "mock": {"output": 7}});
        let mut sent = body.clone();
        body.as_object_mut().unwrap().extend(named.as_object().unwrap().clone());
        sent.as_object_mut().unwrap().extend(forwarded.as_object().unwrap().clone());
        let reply = post(&gateway, CHAT, &body);
        assert_eq!((reply.status, expected - reply.remaining("tokens")), (200, 1000 * calls), "{body}");
        let seen = provider.seen.lock().unwrap().iter().rev().find(|seen| !seen.body.is_empty()).unwrap().clone();
        assert_eq!(serde_json::from_slice::<Value>(&seen.body).unwrap(), sent);
        assert_eq!(seen.headers("content-length"), [seen.body.len().to_string()]);
        // The response names no model, so the price is that of the most expensive model.
        expected -= 70;
        assert_remaining(&gateway, expected, "the response is settled");
    }
}

/// Send `count` requests at the same time, which all use the output that they ask for. Return how many are admitted, and
/// the tokens that all requests so far are charged in the end.
fn burst(gateway: &Gateway, provider: &Provider, send: impl Fn(usize) -> u16 + Sync, count: usize) -> (usize, u64) {
    let posted = || provider.seen.lock().unwrap().iter().filter(|seen| !seen.body.is_empty()).count();
    let before = posted();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let send = &send;
        let clients: Vec<_> = (0..count).map(|number| scope.spawn(move || send(number))).collect();
        // The provider answers when all requests have been decided.
        let denied = || clients.iter().filter(|client| client.is_finished()).count();
        eventually("all requests are decided", || denied() + posted() - before >= count);
        provider.release();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let admitted = statuses.iter().filter(|status| **status == 200).count();
    assert_eq!(admitted + statuses.iter().filter(|status| **status == 429).count(), count, "{statuses:?}");
    let costs = || -> Vec<u64> {
        records(gateway).iter().filter_map(|record| record["limits"][0]["settled"].as_u64()).collect()
    };
    eventually("all requests are settled", || costs().len() >= posted());
    (admitted, costs().iter().sum())
}

/// The learned output of a client that asks for 4,000 tokens and uses 10, and then uses all of them 50 times at once.
#[test]
fn learned_reservations_admit_more_requests_and_exceed_the_budget_by_at_most_a_tenth() {
    let short = json!({"model": "m", "max_tokens": 4000, "mock": {"input": 10, "output": 10}});
    let full =
        json!({"model": "m", "max_tokens": 4000, "mock": {"input": 10, "output": 4000, "pause_after": 0, "seed": 1}});
    let mut admitted_by = Vec::new();
    for (cost, max) in [("", QUOTA), ("reserve_output = \"p95\"", QUOTA + QUOTA / 10)] {
        let provider = Provider::start();
        let gateway = start(&provider, QUOTA, cost);
        for count in 1..=20 {
            assert_eq!(post(&gateway, CHAT, &short).status, 200);
            assert_remaining(&gateway, QUOTA - 20 * count, "a short response");
        }
        let reserved = QUOTA - post(&gateway, CHAT, &short).remaining("tokens") - 400;
        assert_eq!(reserved < 100, !cost.is_empty(), "{cost}: {reserved}");
        let (admitted, charged) = burst(&gateway, &provider, |_| post(&gateway, CHAT, &full).status, 50);
        assert!(charged <= max, "{cost}: {charged} tokens for {admitted} requests");
        admitted_by.push(admitted);
    }
    assert!(admitted_by[0] < admitted_by[1], "{admitted_by:?}");
}

/// Fifty requests at once near the budget to each operation that generates output, in the formats of the providers'
/// documentation, with headers and positions of other APIs that could lower the reservation.
#[test]
fn concurrent_requests_to_each_api_stay_within_the_budget() {
    const OUTPUT: u64 = 900;
    const JSON: &str = "application/json";
    const SSE: &str = "text/event-stream";
    let own = json!({"input": 10, "output": OUTPUT, "pause_after": 0, "seed": 1});
    let raw = |kind: &str, text: String| json!({"type": kind, "raw": text, "pause_after": 0});
    let positions = |mut own: Value, mock: &Value| {
        let others = json!({
            "max_tokens": 1, "max_completion_tokens": 1, "options": {"num_predict": 1}, "mock": mock,
            "generationConfig": {"maxOutputTokens": 1}, "inferenceConfig": {"maxTokens": 1},
            "max_gen_len": 1, "thinking": {"token_budget": 1},
            "parameters": {"max_new_tokens": 1}, "message": "hello", "random_seed": 1, "safe_prompt": false
        });
        // Titan has its maximum at the position of Gemini, under another name. A request may contain one of them.
        let is_titan = own.get("textGenerationConfig").is_some();
        for (name, value) in others.as_object().unwrap() {
            if !is_titan || name != "generationConfig" {
                own.as_object_mut().unwrap().entry(name).or_insert_with(|| value.clone());
            }
        }
        own
    };
    let generation = json!({"generationConfig": {"maxOutputTokens": OUTPUT}});
    let openai = json!({"max_tokens": OUTPUT, "max_completion_tokens": OUTPUT});
    let anthropic = json!({"max_tokens": OUTPUT});
    let converse = json!({"inferenceConfig": {"maxTokens": OUTPUT}});
    let streamed = |body: &Value| {
        let mut body = body.clone();
        body["stream"] = true.into();
        body
    };
    // The Text Completions API of Anthropic reports no usage.
    let legacy =
        raw(JSON, json!({"type": "completion", "completion": " tok", "stop_reason": "stop_sequence"}).to_string());
    let message = json!({"type": "message", "content": [{"type": "text", "text": "tok"}], "usage": {"input_tokens": 10, "output_tokens": OUTPUT}});
    let mistral = json!({
        "id": "cmpl-1", "object": "chat.completion", "created": 1, "model": "mistral-small-latest",
        "choices": [{"index": 0, "message": {"role": "assistant", "tool_calls": null, "content": "tok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "total_tokens": 10 + OUTPUT, "completion_tokens": OUTPUT}
    });
    let units = json!({"billed_units": {"input_tokens": 10, "output_tokens": OUTPUT}, "tokens": {"input_tokens": 70, "output_tokens": OUTPUT}});
    let content = json!({"role": "assistant", "content": [{"type": "text", "text": "tok"}]});
    let cohere = json!({"id": "1", "message": content, "finish_reason": "COMPLETE", "usage": units});
    let cohere_stream: String = [
        json!({"id": "1", "type": "message-start", "delta": {"message": {"role": "assistant", "content": []}}}),
        json!({"type": "content-start", "index": 0, "delta": {"message": {"content": {"type": "text", "text": ""}}}}),
        json!({"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": "tok"}}}}),
        json!({"type": "content-end", "index": 0}),
        json!({"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": units}}),
    ]
    .iter()
    .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap()))
    .collect();
    let mut meta = units;
    meta["api_version"] = json!({"version": "1"});
    let old = json!({"text": "tok", "generation_id": "1", "finish_reason": "COMPLETE", "meta": meta});
    let old_stream: String = [
        json!({"is_finished": false, "event_type": "stream-start", "generation_id": "1"}),
        json!({"is_finished": false, "event_type": "text-generation", "text": "tok"}),
        json!({"is_finished": true, "event_type": "stream-end", "finish_reason": "COMPLETE", "response": old}),
    ]
    .iter()
    .map(|event| format!("{event}\n"))
    .collect();
    let converse_usage = raw(JSON, json!({"usage": {"inputTokens": 10, "outputTokens": OUTPUT}}).to_string());
    let generate =
        json!({"model": "m", "response": "tok", "done": true, "prompt_eval_count": 10, "eval_count": OUTPUT});
    let cases = [
        ("/v1/chat/completions", &openai, &own),
        ("/v1/chat/completions", &streamed(&openai), &own),
        ("/v1/completions", &openai, &own),
        ("/v1/responses", &json!({"max_output_tokens": OUTPUT}), &own),
        ("/v1/responses", &streamed(&json!({"max_output_tokens": OUTPUT})), &own),
        ("/v1/messages", &anthropic, &own),
        ("/v1/messages", &streamed(&anthropic), &own),
        ("/v1/complete", &json!({"max_tokens_to_sample": OUTPUT}), &legacy),
        ("/v1/projects/p/publishers/anthropic/models/c:rawPredict", &anthropic, &raw(JSON, message.to_string())),
        ("/v1/projects/p/publishers/anthropic/models/c:streamRawPredict", &anthropic, &raw(JSON, message.to_string())),
        ("/v1/projects/p/publishers/mistralai/models/m:rawPredict", &anthropic, &raw(JSON, mistral.to_string())),
        (
            "/v1/projects/p/publishers/mistralai/models/m:streamRawPredict",
            &anthropic,
            &raw(SSE, format!("data: {mistral}\n\n")),
        ),
        ("/v1beta/models/m:generateContent", &generation, &own),
        ("/v1beta/models/m:streamGenerateContent", &generation, &own),
        ("/v1beta/models/m:streamGenerateContent?alt=sse", &generation, &own),
        ("/api/chat", &json!({"options": {"num_predict": OUTPUT}}), &own),
        ("/api/chat", &streamed(&json!({"options": {"num_predict": OUTPUT}})), &own),
        ("/api/generate", &json!({"options": {"num_predict": OUTPUT}}), &raw(JSON, generate.to_string())),
        ("/model/m/converse", &converse, &converse_usage),
        ("/model/m/converse-stream", &converse, &converse_usage),
        (
            "/model/amazon.titan/invoke",
            &json!({"textGenerationConfig": {"maxTokenCount": OUTPUT}}),
            &raw(JSON, message.to_string()),
        ),
        ("/model/m/invoke-with-response-stream", &anthropic, &raw(JSON, message.to_string())),
        ("/mistral/v1/chat/completions", &anthropic, &raw(JSON, mistral.to_string())),
        ("/mistral/v1/chat/completions", &streamed(&anthropic), &own),
        ("/mistral/v1/fim/completions", &anthropic, &raw(JSON, mistral.to_string())),
        ("/v2/chat", &anthropic, &raw(JSON, cohere.to_string())),
        ("/v2/chat", &streamed(&anthropic), &raw(SSE, cohere_stream)),
        ("/v1/chat", &anthropic, &raw(JSON, old.to_string())),
        ("/v1/chat", &streamed(&anthropic), &raw("application/stream+json", old_stream)),
    ];
    // Each operation of the manual that may generate output has a case.
    let manual = include_str!("../../docs/reference/limits.md");
    let operations = manual.split("### Operations\n").nth(1).unwrap().split("\n### ").next().unwrap();
    let generating: Vec<_> =
        operations.lines().filter(|line| line.ends_with("| estimated input, maximum output |")).collect();
    assert!(generating.len() >= 19, "{generating:?}");
    for line in generating {
        let path = line.split('`').nth(1).unwrap();
        let (within, end) = path.split_once('…').unwrap();
        let is_case = |path: &str| path.contains(within) && path.split('?').next().unwrap().ends_with(end);
        assert!(cases.iter().any(|(path, ..)| is_case(path)), "no case for {path}");
    }
    let headers = [
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "output-128k"),
        ("x-goog-api-key", "k"),
        ("openai-beta", "assistants=v2"),
        ("user-agent", "ollama-python"),
        ("x-amz-target", "x"),
        ("x-client-name", "cohere"),
        ("accept", "text/event-stream"),
    ];
    for (path, body, mock) in cases {
        let provider = Provider::start();
        let text = positions(body.clone(), mock).to_string();
        let reserved = OUTPUT + (text.len() as u64).div_ceil(4);
        let budget = 10 * reserved + reserved / 2;
        let gateway = start(&provider, budget, "");
        let send = |number: usize| {
            let headers = [ID, ("content-type", "application/json"), headers[number % headers.len()]];
            gateway.client().request("POST", path, &headers, text.as_bytes()).status
        };
        let (admitted, charged) = burst(&gateway, &provider, send, 50);
        assert!(charged <= budget, "{path}: {charged} of {budget} tokens for {admitted} requests");
        // Responses that end early free a part of their reservation for others.
        let most = budget / (10 + OUTPUT);
        assert!((10..=most as usize).contains(&admitted), "{path}: {admitted} admitted of at most {most}");
        // The Text Completions API reports nothing, so its reservations stay charged.
        let each = if mock == &legacy { reserved } else { 10 + OUTPUT };
        assert_eq!(charged, admitted as u64 * each, "{path}");
    }
}

/// Mistral rejects requests with `stream_options`, and reports the usage without it.
#[test]
fn usage_of_streams_is_not_requested_from_upstreams_that_reject_it() {
    let provider = Provider::start();
    let base = config("", provider.address, QUOTA, "", "");
    let strict = |base: &str| base.replace("[upstream.u]\n", "[upstream.u]\ninclude_usage = false\n");
    let path = "/mistral/v1/chat/completions";
    let body =
        json!({"stream": true, "max_tokens": 500, "mock": {"input": 21, "output": 7, "seed": 1, "strict": true}});
    assert_eq!(
        post(&Gateway::start(&base), path, &body).status,
        422,
        "the test needs a server that rejects the option"
    );
    let gateway = Gateway::start(&strict(&base));
    let reply = post(&gateway, path, &body);
    assert_eq!(reply.status, 200);
    assert!(reply.text().contains("\"usage\""), "the usage of Mistral reaches the client: {}", reply.text());
    assert_eq!(serde_json::from_slice::<Value>(&provider.last().body).unwrap(), body, "the body is unchanged");
    assert_remaining(&gateway, QUOTA - 28, "the usage is read");
    // Each upstream of a route gets the option or not, in either order.
    let failing = Upstream::responding(|_| b"HTTP/1.1 503 Error\r\nContent-Length: 0\r\n\r\n".to_vec());
    for (first, fallback) in [("", "include_usage = false\n"), ("include_usage = false\n", "")] {
        let seen = failing.count();
        let (before, route) = base.split_once("[upstream.u]\n").unwrap();
        let route = route.replace(
            "upstream = \"u\"",
            "upstream = \"first\"\nretry_on = [\"5xx\"]\nretry_methods = [\"POST\"]\nfallback = [\"u\"]",
        );
        let gateway = Gateway::start(&format!(
            "{before}[upstream.first]\n{first}servers = [\"{}\"]\n[upstream.u]\n{fallback}{route}",
            failing.url()
        ));
        let path = if fallback.is_empty() { CHAT } else { path };
        let mut body = body.clone();
        body["mock"]["strict"] = (!fallback.is_empty()).into();
        let reply = post(&gateway, path, &body);
        assert_eq!((reply.status, failing.count()), (200, seen + 1), "{first:?} {fallback:?}");
        let has_option = |body: &[u8]| serde_json::from_slice::<Value>(body).unwrap().get("stream_options").is_some();
        assert_eq!(has_option(&failing.last().body), first.is_empty(), "{first:?}");
        assert_eq!(has_option(&provider.last().body), fallback.is_empty(), "{fallback:?}");
        assert_remaining(&gateway, QUOTA - 28, "the usage is read");
    }
}

/// What a client may write to select the output of another model or client.
#[test]
fn client_cannot_select_what_was_learned_for_others() {
    let provider = Provider::start();
    let cost = "reserve_output = \"p95\", models.\"small\" = { output = 1 }, models.\"fast*\" = { output = 2 }";
    let base = config("", provider.address, QUOTA, cost, "");
    let gateway = Gateway::start(&(base + "model_aliases = { quick = \"fast-1\" }\n"));
    let reserved = |id: &str, body: &Value| {
        let before = gateway.client().get_with("/v1/models", &[("x-id", id)]).remaining("tokens");
        let headers = [("x-id", id), ("content-type", "application/json")];
        let reply = gateway.client().request("POST", CHAT, &headers, body.to_string().as_bytes());
        assert_eq!(reply.status, 200, "{body}");
        let left = || gateway.client().get_with("/v1/models", &[("x-id", id)]).remaining("tokens");
        eventually("the request is settled", || left() + 200 >= before);
        before - reply.remaining("tokens")
    };
    let body = |model: Value| json!({"model": model, "max_tokens": 4000, "mock": {"input": 10, "output": 10}});
    let mut expected = QUOTA;
    for (model, cost) in [("small", 20), ("unlisted", 20)] {
        for _ in 0..25 {
            assert_eq!(post(&gateway, CHAT, &body(model.into())).status, 200);
            expected -= cost;
            assert_remaining(&gateway, expected, model);
        }
    }
    assert!(reserved("a", &body("small".into())) < 200, "the output of the model is learned");
    let mut several = body("small".into());
    several["models"] = json!(["small", "fast-1"]);
    let mut batch = body("small".into());
    batch["n"] = 2.into();
    for (id, what, body) in [
        ("b", "another client", body("small".into())),
        ("a", "another model", body("fast-1".into())),
        ("a", "an alias of another model", body("quick".into())),
        ("a", "a model without a weight", body("unlisted".into())),
        ("a", "several models", several),
    ] {
        assert!(reserved(id, &body) >= 4000, "{what}: {body}");
    }
    assert!(reserved("a", &batch) < 200, "all choices together were short");
}

/// The APIs whose paths name the model: what the client sends, and what the upstream gets.
#[test]
fn aliases_of_models_are_replaced_in_paths() {
    let provider = Provider::start();
    let cost = "weights = { input = 0, output = 1 }, models.\"gpt*\" = { output = 10 }, models.\"m\" = { output = 10 }";
    let aliases = "model_aliases = { fast = \"m\", \"big model\" = \"gpt/v1:0\" }\n";
    let base = config("", provider.address, QUOTA, cost, "") + aliases;
    let rewritten = "[[route]]\nname = \"g\"\npath = \"/g/{*rest}\"\nrewrite = \"/v1beta/models/{rest}\"\n\
                     limits = [\"tokens\"]\nupstream = \"u\"\n";
    let gateway = Gateway::start(&format!("{base}{rewritten}{aliases}"));
    let gemini = json!({"generationConfig": {"maxOutputTokens": 100}, "mock": {"output": 7}});
    let azure = json!({"model": "cheap", "max_tokens": 100, "mock": {"output": 7}});
    let answer = json!({"output": {}, "usage": {"inputTokens": 10, "outputTokens": 7}}).to_string();
    let bedrock = json!({"inferenceConfig": {"maxTokens": 100}, "mock": {"raw": answer}});
    let mut expected = QUOTA;
    for (sent, received, body) in [
        ("/v1beta/models/fast:generateContent", "/v1beta/models/m:generateContent", &gemini),
        (
            "/v1beta/models/fa%73t:streamGenerateContent?alt=sse",
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            &gemini,
        ),
        ("/v1beta//models/m:generateContent", "/v1beta/models/m:generateContent", &gemini),
        (
            "/v1/projects/p/publishers/google/models/fast:generateContent",
            "/v1/projects/p/publishers/google/models/m:generateContent",
            &gemini,
        ),
        ("/g/fast:streamGenerateContent?alt=sse", "/v1beta/models/m:streamGenerateContent?alt=sse", &gemini),
        (
            "/openai/deployments/big%20model/chat/completions",
            "/openai/deployments/gpt%2Fv1%3A0/chat/completions",
            &azure,
        ),
        ("/model/big%20model/converse", "/model/gpt%2Fv1%3A0/converse", &bedrock),
    ] {
        let reply = post(&gateway, sent, body);
        assert_eq!((reply.status, expected - reply.remaining("tokens")), (200, 1000), "{sent}");
        let seen = provider.seen.lock().unwrap().iter().rev().find(|seen| !seen.body.is_empty()).unwrap().clone();
        assert_eq!(seen.target(), received, "{sent}");
        expected -= 70;
        assert_remaining(&gateway, expected, sent);
    }
    let models = || records(&gateway).iter().map(|record| record["model"].clone()).collect::<Vec<_>>();
    eventually("the requests are logged", || models().len() == 7);
    assert_eq!(models(), ["m", "m", "m", "m", "m", "gpt/v1:0", "gpt/v1:0"]);
}

/// A provider that answers with an error may bill the tokens that it has read or generated before. The request goes to a
/// fallback, to another server of the upstream, or to both in turn.
#[test]
fn usage_of_a_response_that_a_retry_or_a_fallback_replaces_is_charged() {
    let usage = r#"{"error":{"message":"overloaded"},"usage":{"prompt_tokens":40,"completion_tokens":5}}"#;
    let stream = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":5}}\n\n";
    let compressed = "Content-Encoding: gzip\r\n";
    let (billed, own, reserved) = (45, 28, QUOTA);
    for (name, kind, text, more, status, refunds, charged) in [
        ("both responses are charged", "application/json", usage, "", 200, "", billed + own),
        ("a stream reports usage", "text/event-stream", stream, "", 200, "", billed + own),
        ("an error without usage is free", "application/json", "{}", "", 200, "", own),
        ("an error that is no JSON is free", "text/plain", usage, "", 200, "", own),
        ("a compressed error is not read", "application/json", usage, compressed, 200, "", own),
        ("the last error keeps the reservation", "application/json", usage, "", 503, "refund_on = [\"4xx\"]", reserved),
        ("only the last error is refunded", "application/json", usage, "", 503, "", billed),
        ("all is refunded", "application/json", "{}", "", 503, "", 0),
    ] {
        for (replaced, servers, fallback) in [
            (1, 1, "fallback = [\"second\"]"),
            (1, 2, ""),
            (2, 2, "fallback = [\"second\"]"),
            (3, 3, "fallback = [\"second\"]"),
        ] {
            let response = format!(
                "HTTP/1.1 503 Error\r\nContent-Type: {kind}\r\n{more}Content-Length: {}\r\n\r\n{text}",
                text.len()
            );
            let own = r#"{"usage":{"prompt_tokens":21,"completion_tokens":7}}"#;
            let last = if status == 200 { own } else { r#"{"error":{"message":"overloaded"}}"# };
            let last = format!(
                "HTTP/1.1 {status} Last\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{last}",
                last.len()
            );
            // Whichever server gets the first requests fails.
            let requests = Arc::<AtomicUsize>::default();
            let all: Vec<_> = (0..=replaced)
                .map(|_| {
                    let (requests, response, last) = (requests.clone(), response.clone(), last.clone());
                    Upstream::responding(move |_| {
                        let is_replaced = requests.fetch_add(1, Ordering::SeqCst) < replaced;
                        if is_replaced { response.clone() } else { last.clone() }.into_bytes()
                    })
                })
                .collect();
            let urls: Vec<_> = all.iter().map(Upstream::url).collect();
            let (first, second) = urls.split_at(servers);
            let second = if second.is_empty() { first } else { second };
            let route = format!(
                "upstream = \"first\"\nretries = {}\nretry_on = [\"5xx\"]\nretry_methods = [\"POST\"]\n{fallback}\n",
                servers - 1
            );
            let upstreams = format!("[upstream.first]\nservers = {first:?}\n[upstream.second]\nservers = {second:?}\n");
            let base = config("", all[0].address, QUOTA, "", refunds).replace("upstream = \"u\"\n", &route);
            let gateway = Gateway::start(&base.replace("[[route]]", &format!("{upstreams}[[route]]")));
            let body = json!({"max_tokens": 500});
            let reply = post(&gateway, CHAT, &body);
            let name = format!("{name}: {replaced} replaced, {servers} servers");
            assert_eq!((reply.status, requests.load(Ordering::SeqCst)), (status, replaced + 1), "{name}");
            let input = (body.to_string().len() as u64).div_ceil(4);
            let charged = match charged {
                charged if charged == reserved => input + 500,
                charged if charged >= billed => charged - billed + replaced as u64 * billed,
                charged => charged,
            };
            assert_remaining(&gateway, QUOTA - charged, &name);
        }
    }
}

/// A fallback with another path gets the models that replace aliases, in its path and in the body. The request reserves
/// the most expensive model that it could reach.
#[test]
fn aliases_of_models_are_replaced_for_fallbacks_with_their_own_path() {
    let cost = "weights = { input = 0, output = 1 }, models.\"m\" = { output = 10 }";
    let body = |model: &str| {
        json!({
            "model": model, "max_tokens": 100, "generationConfig": {"maxOutputTokens": 100}, "mock": {"output": 7}
        })
    };
    let azure = ("/openai/deployments/{name}/chat/completions", "/d/{name}/chat/completions");
    let gemini = "/v1beta/models/{rest}";
    let vertex = "/v1/projects/p/publishers/google/models/{rest}";
    for (path, path_of_route, path_of_fallback, sent, received, model, reserved) in [
        // The paths of both name the model, and the path of the client does not.
        ("/g/{*rest}", vertex, gemini, "/g/fast:generateContent", "/v1beta/models/m:generateContent", "cheap", 1000),
        // The path of the client names it as well.
        (
            "/models/{*rest}",
            vertex,
            gemini,
            "/models/fast:generateContent",
            "/v1beta/models/m:generateContent",
            "m",
            1000,
        ),
        // The path of the route names a model, and the fallback reads the body.
        (azure.1, azure.0, CHAT, "/d/cheap/chat/completions", CHAT, "fast", 1000),
        // The other way round.
        (azure.1, CHAT, azure.0, "/d/fast/chat/completions", "/openai/deployments/m/chat/completions", "cheap", 1000),
        (
            azure.1,
            CHAT,
            azure.0,
            "/d/cheap/chat/completions",
            "/openai/deployments/cheap/chat/completions",
            "cheap",
            100,
        ),
    ] {
        let (first, second) =
            (Upstream::responding(|_| b"HTTP/1.1 503 Error\r\nContent-Length: 0\r\n\r\n".to_vec()), Provider::start());
        let base = config("", second.address, QUOTA, cost, "");
        let (base, _) = base.split_once("[[route]]").unwrap();
        let gateway = Gateway::start(&format!(
            "{base}[upstream.first]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"{path}\"\nrewrite = \"{path_of_route}\"\n\
             limits = [\"tokens\"]\nupstream = \"first\"\nretry_on = [\"5xx\"]\nretry_methods = [\"POST\"]\n\
             fallback = [{{ upstream = \"u\", rewrite = \"{path_of_fallback}\" }}]\nmodel_aliases = {{ fast = \"m\" }}\n",
            first.url()
        ));
        let reply = post(&gateway, sent, &body(model));
        assert_eq!((reply.status, first.count(), second.count()), (200, 1, 1), "{sent}");
        let seen = second.seen.lock().unwrap().iter().rev().find(|seen| !seen.body.is_empty()).unwrap().clone();
        assert_eq!(seen.target(), received);
        let got: Value = serde_json::from_slice(&seen.body).unwrap();
        assert_eq!(got["model"], model.replace("fast", "m"), "{sent}");
        assert_eq!(QUOTA - reply.remaining("tokens"), reserved, "{sent}");
    }
}

/// A fallback has its own names for the models of the upstream. The request reserves the most expensive model that it
/// could reach, and is charged for the model of the upstream that has responded.
#[test]
fn fallback_gets_its_own_names_of_models_and_is_priced_by_them() {
    let models = "models.\"gpt-5-mini\" = { output = 10 }, models.\"gpt-5\" = { output = 20 }, \
                  models.\"m\" = { output = 2 }, models.\"large\" = { output = 30 }, models.\"wrong\" = { output = 1 }";
    let cost = format!("weights = {{ input = 0, output = 1 }}, {models}");
    let failing = |text: &'static str, status: u16| {
        let response = format!(
            "HTTP/1.1 {status} Error\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        );
        Upstream::responding(move |_| response.clone().into_bytes())
    };
    let billed = "{\"error\":{},\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":3}}";
    let azure = "/openai/deployments/{name}/chat/completions";
    let gemini = "/v1beta/models/{rest}";
    let last = "{ upstream = \"u\", model_aliases = { gpt-5-mini = \"m\", \"gpt-5\" = \"large\" } }";
    let refused = "{ upstream = \"refused\", model_aliases = { gpt-5-mini = \"wrong\", \"gpt-5\" = \"wrong\" } }";
    let with_path = |path: &str| last.replace("\"u\"", &format!("\"u\", rewrite = \"{path}\""));
    for (name, first, path, fallbacks, sent, model, target, body_model, reserved, charged) in [
        ("an alias", failing("{}", 503), "/{*rest}", last, CHAT, "fast", CHAT, "m", 1000, 14),
        ("the name itself", failing("{}", 429), "/{*rest}", last, CHAT, "gpt-5-mini", CHAT, "m", 1000, 14),
        ("a more expensive fallback", failing("{}", 500), "/{*rest}", last, CHAT, "gpt-5", CHAT, "large", 3000, 210),
        ("a name without an alias", failing("{}", 503), "/{*rest}", last, CHAT, "other", CHAT, "other", 100, 7),
        ("a name of the fallback", failing("{}", 503), "/{*rest}", last, CHAT, "large", CHAT, "large", 3000, 210),
        ("both are billed", failing(billed, 503), "/{*rest}", last, CHAT, "fast", CHAT, "m", 1000, 14 + 30),
        (
            "a refused fallback before",
            failing("{}", 503),
            "/{*rest}",
            &*format!("{refused}, {last}"),
            CHAT,
            "gpt-5",
            CHAT,
            "large",
            3000,
            210,
        ),
        (
            "a fallback without aliases after one with them",
            failing("{}", 503),
            "/{*rest}",
            &*format!("{refused}, \"u\""),
            CHAT,
            "gpt-5",
            CHAT,
            "gpt-5",
            2000,
            140,
        ),
        (
            "the model in the path of both",
            failing("{}", 503),
            "/{*rest}",
            last,
            "/v1beta/models/fast:generateContent",
            "cheap",
            "/v1beta/models/m:generateContent",
            "cheap",
            1000,
            14,
        ),
        (
            "the model in the path of the fallback",
            failing("{}", 503),
            "/d/{name}/chat/completions",
            &*with_path(azure),
            "/d/gpt-5/chat/completions",
            "fast",
            "/openai/deployments/large/chat/completions",
            "m",
            3000,
            210,
        ),
        (
            "the model in another path of the fallback",
            failing("{}", 503),
            "/g/{*rest}",
            &*with_path(gemini),
            "/g/fast:streamGenerateContent?alt=sse",
            "cheap",
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            "cheap",
            200,
            14,
        ),
    ] {
        let provider = Provider::start();
        let base = config("", provider.address, QUOTA, &cost, "");
        let (base, _) = base.split_once("[[route]]").unwrap();
        let gateway = Gateway::start(&format!(
            "{base}[upstream.first]\nservers = [\"{}\"]\n[upstream.refused]\nservers = [\"http://127.0.0.1:1\"]\n\
             [[route]]\nname = \"r\"\npath = \"{path}\"\nlimits = [\"tokens\"]\nupstream = \"first\"\n\
             retry_on = [429, \"5xx\"]\nretry_methods = [\"POST\"]\nfallback = [{fallbacks}]\n\
             model_aliases = {{ fast = \"gpt-5-mini\" }}\n",
            first.url()
        ));
        let body = json!({
            "model": model, "max_tokens": 100, "generationConfig": {"maxOutputTokens": 100}, "mock": {"output": 7}
        });
        let reply = post(&gateway, sent, &body);
        assert_eq!((reply.status, first.count(), provider.count()), (200, 1, 1), "{name}: {}", reply.text());
        let received: Value = serde_json::from_slice(&first.last().body).unwrap();
        assert_eq!(received["model"], if model == "fast" { "gpt-5-mini" } else { model }, "{name}");
        let seen = provider.last();
        assert_eq!(seen.target(), target, "{name}");
        assert_eq!(serde_json::from_slice::<Value>(&seen.body).unwrap()["model"], body_model, "{name}");
        assert_eq!(seen.headers("content-length"), [seen.body.len().to_string()], "{name}");
        eventually("the request is logged", || records(&gateway).len() == 1);
        let record = &records(&gateway)[0];
        let limit = &record["limits"][0];
        assert_eq!((&limit["reserved"], &limit["settled"]), (&json!(reserved), &json!(charged)), "{name}");
        let served = request_model(target).unwrap_or(body_model);
        assert_eq!(record["model"], served, "{name}");
    }
}

/// Return the model in a path of Gemini or Azure.
fn request_model(path: &str) -> Option<&str> {
    let (_, rest) = path.split_once("/models/").or_else(|| path.split_once("/deployments/"))?;
    rest.split([':', '/']).next()
}

/// A retry on another server of a fallback, streams and a response that names a more expensive model.
#[test]
fn names_of_a_fallback_stay_the_same_in_its_retries_and_streams() {
    let models = "models.\"gpt-5\" = { output = 20 }, models.\"small\" = { output = 2 }";
    let cost = format!("weights = {{ input = 0, output = 1 }}, {models}");
    for (name, body, charged) in [
        ("JSON", json!({"mock": {"output": 7}}), 14),
        ("a stream", json!({"stream": true, "mock": {"output": 7}}), 14),
        (
            "the response names another model",
            json!({"mock": {"raw": "{\"model\":\"gpt-5\",\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":7}}"}}),
            140,
        ),
        (
            "the response names an unknown model",
            json!({"mock": {"raw": "{\"model\":\"x\",\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":7}}"}}),
            14,
        ),
    ] {
        let provider = Provider::start();
        // Both servers of the fallback fail once, so that the second attempt of either is a retry.
        let failures = Arc::<AtomicUsize>::default();
        let bodies = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let servers: Vec<_> = (0..2)
            .map(|_| {
                let (failures, bodies, provider) = (failures.clone(), bodies.clone(), provider.address);
                serve(move |mut stream| {
                    while let Some(request) = read_request(&mut stream) {
                        bodies.lock().unwrap().push(request.body.clone());
                        if failures.fetch_add(1, Ordering::SeqCst) == 0 {
                            let error = b"HTTP/1.1 503 Error\r\nContent-Length: 0\r\n\r\n";
                            if stream.write_all(error).is_err() {
                                return;
                            }
                            continue;
                        }
                        let mut server = TcpStream::connect(provider).unwrap();
                        server.write_all(request.head.as_bytes()).unwrap();
                        server.write_all(&request.body).unwrap();
                        let mut buffer = [0; 4096];
                        while let Ok(length @ 1..) = server.read(&mut buffer) {
                            if stream.write_all(&buffer[..length]).is_err() {
                                return;
                            }
                        }
                    }
                })
            })
            .map(|address| format!("http://{address}"))
            .collect();
        let base = config("", provider.address, QUOTA, &cost, "");
        let (base, _) = base.split_once("[upstream.u]").unwrap();
        let gateway = Gateway::start(&format!(
            "{base}[upstream.u]\nservers = {servers:?}\n[upstream.first]\nservers = [\"http://127.0.0.1:1\"]\n\
             [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nlimits = [\"tokens\"]\nupstream = \"first\"\nretries = 1\n\
             retry_on = [\"5xx\"]\nretry_methods = [\"POST\"]\n\
             fallback = [{{ upstream = \"u\", model_aliases = {{ gpt-5 = \"small\" }} }}]\n"
        ));
        let mut body = body;
        body["model"] = "gpt-5".into();
        body["max_tokens"] = 100.into();
        let reply = post(&gateway, CHAT, &body);
        assert_eq!(reply.status, 200, "{name}: {}", reply.text());
        eventually("the request is logged", || records(&gateway).len() == 1);
        let limit = &records(&gateway)[0]["limits"][0];
        assert_eq!((&limit["reserved"], &limit["settled"]), (&json!(2000), &json!(charged)), "{name}");
        let bodies: Vec<Value> =
            bodies.lock().unwrap().iter().map(|body| serde_json::from_slice(body).unwrap()).collect();
        assert_eq!(bodies.len(), 2, "{name}");
        for received in &bodies {
            assert_eq!(received["model"], "small", "{name}");
            assert_eq!(received["stream_options"]["include_usage"] == true, body["stream"] == true, "{name}");
        }
    }
}

/// An agent asks for much more output than it uses. The excess of a response is at most the difference.
#[test]
fn reserved_output_is_capped_and_the_excess_is_charged() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "max_reserved_output = 100");
    let mut expected = QUOTA;
    for (bound, output, reserved) in [(64_000, 30, 100), (64_000, 400, 100), (50, 30, 50)] {
        let body = json!({"max_tokens": bound, "mock": {"input": 10, "output": output}});
        let input = (body.to_string().len() as u64).div_ceil(4);
        let reply = post(&gateway, CHAT, &body);
        assert_eq!((reply.status, expected - reply.remaining("tokens")), (200, input + reserved), "{bound}");
        expected -= 10 + output;
        assert_remaining(&gateway, expected, "the usage is charged");
    }
    let cutting = start(&provider, QUOTA, "max_reserved_output = 100, on_exhausted = \"cut\"");
    let body = json!({"stream": true, "max_tokens": 64_000, "mock": {"input": 10, "output": 400, "seed": 1}});
    let reply = post(&cutting, CHAT, &body);
    let deltas = reply.text().matches("tök").count();
    assert!((100..160).contains(&deltas) && reply.text().contains("\"length\""), "{deltas}");
}

/// The command converts the example into a list that `check` accepts.
#[test]
fn price_list_of_litellm_is_converted() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model_prices.json");
    let run = |arguments: &[&str]| {
        let output = binary().args(["prices", "update", "--from", example]).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text, _) = run(&[]);
    assert_eq!(code, Some(0));
    for line in [
        "[prices.public]",
        "claude-opus-4-5 = { cache_write_1h = 10.0, cache_write_5m = 6.25, cached_input = 0.5, input = 5.0, output = 25.0 }",
        "gpt-5-nano = { batch = 0.5, cached_input = 0.005, input = 0.055, output = 0.44 }",
        "\"gemini-2.5-pro\" = { cached_input = 0.125, input = 1.25, long_context.above = 200000, long_context.input = 2.5, long_context.output = 15.0, output = 10.0 }",
        "text-embedding-3-small = { input = 0.02, output = 0.0 }",
        "\"gpt-5.4\" = { cached_input = 0.25, input = 2.5, long_context.above = 272000, long_context.input = 5.0, long_context.output = 22.5, output = 15.0, priority = 2.0 }",
        "claude-opus-4-6 = { fast = 6.0, input = 5.0, output = 25.0 }",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(!text.contains("dall-e"), "{text}");
    let (_, only, _) = run(&["--provider", "anthropic", "--name", "mine"]);
    assert_eq!(only.lines().count(), 5, "{only}");
    let (code, _, error) = run(&["--provider", "nowhere"]);
    assert_eq!((code, error.contains("no prices per token of the selected providers")), (Some(1), true), "{error}");
    let provider = Provider::start();
    let config = config("", provider.address, 100_000_000, "prices = \"public\"", "")
        .replace("unit = \"tokens\"", "unit = \"usd-micros\"");
    let gateway = Gateway::start_with(&format!("include = [\"prices.toml\"]\n{config}"), &[("prices.toml", &text)]);
    assert_eq!(
        post(&gateway, CHAT, &json!({"model": "gpt-5-nano", "max_tokens": 5, "mock": {"input": 1000, "output": 0}}))
            .status,
        200
    );
    assert_remaining(&gateway, 100_000_000 - 55, "1000 tokens at 0.055 dollars per million");
}

#[test]
fn own_pointers_and_several_limits_settle_together() {
    let provider = Provider::start();
    let base =
        config("", provider.address, QUOTA, "usage = { input = \"/billing/in\", output = \"/billing/out/0\" }", "");
    let money = "[limit.money]\nby = \"header:x-id\"\nquota = \"1000000/month\"\nalgorithm = \"fixed-window\"\nunit = \"usd-micros\"\n\
                 cost = { llm = \"auto\", weights = { input = 2.5, output = 10 } }\n";
    let config = base.replace("limits = [\"tokens\"]", "limits = [\"tokens\", \"money\"]") + money;
    let gateway = Gateway::start(&config);
    let raw = r#"{"billing":{"in":4,"out":[6]},"usage":{"prompt_tokens":100,"completion_tokens":10}}"#;
    assert_eq!(post(&gateway, CHAT, &json!({"max_tokens": 50, "mock": {"raw": raw}})).status, 200);
    assert_remaining(&gateway, QUOTA - 10, "tokens");
    assert_eq!(gateway.client().get_with("/", &[ID]).remaining("money"), 1_000_000 - 350);
}

#[test]
fn every_algorithm_refunds_and_charges_the_difference() {
    let provider = Provider::start();
    let redis = Redis::start();
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-buckets"] {
        for store in [String::new(), redis.store()] {
            let config = config(&store, provider.address, 100_000, "", "")
                .replace(
                    "algorithm = \"fixed-window\"\nstart = \"first-request\"",
                    &format!("algorithm = \"{algorithm}\""),
                )
                .replace("100000/hour", "100000/year")
                .replace("[limit.tokens]", &format!("[limit.{algorithm}]"))
                .replace("limits = [\"tokens\"]", &format!("limits = [\"{algorithm}\"]"));
            let config =
                if algorithm == "sliding-window" || algorithm == "sliding-buckets" || algorithm == "token-bucket" {
                    config.replace("/year", "/365d")
                } else {
                    config
                };
            let gateway = Gateway::start(&config);
            let balance = || gateway.client().get_with("/", &[ID]).remaining(algorithm);
            let mut expected = 100_000;
            for (bound, output) in [(500, 7), (3, 700)] {
                let body = json!({"max_tokens": bound, "mock": {"input": 21, "output": output, "seed": 1}});
                assert_eq!(post(&gateway, CHAT, &body).status, 200);
                expected -= 21 + output;
                eventually(&format!("{algorithm} {store}: {expected}"), || balance() == expected);
            }
        }
    }
}

#[test]
fn killed_gateway_leaves_the_reservation() {
    let provider = Provider::start();
    let redis = Redis::start();
    let config = config(&redis.store(), provider.address, 10_000, "", "");
    let mut killed = Gateway::start(&config);
    let other = Gateway::start(&config);
    let body = json!({"stream": true, "max_tokens": 500, "mock": {"output": 9, "pause_after": 4}}).to_string();
    let reserved = 500 + (body.len() as u64).div_ceil(4);
    let mut client = killed.client();
    client.send(
        format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .as_bytes(),
    );
    assert_eq!(client.head().unwrap().status, 200);
    killed.child.kill().unwrap();
    killed.wait();
    assert_eq!(remaining(&other), 10_000 - reserved);
}

/// The remaining tokens are always the quota minus the settled costs. The settled cost of a completed stream is the
/// number of tokens that the provider issued. An aborted stream settles to at most its reservation.
#[test]
fn concurrent_streams_over_two_gateways_settle_to_what_was_issued() {
    const CLIENTS: u64 = 64;
    let provider = Provider::start();
    let redis = Redis::start();
    let quota = 20_000;
    let config = config(&redis.store(), provider.address, quota, "", "");
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    let (ended, aborted, denied) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let issued_at_most = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client_index in 0..CLIENTS {
            let (gateways, ended, aborted, denied, issued_at_most) =
                (&gateways, &ended, &aborted, &denied, &issued_at_most);
            scope.spawn(move || {
                let mut random = client_index + 1;
                for round in 0..6 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let output = (random >> 40) % 60 + 1;
                    let is_aborted = round > 0 && (random >> 50) % 3 == 0;
                    let path = [CHAT, "/v1/messages", "/v1/responses", "/api/chat"][(random >> 20) as usize % 4];
                    let body = json!({"stream": true, "max_tokens": 300, "mock": {"input": 20, "output": output, "seed": random >> 3}}).to_string();
                    let gateway = &gateways[(random >> 30) as usize % 2];
                    let mut client = Client::connect(gateway.address);
                    client.send(format!("POST {path} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes());
                    let head = client.head().unwrap();
                    if head.status == 429 {
                        denied.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    assert_eq!(head.status, 200);
                    if is_aborted {
                        for _ in 0..(random >> 45) % 20 {
                            if client.chunk().is_none() {
                                break;
                            }
                        }
                        drop(client);
                        aborted.fetch_add(1, Ordering::Relaxed);
                        issued_at_most.fetch_add((body.len() as u64).div_ceil(4).max(20) + 300, Ordering::Relaxed);
                    } else {
                        client.reply_rest();
                        ended.fetch_add(20 + output, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (ended, aborted, denied) = (ended.into_inner(), aborted.into_inner(), denied.into_inner());
    let requests = CLIENTS as usize * 6;
    assert!(denied > 0 && aborted > 0, "{denied} {aborted}");
    let all = || gateways.iter().flat_map(records).collect::<Vec<_>>();
    eventually("all requests are logged", || all().len() == requests);
    let records = all();
    let settled = |record: &Value| record["limits"][0]["settled"].as_u64();
    assert_eq!(records.iter().filter(|record| record["status"] == 429).count(), denied);
    let complete: u64 = records.iter().filter(|record| record["complete"] == true).filter_map(&settled).sum();
    let total: u64 = records.iter().filter_map(&settled).sum();
    assert!(total <= quota, "{total} of {quota}");
    // If a client aborted, the gateway may already have received the complete stream.
    assert!(complete >= ended && total - complete <= issued_at_most.into_inner(), "{complete} {ended} {total}");
    let incomplete = records.iter().filter(|record| record["complete"] == false && settled(record).is_some());
    for record in incomplete.clone() {
        assert!(settled(record) <= record["limits"][0]["reserved"].as_u64(), "{record}");
    }
    assert_eq!(records.iter().filter(|record| settled(record).is_some()).count(), requests - denied);
    if incomplete.count() == aborted {
        assert_eq!(complete, ended, "the settled costs are the issued tokens");
    }
    for gateway in &gateways {
        assert_remaining(gateway, quota - total, "the balance");
    }
}

#[test]
fn metrics_count_reserved_and_settled_costs() {
    let provider = Provider::start();
    let gateway =
        Gateway::start(&(config("", provider.address, QUOTA, "", "") + "[admin]\naddress = \"127.0.0.1:0\"\n"));
    for reports in [true, false] {
        let body = json!({"stream": true, "max_tokens": 500, "mock": {"input": 10, "output": 5, "reports": reports}});
        assert_eq!(post(&gateway, CHAT, &body).status, 200);
    }
    let settled = |source: &str| {
        metric(&gateway, &format!("sluicegate_limit_settled_total{{route=\"r\",limit=\"tokens\",source=\"{source}\"}}"))
    };
    eventually("both requests are settled", || settled("reported") == 15.0 && settled("estimated") > 5.0);
    let raw = r#"{"usage":{"prompt_tokens":100,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":40},
        "completion_tokens_details":{"reasoning_tokens":20}}}"#;
    let kind = |kind: &str| metric(&gateway, &format!("sluicegate_llm_tokens_total{{route=\"r\",kind=\"{kind}\"}}"));
    let (input, output) = (kind("input"), kind("output"));
    assert!(input > 10.0 && output >= 10.0, "{input} {output}");
    assert_eq!(post(&gateway, CHAT, &json!({"max_tokens": 500, "mock": {"raw": raw}})).status, 200);
    eventually("the request is settled", || settled("reported") == 165.0);
    let kinds = ["input", "cached_input", "cache_write", "output", "reasoning"].map(kind);
    assert_eq!(kinds, [input + 60.0, 40.0, 0.0, output + 30.0, 20.0], "the kinds do not overlap");
    eventually("the requests are logged", || records(&gateway).len() == 3);
    let logged = records(&gateway).iter().map(|record| record["tokens"].clone()).collect::<Vec<_>>();
    assert!(logged.contains(&json!({"input": 100, "cached_input": 40, "output": 50, "reasoning": 20})), "{logged:?}");
    assert!(logged.contains(&json!({"input": 10, "output": 5})), "{logged:?}");
    assert_eq!(settled("reserved"), 0.0);
    assert!(metric(&gateway, "sluicegate_limit_reserved_total{route=\"r\",limit=\"tokens\"}") > 1000.0);
}

#[test]
fn shadow_limit_rejects_nothing_and_other_methods_are_not_read() {
    let provider = Provider::start();
    let shadow = Gateway::start(&config("", provider.address, 100, "", "shadow = true"));
    for body in ["no json", r#"{"max_tokens":5000}"#, r#"{"max_tokens":1,"max_tokens":2}"#] {
        assert_eq!(shadow.client().request("POST", CHAT, &[ID], body.as_bytes()).status, 200, "{body}");
    }
    let posts = Gateway::start(&config("", provider.address, 100, "", "methods = [\"POST\"]"));
    assert_eq!(posts.client().request("PUT", CHAT, &[ID], b"no json").status, 200);
    assert_eq!(posts.client().request("POST", CHAT, &[ID], b"no json").status, 400);
}

#[test]
fn request_on_another_route_is_not_read() {
    let upstream = Upstream::start();
    let provider = Provider::start();
    let config = config("", provider.address, QUOTA, "", "").replace("limits = [\"tokens\"]", "");
    let gateway = Gateway::start(&config.replace(&provider.address.to_string(), &upstream.address.to_string()));
    let reply = gateway.client().request("POST", CHAT, &[], b"no json");
    assert_eq!((reply.status, upstream.last().headers("accept-encoding").len()), (200, 0));
}

#[test]
fn usage_of_openai_streams_is_requested_and_hidden() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let mut expected = QUOTA;
    for seed in [0, 1, 2, 3] {
        let body = json!({"stream": true, "max_tokens": 50, "mock": {"input": 21, "output": 7, "seed": seed}});
        let reply = post(&gateway, CHAT, &body);
        let text = String::from_utf8(reply.body).unwrap();
        assert_eq!((text.matches("tök").count(), text.contains("usage")), (7, false), "{text}");
        assert!(text.ends_with("}\n\ndata: [DONE]\n\n"), "{text}");
        let sent: Value = serde_json::from_slice(&provider.last().body).unwrap();
        assert_eq!((&sent["stream_options"]["include_usage"], &sent["max_tokens"]), (&json!(true), &json!(50)));
        expected -= 28;
        assert_remaining(&gateway, expected, "reported");
    }
    // A client cannot prevent the provider from reporting the usage to the gateway.
    for options in [json!(null), json!({}), json!({"include_usage": false}), json!({"include_usage": null, "a": [1]})] {
        for path in [CHAT, "/v1/chat/completion%73", "/v1/chat/completions/", "/v1/chat/completions;x"] {
            let order = json!({"input": 21, "output": 7});
            let body = json!({"stream": true, "stream_options": options, "max_tokens": 50, "mock": order});
            let text = String::from_utf8(post(&gateway, path, &body).body).unwrap();
            assert!(!text.contains("usage") && text.contains("tök"), "{path} {text}");
            let sent: Value = serde_json::from_slice(&provider.last().body).unwrap();
            assert_eq!(sent["stream_options"]["include_usage"], true, "{path} {sent}");
            assert_eq!(sent["stream_options"]["a"], options["a"]);
            expected -= 28;
            assert_remaining(&gateway, expected, "reported");
        }
    }
    for (path, body) in [
        (CHAT, json!({"stream": true, "stream_options": {"include_usage": true}})),
        (CHAT, json!({"stream": false})),
        ("/v1/messages", json!({"stream": true})),
    ] {
        let reply = post(&gateway, path, &body);
        assert_eq!(provider.last().body, body.to_string().as_bytes(), "unchanged");
        assert!(
            String::from_utf8(reply.body).unwrap().contains("\"usage\""),
            "{path}: the response contains the usage that the client requested"
        );
    }
}

/// SDKs wait for the time in `Retry-After`. Beyond `max_retry_wait`, the response tells them not to retry.
#[test]
fn denial_with_a_long_wait_tells_sdks_not_to_retry() {
    let provider = Provider::start();
    for (cost, is_final) in [("", true), ("max_retry_wait = \"61m\"", false), ("max_retry_wait = \"1m\"", true)] {
        let gateway = start(&provider, 1000, cost);
        assert_eq!(post(&gateway, CHAT, &json!({"max_tokens": 900, "mock": {"output": 900}})).status, 200);
        assert_remaining(&gateway, 90, "settled");
        for (path, error_type, long_type) in [
            (CHAT, "tokens", "insufficient_quota"),
            ("/v1/messages", "rate_limit_error", "rate_limit_error"),
            ("/v1beta/models/m:generateContent", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
            ("/model/m/converse", "ThrottlingException", "ServiceQuotaExceededException"),
        ] {
            let body = json!({"max_tokens": 900, "generationConfig": {"maxOutputTokens": 900}, "inferenceConfig": {"maxTokens": 900}});
            let reply = post(&gateway, path, &body);
            assert_eq!(reply.status, 429, "{path}");
            assert!(reply.header("retry-after").unwrap().parse::<u64>().unwrap() > 3500, "{path}");
            assert_eq!(reply.header("x-should-retry"), is_final.then_some("false"), "{path} {cost}");
            let error = &reply.json()["error"];
            let kind = error["status"].as_str().or(error["type"].as_str()).or(reply.header("x-amzn-errortype"));
            assert_eq!(kind, Some(if is_final { long_type } else { error_type }), "{path} {cost}");
        }
    }
}

/// A client leaves after each event of a stream of 50. While the provider waits, the gateway cannot know how much the
/// provider has generated. If the provider continues, the gateway reads the usage although the client has left.
#[test]
fn abort_at_each_event_is_settled_by_on_abort() {
    const EVENTS: u64 = 50;
    for on_abort in ["reservation", "estimate"] {
        let provider = Provider::start();
        let gateway = start(&provider, 1_000_000, &format!("on_abort = \"{on_abort}\""));
        std::thread::scope(|scope| {
            for (path, waits) in [(CHAT, true), ("/v1/messages", true), (CHAT, false)] {
                for events in 1..EVENTS {
                    let gateway = &gateway;
                    scope.spawn(move || {
                        let mut mock = json!({"input": 20, "output": EVENTS, "seed": events});
                        if waits {
                            mock["pause_after"] = events.into();
                        }
                        let model = format!("{path} {waits} {events}");
                        let body = json!({"model": model, "stream": true, "max_tokens": 500, "mock": mock}).to_string();
                        let mut client = gateway.client();
                        let length = body.len();
                        client.send(
                            format!(
                                "POST {path} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {length}\r\n\r\n{body}"
                            )
                            .as_bytes(),
                        );
                        assert_eq!(client.head().unwrap().status, 200);
                        let mut text = String::new();
                        while (text.matches("data:").count() as u64) < events {
                            text += &client.chunks_until("\n");
                        }
                    });
                }
            }
        });
        let all = 3 * (EVENTS as usize - 1);
        eventually("all aborted requests are logged", || records(&gateway).len() == all);
        let mut total = 0;
        for record in records(&gateway) {
            let (limit, model) = (&record["limits"][0], record["model"].as_str().unwrap());
            let [path, waits, events] = model.split(' ').collect::<Vec<_>>()[..] else { panic!("{record}") };
            let events: u64 = events.parse().unwrap();
            let (settled, reserved) = (limit["settled"].as_u64().unwrap(), limit["reserved"].as_u64().unwrap());
            total += settled;
            if waits == "false" {
                assert_eq!(settled, 20 + EVENTS, "the usage is reported after the client has left: {record}");
            } else if on_abort == "reservation" {
                assert_eq!((settled, &limit["estimated"]), (reserved, &json!(true)), "{record}");
            } else {
                let input = if path == CHAT { reserved - 500 } else { 20 };
                assert!((input + events.saturating_sub(1)..=input + events + 1).contains(&settled), "{record}");
            }
        }
        assert_remaining(&gateway, 1_000_000 - total, on_abort);
        provider.release();
    }
}

#[test]
fn rests_of_abandoned_responses_are_bounded() {
    const CALLS: usize = 40;
    let provider = Provider::start();
    // 16 / 8 responses are read after their clients have left.
    let config = config("", provider.address, 1_000_000, "", "");
    let gateway = Gateway::start(&format!("[server]\nmax_connections = 16\n{config}"));
    let body =
        json!({"model": "m", "stream": true, "max_tokens": 500, "mock": {"input": 20, "output": 9, "pause_after": 4}});
    let body = body.to_string();
    let length = body.len();
    for _ in 0..CALLS {
        let mut client = gateway.client();
        client.send(
            format!("POST {CHAT} HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {length}\r\n\r\n{body}").as_bytes(),
        );
        assert_eq!(client.head().unwrap().status, 200);
        client.chunks_until("\n");
    }
    // The other responses are settled at once, while the provider still generates them.
    eventually("the other aborted requests are logged", || records(&gateway).len() >= CALLS - 2);
    provider.release();
    eventually("all aborted requests are logged", || records(&gateway).len() == CALLS);
    let is_kept = |record: &&Value| record["limits"][0]["settled"] == record["limits"][0]["reserved"];
    assert!(records(&gateway).iter().filter(is_kept).count() >= CALLS - 2);
}

#[test]
fn response_whose_usage_the_client_hides_is_rejected_or_keeps_the_reservation() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let path = "/v1beta/models/gemini-3:generateContent";
    let usage = "{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"on\"}]}}],\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":2,\"thoughtsTokenCount\":30}}";
    let body = |raw: &str| json!({"generationConfig": {"maxOutputTokens": 500}, "contents": [], "mock": {"raw": raw}});
    for query in
        ["fields=candidates", "$fields=candidates", "%66ields=candidates", "alt=proto", "x=1&$alt=media", "callback=f"]
    {
        let reply = post(&gateway, &format!("{path}?{query}"), &body(usage));
        assert_eq!(reply.status, 400, "{query}");
    }
    let headers = [ID, ("content-type", "application/json"), ("x-goog-fieldmask", "candidates")];
    assert_eq!(gateway.client().request("POST", path, &headers, body(usage).to_string().as_bytes()).status, 400);
    assert_eq!(provider.count(), 0);
    assert_eq!(post(&gateway, &format!("{path}?alt=json&key=x"), &body(usage)).status, 200);
    assert_remaining(&gateway, QUOTA - 36, "the whole usage is reported");
    let masked = "{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"on\"}]}}]}";
    let reply = post(&gateway, path, &body(masked));
    let reserved = QUOTA - 36 - reply.remaining("tokens");
    assert!(reserved >= 500, "{reserved}");
    eventually("the reservation of the second response stays charged", || {
        records(&gateway).last().is_some_and(|record| record["limits"][0]["settled"] == json!(reserved))
    });
}

/// The path that the upstream gets selects the operation, although routes match the path in lower case.
#[test]
fn case_insensitive_paths_hide_no_operation() {
    let provider = Provider::start();
    let config = config("", provider.address, QUOTA, "", "");
    let gateway = Gateway::start(&format!("[server]\ncase_insensitive_paths = true\n{config}"));
    let path = "/v1beta/models/gemini-3:generateContent";
    let usage = "{\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":2}}";
    let body = json!({"generationConfig": {"maxOutputTokens": 90_000}, "contents": [], "mock": {"raw": usage}});
    assert_eq!(post(&gateway, &format!("{path}?fields=candidates"), &body).status, 400);
    let reply = post(&gateway, path, &body);
    assert_eq!(reply.status, 200);
    assert!(QUOTA - reply.remaining("tokens") >= 90_000, "the maximum of Gemini's API is reserved");
    assert_eq!(provider.count(), 1);
}

#[test]
fn removed_usage_event_leaves_no_bytes_and_the_last_event_is_sent_unfinished() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}";
    let mut expected = QUOTA;
    for line_end in ["\n", "\r\n", "\r"] {
        let delta = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"tok\"}}}}]}}{line_end}{line_end}");
        let end = format!("{line_end}{line_end}");
        for (raw, sent, cost) in [
            (format!("{delta}{usage}{end}data: [DONE]{end}"), format!("{delta}data: [DONE]{end}"), 6),
            // The output after the report is estimated.
            (format!("{usage}{end}{delta}"), delta.clone(), 7),
            (format!("{delta}{usage}{end}data: [DONE]"), format!("{delta}data: [DONE]"), 6),
            (format!("{delta}{usage}"), delta.clone(), 6),
        ] {
            for chunk in [1, 7, 1000] {
                let mock = json!({"raw": raw, "type": "text/event-stream", "chunk": chunk});
                let reply = post(&gateway, CHAT, &json!({"stream": true, "max_tokens": 50, "mock": mock}));
                assert_eq!(String::from_utf8(reply.body).unwrap(), sent, "{raw:?} {chunk}");
                expected -= cost;
                assert_remaining(&gateway, expected, &raw);
            }
        }
    }
}

/// Return a message of an event stream of AWS with this JSON payload.
fn aws_message(payload: &Value) -> Vec<u8> {
    let crc = |bytes: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(bytes);
        crc.sum().to_be_bytes()
    };
    let payload = payload.to_string();
    let headers = b"\x0d:content-type\x07\x00\x10application/json";
    let mut message = ((16 + headers.len() + payload.len()) as u32).to_be_bytes().to_vec();
    message.extend((headers.len() as u32).to_be_bytes());
    message.extend(crc(&message));
    message.extend(headers);
    message.extend(payload.as_bytes());
    message.extend(crc(&message));
    message
}

#[test]
fn event_stream_of_bedrock_is_settled_and_reaches_the_client_unchanged() {
    let usage = json!({"inputTokens": 185, "outputTokens": 1000, "totalTokens": 1185, "cacheReadInputTokens": 0});
    let intact = [
        aws_message(&json!({"contentBlockIndex": 0, "delta": {"text": "tok"}, "p": "abcd"})),
        aws_message(&json!({"stopReason": "end_turn"})),
        aws_message(&json!({"metrics": {"latencyMs": 7}, "usage": usage})),
    ]
    .concat();
    let mut corrupt = intact.clone();
    *corrupt.last_mut().unwrap() ^= 1;
    // The events of the model are in base64.
    let invocation = |event: Value| aws_message(&json!({"bytes": STANDARD.encode(event.to_string()), "p": "abcd"}));
    let invoked = [
        invocation(json!({"type": "message_start", "message": {"usage": {"input_tokens": 20, "output_tokens": 1}}})),
        invocation(json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "tok"}})),
        invocation(json!({"type": "message_delta", "usage": {"output_tokens": 300}})),
        invocation(json!({"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 25, "outputTokenCount": 300}})),
    ]
    .concat();
    for (path, stream, settled) in [
        ("/model/m/converse-stream", intact, Some(1185)),
        ("/model/m/converse-stream", corrupt, None),
        ("/model/m/invoke-with-response-stream", invoked, Some(325)),
    ] {
        let sent = stream.clone();
        let address = serve(move |mut stream| {
            while read_request(&mut stream).is_some() {
                let head = "HTTP/1.1 200 OK\r\nContent-Type: application/vnd.amazon.eventstream\r\nTransfer-Encoding: chunked\r\n\r\n";
                stream.write_all(head.as_bytes()).unwrap();
                for part in sent.chunks(11) {
                    write!(stream, "{:x}\r\n", part.len()).unwrap();
                    stream.write_all(part).unwrap();
                    stream.write_all(b"\r\n").unwrap();
                }
                stream.write_all(b"0\r\n\r\n").unwrap();
            }
        });
        let gateway = Gateway::start(&config("", address, QUOTA, "", ""));
        let reply = post(&gateway, path, &json!({"inferenceConfig": {"maxTokens": 2000}}));
        assert_eq!((reply.status, &reply.body), (200, &stream));
        let reserved = QUOTA - reply.remaining("tokens");
        eventually("the request is logged", || records(&gateway).len() == 1);
        let limit = &records(&gateway)[0]["limits"][0];
        assert_eq!(limit["settled"], settled.unwrap_or(reserved), "{limit}");
    }
}

/// The gateway signs with its keys of AWS, whatever the client sends. `http::aws_signature` is tested with the signatures
/// of AWS's test suite and SDK.
#[test]
fn requests_to_bedrock_are_signed_by_the_gateway() {
    let upstream = Upstream::start();
    let base = config("", upstream.url().trim_start_matches("http://").parse().unwrap(), QUOTA, "", "");
    let aws = "[upstream.u]\nhost = \"bedrock-runtime.us-east-1.amazonaws.com\"\n\
               aws = { region = \"us-east-1\", access_key = \"AKIDEXAMPLE\", secret_key = \"secret\", session_token = \"token\" }\n";
    let gateway = Gateway::start(&base.replace("[upstream.u]\n", aws));
    let body = json!({"inferenceConfig": {"maxTokens": 10}, "messages": []}).to_string();
    let headers = [
        ID,
        ("authorization", "Bearer of-the-client"),
        ("x-amz-security-token", "of-the-client"),
        ("x-amz-target", "x"),
    ];
    let reply = gateway.client().request("POST", "/model/anthropic.claude-x%3A0/converse", &headers, body.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let seen = upstream.last();
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &seen.body);
    let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(seen.headers("x-amz-content-sha256"), [hash]);
    assert_eq!(seen.headers("host"), ["bedrock-runtime.us-east-1.amazonaws.com"]);
    assert_eq!(seen.headers("x-amz-security-token"), ["token"]);
    assert!(seen.headers("x-amz-target").is_empty());
    let [authorization] = seen.headers("authorization")[..] else { panic!("one signature") };
    let date = seen.headers("x-amz-date")[0];
    let scope = format!("AKIDEXAMPLE/{}/us-east-1/bedrock/aws4_request", &date[..8]);
    let expected = format!(
        "AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token, Signature="
    );
    assert_eq!(authorization.strip_prefix(&*expected).map(str::len), Some(64), "{authorization}");
}

/// A health check has the signature that a request would have.
#[test]
fn health_checks_of_bedrock_are_signed() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"{}\"]\nhost = \"bedrock.us-east-1.amazonaws.com\"\n\
         aws = {{ region = \"us-east-1\", access_key = \"AKIDEXAMPLE\", secret_key = \"secret\" }}\n\
         health_check = {{ path = \"/foundation-models?byProvider=a\", interval = \"50ms\" }}\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"u\"\n",
        upstream.url()
    ));
    eventually("the server is checked", || upstream.count() > 1);
    let check = upstream.last();
    assert_eq!(check.headers("host"), ["bedrock.us-east-1.amazonaws.com"]);
    // The hash of an empty body.
    assert_eq!(
        check.headers("x-amz-content-sha256"),
        ["e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]
    );
    let signer = AwsSigner {
        access_key: "AKIDEXAMPLE".into(),
        secret_key: "secret".into(),
        session_token: None,
        region: "us-east-1".into(),
        service: "bedrock".into(),
    };
    let time = DateTime::strptime("%Y%m%dT%H%M%SZ", check.headers("x-amz-date")[0]).unwrap();
    let time = time.to_zoned(TimeZone::UTC).unwrap().timestamp().as_microsecond() as u64;
    let mut signed = http::HeaderMap::new();
    signed.insert("host", "bedrock.us-east-1.amazonaws.com".parse().unwrap());
    signer.sign(&http::Method::GET, &check.target().parse().unwrap(), &mut signed, &content_hash(Some(b"")), time);
    assert_eq!(check.headers("authorization"), [signed["authorization"].to_str().unwrap()]);
    drop(gateway);
}

/// The bodies of this operation have the format of the model, so Bedrock reports the counts in headers.
#[test]
fn invocation_of_bedrock_is_settled_by_its_headers() {
    let address = serve(|mut stream| {
        while read_request(&mut stream).is_some() {
            let body = r#"{"results":[{"outputText":"tok"}]}"#;
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Amzn-Bedrock-Input-Token-Count: 12\r\n\
                 X-Amzn-Bedrock-Output-Token-Count: 30\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .unwrap();
        }
    });
    let gateway = Gateway::start(&config("", address, QUOTA, "", ""));
    let body = json!({"textGenerationConfig": {"maxTokenCount": 2000}});
    assert_eq!(post(&gateway, "/model/amazon.titan/invoke", &body).status, 200);
    eventually("the request is logged", || records(&gateway).len() == 1);
    assert_eq!(records(&gateway)[0]["limits"][0]["settled"], 42);
}

#[test]
fn errors_of_the_gateway_have_the_format_of_the_api() {
    let provider = Provider::start();
    let route = |name: &str, path: &str, more: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"{path}\"\nlimits = [\"tokens\"]\n{more}\n")
    };
    let base = config("", provider.address, QUOTA, "unknown = \"reject\"", "");
    let (base, _) = base.split_once("[[route]]").unwrap();
    let text = base.to_owned()
        + "[auth.keys]\nkind = \"api-key\"\nheader = \"authorization\"\nconsumers = \"c.toml\"\n\
           [upstream.refused]\nservers = [\"http://127.0.0.1:1\"]\n\
           [upstream.slow]\nservers = [\"http://SLOW\"]\nresponse_timeout = \"50ms\"\nretries = 0\n"
        + &route("locked", "/locked/{*rest}", "require = [\"keys\"]\nupstream = \"u\"")
        + &route("refused", "/refused/{*rest}", "upstream = \"refused\"")
        + &route("slow", "/slow/{*rest}", "upstream = \"slow\"")
        + &route("unknown", "/known/{*rest}", "upstream = \"u\"");
    let silent = serve(|mut stream| while read_request(&mut stream).is_some() {});
    let gateway = Gateway::start_with(&text.replace("SLOW", &silent.to_string()), &[("c.toml", "")]);
    for (path, kind) in [
        ("/v1/chat/completions", ["invalid_request_error", "invalid_request_error", "server_error", "server_error"]),
        ("/v1/messages", ["authentication_error", "not_found_error", "api_error", "timeout_error"]),
        ("/v1beta/models/m:generateContent", ["UNAUTHENTICATED", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED"]),
        (
            "/model/m/converse",
            [
                "AccessDeniedException",
                "ResourceNotFoundException",
                "ServiceUnavailableException",
                "ModelTimeoutException",
            ],
        ),
    ] {
        for ((prefix, status), kind) in
            [("/locked", 401), ("", 404), ("/refused", 502), ("/slow", 504)].iter().zip(kind)
        {
            let reply = post(&gateway, &format!("{prefix}{path}"), &json!({"max_tokens": 5}));
            let body = reply.json();
            assert_eq!(reply.status, *status, "{prefix}{path} {body}");
            assert_eq!(reply.header("content-type"), Some("application/json"), "{prefix}{path}");
            let error = &body["error"];
            let found = error["status"].as_str().or(error["type"].as_str()).or(reply.header("x-amzn-errortype"));
            assert_eq!(found, Some(kind), "{prefix}{path} {body}");
            let message = error["message"].as_str().or(body["message"].as_str());
            assert!(message.is_some_and(|message| !message.is_empty()), "{body}");
        }
    }
    let seen = provider.count();
    let unknown = post(&gateway, "/known/v1/files", &json!({"max_tokens": 5}));
    assert_eq!((unknown.status, provider.count()), (404, seen), "{}", unknown.text());
    assert!(unknown.json()["error"]["message"].as_str().unwrap().contains("no operation of an LLM API"));
    assert_eq!(
        gateway.client().get_with("/known/v1/models", &[ID]).status,
        200,
        "a request without a body uses no tokens"
    );
    let other = gateway.client().get("/nowhere");
    assert_eq!((other.status, other.header("content-type")), (404, Some("application/problem+json")));
}

#[test]
fn unknown_operations_are_free_if_all_their_limits_say_so() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "unknown = \"free\"");
    let body = json!({"max_tokens": 500, "mock": {"raw": "{\"usage\":{\"total_tokens\":9}}"}});
    assert_eq!(post(&gateway, "/v1/batches", &body).remaining("tokens"), QUOTA);
    assert_eq!(remaining(&gateway), QUOTA);
    assert!(post(&gateway, CHAT, &body).remaining("tokens") < QUOTA - 500, "a known operation reserves tokens");
}

#[test]
fn limits_of_the_account_of_the_provider_do_not_reach_clients() {
    let headers = [("x-ratelimit-remaining-tokens", "77"), ("anthropic-ratelimit-tokens-limit", "9"), ("x-other", "1")];
    let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let address = serve(move |mut stream| {
        while read_request(&mut stream).is_some() {
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{lines}Content-Length: 2\r\n\r\n{{}}");
            if stream.write_all(head.as_bytes()).is_err() {
                return;
            }
        }
    });
    for (cost, is_kept) in [("", false), ("provider_headers = true", true)] {
        let gateway = Gateway::start(&config("", address, QUOTA, cost, ""));
        let reply = post(&gateway, CHAT, &json!({"max_tokens": 5}));
        for (name, value) in headers {
            let expected = (is_kept || name == "x-other").then_some(value);
            assert_eq!(reply.header(name), expected, "{cost} {name}");
        }
    }
}

#[test]
fn unreadable_usage_is_logged() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    for (mock, reason) in [
        (json!({"raw": "{\"usage\":{\"units\":7}}"}), "the usage object has no known counts"),
        (json!({"raw": "ok", "type": "text/plain"}), "the response is compressed or has an unknown media type"),
    ] {
        let other = start(&provider, QUOTA, "");
        for _ in 0..3 {
            assert_eq!(post(&other, CHAT, &json!({"max_tokens": 5, "mock": mock})).status, 200);
        }
        eventually("the requests are logged", || records(&other).len() == 3);
        eventually(reason, || other.log().contains(reason));
        assert!(other.log().matches(reason).count() <= 2, "once a minute and worker: {}", other.log());
    }
    assert_eq!(post(&gateway, CHAT, &json!({"max_tokens": 5})).status, 200);
    eventually("the request is logged", || records(&gateway).len() == 1);
    assert!(!gateway.log().contains("reservation stays charged"));
}

#[test]
fn spelling_of_the_path_does_not_change_the_weights() {
    let provider = Provider::start();
    let cost = "default_output = 100, weights = { input = 1, output = 1 }, models.m = { input = 30, output = 100 }";
    let config = config("", provider.address, QUOTA, cost, "");
    let gateway = Gateway::start(&config);
    let rewriting = config.replace("path = \"/{*rest}\"", "path = \"/models/{*rest}\"\nrewrite = \"/{rest}\"");
    let rewriting = Gateway::start(&rewriting);
    let reserved = |gateway: &Gateway, path: &str, body: &Value| {
        let id = ("x-id", &*format!("{path}{body}"));
        let reply = gateway.client().request("POST", path, &[id], body.to_string().as_bytes());
        assert_eq!(reply.status, 200, "{path} {}", reply.text());
        QUOTA - reply.remaining("tokens")
    };
    let dear = json!({"model": "m", "max_tokens": 10});
    let expected = reserved(&gateway, CHAT, &dear);
    assert!(expected > 1000, "{expected}");
    for path in ["/v1/models/cheap/../../chat/completions", "/v1/models/cheap/%2e%2e/%2E./chat/completions"] {
        assert_eq!(reserved(&gateway, path, &dear), expected, "{path}");
    }
    assert_eq!(reserved(&gateway, CHAT, &json!({"model": "M", "max_tokens": 10})), expected);
    assert_eq!(reserved(&rewriting, "/models/v1/chat/completions", &dear), expected);
    let dear = json!({"generationConfig": {"maxOutputTokens": 10}});
    let expected = reserved(&gateway, "/v1beta/models/m:generateContent", &dear);
    assert!(expected > 1000, "{expected}");
    for path in [
        "/v1beta/models/%6D:generateContent",
        "/v1beta/models/m%3AgenerateContent",
        "/v1beta/model%73/m:generateContent",
        "/v1beta/models/cheap/../m:generateContent",
    ] {
        assert_eq!(reserved(&gateway, path, &dear), expected, "{path}");
    }
    let aliased = "/v1beta/models/m:generateContent";
    assert_eq!(
        reserved(&gateway, aliased, &json!({"max_tokens": 1})),
        reserved(&gateway, aliased, &json!({"other_tokens": 1})) - 30,
        "Gemini follows generationConfig only"
    );
}

#[test]
fn response_in_the_background_keeps_its_reservation() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "");
    let mock = json!({"input": 20, "output": 4, "pause_after": 2});
    let body = json!({"background": true, "stream": true, "max_output_tokens": 500, "mock": mock});
    let bytes = body.to_string();
    let mut client = gateway.client();
    let head = format!("POST /v1/responses HTTP/1.1\r\nHost: a\r\nx-id: a\r\nContent-Length: {}\r\n\r\n", bytes.len());
    client.send((head + &bytes).as_bytes());
    let reserved = QUOTA - client.head().unwrap().remaining("tokens");
    assert!(client.chunks_until("tok").contains("data:"));
    drop(client);
    eventually("the reservation is settled", || records(&gateway).len() == 1);
    assert_eq!(records(&gateway)[0]["limits"][0]["settled"], reserved, "the provider completes the response");
    provider.release();
}

#[test]
fn exhausted_stream_is_cut_with_a_final_event() {
    let provider = Provider::start();
    let gateway = start(&provider, QUOTA, "on_exhausted = \"cut\"");
    for (path, end) in [
        (CHAT, "\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n"),
        ("/v1/messages", "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"),
        ("/v1/responses", "\"incomplete_details\":{\"reason\":\"max_output_tokens\"}}}\n\n"),
        ("/v1/completions", "\"text\":\"\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n"),
    ] {
        for seed in [0, 1] {
            let ignored = json!({"stream": true, "max_tokens": 5, "max_output_tokens": 5, "mock": {"input": 9, "output": 300, "seed": seed}});
            let text = String::from_utf8(post(&gateway, path, &ignored).body).unwrap();
            assert!(text.ends_with(end), "{path} {text}");
            let deltas = text.matches("\"tok\"").count() + text.matches("\"tök\"").count();
            assert_eq!(deltas, 6, "{path}: the gateway ends the stream after the first delta beyond the maximum");
            let kept = json!({"stream": true, "max_tokens": 5, "max_output_tokens": 5, "mock": {"input": 9, "output": 5, "seed": seed}});
            let text = String::from_utf8(post(&gateway, path, &kept).body).unwrap();
            assert!(!text.contains("length") && !text.contains("max_"), "{path} {text}");
        }
    }
}

/// Two limits count the tokens of the same response, each with its own meter or with the same one. Each limit must be
/// charged as if it were the only limit of the request.
#[test]
fn each_of_two_token_limits_is_charged_as_if_it_were_alone() {
    let provider = Provider::start();
    let limit = |name: &str, cost: &str| {
        format!(
            "[limit.{name}]\nby = \"header:x-id\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\n\
             quota = \"{QUOTA}/hour\"\nunit = \"tokens\"\ncost = {{ llm = \"auto\"{cost} }}\n"
        )
    };
    let base = |limits: &[(&str, &str)]| {
        let names: Vec<_> = limits.iter().map(|(name, _)| *name).collect();
        let limits: String = limits.iter().map(|(name, cost)| limit(name, cost)).collect();
        config("", provider.address, QUOTA, "", "").replace("limits = [\"tokens\"]", &format!("limits = {names:?}"))
            + &limits
    };
    let requests = [
        json!({"stream": true, "max_tokens": 500, "mock": {"output": 6, "reports": false, "seed": 1}}),
        json!({"stream": true, "max_tokens": 500, "mock": {"output": 6, "reports": false}}),
        json!({"stream": true, "max_tokens": 500, "mock": {"input": 21, "output": 7, "seed": 2}}),
        json!({"max_tokens": 500, "mock": {"input": 21, "output": 7}}),
        json!({"stream": true, "max_tokens": 20, "mock": {"output": 60, "reports": false, "seed": 3}}),
    ];
    // Return the cost of each request for each limit.
    let costs = |limits: &[(&str, &str)]| -> Vec<Vec<u64>> {
        let gateway = Gateway::start(&base(limits));
        let left = || -> Vec<u64> {
            let reply = gateway.client().get_with("/v1/models", &[ID]);
            limits.iter().map(|(name, _)| reply.remaining(name)).collect()
        };
        requests
            .iter()
            .enumerate()
            .map(|(index, body)| {
                let before = left();
                assert_eq!(post(&gateway, CHAT, body).status, 200);
                // The access log has the settled costs as soon as the response has ended.
                eventually("the record is written", || records(&gateway).len() == index + 1);
                let settled: Vec<_> = records(&gateway)[index]["limits"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|limit| limit["settled"].as_u64().unwrap())
                    .collect();
                let expected: Vec<_> = before.iter().zip(&settled).map(|(before, cost)| before - cost).collect();
                eventually("the costs are settled", || left() == expected);
                settled
            })
            .collect()
    };
    for more in ["", ", on_exhausted = \"cut\"", ", include_usage = false"] {
        let kinds = [
            ("plain", more.to_owned()),
            ("bytes", format!("{more}, bytes_per_token = 2")),
            ("weights", format!("{more}, weights = {{ input = 3, output = 5 }}")),
            (
                "paths",
                format!("{more}, usage = {{ input = \"/usage/prompt_tokens\", output = \"/usage/total_tokens\" }}"),
            ),
        ];
        let alone: Vec<_> = kinds.iter().map(|(name, cost)| costs(&[(name, cost)])).collect();
        for (first, second) in [(0, 1), (1, 0), (0, 2), (2, 1), (0, 3), (3, 1)] {
            let limits = [first, second].map(|index| (kinds[index].0, &*kinds[index].1));
            let both = costs(&limits);
            for (request, both) in both.iter().enumerate() {
                let expected = [alone[first][request][0], alone[second][request][0]];
                assert_eq!(both[..], expected, "{limits:?}: {}", requests[request]);
            }
        }
    }
}
