"""Counts of what costs a run samples or time: rejections, evictions, aborts and requeues, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

from rljob.scheduling.groups import CAUSES, End, Ended

EVENTS = "events/"
"""Prefix of the metrics."""
Abort = Literal["ended", "discarded", "elsewhere", "not_wanted", "drained"]
"""Why an engine had to end a request. ended: its sample ended. discarded: its tokens do not count any more (a new
lineage, an agent program that begins again). elsewhere: another engine finished it. not_wanted: an agent that connected
again holds it, and the run does not. drained: its engine is drained; the tokens so far are kept."""
Requeue = Literal[
    "update", "interrupted", "engine_lost", "engine_restarted", "engine_failed", "not_held", "runner_lost",
    "new_lineage", "repeated_lease",
]  # fmt: skip
"""Why another engine continues a request. update: a weight update interrupted it. interrupted: its engine or a drain
did. engine_lost, engine_restarted: its engine is gone, or starts again. engine_failed: the engine reported a failure.
not_held: an agent that connected again does not hold it. Or why another lease continues a sample: runner_lost: its
runner is gone. new_lineage: its tokens were discarded. repeated_lease: its runner sent a result of discarded tokens."""
REASONS: dict[str, tuple[str, ...]] = {
    "rejected": (*CAUSES["filtered"], *CAUSES["failed"]),
    "evicted": (*CAUSES["surplus"], *CAUSES["expired"]),
    "aborted": get_args(Abort),
    "requeued": get_args(Requeue),
}
"""Event → its reasons. rejected: samples of training that ended as filtered or failed. evicted: those that ended as
surplus or expired. aborted: requests on engines. requeued: requests and samples."""
_EVENT_OF: dict[End, str] = {
    "filtered": "rejected", "failed": "rejected", "surplus": "evicted", "expired": "evicted",
}  # fmt: skip


class EventCounts:
    """The counts since the start of this process."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def ended(self, ended: Iterable[Ended]) -> None:
        """Count samples of training that ended; trained ones are no event."""
        for entry in ended:
            if entry.end in _EVENT_OF:
                self._counts[_EVENT_OF[entry.end], entry.cause] += 1

    def aborted(self, reason: Abort, requests: int = 1) -> None:
        """Count requests that engines had to end."""
        self._counts["aborted", reason] += requests

    def requeued(self, reason: Requeue, requests: int = 1) -> None:
        """Count requests that other engines continue, or samples that other leases continue."""
        self._counts["requeued", reason] += requests

    def counts(self) -> dict[tuple[str, str], int]:
        """Return (event, reason) → count, of all reasons."""
        return {(event, reason): self._counts[event, reason] for event, names in REASONS.items() for reason in names}

    def metrics(self) -> dict[str, float]:
        """Return events/EVENT/REASON → count, of all reasons."""
        return {f"{EVENTS}{event}/{reason}": count for (event, reason), count in self.counts().items()}
