#!/usr/bin/env python3
"""Count the cache misses of a request by the number of client connections, with the cache simulation of callgrind.

    cache.py BINARY [--connections 64 512 4096] [--route plain] [--sites]

The gateway has one worker. In each round, all connections send a request at the same time, as under load, so that all
requests of a round are in flight together. A short and a long run are counted, and their difference does not include the
start. The simulated caches have the sizes of an AMD EPYC: 32 KiB and 1 MiB for each core, and 32 MiB for all cores. The
kernel is not simulated. `--sites` prints the functions with the most misses of the 1 MiB cache. The script prints a table
and asserts nothing. It needs valgrind and redis-server.
"""
import argparse, collections, re

from instructions import ask, configuration, free_port, servers, started

SHORT, LONG = 2, 6
CACHES = ["--I1=32768,8,64", "--D1=32768,8,64"]
L2, L3 = "--LL=1048576,16,64", "--LL=33554432,16,64"


def misses(args, directory, store, route, upstream, connections, rounds, last_level):
    """Return the events of a gateway that serves `rounds` requests on each connection, and the misses by function."""
    port = free_port()
    config = configuration(directory, port, store, route, upstream)
    out = directory / "callgrind.out"
    out.unlink(missing_ok=True)
    valgrind = ["valgrind", "--tool=callgrind", "--cache-sim=yes", *CACHES, last_level, f"--callgrind-out-file={out}", "--compress-strings=no"]
    with started([*valgrind, args.binary, "--config", config], directory) as gateway:
        ask(gateway, port, route, rounds, connections)
    return read_profile(out)


def read_profile(path):
    """Return the total of each event of a callgrind profile, and the misses of the last cache by function."""
    functions, totals, names, is_call, function = collections.Counter(), collections.Counter(), [], False, ""
    with open(path) as lines:
        for line in lines:
            if line.startswith("events:"):
                names = line.split()[1:]
            elif line.startswith("fn="):
                function = line[3:].rstrip("\n")
            elif line.startswith("calls="):
                is_call = True
            elif re.match(r"[+\-*\d]", line):
                if is_call:
                    # The cost of the called function.
                    is_call = False
                    continue
                cost = dict(zip(names, map(int, line.split()[1:])))
                totals.update(cost)
                functions[function] += cost.get("DLmr", 0) + cost.get("DLmw", 0)
    return totals, functions


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary")
    args.add_argument("--connections", type=int, nargs="+", default=[64, 512, 4096])
    args.add_argument("--route", default="plain")
    args.add_argument("--sites", action="store_true", help="print the functions with the most misses of the 1 MiB cache")
    args = args.parse_args()
    with servers(args.binary) as (directory, stores, upstream_port):
        print(f"{'connections':>11s} {'instructions':>13s} {'accesses':>9s} {'of 32 KiB':>10s} {'of 1 MiB':>9s} {'of 32 MiB':>10s}  data misses per request", flush=True)
        for connections in args.connections:
            count = (LONG - SHORT) * connections
            found = {}
            for last_level in (L2, L3):
                run = (args, directory, stores["redis"], args.route, upstream_port, connections)
                (few, before), (many, after) = (misses(*run, rounds, last_level) for rounds in (SHORT, LONG))
                many.subtract(few)
                after.subtract(before)
                found[last_level] = {event: total / count for event, total in many.items()}, after
            (at, functions), (far, _) = found[L2], found[L3]
            print(f"{connections:11,d} {at['Ir']:13,.0f} {at['Dr'] + at['Dw']:9,.0f} {at['D1mr'] + at['D1mw']:10.1f} {at['DLmr'] + at['DLmw']:9.1f} "
                  f"{far['DLmr'] + far['DLmw']:10.1f}", flush=True)
            if args.sites:
                for function, total in functions.most_common(40):
                    print(f"    {total / count:7.2f}  {function[:170]}", flush=True)


if __name__ == "__main__":
    main()
