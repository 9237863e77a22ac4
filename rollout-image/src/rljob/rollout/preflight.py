"""Checks whether the engines of a job can start on this machine. Starts no engine and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rljob.api.models import RLJobSpec
from rljob.api.resolve import made_later
from rljob.api.roles import Rollout
from rljob.protocol.environment import ComponentEnvironment
from rljob.rollout.adapters.base import Adapter
from rljob.rollout.adapters.load_adapter import load_adapter, serving
from rljob.rollout.model_config import longest_sequence


def check(environment: ComponentEnvironment) -> Iterator[str]:
    """Yield one ``field: sentence`` for each problem of the pool that the environment names, or of all pools.

    Problems of a model itself are left to the trainer's check; a model that does not exist yet is not checked.
    """
    spec = environment.job.spec
    for i, pool in enumerate(spec.rollouts):
        if environment.name not in ("", pool.name):
            continue
        model = environment.path(next(model.source for model in spec.models if model.name == pool.model))
        try:
            adapter = load_adapter(spec, i, model)
            if pool.frozen:
                serving(adapter, spec, i)
                yield from _stored(spec, pool, model)
        except ValueError as error:
            yield str(error)
            continue
        try:
            yield from [
                *(_in_flight(spec, pool, adapter) if not pool.frozen else ()),
                *(f"spec.rollouts[{i}].{text}" for text in adapter.problems()),
            ]
        except (Exception, SystemExit) as error:  # noqa: BLE001 a user's adapter may raise anything
            yield (
                f"spec.rollouts[{i}].engine: in_flight or problems() of {pool.engine} raised {type(error).__name__}: "
                f"{error}; correct the adapter"
            )
        yield from (f"spec.rollouts[{i}].{problem}" for problem in _length(pool, model))


def _in_flight(spec: RLJobSpec, pool: Rollout, adapter: Adapter) -> Iterator[str]:
    mode = spec.weight_sync.in_flight
    if mode not in adapter.in_flight:
        yield (
            f"spec.weightSync.inFlight: engine {pool.engine} of pool {pool.name} does not support {mode}; set "
            f"{' or '.join(sorted(adapter.in_flight))}"
        )


def _stored(spec: RLJobSpec, pool: Rollout, model: Path) -> Iterator[str]:
    """Check that a frozen pool's model exists, if neither the initializer nor a download makes it. The trainer
    checks the models that it loads."""
    j, entry = next((j, entry) for j, entry in enumerate(spec.models) if entry.name == pool.model)
    if (model.exists() or not made_later(entry.source)) and not (model / "config.json").is_file():
        yield (
            f"spec.models[{j}].source: {model} holds no Hugging Face model (config.json is missing); give a directory "
            "that does"
        )


def _length(pool: Rollout, model: Path) -> Iterator[str]:
    positions = longest_sequence(model)
    if positions is not None and pool.max_model_length > positions:
        yield (
            f"maxModelLength: {pool.max_model_length} is more than the {positions} positions of {model} "
            "(max_position_embeddings); lower it"
        )
