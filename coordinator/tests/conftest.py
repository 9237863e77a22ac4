"""The world of tests of the coordinator (world.py) and its ledgers (ledgers.py), for all of them to import."""

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
    """The directory of a run that is done; for reading alone."""
    run: Path = ledgers.make_run(tmp_path_factory.mktemp("run") / "storage")
    return run


@pytest.fixture
async def new_world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Worlds whose files are closed at the end. The disk is not waited for: what is killed is not the machine."""
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    worlds: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        worlds.append(world.World(*args, **options))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()
