"""Read all metrics of a gateway that has every feature enabled, with promtool and with the Prometheus client for Python.

    metrics.py BINARY PROMTOOL
"""

import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/clients"))
from gateway import CERTIFICATE, KEY, Gateway, expect  # noqa: E402

CONFIGURATION = """
[admin]
address = "127.0.0.1:0"
token = "sesame"
[store]
url = "redis://127.0.0.1:{redis}/0"
secret = "s"
[log]
access = "access.log"
trace_endpoint = "http://127.0.0.1:{server}"
[server]
accept_grace = "1s"
[acme]
accept_terms = true
directory = "https://127.0.0.1:{server}/directory"
challenges = ["tls-alpn-01"]
storage = "acme"
[[listener]]
address = "127.0.0.1:0"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "{certificate}", key = "{key}" }}]
[[listener]]
address = "127.0.0.1:0"
tls = {{ acme = true, names = ["acme.test"] }}
[[listener]]
address = "127.0.0.1:0"
protocol = "ratelimit-http"
[[descriptor]]
domain = "edge"
entries = ["user"]
limits = ["users"]
[limit.users]
by = "entry:user"
quota = "5/hour"
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[auth.sso]
kind = "forward"
url = "http://127.0.0.1:{server}/auth"
[auth.tokens]
kind = "jwt"
jwks_url = "http://127.0.0.1:{server}/jwks"
[notify.billing]
webhook = "http://127.0.0.1:{server}/events"
secret = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
[limit.address]
by = "ip"
quota = "5/hour"
prefetch = 2
notify = "billing"
[limit.trial]
by = "ip"
quota = "1/hour"
shadow = true
[limit.in-flight]
by = "ip"
algorithm = "concurrency"
quota = "100"
[limit.tokens]
by = "ip"
quota = "10000/hour"
unit = "tokens"
cost.llm = "auto"
[upstream.api]
servers = ["http://127.0.0.1:{server}", "http://127.0.0.1:1"]
outlier_detection = {{ consecutive_errors = 2 }}
health_check = "/healthz"
[[route]]
name = "api"
path = "/api"
identify = ["keys"]
upstream = "api"
mirror = {{ upstream = "api" }}
limits = ["address", "trial", "in-flight"]
[[route]]
name = "signed-in"
path = "/signed-in"
require = ["sso"]
upstream = "api"
[[route]]
name = "model"
path = "/v1/chat/completions"
limits = ["tokens"]
upstream = "api"
[[route]]
name = "token"
path = "/token"
require = ["tokens"]
upstream = "api"
"""

# A management server sends the descriptors of this gateway. It cannot be reached.
WITH_XDS = """
[admin]
address = "127.0.0.1:0"
token = "sesame"
[[listener]]
address = "127.0.0.1:0"
protocol = "ratelimit"
[ratelimit]
xds = { url = "http://127.0.0.1:1", ready_after = "start" }
"""


class Server(BaseHTTPRequestHandler):
    """The upstream and the authentication server. It is also the trace collector and the JWT issuer; in these two roles, it responds with errors."""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200 if self.path in ("/api", "/auth", "/signed-in", "/healthz", "/v1/chat/completions", "/events") else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def status(url, headers, body=None):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, body, headers)).status
    except urllib.error.HTTPError as error:
        return error.code


def scrape(admin, accept):
    headers = {"accept": accept, "authorization": "Bearer sesame"}
    with urllib.request.urlopen(urllib.request.Request(f"{admin}/metrics", headers=headers)) as response:
        return response.read().decode()


def families(page, parse):
    found = {family.name: family for family in parse(page)}
    empty = [name for name, family in found.items() if not family.samples]
    expect(not empty, f"no sample of {empty}: the gateway of this test must use them")
    for family in found.values():
        expect(family.documentation and family.type != "unknown", f"{family.name}: {family.type}")
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        expect(len(series) == len(set(series)), f"{family.name}: a series is there twice")
    return found


def xds_families(page):
    """Return the families that only a gateway with a management server has."""
    found = {family.name: family for family in parser.text_string_to_metric_families(page) if family.name.startswith("sluicegate_xds_")}
    samples = {(sample.name, *sample.labels.values()): sample.value for family in found.values() for sample in family.samples}
    expect(
        samples == {("sluicegate_xds_connected",): 0, ("sluicegate_xds_responses_total", "accepted"): 0, ("sluicegate_xds_responses_total", "rejected"): 0},
        f"metrics of a management server that cannot be reached: {samples}",
    )
    return {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE sluicegate_xds_")}


def main():
    binary, promtool = sys.argv[1:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    redis = free_port()
    store = subprocess.Popen(
        ["redis-server", "--port", str(redis), "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", redis)).close()
                break
            except ConnectionRefusedError:
                expect(store.poll() is None, "redis-server does not start")
                time.sleep(0.01)
        text = CONFIGURATION.format(redis=redis, server=server.server_port, certificate=CERTIFICATE, key=KEY)
        with Gateway(binary, text) as gateway:
            clear = gateway.urls[0]
            statuses = [status(f"{clear}/api", {"x-api-key": "k"}) for _ in range(8)]
            expect(200 in statuses and 429 in statuses, statuses)
            expect(status(f"{clear}/signed-in", {}) == 200, "forward authentication")
            expect(status(f"{clear}/token", {"authorization": "Bearer a.b.c"}) in (401, 503), "a token without keys")
            expect(status(f"{clear}/unknown", {}) == 404, "no route")
            prompt = b'{"model":"m","max_tokens":10,"messages":[]}'
            llm = status(f"{clear}/v1/chat/completions", {"content-type": "application/json"}, prompt)
            expect(llm == 200, f"a request to an LLM API: {llm}")
            described = b'{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"a"}]}]}'
            expect(status(f"{gateway.urls[3]}/json", {}, described) == 200, "a descriptor")
            # The gateway counts quota events and settled costs in the background.
            for name in ['quota_events_total{destination="billing"', "limit_settled_total{"]:
                while name not in scrape(gateway.admin, "text/plain"):
                    time.sleep(0.01)
            pages = [scrape(gateway.admin, "text/plain"), scrape(gateway.admin, "application/openmetrics-text; version=1.0.0")]
    finally:
        store.kill()
        store.wait()
    with Gateway(binary, WITH_XDS) as gateway:
        families_of_xds = xds_families(scrape(gateway.admin, "text/plain"))
    # promtool also checks names, units, suffixes and help texts.
    lint = subprocess.run([promtool, "check", "metrics"], input=pages[0], text=True, capture_output=True)
    expect(lint.returncode == 0, f"promtool check metrics: {lint.returncode}\n{lint.stdout}{lint.stderr}")
    text, strict = families(pages[0], parser.text_string_to_metric_families), families(
        # This parser rejects violations of the format in order, units, suffixes and the end mark.
        pages[1],
        openmetrics.text_string_to_metric_families,
    )
    expect(sorted(text) == sorted(strict), f"the formats differ: {set(text) ^ set(strict)}")
    # The scrape contains every metric of the manual, so the check is complete.
    manual = (ROOT / "docs/reference/metrics.md").read_text()
    listed = {line.split("`")[1] for line in manual.splitlines() if line.startswith("| `") and line.count(" | ") == 4}
    exported = {line.split()[2] for line in pages[0].splitlines() if line.startswith("# TYPE ")}
    missing = {f"sluicegate_{name}" for name in listed} - exported - families_of_xds
    expect(listed and not missing, f"documented metrics that the gateway of this test does not have: {missing}")
    print(f"metrics: {len(exported)} by promtool and by prometheus_client, in both text formats")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"metrics: {error}")
