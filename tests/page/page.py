#!/usr/bin/env python3
"""The dashboard in a real browser with a real Redis under load: `make test-page`.

    page.py BINARY PICTURES AXE

Screenshots are written to the folder PICTURES. AXE is the script of axe-core, which checks accessibility. Exits with 1 if a check fails.
"""

import json
import re
import shutil
import signal
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
ESCAPE = "\ue00c"
LEFT = "\ue012"


class Redis:
    """A redis-server on a free port. It is stopped at the end of the `with` block."""

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()
        return self

    def start(self):
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--save", "", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
        )

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
[auth.keys]
kind = "api-key"
on_unknown = "accept"
[limit.per-user]
by = "user:x-user-id"
quota = "20/1d"
algorithm = "fixed-window"
usage = true
[limit.per-key]
by = "api-key"
quota = "100/min"
tiers = {{ free = {{ quota = "60/min", burst = 10 }} }}
[limit.in-all]
by = "global"
quota = "100000/s"
unit = "calls"
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
    """Start a process that sends `times` requests at 200 per second and then ends."""
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
    """Return the value of a tile at the top of the page, or None if it has no value yet."""
    tiles = browser.run("return Object.fromEntries([...document.querySelectorAll('#current div')]"
                        ".map((tile) => [tile.children[0].innerText, tile.children[1].innerText]))")
    text = tiles.get(name, "–").split(" ")[0].replace(",", "")
    return None if text == "–" else float(text)


def signing_in(browser, admin):
    browser.open(f"{admin}/")
    browser.until("the token is asked for", lambda: browser.text("#token-form h2"))
    expect(browser.run("return document.querySelector('#content').hidden"), "nothing is shown before")
    expect(not browser.log("browser"), "nothing to complain about")
    # The input field has the focus, so the keyboard is sufficient.
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
    figures = ["allowed/s", "denied/s", "errors/s", "p50", "p95", "p99"]
    waiting = set(figures)

    def moved():
        waiting.difference_update([name for name in waiting if (figure(browser, name) or 0) > 0])
        return not waiting

    browser.until(f"each of {figures} has moved", moved)

    def drawn():
        lines = browser.run("return [...document.querySelectorAll('.plot .line')].map((line) => line.getAttribute('d'))")
        return len(lines) == 6 and all("L" in line for line in lines)

    browser.until("all lines are drawn", drawn)
    # Each outcome is an area on top of the previous one.
    tops = browser.run("return [...document.querySelectorAll('#rates .line')].map((line) => line.className.baseVal + ' ' + "
                       "Math.min(...[...line.getAttribute('d').matchAll(/[ML][0-9.]+ ([0-9.]+)/g)].map(([, y]) => y)))")
    heights = {kind: float(y) for _, kind, y in (top.split() for top in tops)}
    expect(heights["errors"] < heights["denied"] < heights["allowed"], f"the areas are stacked: {heights}")
    words = browser.run("return document.querySelector('#rates .canvas').getAttribute('aria-label')")
    expect("denied" in words and "maximum" in words, f"the chart is told in words: {words}")
    browser.until("the title has rate and state", lambda: re.fullmatch(
        r"[1-9][0-9,.]*/s · ready – Sluicegate", browser.run("return document.title")))

    def limits():
        rows = {row[0].split("\n")[0]: row for row in browser.rows("#limits")}
        return (rows.keys() == {"per-user", "per-key", "in-all", "on-trial (shadow)"} and rows["per-user"][4] not in ("–", "0")
                and rows["per-user"][5] != "0 %" and rows)
    rows = browser.until("limits have their rates", limits)
    expect("20/1d" in rows["per-user"][1] and "fixed-window by user:x-user-id" in rows["per-user"][0], rows)
    expect(rows["in-all"][1] == "100000/s calls", f"the unit is shown: {rows}")
    expect("free: 60/min, burst 10" in rows["per-key"][1], f"the tiers are shown: {rows}")
    spark = "document.querySelector('#limits tr[data-key=per-user] .spark svg')"
    # The first interval ends after 10 s.
    browser.until("a limit has a small chart", lambda: browser.run(f"return {spark}.children[1].getAttribute('d')"))
    words = browser.run(f"return {spark}.getAttribute('aria-label')")
    expect(re.search(r"at most [0-9.,]+ allowed and (?!0 )[0-9.,]+ denied per second", words), f"and says it in words: {words}")
    browser.until("the upstream is told", lambda: browser.rows("#health")[0][:2] == ["127.0.0.1:1", "api"])
    browser.until("the store is told", lambda: "yes" in browser.text("#store"))


LINES = """
const place = (box) => [Math.round(box.left), Math.round(box.right), Math.round(box.top + box.height / 2)];
const frame = document.querySelector('#lines').getBoundingClientRect();
const box = (key) => {
  const [list, ...name] = key.split(' ');
  return place(document.querySelector(`#${list} [data-key="${name.join(' ')}"]`).getBoundingClientRect());
};
return [...document.querySelectorAll('#lines path')].map((path) => {
  const [from, to] = path.dataset.key.split(' > ');
  const [start, end] = [path.getPointAtLength(0), path.getPointAtLength(path.getTotalLength())];
  const [first, last] = [box(from), box(to)];
  const isJoined = Math.abs(start.x + frame.left - first[1]) < 2 && Math.abs(start.y + frame.top - first[2]) < 2
    && Math.abs(end.x + frame.left - last[0]) < 2 && Math.abs(end.y + frame.top - last[2]) < 2;
  return [path.dataset.key, isJoined, Number(path.getAttribute('stroke-width')), path.className.baseVal];
});
"""


def flow(browser):
    def node(column, key):
        return browser.text(f"#{column} [data-key='{key}']")
    browser.until("the route has its denials", lambda: re.search(r"[1-9][0-9.,]*/s denied", node("lanes", "hello")))
    browser.until("the limit has them as well", lambda: re.search(r"[1-9][0-9.,]*/s denied", node("gates", "per-user")))
    browser.until("the route has its p95", lambda: "p95" in node("lanes", "hello"))
    browser.until("errors are told at the upstream", lambda: re.search(r"api\s.*/s errors", node("targets", "upstream api"), re.S))
    browser.until("errors are told by status", lambda: re.search(r"502/s\s+[1-9]", browser.text("#codes dl")))
    keys = browser.run("return ['lanes', 'gates', 'targets'].map((id) => [...document.getElementById(id).children].map((node) => node.dataset.key))")
    expect(keys == [["hello", "open", "gone"], ["per-user", "in-all", "on-trial", "no limits"], ["respond", "upstream api"]],
           f"there is one node for each route, limit and upstream: {keys}")
    way = browser.text("#lanes [data-key=hello] .way")
    expect(way == "per-user, in-all, on-trial (shadow) → responds with 200", f"the way of a route is told in words: {way}")
    lines = {key: rest for key, *rest in browser.run(LINES)}
    expect(sorted(lines) == sorted([
        "lanes hello > gates per-user", "lanes hello > gates in-all", "lanes hello > gates on-trial", "lanes open > gates in-all",
        "lanes gone > gates no limits", "gates no limits > targets upstream api", "gates per-user > targets respond", "gates in-all > targets respond",
        "gates on-trial > targets respond"]), f"the lines are those of the routes: {lines.keys()}")
    apart = [key for key, (is_joined, *_) in lines.items() if not is_joined]
    expect(not apart, f"each line joins its nodes: {apart}")
    widths = {key: width for key, (_, width, _) in lines.items()}
    expect(widths["lanes hello > gates per-user"] > 2 * widths["gates per-user > targets respond"],
           f"few requests of this route are admitted: {widths}")


MANY_ROUTES = """
return import('/flow.js').then(({ showFlow }) => {
  const routes = Array.from({ length: 8 }, (_, index) => ({ name: `r${index}`, path: '/', upstream: { api: 3, other: 1 } }));
  const totals = new Map(routes.map(({ name }, index) => [name, index]));
  const show = () => {
    const none = new Map();
    showFlow(routes, { rates: none, totals, latencies: none, upstreams: {}, shadow: new Set(), limitRates: none, upstreamRates: none });
    return [[...document.querySelectorAll('#lanes .node b')].map((name) => name.innerText), document.querySelector('#more-routes').innerText];
  };
  const few = show();
  document.querySelector('#more-routes').click();
  const all = show();
  document.querySelector('#more-routes').click();
  return [few, all];
});
"""


def many_routes(browser):
    few, every = browser.run(MANY_ROUTES)
    expect(few == [[f"r{index}" for index in (7, 6, 5, 4, 3, 2)], "Show all 8 routes"], f"the busiest routes are shown: {few}")
    expect(every == [[f"r{index}" for index in range(7, -1, -1)], "Show the 6 busiest routes"], f"or all of them: {every}")


def time_range(browser):
    def shown():
        return [browser.run("return document.querySelector('#rates .times').innerText.split('\\n')[0]"),
                browser.text("#requests figcaption")]
    expect(shown() == ["−5 min", "Requests per second, last 5 minutes"], shown())
    widths = {}
    for minutes, text in [("60", "hour"), ("5", "5 minutes")]:
        browser.run("document.querySelector(`#range input[value='${arguments[0]}']`).click()", minutes)
        browser.until(f"the charts show {minutes} minutes", lambda: shown() == [
            f"−{minutes} min", f"Requests per second, last {text}"])
        browser.until("the chart has samples", lambda: "L" in browser.run(
            "return document.querySelector('#rates .line.allowed').getAttribute('d')"))
        starts = browser.run("return Math.min(...[...document.querySelector('#rates .line.allowed').getAttribute('d')"
                             ".matchAll(/[ML]([0-9.]+) /g)].map(([, x]) => x))")
        widths[minutes] = 900 - starts
    expect(widths["5"] > 4 * widths["60"] > 0, f"the same time is wider in a shorter range: {widths}")


def hover(browser):
    expect(browser.run("return document.querySelector('#rates .tip').hidden"), "there are no values without a pointer")
    box = browser.run("const canvas = document.querySelector('#rates .canvas'); canvas.scrollIntoView({ block: 'center' });"
                      "const { right, top } = canvas.getBoundingClientRect(); return [right - 3, top + 30]")
    move = {"type": "pointerMove", "duration": 0, "x": int(box[0]), "y": int(box[1])}
    browser.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})
    values = r"[0-9]+:[0-9]+:[0-9]+.*\s*errors.*\s*denied.*\s*allowed.*[0-9]/s"
    browser.until("the values at the pointer are shown", lambda: re.search(values, browser.text("#rates .tip"), re.S))
    expect("p95" in browser.text("#latencies .tip"), "the other chart shows the same time")
    browser.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [{**move, "x": 2, "y": 2}]}]})
    browser.until("they go with the pointer", lambda: browser.run("return document.querySelector('#rates .tip').hidden"))
    browser.run("document.querySelector('#rates .canvas').focus()")
    browser.press(LEFT)
    first = browser.until("the keyboard selects a time", lambda: browser.text("#spoken"))
    expect(re.match(r"[0-9:]+: allowed .*p99 ", first), f"a screen reader gets the values: {first}")
    browser.press(LEFT)
    browser.until("and the time before", lambda: browser.text("#spoken")[:8] < first[:8])
    browser.press(ESCAPE)
    expect(browser.run("return document.querySelector('#rates .tip').hidden"), "Escape hides the values")


OUTLIERS = """
const values = arguments[0];
return import('/chart.js').then(({ chart }) => {
const place = document.createElement('div');
document.querySelector('#content').append(place);
const draw = chart(place, { series: [{ name: 'a', kind: 'allowed', read: (sample) => sample.a }], unit: 'per second', isStacked: true });
const samples = Array.from({ length: 100 }, (_, index) => ({ at_ms: 1e12 + index * 1000, ms: 1000, a: values[index] ?? 10 }));
draw(samples, { end: samples.at(-1).at_ms, rangeMs: 300000, rangeText: '5 minutes' });
const found = [place.querySelector('.scale').lastChild.innerText, place.querySelectorAll('.marks span').length,
  place.querySelector('.outliers').hidden ? '' : place.querySelector('.outliers').innerText];
place.remove();
return found;
});
"""


def outliers(browser):
    top, marks, note = browser.run(OUTLIERS, {"40": 5000})
    expect((top, marks) == ("10", 1) and "1 above the scale, highest 5,000/s" in note, f"an outlier is cut: {top} {marks} {note}")
    top, marks, _ = browser.run(OUTLIERS, {"40": 5000, "41": 4000, "60": 3000})
    expect((top, marks) == ("10", 3), f"so are two and one: {top} {marks}")
    found = browser.run(OUTLIERS, {"40": 5000, "41": 5000, "42": 4000})
    expect(found == ["6,000", 0, ""], f"a burst of three seconds is not an outlier: {found}")
    found = browser.run(OUTLIERS, {"40": 20})
    expect(found == ["20", 0, ""], f"twice the usual value is shown: {found}")


def top(browser):
    rows = browser.until("both are among the denied", lambda: len(
        rows := {row[0]: row for row in browser.rows("#denied") if row[1] == "per-user"}) == 2 and rows)
    expect(f"user:x-user-id={HOSTILE}" in rows, f"text is text: {rows}")
    expect(browser.run("return document.querySelectorAll('img').length") == 0, "and no markup")
    # Use the keyboard while the table is updated.
    browser.run("document.querySelector('#denied button[aria-label*=\"=alice \"]').focus()")
    seen = figure(browser, "allowed/s"), browser.text("#denied")
    browser.until("the table has changed", lambda: browser.text("#denied") != seen[1])
    kept = browser.run("return document.activeElement.getAttribute('aria-label')")
    expect(kept == "Inspect user:x-user-id=alice with per-user", f"the focus stays: {kept}")
    browser.press(ENTER)
    usage = browser.until("the remaining quota is shown", lambda: [row[3] for row in browser.rows("#denied") if row[1] == "per-user"])
    expect(all(text.strip() == "0 of 20" for text in usage), f"nothing remains: {usage}")
    bars = browser.run("return [...document.querySelectorAll('#denied tr[data-key^=per-user] .bar span')].map((bar) => bar.style.width)")
    expect(bars == ["100%", "100%"], f"the bars are full: {bars}")
    browser.until("her standing is shown", lambda: "per-user: denied, 0 of 20 remaining" in browser.text("#inspect-result"))


def clients(browser):
    expect(not browser.rows("#top-clients"), "the usage is shown only if it is asked for")
    browser.run("document.querySelector('#clients button[value=month]').click()")
    rows = browser.until("the clients are listed", lambda: len(found := browser.rows("#top-clients")) >= 2 and found)
    expect(len(rows) <= 10 and all(row[1:4] == ["per-user", "20", "requests"] for row in rows[:2]), f"by their usage: {rows}")
    expect(all(re.fullmatch(r"[0-9]+(\.[0-9]+)? %", row[4]) for row in rows), f"with their share: {rows}")
    expect(re.search(r"since \d{4}-\d\d-01, highest first", browser.text("#top-clients caption")), browser.text("#top-clients caption"))


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
    browser.until("it asks first", lambda: "user:x-user-id=bob" in browser.text("#confirm[open]"))
    browser.press(ESCAPE)
    browser.until("the dialog is closed", lambda: not browser.text("#confirm[open]"))
    expect(status(url, "bob") == 429, "a cancelled reset changes nothing")
    browser.click("#usage button[aria-label='Reset per-user']")
    browser.until("the dialog opens", lambda: browser.text("#confirm[open]"))
    browser.click("#confirm [type=submit]")
    browser.until("the usage is reset", lambda: "Usage of per-user reset" in browser.text("#inspect-result"))
    browser.until("and passes", lambda: status(url, "bob") == 200)
    browser.type("#identity", "nonsense")
    browser.press(ENTER)
    browser.until("nonsense is told", lambda: "PART=VALUE" in browser.text("#inspect-result"))
    browser.type("#identity", "user:x-user-id=bob")
    browser.press(ENTER)
    browser.until("he has passed once", lambda: "per-user: allowed, 19 of 20 remaining" in browser.text("#inspect-result"))


def overriding(browser, url):
    browser.until("there are no overrides", lambda: "No overrides" in browser.text("#no-overrides"))
    expect([status(url, "carol") for _ in range(21)][-1] == 429, "carol has used her quota")
    browser.type("#identity", "user:x-user-id=carol")
    browser.press(ENTER)
    browser.until("she is denied", lambda: "per-user: denied, 0 of 20" in browser.text("#inspect-result"))
    browser.click("#usage button[aria-label='Override the quota of per-user']")
    browser.until("the dialog has the current quota", lambda: browser.run(
        "return document.activeElement.id + ' ' + document.activeElement.value") == "override-quota 20/1d")
    browser.type("#override-quota", "many")
    browser.press(ENTER)
    browser.until("an invalid quota is refused in the dialog", lambda: browser.text("#override[open] .error"))
    browser.type("#override-quota", "500/1d")
    browser.type("#override-note", HOSTILE)
    browser.press(ENTER)
    browser.until("it is set", lambda: "Override of per-user set: 500/1d" in browser.text("#inspect-result"))
    browser.until("she passes", lambda: status(url, "carol") == 200)
    expect("Remove override" in browser.text("#usage"), "it can be removed")
    rows = browser.rows("#overrides")
    expect(len(rows) == 1 and rows[0][0] == "per-user" and rows[0][2] == "500/1d" and rows[0][4] == HOSTILE, f"it is listed: {rows}")
    expect(browser.run("return document.querySelectorAll('img').length") == 0, "the note is text")
    browser.click("#overrides button[aria-label^='Remove']")
    browser.until("it asks first", lambda: "Remove the override of per-user" in browser.text("#confirm[open]"))
    browser.press(ENTER)
    browser.until("the focus is on Cancel", lambda: not browser.text("#confirm[open]"))
    expect(len(browser.rows("#overrides")) == 1, "Enter on Cancel removes nothing")
    browser.click("#overrides button[aria-label^='Remove']")
    browser.until("the dialog opens", lambda: browser.text("#confirm[open]"))
    browser.click("#confirm [type=submit]")
    browser.until("it is removed", lambda: "Override of per-user removed" in browser.text("#inspect-result"))
    browser.until("the list is empty", lambda: not browser.rows("#overrides"))
    buttons = "return [...document.querySelectorAll('#usage tr[data-key^=per-user] button')].map((button) => button.innerText)"
    expect(browser.run(buttons) == ["Reset", "Override"], f"there is nothing more to remove: {browser.run(buttons)}")
    browser.until("her old quota applies", lambda: status(url, "carol") == 429)


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


WIDE_TABLES = """
return [...document.querySelectorAll('.wide')].filter((wide) => wide.checkVisibility()).map((wide) =>
  [wide.scrollWidth > wide.clientWidth + 1, getComputedStyle(wide.nextElementSibling).display !== 'none']);
"""


def matching(tables):
    """Return the tables if those that scroll, and only those, have a note."""
    return all(scrolls == told for scrolls, told in tables) and tables


def accessible(browser, name):
    """Check the current page with all rules of axe-core."""
    found = browser.run("return axe.run(document, { resultTypes: ['violations'] })")
    problems = [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found["violations"]]
    expect(not problems, f"axe, {name}: {problems}")
    # While a dialog is open, the page behind it is inert, and fewer rules apply.
    expect(len(found["passes"]) > 10, f"axe has checked the page: {len(found['passes'])} rules passed")


def seeing(browser, pictures, axe):
    browser.run(axe + "; window.axe = axe;")
    for scheme, width in [("dark", 1280), ("light", 1280), ("light", 360), ("dark", 360), ("light", 1440), ("dark", 1440)]:
        name = f"{scheme}-{width}"
        browser.see_as(scheme, width)
        browser.run("scrollTo(0, 0)")
        found = browser.run(ROUGH_CHECK)
        expect(not found, f"{name}: {found}")
        accessible(browser, name)
        tables = browser.until("a note says which tables scroll", lambda: matching(browser.run(WIDE_TABLES)))
        expect(width > 360 or any(scrolls for scrolls, _ in tables), f"{name}: some tables are wider than 360 px: {tables}")
        browser.picture(pictures / f"{name}.png")
    for dialog in ["confirm", "override"]:
        browser.run("document.getElementById(arguments[0]).showModal()", dialog)
        accessible(browser, dialog)
        browser.run("document.getElementById(arguments[0]).close()", dialog)
    browser.see_as("light", 1280)


def stale(browser, gateway, pictures):
    expect(not browser.run("return document.body.classList.contains('stale')"), "the values are new")
    # A stopped process keeps its connections open but sends nothing.
    gateway.process.send_signal(signal.SIGSTOP)
    try:
        said = browser.until("a gateway that is silent is told", lambda: browser.text("#stale"))
        expect(re.match(r"No data from the gateway since [0-9:]+", said), said)
        expect(browser.run("return document.title") == "no data – Sluicegate", "the title says it too")
        grey = browser.run("return getComputedStyle(document.querySelector('#requests')).filter")
        expect(grey == "grayscale(1)", f"the values are grey: {grey}")
        expect("retrying" in browser.text("#status"), "and so does the status")
        expect(figure(browser, "allowed/s") is not None, "the last values stay")
        for scheme in ["light", "dark"]:
            browser.see_as(scheme, 1280)
            accessible(browser, f"stale, {scheme}")
            browser.picture(pictures / f"stale-{scheme}.png")
    finally:
        gateway.process.send_signal(signal.SIGCONT)
    browser.until("new data makes it new", lambda: not browser.run("return document.body.classList.contains('stale')"))
    browser.until("the title too", lambda: "ready" in browser.run("return document.title"))


def banner(browser, name, pattern, pictures):
    """Wait for a text in the banner, and look at the page."""
    text = browser.until(f"the banner tells: {name}", lambda: re.search(pattern, browser.text("#banner"), re.S) and browser.text("#banner"))
    expect(browser.run("return document.querySelector('#banner').className") == "severe", text)
    browser.run("scrollTo(0, 0)")
    for scheme, width in [("light", 1280), ("dark", 1280), ("light", 360)]:
        browser.see_as(scheme, width)
        expect(not browser.run(ROUGH_CHECK), f"{name}, {scheme}-{width}: {browser.run(ROUGH_CHECK)}")
        accessible(browser, f"{name}, {scheme}-{width}")
        browser.picture(pictures / f"{name}-{scheme}-{width}.png")
    browser.see_as("light", 1280)


def faults(browser, gateway, redis, axe, pictures):
    """An outage of the store, and a rejected configuration."""
    browser.run(axe + "; window.axe = axe;")
    requests = load(f"{gateway.urls[0]}/open", 20000)
    redis.process.kill()
    redis.process.wait()
    try:
        banner(browser, "outage", r"The store is unavailable.*count by the share of this gateway", pictures)
        redis.start()
        browser.until("the outage ends", lambda: "The store is unavailable" not in browser.text("#banner"))
    finally:
        requests.kill()
        requests.wait()
    path = Path(gateway.folder.name) / "gateway.toml"
    valid = path.read_text()
    path.write_text(valid.replace('quota = "20/1d"', 'quota = "20/fortnight"'))
    gateway.process.send_signal(signal.SIGHUP)
    banner(browser, "rejected-reload", r"The last reload was rejected; the previous configuration is active.*fortnight", pictures)
    path.write_text(valid)
    gateway.process.send_signal(signal.SIGHUP)
    browser.until("the error goes with the next reload", lambda: "The last reload was rejected" not in browser.text("#banner"))


def quiet(browser, admin):
    # An invalid identity or quota gets a 400, which the browser logs to the console.
    said = [entry for entry in browser.log("browser")
            if not re.search("/api/(identities|overrides).* 400 ", entry["message"])]
    expect(not said, f"the console says: {said}")
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    # The initial tab of the browser has a chrome:// URL.
    asked = {urlsplit(url).netloc for url in urls if not url.startswith(("data:", "chrome"))} - {""}
    expect(asked == {urlsplit(admin).netloc}, f"another host was contacted: {asked}")


def main():
    binary, pictures, axe = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).read_text()
    shutil.rmtree(pictures, ignore_errors=True)
    pictures.mkdir(parents=True)
    with Redis() as redis, Gateway(binary, configuration(redis)) as gateway, Browser() as browser:
        browser.see_as("light", 1280)
        url, admin = gateway.urls[0], gateway.admin
        signing_in(browser, admin)
        browser.picture(pictures / "signed-in.png")
        browser.until("a first request is suggested", lambda: "curl -i http" in browser.text("#first-run"))
        loads = [
            load(f"{url}/open", 20000),
            load(f"{url}/hello/world", 20000, "-H", "x-user-id: alice"),
            load(f"{url}/hello/world", 20000, "-H", f"x-user-id: {HOSTILE}"),
            load(f"{url}/gone", 20000),
        ]
        try:
            moving(browser)
            flow(browser)
            many_routes(browser)
            time_range(browser)
            hover(browser)
            outliers(browser)
            top(browser)
            clients(browser)
            resetting(browser, url)
            overriding(browser, url)
            secrets(browser)
            seeing(browser, pictures, axe)
            stale(browser, gateway, pictures)
        except AssertionError:
            browser.picture(pictures / "failed.png")
            raise
        finally:
            for each in loads:
                each.kill()
                each.wait()
        # After a reload, the page still has its history, its token and its time range.
        browser.open(f"{admin}/")
        browser.until("the past is there at once", lambda: "L" in browser.run(
            "return document.querySelector('#rates .line')?.getAttribute('d') ?? ''"))
        expect("last 5 minutes" in browser.text("#requests figcaption"), "the time range is kept")
        quiet(browser, admin)
        faults(browser, gateway, redis, axe, pictures)
        gateway.process.kill()
        browser.until("it says that the gateway is gone", lambda: "retrying" in browser.text("#status"))
        browser.until("and that the values are old", lambda: browser.text("#stale"))
    print("the dashboard: figures move, the denied are named, inspect, reset and overrides work, axe has no violation; see", pictures)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"not content: {error}")
