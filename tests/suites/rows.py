"""The format of rows for behaviour that nginx-tests and HAProxy's reg-tests check: a request, and the expected outcome."""

from dataclasses import dataclass

# The host of requests that do not test the host.
HOST = "gateway.test"


@dataclass(frozen=True)
class Expected:
    """The expected outcome. `status` is the response status, or `reset` for a stream error, or `closed`. None: it is not compared.

    `seen` is what the upstream receives: headers by name, `:line` and `:body`. None means that the upstream must not receive the header.
    "" as `:line` means that it must not receive the request. `sent` is what the client receives: headers, `:body`, and `:end`, which is
    `complete` or `incomplete`.
    """

    status: object = 200
    seen: tuple = ()
    sent: tuple = ()


@dataclass(frozen=True)
class Row:
    """A row. `request` is bytes for HTTP/1.1, or headers and a body for HTTP/2. `ours` is what Sluicegate does if that differs from
    `theirs`, and `reason` explains the difference."""

    test: str
    name: str
    request: object
    theirs: Expected
    ours: Expected = None
    reason: str = ""


def expected(status=200, seen=None, **sent):
    """Return an expected outcome. Header names in `sent` have underscores instead of hyphens. `body` and `end` are not headers."""
    special = {"body": ":body", "end": ":end"}
    return Expected(status, tuple((seen or {}).items()), tuple((special.get(name, name.replace("_", "-")), value) for name, value in sent.items()))


def get(target="/", *lines, host=HOST, method="GET", body=b"", version="1.1"):
    """Return an HTTP/1.1 request. A body gets a Content-Length."""
    head = [f"{method} {target} HTTP/{version}", *([f"Host: {host}"] if host is not None else []), *lines]
    if body:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def get2(path="/", *lines, method="GET", scheme="http", authority=HOST, body=None):
    """Return an HTTP/2 request: its headers as they are sent, and its body."""
    pseudo = [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path)]
    return [*((name, value) for name, value in pseudo if value is not None), *lines], body


# Return an HTTP/1.1 response of the upstream.
def response(*lines, body=b"", status="200 OK"):
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1") + body
