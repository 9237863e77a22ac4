"""A ledger belongs to one job, and to one coordinator at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from world import manifest

from rljob.api.models import RLJob
from rljob.coordinator import disk_space
from rljob.coordinator.job_match import check_same_job
from rljob.ledger.store import Store
from rljob.ledger.writer import LedgerWriter

Body = dict[str, Any]


def written(name: str = "sums", **spec: Any) -> RLJob:
    """Return a manifest without expanded presets, as the coordinator receives it."""
    body = manifest().spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    body |= {"algorithm": {"preset": "grpo"}} | spec
    return RLJob.model_validate({"metadata": {"name": name}, "spec": body})


def start(storage: Path, manifest: RLJob) -> None:
    """Check and record the job as the start of a coordinator does."""
    store = LedgerWriter(storage)
    try:
        check_same_job(store, manifest)
        store._commit(store._queue)
    finally:
        store.close()


TRAINING = {"steps": 4, "promptsPerStep": 2, "samplesPerPrompt": 2, "maxStaleness": 1}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"seed": 77}, r"^spec\.seed: the ledger in .* holds the run of RLJob sums, .* started with 3, not 77; give"),
        (
            {"models": [{"name": "policy", "source": "job://another"}]},
            r'^spec\.models\[0\]\.source: .*"job://model", not "job://another"',
        ),
        ({"algorithm": {"preset": "dr_grpo"}}, r'^spec\.algorithm\.preset: .*"grpo", not "dr_grpo"'),
        ({"training": TRAINING | {"maxStaleness": 2}}, r"^spec\.training\.maxStaleness: "),
        ({"training": TRAINING | {"steps": 3}}, r"^spec\.training\.steps: .* with 4, which can only be raised"),
        ({"weightSync": {"timeoutSeconds": 61}}, r"^spec\.weightSync\.timeoutSeconds: .* 60\.0, not 61\.0"),
        ({"rollouts": [{"name": "main", "maxConcurrency": 8}]}, r"^spec\.rollouts\[0\]\.maxConcurrency: "),
    ],
)
def test_the_ledger_of_another_job_is_rejected_with_the_field_that_differs(
    tmp_path: Path, changed: Body, sentence: str
) -> None:
    start(tmp_path, written())
    with pytest.raises(ValueError, match=sentence):
        start(tmp_path, written("other", **changed))
    start(tmp_path, written())


@pytest.mark.parametrize(
    "changed",
    [
        {"training": TRAINING | {"steps": 9}},
        {"checkpoints": {"everySteps": 1, "keep": 9}},
        {"failurePolicy": {"maxRestarts": 1}},
        {"rollouts": [{"name": "main", "maxConcurrency": 4, "replicas": {"min": 2, "max": 3}}]},
        {"tracking": {"tensorboard": False}},
        {"weightSync": {"timeoutSeconds": 60}},
    ],
)
def test_mutable_fields_may_change_under_a_ledger(tmp_path: Path, changed: Body) -> None:
    start(tmp_path, written())
    start(tmp_path, written("of-another-name", **changed))


def test_steps_that_have_grown_do_not_shrink_again(tmp_path: Path) -> None:
    start(tmp_path, written())
    start(tmp_path, written(training=TRAINING | {"steps": 9}))
    with pytest.raises(ValueError, match="with 9, which can only be raised; 8 is lower"):
        start(tmp_path, written(training=TRAINING | {"steps": 8}))


def test_entries_in_another_order_are_the_same_job(tmp_path: Path) -> None:
    pools = [{"name": "main"}, {"name": "more"}]
    start(tmp_path, written(rollouts=pools))
    start(tmp_path, written(rollouts=pools[::-1]))


def test_a_ledger_without_a_job_is_assigned_to_the_first_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.db.execute("INSERT INTO groups VALUES (0, 'train', 0, 'sums', 0, 0, 0, NULL, 0, 1)")
    store.close()
    start(tmp_path, written())
    with pytest.raises(ValueError, match=r"spec\.seed"):
        start(tmp_path, written(seed=77))


def change_recorded_spec(storage: Path, change: Any) -> None:
    """Change the spec that is recorded in a ledger."""
    store = Store(storage)
    known = json.loads(store.query("SELECT value FROM meta WHERE key = 'job'")[0][0])
    change(known["spec"])
    store.db.execute("UPDATE meta SET value = ? WHERE key = 'job'", (json.dumps(known),))
    store.close()


def test_fields_of_another_version_are_ignored(tmp_path: Path) -> None:
    start(tmp_path, written())
    change_recorded_spec(tmp_path, lambda spec: spec.pop("weightSync"))  # from a version without this field
    start(tmp_path, written())
    change_recorded_spec(tmp_path, lambda spec: spec.update(ofANewerVersion=1))
    with pytest.raises(ValueError, match=r"spec\.seed"):
        start(tmp_path, written(seed=77))
    start(tmp_path, written())


COMMAND = [sys.executable, "-m", "rljob.coordinator.main"]


def environment(place: Path, manifest: RLJob) -> dict[str, str]:
    """Return the environment variables of a coordinator process."""
    (place / "storage").mkdir()
    (place / "tokens.json").write_text("{}")
    (place / "job.json").write_text(manifest.model_dump_json(by_alias=True, exclude_defaults=True))
    return os.environ | {
        "RLJOB_JOB": str(place / "job.json"),
        "RLJOB_STORAGE": str(place / "storage"),
        "RLJOB_TOKENS": str(place / "tokens.json"),
    }


def test_a_coordinator_that_cannot_start_logs_one_message(tmp_path: Path) -> None:
    variables = environment(tmp_path, written(seed=77))
    start(tmp_path / "storage", written())
    ended = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "ERROR root: spec.seed: the ledger in" in ended.stderr
    held = Store(tmp_path / "storage")
    ended = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=60)
    held.close()
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "is in use by another coordinator; wait until" in ended.stderr


def test_a_coordinator_in_a_cluster_waits_for_disk_space_until_sigterm(tmp_path: Path) -> None:
    pod = {"RLJOB_NAMESPACE": "ns", "RLJOB_JOB_NAME": "sums", "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    limited = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "bash", *COMMAND]  # no file may be larger than 1 MiB
    with subprocess.Popen(
        limited, env=environment(tmp_path, written()) | pod, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "is full: make room there; waiting for 16 MiB" in process.stderr.readline()
        process.terminate()
        assert process.wait(60) == 0
    assert not (tmp_path / "storage" / "ledger.sqlite").exists()


async def test_a_coordinator_in_a_cluster_waits_for_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded"), None]
    waits: list[float] = []

    def allocate(descriptor: int, start: int, length: int) -> None:
        if answer := answers.pop(0):
            raise answer

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(disk_space.os, "posix_fallocate", allocate)
    monkeypatch.setattr(disk_space.asyncio, "sleep", wait)
    await disk_space.wait_for_space(tmp_path)
    assert waits == [1.0, 2.0] and not answers
    assert caplog.text.count("is full: make room there") == 1
    assert list(tmp_path.iterdir()) == []
