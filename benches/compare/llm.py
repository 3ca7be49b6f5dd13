#!/usr/bin/env python3
"""Compare LLM gateways: Sluicegate, LiteLLM with Redis, and Portkey's gateway, which has no limits.

The first part measures how many LLM tokens a limit of 100,000 tokens per minute admits if 5 or 10 clients send requests
of 20,000 tokens at the same time. The second part is the load of GoModel's benchmark: three APIs, with and without
streaming, with 10 concurrent requests. It measures the CPU time per request, the latency of the first byte, and the
memory at the end. The script prints tables and asserts nothing. `make bench-llm` installs the peers and runs it.
"""
import argparse, asyncio, json, os, pathlib, secrets, socket, statistics, subprocess, tempfile, time, urllib.request

LIMIT, COST, SECONDS = 100_000, 20_000, 20
INPUT = 20
KEY = "sk-bench-0123456789"

APIS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}

GATEWAY = """[server]
workers = {workers}
[[listener]]
address = "127.0.0.1:{port}"
[log]
access = "off"
[store]
url = "redis://127.0.0.1:{redis}/0"
timeout = "1s"
[limit.tokens]
by = "header:authorization"
algorithm = "fixed-window"
start = "first-request"
quota = "{quota}/min"
unit = "tokens"
cost = {{ llm = "auto" }}
[upstream.provider]
servers = ["http://127.0.0.1:{provider}"]
[[route]]
name = "llm"
path = "/v1/{{*rest}}"
upstream = "provider"
limits = ["tokens"]
"""

LITELLM = """model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{provider}/v1", api_key: {key}}}
  - model_name: c
    litellm_params: {{model: anthropic/c, api_base: "http://127.0.0.1:{provider}", api_key: {key}}}
litellm_settings:
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {redis}, supported_call_types: []}}
general_settings:
  custom_auth: bench_auth.authenticate
  master_key: sk-{master}
"""

# LiteLLM stores keys with individual limits in a database. To avoid the database, use LiteLLM's interface for custom
# authentication.
LITELLM_AUTH = """from litellm.proxy._types import UserAPIKeyAuth
async def authenticate(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, tpm_limit={quota})
"""


class Provider:
    """A fake LLM provider that responds after a delay and counts the tokens that it has issued."""

    def __init__(self, output, delay):
        self.output, self.delay, self.issued, self.admitted = output, delay, 0, 0

    async def serve(self, port):
        return await asyncio.start_server(self.connection, "127.0.0.1", port, backlog=1024)

    async def connection(self, reader, writer):
        try:
            while True:
                head, body = await read_message(reader)
                path = head.split(b" ", 2)[1].decode().partition("?")[0]
                if not body:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                self.issued += INPUT + self.output
                self.admitted += 1
                await asyncio.sleep(self.delay)
                kind, text = response(path.rsplit("/", 1)[1], json.loads(body).get("stream", False), self.output)
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def response(api, stream, output):
    """Return the media type and the text of a response: ten words and a usage of `output` tokens, as JSON or events."""
    words = ["word "] * 10
    if api == "messages":
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "c", "stop_sequence": None}
        usage = {"input_tokens": INPUT, "output_tokens": output}
        whole = {**message, "content": [{"type": "text", "text": "".join(words)}], "stop_reason": "end_turn", "usage": usage}
        events = [{"type": "message_start", "message": {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}},
                  {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                  *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words),
                  {"type": "content_block_stop", "index": 0},
                  {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": output}},
                  {"type": "message_stop"}]
    elif api == "responses":
        usage = {"input_tokens": INPUT, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": output,
                 "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": INPUT + output}
        common = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True, "tool_choice": "auto",
                  "tools": [], "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "temperature": 1.0, "top_p": 1.0}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "".join(words), "annotations": []}]}
        whole = {**common, "status": "completed", "output": [item], "usage": usage}
        events = [{"type": "response.created", "sequence_number": 0, "response": {**common, "status": "in_progress", "output": [], "usage": None}},
                  *({"type": "response.output_text.delta", "sequence_number": number + 1, "item_id": "msg_1", "output_index": 0,
                     "content_index": 0, "delta": word, "logprobs": []} for number, word in enumerate(words)),
                  {"type": "response.completed", "sequence_number": 11, "response": whole}]
    else:
        common = {"id": "chatcmpl-1", "created": 1, "model": "m"}
        usage = {"prompt_tokens": INPUT, "completion_tokens": output, "total_tokens": INPUT + output}
        message = {"role": "assistant", "content": "".join(words)}
        whole = {**common, "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
        chunk = {**common, "object": "chat.completion.chunk"}
        events = [*({**chunk, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in words),
                  {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                  {**chunk, "choices": [], "usage": usage}]
    if not stream:
        return "application/json", json.dumps(whole)
    named = api != "chat" and api != "completions"
    text = "".join((f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events)
    return "text/event-stream", text + ("" if named else "data: [DONE]\n\n")


async def read_message(reader, on_first=lambda: None):
    """Read a request or a response. Return two parts: the first line with the headers, and the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    on_first()
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:-2])
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return head, body
    return head, await reader.readexactly(int(fields.get(b"content-length", b"0")))


def request(api, stream, bound, headers):
    prompt = "Say ten words. " * 4
    body = {"model": "c" if api == "messages" else "m", "stream": stream}
    body |= {"input": prompt} if api == "responses" else {"messages": [{"role": "user", "content": prompt}]}
    if bound:
        body["max_output_tokens" if api == "responses" else "max_tokens"] = bound
    if api == "chat" and stream:
        body["stream_options"] = {"include_usage": True}
    text = json.dumps(body)
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (f"POST {APIS[api]} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\nauthorization: Bearer {KEY}\r\n"
            f"{extra}content-length: {len(text)}\r\n\r\n{text}").encode()


async def send(port, message, count, concurrency, until=None):
    """Send a message `count` times, but at most until the time `until`, over `concurrency` connections. Return the number
    of responses by status, and the times to the first byte in seconds."""
    statuses, firsts = {}, []
    left = iter(range(count))

    async def client():
        reader = writer = None
        for _ in left:
            if until and time.monotonic() > until:
                break
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            started = time.monotonic()
            writer.write(message)
            try:
                head, _ = await asyncio.wait_for(read_message(reader, lambda: firsts.append(time.monotonic() - started)), 60)
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.TimeoutError):
                statuses["lost"] = statuses.get("lost", 0) + 1
                writer = None
                continue
            status = int(head.split(b" ", 2)[1])
            statuses[status] = statuses.get(status, 0) + 1
            if b"connection: close" in head.lower():
                writer.close()
                writer = None
            if until and status != 200:
                # Wait after a denial, so that the client does not flood the gateway.
                await asyncio.sleep(0.1)
        if writer:
            writer.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return statuses, firsts


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Peer:
    """A running gateway, which may have several processes."""

    def __init__(self, name, command, port, headers=None, env=None, cwd=None):
        self.name, self.port, self.headers = name, port, headers or {}
        self.log = open(pathlib.Path(cwd or ".") / f"{name.split()[0]}.log", "w")
        self.process = subprocess.Popen(command, env={**os.environ, **(env or {})}, cwd=cwd, stdout=self.log, stderr=self.log)
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except ConnectionRefusedError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name} did not start: {pathlib.Path(self.log.name).read_text()[-3000:]}")
                time.sleep(0.1)

    def processes(self):
        """Return the process ids of the gateway and all its descendants."""
        found = [self.process.pid]
        for pid in found:
            for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
                found += [int(child) for child in (task / "children").read_text().split()]
        return found

    def cpu_seconds(self):
        ticks = (sum(int(field) for field in pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]) for pid in self.processes())
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self):
        """Return the proportional set size (PSS) of all processes in MiB, in which a shared page counts once."""
        sizes = (pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.processes())
        return sum(int(line.split()[1]) for text in sizes for line in text.splitlines() if line.startswith("Pss:")) / 1024

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(name, options, folder, provider, redis, quota):
    port = free_port()
    if name == "sluicegate":
        config = pathlib.Path(folder) / f"{port}.toml"
        config.write_text(GATEWAY.format(port=port, redis=redis, provider=provider, quota=quota, workers=options.workers))
        return Peer(name, [os.path.abspath(options.binary), "--config", str(config)], port, cwd=folder)
    if name == "litellm":
        (pathlib.Path(folder) / "bench_auth.py").write_text(LITELLM_AUTH.format(quota=quota))
        config = pathlib.Path(folder) / "litellm.yaml"
        config.write_text(LITELLM.format(provider=provider, redis=redis, key=KEY, master=secrets.token_hex(24)))
        command = [os.path.abspath(f"{options.litellm}/bin/litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port),
                   "--num_workers", str(options.workers)]
        env = {"PYTHONPATH": folder, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": f"{os.path.abspath(options.litellm)}/bin:{os.environ['PATH']}"}
        peer = Peer(name, command, port, env=env, cwd=folder)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2).read()
                return peer
            except OSError:
                time.sleep(0.2)
        raise SystemExit("litellm is not ready")
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"http://127.0.0.1:{provider}/v1"}
    command = ["node", os.path.abspath(f"{options.portkey}/node_modules/@portkey-ai/gateway/build/start-server.js"), "--headless", f"--port={port}"]
    return Peer(name, command, port, headers, env={"TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}, cwd=folder)


async def overrun(options, folder, redis, names):
    """Print how many tokens a limit of 100,000 tokens per minute admits, if each request uses 20,000 tokens."""
    print(f"issued within {SECONDS} s by a limit of {LIMIT:,} tokens per minute; each request uses {COST:,}")
    for name in names:
        for concurrency in options.concurrency:
            # Set `max_tokens` 200 below the cost, because the gateway adds its estimate of the input tokens.
            for stream, bound in [(False, COST - 200), (True, COST - 200), (False, None), (True, None)]:
                subprocess.run(["redis-cli", "-p", str(redis), "flushall"], check=True, capture_output=True)
                provider, port = Provider(COST - INPUT, 0.5), free_port()
                server = await provider.serve(port)
                peer = await asyncio.to_thread(start, name, options, folder, port, redis, LIMIT)
                try:
                    message = request("chat", stream, bound, peer.headers)
                    statuses, _ = await send(peer.port, message, 10**9, concurrency, until=time.monotonic() + SECONDS)
                finally:
                    await asyncio.to_thread(peer.stop)
                server.close()
                kind = ("streamed" if stream else "whole") + (", max_tokens" if bound else ", no maximum")
                print(f"{name:12s} {concurrency:2d} clients, {kind:20s} {provider.issued:9,d} tokens, {provider.issued / LIMIT:5.2f} times; {statuses}", flush=True)


async def load(options, folder, redis, names):
    """Print the CPU time per request, the latency of the first byte, and the memory of each gateway."""
    for name in names:
        count = options.requests if name == "sluicegate" else options.peer_requests
        provider, port = Provider(100, 0), free_port()
        server = await provider.serve(port)
        peer = await asyncio.to_thread(start, name, options, folder, port, redis, 10**12)
        try:
            for api in APIS:
                for stream in [False, True]:
                    headers = {**peer.headers}
                    if api == "messages" and name == "portkey":
                        headers |= {"x-portkey-provider": "anthropic"}
                    if api == "messages":
                        headers |= {"anthropic-version": "2023-06-01"}
                    message = request(api, stream, 200, headers)
                    await send(peer.port, message, max(count // 20, 20), 10)
                    before = peer.cpu_seconds()
                    statuses, firsts = await send(peer.port, message, count, 10)
                    cpu = (peer.cpu_seconds() - before) / count * 1e6
                    firsts.sort()
                    p50, p99 = (statistics.quantiles(firsts, n=100)[at] * 1000 for at in (49, 98))
                    kind = "streamed" if stream else "whole"
                    print(f"{name:12s} {api:10s} {kind:8s} {cpu:9,.0f} µs CPU, first byte p50 {p50:7.2f} ms, p99 {p99:7.2f} ms; {count} requests: {statuses}", flush=True)
            print(f"{name:12s} memory {peer.memory_mib():,.0f} MiB", flush=True)
        finally:
            await asyncio.to_thread(peer.stop)
        server.close()


async def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("binary")
    args.add_argument("--litellm", default="target/llm/litellm", help="virtual environment with LiteLLM")
    args.add_argument("--portkey", default="target/llm/portkey", help="directory with node_modules of Portkey's gateway")
    args.add_argument("--requests", type=int, default=8000)
    args.add_argument("--peer-requests", type=int, default=8000)
    args.add_argument("--concurrency", type=int, nargs="+", default=[5, 10])
    args.add_argument("--workers", type=int, default=1)
    args.add_argument("--only", nargs="+", default=["sluicegate", "litellm", "portkey"])
    args.add_argument("--part", choices=["overrun", "load", "both"], default="both")
    options = args.parse_args()
    with tempfile.TemporaryDirectory(prefix="llm-") as folder:
        redis_port = free_port()
        redis = subprocess.Popen(["redis-server", "--port", str(redis_port), "--save", "", "--bind", "127.0.0.1"], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            while subprocess.run(["redis-cli", "-p", str(redis_port), "ping"], capture_output=True).stdout != b"PONG\n":
                time.sleep(0.05)
            if options.part != "load":
                # Without Portkey's hosted service, its gateway has no limits.
                await overrun(options, folder, redis_port, [name for name in options.only if name != "portkey"])
            if options.part != "overrun":
                await load(options, folder, redis_port, options.only)
        finally:
            redis.terminate()
            redis.wait()


if __name__ == "__main__":
    asyncio.run(main())
