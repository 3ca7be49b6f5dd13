#!/usr/bin/env bash
# changelog.sh VERSION: print the section of a version in CHANGELOG.md without its title. Nothing if it has none.
set -euo pipefail
cd "$(dirname "$0")/.."
awk -v title="## $1 (" 'index($0, "## ") == 1 { found = index($0, title) == 1; next } found' CHANGELOG.md | sed '/./,$!d'
