"""Stage incidents with real gateways that a real Prometheus scrapes: each alert of ops/alerts.yml must fire, and the commands of its runbook
must show the cause. The rules are those of ops/alerts.yml with shorter times.

    incidents.py BINARY PROMETHEUS FOLDER
"""

import contextlib
import ctypes
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/clients"))
from gateway import Gateway, expect  # noqa: E402

BINARY, PROMETHEUS, FOLDER = sys.argv[1:]
FOLDER = pathlib.Path(FOLDER).resolve()
TOKEN = "sesame-0123456789"
CONSUMERS = '[[consumer]]\nname = "acme"\nkeys = ["sha256:' + 64 * "a" + '"]\n'
# The first gateway: everything works until an incident is staged.
HEALTHY = """
[admin]
address = "127.0.0.1:0"
token = "{token}"
[server]
workers = 2
[log]
access = "off"
[store]
url = "redis://127.0.0.1:{redis}/0"
secret = "a secret of the test"
[[listener]]
address = "127.0.0.1:0"
[auth.keys]
kind = "api-key"
consumers = "consumers.toml"
[limit.l]
by = "ip"
quota = "1000000/hour"
[upstream.dead]
servers = ["http://127.0.0.1:1"]
[upstream.unresolved]
servers = ["http://name.invalid:80"]
[[route]]
name = "limited"
path = "/limited"
limits = ["l"]
respond = {{ status = 200 }}
[[route]]
name = "keyed"
path = "/keyed"
require = ["keys"]
respond = {{ status = 200 }}
[[route]]
name = "dead"
path = "/dead"
upstream = "dead"
[[route]]
name = "unresolved"
path = "/unresolved"
upstream = "unresolved"
"""
# The second gateway: its disk is full, its certificate expires in five days, and clients use nearly all connections.
FULL = """
[admin]
address = "127.0.0.1:0"
token = "{token}"
[server]
max_connections = 20
max_connections_per_ip = 0
header_timeout = "1h"
[log]
access = "/dev/full"
[[listener]]
address = "127.0.0.1:0"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "soon.pem", key = "soon.key" }}]
[[route]]
name = "r"
path = "/limited"
respond = {{ status = 200 }}
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(what, condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        expect(time.monotonic() < deadline, f"{what} did not happen within {seconds} s")
        time.sleep(0.1)
    return found


class Load:
    """Requests in a row, in a thread, until the process ends."""

    def __init__(self, *urls):
        self.urls = list(urls)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            for url in list(self.urls):
                try:
                    urllib.request.urlopen(url).read()
                except OSError:
                    pass
            time.sleep(0.02)


def start_redis(port):
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "Ready to accept connections" in line:
            return process
    raise AssertionError("redis-server does not start")


def soon():
    """A certificate that expires in five days."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 5 -subj /CN=soon.test"
    names = ["-addext", "subjectAltName=DNS:soon.test", "-keyout", FOLDER / "soon.key", "-out", FOLDER / "soon.pem"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return {name: (FOLDER / name).read_text() for name in ("soon.pem", "soon.key")}


class Prometheus:
    """Prometheus with short intervals. The job and the token are those of ops/prometheus.yml."""

    def __init__(self, targets):
        rules = (ROOT / "ops/alerts.yml").read_text()
        rules = re.sub(r"\[\d+m\]", "[10s]", re.sub(r"for: \w+", "for: 2s", rules))
        (FOLDER / "rules.yml").write_text(rules)
        scrape = {"job_name": "sluicegate", "authorization": {"credentials": TOKEN}, "static_configs": [{"targets": targets}]}
        times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        # JSON is YAML.
        configuration = {"global": times, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
        (FOLDER / "prometheus.yml").write_text(json.dumps(configuration))
        self.url = f"http://127.0.0.1:{free_port()}"
        address = self.url.removeprefix("http://")
        arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
        with open(FOLDER / "prometheus.log", "w") as log:
            self.process = subprocess.Popen([PROMETHEUS, *arguments], cwd=FOLDER, stdout=log, stderr=log)
        wait_for("Prometheus", self.is_ready)

    def is_ready(self):
        expect(self.process.poll() is None, (FOLDER / "prometheus.log").read_text())
        try:
            return urllib.request.urlopen(f"{self.url}/-/ready").status == 200
        except OSError:
            return False

    def get(self, path):
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}") as response:
            return json.load(response)["data"]

    def has_scraped(self, times):
        found = self.get("query?" + urllib.parse.urlencode({"query": "min(sum_over_time(up[1m]))"}))["result"]
        return bool(found) and float(found[0]["value"][1]) >= times

    def firing(self, instance):
        """The names of the alerts that fire for a gateway, with the labels that an incident is recognized by."""
        alerts = [each for each in self.get("alerts")["alerts"] if each["state"] == "firing"]
        labels = [alert["labels"] for alert in alerts if alert["labels"].get("instance") in (None, instance)]
        return {(each["alertname"], each.get("kind") or each.get("upstream") or "") for each in labels}

    def wait_for_alert(self, instance, name, label=""):
        wait_for(f"{name} {label}: {self.firing(instance)}", lambda: (name, label) in self.firing(instance))
        print(f"incident: {name} {label}".rstrip())


@contextlib.contextmanager
def stopped(process, name):
    """Stop a thread of a child process with ptrace(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    seize, interrupt, detach, wall = 0x4206, 0x4207, 17, 0x40000000
    tasks = pathlib.Path(f"/proc/{process}/task").iterdir()
    thread = next(int(task.name) for task in tasks if (task / "comm").read_text().strip() == name)

    def trace(request):
        expect(libc.ptrace(request, thread, None, None) == 0, f"ptrace {request:#x}: {os.strerror(ctypes.get_errno())}")

    trace(seize)
    trace(interrupt)
    os.waitpid(thread, wall)
    try:
        yield
    finally:
        trace(detach)


def command(*arguments):
    done = subprocess.run([BINARY, *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr


def expect_in(text, output):
    expect(text in output, f"`{text}` is missing in:\n{output}")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ["SLUICEGATE_ADMIN_TOKEN"] = TOKEN
    port = free_port()
    redis = start_redis(port)
    text = HEALTHY.format(token=TOKEN, redis=port)
    prometheus = None
    try:
        with Gateway(BINARY, text, {"consumers.toml": CONSUMERS}) as gateway, Gateway(BINARY, FULL.format(token=TOKEN), soon()) as full:
            healthy, second = (each.admin.removeprefix("http://") for each in (gateway, full))
            load = Load(f"{gateway.urls[0]}/limited")
            prometheus = Prometheus([healthy, second])
            wait_for("ten scrapes", lambda: prometheus.has_scraped(10))
            expect(("SluicegateConnectionsNearMaximum", "") not in prometheus.firing(second), "few connections are open")
            # A busy machine may raise SluicegateSlowDecisions.
            early = prometheus.firing(healthy) - {("SluicegateSlowDecisions", "")}
            expect(not early, f"no incident is staged yet: {early}")

            folder = pathlib.Path(gateway.folder.name)
            (folder / "consumers.toml").write_text("[[consumer]\n")
            prometheus.wait_for_alert(healthy, "SluicegateFileRejected", "consumers")
            expect_in("consumers file", command("status", "--admin", gateway.admin))
            (folder / "consumers.toml").write_text(CONSUMERS)

            (folder / "gateway.toml").write_text(text.replace("quota", "quotta"))
            prometheus.wait_for_alert(healthy, "SluicegateReloadRejected")
            expect_in("unknown key `quotta`", command("status", "--admin", gateway.admin))
            gateway.process.send_signal(signal.SIGUSR2)
            prometheus.wait_for_alert(healthy, "SluicegateHotRestartFailed")
            (folder / "gateway.toml").write_text(text)

            with stopped(gateway.process.pid, "worker-1"):
                prometheus.wait_for_alert(healthy, "SluicegateWorkerStalled")
                expect_in("stalled", command("probe", "--admin", gateway.admin))
            wait_for("the worker runs again", lambda: "ready" in command("probe", "--admin", gateway.admin))

            subprocess.run(["redis-cli", "-p", str(port), "CONFIG", "SET", "maxmemory", "1"], check=True, capture_output=True)
            prometheus.wait_for_alert(healthy, "SluicegateStoreRejectsWrites")
            expect_in("maxmemory", command("doctor", "--config", str(folder / "gateway.toml")))
            subprocess.run(["redis-cli", "-p", str(port), "CONFIG", "SET", "maxmemory", "0"], check=True, capture_output=True)

            load.urls += [f"{gateway.urls[0]}/dead", f"{gateway.urls[0]}/unresolved"]
            prometheus.wait_for_alert(healthy, "SluicegateUpstreamUnreachable", "dead")
            prometheus.wait_for_alert(healthy, "SluicegateUpstreamUnreachable", "unresolved")
            prometheus.wait_for_alert(healthy, "SluicegateServerErrors")
            page = urllib.request.Request(f"{gateway.admin}/metrics", headers={"authorization": f"Bearer {TOKEN}"})
            page = urllib.request.urlopen(page).read().decode()
            for upstream, reason in [("dead", "connect"), ("unresolved", "dns")]:
                line = f'sluicegate_upstream_failures_total{{upstream="{upstream}",reason="{reason}"}} '
                expect(float(page.split(line)[1].split()[0]) > 0, line)
            expect_in("name.invalid", command("check", "--config", str(folder / "gateway.toml")))

            Load(f"{full.urls[0]}/limited")
            prometheus.wait_for_alert(second, "SluicegateAccessLogDropped")
            prometheus.wait_for_alert(second, "SluicegateCertificateExpiring")
            address = full.urls[0].removeprefix("http://").split(":")
            idle = [socket.create_connection((address[0], int(address[1]))) for _ in range(19)]
            prometheus.wait_for_alert(second, "SluicegateConnectionsNearMaximum")
            for each in idle:
                each.close()
            full.process.kill()
            prometheus.wait_for_alert(second, "SluicegateDown")
    finally:
        if prometheus:
            prometheus.process.terminate()
            prometheus.process.wait()
        redis.kill()
        redis.wait()


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"incidents: {error}")
