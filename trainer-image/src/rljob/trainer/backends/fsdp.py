"""The FSDP2 backend: a transformers model sharded over the data-parallel ranks, and AdamW on the shards.

Parameters are float32 and sharded on their first dimension; forward and backward run in the job's dtype. AdamW is
elementwise, so it runs on the plain local shards. Weights and moments are loaded and saved as whole tensors under their
Hugging Face names, so no other module depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rljob.api.roles import Optimizer, Trainer
from rljob.trainer import model_directory
from rljob.trainer.backends.base import Loss, OptimizerUpdate, Output, SavedState
from rljob.trainer.batch import Microbatch
from rljob.trainer.checkpoint import read_optimizer_tensor, read_state
from rljob.trainer.errors import ModelError, UnrecoverableError
from rljob.trainer.logprobs import token_logprobs
from rljob.trainer.metrics import Stopwatch
from rljob.trainer.process_group import World

MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpBackend:
    """See :class:`rljob.trainer.backends.base.Backend`.

    Args:
        source: Hugging Face directory of the weights to start from.
        settings: the job's trainer.
        world: the ranks.

    Raises:
        ModelError: the directory has no causal language model that can be trained.
    """

    def __init__(self, source: Path, settings: Trainer, world: World) -> None:
        self.world = world
        self._settings = settings.optimizer
        self._mesh = init_device_mesh(world.device.type, (world.dp_size,))
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.model = _load(source)
        self.vocabulary: int = self.model.config.get_text_config().vocab_size
        _shard(self.model, self._mesh, self.dtype, world.dp_size)
        self._parameters: dict[str, DTensor] = dict(self.model.named_parameters())  # type: ignore[arg-type]
        self._local = {name: torch.nn.Parameter(p.to_local()) for name, p in self._parameters.items()}
        self._optimizer = _adamw(list(self._local.values()), self._settings)
        self.updates = 0  # also AdamW's step count
        self._watch = Stopwatch(world.device)

    def run(self, microbatches: Sequence[Microbatch], loss: Loss | None) -> list[Output]:
        """Run the microbatches through the model, one after the other; see :class:`Backend`."""
        if loss is None:
            with torch.no_grad(), self._watch.time("seconds_forward"):
                return [Output(self._logprobs(microbatch)) for microbatch in microbatches]
        outputs = []
        for i, microbatch in enumerate(microbatches):
            with self._watch.time("seconds_forward"):
                output = Output(self._logprobs(microbatch))
                share = loss(i, output)
            with self._watch.time("seconds_backward"):
                (share * self.world.dp_size).backward()  # FSDP averages gradients over ranks; the loss is a sum
            outputs.append(Output(output.logprobs_BK.detach()))
        return outputs

    def _logprobs(self, microbatch: Microbatch) -> Tensor:
        """Return the log-probabilities (B, K) of the targets. Padding is on the right: the causal mask hides it."""
        logits_BKV = self.model(
            input_ids=microbatch.token_ids_BL, use_cache=False, logits_to_keep=microbatch.keep_K
        ).logits
        return token_logprobs(logits_BKV, microbatch.targets_BK, microbatch.temperature_B)

    def update(self, step: int) -> OptimizerUpdate:
        """Clip the gradient, apply AdamW, clear the gradient.

        Args:
            step: training step, for the warm-up.

        Raises:
            UnrecoverableError: the gradient is not finite.
        """
        with self._watch.time("seconds_optimizer"):
            return self._update(step)

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent in each part since the last call."""
        return self._watch.take()

    def _update(self, step: int) -> OptimizerUpdate:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._local[name].grad = cast(DTensor, parameter.grad).to_local()
        norm = self._clip()
        rate = learning_rate(self._settings, step)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.model.zero_grad()
        self.updates += 1
        return OptimizerUpdate(norm, rate)

    def _clip(self) -> float:
        gradients = [local.grad for local in self._local.values() if local.grad is not None]
        norms = torch._foreach_norm([gradient.float() for gradient in gradients])
        norm = float(self.world.sum_over_data(torch.stack(norms).square().sum()).sqrt())
        if not norm < float("inf"):
            raise UnrecoverableError(f"the gradient norm is {norm}; lower the learning rate or check the rewards")
        if norm > self._settings.max_grad_norm:
            torch._foreach_mul_(gradients, self._settings.max_grad_norm / (norm + 1e-6))
        return norm

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter as a whole float32 tensor, by name; see :class:`Backend`."""
        for name, parameter in self._parameters.items():
            yield name, cast(DTensor, parameter.detach()).full_tensor()

    def save(self) -> SavedState:
        """Return the weights and AdamW's moments, named ``exp_avg.NAME`` and ``exp_avg_sq.NAME``."""
        first = self.world.rank == 0
        weights = {name: tensor.cpu().contiguous() for name, tensor in self.named_tensors() if first}
        moments = {name: tensor.cpu().contiguous() for name, tensor in self._named_moments() if first}
        return SavedState(weights, moments)

    def _named_moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            local = self._local[name]
            state = self._optimizer.state.get(local, {})
            for moment in MOMENTS:
                yield f"{moment}.{name}", _like(parameter, state.get(moment, torch.zeros_like(local))).full_tensor()

    def load(self, checkpoint: Path) -> None:
        """Load the moments and the number of updates of a checkpoint."""
        self.updates = read_state(checkpoint).updates
        for name, parameter in self._parameters.items():
            moments = {
                moment: distribute_tensor(
                    read_optimizer_tensor(checkpoint, f"{moment}.{name}").to(parameter.device),
                    self._mesh,
                    parameter.placements,
                    src_data_rank=None,  # every rank has read the file, so no rank sends
                ).to_local()
                for moment in MOMENTS
            }
            count = torch.tensor(float(self.updates), dtype=torch.float32)
            self._optimizer.state[self._local[name]] = {"step": count, **moments}


def learning_rate(settings: Optimizer, step: int) -> float:
    """Return the learning rate of a 0-based training step: linear warm-up, then constant."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def _load(source: Path) -> PreTrainedModel:
    found = list(model_directory.problems(source))
    if found:
        raise ModelError("; ".join(found))
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except ValueError as error:
        raise ModelError(f"{source} cannot be loaded ({str(error).splitlines()[0]}); take another model") from error
    model, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(map(str, report[problem]))[:3])
            raise ModelError(f"{source}: {problem.replace('_', ' ')} ({names}); the weights do not fit config.json")
    model.eval()  # no dropout: the trained policy must be the sampled policy
    return model


def _shard(model: PreTrainedModel, mesh: Any, dtype: torch.dtype, size: int) -> None:
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": size > 1}
    blocks = set(model._no_split_modules or [])
    for module in [module for module in model.modules() if type(module).__name__ in blocks]:
        fully_shard(module, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)


def _adamw(parameters: list[torch.nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=True,
    )


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
