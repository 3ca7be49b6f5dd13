#!/usr/bin/env python3
"""Compare Sluicegate with nginx, HAProxy, Envoy, Traefik, Caddy, Pingora, and nginx with Lua and Redis:
`make bench-field`.

For each proxy (contestant), the benchmark measures the CPU time per request at full load, the latency at a fixed rate,
the memory, and how many requests two instances admit together under a limit of 100. The proxies run on core 0; the load
generators, Redis and the upstream run on core 1. In each round, every case is measured for all contestants in turn.
The configurations are the files in this folder. Their ports are 9200 and above. Ports 7000, 9000, 9491 and 9492 must
also be free. The results are written to results.csv, with one row per round, contestant and case.

    field.py [--rounds 5] [--seconds 2] [--only WORD,…] [--csv FILE]   measure
    field.py --table                                                   print the tables of results.csv
    field.py --write docs                                              write them and the charts into the manual
"""
import argparse, csv, itertools, http.client, json, pathlib, re, shutil, ssl, statistics, subprocess, sys, tempfile, time, urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "compare"))
from chart import bars  # noqa: E402
from compare import BINARY, WITH_PGO, Bench, tree  # noqa: E402

# Requests per second at which latency is measured. The slowest contestant can serve more than this.
RATE = 2000
CONNECTIONS = 64
# Number of connections at a fixed rate. Connecting delays the first request of each connection. There are so few
# connections that these requests do not influence p99.
CONNECTIONS_AT_RATE = 8
PGO = "Sluicegate, PGO"
MARKS = "<!-- field: begin, written by field.py --write -->\n", "<!-- field: end -->\n"
COLUMNS = ["round", "contestant", "version", "case", "proxy_us", "redis_us", "requests_per_second", "rate", "p50_ms", "p99_ms",
           "failed", "resident_mib", "stolen", "admitted"]


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    # Last digit of the port: 0 is plain HTTP, 1 is plain HTTP with an access log, 2 is TLS.
    port: int = 0
    http2: bool = False
    # Requests per second, for a case that is measured only at a fixed rate. 0: the case is also measured at full load.
    rate: int = 0


CASES = [
    Case("no limit", "/"),
    Case("access log", "/", port=1),
    Case("local limit", "/local"),
    Case("shared limit", "/shared"),
    Case("TLS, HTTP/1.1", "/", port=2),
    Case("TLS, HTTP/2", "/", port=2, http2=True),
    Case("20 KB", "/20k", rate=5000),
]
PROXYING = [case.name for case in CASES if "limit" not in case.path and case.path not in ("/local", "/shared")]
# The kinds of limits for which the admitted requests of two instances are counted.
KINDS = ["local", "shared"]


@dataclass
class Contestant:
    name: str
    # The command line. The word CONFIG is replaced by the path of the configuration.
    command: list
    file: str
    cases: list
    # The arguments with which the program prints its version.
    ask: list = field(default_factory=lambda: ["-v"])
    # Replacements of words in the configuration, by case. Each of these cases gets a separate process. The process of
    # the key "" serves all other cases.
    variants: dict = field(default_factory=lambda: {"": {}})
    # The kinds of limits that are measured with two instances.
    two: list = field(default_factory=list)
    version: str = ""

    def process(self, case):
        return f"{self.name} {case if case in self.variants else ''}".strip()


def contestants():
    peers = ROOT / "target/peers/bin"
    envoy = [str(peers / "envoy"), "-c", "CONFIG", "--concurrency", "1", "--disable-hot-restart", "--log-level", "off"]
    ours = {
        "": {"STORE": "redis://127.0.0.1:7000/0", "ACCESS": "off"},
        "local limit": {"STORE": "memory:", "ACCESS": "off"},
        "access log": {"STORE": "memory:", "ACCESS": "DIR/PROCESS.access.log"},
    }
    limits = ["local limit", "shared limit"]
    yield Contestant("nginx", ["nginx", "-c", "CONFIG"], "nginx.conf", [*PROXYING, "local limit"], two=["local"])
    yield Contestant("nginx + Lua + Redis", ["nginx", "-c", "CONFIG"], "lua.nginx.conf", ["shared limit"], two=["shared"])
    yield Contestant("HAProxy", ["haproxy", "-db", "-f", "CONFIG"], "haproxy.cfg", [*PROXYING, "local limit"], two=["local"])
    yield Contestant("HAProxy with peers", ["haproxy", "-db", "-L", "INSTANCE", "-f", "CONFIG"], "haproxy.cfg", [], two=["shared"],
                     variants={"": {"PEERS": "peers field\n  peer first 127.0.0.1:9491\n  peer second 127.0.0.1:9492\n", "SYNC": "peers field"}})
    yield Contestant("Envoy", envoy, "envoy.yaml", [*PROXYING, "local limit"], ask=["--version"], two=["local"])
    yield Contestant("Traefik", [str(peers / "traefik"), "--configFile=CONFIG"], "traefik.yml", PROXYING + limits, ask=["version"], two=KINDS)
    yield Contestant("Caddy", [str(peers / "caddy"), "run", "--adapter", "caddyfile", "--config", "CONFIG"], "Caddyfile", PROXYING, ask=["version"])
    pingora = str(ROOT / "target/pingora/release/pingora-proxy-for-field")
    yield Contestant("Pingora", [pingora, "CONFIG"], "pingora.yaml", [name for name in [*PROXYING, "local limit"] if name != "access log"],
                     ask=["--version"], two=["local"])
    for name, binary in [("Sluicegate, plain build", BINARY), (PGO, WITH_PGO)]:
        yield Contestant(name, [str(binary), "--config", "CONFIG"], "sluicegate.toml", PROXYING + limits, ask=["--version"], variants=ours, two=KINDS)


def version(contestant):
    """Return the version that the program prints."""
    done = subprocess.run([contestant.command[0], *contestant.ask], capture_output=True, text=True)
    return re.search(r"\d+\.\d+\.\d+(-rc\.\d+)?", done.stdout + done.stderr)[0]


def resident(pid):
    """Return the resident memory of the process and its descendants in MiB. A shared page counts once."""
    files = [f"/proc/{pid}/smaps_rollup" for pid in tree(pid)]
    return sum(int(re.search(r"Pss:\s+(\d+)", pathlib.Path(file).read_text())[1]) for file in files) / 1024


class Field(Bench):
    def __init__(self, directory, seconds, minutes):
        super().__init__(directory, seconds)
        self.ports, self.prefixes = {}, itertools.count(920)
        # These values decide whether a load is repeated (see `quietest`): the start of the run, its planned duration in
        # seconds, and the share of the run that is complete after the current row.
        self.begin, self.limit, self.share = 0, 60 * minutes, 0
        root = pathlib.Path(directory)
        (root / "20k").write_bytes(b"0123456789abcdef" * 1280)
        (root / "both.pem").write_text((ROOT / "certs/dev.pem").read_text() + (ROOT / "certs/dev.key").read_text())
        shutil.copy(HERE.parent / "compare/peer_limiter.lua", directory)
        self.start("redis", ["redis-server", "--port", "7000", "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"], 1)
        self.start("upstream", ["nginx", "-c", self.file("upstream.nginx.conf", 920, {})], 1)
        self.start("syslog", [sys.executable, "-c", SYSLOG, f"{directory}/syslog.sock", f"{directory}/syslog.log"], 1)
        await_(lambda: (root / "syslog.sock").exists(), "the syslog socket")

    def file(self, name, prefix, values):
        """Write the configuration of a process, and return its path. Each process has other ports: 9200 becomes 9210,
        9220, …"""
        text = (HERE / name).read_text()
        for word, value in {"PEERS": "", "SYNC": "", **values, "DIR": self.dir, "CERTS": str(ROOT / "certs")}.items():
            text = re.sub(rf"\b{word}\b", lambda _: value, text)
        path = pathlib.Path(tempfile.mkdtemp(dir=self.dir)) / name
        path.write_text(re.sub(r"\b920(\d)\b", rf"{prefix}\1", text))
        return str(path)

    def launch(self, contestant):
        """Start the processes of a contestant: one for each variant, and a second instance if its limits are counted."""
        contestant.version = version(contestant)
        print(f"{contestant.name} {contestant.version}", flush=True)
        for case, values in contestant.variants.items():
            is_limiting = case in ("", *(f"{kind} limit" for kind in contestant.two))
            for instance in ["first", "second"][: 2 if contestant.two and is_limiting else 1]:
                name, prefix = contestant.process(case) + (" 2" if instance == "second" else ""), next(self.prefixes)
                values = {**values, "PROCESS": re.sub(r"\W+", "-", name)}
                values["DYNAMIC"] = self.file("traefik.dynamic.yml", prefix, values) if contestant.name == "Traefik" else ""
                config = self.file(contestant.file, prefix, values)
                self.ports[name] = prefix
                self.start(name, [part.replace("CONFIG", config).replace("INSTANCE", instance) for part in contestant.command], 0)

    def url(self, name, case):
        return f"{'https' if case.port == 2 else 'http'}://127.0.0.1:{self.ports[name]}{case.port}{case.path}"

    def await_all(self, contestant):
        """Wait until each case of a contestant responds with 200."""
        context = ssl._create_unverified_context()
        for case in CASES:
            if case.name not in contestant.cases:
                continue
            request = urllib.request.Request(self.url(contestant.process(case.name), case), headers={"X-API-Key": "key-1", "Host": "api.example.com"})

            def responds():
                try:
                    return urllib.request.urlopen(request, context=context if case.port == 2 else None).status == 200
                except OSError:
                    return False

            await_(responds, f"{contestant.name}, {case.name}")

    def full(self, case, url):
        """Send as many requests as possible, with wrk, or with h2load for HTTP/2."""
        if not case.http2:
            return self.wrk(url, CONNECTIONS, ("keys.lua",))
        out = on_core_1("h2load", "-t1", "-c", CONNECTIONS // 4, "-m", 4, "-D", self.seconds, url)
        count = int(re.search(r"(\d+) succeeded", out)[1])
        return dict(count=count, rps=count / self.seconds, not_2xx=1 - int(re.search(r"(\d+) 2xx", out)[1]) / max(count, 1))

    def fixed(self, case, url):
        """Send requests of one client at a fixed rate, with oha. The latency of a request is measured from the time at
        which it was due. With TLS, it is measured from the time at which it was sent: oha reads all CA certificates for
        each connection, so the first requests are sent late with every proxy."""
        rate = case.rate or RATE
        streams = ["--http2", "-c", CONNECTIONS_AT_RATE // 4, "-p", 4] if case.http2 else ["-c", CONNECTIONS_AT_RATE]
        correction = [] if case.port == 2 else ["--latency-correction"]
        out = on_core_1(OHA, "-z", f"{self.seconds}s", "-q", rate, *correction, "--no-tui", "--insecure", "--output-format", "json",
                        "-H", "X-API-Key: key-1", *streams, url)
        said = json.loads(out)
        count = sum(said["statusCodeDistribution"].values())
        failed = sum(number for error, number in said["errorDistribution"].items() if "deadline" not in error)
        # If no request gets a response, there are no percentiles, and `failed` is 1.
        p50, p99 = ((said["latencyPercentiles"][name] or float("nan")) * 1000 for name in ("p50", "p99"))
        return dict(count=count, rps=count / said["summary"]["total"], rate=rate, p50=p50, p99=p99,
                    not_2xx=1 - said["statusCodeDistribution"].get("200", 0) / max(count + failed, 1))

    def quietest(self, measure, rounds=3):
        """Repeat a load with stolen time only while the run takes less time than planned (`--minutes`)."""
        is_ahead = time.monotonic() - self.begin < self.share * self.limit
        return super().quietest(measure, rounds if is_ahead else 1)

    def row(self, contestant, case):
        name = contestant.process(case.name)
        url = self.url(name, case)
        at_rate = self.quietest(lambda: self.measure(name, lambda: self.fixed(case, url)))
        full = at_rate if case.rate else self.quietest(lambda: self.measure(name, lambda: self.full(case, url)))
        if case.name == "shared limit" and not full["redis_us"]:
            raise SystemExit(f"{name}: {url} does not use Redis")
        return dict(proxy_us=f"{full['proxy_us']:.2f}", redis_us=f"{full['redis_us'] if case.name == 'shared limit' else 0:.2f}",
                    requests_per_second=round(full["rps"]), rate=at_rate["rate"], p50_ms=f"{at_rate['p50']:.3f}", p99_ms=f"{at_rate['p99']:.3f}",
                    failed=f"{max(full['not_2xx'], at_rate['not_2xx']):.4f}", resident_mib=f"{resident(self.procs[name].pid):.1f}",
                    stolen=f"{max(full['stolen'], at_rate['stolen']):.4f}")

    def admitted(self, contestant, kind, client, requests=1000):
        """Send requests of one client alternately to two instances, with 16 connections to each. Return how many of them
        got 200."""
        name = contestant.process(f"{kind} limit")
        ports, numbers = [self.ports[name], self.ports[name + " 2"]], itertools.count()
        # The HAProxy configuration has only one path with a limit of 100. If two instances are peers, they share this
        # limit.
        path = "/local-100" if contestant.file == "haproxy.cfg" else f"/{kind}-100"

        def send(_):
            connections, statuses = [http.client.HTTPConnection("127.0.0.1", int(f"{port}0")) for port in ports], Counter()
            while (number := next(numbers)) < requests:
                connection = connections[number % len(connections)]
                connection.request("GET", path, headers={"X-API-Key": client})
                response = connection.getresponse()
                response.read()
                statuses[response.status] += 1
            return statuses

        began = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            statuses = sum(pool.map(send, range(16)), Counter())
        others = requests - statuses[200] - statuses[429]
        return dict(requests_per_second=round(requests / (time.monotonic() - began)), failed=f"{others / requests:.4f}", admitted=statuses[200])


# A program that writes all datagrams of a Unix socket to a file.
SYSLOG = """import socket, sys
inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
inbox.bind(sys.argv[1])
with open(sys.argv[2], "wb") as log:
    while True:
        log.write(inbox.recv(65536) + b"\\n")
"""
OHA = str(ROOT / "target/oha/bin/oha")


def await_(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not ready within 30 s")
        time.sleep(0.02)


def on_core_1(*command):
    return subprocess.run(["taskset", "-c", "1", *map(str, command)], capture_output=True, text=True).stdout


def run(arguments):
    directory = tempfile.mkdtemp(prefix="field-")
    bench, rows = Field(directory, arguments.seconds, arguments.minutes), []
    wanted = [word for word in arguments.only.split(",") if word]

    def record(**values):
        rows.append(values)
        print("  ".join(f"{name} {values[name]}" for name in COLUMNS if values.get(name, "") != ""), flush=True)

    try:
        field = [contestant for contestant in contestants() if contestant.name != PGO or WITH_PGO.exists()]
        for contestant in field:
            bench.launch(contestant)
        for contestant in field:
            bench.await_all(contestant)
        loads = [(case, contestant) for case in CASES for contestant in field if case.name in contestant.cases]
        counts = [(kind, contestant) for kind in KINDS for contestant in field if kind in contestant.two]
        loads = [load for load in loads if not wanted or any(word in f"{load[1].name} {load[0].name}" for word in wanted)]
        counts = [count for count in counts if not wanted or any(word in f"{count[1].name} limit of 100" for word in wanted)]
        bench.begin = time.monotonic()
        for number in range(1, arguments.rounds + 1):
            for index, (case, contestant) in enumerate(loads, 1):
                bench.share = (number - 1 + index / len(loads)) / arguments.rounds
                record(round=number, contestant=contestant.name, version=contestant.version, case=case.name, **bench.row(contestant, case))
            for kind, contestant in counts:
                record(round=number, contestant=contestant.name, version=contestant.version, case=f"limit of 100, {kind}",
                       # Both builds of Sluicegate share the limits of a client, because they use the same Redis.
                       **bench.admitted(contestant, kind, f"client-{number}-{re.sub(r'[^a-zA-Z]', '', contestant.name)}"))
            with open(arguments.csv, "w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        print(f"{(time.monotonic() - bench.begin) / 60:.1f} minutes")
    finally:
        bench.stop()
        shutil.rmtree(directory, ignore_errors=True)


class Results:
    """The rows of results.csv, which can be formatted as tables and charts."""

    def __init__(self, path):
        with open(path, newline="") as file:
            self.rows = list(csv.DictReader(file))
        versions = {row["contestant"]: row["version"] for row in self.rows}
        self.versions = {contestant.name: versions[contestant.name] for contestant in contestants() if contestant.name in versions}

    def of(self, contestant, case, *columns):
        """Return the sum of the columns of a contestant and case, for each round."""
        rows = [row for row in self.rows if row["contestant"] == contestant and row["case"] == case]
        return [sum(float(row[column]) for column in columns) for row in rows]

    def cpu(self, contestant, case):
        if not (values := self.of(contestant, case, "proxy_us", "redis_us")):
            return "–"
        text = f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"
        served, rate = (statistics.median(self.of(contestant, case, column)) for column in ("requests_per_second", "rate"))
        if (failed := max(self.of(contestant, case, "failed"))) > 0.0005:
            text += f", {failed * 100:.1f} % failed"
        return text + (f", at {served:,.0f}/s" if served < 0.97 * rate else "")

    def latency(self, contestant, case):
        p50, p99 = (self.of(contestant, case, column) for column in ("p50_ms", "p99_ms"))
        return f"{statistics.median(p50):.2f}, {statistics.median(p99):.2f}" if p50 else "–"

    def memory(self, contestant):
        """Return the maximum memory in MiB that a process of a contestant had at the end of a case of the last round."""
        return max((float(row["resident_mib"]) for row in self.rows
                    if row["contestant"] == contestant and row["resident_mib"] and row["round"] == self.rows[-1]["round"]), default=None)

    def admitted(self, contestant, kind):
        values = self.of(contestant, f"limit of 100, {kind}", "admitted")
        return "–".join(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values)))) if values else "–"

    def tables(self):
        names = [case.name for case in CASES]
        measured = [name for name in self.versions if any(self.of(name, case, "stolen") for case in names)]
        rounds = self.rows[-1]["round"]
        stolen = max((float(row["stolen"]) for row in self.rows if row["stolen"]), default=0)
        cpu = [[name, *(self.cpu(name, case) for case in names)] for name in measured]
        latency = [[name, *(self.latency(name, case) for case in names)] for name in measured]
        others = [[name, version, f"{memory:.0f} MiB" if (memory := self.memory(name)) else "–", *(self.admitted(name, kind) for kind in KINDS)]
                  for name, version in self.versions.items()]
        return "\n".join([
            f"**CPU** time per request in µs, of the proxy and Redis together: median (smallest–largest) of",
            f"{rounds} rounds. In each load, the hypervisor took at most {stolen * 100:.1f} % of the CPU time (steal).", "",
            markdown(["", *names], cpu),
            f"**Latency** in ms at {RATE:,} requests per second (20 KB: 5,000): p50 and p99, each the median of", "the rounds.", "",
            markdown(["", *names], latency),
            "**Admitted requests** of the 1,000 requests that one client sends to two instances, each with a",
            "limit of 100 per minute, and the memory of one instance after the last round.", "",
            markdown(["", "version", "memory", *(f"{kind} limit of 100" for kind in KINDS)], others)])

    def charts(self):
        """Return the charts as SVG, by file name."""
        charts = {}
        for case, name in [("no limit", "no-limit"), ("shared limit", "shared-limit"), ("TLS, HTTP/2", "http2")]:
            parts = [(contestant, *(self.of(contestant, case, column) for column in ("proxy_us", "redis_us"))) for contestant in self.versions]
            rows = [(contestant, statistics.median(proxy), statistics.median(redis)) for contestant, proxy, redis in parts if proxy]
            charts[f"field-{name}.svg"] = bars(f"CPU per request, {case}", rows)
        return charts


def markdown(head, rows):
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def write(results, docs):
    page = docs / "explanation/performance.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text("".join([before, MARKS[0], "\n", results.tables(), "\n", MARKS[1], rest.partition(MARKS[1])[2]]))
    for name, chart in results.charts().items():
        (docs / "pictures" / name).write_text(chart)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--seconds", type=int, default=2, help="of each load")
    arguments.add_argument("--minutes", type=float, default=20, help="rounds with stolen time are not repeated if the run would take longer")
    arguments.add_argument("--only", default="", metavar="WORD,…", help="contestants and cases with one of these words")
    arguments.add_argument("--csv", type=pathlib.Path, default=HERE / "results.csv")
    arguments.add_argument("--table", action="store_true", help="print the tables")
    arguments.add_argument("--write", type=pathlib.Path, metavar="DOCS", help="write the tables and the charts into the manual")
    arguments = arguments.parse_args()
    if not arguments.table and not arguments.write:
        run(arguments)
    if arguments.write:
        write(Results(arguments.csv), arguments.write)
    else:
        print(Results(arguments.csv).tables())


if __name__ == "__main__":
    main()
