"""Results of evaluations: from the rewards of their answers, from rows of the ledger, over all tasks, as metrics."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from typing import Any

from rljob.api.job_status import EvaluationResult, PassRate
from rljob.api.tasks import Evaluation


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of one problem: 1 - C(samples - passed, k) / C(samples, k).

    It is the probability that at least one of ``k`` answers passes, if they are drawn without replacement from
    ``samples`` answers of which ``passed`` pass. Source: Chen et al., arXiv 2107.03374.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def evaluation_result(
    version: int, task: str, problems: Sequence[Sequence[float | None]], settings: Evaluation, failure: str
) -> EvaluationResult:
    """Return the result of one task.

    Args:
        version: policy version of the answers.
        task: name of the task.
        problems: rewards of the answers to each problem, settings.samples_per_problem of each; None: the answer could
            not be scored. It does not pass, and counts as 0 in the mean reward.
        settings: of the manifest.
        failure: why the last answer of those that could not be scored failed; empty if all were scored.
    """
    rewards = [reward for answers in problems for reward in answers]
    passed = [sum(reward is not None and reward >= settings.pass_reward for reward in answers) for answers in problems]
    samples = settings.samples_per_problem
    return EvaluationResult(
        version=version,
        task=task,
        accuracy=sum(passed) / len(rewards),
        problems=len(problems),
        mean_reward=sum(reward or 0.0 for reward in rewards) / len(rewards),
        failed=sum(reward is None for reward in rewards),
        failure=failure,
        samples_per_problem=samples,
        pass_at=[PassRate(k, mean_pass_at(samples, passed, k)) for k in settings.pass_at],
    )


def mean_pass_at(samples: int, passed: Sequence[int], k: int) -> float:
    """Return pass@k as a mean over problems, of which each has ``samples`` answers; ``passed``: that pass, by
    problem."""
    return math.fsum(pass_at_k(samples, count, k) for count in passed) / len(passed)


def over_tasks(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """Return the result over the problems of all tasks of one version. Its task is empty."""
    problems = sum(result.problems for result in results)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(v * r.problems for v, r in zip(values, results, strict=True)) / problems

    return EvaluationResult(
        version=results[0].version,
        task="",
        accuracy=mean([result.accuracy for result in results]),
        problems=problems,
        mean_reward=mean([result.mean_reward for result in results]),
        failed=sum(result.failed for result in results),
        samples_per_problem=results[0].samples_per_problem,
        pass_at=[
            PassRate(rate.k, mean([result.pass_at[i].value for result in results]))
            for i, rate in enumerate(results[0].pass_at)
        ],
    )


def result_of(row: sqlite3.Row) -> EvaluationResult:
    """Return a row of the table evaluations as a result."""
    return EvaluationResult(
        version=row["version"],
        task=row["task"],
        accuracy=row["accuracy"],
        problems=row["problems"],
        mean_reward=row["mean_reward"],
        failed=row["failed"],
        failure=row["failure"],
        samples_per_problem=row["samples"],
        pass_at=[PassRate(int(k), value) for k, value in json.loads(row["pass_at"]).items()],
    )


def metrics_of(result: EvaluationResult) -> dict[str, float]:
    """Return a result as metrics: ``evaluation/TASK/accuracy``; of all tasks ``evaluation/accuracy``."""
    values = {
        "accuracy": result.accuracy,
        "mean_reward": result.mean_reward,
        "problems": result.problems,
        "samples": result.samples,
        "failed": result.failed,
        **{f"pass@{rate.k}": rate.value for rate in result.pass_at},
    }
    prefix = f"evaluation/{result.task}" if result.task else "evaluation"
    return {f"{prefix}/{name}": value for name, value in values.items()}


def pass_rates_agree(recorded: Any, passed: Any, samples: int, pass_at: str) -> bool:
    """Return whether a recorded ``pass_at`` is that of the answers, for the audit.

    Args:
        recorded: JSON as in the ledger.
        passed: JSON list, answers that pass of each problem.
        samples: answers to each problem.
        pass_at: evaluation.passAt as a JSON list.
    """
    try:
        rates = {int(k): float(value) for k, value in json.loads(recorded).items()}
        counts = [int(count) for count in json.loads(passed)]
    except (TypeError, ValueError, AttributeError):
        return False
    ks: list[int] = json.loads(pass_at)
    if list(rates) != ks or not counts or not all(0 <= count <= samples for count in counts):
        return False
    return all(math.isclose(rates[k], mean_pass_at(samples, counts, k), abs_tol=1e-9) for k in ks)
