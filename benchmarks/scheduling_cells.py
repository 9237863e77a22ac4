"""Simulated runs of the scheduling benchmark in several processes. A cell is some replications of a run.

The results of a finished cell are kept in a file, with a digest of the code that made them: an interrupted benchmark
continues with the cells that are missing.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

from benchmarks.learning_cells import Cells
from benchmarks.scheduling_runs import Figures, Policy, Scenario

CELLS = 10
"""Cells of a run with more replications than this."""
SOURCES = ("core/src", "coordinator/src", "benchmarks")


@dataclass(frozen=True)
class Cell:
    """Replications of a run: function(scenario, seed, …) simulates one. ``code``: digest of the code."""

    function: Callable[..., Figures]
    scenario: Scenario
    seeds: list[int]
    others: tuple[Any, ...]
    code: str

    @property
    def settings(self) -> dict[str, Any]:
        """JSON values that the results depend on, besides the code."""
        others = [asdict(each) if isinstance(each, Policy) else each for each in self.others]
        return {
            "function": self.function.__name__, "scenario": self.scenario, "seeds": self.seeds, "others": others
        }  # fmt: skip

    @property
    def name(self) -> str:
        """Of the file."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        return f"{self.function.__name__}-{digest[:12]}"


@dataclass(frozen=True)
class Done:
    """A cell that has its file. ``kept``: it had it before."""

    cell: Cell
    kept: bool
    events: int
    cpu: float


def simulate(cell: Cell, directory: Path) -> Done:
    """Simulate a cell, unless its file is there."""
    computed = False

    def compute() -> dict[str, Any]:
        nonlocal computed
        computed = True
        return {"runs": [asdict(cell.function(cell.scenario, seed, *cell.others)) for seed in cell.seeds]}

    runs = read(cell, directory, compute)
    return Done(cell, not computed, sum(run.events for run in runs), sum(run.cpu for run in runs))


def read(cell: Cell, directory: Path, compute: Callable[[], dict[str, Any]]) -> list[Figures]:
    """Return the results of a cell in its file. Without it ``compute`` returns them."""
    found = Cells(directory).get(cell.name, cell.settings | {"code": cell.code}, compute)
    return [Figures(**run) for run in found["runs"]]


def digest_of_code() -> str:
    """Return a digest of the files that results may depend on."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    files = [root / source for source in SOURCES]
    for path in sorted(path for each in files for path in each.rglob("*") if path.suffix in (".py", ".sql")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Simulations:
    """Simulates cells in the order in which they are started.

    Args:
        pool: the processes.
        directory: of the files.
        code: digest of the code.
    """

    def __init__(self, pool: Pool, directory: Path, code: str) -> None:
        self._pool = pool
        self._directory = directory
        self._code = code
        self._began = time.monotonic()
        self._started = self._done = 0

    def start(self, function: Callable[..., Figures], seeds: int, scenario: Scenario, *others: Any) -> Started:
        """Start replications 1 to ``seeds`` of function(scenario, seed, …)."""
        size, numbers = max(1, seeds // CELLS), range(1, seeds + 1)
        cells = [
            Cell(function, scenario, [*numbers[at : at + size]], others, self._code) for at in range(0, seeds, size)
        ]
        self._started += len(cells)
        waiting = [self._pool.apply_async(simulate, (cell, self._directory), callback=self._report) for cell in cells]
        return Started(waiting, self._directory)

    def _report(self, done: Done) -> None:
        """Print the progress. The thread of the pool calls it."""
        self._done += 1
        seeds, how = done.cell.seeds, "read" if done.kept else f"{done.events / max(done.cpu, 1e-9):,.0f} a second"
        sys.stderr.write(
            f"{time.monotonic() - self._began:6.0f} s: {self._done} of {self._started} cells; "
            f"{done.cell.function.__name__}, seeds {seeds[0]}-{seeds[-1]}: {done.events:,} events, {how}\n"
        )
        sys.stderr.flush()


class Started:
    """Cells that are simulated."""

    def __init__(self, waiting: list[AsyncResult[Done]], directory: Path) -> None:
        self._waiting = waiting
        self._directory = directory

    def get(self) -> list[Figures]:
        """Wait for the cells; return their results, by seed."""
        done = [each.get() for each in self._waiting]
        return [run for each in done for run in read(each.cell, self._directory, _missing)]


def _missing() -> dict[str, Any]:
    raise FileNotFoundError("the file of a cell was removed while the benchmark ran")
