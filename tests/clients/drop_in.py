#!/usr/bin/env python3
"""The binary in place of envoyproxy/ratelimit: started as `ratelimit` with its environment variables only. grpcio with
the published schema (PyPI: xds-protos) as a client and as a management server, and a real Envoy.

    drop_in.py BINARY

Exits with 1 if a check fails.
"""

import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import grpc
import urllib3
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.discovery.v3.ads_pb2_grpc import (
    AggregatedDiscoveryServiceServicer,
    add_AggregatedDiscoveryServiceServicer_to_server,
)
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from envoy.service.ratelimit.v3.rls_pb2_grpc import RateLimitServiceStub
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from envoy_limits import COST, QUOTA_TOKENS, check_tokens, fresh, start_envoy
from gateway import CERTIFICATE, KEY, expect
from real_envoy import free_port, serve, wait_for

YAML = f"""
domain: edge
descriptors:
  - key: user
    rate_limit: {{unit: day, requests_per_unit: 3}}
  - key: tokens
    rate_limit: {{unit: day, requests_per_unit: {QUOTA_TOKENS}}}
"""
TYPE = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig"
OK, OVER_LIMIT = RateLimitResponse.OK, RateLimitResponse.OVER_LIMIT


def schema():
    """Return the class of RateLimitConfig: the fields of rls_conf.proto that the checks use."""
    file = descriptor_pb2.FileDescriptorProto(name="rls_conf.proto", package="ratelimit.config.ratelimit.v3", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    messages = {
        "RateLimitConfig": [("name", 1, "s"), ("domain", 2, "s"), ("descriptors", 3, "RateLimitDescriptor*")],
        "RateLimitDescriptor": [("key", 1, "s"), ("rate_limit", 3, "RateLimitPolicy")],
        "RateLimitPolicy": [("unit", 1, "i"), ("requests_per_unit", 2, "u")],
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            scalar = {"s": kinds.TYPE_STRING, "i": kinds.TYPE_INT32, "u": kinds.TYPE_UINT32}.get(kind)
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label, type=scalar or kinds.TYPE_MESSAGE)
            if not scalar:
                added.type_name = f".{file.package}.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.RateLimitConfig"))


RateLimitConfig = schema()


class DropIn:
    """The binary under the name `ratelimit`, with these variables and no others."""

    def __init__(self, folder, binary, **variables):
        program = Path(folder) / "bin/ratelimit"
        if not program.is_symlink():
            program.parent.mkdir()
            program.symlink_to(Path(binary).resolve())
        self.grpc, self.http = free_port(), free_port()
        variables |= {"GRPC_PORT": str(self.grpc), "PORT": str(self.http), "GRPC_HOST": "127.0.0.1", "HOST": "127.0.0.1"}
        self.process = subprocess.Popen([str(program)], env=variables)
        wait_for(self.grpc)
        wait_for(self.http)

    def health(self):
        return urllib3.request("GET", f"http://127.0.0.1:{self.http}/healthcheck", retries=False).status

    def json(self, body):
        return urllib3.request("POST", f"http://127.0.0.1:{self.http}/json", json=body, retries=False)

    def stop(self):
        self.process.terminate()
        expect(self.process.wait() == 0, "SIGTERM ends the process with 0")


def ask(stub, user, domain="edge"):
    entry = RateLimitDescriptor.Entry(key="user", value=user)
    request = RateLimitRequest(domain=domain, descriptors=[RateLimitDescriptor(entries=[entry])])
    return stub.ShouldRateLimit(request, timeout=10)


def check_files(folder, binary, redis, upstream):
    """grpcio, JSON and a real Envoy against YAML files."""
    directory = Path(folder) / "root/ratelimit/config"
    directory.mkdir(parents=True)
    (directory / "edge.yaml").write_text(YAML)
    drop_in = DropIn(
        folder, binary, RUNTIME_ROOT=f"{folder}/root", RUNTIME_SUBDIRECTORY="ratelimit", RUNTIME_WATCH_ROOT="false",
        REDIS_SOCKET_TYPE="tcp", REDIS_URL=f"127.0.0.1:{redis}", USE_STATSD="false", LOG_LEVEL="debug",
    )
    expect(drop_in.health() == 200, "healthy")
    user = fresh()
    with grpc.insecure_channel(f"127.0.0.1:{drop_in.grpc}") as channel:
        stub = RateLimitServiceStub(channel)
        codes = [ask(stub, user).overall_code for _ in range(4)]
        expect(codes == [OK, OK, OK, OVER_LIMIT], codes)
    answer = drop_in.json({"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": user}]}]})
    expect((answer.status, answer.json()["overallCode"]) == (429, "OVER_LIMIT"), answer.data)
    expect(drop_in.json({"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": fresh()}]}]}).status == 200, "another user")
    expect(drop_in.json({"domain": 1}).status == 400, "no request")
    envoy = start_envoy(folder, upstream, drop_in.grpc)
    user = fresh()
    statuses = [envoy.get(user=user).status for _ in range(5)]
    expect(statuses == [200, 200, 200, 429, 429], statuses)
    admitted = check_tokens(envoy)
    envoy.stop()
    drop_in.stop()
    return admitted


class Management(AggregatedDiscoveryServiceServicer):
    """A management server, which sends what `exchange` gets."""

    def __init__(self, port):
        self.requests, self.responses = queue.Queue(), queue.Queue()
        self.server = grpc.server(ThreadPoolExecutor(4))
        add_AggregatedDiscoveryServiceServicer_to_server(self, self.server)
        pair = (KEY.read_bytes(), CERTIFICATE.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], CERTIFICATE.read_bytes(), require_client_auth=True)
        self.server.add_secure_port(f"127.0.0.1:{port}", credentials)
        self.server.start()

    def StreamAggregatedResources(self, requests, context):
        Thread(target=self.read, args=(requests,), daemon=True).start()
        yield from iter(self.responses.get, None)

    def read(self, requests):
        try:
            for request in requests:
                self.requests.put(request)
        except grpc.RpcError:
            pass

    def exchange(self, version, *configurations):
        response = DiscoveryResponse(version_info=version, nonce=f"n{version}", type_url=TYPE)
        for configuration in configurations:
            response.resources.add(type_url=TYPE, value=configuration.SerializeToString())
        self.responses.put(response)
        request = self.requests.get(timeout=30)
        expect(request.response_nonce == f"n{version}", request)
        return request

    def stop(self):
        self.responses.put(None)
        self.server.stop(0).wait()


def of(domain, quota, unit=4):
    configuration = RateLimitConfig(name=domain, domain=domain)
    descriptor = configuration.descriptors.add(key="user")
    descriptor.rate_limit.unit = unit
    descriptor.rate_limit.requests_per_unit = quota
    return configuration


def check_xds(folder, binary, redis, upstream):
    """A management server over mutual TLS, with the variables that Envoy Gateway sets. It starts after the drop-in."""
    port = free_port()
    drop_in = DropIn(
        folder, binary, CONFIG_TYPE="GRPC_XDS_SOTW", CONFIG_GRPC_XDS_SERVER_URL=f"localhost:{port}",
        CONFIG_GRPC_XDS_NODE_ID="envoy-ratelimit", CONFIG_GRPC_XDS_SERVER_USE_TLS="true",
        CONFIG_GRPC_XDS_SERVER_TLS_CACERT=str(CERTIFICATE), CONFIG_GRPC_XDS_CLIENT_TLS_CERT=str(CERTIFICATE),
        CONFIG_GRPC_XDS_CLIENT_TLS_KEY=str(KEY), FORCE_START_WITHOUT_INITIAL_CONFIG="true",
        REDIS_SOCKET_TYPE="tcp", REDIS_URL=f"127.0.0.1:{redis}", USE_STATSD="false",
        USE_PROMETHEUS="true", PROMETHEUS_ADDR=f"127.0.0.1:{free_port()}", LOG_LEVEL="info",
    )
    expect(drop_in.health() == 200, "healthy without a management server")
    channel = grpc.insecure_channel(f"127.0.0.1:{drop_in.grpc}")
    stub = RateLimitServiceStub(channel)
    try:
        ask(stub, fresh())
        raise AssertionError("a call before the first response is an error")
    except grpc.RpcError as error:
        expect(error.code() == grpc.StatusCode.UNAVAILABLE, error)
    server = Management(port)
    first = server.requests.get(timeout=60)
    expect((first.node.id, first.type_url, first.version_info) == ("envoy-ratelimit", TYPE, ""), first)
    accepted = server.exchange("1", of("edge", 3), of("other", 1))
    expect((accepted.version_info, accepted.HasField("error_detail")) == ("1", False), accepted)
    envoy = start_envoy(folder, upstream, drop_in.grpc)
    user = fresh()
    statuses = [envoy.get(user=user).status for _ in range(4)]
    expect(statuses == [200, 200, 200, 429], statuses)
    rejected = server.exchange("2", of("edge", 5, unit=42))
    expect((rejected.version_info, rejected.error_detail.code) == ("1", 3), rejected)
    expect("unknown unit" in rejected.error_detail.message, rejected)
    expect(envoy.get(user=user).status == 429, "the previous descriptors stay in use")
    server.stop()
    expect(envoy.get(user=user).status == 429, "without the management server")
    server = Management(port)
    again = server.requests.get(timeout=60)
    expect((again.node.id, again.version_info) == ("envoy-ratelimit", ""), again)
    server.exchange("1", of("edge", 5))
    expect(envoy.get(user=user).status == 200, "the limit is higher")
    server.stop()
    envoy.stop()
    channel.close()
    drop_in.stop()


def main():
    binary = sys.argv[1]
    upstream = serve("up")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [shutil.which("redis-server"), "--port", str(port), "--save", "", "--dir", folder]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(port)
        try:
            admitted = check_files(folder, binary, port, upstream)
            check_xds(folder, binary, port, upstream)
        finally:
            redis.kill()
            redis.wait()
    print(f"drop-in: grpcio, JSON and Envoy with YAML ({admitted} streams of {COST} for {QUOTA_TOKENS}), and with a management server of grpcio over mutual TLS")


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, queue.Empty, subprocess.SubprocessError, urllib3.exceptions.HTTPError, grpc.RpcError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
