#!/usr/bin/env python3
"""What a browser needs of the edge, over HTTP/2 with TLS: WebSockets, compression, a login, error pages and security
headers. `make test-page`.

    edge.py BINARY

Exits with 1 if a check fails.
"""

import base64
import hashlib
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))
from browser import ELEMENT, Browser
from cors import FETCH, origin
from gateway import CERTIFICATE, KEY, Gateway, expect

DOCUMENT = "<!doctype html><title>document</title>" + "".join(f"<p>Zeile {number}: äöü</p>" for number in range(2000))
FORM = """<!doctype html><title>Log in</title><p id=said>{said}</p><form method=post action=/login>
<input name=username><input name=password type=password><button>Log in</button></form>"""
# The second event of `/events` is sent when the browser has the first one.
HAS_FIRST = threading.Event()
ATTEMPTS = []


class Application(http.server.BaseHTTPRequestHandler):
    """A site with a form login, an event stream and a WebSocket that echoes messages."""

    protocol_version = "HTTP/1.1"

    def answer(self, body, status=200, media_type="text/html; charset=utf-8"):
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        path = self.path.partition("?")[0]
        if self.headers.get("upgrade") == "websocket":
            self.web_socket()
        elif path == "/events":
            self.events()
        elif path == "/login":
            self.answer(FORM.format(said="Please log in"))
        elif path.endswith("/script"):
            self.answer("window.hasRun = true", media_type="text/plain")
        elif path.endswith("/uses-script"):
            self.answer("<!doctype html><script src=script></script><p id=said>loaded</p>")
        elif path == "/":
            self.answer("<!doctype html><title>home</title>")
        else:
            self.answer(DOCUMENT)

    def do_POST(self):
        fields = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
        ATTEMPTS.append(fields["username"][0])
        if fields["password"] == ["right"]:
            self.answer(FORM.format(said="Hello " + fields["username"][0]))
        else:
            self.answer(FORM.format(said="Wrong password"), 401)

    def events(self):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in ["first", "second"]:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            if event == "first":
                HAS_FIRST.wait(60)
        self.wfile.write(b"0\r\n\r\n")

    def web_socket(self):
        """Echo the frames of a WebSocket (RFC 6455), whose payloads have less than 64 KiB, until it is closed."""
        accept = hashlib.sha1((self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "upgrade")
        self.send_header("sec-websocket-accept", base64.b64encode(accept).decode())
        self.end_headers()
        self.close_connection = True
        while head := self.rfile.read(2):
            length = head[1] & 127
            long = self.rfile.read(2) if length == 126 else b""
            mask = self.rfile.read(4)
            masked = self.rfile.read(int.from_bytes(long) if long else length)
            payload = bytes(byte ^ mask[index % 4] for index, byte in enumerate(masked))
            self.wfile.write(bytes([head[0], length]) + long + payload)
            if head[0] & 15 == 8:
                return

    def log_message(self, *_):
        pass


def application():
    """Start the application on a free port. Return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Application)
    server.request_queue_size = 128
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_port}"


def configuration(upstream):
    compressed = "".join(
        f'[[route]]\nname = "{coding}"\npath = "/{coding}"\nupstream = "app"\ncompress = {{ algorithms = ["{coding}"] }}\n'
        for coding in ["gzip", "br", "zstd"]
    )
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = {{ to = "access.log", format = "json", fields = ["route", "protocol", "status"] }}
[server]
error_pages.html = "<!doctype html><title>{{status}} {{reason}}</title><h1>{{reason}}</h1><p id=detail>{{detail}}</p>"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]
[upstream.app]
servers = ["http://{upstream}"]
[upstream.dead]
servers = ["http://127.0.0.1:1"]
[limit.login]
by = ["ip", "form:username"]
algorithm = "sliding-log"
quota = "5/15m"
refund_on = ["2xx"]
[[route]]
name = "home"
path = "/{{*rest}}"
upstream = "app"
[[route]]
name = "ws"
path = "/ws"
upstream = "app"
websocket = true
[[route]]
name = "closed"
path = "/closed"
upstream = "app"
[[route]]
name = "events"
path = "/events"
upstream = "app"
compress = {{ types = ["text/event-stream"], algorithms = ["br"] }}
{compressed}
[[route]]
name = "login"
path = "/login"
methods = ["POST"]
upstream = "app"
limits = ["login"]
[[route]]
name = "dead"
path = "/dead"
upstream = "dead"
error_pages.html = "<!doctype html><title>Sorry</title><p id=detail>{{status}}: {{detail}}</p>"
error_pages.json = '{{"code": {{status}}, "message": "{{detail}}"}}'
[[route]]
name = "safe"
path = "/safe/{{*rest}}"
upstream = "app"
security_headers = true
"""


SOCKET = """
const [url, messages] = arguments;
return new Promise((resolve) => {
  const received = [];
  const socket = new WebSocket(url);
  socket.onopen = () => messages.forEach((message) => socket.send(message));
  socket.onmessage = (event) => {
    received.push(event.data);
    if (received.length === messages.length) socket.close(1000, "done");
  };
  socket.onerror = () => resolve({ error: true });
  socket.onclose = (event) => resolve({ received, code: event.code, reason: event.reason });
});
"""

EVENTS = """
window.events = [];
fetch("/events").then(async (response) => {
  window.events.push(response.headers.get("content-encoding"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) window.events.push(part.value);
  window.events.push("end");
});
"""

FRAME = """
const frame = document.createElement("iframe");
frame.src = arguments[0];
return new Promise((resolve) => {
  frame.onload = () => resolve(frame.contentDocument?.title ?? "another origin");
  document.body.append(frame);
});
"""


def records(gateway):
    log = Path(gateway.folder.name) / "access.log"
    return [json.loads(line) for line in log.read_text().splitlines()]


def check_sockets(browser, gateway, url):
    messages = ["hello", "größer " * 100]
    address = url.replace("https", "wss")
    seen = browser.run(SOCKET, f"{address}/ws", messages)
    expect(seen == {"received": messages, "code": 1000, "reason": "done"}, f"a WebSocket echoes: {seen}")
    record = browser.until("the WebSocket is logged", lambda: [each for each in records(gateway) if each["route"] == "ws"])
    expect([each["protocol"] for each in record] == ["HTTP/2.0"], f"the WebSocket uses HTTP/2: {record}")
    seen = browser.run(SOCKET, f"{address}/closed", messages)
    expect(seen == {"error": True}, f"a route without WebSockets opens none: {seen}")
    print("browser: a WebSocket over HTTP/2 echoes messages and is closed by both sides")


def check_compression(browser, gateway, url):
    for coding in ["gzip", "br", "zstd"]:
        seen = browser.run(FETCH, f"{url}/{coding}", {})
        expect(seen["headers"]["content-encoding"] == coding, f"the response has the coding: {seen['headers']}")
        expect(seen["body"] == DOCUMENT, f"{coding}: the browser decodes the whole document")
        browser.open(f"{url}/{coding}")
        expect(browser.run("return document.querySelectorAll('p').length") == 2000, f"{coding}: as a page, too")
        sizes = browser.run("const e = performance.getEntriesByType('navigation')[0];"
                            "return [e.nextHopProtocol, e.encodedBodySize, e.decodedBodySize]")
        expect(sizes[0] == "h2" and sizes[1] < sizes[2] / 4 and sizes[2] == len(DOCUMENT.encode()), f"{coding}: {sizes}")
    browser.open(f"{url}/")
    browser.run(EVENTS)
    events = lambda: browser.run("return window.events")
    browser.until("the first event arrives", lambda: events() == ["br", "data: first\n\n"])
    HAS_FIRST.set()
    browser.until("the second event arrives", lambda: events() == ["br", "data: first\n\n", "data: second\n\n", "end"])
    print("browser: decodes gzip, br and zstd, and a compressed event stream event by event")


def check_login(browser, url):
    def log_in(user, password):
        browser.open(f"{url}/login")
        browser.type("input[name=username]", user)
        browser.type("input[name=password]", password)
        browser.click("button")
        said = browser.until("the form is sent", lambda: browser.text("#said") not in ("", "Please log in") or browser.text("h1"))
        return browser.text("h1") or browser.text("#said") if said else ""

    for _ in range(3):
        expect(log_in("alice", "right") == "Hello alice", "a successful login is free")
    for number in range(5):
        expect(log_in("alice", f"guess {number}") == "Wrong password", f"failure {number} reaches the application")
    attempts = list(ATTEMPTS)
    expect(log_in("alice", "right") == "Too Many Requests", "then the browser shows the page for 429")
    expect(browser.run("return document.title") == "429 Too Many Requests", "with its title")
    expect(browser.text("#detail") != "", "and what is wrong")
    body = {"method": "POST", "body": "username=alice&password=right", "headers": {"content-type": "application/x-www-form-urlencoded"}}
    seen = browser.run(FETCH, f"{url}/login", {**body, "headers": {**body["headers"], "accept": "application/json"}})
    expect(seen["status"] == 429 and seen["headers"]["content-type"] == "application/problem+json", f"a script gets JSON: {seen}")
    expect(int(seen["headers"]["retry-after"]) > 0, f"and when to retry: {seen}")
    expect(ATTEMPTS == attempts, f"the application sees no denied login: {ATTEMPTS}")
    expect(log_in("bob", "right") == "Hello bob", "another account logs in")
    print("browser: five failed logins, then the page for 429; successful logins and other accounts are free")


def check_pages_and_headers(browser, url, other):
    browser.open(f"{url}/dead")
    expect(browser.run("return document.title") == "Sorry" and browser.text("#detail").startswith("502: "), "the page of the route")
    seen = browser.run(FETCH, f"{url}/dead", {"headers": {"accept": "application/json"}})
    expect(seen["status"] == 502 and json.loads(seen["body"])["code"] == 502, f"a script gets the JSON template: {seen}")

    seen = browser.run(FETCH, f"{url}/safe/document", {})["headers"]
    for name, value in [("x-content-type-options", "nosniff"), ("x-frame-options", "SAMEORIGIN"),
                        ("referrer-policy", "strict-origin-when-cross-origin"), ("strict-transport-security", "max-age=31536000")]:
        expect(seen.get(name) == value, f"{name}: {seen}")
    for path, runs in [("uses-script", True), ("safe/uses-script", None)]:
        browser.open(f"{url}/{path}")
        expect(browser.run("return window.hasRun ?? null") == runs, f"/{path}: a script of another media type runs: {runs}")
    browser.open(f"{url}/")
    expect(browser.run(FRAME, f"{url}/safe/document") == "document", "the same origin may frame a page")
    for path, is_refused in [("document", False), ("safe/document", True)]:
        browser.open(f"{other}/")
        browser.run(FRAME, f"{url}/{path}")
        browser.call("POST", "/frame", {"id": {ELEMENT: browser.find("iframe")}})
        # A frame that the browser refuses to load has an error page.
        seen = browser.run("return location.href")
        browser.call("POST", "/frame", {"id": None})
        expected = "chrome-error://chromewebdata/" if is_refused else f"{url}/{path}"
        expect(seen == expected, f"/{path} in a frame of another origin: {seen}")
    print("browser: error pages by Accept, and security headers stop frames and scripts of other types")


def main():
    key = subprocess.run(["openssl", "x509", "-in", str(CERTIFICATE), "-pubkey", "-noout"], check=True, capture_output=True)
    key = subprocess.run(["openssl", "pkey", "-pubin", "-outform", "der"], input=key.stdout, check=True, capture_output=True)
    trusted = base64.b64encode(hashlib.sha256(key.stdout).digest()).decode()
    with Gateway(sys.argv[1], configuration(application())) as gateway, \
            Browser([f"--ignore-certificate-errors-spki-list={trusted}"]) as browser:
        url = gateway.urls[0].replace("http://", "https://")
        browser.open(f"{url}/")
        expect(browser.run("return performance.getEntriesByType('navigation')[0].nextHopProtocol") == "h2", "the page uses HTTP/2")
        check_sockets(browser, gateway, url)
        check_compression(browser, gateway, url)
        check_login(browser, url)
        check_pages_and_headers(browser, url, origin())


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
