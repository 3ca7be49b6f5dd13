"""Starts the applications and the gateways on free loopback ports, and stops them by their process IDs."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))
from gateway import Gateway  # noqa: E402

APPLICATIONS = ["django", "node", "node-lenient", "nginx", "go"]
GATEWAYS = ["sluicegate", "nginx", "haproxy", "envoy"]
POLICIES = ["canonical", "keep-encoded-slashes", "keep-double-slashes", "keep-slashes"]
# Seconds for which a gateway waits for the rest of a request. Cases with incomplete requests take this long.
WAIT = 1
PROCESSES = []
OURS = []
GIVEN = set()


def free_ports(count):
    """Return free ports below the ephemeral ports, which the kernel assigns to outgoing connections. No port is returned twice."""
    ports = []
    while len(ports) < count:
        port = random.randrange(10_000, 32_000)
        if port in GIVEN:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        GIVEN.add(port)
        ports.append(port)
    return ports


def start(command, ports, folder, **environment):
    with open(folder / f"{Path(command[0]).name}.{ports[0]}.err", "wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env={**os.environ, **environment})
    PROCESSES.append(process)
    deadline = time.monotonic() + 60
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command} did not start:\n{Path(errors.name).read_text()}") from None
                time.sleep(0.02)
    return process


def stop():
    for gateway in OURS:
        gateway.__exit__()
    for process in PROCESSES:
        process.terminate()
    for process in PROCESSES:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    OURS.clear()
    PROCESSES.clear()


def applications(folder, tools, programs):
    """Start the applications. Each has one port per gateway. Return the ports by application and gateway."""
    ports = {name: free_ports(len(GATEWAYS)) for name in APPLICATIONS}
    binds = [part for port in ports["django"] for part in ("--bind", f"127.0.0.1:{port}")]
    start(
        [str(programs / "python"), "-m", "gunicorn", "--config", str(HERE / "applications/gunicorn_options.py"), *binds, "django_app:application"],
        ports["django"],
        folder,
        SEEN=str(folder),
        PYTHONPATH=str(HERE / "applications"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    for name, parser in [("node", "strict"), ("node-lenient", "lenient")]:
        command = ["node", "--max-http-header-size=65536", str(HERE / "applications/node.cjs"), str(folder), parser]
        start([*command, *map(str, ports[name])], ports[name], folder)
    start([str(tools / "go-application"), str(folder), *map(str, ports["go"])], ports["go"], folder)
    servers = "".join(
        f"""
  server {{
    listen 127.0.0.1:{port};
    server_name _;
    access_log {folder}/{port}.log seen if=$seen;
    location / {{ js_content application.echo; }}
  }}"""
        for port in ports["nginx"]
    )
    nginx(
        folder,
        "application",
        ports["nginx"],
        f"""
  js_path {HERE}/applications;
  js_import application from seen.js;
  js_var $seen;
  log_format seen escape=none '$seen';
  underscores_in_headers on;
  ignore_invalid_headers off;
  client_body_buffer_size 1m;
  {servers}""",
        "load_module /usr/lib/nginx/modules/ngx_http_js_module.so;",
    )
    return {name: dict(zip(GATEWAYS, each)) for name, each in ports.items()}


def nginx(folder, name, ports, http, modules=""):
    path = folder / f"{name}.nginx.conf"
    path.write_text(
        f"""
{modules}
worker_processes 1;
daemon off;
pid {folder}/{name}.pid;
error_log {folder}/{name}.error.log crit;
events {{ worker_connections 512; }}
http {{
  access_log off;
  keepalive_timeout 75s;
  keepalive_requests 100000;
  large_client_header_buffers 8 64k;
  client_body_temp_path {folder}/{name}.body;
  proxy_temp_path {folder}/{name}.proxy;
  fastcgi_temp_path {folder}/{name}.fastcgi;
  uwsgi_temp_path {folder}/{name}.uwsgi;
  scgi_temp_path {folder}/{name}.scgi;
  {http}
}}
"""
    )
    program = "/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else "nginx"
    start([program, "-p", str(folder), "-e", f"{folder}/{name}.error.log", "-c", str(path)], ports, folder)


def gateways(binary, folder, programs, upstreams, policy):
    """Start the gateways: with another path policy than that of the peers, only Sluicegate. Return their ports by gateway and application,
    and the processes of Sluicegate by application."""
    ports = {}
    if policy == POLICIES[0]:
        ports = {gateway: dict(zip(APPLICATIONS, free_ports(len(APPLICATIONS)))) for gateway in GATEWAYS[1:]}
        as_nginx(folder, ports["nginx"], upstreams)
        as_haproxy(folder, ports["haproxy"], upstreams)
        as_envoy(folder, programs, ports["envoy"], upstreams)
    ours = {name: sluicegate(binary, configuration(folder, name, upstreams[name]["sluicegate"], policy)) for name in APPLICATIONS}
    ports["sluicegate"] = {name: int(gateway.urls[0].rpartition(":")[2]) for name, gateway in ours.items()}
    return ports, ours


def sluicegate(binary, text, files=None):
    OURS.append(Gateway(binary, text, files))
    return OURS[-1]


def as_nginx(folder, ports, upstreams):
    servers = "".join(
        f"""
  upstream {name} {{ server 127.0.0.1:{upstreams[name]["nginx"]}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://{name};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
    }}
  }}"""
        for name, port in ports.items()
    )
    times = f"client_header_timeout {WAIT}s; client_body_timeout {WAIT}s; proxy_read_timeout {WAIT}s; lingering_close off;"
    nginx(folder, "peer", list(ports.values()), f"{times}{servers}")


def as_haproxy(folder, ports, upstreams):
    path = folder / "haproxy.cfg"
    sections = "".join(
        f"""
frontend {name}
  bind 127.0.0.1:{port}
  default_backend {name}
backend {name}
  http-reuse always
  server one 127.0.0.1:{upstreams[name]["haproxy"]}
"""
        for name, port in ports.items()
    )
    path.write_text(
        f"""
global
  nbthread 1
defaults
  mode http
  timeout connect 2s
  timeout client {WAIT}s
  timeout server {WAIT}s
  timeout http-request {WAIT}s
  timeout http-keep-alive 5s
{sections}"""
    )
    program = "/usr/sbin/haproxy" if Path("/usr/sbin/haproxy").exists() else "haproxy"
    start([program, "-db", "-f", str(path)], list(ports.values()), folder)


def as_envoy(folder, programs, ports, upstreams):
    """Start Envoy, configured as its documentation recommends for edge proxies."""

    def address(port):
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    kinds = "type.googleapis.com/envoy.extensions"
    listeners = []
    for name, port in ports.items():
        manager = {
            "@type": f"{kinds}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": name,
            "use_remote_address": True,
            "http_protocol_options": {"accept_http_10": True},
            "normalize_path": True,
            "merge_slashes": True,
            "path_with_escaped_slashes_action": "REJECT_REQUEST",
            "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST", "idle_timeout": "5s"},
            "request_headers_timeout": f"{WAIT}s",
            "request_timeout": f"{WAIT}s",
            "stream_idle_timeout": f"{WAIT}s",
            "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": name}}]}]},
            "http_filters": [{"name": "router", "typed_config": {"@type": f"{kinds}.filters.http.router.v3.Router"}}],
        }
        listeners.append({"name": name, "address": address(port), "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]})
    clusters = [
        {
            "name": name,
            "type": "STATIC",
            "connect_timeout": "2s",
            "load_assignment": {
                "cluster_name": name,
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(upstreams[name]["envoy"])}}]}],
            },
        }
        for name in ports
    ]
    path = folder / "envoy.json"
    path.write_text(json.dumps({"static_resources": {"listeners": listeners, "clusters": clusters}}))
    command = [str(programs / "envoy"), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "critical"]
    start(command, list(ports.values()), folder)


# The limits: name and `by`.
LIMITS = {
    "key": '"api-key"',
    "tenant": '"header:x-tenant"',
    "sid": '"cookie:sid"',
    "host": '"host"',
    "method": '"method"',
    "path": '"path:rest"',
}
# The routes in the order of their precedence: name, and a condition on the tenant, the host and the first path segment.
ROUTES = [
    ("tenant", 'match.headers.x-tenant.exact = "gold"\npath = "/{*rest}"\nhosts = ["host.test"]'),
    ("host", 'path = "/{*rest}"\nhosts = ["host.test"]'),
    ("path", 'path = "/admin/{*rest}"'),
    ("all", 'path = "/{*rest}"'),
]


def configuration(folder, name, upstream, policy):
    """Return the configuration of Sluicegate with one limit per kind of identity. `upstream` is a port, or None for the reference gateway,
    which responds itself."""
    (folder / "consumers.toml").write_text("")
    target = 'respond = { status = 200, body = "reference" }' if upstream is None else 'upstream = "application"'
    text = f"""
[server]
workers = 1
path_policy = "{policy}"
header_timeout = "{WAIT}s"
body_idle_timeout = "{WAIT}s"
idle_timeout = "5s"
[admin]
address = "127.0.0.1:0"
[log]
access = "{folder}/access.{name}.log"
[client_ip]
trusted_proxies = {'["127.0.0.1"]' if upstream is None else "[]"}
[[listener]]
address = "127.0.0.1:0"
[auth.keys]
kind = "api-key"
on_missing = "anonymous"
on_unknown = "accept"
forward_credential = true
"""
    if upstream is not None:
        text += f'[upstream.application]\nservers = ["http://127.0.0.1:{upstream}"]\n'
    for limit, by in LIMITS.items():
        text += f'[limit.{limit}]\nby = {by}\nquota = "1000000/s"\non_missing = "skip"\n'
    for route, condition in ROUTES:
        limits = json.dumps(list(LIMITS))
        text += f'[[route]]\nname = "{route}"\n{condition}\nidentify = ["keys"]\nlimits = {limits}\n{target}\nrequest_headers = {{ set = {{ x-routed = "{route}" }} }}\n'
    return text
