#!/usr/bin/env bash
# sbom.sh TARGET FILE: write the CycloneDX SBOM of the binary: the crates that are compiled into it for TARGET, with their
# versions, licenses and checksums. With SOURCE_DATE_EPOCH it has no random serial number, and no path of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo cyclonedx -qq --format json --spec-version 1.5 --no-build-deps --target "$1" --override-filename sbom
sed "s|path+file://$PWD|path+file:///build|g" sbom.json > "$2"
rm sbom.json
