#!/usr/bin/env python3
"""LiteLLM's proxy behind the gateway, as in docs/how-to/llm-providers.md: `make test-clients`.

    litellm_proxy.py BINARY LITELLM

Clients use the SDK of OpenAI with keys of the gateway. LiteLLM calls a mock provider. Exits with 1 if a check fails.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import urllib3

from gateway import Gateway, expect

MASTER_KEY, KEY = "sk-litellm-master-key", "sk-client"
# The usage that the provider reports.
INPUT, OUTPUT = 11, 7
QUOTA, MAX_TOKENS = 100_000, 1000
# Maximum time until LiteLLM has started, and until a response is settled, in seconds.
START, SETTLED = 180, 60


class Provider(BaseHTTPRequestHandler):
    """The API of OpenAI. It records the model of each request."""

    protocol_version = "HTTP/1.1"
    models = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.models.append(request["model"])
        usage = {"prompt_tokens": INPUT, "completion_tokens": OUTPUT, "total_tokens": INPUT + OUTPUT}
        answer = {"id": "c", "created": 1, "model": request["model"]}
        if not request.get("stream"):
            message = {"role": "assistant", "content": "Hello, client"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return self.send("application/json", json.dumps({**answer, "object": "chat.completion", "choices": [choice], "usage": usage}))
        answer["object"] = "chat.completion.chunk"
        chunks = [{**answer, "choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]} for part in ["Hello", ", ", "client"]]
        chunks.append({**answer, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if request.get("stream_options", {}).get("include_usage"):
            chunks.append({**answer, "choices": [], "usage": usage})
        self.send("text/event-stream", "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

    def send(self, media_type, text):
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def litellm(program, provider):
    """Run LiteLLM's proxy with three models. The server of the model `broken` refuses connections."""
    port = free_port()

    def model(name, served, address):
        parameters = {"model": f"openai/{served}", "api_base": f"http://{address}/v1", "api_key": "of-the-provider"}
        return {"model_name": name, "litellm_params": parameters}

    models = [model("fast", "gpt-5-mini", provider), model("smart", "gpt-5", provider), model("broken", "gpt-5-nano", f"127.0.0.1:{free_port()}")]
    # YAML contains JSON.
    config = {"model_list": models, "general_settings": {"master_key": MASTER_KEY}, "router_settings": {"num_retries": 0}}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "litellm.yaml")
        path.write_text(json.dumps(config))
        # Do not fetch the price list.
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_DOCS": "True"}
        run = [program, "--config", path, "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        log = open(pathlib.Path(folder, "log"), "w+")
        process = subprocess.Popen(run, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}/health/liveliness"
            wait(lambda: process.poll() is None and answers(url), START, "LiteLLM starts")
            yield f"127.0.0.1:{port}"
        except AssertionError:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def answers(url):
    try:
        return urllib3.request("GET", url, retries=False, timeout=5).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def wait(is_done, seconds, what):
    deadline = time.monotonic() + seconds
    while not is_done():
        expect(time.monotonic() < deadline, f"gave up waiting: {what}")
        time.sleep(0.05)


def configuration(address):
    return f"""
[[listener]]
address = "127.0.0.1:0"
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[auth.keys]
kind = "api-key"
header = "authorization"
consumers = "consumers.toml"
[limit.budget]
by = "api-key"
quota = "{QUOTA}/24h"
algorithm = "fixed-window"
start = "first-request"
unit = "usd-micros"
cost = {{ llm = "auto", prices = "litellm" }}
# 1 and 10 USD per million tokens: 1 and 10 micro-dollars per token.
[prices.litellm]
fast = {{ input = 1, output = 1 }}
"gpt-5-mini*" = {{ input = 1, output = 1 }}
smart = {{ input = 10, output = 10 }}
"gpt-5" = {{ input = 10, output = 10 }}
broken = {{ input = 1, output = 1 }}
[upstream.litellm]
servers = ["http://{address}"]
response_timeout = "5m"
[[route]]
name = "litellm"
path = "/v1/{{*rest}}"
require = ["keys"]
limits = ["budget"]
upstream = "litellm"
request_headers = {{ set = {{ authorization = "Bearer {MASTER_KEY}" }} }}
model_aliases = {{ cheap = "fast", best = "smart" }}
"""


def consumers():
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return {"consumers.toml": f'[[consumer]]\nname = "acme"\nkeys = ["sha256:{digest}"]\n'}


def check(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": "Hello"}]

    def left():
        # A request without a body costs nothing.
        answer = urllib3.request("GET", f"{url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
        expect(answer.status == 200, answer.status)
        return int(answer.headers["ratelimit"].split("r=")[1].split(";")[0])

    def ask(model, **options):
        return client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS, **options)

    expected = QUOTA
    tokens = INPUT + OUTPUT
    for model, served, price, options in [
        ("fast", "gpt-5-mini", 1, {}),
        ("cheap", "gpt-5-mini", 1, {}),
        ("best", "gpt-5", 10, {}),
        # The request names two models, and the response says which of them answered.
        ("broken", "gpt-5", 10, {"extra_body": {"fallbacks": ["best"]}}),
    ]:
        for stream in [False, True]:
            answer = ask(model, stream=stream, **options)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices) if stream else answer.choices[0].message.content
            expect(text == "Hello, client", (model, stream, text))
            expect(Provider.models[-1] == served, (model, Provider.models[-1]))
            expected -= price * tokens
            wait(lambda: left() == expected, SETTLED, f"{model}, stream {stream}: {expected} remain, not {left()}")

    # The key of LiteLLM does not open the gateway, and errors have the format of OpenAI.
    try:
        openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER_KEY, max_retries=0).models.list()
        raise AssertionError("the master key is accepted")
    except openai.AuthenticationError as error:
        expect(error.code == "invalid_api_key", error)

    # Concurrent requests reserve MAX_TOKENS of the dear model each, so only some of them fit into the budget.
    def attempt(_):
        try:
            ask("smart")
            return 200
        except openai.RateLimitError:
            return 429

    with ThreadPoolExecutor(32) as pool:
        statuses = list(pool.map(attempt, range(64)))
    admitted = statuses.count(200)
    expect(9 <= admitted < 64, f"{admitted} of 64 admitted")
    expected -= admitted * 10 * tokens
    wait(lambda: left() == expected, SETTLED, f"all are settled: {expected} remain, not {left()}")
    return f"LiteLLM behind the gateway: models, aliases, fallbacks and streams charged to the micro-dollar; {admitted} of 64 concurrent requests admitted"


def main():
    binary, program = sys.argv[1:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with litellm(program, f"127.0.0.1:{server.server_port}") as address:
        with Gateway(binary, configuration(address), consumers()) as gateway:
            print(check(gateway.urls[0]), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.SubprocessError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
