"""The upstreams of the client tests: an HTTP server that echoes requests, and a WebSocket server that echoes messages."""

import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

# A body that is larger than all buffers between client and upstream.
LARGE = bytes(range(256)) * (4 << 12)


class Echo(BaseHTTPRequestHandler):
    """Echo requests. `/large` responds with `LARGE`, `/gzip` with a compressed body, `/events` with server-sent events."""

    protocol_version = "HTTP/1.1"

    def body(self):
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answer(self):
        body = self.body()
        path = self.path.partition("?")[0]
        if path == "/events":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number in range(3):
                event = f"data: {number}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.write(b"0\r\n\r\n")
            return
        answer, headers = LARGE, {}
        if path != "/large":
            got = {
                "method": self.command,
                "target": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "length": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
            answer = json.dumps(got).encode()
        if path == "/gzip":
            answer, headers = gzip.compress(answer), {"content-encoding": "gzip"}
        self.send_response(200)
        for name, value in {"content-length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = answer

    def log_message(self, *_):
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    # If the backlog is full, the kernel retries a connection only after a second or more.
    request_queue_size = 1024

    def handle_error(self, *_):
        # Some checks abort requests, so that connections end early.
        pass


def http():
    """Start the HTTP server. Return its address."""
    server = Quiet(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return "%s:%d" % server.server_address


def websocket():
    """Start the WebSocket server, which sends the first message. Return its address."""

    def echo(connection):
        try:
            connection.send("hello")
            for message in connection:
                connection.send(message)
        except ConnectionClosed:
            pass

    server = serve(echo, "127.0.0.1", 0, max_size=None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return "%s:%d" % server.socket.getsockname()
