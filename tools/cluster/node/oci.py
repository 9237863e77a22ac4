"""Parts of an OCI image layout as a tar archive that containerd imports, and an image of a single program.

Source: https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO, Any

from tools.images.layout import MANIFEST, Layout

NAME = "io.containerd.image.name"
"""The annotation with an image's full name for containerd, which reads the layout's own annotation as a tag."""
_COPY_BYTES = 1 << 20
_COPYING: dict[str, Any] = {"copybufsize": _COPY_BYTES}


def digests(layout: Layout, names: Iterable[str]) -> list[str]:
    """Return the digests of the blobs of images, each once."""
    found = []
    for name in names:
        manifest = layout.manifest(name)
        parts = [manifest["config"], *manifest["layers"]]
        found += [layout.references()[name], *(part["digest"] for part in parts)]
    return list(dict.fromkeys(found))


def write(layout: Layout, names: Collection[str], without: Collection[str], file: IO[bytes]) -> None:
    """Write a layout of the images ``names`` as a tar archive, except the blobs ``without``."""
    held = layout.references()
    manifests = [
        {
            "mediaType": MANIFEST,
            "digest": held[name],
            "size": layout.blob(held[name]).stat().st_size,
            "annotations": {NAME: name},
        }
        for name in names
    ]
    with tarfile.open(fileobj=file, mode="w|", bufsize=_COPY_BYTES, **_COPYING) as archive:
        _add(archive, "oci-layout", {"imageLayoutVersion": "1.0.0"})
        _add(archive, "index.json", {"schemaVersion": 2, "manifests": manifests})
        for digest in digests(layout, names):
            if digest not in without:
                archive.add(layout.blob(digest), f"blobs/{digest.replace(':', '/')}")


def _add(archive: tarfile.TarFile, name: str, content: object) -> None:
    data = json.dumps(content).encode()
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def add_program(layout: Layout, program: Path, name: str, architecture: str) -> None:
    """Add an image ``name`` with one static program as its entrypoint to a layout."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(program.name)
        member.mode, member.size = 0o755, program.stat().st_size
        with program.open("rb") as file:
            archive.addfile(member, file)
    layer = f"sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}"
    layout.write_blob([packed.getvalue()], layer)
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [layer]},
    }
    layout.add(name, json.dumps(config).encode())
