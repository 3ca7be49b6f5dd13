#!/usr/bin/env python3
"""Train a build for profile-guided optimization: load it with a fixed number of requests of each kind.

    train.py BINARY

Only the gateway is loaded, with nginx or another gateway as its upstream and a Redis. The numbers of requests do not depend on the speed or
the load of the machine. The script fails if a response is missing or has an unexpected status. `make profile` runs it
with an instrumented binary, which writes its counts when it ends. Ports 7000, 9000, 9120, 9121, 9122, 9157 and 9159
must be free.
"""
import argparse, os, pathlib, re, shutil, socket, subprocess, tempfile, time

import instructions
from compare import HERE
from edge import CERTS, MIB, NGINX, OURS, UPSTREAM

# On a busy machine, Redis is late.
STORE = 'url = "redis://127.0.0.1:7000/0"'
PATIENT_STORE = STORE + '\ntimeout = "10s"'

RATE_LIMIT_SERVICE = f"""
[server]
workers = 1
[log]
access = "off"
[store]
{STORE}
[[listener]]
address = "127.0.0.1:9122"
protocol = "ratelimit"
[limit.user]
by = "entry:user"
quota = "1000000/s"
[[descriptor]]
domain = "edge"
entries = ["user"]
limits = ["user"]
"""



def field(number, content):
    """Encode a field of protobuf whose content is shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


# A gRPC message: a RateLimitRequest with the domain `edge` and one descriptor.
MESSAGE = field(1, b"edge") + field(2, field(1, field(1, b"user") + field(2, b"ada")))
CALL = b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE

# Each of these clients has a separate API key.
CLIENTS, CONNECTIONS = 8, 8
REQUESTS = 40_000


class Training:
    def __init__(self, binary):
        self.binary, self.dir, self.procs = binary, pathlib.Path(tempfile.mkdtemp(prefix="train-")), []
        self.upstream = instructions.free_port()
        files = self.dir / "files"
        files.mkdir()
        (files / "1MiB").write_bytes(os.urandom(MIB))
        (files / "upload").write_bytes(os.urandom(64 << 10))

    def write(self, name, text):
        text = text.replace(STORE, PATIENT_STORE)
        path = self.dir / name
        path.write_text(text.replace("DIR", str(self.dir)).replace("NAME", name).replace("CERTS", str(CERTS)))
        return str(path)

    def start(self, command, port):
        log = open(self.dir / f"{port}.log", "w")
        self.procs.append(subprocess.Popen(command, stdout=log, stderr=log))
        for _ in range(600):
            try:
                return socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                if self.procs[-1].poll() is not None:
                    break
                time.sleep(0.1)
        raise SystemExit(f"{command[0]} does not listen on port {port}: {(self.dir / f'{port}.log').read_text()}")

    def load(self, label, url, status, requests=REQUESTS, protocol=("--h1",), streams=1, connections=CONNECTIONS, more=()):
        """Send requests, from several clients at once. All responses must have one of the statuses, given by class."""
        began = time.monotonic()
        command = ["h2load", *protocol, "-t1", f"-n{requests // CLIENTS}", f"-c{connections}", f"-m{streams}", *map(str, more)]
        runs = [subprocess.Popen([*command, "-H", f"x-api-key: key-{client}", url], stdout=subprocess.PIPE, text=True) for client in range(CLIENTS)]
        outputs = [run.communicate()[0] for run in runs]
        counts = [re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output) for output in outputs]
        counts = [list(map(int, count.groups())) if count else [0] * 4 for count in counts]
        expected = sum(count[int(name[0]) - 2] for count in counts for name in status)
        if expected != requests // CLIENTS * CLIENTS:
            raise SystemExit(f"{label}: {expected} of {requests} responses are {' or '.join(status)}: {outputs[0]}")
        print(f"{label:36s} {requests:7d} requests  {time.monotonic() - began:5.1f} s", flush=True)

    def ask(self, label, route, rounds):
        """Send the requests of a case of instructions.py."""
        began, port = time.monotonic(), instructions.free_port()
        store = 'url = "memory:"' if route.startswith("logged/") else PATIENT_STORE
        self.start([self.binary, "--config", instructions.configuration(self.dir, port, store, route, self.upstream)], port)
        instructions.ask(self.procs[-1], port, route, rounds)
        print(f"{label:36s} {rounds * instructions.CONNECTIONS:7d} requests  {time.monotonic() - began:5.1f} s", flush=True)

    def run(self):
        self.start(["redis-server", "--port", "7000", "--save", "", "--bind", "127.0.0.1"], 7000)
        self.start(["nginx", "-c", self.write("upstream.conf", NGINX.replace("BODY", UPSTREAM.replace(
            "location / { }", "location / { } location ~ ^/(plain|one|three|hot|deny|ask|cached|verify)$ { return 204; }")))], 9000)
        for name, port in (("redis.toml", 9120), ("memory.toml", 9121)):
            self.start([self.binary, "--config", self.write(name, (HERE / name).read_text())], port)
        self.start([self.binary, "--config", self.write("edge.toml", OURS)], 9157)
        (self.dir / "upstream.toml").write_text(instructions.upstream_configuration(self.upstream))
        self.start([self.binary, "--config", str(self.dir / "upstream.toml")], self.upstream)
        self.start([self.binary, "--config", self.write("service.toml", RATE_LIMIT_SERVICE)], 9122)
        allowed, any_status = ("2xx",), ("2xx", "4xx")
        for path, status in (("plain", allowed), ("one", allowed), ("three", allowed), ("hot", allowed), ("deny", any_status)):
            self.load(f"{path}, Redis", f"http://127.0.0.1:9120/{path}", status)
        for path, status in (("one", allowed), ("deny", any_status)):
            self.load(f"{path}, memory", f"http://127.0.0.1:9121/{path}", status)
        for path in ("ask", "cached"):
            self.load(f"forward authentication, {path}", f"http://127.0.0.1:9120/{path}", allowed, REQUESTS // 2)
        clear, tls = "http://127.0.0.1:9157", "https://127.0.0.1:9159"
        self.load("HTTP/2 in clear text", f"{clear}/small", allowed, protocol=(), streams=8, connections=2)
        self.load("HTTP/1.1 over TLS", f"{tls}/small", allowed, REQUESTS // 2)
        self.load("HTTP/2 over TLS", f"{tls}/small/limited", allowed, REQUESTS // 2, protocol=(), streams=8, connections=2)
        self.load("handshakes", f"{tls}/small", allowed, 1600, connections=200)
        self.load("bodies of 1 MiB", f"{clear}/1MiB", allowed, 800)
        for label, route, rounds in (("access log", "logged/plain", 1000), ("decisions", "decide/one", 1000), ("denied decisions", "decide/deny", 500),
                                     ("chat, tokens", "chat/tokens", 500), ("streams, tokens", "stream/tokens", 50)):
            self.ask(label, route, rounds)
        (self.dir / "call").write_bytes(CALL)
        self.load("calls of the rate limit service", "http://127.0.0.1:9122/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", allowed,
                  REQUESTS // 2, protocol=(), streams=8, more=("-d", self.dir / "call", "-H", "content-type: application/grpc", "-H", "te: trailers"))
        upload = self.dir / "files/upload"
        self.load("uploads of 64 KiB", f"{clear}/small", any_status, 4000, more=("-d", upload))

    def stop(self):
        for proc in reversed(self.procs):
            proc.terminate()
        for proc in self.procs:
            proc.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary")
    training = Training(args.parse_args().binary)
    try:
        training.run()
    finally:
        training.stop()


if __name__ == "__main__":
    main()
