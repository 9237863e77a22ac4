"""Log-probabilities of samples under models of frozen pools: stored with the reward, sent with the tokens, audited."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledgers import RecordingTrainer
from world import Runner, job

from rljob.ledger.audit import audit
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.model_logprobs import check_logprobs
from rljob.protocol.runner_protocol import TrajectoryScored

ROLE = "teachers[0]"
POOLS = {
    "models": [{"name": "policy", "source": "job://model"}, {"name": "big", "source": "job://big"}],
    "rollouts": [{"name": "main", "maxConcurrency": 4}, {"name": "large", "model": "big", "maxModelLength": 100_000}],
    "algorithm": {"teachers": [{"pool": "large"}]},
}


class ScoringRunner(Runner):
    """A runner whose pools give each token -0.5; ``missing``: samples whose pools give none."""

    missing: tuple[str, ...] = ()
    roles: Mapping[str, Sequence[str]] = {"sums": (ROLE,)}
    """Of the models of frozen pools, by task."""

    def say(self, *messages: Any) -> None:
        super().say(*(self._with_logprobs(message) for message in messages))

    def _with_logprobs(self, message: Any) -> Any:
        if not isinstance(message, TrajectoryScored) or message.sample in self.missing:
            return message
        tokens = sum(len(turn.token_ids) for turn in self.turns[message.sample]) // 4
        task = self.driving[message.sample].task
        found = {role: array("f", [-0.5 - i] * tokens).tobytes() for i, role in enumerate(self.roles[task])}
        return msgspec.structs.replace(message, logprobs=found)


async def finished(
    new_world: Any, tmp_path: Path, missing: tuple[str, ...] = (), spec: Mapping[str, Any] = POOLS
) -> tuple[Any, list[SampleTokens]]:
    """Run a job to its end; return the world and the samples that the trainer got."""
    world, shards = new_world(job(**spec), tmp_path), []
    world.runner, world.trainer = ScoringRunner(world), RecordingTrainer(world)
    world.runner.missing = missing
    check = world.trainer.check

    def keep(command: Any, data: bytes) -> None:
        check(command, data)
        shards.extend(msgspec.msgpack.decode(data, type=list[SampleTokens]))

    world.trainer.check = keep
    (world.storage / "job.json").write_text(world.manifest.model_dump_json(by_alias=True))
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    return world, shards


def problems(world: Any) -> list[str]:
    """Return what the audit finds."""
    return [problem for check in audit(world.storage).checks for problem in check.problems]


async def test_the_trainer_gets_them_with_the_tokens(new_world: Any, tmp_path: Path) -> None:
    world, shards = await finished(new_world, tmp_path)
    assert len(shards) == 16
    for sample in shards:
        assert list(array("f", sample.models[ROLE])) == [-0.5] * sum(sample.loss_mask)
    assert problems(world) == []


async def test_a_sample_without_them_fails(new_world: Any, tmp_path: Path) -> None:
    world, _ = await finished(new_world, tmp_path, missing=("g1.0",))
    [(state, reason)] = world.store.query("SELECT state, reason FROM samples WHERE id = 'g1.0'")
    assert state == "failed" and reason == "it has log-probabilities of [], and the job needs those of ['teachers[0]']"
    assert problems(world) == []


TASK = {"data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r", "sampling": {"maxTokens": 16}}
TWO_TASKS = {
    **POOLS,
    "tasks": [{"name": "sums", **TASK}, {"name": "more", **TASK}],
    "rollouts": [*POOLS["rollouts"], {"name": "small", "model": "big", "maxModelLength": 100_000}],
    "algorithm": {"teachers": [{"pool": "large"}, {"pool": "small", "tasks": ["more"]}]},
}


async def test_samples_have_those_of_the_teachers_of_their_task(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (ROLE, "teachers[1]")
    monkeypatch.setattr(ScoringRunner, "roles", {"sums": (ROLE,), "more": both})
    world, shards = await finished(new_world, tmp_path, spec=TWO_TASKS)
    tasks = dict(world.store.query("SELECT s.id, g.task FROM samples s JOIN groups g ON g.number = s.group_number"))
    assert {tasks[sample.sample] for sample in shards} == {"sums", "more"}
    for sample in shards:
        assert sorted(sample.models) == ([ROLE] if tasks[sample.sample] == "sums" else [*both])
    assert problems(world) == []
    world.store.db.execute("DELETE FROM model_logprobs WHERE role = ?", (both[1],))
    world.store.db.commit()
    assert any("not the log-probabilities of" in found for found in problems(world))


CORRUPTIONS = {
    "a row is missing": ("DELETE FROM model_logprobs WHERE sample_number = 0", "not the log-probabilities of"),
    "another digest": ("UPDATE model_logprobs SET digest = 'x' WHERE sample_number = 0", "the digest of its log-prob"),
    "another place": ("UPDATE model_logprobs SET position = 0 WHERE sample_number = 0", "are damaged, or not at"),
    "of another sample": (
        "UPDATE model_logprobs AS m SET (digest, segment, position, length) = (SELECT digest, segment, position, length"
        " FROM model_logprobs o WHERE o.sample_number = 1) WHERE sample_number = 0", "of another sample, model or",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
async def test_the_audit_detects_wrong_log_probabilities(new_world: Any, tmp_path: Path, name: str) -> None:
    world, _ = await finished(new_world, tmp_path)
    statement, problem = CORRUPTIONS[name]
    world.store.db.execute(statement)
    world.store.db.commit()
    assert any(problem in found for found in problems(world)), problems(world)


@pytest.mark.parametrize(
    "given", [{}, {"other": b"1234"}, {ROLE: b"1234" * 2}, {ROLE: array("f", [math.nan]).tobytes()}]
)
def test_log_probabilities_of_other_models_or_tokens_are_refused(given: dict[str, bytes]) -> None:
    check_logprobs({ROLE: array("f", [-1.0]).tobytes()}, [ROLE], 1)
    with pytest.raises(ValueError, match="log-probabilities of"):
        check_logprobs(given, [ROLE], 1)
