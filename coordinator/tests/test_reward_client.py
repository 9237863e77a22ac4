"""The client of a reward with several replicas, in virtual time: only the HTTP requests are fakes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import msgspec
import pytest

from rljob.api.roles import Reward
from rljob.protocol.score_messages import Score, ScoreItem, ScoreReply, ScoreRequest
from rljob.runner import scoring
from rljob.runner.reward_http import RefusedSampleError, RewardUnavailableError, ServiceFailedError
from rljob.runner.scoring import RewardClient
from rljob.runner.service_replicas import Replica
from rljob.simulation.virtual_time import run_in_virtual_time

Behaviour = Callable[[list[ScoreItem]], Coroutine[Any, Any, None]]


async def answers(items: list[ScoreItem]) -> None:
    await asyncio.sleep(0.1)


async def breaks(items: list[ScoreItem]) -> None:
    await asyncio.sleep(0.1)
    raise ServiceFailedError("answered HTTP 500: oh")


async def refuses(items: list[ScoreItem]) -> None:
    raise RewardUnavailableError("HTTP 503")


async def hangs(items: list[ScoreItem]) -> None:
    await asyncio.sleep(1e6)


class Service:
    """Replaces RewardHttp: one behaviour for each address."""

    has_name = True

    def __init__(self, **replicas: Behaviour) -> None:
        self.replicas = replicas
        self.deterministic = False
        self.sent: list[tuple[str, list[str]]] = []  # address, samples
        self.most: Counter[str] = Counter()  # requests in flight
        self._now: Counter[str] = Counter()

    async def addresses(self) -> list[str]:
        return list(self.replicas)

    def report_failure(self, address: str, what: str) -> str:
        return what

    async def post(self, replica: Replica, body: bytes, samples: int, seconds: float) -> bytes:
        items = msgspec.json.decode(body, type=ScoreRequest).items
        address = replica.address
        self.sent.append((address, [item.sample for item in items]))
        self._now[address] += 1
        self.most[address] = max(self.most[address], self._now[address])
        try:
            async with asyncio.timeout(seconds):
                await self.replicas.get(address, refuses)(items)
        except TimeoutError:
            replica.failed()
            raise ServiceFailedError(f"did not answer within {seconds:.0f} s") from None
        except (ServiceFailedError, RewardUnavailableError):
            replica.failed()
            raise
        finally:
            self._now[address] -= 1
        if items[0].completion == "malformed" and len(self.sent) < 3:
            return b'{"scores": []}'
        scores = [Score(item.sample, float(len(item.completion)), {"at": float(ord(address))}) for item in items]
        return msgspec.json.encode(ScoreReply(scores, self.deterministic))


def item(sample: str, completion: str = "abc") -> ScoreItem:
    return ScoreItem(sample, "sums", "1+1=", completion, "stop", {"answer": "2"})


def run(service: Service, main: Callable[[RewardClient], Coroutine[Any, Any, Any]], **reward: Any) -> Any:
    async def program() -> Any:
        with mock.patch.object(scoring, "RewardHttp", lambda *_: service):
            client = RewardClient(Reward(name="sums", builtin="exact_match", **reward), "http://sums", mock.Mock())
        try:
            return await main(client)
        finally:
            await client.close()

    return run_in_virtual_time(program())


@pytest.fixture(autouse=True)
def longest_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)


async def one_by_one(client: RewardClient, count: int, seconds: float = 0.05) -> list[Score]:
    """Score samples, each of which ends some time after the one before."""
    tasks = []
    for i in range(count):
        tasks.append(asyncio.create_task(client.score(item(f"g{i}.0", f"{i:03}"))))
        await asyncio.sleep(seconds)
    return await asyncio.gather(*tasks)


def test_samples_are_spread_over_the_replicas_and_each_has_its_limit_of_requests() -> None:
    service = Service(a=answers, b=answers, c=answers)
    scores = run(service, lambda client: one_by_one(client, 90, 0.001), processes=2)
    assert not any(score.error for score in scores)
    assert service.most == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize("broken", [breaks, refuses])
def test_a_replica_that_fails_loses_no_sample_and_soon_gets_few_requests(broken: Behaviour) -> None:
    service = Service(a=answers, b=broken)
    scores = run(service, lambda client: one_by_one(client, 200))
    assert [score.error for score in scores] == [""] * 200
    asked = [address for address, _ in service.sent]
    assert asked.count("b") <= 8  # three, and the trials after 0.5, 1, 2, 4 and 5 seconds


def test_a_replica_that_hangs_loses_no_sample_and_delays_few() -> None:
    service = Service(a=answers, b=answers)
    seconds: list[float] = []

    async def timed(client: RewardClient, i: int) -> Score:
        began = asyncio.get_running_loop().time()
        score = await client.score(item(f"h{i}"))
        seconds.append(asyncio.get_running_loop().time() - began)
        return score

    async def main(client: RewardClient) -> list[Score]:
        await one_by_one(client, 100)  # the client learns what a usual time is
        service.replicas["b"] = hangs
        service.sent.clear()
        tasks = []
        for i in range(100):
            tasks.append(asyncio.create_task(timed(client, i)))
            await asyncio.sleep(0.05)
        return await asyncio.gather(*tasks)

    scores = run(service, main)
    assert [score.error for score in scores] == [""] * 100
    assert sum(each > 1 for each in seconds) <= 2 and max(seconds) < 55
    slow = [address for address, _ in service.sent].count("b")
    assert slow == 5, "three requests that lost to a second one opened its circuit breaker; two were trials"


def test_the_slowest_request_is_sent_to_another_replica() -> None:
    service = Service(a=answers, b=answers)
    seconds = []

    async def slow(items: list[ScoreItem]) -> None:
        await asyncio.sleep(20)

    async def main(client: RewardClient) -> Score:
        await one_by_one(client, 40, 0.2)
        service.sent.clear()
        service.replicas["a"] = service.replicas["b"] = lambda items: (slow if len(service.sent) == 1 else answers)(
            items
        )
        began = asyncio.get_running_loop().time()
        score = await client.score(item("slow"))
        seconds.append(asyncio.get_running_loop().time() - began)
        return score

    assert run(service, main).reward == 3
    assert {address for address, _ in service.sent} == {"a", "b"} and len(service.sent) == 2
    assert seconds == [pytest.approx(0.25, abs=0.01)]  # 1.5 times 0.1 s, the usual time, and 0.1 s for the other one


def test_replicas_that_are_gone_get_nothing_and_new_ones_get_their_share() -> None:
    service = Service(a=answers)

    async def main(client: RewardClient) -> list[Score]:
        scores = await one_by_one(client, 20)
        service.replicas = {"b": answers, "c": answers}
        await asyncio.sleep(5)
        scores += await one_by_one(client, 2)
        service.sent.clear()
        return scores + await one_by_one(client, 40)

    scores = run(service, main)
    assert [score.error for score in scores] == [""] * 62
    shares = Counter(address for address, _ in service.sent)
    assert set(shares) == {"b", "c"} and max(shares.values()) <= 24


def test_a_service_that_is_unreachable_for_a_minute_loses_no_sample() -> None:
    service = Service(a=refuses)
    ended = []

    async def main(client: RewardClient) -> list[Score]:
        scoring_all = asyncio.create_task(one_by_one(client, 100))
        await asyncio.sleep(60)
        assert not scoring_all.done()
        service.replicas["a"] = answers
        scores = await scoring_all
        ended.append(asyncio.get_running_loop().time())
        return scores

    assert [score.error for score in run(service, main)] == [""] * 100
    assert ended[0] < 72, "a wait is at most 5 s between requests, and 5 s until a trial"
    assert len(service.sent) < 40, "one trial at a time"


def test_a_sample_that_breaks_every_replica_fails_and_no_other_one() -> None:
    async def breaks_on_7(items: list[ScoreItem]) -> None:
        await asyncio.sleep(0.1)
        if any(item.sample == "g7.0" for item in items):
            raise ServiceFailedError("broke the connection (reset)")

    scores = run(Service(a=breaks_on_7, b=breaks_on_7, c=breaks_on_7), lambda client: one_by_one(client, 20, 0.001))
    assert [i for i, score in enumerate(scores) if score.error] == [7]
    assert scores[7].error == "reward sums broke the connection (reset), 3 times on this sample alone"


def test_a_malformed_reply_is_asked_for_again() -> None:
    service = Service(a=answers)
    score = run(service, lambda client: client.score(item("g0.0", "malformed")))
    assert (score.reward, score.error, len(service.sent)) == (9, "", 3)


def test_equal_samples_of_a_deterministic_reward_are_scored_once() -> None:
    service = Service(a=answers)

    async def main(client: RewardClient) -> list[float]:
        first = [await client.score(item(f"g0.{i}", "x" * (i % 2))) for i in range(6)]
        assert [score.sample for score in first] == [f"g0.{i}" for i in range(6)]
        return [score.reward for score in first]

    assert run(service, main) == [0, 1, 0, 1, 0, 1] and len(service.sent) == 6
    service.sent.clear()
    service.deterministic = True
    assert run(service, main) == [0, 1, 0, 1, 0, 1] and len(service.sent) == 2


def test_a_sample_that_is_not_scored_has_the_reward_of_the_manifest(caplog: pytest.LogCaptureFixture) -> None:
    async def rejects(items: list[ScoreItem]) -> None:
        raise RefusedSampleError("reward sums refused the sample: HTTP 422: no")

    async def main(client: RewardClient) -> list[Score]:
        return [await client.score(item(f"g0.{i}")) for i in range(2)]

    with caplog.at_level(logging.WARNING):
        scores = run(Service(a=rejects), main, not_scored_reward=-0.5)
    assert scores == [Score(f"g0.{i}", -0.5, {"not_scored": 1.0}) for i in range(2)]
    assert [record.message for record in caplog.records] == [
        "reward sums: a sample that is not scored counts as -0.5, as notScoredReward says; the first one: "
        "reward sums refused the sample: HTTP 422: no"
    ]
    assert [score.error for score in run(Service(a=rejects), main)] == [
        "reward sums refused the sample: HTTP 422: no"
    ] * 2


@pytest.mark.parametrize("token_ids", [False, True])
def test_only_a_reward_with_token_ids_gets_them(token_ids: bool) -> None:
    sent: list[ScoreItem] = []

    async def keeps(items: list[ScoreItem]) -> None:
        sent.extend(items)

    async def main(client: RewardClient) -> Score:
        return await client.score(msgspec.structs.replace(item("g0.0"), response_token_ids=[1, 2]))

    run(Service(a=keeps), main, token_ids=token_ids)
    assert [each.response_token_ids for each in sent] == [[1, 2] if token_ids else None]
