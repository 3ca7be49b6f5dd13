#!/usr/bin/env python3
"""How the CPU of a request grows with routes, limits of a route, identities and connections; one chart each.

One gateway on core 0, in front of the upstream of compare.py; load, Redis and upstream on core 1. How it grows with gateways is what
scale.py shows. Prints a table and, with --charts DIR, draws it. `make bench-growth` builds and runs this; ports 7000, 9000 and
9140 must be free.
"""
import argparse, pathlib, shutil, statistics, subprocess, tempfile, time

from chart import bars
from compare import BINARY, HERE, Bench

HEAD = """[server]
workers = 1
max_connections = 10000
[[listener]]
address = "127.0.0.1:9140"
[log]
access = "off"
[store]
url = "redis://127.0.0.1:7000/0"
timeout = "1s"
[api_key]
on_unknown = "accept"
[upstream.up]
servers = ["http://127.0.0.1:9000"]
pool_idle_timeout = "60s"
"""


def limit(number):
    """Token buckets and fixed windows in turn, which never deny."""
    kind = 'quota = "1000000/s"' if number % 2 == 0 else 'quota = "1000000000/hour"\nalgorithm = "fixed-window"'
    return f'[limit.l{number}]\nby = "api-key"\n{kind}\n'


def config(routes=1, limits=1, of_route=1):
    """So many routes, of which each names so many of so many limits."""
    text = [HEAD] + [limit(number) for number in range(limits)]
    for number in range(routes):
        names = ", ".join(f'"l{(number + index) % limits}"' for index in range(of_route))
        text.append(f'[[route]]\nname = "r{number}"\npath = "/r{number}/items/{{id}}"\nupstream = "up"\nlimits = [{names}]\n')
    return "".join(text), f"http://127.0.0.1:9140/r{routes - 1}/items/7"


class Growth(Bench):
    def __init__(self, directory, seconds, repeat):
        super().__init__(directory, seconds)
        self.repeat = repeat
        self.start("redis", ["redis-server", "--port", "7000", "--save", "", "--bind", "127.0.0.1"], 1)
        self.start("upstream", ["nginx", "-c", self.config("upstream.nginx.conf")], 1)

    def measure(self, label, made, connections=64, identities=1000, known=False):
        """The median CPU of gateway and Redis."""
        text, url = made
        path = pathlib.Path(self.dir) / "gateway.toml"
        path.write_text(text)
        self.start("gateway", [str(BINARY), "--config", str(path)], 0)
        time.sleep(2)
        script = ("identities.lua", str(identities), "0", "1")
        if known:
            # Until Redis knows them all.
            for first in range(0, identities, identities // 5):
                subprocess.run(["wrk", "-t1", "-c64", "-d20s", "-s", str(HERE / script[0]), url, "--", script[1], str(first), "1"],
                               stdout=subprocess.DEVNULL)
        self.load("warm-up", "gateway", url, connections, script)
        for _ in range(self.repeat):
            self.load(label, "gateway", url, connections, script)
        gateway = self.procs.pop("gateway")
        gateway.terminate()
        gateway.wait()
        rows = self.rows[label]
        return label, statistics.median(row["proxy_us"] for row in rows), statistics.median(row["redis_us"] for row in rows)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--seconds", type=int, default=2)
    args.add_argument("--repeat", type=int, default=3)
    args.add_argument("--charts", type=pathlib.Path)
    args = args.parse_args()
    directory = tempfile.mkdtemp(prefix="growth-")
    growth = Growth(directory, args.seconds, args.repeat)
    charts = {}
    try:
        charts["routes"] = [growth.measure(f"{n:,} routes", config(routes=n)) for n in (10, 100, 1000, 10000)]
        charts["limits"] = [growth.measure(f"{n} limits of the route", config(limits=max(n, 1), of_route=n)) for n in (0, 1, 2, 4, 8)]
        charts["connections"] = [growth.measure(f"{n:,} connections", config(), connections=n) for n in (8, 64, 512, 4096)]
        charts["identities"] = [growth.measure(f"{n:,} identities", config(), identities=n, known=n > 10**5)
                                for n in (10**3, 10**4, 10**5, 10**6)]
        big = config(routes=10000, limits=1000)
        charts["everything"] = [charts["routes"][0],
                                growth.measure("10,000 routes, 1,000 limits, 10⁶ identities", big, identities=10**6, known=True)]
    finally:
        growth.stop()
        shutil.rmtree(directory, ignore_errors=True)
    for name, rows in charts.items():
        print(f"\n{name}")
        for label, gateway, redis in rows:
            print(f"{label:46s} {gateway:6.1f} + {redis:5.1f} us  {(gateway + redis) / (rows[0][1] + rows[0][2]):5.2f}x")
        if args.charts and name != "everything":
            (args.charts / f"growth-{name}.svg").write_text(bars("CPU of a request", rows))


if __name__ == "__main__":
    main()
