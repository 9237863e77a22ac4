"""Draws a local run: live on a terminal, else as plain lines."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljob.local.errors import RunError
from rljob.local.view import View, clock, metrics, one_line, sparkline
from rljob.protocol.status import RunStatus

LINE_SECONDS = 5.0
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


class Output(Console):
    """Standard output, as it is: no markup, no emoji codes, no highlighting."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """End the run when nobody reads any more. rich would end the process on the spot, parts or no parts."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()  # also makes the interpreter's last flush harmless
        raise RunError("nobody reads the output any more, so the run was stopped; the same command resumes it")


def screen_for(console: Console, live: bool) -> Screen:
    """Return the screen for ``console``: a live one if asked for and it is a terminal that can."""
    can = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console) if live and can else PlainScreen(console)


class PlainScreen:
    """One line for every change of state, and every few seconds one for the newest step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[object, ...] = ()
        self._at = 0.0

    def show(self, view: View) -> None:
        """Print a line if there is something new to say."""
        status = view.status
        stage = (view.phase, status.state, status.message) if status else (view.phase,)
        step = status.progress.step if status else -1
        due = time.monotonic() - self._at >= LINE_SECONDS
        if (*stage, step) != self._shown and (due or stage != self._shown[:-1]):
            self._shown, self._at = (*stage, step), time.monotonic()
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
    head = Text.assemble((view.job, "bold"), f"  {view.directory}  ", (clock(view.seconds), "cyan"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    if view.status is None:
        grid.add_row("state", view.phase)
        if view.detail:
            grid.add_row("log", Text(view.detail, no_wrap=True, overflow="ellipsis"))
    else:
        _add_run(grid, view.status, max(10, min(60, width - 40)))
    if view.parts:
        grid.add_row("parts", _parts(view))
    return Group(head, grid)


def _add_run(grid: Table, status: RunStatus, width: int) -> None:
    progress, figures = status.progress, metrics(status)
    message = f": {status.message}" if status.message else ""
    grid.add_row("state", f"{status.state.lower()}{message}")
    left = f"  {clock(progress.eta_seconds)} left" if progress.eta_seconds >= 0 else ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=max(1, progress.steps), completed=progress.step, width=width // 2),
        f"{progress.step}/{progress.steps}{left}",
    )
    grid.add_row("steps", bar)
    if status.history:
        rewards = [point.reward for point in status.history]
        grid.add_row("reward", Text.assemble(f"{rewards[-1]:.3f} ", (sparkline(rewards, width), "green")))
        staleness = f"mean {status.history[-1].staleness:.2f}"
        if "staleness_max" in figures:
            staleness += f", most {figures['staleness_max']:.0f}"
        grid.add_row("staleness", staleness)
        grid.add_row("speed", f"{status.history[-1].tokens_per_second:,.0f} tokens/s")
    for result in status.evaluations[-3:]:
        grid.add_row("held out", f"{result.task} {result.accuracy:.3f} at version {result.version}")


def _parts(view: View) -> Text:
    text = Text()
    for part in view.parts:
        restarts = f" ({part.restarts} restarts)" if part.restarts > 1 else " (1 restart)" if part.restarts else ""
        text.append("● ", STATE_STYLE.get(part.state, "")).append(f"{part.name}{restarts}  ")
    for connected in view.status.parts if view.status else []:
        if connected.role == "agent" and connected.restarts:
            text.append(f"engine restarts {connected.restarts}  ", "yellow")
    return text
