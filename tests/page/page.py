#!/usr/bin/env python3
"""The dashboard in a real browser with a real Redis under load: `make test-page`.

    page.py BINARY PICTURES

Writes screenshots into the folder PICTURES. Exits with 1 if anything is not as it has to be.
"""

import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))
from browser import Browser
from gateway import Gateway, expect

TOKEN = "open-sesame"
PLANTED = "planted-secret-of-the-store"
# An identity that would be markup if it were not escaped.
HOSTILE = "<img src=x onerror=alert(1)>"
ENTER = "\ue007"


class Redis:
    """Start a redis-server on a free port."""

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--save", "", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
        )
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def configuration(redis):
    return f"""
[admin]
address = "127.0.0.1:0"
token = "{TOKEN}"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[store]
url = "redis://127.0.0.1:{redis.port}/0"
secret = "{PLANTED}"
timeout = "5s"
[client_ip]
trusted_proxies = ["127.0.0.1"]
[limit.per-user]
by = "user:x-user-id"
quota = "20/1d"
algorithm = "fixed-window"
[limit.in-all]
by = "global"
quota = "100000/s"
[limit.on-trial]
by = "path:name"
quota = "10/s"
shadow = true
[upstream.api]
servers = ["http://127.0.0.1:1"]
[[route]]
name = "hello"
path = "/hello/{{name}}"
limits = ["per-user", "in-all", "on-trial"]
respond = {{ status = 200, body = "hello" }}
[[route]]
name = "open"
path = "/open"
limits = ["in-all"]
respond = {{ status = 200, body = "hello" }}
[[route]]
name = "gone"
path = "/gone"
upstream = "api"
"""


def load(url, times, *more):
    """Send `count` requests, 200 per second, in a process that ends by itself."""
    command = ["hey", "-n", str(times), "-c", "4", "-q", "50", *more, url]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def status(url, user):
    request = urllib.request.Request(f"{url}/hello/world", headers={"x-user-id": user})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def figure(browser, name):
    """Return a figure at the top, or None while there is none."""
    tiles = browser.run("return Object.fromEntries([...document.querySelectorAll('#current div')]"
                        ".map((tile) => [tile.children[0].innerText, tile.children[1].innerText]))")
    text = tiles.get(name, "–").split(" ")[0].replace(",", "")
    return None if text == "–" else float(text)


def signing_in(browser, admin):
    browser.open(f"{admin}/")
    browser.until("the token is asked for", lambda: browser.text("#token-form h2"))
    expect(browser.run("return document.querySelector('#content').hidden"), "nothing is shown before")
    expect(not browser.log("browser"), "nothing to complain about")
    # The field has the focus: the keyboard is sufficient.
    browser.press(*"wrong", ENTER)
    browser.until("the wrong token is refused", lambda: "Wrong token" in browser.text("#token-error"))
    refused = [entry["message"] for entry in browser.log("browser")]
    expect(len(refused) == 1 and "401" in refused[0], f"one answer of 401 and nothing else: {refused}")
    expect(browser.run("return sessionStorage.length") == 0, "the wrong token is not kept")
    browser.press(*TOKEN, ENTER)
    browser.until("figures are shown", lambda: figure(browser, "allowed/s") is not None)
    kept = browser.run("return [Object.values(sessionStorage), localStorage.length, document.cookie, location.href]")
    expect(kept == [[TOKEN], 0, "", f"{admin}/"], f"the token is in this tab only: {kept}")


def moving(browser):
    figures = ["allowed/s", "denied/s", "errors/s", "p50", "p99"]
    waiting = set(figures)

    def moved():
        waiting.difference_update([name for name in waiting if (figure(browser, name) or 0) > 0])
        return not waiting

    browser.until(f"each of {figures} has moved", moved)

    def drawn():
        lines = browser.run("return [...document.querySelectorAll('.plot .line')].map((line) => line.getAttribute('d'))")
        return len(lines) == 6 and all("L" in line for line in lines)

    browser.until("all lines are drawn", drawn)
    words = browser.run("return document.querySelector('#rates svg').getAttribute('aria-label')")
    expect("denied" in words and "maximum" in words, f"the chart is told in words: {words}")

    def limits():
        rows = {row[0]: row for row in browser.rows("#limits")}
        return rows.keys() == {"per-user", "in-all", "on-trial (shadow)"} and rows["per-user"][3] not in ("–", "0") and rows
    rows = browser.until("limits have their rates", limits)
    expect(rows["per-user"][1] == "20/1d", rows)
    browser.until("the upstream is told", lambda: browser.rows("#health")[0][:2] == ["127.0.0.1:1", "api"])
    browser.until("the store is told", lambda: "yes" in browser.text("#store"))


def top(browser):
    rows = browser.until("both are among the denied", lambda: len(
        rows := {row[0]: row for row in browser.rows("#denied") if row[1] == "per-user"}) == 2 and rows)
    expect(f"user:x-user-id={HOSTILE}" in rows, f"text is text: {rows}")
    expect(browser.run("return document.querySelectorAll('img').length") == 0, "and no markup")
    # By keyboard, while the table is updated.
    browser.run("document.querySelector('#denied button[aria-label*=\"=alice \"]').focus()")
    seen = figure(browser, "allowed/s"), browser.text("#denied")
    browser.until("the table has changed", lambda: browser.text("#denied") != seen[1])
    kept = browser.run("return document.activeElement.getAttribute('aria-label')")
    expect(kept == "Inspect user:x-user-id=alice with per-user", f"the focus stays: {kept}")
    browser.press(ENTER)
    browser.until("her standing is shown", lambda: "per-user: denied, 0 of 20 remaining" in browser.text("#inspect-result"))


def resetting(browser, url):
    seen = [status(url, "bob") for _ in range(21)]
    expect(seen == [200] * 20 + [429], f"bob has used up what he may: {seen}")
    browser.type("#identity", "user:x-user-id=bob path:name=nowhere")
    browser.press(ENTER)
    browser.until("that is too much for one limit", lambda: "not by" in browser.text("#inspect-result"))
    browser.run("document.querySelector('#limit').value = ''")
    browser.type("#identity", "user:x-user-id=bob")
    browser.press(ENTER)
    browser.until("he stands with one limit, and all share another", lambda: len(browser.rows("#usage")) == 2)
    browser.click("#usage button[aria-label='Reset per-user']")
    browser.until("the usage is reset", lambda: "Usage of per-user reset" in browser.text("#inspect-result"))
    browser.until("and passes", lambda: status(url, "bob") == 200)
    browser.type("#identity", "nonsense")
    browser.press(ENTER)
    browser.until("nonsense is told", lambda: "PART=VALUE" in browser.text("#inspect-result"))
    browser.type("#identity", "user:x-user-id=bob")
    browser.press(ENTER)
    browser.until("he has passed once", lambda: "per-user: allowed, 19 of 20 remaining" in browser.text("#inspect-result"))


def secrets(browser):
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    shown = browser.until("the configuration is shown", lambda: browser.text("#active-config"))
    written = json.loads(shown)
    expect(written["store"]["secret"] == written["admin"]["token"] == "***", shown)
    page = browser.run("return document.documentElement.outerHTML")
    expect(PLANTED not in page and TOKEN not in page, "no secret stands in the page")
    browser.until("there is a table by minute", lambda: browser.rows("#by-minute"))


ROUGH_CHECK = """
const problems = [];
const named = (element) => (element.getAttribute('aria-label') ?? element.labels?.[0]?.innerText ?? element.innerText ?? '').trim();
for (const each of document.querySelectorAll('button, input, select, a, [role=img], [role=region]')) {
  if (!named(each) && !each.getAttribute('aria-labelledby')) problems.push(`no name: ${each.outerHTML}`);
}
for (const table of document.querySelectorAll('table')) {
  if (!table.caption?.innerText && table.checkVisibility()) problems.push(`no caption: ${table.outerHTML}`);
  if ([...table.querySelectorAll('th')].some((head) => !head.scope)) problems.push(`no scope: ${table.outerHTML}`);
}
for (const landmark of ['header', 'nav', 'main']) {
  if (!document.querySelector(landmark)) problems.push(`no ${landmark}`);
}
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const colour = getComputedStyle(each).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
for (const each of document.querySelectorAll('body *')) {
  if (![...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) || !each.checkVisibility()) continue;
  const [one, other] = [light(getComputedStyle(each).color), light(ground(each))].sort((a, b) => b - a);
  if ((one + 0.05) / (other + 0.05) < 4.5) problems.push(`contrast: ${each.outerHTML.slice(0, 200)}`);
}
if (document.documentElement.scrollWidth > innerWidth) problems.push(`the page is ${document.documentElement.scrollWidth} wide`);
return problems;
"""


def seeing(browser, pictures):
    for name, scheme, width in [("dark", "dark", 1280), ("light", "light", 1280), ("narrow", "light", 360), ("narrow-dark", "dark", 360)]:
        browser.see_as(scheme, width)
        browser.run("scrollTo(0, 0)")
        found = browser.run(ROUGH_CHECK)
        expect(not found, f"{name}: {found}")
        browser.picture(pictures / f"{name}.png")


def quiet(browser, admin):
    # An invalid identity is a 400, which the browser logs to the console.
    said = [entry for entry in browser.log("browser") if "/api/identities" not in entry["message"]]
    expect(not said, f"the console says: {said}")
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    # The initial tab of the browser is chrome://.
    asked = {urlsplit(url).netloc for url in urls if not url.startswith(("data:", "chrome"))} - {""}
    expect(asked == {urlsplit(admin).netloc}, f"another host was contacted: {asked}")


def main():
    binary, pictures = sys.argv[1], Path(sys.argv[2])
    shutil.rmtree(pictures, ignore_errors=True)
    pictures.mkdir(parents=True)
    with Redis() as redis, Gateway(binary, configuration(redis)) as gateway, Browser() as browser:
        browser.see_as("light", 1280)
        url, admin = gateway.urls[0], gateway.admin
        signing_in(browser, admin)
        browser.picture(pictures / "signed-in.png")
        loads = [
            load(f"{url}/open", 12000),
            load(f"{url}/hello/world", 12000, "-H", "x-user-id: alice"),
            load(f"{url}/hello/world", 12000, "-H", f"x-user-id: {HOSTILE}"),
            load(f"{url}/gone", 12000),
        ]
        try:
            moving(browser)
            top(browser)
            resetting(browser, url)
            secrets(browser)
            seeing(browser, pictures)
        except AssertionError:
            browser.picture(pictures / "failed.png")
            raise
        finally:
            for each in loads:
                each.kill()
                each.wait()
        # A reloaded page has its history and its token.
        browser.open(f"{admin}/")
        browser.until("the past is there at once", lambda: "L" in browser.run(
            "return document.querySelector('#rates .line')?.getAttribute('d') ?? ''"))
        quiet(browser, admin)
        gateway.process.kill()
        browser.until("it says that the gateway is gone", lambda: "retrying" in browser.text("#status"))
    print("the dashboard: figures move, the denied are named, inspect and reset work; see", pictures)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
