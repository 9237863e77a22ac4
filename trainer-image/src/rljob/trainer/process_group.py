"""The trainer's processes and what they say to each other: one process per accelerator, or on CPU per replica.

Ranks speak through two groups: the default one for tensors (NCCL on GPUs, gloo on CPU), and a gloo group for control
whose waits have no practical limit, because a rank may wait for the next command for hours. A rank that dies breaks
the connections, so the others fail at once all the same.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rljob.protocol.environment import RENDEZVOUS_ID
from rljob.trainer.errors import TrainerError, UnrecoverableError

log = logging.getLogger(__name__)

CONTROL_TIMEOUT = timedelta(days=30)
ALL_HERE = "rljob/all-here"
JOINING_TIMEOUT = timedelta(minutes=30)
CONNECT_SECONDS, AWAIT_SECONDS, TELL_SECONDS = 5.0, 0.2, 30.0


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

    def raise_first_error(self, error: TrainerError | None) -> None:
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
    """Form the groups from the variables of rljob.trainer.launch (or torchrun), or alone where they are not set."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.HashStore() if size == 1 else _rendezvous(rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    log.info("rank %d of %d on %s", rank, size, device)
    return World(rank, size, device, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))


def _rendezvous(rank: int, size: int) -> dist.Store:
    """Return the store of all ranks once all are there: where a node has to be waited for that is hours.

    torch's own waiting ends after half an hour, and says page after page while the first node has no name yet. On the
    network of nodes another job's rank 0 may be found at the port: its rendezvous id differs.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        _await(host, port)
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=CONTROL_TIMEOUT, wait_for_workers=True)
    rendezvous = os.environ.get(RENDEZVOUS_ID, "")
    if rank == 0:  # who waited for all
        store.set(ALL_HERE, rendezvous)
    else:
        store.wait([ALL_HERE], CONTROL_TIMEOUT)
        if store.get(ALL_HERE).decode() != rendezvous:
            raise RuntimeError(f"another job's trainer is at {host}:{port}; the next attempt has another port")
    store.set_timeout(JOINING_TIMEOUT)  # from here on all that is waited for is under way
    return dist.PrefixStore("default_pg", store)


def _await(host: str, port: int) -> None:
    """Return when rank 0 listens."""
    began = told = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return
        except OSError as error:  # it has no name yet, no address, or does not listen
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                log.info("waiting for rank 0 at %s:%d for %.0f s: %s", host, port, told - began, error)
        time.sleep(AWAIT_SECONDS)


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
