"""Makes the modules world.py and ledgers.py importable for the tests of the coordinator, and defines fixtures."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = _load("world")
ledgers = _load("ledgers")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run; tests must not write to it."""
    run: Path = ledgers.make_run(tmp_path_factory.mktemp("run") / "storage")
    return run


@pytest.fixture
async def new_world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Return a factory of worlds whose files are closed at the end. Without fsync: only processes are killed, not the
    machine."""
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    worlds: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        worlds.append(world.World(*args, **options))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()
