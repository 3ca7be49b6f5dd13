#!/usr/bin/env python3
"""sslyze and testssl.sh scan TLS listeners, one with an ECDSA and one with an RSA certificate: `make test-suites`.

    tls_scanners.py BINARY FOLDER

The reports and the certificates, which a test CA signs, are written to FOLDER.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import servers
from certificates import Certificate
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from report import Report

KEYS = {
    "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
}
# The severities of testssl.sh above LOW, and WARN for tests that it could not run.
SEVERITIES = {"MEDIUM", "HIGH", "CRITICAL", "FATAL", "WARN"}
# The client of testssl.sh ends its first connection at once. It does not always wait for the TLS 1.3 ticket that it tries to resume.
UNRELIABLE = {"sessionresumption_ticket"}

# Explained findings: case, finding, reason.
EXPLANATIONS = [
    (
        "testssl.sh *: cipher_order",
        "HIGH: NOT a cipher order configured",
        "every cipher suite of the listener is strong, so the client chooses, as Mozilla recommends",
    ),
    ("testssl.sh *: engine_problem", "WARN: *", "the openssl that runs the test does not support GOST"),
]


def certificates(folder):
    """Write a CA certificate, and a server certificate for each kind of key. They are valid for 90 days."""
    authority = Certificate("Test CA")
    authority.write(folder / "ca.pem")
    for kind, generate in KEYS.items():
        certificate = Certificate("localhost", authority, generate(), ExtendedKeyUsageOID.SERVER_AUTH)
        certificate.write(folder / f"{kind}.pem", folder / f"{kind}.key", [authority])


def configuration(folder):
    listeners = "".join(
        f'[[listener]]\naddress = "127.0.0.1:0"\ntls.certificates = [{{ cert = "{folder}/{kind}.pem", key = "{folder}/{kind}.key" }}]\n' for kind in KEYS
    )
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
{listeners}
[[route]]
name = "own"
path = "/{{*rest}}"
respond = {{ status = 200, body = "own\\n" }}
[route.response_headers.set]
strict-transport-security = "max-age=31536000"
x-content-type-options = "nosniff"
content-security-policy = "default-src 'none'"
"""


def sslyze(report, kind, port, folder):
    """Compare the listener with Mozilla's recommendation, and check the result of each scan."""
    file = folder / f"sslyze.{kind}.json"
    program = Path(sys.executable).parent / "sslyze"
    command = [str(program), f"--json_out={file}", f"--certinfo_ca_file={folder}/ca.pem", "--mozilla_config=intermediate", f"localhost:{port}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = said.stdout.partition("COMPLIANCE AGAINST TLS CONFIGURATION")[2].splitlines()
    findings = [line.strip(" *") for line in lines if line.startswith("        * ")]
    compliant = any("OK - Compliant" in line for line in lines)
    report.case(f"sslyze {kind}: Mozilla's intermediate configuration", *findings, *([] if compliant or findings else [said.stdout + said.stderr]))
    scans = json.loads(file.read_text())["server_scan_results"][0]["scan_result"]
    for name, scan in scans.items():
        if scan["status"] != "NOT_SCHEDULED":
            report.case(f"sslyze {kind}: {name}", *([] if scan["status"] == "COMPLETED" else [f"{scan['status']}: {scan['error_reason']}"]))
    weak = {name: scan["result"]["accepted_cipher_suites"] for name, scan in scans.items() if name[:9] in ("ssl_2_0_c", "ssl_3_0_c", "tls_1_0_c", "tls_1_1_c")}
    report.case(f"sslyze {kind}: old versions", *(name for name, suites in weak.items() if suites), *([] if len(weak) == 4 else [f"only {list(weak)}"]))


def testssl(report, kind, port, folder):
    file = folder / f"testssl.{kind}.json"
    file.unlink(missing_ok=True)
    command = [
        "testssl",
        "--quiet",
        "--color",
        "0",
        "--warnings",
        "off",
        "--ip",
        "127.0.0.1",
        "--add-ca",
        f"{folder}/ca.pem",
        f"--jsonfile={file}",
        f"localhost:{port}",
    ]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "TERM": "dumb"})
    if "Done" not in said.stdout:
        report.case(f"testssl.sh {kind}", f"not complete: {said.stdout[-500:]} {said.stderr[-500:]}")
        return
    found = {}
    for each in json.loads(file.read_text()):
        if each["id"] in UNRELIABLE:
            continue
        name = f"testssl.sh {kind}: {each['id'].split(' <')[0]}"
        found.setdefault(name, []).extend([f"{each['severity']}: {each['finding']}"] if each["severity"] in SEVERITIES else [])
    for name, findings in found.items():
        report.case(name, *findings)


def main():
    binary, folder = sys.argv[1:]
    folder = Path(folder).resolve() / "tls"
    folder.mkdir(parents=True, exist_ok=True)
    certificates(folder)
    said = subprocess.run(["testssl", "--version"], capture_output=True, text=True, check=False).stdout
    number = said.partition("testssl")[2].split()[0]
    report = Report(f"sslyze {version('sslyze')}, testssl.sh {number}", EXPLANATIONS)
    try:
        gateway = servers.sluicegate(binary, configuration(folder))
        ports = dict(zip(KEYS, (url.rpartition(":")[2] for url in gateway.urls)))
        for kind, port in ports.items():
            sslyze(report, kind, port, folder)
        with ThreadPoolExecutor(len(ports)) as pool:
            for each in [pool.submit(testssl, report, kind, port, folder) for kind, port in ports.items()]:
                each.result()
        if gateway.process.poll() is not None:
            report.case("gateway", f"it has ended: {gateway.process.returncode}")
    finally:
        servers.stop()
    report.end()


if __name__ == "__main__":
    main()
