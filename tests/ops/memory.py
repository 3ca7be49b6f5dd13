"""Offer many connections to a gateway whose control group has 64 MiB. The kernel must not end it, what does not fit must wait or be refused,
and the gateway must serve requests during and after the load.

    memory.py BINARY

Without the permission to create a control group, the gateway gets `server.memory = "64MiB"`, and its resident memory is measured.
"""

import errno
import multiprocessing
import os
import pathlib
import resource
import selectors
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/clients"))
from gateway import CERTIFICATE, KEY, Gateway, expect  # noqa: E402

BINARY = sys.argv[1]
LIMIT = 64 << 20
# Each client process has at most this number of sockets.
PER_PROCESS = 5000
CONFIGURATION = """
[admin]
address = "127.0.0.1:0"
[server]
workers = 2
header_timeout = "5s"
idle_timeout = "5s"
body_idle_timeout = "5s"
{memory}
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
{tls}
[upstream.u]
servers = ["http://127.0.0.1:{upstream}"]
[[route]]
name = "hello"
path = "/hello"
respond = {{ status = 200, body = "hello" }}
[[route]]
name = "u"
path = "/u"
upstream = "u"
"""
IDLE = b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n"
UPLOAD = b"POST /u HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n" + 50000 * b"x"


class Cgroup:
    """A control group with a memory limit, below the one of this process, in version 2 or 1."""

    def __init__(self):
        self.folder = None
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, self.names = "/sys/fs/cgroup", ("memory.max", "memory.peak", "memory.events")
            elif "memory" in controllers.split(","):
                mount, self.names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
            else:
                continue
            folder = pathlib.Path(mount + path) / f"sluicegate-{os.getpid()}"
            try:
                folder.mkdir()
                (folder / self.names[0]).write_text(str(LIMIT))
                self.folder = folder
                return
            except OSError:
                if folder.is_dir():
                    folder.rmdir()

    def enter(self):
        if self.folder:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def read(self, index):
        return (self.folder / self.names[index]).read_text()

    def kills(self):
        return sum(int(line.split()[1]) for line in self.read(2).splitlines() if line.startswith("oom_kill "))

    def remove(self):
        if self.folder:
            self.folder.rmdir()


def upstream():
    """A server that reads nothing more after the headers, and does not respond."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)

    def serve(connection):
        try:
            connection.recv(1 << 16)
            time.sleep(60)
        except OSError:
            pass

    def accept():
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.stack_size(256 << 10)
    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def offer(address, count, message, tls, ready, stop, results):
    """Open connections, send the message on each, and read at most once."""
    selector, open_sockets, counts = selectors.DefaultSelector(), [], {"connected": 0, "responded": 0, "refused": 0}
    hello = b""
    if tls:
        # The first bytes of a handshake: the gateway then waits for the rest of the ClientHello.
        hello = bytes.fromhex("1603010200010001fc0303")
    for number in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.bind((f"127.0.1.{number % 250 + 1}", 0))
        if client.connect_ex(address) in (0, errno.EINPROGRESS):
            open_sockets.append(client)
            selector.register(client, selectors.EVENT_WRITE)
    ready.release()
    while not stop.is_set():
        for key, events in selector.select(0.2):
            client = key.fileobj
            try:
                if events & selectors.EVENT_WRITE:
                    client.send(hello or message)
                    counts["connected"] += 1
                    selector.modify(client, selectors.EVENT_READ)
                else:
                    counts["responded" if client.recv(64) else "refused"] += 1
                    selector.unregister(client)
            except OSError:
                counts["refused"] += 1
                selector.unregister(client)
                client.close()
    results.put(counts)


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status
    except OSError as error:
        return error


def stage(name, message, count, tls=False):
    group = Cgroup()
    memory = "" if group.folder else f'memory = "{LIMIT >> 20}MiB"'
    tls_keys = f'tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]' if tls else ""
    port = upstream()
    gateway = Gateway(BINARY, CONFIGURATION.format(memory=memory, tls=tls_keys, upstream=port), enter=group.enter)
    try:
        load(name, gateway, group, message, count, tls)
    finally:
        gateway.process.kill()
        gateway.process.wait()
        group.remove()


def load(name, gateway, group, message, count, tls):
    url = urllib.parse.urlsplit(gateway.urls[0])
    ready, stop, results = multiprocessing.Semaphore(0), multiprocessing.Event(), multiprocessing.Queue()
    sizes = [min(PER_PROCESS, count - first) for first in range(0, count, PER_PROCESS)]
    clients = [
        multiprocessing.Process(target=offer, args=((url.hostname, url.port), size, message, tls, ready, stop, results), daemon=True) for size in sizes
    ]
    for client in clients:
        client.start()
    for _ in clients:
        ready.acquire()
    peak, seconds = 0, time.monotonic() + 15
    while time.monotonic() < seconds:
        expect(gateway.process.poll() is None, f"{name}: the gateway has ended: {gateway.process.poll()}")
        expect(status(f"{gateway.admin}/healthz") == 200, f"{name}: the gateway does not respond")
        lines = pathlib.Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines()
        peak = max(peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")))
        time.sleep(0.5)
    stop.set()
    counts = {}
    for _ in clients:
        for key, value in results.get().items():
            counts[key] = counts.get(key, 0) + value
    for client in clients:
        client.join()
    began = time.monotonic()
    while not tls and status(f"{gateway.urls[0]}/hello") != 200:
        expect(time.monotonic() < began + 60, f"{name}: no service after the load")
        time.sleep(0.1)
    seconds = time.monotonic() - began
    measured = f"anonymous memory {peak >> 20} MiB"
    if group.folder:
        expect(group.kills() == 0, f"{name}: {group.read(2)}")
        measured += f", control group {int(group.read(1)) >> 20} of {LIMIT >> 20} MiB"
    expect(peak < LIMIT, f"{name}: {measured}")
    expect(seconds < 8, f"{name}: service only {seconds:.1f} s after the load")
    print(f"{name}: {count} connections offered, {counts}; {measured}; service {seconds:.1f} s after the load", flush=True)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for count in (4000, 20000):
        stage("idle connections", IDLE, count)
    stage("unfinished TLS handshakes", IDLE, 4000, tls=True)
    stage("unfinished uploads", UPLOAD, 4000)
