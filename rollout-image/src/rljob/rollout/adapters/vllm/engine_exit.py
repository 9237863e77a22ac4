"""Reports which signal killed vLLM's engine process. vLLM itself only reports that the process is gone
(EngineDeadError: "See stack trace (above) for the root cause"), and a killed process leaves no stack trace. Of a killed
worker vLLM reports the exit code."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rljob.rollout.exit_diagnosis import describe_end, oom_kills

_LINE = re.compile(r"(?:\([^)]*\)\s*)*engine process ended: (.+)")
"""The report in the log; vLLM prefixes lines with the name of the process."""
_WORKER = re.compile(r".*Worker proc (\S+) died unexpectedly \(exit code: (-\d+)\)")
"""vLLM's own report of a killed worker (MultiprocExecutor), which precedes the end of the engine process."""


def report_kills(manager: Any) -> None:
    """Let ``manager``, vLLM's CoreEngineProcManager, write a line to stderr when a signal kills an engine process.

    The line precedes all EngineDeadErrors: vLLM declares the engine dead after ``monitor_engine_liveness`` returns.
    """
    manager.monitor_engine_liveness = _reporting(manager.monitor_engine_liveness)


def _reporting(monitor: Callable[[Any], None]) -> Callable[[Any], None]:
    before = oom_kills()

    @functools.wraps(monitor)
    def monitor_and_report(self: Any) -> None:
        monitor(self)
        for process in self.processes:
            if process.name == self.failed_proc_name and (process.exitcode or 0) < 0:
                end = describe_end(process.exitcode, oom_kills() > before, f"vLLM's {process.name}")
                sys.stderr.write(f"engine process ended: {end}\n")
                sys.stderr.flush()

    return monitor_and_report


def find_kill(lines: Iterable[str]) -> str:
    """Return the report of a kill in a server's log; empty if there is none."""
    for line in lines:
        if worker := _WORKER.match(line):
            return describe_end(int(worker[2]), False, f"vLLM's {worker[1]}")
        if found := _LINE.match(line):
            return found[1]
    return ""
