#!/usr/bin/env python3
"""A real Envoy with Sluicegate as its rate limit service, and grpcio with the published schema (PyPI: xds-protos).

    envoy_limits.py BINARY

Exits with 1 if a check fails.
"""

import shutil
import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import grpc
import urllib3
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from envoy.service.ratelimit.v3.rls_pb2_grpc import RateLimitServiceStub

from gateway import CERTIFICATE, KEY, Gateway, expect
from real_envoy import Envoy, cluster, free_port, limit_filter, per_route, serve, wait_for

QUOTA_TOKENS = 100
STREAMS = 50
COST = 7

CONFIGURATION = f"""
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
[[listener]]
address = "127.0.0.1:0"
protocol = "ratelimit"
tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]

[limit.user]
by = "entry:user"
quota = "3/day"
algorithm = "fixed-window"
[limit.all]
by = "entry:group"
quota = "1000/day"
algorithm = "fixed-window"
[limit.tokens]
by = "entry:tokens"
quota = "{QUOTA_TOKENS}/day"
algorithm = "fixed-window"
charge = "always"

[[descriptor]]
domain = "edge"
entries = ["user"]
limits = ["user"]
[[descriptor]]
domain = "edge"
entries = ["group"]
limits = ["all"]
[[descriptor]]
domain = "edge"
entries = ["tokens"]
limits = ["tokens"]
"""


def by_header(header, key=None, **more):
    return {"actions": [{"request_headers": {"header_name": header, "descriptor_key": key or header}}], **more}


def start_envoy(folder, upstream, service, timeout="5s", deny=True):
    """Start an Envoy that asks `service` for decisions."""
    limits = [
        by_header("user"),
        by_header("group"),
        by_header("tokens", hits_addend={"number": 0}),
        by_header("tokens", hits_addend={"number": COST}, apply_on_stream_done=True),
    ]
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}, **per_route(limits)}]
    clusters = [cluster("upstream", upstream), cluster("sluicegate", service, True)]
    return Envoy(folder, [limit_filter("edge", timeout, deny)], routes, clusters, STREAMS)


def fresh():
    return uuid.uuid4().hex


def check_limits(envoy):
    user, group = fresh(), fresh()
    for remaining in (2, 1, 0):
        response = envoy.get(user=user, group=group)
        expect(response.status == 200, response.status)
        expect(f'"user";r={remaining};t=' in response.headers["ratelimit"], response.headers)
        expect(response.headers["ratelimit-policy"] == '"user";q=3;w=86400, "all";q=1000;w=86400', response.headers)
        expect(response.headers["x-ratelimit-remaining"] == str(remaining), response.headers)
        expect('3, 3;w=86400;name="user", 1000;w=86400;name="all"' in response.headers["x-ratelimit-limit"], response.headers)
    for _ in range(5):
        response = envoy.get(user=user, group=group)
        expect(response.status == 429 and int(response.headers["retry-after"]) > 0, (response.status, response.headers))
    response = envoy.get(user=fresh(), group=group)
    expect('"all";r=996;' in response.headers["ratelimit"], f"denied requests charge nothing: {response.headers}")
    expect(envoy.get().status == 200, "a request without descriptors")


def check_two(envoys):
    """Two Envoys with two services on one Redis admit exactly the limit."""
    user = fresh()
    with ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(lambda number: envoys[number % 2].get(user=user).status, range(40)))
    expect(statuses.count(200) == 3 and statuses.count(429) == 37, statuses)


def check_tokens(envoy):
    """A stream asks with a cost of 0, and charges its cost at its end."""
    tokens = fresh()

    def streams(_):
        admitted = 0
        while envoy.get(tokens=tokens).status == 200:
            admitted += 1
        return admitted

    with ThreadPoolExecutor(STREAMS) as threads:
        admitted = sum(threads.map(streams, range(STREAMS)))
    # Envoy does not wait for the charge at the end of a stream. A stream is in flight until it is charged.
    expect(admitted * COST > QUOTA_TOKENS, f"{admitted} streams")
    expect(admitted * COST <= QUOTA_TOKENS + 2 * STREAMS * COST, f"{admitted} streams of {COST}")
    expect(envoy.get(tokens=tokens).status == 429, "the debt stays")
    return admitted


def check_failures(folder, upstream, service, redis, process):
    """Redis is stopped, then the service is killed: what a client gets with both values of failure_mode_deny."""
    envoys = {deny: start_envoy(folder, upstream, service, "0.3s", deny) for deny in (True, False)}
    for envoy in envoys.values():
        expect(envoy.get(user=fresh()).status == 200, "before the outage")
    redis.send_signal(subprocess.signal.SIGSTOP)
    try:
        for deny, envoy in envoys.items():
            response = envoy.get(user=fresh())
            expect(response.status == 429, f"Redis does not answer, failure_mode_deny {deny}: {response.status}")
    finally:
        redis.send_signal(subprocess.signal.SIGCONT)
    process.kill()
    process.wait()
    expect(envoys[True].get(user=fresh()).status == 500, "the service is killed, failure_mode_deny true")
    expect(envoys[False].get(user=fresh()).status == 200, "the service is killed, failure_mode_deny false")
    for envoy in envoys.values():
        envoy.stop()


def check_grpcio(gateway):
    """grpcio with the published schema, with and without TLS."""
    plain, secure = (urlsplit(url).netloc for url in gateway.urls)
    credentials = grpc.ssl_channel_credentials(CERTIFICATE.read_bytes())
    target = [("grpc.ssl_target_name_override", "localhost")]
    for channel in (grpc.insecure_channel(plain), grpc.secure_channel(secure, credentials, target)):
        stub = RateLimitServiceStub(channel)
        entry = RateLimitDescriptor.Entry(key="user", value=fresh())
        request = RateLimitRequest(domain="edge", descriptors=[RateLimitDescriptor(entries=[entry])])
        codes = [stub.ShouldRateLimit(request, timeout=10).overall_code for _ in range(4)]
        expect(codes == [RateLimitResponse.OK] * 3 + [RateLimitResponse.OVER_LIMIT], codes)
        try:
            stub.ShouldRateLimit(RateLimitRequest(domain="edge"), timeout=10)
            raise AssertionError("no descriptor is an error")
        except grpc.RpcError as error:
            expect(error.code() == grpc.StatusCode.INVALID_ARGUMENT, error)
        channel.close()


def main():
    binary = sys.argv[1]
    upstream = serve("up")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        redis = subprocess.Popen([shutil.which("redis-server"), "--port", str(port), "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
        wait_for(port)
        text = CONFIGURATION.replace("STORE", f"redis://127.0.0.1:{port}/0")
        try:
            with Gateway(binary, text) as one, Gateway(binary, text) as other:
                services = [urlsplit(gateway.urls[0]).port for gateway in (one, other)]
                envoys = [start_envoy(folder, upstream, service) for service in services]
                check_grpcio(one)
                check_limits(envoys[0])
                check_two(envoys)
                admitted = check_tokens(envoys[0])
                check_failures(folder, upstream, services[1], redis, other.process)
                for envoy in envoys:
                    envoy.stop()
        finally:
            redis.kill()
            redis.wait()
    print(f"envoy: limits, two Envoys on one Redis, token quotas ({admitted} streams of {COST} for {QUOTA_TOKENS}), outages, grpcio with and without TLS")


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.SubprocessError, urllib3.exceptions.HTTPError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
