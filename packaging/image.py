#!/usr/bin/env python3
"""image.py BINARY ARCHITECTURE VERSION FILE: write an OCI image with the binary into a tar archive, without a daemon.

The image has the binary, the libraries that it names, CA certificates, and no shell. `podman load`, `docker load` and
`skopeo` read the archive: it is an OCI image layout with the manifest of `docker save` beside it. All times are
SOURCE_DATE_EPOCH, all names are sorted: the same files give the same bytes.
"""

import datetime
import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile

USER = 65532
EPOCH = int(os.environ["SOURCE_DATE_EPOCH"])
CERTIFICATES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
SECOND = 1_000_000_000


def libraries(binary):
    """Return the libraries and the dynamic linker that a binary needs, by their path in the image."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True)
    if "statically linked" in listed.stdout or "not a dynamic executable" in listed.stderr:
        return {}
    listed.check_returncode()
    found = {}
    for line in listed.stdout.splitlines():
        path = re.search(r"(/\S+) \(0x", line)
        assert path or "linux-vdso" in line, f"{binary}: library not found: {line.strip()}"
        if path:
            found[path[1]] = pathlib.Path(path[1])
    return found


def notices(files):
    """Return the copyright files of the Debian packages that files come from."""
    found = {}
    for file in files:
        # Packages name files in /usr/lib or in /lib.
        names = {str(file), str(file.resolve()), str(file.resolve()).removeprefix("/usr")}
        owners = [subprocess.run(["dpkg", "-S", name], capture_output=True, text=True) for name in sorted(names)]
        packages = {re.split("[:,]", owner.stdout)[0] for owner in owners if owner.returncode == 0}
        for package in packages:
            notice = f"/usr/share/doc/{package}/copyright"
            found[notice] = pathlib.Path(notice)
    return found


# Where engines mount file systems and the configuration: they cannot create these in a read-only root.
MOUNT_POINTS = ["/dev", "/proc", "/sys", "/run", "/tmp", "/etc/sluicegate"]


def layer(files, empty=(), links={}):
    """Return a tar archive of files, path in the image to (content, mode), of empty directories, and of symbolic links."""
    directories = {str(parent) for path in [*files, *links] for parent in pathlib.PurePath(path).parents} | set(empty)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted((directories | set(files) | set(links)) - {"/"}):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mtime = EPOCH
            if path in directories:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if path == "/tmp" else 0o755
                archive.addfile(entry)
            elif path in links:
                entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, links[path]
                archive.addfile(entry)
            else:
                content, entry.mode = files[path]
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def digest(content):
    return hashlib.sha256(content).hexdigest()


def main():
    binary, architecture, version, target = sys.argv[1:]
    needed = libraries(binary)
    system = needed | notices([*needed.values(), CERTIFICATES])
    base = {path: (file.read_bytes(), 0o755 if path in needed else 0o644) for path, file in system.items()}
    base["/etc/ssl/certs/ca-certificates.crt"] = (CERTIFICATES.read_bytes(), 0o644)
    base["/etc/passwd"] = (f"sluicegate:x:{USER}:{USER}:sluicegate:/:/usr/sbin/nologin\n".encode(), 0o644)
    base["/etc/group"] = (f"sluicegate:x:{USER}:\n".encode(), 0o644)
    base["/etc/nsswitch.conf"] = (b"hosts: files dns\n", 0o644)
    program = {
        "/usr/bin/sluicegate": (pathlib.Path(binary).read_bytes(), 0o755),
        "/usr/share/doc/sluicegate/copyright": (pathlib.Path("LICENSE").read_bytes(), 0o644),
    }
    created = datetime.datetime.fromtimestamp(EPOCH, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The name under which Envoy Gateway starts the image of its rate limit service.
    layers = [layer(base, MOUNT_POINTS), layer(program, links={"/bin/ratelimit": "/usr/bin/sluicegate"})]
    compressed = [gzip.compress(each, 9, mtime=0) for each in layers]
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": {
            "User": f"{USER}:{USER}",
            "Env": ["PATH=/usr/bin", "SLUICEGATE_CONFIG=/etc/sluicegate/gateway.toml"],
            "Entrypoint": ["/usr/bin/sluicegate"],
            "WorkingDir": "/etc/sluicegate",
            "ExposedPorts": {"8080/tcp": {}, "9180/tcp": {}},
            "StopSignal": "SIGTERM",
            # `--live`: a gateway that is not ready stops or waits for a certificate, and a new container would not help.
            "Healthcheck": {
                "Test": ["CMD", "/usr/bin/sluicegate", "probe", "--live"],
                "Interval": 10 * SECOND,
                "Timeout": 5 * SECOND,
                "StartPeriod": 10 * SECOND,
            },
            "Labels": {
                "org.opencontainers.image.title": "sluicegate",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest(each)}" for each in layers]},
        "history": [
            {"created": created, "created_by": "libraries and CA certificates of Debian"},
            {"created": created, "created_by": "sluicegate"},
        ],
    }

    def described(media_type, content, **more):
        return {"mediaType": media_type, "digest": f"sha256:{digest(content)}", "size": len(content), **more}

    def encoded(value):
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    config_bytes = encoded(config)
    manifest = encoded({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described("application/vnd.oci.image.config.v1+json", config_bytes),
        "layers": [described("application/vnd.oci.image.layer.v1.tar+gzip", each) for each in compressed],
    })
    name = f"sluicegate:{version}"
    index = encoded({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [described(
            "application/vnd.oci.image.manifest.v1+json",
            manifest,
            platform={"architecture": architecture, "os": "linux"},
            annotations={
                "io.containerd.image.name": f"docker.io/library/{name}",
                "org.opencontainers.image.ref.name": version,
            },
        )],
    })
    blob = "blobs/sha256/{}".format
    saved = encoded([{
        "Config": blob(digest(config_bytes)),
        "RepoTags": [name],
        "Layers": [blob(digest(each)) for each in compressed],
    }])
    files = {blob(digest(each)): (each, 0o644) for each in [config_bytes, manifest, *compressed]}
    files |= {
        "index.json": (index, 0o644),
        "manifest.json": (saved, 0o644),
        "oci-layout": (encoded({"imageLayoutVersion": "1.0.0"}), 0o644),
    }
    pathlib.Path(target).write_bytes(layer({f"/{path}": content for path, content in files.items()}))


main()
