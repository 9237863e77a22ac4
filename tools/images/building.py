"""Builds missing images and writes them into the OCI layout."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.images import base, engines
from tools.images.engines import Build, Docker, Engine
from tools.images.layout import Layout
from tools.images.plan import IMAGES, LABEL, ROOT, Image, key

REGISTRY_BASE = "docker.io/library/python:3.11-slim"
"""Base image for an engine that fetches images."""
DEBOOTSTRAP = "debootstrap"
"""Value of BASE for a base image that is built here."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """Options of a build; empty values are chosen from the installed programs."""

    names: tuple[str, ...]
    tag: str = "dev"
    registry: str = ""
    variant: str = "cpu"
    base: str = ""
    engine: str = ""


def build(order: Order, cache: Path) -> None:
    """Build the images of ``order`` into the layout ``cache``/oci.

    Raises:
        EngineError, NoBaseError: the message has the remedy.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (cache / "build.log").write_text("")
        engine = engines.find(cache, order.engine)
        try:
            builder = Builder(order, engine, cache)
            for name in order.names:
                builder.deliver(IMAGES[name])
            builder.layout.keep(list(builder.layout.references()))
        finally:
            engine.close()


class Builder:
    """One run of `make images`."""

    def __init__(self, order: Order, engine: Engine, cache: Path) -> None:
        self.layout = Layout(cache / "oci")
        self._order = order
        self._engine = engine
        self._cache = cache

    def deliver(self, image: Image) -> None:
        """Ensure that an image is in the layout, and in the registry if one is named."""
        tag = f"localhost/rljob-{image.name}:{self._order.tag}"
        wanted = self._key(image)
        if self._labels(tag).get(LABEL) == wanted and not self._order.registry:
            _log.info("%s: up to date", tag)
            return
        start = time.monotonic()
        self._build(image, tag, wanted)
        self._engine.export(tag, self.layout)
        _log.info("%s: built in %.0f s", tag, time.monotonic() - start)
        if self._order.registry:
            reference = f"{self._order.registry.rstrip('/')}/rljob-{image.name}:{self._order.tag}"
            self._engine.push(tag, reference)
            _log.info("%s: pushed", reference)

    def _key(self, image: Image) -> str:
        return key(image, self._order.variant, self._base_key)

    def _labels(self, reference: str) -> dict[str, str]:
        try:
            return self.layout.config(reference)["config"].get("Labels") or {}
        except (KeyError, FileNotFoundError):
            return {}

    def _build(self, image: Image, tag: str, wanted: str) -> None:
        arguments = {"BASE": self._base, "VARIANT": self._order.variant}
        arguments |= {name: self._needed(IMAGES[needed]) for name, needed in (image.needs or {}).items()}
        taken = {name: value for name, value in arguments.items() if f"ARG {name}" in image.dockerfile.read_text()}
        with engines.lent(self._apt_sources) as lent:
            self._engine.build(
                Build(image.dockerfile, ROOT, tag, image.target, taken, labels={LABEL: wanted}, lent=lent)
            )

    def _needed(self, image: Image) -> str:
        """Return the name of an image that others are based on; build it if it is missing. The tag is the key."""
        wanted = self._key(image)
        tag = f"localhost/rljob-{image.name}:{wanted[:16]}"
        if not self._engine.id(tag):
            start = time.monotonic()
            self._build(image, tag, wanted)
            _log.info("%s: built in %.0f s", tag, time.monotonic() - start)
        return tag

    @cached_property
    def _release(self) -> base.Release | None:
        """The release of a base image that is built here; None if the base image is fetched."""
        chosen = self._order.base or (REGISTRY_BASE if self._fetches else DEBOOTSTRAP)
        return base.release_here() if chosen == DEBOOTSTRAP else None

    @property
    def _fetches(self) -> bool:
        """Whether the user chose an engine that fetches images, instead of the default one."""
        return isinstance(self._engine, Docker) or self._engine.command[0] == "podman"

    @property
    def _base_key(self) -> str:
        return self._release.key if self._release else self._order.base or REGISTRY_BASE

    @property
    def _apt_sources(self) -> str:
        return self._release.sources if self._release else ""

    @cached_property
    def _base(self) -> str:
        """The name of the base image; it is built if it is missing."""
        if self._release is None:
            return self._order.base or REGISTRY_BASE
        tag = f"localhost/rljob-base:{self._release.key}"
        if not self._engine.id(tag):
            start = time.monotonic()
            engines.install("debootstrap")
            with _context(base.make(self._release, self._cache)) as context:
                self._engine.build(Build(context / "Dockerfile", context, tag))
            _log.info("%s: made in %.0f s", tag, time.monotonic() - start)
        return tag


@contextmanager
def _context(archive: Path) -> Iterator[Path]:
    """Yield a build context for an image that consists of one tar file."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        os.link(archive, Path(scratch, "base.tar"))
        Path(scratch, "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n')
        yield Path(scratch)
