"""Cases of nginx-tests and HAProxy's reg-tests that require several requests or a special configuration."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import h2.config
import h2.connection
import h2.events
import servers
from rows import get, response
from upstream import Upstream

HANG = 10
ROUTE = '[[route]]\nname = "all"\npath = "/{*rest}"\nupstream = "application"\n'


class Setting:
    """A gateway in front of upstreams."""

    def __init__(self, binary, text, responses=None, upstreams=1, listener=""):
        self.upstreams = [Upstream(responses) for _ in range(upstreams)]
        addresses = json.dumps([f"http://127.0.0.1:{each.port}" for each in self.upstreams])
        text = text.replace("UPSTREAMS", addresses)
        gateway = servers.sluicegate(
            binary,
            f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
{listener}
{"" if "upstream.application" in text else f"[upstream.application]{chr(10)}servers = {addresses}"}
{text}
""",
        )
        self.port = int(gateway.urls[0].rpartition(":")[2])
        self.seen = self.upstreams[0].seen

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), HANG)

    def status(self, target, *lines, **options):
        with self.connect() as stream:
            return exchange(stream, get(target, *lines, **options))[0]


def exchange(stream, data, method="GET"):
    """Send a request. Return the status, the headers and the body of the response."""
    stream.sendall(data)
    return read(stream, method)


def read(stream, method="GET"):
    answer = http.client.HTTPResponse(stream, method=method)
    answer.begin()
    return answer.status, answer.headers, answer.read() if answer.status != 101 else b""


def equal(found, expected):
    return [] if found == expected else [f"{found} instead of {expected}"]


def limits(report, binary):
    """limit_req.t, limit_req2.t, limit_req_delay.t: nginx uses a leaky bucket, Sluicegate a token bucket."""
    slow = '[limit.slow]\nby = "query:a"\nquota = "1/hour"\nburst = 1\non_missing = "skip"\n'
    fast = '[limit.fast]\nby = "query:b"\nquota = "1000/s"\nburst = 1000\non_missing = "skip"\n'
    second = '[limit.second]\nby = "query:c"\nquota = "1/s"\nburst = 1\non_missing = "skip"\n'
    delayed = '[limit.delayed]\nby = "query:d"\nquota = "2/s"\nburst = 1\nmax_wait = "5s"\nmax_queue = 1\non_missing = "skip"\n'
    setting = Setting(binary, f'{slow}{fast}{second}{delayed}{ROUTE}limits = ["slow", "fast", "second", "delayed"]\n')
    name = "limit_req: status of a denial: 429 in place of 503"
    report.case(name, *equal([setting.status("/?a=0") for _ in range(3)], [200, 429, 429]))
    report.case("limit_req2: requests without a key are not limited", *equal([setting.status("/") for _ in range(3)], [200] * 3))
    report.case("limit_req2: fast limit", *equal([setting.status("/?b=1") for _ in range(5)], [200] * 5))
    report.case("limit_req2: both limits", *equal([setting.status("/?a=2&b=2") for _ in range(2)], [200, 429]))
    report.case("limit_req2: another key of the slow limit", *equal(setting.status("/?a=3"), 200))
    with setting.connect() as stream:
        statuses = [exchange(stream, get("/?c=1"))[0] for _ in range(2)]
        wait = int(exchange(stream, get("/?c=1"))[1]["retry-after"])
        # Wait for the time that `Retry-After` states.
        time.sleep(wait)
        statuses.append(exchange(stream, get("/?c=1"))[0])
    report.case("limit_req: denied requests are not counted", *equal(statuses, [200, 429, 200]))
    # Of two more requests, one waits for the next token, and the other one finds the queue full.
    report.case("limit_req_delay: not delayed", *equal(setting.status("/?d=1"), 200))

    def timed(_):
        began = time.monotonic()
        return setting.status("/?d=1"), time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(timed, range(2)))
    report.case("limit_req_delay: one is delayed, one rejected", *equal([status for status, _ in found], [200, 429]))
    report.case("limit_req_delay: the delay", *([] if 0.2 < found[0][1] < 5 else [f"{found}"]))


def concurrency(report, binary):
    """limit_conn.t, h2_limit_conn.t: requests in flight."""
    gate = threading.Event()

    def held(_):
        gate.wait(HANG)
        return [response("Content-Length: 2", body=b"ok")]

    limit = '[limit.one]\nby = "query:k"\nquota = "1"\nalgorithm = "concurrency"\non_missing = "skip"\n'
    setting = Setting(binary, f'{limit}{ROUTE}limits = ["one"]\n', {"/held": held})
    with setting.connect() as first:
        first.sendall(get("/held?k=1"))
        while not setting.seen:
            time.sleep(0.01)
        report.case("limit_conn: rejected", *equal(setting.status("/?k=1"), 429))
        report.case("limit_conn: another key", *equal(setting.status("/?k=2"), 200))
        report.case("limit_conn: unlimited", *equal(setting.status("/"), 200))
        gate.set()
        report.case("limit_conn: first request", *equal(read(first)[0], 200))
    report.case("limit_conn: after the first", *equal(setting.status("/?k=1"), 200))
    gate.clear()
    setting.seen.clear()
    client = Http2(setting.port)
    stream = client.request("/held?k=3")
    while not setting.seen:
        time.sleep(0.01)
    report.case("h2_limit_conn: rejected", *equal(client.status(client.request("/?k=3")), 429))
    client.reset(stream)
    statuses = []
    deadline = time.monotonic() + HANG
    while statuses[-1:] != [200] and time.monotonic() < deadline:
        statuses.append(client.status(client.request("/?k=3")))
    report.case("h2_limit_conn: RST_STREAM frees the permit", *equal(statuses[-1:], [200]))
    gate.set()


class Http2:
    """An HTTP/2 client with several streams."""

    def __init__(self, port):
        self.stream = socket.create_connection(("127.0.0.1", port), HANG)
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="latin-1"))
        self.connection.initiate_connection()
        self.statuses, self.ended = {}, set()

    def request(self, path, method="GET", body=None):
        stream = self.connection.get_next_available_stream_id()
        lines = [(":method", method), (":scheme", "http"), (":authority", "gateway.test"), (":path", path)]
        self.connection.send_headers(stream, lines, end_stream=body is None)
        if body is not None:
            self.connection.send_data(stream, body, end_stream=True)
        self.stream.sendall(self.connection.data_to_send())
        return stream

    def reset(self, stream):
        self.connection.reset_stream(stream, 8)
        self.stream.sendall(self.connection.data_to_send())

    def status(self, stream):
        while stream not in self.ended:
            data = self.stream.recv(1 << 16)
            if not data:
                return "closed"
            for event in self.connection.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    self.statuses[event.stream_id] = int(dict(event.headers)[":status"])
                elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                    self.ended.add(event.stream_id)
            self.stream.sendall(self.connection.data_to_send())
        return self.statuses.get(stream, "reset")


def bodies(report, binary):
    """h2_limit_req.t, proxy_request_buffering.t: bodies of limited and pipelined requests."""
    limit = '[limit.two]\nby = "route"\nquota = "2/24h"\nalgorithm = "sliding-log"\n'
    limited = '[[route]]\nname = "limited"\npath = "/limited"\nupstream = "application"\nlimits = ["two"]\n'
    setting = Setting(binary, f"{limit}{limited}{ROUTE}")
    client = Http2(setting.port)
    statuses = [client.status(client.request("/limited", "POST", body)) for body in (b"TEST", b"", b"TEST2", b"TEST3")]
    report.case("h2_limit_req: admitted and denied requests with bodies", *equal(statuses, [200, 200, 429, 429]))
    report.case("h2_limit_req: bodies of the admitted", *equal([each["body"] for each in setting.seen], ["TEST", ""]))
    report.case("h2_limit_req: the next request", *equal(client.status(client.request("/next")), 200))
    sizes = [10, 1280, 5120, 6]
    for order in [sizes, sizes[1:] + sizes[:1]]:
        setting.seen.clear()
        with setting.connect() as stream:
            stream.sendall(b"".join(get(f"/{size}", method="POST", body=b"x" * size) for size in order))
            reader = stream.makefile("rb")
            report.case(f"proxy_request_buffering: pipelined bodies {order}", *equal([pipelined(reader) for _ in order], order))
    with setting.connect() as stream:
        stream.sendall(b"".join(get("/limited", method="POST", body=b"x" * size) for size in sizes) + get("/last"))
        reader = stream.makefile("rb")
        found = [pipelined(reader) for _ in range(5)]
        report.case("proxy_request_buffering: discarded bodies, pipelined", *equal(found, [429] * 4 + [0]))


def pipelined(reader):
    """Read one of several pipelined responses. Return the length of the body that the upstream received, or the status of a rejection."""
    status = int(reader.readline().split()[1])
    length = 0
    while (line := reader.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    body = json.loads(reader.read(length))
    return len(body["body"]) if status == 200 else status


def connections(report, binary):
    """proxy_keepalive.t, http_reuse_always.vtc: upstream connections are reused."""
    setting = Setting(binary, f"{ROUTE}\n[server]\nworkers = 1\n")
    used = []
    with setting.connect() as stream:
        for method, body in [("GET", b""), ("HEAD", b""), ("POST", b"body"), ("GET", b""), ("DELETE", b"")]:
            exchange(stream, get(method=method, body=body), method)
            used.append(setting.seen[-1]["connection"])
    report.case("proxy_keepalive: one connection for five requests", *equal(set(used), {used[0]}))
    with setting.connect() as stream:
        exchange(stream, get())
        report.case("http_reuse_always: the connection of another client", *equal(setting.seen[-1]["connection"], used[0]))


def retries(report, binary):
    """proxy_next_upstream.t, proxy_next_upstream_tries.t, proxy_non_idempotent.t."""
    bad = {"/": [], "/500": [response("Content-Length: 0", status="500 No")]}

    def failing(count):
        text = f"[upstream.application]\nservers = UPSTREAMS\nretries = {count}\n{ROUTE}\n[server]\nworkers = 1\n"
        setting = Setting(binary, text, bad, upstreams=3)
        return setting, lambda: sum(len(each.seen) for each in setting.upstreams)

    setting, tries = failing(2)
    report.case("proxy_next_upstream: all fail", *equal(setting.status("/"), 502))
    report.case("proxy_next_upstream: all are tried once", *equal([len(each.seen) for each in setting.upstreams], [1, 1, 1]))
    setting, tries = failing(1)
    report.case("proxy_next_upstream_tries: one retry", *equal((setting.status("/"), tries()), (502, 2)))
    setting, tries = failing(2)
    report.case("proxy_non_idempotent: POST is not sent again", *equal((setting.status("/", method="POST", body=b"x"), tries()), (502, 1)))
    setting, tries = failing(2)
    report.case("proxy_next_upstream: a 500 is a response", *equal((setting.status("/500"), tries()), (500, 1)))
    closed = servers.free_ports(1)[0]
    text = f'[upstream.application]\nservers = ["http://127.0.0.1:{closed}", "http://127.0.0.1:PORT"]\n{ROUTE}'
    upstream = Upstream()
    setting = Setting(binary, text.replace("PORT", str(upstream.port)))
    report.case("proxy_next_upstream: a refused connection, GET", *equal([setting.status("/") for _ in range(4)], [200] * 4))
    report.case("proxy_next_upstream: a refused connection, POST", *equal(setting.status("/", method="POST", body=b"x"), 200))


def upgrades(report, binary):
    """proxy_upgrade.t, proxy_websocket.t, protocol_upgrade.vtc."""
    # The bytes after the handshake belong to the other protocol.
    switched = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: custom\r\n\r\nbar"
    text = '[[route]]\nname = "socket"\npath = "/socket"\nupstream = "application"\nwebsocket = true\n' + ROUTE
    setting = Setting(binary, text, {"/socket": [switched, None]})
    lines = "Connection: Upgrade", "Upgrade: custom"
    with setting.connect() as stream:
        stream.sendall(get("/socket", *lines) + b"foo")
        reader = stream.makefile("rb")
        report.case("proxy_upgrade: handshake", *equal(reader.readline(), b"HTTP/1.1 101 Switching Protocols\r\n"))
        while reader.readline() != b"\r\n":
            pass
        report.case("proxy_upgrade: bytes after the handshake", *equal(reader.read(3), b"bar"))
    setting.upstreams[0].responses.clear()
    for name, target, upgrade in [("a route without websocket", "/plain", "custom"), ("h2c", "/socket?h2c", "h2c")]:
        setting.seen.clear()
        status = setting.status(target, "Connection: Upgrade", f"Upgrade: {upgrade}")
        received = {key.lower() for key, _ in setting.seen[0]["headers"]}
        report.case(f"protocol_upgrade: {name}", *equal((status, "upgrade" in received), (200, False)))


def proxy_headers(report, binary):
    """proxy_protocol.t, except-forwardfor-originalto.vtc, ifnone-forwardfor.vtc, forwarded-header-7239.vtc."""
    trusted = '[client_ip]\ntrusted_proxies = ["127.0.0.0/8"]\n'
    setting = Setting(binary, f"{trusted}{ROUTE}", listener="proxy_protocol = true")
    for name, line, client in [
        ("tcp4", "PROXY TCP4 192.0.2.1 192.0.2.2 123 5678", "192.0.2.1"),
        ("tcp6", "PROXY TCP6 2001:DB8::1 2001:DB8::2 123 5678", "2001:db8::1"),
        ("unknown", "PROXY UNKNOWN", "127.0.0.1"),
        ("unknown with addresses", "PROXY UNKNOWN 1 2 3 4", "127.0.0.1"),
    ]:
        with setting.connect() as stream:
            stream.sendall(f"{line}\r\n".encode())
            status, _, body = exchange(stream, get())
        received = {key.lower(): value for key, value in json.loads(body)["headers"]}
        report.case(f"proxy_protocol: {name}", *equal((status, received.get("x-forwarded-for")), (200, client)))
    for name, text, sent, forwarded in [
        ("of an untrusted client", "", "198.51.100.7", "127.0.0.1"),
        ("of a trusted proxy", trusted, "198.51.100.7", "198.51.100.7, 127.0.0.1"),
    ]:
        setting = Setting(binary, f"{text}{ROUTE}")
        setting.status("/", f"X-Forwarded-For: {sent}")
        received = {key.lower(): value for key, value in setting.seen[0]["headers"]}
        report.case(f"forwardfor: X-Forwarded-For {name}", *equal(received["x-forwarded-for"], forwarded))
    setting.status("/", "Forwarded: for=198.51.100.7;proto=https")
    received = {key.lower(): value for key, value in setting.seen[1]["headers"]}
    report.case("forwarded-header-7239: of a trusted proxy", *equal(received["forwarded"].startswith("for=198.51.100.7;proto=https, for=127.0.0.1"), True))


def check(report, binary):
    for each in [limits, concurrency, bodies, connections, retries, upgrades, proxy_headers]:
        each(report, binary)
