#!/usr/bin/env bash
# stage.sh BINARY FOLDER: lay out what the tarball, the deb and the rpm contain, with the manual pages and completions that
# the binary generates. Times come from SOURCE_DATE_EPOCH.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=$1 stage=$2
rm -rf "$stage"
mkdir -p "$stage"/{completions,man,systemd}
install -m 755 "$binary" "$stage/sluicegate"
"$stage/sluicegate" man "$stage/man"
for shell in bash zsh fish; do "$stage/sluicegate" completions $shell > "$stage/completions/$shell"; done
# The packages create the user, so that TLS keys can be given to it. The unit in ops/ uses a dynamic user.
sed -e 's|/usr/local/bin|/usr/bin|' -e 's/^# A dynamic user .*/# A user that the package creates./' \
  -e '/^DynamicUser=yes$/d' ops/sluicegate.service > "$stage/systemd/sluicegate.service"
sed -e 's|ops/README.md|/usr/share/doc/sluicegate/README.md|' -i "$stage/systemd/sluicegate.service"
cp ops/sluicegate.socket "$stage/systemd/"
mkdir "$stage/compressed"
for page in "$stage"/man/*; do gzip -9nc "$page" > "$stage/compressed/$(basename "$page").gz"; done
# The name of envoyproxy/ratelimit, for the Debian package. cargo-deb skips links without a target.
ln -s sluicegate "$stage/ratelimit"
mkdir "$stage/links"
cp "$stage/compressed/sluicegate-ratelimit.1.gz" "$stage/links"
ln -s sluicegate-ratelimit.1.gz "$stage/links/ratelimit.1.gz"
gzip -9nc CHANGELOG.md > "$stage/changelog.gz"
# Debian's form of the changelog.
gzip -9n > "$stage/changelog.Debian.gz" <<END
sluicegate ($(packaging/version.sh deb)) unstable; urgency=medium

  * See changelog.gz.

 -- $(packaging/version.sh maintainer)  $(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")
END
