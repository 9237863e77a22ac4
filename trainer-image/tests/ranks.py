"""Runs a function of a test on several ranks, one process each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from rljob.protocol.free_port import free_port
from rljob.trainer.process_group import join_world, leave_world, make_deterministic


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``work(world, *arguments)`` in ``size`` processes; return what each returned.

    They are forks of a process that has never computed a gradient: PyTorch cannot in a fork of one that has.
    """
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rljob.trainer.backends.fsdp.backend"])
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_child, args=(rank, size, port, pipes[rank][1], work, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    results = [reader.recv() if reader.poll(240) else ("timeout", None) for reader, _ in pipes]
    for process in processes:
        process.join(20)
        process.kill()
    assert all(problem == "" for problem, _ in results), results
    return [result for _, result in results]


def _child(rank: int, size: int, port: int, pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        world = join_world()
        make_deterministic(world.device)
        pipe.send(("", work(world, *arguments)))
        leave_world()
    except Exception as error:  # noqa: BLE001 - any error; the parent's assertion shows it
        pipe.send((repr(error), None))
