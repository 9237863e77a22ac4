"""The plot of the operator scale benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning_plot import save
from benchmarks.operator_scale_figures import Size
from benchmarks.operator_scale_usage import BENCHMARK

LATENCIES = {
    "edit, at rest": "edits",
    "edit, coordinators report": "edits_while_reporting",
    "trainer ended": "kills",
}
"""Line → phase."""


def plot(sizes: Sequence[Size], path: Path) -> None:
    """Write time, CPU, memory and latency by the number of jobs; the suffix of the file is its format."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    (times, cpu), (memory, latency) = figure.subplots(2, 2)
    _plot_times(times, sizes)
    _plot_processes(cpu, sizes, [size["created"]["cpu_seconds_per_job"] for size in sizes], "CPU seconds per job")
    _plot_processes(memory, sizes, [size["resident_mib"] for size in sizes], "resident memory, MiB")
    memory.set_yscale("log")
    _plot_latencies(latency, sizes)
    for axes in (times, cpu, memory, latency):
        axes.set_xscale("log")
        axes.set_xticks(_jobs(sizes), labels=[str(jobs) for jobs in _jobs(sizes)])
        axes.minorticks_off()
        axes.set_xlabel("jobs of 16 pods" if sizes[0]["pods"] == 16 * sizes[0]["jobs"] else "jobs")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save(figure, path)


def _jobs(sizes: Sequence[Size]) -> list[int]:
    return [size["jobs"] for size in sizes]


def _plot_times(axes: Axes, sizes: Sequence[Size]) -> None:
    first = sizes[0]
    per_job = first["created"]["running_s"] / first["jobs"]
    axes.plot(_jobs(sizes), [size["created"]["running_s"] for size in sizes], "o-", label="until all jobs run")
    axes.plot(_jobs(sizes), [size["created"]["last_child_s"] for size in sizes], "o-", label="until all objects exist")
    axes.plot(_jobs(sizes), [size["restart"]["converged_s"] for size in sizes], "o-", label="restart until converged")
    axes.plot(_jobs(sizes), [per_job * jobs for jobs in _jobs(sizes)], "k:", label="constant jobs/s")
    axes.set_yscale("log")
    axes.set_ylabel("seconds")


def _plot_processes(axes: Axes, sizes: Sequence[Size], values: Sequence[dict[str, float]], label: str) -> None:
    for name in values[0]:
        if name != BENCHMARK:
            axes.plot(_jobs(sizes), [each[name] for each in values], "o-", label=name)
    axes.set_ylabel(label)


def _plot_latencies(axes: Axes, sizes: Sequence[Size]) -> None:
    for label, phase in LATENCIES.items():
        (line,) = axes.plot(_jobs(sizes), [size[phase]["p50_s"] for size in sizes], "o-", label=f"{label}: median")
        axes.plot(_jobs(sizes), [size[phase]["p99_s"] for size in sizes], "o--", color=line.get_color(), label="p99")
    axes.set_yscale("log")
    axes.set_ylabel("seconds until the operator's write")
