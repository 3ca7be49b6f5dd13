"""The gateway under test (the real binary on free ports), and shared helpers."""

import re
import subprocess
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The public development certificate for localhost and 127.0.0.1. It is self-signed.
CERTIFICATE = ROOT / "certs/dev.pem"
KEY = ROOT / "certs/dev.key"
# The directory with the npm packages and with copies of the scripts.
NODE = ROOT / "target/clients"


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


class Gateway:
    """A running gateway. `urls` contains the URLs of its listeners in order, `admin` is the URL of the admin listener."""

    def __init__(self, binary, configuration, files=None, enter=None):
        """Start a gateway. `files` maps the names of further files to their contents. The new process calls `enter` first."""
        self.folder = tempfile.TemporaryDirectory()
        for name, text in (files or {}).items():
            (Path(self.folder.name) / name).write_text(text)
        path = Path(self.folder.name) / "gateway.toml"
        path.write_text(configuration)
        self.process = subprocess.Popen([binary, "--config", str(path)], stderr=subprocess.PIPE, text=True, preexec_fn=enter)
        said = ""
        for line in self.process.stderr:
            said += line
            listening = re.search(r"listens on (.*?);", line)
            if listening:
                self.urls = listening[1].split(", ")
                self.admin = re.search(r"admin on (.*?);", line)[1]
                # Keep reading, so that the pipe never fills up.
                threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()
                return
        raise SystemExit(f"the gateway did not start:\n{said}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()
