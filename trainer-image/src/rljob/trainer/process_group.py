"""The trainer's processes and their process groups: one process per accelerator, or on CPU per replica.

There are two groups of all ranks: the default group for tensors (NCCL on GPUs, gloo on CPU), and a gloo group for
control. The control group has no practical time limit, because a rank may wait for the next command for hours. If a
rank dies, its connections break and the other ranks fail at once.

The ranks that hold the same share of the data form one model replica. Its rank among the replicas is the data-parallel
rank. A backend without tensor or pipeline parallelism has one rank per replica.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rljob.protocol.environment import RENDEZVOUS_ID
from rljob.trainer.errors import TrainerError, UnrecoverableError
from rljob.transfer.gloo_listener import accepting_until_formed, raise_descriptor_limit
from rljob.transfer.nccl_log import PROCESS_LOG

log = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_TIMEOUT = timedelta(days=30)
ALL_JOINED = "rljob/all-joined"
JOINING_TIMEOUT = timedelta(minutes=30)
CONNECT_SECONDS, AWAIT_SECONDS, LOG_SECONDS = 5.0, 0.2, 30.0


@dataclass(frozen=True)
class World:
    """This process's place among the trainer's processes, and their collectives.

    ``data_group`` holds one rank of each model replica: this process and the ranks of the other replicas that hold the
    same part of the model. None: each rank is a replica, and the group is the default group.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    dp_rank: int  # of this replica among the replicas
    dp_size: int  # number of replicas
    data_group: dist.ProcessGroup | None = None
    local_rank: int = 0  # among the processes of this machine or pod, which see the same files
    local_size: int = 1

    def with_data_parallel(self, rank: int, size: int, group: dist.ProcessGroup) -> World:
        """Return this world for a backend whose replicas span several ranks.

        Args:
            rank: data-parallel rank of this process.
            size: number of replicas.
            group: ranks of all replicas that hold the same part of the model as this process.
        """
        return replace(self, dp_rank=rank, dp_size=size, data_group=group)

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

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank; waits for all ranks without a time limit."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self.control)
        return values

    def raise_first_error(self, error: TrainerError | None) -> None:
        """Wait for all ranks without a time limit; raise one of their errors on all, an UnrecoverableError first."""
        errors = self.gather(error)
        for kind in (UnrecoverableError, TrainerError):
            for found in errors:
                if isinstance(found, kind):
                    raise found

    def agree(self, attempt: Callable[[], T]) -> list[T]:
        """Call ``attempt``; return the results of all ranks, by rank. Waits for all ranks without a time limit.

        Raises:
            TrainerError: of any rank, on all ranks.
            OSError: the same.
        """
        result: T | None = None
        error: TrainerError | OSError | None = None
        try:
            result = attempt()
        except (TrainerError, OSError) as caught:
            error = caught
        answers = self.gather((error, result))
        for found, _ in answers:
            if found is not None:
                raise found
        return [answer for _, answer in answers]

    def with_own_control(self) -> World:
        """Return this world with a control group of its own, for a thread: operations of two threads on one group would
        meet each other's. All ranks call this together."""
        if self.size == 1:
            return self
        return replace(self, control=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return the sum over the replicas of a tensor on ``device``."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.data_group)
        return values

    def max_over_data(self, values: Tensor) -> Tensor:
        """Return the largest values over the replicas of a tensor on ``device``."""
        if self.dp_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.data_group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the largest values over all ranks of a tensor on ``device``."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values


def join_world() -> World:
    """Join the groups that the variables of rljob.trainer.launch (or torchrun) describe. Without them the world has one
    rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        PROCESS_LOG.start()
        backend = "cpu:gloo,cuda:nccl"
    store = dist.HashStore() if size == 1 else _rendezvous(rank, size)
    raise_descriptor_limit()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # lazy groups would connect ranks after they have been formed
    with accepting_until_formed():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    log.info("rank %d of %d on %s", rank, size, device)
    if size > 1 and device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects the ranks with its first operation
        torch.cuda.synchronize(device)
        log.info("NCCL connects the ranks by %s", PROCESS_LOG.transports())
    with accepting_until_formed():
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = local_rank if local_size > 1 else 0
    return World(rank, size, device, control, rank, size, local_rank=local_rank, local_size=local_size)


def _rendezvous(rank: int, size: int) -> dist.Store:
    """Return the store of all ranks once all have joined, which takes hours if a node has to be provisioned.

    torch's own wait ends after 30 minutes and floods the log while the first node has no DNS name. On the host network
    the port may belong to rank 0 of another job, whose rendezvous id differs.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        _await(host, port)
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=CONTROL_TIMEOUT, wait_for_workers=True)
    rendezvous = os.environ.get(RENDEZVOUS_ID, "")
    if rank == 0:  # the constructor has waited for all ranks
        store.set(ALL_JOINED, rendezvous)
    else:
        store.wait([ALL_JOINED], CONTROL_TIMEOUT)
        if store.get(ALL_JOINED).decode() != rendezvous:
            raise RuntimeError(f"another job's trainer is at {host}:{port}; the next attempt has another port")
    store.set_timeout(JOINING_TIMEOUT)  # from here on every rank has started
    return dist.PrefixStore("default_pg", store)


def _await(host: str, port: int) -> None:
    """Wait until rank 0 listens."""
    began = logged = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return
        except OSError as error:  # no DNS name yet, no address, or not listening
            if time.monotonic() - logged >= LOG_SECONDS:
                logged = time.monotonic()
                log.info("waiting for rank 0 at %s:%d for %.0f s: %s", host, port, logged - began, error)
        time.sleep(AWAIT_SECONDS)


def leave_world() -> None:
    """Destroy the groups."""
    dist.destroy_process_group()


def make_deterministic(device: torch.device) -> None:
    """Make torch compute the same bits from the same input on CPU; a GPU keeps its fast kernels."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_threads() -> None:
    """Use OMP_NUM_THREADS threads; by default this process's share of the cores, one or two."""
    default = max(1, min(2, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", str(default))))
