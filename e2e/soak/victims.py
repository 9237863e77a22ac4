"""Finds the processes of a run by its marks (rljob.local.process_cleanup)."""

from __future__ import annotations

from pathlib import Path

import psutil

from rljob.local import process_cleanup
from rljob.local import processes as local_processes

COMPONENTS = ("coordinator", "trainer", "runner", "reward", "agent")
ENGINE_PROCESSES = ("server", "enginecore")
VICTIMS = (*COMPONENTS, *ENGINE_PROCESSES)
"""Kinds of processes. ``server``: the server of vLLM or SGLang that an agent started; ``enginecore``: the process of
its model."""
SERVERS, MODELS = ("vllm", "sglang"), ("EngineCore", "sglang::scheduler")
"""Texts in the names and command lines of these processes."""


def processes(directory: Path) -> dict[int, str]:
    """Return process id → component of all running processes of the run in ``directory``."""
    prefix = local_processes.mark(directory)
    marks = process_cleanup.process_marks()
    return {pid: mark.removeprefix(prefix).rstrip(":") for pid, mark in marks.items() if mark.startswith(prefix)}


def find(directory: Path, run_pid: int, victim: str, replica: int) -> psutil.Process | None:
    """Return a process of the run that `rljob run` (``run_pid``) runs in ``directory``; None while there is none.

    Args:
        directory: the run directory.
        run_pid: of `rljob run`.
        victim: one of VICTIMS.
        replica: index of the engine.
    """
    component = _component(victim, replica)
    try:
        leaders = [process for process in _members(directory, component) if process.ppid() == run_pid]
        if victim not in ENGINE_PROCESSES or not leaders:
            return leaders[0] if leaders else None
        servers = _named(leaders[0].children(), SERVERS)
        if victim == "server" or not servers:
            return servers[0] if servers else None
        models = _named(servers[0].children(), MODELS)
        return models[0] if models else None
    except psutil.NoSuchProcess:  # it has just ended
        return None


def _named(processes: list[psutil.Process], texts: tuple[str, ...]) -> list[psutil.Process]:
    """Return the processes that have one of the texts in the name or the command line."""
    shown = {process: " ".join([process.name(), *process.cmdline()]) for process in processes}
    return [process for process, line in shown.items() if any(text in line for text in texts)]


def reapers(run_pid: int) -> list[int]:
    """Return the reaper of `rljob run`, if it runs."""
    return [child.pid for child in psutil.Process(run_pid).children() if process_cleanup.__file__ in child.cmdline()]


def _component(victim: str, replica: int) -> str:
    if victim in ("agent", *ENGINE_PROCESSES):
        return f"rollout-main-{replica}"
    return {"reward": "reward-sums"}.get(victim, victim)


def _members(directory: Path, component: str) -> list[psutil.Process]:
    members = []
    for pid, name in processes(directory).items():
        if name == component and psutil.pid_exists(pid):
            members.append(psutil.Process(pid))
    return members
