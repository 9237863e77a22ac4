"""What would keep the engines of a job from starting on this machine; no engine is started and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljob.api.roles import Rollout
from rljob.protocol.environment import ComponentEnvironment
from rljob.rollout.adapters import ADAPTERS


def check(environment: ComponentEnvironment) -> Iterator[str]:
    """Yield one sentence for everything that is wrong with the pool that the environment names, or with all.

    What is wrong with a model itself the trainer's check says; one that is not there yet is left out.
    """
    spec = environment.job.spec
    for i, pool in enumerate(spec.rollouts):
        if environment.name not in ("", pool.name):
            continue
        model = environment.path(next(model.source for model in spec.models if model.name == pool.model))
        found = [*ADAPTERS[pool.engine](pool, model).problems(), *_length(pool, model)]
        yield from (f"spec.rollouts[{i}].{problem}" for problem in found)


def _length(pool: Rollout, model: Path) -> Iterator[str]:
    positions = longest_sequence(model)
    if positions is not None and pool.max_model_length > positions:
        yield (
            f"maxModelLength: {pool.max_model_length} is more than the {positions} positions of {model} "
            "(max_position_embeddings); lower it"
        )


def longest_sequence(model: Path) -> int | None:
    """Return the positions a model was made for; None where config.json does not say, or stretches them."""
    try:
        configuration = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    text: Any = configuration.get("text_config", configuration) if isinstance(configuration, dict) else None
    if not isinstance(text, dict):
        return None
    stretched = (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("factor")
    positions = text.get("max_position_embeddings")
    return positions if isinstance(positions, int) and stretched is None else None
