"""Settings that the starting process passes to the cluster's supervisor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the supervisor; a program is the name of its directory in the cache."""

    cluster: str
    cache: str
    plugins: str
    address: str
    prefix: int
    controlplane: str
    coredns: str
    pause: str
    tether: int | None = None
    """File descriptor of a pipe; the cluster ends when it is closed."""
    pod_memory: int | None = None
    """Bytes that all pods together may use; None: all memory of the machine."""

    def text(self) -> str:
        """Return the settings as a command line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        """Return the settings of a command line argument."""
        return cls(**json.loads(text))
