"""A tiny model, batches for it, a world of one rank, and a fake coordinator."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from aiohttp import web

from e2e.fakes.fork_server import Child, descriptor, shared_fork_server
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.protocol import trainer_protocol as m
from rljob.protocol.batch_samples import BatchSample, SampleTokens, Segment
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.free_port import free_port
from rljob.protocol.shards import decode_selection
from rljob.protocol.shared_messages import VersionSpan
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.process_group import World, join_world, leave_world, make_deterministic

sys.path.insert(0, str(Path(__file__).parent))  # ranks.py

VOCABULARY = 61
WAIT_SECONDS = 100
TRAINER_IMPORTS = (
    "rljob.trainer.main",
    "rljob.trainer.loop",
    "rljob.trainer.backends.fsdp.backend",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Modules that a trainer imports at its start, which take seconds."""


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of a Qwen2 with 2 layers, hidden 32, tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def make_job(source: Path, **spec: object) -> RLJob:
    """Return a resolved job; ``spec`` replaces or adds fields of the manifest's spec."""
    manifest = {
        "metadata": {"name": "tiny"},
        "spec": {
            "models": [{"name": "policy", "source": str(source)}],
            "training": {"steps": 4, "promptsPerStep": 3, "samplesPerPrompt": 2},
            "tasks": [
                {
                    "name": "sums",
                    "data": {"reasoningGym": {"dataset": "chain_sum"}},
                    "reward": "sums",
                    "loop": "mine:loop",  # it may name states, so every preset is accepted
                }
            ],
            "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
            "rollouts": [{"name": "main", "maxModelLength": 512}],
            "trainer": {"optimizer": {"learningRate": 1e-3, "maxGradNorm": 0.5}},
            **spec,
        },
    }
    return resolve(RLJob.model_validate(manifest))


@pytest.fixture
def job(model_directory: Path) -> Callable[..., RLJob]:
    """See :func:`make_job`."""
    return lambda **spec: make_job(model_directory, **spec)


def make_batch(
    seed: int = 0, groups: int = 4, members: int = 3, step: int = 0, temperature: float = 0.8
) -> tuple[Train, list[SampleTokens]]:
    """Return a batch of random sequences whose engine log-probabilities are noise."""
    generator = np.random.default_rng(seed)
    scalars, tokens = [], []
    for group in range(groups):
        prompt = generator.integers(0, VOCABULARY, generator.integers(2, 9))
        for member in range(members):
            response = generator.integers(0, VOCABULARY, generator.integers(1, 14))
            ids = np.concatenate([prompt, response]).astype("<i4")
            mask = np.arange(len(ids)) >= len(prompt)
            logprobs = np.where(mask, -4.0 + 0.4 * generator.standard_normal(len(ids)), 0).astype("<f4")
            name = f"g{group}.{member}"
            scalars.append(
                BatchSample(
                    sample=name,
                    group=f"g{group}",
                    reward=float(generator.integers(0, 2)),
                    prompt_tokens=len(prompt),
                    response_tokens=len(response),
                    total_tokens=len(ids),
                    min_version=step - 1,  # the engine's log-probabilities are not those of the trainer's weights
                    temperature=temperature,
                    max_tokens=16,
                    baseline=0.25,
                    turn_rewards=[0.0],  # a change of the reward counts for the last turn
                    turn_states=["0"],
                )
            )
            tokens.append(
                SampleTokens(
                    name,
                    ids.tobytes(),
                    logprobs.tobytes(),
                    [Segment("prompt", 0, len(prompt)), Segment("model", len(prompt), len(ids), scalars[-1].reward)],
                    [VersionSpan(0, 0, len(ids))],
                )
            )
    return Train(incarnation=1, step=step, samples=scalars, check_initial_logprobs=False), tokens


@pytest.fixture
def batch() -> Callable[..., tuple[Train, list[SampleTokens]]]:
    """See :func:`make_batch`."""
    return make_batch


@pytest.fixture
def world() -> Iterator[World]:
    """A world of one rank: this process."""
    alone = join_world()
    make_deterministic(alone.device)
    yield alone
    leave_world()
    torch.use_deterministic_algorithms(False)


class FakeCoordinator:
    """A fake coordinator that sends the test's commands and queues the trainer's messages."""

    token = "secret"

    def __init__(self) -> None:
        self.batches: dict[int, tuple[m.Train, list[SampleTokens]]] = {}
        self.incarnation = 0
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self._kept: list[Any] = []
        self.socket: web.WebSocketResponse | None = None
        self.pulls: list[tuple[int, list[int]]] = []
        self.answers: list[int] = []  # HTTP statuses of the next pulls; if empty, pulls are served
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeCoordinator]:
        app = web.Application()
        app.router.add_get("/v1/connect/trainer", self._connect)
        app.router.add_post("/v1/batches/{step}/shard", self._shard)
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
        if request.headers["Authorization"] != f"Bearer {self.token}":
            raise web.HTTPForbidden
        self.socket = web.WebSocketResponse()
        await self.socket.prepare(request)
        decoder = frame_decoder(m.FromTrainer)
        async for frame in self.socket:
            for message in decoder.decode(frame.data):
                self.received.put_nowait(message)
        return self.socket

    async def _shard(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        step, incarnation = int(request.match_info["step"]), int(request.query["incarnation"])
        body = await request.read()
        mine = decode_selection(body, 8 * len(body))
        self.pulls.append((step, mine))
        if self.answers:
            return web.Response(status=self.answers.pop(0))
        if incarnation != self.incarnation:
            raise web.HTTPConflict
        tokens = self.batches[step][1]
        return web.Response(body=zstandard.compress(msgspec.msgpack.encode([tokens[i] for i in mine])))

    async def send(self, *commands: Any) -> None:
        await self.socket.send_bytes(encode_frame(list(commands)))

    async def receive(self, kind: type) -> Any:
        """Return the next message, which must be of ``kind``; messages about checkpoints, which are written beside the
        commands, are kept for later calls."""
        for message in self._kept:
            if isinstance(message, kind):
                self._kept.remove(message)
                return message
        while not isinstance(message := await asyncio.wait_for(self.received.get(), WAIT_SECONDS), kind):
            assert isinstance(message, m.CheckpointCopied | m.Checkpointed | m.TrainerBlocked), message
            self._kept.append(message)
        return message

    async def admit(self, run_step: int = 0) -> m.RegisterTrainer:
        """Receive the registration of a new process and answer it."""
        registration = await self.receive(m.RegisterTrainer)
        assert registration.incarnation == 0
        self.incarnation += 1
        await self.send(m.TrainerRegistered(self.incarnation, run_step))
        return registration

    async def train(self, step: int) -> m.StepDone:
        train, _ = self.batches[step]
        await self.send(msgspec.structs.replace(train, incarnation=self.incarnation))
        done = await self.receive(m.StepDone)
        assert done.step == step
        return done

    async def digest(self) -> str:
        await self.send(m.SendWeights(self.incarnation, 1, []))
        sent = await self.receive(m.WeightsSent)
        assert (sent.incarnation, sent.update, sent.engine) == (self.incarnation, 1, "")
        return sent.digest


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    """A serving :class:`FakeCoordinator`."""
    async with FakeCoordinator().serve() as serving:
        yield serving


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Function that starts trainer processes: ``start(coordinator, job, ranks)``."""
    started: list[Child] = []

    async def starter(coordinator: Any, job: RLJob, ranks: int = 1) -> list[Child]:
        (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
        (tmp_path / "storage").mkdir(exist_ok=True)
        port = free_port()
        environment = os.environ | {
            "RLJOB_JOB": str(tmp_path / "job.json"),
            "RLJOB_STORAGE": str(tmp_path / "storage"),
            "RLJOB_COORDINATOR": coordinator.url,
            "RLJOB_TOKEN": coordinator.token,
        }
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(ranks):
            variables = environment | {"RANK": str(rank)}
            child = shared_fork_server(*TRAINER_IMPORTS).start(
                ["-m", "rljob.trainer.main"], variables, os.devnull, descriptor(2)
            )
            started.append(await asyncio.wrap_future(child))
        return started[-ranks:]

    yield starter
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()
