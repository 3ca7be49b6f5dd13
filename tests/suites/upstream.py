"""An upstream that reports requests and sends responses from a table, both byte for byte."""

import itertools
import json
import socket
import socketserver
import threading


class Upstream(socketserver.ThreadingTCPServer):
    """`responses` maps the path of a request to the parts of a response, or to a function that returns them for the request. A part is
    bytes, or `None` to wait until the client closes the connection.

    After a response in `responses`, the connection is closed. For other paths, the response is a JSON object that describes the request:
    `line`, `headers`, `body`, `trailers`, and the number of its `connection`. `seen` contains all requests.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, responses=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.responses = responses or {}
        self.seen = []
        self.connections = itertools.count()
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        # A gateway closes the connection of a response that it rejects.
        pass


class Handler(socketserver.StreamRequestHandler):
    def setup(self):
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def lines(self):
        """Read headers or trailers."""
        found = []
        while (line := self.rfile.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            found.append((name, value.strip()))
        return found

    def body(self, headers):
        """Return the body and its trailers."""
        values = {name.lower(): value for name, value in headers}
        if "transfer-encoding" not in values:
            return self.rfile.read(int(values.get("content-length", 0))), []
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body, self.lines()

    def handle(self):
        connection = next(self.server.connections)
        while line := self.rfile.readline():
            headers = self.lines()
            body, trailers = self.body(headers)
            request = {
                "line": line.decode("latin-1").strip(),
                "headers": headers,
                "body": body.decode("latin-1"),
                "trailers": trailers,
                "connection": connection,
            }
            self.server.seen.append(request)
            method, target, _ = request["line"].split(" ")
            parts = self.server.responses.get(target.partition("?")[0])
            if parts is None:
                said = json.dumps(request).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n\r\n"
                self.wfile.write(head.encode() + (b"" if method == "HEAD" else said))
                continue
            for part in parts(request) if callable(parts) else parts:
                if part is None:
                    self.rfile.read()
                else:
                    self.wfile.write(part)
            return
