"""The figures of a run as the ledger has them: one flat object for every applied step and every evaluation's task.

Names are TensorBoard's tags. What only the coordinator's process knew when a step was applied (queues, seconds, counts)
is in the ledger's table ``figures``; the rest is computed here from samples.
"""

from __future__ import annotations

import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

Line = dict[str, Any]
"""kind (step | evaluation), step (0-based batch) or version, Unix time, and the figures by name."""


def new_lines(db: sqlite3.Connection, steps: int, results: int, most: int) -> list[Line]:
    """Return what the ledger has beyond its first ``steps`` steps and ``results`` of evaluations, oldest first, at most
    ``most`` of each kind."""
    lines = [*_steps(db, steps, most), *evaluations(db, results, most)]
    return sorted(lines, key=lambda line: line["time"])


def _steps(db: sqlite3.Connection, first: int, most: int) -> Iterator[Line]:
    rows = db.execute(
        "SELECT a.step, a.time, a.metrics, MIN(a.incarnation), (SELECT figures FROM figures f WHERE f.step = a.step)"
        " AS figures FROM applied a WHERE a.step >= ? GROUP BY a.step ORDER BY a.step LIMIT ?",
        (first, most),
    ).fetchall()
    for row in rows:
        trainer = {f"trainer/{name}": value for name, value in msgspec.json.decode(row["metrics"]).items()}
        known = msgspec.json.decode(row["figures"] or "{}")
        yield {"kind": "step", "step": row["step"], "time": row["time"], **batch(db, row["step"]), **trainer, **known}


def evaluations(db: sqlite3.Connection, first: int, most: int) -> Iterator[Line]:
    """Yield at most ``most`` results of evaluations beyond the ``first`` ones, by version and task."""
    for row in db.execute("SELECT * FROM evaluations ORDER BY version, task LIMIT ? OFFSET ?", (most, first)):
        figures = {name: row[name] for name in ("accuracy", "mean_reward", "problems", "failed")}
        named = {f"evaluation/{row['task']}/{name}": value for name, value in figures.items()}
        yield {"kind": "evaluation", "version": row["version"], "task": row["task"], "time": row["time"], **named}


def batch(db: sqlite3.Connection, step: int) -> dict[str, float]:
    """Return the figures of the samples of a batch; none when it has no samples."""
    rows = db.execute(
        "SELECT s.group_id, g.task, s.reward, s.prompt_tokens, s.response_tokens, s.min_version, s.max_version,"
        " s.finish FROM samples s JOIN groups g ON g.id = s.group_id WHERE s.step = ?",
        (step,),
    ).fetchall()
    if not rows:
        return {}
    groups: dict[str, list[float]] = {}
    tasks: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["reward"])
        tasks.setdefault(row["task"], []).append(row["reward"])
    rewards = [row["reward"] for row in rows]
    figures = {
        "samples": float(len(rows)),
        **_spread("reward", rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/groups_without_spread": _share(min(group) == max(group) for group in groups.values()),
        "length/truncated": _share(row["finish"] == "length" for row in rows),
        "version/lowest": float(min(row["min_version"] for row in rows)),
        "version/highest": float(max(row["max_version"] for row in rows)),
    }
    for task, of_task in tasks.items():
        figures |= {**_spread(f"reward/{task}", of_task), f"samples/{task}": float(len(of_task))}
    for name, values in {
        "length/response": [row["response_tokens"] for row in rows],
        "length/prompt": [row["prompt_tokens"] for row in rows],
        "staleness": [step - row["min_version"] for row in rows],
    }.items():
        figures |= {f"{name}/mean": statistics.fmean(values), f"{name}/max": float(max(values))}
    return figures


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}/mean": statistics.fmean(values), f"{name}/std": statistics.pstdev(values)}


def _share(hits: Iterator[bool]) -> float:
    return statistics.fmean(map(float, hits))
