"""The code of docs/extending.md, in a user's package, runs in each extension point, alone and with the others.

The package is outside the repository. Each job ends with a clean audit, and its ledger shows that the code was used.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable

import numpy as np
import pytest

from e2e.extensions.workspace import Run, Workspace
from e2e.fakes.model import write_model
from e2e.fakes.tiny import write_tiny_model
from rljob.ledger.sample_detail import SampleDetail

TURNS = 3


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("user"))


def rewards_of(samples: list[SampleDetail]) -> np.ndarray:
    return np.array([sample.sample.reward for sample in samples])


def advantages_of(samples: list[SampleDetail]) -> np.ndarray:
    return np.array([sample.sample.advantage for sample in samples])


def ranks(rewards: np.ndarray) -> np.ndarray:
    """Return the advantage of each sample of a group by the formula of `ranks` on the page."""
    return np.sign(rewards[:, None] - rewards).mean(1)


def over_batch(rewards: np.ndarray) -> np.ndarray:
    """Return the advantage of each sample of a batch by the formula of `over_batch` on the page."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def table_after(before: np.ndarray, samples: list[SampleDetail], rate: float) -> np.ndarray:
    """Return the table after one step of REINFORCE on a batch, computed token by token in float64."""
    gradient = np.zeros(before.shape)
    tokens = sum(len(turn.written) for sample in samples for turn in sample.turns)
    for sample in samples:
        context: list[int] = []
        for turn in sample.turns:
            context += turn.given_ids
            for token in turn.written:
                row = before[context[-1]].astype(np.float64)
                probabilities = np.exp(row - row.max())
                probabilities /= probabilities.sum()
                assert token.logprob == pytest.approx(math.log(probabilities[token.id]), abs=1e-4)
                gradient[context[-1]] -= sample.sample.advantage * probabilities / tokens
                gradient[context[-1], token.id] += sample.sample.advantage / tokens
                context.append(token.id)
    return before + rate * gradient


def check_table(run: Run) -> None:
    """Assert that REINFORCE on the batch between the first two checkpoints gives the second one."""
    before = run.table(1)
    assert not np.array_equal(before, run.table(2))
    np.testing.assert_allclose(run.table(2), table_after(before, run.batch(1), 0.5), atol=1e-5)


def check_turns(run: Run) -> None:
    """Assert that every sample has three turns, with an observation before each later turn."""
    samples = run.batch(0) + run.batch(1)
    assert samples
    for sample in samples:
        assert [turn.turn for turn in sample.turns] == list(range(TURNS))
        first, *others = sample.turns
        for turn in others:
            assert turn.given == f"; again, {first.given}"
        assert sample.sample.response_tokens == sum(len(turn.written) for turn in sample.turns)


def test_nothing_of_the_user_is_in_the_repository(workspace: Workspace) -> None:
    program = "import sys, mypackage; print(mypackage.__path__); import e2e"
    done = workspace.python("-c", program)
    assert str(workspace.place) in done.stdout
    assert "No module named 'e2e'" in done.stdout


def check_engine_and_backend(run: Run) -> None:
    [(engine, digests)] = run.rows("SELECT engine, COUNT(DISTINCT digest) FROM served GROUP BY engine")
    assert engine.startswith("main-") and digests == 2, "one digest for each version that was sampled"
    assert rewards_of(run.batch(0)).std() > 0
    assert not np.array_equal(run.table(1), run.table(2))
    log = (run.directory / "logs" / "trainer.log").read_text()
    assert "transformers" not in log


def check_group_advantages(run: Run) -> None:
    for step in (0, 1):
        samples = run.batch(step)
        for group in {sample.sample.group for sample in samples}:
            members = [sample for sample in samples if sample.sample.group == group]
            np.testing.assert_allclose(advantages_of(members), ranks(rewards_of(members)), atol=1e-6)
    assert advantages_of(run.batch(0)).any()


def check_batch_advantages(run: Run) -> None:
    for step in (0, 1):
        samples = run.batch(step)
        np.testing.assert_allclose(advantages_of(samples), over_batch(rewards_of(samples)), atol=1e-5)
    assert advantages_of(run.batch(0)).any()


def check_reward(run: Run) -> None:
    """Assert that every sample has the reward and the metric of `near`, and that rewards differ."""
    samples = run.batch(0) + run.batch(1)
    for sample in samples:
        distance = sample.metrics.get("distance")
        assert sample.sample.reward == (0.0 if distance is None else 1 / (1 + distance)), sample.sample.text
    assert len({sample.sample.reward for sample in samples}) > 1


def check_filter(run: Run) -> None:
    """Assert that the filter of the page decided about every group, and rejected one."""
    groups: dict[str, list[float]] = {}
    for group, reward in run.rows("SELECT group_id, reward FROM samples WHERE reward IS NOT NULL ORDER BY number"):
        groups.setdefault(group, []).append(reward)
    decided = dict(run.rows("SELECT 'g' || group_number, accepted FROM decisions"))
    trained = {row[0] for row in run.rows("SELECT DISTINCT group_id FROM samples WHERE state = 'trained'")}
    assert decided == {group: int(rewards.count(max(rewards)) <= 2) for group, rewards in groups.items()}
    assert trained == {group for group, accepted in decided.items() if accepted} != set(decided)


GROUP_ADVANTAGE = {"algorithm": {"advantage": "mypackage.advantages:ranks"}}
FEW_BEST = {"tasks": {"groupFilter": {"function": "mypackage.filter:few_best"}}}
NEAR = {"rewards": {"builtin": None, "function": "mypackage.reward:near"}}


def test_an_engine_a_backend_an_advantage_of_a_group_a_filter_and_a_reward_run_a_job(workspace: Workspace) -> None:
    run = workspace.run("group-advantage", **GROUP_ADVANTAGE, **FEW_BEST, **NEAR).check()
    check_engine_and_backend(run)
    check_group_advantages(run)
    check_reward(run)
    check_filter(run)


def test_all_extensions_run_the_job_of_the_page(workspace: Workspace) -> None:
    run = workspace.run_manifest("job.yaml", "mine").check()
    check_turns(run)
    check_table(run)
    check_batch_advantages(run)
    check_filter(run)


def check_branches(run: Run) -> None:
    """Assert that every sample has its branches and the lengths of its sequences."""
    for sample in run.batch(0) + run.batch(1):
        assert [(turn.turn, turn.branch) for turn in sample.turns] == [
            (0, ""), (1, ""), (1, "1.1"), (1, "1.2"), (1, "1.3")
        ]  # fmt: skip
        first, last, *guesses = sample.turns
        answer = "".join(token.text or "" for token in last.written).removesuffix("<end>")
        assert (sample.sample.text or "").startswith(answer), (
            "it is the text that was scored; its end may be half a character"
        )
        assert {guess.given for guess in guesses} == {f"; again, {first.given}"}
        assert last.given is not None and last.given.startswith("; from ")
        assert last.given.endswith(f": {first.given}"), "guesses may end within a character, so they are not compared"
        shared = len(first.given_ids) + len(first.written)
        assert sample.sample.sequences == [
            shared + len(turn.given_ids) + len(turn.written) for turn in (last, *guesses)
        ]  # fmt: skip


def test_a_loop_with_branches_trains_each_token_once(workspace: Workspace) -> None:
    fields = {"advantage": "mypackage.advantages:over_batch", "objective": "mypackage.objective:reinforce"}
    tasks = {"loop": "mypackage.drafts:three_drafts"}
    run = workspace.run("branches", tasks=tasks, algorithm=fields, **NEAR).check()
    check_branches(run)
    check_table(run)
    checked = workspace.python("-m", "rljob.cli.main", "reward", "check", str(run.directory))
    summary = checked.stdout.splitlines()[-1]
    assert summary.startswith("reward near: 32 scored, 0 errors, 0 with another reward than recorded"), checked.stdout


def test_a_loop_that_asks_a_teacher_trains_its_own_turns(workspace: Workspace) -> None:
    big = {"name": "big", "source": "model"}
    teacher = {"name": "teacher", "model": "big", "engine": "teacher.engine:Teacher", "maxModelLength": 64}
    fields = {"advantage": "mypackage.advantages:over_batch", "objective": "mypackage.objective:reinforce"}
    tasks = {"loop": "mypackage.teacher:with_a_hint"}
    added = {"models": big, "rollouts": {**teacher, "replicas": {"min": 2}}}
    run = workspace.run("teacher", added, tasks=tasks, algorithm=fields, **NEAR).check()
    for sample in run.batch(0) + run.batch(1):
        guess, answer = sample.turns
        [hint] = sample.answers
        assert (hint.pool, hint.finish, hint.branch, hint.turn) == ("teacher", "length", "", 1)
        assert hint.text == "16 0.7 word." and guess.given is not None
        assert answer.given == f"; 16 0.7 word.: {guess.given}"
    check_table(run)
    shown = workspace.python("-m", "rljob.cli.main", "show", str(run.directory), sample.sample.id, "--turns")
    assert "of pool teacher before turn 1: length" in shown.stdout and hint.text in shown.stdout


@pytest.mark.skipif(not os.environ.get("RLJOB_THOROUGH"), reason="each part is in a job above; make thorough")
@pytest.mark.parametrize(
    ("name", "fields", "check"),
    [
        ("engine-and-backend", {}, check_engine_and_backend),
        ("group-advantage-alone", GROUP_ADVANTAGE, check_group_advantages),
        ("batch-advantage", {"algorithm": {"advantage": "mypackage.advantages:over_batch"}}, check_batch_advantages),
        ("objective", {"algorithm": {"objective": "mypackage.objective:reinforce"}}, check_table),
        ("loop", {"tasks": {"loop": "mypackage.loop:three_guesses"}}, check_turns),
        ("reward", NEAR, check_reward),
        ("filter", FEW_BEST, check_filter),
    ],
)
def test_each_extension_alone_runs_a_job(
    workspace: Workspace, name: str, fields: dict[str, dict[str, object]], check: Callable[[Run], None]
) -> None:
    check(workspace.run(name, **fields).check())


def test_the_built_in_trainer_works_with_all_other_extensions(workspace: Workspace) -> None:
    write_model(workspace.place / "qwen2")
    write_tiny_model(workspace.place / "qwen2")
    run = workspace.run(
        "built-in-trainer",
        models={"source": "qwen2"},
        algorithm={
            "advantage": "mypackage.advantages:over_batch",
            "objective": "mypackage.selection:surprising",
            "klCoefficient": 0.5,
            "klEstimator": "mypackage.kl:huber",
        },
        tasks={"loop": "mypackage.loop:three_guesses"},
        rewards={"builtin": None, "function": "mypackage.reward:short", "config": {"limit": 2}},
        trainer={"backend": "fsdp"},
        rollouts={"engine": "qwen.engine:QwenEngine"},
    ).check()
    check_turns(run)
    check_batch_advantages(run)
    first, second = (json.loads(text) for (text,) in run.rows("SELECT metrics FROM step_metrics ORDER BY step"))
    name = "trainer/reference_kl_k3"
    assert first[name] == 0 < second[name], "the reference is the first policy"


WRONG = {
    "spec.algorithm.advantage": ("nowhere:thing", "No module named 'nowhere'"),
    "spec.algorithm.objective": ("mypackage.objective:thing", "mypackage.objective has no attribute thing"),
    "spec.algorithm.correction": ("mypackage.correction:thing", "mypackage.correction has no attribute thing"),
    "spec.algorithm.aggregation": ("wrong.raises:thing", "RuntimeError: a licence is missing"),
    "spec.algorithm.klEstimator": ("mypackage.kl:thing", "mypackage.kl has no attribute thing"),
    "spec.trainer.backend": ("mypackage.backend:thing", "mypackage.backend has no attribute thing"),
    "spec.rollouts[0].engine": ("wrong.raises:thing", "RuntimeError: a licence is missing"),
    "spec.tasks[0].loop": ("wrong.loops:not_async", "async"),
    "spec.tasks[0].groupFilter.function": ("mypackage.filter:thing", "mypackage.filter has no attribute thing"),
    "spec.rewards[0].function": ("nowhere:thing", "No module named 'nowhere'"),
}
"""Every field that names code → a value that cannot be used, and the reason."""


def test_wrong_references_are_reported_together_before_anything_starts(workspace: Workspace) -> None:
    sections: dict[str, dict[str, object]] = {"rewards": {"builtin": None}, "algorithm": {"klCoefficient": 1}}
    for path, (reference, _) in WRONG.items():
        _, section, *parents, field = path.split(".")
        values = sections.setdefault(section.partition("[")[0], {})
        for parent in parents:
            values = values.setdefault(parent, {})  # type: ignore[assignment]
        values[field] = reference
    before = sorted(workspace.place.glob("runs/*"))
    run = workspace.run("wrong", **sections)
    assert run.code == 2, run.output
    lines = run.output.splitlines()
    for path, (_, words) in WRONG.items():
        assert any(path in line and words in line for line in lines), f"{path}\n{run.output}"
    assert "Traceback" not in run.output
    assert sorted(workspace.place.glob("runs/*")) == before


def test_a_wrong_advantage_ends_the_run_with_one_message_and_no_step(workspace: Workspace) -> None:
    run = workspace.run("too-few", algorithm={"advantage": "wrong.advantages:too_few"})
    assert run.code == 1, run.output
    [sentence] = [line for line in run.output.splitlines() if line.startswith("rljob: ")]
    assert "spec.algorithm.advantage: wrong.advantages:too_few failed" in sentence
    assert "shape (3,) for a group of 4" in sentence
    assert run.rows("SELECT COUNT(*) FROM applied")[0][0] == 0
    assert not list(run.directory.glob("checkpoints/step-*"))


def test_a_group_filter_that_fails_ends_its_groups_and_the_run_continues(workspace: Workspace) -> None:
    run = workspace.run("fails-at-first", tasks={"groupFilter": {"function": "wrong.filters:fails_at_first"}}).check()
    name = "tasks[sums].groupFilter.function wrong.filters:fails_at_first"
    failed = run.rows("SELECT reason, COUNT(*) FROM samples WHERE state = 'failed' GROUP BY reason ORDER BY reason")
    assert [tuple(row) for row in failed] == [
        (f"{name} raised RuntimeError: a licence is missing", 4),
        (f"{name} returned None; return True or False", 4),
    ]


@pytest.mark.skipif(not os.environ.get("RLJOB_THOROUGH"), reason="waits for three hangs of two seconds; make thorough")
def test_a_loop_that_blocks_or_ends_its_runner_fails_its_sample_only(workspace: Workspace) -> None:
    loop = {"loop": "wrong.loops:ends_its_runner"}
    run = workspace.run("ends-its-runner", tasks=loop, failurePolicy={"hangSeconds": 2}).check()
    reasons = dict(run.rows("SELECT id, reason FROM samples JOIN failures ON samples.number = sample_number"))
    place = r"\(.*wrong/loops.py:\d+\)"
    ended = "its loop ended 3 processes of runners; the last time it"
    patterns = {
        "g0.1": rf"{ended} blocked the event loop of its runner for \d[\d.]* s, in ends_its_runner {place}",
        "g1.0": rf"{ended} crashed its runner \(Segmentation fault\), in string_at \(.*ctypes.*:\d+\)",
        "g2.3": r"a task of its loop raised SystemExit: 2",
    }
    assert reasons.keys() == patterns.keys()
    for sample, pattern in patterns.items():
        assert re.fullmatch(pattern, reasons[sample]), reasons[sample]
