"""The gateway under test: the real binary on free ports, and shared helpers."""

import re
import subprocess
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The published development certificate for localhost and 127.0.0.1, which is its own CA.
CERTIFICATE = ROOT / "certs/dev.pem"
KEY = ROOT / "certs/dev.key"
# The directory with npm packages and copies of the scripts.
NODE = ROOT / "target/clients"


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


class Gateway:
    """A running gateway. `urls` has its listeners in order, `admin` is the admin listener."""

    def __init__(self, binary, configuration, files=None):
        """`files` are the contents of the files that the configuration names."""
        self.folder = tempfile.TemporaryDirectory()
        for name, text in (files or {}).items():
            (Path(self.folder.name) / name).write_text(text)
        path = Path(self.folder.name) / "gateway.toml"
        path.write_text(configuration)
        self.process = subprocess.Popen([binary, "--config", str(path)], stderr=subprocess.PIPE, text=True)
        said = ""
        for line in self.process.stderr:
            said += line
            listening = re.search(r"listens on (.*?);", line)
            if listening:
                self.urls = listening[1].split(", ")
                self.admin = re.search(r"admin on (.*?);", line)[1]
                # Keep reading, so that the pipe never fills.
                threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()
                return
        raise SystemExit(f"the gateway did not start:\n{said}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()
