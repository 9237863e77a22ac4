"""Staleness 0 is synchronous, and staleness is at most α; with a seeded fake engine and a real coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.fakes.engine import Faults
from e2e.fakes.harness import make_job, run_harness
from e2e.fakes.plain import plain_batches
from rljob.protocol.batch_samples import SampleTokens
from rljob.runner.tokenizer import TextCodec

BATCH = {"steps": 10, "promptsPerStep": 4, "samplesPerPrompt": 4}


@pytest.mark.parametrize(
    ("engines", "changes"),
    [
        pytest.param(1, {}, id="one engine"),
        pytest.param(3, {"seed": 12}, id="three engines, another seed"),
        pytest.param(1, {"algorithm": {"groupFilter": "none"}}, id="no filter"),
        pytest.param(2, {"evaluation": {"everySteps": 4, "problems": 16}}, id="evaluations between"),
        pytest.param(1, {"weightSync": {"inFlight": "abort"}}, id="updates that abort"),
    ],
)
async def test_staleness_0_gives_the_batches_of_a_plain_synchronous_loop_bit_for_bit(
    tmp_path: Path, engines: int, changes: dict[str, Any]
) -> None:
    job = make_job(training={**BATCH, "maxStaleness": 0}, **changes)
    async with run_harness(job, tmp_path, [Faults() for _ in range(engines)]) as harness:
        trainer = harness.trainer()
        await trainer.run()
        expected = list(plain_batches(job.spec, TextCodec(tmp_path / "model")))
    assert [one.train.step for one in trainer.applied] == list(range(BATCH["steps"]))
    for ours, plain in zip(trainer.applied, expected, strict=True):
        assert ours.train.samples == plain.samples
        assert ours.shard == plain.shard
        assert ours.state == plain.state
    if job.spec.algorithm.group_filter == "nonconstant":  # otherwise no group was replaced and the case tests nothing
        assert int(expected[-1].samples[-1].group.removeprefix("g")) >= BATCH["steps"] * BATCH["promptsPerStep"]


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
@pytest.mark.parametrize("alpha", [0, 1, 2, 4])
async def test_no_consumed_sample_is_older_than_alpha(tmp_path: Path, alpha: int, in_flight: str) -> None:
    job = make_job(training={**BATCH, "steps": 16, "maxStaleness": alpha}, weightSync={"inFlight": in_flight})
    async with run_harness(job, tmp_path, [Faults(), Faults()], seconds_per_token=0.001) as harness:
        trainer = harness.trainer()
        await trainer.run()
    samples = [
        sample for one in trainer.applied for sample in msgspec.msgpack.decode(one.shard, type=list[SampleTokens])
    ]
    steps = [one.train.step for one in trainer.applied for _ in one.train.samples]
    ages = [step - min(span.version for span in sample.spans) for step, sample in zip(steps, samples, strict=True)]
    assert len(ages) == 16 * 16
    assert min(ages) >= 0
    assert max(ages) <= alpha
    if alpha:
        assert max(ages) > 0, "no sample was generated ahead of the trainer: this run tests nothing"
        assert any(len(sample.spans) > 1 for sample in samples), "no sample was in flight during a weight update"
