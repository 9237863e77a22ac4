"""Screens of `rljob run`: a live panel on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from rljob.api.job_status import EndedSamples
from rljob.api.text_escape import escape_block
from rljob.local.ended_view import ended_rows
from rljob.local.errors import CliError
from rljob.local.snapshot import RunSnapshot
from rljob.local.snapshot_view import draw, one_line

LINE_SECONDS = 5.0
FAILED_SECONDS = 60.0
"""Shortest time between two lines of a plain screen on failed samples."""
PIPED_WIDTH = 1000  # columns: wider than any table


class Screen(ABC):
    """Shows a run; a context manager."""

    @abstractmethod
    def show(self, snapshot: RunSnapshot) -> None:
        """Show the run; called twice a second."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027 - not every screen has something to close
        pass


class Terminal(Console):
    """Standard output or stderr; markup, emoji codes and highlighting are off, control characters are escaped."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=stderr)
        if not self.is_terminal:
            self.width = PIPED_WIDTH

    def render_str(self, text: str, **options: Any) -> Text:
        """Return ``text`` as Text; it strips some control characters, so they are escaped before."""
        return super().render_str(escape_block(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of an object. No text reaches the terminal by another way."""
        for segment in super().render(renderable, options):
            if segment.control:  # written by rich itself, for example to move the cursor
                yield segment
            else:
                yield Segment(escape_block(segment.text), segment.style)


class RunOutput(Terminal):
    """The output of `rljob run`: a closed pipe stops the run and its components."""

    def on_broken_pipe(self) -> None:
        """End the run. The default of rich would exit this process and leave the components running."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()  # also redirects stdout, so that the flush at exit does not fail
        raise CliError("the output was closed, so the run was stopped; the same command resumes it")


def screen_for(console: Console, live: bool) -> Screen:
    """Return the screen for ``console``: a live one if ``live`` is set and the terminal supports it."""
    supported = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console) if live and supported else PlainScreen(console)


class PlainScreen(Screen):
    """Prints one line per change of state, at most one per LINE_SECONDS for the newest step, and at most one per
    FAILED_SECONDS when more samples have failed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ("", -1)
        self._at = 0.0
        self._failed = 0  # samples, in the last line on them
        self._failed_at = -math.inf

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line if state or step changed, and one if more samples have failed."""
        status = snapshot.status
        if status is not None:
            self._show_failed(status.ended)
        step = status.progress.step if status else -1
        due = time.monotonic() - self._at >= LINE_SECONDS
        if (snapshot.stage, step) != self._shown and (due or snapshot.stage != self._shown[0]):
            self._shown, self._at = (snapshot.stage, step), time.monotonic()
            self.note(one_line(snapshot))

    def _show_failed(self, ended: EndedSamples) -> None:
        """Print count, share and last reason of failed samples if there are more of them."""
        if ended.failed > self._failed and time.monotonic() - self._failed_at >= FAILED_SECONDS:
            self._failed, self._failed_at = ended.failed, time.monotonic()
            self.note(f"failed: {dict(ended_rows(ended))['failed']}")

    def note(self, text: str) -> None:
        """Print ``text``."""
        self._console.print(text, soft_wrap=True)


class LiveScreen(Screen):
    """Redraws a panel in place; notes scroll above it. ``draw``: renders a snapshot for a width in columns."""

    def __init__(self, console: Console, draw: Callable[[RunSnapshot, int], Group] = draw) -> None:
        self._console, self._draw = console, draw
        # No refresh thread: processes are forked while the screen is entered.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, snapshot: RunSnapshot) -> None:
        """Draw the run."""
        self._live.update(self._draw(snapshot, self._console.width), refresh=True)

    def note(self, text: str) -> None:
        """Print ``text`` above the panel."""
        self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
