"""Figures of a run as rows of (name, value): where samples are, where time goes, how requests are sent, what was lost.

`rljob top` shows them; the summary of a run has the shares of the engines' time.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob.protocol.run_status import RunStatus

ACTIVITY = "seconds_"
ENGINE_SECONDS = "engine_seconds/"
ENGINE_TEXTS = {
    "generating": "generating",
    "waiting": "waiting for work",
    "paused": "paused for weights",
    "dead": "dead",
}
FIGURES = {
    "weights/update_seconds": ("weight update of an engine", "{:.2f} s"),
    "weights/pause_seconds": ("pause in an update", "{:.2f} s"),
    "dispatch/members_at_home": ("members sent to their prefix", "{:.0%}"),
    "dispatch/turns_at_home": ("turns sent to their prefix", "{:.0%}"),
    "response_length/trained_over_scored": ("trained over scored length", "{:.3f}"),
    "response_length/trained_ks_p": ("p of equal lengths", "{:.2g}"),
    "response_length/cut_share": ("answers cut", "{:.0%}"),
}
"""Metric of the status → name and format of its value."""
MOST_EVENTS = 6

Rows = list[list[str]]


def metrics_of(status: RunStatus) -> dict[str, float]:
    """Return name → value of the metrics of a status."""
    return {metric.name: metric.value for metric in status.metrics}


def figures(status: RunStatus) -> list[Rows]:
    """Return the rows of each table of figures; without a figure it is empty."""
    metrics = metrics_of(status)
    queues = [[queue.name, f"{queue.value:,}"] for queue in status.queues]
    return [queues, _times(metrics), _scheduling(status, metrics), _events(status.events)]


def engine_shares(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return each activity with its share of the seconds of all engines: (generating, 81 %). Empty: there are none."""
    seconds = {text: metrics.get(f"{ENGINE_SECONDS}{name}", 0.0) for name, text in ENGINE_TEXTS.items()}
    total = sum(seconds.values())
    return [(text, f"{100 * spent / total:.0f} %") for text, spent in seconds.items()] if total else []


def _times(metrics: Mapping[str, float]) -> Rows:
    rows = [
        [f"seconds {name.removeprefix(ACTIVITY).replace('_', ' ')}", f"{value:,.0f}"]
        for name, value in metrics.items()
        if name.startswith(ACTIVITY)
    ]
    rows += [[f"engines {activity}", share] for activity, share in engine_shares(metrics)]
    if "tokens_per_second" in metrics:
        rows.append(["tokens/s", f"{metrics['tokens_per_second']:,.0f}"])
    return rows


def _scheduling(status: RunStatus, metrics: Mapping[str, float]) -> Rows:
    rows = [["staleness mean/most", status.staleness]] if status.staleness else []
    return rows + [
        [name, form.format(metrics[metric]).replace("%", " %")]
        for metric, (name, form) in FIGURES.items()
        if metric in metrics
    ]


def _events(events: Mapping[str, int]) -> Rows:
    """Return the most frequent events, most frequent first: rejected equal_rewards, 120."""
    often = sorted(events.items(), key=lambda item: (-item[1], item[0]))[:MOST_EVENTS]
    return [[name.replace("/", " ", 1), f"{count:,}"] for name, count in often]
