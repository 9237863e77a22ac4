"""Connections in memory: what a half-open one loses."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rljob.coordinator.connection import Connection
from rljob.coordinator.message_router import MessageRouter
from rljob.protocol import runner_protocol as m
from rljob.simulation.memory_link import MemoryLink, MemoryServer, Traffic
from rljob.simulation.virtual_time import run_in_virtual_time


class Coordinator:
    """Keeps the connections of the messages that arrive, in order, and those that it noticed to be lost."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.noticed: list[Connection] = []

    def handle(self, connection: Connection, frame: list[Any]) -> None:
        self.connections.append(connection)

    def lost(self, connection: Connection) -> None:
        self.noticed.append(connection)


def test_a_message_to_a_half_open_connection_does_not_arrive_by_the_next_one() -> None:
    async def program() -> list[Any]:
        coordinator, arrived = Coordinator(), list[Any]()
        server = MemoryServer(cast(MessageRouter, coordinator))
        link = MemoryLink(server, "runner", "runner-0", lambda: [m.AckGroups([0])], Traffic(), arrived.extend)
        link.connect()
        await asyncio.sleep(0)
        link.cut(noticed_after=40.0)
        coordinator.connections[0].send(m.Cancel(["while it is away"]))
        await asyncio.sleep(1)
        link.connect()
        await asyncio.sleep(0)
        coordinator.connections[0].send(m.Cancel(["by the old one"]))
        coordinator.connections[1].send(m.Cancel(["by the new one"]))
        await asyncio.sleep(1)
        assert coordinator.noticed == []
        return arrived

    assert run_in_virtual_time(program()) == [m.Cancel(["by the new one"])]
