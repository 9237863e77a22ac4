"""Exports images from the storage of buildah and Podman (https://github.com/containers/storage, driver overlay) to a
layout.

`push` of these engines compresses every layer of every image each time. This module copies only layers that the layout
lacks: the files of a layer are in overlay/ID/diff, and the rest of its tar file is in overlay-layers/ID.tar-split.gz
(https://github.com/vbatts/tar-split). Digests are checked, so a storage with another structure causes an error and not
a broken image.

python -m tools.images.storage ROOT LAYOUT REFERENCE IMAGE_ID   (A separate program: users other than root run it
in `buildah unshare`.)
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.images.layout import Layout

_CHUNK_BYTES = 1 << 20
_FILE, _SEGMENT = 1, 2


def export(root: Path, layout: Layout, reference: str, image: str) -> None:
    """Copy the image with the id ``image`` into ``layout`` under the name ``reference``.

    Raises:
        BrokenLayoutError: the content of a layer does not match its digest.
        KeyError: the storage at ``root`` has no such layer.
        OSError: the storage has no such image.
    """
    key = base64.b64encode(f"sha256:{image}".encode()).decode()
    config = (root / "overlay-images" / image / f"={key}").read_bytes()
    missing = [digest for digest in json.loads(config)["rootfs"]["diff_ids"] if not layout.blob(digest).exists()]
    known = _layers(root) if missing else {}
    for digest in missing:
        layout.write_blob(read_layer(root, known[digest]), digest)
    layout.add(reference, config)


def _layers(root: Path) -> dict[str, str]:
    """Return digest of a layer's tar file → the layer's id in the storage."""
    layers = json.loads((root / "overlay-layers" / "layers.json").read_bytes())
    return {layer["diff-digest"]: layer["id"] for layer in layers if "diff-digest" in layer}


def read_layer(root: Path, layer: str) -> Iterator[bytes]:
    """Yield the tar file of a layer in chunks."""
    files = root / "overlay" / layer / "diff"
    with gzip.open(root / "overlay-layers" / f"{layer}.tar-split.gz") as entries:
        for line in entries:
            entry = json.loads(line)
            if entry["type"] == _SEGMENT:
                yield base64.b64decode(entry["payload"])
            elif entry.get("size"):
                yield from _read(files / _name(entry))


def _name(entry: dict[str, str]) -> str:
    raw = entry.get("name_raw")  # set for names that are not UTF-8
    return os.fsdecode(base64.b64decode(raw)) if raw else entry["name"].lstrip("/")


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


if __name__ == "__main__":
    export(Path(sys.argv[1]), Layout(Path(sys.argv[2])), *sys.argv[3:])
