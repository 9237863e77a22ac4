"""The choice of a replica, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rljob.runner.service_replicas import Replica, ReplicaSet
from rljob.simulation.virtual_time import run_in_virtual_time


@pytest.fixture(autouse=True)
def longest_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)


class Names:
    """A server of names."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] = list(addresses)
        self.asked = 0

    async def __call__(self) -> list[str]:
        self.asked += 1
        await asyncio.sleep(0.001)
        if not self.addresses:
            raise OSError("no such name")
        return self.addresses


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run_in_virtual_time(main())


def now() -> float:
    return asyncio.get_running_loop().time()


class Requests:
    """Keeps requests in flight until they are ended."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas
        self.sent: list[tuple[str, float]] = []  # address and time, in the order in which they were sent
        self._ends: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, count: int = 1, **how: Any) -> None:
        self._tasks += [asyncio.create_task(self._one(how)) for _ in range(count)]
        await asyncio.sleep(0.01)

    async def end(self, index: int) -> None:
        self._ends[index].set()
        await asyncio.sleep(0.01)

    @property
    def addresses(self) -> list[str]:
        return [address for address, _ in self.sent]

    async def _one(self, how: dict[str, Any]) -> None:
        async with self.replicas.enter(**how) as replica:
            self.sent.append((replica.address, round(now(), 1)))
            self._ends.append(end := asyncio.Event())
            await end.wait()


def test_requests_are_spread_and_each_replica_has_a_limit() -> None:
    async def main() -> None:
        requests = Requests(ReplicaSet(Names("b", "a", "c"), limit=2))
        await requests.send(7)
        assert sorted(requests.addresses) == ["a", "a", "b", "b", "c", "c"]
        assert requests.replicas.limit == 6
        await requests.end(2)
        assert requests.addresses[6] == requests.addresses[2]

    run(main)


def test_replicas_come_and_go() -> None:
    async def main() -> None:
        names = Names("a")
        requests = Requests(ReplicaSet(names, limit=2))
        await requests.send(3)
        names.addresses = ["b"]
        await asyncio.sleep(5.1)
        assert requests.addresses == ["a", "a", "b"], "the request that waited goes to the new replica"
        await requests.send(1)
        assert requests.addresses[3:] == ["b"]
        assert requests.replicas.limit == 2
        assert names.asked == 2

    run(main)


def test_without_names_the_replicas_stay() -> None:
    async def main() -> None:
        names = Names("a")
        requests = Requests(ReplicaSet(names, limit=9))
        await requests.send(1)
        names.addresses = []
        await asyncio.sleep(6)
        await requests.send(2)
        assert requests.addresses == ["a", "a", "a"]

    run(main)


def test_a_name_that_appears_later_is_waited_for() -> None:
    async def main() -> None:
        names = Names()
        requests = Requests(ReplicaSet(names, limit=1))
        await requests.send(1)
        await requests.send(1, isolated=True)
        await asyncio.sleep(20)
        assert requests.sent == []
        names.addresses = ["a", "b"]
        await asyncio.sleep(5)
        assert sorted(requests.addresses) == ["a", "b"]
        assert names.asked <= 7, "it is asked at most every five seconds"

    run(main)


async def fail(replicas: ReplicaSet, address: str, times: int = 3) -> None:
    others = {"a", "b", "c"} - {address}
    for _ in range(times):
        async with replicas.enter(avoid=others) as replica:
            assert replica.address == address
            replica.failed()


def test_a_replica_that_fails_three_times_gets_no_request_until_its_trial() -> None:
    async def main() -> None:
        replicas = ReplicaSet(Names("a", "b"), limit=9)
        await fail(replicas, "a")
        requests = Requests(replicas)
        await requests.send(4)
        assert requests.addresses == ["b"] * 4
        await asyncio.sleep(0.5)
        await requests.send(3)
        assert sorted(requests.addresses[4:]) == ["a", "b", "b"], "one trial"

    run(main)


def test_requests_wait_for_the_trial_of_the_only_replica() -> None:
    async def main() -> None:
        replicas = ReplicaSet(None, limit=9)
        await fail(replicas, "")
        began, sent = now(), []

        async def request(outcome: Callable[[Replica], None]) -> None:
            async with replicas.enter() as replica:
                sent.append(round(now() - began, 3))
                await asyncio.sleep(2)
                outcome(replica)

        await asyncio.gather(request(Replica.failed), *(request(Replica.succeeded) for _ in range(3)))
        # a trial that fails after 2 s, another one a second later, and when it has succeeded the rest
        assert sent == [0.5, 3.5, 5.5, 5.5]

    run(main)


def test_retry_after_pauses_one_replica() -> None:
    async def main() -> None:
        replicas = ReplicaSet(Names("a", "b"), limit=1)
        async with replicas.enter(avoid={"b"}) as replica:
            replica.pause(10.0)
        requests = Requests(replicas)
        await requests.send(2)
        assert requests.addresses == ["b"]
        await asyncio.sleep(10)
        assert requests.addresses == ["b"], "up to a tenth is added"
        await asyncio.sleep(1)
        assert requests.addresses == ["b", "a"]

    run(main)


def test_a_retry_avoids_the_replica_that_failed_if_there_is_another() -> None:
    async def main() -> None:
        requests = Requests(ReplicaSet(Names("a", "b"), limit=1))
        await requests.send(2, avoid={"a"})
        assert requests.addresses == ["b"], "the other one is busy, but it works"
        await requests.end(0)
        assert requests.addresses == ["b", "b"]
        alone = Requests(ReplicaSet(Names("a"), limit=1))
        await alone.send(1, avoid={"a"})
        assert alone.addresses == ["a"]

    run(main)


def test_an_isolated_request_is_alone_at_its_replica() -> None:
    async def main() -> None:
        requests = Requests(ReplicaSet(Names("a", "b"), limit=9))
        await requests.send(2)
        await requests.send(1, isolated=True, avoid={"b"})
        assert len(requests.sent) == 2
        await requests.send(2)
        assert requests.addresses[2:] == ["b", "b"], "no request joins those that it waits for"
        await requests.end(requests.addresses.index("a"))
        assert requests.addresses[4:] == ["a"]
        await requests.send(1)
        assert requests.addresses[5:] == ["b"]
        await requests.end(4)
        await requests.send(1)
        assert requests.addresses[6:] == ["a"]

    run(main)


def test_a_cancelled_request_frees_its_replica() -> None:
    async def main() -> None:
        replicas = ReplicaSet(None, limit=1)
        requests = Requests(replicas)
        await requests.send(1)
        for isolated in (False, True):
            await requests.send(1, isolated=isolated)
            requests._tasks[-1].cancel()
        requests._tasks[0].cancel()
        await requests.send(1)
        assert len(requests.sent) == 2

    run(main)
