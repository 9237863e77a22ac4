"""The trainer's processes and what they say to each other: one process per accelerator, or on CPU per replica.

Ranks speak through two groups: the default one for tensors (NCCL on GPUs, gloo on CPU), and a gloo group for control
whose waits have no practical limit, because a rank may wait for the next command for hours. A rank that dies breaks
the connections, so the others fail at once all the same.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rljob.trainer.errors import TrainerError, UnrecoverableError

log = logging.getLogger(__name__)

CONTROL_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class World:
    """This process among the trainer's processes."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's ``payload`` on every rank; the others pass None."""
        if self.size == 1:
            assert payload is not None
            return payload
        length = torch.tensor([len(payload or b"")])
        dist.broadcast(length, 0, group=self.control)
        data = torch.empty(int(length), dtype=torch.uint8)
        if payload is not None:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.control)
        return data.numpy().tobytes()

    def agree(self, error: TrainerError | None) -> None:
        """Wait for all ranks, however long it takes, and raise the gravest of their errors on all of them."""
        errors: list[Any] = [error]
        if self.size > 1:
            errors = [None] * self.size
            dist.all_gather_object(errors, error, group=self.control)
        for kind in (UnrecoverableError, TrainerError):
            for found in errors:
                if isinstance(found, kind):
                    raise found

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of a tensor on ``device``."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the largest over all ranks of a tensor on ``device``."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values


def join_world() -> World:
    """Form the groups from torchrun's variables, or alone where they are not set."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    log.info("rank %d of %d on %s", rank, size, device)
    return World(rank, size, device, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))


def leave_world() -> None:
    """Dissolve the groups."""
    dist.destroy_process_group()


def make_deterministic(device: torch.device) -> None:
    """Have torch compute the same bits from the same input; on GPUs the fast kernels are kept instead."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_threads() -> None:
    """Use OMP_NUM_THREADS threads, or one of two cores' share where it is not set."""
    default = max(1, min(2, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", str(default))))
