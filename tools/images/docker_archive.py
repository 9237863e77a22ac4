"""Writes the output of `docker save` into a layout.

Its manifest.json has the same form for all versions of Docker; the paths of the files that it names differ."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tools.images.layout import Layout

_CHUNK_BYTES = 1 << 20


def add(archive: Path, layout: Layout, reference: str) -> None:
    """Put the one image of ``archive`` into ``layout`` under the name ``reference``."""
    with tarfile.open(archive) as members:
        (entry,) = json.loads(_file(members, "manifest.json").read())
        config = _file(members, entry["Config"]).read()
        for name, digest in zip(entry["Layers"], json.loads(config)["rootfs"]["diff_ids"], strict=True):
            if not layout.blob(digest).exists():
                layout.write_blob(_plain(_file(members, name)), digest)
        layout.add(reference, config)


def _file(members: tarfile.TarFile, name: str) -> IO[bytes]:
    file = members.extractfile(name)  # follows links: old versions link equal layers
    assert file is not None, name
    return file


def _plain(file: IO[bytes]) -> Iterator[bytes]:
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    with gzip.GzipFile(fileobj=file) if compressed else file as source:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk
