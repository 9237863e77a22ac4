"""Runs attacks in a sandbox, as the user and behind the layers of one level, beside a victim; a process of its own.

Usage: driver.py SOURCE_FOLDER DIRECTORY WITHOUT, where WITHOUT are the layers not to be used, with commas. Each line on
standard input is a request as JSON, answered with one line. Standard library only, as the sandbox itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECRET = "the-secret-of-the-victim"
ATTEMPTS = 10
"""Some attacks run with a limit of 0.3 s, which a busy machine can exceed; a broken sandbox never serves."""
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve requests until standard input ends."""
    sys.path.append(sys.argv[1])
    from rljob.rewards.sandbox.code_sandbox import CodeSandbox, Limits, SandboxRun, StarvedError
    from rljob.rewards.sandbox.isolation import find_isolation

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    directory = Path(sys.argv[2])
    victim = subprocess.Popen(
        [sys.executable, "-ISE", str(Path(__file__).with_name("victim.py")), str(directory), SECRET],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"SECRET": SECRET},
    )  # fmt: skip
    about = json.loads(victim.stdout.readline())  # type: ignore[union-attr]
    isolation = find_isolation(without=[layer for layer in sys.argv[3].split(",") if layer])
    say({"present": list(isolation.present), "missing": isolation.missing})

    def run(box: CodeSandbox, source: bytes, stdin: bytes, most: int) -> SandboxRun:
        """Run a program, again if the machine had no CPU for it, as the runner does."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(StarvedError):
                return box.run_program(source, stdin, most)
        return box.run_program(source, stdin, most)

    sandboxes: dict[str, CodeSandbox] = {}
    own: set[str] = set()  # directories of the sandboxes
    for line in sys.stdin:
        request = json.loads(line)
        key = json.dumps(request["limits"])
        if key not in sandboxes:
            sandboxes[key] = CodeSandbox(isolation, Limits(**request["limits"]))
            run(sandboxes[key], b"", b"", 10)
        box = sandboxes[key]
        own.add(box._directory)
        before = look(victim, own)
        given = json.dumps(about | {"parent": os.getpid()}).encode()
        runs = [run(box, source.encode(), given, 100_000) for source in request["sources"]]
        for _ in range(ATTEMPTS):
            served = run(box, b"print('served')", b"", 100)
            if served.why != "time":
                break
        runs.append(served)
        after = look(victim, own)
        outputs = [each.output.decode(errors="replace") for each in runs]
        ends = [[each.status, each.why] for each in runs]
        changed = [name for name in before if before[name] != after[name]]
        answer = {"outputs": outputs, "ends": ends, "changed": changed, "before": before, "after": after}
        say(answer)
    for box in sandboxes.values():
        box.close()
    victim.kill()
    victim.wait()
    say({"left": left(own)})


def look(victim: subprocess.Popen[str], directories: set[str]) -> dict[str, Any]:
    """Return the state of the victim and of the machine, which an attack must leave as they are."""
    victim.stdin.write("\n")  # type: ignore[union-attr]
    victim.stdin.flush()  # type: ignore[union-attr]
    own = [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_AS)]
    ipc = {kind: Path(f"/proc/sysvipc/{kind}").read_text().count("\n") for kind in ("shm", "sem", "msg")}
    memory = [str(path) for place in directories if place for path in Path(place).glob("*")]
    return {
        "victim": json.loads(victim.stdout.readline()),  # type: ignore[union-attr]
        "processes": sorted(descendants(os.getpid())),
        "own": own,
        "ipc": ipc,
        "files": sorted(memory),
    }


def descendants(root: int) -> set[int]:
    """Return the processes below ``root``, also those whose parents have ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.add(child)
            waiting.append(child)
    return found


def left(directories: set[str]) -> list[str]:
    """Return what is still there after all sandboxes are closed."""
    for _ in range(100):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.02)
    own = [place for place in directories if place and os.path.exists(place)]
    return [f"process {pid}" for pid in descendants(os.getpid())] + own


def say(answer: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
