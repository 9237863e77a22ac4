"""Finished runs of the world, with the files of a real run, for tests of readers of ledgers."""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
import statistics
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models
from world import Trainer, World, job

from rljob.ledger.payload_record import TextRecord, encode_text
from rljob.ledger.sample_numbers import sample_number
from rljob.ledger.segments import Segments
from rljob.ledger.store import TEXTS
from rljob.protocol.checkpoint_record import TrainerState, encode_state, hash_file, read_state_file
from rljob.protocol.runner_protocol import FilterGroup, GroupFiltered
from rljob.protocol.trainer_protocol import Checkpoint, StepDone, Train

FAILING = ("g1.0", "g5.1")  # their rewards are NaN
CHECKPOINT_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "trainer/optimizer.safetensors": b"moments",
}
MANIFEST: dict[str, Any] = {
    "alpha": 1,
    "steps": 6,
    "n": 2,
    "g": 2,
    "algorithm": {"groupFilter": "nonconstant"},
    "scheduling": {"redundancy": {"groups": 1, "members": 1}},
    "evaluation": {"problems": 3, "everySteps": 3, "samplesPerProblem": 2, "passAt": [1, 2]},
    "tasks": [
        {"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r",
         "sampling": {"maxTokens": 16}, "groupFilter": {"function": "mypackage.filters:accept"}}
    ],
}  # fmt: skip
UNDECIDED = "tasks[sums].groupFilter.function mypackage.filters:accept raised ValueError: no"


class RecordingTrainer(Trainer):
    """A trainer that reports metrics and advantages like the real one, and writes checkpoint directories."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.done: dict[int, Any] = {}

    def say(self, *messages: Any) -> None:
        super().say(*(self.done.get(x.step, x) if isinstance(x, StepDone) else x for x in messages))

    def digest(self, step: int) -> str:
        return read_state_file(self.world.storage / f"checkpoints/step-{step:06d}").digest

    def _execute(self, command: Any) -> None:
        match command:
            case Train(step=step, samples=samples):
                values = array("f", advantages(samples)).tobytes()
                self.done[step] = StepDone(self.incarnation, step, {"loss": 0.0}, values)
            case Checkpoint(step=step, remove=remove):
                directory = self.world.storage / f"checkpoints/step-{step:06d}"
                write_checkpoint(directory, step, self.incarnation)
                for old in remove:
                    shutil.rmtree(self.world.storage / f"checkpoints/step-{old:06d}", ignore_errors=True)
        super()._execute(command)


def write_checkpoint(
    directory: Path, step: int, incarnation: int, files: Mapping[str, bytes] = CHECKPOINT_FILES
) -> str:
    """Write a checkpoint directory; return the digest of its record."""
    digests = {}
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
        digests[name] = hash_file(directory / name)
    state = TrainerState(step, step, incarnation, {}, digests)
    (directory / "trainer.json").write_bytes(encode_state(state))
    return state.digest


def advantages(samples: list[Any]) -> list[float]:
    """Return advantages of remax if samples have a baseline, else of group_normalized."""
    if samples[0].baseline is not None:
        return [sample.reward - sample.baseline for sample in samples]
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample.reward)
    return [(s.reward - statistics.mean(groups[s.group])) / (statistics.stdev(groups[s.group]) + 1e-6) for s in samples]


def reward(sample: str, result: Any) -> float:
    """Return a reward that differs within most groups."""
    return math.nan if sample in FAILING else float(sum(result.token_ids) % 2)


def decide(message: FilterGroup) -> GroupFiltered:
    """Return the decision of the user-written filter: of seven groups it rejects one, and it fails on g4."""
    accepted, reason = int(message.group[1:]) % 7 != 3, UNDECIDED if message.group == "g4" else ""
    return GroupFiltered(message.group, message.number, accepted, reason)


async def run_world(
    storage: Path, turns: int | None = None, deaths: str = "coordinator trainer", **manifest: Any
) -> None:
    """Run a job to its end, or for ``turns`` iterations; the components in ``deaths`` are killed once."""
    resolved = job(**{**MANIFEST, **manifest})
    storage.mkdir(parents=True, exist_ok=True)
    (storage / "job.json").write_text(resolved.model_dump_json(by_alias=True))
    (storage / "model").mkdir()
    words = {chr(97 + i % 26) * (1 + i // 26): i for i in range(2**10)}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(storage / "model" / "tokenizer.json"))
    world = World(resolved, storage, engines=2)
    world.trainer = RecordingTrainer(world)
    world.reward, world.decide = reward, decide
    await world.start()
    world.connect_all()
    if deaths:
        while world.run.version < 3:
            await world.some(1)
        if "coordinator" in deaths:
            world.kill_coordinator()
            await world.start()
        if "trainer" in deaths:
            world.trainer.disconnect()
            world.trainer.reborn()
        world.connect_all()
    if turns is None:
        await world.settle(2000)
        assert world.run.finished
    else:
        await world.some(turns)
    await world.store.drain()
    world.close()


def make_run(storage: Path, **options: Any) -> Path:
    """Run a job as :func:`run_world` does; return ``storage``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fdatasync", lambda descriptor: None)
        asyncio.run(run_world(storage, **options))
    return storage


def copy(run: Path, to: Path) -> Path:
    """Return a copy of a run; tests may change it."""
    shutil.copytree(run, to)
    return to


def alter(run: Path, *statements: str) -> None:
    """Execute SQL statements on a ledger; each must change a row."""
    db = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    for statement in statements:
        assert db.execute(statement).rowcount != 0, f"no row changed: {statement}"
    db.close()


def add_completion(run: Path, source: str, sample: str, turn: int, attempt: int, branch: str = "") -> None:
    """Add a completion to a sample; the rest is that of the first completion of the sample ``source``."""
    alter(
        run,
        f"INSERT INTO completions SELECT (SELECT MAX(number) + 1 FROM completions), {sample_number(sample)}, {turn},"
        f" '{branch}', {attempt}, finish, tokens, total_tokens, min_version, max_version, engine, digest, segment,"
        f" position, length FROM completions WHERE sample = '{source}' ORDER BY number LIMIT 1",
        "UPDATE samples SET completions = json_insert(completions, '$[#]', (SELECT MAX(number) FROM completions))"
        f" WHERE id = '{sample}'",
    )


def set_text(run: Path, text: str, where: str = "1") -> None:
    """Change the text of the samples with a reward of which an SQL condition holds, as if their rewards had sent it."""
    segments = Segments(run / TEXTS)
    for (sample,) in ask(run, f"SELECT sample FROM scores WHERE {where}"):
        at = segments.append(encode_text(TextRecord(sample, text)))
        alter(
            run,
            f"UPDATE samples SET text_segment = {at.segment}, text_position = {at.offset}, text_length = {at.length}"
            f" WHERE id = '{sample}'",
        )
    segments.close()


def ask(run: Path, query: str) -> list[Any]:
    """Return the rows of a query on a ledger."""
    db = sqlite3.connect(run / "ledger.sqlite")
    rows = db.execute(query).fetchall()
    db.close()
    return rows


def payload_at(run: Path, sample: str) -> tuple[Path, int, int]:
    """Return the segment file, offset and length of a sample's record."""
    ((segment, position, length),) = ask(
        run, f"SELECT segment, position, length FROM completions WHERE sample = '{sample}' ORDER BY turn LIMIT 1"
    )
    return run / "payload" / f"{segment:08d}.segment", position, length


def batch_of(run: Path, step: int) -> list[str]:
    """Return the samples of a batch."""
    ((text,),) = ask(run, f"SELECT samples FROM batches WHERE step = {step}")
    return msgspec.json.decode(text, type=list[str])
