#!/usr/bin/env python3
"""Generated cases of forward authentication, sent through Sluicegate, nginx (`auth_request`) and Traefik (ForwardAuth):
`make test-suites`.

    forward_auth.py BINARY FOLDER

FOLDER contains the tools that the Makefile installs there. The suite compares the response that the client receives, the request that
the upstream receives and the request that the authentication server receives. Every difference must have an explanation in EXPLANATIONS,
and every explanation must match a difference. Otherwise, the suite exits with 1. docs/how-to/forward-authentication.md has a table of the
differences.
"""

import http.client
import random
import shutil
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import servers

GATEWAYS = ["sluicegate", "nginx", "traefik"]
CASES = 200
# The headers of a denial that the suite compares.
PASSED = ["location", "set-cookie", "www-authenticate"]


class Case:
    """A request, and the authentication server's response for it."""

    def __init__(self, number, choose):
        self.number = number
        self.method = choose(["GET", "GET", "GET", "POST", "PUT", "DELETE", "HEAD"])
        self.target = choose(["/a", "/a/b?q=1&r", "/a%20b", "/%61", "/a//b", "/a/../b", "/a?x=%2e%2e/"])
        self.body = choose([b"", b"", b"body"]) if self.method in ("POST", "PUT") else b""
        self.forged = choose(
            [
                [],
                [("X-User", "root")],
                [("x-user", "root"), ("X-USER", "root")],
                [("X_User", "root")],
                [("X-User", "root"), ("Connection", "X-User")],
                [("X-Plan", "root")],
                [("X-Forwarded-Uri", "/forged"), ("X-Forwarded-Method", "FORGED"), ("X-Forwarded-For", "203.0.113.9")],
            ]
        )
        self.authorization = choose([None, "Bearer opaque"])
        self.status = choose([200, 200, 200, 201, 204, 299, 301, 302, 307, 400, 401, 401, 403, 403, 404, 418, 429, 500, 503])
        self.answer = [*choose([[], [("X-User", "alice")], [("X-User", "alice"), ("X-Plan", "gold")], [("X-User", "")]])]
        if self.status // 100 != 2:
            self.answer += choose([[], [("Location", "/login")], [("Location", "https://sso.example/login?rd=1")]])
            self.answer += choose([[], [("Set-Cookie", "a=1; Path=/")], [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]])
            self.answer += choose([[], [("WWW-Authenticate", 'Session realm="x"')]])
        self.page = b"" if self.status == 204 else choose([b"", b"<p>page of the authentication server</p>"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        cookie = self.headers.get("Cookie", "")
        number = int(cookie.partition("case=")[2] or -1)
        self.server.seen[number] = (self.command, self.path, self.headers.items(), body)
        case = self.server.cases.get(number) if self.server.cases else None
        status, headers, page = (case.status, case.answer, case.page) if case else (200, [], b"upstream")
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any


def serve(cases):
    """Start an authentication server with a response per case, or an upstream. Return the server; its `seen` has the requests by case."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.cases, server.seen = cases, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def port(server):
    return server.server_address[1]


def start_sluicegate(binary, auth, upstream):
    return servers.sluicegate(
        binary,
        f"""
[log]
access = "off"
[admin]
address = "127.0.0.1:0"
[[listener]]
address = "127.0.0.1:0"
[auth.sso]
kind = "forward"
url = "http://127.0.0.1:{port(auth)}/verify"
response_headers = ["x-user", "x-plan"]
[upstream.app]
servers = ["http://127.0.0.1:{port(upstream)}"]
[[route]]
name = "app"
path = "/{{*rest}}"
require = ["sso"]
upstream = "app"
""",
    )


def start_nginx(folder, listen, auth, upstream):
    servers.nginx(
        folder,
        "forward-auth",
        [listen],
        f"""
  server {{
    listen 127.0.0.1:{listen};
    location / {{
      auth_request /_auth;
      auth_request_set $user $upstream_http_x_user;
      auth_request_set $plan $upstream_http_x_plan;
      proxy_set_header X-User $user;
      proxy_set_header X-Plan $plan;
      proxy_pass http://127.0.0.1:{port(upstream)};
    }}
    location = /_auth {{
      internal;
      proxy_pass http://127.0.0.1:{port(auth)}/verify;
      proxy_pass_request_body off;
      proxy_set_header Content-Length "";
      proxy_set_header X-Forwarded-Method $request_method;
      proxy_set_header X-Forwarded-Uri $request_uri;
      proxy_set_header X-Forwarded-Host $host;
      proxy_set_header X-Forwarded-Proto $scheme;
      proxy_set_header X-Forwarded-For $remote_addr;
    }}
  }}""",
    )


def start_traefik(folder, programs, listen, auth, upstream):
    (folder / "traefik.dynamic.yml").write_text(
        f"""
http:
  routers:
    app: {{ rule: "PathPrefix(`/`)", middlewares: [sso], service: app, entryPoints: [web] }}
  middlewares:
    sso:
      forwardAuth:
        address: "http://127.0.0.1:{port(auth)}/verify"
        authResponseHeaders: [X-User, X-Plan]
        authRequestHeaders: [Authorization, Cookie]
  services:
    app: {{ loadBalancer: {{ servers: [{{ url: "http://127.0.0.1:{port(upstream)}" }}] }} }}
"""
    )
    (folder / "traefik.yml").write_text(
        f"""
global: {{ checkNewVersion: false, sendAnonymousUsage: false }}
entryPoints: {{ web: {{ address: "127.0.0.1:{listen}" }} }}
providers: {{ file: {{ filename: "{folder}/traefik.dynamic.yml" }} }}
log: {{ level: ERROR }}
"""
    )
    servers.start([str(programs / "traefik"), f"--configFile={folder}/traefik.yml"], [listen], folder)
    # Traefik opens its port before it has read its routes.
    deadline = time.monotonic() + 60
    while probe(listen) == 404:
        if time.monotonic() > deadline:
            raise SystemExit("Traefik has no route")
        time.sleep(0.02)


def probe(listen):
    connection = http.client.HTTPConnection("127.0.0.1", listen, timeout=20)
    connection.request("GET", "/")
    return connection.getresponse().status


def send(listen, case):
    """Send the request of a case. Return the status, the headers to compare, and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", listen, timeout=20)
    connection.putrequest(case.method, case.target, skip_accept_encoding=True)
    connection.putheader("Cookie", f"case={case.number}")
    if case.authorization:
        connection.putheader("Authorization", case.authorization)
    for name, value in case.forged:
        connection.putheader(name, value)
    if case.body:
        connection.putheader("Content-Length", str(len(case.body)))
    connection.endheaders(case.body or None)
    response = connection.getresponse()
    body = response.read()
    headers = [(name.lower(), value) for name, value in response.getheaders() if name.lower() in PASSED]
    connection.close()
    return response.status, headers, body


def facts(case, client, told, seen):
    """Return the facts to compare, by name."""
    status, headers, body = client
    identity = []
    for name, value in seen[2] if seen else []:
        if name.lower().replace("_", "-") in ("x-user", "x-plan"):
            identity.append((name.lower(), value))
    asked = {name.lower(): value for name, value in told[2]} if told else {}
    is_denied = seen is None
    return {
        "admitted": seen is not None,
        "status": status,
        **{name: [value for other, value in headers if other == name] for name in PASSED},
        "page": body if is_denied and case.method != "HEAD" else None,
        "identity": sorted(identity),
        "asked by": (told[0], len(told[3])) if told else None,
        "told method": asked.get("x-forwarded-method"),
        "told uri": asked.get("x-forwarded-uri"),
        "told address": asked.get("x-forwarded-for"),
        "told authorization": asked.get("authorization"),
        "body": seen[3] if seen else None,
    }


def is_denial(case):
    return case.status // 100 != 2


# Differences from Sluicegate: the gateway, the facts that differ, the cases, and what the gateway does.
EXPLANATIONS = [
    ("nginx", ["status"], lambda case: is_denial(case) and case.status not in (401, 403), "responds with 500 if the status of the authentication server is not 2xx, 401 or 403"),
    ("nginx", ["location", "set-cookie"], is_denial, "does not forward Location and Set-Cookie of a denial to the client"),
    ("nginx", ["www-authenticate"], lambda case: is_denial(case) and case.status != 401, "forwards WWW-Authenticate only with 401"),
    ("nginx", ["page"], is_denial, "sends its own error page instead of the body of the authentication server"),
    ("nginx", ["told uri"], lambda case: True, "sends the target to the authentication server as received ($request_uri), not in canonical form"),
    ("nginx", ["identity"], lambda case: ("X-User", "") in case.answer, "does not forward an empty header of the authentication server"),
    ("traefik", ["identity"], lambda case: any("_" in name for name, _ in case.forged), "forwards a client's X_User, which servers may read as X-User"),
    ("traefik", ["location"], lambda case: ("Location", "/login") in case.answer, "makes a relative Location absolute, with the URL of the authentication server"),
]


def explain(gateway, fact, case, used):
    for index, (name, names, applies, _) in enumerate(EXPLANATIONS):
        if name == gateway and fact in names and applies(case):
            used[index] += 1
            return True
    return False


def main():
    binary, folder = sys.argv[1:]
    tools = Path(folder).resolve()
    run = tools / "forward-auth"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    choose = random.Random(7617).choice
    cases = {number: Case(number, choose) for number in range(CASES)}
    failures, used, results = [], Counter(), {}
    try:
        for gateway in GATEWAYS:
            auth, upstream = serve(cases), serve(None)
            if gateway == "sluicegate":
                ours = start_sluicegate(binary, auth, upstream)
                listen = int(ours.urls[0].rpartition(":")[2])
            else:
                (listen,) = servers.free_ports(1)
                if gateway == "nginx":
                    start_nginx(run, listen, auth, upstream)
                else:
                    start_traefik(run, tools / "bin", listen, auth, upstream)
            for number, case in cases.items():
                client = send(listen, case)
                results[gateway, number] = facts(case, client, auth.seen.get(number), upstream.seen.get(number))
    finally:
        servers.stop()
    for number, case in cases.items():
        ours = results["sluicegate", number]
        # Check what the documentation of Sluicegate promises, independently of the other gateways.
        if ours["admitted"] != (not is_denial(case)) or any("root" in value for _, value in ours["identity"]):
            failures.append(f"case {number}: {vars(case)}: {ours}")
        for gateway in GATEWAYS[1:]:
            for fact, theirs in results[gateway, number].items():
                if theirs != ours[fact] and not explain(gateway, fact, case, used):
                    failures.append(f"case {number}, {gateway}, {fact}: {theirs!r}, ours {ours[fact]!r}: {vars(case)}")
    for failure in failures[:60]:
        print(f"FAILED {failure}")
    for index, (gateway, names, _, why) in enumerate(EXPLANATIONS):
        print(f"{used[index]:4} differences: {gateway} {why} ({', '.join(names)})")
        if not used[index]:
            failures.append(f"never seen: {gateway} {why}")
    if failures:
        sys.exit(f"{len(failures)} unexplained differences in {CASES} cases")
    print(f"{CASES} cases through {', '.join(GATEWAYS)}: all differences are explained")


if __name__ == "__main__":
    main()
