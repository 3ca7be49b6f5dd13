"""Independent parsers read RateLimit headers: http_sfv, urllib3, and npm packages (fields.mjs)."""

import json
import subprocess
import threading

import http_sfv
import urllib3

from gateway import NODE, expect

# Each route has its own limits.
DIALECTS = ["ietf", "draft-11", "draft-07", "draft-03", "github"]
PATIENT = {
    "token-bucket": 'quota = "2/2s"\nburst = 2',
    "fixed-window": 'quota = "2/2s"\nalgorithm = "fixed-window"',
    "first-request": 'quota = "2/2s"\nalgorithm = "fixed-window"\nstart = "first-request"',
    "sliding-window": 'quota = "2/2s"\nalgorithm = "sliding-window"',
    "sliding-buckets": 'quota = "2/2s"\nalgorithm = "sliding-buckets"',
    "sliding-log": 'quota = "2/2s"\nalgorithm = "sliding-log"',
}
# The number of requests per limit in PATIENT: enough for several waits.
REQUESTS = 10


def configuration():
    parts = []

    def route(name, limits, extra=""):
        parts.append(
            f'[[route]]\nname = "{name}"\npath = "/{name}"\nrespond = {{ status = 200 }}\nlimits = {json.dumps(limits)}\n{extra}\n'
        )

    # `narrow` is the limit that is reported and violated. The headers list the other limits as well.
    parts.append('[limit.narrow]\nby = ["ip", "route"]\nquota = "3/15m"\nalgorithm = "sliding-log"\n')
    parts.append('[limit.broad]\nby = ["ip", "route"]\nquota = "1000/hour"\n')
    parts.append('[limit.month]\nby = ["ip", "route"]\nquota = "100000/month"\nalgorithm = "fixed-window"\n')
    parts.append('[limit.words]\nby = "route"\nquota = "500/hour"\nunit = "tokens"\n')
    parts.append('[limit.guard]\nby = "route"\nquota = "1000/hour"\nannounce = false\n')
    parts.append('[limit.open]\nby = "route"\nquota = "5"\nalgorithm = "concurrency"\n')
    route("units", ["broad", "words", "guard", "open"])
    for dialect in DIALECTS:
        for reader in ("python", "node"):
            route(f"{reader}-{dialect}", ["narrow", "broad", "month"], f'ratelimit_headers = ["{dialect}"]')
    for name, limit in PATIENT.items():
        parts.append(f'[limit.{name}]\nby = "ip"\n{limit}\n')
        route(name, [name])
    return "\n".join(parts)


def items(value):
    """Return the names and the parameters of a structured-field list."""
    parsed = http_sfv.List()
    parsed.parse(value.encode())
    for item in parsed:
        # http_sfv parses a token of RFC 9651 as a subclass of str, so compare the exact type.
        expect(type(item.value) is str, f"names are strings: {value}")
        kinds = {name: str if name == "qu" else int for name in item.params}
        expect({name: type(one) for name, one in item.params.items()} == kinds, f"types of parameters: {value}")
    return {item.value: dict(item.params) for item in parsed}


def structured_fields(pool, address):
    """Check that http_sfv parses RateLimit and RateLimit-Policy, and that they agree with the status, Retry-After and the body."""
    policy = {"narrow": {"q": 3, "w": 900}, "broad": {"q": 1000, "w": 3600}, "month": {"q": 100000}}
    for number in range(5):
        reply = pool.request("GET", f"{address}/python-ietf", retries=False)
        fields = reply.headers
        expect(items(fields["ratelimit-policy"]) == policy, f"the policy: {fields['ratelimit-policy']}")
        standing = items(fields["ratelimit"])
        expect(all(set(parameters) == {"r", "t"} for parameters in standing.values()), f"r and t: {standing}")
        expect(reply.status == (200 if number < 3 else 429), f"status {reply.status} of request {number}")
        if reply.status == 200:
            expect(set(standing) == set(policy), f"all limits are listed: {standing}")
            expect(standing["narrow"]["r"] == 2 - number, f"what is left: {standing}")
            expect(standing["month"]["r"] == 99999 - number, f"what is left of the month: {standing}")
        else:
            problem = json.loads(reply.data)
            expect(list(standing) == problem["violated-policies"] == ["narrow"], f"the violated: {standing}, {problem}")
            longest = max(parameters["t"] for parameters in standing.values())
            expect(fields["retry-after"] == str(longest), f"Retry-After {fields['retry-after']} and t={longest}")
            expect(890 <= longest <= 900, f"the wait: {longest}")
    fields = pool.request("GET", f"{address}/units", retries=False).headers
    words, in_flight = {"q": 500, "qu": "tokens", "w": 3600}, {"q": 5, "qu": "concurrent-requests"}
    policy = {"broad": {"q": 1000, "w": 3600}, "words": words, "open": in_flight}
    expect(items(fields["ratelimit-policy"]) == policy, f"units: {fields['ratelimit-policy']}")
    expect(set(items(fields["ratelimit"])) == set(policy), f"without the hidden one: {fields['ratelimit']}")


def patience(pool, address, name, waits, failures):
    """Check that urllib3 waits for Retry-After, and that no request gets a second 429."""
    retries = urllib3.Retry(
        total=5, status_forcelist=[429], respect_retry_after_header=True, backoff_factor=0, raise_on_status=False
    )
    try:
        for number in range(REQUESTS):
            reply = pool.request("GET", f"{address}/{name}", retries=retries)
            statuses = [attempt.status for attempt in reply.retries.history] + [reply.status]
            expect(statuses in ([200], [429, 200]), f"statuses of request {number}: {statuses}")
            waits[name] = waits.get(name, 0) + statuses.count(429)
        expect(waits[name] >= 3, f"denied {waits[name]} times only")
    except Exception as error:  # the thread cannot raise to its caller
        failures.append(f"{name}: {error}")


def check(clear, _tls):
    pool = urllib3.PoolManager(maxsize=len(PATIENT))
    structured_fields(pool, clear)
    subprocess.run(["node", "fields.mjs", clear, *DIALECTS], check=True, cwd=NODE)

    waits, failures = {}, []
    threads = [threading.Thread(target=patience, args=(pool, clear, name, waits, failures)) for name in PATIENT]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(not failures, "urllib3: " + "; ".join(failures))
    counts = ", ".join(f"{name} {count}" for name, count in sorted(waits.items()))
    return (
        f"http_sfv {http_sfv.__version__}: RateLimit and RateLimit-Policy of 200 and 429, Retry-After, body\n"
        f"urllib3 {urllib3.__version__}: after every 429 the next try was a 200; waits: {counts}"
    )
