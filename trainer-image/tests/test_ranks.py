"""Several ranks on gloo give the same results as one rank, and a checkpoint does not depend on their number."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from held_bytes import HeldBytes
from ranks import on_ranks
from safetensors.torch import load_file
from torch.utils._python_dispatch import _disable_current_modes
from training_steps import apply
from transformers import AutoModelForCausalLM

from rljob.api import memory_plan
from rljob.api.memory_plan import TrainerSettings
from rljob.api.model_shape import shape_of
from rljob.api.models import RLJob
from rljob.protocol.checkpoint_record import TrainerState
from rljob.trainer import logprobs
from rljob.trainer.backends.fsdp import backend as backend_module
from rljob.trainer.backends.fsdp import read_weights, sharded_adamw
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.backends.fsdp.gather_weights import assign_tensors, own_tensors, whole_tensors
from rljob.trainer.backends.fsdp.read_weights import StoredTensor
from rljob.trainer.checkpoint import CheckpointStore, read_configuration, read_optimizer_tensor, read_state
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.metrics import METRICS
from rljob.trainer.process_group import World
from rljob.trainer.step_checks import StepChecks
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.wire_plan import WirePlan

OF_ONE_RANK = {"seconds_forward", "seconds_backward", "seconds_optimizer", "memory_peak_bytes"}
OF_ONE_RANK |= {"padding_fraction", "lockstep"}
SENT_BYTES = 4096  # of a bucket of weights in bfloat16
BUCKET_BYTES = 9000  # the largest tensor of the tiny model has 7808
OPTIMIZER_SETTINGS = {"learningRate": 1e-3, "maxGradNorm": 0.05, "epsilon": 1e-3}


def train(
    world: World,
    source: Path,
    job: RLJob,
    steps: list[Any],
    backend: FsdpBackend | None = None,
    exchange_bytes: int = backend_module.ONE_EXCHANGE_BYTES,
) -> Any:
    """Return parameters as arrays (rank 0), the last metrics and advantages after training this rank's shards, and
    every mismatch of engine and trainer that was compared; none ends the run."""
    with mock.patch.object(backend_module, "ONE_EXCHANGE_BYTES", exchange_bytes):
        backend = backend or FsdpBackend(source, job.spec.trainer, world)
    result = None
    with mock.patch.object(StepChecks, "compare") as compared:
        for command, tokens in steps:
            result = apply(world, backend, job.spec.algorithm, command, tokens, job.spec.trainer.microbatch_tokens)
    mismatches = [call.args[0] for call in compared.call_args_list]
    parameters = {name: tensor.numpy().copy() for name, tensor in backend.named_tensors()}
    return (parameters if world.rank == 0 else None), result.metrics, result.advantages_N, mismatches


def compare(results: list[Any], alone: Any) -> None:
    parameters = results[0][0]
    for name, expected in alone[0].items():
        torch.testing.assert_close(torch.tensor(parameters[name]), torch.tensor(expected), rtol=0, atol=1e-6)
    for other in results:
        for name in METRICS.keys() & alone[1].keys() - OF_ONE_RANK:
            assert other[1][name] == pytest.approx(alone[1][name], rel=1e-4, abs=1e-6), name
        assert other[2].tobytes() == alone[2].tobytes()
        for found, expected in zip(other[3], alone[3], strict=True):
            assert found.tokens == expected.tokens
            assert (found.mean, found.largest) == pytest.approx((expected.mean, expected.largest), rel=1e-4)


def train_and_count(world: World, *arguments: Any) -> Any:
    """Return the result of :func:`train`, the number of reduce-scatters, and the number of microbatches of updates."""
    logprobs.CHUNK_BYTES = 4 * 61 * 3  # the output layer of the tiny model works on 3 positions at a time
    microbatches = 0
    run = FsdpBackend.run

    def counted(self: FsdpBackend, inputs: Any, loss: Any) -> Any:
        nonlocal microbatches
        microbatches += len(inputs) if loss else 0
        return run(self, inputs, loss)

    with (
        mock.patch("torch.distributed.reduce_scatter_single", wraps=torch.distributed.reduce_scatter_single) as calls,
        mock.patch.object(FsdpBackend, "run", counted),
    ):
        return train(world, *arguments), calls.call_count, microbatches


LAYERS = 3  # with the rest of the model


@pytest.mark.parametrize(("size", "exchange_bytes", "recompute"), [(2, 1 << 30, "none"), (4, 0, "layer")])
def test_ranks_give_the_parameters_and_metrics_of_one_rank(
    model_directory, job, batch, size, exchange_bytes, recompute
):
    settings = {"microbatchTokens": 20, "optimizer": OPTIMIZER_SETTINGS}
    steps = [batch(seed, step=seed) for seed in range(2)]
    for command, _ in steps:
        for sample in command.samples[::2]:
            sample.min_version = command.step
    (alone,) = on_ranks(1, train, model_directory, job(trainer=settings), steps)
    assert all(mismatch.tokens for mismatch in alone[3]) and len(alone[3]) == len(steps)
    made = job(trainer=settings | {"recompute": recompute})
    results = on_ranks(size, train_and_count, model_directory, made, steps, None, exchange_bytes)
    compare([result for result, _, _ in results], alone)
    updates = len(steps)
    for _, exchanges, microbatches in results:
        assert microbatches > updates
        assert exchanges == LAYERS * (updates if exchange_bytes else microbatches)


def test_a_rank_without_samples_takes_part(model_directory, job, batch):
    made = job(
        algorithm={"minibatches": 2, "ratio": "proximal"},
        trainer={"microbatchTokens": 10, "optimizer": OPTIMIZER_SETTINGS},
    )
    steps = [batch(seed, groups=1, members=2, step=seed) for seed in range(2)]
    (alone,) = on_ranks(1, train, model_directory, made, steps)
    compare(on_ranks(3, train, model_directory, made, steps), alone)


def save(world: World, source: Path, job: RLJob, steps: list[Any], storage: Path) -> None:
    backend = FsdpBackend(source, job.spec.trainer, world)
    train(world, source, job, steps, backend)
    state = TrainerState(1, backend.updates, 1, {}, {})
    CheckpointStore(storage).write(world.with_own_control(), state, read_configuration(source), backend.save())


def copied_rows(stored: StoredTensor, rows: slice) -> torch.Tensor:
    """Return a copy of rows of a file: safetensors slices a tensor that is mapped, and whose bytes need no memory."""
    with _disable_current_modes():
        content: torch.Tensor = stored.content[rows].clone()
    return content


def resume(world: World, job: RLJob, step: Any, storage: Path, initial: Path | None = None) -> Any:
    """Return this rank's weights and moments as loaded, the most bytes of tensors that it held in each phase, then the
    result of one more step; adapters need the ``initial`` model."""
    checkpoint = choose_checkpoint(CheckpointStore(storage), world).path
    phases = {phase: HeldBytes() for phase in ("load", "checkpoint")}
    with mock.patch.object(read_weights, "read_rows", copied_rows), phases["load"]:
        backend = FsdpBackend(initial or checkpoint, job.spec.trainer, world)
    read = []

    def counted(*arguments: Any) -> torch.Tensor:
        read.append(read_optimizer_tensor(*arguments))
        return read[-1]

    with mock.patch.object(sharded_adamw, "read_optimizer_tensor", counted):
        backend.load(checkpoint)
    optimizer = backend._optimizer
    kinds = 2 if job.spec.trainer.lora is None else 3  # the moments, and the adapters themselves
    assert sum(tensor.numel() for tensor in read) == kinds * sum(local.numel() for local in optimizer.local.values())
    phases["checkpoint"].add(
        list(optimizer.local.values()), [list(state.values()) for state in optimizer.state.values()]
    )
    with (
        mock.patch.object(backend_module, "own_tensors", partial(own_tensors, bucket_bytes=BUCKET_BYTES)),
        phases["checkpoint"],
    ):
        saved = backend.save()
    held = {phase: counted.peak for phase, counted in phases.items()}
    loaded = {name: tensor.numpy().copy() for name, tensor in [*saved.weights.items(), *saved.optimizer.items()]}
    return loaded, held, train(world, checkpoint, job, [step], backend)


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_four(model_directory, job, batch, tmp_path, monkeypatch):
    made = job(trainer={"microbatchTokens": 60, "optimizer": OPTIMIZER_SETTINGS})
    on_ranks(2, save, model_directory, made, [batch(0)], tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert read_state(checkpoint).files.keys() == files - {"trainer.json"}
    parts = sorted(name for name in files if name.endswith(".safetensors"))
    assert parts == [
        f"{stem}-0000{part}-of-00002.safetensors" for stem in ("model", "trainer/optimizer") for part in (1, 2)
    ]
    loaded_parts = [load_file(checkpoint / name) for name in parts]
    stored = {name: tensor for tensors in loaded_parts for name, tensor in tensors.items()}
    assert len(stored) == sum(map(len, loaded_parts)), "each tensor is in one part"
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.named_parameters())

    ((loaded, _, alone),) = on_ranks(1, resume, made, batch(1, step=1), tmp_path)
    four = on_ranks(4, resume, made, batch(1, step=1), tmp_path)
    together = {name: tensor for tensors, _, _ in four for name, tensor in tensors.items()}
    for tensors in (loaded, together):
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(torch.tensor(tensors[name]), stored[name]) for name in stored)
    compare([result for _, _, result in four], alone)
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors, _, _ in four]
    largest = max(stored[name].nbytes for name, _ in model.named_parameters())
    assert sum(sizes) == sum(tensor.nbytes for tensor in stored.values())
    assert max(sizes) <= sum(sizes) / 4 + 3 * largest and max(sizes) < sum(sizes) / 2
    monkeypatch.setattr(memory_plan, "EXCHANGE_BYTES", BUCKET_BYTES)
    plan = memory_plan.plan_memory(shape_of(checkpoint), TrainerSettings(4, "float32", 60))
    saved = plan.step.host - 4 * sum(parameter.numel() for parameter in model.parameters())  # without the sent copy
    planned = {phase: plan.phases[phase].device + plan.phases[phase].host for phase in four[0][1]}
    planned["checkpoint"] = plan.checkpoint.device + saved
    assert max(sizes) <= saved
    for phase, most in planned.items():
        found = [held[phase] for _, held, _ in four]
        assert max(found) <= most <= 1.3 * max(found), (phase, most, found)


def send(world: World, source: Path, job: RLJob) -> tuple[int, int]:
    """Return the most bytes of tensors that this rank holds while the weights are gathered and packed, and those of its
    shard."""
    backend = FsdpBackend(source, job.spec.trainer, world)
    dtype, held = torch.bfloat16, HeldBytes()
    shards = list(backend._parameters.values())
    with mock.patch.object(backend_module, "whole_tensors", partial(whole_tensors, bucket_bytes=SENT_BYTES)):
        plan = WirePlan.of(backend.named_tensors(dtype), SENT_BYTES)
        weights, buffers = PackedWeights(plan), BucketBuffers()
        held.add(shards)
        with held:
            if world.rank == 0:
                weights.fill(backend.named_tensors(dtype), buffers)
            else:
                deque(backend.named_tensors(dtype), maxlen=0)  # keeps no tensor while the next one is gathered
    return held.peak, sum(shard.to_local().nbytes for shard in shards)


@pytest.mark.parametrize("size", [1, 4])
def test_no_rank_holds_a_second_copy_of_the_model_and_the_host_of_rank_0_holds_the_wires(model_directory, job, size):
    results = on_ranks(size, send, model_directory, job(trainer={"dtype": "bfloat16"}))
    wire = 2 * shape_of(model_directory).parameters
    for rank, (held, shard) in enumerate(results):
        beside = held - shard - (wire if rank == 0 else 0)
        # a bucket and a tensor; gloo's threads may still hold the buckets of two collectives that have ended
        assert 0 < beside < 0.75 * wire


def test_ranks_hold_at_most_the_mean_and_the_largest_tensor():
    generator = random.Random(1)
    for _ in range(100):
        sizes = {f"t{i}": int(generator.lognormvariate(5, 2)) for i in range(generator.randint(1, 40))}
        ranks = generator.randint(1, 9)
        assigned = assign_tensors(sizes, ranks)
        assert assigned.keys() == sizes.keys()
        loads = [sum(sizes[name] for name in sizes if assigned[name] == rank) for rank in range(ranks)]
        assert max(loads) <= sum(loads) / ranks + max(sizes.values()) * (1 - 1 / ranks)


def one_fails(world: World) -> str:
    try:
        world.raise_first_error(UnrecoverableError("rank 1 says no") if world.rank == 1 else None)
    except UnrecoverableError as error:
        return f"{error} {world.broadcast(b'still together' if world.rank == 0 else None).decode()}"
    return "no error"


def test_an_error_of_one_rank_is_raised_on_all():
    assert on_ranks(2, one_fails) == ["rank 1 says no still together"] * 2
