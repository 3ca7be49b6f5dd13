#!/usr/bin/env python3
"""Mutated HTTP/1.1 requests, sent through gateways to real applications: `make test-suites`. The requests are sent through Sluicegate
with each path policy, and through the other gateways once.

    suites.py BINARY FOLDER [PATTERN]

FOLDER contains the tools that the Makefile installs there. PATTERN has the syntax of `fnmatch` and selects cases by `group: name`. The
output of each gateway and application stays in FOLDER/run. Exits with 1 if a case fails.
"""

import shutil
import sys
import threading
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import exchange
import judging
import servers
from cases import MARK, corpus, request

# Maximum number of failures printed.
PRINTED = 200


def lane(port, cases, log, results, windows):
    """Run all cases through one gateway to one application, one after the other."""
    for number, case in enumerate(cases):
        # The number has the same length as the placeholder, so that body lengths do not change.
        mark = b"%0*d" % (len(MARK), number)
        start = log.stat().st_size if log.exists() else 0
        last = request(target=b"/last", lines=()).replace(MARK, mark + b"-last")
        results[number] = judging.Result(exchange.run(port, case.data.replace(MARK, mark), case.method, case.requests, case.alone, last, mark + b"-last"))
        windows[number] = (start, log.stat().st_size if log.exists() else 0)


def run(binary, tools, cases, policy):
    folder = tools / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    upstreams = servers.applications(folder, tools, tools / "bin")
    ports, ours = servers.gateways(binary, folder, tools / "bin", upstreams, policy)
    results, windows, threads = {}, {}, []
    for gateway in ports:
        for application in servers.APPLICATIONS:
            pair = gateway, application
            results[pair], windows[pair] = {}, {}
            log = folder / f"{upstreams[application][gateway]}.log"
            threads.append(threading.Thread(target=lane, args=(ports[gateway][application], cases, log, results[pair], windows[pair])))
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{policy}: {len(cases)} cases in {time.monotonic() - began:.0f} s", flush=True)
    judge = judging.Judge(cases, policy)
    for pair, each in results.items():
        if len(each) < len(cases):
            raise SystemExit(f"{pair}: only {len(each)} of {len(cases)} cases were run")
        for record in judging.attribute(folder / f"{upstreams[pair[1]][pair[0]]}.log", each, windows[pair]):
            if pair[0] == "sluicegate":
                judge.failures.append((None, pair[1], f"a request of no case: {record}"))
    gateway = servers.sluicegate(binary, servers.configuration(folder, "reference", None, policy))
    reference = judging.Reference(gateway, folder / "access.reference.log")
    lines = {application: judging.access(folder / f"access.{application}.log") for application in servers.APPLICATIONS}
    judge.requests(results)
    judge.decisions(results, lines, reference, upstreams)
    if policy == servers.POLICIES[0]:
        judge.strictness(results)
    for application, gateway in ours.items():
        if gateway.process.poll() is not None:
            judge.failures.append((None, application, f"the gateway has ended: {gateway.process.returncode}"))
    return judge, results


def main():
    binary, folder, *pattern = sys.argv[1:]
    cases = [case for case in corpus() if fnmatchcase(case.id, (pattern or ["*"])[0])]
    failed = sum(fails(binary, folder, cases, policy, bool(pattern)) for policy in servers.POLICIES)
    if failed:
        sys.exit(f"{failed} failures")
    print("no failures")


def fails(binary, folder, cases, policy, is_part):
    """Run the cases with a path policy. Print the failures and return their number."""
    try:
        judge, results = run(binary, Path(folder).resolve(), cases, policy)
    finally:
        servers.stop()
    for case, application, what in judge.failures[:PRINTED]:
        print(f"FAILED {case.id if case else '-'} [{policy}, {application}]: {what}")
        if case:
            print(f"       {case.data[:600].decode('latin-1').encode('unicode_escape').decode()}{' …' if len(case.data) > 600 else ''}")
    # If a pattern selects cases, the other cases use no entries of the tables. The tables belong to the first policy.
    unused = [] if is_part or policy != servers.POLICIES[0] else list(judge.unused())
    for line in unused:
        print(f"FAILED {line}")
    if policy == servers.POLICIES[0]:
        print(judging.summary(cases, results))
    groups = Counter(case.group if case else "-" for case, _, _ in judge.failures)
    if judge.failures or unused:
        print(f"{policy}: {len(judge.failures) + len(unused)} failures: {dict(groups)}")
    return len(judge.failures) + len(unused)


if __name__ == "__main__":
    main()
