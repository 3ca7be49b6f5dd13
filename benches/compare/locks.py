#!/usr/bin/env python3
"""Count what workers share: the locked instructions per request, and the cache lines that several workers write.

    locks.py BINARY [--workers 1 2 4 8 16] [--route ROUTE …] [--lines] [--sites]

A locked instruction (the prefix `lock`, or `xchg` with memory) takes the cache line for one core. callgrind counts how
often each instruction runs, and objdump tells which are locked. lackey traces each access to memory, and the trace of the
scheduler of valgrind tells the thread, so that the cache lines of 64 bytes are known that at least two workers write while
requests are served. Both run the threads in turn, so the counts depend neither on the cores nor on the load of the
machine. A short and a long run are counted; their difference does not include the start. `--sites` prints the functions
with the locked instructions. The script prints tables and asserts nothing. It needs valgrind, objdump and redis-server.
"""
import argparse, collections, os, re, subprocess, threading

from instructions import ask, configuration, free_port, servers, started

CONNECTIONS = 32
SHORT, LONG = 10, 60
# A line is shared if at least one of this number of its writes is not by the thread that writes it most often.
MINOR = 20
# Rounds whose accesses to memory are traced.
TRACED = 10
LINE = 64
CASES = [("plain", "memory", "plain"), ("one limit in memory", "memory", "one"), ("one limit in Redis", "redis", "one"), ("denied", "redis", "deny")]


class Run:
    """A gateway under valgrind, with requests on all connections at once."""

    def __init__(self, args, directory, store, route, upstream):
        self.args, self.directory, self.store, self.route, self.upstream = args, directory, store, route, upstream

    def serve(self, valgrind, workers, rounds, on_round=lambda number, gateway: None, **more):
        """Serve `rounds` requests on each connection. `valgrind` are the arguments before the program. `on_round` is called
        with the number of served rounds and the process before each round, and after the last one."""
        port = free_port()
        config = configuration(self.directory, port, self.store, self.route, self.upstream, workers)
        with started([*valgrind, self.args.binary, "--config", config], self.directory, **more) as gateway:
            ask(gateway, port, self.route, rounds, CONNECTIONS, lambda number: on_round(number, gateway))

    def locked(self, workers, rounds):
        """Return how often locked instructions ran, by object and function."""
        out = self.directory / "callgrind.out"
        out.unlink(missing_ok=True)
        self.serve(["valgrind", "--tool=callgrind", "--dump-instr=yes", "--compress-strings=no", "--compress-pos=no", f"--callgrind-out-file={out}"], workers, rounds)
        counts = collections.Counter()
        instructions, binary, function, is_call = 0, "", "", False
        with open(out) as lines:
            for line in lines:
                if line.startswith("0x"):
                    address, _, *cost = line.split()
                    if is_call:
                        # The cost of the called function.
                        is_call = False
                        continue
                    instructions += int(cost[0])
                    if int(address, 16) in locked_addresses(binary):
                        counts[function] += int(cost[0])
                elif line.startswith("ob="):
                    binary = line[3:].rstrip("\n")
                elif line.startswith("fn="):
                    function = line[3:].rstrip("\n")
                elif line.startswith("calls="):
                    is_call = True
        return instructions, counts

    def written(self, workers, rounds):
        """Return the cache lines that at least two threads wrote while requests were served: for each line how often, and by
        which instructions. The first rounds are not counted."""
        read, write = os.pipe()
        # Each access with the instruction before it, and each switch of the thread.
        program = '/^I/ { at = $2; next } /^ [SM] / { print at, $2; next } /acquired lock/ { print }'
        filtered = subprocess.Popen(["awk", program], stdin=read, stdout=subprocess.PIPE, text=True, errors="replace")
        os.close(read)
        writes, state = {}, dict(counts=False, base=0)

        def collect():
            thread = 0
            for line in filtered.stdout:
                if found := re.search(r"SCHED\[(\d+)\]", line):
                    thread = int(found[1])
                elif state["counts"]:
                    at, _, access = line.partition(" ")
                    address, _, size = access.partition(",")
                    first = int(address, 16)
                    for number in {first // LINE, (first + int(size) - 1) // LINE}:
                        threads, sites = writes.setdefault(number, (collections.Counter(), collections.Counter()))
                        threads[thread] += 1
                        sites[at.partition(",")[0]] += 1

        def on_round(number, gateway):
            if number == SHORT:
                maps = open(f"/proc/{gateway.pid}/maps").read()
                state["base"] = min(int(line.split("-")[0], 16) for line in maps.splitlines() if line.endswith(os.path.realpath(self.args.binary)))
            # What is in the pipes belongs to the round before or after.
            state["counts"] = SHORT <= number < rounds

        reader = threading.Thread(target=collect)
        reader.start()
        try:
            command = ["valgrind", "--tool=lackey", "--trace-mem=yes", "--basic-counts=no", "--trace-sched=yes", f"--log-fd={write}"]
            self.serve(command, workers, rounds, on_round, pass_fds=(write,))
        finally:
            os.close(write)
            reader.join()
            filtered.wait()
        shared = {}
        for number, (threads, sites) in writes.items():
            # A line that another thread wrote once has changed its owner, as freed memory does.
            if sum(threads.values()) >= MINOR * (sum(threads.values()) - max(threads.values())) > 0:
                continue
            if len(threads) > 1:
                shared[number] = (sum(threads.values()), [int(site, 16) - state["base"] for site, _ in sites.most_common(3)])
        return shared

    def functions(self, addresses):
        """Return the function at each address of the program, with the functions that are inlined there."""
        command = ["addr2line", "-Cfpi", "-e", self.args.binary, *map(hex, addresses)]
        out = subprocess.run(command, capture_output=True, text=True).stdout
        entries = re.split(r"\n(?! \(inlined by\))", out.strip())
        return [" < ".join(re.sub(r" at \S+:(\d+|\?).*", "", part).replace("(inlined by)", "").strip() for part in entry.splitlines()) for entry in entries]


LOCKED = {}


def locked_addresses(binary):
    """Return the addresses of the locked instructions of a program or library."""
    if binary not in LOCKED:
        LOCKED[binary] = set()
        if os.path.exists(binary):
            listing = subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", binary], stdout=subprocess.PIPE, text=True, errors="replace")
            for line in listing.stdout:
                if "\tlock " in line or "\txchg " in line and "(" in line:
                    LOCKED[binary].add(int(line.split(":")[0], 16))
    return LOCKED[binary]


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary")
    args.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args.add_argument("--route", nargs="+", default=[route for _, _, route in CASES])
    args.add_argument("--sites", action="store_true", help="print the functions with locked instructions, and those that write shared lines")
    args.add_argument("--lines", action="store_true", help="trace accesses to memory, which takes minutes for each row")
    args = args.parse_args()
    with servers(args.binary) as (directory, stores, upstream_port):
        print(f"{'per request':22s} {'workers':>7s} {'instructions':>13s} {'locked':>7s} {'writes to shared lines':>23s}", flush=True)
        for label, store, route in CASES:
            if route not in args.route:
                continue
            for workers in args.workers:
                run = Run(args, directory, stores[store], route, upstream_port)
                (few, before), (many, after) = (run.locked(workers, rounds) for rounds in (SHORT, LONG))
                requests = (LONG - SHORT) * CONNECTIONS
                after.subtract(before)
                shared = run.written(workers, SHORT + TRACED) if args.lines and workers > 1 else {}
                served = TRACED * CONNECTIONS
                total = sum(count for count, _ in shared.values()) / served
                print(f"{label:22s} {workers:7d} {(many - few) / requests:13,.0f} {sum(after.values()) / requests:7.1f} {total:23.2f}", flush=True)
                for line, (count, sites) in sorted(shared.items(), key=lambda item: -item[1][0])[:25]:
                    if args.sites and count / served >= 0.02:
                        print(f"    line {line:x}: {count / served:.2f} writes  {'; '.join(name[:160] for name in run.functions(sites))}", flush=True)
                if args.sites:
                    for function, count in after.most_common(25):
                        if count / requests >= 0.05:
                            print(f"    {count / requests:6.2f}  {function[:150]}", flush=True)


if __name__ == "__main__":
    main()
