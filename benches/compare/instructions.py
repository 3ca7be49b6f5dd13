#!/usr/bin/env python3
"""Count the instructions that the gateway executes in user mode per request, with callgrind.

The result does not depend on the speed or the load of the machine. Sixteen connections send their requests at the same
time, so that checks are batched as under load. A short and a long run are counted. Their difference does not include the
instructions of the start. The upstream is a second gateway, and Redis is a separate server. LLM chat requests of 2 KiB
are measured on a route that counts their LLM tokens and on a route that does not. The script prints a table and asserts
nothing. `make bench-instructions` builds the gateway and runs this script. It needs valgrind and redis-server.
"""
import argparse, contextlib, json, pathlib, re, socket, subprocess, tempfile, time

CONNECTIONS, SHORT, LONG = 16, 50, 250
# Length of a chat request in bytes, and the number of deltas of a stream.
CHAT, EVENTS = 2048, 200

UPSTREAM = """[[listener]]
address = "127.0.0.1:{upstream}"
[log]
access = "off"
[[route]]
name = "all"
path = "/{{*rest}}"
respond = {{ status = 200, body = "{body}" }}
[[route]]
name = "chat"
path = "/chat/{{*rest}}"
respond = {{ status = 200, body = {chat}, content_type = "application/json" }}
[[route]]
name = "stream"
path = "/stream/{{*rest}}"
respond = {{ status = 200, body = {stream}, content_type = "text/event-stream" }}
"""

GATEWAY = """[server]
workers = {workers}
[[listener]]
address = "127.0.0.1:{port}"
[log]
access = "off"
[store]
{store}
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[limit.wide]
by = "api-key"
quota = "1000000/s"
[limit.second]
by = "api-key"
quota = "1000000/min"
algorithm = "fixed-window"
[limit.third]
by = "ip"
quota = "100000000/hour"
algorithm = "fixed-window"
[limit.tight]
by = "api-key"
quota = "1/hour"
[limit.tokens]
by = "api-key"
quota = "1000000000/s"
unit = "tokens"
cost = {{ llm = "auto" }}
[upstream.up]
servers = ["http://127.0.0.1:{upstream}"]
"""

ROUTES = {"plain": "", "one": '"wide"', "three": '"wide", "second", "third"', "deny": '"tight"',
          "chat/plain": '"wide"', "chat/tokens": '"tokens"', "stream/plain": '"wide"', "stream/tokens": '"tokens"'}

CASES = [("plain", "memory", "plain"), ("plain, access log", "memory", "logged/plain"), ("one limit in memory", "memory", "one"), ("one limit in Redis", "redis", "one"),
         ("three limits in Redis", "redis", "three"), ("denied", "redis", "deny"),
         ("decision", "memory", "decide/plain"), ("decision, one limit", "redis", "decide/one"),
         ("denied decision", "redis", "decide/deny"),
         ("chat", "memory", "chat/plain"), ("chat, tokens", "memory", "chat/tokens"),
         ("stream", "memory", "stream/plain"), ("stream, tokens", "memory", "stream/tokens")]


def chat_response():
    message = {"role": "assistant", "content": "An answer of some length. " * 30}
    usage = {"prompt_tokens": 500, "completion_tokens": 200, "total_tokens": 700, "prompt_tokens_details": {"cached_tokens": 0}}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "model": "m",
                       "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


def stream_response():
    common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1764000000, "model": "m", "system_fingerprint": "fp_1"}
    deltas = [{"choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}]}] * EVENTS
    chunks = [*deltas, {"choices": [], "usage": {"prompt_tokens": 500, "completion_tokens": EVENTS}}]
    return "".join(f"data: {json.dumps({**common, **chunk})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def upstream_configuration(port):
    return UPSTREAM.format(upstream=port, body="x" * 100, chat=json.dumps(chat_response()), stream=json.dumps(stream_response()))


def request(route, key):
    """Return a request without a body or, for chat and stream routes, a chat request of 2 KiB."""
    route = route.removeprefix("logged/")
    if route.startswith("decide/"):
        target = route.removeprefix("decide")
        return (f"GET /decide/forwarded HTTP/1.1\r\nhost: gateway\r\nx-api-key: {key}\r\nx-forwarded-method: GET\r\nx-forwarded-uri: {target}\r\n"
                "x-forwarded-host: gateway\r\nx-forwarded-proto: http\r\nx-forwarded-for: 192.0.2.1\r\n\r\n").encode()
    if "/" not in route:
        return f"GET /{route} HTTP/1.1\r\nhost: gateway\r\nx-api-key: {key}\r\n\r\n".encode()
    body = {"model": "m", "max_tokens": 500, "stream": route.startswith("stream"), "messages": [{"role": "user", "content": ""}]}
    body["messages"][0]["content"] = "x" * (CHAT - len(json.dumps(body)))
    text = json.dumps(body)
    return f"POST /{route} HTTP/1.1\r\nhost: gateway\r\nx-api-key: {key}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def connect(port, process):
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise SystemExit(f"a process ended with {process.returncode} before it listened on {port}")
            time.sleep(0.02)


def answer(connection, pending):
    """Read one response, which has a Content-Length."""
    while b"\r\n\r\n" not in pending:
        pending += receive(connection)
    head, rest = pending.split(b"\r\n\r\n", 1)
    length = int(re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)[1])
    while len(rest) < length:
        rest += receive(connection)
    return int(head.split(b" ", 2)[1]), rest[length:]


def receive(connection):
    received = connection.recv(65536)
    if not received:
        raise SystemExit("the gateway closed a connection")
    return received


def route_table(name, limits):
    identify = 'identify = ["keys"]\n' if limits else ""
    path, name = name, name.replace("/", "-")
    return f'[[route]]\nname = "{name}"\npath = "/{path}"\nupstream = "up"\n{identify}limits = [{limits}]\n'


def configuration(directory, port, store, route, upstream, workers=1):
    """Write the configuration of a gateway that serves a route, and return its path."""
    is_decision = route.startswith("decide/")
    # A listener for decisions serves no routes that count tokens.
    routes = "".join(route_table(name, limits) for name, limits in ROUTES.items() if not (is_decision and "/" in name))
    text = GATEWAY.format(port=port, store=store, upstream=upstream, workers=workers) + routes
    if route.startswith("logged/"):
        # The gateway watches the directory of the configuration, where each write to the log would be an event.
        (directory / "logs").mkdir(exist_ok=True)
        text = text.replace('access = "off"', f'access = "{directory}/logs/access.log"', 1)
    if is_decision:
        text = text.replace("[log]", 'protocol = "decisions"\n[client_ip]\ntrusted_proxies = ["127.0.0.1"]\n[log]', 1)
    config = directory / f"{port}.toml"
    config.write_text(text)
    return str(config)


def ask(gateway, port, route, rounds, connections=CONNECTIONS, on_round=lambda number: None):
    """Send `rounds` requests on each connection. The connections send at the same time. Call `on_round` before each round,
    and after the last one."""
    clients = [(connect(port, gateway), b"") for _ in range(connections)]
    for number in range(rounds):
        on_round(number)
        for index, (client, _) in enumerate(clients):
            client.sendall(request(route, f"{port}-{index}"))
        for index, (client, pending) in enumerate(clients):
            status, pending = answer(client, pending)
            expected = 429 if route.endswith("deny") and number > 0 else 200
            if status != expected:
                raise SystemExit(f"{route}: {status} instead of {expected}")
            clients[index] = (client, pending)
    on_round(rounds)


@contextlib.contextmanager
def started(command, directory, **options):
    """Run a gateway, and end it."""
    with open(directory / "log", "w") as log:
        gateway = subprocess.Popen(command, stdout=log, stderr=log, **options)
    try:
        yield gateway
    finally:
        gateway.terminate()
        gateway.wait()


@contextlib.contextmanager
def servers(binary):
    """Run a Redis and an upstream. Yield a directory, the keys of `[store]` for each kind, and the port of the upstream."""
    with tempfile.TemporaryDirectory(prefix="instructions-") as name:
        directory, redis_port, upstream_port = pathlib.Path(name), free_port(), free_port()
        (directory / "upstream.toml").write_text(upstream_configuration(upstream_port))
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        redis = subprocess.Popen(["redis-server", "--port", str(redis_port), "--save", "", "--bind", "127.0.0.1"], cwd=name, **quiet)
        upstream = subprocess.Popen([binary, "--config", name + "/upstream.toml"], **quiet)
        try:
            for port, process in ((redis_port, redis), (upstream_port, upstream)):
                connect(port, process).close()
            yield directory, {"memory": 'url = "memory:"', "redis": f'url = "redis://127.0.0.1:{redis_port}/0"\ntimeout = "10s"'}, upstream_port
        finally:
            for process in (upstream, redis):
                process.terminate()
                process.wait()


def instructions(binary, directory, store, route, rounds, upstream):
    """Return the number of instructions that a gateway executes for `rounds` rounds, with start and shutdown."""
    port = free_port()
    config = configuration(directory, port, store, route, upstream)
    count = directory / "count"
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={count}"]
    with started([*valgrind, binary, "--config", config], directory) as gateway:
        ask(gateway, port, route, rounds)
    return int(re.search(r"refs: +([\d,]+)", count.read_text())[1].replace(",", ""))


def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("binary")
    args.add_argument("--only", default="", help="measure only the cases whose route contains this text")
    args.add_argument("--route", help="measure only this route")
    options = args.parse_args()
    binary, cases = options.binary, [case for case in CASES if options.only in case[2] and options.route in (None, case[2])]
    with servers(binary) as (directory, stores, upstream_port):
        print("user instructions for each request")
        counts = {}
        for label, store, route in cases:
            short, long = (instructions(binary, directory, stores[store], route, rounds, upstream_port) for rounds in (SHORT, LONG))
            counts[route] = (long - short) / (LONG - SHORT) / CONNECTIONS
            print(f"{label:24s} {counts[route]:9,.0f}", flush=True)
    for other, proxied in (("logged/plain", "plain"), ("decide/plain", "plain"), ("decide/deny", "deny")):
        if {other, proxied} <= counts.keys():
            print(f"{other}: {counts[other] / counts[proxied]:.2f} times {proxied}")
    if not {"chat/plain", "chat/tokens", "stream/plain", "stream/tokens"} <= counts.keys():
        return
    chat, stream = (counts[f"{kind}/tokens"] - counts[f"{kind}/plain"] for kind in ("chat", "stream"))
    print(f"tokens of a chat request: {chat:,.0f} more, {counts['chat/tokens'] / counts['chat/plain']:.2f} times")
    print(f"tokens of a stream: {stream:,.0f} more, {counts['stream/tokens'] / counts['stream/plain']:.2f} times")
    print(f"of each of its {EVENTS} events, less the request: {(stream - chat) / EVENTS:,.0f}")


if __name__ == "__main__":
    main()
