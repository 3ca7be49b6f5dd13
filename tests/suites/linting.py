#!/usr/bin/env python3
"""httplint checks every kind of response of the gateway, and REDbot checks resources: `make test-suites`.

    linting.py BINARY

httplint reads single responses. REDbot also sends its own requests to test ranges, content codings and validators.
"""

import http.client
import json
import socket
import sys
import time
from configparser import ConfigParser
from email.utils import formatdate
from importlib.metadata import version

import h2.config
import h2.connection
import h2.events
import servers
import thor
from gateway import ROOT
from httplint import HttpRequestLinter, HttpResponseLinter
from httplint.note import levels
from redbot.resource import HttpResource
from report import Report
from upstream import Upstream

HOST = "gateway.test"
TOKEN = "token-of-the-administrator"
DIALECTS = ["ietf", "draft-07", "draft-03", "github", "openai", "anthropic"]
ORIGIN = "https://app.example.com"
# The password is `password`.
USERS = "someone:$apr1$abcdefgh$FBwExRW4dCc8aL.OvjpIE1\n"

# Responses that caches may store for a heuristic time: cases, kind of response, and who sets Cache-Control.
OPEN_TO_CACHES = [
    *(
        (case, "`respond`", "`response_headers` of the route can set it")
        for case in ("respond*", "admitted, *", "CORS", "HTTP/1.0", "HTTP/2: respond", "REDbot: own")
    ),
    ("redirect to https", "`redirect`", "`response_headers` of the route can set it"),
    *((case, "the response of the upstream", "the gateway forwards the response unchanged") for case in ("proxied, limited", "REDbot: echo")),
]

# Explained findings: case, finding, reason.
EXPLANATIONS = [
    ("*", "STATUS_BAD_REQUEST *", "the case is an invalid request"),
    ("long target", "STATUS_URI_TOO_LONG *", "the case is a long target"),
    *((case, "FRESHNESS_HEURISTIC *", f"{what} without Cache-Control: {who}") for case, what, who in OPEN_TO_CACHES),
    (
        "HTTP/2: large header",
        "DATE_CLOCKLESS *",
        "the crate h2 rejects headers beyond `max_header_size` with this response, before it calls hyper, which adds Date",
    ),
]


def page(request):
    """Respond with a page that caches can store and validate."""
    date = f"Date: {formatdate(usegmt=True)}\r\n".encode()
    fields = date + b'ETag: "a1"\r\nCache-Control: max-age=60\r\n'
    if ("if-none-match", '"a1"') in [(name.lower(), value) for name, value in request["headers"]]:
        return [b"HTTP/1.1 304 Not Modified\r\n" + fields + b"\r\n"]
    return [b"HTTP/1.1 200 OK\r\n" + fields + b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 5\r\n\r\npage\n"]


# The responses of the upstream, by path.
RESPONSES = {
    "/page": page,
    "/chunks": [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nTransfer-Encoding: chunked\r\nCache-Control: no-store\r\n\r\n5\r\npage\n\r\n0\r\n\r\n"
    ],
    "/empty": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "/invalid": [b"HTTP/1.1 two hundred\r\n\r\n"],
    "/late": [None],
    "/upgrade": [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
        None,
    ],
}


def configuration(upstream, closed):
    certs = ROOT / "tests/certs"
    limits, routes = "", ""

    def route(name, more, path=None):
        nonlocal routes
        routes += f'[[route]]\nname = "{name}"\npath = "{path or "/" + name}"\nhosts = ["{HOST}", "127.0.0.1"]\n{more}\n'

    for name in RESPONSES:
        route(name[1:], 'upstream = "application"' + ("\nwebsocket = true" if name == "/upgrade" else ""))
    route("echo", 'upstream = "application"\nmethods = ["GET", "POST", "HEAD"]\nmax_body = "1KiB"')
    route("refused", 'upstream = "closed"')
    own = 'respond = { status = 200, body = "own\\n" }'
    route("own", own)
    route("nothing", "respond = { status = 204 }")
    route("gone", 'respond = { status = 410, body = "gone\\n" }')
    for provider in ["keys", "tokens", "people"]:
        route(provider, f'require = ["{provider}"]\n{own}')
    route("any", f'require = [["keys"], ["tokens"], ["people"]]\n{own}')
    route("denied", f'deny = ["127.0.0.0/8"]\n{own}')
    for dialect in DIALECTS:
        route(dialect, f'limits = ["once"]\nratelimit_headers = ["{dialect}"]\n{own}')
    route("none", f'limits = ["once"]\nratelimit_headers = []\n{own}')
    route("proxied-limit", 'limits = ["once"]\nupstream = "application"')
    route("cors", f'methods = ["GET", "PUT"]\nlimits = ["once"]\n{own}\n[route.cors]\norigins = ["{ORIGIN}"]\nheaders = ["x-api-key"]\nmax_age = "10m"')
    route("moved", 'redirect = { to = "/own" }')
    route("secure", 'redirect = { scheme = "https", status = 301 }')
    route("other", 'redirect = { to = "https://other.test/", status = 307 }')
    route("slash", f'trailing_slash = "redirect"\n{own}', "/slash/")
    route("call", 'limits = ["once"]\nupstream = "grpc"', "/test.Echo/Unary")
    route("rpc", f'limits = ["tool"]\n{own}')
    limits += '[limit.once]\nby = "route"\nquota = "1/24h"\nalgorithm = "sliding-log"\n'
    limits += '[limit.tool]\nby = "mcp:tool"\nquota = "1/24h"\nalgorithm = "sliding-log"\n'
    return f"""
[server]
body_idle_timeout = "300ms"
block_unknown_hosts = true
[admin]
address = "127.0.0.1:0"
token = "{TOKEN}"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[auth.keys]
kind = "api-key"
consumers = "consumers.toml"
[auth.tokens]
kind = "jwt"
jwks_file = "{certs}/jwks.json"
[auth.people]
kind = "basic"
users = "users"
[upstream.application]
servers = ["http://127.0.0.1:{upstream}"]
response_timeout = "300ms"
[upstream.grpc]
servers = ["http://127.0.0.1:{upstream}"]
protocol = "http2"
[upstream.closed]
servers = ["http://127.0.0.1:{closed}"]
{limits}
{routes}
"""


def without_store(closed):
    return f"""
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[admin]
address = "127.0.0.1:0"
[store]
url = "redis://127.0.0.1:{closed}/0"
[limit.strict]
by = "route"
quota = "1/s"
on_store_error = "deny"
[[route]]
name = "strict"
path = "/strict"
limits = ["strict"]
respond = {{ status = 200 }}
"""


def request(method, target, headers=(), body=b"", host=HOST):
    lines = [("Host", host), ("User-Agent", "suite"), *headers]
    if body:
        lines.append(("Content-Length", str(len(body))))
    return f"{method} {target} HTTP/1.1\r\n".encode() + b"".join(f"{name}: {value}\r\n".encode() for name, value in lines) + b"\r\n" + body


def exchange(port, data, method):
    """Send bytes. Return the version, status, reason phrase, headers and body of the response."""
    with socket.create_connection(("127.0.0.1", port), 10) as stream:
        stream.sendall(data)
        response = http.client.HTTPResponse(stream, method=method)
        response.begin()
        body = b"" if response.status == 101 else response.read()
        headers = [(name.encode(), value.encode("latin-1")) for name, value in response.headers.items()]
        return b"1.%d" % (response.version - 10), response.status, response.reason.encode(), headers, body


def exchange2(port, method, target, headers, body):
    """Send a request over HTTP/2. Return the same as `exchange`."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
    with socket.create_connection(("127.0.0.1", port), 10) as stream:
        connection.initiate_connection()
        pseudo = [(":method", method), (":scheme", "http"), (":authority", HOST), (":path", target), ("user-agent", "suite")]
        connection.send_headers(1, [*pseudo, *headers], end_stream=not body)
        if body:
            connection.send_data(1, body, end_stream=True)
        stream.sendall(connection.data_to_send())
        found, received = [], b""
        while True:
            for event in connection.receive_data(stream.recv(1 << 16)):
                if isinstance(event, h2.events.ResponseReceived):
                    found = event.headers
                elif isinstance(event, h2.events.DataReceived):
                    received += event.data
                elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                    rest = [(bytes(name), bytes(value)) for name, value in found if not name.startswith(b":")]
                    return b"2", int(dict(found)[b":status"]), b"", rest, received


def lint(response, method, target, headers, start):
    """Return the warnings of httplint about a response."""
    asked = HttpRequestLinter()
    asked.process_request_topline(method.encode(), target.encode(), b"1.1")
    asked.process_headers([(b"Host", HOST.encode()), (b"User-Agent", b"suite"), *((name.encode(), value.encode()) for name, value in headers)])
    asked.finish_content(True)
    linter = HttpResponseLinter(start_time=start, _related=asked)
    asked.response = linter
    linter.is_head_response = method == "HEAD"
    linter.base_uri = f"http://{HOST}{target}"
    number, status, phrase, lines, body = response
    linter.process_response_topline(number, str(status).encode(), phrase)
    linter.process_headers(lines)
    linter.feed_content(body)
    linter.finish_content(True)
    return warnings(linter.notes)


def warnings(notes):
    found = []
    for note in notes:
        found += [f"{type(note).__name__} ({note.subject}): {note.summary}"] if note.level in (levels.WARN, levels.BAD) else []
        found += warnings(note.subnotes)
    return found


def responses():
    """Return the cases: name, expected status, method, target, headers, body. Some cases depend on the previous one."""
    key = [("x-api-key", "unknown")]
    cases = [
        ("proxied", 200, "GET", "/page"),
        ("proxied, HEAD", 200, "HEAD", "/page"),
        ("proxied, chunked", 200, "GET", "/chunks"),
        ("proxied, POST", 200, "POST", "/echo", [("Content-Type", "text/plain")], b"body"),
        ("not modified", 304, "GET", "/page", [("If-None-Match", '"a1"')]),
        ("no content", 204, "GET", "/empty"),
        (
            "upgrade",
            101,
            "GET",
            "/upgrade",
            [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")],
        ),
        ("respond", 200, "GET", "/own"),
        ("respond, HEAD", 200, "HEAD", "/own"),
        ("respond, 204", 204, "GET", "/nothing"),
        ("respond, 410", 410, "GET", "/gone"),
        ("path without a canonical form", 400, "GET", "/%2F"),
        ("no key", 401, "GET", "/keys"),
        ("unknown key", 401, "GET", "/keys", key),
        ("no token", 401, "GET", "/tokens"),
        ("forged token", 401, "GET", "/tokens", [("Authorization", "Bearer a.b.c")]),
        ("no password", 401, "GET", "/people"),
        ("wrong password", 401, "GET", "/people", [("Authorization", "Basic YTpi")]),
        ("no credential of three kinds", 401, "GET", "/any"),
        ("access rule", 403, "GET", "/denied"),
        ("no route", 404, "GET", "/no/such/route"),
        ("no route, HEAD", 404, "HEAD", "/no/such/route"),
        ("method", 405, "DELETE", "/echo"),
        ("lowercase method", 400, "get", "/echo"),
        ("late body", 408, "POST", "/echo", [("Content-Length", "5"), ("Content-Type", "text/plain")]),
        ("large body", 413, "POST", "/echo", [("Content-Type", "text/plain")], bytes(2000)),
        ("large chunked body", 413, "POST", "/echo", [("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked")], None),
        ("long target", 414, "GET", "/" + "a" * 9000),
        ("unknown host", 421, "GET", "/own", [], b"", "unknown.test"),
        ("large header", 431, "GET", "/own", [("X-Large", "a" * 40_000)]),
        ("many headers", 431, "GET", "/own", [("X-Many", "a")] * 200),
        ("TRACE", 501, "TRACE", "/own"),
        ("transfer coding", 501, "POST", "/echo", [("Transfer-Encoding", "gzip, chunked")]),
        ("refused connection", 502, "GET", "/refused"),
        ("invalid response", 502, "GET", "/invalid"),
        ("late response", 504, "GET", "/late"),
        ("preflight", 204, "OPTIONS", "/cors", [("Origin", ORIGIN), ("Access-Control-Request-Method", "PUT"), ("Access-Control-Request-Headers", "x-api-key")]),
        ("preflight of another origin", 204, "OPTIONS", "/cors", [("Origin", "https://other.test"), ("Access-Control-Request-Method", "PUT")]),
        ("CORS", 200, "GET", "/cors", [("Origin", ORIGIN)]),
        ("CORS, denied", 429, "GET", "/cors", [("Origin", ORIGIN)]),
        ("CORS, method", 405, "DELETE", "/cors", [("Origin", ORIGIN)]),
        ("redirect", 308, "GET", "/moved"),
        ("redirect, POST", 308, "POST", "/moved", [("Content-Type", "text/plain")], b"body"),
        ("redirect to https", 301, "GET", "/secure"),
        ("redirect to a host", 307, "GET", "/other"),
        ("redirect of a slash", 308, "GET", "/slash?q"),
        ("proxied, limited", 200, "GET", "/proxied-limit"),
        ("proxied, denied", 429, "GET", "/proxied-limit"),
        ("admitted, no headers", 200, "GET", "/none"),
        ("denied, no headers", 429, "GET", "/none"),
    ]
    for dialect in DIALECTS:
        cases += [(f"admitted, {dialect}", 200, "GET", f"/{dialect}"), (f"denied, {dialect}", 429, "GET", f"/{dialect}")]
    call = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search"}}).encode()
    cases += [(f"JSON-RPC, {status}", status, "POST", "/rpc", [("Content-Type", "application/json")], call) for status in (200, 429)]
    return [(*case, *([], b"", HOST)[len(case) - 4 :]) for case in cases]


# Cases over HTTP/2: name, expected status, method, target, headers, body.
RESPONSES_2 = [
    ("proxied", 200, "GET", "/page", [], b""),
    ("respond", 200, "GET", "/own", [], b""),
    ("no key", 401, "GET", "/keys", [], b""),
    ("no route", 404, "GET", "/no/such/route", [], b""),
    ("large body", 413, "POST", "/echo", [("content-type", "text/plain")], bytes(2000)),
    ("denied", 429, "GET", "/ietf", [], b""),
    ("large header", 431, "GET", "/own", [("x-large", "a" * 40_000)], b""),
    ("late response", 504, "GET", "/late", [], b""),
    ("gRPC, no upstream", 502, "POST", "/test.Echo/Unary", [("content-type", "application/grpc"), ("te", "trailers")], b"\0\0\0\0\0"),
    ("gRPC, denied", 200, "POST", "/test.Echo/Unary", [("content-type", "application/grpc"), ("te", "trailers")], b"\0\0\0\0\0"),
]
AUTHORIZED = [("Authorization", f"Bearer {TOKEN}")]
# Cases for the admin listener: expected status, method, target, headers, body.
ADMIN = [
    (200, "GET", "/healthz", AUTHORIZED, b""),
    (200, "GET", "/readyz", AUTHORIZED, b""),
    (200, "GET", "/metrics", AUTHORIZED, b""),
    (200, "GET", "/metrics", [*AUTHORIZED, ("Accept", "application/openmetrics-text")], b""),
    (200, "GET", "/", [], b""),
    (200, "HEAD", "/", [], b""),
    (200, "GET", "/page.css", [], b""),
    (200, "GET", "/page.js", [], b""),
    (200, "GET", "/api/status", AUTHORIZED, b""),
    (200, "GET", "/api/config", AUTHORIZED, b""),
    (200, "GET", "/api/certificates", AUTHORIZED, b""),
    (200, "GET", "/api/overrides", AUTHORIZED, b""),
    (200, "GET", "/api/top", AUTHORIZED, b""),
    (400, "GET", "/api/identities", AUTHORIZED, b""),
    (400, "POST", "/api/reset", [*AUTHORIZED, ("Content-Type", "application/json")], b"{"),
    (415, "POST", "/api/reset", [*AUTHORIZED, ("Content-Type", "text/plain")], b"{}"),
    (200, "POST", "/api/reload", AUTHORIZED, b"{}"),
    (401, "GET", "/api/status", [], b""),
    (404, "GET", "/no/such/page", AUTHORIZED, b""),
    (405, "DELETE", "/metrics", [*AUTHORIZED, ("Content-Type", "application/json")], b""),
]


def port(url):
    return int(url.rpartition(":")[2])


def judge(report, name, expected, exchanged, *asked):
    start = time.time()
    response = exchanged()
    wrong = [] if response[1] == expected else [f"status {response[1]} instead of {expected}"]
    report.case(name, *wrong, *lint(response, *asked, start))


def resources(report, urls):
    """Check all URLs with REDbot, concurrently."""
    parser = ConfigParser()
    parser.read_dict({"redbot": {"enable_local_access": "True"}})
    left = set(urls)
    found = {}

    def check(name, url, headers):
        resource = HttpResource(parser["redbot"])
        resource.set_request(url, headers=headers)

        def done():
            notes = list(resource.response.notes)
            for each in resource.subreqs.values():
                notes += [note for note in each.response.notes if note not in notes]
            failed = [f"no response: {resource.fetch_error}"] if resource.fetch_error else []
            found[name] = sorted({*failed, *warnings(notes)})
            left.discard(name)
            if not left:
                thor.stop()

        resource.on("check_done", done)
        resource.check()

    for name, (url, headers) in urls.items():
        check(name, url, headers)
    thor.run()
    for name, findings in found.items():
        report.case(f"REDbot: {name}", *findings)


def main():
    binary = sys.argv[1]
    report = Report(f"httplint {version('httplint')}, REDbot {version('redbot')}", EXPLANATIONS)
    upstream = Upstream(RESPONSES)
    closed = servers.free_ports(1)[0]
    try:
        files = {"consumers.toml": "", "users": USERS}
        gateway = servers.sluicegate(binary, configuration(upstream.port, closed), files)
        clear = port(gateway.urls[0])
        for name, status, method, target, headers, body, host in responses():
            data = request(method, target, headers, body or b"", host) + (b"7d0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n" if body is None else b"")
            judge(report, name, status, lambda data=data, method=method: exchange(clear, data, method), method, target, headers)
        # Bytes that are not HTTP get a response with a status only.
        judge(report, "not HTTP", 400, lambda: exchange(clear, b"not HTTP\r\n\r\n", "GET"), "GET", "/", [])
        judge(report, "HTTP/1.0", 200, lambda: exchange(clear, f"GET /own HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode(), "GET"), "GET", "/own", [])
        for name, status, method, target, headers, body in RESPONSES_2:
            one = method, target, headers
            judge(report, f"HTTP/2: {name}", status, lambda one=one, body=body: exchange2(clear, *one, body), *one)
        admin = port(gateway.admin)
        for number, (status, method, target, headers, body) in enumerate(ADMIN):
            data = request(method, target, headers, body, "127.0.0.1")
            judge(
                report,
                f"admin {number}: {method} {target}: {status}",
                status,
                lambda data=data, method=method: exchange(admin, data, method),
                method,
                target,
                headers,
            )
        strict = servers.sluicegate(binary, without_store(closed))
        judge(report, "limit without its store", 503, lambda: exchange(port(strict.urls[0]), request("GET", "/strict"), "GET"), "GET", "/strict", [])
        local = f"http://127.0.0.1:{clear}"
        urls = {path: (f"{local}/{path}", []) for path in ["page", "chunks", "own", "echo", "moved", "keys", "no/such/route", "denied", "refused", "draft-03"]}
        urls |= {
            f"admin {path}": (f"http://127.0.0.1:{admin}{path}", AUTHORIZED) for path in ["/", "/page.css", "/page.js", "/metrics", "/healthz", "/api/status"]
        }
        resources(report, urls)
    finally:
        servers.stop()
    report.end()


if __name__ == "__main__":
    main()
