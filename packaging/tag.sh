#!/usr/bin/env bash
# tag.sh: tag the commit as a release, vVERSION of Cargo.toml, with its section of CHANGELOG.md as the message.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "make tag: $*" >&2; exit 1; }
version=$(packaging/version.sh)
[ -z "$(git status --porcelain)" ] || fail "the work tree has changes: commit them"
git rev-parse --quiet --verify "refs/tags/v$version" > /dev/null && fail "the tag v$version exists: change \`version\` in Cargo.toml"
section=$(packaging/changelog.sh "$version")
[ -n "$section" ] || fail "CHANGELOG.md has no section \`## $version (YYYY-MM-DD)\`: give it the entries of Unreleased"
[ -d "tests/fixtures/$version" ] || fail "tests/fixtures has no $version: run \`make fixtures\`"
# Lines that begin with # are part of the message.
git tag --annotate --cleanup=verbatim --message="Sluicegate $version"$'\n\n'"$section" "v$version"
echo "v$version; push it to start the release workflow: git push origin v$version"
