#!/usr/bin/env python3
"""h2spec tests the HTTP/2 listeners with and without TLS: `make test-suites`.

    h2spec.py BINARY H2SPEC FOLDER

The route has an upstream, which reads the request before it responds. A route with `respond` responds at once, so it may respond before
a fault in the request body arrives.
"""

import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import servers
from gateway import CERTIFICATE, KEY
from report import Report
from upstream import Upstream

# Explained findings: case, finding, reason.
EXPLANATIONS = [
    (
        "clear: http2/3.5: Sends invalid connection preface",
        "*",
        "RFC 9113 3.3: the listener also supports HTTP/1.1 and reads an invalid preface as HTTP/1.1: it responds with 400 and closes the connection",
    ),
]


def configuration(upstream):
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]
[upstream.application]
servers = ["http://127.0.0.1:{upstream}"]
[[route]]
name = "application"
path = "/"
upstream = "application"
"""


def main():
    binary, h2spec, folder = sys.argv[1:]
    report = Report("h2spec", EXPLANATIONS)
    try:
        gateway = servers.sluicegate(binary, configuration(Upstream().port))
        for listener, url in zip(["clear", "tls"], gateway.urls):
            file = Path(folder) / "h2spec.xml"
            file.unlink(missing_ok=True)
            command = [h2spec, "--strict", "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--junit-report", str(file)]
            # The exit status is the number of failures, which the report contains as well.
            subprocess.run([*command, *(["--tls", "--insecure"] if listener == "tls" else [])], stdout=subprocess.DEVNULL, timeout=300, check=False)
            for case in xml.parse(file).iter("testcase"):
                findings = [" ".join("".join(found.itertext()).split()) or found.tag for found in case if found.tag in ("failure", "error", "skipped")]
                report.case(f"{listener}: {case.get('package')}: {case.get('classname')}", *findings)
        if gateway.process.poll() is not None:
            report.case("gateway", f"it has ended: {gateway.process.returncode}")
    finally:
        servers.stop()
    report.end()


if __name__ == "__main__":
    main()
