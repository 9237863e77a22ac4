"""Names of checkpoints, and the check of weights by header and length."""

import json

import pytest

from rljob.protocol.checkpoint_files import complete_checkpoints, damage, directory_name, read_header, step_of


def safetensors(length=4, cut=0, metadata=None):
    header = {"a": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}
    header |= {"__metadata__": metadata} if metadata else {}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(length)
    return data[: len(data) - cut]


def test_step_and_directory_name_convert_and_temporary_directories_have_no_step():
    for step in (0, 20, 999_999, 1_000_000):
        assert step_of(directory_name(step)) == step
    assert directory_name(20) == "step-000020"
    for name in ("step-000020.tmp-1-ab", "step-20", "step-", "incarnation", "astep-000020"):
        assert step_of(name) is None


def test_a_checkpoint_without_its_state_is_not_complete(tmp_path):
    assert complete_checkpoints(tmp_path / "absent") == {}
    for name, state in (("step-000002", True), ("step-000004", False), ("step-000006.tmp-1-ab", True)):
        (tmp_path / name).mkdir()
        if state:
            (tmp_path / name / "trainer.json").write_text("{}")
    assert complete_checkpoints(tmp_path) == {2: tmp_path / "step-000002"}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (safetensors(), ""),
        (safetensors(metadata={"format": "pt"}), ""),
        (safetensors(length=2000, cut=1), "has 2,073 bytes instead of 2,074"),
        (b"01234567", "does not begin with a header"),
        (b"", "does not begin with a header"),
        ((2).to_bytes(8, "little") + b"[]", "does not begin with a header"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "does not begin with a header"),
    ],
)
def test_damaged_weights_are_recognized_by_header_and_length(tmp_path, data, problem):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert damage(path) == problem


def test_the_header_has_the_metadata_of_the_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(metadata={"format": "pt"}))
    assert read_header(path) == {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
