"""Why a local run ended otherwise than by success."""

from __future__ import annotations


class CliError(Exception):
    """A run that cannot start or go on.

    Args:
        sentence: what happened and what to do.
        exit_code: of the command: 2 for input and configuration, 1 for failures under way.
        log: last lines of the log concerned, with its path as the first line; empty when there is none.
    """

    def __init__(self, sentence: str, exit_code: int = 1, log: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit_code = exit_code
        self.log = log


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; everything was stopped and the run can be resumed.

    Args:
        checkpoint: what the run goes on from, in words; empty when it was stopped without writing a checkpoint.
    """

    def __init__(self, checkpoint: str = "") -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
