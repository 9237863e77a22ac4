"""Errors that end a step or the process, by the action they require."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the trainer's own errors."""


class UnrecoverableError(TrainerError):
    """A restart does not help: the coordinator receives TrainerFailed and the run ends. Raised on all ranks."""


class ModelError(TrainerError):
    """The model, checkpoint or device cannot be used; the process exits with code 2, which ends the run."""


class NoRoomError(TrainerError):
    """The disk is full. No file was changed; the write can be repeated."""


class NewerCheckpointError(TrainerError):
    """Another process wrote a checkpoint while this one loaded an older one. The process exits with code 1, and the
    next one loads it. Raised on all ranks."""


class SupersededError(TrainerError):
    """A higher incarnation of the trainer has taken over; results of this incarnation are ignored."""
