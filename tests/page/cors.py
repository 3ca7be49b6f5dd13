#!/usr/bin/env python3
"""CORS in a real browser: scripts of other origins call routes of the gateway. `make test-page`.

    cors.py BINARY

Exits with 1 if a check fails.
"""

import http.server
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))
from browser import Browser
from gateway import Gateway, expect


class Page(http.server.BaseHTTPRequestHandler):
    """A page of another origin. Its port distinguishes it from the origin of the gateway."""

    def do_GET(self):
        body = b"<!doctype html><title>page</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def origin():
    """Start a server of `Page` on a free port. Return its origin."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def configuration(allowed):
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[limit.once]
by = "route"
quota = "1/1d"
algorithm = "fixed-window"
[limit.key]
by = "header:x-api-key"
quota = "1000/s"
[upstream.gone]
servers = ["http://127.0.0.1:1"]
[[route]]
name = "once"
path = "/once"
limits = ["once"]
respond = {{ status = 200, body = "once" }}
cors = {{ origins = ["{allowed}"] }}
[[route]]
name = "items"
path = "/items/{{id}}"
methods = ["GET", "PUT"]
limits = ["key"]
respond = {{ status = 200, body = "item" }}
response_headers = {{ set = {{ x-total = "7", x-hidden = "8" }} }}
cors = {{ origins = ["{allowed}"], headers = ["x-api-key"], credentials = true, expose = ["x-total"] }}
[[route]]
name = "gone"
path = "/gone"
upstream = "gone"
cors = {{ origins = ["*"] }}
[[route]]
name = "closed"
path = "/closed"
respond = {{ status = 200, body = "closed" }}
deny = ["127.0.0.1"]
cors = {{ origins = ["*"] }}
[[route]]
name = "plain"
path = "/plain"
respond = {{ status = 200, body = "plain" }}
"""


FETCH = """
const [url, options] = arguments;
return fetch(url, options).then(
  async (response) => ({ status: response.status, body: await response.text(), headers: Object.fromEntries(response.headers) }),
  (error) => ({ error: error.name }),
);
"""


def main():
    allowed, other = origin(), origin()
    with Gateway(sys.argv[1], configuration(allowed)) as gateway, Browser() as browser:
        url = gateway.urls[0]

        def fetch(path, **options):
            return browser.run(FETCH, f"{url}{path}", options)

        browser.open(f"{allowed}/")
        seen = fetch("/once")
        expect((seen.get("status"), seen.get("body")) == (200, "once"), f"the first request passes: {seen}")
        seen = fetch("/once")
        expect(seen.get("status") == 429, f"the script sees the 429: {seen}")
        headers = seen["headers"]
        expect(headers["ratelimit"].startswith('"once";r=0;t='), f"and the remaining quota: {headers}")
        expect(headers["ratelimit-policy"] == '"once";q=1;w=86400', f"and the policy: {headers}")
        expect(int(headers["retry-after"]) > 0, f"and when to retry: {headers}")

        seen = fetch("/items/7", method="PUT", headers={"x-api-key": "k"})
        expect(seen.get("status") == 200, f"a preflight allows a method and a custom header: {seen}")
        expect(seen["headers"].get("x-total") == "7" and "x-hidden" not in seen["headers"], f"exposed headers: {seen}")
        seen = fetch("/items/7", method="PUT", headers={"x-api-key": "k"}, credentials="include")
        expect(seen.get("status") == 200, f"with credentials, too: {seen}")
        seen = fetch("/items/7", headers={"x-other": "1"})
        expect(seen == {"error": "TypeError"}, f"no other header is allowed: {seen}")
        seen = fetch("/items/7", method="DELETE", headers={"x-api-key": "k"})
        expect(seen == {"error": "TypeError"}, f"no other method is allowed: {seen}")
        seen = fetch("/items/7")
        expect(seen.get("status") == 400, f"an error of the gateway can be read: {seen}")
        seen = fetch("/gone")
        expect(seen.get("status") == 502, f"a failure of the upstream, too: {seen}")
        seen = fetch("/closed")
        expect(seen.get("status") == 403, f"and the rejection of an access rule: {seen}")
        seen = fetch("/gone", credentials="include")
        expect(seen == {"error": "TypeError"}, f"all origins are allowed without credentials only: {seen}")
        seen = fetch("/plain")
        expect(seen == {"error": "TypeError"}, f"a route without a policy cannot be read: {seen}")

        browser.open(f"{other}/")
        for path, options in [("/once", {}), ("/items/7", {"method": "PUT", "headers": {"x-api-key": "k"}})]:
            seen = fetch(path, **options)
            expect(seen == {"error": "TypeError"}, f"another origin cannot read {path}: {seen}")
        seen = fetch("/gone")
        expect(seen.get("status") == 502, f"unless all origins are allowed: {seen}")
    print("CORS: a script of another origin reads a 429 and its headers, and passes a preflight; other origins cannot")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
