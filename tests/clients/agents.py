#!/usr/bin/env python3
"""MCP and A2A servers and clients through two gateways on one Redis: `agents.py BINARY`.

The Python SDK, FastMCP and the TypeScript SDK are tested in all pairs of client and server: exactly as many calls as the limit allows
must be admitted. agents_a2a.py checks this with the A2A SDK as well. Then the MCP conformance tests must give the same results with and
without a gateway.
"""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fastmcp
import mcp

import agents_a2a
from gateway import NODE, Gateway, expect

HERE = Path(__file__).resolve().parent
# The number of calls of each pair of client and server, and how many of them the limit admits.
CALLS, ADMITTED = 60, 25
SERVERS = ["mcp", "fastmcp", "typescript"]
CLIENTS = ["mcp", "fastmcp", "typescript"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        expect(process.poll() is None, f"{process.args} ended")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"{process.args} does not listen")


class Process:
    """A server on a free port. It is stopped at the end of the `with` block."""

    def __init__(self, command, cwd=None):
        self.port = free_port()
        self.process = subprocess.Popen([*command, str(self.port)], cwd=cwd, stdout=subprocess.DEVNULL)
        wait_for(self.port, self.process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def configuration(redis, ports):
    upstreams = "".join(f'[upstream.{name}]\nservers = ["http://127.0.0.1:{port}"]\n' for name, port in ports.items())
    routes = "".join(
        f"""
[[route]]
name = "{client}-{server}"
path = "/{client}-{server}/mcp"
rewrite = "/mcp"
upstream = "{server}"
limits = ["calls"]
"""
        for client in CLIENTS
        for server in SERVERS
    )
    return f"""
[store]
url = "redis://127.0.0.1:{redis}"
# With this timeout, no check fails on a busy machine.
timeout = "5s"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[admin]
address = "127.0.0.1:0"
[limit.calls]
by = ["route", "mcp:tool"]
algorithm = "sliding-log"
quota = "{ADMITTED}/24h"
{upstreams}
{routes}
"""


def expect_denial(error):
    """Check that the gateway's denial caused this error."""
    text = repr(error)
    for cause in (error, error.__cause__, *getattr(error, "exceptions", ())):
        text += repr(cause) + repr(getattr(cause, "error", ""))
    expect("try again in" in text or "429" in text, f"another error: {text}")


async def call_all(open_client, urls, text_of):
    """Call the tool concurrently through all URLs. Return the number of admitted calls, and the number that the server counted."""
    async with contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(open_client(url)) for url in urls]

        async def call(index):
            try:
                result = await sessions[index % len(sessions)].call_tool("search", {"text": str(index)})
            except Exception as error:
                expect_denial(error)
                return 0
            expect(text_of(result) == str(index), f"another result: {result}")
            return 1

        admitted = sum(await asyncio.gather(*(call(index) for index in range(CALLS))))
        return admitted, int(text_of(await sessions[0].call_tool("count", {})))


def python_client(urls):
    return asyncio.run(call_all(mcp.Client, urls, lambda result: result.content[0].text))


def fastmcp_client(urls):
    return asyncio.run(call_all(fastmcp.Client, urls, lambda result: result.content[0].text))


def typescript_client(urls):
    run = ["node", "agents_client.mjs", str(CALLS), *urls]
    output = subprocess.run(run, check=True, cwd=NODE, stdout=subprocess.PIPE, text=True, timeout=120).stdout
    results = json.loads(output)
    expect(not results["errors"], f"{results['errors'][:3]}")
    expect(results["admitted"] + results["denied"] == CALLS, f"{results}")
    return results["admitted"], results["count"]


def conformance(url, folder):
    """Run the conformance tests of MCP. Return the status of each check."""
    # The package requires a later version of Node than Debian has.
    suite = "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    run = ["node_modules/.bin/node", suite, "server", "--url", url, "--output-dir", folder]
    # Some checks fail with any server, so the exit status of the process does not matter.
    subprocess.run(run, cwd=NODE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
    results = {}
    for path in Path(folder).glob("*/checks.json"):
        # The name of the directory ends with a timestamp, whose milliseconds may look like a year.
        scenario = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", path.parent.name)
        results[scenario] = [(check["id"], check["status"]) for check in json.loads(path.read_text())]
    return results


def check_conformance(binary, folder):
    """Compare the conformance results with and without a gateway. Return the number of passed checks."""
    with Process(["node", "agents_conformance.mjs"], cwd=NODE) as server:
        text = f"""
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[admin]
address = "127.0.0.1:0"
[limit.calls]
by = ["ip", "mcp:tool"]
quota = "1000/min"
[limit.methods]
by = ["ip", "mcp:method"]
quota = "1000/min"
[upstream.server]
servers = ["http://127.0.0.1:{server.port}"]
[[route]]
name = "mcp"
path = "/mcp"
limits = ["calls", "methods"]
upstream = "server"
"""
        direct = conformance(f"http://127.0.0.1:{server.port}/mcp", f"{folder}/direct")
        with Gateway(binary, text) as gateway:
            through = conformance(f"{gateway.urls[0]}/mcp", f"{folder}/through")
    passed = sum(status == "SUCCESS" for checks in direct.values() for _, status in checks)
    expect(passed >= 28, f"only {passed} checks pass without a gateway")
    different = {name: (direct[name], through.get(name)) for name in direct if direct[name] != through.get(name)}
    expect(not different, f"other results through the gateway: {different}")
    return passed


def main():
    binary = sys.argv[1]
    runs = {"mcp": python_client, "fastmcp": fastmcp_client, "typescript": typescript_client}
    python = [sys.executable, "-B", str(HERE / "agents_server.py")]
    with tempfile.TemporaryDirectory() as folder:
        redis = ["redis-server", "--save", "", "--dir", folder, "--port"]
        with Process(redis) as store, Process([*python, "mcp"]) as one, Process([*python, "fastmcp"]) as two:
            with Process(["node", "agents_server.mjs"], cwd=NODE) as three:
                ports = dict(zip(SERVERS, [one.port, two.port, three.port]))
                text = configuration(store.port, ports)
                with Gateway(binary, text) as first, Gateway(binary, text) as second:
                    for server in SERVERS:
                        before = 0
                        for client in CLIENTS:
                            urls = [f"{gateway.urls[0]}/{client}-{server}/mcp" for gateway in (first, second)]
                            admitted, count = runs[client](urls)
                            expect(admitted == ADMITTED, f"{client} of {server}: {admitted} admitted")
                            expect(count - before == ADMITTED, f"{client} of {server}: {count - before} calls")
                            before = count
            with Process([sys.executable, "-B", str(HERE / "agents_a2a_server.py")]) as agent:
                print(agents_a2a.check(binary, store.port, agent.port), flush=True)
        passed = check_conformance(binary, folder)
    print(f"conformance of MCP: {passed} checks pass with and without a gateway")
    print(f"agents: {ADMITTED} of {CALLS} calls admitted for each of {len(CLIENTS)} clients of {len(SERVERS)} servers")


if __name__ == "__main__":
    main()
