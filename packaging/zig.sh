#!/usr/bin/env bash
# zig, with the linker option that rustc passes for an instrumented build: `-u SYMBOL`. `zig cc` knows only `-Wl,-u,SYMBOL`.
arguments=()
while [ $# -gt 0 ]; do
  if [ "$1" = -u ] && [ $# -gt 1 ]; then arguments+=("-Wl,-u,$2"); shift; else arguments+=("$1"); fi
  shift
done
exec "$(dirname "$0")"/python/lib/python3*/site-packages/ziglang/zig "${arguments[@]}"
