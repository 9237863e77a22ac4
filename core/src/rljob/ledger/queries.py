"""Named queries of the coordinator on its own ledger. They return committed rows as plain data.

All queries are short enough for the event loop. Readers of a run (CLI, HTTP) use :mod:`rljob.ledger.reader`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from rljob.api.job_status import EvaluationResult
from rljob.ledger.evaluation_results import result_of
from rljob.ledger.payload_record import PayloadRecord, decode_record, decode_text
from rljob.ledger.record_store import Location
from rljob.ledger.sample_numbers import MEMBER_BITS, MEMBERS, evaluation_numbers, sample_number
from rljob.ledger.sample_progress import OPEN_COMPLETIONS, SampleProgress, progress_of_open_samples
from rljob.ledger.states import OPEN, State, quoted
from rljob.ledger.store import Store
from rljob.protocol.runner_protocol import PoolAnswer

Query = Callable[..., list[sqlite3.Row]]
"""Store.query or LedgerReader.rows."""


# --- the run ---


def recorded_job(store: Store) -> dict[str, Any] | None:
    """Return {"name": …, "spec": …} of the RLJob of the run; None in a new ledger."""
    value = _meta(store).get("job")
    return None if value is None else json.loads(value)


def is_finished(store: Store) -> bool:
    """Return whether the run was complete; training.steps may have grown since."""
    return "finished" in _meta(store)


def version_of(store: Store) -> int:
    """Return the trainer version of the run: batches applied."""
    version: int = store.query("SELECT COALESCE(MAX(step) + 1, 0) FROM applied")[0][0]
    return version


def _meta(store: Store) -> dict[str, str]:
    return {row["key"]: row["value"] for row in store.query("SELECT key, value FROM meta")}


# --- the trainer ---


@dataclass(frozen=True)
class TrainerRecord:
    """The trainer and its weights. ``publications``: (lineage, version, digest), oldest first. ``checkpoints``: (step,
    path in the storage, digest of its record) of the kept ones, oldest first. ``refused``: (step, digest of its record)
    of the ones that were refused and not written again."""

    starts: int  # of coordinator processes
    incarnation: int  # the newest; 0: none yet
    start: int  # version that the newest incarnation started from
    verified_incarnation: int  # the newest whose weights matched the publication
    publications: list[tuple[int, int, str]]
    checkpoints: list[tuple[int, str, str]]
    refused: list[tuple[int, str]]


def trainer_record(store: Store) -> TrainerRecord:
    """Return the records about the trainer."""
    meta = _meta(store)
    publications = store.query("SELECT lineage, step, digest FROM publications ORDER BY lineage, step")
    checkpoints = store.query("SELECT step, path, digest, removed FROM checkpoints ORDER BY step")
    newest = store.query("SELECT incarnation, step FROM incarnations ORDER BY incarnation DESC LIMIT 1")
    return TrainerRecord(
        starts=int(meta.get("coordinator_starts", 0)),
        incarnation=newest[0][0] if newest else 0,
        start=newest[0][1] if newest else 0,
        verified_incarnation=int(meta.get("verified_incarnation", 0)),
        publications=[(row[0], row[1], row[2]) for row in publications],
        checkpoints=[(row["step"], row["path"], row["digest"]) for row in checkpoints if row["removed"] == 0],
        refused=[(row["step"], row["digest"]) for row in checkpoints if row["removed"] == 2],
    )


def warnings(store: Store, most: int) -> tuple[list[str], int]:
    """Return the newest recorded warnings, at most ``most``, oldest first; and the number of earlier ones."""
    newest = store.query("SELECT message FROM warnings ORDER BY number DESC LIMIT ?", most)
    count = store.query("SELECT COUNT(*) FROM warnings")[0][0]
    return [row[0] for row in reversed(newest)], count - len(newest)


# --- groups and samples ---

MEMBERS_OF = f"s.number BETWEEN g.number << {MEMBER_BITS} AND (g.number << {MEMBER_BITS}) + {MEMBERS - 1}"
"""Condition that s is a sample of group g, for queries that read groups first. The others compare group numbers."""


@dataclass(frozen=True)
class Admissions:
    """Counts over all training groups: admitted groups, those that are in a batch, samples by end; and the reason of
    the last failure of a sample by itself."""

    groups: int
    batched: int
    ends: dict[State, int]
    last_failure: str


def last_failure(where: str) -> str:
    """Return the query of the reason of the last failure under a condition on samples s and groups g."""
    return (
        "SELECT s.reason FROM failures f CROSS JOIN samples s ON s.number = f.sample_number CROSS JOIN groups g"
        f" ON g.number = s.number >> {MEMBER_BITS} WHERE {where} ORDER BY f.number DESC LIMIT 1"
    )


def admissions(store: Store) -> Admissions:
    """Return the counts over all training groups so far."""
    groups = store.query("SELECT COALESCE(MAX(number), -1) + 1 FROM groups")[0][0]
    batched = store.query("SELECT COALESCE(SUM(groups), 0) FROM batches")[0][0]
    ends = {State(row[0]): row[1] for row in store.query("SELECT state, samples FROM ended")}
    failure = store.query(last_failure("s.number >= 0"))
    return Admissions(max(0, groups), batched, ends, failure[0][0] if failure else "")


@dataclass
class MixtureRecord:
    """Counters of one task: see rljob.scheduling.mixture.TaskShare."""

    rows: int
    deficit: float = 0.0
    rate: float = 1.0
    expected: float = 0.0
    accepted: float = 0.0
    finished: float = 0.0
    rejections_in_a_row: int = 0


def mixture(store: Store) -> dict[str, MixtureRecord]:
    """Return the mixture's counters of every task."""
    return {row["task"]: MixtureRecord(*tuple(row)[1:]) for row in store.query("SELECT * FROM mixture")}


@dataclass(frozen=True)
class SampleRecord:
    """A sample of a group with open samples."""

    id: str
    member: int
    state: State
    reward: float | None
    attempt: int  # the first attempt that counts
    dispatched: int | None  # if an engine got a request of it, at most the version of that engine
    min_version: int | None  # lowest version of a recorded token
    step: int | None  # of its batch


@dataclass(frozen=True)
class GroupRecord:
    """A group with an open sample, and all its samples. ``version`` and ``dispatched``: see the table groups in
    schema.sql."""

    id: str
    seq: int
    task: str
    row: int
    version: int
    restarts: int
    dispatched: int | None
    samples: list[SampleRecord] = field(default_factory=list)


def open_groups(store: Store) -> list[GroupRecord]:
    """Return the training groups with an open sample, in order of admission."""
    return _groups(store, "g.number >= 0")


def _groups(store: Store, condition: str) -> list[GroupRecord]:
    """Return the groups g with an open sample of which a condition holds."""
    groups: dict[str, GroupRecord] = {}
    progress = progress_of_open_samples(store.query)
    rows = store.query(
        "SELECT g.id AS gid, g.seq, g.task, g.row, g.version, g.restarts, g.dispatched AS first, s.* FROM groups g"
        f" INDEXED BY groups_open CROSS JOIN samples s ON {MEMBERS_OF} WHERE g.open = 1 AND {condition}"
        " ORDER BY g.seq, s.number"
    )
    for row in rows:
        group = groups.setdefault(
            row["gid"],
            GroupRecord(
                row["gid"], row["seq"], row["task"], row["row"], row["version"], row["restarts"], row["first"]
            ),
        )  # fmt: skip
        sample = SampleRecord(
            row["id"], row["member"], State(row["state"]), row["reward"], row["attempt"],
            row["dispatched"] if row["attempt"] else row["first"],
            row["min_version"] if row["completions"] else progress.get(row["number"], SampleProgress()).min_version,
            row["step"],
        )  # fmt: skip
        group.samples.append(sample)
    return list(groups.values())


@dataclass(frozen=True)
class DecisionRecord:
    """The decision of a user-written filter about a group; see the table decisions in schema.sql."""

    accepted: bool
    reason: str


def decisions_of_open_groups(store: Store) -> dict[str, DecisionRecord]:
    """Return group → decision of the user-written filter of its task, of the groups with an open sample."""
    rows = store.query(
        "SELECT g.id, d.accepted, d.reason FROM groups g INDEXED BY groups_open"
        " CROSS JOIN decisions d ON d.group_number = g.number WHERE g.open = 1"
    )
    return {group: DecisionRecord(bool(accepted), reason) for group, accepted, reason in rows}


def completions(store: Store, sample: str, first_attempt: int) -> list[PayloadRecord]:
    """Return the payload records of a sample from ``first_attempt`` on, in order.

    Raises:
        PayloadError: a record is damaged.
    """
    number = sample_number(sample)
    recorded = store.query("SELECT completions FROM samples WHERE number = ?", number)
    numbers = json.loads(recorded[0][0]) if recorded and recorded[0][0] else None
    if numbers is None:
        numbers = progress_of_open_samples(store.query).get(number, SampleProgress()).numbers
    return payload_records(store, numbers, first_attempt)


def answers(store: Store, sample: str, attempt: int) -> list[PoolAnswer]:
    """Return the answers of frozen pools to questions of a sample in an attempt; PayloadError: a text is damaged."""
    rows = store.query(
        "SELECT branch, question, number, turn, pool, finish, segment, position, length FROM answers"
        " WHERE sample_number = ? AND attempt = ?",
        sample_number(sample),
        attempt,
    )
    found: list[PoolAnswer] = []
    for branch, question, number, turn, pool, finish, *place in rows:
        text = decode_text(store.texts.read(Location(*place))).text
        found.append(PoolAnswer(branch, question, number, turn, pool, text, finish))
    return found


def payload_records(store: Store, numbers: list[int], first_attempt: int) -> list[PayloadRecord]:
    """Return the payload records of completions from ``first_attempt`` on, in order; PayloadError: one is damaged."""
    rows = store.query(
        "SELECT segment, position, length FROM completions WHERE number IN (SELECT value FROM json_each(?))"
        " AND attempt >= ? ORDER BY number",
        json.dumps(numbers),
        first_attempt,
    )
    return [decode_record(store.segments.read(Location(*row))) for row in rows]


class StoredSample(NamedTuple):
    """Where the tokens of a sample of a batch are: the records that count, in order of time."""

    turn_rewards: str  # JSON, one number for each turn; not decoded, as a rank needs few samples
    records: list[Location]
    logprobs: dict[str, Location]  # role of a model of a frozen pool → its log-probabilities


def stored_samples_of_batch(store: Store, step: int) -> list[StoredSample]:
    """Return the samples of the batch of ``step`` in the order of the batch; empty before it is formed."""
    # CROSS JOIN makes SQLite read samples first, by index.
    rows = store.query(
        "SELECT s.number, s.turn_rewards, c.segment, c.position, c.length"
        " FROM samples s CROSS JOIN json_each(s.completions) j"
        " CROSS JOIN completions c ON c.number = j.value AND c.attempt >= s.attempt WHERE s.step = ?"
        " ORDER BY s.number, c.number",
        step,
    )
    found: dict[int, StoredSample] = {}
    for number, turn_rewards, segment, position, length in rows:
        if number not in found:
            found[number] = StoredSample(turn_rewards, [], {})
        found[number].records.append(Location(segment, position, length))
    for number, role, *place in store.query(
        "SELECT m.sample_number, m.role, m.segment, m.position, m.length FROM samples s"
        " CROSS JOIN model_logprobs m ON m.sample_number = s.number WHERE s.step = ?",
        step,
    ):
        found[number].logprobs[role] = Location(*place)
    return list(found.values())


def first_needed_segment(query: Query, oldest_step: int) -> int | None:
    """Return the first payload segment that is needed by an open sample or by a replay from checkpoint ``oldest_step``;
    None if no segment is needed."""
    # CROSS JOIN makes SQLite read the tables in this order, by index.
    rows = [
        *query(
            "SELECT MIN(c.segment) FROM completions c CROSS JOIN samples s ON s.number = c.sample_number"
            f" WHERE {OPEN_COMPLETIONS} AND s.state IN ({quoted(OPEN)})"
        ),
        *query(
            "SELECT MIN(c.segment) FROM samples s CROSS JOIN json_each(s.completions) j"
            " CROSS JOIN completions c ON c.number = j.value WHERE s.step >= ?",
            oldest_step,
        ),
    ]
    return min((row[0] for row in rows if row[0] is not None), default=None)


# --- batches ---


class BatchRow(msgspec.Struct):
    """A sample of a batch."""

    sample: str
    group: str
    task: str
    attempt: int  # the first attempt that counts
    reward: float
    prompt_tokens: int
    response_tokens: int
    total_tokens: int
    min_version: int
    sequences: str | None = None  # JSON, tokens of each sequence; None: there is one
    baseline: float | None = None  # reward of the greedy answer of its group
    turn_rewards: str = "[]"  # JSON, one number for each turn
    turn_states: str | None = None  # JSON, a digest for each turn; None: no turn has one
    finish: str = ""  # of its last answer


def batch(store: Store, step: int) -> list[BatchRow]:
    """Return the samples of the batch of ``step`` in the order of the batch; empty before it is formed."""
    rows = store.query(
        'SELECT s.id AS sample, s.group_id AS "group", g.task, s.attempt, s.reward,'
        " s.prompt_tokens, s.response_tokens, s.total_tokens, s.min_version, s.sequences,"
        f" (SELECT b.reward FROM samples b WHERE b.number = s.number >> {MEMBER_BITS} << {MEMBER_BITS}"
        " AND b.state = 'baseline'), s.turn_rewards, s.turn_states, s.finish"
        f" FROM samples s CROSS JOIN groups g ON g.number = s.number >> {MEMBER_BITS} WHERE s.step = ?"
        " ORDER BY s.number",
        step,
    )
    return [BatchRow(*row) for row in rows]


def samples_of_batch(store: Store, step: int) -> list[str]:
    """Return the sample ids passed to :meth:`LedgerWriter.record_batch`; empty before the batch is formed."""
    rows = store.query("SELECT samples FROM batches WHERE step = ?", step)
    samples: list[str] = json.loads(rows[0][0]) if rows else []
    return samples


# --- evaluations ---


@dataclass(frozen=True)
class OpenEvaluation:
    """The running evaluation: its groups with an open sample, and (task, group, reward, reason) of the samples that
    ended, the failed ones in order of time; reward None: the sample failed for this reason."""

    version: int
    groups: list[GroupRecord]
    ended: list[tuple[str, str, float | None, str]]


def evaluation_results(store: Store) -> list[EvaluationResult]:
    """Return the results of all evaluations, by version, with the last failure of each."""
    return [result_of(row) for row in store.query("SELECT * FROM evaluations ORDER BY version")]


def last_dropped_evaluation(store: Store) -> int:
    """Return the newest version whose evaluation was dropped; -1 if none was."""
    return int(_meta(store).get("dropped_evaluation", -1))


def open_evaluation(store: Store) -> OpenEvaluation | None:
    """Return the running evaluation; None if there is none."""
    groups = _groups(store, "g.number < 0")
    if not groups:
        return None
    ended = store.query(
        f"SELECT g.task, g.id, s.reward, s.reason FROM groups g CROSS JOIN samples s ON {MEMBERS_OF}"
        " LEFT JOIN failures f ON f.sample_number = s.number"
        " WHERE g.number BETWEEN ? AND ? AND s.state != 'admitted' ORDER BY f.number",
        *evaluation_numbers(groups[0].version),
    )
    return OpenEvaluation(groups[0].version, groups, [tuple(row) for row in ended])
