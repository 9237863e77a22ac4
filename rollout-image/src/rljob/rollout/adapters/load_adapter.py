"""Loads the adapter that a pool of the manifest names."""

from __future__ import annotations

from pathlib import Path

from rljob.api.extensions import ENGINES, load
from rljob.api.models import RLJobSpec
from rljob.rollout.adapters.base import Adapter, ServingAdapter

ATTRIBUTES = ("problems", "launch", "connect", "find_error", "in_flight")


def load_adapter(spec: RLJobSpec, index: int, model: Path) -> Adapter:
    """Return the adapter of pool ``index`` of ``rollouts``.

    Args:
        spec: of the job, resolved.
        index: of the pool.
        model: directory of the model that its servers start with.

    Raises:
        ValueError: the reference cannot be loaded, or does not name an adapter.
    """
    pool, field = spec.rollouts[index], f"spec.rollouts[{index}].engine"
    factory = load(ENGINES, pool.engine, field)
    try:
        adapter: Adapter = factory(pool, model)
    except (Exception, SystemExit) as error:  # a user's class may raise anything; it is an error of the manifest
        raise ValueError(
            f"{field}: {pool.engine} cannot be called with (pool, model) ({type(error).__name__}: {error}); name the "
            "class of an engine adapter"
        ) from error
    missing = [name for name in ATTRIBUTES if not hasattr(adapter, name)]
    if missing:
        raise ValueError(
            f"{field}: {pool.engine} is not an engine adapter, it has no {' and no '.join(missing)}; see "
            "rljob.rollout.adapters.base"
        )
    return adapter


def serving(adapter: Adapter, spec: RLJobSpec, index: int) -> ServingAdapter:
    """Return the adapter of frozen pool ``index``, whose engine can serve a model to rewards.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(adapter, ServingAdapter):
        return adapter
    raise ValueError(
        f"spec.rollouts[{index}].engine: {spec.rollouts[index].engine} cannot serve a model to rewards (its adapter "
        "has no launch_frozen); set vllm"
    )
