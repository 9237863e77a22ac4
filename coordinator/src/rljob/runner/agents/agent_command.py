"""A command as an agent program: a process for each sample, in a process group and a directory of its own.

The process has the runner's environment without the tokens of the job. All processes of its group are killed when it
ends, or its sample does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rljob.api.templates import fill
from rljob.protocol.parent_death import set_parent_death_signal

MOST_OUTPUT_BYTES = 1 << 20
"""Of the standard output."""
KEPT_ERROR_BYTES = 4096
"""The last ones of the standard error, whose last line is a part of the reason of a failed sample."""
ROW_FILE = "row.json"


class AgentProcessError(Exception):
    """The process failed; the message is recorded as the reason."""


@dataclass(frozen=True)
class AgentCommand:
    """A command with templates of its arguments."""

    words: Sequence[str]

    async def run(self, base_url: str, api_key: str, row: Mapping[str, Any], seed: int) -> str | None:
        """Run the command and return what it printed, without white space at the end; None: nothing.

        Raises:
            AgentProcessError: it cannot be started, failed, or printed too much.
            ValueError: the row lacks a column.
        """
        words = [self.words[0], *(fill(word, row) for word in self.words[1:])]
        given = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "RLJOB_AGENT_SEED": str(seed)}
        # Its processes may still write into the directory while they are killed.
        with tempfile.TemporaryDirectory(prefix="rljob-agent-", ignore_cleanup_errors=True) as directory:
            (Path(directory) / ROW_FILE).write_bytes(msgspec.json.encode(row))
            try:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=directory,
                    env=_environment() | given,
                    start_new_session=True,
                    preexec_fn=set_parent_death_signal,
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a null byte in an argument
                raise AgentProcessError(f"its agent {words[0]} cannot be started: {error}") from None
            return await _result(process, words[0])


def check_program(word: str, field: str) -> None:
    """Check that the program of a command exists.

    Raises:
        ValueError: it does not; the message names ``field``.
    """
    if shutil.which(word) is None:
        raise ValueError(
            f"{field}: there is no program {word}; install it where this process runs (in a cluster: in the image of "
            "runner.template), or correct its name"
        )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not (name.startswith("RLJOB_") and "TOKEN" in name)}


async def _result(process: asyncio.subprocess.Process, program: str) -> str | None:
    assert process.stdout is not None and process.stderr is not None
    output = asyncio.create_task(_first_bytes(process.stdout, MOST_OUTPUT_BYTES + 1))
    errors = asyncio.create_task(_last_bytes(process.stderr, KEPT_ERROR_BYTES))
    try:
        code = await process.wait()
    finally:  # also if this call is cancelled; a descendant that still runs would keep the pipes open
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    printed, complaint = await output, (await errors).decode(errors="replace").strip()
    if code != 0:
        last = complaint.rpartition("\n")[2].strip()
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        raise AgentProcessError(f"its agent {program} {how}" + (f": {last}" if last else ""))
    if len(printed) > MOST_OUTPUT_BYTES:
        raise AgentProcessError(f"its agent {program} printed more than {MOST_OUTPUT_BYTES:,} bytes; let it print less")
    return printed.decode(errors="replace").rstrip() or None


async def _first_bytes(stream: asyncio.StreamReader, count: int) -> bytes:
    """Return the first ``count`` bytes of a stream; read it to its end."""
    kept = b""
    while block := await stream.read(1 << 16):
        kept += block[: count - len(kept)]
    return kept


async def _last_bytes(stream: asyncio.StreamReader, count: int) -> bytes:
    """Return the last ``count`` bytes of a stream; read it to its end."""
    kept = b""
    while block := await stream.read(1 << 16):
        kept = (kept + block)[-count:]
    return kept
