#!/usr/bin/env python3
"""Compare the rate limit service with envoyproxy/ratelimit and with Envoy's local rate limit: CPU time per decision.

    ratelimit.py BINARY [--reference RATELIMIT] [--envoy ENVOY]

Each service gets the same calls of ShouldRateLimit at a fixed rate: one call has one descriptor with a user, out of 1,000
users in turn, and limits per minute and per hour in the YAML of envoyproxy/ratelimit. Then Envoy gets the same requests at
a fixed rate over HTTP/1.1: without a limit, with its local rate limit, and with each service. The services, Envoy and
Redis run on core 0, the load and the upstream on core 1. The rounds alternate. The script prints the median and the range
of each process. CPU times include the kernel's. The reference needs Go: RATELIMIT is its program `service_cmd`.
"""
import argparse, json, os, pathlib, shutil, socket, statistics, struct, subprocess, sys, tempfile, time

from compare import HERE, cpu, tree

sys.path.append(str(HERE.parent.parent / "tests/clients"))
from real_envoy import cluster, configuration, free_port, limit_filter, per_route, wait_for  # noqa: E402

USERS = 1000
CONNECTIONS = 4
# Maximum number of calls in flight on a connection. Services permit at least 100.
STREAMS = 100
DOMAIN = "edge"
METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
YAML = f"""domain: {DOMAIN}
descriptors:
  - key: user
    rate_limit: {{unit: minute, requests_per_unit: 1000000000}}
  - key: path
    rate_limit: {{unit: hour, requests_per_unit: 1000000000}}
"""


def field(number, payload):
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def message(user):
    """Return a RateLimitRequest with the descriptors (user) and (path), as a gRPC message."""
    def descriptor(key):
        return field(2, field(1, field(1, key.encode()) + field(2, user.encode())))

    text = field(1, DOMAIN.encode()) + descriptor("user") + descriptor("path")
    return b"\0" + struct.pack(">I", len(text)) + text


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name, value):
    """Return a header field that is no entry of a table (RFC 7541 §6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


class Channel:
    """An HTTP/2 connection that sends calls and counts responses."""

    DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
    END_STREAM, ACK, END_HEADERS = 1, 1, 4

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = {":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": "ratelimit", "content-type": "application/grpc",
                  "te": "trailers", "grpc-timeout": "5S", "user-agent": "envoy"}
        self.headers = b"".join(header(name, value) for name, value in fields.items())
        window = frame(self.WINDOW_UPDATE, 0, 0, struct.pack(">I", 0x7000_0000))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(self.SETTINGS, 0, 0, b"") + window)
        self.socket.setblocking(False)
        self.stream, self.received, self.answered, self.failed = 1, b"", 0, 0

    def call(self, text):
        headers = frame(self.HEADERS, self.END_HEADERS, self.stream, self.headers)
        self.send(headers + frame(self.DATA, self.END_STREAM, self.stream, text))
        self.stream += 2

    def in_flight(self):
        return self.stream // 2 - self.answered

    def send(self, data):
        self.socket.setblocking(True)
        self.socket.sendall(data)
        self.socket.setblocking(False)

    def read(self):
        try:
            received = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not received:
            raise SystemExit("the service has closed the connection")
        data, start = self.received + received, 0
        while len(data) - start >= 9:
            length = int.from_bytes(data[start : start + 3], "big")
            if len(data) - start < 9 + length:
                break
            kind, flags = data[start + 3], data[start + 4]
            payload = data[start + 9 : start + 9 + length]
            start += 9 + length
            if kind in (self.HEADERS, self.DATA) and flags & self.END_STREAM:
                self.answered += 1
            elif kind in (3, self.GOAWAY):
                self.failed += 1
            elif kind in (self.SETTINGS, self.PING) and not flags & self.ACK:
                self.send(frame(kind, self.ACK, 0, payload if kind == self.PING else b""))
        self.received = data[start:]


def drive(port, rate, seconds):
    """Send calls at this rate. Return the number of answered calls."""
    channels = [Channel(port) for _ in range(CONNECTIONS)]
    messages = [message(f"user-{number}") for number in range(USERS)]
    began, sent = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        for number in range(sent, int(passed * rate)):
            channel = channels[number % CONNECTIONS]
            if channel.in_flight() >= STREAMS:
                break
            channel.call(messages[number % USERS])
            sent += 1
        for channel in channels:
            channel.read()
        time.sleep(0.0005)
    deadline = time.monotonic() + 5
    while sum(channel.answered for channel in channels) < sent and time.monotonic() < deadline:
        for channel in channels:
            channel.read()
    answered = sum(channel.answered for channel in channels)
    if answered != sent or any(channel.failed for channel in channels):
        raise SystemExit(f"{answered} of {sent} calls were answered")
    return answered


def requests(port, rate, seconds):
    """Send HTTP/1.1 requests at this rate with h2load. Return the number of admitted requests."""
    clients = 8
    uris = [f"http://127.0.0.1:{port}/user-{number}" for number in range(USERS)]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(uris))
        file.flush()
        command = ["taskset", "-c", "1", "h2load", "--h1", "-t1", f"-c{clients}", f"-n{rate * seconds // clients * clients}", f"--rps={rate // clients}", "-i", file.name]
        out = subprocess.run(command, capture_output=True, text=True).stdout
    done = [line for line in out.splitlines() if line.startswith("status codes:")]
    count = int(done[0].split()[2]) if done else 0
    if count < rate * seconds // clients * clients:
        raise SystemExit(f"not all requests were admitted: {out}")
    return count


class Bench:
    def __init__(self, args):
        self.args, self.folder, self.procs, self.rows = args, pathlib.Path(tempfile.mkdtemp(prefix="ratelimit-")), {}, {}
        config = self.folder / "ratelimit/config"
        config.mkdir(parents=True)
        (config / "edge.yaml").write_text(YAML)

    def start(self, name, command, core, **env):
        log = open(self.folder / f"{name.replace(' ', '-')}.log", "w")
        environment = {"PATH": os.environ["PATH"], **env}
        self.procs[name] = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=log, stderr=log, env=environment)

    def service(self, name, program):
        """Start a Redis and a service with the variables of the reference. Return the port of the service."""
        redis = free_port()
        self.start(f"{name} redis", ["redis-server", "--port", str(redis), "--save", "", "--bind", "127.0.0.1"], 0)
        wait_for(redis)
        ports = [free_port() for _ in range(3)]
        self.start(
            name, [program], 0, RUNTIME_ROOT=str(self.folder), RUNTIME_SUBDIRECTORY="ratelimit", RUNTIME_WATCH_ROOT="false", REDIS_SOCKET_TYPE="tcp",
            REDIS_URL=f"127.0.0.1:{redis}", USE_STATSD="false", DISABLE_STATS="true", LOG_LEVEL="error", HOST="127.0.0.1", GRPC_HOST="127.0.0.1",
            PORT=str(ports[0]), GRPC_PORT=str(ports[1]), DEBUG_PORT=str(ports[2]), GOMAXPROCS="1")
        wait_for(ports[1])
        return ports[1]

    def envoy(self, name, service=None, local=False):
        """Start an Envoy. Return its port."""
        port, filters, limits = free_port(), [], []
        clusters = [cluster("upstream", self.upstream)]
        if local:
            bucket = {"max_tokens": 1_000_000, "tokens_per_fill": 1_000_000, "fill_interval": "1s"}
            enabled = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
            filters.append({"name": "envoy.filters.http.local_ratelimit", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit", "stat_prefix": "local",
                "token_bucket": bucket, "filter_enabled": enabled, "filter_enforced": enabled}})
        if service:
            filters.append(limit_filter(DOMAIN))
            clusters.append(cluster("sluicegate", service, True))
            limits = [{"actions": [{"request_headers": {"header_name": ":path", "descriptor_key": key}}]} for key in ("user", "path")]
        routes = [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}, **(per_route(limits) if limits else {})}]
        path = self.folder / f"envoy-{port}.json"
        path.write_text(json.dumps(configuration(port, filters, routes, clusters)))
        self.start(name, [self.args.envoy, "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"], 0)
        wait_for(port)
        return port

    def measure(self, case, names, load):
        """Run a load, and add the CPU time per request of each of these processes to the rows of the case."""
        pids = {name: tree(self.procs[name].pid) for name in names}
        before = {name: cpu(each) for name, each in pids.items()}
        count = load()
        used = [(cpu(each) - before[name]) / count * 1e6 for name, each in pids.items()]
        self.rows.setdefault(case, []).append(used)
        print(f"{case:34s}" + "".join(f"  {name} {us:6.1f} us" for name, us in zip(names, used)) + f"   together {sum(used):6.1f} us", flush=True)

    def run(self):
        self.start("upstream", ["nginx", "-c", self.upstream_config()], 1)
        self.upstream = 9000
        wait_for(self.upstream)
        link = self.folder / "ratelimit-link"
        link.mkdir()
        (link / "ratelimit").symlink_to(pathlib.Path(self.args.binary).resolve())
        services = {"sluicegate": str(link / "ratelimit")}
        if self.args.reference:
            services["reference"] = str(pathlib.Path(self.args.reference).resolve())
        ports = {name: self.service(name, program) for name, program in services.items()}
        envoys = {}
        if self.args.envoy:
            envoys = {"envoy plain": (self.envoy("envoy plain"), ()), "envoy local limit": (self.envoy("envoy local limit", local=True), ())}
            for name, port in ports.items():
                envoys[f"envoy with {name}"] = (self.envoy(f"envoy with {name}", port), (name, f"{name} redis"))
        rate, seconds = self.args.rate, self.args.seconds
        for _ in range(self.args.rounds):
            for name, port in ports.items():
                self.measure(f"calls of {name}", (name, f"{name} redis"), lambda: drive(port, rate, seconds))
            for name, (port, others) in envoys.items():
                self.measure(name, (name, *others), lambda: requests(port, rate, seconds))
        print(f"\nCPU us per decision at {rate} calls a second: median of the sum, and the range; then the median of each process")
        for case, rows in self.rows.items():
            sums = [sum(row) for row in rows]
            each = [statistics.median(column) for column in zip(*rows)]
            print(f"{case:34s} {statistics.median(sums):7.1f}   {min(sums):6.1f} to {max(sums):6.1f}   " + " + ".join(f"{us:.1f}" for us in each))

    def upstream_config(self):
        path = self.folder / "upstream.nginx.conf"
        path.write_text((HERE / "upstream.nginx.conf").read_text().replace("DIR", str(self.folder)))
        return str(path)

    def stop(self):
        for proc in self.procs.values():
            proc.terminate()
        for proc in self.procs.values():
            proc.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary")
    args.add_argument("--reference", help="the program of envoyproxy/ratelimit")
    args.add_argument("--envoy", default=shutil.which("envoy", path=f"{HERE.parent.parent}/target/peers/bin:{os.environ['PATH']}"))
    args.add_argument("--rate", type=int, default=2000, help="calls or requests a second")
    args.add_argument("--seconds", type=int, default=6)
    args.add_argument("--rounds", type=int, default=5)
    bench = Bench(args.parse_args())
    try:
        os.sched_setaffinity(0, {1})
        bench.run()
    finally:
        bench.stop()


if __name__ == "__main__":
    main()
