"""examples/three_rewards.yaml without fakes: the quickstart's model learns with mathematics, code in the sandbox and a
judge in a frozen pool. The judge is a tiny model that always gives the same score; its engine is killed once.

A second job has a loop that asks the same pool. In a third one the pool has the policy's first weights, from which the
KL divergence is measured; they are also two teachers, one of them in the trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import yaml

from e2e.fakes.extensions import SEVEN
from e2e.test_real_run import THOROUGH, rljob_run
from rljob.api.tasks import Task
from rljob.ledger.audit import audit
from rljob.ledger.reader import LedgerReader
from rljob.ledger.sample_detail import show
from rljob.trainer.example_model import END, Recipe, build, make_batches, make_model, train_tokenizer, warm_up

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/three_rewards.yaml"
STEPS = 4
SEEN = SEVEN
"""The end of every prompt of the judge. The tiny judge's chat template shows it nothing else."""
TEMPLATE = f"{{{{ messages[0]['content'][-{len(SEEN)}:] }}}}"


def make_judge(directory: Path) -> None:
    """Write a model that answers :data:`SEEN` with the score 7."""
    recipe = Recipe(working_steps=60, bare_steps=0)
    tokenizer = train_tokenizer([SEEN, "[[7]]"] * 20)
    model = make_model(tokenizer.eos_token_id)
    examples = [[(SEEN, False), (f"[[7]]{END}", True)]] * (60 * recipe.batch)
    warm_up(model, make_batches(tokenizer, examples, recipe.batch, random.Random(1)), 60, recipe)
    model.save_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def manifest_of(directory: Path, judge: Path, loop: str = "") -> Path:
    """Write the example, shorter, with a policy made here and the tiny judge; return its path. With a loop, which asks
    the judge, the reward is mathematics alone."""
    body = yaml.safe_load(EXAMPLE.read_text())
    spec = body["spec"]
    del spec["initializer"]
    spec["models"][0]["source"], spec["models"][1]["source"] = str(directory / "policy"), str(judge)
    spec["rollouts"][1]["maxModelLength"] = 512
    spec["rewards"][2]["config"]["maxTokens"] = 64
    if loop:
        spec["tasks"][0] |= {"loop": loop, "moreRewards": [], "sampling": {"maxTokens": 32}}
        spec["rewards"] = spec["rewards"][:1]
    spec["training"] = {"steps": STEPS, "promptsPerStep": 4, "samplesPerPrompt": 4}
    spec["evaluation"] = {"problems": 4}
    spec["tasks"][0]["data"]["jsonl"]["path"] = str(EXAMPLE.parents[1] / spec["tasks"][0]["data"]["jsonl"]["path"])
    build(directory / "policy", Task.model_validate(spec["tasks"][0]), 1, Recipe(working_steps=100, bare_steps=10))
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def check_audit(directory: Path) -> None:
    """Check that a run has finished and that its audit finds no problem."""
    report = audit(directory)
    assert report.ok and report.finished, [problem for check in report.checks for problem in check.problems]


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not THOROUGH, reason="two minutes; test_examples.py has the same job with a fake engine")
def test_a_model_learns_with_a_judge_of_the_job_whose_engine_is_killed(tmp_path: Path) -> None:
    judge, directory = tmp_path / "judge", tmp_path / "run"
    make_judge(judge)
    with rljob_run(manifest_of(tmp_path, judge), directory) as run:
        run.wait(lambda: run.step() >= 1, seconds=900)
        victim = run.server("rollout-judge-0")
        assert victim > 0
        os.kill(victim, signal.SIGKILL)
        assert run.process.wait(600) == 0, run.output()
    check_audit(directory)
    with sqlite3.connect(directory / "ledger.sqlite") as ledger:
        ends = Counter(state for (state,) in ledger.execute("SELECT state FROM samples"))
        metrics = [json.loads(text) for (text,) in ledger.execute("SELECT metrics FROM scores")]
    assert ends["trained"] == STEPS * 16 and ends["failed"] == 0
    assert {"reward/right", "reward/program", "reward/clear"} <= metrics[0].keys()
    assert {round(each["reward/clear"], 6) for each in metrics} == {round(6 / 9, 6)}, "the judge scored every sample"
    assert "restarting it" in (directory / "logs/rollout-judge-0.log").read_text()


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not THOROUGH, reason="two minutes; test_loops.py has such a loop with fakes")
def test_a_loop_asks_a_teacher_of_the_job_whose_engine_and_runner_are_killed(tmp_path: Path) -> None:
    judge, directory = tmp_path / "judge", tmp_path / "run"
    make_judge(judge)
    loop = "e2e.fakes.extensions:ask_for_a_seven"
    with rljob_run(manifest_of(tmp_path, judge, loop), directory) as run:
        run.wait(lambda: run.step() >= 1, seconds=900)
        os.kill(run.server("rollout-judge-0"), signal.SIGKILL)
        run.wait(lambda: run.step() >= 2, seconds=900)
        os.kill(run.pid("runner"), signal.SIGKILL)
        assert run.process.wait(900) == 0, run.output()
    check_audit(directory)
    with LedgerReader(directory) as ledger:
        ends = Counter(row["state"] for row in ledger.rows("SELECT state FROM samples"))
        trained = [row["id"] for row in ledger.rows("SELECT id FROM samples WHERE state = 'trained'")]
        samples = [show(ledger, sample) for sample in trained]
    assert ends["trained"] == STEPS * 16 and ends["failed"] == 0
    for sample in samples:
        assert sorted((answer.text, answer.finish) for answer in sample.answers) == [("[[7", "stop"), ("[[7]]", "stop")]
        _, second = sample.turns
        assert second.given == "\n[[7]]\n[[7", "the answers are the observation before the second turn"
    assert "restarting it" in (directory / "logs/rollout-judge-0.log").read_text()


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not THOROUGH, reason="two minutes; test_model_logprobs.py has such a job with fakes")
def test_the_kl_divergence_is_measured_from_a_pool_whose_engine_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    path = manifest_of(tmp_path, tmp_path / "policy", loop="single_turn")
    body = yaml.safe_load(path.read_text())
    body["spec"]["algorithm"] = {
        "preset": "remax",
        "klCoefficient": 0.1,
        "klTarget": 1e-3,
        "referencePool": "judge",
        "teachers": [{"pool": "judge", "weight": 0.01}, {"model": "judge", "weight": 0.03}],
    }
    path.write_text(yaml.safe_dump(body))
    with rljob_run(path, directory) as run:
        run.wait(lambda: run.step() >= 1, seconds=900)
        os.kill(run.server("rollout-judge-0"), signal.SIGKILL)
        assert run.process.wait(900) == 0, run.output()
    check_audit(directory)
    with LedgerReader(directory) as ledger:
        ends = Counter(row["state"] for row in ledger.rows("SELECT state FROM samples"))
        steps = [json.loads(row["metrics"]) for row in ledger.rows("SELECT metrics FROM applied ORDER BY step")]
    assert ends["trained"] == STEPS * 16 and ends["baseline"] == STEPS * 4 and ends["failed"] == 0
    distances = [step["reference_kl_k3"] for step in steps]
    assert [step["teacher_kl_k3"] for step in steps] == pytest.approx(distances, rel=1e-3, abs=1e-9), "the same model"
    assert distances[0] < 1e-9, "the first weights are those of the reference, except for the noise of the engine"
    assert all(distance > 1e-9 for distance in distances[1:]), "and later ones are not"
    assert steps[1]["kl_coefficient"] == pytest.approx(0.1 * (1 - 0.2 / 20)), "a divergence below its target"
    assert "restarting it" in (directory / "logs/rollout-judge-0.log").read_text()
