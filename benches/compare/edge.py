#!/usr/bin/env python3
"""Compare Sluicegate with nginx and HAProxy: HTTP/2, TLS, large bodies, a fixed rate, and twice the capacity.

The script prints the CPU time per request or TLS handshake, the bytes per second of CPU time, and the latency. Each
proxy runs on core 0. The load generators (wrk, h2load, openssl) and the upstream run on core 1. `make bench-edge` builds
the gateway, installs the peers and runs this script. Ports 7000, 9000 and 9151 to 9159 must be free.
"""
import argparse, os, pathlib, re, shutil, statistics, subprocess, tempfile, time

from compare import BINARY, HERE, cpu, tree

CERTS = HERE.parent.parent / "certs"
MIB = 1 << 20
NGINX = """daemon off; user root; worker_processes 1; pid DIR/NAME.pid; error_log DIR/NAME.err warn; events { worker_connections 16384; }
http { access_log off; keepalive_requests 1000000000; keepalive_timeout 300s; http2_max_concurrent_streams 128; sendfile on; BODY }
"""
UPSTREAM = """server { listen 127.0.0.1:9000 backlog=4096; root DIR/files; location / { }
  location /small { default_type application/json; return 200 '{"hello":"world","pad":"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}'; } }"""
PEER = """upstream up { server 127.0.0.1:9000; keepalive 256; keepalive_requests 1000000000; }
  server { listen 127.0.0.1:9151 backlog=4096; listen 127.0.0.1:9152 http2; listen 127.0.0.1:9153 ssl http2;
    ssl_certificate CERTS/dev.pem; ssl_certificate_key CERTS/dev.key; ssl_protocols TLSv1.3;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host; location / { proxy_pass http://up; } }"""
HAPROXY = """global
  nbthread 1
  maxconn 8000
defaults
  mode http
  timeout client 60s
  timeout server 60s
  timeout connect 1s
  http-reuse always
frontend f
  bind 127.0.0.1:9154
  bind 127.0.0.1:9155 proto h2
  bind 127.0.0.1:9156 ssl crt DIR/both.pem alpn h2,http/1.1 ssl-min-ver TLSv1.3
  default_backend b
backend b
  server s 127.0.0.1:9000 pool-max-conn 256
"""
OURS = """[server]
workers = 1
max_connections = 10000
[[listener]]
address = "127.0.0.1:9157"
[[listener]]
address = "127.0.0.1:9159"
tls.certificates = [{ cert = "CERTS/dev.pem", key = "CERTS/dev.key" }]
[log]
access = "off"
[store]
url = "redis://127.0.0.1:7000/0"
[limit.wide]
by = "ip"
quota = "1000000/s"
[upstream.up]
servers = ["http://127.0.0.1:9000"]
pool_idle_timeout = "60s"
[[route]]
name = "all"
path = "/{*rest}"
upstream = "up"
[[route]]
name = "limited"
path = "/small/limited"
upstream = "up"
limits = ["wide"]
"""
# The ports of each proxy for HTTP/1.1, for HTTP/2 without TLS, and for TLS.
PROXIES = {"nginx": (9151, 9152, 9153), "haproxy": (9154, 9155, 9156), "sluicegate": (9157, 9157, 9159)}


class Edge:
    def __init__(self, seconds):
        self.seconds, self.dir, self.procs = seconds, tempfile.mkdtemp(prefix="edge-"), {}
        files = pathlib.Path(self.dir) / "files"
        files.mkdir()
        for name, size in (("1MiB", MIB), ("100MiB", 100 * MIB)):
            (files / name).write_bytes(os.urandom(MIB) * (size // MIB))
        (pathlib.Path(self.dir) / "both.pem").write_text((CERTS / "dev.pem").read_text() + (CERTS / "dev.key").read_text())
        self.start("redis", ["redis-server", "--port", "7000", "--save", "", "--bind", "127.0.0.1"], 1)
        self.start("upstream", ["nginx", "-c", self.write("upstream", NGINX.replace("BODY", UPSTREAM))], 1)
        self.start("nginx", ["nginx", "-c", self.write("nginx", NGINX.replace("BODY", PEER))], 0)
        self.start("haproxy", ["haproxy", "-db", "-f", self.write("haproxy", HAPROXY)], 0)
        self.start("sluicegate", [str(BINARY), "--config", self.write("sluicegate", OURS)], 0)
        time.sleep(2)

    def write(self, name, text):
        path = pathlib.Path(self.dir) / f"{name}.conf"
        path.write_text(text.replace("DIR", self.dir).replace("NAME", name).replace("CERTS", str(CERTS)))
        return str(path)

    def start(self, name, command, core):
        log = open(f"{self.dir}/{name}.log", "w")
        self.procs[name] = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=log, stderr=log)

    def stop(self):
        for proc in self.procs.values():
            proc.terminate()
        for proc in self.procs.values():
            proc.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def run(self, proxy, *command):
        """Run a load. Return its output, and the CPU time of the proxy in seconds."""
        pids = tree(self.procs[proxy].pid)
        before = cpu(pids)
        out = subprocess.run(["taskset", "-c", "1", *map(str, command)], capture_output=True, text=True)
        return out.stdout + out.stderr, cpu(pids) - before

    def wrk(self, proxy, port, path, connections=64, scheme="http"):
        out, used = self.run(proxy, "wrk", "-t1", f"-c{connections}", f"-d{self.seconds}s", f"{scheme}://127.0.0.1:{port}{path}")
        assert "Non-2xx" not in out, out
        return int(re.search(r"(\d+) requests in", out)[1]), used

    def rate(self, proxy, path, rate, clients):
        """Send `rate` requests per second. Return the sorted latencies of the 200 responses in ms, and the number of other
        responses."""
        log = f"{self.dir}/times"
        pathlib.Path(log).unlink(missing_ok=True)
        self.run(proxy, "h2load", "--h1", "-t1", "-c", clients, "-D", self.seconds * 2, "--rps", rate / clients,
                 f"--log-file={log}", f"http://127.0.0.1:{PROXIES[proxy][0]}{path}")
        rows = [line.split("\t") for line in open(log)]
        return sorted(int(row[2]) / 1000 for row in rows if row[1] == "200"), sum(row[1] != "200" for row in rows)


def median(values):
    return statistics.median(values)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--seconds", type=int, default=3)
    args.add_argument("--repeat", type=int, default=3)
    args = args.parse_args()
    edge = Edge(args.seconds)
    rounds = range(args.repeat)

    def table(title, unit, measure):
        figures = {proxy: median([measure(proxy, ports) for _ in rounds]) for proxy, ports in PROXIES.items()}
        print(f"{title:40s} " + "  ".join(f"{proxy} {figure:9.1f}" for proxy, figure in figures.items()) + f"  {unit}", flush=True)

    def each(counted):
        count, used = counted
        return used / count * 1e6

    def h2(proxy, port, scheme):
        out, used = edge.run(proxy, "h2load", "-t1", "-c", 16, "-m", 8, "-D", args.seconds, f"{scheme}://127.0.0.1:{port}/small")
        return int(re.search(r"(\d+) succeeded", out)[1]), used

    def handshakes(proxy, ports):
        out, used = edge.run(proxy, "openssl", "s_time", "-new", "-connect", f"127.0.0.1:{ports[2]}", "-time", args.seconds)
        return int(re.search(r"(\d+) connections in", out)[1]), used

    def speed(proxy, port, name, size, connections):
        count, used = edge.wrk(proxy, port, f"/{name}", connections)
        return count * size / used / 1e9

    try:
        table("HTTP/1.1", "µs of CPU a request", lambda proxy, ports: each(edge.wrk(proxy, ports[0], "/small")))
        table("HTTP/2 in clear text", "µs of CPU a request", lambda proxy, ports: each(h2(proxy, ports[1], "http")))
        table("HTTP/1.1 over TLS 1.3", "µs of CPU a request", lambda proxy, ports: each(edge.wrk(proxy, ports[2], "/small", scheme="https")))
        table("HTTP/2 over TLS 1.3", "µs of CPU a request", lambda proxy, ports: each(h2(proxy, ports[2], "https")))
        table("TLS 1.3 handshakes", "µs of CPU each", lambda proxy, ports: each(handshakes(proxy, ports)))
        table("bodies of 1 MiB", "GB per second of CPU", lambda proxy, ports: speed(proxy, ports[0], "1MiB", MIB, 8))
        table("bodies of 100 MiB", "GB per second of CPU", lambda proxy, ports: speed(proxy, ports[0], "100MiB", 100 * MIB, 2))
        for path in ("/small", "/small/limited") * args.repeat:
            times, refused = edge.rate("sluicegate", path, 3000, 6)
            print(f"3,000 req/s of {path:24s} p50 {times[len(times) // 2]:6.2f} ms  p99 {times[len(times) * 99 // 100]:6.2f} ms  {refused} refused", flush=True)
        count, _ = edge.wrk("sluicegate", PROXIES["sluicegate"][0], "/small/limited")
        capacity = count / args.seconds
        for factor in (0.5, 1, 2):
            times, refused = edge.rate("sluicegate", "/small/limited", capacity * factor, 1000)
            print(f"{factor} of the capacity of {capacity:.0f}/s: {len(times) / args.seconds / 2:8.0f} answers a second  "
                  f"p50 {times[len(times) // 2]:7.1f} ms  p99 {times[len(times) * 99 // 100]:7.1f} ms  {refused} refused", flush=True)
    finally:
        edge.stop()


if __name__ == "__main__":
    main()
