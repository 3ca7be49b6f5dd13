"""slowhttptest: the gateway closes connections with slow headers, slow bodies or slow readers at the timeouts. Meanwhile, it serves
other clients."""

import re
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from gateway import expect

CONNECTIONS = 500
# Maximum time of an attack in seconds. An attack ends as soon as the gateway has closed all of its connections. On a busy machine, this
# takes longer than the timeouts of the gateway.
SECONDS = 60


def attack(mode, url, *arguments):
    """Start an attack. The process ends when all connections are closed or the time is over."""
    shape = ["-c", str(CONNECTIONS), "-r", str(CONNECTIONS), "-l", str(SECONDS), "-p", "3"]
    run = ["slowhttptest", mode, *shape, "-u", url, *arguments]
    return subprocess.Popen(run, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def result(attack, what):
    """Return the final output of an attack. Check that other clients were served all the time."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", attack.communicate(timeout=2 * SECONDS)[0])
    available = re.findall(r"service available:\s+(\w+)", said)
    expect(available and set(available) == {"YES"}, f"{what}: others were not served:\n{said[-2000:]}")
    return said


def established(url):
    """Return the number of the gateway's established connections (state 1, proc_net_tcp(5))."""
    port = f":{urlsplit(url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for row in rows if row[1].endswith(port) and row[3] == "01")


def check(clear, _tls):
    for what, mode, url, arguments in [
        ("slow heads", "-H", f"{clear}/own", ["-i", "1"]),
        ("slow bodies", "-B", f"{clear}/echo", ["-i", "5", "-s", "100000"]),
    ]:
        said = result(attack(mode, url, *arguments), what)
        expect("Exit status: No open connections left" in said, f"{what}: connections stay open:\n{said[-2000:]}")

    # A client that reads 32 bytes per 5 s notices a close late, so count the connections on the side of the gateway.
    # The attack must last longer than this loop, because it closes its connections at its end.
    readers = attack("-X", f"{clear}/large", "-w", "512", "-y", "1024", "-n", "5", "-z", "32", "-l", str(3 * SECONDS))
    try:
        most, remaining, deadline = 0, CONNECTIONS, time.monotonic() + SECONDS
        # Some connections end before the last one is opened.
        while time.monotonic() < deadline and (most <= CONNECTIONS * 0.8 or remaining > 5):
            remaining = established(clear)
            most = max(most, remaining)
            time.sleep(0.1)
        expect(most > CONNECTIONS * 0.8, f"slow readers: {most} connections at most")
        expect(remaining <= 5, f"slow readers: {remaining} of {most} connections stay open for {SECONDS} s")
        expect(readers.poll() is None, "slow readers: the attack ended early")
        readers.send_signal(signal.SIGINT)
        result(readers, "slow readers")
    finally:
        readers.kill()
        readers.wait()
    return f"slowhttptest: {CONNECTIONS} connections with slow heads, bodies and readers are all closed, others are served"
