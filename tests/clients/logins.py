#!/usr/bin/env python3
"""The login recipe of docs/reference/limits.md in front of FastAPI and Express: `make test-clients`.

    logins.py BINARY

Both applications log in with JSON, with an HTML form, and with a form that is answered with a redirect. Exits with 1 if a
check fails.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import httpx

from gateway import NODE, ROOT, Gateway, expect
from real_envoy import free_port, wait_for

MANUAL = (ROOT / "docs/reference/limits.md").read_text()
URL_ENCODED = "application/x-www-form-urlencoded"

# Headers that an attacker varies.
HEADERS = [
    {"x-forwarded-for": "203.0.113.9"},
    {"forwarded": "for=203.0.113.9"},
    {"x-real-ip": "203.0.113.9"},
    {"x-user": "another"},
    {"cookie": "session=another"},
    {"authorization": "Basic YW5vdGhlcjp4"},
    {"user-agent": "another"},
    {"x-http-method-override": "GET"},
    {"origin": "https://another.test", "accept-language": "xx"},
]


def recipe(style, port, success):
    """Return the configuration of the manual for an application."""
    block = next(text for text in re.findall(r"^```toml\n(.*?)^```$", MANUAL, re.M | re.S) if text.startswith("[limit.login]"))
    if style == "json":
        block = block.replace('"form:username"', '"json:/username"')
    if style == "redirect":
        block = block.replace('refund_on = ["2xx"]', f'refund_on = ["{success}"]')
    listener = '[admin]\naddress = "127.0.0.1:0"\n[log]\naccess = "off"\n[[listener]]\naddress = "127.0.0.1:0"\n'
    return f'{listener}[upstream.api]\nservers = ["http://127.0.0.1:{port}"]\n{block}'


def start(framework, style, port):
    if framework == "FastAPI":
        command = [sys.executable, "-B", "-m", "uvicorn", f"logins_fastapi:{style}", "--port", str(port), "--log-level", "warning"]
        return subprocess.Popen(command, cwd=Path(__file__).parent)
    return subprocess.Popen(["node", "logins_express.mjs", str(port), style], cwd=NODE)


def body(style, user, password):
    if style == "json":
        return "application/json", json.dumps({"username": user, "password": password})
    return URL_ENCODED, f"username={quote(user)}&password={quote(password)}"


def spellings(style):
    """Return other spellings of a login of alice with the right password."""
    if style == "json":
        return [
            ("application/json", '{"password":"right",  "username":"alice"}'),
            ("application/json; charset=utf-8", '{"username":"alice","password":"right","x":1}'),
            ("application/json", '{"\\u0075sername":"\\u0061lice","password":"right"}'),
            ("application/json", '{"username":"zoe","username":"alice","password":"right"}'),
            ("application/json", '{"username":"alice","username":"zoe","password":"right"}'),
            ("text/plain", '{"username":"alice","password":"right"}'),
            (URL_ENCODED, "username=alice&password=right"),
        ]
    multipart = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in [("username", "alice"), ("password", "right")]
    )
    return [
        (URL_ENCODED, "password=right&username=alice"),
        (URL_ENCODED, "%75sername=%61lice&password=right"),
        (URL_ENCODED, "username=alice&password=right&x=1"),
        (URL_ENCODED, "username=zoe&username=alice&password=right"),
        (URL_ENCODED, "username=alice&username=zoe&password=right"),
        (URL_ENCODED, "username[]=alice&password=right"),
        (URL_ENCODED + "; charset=utf-8", "username=alice&password=right"),
        ("multipart/form-data; boundary=x", multipart + "--x--\r\n"),
        ("application/json", '{"username":"alice","password":"right"}'),
    ]


def check(binary, framework, style):
    port = free_port()
    success = {"redirect": 303 if framework == "FastAPI" else 302}.get(style, 200)
    application = start(framework, style, port)
    try:
        wait_for(port)
        with Gateway(binary, recipe(style, port, success)) as gateway, httpx.Client(trust_env=False) as http1, \
                httpx.Client(http1=False, http2=True, trust_env=False) as http2:
            what = f"{framework}, {style}"
            url = f"{gateway.urls[0]}/login"

            def log_in(client, user, password, **headers):
                media_type, content = body(style, user, password)
                return client.post(url, content=content, headers={"content-type": media_type, **headers})

            def seen():
                return httpx.get(f"http://127.0.0.1:{port}/attempts", trust_env=False).json()

            for client in [http1, http2] * 4:
                expect(log_in(client, "alice", "right").status_code == success, f"{what}: a successful login is free")
            for number, client in enumerate([http1, http2, http1, http2, http1]):
                reply = log_in(client, "alice", f"guess {number}", **HEADERS[number])
                expect(reply.status_code == 401, f"{what}: failure {number} reaches the application: {reply}")
            expect(seen() == ["alice"] * 13, f"{what}: the application has seen all logins: {seen()}")
            for client in [http1, http2]:
                for headers in [{}, *HEADERS]:
                    reply = log_in(client, "alice", "right", **headers)
                    expect(reply.status_code == 429, f"{what}: the sixth failure is not admitted with {headers}: {reply}")
                    expect(int(reply.headers["retry-after"]) > 0, f"{what}: it says when: {reply.headers}")
                for media_type, content in spellings(style):
                    # The account of the application and of the gateway are the same, or the login is rejected.
                    reply = client.post(url, content=content, headers={"content-type": media_type})
                    is_held = reply.status_code == 429 or 400 <= reply.status_code < 500 and "alice" not in seen()[13:]
                    expect(is_held, f"{what}: another spelling gains nothing: {content}: {reply} {seen()[13:]}")
            expect("alice" not in seen()[13:], f"{what}: the application sees no denied login: {seen()}")
            expect(log_in(http2, "bob", "right").status_code == success, f"{what}: another account is free")
    finally:
        application.kill()
        application.wait()


def main():
    for framework in ["FastAPI", "Express"]:
        for style in ["json", "form", "redirect"]:
            check(sys.argv[1], framework, style)
        print(f"logins: {framework}: five failures, then 429 over HTTP/1.1 and HTTP/2, by JSON and forms", flush=True)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
