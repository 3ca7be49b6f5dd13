#!/usr/bin/env python3
"""How many user instructions the gateway spends on a request, by callgrind: the same on every machine and however busy it is.

Sixteen connections ask in step, so that requests meet as they do under load; what a start costs is the same in a short run and in
a long one, and the difference is counted. The upstream is a second gateway, and Redis one of its own. Prints a table and asserts
nothing. `make bench-instructions` builds and runs this; valgrind and redis-server must be there.
"""
import argparse, pathlib, re, socket, subprocess, tempfile, time

CONNECTIONS, SHORT, LONG = 16, 50, 250

UPSTREAM = """[[listener]]
address = "127.0.0.1:{upstream}"
[log]
access = "off"
[[route]]
name = "all"
path = "/{{*rest}}"
respond = {{ status = 200, body = "{body}" }}
"""

GATEWAY = """[server]
workers = 1
[[listener]]
address = "127.0.0.1:{port}"
[log]
access = "off"
[store]
{store}
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[limit.wide]
by = "api-key"
quota = "1000000/s"
[limit.second]
by = "api-key"
quota = "1000000/min"
algorithm = "fixed-window"
[limit.third]
by = "ip"
quota = "100000000/hour"
algorithm = "fixed-window"
[limit.tight]
by = "api-key"
quota = "1/hour"
[upstream.up]
servers = ["http://127.0.0.1:{upstream}"]
"""

ROUTES = {"plain": "", "one": '"wide"', "three": '"wide", "second", "third"', "deny": '"tight"'}

CASES = [("plain", "memory", "plain"), ("one limit in memory", "memory", "one"), ("one limit in Redis", "redis", "one"),
         ("three limits in Redis", "redis", "three"), ("denied", "redis", "deny")]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def connect(port, process):
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise SystemExit(f"a process ended with {process.returncode} before it listened on {port}")
            time.sleep(0.02)


def answer(connection, pending):
    """One response with a Content-Length."""
    while b"\r\n\r\n" not in pending:
        pending += receive(connection)
    head, rest = pending.split(b"\r\n\r\n", 1)
    length = int(re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)[1])
    while len(rest) < length:
        rest += receive(connection)
    return int(head.split(b" ", 2)[1]), rest[length:]


def receive(connection):
    received = connection.recv(65536)
    if not received:
        raise SystemExit("the gateway closed a connection")
    return received


def route_table(name, limits):
    identify = 'identify = ["keys"]\n' if limits else ""
    return f'[[route]]\nname = "{name}"\npath = "/{name}"\nupstream = "up"\n{identify}limits = [{limits}]\n'


def instructions(binary, directory, store, route, rounds, upstream):
    """All that a gateway needs for so many rounds, with its start and its end."""
    port = free_port()
    config = directory / "gateway.toml"
    routes = "".join(route_table(name, limits) for name, limits in ROUTES.items())
    config.write_text(GATEWAY.format(port=port, store=store, upstream=upstream) + routes)
    count = directory / "count"
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={count}"]
    with open(directory / "log", "w") as log:
        gateway = subprocess.Popen(valgrind + [binary, "--config", str(config)], stdout=log, stderr=log)
    try:
        connections = [(connect(port, gateway), b"") for _ in range(CONNECTIONS)]
        for number in range(rounds):
            for index, (connection, _) in enumerate(connections):
                connection.sendall(f"GET /{route} HTTP/1.1\r\nhost: gateway\r\nx-api-key: {port}-{index}\r\n\r\n".encode())
            for index, (connection, pending) in enumerate(connections):
                status, pending = answer(connection, pending)
                expected = 429 if route == "deny" and number > 0 else 200
                if status != expected:
                    raise SystemExit(f"{route}: {status} instead of {expected}")
                connections[index] = (connection, pending)
    finally:
        gateway.terminate()
        gateway.wait()
    return int(re.search(r"refs: +([\d,]+)", count.read_text())[1].replace(",", ""))


def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("binary")
    binary = args.parse_args().binary
    with tempfile.TemporaryDirectory(prefix="instructions-") as name:
        directory = pathlib.Path(name)
        redis_port, upstream_port = free_port(), free_port()
        (directory / "upstream.toml").write_text(UPSTREAM.format(upstream=upstream_port, body="x" * 100))
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        redis = subprocess.Popen(["redis-server", "--port", str(redis_port), "--save", "", "--bind", "127.0.0.1"], cwd=name, **quiet)
        upstream = subprocess.Popen([binary, "--config", name + "/upstream.toml"], **quiet)
        try:
            for port, process in ((redis_port, redis), (upstream_port, upstream)):
                connect(port, process).close()
            stores = {"memory": 'url = "memory:"', "redis": f'url = "redis://127.0.0.1:{redis_port}/0"\ntimeout = "1s"'}
            print("user instructions for each request")
            for label, store, route in CASES:
                short, long = (instructions(binary, directory, stores[store], route, rounds, upstream_port) for rounds in (SHORT, LONG))
                print(f"{label:24s} {(long - short) / (LONG - SHORT) / CONNECTIONS:9,.0f}", flush=True)
        finally:
            for process in (upstream, redis):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
