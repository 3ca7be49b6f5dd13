#!/usr/bin/env python3
"""Measure the CPU time per check of 1 to 3 gateways with one Redis server, and of 2 gateways with a Redis Cluster.

The clusters have 1, 2 and 3 masters. A last measurement uses a million identities. The gateways respond without an
upstream, so that mainly the limiter is measured. All processes share the cores of this machine, so throughput is not
meaningful. From the CPU time per check, one can compute how many checks one core of a gateway or of Redis can perform.
The script prints a table and, with --chart FILE, draws it. `make bench-scale` builds the gateway and runs this script.
Ports 7000 to 7003, 17001 to 17003 and 9130 to 9132 must be free.
"""
import argparse, pathlib, re, shutil, subprocess, tempfile, time

from chart import bars
from compare import BINARY, HERE, cpu, tree

SLOTS = 16384
CONFIG = """[server]
workers = 1
[[listener]]
address = "127.0.0.1:{port}"
[log]
access = "off"
[store]
url = "{url}"
timeout = "1s"
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[limit.wide]
by = "api-key"
quota = "1000000/day"
algorithm = "fixed-window"
on_store_error = "deny"
[[route]]
name = "one"
path = "/one"
identify = ["keys"]
limits = ["wide"]
respond = {{ status = 200, body = "ok" }}
"""


def cli(port, *words):
    return subprocess.run(["redis-cli", "-p", str(port), *map(str, words)], capture_output=True, text=True).stdout


def info(port, section, name):
    found = re.search(rf"^{name}:([^\r\n]*)", cli(port, "info", section), re.M)
    return found.group(1) if found else "0"


def calls(ports):
    return sum(int((re.search(r"calls=(\d+)", info(port, "commandstats", "cmdstat_evalsha")) or [0, 0])[1]) for port in ports)


def keys(port):
    return int((re.search(r"keys=(\d+)", info(port, "keyspace", "db0")) or [0, 0])[1])


def resident(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{pid}/status").read()).group(1)) * 1024


class Setting:
    """A number of gateways, and a Redis Cluster with a number of masters. With 0 masters, Redis is a single server."""

    def __init__(self, gateways, masters):
        self.dir, self.procs, self.redis = tempfile.mkdtemp(prefix="scale-"), [], []
        self.ports = [7001 + index for index in range(masters)] or [7000]
        for port in self.ports:
            cluster = ["--cluster-enabled", "yes", "--cluster-config-file", f"{self.dir}/{port}.conf"] if masters else []
            self.redis.append(self.start(["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1",
                                          "--dir", self.dir, *cluster]))
        for port in self.ports:
            while cli(port, "ping") != "PONG\n":
                time.sleep(0.05)
        for index, port in enumerate(self.ports if masters else []):
            cli(port, "cluster", "set-config-epoch", index + 1)
            cli(port, "cluster", "addslotsrange", index * SLOTS // masters, (index + 1) * SLOTS // masters - 1)
            cli(self.ports[0], "cluster", "meet", "127.0.0.1", port)
        while masters and not all("cluster_state:ok" in cli(port, "cluster", "info") for port in self.ports):
            time.sleep(0.05)
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        url = f"redis+cluster://{hosts}" if masters else f"redis://{hosts}/0"
        self.gateways, self.urls = [], []
        for index in range(gateways):
            port = 9130 + index
            path = pathlib.Path(self.dir) / f"{port}.toml"
            path.write_text(CONFIG.format(port=port, url=url))
            self.gateways.append(self.start([str(BINARY), "--config", str(path)]))
            self.urls.append(f"http://127.0.0.1:{port}/one")
        time.sleep(1)

    def start(self, command):
        self.procs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return self.procs[-1]

    def cpu(self, procs):
        return cpu([pid for proc in procs for pid in tree(proc.pid)])

    def load(self, label, identities, seconds, first=0):
        before = (self.cpu(self.gateways), self.cpu(self.redis), calls(self.ports))
        wrk = [subprocess.Popen(["wrk", "-t1", f"-c{64 // len(self.urls)}", f"-d{seconds}s", "--latency", "-s",
                                 str(HERE / "identities.lua"), url, "--", str(identities), str(first + index), str(len(self.urls))],
                                stdout=subprocess.PIPE, text=True) for index, url in enumerate(self.urls)]
        outs = [proc.communicate()[0] for proc in wrk]
        requests = sum(int(re.search(r"(\d+) requests in", out).group(1)) for out in outs)
        bad = sum(int(found.group(1)) for out in outs if (found := re.search(r"Non-2xx or 3xx responses: (\d+)", out)))
        after = (self.cpu(self.gateways), self.cpu(self.redis), calls(self.ports))
        gateway, redis, asked = (two - one for one, two in zip(before, after))
        row = dict(label=label, rps=requests / seconds, gateway=gateway / requests * 1e6, redis=redis / requests * 1e6,
                   calls=asked / requests, bad=bad, p50=re.search(r"\n\s+50%\s+(\S+)", outs[0]).group(1),
                   p99=re.search(r"\n\s+99%\s+(\S+)", outs[0]).group(1))
        print(f"{label:34s} {row['rps']:8.0f} checks/s  gateways {row['gateway']:5.1f} us  redis {row['redis']:5.1f} us  "
              f"{row['calls']:.2f} calls  p50 {row['p50']:>8s}  p99 {row['p99']:>8s}  not 2xx {bad}", flush=True)
        return row

    def stop(self):
        for proc in self.procs:
            proc.terminate()
        for proc in self.procs:
            proc.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--seconds", type=int, default=5)
    args.add_argument("--chart", type=pathlib.Path)
    args = args.parse_args()
    rows = []
    for label, gateways, masters in [("1 gateway, one Redis", 1, 0), ("2 gateways, one Redis", 2, 0),
                                     ("3 gateways, one Redis", 3, 0), ("2 gateways, cluster of 1", 2, 1),
                                     ("2 gateways, cluster of 2", 2, 2), ("2 gateways, cluster of 3", 2, 3)]:
        setting = Setting(gateways, masters)
        try:
            setting.load(f"{label} (warm-up)", 1000, 1)
            rows.append(setting.load(label, 1000, args.seconds))
        finally:
            setting.stop()
    setting = Setting(1, 0)
    try:
        port, gateway = setting.ports[0], setting.gateways[0].pid
        for label, identities in [("1,000 identities", 1000), ("1,000,000 identities, new", 10**6), ("1,000,000 identities, known", 10**6)]:
            seconds = args.seconds
            if "new" in label:
                # Send requests until Redis has the states of all identities.
                start, used, mine = time.time(), int(info(port, "memory", "used_memory")), resident(gateway)
                while (known := keys(port)) < 10**6 and time.time() - start < 120:
                    setting.load(label, identities, 20, known)
                grown = int(info(port, "memory", "used_memory")) - used
                print(f"{'':34s} Redis {grown / 2**20:.0f} MiB more, the gateway {(resident(gateway) - mine) / 2**20:.0f} MiB more")
            else:
                rows.append(setting.load(label, identities, seconds))
    finally:
        setting.stop()
    if args.chart:
        args.chart.write_text(bars("CPU of one check", [(row["label"], row["gateway"], row["redis"]) for row in rows]))


if __name__ == "__main__":
    main()
