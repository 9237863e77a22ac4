"""What is said at the end of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rljob.local.view import clock
from rljob.protocol.status import EvaluationResult, RunStatus, encode_status

PLOT = "reward.png"
PLOT_SECONDS = 120


def summary(status: RunStatus, directory: Path) -> list[str]:
    """Return the result of a run as lines."""
    lines = [f"{status.progress.step} steps in {clock(status.progress.seconds)}"]
    for task in dict.fromkeys(result.task for result in status.evaluations):
        lines.append(_accuracy([result for result in status.evaluations if result.task == task]))
    if status.history:
        lines.append(f"reward of the last batch: {status.history[-1].reward:.3f}")
    if status.last_checkpoint.path:
        lines.append(f"checkpoint (Hugging Face format): {directory / status.last_checkpoint.path}")
    lines.append(f"logs: {directory / 'logs'}")
    if (directory / PLOT).exists():
        lines.append(f"plot of the reward: {directory / PLOT}")
    return lines


def checkpoint_line(status: RunStatus, directory: Path) -> str:
    """Return where a run was stopped and what it goes on from."""
    checkpoint = status.last_checkpoint
    kept = "no checkpoint"
    if checkpoint.path:
        kept = f"checkpoint of step {checkpoint.step} in {directory / checkpoint.path}"
    return f"stopped at step {status.progress.step}, {kept}"


def _accuracy(results: list[EvaluationResult]) -> str:
    before, after = results[0], results[-1]
    if before.version == after.version:
        return f"held-out accuracy of {after.task}: {after.accuracy:.3f} on {after.problems:,} problems"
    when = f"at version {before.version}" if before.version else "before"
    return (
        f"held-out accuracy of {after.task}: {before.accuracy:.3f} {when}, {after.accuracy:.3f} after "
        f"({after.accuracy - before.accuracy:+.3f}), on {after.problems:,} problems"
    )


def draw_plot(status: RunStatus, directory: Path, title: str) -> str:
    """Draw the plot into the run directory; return why it could not be drawn, or an empty text."""
    command = [sys.executable, "-m", "rljob.local.plot", str(directory / PLOT), title]
    try:
        done = subprocess.run(command, input=encode_status(status), capture_output=True, timeout=PLOT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
