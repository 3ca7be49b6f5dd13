#!/usr/bin/env python3
"""The ACME client lego and Sluicegate obtain certificates from the same Pebble: `make test-clients`.

    acme.py BINARY

First, lego obtains certificates while it listens on the ports to which the CA sends its validation requests. If lego listens on another
port, the CA must issue no certificate. This detects a Pebble that does not validate names or that is misconfigured. Then lego obtains a
certificate through the gateway. Exits with 1 if a check fails.
"""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from gateway import CERTIFICATE, KEY, Gateway, expect

# Maximum time to wait for a certificate, in seconds.
MAX_WAIT = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command, ready, **environment):
    """Run a program for the duration of a `with` block. The block begins when the program has written a line with `ready`."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    try:
        log = []
        for line in process.stdout:
            log.append(line)
            if ready in line:
                break
        else:
            raise SystemExit(f"{command[0]} did not start:\n{''.join(log)}")
        # Keep reading, so that the pipe never fills up.
        threading.Thread(target=lambda: log.extend(process.stdout), daemon=True).start()
        yield log
    finally:
        process.kill()
        process.wait()


class Pebble:
    """The addresses of a Pebble that resolves every name to 127.0.0.1."""

    def __init__(self, folder, stack):
        self.http, self.tls, port, management, dns, dns_management = (free_port() for _ in range(6))
        self.directory = f"https://127.0.0.1:{port}/dir"
        self.management = f"https://127.0.0.1:{management}"
        settings = {
            "listenAddress": f"127.0.0.1:{port}",
            "managementListenAddress": f"127.0.0.1:{management}",
            "certificate": str(CERTIFICATE),
            "privateKey": str(KEY),
            "httpPort": self.http,
            "tlsPort": self.tls,
        }
        path = Path(folder) / "pebble.json"
        path.write_text(json.dumps({"pebble": settings}))
        servers = ["-http01", "", "-https01", "", "-tlsalpn01", "", "-management", f"127.0.0.1:{dns_management}"]
        names = ["-defaultIPv4", "127.0.0.1", "-defaultIPv6", "", "-dns01", f"127.0.0.1:{dns}"]
        stack.enter_context(running(["pebble-challtestsrv", *names, *servers], "Starting challenge servers"))
        command = ["pebble", "-config", str(path), "-dnsserver", f"127.0.0.1:{dns}", "-strict"]
        ready = "ACME directory available at"
        self.log = stack.enter_context(running(command, ready, PEBBLE_VA_NOSLEEP="1", PEBBLE_AUTHZREUSE="0"))

    def root(self):
        """Return the root certificate of the CA, as PEM."""
        trust = ssl.create_default_context(cafile=CERTIFICATE)
        return urllib.request.urlopen(f"{self.management}/roots/0", context=trust, timeout=MAX_WAIT).read().decode()

    def issued(self):
        return sum("Issued certificate " in line for line in self.log)


def run_lego(pebble, folder, name, challenge, port):
    """Run lego. It responds to the challenge on a port of 127.0.0.1."""
    command = ["lego", "--server", pebble.directory, "--email", "a@example.com", "--accept-tos", "--path", folder]
    challenge = [f"--{challenge}", f"--{challenge}.port", f"127.0.0.1:{port}"]
    return subprocess.run(
        [*command, "--domains", name, *challenge, "run"],
        capture_output=True,
        text=True,
        timeout=MAX_WAIT,
        env={**os.environ, "LEGO_CA_CERTIFICATES": str(CERTIFICATE)},
    )


def lego(pebble, folder, name, challenge, port):
    """Obtain a certificate with lego. Return the path of its file."""
    run = run_lego(pebble, folder, name, challenge, port)
    expect(run.returncode == 0, f"lego {name}: {run.stdout}{run.stderr}")
    return Path(folder) / f"certificates/{name}.crt"


def lego_fails(pebble, folder, name, challenge, port):
    """Run lego on another port than the one to which the CA connects. Check that the CA issues no certificate."""
    issued = pebble.issued()
    run = run_lego(pebble, folder, name, challenge, free_port())
    said = f"lego {name}: {run.stdout}{run.stderr}"
    expect(run.returncode != 0 and "urn:ietf:params:acme:error:" in run.stderr and str(port) in run.stderr, said)
    expect(not (Path(folder) / f"certificates/{name}.crt").exists() and pebble.issued() == issued, said)


def subject(certificate, issuer, root):
    """Verify a certificate with openssl. Return its subject alternative names."""
    verify = ["openssl", "verify", "-CAfile", root, "-untrusted", issuer, certificate]
    run = subprocess.run(verify, capture_output=True, text=True, timeout=MAX_WAIT)
    expect(run.returncode == 0, f"{certificate}: {run.stdout}{run.stderr}")
    show = ["openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()[-1]


def served(address, name, root):
    """Complete a TLS handshake. Return the names of the server's certificate, or `None` if it is not trusted yet."""
    trust = ssl.create_default_context(cadata=root)
    try:
        with socket.create_connection(address, MAX_WAIT) as plain, trust.wrap_socket(plain, server_hostname=name) as tls:
            return [value for _, value in tls.getpeercert()["subjectAltName"]]
    except ssl.SSLCertVerificationError:
        return None


def configuration(pebble, behind):
    """Return the configuration of a gateway on the ports to which the CA sends its validation requests, with another ACME client as upstream."""
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[acme]
accept_terms = true
directory = "{pebble.directory}"
ca = "{CERTIFICATE}"
storage = "acme"
[[listener]]
address = "127.0.0.1:{pebble.http}"
[[listener]]
address = "127.0.0.1:{pebble.tls}"
tls = {{ acme = true, names = ["gateway.test"] }}
[upstream.other-client]
servers = ["http://127.0.0.1:{behind}"]
[[route]]
name = "other-client"
path = "/.well-known/acme-challenge/{{token}}"
upstream = "other-client"
"""


def main():
    (binary,) = sys.argv[1:]
    version = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", "lego"], capture_output=True, text=True).stdout
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pebble = Pebble(folder, stack)
        root = Path(folder) / "root.pem"
        root.write_text(pebble.root())
        for name, challenge in [("http.test", "http"), ("alpn.test", "tls")]:
            port = pebble.http if challenge == "http" else pebble.tls
            lego_fails(pebble, folder, f"unreachable-{name}", challenge, port)
            obtained = lego(pebble, folder, name, challenge, port)
            expect(subject(obtained, obtained.with_suffix(".issuer.crt"), root) == f"DNS:{name}", name)
        expect(pebble.issued() == 2, pebble.log)
        behind = free_port()
        with Gateway(binary, configuration(pebble, behind)) as gateway:
            deadline = time.monotonic() + MAX_WAIT
            address = ("127.0.0.1", urlsplit(gateway.urls[1]).port)
            while (names := served(address, "gateway.test", root.read_text())) is None:
                expect(time.monotonic() < deadline, "the gateway obtains no certificate")
                time.sleep(0.1)
            expect(names == ["gateway.test"], names)
            obtained = lego(pebble, folder, "behind.test", "http", behind)
            expect(subject(obtained, obtained.with_suffix(".issuer.crt"), root) == "DNS:behind.test", "behind.test")
        expect(pebble.issued() == 4, pebble.log)
    print(f"lego {version or '(unknown version)'}: HTTP-01, TLS-ALPN-01 and HTTP-01 behind the gateway, on the CA of the gateway; unreachable ports get none")


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.SubprocessError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
