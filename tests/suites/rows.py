"""Rows of the behaviour that nginx-tests and HAProxy's reg-tests check, in words of our own: a request, and what has to come of it."""

from dataclasses import dataclass

# The host of requests that do not test it.
HOST = "gateway.test"


@dataclass(frozen=True)
class Expected:
    """`status` is that of the response, or the error of the stream (`reset`), or `closed`. None: not compared.

    `seen` is what the upstream got: headers by name, `:line`, `:body`; None is a header that it must not get, and "" of `:line` no
    request. `sent` is what the client got: headers, `:body`, and `:end`, which is `complete` or `incomplete`.
    """

    status: object = 200
    seen: tuple = ()
    sent: tuple = ()


@dataclass(frozen=True)
class Row:
    """`request` is bytes for HTTP/1.1, or header lines and body for HTTP/2. `ours` is what Sluicegate does where it differs, and
    `reason` why."""

    test: str
    name: str
    request: object
    theirs: Expected
    ours: Expected = None
    reason: str = ""


def expected(status=200, seen=None, **sent):
    """Names in `sent` have underscores for hyphens; `body` and `end` are not headers."""
    special = {"body": ":body", "end": ":end"}
    return Expected(status, tuple((seen or {}).items()), tuple((special.get(name, name.replace("_", "-")), value) for name, value in sent.items()))


def get(target="/", *lines, host=HOST, method="GET", body=b"", version="1.1"):
    """Return a request of HTTP/1.1. Bodies get a Content-Length."""
    head = [f"{method} {target} HTTP/{version}", *([f"Host: {host}"] if host is not None else []), *lines]
    if body:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def get2(path="/", *lines, method="GET", scheme="http", authority=HOST, body=None):
    """Return a request of HTTP/2: its header lines as they are sent, and its body."""
    pseudo = [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path)]
    return [*((name, value) for name, value in pseudo if value is not None), *lines], body


# An HTTP/1.1 response of the upstream.
def response(*lines, body=b"", status="200 OK"):
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1") + body
