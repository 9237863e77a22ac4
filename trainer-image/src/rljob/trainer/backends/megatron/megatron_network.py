"""A model of Megatron-Core on a grid of ranks: its parts on this rank, its schedule, and its weights.

Policy, critic and frozen models are networks of the same grid. What they do with results is not known here.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, E results of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig

from rljob.api.model_shape import shape_of
from rljob.api.roles import Trainer
from rljob.trainer import model_directory
from rljob.trainer.backends.fsdp.row_attention import has_kernel
from rljob.trainer.backends.megatron.cpu_shims import megatron_on
from rljob.trainer.backends.megatron.families.dense_decoder import EMBEDDING, HEAD, VALUE_HEAD, conversion_table
from rljob.trainer.backends.megatron.gather_parameters import Assign, ParameterExchange
from rljob.trainer.backends.megatron.megatron_library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    get_forward_backward_func,
)
from rljob.trainer.backends.megatron.megatron_model import KeptPositions, build_stage, named_parameters
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.backends.megatron.stage_inputs import Layout, StageInputs, packed_rows, padded_rows, row_parts
from rljob.trainer.backends.megatron.supported_layouts import problems
from rljob.trainer.backends.megatron.vocabulary_logprobs import VocabularyPart, split_token_logprobs
from rljob.trainer.backends.megatron.weight_layout import share
from rljob.trainer.batch import Microbatch, collate
from rljob.trainer.errors import ModelError
from rljob.trainer.metrics import Stopwatch

SCHEDULE, FORWARD_INSIDE = "schedule", "forward_inside"  # parts of the time that metrics() reports

TensorLoss: TypeAlias = Callable[[int, Tensor], Tensor]
"""(index of the microbatch, its results (B, K, E) with gradient) → this microbatch's share of the loss."""


class MegatronNetwork:
    """One model, without an optimizer.

    Args:
        source: Hugging Face directory of the weights.
        settings: the job's trainer.
        grid: the ranks.
        trained: whether it has gradients.
        head: makes another output layer, from the numbers of its inputs and outputs, which gives values; its weights
            are not read from ``source``.

    Raises:
        ModelError: the directory has no model that can be computed, or not in this layout.
    """

    def __init__(
        self,
        source: Path,
        settings: Trainer,
        grid: ProcessGrid,
        trained: bool = True,
        head: Callable[[int, int], Module] | None = None,
    ) -> None:
        shape = shape_of(source)
        if found := [*model_directory.problems(source), *problems(source, settings)]:
            raise ModelError("; ".join(found))
        assert shape is not None, "problems() has checked the model"
        if head is not None:
            shape = replace(shape, tied=False, values=True)
        self.grid, self._gives_values = grid, head is not None
        self.dtype: torch.dtype = getattr(torch, str(settings.dtype))
        self.vocabulary = shape.vocabulary
        device = grid.world.device
        packs = settings.packing == "varlen" or (
            settings.packing == "auto" and grid.context_size == 1 and has_kernel(device, self.dtype, shape.head_size)
        )
        self.layout: Layout = packed_rows if packs else row_parts if grid.context_size > 1 else padded_rows
        tables = [
            conversion_table(shape, stage, grid.stages, grid.chunks, grid.expert_size) for stage in range(grid.stages)
        ]
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        recomputes = trained and settings.recompute == "layer"
        with megatron_on(device):
            models = build_stage(config, shape, tables[grid.stage], grid, self.dtype, recomputes, head)
            self.chunks: list[Any] = [_with_gradients(model) for model in models] if trained else models
        self.parameters = named_parameters(models, shape, grid)
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        copies = {HEAD: EMBEDDING} if shape.tied else {}
        self.exchange = ParameterExchange(grid, tables, shapes, copies, VALUE_HEAD if shape.values else frozenset())
        first, last = share(shape.vocabulary, grid.tensor_rank, grid.tensor_size)
        self._vocabulary_part = VocabularyPart(first, last - first, grid.tensor_group)
        self._kept = KeptPositions(models[-1], grid)
        self._schedule = get_forward_backward_func()
        self._watch = Stopwatch(device)

    def read(self, source: Path, assign: Assign) -> None:
        """Read the weights of this rank; see :meth:`ParameterExchange.read_files`."""
        self.exchange.read_files(source, assign)

    def run(self, microbatches: Sequence[Microbatch], loss: TensorLoss | None, entropy: bool = False) -> list[Tensor]:
        """Run the microbatches through the stages; return log-probabilities, and entropies on request, (B, K, E), or
        values (B, K, 1).

        The last stage has the results and calls the loss within the schedule. Then the other stages get the results
        and call the loss too, because it collects metrics.
        """
        results: list[Tensor] = []
        number = len(microbatches)

        def forward(batches: Iterator[tuple[int, StageInputs]], model: Any) -> tuple[Tensor, Any]:
            i, inputs = next(batches)
            self._kept.keep = inputs.keep
            with self._watch.time("seconds_forward" if loss is None else FORWARD_INSIDE):
                tensor = model(inputs.token_ids, None, None, packed_seq_params=inputs.rows)
            return tensor, partial(finish, i, inputs)

        def finish(i: int, inputs: StageInputs, output: Tensor, non_loss_data: bool = False) -> Any:
            with self._watch.time("seconds_forward" if loss is None else FORWARD_INSIDE):
                results_BKE = inputs.placed(self._results(output, inputs, entropy))
                results.append(results_BKE.detach())
                if loss is None:
                    return None
                value = loss(i, results_BKE) if i < number else 0.0 * results_BKE.sum()
            return value, torch.zeros((), dtype=torch.int, device=value.device), {}

        microbatches = [*microbatches, *self._missing(len(microbatches))]
        inputs = [self.layout(microbatch, self.grid) for microbatch in microbatches]
        if loss is None:
            with torch.no_grad(), megatron_on(self.grid.world.device):
                self._run_schedule(forward, inputs, True)
        else:
            with self._watch.time(SCHEDULE), megatron_on(self.grid.world.device):
                self._run_schedule(forward, inputs, False)
        results = self._share_results(results, microbatches, 1 + entropy)[:number]
        if loss is not None and not self.grid.is_last:
            for i, results_BKE in enumerate(results):
                loss(i, results_BKE.requires_grad_())
        return [results_BKE.detach() for results_BKE in results]

    def _missing(self, number: int) -> list[Microbatch]:
        """Return the empty microbatches that an interleaved schedule needs: it runs them in groups of one per stage."""
        missing = -number % self.grid.stages if self.grid.chunks > 1 else 0
        return [collate([], [], self.grid.world.device)] * missing

    def _results(self, output: Tensor, inputs: StageInputs, entropy: bool) -> Tensor:
        """Return the results of this rank's targets (B, k, E) from what the output layer gives (B, k, V)."""
        logits = output.view(*inputs.targets.shape, -1)
        if self._gives_values:
            return logits
        return split_token_logprobs(logits, inputs.targets, inputs.temperature, self._vocabulary_part, entropy=entropy)

    def _run_schedule(self, forward: Any, inputs: Sequence[StageInputs], forward_only: bool) -> None:
        rows, positions = inputs[0].token_ids.shape
        self._schedule(
            forward_step_func=forward,
            data_iterator=[iter(enumerate(inputs)) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(inputs),
            seq_length=positions,  # with several stages each tensor is sent with its shape
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _share_results(self, results: list[Tensor], microbatches: Sequence[Microbatch], kinds: int) -> list[Tensor]:
        """Send the results of the last stage to the others; return them."""
        grid = self.grid
        if grid.stages == 1:
            return results
        sizes = [(*microbatch.targets_BK.shape, kinds) for microbatch in microbatches]
        numbers = [rows * positions * kinds for rows, positions, _ in sizes]
        flat = torch.empty(sum(numbers), dtype=torch.float32, device=grid.world.device)
        if grid.is_last:
            torch.cat([results_BKE.reshape(-1) for results_BKE in results], out=flat)
        source = grid.rank_of(grid.stages - 1, grid.copy, grid.tensor_rank)
        dist.broadcast(flat, source, group=grid.pipeline_group)
        return [part.view(size) for part, size in zip(flat.split(numbers), sizes, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call. Backward passes include waiting for stages."""
        seconds: dict[str, float] = self._watch.take()
        if SCHEDULE in seconds:
            inside = seconds.pop(FORWARD_INSIDE, 0.0)
            seconds["seconds_backward"] = seconds.pop(SCHEDULE) - inside
            seconds["seconds_forward"] = seconds.get("seconds_forward", 0.0) + inside
        return seconds


def _with_gradients(model: GPTModel) -> DistributedDataParallel:
    """Return the model with buffers for its gradients."""
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(model.config, buffers, model)
