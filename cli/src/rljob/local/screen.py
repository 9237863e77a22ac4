"""Draws a run: live on a terminal, else as plain lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljob.local.errors import CliError
from rljob.local.view import View, clock, deaths, metrics, one_line, sparkline, speed
from rljob.protocol.status import RunStatus

LINE_SECONDS = 5.0
MOST_DEATHS = 4
MOST_RESULTS = 5
PIPED_WIDTH = 1000  # columns: wider than any table
WIDEST = 60  # columns of a curve
STEPS = "steps"
LABEL = 11  # columns of a label and the space after it
STATE_STYLE = {"running": "green", "restarting": "yellow", "waiting": "dim", "stopped": "dim"}


class Screen(Protocol):
    """Where a run is shown; a context manager."""

    def show(self, view: View) -> None:
        """Show the run as it is now; called twice a second."""

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Terminal(Console):
    """Standard output, or stderr, as it is: no markup, no emoji codes, no highlighting."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=stderr)
        if not self.is_terminal:
            self.width = PIPED_WIDTH


class Output(Terminal):
    """Where a run is shown whose parts must be ended when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """End the run. rich would end the process on the spot, parts or no parts."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()  # also makes the interpreter's last flush harmless
        raise CliError("nobody reads the output any more, so the run was stopped; the same command resumes it")


def screen_for(console: Console, live: bool) -> Screen:
    """Return the screen for ``console``: a live one if asked for and it is a terminal that can."""
    can = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console) if live and can else PlainScreen(console)


class PlainScreen:
    """One line for every change of state, and every few seconds one for the newest step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ("", -1)
        self._at = 0.0

    def show(self, view: View) -> None:
        """Print a line if there is something new to say."""
        status = view.status
        step = status.progress.step if status else -1
        due = time.monotonic() - self._at >= LINE_SECONDS
        if (view.stage, step) != self._shown and (due or view.stage != self._shown[0]):
            self._shown, self._at = (view.stage, step), time.monotonic()
            self.note(one_line(view))

    def note(self, text: str) -> None:
        """Print ``text``."""
        self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LiveScreen:
    """A panel of a few lines that is drawn anew; notes scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # No refresh thread: processes are forked while the screen is up.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, view: View) -> None:
        """Draw the run."""
        self._live.update(draw(view, self._console.width), refresh=True)

    def note(self, text: str) -> None:
        """Print ``text`` above the panel."""
        self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def draw(view: View, width: int) -> Group:
    """Return the panel."""
    width = max(10, min(WIDEST, width - 40))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for label, value in _rows(view, width):
        grid.add_row(label, _with_bar(value, view.status, width // 2) if view.status and label == STEPS else value)
    return Group(draw_head(view), grid)


def plain_lines(view: View) -> Iterator[str]:
    """Yield what the panel says as lines of whatever length: nothing is cut, filled up or wrapped."""
    yield draw_head(view).plain
    for label, value in _rows(view, WIDEST):
        for i, line in enumerate(value.plain.splitlines()):
            yield f"{label if i == 0 else '':{LABEL}}{line}"


def draw_head(view: View) -> Text:
    """Return the line that says which run it is."""
    return Text.assemble((view.job, "bold"), f"  {view.place}  ", (clock(view.seconds), "cyan"))


def _rows(view: View, width: int) -> Iterator[tuple[str, Text]]:
    """Yield label and value of what there is to say; ``width``: most points of a curve."""
    yield "state", Text(view.stage)
    if view.detail:
        yield "log", Text(view.detail, no_wrap=True, overflow="ellipsis")
    if view.note:
        yield "note", Text(view.note, style="yellow")
    if view.status is not None:
        yield from _run_rows(view.status, width)
    if view.parts:
        yield "parts", _parts(view)
    for death in deaths(view)[-MOST_DEATHS:]:
        yield "died", Text(death, style="yellow")


def _run_rows(status: RunStatus, width: int) -> Iterator[tuple[str, Text]]:
    progress, figures = status.progress, metrics(status)
    left = f"  {clock(progress.eta_seconds)} left" if progress.eta_seconds >= 0 else ""
    yield STEPS, Text(f"{progress.step}/{progress.steps}{left}")
    if status.history:
        rewards = [point.reward for point in status.history]
        yield "reward", Text.assemble(f"{rewards[-1]:.3f} ", (sparkline(rewards, width), "green"))
        staleness = f"mean {status.history[-1].staleness:.2f}"
        if "staleness_max" in figures:
            staleness += f", most {figures['staleness_max']:.0f}"
        yield "staleness", Text(staleness)
        yield "speed", Text(f"{speed(status):,.0f} tokens/s")
    for task in dict.fromkeys(result.task for result in status.evaluations):
        results = [result for result in status.evaluations if result.task == task]
        course = " → ".join(f"{result.accuracy:.3f}" for result in results[-MOST_RESULTS:])
        yield "held out", Text(f"{task} {course} at version {results[-1].version}")


def _with_bar(value: Text, status: RunStatus, width: int) -> Table:
    bar = Table.grid(padding=(0, 1))
    progress = status.progress
    bar.add_row(ProgressBar(total=max(1, progress.steps), completed=progress.step, width=width), value)
    return bar


def _parts(view: View) -> Text:
    """Return a line for each part, with its bullet."""
    lines = []
    for part in view.parts:
        restarts = f" ({part.restarts} restarts)" if part.restarts > 1 else " (1 restart)" if part.restarts else ""
        lines.append(
            Text.assemble(
                ("● ", STATE_STYLE.get(part.state, "")),
                f"{part.name}{f' {part.detail}' if part.detail else ''}{restarts}",
            )
        )
    for connected in view.status.parts if view.status else []:
        if connected.role == "agent" and connected.restarts:
            lines.append(Text(f"engine restarts {connected.restarts}", "yellow"))
    return Text("\n").join(lines)
