#!/usr/bin/env python3
"""The SDKs of OpenAI, Anthropic, Google, AWS and LangChain behind token and money budgets: `make test-clients`.

    providers.py BINARY

The provider responds with usage in the shapes that providers document. Each call must be charged for exactly these tokens,
streamed or not, and the bytes of the responses must not change. Exits with 1 if a check fails.
"""

import json
import struct
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anthropic
import boto3
import httpx
import openai
from google import genai
from langchain_openai import ChatOpenAI

from gateway import Gateway, expect

KEY = "key-of-the-gateway"
MESSAGES = [{"role": "user", "content": "Hello"}]
WORDS = ["Hello", ", ", "client"]
# Dollars per million tokens.
PRICES = {"input": 5, "cached_input": 0.5, "cache_write_5m": 6.25, "output": 25}

# The usage of each model in the format of its API, and the right tokens by kind.
OPENAI = {
    "plain": ({"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}, {"input": 20, "output": 9}),
    "reasoning-inside": (
        {"prompt_tokens": 75, "completion_tokens": 1186, "total_tokens": 1261, "completion_tokens_details": {"reasoning_tokens": 1024}},
        {"input": 75, "output": 1186},
    ),
    "reasoning-outside": (
        {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 399, "completion_tokens_details": {"reasoning_tokens": 386}},
        {"input": 12, "output": 387},
    ),
    "only-the-total": ({"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 1000}, {"input": 10, "output": 990}),
    "cached": (
        {"prompt_tokens": 2006, "completion_tokens": 300, "total_tokens": 2306, "prompt_tokens_details": {"cached_tokens": 1920}},
        {"input": 86, "cached_input": 1920, "output": 300},
    ),
}
RESPONSES = {
    "input_tokens": 36, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 87,
    "output_tokens_details": {"reasoning_tokens": 60}, "total_tokens": 123,
}
ANTHROPIC = {
    "input_tokens": 21, "cache_creation_input_tokens": 188086, "cache_read_input_tokens": 1000, "output_tokens": 393,
    "cache_creation": {"ephemeral_5m_input_tokens": 188086, "ephemeral_1h_input_tokens": 0},
}
GEMINI = {"promptTokenCount": 20, "candidatesTokenCount": 30, "thoughtsTokenCount": 50, "totalTokenCount": 100}
BEDROCK = {"inputTokens": 185, "outputTokens": 1000, "totalTokens": 1185, "cacheReadInputTokens": 0, "cacheWriteInputTokens": 0}


def sse(events, named=False):
    return "".join((f"event: {each['type']}\n" if named else "") + f"data: {json.dumps(each)}\n\n" for each in events).encode()


def chat(body):
    usage, _ = OPENAI[body["model"]]
    common = {"id": "chatcmpl-1", "created": 0, "model": body["model"]}
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}
        return {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
    deltas = [{"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": None} for word in WORDS]
    deltas.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    includes = body.get("stream_options", {}).get("include_usage")
    chunks = [{**common, "object": "chat.completion.chunk", "choices": [delta], **({"usage": None} if includes else {})} for delta in deltas]
    if includes:
        chunks.append({**common, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    return sse(chunks) + b"data: [DONE]\n\n"


def responses(body):
    content = [{"type": "output_text", "text": "".join(WORDS), "annotations": []}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    base = {
        "id": "resp_1", "object": "response", "created_at": 0, "model": body["model"], "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": [], "output": [],
    }
    done = {**base, "status": "completed", "output": [message], "usage": RESPONSES}
    if not body.get("stream"):
        return done
    deltas = [
        {"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": word,
         "logprobs": [], "sequence_number": number}
        for number, word in enumerate(WORDS, 1)
    ]
    created = {"type": "response.created", "response": {**base, "status": "in_progress", "usage": None}, "sequence_number": 0}
    return sse([created, *deltas, {"type": "response.completed", "response": done, "sequence_number": 9}], named=True)


def messages(body):
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    if not body.get("stream"):
        return {**message, "content": [{"type": "text", "text": "".join(WORDS)}], "stop_reason": "end_turn", "usage": ANTHROPIC}
    start = {**message, "content": [], "stop_reason": None, "usage": {**ANTHROPIC, "output_tokens": 1}}
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 393}},
        {"type": "message_stop"},
    ]
    return sse(events, named=True)


def gemini(is_stream):
    part = lambda text: {"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}
    if not is_stream:
        return {"candidates": [{**part("".join(WORDS)), "finishReason": "STOP"}], "usageMetadata": GEMINI, "modelVersion": "gemini-3"}
    early = {"promptTokenCount": 20, "totalTokenCount": 20}
    chunks = [{"candidates": [part(word)], "usageMetadata": early, "modelVersion": "gemini-3"} for word in WORDS]
    chunks[-1]["usageMetadata"] = GEMINI
    return sse(chunks)


def event_stream(events):
    """Encode events as AWS does: lengths, headers, payload and two checksums."""
    encoded = b""
    for kind, payload in events:
        pairs = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
        headers = b"".join(
            bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode() for name, value in pairs.items()
        )
        body = json.dumps(payload).encode()
        prelude = struct.pack(">II", len(headers) + len(body) + 16, len(headers))
        message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + body
        encoded += message + struct.pack(">I", zlib.crc32(message))
    return encoded


def converse(is_stream):
    if not is_stream:
        message = {"role": "assistant", "content": [{"text": "".join(WORDS)}]}
        return {"output": {"message": message}, "stopReason": "end_turn", "usage": BEDROCK, "metrics": {"latencyMs": 1}}
    deltas = [("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": word}}) for word in WORDS]
    end = [("messageStop", {"stopReason": "end_turn"}), ("metadata", {"usage": BEDROCK, "metrics": {"latencyMs": 1}})]
    return event_stream([("messageStart", {"role": "assistant"}), *deltas, *end])


class Provider(BaseHTTPRequestHandler):
    """All APIs, by path."""

    protocol_version = "HTTP/1.1"
    # Target, headers and body of each request, and the body of its response.
    seen = []

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["content-length"]))
        body, path = json.loads(sent), self.path.partition("?")[0]
        answer, kind = {}, None
        if path == "/v1/chat/completions":
            answer = chat(body)
        elif path == "/v1/responses":
            answer = responses(body)
        elif path == "/v1/embeddings":
            usage = {"prompt_tokens": 8, "total_tokens": 8}
            answer = {"object": "list", "model": "embed", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "usage": usage}
        elif path == "/v1/moderations":
            answer = {"id": "modr-1", "model": "omni", "results": []}
        elif path == "/v1/messages":
            answer = messages(body)
        elif path == "/v1/messages/count_tokens":
            answer = {"input_tokens": 14}
        elif path.endswith(":countTokens"):
            answer = {"totalTokens": 31}
        elif path.endswith((":generateContent", ":streamGenerateContent")):
            answer = gemini(path.endswith(":streamGenerateContent"))
        elif path.startswith("/model/"):
            answer = converse(path.endswith("/converse-stream"))
            kind = "application/vnd.amazon.eventstream" if path.endswith("/converse-stream") else None
        is_json = isinstance(answer, dict)
        data = json.dumps(answer).encode() if is_json else answer
        self.seen.append((self.path, dict(self.headers), sent, data))
        self.send_response(200)
        self.send_header("content-type", kind or ("application/json" if is_json else "text/event-stream"))
        if is_json:
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for start in range(0, len(data), 100):
            part = data[start:start + 100]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


def configuration(provider):
    prices = ", ".join(f"{name} = {price}" for name, price in PRICES.items())
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = {{ to = "access.log", format = "json" }}
[[listener]]
address = "127.0.0.1:0"
[upstream.provider]
servers = ["http://{provider}"]
[limit.tokens]
by = "ip"
quota = "1000000000/day"
algorithm = "fixed-window"
unit = "tokens"
cost = {{ llm = "auto" }}
[limit.money]
by = "ip"
quota = "1000000000000/day"
algorithm = "fixed-window"
unit = "usd-micros"
cost = {{ llm = "auto", prices = "list" }}
[prices.list]
"*" = {{ {prices} }}
[[route]]
name = "api"
path = "/{{*rest}}"
upstream = "provider"
limits = ["tokens", "money"]
"""


def calls(url):
    """Return the calls of each SDK: a name, a function that returns the text of the response, and the right tokens."""
    ai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    google = genai.Client(api_key=KEY, http_options={"base_url": url})
    aws = boto3.client("bedrock-runtime", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    turn = [{"role": "user", "content": [{"text": "Hello"}]}]
    bounds = {"maxTokens": 2000}

    def openai_stream(model, **options):
        chunks = ai.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2000, stream=True, **options)
        parts = list(chunks)
        expect(any(part.usage for part in parts) == bool(options), "usage is only in streams of clients that ask for it")
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    def openai_responses_stream():
        events = ai.responses.create(model="plain", input="Hello", max_output_tokens=2000, stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def claude_stream():
        with claude.messages.stream(model="claude-x", messages=MESSAGES, max_tokens=2000) as stream:
            return "".join(stream.text_stream)

    def aws_stream():
        stream = aws.converse_stream(modelId="anthropic.claude-x", messages=turn, inferenceConfig=bounds)["stream"]
        return "".join(event["contentBlockDelta"]["delta"]["text"] for event in stream if "contentBlockDelta" in event)

    for model, (_, right) in OPENAI.items():
        chain = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=model, max_tokens=2000, max_retries=0)
        create = lambda model=model: ai.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2000)
        yield f"openai, {model}", lambda create=create: create().choices[0].message.content, right
        yield f"openai, {model}, stream", lambda model=model: openai_stream(model), right
        with_usage = {"stream_options": {"include_usage": True}}
        yield f"openai, {model}, stream with usage", lambda model=model: openai_stream(model, **with_usage), right
        yield f"langchain, {model}", lambda chain=chain: chain.invoke("Hello").content, right
        yield f"langchain, {model}, stream", lambda chain=chain: "".join(part.content for part in chain.stream("Hello")), right
    right = {"input": 26, "cached_input": 10, "output": 87}
    yield "openai, responses", lambda: ai.responses.create(model="plain", input="Hello", max_output_tokens=2000).output_text, right
    yield "openai, responses, stream", openai_responses_stream, right
    yield "openai, embeddings", lambda: ai.embeddings.create(model="embed", input="Hello", encoding_format="float") and None, {"input": 8}
    yield "openai, moderations", lambda: ai.moderations.create(input="Hello") and None, {}
    right = {"input": 21, "cached_input": 1000, "cache_write_5m": 188086, "output": 393}
    create = lambda: claude.messages.create(model="claude-x", messages=MESSAGES, max_tokens=2000)
    yield "anthropic", lambda: create().content[0].text, right
    yield "anthropic, stream", claude_stream, right
    yield "anthropic, count_tokens", lambda: claude.messages.count_tokens(model="claude-x", messages=MESSAGES) and None, {}
    right = {"input": 20, "output": 80}
    yield "google-genai", lambda: google.models.generate_content(model="gemini-3", contents="Hello").text, right
    stream = lambda: google.models.generate_content_stream(model="gemini-3", contents="Hello")
    yield "google-genai, stream", lambda: "".join(part.text for part in stream()), right
    yield "google-genai, count_tokens", lambda: google.models.count_tokens(model="gemini-3", contents="Hello") and None, {}
    right = {"input": 185, "output": 1000}
    create = lambda: aws.converse(modelId="anthropic.claude-x", messages=turn, inferenceConfig=bounds)
    yield "boto3", lambda: create()["output"]["message"]["content"][0]["text"], right
    yield "boto3, stream", aws_stream, right


def record(gateway, number):
    """Return the record of the access log with this number, as soon as it is written."""
    path = Path(gateway.folder.name) / "access.log"
    end = time.monotonic() + 20
    while time.monotonic() < end:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > number:
            return json.loads(lines[number])
        time.sleep(0.01)
    raise AssertionError(f"no record {number}")


def check_charges(gateway):
    done = []
    for number, (name, call, right) in enumerate(calls(gateway.urls[0])):
        text = call()
        expect(text in ("".join(WORDS), None), f"{name}: the SDK reads the response: {text}")
        settled = {limit["limit"]: limit.get("settled", limit["cost"]) for limit in record(gateway, number)["limits"]}
        # Millionths of a micro-dollar, so that the sum is exact.
        money = sum(tokens * round(PRICES[kind] * 1_000_000) for kind, tokens in right.items())
        expected = {"tokens": sum(right.values()), "money": -(-money // 1_000_000)}
        expect(settled == expected, f"{name}: {settled} charged, not {expected}")
        done.append(name)
    return done


def check_bytes(gateway, provider):
    """Send each request again, as it reached the provider, to the gateway and to the provider, and compare the responses."""
    # The gateway removes the usage that a client has not asked for. As sent to the provider, all requests ask for it.
    requests = list(Provider.seen)
    for target, headers, body, _ in requests:
        sent = {name: value for name, value in headers.items() if name.lower() in ("content-type", "anthropic-version")}
        got = [httpx.post(base + target, content=body, headers=sent, trust_env=False).content for base in [gateway.urls[0], f"http://{provider}"]]
        expect(got[0] == got[1], f"{target}: the gateway has changed the response: {got}")
    return len(requests)


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    provider = f"127.0.0.1:{server.server_port}"
    with Gateway(sys.argv[1], configuration(provider)) as gateway:
        done = check_charges(gateway)
        compared = check_bytes(gateway, provider)
    versions = [f"openai {openai.__version__}", f"anthropic {anthropic.__version__}", f"google-genai {genai.__version__}"]
    print(f"{', '.join(versions)}, boto3 {boto3.__version__}, langchain-openai: {len(done)} calls charged to the token and to the "
          f"micro-dollar, {compared} responses unchanged")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
