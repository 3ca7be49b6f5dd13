#!/usr/bin/env python3
"""`host` of upstreams in front of virtual hosts of Go and of nginx over TLS: `make test-clients`.

    virtual_hosts.py BINARY FOLDER

Each program has two servers, and answers 421 to a request for another host. The gateway connects to them with HTTP/1.1 and
with HTTP/2, for clients with HTTP/1.1 and HTTP/2. FOLDER is for the compiled program. Exits with 1 if a check fails.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from gateway import Gateway, expect
from real_envoy import free_port, wait_for

# The first server has two names, and the second one has an address, so that no name must be resolved.
FIRST, SECOND = ["localhost", "api.test"], ["127.0.0.1"]
CLIENT = "shop.example"
ROUTES = ["client", "server", "name", "both", "override", "back"]


def certificate(folder, name):
    kind = "IP" if name[0].isdigit() else "DNS"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
               "-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{name}", "-addext", "basicConstraints=critical,CA:FALSE",
               "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return (Path(folder) / f"{name}.pem").read_text()


def go(program, folder, port, names):
    return subprocess.Popen([program, str(port), folder, *names], stderr=subprocess.DEVNULL)


def nginx(_, folder, port, names):
    """Start nginx with a server for each name, and a default server for other hosts."""
    told = '{"host":"$host","protocol":"$server_protocol","sni":"$ssl_server_name","forwarded":"$http_x_forwarded_host","port":"$server_port"}'

    def server(name, listen, does):
        pair = f"ssl_certificate {folder}/{name}.pem; ssl_certificate_key {folder}/{name}.key;"
        return f"server {{ listen 127.0.0.1:{port} ssl http2{listen}; server_name {name}; {pair} default_type application/json; {does} }}\n"

    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"])
    # The default server has a name that no request has, because a name may be used once.
    default = server(names[0], " default_server", "return 421;").replace(f"server_name {names[0]}", 'server_name ""')
    servers = "".join(server(name, "", f"return 200 '{told}';") for name in names)
    text = (f"daemon off; master_process off; pid {folder}/{port}.pid; error_log {folder}/{port}.log;\nevents {{}}\n"
            f"http {{ access_log off; {temporary}\n{default}{servers} }}\n")
    path = Path(folder) / f"{port}.conf"
    path.write_text(text)
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    return subprocess.Popen(["nginx", "-c", str(path)], env=environment, stderr=subprocess.DEVNULL)


def configuration(first, second, protocol):
    def upstream(name, servers, more="", tls='ca = "ca.pem"'):
        return f'[upstream.{name}]\nservers = {servers}\nprotocol = "{protocol}"\ntls = {{ {tls} }}\n{more}\n'.replace("'", '"')

    named, by_address = f"https://localhost:{first}", f"https://127.0.0.1:{second}"
    check = 'health_check = { path = "/", interval = "100ms", unhealthy_threshold = 1 }'
    upstreams = [
        upstream("client", [named]),
        upstream("server", [named], f'host = "server"\n{check}'),
        upstream("name", [named], f'host = "api.test"\n{check}', 'ca = "ca.pem", server_name = "api.test"'),
        upstream("both", [named, by_address], f'host = "server"\nbalance = "round-robin"\nretries = 1\n{check}'),
    ]
    routes = {name: (name, "") for name in ROUTES[:4]}
    routes |= {"override": ("client", 'upstream_host = "server"\n'), "back": ("server", 'upstream_host = "client"\n')}
    listener = '[admin]\naddress = "127.0.0.1:0"\n[log]\naccess = "off"\n[server]\nworkers = 1\n[[listener]]\naddress = "127.0.0.1:0"\n'
    written = (f'[[route]]\nname = "{name}"\npath = "/{name}"\nupstream = "{to}"\n{more}' for name, (to, more) in routes.items())
    return listener + "".join(upstreams) + "".join(written)


def check(binary, program, start, name):
    with tempfile.TemporaryDirectory() as folder:
        authorities = "".join(certificate(folder, name) for name in [*FIRST, *SECOND])
        ports = [free_port(), free_port()]
        servers = [start(program, folder, port, names) for port, names in zip(ports, [FIRST, SECOND])]
        try:
            for port in ports:
                wait_for(port)
            for protocol, of_server in [("http1", "HTTP/1.1"), ("http2", "HTTP/2.0")]:
                with Gateway(binary, configuration(*ports, protocol), {"ca.pem": authorities}) as gateway:
                    for is_http2 in [False, True]:
                        with httpx.Client(http1=not is_http2, http2=is_http2, trust_env=False, base_url=gateway.urls[0]) as client:
                            check_routes(client, name, ports, of_server)
            with Gateway(binary, configuration(*ports, "http1"), {"ca.pem": authorities}) as gateway:
                servers[0].kill()
                servers[0].wait()
                for _ in range(4):
                    seen = httpx.get(f"{gateway.urls[0]}/both", headers={"host": CLIENT}, trust_env=False)
                    expect(seen.status_code == 200 and seen.json()["host"] == SECOND[0], f"{name}: the other server: {seen}")
        finally:
            for server in servers:
                server.kill()
                server.wait()
    print(f"virtual hosts: {name}: `host` over HTTP/1.1 and HTTP/2, with health checks and retries", flush=True)


def check_routes(client, name, ports, of_server):
    def get(path, host=CLIENT):
        return client.get(path, headers={"host": host})

    for path, host in [("/server", "localhost"), ("/name", "api.test"), ("/override", "localhost")]:
        what = f"{name}, {of_server}, {path}"
        reply = get(path)
        expect(reply.status_code == 200, f"{what}: {reply.status_code} {reply.text}")
        # The SNI is `server_name` of `tls`, otherwise the host of the URL. It does not depend on `host`.
        expected = {"host": host, "protocol": of_server, "sni": host, "forwarded": CLIENT, "port": str(ports[0])}
        expect(reply.json() == expected, f"{what}: {reply.json()}, not {expected}")
    for path in ["/client", "/back"]:
        expect(get(path).status_code == 421, f"{name}, {of_server}: {path} sends the host of the client")
        expect(get(path, "localhost").status_code == 200, f"{name}, {of_server}: {path} reaches a host that the client names")
    hosts = {get("/both").json()["host"] for _ in range(4)}
    expect(hosts == {FIRST[0], SECOND[0]}, f"{name}, {of_server}: each server gets its own host: {hosts}")


def main():
    binary, folder = sys.argv[1:]
    program = str(Path(folder).resolve() / "virtual_hosts")
    source = Path(__file__).with_name("virtual_hosts.go")
    environment = {**os.environ, "GOCACHE": str(Path(folder).resolve() / "go")}
    subprocess.run(["go", "build", "-o", program, str(source)], check=True, env=environment)
    check(binary, program, go, "Go")
    check(binary, None, nginx, "nginx")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
