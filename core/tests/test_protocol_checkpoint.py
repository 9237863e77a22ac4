"""Names of checkpoints, headers of weights, and the record with the digests of all files."""

import json
import os

import blake3
import pytest

from rljob.protocol import checkpoint_record
from rljob.protocol.checkpoint_files import (
    checkpoint_directories,
    directory_name,
    index_name,
    is_complete,
    part_name,
    read_header,
    step_of,
)
from rljob.protocol.checkpoint_record import (
    TrainerState,
    decode_state,
    encode_state,
    find_damage,
    find_unrecorded,
    hash_file,
    read_state_file,
)


def test_step_and_directory_name_convert_and_temporary_directories_have_no_step():
    for step in (0, 20, 999_999, 1_000_000):
        assert step_of(directory_name(step)) == step
    assert directory_name(20) == "step-000020"
    for name in ("step-000020.tmp-1-ab", "step-20", "step-", "incarnation", "astep-000020"):
        assert step_of(name) is None


def test_a_checkpoint_without_its_state_is_not_complete(tmp_path):
    assert checkpoint_directories(tmp_path / "absent") == {}
    for name, state in (("step-000002", True), ("step-000004", False), ("step-000006.tmp-1-ab", True)):
        (tmp_path / name).mkdir()
        if state:
            (tmp_path / name / "trainer.json").write_text("{}")
    found = checkpoint_directories(tmp_path)
    assert {step: is_complete(path) for step, path in found.items()} == {2: True, 4: False}


def test_the_header_has_the_metadata_of_the_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    header = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert read_header(path) == {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


def state(**files):
    return TrainerState(step=4, updates=8, incarnation=2, versions={"torch": "2"}, files=files)


def test_a_record_is_read_as_it_was_written_and_every_flipped_bit_is_noticed():
    written = state(**{"model.safetensors": "ab"})
    content = encode_state(written)
    assert decode_state(content) == written and len(written.digest) == 64
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError):
            decode_state(bytes(flipped))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"x":' + b"[" * 100_000])
def test_a_damaged_or_missing_record_is_named(tmp_path, content):
    with pytest.raises(ValueError, match=f"^{tmp_path}/trainer.json is missing$"):
        read_state_file(tmp_path)
    (tmp_path / "trainer.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/trainer.json is damaged \(.+\)$"):
        read_state_file(tmp_path)


def test_the_first_file_without_its_digest_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_record, "CHUNK_BYTES", 4)
    (tmp_path / "a").write_bytes(b"123456789")
    (tmp_path / "b").write_bytes(b"")
    files = {name: hash_file(tmp_path / name) for name in "ab"}
    assert files["a"] == blake3.blake3(b"123456789").hexdigest()
    assert find_damage(tmp_path, files) == ""
    (tmp_path / "a").write_bytes(b"123456780")
    assert find_damage(tmp_path, files) == "a is damaged (it does not have the digest in trainer.json)"
    (tmp_path / "a").unlink()
    assert find_damage(tmp_path, files) == "a is missing"
    (tmp_path / "a").mkdir()
    assert find_damage(tmp_path, files) == "a cannot be read (Is a directory)"


def test_a_pipe_or_a_device_in_place_of_a_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "a")
    (tmp_path / "trainer.json").symlink_to("/dev/zero")
    assert find_damage(tmp_path, {"a": ""}) == "a cannot be read (it is not a regular file)"
    with pytest.raises(ValueError, match=r"trainer.json cannot be read \(it is not a regular file\)"):
        read_state_file(tmp_path)


def test_a_file_that_the_record_does_not_list_is_reported(tmp_path):
    files = {"model.safetensors": "", "trainer/optimizer.safetensors": ""}
    (tmp_path / "trainer").mkdir()
    for name in (*files, "trainer.json", ".nfs0001"):
        (tmp_path / name).write_bytes(b"")
    assert find_unrecorded(tmp_path, files) == ""
    for name in ("trainer/optimizer.safetensors.index.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"")
        assert find_unrecorded(tmp_path, files) == f"{name} is not in trainer.json: remove it"


def test_a_directory_that_cannot_be_read_is_reported(tmp_path):
    """A process that checks other files of the checkpoint may be the first to notice."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    files = {"model.safetensors": "", "trainer/optimizer.safetensors": ""}
    assert find_unrecorded(tmp_path, files) == "trainer cannot be read (No such file or directory)"


def test_parts_of_a_file_have_the_names_of_transformers():
    assert part_name("model.safetensors", 1, 1) == "model.safetensors"
    assert part_name("model.safetensors", 2, 12) == "model-00002-of-00012.safetensors"
    assert part_name("trainer/optimizer.safetensors", 1, 2) == "trainer/optimizer-00001-of-00002.safetensors"
    assert index_name("model.safetensors") == "model.safetensors.index.json"
