"""nghttp2: h2load loses no request on many streams and connections, and a limit stays exact under its load. nghttp reads a
response that arrives before the gateway has read the request."""

import re
import subprocess
import tempfile

from gateway import expect
from upstreams import LARGE


def h2load(*arguments):
    """Return the numbers of succeeded, failed, errored and timed-out requests, and of responses per status class."""
    ran = subprocess.run(["h2load", *arguments], capture_output=True, text=True, check=True, timeout=120)
    done = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", ran.stdout)
    statuses = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", ran.stdout)
    return [int(number) for number in done.groups()], [int(number) for number in statuses.groups()]


def early(url):
    """Check an early response (RFC 9113 §8.1): the complete response is followed by RST_STREAM with NO_ERROR."""
    with tempfile.NamedTemporaryFile() as upload:
        upload.write(LARGE * 3)
        upload.flush()
        run = ["nghttp", "--verbose", "--null-out", f"--data={upload.name}", f"{url}/closed"]
        said = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    said = re.sub(r"\x1b\[[0-9;]*m", "", said)
    frames = re.findall(r"recv (HEADERS|DATA|RST_STREAM) frame <length=\d+, flags=(0x\d\d), stream_id=\d+>", said)
    expect(":status: 429" in said, said[-2000:])
    expect(frames == [("HEADERS", "0x04"), ("DATA", "0x01"), ("RST_STREAM", "0x00")], frames)
    expect("error_code=NO_ERROR" in said, said[-2000:])


def check(clear, tls):
    early(clear)
    early(tls)
    for arguments, url in [(["--h1"], clear), ([], clear), ([], tls), (["--npn-list=http/1.1"], tls)]:
        streams = "1" if arguments else "20"
        load = ["--requests=20000", "--clients=50", f"--max-concurrent-streams={streams}", *arguments]
        done, statuses = h2load(*load, f"{url}/own")
        expect(statuses == [20_000, 0, 0, 0] and done == [20_000, 0, 0, 0], f"{arguments} {url}: {done}, {statuses}")
    done, statuses = h2load("--requests=5000", "--clients=50", "--max-concurrent-streams=20", f"{clear}/hundred/load")
    # h2load counts responses with other statuses than 2xx as failed.
    expect(statuses == [100, 0, 4900, 0] and done[2:] == [0, 0], f"a limit of 100: {done}, {statuses}")
    version = subprocess.run(["h2load", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    shown = "80,000 requests by HTTP/1.1 and HTTP/2, 50 connections, 20 streams: none lost; exactly 100 of 5,000"
    return f"h2load {version}: {shown}; nghttp: 429 while uploading"
