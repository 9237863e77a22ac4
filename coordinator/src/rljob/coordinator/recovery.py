"""Taking up a run from its ledger: called once, before anyone connects."""

from __future__ import annotations

import logging
import sqlite3

import msgspec

from rljob.coordinator.run import Run
from rljob.coordinator.segments import Location
from rljob.coordinator.store import Store
from rljob.coordinator.trajectory import PayloadRecord, Trajectory, Turn
from rljob.protocol import messages as m
from rljob.protocol.status import EvaluationResult, HistoryPoint
from rljob.scheduling.groups import REJECTED, Group, Sample
from rljob.scheduling.mixture import Mixture

log = logging.getLogger(__name__)


def recover(run: Run) -> None:
    """Bring ``run`` to the state its ledger holds. Does nothing for a new run."""
    store = run.store
    version = store.query("SELECT COALESCE(MAX(step) + 1, 0) FROM applied")[0][0]
    _recover_policy(run)
    _recover_scheduler(run, version)
    _recover_evaluations(run)
    _recover_history(run)
    if store.query("SELECT 1 FROM meta WHERE key = 'finished'") and version >= run.spec.training.steps:
        run.finished = True
        run.history.end()
        run.conclude()
    log.info("ledger: version %d, lineage %d, %d groups open", version, run.policy.lineage, len(run.scheduler.groups))


def _recover_policy(run: Run) -> None:
    policy, store = run.policy, run.store
    policy.incarnation = store.query("SELECT COALESCE(MAX(incarnation), 0) FROM incarnations")[0][0]
    for row in store.query("SELECT lineage, step, digest FROM publications ORDER BY lineage, step"):
        policy.digests[row["lineage"], row["step"]] = row["digest"]
        policy.lineage = max(policy.lineage, row["lineage"])
        policy.published = max(policy.published, row["step"])
    for row in store.query("SELECT step, path FROM checkpoints WHERE removed = 0 ORDER BY step"):
        policy.checkpoints.append(row["step"])
        policy.checkpoint_path = row["path"]
    meta = {row["key"]: row["value"] for row in store.query("SELECT key, value FROM meta")}
    starts = int(meta.get("coordinator_starts", 0)) + 1
    store.execute("INSERT OR REPLACE INTO meta VALUES ('coordinator_starts', ?)", str(starts))
    policy.take_up(int(meta.get("verified_incarnation", 0)), starts)


def _recover_scheduler(run: Run, version: int) -> None:
    store, scheduler = run.store, run.scheduler
    taken = {row["task"]: row["rows"] for row in store.query(
        "SELECT task, MAX(row) + 1 AS rows FROM groups WHERE kind = 'train' GROUP BY task"
    )}  # fmt: skip
    mixture = Mixture({task.name: task.weight for task in run.spec.tasks}, taken)
    next_seq = store.query("SELECT COALESCE(MAX(seq) + 1, 0) FROM groups WHERE kind = 'train'")[0][0]
    groups = _groups(store, "g.kind = 'train' AND s.state IN ('admitted', 'scored', 'batched')")
    batched = {row["id"]: row["step"] for row in store.query("SELECT id, step FROM samples WHERE state = 'batched'")}
    waiting = []
    for group in groups:
        steps = {batched[s.id] for s in group.samples if s.id in batched}
        if steps:
            group.step = steps.pop()
            group.complete = True
            scheduler.batches.setdefault(group.step, []).append(group)
        else:
            waiting.append(group)
    rejected = store.query(
        "SELECT COUNT(*) FROM groups g WHERE kind = 'train' AND NOT EXISTS (SELECT 1 FROM samples s WHERE"
        " s.group_id = g.id AND s.state IN ('admitted', 'scored', 'batched', 'trained'))"
    )[0][0]
    ends = "SELECT state, COUNT(*) FROM samples s JOIN groups g ON g.id = group_id WHERE kind = 'train' GROUP BY state"
    run.ends.update({state: count for state, count in store.query(ends) if state in REJECTED})
    scheduler.take_up(mixture, version, next_seq - rejected, next_seq, waiting)
    trajectories = []
    for group in waiting:
        trajectories += [trajectory(store, sample) for sample in group.samples if sample.open]
    run.trajectories.add(trajectories)


def _recover_evaluations(run: Run) -> None:
    store = run.store
    for row in store.query("SELECT * FROM evaluations ORDER BY version"):
        run.evaluations.results.append(
            EvaluationResult(
                row["version"], row["task"], row["accuracy"], row["problems"], row["mean_reward"], row["failed"]
            )
        )
    run.evaluations.dropped = store.query(
        "SELECT COALESCE(MAX(g.version), -1) FROM groups g JOIN samples s ON g.id = s.group_id"
        " WHERE g.kind = 'evaluation' AND s.state = 'expired'"
    )[0][0]
    groups = _groups(store, "g.kind = 'evaluation' AND s.state = 'admitted'")
    if not groups:
        return
    version = store.query("SELECT version FROM groups WHERE id = ?", groups[0].id)[0][0]
    done = store.query(
        "SELECT g.task, s.reward FROM groups g JOIN samples s ON s.group_id = g.id WHERE g.kind = 'evaluation'"
        " AND g.version = ? AND s.state != 'admitted'",
        version,
    )
    open_ = [trajectory(store, group.samples[0], version) for group in groups]
    run.evaluations.resume(version, open_, [(row["task"], row["reward"]) for row in done])


def _recover_history(run: Run) -> None:
    rows = run.store.query(
        "SELECT a.step, a.time, MIN(a.incarnation), (SELECT MIN(time) FROM incarnations) AS began,"
        " (SELECT AVG(reward) FROM samples s WHERE s.step = a.step AND s.state = 'trained') AS reward,"
        " (SELECT AVG(a.step - min_version) FROM samples s WHERE s.step = a.step AND s.state = 'trained') AS staleness,"
        " (SELECT SUM(response_tokens) FROM samples s WHERE s.step = a.step AND s.state = 'trained') AS tokens"
        " FROM applied a GROUP BY a.step ORDER BY a.step"
    )
    previous = 0.0
    for row in rows:
        seconds = row["time"] - row["began"]
        rate = (row["tokens"] or 0) / max(1e-9, seconds - previous)
        run.history.points.append(
            HistoryPoint(row["step"], row["reward"] or 0.0, row["staleness"] or 0.0, rate, seconds)
        )
        previous = seconds
    run.history.seconds_before = previous


def _groups(store: Store, condition: str) -> list[Group]:
    """Return groups with a sample that meets ``condition``, with all their samples, in order of admission."""
    groups: dict[str, Group] = {}
    rows = store.query(
        "SELECT g.id AS gid, g.seq, g.task, g.row, s.* FROM samples s JOIN groups g ON g.id = s.group_id WHERE g.id IN"
        f" (SELECT g.id FROM samples s JOIN groups g ON g.id = s.group_id WHERE {condition}) ORDER BY g.seq, s.member"
    )
    for row in rows:
        group = groups.setdefault(row["gid"], Group(row["gid"], row["seq"], row["task"], row["row"]))
        group.samples.append(_sample(group, row))
    return list(groups.values())


def _sample(group: Group, row: sqlite3.Row) -> Sample:
    sample = Sample(row["id"], group, row["member"], row["min_version"], row["reward"])
    if row["state"] not in ("admitted", "scored", "batched"):
        sample.end = row["state"]
    return sample


def trajectory(store: Store, sample: Sample, version: int | None = None) -> Trajectory:
    """Return an open sample's trajectory with the turns its completions hold."""
    row = store.query("SELECT attempt, dispatched, min_version FROM samples WHERE id = ?", sample.id)[0]
    attempt = row["attempt"]
    result = Trajectory(sample, sample.group.task, sample.group.row, version, attempt)
    result.recorded_version, result.dispatched = row["min_version"], row["dispatched"]
    known = [v for v in (result.recorded_version, result.dispatched) if v is not None]
    sample.min_version = min(known, default=None)
    for record in completions(store, sample.id, attempt):
        turn = result.turns.get(record.turn)
        if turn is None:
            # What the runner asked for is said again when it takes the lease; until then only the tokens matter.
            need = m.NeedGeneration(sample.id, record.turn, record.prompt, 0, 1.0, [])
            turn = result.turns[record.turn] = Turn(need)
        turn.token_ids += record.token_ids
        turn.finish = record.finish
        turn.pieces += 1
    return result


def completions(store: Store, sample_id: str, first_attempt: int) -> list[PayloadRecord]:
    """Return the records of a sample that count, in order.

    Raises:
        PayloadError: a record is damaged.
    """
    rows = store.query(
        "SELECT segment, position, length FROM completions WHERE sample = ? AND attempt >= ? ORDER BY turn, attempt",
        sample_id,
        first_attempt,
    )
    return [msgspec.msgpack.decode(store.segments.read(Location(*row)), type=PayloadRecord) for row in rows]
