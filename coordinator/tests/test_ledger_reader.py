"""Reading samples of a ledger: selections, one sample with its tokens, and errors."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from ledgers import RecordingTrainer, add_completion, alter, ask, batch_of, copy, make_run, run_world
from world import World, job, turns_of

from rljob.coordinator.local_api_server import build_local_api
from rljob.ledger.audit import audit
from rljob.ledger.reader import LedgerReader, NoRunError, SampleRow, Selection, Sort, samples
from rljob.ledger.sample_detail import show
from rljob.ledger.states import Kind, State


def listed(run: Path, **selection: Any) -> list[SampleRow]:
    """Return the samples of a selection."""
    with LedgerReader(run) as ledger:
        return samples(ledger, Selection(**{"limit": 1000, **selection}))


@pytest.mark.parametrize(
    ("selection", "condition"),
    [
        ({}, "1"),
        ({"task": "sums"}, "1"),
        ({"task": "products"}, "0"),
        ({"step": 3}, "s.step = 3"),
        ({"state": State.SURPLUS}, "s.state = 'surplus'"),
        ({"group": "g4"}, "s.group_id = 'g4'"),
        ({"kind": Kind.EVALUATION}, "g.kind = 'evaluation'"),
        ({"kind": Kind.TRAIN, "state": State.TRAINED, "step": 5}, "s.step = 5"),
    ],
)
def test_a_selection_returns_the_samples_that_match_all_filters(
    finished_run: Path, selection: Any, condition: str
) -> None:
    wanted = ask(finished_run, f"SELECT s.id FROM samples s JOIN groups g ON g.id = s.group_id WHERE {condition}")
    assert sorted(row.id for row in listed(finished_run, **selection)) == sorted(row[0] for row in wanted)


def test_the_newest_batch_comes_first_in_its_own_order(finished_run: Path) -> None:
    rows = listed(finished_run, limit=8)
    assert [row.id for row in rows] == [*batch_of(finished_run, 5), *batch_of(finished_run, 4)]
    assert {row.kind for row in rows} == {"train"}
    newest = rows[0]
    assert newest.step == 5 and newest.staleness == 5 - (newest.min_version or 0)
    assert newest.text == "text" and newest.finish == "stop" and newest.advantage is not None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("sort", "key"),
    [
        (Sort.REWARD, "reward"),
        (Sort.ADVANTAGE, "advantage"),
        (Sort.LENGTH, "response_tokens"),
        (Sort.STALENESS, "staleness"),
    ],
)
def test_lists_are_sorted_in_either_direction_and_missing_keys_are_last(
    finished_run: Path, sort: Sort, key: str, reverse: bool
) -> None:
    keys = [getattr(row, key) for row in listed(finished_run, sort=sort, reverse=reverse)]
    present = [value for value in keys if value is not None]
    assert present == sorted(present, reverse=not reverse)
    assert keys == present + [None] * (len(keys) - len(present))
    assert None in keys or sort is Sort.LENGTH, "in this run every sample was generated"


def test_a_sample_is_shown_with_all_data(finished_run: Path) -> None:
    name = next(name for name in batch_of(finished_run, 5) if turns_of(name) == 1)
    with LedgerReader(finished_run) as ledger:
        detail = show(ledger, name)
    assert detail.notes == [] and detail.attempt == 0 and detail.metrics == {}
    assert len(detail.siblings) == 2 and {s.id.rpartition(".")[0] for s in detail.siblings} == {detail.sample.group}
    (turn,) = detail.turns
    assert turn.given_ids == [detail.sample.row, 1, 2] and turn.given is not None
    assert len(turn.written) == detail.sample.response_tokens
    assert {token.logprob for token in turn.written} == {-1.0}
    assert {token.version for token in turn.written} <= {detail.sample.min_version, detail.sample.max_version}
    assert all(token.text for token in turn.written)
    (piece,) = turn.completions
    assert (piece.attempt, piece.finish, piece.tokens) == (0, "stop", len(turn.written))
    assert piece.engine.startswith("engine-")


def test_a_sample_of_several_turns_is_shown_turn_by_turn(finished_run: Path) -> None:
    name = next(name for name in batch_of(finished_run, 5) if turns_of(name) == 2)
    with LedgerReader(finished_run) as ledger:
        detail = show(ledger, name)
    first, second = detail.turns
    assert [turn.turn for turn in detail.turns] == [0, 1]
    assert (first.given_ids, second.given_ids) == ([detail.sample.row, 1, 2], [7, 8, 9])
    assert first.reward == 0.25 and second.reward == detail.sample.reward - 0.25
    assert len(first.written) + len(second.written) == detail.sample.response_tokens
    assert detail.sample.prompt_tokens == 3
    assert detail.sample.total_tokens == 3 + 3 + detail.sample.response_tokens


def test_a_sample_whose_payload_was_unlinked_is_shown_without_tokens(finished_run: Path) -> None:
    name = next(name for name in batch_of(finished_run, 0) if turns_of(name) == 1)
    with LedgerReader(finished_run) as ledger:
        detail = show(ledger, name)
    assert detail.notes == ["its tokens were removed, as checkpoints cover them"]
    assert detail.turns[0].written == [] and detail.turns[0].completions[0].tokens == detail.sample.response_tokens
    assert detail.sample.reward is not None


def test_earlier_answers_are_not_shown_as_an_observation_if_their_record_is_gone(
    finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path / "run")
    name = next(name for name in batch_of(run, 5) if turns_of(name) == 2)
    alter(run, f"UPDATE completions SET segment = 999 WHERE sample = '{name}' AND turn = 0")
    with LedgerReader(run) as ledger:
        first, second = show(ledger, name).turns
    assert (first.given_ids, first.written) == ([], [])
    assert (second.given_ids, second.given) == ([7, 8, 9], "h i j") and second.written


def test_damaged_payload_adds_a_note(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    for path in (run / "payload").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with LedgerReader(run) as ledger:
        (note,) = show(ledger, next(name for name in batch_of(run, 5) if turns_of(name) == 1)).notes
    assert "payload segment 1 is damaged at byte" in note


def test_a_damaged_text_is_missing_and_adds_a_note(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    assert {row.text for row in listed(run, step=5)} == {"text"}
    for path in (run / "texts").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert {row.text for row in listed(run, step=5)} == {None}
    with LedgerReader(run) as ledger:
        assert show(ledger, batch_of(run, 5)[0]).notes == ["its text cannot be read; rljob audit names the damage"]


def test_without_a_tokenizer_tokens_have_no_text_and_a_note_has_the_reason(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    tokenizer = run / "model" / "tokenizer.json"
    name = batch_of(run, 5)[0]
    tokenizer.write_text("{}")
    with LedgerReader(run) as ledger:
        assert "tokenizer.json is not a tokenizer" in show(ledger, name).notes[0]
    tokenizer.rename(run / "checkpoints" / "step-000006" / "tokenizer.json")
    tokenizer = run / "checkpoints" / "step-000006" / "tokenizer.json"
    tokenizer.unlink()
    with LedgerReader(run) as ledger:
        detail = show(ledger, name)
    assert detail.notes[0].startswith("tokens have no text: ") and str(tokenizer) in detail.notes[0]
    assert detail.turns[0].given is None and detail.turns[0].written[0].text is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("g3", "g3 is a group; its samples are g3.0, g3.1, g3.2"),
        ("g3.9", "there is no sample 'g3.9'; the samples of g3 are g3.0, g3.1, g3.2"),
        ("zz", "'zz' is not a sample id; ids are like g17.3, or e40.7.0 in an evaluation"),
    ],
)
def test_the_error_for_an_unknown_sample_lists_samples_near_it(finished_run: Path, name: str, sentence: str) -> None:
    with LedgerReader(finished_run) as ledger, pytest.raises(NoRunError) as caught:
        show(ledger, name)
    assert str(caught.value) == sentence


def test_the_error_for_a_sample_that_is_not_admitted_yet_names_the_newest_of_its_kind(finished_run: Path) -> None:
    with LedgerReader(finished_run) as ledger:
        names = [row[0] for row in ledger.rows("SELECT id FROM samples")]
        numbers = {tuple(map(int, re.findall(r"\d+", name))): name for name in names}
        for kind, missing in (("g", "g99999.0"), ("e", "e99999.0.0")):
            newest = numbers[max(number for number, name in numbers.items() if name.startswith(kind))]
            with pytest.raises(NoRunError, match=rf"^there is no sample '{missing}'; the newest is {newest}$"):
                show(ledger, missing)


def test_an_interrupted_turn_is_shown_with_all_its_completions(finished_run: Path, tmp_path: Path) -> None:
    """Two records of one turn, as after an interruption."""
    run = copy(finished_run, tmp_path / "run")
    one, two, *_ = (name for step in (4, 5) for name in batch_of(run, step) if turns_of(name) == 1)
    alter(run, f"UPDATE completions SET finish = 'abort' WHERE sample = '{one}'")
    add_completion(run, two, one, 0, 1)
    with LedgerReader(run) as ledger:
        (turn,) = show(ledger, one).turns
    assert [(piece.attempt, piece.finish) for piece in turn.completions] == [(0, "abort"), (1, "stop")]
    assert len(turn.written) == sum(piece.tokens for piece in turn.completions)


def test_a_ledger_of_another_version_is_refused_by_readers(finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    alter(run, "PRAGMA user_version=2")
    with pytest.raises(NoRunError, match=r"another version of rljob \(ledger 2"):
        listed(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to a user without write permission")
def test_a_run_can_be_read_on_a_read_only_volume(finished_run: Path) -> None:
    """A user without write permission stands for a read-only mount."""
    with tempfile.TemporaryDirectory() as place:
        run = copy(finished_run, Path(place) / "run")
        for rest in run.glob("ledger.sqlite-*"):
            rest.unlink()
        Path(place).chmod(0o755)
        os.seteuid(65534)
        try:
            assert not os.access(run, os.W_OK, effective_ids=True)
            assert listed(run, step=5)
            assert audit(run).ok
        finally:
            os.seteuid(0)


async def test_a_reader_sees_one_snapshot_while_the_run_continues(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    await run_world(tmp_path, turns=20, deaths="")
    world = World(job(steps=6), tmp_path)
    world.trainer = RecordingTrainer(world)
    await world.start()
    with LedgerReader(tmp_path) as ledger:
        before = ledger.value("SELECT COUNT(*) FROM groups")
        world.connect_all()
        await world.some(20)
        assert ledger.value("SELECT COUNT(*) FROM groups") == before
        with LedgerReader(tmp_path) as later:
            assert later.value("SELECT COUNT(*) FROM groups") > before
    world.close()


async def test_the_endpoint_returns_the_same_samples_as_the_reader(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    await run_world(tmp_path, deaths="")
    world = World(job(), tmp_path)
    await world.start()
    transport = httpx.ASGITransport(build_local_api(world.run))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
        answer = await client.get("/v1/samples?kind=train&sort=reward&reverse=true&limit=7")
        refused = [
            await client.get(f"/v1/samples?{query}") for query in ("sort=beauty", "limit=0", "kind=x", "step=-1")
        ]
    world.close()
    rows = listed(tmp_path, kind=Kind.TRAIN, sort=Sort.REWARD, reverse=True, limit=7)
    assert [SampleRow(**row) for row in json.loads(answer.content)] == rows and len(rows) == 7
    assert {response.status_code for response in refused} == {422}
    assert not any(math.isnan(row.reward or 0.0) for row in rows)


def test_a_run_that_has_admitted_nothing_has_no_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", turns=0, deaths="")
    alter(run, "DELETE FROM samples", "DELETE FROM groups")
    assert listed(run) == []
    with LedgerReader(run) as ledger, pytest.raises(NoRunError, match="the run has not admitted any yet"):
        show(ledger, "g0.0")
