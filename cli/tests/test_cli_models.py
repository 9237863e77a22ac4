"""export, evaluate and top."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import typer
from s3fs import S3FileSystem

from cli.tests.fakes.launcher import SUCCEEDED, status
from core.tests.checkpoint_ledger import keep_checkpoints
from e2e.fakes.fork_server import rljob_command
from e2e.fakes.s3 import empty_bucket, serving_s3
from rljob.api.errors import ManifestError
from rljob.api.job_status import Metric, Queue
from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.cli import ledger
from rljob.local import checkpoints, evaluation
from rljob.local.errors import CliError
from rljob.local.process_usage import ProcessUsageMeter
from rljob.local.run_directory import RunDirectory
from rljob.protocol.checkpoint_copies import open_copies
from rljob.protocol.checkpoint_files import is_complete
from rljob.protocol.checkpoint_record import TrainerState, encode_state, hash_file, read_state_file
from rljob.protocol.run_status import ComponentStatus, encode_status
from rljob.remote import export as remote_export
from rljob.remote.coordinator_api import CoordinatorUnavailableError


@pytest.fixture
def run(manifest, tmp_path):
    """A run directory with checkpoints of steps 2 and 10, one that is not complete, and one that the ledger does not
    keep."""
    directory = RunDirectory(tmp_path / "run")
    with directory.opened(resolve(validate(manifest)), b""):
        pass
    digests = {}
    for step in (2, 10, 12, 13):
        path = directory.path / f"checkpoints/step-{step:06d}"
        (path / "trainer").mkdir(parents=True)
        files = ("config.json", "model.safetensors", "tokenizer.json", "trainer/optimizer")
        for name in files:
            (path / name).write_text(f'"{name} of {step}"')
        state = TrainerState(step, step, 1, {}, {name: hash_file(path / name) for name in files})
        (path / "trainer.json").write_bytes(encode_state(state))
        digests[step] = state.digest
    del digests[13]
    keep_checkpoints(directory.path, digests)
    (directory.path / "checkpoints/step-000012/trainer.json").unlink()
    (directory.path / "checkpoints/step-000014.tmp-1").mkdir()
    return directory


def names(path):
    return sorted(file.name for file in path.iterdir())


def test_the_newest_complete_checkpoint_is_exported_without_the_trainers_state(run, tmp_path):
    checkpoint = checkpoints.find(run, None)
    assert checkpoint.step == 10
    checkpoints.export(checkpoint, tmp_path / "out/model")
    assert names(tmp_path / "out") == ["model"]
    assert names(tmp_path / "out/model") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "out/model/config.json").read_text() == '"config.json of 10"'


def test_an_empty_destination_is_allowed_and_a_full_one_is_not_changed(run, tmp_path):
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "thesis.tex").write_text("mine")
    checkpoint = checkpoints.find(run, 2)
    checkpoints.export(checkpoint, empty)
    assert len(names(empty)) == 3
    with pytest.raises(CliError, match="full is not empty; give a directory") as caught:
        checkpoints.export(checkpoint, full)
    assert caught.value.exit_code == 2
    assert names(full) == ["thesis.tex"]
    with pytest.raises(
        CliError, match=r"thesis.tex/model cannot be created: (File exists|Not a directory); give another"
    ):
        checkpoints.export(checkpoint, full / "thesis.tex/model")


def test_a_destination_that_is_not_empty_is_rejected_first(rljob, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    for where in ([], ["-n", "team-a", "--context", "nowhere"]):
        code, out, err = rljob("export", *where, "no-run", tmp_path)
        assert (code, out) == (2, "")
        assert err == f"rljob: {tmp_path} is not empty; give a directory that does not exist yet\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "trainer.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, name, damage):
    checkpoint = checkpoints.find(run, 10)
    path = checkpoint.path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncated" else bytes([content[0] ^ 1]) + content[1:])
    word = "missing" if damage == "missing" else "damaged"
    with pytest.raises(CliError, match=rf"^{path} is {word}.*; give another --step: 2$") as caught:
        checkpoints.export(checkpoint, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_run_is_neither_exported_nor_evaluated(run, tmp_path):
    good, other = checkpoints.find(run, 10), checkpoints.find(run, 2)
    shutil.rmtree(good.path)
    shutil.copytree(other.path, good.path)  # consistent with its own record
    sentence = rf"^{good.path}/trainer.json does not have the digest in the ledger; give another --step: 2$"
    for use in (lambda: checkpoints.export(good, tmp_path / "out"), lambda: evaluation.evaluated_model(run, good)):
        with pytest.raises(CliError, match=sentence) as caught:
            use()
        assert caught.value.exit_code == 2
    assert names(tmp_path) == ["run"] and not any((run.path / "evaluations").iterdir())


def test_an_evaluated_model_is_copied_again_if_it_is_damaged_or_the_checkpoint_is_another(run):
    checkpoint = checkpoints.find(run, 10)
    model = evaluation.evaluated_model(run, checkpoint)
    assert model == run.path / f"evaluations/model-000010-{checkpoint.digest[:12]}"
    intact = model.stat().st_ino
    assert evaluation.evaluated_model(run, checkpoint).stat().st_ino == intact, "the copy is used again"
    (model / "model.safetensors").write_text("damaged")
    assert evaluation.evaluated_model(run, checkpoint) == model
    assert (model / "model.safetensors").read_text() == '"model.safetensors of 10"'
    (model / "model.safetensors.index.json").write_text("{}")  # a reader of the model would obey this index
    assert evaluation.evaluated_model(run, checkpoint) == model
    assert names(model) == ["config.json", "model.safetensors", "tokenizer.json"]
    state = TrainerState(10, 10, 2, {}, checkpoints.recorded_files(checkpoint))  # written again by another incarnation
    (checkpoint.path / "trainer.json").write_bytes(encode_state(state))
    keep_checkpoints(run.path, {10: state.digest})
    assert evaluation.evaluated_model(run, checkpoints.find(run, None)) != model


@pytest.fixture
def copied_run(run, monkeypatch):
    """The run with copies of steps 2 and 10 in S3; the directory of step 10 is lost."""
    with serving_s3() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        empty_bucket("bucket")
        job = json.loads((run.path / "job.json").read_bytes())
        job["spec"]["checkpoints"]["uri"] = "s3://bucket/run"
        (run.path / "job.json").write_text(json.dumps(job))
        copies = open_copies(run.job().spec, "run-0123456789abcdef")
        for step in (2, 10):
            checkpoint = checkpoints.find(run, step).path
            state = read_state_file(checkpoint)
            copies.upload(checkpoint, state, state.files)
            copies.finish(checkpoint, state, contextlib.nullcontext())
        shutil.rmtree(run.path / "checkpoints/step-000010")
        yield run


def test_a_checkpoint_that_is_only_in_s3_is_exported_evaluated_and_audited(copied_run, tmp_path):
    lost = copied_run.path / "checkpoints/step-000010"
    checkpoint = checkpoints.find(copied_run, None)
    assert (checkpoint.step, checkpoint.path, checkpoint.others) == (10, lost, [2])
    checkpoints.export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == '"config.json of 10"'
    model = evaluation.evaluated_model(copied_run, checkpoint)
    assert evaluation.evaluation_job(copied_run.job(), model, copied_run.path, None).spec.checkpoints.uri is None
    for step in (2, 10):
        shutil.rmtree(copied_run.path / f"checkpoints/step-{step:06d}")
    with pytest.raises(typer.Exit):
        ledger.audit(str(copied_run.path))
    assert is_complete(lost) and is_complete(lost.with_name("step-000002"))


def test_a_copy_is_downloaded_only_when_it_is_the_runs_and_the_run_is_not_in_use(copied_run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "running", lambda self: True)
        assert checkpoints.find(copied_run, None).step == 2, "the trainer may be removing that of step 10"
    files = S3FileSystem(skip_instance_cache=True)
    (model,) = (
        path for path in files.find("bucket/run") if "step-000010" in path and path.endswith("model.safetensors")
    )
    files.pipe_file(model, b"damaged")
    with pytest.raises(CliError, match=rf"^s3://{model} is damaged .*; give another --step: 2") as caught:
        checkpoints.find(copied_run, 10)
    assert caught.value.exit_code == 2
    keep_checkpoints(copied_run.path, {10: "of another lineage"})
    with pytest.raises(CliError, match="there is no checkpoint of step 10; there are 2"):
        checkpoints.find(copied_run, 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    with pytest.raises(CliError, match=r"cannot be reached at http://127.0.0.1:1 ") as caught:
        checkpoints.find(copied_run, 2)
    assert caught.value.exit_code == 1


class Coordinator:
    """Of a job in a cluster: its list of checkpoints, or None if it has gone."""

    def __init__(self, listed):
        self._listed = listed

    def ask(self, path, kind):
        if self._listed is None:
            raise CoordinatorUnavailableError("its coordinator has gone")
        return msgspec.convert(self._listed, kind), None


def remote_job(uri, listed):
    spec = {"checkpoints": {"uri": uri} if uri else {}, "downloads": {"s3Endpoint": os.environ["AWS_ENDPOINT_URL_S3"]}}
    return SimpleNamespace(name="sums", body={"spec": spec}, coordinator=Coordinator(listed))


def lost(step, record):
    """A checkpoint that is not in the storage of the job."""
    return {"step": step, "files": {}, "digests": {}, "record": record}


def test_a_job_in_a_cluster_exports_from_s3_what_its_storage_lacks(copied_run, tmp_path, monkeypatch):
    record = {step: kept.digest for step, kept in checkpoints._ledger_checkpoints(copied_run).items()}
    uri = "s3://bucket/run"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # spec.downloads.s3Endpoint is the address
    job = remote_job(uri, [lost(2, record[2]), lost(10, record[10])])
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    assert remote_export.export(job, tmp_path / "new/model", None) == 10
    assert names(tmp_path / "new") == ["model"]
    assert names(tmp_path / "new/model") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "new/model/config.json").read_text() == '"config.json of 10"'
    assert remote_export.export(job, tmp_path / "old", 2) == 2


def test_copies_of_another_run_at_the_same_address_are_not_exported(copied_run, tmp_path):
    files = S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    other = "run-ffffffffffffffff"
    files.copy("bucket/run/run-0123456789abcdef", f"bucket/run/{other}", recursive=True)
    assert checkpoints.find(copied_run, None).step == 10
    (record,) = (path for path in files.find(f"bucket/run/{other}") if "step-000010" in path and "trainer.json" in path)
    files.copy(record.rpartition("/")[0], f"bucket/run/{other}/step-000020-{'0' * 16}", recursive=True)
    assert checkpoints.find(copied_run, None).step == 10
    with pytest.raises(CliError, match=rf"has checkpoints of 2 runs \(run-0123456789abcdef, {other}\)"):
        remote_export.export(remote_job("s3://bucket/run", None), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_job_whose_coordinator_has_gone_exports_from_s3(copied_run, tmp_path):
    assert remote_export.export(remote_job("s3://bucket/run", None), tmp_path / "out", None) == 10
    with pytest.raises(CoordinatorUnavailableError, match="its coordinator has gone"):
        remote_export.export(remote_job(None, None), tmp_path / "none", None)


@pytest.mark.parametrize("uri", ["s3://bucket/run", None])
def test_a_copy_of_another_checkpoint_is_not_exported(copied_run, tmp_path, uri):
    job = remote_job(uri, [lost(10, "0" * 64)])
    with pytest.raises(CliError, match="sums has no checkpoint yet"):
        remote_export.export(job, tmp_path / "out", None)
    stored = {"step": 2, "files": {}, "digests": {}}
    with pytest.raises(CliError, match="there is no checkpoint of step 10; there are 2"):
        remote_export.export(remote_job(uri, [stored, lost(10, "0" * 64)]), tmp_path / "out", 10)


def test_a_damaged_copy_is_not_exported(copied_run, tmp_path):
    files = S3FileSystem(skip_instance_cache=True)
    (model,) = (path for path in files.find("bucket/run") if "step-000010" in path and path.endswith("safetensors"))
    files.pipe_file(model, b"damaged")
    with pytest.raises(CliError, match=rf"^s3://{model} is damaged .*; give another --step: 2"):
        remote_export.export(remote_job("s3://bucket/run", None), tmp_path / "out", None)
    assert not list(tmp_path.glob("*out*"))


def test_a_file_is_no_place_for_an_export(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CliError, match="file is a file; give a directory"):
        checkpoints.export(checkpoints.find(run, 10), tmp_path / "file")


@pytest.mark.parametrize("target", ["empty", "absent", "file", "link"])
def test_a_symbolic_link_is_no_destination(rljob, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(target)
    for where in ([], ["-n", "team-a", "--context", "nowhere"]):
        code, out, err = rljob("export", *where, "no-run", "link")
        assert (code, out) == (2, "")
        assert err == "rljob: link is a symbolic link; give a directory that does not exist yet\n"
    assert names(tmp_path) == ["empty", "file", "link"]


@pytest.mark.parametrize("length", [250, 300])
@pytest.mark.parametrize("named", [True, False])
def test_a_destination_with_a_name_that_is_too_long_is_one_sentence(run, rljob, tmp_path, monkeypatch, length, named):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/sums").symlink_to(run.path)
    monkeypatch.chdir(tmp_path)
    destination = length * "x"
    code, out, err = rljob("export", *["sums"] * named, destination)
    assert (code, out) == (2, "")
    assert err == f"rljob: {destination} cannot be created: File name too long; give another directory\n"


def test_a_run_with_a_name_that_is_too_long_does_not_exist(rljob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = rljob("export", 300 * "x", "model")
    assert (code, out) == (2, "") and err.startswith(f"rljob: there is no run '{300 * 'x'}': give a run directory")


def test_a_destination_that_another_program_creates_meanwhile_is_one_sentence(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(CliError, match=r"^out cannot be created: Not a directory; give another directory$") as caught,
        checkpoints.new_directory(Path("out")),
    ):
        (tmp_path / "out").symlink_to("run")
    assert caught.value.exit_code == 2
    assert names(tmp_path) == ["out", "run"]


@pytest.mark.parametrize("name", ["*", "?", "[m]"])
def test_an_export_removes_only_what_an_export_of_the_same_name_has_left(run, tmp_path, name):
    for other in ("m", name):
        (tmp_path / f".{other}.partial-killed").mkdir()
    checkpoints.export(checkpoints.find(run, 2), tmp_path / name)
    assert names(tmp_path) == sorted([".m.partial-killed", name, "run"])


def test_an_export_that_fails_half_way_leaves_nothing(run, tmp_path, monkeypatch):
    checkpoint = checkpoints.find(run, 2)
    out = tmp_path / "out"
    out.mkdir()
    (out / ".model.partial-killed").mkdir()
    copied = []

    def copy(source, target):
        copied.append(source)
        if len(copied) == 2:
            raise OSError(28, "No space left on device")
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(checkpoints.shutil, "copyfile", copy)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.export(checkpoint, out / "model")
    assert names(out) == []


def test_a_device_in_place_of_a_file_is_not_exported(run, tmp_path):
    checkpoint = checkpoints.find(run, 10)
    (checkpoint.path / "config.json").unlink()
    (checkpoint.path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CliError, match=r"step-000010/config\.json is not a regular file; give another --step: 2"):
        checkpoints.export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["run"]


def test_a_missing_checkpoint_is_named(run, tmp_path):
    with pytest.raises(CliError, match="there is no checkpoint of step 12; there are 2, 10"):
        checkpoints.find(run, 12)
    with pytest.raises(CliError, match="has no checkpoint yet"):
        checkpoints.find(RunDirectory(tmp_path / "none"), None)


def derived(run, manifest, problems=None, *overrides):
    return evaluation.evaluation_job(
        resolve(validate(manifest)), run.path / "checkpoints/step-000010", run.path, problems, overrides
    )


def test_a_checkpoint_is_evaluated_as_a_job_of_its_own_that_trains_nothing(run, manifest):
    spec = manifest["spec"]
    spec["evaluation"] = {"everySteps": 5, "engines": "dedicated"}
    spec["rollouts"].append({"name": "judges", "purpose": "evaluation"})
    spec["tasks"].append({"name": "own", "data": {"jsonl": {"path": "job://rows.jsonl"}}, "reward": "match"})
    spec["rewards"].append({"name": "match", "builtin": "exact_match"})
    spec["tasks"][1]["prompt"] = "{question} job://stays"
    job = derived(run, manifest, 7).spec
    assert job.initializer is None
    assert [model.source for model in job.models] == [f"{run.path}/checkpoints/step-000010"]
    assert job.training.steps == 0
    assert (job.evaluation.problems, job.evaluation.engines, job.evaluation.tasks) == (7, "shared", ["sums", "own"])
    assert [pool.name for pool in job.rollouts] == ["main"]
    assert job.tasks[1].data.jsonl.path == f"{run.path}/rows.jsonl"
    assert job.tasks[1].prompt == "{question} job://stays"
    assert derived(run, manifest, None, "spec.evaluation.temperature=0.5").spec.evaluation.temperature == 0.5
    with pytest.raises(ManifestError, match=r"spec.evaluation.problems: must be at least 1"):
        derived(run, manifest, 0)


def test_a_checkpoint_is_evaluated_without_reference_and_teacher(run, manifest):
    manifest["spec"]["models"].append({"name": "big", "source": "job://big"})
    manifest["spec"]["algorithm"] = {"preset": "distillation", "teachers": [{"model": "big"}], "klCoefficient": 0.1}
    job = derived(run, manifest).spec
    assert [model.name for model in job.models] == ["policy"]
    assert not job.algorithm.teachers and job.algorithm.kl_coefficient is None


def test_a_job_without_evaluation_is_evaluated_all_the_same(run, manifest):
    assert derived(run, manifest).spec.evaluation.problems == 256


def test_the_same_evaluation_has_one_directory_and_another_its_own(run, manifest):
    first, other = resolve(derived(run, manifest, 8)), resolve(derived(run, manifest, 9))
    place = evaluation.evaluation_path(run, 10, first)
    assert place == run.path / "evaluations/step-000010"
    with RunDirectory(place).opened(first, b""):
        pass
    assert evaluation.evaluation_path(run, 10, first) == place
    assert evaluation.evaluation_path(run, 10, other) == run.path / "evaluations/step-000010-2"


def test_top_shows_what_each_component_takes_and_does(launcher):
    agent = ComponentStatus("agent", "main-7f3a", "ready", 1, running=12, waiting=3)
    metrics = [Metric("seconds_training", 41.0), Metric("tokens_per_second", 5000.0)]
    launcher.answer(status(components=[agent], queues=[Queue("groups_open", 17)], metrics=metrics))
    process = launcher.start()
    launcher.wait_for("run", "Running")
    code, out, err = launcher.rljob("top", launcher.directory)
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["trainer"][0] == "running"
    assert int(lines["trainer"][2]) > 0  # MiB
    assert lines["runner"][4:] == ["2", "0"]  # it has a child in a session of its own
    assert lines["main-7f3a"] == ["ready", "12", "3", "1"]
    assert lines["groups_open"] == ["17"]
    assert lines["seconds"] == ["training", "41"]
    code, out, _ = launcher.rljob("top", launcher.directory, "-o", "json", "--count", "2", "--seconds", "0.1")
    frames = [json.loads(line) for line in out.splitlines()]
    assert len(frames) == 2
    assert {component["name"] for component in frames[1]["components"] if component["memory"] > 0} == {
        "coordinator",
        "runner",
        "trainer",
    }
    launcher.answer(SUCCEEDED)
    process.communicate(timeout=100)
    code, out, err = launcher.rljob("top", launcher.directory)
    assert (code, out) == (2, "")
    assert err == f"rljob: the run in {launcher.directory} has ended: succeeded; rljob status shows it\n"


def test_a_meter_counts_the_processor_time_between_two_readings(tmp_path, monkeypatch):
    seconds = iter([10.0, 11.5])
    times = iter([100.0, 100.0, 103.0])
    monkeypatch.setattr("rljob.local.process_usage.time.monotonic", lambda: next(times))
    monkeypatch.setattr("rljob.local.process_usage._cpu_and_memory", lambda entry: (next(seconds), 1 << 20))
    monkeypatch.setattr(
        "rljob.local.process_usage.process_cleanup.process_marks",
        lambda: {7: f"{tmp_path}:trainer:", 8: "/another/run:trainer:"},
    )
    meter = ProcessUsageMeter(tmp_path)
    meter.read()
    (usage,) = meter.read().values()
    assert (usage.processor, usage.memory, usage.processes) == (0.5, 1 << 20, 1)


def test_an_evaluation_prints_its_results_by_task(run, tmp_path):
    results = json.loads(encode_status(SUCCEEDED))["evaluations"]
    place = run.path / "evaluations/step-000010"
    code = (
        "import sys; from unittest import mock\n"
        "from rljob.cli import checkpoint_commands as commands; from rljob.cli.main import main\n"
        "from rljob.local.run_directory import RunDirectory; from rljob.protocol.run_status import decode_status\n"
        f"status = decode_status(open({str(tmp_path / 'status.json')!r}, 'rb').read())\n"
        "def run_job(job, manifest, where, screen): screen.note('it runs')\n"
        "with mock.patch.object(commands, 'run_job', run_job), mock.patch.object(commands.job_checks, 'prepare',\n"
        "    lambda job, where, warn: job), mock.patch.object(RunDirectory, 'status', lambda self: status):\n"
        "    main()\n"
    )
    (tmp_path / "status.json").write_bytes(encode_status(SUCCEEDED))
    (tmp_path / "evaluate.py").write_text(code)

    def evaluate(*options):
        process = rljob_command([tmp_path / "evaluate.py", "evaluate", run.path, *options], {})
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "it runs\n")
        return out

    assert [line.split() for line in evaluate().splitlines()] == [
        ["step", "10", "accuracy", "mean", "reward", "problems"],
        ["sums", "0.250", "0.250", "1,024"],
        ["sums", "0.800", "0.800", "1,024"],
    ]
    (model,) = (run.path / "evaluations").glob("model-000010-*")
    assert names(model) == ["config.json", "model.safetensors", "tokenizer.json"]
    data = json.loads(evaluate("-o", "json", "--step", "10"))
    assert data == {"step": 10, "directory": str(place), "results": results}


@pytest.mark.parametrize("name", ["sums", "runs/sums"])
def test_the_name_of_a_run_is_no_destination(run, rljob, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/sums").symlink_to(run.path)
    code, out, err = rljob("export", name)
    assert (code, out) == (2, "")
    assert err == f"rljob: {name} is a run; give a destination too, for example: rljob export {name} model/\n"
    assert names(tmp_path) == ["run", "runs"]


def test_a_misspelt_run_is_no_destination_and_another_name_is(run, rljob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/sums").symlink_to(run.path)
    code, out, err = rljob("export", "sum")
    assert (code, out) == (2, "") and "there is no run 'sum'" in err and "rljob export sums DEST" in err
    code, out, err = rljob("export", "sum/")
    assert (code, err) == (0, "") and out == f"sum/: the model of step 10 of the run in {tmp_path / 'runs/sums'}\n"
    assert rljob("export", "model")[0] == 0
    assert names(tmp_path) == ["model", "run", "runs", "sum"]
