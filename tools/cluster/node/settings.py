"""Settings that the starting process passes to the cluster's supervisor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the supervisor; programs are named by their directory in the cache."""

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

    def text(self) -> str:
        """Return it as the command line has it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        """Return it from the command line."""
        return cls(**json.loads(text))
