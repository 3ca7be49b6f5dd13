"""The Python SDKs of OpenAI and Anthropic, configured only with `base_url` and a key: calls, retries after a 429, and headers."""

import hashlib
import json
import os
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler

import anthropic
import openai

from gateway import expect
from upstreams import Quiet

KEY = "sk-test-0123456789"
# The words of each response, and the number of tokens that the model server reports for a response.
WORDS, TOKENS = ["Hello", ", ", "client"], 250
# A wait with a fraction of a second. `retry-after-ms` can express it, `Retry-After` cannot.
SHORT_MS = 1500
MESSAGES = [{"role": "user", "content": "Hello"}]

# The SDKs send the key as a bearer token. Older SDKs of Anthropic send it in `x-api-key`.
AUTHENTICATION = """
[auth.keys]
kind = "api-key"
header = ["authorization", "x-api-key"]
consumers = "consumers.toml"
"""


def files():
    """Return the files that the configuration refers to."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return {"consumers.toml": f'[[consumer]]\nname = "acme"\nkeys = ["sha256:{digest}"]\n'}


def configuration(models):
    """Return the routes and limits of each SDK. The routes have a path prefix, because a base URL may have a path."""
    limits = f"""
{AUTHENTICATION}
[upstream.models]
servers = ["http://{models}"]
[limit.llm-requests]
by = ["api-key", "route"]
quota = "60/min"
[limit.llm-tokens]
by = ["api-key", "route"]
quota = "100000/hour"
unit = "tokens"
cost.response_header = "x-tokens-used"
[limit.llm-short]
by = ["api-key", "route"]
quota = "1/{SHORT_MS}ms"
burst = 1
[limit.llm-day]
by = ["api-key", "route"]
quota = "1/24h"
# This window does not depend on the time of day.
algorithm = "sliding-log"
[limit.llm-hidden]
by = ["api-key", "route"]
quota = "1/{SHORT_MS}ms"
burst = 1
announce = false
"""
    routes = [
        f"""
[[route]]
name = "{style}-{name}"
path = "/{style}-{name}/{{*rest}}"
rewrite = "/{{rest}}"
upstream = "models"
limits = {json.dumps(limits)}
require = ["keys"]
{f'ratelimit_headers = ["{style}"]' if name != "standard" else ""}
"""
        for style in ["openai", "anthropic"]
        for name, limits in [
            ("usage", ["llm-requests", "llm-tokens"]),
            ("short", ["llm-short"]),
            # Without a style for SDKs, the gateway sends the RateLimit headers of the draft and `Retry-After`.
            ("standard", ["llm-short"]),
            ("hidden", ["llm-requests", "llm-hidden"]),
            ("day", ["llm-day"]),
        ]
    ]
    return limits + "".join(routes)


class Models(BaseHTTPRequestHandler):
    """A model server with the smallest responses that the SDKs accept, streamed or not."""

    protocol_version = "HTTP/1.1"
    # Credentials that reached the model server.
    seen = []

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.extend(self.headers.get_all("authorization", []) + self.headers.get_all("x-api-key", []))
        shape = openai_response if self.path == "/v1/chat/completions" else anthropic_response
        body = shape(asked.get("stream", False))
        kind = "text/event-stream" if asked.get("stream") else "application/json"
        self.send_response(200)
        headers = {"content-type": kind, "content-length": str(len(body)), "x-tokens-used": str(TOKENS)}
        # The limits of the provider's account. Clients must not see these headers.
        headers |= {"x-ratelimit-remaining-requests": "9999", "anthropic-ratelimit-requests-remaining": "9999"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def openai_response(stream):
    common = {"id": "chatcmpl-1", "created": 0, "model": "m"}
    if not stream:
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 50, "completion_tokens": TOKENS - 50, "total_tokens": TOKENS}
        return json.dumps({**common, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
    deltas = [{"index": 0, "delta": {"content": word}, "finish_reason": None} for word in WORDS]
    deltas.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    chunks = [json.dumps({**common, "object": "chat.completion.chunk", "choices": [delta]}) for delta in deltas]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()


def anthropic_response(stream):
    usage = {"input_tokens": 50, "output_tokens": TOKENS - 50}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None, "usage": usage}
    if not stream:
        content = [{"type": "text", "text": "".join(WORDS)}]
        return json.dumps({**message, "content": content, "stop_reason": "end_turn"}).encode()
    events = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


def serve():
    """Start the model server. Return its address."""
    server = Quiet(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return "%s:%d" % server.server_address


class OpenAI:
    """Calls with OpenAI's SDK."""

    style, module = "openai", openai

    def __init__(self, url, **options):
        self.calls = openai.OpenAI(base_url=f"{url}/v1", **{"api_key": KEY, **options}).chat.completions

    def raw(self):
        return self.calls.with_raw_response.create(model="m", messages=MESSAGES)

    def text(self, raw):
        return raw.parse().choices[0].message.content

    def stream(self):
        chunks = self.calls.create(model="m", messages=MESSAGES, stream=True)
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]

    def quota(self, headers, unit):
        """Return the limit, the remaining quota and the time until the reset in seconds."""
        limit, remaining, reset = (headers[f"x-ratelimit-{part}-{unit}"] for part in ("limit", "remaining", "reset"))
        return int(limit), int(remaining), go_seconds(reset)


class Anthropic:
    """Calls with Anthropic's SDK."""

    style, module = "anthropic", anthropic

    def __init__(self, url, **options):
        self.calls = anthropic.Anthropic(base_url=url, **{"api_key": KEY, **options}).messages

    def raw(self):
        return self.calls.with_raw_response.create(model="m", messages=MESSAGES, max_tokens=100)

    def text(self, raw):
        return raw.parse().content[0].text

    def stream(self):
        with self.calls.stream(model="m", messages=MESSAGES, max_tokens=100) as stream:
            return list(stream.text_stream)

    def quota(self, headers, unit):
        limit, remaining, reset = (headers[f"anthropic-ratelimit-{unit}-{part}"] for part in ("limit", "remaining", "reset"))
        until = datetime.strptime(reset, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        return int(limit), int(remaining), (until - datetime.now(timezone.utc)).total_seconds()


def go_seconds(text):
    """Parse a duration such as `1h6m0s`. Return seconds."""
    seconds, number = 0, ""
    for character in text:
        if character.isdigit():
            number += character
        else:
            seconds += int(number) * {"h": 3600, "m": 60, "s": 1}[character]
            number = ""
    expect(number == "", f"a duration with units: {text}")
    return seconds


def usage(sdk, url):
    """Check that headers report both limits, each by its unit and with the cost of the response, and that streams arrive in pieces."""
    client = sdk(f"{url}/{sdk.style}-usage", max_retries=0)
    for number in range(1, 3):
        raw = client.raw()
        expect(client.text(raw) == "".join(WORDS), f"{sdk.style}: the text of a response")
        limit, remaining, reset = client.quota(raw.headers, "requests")
        expect((limit, remaining) == (60, 60 - number) and 0 < reset <= 3, f"requests: {dict(raw.headers)}")
        limit, remaining, reset = client.quota(raw.headers, "tokens")
        # The bucket refills about 28 tokens per second.
        expect(limit == 100_000 and 0 <= remaining - (limit - number * TOKENS) < 1000, f"tokens: {dict(raw.headers)}")
        expect(0 < reset <= 25, f"tokens: {dict(raw.headers)}")
        expect("retry-after-ms" not in raw.headers, dict(raw.headers))
    expect(client.stream() == WORDS, "the pieces of a stream")


def retries(sdk, url, name, shortest, longest):
    """Check that the SDK waits once after a 429, as long as the 429 states, and is then admitted. Return the wait in seconds."""
    client = sdk(f"{url}/{sdk.style}-{name}")
    expect(client.raw().retries_taken == 0, "the first is admitted")
    started = time.monotonic()
    raw = client.raw()
    took = time.monotonic() - started
    expect(raw.retries_taken == 1, f"{sdk.style}-{name}: {raw.retries_taken} retries")
    expect(shortest <= took < longest, f"{sdk.style}-{name}: {took:.2f} s")
    return took


def denial(sdk, url):
    """Check that a denial raises the SDK's rate limit error, with the problem document."""
    client = sdk(f"{url}/{sdk.style}-day", max_retries=0)
    client.raw()
    try:
        client.raw()
    except sdk.module.RateLimitError as error:
        headers, wait_ms = error.response.headers, int(error.response.headers["retry-after-ms"])
        expect(error.status_code == 429 and error.body["violated-policies"] == ["llm-day"], error.body)
        expect(int(headers["retry-after"]) == -(-wait_ms // 1000) and wait_ms > 86_000_000, dict(headers))
        limit, remaining, reset = client.quota(headers, "requests")
        expect((limit, remaining) == (1, 0) and reset > 86_000, dict(headers))
    else:
        raise AssertionError(f"{sdk.style}: the second is admitted")
    for name in ["short", "hidden"]:
        client = sdk(f"{url}/{sdk.style}-{name}", max_retries=0)
        try:
            while True:
                client.raw()
        except sdk.module.RateLimitError as error:
            told = [name for name in error.response.headers if "ratelimit" in name]
            expect(bool(told) == (name == "short"), f"{name}: {told}")
            expect(1 <= int(error.response.headers["retry-after-ms"]) <= SHORT_MS, dict(error.response.headers))


def authentication(sdk, url):
    """Check that an unknown key raises the SDK's authentication error, and that the model server sees no keys."""
    for key, headers in [("sk-unknown", {}), (KEY, {"x-api-key": "sk-unknown"})]:
        client = sdk(f"{url}/{sdk.style}-usage", max_retries=0, api_key=key, default_headers=headers)
        try:
            client.raw()
        except sdk.module.APIStatusError as error:
            kinds = {400: sdk.module.BadRequestError, 401: sdk.module.AuthenticationError}
            expect(isinstance(error, kinds[400 if headers else 401]), error)
            expect(error.body["status"] == error.status_code and "sk-" not in error.response.text, error.body)
            challenge = error.response.headers.get("www-authenticate", "")
            expect(challenge.startswith("Bearer") == (error.status_code == 401), f"{error.status_code}: {challenge}")
        else:
            raise AssertionError(f"{sdk.style}: {key} and {headers} are admitted")
    # Send the same key in both headers.
    sdk(f"{url}/{sdk.style}-usage", max_retries=0, default_headers={"x-api-key": KEY}).raw()
    expect(Models.seen == [], f"keys that were forwarded: {Models.seen}")


def check(clear, _tls):
    # The SDKs must not take keys, addresses or proxies from the environment.
    for name in list(os.environ):
        if name.upper().startswith(("OPENAI_", "ANTHROPIC_")) or name.upper().endswith("_PROXY"):
            del os.environ[name]
    waits = []
    for sdk in [OpenAI, Anthropic]:
        usage(sdk, clear)
        # `retry-after-ms` is exact. `Retry-After` is rounded up to full seconds.
        waits.append(retries(sdk, clear, "short", SHORT_MS / 1000 - 0.3, SHORT_MS / 1000 + 0.4))
        waits.append(retries(sdk, clear, "standard", 2, 2.5))
        denial(sdk, clear)
        authentication(sdk, clear)
    # OpenAI's SDK waits at most two minutes. Anthropic's SDK waits as long as the gateway states.
    try:
        OpenAI(f"{clear}/openai-day").raw()
    except openai.RateLimitError:
        pass
    else:
        raise AssertionError("openai: admitted after a day")
    return (
        f"openai {openai.__version__}, anthropic {anthropic.__version__}: calls and streams with base_url and a key alone, limits and "
        f"resets of requests and tokens, errors, one retry after 429: {', '.join(f'{wait:.2f} s' for wait in waits)}"
    )
