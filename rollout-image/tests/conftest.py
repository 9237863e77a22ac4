"""A fake coordinator that records messages and sends those of the test."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from rljob.protocol.agent_protocol import Completions, EngineHeartbeat, FromAgent
from rljob.protocol.frames import encode_frame, frame_decoder

sys.path.insert(0, str(Path(__file__).parent))  # served_engine.py


class FakeCoordinator:
    """Serves /v1/connect/agent. ``received`` holds all messages except heartbeats."""

    def __init__(self):
        self.received = []
        self.frames = 0
        self.heartbeats = []
        self.connections = 0
        self._changed = asyncio.Event()
        self._sockets = set()
        self._decoder = frame_decoder(FromAgent)

    async def start(self):
        app = web.Application()
        app.router.add_get("/v1/connect/agent", self._connect)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop(self):
        await self.disconnect()
        await self._runner.cleanup()

    async def disconnect(self):
        for socket in list(self._sockets):
            await socket.close()

    async def send(self, *messages):
        for socket in self._sockets:
            await socket.send_bytes(encode_frame(list(messages)))

    async def until(self, matches: Callable, seconds=240.0):
        """Remove the first matching message from ``received`` and return it, waiting for it if needed."""
        async with asyncio.timeout(seconds):
            while True:
                for message in self.received:
                    if matches(message):
                        self.received.remove(message)
                        return message
                self._changed.clear()
                await self._changed.wait()

    async def next(self, kind, seconds=240.0):
        return await self.until(lambda m: isinstance(m, kind), seconds)

    async def completion(self, request_id, seconds=240.0):
        batch = await self.until(
            lambda m: isinstance(m, Completions) and any(item.request_id == request_id for item in m.items), seconds
        )
        rest = [item for item in batch.items if item.request_id != request_id]
        if rest:
            self.received.append(Completions(rest))
        return next(item for item in batch.items if item.request_id == request_id)

    async def _connect(self, request):
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        self._sockets.add(socket)
        self.connections += 1
        try:
            async for frame in socket:
                if frame.type is WSMsgType.BINARY:
                    self.frames += 1
                    for message in self._decoder.decode(frame.data):
                        (self.heartbeats if isinstance(message, EngineHeartbeat) else self.received).append(message)
                    self._changed.set()
        finally:
            self._sockets.discard(socket)
        return socket


@pytest.fixture(scope="session")
def make_coordinator():
    return FakeCoordinator


@pytest.fixture
async def coordinator():
    fake = FakeCoordinator()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture(scope="session")
def manifest():
    """Return a function that makes the JSON of a manifest whose policy is at ``model_path``."""

    def build(model_path, **rollout):
        return json.dumps(
            {
                "metadata": {"name": "test"},
                "spec": {
                    "models": [{"name": "policy", "source": str(model_path)}],
                    "training": {"steps": 1},
                    "tasks": [
                        {
                            "name": "sums",
                            "data": {"reasoningGym": {"dataset": "chain_sum"}},
                            "reward": "sums",
                            "sampling": {"maxTokens": 64},
                        }
                    ],
                    "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
                    "rollouts": [{"name": "main", "maxModelLength": 512, "maxConcurrency": 32, **rollout}],
                },
            }
        )

    return build
