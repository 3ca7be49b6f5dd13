"""sslscan finds no weak protocol and no weak cipher."""

import re
import subprocess
import xml.etree.ElementTree as xml
from urllib.parse import urlsplit

from gateway import expect


def check(_clear, tls):
    address = urlsplit(tls).netloc
    run = ["sslscan", "--xml=-", "--sni-name=localhost", address]
    said = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout
    test = xml.fromstring(said).find("ssltest")
    versions = {f"{found.get('type')} {found.get('version')}" for found in test.findall("protocol") if found.get("enabled") == "1"}
    expect(versions == {"tls 1.2", "tls 1.3"}, versions)
    ciphers = {(cipher.get("sslversion"), cipher.get("cipher")) for cipher in test.findall("cipher")}
    for version, cipher in ciphers:
        # A strong cipher has forward secrecy and authenticated encryption.
        strong = cipher.startswith("TLS_" if version == "TLSv1.3" else "ECDHE-") and re.search("GCM|CHACHA20", cipher)
        expect(strong, f"{version} {cipher}")
    expect({version for version, _ in ciphers} == {"TLSv1.2", "TLSv1.3"}, ciphers)
    # Debian's build cannot test compression.
    for weakness, attribute in [("compression", "supported"), ("renegotiation", "supported"), ("heartbleed", "vulnerable")]:
        expect(all(found.get(attribute) == "0" for found in test.findall(weakness)), weakness)
    version = subprocess.run(["sslscan", "--version"], capture_output=True, text=True, check=True).stdout
    number = re.search(r"[0-9.]{5,}", version)[0]
    return f"sslscan {number}: TLS 1.2 and 1.3, {len(ciphers)} suites, all with forward secrecy and authenticated encryption"
