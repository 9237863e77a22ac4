"""The plot at the end of a run, drawn by a program of its own, because matplotlib takes a second to import:

``python -m rljob.local.plot OUTPUT.png TITLE`` reads a RunStatus (JSON) from standard input.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rljob.protocol.run_status import RunStatus, decode_status, encode_status

PLOT = "reward.png"
TIMEOUT_SECONDS = 120


def draw_plot(status: RunStatus, directory: Path, title: str) -> str:
    """Draw the plot into the run directory; return why it could not be drawn, or an empty text.

    A run without steps, which only evaluates, has no plot.
    """
    if not status.progress.steps:
        return ""
    command = [sys.executable, "-m", "rljob.local.plot", str(directory / PLOT), title]
    try:
        done = subprocess.run(command, input=encode_status(status), capture_output=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip().rpartition("\n")[2]


def _plot(status: RunStatus, output: Path, title: str) -> None:
    """Draw reward and staleness of every step, and the held-out accuracy, into ``output``."""
    import matplotlib  # noqa: PLC0415 - only the program of its own needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    steps = [point.step for point in status.history]
    upper.plot(steps, [point.reward for point in status.history], label="reward, mean of the batch", color="tab:blue")
    for i, task in enumerate(dict.fromkeys(result.task for result in status.evaluations)):
        results = [result for result in status.evaluations if result.task == task]
        label = f"held-out accuracy, {task} ({results[-1].problems:,} problems)"
        upper.plot([r.version for r in results], [r.accuracy for r in results], "o--", label=label, color=f"C{i + 1}")
    upper.set(title=title, ylabel="reward, accuracy")
    upper.grid(alpha=0.3)
    if status.history or status.evaluations:
        upper.legend(loc="lower right")
    lower.plot(steps, [point.staleness for point in status.history], color="tab:orange")
    lower.set(xlabel="step", ylabel="staleness\n(versions, mean)", ylim=(0, None))
    lower.grid(alpha=0.3)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    _plot(decode_status(sys.stdin.buffer.read()), Path(sys.argv[1]), sys.argv[2])
