"""Python clients: requests, httpx (HTTP/1.1 and HTTP/2) and websockets."""

import asyncio
import ssl
import time

import httpx
import requests
import websockets
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from gateway import CERTIFICATE, expect
from upstreams import LARGE


def with_requests(url):
    with requests.Session() as session:
        # Take neither proxies nor trust roots from the environment.
        session.trust_env = False
        session.verify = str(CERTIFICATE)
        got = session.post(f"{url}/echo", params={"a": "b c"}, json={"x": "é"}, timeout=20).json()
        expect((got["method"], got["target"], got["length"]) == ("POST", "/echo?a=b+c", 15), got)
        # A generator is sent chunked.
        got = session.put(f"{url}/echo", data=(LARGE[:100_000] for _ in range(10)), timeout=20).json()
        expect((got["length"], got["headers"].get("transfer-encoding")) == (1_000_000, "chunked"), got)
        expect(session.get(f"{url}/large", timeout=20).content == LARGE, "4 MiB")
        expect(session.get(f"{url}/gzip", timeout=20).json()["method"] == "GET", "gzip")
        expect(session.head(f"{url}/large", timeout=20).headers["content-length"] == str(len(LARGE)), "HEAD")
        events = list(session.get(f"{url}/events", stream=True, timeout=20).iter_lines())
        expect(events == [b"data: 0", b"", b"data: 1", b"", b"data: 2", b""], events)
        reply = session.post(f"{url}/closed", data=LARGE, timeout=20)
        expect(reply.status_code == 429 and reply.json()["status"] == 429, reply.text)


def patient(get):
    """Check that a client that waits for Retry-After is admitted."""
    statuses = []
    for _ in range(3):
        reply = get()
        statuses.append(reply.status_code)
        if reply.status_code == 429:
            time.sleep(int(reply.headers["retry-after"]))
    expect(statuses == [200, 429, 200], statuses)


def with_httpx(url, http2, name):
    version = "HTTP/2" if http2 else "HTTP/1.1"
    context = ssl.create_default_context(cafile=CERTIFICATE)
    with httpx.Client(http1=not http2, http2=http2, verify=context, timeout=20, trust_env=False) as client:
        reply = client.post(f"{url}/echo", json={"x": 1})
        expect((reply.http_version, reply.json()["method"]) == (version, "POST"), reply)
        got = client.put(f"{url}/echo", content=(LARGE[:100_000] for _ in range(10))).json()
        expect(got["length"] == 1_000_000, got)
        expect(client.get(f"{url}/large").content == LARGE, "4 MiB")
        # In HTTP/2, cookies may be in several header fields (RFC 9113 §8.2.3).
        got = client.get(f"{url}/echo", cookies={"a": "1", "b": "2"}).json()
        expect(got["headers"]["cookie"] == "a=1; b=2", got)
        # With HTTP/2, httpcore reads no response while the flow-control window for the request body is closed.
        reply = client.post(f"{url}/closed", content=LARGE[:50_000] if http2 else LARGE)
        expect(reply.status_code == 429 and reply.json()["status"] == 429, reply.text)
        expect(client.get(f"{url}/echo").status_code == 200, "what follows")
        patient(lambda: client.get(f"{url}/patient/{name}"))

    async def crowd():
        """Send 300 requests at once, with HTTP/2 on one connection. Check that exactly 100 are admitted."""
        async with httpx.AsyncClient(http1=not http2, http2=http2, verify=context, timeout=20, trust_env=False) as client:
            replies = await asyncio.gather(*[client.get(f"{url}/hundred/{name}") for _ in range(300)])
            statuses = [reply.status_code for reply in replies]
            expect((statuses.count(200), statuses.count(429)) == (100, 200), f"{version}: {sorted(statuses)}")

    asyncio.run(crowd())


def with_websockets(url):
    context = ssl.create_default_context(cafile=CERTIFICATE) if url.startswith("https") else None
    url = url.replace("http", "ws", 1)
    with connect(f"{url}/socket", ssl=context, proxy=None, max_size=None) as socket:
        expect(socket.recv(timeout=20) == "hello", "the server speaks first")
        for message in ["text", "é" * 70_000, b"", LARGE]:
            socket.send(message)
            expect(socket.recv(timeout=20) == message, f"{len(message)} of {type(message)}")
        # Send a message in several frames.
        socket.send(str(number) for number in range(100))
        expect(socket.recv(timeout=20) == "".join(str(number) for number in range(100)), "in pieces")
        expect(socket.ping().wait(20), "a ping is answered")
        socket.close(1000, "enough")
        expect((socket.close_code, socket.close_reason) == (1000, "enough"), f"{socket.close_code}")
    try:
        connect(f"{url}/own", ssl=context, proxy=None)
    except InvalidStatus as refused:
        expect(refused.response.status_code == 200, refused)
    else:
        raise AssertionError("a route that says nothing of WebSockets switches")


def check(clear, tls):
    for url in [clear, tls]:
        with_requests(url)
        with_websockets(url)
    with requests.Session() as session:
        session.trust_env = False
        patient(lambda: session.get(f"{clear}/patient/requests", timeout=20))
    with_httpx(clear, False, "clear-1")
    with_httpx(clear, True, "clear-2")
    with_httpx(tls, False, "tls-1")
    with_httpx(tls, True, "tls-2")
    return (
        f"requests {requests.__version__}, httpx {httpx.__version__} (HTTP/1.1, HTTP/2), websockets {websockets.__version__}: "
        "bodies both ways, cookies, 429 while uploading, Retry-After, exactly 100 of 300 at once, frames, pings, closes"
    )
