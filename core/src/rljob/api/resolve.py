"""Expansion of a manifest: presets, defaults of governed fields, kinds of accelerators, and paths of models and data.

Paths are those of a user's machine, or job://PATH for files in the job's storage. Models may also be remote
(:mod:`rljob.api.model_address`).
"""

from __future__ import annotations

from pathlib import Path

from rljob.api.algorithm_presets import fill, uses_critic
from rljob.api.kubernetes import AcceleratorKind
from rljob.api.model_address import is_remote
from rljob.api.models import RLJob
from rljob.api.roles import Rollout, Trainer

DEFAULT_PROMPT = "{question}\n"
DEFAULT_EPISODE_PROMPT = "{observation}\n"
HELD_OUT_FRACTION = 0.1
CPU_MICROBATCH_TOKENS = 16_384
IN_STORAGE = "job://"


def resolve(job: RLJob, accelerator: AcceleratorKind = "cpu", profiles: bool = False) -> RLJob:
    """Return a copy of ``job`` in which every field that a preset or another field governs has its value.

    On GPUs `trainer.microbatchTokens` stays null: it follows from their memory, which the trainer knows
    (:mod:`rljob.api.memory_checks`). So a run can be resumed on GPUs of another size.

    Args:
        job: as loaded.
        accelerator: meaning of ``accelerator: {kind: auto}``: on one machine what the machine has, in a cluster the
            cluster setting.
        profiles: whether there are accelerator profiles, which only a cluster has: a role with one has accelerators.
    """
    resolved = job.model_copy(deep=True)
    roles: list[Trainer | Rollout] = [resolved.spec.trainer, *resolved.spec.rollouts]
    for role in roles:
        if role.accelerator.kind == "auto":
            role.accelerator.kind = "nvidia" if profiles and role.accelerator.profile is not None else accelerator
            if role.accelerator.kind == "cpu":
                role.accelerator.profile = None  # there are none
        if role.dtype is None:
            role.dtype = "bfloat16" if role.accelerator.kind == "nvidia" else "float32"
    trainer = resolved.spec.trainer
    if trainer.microbatch_tokens is None and trainer.accelerator.kind == "cpu":
        trainer.microbatch_tokens = CPU_MICROBATCH_TOKENS
    if resolved.spec.weight_sync.transport == "auto":
        on_gpus = all(role.accelerator.kind == "nvidia" for role in roles if role not in resolved.spec.frozen_pools)
        resolved.spec.weight_sync.transport = "nccl" if on_gpus else "gloo"
    fill(resolved.spec.algorithm)
    if trainer.critic_optimizer is None and uses_critic(resolved.spec.algorithm):
        trainer.critic_optimizer = trainer.optimizer.model_copy(deep=True)
    if resolved.spec.evaluation is not None and resolved.spec.evaluation.tasks is None:
        resolved.spec.evaluation.tasks = [task.name for task in resolved.spec.tasks]
    for task in resolved.spec.tasks:
        if task.group_filter.kind is None:
            task.group_filter.kind = resolved.spec.algorithm.group_filter
        if task.agent is None and task.prompt is None and task.messages is None and task.messages_column is None:
            task.prompt = DEFAULT_PROMPT if task.environment is None else DEFAULT_EPISODE_PROMPT
        for table in (task.data.jsonl, task.data.parquet):
            if table is not None and table.held_out_fraction is None:
                table.held_out_fraction = HELD_OUT_FRACTION if table.held_out_path is None else 0.0
        directory = task.data.datasets
        if directory is not None and directory.held_out_fraction is None:
            directory.held_out_fraction = HELD_OUT_FRACTION if directory.held_out_split is None else 0.0
    return resolved


def in_storage(text: str, storage: Path) -> str:
    """Return ``text`` with job://PATH replaced by its path in ``storage``."""
    return text.replace(IN_STORAGE, f"{storage}/")


def made_later(source: str) -> bool:
    """Return whether ``source`` may not exist before the run starts: the initializer or a download makes it."""
    return source.startswith(IN_STORAGE) or is_remote(source)


def with_absolute_paths(job: RLJob, base: Path) -> RLJob:
    """Return a copy of ``job`` in which relative paths of models and data are absolute, relative to ``base``.

    With absolute paths, processes and later runs find the same files from any working directory.
    """
    absolute = job.model_copy(deep=True)
    for model in absolute.spec.models:
        if not is_remote(model.source):
            model.source = _absolute(model.source, base)
    for task in absolute.spec.tasks:
        for table in (task.data.jsonl, task.data.parquet):
            if table is not None:
                table.path = _absolute(table.path, base)
                table.held_out_path = table.held_out_path and _absolute(table.held_out_path, base)
        if task.data.datasets is not None:
            task.data.datasets.path = _absolute(task.data.datasets.path, base)
    return absolute


def _absolute(path: str, base: Path) -> str:
    return path if path.startswith(IN_STORAGE) else str((base / path).absolute())
