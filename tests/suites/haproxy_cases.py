"""Rows for what HAProxy's reg-tests check of messages and framing. `theirs` is what current HAProxy does."""

from rows import Row, expected, get, get2, response

NO_CONNECT = "CONNECT is not supported"
OF_TARGET = "RFC 9112 3.2.2: a host in the target takes precedence over Host, and the upstream gets it as Host"
ROWS = []


def row(test, name, request, theirs, ours=None, reason=""):
    ROWS.append(Row(test, name, request, theirs, ours, reason))


REJECTED = expected(400, {":line": ""})

# h1_host_normalization: targets that contain a host, and the Host header that the upstream receives.
for target, host in [
    ("http://toto:poue@hostname:80/c1", "hostname:80"),
    ("http://hostname:8080/c2", "hostname:8080"),
    ("https://hostname:443/c3", "hostname:443"),
    ("https://hostname:80/c4", "hostname:80"),
    ("http://hostname:80/c20", "hostname"),
    ("https://hostname:443/c21", "hostname"),
    ("http://hostname/c22", "hostname:80"),
    ("https://hostname/c23", "hostname:443"),
    ("http://hostname:/c24", "hostname"),
    ("http://hostname/c26", "hostname:"),
    ("http://hostname:80/c28", "hostname:"),
    ("http://hostname:/c29", "hostname:80"),
    ("http://hostname", "hostname"),
    ("http://hostname:80", "hostname"),
    ("https://hostname:443", "hostname"),
    ("http://hostname:81", "hostname:81"),
    ("http://hostname?a=b", "hostname"),
    ("http://hostname:80?c=d", "hostname:80"),
]:
    differs = (REJECTED, "RFC 9110 4.2.4: userinfo is rejected") if "@" in target else (None, "")
    row("h1_host_normalization", f"{target}, Host {host}", get(target, host=host), expected(200), *differs)
for target, host in [
    ("http://hostname1/", "hostname2"),
    ("http://hostname:80/", "hostname:81"),
    ("http://hostname:8080/", "hostname"),
    ("http://hostname/", "hostname:81"),
]:
    authority = target.split("/")[2]
    row("h1_host_normalization", f"{target}, Host {host}", get(target, host=host), REJECTED, expected(200, {"host": authority}), OF_TARGET)
for first, second in [("hostname1", "hostname2"), ("hostname1:80", "hostname1")]:
    row("h1_host_normalization", f"two hosts {first}, {second}", get("http://hostname1/", f"Host: {second}", host=first), REJECTED)
for target, host in [("http://:", ":80"), ("https://:", ":443"), ("http://:", ":")]:
    row(
        "h1_host_normalization",
        f"{target}, Host {host}",
        get(target, host=host),
        expected(200),
        REJECTED,
        "RFC 9110 4.2.1: an http URI with an empty host is invalid",
    )
for target, host, status in [
    ("hostname:80", "hostname:80", 200),
    ("hostname:443", "hostname", 200),
    ("hostname:8443", "hostname:8443", 200),
    ("hostname", "hostname", 400),
    ("hostname1:80", "hostname2:80", 400),
    ("/", "hostname", 400),
    ("hostname:", "hostname", 400),
    ("http://haproxy.test:80", "haproxy.test", 400),
]:
    row(
        "h1_host_normalization",
        f"CONNECT {target}, Host {host}",
        get(target, method="CONNECT", host=host),
        expected(status),
        expected((400, 501), {":line": ""}),
        NO_CONNECT,
    )

# h1_request_target_validation
row(
    "h1_request_target_validation",
    "OPTIONS *",
    get("*", method="OPTIONS"),
    expected(200),
    REJECTED,
    "no route matches `*`; the gateway has no options of its own to report",
)
row("h1_request_target_validation", "OPTIONS /", get("/", method="OPTIONS"), expected(200))
row("h1_request_target_validation", "OPTIONS http://haproxy.test", get("http://haproxy.test", method="OPTIONS", host="haproxy.test"), expected(200))
row("h1_request_target_validation", "OPTIONS */test", get("*/test", method="OPTIONS"), REJECTED)
for target in ["*", "haproxy.test:80", "admin", "admin/a/b"]:
    row("h1_request_target_validation", f"GET {target}", get(target), REJECTED)
for target, path in [("http://hostname#frag", "/"), ("http://hostname/abc#frag", "/abc")]:
    row("h1_authority_fragment_char", target, get(target, host="hostname"), expected(200, {"x-path": path, "host": "hostname"}))

# h2_desync_attacks
row("h2_desync_attacks", "path without a slash", get2("hello-world"), expected((400, "reset"), {":line": ""}))
row("h2_desync_attacks", "scheme with a URI", get2(scheme="http://localhost/?"), expected((400, "reset"), {":line": ""}))
row(
    "h2_desync_attacks",
    "method with a question mark",
    get2(method="GET?"),
    expected((400, "reset"), {":line": ""}),
    expected("closed", {":line": ""}),
    "the crate h2 closes the connection (RFC 9113 5.4.1: a connection error in place of that of a stream)",
)
row("h2_desync_attacks", "authority and another host", get2("/", ("host", "other_host"), authority="hostname"), expected(200, {"host": "hostname"}))
for authority, scheme, host in [
    ("hostname:80", "http", "hostname"),
    ("hostname:8080", "http", "hostname:8080"),
    ("hostname:443", "https", "hostname"),
    ("hostname:80", "https", "hostname:80"),
]:
    differs = (
        (None, "")
        if authority == host
        else (expected(200, {"host": authority}), "RFC 9110 7.2: Host is forwarded as received; routes and limits take the name without port")
    )
    row("scheme_based_normalize", f"{scheme} {authority}", get2(scheme=scheme, authority=authority), expected(200, {"host": host}), *differs)
row(
    "h2_cookie_concat",
    "three cookies",
    get2("/", ("cookie", "c1=foo"), ("cookie", "c2=bar"), ("cookie", "c3=baz")),
    expected(200, {"cookie": "c1=foo; c2=bar; c3=baz"}),
)

# h1_to_h1 and h2_to_h1: bodies and lengths
for method in ["GET", "HEAD", "POST"]:
    body = b"this must be delivered, like it or not"
    row("h1_to_h1", f"{method} without a length", get(method=method), expected(200, {":body": ""}))
    row("h1_to_h1", f"{method} with length 0", get("/", "Content-Length: 0", method=method), expected(200, {":body": ""}))
    row("h1_to_h1", f"{method} with a body", get(method=method, body=body), expected(200, {":body": body.decode()}))
    row(
        "h1_to_h1",
        f"{method}, close",
        get("/", "Content-Length: 0", "Connection: close", method=method) + b"this is not sent\r\n\r\n",
        expected(200, {":body": ""}, connection="close"),
    )
    row("h2_to_h1", f"{method} without a length", get2(method=method), expected(200, {":body": ""}))
    row("h2_to_h1", f"{method} with a body", get2(method=method, body=body), expected(200, {":body": body.decode()}))
    for length in ["2", "0,", ""]:
        row(
            "h2_to_h1",
            f"{method} with length {length!r}",
            get2("/", ("content-length", length), method=method, body=b"this is sent and ignored"),
            expected((400, "reset"), {":line": ""}),
        )
for length in ["0,", "", "+1", "1 1"]:
    row("h1_to_h1", f"length {length!r}", get("/", f"Content-Length: {length}"), REJECTED)

# http_transfer_encoding: requests
chunked = b"0\r\n\r\n"
row(
    "http_transfer_encoding",
    "chunked and a length",
    get("/", "Transfer-Encoding: chunked", "Content-Length: 31", method="POST") + chunked + b"GET /smuggled HTTP/1.1\r\n\r\n",
    expected(200, {"content-length": None, ":body": ""}, connection="close"),
)
row(
    "http_transfer_encoding",
    "chunked in HTTP/1.0",
    get("/", "Transfer-Encoding: chunked", method="POST", version="1.0") + chunked,
    expected(200),
    REJECTED,
    "RFC 9112 6.1: HTTP/1.0 has no transfer codings: the framing is faulty",
)
for te, forwarded, differs in [
    ("trailers, gzip", "trailers", (None, "")),
    ("gzip", None, (None, "")),
    ("trailers;q=0.5", None, (None, "")),
]:
    request = get("/", "Transfer-Encoding: chunked", f"TE: {te}", method="POST") + chunked
    row("http_transfer_encoding", f"TE: {te}", request, expected(200, {"te": forwarded}), *differs)
for coding in ["chunked, gzip", "gzip"]:
    row("http_transfer_encoding", f"coding {coding}", get("/", f"Transfer-Encoding: {coding}", method="POST") + chunked, REJECTED)
for coding, status in [("chunked, chunked", 400), ("chunked, gzip, chunked", 400), ("gzip, chunked", 422)]:
    request = get("/", f"Transfer-Encoding: {coding}", method="POST") + chunked
    row(
        "http_transfer_encoding",
        f"coding {coding}",
        request,
        expected(status, {":line": ""}),
        expected(501, {":line": ""}),
        "RFC 9112 6.1: 501 for a coding that is not understood",
    )

# restrict_req_hdr_names is an option of HAProxy. By default, HAProxy forwards such names.
for name in ["X-my_hdr", "X_my_hdr_with_lots_of_underscores", "X-my-hdr-with-trailing-underscore_"]:
    row("restrict_req_hdr_names", name, get("/", f"{name}: on"), expected(200, {name.lower(): "on"}))

# normalize_uri, with all normalizers for paths
for target, path in [
    ("/foo//bar", "/foo/bar"),
    ("///foo///bar///", "/foo/bar/"),
    ("///", "/"),
    ("/foo/..", "/"),
    ("/foo/../", "/"),
    ("/foo/bar/../", "/foo/"),
    ("/foo/../../bar/", "/bar/"),
    ("/foo//../../bar/", "/bar/"),
    ("/.", "/"),
    ("/a/.", "/a/"),
    ("/a.", "/a."),
    ("/.a", "/.a"),
    ("/a/./a", "/a/a"),
    ("/%61", "/a"),
    ("/%3f", "/%3F"),
    ("/%aa", "/%AA"),
    ("/%zz", None),
    ("/%%36%36", None),
    ("/%23foo", "/%23foo"),
    ("/foo/?bar=/foo/../", "/foo/"),
]:
    row("normalize_uri", target, get(target), expected(200, {"x-path": path}) if path else REJECTED)
row("normalize_uri", "query", get("/?a=/./&b=///&%61=%61"), expected(200, {":line": "GET /?a=/./&b=///&%61=%61 HTTP/1.1"}))

# Responses of the upstream, by path
RESPONSES = {
    "coding10": (
        "http_transfer_encoding",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        expected(200, body=""),
        expected(502),
        "RFC 9112 6.1: the framing of HTTP/1.0 with a transfer coding is faulty",
    ),
    "coding-and-length": (
        "http_transfer_encoding",
        response("Transfer-Encoding: chunked", "Content-Length: 30", body=b"0\r\n\r\nResponse splitting"),
        expected(200, body=""),
        expected(502),
        "RFC 9112 6.3: response splitting is possible; nginx responds with 502 as well",
    ),
    "chunked-chunked": ("http_transfer_encoding", response("Transfer-Encoding: chunked, chunked", body=chunked), expected(502), None, ""),
    "chunked-gzip-chunked": ("http_transfer_encoding", response("Transfer-Encoding: chunked, gzip, chunked", body=chunked), expected(502), None, ""),
    "chunked-gzip": ("http_transfer_encoding", response("Transfer-Encoding: chunked, gzip", body=chunked), expected(502), None, ""),
    "gzip": ("http_transfer_encoding", response("Transfer-Encoding: gzip", body=b"x"), expected(502), None, ""),
    "many-chunks": (
        "truncated",
        response("Transfer-Encoding: chunked", body=(b"32f\r\n" + b"x" * 815 + b"\r\n") * 20 + chunked),
        expected(200, body="x" * 16300, end="complete"),
        None,
        "",
    ),
    "large": ("http_bodyless_response", response("Content-Length: 50000", body=b"x" * 50_000), expected(200, body="x" * 50_000, end="complete"), None, ""),
}
for path, (test, _, theirs, ours, reason) in RESPONSES.items():
    row(test, f"response {path}", get(f"/{path}"), theirs, ours, reason)
    row(test, f"response {path} over HTTP/2", get2(f"/{path}"), theirs, ours, reason)
for path in ["many-chunks", "large"]:
    row("http_bodyless_response", f"HEAD {path}", get(f"/{path}", method="HEAD"), expected(200, body="", end="complete"))
    row("http_bodyless_response", f"HEAD {path} over HTTP/2", get2(f"/{path}", method="HEAD"), expected(200, body="", end="complete"))
