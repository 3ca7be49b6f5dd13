"""A headless Chromium, driven by the WebDriver protocol (W3C) over plain HTTP."""

import base64
import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# Maximum time to wait in seconds, long enough for a busy machine. A wait ends as soon as its condition is true.
PATIENCE = 40
# The key of element references in the WebDriver protocol.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]


class Browser:
    """A browser window that records its console messages and network requests."""

    def __init__(self, flags=()):
        """Start a browser with further command line flags."""
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.driver.stdout:
            started = re.search(r"started successfully on port (\d+)", line)
            if started:
                break
        else:
            raise SystemExit("chromedriver did not start")
        self.session = f"http://127.0.0.1:{started[1]}/session"
        options = {"binary": "/usr/bin/chromium", "args": [*FLAGS, *flags, f"--user-data-dir={self.profile.name}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        answer = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.session += f"/{answer['sessionId']}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
            self.profile.cleanup()

    def call(self, method, path, body=None):
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.session + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path} {body}: {json.load(error)['value']['message']}") from None

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """Run a script. Return its result. If the result is a promise, wait for its value."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector):
        return self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def type(self, selector, text):
        element = self.find(selector)
        self.call("POST", f"/element/{element}/clear")
        self.call("POST", f"/element/{element}/value", {"text": text})

    def press(self, *keys):
        """Press keys, one after the other, on the element that has the focus."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def click(self, selector):
        self.call("POST", f"/element/{self.find(selector)}/click")

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def rows(self, table):
        """Return the cells of each row of a table."""
        return self.run("return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
                        ".map((row) => [...row.cells].map((cell) => cell.innerText))", table)

    def until(self, what, done):
        """Wait until `done` returns a true value. Return this value."""
        end = time.monotonic() + PATIENCE
        while True:
            found = done()
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"gave up waiting: {what}; the page says:\n{self.text('body')}")
            time.sleep(0.1)

    def see_as(self, scheme, width, height=900):
        """Emulate a dark or light colour scheme on a screen of this width."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", {"features": [feature]})
        self.width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def devtools(self, command, parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def picture(self, path):
        """Write a screenshot of the whole page."""
        height = self.devtools("Page.getLayoutMetrics", {})["cssContentSize"]["height"]
        whole = {"x": 0, "y": 0, "width": self.width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": whole})
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def log(self, kind):
        """Return the console messages since the last call."""
        return self.call("POST", "/se/log", {"type": kind})
