"""Copies of checkpoints in S3: PREFIX/RUN/step-000020-DIGEST/ has the files of a checkpoint.

A copy exists once it has its trainer.json, which is uploaded last and deleted first. DIGEST begins the digest of that
record, so two trainers that write the same step never mix their files. RUN is the run's id (CheckpointStore.run_id): a
run neither loads nor deletes what is in the directory of another run.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rljob.api.model_address import S3Model
from rljob.protocol.checkpoint_copies import CheckpointCopy, CopyError, CopyRefusedError
from rljob.protocol.checkpoint_files import STATE_FILE, directory_name, is_inside, step_of
from rljob.protocol.checkpoint_record import TrainerState, find_damage, read_state_file
from rljob.protocol.full_disk import FULL_DISK
from rljob.protocol.model_cache import ModelUnavailableError
from rljob.protocol.s3_access import explained_errors, open_s3, removed_on_failure
from rljob.protocol.sync_path import sync_path

log = logging.getLogger(__name__)

DIGEST_DIGITS = 16
_NAME = re.compile(rf"(.+)-([0-9a-f]{{{DIGEST_DIGITS}}})")


class S3Checkpoints:
    """The copies of the checkpoints of a run. All methods raise :class:`CopyError`.

    Args:
        address: of the copies.
        endpoint: of the server; None: that of botocore.
        run: id of the run, the only one whose copies are listed; empty: of all runs, and nothing can be written.
    """

    def __init__(self, address: S3Model, endpoint: str | None = None, run: str = "") -> None:
        self._root = f"{address.bucket}/{address.prefix}"
        self._run = run
        self._endpoint = endpoint
        self._files = open_s3(endpoint)
        self._uploaded: set[str] = set()  # by this process: a damaged object of an earlier one is replaced

    def __str__(self) -> str:
        return f"s3://{self._root}"

    def complete(self, records: Mapping[int, str] | None = None) -> dict[int, CheckpointCopy]:
        """Return step → the newest complete copy of the step.

        Args:
            records: step → digest of the record, to return only copies of these checkpoints.

        Raises:
            CopyRefusedError: also if there are copies of several runs and no ``records``.
        """
        found = [copy for copy in self._copies() if copy.written]
        if records is not None:
            found = [copy for copy in found if copy.is_of(records.get(copy.step, ""))]
        elif len(runs := sorted({copy.run for copy in found})) > 1:
            raise CopyRefusedError(
                f"spec.checkpoints.uri: {self}/ has checkpoints of {len(runs)} runs ({', '.join(runs)}), and without "
                "the ledger it is not known which is this one; copy a checkpoint from there with a client of S3"
            )
        return {copy.step: copy for copy in sorted(found, key=lambda copy: copy.written)}

    def upload(self, checkpoint: Path, state: TrainerState, files: Collection[str]) -> None:
        """Upload some of the files of a checkpoint. Files that an earlier attempt of this process uploaded are skipped
        while they are there with their size.

        Args:
            checkpoint: its directory.
            state: its record.
            files: of ``state.files``.
        """
        target = self._target(state)
        with self._errors():
            sizes = self._sizes(target)
            for name in files:
                remote = f"{target}/{name}"
                if remote not in self._uploaded or sizes.get(name) != (checkpoint / name).stat().st_size:
                    self._files.put_file(str(checkpoint / name), remote)
                    self._uploaded.add(remote)

    def finish(self, checkpoint: Path, state: TrainerState, permitted: AbstractContextManager[None]) -> None:
        """Upload the record of a checkpoint whose files have been uploaded; then delete the run's other copies of its
        step, and its uploads that were given up.

        Args:
            checkpoint: its directory.
            state: its record.
            permitted: is entered while objects are written; raises if another process has taken over.

        Raises:
            CopyError: also if an uploaded file has gone, or has another size; :meth:`upload` uploads it again.
        """
        target = self._target(state)
        with permitted:
            with self._errors():
                sizes = self._sizes(target)
            for name in state.files:
                if sizes.get(name) != (checkpoint / name).stat().st_size:
                    raise CopyError(
                        f"spec.checkpoints.uri: s3://{target}/{name} was deleted or changed during the upload of the "
                        "checkpoint; let no other program write there"
                    )
            with self._errors():
                self._files.put_file(str(checkpoint / STATE_FILE), f"{target}/{STATE_FILE}")
            self._delete([copy for copy in self._copies() if self._is_other(copy, state)])

    def remove(self, steps: Collection[int], permitted: AbstractContextManager[None]) -> None:
        """Delete the run's copies of ``steps``; see :meth:`finish` for ``permitted``."""
        assert self._run, "no run deletes the copies of all runs"
        with permitted:
            self._delete([copy for copy in self._copies() if copy.step in steps])

    def download(self, copy: CheckpointCopy, checkpoints: Path) -> str:
        """Download a copy to a new directory of ``checkpoints``, complete or not at all; return its damage, empty if it
        has none and is there."""
        target = checkpoints / directory_name(copy.step)
        temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        log.info("downloading %s/%s", self, copy.name)
        with self._errors(checkpoints), removed_on_failure(temporary):
            for name in copy.files:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{copy.name}/{name}", str(temporary / name))
            if damage := _damage(temporary, copy):
                return f"{self}/{copy.name}/{damage}"
            for path in (*temporary.rglob("*"), temporary):
                sync_path(path)
            temporary.rename(target)
            sync_path(checkpoints)
        return ""

    def _copies(self) -> Iterator[CheckpointCopy]:
        """Yield the copies of the run, or of all runs; an incomplete one has an empty ``written``."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        with self._errors():
            objects = self._files.find(f"{self._root}/{self._run}" if self._run else self._root, detail=True)
        for path, description in objects.items():
            run, _, rest = path.removeprefix(f"{self._root}/").partition("/")
            directory, _, name = rest.partition("/")
            if is_inside(name):
                found.setdefault((run, directory), {})[name] = str(description.get("LastModified", ""))
        for (run, directory), files in sorted(found.items()):
            match = _NAME.fullmatch(directory)
            step = step_of(match[1]) if match else None
            if match and step is not None:
                yield CheckpointCopy(run, step, match[2], files.get(STATE_FILE, ""), sorted(files))

    def _sizes(self, target: str) -> dict[str, int]:
        """Return name → bytes of the objects below ``target``."""
        objects = self._files.find(target, detail=True)
        return {path.removeprefix(f"{target}/"): description["size"] for path, description in objects.items()}

    def _is_other(self, copy: CheckpointCopy, state: TrainerState) -> bool:
        """Return whether a copy is of the same step with another content, or an upload that was given up."""
        other = self._target(state) != f"{self._root}/{copy.name}"
        return other and (copy.step == state.step or not copy.written)

    def _delete(self, copies: list[CheckpointCopy]) -> None:
        for copy in copies:
            log.info("deleting %s/%s", self, copy.name)
            paths = [f"{self._root}/{copy.name}/{name}" for name in copy.files]
            record = f"{self._root}/{copy.name}/{STATE_FILE}"
            with self._errors():
                if record in paths:
                    self._files.rm_file(record)
                    paths.remove(record)
                if paths:
                    self._files.rm(paths)

    def _target(self, state: TrainerState) -> str:
        assert self._run, "nothing is written for all runs"
        return f"{self._root}/{self._run}/{directory_name(state.step)}-{state.digest[:DIGEST_DIGITS]}"

    @contextmanager
    def _errors(self, target: Path | None = None) -> Iterator[None]:
        try:
            with explained_errors(self._root, target, self._endpoint):
                yield
        except ValueError as error:
            raise CopyRefusedError(f"spec.checkpoints.uri: {error}") from error
        except ModelUnavailableError as error:
            raise CopyError(f"spec.checkpoints.uri: {error}") from error
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise CopyError(
                f"spec.checkpoints.uri: {self}/ does not fit the disk of {target} ({error}); make room there"
            ) from error


def _damage(directory: Path, copy: CheckpointCopy) -> str:
    """Return what is wrong with a downloaded checkpoint; empty if it is as it was written."""
    try:
        state = read_state_file(directory)
    except ValueError as error:
        return f"{STATE_FILE} ({error})"
    if (state.step, state.digest[:DIGEST_DIGITS]) != (copy.step, copy.digest):
        return f"{STATE_FILE} is of another checkpoint"
    return find_damage(directory, state.files)
