#!/usr/bin/env python3
"""Independent clients against the real binary: `make test-clients`.

    clients.py BINARY [FAMILY …]

Exits with 1 if a check fails.
"""

import importlib
import subprocess
import sys

import urllib3

import fields
import grpc_web
import llm
import metrics
import rpc
import upstreams
from gateway import CERTIFICATE, KEY, Gateway

# Each module has a function `check(clear, tls)`, which takes two URLs and returns a description of what it checked.
FAMILIES = ["metrics", "fields", "curl", "requesting", "node", "rpc", "grpc_web", "nghttp2", "slow", "tls", "llm"]


def configuration(http, websocket, web, grpc, models):
    """Return the configuration for all families. Each family has its own limits."""
    upstream = {"http": http, "websocket": websocket, "web": web, "grpc": grpc}
    return f"""
[admin]
address = "127.0.0.1:0"
[server]
header_timeout = "2s"
body_idle_timeout = "2s"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]
{"".join(f'[upstream.{name}]{chr(10)}servers = ["http://{address}"]{chr(10)}' for name, address in upstream.items())}
protocol = "http2"

[[route]]
name = "echo"
path = "/{{*rest}}"
upstream = "http"
[[route]]
name = "socket"
path = "/socket"
upstream = "websocket"
websocket = true
[[route]]
name = "own"
path = "/own"
respond = {{ status = 200, body = "own" }}

# A limit that one request before the checks exhausts.
[limit.closed]
by = "route"
quota = "1/24h"
algorithm = "sliding-log"
[[route]]
name = "closed"
path = "/closed"
limits = ["closed"]
respond = {{ status = 200 }}

[limit.hundred]
by = "path:name"
quota = "100/24h"
algorithm = "sliding-log"
[[route]]
name = "hundred"
path = "/hundred/{{name}}"
limits = ["hundred"]
respond = {{ status = 200, body = "admitted" }}

[limit.patient]
by = "path:name"
quota = "1/2s"
burst = 1
[[route]]
name = "patient"
path = "/patient/{{name}}"
limits = ["patient"]
respond = {{ status = 200 }}

[limit.calls]
by = "route"
quota = "3/24h"
algorithm = "sliding-log"
[[route]]
name = "limited-calls"
path = "/test.Limited/{{*rest}}"
limits = ["calls"]
upstream = "grpc"
[[route]]
name = "calls"
path = "/test.Echo/{{*rest}}"
upstream = "grpc"
[limit.web_calls]
by = "route"
quota = "3/24h"
algorithm = "sliding-log"
[[route]]
name = "limited-web"
path = "/test.LimitedWeb/{{*rest}}"
limits = ["web_calls"]
upstream = "web"
[[route]]
name = "web"
path = "/test.Web/{{*rest}}"
upstream = "web"
{fields.configuration()}
{llm.configuration(models)}
"""


def main():
    binary, *names = sys.argv[1:]
    behind = [upstreams.http(), upstreams.websocket(), grpc_web.serve(), rpc.serve(), llm.serve()]
    for name in names or FAMILIES:
        # Each family has its own gateway.
        with Gateway(binary, configuration(*behind), llm.files()) as gateway:
            urllib3.request("GET", f"{gateway.urls[0]}/closed")
            family = importlib.import_module(name)
            # The family `metrics` also uses the admin listener.
            also = [gateway.admin] if family is metrics else []
            print(family.check(*gateway.urls, *also), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, subprocess.SubprocessError) as error:
        sys.exit(f"not content: {type(error).__name__}: {error}")
