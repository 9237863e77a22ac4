"""Operations on the machine's one real cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tools.cluster import build
from tools.cluster.client import Api
from tools.cluster.node import life
from tools.cluster.node.images import Images
from tools.cluster.node.place import USUAL, outside
from tools.cluster.node.real import LOCAL, Cluster
from tools.images.layout import Layout


class Node(Cluster):
    """The cluster. As a context manager it starts the cluster unless one runs, and stops a cluster that it started."""

    def __init__(self, cluster: str = USUAL) -> None:
        self._place = outside(cluster)
        self.context = self._place.name
        self._tether: int | None = None

    # --- start and stop -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        try:
            started = life.start(self._place, reading)
        finally:
            os.close(reading)
        if not started:
            os.close(writing)
            return self.attach()
        self._tether = writing  # if this process is killed, the cluster ends too
        try:
            return self.attach()
        except BaseException:  # including Ctrl-C: the started cluster must not remain
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "api"):
            self.api.close()
        if self._tether is not None:
            life.stop(self._place)
            os.close(self._tether)
            self._tether = None

    @property
    def runs(self) -> bool:
        """Whether a cluster runs."""
        return life.running(self._place) is not None

    def start(self, wait: bool = True) -> Self:
        """Start the cluster unless one runs; it outlives this process, until :meth:`stop`."""
        life.start(self._place)
        return self.attach() if wait else self

    def attach(self) -> Self:
        """Connect to the running cluster when it is ready.

        Raises:
            NoClusterError: no cluster runs.
        """
        life.wait(self._place)
        place = self._place
        self.bin = build.ensure("controlplane")
        self.directory, self.kubeconfig = place.state, place.kubeconfig
        self.authority = place.state / "certificates" / "apiserver.crt"
        config = json.loads(self.kubeconfig.read_text())
        self.url = config["clusters"][0]["cluster"]["server"]
        address = urlsplit(self.url)
        assert address.hostname is not None and address.port is not None
        self.api = Api(address.hostname, address.port, self.authority, config["users"][0]["user"]["token"])
        return self

    def stop(self) -> bool:
        """Stop the cluster, whichever process started it; return whether one ran."""
        return life.stop(self._place)

    # --- contents -----------------------------------------------------------------------------------------------------

    def load(self, layout: Path, references: Sequence[str]) -> list[str]:
        """Load images of an OCI layout directory into the cluster; return the names of those that were missing.

        Raises:
            KeyError: the layout lacks one of the images.
        """
        return self._runtime().load(Layout(layout), references)

    def images(self) -> dict[str, str]:
        """Return the digest of each image in the cluster."""
        return self._runtime().names()

    def keep(self, references: Sequence[str]) -> None:
        """Remove all loaded images except these, also from the cache of later clusters."""
        self._runtime().keep(references, f"{LOCAL}/rljob-")

    def _runtime(self) -> Images:
        init = life.running(self._place)
        if init is None:
            raise life.NoClusterError("no cluster runs")
        return Images(("nsenter", "--target", str(init), "--mount"), self._place.content)
