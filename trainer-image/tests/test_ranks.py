"""Several ranks on gloo give the same results as one rank, and a checkpoint does not depend on their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file
from training_steps import apply

from rljob.api.models import RLJob
from rljob.protocol.checkpoint_files import OPTIMIZER_FILE, WEIGHTS_FILE
from rljob.protocol.checkpoint_record import TrainerState
from rljob.trainer import logprobs
from rljob.trainer.backends.fsdp import backend as backend_module
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.checkpoint import CheckpointStore, read_configuration
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.metrics import METRICS
from rljob.trainer.process_group import World

OF_ONE_RANK = {"seconds_forward", "seconds_backward", "seconds_optimizer", "memory_peak_bytes"}
OF_ONE_RANK |= {"padding_fraction", "lockstep"}
OPTIMIZER_SETTINGS = {"learningRate": 1e-3, "maxGradNorm": 0.05, "epsilon": 1e-3}


def train(
    world: World,
    source: Path,
    job: RLJob,
    steps: list[Any],
    backend: FsdpBackend | None = None,
    exchange_bytes: int = backend_module.ONE_EXCHANGE_BYTES,
) -> Any:
    """Return parameters as arrays (rank 0), the last metrics and advantages after training this rank's shards."""
    with mock.patch.object(backend_module, "ONE_EXCHANGE_BYTES", exchange_bytes):
        backend = backend or FsdpBackend(source, job.spec.trainer, world)
    result = None
    for command, tokens in steps:
        result = apply(world, backend, job.spec.algorithm, command, tokens, job.spec.trainer.microbatch_tokens)
    parameters = {name: tensor.numpy().copy() for name, tensor in backend.named_tensors()}
    return (parameters if world.rank == 0 else None), result.metrics, result.advantages_N


def compare(results: list[Any], alone: Any) -> None:
    parameters = results[0][0]
    for name, expected in alone[0].items():
        torch.testing.assert_close(torch.tensor(parameters[name]), torch.tensor(expected), rtol=0, atol=1e-6)
    for other in results:
        for name in METRICS.keys() & alone[1].keys() - OF_ONE_RANK:
            assert other[1][name] == pytest.approx(alone[1][name], rel=1e-4, abs=1e-6), name
        assert other[2].tobytes() == alone[2].tobytes()


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
    (alone,) = on_ranks(1, train, model_directory, job(trainer=settings), steps)
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
    saved = backend.save()
    if world.rank == 0:
        CheckpointStore(storage).write(
            TrainerState(1, backend.updates, 1, {}, {}), read_configuration(source), saved.weights, saved.optimizer
        )


def resume(world: World, job: RLJob, step: Any, storage: Path) -> Any:
    """Return weights and moments as loaded, then after one more step."""
    checkpoint = choose_checkpoint(CheckpointStore(storage), world).path
    backend = FsdpBackend(checkpoint, job.spec.trainer, world)
    backend.load(checkpoint)
    saved = backend.save()
    loaded = {name: tensor.numpy().copy() for name, tensor in [*saved.weights.items(), *saved.optimizer.items()]}
    return loaded, train(world, checkpoint, job, [step], backend)


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_four(model_directory, job, batch, tmp_path):
    made = job(trainer={"microbatchTokens": 60, "optimizer": OPTIMIZER_SETTINGS})
    on_ranks(2, save, model_directory, made, [batch(0)], tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    stored = load_file(checkpoint / WEIGHTS_FILE) | load_file(checkpoint / OPTIMIZER_FILE)
    ((loaded, alone),) = on_ranks(1, resume, made, batch(1, step=1), tmp_path)
    four = on_ranks(4, resume, made, batch(1, step=1), tmp_path)
    assert all(result[0] == {} for result in four[1:])
    for tensors in (loaded, four[0][0]):
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(torch.tensor(tensors[name]), stored[name]) for name in stored)
    compare([result[1] for result in four], alone)


def one_fails(world: World) -> str:
    try:
        world.raise_first_error(UnrecoverableError("rank 1 says no") if world.rank == 1 else None)
    except UnrecoverableError as error:
        return f"{error} {world.broadcast(b'still together' if world.rank == 0 else None).decode()}"
    return "no error"


def test_an_error_of_one_rank_is_raised_on_all():
    assert on_ranks(2, one_fails) == ["rank 1 says no still together"] * 2
