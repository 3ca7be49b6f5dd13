"""Rows for what nginx-tests check of a proxy: limit_req, limit_conn, proxy and h2. `theirs` is what current nginx does."""

from rows import HOST, Row, expected, get, get2, response

FORWARDED = "forwarded as it came: no route or limit reads it"
ROWS = []


def row(test, name, request, theirs, ours=None, reason=""):
    ROWS.append(Row(test, name, request, theirs, ours, reason))


# Hosts: the received value, and the host in lower case without a port. None: the request gets 400.
HOSTS = [
    ("", None),
    ("l", "l"),
    ("L", "l"),
    ("abcd-ef.g02.test:", "abcd-ef.g02.test"),
    ("abcd-ef.g02.test:8080", "abcd-ef.g02.test"),
    ("www.abcd-ef.g02.test.", "www.abcd-ef.g02.test"),
    ("abcd-ef.g02.test.:88", "abcd-ef.g02.test"),
    ("example.test.:1.2", None),
    (".", None),
    ("AbC-d93.0.34ZhGt-s.nk.Test:88", "abc-d93.0.34zhgt-s.nk.test"),
    ("192.0.2.78", "192.0.2.78"),
    ("192.0.2.78:", "192.0.2.78"),
    ("192.0.2.78:987", "192.0.2.78"),
    ("192.0.2.78:9000:80", None),
    ("[2001:db8::ef98:0:7654:321]", "[2001:db8::ef98:0:7654:321]"),
    ("[2001:db8::ef98:0:7654:321]:80", "[2001:db8::ef98:0:7654:321]"),
    ("[2001:db8::321].", None),
    ("[2001:db8::321].:98", None),
    ("[2001:db8::321", None),
    ("extra[2001:db8::321]:98", None),
    ("[ab..cd::321]", None),
    ("example.test/\\:552", None),
    ("..examp-LE.test", None),
    ("a\x02b", None),
]
for host, name in HOSTS:
    what = expected(200, {"x-host": name}) if name else expected(400, {":line": ""})
    row("http_host", f"Host {host!r}", get(host=host), what)
    if host not in (".", "") and "/" not in host:
        row("http_host", f"absolute form {host!r}", get(f"http://{host}/"), what)
    if name:
        row("h2_host", f"authority {host!r}", get2(authority=host), what)
        row("h2_host", f"host {host!r}", get2("/", ("host", host), authority=None), what)
row(
    "http_host",
    "port above 65,535",
    get(host="192.0.2.78:98777"),
    expected(400, {":line": ""}),
    expected(200, {"x-host": "192.0.2.78", "host": "192.0.2.78:98777"}),
    f"the port is {FORWARDED}",
)
row(
    "http_host",
    "IPvFuture",
    get(host="[v1.abc]"),
    expected(200, {"x-host": "[v1.abc]"}),
    expected(400, {":line": ""}),
    "no such address exists, and other servers differ in what they read",
)
row("http_host", "mapped IPv4 address", get(host="[::ffff:192.0.2.89]:4321"), expected(200, {"x-host": "[::ffff:192.0.2.89]"}))
row("http_host", "two lines", get("/", "Host: again"), expected(400, {":line": ""}))
row("http_host", "none", get(host=None), expected(400, {":line": ""}))
row("h2_headers", "two host lines", get2("/", ("host", "a.test"), ("host", "b.test"), authority=None), expected(400, {":line": ""}))

# Targets, and the path that routes and limits see. None: the request gets 400.
for target, path in [
    ("/foo/bar%", None),
    ("/foo/bar%1", None),
    ("/foo/bar/.?args", "/foo/bar/"),
    ("/foo/bar/.#frag", "/foo/bar/"),
    ("/foo/bar/..?args", "/foo/"),
    ("/foo/bar/..#frag", "/foo/"),
    ("/foo/bar/.", "/foo/bar/"),
    ("/foo/bar/..", "/foo/"),
    ("/foo//bar///", "/foo/bar/"),
    ("/foo/%2e%2E/bar", "/bar"),
    ("/%61", "/a"),
    ("http://localhost", "/"),
    ("http://localhost/", "/"),
    ("http://localhost?args", "/"),
    ("http://localhost?args#frag", "/"),
    ("http://localhost:8080?args", "/"),
    ("/\x02", None),
]:
    row("http_uri", f"{target!r}", get(target), expected(200, {"x-path": path}) if path else expected(400, {":line": ""}))
row("http_uri", "space", get("/ /"), expected(400, {":line": ""}))
row(
    "http_uri",
    "control character, encoded",
    get("/%02"),
    expected(200),
    expected(400, {":line": ""}),
    "control characters have no place in a path, and servers differ in how they read it",
)
for target in ["hello", "", "*"]:
    row("h2_headers", f"path {target!r}", get2(target), expected((400, "reset"), {":line": ""}))
row("h2_headers", "path with a control character", get2("/\x01"), expected((400, "reset", "closed"), {":line": ""}))

# Methods and expectations
for method, target in [("TRACE", "/"), ("CONNECT", "localhost:80")]:
    row(
        "http_method",
        method,
        get(target, method=method),
        expected(405, {":line": ""}),
        expected(501, {":line": ""}),
        "RFC 9110 15.6.2: the gateway supports it for no resource",
    )
row(
    "http_method",
    "CONNECT /",
    get("/", method="CONNECT"),
    expected(400, {":line": ""}),
    expected((400, 501), {":line": ""}),
    "the method is rejected before the target",
)
row("http_method", "unknown", get(method="FOO"), expected(200, {":line": "FOO / HTTP/1.1"}))
row("http_expect_100_continue", "100-Continue", get("/", "Expect: 100-Continue", body=b"body", method="POST"), expected(200, {":body": "body", "expect": None}))
row(
    "http_expect_100_continue",
    "unknown expectation",
    get("/", "Expect: unknown", method="POST", body=b"body"),
    expected(417),
    expected(200, {":body": "body", "expect": None}),
    "RFC 9110 10.1.1: a server may respond with 417; the gateway removes Expect",
)

# Headers
row("http_headers_multi", "cookies", get("/", "Cookie: foo=1", "Cookie: bar=2", "Cookie: bazz=3"), expected(200, {"cookie": "foo=1; bar=2; bazz=3"}))
row("h2_headers", "cookies", get2("/", ("cookie", "a=b"), ("cookie", "c=d")), expected(200, {"cookie": "a=b; c=d"}))
for name, value in [("Foo", "foo"), ("Via", "1.0 foo"), ("User-Agent", "foo"), ("Referer", "foo")]:
    row("http_headers_multi", f"{name} twice", get("/", f"{name}: {value}", f"{name}: bar"), expected(200))
for name in ["If-Modified-Since", "If-Unmodified-Since", "If-Match", "If-None-Match", "Content-Range", "If-Range", "Authorization"]:
    row("http_headers_multi", f"{name} twice", get("/", f"{name}: foo", f"{name}: bar"), expected(400), expected(200), f"it is {FORWARDED}")
row(
    "http_headers_multi",
    "Content-Length twice, equal",
    get("/", "Content-Length: 0", "Content-Length: 0"),
    expected(400),
    expected(200, {"content-length": "0"}),
    "RFC 9112 6.3: equal lengths are one",
)
row("http_headers_multi", "Content-Length twice, different", get("/", "Content-Length: 0", "Content-Length: 1"), expected(400, {":line": ""}))
row("http_headers_multi", "Transfer-Encoding twice", get("/", "Transfer-Encoding: foo", "Transfer-Encoding: bar"), expected(400, {":line": ""}))
row("http_headers_multi", "HTTP/1.0 without Host", get(host=None, version="1.0"), expected(200))
row("http_headers_multi", "HTTP/1.0 with two hosts", get("/", "Host: bar", version="1.0"), expected(400, {":line": ""}))
row("h2_headers", "authority and an equal host", get2("/", ("host", HOST)), expected(200, {"host": HOST}))
row(
    "h2_headers",
    "authority and another host",
    get2("/", ("host", "other.test")),
    expected(400, {":line": ""}),
    expected(200, {"host": HOST}),
    "RFC 9113 8.3.1: `:authority` takes precedence, and the upstream gets it as Host",
)
row("h2_headers", "neither authority nor host", get2(authority=None), expected((400, "reset"), {":line": ""}))
row("h2_headers", "empty authority", get2(authority=""), expected((400, "reset"), {":line": ""}))
for name, value in [("x:foo", "a"), ("x foo", "a"), ("x\x02foo", "a"), ("X-Foo", "a"), ("x-foo", "a\r\nb: c"), ("x-foo", "a\x00b")]:
    row("h2_headers", f"{name!r}: {value!r}", get2("/", (name, value)), expected((400, "reset", "closed"), {":line": ""}))
row("h2_headers", "underscore in a name", get2("/", ("x_foo", "bar")), expected(200, {"x_foo": "bar"}))
for name, value in [("connection", "close"), ("transfer-encoding", "chunked"), ("upgrade", "foo"), ("te", "gzip")]:
    row("h2_headers", f"{name}", get2("/", (name, value)), expected((400, "reset"), {":line": ""}))
row("http_header_buffers", "header of 7 KB", get("/", "X-Long: " + "a" * 7000), expected(200, {"x-long": "a" * 7000}))
row("http_header_buffers", "target of 7 KB", get("/" + "a" * 7000), expected(200, {"x-path": "/" + "a" * 7000}))
row(
    "http_header_buffers",
    "target of 70 KB",
    get("/" + "a" * 70_000),
    expected(414, {":line": ""}),
    expected(431, {":line": ""}),
    "hyper rejects what is larger than `max_header_size` before it has the whole request line",
)
row(
    "http_header_buffers",
    "header too large",
    get("/", "X-Long: " + "a" * 70_000),
    expected(400, {":line": ""}),
    expected(431, {":line": ""}),
    "RFC 6585 5: the status of large headers",
)

# Conditional requests and range requests are forwarded.
for name, value in [
    ("If-Modified-Since", "Thu, 26 Nov 2026 10:00:00 GMT"),
    ("If-None-Match", '"a"'),
    ("If-Unmodified-Since", "foo"),
    ("If-Match", '"a"'),
    ("Range", "bytes=0-1"),
]:
    row("not_modified_proxy", name, get("/", f"{name}: {value}"), expected(200, {name.lower(): value}))

# Request bodies
for size in [0, 10, 1280, 5120, 200_000]:
    body = b"0123456789" * (size // 10)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[at : at + 1000] for at in range(0, len(body), 1000))) + b"0\r\n\r\n"
    row("proxy_request_buffering", f"{size} bytes", get(method="POST", body=body), expected(200, {":body": body.decode()}))
    row(
        "proxy_request_buffering_chunked",
        f"{size} bytes",
        get("/", "Transfer-Encoding: chunked", method="POST") + chunks,
        expected(200, {":body": body.decode()}),
    )
    row(
        "h2_request_body",
        f"{size} bytes with a length",
        get2("/", ("content-length", str(size)), method="POST", body=body),
        expected(200, {":body": body.decode()}),
    )
    row("h2_request_body", f"{size} bytes without a length", get2(method="POST", body=body), expected(200, {":body": body.decode()}))
row("h2_request_body", "shorter than its length", get2("/", ("content-length", "10"), method="POST", body=b"TEST"), expected((400, "reset"), {":line": ""}))
row("h2_request_body", "longer than its length", get2("/", ("content-length", "2"), method="POST", body=b"TEST"), expected((400, "reset"), {":line": ""}))
row("h2_request_body", "larger than the maximum", get2("/small", ("content-length", "12"), method="POST", body=b"TESTTESTTEST"), expected(413, {":line": ""}))
row("h2_request_body_extra", "larger than the maximum, no length", get2("/small", method="POST", body=b"TESTTESTTEST"), expected(413))
row("h2_request_body", "as large as the maximum", get2("/small", method="POST", body=b"TESTTEST10"), expected(200, {":body": "TESTTEST10"}))

# Responses of the upstream: what it sends for a path, and what the client receives.
INVALID = expected(502, body=None)
RESPONSES = {
    "plain": ("proxy", response("Content-Length: 8", body=b"SEE-THIS"), expected(200, body="SEE-THIS", end="complete"), None, ""),
    "chunked": (
        "proxy_chunked",
        response("Transfer-Encoding: chunked", body=b"9\r\nSEE-THIS\n\r\n0\r\n\r\n"),
        expected(200, body="SEE-THIS\n", end="complete"),
        None,
        "",
    ),
    "chunked-extra": (
        "proxy_chunked_extra",
        response("Transfer-Encoding: chunked", body=b"8\r\nSEE-THIS\r\n0\r\n\r\nzzz"),
        expected(200, body="SEE-THIS", end="complete"),
        None,
        "",
    ),
    "until-close": ("proxy_noclose", response(body=b"SEE-THIS"), expected(200, body="SEE-THIS", end="complete"), None, ""),
    "extra": ("proxy_extra_data", response("Content-Length: 8", body=b"SEE-THIS-BUT-NOT-THIS"), expected(200, body="SEE-THIS", end="complete"), None, ""),
    "short": ("proxy_extra_data", response("Content-Length: 100", body=b"SEE-THIS"), expected(200, body="SEE-THIS", end="incomplete"), None, ""),
    "empty": ("proxy_extra_data", response("Content-Length: 100"), expected((200, "closed", "reset"), body="", end="incomplete"), None, ""),
    "zero": ("proxy_extra_data", response("Content-Length: 0", body=b"NOT-THIS"), expected(200, body="", end="complete"), None, ""),
    "unfinished": (
        "proxy_unfinished",
        response("Transfer-Encoding: chunked", body=b"a\r\nunfinished\r\n"),
        expected(200, body="unfinished", end="incomplete"),
        None,
        "",
    ),
    "bad-length": ("proxy_duplicate_headers", response("Content-Length: foo", body=b"x"), INVALID, None, ""),
    "two-lengths": ("proxy_duplicate_headers", response("Content-Length: 1", "Content-Length: 1", body=b"x"), INVALID, None, ""),
    "unknown-coding": ("proxy_duplicate_headers", response("Transfer-Encoding: foo", body=b"x"), INVALID, None, ""),
    "two-codings": ("proxy_duplicate_headers", response("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), INVALID, None, ""),
    "length-coding": ("proxy_duplicate_headers", response("Content-Length: 1", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), INVALID, None, ""),
    "coding-length": ("proxy_duplicate_headers", response("Transfer-Encoding: chunked", "Content-Length: 1", body=b"0\r\n\r\n"), INVALID, None, ""),
    "upgrade200": (
        "proxy_connection_headers",
        response("Upgrade: foo", "Connection: Upgrade", "Content-Length: 0"),
        expected(200, upgrade="foo"),
        expected(200, upgrade=None),
        "RFC 9110 7.6.1: Connection names it, so that it is of one connection",
    ),
    "upgrade426": (
        "proxy_connection_headers",
        response("Upgrade: foo", "Connection: Upgrade", "Content-Length: 0", status="426 Upgrade Required"),
        expected(426, upgrade="foo"),
        expected(426, upgrade=None),
        "as above: routes with `websocket` forward the responses to upgrades",
    ),
    "early": (
        "proxy_early_hints",
        response("Link: </a>", status="103 Early Hints") + response("Content-Length: 8", body=b"SEE-THIS"),
        expected(200, body="SEE-THIS"),
        None,
        "",
    ),
    "early-only": ("proxy_early_hints", response("Link: </a>", status="103 Early Hints"), INVALID, None, ""),
    "304": ("proxy_keepalive", response("Content-Length: 100", status="304 Not Modified"), expected(304, body="", end="complete"), None, ""),
    "204": ("proxy_keepalive", response(status="204 No Content"), expected(204, body="", end="complete"), None, ""),
    "unasked101": ("proxy_upgrade", response("Upgrade: foo", "Connection: Upgrade", status="101 Switching Protocols"), expected(502), None, ""),
    "date": (
        "proxy_merge_headers",
        response("Date: Thu, 26 Nov 2026 10:00:00 GMT", "Content-Length: 0"),
        expected(200, date="Thu, 26 Nov 2026 10:00:00 GMT"),
        None,
        "",
    ),
    "cookies": ("h2_headers", response("Set-Cookie: a=b", "Set-Cookie: c=d", "Content-Length: 0"), expected(200, set_cookie="a=b, c=d"), None, ""),
    "long": ("h2_headers", response(*["X-Long: " + "x" * 1000] * 3, "Content-Length: 0"), expected(200, x_long=", ".join(["x" * 1000] * 3)), None, ""),
}
for path, (test, _, theirs, ours, reason) in RESPONSES.items():
    row(test, f"response {path}", get(f"/{path}"), theirs, ours, reason)
    if path not in ("upgrade200", "upgrade426"):
        row(test, f"response {path} over HTTP/2", get2(f"/{path}"), theirs, ours, reason)
for path in ["extra", "short", "plain"]:
    row("proxy_extra_data", f"HEAD {path}", get(f"/{path}", method="HEAD"), expected(200, body="", end="complete"))
row("proxy_connection_headers", "Upgrade in a 200 over HTTP/2", get2("/upgrade200"), expected(200, upgrade=None))
row("proxy_connection_headers", "Upgrade in a 426 over HTTP/2", get2("/upgrade426"), expected(426, upgrade=None))
