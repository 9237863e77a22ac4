"""The cells of the benchmark of weight updates, and its processes that only receive."""

from __future__ import annotations

import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.receiver import WeightReceiver

HOST = "127.0.0.1"
SECONDS = 300.0
BUCKET_BYTES = 16 << 20
CELL = re.compile(r"(\d+)(?:x(2))?(?:s(2))?(ipc)?")


@dataclass(frozen=True)
class Cell:
    """What is measured: MB of the model, workers of each server, servers, transport."""

    size: int
    tensor: int
    servers: int
    transport: str

    @classmethod
    def of(cls, text: str) -> Cell:
        """Return the cell of an argument.

        Raises:
            ValueError: it is none.
        """
        found = CELL.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no model size, with or without x2, s2, ipc")
        size, tensor, servers, transport = found.groups()
        return cls(int(size), int(tensor or 1), int(servers or 1), transport or "gloo")

    @property
    def name(self) -> str:
        """End of the names of its figures."""
        several = f"{f'_tensor_{self.tensor}' if self.tensor > 1 else ''}"
        several += f"{f'_servers_{self.servers}' if self.servers > 1 else ''}"
        return f"{self.size}_mb{several}{'' if self.transport == 'gloo' else f'_{self.transport}'}"


class Receivers:
    """Processes that only receive; the calls of the methods are broadcasts and rounds that they take part in."""

    def __init__(self, folder: Path, cell: Cell) -> None:
        context = multiprocessing.get_context("spawn")
        store, count = str(folder / "store"), cell.servers * cell.tensor
        self._pipes, self._processes = [], []
        for rank in range(1, 1 + count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_receive, args=(theirs, store, rank, 1 + count), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1 + count)
        self._transport = cell.transport
        self._sender = WeightSender(HOST, SECONDS, cell.transport)
        self._places = {
            workers: [self._sender.open(f"{workers}-{i}", True, workers) for i in range(count // workers)]
            for workers in {cell.tensor, count}
        }
        self._threads = ThreadPoolExecutor(count)

    def raw(self, weights: PackedWeights) -> float:
        """Return the seconds of plain broadcasts of all buckets, until the receivers have them."""
        self._order([bucket.numel() for bucket in weights.buckets])
        started = time.perf_counter()
        for bucket in weights.buckets:
            dist.broadcast(bucket, 0)
        _acknowledge()
        return time.perf_counter() - started

    def wire(self, weights: PackedWeights, workers: int) -> tuple[float, float]:
        """Return the seconds of a round in groups of some workers, and the core-seconds of this process in it; of the
        first round with the groups' forming."""
        for i, pipe in enumerate(self._pipes):
            place = self._places[workers][i // workers]
            pipe.send((place, 1 + i % workers, self._transport, weights.parameters))
        self._wait()
        started, used = time.perf_counter(), time.process_time()
        names = [f"{workers}-{i}" for i in range(len(self._places[workers]))]
        list(self._threads.map(lambda name: self._sender.send(name, weights), names))
        return time.perf_counter() - started, time.process_time() - used

    def _order(self, order: object) -> None:
        for pipe in self._pipes:
            pipe.send(order)
        self._wait()

    def _wait(self) -> None:
        for pipe in self._pipes:
            pipe.recv()

    def end(self) -> None:
        """End the processes."""
        self._threads.shutdown()
        for workers, places in self._places.items():
            for i in range(len(places)):
                self._sender.close(f"{workers}-{i}")
        for process in self._processes:
            process.kill()
            process.join()
        dist.destroy_process_group()


def _acknowledge() -> None:
    for rank in range(1, dist.get_world_size()):
        dist.broadcast(torch.zeros(1), rank)


def _receive(pipe: Connection, store: str, rank: int, size: int) -> None:
    """Be a process that only receives."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    receivers: dict[str, WeightReceiver] = {}
    buffer = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
    while True:
        order = pipe.recv()
        if isinstance(order, list) and max(order) > buffer.numel():
            buffer = torch.zeros(max(order), dtype=torch.uint8)
        pipe.send("ready")
        if isinstance(order, list):
            for number in order:
                dist.broadcast(buffer[:number], 0)
            _acknowledge()
            continue
        place, number, transport, parameters = order
        if place.group not in receivers:
            receivers[place.group] = WeightReceiver("cpu")
            receivers[place.group].join(place, number, transport, BUCKET_BYTES, SECONDS)
        receivers[place.group].receive(parameters, lambda tensors: None, SECONDS)
