"""What the machine's side tells the cluster's side when it starts it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Settings:
    """What the machine's side tells the supervisor; programs are named by their directory in the cache."""

    cluster: str
    cache: str
    plugins: str
    address: str
    prefix: int
    controlplane: str
    coredns: str
    pause: str
    tether: int | None = None
    """A pipe that the cluster shall not outlive."""

    def text(self) -> str:
        """Return it as the command line has it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        """Return it from the command line."""
        return cls(**json.loads(text))
