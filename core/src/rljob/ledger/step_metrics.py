"""Metrics of steps and evaluations.

The metrics of a step are computed once, when its batch is first applied, and stored in the table step_metrics. History,
status, metrics.jsonl and TensorBoard use these values. Metric names are TensorBoard tags. Metrics come from the samples
of the batch (computed here), from the trainer (``trainer/…``) and from the coordinator's process (seconds, queues,
counts).
"""

from __future__ import annotations

import math
import sqlite3
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rljob.ledger.evaluation_results import metrics_of, over_tasks, result_of
from rljob.ledger.queries import Query
from rljob.protocol.run_status import HistoryPoint

Line = dict[str, Any]
"""kind (step | evaluation), step (0-based batch) or version, time (Unix), and the metrics by name."""
Metrics = dict[str, float]

STALENESS_SAMPLES = "staleness/samples/"
"""Prefix of the number of samples with a staleness."""
_decoder = msgspec.json.Decoder(Metrics)


def step_metrics(query: Query, step: int, trainer: Mapping[str, float], process: Mapping[str, float]) -> Metrics:
    """Return all metrics of a step.

    Args:
        query: query function of the ledger.
        step: step of the batch.
        trainer: metrics of the trainer, without the prefix ``trainer/``.
        process: metrics of the coordinator's process, by name.
    """
    named = {f"trainer/{name}": value for name, value in trainer.items()}
    return {**_batch(query, step), **named, **process}


def history_point(step: int, metrics: Mapping[str, float]) -> HistoryPoint:
    """Return the history point of a step."""
    return HistoryPoint(
        step=step,
        reward=metrics["reward/mean"],
        staleness=metrics["staleness/mean"],
        tokens_per_second=metrics["tokens_per_second"],
        seconds=metrics["seconds"],
    )


def staleness_counts(metrics: Mapping[str, float]) -> dict[int, int]:
    """Return staleness → samples of a step."""
    return {
        int(name.removeprefix(STALENESS_SAMPLES)): int(count)
        for name, count in metrics.items()
        if name.startswith(STALENESS_SAMPLES)
    }


def recorded_steps(query: Query) -> Iterator[tuple[int, Metrics]]:
    """Yield (step, metrics) of the applied steps, in order."""
    for row in query("SELECT step, metrics FROM step_metrics ORDER BY step"):
        yield row["step"], _decoder.decode(row["metrics"])


# --- lines of metrics.jsonl ---


def new_lines(db: sqlite3.Connection, steps: int, results: int, limit: int) -> list[Line]:
    """Return the lines after the first ``steps`` steps and the first ``results`` evaluation results, oldest first, at
    most ``limit`` of each kind."""
    lines = [*_steps(db, steps, limit), *evaluations(db, results, limit)]
    return sorted(lines, key=lambda line: line["time"])


def _steps(db: sqlite3.Connection, first: int, limit: int) -> Iterator[Line]:
    rows = db.execute(
        "SELECT m.step, m.metrics, a.time, MIN(a.incarnation) FROM step_metrics m JOIN applied a ON a.step = m.step"
        " WHERE m.step >= ? GROUP BY m.step ORDER BY m.step LIMIT ?",
        (first, limit),
    ).fetchall()
    for row in rows:
        yield {"kind": "step", "step": row["step"], "time": row["time"], **_decoder.decode(row["metrics"])}


def evaluations(db: sqlite3.Connection, first: int, limit: int) -> Iterator[Line]:
    """Yield at most ``limit`` evaluation results after the first ``first``, ordered by version and task. The last one
    of a version also has the metrics over all tasks."""
    rows = db.execute(
        "SELECT *, MAX(task) OVER (PARTITION BY version) AS last FROM evaluations ORDER BY version, task"
        " LIMIT ? OFFSET ?",
        (limit, first),
    ).fetchall()
    for row in rows:
        metrics = metrics_of(result_of(row))
        if row["task"] == row["last"]:
            of_version = db.execute("SELECT * FROM evaluations WHERE version = ?", (row["version"],)).fetchall()
            metrics |= metrics_of(over_tasks([result_of(each) for each in of_version]))
        yield {"kind": "evaluation", "version": row["version"], "task": row["task"], "time": row["time"], **metrics}


# --- samples of a batch ---


def _batch(query: Query, step: int) -> Metrics:
    rows = query(
        "SELECT s.group_number, g.task, s.reward, s.prompt_tokens, s.response_tokens, s.min_version, s.max_version,"
        " s.finish FROM samples s CROSS JOIN groups g ON g.number = s.group_number WHERE s.step = ?",
        step,
    )
    assert rows, f"there is no batch {step}"
    # Columns: to read a value of a row by its name takes as long as all values by their order.
    numbers, names, rewards, prompts, responses, lowest, highest, finishes = zip(*rows, strict=True)
    groups: dict[int, list[float]] = {}
    tasks: dict[str, list[float]] = {}
    for number, name, reward in zip(numbers, names, rewards, strict=True):
        groups.setdefault(number, []).append(reward)
        tasks.setdefault(name, []).append(reward)
    ages = [step - version for version in lowest]
    metrics = {
        "samples": float(len(rows)),
        **_mean_and_std("reward", rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/zero_std_group_fraction": _fraction(min(group) == max(group) for group in groups.values()),
        "response_length/truncated_fraction": finishes.count("length") / len(rows),
        "version/lowest": float(min(lowest)),
        "version/highest": float(max(highest)),
    }
    for task, of_task in tasks.items():
        metrics |= {**_mean_and_std(f"reward/{task}", of_task), f"samples/{task}": float(len(of_task))}
    for name, values in {"response_length": responses, "prompt_length": prompts, "staleness": ages}.items():
        metrics |= {f"{name}/mean": statistics.fmean(values), f"{name}/max": float(max(values))}
    staleness = Counter(ages)
    return metrics | {f"{STALENESS_SAMPLES}{age}": float(staleness[age]) for age in range(max(staleness) + 1)}


def _mean_and_std(name: str, values: Sequence[float]) -> Metrics:
    mean = statistics.fmean(values)
    squares = math.fsum((value - mean) ** 2 for value in values) if min(values) < max(values) else 0.0
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(squares / len(values))}  # pstdev computes with fractions


def _fraction(flags: Iterator[bool]) -> float:
    return statistics.fmean(map(float, flags))
