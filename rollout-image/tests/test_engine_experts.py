"""A real vLLM engine of a model with experts: updates reach them; weights that a CPU packs are packed again."""

import os
from types import SimpleNamespace

import pytest
import torch
from served_engine import LONGEST, TOLERANCE, Trainer, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.environ.get("RLJOB_THOROUGH"), reason="make thorough: another engine starts"),
]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.asyncio
async def test_updates_reach_the_experts(tmp_path, make_coordinator, manifest):
    text = manifest("job://model", maxModelLength=LONGEST, kvCacheBytes=64 << 20)
    trainer = Trainer(tmp_path / "model", head_dim=32, **EXPERTS)
    async with running(tmp_path, make_coordinator(), trainer, text) as run:
        for _ in range(2):
            run.trainer.change()
            ack = await run.update()  # compares digests and the probe
            assert ack.probe_error <= TOLERANCE
            message = run.request([3, 1, 4], 20)
            await run.coordinator.send(message)
            run.check([3, 1, 4], await run.coordinator.completion(message.request_id))


def test_experts_are_packed_after_each_loading_and_not_twice():
    from rljob.rollout.adapters.vllm import weight_transfer

    packed, method = [], object.__new__(weight_transfer.UnquantizedFusedMoEMethod)
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=packed.append))
    method.moe_kernel = None

    def first(layer):  # vLLM makes the kernel, and packs
        packed.append(layer)
        method.moe_kernel = kernel

    layer = SimpleNamespace(w13_weight=torch.zeros(1))
    process = weight_transfer.packing_again(lambda method, layer: None if method.moe_kernel else first(layer))
    process(method, layer)
    assert packed == [layer]
    process(method, layer)
    assert packed == [layer, layer]
