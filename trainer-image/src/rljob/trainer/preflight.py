"""Checks before a trainer starts on this machine: fast, without importing torch, connecting or writing files.

Modules of a user are imported, with whatever they import.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from rljob.api.algorithm_presets import POLICY, frozen_models, other_kinds, uses_critic
from rljob.api.extensions import BACKENDS, load
from rljob.api.models import RLJobSpec
from rljob.api.resolve import made_later
from rljob.protocol.environment import ComponentEnvironment
from rljob.trainer import model_directory
from rljob.trainer.algorithms.needs import FROZEN, FUNCTIONS, needs_of
from rljob.trainer.backends.fsdp import lora_targets
from rljob.trainer.backends.megatron import supported_layouts


def check(environment: ComponentEnvironment) -> Iterator[str]:
    """Yield a sentence for each problem. A model that the initializer or a download has not made yet is not checked,
    nor is the model of a user's backend, because only the backend knows which models it can load."""
    spec = environment.job.spec
    yield from reference_problems(spec)
    loaded = {POLICY, *frozen_models(spec.algorithm).values(), spec.algorithm.critic_model}
    for i, model in enumerate(spec.models if spec.trainer.backend in BACKENDS else ()):
        if model.name not in loaded:  # of a frozen pool: its engines check it
            continue
        path = environment.path(model.source)
        if path.exists() or not made_later(model.source):
            yield from (f"spec.models[{i}].source: {problem}" for problem in model_directory.problems(path))
            if spec.trainer.backend == "megatron":
                yield from supported_layouts.problems(path, spec.trainer)
            if model.name == POLICY and spec.trainer.lora is not None:
                yield from lora_targets.problems(path, spec.trainer.lora)
    roles = {"the trainer": spec.trainer} | {f"pool {pool.name}": pool for pool in spec.policy_pools}
    on_cpu = [name for name, role in roles.items() if role.accelerator.kind != "nvidia"]
    if spec.weight_sync.transport == "nccl" and on_cpu:
        yield f"spec.weightSync.transport: nccl needs NVIDIA GPUs and {on_cpu[0]} runs on CPU; set auto or gloo"


def reference_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield a sentence for each reference of the algorithm and the backend to user code that cannot be used.

    Built-in names are not imported, because their import takes seconds; an optional library is only looked for.
    """
    if spec.trainer.backend == "megatron":
        yield from supported_layouts.library_problems()
    references = [
        (f"spec.algorithm.{to_camel(name)}", table, getattr(spec.algorithm, name)) for name, table in FUNCTIONS.items()
    ]
    for field, registry, value in [*references, ("spec.trainer.backend", BACKENDS, spec.trainer.backend)]:
        if value is None or value in registry:
            continue
        try:
            found = load(registry, value, field)
        except ValueError as error:
            yield str(error)
            continue
        if not callable(found):
            yield f"{field}: {value} is not callable; name a function or a class"
        elif needs_of(found).values and field != "spec.algorithm.advantage":
            yield f"{field}: {value} needs values of a critic, which only an advantage gets; remove the need"
        elif needs_of(found).values and not uses_critic(spec.algorithm):
            yield f"{field}: {value} needs a critic; name the model that it starts from in spec.algorithm.criticModel"
        else:
            yield from (
                f"{field}: {value} needs the {kind} model; name it in spec.algorithm.{named_in}"
                for kind, named_in in FROZEN.items()
                if getattr(needs_of(found), kind) and kind not in other_kinds(spec.algorithm)
            )
