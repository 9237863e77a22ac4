"""The overall time-out of all benchmarks, and the trainer of the rollout benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch
import zstandard
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from benchmarks.rollout import SEED, manifest
from benchmarks.rollout_direct import ROUTES, DirectClient, make_requests
from benchmarks.rollout_trainer import IdleTrainer
from rljob.protocol import trainer_protocol as m
from rljob.protocol.batch_samples import SampleTokens, Segment
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.shared_messages import Message

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    *(path for path in sorted((ROOT / "benchmarks").glob("*.py")) if '__name__ == "__main__"' in path.read_text()),
    ROOT / "e2e/soak/__main__.py",
    ROOT / "e2e/pods/full/__main__.py",
]

NEVER_ENDING = """
import os, signal, subprocess, sys, threading
from benchmarks import time_limit

time_limit.GRACE_SECONDS = time_limit.CLEANUP_SECONDS = 0.2
time_limit.limit("benchmarks.example", 1.0)
if sys.argv[1] == "ignores-sigint":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sleep = [sys.executable, "-S", "-c", "import threading; threading.Event().wait()"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:  # the parent of the next process exits at once
    os.setsid()
    subprocess.Popen(sleep)
    os._exit(0)
threading.Event().wait()
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program until no process holds its output; fail after 90 seconds."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("body", ["interruptible", "ignores-sigint"])
def test_a_benchmark_that_never_ends_fails_with_one_message_and_leaves_no_process(body):
    done = run(NEVER_ENDING, body)
    assert done.stderr == "benchmarks.example did not end within 1 s (--timeout), so its processes were ended\n"
    assert (done.returncode, done.stdout) == (1, "")


def test_a_benchmark_within_its_time_keeps_its_output_and_exit_code():
    script = "import sys; from benchmarks.time_limit import limit; limit('it', 80.0); print('{}'); sys.exit(3)"
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "{}\n", "")


def test_sigterm_to_a_benchmark_lets_it_clean_up():
    script = """
import os, signal, sys, threading
from benchmarks.time_limit import limit
limit("it", 80.0)
try:
    os.kill(os.getppid(), signal.SIGTERM)
    threading.Event().wait()
finally:
    print("cleaned up")
"""
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (128 + 15, "cleaned up\n", "")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_benchmark_has_an_overall_time_out(program):
    text = program.read_text()
    assert "time_limit.add_option(parser, " in text and "time_limit.limit(" in text


class FakeServer:
    """A fake coordinator and engine: batches of one sample, and generation requests that wait for ``release``."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.release = asyncio.Event()
        self.received: list[Message] = []
        self.connections = 0

    @contextlib.asynccontextmanager
    async def serve(self, connect) -> AsyncIterator[str]:
        """Serve; ``connect`` handles each WebSocket of the trainer. Yields the URL."""

        async def handle(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse(autoping=False)
            await socket.prepare(request)
            self.connections += 1
            await connect(socket)
            return socket

        app = web.Application()
        app.router.add_get("/v1/connect/trainer", handle)
        app.router.add_post("/v1/batches/{step}/shard", self._batch)
        app.router.add_post("/inference/v1/generate", self._generate)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    async def _batch(self, request: web.Request) -> web.Response:
        segments = [Segment("prompt", 0, 1), Segment("model", 1, 2)]
        sample = SampleTokens("s0.0", array("i", [1, 2]).tobytes(), array("f", [0, 0]).tobytes(), segments, [])
        return web.Response(body=zstandard.compress(msgspec.msgpack.encode([sample])))

    async def _generate(self, request: web.Request) -> web.Response:
        self.requested.set()
        await self.release.wait()
        return web.json_response({"choices": [{"token_ids": [2]}]})

    async def receive(self, socket: web.WebSocketResponse) -> list[Message]:
        """Return the messages of the next frame."""
        frame = await socket.receive()
        assert frame.type is WSMsgType.BINARY, frame
        return frame_decoder(m.FromTrainer).decode(frame.data)


async def train(url: str, steps: int) -> list[int]:
    """Run the trainer with a direct phase after each batch; return the steps of the batches."""
    trainer, done = IdleTrainer(url, "token", torch.nn.Linear(1, 1), manifest("vllm", 64, 32, 1)), []
    try:
        async with contextlib.aclosing(trainer.batches()) as batches:
            async for step, samples in batches:
                await DirectClient(ROUTES["vllm"], url, "key", 1).run(
                    make_requests(ROUTES["vllm"], samples, 1, SEED, 0, "direct")
                )
                done.append(step)
                if len(done) == steps:
                    return done
    finally:
        await trainer.close()
    raise AssertionError("the batches ended")


async def test_the_trainer_answers_a_ping_while_its_direct_phase_waits_for_a_slow_request():
    server = FakeServer()

    async def connect(socket: web.WebSocketResponse) -> None:
        assert isinstance((await server.receive(socket))[0], m.RegisterTrainer)
        await socket.send_bytes(encode_frame([m.TrainerRegistered(1, 0), m.Train(1, 0, [], True)]))
        await server.requested.wait()
        await socket.ping(b"there?")
        answer = await socket.receive()
        assert (answer.type, answer.data) == (WSMsgType.PONG, b"there?")
        server.release.set()

    async with asyncio.timeout(60), server.serve(connect) as url:
        assert await train(url, 1) == [0]


async def test_the_trainer_repeats_a_result_when_its_connection_broke_in_the_direct_phase():
    server = FakeServer()
    results: list[Message] = []

    async def connect(socket: web.WebSocketResponse) -> None:
        registration, *repeated = await server.receive(socket)
        assert isinstance(registration, m.RegisterTrainer)
        await socket.send_bytes(encode_frame([m.TrainerRegistered(1, 0), m.Train(1, 0, [], True)]))
        await server.requested.wait()
        if server.connections == 1:
            return  # closes the connection
        assert (registration.incarnation, registration.step, repeated) == (1, 0, [])
        server.release.set()
        results.extend(await server.receive(socket))
        await socket.send_bytes(encode_frame([m.Train(1, 1, [], False)]))
        await socket.receive()

    async with asyncio.timeout(60), server.serve(connect) as url:
        assert await train(url, 2) == [0, 1]
    assert [(type(result), result.step) for result in results] == [(m.StepDone, 0)]
