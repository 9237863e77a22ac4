"""Imports images into the cluster's containerd; only missing blobs are transferred.

If the layout and containerd's store are on one file system, blobs are linked instead of copied: both name blobs by
digest and never change them. containerd then ingests a blob that is already in its store and reads it only once, to
unpack it. This takes less than half the time and half the disk.
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
"""Attempts of an import: containerd may collect unnamed blobs as garbage during an import; the next one adds them."""


class Images:
    """The images of a containerd.

    ``prefix``: words before each command that enter the mount namespace of the socket. ``store``: path of containerd's
    content as seen by this process, into which blobs are linked.
    """

    def __init__(self, prefix: Sequence[str] = (), store: Path | None = None) -> None:
        self._ctr = (*prefix, *CTR)
        self._blobs = None if store is None else store / "io.containerd.content.v1.content" / "blobs"

    def names(self) -> dict[str, str]:
        """Return the digest of each image."""
        return {name: digest for name, digest in self._list().items() if not name.startswith(_ID)}

    def load(self, layout: Layout, names: Sequence[str]) -> list[str]:
        """Load those of the layout's images ``names`` that are missing or differ; return their names.

        Raises:
            KeyError: the layout lacks one of the images.
            CommandError: containerd returned an error.
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
        """Add the missing blobs of the images to containerd's store."""
        known = self._content()
        for digest in oci.digests(layout, wanted):
            if digest in known:
                continue
            blob = layout.blob(digest)
            if self._blobs is not None:
                with contextlib.suppress(
                    OSError
                ):  # on another file system, or it exists: containerd then copies or keeps it
                    os.link(blob, self._blobs / Path(*digest.split(":")))
            size = f"--expected-size={blob.stat().st_size}"
            with blob.open("rb") as file:
                self._run("content", "ingest", f"--expected-digest={digest}", size, digest, stdin=file)

    def _import(self, layout: Layout, wanted: Sequence[str]) -> None:
        """Name and unpack the images; the archive has the blobs that containerd has collected as garbage since."""
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
        """Remove images that begin with ``prefix``, except ``names``, and images whose name was given to another image.

        Such images remain under the digest of their configuration, a second name that containerd's CRI plugin sets; in
        a cluster with its own disk, the kubelet removes them.
        """
        there = self._list()
        kept = {name: digest for name, digest in there.items() if name in names or not name.startswith((prefix, _ID))}
        gone = [
            name
            for name, digest in there.items()
            if name not in kept and not (name.startswith(_ID) and digest in kept.values())
        ]
        if gone:
            run(*self._ctr, "images", "remove", *gone)  # containerd frees the space later

    def _list(self) -> dict[str, str]:
        """Return the digest of each image under each of its names."""
        found = [line.split() for line in run(*self._ctr, "images", "list").splitlines()[1:]]
        return {name: digest for name, _, digest, *_ in found}
