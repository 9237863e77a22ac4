"""A stopped and resumed run of the real trainer gives the same result, bit for bit, as an uninterrupted run.

Also if the newest checkpoint is damaged meanwhile: the one before it is used; and if all are lost, with copies in S3.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from e2e.fakes.harness import COMMANDS, IMPORTS, TOKENS, Harness, make_job, run_harness
from e2e.fakes.s3 import empty_bucket, serving_s3
from e2e.fakes.tiny import TinyEngine, write_tiny_model
from e2e.test_resume import suspend
from rljob.api.models import RLJob
from rljob.ledger.audit import audit
from rljob.ledger.reader import LedgerReader
from rljob.protocol.checkpoint_files import checkpoint_directories

STEPS = 4


def tiny_job(uri: str | None = None) -> RLJob:
    training = {"steps": STEPS, "promptsPerStep": 2, "samplesPerPrompt": 4, "maxStaleness": 0}
    optimizer = {"learningRate": 1e-2}
    return make_job(
        training=training, trainer={"optimizer": optimizer}, checkpoints={"everySteps": 1, "keep": 9, "uri": uri}
    )


@asynccontextmanager
async def run_with_real_trainer(directory: Path, uri: str | None = None) -> AsyncIterator[Harness]:
    """Run all components: a fake engine with real weights in this process, and the real trainer as a process."""
    async with run_harness(tiny_job(uri), directory, engines=[]) as harness:
        write_tiny_model(directory / "model")
        engine = TinyEngine(harness.coordinator_url, TOKENS["agent"], directory / "model")
        harness.play("agent", engine.run())
        await harness.start("trainer")
        yield harness


async def train(directory: Path, uri: str | None = None) -> dict[str, bytes]:
    """Run to completion; return the files with weights and optimizer state of the last checkpoint."""
    async with run_with_real_trainer(directory, uri) as harness:
        await harness.ended("trainer")
    last = directory / f"checkpoints/step-{STEPS:06d}"
    return {path.name: path.read_bytes() for path in sorted(last.rglob("*.safetensors"))}


@pytest.fixture(scope="module", autouse=True)
def real_trainer() -> object:
    """Let the harness start the real trainer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMMANDS, "trainer", ["-m", "rljob.trainer.main"])
        modules = (
            "rljob.trainer.loop",
            "rljob.trainer.backends.fsdp.backend",
            "transformers.models.qwen2.modeling_qwen2",
        )
        patch.setattr("e2e.fakes.harness.IMPORTS", (*IMPORTS, *modules))
        yield


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, real_trainer: object) -> dict[str, bytes]:
    """The result of the uninterrupted run."""
    result = asyncio.run(train(tmp_path_factory.mktemp("unbroken")))
    assert result.keys() == {"model.safetensors", "optimizer.safetensors"}
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "step"), [("suspended", 1), ("killed and damaged", 3)])
async def test_the_real_trainer_learns_the_same_bit_for_bit_when_the_run_was_stopped(
    tmp_path: Path, unbroken: dict[str, bytes], way: str, step: int
) -> None:
    async with run_with_real_trainer(tmp_path) as harness:
        await harness.until("trainer", f"step {step - 1}:")
        if way == "suspended":
            await suspend(harness)
            await harness.ended("trainer")
        else:
            harness.kill("coordinator")
            harness.kill("trainer")
    damaged = damage_newest_checkpoint(tmp_path) if way == "killed and damaged" else None
    assert await train(tmp_path) == unbroken
    with LedgerReader(tmp_path) as ledger:
        warnings = [row["message"] for row in ledger.rows("SELECT message FROM warnings")]
    assert [damaged in warning for warning in warnings] == ([True] if damaged else []), warnings
    assert audit(tmp_path).ok


@pytest.mark.timeout(300)
async def test_a_run_whose_checkpoints_are_lost_resumes_from_s3_bit_for_bit(
    tmp_path: Path, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "s3://bucket/run"
    with serving_s3() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        files = empty_bucket("bucket")
        async with run_with_real_trainer(tmp_path, uri) as harness:
            await harness.until("trainer", "the checkpoint of step 2 was written")
            await recorded(tmp_path, step=1)
            harness.kill("coordinator")
            harness.kill("trainer")
        shutil.rmtree(tmp_path / "checkpoints")
        assert await train(tmp_path, uri) == unbroken
        found = {path.split("/")[3].rpartition("-")[0] for path in files.find("bucket/run")}
    assert found == {f"step-{step:06d}" for step in range(1, STEPS + 1)}
    with LedgerReader(tmp_path) as ledger:
        assert ledger.value("SELECT MIN(step) FROM incarnations WHERE incarnation > 1") > 0
    (lost,) = [check.problems for check in audit(tmp_path).checks if not check.ok]
    assert any("checkpoint 1" in problem for problem in lost), "the older one is in S3 only"
    assert all("does not exist" in problem for problem in lost)


async def recorded(storage: Path, step: int) -> None:
    """Wait until the ledger has a checkpoint; the coordinator may be behind the trainer's log."""
    found = 0
    while not found:
        with LedgerReader(storage) as ledger:
            found = ledger.value("SELECT COUNT(*) FROM checkpoints WHERE step = ?", step)
        await asyncio.sleep(0.01)


def damage_newest_checkpoint(storage: Path) -> str:
    """Flip a bit of the moments in the newest checkpoint; return the path of the file."""
    known = checkpoint_directories(storage / "checkpoints")
    path = known[max(known)] / "trainer" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return str(path)
