"""Errors of commands: each has a sentence for the user and an exit code."""

from __future__ import annotations


class CliError(Exception):
    """A command or a run cannot start or continue.

    Args:
        sentence: the cause and the remedy.
        exit_code: of the command: 2 for input and configuration, 1 for failures while running.
        log: path and last lines of the relevant log; empty if there is none.
    """

    def __init__(self, sentence: str, exit_code: int = 1, log: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit_code = exit_code
        self.log = log


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: all components were stopped, and the run can be resumed.

    Args:
        checkpoint: sentence on the checkpoint that the run resumes from; empty without one.
    """

    def __init__(self, checkpoint: str = "") -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
