"""Two processes that make optimizer steps with Megatron-Core on a CPU, for the benchmark of the trainer.

Each has one thread. They start once, and make a step on request, so that steps of a bare loop can alternate with
theirs; between steps they wait without using the CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.process_counters import peak_memory_bytes
from benchmarks.trainer_steps import trainer_step
from rljob.api.roles import Trainer, TrainerParallelism
from rljob.protocol.free_port import free_port
from rljob.trainer.backends.megatron.megatron_backend import MegatronBackend
from rljob.trainer.process_group import join_world, leave_world, make_deterministic, set_threads

RANKS = 2
LAYOUTS = {
    "megatron_dp2": TrainerParallelism(),
    "megatron_tp2": TrainerParallelism(tensor=2),
    "megatron_pp2": TrainerParallelism(pipeline=2),
}


class MegatronRanks:
    """The processes of a layout; as a context manager they end with it.

    Args:
        layout: of LAYOUTS.
        size: of the model.
        model: its directory.
    """

    def __init__(self, layout: str, size: str, model: Path) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (rank, port, theirs, layout, size, model)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def step(self) -> float:
        """Make one step; return its seconds, those of the slowest process."""
        for pipe in self._pipes:
            pipe.send("step")
        return max(self._answers())

    def peak_bytes(self) -> float:
        """Return the sum of the largest resident sizes of the processes."""
        for pipe in self._pipes:
            pipe.send("peak")
        return sum(self._answers())

    def _answers(self) -> list[float]:
        return [pipe.recv() for pipe in self._pipes]


def _serve(rank: int, port: int, pipe: Connection, layout: str, size: str, model: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    set_threads()
    world = join_world()
    make_deterministic(world.device)
    settings = Trainer(backend="megatron", processes_per_node=RANKS, parallelism=LAYOUTS[layout], dtype="float32")
    step = trainer_step(size, MegatronBackend(model, settings, world))
    step()  # the first one allocates
    pipe.send(0.0)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            break
        started = time.perf_counter()
        if order == "step":
            step()
            pipe.send(time.perf_counter() - started)
        else:
            pipe.send(float(peak_memory_bytes(os.getpid())))
    leave_world()
