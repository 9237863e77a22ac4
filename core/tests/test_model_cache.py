"""Remote models are downloaded from a server of the Hub's protocol and from a server of S3 (moto), once and whole."""

import errno
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from e2e.fakes.hub import serving_hub
from e2e.fakes.s3 import serving_s3
from rljob.api.model_address import HubModel, S3Model, parse_address
from rljob.protocol import hub_download, model_cache
from rljob.protocol.model_cache import ModelUnavailableError, fetch, find_model

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "tokenizer.json": b"[]"}
UNUSED = {"pytorch_model.bin": b"twice", "onnx/model.onnx": b"other", ".gitattributes": b""}
MODEL = "hf://org/tiny"


@pytest.fixture(scope="module")
def served():
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def hub(served, monkeypatch, tmp_path):
    served.files.clear(), served.revisions.clear(), served.downloads.clear(), served.refused.clear()
    served.token, served.gated = "", False
    for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("RLJOB_MODEL_CACHE", str(tmp_path / "cache"))
    return served


@pytest.fixture(scope="module")
def s3_server():
    with serving_s3() as variables:
        yield variables


@pytest.fixture
def bucket(s3_server, monkeypatch, tmp_path):
    for name, value in (s3_server | {"RLJOB_MODEL_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    files = S3FileSystem(skip_instance_cache=True)
    name = f"models-{re.sub('[^a-z0-9]', '', tmp_path.name.lower())}"
    files.mkdir(name)
    for path, data in (FILES | UNUSED).items():
        files.pipe(f"{name}/tiny/{path}", data)
    return files, f"s3://{name}/tiny"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("source", "meaning"),
    [
        ("hf://Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B", "main")),
        ("hf://a/b_c@refs/pr/1", HubModel("a/b_c", "refs/pr/1")),
        ("s3://my.bucket/a/b c/", S3Model("my.bucket", "a/b c")),
        ("job://hf", None),
        ("models/hf:x", None),
        *(
            (f"hf://{bad}", "ORG/NAME@REVISION")
            for bad in ("", "a", "a/b/c", "a/b@", "a/.b", "a/b\n", "a//b", "a/b@c d")
        ),
        *((f"s3://{bad}", "BUCKET/PREFIX") for bad in ("", "bucket", "bucket/", "B/x", "bucket//x", "bucket/x\n")),
    ],
)
def test_the_form_of_an_address_is_checked(source, meaning):
    if isinstance(meaning, str):
        with pytest.raises(ValueError, match=f"is not the address of a model; write .*{meaning}"):
            parse_address(source)
    else:
        assert parse_address(source) == meaning


def test_a_model_of_the_hub_is_downloaded_once_for_all_jobs_and_processes(hub, tmp_path):
    hub.add("org/tiny", FILES | UNUSED)
    jobs = [tmp_path / "first", tmp_path / "second"]
    failures = []

    def start(storage):
        try:
            fetch(MODEL, storage)
        except (OSError, ValueError) as error:
            failures.append(error)

    for storage in jobs:
        storage.mkdir()
    processes = [threading.Thread(target=start, args=(storage,)) for storage in jobs * 2]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not failures
    assert contents(find_model(MODEL, jobs[0])) == FILES
    assert find_model(MODEL, jobs[0]) == find_model(MODEL, jobs[1])
    assert hub.downloads == dict.fromkeys(FILES, 1)


def test_a_run_keeps_its_commit_when_the_branch_moves_and_needs_no_network_for_it(hub, tmp_path, monkeypatch):
    first = hub.add("org/tiny", FILES)
    fetch(MODEL, tmp_path)
    hub.add("org/tiny", FILES | {"config.json": b'{"new": 1}'})
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    fetch(MODEL, tmp_path)
    assert json.loads((tmp_path / "models.json").read_bytes()) == {MODEL: first}
    assert contents(find_model(MODEL, tmp_path))["config.json"] == b"{}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    shutil.rmtree(tmp_path / "cache")
    assert find_model(MODEL, tmp_path) is None
    fetch(MODEL, tmp_path)
    assert contents(find_model(MODEL, tmp_path))["config.json"] == b"{}"
    other = tmp_path / "other-run"
    other.mkdir()
    fetch(MODEL, other)
    assert contents(find_model(MODEL, other))["config.json"] == b'{"new": 1}'


def test_a_version_with_missing_or_partial_files_is_never_used(hub, tmp_path):
    hub.add("org/tiny", FILES)
    hub.refused.add("model.safetensors")
    with pytest.raises(ValueError, match="refuses access to org/tiny"):
        fetch(MODEL, tmp_path)
    assert find_model(MODEL, tmp_path) is None
    hub.refused.clear()
    fetch(MODEL, tmp_path)
    weights = find_model(MODEL, tmp_path) / "model.safetensors"
    weights.resolve().write_bytes(b"trunc")
    assert find_model(MODEL, tmp_path) is None
    weights.resolve().unlink()
    weights.unlink()
    fetch(MODEL, tmp_path)
    assert contents(find_model(MODEL, tmp_path)) == FILES


def test_a_token_of_the_environment_is_sent(hub, tmp_path, monkeypatch):
    hub.add("org/tiny", FILES)
    hub.token = "hf_secret"
    with pytest.raises(ValueError, match=r"no model org/tiny, or refuses .* \(401\).*spec.downloads.secret"):
        fetch(MODEL, tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(MODEL, tmp_path)
    assert contents(find_model(MODEL, tmp_path)) == FILES


def test_each_refusal_of_the_hub_is_one_sentence(hub, tmp_path, monkeypatch):
    hub.add("org/tiny", FILES)
    with pytest.raises(ValueError, match=rf"^{hub.url} has no model org/none \(404\); correct the name, or .*HF_TOKEN"):
        fetch("hf://org/none", tmp_path)
    with pytest.raises(ValueError, match=r"^org/tiny has no revision 'v9' \(http.*\); correct it after @$"):
        fetch(f"{MODEL}@v9", tmp_path)
    hub.token, hub.gated = "hf_secret", True
    with pytest.raises(ValueError, match=rf"^{hub.url} refuses access to org/tiny \(403\); give a token .*HF_TOKEN"):
        fetch(MODEL, tmp_path)
    hub.token = ""
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as small:
        small.setattr(hub_download.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ModelUnavailableError, match=r"do not fit the disk of .*cache.* make room"):
            fetch(MODEL, tmp_path)
    with monkeypatch.context() as full:

        def write(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(hub_download, "snapshot_download", write)
        with pytest.raises(ModelUnavailableError, match="does not fit the disk of"):
            fetch(MODEL, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelUnavailableError, match=r"^http://127.0.0.1:1 cannot be reached \(.*hubEndpoint$"):
        fetch("hf://org/other", tmp_path)


def test_a_model_in_s3_is_downloaded_whole_and_stays_the_same(bucket, tmp_path, monkeypatch):
    files, source = bucket
    server = os.environ["AWS_ENDPOINT_URL_S3"]
    fetch(source, tmp_path)
    assert contents(find_model(source, tmp_path)) == FILES
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    fetch(source, tmp_path)  # needs no network
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    files.pipe(f"{source}/config.json", b'{"new": 1}')
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match="have changed since the run started; restore them, or start another run"):
        fetch(source, tmp_path)
    files.pipe(f"{source}/config.json", FILES["config.json"])
    fetch(source, tmp_path)
    assert contents(find_model(source, tmp_path)) == FILES


def test_a_download_from_s3_that_ends_in_the_middle_leaves_nothing(bucket, tmp_path, monkeypatch):
    _, source = bucket

    def broken(self, remote, local):
        Path(local[0]).write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(S3FileSystem, "get", broken)
        with pytest.raises(ModelUnavailableError, match="does not fit the disk of"):
            fetch(source, tmp_path)
    assert find_model(source, tmp_path) is None
    assert not list((tmp_path / "cache" / "s3").iterdir())
    fetch(source, tmp_path)
    assert contents(find_model(source, tmp_path)) == FILES


def test_each_refusal_of_s3_is_one_sentence(bucket, tmp_path, monkeypatch):
    _, source = bucket
    for missing in (f"{source}/none", "s3://no-such-bucket/tiny"):
        with pytest.raises(ValueError, match=r"there (is no bucket or prefix|are no objects below) .*correct"):
            fetch(missing, tmp_path)
    with monkeypatch.context() as refused:

        def refuse(*_, **__):
            raise PermissionError("Forbidden")

        refused.setattr(S3FileSystem, "ls", refuse)
        with pytest.raises(ValueError, match=r"S3 refuses access to .*\(Forbidden\).*spec.downloads.secret"):
            fetch(source, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(ModelUnavailableError, match=r"cannot be reached at http://127.0.0.1:1 .*spec.downloads.s3End"):
        fetch(source, tmp_path)
    assert not hasattr(model_cache, "S3FileSystem")  # its import takes long
