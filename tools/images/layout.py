"""An OCI image layout (https://github.com/opencontainers/image-spec, image-layout.md): a directory with images. Layers
are not compressed, and exist once, however many images share them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE = "org.opencontainers.image.ref.name"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


class BrokenLayoutError(RuntimeError):
    """Content does not match its digest."""


@dataclass(frozen=True)
class Layout:
    """The layout in the directory ``path``."""

    path: Path

    def blob(self, digest: str) -> Path:
        """Return the path of a blob, which may not exist."""
        return self.path / "blobs" / digest.replace(":", "/")

    def references(self) -> dict[str, str]:
        """Return name of an image → digest of its manifest."""
        return {entry["annotations"][REFERENCE]: entry["digest"] for entry in self._index()}

    def manifest(self, reference: str) -> dict[str, Any]:
        """Return the manifest of an image; KeyError if it does not exist."""
        return _read(self.blob(self.references()[reference]))

    def config(self, reference: str) -> dict[str, Any]:
        """Return the configuration of an image; KeyError if it does not exist."""
        return _read(self.blob(self.manifest(reference)["config"]["digest"]))

    def layers(self, reference: str) -> list[Path]:
        """Return the tar files of an image's layers, lowest first; KeyError if it does not exist."""
        return [self.blob(layer["digest"]) for layer in self.manifest(reference)["layers"]]

    def write_blob(self, chunks: Iterable[bytes], digest: str) -> None:
        """Write a blob if it is missing.

        Raises:
            BrokenLayoutError: the content does not match ``digest``; it is deleted.
        """
        path = self.blob(digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        sha256 = hashlib.sha256()
        try:
            with new.open("wb") as file:
                for chunk in chunks:
                    sha256.update(chunk)
                    file.write(chunk)
            if f"sha256:{sha256.hexdigest()}" != digest:
                raise BrokenLayoutError(f"the blob {digest} has the digest sha256:{sha256.hexdigest()}")
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)

    def add(self, reference: str, config: bytes) -> None:
        """Name an image whose layers (diff_ids of ``config``) are already written."""
        layers = [self._descriptor(LAYER, digest) for digest in json.loads(config)["rootfs"]["diff_ids"]]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._descriptor(CONFIG, self._write(config)),
            "layers": layers,
        }
        entry = self._descriptor(MANIFEST, self._write(json.dumps(manifest).encode()))
        others = [other for other in self._index() if other["annotations"][REFERENCE] != reference]
        self._write_index([*others, entry | {"annotations": {REFERENCE: reference}}])

    def keep(self, references: Sequence[str]) -> None:
        """Remove all other images and the blobs that only they used."""
        self._write_index([entry for entry in self._index() if entry["annotations"][REFERENCE] in references])
        used = set()
        for entry in self._index():
            manifest = json.loads(self.blob(entry["digest"]).read_bytes())
            used |= {entry["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
        for path in (self.path / "blobs" / "sha256").iterdir():
            if f"sha256:{path.name}" not in used:
                path.unlink()

    def _index(self) -> list[dict[str, Any]]:
        path = self.path / "index.json"
        return json.loads(path.read_bytes())["manifests"] if path.exists() else []

    def _write_index(self, manifests: list[dict[str, Any]]) -> None:
        _replace(self.path / "oci-layout", {"imageLayoutVersion": "1.0.0"})
        _replace(self.path / "index.json", {"schemaVersion": 2, "manifests": manifests})

    def _write(self, content: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.write_blob([content], digest)
        return digest

    def _descriptor(self, media_type: str, digest: str) -> dict[str, Any]:
        return {"mediaType": media_type, "digest": digest, "size": self.blob(digest).stat().st_size}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content


def _replace(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(content))
    new.rename(path)
