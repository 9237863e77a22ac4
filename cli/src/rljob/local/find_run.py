"""Finds the run of a command."""

from __future__ import annotations

import difflib
import errno
import os
from pathlib import Path

from rljob.local.errors import CliError
from rljob.local.run_directory import MANIFEST, RunDirectory

ROOT = Path("runs")
SIMILARITY = 0.75
"""Least ratio of difflib between the name of a run and its misspelling."""


def find(name: str | None) -> RunDirectory:
    """Return the run called ``name``: a run directory, or a name under runs/. None: the running one, or the newest if
    none is running.

    Raises:
        CliError: with exit code 2: there is no such run, or several are running and ``name`` is None.
    """
    if name is not None:
        for path in (Path(name), ROOT / name):
            if is_run(path):
                return RunDirectory(path)
            if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
                raise CliError(f"{path} cannot be read; ask its owner for the permission", 2)
        raise CliError(f"there is no run {name!r}: give a run directory, or a name under {ROOT}/{_listed()}", 2)
    running = [path for path in known() if RunDirectory(path).running()]
    if len(running) > 1:
        names = ", ".join(path.name for path in running)
        raise CliError(f"several runs are running ({names}); name one of them", 2)
    candidates = running or known()
    if not candidates:
        raise CliError(f"there is no run under {ROOT}/; give a run directory", 2)
    return RunDirectory(max(candidates, key=lambda path: (path / MANIFEST).stat().st_mtime_ns))


def exists(name: str) -> bool:
    """Return whether there is a run called ``name``: a run directory, or a name under runs/."""
    return any(is_run(path) for path in (Path(name), ROOT / name))


def similar(name: str) -> str | None:
    """Return the name of a run under runs/ that ``name`` may misspell, or None; ``name`` with a slash at its end is a
    directory."""
    path = Path(name)
    if name.endswith("/") or path.parent not in (Path(), ROOT):
        return None
    return next(iter(difflib.get_close_matches(path.name, [run.name for run in known()], 1, SIMILARITY)), None)


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run directory."""
    try:
        return (path / MANIFEST).is_file()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):  # EACCES: a directory of another user
            return False
        raise


def known() -> list[Path]:
    """Return the run directories under runs/."""
    return sorted(path for path in ROOT.iterdir() if is_run(path)) if ROOT.is_dir() else []


def _listed() -> str:
    names = [path.name for path in known()]
    return f" (there are {', '.join(names[:8])}{', …' if len(names) > 8 else ''})" if names else ""
