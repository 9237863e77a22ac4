"""A job with an agent program that uses OpenAI's client: what the engine sampled is trained, also after kills."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.fakes.agents import AGAIN, SYSTEM
from e2e.fakes.harness import Harness, make_job, run_harness
from e2e.fakes.model import STOP
from e2e.fakes.tokens import FIRST_STATE, next_state, write
from rljob.api.models import RLJob
from rljob.ledger.audit import audit
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.shared_messages import VersionSpan
from rljob.runner.data.reasoning_gym_source import ReasoningGymSource
from rljob.runner.tokenizer import TextCodec
from rljob.scheduling.seeds import derive

STEPS = 4
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MOST = 20


def agent_job(function: str = "ask_twice") -> RLJob:
    """Return a job of two tasks; the first one has an agent."""
    job = make_job(training={"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 0})
    first = job.spec.tasks[0].model_dump(by_alias=True) | {
        "prompt": None,
        "loop": "agent",
        "agent": {"function": f"e2e.fakes.agents:{function}"},
        "sampling": {"maxTokens": MOST},
    }
    tasks = [first, job.spec.tasks[1].model_dump(by_alias=True)]
    return make_job(training=job.spec.training.model_dump(by_alias=True), tasks=tasks)


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


def check_sample(
    sample: SampleTokens, question: str, seed: int, attempt: int, state: str, step: int, codec: TextCodec
) -> None:
    """Check tokens, log-probabilities, mask and versions of a sample against what the engine samples in each turn."""
    context = codec.encode(f"<system>{SYSTEM}<end>\n<user>{question}<end>\n<assistant>", special=False)
    tokens, logprobs, mask, spans = context, bytes(len(context)), bytes(len(context) // 4), []
    for turn in range(2):
        if turn:
            joint = codec.encode(f"\n<user>{AGAIN}<end>\n<assistant>", special=False)
            if array("i", tokens)[-1] != STOP:  # the answer was cut
                joint = codec.encode("<end>", special=False) + joint
            tokens, logprobs, mask = tokens + joint, logprobs + bytes(len(joint)), mask + bytes(len(joint) // 4)
        stream, _ = write(state, tokens, derive(seed, sample.sample, turn, attempt), MOST, [STOP])
        spans.append(VersionSpan(step, len(tokens) // 4, len(tokens) // 4 + len(stream.token_ids)))
        tokens, logprobs = tokens + stream.token_ids.tobytes(), logprobs + stream.logprobs.tobytes()
        mask += b"\x01" * len(stream.token_ids)
    assert [segment.kind for segment in sample.segments] == ["prompt", "model", "observation", "model"]
    assert sample.token_ids == tokens, codec.decode(sample.token_ids)
    assert (sample.logprobs, sample.loss_mask, sample.spans) == (logprobs, mask, spans)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [(), ("runner", "coordinator", "runner")])
async def test_the_calls_of_an_agent_are_trained_as_the_engine_sampled_them(
    tmp_path: Path, killed: tuple[str, ...]
) -> None:
    job = agent_job()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    async with run_harness(job, tmp_path, seconds_per_token=0.002, runner_process=True) as harness:
        trainer = harness.trainer()
        running = asyncio.create_task(trainer.run())
        for i, victim in enumerate(killed):
            await kill_between_turns(harness, victim, trainer, i)
        await running
        restarts = dict(harness.restarts)
        rows = harness.ledger(
            "SELECT s.id, s.attempt, g.row FROM samples s JOIN groups g ON g.id = s.group_id WHERE g.task = 'sums'"
        )
        failed = harness.ledger("SELECT reason FROM samples WHERE state = 'failed'")
    assert restarts == {part: killed.count(part) for part in ("runner", "coordinator")}
    assert not failed, [row["reason"] for row in failed]
    known = {row["id"]: row for row in rows}
    codec = TextCodec(tmp_path / "model")
    source = ReasoningGymSource(job.spec.tasks[0].data.reasoning_gym, job.spec.seed, "")
    state, attempts = FIRST_STATE, []
    assert [one.train.step for one in trainer.applied] == list(range(STEPS))
    for one in trainer.applied:
        for sample in msgspec.msgpack.decode(one.shard, type=list[SampleTokens]):
            if (row := known.get(sample.sample)) is not None:
                question = source.problem("train", row["row"])["question"]
                check_sample(sample, question, job.spec.seed, row["attempt"], state, one.train.step, codec)
                attempts.append(row["attempt"])
        state = next_state(state, one.shard)
    assert len(attempts) >= STEPS * 4
    assert any(attempts) == ("runner" in killed), "another lease begins again"
    report = audit(tmp_path)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]


@pytest.mark.timeout(300)
async def test_forks_and_parallel_calls_of_an_agent_are_trained_as_the_engine_sampled_them(tmp_path: Path) -> None:
    job = agent_job("ask_at_once")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    async with run_harness(job, tmp_path, seconds_per_token=0.002, runner_process=True) as harness:
        trainer = harness.trainer()
        running = asyncio.create_task(trainer.run())
        for i, victim in enumerate(("runner", "coordinator")):
            await kill_between_turns(harness, victim, trainer, i)
        await running
        rows = harness.ledger(
            "SELECT s.id, s.attempt FROM samples s JOIN groups g ON g.id = s.group_id WHERE g.task = 'sums'"
        )
        failed = harness.ledger("SELECT reason FROM samples WHERE state = 'failed'")
    assert not failed, [row["reason"] for row in failed]
    attempts, state, checked = {row["id"]: row["attempt"] for row in rows}, FIRST_STATE, 0
    for one in trainer.applied:
        for sample in msgspec.msgpack.decode(one.shard, type=list[SampleTokens]):
            if sample.sample in attempts:
                check_branches(sample, job.spec.seed, attempts[sample.sample], state)
                checked += 1
        state = next_state(state, one.shard)
    assert checked >= STEPS * 4
    report = audit(tmp_path)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]


def check_branches(sample: SampleTokens, seed: int, attempt: int, state: str) -> None:
    """Check that each answer is what the engine samples after its sequence so far, and is outside of prefixes."""
    ids, begins = array("i", sample.token_ids), [0, *sample.ends]
    found, answers = [], [segment for segment in sample.segments if segment.kind == "model"]
    for segment in answers:
        begin = max(each for each in begins if each <= segment.start)
        context, written = ids[begin : segment.start].tobytes(), ids[segment.start : segment.end]
        for key in ((0, ""), (1, ""), (1, "1.1/1.1"), (0, "0.1/0.1")):
            drawn = derive(seed, sample.sample, key[0], attempt, key[1])
            stream, _ = write(state, context, drawn, MOST, [STOP])
            logprobs = sample.logprobs[4 * segment.start : 4 * segment.end]
            if (stream.token_ids, stream.logprobs.tobytes()) == (written, logprobs):
                found.append(key)
    assert len(answers) == 4 and {(0, ""), (1, ""), (0, "0.1/0.1")} <= {*found}
    assert len(sample.ends) == 3 and sum(sample.loss_mask) == sum(s.end - s.start for s in sample.spans)
    assert sum(segment.kind == "prefix" for segment in sample.segments) == 1
