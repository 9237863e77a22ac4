"""Copies of checkpoints in S3 (moto): complete or not there, of one content, and compared when they are read."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from e2e.fakes.s3 import serving_s3
from rljob.api.model_address import S3Model
from rljob.protocol.checkpoint_copies import CopyError, CopyRefusedError
from rljob.protocol.checkpoint_record import TrainerState, encode_state, find_damage, hash_file
from rljob.protocol.s3_checkpoints import S3Checkpoints

RUN, OTHER = "run-0123456789abcdef", "run-ffffffffffffffff"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "trainer/optimizer.safetensors": b"moments"}


@pytest.fixture(scope="module")
def server():
    with serving_s3() as variables:
        yield variables


class Bucket:
    """A bucket, the copies in it, and a directory of checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.files = S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        self.name = f"run-{re.sub('[^a-z0-9]', '', directory.name.lower())}"[:60]
        self.files.mkdir(self.name)
        self.root = f"{self.name}/a/run/{RUN}"
        self.copies = self.of(RUN)
        self.local = directory / "checkpoints"

    def of(self, run: str) -> S3Checkpoints:
        return S3Checkpoints(S3Model(self.name, "a/run"), run=run)

    def write(self, step: int, value: bytes = b"") -> tuple[Path, TrainerState]:
        directory = self.local / f"step-{step:06d}"
        for name, content in FILES.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content + value)
        state = TrainerState(step, step, 1, {}, {name: hash_file(directory / name) for name in FILES})
        (directory / "trainer.json").write_bytes(encode_state(state))
        return directory, state

    def copy(self, step: int, value: bytes = b"") -> TrainerState:
        directory, state = self.write(step, value)
        self.copies.upload(directory, state, state.files)
        self.copies.finish(directory, state, contextlib.nullcontext())
        return state

    def objects(self) -> list[str]:
        return sorted(path.removeprefix(f"{self.root}/") for path in self.files.find(self.root))


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    return Bucket(tmp_path)


def test_a_copy_exists_once_its_record_does_and_is_downloaded_as_it_was(bucket, tmp_path):
    assert bucket.copies.complete() == {}
    directory, state = bucket.write(20)
    bucket.copies.upload(directory, state, ["config.json", "model.safetensors"])
    bucket.copies.upload(directory, state, ["trainer/optimizer.safetensors"])
    assert bucket.copies.complete() == {} and len(bucket.objects()) == 3
    bucket.copies.finish(directory, state, contextlib.nullcontext())
    (copy,) = bucket.copies.complete().values()
    assert (copy.step, copy.name) == (20, f"{RUN}/step-000020-{state.digest[:16]}") and copy.is_of(state.digest)
    assert bucket.objects() == sorted(f"{copy.name}/{name}".partition("/")[2] for name in (*FILES, "trainer.json"))
    (tmp_path / "other").mkdir()
    assert bucket.copies.download(copy, tmp_path / "other") == ""
    (restored,) = (tmp_path / "other").iterdir()
    assert restored.name == "step-000020" and find_damage(restored, state.files) == ""
    assert (restored / "trainer.json").read_bytes() == (directory / "trainer.json").read_bytes()


@pytest.mark.parametrize("name", [*FILES, "trainer.json"])
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_copy_is_not_taken(bucket, tmp_path, name, damage):
    state = bucket.copy(20)
    path = f"{bucket.root}/step-000020-{state.digest[:16]}/{name}"
    bucket.files.rm_file(path)
    if damage == "changed":
        bucket.files.pipe_file(path, b"other")
    if (name, damage) == ("trainer.json", "missing"):
        assert bucket.copies.complete() == {}
        return
    (copy,) = bucket.copies.complete().values()
    (tmp_path / "other").mkdir()
    found = bucket.copies.download(copy, tmp_path / "other")
    assert found.startswith(f"s3://{bucket.root}/step-000020-") and name in found
    assert list((tmp_path / "other").iterdir()) == []


def test_a_copy_replaces_one_of_the_same_step_and_uploads_that_were_given_up(bucket):
    first = bucket.copy(20, b"1")
    directory, given_up = bucket.write(10)
    bucket.copies.upload(directory, given_up, ["config.json"])
    second = bucket.copy(20, b"2")
    assert first.digest != second.digest
    assert {copy.digest for copy in bucket.copies.complete().values()} == {second.digest[:16]}
    assert {path.partition("/")[0] for path in bucket.objects()} == {f"step-000020-{second.digest[:16]}"}
    for step in (30, 40):
        bucket.copy(step)
    bucket.copies.remove([20, 30, 50], contextlib.nullcontext())
    assert bucket.copies.complete().keys() == {40} and len(bucket.objects()) == len(FILES) + 1


def test_runs_with_the_same_address_leave_the_copies_of_each_other_alone(bucket):
    """Two runs that start at the same time with the same uri, and reach the same steps."""
    first, second = bucket.copies, bucket.of(OTHER)
    kept = bucket.copy(20, b"1")
    directory, uploading = bucket.write(40, b"1")
    first.upload(directory, uploading, uploading.files)
    before = bucket.objects()
    bucket.copies = second
    assert second.complete() == {}
    for step in (20, 40):
        bucket.copy(step, b"2")
    second.remove([20, 40], contextlib.nullcontext())
    assert second.complete() == {} and bucket.objects() == before
    directory, _ = bucket.write(40, b"1")
    first.finish(directory, uploading, contextlib.nullcontext())
    assert {step: copy.digest for step, copy in first.complete().items()} == {
        20: kept.digest[:16],
        40: uploading.digest[:16],
    }


def test_copies_of_several_runs_are_read_by_the_digests_of_their_records_only(bucket):
    states = {}
    for run, value in ((RUN, b"1"), (OTHER, b"2")):
        bucket.copies = bucket.of(run)
        states[run] = bucket.copy(20, value)
        everything = bucket.of("")
        if run == RUN:
            assert [copy.run for copy in everything.complete().values()] == [RUN]
    for run, state in states.items():
        (copy,) = everything.complete({20: state.digest}).values()
        assert copy.run == run and copy.is_of(state.digest)
    assert everything.complete({30: states[RUN].digest}) == {}
    sentence = rf"^spec.checkpoints.uri: {everything}/ has checkpoints of 2 runs \({RUN}, {OTHER}\), .*; copy a "
    with pytest.raises(CopyRefusedError, match=sentence):
        everything.complete()


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_a_record_is_written_only_beside_the_files_that_it_names(bucket, damage):
    directory, state = bucket.write(20)
    bucket.copies.upload(directory, state, state.files)
    path = f"{bucket.root}/step-000020-{state.digest[:16]}/model.safetensors"
    bucket.files.rm_file(path)
    if damage == "truncated":
        bucket.files.pipe_file(path, b"weigh")
    sentence = rf"^spec.checkpoints.uri: s3://{path} was deleted or changed during the upload"
    with pytest.raises(CopyError, match=sentence):
        bucket.copies.finish(directory, state, contextlib.nullcontext())
    assert bucket.copies.complete() == {}
    bucket.copies.upload(directory, state, state.files)
    bucket.copies.finish(directory, state, contextlib.nullcontext())
    assert bucket.copies.complete().keys() == {20} and bucket.files.cat_file(path) == b"weights"


def test_the_record_is_deleted_first(bucket, monkeypatch):
    bucket.copy(20)

    def dies(paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(bucket.copies._files, "rm", dies)
    with pytest.raises(KeyboardInterrupt):
        bucket.copies.remove([20], contextlib.nullcontext())
    assert bucket.copies.complete() == {}


def test_a_process_that_is_not_permitted_changes_nothing(bucket):
    @contextlib.contextmanager
    def refused():
        raise PermissionError("superseded")
        yield

    bucket.copy(20)
    directory, state = bucket.write(30)
    bucket.copies.upload(directory, state, state.files)
    with pytest.raises(PermissionError, match="superseded"):
        bucket.copies.finish(directory, state, refused())
    with pytest.raises(PermissionError, match="superseded"):
        bucket.copies.remove([20], refused())
    assert bucket.copies.complete().keys() == {20}


def test_another_process_uploads_again_what_may_be_damaged(bucket):
    state = bucket.copy(20)
    path = f"{bucket.root}/step-000020-{state.digest[:16]}/config.json"
    bucket.files.pipe_file(path, b"[]")
    bucket.copies = bucket.of(RUN)
    bucket.copy(20)
    assert bucket.files.cat_file(path) == b"{}"
    directory, _ = bucket.write(20)
    bucket.files.rm_file(path)
    bucket.copies.upload(directory, state, state.files)
    assert bucket.files.cat_file(path) == b"{}", "also this process, if it is gone"


def test_an_object_whose_name_leaves_its_copy_is_ignored(bucket, tmp_path):
    state = bucket.copy(20)
    bucket.files.pipe_file(f"{bucket.root}/step-000020-{state.digest[:16]}/../../../escaped", b"x")
    (copy,) = bucket.copies.complete().values()
    assert sorted(copy.files) == sorted([*FILES, "trainer.json"])
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert bucket.copies.download(copy, tmp_path / "a" / "b") == "" and not (tmp_path / "escaped").exists()


def test_each_refusal_is_one_sentence(bucket, monkeypatch):
    missing = S3Checkpoints(S3Model("no-such-bucket", "run"), run=RUN)
    directory, state = bucket.write(20)
    sentence = "^spec.checkpoints.uri: there is no bucket or prefix s3://no-such-bucket/run/; correct it$"
    with pytest.raises(CopyRefusedError, match=sentence):
        missing.upload(directory, state, state.files)
    with pytest.raises(CopyRefusedError, match=sentence):
        missing.complete()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for call in ("complete", "remove"):
        copies = bucket.of(RUN)
        arguments = ([20], contextlib.nullcontext()) if call == "remove" else ()
        with pytest.raises(CopyError, match=r"cannot be reached at http://127.0.0.1:1 .*spec.downloads.s3Endpoint"):
            getattr(copies, call)(*arguments)
