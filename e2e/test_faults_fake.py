"""Faults without a crash, with fakes over real connections: weights that do not arrive, samples that cannot be scored,
a trainer that is not reproducible."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from e2e.fakes.engine import Faults
from e2e.fakes.harness import Harness, make_job, run_harness
from e2e.fakes.plain import plain_batches
from e2e.fakes.tokens import FIRST_STATE, reward, write
from e2e.fakes.trainer import FakeTrainer
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.score_messages import ScoreItem
from rljob.runner.tokenizer import TextCodec
from rljob.scheduling.seeds import derive

STEPS = 6
TRAINING = {"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4}


@pytest.mark.parametrize("fault", ["refuse", "wrong_digest"])
@pytest.mark.parametrize("times", [1, 4])
async def test_weights_that_do_not_arrive_are_sent_again_and_change_nothing(
    tmp_path: Path, fault: str, times: int
) -> None:
    job = make_job(training={**TRAINING, "maxStaleness": 0})
    async with run_harness(job, tmp_path, [Faults(weights=fault, weights_times=times)]) as harness:
        trainer = harness.trainer()
        await trainer.run()
        expected = [batch.state for batch in plain_batches(job.spec, TextCodec(tmp_path / "model"))]
    assert [one.state for one in trainer.applied] == expected


async def test_an_engine_that_does_not_answer_an_update_does_not_block_the_run(tmp_path: Path) -> None:
    job = make_job(training={**TRAINING, "maxStaleness": 0})
    silent = Faults(weights="silent", weights_times=1_000_000)
    async with run_harness(job, tmp_path, [silent, Faults()]) as harness:
        trainer = harness.trainer()
        await trainer.run()
    assert len(trainer.applied) == STEPS


@pytest.mark.timeout(300)
async def test_an_engine_that_dies_repeatedly_changes_no_result(tmp_path: Path) -> None:
    job = make_job(training={**TRAINING, "maxStaleness": 0})
    async with run_harness(job, tmp_path, []) as harness:
        await harness.start("agent", "--die-after-tokens", "600")
        trainer = harness.trainer()
        await trainer.run()
        expected = [batch.state for batch in plain_batches(job.spec, TextCodec(tmp_path / "model"))]
    assert harness.restarts["agent"] >= 1
    assert [one.state for one in trainer.applied] == expected


@pytest.mark.parametrize("alpha", [0, 2])
async def test_samples_that_cannot_be_scored_are_recorded_and_their_groups_replaced(tmp_path: Path, alpha: int) -> None:
    def score(item: ScoreItem) -> float | str:
        group, member = item.sample.removeprefix("g").split(".")
        return "the scorer crashed" if (int(group) % 5, member) == (3, "2") else reward(item.completion)

    job = make_job(training={**TRAINING, "maxStaleness": alpha})
    async with run_harness(job, tmp_path, score_function=score) as harness:
        trainer = harness.trainer()
        await trainer.run()
    assert len(trainer.applied) == STEPS
    failed = harness.ledger("SELECT group_id, id, reason FROM samples WHERE state = 'failed'")
    assert failed and {int(row["group_id"].removeprefix("g")) % 5 for row in failed} == {3}
    assert {row["reason"] for row in failed if row["id"].endswith(".2")} == {"the scorer crashed"}
    assert not harness.ledger("SELECT id FROM samples WHERE state IN ('admitted', 'scored', 'batched')")


@pytest.mark.parametrize("alpha", [0, 1])
async def test_a_trainer_that_is_not_reproducible_starts_a_new_lineage(tmp_path: Path, alpha: int) -> None:
    job = make_job(training={**TRAINING, "maxStaleness": alpha})
    async with run_harness(job, tmp_path, seconds_per_token=0.001) as harness:
        first = harness.trainer()
        running = asyncio.create_task(first.run())
        async with first.has_applied:
            await first.has_applied.wait_for(lambda: len(first.applied) == 5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        second = harness.trainer(salt=b"another library")
        await second.run()
    assert [one.train.step for one in second.applied] == [3, 4, 5], "it replays the batches after its checkpoint"
    assert [one.shard for one in second.applied[:2]] == [one.shard for one in first.applied[3:5]]
    assert {row["lineage"] for row in harness.ledger("SELECT lineage FROM publications")} == {0, 1}
    if alpha == 0:
        assert_written_by(harness, second, step=5)


def assert_written_by(harness: Harness, trainer: FakeTrainer, step: int) -> None:
    """Assert that every sample of batch ``step`` was generated with the weights that ``trainer`` trained it on."""
    states = {one.train.step + 1: one.state for one in trainer.applied} | {0: FIRST_STATE}
    attempts = {row["id"]: row["attempt"] for row in harness.ledger("SELECT id, attempt FROM samples")}
    batch = next(one for one in trainer.applied if one.train.step == step)
    for scalars, sample in zip(
        batch.train.samples, msgspec.msgpack.decode(batch.shard, type=list[SampleTokens]), strict=True
    ):
        prompt = sample.token_ids[: 4 * scalars.prompt_tokens]
        seed = derive(harness.job.spec.seed, sample.sample, 0, attempts[sample.sample])
        stream, _ = write(states[step], prompt, seed, scalars.max_tokens, [0])
        assert stream.token_ids == array("i", sample.token_ids[4 * scalars.prompt_tokens :]), sample.sample
