"""Copies a checkpoint to S3, in the threads that write checkpoints: each rank uploads some of the files."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rljob.trainer.checkpoint import CheckpointStore, read_state
from rljob.trainer.process_group import World

if TYPE_CHECKING:
    from rljob.protocol.s3_checkpoints import S3Checkpoints  # imports s3fs, which takes a second


def upload_checkpoint(
    copies: S3Checkpoints,
    checkpoints: CheckpointStore,
    world: World,
    step: int,
    incarnation: int,
    removed: Collection[int],
) -> None:
    """Copy the checkpoint of ``step``, then delete the copies of the checkpoints ``removed``. All ranks call this
    together, and all raise the same error. It can be repeated.

    Raises:
        CopyError: S3 cannot be used now.
        SupersededError: a higher incarnation has taken over.
    """
    path = checkpoints.path(step)
    state = read_state(path)
    files = sorted(state.files)[world.rank :: world.size]
    world.agree(lambda: copies.upload(path, state, files))

    def finish() -> None:
        if world.rank == 0:
            copies.finish(path, state, checkpoints.exclusive(incarnation))
            copies.remove(removed, checkpoints.exclusive(incarnation))

    world.agree(finish)
