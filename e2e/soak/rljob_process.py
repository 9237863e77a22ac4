"""The `rljob run` command of a soak run, and its processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from e2e.faults.proxy import Proxy
from e2e.soak import victims
from e2e.soak.fault import Fault, FaultError
from rljob.local import process_cleanup
from rljob.local import processes as local_processes

CLEAN_SECONDS = 15.0
"""Longest time until no process of a killed run is left."""
POLL_SECONDS = 0.1
TAIL_BYTES = 1500


class RljobProcess:
    """`rljob run`, which may be killed and started again.

    Args:
        manifest: of the run.
        directory: of the run.
        out: file for its output.
        proxy: between its components.
    """

    def __init__(self, manifest: Path, directory: Path, out: Path, proxy: Proxy) -> None:
        self.directory = directory
        self.pid = 0
        self.exited: asyncio.Task[int]
        self._manifest = manifest
        self._out = out
        self._proxy = proxy
        self._ports: dict[str, int] = {}
        self._finding: asyncio.Task[None] | None = None

    async def start(self, steps: int) -> None:
        """Start the run, or resume it, with this number of training steps."""
        ports = self.directory / "ports.json"
        old = ports.stat().st_mtime_ns if ports.exists() else 0
        command = [sys.executable, "-m", "e2e.faults.through_proxy", self._proxy.url, "run", str(self._manifest)]
        options = ["--set", f"spec.training.steps={steps}", "--run-dir", str(self.directory), "--no-screen"]
        with self._out.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *command, *options, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.pid = process.pid
        self.exited = asyncio.create_task(process.wait())
        self._finding = asyncio.create_task(self._find_servers(ports, old))

    async def _find_servers(self, ports: Path, old: int) -> None:
        """Give the proxy the addresses of the run that has just been started, once it has written them."""
        while not ports.exists() or ports.stat().st_mtime_ns == old:
            await asyncio.sleep(POLL_SECONDS)  # another process writes it
        self._ports = json.loads(ports.read_bytes())
        self._proxy.coordinator = f"http://127.0.0.1:{self._ports['coordinator']}"
        self._proxy.rewards = {"sums": f"http://127.0.0.1:{self._ports['reward-sums']}"}

    def find(self, victim: str, replica: int) -> psutil.Process | None:
        """Return a process of the run, one of ``victims.VICTIMS``; None while there is none."""
        return victims.find(self.directory, self.pid, victim, replica)

    def ports(self, fault: Fault) -> set[int]:
        """Return the ports of the victim of a network fault; empty for all ports.

        Raises:
            FaultError: it has none.
        """
        if fault.victim == "all":
            return set()
        if fault.victim == "engine":
            server = self.find("server", fault.replica)
            found = {c.laddr.port for c in server.net_connections("tcp") if c.status == "LISTEN"} if server else set()
        elif fault.victim == "reward":
            found = {self._ports["reward-sums"]}
        else:
            found = {self._ports["coordinator"], self._proxy.port}
        if not found:
            raise FaultError(f"{fault.victim} listens on no port")
        return found

    async def audit(self) -> str:
        """Run `rljob audit`; return its output if it is not clean, else an empty text."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", "rljob.cli.main", "audit", str(self.directory)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return "" if process.returncode == 0 else output.decode()

    def tail(self) -> str:
        """Return the end of the output."""
        return self._out.read_text(errors="replace")[-TAIL_BYTES:]

    async def wait_clean(self) -> None:
        """Wait until no process of the run is left.

        Raises:
            FaultError: one is left after CLEAN_SECONDS.
        """
        deadline = time.monotonic() + CLEAN_SECONDS
        while left := victims.processes(self.directory):
            if time.monotonic() > deadline:
                raise FaultError(f"processes of the run are left: {sorted(left.items())}")
            await asyncio.sleep(POLL_SECONDS)  # not children of this process

    async def stop(self) -> None:
        """Kill the run and its processes, if it is still running."""
        if self._finding is not None:
            self._finding.cancel()
            if not self.exited.done():
                os.kill(self.pid, signal.SIGKILL)
                await self.exited
            process_cleanup.kill_marked(local_processes.mark(self.directory))
