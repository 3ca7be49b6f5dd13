#!/usr/bin/env python3
"""chart.py FOLDER VERSION FILE: pack a Helm chart. Chart.yaml gets the version; names are sorted, times are SOURCE_DATE_EPOCH."""

import gzip
import io
import os
import pathlib
import sys
import tarfile

folder, version, target = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
out = io.BytesIO()
with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.name == "Chart.yaml":
            content = content.replace(b"0.0.0", version.encode())
        entry = tarfile.TarInfo(f"sluicegate/{path.relative_to(folder)}")
        entry.mtime, entry.size, entry.mode = int(os.environ["SOURCE_DATE_EPOCH"]), len(content), 0o644
        archive.addfile(entry, io.BytesIO(content))
target.write_bytes(gzip.compress(out.getvalue(), 9, mtime=0))
