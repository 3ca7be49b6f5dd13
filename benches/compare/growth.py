#!/usr/bin/env python3
"""Measure how the CPU time per request grows with four factors: routes, limits per route, identities and connections.

The gateways run on core 0. The load generator, Redis and the upstream of compare.py run on core 1. The sizes of a
factor are measured in turn, so that other load of the machine affects all of them. A round begins when the connections
to the gateway and the upstream are open, so that it measures requests and not connections. The result of a size is that
of its round with the least CPU time. scale.py measures how the CPU time grows with the number of gateways. The script prints a
table and, with --charts DIR, draws one chart per factor. `make bench-growth` builds the gateway and runs this script.
Ports 7000, 9000 and 9140 to 9144 must be free.
"""
import argparse, pathlib, re, resource, shutil, subprocess, tempfile, time, urllib.error, urllib.request

from chart import bars
from compare import BINARY, HERE, Bench

HEAD = """[server]
workers = 1
max_connections = 20000
[[listener]]
address = "127.0.0.1:{port}"
[log]
access = "off"
[store]
url = "redis://127.0.0.1:7000/0"
timeout = "1s"
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[upstream.up]
servers = ["http://127.0.0.1:9000"]
pool_idle_timeout = "60s"
# With 10,000 connections, the gateway has at most 18,000 sockets.
max_requests = 8000
max_queue = 10000
"""


def limit(number):
    """Return the configuration of a limit that never denies: a token bucket or a fixed window, in turn."""
    kind = 'quota = "1000000/s"' if number % 2 == 0 else 'quota = "1000000000/hour"\nalgorithm = "fixed-window"'
    return f'[limit.l{number}]\nby = "api-key"\n{kind}\n'


class Size:
    """The configuration of a gateway, and its load: `limits` is the total number of limits, `of_route` the number of limits
    per route."""

    def __init__(self, label, routes=1, limits=1, of_route=1, connections=64, identities=1000):
        self.label, self.routes, self.limits, self.of_route = label, routes, limits, of_route
        self.connections, self.identities = connections, identities

    def config(self, port):
        text = [HEAD.format(port=port)] + [limit(number) for number in range(self.limits)]
        for number in range(self.routes):
            names = ", ".join(f'"l{(number + index) % self.limits}"' for index in range(self.of_route))
            identify = 'identify = ["keys"]\n' if names else ""
            text.append(f'[[route]]\nname = "r{number}"\npath = "/r{number}/items/{{id}}"\nupstream = "up"\n{identify}limits = [{names}]\n')
        return "".join(text)

    def url(self, port):
        return f"http://127.0.0.1:{port}/r{self.routes - 1}/items/7"


class Growth(Bench):
    def __init__(self, directory, seconds, repeat):
        super().__init__(directory, seconds)
        self.repeat = repeat
        self.start("redis", ["redis-server", "--port", "7000", "--save", "", "--bind", "127.0.0.1"], 1)
        self.start("upstream", ["nginx", "-c", self.config("upstream.nginx.conf")], 1)

    def grow(self, sizes):
        """Measure the sizes. For each size, return the CPU time of the gateway and Redis in its round with the least CPU
        time, and the ratio to the first size."""
        for port, size in enumerate(sizes, 9140):
            path = pathlib.Path(self.dir) / f"{port}.toml"
            path.write_text(size.config(port))
            self.start(size.label, [str(BINARY), "--config", str(path)], 0)
        for port, size in enumerate(sizes, 9140):
            self.wait(size.url(port))
            for first in range(0, size.identities, size.identities // 5) if size.identities > 10**5 else ():
                # Create the states of all identities in Redis.
                subprocess.run(["wrk", "-t1", "-c64", "-d15s", "-s", str(HERE / "identities.lua"), size.url(port),
                                "--", str(size.identities), str(first), "1"], stdout=subprocess.DEVNULL)
        # The first round is a warm-up, whose result is discarded.
        for _ in range(self.repeat + 1):
            for port, size in enumerate(sizes, 9140):
                script = ("identities.lua", str(size.identities), "0", "1")
                self.load(size.label, size.label, size.url(port), connections=size.connections, script=script)
        for size in sizes:
            gateway = self.procs.pop(size.label)
            gateway.terminate()
            gateway.wait()
        rounds = {size.label: self.rows.pop(size.label)[1:] for size in sizes}
        least = {label: min((row["proxy_us"] + row["redis_us"], row["proxy_us"], row["redis_us"]) for row in rows) for label, rows in rounds.items()}
        first = least[sizes[0].label][0]
        return [(label, gateway, redis, total / first) for label, (total, gateway, redis) in least.items()]

    def round(self, proxy, url, connections, script):
        opening = 1 + connections // 2000
        load = subprocess.Popen(
            ["taskset", "-c", "1", "wrk", "-t1", f"-c{connections}", f"-d{opening + self.seconds + 1}s", "--timeout", "20s",
             "-s", str(HERE / script[0]), url, "--", *script[1:]], stdout=subprocess.PIPE, text=True)
        time.sleep(opening)
        row = self.measure(proxy, self.window)
        out = load.communicate()[0]
        bad = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
        return row | dict(not_2xx=int(bad[1]) / int(re.search(r"(\d+) requests in", out)[1]) if bad else 0)

    def window(self):
        """Wait for `seconds`. Return the requests in this time, which the upstream has counted."""
        began, before = time.monotonic(), self.served()
        time.sleep(self.seconds)
        count = self.served() - before
        return dict(count=count, rps=count / (time.monotonic() - began), p50="-", p99="-")

    def served(self):
        return int(urllib.request.urlopen("http://127.0.0.1:9000/status").read().split()[9])

    def wait(self, url):
        while True:
            try:
                return urllib.request.urlopen(urllib.request.Request(url, headers={"x-api-key": "first"})).read()
            except urllib.error.HTTPError:
                raise
            except OSError:
                time.sleep(0.05)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--seconds", type=int, default=1)
    args.add_argument("--repeat", type=int, default=10)
    args.add_argument("--charts", type=pathlib.Path)
    args.add_argument("--only", default="", help="one factor: routes, limits, connections, identities, everything")
    args = args.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    factors = {
        "routes": [Size(f"{n:,} routes", routes=n) for n in (10, 100, 1000, 10000)],
        "limits": [Size(f"{n} limits of the route", limits=max(n, 1), of_route=n) for n in (0, 1, 2, 4, 8)],
        "connections": [Size(f"{n:,} connections", connections=n) for n in (8, 64, 512, 4096, 10000)],
        "identities": [Size(f"{n:,} identities", identities=n) for n in (10**3, 10**4, 10**5, 10**6)],
        "everything": [Size("10 routes, 1 limit, 1,000 identities", routes=10),
                       Size("10,000 routes, 1,000 limits, 1,000,000 identities", routes=10000, limits=1000, identities=10**6)],
    }
    directory = tempfile.mkdtemp(prefix="growth-")
    growth = Growth(directory, args.seconds, args.repeat)
    try:
        charts = {name: growth.grow(sizes) for name, sizes in factors.items() if args.only in ("", name)}
    finally:
        growth.stop()
        shutil.rmtree(directory, ignore_errors=True)
    for name, rows in charts.items():
        print(f"\n{name}")
        for label, gateway, redis, multiple in rows:
            print(f"{label:52s} {gateway:6.1f} + {redis:5.1f} us  {multiple:5.2f}x")
        if args.charts and name != "everything":
            (args.charts / f"growth-{name}.svg").write_text(bars("CPU of a request", [row[:3] for row in rows]))


if __name__ == "__main__":
    main()
