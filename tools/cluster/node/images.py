"""Imports images into the cluster's containerd; only missing blobs are transferred.

Blobs are not copied where the layout and containerd's store are on one file system: they are linked, as both name them
by their digest and neither ever changes one. containerd is then told of a blob that its store has already, and so reads
it no more than once, to unpack it. That is less than half the time and half the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO

from tools.cluster.node import oci
from tools.cluster.node.machine import PATH
from tools.cluster.node.system import CommandError, failure, run
from tools.images.layout import Layout

CTR = ("ctr", "--namespace", "k8s.io")
_ID = "sha256:"
_log = logging.getLogger(__name__)


IMPORTS = 3
"""What nothing names yet containerd may collect as garbage just when an import counts on it; the next one brings it."""


class Images:
    """The images of a containerd.

    ``way`` is put before commands to get to where its socket is seen; ``store`` is where its content lies, as seen from
    here, for blobs to be linked to.
    """

    def __init__(self, way: Sequence[str] = (), store: Path | None = None) -> None:
        self._ctr = (*way, *CTR)
        self._blobs = None if store is None else store / "io.containerd.content.v1.content" / "blobs"

    def names(self) -> dict[str, str]:
        """Return the digest of each image."""
        return {name: digest for name, digest in self._list().items() if not name.startswith(_ID)}

    def load(self, layout: Layout, names: Sequence[str]) -> list[str]:
        """Bring in those of the layout's images ``names`` that are not there, or are others; return their names.

        Raises:
            KeyError: the layout does not have one of them.
            CommandError: containerd refused.
        """
        there, held = self.names(), layout.references()
        wanted = sorted(name for name in names if there.get(name) != held[name])
        if not wanted:
            return []
        start = time.monotonic()
        self._ingest(layout, wanted)
        for tries in range(1, IMPORTS + 1):
            try:
                self._import(layout, wanted)
                break
            except CommandError:
                if tries == IMPORTS:
                    raise
        _log.info("loaded %s in %.1f s", ", ".join(wanted), time.monotonic() - start)
        return wanted

    def _ingest(self, layout: Layout, wanted: Sequence[str]) -> None:
        """Make the images' blobs known that are not."""
        known = self._content()
        for digest in oci.digests(layout, wanted):
            if digest in known:
                continue
            blob = layout.blob(digest)
            if self._blobs is not None:
                with contextlib.suppress(OSError):  # on another file system, or there already: containerd decides
                    os.link(blob, self._blobs / Path(*digest.split(":")))
            size = f"--expected-size={blob.stat().st_size}"
            with blob.open("rb") as file:
                self._run("content", "ingest", f"--expected-digest={digest}", size, digest, stdin=file)

    def _import(self, layout: Layout, wanted: Sequence[str]) -> None:
        """Make the images known and unpack them; blobs that were forgotten since, as nothing named them, come along."""
        with tempfile.TemporaryFile() as file:
            oci.write(layout, wanted, self._content(), file)
            file.seek(0)
            self._run("images", "import", "-", stdin=file)

    def _content(self) -> set[str]:
        return set(run(*self._ctr, "content", "list", "--quiet").split())

    def _run(self, *command: str, stdin: IO[bytes]) -> None:
        done = subprocess.run((*self._ctr, *command), stdin=stdin, capture_output=True, env={"PATH": PATH})
        if done.returncode != 0:
            raise CommandError(failure(("ctr", *command), done.returncode, done.stderr))

    def keep(self, names: Collection[str], prefix: str) -> None:
        """Remove the images that begin with ``prefix``, but for ``names``, and those whose name another one has now.

        The latter remain under the digest of their configuration, a second name that the kubelet's side of containerd
        gives; in a cluster whose disk is its own, the kubelet removes them.
        """
        there = self._list()
        kept = {name: digest for name, digest in there.items() if name in names or not name.startswith((prefix, _ID))}
        gone = [
            name
            for name, digest in there.items()
            if name not in kept and not (name.startswith(_ID) and digest in kept.values())
        ]
        if gone:
            run(*self._ctr, "images", "remove", *gone)  # their room is given free in a while

    def _list(self) -> dict[str, str]:
        """Return the digest of each image under each of its names."""
        found = [line.split() for line in run(*self._ctr, "images", "list").splitlines()[1:]]
        return {name: digest for name, _, digest, *_ in found}
