"""The runner's client with two processes of a reward, as with two pods: one of them is killed and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import httpx
import pytest
from yarl import URL

from rljob.api.roles import Reward
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.runner import reward_http, service_replicas
from rljob.runner.scoring import RewardClient
from rljob.runner.service_http import service_session

HOSTS = ("127.0.0.1", "127.0.0.2")
REWARD = """
import time

def reward(completion):
    time.sleep(0.005)
    return float(completion)
"""
Start = Callable[[str], subprocess.Popen[bytes]]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start(tmp_path: Path, unused_tcp_port: int) -> Iterator[Start]:
    """Starter of a service at one of HOSTS and the same port."""
    (tmp_path / "slow.py").write_text(REWARD)
    started: list[subprocess.Popen[bytes]] = []

    def start_at(host: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-W", "ignore", "-m", "rljob.rewards.main", "--serve", "slow:reward"]
        address = f"{host}:{unused_tcp_port}"
        process = subprocess.Popen([*command, address, "1", "10"], env=os.environ | {"PYTHONPATH": str(tmp_path)})
        started.append(process)
        return process

    yield start_at
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the service's name; a test may change them."""
    found = list(HOSTS)

    async def addresses(url: URL) -> Collection[str]:
        return list(found)

    monkeypatch.setattr(reward_http, "addresses_of", addresses)
    monkeypatch.setattr(service_replicas, "REFRESH_SECONDS", 0.1)
    return found


async def samples_at(host: str, port: int) -> float:
    """Return how many samples a service has answered; it is waited for."""
    async with httpx.AsyncClient(timeout=10) as client, asyncio.timeout(100):
        while True:
            try:
                text = (await client.get(f"http://{host}:{port}/metrics")).text
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                (line,) = (each for each in text.splitlines() if each.startswith("rljob_reward_samples_total "))
                return float(line.split()[1])


async def test_a_killed_replica_loses_no_sample_and_gets_its_share_again(
    start: Start, names: list[str], unused_tcp_port: int
) -> None:
    port = unused_tcp_port
    services = {host: start(host) for host in HOSTS}
    for host in HOSTS:
        await samples_at(host, port)
    async with service_session() as session:
        client = RewardClient(Reward(name="slow", function="slow:reward"), f"http://slow:{port}", session)

        async def score(numbers: range) -> None:
            texts = {f"g{i}.0": str(i) for i in numbers}
            items = [ScoreItem(sample, "sums", "", text, "stop", {}) for sample, text in texts.items()]
            scores: list[Score] = await asyncio.gather(*(client.score(item) for item in items))
            assert [(each.sample, each.reward, each.error) for each in scores] == [
                (sample, float(text), "") for sample, text in texts.items()
            ]

        await score(range(200))
        before = [await samples_at(host, port) for host in HOSTS]
        assert min(before) > 0
        scoring = asyncio.create_task(score(range(200, 600)))
        while await samples_at(HOSTS[1], port) == before[1]:
            assert not scoring.done()
        services[HOSTS[1]].send_signal(signal.SIGKILL)
        services[HOSTS[1]].wait()
        names.remove(HOSTS[1])
        await scoring
        names.append(HOSTS[1])
        start(HOSTS[1])
        assert await samples_at(HOSTS[1], port) == 0
        number = 600
        async with asyncio.timeout(100):
            while not await samples_at(HOSTS[1], port):
                await score(range(number, number + 20))
                number += 20
        await client.close()
