"""The Prometheus client for Python reads the metrics of the gateway in both text formats."""

import urllib3
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from gateway import expect

# The labels of the limit that this test uses.
HUNDRED = {"limit": "hundred"}


def read(url, accept, parse):
    answer = urllib3.request("GET", url, headers={"accept": accept})
    expect(answer.status == 200, f"{url}: {answer.status}")
    return {family.name: family for family in parse(answer.data.decode())}


def value(families, family, name, labels):
    found = [sample.value for sample in families[family].samples if sample.name == name and sample.labels == labels]
    expect(len(found) == 1, f"{name}{labels}: {found}")
    return found[0]


def check(clear, _tls, admin):
    for _ in range(105):
        # Without `retries=False`, requests would wait for Retry-After.
        urllib3.request("GET", f"{clear}/hundred/metrics", retries=False)
    pages = {
        "0.0.4": read(f"{admin}/metrics", "text/plain", parser.text_string_to_metric_families),
        # This parser rejects violations of the format in order, units, suffixes and the end mark.
        "OpenMetrics": read(
            f"{admin}/metrics", "application/openmetrics-text; version=1.0.0", openmetrics.text_string_to_metric_families
        ),
    }
    for form, families in pages.items():
        expect(all(name.startswith(("sluicegate_", "process_")) for name in families), f"{form}: {sorted(families)}")
        decisions = "sluicegate_limit_decisions"
        for decision, expected in [("allowed", 100), ("denied", 5), ("shadow_denied", 0), ("local_denied", 0)]:
            found = value(families, decisions, f"{decisions}_total", {**HUNDRED, "decision": decision})
            expect(found == expected, f"{form}: {decision} {found}")
        requests = "sluicegate_http_requests"
        found = value(families, requests, f"{requests}_total", {"route": "hundred", "status": "4xx"})
        expect(found == 5, f"{form}: {found} answers of 4xx")
        durations = families["sluicegate_http_request_duration_seconds"]
        expect(durations.type == "histogram", f"{form}: {durations.type}")
        of_route = [sample for sample in durations.samples if sample.labels.get("route") == "hundred"]
        buckets = [sample.value for sample in of_route if sample.name.endswith("_bucket")]
        count = next(sample.value for sample in of_route if sample.name.endswith("_count"))
        expect(buckets == sorted(buckets) and buckets[-1] == count == 105, f"{form}: {buckets}, {count}")
    names = [sorted(families) for families in pages.values()]
    expect(names[0] == names[1], f"the formats differ: {names}")
    return f"prometheus_client: {len(names[0])} metrics, the same in both text formats"
