"""Trainer processes with the Megatron backend and the real loop: weights for engines, checkpoints, resume."""

from __future__ import annotations

import asyncio
import os

import pytest
from safetensors.torch import load_file
from test_trainer_process import receive
from training_steps import OF_OTHERS

from rljob.protocol import trainer_protocol as m
from rljob.trainer.metrics import METRICS

THOROUGH = bool(os.environ.get("RLJOB_THOROUGH"))
LAYOUTS = {"tensor": {"tensor": 2}, "data": {}, "pipeline": {"pipeline": 2}, "context": {"context": 2}}


@pytest.mark.skipif(not THOROUGH, reason="make thorough: sixteen trainer processes")
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_killed_trainers_resume_to_the_same_bits_and_fsdp_resumes_their_checkpoint(
    tmp_path, model_directory, job, batch, coordinator, start, layout
):
    optimizer = {"learningRate": 1e-3, "maxGradNorm": 0.5, "epsilon": 1e-3}
    trainer = {"processesPerNode": 2, "optimizer": optimizer}
    megatron = job(trainer=trainer | {"backend": "megatron", "parallelism": LAYOUTS[layout]})
    coordinator.batches = {step: batch(seed=step, step=step) for step in range(4)}
    processes = await start(coordinator, megatron, 2)
    assert (await coordinator.admit()).step == 0
    metrics = (await coordinator.train(0)).metrics
    assert metrics.keys() == METRICS.keys() - {"first_step_logprob_error", "entropy"} - OF_OTHERS
    await coordinator.train(1)
    await coordinator.send(m.Checkpoint(1, 2, []))
    await coordinator.receive(m.Checkpointed)
    await coordinator.train(2)
    after_three = await coordinator.digest()
    await coordinator.send(m.SendWeights(1, 2, [m.EngineTarget("engine", False, 1)]))
    ready = await coordinator.receive(m.WeightGroupReady)
    assert await asyncio.to_thread(receive, ready, megatron.spec.weight_sync.bucket_bytes) == after_three
    assert (await coordinator.receive(m.WeightsSent)).error == ""

    for process in processes:
        process.kill()
        await process.wait()
    await start(coordinator, megatron, 2)
    assert (await coordinator.admit(3)).step == 2
    await coordinator.train(2)
    assert await coordinator.digest() == after_three
    expected = (await coordinator.train(3)).metrics
    await coordinator.send(m.Stop("done"))

    (alone,) = await start(coordinator, job(trainer={"optimizer": optimizer}))
    assert (await coordinator.admit(3)).step == 2
    await coordinator.train(2)
    given = (await coordinator.train(3)).metrics
    for name in ("loss", "grad_norm", "tokens", "ratio_mean"):
        assert given[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    checkpoint = tmp_path / "storage" / "checkpoints" / "step-000002"
    stored = {name for file in checkpoint.glob("model*.safetensors") for name in load_file(file)}
    assert stored == set(load_file(model_directory / "model.safetensors"))
    alone.kill()
