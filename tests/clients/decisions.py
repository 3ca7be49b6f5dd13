#!/usr/bin/env python3
"""Traefik, Caddy and Envoy ask Sluicegate for decisions, with the configurations of docs/how-to/decisions.md.

    decisions.py BINARY

Also runs the programs in examples/decisions, and checks the JSON API against docs/decisions.openapi.json. Exits with 1 if
a check fails. tests/it/decision_proxies.rs does the same with nginx and HAProxy.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator, validate

from gateway import ROOT, Gateway, expect

PAGE = (ROOT / "docs/how-to/decisions.md").read_text()
PROGRAMS = Path(sys.executable).parent
CONSUMERS = """[[consumer]]
name = "demo"
keys = ["sha256:c48a01f49fd0f2cc404bc3cbbc80e91457a3d41bb429a695243de4c61794155c"]
"""
TOKEN = "sesame"
QUOTA = 100
HTTP_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


def block(first_line):
    """Return the code block of the page with this first line."""
    for text in re.findall(r"^```[a-z]+\n(.*?)^```$", PAGE, re.M | re.S):
        if text.split("\n", 1)[0] == first_line:
            return text
    raise SystemExit(f"no block begins with {first_line!r}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Application(BaseHTTPRequestHandler):
    """Responds to every request, and records its headers."""

    protocol_version = "HTTP/1.1"
    seen = []
    lock = Lock()

    def do_GET(self):
        with self.lock:
            self.seen.append((self.path, self.headers.items()))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


class Proxy:
    """A running proxy. `down` is its response while the gateway is down."""

    def __init__(self, name, down, command, port):
        self.name, self.down, self.port = name, down, port
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(3000):
            expect(self.process.poll() is None, f"{name} does not start")
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.01)
        raise SystemExit(f"{name} does not listen")

    def get(self, path, headers=(), client="127.0.0.9"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20, source_address=(client, 0))
        connection.putrequest("GET", path)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        response.read()
        connection.close()
        return response

    def stop(self):
        self.process.kill()
        self.process.wait()


def replaced(text, gateway, port, application):
    endpoint = gateway.urls[1].removeprefix("http://")
    text = text.replace("127.0.0.1:9191", endpoint).replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{application}")


def traefik(folder, gateway, application):
    port = free_port()
    dynamic = folder / "dynamic.yaml"
    dynamic.write_text(replaced(block("# traefik.yaml: a dynamic file"), gateway, port, application))
    static = folder / "traefik.yaml"
    static.write_text(
        f'entryPoints:\n  web:\n    address: "127.0.0.1:{port}"\nproviders:\n  file:\n    filename: {dynamic}\n'
        "global:\n  checkNewVersion: false\n  sendAnonymousUsage: false\n"
    )
    proxy = Proxy("Traefik", 500, [PROGRAMS / "traefik", f"--configfile={static}"], port)
    wait_until(lambda: proxy.get("/ready", client="127.0.0.7").status != 404, "Traefik loads its routes")
    return proxy


def caddy(folder, gateway, application):
    port = free_port()
    path = folder / "Caddyfile"
    path.write_text("{\n  admin off\n}\n" + replaced(block("# Caddyfile"), gateway, port, application))
    return Proxy("Caddy", 502, [PROGRAMS / "caddy", "run", "--config", path, "--adapter", "caddyfile"], port)


def cluster(name, port, http2=False):
    text = f"""
        - name: {name}
          type: STATIC
          load_assignment:
            cluster_name: {name}
            endpoints: [{{ lb_endpoints: [{{ endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }} }}] }}]
    """
    if http2:
        text = text.rstrip() + """
          typed_extension_protocol_options:
            envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
              "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
              explicit_http_config: { http2_protocol_options: {} }
        """
    return textwrap.dedent(text).strip()


def envoy(folder, gateway, application, first_line, http2=False):
    port = free_port()
    filter_text = replaced(block(first_line), gateway, port, application)
    endpoint = int(gateway.urls[1].rsplit(":", 1)[1])
    config = f"""
static_resources:
  listeners:
    - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
      filter_chains:
        - filters:
            - name: http
              typed_config:
                "@type": {HTTP_MANAGER}
                stat_prefix: edge
                use_remote_address: true
                route_config:
                  virtual_hosts: [{{ name: all, domains: ["*"], routes: [{{ match: {{ prefix: / }}, route: {{ cluster: app }} }}] }}]
                http_filters:
                  - {textwrap.indent(filter_text, " " * 20).strip()}
                  - name: router
                    typed_config: {{ "@type": {ROUTER} }}
  clusters:
{textwrap.indent(cluster("app", application), "    ")}
{textwrap.indent(cluster("sluicegate", endpoint, http2), "    ")}
"""
    path = folder / f"envoy-{port}.yaml"
    path.write_text(config)
    command = [PROGRAMS / "envoy", "-c", path, "--use-dynamic-base-id", "--concurrency", "1"]
    return Proxy("Envoy (gRPC)" if http2 else "Envoy", 403, command, port)


def wait_until(condition, what):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise SystemExit(f"timeout: {what}")


def start_gateway(binary, redis, quota):
    page = block("# decisions.toml")
    store = page[page.index("[store]") : page.index("[auth.keys]")]
    page = page.replace(store, f'[store]\nurl = "{redis}"\nsecret = "0123456789abcdef0123456789abcdef"\ntimeout = "5s"\n\n')
    page = page.replace("127.0.0.1:9190", "127.0.0.1:0").replace("127.0.0.1:9191", "127.0.0.1:0")
    admin = '[admin]\naddress = "127.0.0.1:0"\n[log]\naccess = "off"\n'
    page = page.replace('name = "for-proxies"', f'name = "for-proxies"\napi_token = "{TOKEN}"')
    return Gateway(binary, admin + page.replace("100/min", quota), {"consumers.toml": CONSUMERS})


def check_exact(proxies):
    """240 requests of one client through all proxies at once: exactly QUOTA of them are admitted."""
    Application.seen.clear()

    def send(proxy):
        statuses = []
        for index in range(240 // (2 * len(proxies))):
            response = proxy.get(f"/orders/{index}")
            statuses.append(response.status)
            if response.status == 429:
                expect(response.headers["retry-after"] and response.headers["ratelimit"], f"{proxy.name}: {response.headers}")
        return statuses

    with ThreadPoolExecutor(2 * len(proxies)) as pool:
        statuses = [status for part in pool.map(send, proxies * 2) for status in part]
    expect(set(statuses) == {200, 429}, f"other statuses: {set(statuses)}")
    counts = statuses.count(200), len(Application.seen)
    expect(counts == (QUOTA, QUOTA), f"{counts} of {len(statuses)} were admitted")
    for proxy in proxies:
        forged = [("X-Forwarded-For", "198.51.100.1"), ("X-Real-IP", "198.51.100.1"), ("Forwarded", "for=198.51.100.1")]
        expect(proxy.get("/", forged).status == 429, f"{proxy.name}: a client forges its address")
        expect(proxy.get("/", client="127.0.0.10").status == 200, f"{proxy.name}: another client")
    print(f"{len(statuses)} requests through {', '.join(proxy.name for proxy in proxies)}: {QUOTA} admitted")


def users(headers):
    """Return the values of all headers that a server may take for X-User."""
    return [value for name, value in headers if re.sub("[^a-z0-9]", "-", name.lower()) == "x-user"]


FORGED = [
    [("X-User", "root")],
    [("x-user", "root"), ("X-USER", "admin")],
    [("X_User", "root")],
    [("X.User", "root")],
    [("X~User", "root"), ("X-User", "root")],
    [("X-User", "")],
    [("X-User", "root"), ("Connection", "close, X-User")],
    [("X-Original-URI", "/"), ("X-Forwarded-Uri", "/"), ("X-Forwarded-Method", "POST"), ("X-Forwarded-Prefix", "/x"), ("X_USER", "root")],
]


def check_forged(proxies):
    for proxy in proxies:
        response = proxy.get("/known", [("X-Api-Key", "demo-key"), ("X-User", "root")])
        expect(response.status == 200, f"{proxy.name}: {response.status} {response.headers}")
        expect(users(Application.seen[-1][1]) == ["demo"], f"{proxy.name}: {Application.seen[-1]}")
        outcomes = []
        for headers in FORGED:
            before = len(Application.seen)
            response = proxy.get("/forged", headers)
            if len(Application.seen) > before:
                values = users(Application.seen[-1][1])
                expect(all(value == "" for value in values), f"{proxy.name}: {headers} reach the application as {values}")
            else:
                expect(response.status == 400, f"{proxy.name}: {headers}: {response.status}")
            outcomes.append(response.status)
        print(f"{proxy.name}: forged headers never reach the application ({outcomes})")


def check_down(proxies, gateway):
    gateway.process.terminate()
    gateway.process.wait()
    before = len(Application.seen)
    for proxy in proxies:
        status = proxy.get("/").status
        expect(status == proxy.down, f"{proxy.name} while the gateway is down: {status} instead of {proxy.down}")
        print(f"{proxy.name} responds with {status} while the gateway is down")
    expect(len(Application.seen) == before, "a proxy forwards requests while the gateway is down")


def check_api(gateway):
    """The document is valid, the responses are as it says, and the programs in examples/decisions work."""
    document = json.loads((ROOT / "docs/decisions.openapi.json").read_text())
    validate(document, cls=OpenAPIV31SpecValidator)
    url = gateway.urls[1]
    described = {"method": "GET", "url": "https://shop.example/orders", "client_ip": "192.0.2.1", "headers": {"x-api-key": "demo-key"}}
    cases = [(described, "Decision"), ({"requests": [described] * 3}, "Decisions"), ({}, "Problem"), ({"requests": []}, "Problem")]
    cases.append(({"limits": [{"limit": "per-client", "identity": {"ip": "192.0.2.1"}}]}, "Decision"))
    for body, name in cases:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        connection.request("POST", "/v1/check", json.dumps(body), {"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        answer = json.load(response)
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        Draft202012Validator(schema).validate(answer)
        expect((response.status == 200) == (name != "Problem"), f"{response.status}: {answer}")
        connection.close()
    named = {"limits": [{"limit": "per-client", "identity": {"ip": "192.0.2.1"}, "cost": 0}]}
    for body in (described, {"requests": [described]}, named, {**named, "reserve": True}):
        body_schema = document["paths"]["/v1/check"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator({**body_schema, "components": document["components"]}).validate(body)
    folder = ROOT / "examples/decisions"
    environment = {**os.environ, "GOCACHE": str(ROOT / "target/clients/go"), "GOFLAGS": "-mod=mod"}
    for command in ([sys.executable, folder / "check.py"], ["node", folder / "check.mjs"], ["go", "run", folder / "check.go"]):
        outputs = []
        for token in (TOKEN, "wrong"):
            done = subprocess.run([*command, url, token, "192.0.2.1"], capture_output=True, text=True, env=environment)
            outputs.append((done.returncode == 0, done.stdout.strip()))
        expect(outputs == [(True, "admitted demo"), (False, "")], f"{command}: {outputs} {done.stderr}")
        print(f"{command[-1].name}: {outputs[0][1]}")


def main(binary):
    application = ThreadingHTTPServer(("127.0.0.1", 0), Application)
    application.daemon_threads = True
    Thread(target=application.serve_forever, daemon=True).start()
    redis_port = free_port()
    command = ["redis-server", "--port", str(redis_port), "--save", "", "--appendonly", "no"]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_until(lambda: not socket.socket().connect_ex(("127.0.0.1", redis_port)), "Redis listens")
    url = f"redis://127.0.0.1:{redis_port}/0"
    try:
        for quota, checks in ((f"{QUOTA}/day", [check_exact]), ("100000/day", [check_forged])):
            with tempfile.TemporaryDirectory() as name, start_gateway(binary, url, quota) as gateway:
                folder, port = Path(name), application.server_port
                proxies = [
                    traefik(folder, gateway, port),
                    caddy(folder, gateway, port),
                    envoy(folder, gateway, port, "# ext_authz.yaml: an HTTP filter, before the router"),
                    envoy(folder, gateway, port, "# ext_authz_grpc.yaml: an HTTP filter, before the router", http2=True),
                ]
                try:
                    if quota.startswith("100000"):
                        check_api(gateway)
                    for check in checks:
                        check(proxies)
                    check_down(proxies, gateway)
                finally:
                    for proxy in proxies:
                        proxy.stop()
    finally:
        redis.kill()
        redis.wait()


if __name__ == "__main__":
    main(sys.argv[1])
