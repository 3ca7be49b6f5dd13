#!/usr/bin/env bash
# version.sh [deb|rpm|maintainer]: print the version of Cargo.toml, also in the form of a package, or the maintainer.
# A pre-release sorts before its release in both: 1.0.0-rc.1 becomes 1.0.0~rc.1.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
case ${1-} in
  '') echo "$version" ;;
  deb) echo "${version/-/\~}-1" ;;
  rpm) echo "${version/-/\~}" ;;
  maintainer) sed -n 's/^maintainer = "\(.*\)"/\1/p' Cargo.toml ;;
esac
