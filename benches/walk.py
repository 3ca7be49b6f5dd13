"""Compare the source files whose code a rate-limited HTTP/1.1 request executes with ARCHITECTURE.md: `make walk`.

A gateway with one worker runs under callgrind, with a Redis server and an upstream. The requests use one connection, and
all connections are open before counting starts. The list contains a file if its code executes at least 50 instructions
per request in the debug build. It omits lib.rs and main.rs, which contain monomorphized code of dependencies, and
limiter/metrics.rs and clock.rs, which contain only small inlined functions. The script fails if these are not the files
in the table of the section "The walk of a request".
"""

import collections
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading

REQUESTS = 40
LEFT_OUT = {"lib.rs", "main.rs", "limiter/metrics.rs", "clock.rs"}
CONFIG = """
[[listener]]
address = "127.0.0.1:{gateway}"
[server]
workers = 1
[store]
url = "redis://127.0.0.1:{redis}"
timeout = "5s"  # The gateway is slow under valgrind.
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[limit.per-key]
by = "api-key"
quota = "1000000/s"
[upstream.api]
servers = ["http://127.0.0.1:{upstream}"]
[[route]]
name = "api"
path = "/{{*rest}}"
upstream = "api"
identify = ["keys"]
limits = ["per-key"]
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def serve(listener):
    """Respond to each request on each connection with 200."""
    def converse(connection):
        received = b""
        while piece := connection.recv(65536):
            received += piece
            while b"\r\n\r\n" in received:
                received = received.partition(b"\r\n\r\n")[2]
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    while True:
        threading.Thread(target=converse, args=(listener.accept()[0],), daemon=True).start()


def connect(port, process):
    """Wait until a process listens on a port, and connect to it."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=120)
        except ConnectionRefusedError:
            if process.poll() is not None:
                sys.exit("a process ended before it listened")


def request(connection):
    connection.sendall(b"GET /a HTTP/1.1\r\nhost: a.test\r\nx-api-key: k\r\n\r\n")
    response = b""
    while not response.endswith(b"ok"):
        received = connection.recv(65536)
        if not received:
            sys.exit(f"the gateway closed the connection after {response!r}")
        response += received
        assert response.startswith(b"HTTP/1.1 200"[:len(response)]), response


def profile(binary, directory):
    ports = {name: free_port() for name in ("gateway", "redis")}
    upstream = socket.create_server(("127.0.0.1", 0))
    ports["upstream"] = upstream.getsockname()[1]
    threading.Thread(target=serve, args=(upstream,), daemon=True).start()
    (directory / "gateway.toml").write_text(CONFIG.format(**ports))
    redis = subprocess.Popen(["redis-server", "--port", str(ports["redis"]), "--save", ""], stdout=subprocess.DEVNULL)
    connect(ports["redis"], redis).close()
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={directory}/profile", binary, "--config"]
    gateway = subprocess.Popen([*command, directory / "gateway.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        connection = connect(ports["gateway"], gateway)
        for _ in range(30):
            request(connection)
        subprocess.run(["callgrind_control", "-z", str(gateway.pid)], stdout=subprocess.DEVNULL, check=True, timeout=60)
        for _ in range(REQUESTS):
            request(connection)
        subprocess.run(["callgrind_control", "-d", str(gateway.pid)], stdout=subprocess.DEVNULL, check=True, timeout=60)
        connection.close()
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(120)
    finally:
        gateway.kill()
        redis.terminate()
    return (directory / "profile.1").read_text()


def instructions(profile):
    """Return the number of instructions of each file in src/. In callgrind's format, the line after a line with `calls=`
    has the inclusive cost of a call, which is not added."""
    names, file, inclusive, costs = {}, "", False, collections.Counter()
    for line in profile.splitlines():
        if found := re.match(r"(?:fl|fi|fe)=\((\d+)\)(?: (.*))?", line):
            file = names.setdefault(found[1], found[2])
        elif found := re.match(r"(?:cfi|cfl)=\((\d+)\) (.*)", line):
            names.setdefault(found[1], found[2])
        elif line.startswith("calls="):
            inclusive = True
        elif re.match(r"(?:\d|[+*-]\d?)\S* \d+$", line):
            if not inclusive:
                costs[file] += int(line.split()[1])
            inclusive = False
    source = str(pathlib.Path("src").resolve()) + "/"
    inside = lambda name: name.startswith(source) or name.startswith("src/")
    return {name.rpartition("/src/")[2] or name[4:]: cost for name, cost in costs.items() if name and inside(name)}


def main():
    with tempfile.TemporaryDirectory() as directory:
        costs = instructions(profile(sys.argv[1], pathlib.Path(directory)))
    crossed = {name: cost / REQUESTS for name, cost in costs.items() if cost >= 50 * REQUESTS}
    crossed = {name: cost for name, cost in crossed.items() if name not in LEFT_OUT}
    for name, cost in sorted(crossed.items(), key=lambda entry: -entry[1]):
        print(f"{cost:8.0f}  {name}")
    rows = table_rows(pathlib.Path("ARCHITECTURE.md").read_text())
    listed = {name for row in rows for name in row}
    print(f"{len(crossed)} files, {len(rows)} rows")
    missing, superfluous = sorted(set(crossed) - listed), sorted(listed - set(crossed))
    if missing or superfluous:
        sys.exit(f"not in ARCHITECTURE.md: {', '.join(missing) or 'none'}\n"
                 f"in ARCHITECTURE.md only: {', '.join(superfluous) or 'none'}")


def table_rows(text):
    """Return the files of each row of the table. The table is the first one of the section, and its rows are numbered."""
    section = text.partition("\n## The walk of a request\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", section, re.MULTILINE)
    if [int(number) for number, _ in rows] != list(range(1, len(rows) + 1)) or len(rows) < 10:
        sys.exit(f"ARCHITECTURE.md: the rows of the walk are not numbered from 1: {[number for number, _ in rows]}")
    names = [re.findall(r"`([a-z0-9_/]+\.rs)`", files) for _, files in rows]
    listed = [name for row in names for name in row]
    if len(listed) != len(set(listed)):
        sys.exit("ARCHITECTURE.md: a file is in two rows of the walk")
    return names


main()
