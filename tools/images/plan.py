"""The images, their inputs, and a key that changes with any input."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORED = ("__pycache__", ".egg-info")
"""Suffixes that .dockerignore also excludes."""
LABEL = "dev.rljob.inputs"
"""Label of an image that has its key."""


@dataclass(frozen=True)
class Image:
    """One image.

    Args:
        name: without the prefix ``rljob-``.
        folder: where its Dockerfile is.
        target: stage of the Dockerfile; empty: the last.
        needs: argument of the Dockerfile → image whose name is its value.
        delivered: whether a cluster needs the image; false: only other images need it.
    """

    name: str
    folder: str
    target: str = ""
    needs: Mapping[str, str] | None = None
    delivered: bool = True

    @property
    def dockerfile(self) -> Path:
        """Path of its Dockerfile."""
        return ROOT / self.folder / "Dockerfile"


_LIGHT = {"BUILD": "build"}
_HEAVY = {"BUILD": "build", "TORCH": "torch"}
IMAGES = {
    image.name: image
    for image in (
        Image("build", "tools/images/build", delivered=False),
        Image("torch", "tools/images/torch", needs=_LIGHT, delivered=False),
        Image("operator", "operator", needs=_LIGHT),
        Image("coordinator", "coordinator", "coordinator", _LIGHT),
        Image("runner", "coordinator", "runner", _LIGHT),
        Image("rewards", "reward-services", needs=_LIGHT),
        Image("environments", "env-services", needs=_LIGHT),
        Image("trainer", "trainer-image", needs=_HEAVY),
        Image("rollout", "rollout-image", needs=_HEAVY),
    )
}
"""Name → image; dependencies come first."""
DELIVERED = tuple(name for name, image in IMAGES.items() if image.delivered)


def sources(dockerfile: Path, variant: str) -> Iterator[Path]:
    """Yield the files of the repository that a Dockerfile copies, sorted."""
    text = dockerfile.read_text().replace("${VARIANT}", variant)
    words = {word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in line.split()}
    for path in sorted(ROOT / word for word in words):
        if path.is_file():
            yield path
        else:
            yield from sorted(file for file in path.rglob("*") if file.is_file() and not _ignored(file))


def _ignored(path: Path) -> bool:
    return any(part.endswith(IGNORED) for part in path.relative_to(ROOT).parts)


def key(image: Image, variant: str, base: str) -> str:
    """Return the hash of all inputs of an image, including those of the images that it needs.

    Args:
        image: the image.
        variant: cpu or gpu.
        base: identifier of the base image.
    """
    digest = hashlib.sha256(f"{base}\0{variant}\0{image.target}\0".encode())
    for needed in (image.needs or {}).values():
        digest.update(key(IMAGES[needed], variant, base).encode())
    for path in [image.dockerfile, *sources(image.dockerfile, variant)]:
        mode = path.stat().st_mode & 0o111
        digest.update(f"{path.relative_to(ROOT)}\0{mode}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
