#!/usr/bin/env python3
"""Behaviour that nginx-tests and HAProxy's reg-tests check, in Sluicegate, nginx and HAProxy: `make test-suites`.

    peers.py BINARY FOLDER

The rows in nginx_cases.py and haproxy_cases.py contain what these tests expect of current versions and, if it differs, what Sluicegate
does. The versions in Debian are older, so differences of nginx and HAProxy are printed but do not fail the suite. sequences.py contains
the cases with several requests.
"""

import http.client
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import haproxy_cases
import nginx_cases
import sequences
import servers
from report import Report
from upstream import Upstream

# Explained findings: case, finding, reason.
EXPLANATIONS = []
HANG = 5
# Messages contain at most this many characters of a value.
PRINTED = 120


class Outcome:
    def __init__(self, status, headers=(), body=b"", end="complete"):
        self.status, self.body, self.end = status, body, end
        self.headers = {}
        for name, value in headers:
            name = name.lower()
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value


def ask(port, data):
    """Send an HTTP/1.1 request. Return the final response."""
    method = data.split(b" ", 1)[0].decode("latin-1")
    with socket.create_connection(("127.0.0.1", port), HANG) as stream:
        try:
            stream.sendall(data)
        except OSError:
            # The gateway has already rejected the request.
            pass
        response = http.client.HTTPResponse(stream, method=method)
        try:
            response.begin()
        except (OSError, http.client.HTTPException):
            return Outcome("closed", end="incomplete")
        try:
            body, end = response.read(), "complete"
        except http.client.IncompleteRead as error:
            body, end = error.partial, "incomplete"
        except OSError:
            body, end = b"", "incomplete"
        return Outcome(response.status, response.getheaders(), body, end)


def ask2(port, lines, body):
    """Send an HTTP/2 request. Return the final response. Headers are sent unchanged, even if they are invalid."""
    config = h2.config.H2Configuration(
        client_side=True, header_encoding="latin-1", validate_outbound_headers=False, normalize_outbound_headers=False, validate_inbound_headers=False
    )
    connection = h2.connection.H2Connection(config)
    with socket.create_connection(("127.0.0.1", port), HANG) as stream:
        connection.initiate_connection()
        connection.send_headers(1, lines, end_stream=body is None)
        rest, left = body, body is not None
        headers, received, status = [], b"", "closed"
        while True:
            try:
                while left and (window := min(connection.local_flow_control_window(1), connection.max_outbound_frame_size)) >= min(len(rest), 1):
                    part, rest = rest[:window], rest[window:]
                    left = bool(rest)
                    connection.send_data(1, part, end_stream=not left)
                stream.sendall(connection.data_to_send())
                data = stream.recv(1 << 16)
                events = connection.receive_data(data) if data else []
            except (OSError, h2.exceptions.ProtocolError):
                data, events = b"", []
            for event in events:
                if isinstance(event, h2.events.ResponseReceived):
                    headers, status = event.headers, int(dict(event.headers)[":status"])
                elif isinstance(event, h2.events.DataReceived):
                    received += event.data
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                elif isinstance(event, h2.events.StreamEnded):
                    return Outcome(status, headers, received)
                elif isinstance(event, h2.events.StreamReset):
                    return Outcome("reset" if status == "closed" else status, headers, received, "incomplete")
                elif isinstance(event, h2.events.ConnectionTerminated):
                    data = b""
            if not data:
                return Outcome(status, headers, received, "incomplete")


def differences(expected, outcome, seen):
    """Return the differences between the expected and the actual outcome."""
    found = []
    statuses = expected.status if isinstance(expected.status, tuple) else (expected.status,)
    if expected.status is not None and outcome.status not in statuses:
        found.append(f"status {outcome.status} instead of {' or '.join(map(str, statuses))}")
    request = seen[0] if seen else {"line": "", "headers": [], "body": ""}
    received = {name.lower(): value for name, value in request["headers"]} | {":line": request["line"], ":body": request["body"]}
    if len(seen) > 1:
        found.append(f"the upstream got {len(seen)} requests")
    for name, value in expected.seen:
        if received.get(name) != value:
            found.append(f"the upstream got {name} {str(received.get(name))[:PRINTED]!r} instead of {str(value)[:PRINTED]!r}")
    got = outcome.headers | {":body": outcome.body.decode("latin-1"), ":end": outcome.end}
    for name, value in expected.sent:
        if value is not None or name != ":body":
            if got.get(name) != value:
                found.append(f"the client got {name} {str(got.get(name))[:PRINTED]!r} instead of {str(value)[:PRINTED]!r}")
    return found


def sluicegate(binary, port):
    """Start a gateway. Return its ports for HTTP/1.1 and HTTP/2."""
    gateway = servers.sluicegate(
        binary,
        f"""
[server]
max_header_size = "32KiB"
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[upstream.application]
servers = ["http://127.0.0.1:{port}"]
[[route]]
name = "all"
path = "/{{*rest}}"
upstream = "application"
request_headers = {{ set = {{ x-host = "{{host}}", x-path = "{{path}}" }} }}
[[route]]
name = "small"
path = "/small"
max_body = "10B"
upstream = "application"
""",
    )
    clear = int(gateway.urls[0].rpartition(":")[2])
    return clear, clear


def nginx(folder, port):
    first, second = servers.free_ports(2)
    servers.nginx(
        folder,
        "cases",
        [first, second],
        f"""
  underscores_in_headers on;
  server {{
    listen 127.0.0.1:{first};
    listen 127.0.0.1:{second} http2;
    location / {{
      proxy_pass http://127.0.0.1:{port};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_set_header X-Host $host;
      proxy_set_header X-Path $uri;
    }}
    location = /small {{ proxy_pass http://127.0.0.1:{port}; client_max_body_size 10; }}
  }}""",
    )
    return first, second


def haproxy(folder, port):
    first, second = servers.free_ports(2)
    path = folder / "cases.cfg"
    path.write_text(
        f"""
global
  nbthread 1
  expose-experimental-directives
defaults
  mode http
  timeout connect 2s
  timeout client 5s
  timeout server 5s
frontend cases
  bind 127.0.0.1:{first}
  bind 127.0.0.1:{second} proto h2
  http-request normalize-uri path-merge-slashes
  http-request normalize-uri path-strip-dot
  http-request normalize-uri path-strip-dotdot full
  http-request normalize-uri percent-decode-unreserved strict
  http-request normalize-uri percent-to-uppercase strict
  http-request set-header x-path %[path]
  default_backend application
backend application
  server one 127.0.0.1:{port}
"""
    )
    program = "/usr/sbin/haproxy" if Path("/usr/sbin/haproxy").exists() else "haproxy"
    servers.start([program, "-db", "-f", str(path)], [first, second], folder)
    return first, second


def run(rows, ports, upstream, judge):
    for row in rows:
        upstream.seen.clear()
        outcome = ask(ports[0], row.request) if isinstance(row.request, bytes) else ask2(ports[1], *row.request)
        judge(row, outcome, list(upstream.seen))


def compare(report, name, rows, responses, ours, theirs):
    """Run all rows through Sluicegate, then through the peer. Return in how many rows the peer behaves as its tests expect, and its
    differences in the other rows."""
    table = {f"/{path}": [each[1]] for path, each in responses.items()}
    upstream = Upstream(table)

    def judge(row, outcome, seen):
        expected = row.ours or row.theirs
        report.case(f"{name}: {row.test}: {row.name}", *differences(expected, outcome, seen))
        if row.ours and not differences(row.theirs, outcome, seen):
            report.case(f"{name}: {row.test}: {row.name}: difference", "there is no difference")

    run(rows, ours(upstream.port), upstream, judge)
    upstream, met = Upstream(table), []
    different = []

    def count(row, outcome, seen):
        found = differences(row.theirs, outcome, seen)
        met.append(not found)
        different.extend(f"{row.test}: {row.name}: {each}" for each in found)

    run(rows, theirs(upstream.port), upstream, count)
    return sum(met), different


def main():
    binary, folder = sys.argv[1], Path(sys.argv[2]).resolve() / "peers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = Report("cases of nginx-tests and reg-tests", EXPLANATIONS)
    suites = [
        ("nginx", nginx_cases, lambda port: nginx(folder, port)),
        ("haproxy", haproxy_cases, lambda port: haproxy(folder, port)),
    ]
    try:
        for name, cases, start in suites:
            met, different = compare(report, name, cases.ROWS, cases.RESPONSES, lambda port: sluicegate(binary, port), start)
            (folder / f"{name}.differences").write_text("\n".join(different) + "\n")
            said = subprocess.run([name, "-v"], capture_output=True, text=True, check=False, env={"PATH": "/usr/sbin:/usr/bin"})
            version = (said.stdout + said.stderr).splitlines()[0]
            differ = sum(row.ours is not None for row in cases.ROWS)
            print(f"{version}: as its tests expect in {met} of {len(cases.ROWS)} rows; Sluicegate differs from them in {differ}, each with a reason")
        sequences.check(report, binary)
    finally:
        servers.stop()
    report.end()


if __name__ == "__main__":
    main()
