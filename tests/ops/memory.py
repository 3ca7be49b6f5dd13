"""Offer many connections to a gateway whose control group has 64 MiB. The kernel must not end it, what does not fit must wait or be refused,
and the gateway must serve requests during and after the load.

    memory.py BINARY [NAME]

NAME selects the loads whose names contain it.

Without the permission to create a control group, the gateway gets `server.memory = "64MiB"`, and its resident memory is measured.
"""

import dataclasses
import errno
import multiprocessing
import os
import pathlib
import resource
import selectors
import socket
import ssl
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
# Duration of a load in seconds. After a third of it, idle connections ask for long responses.
SECONDS = 15
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
[upstream.long]
servers = ["http://127.0.0.1:{long}"]
[[route]]
name = "hello"
path = "/hello"
respond = {{ status = 200, body = "hello" }}
[[route]]
name = "u"
path = "/u"
upstream = "u"
[[route]]
name = "long"
path = "/long"
upstream = "long"
"""
IDLE = b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n"
# The first bytes of a TLS handshake: the gateway then waits for the rest of the ClientHello.
HELLO = bytes.fromhex("1603010200010001fc0303")
LONG = b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n"
# Bytes of a response that clients do not read.
LENGTH = 64 << 20
# HTTP/2 with prior knowledge, and windows of 2^31 - 1 bytes.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000006040000000000" "00047fffffff" "000004080000000000" "7fff0000")
# Indexed fields: GET, http, and literals: /long, host a.
FIELDS = b"\x82\x86\x04\x05/long\x01\x01a"
STREAMS = 20
UPLOAD = b"POST /u HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n" + 50000 * b"x"


class Cgroup:
    """A control group with a memory limit, below the one of this process, in version 2 or 1."""

    def __init__(self):
        self.folder = self.sockets = None
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, self.names = "/sys/fs/cgroup", ("memory.max", "memory.current", "memory.events")
            elif "memory" in controllers.split(","):
                mount, self.names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
            else:
                continue
            folder = pathlib.Path(mount + path) / f"sluicegate-{os.getpid()}"
            try:
                folder.mkdir()
                (folder / self.names[0]).write_text(str(LIMIT))
                self.folder = folder
                # Version 1 counts the buffers of sockets only if they have a limit. The gateway must see what version 2 counts.
                sockets = folder / "memory.kmem.tcp.limit_in_bytes"
                if sockets.exists():
                    sockets.write_text(str(1 << 40))
                    self.sockets = folder / "memory.kmem.tcp.usage_in_bytes"
                return
            except OSError:
                if folder.is_dir():
                    folder.rmdir()

    def enter(self):
        if self.folder:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def read(self, index):
        return (self.folder / self.names[index]).read_text()

    def used(self):
        """Return the bytes that the group counts, with the buffers of sockets."""
        sockets = int(self.sockets.read_text()) if self.sockets else 0
        return int(self.read(1)) + sockets

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


def long_upstream():
    """A process that sends long responses as fast as the gateway reads them. Return its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    multiprocessing.Process(target=send_long, args=(listener,), daemon=True).start()
    return listener.getsockname()[1]


def send_long(listener):
    selector, rest, chunk = selectors.DefaultSelector(), {}, b"x" * 65536
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            try:
                if connection is listener:
                    accepted = listener.accept()[0]
                    accepted.setblocking(False)
                    selector.register(accepted, selectors.EVENT_READ)
                elif connection in rest:
                    rest[connection] -= connection.send(chunk[: rest[connection]])
                    if not rest[connection]:
                        del rest[connection]
                        selector.modify(connection, selectors.EVENT_READ)
                elif connection.recv(65536):
                    rest[connection] = LENGTH
                    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LENGTH)
                    selector.modify(connection, selectors.EVENT_WRITE)
                else:
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                selector.unregister(connection)
                connection.close()
                rest.pop(connection, None)


@dataclasses.dataclass
class Load:
    """What a number of connections send. They read at most the first bytes of a response."""

    name: str
    count: int
    message: bytes
    # Sent after the first response, by all connections at the same time.
    then: bytes = b""
    tls: bool = False
    handshakes: bool = True


def clients(address, load, count, ready, go, stop, results):
    """Open connections, and send the messages of the load."""
    selector, counts = selectors.DefaultSelector(), {"connected": 0, "responded": 0, "refused": 0}
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    waiting, open_sockets = [], []

    def advance(client, state):
        """Take the next step of a connection. Return its next state."""
        if state == "connecting" and load.tls and load.handshakes:
            selector.unregister(client)
            client = context.wrap_socket(client, do_handshake_on_connect=False)
            selector.register(client, selectors.EVENT_READ, "shaking")
            state = "shaking"
        if state == "shaking":
            try:
                client.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
        if state in ("connecting", "shaking"):
            client.send(load.message)
            counts["connected"] += 1
            selector.modify(client, selectors.EVENT_READ, "sent")
            return
        try:
            received = client.recv(64)
        except ssl.SSLWantReadError:
            return
        counts["responded" if received else "refused"] += 1
        selector.unregister(client)
        open_sockets.append(client)
        if load.then:
            waiting.append(client)

    for number in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.bind((f"127.0.1.{number % 250 + 1}", 0))
        if client.connect_ex(address) in (0, errno.EINPROGRESS):
            selector.register(client, selectors.EVENT_WRITE, "connecting")
    ready.release()
    while not stop.is_set():
        for key, _ in selector.select(0.2):
            try:
                advance(key.fileobj, key.data)
            except OSError:
                counts["refused"] += 1
                selector.unregister(key.fileobj)
                key.fileobj.close()
        if go.is_set():
            for client in waiting:
                try:
                    client.send(load.then)
                except OSError:
                    counts["refused"] += 1
            waiting.clear()
    results.put(counts)


def status(url):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=10, context=context) as response:
            return response.status
    except OSError as error:
        return error


def stage(load):
    group = Cgroup()
    memory = "" if group.folder else f'memory = "{LIMIT >> 20}MiB"'
    tls = f'tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]' if load.tls else ""
    configuration = CONFIGURATION.format(memory=memory, tls=tls, upstream=upstream(), long=long_upstream())
    gateway = Gateway(BINARY, configuration, enter=group.enter)
    try:
        measure(load, gateway, group)
    finally:
        gateway.process.kill()
        gateway.process.wait()
        group.remove()


def measure(load, gateway, group):
    url = urllib.parse.urlsplit(gateway.urls[0])
    ready, results = multiprocessing.Semaphore(0), multiprocessing.Queue()
    go, stop = multiprocessing.Event(), multiprocessing.Event()
    sizes = [min(PER_PROCESS, load.count - first) for first in range(0, load.count, PER_PROCESS)]
    processes = [
        multiprocessing.Process(target=clients, args=((url.hostname, url.port), load, size, ready, go, stop, results), daemon=True)
        for size in sizes
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    began = time.monotonic()
    peak = 0
    while time.monotonic() < began + SECONDS:
        ended = gateway.process.poll()
        expect(ended is None, f"{load.name}: the gateway has ended: {ended}")
        health = status(f"{gateway.admin}/healthz")
        expect(health == 200, f"{load.name}: the gateway does not respond: {health}, {gateway.process.poll()}")
        lines = pathlib.Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines()
        anonymous = max(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
        peak = max(peak, group.used() if group.folder else anonymous)
        if time.monotonic() > began + SECONDS / 3:
            go.set()
        time.sleep(0.05)
    stop.set()
    counts = {}
    for _ in processes:
        for key, value in results.get().items():
            counts[key] = counts.get(key, 0) + value
    for process in processes:
        process.join()
    began = time.monotonic()
    while status(f"{gateway.urls[0]}/hello") != 200:
        expect(time.monotonic() < began + 60, f"{load.name}: no service after the load")
        time.sleep(0.1)
    seconds = time.monotonic() - began
    measured = f"at most {peak >> 20} of {LIMIT >> 20} MiB"
    if group.folder:
        expect(group.kills() == 0, f"{load.name}: {group.read(2)}")
    expect(peak < LIMIT, f"{load.name}: {measured}")
    expect(seconds < 8, f"{load.name}: service only {seconds:.1f} s after the load")
    print(f"{load.name}: {load.count} connections offered, {counts}; {measured}; service {seconds:.1f} s after the load", flush=True)


def requests_over_http2():
    streams = b"".join(bytes([0, 0, len(FIELDS), 1, 5]) + (2 * index + 1).to_bytes(4, "big") + FIELDS for index in range(STREAMS))
    return PREFACE + streams


LOADS = [
    Load("idle connections", 4000, IDLE),
    Load("more idle connections", 20000, IDLE),
    Load("unfinished TLS handshakes", 4000, HELLO, tls=True, handshakes=False),
    Load("unfinished uploads", 4000, UPLOAD),
    Load("unread responses", 4000, LONG),
    Load("unread responses over TLS", 2000, LONG, tls=True),
    Load("unread responses over HTTP/2", 1000, requests_over_http2()),
    Load("idle connections that ask for long responses at the same time", 1000, IDLE, then=LONG),
]

if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for load in LOADS:
        if len(sys.argv) < 3 or sys.argv[2] in load.name:
            stage(load)
