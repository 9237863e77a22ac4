"""Existing clusters, which can be used instead of a started one.

Tests delete objects and drain nodes, so a cluster is used only if RLJOB_E2E_CONTEXT names its context, or if it is
requested and its context has the name of a kind cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.cluster import build
from tools.cluster.client import Api
from tools.cluster.node import oci
from tools.cluster.node.real import LOCAL, Cluster
from tools.cluster.processes import ResourceStack
from tools.images.layout import Layout

ALLOWED = "RLJOB_E2E_CONTEXT"
REGISTRY = "RLJOB_E2E_REGISTRY"
KIND = "kind-"


class NotAllowedError(RuntimeError):
    """A cluster may not be used for tests; the message has the remedy."""


def context(asked: str | None = None) -> str | None:
    """Return the context to use, or None if no existing cluster is selected.

    Raises:
        NotAllowedError: the requested context is not allowed.
    """
    named = os.environ.get(ALLOWED) or None
    if asked is None or asked == named or asked.startswith(KIND):
        return asked or named
    raise NotAllowedError(
        f"the cluster of context {asked} is not used, because tests delete objects and drain nodes: set "
        f"{ALLOWED}={asked} if it is a test cluster"
    )


class Existing(ResourceStack, Cluster):
    """The cluster of a context in the user's kubeconfig; a context manager."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.context = name
        self._kind = name.removeprefix(KIND) if name.startswith(KIND) else None
        self.registry = LOCAL if self._kind else os.environ.get(REGISTRY, "")

    def _open(self) -> None:
        self.bin = build.ensure("controlplane")
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-context-")))
        self.kubeconfig = self.directory / "kubeconfig"
        view = ("config", "view", "--minify", "--flatten", f"--context={self.context}")
        done = subprocess.run([self.bin / "kubectl", *view, "--raw"], capture_output=True, text=True)
        if done.returncode != 0:
            raise NotAllowedError(f"there is no context {self.context}: {done.stderr.strip()}")
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(done.stdout)
        self.api = self._proxy()

    def _proxy(self) -> Api:
        """Return a client of `kubectl proxy`, which supports every kind of credentials."""
        process = self._stack.enter_context(
            subprocess.Popen(
                [self.bin / "kubectl", "proxy", "--port=0", f"--kubeconfig={self.kubeconfig}"],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._stack.callback(process.kill)
        assert process.stdout is not None
        found = re.search(r"(\S+):(\d+)$", process.stdout.readline().strip())
        assert found, "kubectl proxy did not print its address"
        api = Api(found[1], int(found[2]))
        self._stack.callback(api.close)
        return api

    def load(self, layout: Path, references: Sequence[str]) -> list[str]:
        """Load images of an OCI layout directory into a kind cluster; other clusters pull them.

        Raises:
            NotAllowedError: the program kind is missing.
        """
        if self._kind is None:
            return []
        if (kind := shutil.which("kind")) is None:
            raise NotAllowedError(
                f"the program kind is missing, which loads images into the cluster of {self.context}: install it"
            )
        with tempfile.NamedTemporaryFile(suffix=".tar", dir=self.directory) as file:
            oci.write(Layout(layout), references, (), file)
            file.flush()
            subprocess.run([kind, "load", "image-archive", file.name, f"--name={self._kind}"], check=True)
        return list(references)

    def keep(self, references: Sequence[str]) -> None:
        """Do nothing: the images of an existing cluster are not removed."""
