"""Operations on a cluster that runs pods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.cluster.access import Access

LOCAL = "localhost"
"""The "registry" of images that are loaded into a cluster and never pulled."""


class Cluster(Access):
    """A cluster that runs pods."""

    registry = LOCAL
    """Registry of its images; nothing is pulled from LOCAL."""

    @property
    def nodes(self) -> list[str]:
        """The names of its nodes."""
        return [found["metadata"]["name"] for found in self.api.list("/api/v1/nodes")]

    def load(self, layout: Path, references: Sequence[str]) -> list[str]:
        """Load images of an OCI layout directory into the cluster; return the names of those that were missing.

        Raises:
            KeyError: the layout lacks one of the images.
        """
        raise NotImplementedError

    def keep(self, references: Sequence[str]) -> None:
        """Remove all loaded images except these."""
        raise NotImplementedError

    def exec(self, namespace: str, pod: str, *command: str, container: str | None = None) -> str:
        """Run a command in a pod and return its output."""
        return self.kubectl("exec", "-n", namespace, pod, *_container(container), "--", *command)

    def logs(self, namespace: str, pod: str, container: str | None = None, previous: bool = False) -> str:
        """Return the log of a pod's container."""
        return self.kubectl("logs", "-n", namespace, pod, *_container(container), *(["--previous"] if previous else []))


def _container(name: str | None) -> list[str]:
    return ["-c", name] if name else []
