"""Writes of one user, read from the API server's audit log, so that all times come from one clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ["{user}"]
  verbs: [create, update, patch, delete, deletecollection]
- level: None
"""
"""Logs the writes of one user only, so that the log costs little, and the same for the floor and the operator."""


@dataclass(frozen=True)
class Write:
    """A completed write. Times are Unix seconds."""

    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    received: float
    answered: float

    @property
    def of_child(self) -> bool:
        """Whether the object is a child of an RLJob."""
        return self.resource not in ("rljobs", "leases", "events") and not self.subresource

    @property
    def forbidden_when_idle(self) -> bool:
        """Whether an idle operator must not do this write: every write except to the Lease."""
        return self.resource != "leases"


class AuditLog:
    """The audit log, read incrementally."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.writes: list[Write] = []

    def read(self) -> list[Write]:
        """Read new lines and return all writes so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.writes += _writes(whole)
        return self.writes

    def since(self, start: float, wanted: Callable[[Write], bool] = lambda write: True) -> list[Write]:
        """Return the writes received since ``start``."""
        return [write for write in self.read() if write.received >= start and wanted(write)]


def _writes(data: bytes) -> Iterator[Write]:
    for line in data.splitlines():
        event = json.loads(line)
        if event["stage"] != "ResponseComplete":
            continue
        what = event.get("objectRef", {})
        yield Write(
            verb=event["verb"],
            resource=what.get("resource", ""),
            subresource=what.get("subresource", ""),
            namespace=what.get("namespace", ""),
            name=what.get("name", ""),
            code=event.get("responseStatus", {}).get("code", 0),
            received=_seconds(event["requestReceivedTimestamp"]),
            answered=_seconds(event["stageTimestamp"]),
        )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def counted(writes: list[Write]) -> dict[str, int]:
    """Return the number of writes by verb, resource and HTTP status, largest first."""
    found = Counter(
        f"{write.verb} {write.resource}{f'/{write.subresource}' if write.subresource else ''} {write.code}"
        for write in writes
    )
    return dict(found.most_common())
