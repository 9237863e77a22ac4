"""Renders a run's snapshot: panel and lines of `rljob run` and `rljob status`, tables of `rljob top` and
`rljob evaluate`, the summary."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljob.api.job_status import EvaluationResult
from rljob.api.text_escape import escape_data
from rljob.ledger.evaluation_results import over_tasks
from rljob.local.ended_view import ended_rows, ended_shares, ended_summary, failed_problems, failed_summary
from rljob.local.fitting_table import fitting_table, side_by_side
from rljob.local.plot import PLOT
from rljob.local.snapshot import ComponentState, RunSnapshot
from rljob.local.usage_figures import engine_shares, figures, metrics_of
from rljob.protocol.run_status import RunStatus

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_EXITS = 4
MAX_RESULTS = 5
MAX_WARNINGS = 4
WARNING = "warning"
MAX_CURVE = 60  # columns
STEPS = "steps"
LABEL = 11  # columns of a label and the space after it
STATE_STYLE = {"running": "green", "restarting": "yellow", "waiting": "dim", "stopped": "dim"}
UNKNOWN = "–"
USAGE_DROPPED = ("processes", "restarts", "state", "memory", "cpu %")
ENGINES_DROPPED = ("restarts", "state", "waiting", "running")
"""Columns of the tables of `rljob top` that a narrow terminal omits, in this order."""

# --- run and status -----------------------------------------------------------------------------------------------


def draw(snapshot: RunSnapshot, width: int) -> Group:
    """Return the panel of a run for a terminal of ``width`` columns."""
    snapshot, width = escape_data(snapshot), max(10, min(MAX_CURVE, width - 40))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")  # a path longer than the terminal continues on the next line
    for label, value in _rows(snapshot, width):
        bar = label == STEPS and snapshot.status is not None
        grid.add_row(label, _with_bar(value, snapshot.status, width // 2) if bar and snapshot.status else value)
    return Group(_head(snapshot), grid)


def plain_lines(snapshot: RunSnapshot) -> Iterator[str]:
    """Yield the content of the panel as lines: nothing is cut, padded or wrapped."""
    snapshot = escape_data(snapshot)
    yield _head(snapshot).plain
    for label, value in _rows(snapshot, MAX_CURVE):
        for i, line in enumerate(value.plain.splitlines()):
            yield f"{label if i == 0 else '':{LABEL}}{line}"


def one_line(snapshot: RunSnapshot) -> str:
    """Return the run as one line of text."""
    status, parts = snapshot.status, [clock(snapshot.seconds)]
    if status is not None and status.history:
        done, left = _steps(status)
        last = status.history[-1]
        parts += [f"step {done}", f"reward {last.reward:.3f}", f"staleness {last.staleness:.2f}"]
        parts.append(f"{_speed(status):,.0f} tokens/s{left}")
    if status is not None and (ended := ended_shares(status.ended)):
        parts.append(ended)
    return "  ".join([*parts, snapshot.stage])


def summary(snapshot: RunSnapshot) -> list[str]:
    """Return the result of a local run that has a status, as lines."""
    status, directory = snapshot.status, Path(snapshot.location)
    assert status is not None, "a run that ended has a status"
    done = f"{status.progress.step} steps" if status.progress.steps else "evaluated"
    lines = [f"{done} in {clock(status.progress.seconds)}"]
    for results in _by_task(status):
        lines += [_accuracy(results), *failed_summary(results)]
    if status.history:
        lines.append(f"reward of the last batch: {status.history[-1].reward:.3f}")
    if shares := engine_shares(metrics_of(status)):
        spent = ", ".join(f"{share} {activity}" for activity, share in shares)
        lines.append(f"time of the engines: {spent}")
    lines += ended_summary(status.ended, directory)
    if status.last_checkpoint.path:
        lines.append(f"checkpoint (Hugging Face format): {directory / status.last_checkpoint.path}")
    lines += [f"{WARNING}: {warning}" for warning in status.warnings[-MAX_WARNINGS:]]
    lines.append(f"logs: {directory / 'logs'}")
    if (directory / PLOT).exists():
        lines.append(f"plot of the reward: {directory / PLOT}")
    return lines


def checkpoint_line(status: RunStatus, directory: Path) -> str:
    """Return the step at which a run stopped and the checkpoint it resumes from."""
    checkpoint = status.last_checkpoint
    kept = "no checkpoint"
    if checkpoint.path:
        kept = f"checkpoint of step {checkpoint.step} in {directory / checkpoint.path}"
    return f"stopped at step {status.progress.step}, {kept}"


def _head(snapshot: RunSnapshot) -> Text:
    return Text.assemble((snapshot.name, "bold"), f"  {snapshot.location}  ", (clock(snapshot.seconds), "cyan"))


def _rows(snapshot: RunSnapshot, width: int) -> Iterator[tuple[str, Text]]:
    """Yield label and value of each row; ``width``: most points of a curve."""
    yield "state", Text(snapshot.stage)
    if snapshot.detail:
        yield "log", Text(snapshot.detail, no_wrap=True, overflow="ellipsis")
    if snapshot.note:
        yield "note", Text(snapshot.note, style="yellow")
    if snapshot.status is not None:
        yield from _status_rows(snapshot.status, width)
    for exited in _exits(snapshot)[-MAX_EXITS:]:
        yield "exited", Text(exited, style="yellow")
    for message in _trainer_messages(snapshot):
        yield "trainer", Text(message, style="yellow")
    if snapshot.components:  # last: a terminal with few lines cuts the end of the panel
        yield "components", _components(snapshot)


def _status_rows(status: RunStatus, width: int) -> Iterator[tuple[str, Text]]:
    yield STEPS, Text("".join(_steps(status)))
    if status.history:
        rewards = [point.reward for point in status.history]
        yield "reward", Text.assemble(f"{rewards[-1]:.3f} ", (sparkline(rewards, width), "green"))
        staleness = f"mean {status.history[-1].staleness:.2f}"
        if (most := metrics_of(status).get("staleness/max")) is not None:
            staleness += f", most {most:.0f}"
        yield "staleness", Text(staleness)
        yield "speed", Text(f"{_speed(status):,.0f} tokens/s")
    for warning in status.warnings[-MAX_WARNINGS:]:
        yield WARNING, Text(warning, style="yellow")
    for end, text in ended_rows(status.ended):
        yield end, Text(text, style="yellow" if end == "failed" else "")
    for results in _by_task(status):
        course = " → ".join(f"{result.accuracy:.3f}" for result in results[-MAX_RESULTS:])
        failed = failed_problems(results[-1])
        text = f"{results[-1].task} {course} at version {results[-1].version}{failed and f', {failed}'}"
        yield "held out", Text(text)


def _steps(status: RunStatus) -> tuple[str, str]:
    """Return the steps done of all, and the time left."""
    progress = status.progress
    left = f"  {clock(progress.eta_seconds)} left" if progress.eta_seconds >= 0 else ""
    return f"{progress.step}/{progress.steps}", left


def _with_bar(value: Text, status: RunStatus, width: int) -> Table:
    bar, progress = Table.grid(padding=(0, 1)), status.progress
    bar.add_row(ProgressBar(total=max(1, progress.steps), completed=progress.step, width=width), value)
    return bar


def _components(snapshot: RunSnapshot) -> Text:
    """Return a line for each component, and one for each agent that restarted its engine."""
    lines = [_component(component) for component in snapshot.components]
    for connected in snapshot.status.components if snapshot.status else []:
        if connected.role == "agent" and connected.restarts:
            lines.append(Text(f"engine of {connected.instance}{_restarts(connected.restarts)}", "yellow"))
    return Text("\n").join(lines)


def _component(component: ComponentState) -> Text:
    detail = f" {component.detail}" if component.detail else ""
    text = f"{component.name}{detail}{_restarts(component.restarts)}"
    return Text.assemble(("● ", STATE_STYLE.get(component.state, "")), text)


def _restarts(count: int) -> str:
    return f" ({count} restart{'s' if count > 1 else ''})" if count else ""


def _exits(snapshot: RunSnapshot) -> list[str]:
    """Return how components and engine servers that were restarted ended last."""
    found = [f"{component.name} {component.last_exit}" for component in snapshot.components if component.last_exit]
    connected = snapshot.status.components if snapshot.status else []
    agents = [component for component in connected if component.role == "agent" and component.message]
    return found + [f"engine of {agent.instance}: {agent.message}" for agent in agents]


def _trainer_messages(snapshot: RunSnapshot) -> list[str]:
    """Return why the trainer waits, or which steps it repeats."""
    connected = snapshot.status.components if snapshot.status else []
    return [trainer.message for trainer in connected if trainer.role == "trainer" and trainer.message]


def _by_task(status: RunStatus) -> list[list[EvaluationResult]]:
    tasks = dict.fromkeys(result.task for result in status.evaluations)
    return [[result for result in status.evaluations if result.task == task] for task in tasks]


def _accuracy(results: list[EvaluationResult]) -> str:
    before, after = results[0], results[-1]
    if before.version == after.version:
        return f"held-out accuracy of {after.task}: {after.accuracy:.3f} on {_answered(after)}"
    when = f"at version {before.version}" if before.version else "before"
    return (
        f"held-out accuracy of {after.task}: {before.accuracy:.3f} {when}, {after.accuracy:.3f} after "
        f"({after.accuracy - before.accuracy:+.3f}), on {_answered(after)}"
    )


def _answered(result: EvaluationResult) -> str:
    """Return the number of problems, and pass@k."""
    rates = "".join(f", pass@{rate.k} {rate.value:.3f}" for rate in result.pass_at)
    return f"{result.problems:,} problems{rates}"


# --- top ----------------------------------------------------------------------------------------------------------


def draw_usage(snapshot: RunSnapshot, width: int = 0) -> Group:
    """Return the tables of `rljob top`: components and their usage, engines, and figures of the run.

    On a terminal of ``width`` columns less important columns are omitted, and tables are side by side; 0: neither.
    """
    snapshot = escape_data(snapshot)
    lines: list[RenderableType] = [_head(snapshot), Text(snapshot.stage), ""]
    if snapshot.components:
        lines.append(_usage_table(snapshot.components, width))
    if snapshot.note:
        lines.append(Text(snapshot.note, style="yellow"))
    status = snapshot.status
    if status is not None:
        tables = [_engines(status, width), *side_by_side(["metric", "now"], figures(status), width)]
        lines += [line for table in tables if table.row_count for line in ("", table)]
    return Group(*lines)


def _usage_table(components: Sequence[ComponentState], width: int = 0) -> Table:
    counted = any(c.usage is not None and c.usage.processes is not None for c in components)  # unknown of pods
    headings = ["component", "state", "cpu %", "memory", *(["processes"] if counted else []), "restarts"]
    rows = []
    for component in components:
        usage = component.usage
        cells = [UNKNOWN] * 2
        if usage is not None:
            cells = [f"{100 * usage.processor:.0f}", f"{usage.memory / (1 << 20):,.0f} MiB"]
        if counted:
            cells.append(UNKNOWN if usage is None or usage.processes is None else str(usage.processes))
        rows.append([component.name, component.state, *cells, str(component.restarts)])
    return fitting_table(headings, rows, width, [name for name in USAGE_DROPPED if name in headings])


def _engines(status: RunStatus, width: int) -> Table:
    rows = [
        [agent.instance, agent.state, str(agent.running), str(agent.waiting), str(agent.restarts)]
        for agent in status.components
        if agent.role == "agent"
    ]
    return fitting_table(["engine", "state", "running", "waiting", "restarts"], rows, width, ENGINES_DROPPED)


def evaluation_table(step: int, results: Sequence[EvaluationResult], width: int = 0) -> Group:
    """Return the table of `rljob evaluate`: the results of the checkpoint of ``step`` by task, and over several tasks,
    and a line for each task with failed problems.

    On a terminal of ``width`` columns less important columns are omitted; 0: no limit.
    """
    results = escape_data(results)
    rates = [f"pass@{rate.k}" for rate in results[0].pass_at] if results else []
    header = [f"step {step}", "accuracy", *rates, "mean reward", "problems"]
    shown = [(result.task, result) for result in results]
    if len({result.task for result in results}) > 1:
        shown.append(("all tasks", over_tasks(results)))
    rows = [
        [
            name,
            f"{result.accuracy:.3f}",
            *(f"{rate.value:.3f}" for rate in result.pass_at),
            f"{result.mean_reward:.3f}",
            f"{result.problems:,}",
        ]
        for name, result in shown
    ]
    table = fitting_table(header, rows, width, ["mean reward", "problems", *rates])
    return Group(table, *(f"{result.task}: {failed_problems(result)}" for result in results if result.failed))


# --- numbers ------------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Return a duration as 1:05 or 2:01:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of ``values`` in at most ``width`` block characters, each the mean of its share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return BLOCKS[0] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def _speed(status: RunStatus) -> float:
    """Return tokens sampled per second: a mean over some steps, of a finished run over all."""
    last = status.history[-1].tokens_per_second if status.history else 0.0
    return metrics_of(status).get("tokens_per_second", last)
