"""Processes of vLLM's server that end when the server dies: the engine process of each data-parallel replica, and the
process that coordinates the replicas. Workers end with their engine process
(:mod:`rljob.rollout.adapters.vllm.weight_transfer`). vLLM's own processes would wait for requests for ever."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess

from rljob.protocol.parent_death import die_with_parent


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with_parent(parent.pid)


class _EndingFork(ForkProcess):
    def run(self) -> None:
        _end_with_parent()
        super().run()


class _EndingSpawn(SpawnProcess):
    def run(self) -> None:
        _end_with_parent()
        super().run()


class _ForkingContext(ForkContext):
    Process = _EndingFork


class _SpawningContext(SpawnContext):
    Process = _EndingSpawn


def ending_context(plain: Callable[[], BaseContext]) -> BaseContext:
    """Return a context of multiprocessing that is like that of ``plain``, which forks or spawns, but whose processes
    are killed when this one dies."""
    return _ForkingContext() if plain().get_start_method() == "fork" else _SpawningContext()
