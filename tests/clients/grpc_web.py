"""grpc-web: the client of Connect for browsers, and a server of Connect for Node (grpc_web.mjs)."""

import atexit
import subprocess

from gateway import CERTIFICATE, NODE

SCRIPT = ["node_modules/.bin/node", "grpc_web.mjs"]


def serve():
    """Start the server. Return its address."""
    server = subprocess.Popen([*SCRIPT, "serve"], cwd=NODE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server.stdout.readline().strip()


def check(clear, tls):
    run = [*SCRIPT, clear, tls.replace("127.0.0.1", "localhost"), CERTIFICATE]
    return subprocess.run(run, check=True, cwd=NODE, stdout=subprocess.PIPE, text=True, timeout=120).stdout.strip()
