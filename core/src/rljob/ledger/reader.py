"""Read-only access to a ledger: one consistent snapshot of a run that is running, was killed, or is done.

``rljob samples``, ``rljob show``, ``rljob audit`` and the HTTP API use this module.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import msgspec
from pydantic import ValidationError

from rljob.api.models import RLJob
from rljob.ledger.payload_record import TextRecord, decode_text
from rljob.ledger.queries import MEMBERS_OF
from rljob.ledger.record_store import Location, PayloadError
from rljob.ledger.sample_numbers import MEMBER_BITS, MEMBERS, find_number
from rljob.ledger.sample_progress import COLUMNS as PROGRESS
from rljob.ledger.sample_progress import progress_of_open_samples
from rljob.ledger.segments import PayloadReader
from rljob.ledger.states import Kind, State
from rljob.ledger.store import LEDGER, PAYLOAD, TEXTS, check_version, ledger_directory

MOST_SAMPLES = 10_000
"""Limit of samples in one HTTP response."""


class NoRunError(Exception):
    """The run or sample does not exist or cannot be read. The message gives the cause and the remedy."""


class DamagedError(NoRunError):
    """The run exists, but its ledger is a damaged database, or has a damaged value."""


class LedgerReader:
    """A snapshot of a run's ledger, and its payload. A context manager.

    Args:
        storage: the job's storage; for ``rljob run`` the run directory.

    Raises:
        NoRunError: the ledger does not exist, is damaged, or is of another version of rljob.
    """

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.db = _connect(ledger_directory(storage) / LEDGER)
        self.payload = PayloadReader(storage / PAYLOAD)
        self.texts = PayloadReader(storage / TEXTS)
        self._prepared = False

    def job(self) -> RLJob:
        """Return the resolved manifest of the run.

        Raises:
            NoRunError: job.json does not exist, is damaged, or is of another version of rljob.
        """
        path = self.storage / "job.json"
        try:
            return RLJob.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise NoRunError(f"{path} does not exist; give the directory of a run") from None
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                raise NoRunError(f"{path} is damaged: it is not valid JSON; restore it") from None
            raise NoRunError(f"{path} is of another version of rljob; use that version to read the run") from None

    def rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a statement."""
        return self.db.execute(statement, values).fetchall()

    def value(self, statement: str, *values: Any) -> Any:
        """Return the first value of a statement's first row; None without rows."""
        row = self.db.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def text(self, location: Location) -> TextRecord | None:
        """Return a recorded text; None if it cannot be read: the audit reports it."""
        try:
            return decode_text(self.texts.read(location))
        except (PayloadError, msgspec.MsgspecError):
            return None

    def scored_branch(self, sample: str) -> str:
        """Return the branch that the text of a sample is of; empty if its text cannot be read."""
        rows = self.rows(
            "SELECT text_segment, text_position, text_length FROM samples"
            " WHERE number = ? AND text_segment IS NOT NULL",
            find_number(sample),
        )
        record = self.text(Location(*rows[0])) if rows else None
        return "" if record is None else record.branch

    def prepare_accounts(self) -> None:
        """Create the temporary view ``accounts``: the samples, also with what those without a reward have generated."""
        if self._prepared:
            return
        self._prepared = True
        names = ", ".join(PROGRESS)
        self.db.execute(f"CREATE TEMP TABLE progress (sample_number INTEGER PRIMARY KEY, {names})")
        rows = [(number, *each.row) for number, each in progress_of_open_samples(self.rows).items()]
        self.db.executemany(f"INSERT INTO progress VALUES (?{',?' * len(PROGRESS)})", rows)
        columns = ", ".join(f"s.{name}" for name in _ACCOUNTS)
        generated = ", ".join(f"COALESCE(s.{name}, p.{name}) AS {name}" for name in PROGRESS)
        self.db.execute(
            f"CREATE TEMP VIEW accounts AS SELECT {columns}, {generated} FROM main.samples s"
            " LEFT JOIN progress p ON p.sample_number = s.number"
        )

    def close(self) -> None:
        """Close all files."""
        self.payload.close()
        self.texts.close()
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def reading_values(ledger: LedgerReader) -> Iterator[None]:
    """Values that are not what the ledger's tables have, for example malformed JSON, raise a DamagedError."""
    try:
        yield
    except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
        path = ledger_directory(ledger.storage) / LEDGER
        raise DamagedError(f"{path} has a damaged value: {error}; rljob audit names the rows") from None


def _connect(path: Path) -> sqlite3.Connection:
    """Return a connection inside a read transaction, so that later commits of the run are not visible."""
    if not path.is_file():
        missing = "does not exist" if not path.parent.is_dir() else f"has no {LEDGER}: no run has started in it"
        raise NoRunError(f"{path.parent} {missing}; give the directory of a run")
    try:
        db = _open_read_only(path)
        check_version(path, db.execute("PRAGMA user_version").fetchone()[0])
        db.execute("BEGIN")
        tables = db.execute("SELECT COUNT(*) FROM sqlite_schema WHERE type = 'table'").fetchone()[0]
    except sqlite3.Error as error:
        raise DamagedError(f"{path} cannot be read: {error}; restore it, or check the disk") from None
    except ValueError as error:
        raise NoRunError(str(error)) from None
    if not tables:
        db.close()  # its lock would delay a coordinator that opens the ledger
        raise NoRunError(f"{path} is empty: no run has started in it; give the directory of a run")
    return db


def _open_read_only(path: Path) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    if not os.access(path.parent, os.W_OK, effective_ids=True) and not path.with_name(f"{path.name}-wal").exists():
        address += "&immutable=1"  # a read-only volume has no place for the shared memory file, and no writer
    db = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    return db


def columns(db: sqlite3.Connection, table: str) -> dict[str, tuple[str, bool]]:
    """Return column → (declared type, whether NULL is allowed) of a table."""
    return {
        row[1]: (row[2], not row[3] and not row[5]) for row in db.execute(f"PRAGMA main.table_info({table})").fetchall()
    }


class KeptCheckpoint(NamedTuple):
    """A checkpoint that was neither removed nor refused."""

    step: int
    path: str  # in the storage
    digest: str  # of its record (rljob.protocol.checkpoint_record)


def kept_checkpoints(ledger: LedgerReader) -> list[KeptCheckpoint]:
    """Return the kept checkpoints, oldest first."""
    rows = ledger.rows("SELECT step, path, digest FROM checkpoints WHERE removed = 0 ORDER BY step")
    return [KeptCheckpoint(int(row["step"]), row["path"], row["digest"]) for row in rows]


class SampleRow(msgspec.Struct):
    """A sample in a list. Values that are not known yet are None."""

    id: str
    group: str
    member: int
    kind: str  # train | evaluation
    task: str
    row: int  # of the task's data
    state: str
    reason: str
    step: int | None  # of its batch
    reward: float | None
    advantage: float | None
    prompt_tokens: int | None  # of the first turn
    response_tokens: int | None  # written by the model, over all turns
    total_tokens: int | None  # of all sequences: prompt, model and observations
    min_version: int | None  # lowest policy version of a token
    max_version: int | None
    staleness: int | None  # step − min_version; only of a sample in a batch
    finish: str | None  # stop | length | abort; of the newest answer
    sequences: list[int] | None  # tokens of each sequence of a sample with branches; they share prefixes
    text: str | None  # the last response; also None if it is damaged


COLUMNS = (
    's.id, s.group_id AS "group", s.member, g.kind, g.task, g.row, s.state, s.reason, s.step, s.reward, s.advantage,'
    " s.prompt_tokens, s.response_tokens, s.total_tokens, s.min_version, s.max_version,"
    " s.step - s.min_version AS staleness, s.finish, s.sequences, s.text_segment, s.text_position, s.text_length"
)
"""Of :data:`SAMPLES`. The last three are the location of the text: see :func:`sample_row`."""
SAMPLES = f"accounts s JOIN groups g ON g.number = s.number >> {MEMBER_BITS}"
"""See :meth:`LedgerReader.prepare_accounts`."""
_ACCOUNTS = (
    "number", "id", "group_number", "group_id", "member", "attempt", "state", "reason", "reward", "turn_rewards",
    "turn_states", "dispatched", "step", "advantage", "metrics", "text_segment", "text_position", "text_length",
)  # fmt: skip


def sample_row(ledger: LedgerReader, row: sqlite3.Row) -> SampleRow:
    """Return a row of :data:`COLUMNS`.

    Raises:
        msgspec.MsgspecError: a value is damaged.
    """
    *values, sequences, segment, position, length = row
    values.append(None if sequences is None else msgspec.json.decode(sequences))
    record = None if segment is None else ledger.text(Location(segment, position, length))
    values.append(None if record is None else record.text)
    return msgspec.convert(dict(zip(SampleRow.__struct_fields__, values, strict=True)), SampleRow)


class Sort(StrEnum):
    """Sort keys of lists; the largest value comes first."""

    NEWEST = "newest"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    LENGTH = "length"
    STALENESS = "staleness"


_KEYS = {
    Sort.NEWEST: "COALESCE(s.step, -1)",
    Sort.REWARD: "s.reward",
    Sort.ADVANTAGE: "s.advantage",
    Sort.LENGTH: "s.response_tokens",
    Sort.STALENESS: "s.step - s.min_version",
}


@dataclass(frozen=True)
class Selection:
    """Filters and order of a list of samples. None: no filter."""

    task: str | None = None
    step: int | None = None
    state: State | None = None
    group: str | None = None
    kind: Kind | None = None
    sort: Sort = Sort.NEWEST
    reverse: bool = False
    limit: int = 20


def samples(ledger: LedgerReader, selection: Selection) -> list[SampleRow]:
    """Return the samples of a selection. Samples without the sort key come last in either direction.

    Raises:
        DamagedError: a value is damaged.
    """
    where, values = conditions(selection)
    key = _KEYS[selection.sort]
    with reading_values(ledger):
        ledger.prepare_accounts()
        rows = ledger.rows(
            f"SELECT {COLUMNS} FROM {SAMPLES} WHERE {where}"
            f" ORDER BY {key} IS NULL, {key} {'ASC' if selection.reverse else 'DESC'}, g.kind DESC, g.version, g.seq,"
            " s.member LIMIT ?",
            *values,
            selection.limit,
        )
        return [sample_row(ledger, row) for row in rows]


def conditions(selection: Selection) -> tuple[str, list[Any]]:
    """Return the filters of a selection as an SQL condition on samples s and groups g, and its values."""
    filters = {
        "g.task": selection.task,
        "s.step": selection.step,
        "s.state": selection.state,
        "g.kind": selection.kind,
    }
    wanted = {f"{column} = ?": value for column, value in filters.items() if value is not None}
    if selection.group is not None:
        number = find_number(f"{selection.group}.0")
        members = "0" if number is None else f"s.number BETWEEN {number} AND {number + MEMBERS - 1}"
        return " AND ".join([*wanted, members]), list(wanted.values())
    return " AND ".join(["1", *wanted]), list(wanted.values())


def unknown_task(ledger: LedgerReader, selection: Selection) -> str:
    """Return an error message that lists the tasks if the selection's task does not exist; empty if it does."""
    tasks = [task.name for task in ledger.job().spec.tasks]
    if selection.task is None or selection.task in tasks:
        return ""
    return f"there is no task {selection.task!r}; the tasks of this run are {_join(tasks)}"


def why_empty(ledger: LedgerReader, selection: Selection) -> str:
    """Return a message that explains why the list of a selection is empty."""
    newest = ledger.value("SELECT MAX(step) FROM samples")
    if selection.step is not None and newest is None:
        return f"there is no batch {selection.step}: this run has not formed any yet"
    if selection.step is not None and selection.step > newest:
        return f"there is no batch {selection.step} yet; the newest is {newest}"
    return "no sample of this run matches all filters"


def unknown_sample(ledger: LedgerReader, name: str) -> str:
    """Return an error message for ``name``, which does not exist: samples of its group, or the newest one."""
    if members := _members(ledger, name):
        return f"{name} is a group; its samples are {_join(members)}"
    group = re.sub(r"\.\d+$", "", name)
    if members := _members(ledger, group):
        return f"there is no sample {name!r}; the samples of {group} are {_join(members)}"
    if not re.fullmatch(r"(g\d+|e\d+\.\d+)(\.\d+)?", name):
        return f"{name!r} is not a sample id; ids are like g17.3, or e40.7.0 in an evaluation"
    kind = Kind.TRAIN if name.startswith("g") else Kind.EVALUATION
    newest = ledger.value(
        f"SELECT s.id FROM groups g JOIN samples s ON {MEMBERS_OF} WHERE g.kind = ?"
        " ORDER BY g.version DESC, g.seq DESC, s.number DESC LIMIT 1",
        kind,
    )
    if newest is None:
        return f"there is no sample {name!r}: the run has not admitted any yet"
    return f"there is no sample {name!r}; the newest is {newest}"


def _members(ledger: LedgerReader, group: str) -> list[str]:
    """Return the ids of the first samples of a group; none if the group does not exist."""
    number = find_number(f"{group}.0")
    if number is None:
        return []
    last = number + MEMBERS - 1
    rows = ledger.rows("SELECT id FROM samples WHERE number BETWEEN ? AND ? ORDER BY number LIMIT 9", number, last)
    return [row[0] for row in rows]


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
