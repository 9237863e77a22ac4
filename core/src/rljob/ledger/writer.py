"""All writes to the ledger: one method for each event of a run.

Only this module and :mod:`rljob.ledger.states` define the transitions of groups, samples, batches and checkpoints.
Methods queue their statements (see :class:`rljob.ledger.store.Store`): the statements of one iteration of the event
loop are committed together.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from rljob.api.job_status import EvaluationResult
from rljob.ledger.payload_record import (
    INT32,
    ModelLogprobs,
    PayloadRecord,
    TextRecord,
    encode_record,
    encode_text,
)
from rljob.ledger.queries import MEMBERS_OF, MixtureRecord, first_needed_segment, samples_of_batch
from rljob.ledger.sample_numbers import MEMBER_BITS, group_number, sample_id, sample_number
from rljob.ledger.sample_progress import COLUMNS, SampleProgress, progress_of_open_samples
from rljob.ledger.segments import record_digest
from rljob.ledger.states import OPEN, PREDECESSORS, Kind, State, quoted
from rljob.ledger.store import Store, now
from rljob.protocol.runner_protocol import PoolAnswer

_encoder = msgspec.json.Encoder()


class LedgerWriter(Store):
    """The ledger of the run in ``directory`` (None: in memory), open for writing. Raises :class:`Store`'s errors."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(directory)
        self._completions = 0  # number of the newest
        self.progress: dict[int, SampleProgress] = {}
        """Number of an open sample without a reward → its completions."""

    def restore(self) -> None:
        """Continue the run that the ledger has. Call it once, before any write."""
        self._completions = self.query("SELECT COALESCE(MAX(number), 0) FROM completions")[0][0]
        self.progress = progress_of_open_samples(self.query)

    def describe(self, row: Sequence[Any]) -> str:
        """Return the first samples of a transition."""
        numbers = [row[-1]] if isinstance(row[-1], int) else json.loads(row[-1])
        return ", ".join(f"sample {sample_id(number)}" for number in numbers[:4])

    # --- the run ---

    def record_job(self, name: str, spec: Mapping[str, Any]) -> None:
        """Record the RLJob of the run; ``spec``: its spec as JSON values."""
        self._set("job", json.dumps({"name": name, "spec": spec}))

    def record_start(self, number: int) -> None:
        """Record the start of a coordinator process; ``number`` counts from 1."""
        self._set("coordinator_starts", str(number))

    def record_finished(self) -> None:
        """Record that the run is complete."""
        self._set("finished", str(now()))

    def record_warning(self, message: str) -> None:
        """Record a sentence that readers of the run must see."""
        self.execute("INSERT INTO warnings (time, message) VALUES (?,?)", now(), message)

    def _set(self, key: str, value: str) -> None:
        self.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", key, value)

    # --- groups and samples ---

    def admit_group(
        self, group: str, kind: Kind, seq: int, task: str, row: int, version: int, samples: Sequence[str], restarts: int
    ) -> None:
        """Add a group and its samples, which become members 0, 1, ….

        Args:
            group: id of the group.
            kind: purpose of the group.
            seq: order of admission; in an evaluation the order within the evaluation.
            task: name of the task.
            row: row of the task's data.
            version: trainer version at admission; for an evaluation the pinned version.
            samples: ids of the samples.
            restarts: number of earlier groups of the same prompt; 0 in an evaluation.
        """
        number = group_number(group)
        self.execute(
            "INSERT INTO groups VALUES (?,?,?,?,?,?,?,NULL,?,1)",
            number, kind, seq, task, row, version, restarts, self._completions,
        )  # fmt: skip
        rows = [(sample_number(sample),) for sample in samples]
        assert [row[0] for row in rows] == list(range(number << MEMBER_BITS, (number << MEMBER_BITS) + len(rows)))
        self.execute_many("INSERT INTO samples (number) VALUES (?)", rows)

    def record_first_dispatch(self, group: str, version: int) -> None:
        """Record that an engine serving ``version`` gets the first request of a group: no token of its samples is of a
        lower version."""
        self.execute_each("UPDATE groups SET dispatched = ? WHERE number = ?", version, group_number(group))

    def record_dispatch_again(self, sample: str, version: int) -> None:
        """Record that an engine serving ``version`` gets a request of a sample after :meth:`discard_generation`. It
        must not be executed after the score of the sample, so it is not joined with others."""
        self.execute("UPDATE samples SET dispatched = ? WHERE number = ?", version, sample_number(sample))

    def record_completion(
        self,
        record: PayloadRecord,
        engine: str,
        total_tokens: int,
        min_version: int | None,
        max_version: int | None,
    ) -> None:
        """Store a completion in the payload and add it to its sample. Only the first record of (sample, turn,
        branch, attempt) counts.

        Args:
            record: the completion.
            engine: instance of the engine that generated it; empty if its agent has not registered one.
            total_tokens: length of its branch including this completion: context and response of its turn.
            min_version: lowest version of a token of the sample so far.
            max_version: highest version of a token of this completion; None without tokens.
        """
        payload, tokens = encode_record(record), len(record.token_ids) // INT32
        digest, number = record_digest(payload), sample_number(record.sample)
        highest = -1 if max_version is None else max_version
        self._completions += 1
        self.record(
            payload, digest, _COMPLETION,
            self._completions, number, record.turn, record.branch, record.attempt, record.finish, tokens, total_tokens,
            min_version, highest, engine, digest.hex(),
        )  # fmt: skip
        progress = self.progress.setdefault(number, SampleProgress())
        progress.numbers.append(self._completions)
        progress.add((record.turn, record.branch), tokens, total_tokens, record.finish, min_version, highest)

    def record_answer(self, sample: str, attempt: int, answer: PoolAnswer) -> None:
        """Record the answer of a frozen pool to a question of a loop. Its key must be new.

        Args:
            sample: id of the sample.
            attempt: the first attempt of the sample that counts.
            answer: of the pool.
        """
        key = (sample_number(sample), attempt, answer.branch, answer.question, answer.number)
        row = (*key, answer.turn, answer.pool, answer.finish)
        self.record_text(encode_text(TextRecord(sample, answer.text)), _ANSWER, row)

    def record_logprobs(self, sample: str, role: str, logprobs: bytes) -> None:
        """Store the log-probabilities of a sample under a model of a frozen pool, in the payload.

        Args:
            sample: id of the sample.
            role: reference, or teachers[0] and so on.
            logprobs: float32, of each token of its loss mask.
        """
        payload = encode_record(ModelLogprobs(sample, role, logprobs))
        digest = record_digest(payload)
        self.record(payload, digest, _LOGPROBS, sample_number(sample), role, digest.hex())

    def discard_generation(self, sample: str, attempt: int) -> None:
        """Discard the generated tokens of a sample, and the answers of frozen pools. Only completions from ``attempt``
        on count from now on."""
        number = sample_number(sample)
        self.execute("UPDATE samples SET attempt = ?, dispatched = NULL WHERE number = ?", attempt, number)
        if number in self.progress:
            self.progress[number].discard()

    def record_score(
        self,
        sample: str,
        kind: Kind,
        reward: float,
        turn_rewards: Sequence[float],
        metrics: Mapping[str, float],
        text: str,
        branch: str = "",
        turn_states: Sequence[str] = (),
    ) -> None:
        """Record the reward of a sample, the metrics of the reward and the response. It ends a sample of an evaluation.

        Args:
            sample: id of the sample.
            kind: purpose of the sample.
            reward: reward of the sample.
            turn_rewards: one for each turn; their sum is ``reward``, except for rounding.
            metrics: metrics of the reward.
            text: the last response.
            branch: the branch of ``text``.
            turn_states: one for each turn; none: no turn has one.
        """
        state = State.SCORED if kind is Kind.TRAIN else State.EVALUATED
        number = sample_number(sample)
        progress = self.progress.pop(number, None) or SampleProgress()
        states = _json(turn_states) if turn_states else None
        row = (reward, _json(turn_rewards), states, _json(metrics), *progress.row, None)
        self.record_text(encode_text(TextRecord(sample, text, branch)), _SCORED[state], row, (number,))
        if state is State.EVALUATED:
            self.execute(_CLOSE, number >> MEMBER_BITS)

    def end_samples(self, samples: Collection[str], end: State, reason: str) -> None:
        """End samples with any end except ``evaluated``."""
        numbers = [sample_number(sample) for sample in samples]
        generated = [(number, self.progress.pop(number)) for number in numbers if number in self.progress]
        self.execute_many(_GENERATED, [(*progress.row, number) for number, progress in generated])
        self._transition(end, numbers, reason=reason)
        self.execute_many(_CLOSE, [(group,) for group in dict.fromkeys([number >> MEMBER_BITS for number in numbers])])
        training = len([number for number in numbers if number >= 0])
        if training:
            self.execute(
                "INSERT INTO ended VALUES (?,?) ON CONFLICT DO UPDATE SET samples = samples + excluded.samples",
                end, training,
            )  # fmt: skip

    def record_dropped(self, version: int) -> None:
        """Record that the evaluation of ``version`` was dropped. :meth:`end_samples` ends its samples."""
        self._set("dropped_evaluation", str(version))

    def record_failure(self, sample: str) -> None:
        """Record that a sample has just failed by itself. :meth:`end_samples` ends it and the samples that end with
        it."""
        self.execute("INSERT INTO failures (sample_number) VALUES (?)", sample_number(sample))

    def record_decision(self, group: str, accepted: bool, reason: str, survivors: Collection[str]) -> None:
        """Record the decision of a user-written filter about a group, before its effect.

        Args:
            group: id of the group.
            accepted: whether the group may join a batch. If not, :meth:`end_samples` ends its samples.
            reason: why the filter could not decide; empty: it did.
            survivors: ids of the samples whose rewards it got.
        """
        row = (group_number(group), int(accepted), reason, _json(list(survivors)))
        self.execute("INSERT INTO decisions VALUES (?,?,?,?)", *row)

    # --- batches ---

    def record_batch(self, step: int, samples: Collection[str]) -> None:
        """Record the batch of ``step``: its samples, in the order in which the trainer receives them."""
        numbers = [sample_number(sample) for sample in samples]
        groups = len({number >> MEMBER_BITS for number in numbers})
        self.execute("INSERT INTO batches VALUES (?,?,?,?)", step, now(), groups, _json(list(samples)))
        self._transition(State.BATCHED, numbers, step=step)

    def _transition(self, state: State, numbers: list[int], **columns: Any) -> None:
        """Set the state and other columns of samples in one statement, which must change all of them."""
        if numbers:
            statement = _transition(state, *columns, where="number IN (SELECT value FROM json_each(?))")
            self.execute_rows(len(numbers), statement, *columns.values(), _json(numbers))

    def record_applied(self, step: int, incarnation: int, metrics: Mapping[str, float]) -> None:
        """Record that a trainer applied a batch, and its metrics. :meth:`end_samples` ends the samples."""
        self.execute("INSERT OR REPLACE INTO applied VALUES (?,?,?,?)", step, incarnation, json.dumps(metrics), now())

    def record_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step (see :mod:`rljob.ledger.step_metrics`); only the first record counts."""
        self.execute("INSERT OR IGNORE INTO step_metrics VALUES (?,?)", step, json.dumps(metrics))

    def record_mixture(self, shares: Mapping[str, MixtureRecord]) -> None:
        """Record the mixture's counters of tasks, together with the event that changed them."""
        for task, share in shares.items():
            self.execute("INSERT OR REPLACE INTO mixture VALUES (?,?,?,?,?,?,?,?)", task, *vars(share).values())

    def record_advantages(self, step: int, advantages: bytes) -> None:
        """Record the trainer's advantages of a batch.

        Args:
            step: step of the batch.
            advantages: float32, in the order of the batch; empty if the trainer replays the batch.

        Raises:
            ValueError: the number of advantages differs from the number of samples in the batch.
        """
        if not advantages:
            return
        numbers = map(sample_number, samples_of_batch(self, step))
        rows = zip(array("f", advantages), numbers, strict=True)
        self.execute_many("UPDATE samples SET advantage = ? WHERE number = ?", list(rows))

    # --- the trainer and its publications ---

    def record_incarnation(self, incarnation: int, instance: str, step: int) -> None:
        """Record a trainer process that starts from the checkpoint of ``step``."""
        self.execute("INSERT INTO incarnations VALUES (?,?,?,?)", incarnation, instance, step, now())

    def record_verified(self, incarnation: int) -> None:
        """Record that the weights of the trainer process ``incarnation`` match the publication."""
        self._set("verified_incarnation", str(incarnation))

    def record_publication(self, lineage: int, version: int, digest: str, incarnation: int) -> None:
        """Record the digest of the weights of a version; only the first record counts."""
        self.execute(
            "INSERT OR IGNORE INTO publications VALUES (?,?,?,?,?)", lineage, version, digest, incarnation, now()
        )

    def record_served(self, engine: str, lineage: int, version: int, digest: str) -> None:
        """Record that an engine acknowledged weights; ``digest``: digest of the bytes that it received."""
        self.execute("INSERT OR IGNORE INTO served VALUES (?,?,?,?,?)", engine, lineage, version, digest, now())

    def record_checkpoint(self, step: int, path: str, incarnation: int, digest: str, removed: Collection[int]) -> None:
        """Record a durable checkpoint at ``path`` in the storage, and the removed checkpoints that it replaces;
        ``digest``: of its record."""
        self.execute("INSERT OR REPLACE INTO checkpoints VALUES (?,?,?,0,?,?)", step, path, incarnation, now(), digest)
        for old in removed:
            self.execute("UPDATE checkpoints SET removed = 1 WHERE step = ?", old)

    def record_refused(self, step: int, digest: str) -> None:
        """Record that the checkpoint of ``step`` no longer counts, if it was recorded; ``digest``: of its record, if it
        must not be loaded even if it is readable."""
        self.execute("UPDATE checkpoints SET removed = 2, digest = ? WHERE step = ?", digest, step)

    def remove_covered_payload(self, oldest_step: int) -> None:
        """Unlink payload that is needed neither by a replay from checkpoint ``oldest_step`` nor by an open sample. Call
        it only after the checkpoint is durable in the ledger."""
        needed = first_needed_segment(self.query, oldest_step)
        if needed is not None:
            self.segments.remove_below(needed)

    # --- evaluations ---

    def record_evaluation(self, result: EvaluationResult) -> None:
        """Record the evaluation result of one task at one version; only the first record counts."""
        self.execute(
            "INSERT OR IGNORE INTO evaluations VALUES (?,?,?,?,?,?,?,?,?,?)",
            result.version, result.task, result.problems, result.samples_per_problem, result.failed,
            result.mean_reward, result.accuracy, json.dumps({rate.k: rate.value for rate in result.pass_at}),
            result.failure, now(),
        )  # fmt: skip


def _json(value: Any) -> str:
    return _encoder.encode(value).decode()


@cache
def _transition(state: State, *columns: str, where: str = "number = ?") -> str:
    """Return the statement that sets the state of samples and ``columns``; its values are those of the columns and
    those of ``where``. It changes no row unless the transition from the current state is allowed."""
    assignments = "".join(f", {column} = ?" for column in columns)
    return (
        f"UPDATE samples SET state = '{state}'{assignments} WHERE {where} AND state IN ({quoted(PREDECESSORS[state])})"
    )


_COMPLETION = f"INSERT INTO completions VALUES (?{',?' * 14})"
_LOGPROBS = "INSERT INTO model_logprobs VALUES (?,?,?,?,?,?)"
_ANSWER = f"INSERT INTO answers VALUES (?{',?' * 10})"
_SCORE = (
    "reward",
    "turn_rewards",
    "turn_states",
    "metrics",
    *COLUMNS,
    "dispatched",
    "text_segment",
    "text_position",
    "text_length",
)
_SCORED = {state: _transition(state, *_SCORE) for state in (State.SCORED, State.EVALUATED)}
_GENERATED = f"UPDATE samples SET {', '.join(f'{column} = ?' for column in COLUMNS)} WHERE number = ?"
_CLOSE = (
    "UPDATE groups AS g SET open = 0 WHERE number = ? AND NOT EXISTS (SELECT 1 FROM samples s"
    f" WHERE {MEMBERS_OF} AND s.state IN ({quoted(OPEN)}))"
)
"""The group with this number is not open if none of its samples is."""
