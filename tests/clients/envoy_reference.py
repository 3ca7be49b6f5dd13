#!/usr/bin/env python3
"""What the integration scripts of envoyproxy/ratelimit assert, with a real Envoy in front of Sluicegate.

    envoy_reference.py BINARY

The configuration has the descriptors of its example. The scripts that do not wait for another window have windows of a
day, so that no window ends during the test. Exits with 1 if a check fails.
"""

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from urllib.parse import urlsplit

import urllib3

from gateway import Gateway, expect
from real_envoy import KINDS, Envoy, cluster, endpoint, free_port, limit_filter, per_route, serve, wait_for

CONFIGURATION = """
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[store]
url = "STORE"
secret = "0123456789abcdef0123456789abcdef"
timeout = "5s"
[[listener]]
address = "127.0.0.1:0"
protocol = "ratelimit"
[ratelimit]
configuration = "."
atomic = ATOMIC
"""

HEADERS = """
domain: rl
descriptors:
  - {key: category, value: account, rate_limit: {unit: day, requests_per_unit: 4, replaces: [{name: bkthomps}, {name: fake_name}]}}
  - key: source_cluster
    value: proxy
    descriptors:
      - {key: destination_cluster, value: bkthomps, rate_limit: {unit: day, requests_per_unit: 2, replaces: [{name: bkthomps}]}}
      - {key: destination_cluster, value: mock, rate_limit: {unit: day, requests_per_unit: 1}}
      - {key: destination_cluster, value: override, rate_limit: {unit: day, requests_per_unit: 2, replaces: [{name: banned_limit}]}}
      - {key: destination_cluster, value: fake, rate_limit: {unit: day, requests_per_unit: 2, name: fake_name}}
  - key: foo
    rate_limit: {unit: day, requests_per_unit: 2}
    descriptors:
      - {key: bar, rate_limit: {unit: day, requests_per_unit: 3}}
      - {key: bar, value: bkthomps, rate_limit: {unit: day, requests_per_unit: 1, name: bkthomps}}
      - {key: bar, value: banned, rate_limit: {unit: day, requests_per_unit: 0, name: banned_limit}}
      - {key: baz, rate_limit: {unit: second, requests_per_unit: 1}}
      - {key: baz, value: not-so-shady, rate_limit: {unit: day, requests_per_unit: 3}}
      - {key: baz, value: shady, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 3}}
      - {key: bay, rate_limit: {unlimited: true}}
  - {key: unspec, detailed_metric: true, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: qux, rate_limit: {unlimited: true}}
"""

# Each script has a domain of its own, because they share the descriptors.
QUOTAS = """
domain: DOMAIN
descriptors:
  - key: service
    value: service_1
    quota_mode: true
    rate_limit: {unit: minute, requests_per_unit: 1}
    metadata: {service_with_quota: {name: service_1}}
  - key: service
    value: service_2
    quota_mode: true
    rate_limit: {unit: minute, requests_per_unit: 2}
    metadata: {service_with_quota: {name: service_2}}
"""
DOMAINS = ("quota", "tokens", "services")


def by_headers(*names):
    return {"actions": [{"request_headers": {"header_name": name, "descriptor_key": name}} for name in names]}


def service(name, **more):
    return {"actions": [{"generic_key": {"descriptor_key": "service", "descriptor_value": name}}], **more}


def routes():
    def route(path, limits, target="mock"):
        return {"match": {"prefix": path}, "route": {"cluster": target, "rate_limits": limits}}

    def quota(path, domain, limits, target="mock"):
        return {"match": {"prefix": path}, "route": {"cluster": target}, **per_route(limits, domain=domain)}

    pair = [by_headers("foo", "bar"), by_headers("source_cluster", "destination_cluster")]
    served = {"descriptor_key": "service", "source": "CLUSTER_LOCALITY_ENTRY"}
    served["metadata_key"] = {"key": "envoy.cluster.locality", "path": [{"key": "name"}]}
    done = {"hits_addend": {"number": 1}, "apply_on_stream_done": True}
    peek = {"hits_addend": {"number": 0}}
    return [
        route("/twoheader", [by_headers("foo", "bar"), by_headers("foo", "baz")]),
        route("/fourheader", pair),
        route("/fiveheader", [*pair, by_headers("category")]),
        route("/unspec", [by_headers("unspec")]),
        quota("/quota", "quota", [service("service_1"), service("service_2")]),
        quota("/tokenquota", "tokens", [service("service_2", **peek), service("service_2", **done)]),
        quota(
            "/multiservice-tokenquota",
            "services",
            [service("service_1", **peek), service("service_2", **peek), {"actions": [{"metadata": served}], **done}],
            "multiservice",
        ),
    ]


def filters():
    """The filter of the limits, and those that route a request to the service that has quota left."""
    mutation = {
        "append": {
            "header": {"key": "x-service", "value": "%DYNAMIC_METADATA(envoy.filters.http.ratelimit:metadata:service_with_quota:name)%"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    }
    rule = {"header": "x-service", "on_header_present": {"metadata_namespace": "envoy.lb", "key": "service", "type": "STRING"}}
    return [
        limit_filter("rl"),
        {
            "name": "envoy.filters.http.header_mutation",
            "typed_config": {
                "@type": f"{KINDS}.filters.http.header_mutation.v3.HeaderMutation",
                "mutations": {"request_mutations": [mutation]},
            },
        },
        {
            "name": "envoy.filters.http.header_to_metadata",
            "typed_config": {"@type": f"{KINDS}.filters.http.header_to_metadata.v3.Config", "request_rules": [rule]},
        },
    ]


def services(ports):
    """The cluster of two services, of which a request names one in its metadata."""

    def locality(name, port):
        subset = {"metadata": {"filter_metadata": {"envoy.lb": {"service": name}}}}
        return {
            "locality": {"region": name},
            "metadata": {"filter_metadata": {"envoy.cluster.locality": {"name": name}}},
            "lb_endpoints": [{**endpoint(port), **subset}],
        }

    both = cluster("multiservice", ports[0])
    both["lb_subset_config"] = {"fallback_policy": "ANY_ENDPOINT", "subset_selectors": [{"keys": ["service"]}]}
    both["load_assignment"]["endpoints"] = [locality(f"service_{index + 1}", port) for index, port in enumerate(ports)]
    return both


class Script:
    """Requests to one Envoy, and what they must get."""

    def __init__(self, envoy, gateway, what):
        self.envoy = envoy
        self.gateway = gateway
        self.what = what

    def ok(self, path, **headers):
        response = self.envoy.get(path, **headers)
        expect(response.status == 200, f"{self.what}: {path} {headers}: {response.status}")
        return response

    def limited(self, path, **headers):
        response = self.envoy.get(path, **headers)
        expect((response.status, response.reason) == (429, "Too Many Requests"), f"{self.what}: {path} {headers}: {response.status}")

    def simple_get(self):
        self.ok("/twoheader", foo="test", baz="shady")

    def trigger_ratelimit(self):
        for _ in range(3):
            self.ok("/twoheader", foo="pelle", baz="not-so-shady")
        self.limited("/twoheader", foo="pelle", baz="not-so-shady")

    def trigger_shadow_mode_key(self):
        for _ in range(5):
            self.ok("/twoheader", foo="pelle", baz="shady")
        response = self.ok("/twoheader", foo="pelle", baz="shady")
        expect(response.headers.get("x-ratelimit-remaining") == "0", f"{self.what}: {response.headers}")

    def replaces(self):
        self.limited("/twoheader", foo="bkthomps", bar="banned")
        override = {"foo": "bkthomps", "bar": "banned", "source_cluster": "proxy"}
        self.limited("/fourheader", **override, destination_cluster="mock")
        for _ in range(2):
            self.ok("/fourheader", **override, destination_cluster="override")
        self.limited("/fourheader", **override, destination_cluster="override")

        mine = {"foo": "my_foo", "bar": "bkthomps", "source_cluster": "proxy"}
        for _ in range(2):
            self.ok("/fourheader", **mine, destination_cluster="bkthomps")
        self.limited("/fourheader", **mine, destination_cluster="bkthomps")
        self.ok("/fourheader", **mine, destination_cluster="not_bkthomps")
        self.limited("/fourheader", **mine, destination_cluster="not_bkthomps")
        self.limited("/fourheader", **mine, destination_cluster="bkthomps")

        account = {**mine, "destination_cluster": "fake", "category": "account"}
        for _ in range(4):
            self.ok("/fiveheader", **account)
        self.limited("/fiveheader", **account)
        self.ok("/twoheader", foo="foo_2", bar="bkthomps")
        self.limited("/twoheader", foo="foo_2", bar="bkthomps")
        fake = {"foo": "foo_3", "bar": "bar_3", "source_cluster": "proxy", "destination_cluster": "fake"}
        for _ in range(2):
            self.ok("/fourheader", **fake)
        self.limited("/fourheader", **fake)
        self.limited("/fiveheader", **account)

    def value_included_in_stats_key(self):
        for _ in range(2):
            self.ok("/unspec", unspec="unspecified_value")
        self.limited("/unspec", unspec="unspecified_value")
        page = urllib.request.urlopen(f"{self.gateway.admin}/metrics").read().decode()
        sample = 'ratelimit_service_rate_limit_over_limit{domain="rl",key1="unspec_unspecified_value"} 1'
        expect(sample in page.splitlines(), f"{self.what}: no {sample}")

    def quota(self):
        for _ in range(2):
            self.ok("/quota")
        self.limited("/quota")

    def token_quota(self):
        for _ in range(3):
            self.stream("/tokenquota")
        self.limited("/tokenquota")

    def multiservice_token_quota(self):
        for name in (1, 1, 2, 2, 2):
            response = self.stream("/multiservice-tokenquota")
            expect(response.data.decode() == f"Service {name}", f"{self.what}: {response.data}")
        self.limited("/multiservice-tokenquota")

    def stream(self, path):
        """Make a request, and wait until Envoy has charged its stream. Envoy charges after the response."""
        calls = self.calls()
        response = self.ok(path)
        wait_until(lambda: self.calls() >= calls + 2)
        return response

    def calls(self):
        page = urllib.request.urlopen(f"{self.gateway.admin}/metrics").read().decode()
        counts = [line for line in page.splitlines() if line.startswith("sluicegate_ratelimit_calls_total")]
        return sum(int(line.rsplit(" ", 1)[1]) for line in counts)


def use_quotas(scripts, minute):
    for script in scripts:
        script.quota()
        script.token_quota()
        script.multiservice_token_quota()
    expect(time.time() // 60 == minute, "the machine is too slow for this test: the window has ended")


def wait_until(is_reached):
    while not is_reached():
        time.sleep(0.05)


def main():
    binary = sys.argv[1]
    ports = [serve("Service 1"), serve("Service 2")]
    files = {f"{domain}.yaml": QUOTAS.replace("DOMAIN", domain) for domain in DOMAINS}
    files["rl.yaml"] = HEADERS
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        redis = subprocess.Popen([shutil.which("redis-server"), "--port", str(port), "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
        wait_for(port)
        gateways = []
        scripts = []
        try:
            for database, atomic in enumerate(("true", "false")):
                text = CONFIGURATION.replace("STORE", f"redis://127.0.0.1:{port}/{database}").replace("ATOMIC", atomic)
                gateway = Gateway(binary, text, files)
                gateways.append(gateway)
                clusters = [cluster("mock", ports[0]), services(ports), cluster("sluicegate", urlsplit(gateway.urls[0]).port, True)]
                scripts.append(Script(Envoy(folder, filters(), routes(), clusters), gateway, f"atomic = {atomic}"))
            for script in scripts:
                script.simple_get()
                script.trigger_ratelimit()
                script.trigger_shadow_mode_key()
                script.replaces()
                script.value_included_in_stats_key()
            # The windows of a minute are aligned. The quotas must be used up within one window.
            wait_until(lambda: time.time() % 60 < 20)
            minute = time.time() // 60
            use_quotas(scripts, minute)
            wait_until(lambda: time.time() // 60 > minute)
            use_quotas(scripts, minute + 1)
        finally:
            for script in scripts:
                script.envoy.stop()
            for gateway in gateways:
                gateway.__exit__()
            redis.kill()
            redis.wait()
    print("envoy: what the eight integration scripts of envoyproxy/ratelimit assert, with atomic and independent descriptors")


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.SubprocessError, urllib3.exceptions.HTTPError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
