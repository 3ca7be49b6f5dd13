#!/usr/bin/env python3
"""Token budgets with the Python SDKs of OpenAI and Anthropic, two gateways and a Redis server: `make test-clients`.

    budgets.py BINARY

A mock provider streams LLM tokens in chunks of any length. First, clients abort streams after a random number of tokens and are
charged for the streamed tokens. Then 64 clients stream through both gateways, and some of them abort. In the meantime, Redis is killed
and restarted with its data, and one gateway is killed. The settled costs must equal the tokens that the provider issued. Exits with 1 if
a check fails.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import anthropic
import httpx
import httpx2
import openai

from gateway import Gateway, expect
from upstreams import Quiet

CLIENTS, ROUNDS, MAX_TOKENS = 64, 8, 300
# The number of clients that abort all of their streams, and the number of streams per client.
LEAVING, CUTS = 16, 12
LEFT_QUOTA = 10_000_000
# The quota of the identity `small`, which all clients use sometimes. The other identities have more quota than they use.
SMALL_QUOTA = 2000
TOOL = {"name": "weather", "description": "The weather of a town.", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
# Seconds before and after an outage of Redis in which a call may get no reply: twice the timeout of the store.
OUTAGE_MARGIN = 4
# Maximum time to wait, in seconds. Settlements, posts of usage totals and log records follow the response.
MAX_WAIT = 60


def configuration(redis, provider):
    limit = """
by = "header:x-id"
unit = "tokens"
on_store_error = "deny"
cost = { llm = "auto", bytes_per_token = 4, on_abort = "estimate", include_usage = false }
"""
    routes = "".join(
        f"""
[[route]]
name = "{name}"
path = "/{name}/{{*rest}}"
rewrite = "/{{rest}}"
upstream = "provider"
limits = ["{name}"]
"""
        for name in ["large", "small", "short", "left"]
    )
    return f"""
[[listener]]
address = "127.0.0.1:0"
[log]
format = "json"
access = "access.log"
[admin]
address = "127.0.0.1:0"
[store]
url = "redis://127.0.0.1:{redis}/0"
timeout = "2s"
[upstream.provider]
servers = ["http://{provider}"]
[limit.large]
quota = "10000000/24h"
algorithm = "fixed-window"
usage = true
{limit}
[limit.small]
quota = "{SMALL_QUOTA}/24h"
algorithm = "fixed-window"
usage = true
{limit}
[limit.left]
quota = "{LEFT_QUOTA}/24h"
algorithm = "fixed-window"
start = "first-request"
usage = true
{limit}
# A bucket that refills in two seconds.
[limit.short]
quota = "1000/2s"
{limit}
{routes}
"""


class Request:
    """A request that the provider received."""

    def __init__(self, headers, body, asked):
        self.identity, self.call = headers["x-id"], headers["x-call"]
        choices = asked.get("n", 1)
        bound = asked.get("max_completion_tokens") or asked.get("max_tokens")
        words = dict(word.split("=") for word in asked["messages"][-1]["content"].split())
        self.input, self.output = int(words["input"]), int(words["output"]) * choices
        # The pause in seconds after each part, and the number of tokens after which the stream stops until the client disconnects.
        self.pause, self.hold = float(words.get("slow", 0)), int(words.get("hold", 0))
        # The gateway estimates one token per four bytes of the body.
        self.estimated_input = -(-len(body) // 4)
        self.reserved = self.estimated_input + bound * choices
        self.issued, self.ended = 0, False


class Provider(BaseHTTPRequestHandler):
    """A provider of the APIs Chat Completions and Messages. The last message sets the tokens to issue: `input=9 output=4 hold=2`."""

    protocol_version = "HTTP/1.1"
    # The requests, by the request id that the gateway assigns.
    requests = {}

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        asked = json.loads(body)
        request = Request(self.headers, body, asked)
        self.requests[self.headers["x-request-id"]] = request
        shape = openai_parts if self.path.endswith("/chat/completions") else anthropic_parts
        is_stream = asked.get("stream", False)
        counts = (request.input, request.output)
        parts = shape(asked, *counts) if is_stream else [json.dumps(shape({**asked, "stream": False}, *counts))]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        cuts = random.Random(len(body))
        streamed = 0
        for part in parts:
            streamed += "tök" in part
            request.issued = request.input + (streamed if request.hold else request.output)
            rest = part.encode()
            while rest:
                size = cuts.randint(1, 40)
                chunk, rest = rest[:size], rest[size:]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if streamed == request.hold > 0:
                # The gateway closes the connection when its client has disconnected.
                with contextlib.suppress(ConnectionError):
                    expect(self.rfile.read(1) == b"", "the gateway sends more")
                request.ended = self.close_connection = True
                return
            if request.pause:
                time.sleep(request.pause)
        self.wfile.write(b"0\r\n\r\n")
        request.ended = True

    def log_message(self, *_):
        pass


def openai_parts(asked, tokens, output):
    common = {"id": "chatcmpl-1", "created": 0, "model": asked["model"]}
    usage = {"prompt_tokens": tokens, "completion_tokens": output, "total_tokens": tokens + output}
    choices = range(asked.get("n", 1))
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Köln"}'}}]
    if not asked["stream"]:
        message = {"role": "assistant", "content": "tök " * output}
        if "tools" in asked:
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        listed = [{"index": index, "message": message, "finish_reason": "stop"} for index in choices]
        return {**common, "object": "chat.completion", "choices": listed, "usage": usage}
    deltas = [{"index": number % len(choices), "delta": {"content": "tök"}, "finish_reason": None} for number in range(output)]
    if "tools" in asked:
        deltas = [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}]
    deltas += [{"index": index, "delta": {}, "finish_reason": "stop"} for index in choices]
    chunks = [{**common, "object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
    if asked.get("stream_options", {}).get("include_usage"):
        chunks.append({**common, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    return [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


def anthropic_parts(asked, tokens, output):
    usage = {"input_tokens": tokens, "output_tokens": output}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "stop_sequence": None}
    tool = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    if not asked["stream"]:
        content = [{**tool, "input": {"town": "Köln"}}] if "tools" in asked else [{"type": "text", "text": "tök " * output}]
        return {**message, "content": content, "stop_reason": "end_turn", "usage": usage}
    block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "tök"}
    if "tools" in asked:
        block, delta = tool, {"type": "input_json_delta", "partial_json": '{"town": "Köln"}'}
    events = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for _ in range(1 if "tools" in asked else output)),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": output}},
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]


class Redis:
    """A Redis server that syncs every write to disk, so that it keeps its data when it is killed."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self):
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder.name, "--save", "",
                   "--appendonly", "yes", "--appendfsync", "always"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        expect(any("ready to accept connections" in line.lower() for line in self.process.stdout), "Redis does not start")
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def kill(self):
        self.process.kill()
        self.process.wait()


def clients(url, identity, limit, **options):
    """Return a client of each SDK, for this identity and the route with this limit."""
    common = {"api_key": "sk-test", "default_headers": {"x-id": identity}, **options}
    return openai.OpenAI(base_url=f"{url}/{limit}/v1", **common), anthropic.Anthropic(base_url=f"{url}/{limit}", **common)


def message(tokens, output, **more):
    words = {"input": tokens, "output": output, **more}
    return [{"role": "user", "content": " ".join(f"{name}={value}" for name, value in words.items())}]


def records(gateway):
    path = os.path.join(gateway.folder.name, "access.log")
    complete, _, _ = open(path).read().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def eventually(what, condition):
    end = time.monotonic() + MAX_WAIT
    while not condition():
        expect(time.monotonic() < end, f"not within {MAX_WAIT} s: {what}")
        time.sleep(0.05)


def shapes(gateway):
    """Check calls, streams, tools and several choices: the settled cost equals the tokens that the provider issued."""
    chat, claude = clients(gateway.urls[0], "shapes", "large", max_retries=0)
    common = {"model": "m", "messages": message(9, 4)}
    usage = {"stream_options": {"include_usage": True}}
    tools = [{"type": "function", "function": TOOL}]
    create = chat.chat.completions.create
    expect(create(**common, max_tokens=50).choices[0].message.content == "tök " * 4, "text")
    expect(len(create(**common, max_completion_tokens=50, n=3).choices) == 3, "choices")
    expect(create(**common, max_tokens=50, tools=tools).choices[0].message.tool_calls[0].function.name == "weather", "a tool call")
    text = [chunk.choices[0].delta.content for chunk in create(**common, max_tokens=50, stream=True, **usage) if chunk.choices]
    expect(text.count("tök") == 4, text)
    seen = Counter(chunk.choices[0].index for chunk in create(**common, max_tokens=50, stream=True, n=3, **usage) if chunk.choices)
    expect(len(seen) == 3, seen)
    calls = [chunk for chunk in create(**common, max_tokens=50, stream=True, tools=tools, **usage) if chunk.choices]
    expect("Köln" in calls[0].choices[0].delta.tool_calls[0].function.arguments, calls[0])
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    common["max_tokens"] = 50
    expect(claude.messages.create(**common).content[0].text == "tök " * 4, "text")
    expect(claude.messages.create(**common, tools=tools).content[0].input == {"town": "Köln"}, "a tool call")
    with claude.messages.stream(**common) as stream:
        expect(list(stream.text_stream) == ["tök"] * 4, "pieces")
    with claude.messages.stream(**common, tools=tools) as stream:
        final = stream.get_final_message()
        expect((final.content[0].input, final.usage.output_tokens) == ({"town": "Köln"}, 4), final)
    eventually("all are logged", lambda: len(records(gateway)) == 10)
    for record in records(gateway):
        limit, request = record["limits"][0], Provider.requests[record["request_id"]]
        expect(limit["settled"] == request.issued and not limit.get("estimated"), record)
        expect(limit["reserved"] == request.reserved, f"{record} instead of {request.reserved}")


def back_off(gateway):
    """Check that the SDKs wait after a denial for the time that the gateway states, and are then admitted."""
    for index, limit in enumerate(["short", "short"]):
        sdk = clients(gateway.urls[0], f"waiting-{index}", limit)[index]
        create = (sdk.chat.completions if index == 0 else sdk.messages).with_raw_response.create
        ask = lambda: create(model="m", messages=message(9, 900), max_tokens=900)
        expect(ask().retries_taken == 0, "the first is admitted")
        started = time.monotonic()
        expect(ask().retries_taken >= 1, "the second is admitted after a retry")
        expect(time.monotonic() - started > 1, "after its tokens have refilled")
        sdk = clients(gateway.urls[0], f"denied-{index}", limit, max_retries=0)[index]
        create = (sdk.chat.completions if index == 0 else sdk.messages).create
        module = (openai, anthropic)[index]
        create(model="m", messages=message(9, 900), max_tokens=900)
        try:
            create(model="m", messages=message(9, 900), max_tokens=900)
        except module.RateLimitError as error:
            kind = error.body.get("type") if index == 0 else error.body["error"]["type"]
            expect(kind == ("tokens", "rate_limit_error")[index], error.body)
        else:
            raise AssertionError("admitted")
        try:
            create(model="m", messages=message(9, 9), max_tokens=5000)
        except module.BadRequestError as error:
            expect("never has more than" in str(error), error)
        else:
            raise AssertionError("a reservation above the burst is admitted")


def leave(binary, gateways):
    """Check the cost of aborted streams: at least the tokens that the client received, at most the reservation."""
    received = {}

    def client(index):
        choose = random.Random(index)
        for number in range(CUTS):
            call = f"{index}-{number}"
            chat, claude = clients(gateways[choose.randrange(2)].urls[0], f"left-{index % 4}", "left", max_retries=0, timeout=MAX_WAIT)
            most = choose.randint(1, 60)
            # The provider waits until the client has disconnected, or it streams until the gateway aborts the request.
            more = {"hold": most} if choose.random() < 0.5 else {"slow": 0.001}
            common = {"model": "m", "max_tokens": MAX_TOKENS, "messages": message(choose.randint(1, 9), 200, **more)}
            common |= {"stream": True, "extra_headers": {"x-call": call}}
            if choose.random() < 0.5:
                usage = choose.choice([{}, {"stream_options": {"include_usage": True}}])
                stream = chat.chat.completions.create(**common, **usage)
            else:
                stream = claude.messages.create(**common)
            received[call] = 0
            with stream:
                for event in stream:
                    received[call] += "tök" in event.model_dump_json()
                    if received[call] == most:
                        break
            expect(received[call] == most, f"{call}: {received[call]} of {most} tokens")

    with ThreadPoolExecutor(LEAVING) as pool:
        list(pool.map(client, range(LEAVING)))
    logged = lambda: [record for gateway in gateways for record in records(gateway) if record["route"] == "left"]
    eventually("all cut streams are logged", lambda: len(logged()) == LEAVING * CUTS)
    cuts = [(record, Provider.requests[record["request_id"]]) for record in logged()]
    eventually("all cut streams are aborted at the provider", lambda: all(request.ended for _, request in cuts if request.hold))
    names, settled = {}, Counter()
    for record, request in cuts:
        limit, streamed = record["limits"][0], received[request.call]
        names[request.identity] = limit["identity"]
        settled[request.identity] += limit["settled"]
        # The Messages API reports the input and one output token at the start of a stream. The Chat Completions API reports the usage at the end.
        tokens = request.input + 1 if "/messages" in record["path"] else request.estimated_input
        least, most = tokens + streamed, tokens + (streamed if request.hold else request.output)
        # The gateway reads the rest of the stream after the client has left, up to the report of the usage.
        if not limit.get("estimated"):
            least = most = request.input + request.output
        expect(least <= limit["settled"] <= most, f"settled to another cost than {least} to {most}: {record}")
        expect(request.hold == 0 or request.issued <= limit["settled"], f"less than the issued {request.issued}: {record}")
        expect(limit["settled"] <= limit["reserved"] == request.reserved, f"more than the reserved {request.reserved}: {record}")
        expect(request.hold == 0 or record["complete"] is False, record)
    for identity, total in settled.items():
        eventually(f"the total of {identity} is {total}", lambda: balance(binary, gateways[0], "left").get(names[identity]) == total)
        eventually(f"{total} of {identity} are gone", lambda: LEFT_QUOTA - remaining(binary, gateways[1], "left", identity) == total)
    held = [(record["limits"][0], request) for record, request in cuts if request.hold]
    sums = sum(request.issued for _, request in held), sum(limit["settled"] for limit, _ in held), sum(limit["reserved"] for limit, _ in held)
    expect(sums[0] <= sums[1] <= sums[2], sums)
    return f"{len(cuts)} streams cut by clients; {len(held)} of them: {sums[0]} tokens issued <= {sums[1]} settled <= {sums[2]} reserved"


class Load:
    """The load: 64 clients that stream through both gateways."""

    def __init__(self, gateways, redis):
        self.gateways, self.redis = gateways, redis
        self.outcomes = Counter()
        self.lock = threading.Lock()

    def count(self, outcome):
        with self.lock:
            self.outcomes[outcome] += 1

    def client(self, index):
        choose = random.Random(index)
        for number in range(ROUNDS):
            # Half of the clients use the gateway that is killed later.
            url = self.gateways[index % 2].urls[0]
            limit = "small" if choose.random() < 0.2 else "large"
            identity = "small" if limit == "small" else f"large-{index % 4}"
            chat, claude = clients(url, identity, limit, max_retries=0, timeout=60)
            common = {"model": "m", "max_tokens": MAX_TOKENS, "messages": message(choose.randint(1, 9), choose.randint(1, 60), slow=0.01)}
            leaves = choose.random() < 0.25
            try:
                if choose.random() < 0.5:
                    stream = chat.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
                else:
                    stream = claude.messages.create(**common, stream=True)
                for event, _ in enumerate(stream):
                    if leaves and event >= number:
                        stream.close()
                        break
                self.count("left" if leaves else "complete")
            except (openai.RateLimitError, anthropic.RateLimitError):
                self.count("denied")
            except (openai.InternalServerError, anthropic.InternalServerError):
                self.count("store unavailable")
            except (openai.APIConnectionError, anthropic.APIConnectionError, httpx.HTTPError, httpx2.HTTPError):
                self.count("connection lost")

    def run(self):
        with ThreadPoolExecutor(CLIENTS) as pool:
            done = [pool.submit(self.client, index) for index in range(CLIENTS)]
            streams = lambda: sum(1 for request in list(Provider.requests.values()) if request.ended)
            before = streams()
            eventually("a quarter of the streams ended", lambda: streams() - before > CLIENTS * ROUNDS // 8)
            self.outage = [time.time() - OUTAGE_MARGIN]
            self.redis.kill()
            self.redis.start()
            self.outage.append(time.time() + OUTAGE_MARGIN)
            before = streams()
            eventually("streams end after the restart of Redis", lambda: streams() - before > CLIENTS // 2)
            self.gateways[1].process.kill()
            for client in done:
                client.result()


def balance(binary, gateway, limit):
    """Return the usage totals of a limit in Redis, by hash of the identity."""
    command = [binary, "usage", "--config", f"{gateway.folder.name}/gateway.toml", "--limit", limit, "--by", "identity", "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {entry["identity"]: entry["cost"] for entry in report["usage"]}


def remaining(binary, gateway, limit, identity):
    """Return the remaining tokens of an identity."""
    command = [binary, "inspect", "--admin", gateway.admin, "--limit", limit, f"header:x-id={identity}", "--json"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)["limits"][0]["remaining"]


def overlaps(record, span):
    """Return whether a request was in flight at some time within `span`."""
    return record["time"] <= span[1] and record["time"] + record["duration_ms"] / 1000 >= span[0]


def compare(binary, gateways, load):
    """Compare the log records and the usage totals with the tokens that the provider issued."""
    survivor = gateways[0]
    mine = lambda: {record["request_id"]: record for record in records(survivor) if record["route"] in ("large", "small")}
    # The remaining gateway got half of the load's requests, and the ten requests before the load.
    eventually("the requests of the remaining gateway are logged", lambda: len(mine()) == CLIENTS // 2 * ROUNDS + 10)
    names, settled, bound, exact = {}, Counter(), Counter(), 0
    logged = mine() | {record["request_id"]: record for record in records(gateways[1]) if record["route"] in ("large", "small")}
    for request_id, request in Provider.requests.items():
        record = logged.get(request_id)
        if record is None:
            if request.identity not in ("small", *(f"large-{index}" for index in range(4))):
                continue
            # The gateway was killed before it logged this request, so it is unknown whether the request was settled.
            settled[request.identity] += 0
            bound[request.identity] += max(request.reserved, request.issued)
            continue
        limit = record["limits"][0]
        names[request.identity] = limit["identity"]
        cost = limit["settled"]
        if record["complete"] and not limit.get("estimated"):
            expect(cost == request.issued, f"settled to another cost than the issued {request.issued}: {record}")
            exact += 1
        expect(0 < cost <= max(limit["reserved"], request.issued), record)
        settled[request.identity] += cost
        # A settlement that gets no reply in the outage is not repeated. The whole reservation may then remain charged.
        is_certain = not overlaps(record, load.outage)
        bound[request.identity] += cost if is_certain else max(cost, limit["reserved"])
    # A check that got no reply in the outage may have charged its reservation, although the request got 503.
    unanswered = sum(1 for record in logged.values() if record["status"] == 503) * (MAX_TOKENS + 100)
    lines = []
    for limit, identities in [("large", [f"large-{index}" for index in range(4)]), ("small", ["small"])]:
        for identity in identities:
            total = lambda: balance(binary, survivor, limit)[names[identity]]
            most = bound[identity] + unanswered
            eventually(f"the total of {identity} is in its bounds", lambda: settled[identity] <= total() <= most)
            lines.append(f"{identity} {settled[identity]} <= {total()} <= {most}")
    issued = sum(request.issued for request in Provider.requests.values() if request.identity == "small")
    expect(issued <= SMALL_QUOTA, f"{issued} tokens of {SMALL_QUOTA} were issued")
    expect(load.outcomes["denied"] > 0 and load.outcomes["left"] > 0 and load.outcomes["connection lost"] > 0, load.outcomes)
    return f"{dict(load.outcomes)}; {exact} streams settled exactly; totals: {'; '.join(lines)}; issued to `small`: {issued} of {SMALL_QUOTA}"


def main():
    binary = sys.argv[1]
    for name in list(os.environ):
        if name.upper().startswith(("OPENAI_", "ANTHROPIC_")) or name.upper().endswith("_PROXY"):
            del os.environ[name]
    server = Quiet(("127.0.0.1", 0), Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    redis = Redis()
    config = configuration(redis.port, "%s:%d" % server.server_address)
    try:
        with Gateway(binary, config) as first, Gateway(binary, config) as second:
            shapes(first)
            back_off(first)
            print(leave(binary, [first, second]), flush=True)
            load = Load([first, second], redis)
            load.run()
            print(f"openai {openai.__version__}, anthropic {anthropic.__version__}: {compare(binary, [first, second], load)}", flush=True)
    finally:
        redis.kill()


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.SubprocessError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
