"""A job with a loop of two turns runs to completion with a clean audit, also when components are killed."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from e2e.fakes.chat_server import ChatServer
from e2e.fakes.harness import Harness, make_job, run_harness
from e2e.fakes.plain import TWO_TURNS, plain_batches
from rljob.api.models import RLJob
from rljob.ledger.audit import audit
from rljob.protocol.batch_samples import SampleTokens
from rljob.runner.tokenizer import TextCodec

STEPS = 8
ASK_TEACHER = "e2e.fakes.extensions:ask_teacher"
TWO_DRAFTS = "e2e.fakes.extensions:two_drafts"


def two_turns_job(loop: str = TWO_TURNS, **changes: Any) -> RLJob:
    """Return a job of two tasks; the loop of the first has several turns."""
    job = make_job(training={"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 0}, **changes)
    job.spec.tasks[0].loop = loop
    return job


async def kill_between_turns(harness: Harness, victim: str, trainer: Any, step: int) -> None:
    """Kill a process after batch ``step`` was applied, while a sample has its first turn and not its second."""
    async with trainer.has_applied:
        await trainer.has_applied.wait_for(lambda: len(trainer.applied) > step)
    between = (
        "SELECT s.id FROM samples s JOIN groups g ON g.id = s.group_id WHERE s.state = 'admitted' AND g.task = 'sums'"
        " AND EXISTS (SELECT 1 FROM completions WHERE sample = s.id AND finish != 'abort')"
        " AND NOT EXISTS (SELECT 1 FROM completions WHERE sample = s.id AND turn = 1)"
    )
    while not harness.ledger(between):
        await asyncio.sleep(0.001)
    harness.kill(victim)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [(), ("runner", "coordinator", "runner")])
async def test_two_turns_give_the_batches_of_a_plain_loop_bit_for_bit(tmp_path: Path, killed: tuple[str, ...]) -> None:
    job = two_turns_job()
    async with run_harness(job, tmp_path, seconds_per_token=0.002, runner_process=True) as harness:
        trainer = harness.trainer()
        running = asyncio.create_task(trainer.run())
        for i, victim in enumerate(killed):
            await kill_between_turns(harness, victim, trainer, 2 * i)
        await running
        restarts = dict(harness.restarts)
        expected = list(plain_batches(job.spec, TextCodec(tmp_path / "model")))
    assert restarts == {part: killed.count(part) for part in ("runner", "coordinator")}
    assert [one.train.step for one in trainer.applied] == list(range(STEPS))
    for ours, plain in zip(trainer.applied, expected, strict=True):
        assert ours.train.samples == plain.samples
        assert ours.shard == plain.shard
    kinds = {
        tuple(segment.kind for segment in sample.segments)
        for one in trainer.applied
        for sample in msgspec.msgpack.decode(one.shard, type=list[SampleTokens])
    }
    assert kinds == {("prompt", "model"), ("prompt", "model", "observation", "model")}
    report = audit(tmp_path)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]


async def shards_with_branches(storage: Path, killed: tuple[str, ...]) -> list[bytes]:
    """Return the shards of a run whose loop makes branches; the processes in ``killed`` are killed during it."""
    job = two_turns_job(TWO_DRAFTS)
    async with run_harness(job, storage, seconds_per_token=0.002, runner_process=True) as harness:
        trainer = harness.trainer()
        running = asyncio.create_task(trainer.run())
        for i, victim in enumerate(killed):
            await kill_between_turns(harness, victim, trainer, 2 * i)
        await running
    report = audit(storage)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]
    return [one.shard for one in trainer.applied]


@pytest.mark.timeout(300)
async def test_branches_are_the_same_also_when_components_are_killed(tmp_path: Path) -> None:
    quiet = await shards_with_branches(tmp_path / "quiet", ())
    assert await shards_with_branches(tmp_path / "killed", ("runner", "coordinator", "runner")) == quiet
    samples = [sample for shard in quiet for sample in msgspec.msgpack.decode(shard, type=list[SampleTokens])]
    branched = [sample for sample in samples if sample.ends]
    assert len(quiet) == STEPS and branched and len(branched) < len(samples)
    for sample in branched:
        kinds = [segment.kind for segment in sample.segments]
        first = ["prompt", "model", "observation", "model"]
        assert kinds == [*first, "prefix", *first[2:], *first[2:], "prefix", *first[2:]]
        assert len(sample.ends) == 3


class NeverTwice:
    """A frozen pool that never gives the same answer twice. ``sent``: the answers. ``again``: samples that asked when
    both of their answers were recorded. ``harness`` has the ledger."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.again: list[str] = []
        self.harness: Harness | None = None

    def __call__(self, message: str) -> str:
        sample = message.partition(":")[0]
        assert self.harness is not None
        [(recorded,)] = self.harness.ledger(f"SELECT COUNT(*) FROM answers WHERE sample = '{sample}'")
        if recorded == 2:
            self.again.append(sample)
        self.sent.append(f"{len(self.sent)}")
        return self.sent[-1]


@pytest.mark.timeout(300)
async def test_a_loop_that_asks_a_frozen_pool_asks_nothing_again_when_components_are_killed(tmp_path: Path) -> None:
    models = [{"name": "policy", "source": "job://model"}, {"name": "big", "source": "job://model"}]
    job = two_turns_job(ASK_TEACHER, models=models, rollouts=[{"name": "main"}, {"name": "teacher", "model": "big"}])
    teacher = NeverTwice()
    pool = web.AppRunner(ChatServer(teacher).app(), access_log=None)
    await pool.setup()
    site = web.TCPSite(pool, "127.0.0.1", 0)
    await site.start()
    host, port = pool.addresses[0][:2]
    urls = {"RLJOB_POOL_URLS": json.dumps({"teacher": [f"http://{host}:{port}"]}), "RLJOB_POOL_TOKEN": "key"}
    killed = ("runner", "coordinator", "runner", "coordinator")
    try:
        async with run_harness(job, tmp_path, seconds_per_token=0.002, variables=urls, runner_process=True) as harness:
            teacher.harness, trainer = harness, harness.trainer()
            running = asyncio.create_task(trainer.run())
            for i, victim in enumerate(killed):
                await kill_after_answers(harness, victim, trainer, i)
            await running
            restarts = dict(harness.restarts)
            failed = harness.ledger("SELECT reason FROM samples WHERE state = 'failed'")
    finally:
        await pool.cleanup()
    assert restarts == {part: killed.count(part) for part in ("runner", "coordinator")} and not failed
    report = audit(tmp_path)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]
    codec, texts = TextCodec(tmp_path / "model"), set[str]()
    for one in trainer.applied:
        for sample in msgspec.msgpack.decode(one.shard, type=list[SampleTokens]):
            for segment in sample.segments:
                if segment.kind == "observation":
                    texts.add(codec.decode(sample.token_ids[4 * segment.start : 4 * segment.end]))
    assert texts and all(set(re.findall(r"\[(.+?)\]", text)) <= set(teacher.sent) for text in texts)
    assert not teacher.again


async def kill_after_answers(harness: Harness, victim: str, trainer: Any, step: int) -> None:
    """Kill a process after batch ``step`` was applied, while a sample has its answers and not its second turn."""
    async with trainer.has_applied:
        await trainer.has_applied.wait_for(lambda: len(trainer.applied) > step)
    between = (
        "SELECT s.id FROM samples s WHERE s.state = 'admitted' AND (SELECT COUNT(*) FROM answers WHERE"
        " sample_number = s.number) = 2 AND NOT EXISTS (SELECT 1 FROM completions c WHERE c.sample = s.id AND turn = 1)"
    )
    while not harness.ledger(between):
        await asyncio.sleep(0.001)
    harness.kill(victim)
