"""The variables a part is started with: the same ones from ``rljob run`` and from a rendered pod."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rljob.api.models import RLJob


@dataclass(frozen=True)
class PartEnvironment:
    """What every part is told.

    RLJOB_JOB: file of the resolved manifest (JSON). RLJOB_STORAGE: the job's storage (a directory; ``job://PATH`` is
    PATH in it). RLJOB_COORDINATOR: address of the coordinator. RLJOB_TOKEN: the role's token. RLJOB_LISTEN: host:port
    a server listens on. RLJOB_NAME: name of the pool or reward a part belongs to. RLJOB_TOKENS (coordinator only): file
    of role → token, JSON. RLJOB_REWARD_URLS (runner only): JSON of reward → address. RLJOB_HOST: address other parts
    reach this one at (weight groups).
    """

    job: RLJob
    storage: Path
    coordinator: str
    token: str
    listen: str
    name: str
    host: str

    @property
    def listen_host(self) -> str:
        """Host of RLJOB_LISTEN."""
        return self.listen.rpartition(":")[0]

    @property
    def listen_port(self) -> int:
        """Port of RLJOB_LISTEN."""
        return int(self.listen.rpartition(":")[2])

    def path(self, source: str) -> Path:
        """Return the path that ``job://PATH`` or a plain path stands for."""
        if source.startswith("job://"):
            return self.storage / source.removeprefix("job://")
        return Path(source)


def read_environment() -> PartEnvironment:
    """Return this process's :class:`PartEnvironment`.

    Raises:
        ValueError: RLJOB_JOB or RLJOB_STORAGE is not set.
    """
    for name in ("RLJOB_JOB", "RLJOB_STORAGE"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set; parts are started by rljob run or by the operator")
    return PartEnvironment(
        job=RLJob.model_validate_json(Path(os.environ["RLJOB_JOB"]).read_bytes()),
        storage=Path(os.environ["RLJOB_STORAGE"]),
        coordinator=os.environ.get("RLJOB_COORDINATOR", ""),
        token=os.environ.get("RLJOB_TOKEN", ""),
        listen=os.environ.get("RLJOB_LISTEN", "127.0.0.1:0"),
        name=os.environ.get("RLJOB_NAME", ""),
        host=os.environ.get("RLJOB_HOST", "127.0.0.1"),
    )


def reward_urls() -> dict[str, str]:
    """Return reward name → address from RLJOB_REWARD_URLS."""
    return msgspec.json.decode(os.environ.get("RLJOB_REWARD_URLS", "{}"), type=dict[str, str])
