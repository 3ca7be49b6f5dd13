#!/usr/bin/env python3
"""Measure what a new user waits for: the seconds and the CPU time from `git clone` to the first response.

    first_minute.py [--tests]

Clones the committed files into an empty folder, with an empty CARGO_HOME, so that cargo downloads all crates. Then runs the
first command of README.md until /hello responds with 200, and with --tests also `make test`. Port 8080 must be free.
"""
import argparse
import os
import pathlib
import re
import resource
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).parent.parent


def cpu_seconds():
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def responds():
    try:
        with urllib.request.urlopen("http://127.0.0.1:8080/hello", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def report(what, started):
    print(f"{what}: {time.monotonic() - started[0]:.0f} s, CPU time {cpu_seconds() - started[1]:.0f} s", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tests", action="store_true", help="also run `make test`")
    options = options.parse_args()
    if responds():
        raise SystemExit("another program responds at 127.0.0.1:8080")
    with tempfile.TemporaryDirectory(prefix="first-minute-") as folder:
        clone = pathlib.Path(folder) / "sluicegate"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CARGO_")}
        environment["CARGO_HOME"] = f"{folder}/cargo"
        started = time.monotonic(), cpu_seconds()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        command = re.search(r"^\$ (cargo run.*)$", (clone / "README.md").read_text(), re.M)[1]
        with open(f"{folder}/log", "w") as log:
            gateway = subprocess.Popen(command.split(), cwd=clone, env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                while not responds():
                    if gateway.poll() is not None:
                        raise SystemExit(pathlib.Path(f"{folder}/log").read_text())
                    time.sleep(0.2)
                waited = time.monotonic() - started[0]
            finally:
                os.killpg(gateway.pid, signal.SIGTERM)
                gateway.wait()
        print(f"{command}: first response after {waited:.0f} s, CPU time {cpu_seconds() - started[1]:.0f} s", flush=True)
        if options.tests:
            started = time.monotonic(), cpu_seconds()
            subprocess.run(["make", "test"], cwd=clone, env=environment, check=True)
            report("make test, after that", started)


if __name__ == "__main__":
    main()
