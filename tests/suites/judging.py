"""Judges the results of all cases: finds violations."""

import json
import socket
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from urllib.parse import quote_from_bytes

from accepted import DECISIONS, STRICTNESS
from exchange import Reader, read
from servers import APPLICATIONS, GATEWAYS, POLICIES

SMUGGLED = b"/smuggled".hex()
PEERS = GATEWAYS[1:]


@dataclass
class Result:
    """The result of one case through one gateway to one application."""

    outcome: object
    # The requests that the application saw, without the additional request after each case.
    seen: list = field(default_factory=list)

    @property
    def forwarded(self):
        return any(record["complete"] for record in self.seen)


def records(path):
    """Return the records of a JSON log with their offsets."""
    if not path.exists():
        return
    offset = 0
    with open(path, "rb") as log:
        for line in log:
            try:
                yield offset, json.loads(line)
            except UnicodeDecodeError:
                # njs writes the bytes of a header unchanged, even if they are not UTF-8.
                yield offset, json.loads(line.decode("latin-1"))
            offset += len(line)


def attribute(path, results, windows):
    """Assign the application's records to cases by the header X-Case, or else by their position in the log."""
    stray = []
    for offset, record in records(path):
        mark = (record["case"] or "").split(",")[0].strip()
        if mark.endswith("-last"):
            continue
        number = int(mark) if mark.isdigit() else None
        if number is None:
            number = next((number for number, (start, end) in windows.items() if start <= offset < end), None)
        (results[number].seen if number in results else stray).append(record)
    return stray


class Reference:
    """A gateway that makes the correct decisions: it gets valid requests with the values that the application saw."""

    def __init__(self, gateway, log):
        self.log = log
        self.ids = {}
        self.port = int(gateway.urls[0].rpartition(":")[2])

    def ask(self, view):
        """Send a request with the values of a view. `answers` returns the decision."""
        if view in self.ids:
            return
        method, path, is_target, host, key, tenant, sid = view
        self.ids[view] = identity = uuid.uuid4().hex
        target = path if is_target else quote_from_bytes(bytes.fromhex(path), safe="/!$&'()*+,;=:@~") or "/"
        version = "1.1" if host is not None else "1.0"
        lines = [f"{method} {target} HTTP/{version}".encode("latin-1"), b"X-Request-Id: " + identity.encode(), b"Connection: close"]
        lines += [b"Host: " + host.encode("latin-1", "replace")] if host is not None else []
        lines += [b"X-Api-Key: " + bytes.fromhex(key)] if key is not None else []
        lines += [b"X-Tenant: " + bytes.fromhex(tenant)] if tenant is not None else []
        if sid is not None:
            value = b"".join(b"%%%02x" % byte if byte < 0x21 or byte in b";\x7f" else bytes([byte]) for byte in bytes.fromhex(sid))
            lines.append(b"Cookie: sid=" + value)
        with socket.create_connection(("127.0.0.1", self.port), 10) as stream:
            stream.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
            read(stream, Reader([method.encode("latin-1")]), 1, time.monotonic() + 10)

    def answers(self):
        """Return the decision for each view, or None if the gateway made no decision."""
        lines = access(self.log)
        return {view: decision(lines.get(identity)) for view, identity in self.ids.items()}


def access(path):
    """Return the access log records by request ID. Wait until the log has stopped growing, because it is written in batches."""
    deadline = time.monotonic() + 5
    size = -1
    while time.monotonic() < deadline:
        now = path.stat().st_size if path.exists() else 0
        if now == size:
            break
        size = now
        time.sleep(0.5)
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["request_id"]: line for line in map(json.loads, lines) if "request_id" in line}


def decision(line):
    """Return the route and the identities in an access log record."""
    if line is None or "route" not in line:
        return None
    return line["route"], {each["limit"]: each["identity"] for each in line.get("limits", [])}


def view(record, upstream, policy):
    """Return the view of the application: the resource and the identities as it saw them. Its path is decoded. With a policy that keeps
    slashes, decoding would lose them, so the path is the one that the application received."""
    host = record["host"]
    # For HTTP/1.0 without Host, the upstream receives its own address as Host.
    if host in (f"127.0.0.1:{upstream}", "127.0.0.1") and "127.0.0.1" not in record.get("sent", ""):
        host = None
    is_target = policy != POLICIES[0]
    path = record["target"].split("?")[0] if is_target else record["path"]
    return (record["method"], path, is_target, host, record["key"], record["tenant"], record["sid"])


class Judge:
    def __init__(self, cases, policy):
        self.cases = cases
        self.policy = policy
        self.failures = []
        self.used = set()

    def fail(self, case, application, what):
        self.failures.append((case, application, what))

    def accepted(self, table, case, name):
        """Return whether a table of accepted differences contains the case. Record the entries that match."""
        found = False
        for number, (pattern, names, _) in enumerate(table):
            if fnmatchcase(case.id, pattern) and name in names:
                self.used.add((id(table), number))
                found = True
        return found

    def requests(self, results):
        """Check requests: no hidden or additional request, no hang, no error of Sluicegate itself, equal body lengths, valid cases succeed."""
        for number, case in enumerate(self.cases):
            lengths = set()
            for application in APPLICATIONS:
                result = results["sluicegate", application][number]
                if any(record["path"] == SMUGGLED for record in result.seen):
                    self.fail(case, application, "the hidden request reached the application")
                if len(result.seen) > case.requests:
                    self.fail(case, application, f"{len(result.seen)} requests reached the application, {case.requests} were sent")
                if result.outcome.end == "hang":
                    self.fail(case, application, "neither a response nor the end of the connection in 5 s")
                if result.outcome.last != (200, True):
                    self.fail(case, application, f"the next request got {result.outcome.last}")
                for status in result.outcome.own:
                    if status in (500, 502, 503, 504):
                        self.fail(case, application, f"Sluicegate's own response was a {status}")
                lengths.add(tuple(record["length"] for record in result.seen if record["complete"]))
            if len(lengths - {()}) > 1:
                self.fail(case, "all", f"applications saw bodies of different lengths: {lengths}")
            if case.honest:
                for (gateway, application), each in results.items():
                    outcome = each[number].outcome
                    if set(outcome.statuses) != {200} or sum(record["complete"] for record in each[number].seen) != case.requests:
                        self.fail(case, application, f"honest, but {gateway} made {outcome.statuses} of it")

    def decisions(self, results, lines, reference, upstreams):
        """Check that Sluicegate decided on the same route, method and identities that the application saw."""
        pending = []
        for application in APPLICATIONS:
            for number, case in enumerate(self.cases):
                for record in results["sluicegate", application][number].seen:
                    line = lines[application].get(record["id"])
                    if line is None:
                        self.fail(case, application, f"no line of the access log for request id {record['id']!r}")
                        continue
                    if "127.0.0.1" in case.data.decode("latin-1"):
                        record["sent"] = "127.0.0.1"
                    asked = view(record, upstreams[application]["sluicegate"], self.policy)
                    reference.ask(asked)
                    pending.append((case, application, record, line, asked))
        answers = reference.answers()
        for case, application, record, line, asked in pending:
            if record["routed"] != line.get("route"):
                self.fail(case, application, f"route {line.get('route')!r}, but the application was told {record['routed']!r}")
            if record["method"] != line["method"]:
                self.fail(case, application, f"method {line['method']!r}, but the application saw {record['method']!r}")
            decided, expected = decision(line), answers[asked]
            if decided == expected or self.accepted(DECISIONS, case, application):
                continue
            differing = [name for name in {**decided[1], **(expected or (0, {}))[1]} if expected is None or decided[1].get(name) != expected[1].get(name)]
            route = "" if expected and expected[0] == decided[0] else f", route {decided[0]!r} instead of {expected and expected[0]!r}"
            self.fail(case, application, f"decided on another {', '.join(differing)}{route} than the application saw: {shown(record)}")

    def strictness(self, results):
        """Check that each case that a peer rejects and Sluicegate forwards is in STRICTNESS."""
        for number, case in enumerate(self.cases):
            forwarded = {gateway: any(results[gateway, application][number].forwarded for application in APPLICATIONS) for gateway in GATEWAYS}
            if case.honest or not forwarded["sluicegate"]:
                continue
            for peer in PEERS:
                if not forwarded[peer] and not self.accepted(STRICTNESS, case, peer):
                    statuses = results[peer, "go"][number].outcome.statuses
                    self.fail(case, "all", f"{peer} rejects it ({statuses or 'closes'}), Sluicegate forwards it")

    def unused(self):
        """Return the entries of the tables that match no difference."""
        for name, table in [("STRICTNESS", STRICTNESS), ("DECISIONS", DECISIONS)]:
            for number, (pattern, names, _) in enumerate(table):
                if (id(table), number) not in self.used:
                    yield f"accepted.{name}: nothing is like {pattern!r} for {names}"


def shown(record):
    parts = {name: bytes.fromhex(record[name]).decode("latin-1") for name in ("path", "key", "tenant", "sid") if record[name] is not None}
    return json.dumps({"method": record["method"], "host": record["host"], **parts, "headers": record["headers"]})[:1500]


def summary(cases, results):
    """Return the final table: the number of cases that each gateway forwarded, rejected, …"""
    rows = []
    for gateway in GATEWAYS:
        count = defaultdict(int)
        for number, case in enumerate(cases):
            mine = [results[gateway, application][number] for application in APPLICATIONS]
            forwarded = any(each.forwarded for each in mine)
            ours = any(results["sluicegate", application][number].forwarded for application in APPLICATIONS)
            count["forwarded"] += forwarded
            count["rejected"] += not forwarded
            count["differing"] += forwarded != ours
            count["smuggled"] += any(len(each.seen) > case.requests or any(record["path"] == SMUGGLED for record in each.seen) for each in mine)
            count["next lost"] += any(each.outcome.last != (200, True) for each in mine)
            count["5xx"] += any(status >= 500 and status != 501 for each in mine for status in each.outcome.statuses)
            count["hangs"] += any(each.outcome.end == "hang" for each in mine)
        rows.append((gateway, count))
    columns = ["forwarded", "rejected", "differing", "smuggled", "next lost", "5xx", "hangs"]
    lines = [f"{len(cases)} cases, {len(APPLICATIONS)} applications", "gateway     " + "".join(f"{name:>11}" for name in columns)]
    lines += [f"{gateway:<12}" + "".join(f"{count[name]:>11}" for name in columns) for gateway, count in rows]
    return "\n".join(lines)
