"""Node's HTTP client undici: runs undici.mjs."""

import subprocess

from gateway import CERTIFICATE, NODE


def check(clear, tls):
    run = ["node", "undici.mjs", clear, tls, CERTIFICATE]
    return subprocess.run(run, check=True, cwd=NODE, stdout=subprocess.PIPE, text=True, timeout=120).stdout.strip()
