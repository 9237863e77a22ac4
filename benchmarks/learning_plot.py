"""The plot of benchmarks.learning --quick: the reward of each batch, by algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

WINDOW = 5
"""Batches of the running mean."""
STYLES = cycler(linestyle=["-", "--", ":"]) * cycler(color=mpl.color_sequences["tab10"])
"""Of lines, one after the other: more than there are presets."""


def plot_curves(rewards: Mapping[str, Sequence[float]], path: Path) -> None:
    """Write a plot of the running mean of the reward over WINDOW batches.

    Args:
        rewards: name → mean reward of each batch.
        path: of the file; its suffix is the format.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(STYLES)
    for name, values in rewards.items():
        window = min(WINDOW, len(values))
        means = np.convolve(values, np.full(window, 1 / window), "valid")
        axes.plot(np.arange(window - 1, len(values)), means, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"reward, mean of {WINDOW} batches")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the same figure gives the same SVG."""
    with mpl.rc_context({"svg.hashsalt": "rljob"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
