"""A coordinator without scheduling, recovery or checks: what three messages in and five out of a sample cost at least.

It uses nothing of rljob but speaks its protocol: messages are lists of a tag and fields (core/src/rljob/protocol).
Server, fsync, interval of commits and page size of SQLite are the coordinator's. Samples are leased endlessly.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from itertools import count, cycle
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

IN_FLIGHT = 1024  # samples that are leased at a time: as many as the measured job allows
COMMIT_SECONDS = 0.005  # from the beginning of a commit to that of the next one
TABLES = """PRAGMA page_size=1024; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=0;
CREATE TABLE completions (sample, turn, position, length); CREATE TABLE scores (sample, reward, text);"""


class Outbox:
    """Messages to one peer; those of one iteration of the event loop share a frame."""

    def __init__(self, send: Any) -> None:
        self.send, self.messages, self.wake = send, list[Any](), asyncio.Event()

    def put(self, *messages: Any) -> None:
        """Queue messages."""
        self.messages += messages
        self.wake.set()

    async def flush(self) -> None:
        """Send until cancelled."""
        while await self.wake.wait():
            self.wake.clear()
            taken, self.messages = self.messages, []
            await self.send({"type": "websocket.send", "bytes": msgspec.msgpack.encode(taken)})


class Floor:
    """The server (ASGI)."""

    def __init__(self, directory: Path) -> None:
        self.db = sqlite3.connect(directory / "ledger.sqlite", check_same_thread=False)
        self.db.executescript(TABLES)
        self.agents, self.wake, self.payload = list[Outbox](), asyncio.Event(), (directory / "payload").open("wb")
        self.leases = (["LeaseTrajectory", f"g{n // 8}.{n % 8}", "sums", 0, "train", [], 0, n] for n in count())
        self.todo: list[tuple[tuple[Any, ...], list[tuple[Outbox, Any]]]] = []  # row → messages that depend on it

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one peer."""
        await receive()
        await send({"type": "websocket.accept"})
        peer = Outbox(send)
        flushing = asyncio.create_task(peer.flush())
        while (event := await receive())["type"] == "websocket.receive":
            for message in msgspec.msgpack.decode(event["bytes"]):
                self.take(peer, message)
        flushing.cancel()

    def take(self, peer: Outbox, message: list[Any]) -> None:
        """Process a message."""
        match message:
            case ["RegisterEngine", *_]:
                self.agents.append(peer)
                self.turn = cycle(self.agents)
                peer.put(["PrepareWeights", 1, 0, 0, "d", "", 1, 2, "gloo", 1, [], [[], []], "keep", 1.0, ""])
            case ["RegisterRunner", *_]:
                self.runner = peer
                peer.put(*(next(self.leases) for _ in range(IN_FLIGHT)))
            case ["GenerateRequest", sample, turn, context, *_]:
                next(self.turn).put(["Generate", [sample, turn, 0], context, [1.0, 500, [0], 1]])
            case ["Completions", items]:
                for [[sample, turn, attempt, *_], tokens, logprobs, *_, context] in items:
                    result = ["GenerateResult", sample, turn, tokens, "stop", context]
                    effects = [(peer, ["AckCompletions", [[sample, turn, attempt]]]), (self.runner, result)]
                    self.todo.append(((sample, turn, tokens + logprobs, None), effects))
            case ["TrajectoryScored", sample, reward, _, text, *_]:
                effects = [(peer, ["AckTrajectories", [sample]]), (peer, next(self.leases))]
                self.todo.append(((sample, reward, text), effects))
        if self.todo:
            self.wake.set()

    async def commit(self) -> None:
        """Store what has arrived, then send what depends on it; until cancelled."""
        while await self.wake.wait():
            self.wake.clear()
            pause = asyncio.create_task(asyncio.sleep(COMMIT_SECONDS))
            todo, self.todo = self.todo, []
            await asyncio.to_thread(self.store, [row for row, _ in todo])
            for peer, message in (effect for _, effects in todo for effect in effects):
                peer.put(message)
            await pause

    def store(self, rows: list[tuple[Any, ...]]) -> None:
        """Store completions and scores durably."""
        found = [(*row[:2], self.payload.tell(), self.payload.write(row[2])) for row in rows if len(row) == 4]
        self.payload.flush()
        os.fdatasync(self.payload.fileno())
        with self.db:
            self.db.executemany("INSERT INTO completions VALUES (?,?,?,?)", found)
            self.db.executemany("INSERT INTO scores VALUES (?,?,?)", [row for row in rows if len(row) == 3])


async def _serve(port: int, directory: Path) -> None:
    floor = Floor(directory)
    options = {"ws": "websockets-sansio", "ws_per_message_deflate": False, "ws_max_size": 1 << 26, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(floor, host="127.0.0.1", port=port, log_level="error", **options))
    await asyncio.gather(floor.commit(), server.serve())


def main() -> None:
    """Serve at the port and in the directory of the command line."""
    uvloop.run(_serve(int(sys.argv[1]), Path(sys.argv[2])))
