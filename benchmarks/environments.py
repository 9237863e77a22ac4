"""Steps per second of one process of an environment service over HTTP, against a bare FastAPI echo in the same run.

    python -m benchmarks.environments --json [--seconds 4] [--rounds 3] [--keep] [--timeout SECONDS]

The service plays FrozenLake. The echo is a FastAPI application with one pydantic model, on the same server with the
same limits; both are processes of their own, and one client process sends their requests in turn, in alternating
rounds. A session sends its next step when it has the reply. `steps_over_echo_N` compares the requests that the server
answers for each second of its own CPU time, with N sessions: on a busy machine wall time measures the other programs.
`in_process` steps the same environment without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from benchmarks import time_limit
from benchmarks.process_counters import TICK_SECONDS, cpu_seconds, memory_bytes
from benchmarks.report import report, target
from rljob.api.environments.kinds.ice import FrozenLakeOptions
from rljob.environments.frozen_lake import FrozenLake
from rljob.protocol.episode_messages import Observation, OpenSession, StepRequest
from rljob.protocol.free_port import free_port

TIMEOUT_SECONDS = 900.0
SESSIONS = (1, 64, 1024)
GOAL = 0.8
ACTIONS = ("L", "D", "R", "U")
ECHO = """
import sys
from fastapi import FastAPI
from pydantic import BaseModel
from rljob.protocol.service_server import ServiceServer

class Message(BaseModel):
    step: int
    action: str

app = FastAPI()

@app.post("/echo")
async def echo(message: Message) -> Message:
    return message

ServiceServer(app, sys.argv[1], "", 1 << 20, 75).serve_until_signal()
"""
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Observation)


@asynccontextmanager
async def server(*command: str) -> AsyncIterator[tuple[str, int]]:
    """Start a server with its address as last argument but those after ``--listen``; yield address and process id."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen([sys.executable, *(address if word == "ADDRESS" else word for word in command)])
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"http://{address}/healthz"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        yield f"http://{address}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def echoed(client: aiohttp.ClientSession, url: str, deadline: float) -> int:
    """Send steps to the echo until the deadline; return their number."""
    for step in itertools.count(1):
        body = _encoder.encode(StepRequest(step, ACTIONS[step % 4]))
        async with client.post(f"{url}/echo", data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200
            await response.read()
        if time.monotonic() > deadline:
            return step
    raise AssertionError("the loop has no end")


async def played(client: aiohttp.ClientSession, url: str, deadline: float, name: str) -> int:
    """Play episodes until the deadline; return the number of requests."""
    requests = 0
    for episode in itertools.count():
        session, step, found = f"{name}-{episode}", 0, None
        while found is None or not found.ended:
            path = f"/{session}/steps" if found else ""
            message: Any = StepRequest(step, ACTIONS[step % 4]) if found else OpenSession(session, episode, {"seed": 1})
            async with client.post(f"{url}/v1/sessions{path}", data=_encoder.encode(message)) as response:
                assert response.status == 200, await response.text()
                found = _decoder.decode(await response.read())
            step, requests = step + 1, requests + 1
            if time.monotonic() > deadline:
                break
        async with client.delete(f"{url}/v1/sessions/{session}"):
            requests += 1
        if time.monotonic() > deadline:
            return requests
    raise AssertionError("the loop has no end")


async def measure(url: str, pid: int, sessions: int, seconds: float, echo: bool) -> tuple[float, float]:
    """Return requests per second of wall time, and per second of the server's CPU time."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        began, cpu, deadline = time.monotonic(), cpu_seconds(pid), time.monotonic() + seconds
        counts = await asyncio.gather(
            *(
                echoed(client, url, deadline) if echo else played(client, url, deadline, f"{began}-{i}")
                for i in range(sessions)
            )
        )
        return sum(counts) / (time.monotonic() - began), sum(counts) / max(TICK_SECONDS, cpu_seconds(pid) - cpu)


async def held(url: str, pid: int, sessions: int) -> float:
    """Return the memory of one open session in bytes."""
    async with aiohttp.ClientSession() as client:
        before = memory_bytes(pid)
        for i in range(sessions):
            body = _encoder.encode(OpenSession(f"held-{i}", i, {"seed": i}))
            async with client.post(f"{url}/v1/sessions", data=body) as response:
                assert response.status == 200
        found = (memory_bytes(pid) - before) / sessions
        for i in range(sessions):
            async with client.delete(f"{url}/v1/sessions/held-{i}"):
                pass
        return found


def in_process(seconds: float) -> float:
    """Return the steps per second of CPU of the environment itself, with its resets."""
    began, steps = time.process_time(), 0
    while time.process_time() - began < seconds:
        game, ended = FrozenLake(FrozenLakeOptions()), False
        game.reset(steps, {"seed": 1})
        while not ended:
            _, _, terminated, truncated, _ = game.step(ACTIONS[steps % 4])
            ended, steps = terminated or truncated, steps + 1
    return steps / (time.process_time() - began)


async def compare(seconds: float, rounds: int) -> dict[str, float]:
    """Return the figures of all numbers of sessions."""
    figures: dict[str, float] = {"in_process_steps_per_second": in_process(1.0)}
    service = ("-m", "rljob.environments.main", "--serve", "frozen_lake", "{}", "ADDRESS", "60")
    async with server(*service) as (lake, lake_pid), server("-c", ECHO, "ADDRESS") as (echo, echo_pid):
        figures["bytes_per_session"] = await held(lake, lake_pid, 2000)
        for sessions in SESSIONS:
            ours, theirs = [], []
            for _ in range(rounds):
                theirs.append(await measure(echo, echo_pid, sessions, seconds, echo=True))
                ours.append(await measure(lake, lake_pid, sessions, seconds, echo=False))
            figures[f"steps_per_second_{sessions}"] = statistics.median(wall for wall, _ in ours)
            figures[f"steps_per_cpu_second_{sessions}"] = statistics.median(cpu for _, cpu in ours)
            figures[f"echoes_per_cpu_second_{sessions}"] = statistics.median(cpu for _, cpu in theirs)
            ratios = [mine / other for (_, mine), (_, other) in zip(ours, theirs, strict=True)]
            figures[f"steps_over_echo_{sessions}"] = statistics.median(ratios)
    return figures


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/environments.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.environments", options.timeout)
    figures = asyncio.run(compare(options.seconds, options.rounds))
    targets = {
        name: target(figures[name], ">=", GOAL) for name in (f"steps_over_echo_{sessions}" for sessions in SESSIONS[1:])
    }
    report("environments", figures, targets, options.keep)


if __name__ == "__main__":
    main()
