"""rljob audit of corrupted ledgers: the right check reports each corruption."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledgers import add_completion, alter, ask, batch_of, copy, make_run, payload_at

from rljob.api.job_status import Progress
from rljob.ledger.audit import PROPERTIES, audit
from rljob.ledger.payload_record import PayloadRecord, payload_digest
from rljob.ledger.reader import NoRunError
from rljob.ledger.sample_numbers import group_number, sample_number
from rljob.ledger.segments import HEADER, Segments
from rljob.ledger.store import PAGE_BYTES
from rljob.protocol.checkpoint_record import encode_state, read_state_file
from rljob.protocol.run_status import RunStatus, encode_status
from rljob.protocol.shared_messages import VersionSpan

DATABASE = "the ledger is a sound database"
REFERENCES = "all references are valid"
ADMITTED = "groups are admitted whole, in order"
PROMPTS = "no prompt is lost or started twice"
ENDS = "every sample ends exactly once"
BATCHES = "no sample is in two batches; samples and batches agree"
AGE = "no trained sample is older than α"
FILTER = "groups are filtered as the manifest sets"
DECISIONS = "groups have the decisions of user-written filters"
REWARDS = "rewards and advantages are finite, and agree"
SERVED = "engines served what was published"
TURNS = "turns have no gaps and token counts agree"
EVALUATIONS = "evaluations have the problems they claim"
LINEAGE = "each batch was applied once in the lineage of the final checkpoint"
CHECKPOINTS = "checkpoints exist and match the ledger"
PAYLOAD = "every payload record exists and is unchanged"
TEXTS = "every text exists and is unchanged"
META = "the records for a restart are valid"
NEWEST = "the ledger is as new as the run's own status and checkpoints"

OTHER_TOKENS = "a completion was generated from other tokens than the context of its turn"

TRAINED = "(SELECT id FROM samples WHERE step = 5 ORDER BY id LIMIT 1)"
FILTERED = "(SELECT id FROM samples WHERE state = 'filtered' ORDER BY id LIMIT 1)"
GROUP = "(SELECT group_id FROM samples WHERE step = 5 ORDER BY id LIMIT 1)"
OF_GROUP = "group_number = (SELECT group_number FROM samples WHERE step = 5 ORDER BY id LIMIT 1)"
LAST_GROUP = "(SELECT id FROM groups WHERE kind = 'train' ORDER BY seq DESC LIMIT 1)"

UNKNOWN = sample_number("g777.0")
ANSWER = (
    "INSERT INTO answers SELECT {number}, {attempt}, '', '', {equal}, 0, 'teacher', '{finish}', text_segment,"
    f" text_position, text_length FROM samples WHERE id = {TRAINED}"
)
"""Statement that adds an answer of a frozen pool. Its text is that of the sample."""

WRITTEN = (
    "(SELECT id FROM samples s WHERE step = 5 AND"
    " NOT EXISTS (SELECT 1 FROM completions WHERE sample = s.id AND turn = 1) ORDER BY id LIMIT 1)"
)
TWO_TURNS = (
    "(SELECT sample FROM completions WHERE turn = 1 AND sample IN (SELECT id FROM samples WHERE step >= 4)"
    " AND sample NOT IN (SELECT sample FROM completions WHERE turn = 2) ORDER BY sample LIMIT 1)"
)


def twice_in_batches(run: Path) -> None:
    name = batch_of(run, 4)[0]
    alter(run, f"UPDATE batches SET samples = '{json.dumps([*batch_of(run, 5), name])}' WHERE step = 5")


def swapped_in_a_batch(run: Path) -> None:
    first, *rest = batch_of(run, 5)
    alter(run, f"UPDATE batches SET samples = '{json.dumps([*rest, first])}' WHERE step = 5")


def dropped_from_a_batch(run: Path) -> None:
    alter(run, f"UPDATE batches SET samples = '{json.dumps(batch_of(run, 5)[1:])}' WHERE step = 5")


def unknown_in_a_batch(run: Path) -> None:
    alter(run, f"UPDATE batches SET samples = '{json.dumps([*batch_of(run, 5), 'g9999.0'])}' WHERE step = 5")


def change_payload(run: Path, change: Callable[[bytearray, int, int], None]) -> None:
    path, position, length = payload_at(run, batch_of(run, 5)[0])
    data = bytearray(path.read_bytes())
    change(data, position, length)
    path.write_bytes(data)


def flipped_byte(run: Path) -> None:
    def flip(data: bytearray, position: int, length: int) -> None:
        data[position + 20 + length // 2] ^= 1

    change_payload(run, flip)


def truncated_segment(run: Path) -> None:
    path = sorted((run / "payload").iterdir())[-1]
    path.write_bytes(path.read_bytes()[:-3])


def segment_gone(run: Path) -> None:
    sorted((run / "payload").iterdir())[-1].unlink()


def record_exchanged(run: Path) -> None:
    one, two = batch_of(run, 5)[:2]
    place = "segment, position, length, digest"
    alter(
        run,
        f"UPDATE completions SET ({place}) = (SELECT {place} FROM completions WHERE sample = '{one}')"
        f" WHERE sample = '{two}'",
    )


def written(run: Path) -> str:
    """Return a sample of batch 5 that has one turn."""
    ((name,),) = ask(run, f"SELECT {WRITTEN}")
    return str(name)


def rewritten(run: Path, where: str = "", name: str = "", **changes: Any) -> None:
    """Replace a record by a changed one with the right digest; without changes by bytes that are not a record."""
    name = name or written(run)
    path, position, length = payload_at(run, name)
    record = msgspec.msgpack.decode(path.read_bytes()[position + HEADER.size :][:length], type=PayloadRecord)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(record, **changes)) if changes else b"no record"
    segments = Segments(run / "payload")
    at = segments.append(payload)
    segments.close()
    alter(
        run,
        f"UPDATE completions SET segment = {at.segment}, position = {at.offset}, length = {at.length},"
        f" digest = '{payload_digest(payload)}' WHERE sample = '{name}'{where}",
    )


def not_a_number(run: Path) -> None:
    ((tokens,),) = ask(run, f"SELECT tokens FROM completions WHERE sample = '{written(run)}'")
    rewritten(run, logprobs=array("f", [math.nan] * tokens).tobytes())


def other_prompt(run: Path) -> None:
    ((tokens,),) = ask(run, f"SELECT prompt_tokens FROM samples WHERE id = '{written(run)}'")
    rewritten(run, given=array("i", [9] * tokens).tobytes())


def second_observation(run: Path, change: Callable[[bytes], bytes]) -> None:
    """Change what the second turn of a trained sample was given (int32); the digest is updated."""
    ((name, segment, position, length),) = ask(
        run, f"SELECT sample, segment, position, length FROM completions WHERE turn = 1 AND sample = {TWO_TURNS}"
    )
    path = run / "payload" / f"{segment:08d}.segment"
    record = msgspec.msgpack.decode(path.read_bytes()[position + HEADER.size :][:length], type=PayloadRecord)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(record, given=change(record.given)))
    segments = Segments(run / "payload")
    at = segments.append(payload)
    segments.close()
    alter(
        run,
        f"UPDATE completions SET segment = {at.segment}, position = {at.offset}, length = {at.length},"
        f" digest = '{payload_digest(payload)}' WHERE sample = '{name}' AND turn = 1",
    )


def first_answer(run: Path) -> None:
    """Change a token of the first turn of a trained sample of two turns; the digest is updated."""
    ((name,),) = ask(run, f"SELECT {TWO_TURNS}")
    path, position, length = payload_at(run, name)
    record = msgspec.msgpack.decode(path.read_bytes()[position + HEADER.size :][:length], type=PayloadRecord)
    assert record.turn == 0
    rewritten(run, " AND turn = 0", name, token_ids=bytes([record.token_ids[0] ^ 1]) + record.token_ids[1:])


def second_turn(run: Path) -> None:
    """Add a turn that was generated without the tokens of the first turn; the counts of the sample are updated."""
    name = written(run)
    add_completion(run, name, name, 1, 0)
    alter(run, f"UPDATE samples SET response_tokens = 2 * response_tokens WHERE id = '{name}'")
    rewritten(run, " AND turn = 1", name, turn=1)


def checkpoint_record(run: Path, **changes: Any) -> None:
    """Change the record of a checkpoint, and seal it again."""
    path = run / "checkpoints" / "step-000006"
    (path / "trainer.json").write_bytes(encode_state(msgspec.structs.replace(read_state_file(path), **changes)))


def flip(run: Path, name: str, step: int = 6) -> None:
    path = run / "checkpoints" / f"step-{step:06d}" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint_file(run: Path, name: str, size: int | None) -> None:
    path = run / "checkpoints" / "step-000006" / name
    path.unlink() if size is None else os.truncate(path, size)


def write_status(run: Path, state: Any, step: int) -> None:
    (run / "status.json").write_bytes(encode_status(RunStatus(state, progress=Progress(step, 6))))


def unfinished(run: Path) -> None:
    alter(run, "DELETE FROM meta WHERE key = 'finished'")
    write_status(run, "Succeeded", 6)


def torn_pages(run: Path) -> None:
    path = run / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    for page in range(PAGE_BYTES * 40, len(data), PAGE_BYTES):
        data[page : page + 8] = b"\xff" * 8
    path.write_bytes(data)


def texts_exchanged(run: Path) -> None:
    one, two = batch_of(run, 5)[:2]
    place = "text_segment, text_position, text_length"
    alter(run, f"UPDATE samples SET ({place}) = (SELECT {place} FROM samples WHERE id = '{one}') WHERE id = '{two}'")


def text_byte_flipped(run: Path) -> None:
    path = max((run / "texts").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def text_of_no_sample(run: Path) -> None:
    segments = Segments(run / "texts")
    at = segments.append(b"no record")
    segments.close()
    alter(
        run,
        f"UPDATE samples SET text_segment = {at.segment}, text_position = {at.offset}, text_length = {at.length}"
        f" WHERE id = '{batch_of(run, 5)[0]}'",
    )


def sql(*statements: str) -> Callable[[Path], None]:
    return lambda run: alter(run, *statements)


CORRUPTIONS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a sample is in two batches": (BATCHES, twice_in_batches),
    "a batch's list was put in another order": (BATCHES, swapped_in_a_batch),
    "a batch's list lost a sample": (BATCHES, dropped_from_a_batch),
    "a batch's list names an unknown sample": (REFERENCES, unknown_in_a_batch),
    "a batch's list is not JSON": (DATABASE, sql("UPDATE batches SET samples = '[' WHERE step = 5")),
    "a batch was deleted": (BATCHES, sql("DELETE FROM batches WHERE step = 2")),
    "the last batch was deleted": (REFERENCES, sql("DELETE FROM batches WHERE step = 5")),
    "a trained sample moved to another batch": (BATCHES, sql(f"UPDATE samples SET step = 4 WHERE id = {TRAINED}")),
    "a trained sample has no batch": (BATCHES, sql(f"UPDATE samples SET step = NULL WHERE id = {TRAINED}")),
    "a filtered sample has a batch": (BATCHES, sql(f"UPDATE samples SET step = 5 WHERE id = {FILTERED}")),
    "a sample has log-probabilities of a model that the job does not have": (
        REWARDS, sql("INSERT INTO model_logprobs SELECT number, 'teachers[0]', 'x', 1, 0, 1 FROM samples WHERE step = 5"
                     " LIMIT 1"),
        "not the log-probabilities of the models",
    ),
    "a trained sample has states of two turns too many": (
        REWARDS, sql(f"UPDATE samples SET turn_states = '[\"\",\"\",\"\",\"\",\"\"]' WHERE id = {TRAINED}"),
        "its number of states differs",
    ),
    "a trained sample is marked as a baseline": (
        ENDS, sql(f"UPDATE samples SET state = 'baseline' WHERE id = {TRAINED}"), "it is the baseline of its group",
    ),
    "a trained sample is marked as surplus": (
        BATCHES, sql(f"UPDATE samples SET state = 'surplus', reason = 'x' WHERE id = {TRAINED}"),
    ),
    "a trained sample is open again": (ENDS, sql(f"UPDATE samples SET state = 'scored' WHERE id = {TRAINED}")),
    "a state that does not exist": (ENDS, sql(f"UPDATE samples SET state = 'lost' WHERE id = {TRAINED}")),
    "a whole group changed its end": (
        FILTER, sql("UPDATE samples SET state = 'filtered', reason = 'x' WHERE state = 'trained' AND group_id = "
                    f"{GROUP}"),
    ),
    "a filtered sample is marked as surplus": (
        ENDS, sql("UPDATE samples SET state = 'surplus' WHERE id = (SELECT id FROM samples WHERE state = 'filtered')"),
    ),
    "a sample has no reason for its end": (ENDS, sql(f"UPDATE samples SET reason = '' WHERE id = {FILTERED}")),
    "a trained sample was deleted": (ADMITTED, sql(f"DELETE FROM samples WHERE id = {TRAINED}")),
    "a filtered sample was deleted": (ADMITTED, sql(f"DELETE FROM samples WHERE id = {FILTERED}")),
    "all samples of a group were deleted": (
        ADMITTED, sql(f"DELETE FROM samples WHERE group_id = (SELECT group_id FROM samples WHERE id = {FILTERED})"),
    ),
    "a group was deleted with its samples": (
        ADMITTED, sql("DELETE FROM samples WHERE group_id = 'g3'", "DELETE FROM groups WHERE id = 'g3'"),
    ),
    "a group was deleted without its samples": (REFERENCES, sql(f"DELETE FROM groups WHERE id = {GROUP}")),
    "a sample changed its group": (
        ADMITTED, sql(f"UPDATE samples SET number = {sample_number('g0.9')} WHERE id = 'g2.1'"),
    ),
    "a sample changed its member": (
        ADMITTED, sql(f"UPDATE samples SET number = {sample_number('g2.7')} WHERE id = 'g2.1'"),
    ),
    "a group changed its number": (
        REFERENCES, sql(f"UPDATE groups SET number = {group_number('g555')} WHERE id = {LAST_GROUP}"),
    ),
    "a sample was admitted that belongs to no group": (
        REFERENCES, sql(f"INSERT INTO samples (number) VALUES ({sample_number('g777.0')})"),
    ),
    "a frozen pool answered a question of an unknown sample": (
        REFERENCES, sql(ANSWER.format(number=UNKNOWN, attempt=0, equal=0, finish="stop")),
    ),
    "an answer of a frozen pool is of a later attempt": (
        REFERENCES, sql(ANSWER.format(number="number", attempt="attempt + 1", equal=0, finish="stop")),
    ),
    "an answer of a frozen pool has a negative number": (
        REFERENCES, sql(ANSWER.format(number="number", attempt="attempt", equal=-1, finish="stop")),
    ),
    "an answer of a frozen pool is not complete": (
        REFERENCES, sql(ANSWER.format(number="number", attempt="attempt", equal=0, finish="abort")),
    ),
    "the text of an answer of a frozen pool is that of another sample": (
        TEXTS, sql(ANSWER.format(number="number + 1", attempt="attempt", equal=0, finish="stop")),
    ),
    "a group is of a task that does not exist": (
        REFERENCES, sql(f"UPDATE groups SET task = 'products' WHERE id = {GROUP}"),
    ),
    "a prompt was lost": (PROMPTS, sql(f"UPDATE groups SET row = row + 1 WHERE id = {LAST_GROUP}")),
    "a prompt was started twice": (PROMPTS, sql(f"UPDATE groups SET row = row - 1 WHERE id = {LAST_GROUP}")),
    "a late prompt was not started again": (
        PROMPTS,
        sql(f"UPDATE samples SET state = 'surplus', reason = 'not needed by batch 9, …' WHERE group_id = {LAST_GROUP}"),
    ),
    "the restarts of a prompt are counted wrongly": (PROMPTS, sql("UPDATE groups SET restarts = 1 WHERE id = 'g0'")),
    "a prompt expired and was not started again": (
        PROMPTS, sql(f"UPDATE samples SET state = 'expired', reason = 'x' WHERE group_id = {LAST_GROUP}"),
    ),
    "a problem is in an evaluation twice": (PROMPTS, sql("UPDATE groups SET row = 0 WHERE id = 'e3.1'")),
    "a group was admitted too early": (ADMITTED, sql(f"UPDATE groups SET version = 0 WHERE id = {LAST_GROUP}")),
    "a group was admitted in the future": (ADMITTED, sql(f"UPDATE groups SET version = 9 WHERE id = {LAST_GROUP}")),
    "all groups were admitted at once": (ADMITTED, sql("UPDATE groups SET version = 0 WHERE kind = 'train'")),
    "a group changed its kind": (REFERENCES, sql(f"UPDATE groups SET kind = 'evaluation' WHERE id = {GROUP}")),
    "a sample is too old for its batch": (AGE, sql(f"UPDATE samples SET min_version = 1 WHERE id = {TRAINED}")),
    "a sample has no version": (AGE, sql(f"UPDATE samples SET min_version = NULL WHERE id = {TRAINED}")),
    "a sample is of a version after its batch": (
        AGE, sql(f"UPDATE samples SET max_version = 6 WHERE id = {TRAINED}"),
    ),
    "an evaluated sample is of another version": (
        AGE, sql("UPDATE samples SET min_version = 2, max_version = 2 WHERE id = 'e3.1.0'"),
    ),
    "a group of equal rewards was trained": (
        FILTER, sql(f"UPDATE samples SET reward = 1.0 WHERE group_id = {GROUP} AND state = 'trained'"),
    ),
    "a group of different rewards was filtered": (
        FILTER, sql(f"UPDATE samples SET reward = 0.25 WHERE id = {FILTERED}"),
    ),
    "a reward is NaN": (REWARDS, sql(f"UPDATE samples SET reward = NULL WHERE id = {TRAINED}")),
    "a reward is infinite": (REWARDS, sql(f"UPDATE samples SET reward = 9e999 WHERE id = {TRAINED}")),
    "a reward is text": (DATABASE, sql(f"UPDATE samples SET reward = 'high' WHERE id = {TRAINED}")),
    "a reward was improved": (REWARDS, sql(f"UPDATE samples SET reward = reward + 0.01 WHERE id = {TRAINED}")),
    "an advantage was changed": (REWARDS, sql(f"UPDATE samples SET advantage = advantage * 1.01 WHERE id = {TRAINED}")),
    "an advantage was forgotten": (REWARDS, sql(f"UPDATE samples SET advantage = NULL WHERE id = {TRAINED}")),
    "a filtered sample has an advantage": (REWARDS, sql(f"UPDATE samples SET advantage = 1 WHERE id = {FILTERED}")),
    "a count of ends was changed": (META, sql("UPDATE ended SET samples = samples + 1 WHERE state = 'trained'")),
    "a count of ends was deleted": (META, sql("DELETE FROM ended WHERE state = 'filtered'")),
    "a count of an end that no sample has": (META, sql("INSERT INTO ended VALUES ('expired', 3)")),
    "the count of started rows was changed": (META, sql("UPDATE mixture SET rows = rows - 1")),
    "a group was dispatched before it was admitted": (
        META, sql(f"UPDATE groups SET dispatched = version - 1 WHERE id = {LAST_GROUP}"),
    ),
    "a group was dispatched after its tokens": (
        META, sql(f"UPDATE groups SET dispatched = 6 WHERE id = {GROUP}"),
    ),
    "a group with tokens was never dispatched": (
        META, sql(f"UPDATE groups SET dispatched = NULL WHERE id = {GROUP}"),
    ),
    "a group that ended is open": (META, sql(f"UPDATE groups SET open = 1 WHERE id = {GROUP}")),
    "an evaluation was dropped that was not": (
        META, sql("INSERT INTO meta VALUES ('dropped_evaluation', '3')"),
    ),
    "a batch counts another number of groups": (BATCHES, sql("UPDATE batches SET groups = 3 WHERE step = 5")),
    "a text has another position": (
        TEXTS, sql(f"UPDATE samples SET text_position = text_position + 1 WHERE id = {TRAINED}"),
    ),
    "a text has no position": (TEXTS, sql(f"UPDATE samples SET text_position = -1 WHERE id = {TRAINED}")),
    "two texts were exchanged": (TEXTS, texts_exchanged),
    "a byte of a text was flipped": (TEXTS, text_byte_flipped),
    "the texts are gone": (TEXTS, lambda run: shutil.rmtree(run / "texts")),
    "a text is not a record": (TEXTS, text_of_no_sample),
    "a text is missing": (REWARDS, sql(f"UPDATE samples SET text_segment = NULL WHERE id = {TRAINED}")),
    "metrics are missing": (REWARDS, sql(f"UPDATE samples SET metrics = NULL WHERE id = {TRAINED}")),
    "a sample does not list its completions": (
        REFERENCES, sql(f"UPDATE samples SET completions = '[]' WHERE id = {TRAINED}"),
    ),
    "a sample lists a completion of another one": (
        REFERENCES, sql("UPDATE samples SET completions = json_insert(completions, '$[#]', (SELECT number FROM"
                        f" completions WHERE sample = {TRAINED})) WHERE id = {FILTERED}"),
    ),
    "a sample lists a completion twice": (
        REFERENCES, sql("UPDATE samples SET completions = json_insert(completions, '$[#]', json_extract(completions,"
                        f" '$[0]')) WHERE id = {TRAINED}"),
    ),
    "a list of completions is not JSON": (DATABASE, sql(f"UPDATE samples SET completions = '[' WHERE id = {TRAINED}")),
    "a completion is longer than its sample": (
        TURNS, sql(f"UPDATE completions SET total_tokens = total_tokens + 1 WHERE sample = {WRITTEN}"),
    ),
    "a completion is older than its sample": (
        TURNS, sql(f"UPDATE completions SET min_version = min_version - 1 WHERE sample = {WRITTEN}"),
    ),
    "the first turn is longer than its record": (
        PAYLOAD, sql(f"UPDATE completions SET total_tokens = 9 WHERE sample = {TWO_TURNS} AND turn = 0"),
    ),
    "metrics are not JSON": (DATABASE, sql(f"UPDATE samples SET metrics = '[' WHERE id = {TRAINED}")),
    "metrics are not numbers": (
        DATABASE, sql(f"""UPDATE samples SET metrics = '{{"a": "b"}}' WHERE id = {TRAINED}"""),
    ),
    "metrics are no object": (DATABASE, sql(f"UPDATE samples SET metrics = '3' WHERE id = {TRAINED}")),
    "a publication's digest was changed": (
        SERVED, sql("UPDATE publications SET digest = 'ffff' WHERE step = 4"),
    ),
    "an acknowledged digest was changed": (
        SERVED, sql("UPDATE served SET digest = 'ffff' WHERE step = 4 AND engine = 'engine-1.0'"),
    ),
    "a publication was deleted": (SERVED, sql("DELETE FROM publications WHERE step = 4")),
    "a publication is of a trainer that was replaced": (
        SERVED, sql("UPDATE publications SET incarnation = 1 WHERE step = 5"),
    ),
    "a publication is of a trainer that does not exist": (
        REFERENCES, sql("UPDATE publications SET incarnation = 9 WHERE step = 5"),
    ),
    "a lineage is missing": (SERVED, sql("UPDATE publications SET lineage = 2 WHERE step = 6")),
    "a version was published that was never trained": (
        REFERENCES, sql("INSERT INTO publications VALUES (0, 12, 'ff', 2, 0.0)"),
    ),
    "a lineage began without a replay": (
        SERVED,
        sql(
            "INSERT INTO incarnations VALUES (3, 'x', 6, 0.0)", "INSERT INTO publications VALUES (1, 6, 'ff', 3, 0.0)"
        ),
    ),
    "a batch was never applied": (LINEAGE, sql("DELETE FROM applied WHERE step = 3")),
    "a replay was never applied": (LINEAGE, sql("DELETE FROM applied WHERE step = 2 AND incarnation = 2")),
    "a batch was applied twice in the lineage": (
        LINEAGE, sql("INSERT INTO applied SELECT 1, 2, metrics, time FROM applied WHERE step = 1"),
    ),
    "a batch was applied by a trainer that does not exist": (
        REFERENCES, sql("UPDATE applied SET incarnation = 9 WHERE step = 5"),
    ),
    "a batch was applied that does not exist": (REFERENCES, sql("UPDATE applied SET step = 11 WHERE step = 5")),
    "metrics are of a step that was never applied": (
        REFERENCES, sql("UPDATE step_metrics SET step = 11 WHERE step = 5"),
    ),
    "an incarnation was deleted": (LINEAGE, sql("DELETE FROM incarnations WHERE incarnation = 1")),
    "an incarnation began elsewhere": (LINEAGE, sql("UPDATE incarnations SET step = 1 WHERE incarnation = 2")),
    "the first incarnation began in the middle": (
        LINEAGE, sql("UPDATE incarnations SET step = 1 WHERE incarnation = 1"),
    ),
    "the final checkpoint is not in the ledger": (CHECKPOINTS, sql("DELETE FROM checkpoints WHERE step = 6")),
    "the final checkpoint is marked as removed": (
        CHECKPOINTS, sql("UPDATE checkpoints SET removed = 1 WHERE step = 6"),
    ),
    "a checkpoint is of a version that does not exist": (
        REFERENCES, sql("UPDATE checkpoints SET step = 60 WHERE step = 6"),
    ),
    "a checkpoint is by another incarnation": (
        CHECKPOINTS, sql("UPDATE checkpoints SET incarnation = 1 WHERE step = 4"),
    ),
    "a checkpoint's directory is gone": (
        CHECKPOINTS, lambda run: shutil.rmtree(run / "checkpoints" / "step-000006"),
    ),
    "a checkpoint has no record": (
        CHECKPOINTS, lambda run: (run / "checkpoints" / "step-000004" / "trainer.json").unlink(),
    ),
    "a checkpoint has another step": (CHECKPOINTS, lambda run: checkpoint_record(run, step=5)),
    "a checkpoint has another incarnation": (CHECKPOINTS, lambda run: checkpoint_record(run, incarnation=1)),
    "a checkpoint has another number of updates": (CHECKPOINTS, lambda run: checkpoint_record(run, updates=7)),
    "a checkpoint's record has a flipped bit": (CHECKPOINTS, lambda run: flip(run, "trainer.json")),
    "a checkpoint's weights have a flipped bit": (CHECKPOINTS, lambda run: flip(run, "model.safetensors")),
    "an older checkpoint's weights have a flipped bit": (CHECKPOINTS, lambda run: flip(run, "model.safetensors", 4)),
    "a checkpoint's moments have a flipped bit": (CHECKPOINTS, lambda run: flip(run, "trainer/optimizer.safetensors")),
    "a checkpoint's configuration has a flipped bit": (CHECKPOINTS, lambda run: flip(run, "config.json")),
    "a checkpoint's weights are truncated": (CHECKPOINTS, lambda run: checkpoint_file(run, "model.safetensors", 99)),
    "a checkpoint's weights are empty": (CHECKPOINTS, lambda run: checkpoint_file(run, "model.safetensors", 0)),
    "a checkpoint's weights are gone": (CHECKPOINTS, lambda run: checkpoint_file(run, "model.safetensors", None)),
    "the digest of a checkpoint was changed": (CHECKPOINTS, sql("UPDATE checkpoints SET digest = 'f' WHERE step = 4")),
    "the ledger is older than the status": (NEWEST, lambda run: write_status(run, "Succeeded", 7)),
    "the ledger is older than the status of a run under way": (NEWEST, lambda run: write_status(run, "Running", 8)),
    "the ledger does not record the end": (NEWEST, unfinished),
    "the ledger is older than a checkpoint": (
        NEWEST, lambda run: (run / "checkpoints" / "step-000008").mkdir(),
    ),
    "starts are not a count": (META, sql("UPDATE meta SET value = '1x' WHERE key = 'coordinator_starts'")),
    "no coordinator was started": (META, sql("DELETE FROM meta WHERE key = 'coordinator_starts'")),
    "an unknown incarnation was verified": (
        META, sql("UPDATE meta SET value = '9' WHERE key = 'verified_incarnation'"),
    ),
    "a sample that did not fail has a failure": (
        META, sql("UPDATE failures SET sample_number = (SELECT number FROM samples WHERE state = 'trained' LIMIT 1)"
                  " WHERE number = 1"),
    ),
    "a failure is of an unknown sample": (META, sql(f"UPDATE failures SET sample_number = {UNKNOWN} WHERE number = 1")),
    "a failure was deleted": (META, sql("DELETE FROM failures WHERE number = 1")),
    "the end of the run is not a time": (META, sql("UPDATE meta SET value = 'x' WHERE key = 'finished'")),
    "a completion was deleted": (TURNS, sql(f"DELETE FROM completions WHERE sample = {WRITTEN}")),
    "a completion is of an unknown sample": (
        REFERENCES, sql(f"UPDATE completions SET sample_number = {UNKNOWN} WHERE sample = {WRITTEN}"),
    ),
    "a turn is missing": (TURNS, sql(f"UPDATE completions SET turn = 1 WHERE sample = {WRITTEN}")),
    "a completion is of another attempt": (TURNS, sql(f"UPDATE completions SET attempt = 1 WHERE sample = {WRITTEN}")),
    "a sample counts another attempt": (TURNS, sql(f"UPDATE samples SET attempt = 1 WHERE id = {WRITTEN}")),
    "a sample has fewer tokens than its completions": (
        TURNS, sql(f"UPDATE samples SET response_tokens = response_tokens - 1 WHERE id = {WRITTEN}"),
    ),
    "a completion has more tokens than its payload": (
        PAYLOAD, sql(f"UPDATE completions SET tokens = tokens + 1 WHERE sample = {WRITTEN}"),
    ),
    "a sample's prompt is longer than in the payload": (
        PAYLOAD, sql(f"UPDATE samples SET prompt_tokens = prompt_tokens + 1 WHERE id = {WRITTEN}"),
    ),
    "a sample is older than its tokens": (
        PAYLOAD, sql(f"UPDATE samples SET min_version = min_version - 1 WHERE id = {WRITTEN}"),
    ),
    "a completion has another finish": (
        PAYLOAD, sql(f"UPDATE completions SET finish = 'length' WHERE sample = {WRITTEN}"),
    ),
    "a completion has an unknown finish": (
        TURNS, sql(f"UPDATE completions SET finish = 'lost' WHERE sample = {WRITTEN}"),
    ),
    "a scored sample is still dispatched": (TURNS, sql(f"UPDATE samples SET dispatched = 3 WHERE id = {WRITTEN}")),
    "a payload byte was flipped": (PAYLOAD, flipped_byte),
    "a segment was truncated": (PAYLOAD, truncated_segment),
    "a segment is gone": (PAYLOAD, segment_gone),
    "a record is not a record": (PAYLOAD, rewritten),
    "a record is of another sample": (PAYLOAD, lambda run: rewritten(run, sample="g0.0")),
    "a record lacks log-probabilities": (PAYLOAD, lambda run: rewritten(run, logprobs=b"")),
    "a record's log-probabilities are NaN": (PAYLOAD, not_a_number),
    "a record's versions do not cover its tokens": (PAYLOAD, lambda run: rewritten(run, spans=[VersionSpan(4, 1, 3)])),
    "a record has another prompt": (PAYLOAD, lambda run: rewritten(run, given=bytes(40))),
    "a record has a prompt that its tokens were not generated from": (PAYLOAD, other_prompt),
    "a turn does not continue the previous one": (PAYLOAD, second_turn),
    "the second turn lost its observation": (PAYLOAD, lambda run: second_observation(run, lambda given: given[:-12])),
    "the second turn follows another observation": (
        PAYLOAD, lambda run: second_observation(run, lambda given: bytes(4) + given[4:]),
    ),
    "the second turn follows another answer": (PAYLOAD, first_answer),
    "a sample of two turns is longer than in the payload": (
        PAYLOAD, sql(f"UPDATE samples SET total_tokens = total_tokens + 1 WHERE id = {TWO_TURNS}"),
    ),
    "a sample of two turns counts its first answer twice": (
        PAYLOAD,
        sql(f"UPDATE samples SET prompt_tokens = total_tokens - response_tokens WHERE id = {TWO_TURNS}"),
    ),
    "a sample of one turn has an observation": (
        TURNS, sql(f"UPDATE samples SET total_tokens = total_tokens + 1 WHERE id = {WRITTEN}"),
    ),
    "a sample is shorter than its prompt and its answers": (
        TURNS, sql(f"UPDATE samples SET total_tokens = response_tokens WHERE id = {TWO_TURNS}"),
    ),
    "a sample has no length": (TURNS, sql(f"UPDATE samples SET total_tokens = NULL WHERE id = {WRITTEN}")),
    "a turn has another reward": (
        REWARDS, sql(f"UPDATE samples SET turn_rewards = json_set(turn_rewards, '$[0]', 9) WHERE id = {TWO_TURNS}"),
    ),
    "a turn has a reward that is not a number": (
        REWARDS, sql(f"UPDATE samples SET turn_rewards = json_set(turn_rewards, '$[0]', 'x') WHERE id = {TWO_TURNS}"),
    ),
    "a turn has no reward": (
        REWARDS, sql(f"UPDATE samples SET turn_rewards = json_array(reward) WHERE id = {TWO_TURNS}"),
    ),
    "there are more rewards than turns": (
        REWARDS, sql(f"UPDATE samples SET turn_rewards = json_array(reward, 0.0) WHERE id = {WRITTEN}"),
    ),
    "the rewards of turns are gone": (REWARDS, sql(f"UPDATE samples SET turn_rewards = NULL WHERE id = {WRITTEN}")),
    "the rewards of turns are not JSON": (DATABASE, sql(f"UPDATE samples SET turn_rewards = '[' WHERE id = {WRITTEN}")),
    "a digest was changed": (PAYLOAD, sql(f"UPDATE completions SET digest = 'ff' WHERE sample = {WRITTEN}")),
    "two records were exchanged": (PAYLOAD, record_exchanged),
    "a record has another position": (
        PAYLOAD, sql(f"UPDATE completions SET position = position + 1 WHERE sample = {WRITTEN}"),
    ),
    "a record has another length": (
        PAYLOAD, sql(f"UPDATE completions SET length = 99999999999 WHERE sample = {WRITTEN}"),
    ),
    "an evaluation claims more problems": (EVALUATIONS, sql("UPDATE evaluations SET problems = 4 WHERE version = 3")),
    "an evaluation claims failures": (EVALUATIONS, sql("UPDATE evaluations SET failed = 1 WHERE version = 3")),
    "an evaluation's accuracy was improved": (
        EVALUATIONS, sql("UPDATE evaluations SET accuracy = accuracy - 0.1 WHERE version = 3"),
    ),
    "an evaluation claims more answers": (EVALUATIONS, sql("UPDATE evaluations SET samples = 3 WHERE version = 3")),
    "pass@2 was improved": (
        EVALUATIONS,
        sql("UPDATE evaluations SET pass_at = json_set(pass_at, '$.2', json_extract(pass_at, '$.2') - 0.1)"),
    ),
    "pass@2 is missing": (EVALUATIONS, sql("UPDATE evaluations SET pass_at = json_remove(pass_at, '$.2')")),
    "pass@k is not JSON": (DATABASE, sql("UPDATE evaluations SET pass_at = '{' WHERE version = 3")),
    "an answer of an evaluation was deleted": (
        ADMITTED, sql("DELETE FROM samples WHERE id = 'e3.1.1'", "DELETE FROM completions WHERE sample = 'e3.1.1'"),
    ),
    "an evaluated reward was changed": (EVALUATIONS, sql("UPDATE samples SET reward = 0.5 WHERE id = 'e3.1.0'")),
    "an evaluation's result was deleted": (EVALUATIONS, sql("DELETE FROM evaluations WHERE version = 3")),
    "an evaluation was deleted": (
        EVALUATIONS, sql("DELETE FROM evaluations WHERE version = 3", "DELETE FROM samples WHERE id LIKE 'e3.%'",
                         "DELETE FROM groups WHERE id LIKE 'e3.%'", "DELETE FROM completions WHERE sample LIKE 'e3.%'"),
    ),
    "a problem of an evaluation was deleted": (
        EVALUATIONS, sql("DELETE FROM samples WHERE id LIKE 'e3.2.%'", "DELETE FROM groups WHERE id = 'e3.2'"),
    ),
    "a version was evaluated that does not exist": (
        EVALUATIONS, sql(f"INSERT INTO groups VALUES ({group_number('e12.0')}, 'evaluation', 0, 'sums', 0, 12, 0,"
                         " NULL, 0, 0)"),
    ),
    "an evaluation is of a task without problems": (
        EVALUATIONS, sql("INSERT INTO evaluations VALUES (3, 'products', 3, 2, 0, 1.0, 1.0, '{}', '', 0.0)"),
    ),
    "the decision about a trained group was deleted": (DECISIONS, sql(f"DELETE FROM decisions WHERE {OF_GROUP}")),
    "the decision about a filtered group was deleted": (
        FILTER, sql("DELETE FROM decisions WHERE accepted = 0 AND reason = ''"),
    ),
    "the decision about a failed group was deleted": (DECISIONS, sql("DELETE FROM decisions WHERE reason != ''")),
    "a trained group was rejected": (DECISIONS, sql(f"UPDATE decisions SET accepted = 0 WHERE {OF_GROUP}")),
    "a filtered group was accepted": (
        DECISIONS, sql("UPDATE decisions SET accepted = 1 WHERE accepted = 0 AND reason = ''"),
    ),
    "a failed group was rejected": (DECISIONS, sql("UPDATE decisions SET reason = '' WHERE reason != ''")),
    "an accepted group has a reason": (DECISIONS, sql(f"UPDATE decisions SET reason = 'x' WHERE {OF_GROUP}")),
    "the failure of a filter is not recorded": (
        DECISIONS, sql("DELETE FROM failures WHERE sample_number >> 12 = 4"),
    ),
    "a decision is about other members": (
        DECISIONS, sql(f"UPDATE decisions SET survivors = json_remove(survivors, '$[0]') WHERE {OF_GROUP}"),
    ),
    "a decision is about a group that does not exist": (
        DECISIONS, sql(f"INSERT INTO decisions VALUES ({group_number('g777')}, 1, '', '[]')"),
    ),
    "two decisions were exchanged": (
        DECISIONS, sql(
            "UPDATE decisions SET group_number = -1 WHERE group_number = (SELECT MIN(group_number) FROM decisions)",
            "UPDATE decisions SET group_number = (SELECT group_number FROM samples WHERE id = 'g0.0')"
            " WHERE group_number = (SELECT MAX(group_number) FROM decisions)",
        ),
    ),
    "pages of the database are torn": (DATABASE, torn_pages),
}  # fmt: skip


@pytest.fixture(scope="session")
def broken(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[str]]]:
    """Return a function: corruption → check → problems in the audit report."""

    @functools.cache
    def find(corruption: str) -> dict[str, list[str]]:
        run = copy(finished_run, tmp_path_factory.mktemp("corrupted") / "run")
        CORRUPTIONS[corruption][1](run)
        report = audit(run)
        assert report.ok == all(check.ok for check in report.checks)
        return {check.name: check.problems for check in report.checks if not check.ok}

    return find


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corruption_is_found_by_the_check_for_it(broken: Any, corruption: str) -> None:
    assert CORRUPTIONS[corruption][0] in broken(corruption), f"found instead: {broken(corruption)}"


@pytest.mark.parametrize(
    ("corruption", "message"),
    [
        ("a record is not a record", "its payload is not a completion record"),
        ("a record is of another sample", "its payload has another completion id"),
        ("a record lacks log-probabilities", "its log-probabilities or versions do not cover its tokens"),
        ("a record's log-probabilities are NaN", "its log-probabilities or versions do not cover its tokens"),
        ("a record's versions do not cover its tokens", "its log-probabilities or versions do not cover its tokens"),
        ("a record has another prompt", "the number of tokens of its prompt differs from the ledger"),
        ("a turn does not continue the previous one", OTHER_TOKENS),
        ("the second turn lost its observation", "the number of tokens of its sequence differs from the ledger"),
        ("the second turn follows another observation", OTHER_TOKENS),
        ("the second turn follows another answer", OTHER_TOKENS),
        ("a turn has another reward", "its reward is not the sum of the rewards of its turns"),
        ("a turn has no reward", "its number of turn rewards differs from its number of turns"),
        ("a payload byte was flipped", "its payload is damaged, or not at the recorded position"),
        ("a segment was truncated", "its payload is beyond the end of its segment"),
        ("a segment is gone", "segment 1: the ledger refers to it, but the file does not exist"),
        ("an incarnation began elsewhere", "it did not apply consecutive batches from its first step"),
        ("a checkpoint has another number of updates", "its trainer.json does not have the digest in the ledger"),
        ("a checkpoint's weights have a flipped bit", "model.safetensors is damaged (it does not have the digest in"),
        ("a checkpoint's weights are gone", "model.safetensors is missing"),
        ("a checkpoint has another step", "its trainer.json has step 5, incarnation 2; the ledger has step 6"),
    ],
)
def test_the_message_names_the_cause(broken: Any, corruption: str, message: str) -> None:
    assert message in " ".join(broken(corruption)[CORRUPTIONS[corruption][0]])


def test_every_rule_finds_some_corruption(broken: Any) -> None:
    reported = " ".join(p for corruption in CORRUPTIONS for problems in broken(corruption).values() for p in problems)
    assert [rule.problem for prop in PROPERTIES for rule in prop.rules if rule.problem not in reported] == []


def test_the_run_before_corruption_passes_and_has_all_kinds_of_rows(finished_run: Path) -> None:
    report = audit(finished_run)
    assert report.ok and report.finished, [check for check in report.checks if not check.ok]
    assert all(check.examined > 0 for check in report.checks)
    counts = report.counts
    assert counts["open"] == 0 and counts["incarnations"] == 2 and counts["evaluated"] == 18
    assert counts["trained"] and counts["filtered"] and counts["surplus"] and counts["failed"]
    assert not (finished_run / "payload" / "00000000.segment").exists(), "some payload is unlinked"


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({"advantage": "my_pkg:fn"}, "my_pkg:fn"),
        ({"rewardMean": "batch", "rewardClip": 1}, "group_normalized with reward_mean with reward_clip"),
        ({"rewardStd": "batch", "rewardClip": 1}, "group_normalized with reward_std with reward_clip"),
    ],
)
def test_an_advantage_of_unknown_formula_is_reported_as_not_recomputed(
    finished_run: Path, tmp_path: Path, changes: dict[str, object], formula: str
) -> None:
    assert [check.note for check in audit(finished_run).checks if check.note] == []
    run = copy(finished_run, tmp_path / "run")
    manifest = json.loads((run / "job.json").read_bytes())
    manifest["spec"]["algorithm"] |= changes
    (run / "job.json").write_text(json.dumps(manifest))
    alter(run, "UPDATE samples SET advantage = advantage + 1 WHERE advantage IS NOT NULL")
    report = audit(run)
    notes = {check.name: check.note for check in report.checks if check.note}
    assert report.ok and notes == {REWARDS: f"advantages not recomputed: the advantage is {formula}"}


def test_a_problem_names_the_first_rows_and_counts_the_rest(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    alter(run, "UPDATE samples SET reason = 'x' WHERE state = 'trained'")
    (problem,) = [problem for check in audit(run).checks for problem in check.problems]
    names = [row[0] for row in ask(run, "SELECT id FROM samples WHERE state = 'trained' ORDER BY number")]
    first = ", ".join(f"sample {name}" for name in names[:5])
    assert problem.startswith(f"{first} and {len(names) - 5} more: it was rejected without a reason, or has a reason")


def test_a_missing_run_and_a_run_of_another_version_are_rejected_with_a_message(
    finished_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(NoRunError, match=r"none does not exist; give the directory of a run$"):
        audit(tmp_path / "none")
    with pytest.raises(NoRunError, match=r"has no ledger\.sqlite: no run has started in it"):
        audit(tmp_path)
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(NoRunError, match="is empty: no run has started in it"):
        audit(tmp_path)
    run = copy(finished_run, tmp_path / "run")
    (run / "job.json").unlink()
    with pytest.raises(NoRunError, match=r"job.json does not exist"):
        audit(run)
    (run / "job.json").write_text("{}")
    with pytest.raises(NoRunError, match=r"job.json is of another version of rljob"):
        audit(run)
    (run / "job.json").write_bytes((finished_run / "job.json").read_bytes()[:100])
    with pytest.raises(NoRunError, match=r"job.json is damaged: it is not valid JSON; restore it$"):
        audit(run)
    alter(run, "PRAGMA user_version=99")
    with pytest.raises(NoRunError, match=r"another version of rljob \(ledger 99, this one reads \d+\)"):
        audit(run)


def test_a_file_that_is_not_a_database_is_a_problem_and_not_a_traceback(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    (run / "ledger.sqlite").write_bytes(b"not a database " * 1000)
    (check,) = audit(run).checks
    assert check.name == DATABASE and "cannot be read: file is not a database" in check.problems[0]


def test_the_newest_checkpoint_of_a_running_run_may_be_missing_in_the_ledger(
    finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    alter(run, "DELETE FROM checkpoints WHERE step = 6")
    assert not audit(run).ok
    alter(run, "DELETE FROM meta WHERE key = 'finished'")
    report = audit(run)
    assert report.ok and not report.finished, [check for check in report.checks if not check.ok]
    (run / "checkpoints" / "step-000006").rename(run / "checkpoints" / "step-000006.tmp-1-ab")
    assert not audit(run).ok


def test_a_trainer_process_whose_checkpoint_was_refused_is_no_error(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    alter(run, "INSERT INTO incarnations VALUES (3, 'x', 1000, 0.0)")
    assert audit(run).ok


def test_a_status_as_new_as_the_ledger_passes(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    write_status(run, "Succeeded", 6)
    assert audit(run).ok
    write_status(run, "Running", 7)  # killed between a step and its commit
    assert audit(run).ok


def test_a_running_run_can_be_audited_and_its_ledger_is_unchanged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", turns=25, deaths="")
    before = (run / "ledger.sqlite").read_bytes()
    report = audit(run)
    assert report.ok and not report.finished and report.counts["open"] > 0
    assert (run / "ledger.sqlite").read_bytes() == before
