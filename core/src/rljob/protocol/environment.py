"""Environment variables of a process: the same under ``rljob run`` and in a rendered pod."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from rljob.api.kubernetes import AcceleratorKind
from rljob.api.model_address import is_remote
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.api.roles import Environment, Reward
from rljob.protocol.model_cache import find_model
from rljob.protocol.startup import host_and_port

Entry = TypeVar("Entry", Reward, Environment)

SEED = "RLJOB_SEED"
"""Variable of the initializer: spec.seed."""
LOG_LEVEL = "RLJOB_LOG_LEVEL"
"""Variable of any component, set by a user."""
SGLANG_PYTHON = "RLJOB_SGLANG_PYTHON"
"""Variable of agents, set by a user: interpreter of the environment with SGLang."""
NODES, NODE_RANK = "RLJOB_NODES", "RLJOB_NODE_RANK"
"""Variables of the trainer: number of nodes, and rank of this node, from 0."""
MASTER = "RLJOB_MASTER"
"""Variable of a trainer with several nodes: address of the first node, HOST or HOST:PORT."""
ACCELERATOR = "RLJOB_ACCELERATOR"
"""Variable of every pod: nvidia or cpu, the meaning of ``accelerator: {kind: auto}`` in the cluster. On one machine
RLJOB_JOB contains no ``auto``."""
LEDGER_DIRECTORY = "RLJOB_LEDGER"
"""Variable of the coordinator: directory of the ledger, if it is not in RLJOB_STORAGE."""
RAY_START = "KUBERAY_GEN_RAY_START_CMD"
"""Variable of the pods of an engine that spans hosts, set by KubeRay: the command that starts Ray in the pod."""
RAY_AUTH_MODE, RAY_TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
"""Variables of these pods that Ray reads: `token`, and the file of the token."""
RENDEZVOUS_ID = "RLJOB_RENDEZVOUS_ID"
"""Variable of the trainer: unique to this attempt of this job, so that ranks of other attempts cannot join."""


@dataclass(frozen=True)
class ComponentEnvironment:
    """Settings of a process, from its environment.

    RLJOB_JOB: file of the resolved manifest (JSON). RLJOB_STORAGE: the job's storage (a directory; ``job://PATH`` is
    PATH in it). RLJOB_COORDINATOR: address of the coordinator. RLJOB_TOKEN: the role's token. RLJOB_LISTEN: host:port
    on which a server listens (:8080: all addresses, of IPv4 and IPv6). RLJOB_NAME: name of the pool, reward or
    environment of the process. RLJOB_TOKENS (coordinator only): file of role → token, JSON. RLJOB_REWARD_URLS (runner
    only): JSON of reward → address. RLJOB_HOST: address at which other processes reach this one (weight groups),
    without brackets.
    RLJOB_INSTANCE: name of the pod. RLJOB_TOKEN_FILE: file with the role's token, instead of RLJOB_TOKEN.
    RLJOB_REWARD_TOKEN, RLJOB_REWARD_TOKEN_FILE (runner only): the token of the rewards, likewise.
    RLJOB_ENVIRONMENT_URLS, RLJOB_ENVIRONMENT_TOKEN, RLJOB_ENVIRONMENT_TOKEN_FILE (runner only): the same for
    environments. RLJOB_POOL_URLS (rewards and runner only): JSON of frozen pool → addresses of its engines.
    RLJOB_POOL_TOKEN, RLJOB_POOL_TOKEN_FILE (rewards and runner only): the token of these engines. RLJOB_POOL_MODEL
    (`rljob reward check` only): name of the model in requests to them, if it is not that of the pool.
    """

    job: RLJob
    storage: Path
    coordinator: str
    token: str
    listen: str
    name: str
    host: str
    instance: str = ""

    @property
    def listen_host(self) -> str:
        """Host of RLJOB_LISTEN; empty: all addresses of both families."""
        return host_and_port(self.listen)[0]

    @property
    def listen_port(self) -> int:
        """Port of RLJOB_LISTEN."""
        return int(host_and_port(self.listen)[1])

    @property
    def readers_port(self) -> int:
        """Port of the coordinator's read-only API on the loopback of its pod: RLJOB_LISTEN's port + 1."""
        return self.listen_port + 1

    def path(self, source: str) -> Path:
        """Return the path of ``job://PATH`` or of a plain path, or the directory of a remote model. Before its download
        (:func:`rljob.protocol.model_cache.read_model`) this directory does not exist."""
        if source.startswith("job://"):
            return self.storage / source.removeprefix("job://")
        if is_remote(source):
            return find_model(source, self.storage) or self.storage / "models" / "not-downloaded"
        return Path(source)


def read_environment() -> ComponentEnvironment:
    """Return this process's :class:`ComponentEnvironment`; the job is resolved, even if its file is not.

    Raises:
        ValueError: RLJOB_JOB or RLJOB_STORAGE is not set, RLJOB_ACCELERATOR is unknown, or a file that a variable names
            cannot be read.
    """
    for name in ("RLJOB_JOB", "RLJOB_STORAGE"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set; rljob run and the operator set it")
    return ComponentEnvironment(
        job=resolve(RLJob.model_validate_json(_read("RLJOB_JOB")), _accelerator(), profiles=True),
        storage=Path(os.environ["RLJOB_STORAGE"]),
        coordinator=os.environ.get("RLJOB_COORDINATOR", ""),
        token=_token("RLJOB_TOKEN", "RLJOB_TOKEN_FILE"),
        listen=os.environ.get("RLJOB_LISTEN", "127.0.0.1:0"),
        name=os.environ.get("RLJOB_NAME", ""),
        host=os.environ.get("RLJOB_HOST", "127.0.0.1"),
        instance=os.environ.get("RLJOB_INSTANCE", ""),
    )


def own_entry(entries: Iterable[Entry], name: str, what: str) -> Entry:
    """Return the entry of the manifest that this process serves.

    Args:
        entries: rewards or environments.
        name: RLJOB_NAME.
        what: what an entry is, with its article.

    Raises:
        ValueError: no entry has the name.
    """
    for entry in entries:
        if entry.name == name:
            return entry
    raise ValueError(f"RLJOB_NAME is {name!r}, which is not {what} of the job; name one of them")


def _accelerator() -> AcceleratorKind:
    known: dict[str, AcceleratorKind] = {"nvidia": "nvidia", "cpu": "cpu"}
    kind = os.environ.get(ACCELERATOR, "cpu")
    if kind not in known:
        raise ValueError(f"{ACCELERATOR}: {kind!r} is not nvidia or cpu; the operator sets it")
    return known[kind]


def _token(variable: str, file_variable: str) -> str:
    if os.environ.get(file_variable):
        return _read(file_variable).decode().strip()
    return os.environ.get(variable, "")


def remove_token() -> None:
    """Remove the role's token from the environment, before code of a user runs. Read the environment first."""
    for variable in ("RLJOB_TOKEN", "RLJOB_TOKEN_FILE"):
        os.environ.pop(variable, None)


def _read(variable: str) -> bytes:
    path = os.environ[variable]
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{variable}: {path} cannot be read: {error.strerror}") from None


def search_path() -> str:
    """Return PATH with this Python environment's programs first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def reward_urls() -> dict[str, str]:
    """Return reward name → address from RLJOB_REWARD_URLS."""
    return msgspec.json.decode(os.environ.get("RLJOB_REWARD_URLS", "{}"), type=dict[str, str])


def reward_token() -> str:
    """Return the token of the rewards that rljob starts, from RLJOB_REWARD_TOKEN_FILE or RLJOB_REWARD_TOKEN."""
    return _token("RLJOB_REWARD_TOKEN", "RLJOB_REWARD_TOKEN_FILE")


def environment_urls() -> dict[str, str]:
    """Return environment name → address from RLJOB_ENVIRONMENT_URLS."""
    return msgspec.json.decode(os.environ.get("RLJOB_ENVIRONMENT_URLS", "{}"), type=dict[str, str])


def environment_token() -> str:
    """Return the token of the environments that rljob starts, from RLJOB_ENVIRONMENT_TOKEN_FILE or
    RLJOB_ENVIRONMENT_TOKEN."""
    return _token("RLJOB_ENVIRONMENT_TOKEN", "RLJOB_ENVIRONMENT_TOKEN_FILE")


def pool_urls() -> dict[str, list[str]]:
    """Return frozen pool → addresses of its engines from RLJOB_POOL_URLS."""
    return msgspec.json.decode(os.environ.get("RLJOB_POOL_URLS", "{}"), type=dict[str, list[str]])


def pool_model(pool: str) -> str:
    """Return the name of the model in requests to a frozen pool: RLJOB_POOL_MODEL, else the name of the pool."""
    return os.environ.get("RLJOB_POOL_MODEL") or pool


def pool_token() -> str:
    """Return the token of the engines of frozen pools, from RLJOB_POOL_TOKEN_FILE or RLJOB_POOL_TOKEN."""
    return _token("RLJOB_POOL_TOKEN", "RLJOB_POOL_TOKEN_FILE")
