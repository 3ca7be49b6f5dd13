"""Sends one case through one gateway and reads the responses as a strict client."""

import socket
import time
from dataclasses import dataclass, field

# Seconds without a byte from a gateway, after which it counts as hanging.
HANG = 5


@dataclass
class Outcome:
    statuses: list = field(default_factory=list)
    # "closed", "open" or "hang".
    end: str = "open"
    # Statuses of responses of the gateway itself: problem documents, which applications do not send.
    own: list = field(default_factory=list)
    # For the additional request after each case: its status, and whether the response belongs to it.
    last: tuple = ()


class Reader:
    """Reads responses in the order of their arrival."""

    def __init__(self, methods):
        self.buffer = b""
        self.methods = list(methods)
        self.responses = []
        self.ended = False

    def feed(self, data):
        self.buffer += data
        self.ended |= not data
        while self.take():
            pass

    def take(self):
        """Take the next complete response from the buffer."""
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found or not head.startswith(b"HTTP/1."):
            return False
        status = int(head[9:12])
        lines = {}
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            lines[name.strip().lower()] = value.strip().lower()
        method = self.methods[0] if self.methods else b"GET"
        if 100 <= status < 200 and status != 101:
            self.buffer = rest
            return True
        if method == b"HEAD" or status in (101, 204, 304):
            body = b""
        elif lines.get(b"transfer-encoding") == b"chunked":
            body = b""
            while True:
                size, found, rest = rest.partition(b"\r\n")
                if not found:
                    return False
                length = int(size.split(b";")[0], 16)
                if len(rest) < length + 2:
                    return False
                body += rest[:length]
                rest = rest[length + 2 :]
                if length == 0:
                    break
        elif b"content-length" in lines:
            length = int(lines[b"content-length"])
            if len(rest) < length:
                return False
            body, rest = rest[:length], rest[length:]
        elif self.ended:
            body, rest = rest, b""
        else:
            return False
        self.buffer = rest
        self.methods[:1] = []
        self.responses.append((status, lines, body))
        return True


def read(stream, reader, count, deadline):
    """Read until `count` responses, the end of the connection, or the deadline."""
    while len(reader.responses) < count and not reader.ended:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        stream.settimeout(left)
        try:
            reader.feed(stream.recv(1 << 16))
        except TimeoutError:
            return False
        except OSError:
            reader.feed(b"")
    return True


def send(stream, data):
    try:
        stream.settimeout(HANG)
        stream.sendall(data)
    except OSError:
        # The gateway has rejected the request while it was sent. Read its response.
        pass


def run(port, data, method, requests, alone, last, mark):
    """Send a case, then `last` on the same connection. Use a new connection if the first one is closed or if `alone` is set."""
    outcome = Outcome()
    with socket.create_connection(("127.0.0.1", port), HANG) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(stream, data)
        reader = Reader([method] * max(requests, 1))
        deadline = time.monotonic() + HANG
        answered = read(stream, reader, max(requests, 1), deadline)
        outcome.statuses = [status for status, _, _ in reader.responses]
        outcome.own = [status for status, lines, _ in reader.responses if lines.get(b"content-type") == b"application/problem+json"]
        closing = reader.ended or any(lines.get(b"connection") == b"close" for _, lines, _ in reader.responses)
        outcome.end = "hang" if not answered else "closed" if closing else "open"
        if outcome.end == "open" and not alone:
            reader = Reader([b"GET"])
            send(stream, last)
            if read(stream, reader, 1, time.monotonic() + HANG) and reader.responses:
                outcome.last = told(reader.responses[0], mark)
                return outcome
    outcome.last = separately(port, last, mark)
    return outcome


def separately(port, data, mark):
    """Send one request on a new connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), HANG) as stream:
            send(stream, data)
            reader = Reader([b"GET"])
            read(stream, reader, 1, time.monotonic() + HANG)
            return told(reader.responses[0], mark) if reader.responses else (0, False)
    except OSError:
        return (0, False)


def told(response, mark):
    status, _, body = response
    return status, b'"%s"' % mark in body
