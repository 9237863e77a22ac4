"""Errors that end a step or the process, by the action they require."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the trainer's own errors."""


class UnrecoverableError(TrainerError):
    """A restart does not help: the coordinator receives TrainerFailed and the run ends. Raised on all ranks."""


class ModelError(TrainerError):
    """The model or checkpoint to start from cannot be used; the process exits with code 2, which ends the run."""


class NoRoomError(TrainerError):
    """The disk is full. No file was changed; the write can be repeated."""


class SupersededError(TrainerError):
    """A higher incarnation of the trainer has taken over; results of this incarnation are ignored."""
