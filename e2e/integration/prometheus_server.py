"""A real Prometheus of this machine, for tests of queries and alerts."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from rljob.protocol.free_port import free_port

ROOT = Path(__file__).parents[2]
SCRAPE_SECONDS = 0.5
READY_SECONDS = 60.0


def promtool(*arguments: str) -> str:
    """Run promtool and return its output."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Target:
    """A process that Prometheus scrapes, and its labels before relabeling."""

    address: str
    labels: Mapping[str, str]
    relabelings: Sequence[Mapping[str, Any]] = ()
    """Of a PodMonitor or ServiceMonitor."""

    def config(self, name: str) -> dict[str, Any]:
        """Return the scrape_config."""
        relabelings = [
            {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]} for each in self.relabelings
        ]
        return {
            "job_name": name,
            "static_configs": [{"targets": [self.address], "labels": dict(self.labels)}],
            "relabel_configs": relabelings,
        }


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str
    session: aiohttp.ClientSession

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query, with its labels in ``metric`` and its text in ``value``.

        Raises:
            ValueError: the query is not valid.
        """
        async with self.session.get(f"{self.url}/api/v1/query", params={"query": expr}) as response:
            body = await response.json()
        if body["status"] != "success":
            raise ValueError(f"{expr}: {body['error']}")
        return list(body["data"]["result"])

    async def until(self, expr: str, seconds: float = 60.0) -> None:
        """Wait until a query returns a series."""
        async with asyncio.timeout(seconds):
            while not await self.query(expr):
                await asyncio.sleep(SCRAPE_SECONDS / 2)


@asynccontextmanager
async def running_prometheus(directory: Path, targets: Sequence[Target], rules: str = "") -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes ``targets`` every half second; ``rules``: text of its rule file."""
    interval = f"{round(SCRAPE_SECONDS * 1000)}ms"
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "scrape_configs": [target.config(f"target-{i}") for i, target in enumerate(targets)],
    }
    if rules:
        (directory / "rules.yaml").write_text(rules)
        config["rule_files"] = [str(directory / "rules.yaml")]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as session:
            server = Prometheus(f"http://{address}", session)
            await _ready(server, process, directory / "prometheus.log")
            yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(server: Prometheus, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            assert process.returncode is None, log.read_text()
            try:
                async with server.session.get(f"{server.url}/-/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)
