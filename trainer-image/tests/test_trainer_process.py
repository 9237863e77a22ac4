"""The trainer as a process, driven by a stand-in for the coordinator that speaks the real messages."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from aiohttp import web
from safetensors.numpy import load_file

from rljob.api.models import RLJob
from rljob.protocol import messages as m
from rljob.scheduling.shards import assign

TOKEN = "secret"
WAIT_SECONDS = 50


class StandIn:
    """A coordinator that does what the test says and keeps what the trainer says."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple[m.Train, list[m.SampleTokens]]] = {}
        self.incarnation = 0
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.socket: web.WebSocketResponse | None = None
        self.pulls: list[tuple[int, int, int]] = []
        self.away = 0  # pulls to answer with 503 before one is served
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[StandIn]:
        app = web.Application()
        app.router.add_get("/v1/connect/trainer", self._connect)
        app.router.add_get("/v1/batches/{step}/shards/{rank}", self._shard)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.socket = web.WebSocketResponse()
        await self.socket.prepare(request)
        decoder = m.frame_decoder(m.FromTrainer)
        async for frame in self.socket:
            for message in decoder.decode(frame.data):
                self.heard.put_nowait(message)
        return self.socket

    async def _shard(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        step, rank = int(request.match_info["step"]), int(request.match_info["rank"])
        size, incarnation = int(request.query["of"]), int(request.query["incarnation"])
        self.pulls.append((step, rank, size))
        if self.away:
            self.away -= 1
            raise web.HTTPServiceUnavailable
        if incarnation != self.incarnation:
            raise web.HTTPConflict
        train, tokens = self.batches[step]
        mine = assign([s.prompt_tokens + s.response_tokens for s in train.samples], size)[rank]
        return web.Response(body=zstandard.compress(msgspec.msgpack.encode([tokens[i] for i in mine])))

    async def tell(self, *commands: Any) -> None:
        await self.socket.send_bytes(m.encode_frame(list(commands)))

    async def hear(self, kind: type, count: int = 1) -> Any:
        """Return the next message, which must be of ``kind``."""
        message = await asyncio.wait_for(self.heard.get(), WAIT_SECONDS)
        assert isinstance(message, kind), message
        return message

    async def admit(self, run_step: int = 0) -> m.RegisterTrainer:
        """Take a registration of a new process and answer it."""
        registration = await self.hear(m.RegisterTrainer)
        assert registration.incarnation == 0
        self.incarnation += 1
        await self.tell(m.TrainerRegistered(self.incarnation, run_step))
        return registration

    async def train(self, step: int) -> m.StepDone:
        train, _ = self.batches[step]
        await self.tell(msgspec.structs.replace(train, incarnation=self.incarnation))
        done = await self.hear(m.StepDone)
        assert done.step == step
        return done

    async def digest(self) -> str:
        await self.tell(m.SendWeights(self.incarnation, 1, []))
        return (await self.hear(m.WeightsSent)).digest


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Starter of trainer processes: ``start(coordinator, job, ranks)``."""

    async def starter(coordinator: StandIn, job: RLJob, ranks: int = 1) -> list[asyncio.subprocess.Process]:
        (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
        (tmp_path / "storage").mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = os.environ | {
            "RLJOB_JOB": str(tmp_path / "job.json"),
            "RLJOB_STORAGE": str(tmp_path / "storage"),
            "RLJOB_COORDINATOR": coordinator.url,
            "RLJOB_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rljob.trainer.main", env=environment | ({"RANK": str(rank)} if ranks > 1 else {})
            )
            for rank in range(ranks)
        ]

    return starter


async def test_a_killed_trainer_resumes_from_its_checkpoint_and_replays_to_the_same_bits(
    tmp_path, model_directory, job, batch, start
):
    made = job()
    coordinator = StandIn()
    coordinator.batches = {step: batch(seed=step, step=step) for step in range(4)}
    async with coordinator.serve():
        (process,) = await start(coordinator, made)
        assert (await coordinator.admit()).step == 0

        before = await coordinator.digest()
        done = await coordinator.train(0)
        assert done.metrics["tokens"] == sum(s.response_tokens for s in coordinator.batches[0][0].samples)
        assert await coordinator.digest() != before
        coordinator.away = 2  # the coordinator is restarting: the pull is repeated
        await coordinator.train(1)

        await coordinator.tell(m.Checkpoint(1, 2, []))
        assert (await coordinator.hear(m.Checkpointed)).path == "checkpoints/step-000002"
        await coordinator.train(2)
        await coordinator.train(3)
        after_four = await coordinator.digest()

        await coordinator.train(3)  # said again: answered, not applied again
        assert await coordinator.digest() == after_four

        process.kill()
        await process.wait()
        (process,) = await start(coordinator, made)
        assert (await coordinator.admit(4)).step == 2
        await coordinator.train(2)
        await coordinator.tell(m.Train(1, 3, coordinator.batches[3][0].samples, False))  # a lower incarnation's
        await coordinator.train(3)
        assert await coordinator.digest() == after_four

        await coordinator.socket.close()  # the connection breaks: training is not disturbed
        again = await coordinator.hear(m.RegisterTrainer)
        assert (again.incarnation, again.step) == (2, 4)
        repeated = await coordinator.hear(m.StepDone)
        assert (repeated.incarnation, repeated.step) == (2, 3) and "loss" in repeated.metrics
        await coordinator.tell(m.TrainerRegistered(2, 4), m.Checkpoint(2, 4, [2]))
        await coordinator.hear(m.Checkpointed)
        await coordinator.tell(m.Stop("done"))
        assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 0

    kept = tmp_path / "storage" / "checkpoints" / "step-000004"
    assert sorted(path.name for path in kept.parent.iterdir() if path.is_dir()) == ["step-000004"]
    assert {path.name for path in kept.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert load_file(kept / "model.safetensors").keys() == load_file(model_directory / "model.safetensors").keys()
