#!/usr/bin/env python3
"""Structured fields (RFC 9651): an independent parser reads those of the gateway, and the gateway forwards the values of
structured-field-tests: `make test-suites`.

    structured_fields.py BINARY TESTS FOLDER

TESTS is a clone of structured-field-tests. The parser, http-sf, must first pass these tests itself. Certificates are written to FOLDER.
"""

import socket
import ssl
import sys
from importlib.metadata import version
from pathlib import Path

import http_sf
import linting
import servers
from certificates import Certificate
from cryptography.x509.oid import ExtendedKeyUsageOID
from http_sf.errors import StructuredFieldError
from linting import exchange, exchange2, port, request
from report import Report
from upstream import Upstream

# Explained findings: case, finding, reason.
EXPLANATIONS = []
# The gateway's structured fields per style of RateLimit headers: name, kind, type of the values, and types of the parameters.
STYLES = {
    "draft-11": {
        "ratelimit": ("list", str, {"r": int, "t": int}),
        "ratelimit-policy": ("list", str, {"q": int, "w": int, "qu": str}),
    },
    "draft-07": {
        "ratelimit": ("dictionary", int, {}),
        "ratelimit-policy": ("list", int, {"w": int}),
    },
    "draft-03": {name: ("item", int, {}) for name in ("ratelimit-limit", "ratelimit-remaining", "ratelimit-reset")},
}
PROXY_STATUS = {"proxy-status": ("list", http_sf.Token, {"error": http_sf.Token})}


def wrong(value, kind, of_value, of_parameters):
    """Return the reasons why a value is not the expected structured field."""
    try:
        parsed = http_sf.parse(value.encode("latin-1"), tltype=kind)
    except StructuredFieldError as error:
        return [f"{value}: {error}"]
    items = {"list": lambda: parsed, "dictionary": lambda: parsed.values(), "item": lambda: [parsed]}[kind]()
    found = [f"{value}: the canonical form is {http_sf.ser(parsed)}"] if http_sf.ser(parsed) != value else []
    for item, parameters in items:
        found += [f"{value}: {item!r} is no {of_value.__name__}"] if type(item) is not of_value else []
        for name, each in parameters.items():
            if type(each) is not of_parameters.get(name):
                found.append(f"{value}: the parameter {name} is {each!r}")
    return found


def tests(folder):
    """Return the cases of structured-field-tests: their names and contents."""
    for path in sorted(folder.glob("*.json")):
        for number, case in enumerate(http_sf.from_json(path.read_text())):
            yield f"{path.stem} {number}: {case['name']}", case


def parser(report, folder):
    """Run the parser on structured-field-tests."""
    for name, case in tests(folder):
        # Some values contain a lone surrogate, which UTF-8 cannot encode.
        value = ", ".join(case["raw"]).encode("utf-8", "surrogatepass")
        try:
            parsed = http_sf.to_json(http_sf.parse(value, tltype=case["header_type"]))
        except (StructuredFieldError, ValueError) as error:
            found = [] if case.get("must_fail") or case.get("can_fail") else [f"{value}: {error}"]
        else:
            found = [f"{value}: is parsed"] if case.get("must_fail") else []
            if not found and parsed != http_sf.to_json(case["expected"]):
                found = [f"{value}: {parsed}"]
        report.case(f"http-sf: {name}", *found)


def own(report, binary):
    """Check each structured field in the responses of linting.py."""
    upstream, closed = Upstream(linting.RESPONSES), servers.free_ports(1)[0]
    gateway = servers.sluicegate(binary, linting.configuration(upstream.port, closed), {"consumers.toml": "", "users": linting.USERS})
    seen = set()
    for name, _, method, target, headers, body, host in linting.responses():
        data = request(method, target, headers, body or b"", host) + (b"7d0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n" if body is None else b"")
        lines = exchange(port(gateway.urls[0]), data, method)[3]
        seen |= fields(report, name, target, lines)
    for name, _, method, target, headers, body in linting.RESPONSES_2:
        seen |= fields(report, f"HTTP/2: {name}", target, exchange2(port(gateway.urls[0]), method, target, headers, body)[3])
    strict = servers.sluicegate(binary, linting.without_store(closed))
    seen |= fields(report, "no store", "/strict", exchange(port(strict.urls[0]), request("GET", "/strict"), "GET")[3])
    expected = {(style, name) for style, each in STYLES.items() for name in each} | {("", "proxy-status")}
    report.case("fields of the gateway", *(f"no response has {each}" for each in expected - seen))


def fields(report, case, target, lines):
    style = target[1:] if target[1:] in STYLES else "draft-11"
    known = {} if target[1:] in ("github", "openai", "anthropic") else STYLES[style]
    seen = set()
    for name, value in lines:
        name = name.decode().lower()
        if name in known or name in PROXY_STATUS:
            of_proxy = name in PROXY_STATUS
            report.case(f"{case}: {name}", *wrong(value.decode("latin-1"), *(PROXY_STATUS if of_proxy else known)[name]))
            seen.add(("" if of_proxy else style, name))
    return seen


def client_certificates(report, binary, folder):
    """Check that Client-Cert contains the client's certificate, and Client-Cert-Chain the other certificates that the client sent."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Certificate("Root of the clients")
    middle = Certificate("Intermediate of the clients", root)
    client = Certificate("client.test", middle, usage=ExtendedKeyUsageOID.CLIENT_AUTH)
    server = Certificate("localhost", root, usage=ExtendedKeyUsageOID.SERVER_AUTH)
    root.write(folder / "root.pem")
    client.write(folder / "client.pem", folder / "client.key", [middle])
    server.write(folder / "server.pem", folder / "server.key")
    upstream = Upstream()
    gateway = servers.sluicegate(
        binary,
        f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "{folder}/server.pem", key = "{folder}/server.key" }}]
tls.client_ca = "{folder}/root.pem"
[auth.clients]
kind = "client-cert"
[upstream.application]
servers = ["http://127.0.0.1:{upstream.port}"]
client_cert_header = true
[[route]]
name = "application"
path = "/"
upstream = "application"
require = ["clients"]
""",
    )
    context = ssl.create_default_context(cafile=str(folder / "root.pem"))
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    with socket.create_connection(("127.0.0.1", port(gateway.urls[0])), 10) as stream, context.wrap_socket(stream, server_hostname="localhost") as secure:
        secure.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while secure.recv(1 << 16):
            pass
    received = {name.lower(): value for name, value in upstream.seen[0]["headers"]}
    for name, kind, expected in [("client-cert", "item", [client]), ("client-cert-chain", "list", [middle])]:
        found = wrong(received.get(name, ""), kind, bytes, {})
        if not found:
            parsed = http_sf.parse(received[name].encode(), tltype=kind)
            sent = [item for item, _ in (parsed if kind == "list" else [parsed])]
            found = [] if sent == [each.bytes() for each in expected] else ["other certificates"]
        report.case(name, *found)


def forwarded(report, binary, folder):
    """Check that header lines of structured-field-tests reach the upstream and the client either unchanged or not at all."""
    upstream = Upstream()
    gateway = servers.sluicegate(
        binary,
        f"""
[server]
max_header_size = "64KiB"
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[upstream.application]
servers = ["http://127.0.0.1:{upstream.port}"]
[[route]]
name = "application"
path = "/{{*rest}}"
upstream = "application"
""",
    )
    clear = port(gateway.urls[0])
    for number, (name, case) in enumerate(tests(folder)):
        raw = [line.encode("utf-8", "surrogatepass") for line in case["raw"]]
        valid = not any(byte in line for line in raw for byte in bytes([*range(9), *range(10, 32), 127]))
        expected = [line.strip(b" \t") for line in raw]
        lines = b"".join(b"X-Field: " + line + b"\r\n" for line in raw)
        # Send the lines as request headers, then as response headers.
        data = f"GET /{number} HTTP/1.1\r\nHost: gateway.test\r\nX-Case: {number}\r\n".encode() + lines + b"\r\n"
        upstream.responses[f"/{number}"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + lines + b"\r\n"]
        upstream.seen.clear()
        _, status, _, headers, _ = exchange(clear, data, "GET")
        found = []
        if valid:
            received = [value.encode("latin-1") for each in upstream.seen for key, value in each["headers"] if key.lower() == "x-field"]
            found += [] if received == expected else [f"the upstream received {received} (status {status})"]
            returned = [value for key, value in headers if key.lower() == b"x-field"]
            found += [] if (status, returned) == (200, expected) else [f"the client received {returned} (status {status})"]
        else:
            found += [] if status == 400 and not upstream.seen else [f"status {status} for a value with control characters"]
            # The request is rejected because of these lines, so send one without them: the gateway must reject the response.
            status, headers = exchange(clear, request("GET", f"/{number}"), "GET")[1:4:2]
            found += [] if status == 502 else [f"status {status} for a response with control characters: {headers}"]
        report.case(f"forwarded: {name}", *found)


def main():
    binary, folder, files = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).resolve() / "certificates"
    report = Report(f"structured-field-tests, http-sf {version('http-sf')}", EXPLANATIONS)
    try:
        parser(report, folder)
        own(report, binary)
        client_certificates(report, binary, files)
        forwarded(report, binary, folder)
    finally:
        servers.stop()
    report.end()


if __name__ == "__main__":
    main()
