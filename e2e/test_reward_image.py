"""The image of the folder that `rljob reward new` makes, built from the image of the rewards: its test passes in it,
and its server scores, as the user of the image."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.test_real_run import THOROUGH
from rljob.api.models import RLJob
from rljob.protocol.score_messages import ScoreItem
from tools.images import engines
from tools.images.__main__ import cache

BASE = os.environ.get("RLJOB_REWARDS_IMAGE", "localhost/rljob-rewards:dev")
TAG = "localhost/good_sum:test"
SPEC = {
    "models": [{"name": "policy", "source": "job://model"}],
    "training": {"steps": 1},
    "tasks": [{"name": "sums", "data": {"jsonl": {"path": "rows.jsonl"}}, "reward": "good-sum"}],
    "rewards": [{"name": "good-sum", "function": "good_sum:reward", "processes": 2}],
    "rollouts": [{"name": "main"}],
}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not THOROUGH, reason="needs the image rljob-rewards in buildah: make images ENGINE=buildah"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new reward, and beside it a folder ``given`` for the container: a job, and the test without the reward."""
    subprocess.run([Path(sys.executable).parent / "rljob", "reward", "new", "good_sum"], cwd=tmp_path, check=True)
    given = tmp_path / "given"
    given.mkdir()
    (tmp_path / "good_sum" / "test_good_sum.py").rename(given / "test_good_sum.py")
    job = RLJob.model_validate({"metadata": {"name": "test"}, "spec": SPEC})
    (given / "job.json").write_text(job.model_dump_json(by_alias=True))
    for path in (tmp_path, given, *given.iterdir()):
        path.chmod(0o755)
    return tmp_path / "good_sum"


@pytest.fixture
def run(folder: Path) -> Iterator[list[str]]:
    """The beginning of a command that runs in the image of ``folder``, with /given."""
    with (cache() / "lock").open("w") as lock:  # of make images
        fcntl.flock(lock, fcntl.LOCK_EX)
        engine = engines.find(cache(), "buildah")
        if not engine.id(BASE):
            pytest.skip(f"there is no image {BASE}; build it with make images ENGINE=buildah")
        try:
            engine.build(engines.Build(folder / "Dockerfile", folder, TAG, arguments={"BASE": BASE}))
            container = engine.output("from", "--pull-never", TAG).strip()
            given = f"{folder.parent / 'given'}:/given:ro"
            yield [*engine.command, "run", "--isolation=chroot", "--volume", given, container, "--"]
        finally:
            engine.output("rm", "--all", check=False)
            engine.output("rmi", TAG, check=False)
            engine.close()


def test_the_test_of_a_new_reward_passes_in_its_image_and_its_server_scores(
    run: list[str], unused_tcp_port: int
) -> None:
    test = subprocess.run([*run, "python", "-m", "pytest", "-p", "no:cacheprovider", "/given"], capture_output=True)
    assert test.returncode == 0 and b"5 passed" in test.stdout, test.stdout + test.stderr
    assert b"uid=65532" in subprocess.run([*run, "id"], capture_output=True, check=True).stdout
    variables = {"JOB": "/given/job.json", "STORAGE": "/given", "NAME": "good-sum", "TOKEN": "secret"}
    words = [f"RLJOB_{name}={value}" for name, value in variables.items()]
    command = [*run, "env", *words, f"RLJOB_LISTEN=127.0.0.1:{unused_tcp_port}", "python", "-m", "rljob.rewards.main"]
    with subprocess.Popen(command) as server:
        try:
            reply = score(f"http://127.0.0.1:{unused_tcp_port}/v1/score", "It is\n2", "3")
            assert [each["reward"] for each in reply.json()["scores"]] == [1.0, 0.0]
        finally:
            server.terminate()


def score(url: str, *completions: str) -> httpx.Response:
    """Return the reply of the server once it listens."""
    items = [ScoreItem(f"g0.{i}", "sums", "", text, "stop", {"answer": 2}) for i, text in enumerate(completions)]
    body = {"items": [{name: getattr(item, name) for name in item.__struct_fields__} for item in items]}
    end = time.monotonic() + 120
    while True:
        try:
            return httpx.post(url, json=body, headers={"Authorization": "Bearer secret"}).raise_for_status()
        except httpx.TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
