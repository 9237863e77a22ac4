"""The checkpoints of a run that the ledger records: which are kept, and which one a trainer may start from."""

from __future__ import annotations

from rljob.ledger.queries import TrainerRecord
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import trainer_protocol as m


class KeptCheckpoints:
    """The kept checkpoints, oldest first.

    Args:
        keep: number of checkpoints to keep.
        ledger: where changes are recorded.
    """

    def __init__(self, keep: int, ledger: LedgerWriter) -> None:
        self._keep = keep
        self._ledger = ledger
        self._kept: dict[int, tuple[str, str]] = {}  # step → path in the storage, digest
        self._refused: dict[int, str] = {}  # step → digest; not written again since

    def restore(self, record: TrainerRecord) -> None:
        """Restore the state from the ledger."""
        self._kept = {step: (path, digest) for step, path, digest in record.checkpoints}
        self._refused = dict(record.refused)

    def __contains__(self, step: int) -> bool:
        return step in self._kept

    @property
    def steps(self) -> list[int]:
        """Steps of the kept checkpoints, oldest first."""
        return sorted(self._kept)

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint; 0: none, the run starts from the initial model."""
        return max(self._kept, default=0)

    @property
    def newest_path(self) -> str:
        """Path of the newest checkpoint in the storage; empty if there is none."""
        return self._kept[self.newest][0] if self._kept else ""

    def before(self, step: int) -> int | None:
        """Return the step of the newest kept checkpoint before ``step``; None if there is none."""
        return max((known for known in self._kept if known < step), default=None)

    def obstacle(self, start: int) -> str:
        """Return why a trainer with weights of version ``start`` cannot repeat the later steps; empty if it can."""
        if not self._kept or start >= self.steps[0]:
            return ""
        names = ", ".join(path for path, _ in reversed(self._kept.values()))
        return (
            f"the trainer finds no checkpoint that it can use, and the batches before step {self.steps[0]} are not "
            f"stored any more; restore one of {names} from a copy, or start another run"
        )

    def mismatch(self, message: m.RegisterTrainer, version: int) -> str:
        """Return why the checkpoint that a trainer loaded is not the one that the ledger records; empty if it is.

        Args:
            message: of the trainer.
            version: the newest one of the ledger.
        """
        if message.step > max(version, self.newest):
            return f"the ledger ends at step {version}, so it is not of this run"
        known = self._kept.get(message.step, ("", ""))[1]
        differs = bool(known and message.digest) and known != message.digest
        refused = bool(message.digest) and self._refused.get(message.step) == message.digest
        return "its digest is not the one in the ledger" if differs or refused else ""

    def refuse(self, step: int, digest: str) -> None:
        """Record that a checkpoint no longer counts; ``digest``: if it must not be loaded even if it is readable. The
        run writes it again if the trainer reaches its step as the newest one, and else removes it."""
        self._kept.pop(step, None)
        self._refused[step] = digest
        self._ledger.record_refused(step, digest)

    def unseen(self, message: m.RegisterTrainer) -> list[int]:
        """Return the steps of kept checkpoints that are newer than the one that a trainer loaded, and not refused."""
        refused = {refused.step for refused in message.refused}
        return [step for step in self.steps if step > message.step and step not in refused]

    def removed_by(self, step: int, writing: int | None = None) -> list[int]:
        """Return the steps of the checkpoints to remove once that of ``step`` is written, and before it ``writing``."""
        steps = sorted({*self._kept, step, *([] if writing is None else [writing])})
        return steps[: -self._keep] + sorted(self._refused.keys() - {step, writing})

    def add(self, message: m.Checkpointed) -> None:
        """Record a durable checkpoint; remove old ones and the payload that they cover."""
        self._refused.pop(message.step, None)
        removed = [step for step in self.removed_by(message.step) if step in self._kept]
        self._kept[message.step] = (message.path, message.digest)
        for step in removed:
            del self._kept[step]
        self._ledger.record_checkpoint(message.step, message.path, message.incarnation, message.digest, removed)
        oldest = self.steps[0]
        self._ledger.then(self._ledger.remove_covered_payload, oldest)
