"""The Megatron backend: Megatron-Core with tensor, pipeline and data parallelism, and its distributed optimizer.

Parameters are in the job's dtype; float32 weights and moments are distributed over the data-parallel ranks. Weights and
moments are read and saved as whole tensors with Hugging Face names, like those of the FSDP2 backend, so a checkpoint
does not depend on the layout or on the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from rljob.api.model_shape import shape_of
from rljob.api.roles import Trainer
from rljob.trainer import model_directory
from rljob.trainer.backends.base import Loss, OptimizerUpdate, Output, SavedState
from rljob.trainer.backends.fsdp.sharded_adamw import MOMENTS
from rljob.trainer.backends.megatron.cpu_shims import megatron_on
from rljob.trainer.backends.megatron.distributed_adamw import WEIGHT, DistributedAdamW
from rljob.trainer.backends.megatron.families.dense_decoder import EMBEDDING, HEAD, conversion_table
from rljob.trainer.backends.megatron.gather_parameters import ParameterExchange
from rljob.trainer.backends.megatron.megatron_library import finalize_model_grads, get_forward_backward_func
from rljob.trainer.backends.megatron.megatron_model import KeptPositions, build_stage
from rljob.trainer.backends.megatron.process_grid import make_grid
from rljob.trainer.backends.megatron.supported_layouts import problems
from rljob.trainer.backends.megatron.vocabulary_logprobs import VocabularyPart, split_token_logprobs
from rljob.trainer.backends.megatron.weight_layout import share
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_optimizer_tensor, read_state
from rljob.trainer.errors import ModelError
from rljob.trainer.metrics import Stopwatch
from rljob.trainer.process_group import World

SCHEDULE, FORWARD_INSIDE = "schedule", "forward_inside"  # parts of the time that metrics() reports


class MegatronBackend:
    """See :class:`rljob.trainer.backends.base.Backend`.

    Args:
        source: Hugging Face directory of the weights to start from.
        settings: the job's trainer.
        world: the ranks.

    Raises:
        ModelError: the directory has no model that can be trained, or not in this layout.
    """

    def __init__(self, source: Path, settings: Trainer, world: World) -> None:
        shape = shape_of(source)
        if found := [*model_directory.problems(source), *problems(source, settings)]:
            raise ModelError("; ".join(found))
        assert shape is not None, "problems() has checked the model"
        self.dtype: torch.dtype = getattr(torch, str(settings.dtype))
        self.vocabulary = shape.vocabulary
        self._grid = make_grid(world, settings.parallelism)
        self.world = self._grid.world
        tables = [conversion_table(shape, stage, self._grid.stages) for stage in range(self._grid.stages)]
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        with megatron_on(world.device):
            self._model = build_stage(config, shape, tables[self._grid.stage], self._grid, self.dtype)
            self._optimizer = DistributedAdamW(self._model, settings.optimizer, self.dtype, self._grid.data_group)
        self._parameters: dict[str, Tensor] = dict(self._model.module.named_parameters())
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._exchange = ParameterExchange(self._grid, tables, shapes, {HEAD: EMBEDDING} if shape.tied else {})
        self._exchange.read_files(source, self._assign_weight)
        first, last = share(shape.vocabulary, self._grid.tensor_rank, self._grid.tensor_size)
        self._vocabulary_part = VocabularyPart(first, last - first, self._grid.tensor_group)
        self._kept = KeptPositions(self._model)
        self._schedule = get_forward_backward_func()
        self._watch = Stopwatch(world.device)

    def run(self, microbatches: Sequence[Microbatch], loss: Loss | None, entropy: bool = False) -> list[Output]:
        """Run the microbatches through the stages; see :class:`Backend`.

        The last stage has the outputs and calls the loss within the schedule. Then the other stages get the outputs
        and call the loss too, because it collects metrics.
        """
        results: list[Tensor] = []

        def forward(batches: Iterator[tuple[int, Microbatch]], model: Any) -> tuple[Tensor, Any]:
            i, microbatch = next(batches)
            self._kept.keep_K = microbatch.keep_K
            with self._watch.time("seconds_forward" if loss is None else FORWARD_INSIDE):
                tensor = model(microbatch.token_ids_BL, None, None)
            return tensor, partial(finish, i, microbatch)

        def finish(i: int, microbatch: Microbatch, logits_BKV: Tensor, non_loss_data: bool = False) -> Any:
            with self._watch.time("seconds_forward" if loss is None else FORWARD_INSIDE):
                results_BKE = split_token_logprobs(
                    logits_BKV, microbatch.targets_BK, microbatch.temperature_B, self._vocabulary_part, entropy=entropy
                )
                results.append(results_BKE.detach())
                if loss is None:
                    return None
                value = loss(i, _output(results_BKE, entropy))
            return value, torch.zeros((), dtype=torch.int, device=value.device), {}

        if loss is None:
            with torch.no_grad(), megatron_on(self.world.device):
                self._run_schedule(forward, microbatches, True)
        else:
            with self._watch.time(SCHEDULE), megatron_on(self.world.device):
                self._run_schedule(forward, microbatches, False)
        results = self._share_results(results, microbatches, entropy)
        if loss is not None and not self._grid.is_last:
            for i, results_BKE in enumerate(results):
                loss(i, _output(results_BKE.requires_grad_(), entropy))
        return [_output(results_BKE.detach(), entropy) for results_BKE in results]

    def _run_schedule(self, forward: Any, microbatches: Sequence[Microbatch], forward_only: bool) -> None:
        rows, positions = microbatches[0].token_ids_BL.shape
        self._schedule(
            forward_step_func=forward,
            data_iterator=iter(enumerate(microbatches)),
            model=self._model,
            num_microbatches=len(microbatches),
            seq_length=positions,  # with several stages each tensor is sent with its shape
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _share_results(self, results: list[Tensor], microbatches: Sequence[Microbatch], entropy: bool) -> list[Tensor]:
        """Send the results of the last stage to the others; return them."""
        if self._grid.stages == 1:
            return results
        sizes = [(*microbatch.targets_BK.shape, 1 + entropy) for microbatch in microbatches]
        numbers = [rows * positions * kinds for rows, positions, kinds in sizes]
        flat = torch.empty(sum(numbers), dtype=torch.float32, device=self.world.device)
        if self._grid.is_last:
            torch.cat([results_BKE.reshape(-1) for results_BKE in results], out=flat)
        source = self._grid.rank_of(self._grid.stages - 1, self.world.dp_rank, self._grid.tensor_rank)
        dist.broadcast(flat, source, group=self._grid.pipeline_group)
        return [part.view(size) for part, size in zip(flat.split(numbers), sizes, strict=True)]

    def update(self, step: int) -> OptimizerUpdate:
        """Exchange the gradients between replicas and stages, clip them, apply AdamW; see :class:`Backend`."""
        with self._watch.time("seconds_optimizer"), megatron_on(self.world.device):
            finalize_model_grads([self._model])
            result = self._optimizer.update(step)
            self._model.zero_grad_buffer()
        return result

    @property
    def updates(self) -> int:
        """Optimizer updates since the start of the run."""
        return self._optimizer.updates

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call. Backward passes include waiting for stages."""
        seconds = self._watch.take()
        if SCHEDULE in seconds:
            inside = seconds.pop(FORWARD_INSIDE, 0.0)
            seconds["seconds_backward"] = seconds.pop(SCHEDULE) - inside
            seconds["seconds_forward"] = seconds.get("seconds_forward", 0.0) + inside
        return seconds

    def named_tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter as a whole tensor on rank 0; see :class:`Backend`. Other ranks get empty tensors."""
        return self._exchange.whole_tensors(lambda name: self._weight(name, dtype), dtype, self.world.device)

    def save(self) -> SavedState:
        """Return this rank's part of the weights, and of AdamW's moments, named ``exp_avg.NAME`` and
        ``exp_avg_sq.NAME``, as the FSDP2 backend does."""
        parts = {WEIGHT: lambda name: self._weight(name, torch.float32)} | {
            kind: partial(self._moment, kind=kind) for kind in MOMENTS
        }
        saved = SavedState({}, {})
        for kind, name, tensor in self._exchange.own_tensors(parts):
            if kind == WEIGHT:
                saved.weights[name] = tensor
            else:
                saved.optimizer[f"{kind}.{name}"] = tensor
        return saved

    def load(self, checkpoint: Path) -> None:
        """Load the moments and the number of updates of a checkpoint."""
        self._optimizer.updates = read_state(checkpoint).updates
        for name, parameter in self._parameters.items():
            moments = {
                kind: self._exchange.read(partial(_read_moment, checkpoint, kind), name).to(parameter.device)
                for kind in MOMENTS
            }
            self._optimizer.assign_moments(parameter, moments)

    def _assign_weight(self, name: str, content: Tensor) -> None:
        parameter = self._parameters[name]
        self._optimizer.assign_weight(parameter, content.to(parameter.device))

    def _weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter of this rank; in float32 the exact one, for which all replicas exchange their elements."""
        parameter = self._parameters[name]
        if dtype == self.dtype:
            return parameter.detach()
        return self._optimizer.gather(parameter, WEIGHT).to(dtype)

    def _moment(self, name: str, kind: str) -> Tensor:
        return self._optimizer.gather(self._parameters[name], kind)


def _output(results_BKE: Tensor, entropy: bool) -> Output:
    return Output(results_BKE[..., 0], results_BKE[..., 1] if entropy else None)


def _read_moment(checkpoint: Path, kind: str, name: str) -> Tensor:
    return read_optimizer_tensor(checkpoint, f"{kind}.{name}")
