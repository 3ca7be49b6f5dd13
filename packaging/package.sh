#!/usr/bin/env bash
# package.sh BINARY FOLDER: pack a binary into FOLDER as a tarball, a deb, an rpm and an OCI image, with the Helm chart, the
# SBOM and the checksums. The same commit and binary give the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=$(realpath "$1") dist=$2
stage=target/packaging/stage
version=$(packaging/version.sh)
# `uname -m` names the machine that packs; the binary may be for another one.
machine=$(readelf -h "$binary" | sed -n 's/^ *Machine: *//p')
case $machine in
  *X86-64*) arch=x86_64 debian=amd64 oci=amd64 ;;
  *AArch64*) arch=aarch64 debian=arm64 oci=arm64 ;;
  *) echo "$binary: unknown machine $machine" >&2; exit 1 ;;
esac
if readelf -l "$binary" | grep -q INTERP; then libc=gnu; else libc=musl; fi
triple=$arch-unknown-linux-$libc
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C.UTF-8
umask 022

packaging/stage.sh "$binary" $stage
# With these counts, `make release PROFDATA=` builds the same binary. They may be a file of an earlier run.
if [ -n "${PROFDATA-}" ]; then cp "$PROFDATA" $stage/profdata; fi
mkdir -p "$dist"
rm -f "$dist"/sluicegate[-_]* "$dist/SHA256SUMS"
if [ -n "${PROFDATA-}" ]; then cp $stage/profdata "$dist/sluicegate-$version-$arch.profdata"; fi

# Sorted names, one time, no owner: the archive does not depend on the machine.
name=sluicegate-$version-$triple
mkdir -p $stage/tarball/"$name"
cp -r $stage/sluicegate $stage/man $stage/completions $stage/tarball/"$name"
cp -r README.md LICENSE CHANGELOG.md gateway.toml consumers.toml ops $stage/tarball/"$name"
tar --create --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go=rX,u=rwX \
  --directory=$stage/tarball "$name" | gzip -9n > "$dist/$name.tar.gz"

# A static binary is packed as a tarball only.
if [ $libc = gnu ]; then
  cargo deb --quiet --no-build --no-strip --target "$triple" --deb-version "$(packaging/version.sh deb)" \
    --output "$dist/sluicegate_$(packaging/version.sh deb)_$debian.deb"
  # Gzip: the rpm of systems with an old glibc does not know zstd.
  cargo generate-rpm --payload-compress gzip --arch "$arch" --set-metadata "version = \"$(packaging/version.sh rpm)\"" \
    --source-date "$SOURCE_DATE_EPOCH" --output "$dist/sluicegate-$(packaging/version.sh rpm)-1.$arch.rpm"
  packaging/image.py "$binary" "$oci" "$version" "$dist/sluicegate-$version-$arch.oci.tar"
  packaging/chart.py packaging/chart "$version" "$dist/sluicegate-$version-chart.tgz"
fi
packaging/sbom.sh "$triple" "$dist/sluicegate-$version-$triple.cdx.json"
(cd "$dist" && sha256sum sluicegate[-_]* > SHA256SUMS)
ls -l "$dist"
