"""Rows of files as problems: each training row once per pass, no held-out row in training, same in every process."""

from __future__ import annotations

import atexit
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.api.rewards.load_reward import load_reward
from rljob.runner.data import arrow, digests
from rljob.runner.data.arrow import ParquetRows, open_split
from rljob.runner.data.jsonl import JsonLines
from rljob.runner.data.readers import DataReaders, open_source
from rljob.runner.data.shuffle import pass_key, shuffled
from rljob.runner.data.table import TableSource, draw_order


def unpacked(packed: Path) -> Path:
    """Return a copy of a directory with its base64 files decoded to the files that the library wrote."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    shutil.copytree(packed, directory, dirs_exist_ok=True)
    for text in directory.rglob("*.b64"):
        text.with_suffix("").write_bytes(base64.b64decode(text.read_bytes()))
        text.unlink()
    return directory


SAVED = unpacked(Path(__file__).parent / "saved_by_datasets")
READERS = DataReaders(parquet=ParquetRows, datasets=open_split)


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list, row_group_size: int = 7) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def numbers(count: int) -> list[dict]:
    return [{"question": f"{i} + 1", "answer": i + 1} for i in range(count)]


def task_of(data: dict, reward: dict | None = None, seed: int = 3, **task: object) -> TableSource:
    spec = {
        "seed": seed,
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [{"name": "sums", "data": data, "reward": "right", **task}],
        "rewards": [{"name": "right"} | (reward or {"builtin": "exact_match"})],
        "rollouts": [{"name": "main"}],
    }
    spec = resolve(RLJob.model_validate({"metadata": {"name": "test"}, "spec": spec})).spec
    loaded = load_reward(spec, 0)
    row_check = loaded.row_check() if loaded is not None else None
    source = open_source(spec.tasks[0], row_check, seed, "spec.tasks[0].data", READERS, Path)
    assert isinstance(source, TableSource)
    return source


def questions(source: TableSource, split: str, start: int, count: int) -> list[str]:
    return [source.problem(split, row)["question"] for row in range(start, start + count)]


# --- order ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(0, 2**53), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_an_order_is_a_permutation(size: int, seed: int, number: int) -> None:
    key = pass_key(seed, "sums", "train", number)
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


def test_all_orders_of_three_rows_are_about_equally_likely() -> None:
    keys = [pass_key(seed, "sums", "train", 0) for seed in range(1200)]
    orders = Counter(tuple(shuffled(place, 3, key) for place in range(3)) for key in keys)
    assert len(orders) == 6 and all(140 < count < 260 for count in orders.values())


def test_an_order_separates_neighbouring_rows() -> None:
    key = pass_key(1, "sums", "train", 0)
    order = [shuffled(place, 1000, key) for place in range(1000)]
    assert sum(abs(one - next_) < 10 for one, next_ in itertools.pairwise(order)) < 40
    assert abs(sum(order[:100]) / 100 - 500) < 100


# --- splits and passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_training_row_comes_once_a_pass_and_no_held_out_one_ever(
    tmp_path: Path, kind: str, shuffle: bool
) -> None:
    rows = numbers(60)
    path = write_lines(tmp_path / "a", rows) if kind == "jsonl" else write_parquet(tmp_path / "a", rows)
    source = task_of({kind: {"path": str(path), "heldOutFraction": 0.3, "shuffle": shuffle}})
    train, held_out = source.size("train"), source.size("heldOut")
    assert train and held_out and train + held_out == 60
    held = questions(source, "heldOut", 0, held_out)
    passes = [questions(source, "train", number * train, train) for number in range(3)]
    for order in passes:
        assert sorted([*order, *held]) == sorted(row["question"] for row in rows)
    in_file_order = [row["question"] for row in rows if row["question"] not in held]
    assert (passes[0] == in_file_order) is not shuffle
    assert (passes[0] == passes[1]) is not shuffle
    assert questions(source, "heldOut", held_out, held_out) == held, "held-out rows repeat in the same order"


def test_equal_prompts_fall_on_one_side(tmp_path: Path) -> None:
    rows = [row for row in numbers(40) for _ in range(3)]
    source = task_of({"jsonl": {"path": str(write_lines(tmp_path / "a", rows)), "heldOutFraction": 0.5}})
    train = set(questions(source, "train", 0, source.size("train") or 0))
    held = set(questions(source, "heldOut", 0, source.size("heldOut") or 0))
    assert len(train) + len(held) == 40 and not train & held


def test_with_a_file_of_held_out_rows_all_other_rows_are_for_training(tmp_path: Path) -> None:
    held = write_lines(tmp_path / "b", [{"question": "held", "answer": "x"}])
    source = task_of({"jsonl": {"path": str(write_lines(tmp_path / "a", numbers(20))), "heldOutPath": str(held)}})
    assert (source.size("train"), source.size("heldOut")) == (20, 1)
    assert questions(source, "heldOut", 0, 3) == ["held"] * 3
    assert [where for where, _ in source.files] == [
        "spec.tasks[0].data.jsonl.path",
        "spec.tasks[0].data.jsonl.heldOutPath",
    ]


def test_training_rows_with_a_held_out_prompt_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = write_lines(tmp_path / "a", numbers(20)), write_lines(tmp_path / "b", numbers(23)[17:])
    task_of({"jsonl": {"path": str(one), "heldOutPath": str(two)}})
    (record,) = caplog.records
    assert record.message == f"spec.tasks[0].data.jsonl.heldOutPath: 3 rows of {one} have a prompt that is held out too"


def test_another_seed_and_another_task_draw_other_orders(tmp_path: Path) -> None:
    data = {"jsonl": {"path": str(write_lines(tmp_path / "a", numbers(50))), "heldOutFraction": 0}}
    first, second = (questions(task_of(data, seed=seed), "train", 0, 50) for seed in (1, 2))
    other = questions(task_of(data, seed=1, name="more"), "train", 0, 50)
    assert sorted(first) == sorted(second) == sorted(other)
    assert first != second and first != other


def test_another_process_gives_the_same_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", numbers(30))
    program = (
        "import sys; from pathlib import Path; from rljob.runner.data.jsonl import JsonLines\n"
        "from rljob.runner.data.table import TableSource, draw_order\n"
        "table, order = JsonLines(Path(sys.argv[1]), ''), draw_order(3, 'sums')\n"
        "s = TableSource(table, None, 0.2, {}, lambda row: row['question'], order)\n"
        "print([s.problem(split, row)['question'] for split in ('train', 'heldOut') for row in range(60)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    source = TableSource(JsonLines(path, ""), None, 0.2, {}, lambda row: row["question"], draw_order(3, "sums"))
    here = [source.problem(split, row)["question"] for split in ("train", "heldOut") for row in range(60)]
    assert other.stdout.strip() == str(here)


def test_columns_are_renamed_and_the_others_keep_their_names(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a", [{"prompt": "2 + 2", "solution": 4, "level": "easy"}])
    data = {
        "jsonl": {"path": str(path), "heldOutFraction": 0},
        "columns": {"question": "prompt", "answer": "solution", "hint": "solution"},
    }
    assert task_of(data).problem("train", 0) == {"level": "easy", "question": "2 + 2", "answer": 4, "hint": 4}


# --- formats --------------------------------------------------------------------------------------------------------


def test_json_lines_may_have_a_byte_order_mark_blank_lines_and_any_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("\ufeff".encode() + b'{"question":"a"}\r\n\n  \n{"question":"\xc3\xa9"}\n{"question":"c"}')
    table = JsonLines(path, "w")
    found = list(table.rows())
    assert [(each.place, each.row["question"]) for each in found] == [("line 1", "a"), ("line 4", "é"), ("line 5", "c")]
    assert [table.read(each.position) for each in found] == [each.row for each in found]


def test_a_file_of_many_rows_is_kept_as_eight_bytes_a_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a", [{"question": f"{i}", "text": "x" * 500} for i in range(2000)])
    source = TableSource(JsonLines(path, ""), None, 0, {}, lambda row: row["question"], None)
    kept = [value for value in vars(source)["_positions"].values()]
    assert sum(array.itemsize * len(array) for array in kept) == 8 * 2000


def test_the_last_read_parquet_row_groups_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": str(i), "when": None, "tags": ["a", "b"], "meta": {"n": i}} for i in range(50)]
    table = ParquetRows(write_parquet(tmp_path / "a", rows), "w")
    assert [found.row for found in table.rows()] == rows
    assert [table.read(i) for i in (49, 0, 13, 14)] == [rows[i] for i in (49, 0, 13, 14)]
    assert len(table._kept) == 4
    monkeypatch.setattr(arrow, "KEPT_BYTES", 1)
    assert table.read(30) == rows[30] and len(table._kept) == 1


def test_types_that_json_lacks_become_text(tmp_path: Path) -> None:
    import datetime
    import decimal

    row = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "raw": b"ab"}
    table = ParquetRows(write_parquet(tmp_path / "a", [row]), "w")
    assert table.read(0) == {"day": "2026-01-02", "price": "1.50", "raw": "YWI="}


@pytest.mark.parametrize(("split", "expected"), [(None, "0 1 2 3 4 5 6 7 8 9 10 11"), ("test", "1 3 5")])
def test_a_directory_saved_by_datasets_is_read_split_by_split(split: str | None, expected: str) -> None:
    table = open_split(SAVED, split, "w")
    found = list(table.rows())
    assert " ".join(str(each.row["n"]) for each in found) == expected
    assert [table.read(each.position) for each in found] == [each.row for each in found]


def test_a_dataset_without_splits_and_with_several_files_is_read_whole(tmp_path: Path) -> None:
    write_saved(tmp_path, [numbers(5), [], numbers(3)])
    table = open_split(tmp_path, None, "w")
    assert [found.row["answer"] for found in table.rows()] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert [table.read(i)["answer"] for i in (4, 5, 7)] == [5, 1, 3]


def write_saved(directory: Path, files: list[list[dict]]) -> None:
    schema = pa.schema([("question", pa.string()), ("answer", pa.int64())])
    names = [f"data-{i:05}-of-{len(files):05}.arrow" for i in range(len(files))]
    for name, rows in zip(names, files, strict=True):
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            stream.write_table(pa.Table.from_pylist(rows, schema))
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (directory / "state.json").write_text(json.dumps(state))


def test_a_datasets_task_trains_on_one_split_and_holds_out_another() -> None:
    source = task_of({"datasets": {"path": str(SAVED), "heldOutSplit": "test"}})
    assert (source.size("train"), source.size("heldOut")) == (12, 3)


# --- errors -------------------------------------------------------------------------------------------------------

LINES = "spec.tasks[0].data.jsonl.path: "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"question": "a", "answer": 1}\n{"question"', "FILE, line 2: not JSON: Input data was truncated; each line"),
        (b'\n[{"question": "a"}]', "FILE, line 2: not a JSON object; each line must be one, like {'question': …}"),
        (b'{"question": "\xe9"}', "FILE, line 1: not UTF-8; save the file as UTF-8"),
        (b"[" * 100_000, "FILE, line 1: not JSON: maximum recursion depth exceeded"),
        (b"", "FILE is empty; give one with rows"),
        (b"\n \n", "FILE is empty; give one with rows"),
        (
            b'{"q": "a", "answer": 1}',
            "FILE, line 1: there is no column 'question'; there are q, answer; name",
        ),
        (b'{"question": null, "answer": 1}', "FILE, line 1: column 'question' holds null; it must hold text or a num"),
        (
            b'{"question": "a"}',
            "FILE, line 1: reward right cannot score the row: there is no column",
        ),
        (
            b'{"question": "a", "answer": []}',
            "FILE, line 1: reward right cannot score the row: column ",
        ),
    ],
)
def test_an_invalid_line_is_reported_with_file_and_line(tmp_path: Path, text: bytes, sentence: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError) as refused:
        task_of({"jsonl": {"path": str(path), "heldOutFraction": 0}}, prompt="{question}")
    assert str(refused.value).startswith(LINES + sentence.replace("FILE", str(path)))
    assert "\n" not in str(refused.value)


def test_a_renamed_column_must_exist_even_if_another_has_the_new_name(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"question": "a", "answer": 1}')
    with pytest.raises(ValueError, match="line 1: there is no column 'zzz'; there are question, answer; name one"):
        task_of({"jsonl": {"path": str(path)}, "columns": {"question": "zzz"}}, prompt="{question}")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("hi", "column 'chat' holds text; it must hold a chat: a list of {role, content}"),
        ([], "column 'chat' holds an empty list; it must hold a chat"),
        ({}, "column 'chat' holds a mapping; it must hold a chat"),
        ([{"role": "user"}], "column 'chat', message 1: must be a mapping of role and content, both text"),
        ([{"role": "user", "content": ["a"]}], "column 'chat', message 1: must be a mapping of role and content"),
        ([{"role": "assistant", "content": "a"}], "column 'chat': the last message is the assistant's; end the chat"),
    ],
)
def test_an_invalid_chat_is_reported_with_file_and_line(tmp_path: Path, value: object, sentence: str) -> None:
    path = write_lines(tmp_path / "a", [{"chat": value}])
    with pytest.raises(ValueError) as refused:
        task_of({"jsonl": {"path": str(path)}}, reward={"url": "http://a"}, messagesColumn="chat")
    assert str(refused.value).startswith(f"{LINES}{path}, line 1: {sentence}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_missing_file_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^spec.tasks\[0\].data.{kind}.path: there is no file /none; correct"):
        task_of({kind: {"path": "/none"}})
    with pytest.raises(ValueError, match=rf"^spec.tasks\[0\].data.{kind}.path: .* is a directory; name a file"):
        task_of({kind: {"path": str(tmp_path)}})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        ValueError, match=rf"^spec.tasks\[0\].data.{kind}.path: .*/pipe is not a regular file; name a file"
    ):
        task_of({kind: {"path": str(tmp_path / "pipe")}})


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a", numbers(3))
    with pytest.raises(ValueError, match=r"^spec.tasks\[0\].data.parquet.path: .*/a cannot be read: Parquet magic"):
        task_of({"parquet": {"path": str(path)}})


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", numbers(300), row_group_size=100)
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^spec.tasks\[0\].data.parquet.path: .*/a cannot be read: "):
        task_of({"parquet": {"path": str(path)}})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"path": "/none"}, "path: there is no directory /none; correct the path"),
        ({"path": str(SAVED.parent)}, f"path: {SAVED.parent} was not written by save_to_disk of the datasets library"),
        ({"path": str(SAVED), "split": "dev"}, f"split: {SAVED} has no split 'dev', but train, test; name one of them"),
        ({"path": str(SAVED), "heldOutSplit": "dev"}, f"heldOutSplit: {SAVED} has no split 'dev', but train, test"),
        (
            {"path": str(SAVED / "test"), "heldOutSplit": "test"},
            f"heldOutSplit: {SAVED / 'test'} holds one dataset without splits, not 'test'; leave the split out",
        ),
    ],
    ids=["no directory", "not saved", "split", "held-out split", "one dataset"],  # the directory's name is random
)
def test_a_directory_that_holds_no_such_split_is_refused(data: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        task_of({"datasets": data})
    assert str(refused.value).startswith(f"spec.tasks[0].data.datasets.{sentence}")


def test_a_task_with_only_held_out_rows_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a", numbers(1) * 3)
    with pytest.raises(ValueError, match=r"all 3 rows of .*/a are held out; lower heldOutFraction"):
        task_of({"jsonl": {"path": str(path), "heldOutFraction": 0.999999}})


def test_evaluating_a_task_without_held_out_rows_is_an_error(tmp_path: Path) -> None:
    source = task_of({"jsonl": {"path": str(write_lines(tmp_path / "a", numbers(3))), "heldOutFraction": 0}})
    with pytest.raises(ValueError, match=r"^spec.*path: no row of .*/a is held out, and the evaluation needs some"):
        source.problem("heldOut", 0)


def test_reading_a_file_that_changed_during_the_run_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a", numbers(3))
    source = task_of({"jsonl": {"path": str(path), "heldOutFraction": 0}})
    with path.open("a") as file:
        file.write('{"question": "new"}\n')
    with pytest.raises(ValueError, match=r"/a was changed while the run reads it; put the file back, or"):
        source.problem("train", 0)


# --- the same data at every start -----------------------------------------------------------------------------------


def test_a_changed_data_file_is_reported(tmp_path: Path) -> None:
    one, two = write_lines(tmp_path / "a", numbers(3)), write_lines(tmp_path / "b", numbers(4))
    files = [("spec.a", one), ("spec.b", two)]
    assert digests.changed(tmp_path, files) == []
    digests.record(tmp_path, files[:1])
    digests.record(tmp_path, files)
    assert digests.changed(tmp_path, files) == []
    two.write_text(two.read_text().replace("3", "5"))  # as long as before
    digests.record(tmp_path, files)
    assert digests.changed(tmp_path, files) == [
        f"spec.b: {two} has changed since this run began; put the file back, or choose another --run-dir"
    ]
