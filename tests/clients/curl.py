"""curl: HTTP/1.0, 1.1 and 2, TLS, uploads, early responses and WebSocket handshakes."""

import hashlib
import json
import re
import subprocess

from gateway import CERTIFICATE, expect
from upstreams import LARGE

# Exit codes of curl.
TLS_FAILED, TIME_OVER = 35, 28


def curl(*arguments, data=None, exit_code=0):
    """Run curl. Return the body, the HTTP version and the status of the response, and the number of connections."""
    form = "\n%{http_version} %{http_code} %{num_connects}"
    # Ignore curl's configuration file and proxies.
    command = ["curl", "--disable", "--noproxy", "*", "--cacert", CERTIFICATE, "--silent", "--show-error"]
    ran = subprocess.run(
        [*command, "--max-time", "20", "--write-out", form, *arguments], input=data, capture_output=True
    )
    expect(ran.returncode == exit_code, f"curl {arguments}: exit {ran.returncode}: {ran.stderr.decode()}")
    body, _, said = ran.stdout.rpartition(b"\n")
    version, status, connections = said.decode().split()
    return body, version, int(status), int(connections)


def protocols(clear, tls):
    """Check that requests in each HTTP version reach the upstream as HTTP/1.1."""
    for arguments, url, version in [
        (["--http1.0"], clear, "1"),
        (["--http1.1"], clear, "1.1"),
        # The gateway ignores an h2c upgrade (RFC 9113 §3.1).
        (["--http2"], clear, "1.1"),
        (["--http2-prior-knowledge"], clear, "2"),
        (["--http1.1"], tls, "1.1"),
        (["--http2"], tls, "2"),
        (["--no-alpn", "--http1.1"], tls, "1.1"),
        (["--tlsv1.2", "--tls-max", "1.2"], tls, "2"),
        (["--tlsv1.3"], tls, "2"),
    ]:
        body, found, status, _ = curl(*arguments, f"{url}/echo?a=b%20c")
        got = json.loads(body)
        expect((found, status) == (version, 200), f"{arguments} {url}: HTTP/{found} {status}")
        expect(got["target"] == "/echo?a=b%20c", got)
        expect(got["headers"]["x-forwarded-proto"] == url.partition(":")[0], got)
        expect(not {"upgrade", "connection", "http2-settings"} & set(got["headers"]), got)
    curl("--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0", f"{tls}/echo", exit_code=TLS_FAILED)


def bodies(clear, tls):
    """Upload 40 MiB, download 4 MiB, forward gzip unchanged, and use one connection for two requests."""
    upload = LARGE * 10
    sha256 = hashlib.sha256(upload).hexdigest()
    for arguments, url in [
        (["--http1.1"], clear),
        (["--http2-prior-knowledge"], clear),
        (["--http1.1"], tls),
        (["--http2"], tls),
    ]:
        # The upload has Content-Length and Expect, then only Content-Length, then chunked framing.
        for form in [
            ["--data-binary", "@-"],
            ["--data-binary", "@-", "--header", "Expect:"],
            ["--upload-file", "-"],
        ]:
            body, _, status, _ = curl(*arguments, *form, f"{url}/echo", data=upload)
            got = json.loads(body)
            expect((status, got["length"], got["sha256"]) == (200, len(upload), sha256), f"{arguments} {form}: {got}")
        body, _, status, _ = curl(*arguments, f"{url}/large")
        expect((status, body) == (200, LARGE), f"{arguments}: {status}, {len(body)} bytes")
        body, _, _, _ = curl(*arguments, "--compressed", f"{url}/gzip")
        expect(json.loads(body)["headers"]["accept-encoding"].startswith("deflate, gzip"), body)
        # With prior knowledge, curl 7.88 does not reuse its connection. This is also the case with nginx.
        if arguments != ["--http2-prior-knowledge"]:
            body, _, status, connections = curl(*arguments, f"{url}/echo", f"{url}/echo")
            expect((status, connections, body.count(b"\n")) == (200, 0, 1), f"{arguments}: {connections}, {body}")


def limits(clear, tls):
    """Check that a client that is still uploading reads the 429, and that `--retry` waits for Retry-After."""
    # With HTTP/2, curl 7.88 loses a response that arrives before the upload is complete. nghttp2.py checks this case.
    for arguments, url, upload in [
        (["--http1.1"], clear, LARGE * 10),
        (["--http1.1"], tls, LARGE * 10),
        (["--http2-prior-knowledge"], clear, b""),
        (["--http2"], tls, b""),
    ]:
        for form in [[], ["--header", "Expect:"], ["--header", "Transfer-Encoding: chunked", "--header", "Expect:"]]:
            body, _, status, _ = curl(*arguments, *form, "--data-binary", "@-", f"{url}/closed", data=upload)
            expect(status == 429 and json.loads(body)["status"] == 429, f"{arguments} {form}: {status} {body}")
    # Other spellings of the path have the same limit.
    for path in ["/closed", "/%63losed", "/a/../closed", "//closed"]:
        _, _, status, _ = curl("--path-as-is", f"{clear}{path}")
        expect(status == 429, f"{path}: {status}")
    curl(f"{clear}/patient/curl")
    _, _, status, _ = curl(f"{clear}/patient/curl")
    expect(status == 429, f"the second at once: {status}")
    _, _, status, _ = curl("--retry", "1", f"{clear}/patient/curl")
    expect(status == 200, f"after --retry: {status}")


def websockets(clear, tls):
    """Check the handshake and the first frame on a WebSocket route, and the ordinary response on another route."""
    offer = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    offer = [word for line in [*offer, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="] for word in ["--header", line]]
    for url in [clear, tls]:
        # curl reads the bytes of the tunnel as an endless body.
        body, _, status, _ = curl(
            "--http1.1", "--include", "--no-buffer", "--max-time", "1", *offer, f"{url}/socket", exit_code=TIME_OVER
        )
        expect(status == 101 and body.endswith(b"\x81\x05hello"), f"{url}: {status} {body}")
        expect(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in body, f"{url}: {body}")
        body, _, status, _ = curl("--http1.1", *offer, f"{url}/echo")
        expect(status == 200 and "upgrade" not in json.loads(body)["headers"], f"{url}: {status} {body}")


def check(clear, tls):
    for part in [protocols, bodies, limits, websockets]:
        part(clear, tls)
    version = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
    tls_library = re.search(r"(OpenSSL|GnuTLS|LibreSSL)/\S+", version)[0]
    shown = "HTTP/1.0, 1.1, 2 by ALPN and prior knowledge, uploads, 429 while uploading, WebSocket"
    return f"curl {version.split()[1]} ({tls_library}): {shown}"
