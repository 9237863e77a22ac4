"""Copies of a sharded model (HSDP): results, collectives, weights for the engines, checkpoints."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from safetensors.torch import load_file
from test_ranks import LAYERS, OPTIMIZER_SETTINGS, compare, resume, save, train, train_and_count
from torch.distributed.tensor.debug import CommDebugMode

from rljob.api.models import RLJob
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

COPIES = {"parallelism": {"replicate": 2}, "processesPerNode": 4}
SETTINGS = {"microbatchTokens": 20, "optimizer": OPTIMIZER_SETTINGS}


def in_copies(world: World, source: Path, job: RLJob, steps: list[Any], exchange_bytes: int) -> Any:
    """Return the result of ``train_and_count``, and the number of sums of gradients over copies."""
    all_reduce = dist.distributed_c10d.all_reduce
    between: list[int] = []

    def counted(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        between.append(1 if group is not None and dist.get_process_group_ranks(group) in ([0, 2], [1, 3]) else 0)
        return all_reduce(*args, group=group, **kwargs)

    with mock.patch("torch.distributed.all_reduce", counted):
        return *train_and_count(world, source, job, steps, None, exchange_bytes), sum(between)


@pytest.mark.parametrize(("exchange_bytes", "lora"), [(1 << 30, None), (0, None), (0, {"rank": 4})])
def test_two_copies_on_two_ranks_each_train_like_one_rank(model_directory, job, batch, exchange_bytes, lora):
    steps = [batch(seed, step=seed) for seed in range(2)]
    (alone,) = on_ranks(1, train, model_directory, job(trainer=SETTINGS | {"lora": lora}), steps)
    made = job(trainer=SETTINGS | COPIES | {"lora": lora})
    results = on_ranks(4, in_copies, model_directory, made, steps, exchange_bytes)
    compare([result for result, *_ in results], alone)
    units = LAYERS - (lora is not None)  # nothing is trained outside the layers
    for _, scatters, microbatches, between in results:
        assert microbatches > len(steps)
        assert scatters == units * (len(steps) if exchange_bytes else microbatches)
        assert between == units * len(steps), "copies exchange gradients once per update"


def shards_and_collectives(world: World, source: Path, job: RLJob, steps: list[Any]) -> Any:
    """Return this rank's shards after training, and the collectives of a gather of the weights."""
    backend = FsdpBackend(source, job.spec.trainer, world)
    train(world, source, job, steps, backend)
    with CommDebugMode() as calls:
        whole = {name: tensor.shape for name, tensor in backend.named_tensors(torch.bfloat16)}
    shards = {name: p.to_local().detach().numpy().tobytes() for name, p in backend._parameters.items()}
    with CommDebugMode() as of_save:
        saved = backend.save()
    return list(whole), shards, calls.get_total_counts(), of_save.get_total_counts(), len(saved.weights)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_one_copy_gathers_the_weights_and_all_copies_have_the_same_bits(model_directory, job, batch, lora):
    made = job(trainer=SETTINGS | COPIES | {"lora": lora})
    ranks = on_ranks(4, shards_and_collectives, model_directory, made, [batch(seed, step=seed) for seed in range(3)])
    assert ranks[0][1] == ranks[2][1] and ranks[1][1] == ranks[3][1] and ranks[0][1] != ranks[1][1]
    assert all(names == ranks[0][0] for names, *_ in ranks)
    for rank, (_, _, gather, of_save, saved) in enumerate(ranks):
        assert (gather > 0, of_save > 0) == (rank < 2, rank < 2)
        assert (saved > 0) == (rank < 2)


def test_a_checkpoint_of_two_copies_resumes_on_one_rank_four_ranks_and_two_copies(
    model_directory, job, batch, tmp_path
):
    settings = {"microbatchTokens": 60, "optimizer": OPTIMIZER_SETTINGS}
    copies, plain = job(trainer=settings | COPIES), job(trainer=settings)
    on_ranks(4, save, model_directory, copies, [batch(0)], tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    stored = ChainMap(*(load_file(file) for file in checkpoint.rglob("*.safetensors")))
    ((loaded, _, alone),) = on_ranks(1, resume, plain, batch(1, step=1), tmp_path)
    for made in (plain, copies):
        four = on_ranks(4, resume, made, batch(1, step=1), tmp_path)
        for tensors in (loaded, ChainMap(*(part for part, *_ in four))):
            assert tensors.keys() == stored.keys()
            assert all(torch.equal(torch.tensor(tensors[name]), stored[name]) for name in stored)
        compare([result for _, _, result in four], alone)


def test_copies_of_different_sizes_are_refused(model_directory, job, world):
    trainer = job(trainer=COPIES).spec.trainer
    with pytest.raises(ModelError, match=r"spec\.trainer\.parallelism\.replicate: 2 does not divide the 1 processes"):
        FsdpBackend(model_directory, trainer, world)
