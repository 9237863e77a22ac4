"""What ends a step or the process, by what to do about it."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the trainer's own errors."""


class UnrecoverableError(TrainerError):
    """No restart helps: the coordinator is told (TrainerFailed) and the run ends. Raised on every rank alike."""


class ModelError(TrainerError):
    """The model or checkpoint to start from cannot be used; the process exits with code 2, which ends the run."""


class NoRoomError(TrainerError):
    """The disk has no room for what must be written: nothing was changed, it can be tried again."""


class SupersededError(TrainerError):
    """A higher incarnation of the trainer has taken over; what this one does no longer counts."""
