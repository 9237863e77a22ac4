import errno
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import read_yaml
from rljob.local import find_run
from rljob.local.errors import CliError
from rljob.local.run_directory import RunDirectory


def job(manifest, **changes):
    """Return the manifest's job with changed fields: training__steps=5."""
    for path, text in changes.items():
        here = manifest["spec"]
        *way, last = path.split("__")
        for step in way:
            here = here.setdefault(step, {})
        here[last] = read_yaml(text)
    return resolve(validate(manifest))


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "runs" / "sums")


def test_a_new_directory_contains_the_original_and_the_resolved_manifest(directory, manifest):
    with directory.opened(job(manifest), b"text: as given\n") as resumed:
        assert not resumed
    assert (directory.path / "job.yaml").read_bytes() == b"text: as given\n"
    assert json.loads((directory.path / "job.json").read_bytes())["spec"]["algorithm"]["clipLow"] == 0.2
    with directory.opened(job(manifest), b"") as resumed:
        assert resumed


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": "9"}, "spec.seed: the run in DIR was started with 0, not 9; give it that value, or choose another"),
        (
            {"training__steps": "2"},
            "spec.training.steps: the run in DIR was started with 3, which can only be raised",
        ),
        (
            {"evaluation": "{problems: 8}"},
            'spec.evaluation: the run in DIR was started with null, not {"everySteps": 0,',
        ),
        ({"algorithm__preset": "dr_grpo"}, 'spec.algorithm.preset: the run in DIR was started with "grpo", not "dr_gr'),
        ({"rollouts": "[{name: main}, {name: b}]"}, "spec.rollouts: the run in DIR was started with [{"),
    ],
)
def test_a_change_of_a_field_that_defines_the_run_is_rejected(directory, manifest, changes, sentence):
    with directory.opened(job(manifest), b"before"):
        pass
    files = {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()}
    with pytest.raises(CliError) as caught, directory.opened(job(manifest, **changes), b"after"):
        pass
    assert caught.value.exit_code == 2
    assert caught.value.sentence.startswith(sentence.replace("DIR", str(directory.path)))
    assert {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()} == files


@pytest.mark.parametrize(
    "changes",
    [
        {"training__steps": "4"},
        {"checkpoints__keep": "9"},
        {"checkpoints__everySteps": "1"},
        {"tracking__tensorboard": "false"},
        {"failurePolicy__maxRestarts": "3"},
        {"suspendGraceSeconds": "5.0"},
        {"rollouts": "[{name: main, replicas: {min: 2, max: 3}, nccl: {NCCL_DEBUG: INFO}}]"},
        {"trainer__template": "{spec: {containers: [{name: main, env: [{name: A, value: b}]}]}}"},
        {"storage__size": "1Gi"},
        {"network__allowFrom": "[{name: mine}]"},
        {"scheduling__topology": "{key: rack}"},
        {"managedBy": "mine"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_resumed_run_accepts_new_values_of_other_fields(directory, manifest, changes):
    before = job(manifest)
    with directory.opened(before, b""):
        pass
    after = job(manifest, **changes)
    with directory.opened(after, b"") as resumed:
        assert resumed
    assert directory.job() == after != before


def test_a_directory_is_locked_while_it_is_open(directory, manifest):
    with (
        directory.opened(job(manifest), b""),
        pytest.raises(CliError, match="is in use by another rljob run; wait for it or stop it") as caught,
        RunDirectory(directory.path).opened(job(manifest), b""),
    ):
        pass
    assert caught.value.exit_code == 2


def test_a_directory_with_other_files_is_not_changed(directory, manifest):
    directory.path.mkdir(parents=True)
    (directory.path / "thesis.tex").touch()
    with (
        pytest.raises(CliError, match=r"holds no run but other files \(thesis.tex\); choose another"),
        directory.opened(job(manifest), b""),
    ):
        pass
    assert [file.name for file in directory.path.iterdir()] == ["thesis.tex"]


def test_an_existing_file_is_not_changed(directory, manifest):
    directory.path.parent.mkdir()
    directory.path.write_text("mine")
    with pytest.raises(CliError, match="is not a directory"), directory.opened(job(manifest), b""):
        pass
    nested = RunDirectory(directory.path / "run")
    with pytest.raises(CliError, match="cannot be made: Not a directory"), nested.opened(job(manifest), b""):
        pass


def test_a_manifest_of_another_version_is_refused(directory, manifest):
    with directory.opened(job(manifest), b""):
        pass
    (directory.path / "job.json").write_text('{"spec": {"frobnicate": 1}}')
    with pytest.raises(CliError, match="another version of rljob"), directory.opened(job(manifest), b""):
        pass


def test_tokens_are_created_once_and_readable_by_the_owner_only(directory):
    directory.path.mkdir(parents=True)
    tokens = directory.tokens()
    assert set(tokens) == {"agent", "trainer", "runner", "reward", "environment", "pool", "owner"}
    assert len(set(tokens.values())) == 7
    assert directory.tokens() == tokens
    assert (directory.path / "tokens.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_a_new_directory_belongs_to_its_owner_alone(directory, manifest, umask):
    before = os.umask(umask)
    try:
        with directory.opened(job(manifest), b""):
            assert not directory.made_private
    finally:
        os.umask(before)
    assert mode(directory.path) == 0o700
    assert mode(directory.path.parent) == 0o777 & ~umask, "directories above are made as usual"


@pytest.mark.parametrize("earlier_run", [False, True])
def test_a_directory_that_others_can_read_is_made_private(directory, manifest, earlier_run):
    directory.path.mkdir(parents=True)
    if earlier_run:
        with directory.opened(job(manifest), b""):
            pass
    directory.path.chmod(0o775)
    with directory.opened(job(manifest), b"") as resumed:
        assert directory.made_private and resumed is earlier_run
    assert mode(directory.path) == 0o700


def test_a_directory_for_all_users_is_refused_and_left_as_it_is(directory, manifest):
    directory.path.mkdir(parents=True)
    directory.path.chmod(0o1777)
    for use in (lambda: directory.check(job(manifest)), directory.opened(job(manifest), b"").__enter__):
        with pytest.raises(CliError, match="is shared by all users; choose a --run-dir in it") as caught:
            use()
        assert caught.value.exit_code == 2
    assert mode(directory.path) == 0o1777 and not list(directory.path.iterdir())


def test_a_directory_that_cannot_be_made_private_is_refused(directory, manifest, monkeypatch):
    directory.path.mkdir(parents=True, mode=0o775)

    def refuse(path, mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "chmod", refuse)
    message = "cannot be made private: Operation not permitted; choose another --run-dir"
    with pytest.raises(CliError, match=message), directory.opened(job(manifest), b""):
        pass


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_ports_are_kept_while_they_are_free(directory):
    directory.path.mkdir(parents=True)
    ports = directory.ports(["coordinator", "reward-a"])
    assert len(set(ports.values())) == 2
    assert directory.ports(["coordinator", "reward-a"]) == ports
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports["coordinator"]))
        other.listen()
        again = directory.ports(["coordinator", "reward-a"])
    assert again["reward-a"] == ports["reward-a"]
    assert again["coordinator"] != ports["coordinator"]


def test_a_partially_written_file_is_ignored(directory):
    directory.path.mkdir(parents=True)
    (directory.path / "ports.json").write_text('{"coord')
    (directory.path / "status.json").write_text("")
    assert directory.read_json("ports.json") == {}
    assert directory.status() is None


def test_a_file_system_without_regular_files_is_reported(manifest):
    with pytest.raises(CliError, match=r"^/proc/abc cannot be made: /proc takes no files; choose another --run-dir"):
        RunDirectory(Path("/proc/abc")).check(job(manifest))


def test_a_damaged_manifest_is_not_reported_as_another_version(directory, manifest):
    with directory.opened(job(manifest), b""):
        directory.write("job.json", b"{")
    with pytest.raises(CliError, match=r"job.json is damaged: it is not valid JSON; restore it"):
        directory.job()


def test_an_unreadable_run_is_bad_input(directory, monkeypatch):
    directory.path.mkdir(parents=True)
    monkeypatch.setattr(find_run.os, "access", lambda path, mode: False)
    with pytest.raises(CliError, match="sums cannot be read; ask its owner for the permission") as caught:
        find_run.find(str(directory.path))
    assert caught.value.exit_code == 2
